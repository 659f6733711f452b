"""Matrices with many more rows than columns: each chunk of rows is factorized where it lies, as plain tasks.

TSQR (Demmel, Grigori, Hoemmen, Langou 2012)::

    A1 = Q1 R1         R1          Q = [Q1 P1]
    A2 = Q2 R2         R2 = P R        [Q2 P2]
    A3 = Q3 R3         R3              [Q3 P3]

R1, R2, R3 are of n x n elements; they alone move. Stacked they are such a matrix again. `engines.factor.tall`
factorizes a chunk.
"""

from __future__ import annotations

import functools
import operator
import threading
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.arrays.linalg.factorize import RunOptions
from dask_distmm.arrays.stock import dask_matmul
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.tall import tall_qr
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.errors import MatrixError, PlanError

__all__ = ["goes_by_rows", "qr_of_rows", "solve_rows"]

# A chunk of rows should have this many times as many rows as columns, on average, and so should all of them together.
_EACH, _ALL = 2, 4
# So many R are stacked in one task.
_STACKED = 8


def goes_by_rows(a: Array, how: RunOptions) -> bool:
    """Whether a matrix is factorized by its chunks of rows: as asked for, or where it is tall and no run is asked for.

    Raises
    ------
    PlanError
        It is asked for, and there are no columns, or fewer rows than columns, or options of a run.
    """
    m, n = a.shape
    asked, run = how.get("method", "auto"), how.keys() - {"method"}
    if asked != "rows":
        return asked == "auto" and not run and 0 < _ALL * n <= m and m >= _EACH * n * len(a.chunks[0])
    if run:
        raise PlanError(f"method='rows' is no run, and has no {min(run)}=: leave it out, or say method='columns'")
    if not 0 < n <= m:
        raise PlanError(f"method='rows' of {m} rows and {n} columns: expected columns, and not more of them than rows")
    return True


def qr_of_rows(a: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """Return Q, in the chunks of rows of `a`, and R, in one chunk.

    Parameters
    ----------
    a : array, (m, n)
        With m >= n > 0.
    dtype
        Type that is computed in.
    """
    a = a.rechunk({1: -1})
    sizes, n = a.chunks[0], a.shape[1]
    token = tokenize("qr-rows", a.name, dtype)
    pairs, q, r = f"qr-rows-{token}", f"qr-rows-q-{token}", f"qr-rows-r-{token}"
    meta = meta_from_array(a._meta if dtype.kind == "c" else a._meta.real, 2, dtype=dtype)
    each: dict[Any, Any] = {
        (pairs, i): Task((pairs, i), _qr_of_chunk, TaskRef((a.name, i, 0)), dtype) for i in range(len(sizes))
    }
    graph = HighLevelGraph.from_collections(pairs, each, [a])

    def picked(name: str, which: int, rows: tuple[int, ...]) -> Array:
        tasks = {
            (name, i, 0): Task((name, i, 0), operator.getitem, TaskRef((pairs, i)), which) for i in range(len(sizes))
        }
        layers, dependencies = {**graph.layers, name: tasks}, {**graph.dependencies, name: {pairs}}
        return Array(HighLevelGraph(layers, dependencies), name, (rows, (n,)), meta=meta)

    tops = tuple(min(size, n) for size in sizes)
    if len(sizes) == 1:
        return picked(q, 0, sizes), picked(r, 1, tops)
    stack = picked(r, 1, tops)
    groups = tuple(sum(tops[i : i + _STACKED]) for i in range(0, len(tops), _STACKED))
    inner, found = qr_of_rows(stack.rechunk({0: groups}), dtype)
    inner = inner.rechunk({0: tops})
    tasks = {
        (q, i, 0): Task((q, i, 0), _first_times, TaskRef((pairs, i)), TaskRef((inner.name, i, 0)))
        for i in range(len(sizes))
    }
    whole = HighLevelGraph.merge(graph, inner.__dask_graph__())
    layers, dependencies = {**whole.layers, q: tasks}, {**whole.dependencies, q: {pairs, inner.name}}
    return Array(HighLevelGraph(layers, dependencies), q, (sizes, (n,)), meta=meta), found


def solve_rows(a: Array, b: Array, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """Return x, (n, k), that minimizes ``|a @ x - b|``, the squared norms, (k,), and R, in one chunk.

    Parameters
    ----------
    a, b : array, (m, n) and (m, k)
        With m >= n.
    dtype
        Type that is computed in.
    """
    a, b = (x.astype(dtype) for x in (a.rechunk({1: -1}), b.rechunk({0: a.chunks[0]})))
    q, r = qr_of_rows(a, dtype)
    right = dask_matmul(q.conj().T, b)
    solve = functools.partial(_solve_full_rank, rows=len(a))
    x = da.blockwise(solve, "ij", r, "il", right, "lj", concatenate=True, dtype=dtype, meta=right._meta)
    # By the difference itself: norms of the two sides would cancel.
    residuals = (abs(b - dask_matmul(a, x)) ** 2).sum(axis=0)
    return x, residuals, r


def _qr_of_chunk(chunk: Any, dtype: np.dtype) -> tuple[Any, Any]:
    return tall_qr(_kernels(chunk), chunk.astype(dtype, copy=False))


def _first_times(pair: tuple[Any, Any], inner: Any) -> Any:
    return pair[0] @ inner


def _solve_full_rank(r: Any, right: Any, rows: int) -> Any:
    """Solve with R, once its diagonal says that the matrix, of so many rows, is of full rank."""
    kernels = _kernels(r)
    diagonal, norms = (kernels.host(x) for x in (kernels.diagonal(r), kernels.norms(r)))
    low = abs(diagonal) <= rows * np.finfo(r.dtype).eps * norms
    if low.any():
        raise MatrixError(
            f"column {int(np.argmax(low))} depends on those before it: the matrix is not of full rank; use the SVD"
        )
    columns = kernels.empty(r.shape, r.dtype)
    columns[...] = r
    x = kernels.empty(right.shape, r.dtype)
    x[...] = right
    kernels.trsm(columns, x, right=False, lower=False, op="N", unit=False)
    return x


def _kernels(chunk: Any) -> Kernels:
    return LapackKernels() if isinstance(chunk, np.ndarray) else _gpu_kernels(threading.get_ident(), chunk.device.id)


@functools.cache
def _gpu_kernels(thread: int, device: int) -> Kernels:
    """Return the kernels of a thread, which shares the libraries' handles with no other, on a device."""
    import cupy as cp

    from dask_distmm.engines.gpu.lapack import SolverKernels

    return SolverKernels(cp.cuda.Stream.null)
