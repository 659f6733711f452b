"""Equations, inverses and determinants of Dask arrays."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import dask.array as da
import numpy as np

from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.linalg.factorize import RunOptions, common_type, factorize, inner_chunks, matrix, row_chunks
from dask_distmm.arrays.linalg.factors import cholesky
from dask_distmm.arrays.linalg.level3 import mirrored
from dask_distmm.arrays.linalg.spectral import least_squares_of_any_rank, pseudoinverse
from dask_distmm.arrays.linalg.tall import goes_by_rows, solve_rows
from dask_distmm.errors import PlanError
from dask_distmm.planning.computation import Chunks

# SciPy's names, and the way to solve.
_STRUCTURES = {
    **dict.fromkeys(("gen", "general", "diagonal", "tridiagonal", "banded"), "gen"),
    **dict.fromkeys(("sym", "symmetric"), "sym"),
    **dict.fromkeys(("her", "hermitian"), "her"),
    **dict.fromkeys(("pos", "positive definite"), "pos"),
    "upper triangular": "upper",
    "lower triangular": "lower",
}


def cho_factor(a: Any, lower: bool = False, **how: Unpack[RunOptions]) -> tuple[Any, bool]:
    """Return the Cholesky factor of a matrix, and `lower`, for `cho_solve`; see `cholesky`.

    The other triangle is zero.
    """
    return cholesky(a, lower, **how), lower


def cho_solve(factor: tuple[Any, bool], b: Any, **how: Unpack[RunOptions]) -> Any:
    """Solve ``A @ x = b`` with the Cholesky factor of A.

    Parameters
    ----------
    factor : tuple
        As `cho_factor` returns it.
    b : array, (n,) or (n, k)
        Right-hand sides.

    Returns
    -------
    array
        x, of the shape of `b`.
    """
    c, lower = factor
    first = solve_triangular(c, b, lower, "N" if lower else "C", **how)
    return solve_triangular(c, first, lower, "C" if lower else "N", **how)


@any_kind
def lu_solve(factor: tuple[Any, Any], b: Any, **how: Unpack[RunOptions]) -> Any:
    """Solve ``A @ x = b`` with what `lu_factor` has returned.

    Parameters
    ----------
    factor : tuple
        As `lu_factor` returns it.
    b : array, (n,) or (n, k)
        Right-hand sides.

    Returns
    -------
    array
        x, of the shape of `b`.
    """
    found, piv = factor
    b = da.asanyarray(b)
    rows = da.map_blocks(_swapped, da.asanyarray(piv).rechunk(-1), dtype=np.int64)
    # Rows are picked within whole columns, which one worker has at a time.
    columns = matrix("b", b, vector=True).rechunk({0: -1})
    picked = da.blockwise(_pick, "ij", columns, "ij", rows, "i", dtype=columns.dtype, meta=columns._meta)
    first = solve_triangular(found, picked, lower=True, unit_diagonal=True, **how)
    x = solve_triangular(found, first, **how)
    return x[:, 0] if b.ndim == 1 else x


def _swapped(piv: Any) -> Any:
    """Return the order of rows after LAPACK's swaps."""
    rows = np.arange(len(piv), dtype=np.int64)
    for i, j in enumerate(piv.tolist()):
        rows[[i, j]] = rows[[j, i]]
    return rows


def _pick(x: Any, rows: Any) -> Any:
    return x[rows]


