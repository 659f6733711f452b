"""The scheduler's side: freezes roster and ranks, gives every run its number, sees it through.

A run, from the barrier's call to its answer::

    distmm_run      roster and placement are frozen; the plan is made in a thread
      wait          for runs with a lower number that use any of the same workers
      vote          every participant: all staged? all allocated?
      start         every participant works; the answer comes when it is done
      pin           collect tasks are restricted to the workers that hold their chunks
    finish          participants free what only the run needed

What goes wrong ends a run for all participants at once. If a worker was lost the multiply starts again
(``restart``), up to ``distmm.retries`` times; everything else is one typed error, passed on as plain types.

Chunks of D that are done are kept when others are lost, after a run or in the middle of one whose ranks only pull: such
a run goes on without a rank that is gone. When the multiply starts again its run makes what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_distmm.answers import as_plain
from dask_distmm.config import read_options
from dask_distmm.diagnostics.attach import attach
from dask_distmm.engines.base import log
from dask_distmm.errors import DistMMError, ProtocolError, RunFailedError
from dask_distmm.groups import Group, Groups
from dask_distmm.history import History
from dask_distmm.keys import barrier_key, barrier_name, parse_stage_key
from dask_distmm.live import LiveRuns
from dask_distmm.pins import Pins
from dask_distmm.plan import COLLECTIVE, Plan, Problem, plan
from dask_distmm.plan.pulls import apart
from dask_distmm.replicas import Replicas
from dask_distmm.results import Result, Survivors, of_survivors, together
from dask_distmm.roster import Roster, Staging
from dask_distmm.rounds import ask_all, failed
from dask_distmm.run import Lost as _Lost
from dask_distmm.run import Released as _Released
from dask_distmm.run import Run, is_report, summarize
from dask_distmm.worker import NAME, DistMMWorkerPlugin

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

__all__ = ["DistMMSchedulerPlugin"]


# Workers that do not even answer to an abort are not waited for longer than this (seconds).
_ABORT_TIMEOUT = 5.0
# What engines keep between runs is freed when there has been no client for so long (seconds).
_IDLE_TIME = 5.0


class DistMMSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Coordinates all runs of a cluster. One for each scheduler; installing it again does nothing."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.done: dict[str, Result] = {}
        self.restarts: dict[str, int] = {}
        self.history = History()

    async def start(self, scheduler: Scheduler) -> None:
        """Attach to a scheduler and put the worker's plugin on all workers, now and later."""
        # Before anything is awaited: two clients may install the plugin at the same time.
        scheduler.add_plugin(self, name=self.name, idempotent=True)
        if scheduler.plugins[self.name] is not self:
            return
        self.scheduler = scheduler
        self.roster = Roster(scheduler)
        self.groups = Groups()
        self.pinned = Pins(scheduler)
        self.replicas = Replicas(scheduler, self._tell)
        self.kept = Survivors(self._tell)
        self.live = LiveRuns(scheduler)
        self._releasing: set[asyncio.Future[None]] = set()
        scheduler.handlers.update(distmm_run=self.run, distmm_roster=self.describe, distmm_locate=self.locate)
        scheduler.handlers.update(distmm_lost=self.lost, distmm_free=self.free)
        scheduler.stream_handlers["distmm-progress"] = self.progressed
        # So that `Client.dump_cluster_state()` finds it.
        scheduler.extensions[NAME] = self
        self.records = attach(scheduler, self)
        await scheduler.register_worker_plugin(None, dumps(DistMMWorkerPlugin()), name=NAME, idempotent=True)

    # Handlers

    async def run(self, problem: Any, addresses: Any, where: Any, orders: Any, worker: Any) -> dict[str, Any]:
        """Run a multiply; called by its barrier, answered when the run is over."""
        try:
            parsed = Problem.from_wire(problem)
            staging = Staging.from_wire(parsed, addresses, where, orders)
            gate = self.scheduler.tasks.get(barrier_key(parsed.name))
            if gate is None or gate.processing_on is None or gate.processing_on.address != worker:
                raise ProtocolError(f"{worker!r} asks for a run of {parsed.name}, whose barrier does not run there")
            return await self._run(parsed, staging, worker)
        except DistMMError as error:
            return as_plain(error)

    async def describe(self, **question: Any) -> dict[str, Any]:
        """Return the engine and workers that would multiply, and where chunks are; see `Roster.answer`."""
        try:
            answer = await self.roster.answer(**question)
            answer["placed"] = self.replicas.placed(question["names"], answer)
        except DistMMError as error:
            return as_plain(error)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            return as_plain(ProtocolError(f"malformed question: {error!r}"))
        return {"status": "OK", "groups": self.groups.orders(answer["engines"]), **answer}

    def locate(self, name: Any, run_id: Any, index: Any) -> dict[str, Any]:
        """Return the address of the worker that holds a chunk of a result."""
        result = self.done.get(str(name))
        if result is None or result.run_id != run_id or index not in range(result.shape[0] * result.shape[1]):
            return {"status": "unknown"}
        return {"status": "OK", "address": result.holders[index]}

    async def free(self, grace: Any) -> int:
        """Free what engines keep on the workers between runs; return how many groups there were."""
        if not isinstance(grace, int | float) or not grace >= 0:
            raise ProtocolError(f"a grace time of {grace!r}; expected seconds")
        groups = self.groups.surplus(0)
        await asyncio.gather(*self._release(groups, grace))
        return len(groups)

    def lost(self, name: Any, run_id: Any) -> None:
        """Start a multiply again because a chunk of its result is gone."""
        result = self.done.get(str(name))
        if result is not None and result.run_id == run_id:
            self.pinned.restart(name, f"distmm-lost-{run_id}")

    def progressed(self, worker: str = "", run_id: Any = None, share: Any = None, received: Any = 0, **_: Any) -> None:
        """Note how far a participant is. On Dask's own stream, which an exception would close: it raises nothing."""
        run = self.live.get(run_id) if isinstance(run_id, int) else None
        if run is None or not is_report(share, received):
            return
        before = run.share
        run.report(worker, share, time(), received)
        if int(100 * run.share) > int(100 * before):
            self._event("progress", run, share=run.share, received_bytes=sum(run.received.values()))

    # One run

    async def _run(self, problem: Problem, staging: Staging, worker: str) -> dict[str, Any]:
        key, retries = barrier_key(problem.name), problem.options.retries
        for old in self.live.of(problem.name):
            if old.gone and not old.released:
                await self.live.over(old)
            else:
                await self._end(old, "the multiply was started again")
        made = None
        async with self.live.begin(problem.name, key, worker) as run:
            try:
                kept, todo = self.kept.left(problem)
                if todo is not None:
                    made = await self._freeze(run, todo, staging if todo is problem else staging.of_part(todo))
                    await self.live.turn(run)
                    offers = await self._vote(run, made)
                    await self._start(run, made, offers)
                    self.replicas.add(run.name, run.run_id, made)
                self._pin(run, made, kept)
                self.restarts.pop(problem.name, None)
                options = problem.options
                surplus = self.groups.surplus(options.max_groups, options.keep_workspace_bytes)
                self._release(surplus, options.grace_timeout)
                return {"status": "OK", "run_id": self.done[problem.name].run_id}
            except _Released:
                await self._end(run, "its task was released")
                self._event("released", run)
                return {"status": "restart"}
            except _Lost as reason:
                await self._end(run, str(reason))
                self.replicas.drop(*reason.replicas)
                if run.key not in self.scheduler.tasks:
                    return {"status": "restart"}
                # Each loss counts once: several workers may go, of which the last are missed when it starts again.
                counts = not reason.replicas and run.failed_in != "staged"
                again = self.restarts[problem.name] = self.restarts.get(problem.name, 0) + counts
                if again > retries:
                    del self.restarts[problem.name]
                    return as_plain(failed(run, f"it was started again {retries} times; last: {reason}"))
                self._event("restart", run, reason=str(reason))
                if run.worker not in run.gone:  # Dask runs its barrier again
                    there = self.scheduler.workers.keys() - reason.workers
                    staged = staging.on(problem, set(staging.addresses) - there) if reason.workers else None
                    self.pinned.restart(problem.name, f"distmm-restart-{run.run_id}", staged)
                return {"status": "restart"}
            except BaseException as error:
                running = run.phase == "running"
                told = await self._end(run, str(error))
                if isinstance(error, RunFailedError):
                    error.history.update(told)
                    if run.worker in run.mute:
                        self.pinned.fail(run, error)
                self._event("failed", run, reason=str(error))
                if running and made is not None and (group := self.groups.drop(made.group)):
                    # What it was in the middle of is not known.
                    self._release([group], problem.options.grace_timeout)
                raise

    async def _freeze(self, run: Run, problem: Problem, staging: Staging) -> Plan:
        """Fix who takes part, and how."""
        dtypes = (problem.a_dtype, problem.b_dtype, problem.dtype)
        plaintext = problem.options.allow_plaintext_nccl
        engines, workers = await self.roster.choose(problem.engine, problem.array, dtypes, problem.workers, plaintext)
        sources, found = self.roster.staged(workers, staging)
        where_a, where_b, replica_runs = self.replicas.where(problem, workers, found)
        made = await asyncio.to_thread(
            plan,
            problem,
            workers,
            where_a=where_a,
            where_b=where_b,
            where_extras=found[len(found) - len(problem.extras) :],
            sources=sources,
            engine=engines,
            orders=staging.orders,
            groups=self.groups.orders(engines),
            replica_runs=replica_runs,
        )
        # Workers that neither multiply nor hold a chunk have no part in it.
        needed = np.unique(np.concatenate([np.asarray(made.ranks), np.arange(made.replicas), *found]))
        run.participants = frozenset(made.participants[index].address for index in needed.tolist())
        # A communicator is that of ranks; what is mapped may be anybody's who takes part, by one rank too.
        sharing = made.workers if made.engine in COLLECTIVE else tuple(run.participants)
        if made.engine != "numpy" and len(sharing) > 1:
            made = dataclasses.replace(made, group=self.groups.use(made.engine, sharing).number)
        run.apart = apart(made)
        return made

    async def _vote(self, run: Run, made: Plan) -> list[Any]:
        """Return what each participant offers the others."""
        run.begin_vote()
        wire = made.to_wire()
        number = {worker.address: index for index, worker in enumerate(made.participants)}

        async def ask(address: str) -> Any:
            return await self.scheduler.rpc(address).distmm_prepare(run_id=run.run_id, me=number[address], plan=wire)

        limit = made.problem.options.vote_timeout
        votes = await ask_all(self.scheduler, run, ask, self.live.ended(run), self._lose, timeout=limit)
        return [votes.get(worker.address, {}).get("offer") for worker in made.participants]

    async def _start(self, run: Run, made: Plan, offers: Sequence[Any]) -> None:
        run.begin_running(time())
        log.info("run %d of %s starts on %s\n%r", run.run_id, run.name, made.workers, made)
        how = {"method": made.method, "grid": made.grid, "engine": made.engine, "flops": made.flops}
        self._event("start", run, **how, bound=made.bound, ranks=made.workers, projected_bytes=made.projected_bytes)

        async def ask(address: str) -> Any:
            return await self.scheduler.rpc(address).distmm_start(run_id=run.run_id, offers=offers)

        silence = made.problem.options.silence_timeout
        answers = await ask_all(self.scheduler, run, ask, self.live.ended(run), self._lose, silence=silence)
        self.groups.keeps(made.group, max(answer["kept"] for answer in answers.values()))
        if run.gone:
            kept = of_survivors(run.run_id, made, answers, run.gone, run.participants)
            self.kept[run.name] = kept
            count = f"{len(kept.holders)} of {len(made.owners)} chunks of D are done"
            raise _Lost(f"{', '.join(sorted(run.gone))} left the cluster; {count}", workers=run.gone)
        for address in run.participants:
            self.scheduler.worker_send(address, {"op": "distmm-finish", "run_id": run.run_id, "name": run.name})
        summary = summarize(answers)
        log.info("run %d of %s done in %s", run.run_id, run.name, summary)
        self._event("done", run, **dataclasses.asdict(summary), projected_bytes=made.projected_bytes)

    def _release(self, groups: Sequence[Group], grace: float) -> list[asyncio.Future[None]]:
        """Have groups freed, each in its turn as if it were a run of its ranks; it goes on in the background."""

        async def release(group: Group) -> None:
            async with self.live.begin(f"group-{group.number}", "", group.workers[0], frozenset(group.workers)) as run:
                # A rank that leaves ends it: `remove_worker` has told the others, or they end themselves.
                with contextlib.suppress(_Lost, _Released, OSError, TimeoutError):
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

    async def _end(self, run: Run, reason: str) -> dict[str, str]:
        """Make all participants drop a run that did not succeed; return what they say they did.

        Survivors of one that went on without some keep what they have made.
        """
        run.fail({run.worker: reason})
        kept = self.kept.get(run.name)
        keep = kept.participants if kept is not None and kept.run_id == run.run_id else frozenset()
        present = [address for address in run.participants if address in self.scheduler.workers]
        told = dict.fromkeys(present, "it does not answer")
        answered: set[str] = set()

        async def abort(address: str) -> None:
            if address in run.mute:
                return
            with contextlib.suppress(OSError, TimeoutError):
                call = self.scheduler.rpc(address).distmm_abort(run_id=run.run_id, reason=reason, keep=address in keep)
                answer = await asyncio.wait_for(call, _ABORT_TIMEOUT)
                answered.add(address)
                told[address] = str(answer["history"]) if isinstance(answer, dict) else "it does not know dask_distmm"

        await asyncio.gather(*map(abort, present))
        run.mute.update(told.keys() - answered)
        # Those that do not answer now hear of it on Dask's own stream, when they listen again.
        self._tell([a for a in present if a not in keep], {"op": "distmm-end", "run_id": run.run_id, "reason": reason})
        await self.live.changed()
        return told

    def _pin(self, run: Run, made: Plan | None, kept: Result | None) -> None:
        """Let collect tasks fetch their chunks where they are: those of this run and what an earlier one has left."""
        gate = self.scheduler.tasks.get(run.key)
        newer = any(other.run_id > run.run_id for other in self.live.of(run.name))
        if newer or gate is None or gate.state != "processing":
            # Released between the last rank's answer and now.
            raise _Released
        result = kept if made is None else together(run.run_id, made, run.participants, kept)
        assert result is not None
        if result.missing:
            raise _Lost(f"chunks {result.missing} of D are gone with the worker that had them")
        if kept is not None and made is not None:
            message = {"op": "distmm-adopt", "run_id": run.run_id, "before": kept.run_id}
            self._tell(sorted(kept.participants), message)
        self.kept.pop(run.name, None)
        self.done[run.name] = result
        self.pinned.pin(run.name, gate, result)

    # What happens on the cluster

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note who contributes; free what belongs to a multiply when its barrier is released, forgotten or fails."""
        self.replicas.transition(key, finish)
        if finish == "memory" and parse_stage_key(key) is not None and kwargs.get("worker"):
            self.roster.note(kwargs["worker"])
        if finish not in ("released", "forgotten", "erred") or (name := barrier_name(key)) is None:
            return
        result = self.done.pop(name, None)
        over = finish != "released"
        if over:
            self.pinned.forget(name)
            self.restarts.pop(name, None)
            self.kept.discard(name)
        if result is not None or over:
            message = {"op": "distmm-forget", "run_id": result and result.run_id, "name": name if over else None}
            addresses = list(self.scheduler.workers) if over else sorted(result.participants) if result else []
            # After what Dask is about to tell the workers of these tasks: a contribute task that is running now
            # is then either done, and its chunk dropped, or known to be cancelled.
            asyncio.get_running_loop().call_soon(self._tell, addresses, message)
        for run in self.live.of(name):
            # A barrier whose worker is gone is released before that is announced.
            gone = finish == "released" and run.worker not in self.scheduler.workers
            if run.live and not (gone and run.apart and self._lose(run, run.worker)):
                run.fail({run.worker: "its task was released"}, released=True)
                self.live.changed_soon()

    def _tell(self, addresses: Sequence[str], message: dict[str, Any]) -> None:
        for address in addresses:
            if address in self.roster and address in self.scheduler.workers:
                self.scheduler.worker_send(address, message)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Forget what was known of an earlier worker of that address."""
        self.roster.forget(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """End runs that need a worker that is gone; start those again whose results it held."""
        self.roster.forget(worker)
        self.pinned.unpin_tiles(worker)
        self.replicas.lose(worker)
        for group in self.groups.lose(worker):
            left = [address for address in group.workers if address != worker]
            self._tell(left, {"op": "distmm-abandon", "group": group.number, "engine": group.engine})
        for run in self.live.values():
            self._lose(run, worker)
        for name, result in list(self.done.items()):
            if worker in result.workers and self.pinned.owed_by(name, worker):
                # All others keep what they have, for the run that makes the rest.
                self.kept[name] = self.done.pop(name)
                self.pinned.restart(name, f"distmm-remove-{worker}")
        self.kept.lose(worker)

    def _lose(self, run: Run, worker: str) -> bool:
        """Let a run end, or go on without a worker that is gone; return whether it goes on."""
        if run.lose([worker]):
            message = {"op": "distmm-gone", "run_id": run.run_id, "address": worker}
            self._tell(sorted(run.participants - run.gone) if run.gone else [], message)
            self.live.changed_soon()
        return worker in run.gone

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free what engines keep between runs, if no client comes back soon."""

        async def free() -> None:
            if not scheduler.clients.keys() - {"fire-and-forget"}:
                await asyncio.gather(*self._release(self.groups.surplus(0), read_options().grace_timeout))

        if len(self.groups) and not scheduler._ongoing_background_tasks.closed:
            scheduler._ongoing_background_tasks.call_later(_IDLE_TIME, free)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """Keep workers that take part in a run, or hold results that are not collected yet."""
        busy = {address for run in self.live.values() for address in run.participants}
        busy.update(*(result.workers for result in (*self.done.values(), *self.kept.values())))
        return [ws for ws in workers if ws.address not in busy]

    def restart(self, scheduler: Scheduler) -> None:
        """Drop everything; all workers are new."""
        for run in self.live.values():
            run.fail({run.worker: "its task was released"}, released=True)
        self.done.clear()
        self.kept.clear()
        self.pinned.clear()
        self.replicas.clear()
        self.restarts.clear()
        self.roster.clear()
        self.groups.clear()
        self.live.changed_soon()

    def _to_dict(self, *, exclude: Any = ()) -> dict[str, Any]:
        """Return what is known of runs; Dask calls this for ``Client.dump_cluster_state()``."""
        live = {run.run_id: f"{run}, {run.share:.0%} done, on {sorted(run.participants)}" for run in self.live.values()}
        return {"live": live, "history": self.history._to_dict()}

    def _event(self, action: str, run: Run, **details: Any) -> None:
        self.history.note(run.run_id, " ".join([action, *(f"{name}={value}" for name, value in details.items())]))
        if reason := details.get("reason"):
            log.info("run %d of %s: %s, %s", run.run_id, run.name, action, reason)
        event = {"action": action, "run": run.run_id, "name": run.name, **details}
        self.records.note(time(), event)
        self.scheduler.log_event(NAME, event)
