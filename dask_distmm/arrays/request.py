"""The request of a user, parsed and checked once; and the Problem that it makes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.base import tokenize

from dask_distmm.arrays.extras import Asked, parse_formula
from dask_distmm.arrays.quantize import as_operands
from dask_distmm.arrays.views import apply_op, view_of
from dask_distmm.config import read_options, setting
from dask_distmm.engines.base import log
from dask_distmm.errors import PlanError
from dask_distmm.numeric.epilogs import PLAIN, Formula
from dask_distmm.numeric.types import Types, dtype_from_name, resolve_types
from dask_distmm.planning import ENGINES, METHODS, Chunks, Extra, Problem
from dask_distmm.planning.distribution import FREE, Distribution, Distributions
from dask_distmm.runtime.chunks import array_kind

__all__ = [
    "Request",
    "as_matrices",
    "check_batch",
    "check_distributions",
    "check_names",
    "check_shapes",
    "check_workers",
    "make_problem",
    "parse",
    "result_chunks",
]

# The ways to multiply a batch.
_BATCH = ("auto", "items", "collective")


@dataclasses.dataclass(frozen=True)
class Request:
    """A product as a user asks for it, checked.

    Parameters
    ----------
    a, b
        Operands after op(), of at least two dimensions each: vectors as matrices of one row, and of one column.
    types
        Types of A, B and D.
    formula, extras
        The formula, and the arrays that it reads beside A and B.
    method, engine, workers, distributions
        As `matmul` takes them.
    compute_type
        As asked for; None where the configuration decides.
    out_chunks
        As asked for; None for those that the operands give. Of a batch: for all axes of D but `dropped`, normalized.
    batch
        How a batch is to be multiplied: ``"auto"``, ``"items"`` or ``"collective"``.
    dropped
        Which of the last two axes of D are there only because an operand was a vector: -2, -1.
    logger
        Is told what is multiplied and how.
    """

    a: da.Array
    b: da.Array
    types: Types
    formula: Formula = PLAIN
    extras: Sequence[tuple[str, da.Array]] = ()
    method: str = "auto"
    engine: str = "auto"
    workers: tuple[str, ...] | int | None = None
    distributions: Distributions = FREE
    compute_type: str | None = None
    out_chunks: Any = None
    batch: str = "auto"
    dropped: tuple[int, ...] = ()
    logger: logging.Logger = log

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Batch axes of D."""
        shape: tuple[int, ...] = np.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        return shape

    @property
    def shape(self) -> tuple[int, ...]:
        """All axes of D, also those that are dropped."""
        return (*self.batch_shape, self.a.shape[-2], self.b.shape[-1])

    @property
    def is_batch(self) -> bool:
        """Whether an operand has more than two dimensions."""
        return bool(max(self.a.ndim, self.b.ndim) > 2)

    @property
    def dtype(self) -> np.dtype:
        """Type of D."""
        return dtype_from_name(self.types.d)

    @property
    def kind(self) -> str:
        """The kind of D's chunks: ``"numpy"`` or ``"cupy"``."""
        return "cupy" if "cupy" in (array_kind(self.a._meta), array_kind(self.b._meta)) else "numpy"

    @property
    def empty(self) -> bool:
        """Whether nothing is to be multiplied."""
        return 0 in (*self.a.shape, *self.b.shape)

    @property
    def plain(self) -> bool:
        """Whether NumPy's matmul does the same: there is no formula, and no other types."""
        return self.formula.plain and self.types.usual

    @property
    def demands(self) -> list[str]:
        """The options that only collective runs can meet, as text."""
        found = [f"{name}={value!r}" for name, value in (("method", self.method), ("engine", self.engine))]
        found = [text for text in found if not text.endswith("='auto'")]
        found += [f"workers={self.workers!r}"] * (self.workers is not None)
        found += [f"distributions={self.distributions!r}"] * any(self.distributions)
        return found + [f"compute_type={self.compute_type!r}"] * (self.compute_type is not None)

    def without_dropped(self, d: da.Array) -> da.Array:
        """Return D without the axes that no operand has."""
        if not self.dropped:
            return d
        return d[(..., *(0 if axis in self.dropped else slice(None) for axis in (-2, -1)))]


