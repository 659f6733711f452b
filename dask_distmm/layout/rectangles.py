"""Tables of rectangles for the copy kernels: addresses, strides, and how work is cut for the GPU. Pure.

A `Span` says where a matrix is in memory. `rectangles` turns a list of moves into one row of numbers for
each: both addresses, the extents along the destination's fast axis (inner) and slow axis (outer), the strides
in bytes. `split` sorts out those that are straight (fast axes agree) from those that are transposed, and
`work` cuts them into tiles for the blocks of one kernel launch.

A `Shuffle` is a redistribution by packing, one exchange of messages, and unpacking. A large rectangle travels in a
message of its own. An end at which it is one piece of memory needs no buffer for it; the other end may need one. Small
rectangles to the same rank travel together, packed in one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Moves

Table = NDArray[np.int64]
# Columns of a table.
SRC, DST, INNER, OUTER, SRC_INNER, SRC_OUTER, DST_OUTER = range(7)
# Elements that one block of the straight kernel copies.
_BLOCK_ELEMENTS = 4096
_WIDEST = 256
# A message costs some microseconds. A rectangle of at least this many bytes has a message of its own; fewer where
# rectangles need no packing anyway.
SINGLE_BYTES = 4 * 2**20


class Span(NamedTuple):
    """Storage of a matrix: address of its first element and strides, in bytes."""

    pointer: int
    row_stride: int
    col_stride: int

    def at(self, row: int, col: int) -> Span:
        """Return the place of the part that begins at a row and a column."""
        return self._replace(pointer=self.pointer + row * self.row_stride + col * self.col_stride)

    @property
    def transposed(self) -> Span:
        """The place of the transpose."""
        return Span(self.pointer, self.col_stride, self.row_stride)


def span_of(array: Any) -> Span:
    """Return where a device array is."""
    return Span(int(array.data.ptr), *map(int, array.strides))


def are_dense(table: Table, itemsize: int, side: int) -> NDArray[np.bool_]:
    """Whether each rectangle is one piece of memory on a side, `SRC` or `DST`, in the destination's order."""
    inner = (table[:, INNER] == 1) | (side == DST) | (table[:, SRC_INNER] == itemsize)
    distance = table[:, SRC_OUTER if side == SRC else DST_OUTER]
    return np.asarray(inner & ((table[:, OUTER] == 1) | (distance == table[:, INNER] * itemsize)), bool)


def rectangles(moves: Moves, src: dict[int, Span], dst: dict[int, Span], order: str) -> Table:
    """Return the table for some moves between matrices."""
    if not len(moves):
        return np.empty((0, 7), np.int64)
    from_ptr, from_row, from_col = _look_up(moves.src, src)
    to_ptr, to_row, to_col = _look_up(moves.dst, dst)
    sources = from_ptr + moves.src_row * from_row + moves.src_col * from_col, from_row, from_col
    targets = to_ptr + moves.dst_row * to_row + moves.dst_col * to_col, to_row, to_col
    return tabulate(sources, targets, moves.nrows, moves.ncols, order == "C")


def tabulate(
    sources: Iterable[NDArray[np.int64]],
    targets: Iterable[NDArray[np.int64]],
    rows: NDArray[np.int64],
    cols: NDArray[np.int64],
    across: NDArray[np.bool_] | bool,
) -> Table:
    """Return the table of some copies."""
    (src, src_row, src_col), (dst, dst_row, dst_col) = sources, targets
    table = np.empty((len(rows), 7), np.int64)
    table[:, SRC], table[:, DST] = src, dst
    table[:, INNER], table[:, OUTER] = np.where(across, cols, rows), np.where(across, rows, cols)
    table[:, SRC_INNER], table[:, SRC_OUTER] = np.where(across, src_col, src_row), np.where(across, src_row, src_col)
    table[:, DST_OUTER] = np.where(across, dst_row, dst_col)
    return table


def _look_up(numbers: NDArray[np.int64], spans: dict[int, Span]) -> NDArray[np.int64]:
    """Return pointers, row strides and column strides of matrices by number."""
    keys = np.array(sorted(spans), np.int64)
    values = np.array([spans[key] for key in keys.tolist()], np.int64)
    return np.ascontiguousarray(values[np.searchsorted(keys, numbers)].T)


def split(table: Table, itemsize: int) -> tuple[Table, Table]:
    """Return the rectangles whose rows can be copied as they are, and those that are to be transposed."""
    straight = (table[:, SRC_INNER] == itemsize) | (table[:, INNER] == 1)
    return table[straight], table[~straight]


def unit_of(table: Table, itemsize: int) -> int:
    """Return the size of the largest unit, up to 16 bytes, that all straight rectangles consist of."""
    single = table[:, OUTER] == 1
    parts = [table[:, SRC], table[:, DST], table[:, INNER] * itemsize]
    parts += [table[~single, SRC_OUTER], table[~single, DST_OUTER]]
    together = int(np.bitwise_or.reduce(np.concatenate(parts))) | 16
    return together & -together


