"""The products of a rank that makes chunks of A or B itself: each made, multiplied and dropped.

::

    threads     make 2 | make 3 | make 4        each on a stream of its own (`making`)
    copies               join 1 | join 2        small chunks side by side in a buffer, on a stream of pulls
    GEMMs                  multiply 0 | multiply 1

The host takes the chunks in the order of the steps, and puts a step on its streams as soon as the tasks of its chunks
have returned; their kernels may still run. Before it takes more chunks than it may hold, it waits until earlier steps
are over, and drops theirs.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy as cp

from dask_distmm.engines.gpu.finishing import NativeBias
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.loads import Loads, OperandBuffers
from dask_distmm.engines.peer.making import DeviceMaker, Made, bits
from dask_distmm.engines.peer.products import Gemms
from dask_distmm.engines.peer.readable import DeviceView, Sources
from dask_distmm.engines.peer.result import Downloads, Result
from dask_distmm.engines.peer.schedule import Load, Product, ScheduleStep, StreamStep, StreamSteps
from dask_distmm.engines.peer.state import PeerState, Trace
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.layout.rectangles import Span

# Steps on their streams that the host has not seen the end of.
_MOST_STEPS = 8


class _Over(NamedTuple):
    """The event behind a step that is on its streams, and the chunks that it reads until then."""

    event: cp.cuda.Event
    chunks: dict[SourceChunk, Made]


class Streaming:
    """All steps of one rank; has what `Multiplication` has for its user."""

    early = first = None

    def __init__(
        self,
        work: StreamSteps,
        buffers: OperandBuffers,
        gemms: Gemms,
        result: Result,
        sources: Sources,
        engine: PeerState,
        trace: Trace,
    ) -> None:
        self.steps, self.rank = work.steps, result.rank
        self._limits, self._buffers, self._gemms, self._result = work.source, buffers, gemms, result
        self._sources, self._engine, self._trace = sources, engine, trace
        self._resident, self._product, steps = work.resident, None, []
        if self._resident is not None and self._resident.slot is not None:
            # It is loaded as other operands are, for a product that is never made.
            self._product = Product((self._resident,), (), False)
            steps = [ScheduleStep([self._resident], [self._product], ())]
        self.loads = Loads(steps, buffers, sources, trace)
        problem = result.plan.problem
        self._chunks = {key: chunk for key, chunk in sources.chunks.items() if isinstance(chunk, SourceChunk)}
        extents = {name: problem.chunks_of(name) for name in "ab"}
        self._sizes: dict[SourceChunk, int] = {}
        for (name, number), chunk in self._chunks.items():
            i, j = divmod(number, len(extents[name][1]))
            self._sizes[chunk] = extents[name][0][i] * extents[name][1][j] * buffers.itemsizes["ab".index(name)]
        self._over: collections.deque[_Over] = collections.deque()
        # How many steps that are not over read each chunk.
        self._held: collections.Counter[SourceChunk] = collections.Counter()
        self._held_bytes, self.most_held, self.waited = 0, 0, 0.0
        self._last_use: dict[Any, cp.cuda.Event] = {}

    def begin_early(self, rate: float, *, possible: bool) -> None:
        """Do nothing: no chunk is there before the vote."""

    def find_loads(self) -> None:
        """Find the copies of what others have of the operand that is not made."""
        self.loads.find({load.number for step in self.loads.steps for load in step.loads})

    def run(
        self, bias: NativeBias | None, progress: Callable[[float], None], downloads: Downloads | None = None
    ) -> None:
        """Make and multiply all chunks, and add the sums of other ranks."""
        assert bias is None
        plan, ended = self._result.plan, self._sources.ended
        threads = self._limits.threads
        maker = DeviceMaker(
            plan.problem, self._chunks, self._engine.making(threads), record(cp.cuda.get_current_stream())
        )
        uses = [chunk for step in self.steps for chunk in self._chunks_of(step)]
        loader = ChunkLoader(uses, threads, self._limits.ahead, maker.make, maker.begin)
        try:
            self.loads.begin()
            if self._product is not None:
                self.loads.issue_for(self._product)
                self.loads.wait_for(self._product, self._engine.stream)
            for number, step in enumerate(self.steps):
                self._make_room(step)
                self._multiply(number, step, self._take(step, loader))
                if downloads is not None:
                    downloads.begin(number, self._over[-1].event)
                progress(number / len(self.steps))
            self._complete()
            ended.wait(self._over[-1].event)
        finally:
            loader.close()
            # Nobody gets the memory of a chunk while it is read.
            for stream in (self._sources.stream, self._engine.stream):
                stream.synchronize()
            self._over.clear()

    def _chunk(self, load: Load, number: int) -> SourceChunk:
        return self._chunks["ab"[load.operand], number]

    def _chunks_of(self, step: StreamStep) -> list[SourceChunk]:
        """Return the chunks of which a step reads parts; one that it reads several parts of is there as often."""
        return [self._chunk(load, block.chunk) for load in step.loads for block in load.chunk_blocks]

    def _make_room(self, step: StreamStep) -> None:
        """Drop the chunks of steps that are over; wait for such where too many would be held."""
        more = sum(self._sizes[chunk] for chunk in set(self._chunks_of(step)) if not self._held[chunk])
        while self._over:
            full = self._held_bytes + more > self._limits.held_bytes or len(self._over) > _MOST_STEPS
            if full:
                self._sources.ended.wait(self._over[0].event)
            elif not self._over[0].event.done:
                break
            for chunk in self._over.popleft().chunks:
                self._held[chunk] -= 1
                if not self._held[chunk]:
                    self._held_bytes -= self._sizes[chunk]
        self._sources.ended.check()

    def _take(self, step: StreamStep, loader: ChunkLoader) -> dict[SourceChunk, Made]:
        """Return the chunks of a step, when their tasks have returned."""
        started = time.perf_counter()
        taken = {chunk: loader.take(chunk, self._sources.ended.check) for chunk in self._chunks_of(step)}
        self.waited += time.perf_counter() - started
        for chunk in taken:
            self._held_bytes += 0 if self._held[chunk] else self._sizes[chunk]
            self._held[chunk] += 1
        self.most_held = max(self.most_held, self._held_bytes)
        return taken

    def _multiply(self, number: int, step: StreamStep, taken: dict[SourceChunk, Made]) -> None:
        """Put a step on its streams."""
        stream = self._engine.stream
        views: list[DeviceView | None] = [None, None]
        for load in step.loads:
            views[load.operand] = self._joined(load, taken) if load.slot is not None else self._in_place(load, taken)
        for operand in (0, 1):
            views[operand] = views[operand] or self._other(operand, step, views[1 - operand])
        a, b = views
        assert a is not None
        assert b is not None
        gemms = self._gemms.between(step.rect, step.depth[1] - step.depth[0], a, b, add=step.add)
        with self._trace.step("GEMM", number, sum(gemm.flops for gemm in gemms), stream):
            for gemm in gemms:
                gemm.run(stream)
        self._over.append(_Over(record(stream), taken))
        self._last_use |= {load.slot: self._over[-1].event for load in step.loads}

    def _in_place(self, load: Load, taken: dict[SourceChunk, Made]) -> DeviceView:
        """Return the part of a chunk that is multiplied as it is; the stream of GEMMs waits until it is complete."""
        (block,) = load.chunk_blocks
        made = taken[self._chunk(load, block.chunk)]
        self._engine.stream.wait_event(made.complete)
        return _shifted(made.view, block.r0, block.c0)

    def _joined(self, load: Load, taken: dict[SourceChunk, Made]) -> DeviceView:
        """Return parts of chunks side by side in a buffer; the stream of GEMMs waits for the copies."""
        assert load.slot is not None
        stream, buffer = self._sources.stream, self._buffers.arrays[load.slot]
        if load.slot in self._last_use:
            stream.wait_event(self._last_use[load.slot])
        for block in load.chunk_blocks:
            made = taken[self._chunk(load, block.chunk)]
            stream.wait_event(made.complete)
            target = buffer[block.row : block.row + block.rows, block.col : block.col + block.cols]
            part = made.array[block.r0 : block.r0 + block.rows, block.c0 : block.c0 + block.cols]
            with stream:
                bits(target)[...] = bits(part)
        self._buffers.complete(load, stream)
        self._engine.stream.wait_event(record(stream))
        return self._buffers.target(load)

    def _other(self, operand: int, step: StreamStep, view: DeviceView | None) -> DeviceView:
        """Return the part of an operand that is not made for itself: it is here, or the transpose of the other one."""
        if self._resident is None:
            assert self._limits.twin
            assert view is not None
            (pointer, down, across), order = view
            return DeviceView(Span(pointer, across, down), "F" if order == "C" else "C")
        along = step.depth[0] - self._resident.depth[0]
        return _shifted(self._buffers.view(self._resident), *((0, along) if operand == 0 else (along, 0)))

    def _complete(self) -> None:
        """Copy the other triangle of a symmetric D, and add the sums of other ranks."""
        result, count = self._result, len(self._result.plan.ranks)
        result.mirror()
        for rank in range(count if result.plan.grid[2] > 1 else 0):
            result.raise_flag(rank)
        while result.coming:
            result.add_ready(block=True)
        if count > 1:
            result.raise_flag(count)


def _shifted(view: DeviceView, rows: int, cols: int) -> DeviceView:
    """Return the part of a matrix that begins at a row and a column."""
    return view._replace(span=view.span.at(rows, cols))
