"""Chunks: NumPy or CuPy arrays, ready or still being made."""

from __future__ import annotations

import collections
import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dask_distmm.engines.base import ChunkKey, ResultKey
from dask_distmm.errors import EngineError
from dask_distmm.numeric.sparse import compressed, sparse_package
from dask_distmm.numeric.types import carried, typed
from dask_distmm.planning import ENGINES, Placement


def array_kind(array: Any) -> str:
    """Return ``"numpy"`` or ``"cupy"`` for these two, the name of the type for all others."""
    kind = type(array)
    package = kind.__module__.split(".")[0]
    return package if package in ("numpy", "cupy") and kind.__name__ == "ndarray" else kind.__name__


def array_module(array: Any) -> Any:
    """Return NumPy, or CuPy for an array of CuPy, which is imported only then."""
    return np if array_kind(array) != "cupy" else importlib.import_module("cupy")


def on_device(array: Any) -> bool:
    """Whether an array, dense or sparse, is CuPy's."""
    return array_kind(array) == "cupy" or sparse_package(array) == "cupyx"


def ready_event(chunks: Iterable[Any]) -> list[Any]:
    """Return the CUDA event after which chunks have their contents, in a list; empty if there is nothing to wait for.

    The task that made a CuPy array has put the work on the default stream, which all threads share. Where each
    thread has one of its own (``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM``) this waits until the device has done all.
    """
    if not any(map(on_device, chunks)):
        return []
    import cupy

    if os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0"):
        cupy.cuda.Device().synchronize()
        return []
    ready = cupy.cuda.Event(disable_timing=True)
    ready.record(cupy.cuda.Stream.null)
    return [ready]


def order_of(chunk: Any) -> str:
    """Return the memory order of a chunk, ``"C"`` or ``"F"``."""
    strides, shape = getattr(chunk, "strides", (1, 0)), getattr(chunk, "shape", (0, 0))
    if len(strides) != 2 or 1 in shape:
        return "C"
    return "C" if strides[0] >= strides[1] else "F"


def other_orders(plan: Placement, chunks: Mapping[ChunkKey, Any]) -> dict[str, str]:
    """Return the memory orders of most chunks of operands here, where they matter and are not as planned."""
    problem = plan.problem
    found = {}
    for operand, planned in plan.orders.items():
        here = collections.Counter(order_of(chunk) for (name, _), chunk in chunks.items() if name == operand)
        order = here.most_common(1)[0][0] if here else planned
        if order != planned and (ENGINES[plan.engine].on_gpus or problem.is_conjugated(operand)):
            found[operand] = order
    return found


def check_chunks(plan: Placement, chunks: Mapping[ChunkKey, Any]) -> dict[ChunkKey, Any]:
    """Return the chunks, in the types that the graph says.

    Some arrays have chunks of another type than they say: Dask's Cholesky factors of integers have integers for
    zeros, its LU factors of narrow integers float64 instead of float32. Such chunks are converted within their kind,
    as NumPy's functions with ``dtype`` do (``same_kind``). Sparse chunks are for programs, in compressed rows.
    """
    problem = plan.problem
    checked = {}
    for (operand, index), chunk in chunks.items():
        sizes, dtype = problem.chunks_of(operand), problem.dtype_of(operand)
        i, j = divmod(index, len(sizes[1]))
        shape = (sizes[0][i], sizes[1][j])
        if sparse_package(chunk):
            if problem.kind != "program":
                raise EngineError(
                    f"chunk {problem.place_of(operand, index)} of {operand.upper()} is a {type(chunk).__name__}, and "
                    "the array does not say that its chunks are sparse: pass meta= where it is made, or make chunks "
                    "dense by map_blocks(lambda x: x.toarray())"
                )
            chunk = compressed(chunk)  # noqa: PLW2901
        chunk, expected = typed(chunk, dtype), carried(dtype, array_kind(chunk))  # noqa: PLW2901
        found_shape = getattr(chunk, "shape", ())
        # -1 stands for what is not known.
        fits = len(found_shape) == 2 and all(one in (-1, size) for one, size in zip(shape, found_shape, strict=True))
        if fits and chunk.dtype != expected and np.can_cast(chunk.dtype, expected, "same_kind"):
            chunk = chunk.astype(expected)  # noqa: PLW2901
        if not fits or chunk.dtype != expected:
            found = f"{getattr(chunk, 'shape', None)} {getattr(chunk, 'dtype', type(chunk))}"
            where = problem.place_of(operand, index)
            raise EngineError(
                f"chunk {where} of {operand.upper()} is {found}; the array says {shape} {dtype}: "
                "correct the chunks or the dtype where the array is made"
            )
        checked[operand, index] = chunk
    return checked


def numbered(plan: Placement, result: Mapping[ResultKey, Any]) -> dict[ResultKey, Any]:
    """Return a run's chunks under the numbers that they have for the user."""
    problem = plan.problem
    if problem.part is None:
        return dict(result)
    numbers = {output.name: problem.numbers(output.name).tolist() for output in problem.outputs}
    return {(name, numbers[name][number]): chunk for (name, number), chunk in result.items()}
