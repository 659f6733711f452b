"""The worker's plugin."""

from __future__ import annotations

import cloudpickle
from distributed import Worker, WorkerPlugin

from dask_distmm import compat
from dask_distmm.engines.base import log
from dask_distmm.planning import ENGINES
from dask_distmm.runtime.messages import NAME, Describe, Description
from dask_distmm.runtime.wire import answering
from dask_distmm.runtime.worker.side import WorkerService

# The topic of Dask's events under which a worker says that it lacks this package.
MISSING = f"{NAME}-missing"


class DistMMWorkerPlugin(WorkerPlugin):  # type: ignore[misc]
    """Puts a `WorkerService` on a worker. Installed by the scheduler's plugin, or by preload."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Attach, once; a worker whose version of distributed lacks something says so when it describes itself."""
        if missing := compat.missing_on_worker(worker):
            _say_unfit(worker, compat.unsupported("on this worker", missing))
        elif NAME not in worker.extensions:
            worker.extensions[NAME] = WorkerService(worker)

    def teardown(self, worker: Worker) -> None:
        """Detach when the worker closes (a plugin that is only replaced keeps its `WorkerService`)."""
        if compat.missing_on_worker(worker):
            return
        if worker.status.name in ("closing", "closing_gracefully", "closed", "failed"):
            side = worker.extensions.pop(NAME, None)
            if side is not None:
                side.close()


def _say_unfit(worker: Worker, reason: str) -> None:
    """Answer the scheduler that this worker has no engine. Nothing is raised: the worker would not start."""

    async def describe(request: Describe) -> Description:
        return Description("OK", engines={name: {"error": reason} for name in ENGINES})

    log.warning("%s", reason)
    if hasattr(worker, "handlers"):
        worker.handlers.update(answering(Describe, describe))
    elif hasattr(worker, "log_event"):
        worker.log_event(MISSING, {"worker": worker.address, "reason": reason})


def for_any_worker() -> bytes:
    """Return the plugin, pickled so that workers without this package can load it, too.

    Such a worker says so, under the topic `MISSING`. With a plugin that it can't load it would not start.
    """
    topic = MISSING

    # Of a local class pickles have all, and not the name of the module that has it.
    class Installer(WorkerPlugin):  # type: ignore[misc]
        idempotent = True
        plugin: WorkerPlugin | None = None

        def setup(self, worker: Worker) -> None:
            try:
                from dask_distmm.runtime.worker.plugin import DistMMWorkerPlugin
            except ImportError as error:
                worker.log_event(topic, {"worker": worker.address, "reason": str(error)})
                return
            self.plugin = DistMMWorkerPlugin()
            self.plugin.setup(worker)

        def teardown(self, worker: Worker) -> None:
            if self.plugin is not None:
                self.plugin.teardown(worker)

    made: bytes = cloudpickle.dumps(Installer())
    return made
