"""A scheduler and workers on hosts of their own (network namespaces): over each protocol, and when a network is cut."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import dask
import hosts
import pytest
from certificates import authority, environment
from conformance import assert_product
from distributed import Client
from faults import inject
from leaks import assert_nothing_left
from matrices import operands, until
from run_events import until_running

from dask_distmm import DistMMError, matmul

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "can run"),
]

# Silence comes after what Dask itself takes for a dead connection, as it does by default.
LIMITS = {"distmm.timeouts": {"vote": "4s", "transfer": "4s", "silence": "30s", "grace": "5s"}, "distmm.retries": 1}
# How soon Dask itself takes a connection for dead; less than 11 s it refuses.
DASK = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "4s"}


@contextlib.contextmanager
def started(folder, protocol, **environment):
    """Start a scheduler here and two hosts with two workers each; yields the hosts and the scheduler's file."""
    with hosts.Hosts(2, folder) as made:
        file = folder / "scheduler.json"
        common = ["--scheduler-file", str(file), "--protocol", protocol, "--no-dashboard", "--preload", "dask_distmm"]
        made.start(None, "scheduler", "--host", made.here, "--port", "0", *common, **environment)
        until(file.exists)
        for i, address in enumerate(made.addresses):
            made.start(
                i, "worker", "--host", address, "--nworkers", "2", "--nthreads", "1", *common, **environment
            )  # fmt: skip
        yield made, file


@contextlib.contextmanager
def cluster(folder):
    """The same, and a client."""
    limits = dask.config.set({"distributed.comm.timeouts": {"tcp": "11s", "connect": "10s"}})
    with started(folder, "tcp", **DASK) as (made, file), limits, Client(scheduler_file=str(file)) as client:
        client.wait_for_workers(4, timeout=120)
        yield made, client


@pytest.mark.parametrize("protocol", ["tls", "ucx"])
def test_two_hosts(protocol, tmp_path):
    """Every method, with a scheduler here and two workers on each of two hosts."""
    given = {}
    if protocol == "tls":
        given = environment(authority(tmp_path / "ours", "ours"))
    elif protocol == "ucx":
        pytest.importorskip("distributed_ucxx")
    program = [sys.executable, str(pathlib.Path(__file__).with_name("two_hosts_cases.py"))]
    with started(tmp_path, protocol, **given) as (_, file):
        done = subprocess.run(
            [*program, str(file), protocol],
            check=False, capture_output=True, text=True, timeout=350, env=os.environ | given,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "right on two hosts" in done.stdout


def under_way(client):
    """Begin a multiply; return it and its operands while all ranks are in the GEMM, where they stay for a while.

    What Dask itself moves, before a run and to collect its result, waits as long as a network is cut.
    """
    for address in client.nthreads():
        client.run(inject, "execute", "sleep", 0, 3.0, workers=[address])
    a, b, x, y = operands()
    future = client.compute(matmul(x, y, method="summa"))
    until_running(client)
    time.sleep(0.5)
    return a, b, future


def works(client, method="summa") -> None:
    a, b, x, y = operands()
    assert_product(a, b, client.compute(matmul(x, y, method=method)).result(timeout=120))


@pytest.mark.timeout(600)
def test_a_network_is_cut(tmp_path, record_property):
    """Between two hosts, then between one and the scheduler: for longer than any limit, while a run is under way."""
    with cluster(tmp_path) as (made, client), dask.config.set(LIMITS):
        works(client)
        works(client, "reducescatter")
        a, b, future = under_way(client)
        with made.cut((0, 1)):
            started = time.monotonic()
            try:
                found = future.result(timeout=120)
            except DistMMError as error:
                record_property("workers cut", f"{type(error).__name__} after {time.monotonic() - started:.1f} s")
            else:
                assert_product(a, b, found)
        del future
        works(client)
        assert_nothing_left(client)
        # Between a host and the scheduler: its workers are gone for Dask, and close.
        a, b, future = under_way(client)
        with made.cut((1, None)):
            started = time.monotonic()
            assert_product(a, b, future.result(timeout=120))
            record_property("scheduler cut", f"right after {time.monotonic() - started:.1f} s")
            left = client.nthreads()
            assert {address.split("//")[1].split(":")[0] for address in left} == {made.addresses[0]}
            works(client)
        del future
        works(client)
        assert_nothing_left(client)
