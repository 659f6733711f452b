"""Eigenvalues and singular values beside SciPy, and randomized SVD beside stock Dask and scikit-learn: medians.

    python -m benchmarks.spectral [--size 2048 4096] [--kinds eigh svd ...] [--method auto] [--repeat 3] [--out FILE]
    python -m benchmarks.spectral --kinds compressed --rows 1000000 --columns 1000
    python -m benchmarks.spectral --gpu --size 8192 16384
    python -m benchmarks.spectral --gpu --size 512 8192 --kinds eigh eigvalsh --method columns --check --without-alone

CPUs: two worker processes of one thread; SciPy and scikit-learn have two threads in a process of their own. GPUs: one
worker a GPU; cuSOLVER has one GPU, and is called through CuPy. ``wall`` is the time from ``persist()`` to all results
in memory; matrices are in memory before. All matrices are random, those of eigenvalues are Hermitian. Of eigenvalues
that workers share (``--method columns``) the seconds of each stage are printed, those of the slowest worker. With
``--check`` residuals of eigenvalues are printed in units of rounding; one above LAPACK's gate is an error in the end.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_distmm
from benchmarks.linalg import cluster, matrix, module, runs, taken
from benchmarks.revision import revision
from dask_distmm import linalg
from dask_distmm.testing.residuals import GATE
from dask_distmm.tools.bench import environment

KINDS = ("eigh", "eigvalsh", "svd", "svdvals", "polar")
# Singular values that the randomized SVD is asked for.
LEADING = 10
# The steps of eigenvalues that workers share, and what is around them.
STAGES = ("gather", "reduce", "diagonalize", "reflect", "deliver")

OURS: dict[str, Callable[..., Any]] = {
    "eigh": linalg.eigh,
    "eigvalsh": linalg.eigvalsh,
    "svd": linalg.svd,
    "svdvals": linalg.svdvals,
    "polar": linalg.polar,
}


def on_one(n: int, kind: str, dtype: str, repeat: int, gpu: bool) -> float:
    """Return the median time of LAPACK with two threads in this process, or of cuSOLVER on the worker's GPU."""
    import scipy.linalg
    import threadpoolctl

    xp = module("cupy" if gpu else "numpy")

    def polar(a: Any) -> Any:
        u, s, vh = xp.linalg.svd(a)
        return u @ vh, (vh.T * s) @ vh

    calls: dict[str, Callable[[Any], Any]] = {
        "eigh": xp.linalg.eigh,
        "eigvalsh": xp.linalg.eigvalsh,
        "svd": xp.linalg.svd if gpu else scipy.linalg.svd,
        "svdvals": lambda a: xp.linalg.svd(a, compute_uv=False),
        "polar": polar if gpu else scipy.linalg.polar,
    }
    a = xp.random.default_rng(0).standard_normal((n, n)).astype(dtype)

    def timed() -> float:
        started = time.perf_counter()
        calls[kind](a)
        if gpu:
            xp.cuda.Device().synchronize()
        return time.perf_counter() - started

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        return statistics.median([timed() for _ in range(repeat + 1)][1:])


