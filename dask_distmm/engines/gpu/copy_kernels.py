"""Two CUDA kernels that copy many rectangles in one launch, straight and transposed; and exchanges between ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout.rectangles import INNER, OUTER, Shuffle, Table, split, unit_of, work

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
    made: list[tuple[int, str, int, tuple[int, ...], Table, NDArray[np.int64]]] = []
    for number, table in enumerate(tables):
        straight, transposed = split(table, itemsize)
        if len(straight):
            unit = unit_of(straight, itemsize)
            made.append((number, "copy_straight", unit, (256,), *work(straight, itemsize, unit)))
        if len(transposed):
            blocks = -(-transposed[:, INNER] // 32) * -(-transposed[:, OUTER] // 32)
            first = np.concatenate([[0], np.cumsum(blocks)])
            made.append((number, "copy_transposed", itemsize, (32, 8), transposed, first))
    found: list[list[Launch]] = [[] for _ in tables]
    if made:
        on_device = cp.asarray(np.concatenate([part for *_, rows, first in made for part in (rows.ravel(), first)]))
    at = 0
    for number, name, size, threads, rows, first in made:
        parts = on_device[at : at + rows.size], on_device[at + rows.size : at + rows.size + len(first)]
        found[number].append(Launch(name, size, threads, int(first[-1]), *parts))
        at += rows.size + len(first)
    return found


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
        """Put packing, messages and unpacking on the stream."""
        for launch in self._pack:
            launch.run(stream)
        if self._sends or self._receives:
            assert comm is not None
            comm.exchange(self._sends, self._receives)
        for launch in self._unpack:
            launch.run(stream)
