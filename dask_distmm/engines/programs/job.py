"""One participant's side of a run in which ranks take the steps of a program; of one on tall matrices.

What a rank publishes others get by a `RankExchange`, as soon as it is there; chunks of operands that are elsewhere are
asked for before the first step. Those that this rank makes are made in threads, some ahead of the steps, once for each
pass over the operand, and dropped.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeGuard, TypeVar

import numpy as np

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ChunkKey, Job, ResultKey, Side, wait_checked
from dask_distmm.engines.exchange import RankExchange
from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.executor import Executor
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.numeric.sparse import rows_from, sparse_package
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.planning.placement import Placement
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.programs.steps import Buffer, Make, Step, Store

P = TypeVar("P", bound=Placement)


class ProgramJob(Job[P]):
    """One participant's side of a run whose ranks publish what others need."""

    lends = True

    def __init__(self, side: Side[P]) -> None:
        super().__init__(side)
        self.exchange = RankExchange(self.plan.ranks, self.comm)

    def prepare(self) -> None:
        """Offer what lets other ranks read what this one publishes."""
        if self.rank is not None:
            self.offer = self.exchange.offer(self.plan)

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer."""
        self.exchange.accept(offers)

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self._inputs if kind == "input" else self.exchange.published(kind, boxes)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of the chunks that are here, or what this rank has published."""
        if kind == "input":
            return super().serve(kind, boxes, flat)
        self.ended.check()
        return list(self.exchange.published(kind, boxes).result())

    def abort(self, error: BaseException) -> None:
        """End everything with `error`."""
        super().abort(error)
        self.exchange.abort(error)


