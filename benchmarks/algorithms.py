"""Whole algorithms as one run, beside the statements by themselves, and beside stock Dask as people write it.

    python -m benchmarks.algorithms [--gpu] [--protocol tcp|ucx] [--kinds nmf kmeans ...] [--ranks 2] [--turns 20]
        [--repeat 3] [--stock 0] [--shrink 1] [--out FILE]

Two worker processes of one thread, or one worker a GPU. ``turn`` is a turn of `dask_distmm.jit`, from the difference
of a short and a long loop; ``call`` a call with one turn, from the call to memory. ``alone`` are the same statements
with NumPy (CuPy) on one worker's rows, done by all workers at the same time. ``stock`` and ``enabled`` are one
``persist`` of Dask arrays a turn, without and with `enable`; ``products`` are with it, but without regions.
Milliseconds, medians by turns. Results are compared with the statements'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import dask_distmm
from dask_distmm import fori_loop

State = tuple[Any, ...]


class Case(NamedTuple):
    """An algorithm: its turn, and its arrays of so many rows; `wide` for what is not in rows."""

    turn: Callable[..., State]
    # Shapes of operands in rows on CPUs and GPUs; the number of those that are state; shapes of the state on all ranks.
    cpu: tuple[tuple[int, ...], ...]
    gpu: tuple[tuple[int, ...], ...]
    in_rows: int
    cpu_state: tuple[tuple[int, ...], ...]
    gpu_state: tuple[tuple[int, ...], ...]


def nmf(X: Any, W: Any, H: Any) -> State:
    """Multiplicative updates (Lee, Seung 2001)."""
    H = H * (W.T @ X) / (W.T @ W @ H + 1e-9)
    return W * (X @ H.T) / (W @ (H @ H.T) + 1e-9), H


def kmeans(X: Any, C: Any) -> State:
    """Lloyd's algorithm."""
    nearest = ((C * C).sum(1) - 2 * (X @ C.T)).argmin(1)
    chosen = (nearest[:, None] == module(C).arange(len(C))).astype(X.dtype)
    return ((chosen.T @ X) / (chosen.sum(0)[:, None] + 1e-9),)


def logistic(X: Any, y: Any, w: Any) -> State:
    """Gradient descent."""
    return (w - 1e-6 * (X.T @ (1 / (1 + np.exp(-(X @ w))) - y)),)


def subspace(A: Any, Q: Any) -> State:
    """Subspace iteration with scaled columns."""
    Z = A @ Q
    return (Z / np.sqrt((Z * Z).sum(0)),)


def als(X: Any, U: Any, V: Any) -> State:
    """Alternating least squares."""
    eye = 1e-3 * eye_of(V)
    U = X @ (V @ np.linalg.inv(V.T @ V + eye))
    return U, X.T @ U @ np.linalg.inv(U.T @ U + eye)


def pagerank(A: Any, x: Any) -> State:
    """Power iteration with damping."""
    y = 0.85 * (A @ x) + 0.15 / len(A)
    return (y / y.sum(),)


def lasso(X: Any, b: Any, z: Any, u: Any) -> State:
    """ADMM (Boyd and others 2011, section 6.4)."""
    gram = X.T @ X + eye_of(X)
    x = np.linalg.solve(gram, (X.T @ b + (z - u))[:, None])[:, 0]
    v = x + u
    z = np.sign(v) * np.maximum(abs(v) - 0.1, 0)
    return z, v - z


def sinkhorn(C: Any, v: Any) -> State:
    """Optimal transport with entropy (Cuturi 2013); the kernel is made in each turn."""
    K = np.exp(C * -10.0)
    u = 1 / (K @ v)
    return (1 / (K.T @ u),)


def module(x: Any) -> Any:
    """Return the package of an array, or of a Dask array's chunks; of a traced one NumPy."""
    return sys.modules["cupy"] if type(getattr(x, "_meta", x)).__module__.startswith("cupy") else np


