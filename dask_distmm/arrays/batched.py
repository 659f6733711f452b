"""Operands of more than two dimensions: plain tasks of whole items, or collective runs that are put together.

::

    A[0..3]  B[0..3] -> np.matmul -> D[0..3]        items: the batch axes are cut, items are whole
    A[4..7]  B[4..7] -> np.matmul -> D[4..7]

    A[0]  B[0] -> barrier -> D[0]      collective: a run for each item, stacked;
    A[1]  B[1] -> barrier -> D[1]      one run for all if they share A or B

Products that are asked for together are one series of waves where they do not fit into memory at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.utils import format_bytes, parse_bytes

from dask_distmm.arrays.choice import decide
from dask_distmm.arrays.outputs import as_they_lie, operand_sum, output_meta
from dask_distmm.arrays.request import Request, problem_of_request
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.config import dask_costs, parsed, read_options, wave_budget
from dask_distmm.errors import MissingEngineError, PlanError, ProjectedMemoryError, advice
from dask_distmm.graph.waves import can_be_made
from dask_distmm.numeric.epilogs import Formula, finish
from dask_distmm.numeric.types import FP8, carried, decode, dtype_from_name, operand_dtype, stored, sum_dtype, typed
from dask_distmm.planning import Batch, BatchEstimate, BatchPlan, Plan, Problem, Worker
from dask_distmm.planning.many import Pool, Sizes, choose_batch_route, item_plan
from dask_distmm.planning.model import engine_alone
from dask_distmm.planning.tasks import run_overhead
from dask_distmm.planning.waves import Scheme, WavePlan, choose_scheme
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import Snapshot, ask_roster, current_client, recent_snapshot

if TYPE_CHECKING:
    from distributed import Client

# Whole items, in plain tasks


def multiply_items(
    a: Any, b: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], formula: Formula, several: bool
) -> Any:
    """Multiply chunks of whole items. Runs on a worker, as a plain task."""
    arrays = []
    for chunk, name in zip((a, b, *extras), dtypes[1:], strict=True):
        while isinstance(chunk, list):
            (chunk,) = chunk  # noqa: PLW2901
        arrays.append(typed(chunk, name))
    xp: Any = np
    if any(array_kind(array) == "cupy" for array in arrays):
        xp = importlib.import_module("cupy")
        arrays = [array if array_kind(array) == "cupy" else xp.asarray(array) for array in arrays]
    register_serializers()
    dtype = dtype_from_name(dtypes[0])
    operand = operand_dtype(*map(dtype_from_name, dtypes[1:3]))
    inner = sum_dtype(operand, dtype, max(1, arrays[0].shape[-1]))
    acc = xp.matmul(
        *(_in_compute_type(xp, array, name, inner) for array, name in zip(arrays[:2], dtypes[1:], strict=False))
    )
    aux: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        if not formula.trivial:
            acc, aux = finish(xp, formula, acc, dict(zip(names, arrays[2:], strict=True)))
        d = stored(xp, acc, dtypes[0], fp8_bytes=xp is not np)
    if not several:
        return d
    return (d, *(aux[name].astype(formula.dtype_of(name, dtype), copy=False) for name in formula.per_element))


def _in_compute_type(xp: Any, array: Any, name: str, dtype: np.dtype) -> Any:
    """Return A or B in the type that is multiplied and summed in, which has all numbers of FP8."""
    if name in FP8 and array.dtype == np.uint8:
        return decode(xp, array, name, dtype)
    return array.astype(dtype, copy=False)


def by_items(request: Request, cut: tuple[Sizes, ...]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by tasks that multiply some items each."""
    a, b, formula, ndim = request.a, request.b, request.formula, len(request.shape)
    chunks = (*cut, (request.shape[-2],), (request.shape[-1],))
    # Labels of axes: those of D, and one for k.
    labels = tuple(range(ndim))
    arguments: list[Any] = []
    for name, array in (("a", a), ("b", b), *request.extras):
        wanted = {
            axis: sizes if array.shape[axis] != 1 else (1,)
            for axis, sizes in zip(range(-array.ndim, -2), chunks[ndim - array.ndim :], strict=False)
        }
        # All at once they could not be used apart, and a shuffle of Dask's can't take CuPy chunks.
        whole = array.rechunk(
            {axis % array.ndim: sizes for axis, sizes in wanted.items()} | {array.ndim - 2: -1, array.ndim - 1: -1},
            method="tasks",
        )
        own = labels[ndim - array.ndim :]
        arguments += [whole, {"a": (*own[:-1], ndim), "b": (*own[:-2], ndim, ndim - 1)}.get(name, own)]
    held = carried(request.types.d, request.kind)
    meta = meta_from_array(b._meta if request.kind == array_kind(b._meta) else a._meta, ndim=ndim, dtype=held)
    several = bool(formula.per_element)
    made = da.blockwise(
        multiply_items,
        labels,
        *arguments,
        name=None,
        token="matmul-items",
        adjust_chunks=dict(enumerate(chunks)),
        align_arrays=False,
        concatenate=False,
        meta=meta,
        dtype=held,
        dtypes=(request.types.d, request.types.a, request.types.b, *(x.dtype.name for _, x in request.extras)),
        names=tuple(name for name, _ in request.extras),
        formula=formula,
        several=several,
    )
    aux: dict[str, da.Array] = {}
    if several:
        for number, name in enumerate(formula.per_element, start=1):
            aux[name] = _output(request, made, name, number)
        made = made.map_blocks(operator.itemgetter(0), dtype=held, meta=meta)
    if formula.operand_sum:
        aux[formula.operand_sum] = operand_sum(formula, a, b, request.dtype)
    return made, aux


