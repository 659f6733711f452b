"""Products from host memory on GPUs that have too little of their own, beside the bounds of the GPU and of its bus.

    python -m benchmarks.host_memory [--size 16384 32768] [--dtype float32] [--limit 10GB] [--chunks 4] [--out FILE]

One worker a GPU, started by dask-cuda with a ``device_memory_limit``. A, B and D are NumPy arrays. ``engine bound`` is
the time of the operations at gemm's rate (cuBLAS through CuPy, from the GPU's own memory), ``bus bound`` the time of
reading A and B, and writing D, once by all GPUs, from and to pinned memory; both on all GPUs at a time. ``reads``
is the time in which a GPU reads its parts of A and B as they are planned: of several GPUs each needs parts of which
others need the same. ``share`` is the larger bound by the wall time from ``persist()`` to all of D in host memory.
``error`` is that of one row, where 1 is the bound for sums of k products.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_distmm
from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm.planning import Plan


def block(dtype: str, seed: int, block_info: Any = None) -> Any:
    """Return a chunk of a random matrix whose rows repeat after 1024: one thread makes random numbers slowly."""
    where, (rows, cols) = block_info[None]["array-location"], block_info[None]["chunk-shape"]
    rng = np.random.default_rng([seed, where[0][0], where[1][0]])
    some = rng.standard_normal((min(rows, 1024), cols), np.float32).astype(dtype, copy=False)
    return np.tile(some, (-(-rows // len(some)), 1))[:rows]


def rates(dtype: str) -> dict[str, float]:
    """Return on a worker the rate of gemm (operations a second) and of the bus (bytes a second, both directions)."""
    import cupy as cp
    import cupyx

    n, size = 8192, 2**28
    x = cp.ones((n, n), dtype)
    pinned, there = cupyx.empty_pinned(size, np.uint8), cp.empty(size, np.uint8)
    start, stop = cp.cuda.Event(), cp.cuda.Event()

    def seconds(work: Any) -> float:
        found = []
        for _ in range(5):
            start.record()
            work()
            stop.record()
            stop.synchronize()
            found.append(cp.cuda.get_elapsed_time(start, stop) / 1e3)
        return float(min(found))

    return {
        "gemm": 2 * n**3 / seconds(lambda: cp.matmul(x, x)),
        "to_device": size / seconds(lambda: there.set(pinned)),
        "to_host": size / seconds(lambda: there.get(out=pinned)),
    }


def matrix(n: int, chunks: int, dtype: str, seed: int) -> da.Array:
    """Return a persisted random matrix of NumPy chunks."""
    size = -(-n // chunks)
    made = da.map_blocks(
        block, dtype, seed, chunks=da.core.normalize_chunks(size, (n, n)), dtype=dtype, meta=np.empty((0, 0), dtype)
    ).persist()
    wait(made)
    return made


def check(a: da.Array, b: da.Array, d: da.Array) -> float:
    """Return the largest error of one row of D, in units of the bound 2 k eps |a| |b| of a sum of k products."""
    row, right = a[17].astype("f8"), b.astype("f8")
    exact, sizes, found = dask.compute(row @ right, abs(row) @ abs(right), d[17])
    return float(np.max(np.abs(exact - found) / (2 * b.shape[0] * np.finfo(d.dtype).eps * sizes)))


def measure(client: Client, n: int, dtype: str, chunks: int, repeat: int) -> dict[str, Any]:
    """Return the medians of one size."""
    a, b = matrix(n, chunks, dtype, 1), matrix(n, chunks, dtype, 2)
    made = dask_distmm.explain(a, b)
    walls, runs = [], []
    for turn in range(repeat + 1):
        before = len(client.get_events("distmm"))
        start = time.perf_counter()
        d = dask_distmm.matmul(a, b).persist()
        wait(d)
        walls.append(time.perf_counter() - start)
        time.sleep(0.2)
        events = [event for _, event in client.get_events("distmm")[before:] if event["action"] == "done"]
        runs.append(sum(event["seconds"] for event in events))
        if turn < repeat:
            del d
            time.sleep(0.2)
    found = {"n": n, "dtype": dtype, "method": made.method, "runs": len(events), "error": check(a, b, d)}
    if isinstance(made, Plan):
        p, q, s = made.grid
        found["read_bytes"] = n * n * np.dtype(dtype).itemsize * (1 / p + 1 / q) / s
    found |= {"wall": float(np.median(walls[1:])), "run": float(np.median(runs[1:])), "plan": repr(made)}
    return found | {"last": {name: value for name, value in events[-1].items() if isinstance(value, float | dict)}}


def on_cluster(options: argparse.Namespace, limit: str, results: list[dict[str, Any]]) -> None:
    """Measure all sizes and types on GPUs with one limit."""
    from dask_cuda import LocalCUDACluster

    settings: dict[str, Any] = {"protocol": "tcp", "dashboard_address": None, "silence_logs": 50}
    with LocalCUDACluster(**settings, device_memory_limit=limit) as cluster, Client(cluster) as client:
        gpus = len(cluster.workers)
        for dtype in options.dtype:
            rate = min(client.run(rates, dtype).values(), key=lambda one: one["gemm"])
            print(limit, {name: f"{value:.3g}" for name, value in rate.items()}, flush=True)
            for n in options.size:
                one = measure(client, n, dtype, options.chunks, options.repeat)
                size = n * n * np.dtype(dtype).itemsize / gpus
                one |= {"limit": limit, "gpus": gpus, "engine_bound": 2 * n**3 / rate["gemm"] / gpus}
                one["bus_bound"] = 2 * size / rate["to_device"] + size / rate["to_host"]
                one["reads"] = one.get("read_bytes", 2 * size) / rate["to_device"]
                one["share"] = max(one["engine_bound"], one["bus_bound"]) / one["wall"]
                results.append(one)
                if options.verbose:
                    print(one["plan"])
                print({key: value for key, value in one.items() if key != "plan"}, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure; print a line for each case, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--limit", nargs="+", default=["10GB"])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print plans")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    for limit in options.limit:
        on_cluster(options, limit, results)
    if options.out is not None:
        software = environment.software("numpy", "dask", "distributed", "cupy", "nvmath-python", "dask_distmm")
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
