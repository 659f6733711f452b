"""Gates: the tasks that hold back a wave of a product, until the wave before the last one is over and D has left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dask_distmm.runtime import direct
from dask_distmm.runtime.keys import barrier_name, gate_barrier, gate_key

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

# Barriers in these states are still to run.
_AHEAD = ("waiting", "no-worker", "processing", "queued")
# Tasks in these states begin or end without any further wave.
_AT_WORK = ("processing", "queued")
# A gate in these states can be closed.
_NOT_BEGUN = ("released", "waiting", "no-worker", "queued")
# How often parked gates are kept from Dask's ``no-workers-timeout`` (seconds).
_REFRESH = 0.5


class Gates:
    """Parks gates, and lets them go. On the scheduler's event loop.

    A gate is a task without inputs, which any worker can run in no time. It is parked until its barrier has run and no
    task works on the chunks of D that came of it, such as one that stores a chunk; or until the barrier is wanted no
    more. So D does not fill the memory where it is stored more slowly than it is made. A gate that is lost with a
    worker opens again at once, so that what waits behind it is loaded again without another run.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._closed: set[str] = set()
        self._to_look: set[str] = set()
        # Tasks that work on chunks of D, and the gates that wait for these.
        self._takers: dict[Any, str] = {}
        self._refreshing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return how many gates are closed."""
        return len(self._closed)

    def close(self, keys: Iterable[Any]) -> None:
        """Park those tasks that are gates and have not begun."""
        found = [key for key in keys if gate_barrier(key) is not None]
        parked: list[TaskState] = []
        for key in found:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.run_spec is not None and ts.state in _NOT_BEGUN:
                direct.park(ts)
                self._closed.add(key)
                self._look_soon(key)
                parked.append(ts)
        direct.unqueue(self._scheduler, parked, "distmm-gates-close")
        if found and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.ensure_future(self._refresh())

    def transition(self, key: Any, finish: str) -> None:
        """Look at a gate whose barrier is over, or that has been parked."""
        if key in self._closed:
            if finish == "no-worker":
                self._look_soon(key)
            elif finish in ("forgotten", "erred"):
                self._closed.discard(key)
        elif key in self._takers:
            self._look_soon(self._takers.pop(key))
        elif finish in ("released", "forgotten", "erred") and (name := barrier_name(key)) is not None:
            self._look_soon(gate_key(name))

    def clear(self) -> None:
        """Forget all gates."""
        self._closed.clear()
        self._takers.clear()

    def _look_soon(self, key: str) -> None:
        """Look at a gate when the transitions that are going on are over."""
        if key not in self._closed:
            return
        if not self._to_look:
            asyncio.get_running_loop().call_soon(self._look)
        self._to_look.add(key)

    def _look(self) -> None:
        """Open gates whose barriers are not ahead any more."""
        keys, self._to_look = self._to_look & self._closed, set()
        ready = []
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            barrier = self._scheduler.tasks.get(gate_barrier(key))
            if ts is None:
                self._closed.discard(key)
            elif barrier is None or barrier.state not in _AHEAD:
                if taker := _taker_of(barrier):
                    self._takers[taker] = key
                else:
                    self._closed.discard(key)
                    ready.append(ts)
        if ready:
            direct.free_restricted(self._scheduler, ready, "distmm-gates-open")

    async def _refresh(self) -> None:
        """Keep Dask's ``no-workers-timeout`` from ending closed gates."""
        while self._closed and self._scheduler.no_workers_timeout:
            for key in self._closed:
                if (ts := self._scheduler.tasks.get(key)) is not None:
                    direct.refresh(self._scheduler, ts)
            await asyncio.sleep(min(_REFRESH, self._scheduler.no_workers_timeout / 4))


def _taker_of(barrier: TaskState | None) -> Any:
    """Return the key of a task that works on a chunk of D that came of a barrier; None if there is none."""
    chunks = (ts for ts in (barrier.dependents if barrier is not None else ()) if ts.state == "memory")
    return next((taker.key for ts in chunks for taker in ts.dependents if taker.state in _AT_WORK), None)
