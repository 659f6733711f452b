"""Operands as they lie: the array under a lazy ``A.T`` or ``A.conj()``.

The chunks of the array underneath are multiplied, turned without a copy, and BLAS conjugates while it multiplies. So
``A.conj().T @ B`` makes no conjugated copy of A, and needs no task for it.

Nothing of a graph is interpreted. Dask gives an array a name that follows from what it is made of: if ``x`` depends on
one array alone, and the transpose of that array would have the name of ``x``, then ``x`` is its transpose.
"""

from __future__ import annotations

from typing import NamedTuple

import dask.array as da
from dask.array.core import Array
from distributed import Future

from dask_distmm.errors import PlanError


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


def under(x: da.Array, name: str, turned: bool) -> da.Array:
    """Return the array of that name, which `view_of` has found under a matrix."""
    return x if x.name == name else Array(x.dask, name, x.chunks[::-1] if turned else x.chunks, meta=x._meta)


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
    while x.name.startswith(("transpose-", "conjugate-")):
        needs = x.dask.dependencies.get(x.name, ())
        if len(needs) != 1:
            break
        (name,) = needs
        across, along = (under(x, name, turn) for turn in (True, False))
        if across.T.name == x.name:
            x, turned = across, not turned
        elif along.conj().name == x.name:
            x, conjugated = along, not conjugated
        else:
            break
    return MatrixView(x, turned, conjugated and x.dtype.kind == "c")
