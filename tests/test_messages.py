"""Every message, with every field changed: a typed answer or nothing, no worker ends, and the next product is right."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging

import dask.array as da
import numpy as np
from conformance import assert_product, make_problem
from distributed.protocol.pickle import dumps
from matrices import until

from dask_distmm import matmul
from dask_distmm.planning import Demand, Worker, plan
from dask_distmm.runtime import messages
from dask_distmm.runtime.coordinator import Coordinator
from dask_distmm.runtime.messages import NAME, operation_of
from dask_distmm.runtime.plugin import DistMMSchedulerPlugin
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.runtime.worker import MISSING, WorkerService

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
# A valid message for each handler, of a run that is over or of a group that is not there.
TO_WORKERS = (
    (WorkerService.describe,),
    (WorkerService.trim,),
    (WorkerService.prepare, 1, 0, small_plan(), KEYS),
    (WorkerService.start, 1),
    (WorkerService.abort, 1, "late"),
    (WorkerService.release, 1, "numpy", 1.0),
    (WorkerService.fetch, 1, "input", bytes(48), False),
    (WorkerService.end, 1, "late"),
    (WorkerService.finish, 1),
    (WorkerService.release_operands, 1),
    (WorkerService.worker_lost, 1, "inproc://1"),
    (WorkerService.abandon, 1, "numpy"),
    (WorkerService.release_replica, "m", 1),
    (WorkerService.begin, "another"),
)
FROM_WORKERS = ((DistMMSchedulerPlugin.hear_progress, 1, 0.5), (Coordinator.gathered, 1))
FROM_CLIENTS = (
    (DistMMSchedulerPlugin.answer_roster, DEMAND, ["x"], [[2, 2]]),
    (DistMMSchedulerPlugin.answer_progress, ["x"]),
    (DistMMSchedulerPlugin.answer_regions, dumps(({}, set()))),
    (DistMMSchedulerPlugin.free_workspaces, 1.0),
    (Replicas.free_replicas, ["x"]),
)
# On a client's stream.
TOLD_BY_CLIENTS = ((DistMMSchedulerPlugin.hear_enabled, False),)


def wires(message, epoch: str):
    """The message as it is, and with one argument changed, missing or added, in its own epoch and in another."""
    handler, *arguments = message
    good = messages.message(handler, "", *arguments)
    names = [name for name in inspect.signature(handler).parameters if name != "self"]
    changed = [good | {name: value} for name, value in itertools.product(names, JUNK)]
    if handler is WorkerService.begin:
        # Who may send that is the scheduler; another epoch would be its word.
        changed = [wire for wire in changed if not isinstance(wire["epoch"], str)]
        return [*changed, {}, {"epoch": epoch, "x": 1}]
    missing = [{key: value for key, value in good.items() if key != name} for name in good]
    found = [good, *changed, *missing, good | {"x": 1}]
    return [wire | {"epoch": each} for wire in found for each in (epoch, "another", None)]


def test_every_message_is_in_the_list(inproc_client):
    x = da.ones((20, 20), chunks=10)
    matmul(x, x).compute()

    def known(server):
        return {name for name in (*server.handlers, *server.stream_handlers) if name.startswith("distmm_")}

    def listed(*handlers):
        return {operation_of(handler) for handler, *_ in handlers}

    found = inproc_client.run(lambda dask_worker: known(dask_worker))
    assert all(each == listed(*TO_WORKERS) for each in found.values())
    found = inproc_client.run_on_scheduler(lambda dask_scheduler: known(dask_scheduler))
    assert found == listed(*FROM_WORKERS, *FROM_CLIENTS, *TOLD_BY_CLIENTS)


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
            handler, operation = message[0], operation_of(message[0])
            statuses = found.setdefault(handler.__name__, set())
            server = dask_scheduler.address if message in FROM_CLIENTS else address
            for wire in wires(message, epoch):
                if not inspect.iscoroutinefunction(handler):
                    dask_scheduler.worker_send(address, {"op": operation, **wire})
                    continue
                if message in FROM_CLIENTS or handler is WorkerService.describe:
                    wire.pop("epoch")
                answer = await asyncio.wait_for(getattr(dask_scheduler.rpc(server), operation)(**wire), 120)
                statuses.add(answer["status"])
        return found, epoch

    async def tell(epoch, dask_worker):
        for message in FROM_WORKERS:
            for wire in wires(message, epoch):
                dask_worker.batched_send({"op": operation_of(message[0]), **wire})

    found, epoch = inproc_client.run_on_scheduler(send)
    inproc_client.run(tell, epoch)
    for message in TOLD_BY_CLIENTS:
        for wire in wires(message, epoch):
            inproc_client._send_to_scheduler({"op": operation_of(message[0]), **wire})
    for event in (None, "x", {}, {"worker": []}, {"worker": next(iter(workers)), "reason": "forged"}):
        inproc_client.log_event(MISSING, event)
    for name, statuses in found.items():
        assert statuses <= {"OK", "refused", "failed", "missing", "lost"}, name
        assert not statuses or name == "describe" or "refused" in statuses, name
    assert_product(a, a, matmul(x, x, method="summa").compute())
    assert inproc_client.nthreads() == workers
    assert not inproc_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[NAME].roster.bare)


def test_an_error_within_a_handler_ends_nothing(inproc_client, monkeypatch):
    """Whatever is wrong in our own code: the stream, which is Dask's, stays open."""
    x = da.ones((20, 20), chunks=10)
    matmul(x, x).compute()
    workers = inproc_client.nthreads()
    heard = []
    monkeypatch.setattr(WorkerService, "_drop", lambda self, *args: heard.append(args) or 1 / 0)

    def send(dask_scheduler):
        dask_scheduler.plugins[NAME].coordinator.tell(list(dask_scheduler.workers), WorkerService.end, 1, "x")

    inproc_client.run_on_scheduler(send)
    until(lambda: len(heard) == len(workers))
    monkeypatch.undo()
    np.testing.assert_array_equal(matmul(x, x + 0).compute(), np.full((20, 20), 20.0))
    assert inproc_client.nthreads() == workers
