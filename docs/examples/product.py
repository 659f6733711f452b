"""One product, planned, multiplied, checked, and timed next to stock Dask.

``python docs/examples/product.py`` does it on two worker processes of this machine; `on_slurm`, `on_mpi` and
`on_kubernetes` do it on theirs.
"""

from __future__ import annotations

import time

import dask.array as da
from dask.utils import format_time
from distributed import Client, wait

import dask_distmm


def random(rows: int, columns: int) -> da.Array:
    """Return a matrix of random numbers that is in the workers' memory."""
    found = da.random.default_rng().standard_normal((rows, columns), chunks=500).persist()
    wait(found)
    return found


def timed(a: da.Array, b: da.Array) -> tuple[da.Array, float]:
    """Return the product when it is in the workers' memory, and the seconds that it took."""
    start = time.perf_counter()
    d = (a @ b).persist()
    wait(d)
    return d, time.perf_counter() - start


def multiply(client: Client, workers: int) -> None:
    """Multiply on so many workers, and check."""
    # The plan is made for the workers that are there when the run begins: wait for all of them.
    client.wait_for_workers(workers, timeout=300)
    a, b = random(3000, 2000), random(2000, 3000)
    print(dask_distmm.explain(a, b))

    with dask_distmm.enabled():
        timed(random(1000, 1000), random(1000, 1000))  # the first run of a cluster puts the plugins in place
        d, ours = timed(a, b)
    _, stock = timed(a, b)

    x = da.ones((3000, 1), chunks=500)
    off = abs(d.dot(x) - a.dot(b.dot(x))).max().compute()
    assert off < 1e-8, off
    print(f"right on {workers} workers, off by {off:.1e} at most")
    print(f"{format_time(ours)} from {a.npartitions + b.npartitions} chunks; stock Dask {format_time(stock)}")


if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as local:
        multiply(local, 2)
