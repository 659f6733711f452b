"""The engine that pulls on a cluster of processes, on emulated devices whose memory these processes share."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_distmm
from dask_distmm.testing import assert_nothing_left, assert_product, inject

FOLDER = str(Path(__file__).parent)


def become_gpu_worker(folder, devices_seen, dask_worker=None):
    """Put the stand-ins into this worker's process, for good."""
    import importlib.metadata

    sys.path.insert(0, FOLDER)
    import devices
    import pytest
    import shared

    dask_worker._patch = pytest.MonkeyPatch()
    world = devices.install(dask_worker._patch, memory=shared.Memory(folder))
    number = sorted(devices_seen).index(dask_worker.address)
    names = [f"0000:0{at}:00.0" for at in range(len(devices_seen))]
    world.devices = [names[number], *(name for name in names if name != names[number])]
    world.reached = world.devices[1:]
    dask_worker._world = world
    version = importlib.metadata.version
    dask_worker._patch.setattr("importlib.metadata.version", lambda name: "1.0" if "nvmath" in name else version(name))


def mapped(dask_worker=None):
    world = getattr(dask_worker, "_world", None)
    return None if world is None else len(world.memory.mapped)


@pytest.fixture
def client(tmp_path):
    (tmp_path / "devices").mkdir()
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}),
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address="127.0.0.1:0", protocol="tcp") as cluster,
        Client(cluster) as client,
    ):
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        client.run(become_gpu_worker, str(tmp_path / "devices"), addresses)
        yield client


def product(method, holders=None, **options):
    """Operands lie on some workers only: one that a nanny has started again has no stand-ins."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((90, 70)), rng.standard_normal((70, 80))
    x, y = da.from_array(a, chunks=(30, 35)), da.from_array(b, chunks=(35, 20))
    x, y = (v.persist(workers=holders) for v in (x, y)) if holders else (x, y)
    return a, b, dask_distmm.matmul(x, y, method=method, engine="peer", **options)


def wait_for(what, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_pull_from_each_other_and_outlive_one_that_is_killed(client):
    """All that needs processes, on one cluster: starting it takes longest."""
    for method in ("allgather", "reducescatter", "summa"):
        a, b, d = product(method)
        assert_product(a, b, d.compute())
    starts = [event for _, event in client.get_events("distmm") if event["action"] == "start"]
    done = [event for _, event in client.get_events("distmm") if event["action"] == "done"]
    assert {event["engine"] for event in starts} == {"peer"}
    assert done[0]["received_bytes"] > 0
    assert all(client.run(mapped).values())

    # What is mapped goes with what engines keep.
    assert dask_distmm.free_workspaces() == 1
    assert set(client.run(mapped).values()) == {0}

    # A rank dies between two panels: the others keep their processes, and what they have.
    a, b, d = product("allgather")
    assert_product(a, b, d.compute())
    del d
    victim, *others = sorted(client.scheduler_info(n_workers=-1)["workers"])
    survivors = client.run(os.getpid, workers=others)
    client.run(inject, "panel", "kill", workers=[victim])
    a, b, d = product("reducescatter", others)
    started = time.monotonic()
    assert_product(a, b, d.compute())
    assert time.monotonic() - started < 60
    assert client.run(os.getpid, workers=others) == survivors
    a, b, d = product("allgather", others, workers=others)
    assert_product(a, b, d.compute())
    # The dead one's memory is not mapped any more: what is, is the other survivor's.
    wait_for(lambda: all(0 < n <= 2 for n in client.run(mapped, workers=others).values()))

    # An error on one rank ends the run on all, and nothing else.
    client.run(inject, "panel", "error", workers=others[:1])
    a, b, d = product("allgather", others, workers=others)
    with pytest.raises(dask_distmm.RunFailedError, match="injected at panel"):
        d.compute()
    a, b, d = product("allgather", others, workers=others)
    assert_product(a, b, d.compute())
    del d
    assert_nothing_left(client)