def _output(request: Request, made: da.Array, name: str, number: int) -> da.Array:
    """Return one auxiliary output of tasks that return tuples."""
    formula = request.formula
    dtype = formula.dtype_of(name, request.dtype)
    keeps = formula.keeps(name)
    chunks = [sizes if kept else (1,) * len(sizes) for sizes, kept in zip(made.chunks[-2:], keeps, strict=True)]
    batch = made.chunks[:-2] if name != "result_amax" else tuple((1,) * len(sizes) for sizes in made.chunks[:-2])
    array = made.map_blocks(
        operator.itemgetter(number),
        dtype=dtype,
        chunks=(*batch, *chunks),
        meta=output_meta(made, dtype),
    )
    if name == "result_amax":
        return array.max()
    if name != formula.sums:
        return array
    array = array.squeeze(formula.sum_axis - 2)
    return array if request.types.d in FP8 else array.astype(request.dtype)


# Collective runs


def as_one_product(request: Request) -> Request | None:
    """Return the product of two matrices that is the whole batch, if there is one.

    There is one if all items share B (they lie below one another then) or A (beside one another), and the formula looks
    at each element of D for itself.
    """
    a, b, formula = request.a, request.b, request.formula
    if request.extras or formula.per_element or formula.operand_sum:
        return None
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        return _of_matrices(request, a.reshape((-1, k)), b.reshape((k, n)))
    if math.prod(a.shape[:-2]) == 1:
        return _of_matrices(request, a.reshape((m, k)), da.moveaxis(b, -2, 0).reshape((k, -1)))
    return None


def _of_matrices(request: Request, a: da.Array, b: da.Array, extras: Sequence[tuple[str, da.Array]] = ()) -> Request:
    """Return the same request for two matrices."""
    return dataclasses.replace(request, a=a, b=b, extras=extras, out_chunks=None, dropped=(), batch="auto")


def _unshared(request: Request, d: da.Array) -> da.Array:
    """Return D of the batch from D of the product that `as_one_product` has returned."""
    m, n = request.shape[-2:]
    if math.prod(request.b.shape[:-2]) == 1:
        return d.reshape(request.shape)
    return da.moveaxis(d.reshape((m, *request.batch_shape, n)), 0, -2)


def item_of(request: Request, index: Sizes) -> Request:
    """Return the product of one item of a batch."""

    def item(array: da.Array) -> da.Array:
        own = index[len(index) - (array.ndim - 2) :]
        return array[tuple(0 if size == 1 else i for i, size in zip(own, array.shape[:-2], strict=True))]

    extras = [(name, item(array)) for name, array in request.extras]
    return _of_matrices(request, item(request.a), item(request.b), extras)


