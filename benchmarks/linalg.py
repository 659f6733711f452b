"""Factorizations beside SciPy, or cuSOLVER and cuSOLVERMp, and beside stock Dask.

    python -m benchmarks.linalg [--size 4096 8192] [--kinds cholesky lu solve qr tall gram] [--repeat 3] [--out FILE]
    python -m benchmarks.linalg --gpu --size 16384 32768 --repeat 2 --peers ours one_gpu cusolvermp
    python -m benchmarks.linalg --gpu --size 32768 --peers ours --kinds refined refined_pos --factor-dtype tf32

CPUs: two worker processes of one thread; SciPy has two threads in a process of its own; stock Dask has the better one
of 4 x 4 and 8 x 8 chunks (qr: one column of chunks, of a matrix of which all columns are one chunk). GPUs: one worker a
GPU (``ours``); cuSOLVER has one GPU (``one_gpu``), and is called through CuPy, as gemm is; cuSOLVERMp has all of them,
one process each, and its best grid and block size (`benchmarks.gpu_peers`). Figures of ours, SciPy and Dask are
medians, those of peers on GPUs the best. ``tall`` is the QR factorization of a matrix of 16 n rows and n / 16 columns,
Q and R. ``gram`` is X^H X, beside the product of two matrices (``product``). ``run`` is the time of the run itself,
``wall`` that from ``persist()`` to all results in memory. Matrices are random; that of cholesky has a large diagonal.
``refined`` and ``refined_pos`` solve for 16 right-hand sides with factors of fewer bits (``--factor-dtype``), by turns
with factors in the type of the matrix (``plain``): a random matrix, whose condition is about its order, and a positive
definite one of the condition that is asked for. They have no peers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, futures_of, wait

import dask_distmm
from benchmarks import gpu_peers
from benchmarks.gpu.devices import find_gpus
from benchmarks.gpu.one_gpu import shape_of
from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm import linalg
from dask_distmm.arrays.linalg.factorize import plus_identity

REFINED = ("refined", "refined_pos")
KINDS = ("cholesky", "lu", "solve", "qr", "tall", "gram", *REFINED)


def flops(kind: str, n: int) -> float:
    """Return the operations for n x n elements; of qr those of R alone, of tall those of Householder's Q and R."""
    shares = {"cholesky": 1 / 3, "lu": 2 / 3, "solve": 2 / 3, "qr": 4 / 3, "tall": 1 / 4, "gram": 1}
    return (shares | {"refined": 2 / 3, "refined_pos": 1 / 3})[kind] * n**3


# Seconds that the scheduler may take to note a run that has ended.
_NOTING = 10.0


def block(large: int, dtype: str, kind: str, block_info: Any = None, seed: int = 0) -> Any:
    """Return a chunk of a random matrix with a number added to its diagonal."""
    where, shape = block_info[None]["array-location"], block_info[None]["chunk-shape"]
    xp = module(kind)
    found = xp.random.default_rng([seed, where[0][0], where[1][0]]).standard_normal(shape, dtype=dtype)
    first, last = max(where[0][0], where[1][0]), min(where[0][1], where[1][1])
    if large and first < last:
        both = xp.arange(first, last)
        found[both - where[0][0], both - where[1][0]] += large
    return found


def module(kind: str) -> Any:
    """Return NumPy or CuPy, by name."""
    if kind == "numpy":
        return np
    import cupy

    return cupy


def matrix(
    shape: tuple[int, int], chunks: Any, dtype: str, kind: str, seed: int, *, definite: bool = False
) -> da.Array:
    """Return a persisted random matrix; one that is to be positive definite has a large diagonal."""
    meta = module(kind).empty((0, 0), dtype)
    sizes, large = da.core.normalize_chunks(chunks, shape), 2 * shape[0] if definite else 0
    made = da.map_blocks(block, large, dtype, kind, chunks=sizes, dtype=dtype, meta=meta, seed=seed).persist()
    finished(made)
    return made


def finished(*made: Any) -> None:
    """Wait for persisted collections, and raise what one of their tasks has raised."""
    wait(made)
    for future in futures_of(made):
        if future.status == "error":
            raise future.exception()


