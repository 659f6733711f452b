"""Iterative solvers and the exponential of Dask arrays, by SciPy's names, with its results: each is one run."""

from __future__ import annotations

import functools
import reprlib
import secrets
import types
from collections.abc import Sequence
from typing import Any, Literal, Unpack, cast

import numpy as np
from cloudpickle import dumps
from dask.array.core import Array
from dask.base import is_dask_collection

from dask_distmm import random
from dask_distmm.algorithms import krylov
from dask_distmm.arrays.jit import Jitted, jit
from dask_distmm.arrays.kinds import check_operand, rechunked
from dask_distmm.arrays.linalg.array_api import norm
from dask_distmm.arrays.linalg.factorize import common_type, computed, in_rows, matrix, operand, times
from dask_distmm.arrays.linalg.public import POWERS, SOLVED_IN_TURNS, TURNS, Operand, RunOptions, check_range
from dask_distmm.arrays.linalg.stacks import public
from dask_distmm.errors import MatrixError, PlanError, check_square, not_finite
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.tracing.control import UserFunction, callback, fori_loop


@public(RunOptions, SOLVED_IN_TURNS)
def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Any = None,
    **how: Unpack[RunOptions],
) -> tuple[Any, Any]:
    """Solve ``A @ x = b`` by conjugate gradients, for a Hermitian positive definite matrix, as SciPy's ``cg`` does.

    The whole iteration is one run. Each worker has rows of A, and the same rows of vectors; in each iteration it gets
    the other rows of one vector, and two sums.

    Parameters
    ----------
    A : array or sparse matrix, (n, n), or function
        The matrix, of any chunks, which may be sparse; where rows are in fewer chunks than columns they are cut as
        columns are, and those of a sparse matrix in one chunk, as SciPy's, as b is. Or a function ``A(x, rows)`` that
        workers call: it returns the rows of ``A @ x`` in the slice `rows`, one chunk of b. x, (n, 1), is a NumPy or
        CuPy array, as the chunks of b are.
    b : array, (n,) or (n, 1)
        The right-hand side.
    x0 : array, (n,) or (n, 1), optional
        Where to start; zeros by default.
    rtol, atol : float
        The iteration ends if ``norm(b - A @ x)`` is below ``max(rtol * norm(b), atol)``, or is 0.
    maxiter : int, optional
        The most iterations; 10 n by default.
    M : array, (n, n) or (n,), or function, optional
        A preconditioner: an approximation of the inverse of A, Hermitian and positive definite; (n,) stands for the
        diagonal of a diagonal one. It may be sparse, or a function, as A can be.
    callback : function, optional
        One of the workers calls ``callback(xk)`` after each iteration, with a copy of x, (n,), for which all workers
        get its rows. The client does not see what the function changes there; the function can send numbers to it, by
        ``distributed.get_worker().log_event``. An error that it raises ends the iteration, and arrives as it is.

    Returns
    -------
    x : array, (n,)
        The solution, or where the iteration has ended.
    info : array, ()
        0: the limit was met. Otherwise the number of iterations. Elements that are NaN, and directions in which A
        is zero, end the iteration.

    Raises
    ------
    PlanError
        The shapes do not fit each other.
    MatrixError
        When it is computed: a function returns another shape or type than is expected.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.cg([[2.0, 0.0], [0.0, 4.0]], [1.0, 1.0])[0].compute()
    array([0.5 , 0.25])
    """
    _check(how, maxiter, rtol=rtol, atol=atol)
    return _solved(krylov.cg, (A, b, x0, M), callback, maxiter, 10, how, rtol, atol)


