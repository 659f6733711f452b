"""The Problem that a user's arrays and options make, checked before anything else is done."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.base import tokenize

from dask_distmm.arrays.views import view_of
from dask_distmm.config import read_options, setting
from dask_distmm.engines.base import ENGINES
from dask_distmm.engines.chunks import array_kind
from dask_distmm.errors import PlanError
from dask_distmm.numeric.epilogs import PLAIN, Finish
from dask_distmm.numeric.types import Types, resolve_types
from dask_distmm.planning import METHODS, Chunks, Extra, Problem
from dask_distmm.planning.distribution import FREE, Distribution, Distributions

__all__ = ["check_distributions", "check_names", "check_shapes", "check_workers", "make_problem", "result_chunks"]


def make_problem(
    a: da.Array,
    b: da.Array,
    method: str,
    engine: str,
    out_chunks: Any,
    workers: Sequence[str] | int | None,
    spec: Finish = PLAIN,
    extras: Sequence[tuple[str, da.Array]] = (),
    types: Types | None = None,
    distributions: Distributions = FREE,
) -> Problem:
    """Return the Problem of multiplying two 2-D Dask arrays."""
    types = types or resolve_types(a.dtype, b.dtype)
    workers = check_workers(workers)
    chunks = result_chunks(a, b, out_chunks)
    options = read_options()
    fields = (a.chunks, b.chunks, chunks, types.a, types.b, types.d, method, engine, workers)
    views = view_of(a), view_of(b)
    found = tuple(Extra(name, array.chunks, array.dtype.name) for name, array in extras)
    turned, conjugated = ((left, right) for left, right in zip(*(view[1:] for view in views), strict=True))
    names = (a.name, b.name, *(array.name for _, array in extras))
    # Plain values, all of them: their text says all, and is made in a tenth of the time in which they are walked.
    token = tokenize(repr((names, fields, types, options, spec, distributions, turned, conjugated)))
    array = "cupy" if "cupy" in (array_kind(a._meta), array_kind(b._meta)) else "numpy"
    same = a.name == b.name and types.a == types.b
    return Problem(
        *(f"matmul-{token}", *fields, same, options, array, found, spec, types.compute),
        distributions=distributions,
        arrays=(views[0].array.name, views[1].array.name),
        turned=turned,
        conjugated=conjugated,
    )


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
    """Refuse scalars, unknown chunk sizes, and a contraction over axes of different lengths."""
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


def result_chunks(a: da.Array, b: da.Array, out_chunks: Any) -> Chunks:
    """Return the chunks of the product of two matrices, as asked for or as the operands have them."""
    if out_chunks is None:
        return a.chunks[0], b.chunks[1]
    shape = (a.shape[0], b.shape[1])
    try:
        rows, cols = normalize_chunks(out_chunks, shape, dtype=a.dtype)
    except (ValueError, TypeError) as error:
        raise PlanError(f"out_chunks={out_chunks!r} does not fit the result's shape {shape}: {error}") from error
    return rows, cols
