"""What rests on internals of distributed: that they are there, and that Dask's own checks of its state hold with it."""

from __future__ import annotations

import cProfile
import logging
import re
import time
from pathlib import Path

import dask
import dask.array as da
import distributed
import numpy as np
import pytest
from conformance import assert_product
from dask._task_spec import convert_legacy_graph
from distributed import Client, LocalCluster, SchedulerPlugin, wait
from distributed.scheduler import validate_state
from leaks import assert_nothing_left
from run_events import events, events_after, newest_run

from dask_distmm import matmul
from dask_distmm._version import TESTED_DASK
from dask_distmm.arrays.request import parse
from dask_distmm.errors import NoWorkersError
from dask_distmm.graph import build_graph
from dask_distmm.runtime import direct


def test_this_version_of_distributed_has_been_tested():
    """A new version needs a look at `compat`, and then an entry in `_version` and on the page of versions."""
    assert distributed.__version__ in TESTED_DASK
    root = Path(__file__).parents[1]
    bounds = re.findall(r'^  "(?:dask\[array\]|distributed)(>.*)",$', (root / "pyproject.toml").read_text(), re.M)
    # No upper one: a newer version that lacks something is refused at run time, and Dask's own functions go on.
    assert bounds == [f">={TESTED_DASK[0]}"] * 2
    page = (root / "docs" / "versions.md").read_text()
    assert all(version in page for version in TESTED_DASK)


def test_ordering_apart():
    """All tasks, each after what it needs; the work grows with them and not with their square."""
    counts = []
    for chunks in (8, 16):
        x = da.random.random((chunks * 4,) * 2, chunks=4)
        y = da.random.random(x.shape, chunks=4)
        problem = parse(x, y).problem
        d = da.Array(build_graph(problem, x, y), problem.name, problem.d.chunks, dtype=float)
        again = parse(d, x).problem
        e = da.Array(build_graph(again, d, x), again.name, again.d.chunks, dtype=float) * 2
        graph = convert_legacy_graph(dict(e.dask))
        profile = cProfile.Profile()
        profile.enable()
        found = direct.order_apart(direct._dask_order, graph)
        profile.disable()
        counts.append(sum(entry.callcount for entry in profile.getstats()) / len(graph))
        assert found.keys() == graph.keys()
        assert sorted(found.values()) == list(range(len(graph)))
        assert all(found[dep] < found[key] for key, task in graph.items() for dep in task.dependencies)
        # What begins for a barrier only is in the order of the matrix: neighbours are loaded by one worker.
        below = [found[y.name, *place] for place in np.ndindex(y.numblocks)]
        assert below == list(range(below[0], below[0] + len(below)))
    assert counts[1] < 1.3 * counts[0]
    plain = convert_legacy_graph(dict((x + 1).dask))
    assert direct.order_apart(direct._dask_order, plain) == direct._dask_order(plain)


def test_ordering_is_dasks_again_afterwards():
    assert dask.order.order is direct._dask_order or direct._ordering
    direct.order_graphs(1, True)
    direct.order_graphs(2, True)
    assert dask.order.order is not direct._dask_order
    direct.order_graphs(1, False)
    direct.order_graphs(2, False)
    assert dask.order.order is direct._dask_order or direct._ordering


@pytest.fixture(scope="module")
def validated():
    """Workers in this process, with all of Dask's own checks of its state on."""
    settings = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as workers,
        Client(workers) as client,
    ):
        yield client


def check_state(dask_scheduler) -> dict[str, int]:
    validate_state(dask_scheduler.tasks, dask_scheduler.workers, dask_scheduler.clients)
    states: dict[str, int] = {}
    for ts in dask_scheduler.tasks.values():
        states[ts.state] = states.get(ts.state, 0) + 1
    return states


def matrices(m=60, k=50, n=40, chunk=20):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    return a, b, da.from_array(a, chunks=chunk), da.from_array(b, chunks=chunk)


def test_a_client_that_multiplies_sends_messages_as_often_as_workers(validated):
    _, _, x, y = matrices()
    matmul(x, y).compute()
    intervals = validated.run(lambda dask_worker: dask_worker.batched_stream.interval)
    assert {validated.scheduler_comm.interval} == {*intervals.values()}


