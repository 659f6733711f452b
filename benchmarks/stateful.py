"""The stateful multiply against the stateless one: ``python -m benchmarks.stateful``.

On a LocalCUDACluster with CuPy chunks where GPUs are visible, else on worker processes with NumPy chunks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, futures_of, wait

import dask_distmm
from benchmarks.harness import environment, report
from benchmarks.harness.protocol import sample_rows, scaled_error
from benchmarks.revision import revision

WAYS = ("stateless", "execute", "reset")
WHAT = {
    "stateless": "matmul(a, b) of fresh arrays: built, persisted, all chunks there",
    "execute": "execute() on the tiles that are there, all chunks there",
    "reset": "reset_operands(a, b) with fresh arrays, then execute(), all chunks there",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stateful", description=__doc__)
    add = parser.add_argument
    add("--size", type=int, nargs="+", help="rows of the square factors; by default 1024 4096, on GPUs 4096 16384")
    add("--repeat", type=int, default=9, help="timings of each way that count, after one that does not")
    add("--workers", type=int, help="worker processes; by default 2, on GPUs all of them")
    add("--chunks", type=int, default=4, help="chunks per side")
    add("--dtype", choices=["float32", "float64"], default="float64")
    add("--method", default="auto", help="of the multiply")
    add("--cpu", action="store_true", help="NumPy chunks, also where there are GPUs")
    add("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if min(options.repeat, options.chunks, options.workers or 1, *(options.size or [1])) < 1:
        parser.error("--size, --repeat, --workers and --chunks must be positive")
    return options


def visible_gpus() -> int:
    """Return how many GPUs there are, without touching CUDA in this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return min(count, len(named.split(","))) if named else count


class Session:
    """A cluster, and matrices on it."""

    def __init__(self, options: argparse.Namespace, gpus: int, stack: contextlib.ExitStack) -> None:
        self.options, self.gpus = options, gpus
        if gpus:
            from dask_cuda import LocalCUDACluster

            cluster = LocalCUDACluster(
                n_workers=options.workers or gpus, protocol="ucx", dashboard_address="127.0.0.1:0"
            )
        else:
            cluster = LocalCluster(
                n_workers=options.workers or 2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
            )
        self.client = stack.enter_context(Client(stack.enter_context(cluster)))
        self.workers = len(self.client.nthreads())

    def matrix(self, size: int) -> da.Array:
        """Return a fresh random matrix, in memory."""
        side, dtype = -(-size // self.options.chunks), np.dtype(self.options.dtype)
        if self.gpus:
            import cupy

            from benchmarks.gpu.matrices import make_block

            cuts = da.core.normalize_chunks((side, side), (size, size))
            meta, seed = cupy.empty((0, 0), dtype), secrets.randbits(30)
            made = da.map_blocks(make_block, dtype.name, seed, chunks=cuts, dtype=dtype, meta=meta)
        else:
            made = da.random.default_rng().random((size, size), dtype=dtype, chunks=(side, side)) - dtype.type(0.5)
        made = self.client.persist(made)
        wait(made)
        return made

    def error(self, a: da.Array, b: da.Array, d: da.Array) -> float:
        """Return the error of some rows of a product as a share of what rounding can cause."""
        if self.gpus:
            from benchmarks.gpu.matrices import row_error

            return float(row_error(self.client, a, b, d, self.options.dtype, transposed=False, count=4))
        rows = sample_rows(d.shape[0], secrets.randbits(30))
        return scaled_error(*(x.compute() for x in (a[rows], b, d[rows])))


def timed(work: Callable[[], da.Array]) -> tuple[float, da.Array]:
    """Return the seconds until all chunks of a persisted result are there, and the result."""
    began = time.perf_counter()
    result = work()
    wait(result)
    seconds = time.perf_counter() - began
    if failed := [future for future in futures_of(result) if future.status == "error"]:
        failed[0].result()
    return seconds, result


def measure_size(session: Session, size: int) -> dict[str, Any]:
    """Measure all ways at one size, in turn; return their seconds, errors and what the plan was."""
    options = session.options
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    worst = 0.0
    a, b = session.matrix(size), session.matrix(size)
    with dask_distmm.Matmul(a, b, method=options.method) as mm:
        began = time.perf_counter()
        made = mm.plan()
        wait(mm.execute())
        planned = time.perf_counter() - began
        for turn in range(options.repeat + 1):
            # Each round in another order, so that none always follows the same one.
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                if way != "execute":
                    x, y = session.matrix(size), session.matrix(size)
                if way == "stateless":

                    def stateless(x: da.Array = x, y: da.Array = y) -> Any:
                        return dask_distmm.matmul(x, y, method=options.method).persist()

                    taken, d = timed(stateless)
                    used = x, y
                else:
                    if way == "reset":

                        def again(x: da.Array = x, y: da.Array = y) -> Any:
                            mm.reset_operands(x, y)
                            return mm.execute()

                        taken, d = timed(again)
                        a, b = x, y
                    else:
                        taken, d = timed(mm.execute)
                    used = a, b
                if turn in (0, options.repeat):
                    worst = max(worst, session.error(*used, d))
                if turn:
                    seconds[way].append(taken)
                del d, used
    found: dict[str, Any] = {
        "size": size,
        "method": made.method,
        "grid": list(made.grid),
        "engine": made.engine,
        "moved_bytes_of_an_execution": made.bytes_moved,
        "plan_and_first_seconds": planned,
        "error": worst,
    }
    for way, values in seconds.items():
        found[way] = {"seconds": values, "median": statistics.median(values), "min": min(values), "max": max(values)}
    for way in WAYS[1:]:
        found[way]["stateless_over_this"] = found["stateless"]["median"] / found[way]["median"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a result was wrong, 0 otherwise."""
    options = parse(arguments)
    gpus = 0 if options.cpu else visible_gpus()
    began, load = datetime.now(UTC), environment.load_average()
    results = []
    with contextlib.ExitStack() as stack:
        session = Session(options, gpus, stack)
        for size in options.size or ([4096, 16384] if gpus else [1024, 4096]):
            results.append(measure_size(session, size))
            print(line(results[-1]), flush=True)
        workers = session.workers
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        document = {
            "benchmark": "stateful",
            "date": began.isoformat(timespec="seconds"),
            "duration_seconds": (datetime.now(UTC) - began).total_seconds(),
            "revision": revision(),
            "settings": settings | {"workers": workers, "gpus": gpus},
            "hardware": {
                **environment.hardware(),
                "load_average_before": load,
                "load_average_after": environment.load_average(),
            },
            "software": environment.software("numpy", "dask", "distributed", "dask_distmm"),
            "ways": WHAT,
            "results": results,
        }
        report.write(document, options.out)
    # NaN is wrong too.
    return int(not all(one["error"] <= 1 for one in results))


def line(found: dict[str, Any]) -> str:
    """Return one size's figures as a line."""
    first = found["plan_and_first_seconds"]
    parts = [f"N = {found['size']}, {found['method']}; plan and first execution {first * 1e3:.0f} ms"]
    for way in WAYS:
        one = found[way]
        ratio = f" ({one['stateless_over_this']:.2f} x as fast)" if way != "stateless" else ""
        parts.append(f"{way} {one['median'] * 1e3:.1f} ms [{one['min'] * 1e3:.1f}, {one['max'] * 1e3:.1f}]{ratio}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
