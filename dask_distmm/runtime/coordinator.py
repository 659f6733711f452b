"""Sees a multiply through, from the arrival of its barrier to the chunks of D in memory.

Products whose inputs are still being made: those that can't fit are refused, those that nothing moves are ended. Dask
loads the inputs of a barrier without asking whether there is room for all of them at the same time. A worker that
holds more than its pause threshold does not start tasks. When chunks that wait for a run have paused all workers, no
task ever begins again.

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
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from dask.utils import format_bytes
from distributed.metrics import time

from dask_distmm.compat import install_command
from dask_distmm.engines.base import log
from dask_distmm.errors import (
    DistMMError,
    EngineError,
    MatrixError,
    ProjectedMemoryError,
    RunFailedError,
    advice,
    brief,
    in_words,
)
from dask_distmm.planning import Computation, Problem, plan_computation
from dask_distmm.planning.region import RegionProblem
from dask_distmm.runtime import direct
from dask_distmm.runtime.freezing import (
    Barrier,
    RankGroup,
    RankGroups,
    Roster,
    RunPlan,
    RunPlanner,
    deliveries,
)
from dask_distmm.runtime.keys import is_sum
from dask_distmm.runtime.messages import Done, Reply, Vote, ask, post
from dask_distmm.runtime.regions import Regions, put_back
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.runtime.run import Lost, Run, TaskFailed, in_short, raise_if_ended, summarize
from dask_distmm.runtime.worker import WorkerService

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

# Number of failed ranks that a message names; the error's attribute `ranks` has all.
_NAMED = 8
# How often the scheduler looks whether a run makes progress, and whether any task continues (seconds).
_LOOK, _LOOK_AT_LOADS = 0.5, 1.0


def _judge(run: Run, address: str, task: asyncio.Future[A | None]) -> A:
    """Return a participant's good answer; raise the error that a bad one stands for."""
    error = task.exception()
    if isinstance(error, OSError):  # CommClosedError among them: the worker is going
        raise Lost(f"{address}: {error}") from error
    if error is not None:
        raise failed(run, in_words(error), {address: in_words(error)}) from error
    answer = task.result()
    if run.lost and (answer is None or answer.status != "OK"):
        raise Lost(f"{address} can't go on without {', '.join(sorted(run.lost))}")
    if answer is None:
        raise EngineError(
            f"worker {address} has chunks of this product and lacks dask_distmm; install it there and start it again "
            f"by {install_command(elsewhere=True)}, or take it out of the cluster: client.retire_workers([{address!r}])"
        )
    if answer.status == "OK":
        return answer
    if isinstance(answer, Vote) and answer.status == "missing":
        raise Lost(f"{address} does not have {len(answer.keys)} chunks", moved=True)
    if isinstance(answer, Vote) and answer.status == "orders":
        raise Lost(f"chunks on {address} lie in the orders {answer.orders}", moved=True, orders=answer.orders)
    if isinstance(answer, Vote) and answer.status == "no replicas":
        raise Lost(f"{address} no longer has replicas of {answer.names}", replicas=answer.names)
    if answer.status == "lost":
        raise Lost(f"{address}: {answer.message}")
    if answer.status == "matrix":
        raise MatrixError(answer.message)
    if answer.status in ("source", "function"):
        raise TaskFailed(answer)
    detail = f"\n{answer.traceback}" if answer.traceback else ""
    raise failed(run, answer.message + detail, {address: answer.message})


def failed(run: Run, reason: str, ranks: Mapping[str, str] | None = None) -> RunFailedError:
    """Return the error that says of a run in which phase it failed, where (reasons by address) and why."""
    named = sorted(ranks or ())
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    who = f" on {', '.join(named[:_NAMED])}{more}" if named else ""
    phase = run.failed_in or run.phase
    message = f"run {run.run_id} of {run.name} failed while {phase}{who}: {reason}"
    return RunFailedError(message, run.run_id, phase, ranks)


