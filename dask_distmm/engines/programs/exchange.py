"""How matrices move between ranks: a reader takes them out of their owner's memory, or asks over `Comm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.comms.cross_memory import Board, BoardReader
from dask_distmm.engines.base import log, settle, wait_checked
from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.programs.steps import Buffer, Key, Pull


class Transport:
    """Moves matrices between ranks: messages, as soon as their owner has published them, and parts of chunks.

    Here messages are in the memory of processes of one host, or come over `Comm`, as parts of chunks do.
    """

    # Class that computes eigenvalues which ranks share, if not `SharedEigh`.
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
        """Allocate this rank's block columns, and the buffers that other ranks read with them."""
        array = job.blas.empty(buffer.shape, dtype_from_name(buffer.dtype))
        job.memory.note(array)
        return array

    def new(self, buffer: Buffer) -> Any:
        """Allocate memory for a part of a result that other ranks read directly; None if any memory is readable."""

    def offer(self, job: Any) -> dict[str, Any] | None:
        """Return the handles by which other ranks of this host read published arrays, in plain types."""
        if job.rank is None:
            return None
        if len(self._ranks) > 1 and job.plan.problem.options.cross_memory and Board.possible():
            self._board = Board()
        return {"board": self._board.offer()} if self._board is not None else {}

    def let_go(self, operands: Sequence[str]) -> None:
        """Release the chunks of some operands, which all ranks have read. Thread-safe."""

    def accept(self, offers: Sequence[Any]) -> None:
        """Open the handles that all participants have offered."""
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
        """Set up communication before the first step, after all participants have agreed to the run."""

    def __enter__(self) -> None:
        """Begin the work of this rank."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End this rank's work. Published arrays stay readable unless it failed: then all ranks fail."""
        for reader in self._readers.values():
            reader.close()
        if kind is not None and self._board is not None:
            self._board.close()

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Publish `arrays` under a key; they must not change until the end of the run."""
        if settle(self._future(key), arrays) and self._board is not None:
            self._board.lend(key, arrays)

    def ask(self, owner: int, key: Key, like: Sequence[Any] = ()) -> Any:
        """Request the arrays that rank `owner` publishes under `key`, without waiting; return the request for `get`.

        `like` are the buffers to receive them. Nothing is sent if this rank can read the owner's memory.
        """
        return (owner, key) if owner in self._readers else self._fetch(owner, key)

    def _fetch(self, owner: int, key: Key) -> Future[Sequence[Any]]:
        return self._comm.fetch(self._ranks[owner], key[0], np.array([[key[1], 0, 0, 0, 0, 0]], np.int64))

    def fetch(self, key: Key, owner: int) -> Sequence[Any]:
        """Wait for the arrays that a rank publishes under a key."""
        return self.get(self.ask(owner, key))

    def get(self, request: Any, *, again: bool = False) -> Sequence[Any]:
        """Wait for the arrays of a request.

        `again`: the same key may be requested once more.
        """
        arrays: Sequence[Any] | None
        if isinstance(request, tuple):
            owner, key = request
            arrays = self._readers[owner].borrow(key, self._check, again=again)
            if arrays is not None:
                self._comm.received_bytes += sum(x.nbytes for x in arrays)
                return arrays
            request = self._fetch(owner, key)
        arrays = wait_checked(request, self._check)
        return arrays

    def drop(self, key: Key) -> None:
        """Release a mapping of another rank's array; here Python's garbage collection does."""

    def forget(self, key: Key) -> None:
        """Release a published array that all ranks have received."""
        self._futures.pop(key, None)

    # What a job does with messages and with parts of chunks

    def lend(self, job: Any, array: Any, *, copied: bool) -> Any:
        """Return the form in which an array, or a copy of it, is published."""
        return job.memory.lent(array, copied=copied)

    def fill(self, job: Any, target: Any, part: Any, owner: int) -> None:
        """Copy a published array of another rank to a buffer."""
        job.memory.write(target, part)

    def queues(self, step: Any) -> bool:
        """Whether a message is queued on the device, without the host waiting."""
        return False

    def write(self, arrays: Sequence[Any]) -> None:
        """Queue a broadcast of arrays."""
        raise NotImplementedError

    def read(self, pull: Pull) -> Iterable[Any]:
        """Queue the receipt of a message; return its parts."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait for all messages that this rank has requested."""

    def reads(self, kind: str, holder: int, box: Sequence[int]) -> bool:
        """Whether this process can read another participant's part of a matrix in place."""
        return False

    def view(self, kind: str, holder: int, matrix: int, number: int) -> Any:
        """Return a view of another participant's matrix."""
        raise NotImplementedError

    def carry(self, job: Any, transfer: Any) -> Iterator[None]:
        """Copy the parts that this rank takes from their holders to their places; yield after those that are here."""
        kind, me, parts = transfer.kind, job.me, job.parts(transfer)
        # Not all ranks begin with the same one.
        holders = sorted({me, *parts}, key=lambda holder: (holder - me) % len(job.plan.participants))
        requests = {
            holder: job.fetch(kind, holder, parts[holder])
            for holder in holders[1:]
            if not self.reads(kind, holder, parts[holder][0].box)
        }
        for holder in holders:
            some = parts.get(holder, [])
            if holder in requests:
                arrays = wait_checked(requests[holder], self._check)
            else:
                arrays = job.read(kind, holder, [part.box for part in some])
                self.pulled_bytes += sum(part.place.nbytes for part in some if holder != me)
            job.memory.put(job, some, arrays)
            if holder == me:
                yield

    def together(self, work: Callable[[], Any]) -> Any:
        """Do what may fail on this rank; if others could not go on without it, all fail."""
        return work()

    def agree(self, problem: str) -> str:
        """Return a problem that any rank has, if all ranks must fail together."""
        return problem

    def look(self, job: Any) -> None:
        """Raise if the run was aborted, so that received data is not valid."""

    def complete(self) -> None:
        """Order later work after all messages in flight."""

    def settle(self, job: Any) -> None:
        """Wait for all queued work, also after an error, before its memory is freed."""
        job.memory.synchronize()

    def published(self, kind: str, boxes: Boxes) -> Future[Sequence[Any]]:
        """Return the future of a published key, for a peer's request."""
        return self._future((kind, int(boxes[0, 0])))

    def answer(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return the published arrays that answer a peer's request."""
        return list(self.published(kind, boxes).result())

    def _future(self, key: tuple[str, int]) -> Future[Sequence[Any]]:
        # One for each key: it is published in the engine's thread, and asked for in that of the event loop.
        future = self._futures.setdefault(key, Future())
        if self._error is not None:
            settle(future, error=self._error)
        return future

    def abort(self, error: BaseException) -> None:
        """Fail all pending requests."""
        self._error = error
        for future in list(self._futures.values()):
            settle(future, error=error)
