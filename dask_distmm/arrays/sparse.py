"""Products of arrays with sparse chunks, by tasks: Dask's own functions have none. The sparse operand stays as it is.

A chunk of the result is the sum of products of chunks. Chunks of a sparse operand are not cut, and each is used where
it is; a dense operand is cut as the other one along the axis that is summed over. Where that is one chunk, as of tall
matrices in chunks of rows, a task is a chunk of the result, and each worker fetches the other operand once.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.errors import PlanError
from dask_distmm.numeric.sparse import compressed, dense, multiply, sparse_package, total


def is_sparse(x: Array) -> bool:
    """Whether an array says that its chunks are sparse."""
    return bool(sparse_package(x._meta))


def multiply_sparse(a: Array, b: Array) -> Array:
    """Return ``a @ b`` of matrices and vectors, of which one or both have sparse chunks: dense unless both have."""
    if max(a.ndim, b.ndim) > 2 or 0 in (a.ndim, b.ndim):
        raise PlanError(
            f"the operands have {a.ndim} and {b.ndim} dimensions, and sparse chunks; expected matrices: loop over the "
            "items of a batch"
        )
    if 1 in (a.ndim, b.ndim):
        found = multiply_sparse(a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
        return found[tuple(0 if x.ndim == 1 else slice(None) for x in (a, b))]
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
