"""The abilities of the engine `cublasmp`.

The estimate of a way is::

    seconds = multiply + exposed * moved by the library / bandwidth + redistribution + fixed
    multiply       = max over ranks of flops / rate
    redistribution = max over ranks of  received / bandwidth + outside / Dask's bandwidth + copied / memory bandwidth

where `exposed` is the share of the library's own transfers that its method does not hide, as measured, and `outside`
what a rank fetches over Dask's own connections, from workers that are not ranks and so have no communicator.

cuBLASMp 0.10 has epilogs on its tuned all-gather and reduce-scatter paths only, where they save a pass over D: the
activations relu and gelu, a bias of one value for each row of the matrix that it computes, and both. That matrix is D
where D's tiles are in F order and the transpose of D where they are in C order (see `tiles`): so a value for each
column of D is native to an all-gather of A and to a reduce-scatter into rows, a value for each row to the others.
Factors of the product are native to every method.

Not all that the library offers is as good as the engine's own kernel (measured, docs/gpu-validation.md): its gelu of
float64 is off by up to 3e-10, and its all-gather with 16-bit types rounds the product before it adds a bias or applies
gelu. These are not left to it. And where extents of 16-bit matrices are not multiples of 16 bytes, its all-gather and
SUMMA may round parts of the sums (see `tiles`), as SUMMA does after each panel of k wherever there are several: there
it returns D in the type that is summed in, and does no epilog.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import ChunkGrid, redistribution
from dask_distmm.numeric.types import dtype_from_name, takes_on_gpus
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.cublasmp.tiles import HALVES_STEP, Tile, Tiles, blocks_misfit, make_tiles, slab_step
from dask_distmm.planning.cuts import by_rows, chunk_owners, padded, slowdown, uniform_cut
from dask_distmm.planning.engines import Abilities
from dask_distmm.planning.footprint import chunk_bytes, spread, upload_seconds
from dask_distmm.planning.library_epilogs import library_epilog
from dask_distmm.planning.placement import Estimate, everywhere, match_ranks
from dask_distmm.planning.plan import Packing, Plan
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.situation import Situation, Way

# The part of a plan's formula that cuBLASMp does itself, inside of a multiply. Pure


def native_epilog(plan: Plan, tiles: Tiles | None = None) -> str | None:
    """Return the epilog that cuBLASMp does, ``""`` for a factor only; None where it can't do all of the formula."""
    if len(plan.ranks) == 1:
        return None
    formula, found = plan.problem.formula, library_epilog(plan.problem)
    if found is None or _rounds_parts(plan, tiles):
        return None
    if not found:
        return found
    if plan.method not in ("allgather", "reducescatter"):
        return None
    dtype = plan.problem.result_type
    if dtype.itemsize == 2 and plan.method == "allgather" and formula.epilog != "relu":
        return None
    if "bias" in formula.inputs:
        by_rows = not (tiles or make_tiles(plan)).flipped
        rows, cols = (sum(sizes) for sizes in plan.problem.chunks_of("bias"))
        if (rows, cols) != ((plan.problem.m, 1) if by_rows else (1, plan.problem.n)):
            return None
    return found


def returned_type(plan: Plan, tiles: Tiles | None = None) -> np.dtype:
    """Return the type in which cuBLASMp returns D: its own, or the one that is summed in if more is done to it."""
    if _rounds_parts(plan, tiles):
        return plan.problem.compute_type
    return plan.problem.sum_type if native_epilog(plan, tiles) is None else plan.problem.result_type


def own_kernel(plan: Plan, tiles: Tiles | None = None) -> bool:
    """Whether what cuBLASMp returns is finished, or rounded, by the engine's own kernel."""
    return native_epilog(plan, tiles) is None and (plan.problem.finished or _rounds_parts(plan, tiles))


def _rounds_parts(plan: Plan, tiles: Tiles | None) -> bool:
    """Whether the library might add up parts of k in a 16-bit D."""
    if len(plan.ranks) == 1 or plan.method not in ("allgather", "summa"):
        return False
    if plan.problem.result_type.itemsize != 2 or plan.problem.result_type.kind in "iu":
        return False
    found = tiles or make_tiles(plan)
    if plan.method == "summa" and found.a.layout.blocks[1] < plan.problem.k:
        return True
    lengths = [x for tile in (found.a, found.b, found.d) for x in (*tile.shape, *tile.layout.blocks)]
    return any(length % HALVES_STEP for length in lengths)


def all_reduced(plan: Plan) -> bool:
    """Whether a plan's multiply itself leaves all of D, as it will be stored, on every rank."""
    return plan.method == "allreduce" and len(plan.ranks) > 1 and not own_kernel(plan)


