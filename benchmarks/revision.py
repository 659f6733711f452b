"""Which commit a benchmark of this repository was run from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any


def revision() -> dict[str, Any] | None:
    """Return the commit that the code comes from and whether it was changed since; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            # Status would otherwise take the lock to refresh the index, under other people's hands.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
