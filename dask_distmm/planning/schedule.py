"""The order in which one GPU computes its block of D, and the buffers that this order needs. Pure.

A rank computes ``D[rows, cols] = A[rows, depth] @ B[depth, cols]`` (see `plan`). One operand is stationary: a part of
it stays on the GPU. The other operand is streamed: its panels are pulled into buffers one after the other, each while
an earlier panel is multiplied::

                          panels of B, the streamed operand
                          [ 0 ][ 1 ][ 2 ][ 3 ]       panels 1 and 2 are pulled while panel 0 is multiplied
    A, stationary   [   ] [   ][   ][   ][   ]  D    (rows of A; all of k where the buffer allows)

A part of A or B that is in one chunk of the rank's own GPU is multiplied in place and needs no buffer. All buffers
together take at most ``distmm.peer.buffer-bytes``. A stationary part that needs more than half of that is cut: along k
(the products are then added to D, in the type of the sums), or along its own axis (the panels are then streamed once
for each part).

Of a symmetric or Hermitian D: the triangle that a rank multiplies, and the other one, which is copied from it. Pure.

A rank's block of D has a square on D's diagonal in it: all of D where k is cut, or on one GPU. Above the diagonal
nothing is multiplied there. The square is cut into strips of columns, and a strip begins with its own rows, so that
GEMMs are large::

    x . .        x  multiplied
    x x .        .  copied from below the diagonal
    x x x

How a rank multiplies chunks that it makes itself, and the memory that this takes. Pure.

Each chunk is made by tasks that run in threads of the rank, a few ahead of its use (`engines.peer.readable`). D's
block stays on the GPU and grows; an operand whose chunks the rank does not make is there from the start. A *step* is
one product::

    both are made       [ A, all own rows ]  @  [ B, all own columns ]     over a part of k
    A is made           [ A, some rows and a part of k ]  @  [ B, the same part of k ]

What a step needs of an operand is a part of one chunk, which is multiplied as it is; or parts of several, which are
copied side by side into a buffer. So small chunks are joined until their product is worth its launch; long ones are cut
where a buffer would be too large. Of a Gram matrix one operand is made, and the other one is its transpose.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.cuts import (
    Bounds,
    Rect,
    chunk_edges,
    common,
    edges_within,
    overlap_sizes,
    padded,
    pieces_of,
    slowdown,
    unit,
)
from dask_distmm.planning.footprint import made_ahead, multiplied_sizes, multiply_rate
from dask_distmm.planning.placement import EVERYWHERE, everywhere
from dask_distmm.planning.plan import Plan, once
from dask_distmm.planning.problem import Problem, is_gram, library_epilog

# Of a symmetric or Hermitian D: the triangle that a rank multiplies, and the other one, which is copied from it. Pure


# Squares of fewer rows are multiplied whole. Of 16 strips of 1024 columns in float64 and float32, N = 16384, GEMM took
# 0.55 of the time of one product, cuBLAS' syrk 0.53 (1 H200).
_LEAST_SQUARE = 2048
_STRIPS, _NARROWEST, _WIDEST = 8, 512, 1024


class Triangle(NamedTuple):
    """The square on the diagonal of D."""

    # Its rows, and its columns.
    start: int
    stop: int
    # Columns of a strip.
    width: int

    @property
    def strips(self) -> list[tuple[int, int]]:
        """The first column of each strip, and its last + 1."""
        return [(at, min(at + self.width, self.stop)) for at in range(self.start, self.stop, self.width)]

    def kept(self, rect: Rect) -> Iterator[Rect]:
        """Yield the parts of a rectangle of D that are multiplied."""
        top, bottom, left, right = rect
        parts = [(top, bottom, left, self.start), (top, bottom, self.stop, right)]
        for first, last in self.strips:
            # Rows above the square are whole; within it a strip begins with its own rows.
            parts += [(top, self.start, first, last), (first, bottom, first, last)]
        yield from filter(None, (common(rect, part) for part in parts))

    def copied(self) -> Iterator[Rect]:
        """Yield the rectangles above the diagonal that are copied."""
        for left, right in self.strips[1:]:
            yield self.start, left, left, right


def square_on_diagonal(plan: Plan, rank: int, epilog: str | None) -> Triangle | None:
    """Return the square of which a rank multiplies a triangle; None if it multiplies all of its block of D."""
    top, bottom, left, right = plan.region(rank)
    start, stop = max(top, left), min(bottom, right)
    turns = plan.problem.result_type.kind == "c" and complex(*plan.problem.formula.alpha).imag != 0
    if stop - start < _LEAST_SQUARE or not is_gram(plan.problem) or epilog or (epilog is not None and turns):
        return None
    # What a product is padded by must not be added to its neighbour.
    multiple = extent_multiple(plan.problem)
    if (top - left) % multiple or (stop < right and (stop - left) % multiple):
        return None
    width = max(_NARROWEST, min(_WIDEST, (stop - start) // _STRIPS // _NARROWEST * _NARROWEST))
    return Triangle(start, stop, width)


# Which chunks participants read of each other. Pure


def peer_reads(plan: Plan, names: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Return for each operand the chunks of each participant that other participants read."""
    problem, read = plan.problem, {}
    mine = np.arange(len(plan.participants))[:, None]
    near = (plan.islands[:, None] == plan.islands).astype(np.float32)
    for name in names:
        matrix, factor = problem[name], name in ("a", "b")
        if matrix.by_ranks or (factor and plan.from_host):
            # They are made by those that need them, or are not on GPUs.
            read[name] = np.zeros((len(mine), matrix.count), bool)
            continue
        # Any rank may need any chunk of an input of the formula: the owners of D's chunks are not looked at.
        needed = np.ones(1, bool)
        if factor:
            reads = np.zeros((len(mine), *matrix.counts), bool)
            for rank, index in enumerate(plan.ranks):
                reads[index][plan.chunks_read(rank, name)] = True
            flat = reads.reshape(len(reads), -1)
            needed = near @ flat > flat
        read[name] = needed & (np.asarray(plan.where[name]) == mine) & (matrix.elements > 0)
    return read


