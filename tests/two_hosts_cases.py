"""Started by test_network.py beside a cluster on two hosts: ``python two_hosts_cases.py SCHEDULER_FILE PROTOCOL``.

A program of its own, because UCX stays in a process for good.
"""

from __future__ import annotations

import sys

import dask.array as da
import numpy as np
from conformance import assert_product
from distributed import Client
from leaks import assert_nothing_left
from run_events import events

from dask_distmm import matmul


def main(scheduler_file: str, protocol: str) -> None:
    rng = np.random.default_rng()
    with Client(scheduler_file=scheduler_file) as client:
        client.wait_for_workers(4, timeout=120)
        workers = list(client.nthreads())
        assert all(address.startswith(f"{protocol}://") for address in workers), workers
        hosts = {address.split("//")[1].rpartition(":")[0] for address in workers}
        assert len(hosts) == 2, workers
        # Tiles of A of 2 MB: beyond what protocols send eagerly.
        a, b = rng.standard_normal((1100, 900)), rng.standard_normal((900, 60))
        for method in ("summa", "allgather", "reducescatter", "allreduce"):
            c = matmul(da.from_array(a, chunks=300), da.from_array(b, chunks=(300, 40)), method=method)
            assert_product(a, b, c.compute())
            del c
        done = events(client, "done")
        assert len(done) == 4
        assert all(event["received_bytes"] for event in done)
        assert_nothing_left(client)
    print("right on two hosts")


if __name__ == "__main__":
    main(*sys.argv[1:])
