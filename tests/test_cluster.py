"""The real thing: worker processes, real sockets."""

from __future__ import annotations

import threading

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product, random_chunks
from distributed import Client, LocalCluster, wait
from matrices import assert_near, fresh
from run_events import events, newest_run

import dask_distmm
from dask_distmm import matmul
from dask_distmm.runtime.keys import barrier_name

METHODS = ["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pack_below", [0, 384])
def test_methods(client, method, pack_below):
    rng = np.random.default_rng()
    m, k, n = (int(x) for x in rng.integers(50, 400, 3))
    kchunks = random_chunks(rng, k, 5), random_chunks(rng, k, 4)
    a = fresh(m, k, chunks=(random_chunks(rng, m, 5), kchunks[0]))
    b = fresh(k, n, chunks=(kchunks[1], random_chunks(rng, n, 5)))
    with dask.config.set({"distmm.numpy.pack-below": pack_below}):
        c = matmul(a, b, method=method)
    assert c.chunks == (a.chunks[0], b.chunks[1])
    assert c.dtype == np.float64
    assert type(c._meta) is np.ndarray
    assert_product(a.compute(), b.compute(), c.compute())


def test_a_collective_run_took_place(client):
    a = fresh(300, 300, chunks=100)
    matmul(a, a, method="summa").compute()
    last = events(client)[-2:]
    assert [event["action"] for event in last] == ["start", "done"]
    assert last[0]["method"] == "summa"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int8", "int64", "bool"])
def test_dtypes_over_the_wire(client, dtype):
    from conformance import random_matrix

    from dask_distmm.numeric.types import dtype_from_name

    rng = np.random.default_rng()
    a, b = (random_matrix(rng, shape, dtype_from_name(dtype), "C") for shape in ((150, 120), (120, 90)))
    c = matmul(da.from_array(a, chunks=50), da.from_array(b, chunks=40), method="summa").compute()
    assert_product(a, b, c)


def test_operator_and_reflected(client, take_all):
    a, b = fresh(200, 150, chunks=60), np.random.default_rng().standard_normal((150, 100))
    with dask_distmm.enabled():
        left, right = a @ b, b.T @ a.T
        for c in (left, right):
            assert c.name.startswith("matmul-")
        got = dask.compute(left, right)
    assert_product(a.compute(), b, got[0])
    assert_product(b.T, a.T.compute(), got[1])


def test_pipeline_around_the_multiply(client, take_all):
    """Upstream and downstream tasks, chains, the same input twice, slices."""
    x = fresh(240, 240, chunks=(70, 110))
    xn = x.compute()
    with dask_distmm.enabled():
        y = ((x + 1) @ x @ (x.T * 2)).sum(axis=0)
        top = (x @ x)[:10]
        got, head = dask.compute(y, top)
    np.testing.assert_allclose(got, ((xn + 1) @ xn @ (xn.T * 2)).sum(axis=0), rtol=1e-9, atol=1e-7)
    assert_product(xn[:10], xn, head)


def test_persist_future_and_reuse(client):
    a, b = fresh(200, 200, chunks=80), fresh(200, 200, chunks=90)
    c = matmul(a, b).persist()
    wait(c)
    future = client.compute(matmul(c, b).sum())
    expected = (a.compute() @ b.compute() @ b.compute()).sum()
    assert_near(future.result(), expected, rtol=1e-9)
    # The same multiply again has the same keys, and costs no second run.
    before = newest_run(client)
    assert matmul(a, b).name == c.name
    matmul(a, b).compute()
    assert newest_run(client) == before


def test_task_counts(client):
    a, b = fresh(400, 300, chunks=100), fresh(300, 500, chunks=100)
    graph = dict(matmul(a, b).dask)
    ours = {key for key in graph if barrier_name(key) or key[0].startswith("matmul-")}
    assert len(ours) == 1 + 4 * 5
    (barrier,) = (task for key, task in graph.items() if barrier_name(key))
    assert len(barrier.dependencies) == 4 * 3 + 3 * 5
    same = da.from_array(np.ones((300, 300)), chunks=100)
    (barrier,) = (task for key, task in dict(matmul(same, same).dask).items() if barrier_name(key))
    assert len(barrier.dependencies) == 9


