"""Clients, schedulers and workers that import different versions of the package: one error that names each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from conformance import assert_product
from distributed import Client, LocalCluster
from matrices import assert_near, until

import dask_distmm
from dask_distmm import EngineError, __version__, enabled, matmul
from dask_distmm.tools.cli import main

OTHER = "0.0.9"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python finds another version of the package, which is not what is installed."""
    folder = tmp_path_factory.mktemp("older")
    package = shutil.copytree(Path(dask_distmm.__file__).parent, folder / "dask_distmm")
    source = (package / "_version.py").read_text()
    (package / "_version.py").write_text(source.replace(f'"{__version__}"', f'"{OTHER}"'))
    return os.environ | {"PYTHONPATH": str(folder)}


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a scheduler without workers."""
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as found:
        yield found


@contextmanager
def worker(client: Client, folder: Path, environment: dict[str, str] | None = None) -> Iterator[str]:
    """Start one more worker; yield its address."""
    before = set(client.scheduler_info(n_workers=-1)["workers"])
    options = ["--no-dashboard", "--no-nanny", "--nthreads", "1", "--local-directory", str(folder)]
    command = [sys.executable, "-m", "distributed.cli.dask_worker", client.scheduler.address, *options]
    # Python looks first where it is started.
    process = subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        client.wait_for_workers(len(before) + 1, timeout=120)
        (address,) = set(client.scheduler_info(n_workers=-1)["workers"]) - before
        yield address
    finally:
        process.terminate()
        process.wait(120)
        until(lambda: set(client.scheduler_info(n_workers=-1)["workers"]) == before)


def multiply() -> None:
    a = np.random.default_rng().standard_normal((60, 40))
    x = da.from_array(a, chunks=20)
    assert_product(a.T, a, matmul(x.T, x).compute())


def test_all_workers_have_another_version(client: Client, older: dict[str, str], tmp_path: Path) -> None:
    with worker(client, tmp_path, older) as first, worker(client, tmp_path, older) as second:
        both = ", ".join(sorted((first, second)))
        expected = f"different versions of dask_distmm: {__version__} on client, scheduler; {OTHER} on {both}"
        with pytest.raises(EngineError, match=f"{expected}. Install the same on all of them, and start them again: "):
            multiply()
        # Programs go on.
        a = np.random.default_rng().standard_normal((60, 40))
        x = da.from_array(a, chunks=20)
        with enabled(), dask.config.set({"distmm.minimum-flops": 0}):
            assert_product(a.T, a, (x.T @ x).compute())
            assert_near(np.linalg.inv(x.T @ x), np.linalg.inv(a.T @ a))
        # What is installed is the same on all.
        done = CliRunner().invoke(main, ["check", "--scheduler", client.scheduler.address])
        words = " ".join(done.stdout.split())
        assert done.exit_code == 2
        folder = Path(older["PYTHONPATH"]) / "dask_distmm"
        assert f"dask_distmm {OTHER} is imported there, from {folder}, {__version__} here" in words


def test_a_worker_that_joins_later(client: Client, older: dict[str, str], tmp_path: Path) -> None:
    with worker(client, tmp_path) as first:
        multiply()
        a = np.random.default_rng().standard_normal((60, 40))
        x = da.from_array(a, chunks=20)
        planned = matmul(x.T, x)
        expected = f"{__version__} on client, scheduler, {first}; {OTHER} on "
        with worker(client, tmp_path, older) as second:
            with pytest.raises(EngineError, match=expected + second):
                planned.compute()
            with pytest.raises(EngineError, match=expected + second):
                multiply()
        assert_product(a.T, a, planned.compute())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_client_of_another_version(client: Client, older: dict[str, str], tmp_path: Path, asynchronous: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import asyncio, dask.array as da, numpy as np
from distributed import Client
from dask_distmm import EngineError, __version__, matmul

assert __version__ == {OTHER!r}
x = da.from_array(np.random.default_rng().standard_normal((60, 40)), chunks=20)

async def multiply():
    async with Client({client.scheduler.address!r}, asynchronous=True) as client:
        await client.compute(matmul(x.T, x))

try:
    if {asynchronous}:
        asyncio.run(multiply())
    else:
        with Client({client.scheduler.address!r}):
            matmul(x.T, x).compute()
except EngineError as error:
    print(error)
""")
    with worker(client, tmp_path) as address:
        multiply()
        done = subprocess.run(
            [sys.executable, program], env=older, capture_output=True, text=True, timeout=120, check=True
        )
        assert f"dask_distmm: {OTHER} on client; {__version__} on scheduler, {address}. Install" in done.stdout
        multiply()