def parse(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex = 1.0,
    beta: complex | None = None,
    op_a: str = "N",
    op_b: str = "N",
    epilog: str | Callable[..., Any] | None = None,
    epilog_inputs: Mapping[str, Any] | None = None,
    bias_axis: int = -1,
    result_amax: bool = False,
    a_type: Any = None,
    b_type: Any = None,
    result_type: Any = None,
    quantization_scales: Mapping[str, Any] | None = None,
    compute_type: str | None = None,
    method: str | None = None,
    engine: str | None = None,
    out_chunks: Any = None,
    workers: Sequence[str] | int | None = None,
    distributions: Sequence[Distribution | None] | None = None,
    logger: logging.Logger | None = None,
    batch: str | None = None,
) -> Request:
    """Return the request of a user, checked.

    Parameters
    ----------
    a, b, c, alpha, beta, op_a, op_b, epilog, epilog_inputs, bias_axis, result_amax
        As for `dask_distmm.matmul`.
    a_type, b_type, result_type, quantization_scales, compute_type
        As for `dask_distmm.matmul`.
    method, engine, out_chunks, workers, distributions, logger, batch
        As for `dask_distmm.matmul`.

    Raises
    ------
    PlanError
        Something does not fit; the message says what.
    """
    a, b = as_operands(a, b)
    batch = check_batch(batch, is_batch=max(a.ndim, b.ndim) > 2)
    method, engine = check_names(method, engine)
    asked = check_distributions(distributions)
    a, b = apply_op("a", a, op_a), apply_op("b", b, op_b)
    check_shapes(a, b)
    types = resolve_types(a.dtype, b.dtype, a_type, b_type, result_type, compute_type, setting("compute-type"))
    form = Asked(c, alpha, beta, epilog, epilog_inputs or {}, bias_axis, result_amax, quantization_scales)
    formula, extras = parse_formula(a, b, form, types)
    dropped = tuple(axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1)
    a, b = as_matrices(a, b)
    found = Request(
        a, b, types, formula, extras, method, engine, check_workers(workers), asked, compute_type, out_chunks, batch,
        dropped, logger or log,
    )  # fmt: skip
    if out_chunks is None or not found.is_batch:
        return found
    shape = tuple(size for axis, size in enumerate(found.shape, -len(found.shape)) if axis not in dropped)
    return dataclasses.replace(found, out_chunks=_normalized(out_chunks, shape, types.operand))


def as_matrices(a: da.Array, b: da.Array) -> tuple[da.Array, da.Array]:
    """Return the operands with vectors as matrices of one row, and of one column."""
    return (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)


def make_problem(request: Request) -> Problem:
    """Return the Problem of multiplying two matrices."""
    a, b, types, formula = request.a, request.b, request.types, request.formula
    options = read_options()
    chunks = result_chunks(a, b, request.out_chunks)
    fields = (a.chunks, b.chunks, chunks, types.a, types.b, types.d, request.method, request.engine, request.workers)
    views = view_of(a), view_of(b)
    found = tuple(Extra(name, array.chunks, array.dtype.name) for name, array in request.extras)
    turned, conjugated = ((left, right) for left, right in zip(*(view[1:] for view in views), strict=True))
    names = (a.name, b.name, *(array.name for _, array in request.extras))
    # Plain values, all of them: their text says all, and is made in a tenth of the time in which they are walked.
    token = tokenize(repr((names, fields, types, options, formula, request.distributions, turned, conjugated)))
    same = a.name == b.name and types.a == types.b
    return Problem(
        *(f"matmul-{token}", *fields, same, options, request.kind, found, formula, types.compute),
        distributions=request.distributions,
        arrays=(views[0].array.name, views[1].array.name),
        turned=turned,
        conjugated=conjugated,
    )


