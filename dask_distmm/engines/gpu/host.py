"""NumPy chunks to the device and back: through pinned buffers, filled by threads while earlier ones travel."""

from __future__ import annotations

import collections
import functools
import importlib.resources
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import cupy as cp
import cupyx
import numpy as np
from numpy.typing import NDArray

from dask_distmm.numeric.types import FP8, decode

# CUDA sources of this folder as modules of kernels, compiled when they are first needed


_NUMBERS = {
    "float32": ("float", 4, 0),
    "float64": ("double", 8, 0),
    "complex64": ("float", 4, 1),
    "complex128": ("double", 8, 1),
}


def source(name: str, dtype: np.dtype | None = None) -> str:
    """Return the code of a module: ``"merging"``, or ``"tridiagonal"`` for a type of numbers."""
    folder = importlib.resources.files("dask_distmm.engines.gpu")
    if dtype is None:
        return folder.joinpath(f"{name}.cu").read_text()
    real, size, is_complex = _NUMBERS[dtype.name]
    defined = f"#define REAL {real}\n#define REAL_BYTES {size}\n#define COMPLEX {is_complex}\n"
    return defined + "\n".join(folder.joinpath(f"{part}.cu").read_text() for part in ("numbers", "system", name))


@functools.lru_cache(maxsize=64)
def kernel(module: str, name: str, dtype: np.dtype | None = None) -> cp.RawKernel:
    """Return a kernel of a module."""
    return _module(module, dtype).get_function(name)


@functools.lru_cache(maxsize=16)
def _module(name: str, dtype: np.dtype | None) -> cp.RawModule:
    return cp.RawModule(code=source(name, dtype))


# NumPy chunks to the device and back: through pinned buffers, filled by threads while earlier ones travel


# With these a host of 16 cores copies 33 GB/s to an H200 and 18 GB/s from it into new memory (PCIe: 55 GB/s); with 4
# threads 21 and 12 GB/s.
_BUFFER_BYTES = 4 * 2**20
_BUFFERS = 32
_THREADS = 8


