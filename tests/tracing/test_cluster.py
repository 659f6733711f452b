"""Traced functions on worker processes: one run each, and what happens when something goes wrong."""

from __future__ import annotations

import collections
import gc
import io
import os
import signal
import threading
import weakref

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask._task_spec import Task
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.optimization import cull
from distributed import wait
from faults import inject
from matrices import assert_near, until
from run_events import events_after, newest_run, runs_after
from traced_cases import CASES, arguments, assert_equal, operands
from traced_programs import assert_close, check_program

import dask_distmm
from dask_distmm import fori_loop
from dask_distmm import random as draws
from dask_distmm.arrays.prepared import place_chunks
from dask_distmm.errors import MatrixError
from dask_distmm.planning import program
from dask_distmm.tracing.control import flattened


@pytest.fixture(autouse=True)
def on_all_workers(monkeypatch):
    """Leave rows where they are: by themselves arrays of this size go to one worker."""
    monkeypatch.setattr(program, "_WORTH_MOVING", np.inf)


@dask_distmm.jit(static_argnames="turns")
def nmf(X, W, H, *, turns=30):
    def turn(i, state):
        W, H = state
        H = H * (W.T @ X) / (W.T @ W @ H + 1e-9)
        W = W * (X @ H.T) / (W @ (H @ H.T) + 1e-9)
        return W, H

    return fori_loop(0, turns, turn, (W, H))