def test_results_lie_with_their_owners(client):
    a = client.persist(fresh(900, 300, chunks=(100, 300)))
    wait(a)
    c = matmul(a, np.eye(300), method="allgather").persist()
    wait(c)
    holders = client.who_has(c)
    assert {len(found) for found in holders.values()} == {1}
    assert len({found[0] for found in holders.values()}) == 3


@pytest.mark.parametrize("when", ["before", "during"])
def test_dropped_results(client, when):
    for _ in range(5):
        c = matmul(fresh(600, 600, chunks=50), fresh(600, 600, chunks=50)).persist()
        if when == "during":
            threading.Event().wait(np.random.default_rng().uniform(0.02, 0.4))
        del c
    a = fresh(100, 100, chunks=50)
    assert_product(a.compute(), a.compute(), matmul(a, a).compute())


def test_several_clients_one_thread_workers(process_cluster):
    """Runs of three clients at once, on workers of one thread: all right, none waits for ever."""
    errors = []

    def work() -> None:
        try:
            with Client(process_cluster, set_as_default=False) as client, client.as_current():
                for _ in range(4):
                    a, b = fresh(150, 150, chunks=40), fresh(150, 150, chunks=60)
                    futures = client.compute([matmul(a, b), matmul(b, a)])
                    one, two = client.gather(futures)
                    assert_product(a.compute(), b.compute(), one)
                    assert_product(b.compute(), a.compute(), two)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors[0]


def test_workers_by_address_and_number(client):
    addresses = list(client.nthreads())
    a = client.persist(fresh(300, 300, chunks=100))
    wait(a)
    for workers, expected in ((addresses[1:2], 1), (addresses[:2], 2), (2, 2)):
        c = matmul(a, a, workers=workers, method="allgather").persist()
        wait(c)
        holders = {found[0] for found in client.who_has(c).values()}
        assert len(holders) == expected
        if not isinstance(workers, int):
            assert holders == set(workers)
        assert_product(a.compute(), a.compute(), c.compute())
        del c


def test_late_worker_takes_part():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        a = fresh(300, 300, chunks=100)
        matmul(a, a).compute()
        cluster.scale(2)
        client.wait_for_workers(2)
        b = fresh(300, 300, chunks=100)
        assert len(dask_distmm.explain(a, b, method="allgather").ranks) == 2
        c = matmul(a, b, method="allgather").persist()
        wait(c)
        assert len({found[0] for found in client.who_has(c).values()}) == 2
        assert_product(a.compute(), b.compute(), c.compute())


def test_within_a_task_without_the_cluster(client):
    """A task that computes by itself, in its own thread: nothing of it reaches the scheduler."""

    def work(a, b):
        import dask
        import dask.array as da

        from dask_distmm.arrays.request import parse
        from dask_distmm.graph import build_graph

        x, y = da.from_array(a, chunks=30), da.from_array(b, chunks=40)
        problem = parse(x, y).problem
        d = da.Array(build_graph(problem, x, y), problem.name, problem.d.chunks, dtype=float)
        with dask.config.set(scheduler="sync"):
            return d.compute()

    a, b = np.random.default_rng().standard_normal((2, 60, 60))
    before = newest_run(client)
    assert_product(a, b, client.submit(work, a, b).result())
    assert newest_run(client) == before


def test_first_use_without_the_client_side():
    """A graph made without a client installs the plugins from its own tasks."""
    a = fresh(200, 200, chunks=70)
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster:
        with Client(cluster) as client:
            c = matmul(a, a)
        with Client(cluster) as client:
            client.unregister_scheduler_plugin("distmm")
            client.unregister_worker_plugin("distmm")
            assert_product(a.compute(), a.compute(), c.compute())
