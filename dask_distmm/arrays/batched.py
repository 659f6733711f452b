"""Operands of more than two dimensions: checks, and the choice between plain tasks and collective runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.utils import format_bytes, parse_bytes

from dask_distmm import api
from dask_distmm.arrays import formula
from dask_distmm.arrays import request as problems
from dask_distmm.arrays.dispatch import dask_matmul
from dask_distmm.arrays.items import Product, by_items, by_runs, item, shared
from dask_distmm.arrays.quantize import operands
from dask_distmm.config import dask_costs, parsed, read_options, setting
from dask_distmm.engines.base import log
from dask_distmm.errors import MissingEngineError, PlanError, ProjectedMemoryError
from dask_distmm.numeric.types import resolve_types
from dask_distmm.planning import Batch, BatchEstimate, BatchPlan, Plan, Problem, Worker
from dask_distmm.planning.dask_tasks import around
from dask_distmm.planning.many.batches import Pool, Sizes, choose, item_plan
from dask_distmm.runtime.client import Snapshot, current_client, recent_snapshot

__all__ = [
    "BATCH",
    "Product",
    "check_name",
    "demands",
    "explain",
    "known_workers",
    "matmul",
    "task_options",
]

# The ways that can be asked for.
BATCH = ("auto", "items", "collective")


def check_name(batch: str | None) -> str:
    """Return a valid name of a way.

    Raises
    ------
    PlanError
        There is none of that name.
    """
    batch = "auto" if batch is None else batch
    if batch not in BATCH:
        raise PlanError(f"unknown batch {batch!r}; known are {', '.join(map(repr, BATCH))}")
    return batch


def matmul(a: Any, b: Any, c: Any, **options: Any) -> Any:
    """Do what `dask_distmm.matmul` says, for operands of which one has more than two dimensions.

    Parameters
    ----------
    a, b, c, options
        As there.
    """
    needed, rest = demands(options), _rest(options)
    product = _parse(a, b, c, rest)
    if product.empty and product.spec.plain and product.types.usual:
        return _outside(product, da.zeros(product.shape, dtype=product.dtype), {})
    if product.empty or why_not(product, cluster=True) is not None:
        if product.spec.plain and product.types.usual:
            # The very function that Dask would have called.
            found = dask_matmul(product.a, product.b)
        else:
            found = formula.without_a_run(product.a, product.b, product.spec, product.extras, product.types)
        d, aux = found if isinstance(found, tuple) else (found, {})
        return _outside(product, d, aux)
    made = _plan(product, rest, needed, imagined=None)
    if made.way == "items":
        (rest["logger"] or log).info("a batch, lazy\n%r", made)
        d, aux = by_items(product, made.chunks)
    else:
        names = ["alpha", "beta", "epilog", "bias_axis", "result_amax", "a_type", "b_type", "result_type"]
        names += ["compute_type", "method", "engine", "workers", "distributions", "logger"]
        run = functools.partial(
            api.matmul,
            **{name: rest[name] for name in names},
            quantization_scales=_scales_of_items(product, rest["quantization_scales"]),
        )
        d, aux = by_runs(product, run)
    return _outside(product, d, aux)


def _scales_of_items(product: Product, scales: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the scales of each item's multiply: without C's where C is not read."""
    with_c = any(name == "c" for name, _ in product.extras)
    return None if scales is None else {key: scale for key, scale in scales.items() if key != "c" or with_c}


def explain(a: Any, b: Any, c: Any, **options: Any) -> BatchPlan | api.NotCollective:
    """Do what `dask_distmm.explain` says, for operands of which one has more than two dimensions.

    Parameters
    ----------
    a, b, c, options
        As there.
    """
    needed, rest = demands(options), _rest(options)
    product = _parse(a, b, c, rest)
    imagined = rest["workers"] if current_client() is None and isinstance(rest["workers"], int) else None
    reason = why_not(product, cluster=imagined is None)
    if reason is not None:
        return api.NotCollective(reason)
    if product.empty:
        return api.NotCollective("the product is empty or all zeros, nothing is multiplied")
    if imagined is not None:
        needed = [text for text in needed if not text.startswith("workers=")]
    return _plan(product, rest, needed, imagined)


def why_not(product: Product, *, cluster: bool) -> str | None:
    """Return why Dask's own function has to do it, or None."""
    most = max(product.a.ndim, product.b.ndim)
    reason = api.why_not(product.a, product.b, product.types, cluster=cluster, most=most)
    return reason or formula.unfit(product.extras)


def demands(options: Mapping[str, Any]) -> list[str]:
    """Return the options given with the call that only collective runs can meet."""
    found = [f"{name}={options[name]!r}" for name in ("method", "engine") if options[name] not in (None, "auto")]
    names = ("workers", "distributions", "compute_type")
    return found + [f"{name}={options[name]!r}" for name in names if options.get(name) is not None]


