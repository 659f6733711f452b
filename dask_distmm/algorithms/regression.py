"""Linear models: logistic and Poisson regression, the lasso, and ridge regression with its penalty chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_distmm.algorithms.arguments import chosen, counts, matrix, numbers, shaped, until
from dask_distmm.arrays.jit import jit
from dask_distmm.errors import PlanError
from dask_distmm.tracing.control import sum_rows

# Steps and differences of gradients that `_lbfgs` remembers.
_KEPT = 10


class LinearModel(NamedTuple):
    """Result of regressions."""

    coef: Any
    intercept: Any
    n_iter: Any


class RidgeChoice(NamedTuple):
    """Result of `ridge_cv`."""

    coef: Any
    intercept: Any
    alpha: Any
    scores: Any


def logistic_regression(
    X: Any,
    y: Any,
    *,
    C: float = 1.0,
    fit_intercept: bool = True,
    solver: str = "lbfgs",
    n_classes: int = 2,
    max_iter: int = 100,
    tol: float = 1e-4,
) -> LinearModel:
    """Fit probabilities of classes, as ``sklearn.linear_model.LogisticRegression`` does, with its L2 penalty.

    Each turn reads X once. One in which the loss becomes no less is undone, and the next one takes half the step.

    Parameters
    ----------
    X : array, (m, n)
        The rows, which may be sparse; ``"newton-cholesky"`` makes chunks dense.
    y : array, (m,)
        The class of each row, from 0 to below `n_classes`. Of two classes also bools, or -1 and 1.
    C : float
        The inverse of the penalty.
    fit_intercept : bool
        Whether there is a constant term, which has no penalty.
    solver : "lbfgs" or "newton-cholesky"
        L-BFGS (Nocedal, Wright 2006, algorithm 7.4), or Newton's method, of two classes only: few turns, each of which
        multiplies ``X.T @ X``.
    n_classes : int
        The number of classes.
    max_iter : int
        The most turns.
    tol : float
        The iteration ends if no element of the gradient of the average loss is larger.

    Returns
    -------
    coef : array, (n,) or (n, n_classes)
        A row of more than two classes has the probabilities ``softmax(X @ coef + intercept)``, else it is of class 1
        with the probability ``1 / (1 + exp(-(X @ coef + intercept)))``.
    intercept : array, () or (n_classes,)
        The constant term.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, y does not have as many rows, or an argument is out of its range.

    See Also
    --------
    poisson_regression, lasso

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.algorithms import logistic_regression
    >>> X = da.from_array([[0.0], [1.0], [2.0], [3.0]], chunks=2)
    >>> found = logistic_regression(X, da.from_array([0, 0, 1, 1], chunks=2))
    >>> ((X @ found.coef + found.intercept) > 0).compute()
    array([False, False,  True,  True])
    """
    X, y = _rows(X, y)
    counts(2, n_classes=n_classes)
    counts(max_iter=max_iter)
    numbers(positive=True, C=C)
    numbers(tol=tol)
    chosen("solver", solver, ("lbfgs", "newton-cholesky"))
    if n_classes > 2 and solver != "lbfgs":
        raise PlanError(f'solver={solver!r} fits two classes, got n_classes={n_classes}: use solver="lbfgs"')
    return _logistic(X, y, C, fit_intercept, solver, n_classes, max_iter, tol)


def poisson_regression(
    X: Any,
    y: Any,
    *,
    alpha: float = 1.0,
    fit_intercept: bool = True,
    solver: str = "lbfgs",
    max_iter: int = 100,
    tol: float = 1e-4,
) -> LinearModel:
    """Fit means of counts, ``exp(X @ coef + intercept)``, as ``sklearn.linear_model.PoissonRegressor`` does.

    Turns are those of `logistic_regression`.

    Parameters
    ----------
    X : array, (m, n)
        The rows, which may be sparse; ``"newton-cholesky"`` makes chunks dense.
    y : array, (m,)
        The counts, which are not negative.
    alpha : float
        The penalty of the squares of `coef`.
    fit_intercept, solver, max_iter, tol
        As of `logistic_regression`.

    Returns
    -------
    coef : array, (n,)
        The coefficients.
    intercept : array, ()
        The constant term.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, y does not have as many rows, or an argument is out of its range.

    See Also
    --------
    logistic_regression, lasso

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.algorithms import poisson_regression
    >>> found = poisson_regression(da.zeros((4, 1), chunks=2), da.from_array([1.0, 2.0, 3.0, 2.0], chunks=2))
    >>> float(np.exp(found.intercept).compute().round(3))
    2.0
    """
    X, y = _rows(X, y)
    counts(max_iter=max_iter)
    numbers(alpha=alpha, tol=tol)
    chosen("solver", solver, ("lbfgs", "newton-cholesky"))
    return _poisson(X, y, alpha, fit_intercept, solver, max_iter, tol)


def lasso(
    X: Any, y: Any, *, alpha: float = 1.0, fit_intercept: bool = True, max_iter: int = 10_000, tol: float = 1e-4
) -> LinearModel:
    """Minimize ``norm(y - X @ coef)**2 / (2 * m) + alpha * sum(abs(coef))``, as ``sklearn.linear_model.Lasso`` does.

    X is read twice, for means and for the Gram matrix; turns only read that. They are those of an accelerated proximal
    gradient method (Beck, Teboulle 2009) that restarts (O'Donoghue, Candes 2015).

    Parameters
    ----------
    X : array, (m, n)
        The rows.
    y : array, (m,)
        The targets.
    alpha : float
        The penalty; without one use `linalg.lstsq`.
    fit_intercept, max_iter
        As of `logistic_regression`.
    tol : float
        The iteration ends if the duality gap is below ``tol * sum(y**2) / m``, of y without its mean.

    Returns
    -------
    coef : array, (n,)
        The coefficients, most of which may be 0.
    intercept : array, ()
        The constant term.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, y does not have as many rows, or an argument is out of its range.

    See Also
    --------
    logistic_regression, dask_distmm.linalg.ridge

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.algorithms import lasso
    >>> X = da.from_array([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]], chunks=(2, 2))
    >>> lasso(X, da.from_array([-2.0, 2.0, -2.0, 2.0], chunks=2), alpha=0.5).coef.compute().round(3)
    array([1.5, 0. ])
    """
    X, y = _rows(X, y)
    counts(max_iter=max_iter)
    numbers(alpha=alpha, positive=True)
    numbers(tol=tol)
    return _lasso(X, y, alpha, fit_intercept, max_iter, tol)


def ridge_cv(
    X: Any, y: Any, alphas: Sequence[float] = (0.1, 1.0, 10.0), *, cv: int | None = None, fit_intercept: bool = True
) -> RidgeChoice:
    """Fit by ridge regression with the best of some penalties, as ``sklearn.linear_model.RidgeCV`` does.

    Without `cv` each row is predicted by a fit to all others, which one Gram matrix tells (Golub, Heath, Wahba 1979).
    With `cv` rows are cut into that many folds; a fit without a fold takes the Gram matrix of all without that of the
    fold, so that X is multiplied once, too.

    Parameters
    ----------
    X : array, (m, n)
        The rows.
    y : array, (m,) or (m, k)
        The targets; all columns with the same penalty.
    alphas : sequence of floats
        The penalties, which are positive.
    cv : int, optional
        The number of folds, each of which is left out once: neighbouring rows, as of ``KFold``.
    fit_intercept : bool
        Whether there is a constant term, which has no penalty.

    Returns
    -------
    coef : array, (n,) or (n, k)
        The coefficients with the best penalty.
    intercept : array, () or (k,)
        The constant term.
    alpha : array, ()
        The penalty with the highest score; the first one of these.
    scores : array, (number of penalties,)
        The negative mean of squared errors; with `cv` the mean R^2 of folds.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, y does not have as many rows, or an argument is out of its range.

    See Also
    --------
    lasso, dask_distmm.linalg.ridge

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.algorithms import ridge_cv
    >>> X = np.arange(12.0)[:, None]
    >>> found = ridge_cv(da.from_array(X, chunks=(4, 1)), da.from_array(3 * X[:, 0] + 1, chunks=4), [0.1, 10.0])
    >>> float(found.alpha.compute())
    0.1
    """
    X, y = _rows(X, y, (1, 2))
    chosen_from = np.asarray(alphas, np.float64)
    if chosen_from.ndim != 1 or not chosen_from.size or not (np.isfinite(chosen_from) & (chosen_from > 0)).all():
        raise PlanError(f"alphas must be positive numbers, got {alphas!r}")
    if cv is not None:
        counts(2, X.shape[0] // 2, cv=cv)
    return _ridge_cv(X, y, tuple(chosen_from.tolist()), cv, fit_intercept)


def _rows(X: Any, y: Any, ndim: tuple[int, ...] = (1,)) -> tuple[Any, Any]:
    X = matrix(X)
    y = y if hasattr(y, "dtype") and hasattr(y, "ndim") else np.asarray(y)
    y = shaped(y, "y", X.shape[0], *(y.shape[1:] if y.ndim in ndim else ()))
    if y.dtype.kind not in "biuf":
        raise PlanError(f"y must have real numbers, got {y.dtype}")
    return X, y


@jit
def _logistic(
    X: Any, y: Any, C: float, fit_intercept: bool, solver: str, n_classes: int, max_iter: int, tol: float
) -> LinearModel:
    def two(eta: Any) -> tuple[Any, ...]:
        small = np.exp(-abs(eta))
        p = np.where(eta >= 0, 1, small) / (1 + small)
        return np.maximum(eta, 0) + np.log1p(small) - target * eta, p - target, p * (1 - p)

    def more(eta: Any) -> tuple[Any, ...]:
        eta = eta - eta.max(1)[:, None]
        small = np.exp(eta)
        total = small.sum(1)
        return np.log(total) - (target * eta).sum(1), small / total[:, None] - target, None

    binary = n_classes == 2
    target = (y > 0 if binary else y[:, None] == np.arange(n_classes, like=y)).astype(X.dtype)
    start = np.zeros((X.shape[1] + fit_intercept, *(() if binary else (n_classes,))), X.dtype, like=_like(X))
    return _fitted(two if binary else more, X, start, 1 / (C * len(X)), fit_intercept, solver, max_iter, tol)


@jit
def _poisson(X: Any, y: Any, alpha: float, fit_intercept: bool, solver: str, max_iter: int, tol: float) -> LinearModel:
    y, most = y.astype(X.dtype), math.log(float(np.finfo(X.dtype).max)) / 2

    def family(eta: Any) -> tuple[Any, ...]:
        mean = np.exp(np.minimum(eta, most))
        return mean - y * eta, mean - y, mean

    start = np.zeros(X.shape[1], X.dtype, like=_like(X))
    if fit_intercept:
        start = np.concatenate([start, np.log(np.maximum(y.mean(), np.finfo(X.dtype).tiny))[None]])
    return _fitted(family, X, start, alpha, fit_intercept, solver, max_iter, tol)


def _like(X: Any) -> Any:
    """Return an array of NumPy's for `like=`, where NumPy's functions make those of X as NumPy's."""
    return X if hasattr(X, "__array_function__") else np.empty(0)


