"""The way of panels between the ranks of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.engines.base import wait_checked
from dask_distmm.planning.factor.plan import PARTS
from dask_distmm.planning.factor.steps import Key, Part


class PanelExchange:
    """Hands panels of one rank to others, and gets theirs over `Comm`, as soon as their owner has published them."""

    def __init__(self, ranks: Sequence[int], comm: Comm) -> None:
        self._ranks, self._comm = ranks, comm
        self._futures: dict[Key, Future[Sequence[Any]]] = {}
        self._error: BaseException | None = None

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Let others have `arrays` from now on. They don't change any more until the end of the run."""
        future = self._future(key)
        if not future.done():
            future.set_result(arrays)

    def ask(self, owner: int, key: Key) -> Future[Sequence[Any]]:
        """Ask rank `owner` for what it publishes under `key`, now or later, without waiting."""
        boxes = np.array([(PARTS.index(key.part), key.panel, 0, 0, 0, 0)], np.int64)
        return self._comm.fetch(self._ranks[owner], "panel", boxes, False)

    def get(self, asked: Any, check: Callable[[], None]) -> Sequence[Any]:
        """Return the arrays that `ask` was for, once they are here; `check` raises if the run is over."""
        found: Sequence[Any] = wait_checked(asked, check)
        return found

    def drop(self, key: Key) -> None:
        """Free the memory of a panel of another rank, which this one does not need any more: here Python does."""

    def forget(self, key: Key) -> None:
        """Free what was published and all others have got."""
        self._futures.pop(key, None)

    def published(self, boxes: Boxes) -> Future[Sequence[Any]]:
        """Return the future of the panel that a peer asks for."""
        future = self._future(self.key_of(boxes))
        if self._error is not None and not future.done():
            future.set_exception(self._error)
        return future

    def _future(self, key: Key) -> Future[Sequence[Any]]:
        # One for each key: it is published in the engine's thread, and asked for in that of the event loop.
        return self._futures.setdefault(key, Future())

    @staticmethod
    def key_of(boxes: Boxes) -> Key:
        """Return the part of a panel that a peer asks for."""
        part, panel = boxes[0, :2].tolist()
        return Key(PARTS[part], panel)

    def abort(self, error: BaseException) -> None:
        """End all requests that wait."""
        self._error = error
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(error)


class Messages:
    """Small arrays on the host between the ranks of one run, named by what they are and a number."""

    def __init__(self, exchange: PanelExchange, check: Callable[[], None]) -> None:
        self._exchange, self._check = exchange, check

    def publish(self, part: Part, number: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Let other ranks have arrays. They don't change any more."""
        self._exchange.publish(Key(part, number), tuple(arrays))

    def fetch(self, part: Part, number: int, owner: int) -> Sequence[NDArray[Any]]:
        """Return arrays that a rank publishes, now or later."""
        key = Key(part, number)
        return self._exchange.get(self._exchange.ask(owner, key), self._check)

    def forget(self, part: Part, number: int) -> None:
        """Free arrays of this rank that all others have got."""
        self._exchange.forget(Key(part, number))