def _rest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, checked, with what the configuration says where they were left out."""
    method, engine = problems.check_names(options["method"], options["engine"])
    return {**options, "method": method, "engine": engine, "batch": check_name(options["batch"])}


def _parse(a: Any, b: Any, c: Any, options: Mapping[str, Any]) -> Product:
    """Check what was given.

    Raises
    ------
    PlanError
        Shapes do not match or broadcast, or something else does not fit.
    """
    a, b = operands(a, b)
    a, b = (formula.apply_op(name, x, options[f"op_{name}"]) for name, x in (("a", a), ("b", b)))
    problems.check_shapes(a, b)
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise PlanError(
            f"shapes {a.shape} and {b.shape} don't match: their batch axes {a.shape[:-2]} and {b.shape[:-2]} "
            "must be equal, or 1 where they differ"
        ) from None
    types = resolve_types(
        a.dtype,
        b.dtype,
        options["a_type"],
        options["b_type"],
        options["result_type"],
        options["compute_type"],
        setting("compute-type"),
    )
    spec, extras = formula.parse(
        a,
        b,
        c,
        options["alpha"],
        options["beta"],
        options["epilog"],
        options["epilog_inputs"] or {},
        options["bias_axis"],
        options["result_amax"],
        types,
        options["quantization_scales"],
    )
    dropped = tuple(axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1)
    a, b = (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    shape = tuple(
        size for axis, size in enumerate((*batch, a.shape[-2], b.shape[-1]), -len(batch) - 2) if axis not in dropped
    )
    out_chunks = options["out_chunks"]
    if out_chunks is not None:
        try:
            out_chunks = normalize_chunks(out_chunks, shape, dtype=types.operand)
        except (ValueError, TypeError) as error:
            raise PlanError(f"out_chunks={out_chunks!r} does not fit the result's shape {shape}: {error}") from error
    return Product(a, b, types, spec, extras, dropped, out_chunks)


def _outside(product: Product, d: da.Array, aux: dict[str, da.Array]) -> Any:
    """Return the result as the caller wants it."""
    if product.dropped:
        d = d.squeeze(product.dropped)
    if product.out_chunks is not None:
        d = d.rechunk(product.out_chunks, method="tasks")
    return (d, aux) if aux else d


# The choice


def task_options() -> tuple[int, float]:
    """Return how many bytes a plain task may hold, and what it costs in seconds.

    Raises
    ------
    PlanError
        The configuration has something else there.
    """
    return int(parsed("batch.task-bytes", parse_bytes)), dask_costs().task


def known_workers(problem: Problem, imagined: int | None) -> tuple[list[Worker], Snapshot | None]:
    """Return who could work, and what the scheduler says of a collective run; None if it can't be asked.

    Parameters
    ----------
    problem
        A multiply that would run.
    imagined
        How many workers to imagine where there is no cluster.
    """
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


def _plan(product: Product, options: Mapping[str, Any], needed: Sequence[str], imagined: int | None) -> BatchPlan:
    """Choose the way."""
    first, pair = (0,) * len(product.batch), shared(product)
    a, b = pair or (item(x, first, product.batch) for x in (product.a, product.b))
    runs = 1 if pair else math.prod(product.batch)
    extras = [(name, item(array, first, product.batch)) for name, array in product.extras]
    asked = problems.check_distributions(options["distributions"])
    problem = problems.make_problem(
        a,
        b,
        options["method"],
        options["engine"],
        None,
        options["workers"],
        product.spec,
        extras,
        product.types,
        asked,
    )
    workers, known = known_workers(problem, imagined)
    task_bytes, overhead = task_options()
    read = read_options()
    batch = _describe(product)
    pool = Pool.of(workers, read.limit_fraction, product.kind)
    machine = read.machine("cublasmp" if product.kind == "cupy" else "numpy")
    chunks, by_items = item_plan(batch, pool, machine, task_bytes, overhead)
    fits = not pool.memory or batch.held_bytes <= pool.memory
    plan: Plan | None = None
    by_runs: BatchEstimate | None = None
    if known is not None:
        try:
            plan = known.plan(problem)
        except (PlanError, ProjectedMemoryError):
            if options["batch"] == "collective" or needed or not fits:
                raise
    if plan is not None and plan.estimate is not None:
        each = plan.estimate
        tasks = runs * (1 + math.prod(problem.chunk_counts("d")))
        overhead = runs * around(problem, dask_costs())
        seconds = runs * each.seconds + overhead
        by_runs = BatchEstimate(
            "collective",
            seconds,
            runs * each.compute_seconds,
            runs * (each.seconds - each.compute_seconds),
            overhead,
            tasks,
            runs,
            each.peak_bytes,
        )
    way, reason = choose(options["batch"], by_items if fits else None, by_runs, needed)
    if way == "items" and not fits:
        raise ProjectedMemoryError(
            f"one item of the batch would hold {format_bytes(batch.held_bytes)} in its task, a worker may hold "
            f"{format_bytes(pool.memory)} for each task that it runs at a time. Use batch='collective', or workers with "
            "more memory",
            {worker.address: batch.held_bytes for worker in workers},
            {worker.address: pool.memory for worker in workers},
        )
    return BatchPlan(batch, way, reason, chunks, by_items, by_runs, runs, plan)


def _describe(product: Product) -> Batch:
    """Return what planning needs to know."""
    a, b, batch = product.a, product.b, product.batch

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
        product.types.a,
        product.types.b,
        product.types.d,
        whole(a, a_chunks),
        whole(b, b_chunks),
        a.npartitions + b.npartitions + sum(array.npartitions for _, array in product.extras),
        sum(array.itemsize * math.prod(array.shape[-2:]) for _, array in product.extras),
    )
