"""The commands that install the package: from where it came."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import dask_distmm
from dask_distmm import __version__, compat
from dask_distmm.compat import install_command, requirement


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "dask_distmm[cu13]==1.2"),
        ({"url": "file:///home/a%20b/clone", "dir_info": {"editable": True}}, "/home/a b/clone[cu13]"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "dask_distmm[cu13] @ git+https://host/x.git@abc",
        ),
        ({"url": "file:///tmp/x.whl", "archive_info": {}}, "dask_distmm[cu13] @ file:///tmp/x.whl"),
    ],
)
def test_each_origin_has_its_form(origin: dict[str, object] | None, expected: str) -> None:
    assert requirement(origin, "1.2", "cu13") == expected
    assert requirement(origin, "1.2", "") == expected.replace("[cu13]", "")


def test_the_command_names_what_there_is() -> None:
    words = shlex.split(install_command("files"))
    assert words[:-1] == ["python", "-m", "pip", "install"]
    place = words[-1].removesuffix("[files]")
    # Of a clone its folder; of an installed package, name and version.
    assert (Path(place) / "pyproject.toml").is_file() or place == f"dask_distmm=={__version__}" or " @ " in words[-1]


def test_a_folder_that_is_gone_is_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    origin = {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}
    monkeypatch.setattr(compat, "_origin", lambda: origin)
    assert install_command("cu13") == 'python -m pip install ".[cu13]"   # in a clone of the repository'
    (tmp_path / "gone").mkdir()
    assert install_command() == f'python -m pip install "{tmp_path}/gone"'


def test_every_extra_that_is_named_is_there() -> None:
    """A hint that names an extra which does not exist would send users in a circle."""
    root = Path(dask_distmm.__file__).parent
    texts = [path.read_text() for path in root.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"(?:install_command|library_of)\([\"'](\w+)[\"']", text)}
    assert "files" in named
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", pyproject.split("[project.optional-dependencies]")[1], re.M))
    assert named <= extras
