"""Clusters for the tests: one of worker processes and one in this process, shared by a session.

Every test that uses them ends with a look at all workers and the scheduler: nothing of ours may be left.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import dask
import pytest
from distributed import Client, LocalCluster

import dask_distmm


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    yield
    dask_distmm.disable()
    assert not dask_distmm.is_enabled()


@pytest.fixture(scope="session")
def process_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", memory_limit="2GiB"
    ) as cluster:
        yield cluster


@pytest.fixture
def client(process_cluster: LocalCluster) -> Iterator[Client]:
    """A client of three worker processes of one thread."""
    with Client(process_cluster) as client:
        yield client
        assert_nothing_left(client)


@pytest.fixture(scope="session")
def inproc_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=4, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", memory_limit=0
    ) as cluster:
        yield cluster


@pytest.fixture
def inproc_client(inproc_cluster: LocalCluster) -> Iterator[Client]:
    """A client of four workers in this process."""
    with Client(inproc_cluster) as client:
        yield client
        assert_nothing_left(client)


@pytest.fixture
def take_all() -> Iterator[None]:
    """Route products of any size here."""
    with dask.config.set({"distmm.minimum-flops": 0}):
        yield


def leftovers(dask_worker) -> dict[str, int]:
    side = dask_worker.extensions.get("distmm")
    if side is None:
        return {}
    return {name: len(getattr(side, name)) for name in ("staged", "runs", "outputs", "progress")}


def scheduler_leftovers(dask_scheduler) -> dict[str, int]:
    plugin = dask_scheduler.plugins.get("distmm")
    if plugin is None:
        return {}
    return {name: len(getattr(plugin, name)) for name in ("live", "done", "restarts", "pinned")}


def assert_nothing_left(client: Client, timeout: float = 20.0) -> None:
    """Wait until no worker and not the scheduler keeps anything of a multiply."""
    deadline = time.monotonic() + timeout
    while True:
        gc.collect()
        found = {**client.run(leftovers), "scheduler": client.run_on_scheduler(scheduler_leftovers)}
        left = {where: what for where, what in found.items() if any(what.values())}
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