@public(RunOptions, SOLVED_IN_TURNS)
def minres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    shift: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Any = None,
    show: bool = False,
    check: bool = False,
    **how: Unpack[RunOptions],
) -> tuple[Any, Any]:
    """Solve ``(A - shift I) @ x = b`` for a Hermitian matrix of any eigenvalues, as SciPy's ``minres`` does.

    The whole iteration is one run, as that of `cg`.

    Parameters
    ----------
    A : array or sparse matrix, (n, n), or function
        The matrix, of any chunks, or a function, as of `cg`.
    b : array, (n,) or (n, 1)
        The right-hand side.
    x0 : array, (n,) or (n, 1), optional
        Where to start; zeros by default. SciPy's first residual leaves `shift` out; so does this one.
    rtol : float
        The iteration ends if ``norm(b - A @ x)`` is about ``rtol * norm(A) * norm(x)``, or is as small as it can be.
    shift : float
        The number that is subtracted from each diagonal element.
    maxiter : int, optional
        The most iterations; 5 n by default.
    M : array, (n, n) or (n,), or function, optional
        A preconditioner, as of `cg`.
    callback : function, optional
        Called with x after each iteration, as of `cg`.
    show, check : False
        Workers print nothing, and do not test for symmetry.

    Returns
    -------
    x : array, (n,)
        The solution, or where the iteration has ended.
    info : array, ()
        0: a test was passed. Otherwise the number of iterations.

    Raises
    ------
    PlanError
        The shapes do not fit each other.
    MatrixError
        When it is computed: M is not positive definite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.minres([[2.0, 0.0], [0.0, -4.0]], [1.0, 1.0])[0].compute()
    array([ 0.5 , -0.25])
    """
    _check_false(show=show, check=check)
    _check(how, maxiter, rtol=rtol)
    return _solved(krylov.minres, (A, b, x0, M), callback, maxiter, 5, how, rtol, shift)


@public(RunOptions, SOLVED_IN_TURNS)
def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: Any = None,
    callback_type: Literal["x", "pr_norm"] | None = None,
    **how: Unpack[RunOptions],
) -> tuple[Any, Any]:
    """Solve ``A @ x = b`` for any square matrix by GMRES with restarts, as SciPy's ``gmres`` does.

    The whole iteration is one run, as that of `cg`. Each worker has its rows of up to `restart` + 1 vectors.

    Parameters
    ----------
    A : array or sparse matrix, (n, n), or function
        The matrix, of any chunks, or a function, as of `cg`.
    b : array, (n,) or (n, 1)
        The right-hand side.
    x0 : array, (n,) or (n, 1), optional
        Where to start; zeros by default.
    rtol, atol : float
        The iteration ends if ``norm(b - A @ x)`` is at most ``max(rtol * norm(b), atol)``.
    restart : int, optional
        Iterations between restarts; min(20, n) by default.
    maxiter : int, optional
        The most restarts; 10 n by default.
    M : array, (n, n) or (n,), or function, optional
        A preconditioner, as of `cg`, of any kind.
    callback : function, optional
        Called by one of the workers, as of `cg`.
    callback_type : {"x", "pr_norm"}, optional
        What `callback` is called with: x after each restart, or the norm of the preconditioned residual relative to b's
        after each iteration. It must be passed with `callback`: SciPy's default counts `maxiter` in another way.

    Returns
    -------
    x : array, (n,)
        The solution, or where the iteration has ended.
    info : array, ()
        0: the limit was met. Otherwise the number of restarts. NaN, and a singular matrix, may end the iteration.

    Raises
    ------
    PlanError
        The shapes do not fit each other.
    MatrixError
        When it is computed: a function returns another shape or type than is expected.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.gmres([[2.0, 0.0], [0.0, 4.0]], [1.0, 1.0])[0].compute()
    array([0.5 , 0.25])
    """
    if callback is not None and callback_type is None:
        raise PlanError("callback_type must be 'x' or 'pr_norm' if there is a callback, got None")
    check_range(1, restart=restart)
    shows_norm = callback_type == "pr_norm"
    _check(how, maxiter, rtol=rtol, atol=atol)
    _check_callback(callback)
    callback = functools.partial(_with_number, callback) if shows_norm and callback is not None else callback
    options = shows_norm, rtol, atol, restart or 20
    return _solved(krylov.gmres, (A, b, x0, M), callback, maxiter, 10, how, *options)


