"""Operands of more than two dimensions: the choice between plain tasks and collective runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import dask.array as da
from dask.utils import format_bytes, parse_bytes

from dask_distmm.arrays.choice import decide
from dask_distmm.arrays.items import as_one_product, item_of
from dask_distmm.arrays.request import Request, problem_of_request
from dask_distmm.arrays.series import fit_together, made_bytes
from dask_distmm.config import dask_costs, parsed, read_options
from dask_distmm.errors import MissingEngineError, PlanError, ProjectedMemoryError, advice
from dask_distmm.planning import Batch, BatchEstimate, BatchPlan, Plan, Problem, Worker
from dask_distmm.planning.many import Pool, Sizes, choose_batch_way, item_plan
from dask_distmm.planning.model import engine_alone
from dask_distmm.planning.tasks import product_overhead
from dask_distmm.planning.waves import WavePlan
from dask_distmm.runtime.client import Snapshot, current_client, recent_snapshot


def task_options() -> tuple[int, float]:
    """Return how many bytes a plain task may hold, and what it costs in seconds."""
    return int(parsed("batch.task-bytes", parse_bytes)), dask_costs().task


def known_workers(problem: Problem, imagined: int | None) -> tuple[list[Worker], Snapshot | None]:
    """Return the workers, and the scheduler's answer for a collective run; None if the scheduler can't be asked."""
    if imagined is not None:
        workers = [Worker(f"worker-{i}") for i in range(imagined)]
        return workers, Snapshot(workers, [], [], [problem.engine_alone], [])
    client = current_client()
    assert client is not None
    try:
        known = recent_snapshot(client, problem)
    except MissingEngineError:
        # CuPy chunks where no worker has the GPU engine: plain tasks need CuPy only.
        if problem.array != "cupy":
            raise
        return _counted(client), None
    if known is None:
        # An asynchronous client can't ask now; what it knows already must do.
        workers = _counted(client)
        known = Snapshot(workers, [], [], [problem.engine_alone], [])
    return known.workers, known


def _counted(client: Any) -> list[Worker]:
    """Return workers as many as there are, each an average one."""
    info = client.scheduler_info(n_workers=0)
    count = int(info.get("n_workers") or len(info["workers"]) or 1)
    threads, memory = (int(info.get(name) or 0) // count for name in ("total_threads", "total_memory"))
    return [Worker(f"worker-{i}", max(1, threads), memory) for i in range(count)]


def plan_batch(request: Request, needed: Sequence[str], imagined: int | None) -> BatchPlan:
    """Choose the way of a batch that can run."""
    one = as_one_product(request)
    runs = 1 if one else math.prod(request.batch_shape)
    single = one or item_of(request, (0,) * len(request.batch_shape))
    problem = problem_of_request(single)
    workers, known = known_workers(problem, imagined)
    task_bytes, overhead = task_options()
    read = read_options()
    batch = _batch_of(request)
    pool = Pool.of(workers, read.limit_fraction, request.kind)
    machine = read.machine(engine_alone(request.kind))
    chunks, by_items = item_plan(batch, pool, machine, task_bytes, overhead)
    fits = not pool.memory or batch.held_bytes <= pool.memory
    plan: Plan | WavePlan | None = None
    if known is not None:
        try:
            plan = decide(single, problem, None if imagined else current_client(), known).made(problem)
        except (PlanError, ProjectedMemoryError):
            if request.batch == "collective" or needed or not fits:
                raise
    by_runs = None if plan is None else _estimated(plan, problem, runs)
    way, reason = choose_batch_way(request.batch, by_items if fits else None, by_runs, needed)
    if way == "items" and not fits:
        other = ["use batch='collective'"] if request.batch == "items" else []
        raise ProjectedMemoryError(
            f"one item of the batch would hold {format_bytes(batch.held_bytes)} in its task, a worker may hold "
            f"{format_bytes(pool.memory)} for each task that it runs at a time. "
            f"{advice([*other, 'use workers with more memory'])}",
            {worker.address: batch.held_bytes for worker in workers},
            {worker.address: pool.memory for worker in workers},
        )
    if way == "collective" and not one and not fit_together([request.a, request.b], made_bytes([request]), workers):
        reason += "; one after the other, if they are lazy, since they do not fit into memory together"
    return BatchPlan(batch, way, reason, chunks, by_items, by_runs, runs, plan)


def _estimated(plan: Plan | WavePlan, problem: Problem, runs: int) -> BatchEstimate | None:
    """Return the cost model's view of runs like one that is planned, one after the other."""
    tasks = runs * (1 + math.prod(problem.chunk_counts("d")))
    overhead = runs * product_overhead(problem, dask_costs())
    if isinstance(plan, WavePlan):
        scheme = plan.scheme
        compute, beside, peak, moved = scheme.run_seconds, scheme.seconds - scheme.run_seconds, scheme.peak_bytes, 0
    elif plan.estimate is None:
        return None
    else:
        compute = plan.estimate.compute_seconds
        beside, peak, moved = plan.estimate.seconds - compute, plan.estimate.peak_bytes, plan.estimate.bytes_moved
    seconds = runs * (compute + beside) + overhead
    return BatchEstimate(
        "collective", seconds, runs * compute, runs * beside, overhead, tasks, runs, peak, runs * moved
    )


def _batch_of(request: Request) -> Batch:
    """Return the batch as planning sees it."""
    a, b, batch = request.a, request.b, request.batch_shape

    def padded(x: da.Array) -> tuple[Sizes, list[Sizes]]:
        missing = len(batch) + 2 - x.ndim
        return (1,) * missing + x.shape[:-2], [(1,)] * missing + list(x.chunks[:-2])

    (a_shape, a_chunks), (b_shape, b_chunks) = padded(a), padded(b)
    first, second = (a_chunks, b_chunks) if a.nbytes >= b.nbytes else (b_chunks, a_chunks)
    chunks = tuple(one if sum(one) == size else other for one, other, size in zip(first, second, batch, strict=True))

    def whole(x: da.Array, found: Sequence[Sizes]) -> bool:
        cut = all(sizes in ((1,), want) for sizes, want in zip(found, chunks, strict=True))
        return cut and x.numblocks[-2:] == (1, 1)

    return Batch(
        batch,
        a_shape,
        b_shape,
        chunks,
        a.shape[-2],
        b.shape[-1],
        a.shape[-1],
        request.types.a,
        request.types.b,
        request.types.d,
        whole(a, a_chunks),
        whole(b, b_chunks),
        a.npartitions + b.npartitions + sum(array.npartitions for _, array in request.extras),
        sum(array.itemsize * math.prod(array.shape[-2:]) for _, array in request.extras),
    )
