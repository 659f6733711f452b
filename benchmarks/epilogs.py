"""An epilog in the run against the same product followed by Dask's own operations: ``python -m benchmarks.epilogs``.

On GPUs (one worker each, CuPy chunks) where there are any and dask-cuda is installed, else on worker processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import dask_distmm
from benchmarks.harness import environment
from benchmarks.revision import revision

GELU = 0.7978845608028654


def bias_relu(x: Any, bias: Any) -> Any:
    """Return what ``relu_bias`` computes, by Dask operations."""
    return da.maximum(x + bias, 0)


def bias_gelu(x: Any, bias: Any) -> tuple[Any, Any]:
    """Return what ``gelu_aux_bias`` computes, by Dask operations."""
    x = x + bias
    return 0.5 * x * (1 + da.tanh(GELU * (x + 0.044715 * x * x * x))), x


FORMULAS: dict[str, Callable[..., Any]] = {"relu_bias": bias_relu, "gelu_aux_bias": bias_gelu}


@contextlib.contextmanager
def started(workers: int) -> Iterator[tuple[Client, bool]]:
    """Yield a client, and whether its workers have GPUs."""
    try:
        import cupy
        from dask_cuda import LocalCUDACluster

        gpus = min(workers, cupy.cuda.runtime.getDeviceCount())
    except Exception:
        gpus = 0
    if gpus:
        with (
            LocalCUDACluster(
                n_workers=gpus, protocol="ucx", dashboard_address="127.0.0.1:0", silence_logs=40
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client, True
        return
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client, False


def normal(shape: tuple[int, ...], chunks: Any, dtype: str, gpu: bool) -> Any:
    """Return a fresh random array in the workers' memory."""
    if gpu:
        import cupy

        made = da.random.RandomState(np.random.SeedSequence().generate_state(1)[0], RandomState=cupy.random.RandomState)
        found = made.standard_normal(shape, chunks=chunks).astype(dtype).persist()
    else:
        found = da.random.default_rng().standard_normal(shape, chunks=chunks).astype(dtype).persist()
    wait(found)
    return found


def product(way: str, epilog: Any, a: Any, b: Any, bias: Any) -> Any:
    """Return the lazy result of one of the three ways."""
    if way == "fused":
        return dask_distmm.matmul(a, b, epilog=epilog, epilog_inputs={"bias": bias})
    return FORMULAS[epilog](dask_distmm.matmul(a, b) if way == "separate" else a @ b, bias)


def timed(way: str, n: int, grid: int, dtype: str, epilog: str, gpu: bool) -> float:
    """Return the seconds from inputs in memory until all chunks of the result are there."""
    a, b = (normal((n, n), n // grid, dtype, gpu) for _ in "ab")
    bias = normal((n,), n // grid, dtype, gpu)
    started_at = time.perf_counter()
    found = dask.persist(product(way, epilog, a, b, bias))
    wait(found)
    return time.perf_counter() - started_at


def measure(n: int, grid: int, dtype: str, epilog: str, gpu: bool, repeat: int) -> dict[str, Any]:
    """Return medians and ratios of one case, over rounds that visit all ways in turn; the first does not count."""
    seconds: dict[str, list[float]] = {"fused": [], "separate": [], "dask": []}
    for turn in range(repeat + 1):
        for way in np.roll(list(seconds), turn).tolist():
            taken = timed(way, n, grid, dtype, epilog, gpu)
            if turn:
                seconds[way].append(taken)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {
        "n": n,
        "chunks": grid,
        "dtype": dtype,
        "epilog": epilog,
        "seconds": seconds,
        "median": medians,
        "separate_over_fused": medians["separate"] / medians["fused"],
        "dask_over_fused": medians["dask"] / medians["fused"],
    }


def line(found: dict[str, Any]) -> str:
    """Return a result as text."""
    grid, ms = found["chunks"], found["median"]["fused"] * 1e3
    return (
        f"{found['n']:6d} {grid:2d} x {grid:<2d} {found['dtype']:8s} {found['epilog']:14s} fused {ms:8.1f} ms"
        f"   separate x {found['separate_over_fused']:.2f}   stock Dask x {found['dask_over_fused']:.2f}"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epilogs", description=__doc__)
    parser.add_argument("--size", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8], help="chunks along each axis")
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--epilog", nargs="+", default=list(FORMULAS), choices=list(FORMULAS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/epilogs-cpu.json"))
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    document = {
        "schema_version": 1,
        "benchmark": "epilogs",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "hardware": environment.hardware(),
        "software": environment.software("numpy", "dask", "distributed", "dask_distmm"),
        "workers": options.workers,
        "results": results,
    }
    cases = itertools.product(options.size, options.chunks, options.dtype, options.epilog)
    with started(options.workers) as (_, gpu):
        document["gpu"] = gpu
        for n, grid, dtype, epilog in cases:
            found = measure(n, grid, dtype, epilog, gpu, options.repeat)
            results.append(found)
            print(line(found), flush=True)
            # After each case: one that is interrupted has written what it has.
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