@once
def imports(plan: Plan) -> dict[str, NDArray[np.int64]]:
    """Return for A and B, where there are ranks on several islands, who gets a copy of each chunk for an island.

    Rows are participants, those of an island the same, columns chunks. Each chunk that a rank elsewhere has comes once,
    to one of those ranks which need it, by turns; it is -1 where none does.
    """
    problem, ranks, island_of = plan.problem, np.array(plan.ranks), plan.islands
    getters, every = dict[str, NDArray[np.int64]](), np.unique(island_of[ranks]).tolist()
    for name in problem.operands[:2] if len(every) > 1 and not plan.from_host else ():
        matrix, where = problem[name], np.asarray(plan.where.get(name, EVERYWHERE))
        if matrix.by_ranks or everywhere(where):
            continue
        getters[name] = np.full((len(island_of), matrix.count), -1)
        sent = np.isin(where, ranks) & (matrix.elements > 0)
        needed = np.zeros((len(ranks), matrix.count), bool)
        for rank in range(len(ranks)):
            needed[rank, plan.needed(rank, name)] = True
        for island in every:
            mine = np.flatnonzero(island_of[ranks] == island)
            count = needed[mine].cumsum(0)
            chunks = np.flatnonzero((count[-1] > 0) & sent & (island_of[where] != island))
            turn = 1 + np.arange(len(chunks)) % count[-1, chunks]
            getters[name][np.ix_(island_of == island, chunks)] = ranks[mine[(count[:, chunks] == turn).argmax(0)]]
    return getters


