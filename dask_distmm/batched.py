"""Operands of more than two dimensions: batches of products, as plain tasks of whole items or as collective runs.

::

    A[0..3]  B[0..3] -> np.matmul -> D[0..3]        items: the batch axes are cut, items are whole
    A[4..7]  B[4..7] -> np.matmul -> D[4..7]

    A[0]  B[0] -> contribute, barrier, collect -> D[0]      collective: a run for each item, stacked;
    A[1]  B[1] -> contribute, barrier, collect -> D[1]      one run for all if they share A or B
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.array.utils import meta_from_array
from dask.utils import parse_bytes, parse_timedelta

from dask_distmm import api, formula
from dask_distmm.chunks import array_kind
from dask_distmm.cluster import Snapshot, current_client, snapshot
from dask_distmm.config import parsed, read_options
from dask_distmm.dtypes import compute_dtype, dtype_from_name, rounded, typed
from dask_distmm.epilog import Finish, finish
from dask_distmm.errors import MissingEngineError, PlanError, ProjectedMemoryError
from dask_distmm.operator import dask_matmul
from dask_distmm.plan import Batch, BatchEstimate, BatchPlan, Plan, Problem, Worker
from dask_distmm.plan.batches import Pool, Sizes, choose, item_plan
from dask_distmm.plan.show import size_text

__all__ = [
    "BATCH",
    "Product",
    "check_name",
    "demands",
    "explain",
    "known_workers",
    "matmul",
    "multiply",
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


@dataclasses.dataclass(frozen=True)
class Product:
    """What is asked for: operands of at least two dimensions each, and the formula.

    Parameters
    ----------
    a, b
        Operands after op(), vectors as matrices.
    spec, extras
        The formula, and the arrays that it reads.
    dropped
        Which of the last two axes of D are there only because an operand was a vector.
    out_chunks
        As asked for, for D with all its axes; None for those of the way that is taken.
    """

    a: da.Array
    b: da.Array
    spec: Finish
    extras: Sequence[tuple[str, da.Array]]
    dropped: tuple[int, ...]
    out_chunks: Any

    @property
    def batch(self) -> Sizes:
        """Batch axes of D."""
        return np.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])

    @property
    def shape(self) -> Sizes:
        """All axes of D."""
        return (*self.batch, self.a.shape[-2], self.b.shape[-1])

    @property
    def dtype(self) -> np.dtype:
        """Type of D."""
        return np.result_type(self.a.dtype, self.b.dtype)

    @property
    def kind(self) -> str:
        """What the chunks of D are."""
        return "cupy" if "cupy" in (array_kind(self.a._meta), array_kind(self.b._meta)) else "numpy"

    @property
    def empty(self) -> bool:
        """Whether nothing is to be multiplied."""
        return 0 in (*self.a.shape, *self.b.shape)

    def why_not(self, cluster: bool) -> str | None:
        """Return why Dask's own function has to do it, or None."""
        reason = api.why_not(self.a, self.b, cluster=cluster)
        for name, array in self.extras:
            if reason is None and (unfit := formula.why_not(array)):
                reason = f"{name}: {unfit}"
        return reason


def matmul(a: Any, b: Any, c: Any, **options: Any) -> Any:
    """Do what `dask_distmm.matmul` says, for operands of which one has more than two dimensions.

    Parameters
    ----------
    a, b, c, options
        As there.
    """
    needed, rest = demands(options), _rest(options)
    product = _parse(a, b, c, rest)
    if product.empty and product.spec.plain:
        return _outside(product, da.zeros(product.shape, dtype=product.dtype), {})
    if product.empty or product.why_not(cluster=True) is not None:
        # For plain products the very function that Dask would have called, on the operands as they came.
        d = dask_matmul(product.a, product.b)
        found = (
            d if product.spec.plain else formula.without_a_run(d, product.a, product.b, product.spec, product.extras)
        )
        d, aux = found if isinstance(found, tuple) else (found, {})
        return _outside(product, d, aux)
    made = _plan(product, rest, needed, imagined=None)
    if made.way == "items":
        d, aux = _by_items(product, made.chunks)
    else:
        run = functools.partial(api.matmul, method=rest["method"], engine=rest["engine"], workers=rest["workers"])
        d, aux = _by_runs(product, run)
    return _outside(product, d, aux)


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
    reason = product.why_not(cluster=imagined is None)
    if reason is not None:
        return api.NotCollective(reason)
    if product.empty:
        return api.NotCollective("the product is empty or all zeros, nothing is multiplied")
    if imagined is not None:
        needed = [text for text in needed if not text.startswith("workers=")]
    return _plan(product, rest, needed, imagined)