# The abilities of the engine `cublasmp`


# Ways to run a problem with a collective library on GPUs: cuts, who is which rank, estimate and memory. Pure


# cuBLASMp 0.10's own buffers beside the matrices that it gathers: as its log and buffer sizes say.
_LIBRARY_BYTES = 96 * 2**20
_SUMMA_BYTES = 32 * 2**20
# Latency of a run of several ranks beside its work, in messages: as two H200 took for small products.
_MESSAGES = 8
# A new communicator takes about this long (seconds, spread over the runs that will use it).
_NEW_GROUP_SECONDS = 0.05
_Elements = NDArray[np.float64]


def has_method(problem: Problem, method: str) -> bool:
    """Whether the library runs a problem in a certain way: it has no SUMMA for FP8."""
    return not (problem.fp8 and method == "summa")


def consider(problem: Problem, situation: Situation, engine: str, way: Way) -> Plan:
    """Return the plan that runs `problem` in one certain way, with its estimate and its memory."""
    (method, grid), participants = way, situation.participants
    step = slab_step(problem)
    rows, cols, depth = (
        uniform_cut(length, parts, step) for length, parts in zip((problem.m, problem.n, problem.k), grid, strict=True)
    )
    nranks = (len(rows) - 1) * (len(cols) - 1) * (len(depth) - 1)
    if nranks == 1:
        method = "local"
    d_cuts = None
    if method == "reducescatter":
        rowwise = by_rows(problem, problem.m >= problem.n)
        size = padded(problem.m if rowwise else problem.n, step, nranks)
        slabs = tuple(min(i * size, problem.m if rowwise else problem.n) for i in range(nranks + 1))
        d_cuts = (slabs, (0, problem.n)) if rowwise else ((0, problem.m), slabs)
    made = Plan(
        problem=problem,
        engine=engine,
        method=method,
        participants=participants,
        ranks=tuple(range(nranks)),
        rows=rows,
        cols=cols,
        depth=depth,
        owners=chunk_owners(problem, method, d_cuts or (rows, cols), nranks),
        where=situation.where,
        packing=Packing(),
        order_a=situation.orders[0],
        order_b=situation.orders[1],
        d_cuts=d_cuts,
    )
    tiles = make_tiles(made)
    held_a = _held(problem.a_chunks, situation.where.get("a"), tiles.a, len(participants)) * problem.itemsize("a")
    held_b = _held(problem.b_chunks, situation.where.get("b"), tiles.b, len(participants)) * problem.itemsize("b")
    ranks = _ranks(made, (held_a + held_b)[: len(situation.roster)], situation.groups)
    made = dataclasses.replace(made, ranks=ranks)
    moved = _Moved(made, tiles, held_a, held_b)
    made.projected_bytes.update(_project(made, tiles, moved))
    return dataclasses.replace(made, estimate=_estimate(made, tiles, moved))


def _held(chunks: Chunks, where: NDArray[np.int32] | None, tile: Tile, npart: int) -> _Elements:
    """Elements of each rank's tile (columns) that each participant (rows) has."""
    if where is None or everywhere(where):
        needed = np.array([np.prod(tile.layout.local_shape(rank)) for rank in range(tile.layout.nparts)], float)
        return np.broadcast_to(needed / (npart if where is None else 1), (npart, len(needed)))
    return redistribution(ChunkGrid(chunks), tile.layout).traffic(where, npart).astype(float)


