"""Factorizations of Dask arrays: Cholesky, LU, QR."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import dask.array as da
import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.linalg.factorize import RunOptions, common_type, factorize, inner_chunks, matrix, row_chunks
from dask_distmm.arrays.linalg.tall import goes_by_rows, qr_of_rows, r_of_rows
from dask_distmm.planning.computation import Chunks


@any_kind
def cholesky(a: Any, lower: bool = False, **how: Unpack[RunOptions]) -> Any:
    """Return the Cholesky factor of a Hermitian, positive definite matrix.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only the triangle that `lower` names is read.
    lower : bool
        Whether L with ``a = L @ L^H`` is computed, and else U with ``a = U^H @ U``, as in SciPy.

    Returns
    -------
    array, (n, n)
        The factor, with zeros in the other triangle, in the chunks of `a`.

    Raises
    ------
    PlanError
        `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: `a` is not positive definite. The message names the leading minor. It is a
        ``numpy.linalg.LinAlgError``.
    """
    a = matrix("a", a)
    name = "l" if lower else "u"
    return factorize("cholesky", {"a": a}, {name: a.chunks}, lower=lower, how=how)[name]


@any_kind
def lu(a: Any, p_indices: bool = False, **how: Unpack[RunOptions]) -> tuple[Any, Any, Any]:
    """Return P, L and U with ``a = P @ L @ U``, with partial pivoting over whole columns.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    p_indices : bool
        Whether P is given as indices p with ``a[p] = L @ U``, and not as a matrix.

    Returns
    -------
    p : array, (m, m), or (m,) of int64
        The permutation.
    l : array, (m, min(m, n))
        Lower triangular with ones on its diagonal.
    u : array, (min(m, n), n)
        Upper triangular.
    """
    a = matrix("a", a)
    inner, (rows, cols) = inner_chunks(a), a.chunks
    wanted: dict[str, Chunks] = {"p": ((1,), rows), "l": (rows, inner), "u": (inner, cols)}
    found = factorize("lu", {"a": a}, wanted, how=how)
    p = found["p"][0]
    return p if p_indices else _permutation(p, found["l"].dtype), found["l"], found["u"]


def _permutation(p: Array, dtype: np.dtype) -> Array:
    """Return the matrix P with ``P @ x = y`` where ``y[p] = x``, in real numbers."""
    size, real = p.shape[0], np.empty(0, dtype).real.dtype
    rows = da.arange(size, chunks=p.chunks)
    return (rows[:, None] == p[None, :]).astype(real)


@any_kind
def lu_factor(a: Any, **how: Unpack[RunOptions]) -> tuple[Any, Any]:
    """Return L and U in one matrix, and the pivots, as ``scipy.linalg.lu_factor`` does; for `lu_solve`.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.

    Returns
    -------
    lu : array, (n, n)
        U in its upper triangle, L below without its ones.
    piv : array, (n,) of int32
        Row i was swapped with row ``piv[i]``.
    """
    a = matrix("a", a)
    wanted: dict[str, Chunks] = {"lu": a.chunks, "piv": row_chunks(min(a.shape))}
    found = factorize("lu", {"a": a}, wanted, how=how)
    return found["lu"], found["piv"][0]


@any_kind
def qr(a: Any, mode: Literal["reduced", "complete", "r"] = "reduced", **how: Unpack[RunOptions]) -> Any:
    """Return Q and R with ``a = Q @ R``: Q has orthonormal columns, R is upper triangular.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.
    mode : str
        ``"reduced"``: Q is (m, min(m, n)). ``"complete"``: Q is (m, m). ``"r"``: only R is returned.

        With ``method="rows"``, and by itself for a matrix with many more rows than columns, each chunk of rows is
        factorized where it lies, in plain tasks.

    Returns
    -------
    q, r : array
        R alone where `mode` says so.
    """
    a = matrix("a", a)
    inner, (rows, cols) = inner_chunks(a), a.chunks
    if mode != "complete" and goes_by_rows(a, how):
        dtype = common_type({"a": a})
        if mode == "r":
            return r_of_rows(a, dtype).rechunk((inner, cols))
        q, r = qr_of_rows(a, dtype)
        return q.rechunk({1: inner}), r.rechunk((inner, cols))
    if mode == "r":
        return factorize("qr", {"a": a}, {"r": (inner, cols)}, mode=mode, how=how)["r"]
    middle = rows if mode == "complete" else inner
    wanted: dict[str, Chunks] = {"q": (rows, middle), "r": (middle, cols)}
    found = factorize("qr", {"a": a}, wanted, mode=mode, how=how)
    return found["q"], found["r"]
