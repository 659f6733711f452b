"""What the programs that start a cluster have it do: one product, checked."""

from __future__ import annotations

import dask.array as da
from distributed import Client

import dask_distmm


def multiply(client: Client, workers: int) -> None:
    """Multiply on so many workers, and check."""
    # The plan is made for the workers that are there when the run begins: wait for all of them.
    client.wait_for_workers(workers, timeout=300)
    with dask_distmm.enabled():
        a = da.random.default_rng().standard_normal((3000, 2000), chunks=1000).persist()
        b = da.random.default_rng().standard_normal((2000, 3000), chunks=1000).persist()
        print(dask_distmm.explain(a, b))
        c = (a @ b).persist()
        x = da.ones((3000, 1), chunks=1000)
        off = abs(c.dot(x) - a.dot(b.dot(x))).max().compute()
    assert off < 1e-8, off
    print(f"right on {workers} workers, off by {off:.1e} at most")
