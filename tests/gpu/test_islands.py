"""Products of GPUs of which some can't read the memory of others: one machine in the place of several hosts."""

from __future__ import annotations

import dask
import pytest
from cluster_runner import ClusterRunner
from conformance import conformance
from gpu_products import check
from leaks import assert_nothing_left
from matrices import until
from run_events import events

import dask_distmm
from dask_distmm.errors import RunFailedError

COUNTS = (2, 4)
METHODS = ["allgather", "summa", "reducescatter", "allreduce", "auto"]


@pytest.fixture(scope="module")
def runner(start, nworkers):
    quick = {"distmm.timeouts.grace": "3s", "distributed.deploy.lost-worker-timeout": "1h"}
    with dask.config.set(quick), start(nworkers, "tcp", hosts=2) as client:
        yield ClusterRunner(client, "peer")


@pytest.mark.engines("peer")
@pytest.mark.gpus(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("orders", ["CC", "FC"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "complex64"])
def test_conformance(runner, nworkers, method, orders, dtype):
    conformance(runner, method, nworkers, dtype, orders=orders, own_out_chunks=True)


@pytest.mark.engines("peer")
@pytest.mark.gpus(2)
def test_large_products(runner, nworkers):
    """Chunks that travel by themselves, and that come in time."""
    for dtype in ("float32", "bfloat16"):
        for chunks in (1024, 4096 // nworkers):
            check(runner.client, (4096, 4096, 4096), chunks, dtype, method="summa" if nworkers > 2 else "allgather")
    done = events(runner.client, "done")[-1]
    assert done["received_bytes"] > 0
    assert all(len(event["ranks"]) == nworkers for event in events(runner.client, "start"))


@pytest.mark.engines("peer")
@pytest.mark.gpus(2)
@pytest.mark.parametrize(("point", "how"), [("panel", "error"), ("panel", "kill"), ("exchange", "kill")])
def test_a_rank_that_fails(runner, nworkers, point, how):
    """Between two products, or while others wait inside of NCCL: their processes end, and are started again."""
    from faults import inject

    client = runner.client
    check(client, method="allgather")
    client.run(inject, point, how, workers=sorted(client.nthreads())[:1])
    if how == "error":
        with pytest.raises(RunFailedError, match="injected at panel"):
            check(client, method="allgather")
    else:
        check(client, method="allgather")
    until(lambda: len(client.nthreads()) == nworkers)
    check(client, method="allgather")
    assert_nothing_left(client)
    dask_distmm.free_workspaces()
    check(client, (600, 500, 400), 100, method="summa")
