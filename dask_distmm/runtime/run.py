r"""The state machine of one run, without I/O: which participants must answer, which have, and what follows.

::

    planned -> voting -> running -> done
       \         \         \
        +---------+---------+----> failed

A run enters ``running`` only when every participant has voted for it, and ``done`` only when every one has
finished; one failure fails it for all. Where its ranks need nothing of each other but their earlier offers
(`Run.independent`), it continues without those that are gone while it is running, as long as any is left. Answers
that do not fit are refused with `ProtocolError` and change nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dask.utils import format_bytes, format_time

from dask_distmm.errors import ProtocolError, brief
from dask_distmm.runtime.messages import Done, Reply

# The last events of runs, which tell why a run has failed


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


# The state machine of one run, without I/O: which participants must answer, which have, and what follows


Phase = Literal["planned", "voting", "running", "done", "failed"]


class Lost(Exception):
    """Ends a run: workers or their data are gone; start again."""

    def __init__(self, reason: str, replicas: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.replicas = tuple(replicas)


class Replan(Exception):
    """Ends a run before it began: chunks are not where, or not as, the plan has them; plan again."""

    def __init__(self, reason: str, orders: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.orders = dict(orders or {})


class TaskFailed(Exception):
    """Ends a run: a function of the user's has raised an error, which only the client opens."""

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

    def report(self, address: str, share: float, now: float, received: int = 0) -> None:
        """Note which share of its work a participant has done; a share that has not grown is not progress."""
        if self.phase == "running" and address in self.participants:
            self.received[address] = max(received, self.received.get(address, 0))
        if self.phase == "running" and address in self.participants and share > self.shares.get(address, 0.0):
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
        self.phase = after
        self.answered = set()

    def __str__(self) -> str:
        return f"run {self.run_id} of {self.name} ({self.phase})"


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
        "seconds": max(answer.seconds for answer in answers.values()),
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
