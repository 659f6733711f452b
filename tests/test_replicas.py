"""``epilog="allreduce"``: all of D on every worker, for operands of later multiplies."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from hypothesis import given, settings
from hypothesis import strategies as st
from run_events import events
from stand_ins import Loop, ask

import dask_distmm
from dask_distmm import Matmul, PlanError, ProjectedMemoryError, matmul
from dask_distmm.errors import RunFailedError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import EVERYWHERE, METHODS, Plan, Worker, plan
from dask_distmm.runtime.messages import NAME, Abort, Fetch, Prepare, Start
from dask_distmm.runtime.worker.side import WorkerSide
from dask_distmm.testing import assert_nothing_left, assert_product, inject, make_problem, random_chunks

rng = np.random.default_rng()


def fresh(*shape, chunks=30, dtype="float64"):
    return da.from_array(rng.standard_normal(shape).astype(dtype), chunks=chunks)


def runs(client):
    return events(client, "done")


def kept(client):
    """How many results each worker keeps."""
    return set(client.run(lambda dask_worker: len(dask_worker.extensions[NAME].replicas)).values())


def until(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it does not come true")


# The plan


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(METHODS), st.sampled_from(["numpy", "cublasmp"]), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_what_replicas_add_to_a_plan(method, engine, nranks, seed):
    """Each worker gets what it does not own: so many bytes more to move, to hold, to wait for."""
    seeded = np.random.default_rng(seed)
    m, n, k = (int(x) for x in seeded.integers(5, 40, 3))
    sizes = (random_chunks(seeded, m, 4), random_chunks(seeded, k, 4)), (random_chunks(seeded, k, 4), (n,))
    roster = [Worker(f"w{i}") for i in range(nranks)]
    grid = plan(make_problem(*sizes, method=method), roster, engine=engine).grid
    before, after = (
        plan(make_problem(*sizes, method=method, grid=grid, formula=formula), roster, engine=engine)
        for formula in (Formula(), Formula(epilog="allreduce"))
    )
    assert (before.replicas, after.replicas) == (0, nranks)
    assert Plan.from_wire(after.to_wire()).replicas == nranks
    assert before.grid == after.grid
    size = m * n * 8
    added = nranks * size - size
    by_library = engine == "cublasmp" and after.method == "allreduce" and len(after.ranks) > 1
    # Chunks as small as these travel packed between GPUs: a vector each way.
    packed = 2 * size * (len(after.ranks) - 1) if engine == "cublasmp" and not by_library else 0
    assert sum(after.projected_bytes.values()) - sum(before.projected_bytes.values()) == added + packed
    moved = size * (nranks - len(after.ranks)) if by_library else added
    assert after.bytes_moved - before.bytes_moved == moved
    assert (after.estimate.seconds > before.estimate.seconds) == (moved > 0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(METHODS), st.sampled_from(["numpy", "cublasmp"]), st.sampled_from(["a", "b", "ab"]))
def test_an_operand_that_is_everywhere_moves_nothing(method, engine, operands):
    problem = make_problem(((8, 8), (8, 8)), ((8, 8), (8, 8)), method=method)
    roster = [Worker(f"w{i}") for i in range(3)]
    places = {name: np.full(4, EVERYWHERE if name in operands else 0, np.int32) for name in "ab"}
    made = plan(problem, roster, places, engine=engine, replica_runs=tuple(int(name in operands) for name in "ab"))
    again = Plan.from_wire(made.to_wire())
    assert again.replica_runs == made.replica_runs
    for name, where in again.where.items():
        assert bool(np.all(where == EVERYWHERE)) == (name in operands)
    assert ("on all workers" in repr(made)) == bool(operands)
    if engine == "numpy" and operands == "ab" and made.grid[2] == 1:
        staged = plan(problem, roster, dict.fromkeys("ab", np.zeros(4, np.int32)), engine=engine)
        assert made.bytes_moved <= staged.bytes_moved
    # All of it counts as held, on all ranks.
    least = 16 * 16 * 8 * len(operands)
    assert all(made.projected_bytes[address] >= least for address in made.workers)


def test_more_than_a_worker_may_hold():
    """Without replicas there is room for it, with them there is not."""
    sizes = ((100,) * 4, (50,)), ((50,), (100,) * 4)
    made = plan(make_problem(*sizes), [Worker(f"w{i}") for i in range(4)])
    limit = int(max(made.projected_bytes.values()) * 1.35)
    roster = [Worker(f"w{i}", memory_limit=limit) for i in range(4)]
    assert plan(make_problem(*sizes), roster).grid == made.grid
    with pytest.raises(ProjectedMemoryError, match="all of D is to be on each worker") as caught:
        plan(make_problem(*sizes, formula=Formula(epilog="allreduce")), roster)
    assert min(caught.value.projected.values()) >= 400 * 400 * 8


# The worker


def test_a_vote_finds_out_what_is_missing():
    async def work() -> None:
        side = WorkerSide(Loop())
        problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m", arrays=("x", "y"))
        side.worker.data["y", 0, 0] = np.ones((5, 6))
        keys = {"b": [("y", 0, 0)]}
        where = {"a": np.full(2, EVERYWHERE, np.int32), "b": np.zeros(1, np.int32)}
        wire = plan(problem, [Worker("inproc://1")], where, replica_runs=(7, 0)).to_wire()
        chunks = {0: np.ones((4, 5)), 1: np.ones((3, 5))}
        for run_id in (None, 6):
            if run_id is not None:
                side.replicas._kept["x"] = run_id, chunks  # of another run
            vote = await ask(side, Prepare(8, 0, wire, keys))
            assert (vote.status, vote.names) == ("no replicas", ["x"])
        side.replicas._kept["x"] = 7, chunks
        side.replicas.drop("x", 6)
        assert (await ask(side, Prepare(8, 0, wire, keys))).status == "OK"
        assert (await ask(side, Start(8))).status == "OK"
        np.testing.assert_array_equal(side.worker.data["m", 1, 0], np.full((3, 6), 5.0))
        side.replicas.drop(name="x", run_id=7)
        assert not len(side.replicas)
        side.close()

    asyncio.run(work())


def test_requests_for_replicas():
    """They wait until the chunks are there, end with the run, and are refused where there are none."""

    async def work() -> None:
        side = WorkerSide(Loop())
        formula = Formula(epilog="allreduce")
        problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m", formula=formula)
        keys = {"a": [("x", 0, 0), ("x", 1, 0)], "b": [("y", 0, 0)]}
        side.worker.data |= {("x", 0, 0): np.ones((4, 5)), ("x", 1, 0): np.ones((3, 5)), ("y", 0, 0): np.ones((5, 6))}
        wire = plan(problem, [Worker("inproc://1")], {"a": np.zeros(2, np.int32), "b": np.zeros(1, np.int32)}).to_wire()
        box = np.array([[0, 1, 0, 0, 0, 0]], np.int64)

        def fetch(run_id, index=1):
            box[0, 1] = index
            return asyncio.ensure_future(ask(side, Fetch(run_id, "replica", box.tobytes(), flat=False)))

        assert (await ask(side, Prepare(1, 0, wire, keys))).status == "OK"
        early = fetch(1)
        await asyncio.sleep(0.05)
        assert not early.done()
        await ask(side, Abort(1, "test"))
        assert (await early).status == "failed"
        assert (await fetch(1)).status == "gone"
        assert (await ask(side, Prepare(2, 0, wire, keys))).status == "OK"
        early = fetch(2)
        assert (await ask(side, Start(2))).status == "OK"
        np.testing.assert_array_equal((await early).data[0].data, np.full((3, 6), 5.0))
        assert (await fetch(2, index=5)).status == "refused"
        assert len(side.replicas.find("m", 2)) == 2
        assert side.replicas.find("m", 1) is None
        side.finish(run_id=2)
        assert (await fetch(2)).status == "gone"
        assert side.replicas.find("m", 2) is not None
        side.replicas.drop("m", 2)
        assert not len(side.replicas)
        side.close()

    asyncio.run(work())


# On worker processes


@pytest.mark.parametrize("method", ["allgather", "local"])
def test_later_multiplies_move_nothing_of_it(client, method):
    """Whatever way made it; Dask's memory manager does not touch it; it is dropped with D."""
    a, b = fresh(90, 70), fresh(70, 80)
    c = client.persist(fresh(60, 90))
    options = {"epilog": "allreduce", "alpha": 2.0, "method": method}
    assert "D on all 3 workers" in repr(dask_distmm.explain(a, b, **options))
    d = matmul(a, b, **options).persist()
    wait([c, d])
    first = runs(client)[-1]
    assert first["timings"]["replicate"] > 0
    assert {len(found) for found in client.who_has(d).values()} == {1}
    client.amm.run_once()
    assert "B on all workers" in repr(dask_distmm.explain(c, d))
    e = matmul(c, d, method="allgather", out_chunks=(20, 80))
    np.testing.assert_allclose(d.compute(), 2 * a.compute() @ b.compute(), rtol=1e-10, atol=1e-10)
    assert_product(c.compute(), d.compute(), e.compute())
    # Each rank needs all of D, which is there; no more has moved than the rows of C that do not lie right.
    assert runs(client)[-1]["received_bytes"] <= 60 * 90 * 8
    before = len(runs(client))
    square = matmul(d, d, op_a="T", method="local")
    assert_product(d.compute().T, d.compute(), square.compute())
    assert len(runs(client)) == before + 1
    del e, square
    until(lambda: kept(client) == {1})
    del d
    until(lambda: kept(client) == {0})


