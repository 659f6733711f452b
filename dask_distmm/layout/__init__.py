"""Where the elements of a matrix live, and which of them must move when that changes.

Pure arithmetic on NumPy index arrays; the module `rectangles` has tables of rectangles for the kernels that copy.

An `Axis` says, for every index of ``range(length)``, which *part* holds it (a chunk, or a row of processes) and at
which *local* index in that part. It stores that per segment, not per index: a segment is a run of indices which lie one
after the other in one part. There are two kinds. Dask's chunks have any sizes, 0 included, and each is a part.
ScaLAPACK's blocks have one size (the last one may be smaller) and go to the parts round-robin; each part packs its
blocks together. Nine rows in blocks of two over two rows of processes::

    global row      0 1 | 2 3 | 4 5 | 6 7 | 8
    part             0  |  1  |  0  |  1  | 0
    local row       0 1 | 0 1 | 2 3 | 2 3 | 4

**ScaLAPACK counts rows and columns from 1, here they count from 0**; process coordinates count from 0 in both.

A `Layout` is the product of an axis of rows and one of columns. Its parts, chunks or processes, are a grid and have one
number each. A 2 x 3 grid can count along the rows or along the columns::

    order "row":   0 1 2      order "col":   0 2 4
                   3 4 5                     1 3 5

Two axes over the same range intersect where the cuts of both are taken together.  Here ten elements in
chunks of 4, 3 and 3 are distributed in blocks of 3 to 2 processes::

    global index    0  1  2  3  4  5  6  7  8  9

    chunk          |0  0  0  0 |1  1  1 |2  2  2 |    source
    local index    |0  1  2  3 |0  1  2 |0  1  2 |

    process        |0  0  0 |1  1  1 |0  0  0 |1 |    destination
    local index    |0  1  2 |0  1  2 |3  4  5 |3 |

    copies         |A  A  A |B |C  C |D |E  E |F |    cut where either one is cut

Inside a piece neither side jumps, so each piece is one copy: A is chunk 0 from 0 to process 0 at 0, size 3.

Pieces far apart can still be one copy.  From blocks of 1 over 2 processes to the same layout, the cuts leave
one piece per element, yet process 0 holds elements 0, 2, 4 next to one another before and after.
`intersect` joins such pieces, so its answer is minimal: a layout copied to itself is one copy per part.

Both layouts are products of a row axis and a column axis, so the copies between them are too: each copy of
the row axes (`intersect`) with each copy of the column axes is one rectangle, which
is contiguous in a local matrix of the source and in one of the destination::

                     column copies                    r row copies and c column copies
                     x      y                         take r + c entries to store
             a    [ a,x ] [ a,y ]                     and are r * c rectangles
    row      b    [ b,x ] [ b,y ]
    copies   c    [ c,x ] [ c,y ]

The list is minimal since each factor is: two rectangles could be one only if they agreed in one dimension and
were neighbours on both sides in the other, and such neighbours are one copy of that dimension already.
It is therefore kept as its two factors, and rectangles are made while iterating.

`Moves` lists the rectangles of a `redistribution` with the participants that hold their source and their
destination. Both list the same rectangles between two of them in the same order, so that these can travel as one vector
without saying what is in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isqrt
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_distmm.compat import cached_property

# Layouts: an axis cut into segments, and the product of two of these


Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Axis:
    """A cut of ``range(length)`` into consecutive segments, each stored contiguously in one part."""

    # Global indices where segments begin, and at the end the length; strictly increasing from 0. An axis of length 0
    # has ``bounds == [0]`` and no segment.
    bounds: Index
    # The part which holds each segment, in ``range(nparts)``. Neighbours in one part are one segment.
    part: Index
    # Local index in that part at which each segment begins.
    offset: Index
    # Number of parts; parts without any element are allowed.
    nparts: int

    @classmethod
    def from_chunks(cls, sizes: Sequence[int]) -> Axis:
        """Make the axis whose parts are consecutive chunks."""
        every = np.asarray(sizes, np.int64)
        filled = np.flatnonzero(every)
        return cls(np.append(0, np.cumsum(every[filled])), filled, np.zeros_like(filled), len(every))

    # Asked for once per rank and result.
    @classmethod
    @functools.lru_cache(maxsize=32)
    def block_cyclic(cls, length: int, block: int, nparts: int, source: int = 0) -> Axis:
        """Make the axis whose blocks are distributed round-robin over parts, `source` the first."""
        # Blocks that stay together are one segment.
        block = block if nparts > 1 else max(1, length)
        number = np.arange(-(-length // block), dtype=np.int64)
        return cls(np.append(number * block, length), (number + source) % nparts, number // nparts * block, nparts)

    @property
    def length(self) -> int:
        """Number of elements."""
        return int(self.bounds[-1])

    @cached_property
    def local_sizes(self) -> list[int]:
        """Elements of each part."""
        sizes: list[int] = np.bincount(self.part, np.diff(self.bounds), self.nparts).astype(int).tolist()
        return sizes

    def locate(self, index: ArrayLike) -> tuple[Index, Index]:
        """Find where elements are stored."""
        at = np.asarray(index, dtype=np.int64)
        segment = np.searchsorted(self.bounds, at, side="right") - 1
        return self.part[segment], self.offset[segment] + at - self.bounds[segment]


@dataclass(frozen=True)
class ProcessGrid:
    """A grid of `nprow` x `npcol` processes, or chunks, numbered along rows first (C order) or along columns first."""

    nprow: int
    npcol: int
    order: Literal["row", "col"] = "row"

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.nprow * self.npcol

    def coords(self, rank: int) -> tuple[int, int]:
        """Return the process row and column of a rank."""
        if not 0 <= rank < self.size:
            raise IndexError(f"part is {rank}, expected it in range({self.size}): pass a part of {self}")
        if self.order == "row":
            return divmod(rank, self.npcol)
        pcol, prow = divmod(rank, self.nprow)
        return prow, pcol

    def ranks(self, prow: Index, pcol: Index) -> Index:
        """Return the ranks at many coordinates: int64 arrays which broadcast, unchecked."""
        return prow * self.npcol + pcol if self.order == "row" else pcol * self.nprow + prow

    def transpose(self) -> ProcessGrid:
        """Return the grid in which each rank has its row and column swapped.

        The order is swapped too, which leaves every rank its place in the transposed matrix.
        """
        return ProcessGrid(self.npcol, self.nprow, "col" if self.order == "row" else "row")

    @classmethod
    def best(cls, nprocs: int, m: int, n: int) -> ProcessGrid | None:
        """Choose the grid on which an m x n matrix product communicates least; None if none fits.

        To make its piece of the product over an inner dimension k, each process of a p x q grid receives m/p rows of
        the left factor and n/q columns of the right one. Among the grids of exactly `nprocs` processes with ``p <= m``
        and ``q <= n``, this is the one with the smallest ``m/p + n/q`` (R. van de Geijn and J. Watts, SUMMA: Scalable
        Universal Matrix Multiplication Algorithm, 1997). Ties go to the squarer grid, then to the one with more rows.
        """
        low = [(p, nprocs // p) for p in range(1, isqrt(nprocs) + 1) if nprocs % p == 0]
        fitting = [(p, q) for p, q in (*low, *((q, p) for p, q in low)) if p <= m and q <= n]
        # m/p + n/q times p*q, which is the same for all: integers compare exactly.
        grid = min(fitting, key=lambda x: (m * x[1] + n * x[0], abs(x[0] - x[1]), -x[0]), default=None)
        return None if grid is None else cls(*grid)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a matrix are: chunks, slabs, block columns, or blocks over a grid of processes."""

    # Rows and columns of the matrix.
    shape: tuple[int, int]
    # For rows and for columns the size of a block (ScaLAPACK's MB, NB); or the sizes of all chunks.
    blocks: tuple[Any, Any]
    # The parts.
    grid: ProcessGrid
    # Row and column of the part that has the first block (ScaLAPACK's RSRC, CSRC).
    source: tuple[int, int] = (0, 0)

    @classmethod
    def of_chunks(cls, chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout:
        """Return Dask's layout: each chunk is a part, numbered in C order."""
        rows, cols = chunks
        return cls((sum(rows), sum(cols)), (rows, cols), ProcessGrid(len(rows), len(cols)))

    def transpose(self) -> Layout:
        """Return the layout of the transposed matrix, in which each part has its number."""
        return Layout(self.shape[::-1], self.blocks[::-1], self.grid.transpose(), self.source[::-1])

    @cached_property
    def rows(self) -> Axis:
        """Layout of the rows over the rows of parts."""
        return self._axis(0, self.grid.nprow)

    @cached_property
    def cols(self) -> Axis:
        """Layout of the columns over the columns of parts."""
        return self._axis(1, self.grid.npcol)

    def _axis(self, axis: int, nparts: int) -> Axis:
        block = self.blocks[axis]
        if isinstance(block, tuple):
            return Axis.from_chunks(block)
        return Axis.block_cyclic(self.shape[axis], block, nparts, self.source[axis])

    def local_shape(self, part: int) -> tuple[int, int]:
        """Return the rows and columns which a part holds."""
        prow, pcol = self.grid.coords(part)
        return self.rows.local_sizes[prow], self.cols.local_sizes[pcol]

    @property
    def elements(self) -> Index:
        """Elements of each part."""
        counts = np.multiply.outer(self.rows.local_sizes, self.cols.local_sizes)
        return (counts if self.grid.order == "row" else counts.T).ravel()

    def owner(self, i: int, j: int) -> int:
        """Return the part which holds element ``(i, j)``, counted from 0."""
        return int(self.grid.ranks(self.rows.locate(i)[0], self.cols.locate(j)[0]))

    def as_chunks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], Index]:
        """Return the sizes of its segments along both axes, and the part of each rectangle of them, in C order."""
        rows, cols = (tuple(np.diff(axis.bounds).tolist()) for axis in (self.rows, self.cols))
        return (rows, cols), self.grid.ranks(self.rows.part[:, None], self.cols.part).ravel()


