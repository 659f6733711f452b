"""Factorizations of Dask arrays: Cholesky, LU, QR."""

from __future__ import annotations

import operator
from typing import Any, Literal, Unpack, overload

import numpy as np
from dask.array.core import Array, blockwise, from_array
from dask.array.gufunc import apply_gufunc

from dask_distmm.arrays.linalg.factorize import (
    by_program,
    factorize,
    goes_by_rows,
    left_beyond_memory,
    matrix,
    reduced,
    rows_of,
)
from dask_distmm.arrays.linalg.public import PANELS, TALL, FactorOptions, Operand, QRResult, RefinedOptions
from dask_distmm.arrays.linalg.stacks import public
from dask_distmm.errors import PlanError


@public(FactorOptions, PANELS)
def cholesky(
    a: Operand, *, upper: bool | None = None, lower: bool | None = None, **how: Unpack[FactorOptions]
) -> Array:
    """Return the Cholesky factor of a Hermitian, positive definite matrix.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only the triangle that is returned is read.
    upper, lower : bool, optional
        Whether U with ``a = U^H @ U`` is computed, or L with ``a = L @ L^H``; by default L, as in NumPy. `upper` is
        NumPy's name for the choice, `lower` is SciPy's (which has U by default). Pass one of them.

    Returns
    -------
    array, (n, n)
        The factor, with zeros in the other triangle, in the chunks of `a`.

    Raises
    ------
    PlanError
        `a` is not square, or of a type that is not supported; both `upper` and `lower` are passed.
    MatrixError
        When it is computed: `a` is not positive definite. The message names the leading minor. It is a
        ``numpy.linalg.LinAlgError``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.cholesky([[4.0, 2.0], [2.0, 10.0]]).compute()
    array([[2., 0.],
           [1., 3.]])
    """
    if upper is not None and lower is not None:
        raise PlanError(f"upper={upper} and lower={lower} are two names for one choice: pass one of them")
    a = matrix("a", a)
    lower = not upper if lower is None else lower
    name = "l" if lower else "u"
    return factorize("cholesky", {"a": a}, {name: "mn"}, lower=bool(lower), how=how)[0]


@overload
def lu(
    a: Operand, permute_l: Literal[False] = False, *, p_indices: bool = False, **how: Unpack[FactorOptions]
) -> tuple[Array, Array, Array]: ...


@overload
def lu(
    a: Operand, permute_l: Literal[True], *, p_indices: bool = False, **how: Unpack[FactorOptions]
) -> tuple[Array, Array]: ...


@public(FactorOptions, PANELS)
def lu(a: Operand, permute_l: bool = False, *, p_indices: bool = False, **how: Unpack[FactorOptions]) -> Any:
    """Return P, L and U with ``a = P @ L @ U``, with partial pivoting over whole columns.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    permute_l : bool
        Whether ``P @ L`` is returned in place of P and L.
    p_indices : bool
        Whether P is returned as indices p with ``a = (L @ U)[p]``, and not as a matrix. Of no effect with `permute_l`.

    Returns
    -------
    p : array, (m, m), or (m,) of int64
        The permutation; not with `permute_l`.
    l : array, (m, min(m, n))
        Lower triangular with ones on its diagonal; with `permute_l` its rows are permuted.
    u : array, (min(m, n), n)
        Upper triangular.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> p, low, up = linalg.lu([[1.0, 2.0], [2.0, 4.0]])
    >>> up.compute()
    array([[2., 4.],
           [0., 0.]])
    """
    a = matrix("a", a)
    p, low, up = factorize("lu", {"a": a}, {"p": ".m", "l": "mr", "u": "rn"}, how=how)
    if permute_l:
        return picked(low, p), up
    return p if p_indices else _permutation(p, low.dtype), low, up


def picked(x: Array, rows: Array) -> Array:
    """Return ``x[rows]``, also of stacks, in the chunks of `x`: of whole columns, which one worker has at a time."""
    if max(x.ndim, rows.ndim + 1) > 2:
        return apply_gufunc(_taken, "(m,k),(m)->(m,k)", x, rows, meta=x._meta, allow_rechunk=True)
    columns = x.rechunk({0: -1})
    picked_rows = blockwise(operator.getitem, "ij", columns, "ij", rows.rechunk(-1), "i", dtype=x.dtype, meta=x._meta)
    return picked_rows.rechunk(x.chunks)


