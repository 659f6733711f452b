"""One collective multiply on the ranks of an MPI program, by dask-mpi.

``mpirun -n 6 python docs/examples/on_mpi.py``: rank 0 becomes the scheduler, rank 1 goes on here, the others are
workers.
"""

from __future__ import annotations

import argparse

import dask.array as da
from dask_mpi import initialize
from distributed import Client

import dask_distmm


def main() -> None:
    """Multiply, and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interface", help="network interface that the hosts reach each other by")
    options = parser.parse_args()

    # Nannies start workers again that die, where a rank that dies would end the whole program. The processes that they
    # start import this file: it must not import mpi4py's MPI at its top. On GPUs: "dask_cuda.CUDAWorker".
    initialize(
        interface=options.interface,
        dashboard=False,
        worker_class="distributed.Nanny",
        worker_options={"preload": ["dask_distmm"]},
    )
    from mpi4py import MPI

    with Client() as client, dask_distmm.enabled():
        workers = MPI.COMM_WORLD.Get_size() - 2
        client.wait_for_workers(workers, timeout=120)
        a = da.random.default_rng().standard_normal((3000, 2000), chunks=1000).persist()
        b = da.random.default_rng().standard_normal((2000, 3000), chunks=1000).persist()
        print(dask_distmm.explain(a, b))
        c = (a @ b).persist()
        x = da.ones((3000, 1), chunks=1000)
        off = abs(c.dot(x) - a.dot(b.dot(x))).max().compute()
        assert off < 1e-8, off
        print(f"right on {workers} workers, off by {off:.1e} at most")


if __name__ == "__main__":
    main()
