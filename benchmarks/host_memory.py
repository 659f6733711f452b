"""Products from host memory on GPUs that have too little of their own, beside the bounds of the GPU and of its bus.

    python -m benchmarks.host_memory [--size 16384 32768] [--dtype float32] [--share 0.07] [--chunks 4] [--out FILE]

One worker a GPU; all of its memory but ``--share`` counts as taken (``distmm.memory.limit-fraction``). A, B and D are
NumPy arrays. Each size is multiplied in that little memory, and with all of it: then A and B are copied to the GPU
before they are multiplied. ``engine bound`` is the time of the operations at gemm's rate (cuBLAS through CuPy, from the
GPU's own memory), ``bus bound`` that of reading A and B, and writing D, once by all GPUs, from and to pinned memory.
``share`` is the larger bound by the time of the run, or of all runs where D is made in blocks.
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
from benchmarks.revision import revision
from dask_distmm.tools.bench import environment


def block(dtype: str, seed: int, block_info: Any = None) -> Any:
    """Return a chunk of a random matrix, quickly."""
    where, shape = block_info[None]["array-location"], block_info[None]["chunk-shape"]
    rng = np.random.default_rng([seed, where[0][0], where[1][0]])
    return rng.standard_normal(shape, np.float32).astype(dtype, copy=False)


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
    row, right = a[17].compute().astype("f8"), b.compute().astype("f8", copy=False)
    bound = 2 * len(row) * np.finfo(d.dtype).eps * (np.abs(row) @ np.abs(right))
    return float(np.max(np.abs(row @ right - d[17].compute()) / bound))


def measure(client: Client, n: int, dtype: str, chunks: int, share: float, repeat: int) -> dict[str, Any]:
    """Return the medians of one size in little memory or in all of it."""
    with dask.config.set({"distmm.memory.limit-fraction": share}):
        a, b = matrix(n, chunks, dtype, 1), matrix(n, chunks, dtype, 2)
        runs, walls = [], []
        made = dask_distmm.explain(a, b)
        for _ in range(repeat + 1):
            before = len(client.get_events("distmm"))
            start = time.perf_counter()
            d = dask_distmm.matmul(a, b).persist()
            wait(d)
            walls.append(time.perf_counter() - start)
            time.sleep(0.2)
            events = [event for _, event in client.get_events("distmm")[before:] if event["action"] == "done"]
            runs.append(sum(event["seconds"] for event in events))
            count = len(events)
            if len(runs) <= repeat:
                del d
                time.sleep(0.2)
        error = check(a, b, d) if n <= 20000 else None
        text = repr(made)
        del a, b, d
    time.sleep(0.5)
    found = {"n": n, "dtype": dtype, "share_of_memory": share, "runs": count}
    return found | {
        "run": float(np.median(runs[1:])),
        "wall": float(np.median(walls[1:])),
        "error": error,
        "plan": text,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure; print a line for each case, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--share", type=float, nargs="+", default=[0.07])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print plans")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    from dask_cuda import LocalCUDACluster

    results: list[dict[str, Any]] = []
    with (
        LocalCUDACluster(protocol="tcp", dashboard_address=None, silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        gpus = len(cluster.workers)
        for dtype in options.dtype:
            rate = min(client.run(rates, dtype).values(), key=lambda one: one["gemm"])
            print({name: f"{value:.3g}" for name, value in rate.items()}, flush=True)
            for n in options.size:
                for share in (*options.share, 0.8):
                    one = measure(client, n, dtype, options.chunks, share, options.repeat)
                    size = n * n * np.dtype(dtype).itemsize / gpus
                    one["engine_bound"] = 2 * n**3 / rate["gemm"] / gpus
                    one["bus_bound"] = 2 * size / rate["to_device"] + size / rate["to_host"]
                    one["share"] = max(one["engine_bound"], one["bus_bound"]) / one["run"]
                    results.append(one)
                    if options.verbose:
                        print(one["plan"])
                    print({key: value for key, value in one.items() if key != "plan"}, flush=True)
    if options.out is not None:
        software = environment.software("numpy", "dask", "distributed", "cupy", "nvmath-python", "dask_distmm")
        about = {"hardware": environment.hardware(), "software": software, "revision": revision(), "gpus": gpus}
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