def data(m=600, n=20, k=4, chunks=6):
    rng = np.random.default_rng()
    arrays = [rng.random((m, n)), rng.random((m, k)), rng.random((k, n))]
    return arrays, [*(da.from_array(x, chunks=(m // chunks, -1)).persist() for x in arrays[:2]), arrays[2]]


def test_one_run(client):
    arrays, lazy = data()
    moment = newest_run(client)
    found = dask.compute(*nmf(*lazy))
    for one, other in zip(found, nmf(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert runs_after(client, moment) == 1
    # Another result of the same function on the same arrays has the same name.
    assert nmf(*lazy)[0].name == nmf(*lazy)[0].name
    # Results are operands of what comes next.
    w, h = nmf(*lazy, turns=10)
    again = dask.compute(*nmf(lazy[0], w, h, turns=20))
    for one, other in zip(again, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_values(client, name):
    function = CASES[name]
    arrays, lazy = operands(np.random.default_rng())
    with np.errstate(all="ignore"):
        expected, _ = flattened(function(*arguments(function, arrays)))
    found, _ = flattened(dask_distmm.jit(function)(*arguments(function, lazy)))
    for one, other in zip(dask.compute(*found), expected, strict=True):
        assert_equal(np.asarray(one), other)


@pytest.mark.parametrize("number", range(30))
def test_random_programs(client, number):
    def compute(function, lazy, ranks):
        return dask.compute(*dask_distmm.jit(lambda *x: function(*x))(*lazy))

    check_program(int(np.random.default_rng().integers(2**40)), 0, compute)


def test_without_a_cluster():
    arrays, lazy = data()
    for scheduler in ("threads", "sync"):
        found = dask.compute(*nmf(*lazy), scheduler=scheduler)
        for one, other in zip(found, nmf(*arrays), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)


def test_a_trace_keeps_no_arguments():
    """It is kept for the next call, and workers would hold what it has."""
    x, function = da.ones((8, 2), chunks=4), dask_distmm.jit(lambda x: x + 1)
    first = weakref.ref(x)
    np.testing.assert_array_equal(function(x).compute(), np.full((8, 2), 2))
    del x
    gc.collect()
    assert first() is None
    np.testing.assert_array_equal(function(da.zeros((8, 2), chunks=4)).compute(), np.ones((8, 2)))


def test_vectors_and_numbers_are_taken_and_left_as_they_are(client):
    """No task of Dask's own makes matrices of them, or what they are of matrices."""
    X, y, v, s = map(np.random.default_rng().standard_normal, ((90, 4), 90, 4, ()))

    @dask_distmm.jit
    def function(X, y, v, s):
        return y + X @ v, X.T @ y * s, (y * y).sum(), s + 1

    held = dask.persist(*(da.from_array(x, chunks=tuple(30 if n == 90 else n for n in x.shape)) for x in (X, y, v, s)))
    wait(held)
    results = function(*held)
    merged = dict(HighLevelGraph.merge(*(x.dask for x in dask.optimize(*results))))
    # Dask leaves tasks in graphs now and then that nothing needs.
    graph, _ = cull(merged, list(flatten([x.__dask_keys__() for x in results])))
    tasks = {key for key, task in graph.items() if isinstance(task, Task)}
    assert {key[0].rpartition("-")[0] for key in tasks if isinstance(key, tuple)} == {
        results[0].name.rpartition("-")[0]
    }
    assert len(tasks) == 1 + 3 + 1 + 1 + 1
    for found, expected in zip(dask.compute(*results), (y + X @ v, X.T @ y * s, (y * y).sum(), s + 1), strict=True):
        assert np.shape(found) == np.shape(expected)
        assert_near(found, expected, rtol=1e-12)


def test_rows_move_for_a_long_loop(client, monkeypatch):
    """Chunks of which one worker has most are shared, once for all turns; results lie where rows were computed."""
    monkeypatch.setattr(program, "_WORTH_MOVING", 0.01)
    first, second, _ = client.scheduler_info()["workers"]
    x = da.random.random((60_000, 128), chunks=(10_000, -1))
    X = place_chunks(client, x, x.chunks, [first] * 5 + [second])
    W, H = da.random.random((60_000, 16), chunks=(10_000, -1)).persist(), np.random.default_rng().random((16, 128))
    wait([X, W])
    found = dask.persist(*nmf(X, W, H, turns=20))
    wait(found)
    # Before Dask copies them to where it puts them together.
    assert collections.Counter(holder for (holder,) in client.who_has(found[0]).values()) == {first: 3, second: 3}
    for result, expected in zip(dask.compute(*found), nmf(X.compute(), W.compute(), H, turns=20), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_what_is_wanted_is_computed(client):
    (x, *_), (lazy, *_) = data()
    calls = dask_distmm.jit(lambda a: (a.sum(0), dask_distmm.map_rows(lambda rows: 1 / 0, a, meta=np.ones((1, 1)))))
    total, failing = calls(lazy)
    np.testing.assert_allclose(total.compute(), x.sum(0))
    with pytest.raises(ZeroDivisionError):
        failing.compute()


def test_sparse_rows(client):
    rng = np.random.default_rng()
    x = scipy.sparse.random(600, 40, 0.1, format="csr", random_state=rng)
    w, h = rng.random((600, 3)), rng.random((3, 40))
    chunks = da.from_array(np.arange(600), chunks=100)
    meta = scipy.sparse.csr_matrix((0, 40))
    rows = chunks.map_blocks(lambda i: x[i], dtype=float, chunks=((100,) * 6, (40,)), new_axis=1, meta=meta)
    found = dask.compute(*nmf(rows, da.from_array(w, chunks=(100, 3)), h))
    for one, other in zip(found, nmf(x.toarray(), w, h), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8)


def test_types(client):
    x = np.random.default_rng().integers(0, 9, (60, 4))
    for dtype in ("int8", "uint16", "int32", "bool", "float16", "float32"):
        given = x.astype(dtype)
        function = dask_distmm.jit(lambda a: (a.sum(0), a * 2, (a * 0.5).sum(), abs(a).max(), a.astype("f8").T @ a))
        lazy = da.from_array(given, chunks=(20, 4))
        for one, other in zip(dask.compute(*function(lazy)), function(given), strict=True):
            assert one.dtype == np.asarray(other).dtype, dtype
            np.testing.assert_allclose(one, other, rtol=2e-3 if dtype == "float16" else 1e-5)


def test_unknown_sizes(client):
    rng = np.random.default_rng()
    x, y = rng.standard_normal((60, 4)), rng.standard_normal(60)
    some, lazy, beside = x[:, 0] > 0.2, da.from_array(x, chunks=(10, 4)), da.from_array(y, chunks=10)
    chosen = da.from_array(some, chunks=10)

    @dask_distmm.jit
    def function(x, y):
        scaled = (x - x.mean(0)) / x.std(0)
        w = fori_loop(0, 20, lambda i, w: w - 0.01 * (scaled.T @ (scaled @ w - y)), np.zeros(4))
        return w, scaled @ w

    with np.errstate(all="ignore"):
        expected = function(x[some], y[some])
    for one, other in zip(dask.compute(*function(lazy[chosen], beside[chosen])), expected, strict=True):
        assert_near(one, other, rtol=1e-9)


def test_random_numbers_do_not_depend_on_chunks(client):
    function = dask_distmm.jit(lambda x: x + draws.normal(draws.key(3), x.shape))
    zeros = np.zeros((50, 3))
    for chunks in (7, 50, 23):
        np.testing.assert_array_equal(function(da.from_array(zeros, chunks=(chunks, 3))).compute(), function(zeros))


def test_a_function_that_fails(client):
    def broken(rows):
        raise KeyError("mine")

    lazy = da.ones((40, 2), chunks=(10, 2))
    with pytest.raises(KeyError, match="mine"):
        dask_distmm.jit(lambda x: dask_distmm.map_rows(broken, x, meta=np.ones((1, 2))))(lazy).compute()
    with pytest.raises(MatrixError, match="inv of a matrix of shape"):
        dask_distmm.jit(lambda x: np.linalg.inv(x.T @ x))(lazy).compute()


@pytest.mark.parametrize("wrong", [40, -41])
def test_rows_that_are_out_of_bounds(client, wrong):
    x, table, numbers = da.ones((40, 2), chunks=(10, 2)), np.random.default_rng().random(40), np.array([3, 39, -40])
    in_rows = dask_distmm.jit(lambda x, table, numbers: x[numbers])
    of_all = dask_distmm.jit(lambda x, table, numbers: table[(x[:, 0] * numbers[0]).astype(int)])
    for function in (in_rows, of_all):
        found, expected = function(x, table, numbers).compute(), function(np.ones((40, 2)), table, numbers)
        np.testing.assert_array_equal(found, expected)
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for axis 0 with size 40"):
            function(x, table, np.array([wrong, 0])).compute()


def test_a_lost_worker(fault_client):
    arrays, lazy = data(m=1200)
    wait(lazy[:2])
    holders = collections.Counter(who for places in fault_client.who_has(lazy[0]).values() for who in places)
    address = holders.most_common(1)[0][0]
    fault_client.run(inject, "turn", "kill", skip=int(np.random.default_rng().integers(30)), workers=[address])
    moment = newest_run(fault_client)
    found = [one.result(timeout=120) for one in fault_client.compute(list(nmf(*lazy)))]
    for one, other in zip(found, nmf(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert events_after(fault_client, moment, "restart")


def test_a_lost_worker_of_a_loop_whose_state_is_kept(fault_client, tmp_path):
    arrays, lazy = data()
    wait(lazy[:2])

    def lose(i, W):
        if i == 17 and not (tmp_path / "lost").exists():
            (tmp_path / "there").touch()
            until((tmp_path / "kept").exists)
            (tmp_path / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def function(X, W, H):
        def turn(i, state):
            W, H = state
            dask_distmm.callback(lose, i, W.sum())
            H = H * (W.T @ X) / (W.T @ W @ H + 1e-9)
            return W * (X @ H.T) / (W @ (H @ H.T) + 1e-9), H

        return fori_loop(0, 24, turn, (W, H))

    moment = newest_run(fault_client)
    futures = fault_client.compute(list(dask_distmm.jit(function, keep_every=5)(*lazy)))
    until((tmp_path / "there").exists)
    # The state of the fourth piece is there twice: six chunks of W, and H.
    names = {event["name"] for event in events_after(fault_client, moment, "done")}
    assert len(names) == 3

    def copied():
        held = fault_client.who_has()
        return sum(len(who) > 1 for key, who in held.items() if str(key).startswith("('function-")) == 7

    until(copied)
    (tmp_path / "kept").touch()
    for one, other in zip([future.result(timeout=120) for future in futures], nmf(*arrays, turns=24), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    # No turn of the first three pieces was repeated.
    done = [event["name"] for event in events_after(fault_client, moment, "done")]
    assert len(done) == len(set(done)) == 5
    assert events_after(fault_client, moment, "restart")
    # Nothing is left of states.
    until(lambda: not any(who for key, who in fault_client.who_has().items() if str(key).startswith("('function-")))


def test_a_loop_tells_its_turns_and_ends_with_the_turn_in_which_it_is_cancelled(client, tmp_path):
    lazy = da.ones((4000, 8), chunks=(500, 8)).persist()

    def count(i):
        with open(tmp_path / "turns", "a") as file:
            file.write(f"{i}\n")

    def turns():
        return (tmp_path / "turns").read_text().count("\n")

    @dask_distmm.jit
    def function(x):
        def turn(i, s):
            dask_distmm.callback(count, i)
            return s * 0.999 + x.sum(0) / 4e6

        return fori_loop(0, 2**40, turn, x)

    moment = newest_run(client)
    future = client.compute(function(lazy).sum())

    def told():
        return [event for event in events_after(client, moment, "progress") if event.get("turns")]

    until(lambda: len({event["turns"] for event in told()}) > 1)
    last = told()[-1]
    assert 0 < last["turns"] <= turns()
    assert last["turns_in_all"] == 2**40
    assert last["seconds_left"] > 3600
    file = io.StringIO()
    showing = threading.Thread(target=dask_distmm.progress, args=(future,), kwargs={"notebook": False, "file": file})
    showing.start()
    until(lambda: f" of {2**40}, " in file.getvalue())
    future.cancel()
    until(lambda: events_after(client, moment, "released"))
    # No turn begins any more, and the workers are free for the next run.
    done = turns()
    assert not events_after(client, moment)
    assert_close(dask_distmm.jit(lambda x: x.sum())(lazy).compute(), np.float64(32000))
    assert turns() == done
    showing.join(120)
    assert not showing.is_alive()


def test_two_at_once(client):
    arrays, lazy = data()
    both = [*nmf(*lazy, turns=20), *nmf(*lazy, turns=25)]
    found = [future.result() for future in client.compute(both)]
    for one, other in zip(found, [*nmf(*arrays, turns=20), *nmf(*arrays, turns=25)], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
