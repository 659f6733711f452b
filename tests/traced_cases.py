"""Functions for `jit` with what they are called with: X (m x n), y, labels L (m), S (m x m), W (m x n x k) in rows."""

from __future__ import annotations

import dask.array as da
import numpy as np

import dask_distmm
from dask_distmm import cond, fori_loop, logsumexp, segment_sum, while_loop
from dask_distmm import random as draws

m, n, k = 23, 5, 3
CHUNKS = (7, 7, 2, 7)


def operands(rng):
    """Return by their names NumPy arrays, and Dask arrays of those that are in rows."""
    q = rng.standard_normal((k, k))
    arrays = {
        "X": rng.standard_normal((m, n)),
        "y": rng.standard_normal(m),
        "S": rng.standard_normal((m, m)),
        "L": rng.integers(0, k, m),
        "W": rng.standard_normal((m, n, k)),
        "A": rng.standard_normal((n, k)),
        "P": q @ q.T + np.eye(k),
    }
    chunks = {"X": (CHUNKS, (2, 3)), "y": (CHUNKS,), "S": (CHUNKS, (10, 13)), "L": (CHUNKS,), "W": (CHUNKS, n, k)}
    lazy = {name: da.from_array(x, chunks=chunks[name]) if name in chunks else x for name, x in arrays.items()}
    return arrays, lazy


def arguments(function, named):
    """Return what a function is called with."""
    return [named[name] for name in function.__code__.co_varnames[: function.__code__.co_argcount]]


