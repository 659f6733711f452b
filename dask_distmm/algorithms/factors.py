"""Factors of low rank: non-negative ones, and those of alternating least squares."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dask_distmm import random
from dask_distmm.algorithms.arguments import chosen, counts, matrix, numbers, shaped, until
from dask_distmm.arrays.jit import jit
from dask_distmm.errors import PlanError


class Factors(NamedTuple):
    """Result of `nmf` and `als`."""

    W: Any
    H: Any
    error: Any
    n_iter: Any


def nmf(
    X: Any, n_components: int, *, init: Any = "nndsvda", max_iter: int = 200, tol: float = 1e-4, seed: int = 0
) -> Factors:
    """Factorize a non-negative matrix, as ``sklearn.decomposition.NMF(solver="mu")`` does.

    W and H are multiplied by what lessens the Frobenius norm of ``X - W @ H`` (Lee, Seung 2001). A turn reads X once.

    Parameters
    ----------
    X : array, (m, n)
        The matrix, which may be sparse. Elements that are negative give no useful result.
    n_components : int
        The number of columns of W.
    init : "nndsvda", "random" or tuple of two arrays
        The start: the leading singular vectors, with zeros replaced by the mean of X (Boutsidis, Gallopoulos 2008);
        random numbers; or W, (m, n_components), and H, (n_components, n).
    max_iter : int
        The most turns.
    tol : float
        Every ten turns: the iteration ends if the error has become less by less than `tol` times the first error.
    seed : int
        Seed for the start.

    Returns
    -------
    W : array, (m, n_components)
        The factor in the rows of X.
    H : array, (n_components, n)
        The other factor.
    error : array, ()
        The Frobenius norm of ``X - W @ H``.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, or an argument is out of its range.

    See Also
    --------
    als, svds

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.algorithms import nmf
    >>> W, H, error, n_iter = nmf(da.ones((6, 4), chunks=(2, 4)), 1)
    >>> (W @ H).compute().round(3)[0]
    array([1., 1., 1., 1.])
    """
    X = matrix(X)
    m, n = X.shape
    counts(n_components=n_components, max_iter=max_iter)
    counts(0, seed=seed)
    numbers(tol=tol)
    if not isinstance(init, str):
        if not isinstance(init, tuple | list) or len(init) != 2:
            raise PlanError(f"init must be a name or a tuple of W and H, got {init!r}")
        W = shaped(init[0], "W", m, n_components).astype(X.dtype)
        H, init = shaped(init[1], "H", n_components, n).astype(X.dtype), ""
    else:
        W, H = None, None
        chosen("init", init, ("nndsvda", "random"))
        if init == "nndsvda":
            counts(1, min(m, n), n_components=n_components)
    result: Factors = _nmf(X, W, H, random.key(seed), init, n_components, max_iter, tol)
    return result


@jit
def _nmf(X: Any, W: Any, H: Any, key: Any, init: str, k: int, max_iter: int, tol: float) -> Factors:
    total, small = np.square(X).sum(), np.finfo(np.float32).eps
    if init:
        W, H = (_nndsvda if init == "nndsvda" else _random)(X, key, k)

    def error_of(A: Any, G: Any, H: Any) -> Any:
        return np.sqrt(np.maximum(total - 2 * (A * H).sum() + (G * (H @ H.T)).sum(), 0))

    def turn(i: Any, W: Any, H: Any, error: Any, before: Any) -> tuple[Any, ...]:
        below = W @ (H @ H.T)
        W = W * (X @ H.T) / np.where(below == 0, small, below)
        A, G = W.T @ X, W.T @ W
        below = G @ H
        H = H * A / np.where(below == 0, small, below)
        error, look = error_of(A, G, H), i % 10 == 9
        done = look & (before - error < tol * first) & (tol > 0)
        return W, H, error, np.where(look, error, before), done

    first = error_of(W.T @ X, W.T @ W, H)
    W, H, error, _, n_iter = until(turn, (W, H, first, first), max_iter)
    return Factors(W, H, error, n_iter)


def _random(X: Any, key: Any, k: int) -> tuple[Any, Any]:
    scale = np.sqrt(X.sum(1).sum() / (X.size * k))
    first, second = random.split(key)
    W, H = random.normal(first, (len(X), k), X.dtype), random.normal(second, (k, X.shape[1]), X.dtype)
    return scale * abs(W), scale * abs(H)


def _nndsvda(X: Any, key: Any, k: int) -> tuple[Any, Any]:
    """Return the larger ones of the parts of singular vectors that are positive and negative."""
    m, n = X.shape
    # A randomized SVD (Halko, Martinsson, Tropp 2011, algorithm 4.4).
    Q = np.linalg.qr(X @ random.normal(key, (n, min(k + 10, m, n)), X.dtype))[0]
    for _ in range(3):
        Q = np.linalg.qr(X @ np.linalg.qr(X.T @ Q)[0])[0]
    U, s, Vh = np.linalg.svd(Q.T @ X, full_matrices=False)
    U, V = (Q @ U)[:, :k], Vh[:k].T
    tiny = np.finfo(X.dtype).tiny
    parts = [(np.maximum(x, 0), np.maximum(-x, 0)) for x in (U, V)]
    norms = [[np.sqrt((x * x).sum(0)) for x in some] for some in parts]
    sizes = [a * b for a, b in zip(*norms, strict=True)]
    scale = np.sqrt(s[:k] * np.maximum(*sizes))
    W, H = (
        scale * np.where(sizes[0] >= sizes[1], *(x / np.maximum(a, tiny) for x, a in zip(some, norm, strict=True)))
        for some, norm in zip(parts, norms, strict=True)
    )
    mean = X.sum(1).sum() / X.size
    W, H = (np.where(x < 1e-6, mean, x) for x in (W, H.T))
    return W, H


def als(
    X: Any,
    n_components: int,
    *,
    weights: Any = None,
    reg: float = 0.1,
    max_iter: int = 20,
    tol: float = 1e-4,
    seed: int = 0,
) -> Factors:
    """Factorize a matrix by alternating least squares.

    ``sum(weights * (X - W @ H)**2) + reg * (sum(W**2) + sum(H**2))`` is minimized for W and for H in turn (Zhou and
    others 2008). So elements that are not known get weight 0.

    Parameters
    ----------
    X : array, (m, n)
        The matrix, which may be sparse: then elements that are not stored are zeros.
    n_components : int
        The number of columns of W.
    weights : array, (m, n), optional
        A number for each element that is not negative; those of weight 0 may be NaN. By default all have weight 1, and
        a turn reads X once more than a product; with weights it computes ``n_components**2`` products with each row.
    reg : float
        The penalty; a positive one.
    max_iter : int
        The most turns.
    tol : float
        The iteration ends if what is minimized becomes less by less than `tol` of it.
    seed : int
        Seed for the first H.

    Returns
    -------
    W : array, (m, n_components)
        The factor in the rows of X.
    H : array, (n_components, n)
        The other factor.
    error : array, ()
        The objective.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, or an argument is out of its range.

    See Also
    --------
    nmf, svds

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.algorithms import als
    >>> X = np.outer([1.0, 2.0, 3.0], [1.0, 2.0])
    >>> known = np.array([[1, 1], [1, 1], [1, 0]])
    >>> X[2, 1] = np.nan
    >>> W, H, *_ = als(da.from_array(X, chunks=(2, 2)), 1, weights=known, reg=1e-6, max_iter=200, tol=0)
    >>> float((W @ H)[2, 1].compute().round(2))
    6.0
    """
    X = matrix(X)
    counts(n_components=n_components, max_iter=max_iter)
    counts(0, seed=seed)
    numbers(tol=tol)
    numbers(reg=reg, positive=True)
    if weights is not None:
        weights = shaped(weights, "weights", *X.shape).astype(X.dtype)
    result: Factors = _als(X, weights, random.key(seed), n_components, max_iter, reg, tol)
    return result


@jit
def _als(X: Any, weights: Any, key: Any, k: int, max_iter: int, reg: float, tol: float) -> Factors:
    m, n = X.shape
    if weights is not None:
        X = np.where(weights > 0, X, 0)

    def squares(A: Any) -> Any:
        return (A[:, :, None] * A[:, None, :]).reshape(len(A), k * k)

    def turn(i: Any, W: Any, V: Any, error: Any) -> tuple[Any, ...]:
        eye = reg * np.eye(k, dtype=X.dtype, like=V)
        if weights is None:
            W = X @ np.linalg.solve(V.T @ V + eye, V.T).T
            G, A = W.T @ W, X.T @ W
            V = np.linalg.solve(G + eye, A.T).T
            missed = np.square(X).sum() - 2 * (A * V).sum() + (G * (V.T @ V)).sum()
        else:
            G = (weights @ squares(V)).reshape(m, k, k) + eye
            W = np.linalg.solve(G, ((weights * X) @ V)[..., None])[..., 0]
            G = (weights.T @ squares(W)).reshape(n, k, k) + eye
            V = np.linalg.solve(G, ((weights * X).T @ W)[..., None])[..., 0]
            missed = (weights * np.square(X - W @ V.T)).sum()
        now = missed + reg * ((W * W).sum() + (V * V).sum())
        return W, V, now, abs(error - now) <= tol * now

    V = random.normal(key, (n, k), X.dtype)
    W, V, error, n_iter = until(turn, (X @ V, V, np.full((), np.inf, X.dtype)), max_iter)
    return Factors(W, V.T, error, n_iter)