def sent_between(plan: Plan) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Return for A and B the chunks that come to islands (`imports`), and the participants that send and get each."""
    first, sent = np.unique(plan.islands), {}
    for name, getters in imports(plan).items():
        rows, chunks = np.nonzero(getters[first] >= 0)
        sent[name] = chunks, plan.where[name][chunks].astype(np.int64), getters[first[rows], chunks]
    return sent


def _held(plan: Plan, rank: int, operand: int) -> tuple[float, bool]:
    """Return how many chunks of A or B a rank fetches, and whether all are local, in place, and span k.

    Chunks in host memory count as those of others. The number is an average, and may not be a whole number, if the plan
    does not know where the chunks are.
    """
    name, (rows, cols) = "ab"[operand], plan.chunks_read(rank, "ab"[operand])
    where = plan.where.get(name)
    if where is None or plan.from_host:
        count = (rows.stop - rows.start) * (cols.stop - cols.start)
        return count * (1.0 if plan.from_host else 1 - 1 / len(plan.participants)), False
    chunks = where.reshape(plan.problem[name].counts)[rows, cols]
    fetched = float(np.count_nonzero((chunks != plan.ranks[rank]) & (chunks != EVERYWHERE)))
    # The library conjugates only operands that it transposes; other ones are copied first.
    copied = plan.problem.matrices[operand].conjugated and plan.orders[name] == "C"
    return fetched, not fetched and not copied and chunks.shape[1 - operand] == 1


# The order in which one GPU computes its block of D, and the buffers that this order needs. Pure


# Buffers for panels: one panel is multiplied while the others are loaded.
PANELS = 3
# Fewest rows of a GEMM. With fewer, panels that are streamed again take longer to pull than to multiply (16-bit types).
_LEAST_ROWS = 4096
# Shortest k of a GEMM. With less, each GEMM spends its time on reading and writing D.
_LEAST_DEPTH = 512
# Longest k of a GEMM of 16-bit types into a large D. Tensor cores do not round to nearest when they add, and the error
# grows faster than the sum: on H200 sums of 131,072 products were 1.27 times as far off as 16 eps of float32 allow. For
# a small D the library cuts k itself, to have work for all multiprocessors.
_MOST_DEPTH = 32768
# Panels have at least this many rows or columns. There are as many panels as ranks, and at least four.
_LEAST_WIDTH = 1024
_FEWEST_PANELS = 4
# Extents are padded in buffers, and in a D that is copied afterwards, where padding takes less time than it saves. For
# 16-bit types break-even is at a harmonic mean of the extents of 3 x 160, for float64 of 3 x 500. A padded D takes its
# memory twice, so it has a limit.
_LEAST_PADDED = 512
_MOST_PADDED_BYTES = 8 * 2**30
# GEMMs into chunks of D that are smaller than this along an axis leave multiprocessors idle: D is computed in one block
# and copied to its chunks.
_LEAST_BLOCK = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSchedule:
    """How one rank cuts A and B to compute its block of D; follows from the plan, not from addresses."""

    # The stationary operand: 0 for A, 1 for B.
    stationary: int
    # Cuts of the stationary operand's own axis (rows of A, columns of B) and of k, from the rank's first index to its
    # last one.
    parts: Bounds
    depth: Bounds
    # Most rows or columns of a panel of the streamed operand.
    width: int
    # For A and B, whether all of the rank's part is in single chunks on its own GPU, as far as a plan can tell.
    in_place: tuple[bool, bool]
    # For A and B, the number of chunks that the rank reads and other participants have.
    fetched: tuple[float, float]
    # Bytes of one buffer for a stationary part and of one buffer for a panel; 0 where chunks are used in place.
    stationary_bytes: int
    panel_bytes: int
    # Number of buffers for panels.
    panels: int = PANELS

    @property
    def stationary_buffers(self) -> int:
        """Number of buffers for stationary parts: two if there are several parts, to load the next one."""
        return 2 if (len(self.parts) - 1) * (len(self.depth) - 1) > 1 else 1

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.stationary_buffers * self.stationary_bytes + self.panels * self.panel_bytes


def extent_multiple(problem: Problem) -> int:
    """Return the number that the extents of each GEMM are padded to a multiple of; 1 for no padding.

    FP8 needs 16. Other types are faster with 16, but their operands must be copied for it.
    """
    if problem.fp8:
        return 16
    mean = 1 / sum(1 / max(1, extent) for extent in (problem.m, problem.n, problem.k))
    if mean < _LEAST_PADDED or problem.m * problem.n * problem.result_type.itemsize > _MOST_PADDED_BYTES:
        return 1
    return 16 if slowdown(problem, in_chunks=True) > 1 else 1


@once
def block_schedules(plan: Plan) -> list[BlockSchedule]:
    """Return the block schedule of each rank of a plan, in the order of the ranks; none where they make chunks."""
    if plan.problem.by_ranks:
        return []  # see `load_schedules`
    multiple, sizes = extent_multiple(plan.problem), multiplied_sizes(plan.problem)
    return [_block_schedule(plan, rank, multiple, sizes) for rank in range(len(plan.ranks))]


def _block_schedule(plan: Plan, rank: int, multiple: int, sizes: tuple[int, int]) -> BlockSchedule:
    problem, (p, q, s) = plan.problem, plan.grid
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    extents = (r1 - r0, c1 - c0)
    of_a, of_b = _held(plan, rank, 0), _held(plan, rank, 1)
    fetched, in_place = (of_a[0], of_b[0]), (of_a[1], of_b[1])
    if s > 1 and plan.method == "reducescatter":
        # A panel belongs to the slab of D that one rank adds up.
        stationary = int(plan.final_rects(0)[0][3] == problem.n)
    elif q == 1 and p > 1:
        stationary = 0
    elif p == 1 and q > 1:
        stationary = 1
    else:
        stationary = int(extents[1] * sizes[1] < extents[0] * sizes[0])
    room = problem.options.buffer_bytes
    own, depth_extent = extents[stationary], k1 - k0
    rows, depth, stationary_bytes, buffered = own, depth_extent, 0, [multiple > 1 or not x for x in in_place]
    if buffered[stationary]:
        # Each pass over the streamed operand reads host memory again: sums that take more memory cost less.
        wide = problem.sum_type != problem.compute_type and not plan.from_host
        rows, depth = _fit(own, depth_extent, sizes[stationary], room // 2, wide, multiple)
    depth = min(depth, longest_depth(problem, extents))
    if buffered[stationary]:
        stationary_bytes = padded(rows, multiple) * padded(depth, multiple) * sizes[stationary]
    parts, cuts = _even(r0 if stationary == 0 else c0, own, rows), _even(k0, depth_extent, depth)
    streamed, again = 1 - stationary, (len(parts) - 1) * (len(cuts) - 1) > 1
    column = padded(depth, multiple) * sizes[streamed]
    most = max(room - stationary_bytes * (1 + again), room // 4) // PANELS // max(1, column)
    # One panel is fastest if the rank pulls nothing.
    fewest = max(_FEWEST_PANELS, len(plan.ranks)) if s > 1 or any(fetched) else 1
    wanted = max(-(-extents[streamed] // fewest), min(_LEAST_WIDTH, extents[streamed]))
    width = max(multiple, _down(min(padded(wanted, unit(wanted, multiple)), most), multiple))
    panel_bytes = buffered[streamed] * min(width, padded(extents[streamed], multiple)) * column
    panels = PANELS if again else min(PANELS, -(-extents[streamed] // width))
    return BlockSchedule(stationary, parts, cuts, width, in_place, fetched, stationary_bytes, panel_bytes, panels)


def longest_depth(problem: Problem, extents: tuple[int, int]) -> int:
    """Return the longest k of a GEMM into a block of D of certain extents."""
    large = extents[0] * extents[1] >= _LEAST_BLOCK**2 and 2 in multiplied_sizes(problem)
    return min(problem.k, _MOST_DEPTH) if large else problem.k


def _fit(own: int, depth_extent: int, size: int, room: int, wide: bool, multiple: int) -> tuple[int, int]:
    """Return the most rows (or columns) and the most of k that a stationary part may have."""
    if own * depth_extent * size <= room:
        return own, depth_extent
    room //= 2
    rows = _down(room // (depth_extent * size), multiple)
    if wide and rows >= min(own, _LEAST_ROWS):
        return min(rows, own), depth_extent
    depth = _down(room // (own * size), multiple)
    if depth >= min(depth_extent, _LEAST_DEPTH):
        return own, depth
    depth = min(depth_extent, padded(_LEAST_DEPTH, multiple))
    return min(own, max(multiple, _down(room // (depth * size), multiple))), depth


def _down(length: int, multiple: int) -> int:
    """Round a length down to a multiple of its `unit`."""
    return length // unit(length, multiple) * unit(length, multiple)


def _even(start: int, length: int, most: int) -> Bounds:
    """Cut a range into pieces of `most`; the last piece may be smaller."""
    return (*range(start, start + length, most), start + length)


def sums_in(plan: Plan) -> np.dtype:
    """Return the type in which all ranks sum: D's own type, unless several products are added to an element of D."""
    if _several(plan):
        return plan.problem.compute_type
    return plan.problem.sum_type if native(plan) is None else plan.problem.result_type


