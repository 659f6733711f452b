"""``Matmul``: prepared once, executed many times."""

from __future__ import annotations

import gc
import logging
import os
import signal

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster, wait
from leaks import assert_nothing_left
from matrices import fresh
from run_events import events, events_after, newest_run

import dask_distmm
from dask_distmm import Matmul, PlanError, Slab
from dask_distmm.runtime.keys import is_tile

rng = np.random.default_rng()


def runs(client):
    return events(client, "done")


def tiles(client):
    """Keys of tiles that the scheduler knows, and how many of them are in memory."""

    def count(dask_scheduler):
        found = [ts for ts in dask_scheduler.tasks.values() if is_tile(ts.key)]
        return len(found), sum(ts.state == "memory" for ts in found)

    return client.run_on_scheduler(count)


@pytest.mark.parametrize("method", ["auto", "local", "allgather", "reducescatter", "allreduce", "summa"])
def test_executions_move_what_the_method_moves(client, method):
    a, b = fresh(130, 110, chunks=(40, 30)), fresh(110, 90, chunks=(50, 25))
    with Matmul(a, b, method=method) as mm:
        made = mm.plan()
        assert method in ("auto", made.method)
        assert "a" in made.where
        before = newest_run(client)
        for _ in range(3):
            d = mm.execute()
            assert d.chunks == (a.chunks[0], b.chunks[1])
            assert_product(a.compute(), b.compute(), d.compute())
        found = events_after(client, before)
        # Three runs, and what arrived is what the plan says: nothing is redistributed.
        assert [event["received_bytes"] for event in found] == [made.bytes_moved] * 3
        p, q, s = made.grid
        operands = ((q - 1) * 130 * 110 + (p - 1) * 110 * 90) * 8
        if s == 1:
            assert made.bytes_moved >= operands
            assert made.workers == dask_distmm.explain(*(mm._arrays[x] for x in "ab"), method=made.method).workers
        mm.reset_operands(a=a * 2)
        assert_product(a.compute() * 2, b.compute(), mm.execute().compute())
        assert runs(client)[-1]["received_bytes"] == made.bytes_moved


def test_without_delivery_only_operands_are_gathered(client):
    """D's chunks are the tiles: not one byte more than each rank's share of the gathered operand."""
    a, b = fresh(90, 60, chunks=(20, 60)), fresh(60, 45, chunks=(60, 45))
    with Matmul(a, b, method="allgather", out_chunks=(30, 45), distributions=[Slab(0)]) as mm:
        made = mm.plan()
        assert made.grid == (3, 1, 1)
        assert made.bytes_moved == 2 * 60 * 45 * 8
        assert_product(a.compute(), b.compute(), mm.execute().compute())
        assert runs(client)[-1]["received_bytes"] == made.bytes_moved


def test_results_are_started_and_independent(client):
    a, b = fresh(60, 60, chunks=20), fresh(60, 60, chunks=20)
    with Matmul(a, b) as mm:
        mm.plan()
        one, two = mm.execute(), mm.execute()
        assert one.name != two.name
        wait([one, two])
        assert all(client.who_has(one).values())
    assert_product(a.compute(), b.compute(), one.compute())
    assert_product(a.compute(), b.compute(), two.compute())


def test_formula_and_resets(client):
    a, b, c = fresh(70, 50, chunks=(30, 20)), fresh(50, 40, chunks=(20, 15)), fresh(70, 40, chunks=(25, 40))
    bias = rng.standard_normal(40)
    an, bn, cn = a.compute(), b.compute(), c.compute()

    def expected(alpha, beta, bias, product):
        return np.maximum(alpha * product + beta * cn + bias, 0)

    with Matmul(a, b, c, alpha=2.0, beta=0.5) as mm:
        mm.plan(epilog="relu_aux_bias", epilog_inputs={"bias": bias}, result_amax=True)
        d, aux = mm.execute()
        wanted = expected(2.0, 0.5, bias, an @ bn)
        np.testing.assert_allclose(d.compute(), wanted, rtol=1e-10, atol=1e-10)
        np.testing.assert_array_equal(aux["relu_aux"].compute(), d.compute() > 0)
        assert aux["result_amax"].compute() == d.compute().max()
        before = {name: array.name for name, array in mm._arrays.items()}
        mm.reset_operands(b=b + 1, alpha=-1.0, epilog_inputs={"bias": bias + 1})
        after = {name: array.name for name, array in mm._arrays.items()}
        assert {name for name in before if before[name] != after[name]} == {"b", "bias"}
        d, _ = mm.execute()
        wanted = expected(-1.0, 0.5, bias + 1, an @ (bn + 1))
        np.testing.assert_allclose(d.compute(), wanted, rtol=1e-10, atol=1e-10)
        # With beta == 0 C is not read.
        mm.reset_operands(c=c * np.nan, beta=0.0)
        d, _ = mm.execute()
        cn = np.zeros_like(cn)
        np.testing.assert_allclose(d.compute(), expected(-1.0, 0, bias + 1, an @ (bn + 1)), rtol=1e-10, atol=1e-10)
        mm.reset_operands(c=c, beta=1.0)
        cn = c.compute()
        d, _ = mm.execute()
        np.testing.assert_allclose(d.compute(), expected(-1.0, 1, bias + 1, an @ (bn + 1)), rtol=1e-10, atol=1e-10)
        # Another epilog, from the tiles that are there.
        mm.plan(epilog="gelu")
        assert mm.execute().chunks == (a.chunks[0], b.chunks[1])