def _fitted(
    family: Callable[[Any], tuple[Any, ...]],
    X: Any,
    start: Any,
    penalty: float,
    fit_intercept: bool,
    solver: str,
    max_iter: int,
    tol: float,
) -> LinearModel:
    """Minimize the mean of a family's losses, of which it returns derivatives, too, and a penalty."""
    m, n = X.shape

    def loss(B: Any) -> tuple[Any, ...]:
        value, slope, curve = family(X @ B[:n] + B[n] if fit_intercept else X @ B)
        gradient = X.T @ slope / m + penalty * B[:n]
        if fit_intercept:
            gradient = np.concatenate([gradient, slope.sum(0)[None] / m])
        return value.sum() / m + penalty / 2 * (B[:n] * B[:n]).sum(), gradient, curve

    def hessian(curve: Any) -> Any:
        H = X.T @ (curve[:, None] * X) / m + penalty * np.eye(n, dtype=X.dtype, like=start)
        if fit_intercept:
            last = np.concatenate([X.T @ curve, curve.sum()[None]]) / m
            H = np.concatenate([np.concatenate([H, last[None, :n]]), last[:, None]], 1)
        # Where columns depend on each other it is singular.
        return H + eps * np.trace(H) * np.eye(len(H), dtype=X.dtype, like=start)

    def turn(i: Any, B: Any, value: Any, gradient: Any, step: Any, *memory: Any) -> tuple[Any, ...]:
        way = -step * (_lbfgs(gradient, *memory) if solver == "lbfgs" else np.linalg.solve(memory[0], gradient))
        new_value, new_gradient, curve = loss(B + way)
        # A sufficient decrease (Armijo), but for rounding.
        good = new_value <= value + 1e-4 * (way * gradient).sum() + 4 * eps * abs(value)
        change = new_gradient - gradient
        if solver == "lbfgs":
            curved = good & ((way * change).sum() > eps * (change * change).sum())
            pairs = zip(memory, (way, change), strict=True)
            memory = tuple(np.where(curved, np.concatenate([old[1:], x[None]]), old) for old, x in pairs)
        else:
            memory = (np.where(good, hessian(curve), *memory),)
        B, value, gradient = (
            np.where(good, new, old) for new, old in ((B + way, B), (new_value, value), (new_gradient, gradient))
        )
        step = np.where(good, 1, step / 2)
        return B, value, gradient, step, *memory, (abs(gradient).max() <= tol) | (step < 1e-12)

    eps = float(np.finfo(X.dtype).eps)
    value, gradient, curve = loss(start)
    memory = (np.zeros((_KEPT, *start.shape), X.dtype, like=start),) * 2 if solver == "lbfgs" else (hessian(curve),)
    B, *_, n_iter = until(turn, (start, value, gradient, np.ones((), X.dtype, like=start), *memory), max_iter)
    return LinearModel(B[:n], B[n] if fit_intercept else 0 * B[:1].sum(0), n_iter)


