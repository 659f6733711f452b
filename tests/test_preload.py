"""A scheduler and workers started from the command line, as on a remote cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import dask.array as da
import numpy as np
import psutil
import pytest
from conformance import assert_product
from distributed import Client
from faults import inject
from leaks import assert_nothing_left
from matrices import until
from run_events import events

from dask_distmm import matmul

pytestmark = pytest.mark.faults


class CommandLine:
    """A scheduler and two workers with their nannies, each a command of its own.

    Parameters
    ----------
    folder
        For the scheduler's file.
    """

    def __init__(self, folder) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, what: str, *arguments: str) -> None:
        common = [
            "--host",
            "127.0.0.1",
            "--no-dashboard",
            "--preload",
            "dask_distmm",
            "--scheduler-file",
            str(self.file),
        ]
        command = [sys.executable, "-m", "dask", what, *common, *arguments]
        self.processes[what] = subprocess.Popen(command, cwd=self.folder, stderr=subprocess.DEVNULL)

    def start_all(self) -> None:
        self.file.unlink(missing_ok=True)
        self.start("scheduler", "--port", "0")
        until(self.file.exists)
        self.start("worker", "--nworkers", "2", "--nthreads", "1")

    def __enter__(self) -> CommandLine:
        self.start_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
            process.wait(timeout=120)


def works(client) -> None:
    a, b = np.random.default_rng().standard_normal((2, 200, 200))
    c = matmul(da.from_array(a, chunks=60), da.from_array(b, chunks=70), method="summa")
    assert_product(a, b, client.compute(c).result(timeout=120))


@pytest.mark.timeout(600)
def test_the_scheduler_is_killed_and_started_again(tmp_path):
    """--preload is enough. Workers in the middle of a run end with the scheduler; the new cluster multiplies."""
    with CommandLine(tmp_path) as made:
        with Client(scheduler_file=str(made.file)) as client:
            client.wait_for_workers(2, timeout=120)
            assert client.run_on_scheduler(lambda dask_scheduler: "distmm" in dask_scheduler.plugins)
            assert all(client.run(lambda dask_worker: "distmm" in dask_worker.plugins).values())
            works(client)
            assert_nothing_left(client)
            pids = [*client.run(os.getpid).values(), made.processes["worker"].pid]
            for address in client.nthreads():
                client.run(inject, "execute", "sleep", 0, 3.0, workers=[address])
            x = da.ones((200, 200), chunks=60)
            future = client.compute(matmul(x, x, method="summa"))
            until(lambda: [event["action"] for event in events(client)[-1:]] == ["start"])
            made.processes["scheduler"].kill()
            made.processes["scheduler"].wait()
            made.processes["worker"].wait(timeout=120)
            until(lambda: not any(map(psutil.pid_exists, pids)))
            until(lambda: future.status in ("cancelled", "lost"))
        made.start_all()
        with Client(scheduler_file=str(made.file)) as client:
            client.wait_for_workers(2, timeout=120)
            works(client)
            assert_nothing_left(client)
