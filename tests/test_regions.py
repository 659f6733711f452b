"""Regions: what is around products in a graph is one run, with the values, errors and keys of Dask's own tasks."""

from __future__ import annotations

import graphlib
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from dask.array.routines import _matmul
from dask.graph_manipulation import bind, clone
from distributed import Status, wait
from faults import inject
from matrices import assert_near
from run_events import events_after, newest_run, runs_after

import dask_distmm
from benchmarks.algorithms import CASES, Case
from dask_distmm.engines.heap import ReusedHeap
from dask_distmm.runtime.regions import Regions

# Where tasks are said to take long all that can be a region is one.
ALWAYS = {"distmm.dask.task": "1s", "distmm.minimum-flops": None}


@pytest.fixture
def regions():
    with dask.config.set(ALWAYS), dask_distmm.enabled():
        yield


def persisted(*shapes, chunks=4):
    """Return random arrays, as NumPy has them and on the workers in chunks of rows."""
    arrays = [np.random.default_rng().random(shape) for shape in shapes]
    found = dask.persist(*(da.from_array(x, chunks=(-(-len(x) // chunks), *x.shape[1:])) for x in arrays))
    wait(found)
    return arrays, list(found)


def started(client, moment):
    return [event.get("tasks") for event in events_after(client, moment, "start")]


@pytest.mark.parametrize("name", CASES)
def test_a_turn_of_an_algorithm_is_one_run(client, regions, name):
    case: Case = CASES[name]
    large = case.cpu[0][0]
    square = case.cpu[0] == (large, large)

    def cut(shape):
        return tuple((96 if square else 240) if n == large else min(n, 12) for n in shape)

    given, arrays = persisted(*map(cut, case.cpu))
    small = [np.random.default_rng().random(cut(shape)) for shape in case.cpu_state]
    split = len(given) - case.in_rows
    values = [*arrays[split:], *(da.from_array(x, chunks=-1) for x in small)]
    numpy = [*given[split:], *small]
    for _ in range(3):
        before = newest_run(client)
        values = dask.persist(*case.turn(*arrays[:split], *values))
        wait(values)
        numpy = case.turn(*given[:split], *numpy)
        tasks = started(client, before)
        assert len(tasks) == 1, events_after(client, before, None)
        assert sum(tasks[0].values()) > 10
    for found, expected in zip(dask.compute(*values), numpy, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * abs(expected).max())


def sort_known_tasks(dask_scheduler):
    tasks = dask_scheduler.tasks.values()
    graphlib.TopologicalSorter({ts.key: {dep.key for dep in ts.dependencies} for ts in tasks}).prepare()


def test_what_earlier_results_depend_on_is_not_made_by_a_run_that_needs_these(client, regions):
    # If it were, nothing could be made again once both are lost.
    (a,), (x,) = persisted((8, 8))
    shift = da.from_array(np.full(8, 3.0), chunks=2).rechunk(4)
    with dask.config.set({"distmm.regions": False}), dask_distmm.enabled():
        before = (x.rechunk(4) + shift).persist()
        wait(before)
    with dask_distmm.enabled():
        moment = newest_run(client)
        after, shifts, more = dask.persist(before @ before.T + shift, shift, shift + 1)
        wait([after, shifts, more])
        assert len(started(client, moment)) == 1
        client.run_on_scheduler(sort_known_tasks)
        np.testing.assert_allclose(after, (a + 3) @ (a + 3).T + 3)
        np.testing.assert_array_equal(shifts, np.full(8, 3.0))
        np.testing.assert_array_equal(more, np.full(8, 4.0))


def test_known_chunks_of_a_region_that_is_over_are_made_by_the_tasks_of_a_new_graph(client, regions):
    (a,), (x,) = persisted((8, 8))
    shift = da.from_array(np.full(8, 3.0), chunks=2).rechunk(4)
    first, kept = dask.persist(x @ x.T + shift, shift)
    wait([first, kept])
    second = (first * 2).persist()
    wait(second)
    del first, kept
    with dask.config.set({"distmm.regions": False}), dask_distmm.enabled():
        moment = newest_run(client)
        np.testing.assert_array_equal((shift * 2).compute(), np.full(8, 6.0))
        assert not started(client, moment)
    np.testing.assert_allclose(second, 2 * (a @ a.T + 3))


def of_statistics(x, w):
    z = (x - x.mean(0)) / x.std(0)
    return z.T @ z, (z @ w).max(axis=0), da.linalg.norm(z, axis=1)


def test_values_chunks_and_types_are_those_of_stock(client, regions):
    _, (x, w) = persisted((60, 7), (7, 3))
    dask_distmm.disable()
    expected = of_statistics(x, w)
    values = dask.compute(*expected)
    with dask_distmm.enabled():
        found = of_statistics(x, w)
        before = newest_run(client)
        for one, other in zip(found, expected, strict=True):
            assert (one.chunks, one.dtype, type(one._meta)) == (other.chunks, other.dtype, type(other._meta))
        for one, other in zip(dask.compute(*found), values, strict=True):
            assert type(one) is type(other)
            assert_near(one, other, rtol=1e-12)
        assert len(started(client, before)) == 1


def test_parts_cost_parts_and_lost_chunks_are_made_alone(client, regions):
    (a, w), (x, y) = persisted((80, 6), (6, 6))
    whole = da.exp(x @ y) * 2
    before = newest_run(client)
    # What is left of one chunk is in the task that returns it.
    np.testing.assert_allclose(whole[:20].persist().compute(), np.exp(a[:20] @ w) * 2)
    np.testing.assert_allclose(whole.blocks[3].persist().compute(), np.exp(a[60:] @ w) * 2)
    parts = [sum(tasks.values()) for tasks in started(client, before)]
    before = newest_run(client)
    np.testing.assert_allclose(whole.compute(), np.exp(a @ w) * 2)
    (every,) = started(client, before)
    assert parts
    assert max(parts) <= sum(every.values()) / 2


def test_a_product_of_a_matrix_and_itself_is_in_the_region_that_reads_it(client, regions):
    # More bytes than a region moves for a product: none of these move.
    x = da.random.default_rng().random((70_000, 130), chunks=(17_500, 130)).persist()
    a = x.compute()
    before = newest_run(client)
    z = (da.exp(x.T @ x / 1e5) - x.sum(axis=0)).persist()
    np.testing.assert_allclose(z.compute(), np.exp(a.T @ a / 1e5) - a.sum(axis=0))
    (tasks,) = started(client, before)
    assert tasks["product"] >= 4


def test_tasks_that_were_released_are_called_in_the_region():
    t, p, x, y = ("t", 0), ("p", 0), ("x", 0), ("y", 0)
    there = SimpleNamespace(state="memory", who_has=[], nbytes=0, type="ndarray")
    released = SimpleNamespace(state="released", who_has=[], run_spec=Task(t, np.transpose, TaskRef(x)))
    worker = SimpleNamespace(address="w", status=Status.running, nthreads=1, extra={})
    tasks = {x: there, y: there, t: released}
    scheduler = SimpleNamespace(tasks=tasks, workers={"w": worker}, task_prefixes={})
    graph = {p: Task(p, _matmul, TaskRef(t), TaskRef(y))}
    (draft,), _ = Regions(scheduler)._found(graph, [p], {})
    assert list(draft.tasks) == [t, p]
    assert {*draft.inputs} == {x, y}
    assert [*graph] == [p]


def test_a_product_with_nothing_beside_it_is_a_run_of_its_own(client, regions):
    (a, w), (x, y) = persisted((40, 40), (40, 40))
    before = newest_run(client)
    z = (x @ y).persist()
    np.testing.assert_allclose(z.compute(), a @ w)
    assert started(client, before) == [None]
    # One of many pieces is not made of tasks either, whatever is beside it.
    before = newest_run(client)
    many = (x.rechunk(4) @ y.rechunk(4) + 1).persist()
    np.testing.assert_allclose(many.compute(), a @ w + 1)
    assert None in started(client, before)


def test_products_of_rejected_regions_are_runs_of_their_own_and_others_are_not(client, regions, monkeypatch):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    problem = Regions._problem

    def without_sines(self, draft, whole):
        return None if "sin" in draft.counts else problem(self, draft, whole)

    monkeypatch.setattr(Regions, "_problem", without_sines)
    before = newest_run(client)
    # The second waits for a chunk that is being made: a region of its own.
    slow = x.map_blocks(slowly, dtype=float).persist()
    one, two = dask.persist(da.sin(x @ y), da.cos(slow @ y))
    np.testing.assert_allclose(one.compute(), np.sin(a @ w))
    np.testing.assert_allclose(two.compute(), np.cos(a @ w))
    assert sorted(tasks is None for tasks in started(client, before)) == [False, True]


def test_without_workers_graphs_are_dasks(client, regions, caplog, monkeypatch):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    monkeypatch.setattr(Regions, "_workers", lambda self: [])
    np.testing.assert_allclose(da.exp(x @ y).persist().compute(), np.exp(a @ w))
    assert "not looked through" not in caplog.text


def test_a_copy_of_a_barrier_keeps_the_run_out_of_regions(client, regions, caplog):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    z = x @ y
    copy = da.from_delayed(dask.delayed(np.exp)(z), shape=z.shape, dtype=float)
    found = client.gather(client.compute([z, copy], optimize_graph=False))
    np.testing.assert_allclose(found[0], a @ w)
    np.testing.assert_allclose(found[1], np.exp(a @ w))
    assert "not looked through" not in caplog.text


class Calls:
    """What a C library is called with."""

    def __init__(self):
        self.made = []

    def mallopt(self, option, limit):
        self.made.append((option, limit))

    def malloc_trim(self, pad):
        self.made.append("trim")


def test_memory_of_temporaries_is_reused_while_runs_last(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    heap = ReusedHeap()
    heap._library = library = Calls()
    with heap, heap:
        assert library.made == [(-1, 2**25), (-3, 2**25)]
    assert library.made[2:] == [(-1, 65536), (-3, 2**17), "trim"]
    # Handing back takes no more than a fiftieth of the time.
    heap._took = 1e6
    with heap:
        pass
    assert library.made.count("trim") == 1
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    # glibc adapts to sizes by itself.
    heap = ReusedHeap()
    heap._library = library = Calls()
    with heap:
        pass
    assert not library.made


def failing(block, bad):
    if block.max() > bad:
        raise LookupError(f"a chunk has {block.max()}")
    return block


def test_errors_of_functions_are_the_users(client, regions):
    a = np.zeros((40, 4))
    a[35] = 9.0
    x = da.from_array(a, chunks=(10, 4)).persist()
    y = (x @ np.ones((4, 4))).map_blocks(failing, 20.0, dtype=float)
    before = newest_run(client)
    with pytest.raises(LookupError, match=r"a chunk has 36\.0"):
        y.compute()
    assert any(started(client, before))
    # Other chunks are as without regions.
    found = y.persist()
    wait(found)
    assert sorted(future.status for future in client.futures_of(found)) == ["error", "finished", "finished", "finished"]


def test_errors_end_ranks_that_wait_for_each_other(client, regions):
    _, (x, y) = persisted((40, 4), (4, 4), chunks=8)
    z = (x @ y).map_blocks(failing, -1.0, dtype=float)
    before = newest_run(client)
    with pytest.raises(LookupError, match="a chunk has"):
        ((z - z.sum(axis=0)) @ (z.T @ z)).compute()
    assert any(started(client, before))


def counted(block):
    from distributed import get_worker

    return block + (get_worker() is not None)


def test_functions_find_their_worker(client, regions):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    np.testing.assert_allclose((x @ y).map_blocks(counted, dtype=float).compute(), a @ w + 1)


def test_what_does_not_fit_is_left_to_dask(client, regions):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    before = newest_run(client)
    # The limit is that of the scheduler, which is in this process.
    with dask.config.set({"distmm.memory.limit-fraction": 1e-9}):
        np.testing.assert_allclose(da.exp(x @ y).sum().compute(), np.exp(a @ w).sum())
    assert not runs_after(client, before)


@pytest.mark.parametrize("how", ["annotate", "resources", "retries", "priority", "workers"])
def test_what_users_ask_of_tasks_is_left_to_dask(client, regions, how):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    before = newest_run(client)
    if how == "annotate":
        with dask.annotate(retries=2):
            z = da.exp(x @ y)
            found = z.compute(optimize_graph=False)
    else:
        options = {"resources": {}, "retries": 3, "priority": 5, "workers": [next(iter(client.nthreads()))]}
        found = client.compute(da.exp(x @ y), **{how: options[how]}).result()
    np.testing.assert_allclose(found, np.exp(a @ w))
    if how in ("annotate", "retries", "priority", "workers"):
        assert not any(started(client, before))


def test_graphs_that_are_rewritten(client, regions, tmp_path):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    expected = np.exp(a @ w)
    z = da.exp(x @ y)
    for found in (dask.optimize(z)[0], clone(z), bind(z, x.sum()), z.copy(), z):
        np.testing.assert_allclose(found.compute(), expected)
    assert z.name == da.exp(x @ y).name
    np.testing.assert_allclose(dask.delayed(np.sum)(z).compute(), expected.sum())
    z.to_zarr(str(tmp_path / "z.zarr"))
    np.testing.assert_allclose(da.from_zarr(str(tmp_path / "z.zarr")).compute(), expected)


def test_a_chain_that_nobody_waits_for(client, regions):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    for _ in range(4):
        x, a = ((x @ y) / 4).persist(), (a @ w) / 4
    np.testing.assert_allclose(x.compute(), a)


def test_it_can_be_switched_off(client, regions):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    with dask.config.set({"distmm.regions": False}):
        before = newest_run(client)
        np.testing.assert_allclose(da.exp(x @ y).compute(), np.exp(a @ w))
        assert not any(started(client, before))
    before = newest_run(client)
    np.testing.assert_allclose(da.exp(x @ (y + 1)).compute(), np.exp(a @ (w + 1)))
    assert any(started(client, before))
    dask_distmm.disable()


def test_cancelled(client, regions):
    (a, w), (x, y) = persisted((40, 4), (4, 4))
    z = ((x @ y).map_blocks(slowly, dtype=float)).persist()
    client.cancel(z)
    np.testing.assert_allclose((x @ y).sum().compute(), (a @ w).sum())


def slowly(block):
    import time

    time.sleep(0.2)
    return block


@pytest.mark.faults
@pytest.mark.parametrize("point", ["read", "vote", "region", "place"])
def test_a_worker_dies(fault_client, regions, point):
    (a, w), (x, y) = persisted((90, 4), (4, 4), chunks=6)
    z = da.exp(x @ y) - x.sum()
    victim = sorted(fault_client.nthreads())[1]
    fault_client.run(inject, point, "kill", workers=[victim])
    np.testing.assert_allclose(fault_client.compute(z).result(timeout=120), np.exp(a @ w) - a.sum())


def test_explain_shows_regions(client, regions):
    _, (x, y) = persisted((40, 4), (4, 4))
    z = da.concatenate([da.exp(x @ y), da.random.random((40, 4), chunks=(10, 4)).map_blocks(np.sqrt)])
    plan = dask_distmm.explain(z)
    assert isinstance(repr(plan), str)
    (region,) = plan.regions
    assert region.chosen
    assert (region.inputs, region.outputs, region.counts["matmul"]) == (8, 4, 4)
    assert plan.method == "runs"
    assert any("drawing" in why for why in plan.left)
    assert "one run" in repr(plan)
    assert "matmul" in plan._repr_html_()
    with dask.config.set({"distmm.dask.task": "0ms"}):
        plan = dask_distmm.explain(da.exp(x @ y) + 1)
    assert not any(region.chosen for region in plan.regions)
