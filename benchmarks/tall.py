"""Tall matrices on two worker processes of one thread each: ``python -m benchmarks.tall``.

For each function and shape, the time from the call to all results in memory, the best of some rounds on fresh chunks
that are in memory: stock Dask, under ``enable()``, ``dask_distmm.linalg``, and the kernels alone: two processes at once
do to half of the rows what a rank does, in plain NumPy and SciPy, without messages. The aim is 1.25 times these, and 50
ms more. With ``--gpu`` chunks are CuPy's, on two GPUs, without the kernels alone.

``--stored 10`` measures in place of these a matrix of 10 GB in a Zarr store, on workers of 500 MiB: reading it once, a
PCA and ridge regression, by turns, out of files that the system has not cached.
"""

from __future__ import annotations

import os

for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import secrets  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import numpy as np  # noqa: E402
import scipy.linalg  # noqa: E402
from distributed import Client, futures_of, get_client, wait  # noqa: E402

import dask_distmm  # noqa: E402
from benchmarks.harness import environment  # noqa: E402
from benchmarks.harness.cluster import started, synchronize  # noqa: E402
from benchmarks.revision import revision  # noqa: E402
from benchmarks.waves import measure as measure_alone  # noqa: E402
from dask_distmm import linalg  # noqa: E402
from dask_distmm.planning.program import ProgramPlacement  # noqa: E402

# Rows, columns, chunks.
SHAPES = [(200_000, 256, 8), (1_000_000, 50, 16), (20_000, 64, 8)]
GPU_SHAPES = [(400_000, 512, 8), (4_000_000, 64, 16), (2_000_000, 256, 8)]
ROUNDS = 5
AIM = 1.25, 0.05
# Of the stored matrix: columns, rows of a chunk, memory of a worker, and deviations of its first columns.
COLS, CHUNK, MEMORY, DEVIATIONS = 256, 8192, 500 * 2**20, np.array([10.0, 8.0, 6.0, 4.0, 2.0])

Matrix = Any


def _divide(a: Matrix, r: Matrix) -> Matrix:
    return scipy.linalg.blas.dtrsm(1, r, a.T, 0, 0, 1, overwrite_b=1).T


def _qr(a: Matrix) -> tuple[Matrix, Matrix]:
    q = _divide(a.copy(), first := scipy.linalg.cholesky(a.T @ a))
    return _divide(q, second := scipy.linalg.cholesky(q.T @ q)), second @ first


def _svd(a: Matrix) -> Matrix:
    q, r = _qr(a)
    return q @ np.linalg.svd(r)[0]


def _lstsq(a: Matrix, b: Matrix) -> Matrix:
    factor = scipy.linalg.cho_factor(a.T @ a)
    x = scipy.linalg.cho_solve(factor, a.T @ b)
    return x + scipy.linalg.cho_solve(factor, a.T @ (b - a @ x))


def _compressed(a: Matrix) -> Matrix:
    q, _ = _qr(a @ np.random.default_rng(0).standard_normal((a.shape[1], 20)))
    q, _ = _qr(a @ np.linalg.qr(a.T @ q)[0])
    return q @ np.linalg.svd(q.T @ a, full_matrices=False)[0][:, :10]


