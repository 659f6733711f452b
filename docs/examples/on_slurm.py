"""One collective multiply on workers that SLURM starts, by dask-jobqueue.

``python docs/examples/on_slurm.py --queue main --interface ib0`` on a login node; ``--help`` has the options.
"""

from __future__ import annotations

import argparse

from dask_jobqueue import SLURMCluster
from distributed import Client
from product import multiply


def main() -> None:
    """Start jobs, multiply, check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many jobs, each on one host")
    parser.add_argument("--processes", type=int, default=2, help="worker processes a job")
    parser.add_argument("--cores", type=int, default=2, help="cores a job")
    parser.add_argument("--memory", default="2GiB", help="memory a job")
    parser.add_argument("--queue", help="partition")
    parser.add_argument("--interface", help="network interface that the hosts reach each other by")
    options = parser.parse_args()

    cluster = SLURMCluster(
        cores=options.cores,
        processes=options.processes,
        memory=options.memory,
        walltime="00:10:00",
        queue=options.queue,
        interface=options.interface,
        worker_extra_args=["--preload", "dask_distmm"],
    )
    with cluster, Client(cluster) as client:
        cluster.scale(jobs=options.jobs)
        multiply(client, options.jobs * options.processes)


if __name__ == "__main__":
    main()
