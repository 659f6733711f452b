"""The scheduler's plugin: Dask's hooks and our handlers. A `Coordinator` sees runs through.

A task that needs a function of this package can't be loaded by such a worker, which then closes its connection to the
scheduler, and is gone with all that it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState, WorkerState

from dask_distmm import compat
from dask_distmm.config import read_options
from dask_distmm.engines.base import log
from dask_distmm.errors import DistMMError, EngineError, ProtocolError
from dask_distmm.installing import install_command
from dask_distmm.planning import Computation, Demand
from dask_distmm.runtime import direct, messages
from dask_distmm.runtime.keys import barrier_name, gate_barrier, gate_key, is_tile, wave_of
from dask_distmm.runtime.messages import NAME
from dask_distmm.runtime.run import History, Run
from dask_distmm.runtime.scheduler import attachments
from dask_distmm.runtime.scheduler.admission import Admission
from dask_distmm.runtime.scheduler.barriers import Barrier
from dask_distmm.runtime.scheduler.coordinator import Coordinator
from dask_distmm.runtime.scheduler.reconciling import reconcile
from dask_distmm.runtime.scheduler.records import Records, answer_progress
from dask_distmm.runtime.wire import answering, listening
from dask_distmm.runtime.worker.plugin import MISSING, for_any_worker

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

# Gates: the tasks that hold back a wave of a product, until the wave before the last one is over and D has left


# Barriers in these states are still to run.
_AHEAD = ("waiting", "no-worker", "processing", "queued")
# Tasks in these states begin or end without any further wave.
_AT_WORK = ("processing", "queued")
# A gate in these states can be closed.
_NOT_BEGUN = ("released", "waiting", "no-worker", "queued")
# How often parked gates are kept from Dask's ``no-workers-timeout`` (seconds).
_REFRESH = 0.5


class Gates:
    """Parks gates, and lets them go. On the scheduler's event loop.

    A gate is a task without inputs, which any worker can run in no time. It is parked until its barrier has run and no
    task works on the chunks of D that came of it, such as one that stores a chunk; or until the barrier is wanted no
    more. So D does not fill the memory where it is stored more slowly than it is made. A gate that is lost with a
    worker opens again at once, so that what waits behind it is loaded again without another run.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._closed: set[str] = set()
        self._to_look: set[str] = set()
        # Tasks that work on chunks of D, and the gates that wait for these.
        self._takers: dict[Any, str] = {}
        self._refreshing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return how many gates are closed."""
        return len(self._closed)

    def close(self, keys: Iterable[Any]) -> None:
        """Park those tasks that are gates and have not begun."""
        found = [key for key in keys if gate_barrier(key) is not None]
        parked: list[TaskState] = []
        for key in found:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.run_spec is not None and ts.state in _NOT_BEGUN:
                direct.park(ts)
                self._closed.add(key)
                self._look_soon(key)
                parked.append(ts)
        direct.unqueue(self._scheduler, parked, "distmm-gates-close")
        if found and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.ensure_future(self._refresh())

    def transition(self, key: Any, finish: str) -> None:
        """Look at a gate whose barrier is over, or that has been parked."""
        if key in self._closed:
            if finish == "no-worker":
                self._look_soon(key)
            elif finish in ("forgotten", "erred"):
                self._closed.discard(key)
        elif key in self._takers:
            self._look_soon(self._takers.pop(key))
        elif finish in ("released", "forgotten", "erred") and (name := barrier_name(key)) is not None:
            self._look_soon(gate_key(name))

    def clear(self) -> None:
        """Forget all gates."""
        self._closed.clear()
        self._takers.clear()

    def _look_soon(self, key: str) -> None:
        """Look at a gate when the transitions that are going on are over."""
        if key not in self._closed:
            return
        if not self._to_look:
            asyncio.get_running_loop().call_soon(self._look)
        self._to_look.add(key)

    def _look(self) -> None:
        """Open gates whose barriers are not ahead any more."""
        keys, self._to_look = self._to_look & self._closed, set()
        ready = []
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            barrier = self._scheduler.tasks.get(gate_barrier(key))
            if ts is None:
                self._closed.discard(key)
            elif barrier is None or barrier.state not in _AHEAD:
                if taker := _taker_of(barrier):
                    self._takers[taker] = key
                else:
                    self._closed.discard(key)
                    ready.append(ts)
        if ready:
            direct.free_restricted(self._scheduler, ready, "distmm-gates-open")

    async def _refresh(self) -> None:
        """Keep Dask's ``no-workers-timeout`` from ending closed gates."""
        while self._closed and self._scheduler.no_workers_timeout:
            for key in self._closed:
                if (ts := self._scheduler.tasks.get(key)) is not None:
                    direct.refresh(self._scheduler, ts)
            await asyncio.sleep(min(_REFRESH, self._scheduler.no_workers_timeout / 4))


