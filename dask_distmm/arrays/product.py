"""Products: a request is left to Dask's own operations, or chosen for, and then built; also batches and groups.

::

    request  ->  why_not_run, choice.decide_now, plan_batch, in_series, _plan_groups  ->  the graph

A batch has operands of more than two dimensions: plain tasks of whole items, or collective runs that are put together.

::

    A[0..3]  B[0..3] -> np.matmul -> D[0..3]        items: the batch axes are cut, items are whole
    A[4..7]  B[4..7] -> np.matmul -> D[4..7]

    A[0]  B[0] -> barrier -> D[0]      collective: a run for each item, stacked;
    A[1]  B[1] -> barrier -> D[1]      one run for all if they share A or B

Products that are asked for together are one series of waves where they do not fit into memory at once. A group,
`matmul_grouped`, has products of different shapes, shared out over the workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

import dask
import dask.array as da
import numpy as np
from dask._task_spec import TaskRef
from dask.array.blockwise import blockwise
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import format_bytes, parse_bytes

from dask_distmm.arrays.choice import by_tasks, decide, decide_now, why_leave, why_left, why_not_run
from dask_distmm.arrays.fallback import dask_matmul, note_left
from dask_distmm.arrays.kinds import check_planned, planning, reducible
from dask_distmm.arrays.quantize import as_operands, widen_chunk, widened
from dask_distmm.arrays.request import Request, check_batch, epilog_name, parse, takes
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.config import Machine, dask_costs, minimum_flops, parsed, read_options, wave_budget
from dask_distmm.errors import MissingEngineError, PlanError, ProjectedMemoryError, advice
from dask_distmm.graph import DaskTasks, TasksLayer, build_graph, build_output, can_be_made
from dask_distmm.numeric.epilogs import Formula, finish
from dask_distmm.numeric.types import (
    FP8,
    carried,
    compute_dtype,
    dtype_from_name,
    operand_dtype,
    stored,
    sum_dtype,
    typed,
)
from dask_distmm.planning import Batch, BatchPlan, GroupPlan, Plan, Problem, Share, Worker
from dask_distmm.planning.computation import Computation, NamedMatrix
from dask_distmm.planning.many import (
    GroupedProduct,
    Pool,
    Sizes,
    choose_batch_route,
    item_plan,
    item_seconds,
    long_products,
    share_out,
)
from dask_distmm.planning.model import Estimate, engine_alone
from dask_distmm.planning.planner import run_overhead
from dask_distmm.planning.waves import Scheme, WavePlan, choose_scheme
from dask_distmm.runtime.chunks import array_kind, array_module
from dask_distmm.runtime.client import ask_roster, current_client, imagined_snapshot, recent_snapshot
from dask_distmm.runtime.keys import RunTask, group_name, output_name
from dask_distmm.runtime.messages import Snapshot
from dask_distmm.shown import Explanation
from dask_distmm.typing import AllOptions, ArrayLike, GroupedOptions, WithAux

if TYPE_CHECKING:
    from distributed import Client


class NotCollective(Explanation):
    """The answer of `dask_distmm.explain` where Dask's own function would run. False in a condition.

    Parameters
    ----------
    reason
        Why.

    See Also
    --------
    explain
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
        return without_a_run(request, possible=reason is None)
    if request.is_batch:
        batch_plan = plan_batch(request, request.demands, imagined=None)
        if batch_plan.route == "items":
            cut = {*request.a.numblocks[-2:], *request.b.numblocks[-2:]} != {1}
            if enabled and cut and minimum_flops() is None:
                # On two CPU processes 1.0 to 1.2 of the time of Dask's own tasks, of which regions make one run.
                flops = 2.0 * math.prod(request.shape) * request.a.shape[-1]
                return _left(request, flops, "matrices of a stack that are in several chunks are put together for it")
            request.logger.info("a batch, lazy\n%r", batch_plan)
            return by_items(request, batch_plan.chunks)
        return by_runs(request, lambda items: multiply_all(items, (request.a, request.b)))
    decision = decide_now(request, enabled=enabled)
    if decision.left:
        return _left(request, request.problem.flops, decision.left, decision.change)
    parts = by_tasks(request, decision.snapshot) if enabled else None
    return run_outputs(request, decision.scheme, by_tasks=parts)


def _left(request: Request, flops: float, *why: str) -> Any:
    """Note that a product is left to Dask, and return what says so."""
    note_left(f"{request.a.shape} @ {request.b.shape} of {request.a.dtype}", flops, *why)
    return NotImplemented


