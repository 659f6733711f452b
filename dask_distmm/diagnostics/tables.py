"""The contents of the dashboard's page, as columns of plain values. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dask.utils import format_bytes, format_time

from dask_distmm.diagnostics.bars import short_name
from dask_distmm.runtime.scheduler.records import PHASES, Record, Totals

__all__ = ["caption", "empty", "memory", "phases", "rank_names", "rates", "runs", "shown", "summary"]

Columns = dict[str, list[Any]]

# So many runs have a bar; more could not be told apart.
_BARS = 20
_NAN = float("nan")
_MIB = 2**20


def empty() -> tuple[Columns, Columns]:
    """Return the tables of memory and of rates, without rows."""
    return memory(None, {}), rates([])


def summary(totals: Totals, records: Sequence[Record]) -> str:
    """Return the page's first line, as HTML."""
    running = sum(record.outcome == "running" for record in records)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in totals.runs.items())
    received = format_bytes(totals.received_bytes)
    return f"<b>Runs</b>: {running} running, {counts}; {received} received by runs that are done"


def runs(records: Sequence[Record], now: float) -> Columns:
    """Return the table of all runs, the newest first."""
    rows = [_row(record, now) for record in reversed(records)]
    fields = ["run", "name", "outcome", "share", "how", "engine", "when", "seconds", "moved"]
    return {field: [one[field] for one in rows] for field in [*fields, "tflops", "of_bound", "reason"]}


def _row(record: Record, now: float) -> dict[str, Any]:
    done = record.outcome == "done"
    grid = " x ".join(map(str, record.grid))
    return {
        "run": record.run_id,
        "name": short_name(record.name),
        "outcome": record.outcome,
        "share": record.share,
        "how": f"{record.method}, {grid}" if grid else "",
        "engine": record.engine,
        "when": time.strftime("%H:%M:%S", time.localtime(record.started)),
        "seconds": record.seconds if done else now - record.started if record.outcome == "running" else None,
        "moved": format_bytes(record.received_bytes),
        "tflops": record.rate / 1e12 if done else None,
        "of_bound": record.share_of_bound if done else None,
        "reason": record.reason.partition("\n")[0],
    }


def shown(records: Sequence[Record], picked: int | None) -> Record | None:
    """Return the run whose ranks are shown: the one that was picked, or the newest that is done, or the newest."""
    for record in records:
        if record.run_id == picked:
            return record
    ready = [record for record in records if record.phases]
    found = ready or list(records)
    return found[-1] if found else None


def caption(record: Record | None, picked: int | None) -> str:
    """Return the line above the pictures of one run, as HTML."""
    if record is None:
        return "No run has begun yet."
    why = "picked in the table" if record.run_id == picked else "the newest with times; click a row for another"
    took = f", {format_time(record.seconds)}" if record.outcome == "done" else ""
    return f"<b>Run {record.run_id}</b> of {escape(record.name)}: {record.outcome}{took} ({why})"


def rank_names(record: Record | None) -> list[str]:
    """Return the labels of a run's ranks, from the bottom up: the first is on top."""
    return [f"{rank}: {_short(address)}" for rank, address in enumerate(record.ranks)][::-1] if record else []


def _short(address: str) -> str:
    return address.rpartition("://")[2]


def phases(record: Record | None) -> Columns:
    """Return the bars of the time line: one for each phase of each rank that took any time."""
    found: Columns = {"rank": [], "phase": [], "left": [], "right": [], "seconds": []}
    for rank, address in enumerate(record.ranks if record else ()):
        left = 0.0
        for phase in PHASES:
            seconds = record.phases.get(address, {}).get(phase, 0.0) if record else 0.0
            if seconds > 0:
                values = (f"{rank}: {_short(address)}", phase, left, left + seconds, seconds)
                for column, value in zip(found.values(), values, strict=True):
                    column.append(value)
                left += seconds
    return found


def memory(record: Record | None, process: Mapping[str, int]) -> Columns:
    """Return the MiB of each worker: of its process now, and of the run, projected and held (nan: not known)."""
    addresses = list(record.projected_bytes) if record else sorted(process)
    return {
        "worker": [_short(address) for address in addresses],
        "process": [process.get(address, _NAN) / _MIB for address in addresses],
        "projected": [record.projected_bytes[address] / _MIB if record else _NAN for address in addresses],
        "held": [record.held_bytes.get(address, _NAN) / _MIB if record else _NAN for address in addresses],
    }


def rates(records: Sequence[Record]) -> Columns:
    """Return MiB moved, speed and bound (TFLOP/s) of the last runs that are done."""
    done = [record for record in records if record.outcome == "done"][-_BARS:]
    return {
        "run": [str(record.run_id) for record in done],
        "moved": [record.received_bytes / _MIB for record in done],
        "tflops": [record.rate / 1e12 for record in done],
        "bound": [record.bound / 1e12 for record in done],
        "of_bound": [record.share_of_bound for record in done],
    }
