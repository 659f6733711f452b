"""Workers without dask_distmm: they stay in the cluster, with tasks that need nothing of it.

A task that needs a function of this package can't be loaded by such a worker, which then closes its connection to the
scheduler, and is gone with all that it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import dumps

from dask_distmm.engines.base import log
from dask_distmm.errors import EngineError
from dask_distmm.installing import install_command
from dask_distmm.runtime import direct

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

_WAITING = ("released", "waiting", "no-worker")


class BareWorkers:
    """Keeps tasks that need this package away from workers that lack it."""

    def __init__(self, scheduler: Scheduler, reasons: dict[str, str]) -> None:
        self._scheduler, self.reasons = scheduler, reasons
        self._kept: set[Any] = set()

    def note(self, address: str, reason: str) -> None:
        """Keep tasks away from a worker that has said that it lacks the package."""
        if address not in self._scheduler.workers or address in self.reasons:
            return
        log.warning(
            "worker %s lacks dask_distmm (%s) and gets none of its tasks; install it there: %s",
            *(address, reason, install_command(elsewhere=True)),
        )
        self.reasons[address] = reason
        self.look([key for key, ts in self._scheduler.tasks.items() if ts.state in _WAITING])

    def change(self, address: str) -> None:
        """Look again after a worker has come or gone."""
        self.reasons.pop(address, None)
        if self._kept:
            kept, self._kept = self._kept, set()
            self._restrict(kept & self._scheduler.tasks.keys())

    def look(self, keys: Iterable[Any]) -> None:
        """Keep those of some tasks that need this package away from workers that lack it. Free where none does."""
        if not self.reasons:
            return
        tasks = self._scheduler.tasks
        # Tasks that are restricted already, as barriers and tiles are, are so for reasons of ours or of the user's.
        found = {key for key in keys if (ts := tasks.get(key)) is not None and not ts.worker_restrictions}
        self._restrict({key for key in found if needs_package(tasks[key].run_spec)})

    def _restrict(self, keys: Iterable[Any]) -> None:
        able = self._scheduler.workers.keys() - self.reasons.keys()
        for ts in [self._scheduler.tasks[key] for key in keys]:
            if able:
                self._kept.add(ts.key)
                direct.restrict_workers(self._scheduler, ts, able)
            elif ts.state in _WAITING:
                # Failed once the graph is complete, and until then sent to nobody.
                direct.park(ts)
                asyncio.get_running_loop().call_soon(self._fail, ts)

    def _fail(self, ts: TaskState) -> None:
        if self._scheduler.tasks.get(ts.key) is ts:
            error = EngineError(
                f"{ts.key!r} needs dask_distmm, and no worker has it; install it there, and start them again: "
                f"{install_command(elsewhere=True)}"
            )
            direct.fail(self._scheduler, ts, error, f"distmm-bare-{ts.key}")


def needs_package(run_spec: Any) -> bool:
    """Whether a worker needs this package to load a task: what would be sent names it."""
    if run_spec is None:
        return False
    try:
        # Arrays in the task are not looked at, nor copied.
        sent = dumps(run_spec, buffer_callback=lambda buffer: None)
    except Exception:  # whatever it holds: Dask will say so when it sends it
        return False
    return b"dask_distmm" in sent
