"""Functions that answer the same question, beside each other: ``python -m benchmarks.choices [--json FILE]``.

For the page *Which function when*: two workers of one thread, data in memory, medians of some turns. Each function
takes its turn, and then SciPy's, NumPy's or scikit-learn's in one process with two threads. Inputs are fresh in each
turn; what a function may keep between calls (a factor, a plan) is made before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
import scipy.linalg
import scipy.sparse.linalg
from distributed import wait
from threadpoolctl import threadpool_limits

from benchmarks.harness import environment
from benchmarks.harness.cluster import started
from benchmarks.revision import revision
from dask_distmm import Matmul, enabled, linalg, matmul

ORDER, TALL, WIDTH, KEPT, PRODUCTS = 3072, 100_000, 200, 10, 30
ALPHAS = [10.0**power for power in range(-4, 4)]


class Way(NamedTuple):
    """A function here, which returns lazy arrays, and one that does the same in one process."""

    name: str
    here: Callable[[], Any]
    alone: Callable[[], Any] | None


def persisted(x: Any) -> Any:
    """Return arrays when the cluster has them."""
    x = x.persist()
    wait(x)
    return x


def both(x: da.Array) -> tuple[da.Array, np.ndarray[Any, Any]]:
    """Return an array on the cluster, and a copy in this process."""
    x = persisted(x)
    return x, np.array(x.compute())  # what came from the cluster may be read-only


def equations(random: Any) -> Iterator[Way]:
    """Yield ways to solve A x = b, A positive definite with a condition of about 100."""
    g = random.standard_normal((ORDER, ORDER), chunks=ORDER // 4)
    a, a1 = both(linalg.gram(g) / ORDER + 0.04 * da.eye(ORDER, chunks=ORDER // 4))
    b, b1 = both(random.standard_normal(ORDER, chunks=ORDER // 4))
    factor, factor1 = linalg.cho_factor(a), scipy.linalg.cho_factor(a1)
    factor = factor._replace(c=persisted(factor.c))
    yield Way("`solve`", lambda: linalg.solve(a, b), lambda: scipy.linalg.solve(a1, b1, assume_a="gen"))
    yield Way(
        '`solve(assume_a="pos")`',
        lambda: linalg.solve(a, b, assume_a="pos"),
        lambda: scipy.linalg.solve(a1, b1, assume_a="pos"),
    )
    yield Way(
        "`cho_solve`, the factor kept", lambda: linalg.cho_solve(factor, b), lambda: scipy.linalg.cho_solve(factor1, b1)
    )
    yield Way(
        "`cg(rtol=1e-8)`", lambda: linalg.cg(a, b, rtol=1e-8)[0], lambda: scipy.sparse.linalg.cg(a1, b1, rtol=1e-8)
    )
    yield Way("`inv(a) @ b`", lambda: matmul(linalg.inv(a), b), lambda: scipy.linalg.inv(a1) @ b1)


def tall(random: Any) -> tuple[Any, Any]:
    """Return a tall matrix with a condition of about 10."""
    x = random.standard_normal((TALL, WIDTH), chunks=(TALL // 10, WIDTH))
    return both(x * da.from_array(np.geomspace(1, 0.1, WIDTH)))


def least_squares(random: Any) -> Iterator[Way]:
    """Yield ways to fit A x to b, A tall."""
    (x, x1), (y, y1) = tall(random), both(random.standard_normal(TALL, chunks=TALL // 10))
    yield Way("`lstsq`", lambda: linalg.lstsq(x, y)[0], lambda: np.linalg.lstsq(x1, y1))
    yield Way("`lstsq(rcond=1e-12)`", lambda: linalg.lstsq(x, y, rcond=1e-12)[0], None)
    yield Way("`ridge`, one `alpha`", lambda: linalg.ridge(x, y, 1.0), lambda: _ridge(x1, y1, [1.0]))
    yield Way(
        f"`ridge`, {len(ALPHAS)} values of `alpha`", lambda: linalg.ridge(x, y, ALPHAS), lambda: _ridge(x1, y1, ALPHAS)
    )
    yield Way(
        "`lsqr`", lambda: linalg.lsqr(x, y, iter_lim=500)[0], lambda: scipy.sparse.linalg.lsqr(x1, y1, iter_lim=500)
    )
    yield Way("`pinv(x) @ y`", lambda: matmul(linalg.pinv(x), y), lambda: np.linalg.pinv(x1) @ y1)


def _ridge(x: Any, y: Any, alphas: list[float]) -> list[Any]:
    gram, moments = x.T @ x, x.T @ y
    return [scipy.linalg.solve(gram + alpha * np.eye(len(gram)), moments, assume_a="pos") for alpha in alphas]


def components(random: Any) -> Iterator[Way]:
    """Yield ways to get singular values and vectors of a tall matrix."""
    from sklearn.decomposition import PCA
    from sklearn.utils.extmath import randomized_svd

    x, x1 = tall(random)
    yield Way(
        "`svd(full_matrices=False)`",
        lambda: linalg.svd(x, full_matrices=False),
        lambda: scipy.linalg.svd(x1, full_matrices=False),
    )
    yield Way("`svdvals`", lambda: linalg.svdvals(x), lambda: scipy.linalg.svdvals(x1))
    yield Way(
        f"`svd_compressed(k={KEPT})`",
        lambda: linalg.svd_compressed(x, KEPT, n_power_iter=1),
        lambda: randomized_svd(x1, KEPT, n_iter=1),
    )
    yield Way(
        f"`pca(n_components={KEPT})`",
        lambda: linalg.pca(x, KEPT),
        lambda: PCA(KEPT, svd_solver="covariance_eigh").fit(x1),
    )
    yield Way("`eigh(gram(x))`", lambda: linalg.eigh(linalg.gram(x)), lambda: np.linalg.eigh(x1.T @ x1))


def eigenvalues(random: Any) -> Iterator[Way]:
    """Yield ways to get eigenvalues of a Hermitian matrix."""
    g = random.standard_normal((ORDER // 2, ORDER // 2), chunks=ORDER // 4)
    a, a1 = both(linalg.gram(g))
    start, start1 = both(random.standard_normal((ORDER // 2, KEPT), chunks=(ORDER // 4, KEPT)))
    last = ORDER // 2 - KEPT, ORDER // 2 - 1
    yield Way("`eigh`, all", lambda: linalg.eigh(a), lambda: scipy.linalg.eigh(a1))
    yield Way("`eigvalsh`, all", lambda: linalg.eigvalsh(a), lambda: scipy.linalg.eigvalsh(a1))
    yield Way(
        f"`eigh(subset_by_index=...)`, {KEPT}",
        lambda: linalg.eigh(a, subset_by_index=last),
        lambda: scipy.linalg.eigh(a1, subset_by_index=last),
    )
    yield Way(f"`eigsh`, {KEPT}", lambda: linalg.eigsh(a, KEPT), lambda: scipy.sparse.linalg.eigsh(a1, KEPT))
    yield Way(
        f"`lobpcg`, {KEPT}, `tol=1e-2`",
        lambda: linalg.lobpcg(a, start, tol=1e-2, maxiter=200),
        lambda: scipy.sparse.linalg.lobpcg(a1, start1, tol=1e-2, maxiter=200),
    )


def products(random: Any) -> Iterator[Way]:
    """Yield ways to multiply one matrix many times."""
    a, a1 = both(random.standard_normal((ORDER, ORDER), chunks=ORDER // 4))
    sides = [both(random.standard_normal((ORDER, 8), chunks=(ORDER // 4, 8))) for _ in range(PRODUCTS)]
    stacked = da.concatenate([x for x, _ in sides], axis=1).rechunk((ORDER // 4, -1))
    prepared = Matmul(a, sides[0][0])
    prepared.plan()

    def execute() -> Any:
        found = []
        for x, _ in sides:
            prepared.reset_operands(b=x)
            found.append(prepared.execute())
        return found

    def routed() -> Any:
        with enabled():
            return [a @ x for x, _ in sides]

    alone = lambda: [a1 @ x for _, x in sides]  # noqa: E731
    yield Way("`a @ x` under `enable()`, computed together", routed, alone)
    yield Way("`matmul(a, x)`, computed together", lambda: [matmul(a, x) for x, _ in sides], alone)
    yield Way("`Matmul`, one after the other", execute, alone)
    yield Way(
        "one product of all `x` side by side", lambda: matmul(a, stacked), lambda: a1 @ np.hstack([x for _, x in sides])
    )


QUESTIONS: dict[str, Callable[[Any], Iterator[Way]]] = {
    "equations": equations,
    "least-squares": least_squares,
    "components": components,
    "eigenvalues": eigenvalues,
    "products": products,
}


def seconds(work: Callable[[], Any]) -> float:
    """Return how long something takes, until the cluster has it if it is lazy."""
    began = time.perf_counter()
    found = work()
    lazy = (
        dask.persist(*found)
        if isinstance(found, tuple | list)
        else (found.persist() if dask.is_dask_collection(found) else ())
    )
    wait(lazy)
    return time.perf_counter() - began


def measure(question: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each way to answer a question, by turns on fresh inputs, after one for warming up."""
    random = da.random.default_rng()
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for way in QUESTIONS[question](random):
            taken = {"dask_distmm": seconds(way.here)}
            if way.alone is not None:
                with threadpool_limits(2, "blas"):
                    taken["one process"] = seconds(way.alone)
            for name, one in taken.items() if turn else ():
                times.setdefault(way.name, {}).setdefault(name, []).append(one)
    return times


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", nargs="+", default=list(QUESTIONS), choices=QUESTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all timings")
    options = parser.parse_args()
    found = {}
    with started(gpu=False):
        for question in options.questions:
            found[question] = measure(question, options.rounds)
            for way, taken in found[question].items():
                medians = "  ".join(f"{name} {1e3 * sorted(one)[len(one) // 2]:8.1f} ms" for name, one in taken.items())
                print(f"{question:14} {way:46} {medians}", flush=True)
    if options.json:
        software = environment.software("numpy", "scipy", "scikit-learn", "dask", "distributed", "dask_distmm")
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        with open(options.json, "w") as file:
            json.dump({**about, "rounds": options.rounds, "seconds": found}, file, indent=1)


if __name__ == "__main__":
    main()
