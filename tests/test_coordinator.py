"""The coordinator as a state machine: workers answer, fail, leave and join in any order; many runs wait in turns."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from types import SimpleNamespace
from typing import Any

from conformance import make_problem
from distributed.metrics import time
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_distmm.errors import DistMMError
from dask_distmm.planning import Worker, plan
from dask_distmm.runtime.coordinator import Coordinator
from dask_distmm.runtime.freezing import RunPlan
from dask_distmm.runtime.messages import Done, Reply, Vote
from dask_distmm.runtime.run import Run

PROBLEM = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m")
# Turns of the event loop in which everything has happened that may.
TURNS = 30


class Scripted(Coordinator):
    """A coordinator whose workers answer when the test says so; it checks what they are asked."""

    def __init__(self) -> None:
        workers: dict[str, Any] = {}
        super().__init__(SimpleNamespace(workers=workers, tasks={}, transitions=lambda *a: None), {}, self.note)  # type: ignore[arg-type]
        self._freezer = self  # type: ignore[assignment]
        # Requests that wait for an answer: run, address, operation.
        self.asked: dict[tuple[int, str, str], asyncio.Future[Any]] = {}
        self.voted = collections.defaultdict[int, set[str]](set)
        self.prepared = collections.defaultdict[int, set[str]](set)
        self.started: dict[str, int] = {}
        self.ranks: dict[int, tuple[str, ...]] = {}
        self.ended = collections.defaultdict[int, set[str]](set)
        self.done: set[str] = set()

    def note(self, what: str, run: Run, **details: Any) -> None:
        """Hear of what happens to runs."""
        if what == "done":
            self.done.add(run.key)

    def note_orders(self, barrier: Any, orders: Any) -> None:
        """Memory orders do not matter here."""

    async def freeze(self, run: Run, barrier: Any) -> RunPlan:
        """Plan for the workers that the barrier wants and that are there, or for all."""
        there = sorted(self.scheduler.workers)
        found = [address for address in there if address in barrier.wants] or there
        run.participants, run.independent = frozenset(found), barrier.independent
        problem = dataclasses.replace(PROBLEM, method=("allgather", "local")[run.run_id % 2])
        chosen = plan(problem, [Worker(address) for address in found])
        self.ranks[run.run_id] = chosen.workers
        return RunPlan(chosen, {}, {}, {}, {})

    def _ask(self, address: str, handler: Any, *args: Any, **how: Any) -> Any:
        run_id, what = args[0], handler.__name__
        if what == "prepare":
            self.prepared[run_id].add(address)
        elif what == "start":
            run = self.queue[run_id]
            assert self.voted[run_id] >= run.participants, "a run starts before all have voted for it"
            assert address in self.ranks[run_id], "a worker that only hands out chunks has nothing to start"
            assert self.started.get(address, 0) < run_id, "a worker starts runs in another order than their numbers"
            self.started[address] = run_id
        elif what == "abort":
            self.ended[run_id].add(address)
        answer = self.asked[run_id, address, what] = asyncio.get_running_loop().create_future()
        if address not in self.scheduler.workers:
            answer.set_exception(OSError("it is gone"))
        return answer

    def tell(self, addresses: Any, handler: Any, *args: Any, **how: Any) -> None:
        """Note who is told to finish a run."""
        if handler.__name__ == "finish":
            self.ended[args[0]] |= set(addresses)

    def answer(self, place: tuple[int, str, str], status: str) -> None:
        """Let a worker answer."""
        run_id, address, what = place
        answer = self.asked.pop(place)
        if answer.done():
            return
        if what == "prepare" and status == "OK":
            self.voted[run_id].add(address)
        kind = {"prepare": Vote, "start": Done}.get(what, Reply)
        if status == "gone":
            # It is out of reach.
            self.prepared[run_id].discard(address)
            answer.set_exception(OSError("the connection broke"))
        elif status != "OK" and kind is Reply:
            answer.set_result(None)
        else:
            answer.set_result(kind(status, message=status))

    async def drive_until_over(self, barrier: Any) -> None:
        """See a barrier through, or keep the error with which it ends."""
        try:
            while barrier.key not in self.done:
                await self._attempt(barrier)
        except DistMMError as error:
            barrier.error = error


class Runs(RuleBasedStateMachine):
    """Any order of events."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.barriers: list[Any] = []
        self.names = iter(f"w{number}" for number in range(1000))

        async def make() -> Scripted:
            return Scripted()

        self.coordinator = self.loop.run_until_complete(make())
        self.workers = self.coordinator.scheduler.workers
        for _ in range(count):
            self.join()

    def settle(self) -> None:
        """Let everything happen that may."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    @rule()
    def join(self) -> None:
        name = next(self.names)
        self.workers[name] = SimpleNamespace(address=name, last_seen=time())

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        """As Dask does: connections break, and the plugin hears of it, in either order."""
        name = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[name]
        heard_first = data.draw(st.booleans())
        for broken in (not heard_first, heard_first):
            if broken:
                for place in [place for place in self.coordinator.asked if place[1] == name]:
                    self.coordinator.answer(place, "gone")
            else:
                for run in list(self.coordinator.queue.values()):
                    self.coordinator.lose(run, name)
            self.settle()

    @rule(data=st.data(), independent=st.booleans(), retries=st.integers(0, 2))
    def park(self, data: Any, independent: bool, retries: int) -> None:
        wants = data.draw(st.sets(st.sampled_from(sorted(self.workers)), min_size=1))
        key = f"barrier-{len(self.barriers)}"
        barrier = SimpleNamespace(
            problem=PROBLEM, key=key, wants=wants, independent=independent, error=None, losses=0, moves=0,
            ts=SimpleNamespace(key=key, retries=retries, state="no-worker"),
        )  # fmt: skip
        barrier.task = self.loop.create_task(self.coordinator.drive_until_over(barrier))
        self.barriers.append(barrier)
        self.settle()

    @precondition(lambda self: self.coordinator.asked)
    @rule(data=st.data(), status=st.sampled_from(["OK", "OK", "OK", "OK", "failed", "lost", "gone"]))
    def answer(self, data: Any, status: str) -> None:
        self.coordinator.answer(data.draw(st.sampled_from(sorted(self.coordinator.asked))), status)
        self.settle()

    @precondition(lambda self: self.coordinator.asked)
    @rule()
    def all_answer_well(self) -> None:
        for place in sorted(self.coordinator.asked):
            self.coordinator.answer(place, "OK")
        self.settle()

    @invariant()
    def no_worker_is_in_two_runs(self) -> None:
        busy = [run for run in self.coordinator.queue.values() if run.phase in ("voting", "running")]
        for number, run in enumerate(busy):
            for other in busy[number + 1 :]:
                assert not (run.participants - run.lost) & (other.participants - other.lost)

    @invariant()
    def whoever_prepared_a_run_hears_of_its_end(self) -> None:
        for run_id, addresses in self.coordinator.prepared.items():
            if run_id not in self.coordinator.queue:
                assert addresses & self.workers.keys() <= self.coordinator.ended[run_id]

    def teardown(self) -> None:
        """When all answer well every barrier comes to its end, and nothing is left."""
        try:
            self.come_to_the_end()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.settle()
            self.loop.close()

    def come_to_the_end(self) -> None:
        while self.coordinator.asked:
            self.all_answer_well()
        self.whoever_prepared_a_run_hears_of_its_end()
        assert not self.coordinator.queue
        for barrier in self.barriers:
            assert barrier.task.done()
            barrier.task.result()
            assert (barrier.error is None) == (barrier.key in self.coordinator.done)
        assert not asyncio.all_tasks(self.loop)


Runs.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestRuns = Runs.TestCase
