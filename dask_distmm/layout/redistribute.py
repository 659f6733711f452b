"""From one layout of a matrix to another: which rectangles to copy.

Both layouts are products of a row axis and a column axis, so the copies between them are too: each copy of
the row axes (`dask_distmm.layout.axis.intersect`) with each copy of the column axes is one rectangle, which
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
destination. `Moves.legs` sorts those of one participant: what it copies at home, and what it sends to and
receives from each other one. Both ends of a leg list the same rectangles in the same order, so that a leg can
travel as one vector without saying what is in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_distmm.layout.axis import AxisCopies, Index, check_int, int64_array, intersect
from dask_distmm.layout.chunkgrid import BlockCyclicLayout, ChunkGrid

# Redistribution as one table of rectangles, their senders and receivers, the same on every rank. Pure


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """A table of rectangles, one entry of each int64 array a rectangle."""

    # Number of the matrix (a chunk, or a rank's tile) that it comes from and goes to.
    src: Index
    dst: Index
    # Participants that hold these.
    src_owner: Index
    dst_owner: Index
    # Where it begins in either matrix.
    src_row: Index
    src_col: Index
    dst_row: Index
    dst_col: Index
    # Its size, 1 or more each.
    nrows: Index
    ncols: Index

    @classmethod
    def of(cls, copies: Copies, src_owner: ArrayLike, dst_owner: ArrayLike) -> Moves:
        """Make the table from the copies between two layouts and the owners of their parts."""
        rows, cols = copies.rows, copies.cols
        shape = (len(rows), len(cols))

        def by_row(values: Index) -> Index:
            return np.broadcast_to(values[:, None], shape).ravel()

        def by_col(values: Index) -> Index:
            return np.broadcast_to(values, shape).ravel()

        src = np.broadcast_to(copies.src.part(rows.src_part[:, None], cols.src_part), shape).ravel()
        dst = np.broadcast_to(copies.dst.part(rows.dst_part[:, None], cols.dst_part), shape).ravel()
        owner, target = np.asarray(src_owner, np.int64)[src], np.asarray(dst_owner, np.int64)[dst]
        return cls(
            src=src,
            dst=dst,
            src_owner=np.where(owner < 0, target, owner),
            dst_owner=target,
            src_row=by_row(rows.src_offset),
            src_col=by_col(cols.src_offset),
            dst_row=by_row(rows.dst_offset),
            dst_col=by_col(cols.dst_offset),
            nrows=by_row(rows.size),
            ncols=by_col(cols.size),
        )

    def __len__(self) -> int:
        """Return the number of rectangles."""
        return len(self.src)

    @property
    def sizes(self) -> Index:
        """Elements of each rectangle."""
        return self.nrows * self.ncols

    def take(self, which: NDArray[np.intp] | NDArray[np.bool_]) -> Moves:
        """Return some of the rectangles."""
        return Moves(**{field.name: getattr(self, field.name)[which] for field in dataclasses.fields(self)})

    def among(self, ranks: Sequence[int], me: int) -> tuple[Moves, Moves]:
        """Return the rectangles that come from participants which are ranks, and those from others to `me`."""
        inside = np.isin(self.src_owner, ranks)
        return self.take(inside), self.take(~inside & (self.dst_owner == me))

    def legs(self, me: int) -> Legs:
        """Return the moves of participant `me`."""
        mine, theirs = self.src_owner == me, self.dst_owner == me
        away, coming = self.take(mine & ~theirs), self.take(theirs & ~mine)
        return Legs(
            home=self.take(mine & theirs),
            send={int(p): away.take(away.dst_owner == p) for p in np.unique(away.dst_owner)},
            receive={int(p): coming.take(coming.src_owner == p) for p in np.unique(coming.src_owner)},
        )


@dataclasses.dataclass(frozen=True)
class Legs:
    """One participant's part of a `Moves`."""

    # Rectangles that stay with it.
    home: Moves
    # Rectangles that go to and come from each other participant.
    send: dict[int, Moves]
    receive: dict[int, Moves]


# From one layout of a matrix to another: which rectangles to copy


# Products handled at once in `Copies.traffic`: bounds its temporary arrays to some tens of MiB.
_TRAFFIC_BATCH = 2**20


