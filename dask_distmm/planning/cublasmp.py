"""The model of the engine `cublasmp`: a multiply by the library between two redistributions. Pure.

`exposed` in the configuration is the share of the library's own transfers that its method does not hide, as measured.

cuBLASMp 0.10 has epilogs on its tuned all-gather and reduce-scatter paths only, where they save a pass over D: the
activations relu and gelu, a bias of one value for each row of the matrix that it computes, and both. That matrix is D
where D's tiles are in F order and the transpose of D where they are in C order (see below): so a value for each
column of D is native to an all-gather of A and to a reduce-scatter into rows, a value for each row to the others.
Factors of the product are native to every method.

Not all that the library offers is as good as the engine's own kernel (measured, page GPU validation): its gelu of
float64 is off by up to 3e-10, and its all-gather with 16-bit types rounds the product before it adds a bias or applies
gelu. These are not left to it. And where extents of 16-bit matrices are not multiples of 16 bytes, its all-gather and
SUMMA may round parts of the sums (see below), as SUMMA does after each panel of k wherever there are several: there
it returns D in the type that is summed in, and does no epilog.

How A, B and D lie on the ranks for a collective library: block-cyclic tiles, memory orders and op(). Pure.

cuBLASMp works on column-major local matrices and computes ``Z = op(X) @ op(Y)``. A C-ordered matrix is the
column-major matrix of its transpose, so nothing is ever transposed for the sake of the library:

* D in F order:  ``Z = D``,    ``X = A``,    ``Y = B``
* D in C order:  ``Z = D^T``,  ``X = B^T``,  ``Y = A^T``

and an operand is taken with op N if it has D's memory order, with op T if it has the other one. The library's
tuned 1-D paths want the operands in slabs (seen in its log, page GPU validation):

===============  ==================  ================  ==========================================
method, grid     A                   B                 D
===============  ==================  ================  ==========================================
allgather P x 1  row slabs           column slabs      row slabs, F order
allgather 1 x P  row slabs           column slabs      column slabs, C order
reducescatter    column slabs (of k) row slabs (of k)  row slabs, C order; or column slabs, F order
allreduce        column slabs, C     row slabs, F      all of D on every rank, C order
summa p x q      p x q blocks        p x q blocks      p x q blocks; all of one order
===============  ==================  ================  ==========================================

The slabs must be of one size, so all are as large as the largest: the last rank's tile has rows or columns
that stand for nothing. Where these would be summed over (k), they are filled with zeros.

FP8 wants op T for the first operand and op N for the second, k being the fast axis of both: A in C order, B in F order.
And m, n and k of each rank's own multiply must be multiples of 16: slabs are, and other dimensions are padded.
SUMMA and the fallback have no FP8.

Of 16-bit types they are multiples of 8, which are 16 bytes, for another reason: where they are not, cuBLASMp's
all-gather and SUMMA may cut k and add the parts up in D, rounded each time (page GPU validation), and all methods
take 3 to 6 times as long. Blocks that the caller asked for, and the last blocks of SUMMA, can't be padded: their D is
returned in the type of the sums; see `returned_type`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Axis, Layout, Moves, ProcessGrid, redistribution
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.cuts import (
    ALIGNED_BYTES,
    Candidate,
    Cuts,
    by_rows,
    chunk_edges,
    padded,
    slowdown,
    uniform_cut,
)
from dask_distmm.planning.footprint import (
    Needs,
    formula_inputs,
    held_operands,
    multiplied_sizes,
    multiply_rate,
    spread,
    uploaded,
)
from dask_distmm.planning.groups import chunk_name
from dask_distmm.planning.model import EngineModel, Phase, Work
from dask_distmm.planning.placement import EVERYWHERE, REPLICA, everywhere
from dask_distmm.planning.plan import Plan, once
from dask_distmm.planning.problem import Problem, library_epilog
from dask_distmm.programs.recorder import Recorder, Rows
from dask_distmm.programs.steps import Buffer, Step

# SUMMA multiplies a panel of k at a time; wider ones are faster and need more workspace.
_WIDEST_PANEL = 16384
# Elements of a 16-bit type.
HALVES_STEP = ALIGNED_BYTES // 2


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one of A, B and D is distributed."""

    # Memory order of each rank's tile, ``"C"`` or ``"F"``.
    order: str
    # Which element is where, without padding; its parts are the ranks. None where every rank has all.
    layout: Layout
    # The whole, padding included.
    shape: tuple[int, int]
    # Rows and columns of a rank's tile, padding included; None where they differ between ranks.
    local_shape: tuple[int, int] | None
    # The padding is summed over and must be zero.
    zeroed: bool = False
    # It holds the conjugate of the operand's chunks.
    conjugated: bool = False

    def local(self, rank: int) -> tuple[int, int]:
        """Rows and columns of the tile of a rank, padding included."""
        return self.local_shape or self.layout.local_shape(rank)

    @property
    def elements(self) -> NDArray[np.int64]:
        """Elements of each rank's tile, padding included."""
        return (
            self.layout.elements
            if self.local_shape is None
            else np.full(self.layout.grid.size, math.prod(self.local_shape))
        )

    @property
    def stored(self) -> Layout:
        """The whole as the library sees it, padding included: the transpose of a C-ordered matrix is column-major."""
        whole = Layout(self.shape, self.layout.blocks, self.layout.grid)
        return whole if self.order == "F" else whole.transpose()


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The three matrices of a plan."""

    # How they are distributed.
    a: Tile
    b: Tile
    d: Tile
    # Every rank ends up with all of D (``d`` then describes the library's view, one copy beside the other).
    replicated: bool = False
    # Whether the library conjugates A and B, which it does by op C, for those that it transposes.
    conjugated: tuple[bool, bool] = (False, False)

    @property
    def flipped(self) -> bool:
        """Whether the library computes the transpose of D."""
        return self.d.order == "C"

    @property
    def ops(self) -> tuple[str, str]:
        """Op of the library's first and second operand, ``"N"``, ``"T"`` or ``"C"``."""
        ops = tuple(
            "C" if conjugated else "N" if tile.order == self.d.order else "T"
            for tile, conjugated in zip((self.a, self.b), self.conjugated, strict=True)
        )
        return (ops[1], ops[0]) if self.flipped else (ops[0], ops[1])