def _taker_of(barrier: TaskState | None) -> Any:
    """Return the key of a task that works on a chunk of D that came of a barrier; None if there is none."""
    chunks = (ts for ts in (barrier.dependents if barrier is not None else ()) if ts.state == "memory")
    return next((taker.key for ts in chunks for taker in ts.dependents if taker.state in _AT_WORK), None)


# Workers without dask_distmm: they stay in the cluster, with tasks that need nothing of it


_WAITING = ("released", "waiting", "no-worker")


class WorkersWithoutPackage:
    """Keeps tasks that need this package away from workers that lack it."""

    def __init__(self, scheduler: Scheduler, reasons: dict[str, str]) -> None:
        self._scheduler, self.reasons = scheduler, reasons
        self._kept: set[Any] = set()

    def note(self, address: str, reason: str) -> None:
        """Keep tasks away from a worker that has said that it lacks the package."""
        if address not in self._scheduler.workers or address in self.reasons:
            return
        log.warning(
            "worker %s lacks dask_distmm (%s) and gets none of its tasks; install it there: %s",
            *(address, reason, install_command(elsewhere=True)),
        )
        self.reasons[address] = reason
        self.look([key for key, ts in self._scheduler.tasks.items() if ts.state in _WAITING])

    def change(self, address: str) -> None:
        """Look again after a worker has come or gone."""
        self.reasons.pop(address, None)
        if self._kept:
            kept, self._kept = self._kept, set()
            self._restrict(kept & self._scheduler.tasks.keys())

    def look(self, keys: Iterable[Any]) -> None:
        """Keep those of some tasks that need this package away from workers that lack it. Free where none does."""
        if not self.reasons:
            return
        tasks = self._scheduler.tasks
        # Tasks that are restricted already, as barriers and tiles are, are so for reasons of ours or of the user's.
        found = {key for key in keys if (ts := tasks.get(key)) is not None and not ts.worker_restrictions}
        self._restrict({key for key in found if needs_package(tasks[key].run_spec)})

    def _restrict(self, keys: Iterable[Any]) -> None:
        able = self._scheduler.workers.keys() - self.reasons.keys()
        for ts in [self._scheduler.tasks[key] for key in keys]:
            if able:
                self._kept.add(ts.key)
                direct.restrict_workers(self._scheduler, ts, able)
            elif ts.state in _WAITING:
                # Failed once the graph is complete, and until then sent to nobody.
                direct.park(ts)
                asyncio.get_running_loop().call_soon(self._fail, ts)

    def _fail(self, ts: TaskState) -> None:
        if self._scheduler.tasks.get(ts.key) is ts:
            error = EngineError(
                f"{ts.key!r} needs dask_distmm, and no worker has it; install it there, and start them again: "
                f"{install_command(elsewhere=True)}"
            )
            direct.fail(self._scheduler, ts, error, f"distmm-bare-{ts.key}")


