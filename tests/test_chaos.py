"""Everything at once: workers that die at random while products run, and inputs that are on disk."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster, WorkerPlugin, as_completed, wait
from leaks import assert_nothing_left
from matrices import until
from run_events import events

from dask_distmm import matmul

pytestmark = pytest.mark.faults

# Deaths after which workers live on.
MOST = 30


class Dangerous(WorkerPlugin):
    """Has each worker's process die after a random time, in a random way; those that come later too."""

    name = "dangerous"

    def __init__(self, mean: float, graves: Path) -> None:
        self.mean, self.graves = mean, graves

    async def setup(self, worker) -> None:
        self.end = asyncio.ensure_future(self.die())

    async def die(self) -> None:
        await asyncio.sleep(random.expovariate(1 / self.mean))
        # On a busy machine no product might be done before a worker dies.
        if len(list(self.graves.iterdir())) >= MOST:
            return
        (self.graves / str(os.getpid())).touch()
        random.choice([self.kill, self.leave, self.crash])()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        os._exit(1)

    def crash(self) -> None:
        ctypes.string_at(0)

    def teardown(self, worker) -> None:
        self.end.cancel()


def count_deaths(dask_scheduler) -> int:
    return sum(event["action"] == "remove-worker" for _, event in dask_scheduler.get_events("all"))


def make_safe(client):
    """Take the plugin away; return when three workers are there that do not have it."""
    # The scheduler forgets it, then asks all workers; if one dies just then Dask closes the connection.
    with contextlib.suppress(OSError):
        client.unregister_worker_plugin("dangerous")

    def safe() -> bool:
        # Those that were not asked will die of it.
        states = client.run(lambda dask_worker: "dangerous" in dask_worker.plugins, on_error="return")
        return list(states.values()) == [False] * 3

    until(safe)


def begin(client, number):
    """Begin a product; return its future, and what is multiplied."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((200, 210)), rng.standard_normal((210, 190))
    method = ("auto", "summa", "allgather", "reducescatter", "allreduce")[number % 5]
    d = matmul(da.from_array(a, chunks=70), da.from_array(b, chunks=60), method=method)
    return client.compute(d), (a, b)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_die_at_random(record_property, tmp_path):
    """Thirty products, and as many more as three deaths take, are right; a worker lives two seconds on average.

    Until `MOST` have died.
    """
    settings = {
        "distributed.scheduler.allowed-failures": 10_000,
        "distributed.deploy.lost-worker-timeout": "1h",
        "distmm.retries": 10_000,
    }
    with dask.config.set(settings):
        cluster = LocalCluster(n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0")
        try:
            with Client(cluster) as client:
                client.register_plugin(Dangerous(2.0, tmp_path))
                started = time.monotonic()
                wanted = dict(begin(client, number) for number in range(5))
                under_way = as_completed(wanted, timeout=800)
                deaths = 0
                for number, future in enumerate(under_way):
                    assert_product(*wanted.pop(future), future.result())
                    deaths = client.run_on_scheduler(count_deaths)
                    if number < 25 or deaths < 3:
                        new, inputs = begin(client, number)
                        wanted[new] = inputs
                        under_way.add(new)
                assert number >= 29
                assert deaths >= 3
                assert not wanted
                record_property("products", number + 1)
                record_property("seconds", round(time.monotonic() - started, 1))
                record_property("deaths", deaths)
                make_safe(client)
                del future, new, under_way
                assert_nothing_left(client)
        finally:
            # Closing nannies whose workers were killed many times can take for ever; Dask ends them at exit.
            with contextlib.suppress(TimeoutError):
                cluster.close(timeout=20)


def spilled(dask_worker) -> int:
    return dask_worker.data.spilled_total.disk


def peak(dask_worker) -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_inputs_are_on_disk():
    """Half of them are spilled; they come back as they are needed, and peak memory stays what was projected."""
    memory = {"target": 0.25, "spill": 0.3, "pause": False, "terminate": False}
    with (
        dask.config.set({f"distributed.worker.memory.{name}": value for name, value in memory.items()}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, memory_limit="512MiB", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        x, y = (da.random.default_rng().standard_normal((3072, 3072), chunks=512).persist() for _ in range(2))
        # Others that are younger and in the way.
        z = da.random.default_rng().standard_normal((6144, 3072), chunks=512).persist()
        wait([x, y, z])
        # Dask looks at a process's memory ten times a second, and spills some chunks each time.
        until(lambda: sum(client.run(spilled).values()) > 100e6)
        before = client.run(peak)
        c = matmul(x, y, method="summa").persist()
        wait(c)
        after = client.run(peak)
        projected = events(client, "done")[-1]["projected_bytes"]
        # A worker reads single chunks back from disk and writes others there, next to what the run itself holds.
        assert all(after[w] - before[w] <= projected[w] + 64 * 2**20 for w in after)
        rows = np.sort(np.random.default_rng().integers(0, 3072, 8))
        assert_product(x[rows].compute(), y.compute(), c[rows].compute())
        del x, y, z, c
        assert_nothing_left(client)
