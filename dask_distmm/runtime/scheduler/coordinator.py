"""Sees a multiply through, from its parked barrier to the chunks of D in memory.

A run, on the scheduler::

    freeze        roster and placement are frozen; the plan is made in a thread
      turn        wait for runs with a lower number that use any of the same workers
      vote        every participant: are all chunks here? all allocated?
      start       every participant works, and gives its chunks of D to Dask; the answer comes when it has
    complete      the tasks of D go to memory, where their chunks are
      finish      participants free what only the run needed

What goes wrong ends a run for all participants at once. If a worker was lost there is another run as soon as Dask has
computed again what went with it, up to ``distmm.retries`` times; everything else is one typed error, which the barrier
ends with. A run makes those chunks of D that are wanted and not in memory: where ranks only pull, and some are gone,
the others' chunks go to memory, and the next run makes the rest.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.metrics import time
from numpy.typing import NDArray

from dask_distmm.engines.base import log
from dask_distmm.errors import NoWorkersError, RunFailedError
from dask_distmm.planning import COLLECTIVE, Plan, Problem, Worker, plan
from dask_distmm.planning.chunk_order import by_holder, reorder
from dask_distmm.planning.peer.reads import independent
from dask_distmm.runtime import direct
from dask_distmm.runtime.keys import output_name
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.runtime.run import Lost, Released, Replan, Run, summarize
from dask_distmm.runtime.scheduler.barriers import Gate, unwanted
from dask_distmm.runtime.scheduler.groups import Group, Groups
from dask_distmm.runtime.scheduler.queue import LiveRuns
from dask_distmm.runtime.scheduler.roster import Roster
from dask_distmm.runtime.scheduler.voting import ask_all, check, failed

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

__all__ = ["Coordinator"]

# Workers that do not even answer to an abort are not waited for longer than this (seconds).
_ABORT_TIMEOUT = 5.0
# A plan is made again so often because chunks have moved, before that counts as a loss.
_MOVES = 10
# How often it is looked whether there are workers again that may multiply (seconds).
_LOOK = 0.2
# So many tasks are put into memory, or looked up, before others get the event loop again.
_SLICE = 1000


@dataclasses.dataclass(frozen=True)
class _Frozen:
    """What a run's plan was made from.

    Parameters
    ----------
    plan
        The plan.
    keys
        For each participant by address: for each operand the keys of its chunks there, in the order of their numbers.
    states
        The scheduler's state of each participant.
    wanted
        As `Gate.wanted` has them.
    """

    plan: Plan
    keys: dict[str, dict[str, list[Any]]]
    states: dict[str, WorkerState]
    wanted: dict[Any, tuple[str, int]]


class Coordinator:
    """All runs of a cluster. On the scheduler's event loop.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    event
        Logs what happens to a run: an action, the run, details.
    """

    def __init__(self, scheduler: Scheduler, event: Callable[..., None]) -> None:
        self.scheduler, self._event = scheduler, event
        self.roster = Roster(scheduler)
        self.groups = Groups()
        self.replicas = Replicas(scheduler, self.tell)
        self.live = LiveRuns(scheduler)
        # Memory orders of arrays' chunks, where they are not what one would expect.
        self._orders: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._releasing: set[asyncio.Future[None]] = set()

    async def drive(self, gate: Gate) -> None:
        """Run a parked barrier's multiply until all that waits for it is in memory, or it is not parked any more."""
        parked = asyncio.ensure_future(self._keep_parked(gate))
        try:
            while gate.parked:
                await self._attempt(gate)
        except Exception as error:
            direct.fail(self.scheduler, gate.ts, error, f"distmm-failed-{gate.key}")
        finally:
            parked.cancel()

    async def _keep_parked(self, gate: Gate) -> None:
        """Keep Dask's ``no-workers-timeout`` from ending a barrier whose run waits for its turn, or is on."""
        while self.scheduler.no_workers_timeout:
            direct.refresh(self.scheduler, gate.ts)
            await asyncio.sleep(min(0.5, self.scheduler.no_workers_timeout / 4))

    async def _attempt(self, gate: Gate) -> None:
        """Run once; what may be tried again returns, everything else raises."""
        for old in self.live.of(gate.key):
            await self.live.over(old)
        frozen: _Frozen | None = None
        async with self.live.begin(gate.problem.name, gate.key) as run:
            try:
                frozen = await self._freeze(run, gate)
                await self.live.turn(run)
                offers = await self._vote(run, gate, frozen)
                await self._start(run, gate, frozen, offers)
                gate.losses = gate.moves = 0
            except Released:
                await self._end(run, "its task was released")
                self._event("released", run)
            except Replan as reason:
                await self._end(run, str(reason))
                self._note(gate, reason)
                gate.moves += 1
                if gate.moves > _MOVES:
                    self._lose(gate, run, str(reason))
            except Lost as reason:
                await self._end(run, str(reason))
                self.replicas.drop(*reason.replicas)
                self._lose(gate, run, str(reason), counts=not reason.replicas)
            except BaseException as error:
                running = run.phase == "running"
                told = await self._end(run, str(error))
                if isinstance(error, RunFailedError):
                    error.history.update(told)
                self._event("failed", run, reason=str(error))
                if running and frozen is not None and (group := self.groups.drop(frozen.plan.group)):
                    # What it was in the middle of is not known.
                    self.release([group], gate.problem.options.grace_timeout)
                raise

    def _lose(self, gate: Gate, run: Run, reason: str, *, counts: bool = True) -> None:
        """Count a run that has lost what it needs; raise if there were too many of them."""
        gate.losses += counts
        if gate.losses > gate.problem.options.retries:
            error = failed(run, f"it was started again {gate.problem.options.retries} times; last: {reason}")
            self._event("failed", run, reason=str(error))
            raise error
        self._event("restart", run, reason=reason)

    def _note(self, gate: Gate, reason: Replan) -> None:
        """Remember why a plan did not fit."""
        for operand, order in reason.orders.items():
            self._orders[_array_of(gate, operand)] = order
        while len(self._orders) > 1000:
            self._orders.popitem(last=False)

    async def _workers(
        self, run: Run, gate: Gate, problem: Problem, wanted: Iterable[Any]
    ) -> tuple[tuple[str, ...], list[Worker]]:
        """Return who multiplies (`Roster.choose`), when there is anybody: all may be paused, or started again."""
        limit = problem.options.load_timeout
        deadline = time() + limit
        while True:
            try:
                return await self.roster.choose(problem.demand, await self._allowed(wanted))
            except NoWorkersError as error:
                if time() > deadline:
                    raise NoWorkersError(f"{error}; waited for {limit:g} s (config distmm.timeouts.load)") from error
            await asyncio.sleep(_LOOK)
            check(run)

    async def _freeze(self, run: Run, gate: Gate) -> _Frozen:
        """Fix who takes part, and how."""
        wanted = await gate.wanted()
        problem, keys = gate.part(wanted)
        engines, workers = await self._workers(run, gate, problem, wanted)
        sources, found = await self.roster.holders(workers, list(keys.values()))
        tables = dict(zip(keys, found, strict=True))
        tables.setdefault("b", tables["a"])
        where_a, where_b, replica_runs = self.replicas.where(problem, workers, [tables["a"], tables["b"]])
        if not any(replica_runs) and (orders := by_holder(problem, tables)):
            keys.setdefault("b", keys["a"])
            problem, before = reorder(problem, orders)
            keys = {name: [keys[name][number] for number in before[name].tolist()] for name in keys}
            tables = {name: tables[name][before[name]] for name in tables}
            where_a, where_b = tables["a"], tables["b"]
        made = await asyncio.to_thread(
            plan,
            problem,
            workers,
            where_a=where_a,
            where_b=where_b,
            where_extras=[tables[extra.name] for extra in problem.extras],
            sources=sources,
            engine=engines,
            orders=(self._order(gate, "a"), self._order(gate, "b")),
            groups=self.groups.orders(engines),
            replica_runs=replica_runs,
            quickly=True,
        )
        # Workers that neither multiply nor hold a chunk have no part in it.
        needed = np.unique(np.concatenate([np.asarray(made.ranks), np.arange(made.replicas), *tables.values()]))
        addresses = [made.participants[index].address for index in needed.tolist()]
        run.participants = frozenset(addresses)
        if gone := run.participants - self.scheduler.workers.keys():
            raise Lost(f"{', '.join(sorted(gone))} left the cluster")
        # A communicator is that of ranks; what is mapped may be anybody's who takes part, by one rank too.
        sharing = made.workers if made.engine in COLLECTIVE else tuple(run.participants)
        if made.engine != "numpy" and len(sharing) > 1:
            made = dataclasses.replace(made, group=self.groups.use(made.engine, sharing).number)
        run.independent = independent(made)
        states = {address: self.scheduler.workers[address] for address in addresses}
        return _Frozen(made, await asyncio.to_thread(_by_address, made, keys), states, wanted)

    async def _allowed(self, wanted: Iterable[Any]) -> frozenset[str] | None:
        """Return the workers on which the user lets the wanted tasks run; None for any."""
        found: set[str] | None = None
        for at, key in enumerate(wanted):
            if at and at % _SLICE == 0:
                await asyncio.sleep(0)
            ts = self.scheduler.tasks.get(key)
            if ts is None or not (ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions):
                continue
            valid = self.scheduler.valid_workers(ts)
            if valid is not None and (valid or not ts.loose_restrictions):
                here = {ws.address for ws in valid}
                found = here if found is None else found & here
        return None if found is None else frozenset(found)

    def _order(self, gate: Gate, operand: str) -> str:
        """Return the memory order that the chunks of A or B are taken to have."""
        expected = "F" if gate.problem.turned["ab".index(operand)] else "C"
        return self._orders.get(_array_of(gate, operand), expected)

    async def _vote(self, run: Run, gate: Gate, frozen: _Frozen) -> list[Any]:
        """Return what each participant offers the others."""
        run.begin_vote()
        made, wire = frozen.plan, frozen.plan.to_wire()
        number = {worker.address: index for index, worker in enumerate(made.participants)}

        async def ask(address: str) -> Any:
            return await self.scheduler.rpc(address).distmm_prepare(
                run_id=run.run_id,
                me=number[address],
                plan=wire,
                keys=frozen.keys.get(address, {}),
                check_orders=not gate.moves,
            )

        limit = made.problem.options.vote_timeout
        votes = await ask_all(self.scheduler, run, ask, self.live.ended(run), self.lose, timeout=limit)
        return [votes.get(worker.address, {}).get("offer") for worker in made.participants]

    async def _start(self, run: Run, gate: Gate, frozen: _Frozen, offers: Sequence[Any]) -> None:
        made = frozen.plan
        run.begin_running(time())
        began = time()
        log.info("run %d of %s starts on %s\n%r", run.run_id, run.name, made.workers, made)
        how = {"method": made.method, "grid": made.grid, "engine": made.engine, "flops": made.flops}
        self._event("start", run, **how, bound=made.bound, ranks=made.workers, projected_bytes=made.projected_bytes)
        skipped = unwanted(made.problem, frozen.wanted)

        async def ask(address: str) -> Any:
            return await self.scheduler.rpc(address).distmm_start(run_id=run.run_id, offers=offers, unwanted=skipped)

        limit = made.problem.options.silence_timeout
        answers = await ask_all(self.scheduler, run, ask, self.live.ended(run), self.lose, silence=limit)
        self.groups.keeps(made.group, max(answer["kept"] for answer in answers.values()))
        try:
            missing = await self._complete(run, gate, frozen, answers, began)
        finally:
            self.tell(list(answers), {"op": "distmm-finish", "run_id": run.run_id})
        if missing:
            if not run.gone:
                raise Lost(f"{missing} chunks of D are gone with the workers that had them")
            done = f"{len(made.owners) - missing} of {len(made.owners)} chunks of D are done"
            raise Lost(f"{', '.join(sorted(run.gone))} left the cluster; {done}")
        self.replicas.add(run.name, run.run_id, made)
        summary = summarize(answers)
        log.info("run %d of %s done in %s", run.run_id, run.name, summary)
        self._event("done", run, **dataclasses.asdict(summary), projected_bytes=made.projected_bytes)
        options = made.problem.options
        self.release(self.groups.surplus(options.max_groups, options.keep_workspace_bytes), options.grace_timeout)

    async def _complete(
        self, run: Run, gate: Gate, frozen: _Frozen, answers: Mapping[str, Mapping[str, Any]], began: float
    ) -> int:
        """Put the tasks of D into memory where their chunks are; return how many wanted ones are missing."""
        stimulus, ncols = f"distmm-done-{run.run_id}", gate.ncols
        completion = direct.Completion(self.scheduler, stimulus)
        left = set(frozen.wanted)
        ended, count = time(), 0
        for address, answer in answers.items():
            ws, unknown = frozen.states[address], []
            total = sum(len(numbers) // 8 for _, numbers, _ in answer["placed"])
            started, share = began, (ended - began) / max(1, total)
            for output, raw_numbers, raw_sizes in answer["placed"]:
                name = output_name(gate.problem.result_name, output)
                numbers, sizes = np.frombuffer(raw_numbers, np.int64), np.frombuffer(raw_sizes, np.int64)
                for number, nbytes in zip(numbers.tolist(), sizes.tolist(), strict=True):
                    key = (name, *divmod(number, ncols))
                    ts = self.scheduler.tasks.get(key)
                    # Dask's dashboard gets an equal share of the run for each of a worker's chunks.
                    span = {"action": "compute", "start": started, "stop": started + share}
                    started += share
                    if ts is not None and completion.add(gate.ts, ts, ws, nbytes, answer["type"], span):
                        left.discard(key)
                    elif ts is None or ws not in (ts.who_has or ()):
                        unknown.append(key)
                    count += 1
                    if count % _SLICE == 0:
                        completion.finish()
                        await asyncio.sleep(0)
            direct.free(self.scheduler, address, unknown, stimulus)
        completion.finish()
        # What nobody wants any more is not missing.
        tasks = (self.scheduler.tasks.get(key) for key in left)
        return sum(ts is not None and ts.state == "waiting" for ts in tasks)

    async def _end(self, run: Run, reason: str) -> dict[str, str]:
        """Make all participants drop a run that did not succeed; return what they say they did."""
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
                call = self.scheduler.rpc(address).distmm_abort(run_id=run.run_id, reason=reason)
                answer = await asyncio.wait_for(call, _ABORT_TIMEOUT)
                answered.add(address)
                told[address] = str(answer["history"]) if isinstance(answer, dict) else "it does not know dask_distmm"

        await asyncio.gather(*map(abort, present))
        run.mute.update(told.keys() - answered)
        # Those that do not answer now hear of it on Dask's own stream, when they listen again.
        self.tell(present, {"op": "distmm-end", "run_id": run.run_id, "reason": reason})
        await self.live.changed()
        return told

    def lose(self, run: Run, worker: str) -> bool:
        """Let a run end, or go on without a worker that is gone; return whether it goes on."""
        if run.lose([worker]):
            message = {"op": "distmm-gone", "run_id": run.run_id, "address": worker}
            self.tell(sorted(run.participants - run.gone) if run.gone else [], message)
            self.live.changed_soon()
        return worker in run.gone

    def tell(self, addresses: Sequence[str], message: dict[str, Any]) -> None:
        """Send a message to the `WorkerSide` of some workers."""
        for address in addresses:
            if address in self.roster and address in self.scheduler.workers:
                self.scheduler.worker_send(address, message)

    def release(self, groups: Sequence[Group], grace: float) -> list[asyncio.Future[None]]:
        """Have groups freed, each in its turn as if it were a run of its ranks; it goes on in the background."""

        async def release(group: Group) -> None:
            async with self.live.begin(f"group-{group.number}", "", frozenset(group.workers)) as run:
                # A rank that leaves ends it: `remove_worker` has told the others, or they end themselves.
                with contextlib.suppress(Lost, Released, OSError, TimeoutError):
                    await self.live.turn(run)
                    asked = [
                        self.scheduler.rpc(a).distmm_release(group=group.number, engine=group.engine, grace=grace)
                        for a in group.workers
                    ]
                    # A watchdog bites after `grace` where a rank is stuck; one that stands still is not waited for.
                    await asyncio.wait_for(asyncio.gather(*asked), grace + _ABORT_TIMEOUT)

        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(release(group)) for group in groups]
        # Somebody must hold them until they are done.
        self._releasing.update(tasks)
        for task in tasks:
            task.add_done_callback(self._releasing.discard)
        return tasks


def _array_of(gate: Gate, operand: str) -> str:
    """Return the name of the array of A or B; where it has none that lasts, one for this multiply alone."""
    return gate.problem.arrays["ab".index(operand)] or f"{gate.key}{operand}"


def _by_address(made: Plan, keys: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return for each participant that has chunks to hand out the keys of these, by operand."""
    found: dict[str, dict[str, list[Any]]] = {}
    for operand, where in made.where.items():
        if where is None or operand not in keys or (where < 0).any():
            continue
        order: NDArray[np.int64] = np.argsort(where, kind="stable")
        bounds = np.searchsorted(where[order], np.arange(len(made.participants) + 1))
        for index, worker in enumerate(made.participants):
            numbers = order[bounds[index] : bounds[index + 1]].tolist()
            if numbers:
                found.setdefault(worker.address, {})[operand] = [keys[operand][number] for number in numbers]
    return found