@public(RunOptions, TURNS)
def eigsh(
    A: Any,
    k: int = 6,
    M: Any = None,
    sigma: float | None = None,
    which: Literal["LM", "SM", "LA", "SA", "BE"] = "LM",
    v0: Any = None,
    ncv: int | None = None,
    maxiter: int | None = None,
    tol: float = 0,
    return_eigenvectors: bool = True,
    Minv: Any = None,
    OPinv: Any = None,
    mode: Literal["normal"] = "normal",
    *,
    rng: int | None = None,
    **how: Unpack[RunOptions],
) -> Any:
    """Return `k` eigenvalues of a Hermitian matrix and their vectors, as SciPy's ``eigsh`` does, by Lanczos' method.

    The whole iteration is one run, as that of `cg`. Vectors are orthogonal to working precision, and the iteration is
    restarted with the best of them (*thick restart*). Each worker has its rows of `ncv` + 1 vectors.

    Parameters
    ----------
    A : array or sparse matrix, (n, n), or function
        The matrix, of any chunks; it is taken for Hermitian. Or a function, as of `cg`, with v0 in place of b.
    k : int
        How many eigenvalues, less than n.
    M, sigma, Minv, OPinv : None
        For pairs of matrices, and eigenvalues near a number, use `eigh`.
    which : {"LM", "SM", "LA", "SA", "BE"}
        Those of largest or smallest magnitude, the (algebraically) largest or smallest ones, or half of each.
    v0 : array, (n,), optional
        Where to start; random by default, but for a function, which is called for the chunks of `v0`.
    ncv : int, optional
        The most vectors; min(n, max(2 k + 1, 20)) by default.
    maxiter : int, optional
        The most restarts; 10 n by default.
    tol : float
        The relative accuracy of eigenvalues; 0 stands for the machine precision.
    return_eigenvectors : bool
        Whether to return vectors.
    mode : {"normal"}
        The only one here.
    rng : int, optional
        Seed for the random vectors: with the same seed and the same chunks the result is the same, up to rounding.

    Returns
    -------
    w : array, (k,), real
        Ascending.
    v : array, (n, k)
        Orthonormal columns. Only `w` is returned without `return_eigenvectors`.

    Raises
    ------
    PlanError
        `k` or `ncv` does not fit the matrix, or an argument is not available.
    MatrixError
        When it is computed: an element is NaN or infinite, or not all eigenvalues have converged.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.eigsh(da.diag(da.arange(9.0)), 2, return_eigenvectors=False).compute().round(6)
    array([7., 8.])
    """
    for name, value in {"M": M, "sigma": sigma, "Minv": Minv, "OPinv": OPinv}.items():
        if value is not None:
            raise PlanError(f"{name} must be None: use eigh for pairs of matrices and eigenvalues near a number")
    _check(how, maxiter, tol=tol)
    a, rows = _operator(A, v0, "v0")
    n = len(rows)
    check_range(1, n - 1, ": use eigh for all eigenvalues", k=k)
    ncv = min(n, max(2 * k + 1, 20)) if ncv is None else ncv
    check_range(k + 1, n, ncv=ncv)
    start = None if v0 is None else _vector("v0", v0, rows)
    dtype = common_type({"A": rows})
    a, start = (x.astype(dtype) if isinstance(x, Array) else x for x in (a, start))
    info, key = np.finfo(dtype), random.key(secrets.randbits(64) if rng is None else rng)
    w, v = krylov.eigsh.run(how, a, start, key, k, ncv, which, tol or float(info.eps), maxiter or 10 * n)
    w = w.astype(info.dtype)
    return (w, v) if return_eigenvectors else w


