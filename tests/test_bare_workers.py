"""Workers without dask_distmm in a cluster of others: they stay, and the products are right."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from conformance import assert_product
from dask._task_spec import Task
from distributed import Client, LocalCluster, wait
from matrices import assert_near, until

from dask_distmm import EngineError, enabled, matmul, quantize
from dask_distmm.runtime.freezing import Roster
from dask_distmm.runtime.messages import NAME
from dask_distmm.runtime.plugin import needs_package
from dask_distmm.runtime.worker import for_any_worker
from dask_distmm.tools.cli import main

BLOCKED = "import sys\nsys.modules['dask_distmm'] = None\n"


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python does not find the package."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKED)
    return os.environ | {"PYTHONPATH": str(folder)}


def start(address: str, name: str, environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    options = ["--no-dashboard", "--no-nanny", "--nthreads", "1", "--memory-limit", "1GiB", "--name", name]
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, *options]
    return subprocess.Popen([*command, "--local-directory", str(folder)], env=environment, stderr=subprocess.DEVNULL)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(120)


@pytest.fixture
def mixed(blocked: dict[str, str], tmp_path: Path) -> Iterator[Client]:
    """A client of two workers that have the package, and one that has not."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", memory_limit="1GiB"
        ) as cluster,
        Client(cluster) as client,
    ):
        process = start(client.scheduler.address, "bare", blocked, tmp_path)
        try:
            client.wait_for_workers(3, timeout=120)
            yield client
        finally:
            stop(process)


def known(client: Client) -> dict[str, str]:
    return client.run_on_scheduler(lambda dask_scheduler: dict(dask_scheduler.plugins[NAME].roster.bare))


def test_products_are_right_and_the_worker_stays(mixed: Client, blocked: dict[str, str], tmp_path: Path) -> None:
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 90, 90))
    bare = mixed.run_on_scheduler(lambda dask_scheduler: dask_scheduler.aliases["bare"])
    # All of A is where nobody can send it from.
    x = mixed.persist(da.from_array(a, chunks=30), workers=[bare], allow_other_workers=False)
    y = mixed.persist(da.from_array(b, chunks=30))
    wait([x, y])
    assert_product(a, b, matmul(x, y, method="summa").compute())
    assert list(known(mixed)) == [bare]
    # Plain tasks of ours go to the others, while Dask's own go everywhere.
    items = rng.standard_normal((12, 20, 20))
    z = da.from_array(items, chunks=(1, 20, 20))
    np.testing.assert_allclose(matmul(z, z, batch="items").compute(), items @ items)
    q, scale = quantize(x, "float8_e4m3")
    assert abs(q.astype("float32").compute() * float(scale) - a).max() < 0.5
    assert bare in mixed.nthreads()
    done = CliRunner().invoke(main, ["check", "--scheduler", mixed.scheduler.address])
    assert done.exit_code == 2
    assert bare in done.stdout
    assert "dask_distmm can't be imported" in done.stdout
    # One that comes later, and then leaves.
    later = start(mixed.scheduler.address, "later", blocked, tmp_path)
    try:
        until(lambda: len(known(mixed)) == 2)
        assert_product(a, b, matmul(x, y).compute())
        assert len(mixed.nthreads()) == 4
    finally:
        stop(later)
    until(lambda: list(known(mixed)) == [bare])


def test_where_no_worker_has_it(blocked: dict[str, str], tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        process = start(client.scheduler.address, "bare", blocked, tmp_path)
        try:
            client.wait_for_workers(1, timeout=120)
            x = da.random.random((40, 40), chunks=20)
            with pytest.raises(EngineError, match="none of 1 workers has dask_distmm; install it there"):
                matmul(x, x)
            until(lambda: len(known(client)) == 1)
            with pytest.raises(EngineError, match="needs dask_distmm, and no worker has it"):
                quantize(x, "float8_e4m3")[0].compute()
            assert (x + 1).sum().compute() > 0
            assert len(client.nthreads()) == 1
        finally:
            stop(process)


@pytest.mark.filterwarnings("ignore:The `numpy:FutureWarning")
def test_where_the_scheduler_lacks_it(blocked: dict[str, str], tmp_path: Path) -> None:
    """Programs go on under ``enable()``; what asks for a run by name says what to install."""
    file = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--host", "127.0.0.1"]
    options = ["--no-dashboard", "--scheduler-file", str(file)]
    processes = [subprocess.Popen([*command, *options], env=blocked, stderr=subprocess.DEVNULL)]
    try:
        until(file.exists)
        with Client(scheduler_file=str(file)) as client, dask.config.set({"distmm.minimum-flops": 0}):
            processes.append(start(client.scheduler.address, "bare", blocked, tmp_path))
            client.wait_for_workers(1, timeout=120)
            a = np.random.default_rng().standard_normal((60, 40))
            x = da.from_array(a, chunks=20)
            with enabled():
                found = x.T @ x, da.linalg.qr(x.rechunk((20, 40)))[1], np.linalg.det(x.T @ x)
                covariance = da.cov(x.rechunk((20, 40)), rowvar=False)
            np.testing.assert_allclose(covariance.compute(), np.cov(a, rowvar=False))
            assert_product(a.T, a, found[0].compute())
            np.testing.assert_allclose(abs(found[1]).compute(), abs(np.linalg.qr(a)[1]))
            np.testing.assert_allclose(found[2], np.linalg.det(a.T @ a))
            with pytest.raises(EngineError, match="the scheduler can't import dask_distmm"):
                matmul(x.T, x)
    finally:
        for process in processes[::-1]:
            stop(process)


def test_where_workers_do_not_fit_together(inproc_client: Client, monkeypatch: Any, caplog: Any) -> None:
    def refuse(*given: object) -> None:
        raise EngineError("workers have different versions of numpy")

    monkeypatch.setattr(Roster, "_check_versions", refuse)
    monkeypatch.setattr("dask_distmm.runtime.client._said", weakref.WeakKeyDictionary())
    a = np.random.default_rng().standard_normal((60, 40))
    x = da.from_array(a, chunks=20)
    with enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        assert_product(a.T, a, (x.T @ x).compute())
        assert_near(np.linalg.inv(x.T @ x), np.linalg.inv(a.T @ a))
    assert "left to Dask's own tasks: workers have different versions" in caplog.text


def test_which_tasks_need_it() -> None:
    from dask_distmm.arrays.product import multiply_items

    assert needs_package(Task("x", multiply_items, 1))
    assert not needs_package(Task("x", np.add, np.ones(1000), 1))
    assert not needs_package(None)
    assert not needs_package(Task("x", iter, threading.Lock()))


def test_the_plugin_can_be_loaded_without_the_package(blocked: dict[str, str]) -> None:
    program = "import pickle, sys; print(type(pickle.loads(sys.stdin.buffer.read())).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=blocked,
        input=for_any_worker(),
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [b"Installer"]
    assert type(cloudpickle.loads(for_any_worker())).__name__ == "Installer"
