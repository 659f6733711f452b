"""Results in graphs that Dask's functions rewrite, and several graphs of parts of one result: one key, one task."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
import xarray
from dask.graph_manipulation import bind, checkpoint, clone, wait_on
from distributed import wait
from run_events import newest_run, runs_after
from test_waves import in_waves

from dask_distmm import enabled, linalg, matmul
from dask_distmm.runtime.keys import barrier_name

_seeds = itertools.count()


def matrix():
    """A matrix of whole numbers that no other test has, and the same as lazy array in chunks of 7."""
    x = np.random.default_rng(next(_seeds)).integers(-50, 50, (60, 60)).astype(float)
    return x, da.from_array(x, chunks=7) + 0


def square():
    """A lazy product, and its value."""
    x, lazy = matrix()
    return matmul(lazy, lazy), x @ x


def factors():
    """The lazy U of an LU factorization, and its value."""
    x = matrix()[0] + 1000 * np.eye(60)
    return linalg.lu(da.from_array(x, chunks=20))[2], scipy.linalg.lu(x)[2]


def waves():
    """Lazy products in waves, behind gates and by ranks, their values and operands."""
    rng = da.random.default_rng(next(_seeds))
    for name, (m, k, n), cut in (("blocks", (180, 180, 180), 60), ("rows", (4000, 60, 50), 300)):
        a, b = (rng.integers(-9, 9, shape, chunks=cut).astype(float) for shape in ((m, k), (k, n)))
        with dask.config.set({"distmm.numpy.pack-below": 0}):
            d = in_waves(a, b, name, by_ranks=name == "rows")
        yield d, a.compute() @ b.compute(), [a, b]


# Names of the operands of which chunks have been made.
made = []


def noted(chunk, name):
    """Note that a chunk of an operand is made. (A function inside a test would be sent with a list of its own.)"""
    made.append(name)
    return chunk


@contextlib.contextmanager
def no_warnings_of_dask():
    """No key with two different tasks reaches the scheduler."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("distributed.scheduler")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not [text for text in seen if "run_spec" in text]


def keys_of_other_types():
    d, r = square()
    i, j = [1, 50, 3], [4, 59, 0]
    yield np.trace(d), np.trace(r)
    yield da.diagonal(d, 20), np.diagonal(r, 20)
    yield d.vindex[i, j], r[i, j]
    d, r = square()
    named = xarray.DataArray(d, dims=("x", "y"))
    yield named.isel(x=xarray.DataArray(i, dims="p"), y=xarray.DataArray(j, dims="p")).data, r[i, j]
    d, r = square()
    yield d.blocks[np.int64(1), np.int64(2)], r[7:14, 14:21]
    x = matrix()[0]
    uneven = da.from_array(x, chunks=((10, 20, 30), (15, 45)))
    yield da.diag(matmul(uneven, uneven)), np.diag(x @ x)
    u, r = factors()
    yield da.diagonal(u), np.diagonal(r)
    for d, r, _ in waves():
        yield np.trace(d), np.trace(r)
        yield da.diagonal(d), np.diagonal(r)


def test_keys_of_any_type(inproc_client):
    """Dask's functions make keys with NumPy's integers."""
    with no_warnings_of_dask():
        for found, expected in keys_of_other_types():
            np.testing.assert_array_equal(found.compute(), expected)


def graphs_that_are_rewritten():
    x, lazy = matrix()
    d, r = matmul(lazy, lazy), x @ x
    yield clone(d), r
    yield clone(clone(d + 1)) * 2, (r + 1) * 2
    yield clone(d, omit=lazy)[:9], r[:9]
    yield clone(d, assume_layers=False), r
    yield bind(d, da.ones(5, chunks=2)), r
    yield bind(d, matmul(lazy, lazy.T), omit=lazy), r
    yield clone(d) + d, r + r
    yield checkpoint(d), None
    yield wait_on(d), r
    part, whole = wait_on(d[:9] + 1, d)
    yield part + whole[:9], 2 * r[:9] + 1
    yield dask.delayed(np.asarray)(d), r
    yield dask.delayed(lambda *chunks: sum(map(np.sum, chunks)))(*d.to_delayed().ravel()), r.sum()
    yield da.from_delayed(d.to_delayed()[1, 1], (7, 7), float) + 1, r[7:14, 7:14] + 1
    part, total = dask.optimize(d[:9] + 1, d.sum())
    yield part + total, r[:9] + 1 + r.sum()
    with dask.annotate(priority=3, retries=1):
        annotated = matmul(lazy.T, lazy)
    yield annotated[:9], (x.T @ x)[:9]
    yield d.rechunk((13, 11)), r
    yield d.rechunk(7).blocks[1:, 1:], r[7:, 7:]
    yield pickle.loads(pickle.dumps(d)), r
    some, others = dask.persist(d[:9], d[20:, 3:])
    yield d.sum() + some.sum() + others.sum(), r.sum() + r[:9].sum() + r[20:, 3:].sum()
    relu, aux = matmul(lazy, lazy, epilog="relu_aux")
    copies = clone(relu, aux["relu_aux"])
    yield copies[0] * copies[1], r * (r > 0)
    yield bind(aux["relu_aux"], da.ones(3), omit=relu), r > 0
    u, r = factors()
    yield clone(u), r
    yield bind(u, da.ones(3, chunks=1)), r
    tall = np.concatenate([x] * 5)
    triangle = clone(linalg.qr(da.from_array(tall, chunks=(50, 60)))[1])
    yield abs(triangle), abs(np.linalg.qr(tall)[1])
    for d, r, operands in waves():
        # Dask does not copy random numbers: its clone of such a layer needs keys that are not there.
        yield clone(d, omit=operands), r
        yield bind(d, da.ones(3, chunks=1), omit=operands), r
        yield dask.delayed(np.asarray)(d), r


