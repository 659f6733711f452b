"""Matrices with many more rows than columns: each chunk of rows stays where it lies, n x n elements of it move.

By the chunks' Gram matrices (CholeskyQR2; `engines.factor.tall` has the steps)::

    G = sum of Ai^H Ai      R1^H R1 = G
    H = sum of Bi^H Bi      R2^H R2 = H        Bi = Ai R1^-1, which is not kept
                            Qi = Ai (R2 R1)^-1

Where that is not safe, by TSQR (Demmel, Grigori, Hoemmen, Langou 2012)::

    A1 = Q1 R1         R1          Q = [Q1 P1]
    A2 = Q2 R2         R2 = P R        [Q2 P2]
    A3 = Q3 R3         R3              [Q3 P3]

The tasks of both are in the graph; those that are not needed return at once. TSQR reads each chunk once, which counts
where chunks go to disk between two tasks.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.arrays.linalg.factorize import adjoint
from dask_distmm.arrays.linalg.public import RunOptions
from dask_distmm.arrays.stock import dask_matmul
from dask_distmm.engines.factor import tall
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.spectral import not_finite
from dask_distmm.engines.factor.tall import Divisor, Divisors
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.errors import MatrixError, PlanError
from dask_distmm.graph.build import TasksLayer
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import current_client
from dask_distmm.runtime.keys import ROWS_PREFIX

# A chunk of rows should have this many times as many rows as columns, on average, and so should all of them together.
_EACH, _ALL = 2, 4
# So many R are stacked, and so many Gram matrices added, in one task.
_STACKED = 8
# Gram matrices save m n^2 multiplications and additions. They take three steps of tasks more, which is as much as the
# first number of them, and two tasks for each chunk, each pair as much as the second (measured on two cores, on GPUs
# estimated by their rate).
_SAVED = {"numpy": (1e9, 5e7), "cupy": (5e11, 3e10)}
# Gram matrices are taken where the cluster has this many times the memory of the matrix: it is read three times.
_MEMORY = 3


def goes_by_rows(a: Array, how: RunOptions) -> bool:
    """Whether a matrix is factorized by its chunks of rows: if asked for, or if it is tall and no run is asked for."""
    m, n = a.shape
    asked, run = how.get("method", "auto"), how.keys() - {"method", "check_finite"}
    if asked != "rows":
        return asked == "auto" and not run and 0 < _ALL * n <= m and m >= _EACH * n * len(a.chunks[0])
    if run:
        raise PlanError(f"method='rows' is not a run and has no {min(run)}=: leave it out, or pass method='columns'")
    if not 0 < n <= m:
        raise PlanError(f"method='rows' needs from 1 to {m} columns, as many as there are rows; got {n}")
    return True


def qr_of_rows(a: Array, dtype: np.dtype, finite: bool) -> tuple[Array, Array]:
    """Return Q, in the chunks of rows of `a`, and R, in one chunk; `finite`: `a` has to be."""
    a = a.rechunk({1: -1})
    by_gram = _pays(a) and _fits_in_memory(a)
    graph = _Graph(a, dtype, f"q-{by_gram}-{finite}")
    divisors: Any = None
    if by_gram:
        grams = graph.sums("gram", [graph.add("gram", _gram, a, dtype) for a in graph.chunks])
        first = graph.add("first", _first, *grams)
        grams = graph.sums(
            "second-gram", [graph.add("second-gram", _second_gram, a, first, dtype) for a in graph.chunks]
        )
        divisors = graph.add("second", _second, first, *grams)
    pairs = [graph.add("pair", _pair, a, divisors, dtype, finite) for a in graph.chunks]
    top, below = graph.stack([graph.add("found", operator.itemgetter(1), pair) for pair in pairs])
    parts = [(_q_of_chunk, pair, below[i // _STACKED], i % _STACKED) for i, pair in enumerate(pairs)]
    return graph.array("q", parts, a.chunks[0]), graph.array("r", [(_r, divisors, top, graph.meta)], a.chunks[1])


def r_of_rows(a: Array, dtype: np.dtype, finite: bool) -> Array:
    """Return R alone; as `qr_of_rows`. Each chunk is read once."""
    a = a.rechunk({1: -1})
    graph = _Graph(a, dtype, f"r-{finite}")
    top, _ = graph.stack([graph.add("found", _r_of_chunk, a, dtype, finite) for a in graph.chunks])
    return graph.array("r", [(_r, None, top, graph.meta)], a.chunks[1])


class _Graph:
    """Tasks on the chunks of rows of one matrix."""

    def __init__(self, a: Array, dtype: np.dtype, kind: str) -> None:
        self._a = a
        self.meta = meta_from_array(a._meta if dtype.kind == "c" else a._meta.real, 2, dtype=dtype)
        self._token = tokenize("qr-rows", a.name, dtype, kind)
        self._tasks: dict[Any, Task] = {}
        self.chunks = [TaskRef((a.name, i, 0)) for i in range(a.numblocks[0])]

    def add(self, name: str, function: Callable[..., Any], *args: Any) -> TaskRef:
        """Add a task, and return a reference to it."""
        key = f"{ROWS_PREFIX}{name}-{self._token}", len(self._tasks), 0
        self._tasks[key] = Task(key, function, *args)
        return TaskRef(key)

    def array(self, name: str, tasks: list[tuple[Any, ...]], rows: tuple[int, ...]) -> Array:
        """Return an array of the results of more tasks, each a chunk with so many rows and all columns."""
        steps, name = f"{ROWS_PREFIX}{self._token}", f"{ROWS_PREFIX}{name}-{self._token}"
        whole = HighLevelGraph.from_collections(steps, TasksLayer(self._tasks), [self._a])
        layer = TasksLayer({(name, i, 0): Task((name, i, 0), *task) for i, task in enumerate(tasks)})
        layers, dependencies = {**whole.layers, name: layer}, {**whole.dependencies, name: {steps}}
        return Array(HighLevelGraph(layers, dependencies), name, (rows, self._a.chunks[1]), meta=self.meta)

    def sums(self, name: str, parts: list[TaskRef]) -> list[TaskRef]:
        """Add tasks that add up matrices until few are left, and return those."""
        while len(parts) > _STACKED:
            parts = [self.add(f"sum-{name}", _total, *group) for group in _groups(parts)]
        return parts

    def stack(self, found: list[TaskRef]) -> tuple[TaskRef, list[TaskRef]]:
        """Add the tasks that factorize stacked R; where there are none, all are None."""
        levels = [[self.add("stack", _stack, *group) for group in _groups(found)]]
        while len(levels[-1]) > 1:
            tops = [self.add("found", operator.itemgetter(1), node) for node in levels[-1]]
            levels.append([self.add("stack", _stack, *group) for group in _groups(tops)])
        *others, below = levels
        (top,) = below
        for level in reversed(others):
            below = [
                self.add("blocks", _blocks, node, below[i // _STACKED], i % _STACKED) for i, node in enumerate(level)
            ]
        return top, below


def solve_rows(a: Array, b: Array, dtype: np.dtype, finite: bool) -> tuple[Array, Array, Array]:
    """Return x, (n, k), that minimizes ``|a @ x - b|``, the squared norms, (k,), and R, in one chunk."""
    a, b = (x.astype(dtype) for x in (a.rechunk({1: -1}), b.rechunk({0: a.chunks[0]})))
    q, r = qr_of_rows(a, dtype, finite)
    x = _solutions(r, dask_matmul(adjoint(q), b), len(a), finite)
    # By the difference itself: norms of the two sides would cancel.
    residuals = (abs(b - dask_matmul(a, x)) ** 2).sum(axis=0)
    return x, residuals, r


def pseudoinverse_of_rows(a: Array, dtype: np.dtype, finite: bool) -> Array:
    """Return the pseudo-inverse of a matrix of full rank, in chunks of columns: R^-1 Q^H."""
    q, r = qr_of_rows(a, dtype, finite)
    return _solutions(r, adjoint(q), len(a), finite)


def _solutions(r: Array, right: Array, rows: int, finite: bool) -> Array:
    """Solve with R, of a matrix of so many rows, for each chunk of columns."""
    solve = functools.partial(_solve_full_rank, rows=rows, finite=finite)
    return da.blockwise(solve, "ij", r, "il", right, "lj", concatenate=True, dtype=right.dtype, meta=right._meta)


def _groups(parts: list[TaskRef]) -> list[list[TaskRef]]:
    return [parts[i : i + _STACKED] for i in range(0, len(parts), _STACKED)]


def _pays(a: Array) -> bool:
    """Whether the operations that Gram matrices save take longer than the tasks that they take more."""
    fixed, each = _SAVED["cupy" if array_kind(a._meta) == "cupy" else "numpy"]
    return len(a.chunks[0]) > 1 and a.shape[0] * a.shape[1] ** 2 >= fixed + each * len(a.chunks[0])


def _fits_in_memory(a: Array) -> bool:
    """Whether chunks of a matrix, and of as large a Q, stay in the memory of the workers."""
    client = current_client()
    if client is None or client.asynchronous:
        return True
    limits = [worker["memory_limit"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()]
    return not all(limits) or _MEMORY * a.nbytes <= sum(limits)


def _gram(chunk: Any, dtype: np.dtype) -> Any:
    return tall.gram(_kernels(chunk), chunk.astype(dtype, copy=False))


def _total(*parts: Any) -> Any:
    return None if parts[0] is None else functools.reduce(operator.add, parts).copy(order="F")


def _first(*grams: Any) -> Divisor | None:
    return tall.first_divisor(_kernels(grams[0]), _total(*grams))


def _second_gram(chunk: Any, first: Divisor | None, dtype: np.dtype) -> Any:
    return None if first is None else tall.gram_of_quotient(_kernels(chunk), chunk.astype(dtype, copy=False), first)


def _second(first: Divisor | None, *grams: Any) -> Divisors | None:
    return None if first is None else tall.both_divisors(_kernels(grams[0]), first, _total(*grams))


def _pair(chunk: Any, divisors: Divisors | None, dtype: np.dtype, finite: bool) -> tuple[Any, Any]:
    """Return Q of a chunk and None; or, without divisors, which no NaN has, Q and R of the chunk alone."""
    kernels, chunk = _kernels(chunk), chunk.astype(dtype, copy=False)
    if divisors is not None:
        return tall.quotient(kernels, chunk, divisors), None
    q, r = tall.tall_qr(kernels, chunk)
    return q, _checked(r, finite)


def _r_of_chunk(chunk: Any, dtype: np.dtype, finite: bool) -> Any:
    return _checked(tall.tall_r(_kernels(chunk), chunk.astype(dtype, copy=False)), finite)


def _checked(made: Any, finite: bool, name: str = "a") -> Any:
    """Return R of a matrix, or Q^H B, which is not finite where the matrix is not."""
    kernels = _kernels(made)
    if finite and not kernels.host(kernels.xp.isfinite(made).all()):
        raise MatrixError(not_finite(name))
    return made


def _stack(*parts: Any) -> tuple[Any, Any]:
    """Return the blocks P of stacked R, and their R: a node."""
    if parts[0] is None:
        return None, None
    kernels = _kernels(parts[0])
    p, r = tall.tall_qr(kernels, kernels.xp.concatenate(parts))
    return np.split(p, np.cumsum([len(part) for part in parts[:-1]])), r


def _blocks(node: tuple[Any, Any], above: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    """Return a node, its blocks multiplied by that of the node above."""
    blocks, r = node
    return (blocks if blocks is None else [block @ above[0][number] for block in blocks]), r


def _q_of_chunk(pair: tuple[Any, Any], node: tuple[Any, Any], number: int) -> Any:
    return pair[0] if node[0] is None else pair[0] @ node[0][number]


def _r(divisors: Divisors | None, top: tuple[Any, Any], like: Any) -> Any:
    return top[1] if divisors is None else divisors.r(_kernels(like))


def _solve_full_rank(r: Any, right: Any, rows: int, finite: bool) -> Any:
    """Solve with R, once its diagonal says that the matrix, of so many rows, is of full rank."""
    kernels = _kernels(r)
    diagonal, norms = (kernels.host(x) for x in (kernels.diagonal(r), kernels.xp.linalg.norm(r, axis=0)))
    low = abs(diagonal) <= rows * np.finfo(r.dtype).eps * norms
    if low.any():
        raise MatrixError(
            f"column {int(np.argmax(low))} depends on those before it: the matrix is not of full rank; pass rcond="
        )
    columns = kernels.empty(r.shape, r.dtype)
    columns[...] = r
    x = kernels.empty(right.shape, r.dtype)
    x[...] = _checked(right, finite, "b")
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