def multiply_all(requests: Sequence[Request], arrays: tuple[da.Array, da.Array] | None = None) -> list[Any]:
    """Return D, and the auxiliary outputs if there are any, of each of some products of matrices that can run.

    All may be items of two arrays.
    """
    if planning() or (schemes := in_series(requests, arrays)) is None:
        return list(map(multiply, requests))
    first = WavePlan(requests[0].problem, schemes[0])
    requests[0].logger.info("%d products one after the other, lazy\n%r", len(requests), first)
    return list(map(run_outputs, requests, schemes))


def explain_product(request: Request) -> Explanation:
    """Return the plan for a product on the cluster as it is now, or why there is none."""
    client = current_client()
    imagined = request.workers if client is None and isinstance(request.workers, int) else None
    reason = why_not_run(request, cluster=imagined is None)
    if reason is not None:
        return NotCollective(reason)
    if request.empty:
        return NotCollective("the product is empty or all zeros, nothing is multiplied")
    # Imagined workers are not a demand.
    needed, named = (
        [text for text in texts if imagined is None or not text.startswith("workers=")]
        for texts in (request.demands, request.named)
    )
    if request.is_batch:
        return plan_batch(request, needed, imagined)
    problem = request.problem
    if imagined is not None:
        snapshot: Snapshot | None = known_workers(problem, imagined)
    else:
        assert client is not None
        snapshot = ask_roster(client, problem.demand, request.lying)
    if snapshot is None:
        return NotCollective("an asynchronous client can't be asked here; call explain from a synchronous one")
    decision = decide(request, client, snapshot, reordered=True)
    plan = decision.made(problem)
    if not request.plain or named:
        return plan
    left = why_leave(request) or why_left(request, decision)
    return dataclasses.replace(plan, left=left)


# Batches: whole items, in plain tasks


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


def by_items(request: Request, cut: tuple[Sizes, ...]) -> WithAux | da.Array:
    """Return D and the auxiliary outputs, by tasks that multiply some items each."""
    a, b, types, ndim = request.a, request.b, request.types, len(request.shape)
    chunks = (*cut, (request.shape[-2],), (request.shape[-1],))
    # Labels of axes: those of D, and one for k.
    first, second = (tuple(range(ndim - array.ndim, ndim)) for array in (a, b))
    whole = [in_chunks(x, (*cut[len(cut) + 2 - x.ndim :], x.shape[-2:-1], x.shape[-1:])) for x in (a, b)]
    operands = [(whole[0], (*first[:-1], ndim)), (whole[1], (*second[:-2], ndim, ndim - 1))]
    return plain_tasks(request, multiply_items, chunks, operands, (types.d, types.a, types.b))


# Batches: collective runs


def as_one_product(request: Request) -> tuple[Request, Callable[[da.Array], da.Array]] | None:
    """Return the product of two matrices that is the whole batch, and what makes D of its D; None if there is none.

    There is one if all items share B (they lie below one another then) or A (beside one another), and the formula looks
    at each element of D for itself.
    """
    a, b, formula = request.a, request.b, request.formula
    if request.extras or formula.per_element or formula.operand_sum:
        return None
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        merged = _of_matrices(request, _reshaped(a, (-1, k)), b.reshape((k, n)))
        return merged, lambda d: _reshaped(d, request.shape)
    if math.prod(a.shape[:-2]) == 1:
        merged = _of_matrices(request, a.reshape((m, k)), _reshaped(da.moveaxis(b, -2, 0), (k, -1)))
        return merged, lambda d: da.moveaxis(_reshaped(d, (m, *request.batch_shape, n)), 0, -2)
    return None


def _reshaped(array: da.Array, shape: Sizes) -> da.Array:
    """Return an array in another shape; Dask may have to cut it for that, which a shuffle of its own does not pay."""
    with dask.config.set({"array.rechunk.method": "tasks"}):
        return array.reshape(shape)


def _of_matrices(request: Request, a: da.Array, b: da.Array, extras: Sequence[tuple[str, da.Array]] = ()) -> Request:
    """Return the same request for two matrices."""
    return dataclasses.replace(request, a=a, b=b, extras=extras, out_chunks=None, dropped=(), batch="auto")


