"""Eigenvalues and singular values of Dask arrays, and what they solve for matrices of any rank."""

from __future__ import annotations

from typing import Any, Unpack

import dask.array as da
import numpy as np
from dask.array.core import Array, normalize_chunks

from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.linalg.factorize import RunOptions, factorize, inner_chunks, matrix, row_chunks
from dask_distmm.arrays.linalg.factors import qr
from dask_distmm.arrays.product import multiply
from dask_distmm.arrays.request import parse
from dask_distmm.planning.computation import Chunks
from dask_distmm.runtime.client import current_client

__all__ = ["eigh", "eigvalsh", "least_squares_of_any_rank", "pseudoinverse", "svd", "svdvals", "times", "zero_below"]

# A matrix so much longer than wide, and of so many elements, is reduced to R before its SVD: all workers share in the
# QR factorization. For smaller ones the runs take longer than they save.
_TALL, _LARGE = 2, 2**20


def times(a: Array, b: Array, how: RunOptions) -> Array:
    """Return ``a @ b`` as a collective run on the workers of `how`; without a cluster as Dask's own tasks."""
    named: Any = {name: value for name, value in how.items() if name != "method"}
    found: Array = multiply(parse(a, b, **(named if current_client() is not None else {})))
    return found


@any_kind
def eigh(
    a: Any,
    b: Any = None,
    lower: bool = True,
    subset_by_index: tuple[int, int] | None = None,
    **how: Unpack[RunOptions],
) -> tuple[Any, Any]:
    """Return eigenvalues and eigenvectors of a Hermitian matrix: ``a @ v = v * w``, or ``a @ v = b @ v * w``.

    One worker does it (``method="local"``), by LAPACK's ``syevd``, or ``syevr`` for a range.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only the triangle that `lower` names is read.
    b : array, (n, n), optional
        A Hermitian, positive definite matrix; the same triangle of it is read.
    lower : bool
        Whether the lower triangle is read, and not the upper one.
    subset_by_index : (int, int), optional
        The first and the last index of the eigenvalues that are computed, from 0; all by default.

    Returns
    -------
    w : array, (k,), real
        Eigenvalues in ascending order.
    v : array, (n, k)
        Eigenvectors as columns: ``v^H @ v = 1``, or ``v^H @ b @ v = 1``. The first one of the largest components of
        each is real and positive.

    Raises
    ------
    PlanError
        A matrix is not square, the range is not within 0 and n - 1, or a type is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or `b` is not positive definite.
    """
    return _eigenpairs(a, b, {"lower": lower, "subset": subset_by_index}, how)


@any_kind
def eigvalsh(
    a: Any,
    b: Any = None,
    lower: bool = True,
    subset_by_index: tuple[int, int] | None = None,
    **how: Unpack[RunOptions],
) -> Any:
    """Return the eigenvalues of a Hermitian matrix in ascending order, without vectors; see `eigh`."""
    return _eigenpairs(a, b, {"lower": lower, "subset": subset_by_index, "vectors": False}, how)[0]


def _eigenpairs(a: Any, b: Any, options: dict[str, Any], how: RunOptions) -> tuple[Any, Any]:
    a = matrix("a", a)
    operands = {"a": a} if b is None else {"a": a, "b": matrix("b", b)}
    subset, (rows, cols) = options["subset"], a.chunks
    if subset is not None:
        first, last = options["subset"] = int(subset[0]), int(subset[1])
        cols = normalize_chunks(max(cols, default=1), (max(0, last - first + 1),))[0]
    wanted: dict[str, Chunks] = {"w": row_chunks(sum(cols)), "v": (rows, cols)}
    if not options.get("vectors", True):
        del wanted["v"]
    found = factorize("eigh", operands, wanted, how=how, **options)
    return found["w"][0], found.get("v")


