"""TLS everywhere, NCCL's plaintext, and what the scheduler makes of messages that are not ours."""

from __future__ import annotations

import asyncio
import ssl
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from certificates import authority, security
from conformance import assert_product
from distributed import Client, LocalCluster
from distributed.security import Security
from leaks import assert_nothing_left
from run_events import events

from dask_distmm import EngineError, __version__, matmul
from dask_distmm.planning import Demand
from dask_distmm.runtime.freezing import Roster
from dask_distmm.runtime.messages import Description


def test_tls_everywhere(tmp_path):
    """With encryption required: all ranks' transfers over TLS, right result; another authority is refused."""
    ours = security(authority(tmp_path / "ours", "ours"))
    strangers = security(authority(tmp_path / "strangers", "strangers"))
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, security=ours, protocol="tls://", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        assert all(address.startswith("tls://") for address in client.nthreads())
        rng = np.random.default_rng()
        a, b = rng.standard_normal((200, 180)), rng.standard_normal((180, 190))
        for method in ("summa", "reducescatter"):
            c = matmul(da.from_array(a, chunks=60), da.from_array(b, chunks=70), method=method)
            assert_product(a, b, c.compute())
            del c
        moved = [event["received_bytes"] for event in events(client, "done")]
        assert all(moved)
        assert_nothing_left(client)
        with pytest.raises((OSError, ssl.SSLError)):
            Client(cluster.scheduler_address, security=strangers, timeout=3, set_as_default=False)


def cluster_of(*hosts: str, encrypted: bool = True) -> Roster:
    """A roster of workers that say they have the GPU engine, without a cluster."""
    status, memory = SimpleNamespace(name="running"), SimpleNamespace(unmanaged_old=0)
    workers = {
        f"tls://{host}:{i}": SimpleNamespace(
            address=f"tls://{host}:{i}", status=status, memory=memory, nthreads=1, memory_limit=1
        )
        for i, host in enumerate(hosts)
    }
    roster = Roster(SimpleNamespace(workers=workers, security=Security(require_encryption=encrypted)))
    for host, address in zip(hosts, workers, strict=True):
        roster._described[address] = Description("OK", version=__version__, host=host, engines={"cublasmp": {}})
    return roster


def choose(roster: Roster, **options):
    return asyncio.run(roster.choose(Demand("auto", "cupy", ("float64",) * 3, **options)))


def test_nccl_is_refused_where_tls_does_not_cover_it():
    """On one host nothing leaves it; across hosts only who says so gets plaintext."""
    assert choose(cluster_of("a", "a"))[0] == ("cublasmp",)
    assert choose(cluster_of("a", "b", encrypted=False))[0] == ("cublasmp",)
    assert choose(cluster_of("a", "b"), plaintext_nccl=True)[0] == ("cublasmp",)
    with pytest.raises(EngineError, match="a and b.*not encrypted.*distmm.allow-plaintext-nccl"):
        choose(cluster_of("a", "b", "a"))