@pytest.mark.parametrize("persisted", [False, True])
def test_persisted_released_and_made_again(validated, persisted):
    a, b, x, y = matrices()
    if persisted:
        x, y = validated.persist([x, y])
    d = matmul(x, y).persist()
    wait(d)
    states = validated.run_on_scheduler(check_state)
    assert states["memory"] >= 6
    assert "no-worker" not in states
    assert_product(a, b, d.compute())
    del d
    assert_nothing_left(validated)
    assert_product(a, b, matmul(x, y).compute())
    validated.run_on_scheduler(check_state)


def test_within_a_larger_graph_and_for_several_who_want_it(validated):
    a, b, x, y = matrices()
    d = matmul(x + 1, y)
    total, part, whole = dask.compute((d * 2).sum(), d[:10, :30], d)
    assert_product(a + 1, b, whole)
    np.testing.assert_allclose(total, 2 * whole.sum())
    np.testing.assert_array_equal(part, whole[:10, :30])
    validated.run_on_scheduler(check_state)


def test_chunks_that_are_there_are_not_made_again(validated):
    """A part that is kept, then all of it: the second run makes the rest."""
    a, b, x, y = matrices()
    x, y = validated.persist([x, y])
    d = matmul(x, y)
    top = d.blocks[0].persist()
    wait(top)
    before = newest_run(validated)
    assert_product(a, b, d.compute())
    after = [event["flops"] for event in events_after(validated, before, "start")]
    assert sum(after) <= 2 * 60 * 50 * 40
    validated.run_on_scheduler(check_state)


def test_what_a_part_costs(validated):
    """Only the rows and columns of chunks that are wanted are read and multiplied."""
    a, b, x, y = matrices(100, 50, 80, 10)
    x, y = (z.map_blocks(np.copy, name=f"load-{z.name}", dtype=float, meta=np.empty((0, 0))) for z in (x, y))
    validated.register_plugin(Seen())
    try:
        assert matmul(x, y)[7, 9].compute() == pytest.approx((a @ b)[7, 9])
        heard = validated.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["seen"].transitions)
    finally:
        validated.unregister_scheduler_plugin("seen")
    loaded = [key for key, _, finish, _ in heard if finish == "memory" and key[0].startswith("load-")]
    assert len(loaded) == 2 * 5
    (start,) = events(validated, "start")[-1:]
    assert start["flops"] == 2 * 10 * 10 * 50


def test_a_lost_chunk_comes_back(validated):
    """Dask computes it again: one run for what is missing."""
    a, b, x, y = matrices()
    d = matmul(x, y).persist()
    wait(d)
    key = next(iter(d.__dask_keys__()))[0]

    async def lose(dask_scheduler=None):
        ts = dask_scheduler.tasks[key]
        for ws in list(ts.who_has):
            await dask_scheduler.delete_worker_data(ws.address, [key], "test-lose")
            dask_scheduler.remove_replica(ts, ws) if ts.who_has and ws in ts.who_has else None
        dask_scheduler.transitions({key: "released"}, "test-lose")

    before = newest_run(validated)
    validated.run_on_scheduler(lose)
    wait(d)
    assert_product(a, b, d.compute())
    (start,) = events_after(validated, before, "start")
    assert start["flops"] < 2 * 60 * 50 * 40
    validated.run_on_scheduler(check_state)


def test_a_failed_run_leaves_a_state_that_dask_finds_right(validated):
    _, _, x, y = matrices()
    wrong = x.map_blocks(lambda block: block[:-1], dtype=float, chunks=x.chunks, meta=np.empty((0, 0)))
    with pytest.raises(Exception, match="chunk .* of A is"):
        matmul(wrong, y).compute()
    validated.run_on_scheduler(check_state)


class Seen(SchedulerPlugin):
    """What Dask's own progress bars and dashboard hear."""

    name = "seen"

    def __init__(self):
        self.transitions = []

    def transition(self, key, start, finish, *args, **kwargs):
        self.transitions.append((key, start, finish, set(kwargs)))
        if key[0] == "fails":
            raise RuntimeError("somebody else's plugin")