def check_batch(batch: str | None, *, is_batch: bool) -> str:
    """Return how a batch is to be multiplied; refuse a name that is unknown, or that is given for matrices."""
    batch = "auto" if batch is None else batch
    if not is_batch and batch != "auto":
        raise PlanError(
            f"batch={batch!r}: the operands are matrices, there is one product; method='local' multiplies on one worker"
        )
    if batch not in _BATCH:
        raise PlanError(f"unknown batch {batch!r}; known are {', '.join(map(repr, _BATCH))}")
    return batch


def check_workers(workers: Sequence[str] | int | None) -> tuple[str, ...] | int | None:
    """Return `workers` as a Problem has them."""
    if isinstance(workers, bool) or (isinstance(workers, int) and workers < 1):
        raise PlanError(f"workers={workers!r}: give addresses, or a number of at least 1")
    if workers is None or isinstance(workers, int):
        return workers
    workers = (workers,) if isinstance(workers, str) else tuple(dict.fromkeys(workers))
    if not workers or not all(isinstance(address, str) for address in workers):
        raise PlanError(f"workers={workers!r}: expected addresses of workers, as in client.nthreads()")
    return workers


def check_distributions(distributions: Sequence[Distribution | None] | None) -> Distributions:
    """Return `distributions` as a Problem has them."""
    found = () if distributions is None else tuple(distributions) if isinstance(distributions, list | tuple) else None
    if found is None or len(found) > 3 or not all(x is None or isinstance(x, Distribution) for x in found):
        raise PlanError(
            f"distributions={distributions!r}: expected up to three of Slab, BlockCyclic or None, for A, B, D"
        )
    a, b, d = (*found, None, None, None)[:3]
    return a, b, d


def check_names(method: str | None, engine: str | None) -> tuple[str, str]:
    """Return method and engine, from the configuration where they are None; refuse unknown ones."""
    method = setting("method") if method is None else method
    engine = setting("engine") if engine is None else engine
    if method not in ("auto", *METHODS):
        raise PlanError(f"unknown method {method!r}; known are 'auto', {', '.join(map(repr, METHODS))}")
    if engine not in ("auto", *ENGINES):
        raise PlanError(f"unknown engine {engine!r}; known are 'auto', {', '.join(map(repr, ENGINES))}")
    return method, engine


def check_shapes(a: da.Array, b: da.Array) -> None:
    """Refuse scalars, unknown chunk sizes, and axes that do not match."""
    for name, array in (("first", a), ("second", b)):
        if array.ndim == 0:
            raise PlanError(f"matmul does not take scalars, and the {name} operand is one; use a * b")
        if any(np.isnan(size) for size in itertools.chain(*array.chunks)):
            raise PlanError(
                f"the {name} operand has unknown chunk sizes {array.chunks}; call its compute_chunk_sizes() first"
            )
    if a.shape[-1] != (b.shape[-2] if b.ndim > 1 else b.shape[0]):
        raise PlanError(
            f"shapes {a.shape} and {b.shape} don't match: the last axis of the first and "
            f"{'the last but one' if b.ndim > 1 else 'the only'} axis of the second must be equal"
        )
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise PlanError(
            f"shapes {a.shape} and {b.shape} don't match: their batch axes {a.shape[:-2]} and {b.shape[:-2]} "
            "must be equal, or 1 where they differ"
        ) from None


def result_chunks(a: da.Array, b: da.Array, out_chunks: Any) -> Chunks:
    """Return the chunks of the product of two matrices, as asked for or as the operands have them."""
    if out_chunks is None:
        return a.chunks[0], b.chunks[1]
    rows, cols = _normalized(out_chunks, (a.shape[0], b.shape[1]), a.dtype)
    return rows, cols


def _normalized(out_chunks: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[tuple[int, ...], ...]:
    """Return `out_chunks` as the chunk sizes along each axis of D."""
    try:
        found: tuple[tuple[int, ...], ...] = normalize_chunks(out_chunks, shape, dtype=dtype)
    except (ValueError, TypeError) as error:
        raise PlanError(f"out_chunks={out_chunks!r} does not fit the result's shape {shape}: {error}") from error
    return found