def by_runs(request: Request, run: Callable[[list[Request]], list[Any]]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by collective runs: `run` returns the products of pairs of matrices."""
    formula, batch = request.formula, request.batch_shape
    if (one := as_one_product(request)) is not None:
        return _unshared(request, run([one])[0]), {}
    items: dict[Sizes, da.Array] = {}
    outputs: dict[str, dict[Sizes, da.Array]] = {}
    places = list(itertools.product(*map(range, batch)))
    for index, found in zip(places, run([item_of(request, index) for index in places]), strict=True):
        items[index], aux = found if isinstance(found, tuple) else (found, {})
        for name, array in aux.items():
            outputs.setdefault(name, {})[index] = array
    stacked = {name: _stack(arrays, batch) for name, arrays in outputs.items()}
    if formula.amax:
        stacked["result_amax"] = stacked["result_amax"].max()
    if formula.operand_sum:
        stacked[formula.operand_sum] = operand_sum(formula, request.a, request.b, request.dtype)
    return _stack(items, batch), stacked


def _stack(arrays: Mapping[Sizes, da.Array], batch: Sizes, before: Sizes = ()) -> da.Array:
    """Return arrays as one, with the batch axes before their own."""
    if len(before) == len(batch):
        return arrays[before]
    return da.stack([_stack(arrays, batch, (*before, i)) for i in range(batch[len(before)])])


# Series of waves


def in_series(requests: Sequence[Request], sources: Sequence[tuple[da.Array, da.Array]]) -> list[Scheme] | None:
    """Return the waves of products that do not fit into memory at once; None if they are runs of their own."""
    client = current_client()
    if client is None or len(requests) < 2:
        return None
    first = problem_of_request(requests[0])
    known = recent_snapshot(client, first)
    if known is None or fit_together([x for pair in sources for x in pair], made_bytes(requests), known.workers):
        return None
    return _schemes(requests, [first, *map(problem_of_request, requests[1:])], client, sources)


def fit_together(arrays: Sequence[da.Array], more: float, workers: Sequence[Worker]) -> bool:
    """Whether arrays, and some more bytes, are in memory at once without spilling; true where waves are off."""
    budget = wave_budget()
    needed = sum({array.name: array.nbytes for array in arrays}.values()) + more
    return budget is None or needed <= sum(map(budget.of, workers))


def made_bytes(requests: Sequence[Request]) -> float:
    """Return the bytes of D of products."""
    return sum(float(math.prod(request.shape)) * request.dtype.itemsize for request in requests)


def _schemes(
    requests: Sequence[Request],
    problems: Sequence[Problem],
    client: Client,
    sources: Sequence[tuple[da.Array, da.Array]],
) -> list[Scheme] | None:
    """Return the waves of products that follow one another; None if these can't be, or fit at once after all."""
    distinct = {array.name: array for pair in sources for array in pair}
    known, budget = ask_roster(client, problems[0].demand, list(distinct.values())), wave_budget()
    if known is None or budget is None or len({problem.demand for problem in problems}) > 1:
        return None
    there = {name for name, where in zip(distinct, known.placed, strict=True) if where is not None}
    # That stays in memory.
    held = sum(distinct[name].nbytes for name in there) / len(known.workers)
    workers = [_less(worker, held / min(budget.managed, budget.process)) for worker in known.workers]
    if fit_together([x for name, x in distinct.items() if name not in there], made_bytes(requests), workers):
        return None
    lazy = [(a.name not in there, b.name not in there) for a, b in sources]
    try:
        for able in (_can_be_made(requests, problems, lazy), (False, False)):
            chosen: dict[Any, Scheme] = {}
            for problem, is_lazy in zip(problems, lazy, strict=True):
                if (key := _alike(problem, is_lazy)) not in chosen:
                    chosen[key] = choose_scheme(
                        problem, workers, is_lazy, budget, dask_costs(),
                        engine=known.engines, by_ranks=able, products=len(problems),
                    )  # fmt: skip
            if len({scheme.by_ranks for scheme in chosen.values()}) == 1:
                break
    except (PlanError, ProjectedMemoryError) as error:
        requests[0].logger.info("%s", error)
        return None
    return _numbered([chosen[_alike(*one)] for one in zip(problems, lazy, strict=True)], problems)


def _less(worker: Worker, held: float) -> Worker:
    limit = max(1, int(worker.memory_limit - held)) if worker.memory_limit else 0
    return dataclasses.replace(worker, memory_limit=limit)


def _can_be_made(
    requests: Sequence[Request], problems: Sequence[Problem], lazy: Sequence[tuple[bool, bool]]
) -> tuple[bool, bool]:
    """Return for A and for B whether ranks can make the chunks of all products."""
    lying = [as_they_lie(problem, one.a, one.b, ()) for one, problem in zip(requests, problems, strict=True)]

    def can(at: int) -> bool:
        return can_be_made(*(arrays["ab"[at]] for arrays, is_lazy in zip(lying, lazy, strict=True) if is_lazy[at]))

    return can(0), can(1)


def _alike(problem: Problem, lazy: tuple[bool, bool]) -> Any:
    """Return a key that products have in common which have the same waves."""
    chunks = problem.a_chunks, problem.b_chunks, problem.out_chunks
    return chunks, problem.a_dtype, problem.b_dtype, problem.dtype, problem.shared, lazy


def _numbered(schemes: Sequence[Scheme], problems: Sequence[Problem]) -> list[Scheme]:
    """Return schemes with the name of their series and their place there."""
    series, before, found = f"matmul-{tokenize([problem.name for problem in problems])}", 0, []
    for scheme in schemes:
        found.append(dataclasses.replace(scheme, series=series, before=before))
        before += len(scheme.waves)
    return found


# The choice


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
    """Choose the route of a batch that can run."""
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
    route, reason = choose_batch_route(request.batch, by_items if fits else None, by_runs, needed)
    if route == "items" and not fits:
        other = ["use batch='collective'"] if request.batch == "items" else []
        raise ProjectedMemoryError(
            f"one item of the batch would hold {format_bytes(batch.held_bytes)} in its task, a worker may hold "
            f"{format_bytes(pool.memory)} for each task that it runs at a time. "
            f"{advice([*other, 'use workers with more memory'])}",
            {worker.address: batch.held_bytes for worker in workers},
            {worker.address: pool.memory for worker in workers},
        )
    if route == "collective" and not one and not fit_together([request.a, request.b], made_bytes([request]), workers):
        reason += "; one after the other, if they are lazy, since they do not fit into memory together"
    return BatchPlan(batch, route, reason, chunks, by_items, by_runs, runs, plan)


def _estimated(plan: Plan | WavePlan, problem: Problem, runs: int) -> BatchEstimate | None:
    """Return the cost model's view of runs like one that is planned, one after the other."""
    tasks = runs * (1 + math.prod(problem.chunk_counts("d")))
    overhead = runs * run_overhead(problem, dask_costs())
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
