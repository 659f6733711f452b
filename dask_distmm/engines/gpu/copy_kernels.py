"""Copies of many rectangles at once, by two CUDA kernels, straight and transposed, and by copy engines.

Exchanges between ranks are made of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.gpu.operands import record
from dask_distmm.layout.rectangles import (
    DST,
    DST_OUTER,
    INNER,
    OUTER,
    SRC,
    SRC_INNER,
    SRC_OUTER,
    Shuffle,
    Span,
    Table,
    split,
    tabulate,
    unit_of,
    work,
)

if TYPE_CHECKING:
    from dask_distmm.comms.nccl import NcclComm

_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "uint4"}

_FIND = """
__device__ __forceinline__ int find(const long long* first, int count, long long block) {
  int low = 0, high = count;
  while (high - low > 1) {
    int middle = (low + high) >> 1;
    if (first[middle] <= block) low = middle; else high = middle;
  }
  return low;
}
"""

# 256 threads copy 4096 units: a block is 2^shift wide, each thread takes 16 rows, 8 loads in flight.
_STRAIGHT = """
extern "C" __global__ void copy_straight(const long long* __restrict__ table, const long long* __restrict__ first,
                                         int count) {
  typedef %(type)s T;
  int which = find(first, count, blockIdx.x);
  const long long* r = table + 7 * (long long)which;
  const char* src = (const char*)r[0];
  char* dst = (char*)r[1];
  long long width = r[2], height = r[3], src_stride = r[4], dst_stride = r[5];
  int shift = (int)r[6];
  long long across = (width + (1 << shift) - 1) >> shift, block = blockIdx.x - first[which];
  long long i = ((block %% across) << shift) + (threadIdx.x & ((1 << shift) - 1));
  long long j = (block / across) * (4096 >> shift) + (threadIdx.x >> shift);
  int step = 256 >> shift;
  if (i >= width) return;
  src += i * sizeof(T); dst += i * sizeof(T);
  for (int half = 0; half < 2; ++half) {
    T value[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
      long long o = j + u * step;
      if (o < height) value[u] = *(const T*)(src + o * src_stride);
    }
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
      long long o = j + u * step;
      if (o < height) *(T*)(dst + o * dst_stride) = value[u];
    }
    j += 8 * step;
  }
}
"""

# 32 x 8 threads turn a block of 32 x 32 elements around in shared memory; any strides of the source.
_TRANSPOSED = """
extern "C" __global__ void copy_transposed(const long long* __restrict__ table, const long long* __restrict__ first,
                                           int count) {
  typedef %(type)s T;
  __shared__ T tile[32][33];
  int which = find(first, count, blockIdx.x);
  const long long* r = table + 7 * (long long)which;
  const char* src = (const char*)r[0];
  char* dst = (char*)r[1];
  long long inner = r[2], outer = r[3];
  long long across = (inner + 31) >> 5, block = blockIdx.x - first[which];
  long long i0 = (block %% across) << 5, o0 = (block / across) << 5;
  for (int u = threadIdx.y; u < 32; u += 8) {
    long long i = i0 + u, o = o0 + threadIdx.x;
    if (i < inner && o < outer) tile[u][threadIdx.x] = *(const T*)(src + i * r[4] + o * r[5]);
  }
  __syncthreads();
  for (int u = threadIdx.y; u < 32; u += 8) {
    long long i = i0 + threadIdx.x, o = o0 + u;
    if (i < inner && o < outer) *(T*)(dst + i * sizeof(T) + o * r[6]) = tile[threadIdx.x][u];
  }
}
"""


@functools.lru_cache(maxsize=16)
def _copy_kernel(name: str, size: int) -> cp.RawKernel:
    code = {"copy_straight": _STRAIGHT, "copy_transposed": _TRANSPOSED}[name]
    return cp.RawKernel(_FIND + code % {"type": _TYPES[size]}, name)


class Launch:
    """One kernel launch with its table on the device."""

    def __init__(
        self, name: str, size: int, threads: tuple[int, ...], blocks: int, table: cp.ndarray, first: cp.ndarray
    ) -> None:
        self._kernel, self._threads, self._blocks = _copy_kernel(name, size), threads, blocks
        self._arguments = (table, first, np.int32(len(first) - 1))

    def run(self, stream: cp.cuda.Stream) -> None:
        """Put it on a stream."""
        with stream:
            self._kernel((self._blocks,), self._threads, self._arguments)


def copy_rectangles(tables: Sequence[Table], itemsize: int) -> list[list[Launch]]:
    """Return for each of some tables the launches that copy its rectangles: at most one of each kind there is.

    Made on the default stream, with one copy to the device for all of them.
    """
    kinds: list[tuple[int, str, int, tuple[int, ...], Table, NDArray[np.int64]]] = []
    for number, table in enumerate(tables):
        straight, transposed = split(table, itemsize)
        if len(straight):
            unit = unit_of(straight, itemsize)
            kinds.append((number, "copy_straight", unit, (256,), *work(straight, itemsize, unit)))
        if len(transposed):
            blocks = -(-transposed[:, INNER] // 32) * -(-transposed[:, OUTER] // 32)
            first = np.concatenate([[0], np.cumsum(blocks)])
            kinds.append((number, "copy_transposed", itemsize, (32, 8), transposed, first))
    launches: list[list[Launch]] = [[] for _ in tables]
    if kinds:
        on_device = cp.asarray(np.concatenate([part for *_, rows, first in kinds for part in (rows.ravel(), first)]))
    at = 0
    for number, name, size, threads, rows, first in kinds:
        parts = on_device[at : at + rows.size], on_device[at + rows.size : at + rows.size + len(first)]
        launches[number].append(Launch(name, size, threads, int(first[-1]), *parts))
        at += rows.size + len(first)
    return launches


# Copies of rectangles into this GPU's memory: by copy engines where rows are dense, else by one kernel


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


def table_of(rectangles: Sequence[Rectangle], size: int) -> Table:
    """Return the table of some copies of elements of `size` bytes."""
    flat = np.array([(*x.source, *x.target, x.rows, x.cols) for x in rectangles], np.int64).reshape(-1, 8)
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
        for side in used[1:]:
            side.wait_event(before)
        for number, lane in enumerate(self._lanes):
            _copy(lane, streams[number % len(streams)])
        for side in used[1:]:
            stream.wait_event(record(side))


def _copy(lane: list[list[int]], stream: cp.cuda.Stream) -> None:
    runtime = cp.cuda.runtime
    for rectangle in lane:
        copy = runtime.memcpyAsync if len(rectangle) == _WHOLE else runtime.memcpy2DAsync
        copy(*rectangle, runtime.memcpyDefault, stream.ptr)


def make_copies(
    tables: Sequence[Table],
    itemsize: int,
    *,
    here: Sequence[bool] = (),
    at_first: Sequence[bool] = (),
    lanes: Sequence[NDArray[np.int64]] = (),
) -> list[CopyBatch]:
    """Return for each of some tables the copies that are to be done together; `here`: those by a kernel in any case."""
    table = np.concatenate(tables) if tables else np.empty((0, 7), np.int64)
    lane = np.concatenate(lanes) if lanes else np.zeros(len(table), np.int64)
    ends = np.cumsum([0, *map(len, tables)])
    width, height = table[:, INNER] * itemsize, table[:, OUTER]
    source, target = table[:, SRC_OUTER], table[:, DST_OUTER]
    single = height == 1
    dense = (table[:, INNER] == 1) | (table[:, SRC_INNER] == itemsize)
    dense &= single | ((source >= width) & (target >= width))
    counts, no = np.diff(ends), [False] * len(tables)
    limits = [_SMALL_BYTES_AT_FIRST if first else _SMALL_BYTES for first in at_first or no]
    small = width * height < np.repeat(np.array(limits, np.int64), counts)
    # How many of these each table has.
    many = np.diff(np.concatenate([[0], np.cumsum(small)])[ends]) >= _MANY
    by_kernel = ~dense | np.repeat(np.array(here or no, bool), counts) | (small & np.repeat(many, counts))
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
    """Return the chosen copies interleaved by lane, as a kernel runs many copies at a time."""
    table, lane = table[chosen], lane[chosen]
    if not len(table) or (lane == lane[0]).all():
        return table
    order = np.argsort(lane, kind="stable")
    place = np.empty(len(table), np.int64)
    place[order] = np.arange(len(table)) - np.searchsorted(lane[order], lane[order])
    return table[np.lexsort((lane, place))]


def _by_lane(rows: Sequence[tuple[int, bool, bool, list[int]]]) -> list[list[list[int]]]:
    """Return the copies for copy engines, by lane."""
    lanes: dict[int, list[list[int]]] = {}
    for lane, by_kernel, whole, columns in rows:
        if not by_kernel:
            lanes.setdefault(lane, []).append(columns[:_WHOLE] if whole else columns)
    return list(lanes.values())


# Exchanges between ranks


def device_bytes(size: int) -> Any:
    """Return a buffer of some bytes, as a `Shuffle` wants it."""
    return cp.empty(size, cp.uint8)


class Exchange:
    """Redistributions of elements of one size: one launch to pack, one group of messages, one launch to unpack."""

    def __init__(self, *shuffles: Shuffle) -> None:
        self._shuffles = shuffles
        self.buffers = [buffer for shuffle in shuffles for buffer in shuffle.buffers]
        tables = ([t for s in shuffles for t in s.packing], [t for s in shuffles for t in s.unpacking])
        none, size = np.empty((0, 7), np.int64), max((shuffle.itemsize for shuffle in shuffles), default=1)
        self._pack, self._unpack = copy_rectangles([np.concatenate([none, *some]) for some in tables], size)
        self._sends = [send for shuffle in shuffles for send in shuffle.sends]
        self._receives = [receive for shuffle in shuffles for receive in shuffle.receives]
        self.received_bytes = sum(size for _, _, size in self._receives)

    def run(self, stream: cp.cuda.Stream, comm: NcclComm | None) -> None:
        """Queue packing, messages and unpacking."""
        for launch in self._pack:
            launch.run(stream)
        if self._sends or self._receives:
            assert comm is not None
            comm.exchange(self._sends, self._receives)
        for launch in self._unpack:
            launch.run(stream)
