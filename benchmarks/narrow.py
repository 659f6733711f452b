"""FP8 and compute types on GPUs against the types that they stand in for: ``python -m benchmarks.narrow``.

One run multiplies the same shapes in bfloat16, FP8 (E4M3 by E4M3 to bfloat16), and float32 and float64 with their
compute types, from persisted chunks to persisted chunks. Accuracy is measured at a smaller size, on some rows,
against float64 (extended precision for float64 itself), relative to ``sum |a| |b|``.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_distmm
from benchmarks.gpu.matrices import as_dtype, make_block
from benchmarks.harness import environment
from benchmarks.revision import revision

WAYS = {
    "bfloat16": ("bfloat16", None),
    "float8_e4m3": ("float32", None),
    "float32": ("float32", None),
    "float32, tf32": ("float32", "tf32"),
    "float32, bf16x9": ("float32", "bf16x9"),
    "float64": ("float64", None),
    "float64, emulated": ("float64", "fp64_emulated"),
}


def matrix(client: Client, n: int, grid: int, dtype: str) -> da.Array:
    """Return a fresh standard normal matrix on the GPUs."""
    import cupy

    cuts = da.core.normalize_chunks((n // grid, n // grid), (n, n))
    kind = as_dtype(dtype)
    made = da.map_blocks(
        make_block, dtype, secrets.randbits(30), chunks=cuts, dtype=kind, meta=cupy.empty((0, 0), kind)
    )
    made = client.persist(made)
    wait(made)
    return made


def multiply(client: Client, way: str, a: da.Array, b: da.Array) -> tuple[da.Array, float, dict[str, Any]]:
    """Return the product, the seconds from chunks in memory to chunks in memory, and what the run's event says."""
    options: dict[str, Any] = {"compute_type": WAYS[way][1]}
    if way.startswith("float8"):
        (a, scale_a), (b, scale_b) = (dask_distmm.quantize(x, "float8_e4m3") for x in (a, b))
        a, b, scale_a, scale_b = client.persist([a, b, scale_a, scale_b])
        wait([a, b, scale_a, scale_b])
        scales = {"a": float(scale_a.compute()), "b": float(scale_b.compute())}
        options |= {"a_type": "float8_e4m3", "b_type": "float8_e4m3", "result_type": "bfloat16"}
        options["quantization_scales"] = scales
    began = time.perf_counter()
    d = client.persist(dask_distmm.matmul(a, b, **options))
    wait(d)
    seconds = time.perf_counter() - began
    event = [event for _, event in client.get_events("distmm") if event["action"] == "done"][-1]
    return d, seconds, dict(event)


def measure(client: Client, way: str, n: int, grid: int, repeat: int) -> dict[str, Any]:
    """Return medians over `repeat` rounds; one before does not count."""
    found: dict[str, list[float]] = {"wall": [], "run": [], "multiply": []}
    for turn in range(repeat + 1):
        a, b = (matrix(client, n, grid, WAYS[way][0]) for _ in "ab")
        d, seconds, event = multiply(client, way, a, b)
        del a, b, d
        if turn:
            for name, value in zip(found, (seconds, event["seconds"], event["timings"]["multiply"]), strict=True):
                found[name].append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"way": way, "n": n, "chunks": grid, "median": medians, "seconds": found}


def accuracy(client: Client, way: str, n: int) -> float:
    """Return the largest error on some rows, relative to ``sum |a| |b|`` of the operands before they were quantized."""
    a, b = (matrix(client, n, 2, WAYS[way][0]) for _ in "ab")
    d, _, _ = multiply(client, way, a, b)
    wide = np.longdouble if WAYS[way][0] == "float64" else np.float64
    rows = slice(n // 2 - 4, n // 2 + 4)
    x, y, z = (_host(client, v) for v in (a, b, d))
    x, z = x[rows].astype(wide), z[rows].astype(wide)
    y = y.astype(wide)
    return float((abs(z - x @ y) / (abs(x) @ abs(y))).max())


def _host(client: Client, x: da.Array) -> Any:
    """Return an array on the host, by way of float32 where its type gets lost between processes."""
    import cupy

    dtype = np.dtype("float32") if x.dtype.itemsize == 2 else x.dtype
    wide = x.map_blocks(lambda part: part.astype(dtype), dtype=dtype, meta=cupy.empty((0, 0), dtype))
    return client.compute(wide).result().get()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.narrow", description=__doc__)
    parser.add_argument("--size", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--chunks", type=int, default=8, help="chunks per side")
    parser.add_argument("--accuracy-size", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/narrow-gpu.json"))
    options = parser.parse_args()
    from dask_cuda import LocalCUDACluster

    document: dict[str, Any] = {
        "schema_version": 1,
        "benchmark": "narrow",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "hardware": environment.hardware(),
        "software": environment.software("numpy", "dask", "distributed", "cupy-cuda13x", "nvidia-cublasmp-cu13"),
        "accuracy": {},
        "results": [],
    }
    with (
        LocalCUDACluster(protocol="ucx", dashboard_address="127.0.0.1:0", silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        document["gpus"] = len(client.nthreads())
        for way in options.ways:
            try:
                document["accuracy"][way] = accuracy(client, way, options.accuracy_size)
                print(f"{way:18s} largest error / sum |a||b|: {document['accuracy'][way]:.2e}", flush=True)
            except Exception as error:
                document["accuracy"][way] = f"{type(error).__name__}: {error}"[:300]
                print(f"{way:18s} {document['accuracy'][way]}", flush=True)
                continue
            for n in options.size:
                found = measure(client, way, n, options.chunks, options.repeat)
                document["results"].append(found)
                ms = {name: seconds * 1e3 for name, seconds in found["median"].items()}
                rate = 2e-9 * n**3 / document["gpus"] / ms["multiply"]
                text = f"  N={n}: multiply {ms['multiply']:.1f} ms ({rate:.0f} TFLOP/s a GPU)"
                print(f"{text}, run {ms['run']:.1f}, wall {ms['wall']:.1f} ms", flush=True)
                options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
