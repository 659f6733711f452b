"""Norms, condition and rank of Dask matrices."""

from __future__ import annotations

import functools
from typing import Literal, Unpack

import dask.array as da
import numpy as np
from dask.array.core import Array
from numpy.lib.array_utils import normalize_axis_tuple

from dask_distmm.arrays.linalg.factorize import common_type, filled, matrix, operand
from dask_distmm.arrays.linalg.public import NORM, SINGULAR, Operand, RunOptions, public
from dask_distmm.arrays.linalg.solutions import inv
from dask_distmm.arrays.linalg.spectral import eigvalsh, svdvals, zero_below
from dask_distmm.arrays.linalg.stacks import by_tasks
from dask_distmm.errors import PlanError


@public(RunOptions, SINGULAR)
def matrix_rank(
    A: Operand,
    tol: float | None = None,
    hermitian: bool = False,
    *,
    rtol: float | None = None,
    **how: Unpack[RunOptions],
) -> Array:
    """Return the number of singular values above a limit.

    Parameters
    ----------
    A : array, (m, n)
        The matrix.
    tol : float, optional
        The limit.
    hermitian : bool
        Whether `A` is Hermitian: then its eigenvalues are computed, which is faster.
    rtol : float, optional
        The limit in units of the largest singular value; by default ``max(m, n) * eps``, as in NumPy.

    Returns
    -------
    array, (), int64
        The rank.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> int(linalg.matrix_rank([[1.0, 1.0], [1.0, 1.0]]).compute())
    1
    """
    if tol is not None and rtol is not None:
        raise PlanError(f"tol={tol} and rtol={rtol} are two limits: pass one of them")
    a = matrix("A", A, stack=True)
    s = abs(eigvalsh(a, **how)) if hermitian else svdvals(a, **how)
    return (s > (zero_below(s, a.shape[-2:], rtol) if tol is None else tol)).sum(axis=-1).astype(np.int64)


@public(RunOptions, SINGULAR)
def cond(x: Operand, p: Literal["fro", "nuc"] | float | None = None, **how: Unpack[RunOptions]) -> Array:
    """Return the condition number of a matrix.

    Parameters
    ----------
    x : array, (m, n)
        The matrix; square unless `p` is None, 2 or -2.
    p : None, 1, -1, 2, -2, inf, -inf, "fro" or "nuc"
        The norm; None for the 2-norm: the largest singular value in units of the smallest.

    Returns
    -------
    array, ()
        The condition number; inf for a singular matrix.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is singular, and `p` is neither None nor 2 nor -2.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> float(linalg.cond([[4.0, 0.0], [0.0, 2.0]]).compute())
    2.0
    """
    a = matrix("x", x, stack=True)
    if p not in (None, 2, -2):
        if a.ndim > 2 and not how:
            return by_tasks("(m,m)->()", functools.partial(np.linalg.cond, p=p), {"x": a}, finite=True)
        # Only the nuclear norm is a run itself.
        options = how if p == "nuc" else RunOptions()
        return norm(a, p, **options) * norm(inv(a, **how), p, **options)
    s = svdvals(a, **how)
    above, below = (_end(s, largest=largest) for largest in (p != -2, p == -2))
    return da.where(below == 0, s.dtype.type(np.inf), above / da.where(below == 0, s.dtype.type(1), below))


@public(RunOptions, NORM)
def norm(
    x: Operand,
    ord: Literal["fro", "nuc"] | float | None = None,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    **how: Unpack[RunOptions],
) -> Array:
    """Return a norm of a matrix or a vector, as ``numpy.linalg.norm`` does.

    Parameters
    ----------
    x : array
        The matrix or vector; with `axis` of any number of dimensions.
    ord : optional
        As NumPy has it. Of a matrix 2, -2 and ``"nuc"`` come from its singular values, and only for these there is a
        run, which has options; ``dask.array.linalg.norm`` computes all others.
    axis : int or (int, int), optional
        The axis of vectors, or the two axes of matrices; by default `x` is one vector or matrix.
    keepdims : bool
        Whether the axes of the norm are left in the result, with size one.

    Returns
    -------
    array, real
        0-d by default.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> float(linalg.norm([[3.0, 0.0], [0.0, 4.0]]).compute())
    5.0
    """
    x = filled(operand("x", x))
    if not x.ndim and ord is not None:
        raise PlanError("x must have at least 1 dimension, got a number")
    if not x.size and ord not in (None, "fro", "nuc"):
        raise PlanError(f"x is empty, {x.shape}: it has no norm of ord={ord!r}")
    if x.dtype.kind in "biu" or x.dtype.char in "eE":
        x = x.astype(common_type({"x": x}))
    try:
        axes = normalize_axis_tuple(range(x.ndim) if axis is None else axis, x.ndim)
    except (ValueError, TypeError) as error:
        raise PlanError(str(error)) from error
    if len(axes) != 2 or ord not in (2, -2, "nuc"):
        if how:
            raise PlanError(f"ord={ord!r} here is computed by Dask's tasks, which have no {min(how)}=: leave it out")
        try:
            return da.linalg.norm(x, ord, axis, keepdims)
        except (ValueError, NotImplementedError) as error:
            raise PlanError(str(error)) from error
    s = svdvals(da.moveaxis(x, axes, (-2, -1)), **how)
    found = s.sum(axis=-1) if ord == "nuc" else _end(s, largest=ord == 2)
    return da.expand_dims(found, tuple(sorted(axes))) if keepdims else found


def _end(s: Array, *, largest: bool) -> Array:
    """Return the largest or the smallest singular value."""
    if not s.shape[-1]:
        raise PlanError("the matrix is empty: it has no singular values; pass one with rows and columns")
    return s[..., 0 if largest else -1]