def _several(plan: Plan) -> bool:
    """Whether an element of D is the sum of several products."""
    cut = plan.grid[2] > 1 or bool(plan.problem.by_ranks)
    return cut or any(len(schedule.depth) > 2 for schedule in block_schedules(plan))


@once
def native(plan: Plan) -> str | None:
    """Return the epilog that cuBLASLt does with each product, ``""`` for a factor only; None if it can't do all."""
    problem = plan.problem
    if _several(plan) or extent_multiple(problem) > 1:
        return None
    epilog = library_epilog(problem)
    if epilog and (problem.compute or problem.result_type.itemsize == 2):
        return None
    if epilog and "bias" in problem.formula.inputs and problem["bias"].chunks[0] != (1,):
        return None
    return epilog


def stored_again(plan: Plan) -> bool:
    """Whether D is written once more after its sums, to apply the formula or to round."""
    rounded = sums_in(plan).itemsize != plan.problem.d.itemsize
    return rounded or (plan.problem.finished and native(plan) is None)


@once
def in_chunks(plan: Plan) -> NDArray[np.bool_]:
    """Return for each row and column of ranks whether they store D in the chunks of the result: if all are large.

    With several sums per element other ranks read an incomplete block, and padded products need a larger array.
    """
    if plan.grid[2] > 1 or extent_multiple(plan.problem) > 1:
        return np.zeros(plan.grid[:2], bool)
    small = []
    for sizes, cuts in zip(plan.problem.d.chunks, (plan.rows, plan.cols), strict=True):
        parts = overlap_sizes(sizes, cuts)
        least = np.where(parts > 0, parts, _LEAST_BLOCK).min(axis=0)
        small.append((np.count_nonzero(parts > 0, axis=0) > 1) & (least < _LEAST_BLOCK))
    large: NDArray[np.bool_] = ~np.logical_or.outer(*small)
    return large