def package(on_gpus: bool) -> Any:
    """Return CuPy or NumPy."""
    return importlib.import_module("cupy" if on_gpus else "numpy")


def eye_of(x: Any) -> Any:
    """Return an identity with as many columns as a matrix has."""
    return module(x).eye(x.shape[1])


CASES = {
    "nmf": Case(nmf, ((100_000, 200), (100_000, 16)), ((400_000, 512), (400_000, 32)), 1, ((16, 200),), ((32, 512),)),
    "kmeans": Case(kmeans, ((200_000, 32),), ((400_000, 64),), 0, ((16, 32),), ((32, 64),)),
    "logistic": Case(logistic, ((300_000, 32), (300_000,)), ((1_000_000, 64), (1_000_000,)), 0, ((32,),), ((64,),)),
    "subspace": Case(subspace, ((4096, 4096), (4096, 16)), ((8192, 8192), (8192, 16)), 1, (), ()),
    "als": Case(als, ((50_000, 500), (50_000, 8)), ((200_000, 1000), (200_000, 16)), 1, ((500, 8),), ((1000, 16),)),
    "pagerank": Case(pagerank, ((4096, 4096), (4096,)), ((8192, 8192), (8192,)), 1, (), ()),
    "lasso": Case(
        lasso, ((100_000, 128), (100_000,)), ((400_000, 256), (400_000,)), 0, ((128,), (128,)), ((256,), (256,))
    ),
    "sinkhorn": Case(sinkhorn, ((4096, 4096),), ((8192, 8192),), 0, ((4096,),), ((8192,),)),
}


def repeated(case: Case) -> Any:
    """Return the algorithm as a function of `jit`."""

    def function(operands: State, state: State, turns: int) -> State:
        return tuple(fori_loop(0, turns, lambda i, s: case.turn(*operands, *s), state))

    return dask_distmm.jit(function, static_argnames=("turns",))