def _ranks(made: Plan, held: _Elements, groups: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Match ranks to workers so that most bytes lie right; a group that exists already saves making one."""
    best = tuple(match_ranks(-held.T))
    machine = made.problem.options.machine(made.engine)
    number = {w.address: index for index, w in enumerate(made.participants[: len(held)])}
    at_home = held[list(best), range(len(best))].sum()
    worth = _NEW_GROUP_SECONDS * machine.bandwidth * len(best)
    known = [
        order
        for group in groups
        if len(group) == len(best) and all(address in number for address in group)
        for order in [tuple(number[address] for address in group)]
        if at_home - held[list(order), range(len(order))].sum() < worth
    ]
    return max(known, key=lambda order: held[list(order), range(len(order))].sum(), default=best)


class _Moved:
    """Bytes that each participant sends and receives to make A's and B's tiles and D's chunks."""

    def __init__(self, made: Plan, tiles: Tiles, held_a: _Elements, held_b: _Elements) -> None:
        problem, ranks = made.problem, list(made.ranks)
        self.operands = []
        # Of what each rank receives, the bytes from workers that are not ranks.
        self.outside: _Elements = np.zeros(len(ranks))
        for held, where in ((held_a, made.where.get("a")), (held_b, made.where.get("b"))):
            sent, received = np.zeros(len(made.participants)), np.zeros(len(made.participants))
            self.operands.append((sent, received))
            if everywhere(where):
                continue
            sent += held.sum(axis=1)
            at_home, needed = held[ranks, range(len(ranks))], held.sum(axis=0)
            sent[ranks] -= at_home
            received[ranks] = needed - at_home
            self.outside += needed - held[ranks].sum(axis=0)
        self.d_sent: _Elements = np.zeros(len(ranks))
        self.d_received: _Elements = self.d_sent
        if not tiles.replicated:
            owned = redistribution(ChunkGrid(problem.out_chunks), tiles.d.layout).traffic(made.owners, len(ranks))
            owned = owned.astype(float) * returned_type(made, tiles).itemsize
            self.d_received = np.asarray(owned.sum(axis=1) - np.diagonal(owned), float)
            self.d_sent = np.asarray(owned.sum(axis=0) - np.diagonal(owned), float)

    @property
    def total(self) -> int:
        """All bytes together."""
        return int(sum(received.sum() for _, received in self.operands) + self.d_received.sum())


def tile_chunk(tile: Tile, rank: int, chunks: Chunks) -> int | None:
    """Return the number of the chunk that is exactly a rank's tile, as it is, or None if no single one is."""
    shape = tile.layout.local_shape(rank)
    if tile.local(rank) != shape or 0 in shape or tile.conjugated:
        return None
    index = 0
    for axis, part, sizes in zip((tile.layout.rows, tile.layout.cols), tile.layout.coords(rank), chunks, strict=True):
        segments = axis.local_to_global(part)
        edges = np.concatenate([[0], np.cumsum(sizes)])
        if len(segments) != 1:
            return None
        start, _, size = segments[0]
        stop = start + size
        at = int(np.searchsorted(edges[1:], start, side="right"))
        if at >= len(sizes) or edges[at] != start or edges[at + 1] != stop:
            return None
        index = index * len(sizes) + at
    return index


def _given(problem: Problem) -> dict[str, int]:
    """Return the bytes of an element of A and B as the library is given them."""
    return {op: dtype_from_name(name).itemsize for op, name in zip("ab", problem.matrix_types, strict=True)}


def _rate(problem: Problem) -> str:
    """Return the name of the rate at which a problem is multiplied."""
    return problem.compute or ("float8" if problem.fp8 else problem.matrix_types[0])


def workspace_bytes(plan: Plan, tiles: Tiles) -> int:
    """Estimate the workspace that cuBLASMp 0.10 asks for, in bytes."""
    problem, q, given = plan.problem, plan.grid[1], _given(plan.problem)
    if plan.method == "local":
        return 0
    if plan.method == "allgather":
        gathered, item = (tiles.b, given["b"]) if q == 1 else (tiles.a, given["a"])
        copies = 1 if gathered.order == tiles.d.order else 2
        return int(np.prod(gathered.shape)) * item * copies + _LIBRARY_BYTES
    accumulated = problem.compute_type.itemsize
    if plan.method == "allreduce":
        return 2 * problem.m * problem.n * accumulated + _LIBRARY_BYTES
    if plan.method == "reducescatter":
        return int(np.prod(tiles.d.shape)) * (accumulated + problem.sum_type.itemsize) + _LIBRARY_BYTES
    (mb, kb), nb = tiles.a.layout.blocks, tiles.b.layout.blocks[1]
    return 2 * (mb * kb * given["a"] + kb * nb * given["b"]) + _SUMMA_BYTES


def _project(made: Plan, tiles: Tiles, moved: _Moved) -> dict[str, int]:
    """Return the projected bytes of device memory that a run holds at its peak, for each participant.

    Counted are chunks of A and B, tiles that are not chunks already, buffers of what is sent and received, the
    library's workspace, D's tile and D's chunks.
    """
    problem, npart = made.problem, len(made.participants)
    total = np.zeros(npart)
    for operand in "a" if problem.shared else "ab":
        total += spread(made, operand, chunk_bytes(problem, operand))
    # A's buffers are free again before B's are needed.
    total += np.max([sent + received for sent, received in moved.operands], axis=0)
    workspace = workspace_bytes(made, tiles)
    # Where these lie is not looked at.
    total += sum(float(chunk_bytes(problem, extra.name).sum()) for extra in problem.extras) * 2 / npart
    # The library stores what it has finished itself; else sums are kept until they are finished.
    kept, sums = own_kernel(made, tiles), returned_type(made, tiles).itemsize
    owned = np.bincount(made.owners, chunk_bytes(problem, "d"), len(made.ranks))
    given = _given(problem)
    for operand in "ab":
        if given[operand] != problem.itemsize(operand):
            # Chunks are converted first.
            total += spread(made, operand, chunk_bytes(problem, operand) // problem.itemsize(operand) * given[operand])
    for rank, index in enumerate(made.ranks):
        for operand, tile, chunks in (("a", tiles.a, problem.a_chunks), ("b", tiles.b, problem.b_chunks)):
            if tile_chunk(tile, rank, chunks) is None:
                total[index] += np.prod(tile.local(rank)) * given[operand]
        total[index] += np.prod(tiles.d.local(rank)) * sums + workspace
        if kept:
            total[index] += owned[rank] * (sums / problem.itemsize("d") + bool(problem.formula.saved))
        if tile_chunk(tiles.d, rank, problem.out_chunks) is None or tiles.replicated:
            total[index] += owned[rank] + moved.d_sent[rank] + moved.d_received[rank]
    return {worker.address: int(total[i]) for i, worker in enumerate(made.participants)}


def _estimate(made: Plan, tiles: Tiles, moved: _Moved) -> Estimate:
    """Apply the formulas at the top of this module."""
    problem, machine = made.problem, made.problem.options.machine(made.engine)
    nranks, (p, q, _) = len(made.ranks), made.grid
    hosts = {made.participants[index].host for index in made.ranks}
    bandwidth = machine.bandwidth if len(hosts) == 1 else machine.network_bandwidth or machine.bandwidth
    a_bytes, b_bytes, d_bytes = (
        float(np.prod(tile.shape)) * size
        # The library's reduce-scatter sums in the type that is computed in.
        for size, tile in zip(
            (*_given(problem).values(), problem.compute_type.itemsize), (tiles.a, tiles.b, tiles.d), strict=True
        )
    )
    share = (nranks - 1) / nranks
    library = {
        "local": 0.0,
        "allgather": share * (b_bytes if q == 1 else a_bytes),
        "reducescatter": share * d_bytes,
        "allreduce": 2 * share * problem.m * problem.n * problem.sum_type.itemsize,
        "summa": a_bytes / p * (q - 1) / q + b_bytes / q * (p - 1) / p,
    }[made.method]
    # Slabs of equal size: the largest decides.
    uneven = float(
        np.prod([np.diff(cut).max() * (len(cut) - 1) / cut[-1] for cut in (made.rows, made.cols, made.depth)])
    )
    compute = problem.flops * uneven / nranks / machine.rate(_rate(problem))
    if slab_step(problem) == 1 or made.method == "summa":
        # Chunks have been put together to tiles, without padding.
        compute *= slowdown(problem, in_chunks=False)
    ranks = list(made.ranks)
    inside = sum((received[ranks] for _, received in moved.operands), -moved.outside)
    redistributed = inside / bandwidth + moved.outside / (machine.dask_bandwidth or bandwidth)
    received = redistributed.max() + moved.d_received.max() / bandwidth
    copied = 0.0
    for operand, tile, chunks in (
        ("a", tiles.a, problem.a_chunks),
        ("b", tiles.b, problem.b_chunks),
        ("d", tiles.d, problem.out_chunks),
    ):
        if any(tile_chunk(tile, rank, chunks) is None for rank in range(nranks)):
            copied += 2.0 * max(float(np.prod(tile.local(rank))) for rank in range(nranks)) * problem.itemsize(operand)
    if own_kernel(made, tiles):
        # One kernel reads the sums and writes D.
        sizes = problem.compute_type.itemsize + problem.itemsize("d") * (2 if problem.formula.saved else 1)
        copied += max(float(np.prod(tiles.d.local(rank))) for rank in range(nranks)) * sizes
    exposed = dict(machine.exposed).get(made.method, 1.0)
    transfer = exposed * library / bandwidth + received + copied / machine.memory_bandwidth + upload_seconds(made)
    return Estimate(
        method=made.method,
        grid=made.grid,
        seconds=compute + transfer + (_MESSAGES if nranks > 1 else 2) * machine.latency,
        compute_seconds=compute,
        transfer_seconds=transfer,
        bytes_moved=moved.total + int(library * nranks),
        peak_bytes=max(made.projected_bytes.values()),
    )


# The abilities of the engine `cublasmp`


CUBLASMP = Abilities(
    "cublasmp",
    "dask_distmm.engines.cublasmp.engine",
    takes_on_gpus,
    on_gpus=True,
    collective=True,
    keeps=True,
    encrypted=False,
    minds_order=True,
    library="cuBLASMp",
    has_method=has_method,
    consider=consider,
    native_epilog=native_epilog,
    all_reduced=all_reduced,
    tiles=make_tiles,
    misfit=blocks_misfit,
)
