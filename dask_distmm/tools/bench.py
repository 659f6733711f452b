"""``dask distmm bench``: square products at common chunk grids, next to Dask's own matmul and NumPy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client

from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.planning import ENGINES, Demand
from dask_distmm.runtime.client import ask_roster
from dask_distmm.tools.demo import ROUNDS, check_product, collective, computed, side_by_side
from dask_distmm.tools.local import connected

CPU_SIZES, GPU_SIZES = (1024, 2048), (4096, 8192)
TITLES = ("N", "chunks", "dask_distmm s", "dask s", "x dask", "numpy s", "x numpy")


def run_bench(
    scheduler: str | None, workers: int | None, sizes: Sequence[int] | None, grids: Sequence[int], dtype: str
) -> Iterator[dict[str, Any]]:
    """Measure, size by size; yield the median seconds of each case. NumPy is measured only with local CPU workers."""
    settings = {"distmm.minimum-flops": 0, "distmm.enabled": None}
    with dask.config.set(settings), connected(scheduler, workers, "bench") as client:
        roster = ask_roster(client, Demand("auto", "numpy", (dtype, dtype, dtype)))
        assert roster is not None, "the client is synchronous"
        gpus = ENGINES[roster.engines[0]].on_gpus
        for size in sorted(sizes or (GPU_SIZES if gpus else CPU_SIZES)):
            numpy = _numpy_seconds(size, dtype) if scheduler is None and not gpus else None
            for grid in grids:
                ours, stock = _case(client, size, grid, dtype, "cupy" if gpus else "numpy")
                yield {"size": size, "chunks": grid, "dask_distmm": ours, "dask": stock, "numpy": numpy}


def _case(client: Client, size: int, grid: int, dtype: str, kind: str) -> list[float]:
    """Check one product, and time both ways by turns, on inputs in the cluster's memory."""
    side, random = -(-size // grid), da.random.default_rng()
    made = (random.random((size, size), dtype=dtype, chunks=side) - np.dtype(dtype).type(0.5) for _ in "ab")
    a, b = (computed(x.to_backend(kind)) for x in made)
    products: list[Callable[[], da.Array]] = [lambda: collective(a, b), lambda: dask_matmul(a, b)]
    check_product(*(x.to_backend("numpy") for x in (a, b, computed(products[0]()))))
    return side_by_side(products)


def _numpy_seconds(size: int, dtype: str) -> float:
    """Return the time of NumPy's product in this process, on all threads of its BLAS."""
    random, taken = np.random.default_rng(), []
    a, b = (random.random((size, size), dtype=dtype) for _ in "ab")  # type: ignore[call-overload]
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        np.matmul(a, b)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def row_text(row: dict[str, Any]) -> str:
    """Return a case as a line under `TITLES`."""
    ours, stock, numpy = row["dask_distmm"], row["dask"], row["numpy"]
    beside = [] if numpy is None else [f"{numpy:.4f}", f"{numpy / ours:.2f}"]
    side = f"{row['chunks']} x {row['chunks']}"
    return line([str(row["size"]), side, f"{ours:.4f}", f"{stock:.4f}", f"{stock / ours:.2f}", *beside])


def line(cells: Sequence[str]) -> str:
    """Return the cells of a row in columns."""
    return "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, TITLES, strict=False))
