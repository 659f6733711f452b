"""The scheduler's plugin: Dask's hooks and our handlers. A `Coordinator` sees runs through.

A worker without this package can't load a task that needs a function of it: it would close its connection to the
scheduler, and be gone with all that it holds. So such tasks are kept from it.

One key has one task, also where a new graph asks for what the scheduler has from a graph of other parts of D. A chunk
of D has one key, whichever chunks are wanted with it; the barrier that it depends on is that of a part of the
multiply. The layer of D, which makes the parts, knows no other graph. So a new graph is looked at where the scheduler
takes it up, with all its tasks:

- a chunk that is there, or that a run is to make, stays with the barrier that it has;
- the others of its part become a part of their own, which needs no more inputs than they do;
- a chunk that is known, and that nobody waits for, goes to the barrier of the new graph, or to Dask's own task there;
- a task of Dask's own, which Dask fuses with others in one graph and not in another, stays as it is.

Of a group's products the longest starts first. Dask orders tasks by the shape of the graph, and annotations with
priorities do not survive its optimizer. So the order is in the keys, and this plugin deals the places that Dask has
given to a group's tasks, and to all that they need, out again. Where it is missing everything works all the same, only
in Dask's order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dask._task_spec import GraphNode, Task
from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time
from distributed.protocol.pickle import dumps, loads
from distributed.scheduler import TaskState, WorkerState

from dask_distmm import compat
from dask_distmm.compat import install_command
from dask_distmm.config import read_options
from dask_distmm.engines.base import log
from dask_distmm.errors import DistMMError, EngineError, MissingEngineError, ProtocolError
from dask_distmm.planning import Demand
from dask_distmm.runtime import attachments, direct
from dask_distmm.runtime.coordinator import Coordinator
from dask_distmm.runtime.freezing import Barrier, known_places
from dask_distmm.runtime.keys import (
    ChunkTask,
    RunTask,
    held_back,
    is_barrier,
    is_tile,
    needed,
    parse_group_key,
    restricted,
    series_of_waves,
    wave_of,
)
from dask_distmm.runtime.messages import (
    NAME,
    Count,
    ProgressReply,
    RegionsReply,
    Released,
    Seconds,
    Share,
    Snapshot,
    answering,
    listening,
)
from dask_distmm.runtime.run import History, Records, Run, find_names, progress_of
from dask_distmm.runtime.worker import MISSING, WorkerService, for_any_worker

# One key, one task: what a new graph asks for that the scheduler has already, from a graph of other parts of D


def isolate_copied(graph: dict[Any, GraphNode]) -> None:
    """Let workers run those barriers whose results are wanted as they are. Pure.

    `dask.graph_manipulation.bind` of an optimized graph puts the tasks of chunks into others, which read the barrier.
    """
    read = {dep for task in graph.values() if not isinstance(task, ChunkTask) for dep in task.dependencies}
    isolated = {key for key in read if key in graph and is_barrier(graph[key])}
    for key, task in graph.items() if isolated else ():
        if key in isolated:
            graph[key] = Task(key, task.func, *task.args, **task.kwargs, is_isolated=True)
        elif isinstance(task, ChunkTask) and task.barrier in isolated:
            graph[key] = Task(key, task.func, *task.args, **task.kwargs)


def reconcile(
    tasks: Mapping[Any, TaskState], graph: dict[Any, GraphNode], keys: Collection[Any], order: dict[Any, int]
) -> list[TaskState]:
    """Change a new graph, and known tasks, so that each key has one task; return tasks that lost a dependent."""
    chunks = {key: task for key, task in graph.items() if isinstance(task, ChunkTask)}
    # Dask's own tasks may make chunks of D, in a new graph as in one before.
    if not chunks and not any(isinstance(tasks[key].run_spec, ChunkTask) for key in graph.keys() & tasks.keys()):
        return []
    present = {
        key: ts
        for key, task in graph.items()
        if (ts := tasks.get(key)) is not None
        and isinstance(ts.run_spec, GraphNode)
        and ts.run_spec.dependencies != task.dependencies
    }
    kept = {
        key: ts.run_spec
        for key, ts in present.items()
        if ts.state != "released" or not (key in chunks or isinstance(ts.run_spec, ChunkTask))
    }
    left: dict[Any, dict[Any, ChunkTask]] = {chunks[key].barrier: {} for key in kept if key in chunks}
    for key, task in chunks.items():
        if key not in kept and task.barrier in left:
            left[task.barrier][key] = task
    graph |= kept
    for barrier, dropped in left.items():
        if dropped and barrier in graph:
            part = restricted(graph[barrier], dropped)
            order |= {key: order[barrier] for key in part if key not in order and barrier in order}
            graph |= part
    for key in graph.keys() - needed(graph, keys).keys() if present else ():
        del graph[key]
    lost: list[TaskState] = []
    for key, ts in present.items():
        if key not in kept and key in graph and graph[key].dependencies != ts.run_spec.dependencies:
            lost += direct.forget_run_spec(ts)
    return lost


# The order in which a group's products start: the longest first, on the scheduler


def order_groups(graph: Mapping[Any, GraphNode], order: dict[Any, int]) -> None:
    """Change the order of a new graph so that products of a group start in the order of their ranks. Pure."""
    ranks = {key: rank for key in graph if (rank := parse_group_key(key)) is not None}
    left, dealt = {key: graph[key] for key in order.keys() & graph.keys()} if ranks else {}, list[Any]()
    for product in sorted(ranks, key=ranks.__getitem__):
        # In Dask's own order a task comes after the tasks that it needs.
        group = sorted(needed(left, [product]), key=order.__getitem__)
        dealt += group
        for key in group:
            del left[key]
    order |= zip(dealt, sorted(map(order.__getitem__, dealt)), strict=True)


# What is loaded for a wave of a product waits until the wave before the last one is over and D has left


# Barriers in these states are still to run.
_AHEAD = ("waiting", "no-worker", "processing", "queued")
# Tasks in these states begin or end without any further wave.
_AT_WORK = ("processing", "queued")


class Holds:
    """Holds tasks back while the run of a barrier is ahead. On the scheduler's event loop.

    They are parked until that barrier has run and no task works on the chunks of D that came of it, such as one that
    stores a chunk; or until the barrier is wanted no more. So D does not fill the memory where it is stored more slowly
    than it is made. Chunks that are lost with a worker later are loaded again without another run.
    """

    def __init__(self, scheduler: Scheduler, go_on: Callable[[Collection[Any]], None]) -> None:
        self._scheduler, self._go_on = scheduler, go_on
        # The tasks that wait for each barrier, and all their keys.
        self._behind: dict[Any, list[tuple[TaskState, direct.Restrictions]]] = {}
        self._held: set[Any] = set()
        self._to_look: set[Any] = set()
        # Tasks that work on chunks of D, and the barriers that these came of.
        self._takers: dict[Any, Any] = {}
        self._refreshing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return how many tasks are held back."""
        return len(self._held)

    def __contains__(self, key: Any) -> bool:
        return key in self._held

    def hold(self, keys: Iterable[Any]) -> None:
        """Hold back those of some tasks that a wave begins with and that have not begun; see `keys.held_back`."""
        tasks = {key: ts for key in keys if (ts := self._scheduler.tasks.get(key)) is not None and _is_ahead(ts)}
        barriers = held_back({key: ts.run_spec for key, ts in tasks.items()})
        held = barriers.keys() - self._held
        for key in held:
            self._behind.setdefault(barriers[key], []).append((tasks[key], direct.park(tasks[key])))
            self._look_soon(barriers[key])
        self._held.update(held)
        direct.unqueue(self._scheduler, [tasks[key] for key in held], "distmm-hold")
        if held and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.ensure_future(direct.keep_parked(self._scheduler, self._held))

    def transition(self, key: Any, finish: str) -> None:
        """Check the holds of a barrier that is over, or of a task that has taken its chunks."""
        if key in self._takers:
            self._look_soon(self._takers.pop(key))
        elif key in self._behind and finish in ("released", "forgotten", "erred"):
            self._look_soon(key)

    def clear(self) -> None:
        """Release all held tasks."""
        self._takers.clear()
        self._let_go(list(self._behind))

    def _look_soon(self, barrier: Any) -> None:
        """Schedule `_look` at a barrier, after the current transitions."""
        if not self._to_look:
            asyncio.get_running_loop().call_soon(self._look)
        self._to_look.add(barrier)

    def _look(self) -> None:
        """Release the tasks that wait for barriers which are not ahead any more."""
        keys, self._to_look = self._to_look & self._behind.keys(), set()
        over = []
        for key in keys:
            barrier = self._scheduler.tasks.get(key)
            if barrier is None or barrier.state not in _AHEAD:
                if taker := _taker_of(barrier):
                    self._takers[taker] = key
                else:
                    over.append(key)
        self._let_go(over)

    def _let_go(self, barriers: Iterable[Any]) -> None:
        held = [task for key in barriers for task in self._behind.pop(key)]
        self._held.difference_update(ts.key for ts, _ in held)
        current = [(ts, before) for ts, before in held if self._scheduler.tasks.get(ts.key) is ts]
        # Barriers stay parked.
        tasks = [(ts, before) for ts, before in current if not is_barrier(ts.run_spec)]
        for ts, before in tasks:
            direct.restore(ts, before)
        self._go_on([ts.key for ts, _ in held])
        direct.wait_again(self._scheduler, [ts for ts, _ in tasks], "distmm-go-on")