def demands(options: Mapping[str, Any]) -> list[str]:
    """Return the options given with the call that only collective runs can meet."""
    found = [f"{name}={options[name]!r}" for name in ("method", "engine") if options[name] not in (None, "auto")]
    return found + ([f"workers={options['workers']!r}"] if options["workers"] is not None else [])


def _rest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, checked, with what the configuration says where they were left out."""
    method, engine = api.check_names(options["method"], options["engine"])
    return {**options, "method": method, "engine": engine, "batch": check_name(options["batch"])}


def _parse(a: Any, b: Any, c: Any, options: Mapping[str, Any]) -> Product:
    """Check what was given.

    Raises
    ------
    PlanError
        Shapes do not match or broadcast, or something else does not fit.
    """
    a, b = (da.asanyarray(x) for x in (a, b))
    a, b = (formula.apply_op(name, x, options[f"op_{name}"]) for name, x in (("a", a), ("b", b)))
    api.check_shapes(a, b)
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise PlanError(
            f"shapes {a.shape} and {b.shape} don't match: their batch axes {a.shape[:-2]} and {b.shape[:-2]} "
            "must be equal, or 1 where they differ"
        ) from None
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
    )
    dropped = tuple(axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1)
    a, b = (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    shape = tuple(
        size for axis, size in enumerate((*batch, a.shape[-2], b.shape[-1]), -len(batch) - 2) if axis not in dropped
    )
    out_chunks = options["out_chunks"]
    if out_chunks is not None:
        try:
            out_chunks = normalize_chunks(out_chunks, shape, dtype=np.result_type(a.dtype, b.dtype))
        except (ValueError, TypeError) as error:
            raise PlanError(f"out_chunks={out_chunks!r} does not fit the result's shape {shape}: {error}") from error
    return Product(a, b, spec, extras, dropped, out_chunks)


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
    return int(parsed("batch.task-bytes", parse_bytes)), float(parsed("batch.task-overhead", parse_timedelta))


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
        return workers, Snapshot(workers, [], [], problem.engine_alone, [])
    client = current_client()
    assert client is not None
    try:
        known = snapshot(client, problem)
    except MissingEngineError:
        # CuPy chunks where no worker has the GPU engine: plain tasks need CuPy only.
        if problem.array != "cupy":
            raise
        return _counted(client), None
    if known is None:
        # An asynchronous client can't ask now; what it knows already must do.
        workers = _counted(client)
        known = Snapshot(workers, [], [], problem.engine_alone, [])
    return known.workers, known


def _counted(client: Any) -> list[Worker]:
    """Return workers as many as there are, each an average one."""
    info = client.scheduler_info(n_workers=0)
    count = int(info.get("n_workers") or len(info["workers"]) or 1)
    threads, memory = (int(info.get(name) or 0) // count for name in ("total_threads", "total_memory"))
    return [Worker(f"worker-{i}", max(1, threads), memory) for i in range(count)]


def _plan(product: Product, options: Mapping[str, Any], needed: Sequence[str], imagined: int | None) -> BatchPlan:
    """Choose the way."""
    first, pair = (0,) * len(product.batch), _shared(product)
    a, b = pair or (_item(x, first, product.batch) for x in (product.a, product.b))
    runs = 1 if pair else math.prod(product.batch)
    extras = [(name, _item(array, first, product.batch)) for name, array in product.extras]
    problem = api.make_problem(
        a, b, options["method"], options["engine"], None, options["workers"], product.spec, extras
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
        counts = [math.prod(problem.chunk_counts(name)) for name in (*problem.operands, "d")]
        tasks = runs * (1 + sum(counts) + sum(counts[:-1]))
        seconds = runs * each.seconds + tasks * overhead
        by_runs = BatchEstimate(
            "collective",
            seconds,
            runs * each.compute_seconds,
            runs * (each.seconds - each.compute_seconds),
            tasks * overhead,
            tasks,
            runs,
            each.peak_bytes,
        )
    way, reason = choose(options["batch"], by_items if fits else None, by_runs, needed)
    if way == "items" and not fits:
        raise ProjectedMemoryError(
            f"one item of the batch would hold {size_text(batch.held_bytes)} in its task, a worker may hold "
            f"{size_text(pool.memory)} for each task that it runs at a time. Use batch='collective', or workers with "
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
        a.dtype.name,
        b.dtype.name,
        product.dtype.name,
        whole(a, a_chunks),
        whole(b, b_chunks),
        a.npartitions + b.npartitions + sum(array.npartitions for _, array in product.extras),
        sum(array.itemsize * math.prod(array.shape[-2:]) for _, array in product.extras),
    )


# Whole items, in plain tasks


def multiply(
    a: Any, b: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], spec: Finish, several: bool
) -> Any:
    """Multiply chunks of whole items. Runs on a worker, as a plain task.

    Parameters
    ----------
    a, b
        NumPy or CuPy arrays (..., m, k) and (..., k, n); or these in lists of one.
    extras
        What the formula reads beside them, broadcast against D.
    dtypes
        Names of the types of D, of A and B, and of the extras.
    names
        Names of the extras.
    spec
        The formula.
    several
        Return a tuple of D and the auxiliary outputs, in the order of ``spec.per_element``.
    """
    arrays = []
    for chunk, name in zip((a, b, *extras), dtypes[1:], strict=True):
        while isinstance(chunk, list):
            (chunk,) = chunk  # noqa: PLW2901
        arrays.append(typed(chunk, name))
    xp: Any = np
    if any(array_kind(array) == "cupy" for array in arrays):
        xp = importlib.import_module("cupy")
        arrays = [array if array_kind(array) == "cupy" else xp.asarray(array) for array in arrays]
    dtype = dtype_from_name(dtypes[0])
    inner = compute_dtype(dtype, max(1, arrays[0].shape[-1]))
    acc = xp.matmul(*(array.astype(inner, copy=False) for array in arrays[:2]))
    if spec.trivial:
        return (rounded(acc, dtype),) if several else rounded(acc, dtype)
    with np.errstate(all="ignore"):
        d, aux = finish(xp, spec, acc, dict(zip(names, arrays[2:], strict=True)))
    d = rounded(d, dtype)
    if not several:
        return d
    return (d, *(aux[name].astype(spec.dtype_of(name, dtype), copy=False) for name in spec.per_element))


def _by_items(product: Product, cut: tuple[Sizes, ...]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by tasks that multiply some items each."""
    a, b, spec, ndim = product.a, product.b, product.spec, len(product.shape)
    chunks = (*cut, (product.shape[-2],), (product.shape[-1],))
    # Labels of axes: those of D, and one for k.
    labels = tuple(range(ndim))
    arguments: list[Any] = []
    for name, array in (("a", a), ("b", b), *product.extras):
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
    meta = meta_from_array(b._meta if product.kind == array_kind(b._meta) else a._meta, ndim=ndim, dtype=product.dtype)
    several = bool(spec.per_element)
    made = da.blockwise(
        multiply,
        labels,
        *arguments,
        name=None,
        token="matmul-items",
        adjust_chunks=dict(enumerate(chunks)),
        align_arrays=False,
        concatenate=False,
        meta=meta,
        dtype=product.dtype,
        dtypes=(
            product.dtype.name,
            *(array.dtype.name for array in (a, b)),
            *(x.dtype.name for _, x in product.extras),
        ),
        names=tuple(name for name, _ in product.extras),
        spec=spec,
        several=several,
    )
    aux: dict[str, da.Array] = {}
    if several:
        for number, name in enumerate(spec.per_element, start=1):
            aux[name] = _output(product, made, name, number)
        made = made.map_blocks(operator.itemgetter(0), dtype=product.dtype, meta=meta)
    if spec.operand_sum:
        aux[spec.operand_sum] = formula.operand_sum(spec, a, b)
    return made, aux


