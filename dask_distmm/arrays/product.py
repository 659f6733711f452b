"""The way of a product: a request is left to Dask's own operations, or chosen for, and then built.

::

    request  ->  why_not_run, choice.decide_now, batched.plan_batch, series.in_series  ->  the graph
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import dask.array as da

from dask_distmm.arrays.batched import by_items, by_runs, in_series, plan_batch
from dask_distmm.arrays.choice import by_tasks, decide, decide_now, why_leave, why_left, why_not_run
from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.arrays.kinds import check_planned, planning
from dask_distmm.arrays.outputs import as_pair, run_outputs, without_a_run
from dask_distmm.arrays.request import Request
from dask_distmm.graph.waves import build_waves
from dask_distmm.planning import Worker
from dask_distmm.planning.placement import Explanation
from dask_distmm.planning.waves import WavePlan
from dask_distmm.runtime.client import ask_roster, current_client, imagined_snapshot
from dask_distmm.runtime.messages import Snapshot


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


def multiply(request: Request, *, enabled: bool = False) -> Any:
    """Return D, and the auxiliary outputs if there are any.

    Under `enable`, of a product that can run (`why_not`), it is NotImplemented where a product of matrices is better
    left to Dask's own function.
    """
    if request.is_batch:
        check_planned("batches need more of Dask than it has there")
    reason = None if enabled else check_planned(why_not_run(request, cluster=request.is_batch or not planning()))
    if reason is not None or request.empty:
        return _delivered(request, _without_a_run(request, possible=reason is None))
    if request.is_batch:
        made = plan_batch(request, request.demands, imagined=None)
        if made.route == "items":
            request.logger.info("a batch, lazy\n%r", made)
            return _delivered(request, by_items(request, made.chunks))
        return _delivered(request, by_runs(request, lambda items: multiply_all(items, (request.a, request.b))))
    decision = decide_now(request, enabled=enabled)
    if decision.left:
        return NotImplemented
    parts = by_tasks(request, decision.known) if enabled else None
    found = run_outputs(request, decision.scheme, by_tasks=parts)
    return request.without_dropped(found) if request.dropped else found


def multiply_all(requests: Sequence[Request], arrays: tuple[da.Array, da.Array] | None = None) -> list[Any]:
    """Return D, and the auxiliary outputs if there are any, of each of some products of matrices that can run.

    All may be items of two arrays.
    """
    if planning() or (schemes := in_series(requests, arrays)) is None:
        return list(map(multiply, requests))
    first = WavePlan(requests[0].problem, schemes[0])
    requests[0].logger.info("%d products one after the other, lazy\n%r", len(requests), first)
    every = list(zip(requests, schemes, strict=True))
    waves = build_waves([(x.problem, scheme, x.lying) for x, scheme in every])
    return [x.without_dropped(run_outputs(x, scheme, waves)) for x, scheme in every]


def _without_a_run(request: Request, *, possible: bool) -> Any:
    """Return what Dask's own operations make where nothing is multiplied here, though that may be possible."""
    a, b = request.a, request.b
    if not request.plain:
        return without_a_run(request)
    if request.empty and (possible or request.is_batch):
        return da.zeros(request.shape, dtype=request.dtype, chunks="auto" if request.is_batch else request.chunks)
    # The very function that Dask would have called.
    return dask_matmul(a, b).astype(request.dtype)


def _delivered(request: Request, found: Any) -> Any:
    """Return D in the axes and chunks that were asked for, and the auxiliary outputs if there are any."""
    d, aux = as_pair(found)
    d = request.without_dropped(d)
    if request.out_chunks is not None:
        d = d.rechunk(request.out_chunks, method="tasks")
    return (d, aux) if aux else d


def explain_product(request: Request) -> Explanation:
    """Return the plan for a product on the cluster as it is now, or why there is none."""
    client = current_client()
    imagined = request.workers if client is None and isinstance(request.workers, int) else None
    reason = why_not_run(request, cluster=imagined is None)
    if reason is not None:
        return NotCollective(reason)
    if request.empty:
        return NotCollective("the product is empty or all zeros, nothing is multiplied")
    if request.is_batch:
        needed = [text for text in request.demands if imagined is None or not text.startswith("workers=")]
        return plan_batch(request, needed, imagined)
    problem = request.problem
    if imagined is not None:
        known: Snapshot | None = imagined_snapshot(problem, [Worker(f"worker-{i}") for i in range(imagined)])
    else:
        assert client is not None
        known = ask_roster(client, problem.demand, [request.lying["a"], request.lying["b"]])
    if known is None:
        return NotCollective("an asynchronous client can't be asked here; call explain from a synchronous one")
    decision = decide(request, client, known, reordered=True)
    found = decision.made(problem)
    if isinstance(found, WavePlan) or not request.plain or request.named:
        return found
    left = why_leave(request) or why_left(request, decision)
    return dataclasses.replace(found, left=left)
