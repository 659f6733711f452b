"""First faults, on worker processes: the right result or one typed error, and nothing left behind."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

from dask_distmm import RunFailedError, matmul
from dask_distmm.testing import FAULT_POINTS, assert_nothing_left, assert_product, inject


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # LocalCluster gives up a worker that is not there 15 s after an earlier one of its name has gone, even if
    # it has been back meanwhile and was killed again just now.
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        cluster = LocalCluster(
            n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", memory_limit="2GiB"
        )
        yield cluster
        # Closing nannies whose workers were killed many times can take for ever; Dask ends them at exit.
        with contextlib.suppress(TimeoutError):
            cluster.close(timeout=20)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(3, timeout=60)
        # Warm: the plugins are there before anything goes wrong.
        x = da.ones((30, 30), chunks=10)
        matmul(x, x).compute()
        yield client
        client.wait_for_workers(3, timeout=60)
        assert_nothing_left(client)


def operands():
    rng = np.random.default_rng()
    a, b = rng.standard_normal((300, 260)), rng.standard_normal((260, 280))
    return a, b, da.from_array(a, chunks=60), da.from_array(b, chunks=70)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["stage", "vote", "execute", "tiles", "assemble"])
def test_a_worker_dies(client, point, victim):
    """Killed wherever it is, whether or not it runs the barrier: computed again, right."""
    address = sorted(client.scheduler_info()["workers"])[victim]
    client.run(inject, point, "kill", 2 if point == "stage" else 0, workers=[address])
    a, b, x, y = operands()
    method = "reducescatter" if point == "assemble" else "summa"
    assert_product(a, b, client.compute(matmul(x, y, method=method)).result(timeout=60))
    a, b, x, y = operands()
    assert_product(a, b, client.compute(matmul(x, y)).result(timeout=60))
    client.run(remove_faults)


def remove_faults() -> None:

    for module, owner, name in FAULT_POINTS.values():
        if module not in sys.modules:
            continue  # an engine that this machine lacks
        kind = getattr(sys.modules[module], owner)
        method = getattr(kind, name)
        if hasattr(method, "__wrapped__"):
            setattr(kind, name, method.__wrapped__)


def test_a_worker_dies_with_results_half_collected(client):
    a, b, x, y = operands()
    address = sorted(client.scheduler_info()["workers"])[1]
    client.run(inject, "collect", "kill", 3, workers=[address])
    assert_product(a, b, client.compute(matmul(x, y, method="summa")).result(timeout=60))
    client.run(remove_faults)


def test_a_worker_dies_after_the_run_with_persisted_results(client):
    a, b, x, y = operands()
    c = matmul(x, y, method="summa").persist()
    wait(c)
    address = sorted({found[0] for found in client.who_has(c).values()})[0]
    client.run(inject, "stage", "kill", workers=[address])
    z = da.ones((30, 30), chunks=10)
    client.compute(matmul(z, z + 1)).result(timeout=60)
    client.run(remove_faults)
    assert_product(a, b, client.compute(c).result(timeout=60))


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
def test_a_rank_fails(client, point, action, phase, words):
    """One error that names run, phase and rank; the same processes go on."""
    before = client.run(process_id)
    address = sorted(before)[1]
    client.run(inject, point, action, workers=[address])
    a, b, x, y = operands()
    with pytest.raises(RunFailedError, match=words) as caught:
        client.compute(matmul(x, y, method="summa")).result(timeout=60)
    error = caught.value
    assert error.phase == phase
    assert error.run_id > 0
    if point != "tiles":
        assert list(error.ranks) == [address]
    assert f"run {error.run_id}" in str(error)
    a, b, x, y = operands()
    assert_product(a, b, client.compute(matmul(x, y, method="summa")).result(timeout=60))
    assert client.run(process_id) == before


def process_id() -> int:
    import os

    return os.getpid()


def test_an_upstream_error_reaches_the_user(client):
    def fail(block, block_info=None):
        if block_info[0]["chunk-location"] == (1, 1):
            raise ZeroDivisionError("upstream")
        return block

    _, _, x, y = operands()
    bad = x.map_blocks(fail, dtype=float)
    with pytest.raises(ZeroDivisionError, match="upstream"):
        client.compute(matmul(bad, y)).result(timeout=60)


def test_cancelled_again_and_again(client):
    for _ in range(10):
        _, _, x, y = operands()
        future = client.compute(matmul(x, y))
        time.sleep(float(np.random.default_rng().uniform(0, 0.15)))
        future.cancel()
        del future
    a, b, x, y = operands()
    assert_product(a, b, client.compute(matmul(x, y)).result(timeout=60))


def test_lost_too_often(client):
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
        client.compute(matmul(x.map_blocks(deadly, dtype=float, meta=np.empty((0, 0))), y)).result(timeout=120)


def test_wrong_chunks_are_named(client):
    _, _, x, y = operands()
    wrong = x.map_blocks(lambda block: block[:-1], dtype=float, chunks=x.chunks, meta=np.empty((0, 0)))
    with pytest.raises(RunFailedError, match=r"chunk \(\d, \d\) of A is \(59, \d+\) float64.*says \(60, \d+\)"):
        client.compute(matmul(wrong, y)).result(timeout=60)