def test_both_operands_are_there(client):
    a = fresh(90, 90)
    d = matmul(a, a, epilog="allreduce").persist()
    wait(d)
    for x, e in (
        (d.T, matmul(d, d, op_a="T", method="allgather", out_chunks=(30, 90))),
        (d, matmul(d, d, method="allgather", out_chunks=(90, 30))),
    ):
        assert "inputs    on all workers" in repr(dask_distmm.explain(x, d))
        assert_product(x.compute(), d.compute(), e.compute())
        assert runs(client)[-1]["received_bytes"] == 0


def test_a_chain_in_one_graph_and_a_loop(client):
    """An intermediate's replicas last until the multiply that needs them has run, and no longer."""
    a, x = fresh(60, 60), fresh(60, 60)
    xn, an = x.compute(), a.compute()
    for _ in range(3):
        x = matmul(a, x, epilog="allreduce", method="allgather", out_chunks=(20, 60)).persist()
        xn = an @ xn
        wait(x)
        until(lambda: kept(client) == {1})
    np.testing.assert_allclose(x.compute(), xn, rtol=1e-9, atol=1e-9)
    del x
    y = matmul(fresh(60, 60), matmul(a, a, epilog="allreduce"), method="allgather", out_chunks=(20, 60)).persist()
    wait(y)
    until(lambda: kept(client) == {0})
    # Of the second multiply's operands only the first had to be fetched.
    assert runs(client)[-1]["received_bytes"] <= 60 * 60 * 8