@public(RunOptions, TURNS)
def lobpcg(
    A: Any,
    X: Any,
    B: Any = None,
    M: Any = None,
    Y: Any = None,
    tol: float | None = None,
    maxiter: int | None = None,
    largest: bool = True,
    verbosityLevel: int = 0,
    retLambdaHistory: bool = False,
    retResidualNormsHistory: bool = False,
    restartControl: int | None = None,
    **how: Unpack[RunOptions],
) -> tuple[Any, Any]:
    """Return some of the largest or smallest eigenvalues of a Hermitian matrix, as SciPy's ``lobpcg`` does.

    The whole iteration is one run, as that of `cg`. Each worker has its rows of six blocks like X, and all of one.

    Parameters
    ----------
    A : array or sparse matrix, (n, n), or function
        The matrix, of any chunks; it is taken for Hermitian. Or a function, as of `cg`, with X in place of b.
    X : array, (n, k)
        Where to start: independent columns, at most n / 5 of them.
    B, Y : None
        For pairs of matrices use `eigh`.
    M : array, (n, n) or (n,), or function, optional
        A preconditioner, as of `cg`.
    tol : float, optional
        The iteration ends if the norms of all residuals are at most this; ``sqrt(eps) * n`` by default.
    maxiter : int, optional
        The most iterations; 20 by default.
    largest : bool
        Which end of the spectrum.
    verbosityLevel, retLambdaHistory, retResidualNormsHistory, restartControl : 0, False, False, None
        Workers print nothing, and keep no history.

    Returns
    -------
    w : array, (k,), real
        In descending order; ascending if not `largest`.
    v : array, (n, k)
        Orthonormal columns. If residuals stay large no warning is given: check ``A @ v - v * w``.

    Raises
    ------
    PlanError
        The shapes do not fit each other, or an argument is not available.
    MatrixError
        When it is computed: an element is NaN or infinite, or columns of X depend on each other.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.lobpcg(da.diag(da.arange(9.0)), da.ones((9, 1)), maxiter=50)[0].compute().round(6)
    array([8.])
    """
    unsupported: dict[str, Any] = {"B": B, "Y": Y, "restartControl": restartControl}
    for name, value in unsupported.items():
        if value is not None:
            raise PlanError(f"{name} must be None: use eigh for pairs of matrices; restarts are not supported")
    if verbosityLevel:
        raise PlanError(f"verbosityLevel must be 0: workers print nothing; got {verbosityLevel}")
    _check_false(retLambdaHistory=retLambdaHistory, retResidualNormsHistory=retResidualNormsHistory)
    _check(how, maxiter, tol=tol or 0)
    (a, rows), x = _operator(A, X, "X"), matrix("X", X)
    n, k = len(rows), x.shape[1]
    if len(x) != n or not 1 <= k <= n // 5:
        raise PlanError(f"A is {n} x {n}, so X must have {n} rows and 1 to {n // 5} columns; it is {len(x)} x {k}")
    a, x, m = _of_one_type(a, x, _preconditioner(M, rows))
    info = np.finfo(x.dtype)
    w, v = krylov.lobpcg.run(how, a, x, m, tol or float(info.eps) ** 0.5 * n, maxiter or 20, largest)
    return w.astype(info.dtype), v


