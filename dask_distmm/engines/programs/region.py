"""One participant's side of a region: it calls each task as soon as its inputs are there.

As many threads as the worker has for tasks call them, in the order of the graph where several are ready. What others
need is published; what others publish comes in a thread of its own, in the order in which it is needed. Values travel
as pickles whose buffers are read in the owner's memory, or sent: they may be of any type.
"""

from __future__ import annotations

import collections
import heapq
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import Job, ResultKey, Side
from dask_distmm.engines.heap import heap
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.planning.region import INPUTS, TASKS, RegionPlacement
from dask_distmm.programs.steps import PART, Key

# How often a thread that waits looks whether the run was ended (seconds).
_LOOK = 0.2
# All types of NumPy are aligned where their addresses are multiples of this.
_ALIGNED = 16


def packed(value: Any) -> list[NDArray[Any]]:
    """Return a value of any type as arrays of bytes: a pickle, and the buffers that it leaves out."""
    if type(value) is np.ndarray and not (value.flags.c_contiguous or value.flags.f_contiguous):
        value = value.copy()
    buffers: list[pickle.PickleBuffer] = []
    try:
        text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception:  # of a class or a function that only cloudpickle takes
        buffers.clear()
        text = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [np.frombuffer(text, np.uint8), *(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)]


def unpacked(arrays: Sequence[NDArray[Any]]) -> Any:
    """Return the value that `packed` serialized; Dask's comms leave bytes at odd addresses, where NumPy is slow."""
    text, *buffers = arrays
    return pickle.loads(text.data, buffers=[x.copy() if x.ctypes.data % _ALIGNED else x for x in buffers])


class RegionJob(Job[RegionPlacement]):
    """One participant's side of a run of Dask's own tasks."""

    lends = True

    def __init__(self, side: Side[RegionPlacement]) -> None:
        super().__init__(side)
        self.exchange = Transport(self.plan.ranks, self.comm, self.ended.check)
        self._changed = threading.Condition()
        # Values that are here, by number; which tasks read each, how often; what each of this rank's tasks still lacks.
        self._values: dict[int, Any] = {}
        self._readers: dict[int, list[int]] = collections.defaultdict(list)
        self._uses: collections.Counter[int] = collections.Counter()
        self._lacks: dict[int, int] = {}
        self._ready: list[int] = []
        # Values that other ranks need; those that come, in order, with their owners; those that are results.
        self._published: set[int] = set()
        self._pulled: list[tuple[int, int]] = []
        self._left = 0

    @property
    def received_bytes(self) -> int:
        """Bytes received from other participants."""
        return super().received_bytes + self.exchange.pulled_bytes

    def prepare(self) -> None:
        """List this rank's tasks and their inputs; offer the handles by which others read its values."""
        if self.rank is None:
            return
        problem, holders = self.plan.problem, self.plan.holders()
        first = problem[INPUTS].count
        coming: dict[int, None] = {}
        for task, needed in enumerate(problem.needs):
            owner = self.plan.owners[task]
            for value in dict.fromkeys(needed):
                if owner != self.rank and holders[value] == self.rank:
                    self._published.add(value)
                elif owner == self.rank:
                    self._readers[value].append(task)
                    if holders[value] != self.rank:
                        coming[value] = None
            if owner == self.rank:
                self._lacks[task] = len(set(needed))
        self._pulled = [(value, holders[value]) for value in coming]
        self._uses.update({value: len(tasks) for value, tasks in self._readers.items()})
        self._uses.update(first + task for task in problem.results if self._owns(task))
        self._left = len(self._lacks)
        if self._published or self._pulled:
            self.offer = self.exchange.offer(self)

    def _owns(self, task: int) -> bool:
        return task >= 0 and self.plan.owners[task] == self.rank

    def accept(self, offers: Sequence[Any]) -> None:
        """Open the handles that all participants have offered."""
        self.exchange.accept(offers)

    def execute(self) -> dict[ResultKey, Any]:
        """Call all tasks; return the chunks of outputs."""
        if self.rank is None:
            return {}
        problem, began = self.plan.problem, time.perf_counter()
        heapq.heapify(ready := [task for task, lacks in self._lacks.items() if not lacks])
        self._ready = ready
        first, count = problem[INPUTS].count, len(self._lacks)
        with heap, self.exchange:
            for (name, number), chunk in self.chunks.items():
                if name == INPUTS:
                    self._arrive(number, chunk)
            threads = [threading.Thread(target=self._guarded, args=(self._pull,))] if self._pulled else []
            more = min(self.plan.participants[self.me].nthreads, count) - 1
            threads += [threading.Thread(target=self._guarded, args=(self._work,)) for _ in range(more)]
            for thread in threads:
                thread.start()
            self._guarded(self._work)
            for thread in threads:
                thread.join()
            self.ended.check()
        self.timings["all"] = time.perf_counter() - began
        results: dict[ResultKey, Any] = {}
        numbered = iter(problem.results)
        for output in problem.outputs:
            for number in range(output.count):
                task = next(numbered)
                if self._owns(task):
                    results[output.name, number] = self._values[first + task]
        return results

    def _guarded(self, function: Callable[[], None]) -> None:
        """Call a function; an error stops all threads, also those that wait for other ranks."""
        try:
            function()
        except BaseException as error:
            with self._changed:
                self.ended.end(error)
                self._changed.notify_all()

    def _pull(self) -> None:
        for value, owner in self._pulled:
            self.ended.check()
            self._arrive(value, unpacked(self.exchange.fetch(Key(PART, value), owner)))

    def _work(self) -> None:
        tasks, first = len(self._lacks), self.plan.problem[INPUTS].count
        while True:
            with self._changed:
                while not self._ready and self._left:
                    self._changed.wait(_LOOK)
                    self.ended.check()
                self.ended.check()
                if not self._left:
                    return
                task = heapq.heappop(self._ready)
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()
                needed = self.plan.problem.needs[task]
                inputs = [self._values[value] for value in needed]
            began = time.perf_counter()
            name, call = self.chunks[TASKS, task]
            output = call(inputs)
            del inputs
            self._arrive(first + task, output, needed)
            spent = time.perf_counter() - began
            self.timings[name] = self.timings.get(name, 0.0) + spent
            self.progress(1 - self._left / tasks)

    def _arrive(self, value: int, result: Any, needed: Sequence[int] = ()) -> None:
        """Store and publish a value; count down the readers of the values `needed` for it."""
        if value in self._published:
            self.exchange.publish(Key(PART, value), packed(result))
        with self._changed:
            if self._uses[value]:
                self._values[value] = result
            for reader in self._readers[value]:
                self._lacks[reader] -= 1
                if not self._lacks[reader]:
                    heapq.heappush(self._ready, reader)
            for read in set(needed):
                self._uses[read] -= 1
                if not self._uses[read]:
                    self._values.pop(read, None)
            if len(self._ready) > 1 or self._pulled:
                self._changed.notify_all()

    # For peers

    def available(self, kind: str, boxes: Boxes) -> Any:
        """Return the future that says when `serve` can answer."""
        return self.exchange.published(kind, boxes)

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return the published arrays that answer requests."""
        self.ended.check()
        return list(self.exchange.published(kind, boxes).result())

    def abort(self, error: BaseException) -> None:
        """End everything with `error`."""
        super().abort(error)
        self.exchange.abort(error)
