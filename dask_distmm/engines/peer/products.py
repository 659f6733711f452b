"""The products of a schedule as GEMMs into the blocks of D.

Long products are begun before the vote is counted, because they need no other rank and the GPU is idle.

They are on the same stream as all other products. A stream that waits until the run takes place (cuStreamWaitValue32)
would save the 0.1 ms that the host takes for a first launch, but CUDA waits for all streams when it loads a kernel for
the first time: on H200 that ended in a deadlock. Short products become a CUDA graph: the host launches a graph in 0.005
ms, while a call of the library takes 0.02 ms, and 0.1 ms after an idle moment.

The host issues each step when the one `PANELS` before it is done, and checks in between whether the run has been ended.
No kernel waits for another rank.

Where a rank makes chunks of A or B itself, each is made, multiplied and dropped::

    threads     make 2 | make 3 | make 4        each on a stream of its own (`loads`)
    copies               join 1 | join 2        small chunks side by side in a buffer, on a stream of pulls
    GEMMs                  multiply 0 | multiply 1

The host takes the chunks in the order of the steps, and puts a step on its streams as soon as the tasks of its chunks
have returned; their kernels may still run. Before it takes more chunks than it may hold, it waits until earlier steps
are over, and drops theirs.
"""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import log
from dask_distmm.engines.gpu.finishing import NativeBias
from dask_distmm.engines.gpu.gemm import PLAIN, FusedEpilog, Gemm, GemmShape, GemmTypes, MatrixRef
from dask_distmm.engines.gpu.operands import mark, record
from dask_distmm.engines.peer.loads import Loads
from dask_distmm.engines.peer.readable import DeviceView, moved
from dask_distmm.engines.peer.result import Downloads, Result
from dask_distmm.engines.peer.schedule import Product, ScheduleStep
from dask_distmm.layout.rectangles import span_of
from dask_distmm.planning.cuts import Rect, padded
from dask_distmm.planning.schedule import PANELS, extent_multiple, native

# The first products of a rank, whose operands are on its own GPU: begun before the vote, or captured in a graph


# Products that together take between this many seconds are begun before the vote. Shorter ones are kept to hide pulls.
# Longer ones would waste too much time if the run does not take place.
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 5e-3
# Products that together take less than this many seconds become a graph; behind longer ones the host has enough time.
_SHORT_SECONDS = 0.3e-3


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
    try:
        stream.begin_capture()
        try:
            for gemm in products:
                gemm.run(stream)
        finally:
            graph = stream.end_capture()
        graph.upload(stream)
    except cp.cuda.runtime.CUDARuntimeError as error:
        log.info("products can't be captured: %s", error)
        return None
    return Captured(graph, products)


def shorten(stream: cp.cuda.Stream, products: Sequence[Work], rate: float) -> Sequence[Work]:
    """Return products that are put on a stream together as a graph, if they are short and can be."""
    if not 0 < sum(gemm.flops for gemm in products) < _SHORT_SECONDS * rate:
        return products
    captured = capture(stream, products)
    return products if captured is None else [captured]


def at_hand(products: Sequence[tuple[Sequence[Work], bool]], rate: float) -> tuple[int, bool]:
    """Return how many products can come first, and whether these are to be begun."""
    seconds, count = 0.0, 0
    for gemms, here in products:
        more = sum(gemm.flops for gemm in gemms) / rate
        if not here or seconds + more > _MOST_SECONDS:
            break
        seconds, count = seconds + more, count + 1
    return count, count > 0 and seconds >= _LEAST_SECONDS


class Ahead:
    """The first products of a run, under way."""

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

    def give_up(self) -> None:
        """Have them over before anybody gets the memory of the run. Any thread; may be repeated."""
        self._finalizer()

    def over(self, began: float) -> tuple[float, float]:
        """Return how many seconds they took, and how many of these before the run began; they are done."""
        self._finalizer.detach()
        seconds = float(cp.cuda.get_elapsed_time(self._start, self._end)) / 1e3
        return seconds, min(seconds, began - self._put)


# The products of a schedule as GEMMs into the blocks of D


# Steps on their streams whose end the host has not seen, where chunks are made: these are small.
_MOST_STEPS = 8


