"""How matrices move between ranks: a reader takes them out of their owner's memory, or asks over `Comm`."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.comms.cross_memory import Board, BoardReader
from dask_distmm.engines.base import log, settle, wait_checked
from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.programs.steps import Buffer, Key, Pull


class Transport:
    """Moves matrices between ranks: messages, as soon as their owner has published them, and parts of chunks.

    Here messages are in the memory of processes of one host, or come over `Comm`, as parts of chunks do.
    """

    # What computes eigenvalues that ranks share, if not `SharedEigh`.
    eigh: Any = None
    # Messages from device to device that the host has queued.
    messages = 0

    def __init__(self, ranks: Sequence[int], comm: Comm, check: Callable[[], None]) -> None:
        # `check` raises if the run is over.
        self._ranks, self._comm, self._check = ranks, comm, check
        self._futures: dict[tuple[str, int], Future[Sequence[Any]]] = {}
        self._error: BaseException | None = None
        # Bytes that have come otherwise than by `comm`.
        self.pulled_bytes = 0
        self._board: Board | None = None
        # Of other ranks, those that can be read.
        self._readers: dict[int, BoardReader] = {}

    def columns(self, job: Any, buffer: Buffer) -> Any:
        """Return memory for this rank's block columns; allocate what others read beside them."""
        array = job.blas.empty(buffer.shape, dtype_from_name(buffer.dtype))
        job.memory.note(array)
        return array

    def new(self, buffer: Buffer) -> Any:
        """Return the memory that others read of a part of a result; None if it is like all other memory."""

    def offer(self, job: Any) -> dict[str, Any] | None:
        """Return what lets other ranks of this host read what this one publishes, in plain types."""
        if job.rank is None:
            return None
        if len(self._ranks) > 1 and job.plan.problem.options.cross_memory and Board.possible():
            self._board = Board()
        return {"board": self._board.offer()} if self._board is not None else {}

    def let_go(self, operands: Sequence[str]) -> None:
        """Hold the chunks of some operands no longer: all ranks have read them. Any thread."""

    def accept(self, offers: Sequence[Any]) -> None:
        """Take the offers of all participants."""
        for rank, participant in enumerate(self._ranks if self._board is not None else ()):
            offer = offers[participant]
            if not isinstance(offer, Mapping) or "board" not in offer:
                continue
            try:
                self._readers[rank] = BoardReader(offer["board"])
            except OSError as error:
                log.info("rank %d sends what can't be read in its memory: %s", rank, error)
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"malformed board of rank {rank}: {error}") from error

    def begin(self, job: Any) -> None:
        """Do what comes before the first step; all participants have agreed to the run."""

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

    def ask(self, owner: int, key: Key, like: Sequence[Any] = ()) -> Any:
        """Ask rank `owner` for what it publishes under `key`, now or later, without waiting; return what `get` takes.

        `like` are the buffers that it is for. Nothing is sent to a rank that can be read.
        """
        return (owner, key) if owner in self._readers else self._fetch(owner, key)

    def _fetch(self, owner: int, key: Key) -> Future[Sequence[Any]]:
        return self._comm.fetch(self._ranks[owner], key[0], np.array([[key[1], 0, 0, 0, 0, 0]], np.int64))

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

    # What a job does with messages and with parts of chunks

    def lend(self, job: Any, array: Any, *, copied: bool) -> Any:
        """Return what others get of an array, or of a copy of it."""
        return job.memory.lent(array, copied=copied)

    def fill(self, job: Any, target: Any, part: Any, owner: int) -> None:
        """Write what another rank has lent."""
        job.memory.write(target, part)

    def queues(self, step: Any) -> bool:
        """Whether a message goes from device to device, so that the host does nothing but queue it."""
        return False

    def write(self, arrays: Sequence[Any]) -> None:
        """Queue a message to all others."""
        raise NotImplementedError

    def read(self, pull: Pull) -> Iterable[Any]:
        """Return the parts of a message that was queued."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait until all that this rank has asked others for is here."""

    def reads(self, kind: str, holder: int, box: Sequence[int]) -> bool:
        """Whether this process can read what another participant holds of a matrix."""
        return False

    def view(self, kind: str, holder: int, matrix: int, number: int) -> Any:
        """Return a matrix of another participant that this process can read."""
        raise NotImplementedError

    def gather(self, job: Any, name: str, target: Any) -> None:
        """Write parts of an operand's chunks to their places in this rank's block columns."""
        collections.deque(job.move("input", job.wanted(name, target)), 0)

    def assemble(self, job: Any, number: int, output: NamedMatrix) -> Iterator[None]:
        """Put this rank's chunks of an output together from parts of all ranks; pause when its own are there."""
        chunks = job.blanks(output)
        yield from job.move("final", job.parts_taken(number, output, chunks))
        job.result |= chunks

    def agree(self, problem: str) -> str:
        """Return a problem that one of the ranks has, where all must go on or none."""
        return problem

    def look(self, job: Any) -> None:
        """Raise if the run was ended and what came may be anything."""

    def complete(self) -> None:
        """Let what comes next wait for all messages that are under way."""

    def finish(self, job: Any) -> None:
        """Let others have this rank's parts of the results, which are complete."""
        self.complete()

    def settle(self, job: Any) -> None:
        """Wait until all work has ended, also after an error: the memory in which it is done is freed then."""
        job.memory.synchronize()

    def published(self, kind: str, boxes: Boxes) -> Future[Sequence[Any]]:
        """Return the future of what a peer asks for."""
        return self._future((kind, int(boxes[0, 0])))

    def answer(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return what a peer has asked for, which is there."""
        return list(self.published(kind, boxes).result())

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
