"""Seconds, bytes and passes of a program: its lists, run without numbers and with a clock.

What a kernel takes follows from its contract, what a message takes from its buffers. No builder has a formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dask_distmm.programs.check import Lists, walk
from dask_distmm.programs.contracts import flops_of
from dask_distmm.programs.steps import Call, FlatStep, If, Make, Publish, Pull, Step, Turn, flatten

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


# A rank, the kernel that it calls or "wait", and the seconds at which that begins and ends.
Span = tuple[int, str, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What the calls of one kernel between two messages take, on rank 0."""

    kernel: str
    seconds: float
    flops: float
    # How many times A is read: its chunks on this rank, by those calls that read them first.
    passes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What a program takes."""

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
    """Return what a program takes, with these values of its flags; by default as where all is well-conditioned.

    One turn of a loop takes as long as all that are expected. `spans` gets what each rank does when.
    """
    flags, spans = flags or {}, [] if spans is None else spans
    now, waited = [0.0] * len(lists), [0.0] * len(lists)
    published: dict[tuple[int, int], float] = {}
    moved = messages = 0
    flops, turns = 0.0, [1] * len(lists)
    for rank, step in walk(lists, flags):
        times = turns[rank] = _turns(turns[rank], step)
        match step:
            case Call():
                spans.append((rank, step.kernel, now[rank], now[rank] + times * _seconds(step, rates)))
                now[rank] = spans[-1][3]
                flops += times * flops_of(step)
            case Publish(key):
                published[rank, key] = now[rank]
            case Pull(owner, key, buffers):
                size = sum(buffer.nbytes for buffer in buffers)
                ready = max(now[rank], published[owner, key]) + times * (rates.latency + size / rates.bandwidth)
                spans.append((rank, "wait", now[rank], ready))
                waited[rank] += ready - now[rank]
                now[rank] = ready
                moved, messages = moved + times * size, messages + times
    lines = _lines(lists[0], rates, flags)
    return Cost(max(now), max(waited), flops, messages, moved, sum(line.passes for line in lines), lines)


def _turns(turns: int, step: FlatStep) -> int:
    """Return how many times the steps after a step are done, if the step is done `turns` times."""
    if not isinstance(step, Turn):
        return turns
    return turns * step.loop.expected if step.starts else turns // step.loop.expected


def _seconds(call: Call, rates: Rates) -> float:
    touched = sum(buffer.nbytes for buffer in call.arguments)
    return max(flops_of(call) / (rates.flops * _SHARES.get(call.kernel, 1.0)), touched / rates.memory)


def _lines(steps: Sequence[Step], rates: Rates, flags: Mapping[str, bool]) -> tuple[Line, ...]:
    """Return the calls of a rank, those of one kernel on all chunks together.

    A chunk is read once by all calls between two messages.
    """
    chunks = {step.buffer.name for step in steps if isinstance(step, Make) and step.operand == "a"}
    lines: dict[tuple[int, str], Line] = {}
    stage, seen, times = 0, set[str](), 1
    for step in flatten(steps, flags):
        times = _turns(times, step)
        if isinstance(step, Call):
            new = {one.name for one in step.arguments if one.name.startswith("a.")} - seen
            seen |= new
            line = lines.get((stage, step.kernel), Line(step.kernel, 0.0, 0.0, 0.0))
            passes = line.passes + times * len(new) / max(1, len(chunks))
            seconds, work = line.seconds + times * _seconds(step, rates), line.flops + times * flops_of(step)
            lines[stage, step.kernel] = Line(step.kernel, seconds, work, passes)
        elif isinstance(step, Publish | Pull | If | Turn):
            stage, seen = stage + 1, set()
    return tuple(lines.values())
