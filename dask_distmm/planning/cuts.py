"""Where the cuts of m, n and k go.

A cut follows chunk edges where that costs little balance, since a chunk that is in one rank's part need
not be taken apart. Where chunks are too coarse for that, the cut is even and goes through them.

Measured on H200 with cuBLAS 13.1 (page GPU validation): bfloat16 products take three times as long where rows of A,
B or D have no multiple of 16 bytes, six times where they have an odd number of elements, and float64 ones 1.4 times,
however far apart rows are. How many rows there are makes no difference, nor does it to float32 and complex types. A
product of too few elements leaves multiprocessors idle: with k = 8192 and 16384 one of a quarter of 2048 x 2048 had
0.53 of the rate of a large one in bfloat16, one of a sixteenth 0.30.

Rows, columns and k in the order of the workers that hold their chunks.

A rank's part of m, n or k is one range, and Dask deals chunks out as it likes: every other chunk of a tall matrix may
lie on the other worker, so that half of it would have to move. But the product does not depend on the order of k, and
in another order of m or n it has the same chunks in another order. So chunks along an axis are taken in the order of
their holders, where each of them is on one worker::

    chunk    0 1 2 3 4 5        0 2 4 1 3 5
    worker   x y x y x y   ->   x x x y y y
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.placement import Where
from dask_distmm.planning.problem import AXES, Problem, part_of

# The extents that GEMMs of NVIDIA's libraries are fast with. Pure


# For odd numbers of elements, and for even ones.
_SLOWDOWN = {"float16": (6.0, 3.0), "bfloat16": (6.0, 3.0), "float64": (1.4, 1.4)}
ALIGNED_BYTES = 16
# Of elements: what all types are aligned with, and tiles of a GEMM.
_ALIGNED, _TILE = 16, 128
# Rows and columns of a product that fills a GPU, of types of up to 16 bits and of others, whose tiles are smaller.
_FULL = (2048, 1024)
# The parts that the first product waits for are pulled in up to this many pieces.
_PIECES = 4


def unit(length: int, step: int = 1) -> int:
    """Return the multiple to which pieces of a length are rounded for fast GEMMs: of `step`, which is 1 or 16."""
    return next((size for size, least in ((_TILE, 8), (_ALIGNED, 4)) if length >= least * size), step)


def full_side(problem: Problem) -> int:
    """Return how many rows and columns a product needs to fill a GPU."""
    return _FULL[dtype_from_name(problem.matrix_types[0]).itemsize > 2]


def pieces_that_fill(problem: Problem, length: int, extent: int) -> int:
    """Return into how many pieces a length is cut, so that their products with an extent `other` still fill a GPU."""
    return max(1, min(_PIECES, length * extent // full_side(problem) ** 2))


def slowdown(problem: Problem, *, in_chunks: bool) -> float:
    """Return the factor by which products are slower due to their extents; 1 for sufficient extents."""
    name = problem.matrix_types[0]
    if problem.compute or name not in _SLOWDOWN:
        return 1.0
    # As in C order. In F order, where m counts too, products are as fast as their chunks allow.
    sizes: tuple[int, ...] = (problem.n, problem.k)
    if in_chunks:
        # In chunks of X.T @ Y as they lie no row is along k.
        along_k = (
            () if problem.a.transposed and not problem.b.transposed else (*problem.a.chunks[1], *problem.b.chunks[0])
        )
        sizes = (*along_k, *problem.b.chunks[1], *problem.d.chunks[1])
    (odd, even), step = _SLOWDOWN[name], ALIGNED_BYTES // dtype_from_name(name).itemsize
    return odd if any(size % 2 for size in sizes) else even if any(size % step for size in sizes) else 1.0


# Where the cuts of m, n and k go


# A method, and p x q x s ranks over m x n x k.
Candidate = tuple[str, tuple[int, int, int]]
# The cuts of a range: strictly increasing, from 0 to its length.
Bounds = tuple[int, ...]
Rect = tuple[int, int, int, int]  # row start, row stop, column start, column stop
# Of m, n and k; and of D's rows and columns, if ranks are to have other parts of it in the end than they compute.
Cuts = tuple[Bounds, Bounds, Bounds, tuple[Bounds, Bounds] | None]

# The largest part may exceed an even share by this factor for the sake of whole chunks.
_IMBALANCE = 1.05
# A chunk that ranks make and that is cut is made by both of them, which takes as long as a whole chunk more for one.
_IMBALANCE_MADE = 2.0


@functools.lru_cache(maxsize=64)
def cut(length: int, parts: int, *chunkings: tuple[int, ...], imbalance: float = _IMBALANCE) -> Bounds:
    """Cut ``range(length)`` into `parts` parts of about the same size, none empty."""
    if parts == 1:
        return 0, length
    even = np.arange(parts + 1) * length // parts
    edges: np.ndarray | None = None
    for sizes in dict.fromkeys(chunkings):
        chunk_bounds = chunk_edges(sizes)
        edges = np.unique(chunk_bounds) if edges is None else np.intersect1d(edges, chunk_bounds)
    if edges is not None and len(edges) > parts:
        right = np.clip(np.searchsorted(edges, even), 1, len(edges) - 1)
        left = right - 1
        snapped = np.where(even - edges[left] < edges[right] - even, edges[left], edges[right])
        snapped[0], snapped[-1] = 0, length
        sizes_ = np.diff(snapped)
        if sizes_.min() > 0 and sizes_.max() <= imbalance * -(-length // parts):
            even = snapped
    return tuple(even.tolist())


def padded(length: int, step: int, parts: int = 1) -> int:
    """Return the size of slabs that `parts` of them cover a length with, a multiple of `step`."""
    return -(-length // (parts * step)) * step


def uniform_cut(length: int, parts: int, step: int = 1) -> Bounds:
    """Cut ``range(length)`` into slabs of one size, a multiple of `step`, the last one smaller; none is empty."""
    size = padded(length, step, parts)
    return (*range(0, length, size), length)


def by_rows(problem: Problem, otherwise: bool) -> bool:
    """Whether D is cut along its rows: as its distribution says, if one was asked for."""
    requested = problem.distributions[2]
    return otherwise if requested is None else requested.layout((problem.m, problem.n), 2).grid.nprow > 1


def grid_cuts(problem: Problem, grid: tuple[int, int, int]) -> tuple[Bounds, Bounds, Bounds]:
    """Cut m, n and k of `problem` for a p x q x s grid of ranks."""
    p, q, s = grid
    if any(problem.distributions):
        # As they were asked for: slabs of one size.
        m, n, k = (uniform_cut(x, parts) for x, parts in zip((problem.m, problem.n, problem.k), grid, strict=True))
        return m, n, k
    most = _IMBALANCE_MADE if problem.by_ranks else _IMBALANCE
    return (
        cut(problem.m, p, problem.d.chunks[0], problem.a.chunks[0], imbalance=most),
        cut(problem.n, q, problem.d.chunks[1], problem.b.chunks[1], imbalance=most),
        cut(problem.k, s, problem.a.chunks[1], problem.b.chunks[0], imbalance=most),
    )


def rect_between(cuts: tuple[Bounds, Bounds], part: int) -> Rect:
    """Return the rectangle of a part, in C order, between cuts of rows and columns."""
    rows, cols = cuts
    i, j = divmod(part, len(cols) - 1)
    return rows[i], rows[i + 1], cols[j], cols[j + 1]


def reduce_cuts(problem: Problem, method: str, parts: int) -> tuple[Bounds, Bounds]:
    """Cut D into `parts` slabs, for adding up partial sums; into its chunks where each is added up by itself.

    Along the axis with more chunks where there are enough of them, so that whole chunks stay together;
    otherwise along the longer axis.
    """
    if method == "allreduce":
        return chunk_cuts(problem.d.chunks[0]), chunk_cuts(problem.d.chunks[1])
    nrows, ncols = problem.d.counts
    rowwise = by_rows(problem, nrows >= ncols if max(nrows, ncols) >= parts else problem.m >= problem.n)
    if (rowwise and problem.m >= parts) or problem.n < parts:
        return cut(problem.m, parts, problem.d.chunks[0]), (0, problem.n)
    return (0, problem.m), cut(problem.n, parts, problem.d.chunks[1])


def overlaps(cuts: Bounds, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (part, start, stop) of the parts of `cuts` that overlap a range, clipped to it."""
    first = bisect.bisect_right(cuts, start) - 1
    if 0 <= first < len(cuts) - 1 and start < stop <= cuts[first + 1]:
        return [(first, start, stop)]
    parts = range(first, min(bisect.bisect_left(cuts, stop), len(cuts) - 1))
    clipped = ((part, max(start, cuts[part]), min(stop, cuts[part + 1])) for part in parts)
    return [piece for piece in clipped if piece[1] < piece[2]]


