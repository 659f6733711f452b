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
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dask.array as da
from dask.base import tokenize
from dask.utils import format_bytes, parse_bytes

from dask_distmm.arrays.choice import decide
from dask_distmm.arrays.outputs import as_kind, as_pair, finish_chunk, in_chunks, operand_sum, plain_tasks
from dask_distmm.arrays.quantize import widen_chunk
from dask_distmm.arrays.request import Request
from dask_distmm.config import dask_costs, parsed, read_options, wave_budget
from dask_distmm.errors import MissingEngineError, PlanError, ProjectedMemoryError, advice
from dask_distmm.graph.waves import can_be_made
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name, operand_dtype, sum_dtype, typed
from dask_distmm.planning import Batch, BatchPlan, Plan, Problem, Worker
from dask_distmm.planning.many import Pool, Sizes, choose_batch_route, item_plan
from dask_distmm.planning.model import Estimate, engine_alone
from dask_distmm.planning.tasks import run_overhead
from dask_distmm.planning.waves import Scheme, WavePlan, choose_scheme
from dask_distmm.runtime.chunks import array_kind, array_module
from dask_distmm.runtime.client import ask_roster, current_client, imagined_snapshot, recent_snapshot
from dask_distmm.runtime.messages import Snapshot
from dask_distmm.typing import WithAux

if TYPE_CHECKING:
    from distributed import Client

# Whole items, in plain tasks


def multiply_items(
    a: Any, b: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], formula: Formula
) -> Any:
    """Multiply chunks of whole items. Runs on a worker, as a plain task."""
    arrays = []
    for chunk, name in zip((a, b), dtypes[1:], strict=False):
        while isinstance(chunk, list):
            (chunk,) = chunk  # noqa: PLW2901
        arrays.append(typed(chunk, name))
    xp = array_module(next((x for x in (*arrays, *extras) if array_kind(x) == "cupy"), arrays[0]))
    operand = operand_dtype(*map(dtype_from_name, dtypes[1:3]))
    inner = sum_dtype(operand, dtype_from_name(dtypes[0]), max(1, arrays[0].shape[-1]))
    pair = zip(arrays, dtypes[1:], strict=False)
    acc = xp.matmul(*(widen_chunk(as_kind(xp, array), name, inner) for array, name in pair))
    return finish_chunk(acc, *extras, dtypes=(dtypes[0], inner.name, *dtypes[3:]), names=names, formula=formula)


def by_items(request: Request, cut: tuple[Sizes, ...]) -> WithAux:
    """Return D and the auxiliary outputs, by tasks that multiply some items each."""
    a, b, types, ndim = request.a, request.b, request.types, len(request.shape)
    chunks = (*cut, (request.shape[-2],), (request.shape[-1],))
    # Labels of axes: those of D, and one for k.
    first, second = (tuple(range(ndim - array.ndim, ndim)) for array in (a, b))
    whole = [in_chunks(x, (*cut[len(cut) + 2 - x.ndim :], x.shape[-2:-1], x.shape[-1:])) for x in (a, b)]
    operands = [(whole[0], (*first[:-1], ndim)), (whole[1], (*second[:-2], ndim, ndim - 1))]
    return plain_tasks(request, multiply_items, chunks, operands, (types.d, types.a, types.b))


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


def by_runs(request: Request, run: Callable[[list[Request]], list[Any]]) -> WithAux:
    """Return D and the auxiliary outputs, by collective runs: `run` returns the products of pairs of matrices."""
    formula, batch = request.formula, request.batch_shape
    if (one := as_one_product(request)) is not None:
        return _unshared(request, run([one])[0]), {}
    items: dict[Sizes, da.Array] = {}
    outputs: dict[str, dict[Sizes, da.Array]] = {}
    places = list(itertools.product(*map(range, batch)))
    for index, found in zip(places, run([item_of(request, index) for index in places]), strict=True):
        items[index], aux = as_pair(found)
        for name, array in aux.items():
            outputs.setdefault(name, {})[index] = array
    stacked = {name: _stack(arrays, batch) for name, arrays in outputs.items()}
    if formula.amax:
        stacked["result_amax"] = stacked["result_amax"].max()
    if formula.operand_sum:
        stacked[formula.operand_sum] = operand_sum(request)
    return _stack(items, batch), stacked


def _stack(arrays: Mapping[Sizes, da.Array], batch: Sizes, before: Sizes = ()) -> da.Array:
    """Return arrays as one, with the batch axes before their own."""
    if len(before) == len(batch):
        return arrays[before]
    return da.stack([_stack(arrays, batch, (*before, i)) for i in range(batch[len(before)])])


# Series of waves


def in_series(requests: Sequence[Request], arrays: tuple[da.Array, da.Array] | None) -> list[Scheme] | None:
    """Return the waves of products that do not fit into memory at once; None if they are runs of their own.

    `arrays` are those of which all are items; None if they have arrays of their own.
    """
    sources = [arrays or (x.lying["a"], x.lying["b"]) for x in requests]
    client = current_client()
    if client is None or len(requests) < 2:
        return None
    known = recent_snapshot(client, requests[0].problem)
    if known is None or fit_together([x for pair in sources for x in pair], made_bytes(requests), known.workers):
        return None
    return _schemes(requests, client, sources)


def fit_together(arrays: Sequence[da.Array], more: float, workers: Sequence[Worker]) -> bool:
    """Whether arrays, and some more bytes, are in memory at once without spilling; true where waves are off."""
    budget = wave_budget()
    needed = sum({array.name: array.nbytes for array in arrays}.values()) + more
    return budget is None or needed <= sum(map(budget.of, workers))


