"""What worker processes hold before and after tests: files, listening sockets, threads, children.

Left out is what Dask and Zarr hold more or less of as they like: connections, and the threads that they name. Of the
tests' own process, which is that of some clusters too, only our threads are looked at.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import psutil
from distributed import Client
from distributed.deploy import Cluster

# Dask's pools grow when they are used; a plugin has one engine thread, from its first run on.
THREADS = re.compile("Dask|IO loop|TCP-Executor|asyncio_|AsyncProcess|Profile|QueueFeeder|zarr_io|distmm-engine")
OURS = ("distmm-pinned", "distmm-progress")


def held() -> dict[str, list[str]]:
    """Return what this process holds of each kind."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    process = psutil.Process()
    return {
        "files": [name for name in files if not name.startswith(("socket:", "anon_inode:"))],
        "listeners": [str(each.laddr) for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN],
        "threads": [thread.name for thread in threading.enumerate() if not THREADS.search(thread.name)],
        "children": [str(child.pid) for child in process.children()],
    }


def held_by(cluster: Cluster) -> dict[int, dict[str, list[str]]]:
    """Return the same for the processes of all workers and of the scheduler, by their numbers."""
    with Client(cluster, set_as_default=False) as client:
        found = dict(client.run(_numbered, os.getpid()).values())
        return found | dict([client.run_on_scheduler(_numbered, os.getpid())])


def _numbered(tests: int) -> tuple[int, dict[str, list[str]]]:
    if os.getpid() == tests:
        return tests, {"threads": [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]}
    return os.getpid(), held()


@contextlib.contextmanager
def no_leaks(cluster: Cluster, timeout: float = 120.0) -> Iterator[None]:
    """Compare what the processes that live on hold before and after."""
    before = held_by(cluster)
    yield
    deadline = time.monotonic() + timeout
    while True:
        after = held_by(cluster)
        more = [
            f"process {number} held {kind} {had}, now {after[number][kind]}"
            for number in before.keys() & after.keys()
            for kind, had in before[number].items()
            if len(after[number][kind]) > len(had)
        ]
        if not more:
            return
        assert time.monotonic() < deadline, "; ".join(more)
        time.sleep(0.1)


# What a cluster keeps of multiplies


def _left_on_worker(dask_worker: Any) -> dict[str, int]:
    side = dask_worker.extensions.get("distmm")
    names = ("runs", "replicas")
    return {} if side is None else {name: len(getattr(side, name)) for name in names}


def _left_on_scheduler(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins.get("distmm")
    if plugin is None:
        return {}
    # A barrier that has failed is Dask's to forget, when nobody holds the exception any more.
    barriers = sum(barrier.ts.state != "erred" for barrier in plugin.barriers.values())
    return {"runs": len(plugin.queue), "barriers": barriers, "replicas": len(plugin.replicas)}


def assert_nothing_left(client: Any, timeout: float = 120.0) -> None:
    """Wait until neither workers nor scheduler keep anything of a multiply whose result nobody holds any more.

    Raises
    ------
    AssertionError
        Something is still there after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = {**client.run(_left_on_worker), "scheduler": client.run_on_scheduler(_left_on_scheduler)}
        left = {where: what for where, what in found.items() if any(what.values())}
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
        gc.collect()


# Functions of this file are called on workers and schedulers, which may be other processes.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
