"""Redistribution by packing, one exchange of messages, and unpacking: what one participant does. Pure.

A large rectangle travels in a message of its own. An end at which it is one piece of memory needs no buffer for it; the
other end may need one. Small rectangles to the same rank travel together, packed in one vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.layout import Moves
from dask_distmm.layout.rectangles import DST, SRC, Span, Table, are_dense, pointers, rectangles

# A message costs some microseconds. A rectangle of at least this many bytes has a message of its own.
_ALONE_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Route:
    """Which rectangles go from which participant to which one, as all participants know it."""

    # All rectangles between ranks.
    moves: Moves
    # This participant.
    me: int
    # The participant of each rank.
    ranks: tuple[int, ...]
    # Memory order of the destinations.
    order: str
    # Length of each destination along its fast axis.
    extents: Sequence[int]
    # Whether rectangles from this participant to itself are in place already.
    skip_home: bool = False
    # Bytes from which on a rectangle travels by itself; None for the size that suits rectangles that need packing
    # anyway.
    alone: int | None = None


class Shuffle:
    """One redistribution, as one participant sees it."""

    def __init__(
        self,
        route: Route,
        itemsize: int,
        src: dict[int, Span],
        dst: dict[int, Span],
        allocate: Callable[[int], int],
    ) -> None:
        self._alone = _ALONE_BYTES if route.alone is None else route.alone
        self.order, self._extents = route.order, np.asarray(route.extents, np.int64)
        self.itemsize, self._allocate = itemsize, allocate
        self.packing: list[Table] = []
        self.unpacking: list[Table] = []
        self.sends: list[tuple[int, int, int]] = []
        self.receives: list[tuple[int, int, int]] = []
        legs = route.moves.legs(route.me)
        if len(legs.home) and not route.skip_home:
            self.packing.append(rectangles(legs.home, src, dst, route.order))
        for peer, leg in sorted(legs.send.items()):
            self._send(route.ranks.index(peer), leg, src)
        for peer, leg in sorted(legs.receive.items()):
            self._receive(route.ranks.index(peer), leg, dst)

    def _send(self, rank: int, leg: Moves, sources: dict[int, Span]) -> None:
        alone, packed = self._split(leg)
        sizes = alone.sizes * self.itemsize
        table = self._packing(alone, sources, 0)
        starts = table[:, SRC].copy()
        if not (dense := are_dense(table, self.itemsize)).all():
            # A rectangle that is not one piece of memory here is sent from a buffer.
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
        """Return the copies of rectangles into a vector, each dense in the destination's order."""
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
