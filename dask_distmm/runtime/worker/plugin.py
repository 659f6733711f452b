"""The worker's plugin."""

from __future__ import annotations

from distributed import Worker, WorkerPlugin

from dask_distmm.runtime.messages import NAME
from dask_distmm.runtime.worker.side import WorkerSide

__all__ = ["DistMMWorkerPlugin"]


class DistMMWorkerPlugin(WorkerPlugin):  # type: ignore[misc]
    """Puts a `WorkerSide` on a worker. Installed by the scheduler's plugin, or by preload."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Attach, once."""
        if NAME not in worker.extensions:
            worker.extensions[NAME] = WorkerSide(worker)

    def teardown(self, worker: Worker) -> None:
        """Detach when the worker closes (a plugin that is only replaced keeps its `WorkerSide`)."""
        if worker.status.name in ("closing", "closing_gracefully", "closed", "failed"):
            side = worker.extensions.pop(NAME, None)
            if side is not None:
                side.close()
