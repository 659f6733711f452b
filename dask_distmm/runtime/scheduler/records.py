"""Runs now and before, made from the events that the scheduler's plugin logs. Pure."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dask.utils import format_bytes, format_time
from distributed.metrics import time

from dask_distmm.errors import ProtocolError
from dask_distmm.programs.steps import CONTRACTS
from dask_distmm.runtime.keys import barrier_key, barrier_name, wave_name, wave_of
from dask_distmm.runtime.messages import ProgressLine, ProgressReply
from dask_distmm.runtime.run import Run

if TYPE_CHECKING:
    from distributed import Scheduler

# The scheduler's answer to `dask_distmm.progress`: how far multiplies are


_PHASES = {"planned": "waiting", "voting": "voting", "running": "multiplying"}


def answer_progress(
    scheduler: Scheduler, runs: Iterable[Run], records: Records, names: Sequence[str] | None, keys: Sequence[Any]
) -> ProgressReply:
    """Return how far the multiplies `names` are, or where that is None those that the tasks `keys` need."""
    try:
        # A graph that was submitted a moment ago may still be on its way.
        known = names is not None or all(key in scheduler.tasks for key in keys)
        if names is None:
            names = find_names(scheduler, keys)
        lines = [progress_of(scheduler, list(runs), records, str(name)) for name in names]
    except TypeError as error:
        raise ProtocolError(f"malformed question: {error!r}") from error
    return ProgressReply("OK", known=known, found=lines)


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


# Runs now and before, made from the events that the scheduler's plugin logs. Pure


Outcome = Literal["running", "done", "restarted", "failed", "released"]

_ENDED = ("done", "restarted", "failed", "released")

# The phases that engines time, in their order; "other" is the rest of a rank's time, "compute" all of a factorization
# or a program where calls return before they are done. The kernels of a program, as "gram()", are phases, too.
PHASES = (
    "gate", "gather", "redistribute", "multiply", "panel", "update", "compute", "wait", "deliver", "replicate", "other",
)  # fmt: skip
KERNELS = tuple(f"{kernel}()" for kernel in CONTRACTS)


@dataclasses.dataclass(slots=True)
class Record:
    """One run."""

    # Its number, and the name of the multiply.
    run_id: int
    name: str
    # When its participants began (seconds since the epoch); when it ended, if it did before.
    started: float
    # How it is shared among the ranks; empty if it never began.
    method: str = ""
    engine: str = ""
    grid: tuple[int, ...] = ()
    # Floating-point operations in all, and how many a second its ranks could do by the cost model.
    flops: float = 0.0
    bound: float = 0.0
    # Addresses of the ranks in their order.
    ranks: tuple[str, ...] = ()
    # Projected peak of the run's memory by worker, and the most bytes that the engine held, where it counts them.
    projected_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    held_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    # How it ended, and why if not well.
    outcome: Outcome = "running"
    reason: str = ""
    # The share of the work that is done.
    share: float = 0.0
    # How long it took; nan while it runs, or if it did not end well.
    seconds: float = float("nan")
    # Bytes of matrices that have travelled between workers so far.
    received_bytes: int = 0
    # Seconds of each of `PHASES` by address, of a run that is done.
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Floating-point operations in a second; 0 if it is not done."""
        return self.flops / self.seconds if self.outcome == "done" and self.seconds > 0 else 0.0

    @property
    def share_of_bound(self) -> float:
        """The rate as a share of the rate that the cost model gives the ranks."""
        return self.rate / self.bound if self.bound > 0 else 0.0


@dataclasses.dataclass(slots=True)
class Waves:
    """The waves of one product."""

    # Numbers of those that are to run; where only a part of D is wanted not all.
    wanted: set[int] = dataclasses.field(default_factory=set)
    # When the first one began (seconds since the epoch); nan before.
    since: float = float("nan")
    # Numbers of those that are done.
    done: set[int] = dataclasses.field(default_factory=set)
    # Bytes of operands that were loaded for these, and of finished chunks of D that they have made.
    loaded_bytes: int = 0
    made_bytes: int = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.wanted)

    @property
    def next(self) -> int | None:
        """Number of the first wave that is not done; None if all are."""
        return min(self.wanted - self.done, default=None)

    def told(self, share: float, now: float) -> str:
        """Return how far the product is, in words; `share` of the next wave is done, `now` is since the epoch."""
        done = len(self.done) + share
        left = (now - self.since) * (self.count - done) / done if done else float("nan")
        words = [f"{len(self.done)} of {self.count} waves", f"{format_bytes(self.loaded_bytes)} loaded"]
        words += [f"{format_bytes(self.made_bytes)} of D made"] if self.made_bytes else []
        return ", ".join(words + ([f"{format_time(left)} left"] if left > 0 else []))