@public(RunOptions, SOLVED_IN_TURNS)
def lsqr(
    A: Any,
    b: Any,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    iter_lim: int | None = None,
    show: bool = False,
    calc_var: bool = False,
    x0: Any = None,
    **how: Unpack[RunOptions],
) -> tuple[Any, ...]:
    """Return the x that minimizes ``|A @ x - b|^2 + damp^2 |x - x0|^2``, as SciPy's ``lsqr`` does.

    The whole iteration is one run. Each worker has rows of A, and all of x; in each iteration it gets n numbers of each
    other worker. All is computed in the type of A and b, where SciPy's has float64.

    Parameters
    ----------
    A : array or sparse matrix, (m, n), or two functions
        The matrix, of any shape and chunks. Or a function ``A(x, rows)``, as of `cg`, and one for the adjoint, in a
        tuple: ``adjoint(u, rows)`` returns ``A[rows].conj().T @ u``, (n, 1), of the rows `rows` of a vector.
    b : array, (m,) or (m, 1)
        The right-hand side.
    damp : float
        The square root of the weight of ``|x|^2``.
    atol, btol, conlim : float
        When to stop: see SciPy's ``lsqr``.
    iter_lim : int, optional
        The most iterations; 2 n by default.
    show : False
        Workers print nothing.
    calc_var : bool
        Whether to estimate the diagonal of the inverse of ``A.T @ A + damp**2 * I``.
    x0 : array, (n,) or (n, 1), optional
        Where to start; zeros by default. It must be passed if A is functions: it says how many columns A has.

    Returns
    -------
    x : array, (n,)
        The solution.
    istop, itn, r1norm, r2norm, anorm, acond, arnorm, xnorm : array, ()
        Why it has stopped, iterations, and norms, as SciPy's ``lsqr`` has them. NaN ends the iteration: istop is 0.
    var : array, (n,)
        The estimate; zeros without `calc_var`.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.lsqr([[1.0], [1.0]], [1.0, 3.0])[0].compute()
    array([2.])
    """
    _check_false(show=show)
    x, numbers, var = _least_squares(krylov.lsqr, (A, b, x0), iter_lim, how, damp, (atol, btol, conlim), calc_var)
    return x, numbers[0].astype(int), numbers[1].astype(int), *numbers[2:], var


@public(RunOptions, SOLVED_IN_TURNS)
def lsmr(
    A: Any,
    b: Any,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    maxiter: int | None = None,
    show: bool = False,
    x0: Any = None,
    **how: Unpack[RunOptions],
) -> tuple[Any, ...]:
    """Return the x that minimizes ``|A @ x - b|^2 + damp^2 |x - x0|^2``, as SciPy's ``lsmr`` does.

    The whole iteration is one run, as that of `lsqr`.

    Parameters
    ----------
    A : array or sparse matrix, (m, n), or two functions
        The matrix, of any shape and chunks, or two functions, as of `lsqr`.
    b : array, (m,) or (m, 1)
        The right-hand side.
    damp : float
        The square root of the weight of ``|x|^2``.
    atol, btol, conlim : float
        When to stop: see SciPy's ``lsmr``.
    maxiter : int, optional
        The most iterations; min(m, n) by default.
    show : False
        Workers print nothing.
    x0 : array, (n,) or (n, 1), optional
        Where to start; zeros by default, as of `lsqr`. The tests have the norm of ``x - x0`` where SciPy's have
        that of x.

    Returns
    -------
    x : array, (n,)
        The solution.
    istop, itn, normr, normar, norma, conda, normx : array, ()
        Why it has stopped, iterations, and norms, as SciPy's ``lsmr`` has them. NaN ends the iteration: istop is 0.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.lsmr([[1.0], [1.0]], [1.0, 3.0])[0].compute()
    array([2.])
    """
    _check_false(show=show)
    x, numbers, _ = _least_squares(krylov.lsmr, (A, b, x0), maxiter, how, damp, (atol, btol, conlim))
    last = numbers[-1] if x0 is None else norm(x)
    return x, numbers[0].astype(int), numbers[1].astype(int), *numbers[2:-1], last


