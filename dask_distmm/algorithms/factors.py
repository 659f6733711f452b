"""Factors of matrices: non-negative ones, alternating least squares, leading eigenvectors and singular vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dask_distmm import random
from dask_distmm.algorithms.arguments import chosen, counts, matrix, numbers, shaped, until
from dask_distmm.arrays.jit import jit
from dask_distmm.errors import PlanError, check_square
from dask_distmm.tracing.control import fori_loop


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
    return _nmf(X, W, H, random.key(seed), init, n_components, max_iter, tol)


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
    return _als(X, weights, random.key(seed), n_components, max_iter, reg, tol)


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


# Leading eigenvectors and singular vectors of large matrices, by their products with vectors
class Ranks(NamedTuple):
    """Result of `pagerank`."""

    ranks: Any
    n_iter: Any


class Eigenpairs(NamedTuple):
    """Result of `eigs`."""

    w: Any
    v: Any
    n_iter: Any


class SingularTriplets(NamedTuple):
    """Result of `svds`."""

    u: Any
    s: Any
    vh: Any
    n_iter: Any


def pagerank(
    A: Any, *, alpha: float = 0.85, personalization: Any = None, max_iter: int = 100, tol: float = 1e-6
) -> Ranks:
    """Rank the nodes of a graph by the links to them (Page, Brin, Motwani, Winograd 1999), by power iteration.

    Parameters
    ----------
    A : array, (n, n)
        ``A[i, j]`` is the weight of the link from i to j, not negative. It may be sparse.
    alpha : float
        The damping: how likely a link is followed, rather than a node chosen at random.
    personalization : array, (n,), optional
        How likely each node is chosen then, and behind nodes without links; all alike by default.
    max_iter : int
        The most turns.
    tol : float
        The iteration ends if absolute changes of all ranks add up to less.

    Returns
    -------
    ranks : array, (n,)
        The ranks of all nodes, whose sum is 1.
    n_iter : array, ()
        The number of turns.

    Raises
    ------
    PlanError
        A is not a square matrix of real numbers, or an argument is out of its range.

    See Also
    --------
    eigs

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.algorithms import pagerank
    >>> pagerank(da.from_array([[0, 1, 0], [0, 0, 1], [0, 1, 0]], chunks=1)).ranks.compute().round(2)
    array([0.05, 0.49, 0.46])
    """
    A = matrix(A, "A")
    check_square("A", A.shape)
    counts(max_iter=max_iter)
    numbers(alpha=alpha, tol=tol)
    if alpha > 1:
        raise PlanError(f"alpha must be at most 1, got {alpha}")
    if personalization is not None:
        personalization = shaped(personalization, "personalization", A.shape[0]).astype(A.dtype)
    return _pagerank(A, personalization, alpha, max_iter, tol)


@jit
def _pagerank(A: Any, p: Any, alpha: float, max_iter: int, tol: float) -> Ranks:
    links = A.sum(1)
    # Zeros that all workers have.
    p = (A.T @ np.zeros_like(links)) + (1 / len(A) if p is None else p / p.sum())

    def turn(i: Any, x: Any) -> tuple[Any, ...]:
        followed = A.T @ np.where(links > 0, x / np.where(links > 0, links, 1), 0)
        new = alpha * (followed + np.where(links > 0, 0, x).sum() * p) + (1 - alpha) * p
        return new, abs(new - x).sum() < tol

    return Ranks(*until(turn, (p,), max_iter))


def eigs(
    A: Any,
    k: int = 6,
    *,
    which: str = "LM",
    v0: Any = None,
    ncv: int | None = None,
    maxiter: int | None = None,
    tol: float = 0,
    seed: int = 0,
) -> Eigenpairs:
    """Find some eigenvalues and eigenvectors of a square matrix, as ``scipy.sparse.linalg.eigs`` does.

    Arnoldi's method, restarted with the wanted invariant subspace (Krylov-Schur; Stewart 2001). For a Hermitian matrix
    use `linalg.eigsh`.

    Parameters
    ----------
    A : array, (n, n)
        The matrix, which may be sparse, or complex.
    k : int
        How many eigenvalues, up to n - 2.
    which : "LM", "LR", "SR", "LI"
        Those of largest magnitude, of largest or least real part, or of largest imaginary part; of a real matrix that
        of its magnitude, as SciPy has it.
    v0 : array, (n,), optional
        The first vector; a random one by default.
    ncv : int, optional
        The number of vectors in a turn, above k + 1; by default ``max(2 * k + 1, 20)``, at most n.
    maxiter : int, optional
        The most turns, each of which makes up to `ncv` vectors; 10 n by default.
    tol : float
        The relative accuracy of eigenvalues; 0 stands for that of the type.
    seed : int
        Seed for the first vector.

    Returns
    -------
    w : array, (k,)
        The eigenvalues, complex, in the order that `which` says.
    v : array, (n, k)
        The eigenvectors, complex, in columns of norm 1.
    n_iter : array, ()
        The number of turns. Where it is `maxiter`, pairs may be less accurate than `tol` says.

    Raises
    ------
    PlanError
        A is not a square matrix, or an argument is out of its range.

    See Also
    --------
    svds, dask_distmm.linalg.eigsh

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.algorithms import eigs
    >>> A = da.from_array(np.diag(np.arange(40.0)) + np.eye(40, k=1), chunks=10)
    >>> eigs(A, 2).w.compute().real.round(6)
    array([39., 38.])
    """
    A = matrix(A, "A", "fc")
    check_square("A", A.shape)
    chosen("which", which, ("LM", "LR", "SR", "LI"))
    start, limits = _krylov(A, k, 2, v0, ncv, maxiter, tol, seed)
    return _eigs(A, *start, k, which, *limits)


def _krylov(
    A: Any, k: int, more: int, v0: Any, ncv: int | None, maxiter: int | None, tol: float, seed: int
) -> tuple[tuple[Any, Any], tuple[int, int, float]]:
    """Return the start, or a key for it; and how many vectors are kept, `more` than k, turns, and the tolerance."""
    least = min(A.shape)
    counts(1, least - more, k=k)
    ncv = min(least, max(2 * k + 1, 20)) if ncv is None else ncv
    counts(k + more, least, ncv=ncv)
    maxiter = 10 * least if maxiter is None else maxiter
    counts(maxiter=maxiter)
    counts(0, seed=seed)
    numbers(tol=tol)
    v0 = None if v0 is None else shaped(v0, "v0", A.shape[1]).astype(A.dtype)
    return (v0, random.key(seed)), (ncv, maxiter, max(tol, ncv * float(np.finfo(A.dtype).eps)))


@jit
def _eigs(A: Any, v0: Any, key: Any, k: int, which: str, q: int, maxiter: int, tol: float) -> Eigenpairs:
    n, floor = A.shape[0], float(np.finfo(A.dtype).eps) ** (2 / 3)
    kept, complexes = min(k + (q - k) // 2, q - 2), A.dtype.kind == "c"
    v = random.normal(key, (n,)).astype(A.dtype) if v0 is None else v0
    columns, rows = np.arange(q + 1, like=v), np.arange(q + 1, like=v)[:, None]

    def longer(j: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        """Append a vector, orthogonal to those before."""
        V, H = state
        w, h, norm = _orthogonal(A @ V[:, j], V)
        column = np.where(columns == j + 1, norm, h)
        return np.where(columns == j + 1, w[:, None], V), np.where(columns[:q] == j, column[:, None], H)

    def ritz(H: Any) -> tuple[Any, Any, Any]:
        """Return all eigenvalues of H, the wanted ones first, with vectors and the residuals of pairs."""
        w, Y = np.linalg.eig(H[:q])
        w, Y = w + 0j, Y + 0j
        measure = {"LM": abs(w), "LR": w.real, "SR": -w.real, "LI": w.imag if complexes else abs(w.imag)}[which]
        order = np.argsort(-measure, kind="stable")
        w, Y = w[order], Y[:, order]
        return w, Y, abs(H[q, q - 1]) * abs(Y[q - 1])

    def turn(i: Any, V: Any, H: Any, start: Any) -> tuple[Any, ...]:
        # Restart: the first columns of V, so that they span the wanted vectors, and the next one.
        w, Y, _ = ritz(H)
        if complexes:
            first, Z = kept, Y
        else:
            # Pairs of conjugates stay together, as their real and imaginary parts.
            first = kept + (w.imag[kept - 1] > 0) * 1
            Z = np.where(w.imag < 0, Y.imag, Y.real)
        Q = np.linalg.qr(Z)[0].astype(A.dtype)
        small = np.where((columns[:q] < first) & (rows[:q] < first), Q.conj().T @ H[:q] @ Q, 0)
        last = np.where(columns[:q] < first, H[q, q - 1] * Q[q - 1], 0)
        restarted = np.concatenate([small, np.zeros_like(last)[None]])
        restarted = np.where(rows == first, last, restarted)
        basis = np.where(columns == first, V[:, q][:, None], 0)
        again = np.concatenate([V[:, :q] @ Q, V[:, q:]], 1)
        basis = np.where(columns < first, again, basis)
        # In the first turn there is nothing yet.
        V, H, start = (np.where(i > 0, new, old) for new, old in ((basis, V), (restarted, H), (first, start)))
        V, H = fori_loop(start, q, longer, (V, H))
        w, _, residuals = ritz(H)
        return V, H, start, np.all((residuals <= tol * np.maximum(abs(w), floor * abs(w).max()))[:k])

    V = np.where(columns == 0, (v / _size(v))[:, None], 0)
    H = np.zeros((q + 1, q), A.dtype, like=v)
    V, H, _, n_iter = until(turn, (V, H, 0), maxiter)
    w, Y, _ = ritz(H)
    return Eigenpairs(w[:k], V[:, :q] @ Y[:, :k], n_iter)


def _size(x: Any) -> Any:
    return np.sqrt(np.square(abs(x)).sum())


def _orthogonal(w: Any, V: Any) -> tuple[Any, Any, Any]:
    """Return the part of a vector that is orthogonal to others, of norm 1 or 0; its products with these, its norm."""
    h = V.conj().T @ w
    w = w - V @ h
    again = V.conj().T @ w
    w = w - V @ again
    norm = _size(w)
    return w / np.where(norm > 0, norm, 1), h + again, norm


def svds(
    A: Any,
    k: int = 6,
    *,
    v0: Any = None,
    ncv: int | None = None,
    maxiter: int | None = None,
    tol: float = 0,
    seed: int = 0,
) -> SingularTriplets:
    """Find the largest singular values and their vectors, as ``scipy.sparse.linalg.svds`` does.

    Golub and Kahan's bidiagonalization, restarted with the leading vectors (Baglama, Reichel 2005).

    Parameters
    ----------
    A : array, (m, n)
        The matrix, which may be sparse, or complex.
    k : int
        How many singular values, below the smaller extent.
    v0 : array, (n,), optional
        The first vector; a random one by default.
    ncv : int, optional
        The number of vectors in a turn, above k + 1; by default ``max(2 * k + 1, 20)``, at most the smaller extent.
    maxiter : int, optional
        The most turns, each of which makes up to `ncv` vectors; 10 times the smaller extent by default.
    tol : float
        The accuracy relative to the largest singular value; 0 stands for that of the type.
    seed : int
        Seed for the first vector.

    Returns
    -------
    u : array, (m, k)
        The left singular vectors.
    s : array, (k,)
        The singular values, the least one first, as SciPy has them.
    vh : array, (k, n)
        The right singular vectors.
    n_iter : array, ()
        The number of turns. Where it is `maxiter`, values may be less accurate than `tol` says.

    Raises
    ------
    PlanError
        A is not a matrix, or an argument is out of its range.

    See Also
    --------
    eigs, dask_distmm.linalg.svd_compressed

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.algorithms import svds
    >>> svds(da.from_array(np.diag(np.arange(30.0)), chunks=10), 2).s.compute().round(6)
    array([28., 29.])
    """
    A = matrix(A, "A", "fc")
    start, limits = _krylov(A, k, 1, v0, ncv, maxiter, tol, seed)
    return _svds(A, *start, k, *limits)


@jit
def _svds(A: Any, v0: Any, key: Any, k: int, q: int, maxiter: int, tol: float) -> SingularTriplets:
    n = A.shape[1]
    kept = min(k + (q - k) // 2, q - 1)
    v = random.normal(key, (n,)).astype(A.dtype) if v0 is None else v0
    columns, rows = np.arange(q + 1, like=v), np.arange(q, like=v)[:, None]

    def longer(j: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Append a vector on either side: A V = U B, and A.T U = V B.T but for the last column."""
        U, V, B, _ = state
        u, h, norm = _orthogonal(A @ V[:, j], U)
        column = np.where(rows[:, 0] == j, norm, h)
        U = np.where(columns[:q] == j, u[:, None], U)
        w, _, beta = _orthogonal(A.conj().T @ u, V)
        V = np.where(columns == j + 1, w[:, None], V)
        return U, V, np.where(columns[:q] == j, column[:, None], B), beta

    def turn(i: Any, U: Any, V: Any, B: Any, beta: Any, start: Any) -> tuple[Any, ...]:
        P, s, Q = np.linalg.svd(B)
        U2 = np.where(columns[:q] < kept, U @ P, 0)
        V2 = np.where(columns[:q] < kept, V[:, :q] @ Q.conj().T, np.where(columns[:q] == kept, V[:, q:], 0))
        V2 = np.concatenate([V2, np.zeros_like(V[:, q:])], 1)
        B2 = np.where((columns[:q] == rows) & (rows < kept), s, 0)
        U, V, B, start = (np.where(i > 0, x, y) for x, y in ((U2, U), (V2, V), (B2, B), (kept, start)))
        U, V, B, beta = fori_loop(start, q, longer, (U, V, B.astype(A.dtype), beta))
        P, s, _ = np.linalg.svd(B)
        return U, V, B, beta, start, np.all(beta * abs(P[q - 1, :k]) <= tol * s[0])

    V = np.where(columns == 0, (v / _size(v))[:, None], 0)
    U = np.zeros_like((A @ v)[:, None] * columns[:q].astype(A.dtype))
    B = np.zeros((q, q), A.dtype, like=v)
    U, V, B, _, _, n_iter = until(turn, (U, V, B, np.zeros((), A.real.dtype), 0), maxiter)
    P, s, Q = np.linalg.svd(B)
    vh = Q[:k] @ V[:, :q].conj().T
    return SingularTriplets((U @ P[:, :k])[:, ::-1], s[:k][::-1], vh[::-1], n_iter)