def _lbfgs(gradient: Any, S: Any, Y: Any) -> Any:
    """Return the inverse Hessian times a gradient, as the last steps S and changes Y of gradients have it."""
    curved, shares = [(S[j] * Y[j]).sum() for j in range(_KEPT)], {}
    q = gradient
    for j in reversed(range(_KEPT)):
        shares[j] = np.where(curved[j] > 0, (S[j] * q).sum() / np.where(curved[j] > 0, curved[j], 1), 0)
        q = q - shares[j] * Y[j]
    curved_last = curved[-1] > 0
    size = np.where(curved_last, (Y[-1] * Y[-1]).sum(), np.sqrt((gradient * gradient).sum()))
    q = q * (np.where(curved_last, curved[-1], 1) / np.maximum(size, np.finfo(gradient.dtype).tiny))
    for j in range(_KEPT):
        share = np.where(curved[j] > 0, (Y[j] * q).sum() / np.where(curved[j] > 0, curved[j], 1), 0)
        q = q + (shares[j] - share) * S[j]
    return q


@jit
def _lasso(X: Any, y: Any, alpha: float, fit_intercept: bool, max_iter: int, tol: float) -> LinearModel:
    m, y = len(X), y.astype(X.dtype)
    center, level = (X.sum(0) / m, y.sum() / m) if fit_intercept else (0 * X.sum(0), 0 * y.sum())
    X, y = X - center, y - level
    G, b, squares = X.T @ X / m, X.T @ y / m, (y * y).sum() / m
    tiny = np.finfo(X.dtype).tiny
    bound = np.maximum(np.linalg.eigvalsh(G)[-1], tiny)

    def turn(i: Any, w: Any, z: Any, t: Any) -> tuple[Any, ...]:
        v = z - (G @ z - b) / bound
        new = np.sign(v) * np.maximum(abs(v) - alpha / bound, 0)
        t = np.where(((z - new) * (new - w)).sum() > 0, 1, t)
        later = (1 + np.sqrt(1 + 4 * t * t)) / 2
        z = new + (t - 1) / later * (new - w)
        # The duality gap, at the residual scaled so that it is feasible.
        Gw = G @ new
        left, scale = squares - 2 * (b * new).sum() + (new * Gw).sum(), alpha / np.maximum(abs(b - Gw).max(), alpha)
        gap = left * (1 + scale * scale) / 2 + alpha * abs(new).sum() - scale * (squares - (b * new).sum())
        return new, z, later.astype(X.dtype), gap <= tol * squares

    zeros = np.zeros_like(b)
    w, *_, n_iter = until(turn, (zeros, zeros, np.ones((), X.dtype, like=b)), max_iter)
    return LinearModel(w, level - (center * w).sum(), n_iter)


