"""``matmul_grouped``: products of different shapes, shared out over the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack, cast

import dask.array as da
from dask._task_spec import TaskRef
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.arrays.batched import check_task_memory, known_workers, multiply_items
from dask_distmm.arrays.choice import decide, why_not_run
from dask_distmm.arrays.product import multiply, multiply_all
from dask_distmm.arrays.quantize import as_operands
from dask_distmm.arrays.request import Request, check_batch, epilog_name, parse, takes
from dask_distmm.config import dask_costs, read_options
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.graph.build import TasksLayer
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import Batch, GroupPlan, Share
from dask_distmm.planning.many import GroupedProduct, Pool, item_seconds, long_products, share_out
from dask_distmm.planning.model import engine_alone
from dask_distmm.planning.tasks import run_overhead
from dask_distmm.runtime.client import current_client
from dask_distmm.runtime.keys import RunTask, group_name
from dask_distmm.runtime.messages import Snapshot
from dask_distmm.typing import AllOptions, ArrayLike, GroupedOptions

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
    found = _plan_groups(requests)
    runs = [i for i, share in enumerate(found.shares) if share is not None and share.collective]
    made = dict(zip(runs, multiply_all([requests[i] for i in runs]), strict=True))
    return [
        made[i] if i in made else multiply(request) if share is None else _by_slabs(request, share)
        for i, (request, share) in enumerate(zip(requests, found.shares, strict=True))
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
    """
    return _plan_groups(_parse_pairs(pairs, options))


def _parse_pairs(pairs: Sequence[tuple[Any, Any]], options: GroupedOptions) -> list[Request]:
    """Return the products as requests; refuse one that does not fit."""
    batch = check_batch(options.get("batch"), is_batch=True)
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | da.Array):
        raise PlanError(f"pairs is {type(pairs).__name__}; expected a list of pairs, for example [(a, b), ...]")
    forced = (f"batch={batch!r}",) if batch == "collective" else ()
    # How a group is made is not an option of one product.
    asked = cast(AllOptions, {**options, "batch": None})
    requests = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PlanError(f"product {number} is {type(pair).__name__}; expected a pair (a, b)")
        try:
            a, b = as_operands(*pair)
            if (a.ndim, b.ndim) != (2, 2):
                raise PlanError(f"a and b must be 2-D, got {a.ndim}-D and {b.ndim}-D; matmul() takes others")
            _check_epilog(options.get("epilog"))
            request = parse(a, b, **asked)
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
    found = [_member(requests[i], wanted, needed) for i in ours]
    members, works, pools, snapshots = zip(*found, strict=True)
    slots = min(pool.slots for pool in pools)
    long = long_products([member.seconds for member in members], slots)
    for at, (i, member) in enumerate(zip(ours, members, strict=True)):
        if member.forced or (at in long and member.forced is None):
            member.run = _run_seconds(requests[i], snapshots[at], forced=bool(member.forced))
    given, total = share_out(members, slots, dask_costs().task)
    for i, whole, pool, share in zip(ours, works, pools, given, strict=True):
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


def _member(
    request: Request, wanted: str, needed: Sequence[str]
) -> tuple[GroupedProduct, Batch, Pool, Snapshot | None]:
    """Return what a product takes, the product as a batch of one item, and the workers: for plain tasks, for a run."""
    options, (workers, known) = read_options(), known_workers(request.problem, None)
    machine, pool = options.machine(engine_alone(request.kind)), Pool.of(workers, options.limit_fraction, request.kind)
    (m, n), k = request.shape, request.a.shape[1]
    work = Batch((), (), (), (), m, n, k, request.a.dtype.name, request.b.dtype.name, request.dtype.name)
    (a_bytes, b_bytes, _), foreign = work.item_bytes, (1 - 1 / pool.workers) / machine.bandwidth
    too_large = bool(pool.memory) and work.held_bytes > pool.memory
    product = GroupedProduct(
        rows=request.a.chunks[0],
        seconds=item_seconds(work, machine) + (a_bytes + b_bytes) * foreign,
        # One worker puts B together and sends it on.
        spread=b_bytes * (2 * foreign + 1 / machine.memory_bandwidth),
        forced={"items": False, "collective": True}.get(wanted, True if needed or too_large else None),
    )
    return product, work, pool, known


def _run_seconds(request: Request, known: Snapshot | None, *, forced: bool) -> float | None:
    """Return the seconds of a collective run; None where none is possible, which is an error if it is forced."""
    if known is None:
        return None
    try:
        found = decide(request, current_client(), known).made(request.problem)
    except (PlanError, ProjectedMemoryError):
        if forced:
            raise
        return None
    return None if found.seconds is None else found.seconds + run_overhead(request.problem, dask_costs())


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