def item_of(request: Request, index: Sizes) -> Request:
    """Return the product of one item of a batch."""

    def item(array: da.Array) -> da.Array:
        own = index[len(index) - (array.ndim - 2) :]
        return array[tuple(0 if size == 1 else i for i, size in zip(own, array.shape[:-2], strict=True))]

    extras = [(name, item(array)) for name, array in request.extras]
    return _of_matrices(request, item(request.a), item(request.b), extras)


def by_runs(request: Request, run: Callable[[list[Request]], list[Any]]) -> WithAux | da.Array:
    """Return D and the auxiliary outputs, by collective runs: `run` returns the products of pairs of matrices."""
    formula, batch = request.formula, request.batch_shape
    if (merged := as_one_product(request)) is not None:
        return delivered(request, merged[1](run([merged[0]])[0]), {})
    pairs = [as_pair(x) for x in run([item_of(request, index) for index in np.ndindex(batch)])]
    outputs = {name: stacked([aux[name] for _, aux in pairs], batch) for name in pairs[0][1]}
    if formula.amax:
        outputs["result_amax"] = outputs["result_amax"].max()
    return delivered(request, stacked([d for d, _ in pairs], batch), outputs)


def stacked(parts: Sequence[da.Array], batch: Sizes) -> da.Array:
    """Return arrays, in C order, as one with batch axes before their own."""
    for size in reversed(batch):
        parts = [da.stack(parts[at : at + size]) for at in range(0, len(parts), size)]
    return parts[0]


# Series of waves


def in_series(requests: Sequence[Request], arrays: tuple[da.Array, da.Array] | None) -> list[Scheme] | None:
    """Return the waves of products that do not fit into memory at once; None if they are runs of their own.

    `arrays` are those of which all are items; None if they have arrays of their own.
    """
    sources = [arrays or x.lying for x in requests]
    client = current_client()
    if client is None or len(requests) < 2:
        return None
    snapshot = recent_snapshot(client, requests[0].problem)
    if snapshot is None or fit_together([x for pair in sources for x in pair], requests, snapshot.workers):
        return None
    return _schemes(requests, client, sources)


def fit_together(arrays: Sequence[da.Array], requests: Sequence[Request], workers: Sequence[Worker]) -> bool:
    """Whether arrays, and D of products, are in memory at once without spilling; true where waves are off."""
    budget, held = wave_budget(), sum({array.name: array.nbytes for array in arrays}.values())
    result_bytes = sum(float(math.prod(request.shape)) * request.dtype.itemsize for request in requests)
    return budget is None or held + result_bytes <= sum(map(budget.of, workers))


def _schemes(
    requests: Sequence[Request], client: Client, sources: Sequence[tuple[da.Array, da.Array]]
) -> list[Scheme] | None:
    """Return the waves of products that follow one another; None if these can't be, or fit at once after all."""
    problems, distinct = [x.problem for x in requests], {array.name: array for pair in sources for array in pair}
    snapshot, budget = ask_roster(client, problems[0].demand, list(distinct.values())), wave_budget()
    if snapshot is None or budget is None or len({problem.demand for problem in problems}) > 1:
        return None
    there = {name for name, where in zip(distinct, snapshot.placed, strict=True) if where is not None}
    # That stays in memory.
    held = sum(distinct[name].nbytes for name in there) / len(snapshot.workers)
    limits = (max(1, int(w.memory_limit - held / min(budget.managed, budget.process))) for w in snapshot.workers)
    every = zip(snapshot.workers, limits, strict=True)
    workers = [dataclasses.replace(w, memory_limit=limit if w.memory_limit else 0) for w, limit in every]
    if fit_together([x for name, x in distinct.items() if name not in there], requests, workers):
        return None
    lazy = [(a.name not in there, b.name not in there) for a, b in sources]
    # For A and for B whether ranks can make the chunks of all products.
    can_a, can_b = (
        can_be_made(*(x.lying[at] for x, is_lazy in zip(requests, lazy, strict=True) if is_lazy[at])) for at in (0, 1)
    )
    try:
        for able in ((can_a, can_b), (False, False)):
            schemes = [
                choose_scheme(
                    problem, workers, is_lazy, budget, dask_costs(),
                    engine=snapshot.engines, by_ranks=able, products=len(problems),
                )
                for problem, is_lazy in zip(problems, lazy, strict=True)
            ]  # fmt: skip
            if len({scheme.by_ranks for scheme in schemes}) == 1:
                break
    except (PlanError, ProjectedMemoryError) as error:
        requests[0].logger.info("%s", error)
        return None
    series = f"matmul-{tokenize([problem.name for problem in problems])}"
    before = itertools.accumulate((scheme.count for scheme in schemes), initial=0)
    return [dataclasses.replace(scheme, series=series, before=at) for scheme, at in zip(schemes, before, strict=False)]