def needs_package(run_spec: Any) -> bool:
    """Whether a worker needs this package to load a task: what would be sent names it."""
    if run_spec is None:
        return False
    try:
        # Arrays in the task are not looked at, nor copied.
        sent = dumps(run_spec, buffer_callback=lambda buffer: None)
    except Exception:  # whatever it holds: Dask will say so when it sends it
        return False
    return b"dask_distmm" in sent


# The scheduler's plugin: Dask's hooks and our handlers. A `Coordinator` sees runs through


# Memory that engines keep between runs is freed when there has been no client for so long (seconds).
_IDLE_TIME = 5.0


class DistMMSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Runs the multiplies of a cluster. One for each scheduler; installing it again does nothing."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.history = History()
        # Barriers by key, from when their graph is there until they are forgotten.
        self.barriers: dict[str, Barrier] = {}
        # Barriers that have been parked since the event loop was last here.
        self._parked: list[Barrier] = []

    async def start(self, scheduler: Scheduler) -> None:
        """Attach to a scheduler and put the worker's plugin on all workers, now and later."""
        compat.refuse("on the scheduler", compat.missing_on_scheduler(scheduler))
        before = scheduler.extensions.get(NAME)
        if before is not None and self.name not in scheduler.plugins:
            await before.retire()
        # Nothing is awaited in between: two clients may install the plugin at the same time.
        scheduler.add_plugin(self, name=self.name, idempotent=True)
        if scheduler.plugins[self.name] is not self:
            return
        self.scheduler = scheduler
        direct.order_graphs(scheduler, True)
        self.coordinator = Coordinator(scheduler, self._event)
        self.queue, self.roster = self.coordinator.queue, self.coordinator.roster
        self.groups, self.replicas = self.coordinator.groups, self.coordinator.replicas
        self.holders = self.coordinator.holders
        self.gates = Gates(scheduler)
        self.bare = WorkersWithoutPackage(scheduler, self.roster.bare)
        if before is not None:
            self.roster.bare.update(before.roster.bare)
        self.admission = Admission(scheduler, self.roster, self._waiting)
        scheduler.handlers |= {
            **answering(messages.RosterQuestion, self.answer_roster),
            **answering(messages.Free, self.free),
            **answering(messages.FreeReplicas, self.replicas.free),
            **answering(messages.ProgressQuestion, self.answer_progress),
        }
        for kind, handle in ((messages.Progress, self.hear_progress), (messages.Gathered, self.coordinator.gathered)):
            scheduler.stream_handlers |= listening(kind, handle, lambda epoch: epoch == self.queue.epoch)
        # So that `Client.dump_cluster_state()` finds it.
        scheduler.extensions[NAME] = self
        self.records = Records()
        for attach in attachments:
            attach(scheduler, self)
        # Graphs that came before this plugin: their barriers have asked for it, or another plugin has parked them.
        self.update_graph(scheduler, tasks=list(scheduler.tasks))
        direct.look_at_graphs(scheduler, self._reconcile)
        await scheduler.register_worker_plugin(None, for_any_worker(), name=NAME, idempotent=True)
        for barrier in [barrier for barrier in self.barriers.values() if barrier.parked]:
            self.transition(barrier.key, "waiting", "no-worker")

    async def retire(self) -> None:
        """End all that is under way, as another plugin takes this one's place: nobody hears of transitions any more."""
        driving = [barrier.task for barrier in self.barriers.values() if barrier.task is not None]
        self.barriers.clear()
        self.gates.clear()
        for task in driving:
            task.cancel("the scheduler's plugin was installed anew")
        await asyncio.gather(*driving, return_exceptions=True)
        groups = self.groups.surplus(0)
        await asyncio.gather(*self.coordinator.releases.begin(groups, read_options().grace_timeout))

    async def close(self) -> None:
        """Leave the process as it was."""
        direct.order_graphs(self.scheduler, False)
        direct.look_at_graphs(self.scheduler, None)

    # Handlers

    async def answer_roster(self, question: messages.RosterQuestion) -> messages.RosterReply:
        """Return the engines and workers that would multiply, and where chunks are."""
        try:
            engines, workers = await self.roster.choose(Demand.from_wire(question.demand))
            sources, placed = await self.holders.known(workers, question.names, question.counts)
            answer = messages.RosterReply(
                "OK",
                engines=list(engines),
                workers=[worker.to_wire() for worker in workers],
                sources=[worker.to_wire() for worker in sources],
                placed=placed,
                groups=self.groups.orders(engines),
            )
            marked: messages.RosterReply = self.replicas.mark(question.names, answer)
            return marked
        except DistMMError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ProtocolError(f"malformed question: {error!r}") from error

    async def answer_progress(self, question: messages.ProgressQuestion) -> messages.ProgressReply:
        """Return how far multiplies are."""
        return answer_progress(self.scheduler, self.queue.values(), self.records, question)

    async def free(self, request: messages.Free) -> messages.Freed:
        """Free the memory that engines keep on the workers between runs; return how many groups there were."""
        groups = self.groups.surplus(0)
        await asyncio.gather(*self.coordinator.releases.begin(groups, request.grace))
        return messages.Freed("OK", count=len(groups))

    def hear_progress(self, message: messages.Progress) -> None:
        """Note how far a participant is."""
        run = self.queue.get(message.run_id)
        if run is None:
            return
        before = run.share
        run.report(message.worker, message.share, time(), message.received_bytes)
        if int(100 * run.share) > int(100 * before):
            self._event("progress", run, share=run.share, received_bytes=run.received_bytes)

    # Barriers

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Any], **kwargs: Any) -> None:
        """Let no worker run barriers; called before new tasks make their first transitions."""
        tasks = list(tasks)
        self.bare.look(tasks)
        self.gates.close(tasks)
        for key in tasks:
            if barrier_name(key) is None or (ts := scheduler.tasks.get(key)) is None or ts.run_spec is None:
                continue
            direct.park(ts)
            if key in self.barriers and self.barriers[key].ts is ts:
                continue
            try:
                barrier = self.barriers[key] = Barrier(ts)
                self.records.expect(barrier.problem.name)
                asyncio.get_running_loop().call_soon(self._admit, barrier)
            except DistMMError as error:
                asyncio.get_running_loop().call_soon(direct.fail, scheduler, ts, error, f"distmm-refused-{key}")

    def _admit(self, barrier: Barrier) -> None:
        """Look after a new barrier, unless nothing depends on it."""
        if not self._forget(barrier.ts):
            self.admission.begin(barrier.ts, barrier.problem)

    def _reconcile(self, graph: dict[Any, Any], keys: Collection[Any], order: dict[Any, int]) -> None:
        """Leave each chunk that is known with one barrier."""
        # Chunks that are known keep their barriers known.
        for ts in reconcile(self.scheduler.tasks, graph, keys, order) if self.barriers else ():
            asyncio.get_running_loop().call_soon(self._forget, ts)

    def _forget(self, ts: TaskState) -> bool:
        """Forget a barrier that nothing depends on; return whether that is so."""
        unneeded = self.scheduler.tasks.get(ts.key) is ts and not ts.dependents and not ts.who_wants
        if unneeded:
            self.scheduler.transitions({ts.key: "forgotten"}, f"distmm-orphan-{ts.key}")
        return unneeded

    def _waiting(self) -> Iterable[tuple[TaskState, Computation]]:
        return (
            (barrier.ts, barrier.problem) for barrier in list(self.barriers.values()) if barrier.ts.state == "waiting"
        )

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Begin runs of barriers that are parked, and end those of barriers that nobody waits for any more."""
        self.replicas.transition(key, finish)
        self.gates.transition(key, finish)
        if (barrier := self.barriers.get(key)) is None:
            return
        if finish == "no-worker":
            # Of several that are parked at once the one that Dask would have run first goes first.
            if not self._parked:
                asyncio.get_running_loop().call_soon(self._begin)
            self._parked.append(barrier)
        elif finish in ("released", "forgotten", "erred"):
            if finish == "forgotten":
                del self.barriers[key]
            # A barrier that lost an input is released, too, before it waits again.
            asyncio.get_running_loop().call_soon(self._look, barrier)

    def _begin(self) -> None:
        parked, self._parked = self._parked, []
        for barrier in sorted(parked, key=lambda barrier: barrier.ts.priority):
            if barrier.parked and (barrier.task is None or barrier.task.done()):
                barrier.task = asyncio.ensure_future(self.coordinator.drive(barrier))
        direct.start_queued(self.scheduler, "distmm-parked")

    def _look(self, barrier: Barrier) -> None:
        """End the run of a barrier that is over."""
        if barrier.over:
            for run in self.queue.of(barrier.key):
                if run.live:
                    run.fail({"client": "its task was released"}, released=True)
            self.queue.changed_soon()

    # Events of the cluster

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Forget the description of an earlier worker of that address."""
        self.roster.forget(worker)
        self.bare.change(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """End runs that need a worker that is gone; forget its chunks, replicas and groups."""
        self.roster.forget(worker)
        self.bare.change(worker)
        tiles = (ts for ts in scheduler.tasks.values() if ts.worker_restrictions == {worker} and is_tile(ts.key))
        direct.free_restricted(scheduler, tiles, f"distmm-unpin-{worker}")
        self.replicas.lose(worker)
        for group in self.groups.lose(worker):
            left = [address for address in group.workers if address != worker]
            self.coordinator.tell(left, messages.Abandon(group.number, group.engine))
        for run in self.queue.values():
            self.coordinator.lose(run, worker)

    def log_event(self, topic: str, msg: Any) -> None:
        """Hear of workers that lack this package."""
        # Any client may log an event; a worker that has described itself has the package.
        if topic == MISSING and isinstance(msg, dict) and str(msg.get("worker")) not in self.roster:
            self.bare.note(str(msg.get("worker")), str(msg.get("reason")))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free the memory that engines keep between runs, if no client comes back soon."""

        async def free() -> None:
            if not scheduler.clients.keys() - {"fire-and-forget"}:
                groups = self.groups.surplus(0)
                await asyncio.gather(*self.coordinator.releases.begin(groups, read_options().grace_timeout))

        if len(self.groups) and not scheduler._ongoing_background_tasks.closed:
            scheduler._ongoing_background_tasks.call_later(_IDLE_TIME, free)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """Keep workers that take part in a run."""
        busy = {address for run in self.queue.values() for address in run.participants}
        return [ws for ws in workers if ws.address not in busy]

    def restart(self, scheduler: Scheduler) -> None:
        """Drop everything; all workers are new."""
        for run in self.queue.values():
            run.fail({"client": "its task was released"}, released=True)
        self.barriers.clear()
        self.gates.clear()
        self.replicas.clear()
        self.roster.clear()
        self.groups.clear()
        self.queue.changed_soon()

    def _to_dict(self, *, exclude: Any = ()) -> dict[str, Any]:
        """Return live runs and the history; Dask calls this for ``Client.dump_cluster_state()``."""
        live = {
            run.run_id: f"{run}, {run.share:.0%} done, on {sorted(run.participants)}" for run in self.queue.values()
        }
        return {"live": live, "history": self.history._to_dict()}

    def _event(self, action: str, run: Run, **details: Any) -> None:
        self.history.note(run.run_id, " ".join([action, *(f"{name}={value}" for name, value in details.items())]))
        if reason := details.get("reason"):
            log.info("run %d of %s: %s, %s", run.run_id, run.name, action, reason)
        event = {"action": action, "run": run.run_id, "name": run.name, **details}
        self.records.note(time(), event)
        if action == "done" and (wave := wave_of(run.name)) is not None and wave[0] in self.records.waves:
            log.info("%s: %s", wave[0], self.records.waves[wave[0]].told(0.0, time()))
        self.scheduler.log_event(NAME, event)
