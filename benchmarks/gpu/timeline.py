"""What each GPU does when, in a product by the peer engine: ``python -m benchmarks.gpu.timeline``.

Prints, for each worker, pulls and GEMMs of the last of a few runs with their begin and end in milliseconds, rates, when
the host put them on their streams, and for how long the GPU multiplied. For tuning: panel sizes, streams, the order of
turns.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cases import SLABS, Case, square


def trace(on: bool) -> list[Any]:
    """Begin a trace on this worker, or end it and return it."""
    from dask_distmm.engines.base import get_engine

    engine: Any = get_engine("peer")
    found, engine.trace = engine.trace, [] if on else None
    return [[tuple(step) for step in run] for run in found or ()]


def lines(steps: Sequence[tuple[str, int, float, float, float, float, float]]) -> list[str]:
    """Return one worker's steps as text, and what its GEMMs left idle."""
    found, busy, last = [], 0.0, 0.0
    for what, number, amount, begin, end, put, over in sorted(steps, key=lambda step: step[3]):
        rate = amount / max(1e-9, (end - begin) / 1e3)
        text = f"{rate / 1e12:8.1f} TFLOP/s" if what == "GEMM" else f"{rate / 1e9:8.1f} GB/s"
        found.append(f"  {begin:9.3f} {end:9.3f}  {what} {number:<4}{text}   host {put:8.3f} {over:8.3f}")
        if what == "GEMM":
            busy, last = busy + end - begin, max(last, end)
    return [*found, f"  multiplying for {busy:.3f} of {last:.3f} ms"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.timeline", description=__doc__)
    add = parser.add_argument
    add("--gpus", type=int, default=4)
    add("--sizes", type=int, nargs="+", default=[16384])
    add("--type", default="bfloat16")
    add("--chunks", nargs="+", default=[SLABS], help="or 4x4, 16x16 and so on")
    add("--method", default="auto")
    options = parser.parse_args(arguments)
    from benchmarks.gpu.clusters import Cluster
    from benchmarks.gpu.devices import find_gpus

    devices = find_gpus()[0][: options.gpus]
    setup = {"gpus": options.gpus, "devices": devices, "protocol": "tcp", "rmm_pool_size": None}
    cluster = Cluster(0, 1, 0, setup)
    try:
        for size, chunks in itertools.product(options.sizes, options.chunks):
            case = Case("peer", chunks, options.type, square(size), 3, method=options.method)
            cluster.client.run(trace, True)
            answer = cluster.measure(case)
            names = ("method", "grid", "error", "failure", "run_seconds", "timings")
            print(f"N={size}, {chunks}:", {key: answer.get(key) for key in names}, flush=True)
            for address, runs in cluster.client.run(trace, False).items():
                print(address)
                print("\n".join(lines(runs[-1])) if runs else "  no run", flush=True)
    finally:
        cluster.close()
    return 0


if __name__ == "__main__":
    # Workers are to find the functions in a module of this name.
    raise SystemExit(importlib.import_module("benchmarks.gpu.timeline").main())
