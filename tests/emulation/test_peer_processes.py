"""The engine that pulls on a cluster of processes, on emulated devices whose memory these processes share."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from device_memory import limit_device_memory
from distributed import Client, LocalCluster, Status
from faults import held_processes, inject, remove_faults
from leaks import assert_nothing_left
from matrices import until
from run_events import events

import dask_distmm
from dask_distmm import ProjectedMemoryError
from dask_distmm.arrays.product import run_outputs
from dask_distmm.arrays.request import parse
from dask_distmm.config import dask_costs
from dask_distmm.graph import can_be_made
from dask_distmm.planning import Worker
from dask_distmm.planning.waves import Budget, choose_scheme

FOLDER = str(Path(__file__).parent)


def become_gpu_worker(folder, devices_seen, hosts, dask_worker=None):
    """Put the stand-ins into this worker's process, for good: one of some hosts of GPUs."""
    import importlib.metadata

    sys.path.insert(0, FOLDER)
    import devices
    import pytest
    import shared
    from distributed.protocol import dask_deserialize, dask_serialize

    from dask_distmm.comms.serializers import register_serializers

    dask_worker._patch = pytest.MonkeyPatch()
    world = devices.install(dask_worker._patch, memory=shared.Memory(folder))
    world.folder = folder
    number, count = sorted(devices_seen).index(dask_worker.address), len(devices_seen) // hosts
    names = [f"0000:0{at}:00.0" for at in range(count)]
    world.devices = [names[number % count], *(name for name in names if name != names[number % count])]
    world.reached = world.devices[1:]
    dask_worker._world = world
    version = importlib.metadata.version
    dask_worker._patch.setattr("platform.node", lambda: f"host{number // count}")
    dask_worker._patch.setattr("importlib.metadata.version", lambda name: "1.0" if "nvmath" in name else version(name))
    # Over Dask's comms its arrays travel as NumPy's do.
    register_serializers()
    as_numpy = dask_serialize.dispatch(np.ndarray)
    dask_serialize.register(devices.ndarray)(lambda x, context=None: as_numpy(np.asarray(x), context=context))
    dask_deserialize.register(devices.ndarray)(dask_deserialize.dispatch(np.ndarray))


def mapped(dask_worker=None):
    world = getattr(dask_worker, "_world", None)
    return None if world is None else len(world.memory.mapped)


@pytest.fixture
def nworkers():
    return 3


@pytest.fixture
def hosts():
    return 1


@pytest.fixture
def client(tmp_path, nworkers, hosts):
    (tmp_path / "devices").mkdir()
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}),
        LocalCluster(
            n_workers=nworkers, threads_per_worker=1, dashboard_address="127.0.0.1:0", protocol="tcp"
        ) as cluster,
        Client(cluster) as client,
    ):
        addresses = sorted(client.nthreads())
        client.run(become_gpu_worker, str(tmp_path / "devices"), addresses, hosts)
        yield client


def product(method, **options):
    rng = np.random.default_rng()
    # As many rows and columns of chunks as 2, 3 and 4 ranks can share.
    a, b = rng.standard_normal((96, 70)), rng.standard_normal((70, 84))
    x, y = da.from_array(a, chunks=(8, 35)), da.from_array(b, chunks=(35, 7))
    return a, b, dask_distmm.matmul(x, y, method=method, engine="peer", **options)


def works(client, method="allgather"):
    a, b, d = product(method)
    assert_product(a, b, d.compute())


def not_again(client, address):
    """Let a worker's nanny go when it dies: a process that it started instead would have no stand-ins."""
    (nanny,) = [nanny for nanny in client.cluster.workers.values() if nanny.worker_address == address]
    nanny.status = Status.closing_gracefully


