"""First faults, on worker processes: the right result or one typed error, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import dask
import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from faults import inject
from matrices import operands, until
from run_events import events_after, newest_run

from dask_distmm import RunFailedError, matmul
from dask_distmm.runtime.coordinator import Coordinator

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("point", "victim"),
    [(point, 1) for point in ("read", "vote", "execute", "tiles", "assemble", "place")]
    + [("vote", 0), ("execute", 0), ("execute", 2), ("tiles", 2)],
)
def test_a_worker_dies(fault_client, point, victim):
    """Killed wherever it is: computed again, right."""
    address = sorted(fault_client.nthreads())[victim]
    fault_client.run(inject, point, "kill", workers=[address])
    a, b, x, y = operands()
    method = "reducescatter" if point == "assemble" else "summa"
    assert_product(a, b, fault_client.compute(matmul(x, y, method=method)).result(timeout=120))
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y)).result(timeout=120))


def test_a_worker_dies_while_inputs_are_made(fault_client):
    """With chunks that the run would have needed, before it begins."""
    a, b, x, y = operands()
    victim = sorted(fault_client.nthreads())[0]

    def slow(block):
        time.sleep(0.1)
        return block

    future = fault_client.compute(matmul(x.map_blocks(slow, dtype=float, meta=np.empty((0, 0))), y, method="summa"))
    until(
        lambda: fault_client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.workers[victim].has_what) > 3)
    )
    kill(fault_client, victim)
    assert_product(a, b, future.result(timeout=120))


def kill(client, *addresses) -> None:
    """Kill workers, and wait until the scheduler knows."""
    pids = client.run(process_id)
    for address in addresses:
        os.kill(pids[address], signal.SIGKILL)
    until(lambda: not set(addresses) & client.nthreads().keys())


def test_a_worker_dies_after_the_run_with_persisted_results(fault_client):
    a, b, x, y = operands()
    c = matmul(x, y, method="allgather").persist()
    wait(c)
    address = sorted({found[0] for found in fault_client.who_has(c).values()})[0]
    before = newest_run(fault_client)
    kill(fault_client, address)
    assert_product(a, b, fault_client.compute(c).result(timeout=120))
    # Only what that worker had is made again.
    (part,) = events_after(fault_client, before, "start")
    assert part["flops"] < 2 * 300 * 280 * 260


def test_an_input_is_lost_after_the_run(fault_client):
    """With it goes nothing of the result that others hold."""
    a, b, x, y = operands()
    x, y = fault_client.persist([x, y])
    c = matmul(x, y, method="summa").persist()
    wait(c)
    kill(fault_client, *sorted(fault_client.nthreads())[:2])
    assert_product(a, b, fault_client.compute(c).result(timeout=120))


@pytest.mark.parametrize("apart", [0.0, 0.5])
def test_two_of_three_die(fault_client, apart):
    """One after the other: the second goes while what the first had is computed again."""
    first, second, _ = sorted(fault_client.run(process_id))
    a, b, x, y = operands()
    fault_client.run(inject, "execute", "kill", workers=[first])
    if apart:
        fault_client.run(inject, "execute", "sleep", 0, apart, workers=[second])
        fault_client.run(inject, "tiles", "kill", workers=[second])
    else:
        fault_client.run(inject, "execute", "kill", workers=[second])
    with dask.config.set({"distmm.retries": 2}):
        assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=120))
    fault_client.wait_for_workers(3, timeout=120)
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=120))


@pytest.mark.parametrize(
    ("point", "action", "phase", "words"),
    [
        ("vote", "memory", "voting", "MemoryError: injected at vote"),
        ("vote", "error", "voting", "ZeroDivisionError: injected at vote"),
        ("execute", "error", "running", "ZeroDivisionError: injected at execute"),
        ("execute", "memory", "running", "MemoryError: injected at execute"),
        ("tiles", "error", "running", "ZeroDivisionError: injected at tiles"),
    ],
)
def test_a_rank_fails(fault_client, point, action, phase, words):
    """One error that names run, phase and rank; the same processes go on."""
    before = fault_client.run(process_id)
    address = sorted(before)[1]
    fault_client.run(inject, point, action, workers=[address])
    a, b, x, y = operands()
    with pytest.raises(RunFailedError, match=words) as caught:
        fault_client.compute(matmul(x, y, method="summa")).result(timeout=120)
    error = caught.value
    assert error.phase == phase
    assert error.run_id > 0
    if point != "tiles":
        assert list(error.ranks) == [address]
    assert f"run {error.run_id}" in str(error)
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=120))
    assert fault_client.run(process_id) == before


def process_id() -> int:
    return os.getpid()


def test_an_upstream_error_reaches_the_user(fault_client):
    def fail(block, block_info=None):
        if block_info[0]["chunk-location"] == (1, 1):
            raise ZeroDivisionError("upstream")
        return block

    _, _, x, y = operands()
    bad = x.map_blocks(fail, dtype=float)
    with pytest.raises(ZeroDivisionError, match="upstream"):
        fault_client.compute(matmul(bad, y)).result(timeout=120)


def test_cancelled_again_and_again(fault_client):
    for _ in range(10):
        _, _, x, y = operands()
        future = fault_client.compute(matmul(x, y))
        time.sleep(float(np.random.default_rng().uniform(0, 0.15)))
        future.cancel()
        del future
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y)).result(timeout=120))


def test_lost_too_often(fault_client):
    """A multiply that kills a worker each time ends with an error, not with a loop."""

    def deadly(block):
        import os
        import signal

        from distributed import get_worker

        get_worker()
        os.kill(os.getpid(), signal.SIGKILL)
        return block

    _, _, x, y = operands()
    with pytest.raises(Exception, match="attempted to run|died|KilledWorker"):
        fault_client.compute(matmul(x.map_blocks(deadly, dtype=float, meta=np.empty((0, 0))), y)).result(timeout=120)


def test_chunks_that_move_before_the_vote(fault_client):
    """The plan is made again: neither a failure nor a loss."""
    a, b, x, y = operands()
    x, y = fault_client.persist([x, y])
    wait([x, y])
    addresses = sorted(fault_client.nthreads())
    fault_client.run(inject, "read", "sleep", 0, 0.7, workers=addresses[:1])
    with dask.config.set({"distmm.retries": 0}):
        future = fault_client.compute(matmul(x, y, method="summa"))
    time.sleep(0.2)
    # All chunks of the worker that is slow to vote go to another one, and its own copies.
    keys = [key for key, found in fault_client.who_has([x, y]).items() if found == (addresses[0],)]
    assert keys
    fault_client.run_on_scheduler(move, [x.name, y.name], *addresses[:2])
    assert_product(a, b, future.result(timeout=120))


async def move(names, source, target, dask_scheduler=None):
    keys = [ts.key for ts in dask_scheduler.workers[source].has_what if ts.key[0] in names]
    await dask_scheduler.gather_on_worker(target, {key: [source] for key in keys})
    await dask_scheduler.delete_worker_data(source, keys, "test-move")


def test_wrong_chunks_are_named(fault_client):
    _, _, x, y = operands()
    wrong = x.map_blocks(lambda block: block[:-1], dtype=float, chunks=x.chunks, meta=np.empty((0, 0)))
    with pytest.raises(RunFailedError, match=r"chunk \(\d, \d\) of A is \(59, \d+\) float64.*says \(60, \d+\)"):
        fault_client.compute(matmul(wrong, y)).result(timeout=120)


def test_a_run_that_is_ended_as_the_last_vote_comes_begins_again(inproc_client, monkeypatch):
    vote, ended = Coordinator._vote, []

    async def voted(self, run, *args):
        offers = await vote(self, run, *args)
        if not ended:
            ended.append(run.run_id)
            run.fail({"tcp://gone": "it left the cluster"})
        return offers

    monkeypatch.setattr(Coordinator, "_vote", voted)
    a, b, x, y = operands()
    assert_product(a, b, inproc_client.compute(matmul(x, y)).result(timeout=120))
    assert ended