def _taken(x: Any, rows: Any) -> Any:
    batch = np.broadcast_shapes(x.shape[:-2], rows.shape[:-1])
    rows = np.broadcast_to(np.asarray(rows, like=x)[..., None], batch + x.shape[-2:])
    return np.take_along_axis(np.broadcast_to(x, batch + x.shape[-2:]), rows, axis=-2)


def _permutation(p: Array, dtype: np.dtype) -> Array:
    """Return the matrix P with ``P @ x = x[p]``, in real numbers."""
    real, columns = np.empty(0, dtype).real.dtype, from_array(np.arange(len(p)), chunks=p.chunks)
    meta = p._meta[:, None].astype(real)
    return blockwise(_ones_at, "ij", p, "i", columns, "j", real, None, dtype=real, meta=meta)


def _ones_at(p: Any, columns: Any, dtype: np.dtype) -> Any:
    return (p[:, None] == np.asarray(columns, like=p)).astype(dtype)


@public(RefinedOptions, PANELS)
def lu_factor(a: Operand, **how: Unpack[RefinedOptions]) -> tuple[Array, Array]:
    """Return L and U in one matrix, and the pivots, as ``scipy.linalg.lu_factor`` does; for `lu_solve`.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.

    Returns
    -------
    lu : array, (m, n)
        U in its upper triangle, L below without its ones.
    piv : array, (min(m, n),) of int32
        Row i was swapped with row ``piv[i]``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> lu, piv = linalg.lu_factor([[1.0, 2.0], [2.0, 8.0]])
    >>> piv.compute()
    array([1, 1], dtype=int32)
    """
    lu, piv = factorize("lu", {"a": matrix("a", a)}, {"lu": "mn", "piv": ".R"}, how=how)
    return lu, piv


@overload
def qr(a: Operand, mode: Literal["reduced", "complete"] = "reduced", **how: Unpack[FactorOptions]) -> QRResult: ...


@overload
def qr(a: Operand, mode: Literal["r"], **how: Unpack[FactorOptions]) -> Array: ...


@public(FactorOptions, TALL)
def qr(a: Operand, mode: Literal["reduced", "complete", "r"] = "reduced", **how: Unpack[FactorOptions]) -> Any:
    """Return Q and R with ``a = Q @ R``: Q has orthonormal columns, R is upper triangular.

    With ``method="rows"``, and by itself for a matrix with many more rows than columns, chunks of rows stay where they
    are. The number of rows in each of them need not be known.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.
    mode : {"reduced", "complete", "r"}
        ``"reduced"``: Q is (m, min(m, n)). ``"complete"``: Q is (m, m). ``"r"``: only R is returned.

    Returns
    -------
    Q, R : array
        A named tuple, as in NumPy; only R if `mode` is ``"r"``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.qr([[3.0, 0.0], [4.0, 5.0]]).R.shape
    (2, 2)
    """
    a = matrix("a", a, unknown_rows=mode != "complete", sparse=True)
    if mode != "complete" and goes_by_rows(a, how):
        factors: tuple[Array, ...] = ()
        with left_beyond_memory(a):
            factors = by_program("qr", {"a": a}, {"r": "nn"} if mode == "r" else {"q": "mn", "r": "nn"}, how=how)
        *q, r = factors or reduced(rows_of(a))
        r = r.rechunk((a.chunks[1], a.chunks[1]))
        return r if mode == "r" else QRResult(q[0].rechunk({1: a.chunks[1]}), r)
    inner = "m" if mode == "complete" else "r"
    wanted = {"r": "rn"} if mode == "r" else {"q": f"m{inner}", "r": f"{inner}n"}
    factors = factorize("qr", {"a": a}, wanted, mode=mode, how=how)
    return factors[0] if mode == "r" else QRResult(*factors)
