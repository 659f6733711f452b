"""The product of two matrices: planned as far as the cluster is known, and handed over to the graph."""

from __future__ import annotations

import logging
from typing import Any, cast

import dask.array as da
import numpy as np
from dask.utils import format_time

from dask_distmm.arrays.extras import unfit
from dask_distmm.arrays.fallback import why_not
from dask_distmm.arrays.kinds import check_planned, planning
from dask_distmm.arrays.outputs import result, without_a_run
from dask_distmm.arrays.request import Request, make_problem, parse, result_chunks
from dask_distmm.arrays.stock import dask_matmul
from dask_distmm.arrays.views import under
from dask_distmm.config import setting
from dask_distmm.errors import NoWorkersError, PlanError, ProjectedMemoryError
from dask_distmm.planning import Plan, Problem, Worker
from dask_distmm.planning.display import Shown
from dask_distmm.runtime.client import Snapshot, current_client, recent_snapshot, snapshot

__all__ = ["NotCollective", "explain", "multiply", "product", "why_not_run"]


class NotCollective(Shown):
    """The answer of `dask_distmm.explain` where Dask's own function would run. False in a condition.

    Parameters
    ----------
    reason
        Why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return False


def why_not_run(request: Request, *, cluster: bool) -> str | None:
    """Return why a product can't run here, or None if it can; `cluster`: whether there has to be one."""
    most = max(2, request.a.ndim, request.b.ndim)
    reason = why_not(request.a, request.b, request.types, cluster=cluster, most=most)
    return reason or unfit(request.extras)


def multiply(request: Request) -> Any:
    """Return D, and the auxiliary outputs if there are any, of a product of matrices."""
    a, b = request.a, request.b
    reason = why_not_run(request, cluster=not planning())
    collective = check_planned(reason) is None
    if request.plain:
        if not collective:
            # The very function that Dask would have called.
            return request.without_dropped(dask_matmul(a, b))
        if request.dropped and (request.out_chunks is not None or any(request.distributions)):
            raise PlanError("out_chunks and distributions can be given for 2-D operands only")
        if request.empty:
            chunks = result_chunks(a, b, request.out_chunks)
            dtype = np.result_type(a.dtype, b.dtype)
            return request.without_dropped(da.zeros((a.shape[0], b.shape[1]), chunks=chunks, dtype=dtype))
    if not collective or request.empty:
        return without_a_run(a, b, request.formula, request.extras, request.types)
    problem = make_problem(request)
    _plan_now(problem, request.logger)
    found = result(problem, a, b, [array for _, array in request.extras])
    return request.without_dropped(found) if request.dropped else found


def explain(request: Request) -> Plan | NotCollective:
    """Return the plan for a product of matrices on the cluster as it is now, or why there is none."""
    client = current_client()
    imagined = request.workers if client is None and isinstance(request.workers, int) else None
    reason = why_not_run(request, cluster=imagined is None)
    if reason is not None:
        return NotCollective(reason)
    if request.empty:
        return NotCollective("the product is empty or all zeros, nothing is multiplied")
    problem = make_problem(request)
    if imagined is not None:
        imaginary = [Worker(f"worker-{i}") for i in range(imagined)]
        known: Snapshot | None = Snapshot(imaginary, [], [None, None], [problem.engine_alone], [])
    else:
        assert client is not None
        known = snapshot(client, problem, [*map(under, (request.a, request.b), problem.arrays, problem.turned)])
    if known is None:
        return NotCollective("an asynchronous client can't be asked here; call explain from a synchronous one")
    return known.plan(problem, reordered=True)


def product(a: da.Array, b: da.Array) -> da.Array | str:
    """Return ``a @ b`` under `enable`, or why it is left to Dask's own function.

    Parameters
    ----------
    a, b
        Operands as `why_leave` lets them pass, of at most two dimensions.

    Raises
    ------
    ProjectedMemoryError
        It does not fit, and the config ``distmm.memory.exceeded`` says to raise.
    """
    exceeded = setting("memory.exceeded")
    if exceeded not in ("dask", "raise"):
        raise PlanError(f"config distmm.memory.exceeded is {exceeded!r}; expected 'dask' or 'raise'")
    request = parse(a, b)
    if request.empty:
        return cast(da.Array, multiply(request))
    problem = make_problem(request)
    try:
        made = _plan_now(problem, request.logger)
    except ProjectedMemoryError as error:
        if exceeded == "raise":
            raise
        request.logger.warning("left to Dask's own tasks: %s", error)
        return str(error)
    if made is not None and not made.worth_it:
        assert made.by_tasks is not None
        seconds = format_time(made.by_tasks.seconds), format_time(made.expected)
        return "its own tasks are expected to take {}, a run {}".format(*seconds)
    return request.without_dropped(cast(da.Array, result(problem, request.a, request.b, [])))


def _plan_now(problem: Problem, logger: logging.Logger) -> Plan | None:
    """Return the plan as the cluster is now, and log it; None if no scheduler can be asked, or has workers."""
    client = current_client()
    try:
        known = recent_snapshot(client, problem) if client is not None else None
    except NoWorkersError:
        return None  # There may be some when it is computed.
    if known is None:
        return None
    made = known.plan(problem)
    logger.info("%s, lazy\n%r", problem.name, made)
    return made
