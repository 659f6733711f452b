"""Products larger than memory, in waves, as Dask's own tasks and by cubed: seconds, memory and what is spilled.

    python -m benchmarks.waves [--memory 500MiB] [--gram 4] [--tall 2] [--square 1.2] [--limit 120] [--json FILE]

Two worker processes with little memory each. By turns in one run: a Gram matrix of generated and of stored data, a tall
matrix times a small one to Zarr, a square product to Zarr, and one of persisted operands that Dask has spilled; sizes
are GB of an operand. Beside these: reading the same data alone, and the engine's speed on data in memory. cubed, where
it is installed, has two processes and writes what it makes on the way to the same disk. A case that takes longer than
the limit is ended, and said to be.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, wait

from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm import matmul
from dask_distmm.arrays.fallback import dask_matmul

Case = tuple[str, float, Callable[[Any], Any]]
_SAMPLED = 0.05


def sample(dask_worker: Any) -> None:
    """Begin to note the most memory that this worker's process holds, beside what it holds before, and has spilled."""
    import psutil

    process = psutil.Process()
    found = {"before": (held := process.memory_info().rss), "peak": held, "spilled": 0}
    end = threading.Event()

    def look() -> None:
        while not end.wait(_SAMPLED):
            found["peak"] = max(found["peak"], process.memory_info().rss)
            spilled = getattr(dask_worker.data, "spilled_total", None)
            found["spilled"] = max(found["spilled"], spilled.disk if spilled else 0)

    dask_worker._distmm_sample = end, found
    threading.Thread(target=look, daemon=True).start()


def sampled(dask_worker: Any) -> dict[str, int]:
    """End the sampling; return what it found."""
    end, found = dask_worker._distmm_sample
    end.set()
    return dict(found)


def measure(build: Callable[[], Any], memory: int, limit: float) -> dict[str, Any]:
    """Return what one program takes on a cluster of its own, of two workers of one thread.

    `build` returns what is computed, or, once its inputs are in memory, a function that does.
    """
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=memory, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        small = da.ones((64, 64), chunks=32)
        matmul(small, small).compute()
        client.run(sample)
        pids = client.run(os.getpid)
        started, built = time.perf_counter(), build()
        if isinstance(built, FunctionType):
            started, built = time.perf_counter(), built()
        future = client.compute(built)
        found: dict[str, Any] = {"outcome": "done"}
        try:
            wait(future, timeout=limit)
            future.result()
        except TimeoutError:
            found["outcome"] = f"ended after {limit:g} s"
        except Exception as error:
            found["outcome"] = type(error).__name__
        found["seconds"] = time.perf_counter() - started
        future.cancel()
        if client.run(os.getpid) != pids:
            return {**found, "outcome": f"{found['outcome']}, workers were killed"}
        figures = client.run(sampled).values()
        grown = max(one["peak"] - one["before"] for one in figures)
        return {**found, "grown": grown, **{name: max(one[name] for one in figures) for name in ("peak", "spilled")}}


