"""One participant's side of a program: its rank's steps, one after the other.

What a rank publishes others get by a `RankExchange`, as soon as it is there; chunks of operands that are elsewhere are
asked for before the first step. Those that this rank makes are made in threads, some ahead of the steps, once for each
pass over the operand, and dropped.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeGuard

import numpy as np

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ChunkKey, Job, ResultKey, Side, wait_checked
from dask_distmm.engines.exchange import RankExchange
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.numeric.sparse import rows_from, sparse_package
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.planning.program import PART, ProgramPlacement
from dask_distmm.programs.steps import TURN, Buffer, Call, Drop, If, Loop, Make, New, Publish, Pull, Step, Store

# Number of messages that are requested before they are needed: then they come as soon as they are there.
_AHEAD = 4


class ProgramJob(Job[ProgramPlacement]):
    """One participant's side of one run. See the module's text."""

    def __init__(self, side: Side[ProgramPlacement], kernels: Kernels) -> None:
        super().__init__(side)
        self.kernels = ProgramKernels(kernels)
        self._steps: tuple[Step, ...] = ()
        self._arrays: dict[str, Any] = {}
        # Rows of chunks of operands by their names, also when they are gone.
        self._lengths: dict[str, int] = {}
        self.exchange = RankExchange[tuple[str, int]](self.plan.ranks, self.comm)
        # Keys published so far, in order; the turns of all loops so far; the offset of numbers of messages.
        self._held: dict[int, None] = {}
        self._turns = self._offset = 0
        self._asked: dict[ChunkKey, Future[Sequence[Any]]] = {}
        # By rank and number.
        self._pulls: dict[tuple[int, int], Any] = {}
        self._result: dict[ResultKey, Any] = {}
        # Chunks of operands that were here before the run, and are still needed.
        self._operands: set[str] = set()

    def prepare(self) -> None:
        """Record this rank's steps."""
        if self.rank is not None:
            self._steps = self.plan.steps(self.rank)
            self.offer = self.exchange.offer(self.plan)

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer."""
        self.exchange.accept(offers)

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
        with np.errstate(all="ignore"), self.exchange:
            self._take_all(self._steps, 0.0, 1.0)
        self._complete()
        self.timings["work"] = time.perf_counter() - began - self.timings["wait"] - self.timings.get("load", 0.0)
        if self.kernels.blas.asynchronous:
            self.timings["compute"] = self.timings["work"]
        return self._result

    def _complete(self) -> None:
        """Wait until all is done."""

    def _take_all(self, steps: Sequence[Step], before: float, share: float) -> None:
        pulls = (step for step in steps if isinstance(step, Pull))
        for pull in itertools.islice(pulls, _AHEAD):
            self._ask_for(pull)
        uses = [self.chunks[step.operand, step.number].again() for step in steps if self._is_made(step)]
        loads, made = self._loader(uses) if uses else None, collections.deque(uses)
        try:
            for number, step in enumerate(steps, start=1):
                self.ended.check()
                if isinstance(step, If):
                    branch = step.then if self._arrays[step.flag.name].all() else step.otherwise
                    self._take_all(branch, before + share * (number - 1) / len(steps), share / len(steps))
                elif isinstance(step, Loop):
                    self._repeat(step, before + share * (number - 1) / len(steps), share / len(steps))
                elif loads is not None and self._is_made(step):
                    self._begin(step, self._taken(loads, made.popleft()))
                else:
                    self._take(step)
                    if isinstance(step, Pull):
                        for pull in itertools.islice(pulls, 1):
                            self._ask_for(pull)
                self.progress(before + share * number / len(steps))
        finally:
            if loads is not None:
                loads.close()

    def _is_made(self, step: Step) -> TypeGuard[Make]:
        """Whether a step takes a chunk that this rank makes."""
        return isinstance(step, Make) and isinstance(self.chunks.get((step.operand, step.number)), SourceChunk)

    def _loader(self, uses: Sequence[SourceChunk]) -> ChunkLoader:
        """Return what makes chunks in this order."""
        threads = self.plan.participants[self.me].nthreads
        return ChunkLoader(uses, threads, made_ahead(threads) * sum(self.plan.problem.by_ranks))

    def _taken(self, loads: ChunkLoader, chunk: SourceChunk) -> Any:
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
            self._arrays[name] = chunk if chunk.dtype == dtype else chunk.astype(dtype)
        else:
            array = self.kernels.xp.asarray(chunk, dtype)
            # BLAS reads no broadcast rows, as those of `da.zeros`; what NumPy does instead takes 15 times as long.
            self._arrays[name] = array.copy() if 0 in array.strides else array
        self._lengths[name] = chunk.shape[0]

    def _repeat(self, loop: Loop, before: float, share: float) -> None:
        outside, flag, come = self._offset, self._arrays[loop.flag.name], before
        pulls = [step for step in loop.body if isinstance(step, Pull)]
        for turn in range(loop.most):
            if not flag.all():
                break
            self._turns += 1
            self._offset, held = self._turns * TURN, list(self._held)
            for pull in pulls:
                self._ask_for(pull)
            for step in loop.body:
                self.ended.check()
                if isinstance(step, If):
                    self._take_all(step.then if self._arrays[step.flag.name].all() else step.otherwise, come, 0.0)
                elif isinstance(step, Loop):
                    self._repeat(step, come, 0.0)
                else:
                    self._take(step)
            # In a turn all wait for each other: others have what was published before it.
            for key in held:
                if key in self._held:
                    del self._held[key]
                    self.exchange.forget((PART, key))
            come = before + share * max(self.kernels.reached, (turn + 1) / loop.most)
            self.progress(come)
        self._offset = outside

    def _take(self, step: Step) -> None:
        arrays = self._arrays
        match step:
            case Call(kernel, arguments, options):
                began = time.perf_counter()
                getattr(self.kernels, kernel)(*[arrays[buffer.name] for buffer in arguments], **options)
                if not self.kernels.blas.asynchronous:
                    phase = f"{kernel}()"
                    self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - began
            case New(buffer, zero):
                arrays[buffer.name] = self._new(buffer)
                if zero:
                    arrays[buffer.name][...] = 0
            case Make(_, operand, number):
                self._begin(step, self._chunk(operand, number))
            case Publish(key, buffers, copied):
                self._held[key + self._offset] = None
                lent = [self._lent(arrays[buffer.name], copied=copied) for buffer in buffers]
                self.exchange.publish((PART, key + self._offset), lent)
            case Pull(owner, key, buffers):
                began = time.perf_counter()
                found = self.exchange.get(self._pulls.pop((owner, key + self._offset)), self.ended.check)
                self.timings["wait"] += time.perf_counter() - began
                for buffer, part in zip(buffers, found, strict=True):
                    self._fill(arrays[buffer.name], part)
            case Store(buffer, output, number):
                self._result[output, number] = self._handed_over(arrays.pop(buffer.name), tall=bool(buffer.like))
            case Drop(buffer):
                self._free(arrays, buffer)
                if buffer.name in self._operands:
                    self._operands.discard(buffer.name)
                    if not self._operands:
                        self.on_gathered()

    def _ask_for(self, pull: Pull) -> None:
        """Ask for what another rank publishes, now or later."""
        key = pull.key + self._offset
        self._pulls[pull.owner, key] = self.exchange.ask(pull.owner, (PART, key))

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

    def _free(self, arrays: dict[str, Any], buffer: Buffer) -> None:
        """Free a buffer."""
        del arrays[buffer.name]

    def _lent(self, array: Any, *, copied: bool) -> Any:
        """Return what others get of an array, or a copy of it."""
        return array.copy(order="K") if copied else array

    def _fill(self, target: Any, part: Any) -> None:
        """Write what another rank has lent."""
        target[...] = part

    def _handed_over(self, array: Any, *, tall: bool) -> Any:
        """Return a chunk of an output as Dask gets it."""
        return np.ascontiguousarray(array)

    # For peers

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self.exchange.published(kind, boxes) if kind == PART else self._inputs

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return chunks of operands, or what this rank has published."""
        if kind == "input":
            found = [self.chunks[self.plan.problem.operands[operand], number] for operand, number, *_ in boxes.tolist()]
            return [part for x in found for part in ([x.data, x.indices, x.indptr] if sparse_package(x) else [x])]
        self.ended.check()
        return list(self.exchange.published(kind, boxes).result())

    def abort(self, error: BaseException) -> None:
        """End everything with `error`."""
        super().abort(error)
        self.exchange.abort(error)