def arrays(case: Case, *, on_gpus: bool, shrink: int, chunks: int) -> tuple[list[da.Array], list[Any]]:
    """Return operands in rows, persisted, and the state: arrays in rows first, then small ones."""
    if on_gpus:
        import cupy

        draw = da.random.RandomState(RandomState=cupy.random.RandomState, seed=1).random_sample
    else:
        draw = da.random.default_rng(1).random
    shapes, small = (case.gpu, case.gpu_state) if on_gpus else (case.cpu, case.cpu_state)
    rows = shapes[0][0]
    cut = [tuple(n // shrink if n == rows else n for n in shape) for shape in shapes]
    made = [draw(shape, chunks=(-(-shape[0] // chunks), *shape[1:])).persist() for shape in cut]
    wait(made)
    rng, split = np.random.default_rng(2), len(made) - case.in_rows
    state = [rng.random(tuple(n // shrink if n == rows else n for n in shape)) for shape in small]
    return made[:split], [*made[split:], *state]


def seconds(function: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def finished(results: State) -> State:
    """Wait for arrays that one persist makes."""
    found: State = dask.persist(*results)
    wait(found)
    return found


def alone(name: str, part: list[Any], state: list[Any], on_gpus: bool, turns: int) -> float:
    """Return the seconds of a turn on some rows, on a worker."""
    xp, case = package(on_gpus), CASES[name]
    operands, values = [xp.asarray(x) for x in part], tuple(xp.asarray(x) for x in state)

    def turn() -> None:
        case.turn(*operands, *values)
        if on_gpus:
            xp.cuda.Device().synchronize()

    turn()
    return statistics.median(seconds(turn) for _ in range(turns))


def by_persist(case: Case, operands: list[Any], state: list[Any], turns: int) -> float:
    """Return the seconds of a turn with a persist each, as people write it."""
    as_chunk = module(operands[0]).asarray
    values = tuple(
        x if isinstance(x, da.Array) else da.from_array(as_chunk(x), chunks=-1, asarray=False) for x in state
    )
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        values = finished(case.turn(*operands, *values))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(client: Client, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one algorithm."""
    case, ranks, xp = CASES[name], given.ranks, package(given.gpu)
    operands, state = arrays(case, on_gpus=given.gpu, shrink=given.shrink, chunks=4 * ranks)
    function = repeated(case)

    def run(turns: int) -> State:
        return finished(function(tuple(operands), tuple(state), turns=turns))

    first = seconds(lambda: run(1))
    calls, longs = [], []
    for _ in range(given.repeat):
        calls.append(seconds(lambda: run(1)))
        longs.append(seconds(lambda: run(1 + given.turns)))
    one = statistics.median(calls)
    figures = {"first": first, "call": one, "turn": (statistics.median(longs) - one) / given.turns}
    shape = operands[0].shape
    m = shape[0]
    parts = [x[: m // ranks].compute() if len(x) == m and x is not None else x for x in (*operands,)]
    square = shape == (m, m)
    own = [x[: m // ranks].compute() if isinstance(x, da.Array) and not square else x for x in state]
    own = [x.compute() if isinstance(x, da.Array) else x for x in own]
    if square and name == "sinkhorn":
        own = [np.asarray(x) for x in own]
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    try:
        jobs = [
            client.submit(alone, name, parts, own, given.gpu, given.turns, workers=[w], pure=False)
            for w in workers[:ranks]
        ]
        figures["alone"] = statistics.median(client.gather(jobs))
    except (ValueError, TypeError):
        figures["alone"] = float("nan")
    expected = [dask.compute(x)[0] for x in (*operands, *state)]
    whole = [xp.asarray(x) for x in expected]
    values = tuple(whole[len(operands) :])
    for _ in range(3):
        values = case.turn(*whole[: len(operands)], *values)
    del whole
    found = dask.compute(*run(3))
    figures["error"] = max(
        float(abs(xp.asarray(x) - y).max() / abs(y).max()) for x, y in zip(found, values, strict=True)
    )
    if given.stock:
        try:
            figures["stock"] = by_persist(case, operands, state, given.stock)
        except Exception as error:
            figures["stock"] = type(error).__name__
        for column, regions in (("products", False), ("enabled", True)):
            with dask.config.set({"distmm.regions": regions}), dask_distmm.enabled():
                try:
                    figures[column] = by_persist(case, operands, state, given.stock)
                except Exception as error:
                    figures[column] = type(error).__name__
    return {"name": name, "shape": shape, **figures}


def cases_of(given: argparse.Namespace) -> Iterator[str]:
    """Yield the names of the algorithms that are asked for."""
    yield from (name for name in CASES if not given.kinds or name in given.kinds)


def main() -> None:
    """Measure on a local cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--kinds", nargs="*", choices=list(CASES))
    for name, value in {"ranks": 2, "turns": 20, "repeat": 3, "stock": 0, "shrink": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options: dict[str, Any] = {"n_workers": given.ranks, "dashboard_address": None, "silence_logs": 50}
    if given.gpu:
        from dask_cuda import LocalCUDACluster

        cluster = LocalCUDACluster(protocol=given.protocol, **options)
    else:
        cluster = LocalCluster(threads_per_worker=1, **options)
    rows = []
    with cluster, Client(cluster) as client:
        client.wait_for_workers(given.ranks)
        for name in cases_of(given):
            rows.append(measure(client, name, given))
            print(
                f"{name:10}"
                + "  ".join(
                    f"{key} {1e3 * x:.2f}" if isinstance(x, float) and key != "error" else f"{key} {x}"
                    for key, x in rows[-1].items()
                    if key not in ("name", "shape")
                ),
                flush=True,
            )
    if given.out:
        given.out.write_text(
            json.dumps({"protocol": given.protocol, "gpu": given.gpu, "ranks": given.ranks, "rows": rows})
        )


if __name__ == "__main__":
    main()