@pytest.mark.parametrize(("op_a", "op_b"), [("T", "N"), ("C", "T")])
def test_ops_and_the_same_operand_twice(client, op_a, op_b):
    x = rng.standard_normal((48, 48)) + 1j * rng.standard_normal((48, 48))
    array = da.from_array(x, chunks=20)
    with Matmul(array, array, op_a=op_a, op_b=op_b) as mm:
        mm.plan()
        ops = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
        assert_product(ops[op_a](x), ops[op_b](x), mm.execute().compute())
        mm.reset_operands(a=da.from_array(2 * x, chunks=20))
        assert_product(ops[op_a](2 * x), ops[op_b](x), mm.execute().compute())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda a: a[:-1]}, r"a has the shape \(59, 60\); this Matmul was made for \(60, 60\)"),
        ({"b": lambda b: b.astype("float32")}, "b has the dtype float32; this Matmul was made for float64"),
        ({"a": lambda a: a.rechunk(30)}, r"a has the chunks \(\(30, 30\).*made for \(\(20, 20, 20\).*rechunk"),
        ({"c": lambda a: a}, "made without one"),
        ({"epilog_inputs": lambda a: {"bias": np.ones(60)}}, "'bias'.*inputs are: none"),
        ({"beta": lambda a: 1.0}, "needs c"),
        ({"alpha": lambda a: 1j}, "complex"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(client, change, message):
    a = fresh(60, 60, chunks=20)
    with Matmul(a, a) as mm:
        mm.plan()
        with pytest.raises(PlanError, match=message):
            mm.reset_operands(**{name: make(a) for name, make in change.items()})
        assert_product(a.compute(), a.compute(), mm.execute().compute())


def test_bad_plans_change_nothing(client):
    a = fresh(60, 60, chunks=20)
    with Matmul(a, a) as mm:
        with pytest.raises(PlanError, match="plan"):
            mm.execute()
        mm.plan(epilog="bias", epilog_inputs={"bias": np.ones(60)})
        with pytest.raises(PlanError, match="needs the inputs"):
            mm.plan(epilog="relu_bias")
        with pytest.raises(PlanError, match="unknown epilog"):
            mm.plan(epilog="magic")
        d = mm.execute()
        np.testing.assert_allclose(d.compute(), a.compute() @ a.compute() + 1, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((np.ones((3, 4)), np.ones((3, 4))), "don't match"),
        ((np.ones(4), np.ones(4)), "matrices"),
        ((np.ones((2, 3, 4)), np.ones((2, 4, 3))), "dimensions"),
        ((np.ones((0, 4)), np.ones((4, 3))), "empty"),
        ((np.ones((4, 4), object), np.ones((4, 4), object)), "no engine"),
        ((np.ones((4, 4)), np.ones((4, 4)), np.ones((4, 4))), "without beta"),
    ],
)
def test_what_can_not_be_made(client, operands, message):
    with pytest.raises(PlanError, match=message):
        Matmul(*operands)


def test_without_a_cluster():
    with pytest.raises(PlanError, match="no cluster"):
        Matmul(np.ones((4, 4)), np.ones((4, 4)))


