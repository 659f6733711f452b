"""The product of two matrices: planned as far as the cluster is known, and handed over to the graph."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import dask.array as da
import numpy as np
from dask.utils import format_time

from dask_distmm.arrays.extras import unfit
from dask_distmm.arrays.fallback import dask_matmul, why_leave, why_not
from dask_distmm.arrays.kinds import check_planned, planning
from dask_distmm.arrays.outputs import is_lazy, operands_under, run_outputs, without_a_run
from dask_distmm.arrays.request import Request, parse, problem_of_request, result_chunks
from dask_distmm.arrays.waves import Decision, decide, pipelined, waves_now
from dask_distmm.config import dask_costs, minimum_flops
from dask_distmm.errors import NoWorkersError, PlanError, ProjectedMemoryError
from dask_distmm.graph.build import DaskTasks
from dask_distmm.planning import Plan, Problem, Worker
from dask_distmm.planning.placement import Explanation
from dask_distmm.planning.waves import WavePlan
from dask_distmm.runtime.client import Snapshot, current_client, recent_snapshot, snapshot

_ONCE = "its own tasks use each chunk once, so that they stream by themselves"


class NotCollective(Explanation):
    """The answer of `dask_distmm.explain` where Dask's own function would run. False in a condition.

    Parameters
    ----------
    reason
        Why.
    """

    method = "dask"
    seconds = None
    bytes_moved = None

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return False


def why_not_run(request: Request, *, cluster: bool) -> str | None:
    """Return why a product can't run here, or None if it can; `cluster`: whether there has to be one."""
    most = max(2, request.a.ndim, request.b.ndim)
    reason = why_not(request.a, request.b, request.types, cluster=cluster, most=most) or unfit(request.extras)
    if reason is None:
        return None
    # Workers that are only imagined are no demand; and where there are none at all, all of D is in one place anyway.
    met = ("workers=",) * (not cluster) + ("epilog=", "gathered=") * (current_client() is None)
    named = [text for text in request.named if not text.startswith(met)]
    if named:
        raise PlanError(
            f"{named[0]} needs a collective run, and there can't be one here: {reason}. Or leave {named[0]} out: then "
            "Dask's own function multiplies"
        )
    return reason


def multiply_matrices(request: Request) -> Any:
    """Return D, and the auxiliary outputs if there are any, of a product of matrices."""
    a, b = request.a, request.b
    reason = why_not_run(request, cluster=not planning())
    collective = check_planned(reason) is None
    if request.plain:
        if not collective:
            # The very function that Dask would have called.
            return request.without_dropped(_in_chunks(request, dask_matmul(a, b)))
        if request.empty:
            chunks = result_chunks(a, b, request.out_chunks)
            dtype = np.result_type(a.dtype, b.dtype)
            return request.without_dropped(da.zeros((a.shape[0], b.shape[1]), chunks=chunks, dtype=dtype))
    if not collective or request.empty:
        found = without_a_run(a, b, request.formula, request.extras, request.types)
        d, *aux = found if isinstance(found, tuple) else (found,)
        return (_in_chunks(request, d), *aux) if aux else _in_chunks(request, d)
    problem = problem_of_request(request)
    decision = _decide_now(request, problem)
    found = run_outputs(problem, a, b, [array for _, array in request.extras], decision.scheme)
    return request.without_dropped(found) if request.dropped else found


def _in_chunks(request: Request, d: da.Array) -> da.Array:
    """Return a matrix in the chunks that were asked for."""
    return d if request.out_chunks is None else d.rechunk(request.out_chunks, method="tasks")


def explain_matrices(request: Request) -> Plan | WavePlan | NotCollective:
    """Return the plan for a product of matrices on the cluster as it is now, or why there is none."""
    client = current_client()
    imagined = request.workers if client is None and isinstance(request.workers, int) else None
    reason = why_not_run(request, cluster=imagined is None)
    if reason is not None:
        return NotCollective(reason)
    if request.empty:
        return NotCollective("the product is empty or all zeros, nothing is multiplied")
    problem = problem_of_request(request)
    if imagined is not None:
        imaginary = [Worker(f"worker-{i}") for i in range(imagined)]
        known: Snapshot | None = Snapshot(imaginary, [], [None, None], [problem.engine_alone], [])
    else:
        assert client is not None
        known = snapshot(client, problem, operands_under(request.a, request.b, problem))
    if known is None:
        return NotCollective("an asynchronous client can't be asked here; call explain from a synchronous one")
    try:
        # Of imagined workers nothing is known, nor of what they hold.
        lazy = client is not None and any(map(is_lazy, operands_under(request.a, request.b, problem)))
        made = known.plan(problem, reordered=True, lazy=lazy)
    except ProjectedMemoryError:
        if client is None or (waves := waves_now(request, problem, client, None)) is None:
            raise
        return waves
    if client is not None:
        waves = waves_now(request, problem, client, made) or pipelined(request, problem, client, known, made)
        if waves is not None:
            return waves
    return dataclasses.replace(made, left=_why_left(request, made)) if request.plain and not request.named else made


