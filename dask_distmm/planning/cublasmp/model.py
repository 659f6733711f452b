"""The model of the engine `cublasmp`: a multiply by the library between two redistributions. Pure.

`exposed` in the configuration is the share of the library's own transfers that its method does not hide, as measured.

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

import functools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Axis, Layout, redistribution
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.cublasmp.tiles import HALVES_STEP, Tile, Tiles, blocks_misfit, make_tiles, slab_step
from dask_distmm.planning.cuts import Candidate, Cuts, by_rows, chunk_edges, padded, slowdown, uniform_cut
from dask_distmm.planning.footprint import Needs, chunk_bytes, held_operands, multiplied_sizes, multiply_rate, uploaded
from dask_distmm.planning.model import EngineModel, Phase, Work
from dask_distmm.planning.placement import everywhere
from dask_distmm.planning.plan import Plan, once
from dask_distmm.planning.problem import Problem, library_epilog

# The part of a plan's formula that cuBLASMp does itself, inside of a multiply. Pure


def returned_type(plan: Plan) -> np.dtype:
    """Return the type in which cuBLASMp returns D: its own, or the one that is summed in if more is done to it."""
    if _rounds_parts(plan):
        return plan.problem.compute_type
    return plan.problem.sum_type if CUBLASMP.native_epilog(plan) is None else plan.problem.result_type


def own_kernel(plan: Plan) -> bool:
    """Whether what cuBLASMp returns is finished, or rounded, by the engine's own kernel."""
    return CUBLASMP.native_epilog(plan) is None and (plan.problem.finished or _rounds_parts(plan))


def _rounds_parts(plan: Plan) -> bool:
    """Whether the library might add up parts of k in a 16-bit D."""
    if len(plan.ranks) == 1 or plan.method not in ("allgather", "summa"):
        return False
    if plan.problem.result_type.itemsize != 2 or plan.problem.result_type.kind in "iu":
        return False
    found = make_tiles(plan)
    if plan.method == "summa" and found.a.layout.blocks[1] < plan.problem.k:
        return True
    lengths = [x for tile in (found.a, found.b, found.d) for x in (*tile.shape, *tile.layout.blocks)]
    return any(length % HALVES_STEP for length in lengths)


# cuBLASMp 0.10's own buffers beside the matrices that it gathers: as its log and buffer sizes say.
_LIBRARY_BYTES = 96 * 2**20
_SUMMA_BYTES = 32 * 2**20
_Bytes = NDArray[np.float64]
# Latency of a run of several ranks beside its work, in messages: as two H200 took for small products.
_MESSAGES = 8


@once
def _moved(plan: Plan, needs: Mapping[str, Needs]) -> tuple[list[_Bytes], _Bytes, _Bytes, _Bytes, _Bytes]:
    """Return the bytes that make A's and B's tiles, and D's chunks.

    What each participant sends and receives of A, and of B; what each rank receives of both, and how much of that comes
    from workers that are not ranks, which have no communicator, and send by Dask's own connections; what each rank
    sends of D, and receives.
    """
    ranks, buffers = list(plan.ranks), [np.zeros(len(plan.participants))]
    received, outside, sent_of_d, received_of_d = (np.zeros(len(ranks)) for _ in range(4))
    for operand, (needed, held) in needs.items():
        if everywhere(plan.where.get(operand)):
            continue
        home = held[ranks, range(len(ranks))]
        buffers.append(held.sum(axis=1))
        buffers[-1][ranks] += needed - 2 * home
        received += needed - home
        outside += needed - held[ranks].sum(axis=0)
    if not make_tiles(plan).replicated:
        chunks = redistribution(Layout.of_chunks(plan.problem.out_chunks), make_tiles(plan).d.layout)
        owned = chunks.traffic(plan.owners, len(ranks)) * float(returned_type(plan).itemsize)
        sent_of_d, received_of_d = (owned.sum(axis=axis) - np.diagonal(owned) for axis in (0, 1))
    return buffers, received, outside, sent_of_d, received_of_d


def tile_chunk(tile: Tile, rank: int, chunks: Chunks) -> int | None:
    """Return the number of the chunk that is exactly a rank's tile, as it is stored, or None if no single one is."""
    (rows, cols), (i, j) = tile.layout.local_shape(rank), tile.layout.grid.coords(rank)
    if tile.local(rank) != (rows, cols) or 0 in (rows, cols) or tile.conjugated:
        return None
    numbers = zip((tile.layout.rows, tile.layout.cols), chunks, (i, j), strict=True)
    row, col = (_chunk_numbers(axis, sizes)[part] for axis, sizes, part in numbers)
    return None if min(row, col) < 0 else row * len(chunks[1]) + col