class Multiplication:
    """All steps of one rank, issued on streams: loads, GEMMs, and the sums of other ranks."""

    def __init__(self, loads: Loads, result: Result, kinds: GemmTypes, bias: NativeBias | None) -> None:
        self.steps, self.loads, self.rank = loads.steps, loads, result.rank
        self._result, self._kinds, self._epilog, self._bias = result, kinds, native(result.plan), bias
        sources = loads.sources
        self._ended, self._stream = sources.ended, sources.engine.stream
        self._rects = np.array([rect for rect, _ in result.blocks], np.int64).reshape(-1, 4)
        self._multiple = extent_multiple(result.plan.problem)
        # Where chunks that are made lie is known only then.
        known = self.steps if loads.source is None else ()
        self._gemms: list[list[Sequence[Work]]] = [[self._of(product) for product in step.products] for step in known]
        self._most = PANELS if loads.source is None else _MOST_STEPS
        # For each step that is on the stream the event behind it, and the chunks that it reads until then.
        self._over: collections.deque[tuple[cp.cuda.Event, Any]] = collections.deque()
        self.early: Ahead | None = None
        self.first: Captured | None = None

    def begin_early(self, rate: float) -> None:
        """Begin the first products whose operands are on this GPU, or capture them in a CUDA graph."""
        every = [
            (product, gemms, at)
            for step, gemms in zip(self.steps, self._gemms, strict=False)
            for at, product in enumerate(step.products)
        ]
        here = [(gemms[at], self._bias is None and self._is_here(product)) for product, gemms, at in every]
        count, long = at_hand(here, rate)
        products = [gemm for _, gemms, at in every[:count] for gemm in gemms[at]]
        self.early = Ahead(self._stream, products) if long else None
        self.first = None if long else capture(self._stream, products)
        done = count if self.early or self.first else 0
        for number, (_, gemms, at) in enumerate(every):
            gemms[at] = [] if number < done else shorten(self._stream, gemms[at], rate)

    def _is_here(self, product: Product) -> bool:
        return all(load.number in self.loads.before_vote for load in product.loaded)

    def find_loads(self) -> None:
        """Find all copies from other GPUs; the first step's are urgent if the GPU has no GEMM that began early."""
        waiting = self.steps[: not (self.early or self.first)]
        self.loads.find({load.number for step in waiting for load in step.loads})

    def run(self, progress: Callable[[float], None], downloads: Downloads | None = None) -> None:
        """Issue all steps, and add the sums of other ranks as they get ready."""
        mine, done, result, count = False, list[int](), self._result, len(self._result.plan.ranks)
        if self._bias is not None:
            self.loads.sources.gather(self._bias, self._stream)
            self._bias.convert(self._stream)
        if self.first is not None:
            self.first.run(self._stream)
        try:
            self.loads.begin()
            for number, step in enumerate(self.steps):
                # Others' sums are added to this rank's part of D once that is complete: while the GPU has other work.
                if number >= PANELS and mine and result.coming:
                    result.add_ready(block=False)
                self._make_room(step)
                progress((number - len(self._over)) / len(self.steps))
                self._issue(number, step)
                over = record(self._stream)
                self._over.append((over, self.loads.taken()))
                self.loads.note_use(step, over)
                if downloads is not None:
                    downloads.begin(number, over)
                done += step.done
                # Of a triangle nothing is complete before all of it is.
                if result.triangle is None or step is self.steps[-1]:
                    result.mirror()
                    for rank in done:
                        result.raise_flag(rank)
                    mine, done = mine or self.rank in done, []
                while self.loads.issue_next(number):
                    pass
            while result.coming:
                result.add_ready(block=True)
            if count > 1:
                result.raise_flag(count)
            if self.loads.source is not None:
                self._ended.wait(self._over[-1][0])
        finally:
            self.loads.close()
            self._over.clear()

    def _make_room(self, step: ScheduleStep) -> None:
        """Let go of steps that are over, and of their chunks; wait for such where too much would be on its way."""
        while self._over:
            over, chunks = self._over[0]
            if len(self._over) >= self._most or self.loads.are_full(step):
                self._ended.wait(over)
            elif not over.done:
                break
            self._over.popleft()
            self.loads.release(chunks)
        self._ended.check()

    def _issue(self, number: int, step: ScheduleStep) -> None:
        """Issue the products of a step, each as soon as its own loads are issued.

        The host takes about as long to issue the loads of a step as GPUs take for one of them.
        """
        for at, product in enumerate(step.products):
            self.loads.issue_for(product)
            gemms = self._gemms[number][at] if self._gemms else self._of(product)
            self._multiply(product, gemms)
            self.loads.issue_next(number - 1)

    def _multiply(self, product: Product, gemms: Sequence[Work]) -> None:
        """Put a product on the stream, where it waits for its operands."""
        self.loads.wait_for(product, self._stream)
        for gemm in gemms:
            gemm.run(self._stream)

    # Products as GEMMs

    def _of(self, product: Product) -> list[Work]:
        """Return a product as GEMMs: one or some for each block of D that it is multiplied into."""
        buffers, triangle = self.loads.buffers, self._result.triangle
        a, b, rect = buffers.view(product.a[0]), buffers.view(product.b[0]), product.rect
        found = list[Work]()
        for number in self._touched(rect):
            (top, bottom, left, right), array = self._result.blocks[number]
            part = max(top, rect[0]), min(bottom, rect[1]), max(left, rect[2]), min(right, rect[3])
            for i0, i1, j0, j1 in triangle.kept(part) if triangle is not None else (part,):
                rows, cols = (
                    moved(x, axis, at, buffers.itemsizes[axis])
                    for x, axis, at in ((a, 0, i0 - rect[0]), (b, 1, j0 - rect[2]))
                )
                extents = i1 - i0, j1 - j0, product.a[0].depth_extent
                m, n, k = (padded(extent, self._multiple) for extent in extents)
                shape = GemmShape(m, n, k, True, (self._op(1, b), self._op(0, a)))
                at = span_of(array).at(i0 - top, j0 - left)
                d = MatrixRef(at.pointer, max(1, at.row_stride // array.dtype.itemsize))
                found.append(Gemm(shape, self._kinds, rows, cols, d, add=product.add, native=self._native(j0)))
        return found

    def _touched(self, rect: Rect) -> list[int]:
        """Return the numbers of the blocks of D that a part of it overlaps."""
        if len(self._rects) == 1:
            return [0]
        top, bottom, left, right = self._rects.T
        here = (top < rect[1]) & (bottom > rect[0]) & (left < rect[3]) & (right > rect[2])
        found: list[int] = np.flatnonzero(here).tolist()
        return found

    def _native(self, column: int) -> FusedEpilog:
        """Return the library's factor, epilog and bias for a product whose first column is this one of D."""
        if self._epilog is None:
            return PLAIN
        bias = 0
        if self._bias is not None:
            vector = self._bias.vector
            bias = int(vector.data.ptr) + (column - self._result.plan.region(self.rank)[2]) * vector.itemsize
        return FusedEpilog(complex(*self._result.plan.problem.formula.alpha), self._epilog, bias)

    def _op(self, operand: int, view: DeviceView) -> str:
        if view.order == "C":
            return "N"
        return "C" if self._result.plan.problem.matrices[operand].conjugated else "T"
