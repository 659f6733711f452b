"""Real clusters of GPU workers: memory pools, spilling, faults, hosts without shared memory, long use."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from gpu_products import N, check, on_gpus, random
from leaks import assert_nothing_left
from matrices import assert_large_product
from residuals import assert_cholesky, assert_eigh, assert_qr, assert_solution
from run_events import events

import dask_distmm
from dask_distmm import linalg
from dask_distmm.errors import RunFailedError

# Faults and memory pools with as many ranks, where there are as many GPUs.
COUNTS = (2, 4)


@pytest.mark.gpus(2)
def test_operator_keeps_chunks_on_their_gpus(clusters):
    import cupy

    client, _ = clusters(2)
    a, b = random((N, N)), random((N, N))
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0, "distmm.method": "allgather"}):
        x, y = (on_gpus(v, (N // 2, N)) for v in (a, b))
        d = x @ y
        assert type(d._meta) is cupy.ndarray
        assert any("distmm-barrier" in str(key) for key in d.dask)
        kept = d.persist()
        wait(kept)
        # Before anybody fetches chunks: of two copies Dask drops the one on the worker whose process is the larger one.
        workers = {holder for holders in client.who_has(kept).values() for holder in holders}
        assert_product(a, b, kept.compute().get())
        gram = (x.T @ x).compute()
        assert_product(np.ascontiguousarray(a.T), a, gram.get())
    assert len(workers) == 2
    del d, kept, x, y
    assert_nothing_left(client)


@pytest.mark.gpus(2)
def test_too_narrow_types_go_to_dask(clusters):
    clusters(2)
    a = np.arange(36).reshape(6, 6)
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        d = on_gpus(a, 3) @ on_gpus(a, 3)
    assert not any("distmm-barrier" in str(key) for key in d.dask)
    assert "no engine" in repr(dask_distmm.explain(on_gpus(a, 3), on_gpus(a, 3)))


def spilled(dask_worker):
    """Return how many results of a worker have gone from its GPU to the host."""
    return len(dask_worker.data.device_keys - set(dask_worker.data.device))


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "pool",
    [
        {"rmm_pool_size": "2GB", "rmm_allocator_external_lib_list": "cupy"},
        {"rmm_async": True, "rmm_allocator_external_lib_list": "cupy"},
        {"device_memory_limit": "256MB"},
        {"protocol": "ucx"},
    ],
    ids=["rmm pool", "rmm async", "spilled", "ucx"],
)
def test_pools_and_spilling(start, nworkers, pool):
    """Where results may have 256 MB of a GPU, those that came last drive all chunks of A and B to the host."""
    with start(nworkers, **{"protocol": "tcp"} | pool) as client:
        for dtype in ("float64", "bfloat16"):
            a, b = random((1024, 384), dtype), random((384, 1024), dtype)
            x, y = on_gpus(a, 128).persist(), on_gpus(b, 128).persist()
            wait([x, y])
            later = da.zeros(nworkers * 2**28, chunks=2**25, dtype="int8").to_backend("cupy").persist()
            wait(later)
            assert any(client.run(spilled).values()) == ("device_memory_limit" in pool)
            for method in ("allgather", "reducescatter"):
                d = dask_distmm.matmul(x, y, method=method).persist()
                found = d.compute().get()
                assert found.dtype == dtype
                assert_product(a, b, found)
                del d


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(2)
@pytest.mark.parametrize("point", ["exchange", "library"])
def test_a_rank_killed_inside_a_collective(start, nworkers, point):
    """The result is right, whether the others' kernels end by themselves or only with their processes.

    The ranks have done the same product before, so that NCCL has connected them: B is on the victim, from which all
    others need columns.
    """
    from faults import inject

    quick = {"distmm.timeouts.grace": "3s", "distributed.deploy.lost-worker-timeout": "1h"}
    with dask.config.set(quick), start(nworkers, "tcp") as client:
        victim, *others = sorted(client.nthreads())
        addresses, rows = [victim, *others], 4096 // nworkers
        a, b = random((4096, 384)), random((384, 384))
        slabs = [on_gpus(a[at * rows : (at + 1) * rows], 128) for at in range(nworkers)]
        # What was on the victim is made again where there is a worker: that which takes its place has another address.
        anywhere = {"allow_other_workers": True}
        x = da.concatenate([client.persist(s, workers=[w], **anywhere) for s, w in zip(slabs, addresses, strict=True)])
        y = client.persist(on_gpus(b, 128), workers=[victim], **anywhere)
        multiplied = [dask_distmm.matmul(x, y, alpha=alpha, method="allgather") for alpha in (1.0, 2.0)]
        assert_large_product(a, b, client.compute(multiplied[0], sync=True).get())
        survivors = set(client.run(os.getpid, workers=others).values())
        client.run(inject, point, "kill", workers=[victim])
        started = time.monotonic()
        found = client.compute(multiplied[1], sync=True).get()
        took = time.monotonic() - started
        client.wait_for_workers(nworkers, timeout=30)
        ended = survivors - set(client.run(os.getpid).values())
        print(f"killed at {point}: recovered after {took:.1f} s, survivors that exited: {len(ended)}")
        assert took < 60
        assert_large_product(2 * a, b, found)
        del x, y, multiplied
        check(client, method="allgather")
        assert_nothing_left(client)


@pytest.mark.gpus(2)
def test_a_rank_killed_before_the_library_costs_only_itself(start, nworkers):
    from faults import inject

    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}), start(nworkers, "tcp") as client:
        check(client)
        victim, *others = sorted(client.nthreads())
        survivors = client.run(os.getpid, workers=others)
        client.run(inject, "vote", "kill", workers=[victim])
        started = time.monotonic()
        check(client, method="allgather")
        print(f"killed at the vote: recovered after {time.monotonic() - started:.1f} s")
        assert set(survivors.values()) <= set(client.run(os.getpid).values())


@pytest.mark.gpus(2)
def test_no_memory_on_one_rank_is_one_error_that_names_it(start, nworkers):
    def fill(dask_worker):
        import cupy

        free = cupy.cuda.runtime.memGetInfo()[0]
        dask_worker._hog = cupy.cuda.runtime.malloc(free - 300 * 2**20)

    def empty(dask_worker):
        import cupy

        cupy.cuda.runtime.free(dask_worker._hog)

    with start(nworkers, "tcp") as client:
        check(client)
        victim = sorted(client.nthreads())[1]
        pids = client.run(os.getpid)
        client.run(fill, workers=[victim])
        size = 8192
        a = da.random.default_rng(np.random.default_rng()).random((size, size), chunks=(size // nworkers, size))
        import cupy

        x = a.map_blocks(cupy.asarray, meta=cupy.empty((0, 0)))
        with pytest.raises((RunFailedError, MemoryError, RuntimeError), match=r"emory"):
            client.compute(dask_distmm.matmul(x, x, method="allgather"), sync=True)
        client.run(empty, workers=[victim])
        check(client)
        assert client.run(os.getpid) == pids


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(2)
def test_workspace_that_does_not_fit_is_agreed_on(start, nworkers):
    from faults import inject

    with start(nworkers, "tcp") as client:
        victim = sorted(client.nthreads())[1]
        client.run(inject, "workspace", "device memory", workers=[victim])
        with pytest.raises(RunFailedError, match=f"{victim}: no room for cuBLASMp's workspace"):
            check(client, method="allgather")
        check(client, method="allgather")


@pytest.mark.gpus(2)
def test_two_hundred_multiplies_leave_everything_flat(clusters):
    def resources(dask_worker):
        import cupy
        import psutil

        process = psutil.Process()
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0], process.num_fds(), process.num_threads()

    client, _ = clusters(2)
    for method in ("allgather", "reducescatter", "allreduce") * 30:
        check(client, (64, 64, 64), 32, method=method)
    before = client.run(resources)
    for i in range(200):
        check(client, (64, 64, 64), 32, method=["allgather", "reducescatter", "allreduce"][i % 3])
    after = client.run(resources)
    for address, (free, fds, threads) in after.items():
        assert free >= before[address][0] - 2**20, (before, after)
        assert fds <= before[address][1] + 2
        assert threads <= before[address][2] + 2


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(2)
def test_groups_are_limited_and_freed(start):
    with dask.config.set({"distmm.cublasmp.max-groups": 1}), start(2, "tcp") as client:
        addresses = sorted(client.nthreads())

        def groups(dask_worker):
            from dask_distmm.engines.base import get_engine

            return sorted(get_engine("cublasmp").groups)

        a, b = random((N, N)), random((N, N))
        for order in (addresses, addresses[::-1]):
            x, y = on_gpus(a, (N // 2, N)), on_gpus(b, N)
            placed = [client.compute(x.blocks[i], workers=[order[i]]) for i in range(2)]
            graph = {("placed" + order[0], i, 0): future for i, future in enumerate(placed)}
            x = da.Array(graph, "placed" + order[0], x.chunks, meta=x._meta)
            assert_product(a, b, dask_distmm.matmul(x, y, method="allgather").compute().get())
        deadline = time.monotonic() + 20
        while any(len(found) != 1 for found in client.run(groups).values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        check(client)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("method", ["allgather", "reducescatter", "allreduce", "summa", "local"])
@pytest.mark.parametrize("chunks", ["slabs", 512], ids=["one chunk a GPU", "4 x 4 chunks"])
def test_what_is_held_is_what_was_projected(clusters, method, chunks):
    """Within 10 %; what is held are matrices, buffers and the workspace as the library has reported it."""
    import cupy

    n = 2048
    client, _ = clusters(2)
    dask_distmm.free_workspaces()  # what earlier tests have left is larger, or smaller
    addresses = sorted(client.nthreads())
    sizes = ((n // 2, n), (n, n // 2)) if chunks == "slabs" else ((chunks, chunks),) * 2
    operands = []
    for number, size in enumerate(sizes):
        x = on_gpus(random((n, n)), size)
        keys = [(i, j) for i in range(x.numblocks[0]) for j in range(x.numblocks[1])]
        name = f"held-{method}-{chunks}-{number}"
        futures = [
            client.compute(x.blocks[key], workers=[addresses[at * 2 // len(keys)]]) for at, key in enumerate(keys)
        ]
        graph = {(name, *key): future for key, future in zip(keys, futures, strict=True)}
        operands.append(da.Array(graph, name, x.chunks, meta=cupy.empty((0, 0))))
    for _ in range(2):
        dask_distmm.matmul(*operands, method=method).sum().compute()
        operands.reverse()
    event = events(client, "done")[-1]
    for address, held in event["held_bytes"].items():
        projected = event["projected_bytes"][address]
        print(f"{method}, {chunks}: held {held >> 20} MiB, projected {projected >> 20} MiB")
        assert 0.9 * held <= projected <= 1.1 * held + 2**24


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(2)
def test_workspaces_are_freed_on_demand(start):
    def groups(dask_worker):
        from dask_distmm.engines.base import get_engine

        return len(get_engine("cublasmp").groups)

    with start(2, "tcp") as client:
        check(client, method="allgather")
        assert set(client.run(groups).values()) == {1}
        assert dask_distmm.free_workspaces() == 1
        assert set(client.run(groups).values()) == {0}
        assert dask_distmm.free_workspaces() == 0
        check(client, method="allgather")


@contextlib.contextmanager
def apart(tmp_path):
    """Yield the client of a scheduler and workers, with preload, whose GPUs see each other by sockets only."""
    from distributed import Client

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        # Chunks are made by functions of modules of these tests.
        "PYTHONPATH": os.pathsep.join(sys.path),
        "DASK_DISTRIBUTED__WORKER__PRELOAD": "dask_distmm",
        "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "dask_distmm",
    }
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    worker = ["cuda", "worker", f"tcp://127.0.0.1:{port}", "--host", "127.0.0.1", "--no-dashboard"]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    processes = []
    try:
        for command, more in (
            (scheduler, {}),
            (worker, {"CUDA_VISIBLE_DEVICES": devices[0]}),
            (worker, {"CUDA_VISIBLE_DEVICES": devices[1]}),
        ):
            with (tmp_path / f"{len(processes)}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "dask", *command],
                        env=environment | more,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        cwd=tmp_path,
                    )
                )
        with Client(f"tcp://127.0.0.1:{port}", timeout=60) as client:
            client.wait_for_workers(2, timeout=60)
            yield client
    except BaseException:
        for path in sorted(tmp_path.glob("*.log")):
            print(path.read_text()[-3000:])
        raise
    finally:
        for process in processes[::-1]:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def shares(dask_worker, engine):
    """Whether the ranks of each group of an engine share memory."""
    from dask_distmm.engines.base import get_engine

    return [group.comm.shares_memory for group in get_engine(engine).groups.values()]


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(2)
def test_products_on_hosts_without_shared_memory(tmp_path):
    with apart(tmp_path) as client:
        for method in ("allgather", "reducescatter", "allreduce", "summa"):
            check(client, method=method)
        assert all(found == [False] for found in client.run(shares, engine="cublasmp").values())


@pytest.mark.engines("auto")
@pytest.mark.gpus(2)
def test_factorizations_on_hosts_without_shared_memory(tmp_path):
    n = 900
    a, b = random((n, n)), random((n, 7))
    s = a @ a.T + n * np.eye(n)
    with apart(tmp_path) as client:
        shared = {"method": "columns"}
        low = client.compute(linalg.cholesky(on_gpus(s, 200), lower=True, **shared), sync=True).get()
        assert_cholesky(s, low)
        x = client.compute(linalg.solve(on_gpus(a, 300), on_gpus(b, 300), **shared), sync=True).get()
        assert_solution(a, x, b)
        q, r = (client.compute(one, sync=True).get() for one in client.persist(linalg.qr(on_gpus(a, 300), **shared)))
        assert_qr(a, q, r)
        w, v = (client.compute(one, sync=True).get() for one in client.persist(linalg.eigh(on_gpus(s, 300))))
        assert_eigh(s, w, v)
        x = client.compute(linalg.solve_triangular(on_gpus(s, 300), on_gpus(b, 300), **shared), sync=True).get()
        assert_solution(np.triu(s), x, b)
        assert {event["engine"] for event in events(client, "start")} == {"nccl"}
        assert all(found == [False] for found in client.run(shares, engine="nccl").values())
        assert_nothing_left(client)


@pytest.mark.engines("nccl")
@pytest.mark.gpus(2)
@pytest.mark.parametrize("point", ["exchange", "broadcast"])
def test_a_rank_killed_while_all_factorize(start, nworkers, point):
    """The others wait for it in the library: their processes end themselves, and Dask begins again."""
    from faults import inject

    quick = {"distmm.timeouts.grace": "3s", "distributed.deploy.lost-worker-timeout": "1h"}
    s = random((900, 900))
    s = s @ s.T + 900 * np.eye(900)
    with dask.config.set(quick), start(nworkers, "tcp") as client:
        victim = sorted(client.nthreads())[0]
        for turn in range(2):
            if not turn:
                client.run(inject, point, "kill", workers=[victim])
            began = time.monotonic()
            found = client.compute(linalg.cholesky(on_gpus(s, 300), lower=True, method="columns"), sync=True).get()
            assert time.monotonic() - began < 90
            assert_cholesky(s, found)
            client.wait_for_workers(nworkers, timeout=30)
        assert_nothing_left(client)
