"""All uses of internals of distributed: how a run begins and ends without tasks that workers run.

The scheduler's side parks a task, puts tasks into memory, and fails a task; the worker's side keeps and frees values.
`compat` lists these internals, and looks whether this version of distributed has them before anything here is called.

A parked task is in Dask's state ``no-worker``: all its inputs are in memory, and no worker may run it. Dask itself
moves it back to ``waiting`` when an input is lost, and parks it again when that input has been computed again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import dask.order
import distributed.worker
from dask._task_spec import DataNode, List, Task, TaskRef
from dask.sizeof import sizeof
from distributed import SchedulerPlugin
from distributed.core import error_message
from distributed.metrics import monotonic, time
from distributed.protocol import to_serialize
from distributed.worker_state_machine import FreeKeysEvent

from dask_distmm.engines.base import log
from dask_distmm.runtime.keys import held_back, is_barrier, series_of_waves
from dask_distmm.runtime.run import TaskFailed

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker
    from distributed.scheduler import TaskState, WorkerState

# The method of a scheduler that makes tasks of a graph.
_TAKES_UP = "_create_taskstate_from_graph"
# How often parked tasks are kept (seconds).
_REFRESH = 0.5
# An address that no worker has.
_NOWHERE = "tcp://0.0.0.0:1"


# Where a task may run: its workers, hosts and resources, and whether others will do.
Restrictions: TypeAlias = tuple[Any, Any, Any, Any]


def park(ts: TaskState) -> Restrictions:
    """Restrict a task to no worker: Dask moves it to ``no-worker`` when all its inputs are in memory.

    Return where it might run before.
    """
    before = ts.worker_restrictions, ts.host_restrictions, ts.resource_restrictions, ts.loose_restrictions
    ts.worker_restrictions = {_NOWHERE}
    ts.host_restrictions = ts.resource_restrictions = None
    ts.loose_restrictions = False
    return before


def restore(ts: TaskState, before: Restrictions) -> None:
    """Restore the restrictions of a parked task, before `wait_again`."""
    ts.worker_restrictions, ts.host_restrictions, ts.resource_restrictions, ts.loose_restrictions = before


def unqueue(scheduler: Scheduler, tasks: Sequence[TaskState], stimulus_id: str) -> None:
    """Remove parked tasks from the queue for idle workers: no worker may run them."""
    queued = {ts.key: "released" for ts in tasks if ts.state == "queued"}
    scheduler.transitions(queued, stimulus_id)


def start_queued(scheduler: Scheduler, stimulus_id: str) -> None:
    """Start queued tasks on idle workers. Dask itself does not look after a task that has asked to be rescheduled."""
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)


async def keep_parked(scheduler: Scheduler, keys: Collection[Any]) -> None:
    """Keep Dask's ``no-workers-timeout``, which is not meant for runs, from ending parked tasks while there are any."""
    while keys and scheduler.no_workers_timeout:
        for key in keys:
            ts = scheduler.tasks.get(key)
            if ts in scheduler.unrunnable:
                # Oldest first, as Dask has them.
                del scheduler.unrunnable[ts]
                scheduler.unrunnable[ts] = monotonic()
        await asyncio.sleep(min(_REFRESH, scheduler.no_workers_timeout / 4))


# A task that is to be put into memory: key, holder of its value, bytes, type (pickled, and the name), time of the work.
Made: TypeAlias = "tuple[Any, WorkerState, int, Sequence[Any], Mapping[str, Any]]"


