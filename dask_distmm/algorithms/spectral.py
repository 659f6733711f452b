"""Leading eigenvectors and singular vectors of large matrices, by their products with vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dask_distmm import random
from dask_distmm.algorithms.arguments import chosen, counts, matrix, numbers, shaped, until
from dask_distmm.arrays.jit import jit
from dask_distmm.errors import PlanError, check_square
from dask_distmm.tracing.control import fori_loop


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
    result: Ranks = _pagerank(A, personalization, alpha, max_iter, tol)
    return result


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
    n = A.shape[0]
    counts(1, n - 2, k=k)
    chosen("which", which, ("LM", "LR", "SR", "LI"))
    ncv = min(n, max(2 * k + 1, 20)) if ncv is None else ncv
    counts(k + 2, n, ncv=ncv)
    maxiter = 10 * n if maxiter is None else maxiter
    counts(maxiter=maxiter)
    counts(0, seed=seed)
    numbers(tol=tol)
    v0 = None if v0 is None else shaped(v0, "v0", n).astype(A.dtype)
    result: Eigenpairs = _eigs(
        A, v0, random.key(seed), k, which, ncv, maxiter, max(tol, ncv * float(np.finfo(A.dtype).eps))
    )
    return result


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
    least = min(A.shape)
    counts(1, least - 1, k=k)
    ncv = min(least, max(2 * k + 1, 20)) if ncv is None else ncv
    counts(k + 1, least, ncv=ncv)
    maxiter = 10 * least if maxiter is None else maxiter
    counts(maxiter=maxiter)
    counts(0, seed=seed)
    numbers(tol=tol)
    v0 = None if v0 is None else shaped(v0, "v0", A.shape[1]).astype(A.dtype)
    result: SingularTriplets = _svds(
        A, v0, random.key(seed), k, ncv, maxiter, max(tol, ncv * float(np.finfo(A.dtype).eps))
    )
    return result


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
