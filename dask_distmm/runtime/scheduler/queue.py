"""All runs that are not over, in the order in which they take place, and waiting for them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from dask_distmm.runtime.run import Run
from dask_distmm.runtime.scheduler.voting import raise_if_ended

if TYPE_CHECKING:
    from distributed import Scheduler


class RunQueue(dict[int, Run]):
    """Runs by number, from when they get it until they have been seen through."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        # Runs count within an epoch; see `wire`.
        self.newest, self.epoch = 0, uuid.uuid4().hex
        self._scheduler, self._changed = scheduler, asyncio.Condition()

    def of(self, key: str) -> list[Run]:
        """Return the runs that a barrier waits for."""
        return [run for run in self.values() if run.key == key]

    @contextlib.asynccontextmanager
    async def begin(self, name: str, key: str, participants: frozenset[str] = frozenset()) -> AsyncIterator[Run]:
        """Give a run its number; it is live until the context ends. Parameters as `Run`."""
        self.newest += 1
        run = self[self.newest] = Run(self.newest, name, key, participants)
        try:
            yield run
        finally:
            del self[run.run_id]
            await self.changed()

    async def turn(self, run: Run) -> None:
        """Wait until no earlier run uses a worker of this one: collectives meet in one order everywhere."""

        def in_the_way(other: Run) -> bool:
            # One whose participants are not fixed yet may turn out to need the same workers.
            return other.run_id < run.run_id and (not other.participants or bool(other.participants & run.participants))

        await self._wait_for(lambda: not run.live or not any(map(in_the_way, self.values())))
        raise_if_ended(run)

    async def ended(self, run: Run) -> None:
        """Wait until a run is done or has failed."""
        await self._wait_for(lambda: not run.live)

    async def over(self, run: Run) -> None:
        """Wait until a run has been seen through."""
        await self._wait_for(lambda: run.run_id not in self)

    async def _wait_for(self, happened: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(happened)

    async def changed(self) -> None:
        """Have everybody who waits look again."""
        async with self._changed:
            self._changed.notify_all()

    def changed_soon(self) -> None:
        """Have everybody who waits look again, from where nothing may be awaited."""
        tasks = self._scheduler._ongoing_background_tasks
        # A scheduler that closes has cancelled everybody who waits, and takes no more tasks.
        if not tasks.closed:
            tasks.call_soon(self.changed)
