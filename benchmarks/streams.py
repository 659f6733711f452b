"""The Gram matrix of CuPy chunks that are generated on GPUs with little memory, beside its bounds and stock Dask.

    python -m benchmarks.streams [--gigabytes 200] [--columns 1024] [--chunks 134 17] [--device-limit 20GB] [--out FILE]

One worker a GPU, started by dask-cuda with a ``device_memory_limit``. X is tall, in chunks of all columns of about so
many megabytes. By turns in one run, from ``persist()`` until D is in memory, with fresh numbers each time:

``distmm``      ``dask_distmm.matmul(X.T, X)``
``dask``        stock Dask's ``X.T @ X`` on the same cluster
``generate``    Dask's tasks that make the chunks, each reduced to one number

And on all GPUs at once, without Dask: ``alone``, the same functions one after the other in one thread; ``gemm`` and
``syrk``, cuBLAS on chunks that are there, as they are and of 2**16 rows, the quicker one. A ``share`` is the larger of
generating (``alone``, or as Dask does it) and multiplying (``gemm``) by the time of ``distmm``. ``error`` is that of D
times a vector, where 1 is 16 eps of the sums of absolute values. ``pool`` are the most bytes of CuPy's pool on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, futures_of, wait

import dask_distmm
from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm.arrays.fallback import dask_matmul

_HASH = """
    unsigned long long z = first + i + seed * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    x = (T)((double)(z >> 11) / 9007199254740992.0 - 0.5);
"""
_LONG = 2**16


@functools.cache
def _hashed() -> Any:
    import cupy

    return cupy.ElementwiseKernel("uint64 first, uint64 seed", "T x", _HASH, "distmm_hashed")


def fill(source: str, seed: int, first: int, rows: int, cols: int, dtype: str) -> Any:
    """Return rows of a random matrix on the GPU, from number `first` on: by one kernel, or by CuPy's generator."""
    import cupy

    if source == "cupy":
        return cupy.random.default_rng([seed % 2**31, first]).random((rows, cols), dtype=dtype)
    found = cupy.empty((rows, cols), dtype)
    _hashed()(np.uint64(first * cols), np.uint64(seed), found)
    return found


def block(source: str, seed: int, dtype: str, block_info: Any = None) -> Any:
    """Return a chunk."""
    ((first, last), (_, cols)) = block_info[None]["array-location"]
    return fill(source, seed, first, last - first, cols, dtype)


def matrix(source: str, shape: tuple[int, int], rows: int, dtype: str, seed: int) -> da.Array:
    """Return a lazy X."""
    import cupy

    chunks = da.core.normalize_chunks((rows, shape[1]), shape)
    return da.map_blocks(block, source, seed, dtype, chunks=chunks, dtype=dtype, meta=cupy.empty((0, 0), dtype))


def one_number(chunk: Any) -> Any:
    """Return a copy of a chunk's first element: a view would keep all of it."""
    return chunk[:1, :1].copy()


def project(chunk: Any, vector: Any = None) -> Any:
    """Return the products of a chunk's part of X.T X, and of the one of absolute values, with a vector."""
    import cupy

    v = cupy.asarray(vector)
    return cupy.stack([chunk.T @ (chunk @ v), abs(chunk).T @ (abs(chunk) @ abs(v))])[None]


def synchronize() -> None:
    """Wait until this worker's GPU is idle."""
    import cupy

    cupy.cuda.Device().synchronize()


def pool() -> int:
    """Return the bytes that CuPy's pool has, and give those that are free back."""
    import cupy

    found = int(cupy.get_default_memory_pool().total_bytes())
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def _timed(work: Callable[[], Any]) -> float:
    import cupy

    work()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(5):
        work()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 5e3


def multiplied(rows: int, cols: int, dtype: str) -> dict[str, float]:
    """Return on a worker the seconds of a row of X in gemm and in syrk, added to D."""
    import cupy
    from cupy import cublas

    found: dict[str, float] = {}
    for many in sorted({rows, _LONG}):
        left = fill("hash", 1, 0, many, cols, dtype).T
        d = cupy.zeros((cols, cols), dtype, order="F")
        ways = {
            "gemm": lambda left=left, d=d: cublas.gemm("N", "T", left, left, out=d, alpha=1.0, beta=1.0),
            "syrk": lambda left=left, d=d: cublas.syrk("N", left, out=d, alpha=1.0, beta=1.0),
        }
        for name, work in ways.items():
            found[name] = min(found.get(name, np.inf), _timed(work) / many)
        del left, d, ways
    return found


def generated(source: str, rows: int, cols: int, dtype: str, count: int, seed: int) -> float:
    """Return on a worker the seconds in which one thread makes so many chunks, and drops them."""
    fill(source, seed, 0, rows, cols, dtype)
    synchronize()
    start = time.perf_counter()
    for number in range(count):
        fill(source, seed, number * rows, rows, cols, dtype)
    synchronize()
    return time.perf_counter() - start


def measure(client: Client, way: str, x: da.Array, limit: float) -> tuple[float | None, Any]:
    """Return the seconds that a way takes, None if it takes more than the limit or fails, and what it has made."""
    if way == "generate":
        built = x.map_blocks(one_number, chunks=((1,) * x.numblocks[0], (1,)), meta=x._meta).sum()
    else:
        built = dask_distmm.matmul(x.T, x) if way == "distmm" else dask_matmul(x.T, x)
    start = time.perf_counter()
    made = built.persist()
    try:
        wait(made, timeout=limit)
    except TimeoutError:
        return None, None
    client.run(synchronize)
    seconds = time.perf_counter() - start
    good = all(future.status == "finished" for future in futures_of(made))
    return (seconds, made) if good else (None, None)


