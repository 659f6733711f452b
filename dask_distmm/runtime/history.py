"""The last events of runs, which tell why a run has failed."""

from __future__ import annotations

import collections
import time
from typing import Any

from dask_distmm.errors import brief


class History:
    """The last events of runs, oldest first."""

    def __init__(self, most: int = 1000) -> None:
        self._events: collections.deque[tuple[float, int, str]] = collections.deque(maxlen=most)

    def note(self, run_id: int, what: str) -> None:
        """Add an event of a run, now."""
        self._events.append((time.time(), run_id, brief(what)))

    def brief(self, run_id: int) -> str:
        """Return a run's events in one line: each with the seconds since the first of them."""
        found = [(when, what) for when, run, what in list(self._events) if run == run_id]
        return ", ".join(f"{what} at {when - found[0][0]:.2f} s" for when, what in found)

    def _to_dict(self, *, exclude: Any = ()) -> list[dict[str, Any]]:
        """Return all events; Dask calls this for ``Client.dump_cluster_state()``."""
        return [{"time": when, "run": run, "what": what} for when, run, what in list(self._events)]
