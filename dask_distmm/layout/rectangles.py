"""Tables of rectangles for the copy kernels: addresses, strides, and how work is cut for the GPU. Pure.

A `Span` says where a matrix is in memory. `rectangles` turns a list of moves into one row of numbers for
each: both addresses, the extents along the destination's fast axis (inner) and slow axis (outer), the strides
in bytes. `split` sorts out those that are straight (fast axes agree) from those that are transposed, and
`work` cuts them into tiles for the blocks of one kernel launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Moves

Table = NDArray[np.int64]
# Columns of a table.
SRC, DST, INNER, OUTER, SRC_INNER, SRC_OUTER, DST_OUTER = range(7)
# Elements that one block of the straight kernel copies.
_BLOCK_ELEMENTS = 4096
_WIDEST = 256


class Span(NamedTuple):
    """Storage of a matrix: address of its first element and strides, in bytes."""

    pointer: int
    row_stride: int
    col_stride: int


def pointers(
    numbers: NDArray[np.int64], rows: NDArray[np.int64], cols: NDArray[np.int64], spans: dict[int, Span]
) -> NDArray[np.int64]:
    """Return the addresses of elements ``(rows, cols)`` of matrices by number."""
    pointer, row_stride, col_stride = _look_up(numbers, spans)
    found: NDArray[np.int64] = pointer + rows * row_stride + cols * col_stride
    return found


def are_dense(table: Table, itemsize: int) -> NDArray[np.bool_]:
    """Whether the source of each rectangle is one piece of memory, in the destination's order."""
    inner = (table[:, INNER] == 1) | (table[:, SRC_INNER] == itemsize)
    outer = (table[:, OUTER] == 1) | (table[:, SRC_OUTER] == table[:, INNER] * itemsize)
    return np.asarray(inner & outer, bool)


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
    one = table[:, OUTER] == 1
    parts = [table[:, SRC], table[:, DST], table[:, INNER] * itemsize]
    parts += [table[~one, SRC_OUTER], table[~one, DST_OUTER]]
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