@any_kind
def solve(
    a: Any,
    b: Any,
    assume_a: str = "gen",
    lower: bool = False,
    transposed: bool = False,
    **how: Unpack[RunOptions],
) -> Any:
    """Solve ``a @ x = b``: by LU with partial pivoting, by Cholesky, or by substitution.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    b : array, (n,) or (n, k)
        Right-hand sides.
    assume_a : str
        The structure of `a`, by SciPy's names. ``"pos"`` or ``"positive definite"`` is solved by Cholesky, ``"upper
        triangular"`` and ``"lower triangular"`` by substitution. Of ``"sym"`` or ``"symmetric"``, and ``"her"`` or
        ``"hermitian"``, one triangle is read and mirrored, and the matrix is solved by LU as all others are:
        ``"gen"`` or ``"general"``, ``"banded"``, ``"tridiagonal"``, ``"diagonal"``.
    lower : bool
        Which triangle is read of a positive definite, symmetric or Hermitian matrix.
    transposed : bool
        Solve ``a.T @ x = b``.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    PlanError
        The shapes do not fit each other, or there is no such structure.
    MatrixError
        When it is computed: the matrix is singular, or not positive definite.
    """
    structure = _STRUCTURES.get(assume_a)
    if structure is None:
        raise PlanError(f"assume_a={assume_a!r}; expected one of {', '.join(map(repr, _STRUCTURES))}")
    if structure in ("upper", "lower"):
        return solve_triangular(a, b, structure == "lower", "T" if transposed else "N", **how)
    a, b = matrix("a", a), da.asanyarray(b)
    if structure in ("sym", "her") and a.shape[0] == a.shape[1]:
        a = mirrored(a, lower=lower, hermitian=structure == "her")
    columns = matrix("b", b, vector=True)
    # A symmetric matrix and its transpose are one; a Hermitian one's transpose is its conjugate.
    options: dict[str, Any] = {"assume_a": "pos" if structure == "pos" else "gen", "op": "T" if transposed else "N"}
    if structure == "pos":
        options["lower"] = lower
    chunks = a.chunks[0 if transposed else 1], columns.chunks[1]
    x = factorize("solve", {"a": a, "b": columns}, {"x": chunks}, how=how, **options)["x"]
    return x[:, 0] if b.ndim == 1 else x


@any_kind
def solve_triangular(
    a: Any,
    b: Any,
    lower: bool = False,
    trans: Literal["N", "T", "C"] | int = "N",
    unit_diagonal: bool = False,
    right: bool = False,
    **how: Unpack[RunOptions],
) -> Any:
    """Solve ``op(a) @ x = b`` for a triangular matrix, or ``x @ op(a) = b``.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; its other triangle is not read.
    b : array, (n,) or (n, k), or (k, n) if `right`
        Right-hand sides.
    lower : bool
        Whether `a` is lower triangular.
    trans : str or int
        op(): ``"N"`` or 0 for none, ``"T"`` or 1 for the transpose, ``"C"`` or 2 for the conjugate transpose.
    unit_diagonal : bool
        Take the diagonal for ones, and do not read it.
    right : bool
        Solve ``x @ op(a) = b``.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    MatrixError
        When it is computed: an element of the diagonal is zero.
    """
    a, b = matrix("a", a), da.asanyarray(b)
    op = {0: "N", 1: "T", 2: "C"}.get(trans, trans) if isinstance(trans, int) else trans
    columns = matrix("b", b, vector=not right)
    chunks = (columns.chunks[0], a.chunks[0]) if right else (a.chunks[0], columns.chunks[1])
    options = {"lower": lower, "op": op, "unit_diagonal": unit_diagonal, "right": right}
    operands = {"a": a, "b": columns}
    x = factorize("solve_triangular", operands, {"x": chunks}, how=how, **options)["x"]
    return x[:, 0] if b.ndim == 1 else x


@any_kind
def inv(a: Any, **how: Unpack[RunOptions]) -> Any:
    """Return the inverse of a matrix; to solve equations, `solve` takes less and is more accurate.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is singular.
    """
    a = matrix("a", a)
    return factorize("inv", {"a": a}, {"x": (a.chunks[1], a.chunks[0])}, how=how)["x"]


@any_kind
def slogdet(a: Any, **how: Unpack[RunOptions]) -> tuple[Any, Any]:
    """Return the sign of a determinant, and the logarithm of its absolute value, as ``numpy.linalg.slogdet`` does.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.

    Returns
    -------
    sign, logabsdet : array, ()
        0 and -inf for a singular matrix.
    """
    a = matrix("a", a)
    wanted = {"sign": row_chunks(1), "logdet": row_chunks(1)}
    found = factorize("slogdet", {"a": a}, wanted, how=how)
    return found["sign"][0, 0], found["logdet"][0, 0]


