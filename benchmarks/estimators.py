"""Estimators of `dask_distmm.sklearn` beside scikit-learn's: ``python -m benchmarks.estimators [--only NAME ...]``.

The same algorithm, start and turns; two workers of one thread, and scikit-learn with two threads on the same data, by
turns. Ours begin with persisted chunks, scikit-learn's with NumPy arrays. Medians of the seconds of a whole `fit`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import sklearn.cluster
import sklearn.decomposition
import sklearn.linear_model
from distributed import wait
from threadpoolctl import threadpool_limits

import dask_distmm.sklearn
from benchmarks.harness import environment
from benchmarks.harness.cluster import started
from benchmarks.revision import revision


class Contest(NamedTuple):
    """The shape of the data, and how each of the two makes its estimator of them."""

    shape: tuple[int, int]
    theirs: Callable[[Any], Any]
    ours: Callable[[Any], Any]
    labels: bool = False


def _kmeans(clusters: int, turns: int = 50) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    options = {"max_iter": turns, "tol": 0}
    return (
        lambda x: sklearn.cluster.KMeans(clusters, init=x[:clusters], n_init=1, algorithm="lloyd", **options),
        lambda x: dask_distmm.sklearn.KMeans(clusters, init=x[:clusters], **options),
    )


CONTESTS = {
    "k-means, 32 centres": Contest((200_000, 32), *_kmeans(32)),
    "k-means, 8 centres": Contest((200_000, 8), *_kmeans(8)),
    "k-means, 64 centres": Contest((50_000, 128), *_kmeans(64)),
    "NMF": Contest(
        (100_000, 200),
        lambda x: sklearn.decomposition.NMF(16, solver="mu", init="random", max_iter=20, tol=0),
        lambda x: dask_distmm.sklearn.NMF(16, init="random", max_iter=20, tol=0),
    ),
    "logistic regression": Contest(
        (300_000, 32),
        lambda x: sklearn.linear_model.LogisticRegression(solver="newton-cholesky"),
        lambda x: dask_distmm.sklearn.LogisticRegression(solver="newton-cholesky"),
        labels=True,
    ),
    "PCA": Contest(
        (100_000, 200),
        lambda x: sklearn.decomposition.PCA(10, svd_solver="covariance_eigh"),
        lambda x: dask_distmm.sklearn.PCA(10),
    ),
    "ridge": Contest(
        (100_000, 200),
        lambda x: sklearn.linear_model.Ridge(1.0, solver="cholesky"),
        lambda x: dask_distmm.sklearn.Ridge(1.0),
        labels=True,
    ),
}


def measure(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each `fit`, after one of each for warming up."""
    rng = np.random.default_rng()
    x = rng.random(contest.shape)
    y = (x @ rng.standard_normal(x.shape[1]) + rng.standard_normal(len(x)) > 0).astype(int)
    host = (x, y) if contest.labels else (x,)
    chunks = [da.from_array(array, chunks=(len(array) // 8, *array.shape[1:])).persist() for array in host]
    wait(chunks)
    seconds: dict[str, list[float]] = {"scikit-learn": [], "dask_distmm": []}
    for _ in range(rounds + 1):
        for name, make, data in (("scikit-learn", contest.theirs, host), ("dask_distmm", contest.ours, chunks)):
            estimator = make(x)
            with threadpool_limits(2), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that so few turns do not converge
                start = time.perf_counter()
                estimator.fit(*data)
                seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(CONTESTS), choices=CONTESTS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="file for all timings")
    options = parser.parse_args()
    software = environment.software("numpy", "scipy", "scikit-learn", "dask", "distributed", "dask_distmm")
    about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
    seconds = {}
    with started(gpu=False):
        for name in options.only:
            seconds[name] = measure(CONTESTS[name], options.rounds)
            theirs, ours = map(statistics.median, seconds[name].values())
            print(f"{name:22} {1e3 * theirs:7.0f} ms  {1e3 * ours:7.0f} ms  ratio {ours / theirs:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**about, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