def _why_left(request: Request, made: Plan) -> str:
    """Return why ``@`` under `enable` leaves a product that could run to Dask's own tasks; empty if it does not."""
    return why_leave(request.a, request.b, minimum_flops(), cluster=False) or _why_slower(made)


def _why_slower(made: Plan) -> str:
    """Return why Dask's own tasks are expected to be faster than a run; empty if they are not."""
    if made.worth_it or made.by_tasks is None:
        return ""
    seconds = format_time(made.by_tasks.seconds), format_time(made.seconds)
    return "its own tasks are expected to take {}, a run {}".format(*seconds)


def _used_once(request: Request, problem: Problem) -> bool:
    """Whether there are lazy operands, and Dask's own tasks use each chunk of these for one chunk of D."""
    lazy = tuple(map(is_lazy, operands_under(request.a, request.b, problem)))
    rows, cols = problem.chunk_counts("d")
    return any(lazy) and (cols == 1 or not lazy[0]) and (rows == 1 or not lazy[1])


def _streams_alone(problem: Problem, decision: Decision) -> bool:
    """Whether Dask's own tasks use each loaded chunk at one time: then they need little memory, and no waves.

    Ranks on GPUs that make the chunks themselves are faster: no task for each, and GPUs multiply meanwhile.
    """
    if decision.plan is not None or decision.scheme is None or (decision.scheme.by_ranks and decision.on_gpus):
        return False
    scheme = decision.scheme.name
    return scheme in ("rows", "cols") or (scheme == "sums" and problem.chunk_counts("d") == (1, 1))


def product_or_reason(a: da.Array, b: da.Array) -> da.Array | str:
    """Return ``a @ b`` under `enable`, or why it is left to Dask's own function."""
    request = parse(a, b)
    if request.empty:
        return cast(da.Array, multiply_matrices(request))
    a, b, problem = request.a, request.b, problem_of_request(request)
    decision = _decide_now(request, problem, enabled=True)
    if decision.left:
        return decision.left
    if decision.plan is not None and (left := _why_slower(decision.plan)):
        return left
    if minimum_flops() is None and _streams_alone(problem, decision):
        return f"it does not fit into memory, and {_ONCE}"
    found = run_outputs(problem, a, b, [], decision.scheme, by_tasks=_by_tasks(request, problem, decision.known))
    return request.without_dropped(cast(da.Array, found))


def _by_tasks(request: Request, problem: Problem, known: Snapshot | None) -> DaskTasks | None:
    """Return what decides about Dask's own tasks for parts of D; None if there are to be runs."""
    cut_otherwise = problem.out_chunks != (problem.a_chunks[0], problem.b_chunks[1])
    if known is None or request.demands or cut_otherwise or minimum_flops() is not None:
        return None
    graph_a, graph_b = (x.dask if is_lazy(x) else None for x in operands_under(request.a, request.b, problem))
    return DaskTasks(tuple(known.workers), known.engines, dask_costs(), (graph_a, graph_b))


def _decide_now(request: Request, problem: Problem, *, enabled: bool = False) -> Decision:
    """Return how a product is made on the cluster as it is now, and log it; no decision if no scheduler can be asked.

    Under `enable` a product of chunks that are still to be made may be left to Dask.
    """
    client = current_client()
    try:
        known = recent_snapshot(client, problem) if client is not None else None
    except NoWorkersError:
        return Decision()  # There may be some when it is computed.
    if client is None or known is None:
        return Decision()
    aside = enabled and not Decision(known=known).on_gpus and minimum_flops() is None
    if aside and _used_once(request, problem):
        return Decision(left=f"chunks are still to be made, and {_ONCE}")
    return decide(request, problem, client, known)
