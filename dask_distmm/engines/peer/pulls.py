"""Copies of rectangles into this GPU's memory: by copy engines where rows are dense, else by one kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.gpu.copy_kernels import Launch, copy_rectangles
from dask_distmm.engines.gpu.operands import record
from dask_distmm.layout.rectangles import (
    DST,
    DST_OUTER,
    INNER,
    OUTER,
    SRC,
    SRC_INNER,
    SRC_OUTER,
    Span,
    Table,
    tabulate,
)

# A copy engine rests 4 to 5 microseconds between copies, and each takes as long of the host: many of these sizes and
# below go into one kernel, which pulls 325 GB/s where copy engines pull 360 in large ones (H200). It takes
# multiprocessors from GEMMs, and waits for those that have them: only the smallest are worth that.
_SMALL_BYTES = 2**20
_SMALL_BYTES_AT_FIRST = 4 * 2**20
_MANY = 8
# Number of arguments of memcpyAsync; memcpy2DAsync has more.
_WHOLE = 3


class Rectangle(NamedTuple):
    """A copy of one rectangle: addresses and strides (bytes) of source and target, number of rows and columns."""

    source: Span
    target: Span
    rows: int
    cols: int


def pull_table(
    sources: NDArray[np.int64], targets: NDArray[np.int64], rows: NDArray[np.int64], cols: NDArray[np.int64], size: int
) -> Table:
    """Return the table of some copies, along the axis that is dense in the target; see `layout.rectangles`."""
    return tabulate(sources.T, targets.T, rows, cols, (targets[:, 2] == size) | (cols == 1))


def table_of(found: Sequence[Rectangle], size: int) -> Table:
    """Return the table of some copies of elements of `size` bytes."""
    flat = np.array([(*one.source, *one.target, one.rows, one.cols) for one in found], np.int64).reshape(-1, 8)
    return pull_table(flat[:, :3], flat[:, 3:6], flat[:, 6], flat[:, 7], size)


class CopyBatch:
    """Copies that are ready to be put on a stream, once; see `make_copies`."""

    def __init__(self, lanes: Sequence[list[list[int]]], launches: list[Launch], ready: cp.cuda.Event) -> None:
        self._lanes, self._launches, self._ready = lanes, launches, ready

    def run(self, stream: cp.cuda.Stream, beside: Sequence[cp.cuda.Stream] = ()) -> None:
        """Put them on a stream, as if all were on it; must be kept until they are done.

        Lanes go at the same time, as far as there are streams `beside` that one.
        """
        streams = [stream, *beside]
        used = streams[: len(self._lanes)]
        if len(used) > 1:
            before = record(stream)
        if self._launches:
            stream.wait_event(self._ready)
        for launch in self._launches:
            launch.run(stream)
        for other in used[1:]:
            other.wait_event(before)
        for number, lane in enumerate(self._lanes):
            _copy(lane, streams[number % len(streams)])
        for other in used[1:]:
            stream.wait_event(record(other))


def _copy(lane: list[list[int]], stream: cp.cuda.Stream) -> None:
    runtime = cp.cuda.runtime
    for one in lane:
        copy = runtime.memcpyAsync if len(one) == _WHOLE else runtime.memcpy2DAsync
        copy(*one, runtime.memcpyDefault, stream.ptr)


def make_copies(
    tables: Sequence[Table],
    itemsize: int,
    *,
    here: bool = False,
    at_first: Sequence[bool] = (),
    lanes: Sequence[NDArray[np.int64]] = (),
) -> list[CopyBatch]:
    """Return for each of some tables the copies that are to be done together."""
    table = np.concatenate(tables) if tables else np.empty((0, 7), np.int64)
    lane = np.concatenate(lanes) if lanes else np.zeros(len(table), np.int64)
    ends = np.cumsum([0, *map(len, tables)])
    width, height = table[:, INNER] * itemsize, table[:, OUTER]
    source, target = table[:, SRC_OUTER], table[:, DST_OUTER]
    single = height == 1
    dense = (table[:, INNER] == 1) | (table[:, SRC_INNER] == itemsize)
    dense &= single | ((source >= width) & (target >= width))
    limits = [_SMALL_BYTES_AT_FIRST if first else _SMALL_BYTES for first in at_first or [False] * len(tables)]
    small = width * height < np.repeat(np.array(limits, np.int64), np.diff(ends))
    # How many of these each table has.
    many = np.diff(np.concatenate([[0], np.cumsum(small)])[ends]) >= _MANY
    by_kernel = ~dense | here | (small & np.repeat(many, np.diff(ends)))
    whole = single | ((source == width) & (target == width))
    columns = np.stack([table[:, DST], target, table[:, SRC], source, width, height], 1)
    columns[whole, :_WHOLE] = np.stack([table[:, DST], table[:, SRC], width * height], 1)[whole]
    parts = [slice(low, high) for low, high in itertools.pairwise(ends.tolist())]
    launches = copy_rectangles([_interleaved(table[part], lane[part], by_kernel[part]) for part in parts], itemsize)
    # The kernels' tables are put on the device by the default stream.
    ready = record(cp.cuda.Stream.null)
    rows = list(zip(lane.tolist(), by_kernel.tolist(), whole.tolist(), columns.tolist(), strict=True))
    return [CopyBatch(_by_lane(rows[part]), kernels, ready) for part, kernels in zip(parts, launches, strict=True)]


def _interleaved(table: Table, lane: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Table:
    """Return the chosen copies, one of each lane after the other: a kernel does many copies at a time."""
    table, lane = table[chosen], lane[chosen]
    if not len(table) or (lane == lane[0]).all():
        return table
    order = np.argsort(lane, kind="stable")
    place = np.empty(len(table), np.int64)
    place[order] = np.arange(len(table)) - np.searchsorted(lane[order], lane[order])
    return table[np.lexsort((lane, place))]


def _by_lane(rows: Sequence[tuple[int, bool, bool, list[int]]]) -> list[list[list[int]]]:
    """Return what copy engines do, by lane."""
    found: dict[int, list[list[int]]] = {}
    for lane, by_kernel, whole, columns in rows:
        if not by_kernel:
            found.setdefault(lane, []).append(columns[:_WHOLE] if whole else columns)
    return list(found.values())


def span_of(array: Any) -> Span:
    """Return where a device array lies."""
    return Span(int(array.data.ptr), *map(int, array.strides))