def put_into_memory(scheduler: Scheduler, barrier: TaskState, tasks: Iterable[Made], stimulus_id: str) -> set[Any]:
    """Put tasks into memory that wait for nothing but a parked one, without having been sent to workers.

    Dependents run then, unneeded chunks go, and clients hear of their keys. Return the keys of those tasks.
    """

    def tell(key: Any, start: str, finish: str, **details: Any) -> None:
        """Tell all plugins, of which Dask's progress bars and dashboard are some, of a transition."""
        for transition in listeners:
            try:
                transition(key, start, finish, stimulus_id=stimulus_id, **details)
            except Exception:  # as Dask does: somebody else's plugin must not keep tasks from going on
                log.info("a scheduler plugin failed", exc_info=True)

    plugins = [*scheduler.plugins.values()]
    listeners = [x.transition for x in plugins if type(x).transition is not SchedulerPlugin.transition]
    done: set[Any] = set()
    recommendations: dict[Any, Any] = {}
    messages: dict[str, list[dict[str, Any]]] = {}
    for key, ws, nbytes, (kind, typename), span in tasks:
        ts = scheduler.tasks.get(key)
        if (
            ts is None
            or ts.state != "waiting"
            or ts.waiting_on != {barrier}
            or scheduler.workers.get(ws.address) is not ws
        ):
            continue
        ts.waiting_on.clear()
        # Plugins look at the task, too: work stealing at its worker.
        ts.processing_on, ts.state = ws, "processing"
        tell(ts.key, "waiting", "processing")
        ts.processing_on = None
        ts.set_nbytes(nbytes)
        reports: dict[str, list[dict[str, Any]]] = {}
        scheduler._add_to_memory(ts, ws, recommendations, reports, type=kind, typename=typename)
        for client, updates in reports.items():
            messages.setdefault(client, []).extend(updates)
        scheduler.transition_counter += 1
        details = {"worker": ws.address, "status": "OK", "nbytes": nbytes, "type": kind, "typename": typename}
        tell(ts.key, "processing", "memory", **details, startstops=[dict(span)], thread=0, metadata={})
        done.add(ts.key)
    scheduler.transitions(recommendations, stimulus_id)
    scheduler.send_all(messages, {})
    return done


# Seconds between two messages of a client to its scheduler: as workers have.
_BETWEEN = 0.002


def hasten(client: Client) -> None:
    """Let a client send messages as soon after each other as workers do, until it connects anew.

    Dask waits for 10 ms. In a loop that computes its next state each turn forgets a state, which is a message, and asks
    for another one: it would wait that long, which is as much as a small run takes.
    """
    stream: Any = getattr(client, "scheduler_comm", None)
    if isinstance(interval := getattr(stream, "interval", None), float):
        stream.interval = min(interval, _BETWEEN)


def look_at_graphs(scheduler: Scheduler, look: Callable[..., None] | None) -> None:
    """Call a function with each new graph before a scheduler takes it up; None ends that.

    It is called in the same step of the event loop, and may change the graph. Plugins hear of a graph when its tasks
    are there.
    """
    vars(scheduler).pop(_TAKES_UP, None)
    if look is None:
        return
    take_up = getattr(scheduler, _TAKES_UP)

    def take_up_reviewed(*, dsk: Any, keys: Any, ordered: Any, **details: Any) -> Any:
        look(dsk, keys, ordered, details)
        return take_up(dsk=dsk, keys=keys, ordered=ordered, **details)

    setattr(scheduler, _TAKES_UP, take_up_reviewed)


def forget_run_spec(ts: TaskState) -> list[TaskState]:
    """Clear a released task's run_spec, so that the next graph sets it; return its former dependencies."""
    before = list(ts.dependencies)
    for dependency in before:
        dependency.dependents.discard(ts)
    ts.dependencies.clear()
    ts.run_spec = None
    return before


# Schedulers of this process that order graphs apart, and Dask's own function.
_ordering: set[int] = set()
_dask_order = dask.order.order


def order_graphs(scheduler: Scheduler, on: bool) -> None:
    """Make this process' schedulers order graphs with barriers by `order_apart`, until the last one closes.

    Dask's ordering looks at each pair of a root and a leaf that depends on it. Through a barrier all leaves depend on
    all roots: a million pairs for 1,000 chunks each.
    """
    (_ordering.add if on else _ordering.discard)(id(scheduler))
    dask.order.order = functools.partial(order_apart, _dask_order) if _ordering else _dask_order


