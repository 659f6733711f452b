"""Redistribution by packing, one exchange of messages, and unpacking: what one participant does. Pure.

Large rectangles travel by themselves: right out of the source and right into place where they are one piece of
memory there, and through a buffer where they are not, which each end decides for itself. Small ones to the same rank
travel packed in one vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.layout import Moves
from dask_distmm.layout.rectangles import DST, SRC, Span, Table, are_dense, pointers, rectangles

__all__ = ["Shuffle"]

# A message of its own has a cost of some microseconds: worth it from here on (bytes).
_ALONE_BYTES = 4 * 2**20


class Shuffle:
    """One redistribution, as one participant sees it.

    Parameters
    ----------
    moves
        All rectangles between ranks.
    me
        This participant.
    ranks
        Participant of each rank.
    order
        Memory order of the destinations.
    extents
        Length of each destination along its fast axis.
    itemsize
        Bytes of an element.
    src, dst
        Where this participant's matrices lie, by the numbers that the moves give them.
    allocate
        Returns the address of a new buffer of so many bytes.
    skip_home
        What stays here is in place already.
    alone
        Bytes from which on a rectangle travels by itself; None for what suits rectangles that need packing anyway.

    Attributes
    ----------
    packing, unpacking
        Tables of the rectangles to copy before and after the messages.
    sends, receives
        Messages: rank, address and bytes of each.
    """

    def __init__(
        self,
        moves: Moves,
        me: int,
        ranks: tuple[int, ...],
        order: str,
        extents: Sequence[int],
        itemsize: int,
        src: dict[int, Span],
        dst: dict[int, Span],
        allocate: Callable[[int], int],
        skip_home: bool = False,
        alone: int | None = None,
    ) -> None:
        self._alone = _ALONE_BYTES if alone is None else alone
        self.order, self._extents = order, np.asarray(extents, np.int64)
        self.itemsize, self._allocate = itemsize, allocate
        self.packing: list[Table] = []
        self.unpacking: list[Table] = []
        self.sends: list[tuple[int, int, int]] = []
        self.receives: list[tuple[int, int, int]] = []
        legs = moves.legs(me)
        if len(legs.home) and not skip_home:
            self.packing.append(rectangles(legs.home, src, dst, order))
        for peer, leg in sorted(legs.send.items()):
            self._send(ranks.index(peer), leg, src)
        for peer, leg in sorted(legs.receive.items()):
            self._receive(ranks.index(peer), leg, dst)

    def _send(self, rank: int, leg: Moves, sources: dict[int, Span]) -> None:
        alone, packed = self._split(leg)
        sizes = alone.sizes * self.itemsize
        table = self._packing(alone, sources, 0)
        starts = table[:, SRC].copy()
        if not (dense := are_dense(table, self.itemsize)).all():
            # Not one piece here: from a buffer, then.
            buffer = self._allocate(int(sizes[~dense].sum()))
            self.packing.append(self._packing(alone.take(~dense), sources, buffer))
            starts[~dense] = self.packing[-1][:, DST]
        self.sends += [(rank, int(p), int(n)) for p, n in zip(starts, sizes, strict=True)]
        if len(packed):
            size = int(packed.sizes.sum()) * self.itemsize
            buffer = self._allocate(size)
            self.packing.append(self._packing(packed, sources, buffer))
            self.sends.append((rank, buffer, size))

    def _receive(self, rank: int, leg: Moves, targets: dict[int, Span]) -> None:
        alone, packed = self._split(leg)
        if len(alone):
            starts = pointers(alone.dst, alone.dst_row, alone.dst_col, targets)
            sizes = alone.sizes * self.itemsize
            fast, slow = (alone.ncols, alone.nrows) if self.order == "C" else (alone.nrows, alone.ncols)
            whole = (fast == self._extents[alone.dst]) | (slow == 1)
            if not whole.all():
                buffer = self._allocate(int(sizes[~whole].sum()))
                self.unpacking.append(self._unpacking(alone.take(~whole), targets, buffer))
                starts[~whole] = buffer + np.concatenate([[0], np.cumsum(sizes[~whole])[:-1]])
            self.receives += [(rank, int(p), int(n)) for p, n in zip(starts, sizes, strict=True)]
        if len(packed):
            size = int(packed.sizes.sum()) * self.itemsize
            buffer = self._allocate(size)
            self.unpacking.append(self._unpacking(packed, targets, buffer))
            self.receives.append((rank, buffer, size))

    def _split(self, leg: Moves) -> tuple[Moves, Moves]:
        """Return the rectangles that travel by themselves, and those that travel packed."""
        alone = leg.sizes * self.itemsize >= self._alone
        return leg.take(alone), leg.take(~alone)

    def _packing(self, moves: Moves, sources: dict[int, Span], pointer: int) -> Table:
        """Rectangles from their matrices into a vector, each dense in the destination's order."""
        return rectangles(self._in_vector(moves, "dst"), sources, self._vector(moves, pointer), self.order)

    def _unpacking(self, moves: Moves, targets: dict[int, Span], pointer: int) -> Table:
        return rectangles(self._in_vector(moves, "src"), self._vector(moves, pointer), targets, self.order)

    def _in_vector(self, moves: Moves, side: str) -> Moves:
        """Return the same rectangles, each of which is a matrix of its own on one side."""
        nothing = np.zeros(len(moves), np.int64)
        changes: dict[str, Any] = {side: np.arange(len(moves)), f"{side}_row": nothing, f"{side}_col": nothing}
        return dataclasses.replace(moves, **changes)

    def _vector(self, moves: Moves, pointer: int) -> dict[int, Span]:
        starts = pointer + np.concatenate([[0], np.cumsum(moves.sizes)]) * self.itemsize
        size = self.itemsize
        if self.order == "C":
            return {i: Span(int(starts[i]), int(n) * size, size) for i, n in enumerate(moves.ncols)}
        return {i: Span(int(starts[i]), size, int(n) * size) for i, n in enumerate(moves.nrows)}
