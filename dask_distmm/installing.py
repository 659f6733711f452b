"""Commands that install this package, with its optional parts: from where it came, so that they work."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dask_distmm._version import __version__
from dask_distmm.errors import DistMMError

_NAME = "dask_distmm"


def install_command(extra: str = "", *, elsewhere: bool = False) -> str:
    """Return the command that installs this version of the package, from where it came."""
    origin = _origin()
    if origin is not None and "dir_info" in origin and not Path(requirement(origin, __version__, "")).is_dir():
        # As in an image, where the folder has been removed.
        return f'python -m pip install ".{f"[{extra}]" if extra else ""}"   # in a clone of the repository'
    copied = "   # from a copy of that folder" if elsewhere and origin is not None and "dir_info" in origin else ""
    return f'python -m pip install "{requirement(origin, __version__, extra)}"{copied}'


def requirement(origin: Mapping[str, Any] | None, version: str, extra: str) -> str:
    """Return what pip is to install: a name and version of an index, a folder, a file, or a repository."""
    brackets = f"[{extra}]" if extra else ""
    if origin is None:
        return f"{_NAME}{brackets}=={version}"
    url = str(origin["url"])
    if "dir_info" in origin:
        return f"{unquote(urlsplit(url).path)}{brackets}"
    if (vcs := origin.get("vcs_info")) is not None:
        return f"{_NAME}{brackets} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{_NAME}{brackets} @ {url}"


@functools.cache
def _origin() -> dict[str, Any] | None:
    """Return where this package was installed from; a folder that is imported without having been installed, too."""
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return {"url": root.as_uri(), "dir_info": {}}
    try:
        text = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
        origin: dict[str, Any] | None = json.loads(text) if text else None
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return origin if origin is not None and "url" in origin else None


def library_of(extra: str, name: str, user: str, where: str = "") -> Any:
    """Return a module that an optional part brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DistMMError(
            f"{user} needs {name.partition('.')[0]}, which can't be imported ({error}): install it with the extra "
            f"'{extra}'{where}, by {install_command(extra)}"
        ) from error