def _least_squares(
    algorithm: Jitted[tuple[Any, Any, Any]],
    operands: Sequence[Any],
    maxiter: int | None,
    how: RunOptions,
    damp: float,
    limits: tuple[float, float, float],
    *options: Any,
) -> tuple[Any, ...]:
    """Return x, some numbers, and the estimate of variances, of A, b and x0."""
    a, b, x0 = operands
    start = None if x0 is None else matrix("x0", x0, vector=True)
    a, adjoint, rows, columns = _two_functions(a, b, start)
    m, n = len(rows), sum(columns)
    _check(how, maxiter, damp=damp, **dict(zip(("atol", "btol", "conlim"), limits, strict=True)))
    if not m or not n:
        raise PlanError(f"A must have rows and columns, got {m} x {n}")
    a, right = _of_one_type(a, _vector("b", b, rows))
    rest = None
    if start is not None:
        if start.shape != (n, 1):
            raise PlanError(f"A is {m} x {n}, so x0 must have shape ({n},); it has {operand('x0', x0).shape}")
        a, right, start = _of_one_type(a, right, start)
        if isinstance(a, UserFunction):
            whole = rechunked(start, -1)
            rest = right - right.map_blocks(_rows_by, whole, function=a, dtype=right.dtype, meta=start._meta)
        else:
            rest = right - times(a, start, how)
    most = maxiter or (2 * n if algorithm is krylov.lsqr else min(m, n))
    x, numbers, var = algorithm.run(how, a, adjoint, right, rest, n, damp, limits, most, *options)
    x, var = (None if vector is None else rechunked(vector, (columns,)) for vector in (x, var))
    return x if start is None else x + rechunked(start[:, 0], (columns,)), numbers, var


def _two_functions(a: Any, b: Any, start: Array | None) -> tuple[Any, UserFunction | None, Array, tuple[int, ...]]:
    """Return A, its adjoint where both are functions, what has the rows of A, and the chunks of its columns."""
    if isinstance(a, tuple) and len(a) == 2 and all(map(callable, a)):
        if start is None:
            raise PlanError("A is two functions, so x0 must be passed: it says how many columns A has")
        function, adjoint = (_function(role, x) for role, x in zip(("A", "the adjoint of A"), a, strict=True))
        return function, adjoint, matrix("b", b, vector=True), start.chunks[0]
    if is_dask_collection(a):
        check_operand("A", a)
    if callable(a) or hasattr(a, "matvec"):
        raise PlanError(
            f"A is a {type(a).__name__}; expected an array, or two functions: lambda x, rows: (A @ x)[rows], and "
            "lambda u, rows: A[rows].conj().T @ u of the rows u of a vector"
        )
    wide = _cut_as(matrix("A", a, sparse="wide"), "b", b)
    return wide, None, wide, wide.chunks[1]


def _rows_by(block: Any, x: Any, *, function: UserFunction, block_info: Any) -> Any:
    """Return rows of A x of a user's function, like a chunk of b."""
    return function(x, slice(*block_info[0]["array-location"][0])).reshape(block.shape)


def _check_false(**options: bool) -> None:
    for name, value in options.items():
        if value:
            raise PlanError(f"{name} must be False: workers print nothing and do not test the matrix; got True")


def _solved(
    algorithm: Jitted[tuple[Any, Any]],
    arguments: Sequence[Any],
    function: Any,
    maxiter: int | None,
    factor: int,
    how: RunOptions,
    *options: Any,
) -> tuple[Any, Any]:
    """Return x and info, of a square matrix A, b, x0 and M; by default after up to `factor` n turns."""
    a, b, x0, m = arguments
    a, rows = _operator(a, b, "b")
    start = None if x0 is None else _vector("x0", x0, rows)
    operands = _of_one_type(a, _vector("b", b, rows), start, _preconditioner(m, rows))
    _check_callback(function)
    callback = None if function is None else UserFunction(dumps(function), "callback")
    return algorithm.run(how, *operands, callback, *options, maxiter or factor * len(rows))


def _of_one_type(a: Any, main: Array, *more: Any) -> list[Any]:
    """Return A and a main operand in the same type, complex if another one is, and all other operands in it."""
    arrays = [a, main, *more]
    dtype = common_type({name: x for name, x in (("A", a), ("b", main)) if isinstance(x, Array)})
    if any(isinstance(x, Array) and x.dtype.kind == "c" for x in arrays):
        dtype = np.result_type(dtype, np.complex64)
    return [x.astype(dtype) if isinstance(x, Array) else x for x in arrays]


def _with_number(function: Any, x: Any) -> None:
    function(float(x))