@pytest.mark.parametrize("retries", [0, 3])
def test_replicas_that_have_vanished_are_not_missed(client, retries):
    a = fresh(90, 90)
    d = matmul(a, a, epilog="allreduce").persist()
    wait(d)
    victim = next(iter(client.nthreads()))
    client.run(lambda dask_worker: dask_worker.extensions[NAME].replicas.drop(), workers=[victim])
    with dask.config.set({"distmm.retries": retries}):
        e = matmul(a, d, method="summa")
    assert_product(a.compute(), d.compute(), e.compute())
    assert any("no longer has replicas" in event["reason"] for event in events(client, "restart"))
    assert "on all workers" not in repr(dask_distmm.explain(a, d))
    del d, e
    until(lambda: kept(client) == {0})


def test_stateful(client):
    """Its results are on all workers, also where fewer multiply."""
    a, b = fresh(60, 60), fresh(60, 60)
    with Matmul(a, b, method="local") as mm:
        assert "D on all 3 workers" in repr(mm.plan(epilog="allreduce"))
        d = mm.execute()
        wait(d)
        until(lambda: kept(client) == {1})
        mm.reset_operands(a=b)
        again = mm.execute()
        wait(again)
        until(lambda: kept(client) == {2})
        assert_product(b.compute(), b.compute(), again.compute())
        del again
    assert "A on all workers" in repr(dask_distmm.explain(d, a))
    assert_product(a.compute(), b.compute(), d.compute())


def test_integers_vectors_and_batches(client):
    a = da.from_array(rng.integers(-9, 9, (40, 40)), chunks=15)
    d = matmul(a, a, epilog="allreduce").persist()
    wait(d)
    until(lambda: kept(client) == {1})
    np.testing.assert_array_equal(d.compute(), a.compute() @ a.compute())
    stack = fresh(3, 20, 20, chunks=(1, 10, 10))
    for call in (
        lambda: matmul(stack, stack, epilog="allreduce"),
        lambda: matmul(a, a[0], epilog="allreduce"),
        lambda: dask_distmm.matmul_grouped([(a, a)], epilog="allreduce"),
    ):
        with pytest.raises(PlanError, match="allreduce"):
            call()


def test_an_error_while_chunks_travel_ends_the_run(client):
    a = fresh(60, 60)
    matmul(a, a).compute()
    victim = next(iter(client.nthreads()))
    client.run(inject, "replicate", "error", workers=[victim])
    with pytest.raises(RunFailedError, match="injected at replicate"):
        matmul(a, a, epilog="allreduce").compute()
    until(lambda: kept(client) == {0})


def test_workers_die_and_others_come():
    """While chunks travel, and later: what they had is made again, nobody relies on replicas that a new one has not."""
    a, b = fresh(90, 90), fresh(90, 90)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        matmul(a, b).compute()
        victim = next(iter(client.nthreads()))
        client.run(inject, "replicate", "kill", workers=[victim])
        d = matmul(a, b, epilog="allreduce", method="allgather").persist()
        wait(d)
        client.wait_for_workers(2)
        victim = next(iter(client.nthreads()))
        os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
        e = matmul(d, d)
        assert_product(d.compute(), d.compute(), e.compute())
        np.testing.assert_allclose(d.compute(), a.compute() @ b.compute(), rtol=1e-10, atol=1e-10)
        client.wait_for_workers(2)
        f = matmul(b, d, method="allgather")
        assert_product(b.compute(), d.compute(), f.compute())
        del d, e, f
        assert_nothing_left(client)