def _is_ahead(ts: TaskState) -> bool:
    # A barrier that a worker has been given, before there was this plugin, comes back.
    begun = ts.state == "processing" and not is_barrier(ts.run_spec)
    return ts.run_spec is not None and not begun and ts.state in ("released", *_AHEAD)


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
        """Update the restrictions after a worker has joined or left."""
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
        unrestricted = {key for key in keys if (ts := tasks.get(key)) is not None and not ts.worker_restrictions}
        self._restrict({key for key in unrestricted if needs_package(tasks[key].run_spec)})

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


def _turn(barrier: Barrier) -> tuple[Any, ...]:
    """Return what orders barriers that are parked at once: as Dask would have run them, waves by their numbers."""
    _, number = wave_of(barrier.problem.name) or ("", 0)
    return *barrier.ts.priority[:-1], number, barrier.ts.priority[-1]


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
        if missing := compat.missing_on_scheduler(scheduler):
            raise MissingEngineError(compat.unsupported("on the scheduler", missing))
        before = scheduler.extensions.get(NAME)
        if before is not None and self.name not in scheduler.plugins:
            await before.retire()
        # Nothing is awaited in between: two clients may install the plugin at the same time.
        scheduler.add_plugin(self, name=self.name, idempotent=True)
        if scheduler.plugins[self.name] is not self:
            return
        self.scheduler = scheduler
        direct.order_graphs(scheduler, True)
        self.coordinator = Coordinator(scheduler, self.barriers, self._event)
        self.queue, self.roster = self.coordinator.queue, self.coordinator.roster
        self.groups, self.replicas = self.coordinator.groups, self.coordinator.replicas
        self.regions = self.coordinator.regions
        self.holds = Holds(scheduler, self._go_on)
        self.bare = WorkersWithoutPackage(scheduler, self.roster.bare)
        if before is not None:
            self.roster.bare.update(before.roster.bare)
        answers = self.answer_roster, self.answer_progress, self.answer_regions, self.free_workspaces
        for answer in (*answers, self.replicas.free_replicas):
            scheduler.handlers |= answering(answer)
        for handle in (self.hear_progress, self.coordinator.gathered):
            scheduler.stream_handlers |= listening(handle, lambda epoch: epoch == self.queue.epoch)
        scheduler.stream_handlers |= listening(self.hear_enabled)
        # So that `Client.dump_cluster_state()` finds it.
        scheduler.extensions[NAME] = self
        self.records = Records()
        for attach in attachments:
            attach(scheduler, self)
        # Graphs that came before this plugin: their barriers have asked for it, or another plugin has parked them.
        self.update_graph(scheduler, tasks=list(scheduler.tasks))
        direct.look_at_graphs(scheduler, self._look_at)
        await scheduler.register_worker_plugin(None, for_any_worker(), name=NAME, idempotent=True)
        for barrier in [barrier for barrier in self.barriers.values() if barrier.parked]:
            self.transition(barrier.key, "waiting", "no-worker")

    async def retire(self) -> None:
        """Abort all runs, as another plugin replaces this one and hears of transitions in its place."""
        driving = [barrier.task for barrier in self.barriers.values() if barrier.task is not None]
        self.barriers.clear()
        self.holds.clear()
        for task in driving:
            task.cancel("the scheduler's plugin was installed anew")
        await asyncio.gather(*driving, return_exceptions=True)
        await self.coordinator.release_all(read_options().grace_timeout)

    async def close(self) -> None:
        """Undo all changes to this process' Dask."""
        direct.order_graphs(self.scheduler, False)
        direct.look_at_graphs(self.scheduler, None)

    # Handlers

    async def answer_roster(
        self, demand: Demand, names: Sequence[str] = (), counts: Sequence[Sequence[Count]] = ()
    ) -> Snapshot:
        """Return who would multiply for a demand, and where the chunks of some arrays are.

        `counts` says how many chunks each of the arrays `names` has along its axes.
        """
        engines, workers = await self.roster.choose(demand)
        sources, placed = await known_places(self.scheduler, self.roster, workers, names, counts)
        placed = self.replicas.everywhere(names, workers, placed)
        fields = {"engines": engines, "workers": workers, "sources": sources, "placed": placed}
        return Snapshot("OK", groups=self.groups.orders(engines), **fields)

    async def answer_progress(self, names: Sequence[str] | None = None, keys: Sequence[Any] = ()) -> ProgressReply:
        """Return how far the multiplies `names` are, or where that is None those that the tasks `keys` need."""
        try:
            # A graph that was submitted a moment ago may still be on its way.
            all_present = names is not None or all(key in self.scheduler.tasks for key in keys)
            runs, wanted = list(self.queue.values()), find_names(self.scheduler, keys) if names is None else names
            lines = [progress_of(self.scheduler, runs, self.records, str(name)) for name in wanted]
        except TypeError as error:
            raise ProtocolError(f"malformed question: {error!r}") from error
        return ProgressReply("OK", all_present=all_present, lines=lines)

    async def answer_regions(self, graph: bytes) -> RegionsReply:
        """Return the regions of a graph, pickled with the keys that are wanted, if it came to the scheduler now."""
        tasks, keys = await asyncio.to_thread(loads, graph)
        isolate_copied(tasks)
        regions, left = self.regions.explain(tasks, keys)
        return RegionsReply("OK", regions=regions, left=left)

    async def free_workspaces(self, grace: Seconds) -> Released:
        """Free the memory that engines keep on the workers between runs; return how many groups there were."""
        return Released("OK", count=await self.coordinator.release_all(grace))

    def hear_progress(
        self,
        run_id: int,
        share: Share,
        received_bytes: Count = 0,
        turns: Count = 0,
        turns_in_all: Count = 0,
        worker: str = "",
    ) -> None:
        """Record a participant's progress: its share of work done, and the bytes that it has received.

        The first rank tells how many turns of the outermost loop are done, and of how many. Dask adds the address of
        the `worker` on arrival.
        """
        run = self.queue.get(run_id)
        if run is None:
            return
        before, turns_before = run.share, run.turns
        run.report(worker, share, time(), received_bytes, turns, turns_in_all)
        # Of a loop that ends by a condition the share stands still.
        if int(100 * run.share) > int(100 * before) or run.turns.bit_length() > turns_before.bit_length():
            figures = {"share": run.share, "received_bytes": run.received_bytes}
            loop = {"turns": run.turns, "turns_in_all": run.turns_in_all, "seconds_left": run.seconds_left}
            self._event("progress", run, **figures, **(loop if run.turns else {}))

    def hear_enabled(self, enabled: bool, client: str = "") -> None:
        """Record whether graphs of a client may have regions. Dask adds the `client` on arrival."""
        (self.regions.clients.add if enabled else self.regions.clients.discard)(client)

    # Barriers

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Any], **kwargs: Any) -> None:
        """Let no worker run barriers; called before new tasks make their first transitions."""
        tasks = list(tasks)
        self.bare.look(tasks)
        barriers = [key for key in tasks if (ts := scheduler.tasks.get(key)) is not None and is_barrier(ts.run_spec)]
        if series_of_waves(barriers):
            self.holds.hold(tasks)
        for key in barriers:
            direct.park(ts := scheduler.tasks[key])
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
            self.coordinator.admit(barrier)

    def _look_at(
        self, graph: dict[Any, Any], keys: Collection[Any], order: dict[Any, int], details: Mapping[str, Any]
    ) -> None:
        """Assign each known chunk to one barrier, make regions of new tasks, and order those of groups."""
        # Chunks that are known keep their barriers known, but for those that Dask's own tasks make.
        lost: list[TaskState] = []
        if has_runs := any(isinstance(task, RunTask) for task in graph.values()):
            isolate_copied(graph)
        if self.barriers or has_runs:
            lost += reconcile(self.scheduler.tasks, graph, keys, order)
        for ts in lost + self.regions.look(graph, keys, order, details):
            asyncio.get_running_loop().call_soon(self._forget, ts)
        order_groups(graph, order)

    def _forget(self, ts: TaskState) -> bool:
        """Forget a barrier that nothing depends on; return whether that is so."""
        unneeded = self.scheduler.tasks.get(ts.key) is ts and not ts.dependents and not ts.who_wants
        if unneeded:
            self.scheduler.transitions({ts.key: "forgotten"}, f"distmm-orphan-{ts.key}")
        return unneeded

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Start runs of parked barriers, and abort those of barriers without dependents."""
        self.replicas.transition(key, finish)
        self.holds.transition(key, finish)
        if (barrier := self.barriers.get(key)) is None:
            return
        if finish == "no-worker":
            self._go_on([key])
        elif finish in ("released", "forgotten", "erred"):
            if finish == "forgotten":
                del self.barriers[key]
            # A barrier that lost an input is released, too, before it waits again.
            asyncio.get_running_loop().call_soon(self._look, barrier)

    def _go_on(self, keys: Collection[Any]) -> None:
        """Start the runs of parked barriers among tasks that are released."""
        self.bare.look(keys)
        for barrier in [self.barriers[key] for key in keys if key in self.barriers]:
            if not self._parked:
                asyncio.get_running_loop().call_soon(self._begin)
            self._parked.append(barrier)

    def _begin(self) -> None:
        parked, self._parked = self._parked, []
        for barrier in sorted(parked, key=_turn):
            if barrier.parked and barrier.key not in self.holds and (barrier.task is None or barrier.task.done()):
                barrier.task = asyncio.ensure_future(self.coordinator.drive(barrier))
        direct.start_queued(self.scheduler, "distmm-parked")

    def _look(self, barrier: Barrier) -> None:
        """End the run of a barrier that is over."""
        if barrier.over:
            for run in self.queue.of(barrier.key):
                if run.live:
                    run.fail({"client": "its task was released"}, released=True)
            self.queue.changed()

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
            self.coordinator.tell(left, WorkerService.abandon, group.number, group.engine)
        for run in self.queue.values():
            self.coordinator.lose(run, worker)

    def log_event(self, topic: str, msg: Any) -> None:
        """Record the workers that report that they lack this package."""
        # Any client may log an event; a worker that has described itself has the package.
        if topic == MISSING and isinstance(msg, dict) and str(msg.get("worker")) not in self.roster:
            self.bare.note(str(msg.get("worker")), str(msg.get("reason")))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free the memory that engines keep between runs, if no client comes back soon."""
        self.regions.clients.discard(client)

        async def free() -> None:
            if not scheduler.clients.keys() - {"fire-and-forget"}:
                await self.coordinator.release_all(read_options().grace_timeout)

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
        self.holds.clear()
        self.replicas.clear()
        self.roster.clear()
        self.groups.clear()
        self.queue.changed()

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
