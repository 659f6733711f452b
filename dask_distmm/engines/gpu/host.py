"""NumPy chunks to the device and back: through pinned buffers, filled by threads while earlier ones travel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cupy as cp
import cupyx
import numpy as np
from numpy.typing import NDArray

__all__ = ["device_like", "to_device", "to_host"]

# Buffers of this size travel at the full speed of PCIe; one thread copies about 10 GB/s into them.
_BUFFER_BYTES = 16 * 2**20
_BUFFERS = 8
_THREADS = 4


class _Buffers:
    """A ring of pinned buffers; a buffer is used again when its last copy is done."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="distmm-pinned")
        self._memory = [cupyx.empty_pinned(_BUFFER_BYTES, np.uint8) for _ in range(_BUFFERS)]
        self._events = [cp.cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
        self._next = 0

    def take(self) -> tuple[NDArray[np.uint8], Any]:
        """Return a free buffer, and the event to record when it has been used."""
        at = self._next
        self._next = (at + 1) % _BUFFERS
        self._events[at].synchronize()
        return self._memory[at], self._events[at]


@functools.lru_cache(maxsize=1)
def _buffers() -> _Buffers:
    return _Buffers()


def _rows(chunk: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Cut a dense 2-D array, as C-ordered, into groups of rows (or of parts of one) that fit a buffer."""
    flat = chunk.reshape(-1)
    step = max(1, _BUFFER_BYTES // chunk.itemsize)
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def _dense(chunk: Any) -> tuple[Any, bool]:
    """Return a C-contiguous view or copy, and whether it is the transpose."""
    if chunk.flags.f_contiguous and not chunk.flags.c_contiguous:
        return chunk.T, True
    return chunk, False


def device_like(chunk: NDArray[Any]) -> cp.ndarray:
    """Return an empty device array that `to_device` can copy a NumPy array into."""
    return cp.empty(chunk.shape, chunk.dtype, order="F" if _dense(chunk)[1] else "C")


def to_device(chunk: NDArray[Any], target: cp.ndarray, stream: cp.cuda.Stream) -> None:
    """Copy a NumPy array into what `device_like` gave for it, on a stream."""
    source, turned = _dense(np.ascontiguousarray(chunk) if not chunk.flags.forc else chunk)
    flat = (target.T if turned else target).reshape(-1)
    buffers, at = _buffers(), 0
    waiting: list[Any] = []

    def send() -> None:
        filled, memory, event, start, size = waiting.pop(0)
        filled.result()
        pointer = flat.data.ptr + start
        cp.cuda.runtime.memcpyAsync(pointer, memory.ctypes.data, size, cp.cuda.runtime.memcpyHostToDevice, stream.ptr)
        event.record(stream)

    for part in _rows(source):
        if len(waiting) == _THREADS:
            send()
        memory, event = buffers.take()
        place = memory[: part.nbytes].view(part.dtype)
        waiting.append((buffers.threads.submit(np.copyto, place, part), memory, event, at, part.nbytes))
        at += part.nbytes
    while waiting:
        send()


def to_host(chunk: cp.ndarray, stream: cp.cuda.Stream) -> NDArray[Any]:
    """Return a device array as a NumPy array of the same memory order, after what is on the stream."""
    source, turned = _dense(chunk)
    result = np.empty(source.shape, source.dtype)
    flat = source.reshape(-1)
    buffers, at = _buffers(), 0
    copies: list[Future[None]] = []

    def store(memory: NDArray[np.uint8], event: Any, part: NDArray[Any]) -> None:
        event.synchronize()
        np.copyto(part, memory[: part.nbytes].view(part.dtype))

    for part in _rows(result):
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
    return result.T if turned else result
