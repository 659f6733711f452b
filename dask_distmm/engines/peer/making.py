"""Chunks of A and B that tasks make in threads of a rank, on the GPU, in the type in which they are multiplied.

Each thread has a CUDA stream of its own, which is CuPy's current stream there. So the kernels of a task overlap with
those of other threads and with GEMMs, and the thread puts the next task's kernels on its stream while they run. An
event tells when a chunk is complete, and the stream of GEMMs waits for it.

Memory. A chunk's memory comes from CuPy's pool in the order of its thread's stream (CuPy's own pool has free blocks for
each stream; RMM's waits where a block goes from one stream to another). When the last reference is dropped, the pool
may hand it to the next task of that thread at once, whose kernels come later *on that stream*, but not later than a
GEMM on another one. So a reference is kept until the event behind the last work that reads the chunk is done, as the
host has seen it (`Streaming`). What a task allocates and frees itself is used only on its thread's stream; so are the
original of a chunk that is converted, and what is copied to the GPU: all of that may be dropped at once.

These streams and CUDA's default stream wait for each other (they are not created as non-blocking). Without that, tasks
would be wrong that use libraries which work on the default stream (cuDF, Numba, PyTorch), or arrays that other tasks
have made there. Streams of the engine are non-blocking: GEMMs do not wait for the default stream. With several threads,
what one task leaves on the GPU for others, as in a cache, has to be complete when it leaves it: others run on other
streams. A worker of dask-cuda has one thread unless it is told otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.gpu.host import device_like, in_type, to_device
from dask_distmm.engines.gpu.operands import check_arrays, record
from dask_distmm.engines.peer.readable import DeviceView
from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.layout.rectangles import Span
from dask_distmm.numeric.types import FP8, carried
from dask_distmm.planning import Problem

# One thread at a time copies to the GPU: several have no more of the bus, and the pinned buffers are for one.
_copying = threading.Lock()


class Made(NamedTuple):
    """A chunk on the GPU."""

    # Keeps its memory.
    array: Any
    # Where it is.
    view: DeviceView
    # The event after which it may be read.
    complete: cp.cuda.Event


class DeviceMaker:
    """What the threads of a `ChunkLoader` do for a rank."""

    def __init__(
        self,
        problem: Problem,
        chunks: Mapping[ChunkKey, SourceChunk],
        streams: Sequence[cp.cuda.Stream],
        begin: cp.cuda.Event,
    ) -> None:
        self._problem, self._event = problem, begin
        self._keys = {chunk: key for key, chunk in chunks.items()}
        self._free, self._own = list(streams), threading.local()
        # A thread begins with the first GPU that the process sees.
        self._use_device = cp.cuda.Device().use

    def begin(self) -> None:
        """Give a thread its stream."""
        self._use_device()
        self._own.stream = self._free.pop()
        self._own.stream.wait_event(self._event)

    def make(self, source: Source, chunks: Sequence[SourceChunk]) -> dict[SourceChunk, Made]:
        """Run the task of a source; return those of its chunks that are used."""
        stream = self._own.stream
        # Not by `use`: a task that has a stream of its own for a while would leave its thread on the default stream.
        with stream:
            made = source.make()
            current = cp.cuda.get_current_stream()
            if current.ptr != stream.ptr:
                # The task has left its thread with another one.
                stream.wait_event(record(current))
            with stream:
                arrays = {chunk: self._on_device(*self._keys[chunk], chunk.view(made), stream) for chunk in chunks}
        complete = record(stream)
        return {chunk: Made(*found, complete) for chunk, found in arrays.items()}

    def _on_device(self, operand: str, number: int, chunk: Any, stream: cp.cuda.Stream) -> tuple[Any, DeviceView]:
        """Return a chunk on the GPU, in the type and the memory order in which it is multiplied, and where it is."""
        check_arrays("peer", {(operand, number): chunk})
        problem, type_name = self._problem, self._problem.dtype_of(operand)
        goal = problem.matrix_types["ab".index(operand)]
        if not isinstance(chunk, cp.ndarray):
            part = chunk.view(np.uint8) if type_name in FP8 else chunk
            chunk = device_like(part)
            with _copying:
                to_device(part, chunk, stream, "made")
        if type_name != goal:
            order = "F" if lying(chunk, "F") and not lying(chunk, "C") else "C"
            source, chunk = chunk, cp.empty(chunk.shape, carried(goal, "cupy"), order=order)
            chunk[...] = in_type(source, type_name, chunk.dtype)
        # The library conjugates what it transposes.
        wanted = "F" if problem.conjugated["ab".index(operand)] else ""
        if (view := lying(chunk, wanted)) is None:
            source, chunk = chunk, cp.empty(chunk.shape, chunk.dtype, order=wanted or "C")
            bits(chunk)[...] = bits(source)
            view = lying(chunk, wanted)
        assert view is not None
        return chunk, view


def bits(array: Any) -> Any:
    """Return an array to be copied as it is: CuPy has no kernels for some types of two bytes."""
    return array.view(np.uint16) if array.dtype.kind == "V" and array.dtype.itemsize == 2 else array


def lying(array: Any, wanted: str = "") -> DeviceView | None:
    """Return the storage of a matrix if its rows (order ``"C"``) or columns (``"F"``) are dense; None if not."""
    (rows, cols), (down, across), size = array.shape, map(int, array.strides), int(array.itemsize)
    pointer = int(array.data.ptr)
    if pointer % size:
        return None
    # The stride along an axis of length 1 means nothing.
    if wanted != "F" and (across == size or cols == 1) and (rows == 1 or (down >= cols * size and not down % size)):
        return DeviceView(Span(pointer, down if rows > 1 else cols * size, size), "C")
    if wanted != "C" and (down == size or rows == 1) and (cols == 1 or (across >= rows * size and not across % size)):
        return DeviceView(Span(pointer, size, across if cols > 1 else rows * size), "F")
    return None
