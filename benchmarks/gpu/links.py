"""How fast GPUs pull from each other: ``python -m benchmarks.gpu.links``, on a host with N GPUs.

What the peer engine rests on: copies out of memory of other GPUs by copy engines, in one piece and in rows, from one
to all others at a time, all GPUs at once; the first one after an idle moment; many small ones (chunks of a 16 x 16
grid) issued one by one, as one batch, and by one kernel; what mapping costs; and what GEMMs lose to copies that go on.
The figures are for ``distmm.machine.peer`` (`bandwidth`, `exposed`) and for the constants of
`dask_distmm.engines.peer.engine`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One piece, and rows of so many bytes out of rows four times as long.
WIDTHS = (0, 512, 2048, 8192, 32768, 131072)
# Edges of bfloat16 chunks, and how many are pulled: half of a 16 x 16 grid.
EDGES, COUNT = (256, 512, 1024), 128
# How: calls of cudaMemcpy2DAsync, one of cuMemcpy3DBatchAsync (with its hint to leave multiprocessors alone), a kernel.
WAYS = ("copies", "batch", "batch, overlap", "kernel")
# The first pull after an idle moment, seconds from one to the next one.
FIRST_BYTES, IDLE = 2**25, 0.05
_KEPT: dict[str, Any] = {}


def export(size: int) -> list[Any]:
    """Return the handle of new memory on this worker."""
    import cupy

    from dask_distmm.engines.peer.memory import Exporter

    exporter = _KEPT.setdefault("exporter", Exporter())
    _KEPT["memory"] = memory = cupy.ones(size, cupy.uint8)
    cupy.cuda.Stream.null.synchronize()
    allocation = exporter.find(memory.data.ptr)
    return [exporter.process, list(allocation), memory.data.ptr - allocation.address]


def pull(offers: Sequence[Any], width: int, streams: int, kernel: bool, repeat: int, begin: float) -> dict[str, float]:
    """Pull from the next GPUs, all workers at the same time; return GB/s of this one."""
    import cupy

    from dask_distmm.engines.gpu.copy_kernels import Rectangle, copy_rectangles, make_copies, table_of
    from dask_distmm.engines.peer.memory import Mappings
    from dask_distmm.engines.peer.offers import Allocation
    from dask_distmm.layout.rectangles import Span

    mappings = _KEPT.setdefault("mappings", Mappings())
    own = _KEPT["exporter"].process
    me = [process for process, _, _ in offers].index(own)
    others = [offers[(me + 1 + i) % len(offers)] for i in range(len(offers) - 1)][:streams]
    mapped = []
    started = time.perf_counter()
    for process, allocation, offset in others:
        mapped.append(mappings.open(process, Allocation(*allocation)) + offset)
    opening = (time.perf_counter() - started) / max(1, len(others))
    size = _KEPT["memory"].size // 4
    targets = [_KEPT.setdefault(f"target{i}", cupy.empty(size, cupy.uint8)) for i in range(len(mapped))]
    flows = [cupy.cuda.Stream(non_blocking=True) for _ in mapped]
    rows, cols = (1, size) if not width else (size // width, width)
    stride = cols if not width else 4 * width
    found = [
        Rectangle(Span(p, stride, 1), Span(t.data.ptr, cols, 1), rows, cols)
        for p, t in zip(mapped, targets, strict=True)
    ]
    ready: list[Any] = make_copies([table_of([one], 1) for one in found], 1)
    if kernel:
        ready = [launch for (launch,) in copy_rectangles([table_of([one], 1) for one in found], 1)]
    cupy.cuda.Stream.null.synchronize()
    time.sleep(max(0.0, begin - time.time()))
    marks = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in flows]
    for flow, (first, _) in zip(flows, marks, strict=True):
        first.record(flow)
    for _ in range(repeat):
        for flow, one in zip(flows, ready, strict=True):
            one.run(flow)
    for flow, (_, last) in zip(flows, marks, strict=True):
        last.record(flow)
        last.synchronize()
    seconds = max(cupy.cuda.get_elapsed_time(*mark) for mark in marks) / 1e3
    good = all(int(target[:: max(1, size // 997)].min()) == 1 for target in targets)
    return {"GB/s": repeat * size * len(mapped) / seconds / 1e9, "open_ms": opening * 1e3, "right": good}


def next_source(offers: Sequence[Any]) -> int:
    """Return where the next GPU's memory is in this process."""
    from dask_distmm.engines.peer.offers import Allocation

    me = [process for process, _, _ in offers].index(_KEPT["exporter"].process)
    process, allocation, offset = offers[(me + 1) % len(offers)]
    return int(_KEPT["mappings"].open(process, Allocation(*allocation)) + offset)


