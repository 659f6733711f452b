"""``matmul_grouped``: products of different shapes, shared out over the workers."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
from dask._task_spec import TaskRef
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import format_bytes

from dask_distmm.arrays import product
from dask_distmm.arrays.batched import known_workers, task_options
from dask_distmm.arrays.extras import epilog_name
from dask_distmm.arrays.items import multiply
from dask_distmm.arrays.product import why_not_run
from dask_distmm.arrays.quantize import operands
from dask_distmm.arrays.request import Request, check_batch, make_problem, parse
from dask_distmm.config import dask_costs, read_options
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.graph.build import Step
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import Batch, GroupPlan, Problem, Share, Worker
from dask_distmm.planning.dask_tasks import around
from dask_distmm.planning.engines import engine_alone
from dask_distmm.planning.many.batches import Pool, item_seconds
from dask_distmm.planning.many.groups import candidates, share_out
from dask_distmm.runtime.client import Snapshot, current_client
from dask_distmm.runtime.keys import group_name
from dask_distmm.runtime.scheduler.priorities import GroupOrder

__all__ = ["explain_grouped", "matmul_grouped"]

_ordered: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def matmul_grouped(
    pairs: Sequence[tuple[Any, Any]],
    *,
    alpha: complex = 1.0,
    op_a: str = "N",
    op_b: str = "N",
    epilog: str | Callable[..., Any] | None = None,
    method: str | None = None,
    engine: str | None = None,
    workers: Sequence[str] | int | None = None,
    batch: str | None = None,
) -> list[da.Array]:
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
        As for `matmul`, for the collective runs; each makes all products such.
    batch : str, optional
        ``"items"``: plain tasks only; ``"collective"``: collective runs only; ``"auto"``: the default.

    Returns
    -------
    list of dask.array.Array
        In the order of `pairs`, with NumPy's dtype for each product. Compute all in one ``dask.compute`` to have them
        balanced; each can also be used alone, and costs its own work only. The chunks of a product depend on how it
        is computed: one, slabs of rows, or ``(op(A).chunks[0], op(B).chunks[1])``.

    Raises
    ------
    PlanError
        As `matmul`; also for operands that are no matrices. The message names the product.
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
    requests = _parse(
        pairs, batch, alpha=alpha, op_a=op_a, op_b=op_b, epilog=epilog, method=method, engine=engine, workers=workers
    )
    found = _plan(requests)
    if any(share is not None and not share.collective for share in found.shares):
        _order_by_size()
    return [
        product.multiply(request) if share is None or share.collective else _by_slabs(request, share)
        for request, share in zip(requests, found.shares, strict=True)
    ]


def explain_grouped(pairs: Sequence[tuple[Any, Any]], **options: Any) -> GroupPlan:
    """Return what would become of each product of ``matmul_grouped(pairs, ...)``, without computing anything.

    Parameters
    ----------
    pairs, options
        As for `matmul_grouped`.

    Returns
    -------
    GroupPlan

    Raises
    ------
    PlanError, ProjectedMemoryError
        As `matmul_grouped`.
    """
    return _plan(_parse(pairs, options.pop("batch", None), **options))


def _parse(pairs: Sequence[tuple[Any, Any]], batch: str | None, **options: Any) -> list[Request]:
    """Check what was given."""
    batch = check_batch(batch, is_batch=True)
    requests = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PlanError(f"product {number} is {type(pair).__name__}; expected a pair (A, B)")
        try:
            a, b = operands(*pair)
            if (a.ndim, b.ndim) != (2, 2):
                raise PlanError(
                    f"found {a.ndim} and {b.ndim} dimensions; expected matrices, for others there is matmul"
                )
            _check_epilog(options.get("epilog"))
            requests.append(dataclasses.replace(parse(a, b, **options), batch=batch))
        except PlanError as error:
            raise PlanError(f"product {number}: {error}") from error
    return requests


def _check_epilog(epilog: str | Callable[..., Any] | None) -> None:
    """Refuse epilogs with inputs or outputs of their own."""
    name = epilog_name(epilog)
    wanted = Formula(epilog=name)
    if wanted.inputs or wanted.per_element or wanted.operand_sum or wanted.replicated:
        raise PlanError(f"epilog {name!r} has more inputs or outputs for each product; use matmul for each of them")


def _plan(requests: Sequence[Request]) -> GroupPlan:
    """Share the products out."""
    wanted, needed = (requests[0].batch, requests[0].demands) if requests else ("auto", [])
    if wanted == "items" and needed:
        raise PlanError(f"batch='items' and {needed[0]}: plain tasks run where Dask puts them; leave one of them out")
    shapes = tuple((request.shape[0], request.shape[1], request.a.shape[1]) for request in requests)
    ours = [i for i, each in enumerate(requests) if not each.empty and why_not_run(each, cluster=True) is None]
    if not ours:
        return GroupPlan(shapes, (None,) * len(requests), 0, 0.0)

    @functools.cache
    def problem_of(i: int) -> Problem:
        """Return a product as a collective run would see it."""
        return make_problem(requests[i])

    known: dict[tuple[str, ...], tuple[list[Worker], Snapshot | None]] = {}

    def ask(i: int) -> tuple[list[Worker], Snapshot | None]:
        """Ask the scheduler once for all products of the same types."""
        request = requests[i]
        key = (request.kind, request.a.dtype.name, request.b.dtype.name)
        if key not in known:
            known[key] = known_workers(problem_of(i), None)
        return known[key]

    _, overhead = task_options()
    read = read_options()
    pools = [Pool.of(ask(i)[0], read.limit_fraction, requests[i].kind) for i in ours]
    slots = min(pool.slots for pool in pools)
    works = [_describe(requests[i]) for i in ours]
    seconds, spread = [], []
    for i, work, pool in zip(ours, works, pools, strict=True):
        machine = read.machine(engine_alone(requests[i].kind))
        gathered = sum(work.item_bytes[:2]) * (1 - 1 / pool.workers) / machine.bandwidth
        seconds.append(item_seconds(work, machine) + gathered)
        # B is put together on one worker and sent to the others from there.
        b_bytes = work.item_bytes[1]
        spread.append(b_bytes * (2 * (1 - 1 / pool.workers) / machine.bandwidth + 1 / machine.memory_bandwidth))
    forced: list[bool | None] = []
    for work, pool in zip(works, pools, strict=True):
        large = bool(pool.memory) and work.held_bytes > pool.memory
        forced.append({"items": False, "collective": True}.get(wanted, True if needed or large else None))
    long = set(candidates(seconds, slots))
    collective: list[float | None] = [None] * len(ours)
    for at, i in enumerate(ours):
        if (at in long and forced[at] is None) or forced[at]:
            _, snapshot = ask(i)
            plan = None
            try:
                plan = snapshot.plan(problem_of(i)) if snapshot is not None else None
            except (PlanError, ProjectedMemoryError):
                if forced[at]:
                    raise
            if plan is not None and plan.estimate is not None:
                collective[at] = plan.estimate.seconds + around(problem_of(i), dask_costs())
    rows = [requests[i].a.chunks[0] for i in ours]
    found, total = share_out(seconds, rows, collective, slots, overhead, forced, spread)
    for work, pool, share in zip(works, pools, found, strict=True):
        _check_memory(work, pool, share)
    shares: list[Share | None] = [None] * len(requests)
    for i, share in zip(ours, found, strict=True):
        shares[i] = share
    return GroupPlan(shapes, tuple(shares), slots, total)


def _describe(request: Request) -> Batch:
    """Return what planning needs to know of one product."""
    m, n = request.shape
    names = (request.a.dtype.name, request.b.dtype.name, request.dtype.name)
    return Batch((), (), (), (), m, n, request.a.shape[1], *names)


def _check_memory(work: Batch, pool: Pool, share: Share) -> None:
    """Refuse tasks that no worker can hold."""
    if share.collective or not pool.memory:
        return
    held = dataclasses.replace(work, m=max(share.rows)).held_bytes
    if held > pool.memory:
        raise ProjectedMemoryError(
            f"a task of {max(share.rows)} rows of a product of {work.m} x {work.k} by {work.k} x {work.n} would hold "
            f"{format_bytes(held)}; a worker may hold {format_bytes(pool.memory)} for each task that it runs at a "
            "time. Leave batch='items' out, or use workers with more memory",
            {"": held},
            {"": pool.memory},
        )


def _by_slabs(request: Request, share: Share) -> da.Array:
    """Return a product by plain tasks of some rows each."""
    a = request.a.rechunk({0: share.rows, 1: -1}, method="tasks")
    b = request.b.rechunk({0: -1, 1: -1}, method="tasks")
    dtypes = (request.dtype.name, a.dtype.name, b.dtype.name)
    token = tokenize(a.name, b.name, dtypes, dataclasses.astuple(request.formula), share.rows)
    name = group_name(token, share.rank, share.seconds)
    settings = {"dtypes": dtypes, "names": (), "formula": request.formula, "several": False}
    layer = {
        (name, i, 0): Step((name, i, 0), multiply, TaskRef((a.name, i, 0)), TaskRef((b.name, 0, 0)), **settings)
        for i in range(len(share.rows))
    }
    kind = b._meta if "cupy" in type(b._meta).__module__ else a._meta
    meta = meta_from_array(kind, ndim=2, dtype=request.dtype)
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[a, b])
    return da.Array(graph, name, (share.rows, (request.shape[1],)), meta=meta)


def _order_by_size() -> None:
    """Have the scheduler start the longest tasks first; a client that can't ask leaves Dask's order."""
    client = current_client()
    if client is None or client.asynchronous:
        return
    scheduler_id = str(client.scheduler_info(n_workers=0)["id"])
    if _ordered.get(client) != scheduler_id:
        client.register_plugin(GroupOrder())
        _ordered[client] = scheduler_id
