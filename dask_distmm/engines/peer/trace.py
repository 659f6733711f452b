"""The times of the pulls and GEMMs of a run, to tune the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy as cp

from dask_distmm.engines.gpu.operands import mark


class TracedOperation(NamedTuple):
    """A pull or a GEMM of a traced run."""

    # ``"pull"`` or ``"GEMM"``.
    what: str
    # The number of the load or of the step.
    number: int
    # Bytes, or floating-point operations.
    amount: float
    # Milliseconds from the start of the run on the GPU.
    begin: float
    end: float
    # Milliseconds from the start of the run until the host began, and ended, to put it on its stream.
    put: float
    over: float


class Trace:
    """Steps of one run."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._steps: list[tuple[str, int, float, Any, Any, float, float]] = []

    @contextlib.contextmanager
    def step(self, what: str, number: int, amount: float, stream: cp.cuda.Stream) -> Iterator[None]:
        """Note a step that is put on a stream inside of the context, if it does anything."""
        if not self._on or not amount:
            yield
            return
        begin, put = mark(stream), time.perf_counter()
        yield
        over = time.perf_counter()
        self._steps.append((what, number, amount, begin, mark(stream), put, over))

    def add(self, what: str, number: int, amount: float, begin: cp.cuda.Event, end: cp.cuda.Event, put: float) -> None:
        """Note a step between two events, which the host has put on its stream at some time."""
        if self._on:
            self._steps.append((what, number, amount, begin, end, put, put))

    def steps(self, start: cp.cuda.Event, started: float) -> list[TracedOperation]:
        """Return all steps, when they are over, with times from an event on, and from a time of the host on."""
        elapsed = cp.cuda.get_elapsed_time
        return [
            TracedOperation(
                what, n, x, elapsed(start, a), elapsed(start, b), 1e3 * (put - started), 1e3 * (over - started)
            )
            for what, n, x, a, b, put, over in self._steps
        ]