def blocks(plan: Plan, rank: int) -> list[Rect]:
    """Return the rectangles in which a rank stores its block of D; all participants compute the same ones.

    They are the chunks of the result, or parts of chunks, if all of these are large; else one rectangle.
    """
    region, (i, j, _) = plan.region(rank), plan.coords(rank)
    return [piece for _, piece in pieces_of(plan.chunk_cuts, region)] if in_chunks(plan)[i, j] else [region]


@once
def copied_again(plan: Plan) -> NDArray[np.float64]:
    """Return the elements of D that each rank copies from its sums to its chunks."""
    problem, q = plan.problem, plan.grid[1]
    times = np.ones(problem.d.counts)
    if plan.grid[2] == 1 and extent_multiple(problem) == 1:
        at = divmod(plan.owners.reshape(times.shape), q)
        inside = whole = np.ones(times.shape, bool)
        for which, cuts, sizes, shape in zip(
            at, (plan.rows, plan.cols), problem.d.chunks, ((-1, 1), (1, -1)), strict=True
        ):
            begin, end = (edges.reshape(shape) for edges in (chunk_edges(sizes)[:-1], chunk_edges(sizes)[1:]))
            first, last = np.take(cuts, which), np.take(cuts, which + 1)
            inside = inside & (first <= begin) & (end <= last)
            whole = whole & (first == begin) & (end == last)
        # GEMMs write whole chunks that are the rank's own.
        times -= whole | (inside & in_chunks(plan)[at])
    weights = (problem.d.elements * times.ravel()).astype(float)
    return np.bincount(plan.owners, weights, len(plan.ranks)).astype(float)


# Chunks are joined until their product takes so long (seconds): the host needs half of it to put it on its way.
_LEAST_SECONDS = 2e-4
# The shortest part that the room for buffers may lead to.
_LEAST_EXTENT = 512
# Shares of ``distmm.peer.buffer-bytes``: for buffers, and for chunks that are made ahead, and as much for those in use;
# and the most that are made ahead.
_BUFFERS, _AHEAD, _MOST_AHEAD = 0.5, 0.25, 64
# Threads that make chunks are fewer than a worker has where their chunks would take more than this part of its memory.
_THREAD_SHARE = 12
# Steps whose chunks are held at least: one is multiplied, and the next one is ready. And at most, where they are small:
# the host has to see the end of one before it is taken off.
_STEPS_HELD, _MOST_HELD = 2, 6


