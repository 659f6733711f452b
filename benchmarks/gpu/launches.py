"""What the first launch after an idle moment costs: ``python -m benchmarks.gpu.launches``, on one GPU.

A run begins with a product after its worker has waited for others. How long that takes to begin, for the host and for
the GPU, by the library's call and as a CUDA graph: after an idle moment, and with something small that is put on the
stream at its end, or before the last millisecond of it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# Idle milliseconds in all.
IDLE = (0.0, 0.2, 1.0, 5.0)
# And those of them after what is done before the launch, where that is not done at the end.
LATER = 1.0


def measure(run: Callable[[], None], before: Callable[[], None], stream: Any, first: float, then: float) -> list[float]:
    """Return milliseconds that a launch takes of the host, and until it is over on the GPU from the mark before it.

    Parameters
    ----------
    run
        What is measured.
    before
        Done after `first` milliseconds of sleep, with `then` more following.
    """
    import cupy

    host, device = [], []
    for _ in range(15):
        stream.synchronize()
        time.sleep(first / 1e3)
        before()
        time.sleep(then / 1e3)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        started = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - started))
        end.record(stream)
        end.synchronize()
        device.append(cupy.cuda.get_elapsed_time(begin, end))
    return [statistics.median(host), statistics.median(device)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.launches", description=__doc__)
    parser.add_argument("--size", type=int, default=2048, help="rows of the square product")
    parser.add_argument("--type", default="bfloat16")
    options = parser.parse_args(arguments)
    import cupy

    from benchmarks.gpu.matrices import make_chunk
    from dask_distmm.engines.gpu.gemm import Gemm, GemmShape, GemmTypes, MatrixRef

    kinds, stream = GemmTypes(options.type, options.type, options.type), cupy.cuda.Stream(non_blocking=True)
    kept = []

    def product(n: int) -> Callable[[], None]:
        matrices = [make_chunk((n, n), options.type, seed) for seed in range(3)]
        kept.extend(matrices)
        gemm = Gemm(GemmShape(n, n, n, True, ("N", "N")), kinds, *(MatrixRef(x.data.ptr, n) for x in matrices))
        return lambda: gemm.run(stream)

    large, small, word = product(options.size), product(64), cupy.zeros(1, cupy.int32)

    def spin(seconds: float = 1e-3) -> None:
        """Put words on the stream, one at a time, for a while."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            word.data.memset_async(0, 4, stream)
            stream.synchronize()

    for run in (large, small, spin):
        run()
    cupy.cuda.Device().synchronize()
    befores: dict[str, Callable[[], None]] = {
        "nothing": lambda: None,
        "a word set": lambda: word.data.memset_async(0, 4, stream),
        "words set for 1 ms": spin,
        "a small product": small,
        "a small product, over": lambda: (small(), stream.synchronize())[1],
    }
    stream.begin_capture()
    large()
    graph = stream.end_capture()
    graph.upload(stream)
    runs: dict[str, Callable[[], None]] = {"call": large, "graph": lambda: graph.launch(stream)}
    for (how, run), (what, before), idle in itertools.product(runs.items(), befores.items(), IDLE):
        for then in (0.0, LATER) if idle > LATER and what != "nothing" else (0.0,):
            host, device = measure(run, before, stream, idle - then, then)
            when = f"{idle:3.1f} ms idle" + (f", {then:.0f} of them after it" if then else "")
            print(f"{how:6} {what:24} {when}: host {host:.3f} ms, GPU {device:.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(importlib.import_module("benchmarks.gpu.launches").main())
