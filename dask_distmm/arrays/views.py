"""Operands as they lie: the array under a lazy ``A.T``, ``A.conj()`` or ``A.rechunk(...)``.

The chunks of the array underneath are multiplied, turned without a copy, and BLAS conjugates while it multiplies. So
``A.conj().T @ B`` makes no conjugated copy of A, and needs no task for it.

Nothing of a graph is interpreted. Dask gives an array a name that follows from what it is made of: if ``x`` depends on
one array alone, and the transpose of that array would have the name of ``x``, then ``x`` is its transpose. What was cut
otherwise can't be seen in this way: while `enable` is in force the names of arrays that are rechunked are noted. A run
takes any chunks, so nothing has to be cut for it.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import dask.array as da
from dask.array.core import Array
from distributed import Future

from dask_distmm.arrays.stock import dask_rechunk
from dask_distmm.errors import PlanError
from dask_distmm.planning import Chunks, Problem

# By the names of rechunked arrays the name and the chunks of what they were made of; the latest ones.
_rechunked: collections.OrderedDict[str, tuple[str, Chunks]] = collections.OrderedDict()
_NOTED = 10_000


class MatrixView(NamedTuple):
    """A matrix as the transpose, the conjugate, or both, of another one."""

    # The other one, (m, n).
    array: da.Array
    # Whether the matrix is its transpose, (n, m).
    turned: bool
    # Whether it is its conjugate; never for real types.
    conjugated: bool


def apply_op(name: str, array: da.Array, op: str) -> da.Array:
    """Return op(array): lazily, so that `view_of` sees through it."""
    if op not in ("N", "T", "C"):
        raise PlanError(f"op_{name}={op!r}; expected 'N', 'T' or 'C'")
    if op == "N":
        return array
    if array.ndim < 2:
        raise PlanError(f"op_{name}={op!r}: {name.upper()} has one dimension, matrices have two; leave op_{name} out")
    turned = array.T if array.ndim == 2 else array.swapaxes(-1, -2)
    return turned.conj() if op == "C" and array.dtype.kind == "c" else turned


def rechunk(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Cut an array as Dask does, and note of what it is made."""
    if not isinstance(x, Array):
        return NotImplemented
    found = dask_rechunk(x, *args, **kwargs)
    if x.ndim == 2 and found.name != x.name:
        _rechunked[found.name] = x.name, x.chunks
        while len(_rechunked) > _NOTED:
            _rechunked.popitem(last=False)
    return found


def under(x: da.Array, name: str, chunks: Chunks) -> da.Array:
    """Return the array of that name and these chunks, which is under a matrix."""
    return x if x.name == name else Array(x.dask, name, chunks, meta=x._meta)


def operands_under(a: da.Array, b: da.Array, problem: Problem) -> list[da.Array]:
    """Return the arrays whose chunks are multiplied: those that `view_of` has found under A and B."""
    chunks = problem.a_chunks, problem.b_chunks
    found = zip((a, b), problem.arrays, chunks, problem.turned, strict=True)
    return [under(x, name, sizes[::-1] if turned else sizes) for x, name, sizes, turned in found]


def is_lazy(x: da.Array) -> bool:
    """Whether an array's chunks are still to be made, as far as its graph tells: they are no futures and no data."""
    layer = x.dask.layers.get(x.name)
    if layer is None or not layer.is_materialized():
        return True
    first = next(iter(layer.values()), None)
    return not isinstance(first, Future) and not hasattr(first, "shape")


def view_of(x: da.Array) -> MatrixView:
    """Return the array of which a matrix is a view; the matrix itself if that can't be seen."""
    turned = conjugated = False
    while x.name.startswith(("transpose-", "conjugate-")) or x.name in _rechunked:
        if (source := _rechunked.get(x.name)) is not None:
            # The array may have been computed meanwhile.
            if source[0] not in x.dask.layers:
                break
            x = under(x, *source)
            continue
        needs = x.dask.dependencies.get(x.name, ())
        if len(needs) != 1:
            break
        (name,) = needs
        across, along = under(x, name, x.chunks[::-1]), under(x, name, x.chunks)
        if across.T.name == x.name:
            x, turned = across, not turned
        elif along.conj().name == x.name:
            x, conjugated = along, not conjugated
        else:
            break
    return MatrixView(x, turned, conjugated and x.dtype.kind == "c")
