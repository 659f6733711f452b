"""The constants of the cost model: measured on a cluster, and written into a file of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import dask.config
import numpy as np
import pytest
import yaml
from distributed import Client

from dask_distmm import PlanError, explain
from dask_distmm.config import DEFAULTS, dask_costs, read_options
from dask_distmm.tools import measure as calibrate


def test_costs_are_those_that_the_times_were_made_from() -> None:
    """Times of runs are linear in the chunks, of tasks in their number."""
    run, chunk, start, task = np.random.default_rng().uniform(1e-4, 1e-2, 4)
    seconds = {("run", count): run + chunk * 3 * count**2 for count in calibrate.COUNTS["run"]}
    # Of n x n x n products of chunks; sums of up to four of them, one for n = 2 and two for n = 5.
    for count, sums in zip(calibrate.COUNTS["task"], (1, 2), strict=True):
        seconds["task", count] = start + task * (count**3 + sums * count**2)
    found = calibrate.costs(seconds)
    with dask.config.set({f"distmm.dask.{name}": value for name, value in found.items()}):
        costs = dask_costs()
    np.testing.assert_allclose([costs.run, costs.chunk, costs.start, costs.task], [run, chunk, start, task], rtol=0.01)


def test_times_that_shrink_with_the_chunks_are_no_negative_costs() -> None:
    seconds = {(name, count): 1.0 / count for name, counts in calibrate.COUNTS.items() for count in counts}
    assert calibrate.costs(seconds) == {"run": "500ms", "chunk": "0ms", "start": "500ms", "task": "0ms"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Dask's configuration."""
    monkeypatch.setattr(dask.config, "PATH", str(tmp_path / "dask"))
    return tmp_path / "dask"


def test_a_cluster_is_measured_and_the_configuration_reads_it(client: Client, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(calibrate, "SECONDS", 0.2)
    said: list[str] = []
    calibrate.run_calibrate(client.scheduler.address, None, None, said.append)
    path = folder / calibrate.NAME
    found = yaml.safe_load(path.read_text())
    assert [child.name for child in folder.iterdir()] == [calibrate.NAME]
    assert str(path) in said[-1]
    # All constants of one host that the shipped file has, and only those.
    shipped = calibrate.flat(
        {"dask": DEFAULTS["distmm"]["dask"], "machine": {"numpy": DEFAULTS["distmm"]["machine"]["numpy"]}}
    )
    left = {f"machine.numpy.{name}-bandwidth" for name in ("network", "dask", "host")}
    assert set(calibrate.flat(found["distmm"])) == set(shipped) - left
    for key in calibrate.flat(found["distmm"]):
        assert key in said[1]
    assert all(value > 0 for value in calibrate.flat(found["distmm"]["machine"]).values())
    # A program that starts reads it; what the user writes into distmm.yaml wins.
    (folder / "distmm.yaml").write_text("distmm: {machine: {numpy: {gflops: {float64: 12345}}}}")
    with dask.config.set(dask.config.merge(*dask.config.collect_yaml([str(folder)]))):
        rates = dict(read_options().machine("numpy").gflops)
        x = da.ones((300, 300), chunks=100)
        assert explain(x, x).seconds > 0
    assert rates == found["distmm"]["machine"]["numpy"]["gflops"] | {"float64": 12345}
    # It replaces its own file.
    monkeypatch.setattr(calibrate, "measure", lambda client, seconds: {"dask": {"run": "1ms"}})
    calibrate.run_calibrate(client.scheduler.address, None, None, said.append)
    assert yaml.safe_load(path.read_text()) == {"distmm": {"dask": {"run": "1ms"}}}
    assert said[-2] == "rates of GPUs are not measured: distmm.machine stays as it is"


def test_one_worker_has_no_links(client: Client) -> None:
    (one, *_), found = client.nthreads(), {}
    found = calibrate._links(client, [calibrate.Worker(one)], 0.1)
    assert found == {}
    hosts = [calibrate.Worker(address, host=host) for address, host in zip(client.nthreads(), "aab", strict=True)]
    found = calibrate._links(client, hosts, 0.1)
    assert set(found) == {"bandwidth", "network-bandwidth", "latency"}


def test_a_file_of_something_else_is_refused_before_anything_is_measured(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("distmm: {method: summa}")
    with pytest.raises(PlanError, match=r"mine\.yaml was not written by this command: name another file by --out"):
        calibrate.run_calibrate("tcp://127.0.0.1:1", None, mine, pytest.fail)
    assert mine.read_text() == "distmm: {method: summa}"
    folder.write_text("")
    with pytest.raises(PlanError, match=r"DASK_CONFIG names a file, .*: name another one to write by --out"):
        calibrate.run_calibrate("tcp://127.0.0.1:1", None, None, pytest.fail)
