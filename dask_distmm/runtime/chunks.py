"""Chunks: NumPy or CuPy arrays, ready or still being made.

The tasks by which ranks make chunks themselves, on their way to the ranks and there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from dask._task_spec import GraphNode
from dask.utils import key_split
from distributed.protocol.pickle import dumps, loads

from dask_distmm.engines.base import ChunkKey, ResultKey
from dask_distmm.engines.sources import Source, SourceChunk, TaskCall
from dask_distmm.errors import EngineError, call_user, in_words
from dask_distmm.numeric.sparse import compressed, sparse_package
from dask_distmm.numeric.types import carried, dtype_from_name, typed
from dask_distmm.planning import ENGINES, Computation, Placement
from dask_distmm.runtime import direct

if TYPE_CHECKING:
    from distributed import Worker

# Chunks: NumPy or CuPy arrays, ready or still being made


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


def aligned(chunk: Any) -> Any:
    """Return a chunk; a copy if Dask's comms have left it at an address at which NumPy takes twice as long."""
    is_dense = type(chunk) is np.ndarray
    if is_dense or (sparse_package(chunk) == "scipy" and hasattr(chunk, "indptr")):
        arrays = [chunk] if is_dense else [chunk.data, chunk.indices, chunk.indptr]
        if not all(x.flags.aligned for x in arrays):
            return chunk.copy("K") if is_dense else chunk.copy()
    return chunk


def order_of(chunk: Any) -> str:
    """Return the memory order of a chunk, ``"C"`` or ``"F"``."""
    strides, shape = getattr(chunk, "strides", (1, 0)), getattr(chunk, "shape", (0, 0))
    if len(strides) != 2 or 1 in shape:
        return "C"
    return "C" if strides[0] >= strides[1] else "F"


def other_orders(plan: Placement, chunks: Mapping[ChunkKey, Any]) -> dict[str, str]:
    """Return the memory orders of local operands that matter and differ from the plan (most of their chunks)."""
    problem = plan.problem
    orders = {}
    for operand, planned in plan.orders.items():
        if ENGINES[plan.engine].on_gpus or problem[operand].conjugated:
            here = collections.Counter(order_of(chunk) for (name, _), chunk in chunks.items() if name == operand)
            order = here.most_common(1)[0][0] if here else planned
            if order != planned:
                orders[operand] = order
    return orders


def _plain(chunk: Any) -> Any:
    """Return a chunk of a subclass of NumPy's array that computes as NumPy does (a memory map) as such an array."""
    computes_alike = getattr(type(chunk), "__array_ufunc__", None) is np.ndarray.__array_ufunc__
    subclass = computes_alike and array_kind(chunk) not in ("numpy", "cupy")
    return np.asarray(chunk) if subclass and not np.ma.is_masked(chunk) else chunk


def check_chunks(plan: Placement, chunks: Mapping[ChunkKey, Any]) -> dict[ChunkKey, Any]:
    """Return the chunks, in the types that the graph says.

    Some arrays have chunks of another type than they say: Dask's Cholesky factors of integers have integers for
    zeros, its LU factors of narrow integers float64 instead of float32. Such chunks are converted within their kind,
    as NumPy's functions with ``dtype`` do (``same_kind``). Sparse chunks are for programs, in compressed rows.
    Tasks that read files may make memory maps.
    """
    problem = plan.problem
    if problem.kind == "region":
        return dict(chunks)  # as Dask's tasks take them
    checked = {}
    for (operand, index), chunk in chunks.items():
        shape, dtype = problem[operand].chunk_shape(index), problem[operand].dtype
        if type(chunk) is np.ndarray and chunk.shape == shape and chunk.dtype == dtype_from_name(dtype):
            checked[operand, index] = chunk
            continue
        if sparse_package(chunk):
            if problem.kind != "program":
                raise EngineError(
                    f"chunk {problem[operand].at(index)} of {operand.upper()} is a {type(chunk).__name__}, and "
                    "the array does not say that its chunks are sparse: pass meta= where it is made, or make chunks "
                    "dense by map_blocks(lambda x: x.toarray())"
                )
            chunk = compressed(chunk)  # noqa: PLW2901
        chunk = _plain(chunk)  # noqa: PLW2901
        if len(axes := problem[operand].axes) < 2 and getattr(chunk, "ndim", 2) == len(axes):
            chunk = chunk.reshape(tuple(-1 if axis in axes else 1 for axis in (0, 1)))  # noqa: PLW2901
        chunk, expected = typed(chunk, dtype), carried(dtype, array_kind(chunk))  # noqa: PLW2901
        found_shape = getattr(chunk, "shape", ())
        # -1 stands for what is not known.
        fits = len(found_shape) == 2 and all(n in (-1, size) for n, size in zip(shape, found_shape, strict=True))
        if fits and chunk.dtype != expected and np.can_cast(chunk.dtype, expected, "same_kind"):
            chunk = chunk.astype(expected)  # noqa: PLW2901
        if not fits or chunk.dtype != expected:
            actual = f"{getattr(chunk, 'shape', None)} {getattr(chunk, 'dtype', type(chunk))}"
            where = problem[operand].at(index)
            raise EngineError(
                f"chunk {where} of {operand.upper()} is {actual}; the array says {shape} {dtype}: "
                "correct the chunks or the dtype where the array is made"
            )
        checked[operand, index] = chunk
    return checked


