"""A scheduler and workers started from the command line, as on a remote cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import dask.array as da
import numpy as np
import pytest
from distributed import Client

from dask_distmm import matmul
from dask_distmm.testing import assert_nothing_left, assert_product


@pytest.fixture
def address(tmp_path) -> Iterator[str]:
    file = tmp_path / "scheduler.json"
    common = ["--scheduler-file", str(file), "--preload", "dask_distmm"]
    commands = [
        ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", *common],
        ["worker", "--host", "127.0.0.1", "--nworkers", "2", "--nthreads", "1", "--no-dashboard", *common],
    ]
    with ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-m", "dask", *command], cwd=tmp_path, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.terminate)
            deadline = time.monotonic() + 30
            while not file.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield str(file)


def test_preload(address):
    with Client(scheduler_file=address) as client:
        client.wait_for_workers(2, timeout=60)
        assert client.run_on_scheduler(lambda dask_scheduler: "distmm" in dask_scheduler.plugins)
        assert all(client.run(lambda dask_worker: "distmm" in dask_worker.plugins).values())
        a, b = np.random.default_rng().standard_normal((2, 200, 200))
        x, y = da.from_array(a, chunks=60), da.from_array(b, chunks=70)
        c = matmul(x, y, method="summa")
        assert_product(a, b, c.compute())
        del c
        assert_nothing_left(client)
