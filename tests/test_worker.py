"""The workers' end of the protocol: a `WorkerService` refuses messages that do not fit, and then nothing changes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from conformance import make_problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_ins import Loop, ask

from dask_distmm import matmul
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.errors import EngineError
from dask_distmm.planning import Plan, Worker, plan
from dask_distmm.runtime import worker as worker_module
from dask_distmm.runtime.chunks import other_orders
from dask_distmm.runtime.messages import NAME
from dask_distmm.runtime.run import WorkerRun
from dask_distmm.runtime.worker import DaskComm, WorkerService


@pytest.fixture(scope="module")
def side():
    side = WorkerService(Loop())
    yield side
    side.close()


def state(side):
    return (side.newest_run, sorted(side.runs), sorted(side.worker.data))


def small_plan() -> Plan:
    problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m")
    zeros = np.zeros(2, np.int32)
    return plan(problem, [Worker("inproc://1")], where={"a": zeros, "b": zeros[:1]})


# All chunks of D, under the usual name.
ALL = [("", "m", b"")]
KEYS = {"a": [("x", 0, 0), ("x", 1, 0)], "b": [("y", 0, 0)]}


def with_chunks(side) -> None:
    side.worker.data |= {("x", 0, 0): np.ones((4, 5)), ("x", 1, 0): np.ones((3, 5)), ("y", 0, 0): np.ones((5, 6))}


def prepared(side, run_id=1):
    return ask(side, WorkerService.prepare, run_id, 0, small_plan().to_wire(), KEYS)


def test_one_run_by_hand():
    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == "OK"
        box = np.array([[0, 1, 0, 2, 0, 5]], np.int64).tobytes()
        answer = await ask(side, WorkerService.fetch, 1, "input", box)
        assert answer.status == "OK"
        answer = await ask(side, WorkerService.start, 1, deliver=ALL)
        assert answer.status == "OK"
        ((array, numbers, sizes),) = answer.placed
        assert array == "m"
        assert np.frombuffer(numbers, np.int64).tolist() == [0, 1]
        assert np.frombuffer(sizes, np.int64).tolist() == [4 * 6 * 8, 3 * 6 * 8]
        assert answer.type[1] == "numpy.ndarray"
        np.testing.assert_array_equal(side.worker.data["m", 1, 0], np.full((3, 6), 5.0))
        side.finish(run_id=1)
        # A late order to end it takes nothing away.
        await ask(side, WorkerService.abort, 1, "late")
        assert state(side) == (1, [], sorted([("m", 0, 0), ("m", 1, 0), *KEYS["a"], *KEYS["b"]]))
        side.close()

    asyncio.run(work())


def test_a_worker_that_closes_says_so():
    """It answers for as long as anybody asks: one that did not would be taken for a worker without this package."""

    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == "OK"
        run = asyncio.ensure_future(ask(side, WorkerService.start, 1, deliver=ALL))
        await asyncio.sleep(0)
        side.close()
        assert (await run).status in ("lost", "OK")
        assert (await ask(side, WorkerService.start, 1, deliver=ALL)).status == "lost"
        vote = await prepared(side, 2)
        assert (vote.status, vote.message) == ("lost", "it is closing")
        box = np.array([[0, 1, 0, 2, 0, 5]], np.int64).tobytes()
        assert (await ask(side, WorkerService.fetch, 1, "input", box)).status == "lost"
        assert (await ask(side, WorkerService.abort, 1, "over")).status == "OK"

    asyncio.run(work())


def test_a_run_that_is_prepared_while_the_worker_closes_does_not_stay(monkeypatch):
    begun, closed, prepare = threading.Event(), threading.Event(), ProgramJob.prepare

    def slow(job):
        begun.set()
        assert closed.wait(120)
        prepare(job)

    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        vote = asyncio.ensure_future(prepared(side))
        assert await asyncio.to_thread(begun.wait, 120)
        side.close()
        closed.set()
        assert (await vote).status == "lost"
        assert not side.runs

    monkeypatch.setattr(ProgramJob, "prepare", slow)
    asyncio.run(work())


def test_what_a_failed_run_has_placed_goes():
    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == "OK"
        answer = await ask(side, WorkerService.start, 1, deliver=[("", "m", np.array([0], np.int64).tobytes())])
        assert np.frombuffer(answer.placed[0][1], np.int64).tolist() == [1]
        assert ("m", 1, 0) in side.worker.data
        assert ("m", 0, 0) not in side.worker.data
        # Another run makes the same chunk before this worker hears that the first one has failed.
        assert (await prepared(side, 2)).status == "OK"
        assert (await ask(side, WorkerService.start, 2, deliver=ALL)).status == "OK"
        side.end(run_id=1, reason="test")
        assert ("m", 1, 0) in side.worker.data
        side.end(run_id=2, reason="test")
        assert state(side) == (2, [], sorted([*KEYS["a"], *KEYS["b"]]))
        side.close()

    asyncio.run(work())


@pytest.mark.parametrize("ends", ["finish", "abort", "fails", "breaks", "serves"])
def test_a_run_that_is_over_is_gone_at_once(ends, monkeypatch):
    """Its memory, that of GPUs too, does not wait until Python looks for circles of references."""
    made, prepare = [], ProgramJob.prepare

    def noted(job):
        made.append(weakref.ref(job))
        prepare(job)
        if ends == "fails":
            raise MemoryError("no more")

    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == ("failed" if ends == "fails" else "OK")
        if ends == "finish":
            assert (await ask(side, WorkerService.start, 1, deliver=ALL)).status == "OK"
            side.finish(run_id=1)
        elif ends == "breaks":
            assert (await ask(side, WorkerService.start, 1, deliver=ALL)).status == "failed"
        elif ends == "serves":
            boxes = np.array([[0, 0, 0, 4, 0, 5]], np.int64).tobytes()
            assert (await ask(side, WorkerService.fetch, 1, "input", boxes)).status == "failed"
        if ends in ("abort", "breaks", "serves"):
            await ask(side, WorkerService.abort, 1, "test")
        await side._in_engine(False, int)
        side.close()

    def broken(job):
        raise MemoryError("no more")

    def ended(job, *asked):
        job.abort(EngineError("enough"))
        return serve(job, *asked)

    serve = ProgramJob.serve
    if ends == "serves":
        monkeypatch.setattr(ProgramJob, "serve", ended)
    monkeypatch.setattr(ProgramJob, "prepare", noted)
    if ends == "breaks":
        monkeypatch.setattr(ProgramJob, "execute", broken)
    gc.disable()
    try:
        asyncio.run(work())
        assert [job() for job in made] == [None]
    finally:
        gc.enable()


def test_stale_and_missing():
    async def work() -> None:
        side = WorkerService(Loop())
        vote = await prepared(side)
        assert (vote.status, vote.keys) == ("missing", [*KEYS["a"], *KEYS["b"]])
        with_chunks(side)
        assert (await prepared(side, 2)).status == "OK"
        before = state(side)
        for run_id in (0, 1, 2, -5, "2", None):
            assert (await prepared(side, run_id)).status == "refused"
        for run_id in (1, 3, "x"):
            assert (await ask(side, WorkerService.start, run_id, deliver=ALL)).status == "refused"
            status = (await ask(side, WorkerService.fetch, run_id, "input", b"\0" * 48)).status
            assert status == ("refused" if run_id == "x" else "lost")
        assert state(side) == before
        await ask(side, WorkerService.abort, 2, "test")
        assert (await ask(side, WorkerService.start, 2, deliver=ALL)).status == "refused"
        side.close()

    asyncio.run(work())


@pytest.mark.parametrize("keys", [{}, {"a": KEYS["a"]}, KEYS | {"a": [("x", 0, 0)]}, None, [1, 2]])
def test_keys_that_do_not_fit_the_plan(keys):
    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        answer = await ask(side, WorkerService.prepare, 1, 0, small_plan().to_wire(), keys)
        assert answer.status == "refused"
        assert "keys" in answer.message
        assert state(side)[:2] == (0, [])
        side.close()

    asyncio.run(work())


def test_other_memory_orders_than_planned():
    """Only where they matter, and only if asked."""
    made = dataclasses.replace(small_plan(), engine="peer")
    chunks = {("a", 0): np.ones((4, 5), order="F"), ("a", 1): np.ones((3, 5), order="F"), ("b", 0): np.ones((5, 6))}
    assert other_orders(made, chunks) == {"a": "F"}
    assert other_orders(dataclasses.replace(made, orders={**made.orders, "a": "F"}), chunks) == {}
    assert other_orders(dataclasses.replace(made, engine="numpy"), chunks) == {}


@pytest.mark.parametrize(("least", "threads"), [(2**16, 0), (8, 1)])
def test_few_bytes_are_served_without_a_thread(monkeypatch, least, threads):
    """A thread that only copies little takes longer than the copy, and many ranks ask for little."""
    functions = []

    async def to_thread(function, *args):
        functions.append(function)
        return function(*args)

    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == "OK"
        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        monkeypatch.setattr(worker_module.cross_memory, "LEAST_BYTES", least)
        boxes = np.array([[0, 1, 0, 2, 0, 5], [1, 0, 1, 3, 2, 4]], np.int64).tobytes()
        answer = await ask(side, WorkerService.fetch, 1, "input", boxes)
        assert answer.status == "OK"
        assert answer.shapes == ((2, 5), (2, 2))
        np.testing.assert_array_equal(answer.data[0].data, np.ones(14))
        assert len(functions) == threads
        side.close()

    asyncio.run(work())


def test_a_request_that_is_given_up_harms_no_run():
    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == "OK"
        boxes = np.array([[0, 0, 0, 1, 0, 1]], np.int64).tobytes()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(side, WorkerService.fetch, 1, "part", boxes), 0.05)
        assert (await ask(side, WorkerService.start, 1, deliver=ALL)).status == "OK"
        side.close()

    asyncio.run(work())


junk = st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=5), st.binary(max_size=100), st.lists(st.integers()))
calls = st.one_of(
    st.tuples(
        st.just(WorkerService.prepare), st.fixed_dictionaries({"run_id": junk, "me": junk, "plan": junk, "keys": junk})
    ),
    st.tuples(st.just(WorkerService.start), st.fixed_dictionaries({"run_id": st.integers(2, 9) | st.text()})),
    st.tuples(st.just(WorkerService.abort), st.fixed_dictionaries({"run_id": st.integers(2, 9), "reason": st.text()})),
    st.tuples(
        st.just(WorkerService.fetch),
        st.fixed_dictionaries({"run_id": st.integers(0, 3), "kind": junk, "boxes": junk}),
    ),
    st.tuples(
        st.just(WorkerService.fetch),
        st.fixed_dictionaries(
            {
                "run_id": st.just(1),
                "kind": st.sampled_from(["input", "part", "final", "replica", "other"]),
                "boxes": st.lists(st.integers(-2, 2**40), min_size=6, max_size=6).map(
                    lambda x: np.array([x], np.int64).tobytes()
                ),
            }
        ),
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls, max_size=12))
def test_any_message_in_any_order(messages):
    """Whatever comes, the live run stays as it is and its result right."""

    async def work() -> None:
        side = WorkerService(Loop())
        with_chunks(side)
        assert (await prepared(side)).status == "OK"
        before = state(side)
        for handler, fields in messages:
            try:
                answer = await asyncio.wait_for(ask(side, handler, **fields), 0.3)
            except TimeoutError:
                # A valid request for sums, which wait until they are there.
                assert fields["kind"] == "part"
                continue
            good = handler is WorkerService.abort or (handler is WorkerService.fetch and fields["kind"] == "input")
            assert answer.status in ({"OK", "refused", "lost"} if good else {"refused", "lost", "failed"})
            assert state(side) == before
        assert (await ask(side, WorkerService.start, 1, deliver=ALL)).status == "OK"
        np.testing.assert_array_equal(side.worker.data["m", 0, 0], np.full((4, 6), 5.0))
        side.close()

    asyncio.run(work())


def test_requests_outside_of_a_chunk(side):
    async def work() -> None:
        own = WorkerService(Loop())
        with_chunks(own)
        await prepared(own)
        for box in (
            [0, 0, 0, 5, 0, 5],
            [0, 2, 0, 1, 0, 1],
            [2, 0, 0, 1, 0, 1],
            [0, 0, 2, 2, 0, 1],
            [1, 0, -1, 1, 0, 1],
        ):
            answer = await ask(own, WorkerService.fetch, 1, "input", np.array([box], np.int64).tobytes())
            assert answer.status == "refused", box
        own.close()

    asyncio.run(work())


def test_the_plugin_can_be_installed_twice(inproc_client):
    from dask_distmm.runtime.worker import worker_plugin

    x = da.from_array(np.random.default_rng().standard_normal((40, 40)), chunks=10)
    matmul(x, x).compute()
    sides = inproc_client.run(lambda dask_worker: id(dask_worker.extensions[NAME]))
    inproc_client.register_plugin(worker_plugin())
    assert inproc_client.run(lambda dask_worker: id(dask_worker.extensions[NAME])) == sides
    np.testing.assert_allclose(matmul(x, x.T).compute(), x.compute() @ x.compute().T, rtol=1e-9, atol=1e-9)


def test_a_worker_that_ends_asks_nobody():
    loop = asyncio.new_event_loop()
    loop.close()
    worker = SimpleNamespace(address="inproc://1", loop=SimpleNamespace(asyncio_loop=loop))
    comm = DaskComm(worker, 1, ["inproc://2"], 1.0)
    with pytest.raises(ConnectionError, match="worker inproc://1 is closing"):
        comm.fetch(0, "input", np.zeros((1, 6), np.int64))


def test_reports_say_something_new(monkeypatch):
    """A worker whose share and bytes stand still sends no message."""
    sent = []
    monkeypatch.setattr("dask_distmm.runtime.worker._TELL", 0.001)
    loop = Loop()
    loop.batched_send = sent.append
    side = WorkerService(loop)
    arrived = itertools.chain([0, 0, 5, 5, 5, 9], itertools.repeat(9))

    class Job:
        asked, rank, turns = 0, 0, (0, 0)

        @property
        def received_bytes(self):
            self.asked += 1
            return next(arrived)

    async def work() -> None:
        job = Job()
        telling = asyncio.ensure_future(side._tell_progress(WorkerRun(1, small_plan(), 0, None, job), ""))
        while job.asked < 20 and not telling.done():
            await asyncio.sleep(0.001)
        assert telling.cancel()

    asyncio.run(work())
    side.close()
    assert [message["received_bytes"] for message in sent] == [5, 9]


@pytest.mark.parametrize("rests", [True, False])
def test_the_event_loop_sleeps_while_the_engine_works(monkeypatch, rests):
    """Its turns are as far apart as it sleeps; what the engine's thread returns or raises comes in any case."""
    side, slept, over = WorkerService(Loop()), [], threading.Event()
    monkeypatch.setattr(worker_module.time, "sleep", slept.append)

    def fail():
        raise ValueError("no")

    async def work() -> None:
        found = asyncio.ensure_future(side._in_engine(rests, over.wait, 120))
        for _ in range(20):
            await asyncio.sleep(0)
        turns = len(slept)
        over.set()
        assert await found
        with pytest.raises(worker_module._FailedError, match="no"):
            await side._in_engine(rests, fail)
        assert (10 < turns < 30) if rests else (not slept)

    asyncio.run(work())
    side.close()
    assert set(slept) <= {worker_module._REST}
