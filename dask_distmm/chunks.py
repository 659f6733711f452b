"""Chunks as they come: NumPy or CuPy arrays, ready or still being made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dask_distmm.dtypes import carried, typed
from dask_distmm.engines.base import ChunkKey
from dask_distmm.errors import EngineError
from dask_distmm.plan import Plan

__all__ = ["Staged", "array_kind", "check_chunks", "order_of", "stage"]


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