# Batches: the choice


def known_workers(problem: Problem, imagined: int | None) -> Snapshot:
    """Return the workers, and the engines of a collective run; none of these where there can't be one."""
    if imagined is not None:
        return imagined_snapshot(problem, [Worker(f"worker-{i}") for i in range(imagined)])
    client = current_client()
    assert client is not None
    try:
        # An asynchronous client can't ask now; what it knows already must do.
        return recent_snapshot(client, problem) or imagined_snapshot(problem, _counted(client))
    except MissingEngineError:
        # CuPy chunks where no worker has the GPU engine: plain tasks need CuPy only.
        if problem.array != "cupy":
            raise
        return Snapshot("OK", workers=_counted(client))


def _counted(client: Any) -> list[Worker]:
    """Return workers as many as there are, each an average one."""
    info = client.scheduler_info(n_workers=0)
    count = int(info.get("n_workers") or len(info["workers"]) or 1)
    threads, memory = (int(info.get(name) or 0) // count for name in ("total_threads", "total_memory"))
    return [Worker(f"worker-{i}", max(1, threads), memory) for i in range(count)]


def plan_batch(request: Request, needed: Sequence[str], imagined: int | None) -> BatchPlan:
    """Choose the route of a batch that can run."""
    merged = as_one_product(request)
    runs = 1 if merged else math.prod(request.batch_shape)
    single = merged[0] if merged else item_of(request, (0,) * len(request.batch_shape))
    problem = single.problem
    snapshot = known_workers(problem, imagined)
    workers = snapshot.workers
    task_bytes, overhead = int(parsed("batch.task-bytes", parse_bytes)), dask_costs().task
    batch, (machine, pool) = _batch_of(request), _slots(request, snapshot)
    chunks, by_items = item_plan(batch, pool, machine, task_bytes, overhead)
    fits = not pool.memory or batch.held_bytes <= pool.memory
    needs_run = request.batch == "collective" or bool(needed) or not fits
    plan = _planned(single, snapshot, None if imagined else current_client(), needed=needs_run)
    by_runs = None if plan is None else _estimated(plan, problem, runs)
    route, reason = choose_batch_route(request.batch, by_items if fits else None, by_runs, needed)
    if route == "items" and not fits:
        remedies = ["use batch='collective'"] if request.batch == "items" else []
        check_task_memory("one item of the batch", batch, pool, remedies, [worker.address for worker in workers])
    if route == "collective" and not merged and not fit_together([request.a, request.b], [request], workers):
        reason += "; one after the other, if they are lazy, since they do not fit into memory together"
    return BatchPlan(batch, route, reason, chunks, by_items, by_runs, runs, plan)


def _planned(request: Request, snapshot: Snapshot, client: Client | None, *, needed: bool) -> Plan | WavePlan | None:
    """Return the plan of a product; None where no run is possible, which is an error if one is needed."""
    try:
        return decide(request, client, snapshot).made(request.problem) if snapshot.engines else None
    except (PlanError, ProjectedMemoryError):
        if needed:
            raise
        return None


def _slots(request: Request, snapshot: Snapshot) -> tuple[Machine, Pool]:
    """Return the machine, and what its workers have for plain tasks."""
    options = read_options()
    pool = Pool.of(snapshot.workers, options.limit_fraction, request.kind)
    return options.machine(engine_alone(request.kind)), pool


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
    elif (e := plan.estimate) is None:
        return None
    else:
        compute, seconds, peak, moved = (e.compute_seconds, e.seconds, e.peak_bytes, e.bytes_moved)
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
    chunks = tuple(x if sum(x) == size else y for x, y, size in zip(first, second, batch, strict=True))

    def whole(x: da.Array, cuts: Sequence[Sizes]) -> bool:
        cut = all(sizes in ((1,), want) for sizes, want in zip(cuts, chunks, strict=True))
        return cut and x.numblocks[-2:] == (1, 1)

    chunk_count = a.npartitions + b.npartitions + sum(array.npartitions for _, array in request.extras)
    extra_bytes = sum(array.itemsize * math.prod(array.shape[-2:]) for _, array in request.extras)
    return Batch(
        batch, a_shape, b_shape, chunks, a.shape[-2], b.shape[-1], a.shape[-1], *request.types[:3],
        whole(a, a_chunks), whole(b, b_chunks), chunk_count, extra_bytes,
    )  # fmt: skip


# Groups


# Options of `matmul` that groups don't have.
_HINTS = dict.fromkeys(
    ["c", "beta", "epilog_inputs", "bias", "out_chunks", "distributions", "result_type", "compute_type", "logger"],
    "products of a group have none, call matmul for each of them",
)
_POSITIONAL = "pass the pairs in one list, [(a, b), ...]"


@takes(GroupedOptions, _HINTS, _POSITIONAL)
def matmul_grouped(pairs: Sequence[tuple[ArrayLike, ArrayLike]], **options: Unpack[GroupedOptions]) -> list[da.Array]:
    """Compute ``D[i] = F(alpha * op(A[i]) @ op(B[i]))`` for products of different shapes. Lazy.

    Small products are a plain task each, larger ones some tasks of a slab of rows each, the longest first; products
    that would take one worker longer than its share of all the work are collective runs, if the cost model expects
    all to be done sooner that way. `explain_grouped` shows what becomes of each.

    Parameters
    ----------
    pairs : sequence of (A, B)
        Matrices, of any sizes, chunks and types: dask.array.Array or array_like.
    alpha, op_a, op_b, epilog
        As for `matmul`, the same for all; also functions of one argument. Epilogs that need inputs or have auxiliary
        outputs are refused.
    method, engine, workers
        As for `matmul`, for the collective runs; with each of them all products are collective runs.
    batch : str, optional
        ``"items"``: plain tasks only; ``"collective"``: collective runs only; ``"auto"``: the default.

    Returns
    -------
    list of dask.array.Array
        In the order of `pairs`, with NumPy's dtype for each product. Compute all in one ``dask.compute`` to have them
        balanced; each can be used by itself, and costs only its own work. The chunks of a product depend on how it
        is computed: one, slabs of rows, or ``(op(A).chunks[0], op(B).chunks[1])``.

    Raises
    ------
    PlanError
        As `matmul`; also for operands that are not matrices. The message names the product.
    ProjectedMemoryError
        A worker would have to hold more than it may.

    See Also
    --------
    explain_grouped, matmul

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import matmul_grouped
    >>> first, second = matmul_grouped([(da.ones((4, 3)), da.ones((3, 5))), (da.ones((2, 7)), da.ones((7, 2)))])
    >>> second.compute()
    array([[7., 7.],
           [7., 7.]])
    """
    requests = _parse_pairs(pairs, options)
    grouped = _plan_groups(requests)
    runs = [i for i, share in enumerate(grouped.shares) if share is not None and share.collective]
    products = dict(zip(runs, multiply_all([requests[i] for i in runs]), strict=True))
    return [
        products[i] if i in products else multiply(request) if share is None else _by_slabs(request, share)
        for i, (request, share) in enumerate(zip(requests, grouped.shares, strict=True))
    ]


@takes(GroupedOptions, _HINTS, _POSITIONAL)
def explain_grouped(pairs: Sequence[tuple[ArrayLike, ArrayLike]], **options: Unpack[GroupedOptions]) -> GroupPlan:
    """Return what would become of each product of ``matmul_grouped(pairs, ...)``, without computing anything.

    Parameters
    ----------
    pairs, alpha, op_a, op_b, epilog, method, engine, workers, batch
        As for `matmul_grouped`.

    Returns
    -------
    GroupPlan

    Raises
    ------
    PlanError, ProjectedMemoryError
        As `matmul_grouped`.

    See Also
    --------
    matmul_grouped, explain

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import explain_grouped
    >>> pairs = [(da.ones((4, 3)), da.ones((3, 5))), (da.ones((2, 7)), da.ones((7, 2)))]
    >>> explain_grouped(pairs).shapes
    ((4, 5, 3), (2, 2, 7))
    """
    return _plan_groups(_parse_pairs(pairs, options))


def _parse_pairs(pairs: Sequence[tuple[Any, Any]], options: GroupedOptions) -> list[Request]:
    """Return the products as requests; refuse one that does not fit."""
    batch = check_batch(options.get("batch"), is_batch=True)
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | da.Array):
        raise PlanError(f"pairs is {type(pairs).__name__}; expected a list of pairs, for example [(a, b), ...]")
    forced = (f"batch={batch!r}",) if batch == "collective" else ()
    # How a group is made is not an option of one product.
    pair_options = cast(AllOptions, {**options, "batch": None})
    requests = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PlanError(f"product {number} is {type(pair).__name__}; expected a pair (a, b)")
        try:
            a, b = as_operands(*pair)
            if (a.ndim, b.ndim) != (2, 2):
                raise PlanError(f"a and b must be 2-D, got {a.ndim}-D and {b.ndim}-D; matmul() takes others")
            _check_epilog(options.get("epilog"))
            request = parse(a, b, **pair_options)
            requests.append(dataclasses.replace(request, batch=batch, named=request.named + forced))
        except PlanError as error:
            raise PlanError(f"product {number}: {error}") from error
    return requests