@any_kind
def svd(a: Any, full_matrices: bool = False, compute_uv: bool = True, **how: Unpack[RunOptions]) -> Any:
    """Return the singular value decomposition ``a = u @ diag(s) @ vh``.

    A matrix that is much longer than wide, or the other way round, is reduced to a square one by a QR factorization on
    all workers; one worker decomposes that one, by LAPACK's ``gesdd``. ``method="local"`` leaves all to one worker, in
    one run; ``method="columns"`` begins with the QR factorization in any case.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.
    full_matrices : bool
        Whether u and vh are square. (In NumPy they are by default; in Dask they are not.)
    compute_uv : bool
        Whether vectors are computed; if not, s alone is returned.

    Returns
    -------
    u : array, (m, k)
        Orthonormal columns; k is the smaller extent, or m with `full_matrices`.
    s : array, (k,), real
        Singular values in descending order.
    vh : array, (k, n)
        Orthonormal rows; or (n, n). The first one of the largest components of each row, where m < n of each column of
        u, is real and positive.

    Raises
    ------
    PlanError
        `a` is no matrix, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite.
    """
    a = matrix("a", a)
    m, n = a.shape
    method, full = how.get("method", "auto"), full_matrices and compute_uv
    long = max(m, n) >= _TALL * min(m, n) and m * n >= _LARGE
    if full or method == "local" or (method == "auto" and not long):
        return _decomposed(a, full, compute_uv, how)
    if m < n:
        found = svd(a.conj().T, compute_uv=compute_uv, **how)
        return (found[2].conj().T, found[1], found[0].conj().T) if compute_uv else found
    alone: RunOptions = {**how, "method": "local"}
    if not compute_uv:
        return _decomposed(qr(a, "r", **how), False, False, alone)
    q, r = qr(a, **how)
    u, s, vh = _decomposed(r, False, True, alone)
    return times(q, u, how), s, vh


def _decomposed(a: Array, full: bool, vectors: bool, how: RunOptions) -> Any:
    """Return the decomposition of a matrix by one worker."""
    inner, (rows, cols) = inner_chunks(a), a.chunks
    if not vectors:
        return factorize("svd", {"a": a}, {"s": row_chunks(sum(inner))}, how=how, vectors=False)["s"][0]
    wanted: dict[str, Chunks] = {
        "u": (rows, rows if full else inner),
        "s": row_chunks(sum(inner)),
        "vh": (cols if full else inner, cols),
    }
    found = factorize("svd", {"a": a}, wanted, how=how, mode="complete" if full else "reduced")
    return found["u"], found["s"][0], found["vh"]


def svdvals(a: Any, **how: Unpack[RunOptions]) -> Any:
    """Return the singular values of a matrix in descending order, without vectors; see `svd`."""
    return svd(a, compute_uv=False, **how)


def zero_below(s: Array, shape: tuple[int, ...], rtol: float | None) -> Array:
    """Return the size up to which singular values count as zero; `shape` is that of the matrix."""
    relative = max(shape) * float(np.finfo(s.dtype).eps) if rtol is None else rtol
    return (s.max() if s.size else s.sum()) * s.dtype.type(relative)


def pseudoinverse(a: Array, rtol: float | None, hermitian: bool, how: RunOptions) -> Array:
    """Return the pseudo-inverse of a matrix of any rank: by its singular values, or its eigenvalues."""
    if hermitian:
        s, v = eigh(a, **how)
        left, right = v, v.conj().T
    else:
        u, s, vh = svd(a, **how)
        left, right = vh.conj().T, u.conj().T
    return times(left * _inverted(s, zero_below(abs(s), a.shape, rtol)), right, how)


def least_squares_of_any_rank(a: Any, b: Any, rtol: float, how: RunOptions) -> tuple[Any, Any, Array, Array]:
    """Return what `lstsq` does, with the rank and the singular values, as lazy arrays."""
    a, b = matrix("a", a), da.asanyarray(b)
    columns, (m, n) = matrix("b", b, vector=True), a.shape
    u, s, vh = svd(a, **how)
    limit = zero_below(s, a.shape, rtol)
    inner = times(u.conj().T, columns, how) * _inverted(s, limit)[:, None]
    x = times(vh.conj().T, inner, how)
    residuals = (abs(columns - times(a, x, how)) ** 2).sum(axis=0) if m > n else da.zeros((0,), s.dtype)
    if b.ndim == 1:
        x, residuals = x[:, 0], residuals[0] if m > n else residuals
    return x, residuals, (s > limit).sum(), s


def _inverted(s: Array, limit: Array) -> Array:
    """Return reciprocals, and zeros in place of those of what is not above a limit."""
    return 1 / da.where(abs(s) > limit, s, s.dtype.type(np.inf))
