"""Eigenvalues and singular values beside SciPy, and randomized SVD beside stock Dask and scikit-learn: medians.

    python -m benchmarks.spectral [--size 2048 4096] [--kinds eigh svd ...] [--method auto] [--repeat 3] [--out FILE]
    python -m benchmarks.spectral --kinds compressed --rows 1000000 --columns 1000
    python -m benchmarks.spectral --gpu --size 8192 16384 --repeat 2 --peers ours one_gpu cusolvermp

CPUs: two worker processes of one thread; SciPy and scikit-learn have two threads in a process of their own. GPUs: one
worker a GPU (``ours``); cuSOLVER has one GPU (``one_gpu``), and is called through CuPy; cuSOLVERMp has all of them, one
process each, and its best grid and block size (`benchmarks.gpu_peers`); of these two the best time counts. ``wall`` is
the time from ``persist()`` to all results in memory; matrices are in memory before. All matrices are random.
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

import dask.array as da
import numpy as np
from distributed import Client, wait

from benchmarks import gpu_peers
from benchmarks.gpu.devices import find_gpus
from benchmarks.linalg import cluster, matrix, taken
from benchmarks.revision import revision
from dask_distmm import linalg
from dask_distmm.tools.bench import environment

KINDS = ("eigh", "eigvalsh", "svd", "svdvals", "polar")
# Singular values that the randomized SVD is asked for.
LEADING = 10

OURS: dict[str, Callable[..., Any]] = {
    "eigh": linalg.eigh,
    "eigvalsh": linalg.eigvalsh,
    "svd": linalg.svd,
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
    """Return the median of one decomposition of square matrices."""
    count, walls = len(client.scheduler_info(n_workers=-1)["workers"]), []
    how = {"engine": options.engine} if options.engine is not None else {}
    for turn in range(options.repeat + 1):
        a = matrix((n, n), -(-n // count), options.dtype, "cupy" if options.gpu else "numpy", turn)
        seconds = taken(functools.partial(OURS[kind], method=options.method, **how), a)
        walls += [seconds] * bool(turn)
        del a
    return {"method": options.method, "wall": statistics.median(walls)}


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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", help="of ours; as chosen if not given")
    gpu_peers.add_options(parser)
    options = parser.parse_args()
    own = ("numpy", "scipy", "scikit-learn", "dask", "distributed", "dask_distmm")
    software = environment.software(*own, *gpu_peers.DISTRIBUTIONS)
    about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
    with_compressed = "compressed" in options.kinds
    options.kinds = [
        kind
        for kind in options.kinds
        if kind != "compressed" and (kind != "eigh" or options.method != "columns" or options.engine)
    ]
    if options.gpu:
        names, gpu = find_gpus()
        results = gpu_peers.Results(options, about | {"gpus": len(names), "gpu": gpu}, count=len(names))
        gpu_peers.measure(options, results, lambda: cluster(True), functools.partial(ours, options=options))
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


if __name__ == "__main__":
    main()