def test_tiles_stay_and_go(client):
    a, b = fresh(60, 60, chunks=20), fresh(60, 60, chunks=20)
    mm = Matmul(a, b)
    mm.plan(epilog="bias", epilog_inputs={"bias": np.ones(60)})
    wait(list(mm._arrays.values()))
    assert tiles(client)[1] >= 2
    wait(mm.execute())
    assert tiles(client)[1] >= 2
    mm.release_operands()
    with pytest.raises(PlanError, match="a, b, bias released"):
        mm.execute()
    mm.reset_operands(a=a)
    with pytest.raises(PlanError, match="b, bias released"):
        mm.execute()
    mm.reset_operands(b=b, epilog_inputs={"bias": np.zeros(60)})
    assert_product(a.compute(), b.compute(), mm.execute(release_workspace=True).compute())
    mm.free()
    mm.free()
    gone(client)
    for call in (mm.plan, mm.execute, mm.release_operands, lambda: mm.reset_operands(a=a), mm.__enter__):
        with pytest.raises(PlanError, match="freed"):
            call()
    assert "freed" in repr(mm)


def gone(client):
    gc.collect()
    assert_nothing_left(client)
    for _ in range(200):
        if tiles(client) == (0, 0):
            return
        client.run_on_scheduler(lambda: None)
    raise AssertionError(tiles(client))


def test_freed_on_error_and_when_forgotten(client):
    a = fresh(60, 60, chunks=20)
    mm = Matmul(a, a)

    def work():
        with mm:
            mm.plan()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    with pytest.raises(PlanError, match="freed"):
        mm.execute()
    gone(client)
    other = Matmul(a, a)
    other.plan()
    wait(list(other._arrays.values()))
    del other
    gone(client)


def test_closed_client(process_cluster):
    a = fresh(60, 60, chunks=20)
    with Client(process_cluster) as client:
        mm = Matmul(a, a)
        mm.plan()
        wait(mm.execute())
    with pytest.raises(PlanError, match="client of this Matmul is closed"):
        mm.execute()
    mm.free()
    with Client(process_cluster) as client:
        gone(client)


def test_a_worker_that_is_gone_is_named_and_planning_again_helps():
    a, b = fresh(90, 90, chunks=30), fresh(90, 90, chunks=30)
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        Matmul(a, b, method="allgather") as mm,
    ):
        made = mm.plan()
        wait(mm.execute())
        client.retire_workers([made.workers[0]], close_workers=True)
        d = mm.execute()
        with pytest.raises(PlanError, match=f"{made.workers[0]}.*not in the cluster"):
            d.compute()
        del d
        again = mm.plan()
        assert len(again.ranks) == 2
        assert_product(a.compute(), b.compute(), mm.execute().compute())


def test_a_killed_worker_loses_no_tile():
    """Tiles of a worker that dies are made again, elsewhere: nothing waits for the dead one."""
    a = fresh(90, 90, chunks=30)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        x = dask_distmm.distribute(a, Slab(0))
        wait(x)
        victim = next(iter(client.who_has(x).values()))[0]
        os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
        client.wait_for_workers(2)
        np.testing.assert_array_equal(x.compute(), a.compute())
        assert_product(a.compute(), a.compute(), dask_distmm.matmul(x, x).compute())


def test_logging(inproc_client, caplog):
    a = fresh(60, 60, chunks=20)
    caplog.set_level(logging.DEBUG, "dask_distmm")
    dask_distmm.matmul(a, a, method="summa").compute()
    text = caplog.text
    for part in ("Plan: summa on 4 of 4", "float64, 3 x 3 chunks", "moved between workers", "a worker"):
        assert part in text
    for level, part in (
        (logging.INFO, "starts on"),
        (logging.INFO, "done in"),
        (logging.DEBUG, "rank 3"),
    ):
        assert any(r.levelno == level and part in r.getMessage() for r in caplog.records)
    assert any("multiply" in r.getMessage() and "received" in r.getMessage() for r in caplog.records)


def test_own_logger(client, caplog):
    own = logging.getLogger("mine")
    a = fresh(60, 60, chunks=20)
    caplog.set_level(logging.INFO)
    name = dask_distmm.matmul(a, a).name
    assert dask_distmm.matmul(a, a, logger=own).name == name
    with Matmul(a, a, logger=own) as mm:
        mm.plan()
        wait(mm.execute())
    messages = [r.getMessage() for r in caplog.records if r.name == "mine"]
    assert len(messages) == 3
    assert "Plan: " in messages[0]
    assert "Plan: " in messages[1]
    assert not [r for r in caplog.records if r.name == "dask_distmm" and "Matmul" in r.getMessage()]