def assert_equal(found, expected):
    """Compare results, with their shapes and types."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    tolerance = 1e-5 if expected.dtype.name == "float32" else 1e-9
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def qr_product(X):
    q, r = np.linalg.qr(X)
    return q @ r


def svd_product(X):
    u, s, vh = np.linalg.svd(X, full_matrices=False)
    return (u * s) @ vh


def stacked(G, B):
    return np.linalg.inv(G), np.linalg.solve(G, B)[..., 0], np.linalg.eigvalsh(G), np.linalg.slogdet(G)[1]


def unit(w):
    return w / np.linalg.norm(w)


# What each is called with follows from the names of its parameters.
CASES = {
    "map": lambda X, y: np.exp(X) + y[:, None] * 2,
    "sum0": lambda X: X.sum(0),
    "sum1": lambda X: X.sum(1),
    "sumall": lambda X: X.sum(),
    "mean": lambda X: X.mean(0, keepdims=True) - X.mean(),
    "var": lambda X: (X.var(0), X.std(), X.var(1, ddof=1)),
    "minmax": lambda X: (X.min(0), X.max(), X.max(1), np.any(X > 2), np.all(X > -9, axis=0)),
    "arg": lambda X: (X.argmin(0), X.argmax(1), X.argmax()),
    "prod": lambda y: y.prod(),
    "XA": lambda X, A: X @ A,
    "XtX": lambda X: X.T @ X,
    "AtXt": lambda X, A: A.T @ X.T,
    "Xty": lambda X, y: X.T @ y,
    "yX": lambda X, y: y @ X,
    "XXt": lambda X: X @ X.T,
    "SX": lambda S, X: S @ X,
    "StX": lambda S, X: S.T @ X,
    "SS": lambda S: S @ S,
    "S+St": lambda S: S + S.T,
    "SSt": lambda S: (S @ S.T, S.T @ S.T),
    "outer": lambda y: np.outer(y, y) + 1,
    "norm": lambda X: (
        np.linalg.norm(X),
        np.linalg.norm(X, axis=1),
        np.linalg.norm(X, 1),
        np.linalg.norm(X, np.inf),
        np.linalg.norm(X, 2),
    ),
    "index": lambda X: (X[:, 1], X[:, None, 2:4], X[3], X[2:17:4], X[::-3], X[-1, 1], X[:, ::-1]),
    "index2": lambda y: (y[4], y[None], y[3:9], y[:, None]),
    "reshape": lambda X, y: (X.reshape(m, n, 1), y.reshape(-1, 1), X.reshape(-1), y.reshape(1, m) @ X),
    "concat": lambda X, y: (
        np.concatenate([X, y[:, None]], 1),
        np.stack([y, 2 * y]),
        np.stack([y, y], 1),
        np.concatenate([X, X]),
    ),
    "take": lambda X, L, A: (A.T[L], X[np.array([0, 5, 22])], X[:, np.array([1, 0])]),
    "seg": lambda X, L: segment_sum(X, L, k),
    "einsum": lambda X, y, A: (
        np.einsum("ij,jk,ik->k", X, A, X @ A),
        np.einsum("i,ij->ij", y, X),
        np.einsum("ij->j", X),
        np.einsum("ij,kj->ik", X, A.T),
    ),
    "linalg": lambda X, P: (
        np.linalg.solve(P, X[:3].T.T),
        np.linalg.inv(P),
        np.linalg.cholesky(P),
        np.linalg.det(P),
        np.linalg.slogdet(P)[1],
        np.linalg.eigvalsh(X.T @ X),
    ),
    "qr": lambda X: abs(np.linalg.qr(X)[1]),
    "qrQ": lambda X: qr_product(X),
    "svd": lambda X: np.linalg.svd(X, full_matrices=False)[1],
    "svdU": lambda X: svd_product(X),
    "lstsq": lambda X, y: np.linalg.lstsq(X, y)[0],
    "tensordot": lambda X, A: np.tensordot(X, A, 1),
    "w3": lambda W, X: (W.sum(0), W.sum(1), W + 1, W.transpose(1, 0, 2), np.einsum("ijk,ij->ik", W, X), W.mean((0, 2))),
    "matmul3": lambda W: W.transpose(0, 2, 1) @ W,
    "cumsum": lambda X: (np.cumsum(X, 1), np.sort(X, axis=1), np.cumsum(X, 0), np.argsort(X, axis=1)),
    "lse": lambda X: (logsumexp(X, 1), logsumexp(X, 0), logsumexp(X)),
    "dtype": lambda X, L: (
        X.astype("f4") * 2,
        L * 2,
        L / 2,
        (X > 0) & (X < 1),
        X.astype("f4").sum(),
        L.sum(),
        L.mean(),
        (L + 1j * X[:, 0]),
    ),
    "diag": lambda X: (
        np.diag(X.T @ X),
        np.trace(X.T @ X),
        np.diag(X[:, 0][:3]),
        np.triu(X.T @ X),
        np.eye(n) - X.T @ X,
    ),
    "clip": lambda X: (X.clip(-1, 1), np.clip(X, None, 0), np.where(X > 0, X, 0), np.nan_to_num(X), np.round(X, 1)),
    "const": lambda X: (X * 0 + np.arange(n), np.arange(m)[:, None] * X, np.zeros(3), X),
    "roll": lambda X: (np.roll(X, 2, axis=1), np.diff(X, axis=1), np.flip(X, 1), np.roll(X[:, 0], 3)),
    "for": lambda X: fori_loop(0, 5, lambda i, s: (s[0] * 0.5 + i, s[1] + s[0].sum(0)), (X, np.zeros(n))),
    "for0": lambda X: fori_loop(2, 2, lambda i, s: s * 2, X),
    "swap": lambda X: fori_loop(0, 5, lambda i, s: (s[1], s[0]), (X, 2 * X)),
    "while": lambda X: while_loop(lambda s: s[0] < 100.0, lambda s: (s[0] + abs(s[1]).sum(), s[1] * 1.5), (0.0, X)),
    "while2": lambda S, y: while_loop(
        lambda s: np.linalg.norm(s[0]) > 1e-3, lambda s: (0.1 * np.tanh(S @ s[0]) / 9, s[1] + 1), (y, 0)
    ),
    "whileinexact": lambda X: while_loop(lambda G: np.trace(G) > 1e-3, lambda G: G @ G / np.trace(G) / 3, X.T @ X),
    "cond": lambda X: cond(X.sum() > 0, lambda x: x * 2, lambda x: x - 1, X),
    "cond2": lambda X: cond(X.sum() > 1e9, lambda: (X.sum(0), X), lambda: (X.max(0), X * 3)),
    "nested": lambda X: fori_loop(0, 3, lambda i, s: fori_loop(0, 2, lambda j, t: t * 0.9 + X.mean(0), s + i), X),
    "whilefor": lambda X: while_loop(
        lambda s: s < 50, lambda s: fori_loop(0, 3, lambda i, t: t + abs(X).sum() / 10, s), 0.0
    ),
    "power": lambda S, y: fori_loop(0, 10, lambda i, v: unit(S @ v), y),
    "subspace": lambda S, X: abs(fori_loop(0, 30, lambda i, Q: np.linalg.qr(S @ Q)[0], X)),
    "placejoin": lambda X: fori_loop(0, 3, lambda i, s: s + X, np.zeros((m, n))),
    "dict": lambda X: {"a": X + 1, "b": [X.sum()]},
    "invariant": lambda X, A: fori_loop(0, 4, lambda i, s: s + (X.T @ X) @ A + (X * X).sum(1).sum(), np.zeros((n, k))),
    "counter": lambda X: fori_loop(3, 7, lambda i, s: s + i * X[:, 0], np.zeros(m)),
    "traced bounds": lambda X: fori_loop(0, (X[:, 0] > 0).sum(), lambda i, s: s + i, 0),
    "map_rows": lambda X, A: dask_distmm.map_rows(lambda x, a: np.sort(x @ a, axis=1), X, A),
    "map_rows2": lambda X, y: dask_distmm.map_rows(lambda x, v: (x.sum(1) * v, x), X, y),
    "sum_rows": lambda X: dask_distmm.sum_rows(lambda x: np.histogram(x, bins=4, range=(-2, 2))[0], X),
    "random": lambda X: X + draws.normal(draws.key(3), X.shape),
    "random2": lambda X: fori_loop(0, 3, lambda i, s: s + draws.uniform(draws.fold_in(draws.key(1), i), (m,)), X[:, 0]),
    "random3": lambda X: (
        draws.randint(draws.key(0), (4, 2), 0, 9),
        draws.split(draws.key(1), 3)[2],
        draws.uniform(draws.key(2)),
        X.sum(),
    ),
    "empty cond": lambda X, L: (np.equal(L, 1).sum(), (L == 1).astype(float) @ X),
    "stacks": lambda W, X: stacked(W.transpose(0, 2, 1) @ W + np.eye(k), X[:, :k, None]),
    "eig": lambda X: tuple(np.linalg.eig(np.array([[0.0, -1], [2, 0]]) + 0 * X[:2, :2])),
    "stable": lambda X: np.argsort(X[:4].T.round(), axis=0, kind="stable"),
    "like": lambda X: X + np.arange(n, like=X) + np.eye(n, like=X)[0] + np.full(n, 2.0, like=X),
    "limits": lambda X, y: (np.maximum(X, y[:, None]) * 2, np.minimum(X + 1, 0) - 1, np.fmax(X, 0)),
    "views": lambda X, y: fori_loop(0, 3, lambda i, w: w - 0.01 * (X.T @ (X @ w - y)), (X.T @ y) / m),
    "callback": lambda X: fori_loop(
        0, 3, lambda i, w: (w + (X.T @ X)[0], dask_distmm.callback(abs, i))[0], np.zeros(n)
    ),
    "take_along": lambda X, L: np.take_along_axis(X, L[:, None], 1)[:, 0],
}
