"""The workers' end of the protocol: a `WorkerService` refuses messages that do not fit, and then nothing changes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import itertools
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from conformance import make_problem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from matrices import LIMIT
from stand_ins import Loop, ask

from dask_distmm import matmul
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.errors import EngineError
from dask_distmm.planning import Plan, Worker, plan
from dask_distmm.runtime import worker as worker_module
from dask_distmm.runtime.chunks import other_orders
from dask_distmm.runtime.messages import NAME, operation_of
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


def not_a_number(value: Any) -> bool:
    return not isinstance(value, int)


calls = st.one_of(
    st.tuples(
        st.just(WorkerService.prepare), st.fixed_dictionaries({"run_id": junk, "me": junk, "plan": junk, "keys": junk})
    ),
    st.tuples(st.just(WorkerService.start), st.fixed_dictionaries({"run_id": st.integers(100) | st.text()})),
    st.tuples(
        st.just(WorkerService.abort), st.fixed_dictionaries({"run_id": junk.filter(not_a_number), "reason": junk})
    ),
    st.tuples(
        st.just(WorkerService.fetch),
        st.fixed_dictionaries({"run_id": st.integers(0, 3), "kind": junk, "boxes": junk}),
    ),
    st.tuples(
        st.just(WorkerService.fetch),
        st.fixed_dictionaries(
            {
                "run_id": st.integers(1, 9),
                "kind": st.sampled_from(["input", "part", "final", "replica", "other"]),
                "boxes": st.lists(st.integers(-2, 2**40), min_size=6, max_size=6).map(
                    lambda x: np.array([x], np.int64).tobytes()
                ),
            }
        ),
    ),
)


class Service(RuleBasedStateMachine):
    """A worker's side under messages in any order: what fits is done, all else refused, and nothing stays of a run."""

    @initialize()
    def begin_service(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(worker_module, "_OVERTAKES", 0.0)
        self.loop = asyncio.new_event_loop()
        rng = np.random.default_rng()
        self.inputs = dict(
            zip([*KEYS["a"], *KEYS["b"]], map(rng.standard_normal, ((4, 5), (3, 5), (5, 6))), strict=True)
        )

        async def make() -> WorkerService:
            return WorkerService(Loop())

        self.side = self.loop.run_until_complete(make())
        self.side.worker.data |= self.inputs
        # Live runs with the names of the results that each has put into memory, and runs that are over.
        self.live: dict[int, set[str]] = {}
        self.over: set[int] = set()
        self.newest = 0
        # Results that are in memory.
        self.results: set[str] = set()
        # Requests for sums, which wait until these are there, of live runs.
        self.waiting: list[tuple[int, asyncio.Task[Any]]] = []
        # While the engine's thread is busy: what lets it go on, and the request that waits for it, its run and result.
        self.busy: threading.Event | None = None
        self.late: tuple[str, int, str, asyncio.Task[Any]] | None = None
        self.epochs = itertools.count(1)
        # Requests of an epoch that is over.
        self.forgotten: set[asyncio.Task[Any]] = set()

    # What is asked of the service

    def task(self, handler: Any, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(ask(self.side, handler, *args, **kwargs))
        self.settle()
        return task

    def ask(self, handler: Any, *args: Any, **kwargs: Any) -> Any:
        return self.wait(self.task(handler, *args, **kwargs))

    def wait(self, task: asyncio.Task[Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(task, LIMIT))

    def tell(self, handler: Any, **fields: Any) -> None:
        """Send a message on the scheduler's stream."""
        self.side.worker.stream_handlers[operation_of(handler)](**{"epoch": self.side.epoch} | fields)

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    # What becomes of it

    def gone(self, run_id: int) -> None:
        """Expect that a run has been ended without success."""
        for name in self.live.pop(run_id, ()):
            if not any(number > run_id and name in names for number, names in self.live.items()):
                self.results.discard(name)
        for number, task in self.waiting:
            if number == run_id:
                assert self.wait(task).status in ("failed", "lost")
        self.waiting = [(number, task) for number, task in self.waiting if number != run_id]

    def started(self, run_id: int, name: str, answer: Any) -> None:
        """Expect that a run has put its result into memory, unless it was ended meanwhile."""
        if run_id not in self.live:
            assert answer.status in ("failed", "lost")
            return
        assert answer.status == "OK"
        ((array, numbers, _),) = answer.placed
        assert (array, np.frombuffer(numbers, np.int64).tolist()) == (name, [0, 1])
        self.live[run_id].add(name)
        self.results.add(name)

    # What happens

    @precondition(lambda self: self.busy is None)
    @rule(ahead=st.integers(1, 3), late=st.booleans())
    def prepare(self, ahead: int, late: bool) -> None:
        run_id = self.newest + ahead
        if late:
            self.keep_busy()
        task = self.task(WorkerService.prepare, run_id, 0, small_plan().to_wire(), KEYS)
        if run_id in self.over:
            assert self.wait(task).status == "refused"
        elif late:
            self.late = "prepare", run_id, "", task
        else:
            assert self.wait(task).status == "OK"
            self.newest, self.live[run_id] = run_id, set()

    @precondition(lambda self: self.busy is None)
    @rule(behind=st.integers(0, 3))
    def prepare_a_stale_run(self, behind: int) -> None:
        assert (
            self.ask(WorkerService.prepare, self.newest - behind, 0, small_plan().to_wire(), KEYS).status == "refused"
        )

    @precondition(lambda self: self.busy is None)
    @rule(keys=st.sampled_from([{}, {"a": KEYS["a"]}, KEYS | {"a": [("x", 0, 0)]}]))
    def prepare_with_keys_that_do_not_fit(self, keys: Any) -> None:
        answer = self.ask(WorkerService.prepare, self.newest + 9, 0, small_plan().to_wire(), keys)
        assert answer.status == "refused"

    @precondition(lambda self: self.busy is None)
    @rule(key=st.sampled_from([*KEYS["a"], *KEYS["b"]]))
    def prepare_without_a_chunk(self, key: Any) -> None:
        del self.side.worker.data[key]
        answer = self.ask(WorkerService.prepare, self.newest + 9, 0, small_plan().to_wire(), KEYS)
        self.side.worker.data[key] = self.inputs[key]
        if answer.status != "refused":
            assert (answer.status, answer.keys) == ("missing", [key])

    @precondition(lambda self: self.busy is None and not all(self.live.values()))
    @rule(data=st.data(), name=st.sampled_from("mn"), late=st.booleans())
    def start(self, data: Any, name: str, late: bool) -> None:
        run_id = data.draw(st.sampled_from(sorted(number for number, names in self.live.items() if not names)))
        if late:
            self.keep_busy()
        task = self.task(WorkerService.start, run_id, deliver=[("", name, b"")])
        if late:
            self.late = "start", run_id, name, task
        else:
            self.started(run_id, name, self.wait(task))

    def keep_busy(self) -> None:
        self.busy = threading.Event()
        self.side.engine_thread.submit(self.busy.wait)

    @precondition(lambda self: self.busy is not None)
    @rule()
    def let_go(self) -> None:
        self.busy.set()
        self.busy = None
        if self.late is None:
            return
        (what, run_id, name, task), self.late = self.late, None
        answer = self.wait(task)
        if what == "start":
            self.started(run_id, name, answer)
        elif task in self.forgotten:
            assert answer.status in ("refused", "failed")
        elif run_id in self.over:
            self.newest = run_id
        else:
            assert answer.status == "OK"
            self.newest, self.live[run_id] = run_id, set()

    @rule(run_id=st.integers(1, 12), ahead=st.integers(0, 3), stream=st.booleans())
    def abort(self, run_id: int, ahead: int, stream: bool) -> None:
        """Abort a run that may be live, over or still to come."""
        run_id = min(run_id, self.newest + ahead)
        if stream:
            self.tell(WorkerService.end, run_id=run_id, reason="test")
        else:
            assert self.ask(WorkerService.abort, run_id, "test").status == "OK"
        self.over.add(run_id)
        self.gone(run_id)

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        run_id = data.draw(st.sampled_from(sorted(number for number, names in self.live.items() if names)))
        for number, task in self.waiting:
            if number == run_id:
                task.cancel()
        self.waiting = [(number, task) for number, task in self.waiting if number != run_id]
        self.settle()
        self.tell(WorkerService.finish, run_id=run_id)
        self.over.add(run_id)
        del self.live[run_id]

    @rule(run_id=st.integers(0, 12), row=st.integers(0, 3), kind=st.sampled_from(["input", "part"]))
    def fetch(self, run_id: int, row: int, kind: str) -> None:
        boxes = np.array([[0, 0, row, 4, 1, 5]], np.int64).tobytes()
        task = self.task(WorkerService.fetch, run_id, kind, boxes)
        if run_id not in self.live:
            assert self.wait(task).status == "lost"
        elif kind == "part" and not task.done():
            self.waiting.append((run_id, task))
        elif kind == "input":
            np.testing.assert_array_equal(
                self.wait(task).data[0].data, self.inputs["x", 0, 0][row:, 1:].ravel().reshape(4 - row, 4)
            )

    @rule(call=calls)
    def malformed(self, call: Any) -> None:
        """What does not fit is refused; a request of sums may be one that has to wait."""
        handler, fields = call
        task = self.task(handler, **fields)
        if handler is WorkerService.fetch and not task.done():
            task.cancel()
            self.settle()
        elif handler is not WorkerService.fetch or fields["run_id"] not in self.live:
            assert self.wait(task).status in ("refused", "lost", "failed")

    @rule(
        handler=st.sampled_from([WorkerService.prepare, WorkerService.start, WorkerService.abort, WorkerService.fetch])
    )
    def of_another_epoch(self, handler: Any) -> None:
        fields = {"run_id": self.newest, "reason": "", "kind": "input", "boxes": b"", "me": 0, "plan": {}, "keys": {}}
        takes = inspect.signature(handler).parameters.keys()
        wire = {name: value for name, value in fields.items() if name in takes}
        answer = self.loop.run_until_complete(self.side.handlers[operation_of(handler)](**wire, epoch="forged"))
        assert answer["status"] == "refused"

    @rule(run_id=st.integers(0, 12))
    def what_concerns_nobody(self, run_id: int) -> None:
        self.tell(WorkerService.worker_lost, run_id=run_id, address="inproc://9")
        self.tell(WorkerService.release_operands, run_id=run_id)
        self.tell(WorkerService.release_replica, name="x", run_id=run_id)

    @precondition(lambda self: self.busy is None)
    @rule(group=st.integers(1, 3))
    def release(self, group: int) -> None:
        assert self.ask(WorkerService.release, group, "numpy", 10.0).status == "OK"

    @rule(again=st.booleans())
    def begin(self, again: bool) -> None:
        """Begin an epoch, or hear of this one again."""
        if again:
            self.tell(WorkerService.begin, epoch=self.side.epoch)
            return
        self.tell(WorkerService.begin, epoch=f"epoch {next(self.epochs)}")
        for run_id in sorted(self.live):
            self.gone(run_id)
        if self.late is not None:
            self.forgotten.add(self.late[-1])
        self.over.clear()
        self.newest = 0

    @invariant()
    def what_is_here_is_what_should_be(self) -> None:
        assert sorted(self.side.runs) == sorted(self.live)
        assert self.side.newest_run == self.newest
        expected = {(name, number, 0) for name in self.results for number in (0, 1)}
        assert self.side.worker.data.keys() == self.inputs.keys() | expected
        for name, number, _ in expected:
            product = self.inputs["x", number, 0] @ self.inputs["y", 0, 0]
            np.testing.assert_allclose(self.side.worker.data[name, number, 0], product, atol=1e-13)

    def teardown(self) -> None:
        """A worker that closes ends all, and answers as long as anybody asks."""
        try:
            late, self.late = self.late, None
            self.side.close()
            for run_id in sorted(self.live):
                self.gone(run_id)
            if self.busy is not None:
                self.busy.set()
            if late is not None:
                assert self.wait(late[-1]).status in ("lost", "failed", "refused")
            assert self.ask(WorkerService.start, 1, deliver=ALL).status == "lost"
            assert self.ask(WorkerService.abort, 1, "over").status == "OK"
            self.side.engine_thread.shutdown()
            self.newest = self.side.newest_run
            self.what_is_here_is_what_should_be()
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.loop.close()
            self.patch.undo()


Service.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestService = Service.TestCase


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
