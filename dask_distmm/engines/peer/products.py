"""One participant's side of one run of a product on GPUs of one host: no rank sends, each pulls what it needs.

::

    prepare()   chunks are brought to the device and offered to the others; buffers and D are allocated; own chunks are
                copied into buffers, and the first products are begun. An error here is a vote against the run
    accept()    the offers of all others are read and their memory is mapped; mappings that are out of date are closed
    execute()   the steps of `planning.product`: pulls on streams of their own, GEMMs on another stream as soon as their
                operands are here; partial sums of other ranks are pulled and added as they get ready; parts of this
                rank's chunks of D that other ranks computed are pulled; the formula is applied

No rank sends anything, and no kernel waits for another rank. A flag in a peer's memory says whether its sums are ready.
The memory that a rank offers stays as it is until all participants have answered that they are done.

Long products are begun before the vote is counted, because they need no other rank and the GPU is idle. They are on the
same stream as all other products. A stream that waits until the run takes place (cuStreamWaitValue32) would save the
0.1 ms that the host takes for a first launch, but CUDA waits for all streams when it loads a kernel for the first time:
on H200 that ended in a deadlock. Short products become a CUDA graph: the host launches a graph in 0.005 ms, while a
call of the library takes 0.02 ms, and 0.1 ms after an idle moment.

The host waits for products some steps back, and checks meanwhile whether the run has been ended. Chunks that a rank
makes itself are held until the products that read them are over; before it takes more of them than it may hold, the
host waits for such.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.comms.base import PeerLostError
from dask_distmm.engines.base import ResultKey, Side
from dask_distmm.engines.gpu.copy_kernels import CopyBatch, Rectangle, make_copies, table_of
from dask_distmm.engines.gpu.gemm import PLAIN, FusedEpilog, Gemm, GemmShape, GemmTypes, MatrixRef, check_fp8
from dask_distmm.engines.gpu.operands import captured, mark, record
from dask_distmm.engines.gpu.products import ProductKernels, ProductMemory
from dask_distmm.engines.peer.memory import PeerState
from dask_distmm.engines.peer.offers import FLAG_BYTES
from dask_distmm.engines.peer.readable import (
    ChunkPulls,
    DeviceMaker,
    DeviceView,
    LoadPulls,
    Made,
    Parts,
    bits,
    dense_view,
)
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.layout.rectangles import Span, span_of
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import Rect, common, padded
from dask_distmm.planning.groups import chunk_blocks_of
from dask_distmm.planning.schedule import PANELS, blocks, extent_multiple, load_schedules, native, sums_in
from dask_distmm.programs.steps import (
    PART,
    Box,
    Buffer,
    Call,
    Load,
    Publish,
    Pull,
    Step,
    Store,
    Take,
    View,
    crossing,
)

# Products of a rank that are put on a stream together: begun before the vote, or captured in a graph


# Products that together take between this many seconds are begun before the vote. Shorter ones are kept to hide pulls.
# Longer ones would waste too much time if the run does not take place.
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 5e-3
# Products that together take less than this many seconds become a graph; behind longer ones the host has enough time.
_SHORT_SECONDS = 0.3e-3
# Seconds of products on the stream whose end the host has not seen, unless they are few.
_QUEUED_SECONDS = 10e-3


class Captured:
    """Products as one CUDA graph; see `capture`."""

    def __init__(self, graph: Any, products: Sequence[Work]) -> None:
        # The products hold what the library has made of them.
        self._graph, self._products = graph, products
        self.flops: float = sum(gemm.flops for gemm in products)

    def run(self, stream: cp.cuda.Stream) -> None:
        """Put them on a stream."""
        self._graph.launch(stream)


# Work that can be put on a stream.
Work = Gemm | Captured


def capture(stream: cp.cuda.Stream, products: Sequence[Work]) -> Captured | None:
    """Return products as a graph; None if they can't be: most of all if the library has yet to load its kernels."""
    if not products or not all(isinstance(gemm, Gemm) and gemm.ran for gemm in products):
        return None

    def run() -> None:
        for gemm in products:
            gemm.run(stream)

    graph = captured(stream, run, "products")
    return None if graph is None else Captured(graph, products)


