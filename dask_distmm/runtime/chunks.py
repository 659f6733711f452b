"""Chunks: NumPy or CuPy arrays, ready or still being made."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.numeric.types import carried, typed
from dask_distmm.planning import ENGINES, Plan

__all__ = ["array_kind", "check_boxes", "check_chunks", "numbered", "order_of", "other_orders", "ready_event"]


def array_kind(array: Any) -> str:
    """Return ``"numpy"`` or ``"cupy"`` for these two, the name of the type for all others."""
    kind = type(array)
    package = kind.__module__.split(".")[0]
    return package if package in ("numpy", "cupy") and kind.__name__ == "ndarray" else kind.__name__


def ready_event(chunks: Iterable[Any]) -> list[Any]:
    """Return the CUDA event after which chunks have their contents, in a list; empty if there is nothing to wait for.

    The task that made a CuPy array has put the work on the default stream, which all threads share. Where each
    thread has one of its own (``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM``) this waits until the device has done all.
    """
    if not any(array_kind(chunk) == "cupy" for chunk in chunks):
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


def other_orders(plan: Plan, chunks: Mapping[ChunkKey, Any]) -> dict[str, str]:
    """Return the memory orders of most chunks of A and B here, where they matter and are not as planned."""
    problem = plan.problem
    found = {}
    for operand, planned, conjugated in zip("ab", (plan.order_a, plan.order_b), problem.conjugated, strict=True):
        here = collections.Counter(order_of(chunk) for (name, _), chunk in chunks.items() if name == operand)
        order = here.most_common(1)[0][0] if here else planned
        if order != planned and (ENGINES[plan.engine].minds_order or conjugated):
            found[operand] = order
    return found


def check_chunks(plan: Plan, chunks: Mapping[ChunkKey, Any]) -> dict[ChunkKey, Any]:
    """Return the chunks; refuse those of another shape or type than the graph says.

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
            where = problem.place_of(operand, index)
            raise EngineError(
                f"chunk {where} of {operand.upper()} is {found}; the array says {shape} {dtype}: "
                "correct the chunks or the dtype where the array is made"
            )
        checked[operand, index] = chunk
    return checked


def numbered(plan: Plan, result: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a run's chunks under the numbers that they have for the user."""
    if plan.problem.part is None:
        return dict(result)
    every = plan.problem.every_chunk("d").tolist()
    return {(key[0], every[key[1]]) if isinstance(key, tuple) else every[key]: chunk for key, chunk in result.items()}


def check_boxes(plan: Plan, kind: str, boxes: NDArray[np.int64]) -> None:
    """Refuse a peer's request for a part outside of a chunk or of D.

    Raises
    ------
    ProtocolError
        It asks for that, or for nothing.
    """
    if kind not in ("input", "partial", "final", "enter") or not len(boxes):
        raise ProtocolError(f"unknown kind of request {kind!r}, or an empty one")
    if kind == "enter":
        if not 0 < boxes[0, 0] < len(plan.ranks):
            raise ProtocolError(f"rank {boxes[0, 0]} of {len(plan.ranks)} wants to enter")
        return
    problem = plan.problem
    for operand, index, r0, r1, c0, c1 in boxes.tolist():
        shape = (problem.m, problem.n)
        if kind == "input":
            if not 0 <= operand < len(problem.operands):
                raise ProtocolError(f"there is no operand {operand}")
            sizes = problem.chunks_of(problem.operands[operand])
            if not 0 <= index < len(sizes[0]) * len(sizes[1]):
                raise ProtocolError(f"there is no chunk {index} of operand {operand}")
            shape = (sizes[0][index // len(sizes[1])], sizes[1][index % len(sizes[1])])
        if not (0 <= r0 < r1 <= shape[0] and 0 <= c0 < c1 <= shape[1]):
            raise ProtocolError(f"rows {r0}:{r1}, columns {c0}:{c1} are not within {shape}")