def shape_of(rect: Rect) -> tuple[int, int]:
    """Return the rows and columns of a rectangle."""
    return rect[1] - rect[0], rect[3] - rect[2]


def common(a: Rect, b: Rect) -> Rect | None:
    """Return the part that two rectangles have in common; None for nothing."""
    r0, r1, c0, c1 = max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])
    return (r0, r1, c0, c1) if r0 < r1 and c0 < c1 else None


def pieces_of(cuts: tuple[Bounds, Bounds], rect: Rect) -> Iterator[tuple[int, Rect]]:
    """Cut a part of a matrix at cuts of rows and columns; yield the number of each part, in C order, and its piece."""
    rows, cols = cuts
    across = overlaps(cols, rect[2], rect[3])
    for i, r0, r1 in overlaps(rows, rect[0], rect[1]):
        for j, c0, c1 in across:
            yield i * (len(cols) - 1) + j, (r0, r1, c0, c1)


@functools.lru_cache(maxsize=64)
def chunk_edges(sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """Return where chunks of certain sizes begin, from 0 on, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@functools.lru_cache(maxsize=64)
def chunk_cuts(sizes: tuple[int, ...]) -> Bounds:
    """Return `chunk_edges` as cuts; an empty chunk repeats an edge."""
    return tuple(chunk_edges(sizes).tolist())


def edges_within(start: int, stop: int, *chunkings: tuple[int, ...]) -> list[int]:
    """Return where chunks end within a range, for some sizes of chunks, and its own ends."""
    every = map(chunk_cuts, chunkings)
    inside = (cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, stop)] for cuts in every)
    return sorted({start, stop, *itertools.chain(*inside)})


@functools.lru_cache(maxsize=1024)
def touched(sizes: tuple[int, ...], start: int, stop: int) -> slice:
    """Return which chunks of certain sizes overlap a range that is not empty."""
    edges = chunk_edges(sizes)
    return slice(int(edges[1:].searchsorted(start, "right")), int(edges[:-1].searchsorted(stop)))


def overlap_sizes(sizes: Sequence[int], cuts: Bounds) -> NDArray[np.int64]:
    """Return how much of each chunk (rows) of certain sizes is in each part of `cuts` (columns); negative: nothing."""
    edges, bounds = chunk_edges(tuple(sizes)), np.asarray(cuts)
    low, high = np.maximum(edges[:-1, None], bounds[:-1]), np.minimum(edges[1:, None], bounds[1:])
    return np.asarray(high - low)


@functools.lru_cache(maxsize=256)
def _pairs(sizes: tuple[int, ...], cuts: Bounds) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of a chunk and a part of `cuts` that overlap: both numbers, and by how much."""
    sizes_of_pairs = overlap_sizes(sizes, cuts)
    chunk, part = np.nonzero(sizes_of_pairs > 0)
    return chunk, part, sizes_of_pairs[chunk, part]


def traffic(chunks: Chunks, cuts: tuple[Bounds, Bounds], holders: NDArray[Any], count: int) -> NDArray[np.float64]:
    """Return how many elements each of `count` holders (rows) has of each part of a matrix after cuts (columns)."""
    (i, p, down), (j, q, across) = (_pairs(*axis) for axis in zip(chunks, cuts, strict=True))
    ncols, nparts = len(cuts[1]) - 1, (len(cuts[0]) - 1) * (len(cuts[1]) - 1)
    at = holders.reshape(len(chunks[0]), len(chunks[1]))[i[:, None], j] * nparts + np.add.outer(p * ncols, q)
    sizes = np.multiply.outer(down, across).astype(float)
    return np.bincount(at.ravel(), sizes.ravel(), count * nparts).astype(float).reshape(count, nparts)


def chunk_owners(problem: Problem, method: str, cuts: tuple[Bounds, Bounds], ranks: int) -> NDArray[np.int32]:
    """Assign each chunk of D to the rank with its largest part; evenly to all ranks after an allreduce."""
    if method == "allreduce":
        return (np.arange(problem.d.count, dtype=np.int64) * ranks // problem.d.count).astype(np.int32)
    row, col = (overlap_sizes(*axis).argmax(axis=1) for axis in zip(problem.d.chunks, cuts, strict=True))
    return np.asarray(row[:, None] * (len(cuts[1]) - 1) + col, np.int32).ravel()


# Rows, columns and k in the order of the workers that hold their chunks


# So large a share of what is along an axis must be whole on one worker, chunk by chunk of the axis.
_WHOLE = 0.9


def free_axes(problem: Problem, *, laid_out: bool = False) -> str:
    """Return the axes, of m, n and k, whose chunks are the same in all matrices, and can be taken in another order."""
    if problem.laid_out and not laid_out:
        return ""
    # In another order of m or n the chunks of a stationary D would come to lie elsewhere.
    axes = "k" if problem.stationary else "mnk"
    return "".join(axis for axis in axes if len(set(problem.chunkings(axis))) == 1)


def by_holder(problem: Problem, where: Where) -> dict[str, list[int]]:
    """Return the order of the chunks of some axes, where it differs from what it is."""
    parts = {}
    for axis in free_axes(problem):
        if (holders := _holders(problem, where, axis)) is not None:
            order = np.argsort(holders, kind="stable").tolist()
            if order != list(range(len(order))):
                parts[axis] = order
    return parts


def _holders(problem: Problem, where: Where, axis: str) -> NDArray[np.int64] | None:
    """Return for each chunk of an axis the worker that has most of A and B along it; None if not nearly all has one."""
    tables = []
    for operand in "ab":
        if axis in AXES[operand] and operand in where and not (where[operand] < 0).any():
            matrix = problem[operand]
            at = np.unravel_index(np.arange(matrix.count), matrix.counts)[AXES[operand].index(axis)]
            tables.append((at, where[operand], matrix.bytes))
    if not tables:
        return None
    chunks, holders, sizes = map(np.concatenate, zip(*tables, strict=True))
    count = int(holders.max()) + 1
    amounts = np.bincount(chunks * count + holders, sizes, (chunks.max() + 1) * count).reshape(-1, count)
    whole = amounts.max(axis=1).sum() >= _WHOLE * amounts.sum()
    return amounts.argmax(axis=1) if whole else None


def holder_cuts(problem: Problem, where: Where, grid: tuple[int, int, int]) -> tuple[Bounds, Bounds, Bounds] | None:
    """Return cuts of m, n and k by which each rank has what is whole on one worker; None if there are none."""
    axes = [(axis, parts) for axis, parts in zip("mnk", grid, strict=True) if parts > 1]
    # A grid that was asked for says nothing of cuts, so that what is on its ranks already stays there.
    if len(axes) != 1 or any(problem.distributions) or problem.replicated:
        return None
    ((axis, parts),) = axes
    if axis not in free_axes(problem, laid_out=True) or (holders := _holders(problem, where, axis)) is None:
        return None
    starts = np.flatnonzero(np.diff(holders)) + 1
    if len(starts) + 1 != parts or len(np.unique(holders)) != parts:
        return None
    lengths = {"m": problem.m, "n": problem.n, "k": problem.k}
    # All chunks along the axis are the same.
    edges = chunk_edges(problem.chunkings(axis)[0])
    cut = (0, *edges[starts].tolist(), lengths[axis])
    m, n, k = (cut if name == axis else (0, length) for name, length in lengths.items())
    return (m, n, k) if min(np.diff(cut)) > 0 else None


def reorder(problem: Problem, orders: Mapping[str, Sequence[int]]) -> tuple[Problem, dict[str, NDArray[np.int64]]]:
    """Return the same problem with the chunks along some axes in another order, and which chunks these were before."""
    if not orders:
        return problem, {name: np.arange(problem[name].count) for name in (*problem.operands, "d")}
    lengths, taken, before = dict(zip("mn", problem.d.counts, strict=True)), {}, {}
    for name in (*problem.operands, "d"):
        counts, axes = problem[name].counts, AXES.get(name, "mn")
        # An input that is broadcast along an axis has one chunk there.
        rows, cols = (
            tuple(orders[axis] if axis in orders and count == lengths.get(axis, count) else range(count))
            for axis, count in zip(axes, counts, strict=True)
        )
        taken[name] = rows, cols
        before[name] = np.arange(problem[name].count).reshape(counts)[np.ix_(rows, cols)].ravel()
    return part_of(problem, taken, array="x" * problem.shared, whole=problem.result_name), before
