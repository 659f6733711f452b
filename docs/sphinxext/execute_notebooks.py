"""Notebooks are executed when they are read, by a kernel behind Unix sockets.

MyST-NB's own execution has the kernel listen on TCP ports that were free a moment before; a cluster that starts at the
same time may take one of them, and the build fails. ``-D execute_notebooks=0`` leaves outputs out. A notebook whose
metadata have MyST-NB's ``"execution_mode": "off"`` is shown with the outputs that it is stored with.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from sphinx.application import Sphinx
from sphinx.config import Config

# Where they run: next to each other, so that relative paths in them are as in an editor.
FOLDER = Path(__file__).parents[1] / "notebooks"
# On a machine that does a lot else; alone no cell takes a tenth of this.
SECONDS_A_CELL = 300
_wanted = True


class UnixSockets(AsyncKernelManager):
    """A kernel that listens on Unix sockets, in a folder of its own: their names must be short."""

    def __init__(self, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distmm-", ignore_cleanup_errors=True)
        super().__init__(transport="ipc", connection_file=str(Path(self._folder.name) / "kernel.json"), **settings)


def read(text: str) -> nbformat.NotebookNode:
    """Return a notebook with its outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        A cell has failed.
    """
    notebook = nbformat.reads(text, as_version=4)
    if _wanted and notebook.metadata.get("mystnb", {}).get("execution_mode") != "off":
        NotebookClient(
            notebook,
            kernel_manager_class=UnixSockets,
            timeout=SECONDS_A_CELL,
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute()
    return notebook


def _configure(app: Sphinx, config: Config) -> None:
    global _wanted
    _wanted = bool(config.execute_notebooks)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the option."""
    app.add_config_value("execute_notebooks", True, "env", types=(bool, int, str))
    app.connect("config-inited", _configure)
    return {"parallel_read_safe": False}
