"""How ranks hand arrays to each other: a reader takes them out of their owner's memory, or asks over `Comm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.comms.cross_memory import Board, BoardReader
from dask_distmm.engines.base import log, settle, wait_checked
from dask_distmm.errors import ProtocolError
from dask_distmm.planning.placement import Placement
from dask_distmm.programs.steps import Key


class RankExchange:
    """Hands arrays of one rank to others, and gets theirs, as soon as their owner has published them."""

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

    def offer(self, plan: Placement) -> dict[str, Any]:
        """Return what lets other ranks of this host read what this one publishes, in plain types."""
        if len(self._ranks) > 1 and plan.problem.options.cross_memory and Board.possible():
            self._board = Board()
        return {"board": self._board.offer()} if self._board is not None else {}

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
