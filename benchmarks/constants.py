"""Measure the constants of the cost model here: ``python -m benchmarks.constants [--protocol ucx]``.

Prints the blocks ``distmm.machine.numpy`` and ``distmm.dask`` for Dask's configuration. Rates are taken with one
process for each core at work at once, as a cluster of one-thread workers is; bandwidth and latency between two such
workers, and what Dask takes around a run and for its own tasks, from tiny products.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import dask.array as da
import numpy as np
import yaml
from distributed import Client, LocalCluster, wait
from threadpoolctl import threadpool_limits

from benchmarks.overhead import extents, operands, seconds
from dask_distmm import matmul
from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.arrays.request import parse
from dask_distmm.config import DaskCosts, Machine
from dask_distmm.engines.numpy.blas import gemm
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import Problem, Worker
from dask_distmm.planning.tasks import tasks_estimate

# A machine on which work costs nothing, and Dask takes a second for each task: what is left is their number.
_FREE = Machine((("other", 1e30),), 1e30, 1e30, 0.0)
_ONE_A_TASK = DaskCosts(0.0, 0.0, 0.0, 1.0)
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


def dask_seconds(client: Client, repeat: int) -> dict[str, str]:
    """Return what Dask takes around a run and for each chunk, and for its own tasks, as the configuration has it."""

    def measured(multiply: Callable[[Any, Any], Any], count: int) -> float:
        taken = []
        for _ in range(repeat):
            a, b = operands(count)
            seconds_in_all, d = seconds(multiply, a, b)
            found = [event for _, event in client.get_events("distmm") if event["name"] == d.name]
            taken.append(seconds_in_all - (found[-1]["seconds"] if found else 0.0))
        return float(statistics.median(taken))

    few, many = 2, 8
    around, own = ([measured(way, count) for count in (few, few, many)][1:] for way in (matmul, dask_matmul))
    sizes = [problem_of(count) for count in (few, many)]
    chunk = (around[1] - around[0]) / (3 * (many**2 - few**2))
    tasks = [tasks_estimate(problem, [Worker("a"), Worker("b")], _FREE, _ONE_A_TASK).seconds for problem in sizes]
    task = (own[1] - own[0]) / (tasks[1] - tasks[0])
    found = {
        "run": around[0] - 3 * few**2 * chunk,
        "chunk": chunk,
        "start": own[0] - tasks[0] * task,
        "task": task,
    }
    return {name: f"{1e3 * max(0.0, value):.2g}ms" for name, value in found.items()}


def problem_of(count: int) -> Problem:
    """Return the problem of a tiny product."""
    n, sizes = extents(count)
    a, b = (da.ones((n, n), chunks=sizes) for _ in "ab")
    return parse(a, b).problem


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


def measure(cores: int, each: float, repeat: int, protocol: str) -> dict[str, Any]:
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
            found = list(pool.map(gemm_rate, [dtype] * cores, [size] * cores, [each] * cores))
            rates[name] = float(f"{statistics.mean(found):.3g}")
        memory = statistics.mean(pool.map(memory_rate, [each] * cores))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, protocol=protocol, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as c,
    ):
        bandwidth, latency = transfer_rate(c, repeat)
        around = dask_seconds(c, repeat)
    numpy_engine = {
        "gflops": rates,
        "bandwidth": float(f"{bandwidth:.2g}"),
        "memory-bandwidth": float(f"{memory:.2g}"),
        "latency": float(f"{latency:.2g}"),
    }
    return {"dask": around, "machine": {"numpy": numpy_engine}}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="processes at work at once")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--repeat", type=int, default=7, help="transfers, and products")
    parser.add_argument("--protocol", default="tcp", help="of the cluster")
    options = parser.parse_args()
    found = measure(options.cores, options.seconds, options.repeat, options.protocol)
    print(yaml.safe_dump({"distmm": found}, sort_keys=False))


if __name__ == "__main__":
    main()
