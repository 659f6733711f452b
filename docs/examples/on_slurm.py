"""One collective multiply on workers that SLURM starts, by dask-jobqueue.

``python docs/examples/on_slurm.py --queue main --interface ib0`` on a login node; ``--help`` has the options.
"""

from __future__ import annotations

import argparse

import dask.array as da
from dask_jobqueue import SLURMCluster
from distributed import Client

import dask_distmm


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
    with cluster, Client(cluster) as client, dask_distmm.enabled():
        cluster.scale(jobs=options.jobs)
        # The plan is made for the workers that are there when the run begins: wait for all of them.
        client.wait_for_workers(options.jobs * options.processes, timeout=300)
        a = da.random.default_rng().standard_normal((3000, 2000), chunks=1000).persist()
        b = da.random.default_rng().standard_normal((2000, 3000), chunks=1000).persist()
        print(dask_distmm.explain(a, b))
        c = (a @ b).persist()
        x = da.ones((3000, 1), chunks=1000)
        off = abs(c.dot(x) - a.dot(b.dot(x))).max().compute()
        assert off < 1e-8, off
        print(f"right on {len(client.scheduler_info(n_workers=-1)['workers'])} workers, off by {off:.1e} at most")


if __name__ == "__main__":
    main()
