"""The way of panels between the ranks of one run. A protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from dask_distmm.planning.factor import Key

__all__ = ["Exchange"]


class Exchange(Protocol):
    """Hands panels of this rank to others, and gets theirs."""

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Let others have `arrays` from now on. They don't change any more until the end of the run."""
        ...

    def get(self, asked: Any, check: Callable[[], None]) -> Sequence[Any]:
        """Return the arrays that `ask` was for, once they are here; `check` raises if the run is over."""
        ...

    def drop(self, key: Key) -> None:
        """Free the memory of a panel of another rank, which this one does not need any more."""
        ...

    def ask(self, owner: int, key: Key) -> Future[Sequence[Any]]:
        """Ask rank `owner` for what it publishes under `key`, now or later, without waiting.

        Returns
        -------
        Future
            Of the arrays, in memory of this rank; they are only read. It fails if the owner is gone or the run is over.
        """
        ...