@dataclasses.dataclass(frozen=True, slots=True)
class LoadSchedule:
    """How one rank computes chunks of A and B, and in which parts it multiplies them; follows from the plan."""

    # The operands (0 for A, 1 for B) whose chunks it computes; only one of them if B is A transposed.
    operands: tuple[int, ...]
    # Whether that is so.
    twin: bool
    # Along the made operand's own axis and along k: parts of chunks are joined until they have `least`, and cut where
    # they have more than `most`. The own axis is not cut where both are made.
    least: tuple[int, int]
    most: tuple[int, int]
    # Of all buffers in which parts are put together.
    buffer_bytes: int
    # Number of chunks that are made at the same time.
    threads: int
    # Number of chunks that are made before they are used.
    ahead: int
    # The bytes of chunks that may be in use.
    held_bytes: int
    # Of chunks that are made ahead, and in the making.
    making_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes held of the operands that it computes."""
        return self.buffer_bytes + self.held_bytes + self.making_bytes


@once
def load_schedules(plan: Plan) -> list[LoadSchedule]:
    """Return the `LoadSchedule` of each rank of a plan."""
    return [_load_schedule(plan, rank) for rank in range(len(plan.ranks))]


def _load_schedule(plan: Plan, rank: int) -> LoadSchedule:
    problem = plan.problem
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    operands = tuple(operand for operand in (0, 1) if problem.matrices[operand].by_ranks)
    twin = len(operands) > 1 and is_gram(problem) and (r0, r1) == (c0, c1)
    if twin:
        # The library conjugates what it transposes, so this one is right for both.
        operands = (0 if problem.a.conjugated else 1,)
    both = len(problem.by_ranks) == 2
    extents, sizes, depth = (r1 - r0, c1 - c0), multiplied_sizes(problem), k1 - k0
    along_k = np.diff(_edges(plan, rank, operands, None))
    across = [np.diff(_edges(plan, rank, (operand,), operand)) for operand in operands]
    room, deepest = int(_BUFFERS * problem.options.buffer_bytes) // PANELS, longest_depth(problem, extents)
    if both:
        width = sum(extents[operand] * sizes[operand] for operand in operands)
        most = 0, min(depth, deepest, max(_LEAST_EXTENT, room // width))
        wanted = math.ceil(_LEAST_SECONDS / _seconds(plan, extents[0] * extents[1], width))
        least = 0, max(1, min(most[1] // 2, wanted))
        broad = [extents[operand] for operand in operands]
    else:
        size, widest = sizes[operands[0]], int(across[0].max())
        wanted = math.ceil(_LEAST_SECONDS / _seconds(plan, extents[1 - operands[0]], size))
        wanted = max(1, min(wanted, room // size // 4))
        least_k = max(1, min(depth, wanted // widest))
        deep = min(depth, max(2 * least_k, int(along_k.max())))
        least = max(1, min(extents[operands[0]], wanted // deep)), least_k
        broad = [min(extents[operands[0]], max(2 * least[0], widest))]
        most_k = min(depth, deepest, max(_LEAST_EXTENT, room // size // broad[0]))
        most = min(extents[operands[0]], max(_LEAST_EXTENT, room // size // min(deep, most_k))), most_k
        broad = [min(broad[0], most[0])]
    deep = min(most[1], max(2 * least[1], int(along_k.max())))
    multiple, joined = extent_multiple(problem), _joins(along_k, least[1])
    buffer, panel, largest, place, kept = 0, 0, 0, 0, 0
    for operand, own, extent in zip(operands, across, broad, strict=True):
        size = max(sizes[operand], problem.matrices[operand].itemsize)
        chunk = size * math.prod(max(axis) for axis in problem.matrices[operand].chunks)
        # Steps begin at multiples, and end where the last chunk ends.
        spans = padded(extent + multiple - 1, multiple), padded(deep + multiple - 1, multiple)
        if multiple > 1 or joined or (len(own) > 1 if both else _joins(own, least[0])):
            buffer += math.prod(spans) * sizes[operand]
        panel, largest = panel + extent * deep * size, max(largest, chunk)
        if multiple > 1 and not both:
            # Chunks end within steps, and those at the end of a group are held until the next one.
            around = zip(spans[:: 1 - 2 * operand], problem.matrices[operand].chunks, strict=True)
            place, kept = size * math.prod(span + max(axis) for span, axis in around), chunk * (len(along_k) + 1)
        else:
            place += chunk * (len(own) if both else 1)
    worker = plan.participants[plan.ranks[rank]]
    most_threads = max(1, worker.memory_limit // _THREAD_SHARE // largest) if worker.memory_limit else worker.nthreads
    threads = min(worker.nthreads, most_threads)
    share, step = int(_AHEAD * problem.options.buffer_bytes), max(place, panel if buffer else 0)
    ahead = max(made_ahead(threads), min(_MOST_AHEAD, share // largest))
    held = max(_STEPS_HELD * step, min(_MOST_HELD * step, share)) + kept
    return LoadSchedule(operands, twin, least, most, PANELS * buffer, threads, ahead, held, (ahead + threads) * largest)


def _edges(plan: Plan, rank: int, operands: Sequence[int], own: int | None) -> NDArray[np.int64]:
    """Return the edges of chunks within a rank's part, along the own axis of one operand, or along k of several."""
    region, across = plan.region(rank), own is None
    start, stop = plan.k_range(rank) if own is None else region[:2] if own == 0 else region[2:]
    chunkings = (plan.problem.matrices[operand].chunks[1 - operand if across else operand] for operand in operands)
    return np.array(edges_within(start, stop, *chunkings))


