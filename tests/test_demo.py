"""The demo, run as a user does, and its arithmetic."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from dask_distmm import DistMMError
from dask_distmm.tools import measure as demo

COMMAND = [sys.executable, "-W", "error", "-m", "dask_distmm", "demo"]
GIB = 2**30
ROOT = Path(__file__).parents[1]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What lets a demo write its files below tmp_path, and its lines at once."""
    return os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}


def left_over(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("dask-distmm-demo-*"))


@pytest.mark.parametrize("name", ["sklearn", "zarr"])
def test_a_missing_library_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DistMMError, match=rf"the demo needs {name}.* extra 'demo', by .*\[demo\]"):
        demo.run_demo(8, 2, pytest.fail)


@pytest.mark.slow
def test_both_jobs_say_plan_check_times_and_ratio(environment: dict[str, str], tmp_path: Path) -> None:
    command = [*COMMAND, "--size", "512", "--workers", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=350, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.replace(str(tmp_path), "/tmp").replace(str(ROOT), ".").splitlines())) <= 100
    head, first, second = re.split(r"^\d\. .*$", done.stdout, flags=re.MULTILINE)
    assert "2 workers" in head
    assert re.search(r"dashboard: (http://\S+/distmm while this runs|python -m pip install .*\[dashboard\])", head)
    assert "1797 x 2144 float64" in first
    assert "A @ B, 512 x 512 random numbers" in second
    for job, products in ((first, 2), (second, 1)):
        for line in (
            r"Plan: \w+ on \d of 2 workers, engine numpy",
            r"check     right: all [\d,]+ elements",
            r"time      dask_distmm [\d.]+ m?s, Dask's own matmul [\d.]+ m?s",
            r"ratio     \d+\.\d\d",
            r"here      NumPy in one process [\d.]+ \w+, [\d.]+ of dask_distmm's time: ",
            r"estimate  dask_distmm [\d.]+ \w+, [\d.]+ of the measured time\n +Dask [\d.]+ \w+, [\d.]+ of the measured",
        ):
            assert len(re.findall(line, job)) == products, line
    share = re.search(r"they carry ([\d.]+) % of the variance", first)
    assert share is not None
    assert 70 < float(share[1]) < 76
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("after", ["memory:", "Plan:"], ids=["while it starts", "while it multiplies"])
def test_ctrl_c_ends_it_and_leaves_nothing(environment: dict[str, str], tmp_path: Path, after: str) -> None:
    # A session of its own: a terminal sends Ctrl-C to a whole group of processes, workers included.
    # No "-W error" here: Ctrl-C can fall into an import, whose open file Python then complains of.
    process = subprocess.Popen(
        [sys.executable, "-m", "dask_distmm", "demo", "--size", "2048", "--workers", "2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert any(after in line for line in process.stdout)
        time.sleep(0.7)
        family = psutil.Process(process.pid).children(recursive=True)
        # Where the first one falls into a finalizer, Python drops it: users press again, though not while it cleans up.
        while process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        _, errors = process.communicate(timeout=120)
    # A shell says 130 of both.
    assert process.returncode in (130, -signal.SIGINT)
    assert "Interrupted: the cluster is stopped, the temporary folder is removed." in errors.splitlines()
    assert family
    _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []
    assert left_over(tmp_path) == []


def test_too_large_a_size_is_refused_before_anything_starts(environment: dict[str, str], tmp_path: Path) -> None:
    command = [*COMMAND, "--size", "10000000", "--workers", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(
        r"Error: too little memory: --size 10000000 with 2 workers needs about .* PiB .*; "
        r"[\d.]+ \w+ are available; --size \d+ would fit\n",
        done.stderr,
    )
    assert left_over(tmp_path) == []


def test_the_size_that_would_fit_fits() -> None:
    message = demo.too_little_memory(100_000, 4, 16 * GIB)
    assert message is not None
    fits = int(message.split("--size ")[-1].split()[0])
    assert demo.too_little_memory(fits, 4, 16 * GIB) is None
    assert demo.too_little_memory(fits + 1, 4, 16 * GIB) is not None


@pytest.mark.parametrize(("workers", "advice"), [(1000, "take fewer workers"), (1, "free some memory")])
def test_without_any_size_that_fits_it_says_so(workers: int, advice: str) -> None:
    message = demo.too_little_memory(1, workers, GIB // 4)
    assert message is not None
    assert message.endswith(advice)


def test_the_check_finds_a_wrong_element() -> None:
    rng = np.random.default_rng()
    a, b = rng.standard_normal((40, 300)), rng.standard_normal((300, 50))
    right = a @ b
    assert demo.worst_error(a, b, np.abs(b), right) <= 1
    for wrong in (right[7, 9] * (1 + 1e-9), np.nan, np.inf):
        product = right.copy()
        product[7, 9] = wrong
        assert demo.worst_error(a, b, np.abs(b), product) > 1


def test_where_nothing_can_round_nothing_may_differ() -> None:
    a, b = np.zeros((3, 4)), np.ones((4, 2))
    assert demo.worst_error(a, b, b, np.zeros((3, 2))) == 0
    assert demo.worst_error(a, b, b, np.full((3, 2), 1e-300)) == np.inf


def test_products_of_all_pairs_of_columns() -> None:
    columns = np.array([[2.0, 3.0, 5.0]])
    np.testing.assert_array_equal(demo.with_products(columns), [[2, 3, 5, 4, 6, 10, 9, 15, 25]])


def test_the_data_set_is_standardised() -> None:
    table = demo.digits(workers=2)
    assert table.shape == (1797, 2144)
    assert table.numblocks == (4, 4)
    values = table.compute(scheduler="threads")
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-12)
    deviation = values.std(axis=0)
    constant = deviation < 0.5
    assert constant.any()
    assert not values[:, constant].any()
    np.testing.assert_allclose(deviation[~constant], 1)


def test_whether_one_machine_is_enough_in_words() -> None:
    text = "NumPy in one process 100.00 ms, 0.50 of dask_distmm's time: one machine is enough"
    assert demo.machine_text(0.1, 0.2) == text
    assert demo.machine_text(0.4, 0.2).endswith("2.00 of dask_distmm's time: the cluster pays")


@pytest.mark.parametrize(("ours", "text"), [(0.5, "2.00 times"), (2.0, "(slower)"), (1.01, "as fast as")])
def test_the_ratio_in_words(ours: float, text: str) -> None:
    assert text in demo.ratio_text(ours, 1.0)
