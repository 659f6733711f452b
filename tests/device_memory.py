"""GPUs that seem to have less memory than they have."""

from __future__ import annotations

from dask_distmm.runtime import client as client_side


def _set(size):
    from dask_distmm.engines.peer.engine import ENGINE

    if size:
        ENGINE.memory = lambda: int(size)
    else:
        vars(ENGINE).pop("memory", None)


def _forget(dask_scheduler=None):
    dask_scheduler.plugins["distmm"].roster.clear()


def limit_device_memory(client, size):
    """Let runs of the engine `peer` hold so many bytes on each GPU; all that there are for 0."""
    client.run(_set, size / 0.8)  # distmm.memory.limit-fraction
    client.run_on_scheduler(_forget)
    client_side._said.clear()
