"""First faults, on worker processes: the right result or one typed error, and nothing left behind."""

from __future__ import annotations

import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait
from run_events import events

from dask_distmm import RunFailedError, matmul
from dask_distmm.testing import assert_nothing_left, assert_product, inject


def operands():
    rng = np.random.default_rng()
    a, b = rng.standard_normal((300, 260)), rng.standard_normal((260, 280))
    return a, b, da.from_array(a, chunks=60), da.from_array(b, chunks=70)


def starts(client):
    """Operations of all runs that were started."""
    return [event["flops"] for event in events(client, "start")]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["stage", "vote", "execute", "tiles", "assemble"])
def test_a_worker_dies(fault_client, point, victim):
    """Killed wherever it is, whether or not it runs the barrier: computed again, right."""
    address = sorted(fault_client.nthreads())[victim]
    fault_client.run(inject, point, "kill", 2 if point == "stage" else 0, workers=[address])
    a, b, x, y = operands()
    method = "reducescatter" if point == "assemble" else "summa"
    assert_product(a, b, fault_client.compute(matmul(x, y, method=method)).result(timeout=60))
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y)).result(timeout=60))


def test_a_worker_dies_with_results_half_collected(fault_client):
    a, b, x, y = operands()
    address = sorted(fault_client.nthreads())[1]
    fault_client.run(inject, "collect", "kill", 3, workers=[address])
    before = len(starts(fault_client))
    assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=60))
    # Only what that worker had is made again.
    whole, part = starts(fault_client)[before:]
    assert part < whole == 2 * 300 * 280 * 260


def test_a_worker_dies_after_the_run_with_persisted_results(fault_client):
    a, b, x, y = operands()
    c = matmul(x, y, method="summa").persist()
    wait(c)
    address = sorted({found[0] for found in fault_client.who_has(c).values()})[0]
    fault_client.run(inject, "stage", "kill", workers=[address])
    z = da.ones((30, 30), chunks=10)
    fault_client.compute(matmul(z, z + 1)).result(timeout=60)
    assert_product(a, b, fault_client.compute(c).result(timeout=60))


@pytest.mark.parametrize("apart", [0.0, 0.5])
def test_two_of_three_die(fault_client, apart):
    """One after the other: the second has gone with what it staged when the first's part is staged again."""
    first, second, _ = sorted(fault_client.run(process_id))
    a, b, x, y = operands()
    fault_client.run(inject, "execute", "kill", workers=[first])
    if apart:
        fault_client.run(inject, "execute", "sleep", 0, apart, workers=[second])
        fault_client.run(inject, "tiles", "kill", workers=[second])
    else:
        fault_client.run(inject, "execute", "kill", workers=[second])
    with dask.config.set({"distmm.retries": 2}):
        assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=60))
    fault_client.wait_for_workers(3, timeout=60)
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=60))


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
        fault_client.compute(matmul(x, y, method="summa")).result(timeout=60)
    error = caught.value
    assert error.phase == phase
    assert error.run_id > 0
    if point != "tiles":
        assert list(error.ranks) == [address]
    assert f"run {error.run_id}" in str(error)
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y, method="summa")).result(timeout=60))
    assert fault_client.run(process_id) == before


def process_id() -> int:
    import os

    return os.getpid()


def test_an_upstream_error_reaches_the_user(fault_client):
    def fail(block, block_info=None):
        if block_info[0]["chunk-location"] == (1, 1):
            raise ZeroDivisionError("upstream")
        return block

    _, _, x, y = operands()
    bad = x.map_blocks(fail, dtype=float)
    with pytest.raises(ZeroDivisionError, match="upstream"):
        fault_client.compute(matmul(bad, y)).result(timeout=60)


def test_cancelled_again_and_again(fault_client):
    for _ in range(10):
        _, _, x, y = operands()
        future = fault_client.compute(matmul(x, y))
        time.sleep(float(np.random.default_rng().uniform(0, 0.15)))
        future.cancel()
        del future
    a, b, x, y = operands()
    assert_product(a, b, fault_client.compute(matmul(x, y)).result(timeout=60))


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


def test_what_workers_have_staged_that_nobody_has_asked_yet_is_forgotten(fault_client):
    """They have been started again since the roster was asked, and no run comes about that would ask."""
    _, _, x, y = operands()

    def fail_late(block, block_info=None):
        if block_info[0]["chunk-location"] == (0, 0):
            time.sleep(1)
            raise ZeroDivisionError("upstream")
        return block

    product = matmul(x.map_blocks(fail_late, dtype=float, meta=np.empty((0, 0))), y)
    fault_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["distmm"].roster.clear())
    future = fault_client.compute(product)
    deadline = time.monotonic() + 20
    while not any(fault_client.run(lambda dask_worker: len(dask_worker.extensions["distmm"].staged)).values()):
        assert time.monotonic() < deadline, "nothing has been staged"
    with pytest.raises(ZeroDivisionError, match="upstream"):
        future.result(timeout=60)
    assert_nothing_left(fault_client)


def test_wrong_chunks_are_named(fault_client):
    _, _, x, y = operands()
    wrong = x.map_blocks(lambda block: block[:-1], dtype=float, chunks=x.chunks, meta=np.empty((0, 0)))
    with pytest.raises(RunFailedError, match=r"chunk \(\d, \d\) of A is \(59, \d+\) float64.*says \(60, \d+\)"):
        fault_client.compute(matmul(wrong, y)).result(timeout=60)
