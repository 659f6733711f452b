"""Clusters of rows: k-means, and mixtures of normal distributions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from dask_distmm import random
from dask_distmm.algorithms.arguments import chosen, counts, matrix, numbers, shaped, until
from dask_distmm.arrays.jit import jit
from dask_distmm.tracing.arrays import logsumexp
from dask_distmm.tracing.control import fori_loop


class KMeans(NamedTuple):
    """Result of `kmeans`."""

    centers: Any
    labels: Any
    inertia: Any
    n_iter: Any


class Mixture(NamedTuple):
    """Result of `gmm`."""

    weights: Any
    means: Any
    covariances: Any
    probabilities: Any
    labels: Any
    lower_bound: Any
    n_iter: Any


def kmeans(
    X: Any, n_clusters: int = 8, *, init: Any = "k-means++", max_iter: int = 300, tol: float = 1e-4, seed: int = 0
) -> KMeans:
    """Find clusters of rows by Lloyd's algorithm, as ``sklearn.cluster.KMeans`` does.

    A turn reads X once, and adds up sums and counts of the clusters (Lloyd 1982). The start is greedy k-means++
    (Arthur, Vassilvitskii 2007).

    Parameters
    ----------
    X : array, (m, n)
        The rows, which may be sparse.
    n_clusters : int
        The number of clusters.
    init : "k-means++", "random" or array, (n_clusters, n)
        How the first centres are chosen among the rows, or these centres.
    max_iter : int
        The most turns.
    tol : float
        The iteration ends if the squares of the shifts of all centres add up to less than `tol` times the average
        variance of the columns, or no label changes.
    seed : int
        Seed for the choice of the first centres. It gives the same centres for any chunks and workers.

    Returns
    -------
    centers : array, (n_clusters, n)
        The means of the clusters. That of a cluster without rows stays where it was.
    labels : array of int, (m,)
        The nearest centre of each row.
    inertia : array, ()
        The sum of the squares of the distances of all rows from their centres.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, or an argument is out of its range.

    See Also
    --------
    gmm, nmf

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.algorithms import kmeans
    >>> found = kmeans(da.from_array([[0.0], [1.0], [10.0], [11.0]], chunks=2), 2)
    >>> sorted(found.centers.compute().ravel().tolist())
    [0.5, 10.5]
    """
    X = matrix(X)
    counts(1, X.shape[0], n_clusters=n_clusters)
    counts(max_iter=max_iter)
    counts(0, seed=seed)
    numbers(tol=tol)
    return _kmeans(X, *_start(X, n_clusters, init, seed), n_clusters, max_iter, tol)


def _start(X: Any, count: int, init: Any, seed: int) -> tuple[Any, Any, Any]:
    """Return the first centres, or the numbers of their rows, or a key by which they are drawn; others are None."""
    if not isinstance(init, str):
        return shaped(init, "init", count, X.shape[1]).astype(X.dtype), None, None
    chosen("init", init, ("k-means++", "random"))
    if init == "random":
        return None, np.random.default_rng(seed).choice(X.shape[0], count, replace=False), None
    return None, None, random.key(seed)


@jit
def _kmeans(X: Any, C: Any, rows: Any, key: Any, count: int, max_iter: int, tol: float) -> KMeans:
    squares = np.square(X).sum(1)
    if C is None:
        C = X[rows] if rows is not None else _plus_plus(X, squares, key, count)
    means = X.sum(0) / len(X)
    limit = tol * (squares.sum() / len(X) - (means * means).sum()) / X.shape[1]

    def turn(i: Any, C: Any, labels: Any) -> tuple[Any, ...]:
        nearest = nearest_of(X, C)
        members = nearest[:, None] == np.arange(count, like=C)
        sizes = members.sum(0)[:, None]
        means = (members.astype(X.dtype).T @ X) / np.maximum(sizes, 1).astype(X.dtype)
        means = np.where(sizes > 0, means, C)
        return means, nearest, np.all(nearest == labels) | (np.square(means - C).sum() <= limit)

    C, _, n_iter = until(turn, (C, np.full_like(squares, -1, dtype=np.int64)), max_iter)
    labels = nearest_of(X, C)
    return KMeans(C, labels, np.square(X - C[labels]).sum(), n_iter)


def nearest_of(X: Any, C: Any) -> Any:
    """Return the number of the nearest centre of each row."""
    return ((C * C).sum(1) + X @ (-2 * C.T)).argmin(1)


def _plus_plus(X: Any, squares: Any, key: Any, count: int) -> Any:
    """Return rows far from each other: each is the best of some that are drawn by their squared distances."""
    trials = 2 + int(math.log(count))

    def drawn(key: Any, weights: Any) -> Any:
        # Where each row waits for a time, exponentially distributed, its weight is the chance to be the first.
        waited = -np.log1p(-random.uniform(key, (len(X), trials)))
        return np.argmax(weights[:, None] / np.maximum(waited, np.finfo(float).tiny), axis=0)

    def distances(points: Any) -> Any:
        return np.maximum(squares[:, None] - 2 * (X @ points.T) + (points * points).sum(1), 0)

    def turn(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        centers, nearest = state
        points = X[drawn(random.fold_in(key, i), nearest)]
        closer = np.minimum(nearest[:, None], distances(points))
        best = closer.sum(0).argmin()
        return np.where(np.arange(count, like=points)[:, None] == i, points[best], centers), closer[:, best]

    first = X[drawn(key, np.ones_like(squares))][:1]
    centers = np.where(np.arange(count, like=first)[:, None] == 0, first, np.zeros_like(first))
    return fori_loop(1, count, turn, (centers, distances(first)[:, 0]))[0]


def gmm(
    X: Any,
    n_components: int = 1,
    *,
    tol: float = 1e-3,
    reg_covar: float = 1e-6,
    max_iter: int = 100,
    init: Any = "k-means++",
    seed: int = 0,
) -> Mixture:
    """Fit a mixture of normal distributions by expectation maximization, as ``sklearn.mixture.GaussianMixture`` does.

    Each component has a covariance matrix of its own. A turn reads X once (Dempster, Laird, Rubin 1977).

    Parameters
    ----------
    X : array, (m, n)
        The rows.
    n_components : int
        The number of distributions.
    tol : float
        The iteration ends if the average log-likelihood of a row changes by less.
    reg_covar : float
        Added to the diagonals of covariance matrices.
    max_iter : int
        The most turns.
    init, seed
        Those of the `kmeans` with whose clusters it starts.

    Returns
    -------
    weights : array, (n_components,)
        The share of each component.
    means : array, (n_components, n)
        Their means.
    covariances : array, (n_components, n, n)
        Their covariance matrices.
    probabilities : array, (m, n_components)
        How likely each row is of each component.
    labels : array of int, (m,)
        The most likely component of each row.
    lower_bound : array, ()
        The average log-likelihood of a row in the last turn.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        X is not a matrix of real numbers, or an argument is out of its range.
    MatrixError
        When it is computed: a covariance matrix is not positive definite; increase `reg_covar`.

    See Also
    --------
    kmeans

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.algorithms import gmm
    >>> X = np.array([[0.0, 0.1], [0.1, 0.0], [0.0, 0.0], [5.0, 5.1], [5.1, 5.0], [5.0, 5.0]])
    >>> gmm(da.from_array(X, chunks=(3, 2)), 2).weights.compute().round(3)
    array([0.5, 0.5])
    """
    X = matrix(X)
    counts(1, X.shape[0], n_components=n_components)
    counts(max_iter=max_iter)
    counts(0, seed=seed)
    numbers(tol=tol, reg_covar=reg_covar)
    return _gmm(X, *_start(X, n_components, init, seed), n_components, max_iter, tol, reg_covar)


@jit
def _gmm(X: Any, C: Any, rows: Any, key: Any, count: int, max_iter: int, tol: float, reg_covar: float) -> Mixture:
    n, kind = X.shape[1], X.dtype

    def maximized(weights: Any, away: Any, means: Any) -> tuple[Any, ...]:
        sizes = weights.sum(0) + 10 * np.finfo(kind).eps
        shift = np.einsum("ik,ikj->kj", weights, away) / sizes[:, None]
        squares = np.einsum("ikj,ikl->kjl", weights[:, :, None] * away, away) / sizes[:, None, None]
        covariances = squares - shift[:, :, None] * shift[:, None, :] + reg_covar * np.eye(n, dtype=kind, like=shift)
        return sizes / sizes.sum(), means + shift, covariances

    def expected(weights: Any, means: Any, covariances: Any) -> tuple[Any, ...]:
        away = X[:, None, :] - means
        inverse = np.linalg.inv(np.linalg.cholesky(covariances))
        squares = np.square(np.einsum("ikj,klj->ikl", away, inverse)).sum(2)
        scale = np.log(np.einsum("kjj->kj", inverse)).sum(1) + np.log(weights) - n / 2 * math.log(2 * math.pi)
        logs = scale - squares / 2
        total: Any = logsumexp(logs, 1)
        return away, np.exp(logs - total[:, None]), total.mean()

    def turn(i: Any, *state: Any) -> tuple[Any, ...]:
        *mixture, before = state
        away, probabilities, bound = expected(*mixture)
        return *maximized(probabilities, away, mixture[1]), bound, abs(bound - before) < tol

    start = _kmeans(X, C, rows, key, count, 300, 1e-4)
    members = (start.labels[:, None] == np.arange(count, like=start.centers)).astype(kind)
    first = maximized(members, X[:, None, :] - start.centers, start.centers)
    weights, means, covariances, bound, n_iter = until(turn, (*first, np.full((), -np.inf, kind)), max_iter)
    probabilities = expected(weights, means, covariances)[1]
    return Mixture(weights, means, covariances, probabilities, probabilities.argmax(1), bound, n_iter)