def order_apart(order: Callable[..., dict[Any, Any]], dsk: Mapping[Any, Any], **options: Any) -> dict[Any, Any]:
    """Return the order of a graph's tasks; the tasks before and those after a barrier are ordered apart.

    A wave comes after the one before it, and what it loads when the next wave's barrier does.
    """
    barriers = {key for key, task in dsk.items() if is_barrier(task)}
    behind = (
        {key: barrier for key, task in dsk.items() for barrier in barriers.intersection(task.dependencies)}
        if barriers
        else {}
    )
    if len(behind) < 2 or options:
        return order(dsk, **options)
    after = held_back(dsk) | {
        barrier: last for waves in series_of_waves(barriers) for last, barrier in itertools.pairwise(waves)
    }
    # What begins for barriers only, and chunks that nothing needs, have their places beside barriers.
    inner = {dep for key, task in dsk.items() if key not in barriers for dep in task.dependencies} | barriers
    inner.update(dep for barrier in barriers for dep in dsk[barrier].dependencies & behind.keys())
    rest = {key: DataNode(key, None) if key in behind else task for key, task in dsk.items()}
    begins: dict[Any, dict[Any, None]] = {}
    for barrier in barriers - behind.keys():
        # Neighbours in a matrix one after another: Dask loads these on one worker.
        listed = (ref.key for keys in dsk[barrier].args if isinstance(keys, List) for ref in keys.args)
        alone = (key for key in listed if key in dsk and not (key in inner or dsk[key].dependencies))
        begins[barrier] = dict.fromkeys(alone)
        rest[barrier] = Task(barrier, len, *map(TaskRef, dsk[barrier].dependencies - begins[barrier].keys()))
    beside = set().union(*begins.values(), behind.keys() - inner)
    priorities: dict[Any, float] = order({key: task for key, task in rest.items() if key not in beside})
    for barrier in sorted(begins, key=priorities.__getitem__):
        for key in begins[barrier]:
            priorities.setdefault(key, priorities[barrier] - 0.5)
    priorities |= {key: priorities[barrier] + 0.5 for key, barrier in behind.items() if key not in inner}
    levels: dict[Any, int] = {}
    todo = list(dsk)
    while todo:
        key = todo.pop()
        needs = [behind[key]] if key in behind else [dep for dep in dsk[key].dependencies if dep in dsk]
        needs += [after[key]] if key in after else []
        unknown = [dep for dep in needs if dep not in levels]
        if unknown:
            todo += [key, *unknown]
        else:
            levels[key] = max((levels[dep] for dep in needs), default=0) + (key in behind or key in after)
    ranked = sorted(priorities, key=lambda key: (levels[key], priorities[key]))
    return {key: number for number, key in enumerate(ranked)}


def fail(scheduler: Scheduler, ts: TaskState, error: BaseException, stimulus_id: str) -> None:
    """End a task that is parked, or waits, with an error, as if a worker had raised it.

    An error of the user's goes to the client as the worker has pickled it: to open it here would run the user's code.
    """
    message: dict[str, Any]
    if isinstance(error, TaskFailed):
        reply = error.reply
        traceback = to_serialize(reply.error_traceback) if reply.error_traceback else None
        texts = {"exception_text": reply.error_text, "traceback_text": reply.traceback}
        message = {"exception": to_serialize(reply.error), "traceback": traceback, **texts}
    else:
        message = {name: value for name, value in error_message(error).items() if name != "status"}
    if ts.state == "no-worker":
        recommendations, clients, workers = scheduler._transition(ts.key, "erred", stimulus_id, cause=ts.key, **message)
        scheduler.send_all(clients, workers)
        scheduler.transitions(recommendations, stimulus_id)
    elif ts.state in ("waiting", "released"):
        for name, value in message.items():
            setattr(ts, name, value)
        ts.exception_blame = ts
        scheduler.transitions({ts.key: "erred"}, stimulus_id)


def free(scheduler: Scheduler, address: str, keys: Sequence[Any], stimulus_id: str) -> None:
    """Free values on a worker that its scheduler does not know."""
    if keys and address in scheduler.workers:
        scheduler.worker_send(address, {"op": "free-keys", "keys": list(keys), "stimulus_id": stimulus_id})


def lose(scheduler: Scheduler, keys: Iterable[Any], stimulus_id: str) -> None:
    """Free results on all workers, as if these were lost: Dask recomputes them if they are needed."""
    recommendations: dict[Any, Any] = {}
    for key in keys:
        ts = scheduler.tasks.get(key)
        if ts is None or ts.state != "memory":
            continue
        for ws in list(ts.who_has or ()):
            scheduler.remove_replica(ts, ws)
            free(scheduler, ws.address, [key], stimulus_id)
        recommendations[key] = "released"
    scheduler.transitions(recommendations, stimulus_id)


