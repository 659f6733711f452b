"""One collective multiply on the ranks of an MPI program, by dask-mpi.

``mpirun -n 6 python docs/examples/on_mpi.py``: rank 0 becomes the scheduler, rank 1 goes on here, the others are
workers.
"""

from __future__ import annotations

import argparse
import atexit

from dask_mpi import initialize, send_close_signal
from distributed import Client
from product import multiply


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

    # dask-mpi ends the cluster when the interpreter ends, by a client of its own, whose thread Python 3.12 and later
    # refuse to start then: end it here.
    atexit.unregister(send_close_signal)
    try:
        with Client() as client:
            multiply(client, MPI.COMM_WORLD.Get_size() - 2)
    finally:
        send_close_signal()


if __name__ == "__main__":
    main()
