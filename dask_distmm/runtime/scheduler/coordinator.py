"""Sees a multiply through, from its parked barrier to the chunks of D in memory.

A run, on the scheduler::

    freeze        roster and placement are frozen; the plan is made in a thread
      turn        wait for runs with a lower number that use any of the same workers
      vote        every participant: are all chunks here? all allocated?
      start       every participant works, and gives its chunks of D to Dask; the answer comes when it has
    complete      the tasks of D go to memory, where their chunks are
      finish      participants free the buffers of the run

A failure ends a run for all participants at once. If a worker was lost there is another run as soon as Dask has
computed the lost chunks again, up to ``distmm.retries`` times. Every other failure is one typed error, with which the
barrier ends. A run makes those chunks of D that are wanted and not in memory: where ranks only pull, and some are gone,
the others' chunks go to memory, and the next run makes the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.metrics import time

from dask_distmm.engines.base import log
from dask_distmm.errors import RunFailedError, brief
from dask_distmm.planning import ENGINES, Computation, Problem
from dask_distmm.planning.footprint import is_by_ranks
from dask_distmm.runtime import direct
from dask_distmm.runtime.keys import is_sum
from dask_distmm.runtime.messages import Abort, Done, End, Finish, Forget, Gathered, Gone, Prepare, Start, Vote
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.runtime.run import Lost, Released, Replan, Run, TaskFailed, summarize
from dask_distmm.runtime.scheduler.barriers import Barrier, deliveries
from dask_distmm.runtime.scheduler.completing import complete
from dask_distmm.runtime.scheduler.freezing import Freezer, FrozenPlan
from dask_distmm.runtime.scheduler.queue import RunQueue
from dask_distmm.runtime.scheduler.rank_groups import RankGroups
from dask_distmm.runtime.scheduler.releasing import Releases
from dask_distmm.runtime.scheduler.roster import Roster
from dask_distmm.runtime.scheduler.voting import ask_all, failed
from dask_distmm.runtime.wire import Call, Message, Reply, ask, post

if TYPE_CHECKING:
    from distributed import Scheduler

A = TypeVar("A", bound=Reply)

# Workers that do not even answer to an abort are not waited for longer than this (seconds).
_ABORT_TIMEOUT = 5.0
# A plan is made again so often because chunks have moved, before that counts as a loss.
_MOVES = 10


class Coordinator:
    """All runs of a cluster. On the scheduler's event loop."""

    def __init__(self, scheduler: Scheduler, event: Callable[..., None]) -> None:
        self.scheduler, self._event = scheduler, event
        self.queue = RunQueue(scheduler)
        self.roster = Roster(scheduler, self.queue.epoch)
        self.groups = RankGroups()
        self.replicas = Replicas(scheduler, self.tell)
        self.releases = Releases(scheduler, self.queue)
        self._freezer = Freezer(scheduler, self.roster, self.groups, self.replicas)

    async def drive(self, barrier: Barrier) -> None:
        """Run a parked barrier's multiply until all that waits for it is in memory, or it is not parked any more."""
        parked = asyncio.ensure_future(self._keep_parked(barrier))
        try:
            while barrier.parked:
                await self._attempt(barrier)
        except Exception as error:
            direct.fail(self.scheduler, barrier.ts, error, f"distmm-failed-{barrier.key}")
        finally:
            parked.cancel()

    async def _keep_parked(self, barrier: Barrier) -> None:
        """Keep Dask's ``no-workers-timeout`` from ending a barrier whose run waits for its turn, or is on."""
        while self.scheduler.no_workers_timeout:
            direct.refresh(self.scheduler, barrier.ts)
            await asyncio.sleep(min(0.5, self.scheduler.no_workers_timeout / 4))

    async def _attempt(self, barrier: Barrier) -> None:
        """Run once. Returns when the run is done, or may be tried again; raises every other failure."""
        for old in self.queue.of(barrier.key):
            await self.queue.over(old)
        frozen: FrozenPlan | None = None
        async with self.queue.begin(barrier.problem.name, barrier.key) as run:
            try:
                frozen = await self._freezer.freeze(run, barrier)
                await self.queue.turn(run)
                offers = await self._vote(run, barrier, frozen)
                try:
                    await self._start(run, barrier, frozen, offers)
                except BaseException:
                    # Sums that have grown in place, in part, are neither the old ones nor the new ones.
                    direct.lose(self.scheduler, frozen.consumed, f"distmm-consumed-{run.run_id}")
                    raise
                barrier.losses = barrier.moves = 0
            except Released:
                await self._end(run, "its task was released")
                self._event("released", run)
            except Replan as reason:
                await self._end(run, str(reason))
                self._freezer.note_orders(barrier, reason.orders)
                barrier.moves += 1
                if barrier.moves > _MOVES:
                    self._lose(barrier, run, str(reason))
            except Lost as reason:
                await self._end(run, str(reason))
                self.replicas.drop(*reason.replicas)
                self._lose(barrier, run, str(reason), counts=not reason.replicas)
                if run.given_up:
                    direct.wait_again(self.scheduler, barrier.ts, f"distmm-again-{run.run_id}")
            except BaseException as error:
                running = run.phase == "running"
                told = await self._end(run, brief(str(error)))
                if isinstance(error, RunFailedError):
                    error.history.update(told)
                again = _may_retry(barrier, error)
                self._event("restart" if again else "failed", run, reason=brief(str(error)))
                if running and frozen is not None and (group := self.groups.drop(frozen.plan.group)):
                    # The ranks may be in the middle of a collective: the group is of no use any more.
                    self.releases.begin([group], barrier.problem.options.grace_timeout)
                if not again:
                    raise

    def _lose(self, barrier: Barrier, run: Run, reason: str, *, counts: bool = True) -> None:
        """Count a run that has lost what it needs; raise if there were too many of them."""
        barrier.losses += counts
        if barrier.losses > barrier.problem.options.retries:
            error = failed(run, f"it was started again {barrier.problem.options.retries} times; last: {reason}")
            self._event("failed", run, reason=brief(str(error)))
            raise error
        self._event("restart", run, reason=reason)

    async def _vote(self, run: Run, barrier: Barrier, frozen: FrozenPlan) -> list[Any]:
        """Return the offers of all participants, in their order."""
        run.begin_vote()
        made, wire = frozen.plan, frozen.plan.to_wire()
        number = {worker.address: index for index, worker in enumerate(made.participants)}

        def prepare(address: str) -> Awaitable[Vote | None]:
            keys = frozen.keys.get(address, {})
            sources = frozen.sources.get(address, b"")
            request = Prepare(run.run_id, number[address], wire, keys, not barrier.moves, sources)
            return self._ask(address, request)

        limit = made.problem.options.vote_timeout
        votes = await ask_all(self.scheduler, run, prepare, self.queue.ended(run), self.lose, timeout=limit)
        addresses = [worker.address for worker in made.participants]
        return [votes[address].offer if address in votes else None for address in addresses]

    async def _start(self, run: Run, barrier: Barrier, frozen: FrozenPlan, offers: Sequence[Any]) -> None:
        made = frozen.plan
        run.begin_running(time())
        run.giving_up, run.reading = frozen.given_up, set(made.workers)
        run.expected_bytes = 0 if ENGINES[made.engine].collective else made.bytes_moved
        began = time()
        log.info("run %d of %s starts on %s\n%r", run.run_id, run.name, made.workers, made)
        how = {"method": made.method, "grid": made.grid, "engine": made.engine, "flops": made.flops}
        self._event("start", run, **how, bound=made.bound, ranks=made.workers, projected_bytes=made.projected_bytes)
        request = Start(run.run_id, offers, deliveries(made.problem, frozen.wanted))

        def start(address: str) -> Awaitable[Done | None]:
            return self._ask(address, request)

        limit = made.problem.options.silence_timeout
        answers = await ask_all(self.scheduler, run, start, self.queue.ended(run), self.lose, silence=limit)
        self.groups.keeps(made.group, max(answer.kept_bytes for answer in answers.values()))
        try:
            missing = await complete(self.scheduler, run.run_id, barrier, frozen, answers, began)
        finally:
            self.tell(list(answers), Finish(run.run_id))
        if missing:
            if not run.gone:
                raise Lost(f"{missing} chunks are gone with the workers that had them")
            done = f"{len(frozen.wanted) - missing} of {len(frozen.wanted)} chunks are done"
            raise Lost(f"{', '.join(sorted(run.gone))} left the cluster; {done}")
        self.replicas.add(run.run_id, made)
        summary = summarize(answers)
        log.info("run %d of %s done in %s", run.run_id, run.name, summary)
        figures = {**dataclasses.asdict(summary), **_run_bytes(made.problem)}
        self._event("done", run, **figures, projected_bytes=made.projected_bytes)
        options = made.problem.options
        self.releases.begin(
            self.groups.surplus(options.max_groups, options.keep_workspace_bytes), options.grace_timeout
        )

    def gathered(self, message: Gathered) -> None:
        """Note that a rank has read all it needs; when all have, chunks that the user gives up go."""
        run = self.queue.get(message.run_id)
        if run is not None and run.gathered(message.worker) and (ts := self.scheduler.tasks.get(run.key)) is not None:
            direct.give_up(self.scheduler, ts, run.giving_up, f"distmm-given-up-{run.run_id}")
            self.tell(sorted(run.participants - run.gone), Forget(run.run_id))

    async def _end(self, run: Run, reason: str) -> dict[str, str]:
        """Make all participants drop a run that did not succeed; return their histories of it by address."""
        if run.phase == "done":
            return {}  # they have been told to finish
        run.fail({"scheduler": reason})
        present = [address for address in run.participants if address in self.scheduler.workers]
        told = dict.fromkeys(present, "it does not answer")
        answered: set[str] = set()

        async def abort(address: str) -> None:
            if address in run.mute:
                return
            with contextlib.suppress(OSError, TimeoutError):
                answer = await asyncio.wait_for(self._ask(address, Abort(run.run_id, reason)), _ABORT_TIMEOUT)
                answered.add(address)
                told[address] = answer.history if answer is not None else "it does not know dask_distmm"

        await asyncio.gather(*map(abort, present))
        run.mute.update(told.keys() - answered)
        # Those that do not answer now hear of it on Dask's own stream, when they listen again.
        self.tell(present, End(run.run_id, reason))
        await self.queue.changed()
        return told

    def lose(self, run: Run, worker: str) -> bool:
        """Let a run end, or go on without a worker that is gone; return whether it goes on."""
        if run.lose([worker]):
            self.tell(sorted(run.participants - run.gone) if run.gone else [], Gone(run.run_id, worker))
            self.queue.changed_soon()
        return worker in run.gone

    def _ask(self, address: str, request: Call[A]) -> Awaitable[A | None]:
        return ask(self.scheduler.rpc(address), request, self.queue.epoch)

    def tell(self, addresses: Sequence[str], message: Message) -> None:
        """Send a message to the `WorkerSide` of some workers."""
        wire = post(message, self.queue.epoch)
        for address in addresses:
            if address in self.roster and address in self.scheduler.workers:
                self.scheduler.worker_send(address, wire)


def _may_retry(barrier: Barrier, error: BaseException) -> bool:
    """Whether a run that has failed begins again, as a task of Dask's would by the annotation ``retries``; count it."""
    # Ranks have retried what makes chunks, each chunk by itself.
    again = isinstance(error, RunFailedError) or (isinstance(error, TaskFailed) and error.reply.status != "source")
    if not again or barrier.ts.retries <= 0:
        return False
    barrier.ts.retries -= 1
    return True


def _run_bytes(problem: Computation) -> dict[str, int]:
    """Return the bytes of A and B that a run is given, or makes, and those of finished chunks of D that it makes."""
    if not isinstance(problem, Problem):
        return {"loaded_bytes": 0, "made_bytes": 0}
    sizes = {"a": problem.m * problem.k, "b": 0 if problem.shared else problem.k * problem.n}
    # The other one stays in memory where ranks make one.
    streamed = [name for name in sizes if is_by_ranks(problem, name)] or list(sizes)
    loaded = sum(sizes[name] * problem.itemsize(name) for name in streamed)
    finished = 0 if is_sum(problem.result_name) else problem.m * problem.n * problem.itemsize("d")
    return {"loaded_bytes": loaded, "made_bytes": finished}