def test_graphs_that_are_rewritten(inproc_client):
    with no_warnings_of_dask():
        for found, expected in graphs_that_are_rewritten():
            got = found.compute()
            assert expected is None or np.allclose(got, expected)
        d, r = square()
        np.testing.assert_array_equal(inproc_client.compute(d[:9], optimize_graph=False).result(), r[:9])


def test_what_is_bound_waits():
    """A copy of a result begins when what it is bound to is there, and what is omitted is not copied."""
    x, lazy = matrix()
    lazy = lazy.map_blocks(noted, "operand", dtype=float)
    before = da.ones(3, chunks=1).map_blocks(noted, "before", dtype=float, meta=np.ones(1))
    from dask_distmm.arrays.request import parse
    from dask_distmm.graph import build_graph

    problem = parse(lazy, lazy).problem
    d = da.Array(build_graph(problem, lazy, lazy), problem.name, problem.d.chunks, dtype=float)
    made.clear()
    np.testing.assert_array_equal(bind(d, before).compute(scheduler="sync"), x @ x)
    assert made == ["before"] * 3 + ["operand"] * 81
    copy = bind(d, before, omit=lazy)
    assert lazy.name in copy.dask.layers
    # Of a copy, too, only what is wanted is made.
    np.testing.assert_array_equal(copy[:9].compute(scheduler="sync"), (x @ x)[:9])
    barriers = {key for key in dask.optimize(copy[:9])[0].dask if barrier_name(key) is not None}
    assert len(barriers) == 1
    assert "-part-" in barriers.pop()


@pytest.mark.parametrize("delayed", [False, True])
def test_copies_of_optimized_graphs(inproc_client, delayed):
    """Dask puts the tasks of chunks into others, which read the barrier itself: one worker multiplies."""
    d, r = square()
    (optimized,) = dask.optimize(d)
    copy = bind(optimized, optimized)
    got = dask.delayed(np.asarray)(copy).compute() if delayed else copy.compute()
    np.testing.assert_allclose(got, r)
    # While the product itself is computed, too.
    for got in dask.compute(d, bind(optimized, da.ones(3))):
        np.testing.assert_allclose(got, r)


def test_parts_of_one_result(inproc_client):
    """One key, one task: whatever is asked for while other parts are there, on their way, or known."""

    def counted():
        x, lazy = matrix()
        a, b = (lazy.map_blocks(noted, name, dtype=float) for name in "ab")
        made.clear()
        return matmul(a, b), x @ x

    def check(found, expected):
        np.testing.assert_array_equal(found.compute(), expected)

    with no_warnings_of_dask():
        # Parts that are in memory are taken from there.
        d, r = counted()
        kept = d.persist()
        wait(kept)
        last = newest_run(inproc_client)
        made.clear()
        check(d[:9], r[:9])
        check(np.trace(d), np.trace(r))
        assert runs_after(inproc_client, last) == 0
        assert not made
        del kept
        # Chunks that are known, of which nothing is left: their part is made, and from no more than it needs.
        d, r = counted()
        total = d.sum().persist()
        wait(total)
        made.clear()
        check(d[:9], r[:9])
        check(total, r.sum())
        assert (made.count("a"), made.count("b")) == (2 * 9, 81)
        # The rest of what is there in part, from no more than that needs.
        d, r = counted()
        some = [(d.name, i, j) for i in range(6) for j in range(9)]
        part = inproc_client.get(d.dask, some, sync=False)
        wait(part)
        made.clear()
        check(d[21:], r[21:])
        assert (made.count("a"), made.count("b")) == (3 * 9, 81)
        np.testing.assert_array_equal(part[10].result(), r[7:14, 7:14])
        del part
        # Parts of which each has some chunks in common with others, at the same time; some are wanted no more.
        d, r = counted()
        wanted = [(slice(i, i + 16), slice(j, j + 20)) for i in range(0, 50, 12) for j in range(0, 45, 21)]
        futures = inproc_client.compute([d[place] for place in wanted])
        for future in futures[::3]:
            future.cancel()
        again = inproc_client.compute([d[place] * 1 for place in wanted[::3]])
        for place, future in zip(wanted[::3], again, strict=True):
            np.testing.assert_array_equal(future.result(), r[place])
        for number, (place, future) in enumerate(zip(wanted, futures, strict=True)):
            if number % 3:
                np.testing.assert_array_equal(future.result(), r[place])
        # Auxiliary outputs need the barrier of all.
        x, lazy = matrix()
        d, aux = matmul(lazy, lazy, epilog="relu_aux")
        part = d[:9].persist()
        mask, relu = dask.persist(aux["relu_aux"], d[20:])
        check(relu, np.maximum(x @ x, 0)[20:])
        check(mask, aux["relu_aux"].compute())
        check(part, np.maximum(x @ x, 0)[:9])
        # What is not made in parts, and waves.
        for d, r, *_ in [factors(), *waves()]:
            total = d.sum().persist()
            check(d[:9], r[:9])
            part = d[20:40].persist()
            check(d, r)
            np.testing.assert_allclose(total.compute(), r.sum())
            del total, part