def _check_callback(function: Any) -> None:
    if function is not None and not callable(function):
        raise PlanError(f"callback must be a function or None, got {reprlib.repr(function)}")
    if isinstance(function, types.BuiltinMethodType) and not isinstance(function.__self__, types.ModuleType):
        raise PlanError(
            f"callback is {function.__name__} of a {type(function.__self__).__name__} of this process, of which a "
            "worker would have a copy: pass a function that sends what it is called with, for example by "
            "distributed.get_worker().log_event"
        )


def _check(how: RunOptions, maxiter: int | None, **limits: float) -> None:
    method = how.get("method") or "auto"
    if method not in ("auto", "rows"):
        raise PlanError(f"method={method!r} is not for iterative solvers: pass 'rows', or leave it out")
    check_range(1, maxiter=maxiter)
    check_range(0, **{name: limit for name, limit in limits.items() if name != "shift"})


def _operator(x: Any, like: Any, name: str) -> tuple[Any, Array]:
    """Return a square matrix in chunks of rows, cut as the axis that is in more chunks; or a function.

    Then what has the rows: the matrix, or `like`, a vector or several, where that is a function.
    """
    if (function := _function("A", x)) is not None:
        if like is None:
            raise PlanError(f"A is a function, so {name} must be passed: its chunks say which rows each worker has")
        a = rows = matrix(name, like, vector=True)
    else:
        a = _cut_as(matrix("A", x, sparse="wide"), name, like)
        check_square("A", a.shape)
        rows = a = in_rows(a, max(a.chunks, key=len))
    if not len(a):
        raise PlanError("A must have at least one row, got 0 x 0")
    return function or a, rows


def _cut_as(a: Array, name: str, like: Any) -> Array:
    """Return a matrix; one of sparse rows in one chunk, as SciPy's are, in the chunks of a vector."""
    if like is None or len(a.chunks[0]) > 1 or not sparse_package(a._meta):
        return a
    rows = matrix(name, like, vector=True).chunks[0]
    return in_rows(a, rows) if sum(rows) == len(a) else a


def _function(name: str, x: Any) -> UserFunction | None:
    """Return a function; None for an array."""
    if is_dask_collection(x):
        check_operand(name, x)  # A Delayed has any attribute.
    if hasattr(x, "matvec"):
        raise PlanError(
            f"{name} is a {type(x).__name__}, which multiplies all rows at once; expected an array or a function that "
            f"returns some rows, for example lambda x, rows: {name}.matmat(x)[rows]"
        )
    return UserFunction(dumps(x), name) if callable(x) else None


def _preconditioner(m: Any, a: Array) -> Any:
    """Return a preconditioner as a matrix, as a column, the diagonal of one, or as a function."""
    if m is None:
        return None
    if (function := _function("M", m)) is not None:
        return function
    inverse, n = operand("M", m, sparse=True), len(a)
    if inverse.shape not in ((n, n), (n,)):
        raise PlanError(f"A is {n} x {n}, so M must be {n} x {n}, or its diagonal; it has shape {inverse.shape}")
    return matrix("M", inverse, vector=True, sparse=True)


def _vector(name: str, x: Any, a: Array) -> Array:
    """Return a vector as a column in the rows of a matrix."""
    column, rows = matrix(name, x, vector=True), len(a)
    if column.shape != (rows, 1):
        raise PlanError(f"A has {rows} rows, so {name} must have shape ({rows},); it has {operand(name, x).shape}")
    return column