def test_processes_pull_from_each_other_and_outlive_one_that_is_killed(client):
    """All that needs processes, on one cluster: starting it takes longest."""
    for method in ("allgather", "reducescatter", "summa"):
        works(client, method)
    assert {event["engine"] for event in events(client, "start")} == {"peer"}
    assert events(client, "done")[0]["received_bytes"] > 0
    assert all(client.run(mapped).values())

    # Mappings are closed when engines release their groups.
    assert dask_distmm.free_workspaces() == 1
    assert set(client.run(mapped).values()) == {0}

    # A rank dies between two panels: the others keep their processes, and what they have.
    works(client)
    victim, *others = sorted(client.nthreads())
    survivors = client.run(os.getpid, workers=others)
    not_again(client, victim)
    client.run(inject, "panel", "kill", workers=[victim])
    works(client, "reducescatter")
    assert client.run(os.getpid) == survivors
    works(client)
    # The dead one's memory is not mapped any more: what is, is the other survivor's.
    until(lambda: all(0 < n <= 2 for n in client.run(mapped).values()))

    # An error on one rank ends the run on all, and nothing else.
    client.run(inject, "panel", "error", workers=others[:1])
    with pytest.raises(dask_distmm.RunFailedError, match="injected at panel"):
        works(client)
    works(client)
    assert_nothing_left(client)


def communicators(dask_worker=None):
    return dask_worker._world.open["communicator"]


@pytest.mark.parametrize(("nworkers", "hosts"), [(4, 2)])
def test_processes_of_several_hosts(client):
    """Chunks come once to each host, and are pulled there; a rank that dies leaves others as they are."""
    for method in ("allgather", "summa", "reducescatter"):
        works(client, method)
    assert {event["engine"] for event in events(client, "start")} == {"peer"}
    assert all(len(event["ranks"]) == 4 for event in events(client, "start"))
    assert all(client.run(mapped).values())
    assert all(client.run(communicators).values())
    assert dask_distmm.free_workspaces() >= 1
    assert set(client.run(mapped).values()) == {0} == set(client.run(communicators).values())

    # Before the gate, on one host, and between two products, on the other.
    victim, *others, second = sorted(client.nthreads())
    for dying, point in ((victim, "execute"), (second, "panel")):
        survivors = client.run(os.getpid)
        del survivors[dying]
        not_again(client, dying)
        client.run(inject, point, "kill", workers=[dying])
        works(client, "summa")
        assert client.run(os.getpid) == survivors
    works(client)
    assert all(client.run(communicators).values())
    client.run(inject, "panel", "error", workers=others[:1])
    with pytest.raises(dask_distmm.RunFailedError, match="injected at panel"):
        works(client)
    works(client)
    assert_nothing_left(client)


def killed_while_running(client, pick, folder, **options):
    """Multiply on ranks that stand still at first; kill the worker that `pick` names; check what is made.

    Returns the operations of each run that was started, and why it was started again.
    """
    addresses, release = sorted(client.nthreads()), Path(tempfile.mkdtemp(dir=folder)) / "release"
    client.run(inject, "panel", "hold", release=str(release))
    a, b, d = product("allgather", **options)
    starts, restarts = len(events(client, "start")), len(events(client, "restart"))
    future = client.compute(d)
    until(lambda: len(events(client, "start")) > starts)
    ranks = len(options.get("workers", addresses))
    until(lambda: len(held_processes(release)) == ranks)
    pids = client.run(os.getpid)
    victim = pick(addresses)
    not_again(client, victim)
    os.kill(pids.pop(victim), signal.SIGKILL)
    until(lambda: victim not in client.nthreads())
    release.touch()
    assert_product(a, b, future.result(timeout=120))
    client.run(remove_faults)
    assert client.run(os.getpid) == pids
    del future, d
    assert_nothing_left(client)
    found = [event["flops"] for event in events(client, "start")[starts:]]
    return found, [event["reason"] for event in events(client, "restart")[restarts:]]


@pytest.mark.parametrize("nworkers", [5])
def test_who_dies_costs_its_own_part(client, tmp_path):
    """The others finish theirs, with what it had offered; only what it would have made is made again."""
    works(client)
    # One that is no rank had chunks of A and B, all of which are read already, or mapped: nothing is missing.
    ranks = tuple(sorted(client.nthreads())[:4])
    (whole,), whys = killed_while_running(client, lambda every: every[4], tmp_path, workers=ranks)
    assert not whys
    # One rank of four, of three, of two. They have shares as the chunks of A and B are distributed.
    for _ in range(3):
        (first, part), (why,) = killed_while_running(client, min, tmp_path)
        done = int(re.search(r"(\d+) of 144 chunks are done", why)[1])
        assert 0 < done < 144
        assert (first, part) == (whole, whole * (144 - done) / 144)
    works(client)