# One dimension: the copies between two axes


@dataclass(frozen=True, eq=False)
class AxisCopies:
    """The copies which turn one axis into another, in the order of their first global index.

    Copy ``i`` takes ``size[i]`` elements from local index ``src_offset[i]`` of part ``src_part[i]`` to local
    index ``dst_offset[i]`` of part ``dst_part[i]``.  All arrays are int64 of shape (ncopies,).

    `start` is the global index of a copy's first element.  Where either side has one segment per part, as
    chunks do, the copy is ``range(start, start + size)``; between two block-cyclic axes it may hold
    several blocks, which are neighbours in both parts and not in the global order.
    """

    src_part: Index
    src_offset: Index
    dst_part: Index
    dst_offset: Index
    start: Index
    size: Index

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self.size)

    def of_dst(self, part: int) -> Index:
        """Return which copies reach a part of the destination: their positions, increasing."""
        parts, order = self._by_dst
        first, last = np.searchsorted(parts, [part, part + 1])
        return order[first:last]

    @cached_property
    def pairs(self) -> tuple[Index, Index, Index]:
        """The copies summed up by pairs of parts: both parts, and elements."""
        ndst = int(self.dst_part.max(initial=0)) + 1
        key, which = np.unique(self.src_part * ndst + self.dst_part, return_inverse=True)
        elements = np.zeros(len(key), dtype=np.int64)
        np.add.at(elements, which, self.size)
        return key // ndst, key % ndst, elements

    # Asked once per part, so a scan of all copies each time would be quadratic: sort once, then bisect.
    @cached_property
    def _by_dst(self) -> tuple[Index, Index]:
        order = np.argsort(self.dst_part, kind="stable")
        return self.dst_part[order], order


