"""Who can take part in a run, and which chunks lie where: what the scheduler knows, as plans need it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_distmm.errors import EngineError, PlanError
from dask_distmm.plan import Worker

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

__all__ = ["Roster", "as_worker"]

# A worker that does not say what it has within this time (seconds) is left out.
_DESCRIBE_TIMEOUT = 30.0


class Roster:
    """The workers of a cluster and what they said of themselves, once each.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._described: dict[str, dict[str, Any]] = {}

    def __contains__(self, address: str) -> bool:
        return address in self._described

    def forget(self, address: str) -> None:
        """Forget a worker that has left, or an earlier one of the same address."""
        self._described.pop(address, None)

    def clear(self) -> None:
        """Forget all workers."""
        self._described.clear()

    async def workers(self, wanted: tuple[str, ...] | int | None) -> list[Worker]:
        """Return the workers that can take part, in the scheduler's order.

        Parameters
        ----------
        wanted
            Addresses, or how many, or None for all.

        Raises
        ------
        PlanError
            `wanted` names a worker that is not there, or more than there are; or there is none at all.
        EngineError
            Workers have different versions of dask_distmm.
        """
        running = {address: ws for address, ws in self._scheduler.workers.items() if ws.status.name == "running"}
        if isinstance(wanted, tuple):
            missing = [address for address in wanted if address not in running]
            if missing:
                raise PlanError(f"workers={missing[0]!r} is not in the cluster; it has {', '.join(sorted(running))}")
            running = {address: running[address] for address in wanted}
        await self._describe([address for address in running if address not in self._described])
        able = {address: ws for address, ws in running.items() if self._has_engine(address, "numpy")}
        versions = {self._described[address]["version"]: address for address in able}
        if len(versions) > 1:
            found = ", ".join(f"{version} on {address}" for version, address in versions.items())
            raise EngineError(f"workers have different versions of dask_distmm: {found}; install the same on all")
        if not able:
            raise PlanError(f"none of {len(running)} workers can multiply: start workers with dask_distmm installed")
        if isinstance(wanted, int):
            if wanted > len(able):
                raise PlanError(f"workers={wanted}, but the cluster has {len(able)}")
            able = dict(itertools.islice(able.items(), wanted))
        return [as_worker(ws) for ws in able.values()]

    def placed(
        self, workers: Sequence[Worker], names: Sequence[str], counts: Sequence[tuple[int, int]]
    ) -> tuple[list[Worker], list[bytes | None]]:
        """Return where the chunks of some arrays are.

        Parameters
        ----------
        workers
            Those that can take part.
        names, counts
            Names of the arrays, and how many chunks each has along its two axes.

        Returns
        -------
        list of Worker
            Others that hold chunks.
        list of (bytes or None)
            For each array the index into ``[*workers, *others]`` of each chunk's holder, as int32; None where
            not all of its chunks are in memory.
        """
        number = {worker.address: index for index, worker in enumerate(workers)}
        others: dict[str, int] = {}
        placed: list[bytes | None] = []
        for name, (nrows, ncols) in zip(names, counts, strict=True):
            found = []
            for i, j in itertools.product(range(nrows), range(ncols)):
                ts = self._scheduler.tasks.get((name, i, j))
                holders = [ws.address for ws in ts.who_has or ()] if ts is not None else []
                known = [number[address] for address in holders if address in number]
                if known:
                    found.append(known[0])
                elif holders:
                    found.append(others.setdefault(holders[0], len(workers) + len(others)))
                else:
                    break
            placed.append(np.array(found, np.int32).tobytes() if len(found) == nrows * ncols else None)
        return [as_worker(self._scheduler.workers[address]) for address in others], placed

    async def _describe(self, addresses: Sequence[str]) -> None:
        async def ask(address: str) -> None:
            try:
                answer = await asyncio.wait_for(self._scheduler.rpc(address).distmm_describe(), _DESCRIBE_TIMEOUT)
            except (OSError, TimeoutError):
                return
            if isinstance(answer, Mapping) and address in self._scheduler.workers:
                self._described[address] = dict(answer)

        await asyncio.gather(*map(ask, addresses))

    def _has_engine(self, address: str, engine: str) -> bool:
        engines = self._described.get(address, {}).get("engines", {})
        return engine in engines and "error" not in engines[engine]


def as_worker(ws: WorkerState) -> Worker:
    """Return a worker of the scheduler as planning sees it."""
    return Worker(ws.address, ws.nthreads, int(ws.memory_limit or 0))