def slab_step(problem: Problem) -> int:
    """Return the multiple to which slabs and other dimensions are padded."""
    if problem.fp8:
        return 16
    # Distributions that were asked for are as they are.
    halves = dtype_from_name(problem.matrix_types[0]).itemsize == 2
    return HALVES_STEP if halves and not any(problem.distributions) else 1


@once
def make_tiles(plan: Plan) -> Tiles:
    """Return how A, B and D are distributed for a plan."""
    tiles = _blocks(plan) if plan.method == "summa" and math.prod(plan.grid) > 1 else _slabs(plan)
    factors = plan.problem.a, plan.problem.b
    if not any(matrix.conjugated for matrix in factors):
        return tiles
    # The all-reduce wants op T and N; else a transposed operand is conjugated by the library, for nothing.
    operands, by_library = [], []
    for tile, matrix in zip((tiles.a, tiles.b), factors, strict=True):
        by_library.append(matrix.conjugated and tile.order != tiles.d.order and not tiles.replicated)
        operands.append(dataclasses.replace(tile, conjugated=matrix.conjugated and not by_library[-1]))
    return dataclasses.replace(tiles, a=operands[0], b=operands[1], conjugated=(by_library[0], by_library[1]))


def _slabs(plan: Plan) -> Tiles:
    """Return slabs of one size for all ranks; the other axis of a matrix is as long as all slabs of another one."""
    problem, nranks, step = plan.problem, math.prod(plan.grid), slab_step(plan.problem)
    lengths, cuts = (problem.m, problem.n, problem.k), (plan.rows, plan.cols, plan.depth)
    finals = plan.d_cuts if plan.method == "reducescatter" else cuts[:2]
    for length, edges in zip((*lengths, *lengths[:2]), (*cuts, *finals), strict=True):
        size = padded(length, step, len(edges) - 1)
        if edges != tuple(min(i * size, length) for i in range(len(edges))):
            raise ValueError(f"{length} is cut at {edges}, expected {len(edges) - 1} slabs of {size}")
    by_rows, reduces = len(finals[0]) > 2, len(plan.depth) > 2
    # Whether A has slabs of m and B those of n, each rank all of D, and there is a slab of m, n, k for each rank.
    both, replicated = nranks > 1 and not reduces, reduces and plan.method == "allreduce"
    slabs = both or by_rows, both or (reduces and not replicated and not by_rows), reduces
    mb, nb, kb = (padded(x, step, nranks if cut else 1) for x, cut in zip(lengths, slabs, strict=True))
    m, n, k = (size * (nranks if cut else 1) for size, cut in zip((mb, nb, kb), slabs, strict=True))
    row, col = ProcessGrid(nranks, 1), ProcessGrid(1, nranks)
    order_a, order_b = ("C", "F") if problem.fp8 or replicated else (plan.orders["a"], plan.orders["b"])
    order = order_a if order_a == order_b else "C"
    if nranks > 1:
        order = "C" if replicated or by_rows != both else "F"

    def tile(
        order: str, shape: tuple[int, int], block: tuple[int, int], whole: tuple[int, int], grid: ProcessGrid
    ) -> Tile:
        return Tile(order, Layout(shape, block, grid), whole, (whole[0] // grid.nprow, whole[1] // grid.npcol))

    a = tile(order_a, (problem.m, problem.k), (mb, kb), (m, k), col if reduces else row)
    b = tile(order_b, (problem.k, problem.n), (kb, nb), (k, n), row if reduces else col)
    # D^T is n x m; of replicas the library sees all side by side.
    d = tile(order, (problem.m, problem.n), (mb, nb), (m, n), row if by_rows or replicated else col)
    if replicated:
        d = tile(order, (m * nranks, n), (m, n), (m * nranks, n), row)
    zeroed = k != problem.k
    return Tiles(dataclasses.replace(a, zeroed=zeroed), dataclasses.replace(b, zeroed=zeroed), d, replicated)


def _blocks(plan: Plan) -> Tiles:
    """Return the blocks of SUMMA."""
    problem, grid = plan.problem, ProcessGrid(*plan.grid[:2])
    order = plan.orders["a"] if plan.orders["a"] == plan.orders["b"] else "C"
    (mb,), (nb,), (kb,) = summa_blocks(problem, plan.grid)

    def tile(shape: tuple[int, int], block: tuple[int, int]) -> Tile:
        return Tile(order, Layout(shape, block, grid), shape, None)

    m, n, k = problem.m, problem.n, problem.k
    return Tiles(tile((m, k), (mb, kb)), tile((k, n), (kb, nb)), tile((m, n), (mb, nb)))


def summa_blocks(problem: Problem, grid: tuple[int, int, int]) -> tuple[set[int], set[int], set[int]]:
    """Return the block sizes of m, n and k on a grid: the requested ones, or one that fits.

    There may be several of each, if the distributions of two matrices do not agree.
    """
    (p, q, _), (m, n, k) = grid, (problem.m, problem.n, problem.k)
    sizes = {"m": m, "n": n, "k": k}
    blocks_of: dict[str, set[int]] = {"m": set(), "n": set(), "k": set()}
    for distribution, axes in zip(problem.distributions, ("mk", "kn", "mn"), strict=True):
        if distribution is not None:
            blocks = distribution.layout((sizes[axes[0]], sizes[axes[1]]), p * q).blocks
            for axis, block, parts in zip(axes, blocks, (p, q), strict=True):
                # Along a side of one rank blocks of all sizes are the same thing.
                blocks_of[axis] |= {block} if parts > 1 else set()
    # The library rounds D after each panel of k: 16-bit types have one, if no others were asked for.
    panel = k if problem.sum_type.itemsize == 2 else min(-(-k // math.lcm(p, q)), _WIDEST_PANEL)
    step = slab_step(problem)
    return blocks_of["m"] or {padded(m, step, p)}, blocks_of["n"] or {padded(n, step, q)}, blocks_of["k"] or {panel}


# The part of a plan's formula that cuBLASMp does itself, inside of a multiply. Pure


def returned_type(plan: Plan) -> np.dtype:
    """Return the type in which cuBLASMp returns D: its own, or the one that is summed in if more is done to it."""
    if _rounds_parts(plan):
        return plan.problem.compute_type
    return plan.problem.sum_type if CUBLASMP.native_epilog(plan) is None else plan.problem.result_type


def own_kernel(plan: Plan) -> bool:
    """Whether the engine's own kernel applies the formula or rounds after cuBLASMp."""
    return CUBLASMP.native_epilog(plan) is None and (plan.problem.finished or _rounds_parts(plan))


def _rounds_parts(plan: Plan) -> bool:
    """Whether the library might add up parts of k in a 16-bit D."""
    if len(plan.ranks) == 1 or plan.method not in ("allgather", "summa"):
        return False
    if plan.problem.result_type.itemsize != 2 or plan.problem.result_type.kind in "iu":
        return False
    tiles = make_tiles(plan)
    if plan.method == "summa" and tiles.a.layout.blocks[1] < plan.problem.k:
        return True
    lengths = [x for tile in (tiles.a, tiles.b, tiles.d) for x in (*tile.shape, *tile.layout.blocks)]
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
        chunks = redistribution(Layout.of_chunks(plan.problem.d.chunks), make_tiles(plan).d.layout)
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
    edges, numbered = chunk_edges(sizes), np.full(axis.nparts, -1)
    start, stop = axis.bounds[:-1], axis.bounds[1:]
    at = edges[1:].searchsorted(start, "right").clip(max=len(sizes) - 1)
    alone = np.bincount(axis.part, minlength=axis.nparts)[axis.part] == 1
    same = alone & (edges[at] == start) & (edges[at + 1] == stop)
    numbered[axis.part[same]] = at[same]
    numbers: list[int] = numbered.tolist()
    return numbers


@once
def _loose(plan: Plan) -> dict[str, NDArray[np.bool_]]:
    """Return for A, B and D whether each rank's tile is anything but one chunk as it is stored."""
    loose = {}
    for name in "abd":
        tile: Tile = getattr(make_tiles(plan), name)
        axes = zip((tile.layout.rows, tile.layout.cols), plan.problem[name].chunks, strict=True)
        chunks = np.logical_and.outer(*(np.array(_chunk_numbers(*axis)) >= 0 for axis in axes)).ravel()
        loose[name] = ~chunks | (tile.layout.elements != tile.elements) | tile.conjugated
    return loose


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


# The steps of a rank: tiles are filled from chunks, the library multiplies, and chunks of D are filled from tiles


def memory_order(plan: Plan, role: str) -> str:
    """Return the memory order of buffers for a purpose, the same on all ranks."""
    tiles = make_tiles(plan)
    of_d = dict.fromkeys(("tile-d", "chunk-d", "result-d"), tiles.d.order)
    return {"tile-a": tiles.a.order, "tile-b": tiles.b.order, **of_d}.get(role, "C")


def _cut_of_input(plan: Plan, name: str) -> tuple[Layout, list[int], list[NDArray[np.int64]]]:
    """Return how an input of the formula is cut, the part for each chunk of D, and the parts for each rank."""
    problem, tile, ranks = plan.problem, make_tiles(plan).d, range(len(plan.ranks))
    if not own_kernel(plan):
        # The library adds a value for each row of the tile of D, or for each column if the tile is in C order.
        axis = 0 if tile.order == "F" else 1
        is_cut = (tile.layout.grid.nprow, tile.layout.grid.npcol)[axis] > 1
        lengths = tuple(tile.layout.local_shape(rank)[axis] for rank in ranks if is_cut or not rank)
        layout = Layout.of_chunks((lengths, (1,)) if axis == 0 else ((1,), lengths))
        return layout, [], [np.array([rank * is_cut]) for rank in ranks]
    # All chunks of D along an axis that is broadcast need the same part.
    (rows, cols), (down, across) = problem.d.chunks, problem.varies(name)
    sizes = (rows if down else (1,), cols if across else (1,))
    numbers = np.add.outer(down * np.arange(len(rows)) * len(sizes[1]), across * np.arange(len(cols))).ravel()
    return Layout.of_chunks(sizes), numbers.tolist(), [np.unique(numbers[plan.owned(rank)]) for rank in ranks]


def _chunks_of_tile(plan: Plan, rank: int) -> list[int]:
    """Return the chunks of D that a rank fills from tiles: its own; or all, where every rank has all sums."""
    every = make_tiles(plan).replicated and "d" in plan.kept and CUBLASMP.all_reduced(plan)
    return list(range(len(plan.owners))) if every else list(map(int, plan.owned(rank)))


def moves_of(plan: Plan, rank: int, source: str, target: str) -> Moves:
    """Return the copies from matrices for a purpose to those for another one, by the numbers of buffers."""
    problem, tiles, ranks = plan.problem, make_tiles(plan), plan.ranks
    chunks, owners = Layout.of_chunks(problem.d.chunks), np.asarray(ranks)[plan.owners]
    if source == target:
        return Moves.to_each(redistribution(chunks, chunks), owners, dict.fromkeys(ranks, range(chunks.grid.size)))
    if target == "chunk-d" and tiles.replicated:
        whole, mine = Layout.of_chunks(((problem.m,), (problem.n,))), ranks[rank]
        return Moves.to_each(redistribution(whole, chunks), [mine], {mine: _chunks_of_tile(plan, rank)})
    if target == "chunk-d":
        return Moves.of(redistribution(tiles.d.layout, chunks), ranks, owners)
    name = source.removeprefix("of-")
    layout, where = Layout.of_chunks(problem[name].chunks), plan.where[name]
    if name == source:
        return Moves.of(redistribution(layout, getattr(tiles, name).layout), where, ranks)
    cut, _, needed = _cut_of_input(plan, name)
    return Moves.to_each(redistribution(layout, cut), where, dict(zip(ranks, needed, strict=True)))


def steps(plan: Plan, rank: int, usable: Callable[[int, int], bool]) -> tuple[Step, ...]:
    """Return the steps of a rank; `usable` says which chunks of A and B in its memory can be tiles as they are."""
    problem, tiles, near, names = plan.problem, make_tiles(plan), (plan.ranks[rank], EVERYWHERE), plan.problem.operands
    p = Recorder(rank, Rows((), (), len(plan.ranks)), returned_type(plan).name)
    types = {name: problem[name].dtype for name in names} | dict(zip("ab", problem.matrix_types, strict=True))
    chunks = {
        name: {i: Buffer(chunk_name(name, i), problem[name].chunk_shape(i), types[name]) for i in here}
        for name in names
        for here in [np.flatnonzero(np.isin(plan.where[name], near)).tolist()]
    }

    def chunk_of_d(role: str, index: int, dtype: str) -> Buffer:
        return Buffer(f"{role}.{index}", problem.d.chunk_shape(index), dtype)

    def redistribute(sources: Iterable[Buffer], targets: Iterable[Buffer], *copies: tuple[str, str]) -> None:
        reads = [*sources]
        p.call("redistribute", *reads, *targets, reads=len(reads), copies=copies)

    factors = list[Buffer]()
    for operand, (name, tile) in enumerate((("a", tiles.a), ("b", tiles.b))):
        factors.append(Buffer(f"tile-{name}.{rank}", tile.local(rank), types[name]))
        # All ranks see the same plan, but only this rank sees the strides and the address of its chunk.
        index = tile_chunk(tile, rank, problem[name].chunks)
        if index is not None and index in chunks[name] and usable(operand, index):
            factors[-1] = chunks[name][index]
        else:
            p.new(factors[-1], zero=tile.zeroed)
    copied = [factor for factor in factors if factor.name in p.here]
    redistribute([*chunks["a"].values(), *chunks["b"].values()], copied, ("a", "tile-a"), ("b", "tile-b"))
    # Inputs of the formula apart: one may not be aligned well, and what one launch copies is all in the same units.
    cuts = {name: _cut_of_input(plan, name) for name in names[2:]}
    parts = {
        (name, part): Buffer(f"part-{name}.{part}", layout.local_shape(part), types[name])
        for name, (layout, _, needed) in cuts.items()
        for part in needed[rank].tolist()
    }
    for name in cuts:
        own = [part for key, part in parts.items() if key[0] == name]
        redistribute(chunks[name].values(), own, (f"of-{name}", f"part-{name}"))
    for tile, factor in zip((tiles.a, tiles.b), factors, strict=True):
        if tile.conjugated:
            p.call("conjugate", factor)
    bias, (rows, cols) = list[Buffer](), tiles.d.local(rank)
    for part in parts.values() if not own_kernel(plan) else ():
        # The rest of what the library adds is to its padding.
        bias.append(p.zeros(*((rows, 1) if tiles.d.order == "F" else (1, cols)), problem.result_type.name))
        p.call("copy", part, bias[0][: part.shape[0], : part.shape[1]])
    d = {index: chunk_of_d("chunk-d", index, p.dtype) for index in _chunks_of_tile(plan, rank)}
    product = Buffer(f"tile-d.{0 if tiles.replicated else rank}", (rows, cols), p.dtype)
    if not tiles.replicated and [tile_chunk(tiles.d, rank, problem.d.chunks)] == list(d):
        (product,) = d.values()
    p.call("multiply_tiles", *bias, *factors, product, reads=len(bias), flops=problem.flops / len(plan.ranks))
    redistribute([product], [x for x in d.values() if x is not product], ("tile-d", "chunk-d"))
    role = "result-d" if own_kernel(plan) else "chunk-d"
    for index, sums in d.items() if own_kernel(plan) else ():
        read = [parts[name, numbers[index]] for name, (_, numbers, _) in cuts.items()]
        extra = [Buffer(f"{x.name}@{index}", x.chunk_shape(index), x.dtype) for x in problem.outputs[1:]]
        d[index] = chunk_of_d(role, index, problem.d.dtype)
        options: dict[str, Any] = {"names": names[2:], "formula": problem.formula}
        p.call("finish", *read, sums, d[index], *extra, reads=len(read), **options)
        for output, buffer in zip(problem.outputs[1:], extra, strict=True):
            p.leave(output.name, buffer, index)
    if "d" in plan.kept and len(plan.ranks) > 1 and not CUBLASMP.all_reduced(plan):
        away = {i: chunk_of_d(role, i, problem.d.dtype) for i in range(problem.d.count) if i not in d}
        redistribute(d.values(), away.values(), (role, role))
        d |= away
    for index, chunk in d.items():
        p.leave("" if plan.owners[index] == rank else REPLICA, chunk, index)
    return p.end()


class CublasmpModel(EngineModel):
    """The model of the engine."""

    def steps(self, plan: Plan, rank: int, *, begun: Any, usable: Callable[[int, int], bool]) -> tuple[Step, ...]:
        """Return the steps of a rank of a plan."""
        return steps(plan, rank, usable)

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
        """Return why SUMMA can't use the requested blocks, or None."""
        sizes = summa_blocks(problem, grid)
        for name, several in zip("mnk", sizes, strict=True):
            if len(several) > 1:
                return f"blocks of {name} must agree, got {' and '.join(map(str, sorted(several)))}"
        (mb,), (nb,), _ = sizes
        for name, size, parts, length in (("m", mb, grid[0], problem.m), ("n", nb, grid[1], problem.n)):
            if parts > 1 and size * (parts - 1) >= length:
                return f"blocks of {size} of {name} leave ranks without any of {length}"
        return None

    def native_epilog(self, plan: Plan) -> str | None:
        """Return the epilog that cuBLASMp does, ``""`` for only a factor; None where it can't do all of the formula."""
        formula, epilog = plan.problem.formula, library_epilog(plan.problem)
        if len(plan.ranks) == 1 or epilog is None or _rounds_parts(plan):
            return None
        if not epilog:
            return epilog
        if plan.method not in ("allgather", "reducescatter"):
            return None
        if plan.problem.result_type.itemsize == 2 and plan.method == "allgather" and formula.epilog != "relu":
            return None
        if "bias" in formula.inputs:
            shape = tuple(map(sum, plan.problem["bias"].chunks))
            if shape != ((1, plan.problem.n) if make_tiles(plan).flipped else (plan.problem.m, 1)):
                return None
        return epilog

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
        # Each rank has copies of what its chunks need.
        total += sum((spread(plan, extra.name, extra.bytes) for extra in problem.extras), np.zeros(npart))
        total[list(plan.ranks)] += formula_inputs(plan)[0]
        # The library stores what it has finished itself; else sums are kept until they are finished.
        kept, sums = own_kernel(plan), returned_type(plan).itemsize
        owned = np.bincount(plan.owners, problem.d.bytes, len(plan.ranks))
        loose = _loose(plan)
        own = tiles.d.elements * float(sums) + workspace_bytes(plan, tiles)
        own += loose["a"] * tiles.a.elements * a_size + loose["b"] * tiles.b.elements * b_size
        if kept:
            own += owned * (sums / problem.d.itemsize + bool(problem.formula.saved))
        own += np.where(tiles.replicated | loose["d"], owned + sent_of_d + received_of_d, 0)
        total[list(plan.ranks)] += own
        return total

    def least(self, problem: Problem, candidate: Candidate) -> Work:
        """Return the messages of any ranks, and what the library itself moves."""
        method, (p, q, s) = candidate
        count = p * q * s
        (a_size, b_size), m, n, k = multiplied_sizes(problem), problem.m, problem.n, problem.k
        share, a_bytes, b_bytes = 1 - 1 / count, float(m * k * a_size), float(k * n * b_size)
        library = {
            "local": 0.0,
            "allgather": share * (b_bytes if q == 1 else a_bytes),
            # The library's reduce-scatter sums in the type that is computed in.
            "reducescatter": share * m * n * problem.compute_type.itemsize,
            "allreduce": 2 * share * m * n * problem.sum_type.itemsize,
            "summa": a_bytes / p * (q - 1) / q + b_bytes / q * (p - 1) / p,
        }[method]
        exposed = dict(problem.options.machine(self.name).exposed).get(method, 1.0)
        moving = Phase(waited={"ranks": exposed * library})
        return Work([moving], messages=_MESSAGES if count > 1 else 2, moved=library * count)

    def work(self, plan: Plan, needs: Mapping[str, Needs]) -> Work:
        """Return the work of a plan: operands are redistributed, multiplied by the library, and D is redistributed."""
        problem, tiles, least = plan.problem, make_tiles(plan), self.least(plan.problem, (plan.method, plan.grid))
        _, received, outside, _, received_of_d = _moved(plan, needs)
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
            copied += 2.0 * loose.any() * getattr(tiles, operand).elements.max() * problem[operand].itemsize
        if own_kernel(plan):
            # One kernel reads the sums and writes D.
            each = problem.compute_type.itemsize + problem.d.itemsize * (2 if problem.formula.saved else 1)
            copied += float(tiles.d.elements.max()) * each
        return Work(
            [
                Phase(waited={"ranks": received - outside, "dask": outside}),
                Phase(flops, multiply_rate(plan)),
                *least.phases,
                Phase(waited={"ranks": received_of_d}),
                Phase(waited={"memory": copied}),
                uploaded(plan),
            ],
            messages=least.messages,
            moved=int(received.sum() + received_of_d.sum()) + int(least.moved),
        )


CUBLASMP = CublasmpModel("cublasmp", "dask_distmm.engines.cublasmp", on_gpus=True, collective=True, library="cuBLASMp")
