"""What the cluster does for an engine with collectives: choice, versions, the gate, groups. With a stand-in engine."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import types

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster
from leaks import assert_nothing_left
from matrices import until
from run_events import events, phases

import dask_distmm
from dask_distmm import PlanError, Slab
from dask_distmm.engines.entry import CollectiveEntry
from dask_distmm.engines.numpy.engine import NumpyEngine, ProductKernels
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.errors import EngineError, MissingEngineError, RunFailedError
from dask_distmm.planning import ENGINES, NumpyModel


class StandInJob(ProgramJob):
    """Multiplies as the numpy engine does, behind the gate of a collective engine."""

    def __init__(self, engine, side):
        super().__init__(side, ProductKernels(side.plan))
        self.engine, self.entry = engine, CollectiveEntry(self.plan, self.rank, self.comm, self.ended)
        self.held_bytes, self.kept_bytes = 1000 + self.me, 700

    def available(self, kind, boxes):
        return self.entry.entered(int(boxes[0, 0])) if kind == "enter" else super().available(kind, boxes)

    def serve(self, kind, boxes):
        return self.entry.answer() if kind == "enter" else super().serve(kind, boxes)

    def execute(self):
        if self.rank is None:
            return {}
        try:
            if len(self.plan.ranks) > 1:
                self._go_in()
            return super().execute()
        finally:
            self.entry.leave()

    def _go_in(self):
        self.entry.enter(lambda: b"secret")
        assert self.entry.unique_id == b"secret"
        with self.engine.lock:
            self.engine.inside += 1
            self.engine.groups.setdefault(self.plan.group, set()).add(self.rank)
        if self.engine.fail == self.rank:
            self.engine.fail = None
            raise ZeroDivisionError("inside the library")

    def abort(self, error):
        self.entry.abort(error)
        super().abort(error)


class StandIn(NumpyEngine):
    """Says that it is cuBLASMp."""

    name = "cublasmp"

    def __init__(self):
        self.groups, self.released, self.inside, self.fail = {}, [], 0, None
        self.lock = threading.Lock()

    def versions(self):
        return {"cublasmp": "1000"}

    def memory(self):
        return 10**10

    def job(self, side):
        return StandInJob(self, side)

    def release(self, group):
        with self.lock:
            self.released.append(group)

    def abandon(self, group):
        with self.lock:
            self.released.append(-group)


def with_numpy_steps(name, module):
    """Return the model of an engine that is a module, and whose ranks take the steps of the numpy engine."""
    model = type(ENGINES[name])
    model = dataclasses.dataclass(frozen=True)(type("StandInModel", (model,), {"steps": NumpyModel.steps}))
    return model(**vars(ENGINES[name]) | {"module": module})


@pytest.fixture
def engine(monkeypatch):
    module = types.ModuleType("stand_in_engine")
    module.ENGINE = StandIn()
    monkeypatch.setitem(sys.modules, "stand_in_engine", module)
    monkeypatch.setitem(ENGINES, "cublasmp", with_numpy_steps("cublasmp", "stand_in_engine"))
    return module.ENGINE


@pytest.fixture
def client(engine):
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def product(m=60, n=50, k=70, chunks=20, **options):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    d = dask_distmm.matmul(da.from_array(a, chunks), da.from_array(b, chunks), **options)
    return a, b, d


@pytest.mark.parametrize("method", ["allgather", "local", "auto"])
def test_it_is_chosen_and_goes_through_the_gate(client, engine, method):
    a, b, d = product(method=method)
    assert_product(a, b, d.compute())
    (start,), (done,) = events(client, "start"), events(client, "done")
    assert start["engine"] == "cublasmp"
    assert done["held_bytes"]
    assert set(done["held_bytes"]) <= set(done["projected_bytes"])
    assert engine.inside == (3 if method == "allgather" else 0)


def test_types_it_lacks_go_to_the_other_engine(client, engine):
    a = np.arange(900).reshape(30, 30)
    np.testing.assert_array_equal(dask_distmm.matmul(da.from_array(a, 10), da.from_array(a, 10)).compute(), a @ a)
    assert events(client, "start")[0]["engine"] == "numpy"
    with pytest.raises(
        MissingEngineError, match="engine 'cublasmp' can't multiply numpy arrays of int64; use engine='numpy'"
    ):
        dask_distmm.matmul(da.from_array(a, 10), da.from_array(a, 10), engine="cublasmp")


def test_explain_names_engine_and_memory(client, engine):
    x = da.ones((200, 200), chunks=50)
    plan = dask_distmm.explain(x, x, method="allgather")
    assert plan.engine == "cublasmp"
    assert {worker.memory_limit for worker in plan.participants} == {10**10}
    assert dask_distmm.explain(x, x, engine="numpy").engine == "numpy"


def test_a_group_is_used_again_and_freed_on_demand(client, engine):
    for _ in range(3):
        a, b, d = product(method="allgather")
        assert_product(a, b, d.compute())
    assert len(engine.groups) == 1
    assert dask_distmm.free_workspaces() == 1
    assert engine.released == list(engine.groups) * 3
    assert dask_distmm.free_workspaces() == 0
    a, b, d = product(method="allgather")
    assert_product(a, b, d.compute())
    assert len(engine.groups) == 2


@pytest.mark.parametrize("limit", [{"distmm.cublasmp.max-groups": 1}, {"distmm.cublasmp.keep-workspace": 1000}])
def test_the_least_recently_used_group_leaves(client, engine, limit):
    addresses = sorted(client.nthreads())
    with dask.config.set(limit):
        for count in (3, 2):
            a, b, d = product(method="allgather", workers=addresses[:count])
            assert_product(a, b, d.compute())
    until(lambda: len(engine.released) >= 3)
    assert engine.released == [1, 1, 1]


def test_a_failure_inside_is_one_error_and_the_group_is_made_anew(client, engine):
    a, b, d = product(method="allgather")
    engine.fail = 1
    with pytest.raises(RunFailedError, match="inside the library") as error:
        d.compute()
    assert error.value.phase == "running"
    until(lambda: len(engine.released) >= 3)
    a, b, d = product(method="allgather")
    assert_product(a, b, d.compute())
    assert len(engine.groups) == 2
    del d
    assert_nothing_left(client)


def test_the_others_forget_the_group_of_a_worker_that_left(client, engine):
    a, b, d = product(method="allgather")
    assert_product(a, b, d.compute())
    del d
    client.retire_workers([sorted(client.nthreads())[0]])
    until(lambda: len(engine.released) >= 2)
    assert engine.released == [-1, -1]
    a, b, d = product(method="allgather")
    assert_product(a, b, d.compute())


def test_different_versions_are_named_with_their_workers(client, engine, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(engine, "versions", lambda: {"cublasmp": str(1000 + next(calls) // 2)})
    with pytest.raises(EngineError, match=r"cublasmp 1000 on tcp.*cublasmp 1001 on tcp.*pip install"):
        product(method="allgather")


def test_a_worker_without_the_engine_is_no_rank_but_gives_its_chunks(client, engine, monkeypatch):
    lock, calls = threading.Lock(), []

    def versions():
        with lock:
            calls.append(1)
            if len(calls) == 1:
                raise EngineError("no NVIDIA GPU is visible to this process")
        return {"cublasmp": "1000"}

    monkeypatch.setattr(engine, "versions", versions)
    a, b, d = product(method="allgather")
    assert_product(a, b, d.compute())
    assert engine.inside == 2


def test_if_no_worker_has_it_the_reason_is_told(client, engine, monkeypatch):
    def versions():
        raise EngineError("no NVIDIA GPU is visible to this process")

    monkeypatch.setattr(engine, "versions", versions)
    with pytest.raises(MissingEngineError, match=r"no worker has engine 'cublasmp'.*no NVIDIA GPU.*pip install"):
        product(engine="cublasmp")
    a, b, d = product()
    assert_product(a, b, d.compute())
    assert events(client, "start")[0]["engine"] == "numpy"


def test_cancelled_before_the_gate_opens_nobody_is_stuck(client, engine):
    """One rank's run never begins; the others wait at the gate and are let go."""
    blocked = threading.Event()

    a, b, d = product(method="allgather")
    d.compute()
    a, b, d = product(method="allgather")
    client.cluster.workers[2].extensions["distmm"].engine_thread.submit(blocked.wait)
    future = client.compute(d)
    until(lambda: phases(client))
    future.cancel()
    del future, d
    blocked.set()
    assert_nothing_left(client)
    a, b, d = product(method="allgather")
    assert_product(a, b, d.compute())