def _check_epilog(epilog: str | Callable[..., Any] | None) -> None:
    """Refuse epilogs with inputs or outputs of their own."""
    name = epilog_name(epilog)
    wanted = Formula(epilog=name)
    if wanted.inputs or wanted.per_element or wanted.operand_sum or wanted.replicated:
        raise PlanError(f"epilog {name!r} has more inputs or outputs for each product; use matmul for each of them")


def _plan_groups(requests: Sequence[Request]) -> GroupPlan:
    """Share the products out."""
    wanted, needed = (requests[0].batch, requests[0].demands) if requests else ("auto", [])
    if wanted == "items" and needed:
        raise PlanError(f"batch='items' and {needed[0]}: plain tasks run where Dask puts them; leave one of them out")
    shapes = tuple((request.shape[0], request.shape[1], request.a.shape[1]) for request in requests)
    shares: list[Share | None] = [None] * len(requests)
    ours = [i for i, each in enumerate(requests) if not each.empty and _runs(i, each)]
    if not ours:
        return GroupPlan(shapes, tuple(shares), 0, 0.0)
    measured = [_member(requests[i], wanted, needed) for i in ours]
    members, works, pools, snapshots = zip(*measured, strict=True)
    slots = min(pool.slots for pool in pools)
    long = long_products([member.seconds for member in members], slots)
    for at, (i, member) in enumerate(zip(ours, members, strict=True)):
        if member.forced or (at in long and member.forced is None):
            run_plan = _planned(requests[i], snapshots[at], current_client(), needed=bool(member.forced))
            if run_plan is not None and run_plan.seconds is not None:
                member.run = run_plan.seconds + run_overhead(requests[i].problem, dask_costs())
    portions, total = share_out(members, slots, dask_costs().task)
    for i, whole, pool, share in zip(ours, works, pools, portions, strict=True):
        if not share.collective:
            work = dataclasses.replace(whole, m=max(share.rows))
            task = f"a task of {work.m} rows of a product of {whole.m} x {work.k} by {work.k} x {work.n}"
            check_task_memory(task, work, pool, ["leave batch='items' out"])
        shares[i] = share
    return GroupPlan(shapes, tuple(shares), slots, total)


