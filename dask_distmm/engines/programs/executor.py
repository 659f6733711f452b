"""Takes the steps of one rank, one after the other, whatever its program is.

Messages between ranks: a reader takes them out of their owner's memory, or asks over `Comm`.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.comms.cross_memory import Board, BoardReader
from dask_distmm.engines.base import log, settle, wait_checked
from dask_distmm.errors import ProtocolError
from dask_distmm.planning.placement import Placement
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


class RankExchange:
    """Hands arrays of one rank to others, and gets theirs, as soon as their owner has published them."""

    def __init__(self, ranks: Sequence[int], comm: Comm, check: Callable[[], None]) -> None:
        # `check` raises if the run is over.
        self._ranks, self._comm, self._check = ranks, comm, check
        self._futures: dict[tuple[str, int], Future[Sequence[Any]]] = {}
        self._error: BaseException | None = None
        self._board: Board | None = None
        # Of other ranks, those that can be read.
        self._readers: dict[int, BoardReader] = {}

    def offer(self, plan: Placement) -> dict[str, Any]:
        """Return what lets other ranks of this host read what this one publishes, in plain types."""
        if len(self._ranks) > 1 and plan.problem.options.cross_memory and Board.possible():
            self._board = Board()
        return {"board": self._board.offer()} if self._board is not None else {}

    def accept(self, offers: Sequence[Any]) -> None:
        """Take the offers of all participants."""
        for rank, participant in enumerate(self._ranks):
            offer = offers[participant]
            if self._board is None or not isinstance(offer, Mapping) or "board" not in offer:
                continue
            try:
                self._readers[rank] = BoardReader(offer["board"])
            except OSError as error:
                log.info("rank %d sends what can't be read in its memory: %s", rank, error)
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"malformed board of rank {rank}: {error}") from error

    def __enter__(self) -> None:
        """Begin the work of this rank."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it. Published arrays stay readable, unless this rank has failed: then all ranks fail."""
        for reader in self._readers.values():
            reader.close()
        if kind is not None and self._board is not None:
            self._board.close()

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Let others have `arrays` from now on. They don't change any more until the end of the run."""
        if settle(self._future(key), arrays) and self._board is not None:
            self._board.lend(key, arrays)

    def ask(self, owner: int, key: Key) -> Any:
        """Ask rank `owner` for what it publishes under `key`, now or later, without waiting; return what `get` takes.

        Nothing is sent to a rank that can be read.
        """
        return (owner, key) if owner in self._readers else self._fetch(owner, key)

    def _fetch(self, owner: int, key: Key) -> Future[Sequence[Any]]:
        return self._comm.fetch(self._ranks[owner], key[0], np.array([[key[1], 0, 0, 0, 0, 0]], np.int64), False)

    def fetch(self, key: Key, owner: int) -> Sequence[Any]:
        """Return the arrays that a rank publishes under a key, now or later."""
        return self.get(self.ask(owner, key))

    def get(self, asked: Any, *, again: bool = False) -> Sequence[Any]:
        """Return the arrays that `ask` was for, once they are here.

        `again`: they may be asked for another time.
        """
        found: Sequence[Any] | None
        if isinstance(asked, tuple):
            owner, key = asked
            found = self._readers[owner].borrow(key, self._check, again=again)
            if found is not None:
                self._comm.received_bytes += sum(x.nbytes for x in found)
                return found
            asked = self._fetch(owner, key)
        found = wait_checked(asked, self._check)
        return found

    def drop(self, key: Key) -> None:
        """Free the memory of what is another rank's, which this one does not need any more: here Python does."""

    def forget(self, key: Key) -> None:
        """Free what was published and all others have got."""
        self._futures.pop(key, None)

    def published(self, kind: str, boxes: Boxes) -> Future[Sequence[Any]]:
        """Return the future of what a peer asks for."""
        return self._future((kind, int(boxes[0, 0])))

    def _future(self, key: tuple[str, int]) -> Future[Sequence[Any]]:
        # One for each key: it is published in the engine's thread, and asked for in that of the event loop.
        future = self._futures.setdefault(key, Future())
        if self._error is not None:
            settle(future, error=self._error)
        return future

    def abort(self, error: BaseException) -> None:
        """End all requests that wait."""
        self._error = error
        for future in list(self._futures.values()):
            settle(future, error=error)


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
        found = self.exchange.get(asked, again=pull.taken)
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
