"""Frees the memory that groups of workers keep between runs, each group in its turn among the runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dask_distmm.runtime.messages import Release
from dask_distmm.runtime.run import Lost, Released
from dask_distmm.runtime.scheduler.queue import RunQueue
from dask_distmm.runtime.scheduler.rank_groups import RankGroup
from dask_distmm.runtime.wire import ask

if TYPE_CHECKING:
    from distributed import Scheduler

# A worker that stands still is not waited for longer than this beyond the grace time (seconds).
_STANDSTILL = 5.0


class Releases:
    """Releases of groups that are under way. On the scheduler's event loop."""

    def __init__(self, scheduler: Scheduler, queue: RunQueue) -> None:
        self._scheduler, self._queue = scheduler, queue
        self._tasks: set[asyncio.Future[None]] = set()

    def begin(self, groups: Sequence[RankGroup], grace: float) -> list[asyncio.Future[None]]:
        """Have groups freed, each in its turn as if it were a run of its ranks; it goes on in the background."""
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(self._release(group, grace)) for group in groups]
        # The event loop holds tasks weakly only.
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        return tasks

    async def _release(self, group: RankGroup, grace: float) -> None:
        async with self._queue.begin(f"group-{group.number}", "", frozenset(group.workers)) as run:
            # A rank that leaves ends it: the plugin has told the others, or they end themselves.
            with contextlib.suppress(Lost, Released, OSError, TimeoutError):
                await self._queue.turn(run)
                request = Release(group.number, group.engine, grace)
                asked = [ask(self._scheduler.rpc(address), request, self._queue.epoch) for address in group.workers]
                # A watchdog bites after `grace` where a rank is stuck; one that stands still is not waited for.
                await asyncio.wait_for(asyncio.gather(*asked), grace + _STANDSTILL)