def _pca(a: Matrix) -> Matrix:
    gram = np.zeros((a.shape[1],) * 2)
    for rows in np.array_split(a, max(1, a.nbytes // 2**22)):
        gram += (centred := rows - rows.mean(axis=0)).T @ centred
    return np.linalg.eigh(gram)


# By function: stock, ours (of a, b and the number of the round), and the kernels (of half of a, half of b).
Case = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
CASES: dict[str, Case] = {
    "qr, R": (
        lambda a, b, i: da.linalg.qr(a)[1],
        lambda a, b, i: linalg.qr(a, "r"),
        lambda a, b: scipy.linalg.cholesky(a.T @ a),
    ),
    "qr, Q and R": (lambda a, b, i: da.linalg.qr(a), lambda a, b, i: linalg.qr(a), lambda a, b: _qr(a)),
    "lstsq": (lambda a, b, i: da.linalg.lstsq(a, b)[:2], lambda a, b, i: linalg.lstsq(a, b)[:2], _lstsq),
    "svd": (lambda a, b, i: da.linalg.svd(a), lambda a, b, i: linalg.svd(a, full_matrices=False), lambda a, b: _svd(a)),
    "svd_compressed": (
        lambda a, b, i: da.linalg.svd_compressed(a, 10, n_power_iter=1, seed=i),
        lambda a, b, i: linalg.svd_compressed(a, 10, n_power_iter=1, seed=i),
        lambda a, b: _compressed(a),
    ),
    "pca, 5": (
        lambda a, b, i: [x[:5] for x in da.linalg.svd(a - a.mean(axis=0))[1:]],
        lambda a, b, i: linalg.pca(a, 5),
        lambda a, b: _pca(a),
    ),
    "ridge": (
        lambda a, b, i: da.linalg.solve(a.T @ a + da.eye(a.shape[1], chunks=a.shape[1]), a.T @ b),
        lambda a, b, i: linalg.ridge(a, b, 1.0),
        lambda a, b: np.linalg.solve(a.T @ a + np.eye(a.shape[1]), a.T @ b),
    ),
}


def _best_alone(kernels: Callable[..., Any], a: Matrix, b: Matrix) -> float:
    """Return the best time of two processes that do the same at once."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.SimpleQueue()

    def work() -> None:
        seconds = []
        for _ in range(ROUNDS):
            barrier.wait()
            began = time.perf_counter()
            kernels(a, b)
            seconds.append(time.perf_counter() - began)
        queue.put(min(seconds))

    workers = [context.Process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(float(queue.get()), float(queue.get()))


def _fresh(rows: int, cols: int, chunks: int, gpu: bool) -> da.Array:
    if gpu:
        import cupy

        state = da.random.RandomState(secrets.randbits(30), RandomState=cupy.random.RandomState)
        made = state.standard_normal((rows, cols), chunks=(rows // chunks, cols)).persist()
    else:
        random = da.random.default_rng(secrets.randbits(30))
        made = random.standard_normal((rows, cols), chunks=(rows // chunks, cols)).persist()
    wait(made)
    return made


def _seconds(
    function: Callable[..., Any], shape: tuple[int, int, int], number: int, client: Client, gpu: bool
) -> float:
    """Return the seconds of one call on fresh chunks; NaN if it fails, as some of Dask's do of CuPy chunks."""
    a, b = _fresh(*shape, gpu), _fresh(shape[0], 1, shape[2], gpu)
    if gpu:
        client.run(synchronize)
    began = time.perf_counter()
    try:
        found = function(a, b, number)
        found = dask.persist(*(found if isinstance(found, tuple | list) else [found]))
        wait(found)
        if any(future.status != "finished" for future in futures_of(found)):
            return float("nan")
    except Exception:
        return float("nan")
    if gpu:
        client.run(synchronize)
    return time.perf_counter() - began


def measure(shape: tuple[int, int, int], names: list[str], client: Client, gpu: bool) -> None:
    """Print the table of one shape; the ways take turns."""
    random = np.random.default_rng()
    half = () if gpu else tuple(random.standard_normal((shape[0] // 2, cols)) for cols in (shape[1], 1))
    print(f"{shape[0]} x {shape[1]}, {shape[2]} chunks: ms, best of {ROUNDS}")
    print(f"  {'':16}{'stock':>8}{'enable':>8}{'linalg':>8}{'kernels':>9}{'aim':>8}")
    for name in names:
        stock, ours, kernels = CASES[name]
        found: dict[str, list[float]] = {"stock": [], "enable": [], "linalg": []}
        for number in range(ROUNDS + 1):
            for way, seconds in found.items():
                with dask.config.set({"array.slicing.split-large-chunks": False}):
                    if way == "enable":
                        dask_distmm.enable()
                    seconds.append(_seconds(ours if way == "linalg" else stock, shape, number, client, gpu))
                    dask_distmm.disable()
        best = [min(seconds[1:]) for seconds in found.values()]
        figures = "".join(f"{seconds * 1e3:8.0f}" for seconds in best)
        if gpu:
            print(f"  {name:16}{figures}", flush=True)
            continue
        alone = _best_alone(kernels, *half)
        aim = AIM[0] * alone + AIM[1]
        verdict = "" if best[-1] <= aim else f"  {best[-1] / aim:.2f} x"
        print(f"  {name:16}{figures}{alone * 1e3:9.1f}{aim * 1e3:8.0f}{verdict}", flush=True)


def _uncache(folder: Path) -> None:
    """Have the system forget the contents of files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _from_store(build: Callable[[da.Array], Any], folder: str) -> Any:
    return build(da.from_zarr(folder))


def _passes(result: da.Array) -> float:
    """Return how many times A is read."""
    plan = linalg.explain(result)
    assert isinstance(plan, ProgramPlacement)
    return float(plan.cost.passes)


def measure_stored(gigabytes: float, rounds: int) -> dict[str, Any]:
    """Print and return what functions of a matrix in a Zarr store take, beside reading it once."""
    rows = int(gigabytes * 1e9 / 8 / COLS) // CHUNK * CHUNK
    found: dict[str, Any] = {}

    def read(x: da.Array) -> da.Array:
        return x.map_blocks(lambda chunk: chunk[:1, :1], chunks=(1, 1)).sum()

    def pca(x: da.Array) -> Callable[[], da.Array]:
        results = linalg.pca(x, len(DEVIATIONS))
        found["pca, 5"]["passes"] = _passes(results[0])

        def run() -> da.Array:
            _, variances, _ = dask.compute(*results)
            np.testing.assert_allclose(variances, DEVIATIONS**2, rtol=0.01)
            return da.ones(1)

        return run

    def ridge(x: da.Array) -> Callable[[], da.Array]:
        y = da.random.default_rng(2).standard_normal((rows, 1), chunks=(CHUNK, 1))
        weights = linalg.ridge(x, y, list(range(20)))
        found["ridge, 20 values of alpha"]["passes"] = _passes(weights)

        def run() -> da.Array:
            weights.compute()
            # It needs no second pass to refine the solution, as where columns are nearly dependent.
            (*_, (_, done)) = get_client().get_events("distmm")
            assert not any("residual()" in rank["timings"] for rank in done["ranks"].values())
            return da.ones(1)

        return run

    cases: dict[str, Callable[[da.Array], Any]] = {"read": read, "pca, 5": pca, "ridge, 20 values of alpha": ridge}
    found |= {name: {"passes": 1, "seconds": [], "grown": []} for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        scale = np.r_[DEVIATIONS, np.ones(COLS - len(DEVIATIONS))]
        x = da.random.default_rng(1).standard_normal((rows, COLS), chunks=(CHUNK, COLS)) * scale
        with dask.config.set(scheduler="threads"):
            da.to_zarr(x, folder, compressors=None)
        for _ in range(rounds):
            for name, build in cases.items():
                _uncache(Path(folder))
                figures = measure_alone(functools.partial(_from_store, build, folder), MEMORY, 600.0)
                assert figures["outcome"] == "done", figures
                for key in ("seconds", "grown"):
                    found[name][key].append(figures[key])
    alone = min(found["read"]["seconds"])
    for name, one in found.items():
        best, grown = min(one["seconds"]), max(one["grown"])
        print(
            f"{name:26}{best:8.1f} s of {', '.join(f'{seconds:.1f}' for seconds in one['seconds'])}  passes "
            f"{one['passes']:g}  {best / alone / one['passes']:5.2f} x reading  {grown / 2**20:5.0f} MiB more"
        )
    return {"rows": rows, "cols": COLS, "chunk": CHUNK, "memory": MEMORY, "cases": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--shapes", nargs="*", type=int, default=list(range(len(SHAPES))), help="numbers of shapes")
    parser.add_argument("--gpu", action="store_true", help="CuPy chunks on two GPUs")
    parser.add_argument("--protocol", default="ucx", help="of the cluster of GPUs")
    parser.add_argument("--stored", type=float, metavar="GB", help="a matrix in a Zarr store, in place of these")
    parser.add_argument("--rounds", type=int, default=3, help="of a stored matrix")
    parser.add_argument("--json", help="file for the figures of a stored matrix")
    arguments = parser.parse_args()
    if arguments.stored:
        figures = measure_stored(arguments.stored, arguments.rounds)
        if arguments.json:
            software = environment.software("numpy", "dask", "distributed", "dask_distmm", "zarr")
            about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
            Path(arguments.json).write_text(json.dumps({**about, **figures}, indent=1) + "\n")
        raise SystemExit
    kept: dict[str, Any] = {"silence_logs": 50} if arguments.gpu else {"memory_limit": 0}
    with started(gpu=arguments.gpu, protocol=arguments.protocol, **kept) as owner:
        for one in arguments.shapes:
            measure((GPU_SHAPES if arguments.gpu else SHAPES)[one], arguments.functions, owner, arguments.gpu)