def first_pull(offers: Sequence[Any], woken: float, begin: float) -> dict[str, float]:
    """Pull from the next GPU after an idle moment, and again; return the median milliseconds of both, and the most.

    With `woken` a little is read of that GPU so many milliseconds before.
    """
    import cupy

    from dask_distmm.engines.peer.engine import ENGINE

    source, runtime = next_source(offers), cupy.cuda.runtime
    target = cupy.empty(FIRST_BYTES, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    for turn in range(15):
        time.sleep(max(0.0, begin + turn * IDLE - time.time()))
        if woken:
            ENGINE.wake(source, FIRST_BYTES)
            ENGINE.looking.synchronize()
            end = time.perf_counter() + woken / 1e3
            while time.perf_counter() < end:
                pass
        marks = [cupy.cuda.Event() for _ in range(3)]
        for mark in marks[:-1]:
            mark.record(stream)
            runtime.memcpyAsync(target.data.ptr, source, FIRST_BYTES, runtime.memcpyDefault, stream.ptr)
        marks[-1].record(stream)
        marks[-1].synchronize()
        found.append([cupy.cuda.get_elapsed_time(*pair) for pair in itertools.pairwise(marks)])
    first, second = (sorted(one[at] for one in found) for at in (0, 1))
    return {"first_ms": first[len(first) // 2], "most_ms": first[-1], "second_ms": second[len(second) // 2]}


def pieces(offers: Sequence[Any], edge: int, way: str, begin: float) -> dict[str, Any]:
    """Pull many chunks of the next GPU to their places in a matrix; return milliseconds of the host and of the GPU."""
    import cupy

    from benchmarks.gpu.batch import Batch
    from dask_distmm.engines.gpu.copy_kernels import Rectangle, copy_rectangles, make_copies, table_of
    from dask_distmm.layout.rectangles import Span

    source = next_source(offers)
    width, across = 2 * edge, 16
    target = cupy.zeros((COUNT // across * edge, across * width), cupy.uint8)
    found = []
    for number in range(COUNT):
        at = target.data.ptr + number // across * edge * across * width + number % across * width
        found.append(
            Rectangle(Span(source + number * edge * width, width, 1), Span(at, across * width, 1), edge, width)
        )
    ready: Any
    if way == "kernel":
        ((ready,),) = copy_rectangles([table_of(found, 1)], 1)
    elif way == "copies":
        (ready,) = make_copies([table_of(found, 1)], 1)
    else:
        ready = Batch(found, overlap=way.endswith("overlap"))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    time.sleep(max(0.0, begin - time.time()))
    host, device = [], []
    for _ in range(5):
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(stream)
        started = time.perf_counter()
        ready.run(stream)
        host.append(time.perf_counter() - started)
        last.record(stream)
        last.synchronize()
        device.append(cupy.cuda.get_elapsed_time(first, last))
        time.sleep(0.005)
    return {"host_ms": 1e3 * sorted(host)[2], "ms": sorted(device)[2], "right": int(target.min()) == 1}


def beside(offers: Sequence[Any], n: int, dtype: str, how: str, begin: float) -> float:
    """Return TFLOP/s of GEMMs on this GPU: alone, or beside pulls in one piece, or in batches, on another stream."""
    import cupy

    from benchmarks.gpu.batch import Batch
    from benchmarks.gpu.matrices import make_chunk
    from dask_distmm.engines.gpu.copy_kernels import Rectangle
    from dask_distmm.engines.gpu.gemm import Gemm, GemmShape, GemmTypes, MatrixRef
    from dask_distmm.layout.rectangles import Span

    kind = GemmTypes(dtype, dtype, dtype)
    a, b, d = (make_chunk((n, n), dtype, seed) for seed in range(3))
    source = next_source(offers)
    size = _KEPT["memory"].size // 4
    target = _KEPT.setdefault("target0", cupy.empty(size, cupy.uint8))
    gemms, pulls = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    shape, runtime = GemmShape(n, n, n, True, ("N", "N")), cupy.cuda.runtime
    matrices = [MatrixRef(x.data.ptr, n) for x in (a, b, d)]
    rows, width = size // COUNT // 1024, 1024
    steps = [i * rows * width for i in range(COUNT)]
    found = [Rectangle(Span(source + at, width, 1), Span(target.data.ptr + at, width, 1), rows, width) for at in steps]
    batch = Batch(found, overlap="overlap" in how) if "batch" in how else None
    gemm = Gemm(shape, kind, *matrices)
    gemm.run(gemms)
    cupy.cuda.Device().synchronize()
    time.sleep(max(0.0, begin - time.time()))
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record(gemms)
    count = 10
    for _ in range(count):
        gemm.run(gemms)
    last.record(gemms)
    while how != "alone" and not last.done:
        if batch is not None:
            batch.run(pulls)
        else:
            runtime.memcpyAsync(target.data.ptr, source, size, runtime.memcpyDefault, pulls.ptr)
        pulls.synchronize()
    last.synchronize()
    pulls.synchronize()
    return float(2 * n**3 * count / (cupy.cuda.get_elapsed_time(first, last) / 1e3) / 1e12)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.links", description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024, help="of memory on each GPU; a quarter is pulled")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    results: list[dict[str, Any]] = []
    with (
        LocalCUDACluster(n_workers=options.gpus, protocol="tcp", dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(options.gpus, timeout=60)
        offers = list(client.run(export, options.megabytes << 20).values())
        for streams in range(1, options.gpus):
            for kernel in (False, True):
                for width in WIDTHS:
                    found = list(client.run(pull, offers, width, streams, kernel, 8, time.time() + 0.5).values())
                    row = {
                        "rows": width or "one piece",
                        "from": streams,
                        "by": "kernel" if kernel else "copy engine",
                        "GB/s": round(min(one["GB/s"] for one in found), 1),
                        "open_ms": round(max(one["open_ms"] for one in found), 3),
                        "right": all(one["right"] for one in found),
                    }
                    results.append(row)
                    print(row, flush=True)
        for woken in (0.0, 0.1, 0.5, 2.0):
            rows = list(client.run(first_pull, offers, woken, time.time() + 0.5).values())
            how = f"something read {woken} ms before" if woken else "as it is"
            row = {"32 MiB after 50 ms of nothing": how}
            row |= {name: round(max(one[name] for one in rows), 3) for name in rows[0]}
            results.append(row)
            print(row, flush=True)
        for edge in EDGES:
            for way in WAYS:
                many = list(client.run(pieces, offers, edge, way, time.time() + 0.5).values())
                row = {"pieces": f"{COUNT} of {edge} x {edge} bfloat16", "by": way}
                row |= {name: round(max(one[name] for one in many), 3) for name in ("host_ms", "ms")}
                row["right"] = all(one["right"] for one in many)
                results.append(row)
                print(row, flush=True)
        for dtype in ("bfloat16", "float64", "float32"):
            row = {"GEMM": dtype}
            for how in ("alone", "beside pulls", "beside batches", "beside batches, overlap"):
                row[how] = round(min(client.run(beside, offers, 8192, dtype, how, time.time() + 1).values()), 1)
            results.append(row)
            print(row, flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    # Workers are to find the functions, and what these keep, in a module of this name.
    raise SystemExit(importlib.import_module("benchmarks.gpu.links").main())