def test_parts_by_tasks_of_dask(inproc_client):
    """Under `enable` a few chunks of D are made by Dask's own tasks, under the same keys, and the whole by a run."""

    def check(found, expected, runs):
        last = newest_run(inproc_client)
        np.testing.assert_array_equal(found.compute(), expected)
        assert runs_after(inproc_client, last) == runs

    with no_warnings_of_dask(), dask.config.set({"distmm.regions": False}), enabled():
        for in_memory, kind in ((False, float), (True, complex)):
            x, lazy = matrix()
            x, lazy = (each.astype(kind) * (1 + 2j if kind is complex else 1) for each in (x, lazy))
            if in_memory:
                lazy = lazy.persist()
            y, right = x.conj().T, lazy.conj().T
            d, r = lazy @ right, x @ y
            # The scheduler knows no run, and chunks of D that Dask's tasks have made.
            some = dask.persist(d[17, -17], d[18, -18])
            wait(some)
            check(d, r, 1)
            check(some[0], r[17, -17], 0)
            check(d[17, -17], r[17, -17], 0)
            check(d[:5, -3:] + 1, r[:5, -3:] + 1, 0)
            check(d, r, 1)
            del some
            # What there is already is taken, whoever has made it.
            part = d.blocks[1, 1].persist()
            wait(part)
            check(d, r, 1)
            check(d.blocks[1, 1] - 1, r[7:14, 7:14] - 1, 0)
            del part
            whole = d.persist()
            wait(whole)
            check(d[17, -17], r[17, -17], 0)
            total = d.sum().persist()
            del whole
            check(d[:2, :2], r[:2, :2], 0)
            check(total, r.sum(), 0)
        # Results of runs, other operands, and results that have to be runs.
        x, lazy = matrix()
        d, r = lazy @ lazy, x @ x
        check((d @ (lazy + 1))[3, 3], (r @ (x + 1))[3, 3], 1)
        check((d.persist() @ (lazy.persist() - 1))[3, 3], (r @ (x - 1))[3, 3], 1)
        check(matmul(lazy, lazy, method="allgather")[3, 3], r[3, 3], 1)
        check((lazy.rechunk((60, 7)) @ lazy)[3, 3], r[3, 3], 1)


def test_results_that_share_a_lazy_operand(inproc_client):
    """Several delayed calls have graphs that were optimized apart, and that have keys in common."""
    with no_warnings_of_dask():
        x, lazy = matrix()
        calls = [matmul(lazy, lazy), matmul(lazy, lazy.T)[:9], matmul(lazy.T, lazy) + 1]
        got = dask.compute(*(dask.delayed(np.asarray)(d) for d in calls))
        for found, expected in zip(got, [x @ x, (x @ x.T)[:9], x.T @ x + 1], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_without_the_cluster_inside_a_task(inproc_client):
    """In threads of its own, or in that of the task."""
    x = matrix()[0]

    def work():
        lazy = da.from_array(x, chunks=7) + 0
        d = matmul(lazy, lazy)
        return d.compute(scheduler="threads"), d[:9].compute(scheduler="sync"), np.trace(d).compute(scheduler="threads")

    whole, part, trace = inproc_client.submit(work, pure=False).result()
    np.testing.assert_array_equal(whole, x @ x)
    np.testing.assert_array_equal(part, (x @ x)[:9])
    assert trace == np.trace(x @ x)
