"""The base classes of engines, and of their jobs, which do one participant's part of a run in a thread of its own.

They know no communicator and no process grid: a `Plan` says what each rank needs and owns, and how that travels is the
engine's business. Engines are picked by name and imported only then.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, Generic, TypeVar

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.errors import EngineError
from dask_distmm.planning.model import models_of
from dask_distmm.planning.placement import REPLICA, Placement

ChunkKey = tuple[str, int]  # operand "a" or "b", number of the chunk in C order

# `Job.execute` returns chunks of outputs by the output's name (empty for the main one, as D) and the chunk's number.
# ``(REPLICA, number)`` is a chunk of D that another rank owns, ``(GATHERED, number)`` one of `Problem.gathered` that
# another participant has.
ResultKey = tuple[str, int]

log = logging.getLogger("dask_distmm")

P = TypeVar("P", bound=Placement)
# Seconds between two looks at an event.
_LOOK = 2e-5


class Ended:
    """Whether a run has been ended from outside; any thread may say so."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        # Whether ranks are inside of what is collective: none leaves it before the others.
        self.collective = False

    def end(self, error: BaseException) -> None:
        """End the run with an error, unless it has been ended before."""
        self.error = self.error or error

    def check(self) -> None:
        """Raise the error that the run was ended with, if it was."""
        if self.error is not None and not self.collective:
            raise self.error

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event without holding Python's lock; raise the error that the run was ended with, if any."""
        while not event.done:
            self.check()
            time.sleep(_LOOK)
        self.check()


@dataclasses.dataclass(frozen=True)
class Side(Generic[P]):
    """What participant `me` of a run is given: the chunks that it holds are there after `ready`."""

    plan: P
    me: int
    chunks: Mapping[ChunkKey, Any]
    comm: Comm
    progress: Callable[[float], None] = lambda share: None
    ready: Sequence[Any] = ()


class Job(Generic[P]):
    """One participant's side of one run. Those of engines are subclasses."""

    lends = False

    def __init__(self, side: Side[P]) -> None:
        self.plan, self.me, self.comm, self.progress = side.plan, side.me, side.comm, side.progress
        self.chunks: dict[ChunkKey, Any] = dict(side.chunks)
        self.rank = self.plan.ranks.index(self.me) if self.me in self.plan.ranks else None
        self.ended = Ended()
        self.timings: dict[str, float] = {}
        self.held_bytes = self.kept_bytes = 0
        # Turns of the outermost loop so far, and of how many; 0 where that is not known.
        self.turns = (0, 0)
        self.offer: Any = None
        self.consumed: list[ChunkKey] = []
        self.missing: list[int] = []
        self.on_gathered: Callable[[], Any] = lambda: None
        # Bytes of matrices that have come past `comm`.
        self.pulled_bytes = 0
        self._inputs: Future[None] = Future()
        self._inputs.set_result(None)

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices received from other participants, without those that a library moves."""
        return self.comm.received_bytes + self.pulled_bytes

    def prepare(self) -> None:
        """Allocate; called before the vote. Raise, and no rank starts."""
        raise NotImplementedError

    def accept(self, offers: Sequence[Any]) -> None:
        """Open the handles that participants have offered, in their order; called after the vote, before `execute`."""

    def execute(self) -> Mapping[ResultKey, Any]:
        """Do the work; return the chunks that this rank owns, by output and number. Blocks.

        Of the matrices `Plan.kept` it may return chunks that others have too, under ``(REPLICA, number)`` for D and
        ``(GATHERED, number)`` for an operand; what it does not is fetched from them over Dask's comms.
        """
        raise NotImplementedError

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return a future that is done as soon as `serve` can answer for this kind: at once where it is for chunks."""
        return self._inputs

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return what a peer has asked for with `Comm.fetch`, in any memory order.

        These are boxes of the chunks that are here; subclasses have more kinds. On GPUs it may copy and wait, off the
        event loop; engines for CPUs return views.
        """
        self.ended.check()
        operands = self.plan.problem.operands
        return [self.chunks[operands[m], i][r0:r1, c0:c1] for m, i, r0, r1, c0, c1 in boxes.tolist()]

    def lose(self, participant: int) -> None:
        """Go on without a participant that is gone, while `execute` runs. Any thread.

        Called where ranks need only chunks that others offered before the run (`EngineModel.independent`).
        """

    def forget(self, operands: Sequence[str]) -> None:
        """Release the chunks of some operands, which all ranks have read. Thread-safe."""
        self.chunks = {key: chunk for key, chunk in self.chunks.items() if key[0] not in operands}

    def abort(self, error: BaseException) -> None:
        """Make `execute` and all pending requests raise `error`. Thread-safe; may be repeated."""
        self.ended.end(error)


class Engine:
    """A way to multiply on the workers. Those that there are are subclasses."""

    name = ""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that must agree between workers."""
        raise NotImplementedError

    def memory(self) -> int:
        """Return the bytes of the memory that the engine works in; 0 for the worker's own."""
        return 0

    def links(self) -> tuple[str, Sequence[str]]:
        """Return the name of this process' device and of those that it can read; empty where that does not matter."""
        return "", ()

    def job(self, side: Side[Any]) -> Job[Any]:
        """Return a participant's job of a run."""
        raise NotImplementedError

    def release(self, group: int) -> None:
        """Free a group's communicator and workspace. Collective, between two runs."""

    def abandon(self, group: int) -> None:
        """Drop a group's communicator and workspace after one of its ranks was lost."""


def contiguous(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays without gaps in their memory, each in its own order: by that BLAS may be able to conjugate it."""
    return [x if x.flags.c_contiguous or x.flags.f_contiguous else x.copy(order="K") for x in arrays]


def get_engine(name: str) -> Engine:
    """Return the engine called `name`."""
    (model,) = models_of([name])
    try:
        engine: Engine = importlib.import_module(model.module).ENGINE
    except ImportError as error:
        raise EngineError(f"engine {name!r} can't be imported: {error}") from error
    return engine


def is_of_d(key: ResultKey) -> bool:
    """Whether this is the key of a chunk of D, of this rank or another, among what `Job.execute` returns."""
    return key[0] in ("", REPLICA)


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> bool:
    """Complete a future unless another thread has; return whether this call did."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def wait_checked(answer: Future[Any], check: Callable[[], None]) -> Any:
    """Wait for a peer's answer; `check` raises if the run is aborted meanwhile."""
    while not answer.done():
        check()
        wait([answer], timeout=0.2)
    return answer.result()
