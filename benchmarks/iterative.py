"""Seconds of an iteration of a solver beside its kernels: ``python -m benchmarks.iterative [--gpu] [--size 8192]``.

An iteration of ``linalg.cg`` (``minres``) takes a product by the matrix, and sums over the ranks. Here it is
the difference of two calls with other numbers of iterations, a median of some. The kernels alone: two workers at once
multiply half of the rows by a vector, NumPy's or CuPy's, without messages.
"""

from __future__ import annotations

import argparse
import statistics
import time

import dask.array as da
import numpy as np
from distributed import Client, wait

from benchmarks.harness.cluster import started
from dask_distmm import linalg

FEW, MANY, ROUNDS = 50, 450, 5


def kernels(size: int, dtype: str, gpu: bool) -> float:
    """Return the seconds of the product of half of a matrix and a vector."""
    if gpu:
        import cupy as xp

        finish = xp.cuda.Device().synchronize
    else:
        xp, finish = np, lambda: None
    a, x = (xp.random.default_rng().random(shape).astype(dtype) for shape in ((size // 2, size), (size, 1)))
    found = []
    for _ in range(ROUNDS):
        a @ x
        finish()
        began = time.perf_counter()
        for _ in range(MANY):
            a @ x
        finish()
        found.append((time.perf_counter() - began) / MANY)
    return statistics.median(found)


def measure(client: Client, name: str, size: int, dtype: str, gpu: bool) -> tuple[float, float]:
    """Return the seconds of an iteration, and of the kernels alone on the slower worker."""
    random = da.random.default_rng()
    backend = "cupy" if gpu else "numpy"
    # The product of a random matrix by itself: of so large a condition that no iteration is the last one.
    g = random.standard_normal((size, size), chunks=size // 4, dtype=dtype).to_backend(backend).persist()
    a = linalg.gram(g).persist()
    b = random.random(size, chunks=size // 4, dtype=dtype).to_backend(backend).persist()
    wait([a, b])
    found: dict[int, list[float]] = {FEW: [], MANY: []}
    for turn in range(ROUNDS + 1):
        for iterations, seconds in found.items():
            # Without a tolerance all iterations are made; each call has another right-hand side, so other keys.
            mine = (b + turn).persist()
            wait(mine)
            began = time.perf_counter()
            x, _ = getattr(linalg, name)(a, mine, rtol=0.0, maxiter=iterations)
            wait(x.persist())
            seconds.append(time.perf_counter() - began)
    difference = statistics.median(found[MANY][1:]) - statistics.median(found[FEW][1:])
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    alone = client.gather([client.submit(kernels, size, dtype, gpu, workers=[w], pure=False) for w in workers])
    return difference / (MANY - FEW), max(alone)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--functions", nargs="+", default=["cg", "minres"], choices=["cg", "minres"])
    parser.add_argument("--gpu", action="store_true", help="two GPUs")
    options = parser.parse_args()
    with started(gpu=options.gpu) as client:
        print("milliseconds: an iteration, the kernels alone, what is more")
        for size in options.size:
            for name in options.functions:
                ours, alone = measure(client, name, size, options.dtype, options.gpu)
                print(f"{name:8} {size:6} {1e3 * ours:8.3f} {1e3 * alone:8.3f} {1e3 * (ours - alone):8.3f}", flush=True)


if __name__ == "__main__":
    main()
