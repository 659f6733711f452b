"""The streams and mappings that a process keeps between its runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.engines.gpu.operands import mark
from dask_distmm.engines.peer.memory import Exporter, Mappings

# The times of the pulls and GEMMs of a run, to tune the engine


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


# The streams and mappings that a process keeps between its runs


# Streams that pull at the same time: from each other GPU of a host of 8.
_MOST_PULLING = 7
# Bytes of the read that wakes a link.
_WAKING_BYTES = 2**16


class PeerState:
    """Streams, memory that others have mapped, and others' memory that is mapped here."""

    def __init__(self) -> None:
        # For tuning: if it is a list, each run appends its operations with their times.
        self.trace: list[list[TracedOperation]] | None = None
        self.exporter = Exporter()
        self.mappings = Mappings()
        self._streams: list[cp.cuda.Stream] = []
        self._pulling: list[cp.cuda.Stream] = []
        self._making: list[cp.cuda.Stream] = []
        self._solver: Any = None
        # The target of reads that only wake a link.
        self._read: Any = None

    def _made(self) -> list[cp.cuda.Stream]:
        """Return the engine's own streams, on the process' current device."""
        if not self._streams:
            self._streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
        return self._streams

    @property
    def stream(self) -> cp.cuda.Stream:
        """The stream of GEMMs."""
        return self._made()[0]

    @property
    def looking(self) -> cp.cuda.Stream:
        """The stream of reads of flags, and of reads that wake links."""
        return self._made()[1]

    @property
    def sums(self) -> cp.cuda.Stream:
        """The stream of pulls of others' sums: they wait for products, and pulls of panels must not wait with them."""
        return self._made()[2]

    @property
    def downloads(self) -> cp.cuda.Stream:
        """The stream of copies to host memory."""
        return self._made()[3]

    def pulls(self, others: int) -> list[cp.cuda.Stream]:
        """Return the streams that pull A, B and the inputs of the formula: one for each other GPU, up to a limit."""
        wanted = min(max(1, others), _MOST_PULLING)
        self._pulling += [cp.cuda.Stream(non_blocking=True) for _ in range(wanted - len(self._pulling))]
        return self._pulling[:wanted]

    def making(self, threads: int) -> list[cp.cuda.Stream]:
        """Return the streams of threads that make chunks, which wait for the default stream: see `loads`."""
        self._making += [cp.cuda.Stream() for _ in range(threads - len(self._making))]
        return self._making[:threads]

    def solver(self) -> Any:
        """Return the kernels of factorizations (`SolverKernels`), on the stream of GEMMs."""
        if self._solver is None:
            # cuSOLVER is loaded by those who use it.
            from dask_distmm.engines.gpu.lapack import SolverKernels

            self._solver = SolverKernels(self.stream)
        return self._solver

    def wake(self, pointer: int, size: int) -> None:
        """Read a little of mapped memory: after an idle moment the first pull takes up to 0.2 ms more (H200)."""
        if self._read is None:
            self._read = cp.empty(_WAKING_BYTES, np.uint8)
        arguments = self._read.data.ptr, pointer, min(size, _WAKING_BYTES), cp.cuda.runtime.memcpyDefault
        cp.cuda.runtime.memcpyAsync(*arguments, self.looking.ptr)