def _runs(number: int, request: Request) -> bool:
    """Whether a product can run, or be a plain task; refuse one that can't and has to."""
    try:
        return why_not_run(request, cluster=True) is None
    except PlanError as error:
        raise PlanError(f"product {number}: {error}") from error


def _member(request: Request, wanted: str, needed: Sequence[str]) -> tuple[GroupedProduct, Batch, Pool, Snapshot]:
    """Return what a product takes, the product as a batch of one item, and the workers: for plain tasks, for a run."""
    snapshot = known_workers(request.problem, None)
    work, (machine, pool) = _batch_of(request), _slots(request, snapshot)
    (a_bytes, b_bytes, _), foreign = work.item_bytes, (1 - 1 / pool.workers) / machine.bandwidth
    too_large = bool(pool.memory) and work.held_bytes > pool.memory
    product = GroupedProduct(
        rows=request.a.chunks[0],
        seconds=item_seconds(work, machine) + (a_bytes + b_bytes) * foreign,
        # One worker puts B together and sends it on.
        spread=b_bytes * (2 * foreign + 1 / machine.memory_bandwidth),
        forced={"items": False, "collective": True}.get(wanted, True if needed or too_large else None),
    )
    return product, work, pool, snapshot


def _by_slabs(request: Request, share: Share) -> da.Array:
    """Return a product by plain tasks of some rows each."""
    a = request.a.rechunk({0: share.rows, 1: -1}, method="tasks")
    b = request.b.rechunk({0: -1, 1: -1}, method="tasks")
    dtypes = (request.dtype.name, a.dtype.name, b.dtype.name)
    token = tokenize(a.name, b.name, dtypes, dataclasses.astuple(request.formula), share.rows)
    name = group_name(token, share.rank, share.seconds)
    settings = {"dtypes": dtypes, "names": (), "formula": request.formula}
    layer = {
        (name, i, 0): RunTask(
            (name, i, 0), multiply_items, TaskRef((a.name, i, 0)), TaskRef((b.name, 0, 0)), **settings
        )
        for i in range(len(share.rows))
    }
    meta = meta_from_array(request.prototype, ndim=2, dtype=request.dtype)
    graph = HighLevelGraph.from_collections(name, TasksLayer(layer), dependencies=[a, b])
    return da.Array(graph, name, (share.rows, (request.shape[1],)), meta=meta)


