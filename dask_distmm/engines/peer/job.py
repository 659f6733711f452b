"""One participant's side of one run that pulls.

::

    prepare()   chunks are complete and told, buffers and D are allocated. Its failure is a vote against the run
    accept()    others' offers are read; what they no longer have is unmapped
    execute()   panel by panel: pulls on streams of their own, a GEMM on another one as soon as they are here
                others' partial sums of this rank's part of D are pulled and added as they get ready
                parts of this rank's chunks that others have are pulled; the formula

No rank sends anything, and none waits for another one inside of a kernel. The host issues each panel when the one
`PANELS` before it is done, and looks in between whether the run has been ended. That a peer's sums are ready is read
from a flag in its memory. What a rank offers stays as it is until all have answered that they are done.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.dtypes import FP8, carried, typed
from dask_distmm.engines.base import Boxes, ChunkKey, Comm, wait_checked
from dask_distmm.engines.device.finishing import Finishing
from dask_distmm.engines.device.gemm import Kinds, Memory, Shape, check_fp8, multiply
from dask_distmm.engines.device.host import to_host
from dask_distmm.engines.device.operands import DeviceChunks, in_type, mark
from dask_distmm.engines.offers import BLOCKS, Offer, read_offers
from dask_distmm.engines.panels import Piece
from dask_distmm.engines.peer.pulls import Rectangle, copy, span_of
from dask_distmm.engines.peer.remote import Remote
from dask_distmm.engines.schedule import Fill, Product, Slot, make_schedule, merged
from dask_distmm.layout.rectangles import Span
from dask_distmm.plan import Plan
from dask_distmm.plan.cuts import padded
from dask_distmm.plan.plan import Rect
from dask_distmm.plan.pulls import PANELS, blocks, in_place, step_of, sums_in, walks

if TYPE_CHECKING:
    from dask_distmm.engines.peer import PeerEngine

__all__ = ["PeerJob"]

# Distances of rows that GEMMs are quick with: multiples of so many elements.
_ALIGNED = 16
# Rows of partial sums are pulled into one of so many buffers while the other is added.
_ADDING = 2


class View(NamedTuple):
    """A matrix on this GPU: where it lies, and which axis is dense."""

    span: Span
    order: str


class PeerJob:
    """One participant's side of one run. See the module's text."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, Any],
        comm: Comm,
        progress: Callable[[float], None],
        ready: Sequence[Any],
        engine: PeerEngine,
    ) -> None:
        self.plan, self.me, self.comm, self.progress, self.engine = plan, me, comm, progress, engine
        self.chunks: dict[ChunkKey, Any] = dict(chunks)
        self.rank = plan.ranks.index(me) if me in plan.ranks else None
        self.timings: dict[str, float] = {}
        self.held_bytes = self.kept_bytes = 0
        self.offer: Any = None
        self._ready, self._stream, self._pulls = ready, engine.stream, engine.pulls
        self._walks = walks(plan)
        self._sums = sums_in(plan, self._walks)
        self._orders = ("C", "F") if plan.problem.fp8 else (plan.order_a, plan.order_b)
        self._kinds = Kinds(*plan.problem.matrix_types, self._sums.name, plan.problem.compute)
        self._items = tuple(carried(name, "cupy").itemsize for name in plan.problem.matrix_types)
        self._inputs: Future[None] = Future()
        self._inputs.set_result(None)
        self._error: BaseException | None = None
        self._remote: Remote | None = None
        # Until all is over: copies of what can't be exported or was fetched, and tables that kernels read.
        self._keep: list[Any] = []
        self._launches: list[Any] = []

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices that have been pulled from other participants, or have come over Dask's comms."""
        return self.comm.received_bytes + (self._remote.pulled_bytes if self._remote is not None else 0)

    # Before the vote

    def prepare(self) -> None:
        """Complete what others will read, and allocate, in memory of the default stream: its users will free it."""
        problem, stream = self.plan.problem, self._stream
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        if problem.fp8:
            check_fp8()
        self._kinds.compute_type  # noqa: B018 - the library must have it
        self._staged = DeviceChunks(problem, self.chunks)
        self.chunks = self._staged.arrays
        if self.rank is not None:
            self._allocate()
        allocated = cp.cuda.Event(disable_timing=True)
        allocated.record(cp.cuda.Stream.null)
        stream.wait_event(allocated)
        try:
            self._staged.fill(stream)
            if len(self.plan.participants) > 1:
                self.offer = self._make_offer().to_wire()
        finally:
            # From the vote on others may read: what they read must be there.
            stream.synchronize()

    def _allocate(self) -> None:
        assert self.rank is not None
        plan, problem, step = self.plan, self.plan.problem, step_of(self.plan.problem)
        self._schedule = make_schedule(plan, self.rank, self._walks[self.rank], self._lies)
        self._buffers = {slot: self._buffer(slot, *size) for slot, size in self._schedule.slots.items()}
        owned = {int(index): plan.chunk_rect(int(index)) for index in plan.owned(self.rank)}
        # Chunks of D, or the sums that are finished or rounded to them.
        self._chunk_sums: dict[int, Any] = {}
        self._blocks: list[tuple[Rect, Any]] = []
        number_of = {rect: index for index, rect in owned.items() if rect in in_place(plan, self.rank)}
        empty = self.engine.exporter.empty
        for rect in blocks(plan, self.rank):
            rows, cols = rect[1] - rect[0], rect[3] - rect[2]
            if rect in number_of:
                array = cp.empty((rows, cols), self._sums)
                self._chunk_sums[number_of[rect]] = array
            else:
                array = empty((padded(rows, step), padded(cols, max(step, _ALIGNED))), self._sums)[:rows, :cols]
            self._blocks.append((rect, array))
        for index, rect in owned.items():
            if index not in self._chunk_sums:
                self._chunk_sums[index] = cp.empty((rect[1] - rect[0], rect[3] - rect[2]), self._sums)
        self._finishing = Finishing(plan, self.me, self.rank, self.chunks, "C") if problem.finished else None
        self._rounded: dict[int, Any] = {}
        if self._finishing is None and self._sums != problem.result_type:
            self._rounded = {index: cp.empty(x.shape, problem.result_type) for index, x in self._chunk_sums.items()}
        self._adding: list[Any] = []
        if plan.grid[2] > 1:
            final = merged(plan.final_rects(self.rank))
            most = max((r[3] - r[2] for r in final), default=0)
            size = max(((r[1] - r[0]) * (r[3] - r[2]) for r in final), default=0)
            limit = max(most, problem.options.buffer_bytes // 4 // _ADDING // self._sums.itemsize)
            self._adding = [cp.empty(min(size, limit), self._sums) for _ in range(_ADDING)]
        self._flags = empty((len(plan.ranks) + 1,), np.dtype(np.int32))

    def _buffer(self, slot: Slot, extent: int, kk: int) -> Any:
        """Return a buffer for parts of A (own axis x k) or of B (k x own axis)."""
        dtype = carried(self.plan.problem.matrix_types[slot[0]], "cupy")
        shape, order = ((extent, kk) if slot[0] == 0 else (kk, extent)), self._orders[slot[0]]
        fast = 1 if order == "C" else 0
        full = [shape[0], shape[1]]
        full[fast] = padded(full[fast], _ALIGNED)
        made = cp.empty(tuple(full), dtype, order=order)
        return made[: shape[0], : shape[1]]

    def _lies(self, operand: int, rect: Rect) -> bool:
        """Whether a part of an operand lies in one chunk of this GPU such that the library can use it."""
        found = self._chunk_at(operand, rect)
        if found is None:
            return False
        view, rows, cols = found
        (pointer, row, col), size = view.span, self._items[operand]
        inner, outer, width, height = (col, row, cols, rows) if view.order == "C" else (row, col, rows, cols)
        aligned = pointer % size == 0 and outer % size == 0
        if self.plan.problem.fp8:
            aligned = view.order == self._orders[operand] and not any(x % 16 for x in (pointer, outer, rows, cols))
        return bool(aligned and (inner == size or width == 1) and (height == 1 or outer >= width * size))

    def _chunk_at(self, operand: int, rect: Rect) -> tuple[View, int, int] | None:
        """Return the part of the one chunk of this GPU that a part of an operand is; None if there is none such."""
        name = "ab"[operand]
        sizes = self.plan.problem.chunks_of(name)
        where = self.plan.where[name]
        at = []
        for axis, (start, stop) in enumerate((rect[:2], rect[2:])):
            ends = np.cumsum(sizes[axis])
            number = int(np.searchsorted(ends, start, "right"))
            if stop > ends[number]:
                return None
            at.append((number, start - int(ends[number] - sizes[axis][number])))
        index = at[0][0] * len(sizes[1]) + at[1][0]
        assert where is not None
        if where[index] != self.me:
            return None
        span = span_of(self.chunks[name, index])
        rows, cols = rect[1] - rect[0], rect[3] - rect[2]
        start = span.pointer + at[0][1] * span.row_stride + at[1][1] * span.col_stride
        order = "C" if span.col_stride == self._items[operand] or (cols == 1 and rows > 1) else "F"
        if rows == 1 and cols > 1 and span.col_stride != self._items[operand]:
            order = "F"
        return View(Span(start, span.row_stride, span.col_stride), order), rows, cols

    def _make_offer(self) -> Offer:
        """Tell where the chunks are, and the blocks of D that others need; what can't be told is copied once."""
        plan, exporter = self.plan, self.engine.exporter
        offer = Offer(exporter.process)
        told = [
            ((number, index), self.chunks[name, index])
            for number, name in enumerate(plan.problem.operands)
            for index in np.flatnonzero(plan.where[name] == self.me).tolist()
        ]
        if self.rank is not None:
            others = plan.grid[2] > 1
            for number, (_, array) in enumerate(self._blocks):
                if others or not any(array is chunk for chunk in self._chunk_sums.values()):
                    told.append(((BLOCKS, number), array))
        for key, array in told:
            if not array.size:
                continue
            allocation, held = exporter.find(array.data.ptr), array
            if allocation is None:
                held = exporter.empty(array.shape, array.dtype, "C" if array.strides[0] >= array.strides[1] else "F")
                with self._stream:
                    held[...] = array
                self._keep.append(held)
                allocation = exporter.find(held.data.ptr)
                assert allocation is not None
            offer.add(*key, allocation, span_of(held))
        if self.rank is not None:
            pointer = int(self._flags.data.ptr)
            allocation = exporter.find(pointer)
            assert allocation is not None
            offer.add_flags(allocation, pointer)
            cp.cuda.runtime.memsetAsync(pointer, 0, self._flags.nbytes, self._stream.ptr)
        offer.alive = exporter.alive()
        return offer

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer."""
        if self.rank is None or len(self.plan.participants) == 1:
            return
        found = read_offers(offers, self.plan, self.me)
        self._remote = Remote(self.plan, found, self.engine)

    # The work

    def execute(self) -> dict[Any, Any]:
        """Multiply; return this rank's chunks of D and of auxiliary outputs."""
        if self.rank is None:
            return {}
        started = time.perf_counter()
        marks = [mark(self._stream)]
        try:
            self._multiply()
            marks.append(mark(self._stream))
            outputs = self._deliver()
            marks.append(mark(self._stream))
            self._wait(marks[-1])
            if self.plan.problem.array == "numpy":
                outputs = {
                    key: typed(to_host(chunk, self._stream), "" if isinstance(key, tuple) else self.plan.problem.dtype)
                    for key, chunk in outputs.items()
                }
        finally:
            # Nothing of this run may touch memory that is freed now. No kernel waits for anybody: this ends.
            for stream in (*self._pulls, self._stream):
                stream.synchronize()
        for name, first, last in zip(("multiply", "deliver"), marks[:-1], marks[1:], strict=True):
            self.timings[name] = cp.cuda.get_elapsed_time(first, last) / 1e3
        self.timings["total"] = time.perf_counter() - started
        self.held_bytes = self._count()
        self.engine.mappings.trim()
        self.progress(1.0)
        return outputs

    def _multiply(self) -> None:
        """Issue all turns, and the sums of others as they get ready."""
        plan, turns = self.plan, self._schedule.turns
        self._filled: dict[int, Any] = {}
        self._used: dict[Any, Any] = {}
        self._turn_of_pulls = self._turn_of_adding = 0
        over: collections.deque[Any] = collections.deque()
        coming = self._partial_sums()
        mine = False
        for number, turn in enumerate(turns):
            if len(over) >= PANELS:
                self._wait(over.popleft())
                self.progress((number + 1 - PANELS) / len(turns))
            self._check()
            for fill in turn.fills:
                self._fill(fill)
            for product in turn.products:
                self._product(product)
            for rank in turn.done:
                self._raise_flag(rank)
            over.append(self._event(self._stream))
            # Others' sums are added to this rank's part of D once that is complete.
            mine = mine or self.rank in turn.done
            if mine and coming:
                self._add_ready(coming, block=False)
        while coming:
            self._add_ready(coming, block=True)
        if plan.grid[2] > 1 or len(plan.ranks) > 1:
            self._raise_flag(len(plan.ranks))

    def _event(self, stream: cp.cuda.Stream) -> cp.cuda.Event:
        event = cp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _next_pulls(self) -> cp.cuda.Stream:
        self._turn_of_pulls += 1
        return self._pulls[self._turn_of_pulls % len(self._pulls)]

    def _fill(self, fill: Fill) -> None:
        """Put the pulls of a part of A or B on a stream, as soon as its buffer is free."""
        assert fill.slot is not None
        stream, size = self._next_pulls(), self._items[fill.operand]
        if fill.slot in self._used:
            stream.wait_event(self._used[fill.slot])
        view = self._in_buffer(fill)
        self._pull(fill.operand, fill.pieces, view.span, size, stream)
        self._pad(fill, stream)
        self._filled[fill.number] = self._event(stream)

    def _in_buffer(self, fill: Fill) -> View:
        assert fill.slot is not None
        span = span_of(self._buffers[fill.slot])
        stride = span.row_stride if fill.operand == 0 else span.col_stride
        return View(span._replace(pointer=span.pointer + fill.at * stride), self._orders[fill.operand])

    def _pad(self, fill: Fill, stream: cp.cuda.Stream) -> None:
        """Zero what pads k: it is summed over."""
        step = step_of(self.plan.problem)
        k0, k1 = fill.rect[2:] if fill.operand == 0 else fill.rect[:2]
        kk = k1 - k0
        if kk % step:
            assert fill.slot is not None
            buffer, more = self._buffers[fill.slot], padded(kk, step)
            own = (fill.rect[1] - fill.rect[0]) if fill.operand == 0 else (fill.rect[3] - fill.rect[2])
            at = slice(fill.at, padded(fill.at + own, step))
            with stream:
                buffer[(at, slice(kk, more)) if fill.operand == 0 else (slice(kk, more), at)] = 0

    def _pull(self, operand: int, pieces: Sequence[Piece], target: Span, size: int, stream: cp.cuda.Stream) -> None:
        """Put the copies of some pieces of an operand on a stream; pieces are placed from the target on."""
        name = self.plan.problem.operands[operand]
        where = self.plan.where[name]
        assert where is not None
        found, outside = [], collections.defaultdict(list)
        for piece in pieces:
            holder = int(where[piece.chunk])
            start = target.pointer + piece.row * target.row_stride + piece.col * target.col_stride
            if holder == self.me:
                source = span_of(self.chunks[name, piece.chunk])
            elif (told := self._there(holder, operand, piece.chunk, piece.rows * piece.cols * size)) is not None:
                source = told
            else:
                outside[holder].append((piece, start))
                continue
            pointer = source.pointer + piece.r0 * source.row_stride + piece.c0 * source.col_stride
            to = target._replace(pointer=start)
            found.append(Rectangle(source._replace(pointer=pointer), to, piece.rows, piece.cols))
        self._launches += copy(found, size, stream)
        for holder, these in outside.items():
            self._fetch(holder, operand, these, target, size, stream)

    def _there(self, holder: int, operand: int, number: int, size: int) -> Span | None:
        """Return where a matrix of another participant is, mapped here; None if it offers nothing."""
        return None if self._remote is None else self._remote.span(holder, operand, number, size)

    def _fetch(
        self, holder: int, operand: int, pieces: list[tuple[Piece, int]], target: Span, size: int, stream: Any
    ) -> None:
        """Get what a participant has that offers no memory, over Dask's comms."""
        held = self.plan.problem.dtype_of(self.plan.problem.operands[operand])
        dtype = carried(self.plan.problem.matrix_types[operand] if operand < 2 else held, "cupy")
        boxes = np.array([(operand, p.chunk, p.r0, p.r0 + p.rows, p.c0, p.c0 + p.cols) for p, _ in pieces], np.int64)
        answer = self.comm.fetch(holder, "input", boxes, False)
        found = []
        for (piece, start), data in zip(pieces, wait_checked(answer, self._check), strict=True):
            data = data.view(np.uint8) if held in FP8 else data  # noqa: PLW2901
            part = in_type(typed(cp.asarray(data), held), held, dtype).astype(dtype, copy=False)
            self._keep.append(part)
            found.append(Rectangle(span_of(part), target._replace(pointer=start), piece.rows, piece.cols))
        # The default stream has done this.
        stream.wait_event(self._event(cp.cuda.Stream.null))
        self._launches += copy(found, size, stream)

    def _product(self, product: Product) -> None:
        """Put a GEMM on the stream, or one for each block of D, as soon as its operands are here."""
        stream, step = self._stream, step_of(self.plan.problem)
        for fill in (*product.a, *product.b):
            if fill.number in self._filled:
                stream.wait_event(self._filled[fill.number])
        a, b, kk = self._view(product.a[0]), self._view(product.b[0]), padded(_depth(product.a[0]), step)
        r0, r1, c0, c1 = product.rect
        for (top, bottom, left, right), array in self._blocks:
            i0, i1, j0, j1 = max(top, r0), min(bottom, r1), max(left, c0), min(right, c1)
            if i0 >= i1 or j0 >= j1:
                continue
            rows = _moved(a, 0, i0 - r0, self._items[0])
            cols = _moved(b, 1, j0 - c0, self._items[1])
            at = span_of(array)
            start = at.pointer + (i0 - top) * at.row_stride + (j0 - left) * at.col_stride
            shape = Shape(
                padded(i1 - i0, step),
                padded(j1 - j0, step),
                kk,
                True,
                ("N" if b.order == "C" else "T", "N" if a.order == "C" else "T"),
            )
            d = Memory(start, max(1, at.row_stride // self._sums.itemsize))
            multiply(stream, shape, self._kinds, rows, cols, d, add=product.add)
        used = self._event(stream)
        for fill in (*product.a, *product.b):
            if fill.slot is not None:
                self._used[fill.slot] = used

    def _view(self, fill: Fill) -> View:
        """Return where a part of an operand is."""
        if fill.slot is not None:
            return self._in_buffer(fill)
        found = self._chunk_at(fill.operand, fill.rect)
        assert found is not None
        return found[0]

    # Sums of others

    def _raise_flag(self, number: int) -> None:
        """Tell whoever looks that a rank's part of the partial sums, or this rank's block of D, is complete."""
        at = int(self._flags.data.ptr) + number * self._flags.itemsize
        cp.cuda.runtime.memsetAsync(at, 1, self._flags.itemsize, self._stream.ptr)

    def _partial_sums(self) -> collections.deque[int]:
        """Return the ranks whose partial sums are to be added, in an order that is the same every time."""
        count = len(self.plan.ranks)
        if self.plan.grid[2] == 1 or not self.plan.final_rects(self.rank or 0):
            return collections.deque()
        # The one before this rank computes this rank's part right after its own.
        assert self.rank is not None
        return collections.deque((self.rank - behind) % count for behind in range(1, count))

    def _add_ready(self, coming: collections.deque[int], *, block: bool) -> None:
        """Add the next rank's partial sums if they are ready, or when they are."""
        assert self.rank is not None
        assert self._remote is not None
        rank = coming[0]
        if not self._remote.ready(self.plan.ranks[rank], self.rank, self._check if block else None):
            return
        coming.popleft()
        rect, own = self._blocks[0]
        for r0, r1, c0, c1 in merged(self.plan.final_rects(self.rank)):
            step = max(1, self._adding[0].size // (c1 - c0))
            for top in range(r0, r1, step):
                bottom = min(top + step, r1)
                number = self._turn_of_adding = (self._turn_of_adding + 1) % _ADDING
                rows, cols = bottom - top, c1 - c0
                buffer = self._adding[number][: rows * cols].reshape(rows, cols)
                stream = self._next_pulls()
                if ("adding", number) in self._used:
                    stream.wait_event(self._used["adding", number])
                self._pull_block(rank, 0, rect, (top, bottom, c0, c1), span_of(buffer), stream)
                self._stream.wait_event(self._event(stream))
                with self._stream:
                    part = own[top - rect[0] : bottom - rect[0], c0 - rect[2] : c1 - rect[2]]
                    cp.add(part, buffer, out=part)
                self._used["adding", number] = self._event(self._stream)

    def _pull_block(self, rank: int, number: int, whole: Rect, part: Rect, target: Span, stream: Any) -> None:
        """Put the copy of a part of another rank's block of D on a stream."""
        rows, cols, size = part[1] - part[0], part[3] - part[2], self._sums.itemsize
        source = self._there(self.plan.ranks[rank], BLOCKS, number, rows * cols * size)
        assert source is not None
        pointer = source.pointer + (part[0] - whole[0]) * source.row_stride + (part[2] - whole[2]) * source.col_stride
        self._launches += copy([Rectangle(source._replace(pointer=pointer), target, rows, cols)], size, stream)

    # The end

    def _deliver(self) -> dict[Any, Any]:
        """Put together this rank's chunks of D, finish or round them."""
        plan, stream = self.plan, self._stream
        if self._finishing is not None:
            self._gather_inputs(self._finishing)
        here: list[Rectangle] = []
        there: dict[int, list[tuple[int, Rect]]] = collections.defaultdict(list)
        for index, target in self._chunk_sums.items():
            if any(target is array for _, array in self._blocks):
                continue
            for rank, rect in plan.final_holders(index):
                if rank != self.rank:
                    there[rank].append((index, rect))
                    continue
                for whole, array in self._blocks:
                    here += self._parts(index, rect, whole, span_of(array))
        self._launches += copy(here, self._sums.itemsize, stream, here=True)
        for rank, parts in sorted(there.items(), key=lambda item: (item[0] - (self.rank or 0)) % len(plan.ranks)):
            assert self._remote is not None
            self._remote.ready(plan.ranks[rank], len(plan.ranks), self._check)
            pulls = self._next_pulls()
            found = []
            for number, whole in enumerate(blocks(plan, rank)):
                size = sum(
                    max(0, min(x[1], whole[1]) - max(x[0], whole[0]))
                    * max(0, min(x[3], whole[3]) - max(x[2], whole[2]))
                    for _, x in parts
                )
                if size and (source := self._there(plan.ranks[rank], BLOCKS, number, size * self._sums.itemsize)):
                    for index, rect in parts:
                        found += self._parts(index, rect, whole, source)
            self._launches += copy(found, self._sums.itemsize, pulls)
            stream.wait_event(self._event(pulls))
        outputs: dict[Any, Any] = dict(self._chunk_sums)
        if self._finishing is not None:
            outputs = self._finishing.apply(outputs, stream)
        for index, rounded in self._rounded.items():
            with stream:
                rounded[...] = outputs[index]
            outputs[index] = rounded
        return outputs

    def _parts(self, index: int, rect: Rect, whole: Rect, source: Span) -> list[Rectangle]:
        """Return the copy of a part of D that is in a block to a chunk of this rank, if they overlap."""
        r0, r1 = max(rect[0], whole[0]), min(rect[1], whole[1])
        c0, c1 = max(rect[2], whole[2]), min(rect[3], whole[3])
        if r0 >= r1 or c0 >= c1:
            return []
        top, _, left, _ = self.plan.chunk_rect(index)
        target = span_of(self._chunk_sums[index])
        start = target.pointer + (r0 - top) * target.row_stride + (c0 - left) * target.col_stride
        begin = source.pointer + (r0 - whole[0]) * source.row_stride + (c0 - whole[2]) * source.col_stride
        to = target._replace(pointer=start)
        return [Rectangle(source._replace(pointer=begin), to, r1 - r0, c1 - c0)]

    def _gather_inputs(self, finishing: Finishing) -> None:
        """Pull what the formula reads for this rank's chunks."""
        stream = self._next_pulls()
        for number, one in enumerate(finishing.inputs, start=2):
            moves = one.moves.take(one.moves.dst_owner == self.me)
            columns = (moves.dst, moves.src, moves.src_row, moves.src_col, moves.nrows, moves.ncols)
            for part, chunk, r0, c0, rows, cols, row, col in zip(
                *(x.tolist() for x in (*columns, moves.dst_row, moves.dst_col)), strict=True
            ):
                piece = Piece(number, chunk, r0, c0, rows, cols, row, col)
                self._pull(number, [piece], span_of(one.parts[part]), one.dtype.itemsize, stream)
        self._stream.wait_event(self._event(stream))

    def _count(self) -> int:
        """Return the bytes of all device memory that this rank holds for the run."""
        arrays = [
            *self._staged.all_arrays,
            *self._buffers.values(),
            *self._adding,
            *self._keep,
            *self._rounded.values(),
        ]
        arrays += [array for _, array in self._blocks] + list(self._chunk_sums.values())
        arrays += self._finishing.arrays if self._finishing is not None else []
        return sum({int(x.data.ptr): int(x.nbytes) for x in arrays}.values())

    def _wait(self, event: cp.cuda.Event) -> None:
        """Wait without holding Python's lock; raise if the run has been ended."""
        while not event.done:
            self._check()
            time.sleep(2e-5)
        self._check()

    # What passes between participants

    def available(self, kind: str, boxes: Boxes) -> Future[None]:
        """Return the future that says when `serve` can answer."""
        return self._inputs

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of staged chunks, to those who can't map this process' memory."""
        self._check()
        found = []
        for operand, chunk, r0, r1, c0, c1 in boxes.tolist():
            part = self.chunks[self.plan.problem.operands[operand], chunk][r0:r1, c0:c1]
            found.append(part if part.flags.forc else part.copy())
        cp.cuda.Stream.null.synchronize()
        return found

    def abort(self, error: BaseException) -> None:
        """End with `error`, before the next panel. Any thread; may be repeated."""
        self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _depth(fill: Fill) -> int:
    k0, k1 = fill.rect[2:] if fill.operand == 0 else fill.rect[:2]
    return k1 - k0


def _moved(view: View, axis: int, by: int, size: int) -> Memory:
    """Return a matrix from a later row (axis 0) or column on, as the library wants it."""
    pointer, row, col = view.span
    return Memory(pointer + by * (row, col)[axis], max(1, (row if view.order == "C" else col) // size))
