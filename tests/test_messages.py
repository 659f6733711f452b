"""Every message, with every field changed: a typed answer or nothing, no worker ends, and the next product is right."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging

import dask.array as da
import numpy as np
from matrices import until

from dask_distmm import matmul
from dask_distmm.planning import Demand, Worker, plan
from dask_distmm.runtime import messages
from dask_distmm.runtime import messages as questions
from dask_distmm.runtime.messages import NAME, Call, Message
from dask_distmm.runtime.worker import MISSING
from dask_distmm.testing import assert_product, make_problem

JUNK = (
    *(None, True, -1, 0, 10**6, 1.5, float("nan"), float("inf"), "", "x", "numpy", b"", b"\0" * 48),
    *([], [[]], [None], ["x", -1], {}, {"a": 1}, {"engine": "x"}, object),
)


def small_plan():
    problem = make_problem(((4, 3), (5,)), ((5,), (6,)), name="m")
    zeros = np.zeros(2, np.int32)
    return plan(problem, [Worker("inproc://1")], where={"a": zeros, "b": zeros[:1]}).to_wire()


KEYS = {"a": [("x", 0, 0), ("x", 1, 0)], "b": [("y", 0, 0)]}
DEMAND = Demand("auto", "numpy", ("float64",) * 3)
# A valid message of each kind, of a run that is over or of a group that is not there.
TO_WORKERS = (
    messages.Describe(),
    messages.Prepare(1, 0, small_plan(), KEYS),
    messages.Start(1),
    messages.Abort(1, "late"),
    messages.ReleaseGroup(1, "numpy", 1.0),
    messages.Fetch(1, "input", bytes(48), flat=False),
    messages.Finish(1),
    messages.ReleaseOperands(1),
    messages.WorkerLost(1, "inproc://1"),
    messages.GroupLost(1, "numpy"),
    messages.ReleaseReplica("m", 1),
    messages.Begin("another"),
)
FROM_WORKERS = (messages.Progress(1, 0.5), messages.Gathered(1))
FROM_CLIENTS = (
    questions.RosterQuestion(DEMAND, ["x"], [[2, 2]]),
    questions.ProgressQuestion(["x"]),
    questions.ReleaseWorkspaces(1.0),
    questions.ReleaseReplicas(["x"]),
)


def wires(message: Message, epoch: str):
    """The message as it is, and with one field changed, missing or added, in its own epoch and in another."""
    good = message.to_wire()
    names = [field.name for field in dataclasses.fields(message)]
    changed = [good | {name: value} for name, value in itertools.product(names, JUNK)]
    if isinstance(message, messages.Begin):
        # Who may send that is the scheduler; another epoch would be its word.
        changed = [wire for wire in changed if not isinstance(wire["epoch"], str)]
        return [*changed, {}, {"epoch": epoch, "x": 1}]
    missing = [{key: value for key, value in good.items() if key != name} for name in good]
    found = [good, *changed, *missing, good | {"x": 1}]
    return [wire | {"epoch": each} for wire in found for each in (epoch, "another", None)]


def test_every_message_is_in_the_list():
    kinds = {
        kind
        for module in (messages, questions)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind.operation
    }
    assert kinds == {type(one) for one in (*TO_WORKERS, *FROM_WORKERS, *FROM_CLIENTS)}


def test_messages_with_every_field_changed(inproc_client, monkeypatch, caplog):
    monkeypatch.setattr("dask_distmm.runtime.worker._OVERTAKES", 0.0)
    caplog.set_level(logging.CRITICAL, "dask_distmm")
    a = np.random.default_rng().standard_normal((40, 40))
    x = da.from_array(a, chunks=20)
    matmul(x, x).compute()
    workers = inproc_client.nthreads()

    async def send(dask_scheduler=None):
        """Send all over the real connections; return the statuses of the answers by kind."""
        epoch = dask_scheduler.plugins[NAME].queue.epoch
        found: dict[str, set[str]] = {}
        address = next(iter(dask_scheduler.workers))
        for message in (*TO_WORKERS, *FROM_CLIENTS):
            operation, statuses = message.operation, found.setdefault(type(message).__name__, set())
            server = dask_scheduler.address if message in FROM_CLIENTS else address
            for wire in wires(message, epoch):
                if not isinstance(message, Call):
                    dask_scheduler.worker_send(address, {"op": operation, **wire})
                    continue
                if message in FROM_CLIENTS or isinstance(message, messages.Describe):
                    wire.pop("epoch")
                answer = await asyncio.wait_for(getattr(dask_scheduler.rpc(server), operation)(**wire), 30)
                statuses.add(answer["status"])
        return found, epoch

    async def tell(epoch, dask_worker):
        for message in FROM_WORKERS:
            for wire in wires(message, epoch):
                dask_worker.batched_send({"op": message.operation, **wire})

    found, epoch = inproc_client.run_on_scheduler(send)
    inproc_client.run(tell, epoch)
    for event in (None, "x", {}, {"worker": []}, {"worker": next(iter(workers)), "reason": "forged"}):
        inproc_client.log_event(MISSING, event)
    for name, statuses in found.items():
        assert statuses <= {"OK", "refused", "failed", "missing", "gone"}, name
        assert not statuses or name == "Describe" or "refused" in statuses, name
    assert_product(a, a, matmul(x, x, method="summa").compute())
    assert inproc_client.nthreads() == workers
    assert not inproc_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[NAME].roster.bare)


def test_an_error_within_a_handler_ends_nothing(inproc_client, monkeypatch):
    """Whatever is wrong in our own code: the stream, which is Dask's, stays open."""
    from dask_distmm.runtime.worker import WorkerService

    x = da.ones((20, 20), chunks=10)
    matmul(x, x).compute()
    workers = inproc_client.nthreads()
    heard = []
    monkeypatch.setattr(WorkerService, "end", lambda self, *args: heard.append(args) or 1 / 0)

    def send(dask_scheduler):
        dask_scheduler.plugins[NAME].coordinator.tell(list(dask_scheduler.workers), messages.Abort(1, "x"))

    inproc_client.run_on_scheduler(send)
    until(lambda: len(heard) == len(workers))
    monkeypatch.undo()
    np.testing.assert_array_equal(matmul(x, x + 0).compute(), np.full((20, 20), 20.0))
    assert inproc_client.nthreads() == workers
