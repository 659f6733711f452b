"""D on one rank: the arrays of its sums, the partial sums of others, its chunks, the formula."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import PeerLostError
from dask_distmm.engines.base import ResultKey
from dask_distmm.engines.gpu.copy_kernels import CopyBatch, Rectangle, make_copies, table_of
from dask_distmm.engines.gpu.finishing import Finishing
from dask_distmm.engines.gpu.host import to_host
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.readable import Sources
from dask_distmm.engines.peer.schedule import ScheduleStep, merged
from dask_distmm.layout.rectangles import Span, Table, span_of
from dask_distmm.numeric.types import typed
from dask_distmm.planning.cuts import Rect, common, padded
from dask_distmm.planning.schedule import (
    Triangle,
    blocks,
    extent_multiple,
    in_place,
    native,
    square_on_diagonal,
    sums_in,
)

# Chunks of D to host memory, each as soon as it is complete, while others are still multiplied


class Downloads:
    """The copies of a rank's chunks of D to host memory, in a thread and on a stream of their own."""

    def __init__(self, result: Result, steps: Sequence[ScheduleStep]) -> None:
        self._type, self._stream = result.plan.problem.d.dtype, result.engine.downloads
        # A thread begins with the first GPU that the process sees.
        use = cp.cuda.Device().use
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distmm-download", initializer=use)
        self._begun: dict[int, Future[NDArray[Any]]] = {}
        # By the number of a step the chunks that no later step multiplies into.
        self._after: dict[int, list[tuple[int, Any]]] = collections.defaultdict(list)
        rects = np.array([product.rect for step in steps for product in step.products], np.int64).reshape(-1, 4)
        numbers = np.repeat(np.arange(len(steps)), [len(step.products) for step in steps])
        for index, (top, bottom, left, right), chunk in result.complete_in_place():
            r0, r1, c0, c1 = rects.T
            touching = (r0 < bottom) & (r1 > top) & (c0 < right) & (c1 > left)
            self._after[int(numbers[touching].max())].append((index, chunk))

    def begin(self, step: int, over: cp.cuda.Event) -> None:
        """Begin the copies of the chunks that are complete after a step, when an event is done."""
        for index, chunk in self._after.get(step, ()):
            self._begun[index] = self._thread.submit(self._copy, chunk, over)

    def _copy(self, chunk: Any, over: cp.cuda.Event | None) -> NDArray[Any]:
        if over is not None:
            self._stream.wait_event(over)
        return to_host(chunk, self._stream)

    def all(self, outputs: Mapping[ResultKey, Any]) -> dict[ResultKey, NDArray[Any]]:
        """Return all outputs in host memory; those that are still on the GPU are complete."""
        copies: dict[ResultKey, Future[NDArray[Any]]] = {}
        for key, chunk in outputs.items():
            begun = self._begun.get(key[1]) if not key[0] else None
            copies[key] = begun or self._thread.submit(self._copy, chunk, None)
        return {key: typed(copy.result(), "" if key[0] else self._type) for key, copy in copies.items()}

    def close(self) -> None:
        """End the thread; copies that have not begun are dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._stream.synchronize()


# D on one rank: the arrays of its sums, the partial sums of others, its chunks, the formula


# GEMMs are fast if the distance of rows is a multiple of this many elements.
ALIGNED = 16
# Buffers for partial sums: one is filled while the other one is added.
_ADDING = 2


class Result:
    """The sums of one rank, and the chunks of D that it makes of them. All memory is allocated when it is made."""

    def __init__(self, rank: int, sources: Sources) -> None:
        self.plan, self.engine, self.rank, self._sources = sources.plan, sources.engine, rank, sources
        plan, engine, epilog = sources.plan, sources.engine, native(sources.plan)
        self.sums, self.triangle = sums_in(plan), square_on_diagonal(plan, rank, epilog)
        self._stream, self._pulls = engine.stream, engine.sums
        problem, multiple, empty = plan.problem, extent_multiple(plan.problem), engine.exporter.empty
        owned = {int(index): plan.chunk_rect(int(index)) for index in plan.owned(rank)}
        # Chunks of D, or their sums where the formula or rounding is still to come.
        self._chunks: dict[int, Any] = {}
        self.blocks: list[tuple[Rect, Any]] = []
        lying = in_place(plan, rank)
        number_of = {rect: index for index, rect in owned.items() if rect in lying}
        for rect in blocks(plan, rank):
            rows, cols = rect[1] - rect[0], rect[3] - rect[2]
            if rect in number_of:
                array = cp.empty((rows, cols), self.sums)
                self._chunks[number_of[rect]] = array
            else:
                array = empty((padded(rows, multiple), padded(cols, max(multiple, ALIGNED))), self.sums)[:rows, :cols]
            self.blocks.append((rect, array))
        for index, rect in owned.items():
            if index not in self._chunks:
                self._chunks[index] = cp.empty((rect[1] - rect[0], rect[3] - rect[2]), self.sums)
        self._finishing: Finishing | None = None
        if problem.finished and epilog is None:
            self._finishing = Finishing(plan, sources.me, rank, sources.chunks, "C")
        self._rounded: dict[int, Any] = {}
        if self._finishing is None and self.sums != problem.result_type:
            self._rounded = {index: cp.empty(x.shape, problem.result_type) for index, x in self._chunks.items()}
        self._adding: list[Any] = []
        if plan.grid[2] > 1:
            final = merged(plan.final_rects(rank))
            most = max((r[3] - r[2] for r in final), default=0)
            size = max(((r[1] - r[0]) * (r[3] - r[2]) for r in final), default=0)
            limit = max(most, problem.options.buffer_bytes // 4 // _ADDING // self.sums.itemsize)
            self._adding = [cp.empty(min(size, limit), self.sums) for _ in range(_ADDING)]
        self.flags = empty((1, len(plan.ranks) + 1), np.dtype(np.int32))
        self._there: dict[int, list[tuple[int, Rect]]] = collections.defaultdict(list)
        (self._own,) = make_copies([table_of(self._find_own(), self.sums.itemsize)], self.sums.itemsize, here=True)
        self._upper: list[Any] = []
        self._mirrored: CopyBatch | None = None
        if self.triangle is not None:
            (self._mirrored,) = make_copies([self._find_mirrored(self.triangle)], self.sums.itemsize, here=True)
        self._used, self._turn = dict[int, Any](), 0
        # Pulls of the partial sums that are added next: the number of the buffer and the part of it that they fill, the
        # copies, and the part of this rank's block that they are added to.
        self._next: list[tuple[int, Any, CopyBatch, Any]] = []
        self.missing: list[int] = []
        self.coming: collections.deque[int] = collections.deque()
        if plan.grid[2] > 1 and plan.final_rects(rank):
            # The rank before this one computes this rank's part right after its own.
            count = len(plan.ranks)
            self.coming.extend((rank - behind) % count for behind in range(1, count))

    def shared(self) -> list[tuple[int, Any]]:
        """Return the blocks that others read, with their numbers."""
        mine = {id(chunk) for chunk in self._chunks.values()}
        every = self.plan.grid[2] > 1
        return [(number, x) for number, (_, x) in enumerate(self.blocks) if every or id(x) not in mine]

    def complete_in_place(self) -> list[tuple[int, Rect, Any]]:
        """Return those chunks that GEMMs complete, by number and rectangle: nothing is done to them later."""
        if self.plan.grid[2] > 1 or self._finishing or self._rounded or self._mirrored:
            return []
        numbers = {id(chunk): index for index, chunk in self._chunks.items()}
        return [(numbers[id(array)], rect, array) for rect, array in self.blocks if id(array) in numbers]

    def _find_mirrored(self, triangle: Triangle) -> Table:
        """Return the copies that complete a symmetric part of D; note the parts that they write."""
        found = []
        for part in triangle.copied():
            for (top, bottom, left, right), target in self.blocks:
                for (row, end, col, last), source in self.blocks:
                    # An element (i, j) is that at (j, i).
                    inside = common(part, (top, bottom, left, right))
                    if inside is not None and (inside := common(inside, (col, last, row, end))) is not None:
                        i0, i1, j0, j1 = inside
                        upper = target[i0 - top : i1 - top, j0 - left : j1 - left]
                        lower = source[j0 - row : j1 - row, i0 - col : i1 - col]
                        found.append(Rectangle(span_of(lower.T), span_of(upper), i1 - i0, j1 - j0))
                        self._upper.append(upper)
        return table_of(found, self.sums.itemsize)

    def mirror(self) -> None:
        """Copy what is not multiplied of a symmetric D from its other triangle."""
        if self._mirrored is not None:
            self._mirrored.run(self._stream)
            with self._stream:
                for part in self._upper if self.sums.kind == "c" else ():
                    cp.conjugate(part, out=part)

    def raise_flag(self, number: int) -> None:
        """Raise the flag of a rank whose part of the partial sums is complete; the last flag is for the whole block."""
        at = int(self.flags.data.ptr) + number * self.flags.itemsize
        cp.cuda.runtime.memsetAsync(at, 1, self.flags.itemsize, self._stream.ptr)

    def add_ready(self, *, block: bool) -> None:
        """Add the next rank's partial sums if they are ready."""
        sources, rank, stream = self._sources, self.coming[0], self._pulls
        assert sources.remote is not None
        # The copies are made before the sums are ready, because a GPU waits once they are.
        self._next = self._next or self._sums_of(rank)
        if not sources.remote.ready(self.plan.ranks[rank], self.rank, sources.ended.check if block else None):
            return
        self.coming.popleft()
        for number, buffer, copies, part in self._next:
            if number in self._used:
                stream.wait_event(self._used[number])
            sources.run(copies, stream)
            self._stream.wait_event(record(stream))
            with self._stream:
                cp.add(part, buffer, out=part)
            self._used[number] = record(self._stream)
        self._next = []

    def _sums_of(self, rank: int) -> list[tuple[int, Any, CopyBatch, Any]]:
        """Return the pulls of another rank's only block, and the parts of this rank's block that they are added to."""
        rect, own = self.blocks[0]
        found, size = [], self.sums.itemsize
        for r0, r1, c0, c1 in merged(self.plan.final_rects(self.rank)):
            cols = c1 - c0
            most = max(1, self._adding[0].size // cols)
            for top in range(r0, r1, most):
                rows = min(top + most, r1) - top
                number = self._turn = (self._turn + 1) % _ADDING
                buffer = self._adding[number][: rows * cols].reshape(rows, cols)
                source = self._sources.block(self.plan.ranks[rank], 0, rows * cols * size)
                assert source is not None
                copy = Rectangle(source.at(top - rect[0], c0 - rect[2]), span_of(buffer), rows, cols)
                (copies,) = make_copies([table_of([copy], size)], size)
                part = own[top - rect[0] : top + rows - rect[0], c0 - rect[2] : c1 - rect[2]]
                found.append((number, buffer, copies, part))
        return found

    def deliver(self) -> dict[ResultKey, Any]:
        """Put together this rank's chunks of D, finish or round them; return these and auxiliary outputs."""
        plan, stream, sources, size = self.plan, self._stream, self._sources, self.sums.itemsize
        if self._finishing is not None:
            sources.gather(self._finishing, stream)
        missing: set[int] = set()
        self._own.run(stream)
        for rank, parts in sorted(self._there.items(), key=lambda item: (item[0] - self.rank) % len(plan.ranks)):
            found = self._done_by(rank, parts)
            if found is None:
                missing.update(index for index, _ in parts)
                continue
            sources.run(make_copies([table_of(found, size)], size)[0], self._pulls)
            stream.wait_event(record(self._pulls))
        self.missing = sorted(missing)
        outputs: dict[ResultKey, Any] = {("", index): chunk for index, chunk in self._chunks.items()}
        if self._finishing is not None:
            outputs = self._finishing.apply(self._chunks, stream)
        for index, rounded in self._rounded.items():
            with stream:
                rounded[...] = self._chunks[index]
            outputs["", index] = rounded
        return {key: chunk for key, chunk in outputs.items() if key[1] not in missing}

    def _find_own(self) -> list[Rectangle]:
        """Return the copies from own blocks to own chunks; note the parts of own chunks that are in others' blocks."""
        found: list[Rectangle] = []
        in_blocks = {id(array) for _, array in self.blocks}
        for index, target in self._chunks.items():
            for rank, rect in self.plan.final_holders(index) if id(target) not in in_blocks else ():
                if rank != self.rank:
                    self._there[rank].append((index, rect))
                    continue
                for whole, array in self.blocks:
                    found += self._part(index, rect, whole, span_of(array))
        return found

    def _done_by(self, rank: int, parts: Sequence[tuple[int, Rect]]) -> list[Rectangle] | None:
        """Return the copies of parts of chunks (by number) out of another rank's block, once that is complete.

        None if the rank is gone and has not completed it, or nobody can tell any more.
        """
        sources, plan, found = self._sources, self.plan, []
        assert sources.remote is not None
        if not sources.remote.ready(plan.ranks[rank], len(plan.ranks), sources.ended.check):
            return None
        try:
            for number, whole in enumerate(blocks(plan, rank)):
                inside = [part for _, rect in parts if (part := common(rect, whole)) is not None]
                area = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in inside)
                source = sources.block(plan.ranks[rank], number, area * self.sums.itemsize) if area else None
                if source is not None:
                    found += [x for index, rect in parts for x in self._part(index, rect, whole, source)]
        except PeerLostError:
            return None
        return found

    def _part(self, index: int, rect: Rect, whole: Rect, source: Span) -> list[Rectangle]:
        """Return the copy of a part of D that is in a block to a chunk of this rank, if they overlap."""
        if (part := common(rect, whole)) is None:
            return []
        (r0, r1, c0, c1), (top, _, left, _) = part, self.plan.chunk_rect(index)
        target = span_of(self._chunks[index]).at(r0 - top, c0 - left)
        return [Rectangle(source.at(r0 - whole[0], c0 - whole[2]), target, r1 - r0, c1 - c0)]

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        found = [*(array for _, array in self.blocks), *self._chunks.values(), *self._rounded.values(), *self._adding]
        return found + (self._finishing.arrays if self._finishing is not None else [])