def put_back(scheduler: Scheduler, barrier: TaskState, tasks: Mapping[Any, Any], stimulus_id: str) -> None:
    """Return a region's tasks to Dask: those that wait for its barrier, with their dependencies."""
    waiting = [ts for ts in barrier.dependents if ts.key in tasks]
    restarted = [ts for ts in waiting if ts.state != "released"]
    for ts in waiting:
        if ts in restarted:
            # As when a task that is waited for is released, but nothing that it needs goes meanwhile.
            (barrier.waiters or set()).discard(ts)
            ts.waiting_on, ts.state = None, "released"
        forget_run_spec(ts)
        ts.run_spec = tasks[ts.key]
    todo = list(waiting)
    while todo:
        ts = todo.pop()
        for key in ts.run_spec.dependencies:
            if (dts := scheduler.tasks.get(key)) is None:
                dts = scheduler.new_task(key, tasks.get(key), "released")
                # What Dask gives each task of a new graph: a place in the order, and a span, which workers tell of.
                dts.priority = barrier.priority
                dts.group.span_id = dts.group.span_id or barrier.group.span_id
                todo.append(dts)
            ts.add_dependency(dts)
    scheduler.transitions({ts.key: "waiting" for ts in restarted}, stimulus_id)
    if not barrier.dependents:
        scheduler.transitions({barrier.key: "forgotten"}, stimulus_id)


def release_donated(scheduler: Scheduler, barrier: TaskState, keys: Iterable[Any], stimulus_id: str) -> None:
    """Release a parked task's claim on some of its inputs; inputs that no other task or client needs are freed.

    A scheduler that checks itself (`validate`) holds that a parked task has all of its inputs: there they stay.
    """
    if scheduler.validate:
        return
    recommendations: dict[Any, Any] = {}
    for key in keys:
        ts = scheduler.tasks.get(key)
        if ts is None or ts.state != "memory" or not ts.run_spec:
            continue
        ts.waiters.discard(barrier)
        if not ts.waiters and not ts.who_wants:
            recommendations[key] = "released"
    scheduler.transitions(recommendations, stimulus_id)


def wait_again(scheduler: Scheduler, tasks: Iterable[TaskState], stimulus_id: str) -> None:
    """Let parked tasks wait for their inputs: Dask recomputes those whose chunks were freed, and queues tasks."""
    scheduler.transitions({ts.key: "waiting" for ts in tasks if ts.state == "no-worker"}, stimulus_id)


def free_restricted(scheduler: Scheduler, tasks: Iterable[TaskState], stimulus_id: str) -> None:
    """Remove all restrictions of tasks."""
    restricted = list(tasks)
    scheduler.set_restrictions({ts.key: None for ts in restricted})
    waiting = {ts.key: "processing" for ts in restricted if ts.state == "no-worker"}
    scheduler.transitions(waiting, stimulus_id=stimulus_id)


def restrict_workers(scheduler: Scheduler, ts: TaskState, addresses: Iterable[str]) -> None:
    """Restrict a task to some workers."""
    ts.worker_restrictions = set(addresses)
    if ts.state == "no-worker":
        scheduler.transitions({ts.key: "processing"}, stimulus_id=f"distmm-restrict-{ts.key}")


def copy_to(scheduler: Scheduler, address: str, keys: Sequence[Any], stimulus_id: str) -> None:
    """Replicate values of other workers to a worker; lost ones are skipped."""
    there = [key for key in keys if (ts := scheduler.tasks.get(key)) is not None and ts.who_has]
    scheduler.request_acquire_replicas(address, there, stimulus_id=stimulus_id)


# On a worker, on its event loop


def keep(worker: Worker, values: Mapping[Any, Any], stimulus_id: str) -> dict[Any, int]:
    """Store values in a worker's memory, where Dask holds, spills and sends them; return the bytes of each.

    Nobody is told of it: the scheduler's side does that with `put_into_memory`.
    """
    worker.update_data(dict(values), stimulus_id=stimulus_id)
    for key in values:
        if key not in worker.data:
            raise MemoryError(f"worker {worker.address} could not keep {key!r} in memory or on disk")
    return {key: sizeof(value) for key, value in values.items()}


def replace(worker: Worker, key: Any, stored: Any, copy: Any) -> None:
    """Replace a value in a worker's memory by a copy, if it is still there."""
    if getattr(worker.data, "fast", worker.data).get(key) is stored:
        worker.data[key] = copy


def act_as_task(worker: Worker) -> None:
    """Let `distributed.get_worker` find the worker in this thread, as in a task."""
    if (current := getattr(distributed.worker, "_worker_cvar", None)) is not None:
        current.set(worker)


def let_go(worker: Worker, keys: Iterable[Any], run_id: int) -> None:
    """Free values stored in a worker's memory that its scheduler does not know."""
    worker.handle_stimulus(FreeKeysEvent(keys=list(keys), stimulus_id=f"distmm-run-{run_id}-{time()}"))
