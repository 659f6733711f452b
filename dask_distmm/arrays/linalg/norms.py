"""Norms, condition and rank of Dask matrices."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import dask.array as da
import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.linalg.factorize import RunOptions, matrix
from dask_distmm.arrays.linalg.solutions import inv
from dask_distmm.arrays.linalg.spectral import eigvalsh, svdvals, zero_below
from dask_distmm.errors import PlanError


@any_kind
def matrix_rank(
    a: Any, tol: float | None = None, hermitian: bool = False, rtol: float | None = None, **how: Unpack[RunOptions]
) -> Any:
    """Return the number of singular values above a limit.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    tol : float, optional
        The limit.
    hermitian : bool
        Whether `a` is Hermitian: then its eigenvalues are computed, which is quicker.
    rtol : float, optional
        The limit in units of the largest singular value; by default ``max(m, n) * eps``, as in NumPy.

    Returns
    -------
    array, (), int64
    """
    a = matrix("a", a)
    s = abs(eigvalsh(a, **how)) if hermitian else svdvals(a, **how)
    return (s > (zero_below(s, a.shape, rtol) if tol is None else tol)).sum().astype(np.int64)


@any_kind
def cond(a: Any, p: Any = None, **how: Unpack[RunOptions]) -> Any:
    """Return the condition number of a matrix.

    Parameters
    ----------
    a : array, (m, n)
        The matrix; square unless `p` is None, 2 or -2.
    p : None, 1, -1, 2, -2, inf, -inf or "fro"
        The norm; None for the 2-norm: the largest singular value in units of the smallest.

    Returns
    -------
    array, ()
        inf for a singular matrix.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is singular, and `p` is neither None nor 2 nor -2.
    """
    a = matrix("a", a)
    if p not in (None, 2, -2):
        return norm(a, p) * norm(inv(a, **how), p)
    s = svdvals(a, **how)
    above, below = (_end(s, largest=largest) for largest in (p != -2, p == -2))
    return da.where(below == 0, s.dtype.type(np.inf), above / da.where(below == 0, s.dtype.type(1), below))


@any_kind
def norm(a: Any, ord: Literal["fro", "nuc"] | float | None = None, **how: Unpack[RunOptions]) -> Any:
    """Return a norm of a matrix or a vector, as ``numpy.linalg.norm`` does.

    Parameters
    ----------
    a : array, (m, n) or (n,)
        The matrix or vector.
    ord : optional
        As NumPy has it. Of a matrix 2, -2 and ``"nuc"`` come from its singular values; all else is computed by
        ``dask.array.linalg.norm``.

    Returns
    -------
    array, (), real
    """
    a = da.asanyarray(a)
    if a.ndim != 2 or ord not in (2, -2, "nuc"):
        return da.linalg.norm(a, ord)
    s = svdvals(a, **how)
    return s.sum() if ord == "nuc" else _end(s, largest=ord == 2)


def _end(s: Array, *, largest: bool) -> Array:
    """Return the largest or the smallest singular value."""
    if not s.size:
        raise PlanError("the matrix is empty: it has no singular values; give one with rows and columns")
    return s[0 if largest else -1]
