"""Takes the steps of one rank, one after the other, whatever its program is."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from dask_distmm.engines.exchange import RankExchange
from dask_distmm.programs.steps import (
    TURN,
    Buffer,
    Call,
    Drop,
    If,
    Key,
    Lane,
    Loop,
    Make,
    New,
    Publish,
    Pull,
    Step,
    Store,
    View,
)

# Number of messages that are requested before they are needed: then they come as soon as they are there. Only one if it
# keeps the memory in which it comes, and that is more than this many bytes.
_AHEAD, _LARGE = 4, 2**20
_HERE = contextlib.nullcontext()


class Executor:
    """Takes the steps of one rank; what they mean for chunks, and for the memory of a device, subclasses know."""

    def __init__(
        self, kernels: Any, exchange: RankExchange, check: Callable[[], None], progress: Callable[[float], None]
    ) -> None:
        # Steps call its methods by name; its `blas` queues calls on lanes.
        self.kernels, self.exchange = kernels, exchange
        self._check, self._progress = check, progress
        self.arrays: dict[str, Any] = {}
        # Seconds by the name of what took them.
        self.timings: dict[str, float] = {}
        # Keys published so far, in order; the turns of all loops so far; the offset of numbers of messages.
        self._held: dict[Key, None] = {}
        self._turns = self._offset = 0
        # Of what came from others and is kept in the memory in which it came, by the name of the first buffer.
        self._taken: dict[str, Key] = {}

    def take(self, steps: Sequence[Step], before: float = 0.0, share: float = 1.0, ahead: int = _AHEAD) -> None:
        """Take steps, which are this `share` of the work."""
        pulls = collections.deque(step for step in steps if isinstance(step, Pull))
        asked, most = collections.deque[Any](), _room(pulls, ahead)
        for number, step in enumerate(steps):
            self._check()
            while pulls and len(asked) < most:
                pull = pulls.popleft()
                asked.append(self.exchange.ask(pull.owner, self._numbered(pull.key)))
                most = _room(pulls, ahead)
            done, part = before + share * number / len(steps), share / len(steps)
            if isinstance(step, If):
                self.take(step.then if self._is_set(step.flag) else step.otherwise, done, part)
            elif isinstance(step, Loop):
                self._repeat(step, done, part)
            else:
                self._take(step, asked)
            if share:
                self._progress(done + part)

    def _repeat(self, loop: Loop, before: float, share: float) -> None:
        outside, come = self._offset, before
        for turn in range(loop.most):
            if not self._is_set(loop.flag):
                break
            self._turns += 1
            self._offset, held = self._turns * TURN, list(self._held)
            self.take(loop.body, come, 0.0, len(loop.body))
            # In a turn all wait for each other: others have what was published before it.
            for key in held:
                if key in self._held:
                    del self._held[key]
                    self.exchange.forget(key)
            come = before + share * max(self.kernels.reached, (turn + 1) / loop.most)
            self._progress(come)
        self._offset = outside

    def _is_set(self, flag: Buffer) -> bool:
        return bool(self.arrays[flag.name].all())

    def _numbered(self, key: Key) -> Key:
        """Return the key of a message in this turn."""
        return Key(key.part, key.number + self._offset)

    def _take(self, step: Step, asked: collections.deque[Any]) -> None:
        arrays = self.arrays
        match step:
            case Call():
                self._call(step)
            case Pull():
                self._arrive(step, asked.popleft())
            case New(buffer, zero):
                arrays[buffer.name] = self._new(buffer)
                if zero:
                    arrays[buffer.name][...] = 0
            case Make():
                self._make(step)
            case Publish(key, buffers, copied, lane):
                with self._on(lane):
                    lent = [self._lent(self._at(buffer), copied=copied) for buffer in buffers]
                    self._held[self._numbered(key)] = None
                    self.exchange.publish(self._numbered(key), lent)
            case Store():
                self._store(step)
            case Drop(buffer):
                self._free(buffer)
                if buffer.name in self._taken:
                    self.exchange.drop(self._taken.pop(buffer.name))

    def _on(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        return self.kernels.blas.on(lane) if lane else _HERE

    def _call(self, call: Call) -> None:
        began, blas = time.perf_counter(), self.kernels.blas
        arguments = [self._at(buffer) for buffer in call.arguments]
        with self._on(call.lane):
            found = getattr(self.kernels, call.kernel)(*arguments, **call.options)
        if call.makes:
            found = found if isinstance(found, tuple) else (found,)
            self.arrays |= {buffer.name: array for buffer, array in zip(call.makes, found, strict=True)}
        if not blas.asynchronous:
            self._note(self._phase(call), began)

    def _arrive(self, pull: Pull, asked: Any) -> None:
        began, key = time.perf_counter(), self._numbered(pull.key)
        found = self.exchange.get(asked, self._check, again=pull.taken)
        self._note("wait", began)
        for buffer, part in zip(pull.buffers, found, strict=True):
            if pull.taken:
                self.arrays[buffer.name] = part
                self._taken.setdefault(pull.buffers[0].name, key)
            else:
                self._fill(self._at(buffer), part, pull.owner)

    def _note(self, phase: str, began: float) -> None:
        self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - began

    def _at(self, place: Buffer | View) -> Any:
        """Return a buffer, or a rectangle of one."""
        if isinstance(place, Buffer):
            return self.arrays[place.name]
        top, bottom, left, right = place.box
        return self.arrays[place.buffer.name][top:bottom, left:right]

    # What subclasses know

    def _phase(self, call: Call) -> str:
        """Return the name under which a call's time is noted."""
        return f"{call.kernel}()"

    def _new(self, buffer: Buffer) -> Any:
        """Allocate a buffer."""
        raise NotImplementedError

    def _make(self, step: Make) -> None:
        """Have a chunk of an operand."""
        raise NotImplementedError

    def _store(self, step: Store) -> None:
        """Hand a buffer over."""
        raise NotImplementedError

    def _free(self, buffer: Buffer) -> None:
        """Free a buffer."""
        del self.arrays[buffer.name]

    def _lent(self, array: Any, *, copied: bool) -> Any:
        """Return what others get of an array, or a copy of it."""
        return array.copy(order="K") if copied else array

    def _fill(self, target: Any, part: Any, owner: int) -> None:
        """Write what another rank has lent."""
        target[...] = part


def _room(pulls: Sequence[Pull], ahead: int) -> int:
    """Return how many messages may be on their way with the next one of these."""
    return 1 if pulls and pulls[0].taken and pulls[0].nbytes > _LARGE else ahead