OURS: dict[str, Callable[..., Any]] = {
    "cholesky": lambda a, **how: linalg.cholesky(a, lower=True, **how),
    "lu": lambda a, **how: linalg.lu(a, p_indices=True, **how)[1:],
    "solve": lambda a, **how: linalg.solve(a, a[:, 0], **how),
    "qr": lambda a, **how: linalg.qr(a, mode="r", **how),
    "tall": linalg.qr,
    "gram": linalg.gram,
}
DASKS: dict[str, Callable[[da.Array], Any]] = {
    "cholesky": lambda a: da.linalg.cholesky(a, lower=True),
    "lu": lambda a: da.linalg.lu(a)[1:],
    "solve": lambda a: da.linalg.solve(a, a[:, 0]),
    "qr": lambda a: da.linalg.qr(a)[1],
    "tall": da.linalg.qr,
    "gram": lambda a: a.T @ a,
}


def run_seconds(client: Client, before: int) -> float:
    """Return how long the newest run took, once the scheduler has noted it."""
    end = time.monotonic() + _NOTING
    while time.monotonic() < end:
        found = [event for _, event in client.get_events("distmm") if event["action"] == "done"]
        if len(found) > before:
            return float(found[-1]["seconds"])
        time.sleep(0.01)
    raise TimeoutError("the scheduler has noted no run: Dask's own functions have computed this")


def runs(client: Client) -> int:
    """Return how many runs the scheduler has noted."""
    return sum(event["action"] == "done" for _, event in client.get_events("distmm"))


def taken(call: Callable[[da.Array], Any], a: da.Array, idle: Callable[[], Any] | None = None) -> float:
    """Return the seconds from the call to all results in memory; `idle` waits until devices have computed them, too."""
    started = time.perf_counter()
    made = dask.persist(call(a))
    finished(*made)
    if idle:
        idle()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait until this process's GPU has done all that was launched."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def scipy_seconds(n: int, dtype: str, kind: str, repeat: int) -> float:
    """Return SciPy's median time with two threads, in this process."""
    import scipy.linalg
    import threadpoolctl

    a = np.random.default_rng().standard_normal(shape_of(kind, n)).astype(dtype)
    if kind == "cholesky":
        a += 2 * n * np.eye(n, dtype=dtype)
    calls: dict[str, Callable[[Any], Any]] = {
        "cholesky": lambda a: scipy.linalg.cholesky(a, lower=True),
        "lu": lambda a: scipy.linalg.lu(a, p_indices=True),
        "solve": lambda a: scipy.linalg.solve(a, a[:, 0]),
        "qr": lambda a: scipy.linalg.qr(a, mode="r"),
        "tall": lambda a: scipy.linalg.qr(a, mode="economic"),
        "gram": lambda a: a.T @ a,
    }
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        return _median(calls[kind], a, repeat)


