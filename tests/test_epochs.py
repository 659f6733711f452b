"""Messages of another time: numbers from the future, from before, and a scheduler's plugin that is installed anew."""

from __future__ import annotations

import asyncio

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from leaks import assert_nothing_left
from matrices import until
from run_events import events_after, newest_run

from dask_distmm import matmul
from dask_distmm.runtime.messages import NAME, ask, operation_of
from dask_distmm.runtime.worker import WorkerService


def product(size=60, chunk=20):
    a, b = np.random.default_rng().standard_normal((2, size, size))
    return a, b, matmul(da.from_array(a, chunks=chunk), da.from_array(b, chunks=chunk))


def check() -> None:
    a, b, d = product()
    assert_product(a, b, d.compute())


def epochs(client) -> set[str]:
    return set(client.run(lambda dask_worker: dask_worker.extensions[NAME].epoch).values())


def test_numbers_from_the_future_are_refused(inproc_client, monkeypatch):
    """Whoever may ask a worker, but does not know the epoch, changes nothing."""
    monkeypatch.setattr("dask_distmm.runtime.worker._OVERTAKES", 0.01)
    check()

    async def forge(dask_scheduler=None):
        newest, found = dask_scheduler.plugins[NAME].queue.newest, []
        for number in (newest + 1, 10**6):
            requests = [
                (WorkerService.abort, number, "forged"),
                (WorkerService.prepare, number, 0, {}, {}),
                (WorkerService.release, number, "numpy", 0),
            ]
            for address in dask_scheduler.workers:
                for handler, *request in requests:
                    for epoch in ("", "x", 7):
                        found.append(await ask(dask_scheduler.rpc(address), handler, epoch, *request))
        return [(answer.status, answer.message) for answer in found]

    found = inproc_client.run_on_scheduler(forge)
    assert {status for status, _ in found} == {"refused"}
    assert all("not of the scheduler plugin that is installed" in text for _, text in found)
    check()
    assert_nothing_left(inproc_client)


def test_a_plugin_that_is_installed_anew(inproc_client):
    """Its runs count from 1 again: workers begin again with it, and none of them is refused for its number or epoch."""
    for _ in range(5):
        check()
    (before,) = epochs(inproc_client)
    moment = newest_run(inproc_client)
    inproc_client.unregister_scheduler_plugin(NAME)
    for _ in range(3):
        check()
    (after,) = epochs(inproc_client)
    assert after != before
    runs = inproc_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[NAME].queue.newest)
    # On a busy machine a run may begin again for another reason, or be planned again, as chunks have moved.
    reasons = [event["reason"] for event in events_after(inproc_client, moment, "restart")]
    assert 3 + len(reasons) <= runs < 5 + 3
    assert not any("stale" in reason or "plugin" in reason for reason in reasons)
    assert_nothing_left(inproc_client)


def test_a_plugin_that_is_replaced_during_a_run(inproc_client, monkeypatch):
    """The old one's run ends, and the new one begins another, which ends right."""
    from dask_distmm.engines.programs.job import ProgramJob
    from dask_distmm.runtime.plugin import DistMMSchedulerPlugin

    check()
    execute, held = ProgramJob.execute, []

    def stuck(job):
        if len(held) < len(job.plan.workers):
            held.append(job)
            until(lambda: job.ended.error)
        return execute(job)

    monkeypatch.setattr(ProgramJob, "execute", stuck)
    a, b, d = product()
    kept = d.persist()
    until(lambda: held)
    inproc_client.unregister_scheduler_plugin(NAME)
    inproc_client.register_plugin(DistMMSchedulerPlugin())
    wait(kept, timeout=120)
    assert_product(a, b, kept.compute())
    del kept, d
    assert_nothing_left(inproc_client)


@pytest.mark.parametrize("late", [False, True])
def test_a_request_may_overtake_the_stream(late, monkeypatch):
    """The first request of an epoch waits for the message on the stream that begins it."""
    from stand_ins import Loop

    from dask_distmm.runtime.worker import WorkerService

    monkeypatch.setattr("dask_distmm.runtime.worker._OVERTAKES", 0.05 if late else 30)

    async def work() -> None:
        side = WorkerService(Loop())
        asked = asyncio.ensure_future(side.handlers[operation_of(side.abort)](run_id=1, reason="test", epoch="new"))
        await asyncio.sleep(0)
        if late:
            assert (await asked)["status"] == "refused"
        side.worker.stream_handlers[operation_of(side.begin)](epoch="new")
        if not late:
            assert (await asked)["status"] == "OK"
        side.close()

    asyncio.run(work())
