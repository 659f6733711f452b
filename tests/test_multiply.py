"""``dask distmm matmul``, ``explain`` and ``bench`` on worker processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from distributed import Client

from dask_distmm.testing import assert_product
from dask_distmm.tools.cli import main
from dask_distmm.tools.commands import multiply

pytestmark = pytest.mark.usefixtures("terminal")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """A.zarr, B.npy and bias.npy in the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng()
    found = {"A": rng.standard_normal((90, 70)), "B": rng.standard_normal((70, 50)), "bias": rng.standard_normal(50)}
    zarr.create_array("A.zarr", data=found["A"], chunks=(20, 30))
    np.save("B.npy", found["B"])
    np.save("bias.npy", found["bias"])
    return found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def left() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_a_product_from_files_to_a_store(client: Client, files: dict[str, np.ndarray]) -> None:
    address = client.scheduler.address
    done = invoke("matmul", "A.zarr", "B.npy", "--out", "C.zarr", "--chunks", "32,20", "--scheduler", address)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Plan: ")
    assert lines[-1] == "C.zarr: 90 x 50 float64, 35.16 kiB"
    found = zarr.open("C.zarr", mode="r")
    assert found.chunks == (32, 20)
    assert_product(files["A"], files["B"], found[:])
    again = invoke("matmul", "A.zarr", "B.npy", "--out", "C.zarr", "--scheduler", address)
    assert again.exit_code == 2
    assert again.stderr.startswith("Error: PlanError: C.zarr exists; --overwrite replaces it")


def test_the_formula_and_its_auxiliary_output(client: Client, files: dict[str, np.ndarray]) -> None:
    options = "--op-a T --epilog relu_aux_bias --bias bias.npy --out D.npy --aux-out G.zarr::mask --overwrite"
    np.save("At.npy", np.asfortranarray(files["A"].T))
    done = invoke("matmul", "At.npy", "B.npy", *options.split(), "--scheduler", client.scheduler.address)
    assert (done.exit_code, done.stderr) == (0, "")
    expected = files["A"] @ files["B"] + files["bias"]
    np.testing.assert_allclose(np.load("D.npy"), np.maximum(expected, 0), rtol=1e-10, atol=1e-10)
    sure = np.abs(expected) > 1e-10
    np.testing.assert_array_equal(zarr.open("G.zarr", path="mask", mode="r")[:][sure], (expected > 0)[sure])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=lambda error: error.__name__)
def test_nothing_is_left_when_writing_fails(
    client: Client, files: dict[str, np.ndarray], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_some(*arguments: object) -> object:
        stopped = multiply.as_completed

        def one(futures: list[object]) -> Iterator[object]:
            yield next(iter(stopped(futures)))
            assert any(name.startswith(".C.zarr.") for name in left())
            raise error("in the middle")

        monkeypatch.setattr(multiply, "as_completed", one)
        return make(*arguments)

    make = multiply.make_zarr
    monkeypatch.setattr(multiply, "make_zarr", put_some)
    before = left()
    done = invoke("matmul", "A.zarr", "B.npy", "--out", "C.zarr", "--scheduler", client.scheduler.address)
    assert done.exit_code == (130 if error is KeyboardInterrupt else 1)
    assert len(done.stderr.splitlines()) == 1
    assert left() == before


def test_ctrl_c_in_a_terminal(client: Client, files: dict[str, np.ndarray]) -> None:
    before = left()
    command = [sys.executable, "-m", "dask_distmm", "matmul", "A.zarr", "B.npy", "--out", "C.zarr"]
    process = subprocess.Popen([*command, "--scheduler", client.scheduler.address], stderr=subprocess.PIPE, text=True)
    with process:
        deadline = time.monotonic() + 60
        while left() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: no half-written result is left." in errors.splitlines()
    assert left() == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("A.zarr A.zarr --out C.zarr", "PlanError: shapes (90, 70) and (90, 70) don't match"),
        ("A.zarr B.npy --out C.zarr --epilog bias", "PlanError: epilog 'bias' needs --bias FILE"),
        ("A.zarr B.npy --out C.zarr --epilog dgelu", "PlanError: epilog 'dgelu' needs --aux FILE"),
        ("A.zarr B.npy --out C.zarr --aux bias.npy", "PlanError: --aux is for the epilogs of a backward pass"),
        ("A.zarr B.npy --out C.zarr --bias bias.npy", "PlanError: "),
        ("A.zarr B.npy --out C.zarr --aux-out D.zarr", "PlanError: --aux-out is for epilogs with an auxiliary output"),
        ("A.zarr B.npy --out C.npy --aux-out C.npy --epilog relu_aux", "PlanError: --out and --aux-out are the same"),
        ("A.zarr B.npy --out C.npy --scheduler 127.0.0.1:1", "DistMMError: no Dask scheduler answers at 127.0.0.1:1"),
    ],
)
def test_mistakes_are_said_before_a_cluster_is_started(
    files: dict[str, np.ndarray], options: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_distmm.tools.local.make_cluster", lambda *arguments: pytest.fail("a cluster was started"))
    monkeypatch.setattr("dask_distmm.tools.local.CONNECT_SECONDS", 0.5)
    before = left()
    done = invoke("matmul", *options.split())
    assert done.exit_code == (2 if reason.startswith("PlanError") else 1)
    assert done.stderr.startswith(f"Error: {reason}")
    assert len(done.stderr.splitlines()) == 1
    assert left() == before


def test_workers_that_do_not_see_the_files_are_named(
    client: Client, files: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Client.run
    blind = min(client.nthreads())

    def elsewhere(self: Client, function: object, *arguments: object, **options: object) -> object:
        found = run(self, function, *arguments, **options)
        return found | {blind: False} if getattr(function, "__name__", "") == "access" else found

    monkeypatch.setattr(Client, "run", elsewhere)
    done = invoke("matmul", "A.zarr", "B.npy", "--out", "C.zarr", "--scheduler", client.scheduler.address)
    assert done.exit_code == 1
    assert (
        f"worker {blind} can't read {Path('A.zarr').resolve()}: files must be where all workers see them" in done.stderr
    )


def test_explain_with_and_without_a_cluster(client: Client, files: dict[str, np.ndarray]) -> None:
    imagined = invoke("explain", "A.zarr", "B.npy", "--workers", "5", "--html", "plan.html")
    assert imagined.exit_code == 0
    assert "of 5 workers, engine numpy" in imagined.stdout
    page = Path("plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<title>A.zarr @ B.npy</title>" in page
    real = invoke("explain", "A.zarr", "B.npy", "--scheduler", client.scheduler.address, "--method", "summa")
    assert "of 3 workers, engine numpy" in real.stdout
    assert "tcp://" in real.stdout


def test_bench_on_a_cluster(client: Client, tmp_path: Path) -> None:
    address = client.scheduler.address
    plot = str(tmp_path / "bench.png")
    options = ["--size", "64", "--chunks", "2", "--repeat", "1", "--scheduler", address]
    done = invoke("bench", *options, "--json", "--plot", plot)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(one["peer"], one["size"], one["grid"]) for one in found["results"]] == [("dask", 64, 2), ("distmm", 64, 2)]
    assert all(one["error"] <= 1 for one in found["results"])
    assert Path(plot).stat().st_size > 0
    for name in ("bench.txt", "none/bench.png"):
        done = invoke("bench", *options, "--plot", str(tmp_path / name))
        assert done.exit_code == 2
        assert "--plot" in done.stderr
