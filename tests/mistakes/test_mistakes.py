"""The messages that mistakes get: each was read by somebody, and a change has to be read again.

``mistakes.md`` has all of them, to be reviewed as a page: does each say what was found, what is expected, what to do?
After a change ``DISTMM_WRITE_MISTAKES=1 python -m pytest tests/mistakes`` writes it anew.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner
from distributed import Client

from dask_distmm import DistMMError, NotCollective, compat
from dask_distmm.tools import local
from dask_distmm.tools.cli import main

# All cases run, as all messages are compared with a page that is kept: 170 of them take 6 s.
pytestmark = pytest.mark.cases(sys.maxsize)

HERE = Path(__file__).parent
PAGE = HERE / "mistakes.md"

_spec = importlib.util.spec_from_file_location("distmm_mistakes", HERE / "cases.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

TITLES = {
    "Without a cluster": cases.ALONE,
    "In programs": cases.IN_PROGRAMS,
    "On the command line": dict.fromkeys(cases.COMMANDS),
}


# What differs between machines, and between versions of other libraries.
VARIES = [
    (r"(tcp|inproc)://\d[^\s,')\]]*\d(?=[\s,')\]]|$)", "ADDRESS"),
    (r"ADDRESS(, ADDRESS)+", "ADDRESSES"),
    (r"0x[0-9a-f]+", "0x..."),
    (r"(?<=\]==)\d[\w.]*", "VERSION"),
    (r"[\d.]+ [KMGTP]iB(?= are available)", "SOME"),
    (r"--size \d+ would fit", "--size SOME would fit"),
    (r"\(Timed out .*?\)", "(REASON)"),
    (r"can't be read: .*?; write", "can't be read: REASON; write"),
    (r"damaged \(.*?\)", "damaged (REASON)"),
    (r"\((Chunks .*?)\); expected", "(REASON); expected"),
]


def plain(text: str, folder: Path | None = None) -> str:
    """Return a message without what differs from machine to machine."""
    if folder is not None:
        text = text.replace(f"{folder.resolve()}/", "FOLDER/").replace(str(folder.resolve()), "FOLDER")
    for pattern, written in VARIES:
        text = re.sub(pattern, written, text)
    return text


def message(call: Callable[[], Any]) -> str:
    """Return what a mistake in a program gets."""
    try:
        found = call()
    except (DistMMError, TypeError) as error:
        return f"{type(error).__name__}: {plain(str(error))}"
    assert isinstance(found, NotCollective), f"no error, but {found!r}"
    return plain(repr(found))


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[tuple[str, str], str]]:
    """Messages of this run; written as the page if that is wanted and all are there."""
    found: dict[tuple[str, str], str] = {}
    yield found
    if os.environ.get("DISTMM_WRITE_MISTAKES") and len(found) == sum(map(len, TITLES.values())):
        PAGE.write_text(page(found), encoding="utf-8")


def page(found: dict[tuple[str, str], str]) -> str:
    """Return all messages as Markdown."""
    lines = ["# What mistakes are told", "", "Written and compared by `test_mistakes.py`.", ""]
    for section, group in TITLES.items():
        lines += [f"## {section}", ""]
        for title in group:
            shown = f"`dask distmm {title}`".replace(" `", "`") if section == "On the command line" else title
            lines += [f"### {shown}", "", "```text", *found[section, title].splitlines(), "```", ""]
    return "\n".join(lines)


def expected(section: str, title: str) -> str:
    """Return the message that the page has."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n", 1)[1]
    shown = f"`dask distmm {title}`".replace(" `", "`") if section == "On the command line" else title
    return text.split(f"### {shown}\n\n```text\n", 1)[1].split("\n```\n", 1)[0]


def compare(recorded: dict[tuple[str, str], str], section: str, title: str, said: str) -> None:
    recorded[section, title] = said
    assert said.isprintable() or "\n" in said
    if not os.environ.get("DISTMM_WRITE_MISTAKES"):
        assert said == expected(section, title)


@pytest.fixture(autouse=True)
def _from_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_origin", lambda: None)


@pytest.mark.parametrize("title", cases.ALONE)
def test_without_a_cluster(title: str, recorded: dict[tuple[str, str], str]) -> None:
    compare(recorded, "Without a cluster", title, message(cases.ALONE[title]))


@pytest.fixture(autouse=True)
def _without_gpus(request: pytest.FixtureRequest) -> None:
    """Messages about the engines for GPUs say what is missing: on a machine that has it they say something else."""
    if "cublasmp" in request.node.name and importlib.util.find_spec("cupy") is not None:
        pytest.skip("the libraries for GPUs are here")


@pytest.mark.parametrize("title", cases.IN_PROGRAMS)
def test_in_programs(title: str, inproc_client: Client, recorded: dict[tuple[str, str], str]) -> None:
    compare(recorded, "In programs", title, message(cases.IN_PROGRAMS[title]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("h5py")
    made = tmp_path_factory.mktemp("mistakes")
    cases.make_files(made)
    return made


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("line", cases.COMMANDS)
def test_on_the_command_line(
    line: str,
    folder: Path,
    inproc_client: Client,
    recorded: dict[tuple[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(local, "make_cluster", lambda *arguments: pytest.fail("a cluster was started"))
    monkeypatch.setattr(local, "CONNECT_SECONDS", 0.3)
    monkeypatch.setenv("COLUMNS", "100")
    before = sorted(folder.rglob("*"))
    words = shlex.split(line.format(address=inproc_client.scheduler.address))
    with dask.config.set({"distmm.minimum-flops": None}):
        done = CliRunner().invoke(main, words, prog_name="dask distmm")
    logging.disable(logging.NOTSET)
    # One line, or click's own three; the end of what is said, where a plan comes before it.
    said = plain(done.stderr or done.output, folder).strip()
    assert "Traceback" not in said
    assert done.exit_code in (1, 2)
    assert sorted(folder.rglob("*")) == before
    # Of click's three lines the last.
    compare(recorded, "On the command line", line, f"{said[said.index('Error: ') :]}\n-> {done.exit_code}")


@pytest.mark.parametrize("line", cases.TO_CLICK)
def test_what_click_refuses(line: str) -> None:
    done = CliRunner().invoke(main, shlex.split(line), prog_name="dask distmm")
    assert done.exit_code == 2
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_has_these_and_no_others() -> None:
    titles = re.findall(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.M)
    shown = [
        title if section != "On the command line" else f"`dask distmm {title}`".replace(" `", "`")
        for section, group in TITLES.items()
        for title in group
    ]
    assert titles == shown