@functools.lru_cache(maxsize=64)
def _chunk_numbers(axis: Axis, sizes: tuple[int, ...]) -> list[int]:
    """Return for each part of an axis the number of the chunk that is the same range, -1 where none is."""
    edges, found = chunk_edges(sizes), np.full(axis.nparts, -1)
    start, stop = axis.bounds[:-1], axis.bounds[1:]
    at = edges[1:].searchsorted(start, "right").clip(max=len(sizes) - 1)
    alone = np.bincount(axis.part, minlength=axis.nparts)[axis.part] == 1
    same = alone & (edges[at] == start) & (edges[at + 1] == stop)
    found[axis.part[same]] = at[same]
    numbers: list[int] = found.tolist()
    return numbers


@once
def _loose(plan: Plan) -> dict[str, NDArray[np.bool_]]:
    """Return for A, B and D whether each rank's tile is anything but one chunk as it is stored."""
    found = {}
    for name in "abd":
        tile: Tile = getattr(make_tiles(plan), name)
        axes = zip((tile.layout.rows, tile.layout.cols), plan.problem.chunks_of(name), strict=True)
        chunks = np.logical_and.outer(*(np.array(_chunk_numbers(*axis)) >= 0 for axis in axes)).ravel()
        found[name] = ~chunks | (tile.layout.elements != tile.elements) | tile.conjugated
    return found


def workspace_bytes(plan: Plan, tiles: Tiles) -> int:
    """Estimate the workspace that cuBLASMp 0.10 asks for, in bytes."""
    problem, q, (a_size, b_size) = plan.problem, plan.grid[1], multiplied_sizes(plan.problem)
    if plan.method == "local":
        return 0
    if plan.method == "allgather":
        gathered, item = (tiles.b, b_size) if q == 1 else (tiles.a, a_size)
        copies = 1 if gathered.order == tiles.d.order else 2
        return math.prod(gathered.shape) * item * copies + _LIBRARY_BYTES
    accumulated = problem.compute_type.itemsize
    if plan.method == "allreduce":
        return 2 * problem.m * problem.n * accumulated + _LIBRARY_BYTES
    if plan.method == "reducescatter":
        return math.prod(tiles.d.shape) * (accumulated + problem.sum_type.itemsize) + _LIBRARY_BYTES
    (mb, kb), nb = tiles.a.layout.blocks, tiles.b.layout.blocks[1]
    return int(2 * (mb * kb * a_size + kb * nb * b_size)) + _SUMMA_BYTES