# The layouts of a matrix which are the product of two axes. Their parts, numbered from 0, are the pairs of a part of
# the row axis and a part of the column axis.
Distribution = BlockCyclicLayout | ChunkGrid


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
        return (
            slice(self.src_row, self.src_row + self.nrows),
            slice(self.src_col, self.src_col + self.ncols),
        )

    @property
    def dst_index(self) -> tuple[slice, slice]:
        """The rectangle in the destination's local matrix."""
        return (
            slice(self.dst_row, self.dst_row + self.nrows),
            slice(self.dst_col, self.dst_col + self.ncols),
        )


@dataclass(frozen=True, eq=False)
class Copies:
    """The minimal list of rectangles that turns one layout into another, stored as a product.

    Iterating gives a `Copy` for each, by rising `row`, then `col`.
    """

    src: Distribution
    dst: Distribution
    rows: AxisCopies
    cols: AxisCopies

    def __len__(self) -> int:
        """Return the number of rectangles."""
        return len(self.rows) * len(self.cols)

    def __iter__(self) -> Iterator[Copy]:
        """Iterate over all rectangles."""
        return self._product(np.arange(len(self.rows)), np.arange(len(self.cols)))

    def for_dst(self, part: int) -> Iterator[Copy]:
        """Iterate over the rectangles which reach a part of the destination, looking at no others."""
        prow, pcol = self.dst.coords(part)
        return self._product(self.rows.of_dst(prow), self.cols.of_dst(pcol))

    def traffic(self, src_owner: ArrayLike | None = None, nowners: int | None = None) -> Index:
        """Count the elements which move from each part of the source to each part of the destination.

        With many parts, say 100,000 chunks on a few workers, say with `src_owner` where they are: then
        only the matrix of workers is made.
        """
        owner = int64_array("src_owner", np.arange(self.src.nparts) if src_owner is None else src_owner)
        if nowners is None:
            nowners = int(owner.max(initial=-1)) + 1
        nowners = check_int("nowners", nowners, 0)
        if len(owner) != self.src.nparts:
            raise ValueError(
                f"src_owner has {len(owner)} entries, expected {self.src.nparts}: pass one owner per part of the source"
            )
        if owner.size and not (owner.min() >= 0 and owner.max() < nowners):
            raise ValueError(
                f"src_owner reaches from {owner.min()} to {owner.max()}, expected it in range({nowners}): "
                "number the owners from 0 or raise nowners"
            )
        row_src, row_dst, nrows = self.rows.pairs()
        col_src, col_dst, ncols = self.cols.pairs()
        ndst = self.dst.nparts
        traffic = np.zeros(nowners * ndst, dtype=np.int64)
        # The overlap of two parts is the product of their overlaps in the two dimensions.
        step = max(1, _TRAFFIC_BATCH // max(1, len(ncols)))
        for first in range(0, len(nrows), step):
            batch = slice(first, first + step)
            src = self.src.part(row_src[batch, None], col_src)
            dst = self.dst.part(row_dst[batch, None], col_dst)
            np.add.at(traffic, (owner[src] * ndst + dst).ravel(), (nrows[batch, None] * ncols).ravel())
        return traffic.reshape(nowners, ndst)

    def _product(self, row_copies: Index, col_copies: Index) -> Iterator[Copy]:
        rows, cols = self.rows, self.cols
        src_pcol, dst_pcol = cols.src_part[col_copies], cols.dst_part[col_copies]
        # Messages and slices want Python's ints, and tolist() makes them fast.
        col_fields = [field[col_copies].tolist() for field in (cols.src_offset, cols.dst_offset, cols.size, cols.start)]
        for at in row_copies:
            src_row, dst_row = int(rows.src_offset[at]), int(rows.dst_offset[at])
            nrows, row = int(rows.size[at]), int(rows.start[at])
            src = self.src.part(rows.src_part[at : at + 1], src_pcol).tolist()
            dst = self.dst.part(rows.dst_part[at : at + 1], dst_pcol).tolist()
            for s, d, src_col, dst_col, ncols, col in zip(src, dst, *col_fields, strict=True):
                yield Copy(s, d, src_row, src_col, dst_row, dst_col, nrows, ncols, row, col)


@functools.lru_cache(maxsize=128)
def redistribution(src: Distribution, dst: Distribution) -> Copies:
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
