r"""The state machine of one run, without I/O: which participants must answer, which have, and what follows.

::

    planned -> voting -> running -> done
       \         \         \
        +---------+---------+----> failed

A run enters ``running`` only when every participant has voted for it, and ``done`` only when every one has
finished; one failure fails it for all. Where its ranks need nothing of each other but their earlier offers
(`Run.independent`), it continues without those that are gone while it is running, as long as any is left. Answers
that do not fit are refused with `ProtocolError` and change nothing.

Records tell the outcome of runs; they are made from the events that the scheduler's plugin logs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from dask.utils import format_bytes, format_time
from distributed.metrics import time

from dask_distmm.comms.base import Comm
from dask_distmm.engines.base import ChunkKey
from dask_distmm.errors import EngineError, ProtocolError, brief
from dask_distmm.planning import Placement
from dask_distmm.runtime.keys import barrier_key, barrier_name, wave_name, wave_of
from dask_distmm.runtime.messages import Done, ProgressLine, Reply

if TYPE_CHECKING:
    from distributed import Scheduler


# The last events of runs, which tell why a run has failed


class History:
    """The last events of runs, oldest first."""

    def __init__(self, most: int = 1000) -> None:
        self._events: collections.deque[tuple[float, int, str]] = collections.deque(maxlen=most)

    def note(self, run_id: int, what: str) -> None:
        """Add an event of a run, now."""
        self._events.append((time(), run_id, brief(what)))

    def brief(self, run_id: int) -> str:
        """Return a run's events in one line: each with the seconds since the first of them."""
        events = [(when, what) for when, run, what in list(self._events) if run == run_id]
        return ", ".join(f"{what} at {when - events[0][0]:.2f} s" for when, what in events)

    def _to_dict(self, *, exclude: Any = ()) -> list[dict[str, Any]]:
        """Return all events; Dask calls this for ``Client.dump_cluster_state()``."""
        return [{"time": when, "run": run, "what": what} for when, run, what in list(self._events)]


# The state machine of one run, without I/O: which participants must answer, which have, and what follows


Phase = Literal["planned", "voting", "running", "done", "failed"]


