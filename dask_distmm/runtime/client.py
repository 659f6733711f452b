"""The cluster as the client sees it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from dask._task_spec import convert_legacy_graph
from dask.core import flatten
from distributed import Future
from distributed.protocol.pickle import dumps

from dask_distmm.compat import install_command
from dask_distmm.config import dask_costs, read_options, setting
from dask_distmm.errors import EngineError, MissingEngineError, ProtocolError
from dask_distmm.planning import Demand, Plan, Problem, Worker, plan
from dask_distmm.planning.computation import Computation
from dask_distmm.planning.cuts import by_holder, reorder
from dask_distmm.planning.placement import CLEARLY
from dask_distmm.planning.planner import is_faster, run_overhead, tasks_estimate, with_tasks
from dask_distmm.runtime import direct
from dask_distmm.runtime.messages import RegionsReply, Snapshot, ask, post
from dask_distmm.runtime.plugin import DistMMSchedulerPlugin

if TYPE_CHECKING:
    from distributed import Client

# The scheduler's latest answers to each client, by demand, and when they came. Asking takes 2 to 3 ms, a tenth of the
# time of a small product. Old answers serve, as the roster seldom changes: a run's own plan is made from the new one.
_said: weakref.WeakKeyDictionary[Any, dict[Any, tuple[float, Snapshot]]] = weakref.WeakKeyDictionary()
_FRESH = 10.0
# Clients that have put the plugin on their scheduler.
_installed: weakref.WeakSet[Any] = weakref.WeakSet()
# Clients whose scheduler was told whether `enable` is in force.
_announced: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# Why the scheduler has refused it, and when.
_refused: weakref.WeakKeyDictionary[Any, tuple[float, str]] = weakref.WeakKeyDictionary()


def imagined_snapshot(problem: Computation, workers: Sequence[Worker]) -> Snapshot:
    """Return a snapshot of imagined workers, without chunks."""
    return Snapshot("OK", engines=(problem.engine_alone,), workers=workers)


def plan_on(snapshot: Snapshot, problem: Problem, *, reordered: bool = False, lazy: bool = False) -> Plan:
    """Return the plan for a problem on the workers of a snapshot, with an estimate for Dask's own tasks.

    With `lazy` chunks are still to be made: tasks of Dask come before the run, and among its own.
    """
    where = {}
    for name, raw in zip("ab", snapshot.placed, strict=False):
        if raw is not None:
            matrix, where[name] = problem[name], np.frombuffer(raw, np.int32)
            if matrix.transposed:
                # Where the chunks of the array underneath are, in the order of the matrix' own.
                where[name] = where[name].reshape(matrix.counts[::-1]).T.ravel()
    if reordered and len(where) == 2:
        problem, before = reorder(problem, by_holder(problem, where))
        where = {name: where[name][before[name]] for name in where}
    chosen = plan(
        problem, snapshot.workers, where, sources=snapshot.sources, engine=snapshot.engines, groups=snapshot.groups
    )
    # With a number of operations as the limit nobody chooses by time.
    return with_tasks(chosen, snapshot.workers, dask_costs(), lazy=lazy, by_tasks=setting("minimum-flops") is None)


def runs_faster(snapshot: Snapshot, problem: Problem, *, lazy: bool) -> bool:
    """Whether a run on these workers is expected to be over clearly before Dask's own tasks: see `plan_on`."""
    costs = dask_costs()
    around = run_overhead(problem, costs) + lazy * costs.start
    limits = {}
    for name in snapshot.engines:
        own = tasks_estimate(problem, snapshot.workers, problem.machine_of_tasks(name), costs)
        limits[name] = CLEARLY * own.seconds - around
    return is_faster(problem, snapshot.workers, limits)


def current_client() -> Client | None:
    """Return the client that Dask would compute with here, or None if it would not use a cluster."""
    chosen = dask.config.get("scheduler", None)
    if chosen is not None and chosen not in ("dask.distributed", "distributed"):
        return None
    from distributed import get_client

    try:
        client = get_client()
    except ValueError:
        return None
    return client if client.status == "running" else None