class _Buffers:
    """A ring of pinned buffers; a buffer is used again when its last copy is done."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="distmm-pinned")
        self._memory = [cupyx.empty_pinned(_BUFFER_BYTES, np.uint8) for _ in range(_BUFFERS)]
        self._events = [cp.cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
        self._next = 0

    def take(self) -> tuple[NDArray[np.uint8], Any]:
        """Wait for a free buffer; return it with the event to record after its use."""
        at = self._next
        self._next = (at + 1) % _BUFFERS
        self._events[at].synchronize()
        return self._memory[at], self._events[at]


@functools.lru_cache(maxsize=3)
def _buffers(direction: str) -> _Buffers:
    """Return the buffers of a direction, ``"up"``, ``"down"`` or ``"made"``: one thread at a time uses each."""
    return _Buffers()


def _dense(chunk: Any) -> tuple[Any, bool]:
    """Return a C-contiguous view or copy, and whether it is the transpose."""
    if chunk.flags.f_contiguous and not chunk.flags.c_contiguous:
        return chunk.T, True
    return chunk, False


def device_like(chunk: NDArray[Any]) -> cp.ndarray:
    """Return an empty device array that `to_device` can copy a NumPy array into."""
    return cp.empty(chunk.shape, chunk.dtype, order="F" if _dense(chunk)[1] else "C")


def in_type(array: cp.ndarray, type_name: str, dtype: np.dtype) -> Any:
    """Return an array that holds a type by name, as bytes if that is FP8, in the type of what it is copied to."""
    return decode(cp, array, type_name, dtype) if type_name in FP8 and dtype != np.uint8 else array


def staging() -> cp.ndarray:
    """Return the device memory that `Uploads` takes to transpose and convert: as large as a pinned buffer."""
    return cp.empty(_BUFFER_BYTES, np.uint8)


class _Piece(NamedTuple):
    """A part of a matrix that fits a pinned buffer, on its way: see `Uploads`."""

    filled: Future[None]
    memory: NDArray[np.uint8]
    event: cp.cuda.Event
    place: NDArray[Any]
    target: cp.ndarray
    type_name: str


class Uploads:
    """Copies NumPy matrices to the device in their order: a few pieces are filled while an earlier one travels."""

    def __init__(self, stream: cp.cuda.Stream, staged: cp.ndarray | None = None, direction: str = "up") -> None:
        self._stream, self._staged, self._direction = stream, staged, direction
        self._waiting: collections.deque[_Piece] = collections.deque()

    def put(self, source: NDArray[Any], target: cp.ndarray, type_name: str = "") -> None:
        """Copy a matrix; the last pieces are not on the stream before `finish`."""
        if source.strides[0] == source.itemsize and source.strides[1] != source.itemsize:
            source, target = source.T, target.T
        if source.flags.c_contiguous and target.flags.c_contiguous:
            source, target = source.reshape(1, -1), target.reshape(1, -1)
        buffers, most = _buffers(self._direction), _BUFFER_BYTES // source.itemsize
        width = min(most, source.shape[1])
        height = max(1, most // max(1, width))
        for row, col in itertools.product(range(0, source.shape[0], height), range(0, source.shape[1], width)):
            at = slice(row, row + height), slice(col, col + width)
            piece = source[at]
            if len(self._waiting) == _THREADS:
                self._send()
            memory, event = buffers.take()
            place = memory[: piece.nbytes].view(piece.dtype).reshape(piece.shape)
            filled = buffers.threads.submit(np.copyto, place, piece)
            self._waiting.append(_Piece(filled, memory, event, place, target[at], type_name))

    def finish(self) -> None:
        """Queue all remaining copies."""
        while self._waiting:
            self._send()

    def _send(self) -> None:
        """Queue the copy of the oldest piece."""
        runtime, stream = cp.cuda.runtime, self._stream
        first = self._waiting.popleft()
        first.filled.result()
        place, target, size = first.place, first.target, first.place.nbytes
        (height, width), itemsize = place.shape, place.itemsize
        dense = target.strides[1] == itemsize or width == 1
        kind = runtime.memcpyHostToDevice
        if target.dtype != place.dtype or not dense:
            assert self._staged is not None
            runtime.memcpyAsync(self._staged.data.ptr, first.memory.ctypes.data, size, kind, stream.ptr)
            with stream:
                staged = self._staged[:size].view(place.dtype).reshape(place.shape)
                target[...] = in_type(staged, first.type_name, target.dtype)
        elif height == 1 or target.strides[0] == width * itemsize:
            runtime.memcpyAsync(target.data.ptr, first.memory.ctypes.data, size, kind, stream.ptr)
        else:
            line = width * itemsize
            pitched = target.data.ptr, target.strides[0], first.memory.ctypes.data, line, line, height
            runtime.memcpy2DAsync(*pitched, kind, stream.ptr)
        first.event.record(stream)


def to_device(chunk: NDArray[Any], target: cp.ndarray, stream: cp.cuda.Stream, direction: str = "up") -> None:
    """Copy a NumPy array into what `device_like` gave for it, on a stream."""
    uploads = Uploads(stream, direction=direction)
    uploads.put(chunk, target)
    uploads.finish()


def to_host(chunk: cp.ndarray, stream: cp.cuda.Stream) -> NDArray[Any]:
    """Return a device array as a NumPy array of the same memory order, after what is on the stream."""
    source, transposed = _dense(chunk)
    result = np.empty(source.shape, source.dtype)
    flat = source.reshape(-1)
    buffers, at = _buffers("down"), 0
    copies: list[Future[None]] = []

    def store(memory: NDArray[np.uint8], event: Any, part: NDArray[Any]) -> None:
        event.synchronize()
        np.copyto(part, memory[: part.nbytes].view(part.dtype))

    copied, step = result.reshape(-1), max(1, _BUFFER_BYTES // result.itemsize)
    for part in (copied[start : start + step] for start in range(0, copied.size, step)):
        if len(copies) >= _BUFFERS:
            copies[-_BUFFERS].result()
        memory, event = buffers.take()
        cp.cuda.runtime.memcpyAsync(
            memory.ctypes.data, flat.data.ptr + at, part.nbytes, cp.cuda.runtime.memcpyDeviceToHost, stream.ptr
        )
        event.record(stream)
        copies.append(buffers.threads.submit(store, memory, event, part))
        at += part.nbytes
    for copy in copies:
        copy.result()
    return result.T if transposed else result
