"""Before a run: what can't fit is refused before it is loaded, and what nothing moves is ended."""

from __future__ import annotations

import logging
import re
import time
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from distributed.core import Status
from hypothesis import given
from hypothesis import strategies as st
from matrices import until

import dask_distmm
from dask_distmm import ProjectedMemoryError, explain, linalg, matmul
from dask_distmm.arrays.request import parse
from dask_distmm.graph import build_graph
from dask_distmm.planning.waves import WavePlan
from dask_distmm.runtime import coordinator, freezing
from dask_distmm.runtime.coordinator import stuck
from dask_distmm.runtime.keys import barrier_name


def worker(status, processing, executing):
    return SimpleNamespace(status=SimpleNamespace(name=status), processing=processing, executing=executing)


states = st.builds(worker, st.sampled_from(["running", "paused"]), st.booleans(), st.booleans())


@given(st.lists(states))
def test_who_is_stuck(workers):
    busy = any(w.executing or (w.status.name == "running" and w.processing) for w in workers)
    assert stuck(workers) == ([] if busy else [w for w in workers if w.status.name == "paused"])


@pytest.fixture
def no_waves():
    """Products that do not fit are refused, or left to Dask."""
    with dask.config.set({"distmm.waves.mode": "off"}):
        yield


def any_paused(dask_scheduler):
    return any(ws.status.name == "paused" for ws in dask_scheduler.workers.values())


def set_status(name, dask_worker):
    dask_worker.status = Status[name]


def test_paused_workers_end_it(inproc_client):
    """In bounded time, with one error that names them; awake again, the same product runs."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 60, 60))
    x = inproc_client.persist(da.from_array(a, chunks=20))
    wait(x)
    y = da.from_array(b, chunks=20).map_blocks(np.copy, dtype=float)
    with dask.config.set({"distmm.timeouts.load": "2s"}):
        product = matmul(x, y)
        assert_product(a, b, product.compute())
        product = matmul(x, y + 0)
    try:
        inproc_client.run(lambda dask_worker: set_status("paused", dask_worker))
        with pytest.raises(ProjectedMemoryError, match=r"nothing has gone on, .* are paused: inproc") as caught:
            inproc_client.compute(product).result(timeout=120)
        assert set(caught.value.limit) <= set(inproc_client.nthreads())
    finally:
        inproc_client.run(lambda dask_worker: set_status("running", dask_worker))
    assert_product(a, b + 1, matmul(x, y + 1).compute())


def test_workers_that_are_paused_for_a_while(inproc_client):
    """A barrier whose inputs are all in memory waits until somebody may multiply."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 60, 60))
    x, y = inproc_client.persist([da.from_array(a, chunks=20), da.from_array(b, chunks=20)])
    wait([x, y])
    product = matmul(x, y)
    try:
        inproc_client.run(lambda dask_worker: set_status("paused", dask_worker))
        future = inproc_client.compute(product.persist())
        time.sleep(1)
        assert not future.done()
    finally:
        inproc_client.run(lambda dask_worker: set_status("running", dask_worker))
    assert_product(a, b, future.result(timeout=120))


@pytest.mark.parametrize("loaded", [True, False])
def test_a_worker_that_is_paused_for_a_moment_counts(inproc_client, monkeypatch, loaded):
    """A product that only all workers can hold waits for it: where chunks come back from disk, Dask pauses often."""

    def only_on_all(made):
        def planned(problem, workers, *args, **more):
            if len(workers) < 4:
                raise ProjectedMemoryError("too little memory", {}, {})
            return made(problem, workers, *args, **more)

        return planned

    monkeypatch.setattr(freezing, "plan", only_on_all(freezing.plan))
    monkeypatch.setattr(coordinator, "plan_computation", only_on_all(coordinator.plan_computation))
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 60, 60))
    x, y = (da.from_array(one, chunks=20).map_blocks(np.copy, dtype=float) for one in (a, b))
    if loaded:
        x, y = inproc_client.persist([x, y])
        wait([x, y])
    product = matmul(x, y)
    paused = list(inproc_client.nthreads())[:1]
    try:
        inproc_client.run(lambda dask_worker: set_status("paused", dask_worker), workers=paused)
        until(lambda: inproc_client.run_on_scheduler(any_paused))
        future = inproc_client.compute(product)
        time.sleep(1.5)
        assert future.status == "pending"
    finally:
        inproc_client.run(lambda dask_worker: set_status("running", dask_worker), workers=paused)
    assert_product(a, b, future.result(timeout=120))