def made_bytes(requests: Sequence[Request]) -> float:
    """Return the bytes of D of products."""
    return sum(float(math.prod(request.shape)) * request.dtype.itemsize for request in requests)


def _schemes(
    requests: Sequence[Request], client: Client, sources: Sequence[tuple[da.Array, da.Array]]
) -> list[Scheme] | None:
    """Return the waves of products that follow one another; None if these can't be, or fit at once after all."""
    problems, distinct = [x.problem for x in requests], {array.name: array for pair in sources for array in pair}
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
    # For A and for B whether ranks can make the chunks of all products.
    can_a, can_b = (
        can_be_made(*(x.lying[name] for x, is_lazy in zip(requests, lazy, strict=True) if is_lazy[at]))
        for at, name in enumerate("ab")
    )
    try:
        for able in ((can_a, can_b), (False, False)):
            schemes = [
                choose_scheme(
                    problem, workers, is_lazy, budget, dask_costs(),
                    engine=known.engines, by_ranks=able, products=len(problems),
                )
                for problem, is_lazy in zip(problems, lazy, strict=True)
            ]  # fmt: skip
            if len({scheme.by_ranks for scheme in schemes}) == 1:
                break
    except (PlanError, ProjectedMemoryError) as error:
        requests[0].logger.info("%s", error)
        return None
    series = f"matmul-{tokenize([problem.name for problem in problems])}"
    before = itertools.accumulate((len(scheme.waves) for scheme in schemes), initial=0)
    return [dataclasses.replace(scheme, series=series, before=at) for scheme, at in zip(schemes, before, strict=False)]


def _less(worker: Worker, held: float) -> Worker:
    limit = max(1, int(worker.memory_limit - held)) if worker.memory_limit else 0
    return dataclasses.replace(worker, memory_limit=limit)


# The choice


def known_workers(problem: Problem, imagined: int | None) -> tuple[list[Worker], Snapshot | None]:
    """Return the workers, and the scheduler's answer for a collective run; None if the scheduler can't be asked."""
    if imagined is not None:
        workers = [Worker(f"worker-{i}") for i in range(imagined)]
        return workers, imagined_snapshot(problem, workers)
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
        known = imagined_snapshot(problem, workers)
    return list(known.workers), known


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
    problem = single.problem
    workers, known = known_workers(problem, imagined)
    task_bytes, overhead = int(parsed("batch.task-bytes", parse_bytes)), dask_costs().task
    read = read_options()
    batch = _batch_of(request)
    pool = Pool.of(workers, read.limit_fraction, request.kind)
    machine = read.machine(engine_alone(request.kind))
    chunks, by_items = item_plan(batch, pool, machine, task_bytes, overhead)
    fits = not pool.memory or batch.held_bytes <= pool.memory
    plan: Plan | WavePlan | None = None
    if known is not None:
        try:
            plan = decide(single, None if imagined else current_client(), known).made(problem)
        except (PlanError, ProjectedMemoryError):
            if request.batch == "collective" or needed or not fits:
                raise
    by_runs = None if plan is None else _estimated(plan, problem, runs)
    route, reason = choose_batch_route(request.batch, by_items if fits else None, by_runs, needed)
    if route == "items" and not fits:
        other = ["use batch='collective'"] if request.batch == "items" else []
        check_task_memory("one item of the batch", batch, pool, other, [worker.address for worker in workers])
    if route == "collective" and not one and not fit_together([request.a, request.b], made_bytes([request]), workers):
        reason += "; one after the other, if they are lazy, since they do not fit into memory together"
    return BatchPlan(batch, route, reason, chunks, by_items, by_runs, runs, plan)


def check_task_memory(
    what: str, batch: Batch, pool: Pool, remedies: Sequence[str], addresses: Sequence[str] = ("",)
) -> None:
    """Refuse tasks of one item that no worker can hold."""
    held = batch.held_bytes
    if pool.memory and held > pool.memory:
        raise ProjectedMemoryError(
            f"{what} would hold {format_bytes(held)} in its task, a worker may hold {format_bytes(pool.memory)} for "
            f"each task that it runs at a time. {advice([*remedies, 'use workers with more memory'])}",
            dict.fromkeys(addresses, held),
            dict.fromkeys(addresses, pool.memory),
        )


def _estimated(plan: Plan | WavePlan, problem: Problem, runs: int) -> Estimate | None:
    """Return the cost model's view of runs like one that is planned, one after the other."""
    if isinstance(plan, WavePlan):
        scheme = plan.scheme
        compute, seconds, peak, moved = scheme.run_seconds, scheme.seconds, scheme.peak_bytes, 0
    elif (found := plan.estimate) is None:
        return None
    else:
        compute, seconds, peak, moved = found.compute_seconds, found.seconds, found.peak_bytes, found.bytes_moved
    whole = runs * (seconds + run_overhead(problem, dask_costs()))
    return Estimate("collective", (runs, 1, 1), whole, runs * compute, runs * (seconds - compute), runs * moved, peak)


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

    chunk_count = a.npartitions + b.npartitions + sum(array.npartitions for _, array in request.extras)
    extra_bytes = sum(array.itemsize * math.prod(array.shape[-2:]) for _, array in request.extras)
    return Batch(
        batch, a_shape, b_shape, chunks, a.shape[-2], b.shape[-1], a.shape[-1], *request.types[:3],
        whole(a, a_chunks), whole(b, b_chunks), chunk_count, extra_bytes,
    )  # fmt: skip