def test_a_stateful_multiply_keeps_its_group_until_it_is_freed(client, engine):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((60, 70)), rng.standard_normal((70, 50))
    x, y = da.from_array(a, 20), da.from_array(b, 20)
    with dask_distmm.Matmul(x, y, method="allgather") as mm:
        made = mm.plan()
        for _ in range(3):
            assert_product(a, b, mm.execute().compute())
        assert len(engine.groups) == 1
        assert engine.released == []
        # Its own tiles lie right: only what all gather is received, and nothing of it by us.
        assert made.engine == "cublasmp"
        assert_product(a, b, mm.execute(release_workspace=True).compute())
        assert len(engine.released) == 3
        assert_product(a, b, mm.execute().compute())
        assert len(engine.groups) == 2
    assert len(engine.released) == 6


def test_distributions_are_refused_with_what_the_engine_has(client, engine):
    with pytest.raises(PlanError, match="engine 'cublasmp' has A as Slab.*B in column slabs"):
        product(distributions=[Slab(0), Slab(0)])
    a, b, d = product(distributions=[Slab(0), Slab(1), Slab(1)])
    assert_product(a, b, d.compute())
    assert events(client, "start")[-1]["grid"] == (1, 3, 1)


def test_what_is_kept_goes_some_time_after_the_last_client(engine, monkeypatch):
    monkeypatch.setattr("dask_distmm.runtime.plugin._IDLE_TIME", 0.1)
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp"
    ) as cluster:
        with Client(cluster), Client(cluster, set_as_default=False) as other:
            a, b, d = product(method="allgather")
            assert_product(a, b, d.compute())
            other.close()
            time.sleep(0.3)
            assert engine.released == []
        until(lambda: len(engine.released) >= 2)


class PeerStandIn(StandIn):
    """Says that it is the engine whose ranks map others' memory."""

    name = "peer"

    def versions(self):
        return {"cuda": "1000"}

    def links(self):
        return "gpu", ("gpu",)


def test_a_rank_that_is_alone_keeps_what_it_has_mapped_of_others(client, monkeypatch):
    """All who take part are a group, which is freed when one of them leaves."""
    module = types.ModuleType("stand_in_peer")
    engine = module.ENGINE = PeerStandIn()
    monkeypatch.setitem(sys.modules, "stand_in_peer", module)
    monkeypatch.setitem(ENGINES, "peer", with_numpy_steps("peer", "stand_in_peer"))
    for method in ("local", "local", "allgather"):
        a, b, d = product(method=method, engine="peer")
        assert_product(a, b, d.compute())
    assert [event["engine"] for event in events(client, "start")] == ["peer"] * 3
    # One group, of all three workers.
    assert dask_distmm.free_workspaces() == 1
    assert len(engine.released) == 3
    assert len(set(engine.released)) == 1
