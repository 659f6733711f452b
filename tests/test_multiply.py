"""``dask distmm matmul``, ``explain`` and ``bench`` on worker processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from conformance import assert_product
from distributed import Client
from matrices import until

from dask_distmm.tools import multiply as stores
from dask_distmm.tools.cli import main

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
@pytest.mark.parametrize("out", ["C.zarr", "C.npy"])
def test_nothing_is_left_when_writing_fails(
    client: Client,
    files: dict[str, np.ndarray],
    error: type[BaseException],
    out: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*arguments: object) -> None:
        written(*arguments)
        assert any(name.startswith(f".{out}.") for name in left())
        raise error("in the middle")

    written = stores.write
    monkeypatch.setattr("dask_distmm.tools.multiply.write", write)
    before = left()
    done = invoke("matmul", "A.zarr", "B.npy", "--out", out, "--scheduler", client.scheduler.address)
    assert done.exit_code == (130 if error is KeyboardInterrupt else 1)
    assert len(done.stderr.splitlines()) == 1
    assert left() == before


def test_workers_end_their_writes_before_files_are_removed(client: Client, tmp_path: Path) -> None:
    class Slow:
        def __setitem__(self, region: object, chunk: object) -> None:
            (tmp_path / "begun").touch()
            time.sleep(0.5)
            (tmp_path / "ended").touch()
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        stores._by_workers(client, da.store(da.ones((4, 4), chunks=2), Slow(), lock=False, compute=False))
    assert not any(client.run(stores._running).values())


def test_ctrl_c_in_a_terminal(client: Client, files: dict[str, np.ndarray]) -> None:
    before = left()
    # So many chunks take some seconds to write.
    command = [sys.executable, "-m", "dask_distmm", "matmul", "A.zarr", "B.npy", "--out", "C.zarr", "--chunks", "1,2"]
    process = subprocess.Popen([*command, "--scheduler", client.scheduler.address], stderr=subprocess.PIPE, text=True)
    with process:
        until(lambda: left() != before)
        # Where the first one falls into a finalizer Python drops it, so users press again; not while files are removed.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        _, errors = process.communicate(timeout=120)
    # A shell says 130 of both.
    assert process.returncode in (130, -signal.SIGINT)
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


def test_bench_on_a_cluster(client: Client) -> None:
    options = ["--size", "64,32", "--chunks", "2", "--scheduler", client.scheduler.address]
    done = invoke("bench", *options, "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["size"], row["chunks"], row["numpy"]) for row in rows] == [(32, 2, None), (64, 2, None)]
    assert all(row["dask_distmm"] > 0 < row["dask"] for row in rows)
    title, *lines = invoke("bench", *options).stdout.splitlines()
    assert title.split()[:2] == ["N", "chunks"]
    assert [line.split()[:4] for line in lines] == [["32", "2", "x", "2"], ["64", "2", "x", "2"]]
