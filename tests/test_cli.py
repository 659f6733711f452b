"""The command line: both ways in, help, wrong arguments, errors."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dask_distmm import PlanError, __version__
from dask_distmm.errors import RunFailedError
from dask_distmm.tools import local, measure
from dask_distmm.tools.cli import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_it_is_a_group_with_the_name_of_the_entry_point() -> None:
    assert isinstance(main, click.Group)
    assert main.name == "distmm"
    assert set(main.commands) == {"bench", "calibrate", "check", "demo", "explain", "matmul"}


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option: str) -> None:
    result = invoke(option)
    assert result.exit_code == 0
    assert "demo" in result.output
    result = invoke("demo", option)
    assert result.exit_code == 0
    for text in ("--size", "default: 4096", "--workers", "at least 2", "--debug", "real data"):
        assert text in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("check", ["--scheduler ADDRESS", "--json", "Exit status", "2 multiplies fail"]),
        ("matmul", ["--out FILE", "--overwrite", "X.zarr::path/of/array", "Examples:", "--epilog NAME", "--workers"]),
        ("explain", ["--html", "--scheduler", "Computes nothing"]),
        ("bench", ["--json", "4,8", "by turns"]),
        ("calibrate", ["--scheduler ADDRESS", "--out FILE", "distmm-measured.yaml", "20 seconds"]),
    ],
)
def test_help_of_each_command(command: str, texts: list[str]) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "\x08" not in result.output
    for text in [*texts, "--debug"]:
        assert text in " ".join(result.output.split())


def test_help_does_not_wait_for_what_commands_need() -> None:
    program = (
        "import sys, dask_distmm.tools.cli; bad = [name for name in sys.modules if name in ('zarr', 'h5py',"
        " 'matplotlib') or name.startswith(tuple(f'dask_distmm.tools.{part}' for part in"
        " ('multiply', 'check', 'measure')))];"
        " assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("arguments", [["bench", "--size", "0"], ["bench", "--chunks", "2,x"], ["matmul", "a", "b"]])
def test_wrong_options_of_other_commands_are_said(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize("command", main.commands)
def test_unknown_options_name_the_nearest(command: str) -> None:
    options = [name for param in main.commands[command].params for name in param.opts if name.startswith("--")]
    assert options
    for option in options:
        result = invoke(command, f"{option}{option[-1]}")
        assert result.exit_code == 2
        assert re.search(rf"No such option.*{option}{option[-1]}\b.*{option}\b", result.stderr), result.stderr


def printed_commands() -> list[str]:
    """Return the commands that the documentation tells readers to run."""
    root = Path(__file__).parents[1]
    texts = [(root / name).read_text() for name in ("README.md", "docs/command-line.md")]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    return [line for block in blocks for line in block.splitlines() if line.startswith("dask distmm ")]


def test_printed_commands_can_be_read() -> None:
    commands = printed_commands()
    assert {line.split()[2] for line in commands} == set(main.commands)
    for line in commands:
        name, *arguments = shlex.split(line)[2:]
        main.commands[name].make_context(name, arguments)


def test_version() -> None:
    assert invoke("--version").output == f"dask_distmm, version {__version__}\n"


@pytest.mark.parametrize(
    ("way", "usage"),
    [(["dask", "distmm"], "Usage: python -m dask distmm demo"), (["dask_distmm"], "Usage: python -m dask_distmm demo")],
    ids=["dask distmm", "python -m dask_distmm"],
)
def test_both_ways_in(way: list[str], usage: str) -> None:
    command = [sys.executable, "-W", "error", "-m", *way, "demo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert usage in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--size", "0"], ["--size", "-5"], ["--size", "many"], ["--workers", "0"], ["--sizes", "5"], ["extra"]],
    ids=" ".join,
)
def test_wrong_arguments_are_said(arguments: list[str]) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert arguments[0] in result.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    def run(*arguments: Any) -> None:
        raise RunFailedError("rank 1 failed\nand many details")

    monkeypatch.setattr(measure, "run_demo", run)
    return RunFailedError


def test_an_error_is_one_line(failing: type[Exception]) -> None:
    result = invoke("demo", "--size", "8")
    assert result.exit_code == 1
    assert result.stderr == "Error: RunFailedError: rank 1 failed (--debug shows the traceback)\n"


def test_debug_lets_the_traceback_out(failing: type[Exception]) -> None:
    result = invoke("demo", "--size", "8", "--debug")
    assert isinstance(result.exception, failing)


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "run_demo", run)
    result = invoke("demo", "--size", "8")
    assert result.exit_code == 130
    assert len(result.stderr.splitlines()) == 1


def test_wrong_options_are_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any) -> None:
        raise PlanError("there is no such thing")

    monkeypatch.setattr(measure, "run_demo", run)
    assert invoke("demo", "--size", "8").exit_code == 2


def test_a_misspelt_epilog_names_the_similar_ones() -> None:
    said = invoke("explain", "a", "b", "--epilog", "rellu").stderr
    assert "did you mean 'relu'" in said
    assert len(said.splitlines()[-1]) < 200


def test_options_are_in_groups() -> None:
    lines = invoke("matmul", "--help").output.splitlines()
    titles = [line for line in lines if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert titles == ["Product:", "Epilog:", "How:", "Files:", "Where:", "Options:"]
    # Each option of the command is in one of them, once.
    named = [line.split()[0] for line in lines if line.startswith("  --")]
    params = [param.opts[0] for param in main.commands["matmul"].params if isinstance(param, click.Option)]
    assert sorted(named) == sorted(params)


def test_size_and_workers_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(measure, "run_demo", lambda *arguments: seen.append(arguments[:2]))
    monkeypatch.setattr(local, "default_workers", lambda: 7)
    monkeypatch.setattr(local, "available_memory", lambda: 2**40)
    assert invoke("demo", "--size", "8", "--workers", "3").exit_code == 0
    assert invoke("demo").exit_code == 0
    assert seen == [(8, 3), (4096, 7)]
