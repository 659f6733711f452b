"""What an engine is: it does one participant's part of a run, in a thread of its own.

The protocol knows no communicator and no process grid: a `Plan` says what each rank needs and owns, and how
that travels is the engine's business. Engines are picked by name and imported only then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import EngineError
from dask_distmm.plan import Plan

__all__ = ["ENGINES", "Boxes", "ChunkKey", "Comm", "Engine", "Job", "get_engine"]

ChunkKey = tuple[str, int]  # operand "a" or "b", number of the chunk in C order
Boxes = NDArray[np.int64]  # (count, 6): operand (0 A, 1 B), chunk, row start, row stop, column start, column stop

ENGINES = {"numpy": "dask_distmm.engines.numpy"}


class Comm(Protocol):
    """Gets matrices from other participants of one run."""

    def fetch(self, peer: int, kind: str, boxes: Boxes, flat: bool) -> Future[Sequence[NDArray[Any]]]:
        """Ask participant `peer` for boxes of its matrices, without waiting.

        Parameters
        ----------
        peer
            Number of the participant.
        kind
            ``"input"``: of staged chunks; ``"partial"``: of its sum over its part of k; ``"final"``: of D.
        boxes
            Which parts; for ``"partial"`` and ``"final"`` the first two columns are 0 and the rest is in
            coordinates of D.
        flat
            All boxes in one vector, one after the other in C order, for the sake of many small ones.

        Returns
        -------
        Future
            Of the matrices, or of one vector. Fails if the peer is gone or the run is over.
        """
        ...


class Job(Protocol):
    """One participant's side of one run."""

    def prepare(self) -> None:
        """Allocate; called before the vote. Raise, and no rank starts."""
        ...

    def execute(self) -> Mapping[int, NDArray[Any]]:
        """Do the work; return the chunks of D that this rank owns, by number. Blocks."""
        ...

    def available(self, kind: str) -> Future[None]:
        """Return a future that is done as soon as `serve` can answer for this kind."""
        ...

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> Sequence[NDArray[Any]]:
        """Return what a peer has asked for with `Comm.fetch`. May copy; called off the event loop."""
        ...

    def abort(self, error: BaseException) -> None:
        """Make `execute` and everything that waits end with `error`, soon. Any thread; may be repeated."""
        ...


class Engine(Protocol):
    """A way to multiply on the workers."""

    name: str

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that must agree between workers.

        Raises
        ------
        EngineError
            The engine can't run here; the message says what to install.
        """
        ...

    def job(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, NDArray[Any]],
        comm: Comm,
        progress: Callable[[float], None],
    ) -> Job:
        """Return participant `me`'s side of a run, over the chunks it staged."""
        ...


def get_engine(name: str) -> Engine:
    """Return the engine called `name`.

    Raises
    ------
    EngineError
        There is none of that name, or it can't be imported here.
    """
    if name not in ENGINES:
        raise EngineError(f"unknown engine {name!r}; known are {', '.join(map(repr, ENGINES))}")
    try:
        engine: Engine = importlib.import_module(ENGINES[name]).ENGINE
    except ImportError as error:
        raise EngineError(f"engine {name!r} can't be imported: {error}") from error
    return engine
