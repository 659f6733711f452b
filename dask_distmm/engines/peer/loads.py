"""A and B on one rank: chunks that are multiplied in place, buffers for all other parts, and the loads that fill these.

A load is the copies that bring a part of A or B into its buffer. They are issued in the order of the schedule. Of
operands whose chunks a rank makes itself it waits for the tasks that make them, a few ahead, in threads.

Each thread has a CUDA stream of its own, which is CuPy's current stream there. So the kernels of a task overlap with
those of other threads and with GEMMs, and the thread puts the next task's kernels on its stream while they run. An
event tells when a chunk is complete, and the stream of GEMMs waits for it.

Memory. A chunk's memory comes from CuPy's pool in the order of its thread's stream (CuPy's own pool has free blocks for
each stream; RMM's waits where a block goes from one stream to another). When the last reference is dropped, the pool
may hand it to the next task of that thread at once, whose kernels come later *on that stream*, but not later than a
GEMM on another one. So a reference is kept until the event behind the last work that reads the chunk is done, as the
host has seen it (`Multiplication`). What a task allocates and frees itself is used only on its thread's stream; so are
the original of a chunk that is converted, and what is copied to the GPU: all of that may be dropped at once.

These streams and CUDA's default stream wait for each other (they are not created as non-blocking). Without that, tasks
would be wrong that use libraries which work on the default stream (cuDF, Numba, PyTorch), or arrays that other tasks
have made there. Streams of the engine are non-blocking: GEMMs do not wait for the default stream. With several threads,
what one task leaves on the GPU for others, as in a cache, has to be complete when it leaves it: others run on other
streams. A worker of dask-cuda has one thread unless it is told otherwise.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.gpu.copy_kernels import CopyBatch
from dask_distmm.engines.gpu.host import device_like, in_type, to_device
from dask_distmm.engines.gpu.operands import check_arrays, record
from dask_distmm.engines.peer.readable import DeviceView, Parts, Pull, Sources
from dask_distmm.engines.peer.result import ALIGNED
from dask_distmm.engines.peer.schedule import Load, Product, ScheduleStep, Slot, made_orders, pending_loads
from dask_distmm.engines.sources import ChunkLoader, Source, SourceChunk
from dask_distmm.layout.rectangles import Span, span_of
from dask_distmm.numeric.types import FP8, carried
from dask_distmm.planning import Problem
from dask_distmm.planning.cuts import Rect, padded
from dask_distmm.planning.schedule import ChunkSource, extent_multiple

# Chunks that are multiplied in place, and buffers


class OperandBuffers:
    """Where the GEMMs of a rank find parts of A and B."""

    def __init__(self, sources: Sources) -> None:
        self._plan, self.sources = sources.plan, sources
        self._multiple, plan = extent_multiple(sources.plan.problem), sources.plan
        self._orders = ("C", "F") if plan.problem.fp8 else made_orders(plan)
        self.itemsizes = tuple(carried(name, "cupy").itemsize for name in plan.problem.matrix_types)
        self.arrays: dict[Slot, Any] = {}
        # By the numbers of loads the chunks that were made, and are multiplied as they are.
        self.made: dict[int, DeviceView] = {}

    def allocate(self, slots: Mapping[Slot, tuple[int, int]]) -> None:
        """Allocate a buffer for each slot."""
        self.arrays = {slot: self._buffer(slot, *size) for slot, size in slots.items()}

    def _buffer(self, slot: Slot, extent: int, depth_extent: int) -> Any:
        """Return a buffer for parts of A (own axis x k) or of B (k x own axis)."""
        dtype = carried(self._plan.problem.matrix_types[slot[0]], "cupy")
        shape, order = ((extent, depth_extent) if slot[0] == 0 else (depth_extent, extent)), self._orders[slot[0]]
        fast = 1 if order == "C" else 0
        full = [shape[0], shape[1]]
        full[fast] = padded(full[fast], ALIGNED)
        made = cp.empty(tuple(full), dtype, order=order)
        return made[: shape[0], : shape[1]]

    def in_place(self, operand: int, rect: Rect) -> bool:
        """Whether a part of an operand is in one chunk of this GPU such that the library can multiply it in place."""
        if self.sources.is_in_host(operand):
            return False
        found = self.sources.chunk_at(operand, rect, self.itemsizes[operand])
        if found is None:
            return False
        view, rows, cols = found
        (pointer, row, col), size = view.span, self.itemsizes[operand]
        inner, outer, width, height = (col, row, cols, rows) if view.order == "C" else (row, col, rows, cols)
        aligned = pointer % size == 0 and outer % size == 0
        if self._plan.problem.matrices[operand].conjugated and view.order == "C":
            # The library conjugates only operands that it transposes; other ones are conjugated in a buffer.
            return False
        if self._multiple > 1:
            aligned = not any(x % 16 for x in (pointer, outer, rows, cols))
        if self._plan.problem.fp8:
            aligned = aligned and view.order == self._orders[operand]
        return bool(aligned and (inner == size or width == 1) and (height == 1 or outer >= width * size))

    def view(self, load: Load) -> DeviceView:
        """Return where the part of an operand is that a load describes: in its buffer, or in a chunk."""
        if load.of is not None:
            span, order = self.view(load.of)
            if load.of.operand != load.operand:
                return DeviceView(Span(span.pointer, span.col_stride, span.row_stride), "F" if order == "C" else "C")
            along = load.depth[0] - load.of.depth[0]
            return DeviceView(span.at(*((0, along) if load.operand == 0 else (along, 0))), order)
        if load.slot is not None:
            return self.target(load)
        if load.made:
            return self.made[load.number]
        found = self.sources.chunk_at(load.operand, load.rect, self.itemsizes[load.operand])
        assert found is not None
        return found[0]

    def target(self, load: Load) -> DeviceView:
        """Return the place in a buffer that a load fills."""
        assert load.slot is not None
        at = (load.at, 0) if load.operand == 0 else (0, load.at)
        return DeviceView(span_of(self.arrays[load.slot]).at(*at), self._orders[load.operand])

    def complete(self, load: Load, stream: cp.cuda.Stream) -> None:
        """Put on a stream the padding and the conjugation of a part whose copies are on that stream already."""
        self._pad(load, stream)
        if self._plan.problem.matrices[load.operand].conjugated and self._orders[load.operand] == "C":
            assert load.slot is not None
            at, along_k = slice(load.at, load.at + load.own[1] - load.own[0]), slice(load.depth_extent)
            part = self.arrays[load.slot][(at, along_k) if load.operand == 0 else (along_k, at)]
            with stream:
                cp.conjugate(part, out=part)

    def _pad(self, load: Load, stream: cp.cuda.Stream) -> None:
        """Set the padding of k to zero: GEMMs sum over it."""
        multiple, depth_extent = self._multiple, load.depth_extent
        if depth_extent % multiple:
            assert load.slot is not None
            buffer, more = self.arrays[load.slot], padded(depth_extent, multiple)
            at = slice(load.at, padded(load.at + load.own[1] - load.own[0], multiple))
            with stream:
                buffer[(at, slice(depth_extent, more)) if load.operand == 0 else (slice(depth_extent, more), at)] = 0


# Chunks that tasks make in threads of the rank, on the GPU, in the type in which they are multiplied


# One thread at a time copies to the GPU: several have no more of the bus, and the pinned buffers are for one.
_copying = threading.Lock()


class Made(NamedTuple):
    """A chunk on the GPU."""

    # Keeps its memory.
    array: Any
    # Where it is.
    view: DeviceView
    # The event after which it may be read.
    complete: cp.cuda.Event


class DeviceMaker:
    """What the threads of a `ChunkLoader` do for a rank."""

    def __init__(
        self,
        problem: Problem,
        chunks: Mapping[ChunkKey, SourceChunk],
        streams: Sequence[cp.cuda.Stream],
        begin: cp.cuda.Event,
    ) -> None:
        self._problem, self._event = problem, begin
        self._keys = {chunk: key for key, chunk in chunks.items()}
        self._free, self._own = list(streams), threading.local()
        # A thread begins with the first GPU that the process sees.
        self._use_device = cp.cuda.Device().use

    def begin(self) -> None:
        """Give a thread its stream."""
        self._use_device()
        self._own.stream = self._free.pop()
        self._own.stream.wait_event(self._event)

    def make(self, source: Source, chunks: Sequence[SourceChunk]) -> dict[SourceChunk, Made]:
        """Run the task of a source; return those of its chunks that are used."""
        stream = self._own.stream
        # Not by `use`: a task that has a stream of its own for a while would leave its thread on the default stream.
        with stream:
            made = source.make()
            current = cp.cuda.get_current_stream()
            if current.ptr != stream.ptr:
                # The task has left its thread with another one.
                stream.wait_event(record(current))
            with stream:
                arrays = {chunk: self._on_device(*self._keys[chunk], chunk.view(made), stream) for chunk in chunks}
        complete = record(stream)
        return {chunk: Made(*found, complete) for chunk, found in arrays.items()}

    def _on_device(self, operand: str, number: int, chunk: Any, stream: cp.cuda.Stream) -> tuple[Any, DeviceView]:
        """Return a chunk on the GPU, in the type and the memory order in which it is multiplied, and where it is."""
        check_arrays("peer", {(operand, number): chunk})
        problem, type_name = self._problem, self._problem[operand].dtype
        goal = problem.matrix_types["ab".index(operand)]
        if not isinstance(chunk, cp.ndarray):
            part = chunk.view(np.uint8) if type_name in FP8 else chunk
            chunk = device_like(part)
            with _copying:
                to_device(part, chunk, stream, "made")
        if type_name != goal:
            order = "F" if lying(chunk, "F") and not lying(chunk, "C") else "C"
            source, chunk = chunk, cp.empty(chunk.shape, carried(goal, "cupy"), order=order)
            chunk[...] = in_type(source, type_name, chunk.dtype)
        # The library conjugates what it transposes.
        wanted = "F" if problem[operand].conjugated else ""
        if (view := lying(chunk, wanted)) is None:
            source, chunk = chunk, cp.empty(chunk.shape, chunk.dtype, order=wanted or "C")
            bits(chunk)[...] = bits(source)
            view = lying(chunk, wanted)
        assert view is not None
        return chunk, view


def bits(array: Any) -> Any:
    """Return an array to be copied as it is: CuPy has no kernels for some types of two bytes."""
    return array.view(np.uint16) if array.dtype.kind == "V" and array.dtype.itemsize == 2 else array


def lying(array: Any, wanted: str = "") -> DeviceView | None:
    """Return the storage of a matrix if its rows (order ``"C"``) or columns (``"F"``) are dense; None if not."""
    (rows, cols), (down, across), size = array.shape, map(int, array.strides), int(array.itemsize)
    pointer = int(array.data.ptr)
    if pointer % size:
        return None
    # The stride along an axis of length 1 means nothing.
    if wanted != "F" and (across == size or cols == 1) and (rows == 1 or (down >= cols * size and not down % size)):
        return DeviceView(Span(pointer, down if rows > 1 else cols * size, size), "C")
    if wanted != "C" and (down == size or rows == 1) and (cols == 1 or (across >= rows * size and not across % size)):
        return DeviceView(Span(pointer, size, across if cols > 1 else rows * size), "F")
    return None


# All loads of a rank


class Loads:
    """All loads of a rank; `source` if it makes chunks itself."""

    def __init__(
        self, steps: Sequence[ScheduleStep], buffers: OperandBuffers, source: ChunkSource | None = None
    ) -> None:
        self.steps, self.buffers, self.source = steps, buffers, source
        self.sources = sources = buffers.sources
        self.before_vote: set[int] = set()
        # For each other load its chunk blocks, and the copies of those on this GPU unless these copies are done.
        self._parts: dict[int, tuple[Parts, list[CopyBatch]]] = {}
        self._found: dict[int, Pull] = {}
        self._pending: collections.deque[tuple[Load, int]] = collections.deque()
        self._done: dict[int, cp.cuda.Event] = {}
        self._last_use: dict[Any, cp.cuda.Event] = {}
        # Chunks that this rank makes, with their bytes; those of the step that is issued, and how many steps that are
        # not over read each one.
        problem = sources.plan.problem
        self._chunks = {key: chunk for key, chunk in sources.chunks.items() if isinstance(chunk, SourceChunk)}
        self._sizes: dict[SourceChunk, int] = {}
        for (name, number), chunk in self._chunks.items():
            rows, cols = problem[name].chunks
            i, j = divmod(number, len(cols))
            self._sizes[chunk] = rows[i] * cols[j] * buffers.itemsizes["ab".index(name)]
        self._loader: ChunkLoader | None = None
        self._taken: dict[SourceChunk, Made] = {}
        self._held: collections.Counter[SourceChunk] = collections.Counter()
        self._held_bytes, self.most_held, self.waited = 0, 0, 0.0

    def copy_own_chunks(self, me: int, stream: cp.cuda.Stream) -> None:
        """Find the chunk blocks of all loads; put on a stream the copies of own chunks into buffers that are free.

        A buffer is free for its first load. Later loads into the same buffer wait until it has been multiplied.
        """
        used: set[Slot | None] = set()
        for step in self.steps:
            for load in step.loads:
                if load.made:
                    continue
                target, size = self.buffers.target(load).span, self.buffers.itemsizes[load.operand]
                parts = self.sources.parts(load.operand, load.chunk_blocks, target, size)
                if self.sources.is_in_host(load.operand):
                    self._parts[load.number] = parts, []
                    continue
                own = self.sources.own_copies(parts)
                if load.slot in used:
                    self._parts[load.number] = parts, [own]
                elif (parts.holders == me).all():
                    self._put(load, Pull([own], {}, 0, {}), stream)
                    self.before_vote.add(load.number)
                else:
                    self.sources.run(own, stream)
                    self._parts[load.number] = parts, []
            used.update(load.slot for product in step.products for load in product.loaded)

    def find(self, at_first: Collection[int]) -> None:
        """Find all copies from other GPUs, and map the memory of these, once the offers have been read."""
        self._found = self.sources.find(self._parts, at_first)

    def begin(self) -> None:
        """Begin to issue: all loads that are not complete are pending."""
        self._pending.extend(one for one in pending_loads(self.steps) if one[0].number not in self.before_vote)
        if self.source is not None:
            begun = record(cp.cuda.get_current_stream())
            making = self.sources.engine.making(self.source.threads)
            maker = DeviceMaker(self.sources.plan.problem, self._chunks, making, begun)
            uses = [chunk for step in self.steps for chunk in self._chunks_of(step)]
            self._loader = ChunkLoader(uses, self.source.threads, self.source.ahead, maker.make, maker.begin)

    def close(self) -> None:
        """Make no more chunks; nobody gets the memory of those that were made while a stream reads it."""
        if self._loader is not None:
            self._loader.close()
            for stream in (self.sources.stream, self.sources.engine.stream):
                stream.synchronize()
            self._taken.clear()

    def issue_for(self, product: Product) -> None:
        """Issue pending loads, in their order, until those that a product needs are among them."""
        needed = {load.number for load in product.needed} - self.before_vote
        while not needed <= self._done.keys():
            self._issue(self._pending.popleft()[0])

    def issue_next(self, step: int) -> bool:
        """Issue the next pending load if its buffer is free after a step and no worker must be asked for chunks."""
        load, after = self._pending[0] if self._pending else (None, 0)
        if load is None or load.made or after > step or self._found[load.number].outside:
            return False
        self._pending.popleft()
        self._issue(load)
        return True

    def wait_for(self, product: Product, stream: cp.cuda.Stream) -> None:
        """Let a stream wait for the loads that a product needs."""
        for load in product.needed:
            if load.number in self._done:
                stream.wait_event(self._done[load.number])

    def note_use(self, step: ScheduleStep, over: cp.cuda.Event) -> None:
        """Note the event after which the buffers that a step multiplies may be loaded anew."""
        self._last_use |= {load.slot: over for product in step.products for load in product.loaded}

    def _issue(self, load: Load) -> None:
        """Put the pulls of a load on their stream, where they wait until its buffer is free; or have it made."""
        if load.made:
            self._done[load.number] = self._make(load)
            return
        stream, pull = self.sources.stream, self._found[load.number]
        self.sources.ask(pull)
        if self._pending and not self._pending[0][0].made:
            # While these parts are copied the next ones travel.
            self.sources.ask(self._found[self._pending[0][0].number])
        if load.slot in self._last_use:
            stream.wait_event(self._last_use[load.slot])
        self._put(load, pull, stream)
        self._done[load.number] = record(stream)

    def _put(self, load: Load, pull: Pull, stream: cp.cuda.Stream) -> None:
        self.sources.pull(pull, stream)
        self.buffers.complete(load, stream)

    # Chunks that this rank makes

    def _chunks_of(self, step: ScheduleStep) -> list[SourceChunk]:
        """Return the chunks of which a step reads parts; one that it reads several parts of is there as often."""
        return [chunk for load in step.loads if load.made for chunk in self._chunks_in(load)]

    def _chunks_in(self, load: Load) -> list[SourceChunk]:
        return [self._chunks["ab"[load.operand], block.chunk] for block in load.chunk_blocks]

    def are_full(self, step: ScheduleStep) -> bool:
        """Whether more chunks would be held with those of a step than may be."""
        more = sum(self._sizes[chunk] for chunk in set(self._chunks_of(step)) if not self._held[chunk])
        return self.source is not None and self._held_bytes + more > self.source.held_bytes

    def _make(self, load: Load) -> cp.cuda.Event:
        """Have the chunks of a load: one as it is, or parts side by side in a buffer; return when they are complete."""
        stream, chunks = self.sources.stream, [self._take(chunk) for chunk in self._chunks_in(load)]
        if load.slot is None:
            (block,), (chunk,) = load.chunk_blocks, chunks
            view = chunk.view
            self.buffers.made[load.number] = view._replace(span=view.span.at(block.r0, block.c0))
            return chunk.complete
        if load.slot in self._last_use:
            stream.wait_event(self._last_use[load.slot])
        for block, chunk in zip(load.chunk_blocks, chunks, strict=True):
            stream.wait_event(chunk.complete)
            r0, r1, c0, c1 = block.rect
            with stream:
                bits(self.buffers.arrays[load.slot][r0:r1, c0:c1])[...] = bits(chunk.array[block.inside])
        self.buffers.complete(load, stream)
        return record(stream)

    def _take(self, chunk: SourceChunk) -> Made:
        """Return a chunk, when its task has returned."""
        assert self._loader is not None
        started = time.perf_counter()
        found: Made = self._loader.take(chunk, self.sources.ended.check)
        self.waited += time.perf_counter() - started
        if chunk not in self._taken:
            self._taken[chunk] = found
            self._held_bytes += 0 if self._held[chunk] else self._sizes[chunk]
            self._held[chunk] += 1
            self.most_held = max(self.most_held, self._held_bytes)
        return found

    def taken(self) -> dict[SourceChunk, Made]:
        """Return the chunks of the step that was issued, which must be kept until it is over, and then released."""
        found, self._taken = self._taken, {}
        return found

    def release(self, chunks: Iterable[SourceChunk]) -> None:
        """Hold the chunks of a step no longer that is over."""
        for chunk in chunks:
            self._held[chunk] -= 1
            if not self._held[chunk]:
                self._held_bytes -= self._sizes[chunk]