class Lost(Exception):
    """Aborts a run whose workers or data are lost, or have `moved` before it has begun; it starts again."""

    def __init__(
        self, reason: str, *, replicas: Sequence[str] = (), moved: bool = False, orders: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.replicas, self.moved, self.orders = tuple(replicas), moved, orders or {}


class TaskFailed(Exception):
    """Aborts a run as a user's function has raised an error, which only the client unpickles."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.message)
        self.reply = reply


@dataclasses.dataclass(slots=True)
class Run:
    """One attempt to run one multiply."""

    # Number of the run; rises in the order in which runs take place.
    run_id: int
    # Name of the multiply (of its result array).
    name: str
    # The barrier task that waits for the run.
    key: str
    # Addresses of all workers that take part.
    participants: frozenset[str] = frozenset()
    phase: Phase = "planned"
    answered: set[str] = dataclasses.field(default_factory=set)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    failed_in: Phase | None = None
    released: bool = False
    # Participants that did not answer in time; nobody waits for them again.
    unresponsive: set[str] = dataclasses.field(default_factory=set)
    # The share of its work that each participant has said is done, and when the last of them had got any further.
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    moved: float = math.inf
    # Bytes of matrices that each participant has said have arrived, and how many the plan expects in all; 0 where a
    # library moves some of them on its own, which nobody counts.
    received: dict[str, int] = dataclasses.field(default_factory=dict)
    expected_bytes: int = 0
    # Turns of the outermost loop that are done, of how many (0 where that is not known), and how long the others take.
    turns: int = 0
    turns_in_all: int = 0
    seconds_left: float = math.nan
    # When the scheduler heard of its first turns, and how many these were.
    first_turns: tuple[float, int] = (0.0, 0)
    # Whether the others finish their parts when some are gone, and which are.
    independent: bool = False
    lost: set[str] = dataclasses.field(default_factory=set)
    # Keys of the chunks that may go when all ranks have read them, the ranks that have not, and whether they went.
    donated: Sequence[Any] = ()
    reading: set[str] = dataclasses.field(default_factory=set)
    donation_done: bool = False

    @property
    def live(self) -> bool:
        """Whether the run is neither done nor failed."""
        return self.phase not in ("done", "failed")

    @property
    def waiting_for(self) -> frozenset[str]:
        """Participants that are still there and have not answered in this phase."""
        return self.participants - self.answered - self.lost

    def begin_vote(self) -> None:
        """Go from ``planned`` to ``voting``."""
        self._advance("planned", "voting")

    def begin_running(self, now: float) -> None:
        """Go from ``voting`` to ``running`` at the time `now` (seconds); all must have voted."""
        if self.phase == "voting" and self.waiting_for:
            raise ProtocolError(f"{self} can't start: no vote from {sorted(self.waiting_for)}")
        self._advance("voting", "running")
        self.moved = now

    def answer(self, address: str, run_id: int) -> None:
        """Note that a participant has voted, or has finished; the last to finish makes the run ``done``."""
        if run_id != self.run_id:
            raise ProtocolError(f"an answer for run {run_id} reached {self}")
        if address not in self.participants:
            raise ProtocolError(f"{address} takes no part in {self}")
        if self.phase not in ("voting", "running"):
            raise ProtocolError(f"{address} answered to {self}, which waits for nobody")
        if address in self.lost:
            raise ProtocolError(f"{address} answered to {self}, which continues without it")
        if address in self.answered:
            raise ProtocolError(f"{address} answered twice in {self}")
        self.answered.add(address)
        if self.phase == "running" and not self.waiting_for:
            self.phase = "done"

    def report(
        self, address: str, share: float, now: float, received: int = 0, turns: int = 0, turns_in_all: int = 0
    ) -> None:
        """Note which share of its work a participant has done; a share that has not grown is not progress."""
        if self.phase != "running" or address not in self.participants:
            return
        if turns:
            if turns < self.turns or turns_in_all != self.turns_in_all or not self.turns:
                self.first_turns = now, turns
            began, first = self.first_turns
            self.turns, self.turns_in_all = turns, turns_in_all
            has_pace = turns > first and turns_in_all >= turns
            self.seconds_left = (now - began) / (turns - first) * (turns_in_all - turns) if has_pace else math.nan
        self.received[address] = max(received, self.received.get(address, 0))
        if share > self.shares.get(address, 0.0):
            self.shares[address] = share
            self.moved = now

    def gathered(self, address: str) -> bool:
        """Note that a rank has read all it needs of the operands; return whether chunks may go now."""
        if self.phase != "running" or self.donation_done or not self.donated:
            return False
        self.reading.discard(address)
        self.donation_done = not self.reading
        return self.donation_done

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices that have arrived, as far as is known."""
        return sum(self.received.values())

    @property
    def share(self) -> float:
        """The share of all the work that is done, as far as is known."""
        if self.phase != "running":
            return 1.0 if self.phase == "done" else 0.0
        there = self.participants - self.lost
        return sum(1.0 if a in self.answered else self.shares.get(a, 0.0) for a in there) / len(there)

    def silent(self, seen: Mapping[str, float], now: float, limit: float) -> list[str]:
        """Return the participants that hold up a run which makes no progress."""
        if self.phase != "running" or now - self.moved < limit:
            return []
        there = self.participants - self.lost
        return sorted(address for address in there if now - seen.get(address, now) >= limit)

    def fail(self, failures: dict[str, str], *, released: bool = False) -> None:
        """End a live run with reasons by address, or as no task waits for it. A run that is over stays as it is."""
        if not self.live:
            return
        self.failed_in = self.phase
        self.phase = "failed"
        self.failures = dict(failures)
        self.released = released

    def lose(self, addresses: Iterable[str]) -> bool:
        """Fail the run if it is live and needs a worker that is gone, or go on without it."""
        lost = (self.participants & set(addresses)) - self.lost
        if not self.live or not lost:
            return False
        if self.independent and self.phase == "running" and self.participants - self.lost - lost:
            self.lost |= lost
            if not self.waiting_for:
                self.phase = "done"
            return True
        self.fail(dict.fromkeys(sorted(lost), "the worker has left the cluster"))
        return True

    def _advance(self, before: Phase, after: Phase) -> None:
        if self.phase != before:
            raise ProtocolError(f"{self} can't go to {after}")
        self.phase, self.answered = after, set()

    def __str__(self) -> str:
        return f"run {self.run_id} of {self.name} ({self.phase})"


# A run as a worker has it


@dataclasses.dataclass(eq=False, slots=True)
class WorkerRun:
    """A run on one worker, which is participant `me` of it."""

    run_id: int
    plan: Placement
    me: int
    comm: Comm
    job: Any = None
    # While the job is at work, the share of it that is "done". The job notes it here, as a reference to its run would
    # keep the memory of both until Python looks for circles.
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    # Keys of the chunks in whose memory the job makes D, and of chunks of D of which Dask's scheduler has not heard.
    claimed: list[Any] = dataclasses.field(default_factory=list)
    placed: list[Any] = dataclasses.field(default_factory=list)
    # Chunks of the matrices that are to be on all workers; others may ask for them from when they are ready.
    shared: dict[ChunkKey, Any] = dataclasses.field(default_factory=dict)
    ready: Future[None] = dataclasses.field(default_factory=Future)
    over: bool = False

    def raise_if_over(self) -> None:
        """Raise if the run was ended here."""
        if self.over:
            raise EngineError(f"run {self.run_id} was ended")

    def end(self, error: BaseException) -> None:
        """Hand out nothing more: the run is over."""
        self.over = True
        if not self.ready.done():
            self.ready.set_exception(error)


def raise_if_ended(run: Run) -> None:
    """Raise `Lost` if the run was ended from outside."""
    if run.phase == "failed":
        reasons = "; ".join(f"{address}: {reason}" for address, reason in run.failures.items())
        raise Lost(reasons)


def summarize(answers: Mapping[str, Done]) -> dict[str, Any]:
    """Return the figures of a run, or of one participant's side of it, from the answers of participants by address."""
    timings: dict[str, float] = {}
    for answer in answers.values():
        for name, value in answer.timings.items():
            timings[name] = max(value, timings.get(name, 0.0))
    return {
        # In all, and of each phase by name: the longest of several.
        "seconds": max((answer.seconds for answer in answers.values()), default=0.0),
        "timings": timings,
        # Of matrices that have arrived from other participants, but for those that a library moves on its own.
        "received_bytes": sum(answer.received_bytes for answer in answers.values()),
        # Most bytes that participants held, of those that count.
        "held_bytes": {address: answer.held_bytes for address, answer in answers.items() if answer.held_bytes},
        # Of each participant that had work of its own.
        "ranks": {a: {"seconds": x.seconds, "timings": dict(x.timings)} for a, x in answers.items() if x.timings},
    }


def in_short(figures: Mapping[str, Any]) -> str:
    """Return the figures of a run in one line."""
    phases = ", ".join(f"{name} {format_time(value)}" for name, value in figures["timings"].items())
    received = format_bytes(figures["received_bytes"])
    return f"{format_time(figures['seconds'])}{phases and f' ({phases})'}; {received} received"


# Runs now and before: how far multiplies are, and what has become of the last ones


_PHASES = {"planned": "waiting", "voting": "voting", "running": "multiplying"}


def find_names(scheduler: Scheduler, keys: Iterable[Any]) -> list[str]:
    """Return the names of the multiplies that these tasks need, first those that others wait for.

    Of the waves of a product it is the product's.
    """
    seen: set[Any] = set()
    names: list[str] = []
    todo = [ts for key in keys if (ts := scheduler.tasks.get(key)) is not None]
    while todo:
        ts = todo.pop()
        if ts in seen:
            continue
        seen.add(ts)
        if (name := barrier_name(ts.key)) is not None:
            wave = wave_of(name)
            names.append(name if wave is None else wave[0])
        todo.extend(ts.dependencies)
    return list(dict.fromkeys(names[::-1]))


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
        note = turns_in_words(run)
        return ProgressLine(name, phase, run.share, run.run_id, run.received_bytes, run.expected_bytes, note)
    last = (record.run_id, record.received_bytes) if record is not None else ()
    if record is not None and record.outcome == "failed":
        return ProgressLine(name, "failed", record.share, *last)
    barrier = scheduler.tasks.get(barrier_key(name))
    if barrier is not None and barrier.state not in ("released", "forgotten"):
        left = len(barrier.waiting_on or ())
        return ProgressLine(name, "reading", 1 - left / len(barrier.dependencies) if barrier.dependencies else 1.0)
    return ProgressLine(name, "done", 1.0, *last)


def turns_in_words(run: Run | Record) -> str:
    """Return the progress of a run's outermost loop as text; empty without a loop."""
    if not run.turns:
        return ""
    words = f"turn {run.turns}" + (f" of {run.turns_in_all}" if run.turns_in_all else "")
    return words + (f", {format_time(run.seconds_left)} left" if run.seconds_left > 0 else "")


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


Outcome = Literal["running", "done", "restarted", "failed", "released"]

# How a run has ended, by the event.
_OUTCOMES: dict[str, Outcome] = {"done": "done", "restart": "restarted", "failed": "failed", "released": "released"}

# The phases that engines time, in their order; "other" is the rest of a rank's time, "compute" all of a factorization
# or a program where calls return before they are done. The kernels of a program, as "gram()", are phases, too.
PHASES = (
    "gate", "gather", "redistribute", "multiply", "panel", "update", "compute", "wait", "deliver", "replicate", "other",
)  # fmt: skip


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
    # Of its outermost loop as `Run` has it.
    turns: int = 0
    turns_in_all: int = 0
    seconds_left: float = float("nan")
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


_FIGURES = {field.name for field in dataclasses.fields(Record)} - {"name", "ranks"}


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
        self.ended = dict.fromkeys(_OUTCOMES.values(), 0)
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
        action = event["action"]
        # Figures of an event have the names of a record's; of a run that is done, ranks have figures of their own.
        for name in _FIGURES.intersection(event):
            setattr(record, name, event[name])
        if action == "start":
            record.started, record.ranks = now, tuple(event["ranks"])
        elif action == "done":
            record.share = 1.0
            record.phases = {address: by_phase(**timings) for address, timings in event["ranks"].items()}
        if (outcome := _OUTCOMES.get(action)) is not None:
            self._end(record, outcome)

    def expect(self, name: str) -> None:
        """Count a run that is to come, if it is a wave of a product."""
        if (wave := wave_of(name)) is not None:
            waves = self.waves.setdefault(wave[0], Waves())
            if waves.wanted == waves.done:  # an earlier graph's
                waves.wanted, waves.done = set(), set()
            waves.wanted.add(wave[1])
            waves.done.discard(wave[1])
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

    def _end(self, record: Record, outcome: Outcome) -> None:
        record.outcome = outcome
        self.ended[outcome] += 1
        if outcome == "done":
            self.flops += record.flops
            self.received_bytes += record.received_bytes
            for phase in dict.fromkeys(itertools.chain(PHASES, *record.phases.values())):
                slowest = max((phases.get(phase, 0.0) for phases in record.phases.values()), default=0.0)
                self.seconds[phase] = self.seconds.get(phase, 0.0) + slowest

    def of(self, name: str) -> Record | None:
        """Return the last run of a multiply."""
        return next((record for record in reversed(self._runs.values()) if record.name == name), None)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)


def by_phase(seconds: float, timings: Mapping[str, float]) -> dict[str, float]:
    """Return a rank's seconds by phase; the rest of the time is "other"."""
    phases = {phase: timings.get(phase, 0.0) for phase in PHASES[:-1]}
    phases |= {phase: timings[phase] for phase in sorted(timings) if phase.endswith("()")}
    return {**phases, "other": max(0.0, seconds - sum(phases.values()))}
