"""Ctrl-C while a command's libraries are still being loaded, before any of its own code runs.

Loading takes a second, more on a busy machine, and nothing has been started by then: one line says so, in place of the
traceback of whichever library was being loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


def is_command(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Whether this process is one of our commands."""
    by_dask = Path(argv[0]).name == "dask" and list(argv[1:2]) == ["distmm"] if argv else False
    return by_dask or (list(argv[:1]) == ["-m"] and "dask_distmm" in original)


def quiet_interrupts() -> None:
    """Have Ctrl-C end one of our commands with one line where nothing else handles it; other programs keep theirs."""
    if is_command(sys.argv, sys.orig_argv):
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("Interrupted: nothing was started.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
