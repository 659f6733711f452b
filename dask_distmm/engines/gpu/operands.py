"""Chunks on the device, in the type in which the library is given them; and how a matrix is there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey, log
from dask_distmm.engines.gpu.host import device_like, in_type, to_device
from dask_distmm.errors import EngineError
from dask_distmm.layout.rectangles import Span
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.numeric.types import FP8, carried
from dask_distmm.planning import Problem

# Priority of a stream whose kernels go before those of others.
FIRST = -5

# Checks of the engines for GPUs: that there is a GPU, and that chunks are matrices of CuPy or NumPy


def check_gpu() -> None:
    """Raise `EngineError` if this process sees no GPU."""
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise EngineError(f"no NVIDIA GPU: {error}") from error
    if not count:
        raise EngineError("no NVIDIA GPU is visible to this process")


@functools.cache
def device_memory() -> int:
    """Return the bytes of the device."""
    return int(cp.cuda.runtime.memGetInfo()[1])


def check_arrays(engine: str, chunks: Mapping[ChunkKey, Any], *, sparse: bool = False) -> None:
    """Raise `EngineError` if a chunk is not a matrix of CuPy or NumPy, or a sparse one; it names the engine."""
    for (operand, number), chunk in chunks.items():
        kind = type(chunk).__module__.split(".")[0]
        fits = kind in ("cupy", "numpy") or (sparse and sparse_package(chunk))
        if not fits or chunk.ndim != 2:
            raise EngineError(
                f"chunk {number} of {operand.upper()} is a {type(chunk).__name__}; the {engine} engine needs 2-D "
                "cupy.ndarray or numpy.ndarray chunks: convert them with map_blocks(cupy.asarray)"
            )


# Chunks on the device, in the type in which the library is given them; and how a matrix is there


class DeviceChunks:
    """The chunks of a participant as device arrays, whose memory is allocated at once, before the vote."""

    def __init__(self, problem: Problem, chunks: Mapping[ChunkKey, Any]) -> None:
        self.arrays: dict[ChunkKey, Any] = {}
        self._uploads: list[tuple[NDArray[Any], cp.ndarray]] = []
        self._conversions: list[tuple[cp.ndarray, str, cp.ndarray]] = []
        kinds = dict(zip("ab", problem.matrix_types, strict=True))
        for key, chunk in chunks.items():
            type_name = problem[key[0]].dtype
            on_device = chunk
            if not isinstance(chunk, cp.ndarray):
                part = chunk.view(np.uint8) if type_name in FP8 else chunk
                on_device = device_like(part)
                self._uploads.append((part, on_device))
            if key[0] in kinds and type_name != kinds[key[0]]:
                # Converted once it is filled.
                source, on_device = on_device, cp.empty(chunk.shape, carried(kinds[key[0]], "cupy"))
                self._conversions.append((source, type_name, on_device))
            self.arrays[key] = on_device

    def fill(self, stream: cp.cuda.Stream) -> None:
        """Put copies to the device, and conversions, on the stream."""
        for chunk, target in self._uploads:
            to_device(chunk, target, stream)
        for source, type_name, target in self._conversions:
            with stream:
                target[...] = in_type(source, type_name, target.dtype)

    @property
    def all_arrays(self) -> list[Any]:
        """All device memory that it holds."""
        return [*self.arrays.values(), *(source for source, _, _ in self._conversions)]


def array_at(span: Span, shape: Sequence[int], dtype: np.dtype, owner: Any) -> cp.ndarray:
    """Return a matrix as an array over memory that an owner has."""
    pointer, *steps = span
    size = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    memory = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(pointer, size, owner), 0)
    return cp.ndarray(tuple(shape), dtype, memory, strides=tuple(steps))


def usable(chunk: Any, order: str) -> bool:
    """Whether the library can use a chunk as it is: fast axis dense, aligned as well as its extents are."""
    inner, outer = (chunk.strides[1], chunk.strides[0]) if order == "C" else chunk.strides
    width, height = chunk.shape if order == "F" else chunk.shape[::-1]
    size = chunk.dtype.itemsize
    step = 16 if size == 1 or (size == 2 and width * size % 16 == 0) else size
    return bool(
        chunk.data.ptr % 16 == 0
        and (inner == size or width == 1)
        and (height == 1 or (outer >= width * size and outer % step == 0))
    )


def ld(x: Any, order: str) -> int:
    """Return the distance of rows (C order) or columns (F order), in elements."""
    outer, least = (x.strides[0], x.shape[1]) if order == "C" else (x.strides[1], x.shape[0])
    slow = x.shape[0] if order == "C" else x.shape[1]
    # The strides of an empty array mean nothing.
    return int(max(1, least if slow == 1 or not x.size else outer // x.dtype.itemsize))


def mark(stream: cp.cuda.Stream) -> cp.cuda.Event:
    """Return an event that is recorded now."""
    event = cp.cuda.Event()
    event.record(stream)
    return event


def record(stream: cp.cuda.Stream) -> cp.cuda.Event:
    """Return an event that is done when all that is on the stream now is."""
    event = cp.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def captured(stream: cp.cuda.Stream, queue: Callable[[], None], what: str) -> Any:
    """Return what is queued on a stream as a CUDA graph; None if it can't be one, as before kernels are loaded."""
    try:
        stream.begin_capture()
        try:
            queue()
        finally:
            graph = stream.end_capture()
        graph.upload(stream)
    except Exception as error:  # whatever it is, it comes again without a graph, or it is only that
        log.info("%s can't be captured: %s", what, error)
        return None
    return graph
