"""The nine kinds of steps, and the buffers that they name."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# The types of flags, and of numbers of rows: they are on the host.
FLAG, COUNT = "bool", "int32"
# The number of a message of a later turn of a loop is this many times the number of turns before it larger.
TURN = 1 << 32


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix in the memory of one rank."""

    name: str
    # Where the number of rows is not known before the run it is -1: that of the chunk `like`.
    shape: tuple[int, int]
    dtype: str
    like: str = ""
    # Whether it is in the memory of the host, whatever computes: numbers that decide what is done next.
    host: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, without rows that are not known."""
        return max(0, math.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def is_operand(self) -> bool:
        """Whether it is a chunk of an operand, which is named by the operand and its number."""
        return self.name[0] in "abgm"


@dataclasses.dataclass(frozen=True, slots=True)
class New:
    """Allocate; `zero`: filled with zeros, as sums need."""

    buffer: Buffer
    zero: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Make:
    """Take a chunk of an operand: one that is in memory here, or elsewhere, or is still to be made."""

    buffer: Buffer
    operand: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Call a kernel: all arithmetic. `arguments` are in the order of its contract."""

    kernel: str
    arguments: tuple[Buffer, ...]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Let other ranks have buffers, under a number that is the same on all ranks; they don't change any more."""

    key: int
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
    """Copy what another rank publishes under a number, now or later: one message."""

    owner: int
    key: int
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class If:
    """Go on by one list or the other: all ranks have the flag from rank 0."""

    flag: Buffer
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """Repeat a list as long as a flag is set that all ranks have from rank 0, up to a limit of turns.

    In each turn all ranks wait for each other. So at the end of a turn nobody needs what was published before it.
    """

    flag: Buffer
    body: tuple[Step, ...]
    most: int
    # How many turns are expected: for the cost model.
    expected: int


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """The start or the end of a turn of a loop, where lists are flat."""

    loop: Loop
    starts: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """Hand a buffer over as a chunk of an output; it is not in use any more."""

    buffer: Buffer
    output: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Free a buffer."""

    buffer: Buffer


Step = New | Make | Call | Publish | Pull | If | Loop | Store | Drop
FlatStep = Step | Turn


def flatten(steps: Sequence[Step], flags: Mapping[str, bool], turns: int = 1) -> Iterator[FlatStep]:
    """Yield the steps that are run with certain values of the flags; True for those that are not named.

    A loop whose flag is True has `turns` turns, others have none.
    """
    yield from _flat(steps, flags, turns, itertools.count(1), 0)


def _flat(
    steps: Sequence[Step], flags: Mapping[str, bool], turns: int, before: Iterator[int], offset: int
) -> Iterator[FlatStep]:
    for step in steps:
        if isinstance(step, Publish | Pull) and offset:
            yield dataclasses.replace(step, key=step.key + offset)
            continue
        yield step
        entered = isinstance(step, If | Loop) and flags.get(step.flag.name, True)
        if isinstance(step, If):
            yield from _flat(step.then if entered else step.otherwise, flags, turns, before, offset)
        elif isinstance(step, Loop):
            for _ in range(min(turns, step.most) if entered else 0):
                yield Turn(step, starts=True)
                yield from _flat(step.body, flags, turns, before, next(before) * TURN)
                yield Turn(step, starts=False)


def flags_of(steps: Sequence[Step]) -> set[str]:
    """Return the names of all flags of a list."""
    found: set[str] = set()
    for step in steps:
        if isinstance(step, If):
            found |= {step.flag.name} | flags_of(step.then) | flags_of(step.otherwise)
        elif isinstance(step, Loop):
            found |= {step.flag.name} | flags_of(step.body)
    return found
