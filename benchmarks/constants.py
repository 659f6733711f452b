"""Measure the constants of the cost model here: ``python -m benchmarks.constants``.

Prints the block ``distmm.machine.numpy`` for Dask's configuration. Rates are taken with one process for each
core at work at once, as a cluster of one-thread workers is; bandwidth and latency between two such workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import yaml
from distributed import Client, LocalCluster, wait
from threadpoolctl import threadpool_limits

from dask_distmm.dtypes import dtype_from_name
from dask_distmm.engines.blas import gemm

FLOPS_PER_TERM = {"f": 2, "c": 8, "i": 2}


def gemm_rate(dtype: str, size: int, seconds: float) -> float:
    """Return 10^9 operations per second of one thread on matrices of this size."""
    kind = dtype_from_name(dtype)
    rng = np.random.default_rng()
    a, b = ((rng.random((size, size)) * 10).astype(kind) for _ in range(2))
    c = np.zeros((size, size), kind)
    with threadpool_limits(1):
        gemm(a, b, c)
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            gemm(a, b, c)
            count += 1
    return FLOPS_PER_TERM.get(kind.kind, 2) * size**3 * count / elapsed / 1e9


def memory_rate(seconds: float) -> float:
    """Return the bytes of result per second of a sum of two matrices that do not fit a cache."""
    a, b = np.ones(2**24), np.ones(2**24)
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        np.add(a, b, out=a)
        count += 1
    return a.nbytes * count / elapsed


def transfer_rate(client: Client, repeat: int) -> tuple[float, float]:
    """Return bytes per second and seconds per message between two workers, over Dask's comms."""
    one, two = list(client.nthreads())[:2]

    def seconds(size: int) -> float:
        taken = []
        for number in range(repeat):
            data = client.submit(np.ones, size, workers=[one], key=f"data-{size}-{number}")
            wait(data)
            taken.append(client.submit(fetch, one, data.key, workers=[two], key=f"fetch-{size}-{number}").result())
        return float(statistics.median(taken))

    small, large = seconds(1), seconds(2**23)
    return 8 * 2**23 / (large - small), small


def fetch(address: str, key: str) -> float:
    """Get a value from another worker; return the seconds it took. Runs on a worker."""
    from distributed import get_worker
    from distributed.utils import sync
    from distributed.worker import get_data_from_worker

    worker = get_worker()

    async def get() -> None:
        await get_data_from_worker(worker.rpc, [key], address, who=worker.address)

    started = time.perf_counter()
    sync(worker.loop, get)
    return time.perf_counter() - started


def measure(cores: int, seconds: float, repeat: int) -> dict[str, Any]:
    """Return the constants as they go into the configuration."""
    rates = {}
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        for name, dtype, size in (
            ("float32", "float32", 1024),
            ("float64", "float64", 1024),
            ("complex64", "complex64", 768),
            ("complex128", "complex128", 768),
            ("other", "int64", 192),
        ):
            found = list(pool.map(gemm_rate, [dtype] * cores, [size] * cores, [seconds] * cores))
            rates[name] = float(f"{statistics.mean(found):.3g}")
        memory = statistics.mean(pool.map(memory_rate, [seconds] * cores))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as c,
    ):
        bandwidth, latency = transfer_rate(c, repeat)
    return {
        "gflops": rates,
        "bandwidth": float(f"{bandwidth:.2g}"),
        "memory-bandwidth": float(f"{memory:.2g}"),
        "latency": float(f"{latency:.2g}"),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="processes at work at once")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--repeat", type=int, default=7, help="transfers")
    options = parser.parse_args()
    found = measure(options.cores, options.seconds, options.repeat)
    print(yaml.safe_dump({"distmm": {"machine": {"numpy": found}}}, sort_keys=False))


if __name__ == "__main__":
    main()
