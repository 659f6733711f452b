"""How far multiplies are: what the scheduler answers to `dask_distmm.progress`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dask_distmm.errors import ProtocolError, as_plain
from dask_distmm.runtime.keys import barrier_key, barrier_name
from dask_distmm.runtime.run import Run
from dask_distmm.runtime.scheduler.records import Records

if TYPE_CHECKING:
    from distributed import Scheduler

__all__ = ["answer_progress", "find_names", "standing"]

_PHASES = {"staged": "waiting", "voting": "voting", "running": "multiplying"}


def answer_progress(plugin: Any, names: Any = None, keys: Any = ()) -> dict[str, Any]:
    """Answer how far multiplies are: those named, or all that the tasks of `keys` need.

    Parameters
    ----------
    plugin
        The scheduler's plugin.
    names, keys
        Names of multiplies, or None; keys of tasks.
    """
    scheduler = plugin.scheduler
    try:
        # A graph that was submitted a moment ago may still be on its way.
        known = names is not None or all(key in scheduler.tasks for key in keys)
        if names is None:
            names = find_names(scheduler, keys)
        found = [standing(scheduler, plugin.live.values(), plugin.records, str(name)) for name in names]
    except TypeError as error:
        return as_plain(ProtocolError(f"malformed question: {error!r}"))
    return {"status": "OK", "known": known, "found": found}


def find_names(scheduler: Scheduler, keys: Iterable[Any]) -> list[str]:
    """Return the names of the multiplies that these tasks need, first those that others wait for."""
    seen: set[Any] = set()
    found: list[str] = []
    todo = [ts for key in keys if (ts := scheduler.tasks.get(key)) is not None]
    while todo:
        ts = todo.pop()
        if ts in seen:
            continue
        seen.add(ts)
        if (name := barrier_name(ts.key)) is not None:
            found.append(name)
        todo.extend(ts.dependencies)
    return found[::-1]


def standing(scheduler: Scheduler, live: Iterable[Run], records: Records, name: str) -> dict[str, Any]:
    """Return phase and share of a multiply's work, as plain types."""
    runs = [run for run in live if run.name == name]
    record = records.of(name)
    if runs:
        run = max(runs, key=lambda run: run.run_id)
        moved = record.received_bytes if record is not None and record.run_id == run.run_id else 0
        return _line(name, _PHASES.get(run.phase, "ending"), run.share, run.run_id, moved)
    if record is not None and record.outcome == "failed":
        return _line(name, "failed", record.share, record.run_id, record.received_bytes)
    gate = scheduler.tasks.get(barrier_key(name))
    if gate is not None and gate.state not in ("released", "forgotten"):
        left = len(gate.waiting_on or ())
        return _line(name, "reading", 1 - left / len(gate.dependencies) if gate.dependencies else 1.0)
    if record is None:
        return _line(name, "done", 1.0)
    return _line(name, "done", 1.0, record.run_id, record.received_bytes)


def _line(name: str, phase: str, share: float, run_id: int = 0, received_bytes: int = 0) -> dict[str, Any]:
    return {"name": name, "phase": phase, "share": share, "run": run_id, "received_bytes": received_bytes}
