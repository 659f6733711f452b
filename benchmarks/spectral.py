"""Eigenvalues and singular values beside SciPy, and randomized SVD beside stock Dask and scikit-learn: medians.

    python -m benchmarks.spectral [--size 2048 4096] [--kinds eigh svd ...] [--method auto] [--repeat 3] [--out FILE]
    python -m benchmarks.spectral --kinds compressed --rows 1000000 --columns 1000
    python -m benchmarks.spectral --gpu --size 8192 16384 --repeat 2 --peers ours one_gpu cusolvermp
    python -m benchmarks.spectral --gpu --size 512 8192 --kinds eigh eigvalsh --method columns --check --peers ours

CPUs: two worker processes of one thread; SciPy and scikit-learn have two threads in a process of their own. GPUs: one
worker a GPU (``ours``); cuSOLVER has one GPU (``one_gpu``), and is called through CuPy; cuSOLVERMp has all of them, one
process each, and its best grid and block size (`benchmarks.gpu_peers`); of these two the best time counts. ``wall`` is
the time from ``persist()`` to all results in memory; matrices are in memory before. All matrices are random, those of
eigenvalues are Hermitian. Of eigenvalues that workers share (``--method columns``) the seconds of each stage are
printed, those of the slowest worker. With ``--check`` residuals of eigenvalues are printed in units of rounding; one
above LAPACK's gate is an error in the end.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_distmm
from benchmarks import gpu_peers
from benchmarks.gpu.devices import find_gpus
from benchmarks.harness import environment
from benchmarks.linalg import cluster, finished, matrix, runs, taken
from benchmarks.revision import revision
from dask_distmm import linalg
from tests.residuals import GATE

KINDS = ("eigh", "eigvalsh", "svd", "svdvals", "polar")
# Singular values that the randomized SVD is asked for.
LEADING = 10
# The steps of eigenvalues that workers share, and what is around them.
STAGES = ("gather", "reduce", "diagonalize", "reflect", "deliver")
# Residuals that are compared with LAPACK's gate.
GATED = ("trace", "squares", "residual", "orthogonality")

OURS: dict[str, Callable[..., Any]] = {
    "eigh": linalg.eigh,
    "eigvalsh": linalg.eigvalsh,
    "svd": lambda a, **how: linalg.svd(a, full_matrices=False, **how),
    "svdvals": linalg.svdvals,
    "polar": linalg.polar,
}


def by_scipy(n: int, kind: str, dtype: str, repeat: int) -> float:
    """Return the median time of LAPACK with two threads in this process."""
    import scipy.linalg
    import threadpoolctl

    calls: dict[str, Callable[[Any], Any]] = {
        "eigh": np.linalg.eigh,
        "eigvalsh": np.linalg.eigvalsh,
        "svd": scipy.linalg.svd,
        "svdvals": lambda a: np.linalg.svd(a, compute_uv=False),
        "polar": scipy.linalg.polar,
    }
    a = np.random.default_rng(0).standard_normal((n, n)).astype(dtype)

    def timed() -> float:
        started = time.perf_counter()
        calls[kind](a)
        return time.perf_counter() - started

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        return statistics.median([timed() for _ in range(repeat + 1)][1:])


def by_sklearn(rows: int, columns: int, repeat: int) -> float:
    """Return the median time of scikit-learn's randomized SVD with two threads in this process."""
    import threadpoolctl
    from sklearn.utils.extmath import randomized_svd

    a = np.random.default_rng(0).standard_normal((rows, columns))
    found = []
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        for turn in range(repeat):
            started = time.perf_counter()
            randomized_svd(a, LEADING, n_iter=0, power_iteration_normalizer="QR", random_state=turn)
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def apart(call: Callable[..., float], *arguments: Any) -> float:
    """Return what a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def ours(client: Client, n: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the median of one decomposition of square matrices, of its stages, and its residuals."""
    count, walls = len(client.scheduler_info(n_workers=-1)["workers"]), []
    how = {"engine": options.engine} if options.engine is not None else {}
    stages: list[dict[str, float]] = []
    found: dict[str, Any] = {"method": options.method}
    for turn in range(options.repeat + 1):
        a = matrix((n, n), -(-n // count), options.dtype, "cupy" if options.gpu else "numpy", turn)
        if kind.startswith("eig"):
            a = (a + a.T).persist()
            finished(a)
        before, started = runs(client), time.perf_counter()
        made = dask.persist(OURS[kind](a, method=options.method, **how))[0]
        finished(*(made if isinstance(made, tuple) else (made,)))
        seconds = time.perf_counter() - started
        if turn:
            walls.append(seconds)
            stages.append(stage_seconds(client, before))
        elif options.check and kind.startswith("eig"):
            found |= residuals(a, *(made if isinstance(made, tuple) else (made, None)))
        del a, made
    found |= {name: statistics.median(one[name] for one in stages) for name in stages[0]}
    return found | {"wall": statistics.median(walls)}


def stage_seconds(client: Client, before: int) -> dict[str, float]:
    """Return the seconds of the stages of the newest run, where eigenvalues were shared, of the slowest worker."""
    end = time.monotonic() + 10
    while runs(client) <= before and time.monotonic() < end:
        time.sleep(0.01)
    event = [event for _, event in client.get_events("distmm") if event["action"] == "done"][-1]
    ranks = [rank["timings"] for rank in event["ranks"].values()]
    if not any("reduce" in timings for timings in ranks):
        return {}
    return {name: max(timings.get(name, 0.0) for timings in ranks) for name in STAGES}


def residuals(a: da.Array, w: da.Array, v: da.Array | None) -> dict[str, float]:
    """Return residuals of eigenvalues, and of vectors, divided by n and rounding, in the 1-norm; NaN stays NaN."""
    n, unit = len(a), len(a) * float(np.finfo(a.dtype).eps)
    size = abs(a).sum(axis=0).max()
    # Sums of values and of their squares are the trace and the square of Frobenius' norm.
    wide = w.astype(np.float64)
    diagonal = a.map_blocks(_on_diagonal, dtype=np.float64, meta=a._meta.astype(np.float64)).sum()
    squares = (abs(a).astype(np.float64) ** 2).sum()
    found = {"trace": abs(wide.sum() - diagonal) / (size * unit), "squares": abs((wide**2).sum() - squares) / squares}
    found["squares"] = found["squares"] / unit
    if v is not None:
        error = dask_distmm.matmul(a, v) - v * w
        found["residual"] = abs(error).sum(axis=0).max() / (size * unit)
        gram = dask_distmm.matmul(v, v, op_a="C")
        found["orthogonality"] = abs(gram.map_blocks(_minus_identity, dtype=a.dtype)).sum(axis=0).max() / unit
    values = [float(x) for x in dask.compute(*found.values())]
    print(f"  {n}:", *(f"{name} {value:.3g}" for name, value in zip(found, values, strict=True)), flush=True)
    return dict(zip(found, values, strict=True))


def _on_diagonal(block: Any, block_info: Any = None) -> Any:
    """Return a chunk with zeros beside the diagonal of the matrix."""
    rows, cols = (np.arange(*place, like=block) for place in block_info[0]["array-location"])
    return (block.real * (rows[:, None] == cols)).astype(np.float64)


def _minus_identity(block: Any, block_info: Any = None) -> Any:
    rows, cols = (np.arange(*place, like=block) for place in block_info[0]["array-location"])
    return block - (rows[:, None] == cols)


def compressed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of the randomized SVD of a tall matrix, in chunks of rows."""
    calls = {"wall": linalg.svd_compressed, "dask": da.linalg.svd_compressed}
    found: dict[str, Any] = {"rows": options.rows, "columns": options.columns}
    with cluster(gpu=False):
        shape, chunks = (options.rows, options.columns), (-(-options.rows // 16), options.columns)
        a = da.random.default_rng(0).standard_normal(shape, chunks=chunks).persist()
        wait(a)
        for name, call in calls.items():
            times = [taken(functools.partial(call, k=LEADING, seed=turn), a) for turn in range(options.repeat + 1)]
            found[name] = statistics.median(times[1:])
        del a
    found["sklearn"] = apart(by_sklearn, options.rows, options.columns, options.repeat)
    return found


def main() -> None:
    """Measure, and print one line for each decomposition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[2048])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "compressed"], default=[*KINDS, "compressed"])
    parser.add_argument("--method", choices=["auto", "local", "columns"], default="auto")
    parser.add_argument("--rows", type=int, default=300_000, help="of the matrix of compressed")
    parser.add_argument("--columns", type=int, default=1000, help="of the matrix of compressed")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="without compressed")
    parser.add_argument("--check", action="store_true", help="print residuals of eigenvalues")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", help="of ours; as chosen if not given")
    gpu_peers.add_options(parser)
    options = parser.parse_args()
    own = ("numpy", "scipy", "scikit-learn", "dask", "distributed", "dask_distmm")
    software = environment.software(*own, *gpu_peers.DISTRIBUTIONS)
    about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
    with_compressed = "compressed" in options.kinds
    options.kinds = [kind for kind in options.kinds if kind != "compressed"]
    if options.gpu:
        names, gpu = find_gpus()
        results = gpu_peers.Results(options, about | {"gpus": len(names), "gpu": gpu}, count=len(names))
        gpu_peers.measure(options, results, lambda: cluster(True), functools.partial(ours, options=options))
        check(results)
        return
    results = gpu_peers.Results(options, about)
    if options.kinds:
        with cluster(False) as client:
            for n in options.size:
                for kind in options.kinds:
                    alone = {"alone": apart(by_scipy, n, kind, options.dtype, options.repeat)}
                    results.add(kind, n, "ours", ours(client, n, kind, options) | alone)
    if with_compressed:
        results.add("compressed", options.rows, "ours", compressed(options))
    check(results)


def check(results: gpu_peers.Results) -> None:
    """End with an error if a residual is above LAPACK's gate. A NaN is not below it."""
    wrong = [(one, name) for one in results.known for name in GATED if name in one and not one[name] <= GATE]
    if wrong:
        one, name = wrong[0]
        raise SystemExit(f"{one['kind']} of order {one['size']}: {name} is {one[name]:.3g}, expected at most {GATE:g}")


if __name__ == "__main__":
    main()
