"""Which groups of workers share something costly between runs (a communicator, mappings), and when it goes. Pure.

Only the scheduler decides: workers make a group when a plan names one that they don't have yet, and free it
when they are told. So all ranks of a group always agree on whether it is there.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from dask_distmm.planning import ENGINES


class RankGroup(NamedTuple):
    """A group of ranks, or for an engine whose ranks map others' memory of all who take part."""

    # Its number; never used again.
    number: int
    # Name of the engine that it belongs to.
    engine: str
    # Their addresses, those of ranks in their order.
    workers: tuple[str, ...]


class RankGroups:
    """All groups of a cluster, the least recently used first."""

    def __init__(self) -> None:
        self._groups: collections.OrderedDict[tuple[str, tuple[str, ...]], RankGroup] = collections.OrderedDict()
        self._kept: dict[int, int] = {}
        self._newest = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._groups)

    def orders(self, engines: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the workers of each group that has a communicator, of some engines."""
        return [
            group.workers
            for group in self._groups.values()
            if group.engine in engines and ENGINES[group.engine].collective
        ]

    def use(self, engine: str, workers: tuple[str, ...]) -> RankGroup:
        """Return the group of these workers, a new one if there is none."""
        # The order of ranks is part of a communicator, and of nothing else that engines keep.
        workers = workers if ENGINES[engine].collective else tuple(sorted(workers))
        key = engine, workers
        if key not in self._groups:
            self._newest += 1
            self._groups[key] = RankGroup(self._newest, engine, workers)
        self._groups.move_to_end(key)
        return self._groups[key]

    def keeps(self, number: int, size: int) -> None:
        """Note how many bytes each rank of a group keeps for its next run."""
        self._kept[number] = size

    def surplus(self, most: int, most_bytes: int | None = None) -> list[RankGroup]:
        """Take out and return the least recently used ones, until no limit is exceeded."""
        found = [self._groups.popitem(last=False)[1] for _ in range(len(self._groups) - most)]
        while most_bytes is not None and len(self._groups) > 1:
            total: collections.Counter[str] = collections.Counter()
            for group in self._groups.values():
                total.update(dict.fromkeys(group.workers, self._kept.get(group.number, 0)))
            over = {address for address, size in total.items() if size > most_bytes}
            *others, _ = self._groups.items()
            oldest = next((key for key, g in others if self._kept.get(g.number) and over.intersection(g.workers)), None)
            if oldest is None:
                break
            found.append(self._groups.pop(oldest))
        self._kept = {group.number: self._kept.get(group.number, 0) for group in self._groups.values()}
        return found

    def drop(self, number: int) -> RankGroup | None:
        """Take out and return one group, if it is there."""
        for key, group in self._groups.items():
            if group.number == number:
                return self._groups.pop(key)
        return None

    def lose(self, address: str) -> list[RankGroup]:
        """Take out and return the groups of a worker that is gone."""
        gone = [key for key in self._groups if address in key[1]]
        return [self._groups.pop(key) for key in gone]

    def clear(self) -> None:
        """Forget all."""
        self._groups.clear()