# All runs that are not over, in the order in which they take place, and waiting for them


class RunQueue(dict[int, Run]):
    """Runs by number, from when they get it until they have been seen through."""

    def __init__(self) -> None:
        super().__init__()
        # Runs count within an epoch; see `messages`.
        self.newest, self.epoch = 0, uuid.uuid4().hex
        self._changed = asyncio.Event()

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
            self.changed()

    async def turn(self, run: Run) -> None:
        """Wait until no earlier run uses a worker of this one: collectives meet in one order everywhere."""

        def in_the_way(live: Run) -> bool:
            # One whose participants are not fixed yet may turn out to need the same workers.
            return live.run_id < run.run_id and (not live.participants or bool(live.participants & run.participants))

        await self._wait_for(lambda: not run.live or not any(map(in_the_way, self.values())))
        raise_if_ended(run)

    async def ended(self, run: Run) -> None:
        """Wait until a run is done or has failed."""
        await self._wait_for(lambda: not run.live)

    async def over(self, run: Run) -> None:
        """Wait until a run has been seen through."""
        await self._wait_for(lambda: run.run_id not in self)

    async def _wait_for(self, happened: Callable[[], bool]) -> None:
        while not happened():
            await self._changed.wait()

    def changed(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


# Completes D: its tasks go to memory, where participants have left their chunks


# Number of tasks that are put into memory before others get the event loop again.
_SLICE = 1000


async def complete(
    scheduler: Scheduler, run_id: int, barrier: Barrier, frozen: RunPlan, answers: Mapping[str, Done], began: float
) -> int:
    """Put the tasks of D into memory where their chunks are; return how many wanted ones are missing."""
    stimulus, ended = f"distmm-done-{run_id}", time()
    outputs = {key[0]: output for key, (output, _) in frozen.wanted.items()}
    placed: list[direct.Made] = []
    for address, answer in answers.items():
        keys: list[tuple[Any, int]] = []
        for name, raw_numbers, raw_sizes in answer.placed:
            place = barrier.problem.output(outputs[name]).place
            numbers, sizes = (np.frombuffer(raw, np.int64).tolist() for raw in (raw_numbers, raw_sizes))
            keys += [((name, *place(number)), size) for number, size in zip(numbers, sizes, strict=True)]
        # Dask's dashboard gets an equal share of the run for each of a worker's chunks.
        share = (ended - began) / max(1, len(keys))
        for at, (key, size) in enumerate(keys):
            span = {"action": "compute", "start": began + at * share, "stop": began + (at + 1) * share}
            placed.append((key, frozen.states[address], size, answer.type, span))
    left, unknown = set(frozen.wanted), dict[str, list[Any]]()
    for first in range(0, len(placed), _SLICE):
        if first:
            await asyncio.sleep(0)
        some = placed[first : first + _SLICE]
        left -= (done := direct.put_into_memory(scheduler, barrier.ts, some, stimulus))
        for key, ws, *_ in some:
            ts = scheduler.tasks.get(key)
            if key not in done and (ts is None or ws not in (ts.who_has or ())):
                unknown.setdefault(ws.address, []).append(key)
    for address, orphans in unknown.items():
        direct.free(scheduler, address, orphans, stimulus)
    # A chunk that no task wants any more is not missing.
    tasks = (scheduler.tasks.get(key) for key in left)
    return sum(ts is not None and ts.state == "waiting" for ts in tasks)


# Sees a multiply through, from the arrival of its barrier to the chunks of D in memory


def stuck(workers: Iterable[Any]) -> list[WorkerState]:
    """Return the paused workers if no worker can run tasks; an empty list otherwise."""
    paused = []
    for ws in workers:
        if ws.status.name == "paused":
            paused.append(ws)
        if ws.executing or (ws.status.name != "paused" and ws.processing):
            return []
    return paused


A = TypeVar("A", bound=Reply)
P = ParamSpec("P")

# A worker that stands still is not waited for longer than this beyond the grace time of a release (seconds).
_SLACK = 5.0
# Workers that do not even answer to an abort are not waited for longer than this (seconds).
_ABORT_TIMEOUT = 5.0
# A plan is made again so often because chunks have moved, before that counts as a loss.
_MOVES = 10


class Coordinator:
    """All runs of a cluster. On the scheduler's event loop."""

    def __init__(self, scheduler: Scheduler, barriers: Mapping[str, Barrier], event: Callable[..., None]) -> None:
        self.scheduler, self._barriers, self._event = scheduler, barriers, event
        self.queue = RunQueue()
        self.roster = Roster(scheduler, self.queue.epoch)
        self.groups = RankGroups()
        release = WorkerService.release_replica
        self.replicas = Replicas(scheduler, lambda address, name, run_id: self.tell(address, release, name, run_id))
        self.regions = Regions(scheduler)
        self._freezer = RunPlanner(scheduler, self.roster, self.groups, self.replicas)
        # The event loop holds tasks weakly only.
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def admit(self, barrier: Barrier) -> None:
        """Look after a new barrier until it is parked."""
        if self._watch is None or self._watch.done():
            self._watch = self._in_background(self._watch_all())
        self._in_background(self._admit(barrier))

    async def _admit(self, barrier: Barrier) -> None:
        """Fail a barrier whose multiply would exceed memory, before much of its inputs is loaded."""
        ts, problem = barrier.ts, barrier.problem

        async def planned() -> None:
            # Where all is in memory the run's own plan counts it where it is.
            if ts.state == "waiting":
                engines, workers = await self.roster.choose(problem.demand)
                await asyncio.to_thread(plan_computation, problem, workers, engine=engines)

        try:
            # Who is paused for good is left to the watch.
            await self.roster.until_it_fits(planned, math.inf)
        except ProjectedMemoryError as error:
            if ts.state == "waiting":
                self.fail(ts, error, f"distmm-memory-{ts.key}")
        except DistMMError:
            pass  # the reason may have gone when the inputs are there

    async def _watch_all(self) -> None:
        """End barriers whose inputs can never come, as long as there are barriers that wait."""
        seen, since = -1, time()
        while waiting := [barrier for barrier in self._barriers.values() if barrier.ts.state == "waiting"]:
            await asyncio.sleep(_LOOK_AT_LOADS)
            if self.scheduler.transition_counter != seen:
                seen, since = self.scheduler.transition_counter, time()
            if not (paused := stuck(self.scheduler.workers.values())):
                since = time()
            for barrier in waiting if paused else ():
                ts, problem = barrier.ts, barrier.problem
                limit = problem.options.load_timeout
                holding = [ws for ws in paused if any(dts in ws.has_what for dts in ts.dependencies)]
                if time() - since < limit or ts.state != "waiting" or not holding:
                    continue
                held = {ws.address: int(ws.memory.process) for ws in holding}
                text = ", ".join(f"{address} holds {format_bytes(size)}" for address, size in held.items())
                error = ProjectedMemoryError(
                    f"the inputs of {problem.name} can't be loaded: for {limit:g} s (config distmm.timeouts.load) "
                    f"nothing has gone on, since workers with chunks of it are paused: {text}. "
                    f"{advice([*problem.remedies, 'use a higher memory_limit'])}",
                    held,
                    {ws.address: ws.memory_limit for ws in holding},
                )
                self.fail(ts, error, f"distmm-stuck-{ts.key}")

    async def drive(self, barrier: Barrier) -> None:
        """Run a parked barrier's multiply until all that waits for it is in memory, or it is not parked any more."""
        parked = asyncio.ensure_future(direct.keep_parked(self.scheduler, [barrier.key]))
        try:
            while barrier.parked:
                await self._attempt(barrier)
        except Exception as error:
            self.fail(barrier.ts, error, f"distmm-failed-{barrier.key}")
        finally:
            parked.cancel()

    def fail(self, ts: TaskState, error: Exception, stimulus_id: str) -> None:
        """End a barrier with an error. Of a region Dask gets the tasks: an error that these raise is theirs."""
        if put_back(self.scheduler, ts):
            log.info("%s is left to Dask's own tasks: %s", ts.key, error)
        else:
            direct.fail(self.scheduler, ts, error, stimulus_id)

    async def _attempt(self, barrier: Barrier) -> None:
        """Run once. Returns when the run is done, or may be tried again; raises every other failure."""
        for old in self.queue.of(barrier.key):
            await self.queue.over(old)
        frozen: RunPlan | None = None
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
            except Lost as reason:
                await self._end(run, str(reason))
                if run.released:
                    self._event("released", run)
                    return
                self._freezer.note_orders(barrier, reason.orders)
                self.replicas.drop(*reason.replicas)
                barrier.moves += reason.moved
                if not reason.moved or barrier.moves > _MOVES:
                    self._lose(barrier, run, str(reason), counts=not reason.replicas)
                if run.donation_done:
                    direct.wait_again(self.scheduler, [barrier.ts], f"distmm-again-{run.run_id}")
            except BaseException as error:
                running = run.phase == "running"
                reports = await self._end(run, brief(str(error)))
                if isinstance(error, RunFailedError):
                    error.history.update(reports)
                again = _may_retry(barrier, error)
                self._event("restart" if again else "failed", run, reason=brief(str(error)))
                if running and frozen is not None and (group := self.groups.drop(frozen.plan.group)):
                    # The ranks may be in the middle of a collective: the group is of no use any more.
                    self.release([group], barrier.problem.options.grace_timeout)
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

    async def _ask_all(
        self,
        run: Run,
        ask: Callable[[str], Awaitable[A | None]],
        timeout: float | None = None,
        silence: float | None = None,
    ) -> dict[str, A]:
        """Ask the participants that have not answered; return their answers by address, when all are good.

        All are asked at once; the first failure, or the end of the run, ends it.
        """
        tasks: dict[asyncio.Future[Any], str] = {asyncio.ensure_future(ask(a)): a for a in run.waiting_for}
        over = asyncio.ensure_future(self.queue.ended(run))
        answers: dict[str, A] = {}
        workers = self.scheduler.workers
        deadline = None if timeout is None else time() + timeout
        # `asyncio.wait` would look at all of them each time that one has answered.
        arrived = asyncio.Queue[asyncio.Future[Any]]()
        for task in (*tasks, over):
            task.add_done_callback(arrived.put_nowait)
        try:
            while run.waiting_for:
                left = _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        arrived.put_nowait(await arrived.get())
                raise_if_ended(run)
                finished = [arrived.get_nowait() for _ in range(arrived.qsize())]
                for task in filter(tasks.__contains__, finished):
                    address = tasks[task]
                    if address in run.lost or (isinstance(task.exception(), OSError) and self.lose(run, address)):
                        continue
                    answers[address] = _judge(run, address, task)
                    run.answer(address, run.run_id)
                    run.moved = time()
                if deadline is not None and time() >= deadline and run.waiting_for:
                    reason = f"no answer within {timeout:g} s (config distmm.timeouts.vote)"
                    run.unresponsive.update(run.waiting_for)
                    raise failed(run, reason, dict.fromkeys(run.waiting_for, reason))
                if silence is None or time() - run.moved < silence:
                    continue
                seen = {a: workers[a].last_seen for a in run.participants if a in workers}
                if silent := run.silent(seen, time(), silence):
                    reason = f"no sign of life, and no progress of the run, for {silence:g} s (distmm.timeouts.silence)"
                    run.unresponsive.update(silent)
                    raise failed(run, reason, dict.fromkeys(silent, reason))
            return {address: answer for address, answer in answers.items() if address not in run.lost}
        finally:
            for task in (*tasks, over):
                task.cancel()
            await asyncio.gather(*tasks, over, return_exceptions=True)

    async def _vote(self, run: Run, barrier: Barrier, frozen: RunPlan) -> list[Any]:
        """Return the offers of all participants, in their order."""
        run.begin_vote()
        plan, wire = frozen.plan, frozen.plan.to_wire()
        number = {worker.address: index for index, worker in enumerate(plan.participants)}

        def prepare(address: str) -> Awaitable[Vote | None]:
            keys, sources = frozen.keys.get(address, {}), frozen.sources.get(address, b"")
            request = run.run_id, number[address], wire, keys, not barrier.moves, sources
            return self._ask(address, WorkerService.prepare, *request)

        limit = plan.problem.options.vote_timeout
        votes = await self._ask_all(run, prepare, timeout=limit)
        return [votes[address].offer if address in votes else None for address in number]

    async def _start(self, run: Run, barrier: Barrier, frozen: RunPlan, offers: Sequence[Any]) -> None:
        plan = frozen.plan
        # It may have been ended while the last votes came.
        raise_if_ended(run)
        run.begin_running(time())
        run.donated, run.reading = frozen.donated, set(plan.workers)
        run.expected_bytes = 0 if plan.meets else plan.bytes_moved
        began = time()
        log.info("run %d of %s starts on %s\n%r", run.run_id, run.name, plan.workers, plan)
        how: dict[str, Any] = {"tasks": dict(plan.problem.counts)} if isinstance(plan.problem, RegionProblem) else {}
        how |= {"method": plan.method, "grid": plan.grid, "engine": plan.engine, "flops": plan.flops}
        self._event("start", run, **how, bound=plan.bound, ranks=plan.workers, projected_bytes=plan.projected_bytes)
        self._keep(run, frozen)
        deliver = deliveries(plan.problem, frozen.wanted)
        # Of those that only hand out chunks nothing is wanted but what ranks request.
        keep = {worker.address for worker in plan.participants[: plan.replicas]}
        for address in run.participants.difference(plan.workers, keep):
            run.answer(address, run.run_id)

        limit = plan.problem.options.silence_timeout
        answers = await self._ask_all(
            run, lambda address: self._ask(address, WorkerService.start, run.run_id, offers, deliver), silence=limit
        )
        self.groups.keeps(plan.group, max((answer.kept_bytes for answer in answers.values()), default=0))
        try:
            missing = await complete(self.scheduler, run.run_id, barrier, frozen, answers, began)
        finally:
            self.tell(sorted(run.participants - run.lost), WorkerService.finish, run.run_id)
        if missing:
            if not run.lost:
                raise Lost(f"{missing} chunks are gone with the workers that had them")
            done = f"{len(frozen.wanted) - missing} of {len(frozen.wanted)} chunks are done"
            raise Lost(f"{', '.join(sorted(run.lost))} left the cluster; {done}")
        self.replicas.add(run.run_id, plan)
        if isinstance(plan.problem, RegionProblem):
            self.regions.learn(plan.problem, answers.values())
        figures = summarize(answers)
        log.info("run %d of %s done in %s", run.run_id, run.name, in_short(figures))
        self._event("done", run, **figures, **_run_bytes(plan.problem), projected_bytes=plan.projected_bytes)
        options = plan.problem.options
        self.release(self.groups.surplus(options.max_groups, options.keep_workspace_bytes), options.grace_timeout)

    def _keep(self, run: Run, frozen: RunPlan) -> None:
        """Ask the worker after each owner to copy the chunks of which there are to be two."""
        addresses = [worker.address for worker in frozen.plan.participants if worker.address in self.scheduler.workers]
        for address, after in zip(addresses, addresses[1:] + addresses[:1], strict=True):
            held = frozen.keys.get(address, {})
            keys = [key for name in frozen.plan.problem.kept for key in held.get(name, ())]
            if keys and after != address:
                direct.copy_to(self.scheduler, after, keys, f"distmm-keep-{run.run_id}")

    def release(self, groups: Sequence[RankGroup], grace: float) -> list[asyncio.Task[None]]:
        """Free the memory of groups in the background, queued like runs of their ranks."""
        return [self._in_background(self._release(group, grace)) for group in groups]

    async def _release(self, group: RankGroup, grace: float) -> None:
        async with self.queue.begin(f"group-{group.number}", "", frozenset(group.workers)) as run:
            # A rank that leaves ends it: the plugin has told the others, or they end themselves.
            with contextlib.suppress(Lost, OSError, TimeoutError):
                await self.queue.turn(run)
                request = group.number, group.engine, grace
                requests = [self._ask(address, WorkerService.release, *request) for address in group.workers]
                # A watchdog kills a process whose rank is stuck after `grace`; do not wait for one that stands still.
                await asyncio.wait_for(asyncio.gather(*requests), grace + _SLACK)

    async def release_all(self, grace: float) -> int:
        """Free the memory that engines keep on the workers between runs; return how many groups there were."""
        groups = self.groups.surplus(0)
        await asyncio.gather(*self.release(groups, grace))
        return len(groups)

    def gathered(self, run_id: int, worker: str = "") -> None:
        """Record that a rank has read all its inputs; release donated chunks when all ranks have.

        Dask adds the address of the `worker` on arrival.
        """
        run = self.queue.get(run_id)
        if run is not None and run.gathered(worker) and (ts := self.scheduler.tasks.get(run.key)) is not None:
            direct.release_donated(self.scheduler, ts, run.donated, f"distmm-donated-{run.run_id}")
            self.tell(sorted(run.participants - run.lost), WorkerService.release_operands, run.run_id)

    async def _end(self, run: Run, reason: str) -> dict[str, str]:
        """Make all participants drop a run that did not succeed; return their histories of it by address."""
        if run.phase == "done":
            return {}  # they have been told to finish
        run.fail({"scheduler": reason})
        present = [address for address in run.participants if address in self.scheduler.workers]
        reports = dict.fromkeys(present, "it does not answer")
        answered: set[str] = set()

        async def abort(address: str) -> None:
            if address in run.unresponsive:
                return
            with contextlib.suppress(OSError, TimeoutError):
                request = self._ask(address, WorkerService.abort, run.run_id, reason)
                answer = await asyncio.wait_for(request, _ABORT_TIMEOUT)
                answered.add(address)
                reports[address] = answer.message if answer is not None else "it does not know dask_distmm"

        await asyncio.gather(*map(abort, present))
        run.unresponsive.update(reports.keys() - answered)
        # Those that do not answer now hear of it on Dask's own stream, when they listen again.
        self.tell(present, WorkerService.end, run.run_id, reason)
        self.queue.changed()
        return reports

    def lose(self, run: Run, worker: str) -> bool:
        """Abort a run, or continue it without a lost worker; return whether it continues."""
        if run.lose([worker]):
            left = sorted(run.participants - run.lost) if run.lost else []
            self.tell(left, WorkerService.worker_lost, run.run_id, worker)
            self.queue.changed()
        return worker in run.lost

    def _ask(
        self, address: str, handler: Callable[Concatenate[Any, P], Awaitable[A]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[A | None]:
        return ask(self.scheduler.rpc(address), handler, self.queue.epoch, *args, **kwargs)

    def tell(
        self, addresses: Sequence[str], handler: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method of the `WorkerService` of some workers, without an answer."""
        wire = post(handler, self.queue.epoch, *args, **kwargs)
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
    streamed = [name for name in sizes if problem[name].by_ranks] or list(sizes)
    loaded = sum(sizes[name] * problem[name].itemsize for name in streamed)
    finished = 0 if is_sum(problem.result_name) else problem.m * problem.n * problem.d.itemsize
    return {"loaded_bytes": loaded, "made_bytes": finished}
