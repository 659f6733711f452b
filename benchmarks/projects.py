"""Ten small projects, each by three people: ``python -m benchmarks.projects [--json FILE]``.

One has this package, one stock Dask, and one NumPy, SciPy or scikit-learn in one process with two threads. Two workers
of one thread; data in memory, fresh in each round; each does the whole project, until its results are at the client, by
turns. Medians of some rounds after one for warming up. `docs/projects.md` has the programs and the times;
`tests/test_projects.py` compares what the three find.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from distributed import wait
from threadpoolctl import threadpool_limits

import dask_distmm
from benchmarks.harness import environment
from benchmarks.harness.cluster import started
from benchmarks.revision import revision
from dask_distmm import algorithms, linalg

Work = Callable[[], Any]


class Project(NamedTuple):
    """What three people do; None if stock Dask lacks what it takes."""

    ours: Work
    stock: Work | None
    alone: Work


def both(x: da.Array) -> tuple[da.Array, np.ndarray[Any, Any]]:
    """Return an array on the cluster, and a copy in this process."""
    x = x.persist()
    wait(x)
    return x, np.array(x.compute())


def pca(rng: Any, scale: float) -> Project:
    """Find 10 components of 200,000 x 200."""
    m, n = int(200_000 * scale), int(200 * scale**0.5)
    x, x1 = both(rng.standard_normal((m, n), chunks=(m // 8, n)) * np.geomspace(1, 0.1, n) + 3)

    def ours() -> Any:
        found = linalg.pca(x, 10)
        return dask.compute(found.variances, found.explained_variance_ratio)

    def stock() -> Any:
        _, s, _ = da.linalg.svd(x - x.mean(0))
        (s,) = dask.compute(s)
        return s[:10] ** 2 / (m - 1), s[:10] ** 2 / (s**2).sum()

    def alone() -> Any:
        from sklearn.decomposition import PCA

        found = PCA(10, svd_solver="covariance_eigh").fit(x1)
        return found.explained_variance_, found.explained_variance_ratio_

    return Project(ours, stock, alone)


def ridge(rng: Any, scale: float) -> Project:
    """Choose among 10 penalties by 5 folds: 100,000 x 50."""
    m, n, alphas = int(100_000 * scale), int(50 * scale**0.5), np.geomspace(0.1, 1e5, 10)
    x, x1 = both(rng.standard_normal((m, n), chunks=(m // 10, n)))
    y, y1 = both(x @ rng.standard_normal(n, chunks=n) + 20 * rng.standard_normal(m, chunks=m // 10))

    def ours() -> Any:
        from dask_distmm.sklearn import RidgeCV

        found = RidgeCV(alphas, cv=5).fit(x, y)
        return found.alpha_, found.coef_

    def stock() -> Any:
        ones = da.concatenate([da.ones((m, 1), chunks=(m // 10, 1)), x, y[:, None]], axis=1).rechunk((m // 10, n + 2))
        folds = [ones[i * m // 5 : (i + 1) * m // 5] for i in range(5)]
        sums = np.array(dask.compute([f.T @ f for f in folds])[0])

        def solve(s: Any, alpha: float) -> Any:
            mean = s[0, 1:] / s[0, 0]
            s = s[1:, 1:] - s[0, 0] * np.outer(mean, mean)
            w = scipy.linalg.solve(s[:-1, :-1] + alpha * np.eye(n), s[:-1, -1], assume_a="pos")
            return w, mean[-1] - mean[:-1] @ w

        def score(s: Any, w: Any, c: Any) -> float:
            z = np.concatenate([[-c], -w, [1]])
            return float(1 - z @ s @ z / (s[-1, -1] - s[0, -1] ** 2 / s[0, 0]))

        total = sums.sum(0)
        scores = [np.mean([score(s, *solve(total - s, alpha)) for s in sums]) for alpha in alphas]
        best = alphas[int(np.argmax(scores))]
        return best, solve(total, best)[0]

    def alone() -> Any:
        from sklearn.linear_model import RidgeCV

        found = RidgeCV(alphas, cv=5).fit(x1, y1)
        return found.alpha_, found.coef_

    return Project(ours, stock, alone)


def gaussian_process(rng: Any, scale: float) -> Project:
    """Fit a Gaussian process to 3,000 points: weights, and the logarithm of the likelihood."""
    n = int(3_000 * scale)
    x = np.sort(np.random.default_rng().uniform(0, 10, n))
    k, k1 = both(da.from_array(np.exp(-((x[:, None] - x) ** 2)) + 0.1 * np.eye(n), chunks=n // 3))
    y, y1 = both(da.from_array(np.sin(x), chunks=n // 3))

    def ours() -> Any:
        factor = linalg.cho_factor(k)
        weights = linalg.cho_solve(factor, y)
        return dask.compute(weights, -0.5 * (y @ weights + factor.logdet()))

    def stock() -> Any:
        lower = da.linalg.cholesky(k, lower=True)
        half = da.linalg.solve_triangular(lower, y, lower=True)
        weights = da.linalg.solve_triangular(lower.T, half)
        return dask.compute(weights, -0.5 * (half @ half + 2 * da.log(da.diag(lower)).sum()))

    def alone() -> Any:
        factor = scipy.linalg.cho_factor(k1)
        weights = scipy.linalg.cho_solve(factor, y1)
        return weights, -0.5 * (y1 @ weights + 2 * np.log(np.diag(factor[0])).sum())

    return Project(ours, stock, alone)


def nmf(rng: Any, scale: float) -> Project:
    """Factorize 40,000 x 200 with 10 parts, in 50 turns."""
    m, n, k, turns = int(40_000 * scale), int(200 * scale**0.5), 10, int(50 * scale**0.5)
    x, x1 = both(rng.random((m, k), chunks=(m // 4, k)) @ rng.random((k, n), chunks=(k, n)))
    w, w1 = both(rng.random((m, k), chunks=(m // 4, k)))
    h1 = np.random.default_rng().random((k, n))

    def step(x: Any, w: Any, h: Any) -> Any:
        w = w * (x @ h.T) / (w @ (h @ h.T))
        return w, h * (w.T @ x) / (w.T @ w @ h)

    def ours() -> Any:
        found = algorithms.nmf(x, k, init=(w, h1), max_iter=turns, tol=0)
        return dask.compute(found.H)

    def stock() -> Any:
        a, b = w, da.from_array(h1, chunks=-1)
        for _ in range(turns):
            a, b = dask.persist(*step(x, a, b))
        return (b.compute(),)

    def alone() -> Any:
        a, b = w1, h1
        for _ in range(turns):
            a, b = step(x1, a, b)
        return (b,)

    return Project(ours, stock, alone)


def kmeans(rng: Any, scale: float) -> Project:
    """Find 10 clusters of 200,000 x 20, in 20 turns."""
    m, n, k, turns = int(200_000 * scale), 20, 10, int(20 * scale**0.5)
    x, x1 = both(rng.standard_normal((m, n), chunks=(m // 8, n)))
    start = x1[:k]

    def ours() -> Any:
        found = algorithms.kmeans(x, k, init=start, max_iter=turns, tol=0)
        return dask.compute(found.centers, found.inertia)

    def stock() -> Any:
        c = start
        for _ in range(turns):
            labels = ((c * c).sum(1) - 2 * (x @ c.T)).argmin(1)
            members = (labels[:, None] == np.arange(k)).astype(float)
            sums, sizes = dask.compute(members.T @ x, members.sum(0))
            c = sums / sizes[:, None]
        squares = ((c * c).sum(1) - 2 * (x @ c.T)).min(1).sum() + (x * x).sum()
        return c, squares.compute()

    def alone() -> Any:
        from sklearn.cluster import KMeans

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = KMeans(k, init=start, n_init=1, max_iter=turns, tol=0, algorithm="lloyd").fit(x1)
        return found.cluster_centers_, found.inertia_

    return Project(ours, stock, alone)


@dask_distmm.jit(static_argnames="turns")
def _powers(a: Any, x: Any, turns: int) -> Any:
    def turn(i: Any, x: Any) -> Any:
        y = a @ x
        return y / np.sqrt((y * y).sum())

    return dask_distmm.fori_loop(0, turns, turn, x)


def powers(rng: Any, scale: float) -> Project:
    """Multiply 4,000 x 4,000 by a vector, 30 times."""
    n, turns = int(4_000 * scale), int(30 * scale**0.5)
    a, a1 = both(rng.random((n, n), chunks=(n // 4, n // 2)))
    x1 = np.ones(n)

    def loop(a: Any, x: Any) -> Any:
        for _ in range(turns):
            y = a @ x
            x = y / np.sqrt((y * y).sum())
        return x

    return Project(
        lambda: dask.compute(_powers(a, da.ones(n, chunks=n // 4), turns)),
        lambda: dask.compute(loop(a, da.ones(n, chunks=n // 4))),
        lambda: (loop(a1, x1),),
    )


@dask_distmm.jit(static_argnames=("steps", "rate"))
def _trained(x: Any, y: Any, w: Any, v: Any, steps: int, rate: float) -> Any:
    return dask_distmm.fori_loop(0, steps, lambda i, state: _step(x, y, rate, *state), (w, v))


def _step(x: Any, y: Any, rate: float, w: Any, v: Any) -> Any:
    """Return the weights of two layers after a step down the gradient."""
    hidden = np.maximum(x @ w, 0)
    error = (hidden @ v - y) / len(x)
    back = (error @ v.T) * (hidden > 0)
    return w - rate * (x.T @ back), v - rate * (hidden.T @ error)


def network(rng: Any, scale: float) -> Project:
    """Train a network of two layers, 64 x 128 x 1, by 50 steps on 50,000 rows."""
    m, steps, rate = int(50_000 * scale), int(50 * scale**0.5), 0.05
    x, x1 = both(rng.standard_normal((m, 64), chunks=(m // 4, 64)))
    y, y1 = both(np.sin(x[:, :1]))
    host = np.random.default_rng()
    weights = host.standard_normal((64, 128)) / 8, host.standard_normal((128, 1)) / 12

    def stock() -> Any:
        state: Any = tuple(da.from_array(one, chunks=-1) for one in weights)
        for _ in range(steps):
            state = dask.persist(*_step(x, y, rate, *state))
        return dask.compute(*state)

    def alone() -> Any:
        state: Any = weights
        for _ in range(steps):
            state = _step(x1, y1, rate, *state)
        return state

    return Project(lambda: dask.compute(*_trained(x, y, *weights, steps, rate)), stock, alone)


def fields(rng: Any, scale: float) -> Project:
    """Weigh, correlate and fit fields of 2,000 times: 600 places and 60 others."""
    import xarray as xr

    shape = int(2_000 * scale), int(600 * scale), int(60 * scale)
    x, x1 = both(rng.standard_normal(shape[:2], chunks=(shape[0] // 4, shape[1] // 2)))
    y, y1 = both(rng.standard_normal(shape[::2], chunks=(shape[0] // 4, shape[2])))

    def work(x: Any, y: Any) -> Any:
        time = {"time": np.arange(float(shape[0]))}
        a, b = xr.DataArray(x, time, ("time", "place")), xr.DataArray(y, time, ("time", "index"))
        fit = a.polyfit("time", 2, skipna=False).polyfit_coefficients
        return dask.compute(xr.dot(a, b, dim="time").data, xr.cov(a, b, dim="time").data, fit.data)

    def ours() -> Any:
        with dask_distmm.enabled():
            return work(x, y)

    return Project(ours, lambda: work(x, y), lambda: work(x1, y1))


def solves(rng: Any, scale: float) -> Project:
    """Solve banded equations, 500,000 with 3 diagonals and 8 right-hand sides, and sparse ones, a grid of 300 x 300."""
    n, side = int(500_000 * scale), int(300 * scale)
    bands = np.stack([np.full(n, 2.01), np.full(n, -1.0)])
    b, b1 = both(rng.standard_normal((n, 8), chunks=(n // 4, 8)))
    line = scipy.sparse.diags_array([-1.0, 2.01, -1.0], offsets=(-1, 0, 1), shape=(side, side))
    one = scipy.sparse.eye_array(side)
    grid: Any = scipy.sparse.csr_array(scipy.sparse.kron(line, one) + scipy.sparse.kron(one, line))
    g, g1 = both(rng.standard_normal(side * side, chunks=side * side // 4))

    def ours() -> Any:
        x = linalg.solveh_banded(bands, b, lower=True)
        z, _ = linalg.cg(grid, g, rtol=1e-8)
        return dask.compute(x, z)

    def alone() -> Any:
        x = scipy.linalg.solveh_banded(bands, b1, lower=True)
        return x, scipy.sparse.linalg.cg(grid, g1, rtol=1e-8)[0]

    return Project(ours, None, alone)


def eigenvalues(rng: Any, scale: float) -> Project:
    """Find all eigenvalues of a symmetric matrix of 1,500."""
    n = int(1_500 * scale)
    x = rng.standard_normal((n, n), chunks=n // 3)
    a, a1 = both(x + x.T)
    return Project(lambda: dask.compute(linalg.eigvalsh(a)), None, lambda: (scipy.linalg.eigvalsh(a1),))


PROJECTS: dict[str, Callable[[Any, float], Project]] = {
    project.__name__: project
    for project in (pca, ridge, gaussian_process, nmf, kmeans, powers, network, fields, solves, eigenvalues)
}


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each person in each round."""
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        project = PROJECTS[name](da.random.default_rng(), 1.0)
        people = {"stock Dask": project.stock, "dask_distmm": project.ours, "one process": project.alone}
        for person, work in people.items():
            if work is None:
                continue
            with threadpool_limits(2, "blas"):
                began = time.perf_counter()
                work()
                took = time.perf_counter() - began
            if number:
                times.setdefault(person, []).append(took)
    return times


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--projects", nargs="+", default=list(PROJECTS), choices=PROJECTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all timings")
    options = parser.parse_args()
    software = environment.software("numpy", "scipy", "scikit-learn", "xarray", "dask", "distributed", "dask_distmm")
    about = {"hardware": environment.hardware(), "software": software, "revision": revision(), "rounds": options.rounds}
    found = {}
    with started(gpu=False):
        for name in options.projects:
            found[name] = measure(name, options.rounds)
            medians = "  ".join(f"{one} {1e3 * sorted(x)[len(x) // 2]:9.1f} ms" for one, x in found[name].items())
            print(f"{name:18} {medians}", flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps({**about, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