# The exponential function
# From this order on all workers compute exponentials. Two of one thread, 1024 and 2048: 0.35 and 1.9 s of each one's
# CPU, of one alone 0.55 and 3.2; of smaller matrices messages take longer than what is saved.
_SHARED = 1024
# The Taylor polynomial of degree 18 of the exponential function, in five products (Bader, Blanes, Casas 2019): factors
# of I, A, A^2, A^3, A^6 in five matrices, of which ``B2 + (B3 + C) C`` with ``C = B4 + B1 B5`` is the polynomial.
_TAYLOR = (
    (0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0.0),
    (0.0, 3.97849749499645077844e-01, 1.36783778460411720168, 4.98289622525382669416e-01, -6.37898194594723280150e-04),
    (-10.9676396052962061844, 1.68015813878906206114, 5.71779846478865511061e-02, -6.98210122488052056106e-03,
     3.34975017086070470649e-05),
    (-9.04316832390810593223e-02, -6.76404519071381882256e-02, 6.75961301770459654925e-02, 2.95552570429315521194e-02,
     -1.39180257516060693404e-05),
    (0.0, 0.0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)  # fmt: skip
# The norm up to which it has full precision, by bytes of a real number.
_NORMS = {4: 3.010066362817634, 8: 1.090863719290036}


@public(RunOptions, POWERS)
def expm(A: Operand, **how: Unpack[RunOptions]) -> Array:
    """Return the exponential of a matrix.

    A Taylor polynomial of a fraction of the matrix is squared again and again (Al-Mohy, Higham 2009; Bader, Blanes,
    Casas 2019). All is products, in one run: each worker has rows of all matrices, and gets the second matrix of
    each product. ``method="rows"``: rows are cut as the axis of `A` that is in more chunks. ``"local"``: one worker has
    the whole matrix. ``"auto"``: that for small matrices.

    Parameters
    ----------
    A : array, (n, n)
        The matrix.

    Returns
    -------
    array, (n, n)
        The exponential, in the chunks of `A`.

    Raises
    ------
    PlanError
        `A` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or too large.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.expm([[0.0, 1.0], [0.0, 0.0]]).compute().round(12)
    array([[1., 1.],
           [0., 1.]])
    """
    a, method = computed("A", A), how.get("method", "auto")
    check_square("A", a.shape)
    if method == "columns":
        raise PlanError("method='columns' is not for expm: pass 'rows' or 'local', or leave it out")
    if not a.size:
        return a
    whole = method == "local" or (method == "auto" and len(a) < _SHARED)
    rows = rechunked(a, (-1 if whole else max(a.chunks, key=len), -1))
    return cast(Array, rechunked(_expm.run(how, rows), a.chunks))


@jit
def _expm(A: Any) -> Any:
    """Square a Taylor polynomial of A / 2^s, s times.

    The s is that of norms of A^2 and A^3, which for matrices that are far from normal is less than that of A's.
    """
    square = A @ A
    cube = square @ A
    norms = [abs(x).sum(0).astype(np.float64).max() for x in (A, square, cube)]
    callback(_check_powers, *norms)
    # Divided by that power of two, powers of A have norms below the limit.
    real, limit, least = A.real.dtype, _NORMS[A.real.dtype.itemsize], np.arange(512.0)
    counts = [(x >= limit**p * 2.0 ** (p * least[: 1018 // p])).sum() for p, x in ((2, norms[1]), (3, norms[2]))]
    s = np.maximum(*counts)
    scale = np.exp2(-s).astype(real)
    third = cube * scale**3
    powers = A * scale, square * scale**2, third, third @ third
    rows, columns = np.zeros_like(A[:, 0], dtype=int) + np.arange(len(A)), np.arange(len(A))

    def polynomial(factors: Any) -> Any:
        terms = sum(c * x for c, x in zip(factors[1:], powers, strict=True) if c)
        return np.where(rows[:, None] == columns, factors[0], 0).astype(real) + terms if factors[0] else terms

    b1, b2, b3, b4, b5 = map(polynomial, _TAYLOR)
    middle = b4 + b1 @ b5
    return fori_loop(0, s, lambda i, x: x @ x, b2 + (b3 + middle) @ middle)


def _check_powers(norm: Any, *of_powers: Any) -> None:
    if not np.isfinite(norm):
        raise MatrixError(not_finite("A", option=False))
    if not np.isfinite(of_powers).all():
        raise MatrixError("powers of A overflow, and so would its exponential: A has too large elements")
