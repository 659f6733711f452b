"""Engines whose ranks call libraries of NVIDIA together: their groups of ranks, with a communicator each."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import cupy as cp

from dask_distmm.comms.base import Boxes
from dask_distmm.comms.nccl import LEAST_NCCL, NcclComm, make_unique_id, nccl_version
from dask_distmm.compat import install_command
from dask_distmm.engines.base import Engine, log
from dask_distmm.engines.entry import CollectiveEntry
from dask_distmm.engines.gpu.operands import check_gpu, device_memory
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.errors import EngineError
from dask_distmm.planning import Placement

T = TypeVar("T")


class RankGroup:
    """The communicator of a group of ranks, with its stream and workspace. All calls are collective."""

    # Bytes of the device that can't be freed before the process ends if a rank is lost.
    workspace_bytes = 0

    def __init__(self, plan: Placement, rank: int, unique_id: bytes, stream: cp.cuda.Stream) -> None:
        self.comm = NcclComm(len(plan.ranks), rank, unique_id, stream)
        self.names, self.stream = plan.workers, stream

    def agree(self, problem: str = "") -> None:
        """Raise the same `EngineError` on all ranks if any of them has a problem."""
        if problems := self.comm.agree(problem):
            raise EngineError("; ".join(f"{self.names[rank]}: {text}" for rank, text in problems.items()))

    def together(self, work: Callable[[], T]) -> T:
        """Run a local function on each rank; raise the same `EngineError` on all if it fails on any."""
        problem, results = "", list[T]()
        try:
            results.append(work())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.agree(problem)
        return results[0]

    def close(self) -> None:
        """Free everything."""
        self.comm.close()


# Seconds that work which was begun may take to end after an error, and between two looks whether it has.
_SETTLING, _LOOK = 5.0, 1e-3


class GroupTransport(Transport):
    """The transport of ranks that share a communicator, once all of them have entered."""

    # The ranks' communicator; set when all have entered.
    group: Any = None

    def __init__(self, engine: CollectiveEngine, job: ProgramJob, *arguments: Any, share: float = 1.0) -> None:
        super().__init__(job.plan.ranks, job.comm, job.ended.check, *arguments)
        self.join(engine, job, [job.blas.streams[0]], share)

    def join(self, engine: CollectiveEngine, job: ProgramJob, streams: Sequence[Any], share: float = 1.0) -> None:
        """Prepare for what is collective; of the streams of the run's work the first one is the communicator's."""
        self._engine, self._entry = engine, CollectiveEntry(job.plan, job.rank, job.comm, job.ended, share)
        self._work = [*streams]

    def enter(self, job: ProgramJob, kind: type[RankGroup]) -> None:
        """Wait until all ranks are here; create their communicator if there is none of an earlier run."""
        plan, rank = job.plan, job.rank
        assert rank is not None
        self._entry.enter(lambda: self._engine.new_id(plan.group))
        if len(plan.ranks) > 1:
            self.group = self._engine.group(plan.group, lambda: kind(plan, rank, self._entry.unique_id, self._work[0]))

    def settle(self, job: ProgramJob) -> None:
        """Let work end, also some that was begun before an error; what may never end keeps its memory."""
        if not self.settled():
            self._engine.stuck += [job.arrays, self]
        self._entry.leave()

    def settled(self) -> bool:
        """Wait a while for the end of all work; return whether that has come."""
        end = time.monotonic() + _SETTLING
        while not (done := all(stream.done for stream in self._work)) and time.monotonic() < end:
            time.sleep(_LOOK)
        return done

    # Messages between participants

    def published(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future of what a peer asks for: also the id under which ranks make their communicator."""
        return self._entry.entered(int(boxes[0, 0])) if kind == "enter" else super().published(kind, boxes)

    def answer(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return what a peer has asked for, which is there."""
        return list(self._entry.answer()) if kind == "enter" else super().answer(kind, boxes)

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._entry.abort(error)
        super().abort(error)


class CollectiveEngine(Engine):
    """An engine whose ranks share a communicator, one GPU a worker process."""

    # The least versions of the libraries that it has beside NCCL.
    least: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __init__(self) -> None:
        # By number the groups of ranks that have a communicator.
        self.groups: dict[int, Any] = {}
        # What work that never ends may still write to.
        self.stuck: list[Any] = []

    @functools.cached_property
    def stream(self) -> cp.cuda.Stream:
        """The engine's own stream, on the process' current device."""
        return cp.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def downloads(self) -> cp.cuda.Stream:
        """The stream of results on their way to the host."""
        return cp.cuda.Stream(non_blocking=True)

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that must agree between workers."""
        check_gpu()
        least = {"NCCL": LEAST_NCCL, **self.least}
        try:
            installed = {"NCCL": nccl_version(), **self._libraries()}
            packages = {"nvmath": importlib.metadata.version("nvmath-python")}
        except (ImportError, RuntimeError) as error:
            raise EngineError(
                f"{' or '.join(least)} can't be loaded ({error}): {install_command('cu13')} (cu12 for CUDA 12)"
            ) from error
        if any(installed[name] < least[name] for name in least):
            major = cp.cuda.runtime.runtimeGetVersion() // 1000
            raise EngineError(
                f"{_named(installed)} were found; needed are {_named(least)} or newer: {install_command(f'cu{major}')}"
            )
        return {name.lower(): _dotted(version) for name, version in installed.items()} | packages

    def _libraries(self) -> Mapping[str, tuple[int, ...]]:
        """Return the versions of libraries other than NCCL."""
        return {}

    def memory(self) -> int:
        """Return the bytes of the device."""
        return device_memory()

    def new_id(self, number: int) -> bytes:
        """Return an id under which ranks make a group's communicator; empty if they have it."""
        return b"" if number in self.groups else make_unique_id()

    def group(self, number: int, make: Callable[[], T]) -> T:
        """Return a group of ranks by its number; created collectively on first use."""
        if number not in self.groups:
            self.groups[number] = make()
        communicator: T = self.groups[number]
        return communicator

    def release(self, group: int) -> None:
        """Free a group's resources; collective."""
        if (kept := self.groups.pop(group, None)) is not None:
            kept.close()

    def abandon(self, group: int) -> None:
        """Drop a group that has lost a rank: its resources stay allocated until this process exits."""
        if (communicator := self.groups.pop(group, None)) is not None:
            kept = communicator.workspace_bytes >> 20
            log.warning(
                "a rank of group %s is gone: its communicator and %d MiB of this GPU stay taken until the worker "
                "restarts", group, kept,
            )  # fmt: skip


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _named(versions: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{name} {_dotted(version)}" for name, version in versions.items())