def test_products_from_host_memory(client):
    """A and B stay in host memory where they do not fit on the GPUs; D is made in blocks where it does not, either."""
    rng = np.random.default_rng()
    works(client)
    a, b = rng.standard_normal((480, 360)), rng.standard_normal((360, 420))
    x, y = dask.persist(da.from_array(a, chunks=(60, 90)), da.from_array(b, chunks=(120, 70)))
    each = a.size * 8 / 3
    for size, scheme in ((4.2 * each, ""), (1.8 * each, "host")):
        limit_device_memory(client, size)
        with dask.config.set({"distmm.peer.buffer-bytes": 2**18, "distmm.engine": "peer"}):
            made, d = dask_distmm.explain(x, y), dask_distmm.matmul(x, y)
            assert made.scheme.name == scheme if scheme else made.from_host, made
            assert_product(a, b, d.compute())
    assert events(client, "done")[-1]["received_bytes"] > 0
    del x, y, d
    assert_nothing_left(client)


def streamed(x, y=None, **options):
    """Return a product in waves whose chunks ranks make, as of GPU workers with little host memory, and the waves."""
    a, b = (x.T, x) if y is None else (x, y)
    request = parse(a, b, engine="peer", **options)
    problem = request.problem
    can = tuple(map(can_be_made, (a, b)))
    for exponent in range(32, 60):
        names = ["0", "1", "2"]
        host = int(2 ** (exponent / 2))
        workers = [Worker(f"tcp://{n}", 1, 2**36, "host", n, tuple({*names} - {n}), host_limit=host) for n in names]
        with contextlib.suppress(ProjectedMemoryError):
            scheme = choose_scheme(
                problem, workers, can, Budget(0.6, 0.7, 1e6), dask_costs(), engine="peer", by_ranks=can
            )
            if scheme.by_ranks:
                return run_outputs(request, scheme), scheme
    raise AssertionError("never by ranks")


def test_ranks_make_chunks(client):
    """Tasks travel with the runs. A task that fails, a rank that dies, and a cancelled product leave nothing."""
    works(client)
    x = da.random.default_rng(3).random((4000, 60), chunks=(100, 60))
    values, right = x.compute(scheduler="sync"), np.random.default_rng().standard_normal((60, 50))
    for exact, (d, scheme) in (
        ((values.T, values), streamed(x)),
        ((values, right), streamed(x, da.from_array(right, chunks=25).persist())),
    ):
        before = len(events(client, "start"))
        assert_product(*exact, d.compute())
        assert len(events(client, "start")) == before + len(scheme.waves)
        assert {event["engine"] for event in events(client, "start")[before:]} == {"peer"}
    # Dask has seen none of its chunks.
    assert client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) < 10
    del d, scheme

    def torn(part, block_info=None):
        if block_info[0]["chunk-location"][0] == 13:
            raise OSError("it is torn")
        return part

    with pytest.raises(OSError, match="it is torn") as found:
        streamed(x.map_blocks(torn, dtype=float))[0].compute()
    (note,) = found.value.__notes__
    assert note.startswith("chunk (0, 13) of A can't be made on tcp://")

    def slowly(part):
        time.sleep(0.02)
        return part

    slow = x.map_blocks(slowly, dtype=float)
    future = client.compute(streamed(slow)[0].persist())
    starts = len(events(client, "start"))
    until(lambda: len(events(client, "start")) > starts)
    time.sleep(0.2)
    future.release()
    del future
    until(lambda: not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))

    resident = da.from_array(right, chunks=25).persist()
    for exact, operands in (((values.T, values), (slow,)), ((values, right), (slow, resident))):
        victim = sorted(client.nthreads())[0]
        not_again(client, victim)
        client.run(inject, "step", "kill", 2, workers=[victim])
        restarts = len(events(client, "restart"))
        assert_product(*exact, streamed(*operands)[0].compute())
        assert len(events(client, "restart")) > restarts
    del resident, operands
    assert_nothing_left(client)
