"""Seconds, bytes and passes of a program: its lists, run without numbers and with a clock.

What a kernel takes follows from its contract, what a message takes from its buffers. No builder has a formula.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dask_distmm.programs.steps import (
    Buffer,
    Call,
    Deliver,
    Drop,
    FlatStep,
    If,
    Key,
    Load,
    Loop,
    LoopIteration,
    New,
    Publish,
    Pull,
    Reserve,
    Step,
    Store,
    Take,
    View,
    flatten,
    flops_of,
    has_messages,
    meeting,
)

Lists = Sequence[Sequence[Step]]
# The first turn of a loop has what was there before, the third one sees what the second one has freed.
_TURNS = 3
# Steps that wait for messages.
_AWAITING = Pull, Deliver


class ProgramError(AssertionError):
    """A program can go wrong."""


def walk(lists: Lists, flags: Mapping[str, bool], turns: int = 1) -> Iterator[tuple[int, FlatStep]]:
    """Yield all steps of all ranks, each when it can be taken."""
    todo = [list(flatten(steps, flags, turns)) for steps in lists]
    at, published = [0] * len(todo), set[tuple[int, Key]]()
    # Of each step in which all ranks meet, by its number, those that ranks have come to; how many each rank has left.
    met, left = collections.defaultdict[int, dict[int, Any]](dict), [0] * len(todo)
    while any(at[rank] < len(steps) for rank, steps in enumerate(todo)):
        before = sum(at)
        for rank, steps in enumerate(todo):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                if isinstance(step, _AWAITING) and not published.issuperset(_awaited(step, len(todo))):
                    break
                if isinstance(step, Publish):
                    published.add((rank, step.key))
                if (what := meeting(step)) is not None:
                    here = met[left[rank]]
                    here[rank] = what
                    if len(here) < len(todo):
                        break
                    if len({*here.values()}) > 1:
                        raise ProgramError(f"ranks meet in different steps: {here}")
                    left[rank] += 1
                at[rank] += 1
                yield rank, step
        if sum(at) == before:
            stuck = {rank: steps[at[rank]] for rank, steps in enumerate(todo) if at[rank] < len(steps)}
            raise ProgramError(f"no rank can go on: {stuck}")


def _awaited(step: Pull | Deliver, ranks: int) -> list[tuple[int, Key]]:
    """Return the messages that a step waits for, each with the rank that publishes it."""
    if isinstance(step, Pull):
        return [(step.owner, step.key)]
    return [(rank, key) for rank in range(ranks) for key in step.keys]


def peak_bytes(steps: Sequence[Step]) -> int:
    """Return the most bytes that a rank holds beside its operands, whatever the flags are.

    What it has published it holds until the end of the next turn of a loop, or of the run.
    """
    return _holding(steps, _Held()).peak


@dataclasses.dataclass
class _Held:
    """What a rank holds: bytes, the names that are published, and the bytes of those that are dropped, by number."""

    live: int = 0
    peak: int = 0
    # Chunks of operands.
    operands: set[str] = dataclasses.field(default_factory=set)
    published: set[str] = dataclasses.field(default_factory=set)
    kept: dict[int, int] = dataclasses.field(default_factory=dict)
    count: int = 0

    def copy(self) -> _Held:
        """Return an independent copy."""
        return dataclasses.replace(
            self, operands=self.operands.copy(), published=self.published.copy(), kept=self.kept.copy()
        )


def _holding(steps: Sequence[Step], held: _Held) -> _Held:
    for step in steps:
        match step:
            case New(buffer) | Reserve(buffer):
                held.live += buffer.nbytes
            case Load(places):
                held.live += sum(place.nbytes for place in places if isinstance(place, Buffer))
            case Take(buffer):
                held.operands.add(buffer.name)
            case Call(makes=buffers) | Pull(buffers=buffers, taken=True):
                held.live += sum(buffer.nbytes for buffer in buffers)
            case Publish(_, buffers, copied=True):
                held.count += 1
                held.kept[held.count] = sum(buffer.nbytes for buffer in buffers)
                held.live += held.kept[held.count]
            case Publish(_, buffers):
                held.published |= {buffer.name for buffer in buffers}
            case Drop(buffer) if buffer.name in held.published:
                held.published.remove(buffer.name)
                held.count += 1
                held.kept[held.count] = buffer.nbytes
            case Drop(buffer) if buffer.name not in held.operands:
                held.live -= buffer.nbytes
            case Deliver() | Store(View()):
                held.live += (step.buffer if isinstance(step, Store) else step).nbytes
            case If(_, then, otherwise):
                held = _more([_holding(branch, held.copy()) for branch in (then, otherwise)])
            case Loop(_, body, most):
                none = held.copy()
                for _ in range(min(_TURNS, most)):
                    before = list(held.kept) if has_messages(body) else []
                    held = _holding(body, held)
                    held.live -= sum(held.kept.pop(number, 0) for number in before)
                held = _more([none, held])
        held.peak = max(held.peak, held.live)
    return held


def _more(ways: Sequence[_Held]) -> _Held:
    """Return the maximum of what a rank holds after each of several branches."""
    longest = max(ways, key=lambda way: way.live)
    longest.peak = max(way.peak for way in ways)
    return longest


# Seconds, bytes and passes of a program: its lists, run without numbers and with a clock


# The kernels that multiply sparse rows as they are.
_OF_SPARSE = ("times", "adjoint_times", "evaluate")
# The share of a product's rate at which kernels run; 1 for those that are not named.
_SHARES = {
    "reflect": 0.2,
    "factor": 0.15,
    "stack": 0.2,
    "orthonormalize": 0.15,
    "singular_values": 0.15,
    "singular_vectors": 0.3,
    "principal": 0.3,
    "divide": 0.7,
    "quotient_and_gram": 0.7,
    "gram_of_quotient": 0.7,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """The constants of a machine."""

    # Operations a second of one rank; bytes a second of a kernel, and of a message; seconds of a message.
    flops: float
    memory: float
    bandwidth: float
    latency: float
    # Of sparse operands: name, and bytes relative to those of a dense one.
    shares: tuple[tuple[str, float], ...] = ()


# A rank, the kernel that it calls or "wait", and the seconds at which that begins and ends.
Span = tuple[int, str, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one kernel's calls between two messages, on rank 0."""

    kernel: str
    seconds: float
    flops: float
    # Chunks of A on this rank that these calls read, if they read them first.
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a program."""

    seconds: float
    # Seconds of messages, of the rank that waits longest.
    waiting: float
    flops: float
    messages: int
    bytes_moved: int
    # How many times A is read.
    passes: float
    lines: tuple[Line, ...]


def cost(lists: Lists, rates: Rates, flags: Mapping[str, bool] | None = None, spans: list[Span] | None = None) -> Cost:
    """Return the cost of a program for these values of its flags; by default for a well-conditioned matrix.

    One turn of a loop takes as long as all that are expected. `spans` gets what each rank does when.
    """
    flags, spans, shares = flags or {}, [] if spans is None else spans, dict(rates.shares)
    now, waited = [0.0] * len(lists), [0.0] * len(lists)
    published: dict[tuple[int, Key], float] = {}
    moved = messages = 0
    flops, turns = 0.0, [1] * len(lists)
    # Of rank 0: its calls of one kernel on all chunks between two messages, which read a chunk once, and these chunks.
    lines: dict[tuple[int, str], Line] = {}
    stage, seen = 0, set[str]()
    for rank, step in walk(lists, flags):
        if isinstance(step, LoopIteration):
            expected = step.loop.expected
            turns[rank] = turns[rank] * expected if step.starts else turns[rank] // expected
        times = turns[rank]
        if rank == 0 and isinstance(step, Publish | Pull | If | LoopIteration):
            stage, seen = stage + 1, set()
        match step:
            case Call(kernel):
                sizes = [(argument.nbytes, shares.get(argument.role, 1.0)) for argument in step.arguments]
                filled = min((share for _, share in sizes), default=1.0) if kernel in _OF_SPARSE else 1.0
                work, touched = filled * flops_of(step), sum(size * share for size, share in sizes)
                seconds = times * max(work / (rates.flops * _SHARES.get(kernel, 1.0)), touched / rates.memory)
                work *= times
                spans.append((rank, kernel, now[rank], now[rank] + seconds))
                now[rank] += seconds
                flops += work
                if rank == 0:
                    new = {argument.name for argument in step.arguments if argument.role == "a"} - seen
                    seen |= new
                    line = lines.get((stage, kernel), Line(kernel, 0.0, 0.0, 0))
                    lines[stage, kernel] = Line(
                        kernel, line.seconds + seconds, line.flops + work, line.reads + times * len(new)
                    )
            case Publish(key):
                published[rank, key] = now[rank]
            case Pull() | Deliver() if sources := [x for x in _awaited(step, len(lists)) if x[0] != rank]:
                # Block columns are distributed evenly.
                size = step.nbytes * (len(lists) - 1) // len(lists) if isinstance(step, Deliver) else step.nbytes
                there = max(now[rank], *(published[message] for message in sources))
                ready = there + times * (rates.latency + size / rates.bandwidth)
                spans.append((rank, "wait", now[rank], ready))
                waited[rank] += ready - now[rank]
                now[rank] = ready
                moved, messages = moved + times * size, messages + times * len(sources)
    chunks = {step.buffer.name for step in lists[0] if isinstance(step, Take) and step.operand == "a"}
    passes = sum(line.reads for line in lines.values()) / max(1, len(chunks))
    return Cost(max(now), max(waited), flops, messages, moved, passes, tuple(lines.values()))