def intersect(a: Axis, b: Axis) -> AxisCopies:
    """Find the fewest copies which move every element from where `a` has it to where `b` wants it."""
    cuts = np.union1d(a.bounds, b.bounds)
    start, size = cuts[:-1], np.diff(cuts)
    src_part, src_offset = a.locate(start)
    dst_part, dst_offset = b.locate(start)

    # Join pieces which are neighbours locally on both sides.  Sorted so, those that can join are adjacent.
    order = np.lexsort((src_offset, dst_part, src_part))
    jump = np.ones(len(order), dtype=bool)
    before, after = order[:-1], order[1:]
    jump[1:] = (
        (src_part[before] != src_part[after])
        | (dst_part[before] != dst_part[after])
        | (src_offset[before] + size[before] != src_offset[after])
        | (dst_offset[before] + size[before] != dst_offset[after])
    )
    heads = np.flatnonzero(jump)
    joined = np.diff(np.append(0, np.cumsum(size[order]))[np.append(heads, len(order))])
    first = order[heads]
    by_start = np.argsort(start[first])
    first = first[by_start]
    src_part, src_offset, dst_part, dst_offset = (
        array[first] for array in (src_part, src_offset, dst_part, dst_offset)
    )
    return AxisCopies(src_part, src_offset, dst_part, dst_offset, start[first], joined[by_start])


