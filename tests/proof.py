"""Runs programs without numbers: says whether they can go wrong, whatever the data are.

For all values of the flags: every list comes to its end; nothing is read that was not written, here or by the rank
that it is pulled from; names are created when they are not there, used while they are, and freed; operands are not
overwritten; what is published does not change; steps of two lanes that may run at the same time do not write what the
other one reads or writes; all ranks decide alike; what a loop has published is pulled before it is freed. It does not
know whether numbers are right.

Ranks decide alike by flags that are *replicated*, the same bits on all of them: copies of one rank's, or what the same
calls of exact kernels make of replicated values. So each value has a number, and equal numbers mean equal bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_distmm.planning.groups import chunk_blocks_of
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.programs.check import _TURNS, Lists, ProgramError, walk
from dask_distmm.programs.steps import (
    CONTRACTS,
    LASTING,
    Box,
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
    crossing,
    has_messages,
    roles_of,
)


def flags_of(steps: Sequence[Step]) -> set[str]:
    """Return the names of all flags in a list of steps."""
    flags: set[str] = set()
    for step in steps:
        if isinstance(step, If):
            flags |= {step.flag.name} | flags_of(step.then) | flags_of(step.otherwise)
        elif isinstance(step, Loop):
            flags |= {step.flag.name} | flags_of(step.body)
    return flags


def all_flags(lists: Lists) -> Iterator[dict[str, bool]]:
    """Yield all values that the flags of a program may have."""
    names = sorted(set().union(*map(flags_of, lists)))
    for values in itertools.product((True, False), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


def check(lists: Lists) -> None:
    """Raise `ProgramError` if the lists of all ranks can go wrong."""
    for flags in all_flags(lists):
        state = _State(len(lists))
        for rank, step in walk(lists, flags, _TURNS):
            try:
                state.take(rank, step)
            except ProgramError as error:
                raise ProgramError(f"rank {rank}, {step}, flags {flags}: {error}") from None
        left = {rank: sorted(here) for rank, here in enumerate(state.here) if here}
        _expect(not left, f"ranks leave {left}")


def moved_bytes(plan: Any, rank: int, steps: Sequence[Step]) -> int:
    """Return the bytes that a rank of a product, or of a factorization, gets from other workers by steps."""
    moved, near = 0, (plan.ranks[rank], EVERYWHERE)
    for step in steps:
        if isinstance(step, Pull):
            moved += step.nbytes
        elif isinstance(step, Load) and not step.rects:
            (name,) = step.operands
            elements = plan.gathered(name).traffic(plan.where[name], len(plan.participants))[:, rank]
            moved += int(np.delete(elements, plan.ranks[rank]).sum()) * plan.problem.compute_type.itemsize
        for key in step.keys if isinstance(step, Deliver) else ():
            output = plan.problem.outputs[key.number]
            elements = plan.delivered(output.name).traffic()[:, plan.owned(output.name, rank)]
            moved += int(np.delete(elements, rank, axis=0).sum()) * output.itemsize
        for _, name, rect in step if isinstance(step, Load) and step.rects else ():
            matrix = plan.problem[name]
            for block in chunk_blocks_of(matrix.chunks, 0, rect):
                if plan.where[name][block.chunk] not in near:
                    moved += block.rows * block.cols * matrix.itemsize
    return moved


def _expect(good: bool, what: str) -> None:
    if not good:
        raise ProgramError(what)


def _overlap(a: Buffer | View, b: Buffer | View) -> bool:
    return a.name == b.name and crossing(a.box, b.box)


class _State:
    """The buffers of all ranks during a walk."""

    def __init__(self, ranks: int) -> None:
        self.here: list[dict[str, Buffer]] = [{} for _ in range(ranks)]
        self._written: list[set[str]] = [set() for _ in range(ranks)]
        # The rectangles of each that must not change any more.
        # With the key under which one rank gets it, after which it may.
        self._fixed: list[dict[str, list[tuple[Box, Key | None]]]] = [{} for _ in range(ranks)]
        self._lent: dict[tuple[int, Key], list[tuple[Buffer | View, int]]] = {}
        # What each rank knows of the others: how many of its steps each has done at least. As of the moment of
        # publishing; and by rank and key the steps by which it was pulled.
        self._known = [[0] * ranks for _ in range(ranks)]
        self._known_then: dict[tuple[int, Key], list[int]] = {}
        self._pulled: dict[tuple[int, Key], list[tuple[int, int]]] = {}
        # What each rank has published and not freed, and how much of that at the starts of turns.
        self._held: list[list[Key]] = [[] for _ in range(ranks)]
        self._before: list[list[int]] = [[] for _ in range(ranks)]
        # The numbers of values: of each rank's buffers by name, and by what they are made of.
        self._value: list[dict[str, int]] = [{} for _ in range(ranks)]
        self._numbers, self._made = itertools.count(), dict[tuple[Any, ...], int]()
        # By rank and queue, of steps ahead or of the others: places that its steps read, or write, and that the other
        # queue has not waited for.
        self._beside = [{ahead: list[tuple[Buffer | View, bool]]() for ahead in (False, True)} for _ in range(ranks)]
        # The values of the flags by which each rank has gone on.
        self._decided: list[list[int]] = [[] for _ in range(ranks)]

    def take(self, rank: int, step: FlatStep) -> None:
        """Take one step."""
        here, written, fixed = self.here[rank], self._written[rank], self._fixed[rank]
        self._known[rank][rank] += 1
        match step:
            case New(target, zero):
                self._begin(rank, target, written=zero)
                self._set(rank, target, self._number("zeros", target.shape) if zero else next(self._numbers))
            case Load(places, by=by):
                for scale in by:
                    self._has(rank, scale, written=True)
                for place in places:
                    if isinstance(place, Buffer):
                        self._begin(rank, place, written=False)
                    self._has(rank, place, written=False)
                    self._change(rank, place)
                    self._set(rank, place, next(self._numbers))
            case Reserve(target):
                self._begin(rank, target, written=False)
            case Take(target, donated=donated):
                self._begin(rank, target, written=True)
                if not donated:
                    fixed[target.name] = [(target.box, None)]
            case Call():
                changed = [x for x, role in roles_of(step) if role != "r"]
                for buffer, role in roles_of(step):
                    once = sum(map(functools.partial(_overlap, buffer), step.arguments)) == 1
                    _expect(role == "r" or once, f"{buffer.name} is written and given twice")
                    self._has(rank, buffer, written=role != "w")
                made_of = self._made_of(rank, step)
                for buffer in changed:
                    self._change(rank, buffer)
                for buffer in step.makes:
                    self._begin(rank, buffer, written=True)
                for index, buffer in enumerate((*changed, *step.makes)):
                    self._set(rank, buffer, self._number(index, *made_of))
            case Publish(key, buffers, copied, once=once):
                _expect((rank, key) not in self._lent, f"{key} is published twice")
                self._known_then[rank, key] = list(self._known[rank])
                self._held[rank].append(key)
                for buffer in buffers:
                    self._has(rank, buffer, written=True)
                    if not copied:
                        fixed.setdefault(buffer.name, []).append((buffer.box, key if once else None))
                self._lent[rank, key] = [(x, self._value_of(rank, x)) for x in buffers]
            case Pull(owner, key, buffers, taken, op):
                there = self._lent[owner, key]
                _expect(owner != rank, "a rank pulls from itself")
                _expect(key in self._held[owner], f"{key} was freed before")
                self._known[rank] = list(map(max, self._known[rank], self._known_then[owner, key]))
                self._pulled.setdefault((owner, key), []).append((rank, self._known[rank][rank]))
                kinds = [(source.shape, source.dtype) for source, _ in there]
                _expect(kinds == [(x.shape, x.dtype) for x in buffers], f"{kinds} are pulled as {buffers}")
                for buffer, (_, value) in zip(buffers, there, strict=True):
                    if taken:
                        self._begin(rank, buffer, written=True)
                    self._has(rank, buffer, written=bool(op))
                    self._change(rank, buffer)
                    self._set(rank, buffer, next(self._numbers) if op else value)
            case LoopIteration(loop, starts=True):
                self._before[rank].append(len(self._held[rank]) if has_messages(loop.body) else 0)
            case LoopIteration(loop):
                self._free(rank, self._before[rank].pop())
                self._decide(rank, loop.flag)
            case If(flag) | Loop(flag):
                self._decide(rank, flag)
            case Deliver(keys, chunks):
                for owner, key in itertools.product(range(len(self.here)), keys):
                    ((columns, _),) = self._lent[owner, key]
                    _expect(key in self._held[owner], f"{key} was freed before")
                    _expect(isinstance(columns, Buffer | View), f"{key} is not block columns")
                names = [chunk.name for chunk in chunks]
                _expect(len(names) == len({*names}), f"chunks are delivered twice: {names}")
            case Store(View() as place):
                self._has(rank, place, written=True)
            case Store(target) | Drop(target):
                self._has(rank, target, written=isinstance(step, Store))
                del here[target.name]
                written.discard(target.name)
        self._queue(rank, step)

    def _queue(self, rank: int, step: FlatStep) -> None:
        """Queue a step: none that may run at the same time may write what it uses, or use what it writes."""
        match step:
            case Call(makes=makes, lane=lane):
                used = [(place, role != "r") for place, role in roles_of(step)] + [(place, True) for place in makes]
            case Publish(buffers=buffers, lane=lane):
                used = [(place, False) for place in buffers]
            case Pull(buffers=buffers, taken=False):
                used, lane = [(place, True) for place in buffers], ""
            case Store(View() as place):
                used, lane = [(place, False)], ""
            case _:
                return
        ahead = lane in ("ahead", "panel")
        running = self._beside[rank][not ahead]
        if lane in ("ahead", "join"):
            running.clear()
        for place, writes in used:
            beside = any((writes or wrote) and _overlap(place, busy) for busy, wrote in running)
            _expect(not beside, f"{place.name} may be written, or read, by a step of another lane")
        self._beside[rank][ahead] += used

    def _decide(self, rank: int, flag: Buffer) -> None:
        """Take a branch by a flag, which must have the same bits on all ranks."""
        self._has(rank, flag, written=True)
        at = len(self._decided[rank])
        self._decided[rank].append(self._value[rank][flag.name])
        alike = len({values[at] for values in self._decided if len(values) > at}) == 1
        _expect(alike, f"{flag.name} may have other bits than that of another rank: it is not replicated")

    def _number(self, *made_of: Any) -> int:
        """Return the number of a value: the same one for what is made of the same values in the same way."""
        return self._made.setdefault(made_of, next(self._numbers))

    def _value_of(self, rank: int, place: Buffer | View) -> int:
        """Return the number of the value of a buffer, or of a part of one."""
        value = self._value[rank][place.name]
        return value if isinstance(place, Buffer) else self._number("part", value, place.box)

    def _set(self, rank: int, place: Buffer | View, value: int) -> None:
        """Write a value to a buffer, or to a part of one."""
        here = self._value[rank]
        here[place.name] = value if isinstance(place, Buffer) else self._number(here[place.name], place.box, value)

    def _made_of(self, rank: int, call: Call) -> tuple[Any, ...]:
        """Return an exact kernel with the values that it reads; results of other kernels are unique."""
        if not CONTRACTS[call.kernel].exact:
            return (next(self._numbers),)
        values = [place.box if role == "w" else self._value_of(rank, place) for place, role in roles_of(call)]
        return call.kernel, repr(sorted(call.options.items())), *values

    def _begin(self, rank: int, buffer: Buffer | View, *, written: bool) -> None:
        """Create a buffer, which must not exist."""
        _expect(buffer.name not in self.here[rank], f"{buffer.name} is there already")
        assert isinstance(buffer, Buffer), buffer
        self.here[rank][buffer.name] = buffer
        self._value[rank][buffer.name] = next(self._numbers)
        self._fixed[rank].pop(buffer.name, None)
        (self._written[rank].add if written else self._written[rank].discard)(buffer.name)

    def _change(self, rank: int, buffer: Buffer | View) -> None:
        """Write to a buffer, or a part of one."""
        kept = self._fixed[rank].get(buffer.name, ())
        fixed = (crossing(buffer.box, box) and not self._is_over(rank, key) for box, key in kept)
        _expect(not any(fixed), f"{buffer.name} must not change")
        self._written[rank].add(buffer.name)

    def _is_over(self, rank: int, key: Key | None) -> bool:
        """Whether a rank knows that another one has what it has published for it."""
        pulled = self._pulled.get((rank, key), ()) if key else ()
        return any(self._known[rank][reader] >= number for reader, number in pulled)

    def _free(self, rank: int, count: int) -> None:
        """Free the first of what a rank has published: everybody must have pulled them, and the rank know it."""
        gone = [key for key in self._held[rank][:count] if key.part not in LASTING]
        for key in gone:
            for reader, number in self._pulled.get((rank, key), ()):
                _expect(self._known[rank][reader] >= number, f"rank {reader} may still pull {key}")
        self._held[rank] = [key for key in self._held[rank] if key not in gone]
        self._before[rank] = [max(0, count - len(gone)) for count in self._before[rank]]

    def _has(self, rank: int, place: Buffer | View, *, written: bool) -> None:
        buffer = place.buffer if isinstance(place, View) else place
        present = self.here[rank].get(buffer.name)
        _expect(present == buffer, f"{buffer} is not there, but {present}")
        _expect(not written or buffer.name in self._written[rank], f"{buffer.name} was not written")