def huge():
    return (da.zeros((30_000, 20_000), chunks=5_000) for _ in "ab")


def test_what_does_not_fit_is_refused_before_it_is_loaded(client, no_waves):
    """Also where the graph was made without a look at this cluster."""
    x, _ = huge()
    before = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
    for ask in (matmul, explain):
        with pytest.raises(ProjectedMemoryError, match=r"process holds anyway; it may hold .*A @ B under enable\(\)"):
            ask(x.T, x)
    problem = parse(x.T, x).problem
    graph = build_graph(problem, x, x)
    d = da.Array(graph, problem.name, problem.d.chunks, dtype=float)
    pids = client.run(lambda dask_worker: id(dask_worker))
    with pytest.raises(ProjectedMemoryError, match="Use more workers"):
        client.compute(d.sum()).result(timeout=120)
    assert client.run(lambda dask_worker: id(dask_worker)) == pids
    after = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
    # The tasks came and went: none of the 24 chunks of 200 MB was waited for.
    assert after - before < 40 * len(dict(graph))


@pytest.mark.parametrize("coarse", ["a", "b", "ab"])
def test_smaller_chunks_that_do_are_named(client, coarse):
    """The remedy names the operands that are too coarse, and a size with which the plan is in as many waves."""

    def made(size):
        rng, found = da.random.default_rng(1), dict.fromkeys("ab", 1_000) | dict.fromkeys(coarse, size)
        return [rng.random((20_000, 20_000), chunks=found[name]) for name in "ab"]

    for ask in (matmul, explain):
        with pytest.raises(ProjectedMemoryError) as caught:
            ask(*made(20_000))
    text = str(caught.value)
    named = re.search(r"smaller chunks where (.+) (?:is|are) made: with chunks=(\d+) there are (\d+) waves", text)
    assert named, text
    assert named[1] == " and ".join(coarse.upper())
    # One chunk of 3 GB does not stream.
    assert "under enable()" not in text
    waves = explain(*made(int(named[2])))
    assert isinstance(waves, WavePlan)
    assert len(waves.scheme.waves) == int(named[3])


def test_smaller_chunks_of_rows_are_advised_for_tall_matrices(client):
    tall = [da.zeros((4_000_000, 100), chunks=chunks) for chunks in (-1, (40_000, -1))]
    with pytest.raises(ProjectedMemoryError, match="in 1 chunk of rows .*Use smaller chunks of rows: .* has 2.98 GiB"):
        linalg.lstsq(tall[0], tall[0][:, 0])
    assert linalg.explain(linalg.lstsq(tall[1], tall[1][:, 0])).method == "rows"


def test_under_enable_it_is_dasks(client, caplog, no_waves):
    x, _ = huge()
    with dask_distmm.enabled(), caplog.at_level(logging.WARNING, "dask_distmm"):
        d = x.T @ x
    assert not any(barrier_name(key) for key in dict(d.dask))
    assert "left to Dask's own tasks" in caplog.text
    # That was just done.
    assert "under enable()" not in caplog.text
    with (
        dask_distmm.enabled(),
        dask.config.set({"distmm.memory.exceeded": "raise"}),
        pytest.raises(ProjectedMemoryError),
    ):
        x.T @ x
    with (
        dask_distmm.enabled(),
        dask.config.set({"distmm.memory.exceeded": "hope"}),
        pytest.raises(dask_distmm.PlanError, match="expected 'dask' or 'raise'"),
    ):
        x.T @ x


def test_the_quicker_of_both_is_taken(client):
    """By the cost model, whose constants decide here; explain says which; a number of operations overrules it."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 60, 60))
    x, y = da.from_array(a, chunks=20), da.from_array(b, chunks=20)

    def here(product):
        return any(barrier_name(key) for key in dict(product.dask))

    own = "Dask's own tasks, as they are expected to take"
    with dask_distmm.enabled():
        for slow, taken in (("dask.run", False), ("dask.start", True)):
            with dask.config.set({f"distmm.{slow}": "1h"}):
                product = x @ y
                assert here(product) == taken
                assert_product(a, b, product.compute())
                verdict = repr(explain(x, y)).splitlines()[0]
                assert verdict.startswith(f"A @ B under enable(): {'a collective run' if taken else own}")
                with dask.config.set({"distmm.minimum-flops": 0}):
                    assert here(x @ y)
                with dask.config.set({"distmm.minimum-flops": 1e12}):
                    assert not here(x @ y)
                assert here(matmul(x, y))