class CublasmpModel(EngineModel):
    """The model of the engine."""

    def has_method(self, problem: Problem, method: str) -> bool:
        """Whether the library runs a problem in a certain way: it has no SUMMA for FP8."""
        return not (problem.fp8 and method == "summa")

    def cuts(self, problem: Problem, candidate: Candidate) -> list[Cuts]:
        """Return slabs of one size."""
        (method, grid), step = candidate, slab_step(problem)
        extents = zip((problem.m, problem.n, problem.k), grid, strict=True)
        rows, cols, depth = (uniform_cut(length, parts, step) for length, parts in extents)
        if method != "reducescatter" or len(depth) == 2:
            return [(rows, cols, depth, None)]
        rowwise, nranks = by_rows(problem, problem.m >= problem.n), len(depth) - 1
        length = problem.m if rowwise else problem.n
        slabs = tuple(min(i * padded(length, step, nranks), length) for i in range(nranks + 1))
        return [(rows, cols, depth, (slabs, (0, problem.n)) if rowwise else ((0, problem.m), slabs))]

    def tiles(self, plan: Plan) -> Tiles:
        """Return the tiles of A, B and D."""
        return make_tiles(plan)

    def misfit(self, problem: Problem, grid: tuple[int, int, int]) -> str | None:
        """Return why SUMMA can't have the blocks that were asked for, or None."""
        return blocks_misfit(problem, grid)

    def native_epilog(self, plan: Plan) -> str | None:
        """Return the epilog that cuBLASMp does, ``""`` for only a factor; None where it can't do all of the formula."""
        formula, found = plan.problem.formula, library_epilog(plan.problem)
        if len(plan.ranks) == 1 or found is None or _rounds_parts(plan):
            return None
        if not found:
            return found
        if plan.method not in ("allgather", "reducescatter"):
            return None
        if plan.problem.result_type.itemsize == 2 and plan.method == "allgather" and formula.epilog != "relu":
            return None
        if "bias" in formula.inputs:
            shape = tuple(map(sum, plan.problem.chunks_of("bias")))
            if shape != ((1, plan.problem.n) if make_tiles(plan).flipped else (plan.problem.m, 1)):
                return None
        return found

    def all_reduced(self, plan: Plan) -> bool:
        """Whether the multiply itself leaves all of D, as it will be stored, on every rank."""
        return plan.method == "allreduce" and len(plan.ranks) > 1 and not own_kernel(plan)

    def memory(self, plan: Plan, needs: Mapping[str, Needs]) -> _Bytes:
        """Return the bytes of device memory that each participant holds at most.

        Counted are chunks of A and B, tiles that are not chunks already, buffers of what is sent and received, the
        library's workspace, D's tile and D's chunks.
        """
        problem, npart, tiles = plan.problem, len(plan.participants), make_tiles(plan)
        (buffers, _, _, sent_of_d, received_of_d), (a_size, b_size) = _moved(plan, needs), multiplied_sizes(problem)
        total = held_operands(plan, on_gpus=True)
        # A's buffers are free again before B's are needed.
        total += np.max(buffers, axis=0)
        # Where these lie is not looked at.
        total += sum(float(chunk_bytes(problem, extra.name).sum()) for extra in problem.extras) * 2 / npart
        # The library stores what it has finished itself; else sums are kept until they are finished.
        kept, sums = own_kernel(plan), returned_type(plan).itemsize
        owned = np.bincount(plan.owners, chunk_bytes(problem, "d"), len(plan.ranks))
        loose = _loose(plan)
        own = tiles.d.elements * float(sums) + workspace_bytes(plan, tiles)
        own += loose["a"] * tiles.a.elements * a_size + loose["b"] * tiles.b.elements * b_size
        if kept:
            own += owned * (sums / problem.itemsize("d") + bool(problem.formula.saved))
        own += np.where(tiles.replicated | loose["d"], owned + sent_of_d + received_of_d, 0)
        total[list(plan.ranks)] += own
        return total

    def work(self, plan: Plan, needs: Mapping[str, Needs]) -> Work:
        """Return the work of a plan: operands are redistributed, multiplied by the library, and D is redistributed."""
        problem, machine, tiles = plan.problem, plan.machine, make_tiles(plan)
        (a_size, b_size), nranks, (p, q, _) = multiplied_sizes(problem), len(plan.ranks), plan.grid
        _, received, outside, _, received_of_d = _moved(plan, needs)
        # The library's reduce-scatter sums in the type that is computed in.
        sizes = a_size, b_size, problem.compute_type.itemsize
        a_bytes, b_bytes, d_bytes = (
            float(math.prod(tile.shape)) * size for tile, size in zip((tiles.a, tiles.b, tiles.d), sizes, strict=True)
        )
        share = (nranks - 1) / nranks
        library = {
            "local": 0.0,
            "allgather": share * (b_bytes if q == 1 else a_bytes),
            "reducescatter": share * d_bytes,
            "allreduce": 2 * share * problem.m * problem.n * problem.sum_type.itemsize,
            "summa": a_bytes / p * (q - 1) / q + b_bytes / q * (p - 1) / p,
        }[plan.method]
        # Slabs of equal size: the largest decides.
        flops = problem.flops * math.prod(
            float(extents.max()) / length
            for extents, length in zip(plan.extents, (problem.m, problem.n, problem.k), strict=True)
        )
        if slab_step(problem) == 1 or plan.method == "summa":
            # Chunks have been put together to tiles, without padding.
            flops *= slowdown(problem, in_chunks=False)
        copied = 0.0
        for operand, loose in _loose(plan).items():
            copied += 2.0 * loose.any() * getattr(tiles, operand).elements.max() * problem.itemsize(operand)
        if own_kernel(plan):
            # One kernel reads the sums and writes D.
            each = problem.compute_type.itemsize + problem.itemsize("d") * (2 if problem.formula.saved else 1)
            copied += float(tiles.d.elements.max()) * each
        return Work(
            [
                Phase(waited={"ranks": received - outside, "dask": outside}),
                Phase(
                    flops,
                    multiply_rate(plan),
                    waited={"ranks": dict(machine.exposed).get(plan.method, 1.0) * library},
                ),
                Phase(waited={"ranks": received_of_d}),
                Phase(waited={"memory": copied}),
                uploaded(plan),
            ],
            messages=_MESSAGES if nranks > 1 else 2,
            moved=int(received.sum() + received_of_d.sum()) + int(library * nranks),
        )


CUBLASMP = CublasmpModel(
    "cublasmp", "dask_distmm.engines.cublasmp.engine", on_gpus=True, collective=True, library="cuBLASMp"
)
