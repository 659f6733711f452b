"""One participant's side of one run that pulls.

::

    prepare()   chunks are complete and told, buffers and D are allocated, the first ones filled with what lies here,
                and multiplied. Its failure is a vote against the run
    accept()    others' offers are read; what they no longer have is unmapped
    execute()   panel by panel: pulls on a stream of their own, a GEMM on another one as soon as they are here
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
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import Boxes, ChunkKey, Comm
from dask_distmm.engines.gpu.finishing import NativeBias
from dask_distmm.engines.gpu.gemm import PLAIN, Gemm, Kinds, Memory, Native, Shape, check_fp8
from dask_distmm.engines.gpu.host import to_host
from dask_distmm.engines.gpu.operands import DeviceChunks, mark
from dask_distmm.engines.peer.ahead import Ahead, Captured, Work, at_hand, capture, shorten
from dask_distmm.engines.peer.offering import make_offer
from dask_distmm.engines.peer.offers import Expected
from dask_distmm.engines.peer.pulls import Copies, record, span_of
from dask_distmm.engines.peer.remote import Remote
from dask_distmm.engines.peer.result import ALIGNED, Result
from dask_distmm.engines.peer.schedule import Due, Fill, Product, Slot, dues, make_schedule
from dask_distmm.engines.peer.sources import Ended, Parts, Pull, Sources, View, moved
from dask_distmm.engines.peer.state import PeerState
from dask_distmm.engines.peer.trace import Trace
from dask_distmm.numeric.types import carried, typed
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import padded
from dask_distmm.planning.peer.block_schedule import PANELS, block_schedules, extent_multiple, native, sums_in
from dask_distmm.planning.peer.reads import peer_reads
from dask_distmm.planning.plan import Rect

__all__ = ["PeerJob"]


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
        engine: PeerState,
    ) -> None:
        self.plan, self.me, self.comm, self.progress, self.engine = plan, me, comm, progress, engine
        self.chunks: dict[ChunkKey, Any] = dict(chunks)
        self.rank = plan.ranks.index(me) if me in plan.ranks else None
        self._address = plan.participants[me].address
        self.timings: dict[str, float] = {}
        self.held_bytes = self.kept_bytes = 0
        self.offer: Any = None
        self.missing: list[int] = []
        self._gone: set[int] = set()
        self._ready, self._stream = ready, engine.stream
        self._block_schedules, self._multiple = block_schedules(plan), extent_multiple(plan.problem)
        self._sums = sums_in(plan, self._block_schedules)
        self._epilog = native(plan, self._block_schedules)
        self._orders = ("C", "F") if plan.problem.fp8 else (plan.order_a, plan.order_b)
        self._kinds = Kinds(*plan.problem.matrix_types, self._sums.name, plan.problem.compute)
        self._items = tuple(carried(name, "cupy").itemsize for name in plan.problem.matrix_types)
        self._inputs: Future[None] = Future()
        self._inputs.set_result(None)
        self._expected: Expected | None = None
        self._found: dict[int, Pull] = {}
        # Of each fill that is not done what there is to copy, and the copies of what lies here, unless these have been.
        self._parts: dict[int, tuple[Parts, list[Copies]]] = {}
        self._filled_ahead: set[int] = set()
        self._ahead: Ahead | None = None
        self._first: Captured | None = None
        self._trace = Trace(on=engine.trace is not None)
        self._ended = Ended()
        self._sources = Sources(plan, me, comm, self.chunks, engine.pulls(len(plan.participants) - 1), self._ended)

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices that have been pulled from other participants, or have come over Dask's comms."""
        return self.comm.received_bytes + self._sources.pulled_bytes

    # Before the vote

    def prepare(self) -> None:
        """Complete what others will read, and allocate, in memory of the default stream: its users will free it."""
        problem, stream = self.plan.problem, self._stream
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        if problem.fp8:
            check_fp8()
        self._kinds.compute_type  # noqa: B018 - the library must have it
        self.engine.exporter.begin(self._address, problem.options.keep_workspace_bytes)
        self._staged = DeviceChunks(problem, self.chunks)
        self.chunks = self._staged.arrays
        self._sources.chunks = self.chunks
        if self.rank is not None:
            self._allocate()
        allocated = cp.cuda.Event(disable_timing=True)
        allocated.record(cp.cuda.Stream.null)
        stream.wait_event(allocated)
        try:
            self._staged.fill(stream)
            if self.rank is not None:
                self._fill_ahead()
            if len(self.plan.participants) > 1:
                read = peer_reads(self.plan, problem.operands)
                self.offer = self._make_offer(read)
                if self.rank is not None:
                    self._expected = Expected(self.plan, self.me, self._sums.itemsize, read)
        finally:
            # From the vote on others may read: what they read must be there. And nothing may be under way that an
            # abort would free the memory of.
            stream.synchronize()
        if self.rank is not None:
            self._multiply_ahead()

    def _allocate(self) -> None:
        assert self.rank is not None
        plan = self.plan
        self._schedule = make_schedule(plan, self.rank, self._block_schedules[self.rank], self._lies)
        self._buffers = {slot: self._buffer(slot, *size) for slot, size in self._schedule.slots.items()}
        self._result = Result(plan, self.rank, self._sums, self._epilog is not None, self._sources, self.engine)
        self._bias: NativeBias | None = None
        if self._epilog is not None and "bias" in plan.problem.formula.inputs:
            sizes = tuple(np.diff(plan.cols).tolist())
            parts = [plan.coords(rank)[1] for rank in range(len(plan.ranks))]
            arguments = (1, sizes, parts, sizes[parts[self.rank]])
            self._bias = NativeBias(plan, self.me, self.rank, self.chunks, *arguments)
        self._calls = [[self._gemms(product) for product in turn.products] for turn in self._schedule.turns]

    def _buffer(self, slot: Slot, extent: int, kk: int) -> Any:
        """Return a buffer for parts of A (own axis x k) or of B (k x own axis)."""
        dtype = carried(self.plan.problem.matrix_types[slot[0]], "cupy")
        shape, order = ((extent, kk) if slot[0] == 0 else (kk, extent)), self._orders[slot[0]]
        fast = 1 if order == "C" else 0
        full = [shape[0], shape[1]]
        full[fast] = padded(full[fast], ALIGNED)
        made = cp.empty(tuple(full), dtype, order=order)
        return made[: shape[0], : shape[1]]

    def _lies(self, operand: int, rect: Rect) -> bool:
        """Whether a part of an operand lies in one chunk of this GPU such that the library can use it."""
        found = self._sources.chunk_at(operand, rect, self._items[operand])
        if found is None:
            return False
        view, rows, cols = found
        (pointer, row, col), size = view.span, self._items[operand]
        inner, outer, width, height = (col, row, cols, rows) if view.order == "C" else (row, col, rows, cols)
        aligned = pointer % size == 0 and outer % size == 0
        if self.plan.problem.conjugated[operand] and view.order == "C":
            # The library conjugates what it transposes; all else is copied first.
            return False
        if self._multiple > 1:
            aligned = not any(x % 16 for x in (pointer, outer, rows, cols))
        if self.plan.problem.fp8:
            aligned = aligned and view.order == self._orders[operand]
        return bool(aligned and (inner == size or width == 1) and (height == 1 or outer >= width * size))

    def _make_offer(self, read: Mapping[str, NDArray[np.bool_]]) -> dict[str, Any]:
        result = self._result if self.rank is not None else None
        arguments = self.plan, self.me, self.chunks, result, self.engine.exporter, self._stream
        offer, kept = make_offer(*arguments, read)
        self._sources.kept += kept
        return offer.to_wire()

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer, and map what this rank needs of it."""
        self._began = time.perf_counter()
        if self.rank is None:
            return
        if self._expected is not None:
            self._sources.remote = Remote(self.plan, self._expected.read(offers), self.engine, self._gone)
        idle = not (self._ahead or self._first)
        first = {fill.number for turn in self._schedule.turns[:idle] for fill in turn.fills}
        self._found = self._sources.find(self._parts, first)
        self.timings["offers"] = time.perf_counter() - self._began

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
            outputs = self._result.deliver()
            self.missing = self._result.missing
            marks.append(mark(self._stream))
            self._wait(marks[-1])
            if self.plan.problem.array == "numpy":
                outputs = {
                    key: typed(to_host(chunk, self._stream), "" if isinstance(key, tuple) else self.plan.problem.dtype)
                    for key, chunk in outputs.items()
                }
        finally:
            # Nothing of this run may touch memory that is freed now. No kernel waits for anybody: this ends.
            for stream in (*self._sources.streams, self.engine.looking, self.engine.sums, self._stream):
                stream.synchronize()
        for name, first, last in zip(("multiply", "deliver"), marks[:-1], marks[1:], strict=True):
            self.timings[name] = cp.cuda.get_elapsed_time(first, last) / 1e3
        if self._ahead is not None:
            seconds, self.timings["ahead"] = self._ahead.over(self._trace, self._began)
            self.timings["multiply"] += seconds
        if self.engine.trace is not None:
            self.engine.trace.append(self._trace.steps(marks[0], started))
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
        over: collections.deque[Any] = collections.deque()
        mine, result = False, self._result
        if self._bias is not None:
            self._sources.gather(self._bias, self._stream)
            self._bias.convert(self._stream)
        if self._first is not None:
            with self._trace.step("GEMM", 0, self._first.flops, self._stream):
                self._first.run(self._stream)
        coming = collections.deque(due for due in dues(turns) if due.fill.number not in self._filled_ahead)
        for number, turn in enumerate(turns):
            if len(over) >= PANELS:
                # Others' sums are added to this rank's part of D once that is complete: while the GPU has other work.
                if mine and result.coming:
                    result.add_ready(block=False)
                self._wait(over.popleft())
                self.progress((number + 1 - PANELS) / len(turns))
            self._ended.check()
            for product, gemms in zip(turn.products, self._calls[number], strict=True):
                # The host takes as long for some pulls as GPUs for one: each product as soon as its own are under way.
                needed = {fill.number for fill in product.filled} - self._filled_ahead
                while not needed <= self._filled.keys():
                    self._fill(coming.popleft().fill)
                with self._trace.step("GEMM", number, sum(x.flops for x in gemms), self._stream):
                    self._product(product, gemms)
                self._fill_next(coming, number - 1)
            over.append(record(self._stream))
            self._used |= {fill.slot: over[-1] for product in turn.products for fill in product.filled}
            for rank in turn.done:
                result.raise_flag(rank)
                mine = mine or rank == self.rank
            while self._fill_next(coming, number):
                pass
        while result.coming:
            result.add_ready(block=True)
        if len(plan.ranks) > 1:
            result.raise_flag(len(plan.ranks))

    def _fill_ahead(self) -> None:
        """Find what of all buffers lies here; put on the stream what of it they are filled with first."""
        used: set[Slot | None] = set()
        for turn in self._schedule.turns:
            for fill in turn.fills:
                target, size = self._in_buffer(fill).span, self._items[fill.operand]
                parts = self._sources.parts(fill.operand, fill.pieces, target, size)
                at_home = self._sources.at_home(parts)
                if fill.slot in used:
                    self._parts[fill.number] = parts, [at_home]
                elif (parts.holders == self.me).all():
                    self._put(fill, Pull([at_home], {}, 0), self._stream)
                    self._filled_ahead.add(fill.number)
                else:
                    self._sources.run(at_home, self._stream)
                    self._parts[fill.number] = parts, []
            used.update(fill.slot for product in turn.products for fill in product.filled)

    def _multiply_ahead(self) -> None:
        """Begin the first products, as far as all that they need is here, or make them ready."""
        turns = zip(self._schedule.turns, self._calls, strict=True)
        every = [(product, calls, at) for turn, calls in turns for at, product in enumerate(turn.products)]
        rate = self.plan.problem.options.machine("peer").rate(self._kinds.compute or self._kinds.a)
        count, long = at_hand([(calls[at], self._is_here(product)) for product, calls, at in every], rate)
        products = [gemm for _, calls, at in every[:count] for gemm in calls[at]]
        self._ahead = Ahead(self._stream, products) if long else None
        self._first = None if long else capture(self._stream, products)
        done = count if self._ahead or self._first else 0
        for number, (_, calls, at) in enumerate(every):
            calls[at] = [] if number < done else shorten(self._stream, calls[at], rate)

    def _is_here(self, product: Product) -> bool:
        if self._bias is not None:
            return False
        return all(fill.number in self._filled_ahead for fill in product.filled)

    def _fill_next(self, coming: collections.deque[Due], turn: int) -> bool:
        """Put the next pull on its stream, if it waits for no later turn, nor for answers of others; return whether."""
        if not coming or coming[0].after > turn or self._found[coming[0].fill.number].outside:
            return False
        self._fill(coming.popleft().fill)
        return True

    def _fill(self, fill: Fill) -> None:
        """Put the pulls of a part of A or B on a stream, as soon as its buffer is free."""
        stream, what = self._sources.stream, self._found[fill.number]
        if fill.slot in self._used:
            stream.wait_event(self._used[fill.slot])
        with self._trace.step("pull", fill.number, float(what.away), stream):
            self._put(fill, what, stream)
        self._filled[fill.number] = record(stream)

    def _put(self, fill: Fill, what: Pull, stream: cp.cuda.Stream) -> None:
        assert fill.slot is not None
        self._sources.pull(what, stream)
        self._pad(fill, stream)
        if self.plan.problem.conjugated[fill.operand] and self._orders[fill.operand] == "C":
            kk = fill.kk
            at = slice(fill.at, fill.at + fill.own[1] - fill.own[0])
            part = self._buffers[fill.slot][(at, slice(kk)) if fill.operand == 0 else (slice(kk), at)]
            with stream:
                cp.conjugate(part, out=part)

    def _in_buffer(self, fill: Fill) -> View:
        assert fill.slot is not None
        span = span_of(self._buffers[fill.slot])
        stride = span.row_stride if fill.operand == 0 else span.col_stride
        return View(span._replace(pointer=span.pointer + fill.at * stride), self._orders[fill.operand])

    def _pad(self, fill: Fill, stream: cp.cuda.Stream) -> None:
        """Zero what pads k: it is summed over."""
        multiple = self._multiple
        kk = fill.kk
        if kk % multiple:
            assert fill.slot is not None
            buffer, more = self._buffers[fill.slot], padded(kk, multiple)
            at = slice(fill.at, padded(fill.at + fill.own[1] - fill.own[0], multiple))
            with stream:
                buffer[(at, slice(kk, more)) if fill.operand == 0 else (slice(kk, more), at)] = 0

    def _gemms(self, product: Product) -> Sequence[Work]:
        """Return a product as GEMMs: one for each block of D that it is multiplied into."""
        multiple, found = self._multiple, list[Work]()
        a, b, kk = self._view(product.a[0]), self._view(product.b[0]), padded(product.a[0].kk, multiple)
        ops = self._op(1, b), self._op(0, a)
        r0, r1, c0, c1 = product.rect
        for (top, bottom, left, right), array in self._result.blocks:
            i0, i1, j0, j1 = max(top, r0), min(bottom, r1), max(left, c0), min(right, c1)
            if i0 >= i1 or j0 >= j1:
                continue
            at = span_of(array)
            start = at.pointer + (i0 - top) * at.row_stride + (j0 - left) * at.col_stride
            shape = Shape(padded(i1 - i0, multiple), padded(j1 - j0, multiple), kk, True, ops)
            rows, cols = moved(a, 0, i0 - r0, self._items[0]), moved(b, 1, j0 - c0, self._items[1])
            d = Memory(start, max(1, at.row_stride // self._sums.itemsize))
            found.append(Gemm(shape, self._kinds, rows, cols, d, add=product.add, native=self._native(j0)))
        return found

    def _native(self, column: int) -> Native:
        """Return what the library does to a product whose first column is this one of D."""
        if self._epilog is None:
            return PLAIN
        bias = 0
        if self._bias is not None:
            first = self.plan.region(self.rank or 0)[2]
            bias = int(self._bias.vector.data.ptr) + (column - first) * self._bias.vector.itemsize
        return Native(complex(*self.plan.problem.formula.alpha), self._epilog, bias)

    def _op(self, operand: int, view: View) -> str:
        if view.order == "C":
            return "N"
        return "C" if self.plan.problem.conjugated[operand] else "T"

    def _product(self, product: Product, gemms: Sequence[Work]) -> None:
        """Put a product on the stream, as soon as its operands are here."""
        stream = self._stream
        for fill in product.filled:
            if fill.number in self._filled:
                stream.wait_event(self._filled[fill.number])
        for gemm in gemms:
            gemm.run(stream)

    def _view(self, fill: Fill) -> View:
        """Return where a part of an operand is."""
        if fill.slot is not None:
            return self._in_buffer(fill)
        found = self._sources.chunk_at(fill.operand, fill.rect, self._items[fill.operand])
        assert found is not None
        return found[0]

    def _count(self) -> int:
        """Return the bytes of all device memory that this rank holds for the run."""
        arrays = [*self._staged.all_arrays, *self._buffers.values(), *self._sources.kept, *self._result.arrays]
        arrays += self._bias.arrays if self._bias is not None else []
        return sum({int(x.data.ptr): int(x.nbytes) for x in arrays}.values())

    def _wait(self, event: cp.cuda.Event) -> None:
        """Wait without holding Python's lock; raise if the run has been ended."""
        while not event.done:
            self._ended.check()
            time.sleep(2e-5)
        self._ended.check()

    # What passes between participants

    def available(self, kind: str, boxes: Boxes) -> Future[None]:
        """Return the future that says when `serve` can answer."""
        return self._inputs

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of staged chunks, to those who can't map this process' memory."""
        self._ended.check()
        found = []
        for operand, chunk, r0, r1, c0, c1 in boxes.tolist():
            part = self.chunks[self.plan.problem.operands[operand], chunk][r0:r1, c0:c1]
            found.append(part if part.flags.forc else part.copy())
        cp.cuda.Stream.null.synchronize()
        return found

    def lose(self, participant: int) -> None:
        """Go on without a participant that is gone: what is mapped of its memory stays. Any thread."""
        self._gone.add(participant)

    def abort(self, error: BaseException) -> None:
        """End with `error`, before the next panel. Any thread; may be repeated."""
        self._ended.error = self._ended.error or error
        if self._ahead is not None:
            self._ahead.give_up()