def at_hand(products: Sequence[tuple[Work, bool]], rate: float) -> tuple[int, bool]:
    """Return how many leading products can start before the vote, and whether they take long enough."""
    seconds, count = 0.0, 0
    for gemm, here in products:
        if not here or seconds + gemm.flops / rate > _MOST_SECONDS:
            break
        seconds, count = seconds + gemm.flops / rate, count + 1
    return count, count > 0 and seconds >= _LEAST_SECONDS


class Ahead:
    """The first products of a run, queued before the vote."""

    def __init__(self, stream: cp.cuda.Stream, products: Sequence[Work]) -> None:
        self._start = self._end = mark(stream)
        try:
            for gemm in products:
                gemm.run(stream)
        finally:
            self._end = mark(stream)
            # However the run is lost: what is freed goes to users of the default stream.
            self._finalizer = weakref.finalize(self, cp.cuda.Stream.null.wait_event, self._end)
            self._finalizer.atexit = False
        self._put = time.perf_counter()

    def release(self) -> None:
        """Order the default stream after them, so that the run's memory can be reused. Thread-safe; may be repeated."""
        self._finalizer()

    def over(self, began: float) -> tuple[float, float]:
        """Return the seconds that they took, and how many of these passed before the run began."""
        self._finalizer.detach()
        seconds = float(cp.cuda.get_elapsed_time(self._start, self._end)) / 1e3
        return seconds, min(seconds, began - self._put)


# The steps of a rank


# GEMMs are fast if the distance of rows is a multiple of this many elements.
_ALIGNED = 16
# Buffers for partial sums: one is filled while the other one is added.
_ADDING = 2


@dataclasses.dataclass(eq=False)
class Products:
    """A step that multiplies, and what is put on the stream for it."""

    call: Call
    # None until the addresses of its operands are known; nothing where it was put there before, or with another one.
    works: Sequence[Work] | None = None
    # The products that these works have, whose operands are to be there.
    together: Sequence[Call] = ()


class Copies(NamedTuple):
    """A step that copies parts of sums."""

    call: Call
    batch: CopyBatch


# What a list is compiled to before the vote: loads, products and copies of sums in place of their steps, and the phase
# that begins after the last product.
Instruction = Step | LoadPulls | Products | Copies | str


class PeerKernels(ProductKernels):
    """The kernels of products whose ranks read each other's memory."""

    def __init__(self, plan: Plan, engine: PeerState) -> None:
        super().__init__(plan.problem, engine.stream, lambda role: "C")
        self.multiple, self._exporter = extent_multiple(plan.problem), engine.exporter
        self.orders = ("C", "F") if plan.problem.fp8 else made_orders(plan)

    def new(self, buffer: Buffer, *, zero: bool) -> Any:
        """Return a new matrix; buffers for A and B, and for sums, in memory that is a little larger."""
        (rows, cols), dtype = buffer.shape, carried(buffer.dtype, "cupy")
        if buffer.role == "panel":
            order = self.orders[buffer.number]
            full = (rows, padded(cols, _ALIGNED)) if order == "C" else (padded(rows, _ALIGNED), cols)
            return cp.empty(full, dtype, order=order)[:rows, :cols]
        if buffer.role == "sum":
            full = padded(rows, self.multiple), padded(cols, max(self.multiple, _ALIGNED))
            return self._exporter.empty(full, dtype)[:rows, :cols]
        return super().new(buffer, zero=zero)

    def usable(self, operand: int, chunk: Any) -> bool:
        """Whether the library can multiply a chunk of A (0) or B (1) as it is."""
        view = dense_view(chunk)
        if view is None:
            return False
        if self.problem.matrices[operand].conjugated and view.order == "C":
            # The library conjugates only operands that it transposes; other ones are conjugated in a buffer.
            return False
        outer = view.span.row_stride if view.order == "C" else view.span.col_stride
        if self.multiple > 1 and (view.span.pointer % 16 or outer % 16):
            return False
        return not self.problem.fp8 or view.order == self.orders[operand]