def cases(options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """Yield name, GB that are read at least once, and the program with the product that it is given."""

    def generated(rows: int, cols: int, chunk: int) -> da.Array:
        return da.random.default_rng(1).random((rows, cols), chunks=(chunk, cols))

    cols = 1000
    rows = int(options.gram * 1e9 / 8 / cols) // 2000 * 2000
    stored = folder / "x.zarr"
    with dask.config.set(scheduler="threads"):
        da.to_zarr(generated(rows // 2, cols, 2000), str(stored), compressors=None)

    def from_store() -> da.Array:
        return da.from_zarr(str(stored))

    def total(d: da.Array) -> da.Array:
        return d.sum()

    yield "Gram, generated", rows * cols * 8e-9, lambda product: total(product((x := generated(rows, cols, 2000)).T, x))
    yield "Gram, from Zarr", rows * cols * 4e-9, lambda product: total(product((x := from_store()).T, x))
    tall = int(options.tall * 1e9 / 8 / cols) // 2000 * 2000
    small = np.random.default_rng(2).random((cols, 50))

    def to_store(d: da.Array) -> Any:
        return da.to_zarr(d, str(folder / f"d{time.monotonic_ns()}.zarr"), compute=False)

    yield (
        "tall by small, to Zarr",
        tall * cols * 8e-9,
        lambda product: to_store(product(generated(tall, cols, 2000), da.from_array(small, chunks=-1))),
    )
    side = int((options.square * 1e9 / 8) ** 0.5) // 1000 * 1000

    def square(seed: int) -> da.Array:
        return da.random.default_rng(seed).random((side, side), chunks=1000)

    yield "square, to Zarr", 2 * side * side * 8e-9, lambda product: to_store(product(square(3), square(4)))

    def spilled(product: Any) -> Callable[[], Any]:
        a, b = (square(seed).persist() for seed in (5, 6))
        wait([a, b])
        return lambda: to_store(product(a, b))

    yield "square, persisted, to Zarr", 2 * side * side * 8e-9, spilled
    yield (
        "reading alone, generated",
        rows * cols * 8e-9,
        lambda product: total(generated(rows, cols, 2000).map_blocks(lambda x: x[:1, :1], chunks=(1, 1))),
    )
    yield (
        "reading alone, Zarr",
        rows * cols * 4e-9,
        lambda product: total(from_store().map_blocks(lambda x: x[:1, :1], chunks=(1, 1))),
    )

    few = 8000  # rows that fit

    def multiplied(product: Any) -> Callable[[], Any]:
        x = generated(few, cols, 2000).persist()
        wait(x)
        matmul(x.T + 1, x + 1).compute()  # warm
        return lambda: product(x.T, x).sum()

    yield "multiplying alone", few * cols * 8e-9, multiplied


def by_cubed(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """Return what cubed takes for a case, in processes of its own; None if it is not installed or has no such case."""
    name, _, source = case.lower().partition(" ")
    kind = name.strip(",")
    if kind not in ("gram", "tall", "square") or "persisted" in case or importlib.util.find_spec("cubed") is None:
        return None
    side = int((options.square * 1e9 / 8) ** 0.5) // 1000 * 1000
    rows = {"gram": options.gram, "tall": options.tall, "square": 0.0}[kind] * 1e9 / 8 / 1000 // 2000 * 2000
    shape = (side, side) if kind == "square" else (int(rows), 1000)
    stored = ["--zarr", str(folder / "x.zarr")] if "zarr" in source and kind == "gram" else []
    with tempfile.TemporaryDirectory(dir=folder) as work:
        command = [
            sys.executable,
            "-m",
            "benchmarks.peers.by_cubed",
            kind,
            *map(str, (*shape, parse_bytes(options.memory))),
            work,
        ]
        try:
            ended = subprocess.run(
                [*command, *stored], capture_output=True, text=True, timeout=options.limit, check=True
            )
        except subprocess.TimeoutExpired:
            return {"outcome": f"ended after {options.limit:g} s", "seconds": options.limit}
        except subprocess.CalledProcessError as error:
            return {"outcome": error.stderr.strip().splitlines()[-1][:200], "seconds": math.nan}
    return {"outcome": "done", **json.loads(ended.stdout.splitlines()[-1])}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="500MiB", help="of a worker")
    parser.add_argument("--gram", type=float, default=4.0, help="GB, generated; half of it is stored")
    parser.add_argument("--tall", type=float, default=2.0, help="GB")
    parser.add_argument("--square", type=float, default=1.2, help="GB of an operand")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a case")
    parser.add_argument("--only", nargs="+", default=[""], help="cases by how their names begin")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    memory, found = parse_bytes(options.memory), {}
    with tempfile.TemporaryDirectory() as name:
        for case, size, program in cases(options, Path(name)):
            if not case.startswith(tuple(options.only)):
                continue
            ways = {"waves": matmul, "dask": dask_matmul}
            if "alone" in case:
                ways = {"waves": matmul} if case.startswith("multiplying") else {"dask": dask_matmul}
            calls: dict[str, Callable[[], dict[str, Any] | None]] = {
                way: functools.partial(measure, functools.partial(program, product), memory, options.limit)
                for way, product in ways.items()
            }
            calls["cubed"] = functools.partial(by_cubed, case, options, Path(name))
            for way, call in calls.items():
                if (figures := call()) is None:
                    continue
                found[f"{case}: {way}"] = {**figures, "gigabytes": size}
                print(
                    f"{case:26s} {way:6s} {figures['seconds']:7.1f} s {size / figures['seconds']:6.2f} GB/s  peak "
                    f"{figures.get('peak', 0) / 2**20:5.0f} MiB, {figures.get('spilled', 0) / 2**20:6.0f} MiB spilled  "
                    f"{figures['outcome']}",
                    flush=True,
                )
    if options.json:
        software = environment.software("numpy", "dask", "distributed", "dask_distmm", "zarr")
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        with open(options.json, "w") as file:
            json.dump({**about, "memory": memory, "cases": found}, file, indent=1)


if __name__ == "__main__":
    main()