def _output(product: Product, made: da.Array, name: str, number: int) -> da.Array:
    """Return one auxiliary output of tasks that return tuples."""
    spec = product.spec
    dtype = spec.dtype_of(name, product.dtype)
    keeps = spec.keeps(name)
    chunks = [sizes if kept else (1,) * len(sizes) for sizes, kept in zip(made.chunks[-2:], keeps, strict=True)]
    batch = made.chunks[:-2] if name != "result_amax" else tuple((1,) * len(sizes) for sizes in made.chunks[:-2])
    array = made.map_blocks(
        operator.itemgetter(number),
        dtype=dtype,
        chunks=(*batch, *chunks),
        meta=formula.output_meta(made, dtype),
    )
    if name == "result_amax":
        return array.max()
    return array.squeeze(spec.sum_axis - 2) if name == spec.sums else array


# Collective runs


def _shared(product: Product) -> tuple[da.Array, da.Array] | None:
    """Return the two matrices whose product is the whole batch, if there are such.

    There are if all items share B (they lie below one another then) or A (beside one another), and the formula looks
    at each element of D for itself.
    """
    a, b, spec = product.a, product.b, product.spec
    if product.extras or spec.per_element or spec.operand_sum:
        return None
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        return a.reshape((-1, k)), b.reshape((k, n))
    if math.prod(a.shape[:-2]) == 1:
        return a.reshape((m, k)), da.moveaxis(b, -2, 0).reshape((k, -1))
    return None


