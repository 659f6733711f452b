"""Plans and lists of steps of 131 computations: what a change of planning or of lists changes.

``python -m tests.golden`` prints what differs from the record, ``--write`` records it anew for `test_golden.py`.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np

from dask_distmm import algorithms, linalg
from dask_distmm.arrays.linalg.factorize import steps_of
from dask_distmm.arrays.request import parse
from dask_distmm.planning import Worker, plan_computation

RECORD = Path(__file__).with_suffix(".json")
GIB = 2**30

# Rows, depth and columns of A @ B, the size of chunks, and the type.
PRODUCTS = {
    "square": (8192, 8192, 8192, 2048, "float64"),
    "small chunks": (6000, 6000, 6000, 500, "float32"),
    "tall": (200_000, 512, 512, 20_000, "float64"),
    "deep": (512, 200_000, 512, 20_000, "complex64"),
    "narrow": (8192, 8192, 64, 1024, "bfloat16"),
    "uneven": (5000, 7001, 3003, 999, "float32"),
    "local": (1000, 1000, 1000, 1000, "float64"),
}
ENGINES = ("numpy", "peer", "cublasmp")
FACTORIZATIONS: dict[str, Callable[[da.Array], Any]] = {
    "cholesky": lambda a: linalg.cholesky(a, method="columns"),
    "lu": lambda a: linalg.lu(a, method="columns"),
    "qr": lambda a: linalg.qr(a, method="columns"),
    "solve": lambda a: linalg.solve(a, a[:, :300], method="columns"),
    "solve by float32": lambda a: linalg.solve(a, a[:, :300], method="columns", factor_dtype="float32"),
    "inv": lambda a: linalg.inv(a),
    "eigh": lambda a: linalg.eigh(a),
    "svd": lambda a: linalg.svd(a, full_matrices=False),
}
# Of a matrix in chunks of rows.
PROGRAMS: dict[str, Callable[[da.Array], Any]] = {
    "tall qr": lambda x: linalg.qr(x),
    "tall svd": lambda x: linalg.svd(x, full_matrices=False),
    "tall lstsq": lambda x: linalg.lstsq(x, x[:, 0])[0],
    "cov": lambda x: linalg.cov(x, rowvar=False),
    "pca": lambda x: linalg.pca(x, 4).components,
    "svd_compressed": lambda x: linalg.svd_compressed(x, 8, seed=1),
    "lsqr": lambda x: linalg.lsqr(x, x[:, 0]),
    "nmf": lambda x: algorithms.nmf(x, 8, seed=1).W,
    "kmeans": lambda x: algorithms.kmeans(x, 8, init=np.zeros((8, 64))).centers,
}


def _workers(count: int) -> list[Worker]:
    """Return workers of one host, each with a GPU that can read the memory of all others."""
    gpus = tuple(f"gpu{number}" for number in range(count))
    return [
        Worker(f"w{number}", nthreads=1, memory_limit=16 * GIB, host="h", device=gpus[number], reach=gpus)
        for number in range(count)
    ]


def _plan(problem: Any, ranks: int, engine: str) -> Any:
    """Plan for chunks that lie round-robin."""
    where = {one.name: np.arange(one.count, dtype=np.int32) % ranks for one in problem.matrices}
    return plan_computation(problem, _workers(ranks), where, engine=(engine,))


def _summary(plan: Any) -> dict[str, Any]:
    """Return what there is to say of a plan: the choice, its estimate, its memory, and its lists."""
    summary = {
        "method": f"{plan.method} {'x'.join(map(str, plan.grid))} on {len(plan.ranks)}",
        "seconds": float(f"{plan.seconds:.3g}"),
        "bytes": max(plan.projected_bytes.values(), default=0),
    }
    lists = [plan.steps(rank) for rank in range(len(plan.ranks))]
    counts = collections.Counter(type(step).__name__ for steps in lists for step in steps)
    # Where a statement stands in its source does not matter.
    text = re.sub(r"\bline=\d+", "", repr(lists))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return summary | {"steps": " ".join(f"{name}:{counts[name]}" for name in sorted(counts)), "hash": digest}


def _computations() -> Iterator[tuple[str, Any]]:
    """Yield names of computations and their plans."""
    for (name, (m, k, n, chunk, dtype)), ranks in itertools.product(PRODUCTS.items(), (2, 4, 8)):
        a, b = da.zeros((m, k), chunks=chunk, dtype=dtype), da.ones((k, n), chunks=chunk, dtype=dtype)
        problem = parse(a, b).problem
        for engine in ENGINES:
            yield f"{name} {m} x {k} x {n} {dtype} on {ranks} {engine}", _plan(problem, ranks, engine)
    for (name, call), ranks, engine in itertools.product(FACTORIZATIONS.items(), (2, 8), ("numpy", "peer")):
        result = call(da.zeros((3000, 3000), chunks=1000))
        problem = next(steps_of(result[0] if isinstance(result, tuple) else result))
        yield f"{name} on {ranks} {engine}", _plan(problem, ranks, engine)
    for (name, call), ranks, engine in itertools.product(PROGRAMS.items(), (2, 8), ("numpy", "peer")):
        result = call(da.zeros((200_000, 64), chunks=(12_500, 64)))
        problem = next(steps_of(result[0] if isinstance(result, tuple) else result))
        yield f"{name} on {ranks} {engine}", _plan(problem, ranks, engine)


def measured() -> dict[str, dict[str, Any]]:
    """Return the summaries of all computations."""
    return {name: _summary(plan) for name, plan in _computations()}


def differences(now: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> list[str]:
    """Return in a line each what differs; seconds may differ in their third digit."""
    lines = [f"{name}: {'new' if name in now else 'gone'}" for name in sorted(now.keys() ^ before.keys())]
    for name in (name for name in now if name in before):
        for field in sorted(now[name].keys() | before[name].keys()):
            old, new = before[name].get(field), now[name].get(field)
            if old != new and not (field == "seconds" and math.isclose(old, new, rel_tol=0.011)):
                lines.append(f"{name}: {field} {old} -> {new}")
    return lines


if __name__ == "__main__":
    found = measured()
    if RECORD.exists():
        print(*differences(found, json.loads(RECORD.read_text())), sep="\n")
    if "--write" in sys.argv:
        lines = (f" {json.dumps(name)}: {json.dumps(summary)}" for name, summary in found.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
