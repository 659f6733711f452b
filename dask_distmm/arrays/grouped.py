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

from dask_distmm import api
from dask_distmm.arrays import formula
from dask_distmm.arrays import request as problems
from dask_distmm.arrays.batched import check_name, demands, known_workers, task_options, why_not
from dask_distmm.arrays.items import Product, multiply
from dask_distmm.arrays.quantize import operands
from dask_distmm.config import dask_costs, read_options, setting
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.graph.build import Step
from dask_distmm.numeric.epilogs import Finish
from dask_distmm.numeric.types import resolve_types
from dask_distmm.planning import Batch, GroupPlan, Problem, Share, Worker
from dask_distmm.planning.dask_tasks import around
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
    options = {"method": method, "engine": engine, "workers": workers, "batch": batch}
    products = _parse(pairs, alpha, op_a, op_b, epilog)
    found = _plan(products, options)
    if any(share is not None and not share.collective for share in found.shares):
        _order_by_size()
    results = []
    for product, share in zip(products, found.shares, strict=True):
        if share is None or share.collective:
            spec = product.spec
            results.append(
                api.matmul(
                    product.a,
                    product.b,
                    alpha=complex(*spec.alpha) if spec.alpha[1] else spec.alpha[0],
                    epilog=epilog,
                    method=method,
                    engine=engine,
                    workers=workers,
                )
            )
        else:
            results.append(_by_slabs(product, share))
    return results


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
    formulas = {"alpha": 1.0, "op_a": "N", "op_b": "N", "epilog": None}
    products = _parse(pairs, **{name: options.pop(name, value) for name, value in formulas.items()})
    return _plan(products, {"method": None, "engine": None, "workers": None, "batch": None} | options)


def _parse(
    pairs: Sequence[tuple[Any, Any]], alpha: complex, op_a: str, op_b: str, epilog: str | Callable[..., Any] | None
) -> list[Product]:
    """Check what was given."""
    products = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PlanError(f"product {number} is {type(pair).__name__}; expected a pair (A, B)")
        try:
            a, b = operands(*pair)
            if (a.ndim, b.ndim) != (2, 2):
                raise PlanError(
                    f"found {a.ndim} and {b.ndim} dimensions; expected matrices, for others there is matmul"
                )
            a, b = formula.apply_op("a", a, op_a), formula.apply_op("b", b, op_b)
            problems.check_shapes(a, b)
            name = "" if epilog is None or callable(epilog) else str(getattr(epilog, "value", epilog)).lower()
            wanted = Finish(epilog=name)
            if wanted.inputs or wanted.per_element or wanted.operand_sum or wanted.replicated:
                raise PlanError(
                    f"epilog {name!r} has more inputs or outputs for each product; use matmul for each of them"
                )
            types = resolve_types(a.dtype, b.dtype, default_compute=setting("compute-type"))
            spec, _ = formula.parse(a, b, None, alpha, None, epilog, {}, -1, False, types)
        except PlanError as error:
            raise PlanError(f"product {number}: {error}") from error
        products.append(Product(a, b, types, spec, [], (), None))
    return products


def _plan(products: Sequence[Product], options: dict[str, Any]) -> GroupPlan:
    """Share the products out."""
    method, engine = problems.check_names(options["method"], options["engine"])
    wanted, needed = check_name(options["batch"]), demands(options)
    if wanted == "items" and needed:
        raise PlanError(f"batch='items' and {needed[0]}: plain tasks run where Dask puts them; leave one of them out")
    shapes = tuple((product.shape[0], product.shape[1], product.a.shape[1]) for product in products)
    ours = [i for i, product in enumerate(products) if not product.empty and why_not(product, cluster=True) is None]
    if not ours:
        return GroupPlan(shapes, (None,) * len(products), 0, 0.0)

    @functools.cache
    def problem_of(i: int) -> Problem:
        """Return a product as a collective run would see it."""
        product = products[i]
        return problems.make_problem(
            product.a, product.b, method, engine, None, options["workers"], product.spec, (), product.types
        )

    known: dict[tuple[str, ...], tuple[list[Worker], Snapshot | None]] = {}

    def ask(i: int) -> tuple[list[Worker], Snapshot | None]:
        """Ask the scheduler once for all products of the same types."""
        product = products[i]
        key = (product.kind, product.a.dtype.name, product.b.dtype.name)
        if key not in known:
            known[key] = known_workers(problem_of(i), None)
        return known[key]

    _, overhead = task_options()
    read = read_options()
    pools = [Pool.of(ask(i)[0], read.limit_fraction, products[i].kind) for i in ours]
    slots = min(pool.slots for pool in pools)
    works = [_describe(products[i]) for i in ours]
    seconds, spread = [], []
    for i, work, pool in zip(ours, works, pools, strict=True):
        machine = read.machine("cublasmp" if products[i].kind == "cupy" else "numpy")
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
    rows = [products[i].a.chunks[0] for i in ours]
    found, total = share_out(seconds, rows, collective, slots, overhead, forced, spread)
    for work, pool, share in zip(works, pools, found, strict=True):
        _check_memory(work, pool, share)
    shares: list[Share | None] = [None] * len(products)
    for i, share in zip(ours, found, strict=True):
        shares[i] = share
    return GroupPlan(shapes, tuple(shares), slots, total)


def _describe(product: Product) -> Batch:
    """Return what planning needs to know of one product."""
    m, n = product.shape
    names = (product.a.dtype.name, product.b.dtype.name, product.dtype.name)
    return Batch((), (), (), (), m, n, product.a.shape[1], *names)


def _check_memory(work: Batch, pool: Pool, share: Share) -> None:
    """Refuse tasks that no worker can hold."""
    if share.collective or not pool.memory:
        return
    held = dataclasses.replace(work, m=max(share.rows)).held_bytes
    if held > pool.memory:
        raise ProjectedMemoryError(
            f"a task of {max(share.rows)} rows of a product of {work.m} x {work.k} by {work.k} x {work.n} would hold "
            f"{format_bytes(held)}; a worker may hold {format_bytes(pool.memory)} for each task that it runs at a time. "
            "Leave batch='items' out, or use workers with more memory",
            {"": held},
            {"": pool.memory},
        )


def _by_slabs(product: Product, share: Share) -> da.Array:
    """Return a product by plain tasks of some rows each."""
    a = product.a.rechunk({0: share.rows, 1: -1}, method="tasks")
    b = product.b.rechunk({0: -1, 1: -1}, method="tasks")
    dtypes = (product.dtype.name, a.dtype.name, b.dtype.name)
    token = tokenize(a.name, b.name, dtypes, dataclasses.astuple(product.spec), share.rows)
    name = group_name(token, share.rank, share.seconds)
    settings = {"dtypes": dtypes, "names": (), "spec": product.spec, "several": False}
    layer = {
        (name, i, 0): Step((name, i, 0), multiply, TaskRef((a.name, i, 0)), TaskRef((b.name, 0, 0)), **settings)
        for i in range(len(share.rows))
    }
    kind = b._meta if "cupy" in type(b._meta).__module__ else a._meta
    meta = meta_from_array(kind, ndim=2, dtype=product.dtype)
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[a, b])
    return da.Array(graph, name, (share.rows, (product.shape[1],)), meta=meta)


def _order_by_size() -> None:
    """Have the scheduler start the longest tasks first; a client that can't ask leaves Dask's order."""
    client = current_client()
    if client is None or client.asynchronous:
        return
    scheduler_id = str(client.scheduler_info(n_workers=0)["id"])
    if _ordered.get(client) != scheduler_id:
        client.register_plugin(GroupOrder())
        _ordered[client] = scheduler_id