def by_sklearn(rows: int, columns: int, repeat: int) -> float:
    """Return the median time of scikit-learn's randomized SVD with two threads in this process."""
    import threadpoolctl
    from sklearn.utils.extmath import randomized_svd

    a = np.random.default_rng(0).standard_normal((rows, columns))
    found = []
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        for turn in range(repeat):
            started = time.perf_counter()
            randomized_svd(a, LEADING, n_iter=0, power_iteration_normalizer="QR", random_state=turn)
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def apart(call: Callable[..., float], *arguments: Any) -> float:
    """Return what a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def square(client: Client, n: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of one decomposition of square matrices."""
    count, walls = len(client.scheduler_info(n_workers=-1)["workers"]), []
    found: dict[str, Any] = {"size": n, "kind": kind, "dtype": options.dtype, "method": options.method}
    stages: list[dict[str, float]] = []
    for turn in range(options.repeat + 1):
        a = matrix((n, n), -(-n // count), options.dtype, "cupy" if options.gpu else "numpy", turn)
        if kind.startswith("eig"):
            a = (a + a.T).persist()
            wait(a)
        before, started = runs(client), time.perf_counter()
        made = dask.persist(OURS[kind](a, method=options.method))[0]
        wait(made)
        seconds = time.perf_counter() - started
        if options.check and kind.startswith("eig") and not turn:
            found |= residuals(a, *(made if isinstance(made, tuple) else (made, None)))
        walls += [seconds] * bool(turn)
        stages += [stage_seconds(client, before)] * bool(turn)
        del a, made
    found["wall"] = statistics.median(walls)
    found |= {name: statistics.median(one[name] for one in stages) for name in stages[0]}
    if options.without_alone:
        return found
    arguments = n, kind, options.dtype, options.repeat, options.gpu
    alone = client.submit(on_one, *arguments, pure=False).result() if options.gpu else apart(on_one, *arguments)
    return found | {"alone": alone}


def stage_seconds(client: Client, before: int) -> dict[str, float]:
    """Return the seconds of the stages of the newest run, where eigenvalues were shared, of the slowest worker."""
    end = time.monotonic() + 10
    while runs(client) <= before and time.monotonic() < end:
        time.sleep(0.01)
    event = [event for _, event in client.get_events("distmm") if event["action"] == "done"][-1]
    ranks = [rank["timings"] for rank in event["ranks"].values()]
    if not any("reduce" in timings for timings in ranks):
        return {}
    return {name: max(timings.get(name, 0.0) for timings in ranks) for name in STAGES}


def residuals(a: da.Array, w: da.Array, v: da.Array | None) -> dict[str, float]:
    """Return residuals of eigenvalues, and of vectors, divided by n and rounding, in the 1-norm; NaN stays NaN."""
    n, unit = len(a), len(a) * float(np.finfo(a.dtype).eps)
    size = abs(a).sum(axis=0).max()
    # Sums of values and of their squares are the trace and the square of Frobenius' norm.
    wide = w.astype(np.float64)
    diagonal = a.map_blocks(_on_diagonal, dtype=np.float64, meta=a._meta.astype(np.float64)).sum()
    squares = (abs(a).astype(np.float64) ** 2).sum()
    found = {"trace": abs(wide.sum() - diagonal) / (size * unit), "squares": abs((wide**2).sum() - squares) / squares}
    found["squares"] = found["squares"] / unit
    if v is not None:
        error = dask_distmm.matmul(a, v) - v * w
        found["residual"] = abs(error).sum(axis=0).max() / (size * unit)
        gram = dask_distmm.matmul(v, v, op_a="C")
        found["orthogonality"] = abs(gram.map_blocks(_minus_identity, dtype=a.dtype)).sum(axis=0).max() / unit
    values = [float(x) for x in dask.compute(*found.values())]
    print(f"  {n}:", *(f"{name} {value:.3g}" for name, value in zip(found, values, strict=True)), flush=True)
    return dict(zip(found, values, strict=True))


def _on_diagonal(block: Any, block_info: Any = None) -> Any:
    """Return a chunk with zeros beside the diagonal of the matrix."""
    rows, cols = (np.arange(*place, like=block) for place in block_info[0]["array-location"])
    return (block.real * (rows[:, None] == cols)).astype(np.float64)


def _minus_identity(block: Any, block_info: Any = None) -> Any:
    rows, cols = (np.arange(*place, like=block) for place in block_info[0]["array-location"])
    return block - (rows[:, None] == cols)


def compressed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of the randomized SVD of a tall matrix, in chunks of rows."""
    calls = {"wall": linalg.svd_compressed, "dask": da.linalg.svd_compressed}
    found: dict[str, Any] = {"kind": "compressed", "rows": options.rows, "columns": options.columns}
    with cluster(gpu=False):
        shape, chunks = (options.rows, options.columns), (-(-options.rows // 16), options.columns)
        a = da.random.default_rng(0).standard_normal(shape, chunks=chunks).persist()
        wait(a)
        for name, call in calls.items():
            times = [taken(functools.partial(call, k=LEADING, seed=turn), a) for turn in range(options.repeat + 1)]
            found[name] = statistics.median(times[1:])
        del a
    found["sklearn"] = apart(by_sklearn, options.rows, options.columns, options.repeat)
    return found


def main() -> None:
    """Measure, and print one line for each decomposition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[2048])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "compressed"], default=[*KINDS, "compressed"])
    parser.add_argument("--method", choices=["auto", "local", "columns"], default="auto")
    parser.add_argument("--rows", type=int, default=300_000, help="of the matrix of compressed")
    parser.add_argument("--columns", type=int, default=1000, help="of the matrix of compressed")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="without compressed")
    parser.add_argument("--check", action="store_true", help="print residuals of eigenvalues")
    parser.add_argument("--without-alone", action="store_true", help="leave out SciPy or cuSOLVER")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []

    def note(found: dict[str, Any]) -> None:
        results.append(found)
        texts = (f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in found.items())
        print(*texts, flush=True)

    squares = [kind for kind in options.kinds if kind != "compressed"]
    if squares:
        with cluster(options.gpu) as client:
            for n in options.size:
                for kind in squares:
                    note(square(client, n, kind, options))
    if "compressed" in options.kinds and not options.gpu:
        note(compressed(options))
    if options.out is not None:
        software = environment.software("numpy", "scipy", "scikit-learn", "dask", "distributed", "dask_distmm")
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    gated = ("trace", "squares", "residual", "orthogonality")
    # A NaN is not below the gate.
    wrong = [(one, name) for one in results for name in gated if name in one and not one[name] <= GATE]
    if wrong:
        one, name = wrong[0]
        raise SystemExit(f"{one['kind']} of order {one['size']}: {name} is {one[name]:.3g}, expected at most {GATE:g}")


if __name__ == "__main__":
    main()