# D and the auxiliary outputs as Dask arrays: of a run, or of Dask's own operations where no run is possible
def as_pair(output: WithAux | da.Array) -> WithAux:
    """Return D and the auxiliary outputs, also where there are none."""
    return output if isinstance(output, tuple) else (output, {})


def delivered(request: Request, d: Array, aux: dict[str, da.Array]) -> WithAux | da.Array:
    """Return D in the axes and chunks that were asked for, and the auxiliary outputs if there are any."""
    if request.formula.operand_sum:
        aux = {**aux, request.formula.operand_sum: operand_sum(request)}
    if request.dropped:
        d = d[(..., *(0 if axis in request.dropped else slice(None) for axis in (-2, -1)))]
    if request.out_chunks not in (None, d.chunks):
        d = d.rechunk(request.out_chunks, method="tasks")
    return (d, aux) if aux else d


def run_outputs(
    request: Request, scheme: Scheme | None = None, by_tasks: DaskTasks | None = None
) -> WithAux | da.Array:
    """Return D of a run of two matrices, and the auxiliary outputs if there are any.

    With a scheme it is a sequence of runs. With `by_tasks` parts of D may be left to Dask's own tasks.
    """
    problem, (a, b) = request.problem, request.lying
    graph = build_graph(problem, a, b, [array for _, array in request.extras], by_tasks, scheme)
    d = run_output(problem, problem.d, graph, request.prototype)
    aux: dict[str, da.Array] = {}
    for output in problem.outputs[1:]:
        parts = run_output(problem, output, build_output(problem, output.name, d), request.prototype)
        aux[output.name] = finished(request, output.name, parts)
    return delivered(request, d, aux)


def run_output(problem: Computation, output: NamedMatrix, graph: HighLevelGraph, prototype: Any) -> Array:
    """Return an output of a run as a lazy array, whose chunks are of the same kind as an array."""
    chunks = tuple(tuple(size if size >= 0 else np.nan for size in output.chunks[axis]) for axis in output.axes)
    meta = output_meta(prototype, carried(output.dtype, problem.array), len(output.axes))
    return Array(graph, output_name(problem.name, output.name), chunks, meta=meta)


def finished(request: Request, name: str, parts: da.Array) -> da.Array:
    """Return an auxiliary output from what was made of each chunk of D."""
    array = reducible(parts)
    if name == "result_amax":
        return array.max()
    if name != request.formula.sums:
        return array
    array = array.sum(axis=request.formula.sum_axis - 2, dtype=parts.dtype)
    return array if request.types.d in FP8 else array.astype(request.dtype)


def output_meta(meta: Any, dtype: np.dtype, ndim: int | None = None) -> Any:
    """Return the meta of an output, of that of an array whose chunks are of the same kind."""
    # NumPy warns when complex numbers become real, even if there are none.
    return meta_from_array(meta if dtype.kind == "c" else meta.real, ndim, dtype=dtype)


def operand_sum(request: Request) -> da.Array:
    """Return op(A) or op(B) summed over k, in the type of D."""
    array, axis = (request.a, -1) if request.formula.operand_sum == "bgrada" else (request.b, -2)
    dtype = compute_dtype(request.dtype, request.a.shape[-1])
    return reducible(array).astype(dtype).sum(axis=axis).astype(request.dtype)


# By plain tasks


