"""The workers' protocol: what a `WorkerSide` refuses, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_distmm import matmul
from dask_distmm.comms.dask import DaskComm
from dask_distmm.keys import stage_name
from dask_distmm.plan import Plan, Worker, plan
from dask_distmm.testing import make_problem
from dask_distmm.worker import DistMMWorkerPlugin, WorkerSide


class Loop:
    """What `WorkerSide` needs of a Dask worker."""

    address = "inproc://1"

    def __init__(self) -> None:
        self.handlers: dict = {}
        self.stream_handlers: dict = {}


@pytest.fixture(scope="module")
def side():
    side = WorkerSide(Loop())
    yield side
    side.close()


def state(side):
    return (side.newest_run, sorted(side.runs), sorted(side.outputs), {k: sorted(v) for k, v in side.staged.items()})


def small_plan() -> Plan:
    problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m")
    zeros = np.zeros(2, np.int32)
    return plan(problem, [Worker("inproc://1")], where_a=zeros, where_b=zeros[:1])


def staged(side) -> None:
    side.stage("m", "a", {(0, 0): np.ones((4, 5))})
    side.stage("m", "a", {(1, 0): np.ones((3, 5))})
    side.stage("m", "b", {(0, 0): np.ones((5, 6))})


def test_one_run_by_hand():
    async def work() -> None:
        side = WorkerSide(Loop())
        staged(side)
        wire = small_plan().to_wire()
        assert (await side.prepare(run_id=1, me=0, plan=wire))["status"] == "OK"
        box = np.array([[0, 1, 0, 2, 0, 5]], np.int64).tobytes()
        answer = await side.fetch(run_id=1, kind="input", boxes=box, flat=False)
        assert answer["status"] == "OK"
        assert (await side.start(run_id=1))["status"] == "OK"
        side.finish(run_id=1, name="m")
        np.testing.assert_array_equal(side.collect(1, "", 1), np.full((3, 6), 5.0))
        answer = await side.fetch(
            run_id=1, kind="output-", boxes=np.array([[0, 1, 0, 0, 0, 0]], np.int64).tobytes(), flat=False
        )
        assert answer["status"] == "OK"
        side.forget(run_id=1, name="m")
        assert state(side) == (1, [], [], {})
        side.close()

    asyncio.run(work())


def test_stale_and_missing():
    async def work() -> None:
        side = WorkerSide(Loop())
        wire = small_plan().to_wire()
        assert await side.prepare(run_id=1, me=0, plan=wire) == {"status": "missing", "count": 3}
        staged(side)
        assert (await side.prepare(run_id=2, me=0, plan=wire))["status"] == "OK"
        before = state(side)
        for run_id in (0, 1, 2, -5, "2", None):
            assert (await side.prepare(run_id=run_id, me=0, plan=wire))["status"] == "refused"
        for run_id in (1, 3, "x"):
            assert (await side.start(run_id=run_id))["status"] == "refused"
            assert (await side.fetch(run_id=run_id, kind="input", boxes=b"\0" * 48, flat=False))["status"] == "gone"
        assert state(side) == before
        await side.abort(run_id=2, reason="test")
        assert (await side.start(run_id=2))["status"] == "refused"
        side.close()

    asyncio.run(work())


def test_a_request_that_is_given_up_harms_no_run():
    async def work() -> None:
        side = WorkerSide(Loop())
        staged(side)
        assert (await side.prepare(run_id=1, me=0, plan=small_plan().to_wire()))["status"] == "OK"
        boxes = np.array([[0, 0, 0, 1, 0, 1]], np.int64).tobytes()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(side.fetch(run_id=1, kind="partial", boxes=boxes, flat=False), 0.05)
        assert (await side.start(run_id=1))["status"] == "OK"
        side.close()

    asyncio.run(work())


junk = st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=5), st.binary(max_size=100), st.lists(st.integers()))
calls = st.one_of(
    st.tuples(st.just("prepare"), st.fixed_dictionaries({"run_id": junk, "me": junk, "plan": junk})),
    st.tuples(st.just("start"), st.fixed_dictionaries({"run_id": st.integers(2, 9) | st.text()})),
    st.tuples(st.just("abort"), st.fixed_dictionaries({"run_id": st.integers(2, 9), "reason": st.text()})),
    st.tuples(
        st.just("fetch"),
        st.fixed_dictionaries({"run_id": st.integers(0, 3), "kind": junk, "boxes": junk, "flat": st.booleans()}),
    ),
    st.tuples(
        st.just("fetch"),
        st.fixed_dictionaries(
            {
                "run_id": st.just(1),
                "kind": st.sampled_from(["input", "partial", "final", "output-", "replica", "other"]),
                "boxes": st.lists(st.integers(-2, 2**40), min_size=6, max_size=6).map(
                    lambda x: np.array([x], np.int64).tobytes()
                ),
                "flat": st.booleans(),
            }
        ),
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls, max_size=12))
def test_any_message_in_any_order(messages):
    """Whatever comes, the live run stays as it is and its result right."""

    async def work() -> None:
        side = WorkerSide(Loop())
        staged(side)
        assert (await side.prepare(run_id=1, me=0, plan=small_plan().to_wire()))["status"] == "OK"
        before = state(side)
        for op, arguments in messages:
            try:
                answer = await asyncio.wait_for(getattr(side, op)(**arguments), 0.3)
            except TimeoutError:
                # A valid request for sums, which wait until they are there.
                assert arguments["kind"] in ("partial", "final")
                continue
            good = op == "abort" or (op == "fetch" and arguments["kind"] == "input")
            assert answer["status"] in ({"OK", "refused", "gone"} if good else {"refused", "gone", "failed"})
            assert state(side) == before
        assert (await side.start(run_id=1))["status"] == "OK"
        np.testing.assert_array_equal(side.collect(1, "", 0), np.full((4, 6), 5.0))
        side.close()

    asyncio.run(work())


def test_requests_outside_of_a_chunk(side):
    async def work() -> None:
        own = WorkerSide(Loop())
        staged(own)
        await own.prepare(run_id=1, me=0, plan=small_plan().to_wire())
        for box in (
            [0, 0, 0, 5, 0, 5],
            [0, 2, 0, 1, 0, 1],
            [2, 0, 0, 1, 0, 1],
            [0, 0, 2, 2, 0, 1],
            [1, 0, -1, 1, 0, 1],
        ):
            answer = await own.fetch(run_id=1, kind="input", boxes=np.array([box], np.int64).tobytes(), flat=False)
            assert answer["status"] == "refused", box
        own.close()

    asyncio.run(work())


def test_the_plugin_can_be_installed_twice(inproc_client):
    from dask_distmm.worker import DistMMWorkerPlugin

    x = da.from_array(np.random.default_rng().standard_normal((40, 40)), chunks=10)
    matmul(x, x).compute()
    sides = inproc_client.run(lambda dask_worker: id(dask_worker.extensions["distmm"]))
    inproc_client.register_plugin(DistMMWorkerPlugin())
    assert inproc_client.run(lambda dask_worker: id(dask_worker.extensions["distmm"])) == sides
    np.testing.assert_allclose(matmul(x, x.T).compute(), x.compute() @ x.compute().T, rtol=1e-9, atol=1e-9)


def test_a_chunk_staged_by_a_cancelled_task_leaves_nothing():
    """The multiply was forgotten while the task ran; what it stages then goes with its end, to the last entry."""
    side = WorkerSide(Loop())
    plugin = DistMMWorkerPlugin()
    plugin._side = side
    staged(side)
    side.forget(None, "m")
    side.stage("m", "a", {(1, 0): np.ones((3, 5)), (0, 0): np.ones((4, 5))})
    side.stage("m", "b", {(0, 0): np.ones((5, 6))})
    plugin.transition((stage_name("m", "a"), 0, 0), "cancelled", "memory")
    assert len(side.staged["m"]) == 3
    plugin.transition((stage_name("m", "a"), 1, 0), "cancelled", "memory")
    assert list(side.staged["m"]) == [("b", 0, 0)]
    plugin.transition((stage_name("m", "b"), 0, 0), "cancelled", "released")
    assert side.staged == {}
    plugin.transition((stage_name("m", "b"), 0, 0), "cancelled", "released")
    plugin.transition("another", "cancelled", "memory")
    assert side.staged == {}
    side.close()


def test_a_worker_that_ends_asks_nobody():
    loop = asyncio.new_event_loop()
    loop.close()
    worker = SimpleNamespace(address="inproc://1", loop=SimpleNamespace(asyncio_loop=loop))
    comm = DaskComm(worker, 1, ["inproc://2"], 1.0)
    with pytest.raises(ConnectionError, match="worker inproc://1 is closing"):
        comm.fetch(0, "input", np.zeros((1, 6), np.int64), flat=False)
