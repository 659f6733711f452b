"""The contents of the dashboard's page, as columns of plain values. Pure."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dask.utils import format_bytes, format_time

from dask_distmm.diagnostics.bars import short_name
from dask_distmm.runtime.run import PHASES, Record, Records

Columns = dict[str, list[Any]]

# Number of runs that have a bar; more could not be told apart.
_BARS = 20
_NAN = float("nan")
_MIB = 2**20
# The time of the current run: its phases are known when it is done.
RUNNING = "so far"
# Okabe and Ito's colours, which everybody can tell apart; grey for "other".
_COLOURS = {
    "gate": "#CC79A7", "gather": "#E69F00", "redistribute": "#E69F00", "multiply": "#0072B2", "panel": "#D55E00",
    "update": "#0072B2", "compute": "#0072B2", "wait": "#F0E442", "deliver": "#56B4E9", "replicate": "#009E73",
    "other": "#BBBBBB", RUNNING: "#F0E442",
}  # fmt: skip
# Those of a program's longest kernels. The legend has room for this many; other kernels are part of "other".
_KERNELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5195")


def empty() -> tuple[Columns, Columns]:
    """Return the tables of memory and of rates, without rows."""
    return memory_bars(None, {}), rates([])


def summary(records: Records) -> str:
    """Return the page's first line, as HTML."""
    running = sum(record.outcome == "running" for record in records)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in records.ended.items())
    received = format_bytes(records.received_bytes)
    return f"<b>Runs</b>: {running} running, {counts}; {received} received by runs that are done"


def runs(records: Sequence[Record], now: float) -> Columns:
    """Return the table of all runs, the newest first."""
    rows = [_row(record, now) for record in reversed(records)]
    fields = ["run", "name", "outcome", "share", "how", "engine", "when", "seconds", "moved"]
    return {field: [one[field] for one in rows] for field in [*fields, "speed", "of_bound", "reason"]}


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
        "speed": format_rate(record.rate) if done else "",
        "of_bound": record.share_of_bound if done else None,
        "reason": short_reason(record.reason),
    }


def format_rate(rate: float) -> str:
    """Return floating-point operations a second as text, in a unit that suits the size."""
    name, unit = rate_unit(rate)
    return f"{rate / unit:.3g} {name}"


def rate_unit(rate: float) -> tuple[str, float]:
    """Return the unit in which a rate is written, and its size: of CPUs GFLOP/s, of GPUs TFLOP/s."""
    return ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)


def short_reason(reason: str) -> str:
    """Return why a run ended, in a line that begins with the error: run, phase and workers are in other columns."""
    line = reason.partition("\n")[0]
    return re.sub(r"^run \d+ of \S+ failed while \w+( on [^ ]+(, [^ ]+)*)?: ", "", line)


def shown(records: Sequence[Record], picked: int | None) -> Record | None:
    """Return the run whose ranks are shown: the one that was picked; or the newest that is running, or has times."""
    for record in records:
        if record.run_id == picked:
            return record
    going = [record for record in records if record.outcome == "running" and record.ranks]
    found = going or [record for record in records if record.phases] or list(records)
    return found[-1] if found else None


def caption(record: Record | None, picked: int | None) -> str:
    """Return the line above the pictures of one run, as HTML."""
    if record is None:
        return "No run has begun yet."
    newest = "the newest that is running" if record.outcome == "running" else "the newest with times"
    why = "picked in the table" if record.run_id == picked else f"{newest}; click a row for another"
    state = {"done": f", {format_time(record.seconds)}", "running": f", {record.share:.0%} done"}.get(
        record.outcome, ""
    )
    text = f"<b>Run {record.run_id}</b> of {escape(record.name)}: {record.outcome}{state} ({why})"
    if record.reason:
        text += f'<div style="white-space: pre-wrap; overflow-wrap: anywhere">{escape(record.reason)}</div>'
    return text


def rank_names(record: Record | None) -> list[str]:
    """Return the labels of a run's ranks, from the bottom up: the first is on top."""
    return [f"{rank}: {_short(address)}" for rank, address in enumerate(record.ranks)][::-1] if record else []


def _short(address: str) -> str:
    return address.rpartition("://")[2]


def phase_bars(record: Record | None, now: float) -> Columns:
    """Return the bars of the time line: the phases of each rank; of the current run the time so far."""
    found: Columns = {"rank": [], "phase": [], "left": [], "right": [], "seconds": [], "colour": []}
    if record is None:
        return found
    kernels = collections.Counter[str]()
    for phases in record.phases.values():
        kernels.update({phase: seconds for phase, seconds in phases.items() if phase not in _COLOURS})
    shown = [kernel for kernel, _ in kernels.most_common(len(_KERNELS))]
    colours = _COLOURS | dict(zip(shown, _KERNELS, strict=False))
    for rank, address in enumerate(record.ranks):
        phases = dict.fromkeys((*PHASES[:7], *shown, *PHASES[7:]), 0.0)
        for phase, seconds in record.phases.get(address, {}).items():
            phases[phase if phase in phases else PHASES[-1]] += seconds
        if record.outcome == "running":
            phases[RUNNING] = now - record.started
        left = 0.0
        for phase, seconds in phases.items():
            if seconds > 0:
                values = (f"{rank}: {_short(address)}", phase, left, left + seconds, seconds, colours[phase])
                for column, value in zip(found.values(), values, strict=True):
                    column.append(value)
                left += seconds
    return found


def memory_bars(record: Record | None, process: Mapping[str, int]) -> Columns:
    """Return the MiB of each worker: of its process now, and of the run, projected and held (nan: not known)."""
    addresses = list(record.projected_bytes) if record else sorted(process)
    return {
        "worker": [_short(address) for address in addresses],
        "process": [process.get(address, _NAN) / _MIB for address in addresses],
        "projected": [record.projected_bytes[address] / _MIB if record else _NAN for address in addresses],
        "held": [record.held_bytes.get(address, _NAN) / _MIB if record else _NAN for address in addresses],
    }


def rates(records: Sequence[Record]) -> Columns:
    """Return MiB moved, speed and bound (in the unit of `rates_unit`) of the last runs that are done."""
    done, (_, unit) = _last_done(records), rates_unit(records)
    return {
        "run": [str(record.run_id) for record in done],
        "moved": [record.received_bytes / _MIB for record in done],
        "rate": [record.rate / unit for record in done],
        "bound": [record.bound / unit for record in done],
        "speed": [format_rate(record.rate) for record in done],
        "most": [format_rate(record.bound) for record in done],
        "of_bound": [record.share_of_bound for record in done],
    }


def rates_unit(records: Sequence[Record]) -> tuple[str, float]:
    """Return the unit in which the speeds of the last runs are drawn, and its size."""
    return rate_unit(max((record.rate for record in _last_done(records)), default=0.0))


def _last_done(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.outcome == "done"][-_BARS:]