def _joins(stretches: NDArray[np.int64], least: int) -> bool:
    """Whether neighbours are joined: those that both have less than `least`."""
    small = stretches < least
    return bool((small[:-1] & small[1:]).any())


def load_steps(plan: Plan, rank: int, schedule: LoadSchedule) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the steps of a rank that makes chunks, in order: a stretch of the made operand's own axis, and one of k.

    Parts of a chunk follow each other for each part of k, so that no chunk is held over all of k.
    """
    operands = schedule.operands
    own, along_k = _edges(plan, rank, operands, operands[0]), _edges(plan, rank, operands, None)
    if len(plan.problem.by_ranks) == 2:
        depth = _cut(along_k.tolist(), schedule.least[1], schedule.most[1])
        return [((int(own[0]), int(own[-1])), part) for part in itertools.pairwise(depth)]
    multiple = extent_multiple(plan.problem)
    # The padding behind one part must be neither part of the next one nor multiplied with it.
    starts = [
        np.unique(np.append(edges[0] + (edges[:-1] - edges[0]) // multiple * multiple, edges[-1])).tolist()
        for edges in (own, along_k)
    ]
    cuts, depth = (
        _cut(edges, least, most // multiple * multiple, multiple)
        for edges, least, most in zip(starts, schedule.least, schedule.most, strict=True)
    )
    ends = set(starts[0])
    groups = itertools.pairwise([number for number, at in enumerate(cuts) if at in ends])
    return [
        (part, deep)
        for first, last in groups
        for deep in itertools.pairwise(depth)
        for part in itertools.pairwise(cuts[first : last + 1])
    ]


def _cut(edges: Sequence[int], least: int, most: int, step: int = 1) -> Bounds:
    """Join neighbours that have less than `least` until they have it; cut what has more than `most` evenly."""
    cuts, begun = [edges[0]], edges[0]

    def close(stop: int) -> None:
        nonlocal begun
        if stop > begun:
            size = padded(stop - begun, step, -(-(stop - begun) // max(step, most)))
            cuts.extend(range(begun + size, stop, size))
            cuts.append(stop)
            begun = stop

    for low, high in itertools.pairwise(edges):
        if high - low >= least:
            close(low)
        if high - begun >= least:
            close(high)
    close(edges[-1])
    return tuple(cuts)


def _seconds(plan: Plan, products: float, size: float) -> float:
    """Return the seconds for this many multiplications and additions that read this many bytes."""
    problem = plan.problem
    operations = problem.flops / (float(problem.m) * problem.n * problem.k)
    return max(operations * products / multiply_rate(plan), size / plan.machine.memory_bandwidth)
