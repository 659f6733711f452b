"""What a run's streams do when, for whoever tunes the engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy as cp

from dask_distmm.engines.device.operands import mark

__all__ = ["Step", "Trace"]


class Step(NamedTuple):
    """A pull or a GEMM of a traced run: number of the panel, bytes or operations, begin and end in milliseconds."""

    what: str
    turn: int
    amount: float
    begin: float
    end: float


class Trace:
    """Steps of one run.

    Parameters
    ----------
    on
        Whether to note any: the events for that take the host's time.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._steps: list[tuple[str, int, float, Any, Any]] = []

    def begin(self, stream: cp.cuda.Stream) -> Any:
        """Return what `end` wants to know of a step that is put on a stream now."""
        return mark(stream) if self._on else None

    def end(self, what: str, number: int, amount: float, begin: Any, stream: cp.cuda.Stream) -> None:
        """Note a step that has been put on a stream."""
        if begin is not None:
            self.add(what, number, amount, begin, mark(stream))

    def add(self, what: str, number: int, amount: float, begin: cp.cuda.Event, end: cp.cuda.Event) -> None:
        """Note a step between two events."""
        if self._on:
            self._steps.append((what, number, amount, begin, end))

    def steps(self, start: cp.cuda.Event) -> list[Step]:
        """Return all steps, when they are over, with times from an event on."""
        elapsed = cp.cuda.get_elapsed_time
        return [Step(what, n, x, elapsed(start, a), elapsed(start, b)) for what, n, x, a, b in self._steps]