class TallJob(ProgramJob[ProgramPlacement], Executor):
    """One participant's side of a program on tall matrices."""

    def __init__(self, side: Side[ProgramPlacement], kernels: Kernels) -> None:
        super().__init__(side)
        Executor.__init__(self, ProgramKernels(kernels), self.exchange, self.ended.check, self.progress)
        self._steps: tuple[Step, ...] = ()
        # Rows of chunks of operands by their names, also when they are gone.
        self._lengths: dict[str, int] = {}
        self._asked: dict[ChunkKey, Future[Sequence[Any]]] = {}
        self._result: dict[ResultKey, Any] = {}
        # Chunks of operands that were here before the run, and are still needed.
        self._operands: set[str] = set()
        # The loader of chunks in the order of the steps, and those chunks.
        self._loads: ChunkLoader | None = None
        self._uses = collections.deque[SourceChunk]()

    def prepare(self) -> None:
        """Record this rank's steps."""
        super().prepare()
        if self.rank is not None:
            self._steps = self.plan.steps(self.rank)

    def execute(self) -> dict[ResultKey, Any]:
        """Take all steps."""
        for step in self._steps:
            if isinstance(step, Make) and not self._is_made(step):
                self._operands.add(step.buffer.name)
                if (step.operand, step.number) not in self.chunks:
                    self._asked[step.operand, step.number] = self._ask(step)
        began = time.perf_counter()
        self.timings |= {"wait": 0.0} | ({"load": 0.0} if any(self.plan.problem.by_ranks) else {})
        # Infinities and NaN are checked for where they matter.
        threads = self.plan.participants[self.me].nthreads
        with np.errstate(all="ignore"), self.kernels.blas.working(threads), self.exchange:
            self.take(self._steps)
        self._complete()
        self.timings["work"] = time.perf_counter() - began - self.timings["wait"] - self.timings.get("load", 0.0)
        if self.kernels.blas.asynchronous:
            self.timings["compute"] = self.timings["work"]
        return self._result

    def _complete(self) -> None:
        """Wait until all is done."""

    def take(self, steps: Sequence[Step], *shares: Any) -> None:
        """Take steps; some chunks are made ahead of them."""
        uses = [self.chunks[step.operand, step.number].again() for step in steps if self._is_made(step)]
        if not uses:
            super().take(steps, *shares)
            return
        outside, loads = (self._loads, self._uses), self._loader(uses)
        self._loads, self._uses = loads, collections.deque(uses)
        try:
            super().take(steps, *shares)
        finally:
            loads.close()
            self._loads, self._uses = outside

    def _is_made(self, step: Step) -> TypeGuard[Make]:
        """Whether a step takes a chunk that this rank makes."""
        return isinstance(step, Make) and isinstance(self.chunks.get((step.operand, step.number)), SourceChunk)

    def _loader(self, uses: Sequence[SourceChunk]) -> ChunkLoader:
        """Return what makes chunks in this order."""
        threads = self.plan.participants[self.me].nthreads
        return ChunkLoader(uses, threads, made_ahead(threads) * sum(self.plan.problem.by_ranks))

    def _made(self, loads: ChunkLoader, chunk: SourceChunk) -> Any:
        """Return a chunk once it is made."""
        began = time.perf_counter()
        found = loads.take(chunk, self.ended.check)
        self.timings["load"] += time.perf_counter() - began
        return found

    def _begin(self, step: Make, chunk: Any) -> None:
        """Have a chunk of an operand, in the type that is computed in."""
        name = step.buffer.name
        dtype = self.plan.problem.dtype
        if sparse_package(chunk):
            self.arrays[name] = chunk if chunk.dtype == dtype else chunk.astype(dtype)
        else:
            array = self.kernels.xp.asarray(chunk, dtype)
            # BLAS reads no broadcast rows, as those of `da.zeros`; what NumPy does instead takes 15 times as long.
            self.arrays[name] = array.copy() if 0 in array.strides else array
        self._lengths[name] = chunk.shape[0]

    def _make(self, step: Make) -> None:
        if self._loads is not None and self._is_made(step):
            self._begin(step, self._made(self._loads, self._uses.popleft()))
        else:
            self._begin(step, self._chunk(step.operand, step.number))

    def _store(self, step: Store) -> None:
        array = self.arrays.pop(step.buffer.name)
        self._result[step.output, step.number] = self._handed_over(array, tall=bool(step.buffer.like))

    def _new(self, buffer: Buffer) -> Any:
        rows, cols = buffer.shape
        if buffer.host:
            return np.empty((rows, cols), np.dtype(buffer.dtype))
        if buffer.like:
            here = self._lengths[buffer.like]
            rows, cols = (here if rows < 0 else rows), (here if cols < 0 else cols)
        return self.kernels.empty((rows, cols), np.dtype(buffer.dtype), tall=bool(buffer.like))

    def _ask(self, step: Make) -> Future[Sequence[Any]]:
        """Ask the participant that has a chunk for it."""
        names = self.plan.problem.operands
        box = self.plan.whole(step.operand, step.number)
        boxes = np.array([(names.index(step.operand), step.number, *box)], np.int64)
        return self.comm.fetch(int(self.plan.where[step.operand][step.number]), "input", boxes, False)

    def _chunk(self, operand: str, number: int) -> Any:
        """Return a chunk of an operand that was there before the run."""
        if (operand, number) in self._asked:
            found = wait_checked(self._asked.pop((operand, number)), self.ended.check)
            chunk = rows_from(found, self.plan.whole(operand, number)[-1]) if len(found) > 1 else found[0]
        else:
            chunk = self.chunks[operand, number]
        return chunk

    def _free(self, buffer: Buffer) -> None:
        super()._free(buffer)
        if buffer.name in self._operands:
            self._operands.discard(buffer.name)
            if not self._operands:
                self.on_gathered()

    def _handed_over(self, array: Any, *, tall: bool) -> Any:
        """Return a chunk of an output as Dask gets it."""
        return np.ascontiguousarray(array)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return chunks of operands, which are asked for whole, or what this rank has published."""
        if kind != "input":
            return super().serve(kind, boxes, flat)
        found = [self.chunks[self.plan.problem.operands[operand], number] for operand, number, *_ in boxes.tolist()]
        return [part for x in found for part in ([x.data, x.indices, x.indptr] if sparse_package(x) else [x])]