@any_kind
def det(a: Any, **how: Unpack[RunOptions]) -> Any:
    """Return the determinant of a matrix; where it may overflow, use `slogdet`.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    """
    a = matrix("a", a)
    return factorize("det", {"a": a}, {"det": row_chunks(1)}, how=how)["det"][0, 0]


@any_kind
def lstsq(a: Any, b: Any, rtol: float | None = None, **how: Unpack[RunOptions]) -> tuple[Any, Any, Any, Any]:
    """Return the least-squares solution of ``a @ x = b``: for a matrix of full rank by QR, for any by singular values.

    Where there are many such solutions it is the one of least norm.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    b : array, (m,) or (m, k)
        Right-hand sides.
    rtol : float, optional
        Singular values up to `rtol` times the largest one count as zero. Without `rtol` the matrix has to be of full
        rank.

    Returns
    -------
    x : array, (n,) or (n, k)
        The solution.
    residuals : array, (k,), () or (0,)
        The squared 2-norms of ``b - a @ x``; empty where m <= n.
    rank : int, or array, ()
        min(m, n); with `rtol` the number of singular values above it, lazy. (NumPy has no residuals where that is less
        than n; here they are always computed.)
    s : None, or array, (min(m, n),)
        The singular values, with `rtol`.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is not of full rank, and there is no `rtol`.
    """
    if rtol is not None:
        return least_squares_of_any_rank(a, b, rtol, how)
    found: tuple[Any, Any, int, None] = _least_squares(a, b, how)[0]
    return found


def lstsq_with_values(a: Any, b: Any, **how: Unpack[RunOptions]) -> tuple[Any, Any, int, Any]:
    """Return what `lstsq` does, with the singular values of `a` in place of None."""
    found, r = _least_squares(a, b, how, "r")
    return *found[:3], da.map_blocks(_singular_values, r.rechunk(-1), drop_axis=1, meta=r._meta.real.ravel())


def _singular_values(r: Any) -> Any:
    return np.linalg.svd(r, compute_uv=False)


def _least_squares(a: Any, b: Any, how: RunOptions, *more: str) -> tuple[Any, ...]:
    """Return what `lstsq` does, and behind it more outputs of its run."""
    a, b = matrix("a", a), da.asanyarray(b)
    columns = matrix("b", b, vector=True)
    m, n = a.shape
    if len(columns) == m and goes_by_rows(a, how):
        x, norms, r = solve_rows(a, columns, common_type({"a": a, "b": columns}))
        found = {"x": x.rechunk({0: a.chunks[1]}), "residuals": norms[None], "r": r}
    else:
        wanted: dict[str, Chunks] = {"x": (a.chunks[1], columns.chunks[1])}
        wanted |= dict.fromkeys(more, (inner_chunks(a),) * 2)
        if m > n:
            wanted["residuals"] = (1,), columns.chunks[1]
        found = factorize("lstsq", {"a": a, "b": columns}, wanted, how=how)
    x, others = found["x"], [found[name] for name in more]
    residuals = found["residuals"][0] if m > n else da.zeros((0,), x.real.dtype)
    if b.ndim == 1:
        x, residuals = x[:, 0], residuals[0] if m > n else residuals
    return (x, residuals, min(m, n), None), *others


@any_kind
def pinv(a: Any, rtol: float | None = None, hermitian: bool = False, **how: Unpack[RunOptions]) -> Any:
    """Return the pseudo-inverse of a matrix: of one of full rank by QR, of any by singular values.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    rtol : float, optional
        Singular values up to `rtol` times the largest one count as zero. Without `rtol` the matrix has to be of full
        rank, unless it is `hermitian`; there ``n * eps`` is taken.
    hermitian : bool
        Whether `a` is Hermitian: then its eigenvalues take the place of singular values.

    Returns
    -------
    array, (n, m)

    Raises
    ------
    MatrixError
        When it is computed: the matrix is not of full rank, and there is no `rtol`.
    """
    a = matrix("a", a)
    if rtol is not None or hermitian:
        return pseudoinverse(a, rtol, hermitian, how)
    return factorize("pinv", {"a": a}, {"x": (a.chunks[1], a.chunks[0])}, how=how)["x"]
