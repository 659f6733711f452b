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
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ResultKey, Side, wait_checked
from dask_distmm.engines.entry import CollectiveEntry
from dask_distmm.engines.gpu.collective import CollectiveEngine, RankGroup
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.operands import check_arrays, record
from dask_distmm.engines.gpu.panels import DevicePanels, copy_columns, ends_of
from dask_distmm.engines.gpu.program import GpuProgramJob
from dask_distmm.engines.programs.job import Part, keep_triangle, put
from dask_distmm.errors import MatrixError
from dask_distmm.layout import Copy, Moves
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.model import ENGINES
from dask_distmm.planning.placement import Placement
from dask_distmm.programs.steps import Key, Make, Publish, Pull


class SentPanels(DevicePanels):
    """The exchange of panels by broadcasts. `group` must be set before the first one."""

    group: RankGroup

    def offer(self, plan: Placement) -> dict[str, Any]:
        """Offer nothing: no rank reads the memory of another one."""
        return {}

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Give a panel to all others, after the work that is on the current stream now."""
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


# One participant's side of a factorization


# Bytes that are on their way from one rank to another at a time, and again in the other direction.
_BATCH_BYTES = 2**28
# Panels that are under way at a time.
_UNDER_WAY = 2
# Seconds that work which was begun may take to end after an error, and between two looks whether it has.
_SETTLING, _LOOK = 5.0, 1e-3


class NcclJob(GpuProgramJob):
    """One participant's side of one run; see the text of the module."""

    def __init__(self, side: Side[FactorPlacement], engine: NcclEngine) -> None:
        super().__init__(side, engine)
        self._state = engine
        # None where one rank computes, and for participants that are not ranks.
        self._panels: SentPanels | None = None
        if len(self.plan.ranks) > 1 and self.rank is not None:
            arguments = self.ended.check, engine.coming, engine.solver().streams
            self.exchange = self._panels = SentPanels(self.plan.ranks, self.comm, *arguments)
        least = ENGINES[self.plan.engine].share(self.plan.problem.task.algorithm, len(self.plan.ranks))
        self._entry = CollectiveEntry(self.plan, self.rank, self.comm, self.ended, least)

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Gather the operands, take the steps, put the outputs together."""
        try:
            if self._panels is not None:
                with self._stream:
                    self._outside = self._fetched()
                    self._entry.enter(lambda: self._state.new_id(self.plan.group))
                    self._panels.group = self._joined()
                    self._panels.group.together(self._reserve)
            return super().execute()
        finally:
            self._entry.leave()

    def _reserve(self) -> None:
        """Allocate the buffers of all panels that are in flight at a time, so that none fails later."""
        assert self._panels is not None
        messages = (step.buffers for step in self._steps if isinstance(step, Publish | Pull))
        size = max((ends_of(buffers)[-1] for buffers in messages), default=0)
        for _ in range(_UNDER_WAY):
            self._panels.reserve(size)

    def _synchronize(self) -> None:
        if self._panels is not None:
            self._panels.complete()
        super()._synchronize()

    def _look(self) -> None:
        """Look at what was computed; raise on all ranks if one of them has found something in its columns."""
        problem = ""
        try:
            super()._look()
        except MatrixError as error:
            problem = str(error)
        self._refuse(problem)

    def _settle(self) -> None:
        """Let work end, also some that was begun before an error; what may never end keeps its memory."""
        end, streams = time.monotonic() + _SETTLING, (self._stream, self._state.coming)
        while not all(stream.done for stream in streams) and time.monotonic() < end:
            time.sleep(_LOOK)
        if not all(stream.done for stream in streams):
            self._state.stuck += [self.arrays, self._panels]

    def _joined(self) -> RankGroup:
        """Return the ranks' group."""
        assert self.rank is not None
        arguments = self.plan, self.rank, self._entry.unique_id, self._stream
        return self._state.group(self.plan.group, lambda: RankGroup(*arguments))

    def _fetched(self) -> dict[str, list[tuple[Part, Any]]]:
        """Return by operand the parts that workers have which are not ranks."""
        parts_of: dict[str, list[tuple[Part, Any]]] = {}
        for step in self._steps:
            if isinstance(step, Make) and step.operand:
                for holder, parts in self._wanted(step.operand, self._at(step.buffer)).items():
                    if holder not in self.plan.ranks:
                        answer = wait_checked(self._fetch("input", holder, parts), self.ended.check)
                        parts_of.setdefault(step.operand, []).extend(zip(parts, answer, strict=True))
        return parts_of

    def _gather(self, name: str, target: Any) -> None:
        """Write this rank's block columns of an operand."""
        if self._panels is None:
            super()._gather(name, target)
            return
        assert self.rank is not None
        plan, rank_of = self.plan, {index: rank for rank, index in enumerate(self.plan.ranks)}
        orientation = plan.problem.task.orientation(name)
        copies: list[tuple[Copy, int, int]] = []
        src: dict[int, Any] = {}
        for peer in rank_of.values():
            for copy, (index, *_) in self._parts_of(name, peer):
                holder = int(plan.where[name][index])
                if holder in rank_of:
                    copies.append((copy, rank_of[holder], peer))
                if holder == self.me:
                    chunk = self.chunks[name, index]
                    src[copy.src] = chunk.T if orientation.transposed else chunk
        self._exchange(copies, src, {self.rank: target}, conjugated=orientation.conjugated)
        for part, array in self._outside.pop(name, ()):
            put(self.blas, part, cp.asarray(array, plan.problem.compute_type))

    def _exchange(
        self, copies: Iterable[tuple[Copy, int, int]], src: dict[int, Any], dst: dict[int, Any], *, conjugated: bool
    ) -> None:
        """Carry out copies, each with the ranks of its source and of its destination, to column-major matrices."""
        assert self.rank is not None
        assert self._panels is not None
        group, ranks = self._panels.group, range(len(self.plan.ranks))
        size = max((x.itemsize for x in (*src.values(), *dst.values())), default=1)
        moves = Moves(*np.array([(*copy[:8], *owners) for copy, *owners in copies], np.int64).reshape(-1, 10).T)
        for some in moves.rounds(len(ranks), _BATCH_BYTES // size):
            shuffle = Shuffle(some, self.rank, ranks, src, dst, "F", device_bytes, single=_BATCH_BYTES)
            exchange = Exchange(shuffle)
            exchange.run(self._stream, group.comm)
            self.pulled_bytes += exchange.received_bytes
        for array in dst.values():
            if conjugated and array.dtype.kind == "c":
                cp.conjugate(array, out=array)

    def _refuse(self, problem: str) -> None:
        """Raise on all ranks if there is a problem on one of them."""
        if self._panels is not None:
            problem = next(iter(self._panels.group.comm.agree(problem).values()), "")
        super()._refuse(problem)

    def _complete_parts(self) -> None:
        # Messages of one communicator follow each other.
        if self._panels is not None:
            self._panels.complete()
        super()._complete_parts()

    def _assemble(self, number: int, output: NamedMatrix) -> Iterator[None]:
        """Put this rank's chunks of an output together."""
        if self._panels is None or self.plan.output_layout(output.name) is None:
            yield from super()._assemble(number, output)
            return
        assert self.rank is not None
        chunks: dict[ResultKey, Any] = self._panels.group.together(lambda: self._blanks(output))
        described = self.plan.output(output.name)
        orientation, copies, dst = described.orientation, list[tuple[Copy, int, int]](), dict[int, Any]()
        for peer in range(len(self.plan.ranks)):
            for index, copy in self._taken_by(output, peer):
                copies.append((copy, copy.src, peer))
                if peer == self.rank:
                    dst[copy.dst] = (
                        chunks[output.name, index].T if orientation.transposed else chunks[output.name, index]
                    )
        self._exchange(copies, {self.rank: self._parts[output.name]}, dst, conjugated=orientation.conjugated)
        for copy, _, peer in copies:
            if peer == self.rank:
                keep_triangle(self.blas, described.form, dst[copy.dst][copy.dst_index], copy.row, copy.col)
        self._result |= chunks

    # Messages between participants

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self._entry.entered(int(boxes[0, 0])) if kind == "enter" else super().available(kind, boxes)

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return boxes of the chunks that are here, or the id under which ranks make their communicator."""
        return list(self._entry.answer()) if kind == "enter" else super().serve(kind, boxes)

    # The end

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._entry.abort(error)
        super().abort(error)


class NcclEngine(CollectiveEngine):
    """Factorizes on GPUs of any hosts, one GPU a worker process."""

    name = "nccl"

    def __init__(self) -> None:
        super().__init__()
        # What work that never ends may still write to.
        self.stuck: list[Any] = []

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

    def job(self, side: Side[Any]) -> NcclJob:
        """Return what does a participant's part of a run."""
        check_arrays(self.name, side.chunks)
        return NcclJob(side, self)


ENGINE = NcclEngine()
