"""Multiplies whose inputs are still being made: those that can't fit are refused, those that nothing moves are ended.

Dask loads the inputs of a barrier without asking whether there is room for all of them at the same time. A worker that
holds more than its pause threshold does not start tasks. When chunks that wait for a run have paused all workers, no
task ever begins again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed.metrics import time

from dask_distmm.errors import DistMMError, ProjectedMemoryError, advice
from dask_distmm.planning import Computation, Problem, plan_computation
from dask_distmm.planning.planner import product_remedies
from dask_distmm.runtime import direct
from dask_distmm.runtime.scheduler.roster import Roster

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

# How often the scheduler looks whether any task continues (seconds).
_LOOK = 1.0


class Admission:
    """Looks after barriers from when their graphs arrive until they are parked. On the scheduler's event loop."""

    def __init__(
        self, scheduler: Scheduler, roster: Roster, waiting: Callable[[], Iterable[tuple[TaskState, Computation]]]
    ) -> None:
        self._scheduler, self._roster, self._waiting = scheduler, roster, waiting
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, ts: TaskState, problem: Computation) -> None:
        """Look after a barrier, which has been made a moment ago."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_all())
        task = asyncio.ensure_future(self._admit(ts, problem))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, ts: TaskState, problem: Computation) -> None:
        """Fail a barrier whose multiply would exceed memory, before much of its inputs is loaded."""

        async def planned() -> None:
            # Where all is in memory the run's own plan counts it where it is.
            if ts.state == "waiting":
                engines, workers = await self._roster.choose(problem.demand)
                await asyncio.to_thread(plan_computation, problem, workers, engine=engines)

        try:
            # Who is paused for good is left to the watch.
            await self._roster.until_it_fits(planned, math.inf)
        except ProjectedMemoryError as error:
            if ts.state == "waiting":
                direct.fail(self._scheduler, ts, error, f"distmm-memory-{ts.key}")
        except DistMMError:
            pass  # the reason may have gone when the inputs are there

    async def _watch_all(self) -> None:
        """End barriers whose inputs can never come, as long as there are barriers that wait."""
        seen, since = -1, time()
        while found := list(self._waiting()):
            await asyncio.sleep(_LOOK)
            if self._scheduler.transition_counter != seen:
                seen, since = self._scheduler.transition_counter, time()
            paused = stuck(self._scheduler.workers.values())
            if not paused:
                since = time()
                continue
            for ts, problem in found:
                limit = problem.options.load_timeout
                holding = [ws for ws in paused if any(dts in ws.has_what for dts in ts.dependencies)]
                if time() - since < limit or ts.state != "waiting" or not holding:
                    continue
                remedies = product_remedies(problem) if isinstance(problem, Problem) else []
                held = {ws.address: int(ws.memory.process) for ws in holding}
                text = ", ".join(f"{address} holds {format_bytes(size)}" for address, size in held.items())
                error = ProjectedMemoryError(
                    f"the inputs of {problem.name} can't be loaded: for {limit:g} s (config distmm.timeouts.load) "
                    f"nothing has gone on, since workers with chunks of it are paused: {text}. "
                    f"{advice([*remedies, 'use a higher memory_limit'])}",
                    held,
                    {ws.address: ws.memory_limit for ws in holding},
                )
                direct.fail(self._scheduler, ts, error, f"distmm-stuck-{ts.key}")


def stuck(workers: Iterable[Any]) -> list[WorkerState]:
    """Return the paused workers if no worker can go on with anything; none if one can."""
    paused = []
    for ws in workers:
        if ws.status.name == "paused":
            paused.append(ws)
        if ws.executing or (ws.status.name != "paused" and ws.processing):
            return []
    return paused