class PeerJob(ProgramJob):
    """One participant's side of one run; see the text of the module."""

    plan: Plan

    def __init__(self, side: Side[Plan], engine: PeerState) -> None:
        plan, kernels = side.plan, PeerKernels(side.plan, engine)
        memory, kind = ProductMemory(side, kernels, engine.downloads), ChunkPulls
        if plan.meets and side.me in plan.ranks:
            # NCCL is loaded by those who use it.
            from dask_distmm.engines.peer.between import IslandPulls

            kind = IslandPulls
        super().__init__(side, kernels, memory, functools.partial(kind, engine))
        self.engine, self._address = engine, plan.participants[self.me].address
        self._stream = engine.stream
        self._pulls: Any = self.exchange
        self._kinds = GemmTypes(*plan.problem.matrix_types, sums_in(plan).name, plan.problem.compute)
        self.lends = plan.from_host
        self._rate = plan.problem.options.machine("peer").rate(self._kinds.compute or self._kinds.a)
        self._multiple, self._orders, self._epilog = kernels.multiple, kernels.orders, native(plan)
        self._itemsizes = [carried(name, "cupy").itemsize for name in plan.problem.matrix_types]
        # Products that were begun or captured before the vote.
        self.first: Captured | None = None
        self.early: Ahead | None = None
        # By the name of a buffer: what comes to which part of it, as an event or as a load that is not issued, because
        # the host would wait for it; the event behind the last product that reads it.
        self._coming = collections.defaultdict[str, list[tuple[Box, Any]]](list)
        self._last_use: dict[str, cp.cuda.Event] = {}
        # Products whose end the host has not seen: an event, flops, what is held until then, and the bytes of that.
        self._queue = collections.deque[tuple[cp.cuda.Event, float, Any, int]]()
        self._queued_flops = 0.0
        self._held_bytes = self.most_held = 0
        self._schedule = load_schedules(plan)[self.rank] if plan.problem.by_ranks and self.rank is not None else None
        # Buffers for others' sums, and the events behind their last uses.
        self._adding: list[Any] = []
        self._added: dict[int, Any] = {}
        self._turn = 0
        self._missing: set[int] = set()

    # Before the vote

    def prepare(self) -> None:
        """Allocate, make the offer, and begin the first products.

        Memory is allocated on the default stream, because its users will free it.
        """
        problem = self.plan.problem
        if problem.fp8:
            check_fp8()
        self._kinds.compute_type  # noqa: B018 - the library must have it
        self.engine.exporter.begin(self._address, problem.options.keep_workspace_bytes)
        try:
            super().prepare()
        finally:
            # Others may read chunks from the vote on, so the chunks must be complete. And an abort may free memory, so
            # no copy into it may be under way.
            self._stream.synchronize()
        if self._schedule is None and self.rank is not None:
            self._begin_early()

    def _compiled(self, steps: tuple[Step, ...]) -> tuple[Instruction, ...]:
        """Allocate what sums need beside; compile the copies and products known in advance."""
        if self.plan.from_host:
            self._pulls.allocate()
        sums, size = [pull for pull in steps if isinstance(pull, Pull) and pull.op], sums_in(self.plan).itemsize
        parts = [place.shape for pull in sums[:1] for place in pull.buffers]
        if parts:
            limit = max(cols for _, cols in parts), self.plan.problem.options.buffer_bytes // 4 // _ADDING // size
            most = min(max(rows * cols for rows, cols in parts), max(limit))
            self._adding = [cp.empty(most, sums_in(self.plan)) for _ in range(_ADDING)]
            self.memory.note(*self._adding)
        self._pulls.flags = self.engine.exporter.empty((1, len(self.plan.ranks) + 1), np.dtype(np.int32))
        every = [self._instruction(step) for step in steps]
        # Up to the last product, and the last sums of others.
        every.insert(max((at for at, step in enumerate(every) if _multiplies(step)), default=-1) + 1, "deliver")
        self.memory.fill()
        return self._copy_own_chunks(every)

    def _instruction(self, step: Step) -> Instruction:
        """Compile a step to an instruction."""
        if isinstance(step, Load):
            (part,) = step
            return LoadPulls(*part)
        if not isinstance(step, Call):
            return step
        if step.kernel == "store":
            return Copies(step, self._copies_of(step))
        return Products(step) if step.kernel in ("product", "add_product") else step

    def _copies_of(self, call: Call) -> CopyBatch:
        """Return the copies of a call of `store`."""
        count, size = call.options["reads"], sums_in(self.plan).itemsize
        rectangles = []
        for place, target in zip(call.arguments[:count], call.arguments[count:], strict=True):
            span = self._span(place)
            span = span.transposed if call.options.get("transposed") else span
            rectangles.append(Rectangle(span, self._span(target), *target.shape))
        (copies,) = make_copies([table_of(rectangles, size)], size, here=[True])
        return copies

    def _copy_own_chunks(self, every: Sequence[Instruction]) -> tuple[Instruction, ...]:
        """Find the chunk blocks of all loads; queue copies of own chunks to buffers that are free; return what is left.

        A buffer is free for its first load. Later loads into the same buffer wait until it has been multiplied.
        """
        used, stream, sources, left = set[str](), self._stream, self._pulls, list[Instruction]()
        sources.chunks = self.chunks
        loads = [step for step in every if isinstance(step, LoadPulls) and step.operand in ("a", "b")]
        for load in loads:
            load.parts = self._blocks_of(load)
        sources.copy_own(loads)
        for step in every:
            if isinstance(step, LoadPulls):
                if step.parts is not None and step.copies and step.place.name not in used:
                    if step.parts.own(self.me).all():
                        self._fill_part(step, stream)
                        continue
                    sources.run(step.copies.pop(), stream)
            elif isinstance(step, Call | Products | Copies):
                call = step if isinstance(step, Call) else step.call
                used.update(place.name for place in call.arguments)
            left.append(step)
        return tuple(left)

    def _blocks_of(self, load: LoadPulls) -> Parts:
        names = self.plan.problem.operands
        number = names.index(load.operand)
        blocks_of_chunks = chunk_blocks_of(self.plan.problem[load.operand].chunks, number, load.rect)
        size = self.arrays[load.place.name].dtype.itemsize
        parts: Parts = self._pulls.parts(number, blocks_of_chunks, self._span(load.place), size)
        return parts

    def _begin_early(self) -> None:
        """Begin the first products whose operands are on this GPU, or capture them in a CUDA graph."""
        every: list[tuple[Products, Gemm, bool]] = []
        away, before = collections.defaultdict[str, list[Box]](list), None
        runs: list[list[Products]] = []
        for step in self.steps:
            if isinstance(step, LoadPulls):
                away[step.place.name].append(step.place.box)
            if not isinstance(step, Products):
                before = None
                continue
            places = step.call.arguments
            here = not any(crossing(place.box, box) for place in places for box in away.get(place.name, ()))
            every.append((step, gemm := self._gemm(step.call), here))
            step.works = [gemm]
            # Those of the same buffers make one product.
            names = [place.name for place in places[:-1]]
            if names != before:
                runs.append([])
            runs[-1].append(step)
            before = names
        count, long = at_hand([(gemm, here) for _, gemm, here in every], self._rate)
        gemms: list[Work] = [gemm for _, gemm, _ in every[:count]]
        self.early = Ahead(self._stream, gemms) if long else None
        self.first = None if long else capture(self._stream, gemms)
        for step, _, _ in every[:count] if self.early or self.first else ():
            step.works = []
        for run in runs:
            gemms = [gemm for step in run for gemm in step.works or ()]
            if 0 < sum(gemm.flops for gemm in gemms) < _SHORT_SECONDS * self._rate:
                graph = capture(self._stream, gemms)
                if graph is not None:
                    for step in run:
                        step.works = []
                    run[0].works, run[0].together = [graph], [step.call for step in run]

    def accept(self, offers: Sequence[Any]) -> None:
        """Read the offers of all participants, and map the memory that this rank reads."""
        self._began = time.perf_counter()
        if self.rank is None:
            return
        super().accept(offers)
        # Of the first buffers the first loads are urgent if the GPU has no product that began early.
        filled = collections.defaultdict[str, list[Box]](list)
        loads = [step for step in self.steps if isinstance(step, LoadPulls) and step.parts is not None]
        for load in loads if not (self.early or self.first) else ():
            place = load.place
            if place.name.endswith(".0"):
                load.urgent = not any(crossing(box, place.box) for box in filled[place.name])
                filled[place.name].append(place.box)
        self._pulls.find(loads)
        self.timings["offers"] = time.perf_counter() - self._began

    # The work

    def _take_all(self, reported: float) -> None:
        self.kernels.mark("multiply")
        if self.first is not None:
            self.first.run(self._stream)
        super()._take_all(reported)
        self.missing = sorted(self._missing)
        self.held_bytes = self.most_held
        self._queue.clear()

    def execute(self) -> dict[ResultKey, Any]:
        """Take all steps; return this rank's chunks of D and of auxiliary outputs."""
        outputs = super().execute()
        if self.early is not None:
            seconds, self.timings["ahead"] = self.early.over(self._began)
            self.timings["multiply"] += seconds
        return outputs

    # Loads

    def _make(self, step: Take) -> None:
        """Wait for a chunk of the loader, and bind it to its buffer."""
        self._make_room(step.buffer.nbytes)
        super()._make(step)

    def _pull(self, load: LoadPulls) -> None:
        """Load a part of an operand."""
        if not load.located:
            # Of an input of the formula all parts are found when the first one is needed.
            loads = [x for x in self.steps if isinstance(x, LoadPulls) and x.operand == load.operand]
            for other_load in loads:
                other_load.parts = self._blocks_of(other_load)
            self._pulls.copy_own(loads)
            self._pulls.find(loads)
        # The host or the stream waits for them, so that what is next on the stream goes first.
        self._pulls.request(load)
        waits = load.outside or (load.imports is not None and not self._pulls.imported.done)
        self._coming[load.place.name].append((load.place.box, load if waits else self._issue(load)))

    def _issue(self, load: LoadPulls) -> cp.cuda.Event:
        """Queue a load on the stream of pulls, after its buffer is free; return the event of its end."""
        stream = self._pulls.stream
        if load.place.name in self._last_use:
            stream.wait_event(self._last_use[load.place.name])
        self._fill_part(load, stream)
        return record(stream)

    def _fill_part(self, load: LoadPulls, stream: cp.cuda.Stream) -> None:
        self._pulls.pull(load, stream)
        if load.operand in ("a", "b"):
            self._complete("ab".index(load.operand), load.place, stream)

    def _complete(self, operand: int, place: Buffer | View, stream: cp.cuda.Stream) -> None:
        """Queue the padding and conjugation of a part after its copies."""
        array, (top, bottom, left, right) = self.arrays[place.name], place.box
        own, depth = ((top, bottom), right) if operand == 0 else ((left, right), bottom)
        conjugated = self.plan.problem.matrices[operand].conjugated and self._orders[operand] == "C"
        if conjugated or depth % self._multiple:
            # GEMMs sum over the padding of k.
            array = array if operand == 0 else array.T
            with stream:
                if depth % self._multiple:
                    array[own[0] : padded(own[1], self._multiple), depth : padded(depth, self._multiple)] = 0
                if conjugated:
                    part = array[slice(*own), :depth]
                    cp.conjugate(part, out=part)

    def _await(self, place: Buffer | View) -> None:
        """Order the stream of products after the loads of a place; issue those that were postponed."""
        if waiting := self._coming.get(place.name):
            wanted = [entry for entry in waiting if crossing(entry[0], place.box)]
            self._coming[place.name] = [entry for entry in waiting if entry not in wanted]
            for _, source in wanted:
                self._stream.wait_event(self._issue(source) if isinstance(source, LoadPulls) else source)

    # Chunks that this rank makes

    def _loader(self, uses: Sequence[SourceChunk]) -> ChunkLoader:
        assert self._schedule is not None
        making = self.engine.making(self._schedule.threads)
        chunks = {key: chunk for key, chunk in self.chunks.items() if isinstance(chunk, SourceChunk)}
        maker = DeviceMaker(self.plan.problem, chunks, making, record(cp.cuda.get_current_stream()))
        return ChunkLoader(uses, self._schedule.threads, self._schedule.ahead, maker.make, maker.begin)

    @contextlib.contextmanager
    def _making(self, steps: Sequence[Step]) -> Iterator[None]:
        with super()._making(steps):
            yield
            # Threads end after what they have put on their streams.
            if self._loads is not None and self._queue:
                self.ended.wait(self._queue[-1][0])

    def _begin(self, step: Take, chunk: Made) -> None:
        self.arrays[step.buffer.name] = chunk.array
        self._coming[step.buffer.name] = [(step.buffer.box, chunk.complete)]
        self._held_bytes += step.buffer.nbytes
        self.most_held = max(self.most_held, self._held_bytes)

    def _join(self, call: Call) -> None:
        """Copy chunks, when they are complete, side by side to a buffer."""
        stream, count, whole = self._pulls.stream, call.options["reads"], call.options["whole"]
        if whole.name in self._last_use:
            stream.wait_event(self._last_use[whole.name])
        for source, target in zip(call.arguments[:count], call.arguments[count:], strict=True):
            for _, complete in self._coming[source.name]:
                stream.wait_event(complete)
            with stream:
                bits(self.at(target))[...] = bits(self.at(source))
        self._complete(whole.number, whole, stream)
        self._coming[whole.name].append((whole.box, record(stream)))

    def _free(self, buffer: Buffer) -> None:
        """Retain a loaded chunk until the products that read it are over; keep other buffers for other ranks."""
        if buffer.is_operand:
            self._coming.pop(buffer.name, None)
            self._note_over(record(self._stream), 0.0, self.arrays.pop(buffer.name), buffer.nbytes)

    # Products

    def _note_over(self, over: cp.cuda.Event, flops: float, held: Any = None, size: int = 0) -> None:
        self._queue.append((over, flops, held, size))
        self._queued_flops += flops

    def _make_room(self, size: int = 0) -> None:
        """Retire completed products and their chunks; block while in-flight bytes exceed the limit."""
        schedule = self._schedule
        while self._queue:
            over, flops, _, held = self._queue[0]
            full = schedule is not None and self._held_bytes + size > schedule.held_bytes
            if full or (len(self._queue) >= PANELS and self._queued_flops > self._rate * _QUEUED_SECONDS):
                self.ended.wait(over)
            elif not over.done:
                break
            self._queue.popleft()
            self._queued_flops -= flops
            self._held_bytes -= held

    def _call(self, call: Call) -> None:
        if call.kernel == "join":
            self._join(call)
            return
        super()._call(call)

    def _await_all(self, *calls: Call) -> None:
        for call in calls:
            for place in call.arguments[:-1]:
                self._await(place)

    def _store_sums(self, copies: Copies) -> None:
        """Copy parts of sums."""
        self._await_all(copies.call)
        copies.batch.run(self._stream)
        if copies.call.options.get("transposed") and self.plan.problem.result_type.kind == "c":
            with self._stream:
                for part in map(self.at, copies.call.arguments[copies.call.options["reads"] :]):
                    cp.conjugate(part, out=part)

    def _multiply(self, products: Products) -> None:
        """Put products on the stream."""
        self._await_all(*(products.together or (products.call,)))
        self._make_room()
        works = [self._gemm(products.call)] if products.works is None else products.works
        for work in works:
            work.run(self._stream)
        over = record(self._stream)
        self._note_over(over, sum(work.flops for work in works))
        self._last_use |= dict.fromkeys((place.name for place in products.call.arguments), over)

    def _gemm(self, call: Call) -> Gemm:
        """Return a product, ready to be put on a stream."""
        *bias, a, b, d = call.arguments
        views = [self._view_of(x, transposed) for x, transposed in zip((a, b), call.options["transposed"], strict=True)]
        rows, cols = (
            MatrixRef(view.span.pointer, view.distance(size)) for view, size in zip(views, self._itemsizes, strict=True)
        )
        depth = a.shape[0] if call.options["transposed"][0] else a.shape[1]
        m, n, k = (padded(extent, self._multiple) for extent in (*d.shape, depth))
        shape = GemmShape(m, n, k, True, (self._op(1, views[1]), self._op(0, views[0])))
        at = self._span(d)
        target = MatrixRef(at.pointer, max(1, at.row_stride // self.arrays[d.name].itemsize))
        native = PLAIN
        if self._epilog is not None:
            address = self._span(bias[0]).pointer if bias else 0
            native = FusedEpilog(complex(*self.plan.problem.formula.alpha), self._epilog, address)
        return Gemm(shape, self._kinds, rows, cols, target, add=call.kernel == "add_product", native=native)

    def _view_of(self, place: Buffer | View, transposed: bool) -> DeviceView:
        """Return how a part of A or B is stored, or its transpose."""
        array, (top, _, left, _) = self.arrays[place.name], place.box
        if place.role == "panel":
            span, order = span_of(array), self._orders[place.number]
        else:
            matrix = self.plan.problem[place.role]
            # The library conjugates what it transposes.
            view = dense_view(array, "F" if matrix.by_ranks and matrix.conjugated else "")
            assert view is not None
            span, order = view
        span = span.at(top, left)
        if transposed:
            return DeviceView(span.transposed, "F" if order == "C" else "C")
        return DeviceView(span, order)

    def _op(self, operand: int, view: DeviceView) -> str:
        if view.order == "C":
            return "N"
        return "C" if self.plan.problem.matrices[operand].conjugated else "T"

    def _span(self, place: Buffer | View) -> Span:
        return span_of(self.arrays[place.name]).at(place.box[0], place.box[2])

    # Sums of others, and parts of chunks that others have computed

    def _take(self, step: Instruction) -> None:
        match step:
            case LoadPulls():
                self._pull(step)
            case Products():
                self._multiply(step)
            case Copies():
                self._store_sums(step)
            case str():
                self.kernels.mark(step)
            case _:
                super()._take(step)

    def _publish_step(self, step: Publish) -> None:
        """Raise the flag of a rank whose part of the sums is complete, or the flag of all sums of this rank."""
        count = len(self.plan.ranks)
        number, reader = divmod(step.key.number, count)
        if not self._pulls.reads(PART, self.plan.ranks[reader]):
            self._publish(step.key, [self.at(place) for place in step.buffers])
            return
        at = self._pulls.flags.data.ptr + (reader if number == self.rank else count) * FLAG_BYTES
        cp.cuda.runtime.memsetAsync(at, 1, FLAG_BYTES, self._stream.ptr)

    def _request(self, pull: Pull) -> Any:
        """Request sums of ranks out of reach; others are pulled when they are needed."""
        near = self._pulls.reads(PART, self.plan.ranks[pull.owner])
        return None if near else super()._request(pull)

    def _arrive(self, pull: Pull, request: Any) -> None:
        if request is not None:
            self._receive(pull, self._get(request))
        elif pull.op:
            self._add(pull)
        elif (copies := self._copies_from(pull)) is None:
            self._missing.update(place.number for place in pull.buffers)
        else:
            self._pulls.run(copies, self.engine.sums)
            self._stream.wait_event(record(self.engine.sums))

    def _receive(self, pull: Pull, arrays: Sequence[Any]) -> None:
        """Copy or add what a rank out of reach has sent."""
        self._stream.wait_event(record(cp.cuda.Stream.null))
        with self._stream:
            for place, array in zip(pull.buffers, arrays, strict=True):
                target, part = self.at(place), cp.asarray(bits(array))
                if pull.op:
                    cp.add(target, part, out=target)
                else:
                    bits(target)[...] = part

    @property
    def _patience(self) -> float:
        """Timeout in seconds for another rank: longer than the whole product can take."""
        options = self.plan.problem.options
        return options.transfer_timeout + self.plan.flops / options.machine(self.plan.engine).rate("other")

    def _add(self, pull: Pull) -> None:
        """Add another rank's partial sums, once they are ready."""
        sources, holder, pulls, copied = self._pulls, self.plan.ranks[pull.owner], self.engine.sums, []
        assert sources.remote is not None
        assert self.rank is not None
        # The copies are made before the sums are ready, because a GPU waits once they are.
        for place in pull.buffers:
            (top, bottom, left, right), cols = place.box, place.shape[1]
            most = max(1, self._adding[0].size // cols)
            for row in range(top, bottom, most):
                rows = min(row + most, bottom) - row
                number = self._turn = (self._turn + 1) % _ADDING
                buffer = self._adding[number][: rows * cols].reshape(rows, cols)
                source = sources.block(holder, 0, buffer.nbytes)
                assert source is not None
                copy = Rectangle(source.at(row, left), span_of(buffer), rows, cols)
                (copies,) = make_copies([table_of([copy], buffer.itemsize)], buffer.itemsize)
                copied.append((number, buffer, copies, self.arrays[place.name][row : row + rows, left:right]))
        sources.remote.wait(holder, self.rank, self.ended.check, self._patience)
        for number, buffer, copies, part in copied:
            if number in self._added:
                pulls.wait_event(self._added[number])
            sources.run(copies, pulls)
            self._stream.wait_event(record(pulls))
            with self._stream:
                cp.add(part, buffer, out=part)
            self._added[number] = record(self._stream)

    def _copies_from(self, pull: Pull) -> CopyBatch | None:
        """Return the copies of parts of chunks out of another rank's blocks of D, once these are complete.

        None if the rank is gone and has not completed it, or nobody can tell any more.
        """
        sources, plan, size = self._pulls, self.plan, sums_in(self.plan).itemsize
        holder, rectangles = plan.ranks[pull.owner], list[Rectangle]()
        assert sources.remote is not None
        try:
            sources.remote.wait(holder, len(plan.ranks), self.ended.check, self._patience)
            for number, whole in enumerate(blocks(plan, pull.owner)):
                inside = [(place, part) for place in pull.buffers if (part := common(self._in_d(place), whole))]
                area = sum((r1 - r0) * (c1 - c0) for _, (r0, r1, c0, c1) in inside)
                source = sources.block(holder, number, area * size) if area else None
                for place, (r0, r1, c0, c1) in inside:
                    assert source is not None
                    top, _, left, _ = self._in_d(place)
                    target = self._span(place).at(r0 - top, c0 - left)
                    rectangles.append(Rectangle(source.at(r0 - whole[0], c0 - whole[2]), target, r1 - r0, c1 - c0))
        except PeerLostError:
            return None
        return make_copies([table_of(rectangles, size)], size)[0]

    def _in_d(self, place: Buffer | View) -> Rect:
        """Return where a part of a chunk of D is in D."""
        (row, _, column, _), (r0, r1, c0, c1) = self.plan.chunk_rect(place.number), place.box
        return row + r0, row + r1, column + c0, column + c1

    # Results

    def _store(self, step: Store) -> None:
        if step.number not in self._missing:
            super()._store(step)

    # Messages between participants

    def lose(self, participant: int) -> None:
        """Continue without a lost participant, whose mapped memory stays. Thread-safe."""
        self._pulls.lost.add(participant)

    def abort(self, error: BaseException) -> None:
        """Raise `error` in `execute` before the next step. Thread-safe; may be repeated."""
        super().abort(error)
        if self.early is not None:
            self.early.release()


def _multiplies(step: Instruction) -> bool:
    """Whether a step computes or moves sums over k."""
    adds = isinstance(step, Pull) and bool(step.op)
    return adds or isinstance(step, Products) or (isinstance(step, Copies) and "transposed" in step.call.options)


def made_orders(plan: Plan) -> tuple[str, str]:
    """Return the memory orders of buffers for A and B: the library conjugates what it transposes."""
    factors = plan.problem.a, plan.problem.b
    a, b = ("F" if matrix.by_ranks and matrix.conjugated else plan.orders[matrix.name] for matrix in factors)
    return a, b
