"""``dask scheduler --preload dask_distmm`` and ``dask worker --preload dask_distmm``."""

from __future__ import annotations

from typing import Any


async def dask_setup(server: Any) -> None:
    """Put the plugin on a scheduler or worker that starts; called by Dask for ``--preload``."""
    from distributed import Scheduler, Worker

    from dask_distmm.engines.base import log
    from dask_distmm.errors import MissingEngineError
    from dask_distmm.runtime.messages import NAME
    from dask_distmm.runtime.scheduler.plugin import DistMMSchedulerPlugin
    from dask_distmm.runtime.worker import worker_plugin

    if isinstance(server, Scheduler):
        try:
            await server.register_scheduler_plugin(DistMMSchedulerPlugin(), name=NAME, idempotent=True)
        except MissingEngineError as error:
            log.warning("%s", error)
    elif isinstance(server, Worker):
        await server.plugin_add(worker_plugin(), name=NAME, catch_errors=False)