class Records:
    """The last runs, oldest first, and the sums over all."""

    def __init__(self, most: int = 200) -> None:
        self._most = most
        self._runs: collections.OrderedDict[int, Record] = collections.OrderedDict()
        # Sums over all runs since the scheduler started, also those whose records are not kept: how many ended, by
        # outcome; of those that are done operations and bytes, and by phase the times of the slowest ranks.
        self.ended = dict.fromkeys(_ENDED, 0)
        self.flops, self.received_bytes = 0.0, 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        # The last products in waves, by name.
        self.waves: collections.OrderedDict[str, Waves] = collections.OrderedDict()

    def note(self, now: float, event: Mapping[str, Any]) -> None:
        """Add an event, as it is logged under the topic "distmm"; `now` is in seconds since the epoch."""
        record = self._runs.get(event["run"])
        if record is None:
            record = self._runs[event["run"]] = Record(event["run"], event["name"], now)
            while len(self._runs) > self._most:
                self._runs.popitem(last=False)
        if event["action"] in ("start", "done"):
            self._note_wave(now, event)
        match event["action"]:
            case "start":
                record.started = now
                record.method, record.engine = event["method"], event["engine"]
                record.grid, record.ranks = tuple(event["grid"]), tuple(event["ranks"])
                record.flops, record.bound = event["flops"], event["bound"]
                record.projected_bytes = dict(event["projected_bytes"])
            case "progress":
                record.share, record.received_bytes = event["share"], event["received_bytes"]
            case "done":
                record.seconds, record.received_bytes = event["seconds"], event["received_bytes"]
                record.held_bytes, record.share = dict(event["held_bytes"]), 1.0
                record.phases = {address: by_phase(**found) for address, found in event["ranks"].items()}
                self._end(record, "done")
            case "restart":
                self._end(record, "restarted", event["reason"])
            case "failed":
                self._end(record, "failed", event["reason"])
            case "released":
                self._end(record, "released")

    def expect(self, name: str) -> None:
        """Count a run that is to come, if it is a wave of a product."""
        if (found := wave_of(name)) is not None:
            waves = self.waves.setdefault(found[0], Waves())
            if waves.wanted == waves.done:  # an earlier graph's
                waves.wanted, waves.done = set(), set()
            waves.wanted.add(found[1])
            waves.done.discard(found[1])
            while len(self.waves) > self._most:
                self.waves.popitem(last=False)

    def _note_wave(self, now: float, event: Mapping[str, Any]) -> None:
        """Note that a wave of a product has begun or is done."""
        product, number = wave_of(event["name"]) or ("", 0)
        if (waves := self.waves.get(product)) is None:
            return
        if event["action"] == "start" and not waves.done:
            waves.since, waves.loaded_bytes, waves.made_bytes = now, 0, 0
        if event["action"] == "done" and number not in waves.done:
            waves.done.add(number)
            waves.loaded_bytes += event["loaded_bytes"]
            waves.made_bytes += event["made_bytes"]

    def _end(self, record: Record, outcome: Outcome, reason: str = "") -> None:
        record.outcome, record.reason = outcome, reason
        self.ended[outcome] += 1
        if outcome == "done":
            self.flops += record.flops
            self.received_bytes += record.received_bytes
            for phase in dict.fromkeys(itertools.chain(PHASES, *record.phases.values())):
                slowest = max((found.get(phase, 0.0) for found in record.phases.values()), default=0.0)
                self.seconds[phase] = self.seconds.get(phase, 0.0) + slowest

    def of(self, name: str) -> Record | None:
        """Return the last run of a multiply."""
        return next((record for record in reversed(self._runs.values()) if record.name == name), None)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)


def by_phase(seconds: float, timings: Mapping[str, float]) -> dict[str, float]:
    """Return a rank's seconds by phase; time under other names, and time that the engine did not take, is "other"."""
    found = {phase: timings.get(phase, 0.0) for phase in PHASES[:-1]}
    found |= {kernel: timings[kernel] for kernel in KERNELS if kernel in timings}
    return {**found, "other": max(0.0, seconds - sum(found.values()))}