def arrays_of(problem: Computation, result: Mapping[ResultKey, Any]) -> dict[ResultKey, Any]:
    """Return a run's chunks as those of its arrays, some of which are vectors or numbers."""
    shapes = {output.name: (-1,) * len(output.axes) for output in problem.outputs if len(output.axes) < 2}
    # As of NumPy's functions a number is a scalar: it can be a key of a dict.
    return {key: chunk.reshape(shapes[key[0]])[()] if key[0] in shapes else chunk for key, chunk in result.items()}


def numbered(plan: Placement, result: Mapping[ResultKey, Any]) -> dict[ResultKey, Any]:
    """Return a run's chunks under the numbers that they have for the user."""
    problem, result = plan.problem, arrays_of(plan.problem, result)
    if not problem.whole:
        return result
    numbers = {output.name: output.every.tolist() for output in problem.outputs}
    return {(name, numbers[name][number]): chunk for (name, number), chunk in result.items()}


# Products of chunks, as tasks of regions


# The axes that an array has of a matrix; whether it is transposed, and conjugated then; and parts of chunks along k.
Operand = tuple[Sequence[int], bool, bool, Sequence[slice]]


def _matrix(chunks: Sequence[Any], operand: Operand, *, left: bool) -> Any:
    axes, transposed, conjugated, slices = operand
    parts = []
    for chunk, part in zip(chunks, slices, strict=True):
        x = (chunk[:, None] if tuple(axes) == (0,) else chunk[None]) if len(axes) == 1 else chunk
        x = x.T if transposed else x
        parts.append(x[:, part] if left else x[part])
    x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=int(left))
    return x.conj() if conjugated else x


def multiply_parts(a: Sequence[Any], b: Sequence[Any], first: Operand, second: Operand, ndim: int) -> Any:
    """Multiply parts of chunks, of each operand one beside the other along k; the result has `ndim` axes."""
    product = _matrix(a, first, left=True) @ _matrix(b, second, left=False)
    return product if ndim == 2 else product.reshape(-1)


# The tasks by which ranks make chunks themselves, on their way to the ranks and there


def pack_tasks(
    plan: Placement, tasks: Mapping[str, Sequence[Any]], retries: int = 0, at_once: Mapping[str, int] | None = None
) -> dict[str, bytes]:
    """Pickle for each rank's address the tasks of the chunks that it needs, with retries and concurrency."""
    packed = {}
    for rank, address in enumerate(plan.workers):
        parts = {name: plan.needed(rank, name).tolist() for name in tasks}
        # Together, so that a task of both operands stays one.
        needed = {name: (parts[name], [tasks[name][number] for number in parts[name]]) for name in tasks}
        try:
            packed[address] = dumps((retries, (at_once or {}).get(address, 0), needed))
        except BaseException as error:  # of the user's objects: none may end the scheduler
            raise EngineError(f"the tasks that make chunks can't be pickled: {in_words(error)}") from None
    return packed


def unpack_tasks(plan: Placement, packed: bytes, worker: Worker) -> dict[ChunkKey, Any]:
    """Unpack the sources of a rank's chunks, or a region's tasks, from `pack_tasks`."""
    sources: dict[Any, Source] = {}
    chunks: dict[ChunkKey, SourceChunk] = {}
    if not packed:
        return chunks
    what = "the tasks that make chunks can't be unpickled"
    retries, at_once, tasks_by_operand = call_user("source", what, loads, packed)
    if plan.problem.kind == "region":
        return {
            (operand, number): _task_call(worker, *task)
            for operand, (numbers, tasks) in tasks_by_operand.items()
            for number, task in zip(numbers, tasks, strict=True)
        }
    turn = threading.Semaphore(at_once) if at_once else contextlib.nullcontext()
    # A chunk of both operands is used by both at one place of k, or else made anew: it would have to be kept.
    for operand, (numbers, tasks) in tasks_by_operand.items():
        for number, task in zip(numbers, tasks, strict=True):
            where = plan.problem[operand].at(number)
            make = functools.partial(_make_chunk, task, worker, turn, f"chunk {where} of {operand.upper()}")
            source = sources.setdefault((id(task), plan.problem.shared or operand), Source(make, retries))
            chunks[operand, number] = SourceChunk(source, functools.partial(_view, plan, operand, number))
    return chunks


def _task_call(worker: Worker, task: GraphNode, keys: Sequence[Any], constants: Mapping[Any, Any]) -> TaskCall:
    def call(values: Sequence[Any]) -> Any:
        direct.act_as_task(worker)
        return call_user("function", what, task, {**constants, **dict(zip(keys, values, strict=True))})

    what = f"task {task.key!r} has failed"
    return TaskCall(key_split(task.key), call)


def _make_chunk(task: Any, worker: Worker, turn: AbstractContextManager[Any], name: str) -> Any:
    direct.act_as_task(worker)
    with turn:
        return call_user("source", f"{name} can't be made", task)


def _view(plan: Placement, operand: str, number: int, array: Any) -> Any:
    chunk = array.T if plan.problem[operand].transposed else array
    return check_chunks(plan, {(operand, number): chunk})[operand, number]
