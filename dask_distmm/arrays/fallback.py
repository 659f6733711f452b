"""Products that are not runs: why one is left to Dask's own function, and those of sparse chunks, which Dask lacks.

A chunk of the result is the sum of products of chunks. Chunks of a sparse operand are not cut, and each is used where
it is; a dense operand is cut as the other one along the axis that is summed over. Where that is one chunk, as of tall
matrices in chunks of rows, a task is a chunk of the result, and each worker fetches the other operand once.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import dask.array
import dask.array as da
import dask.array.routines
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.array.core import Array
from dask.array.rechunk import rechunk
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from distributed.metrics import time

from dask_distmm.config import hints_wanted
from dask_distmm.engines.base import log
from dask_distmm.errors import EngineError, MissingEngineError, PlanError, ProjectedMemoryError, ProtocolError
from dask_distmm.numeric.sparse import compressed, dense, multiply, sparse_package, total
from dask_distmm.numeric.types import FP8, Types, supported
from dask_distmm.planning import ENGINES
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import current_client
from dask_distmm.runtime.messages import NAME

# Sparse chunks


def is_sparse(x: Array) -> bool:
    """Whether an array says that its chunks are sparse."""
    return bool(sparse_package(x._meta))


def takes_sparse(a: Array, b: Array) -> bool:
    """Whether ``a @ b`` of sparse chunks is made here under `enable`: Dask has none of SciPy's, but unknown sizes."""
    # Those of the package sparse Dask multiplies as others.
    narrow = added_in_64_bits(np.result_type(a.dtype, b.dtype)) and "sparse" in _packages(a, b)
    return max(a.ndim, b.ndim) < 3 and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0] and not narrow


def sparse_in_einsum(*arrays: Array) -> bool:
    """Whether Dask's own ``einsum`` has sparse chunks where a product is dense."""
    return {"sparse", ""} <= _packages(*arrays)


def _packages(*arrays: Array) -> set[str]:
    return {sparse_package(x._meta) for x in arrays}


def multiply_sparse(a: Array, b: Array) -> Array:
    """Return ``a @ b`` of matrices and vectors, of which one or both have sparse chunks: dense unless both have."""
    if max(a.ndim, b.ndim) > 2 or 0 in (a.ndim, b.ndim):
        raise PlanError(
            f"the operands have {a.ndim} and {b.ndim} dimensions, and sparse chunks; expected matrices: loop over the "
            "items of a batch"
        )
    if 1 in (a.ndim, b.ndim):
        product = multiply_sparse(a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
        return product[tuple(0 if x.ndim == 1 else slice(None) for x in (a, b))]
    if a.shape[1] != b.shape[0]:
        raise PlanError(f"shapes {a.shape} and {b.shape} don't match: the last axis of a and the first of b differ")
    a, b = _cut(a, b)
    rows, inner, cols = a.chunks[0], range(a.numblocks[1]), b.chunks[1]
    name = f"sparse-matmul-{tokenize(a.name, b.name)}"
    tasks: dict[Any, Task] = {}
    for i, j in itertools.product(range(len(rows)), range(len(cols))):
        parts = [(f"{name}-part", i, k, j) for k in inner] if len(inner) > 1 else [(name, i, j)]
        for k, part in enumerate(parts):
            tasks[part] = Task(part, multiply, TaskRef((a.name, i, k)), TaskRef((b.name, k, j)))
        if len(inner) > 1:
            tasks[name, i, j] = Task((name, i, j), total, List(*map(TaskRef, parts)))
    both, dtype = is_sparse(a) and is_sparse(b), np.result_type(a.dtype, b.dtype)
    meta = multiply(a._meta, b._meta) if both else meta_from_array(dense(a._meta), 2, dtype=dtype)
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[a, b])
    return Array(graph, name, (rows, cols), dtype=dtype, meta=meta)


def _cut(a: Array, b: Array) -> tuple[Array, Array]:
    """Return operands in the same chunks of the axis that is summed over."""
    if a.chunks[1] == b.chunks[0]:
        return a, b
    if not is_sparse(b):
        return a, b.rechunk({0: a.chunks[1]})
    if is_sparse(a):
        b = b.map_blocks(compressed, dtype=b.dtype, meta=compressed(b._meta))
        return a, b.rechunk({0: a.chunks[1]}, method="tasks")
    return a.rechunk({1: b.chunks[0]}), b


# Dask's own functions, whatever is installed under their names later


stock_matmul: Callable[..., da.Array] = dask.array.routines.matmul
dask_tensordot: Callable[..., Any] = dask.array.routines.tensordot
dask_rechunk: Callable[..., Any] = rechunk


def dask_matmul(a: da.Array, b: da.Array) -> da.Array:
    """Multiply by tasks: by Dask's own function, which has no product of sparse chunks."""
    return multiply_sparse(a, b) if is_sparse(a) or is_sparse(b) else stock_matmul(a, b)


# Why a product is left to Dask's own function