def recent_snapshot(client: Client, problem: Computation) -> Snapshot | None:
    """Return the scheduler's snapshot of at most 10 seconds ago; as `ask_roster`."""
    said, demand = _said.setdefault(client, {}), problem.demand
    when, snapshot = said.get(demand, (-_FRESH, None))
    if snapshot is None or time.monotonic() - when >= _FRESH:
        snapshot = ask_roster(client, demand)
        if snapshot is not None:
            said[demand] = time.monotonic(), snapshot
    return snapshot


def ask_roster(client: Client, demand: Demand, arrays: Sequence[Any] = ()) -> Snapshot | None:
    """Ask the scheduler which workers can take part; None if that would block an event loop (asynchronous clients)."""
    if client.asynchronous:
        return None
    names, counts = [array.name for array in arrays], [array.numblocks for array in arrays]
    request = client.scheduler, DistMMSchedulerPlugin.answer_roster, "", demand, names, counts
    if client not in _installed:
        _install_plugin(client)
    answer: Snapshot | None = client.sync(ask, *request)
    if answer is None:
        # The scheduler was started again, and does not know the question.
        _install_plugin(client)
        answer = client.sync(ask, *request)
    if answer is None:
        raise EngineError(
            "the scheduler does not know dask_distmm's question for workers; install dask_distmm there, in the version "
            f"of this client: {install_command(elsewhere=True)}"
        )
    if answer.status != "OK":
        raise ProtocolError(answer.message)
    return answer


def announce(client: Client | None, enabled: bool) -> None:
    """Tell the scheduler whether what is around routed functions in graphs of a client may be runs."""
    if client is not None and client in _installed and _announced.get(client, False) != enabled:
        client._send_to_scheduler(post(DistMMSchedulerPlugin.hear_enabled, "", enabled))
        _announced[client] = enabled


def announce_all(enabled: bool) -> None:
    """Repeat `announce` for all clients that have announced."""
    for client in list(_announced):
        if client.status == "running":
            announce(client, enabled)


def ask_regions(arrays: Sequence[Any]) -> RegionsReply:
    """Ask the scheduler for the regions of the graphs of arrays, if `enable` is in force there; else there are none."""
    client = current_client()
    if client is None or client.asynchronous or not _announced.get(client):
        return RegionsReply("OK")
    graph: dict[Any, Any] = {}
    for array in dask.optimize(*arrays):
        graph |= {key: task for key, task in array.__dask_graph__().items() if not isinstance(task, Future)}
    keys = {key for array in arrays for key in flatten(array.__dask_keys__())}
    packed = dumps((convert_legacy_graph(graph), keys))
    answer: RegionsReply | None = client.sync(ask, client.scheduler, DistMMSchedulerPlugin.answer_regions, "", packed)
    return answer if answer is not None and answer.status == "OK" else RegionsReply("OK")


def _install_plugin(client: Client) -> None:
    when, refusal = _refused.get(client, (-_FRESH, ""))
    if time.monotonic() - when < _FRESH:
        raise MissingEngineError(refusal)
    try:
        client.register_plugin(DistMMSchedulerPlugin())
    except (MissingEngineError, ImportError) as error:
        refusal = str(error)
        if isinstance(error, ImportError):
            refusal = (
                f"the scheduler can't import dask_distmm ({error}); install it there, and start it again: "
                f"{install_command(elsewhere=True)}"
            )
        _refused[client] = time.monotonic(), refusal
        raise MissingEngineError(refusal) from error
    _installed.add(client)
    _announced.pop(client, None)
    direct.hasten(client)


def free_workspaces(client: Client | None = None) -> int:
    """Free the memory that engines keep on the workers between runs: communicators, workspaces, descriptors.

    The next multiply makes them again, which takes about a second on GPUs. Waits for runs that are under way.

    Parameters
    ----------
    client : distributed.Client, optional
        Of the cluster; the current one by default.

    Returns
    -------
    int
        How many groups of workers had something.

    Raises
    ------
    EngineError
        No cluster is connected.

    See Also
    --------
    free_replicas, Matmul

    Examples
    --------
    >>> import dask_distmm
    >>> dask_distmm.free_workspaces()    # doctest: +SKIP
    1
    """
    client = client or current_client()
    if client is None:
        raise EngineError("no cluster is connected whose workspaces could be freed; pass a distributed.Client")
    free = DistMMSchedulerPlugin.free_workspaces
    answer = client.sync(ask, client.scheduler, free, "", read_options().grace_timeout)
    # A scheduler that does not know the request has run nothing.
    return answer.count if answer is not None else 0
