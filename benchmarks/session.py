"""A cluster of this machine for benchmarks."""

from __future__ import annotations

import dask
from distributed import Client, LocalCluster

from benchmarks.harness.cluster import Session


class ClusterSession(Session):
    """A cluster of worker processes on loopback, started when first needed."""

    def __init__(self, workers: int, threads: int, timeout: float = 600.0) -> None:
        self.workers, self.threads, self.timeout, self.array, self.here = workers, threads, timeout, "numpy", True
        self._cluster: LocalCluster | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The client of the cluster."""
        if self._client is None:
            # Suspended workers send no heartbeats, and must not be given up for that.
            with dask.config.set({"distributed.scheduler.worker-ttl": None}):
                self._cluster = LocalCluster(
                    host="127.0.0.1",
                    n_workers=self.workers,
                    threads_per_worker=self.threads,
                    processes=True,
                    dashboard_address="127.0.0.1:0",
                )
            self._client = Client(self._cluster)
            self._client.wait_for_workers(self.workers)
        return self._client

    def close(self) -> None:
        """Stop the cluster."""
        if self._client is not None:
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()
        self._client = self._cluster = None