NO_CLUSTER = "no cluster is connected; create a distributed.Client"


def why_not(a: da.Array, b: da.Array, types: Types | None = None, *, cluster: bool = True, most: int = 2) -> str | None:
    """Return why a product can't run here and goes to Dask's own function, or None if it can."""
    if max(a.ndim, b.ndim) > most:
        return f"the operands have {a.ndim} and {b.ndim} dimensions; a run is of matrices; for batches there is matmul"
    kinds = {name: array_kind(array._meta) for name, array in (("A", a), ("B", b))}
    for (name, kind), array in zip(kinds.items(), (a, b), strict=True):
        if is_sparse(array):
            return f"the chunks of {name} are sparse ({kind}), and multiplied by tasks where they are"
        if kind not in ("numpy", "cupy"):
            return (
                f"the chunks of {name} are {kind}; engines take numpy.ndarray and cupy.ndarray: convert by map_blocks"
            )
    kind = "cupy" if "cupy" in kinds.values() else "numpy"
    dtypes = [a.dtype.name, b.dtype.name] if types is None else list(types[:3])
    if types is None and set(dtypes) & set(FP8):
        return "FP8 needs scales; call dask_distmm.matmul(..., quantization_scales=...)"
    if not all(supported(array.dtype) for array in (a, b)) or not any(
        engine.takes(kind, dtypes) for engine in ENGINES.values()
    ):
        names = " and ".join(dict.fromkeys(dtypes))
        return f"no engine multiplies {kind} arrays of the types {names}; convert them, as by astype('float64')"
    if cluster and current_client() is None:
        return NO_CLUSTER
    return None


# What `enable` has done with the products of a program


# So many products are a program.
_MANY = 20
# The scheduler is asked about runs for so long (seconds).
_PATIENCE = 2
# A product that was left to Dask: its operations, its text, why, what would change that, and when it was.
Left = tuple[float, str, str, str, float]
# By the identity of a client; None once there was a run, or a hint.
_left: dict[str, list[Left] | None] = {}


def _client_id() -> str:
    client = current_client()
    return "" if client is None else str(client.id)


def note_taken() -> None:
    """Note that `enable` has made something for the current client."""
    _left[_client_id()] = None


def note_left(what: str, flops: float, why: str, change: str = "") -> None:
    """Note that `enable` has left a product to Dask; after many of them and no run the log has a hint."""
    name = _client_id()
    if (products := _left.setdefault(name, [])) is None:
        return
    products.append((flops, what, why, change, time()))
    if len(products) >= _MANY:
        _hint(products)
        _left[name] = None


def _largest(products: Sequence[Left]) -> Left:
    return max(products, key=operator.itemgetter(0))


def _hint(products: Sequence[Left]) -> None:
    if not hints_wanted() or _in_regions(products[0][-1]):
        return
    _, what, why, change, _ = _largest(products)
    which = f"The largest of {len(products)} products" if len(products) > 1 else "The only product"
    log.warning(
        "enable() has made no collective run of a product so far. %s%s is left to Dask's own tasks, as %s%s. (The "
        "config distmm.hints: false turns this hint off.)",
        *(which, what and f", {what},", why, change and f". {change}"),
    )


def _in_regions(since: float) -> bool:
    """Whether the scheduler has since made runs of regions, of which products that were left to Dask may be parts."""
    client, events = current_client(), list[Any]()
    if client is not None and not client.asynchronous:
        with contextlib.suppress(OSError, TimeoutError):  # the cluster may be going
            events = client.sync(client.scheduler.events, topic=NAME, callback_timeout=_PATIENCE)
    return any(when >= since and "tasks" in event for when, event in events)


@atexit.register
def _at_exit() -> None:
    """Give the hint for a program that ends without any run."""
    left = [products for products in _left.values() if products]
    if left and None not in _left.values():
        _hint(max(left, key=_largest))


def has_unknown_chunks(x: da.Array) -> bool:
    """Whether chunk sizes are unknown, as after selecting rows by a mask."""
    return any(map(math.isnan, x.shape))


def or_dask(make: Callable[[], Any], *, raises: bool) -> Any:
    """Return what `make` returns, and note it; NotImplemented where nothing runs on the cluster, or memory is short.

    The latter is an error if it `raises`. It is logged why; where an engine is missing only as a hint.
    """
    try:
        result = make()
    except (EngineError, ProtocolError, ProjectedMemoryError) as error:
        if raises and isinstance(error, ProjectedMemoryError):
            raise
        if isinstance(error, MissingEngineError):
            note_left("", 0.0, str(error))
        else:
            log.warning("left to Dask's own tasks: %s", error)
        return NotImplemented
    if result is not NotImplemented:
        note_taken()
    return result


def added_in_64_bits(dtype: np.dtype[Any]) -> bool:
    """Whether Dask's functions return products of a type as int64 or uint64, where NumPy's keep the type."""
    return dtype.kind in "biu" and dtype.itemsize < 8
