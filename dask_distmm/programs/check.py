"""Runs programs without numbers: says whether they can go wrong, whatever the data are.

For all values of the flags: every list comes to its end; nothing is read that was not written, here or by the rank
that it is pulled from; names are created when they are not there, used while they are, and freed; operands are not
overwritten; what is published does not change; all ranks have a flag from rank 0. It does not know whether numbers are
right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from dask_distmm.programs.contracts import roles_of
from dask_distmm.programs.steps import (
    Buffer,
    Call,
    Drop,
    If,
    Make,
    New,
    Publish,
    Pull,
    Step,
    Store,
    flags_of,
    flatten,
)

Lists = Sequence[Sequence[Step]]


class ProgramError(AssertionError):
    """A program can go wrong."""


def all_flags(lists: Lists) -> Iterator[dict[str, bool]]:
    """Yield all values that the flags of a program may have."""
    names = sorted(set().union(*map(flags_of, lists)))
    for values in itertools.product((True, False), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


def walk(lists: Lists, flags: Mapping[str, bool]) -> Iterator[tuple[int, Step]]:
    """Yield all steps of all ranks, each when it can be taken."""
    todo = [list(flatten(steps, flags)) for steps in lists]
    at, published = [0] * len(todo), set[tuple[int, int]]()
    while any(at[rank] < len(steps) for rank, steps in enumerate(todo)):
        before = sum(at)
        for rank, steps in enumerate(todo):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                if isinstance(step, Pull) and (step.owner, step.key) not in published:
                    break
                if isinstance(step, Publish):
                    published.add((rank, step.key))
                at[rank] += 1
                yield rank, step
        if sum(at) == before:
            stuck = {rank: steps[at[rank]] for rank, steps in enumerate(todo) if at[rank] < len(steps)}
            raise ProgramError(f"no rank can go on: {stuck}")


def check(lists: Lists) -> None:
    """Raise `ProgramError` if the lists of all ranks can go wrong."""
    for flags in all_flags(lists):
        state = _State(len(lists))
        for rank, step in walk(lists, flags):
            try:
                state.take(rank, step)
            except ProgramError as error:
                raise ProgramError(f"rank {rank}, {step}, flags {flags}: {error}") from None
        left = {rank: sorted(here) for rank, here in enumerate(state.here) if here}
        _expect(not left, f"ranks leave {left}")


def peak_bytes(steps: Sequence[Step], flags: Mapping[str, bool]) -> int:
    """Return the most bytes that a rank holds beside its operands; what it has published it holds until the end."""
    live = peak = 0
    published: set[str] = set()
    for step in flatten(steps, flags):
        match step:
            case New(buffer):
                live += buffer.nbytes
            case Publish(_, buffers):
                published |= {buffer.name for buffer in buffers}
            case Drop(buffer) if buffer.name not in published and not buffer.is_operand:
                live -= buffer.nbytes
        peak = max(peak, live)
    return peak


def _expect(good: bool, what: str) -> None:
    if not good:
        raise ProgramError(what)


class _State:
    """The buffers of all ranks, as far as a walk has come."""

    def __init__(self, ranks: int) -> None:
        self.here: list[dict[str, Buffer]] = [{} for _ in range(ranks)]
        self._written: list[set[str]] = [set() for _ in range(ranks)]
        self._fixed: list[set[str]] = [set() for _ in range(ranks)]
        self._lent: dict[tuple[int, int], tuple[Buffer, ...]] = {}
        # By rank and flag, whether it came from rank 0.
        self._from_root: set[tuple[int, str]] = set()

    def take(self, rank: int, step: Step) -> None:
        """Take one step."""
        here, written, fixed = self.here[rank], self._written[rank], self._fixed[rank]
        match step:
            case New(buffer) | Make(buffer):
                _expect(buffer.name not in here, f"{buffer.name} is there already")
                here[buffer.name] = buffer
                (fixed.add if isinstance(step, Make) else fixed.discard)(buffer.name)
                (written.add if isinstance(step, Make) or step.zero else written.discard)(buffer.name)
            case Call():
                names = [buffer.name for buffer in step.arguments]
                _expect(len(set(names)) == len(names), "the same buffer twice")
                for buffer, role in roles_of(step):
                    self._has(rank, buffer, written=role != "w")
                    _expect(role == "r" or buffer.name not in fixed, f"{buffer.name} must not change")
                    written.add(buffer.name)
            case Publish(key, buffers):
                _expect((rank, key) not in self._lent, f"{key} is published twice")
                self._lent[rank, key] = buffers
                for buffer in buffers:
                    self._has(rank, buffer, written=True)
                    fixed.add(buffer.name)
            case Pull(owner, key, buffers):
                there = self._lent[owner, key]
                _expect(owner != rank, "a rank pulls from itself")
                shapes = [[(one.shape, one.dtype) for one in some] for some in (there, buffers)]
                _expect(shapes[0] == shapes[1], f"{there} is pulled as {buffers}")
                for source, buffer in zip(there, buffers, strict=True):
                    self._has(rank, buffer, written=False)
                    _expect(buffer.name not in fixed, f"{buffer.name} must not change")
                    written.add(buffer.name)
                    if owner == 0 and source.name == buffer.name:
                        self._from_root.add((rank, buffer.name))
            case If(flag):
                self._has(rank, flag, written=True)
                _expect(rank == 0 or (rank, flag.name) in self._from_root, f"{flag.name} is not from rank 0")
            case Store(buffer) | Drop(buffer):
                self._has(rank, buffer, written=isinstance(step, Store))
                del here[buffer.name]
                written.discard(buffer.name)

    def _has(self, rank: int, buffer: Buffer, *, written: bool) -> None:
        found = self.here[rank].get(buffer.name)
        _expect(found == buffer, f"{buffer} is not there, but {found}")
        _expect(not written or buffer.name in self._written[rank], f"{buffer.name} was not written")