def plain_tasks(
    request: Request,
    function: Callable[..., Any],
    chunks: tuple[tuple[int, ...], ...],
    operands: Sequence[tuple[da.Array, tuple[int, ...]]],
    dtypes: tuple[str, ...],
) -> WithAux | da.Array:
    """Return D in some chunks, and the auxiliary outputs: a task each, of parts of some arrays and of the formula's.

    `operands` come with the axes of D that theirs are; `dtypes` are the names of the types of D and of them.
    """
    formula, ndim, arguments = request.formula, len(chunks), list(itertools.chain(*operands))
    for _, array in request.extras:
        first = ndim - array.ndim
        arguments += [in_chunks(array, chunks[first:]), tuple(range(first, ndim))]
    dtype = carried(request.types.d, request.kind)
    meta = meta_from_array(request.prototype, ndim=ndim, dtype=dtype)
    done = blockwise(
        function,
        tuple(range(ndim)),
        *arguments,
        token="matmul-items",
        adjust_chunks=dict(enumerate(chunks)),
        align_arrays=False,
        concatenate=False,
        meta=meta,
        dtype=dtype,
        dtypes=(*dtypes, *(array.dtype.name for _, array in request.extras)),
        names=tuple(name for name, _ in request.extras),
        formula=formula,
    )
    aux: dict[str, da.Array] = {}
    for number, name in enumerate(formula.per_element, start=1):
        kind = formula.dtype_of(name, request.dtype)
        sizes = zip(chunks, (name != "result_amax",) * (ndim - 2) + formula.keeps(name), strict=True)
        parts = done.map_blocks(
            operator.itemgetter(number),
            dtype=kind,
            chunks=tuple(own if kept else (1,) * len(own) for own, kept in sizes),
            meta=output_meta(done._meta, kind),
        )
        aux[name] = finished(request, name, parts)
    return delivered(request, done.map_blocks(operator.itemgetter(0), dtype=dtype, meta=meta) if aux else done, aux)


def in_chunks(array: da.Array, chunks: Sequence[tuple[int, ...]]) -> da.Array:
    """Return an array in chunks of D, but along axes of length 1."""
    wanted = tuple(sizes if n != 1 else (1,) for n, sizes in zip(array.shape, chunks, strict=True))
    # A shuffle of Dask's can't take CuPy chunks, and makes all parts at once, which could not be used apart.
    return array if array.chunks == wanted else array.rechunk(wanted, method="tasks")


def finish_chunk(acc: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], formula: Formula) -> Any:
    """Apply a formula to a chunk of a product; return D, with the auxiliary outputs if there are any."""
    register_serializers()
    xp, dtype, aux = array_module(acc), dtype_from_name(dtypes[0]), dict[str, Any]()
    inputs = {key: typed(x, name) for key, x, name in zip(names, extras, dtypes[2:], strict=True)}
    with np.errstate(all="ignore"):
        if not formula.trivial:
            acc, aux = finish(xp, formula, acc, {key: as_kind(xp, x) for key, x in inputs.items()})
        d = stored(xp, acc, dtypes[0], fp8_bytes=xp is not np)
    outputs = [aux[name].astype(formula.dtype_of(name, dtype), copy=False) for name in formula.per_element]
    return (d, *outputs) if outputs else d


def as_kind(xp: Any, x: Any) -> Any:
    """Return a chunk as one of CuPy's if others are."""
    return x if xp is np or array_kind(x) == "cupy" else xp.asarray(x)


def without_a_run(request: Request, *, possible: bool) -> WithAux | da.Array:
    """Return D, and the auxiliary outputs if there are any, of Dask's own product; `possible`: a run might be, too."""
    a, b, types = request.a, request.b, request.types
    if request.plain and request.empty and (possible or request.is_batch):
        chunks = "auto" if request.is_batch else request.chunks
        return delivered(request, da.zeros(request.shape, dtype=request.dtype, chunks=chunks), {})
    if request.plain:
        # The very function that Dask would have called.
        return delivered(request, dask_matmul(a, b).astype(request.dtype), {})
    dtype = sum_dtype(types.operand, request.dtype, max(1, a.shape[-1]))
    if types.usual:
        wide = dask_matmul(a, b).astype(dtype)
    else:
        wide = dask_matmul(widened(a, types.a, dtype), widened(b, types.b, dtype))
    return plain_tasks(request, finish_chunk, wide.chunks, [(wide, tuple(range(wide.ndim)))], (types.d, dtype.name))
