"""The scheduler's answer to `dask_distmm.progress`: how far multiplies are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from distributed.metrics import time

from dask_distmm.errors import ProtocolError
from dask_distmm.runtime.keys import barrier_key, barrier_name, wave_name, wave_of
from dask_distmm.runtime.questions import ProgressLine, ProgressQuestion, ProgressReply
from dask_distmm.runtime.run import Run
from dask_distmm.runtime.scheduler.records import Records

if TYPE_CHECKING:
    from distributed import Scheduler

_PHASES = {"planned": "waiting", "voting": "voting", "running": "multiplying"}


def answer_progress(
    scheduler: Scheduler, runs: Iterable[Run], records: Records, question: ProgressQuestion
) -> ProgressReply:
    """Return how far multiplies are."""
    names: Sequence[str] | None = question.names
    try:
        # A graph that was submitted a moment ago may still be on its way.
        known = names is not None or all(key in scheduler.tasks for key in question.keys)
        if names is None:
            names = find_names(scheduler, question.keys)
        lines = [progress_of(scheduler, list(runs), records, str(name)) for name in names]
    except TypeError as error:
        raise ProtocolError(f"malformed question: {error!r}") from error
    return ProgressReply("OK", known=known, found=[dataclasses.astuple(line) for line in lines])


def find_names(scheduler: Scheduler, keys: Iterable[Any]) -> list[str]:
    """Return the names of the multiplies that these tasks need, first those that others wait for.

    Of the waves of a product it is the product's.
    """
    seen: set[Any] = set()
    found: list[str] = []
    todo = [ts for key in keys if (ts := scheduler.tasks.get(key)) is not None]
    while todo:
        ts = todo.pop()
        if ts in seen:
            continue
        seen.add(ts)
        if (name := barrier_name(ts.key)) is not None:
            wave = wave_of(name)
            found.append(name if wave is None else wave[0])
        todo.extend(ts.dependencies)
    return list(dict.fromkeys(found[::-1]))


def progress_of(scheduler: Scheduler, runs: Iterable[Run], records: Records, name: str) -> ProgressLine:
    """Return the phase of one multiply, and the share of that phase's work which is done.

    Of a product in waves it is the phase of the next wave, and the share of all work.
    """
    if name in records.waves:
        return _progress_of_waves(scheduler, runs, records, name)
    own = [run for run in runs if run.name == name]
    record = records.of(name)
    if own:
        run = max(own, key=lambda run: run.run_id)
        phase = _PHASES.get(run.phase, "ending")
        return ProgressLine(name, phase, run.share, run.run_id, run.received_bytes, run.expected_bytes)
    if record is not None and record.outcome == "failed":
        return ProgressLine(name, "failed", record.share, record.run_id, record.received_bytes)
    barrier = scheduler.tasks.get(barrier_key(name))
    if barrier is not None and barrier.state not in ("released", "forgotten"):
        left = len(barrier.waiting_on or ())
        return ProgressLine(name, "reading", 1 - left / len(barrier.dependencies) if barrier.dependencies else 1.0)
    if record is None:
        return ProgressLine(name, "done", 1.0)
    return ProgressLine(name, "done", 1.0, record.run_id, record.received_bytes)


def _progress_of_waves(scheduler: Scheduler, runs: Iterable[Run], records: Records, name: str) -> ProgressLine:
    """Return how far a product in waves is."""
    waves = records.waves[name]
    if (following := waves.next) is None:
        return ProgressLine(name, "done", 1.0, note=waves.told(0.0, time()))
    now = progress_of(scheduler, runs, records, wave_name(name, following))
    share = now.share if now.phase == "multiplying" else 0.0
    whole = (len(waves.done) + share) / waves.count
    if now.phase == "done":  # nobody wants it any more
        return ProgressLine(name, "released", whole)
    return ProgressLine(name, now.phase, whole, now.run, now.received_bytes, note=waves.told(share, time()))
