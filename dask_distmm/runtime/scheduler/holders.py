"""Which workers hold which chunks, as plans need it."""

from __future__ import annotations

import asyncio
import itertools
import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.metrics import time
from numpy.typing import NDArray

from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.installing import install_command
from dask_distmm.planning import Worker
from dask_distmm.runtime import direct
from dask_distmm.runtime.run import Replan
from dask_distmm.runtime.scheduler.roster import Roster

if TYPE_CHECKING:
    from distributed import Scheduler

# How long chunks may take from workers without this package to others, and how often that is looked at (seconds).
_BRING_SECONDS = 60.0
_LOOK = 0.01
# The most axes that an array of NumPy has.
_AXES = 64
# So many chunks are looked up before others get the event loop again.
_SLICE = 5000


class Holders:
    """Finds the workers that hold chunks, beside those that can take part."""

    def __init__(self, scheduler: Scheduler, roster: Roster) -> None:
        self._scheduler, self._roster = scheduler, roster

    async def find(
        self, workers: Sequence[Worker], keys: Sequence[Sequence[Any]]
    ) -> tuple[list[Worker], list[NDArray[np.int32]]]:
        """Return who holds chunks beside the workers that can take part, and who holds each chunk."""
        number = {worker.address: index for index, worker in enumerate(workers)}
        if self._roster.bare:
            await self._bring(list(number), [key for operand in keys for key in operand])
        others: dict[str, int] = {}
        tables: list[NDArray[np.int32]] = []
        for operand in keys:
            table = np.empty(len(operand), np.int32)
            for index, key in enumerate(operand):
                if index and index % _SLICE == 0:
                    await asyncio.sleep(0)
                ts = self._scheduler.tasks.get(key)
                holders = [ws.address for ws in ts.who_has or ()] if ts is not None else []
                if not holders:
                    raise Replan(f"chunk {key!r} is not in memory any more")
                found = next((number[address] for address in holders if address in number), None)
                if found is None:
                    address = next((address for address in holders if address in self._roster), holders[0])
                    found = others.setdefault(address, len(workers) + len(others))
                table[index] = found
            tables.append(table)
        await self._roster.describe([address for address in others if address not in self._roster])
        if gone := [address for address in others if address not in self._scheduler.workers]:
            raise Replan(f"{gone[0]} left the cluster with chunks")
        return [self._roster.worker(self._scheduler.workers[address], "") for address in others], tables

    async def _bring(self, ranks: Sequence[str], keys: Iterable[Any]) -> None:
        """Have Dask copy chunks to the ranks that only workers without this package have: those can't send them."""
        bare, tasks = self._roster.bare, self._scheduler.tasks

        def stranded(key: Any) -> bool:
            holders = {ws.address for ws in ts.who_has or ()} if (ts := tasks.get(key)) is not None else set()
            return bool(holders) and holders <= bare.keys()

        waiting = [key for key in dict.fromkeys(keys) if stranded(key)]
        for index, address in enumerate(ranks):
            if share := waiting[index :: len(ranks)]:
                direct.copy_to(self._scheduler, address, share, f"distmm-bring-{time()}")
        deadline = time() + _BRING_SECONDS
        while waiting := [key for key in waiting if stranded(key)]:
            if time() >= deadline:
                raise EngineError(
                    f"workers that lack dask_distmm have {len(waiting)} chunks of this product, which others did not "
                    f"get within {_BRING_SECONDS:g} s; install it on {', '.join(sorted(bare))} and start them "
                    f"again, by {install_command(elsewhere=True)}"
                )
            await asyncio.sleep(_LOOK)

    async def known(
        self, workers: Sequence[Worker], names: Sequence[str], counts: Sequence[Sequence[int]]
    ) -> tuple[list[Worker], list[bytes | None]]:
        """Return where the chunks of some arrays are; others get the event loop in between."""
        number = {worker.address: index for index, worker in enumerate(workers)}
        others: dict[str, int] = {}
        sources: list[Worker] = []
        placed: list[bytes | None] = []
        looked_up = itertools.count(1)
        for name, along in zip(names, counts, strict=True):
            found: list[int] = []
            count = _chunk_count(along, len(self._scheduler.tasks))
            for place in itertools.product(*map(range, along)) if count else ():
                if next(looked_up) % _SLICE == 0:
                    await asyncio.sleep(0)
                ts = self._scheduler.tasks.get((name, *place))
                holders = [ws.address for ws in ts.who_has or ()] if ts is not None else []
                known = [number[address] for address in holders if address in number]
                if known:
                    found.append(known[0])
                elif holders:
                    if holders[0] not in others:
                        others[holders[0]] = len(workers) + len(others)
                        sources.append(self._roster.worker(self._scheduler.workers[holders[0]], ""))
                    found.append(others[holders[0]])
                else:
                    break
            placed.append(np.array(found, np.int32).tobytes() if len(found) == count else None)
        return sources, placed


def _chunk_count(along: Sequence[int], most: int) -> int | None:
    """Return how many chunks an array has, from those along each axis; None if they are more than there are tasks."""
    if not all(isinstance(n, int) and n >= 0 for n in along) or len(along) > _AXES:
        raise ProtocolError(
            f"counts must be at most {_AXES} numbers of chunks for each array, got {reprlib.repr(along)}"
        )
    return count if (count := math.prod(along)) <= most else None
