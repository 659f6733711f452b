"""``epilog="allreduce"`` and `gathered`: all of D or of an operand on every worker, for later multiplies."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product, make_problem, random_chunks, run_jobs
from distributed import Client, LocalCluster, wait
from faults import inject
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from leaks import assert_nothing_left
from matrices import fresh, until
from run_events import events, newest_run, runs_after
from stand_ins import Loop, ask

import dask_distmm
from dask_distmm import Matmul, PlanError, ProjectedMemoryError, matmul
from dask_distmm.engines.numpy.engine import ENGINE
from dask_distmm.errors import RunFailedError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import EVERYWHERE, METHODS, Plan, Worker, plan
from dask_distmm.planning.placement import GATHERED
from dask_distmm.runtime.messages import NAME
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.runtime.worker import WorkerService

rng = np.random.default_rng()


def runs(client):
    return events(client, "done")


def kept(client):
    """How many results each worker keeps."""
    return set(client.run(lambda dask_worker: len(dask_worker.extensions[NAME].replicas)).values())


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
    # Both are estimates, and rounded.
    assert abs(after.bytes_moved - before.bytes_moved - moved) <= 1
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


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(METHODS), st.sampled_from(["numpy", "cublasmp"]), st.integers(1, 5), st.sampled_from("ab"),
    st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_what_a_gathered_operand_adds_to_a_plan(method, engine, nranks, operand, placed, seed):
    """No more than each worker lacks, and on CPUs less than that by what the multiply fetches anyway."""
    seeded = np.random.default_rng(seed)
    m, n, k = (int(x) for x in seeded.integers(5, 40, 3))
    sizes = (random_chunks(seeded, m, 4), random_chunks(seeded, k, 4)), (random_chunks(seeded, k, 4), (n,))
    roster = [Worker(f"w{i}") for i in range(nranks)]
    counts = dict(zip("ab", (len(rows) * len(cols) for rows, cols in sizes), strict=True))
    where = {name: seeded.integers(0, nranks, count).astype(np.int32) for name, count in counts.items() if placed}
    grid = plan(make_problem(*sizes, method=method), roster, where, engine=engine).grid
    before, after = (
        plan(make_problem(*sizes, method=method, grid=grid, gathered=gathered), roster, where, engine=engine)
        for gathered in ("", operand)
    )
    # Cuts that follow chunks gain less where all of an operand moves anyway: the plans may have others.
    assume((before.rows, before.cols, before.depth) == (after.rows, after.cols, after.depth))
    assert (before.kept, after.kept) == ((), (operand,))
    again = Plan.from_wire(after.to_wire())
    assert (again.replicas, again.kept) == (nranks, (operand,))
    size = (m * k if operand == "a" else k * n) * 8
    added = sum(after.projected_bytes.values()) - sum(before.projected_bytes.values())
    moved = after.bytes_moved - before.bytes_moved
    if placed:
        assert added == (nranks - 1) * size
    assert 0 <= moved <= (nranks - 1) * size
    if engine == "numpy" and before.method == "allgather" and (operand == "a") == (before.grid[0] == 1):
        assert moved <= nranks  # rounded
    if engine == "cublasmp" and placed:
        assert moved == added
    assert f"{operand.upper()} on all {nranks} workers, for later multiplies" in repr(after)
    # An operand that is everywhere stays there.
    everywhere = {operand: np.full(counts[operand], EVERYWHERE, np.int32)}
    runs = (int(operand == "a"), int(operand == "b"))
    kept = plan(make_problem(*sizes, gathered=operand), roster, everywhere, engine=engine, replica_runs=runs)
    assert (kept.kept, kept.replicas) == ((), 0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 4), st.sampled_from("ab"), st.booleans(), st.integers(0, 2**32 - 1))
def test_ranks_return_what_they_have_gathered(method, nranks, operand, same, seed):
    """Each chunk whole and right (`run_jobs` compares them), and all of them where all of the operand was needed."""
    seeded = np.random.default_rng(seed)
    m, n, k = (int(x) for x in seeded.integers(1, 30, 3))
    inner = random_chunks(seeded, k, 3)
    a_chunks, b_chunks = (random_chunks(seeded, m, 3), inner), (inner, random_chunks(seeded, n, 3))
    fields = {"method": method, "gathered": operand}
    if same:  # X.T @ X: what is of A and of B travels once
        a_chunks, fields = (b_chunks[1], inner), fields | {"arrays": ("x", "x"), "transposed": (True, False)}
    problem = make_problem(a_chunks, b_chunks, **fields)
    b = seeded.standard_normal((k, n))
    a = b.T if same else seeded.standard_normal((m, k))
    chunks = {}
    for name, matrix, (rows, cols) in (("a", a, a_chunks), ("b", b, b_chunks)):
        parts = [
            part for row in np.split(matrix, np.cumsum(rows)[:-1]) for part in np.split(row, np.cumsum(cols)[:-1], 1)
        ]
        chunks |= {(name, number): part for number, part in enumerate(parts)}
    of_a, of_b = (seeded.integers(0, nranks, sum(key[0] == name for key in chunks)).astype(np.int32) for name in "ab")
    if same:
        of_a = of_b.reshape(len(inner), -1).T.ravel().copy()
    made = plan(problem, [Worker(f"w{i}") for i in range(nranks)], {"a": of_a, "b": of_b})
    brought = []

    class Watched(type(ENGINE)):
        def job(self, side):
            job, me = super().job(side), side.me
            execute = job.execute

            def watched():
                result = execute()
                brought.append((me, {number for name, number in result if name == GATHERED}))
                return result

            job.execute = watched
            return job

    found = run_jobs(Watched(), made, chunks)
    product = np.zeros((a.shape[0], n))
    for (_, number), chunk in found.items():
        r0, r1, c0, c1 = made.chunk_rect(number)
        product[r0:r1, c0:c1] = chunk
    assert_product(a, b, product)
    for me, numbers in brought:
        lacking = set(np.flatnonzero(made.where[operand] != me).tolist())
        assert numbers <= lacking
        # Of a symmetric product a rank reads what one triangle needs; nobody asks for chunks without elements.
        whole = made.method == "allgather" and (operand == "a") == (made.grid[0] == 1)
        if whole and not same and me in made.ranks:
            assert numbers == {number for number in lacking if chunks[operand, number].size}


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
    with pytest.raises(ProjectedMemoryError, match="all of A is to be on each worker"):
        plan(make_problem(*sizes, gathered="a"), [Worker(f"w{i}", memory_limit=limit // 3) for i in range(4)])


# The scheduler


def test_another_array_of_the_same_name():
    """A name that a user gives may come again with other numbers, before anybody has looked what is still wanted."""

    def task(key):
        return SimpleNamespace(key=key, state="memory", dependents=())

    async def work() -> None:
        keys = [("x", 0, 0), ("x", 1, 0)]
        scheduler = SimpleNamespace(tasks={key: task(key) for key in keys})
        told = []
        replicas = Replicas(scheduler, lambda addresses, name, run_id: told.append((addresses, name)))
        problem = make_problem(((4, 3), (5,)), ((5,), (6,)), arrays=("x", "y"), gathered="a")
        roster = [Worker("w0"), Worker("w1")]
        places = {"a": np.zeros(2, np.int32), "b": np.zeros(1, np.int32)}
        replicas.add(7, plan(problem, roster, places))
        assert replicas.where(problem, roster, places)[1] == (7, 0)
        assert replicas.where(problem, [*roster, Worker("w2")], places)[1] == (0, 0)
        scheduler.tasks = {key: task(key) for key in keys}
        where, runs = replicas.where(problem, roster, places)
        assert runs == (0, 0)
        np.testing.assert_array_equal(where["a"], places["a"])
        replicas.transition(("x", 0, 0), "released")
        async with asyncio.timeout(120):
            while not told:
                await asyncio.sleep(0.01)
        assert told == [(["w0", "w1"], "x")]
        assert not len(replicas)

    asyncio.run(work())


# The worker


def test_a_vote_finds_out_what_is_missing():
    async def work() -> None:
        side = WorkerService(Loop())
        problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m", arrays=("x", "y"))
        side.worker.data["y", 0, 0] = np.ones((5, 6))
        keys = {"b": [("y", 0, 0)]}
        where = {"a": np.full(2, EVERYWHERE, np.int32), "b": np.zeros(1, np.int32)}
        wire = plan(problem, [Worker("inproc://1")], where, replica_runs=(7, 0)).to_wire()
        chunks = {(0, 0): np.ones((4, 5)), (1, 0): np.ones((3, 5))}
        for run_id in (None, 6):
            if run_id is not None:
                side.replicas._kept["x"] = run_id, chunks  # of another run
            vote = await ask(side, WorkerService.prepare, 8, 0, wire, keys)
            assert (vote.status, vote.names) == ("no replicas", ("x",))
        side.replicas._kept["x"] = 7, chunks
        side.replicas.drop("x", 6)
        assert (await ask(side, WorkerService.prepare, 8, 0, wire, keys)).status == "OK"
        assert (await ask(side, WorkerService.start, 8, deliver=[("", "m", b"")])).status == "OK"
        np.testing.assert_array_equal(side.worker.data["m", 1, 0], np.full((3, 6), 5.0))
        side.replicas.drop(name="x", run_id=7)
        assert not len(side.replicas)
        side.close()

    asyncio.run(work())


def test_requests_for_replicas():
    """They wait until the chunks are there, end with the run, and are refused where there are none."""

    async def work() -> None:
        side = WorkerService(Loop())
        formula = Formula(epilog="allreduce")
        problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m", formula=formula)
        keys = {"a": [("x", 0, 0), ("x", 1, 0)], "b": [("y", 0, 0)]}
        side.worker.data |= {("x", 0, 0): np.ones((4, 5)), ("x", 1, 0): np.ones((3, 5)), ("y", 0, 0): np.ones((5, 6))}
        wire = plan(problem, [Worker("inproc://1")], {"a": np.zeros(2, np.int32), "b": np.zeros(1, np.int32)}).to_wire()
        box = np.array([[0, 1, 0, 0, 0, 0]], np.int64)

        def fetch(run_id, index=1):
            box[0, 1] = index
            return asyncio.ensure_future(ask(side, WorkerService.fetch, run_id, "replica", box.tobytes()))

        assert (await ask(side, WorkerService.prepare, 1, 0, wire, keys)).status == "OK"
        early = fetch(1)
        await asyncio.sleep(0.05)
        assert not early.done()
        await ask(side, WorkerService.abort, 1, "test")
        assert (await early).status == "failed"
        assert (await fetch(1)).status == "lost"
        assert (await ask(side, WorkerService.prepare, 2, 0, wire, keys)).status == "OK"
        early = fetch(2)
        assert (await ask(side, WorkerService.start, 2)).status == "OK"
        np.testing.assert_array_equal((await early).data[0].data, np.full((3, 6), 5.0))
        assert (await fetch(2, index=5)).status == "refused"
        assert len(side.replicas.find("m", 2)) == 2
        assert side.replicas.find("m", 1) is None
        side.finish(run_id=2)
        assert (await fetch(2)).status == "lost"
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
    before = newest_run(client)
    square = matmul(d, d, op_a="T", method="local")
    assert_product(d.compute().T, d.compute(), square.compute())
    assert runs_after(client, before) == 1
    del e, square
    until(lambda: kept(client) == {1})
    del d
    until(lambda: kept(client) == {0})


@pytest.mark.parametrize("method", ["allgather", "local", "summa", "reducescatter"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gathered_operand_moves_once(client, method, transposed):
    """Whatever way the first multiply went; as the operand or its transpose; dropped with the array."""
    a, b = (client.persist(fresh(*shape)) for shape in ((90, 70), (90, 50) if transposed else (70, 50)))
    wait([a, b])
    first = matmul(a, b, op_a="T" if transposed else "N", gathered="a", method=method).persist()
    left = a.compute().T if transposed else a.compute()
    assert_product(left, b.compute(), first.compute())
    until(lambda: kept(client) == {1})
    moved = runs(client)[-1]["received_bytes"]
    # Each worker gets what it lacks, and nothing twice; what else travels is of B and D.
    assert moved <= 2 * a.nbytes + 2 * b.nbytes + 2 * first.nbytes
    ops = ("T", "N") if transposed else ("N", "T")
    for options, x in (({"op_a": ops[0]}, left), ({"op_a": ops[1]}, left.T)):
        y = client.persist(fresh(x.shape[1], 40, chunks=(x.shape[1], 40)))
        wait(y)
        assert "A on all workers" in repr(dask_distmm.explain(a, y, **options))
        again = matmul(a, y, method="local", **options).persist()
        assert_product(x, y.compute(), again.compute())
        assert runs(client)[-1]["received_bytes"] <= y.nbytes
    del first, again
    assert kept(client) == {1}
    del a
    until(lambda: kept(client) == {0})


def test_by_hand(client):
    x = np.ones((60, 50))
    a = dask_distmm.replicate(da.from_array(x, chunks=20))
    assert kept(client) == {1}
    b = client.persist(fresh(50, 3, chunks=(50, 3)))
    for c in (a, a.T.T):
        assert "A on all workers" in repr(dask_distmm.explain(c, b))
    received = runs(client)[-1]["received_bytes"]
    assert received <= 2 * a.nbytes + 2 * b.nbytes
    dask_distmm.replicate(a)
    assert_product(x, b.compute(), matmul(a, b).compute())
    assert dask_distmm.free_replicas(b) == 0
    assert dask_distmm.free_replicas(a.T) == 1
    until(lambda: kept(client) == {0})
    assert "on all workers" not in repr(dask_distmm.explain(a, b))
    assert_product(x, b.compute(), matmul(a, b, alpha=1).compute())
    dask_distmm.replicate(a)
    assert dask_distmm.free_replicas() == 1
    assert dask_distmm.free_replicas() == 0


def test_a_gathered_operand_and_the_result(client):
    a = client.persist(fresh(60, 60))
    wait(a)
    text = repr(dask_distmm.explain(a, a, gathered="b", epilog="allreduce"))
    assert "D on all 3 workers" in text
    assert "B on all 3 workers" in text
    d = matmul(a, a, gathered="b", epilog="allreduce").persist()
    wait(d)
    until(lambda: kept(client) == {2})
    assert "inputs    on all workers" in repr(dask_distmm.explain(a, d))
    assert_product(a.compute(), a.compute(), d.compute())


def test_nothing_lasts_of_an_operand_that_is_loaded_for_one_multiply(client):
    a, b = fresh(60, 60), fresh(60, 40)
    assert_product(a.compute(), b.compute(), matmul(a, b, gathered="a").compute())
    until(lambda: kept(client) == {0})


def test_what_can_not_be_gathered(client):
    a = fresh(40, 40)
    stack = fresh(3, 20, 20, chunks=(1, 10, 10))
    e4m3 = {"quantization_scales": {"a": 1.0, "b": 1.0, "d": 1.0}, "a_type": "float8_e4m3", "b_type": "float8_e4m3"}
    for x, y, options in (
        (stack, stack, {"gathered": "a"}),
        (a, a[0], {"gathered": "b"}),
        (a, a, {"gathered": "c"}),
        (a.astype("uint8"), a.astype("uint8"), {"gathered": "a", **e4m3}),
        (a.astype(object), a, {"gathered": "a"}),
    ):
        with pytest.raises(PlanError, match="gathered"):
            matmul(x, y, **options)
    with pytest.raises(PlanError, match="2-D, got 3-D"):
        dask_distmm.replicate(stack)


def test_without_a_cluster():
    a = fresh(40, 40)
    np.testing.assert_allclose(matmul(a, a, gathered="a").compute(), a.compute() @ a.compute())
    for call in (lambda: dask_distmm.replicate(a), dask_distmm.free_replicas):
        with pytest.raises(dask_distmm.EngineError, match="no cluster|needs a cluster"):
            call()


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


@pytest.mark.parametrize("options", [{"epilog": "allreduce"}, {"gathered": "a"}])
def test_an_error_while_chunks_travel_ends_the_run(client, options):
    a = fresh(60, 60)
    matmul(a, a).compute()
    victim = next(iter(client.nthreads()))
    client.run(inject, "replicate", "error", workers=[victim])
    with pytest.raises(RunFailedError, match="injected at replicate"):
        matmul(a, a, **options).compute()
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