# Redistribution as one table of rectangles, their senders and receivers, the same on every rank. Pure


@dataclass(frozen=True, eq=False)
class Moves:
    """A table of rectangles, one entry of each int64 array a rectangle."""

    # Number of the matrix (a chunk, or a rank's tile) that it comes from and goes to.
    src: Index
    dst: Index
    # Where it begins in either matrix.
    src_row: Index
    src_col: Index
    dst_row: Index
    dst_col: Index
    # Its size, 1 or more each.
    nrows: Index
    ncols: Index
    # Participants that hold these matrices.
    src_owner: Index
    dst_owner: Index

    @classmethod
    def of(cls, copies: Copies, src_owner: ArrayLike, dst_owner: ArrayLike) -> Moves:
        """Make the table from the copies between two layouts and the owners of their parts."""
        table = copies.columns()[:8]
        owner, target = np.asarray(src_owner, np.int64)[table[0]], np.asarray(dst_owner, np.int64)[table[1]]
        table += [np.where(owner < 0, target, owner), target]
        return cls(*table)

    @classmethod
    def to_each(cls, copies: Copies, src_owner: ArrayLike, parts: Mapping[int, ArrayLike]) -> Moves:
        """Make the table where each of some participants gets certain parts of the destination, or all get all."""
        every = []
        for participant, numbers in parts.items():
            moves = cls.of(copies, src_owner, np.full(copies.dst.grid.size, participant))
            every.append(moves.take(np.isin(moves.dst, np.asarray(numbers, np.int64))))
        return cls(*(np.concatenate([getattr(moves, field.name) for moves in every]) for field in fields(cls)))

    def __len__(self) -> int:
        """Return the number of rectangles."""
        return len(self.src)

    @property
    def sizes(self) -> Index:
        """Elements of each rectangle."""
        return self.nrows * self.ncols

    def take(self, which: NDArray[np.intp] | NDArray[np.bool_]) -> Moves:
        """Return some of the rectangles."""
        return Moves(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def among(self, ranks: Sequence[int], me: int) -> tuple[Moves, Moves]:
        """Return the rectangles that come from participants which are ranks, and those from others to `me`."""
        inside = np.isin(self.src_owner, ranks)
        return self.take(inside), self.take(~inside & (self.dst_owner == me))

    def rounds(self, ranks: int, most: int) -> Iterator[Moves]:
        """Yield the rectangles in rounds, the same on all ranks, which participants 0, 1, ... are.

        First come those that stay at home. Then, with s from 1 on, rank r sends to r + s and receives from r - s, not
        much more than `most` elements in a round.
        """
        step = (self.dst_owner - self.src_owner) % ranks
        order = np.lexsort((self.src_owner, step))
        pair, sizes = (step * ranks + self.src_owner)[order], self.sizes[order]
        before = np.cumsum(sizes) - sizes
        batch = (before - before[np.searchsorted(pair, pair)]) // most
        numbers = step[order] * (batch.max(initial=0) + 1) + batch
        for number in np.unique(numbers):
            yield self.take(order[numbers == number])

    def between(self, src_owner: int, dst_owner: int) -> Moves:
        """Return the rectangles that go from one participant to another."""
        return self.take(np.flatnonzero((self.src_owner == src_owner) & (self.dst_owner == dst_owner)))


# From one layout of a matrix to another: which rectangles to copy


# Products handled at once in `Copies.traffic`: bounds its temporary arrays to some tens of MiB.
_TRAFFIC_BATCH = 2**20


class Copy(NamedTuple):
    """One rectangle to copy: ``dst_tile[copy.dst_index] = src_tile[copy.src_index]``."""

    src: int
    dst: int
    src_row: int
    src_col: int
    dst_row: int
    dst_col: int
    nrows: int
    ncols: int
    row: int
    col: int

    @property
    def src_index(self) -> tuple[slice, slice]:
        """The rectangle in the source's local matrix."""
        return slice(self.src_row, self.src_row + self.nrows), slice(self.src_col, self.src_col + self.ncols)

    @property
    def dst_index(self) -> tuple[slice, slice]:
        """The rectangle in the destination's local matrix."""
        return slice(self.dst_row, self.dst_row + self.nrows), slice(self.dst_col, self.dst_col + self.ncols)


@dataclass(frozen=True, eq=False)
class Copies:
    """The minimal list of rectangles that turns one layout into another, stored as a product.

    Iterating gives a `Copy` for each, by rising `row`, then `col`.
    """

    src: Layout
    dst: Layout
    rows: AxisCopies
    cols: AxisCopies

    def __len__(self) -> int:
        """Return the number of rectangles."""
        return len(self.rows) * len(self.cols)

    def __iter__(self) -> Iterator[Copy]:
        """Iterate over all rectangles."""
        return _listed(self.columns())

    def for_dst(self, part: int) -> Iterator[Copy]:
        """Iterate over the rectangles which reach a part of the destination, looking at no others."""
        prow, pcol = self.dst.grid.coords(part)
        return _listed(self.columns(self.rows.of_dst(prow), self.cols.of_dst(pcol)))

    def traffic(self, src_owner: ArrayLike | None = None, nowners: int | None = None) -> Index:
        """Count the elements which move from each part of the source to each part of the destination.

        With many parts, say 100,000 chunks on a few workers, say with `src_owner` where they are: then
        only the matrix of workers is made.
        """
        owner = np.arange(self.src.grid.size) if src_owner is None else np.asarray(src_owner, np.int64)
        nowners = int(owner.max(initial=-1)) + 1 if nowners is None else nowners
        row_src, row_dst, nrows = self.rows.pairs
        col_src, col_dst, ncols = self.cols.pairs
        ndst = self.dst.grid.size
        traffic = np.zeros(nowners * ndst, dtype=np.int64)
        # The overlap of two parts is the product of their overlaps in the two dimensions.
        step = max(1, _TRAFFIC_BATCH // max(1, len(ncols)))
        for first in range(0, len(nrows), step):
            batch = slice(first, first + step)
            src = self.src.grid.ranks(row_src[batch, None], col_src)
            dst = self.dst.grid.ranks(row_dst[batch, None], col_dst)
            np.add.at(traffic, (owner[src] * ndst + dst).ravel(), (nrows[batch, None] * ncols).ravel())
        return traffic.reshape(nowners, ndst)

    def columns(self, down: Index | None = None, across: Index | None = None) -> list[Index]:
        """Return the fields of a `Copy` for each product of some copies of rows and of columns, or of all."""
        rows, cols = self.rows, self.cols
        down = np.arange(len(rows)) if down is None else down
        across = np.arange(len(cols)) if across is None else across
        i, j = down.repeat(len(across)), across[None].repeat(len(down), 0).ravel()
        src, dst = self.src.grid.ranks, self.dst.grid.ranks
        return [
            *(src(rows.src_part[i], cols.src_part[j]), dst(rows.dst_part[i], cols.dst_part[j])),
            *(rows.src_offset[i], cols.src_offset[j], rows.dst_offset[i], cols.dst_offset[j]),
            *(rows.size[i], cols.size[j], rows.start[i], cols.start[j]),
        ]


def _listed(columns: Sequence[Index]) -> Iterator[Copy]:
    # Messages and slices want Python's ints.
    return itertools.starmap(Copy, zip(*(column.tolist() for column in columns), strict=True))


@functools.lru_cache(maxsize=128)
def redistribution(src: Layout, dst: Layout) -> Copies:
    """Find the fewest rectangular copies which turn layout `src` of a matrix into layout `dst`.

    Fewest in this sense: no two of them could be one rectangle that is contiguous in the local matrices of
    both sides.
    """
    if src.shape != dst.shape:
        raise ValueError(
            f"the layouts have shapes {src.shape} and {dst.shape}, expected equal ones: "
            "pass two layouts of the same matrix"
        )
    return Copies(src, dst, intersect(src.rows, dst.rows), intersect(src.cols, dst.cols))