@jit
def _ridge_cv(X: Any, y: Any, alphas: tuple[float, ...], cv: int | None, fit_intercept: bool) -> RidgeChoice:
    (m, n), kind = X.shape, X.dtype
    Y = (y[:, None] if y.ndim == 1 else y).astype(kind)
    k, count = Y.shape[1], len(alphas)
    center, level = (X.sum(0) / m, Y.sum(0) / m) if fit_intercept else (0 * X.sum(0), 0 * Y.sum(0))
    X, Y = X - center, Y - level
    penalties = np.stack([0 * center.sum() + alpha for alpha in alphas])

    def solutions(G: Any, C: Any) -> Any:
        """Return the solutions of all penalties side by side, of a matrix or a stack of them; and what solves."""
        # LAPACK fails for NaN; here C brings them into the results.
        w, V = np.linalg.eigh(np.where(np.isfinite(G).all(), G, 0))
        scale = 1 / (np.maximum(w, 0)[..., None] + penalties)
        along = np.swapaxes(V, -1, -2) @ C
        each = (scale[..., None] * along[..., None, :]).reshape((*along.shape[:-1], count * k))
        return V @ each, V, scale

    if cv is None:
        W, V, scale = solutions(X.T @ X, X.T @ Y)
        left = 1 - np.square(X @ V) @ scale - (1 / m if fit_intercept else 0)
        scores: Any = 0
        for target in range(k):
            errors = (Y[:, target][:, None] - X @ W[:, target::k]) / left
            scores = scores - np.square(errors).sum(0) / (m * k)
    else:
        ends = np.cumsum([m // cv + (i < m % cv) for i in range(cv - 1)])
        number = np.cumsum(np.ones_like(Y[:, 0], dtype=np.int64))
        fold = sum((number > int(end)) * 1 for end in ends)
        size = 1 + n + k
        moments = sum_rows(functools.partial(_moments_of_folds, cv), X, Y, fold, meta=np.empty((cv, size, size), kind))
        rest = moments.sum(0) - moments
        sizes = rest[:, 0, 0][:, None]
        means = rest[:, 0, 1:] / sizes * (1 if fit_intercept else 0)
        rest = rest[:, 1:, 1:] - sizes[:, :, None] * means[:, :, None] * means[:, None, :]
        W, V, scale = solutions(rest[:, :n, :n], rest[:, :n, n:])
        # Per fold the constant terms of solutions.
        levels = np.concatenate([means[:, n:]] * count, 1) - (means[:, :n, None] * W).sum(1)
        errors = sum_rows(
            functools.partial(_errors_of_folds, cv), X, Y, fold, W, levels, meta=np.empty((cv, count * k), kind)
        )
        squares = np.einsum("fjj->fj", moments)[:, 1 + n :]
        squares = squares - moments[:, 0, 1 + n :] ** 2 / moments[:, 0, 0][:, None]
        scores = (1 - errors.reshape(cv, count, k) / squares[:, None, :]).sum(2).sum(0) / (cv * k)
        W, V, scale = solutions(X.T @ X, X.T @ Y)
    best: Any = np.argmax(scores)
    W = W.reshape(n, count, k)
    each = np.arange(count, like=_like(X))
    coef = np.where(each[:, None] == best, W, 0).sum(1)
    intercept = level - (center[:, None] * coef).sum(0)
    alpha = np.where(each == best, penalties, 0).sum()
    if y.ndim == 1:
        coef, intercept = coef[:, 0], intercept[0]
    return RidgeChoice(coef, intercept, alpha, scores)


def _of_folds(cv: int, fold: Any) -> Any:
    """Yield the folds of which some rows are here, and which these are."""
    for number in range(cv):
        here = fold == number
        if here.any():
            yield number, here


def _moments_of_folds(cv: int, X: Any, Y: Any, fold: Any) -> Any:
    """Return for each fold the Gram matrix of a column of ones, X and Y beside each other."""
    rows = np.concatenate([np.ones_like(X[:, :1]), X, Y], 1)
    moments = np.zeros((cv, rows.shape[1], rows.shape[1]), X.dtype, like=X)
    for number, here in _of_folds(cv, fold):
        part = rows[here]
        moments[number] = part.T @ part
    return moments


def _errors_of_folds(cv: int, X: Any, Y: Any, fold: Any, W: Any, levels: Any) -> Any:
    """Return for each fold the squared errors of the solutions that were made without it."""
    errors, k = np.zeros(levels.shape, X.dtype, like=X), Y.shape[1]
    for number, here in _of_folds(cv, fold):
        predicted = X[here] @ W[number] + levels[number]
        errors[number] = np.square(np.concatenate([Y[here]] * (predicted.shape[1] // k), 1) - predicted).sum(0)
    return errors