def on_host(x: da.Array) -> Any:
    """Return an array as NumPy's."""
    found = x.compute()
    return found.get() if hasattr(found, "get") else found


def check(x: da.Array, d: Any) -> float:
    """Return the largest error of D times a vector, in units of its bound."""
    v = np.random.default_rng().standard_normal(x.shape[1])
    sizes = (1,) * x.numblocks[0], (2,), (x.shape[1],)
    meta = x._meta.astype(float).reshape(0, 0, 0)
    parts = x.astype(float).map_blocks(project, vector=v, chunks=sizes, new_axis=2, meta=meta)
    exact, bound = on_host(parts.sum(axis=0))
    found = on_host(d).astype(float) @ v
    return float(np.max(abs(found - exact) / (16 * np.finfo(d.dtype).eps * bound)))


def bounds(client: Client, options: argparse.Namespace, source: str, rows: int, count: int) -> dict[str, float]:
    """Return the seconds of generating and of multiplying alone, on all GPUs."""
    dtype, cols, gpus = options.dtype, options.columns, len(client.nthreads())
    products = client.run(multiplied, rows, cols, dtype).values()
    found = {name: max(one[name] for one in products) * rows * count / gpus for name in ("gemm", "syrk")}
    seed = time.time_ns() % 2**40
    found["alone"] = max(client.run(generated, source, rows, cols, dtype, -(-count // gpus), seed).values())
    return found


def case(client: Client, options: argparse.Namespace, source: str, megabytes: float) -> dict[str, Any]:
    """Return the figures of one kind of chunks."""
    dtype, cols = options.dtype, options.columns
    line = cols * np.dtype(dtype).itemsize
    rows = 128 * max(1, round(megabytes * 1e6 / line / 128))
    count = max(len(client.nthreads()), round(options.gigabytes * 1e9 / (rows * line)))
    shape = rows * count, cols
    found: dict[str, Any] = {"source": source, "rows": rows, "chunks": count, "gigabytes": shape[0] * line / 1e9}
    found |= bounds(client, options, source, rows, count)
    x = matrix(source, shape, rows, dtype, 0)
    found["plan"] = repr(dask_distmm.explain(x.T, x))
    walls: dict[str, list[float]] = {way: [] for way in options.ways}
    pools = dict.fromkeys(options.ways, 0)
    for turn in range(options.repeat + 1):
        for way in options.ways:
            if turn and not walls[way]:
                continue  # it took too long, or failed
            client.run(pool)
            x = matrix(source, shape, rows, dtype, time.time_ns() % 2**40)
            before = len(client.get_events("distmm"))
            seconds, made = measure(client, way, x, options.limit)
            pools[way] = max(pools[way], *client.run(pool).values())
            walls[way] += [] if seconds is None else [seconds]
            if way == "distmm" and seconds is not None and turn == options.repeat:
                found["error"] = check(x, made)
                done = [event for _, event in client.get_events("distmm")[before:] if event["action"] == "done"]
                found["runs"] = len(done)
                found["last"] = {name: x for name, x in done[-1].items() if isinstance(x, float | dict)}
            del made
    # The first turn is a warm-up.
    found |= {way: statistics.median(some[1:] or some) if some else None for way, some in walls.items()}
    for name in ("alone", "generate"):
        if found.get("distmm") and found.get(name):
            found[f"share, {name}"] = max(found[name], found["gemm"]) / found["distmm"]
    return found | {"walls": walls, "pool": pools}


def main(arguments: list[str] | None = None) -> None:
    """Measure; print a line for each case, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=200.0, help="of X")
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--chunks", type=float, nargs="+", default=[134.0, 17.0], help="megabytes of a chunk")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--sources", nargs="+", default=["hash", "cupy"], choices=["hash", "cupy"])
    parser.add_argument("--ways", nargs="+", default=["distmm", "dask", "generate"])
    parser.add_argument("--device-limit", default="20GB")
    parser.add_argument("--threads", type=int, default=1, help="of a worker")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one measurement")
    parser.add_argument("--verbose", action="store_true", help="print plans")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    from dask_cuda import LocalCUDACluster

    software = environment.software("numpy", "dask", "distributed", "cupy-cuda13x", "nvmath-python", "dask_distmm")
    about: dict[str, Any] = {"hardware": environment.hardware(), "software": software, "revision": revision()}
    results: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"protocol": "tcp", "dashboard_address": None, "silence_logs": 50}
    settings |= {"device_memory_limit": options.device_limit, "threads_per_worker": options.threads}
    with dask.config.set({"distmm.engine": "peer"}), LocalCUDACluster(**settings) as cluster, Client(cluster) as client:
        small = da.ones((64, 64), chunks=32)
        dask_distmm.matmul(small, small).compute()
        about |= {"gpus": len(client.nthreads()), "options": {k: str(v) for k, v in vars(options).items()}}
        for source in options.sources:
            for megabytes in options.chunks:
                results.append(one := case(client, options, source, megabytes))
                if options.verbose:
                    print(one["plan"])
                shown = {
                    k: round(v, 4) if isinstance(v, float) else v for k, v in one.items() if k not in ("plan", "walls")
                }
                print(shown, flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    # As a module that workers can import: else each task would bring its functions along.
    from benchmarks import streams  # noqa: PLW0406

    streams.main()
