"""The engine that pulls, on GPUs of one host: choice, faults, mappings, memory that comes and goes."""

from __future__ import annotations

import os
import time

import dask
import dask.array as da
import numpy as np
import pytest
from cluster_runner import ClusterRunner
from conformance import conformance
from faults import inject
from gpu_products import check, on_gpus, random
from leaks import assert_nothing_left
from matrices import assert_large_product
from residuals import assert_cholesky
from run_events import events

import dask_distmm
from dask_distmm import linalg
from dask_distmm.errors import RunFailedError
from dask_distmm.planning.schedule import extent_multiple

pytestmark = [pytest.mark.gpus(2), pytest.mark.engines("peer")]
# With as many ranks, where there are as many GPUs.
COUNTS = (2, 4)
QUIET = {"distributed.deploy.lost-worker-timeout": "1h"}


def mapped():
    from dask_distmm.engines.base import get_engine

    return len(get_engine("peer").mappings)


def test_auto_takes_it_where_all_gpus_reach_each_other(clusters):
    clusters(2)
    with dask.config.set({"distmm.engine": "auto"}):
        x = on_gpus(random((8192, 8192), "float32"), (4096, 8192)).persist()
        plan = dask_distmm.explain(x, x)
    assert plan.engine == "peer", plan


@pytest.mark.parametrize("method", ["allgather", "reducescatter", "allreduce", "summa"])
@pytest.mark.parametrize("size", ["64 KiB", "1 MiB"])
def test_little_room_for_buffers(clusters, method, size):
    """Many panels, k cut, each buffer used again and again."""
    with dask.config.set({"distmm.peer.buffer-bytes": size}):
        for dtype in ("float64", "bfloat16"):
            conformance(ClusterRunner(clusters(2)[0]), method, 2, dtype, shape=(531, 402, 615), own_out_chunks=True)


@pytest.mark.parametrize("shape", [(4099, 2053, 3001), (8192, 64, 8192), (96, 8192, 8192), (512, 512, 65536)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", ["auto", "allgather", "reducescatter", "summa"])
def test_sizes_that_take_time(clusters, shape, dtype, method):
    """Long enough for panels, GEMMs and flags to overlap."""
    client, _ = clusters(2)
    m, n, k = shape
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(size, np.float32).astype(dtype) for size in ((m, k), (k, n)))
    x, y = (on_gpus(v, tuple(-(-s // 3) for s in v.shape)) for v in (a, b))
    found = client.compute(dask_distmm.matmul(x, y, method=method), sync=True).get()
    assert_large_product(a, b, found)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("method", ["auto", "local", "allgather", "reducescatter"])
def test_extents_that_are_padded(clusters, dtype, method):
    """Those that cuBLAS is slow with."""
    client, _ = clusters(2)
    a, b = random((2053, 2407), dtype), random((2407, 1999), dtype)
    x, y = on_gpus(a, (700, 1203)), on_gpus(b, (1203, 1000))
    assert extent_multiple(dask_distmm.explain(x, y, method=method).problem) == 16
    found = client.compute(dask_distmm.matmul(x, y, method=method), sync=True).get()
    assert_large_product(a, b, found)


@pytest.mark.parametrize("skip", [0, 20])
def test_a_rank_killed_while_others_wait_for_its_panel(start, nworkers, skip):
    """Kernels on their GPUs do: they end with the run."""
    s = random((900, 900))
    s = s @ s.T + 900 * np.eye(900)
    with dask.config.set(QUIET), start(nworkers, "tcp") as client:
        victim, *others = sorted(client.nthreads())
        survivors = set(client.run(os.getpid, workers=others).values())
        client.run(inject, "steps", "kill", skip, workers=[victim])
        factor = linalg.cholesky(on_gpus(s, 300), lower=True, method="columns")
        assert_cholesky(s, client.compute(factor, sync=True).get())
        client.wait_for_workers(nworkers, timeout=30)
        assert survivors <= set(client.run(os.getpid).values())
        assert_nothing_left(client)


@pytest.mark.parametrize("method", ["allgather", "reducescatter"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_rank_killed_between_panels_costs_only_itself(start, nworkers, method, skip):
    with dask.config.set(QUIET | {"distmm.peer.buffer-bytes": "1 MiB"}), start(nworkers, "tcp") as client:
        check(client)
        victim, *others = sorted(client.nthreads())
        survivors = set(client.run(os.getpid, workers=others).values())
        client.run(inject, "panel", "kill", skip, workers=[victim])
        started = time.monotonic()
        check(client, (2048, 2048, 2048), 256, method=method)
        took = time.monotonic() - started
        client.wait_for_workers(nworkers, timeout=30)
        print(f"killed before panel {skip} of {method} on {nworkers}: recovered after {took:.1f} s")
        assert survivors <= set(client.run(os.getpid).values())
        assert took < 60
        if method == "allgather":
            # The survivors have finished their parts.
            whole, part = (event["flops"] for event in events(client, "start")[-2:])
            assert part == whole / nworkers
        check(client, method=method)
        assert_nothing_left(client)


def test_an_error_on_one_rank_ends_the_run_on_all(clusters):
    client, _ = clusters(2)
    victim = sorted(client.nthreads())[0]
    client.run(inject, "panel", "error", workers=[victim])
    with pytest.raises(RunFailedError, match="injected at panel"):
        check(client, method="allgather")
    check(client, method="allgather")


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_memory_that_was_given_back_is_no_longer_mapped(start, protocol):
    """Exporters empty their pools between runs: addresses come again, with other allocations behind them."""

    def empty_pools():
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()

    with start(2, protocol) as client:
        counts = []
        for n in (700, 900, 700, 1100, 500, 700):
            check(client, (n, n, n), n // 2, method="allgather")
            counts.append(max(client.run(mapped).values()))
            client.run(empty_pools)
        # What is not sent over UCX stays for the next run.
        assert counts[-1] <= counts[0] + (2 if protocol == "tcp" else 5), counts
        assert dask_distmm.free_workspaces() >= 1
        assert set(client.run(mapped).values()) == {0}


@pytest.mark.parametrize("method", ["allgather", "reducescatter", "summa"])
def test_chunks_that_ucx_moves_too(clusters, method):
    """The driver lets one library of a process map an allocation; UCX has those that it has sent out of."""
    client, _ = clusters(2)
    a, b = random((2048, 1024), "float32"), random((1024, 3000), "float32")
    x, y = on_gpus(a, 512).persist(), on_gpus(b, 512).persist()
    for factor in (1, 2, 3):
        found = client.compute(dask_distmm.matmul(x, y, alpha=factor, method=method), sync=True).get()
        assert_large_product(a * np.float32(factor), b, found)
        assert (client.compute(x.rechunk((2048, 100)), sync=True).get() == a).all()


def test_shares_of_one_run_agree_bit_by_bit(clusters):
    """Sums over k are added in an order that is the same every time."""
    client, _ = clusters(2)
    a, b = random((1024, 4096)), random((4096, 1024))
    x, y = on_gpus(a, 512).persist(), on_gpus(b, 512).persist()
    found = []
    for _ in range(3):
        d = dask_distmm.matmul(x, y, method="reducescatter", out_chunks=(512, 512))
        found.append(client.compute(d.map_blocks(lambda chunk: chunk.copy()), sync=True).get())
        del d
        x, y = (da.Array(v.dask, v.name, v.chunks, meta=v._meta) for v in (x, y))
    assert_large_product(a, b, found[0])
    assert all((one == found[0]).all() for one in found[1:])