def _unshared(product: Product, d: da.Array) -> da.Array:
    """Return the batch that such a product is."""
    m, n = product.shape[-2:]
    if math.prod(product.b.shape[:-2]) == 1:
        return d.reshape(product.shape)
    return da.moveaxis(d.reshape((m, *product.batch, n)), 0, -2)


def _item(array: da.Array, index: Sizes, batch: Sizes) -> da.Array:
    """Return the matrix of one item of an operand, or of what the formula reads."""
    own = index[len(batch) - (array.ndim - 2) :]
    return array[tuple(0 if size == 1 else i for i, size in zip(own, array.shape[:-2], strict=True))]


def _by_runs(product: Product, run: Callable[..., Any]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by collective runs."""
    spec, batch = product.spec, product.batch
    alpha, beta = (complex(*x) if x[1] else x[0] for x in (spec.alpha, spec.beta))
    if (pair := _shared(product)) is not None:
        return _unshared(product, run(*pair, alpha=alpha, epilog=spec.epilog or None)), {}
    items: dict[Sizes, da.Array] = {}
    outputs: dict[str, dict[Sizes, da.Array]] = {}
    for index in itertools.product(*map(range, batch)):
        a, b = (_item(x, index, batch) for x in (product.a, product.b))
        inputs = {name: _item(array, index, batch) for name, array in product.extras}
        c = inputs.pop("c", None)
        found = run(
            a,
            b,
            c,
            alpha=alpha,
            beta=None if c is None else beta,
            epilog=spec.epilog or None,
            epilog_inputs=inputs,
            bias_axis=spec.bias_axis,
            result_amax=spec.amax,
        )
        items[index], aux = found if isinstance(found, tuple) else (found, {})
        for name, array in aux.items():
            outputs.setdefault(name, {})[index] = array
    stacked = {name: _stack(arrays, batch) for name, arrays in outputs.items()}
    if spec.amax:
        stacked["result_amax"] = stacked["result_amax"].max()
    if spec.operand_sum:
        stacked[spec.operand_sum] = formula.operand_sum(spec, product.a, product.b)
    return _stack(items, batch), stacked


def _stack(arrays: Mapping[Sizes, da.Array], batch: Sizes, before: Sizes = ()) -> da.Array:
    """Return arrays as one, with the batch axes before their own."""
    if len(before) == len(batch):
        return arrays[before]
    return da.stack([_stack(arrays, batch, (*before, i)) for i in range(batch[len(before)])])