def _median(call: Callable[[Any], Any], a: Any, repeat: int) -> float:
    found = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        call(a)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def ours(client: Client, n: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of one factorization, one of matrices that are in memory."""
    if kind in REFINED:
        return refined(client, n, kind, options)
    count, array = len(client.scheduler_info(n_workers=-1)["workers"]), "cupy" if options.gpu else "numpy"
    rows, cols = shape_of(kind, n)
    chunks = -(-rows // count), cols if kind == "tall" else -(-cols // count)
    asked = options.engine is not None and kind not in ("tall", "gram")
    how = {"engine": options.engine, "method": "columns"} if asked else {}
    # Tall matrices are factorized by plain tasks, which end when their kernels are launched.
    idle = functools.partial(client.run, synchronize) if kind == "tall" and options.gpu else None
    walls, times = [], []
    for turn in range(options.repeat + 1):
        a = matrix((rows, cols), chunks, options.dtype, array, turn, definite=kind == "cholesky")
        before = runs(client)
        seconds = taken(functools.partial(OURS[kind], **how), a, idle)
        if turn:
            walls.append(seconds)
            times.append(seconds if kind == "tall" else run_seconds(client, before))
        del a
        time.sleep(0.2)
    found = {"run": statistics.median(times), "wall": statistics.median(walls)}
    if kind == "gram":
        found["product"] = product_seconds(client, n, chunks, options)
    return found


def refined(client: Client, n: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of solutions with factors of fewer bits, and without, by turns; and how they were refined."""
    count, array = len(client.scheduler_info(n_workers=-1)["workers"]), "cupy" if options.gpu else "numpy"
    chunks, positive = (-(-n // count), n), kind == "refined_pos"
    how: dict[str, Any] = {"engine": options.engine, "method": "columns"} if options.engine else {}
    how |= {"assume_a": "pos"} if positive else {}
    found: dict[str, list[float]] = {"run": [], "wall": [], "plain": [], "plain_wall": []}
    told: Any = ()
    for turn in range(options.repeat + 1):
        # No chunk of the Gram matrix is larger than a part of a GPU's memory.
        a = matrix((n, n), (chunks[0], -(-n // 4)) if positive else chunks, options.dtype, array, turn)
        if positive:
            # Eigenvalues of X X^T / n are from 0 to 4.
            a = on_all(client, plus_identity(linalg.gram(a) * (options.condition / (4 * n))), chunks)
        b = matrix((n, 16), (chunks[0], 16), options.dtype, array, options.repeat + 1 + turn)
        for name, more in (("plain", {}), ("run", {"factor_dtype": options.factor_dtype, "full_output": True})):
            before, started = runs(client), time.perf_counter()
            x = dask.persist(linalg.solve(a, b, **how, **more))
            finished(*x)
            wall = time.perf_counter() - started
            if turn:
                found[name].append(run_seconds(client, before))
                found["wall" if name == "run" else "plain_wall"].append(wall)
            if more:
                told = dask.compute(x[0][1])[0]
            del x
        del a, b
        time.sleep(0.2)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {"turns": float(told.iterations), "way": float(told.way)}


def on_all(client: Client, a: da.Array, chunks: tuple[int, int]) -> da.Array:
    """Return a persisted matrix with as many rows on each worker."""
    names, a = list(client.scheduler_info(n_workers=-1)["workers"]), a.rechunk(chunks, method="tasks")
    parts = [client.persist(a.blocks[number], workers=[name]) for number, name in enumerate(names)]
    finished(*parts)
    return da.concatenate(parts)


def beside(n: int, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the medians of SciPy, in a process of its own, and of stock Dask."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = {"scipy": pool.submit(scipy_seconds, n, options.dtype, kind, options.repeat).result()}
    return found | {"dask": min(dask_seconds(n, kind, cut, options) for cut in (4, 8))}


def product_seconds(client: Client, n: int, chunks: tuple[int, int], options: argparse.Namespace) -> float:
    """Return the median time of the run of a product that is as large as the Gram matrix, of two matrices."""
    times = []
    for turn in range(options.repeat + 1):
        a, b = (matrix((n, n), chunks, options.dtype, "cupy" if options.gpu else "numpy", turn + at) for at in (0, 1))
        before = runs(client)
        made = dask_distmm.matmul(a, b, op_a="T").persist()
        finished(made)
        if turn:
            times.append(run_seconds(client, before))
        del a, b, made
        time.sleep(0.2)
    return statistics.median(times)


def dask_seconds(n: int, kind: str, cut: int, options: argparse.Namespace) -> float:
    """Return stock Dask's median time from ``cut x cut`` chunks."""
    shape = shape_of(kind, n)
    chunks = shape[0] // cut, shape[1] if kind in ("qr", "tall") else shape[1] // cut
    found = []
    for turn in range(options.repeat + 1):
        a = matrix(shape, chunks, options.dtype, "numpy", turn, definite=kind == "cholesky")
        seconds = taken(DASKS[kind], a)
        if turn:
            found.append(seconds)
        del a
        time.sleep(0.2)
    return statistics.median(found)


@contextlib.contextmanager
def cluster(gpu: bool) -> Iterator[Client]:
    """Yield the client of a cluster: one worker a GPU, or two worker processes of one thread."""
    if gpu:
        from dask_cuda import LocalCUDACluster

        with LocalCUDACluster(protocol="ucx", dashboard_address=None, silence_logs=50) as made, Client(made) as client:
            yield client
        return
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as made, Client(made) as client:
        yield client


def main() -> None:
    """Measure, and print one line for each factorization."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[4096])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--repeat", type=int, default=3, help="of ours, SciPy and Dask, after one that does not count")
    parser.add_argument("--factor-dtype", default="float32", help="of refined and refined_pos")
    parser.add_argument("--condition", type=float, default=1e4, help="of refined_pos")
    parser.add_argument("--engine", help="of ours, on all workers; as chosen, on as many as are best, if not given")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path)
    gpu_peers.add_options(parser)
    options = parser.parse_args()
    software = environment.software("numpy", "scipy", "dask", "distributed", "dask_distmm", *gpu_peers.DISTRIBUTIONS)
    about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
    if options.gpu:
        names, gpu = find_gpus()
        results = gpu_peers.Results(options, about | {"gpus": len(names), "gpu": gpu}, flops, len(names))
        gpu_peers.measure(options, results, lambda: cluster(True), functools.partial(ours, options=options))
        return
    results = gpu_peers.Results(options, about, flops)
    with cluster(False) as client:
        for n in options.size:
            for kind in options.kinds:
                others = {} if kind in REFINED else beside(n, kind, options)
                results.add(kind, n, "ours", ours(client, n, kind, options) | others)


if __name__ == "__main__":
    main()
