"""The engine for factorizations on GPUs that can't read each other's memory: those of several hosts.

One participant's side of a run.

::

    prepare()   chunks are brought to the device, block columns are allocated
    execute()   chunks of workers that are not ranks are fetched over Dask's comms
                the gate: all ranks go on, or none
                block columns are made of the ranks' chunks, by NCCL
                the program's steps; panels are broadcast on a stream of their own (`SentPanels`)
                chunks of the outputs are made of all ranks' block columns, by NCCL

All ranks meet for each panel in the order of the program, also those that do not need it. A rank queues all its steps
without a look at what comes of them, so none leaves before the others; what one of them finds then, and what can fail
on one only, such as an allocation, is agreed on by all (`RankGroup.together`).

The communicator is what the ranks of a plan share and keep between runs. To make, to use or to free it is collective:
all ranks do it in the same order, as they see the same runs in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import Side, wait_checked
from dask_distmm.engines.gpu.collective import CollectiveEngine, GroupTransport, RankGroup
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.operands import check_arrays, record
from dask_distmm.engines.gpu.panels import DevicePanels, copy_columns, ends_of
from dask_distmm.engines.gpu.program import DeviceMemory
from dask_distmm.engines.programs.job import Part, ProgramJob, Transfer, keep_triangle, put
from dask_distmm.layout import Moves
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.planning.model import ENGINES
from dask_distmm.programs.steps import Key, Load, Publish, Pull

# Bytes that are on their way from one rank to another at a time, and again in the other direction.
_BATCH_BYTES = 2**28
# Panels that are under way at a time.
_UNDER_WAY = 2


class SentPanels(GroupTransport, DevicePanels):
    """The transport of panels by broadcasts, and of chunks by NCCL."""

    def __init__(self, engine: NcclEngine, job: ProgramJob) -> None:
        least = ENGINES[job.plan.engine].share(job.plan.problem.task.algorithm, len(job.plan.ranks))
        super().__init__(engine, job, engine.coming, job.blas.streams, share=least)
        self._work.append(engine.coming)

    def offer(self, job: ProgramJob) -> dict[str, Any] | None:
        """Offer nothing: no rank reads the memory of another one."""
        return None if job.rank is None else {}

    def begin(self, job: ProgramJob) -> None:
        """Fetch what workers have that are not ranks, and enter what is collective."""
        assert job.rank is not None
        self._outside = self._fetched(job)
        self.enter(job, RankGroup)
        # The buffers of all panels that are in flight at a time, so that none fails later.
        messages = (x for x in job.steps if isinstance(x, Publish | Pull) and x.key.part in self.parts)
        size = max((ends_of(step.buffers)[-1] for step in messages), default=0)
        self.together(lambda: [*map(self.reserve, (size,) * _UNDER_WAY)])

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Give a panel to all others, after the work that is on the current stream now."""
        if key.part not in self.parts:
            super().publish(key, arrays)
            return
        self._coming.wait_event(record(cp.cuda.get_current_stream()))
        self._come(self.group.comm.rank, key, arrays)
        self._release(key, [self._coming])

    def _come(self, owner: int, key: Key, like: Sequence[Any]) -> tuple[Any, ...]:
        """Take part in the broadcast of a panel; its owner has the arrays in `like`."""
        buffer, places = self._room(key, like)
        if owner == self.group.comm.rank:
            for array, place in zip(like, places, strict=True):
                copy_columns(array, place, self._coming)
        self.group.comm.broadcast(int(buffer.data.ptr), len(buffer), owner, self._coming)
        return places

    def _fetched(self, job: ProgramJob) -> dict[int, list[tuple[Part, Any]]]:
        """Return by the operand's number the parts that workers have which are not ranks."""
        fetched: dict[int, list[tuple[Part, Any]]] = {}
        for step in job.steps:
            if isinstance(step, Load):
                transfer = job.gathered(step.operands[0], job.at(step.places[0]))
                for holder, parts in job.parts(transfer).items():
                    if holder not in self._ranks:
                        answer = wait_checked(job.fetch("input", holder, parts), self._check)
                        fetched.setdefault(transfer.number, []).extend(zip(parts, answer, strict=True))
        return fetched

    def carry(self, job: ProgramJob, transfer: Transfer) -> Iterator[None]:
        """Copy parts of a matrix from their holders to their places, by all ranks at once, to column-major matrices."""
        assert job.rank is not None
        rank_of, dst = {index: rank for rank, index in enumerate(self._ranks)}, transfer.targets
        copies = [
            (copy, rank_of[holder], peer)
            for peer in rank_of.values()
            for copy in transfer.taken(peer)
            if (holder := int(transfer.holders[copy.src])) in rank_of
        ]
        src = {copy.src: job.source(transfer, copy.src) for copy, owner, _ in copies if owner == job.rank}
        size = max((x.itemsize for x in (*src.values(), *dst.values())), default=1)
        moves = Moves(*np.array([(*copy[:8], *owners) for copy, *owners in copies], np.int64).reshape(-1, 10).T)
        for some in moves.rounds(len(rank_of), _BATCH_BYTES // size):
            ranks = range(len(rank_of))
            exchange = Exchange(Shuffle(some, job.rank, ranks, src, dst, "F", device_bytes, single=_BATCH_BYTES))
            exchange.run(job.blas.streams[0], self.group.comm)
            self.pulled_bytes += exchange.received_bytes
        for array in dst.values() if transfer.conjugated else ():
            cp.conjugate(array, out=array)
        for part, array in self._outside.pop(transfer.number, ()) if transfer.kind == "input" else ():
            put(job.blas, part, cp.asarray(array, job.plan.problem.compute_type))
        for copy, _, peer in copies:
            if peer == job.rank:
                keep_triangle(job.blas, transfer.form, dst[copy.dst][copy.dst_index], copy.row, copy.col)
        yield

    def together(self, work: Callable[[], Any]) -> Any:
        """Do what may fail on this rank: then all fail."""
        return self.group.together(work)

    def agree(self, problem: str) -> str:
        """Return a problem that one of the ranks has."""
        return next(iter(self.group.comm.agree(problem).values()), "")


class NcclEngine(CollectiveEngine):
    """Factorizes on GPUs of any hosts, one GPU a worker process."""

    name = "nccl"

    @functools.cached_property
    def coming(self) -> cp.cuda.Stream:
        """The stream on which panels come."""
        return cp.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def _kernels(self) -> Any:
        # cuSOLVER is loaded by those who use it.
        from dask_distmm.engines.gpu.lapack import SolverKernels

        return SolverKernels(self.stream)

    def solver(self) -> Any:
        """Return the kernels of one GPU (`SolverKernels`), on the engine's stream."""
        return self._kernels

    def job(self, side: Side[Any]) -> ProgramJob:
        """Return what does a participant's part of a run."""
        check_arrays(self.name, side.chunks)
        several = len(side.plan.ranks) > 1 and side.me in side.plan.ranks
        transport = functools.partial(SentPanels, self) if several else None
        return ProgramJob(side, self.solver(), DeviceMemory(side, self.solver()), transport)


ENGINE = NcclEngine()
