"""Equations, inverses and determinants of Dask arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, cast, overload

import dask.array as da
import numpy as np
from dask.array.core import Array, from_array

from dask_distmm.arrays.kinds import rechunked
from dask_distmm.arrays.linalg.factorize import (
    adjoint,
    by_program,
    common_type,
    factorize,
    few_bits,
    goes_by_rows,
    matrix,
    mirrored,
    op_of,
    operand,
    reduced,
    right_sides,
    rows_of,
    times,
    unchecked,
)
from dask_distmm.arrays.linalg.factors import cholesky, least_squares_of_any_rank, picked, pseudoinverse, svdvals
from dask_distmm.arrays.linalg.public import (
    LEAST_SQUARES,
    PANELS,
    ROWS,
    TWO_SOLVES,
    FactorOptions,
    Operand,
    RefinedOptions,
    SlogdetResult,
    SolveOptions,
)
from dask_distmm.arrays.linalg.stacks import public
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.programs.factorizations import NUMBERS
from dask_distmm.programs.refine import BACKWARD, FORWARD, TURNS, WAY

# SciPy's names of the structure of a matrix, of which the first three letters tell how it is solved.
Structure: TypeAlias = Literal[
    "gen", "general", "diagonal", "tridiagonal", "banded", "sym", "symmetric", "her", "hermitian", "pos",
    "positive definite", "upper triangular", "lower triangular",
]  # fmt: skip


class CholeskyFactor(NamedTuple):
    """A Cholesky factor, as `cho_factor` returns it."""

    c: Array
    lower: bool

    def logdet(self) -> Array:
        """Return the logarithm of the determinant of the matrix that was factorized. Lazy."""
        return 2 * da.log(da.diagonal(self.c).real).sum()


@public(RefinedOptions, PANELS)
def cho_factor(a: Operand, lower: bool = False, **how: Unpack[RefinedOptions]) -> CholeskyFactor:
    """Return the Cholesky factor of a matrix, and `lower`, for `cho_solve`; see `cholesky`.

    Parameters
    ----------
    a : array, (n, n)
        The Hermitian, positive definite matrix; only the triangle that is returned is read.
    lower : bool
        Whether the factor is L, with ``a = L @ L^H``, or U, with ``a = U^H @ U``.

    Returns
    -------
    c : array, (n, n)
        The factor, with zeros in the other triangle.
    lower : bool
        As it was passed. Both are a named tuple, whose ``logdet()`` is the logarithm of the determinant of `a`, lazy.

    Raises
    ------
    PlanError
        When it is called: `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: a leading minor is not positive, or an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> factor = linalg.cho_factor([[4.0, 0.0], [0.0, 9.0]])
    >>> linalg.cho_solve(factor, [4.0, 9.0]).compute()
    array([1., 1.])
    >>> float(factor.logdet().compute().round(6))
    3.583519
    """
    if how.get("factor_dtype") is None:
        return CholeskyFactor(cholesky(a, lower=lower, **cast(FactorOptions, how)), lower)
    wanted = {"l" if lower else "u": "mn"}
    return CholeskyFactor(factorize("cholesky", {"a": matrix("a", a)}, wanted, how=how, lower=lower)[0], lower)


@public(SolveOptions, TWO_SOLVES)
def cho_solve(
    c_and_lower: tuple[Any, bool], b: Operand, *, a: Operand | None = None, **how: Unpack[SolveOptions]
) -> Array:
    """Solve ``A @ x = b`` with the Cholesky factor of A.

    Parameters
    ----------
    c_and_lower : tuple
        As `cho_factor` returns it.
    b : array, (n,) or (n, k)
        Right-hand sides.
    a : array, (n, n), optional
        A, if it was factorized with `factor_dtype`: the solution is refined with it, in one run.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    PlanError
        When it is called: the shapes do not fit each other, or what was factorized is not what is passed.
    MatrixError
        When it is computed: an element of the diagonal is zero, or an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> factor = linalg.cho_factor([[4.0, 0.0], [0.0, 9.0]])
    >>> linalg.cho_solve(factor, [4.0, 9.0]).compute()
    array([1., 1.])
    """
    c, lower, b = matrix("c_and_lower[0]", c_and_lower[0], stack=True), c_and_lower[1], operand("b", b)
    if a is not None:
        return _refined(a, {"f": c}, b, how, assume_a="pos", lower=lower)
    first = solve_triangular(c, right_sides(c, b, stack=True), "N" if lower else "C", lower, **how)
    x = solve_triangular(c, first, "C" if lower else "N", lower, **unchecked(how))
    return x[..., 0] if b.ndim == 1 else x


@public(SolveOptions, TWO_SOLVES)
def lu_solve(
    lu_and_piv: tuple[Any, Any],
    b: Operand,
    trans: Literal["N", "T", "C", 0, 1, 2] = 0,
    *,
    a: Operand | None = None,
    **how: Unpack[SolveOptions],
) -> Array:
    """Solve ``op(A) @ x = b`` with what `lu_factor` has returned.

    Parameters
    ----------
    lu_and_piv : tuple
        As `lu_factor` returns it.
    b : array, (n,) or (n, k)
        Right-hand sides.
    trans : {0, 1, 2, "N", "T", "C"}
        op(): 0 or ``"N"`` for none, 1 or ``"T"`` for the transpose, 2 or ``"C"`` for the conjugate transpose.
    a : array, (n, n), optional
        A, if it was factorized with `factor_dtype`: the solution is refined with it, in one run.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    PlanError
        When it is called: the shapes do not fit each other, or what was factorized is not what is passed.
    MatrixError
        When it is computed: an element of the diagonal is zero, or an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.lu_solve(linalg.lu_factor([[0.0, 2.0], [4.0, 0.0]]), [2.0, 4.0]).compute()
    array([1., 1.])
    """
    lu, rows = matrix("lu_and_piv[0]", lu_and_piv[0], stack=True), operand("lu_and_piv[1]", lu_and_piv[1])
    if rows.shape != lu.shape[:-1] or rows.dtype.kind not in "iu":
        raise PlanError(
            f"lu_and_piv[1] must be {lu.shape[-2]} pivots for each matrix, got shape {rows.shape} of {rows.dtype}: "
            "pass on what lu_factor returned"
        )
    b, op = operand("b", b), op_of(trans)
    if a is not None:
        return _refined(a, {"p": rows[None], "f": lu}, b, how, op=op)
    columns = right_sides(lu, b, stack=True)
    rows = rechunked(rows, {rows.ndim - 1: -1}).map_blocks(_swapped, op != "N", dtype=np.int64)
    if op == "N":
        first = solve_triangular(lu, picked(columns, rows), lower=True, unit_diagonal=True, **how)
        x = solve_triangular(lu, first, **unchecked(how))
    else:
        # op(A) is op(U) op(L) and then the swaps in the other order.
        first = solve_triangular(lu, columns, op, **how)
        x = picked(solve_triangular(lu, first, op, lower=True, unit_diagonal=True, **unchecked(how)), rows)
    return x[..., 0] if b.ndim == 1 else x


def _refined(a: Operand, factors: dict[str, Array], b: Array, how: SolveOptions, **options: Any) -> Array:
    """Return a solution with factors of few bits, refined."""
    a, factor = matrix("a", a), factors["f"]
    columns, dtype = right_sides(a, b), few_bits(common_type({"a": a, "b": b}))
    if factor.shape != a.shape or factor.dtype != dtype:
        (m, n), (rows, cols) = a.shape, factor.shape
        raise PlanError(
            f"a is {m} x {n}, so its factor must be that, of {dtype}; it is {rows} x {cols} of {factor.dtype}: pass a "
            "only with a factor that factor_dtype has made"
        )
    operands, named = {"a": a, **factors, "b": columns}, {**how, "factor_dtype": "float32"}
    axes = {"k": columns.chunks[1] if b.ndim > 1 else ()}
    return factorize("solve", operands, {"x": "nk"}, how=cast(Any, named), axes=axes, has_factors=True, **options)[0]


def _swapped(piv: Any, back: bool) -> Any:
    """Return the order of rows after LAPACK's swaps, or the one that undoes them."""
    rows = np.broadcast_to(np.arange(piv.shape[-1], dtype=np.int64), piv.shape).copy()
    for at in np.ndindex(piv.shape[:-1]):
        order = rows[at]
        for i, j in enumerate(piv[at].tolist()):
            order[[i, j]] = order[[j, i]]
    return np.argsort(rows, axis=-1) if back else rows


class Refinement(NamedTuple):
    """How a solution was refined, as `solve` returns it with ``full_output=True``: numbers, ``()``, all lazy."""

    # Turns, in each of which the matrix is multiplied once.
    iterations: Array
    # 0: classical refinement. 1: GMRES with the factors as preconditioner. 2: the matrix itself was factorized.
    way: Array
    # |b - a x| / (|a| |x|) in the maximum norm, of the worst column; NaN where the matrix itself was factorized.
    backward_error: Array
    # The last correction relative to x in the maximum norm, of the worst column: a bound of the error of x where each
    # turn makes that less.
    forward_error: Array


@overload
def solve(
    a: Operand,
    b: Operand,
    *,
    lower: bool = False,
    assume_a: Structure | None = None,
    transposed: bool = False,
    full_output: Literal[False] = False,
    **how: Unpack[RefinedOptions],
) -> Array: ...


@overload
def solve(
    a: Operand,
    b: Operand,
    *,
    lower: bool = False,
    assume_a: Structure | None = None,
    transposed: bool = False,
    full_output: Literal[True],
    **how: Unpack[RefinedOptions],
) -> tuple[Array, Refinement]: ...


@public(RefinedOptions, PANELS)
def solve(
    a: Operand,
    b: Operand,
    *,
    lower: bool = False,
    assume_a: Structure | None = None,
    transposed: bool = False,
    full_output: bool = False,
    **how: Unpack[RefinedOptions],
) -> Any:
    """Solve ``a @ x = b``: by LU with partial pivoting, by Cholesky, or by substitution.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    b : array, (n,) or (n, k)
        Right-hand sides.
    lower : bool
        Which triangle is read of a positive definite, symmetric or Hermitian matrix; of no effect on others.
    assume_a : str, optional
        The structure of `a`, by SciPy's names. ``"pos"`` or ``"positive definite"`` is solved by Cholesky, ``"upper
        triangular"`` and ``"lower triangular"`` by substitution. Of ``"sym"`` or ``"symmetric"``, and ``"her"`` or
        ``"hermitian"``, one triangle is read and mirrored, and the matrix is solved by LU as all others are: None,
        ``"gen"`` or ``"general"``, ``"banded"``, ``"tridiagonal"``, ``"diagonal"``.
    transposed : bool
        Solve ``a.T @ x = b``.
    full_output : bool
        With `factor_dtype`, whether the result says how x was refined.

    Returns
    -------
    x : array
        Of the shape of `b`.
    refinement : Refinement
        Only with `full_output`, a named tuple of lazy numbers: ``iterations``, ``way`` (0: classical refinement, 1:
        GMRES with the factors as preconditioner, 2: the matrix itself was factorized), and of the worst column
        ``backward_error`` and a bound of the ``forward_error``, relative to x in the maximum norm.

    Raises
    ------
    PlanError
        The shapes do not fit each other, there is no such structure, or no such factors of this matrix.
    MatrixError
        When it is computed: the matrix is singular, or not positive definite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.solve([[2.0, 0.0], [0.0, 4.0]], [2.0, 4.0]).compute()
    array([1., 1.])
    """
    structure = (assume_a or "gen")[:3]
    if full_output and how.get("factor_dtype") is None:
        raise PlanError("full_output=True says how a solution was refined: pass factor_dtype, too")
    if structure in ("upp", "low"):
        if how.get("factor_dtype") is not None:
            raise PlanError(f"assume_a={assume_a!r} is solved without a factorization: leave factor_dtype out")
        return solve_triangular(a, b, "T" if transposed else "N", structure == "low", **cast(FactorOptions, how))
    a, b = matrix("a", a), operand("b", b)
    if structure in ("sym", "her") and a.shape[0] == a.shape[1]:
        a = mirrored(a, lower=lower, hermitian=structure == "her")
    columns = matrix("b", b, vector=True)
    # A symmetric matrix and its transpose are one; a Hermitian one's transpose is its conjugate.
    options: dict[str, Any] = {"assume_a": "pos" if structure == "pos" else "gen", "op": "T" if transposed else "N"}
    if structure == "pos":
        options["lower"] = lower
    axes = {"k": columns.chunks[1] if b.ndim > 1 else ()}
    wanted = {"x": "mk" if transposed else "nk"}
    if not full_output:
        return factorize("solve", {"a": a, "b": columns}, wanted, how=how, axes=axes, **options)[0]
    if not (columns.size and a.size):
        raise PlanError("nothing is refined of an empty matrix: leave full_output out")
    axes |= {"i": (NUMBERS,)}
    x, details = factorize("solve", {"a": a, "b": columns}, wanted | {"info": ".i"}, how=how, axes=axes, **options)
    numbers = details[[TURNS, WAY]].astype(np.int64)
    return x, Refinement(numbers[0], numbers[1], details[BACKWARD], details[FORWARD])


@public(FactorOptions, PANELS)
def solve_triangular(
    a: Operand,
    b: Operand,
    trans: Literal["N", "T", "C", 0, 1, 2] = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    right: bool = False,
    **how: Unpack[FactorOptions],
) -> Array:
    """Solve ``op(a) @ x = b`` for a triangular matrix, or ``x @ op(a) = b``.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; its other triangle is not read.
    b : array, (n,) or (n, k), or (k, n) if `right`
        Right-hand sides.
    trans : {0, 1, 2, "N", "T", "C"}
        op(): 0 or ``"N"`` for none, 1 or ``"T"`` for the transpose, 2 or ``"C"`` for the conjugate transpose.
    lower : bool
        Whether `a` is lower triangular.
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

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.solve_triangular([[2.0, 0.0], [2.0, 4.0]], [2.0, 6.0], lower=True).compute()
    array([1., 1.])
    """
    a, b = matrix("a", a), operand("b", b)
    columns = matrix("b", b, vector=not right)
    axes = {"k": columns.chunks[0] if right else columns.chunks[1] if b.ndim > 1 else ()}
    options: dict[str, Any] = {"lower": lower, "op": op_of(trans), "unit_diagonal": unit_diagonal, "right": right}
    operands, wanted = {"a": a, "b": columns}, {"x": "km" if right else "mk"}
    return factorize("solve_triangular", operands, wanted, how=how, axes=axes, **options)[0]


@public(RefinedOptions, PANELS)
def inv(
    a: Operand,
    *,
    lower: bool = False,
    assume_a: Literal["gen", "general", "pos", "positive definite"] | None = None,
    **how: Unpack[RefinedOptions],
) -> Array:
    """Return the inverse of a matrix; to solve equations, `solve` takes less and is more accurate.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    lower : bool
        Which triangle is read of a positive definite matrix; of no effect on others.
    assume_a : str, optional
        ``"pos"`` or ``"positive definite"``: by Cholesky. None, ``"gen"`` or ``"general"``: by LU.

    Returns
    -------
    array, (n, n)
        The inverse.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is singular.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.inv([[2.0, 0.0], [0.0, 4.0]]).compute()
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    options: dict[str, Any] = {"assume_a": "pos", "lower": lower} if (assume_a or "gen")[:3] == "pos" else {}
    return factorize("inv", {"a": matrix("a", a)}, {"x": "nm"}, how=how, **options)[0]


@public(FactorOptions, PANELS)
def slogdet(a: Operand, **how: Unpack[FactorOptions]) -> SlogdetResult:
    """Return the sign of a determinant, and the logarithm of its absolute value, as ``numpy.linalg.slogdet`` does.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.

    Returns
    -------
    sign, logabsdet : array, ()
        A named tuple, as in NumPy; 0 and -inf for a singular matrix.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> float(linalg.slogdet([[0.0, 1.0], [1.0, 0.0]]).sign.compute())
    -1.0
    """
    return SlogdetResult(*factorize("slogdet", {"a": matrix("a", a)}, {"sign": "..", "logdet": ".."}, how=how))


@public(FactorOptions, PANELS)
def det(a: Operand, **how: Unpack[FactorOptions]) -> Array:
    """Return the determinant of a matrix; where it may overflow, use `slogdet`.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.

    Returns
    -------
    array, ()
        The determinant; 0 for a singular matrix.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> float(linalg.det([[2.0, 0.0], [0.0, 4.0]]).compute())
    8.0
    """
    return factorize("det", {"a": matrix("a", a)}, {"det": ".."}, how=how)[0]


@public(RefinedOptions, LEAST_SQUARES)
def lstsq(
    a: Operand, b: Operand, rcond: float | None = None, **how: Unpack[RefinedOptions]
) -> tuple[Array, Array, int | Array, Array]:
    """Return the least-squares solution of ``a @ x = b``: for a matrix of full rank by QR, for any by singular values.

    Where there are many such solutions it is the one of least norm.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    b : array, (m,) or (m, k)
        Right-hand sides.
    rcond : float, optional
        Singular values up to `rcond` times the largest one count as zero; a negative one stands for the machine
        precision. Without `rcond` the matrix has to be of full rank.

    Returns
    -------
    x : array, (n,) or (n, k)
        The solution.
    residuals : array, (k,), (1,) or (0,)
        The squared 2-norms of ``b - a @ x``; empty where m <= n.
    rank : int, or array, ()
        min(m, n); with `rcond` the number of singular values above it, lazy. (NumPy has no residuals where that is less
        than n; here they are always computed.)
    s : array, (min(m, n),)
        The singular values.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is not of full rank, and there is no `rcond`.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> x, residuals, rank, s = linalg.lstsq([[1.0], [1.0]], [1.0, 3.0])
    >>> x.compute().round(6)
    array([2.])
    """
    a, b = matrix("a", a, unknown_rows=True, sparse=True), operand("b", b)
    if rcond is not None and rcond < 0:
        # LAPACK takes the machine precision in place of a negative one.
        rcond = float(np.finfo(common_type({"a": a, "b": b})).eps)
    by_rows = goes_by_rows(a, how)
    refined = how.get("factor_dtype") is not None
    if refined and (rcond is not None or by_rows or a.shape[0] != a.shape[1]):
        reason = "rcond" if rcond is not None else "method='rows'" if by_rows else f"a of {a.shape[0]} x {a.shape[1]}"
        raise PlanError(f"factor_dtype is for square matrices of full rank, in block columns, not for {reason}")
    columns, (m, n) = right_sides(a if by_rows else matrix("a", a), b, unknown_rows=by_rows), a.shape
    operands, axes, x_axes = {"a": a, "b": columns}, {"k": columns.chunks[1]}, "nk" if b.ndim > 1 else "n."
    if by_rows:
        wanted = {"x": x_axes, "residuals": ".k real", "rank": ".. int64", "s": ".N real"}
        x, residuals, count, s = by_program("lstsq", operands, wanted, how=how, axes=axes, rtol=rcond)
        rank = n if rcond is None else count
    elif rcond is not None:
        x, residuals, rank, s = least_squares_of_any_rank(a, columns, rcond, how)
        x = x[:, 0] if b.ndim == 1 else x
    elif refined:
        x, residuals = factorize("lstsq", operands, {"x": x_axes}, how=how, axes=axes)[0], None
        rank, s = n, svdvals(a, check_finite=False)
    else:
        wanted = {"x": x_axes, "r": "rr", **({"residuals": ".k"} if m > n else {})}
        x, r, residuals = (*factorize("lstsq", operands, wanted, how=how, axes=axes), None)[:3]
        rank, s = min(m, n), rechunked(r, -1).map_blocks(_singular_values, drop_axis=1, meta=r._meta.real.ravel())
    return x, residuals if m > n else from_array(x._meta.real.ravel()), rank, s


def _singular_values(r: Any) -> Any:
    if np.isfinite(r).all():
        return np.linalg.svd(r, compute_uv=False)
    # LAPACK has an error for these.
    return abs(np.diagonal(r)) * r.real.dtype.type(np.nan)


class LinearFit(NamedTuple):
    """Coefficients and the constant term of a linear model."""

    coef: Array
    intercept: Array


# The weight of the squares of a solution, or several.
Weights: TypeAlias = float | Sequence[float]


@overload
def ridge(
    a: Operand, b: Operand, alpha: Weights, *, fit_intercept: Literal[False] = False, **how: Unpack[SolveOptions]
) -> Array: ...


@overload
def ridge(
    a: Operand, b: Operand, alpha: Weights, *, fit_intercept: Literal[True], **how: Unpack[SolveOptions]
) -> LinearFit: ...


@public(SolveOptions, ROWS)
def ridge(a: Operand, b: Operand, alpha: Weights, *, fit_intercept: bool = False, **how: Unpack[SolveOptions]) -> Any:
    """Return the x that minimizes ``|a @ x - b|^2 + alpha |x|^2``: ridge regression.

    `a` is read once, also for many values of `alpha`; once or twice more if it is ill-conditioned. Which `alpha` to
    take `dask_distmm.algorithms.ridge_cv` finds out.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any chunks; an n x n matrix has to fit into the memory of each worker.
    b : array, (m,) or (m, k)
        Right-hand sides.
    alpha : float or sequence of floats
        The weight of ``|x|^2``, not negative.
    fit_intercept : bool
        Whether there is a constant term, which has no penalty: columns of `a` and `b` are centred on the way.

    Returns
    -------
    array, (n,) or (n, k)
        The solution; for a sequence (number of values, n) or (number of values, n, k). With `fit_intercept` a named
        tuple ``(coef, intercept)``: the solution, and the constant term, () or (k,), for a sequence (number of values,)
        or (number of values, k).

    Raises
    ------
    PlanError
        The shapes do not fit each other, or a value of `alpha` is negative.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.ridge([[1.0], [1.0]], [1.0, 3.0], alpha=2.0).compute().round(6)
    array([1.])
    """
    a, b = matrix("a", a, unknown_rows=True, sparse=True), operand("b", b)
    try:
        alphas = np.atleast_1d(np.asarray(alpha, np.float64))
    except (TypeError, ValueError):
        alphas = np.empty(0)
    if alphas.ndim != 1 or not alphas.size or not (np.isfinite(alphas) & (alphas >= 0)).all():
        raise PlanError(f"alpha must be a number that is not negative, or a sequence of them, got {alpha!r}")
    method = how.get("method") or "auto"
    if method not in ("auto", "rows"):
        raise PlanError(f"method={method!r} is not for ridge: pass 'rows', or leave it out")
    columns, count = right_sides(a, b, unknown_rows=True), len(alphas)
    operands, axes = {"a": a, "b": columns}, {"k": (columns.shape[1] * count,)}
    axes["t"] = (columns.shape[1],)
    wanted = {"x": "Nk"} | ({"center": ".N", "level": ".t"} if fit_intercept else {})
    options: dict[str, Any] = {"alphas": tuple(alphas.tolist()), "centred": fit_intercept}
    x, *means = by_program("ridge", operands, wanted, how=how, axes=axes, **options)
    if np.ndim(alpha):
        x = x.reshape(a.shape[1], count, -1).transpose(1, 0, 2)
    if not fit_intercept:
        return x[..., 0] if b.ndim == 1 else x
    intercept = means[1] - (x * means[0][:, None]).sum(-2)
    return LinearFit(x[..., 0], intercept[..., 0]) if b.ndim == 1 else LinearFit(x, intercept)


@public(FactorOptions, LEAST_SQUARES)
def pinv(
    a: Operand,
    rcond: float | None = None,
    hermitian: bool = False,
    *,
    rtol: float | None = None,
    **how: Unpack[FactorOptions],
) -> Array:
    """Return the pseudo-inverse of a matrix: of one of full rank by QR, of any by singular values.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    rcond, rtol : float, optional
        Two names for one limit: singular values up to it times the largest one count as zero. Without a limit the
        matrix has to be of full rank, unless it is `hermitian`; there ``n * eps`` is taken.
    hermitian : bool
        Whether `a` is Hermitian: then its eigenvalues take the place of singular values.

    Returns
    -------
    array, (n, m)
        The pseudo-inverse.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is not of full rank, and there is no `rcond`.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.pinv([[2.0], [0.0]]).compute().round(6)
    array([[0.5, 0. ]])
    """
    if rcond is not None and rtol is not None:
        raise PlanError(f"rcond={rcond} and rtol={rtol} are two names for one limit: pass one of them")
    a, rtol = matrix("a", a), rcond if rtol is None else rtol
    if a.shape[0] < a.shape[1] and not hermitian and goes_by_rows(a.T, how):
        return adjoint(pinv(adjoint(a), rtol, **how))
    if not hermitian and goes_by_rows(a, how):
        try:
            return by_program("pinv", {"a": a}, {"x": "nm"}, how=how, rtol=rtol)[0]
        except ProjectedMemoryError:
            q, r = reduced(rows_of(a))
            return rechunked(times(pinv(r, rtol, **how), adjoint(q), {}), {0: a.chunks[1]})
    if rtol is not None or hermitian:
        return pseudoinverse(a, rtol, hermitian, how)
    return factorize("pinv", {"a": a}, {"x": "nm"}, how=how)[0]
