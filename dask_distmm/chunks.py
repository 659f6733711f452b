"""Chunks as they come: NumPy or CuPy arrays, ready or still being made."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from distributed.protocol import dask_serialize

from dask_distmm.dtypes import FP8, carried, typed
from dask_distmm.engines.base import ChunkKey
from dask_distmm.errors import EngineError
from dask_distmm.plan import Plan

__all__ = ["Staged", "array_kind", "check_chunks", "let_e5m2_travel", "order_of", "stage"]


class Staged(NamedTuple):
    """A chunk that waits for its run.

    Parameters
    ----------
    array
        The chunk.
    ready
        The CUDA event after which its contents are there; None for what is there already.
    """

    array: Any
    ready: Any


def array_kind(array: Any) -> str:
    """Return ``"numpy"`` or ``"cupy"`` for these two, the name of the type for all others."""
    kind = type(array)
    package = kind.__module__.split(".")[0]
    return package if package in ("numpy", "cupy") and kind.__name__ == "ndarray" else kind.__name__


def stage(chunk: Any) -> Staged:
    """Take a chunk from a task's thread."""
    if array_kind(chunk) != "cupy":
        return Staged(chunk, None)
    import cupy

    ready = cupy.cuda.Event(disable_timing=True)
    ready.record()  # of this thread's current stream, which has been given the work that makes the chunk
    return Staged(chunk, ready)


def order_of(chunk: Any) -> str:
    """Return the memory order of a chunk, ``"C"`` or ``"F"``."""
    strides, shape = getattr(chunk, "strides", (1, 0)), getattr(chunk, "shape", (0, 0))
    if len(strides) != 2 or 1 in shape:
        return "C"
    return "C" if strides[0] >= strides[1] else "F"


def check_chunks(plan: Plan, chunks: Mapping[ChunkKey, Any]) -> dict[ChunkKey, Any]:
    """Return the chunks; refuse those whose shape or type is not what the graph said.

    Raises
    ------
    EngineError
        One differs.
    """
    problem = plan.problem
    checked = {}
    for (operand, index), chunk in chunks.items():
        sizes, dtype = problem.chunks_of(operand), problem.dtype_of(operand)
        i, j = divmod(index, len(sizes[1]))
        shape = (sizes[0][i], sizes[1][j])
        chunk = typed(chunk, dtype)  # noqa: PLW2901
        if getattr(chunk, "shape", None) != shape or chunk.dtype != carried(dtype, array_kind(chunk)):
            found = f"{getattr(chunk, 'shape', None)} {getattr(chunk, 'dtype', type(chunk))}"
            raise EngineError(
                f"chunk ({i}, {j}) of {operand.upper()} is {found}; the array says {shape} {dtype}: "
                "correct the chunks or the dtype where the array is made"
            )
        checked[operand, index] = chunk
    return checked


@functools.cache
def let_e5m2_travel() -> None:
    """Let this process send NumPy arrays of float8_e5m2.

    distributed names their type ``"<f1"``, which NumPy does not know, so they can't be read at the other end. Types
    of ml_dtypes that call themselves void, as all others of 8 bits do, are pickled; here this one is too.
    """
    serialize, e5m2 = dask_serialize.dispatch(np.ndarray), FP8["float8_e5m2"]

    def serialize_array(x: Any, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
        if x.dtype != e5m2:
            return serialize(x, context=context)  # type: ignore[no-any-return]
        header, frames = serialize(x.view(np.uint8), context=context)
        return header | {"dtype": (1, pickle.dumps(e5m2))}, frames

    dask_serialize.register(np.ndarray)(serialize_array)
