"""Redistribution on devices: pack, one grouped exchange, unpack.

Large rectangles that are one piece of memory where they arrive travel by themselves, right into place; all
others to the same rank travel packed in one vector. Both ends decide by what the plan says, so they agree;
only the sender sees whether a large rectangle is one piece of its memory too, and packs it if it is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.cublasmp.kernels import copy_rectangles
from dask_distmm.engines.cublasmp.rectangles import DST, SRC, Span, Table, are_dense, pointers, rectangles
from dask_distmm.layout import Moves

if TYPE_CHECKING:
    from dask_distmm.comms.nccl import NcclComm

__all__ = ["Shuffle"]

# A message of its own has a cost of some microseconds: worth it from here on (bytes).
_ALONE_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class _Leg:
    """What goes to or comes from one rank: rectangles by themselves, and the others with their places in a vector."""

    rank: int
    alone: Moves
    packed: Moves
    offset: int  # of the vector, in the buffer of all vectors
    size: int


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
    itemsize
        Bytes of an element.
    order
        Memory order of the destinations.
    extents
        Length of each destination along its fast axis.
    skip_home
        What stays here is in place already.
    """

    def __init__(
        self,
        moves: Moves,
        me: int,
        ranks: tuple[int, ...],
        itemsize: int,
        order: str,
        extents: Sequence[int],
        skip_home: bool = False,
    ) -> None:
        legs = moves.legs(me)
        self.itemsize, self.order = itemsize, order
        self._home = None if skip_home else legs.home
        self._extents = np.asarray(extents, np.int64)
        self._send, sent = self._legs(legs.send, ranks)
        self._receive, received = self._legs(legs.receive, ranks)
        self._outgoing = cp.empty(sent, cp.uint8) if sent else None
        self._incoming = cp.empty(received, cp.uint8) if received else None

    @property
    def buffer_bytes(self) -> int:
        """Device memory of its buffers."""
        return sum(buffer.nbytes for buffer in (self._outgoing, self._incoming) if buffer is not None)

    def _legs(self, found: dict[int, Moves], ranks: tuple[int, ...]) -> tuple[list[_Leg], int]:
        legs, total = [], 0
        for peer, moves in sorted(found.items()):
            alone = (moves.sizes * self.itemsize >= _ALONE_BYTES) & self._whole(moves)
            packed = moves.take(~alone)
            size = int(packed.sizes.sum()) * self.itemsize
            legs.append(_Leg(ranks.index(peer), moves.take(alone), packed, total, size))
            total += -(-size // 256) * 256
        return legs, total

    def _whole(self, moves: Moves) -> NDArray[np.bool_]:
        """Whether rectangles are one piece of memory in their destination."""
        size, slow = (moves.ncols, moves.nrows) if self.order == "C" else (moves.nrows, moves.ncols)
        return (size == self._extents[moves.dst]) | (slow == 1)

    def run(self, src: dict[int, Any], dst: dict[int, Any], stream: Any, comm: NcclComm | None) -> None:
        """Put everything on the stream; arrays by the numbers that the moves give them."""
        sources = {n: Span(x.data.ptr, *x.strides) for n, x in src.items()}
        targets = {n: Span(x.data.ptr, *x.strides) for n, x in dst.items()}
        tables: list[Table] = []
        sends: list[tuple[int, int, int]] = []
        receives: list[tuple[int, int, int]] = []
        unpacking: list[Table] = []
        keep = []
        if self._home is not None and len(self._home):
            tables.append(rectangles(self._home, sources, targets, self.order))
        for leg in self._send:
            sizes = leg.alone.sizes * self.itemsize
            table = self._packing(leg.alone, sources, 0)
            starts = table[:, SRC].copy()
            if not (dense := are_dense(table, self.itemsize)).all():
                # Not as large pieces here: from a buffer, then.
                with stream:
                    buffer = cp.empty(int(sizes[~dense].sum()), cp.uint8)
                keep.append(buffer)
                tables.append(self._packing(leg.alone.take(~dense), sources, buffer.data.ptr))
                starts[~dense] = tables[-1][:, DST]
            sends += [(leg.rank, int(p), int(n)) for p, n in zip(starts, sizes, strict=True)]
            if leg.size:
                assert self._outgoing is not None
                pointer = self._outgoing.data.ptr + leg.offset
                tables.append(self._packing(leg.packed, sources, pointer))
                sends.append((leg.rank, pointer, leg.size))
        for leg in self._receive:
            sizes = leg.alone.sizes * self.itemsize
            if len(sizes):
                starts = pointers(leg.alone.dst, leg.alone.dst_row, leg.alone.dst_col, targets)
                receives += [(leg.rank, int(p), int(n)) for p, n in zip(starts, sizes, strict=True)]
            if leg.size:
                assert self._incoming is not None
                pointer = self._incoming.data.ptr + leg.offset
                unpacking.append(self._unpacking(leg.packed, targets, pointer))
                receives.append((leg.rank, pointer, leg.size))
        if tables:
            copy_rectangles(np.concatenate(tables), self.itemsize, stream)
        if sends or receives:
            assert comm is not None
            comm.exchange(sends, receives)
        if unpacking:
            copy_rectangles(np.concatenate(unpacking), self.itemsize, stream)

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