class Follows(Seen):
    """What looks at the tasks that it hears of, as Dask's work stealing does."""

    async def start(self, scheduler):
        self.tasks = scheduler.tasks

    def transition(self, key, start, finish, *args, **kwargs):
        super().transition(key, start, finish, *args, **kwargs)
        ts = self.tasks[key]
        assert ts.state == finish
        assert (ts.processing_on is not None) == (finish == "processing")
        assert bool(ts.who_has) == (finish == "memory")


def test_other_plugins_hear_of_the_chunks(validated, caplog):
    """Once of each; and none fails, not even those that look at the tasks."""
    _, _, x, y = matrices()
    validated.register_plugin(Follows())
    caplog.set_level(logging.INFO)
    try:
        d = matmul(x, y).persist()
        wait(d)
        heard = validated.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["seen"].transitions)
        for key in (key for row in d.__dask_keys__() for key in row):
            mine = [found for found in heard if found[0] == key]
            assert [found[1:3] for found in mine[-2:]] == [("waiting", "processing"), ("processing", "memory")]
            assert [found[2] for found in mine].count("memory") == 1
            assert {"worker", "status", "nbytes", "type", "typename", "startstops"} <= mine[-1][3]
        assert not [record for record in caplog.records if "plugin failed" in record.getMessage().lower()]
        assert (
            validated.run_on_scheduler(lambda dask_scheduler: dask_scheduler.task_groups[d.name].states["memory"]) == 6
        )
    finally:
        validated.unregister_scheduler_plugin("seen")


def test_a_run_outlasts_the_timeout_for_missing_workers(validated, monkeypatch):
    """``no-workers-timeout`` is for tasks that no worker may run, not for those that a run is on for."""
    from dask_distmm.engines.programs.job import ProgramJob

    execute = ProgramJob.execute
    monkeypatch.setattr(ProgramJob, "execute", lambda self: time.sleep(2.5) or execute(self))

    def limit(seconds, dask_scheduler=None):
        dask_scheduler.no_workers_timeout = seconds

    a, b, x, y = matrices()
    try:
        validated.run_on_scheduler(limit, 1.0)
        assert_product(a, b, matmul(x, y).compute())
    finally:
        validated.run_on_scheduler(limit, None)


def test_where_the_user_lets_it_run(validated):
    """Annotations for workers hold for who multiplies, and where the result lies."""
    a, b, x, y = matrices()
    address = sorted(validated.nthreads())[1]
    x, y = validated.persist([x, y])
    with dask.annotate(workers=[address]):
        d = validated.persist(matmul(x, y, method="summa"), optimize_graph=False)
    wait(d)
    assert {tuple(found) for found in validated.who_has(d).values()} == {(address,)}
    assert_product(a, b, d.compute())


def test_where_no_worker_may_run_it(validated):
    """As Dask's own tasks it waits for such a worker; then the error names who was asked for, and who is there."""

    def check(**asked):
        a, b, x, y = matrices()
        x, y = validated.persist([x, y])
        with dask.annotate(**asked), dask.config.set({"distmm.timeouts.load": "0.3s"}):
            d = matmul(x, y, method="summa")
        assert_product(a, b, validated.compute(d, optimize_graph=False).result(timeout=120))

    with pytest.raises(NoWorkersError, match=r"workers=\['nobody'\] was asked for .* has inproc.*waited for 0.3 s"):
        check(workers=["nobody"])
    with pytest.raises(NoWorkersError, match=r"resources={'GPU': 1} was asked for .* has inproc.*waited for 0.3 s"):
        check(resources={"GPU": 1})
    check(workers=["nobody"], allow_other_workers=True)
    check(workers=[min(validated.nthreads())])


def test_the_first_of_several_by_priority(validated):
    before = newest_run(validated)
    products = [matmul(*matrices()[2:]) for _ in range(6)]
    futures = [validated.compute(d, priority=number) for number, d in enumerate(products)]
    wait(futures)
    names = [event["name"] for event in events_after(validated, before, "start")]
    assert sorted(names) == sorted(d.name for d in products)