def work(table: Table, itemsize: int, unit: int) -> tuple[Table, NDArray[np.int64]]:
    """Cut straight rectangles into blocks."""
    rows = np.empty((len(table), 7), np.int64)
    width = table[:, INNER] * itemsize // unit
    shift = np.ceil(np.log2(np.clip(width, 1, _WIDEST))).astype(np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = table[:, SRC], table[:, DST], width, table[:, OUTER]
    rows[:, 4], rows[:, 5], rows[:, 6] = table[:, SRC_OUTER], table[:, DST_OUTER], shift
    across = -(-width // (1 << shift))
    down = -(-table[:, OUTER] // (_BLOCK_ELEMENTS >> shift))
    return rows, np.concatenate([[0], np.cumsum(across * down)])


class Shuffle:
    """One redistribution between matrices on devices, as one participant sees it."""

    def __init__(
        self,
        # All rectangles between ranks, as all participants know them; this one; and the participant of each rank.
        moves: Moves,
        me: int,
        ranks: Sequence[int],
        # The matrices that are here, by number, and the memory order of the destinations.
        src: Mapping[int, Any],
        dst: Mapping[int, Any],
        order: str,
        # Makes a buffer of some bytes.
        allocate: Callable[[int], Any],
        *,
        single: int | None = None,
    ) -> None:
        self.order, self._allocate, self._single = order, allocate, SINGLE_BYTES if single is None else single
        self.itemsize = max((x.dtype.itemsize for x in (*src.values(), *dst.values())), default=1)
        self.buffers: list[Any] = []
        self.packing: list[Table] = []
        self.unpacking: list[Table] = []
        self.sends: list[tuple[int, int, int]] = []
        self.receives: list[tuple[int, int, int]] = []
        sources, targets = ({number: span_of(x) for number, x in arrays.items()} for arrays in (src, dst))
        home, peers = moves.between(me, me), [(rank, peer) for rank, peer in enumerate(ranks) if peer != me]
        # Others are in place already.
        home = home.take(np.isin(home.dst, list(targets)))
        if len(home):
            self.packing.append(rectangles(home, sources, targets, order))
        for rank, peer in peers:
            self._add(rank, moves.between(me, peer), sources, SRC)
        for rank, peer in peers:
            self._add(rank, moves.between(peer, me), targets, DST)

    def _buffer(self, size: int) -> int:
        self.buffers.append(self._allocate(size))
        return int(self.buffers[-1].data.ptr)

    def _add(self, rank: int, leg: Moves, spans: dict[int, Span], side: int) -> None:
        """Add the messages of one pair of ranks: large rectangles travel by themselves, others packed in one vector.

        A large one that is not one piece of memory here is sent from a buffer, or arrives there.
        """
        messages, tables = (self.sends, self.packing) if side == SRC else (self.receives, self.unpacking)
        copies = self._packing if side == SRC else self._unpacking
        large = leg.sizes * self.itemsize >= self._single
        single, packed = leg.take(large), leg.take(~large)
        if len(single):
            sizes, table = single.sizes * self.itemsize, copies(single, spans, 0)
            starts, loose = table[:, side].copy(), ~are_dense(table, self.itemsize, side)
            if loose.any():
                buffer = self._buffer(int(sizes[loose].sum()))
                tables.append(copies(single.take(loose), spans, buffer))
                starts[loose] = tables[-1][:, DST if side == SRC else SRC]
            messages += [(rank, int(p), int(n)) for p, n in zip(starts, sizes, strict=True)]
        if len(packed):
            size = int(packed.sizes.sum()) * self.itemsize
            buffer = self._buffer(size)
            tables.append(copies(packed, spans, buffer))
            messages.append((rank, buffer, size))

    def _packing(self, moves: Moves, sources: dict[int, Span], pointer: int) -> Table:
        """Return the copies of rectangles into a vector, each dense in the destination's order."""
        return rectangles(self._in_vector(moves, "dst"), sources, self._vector(moves, pointer), self.order)

    def _unpacking(self, moves: Moves, targets: dict[int, Span], pointer: int) -> Table:
        return rectangles(self._in_vector(moves, "src"), self._vector(moves, pointer), targets, self.order)

    def _in_vector(self, moves: Moves, side: str) -> Moves:
        """Return the same rectangles, each of which is a matrix of its own on one side."""
        nothing = np.zeros(len(moves), np.int64)
        changes: dict[str, Any] = {side: np.arange(len(moves)), f"{side}_row": nothing, f"{side}_col": nothing}
        return replace(moves, **changes)

    def _vector(self, moves: Moves, pointer: int) -> dict[int, Span]:
        starts = pointer + np.concatenate([[0], np.cumsum(moves.sizes)]) * self.itemsize
        size = self.itemsize
        if self.order == "C":
            return {i: Span(int(starts[i]), int(n) * size, size) for i, n in enumerate(moves.ncols)}
        return {i: Span(int(starts[i]), size, int(n) * size) for i, n in enumerate(moves.nrows)}
