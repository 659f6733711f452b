"""Redistribution as one table of rectangles, their senders and receivers, the same on every rank. Pure.

`Moves` lists the rectangles of a `redistribution` with the participants that hold their source and their
destination. `Moves.legs` sorts those of one participant: what it copies at home, and what it sends to and
receives from each other one. Both ends of a leg list the same rectangles in the same order, so that a leg can
travel as one vector without saying what is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_distmm.layout.axis import Index
from dask_distmm.layout.redistribute import Copies


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
