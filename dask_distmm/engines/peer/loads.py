"""A and B on one rank: chunks that are multiplied in place, buffers for all other parts, and the loads that fill these.

A load is the copies that bring a part of A or B into its buffer. They are issued in the order of the schedule.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import cupy as cp

from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.readable import CopyBatch, DeviceView, Parts, Pull, Sources
from dask_distmm.engines.peer.result import ALIGNED
from dask_distmm.engines.peer.schedule import Load, PendingLoad, Product, ScheduleStep, Slot, pending_loads
from dask_distmm.engines.peer.state import Trace
from dask_distmm.layout.rectangles import span_of
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import Rect, padded
from dask_distmm.planning.schedule import extent_multiple


class OperandBuffers:
    """Where the GEMMs of a rank find parts of A and B."""

    def __init__(self, plan: Plan, sources: Sources, orders: tuple[str, str] | None = None) -> None:
        self._plan, self._sources = plan, sources
        self._multiple = extent_multiple(plan.problem)
        self._orders = ("C", "F") if plan.problem.fp8 else orders or (plan.order_a, plan.order_b)
        self.itemsizes = tuple(carried(name, "cupy").itemsize for name in plan.problem.matrix_types)
        self.arrays: dict[Slot, Any] = {}

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
        if self._sources.is_in_host(operand):
            return False
        found = self._sources.chunk_at(operand, rect, self.itemsizes[operand])
        if found is None:
            return False
        view, rows, cols = found
        (pointer, row, col), size = view.span, self.itemsizes[operand]
        inner, outer, width, height = (col, row, cols, rows) if view.order == "C" else (row, col, rows, cols)
        aligned = pointer % size == 0 and outer % size == 0
        if self._plan.problem.conjugated[operand] and view.order == "C":
            # The library conjugates only operands that it transposes; other ones are conjugated in a buffer.
            return False
        if self._multiple > 1:
            aligned = not any(x % 16 for x in (pointer, outer, rows, cols))
        if self._plan.problem.fp8:
            aligned = aligned and view.order == self._orders[operand]
        return bool(aligned and (inner == size or width == 1) and (height == 1 or outer >= width * size))

    def view(self, load: Load) -> DeviceView:
        """Return where the part of an operand is that a load describes: in its buffer, or in a chunk."""
        if load.slot is not None:
            return self.target(load)
        found = self._sources.chunk_at(load.operand, load.rect, self.itemsizes[load.operand])
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
        if self._plan.problem.conjugated[load.operand] and self._orders[load.operand] == "C":
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


class Loads:
    """All loads of a rank."""

    def __init__(self, steps: Sequence[ScheduleStep], buffers: OperandBuffers, sources: Sources, trace: Trace) -> None:
        self.steps, self._buffers, self._sources, self._trace = steps, buffers, sources, trace
        self.before_vote: set[int] = set()
        # For each other load its chunk blocks, and the copies of those on this GPU unless these copies are done.
        self._parts: dict[int, tuple[Parts, list[CopyBatch]]] = {}
        self._found: dict[int, Pull] = {}
        self._pending: collections.deque[PendingLoad] = collections.deque()
        self._done: dict[int, cp.cuda.Event] = {}
        self._last_use: dict[Any, cp.cuda.Event] = {}

    def copy_own_chunks(self, me: int, stream: cp.cuda.Stream) -> None:
        """Find the chunk blocks of all loads; put on a stream the copies of own chunks into buffers that are free.

        A buffer is free for its first load. Later loads into the same buffer wait until it has been multiplied.
        """
        used: set[Slot | None] = set()
        for step in self.steps:
            for load in step.loads:
                target, size = self._buffers.target(load).span, self._buffers.itemsizes[load.operand]
                parts = self._sources.parts(load.operand, load.chunk_blocks, target, size)
                if self._sources.is_in_host(load.operand):
                    self._parts[load.number] = parts, []
                    continue
                own = self._sources.own_copies(parts)
                if load.slot in used:
                    self._parts[load.number] = parts, [own]
                elif (parts.holders == me).all():
                    self._put(load, Pull([own], {}, 0, {}), stream)
                    self.before_vote.add(load.number)
                else:
                    self._sources.run(own, stream)
                    self._parts[load.number] = parts, []
            used.update(load.slot for product in step.products for load in product.loaded)

    def find(self, at_first: Collection[int]) -> None:
        """Find all copies from other GPUs, and map the memory of these, once the offers have been read."""
        self._found = self._sources.find(self._parts, at_first)

    def begin(self) -> None:
        """Begin to issue: all loads that are not complete are pending."""
        self._pending.extend(one for one in pending_loads(self.steps) if one.load.number not in self.before_vote)

    def issue_for(self, product: Product) -> None:
        """Issue pending loads, in their order, until those that a product needs are among them."""
        needed = {load.number for load in product.loaded} - self.before_vote
        while not needed <= self._done.keys():
            self._issue(self._pending.popleft().load)

    def issue_next(self, step: int) -> bool:
        """Issue the next pending load if its buffer is free after a step and no worker must be asked for chunks."""
        pending = self._pending
        if not pending or pending[0].after > step or self._found[pending[0].load.number].outside:
            return False
        self._issue(pending.popleft().load)
        return True

    def wait_for(self, product: Product, stream: cp.cuda.Stream) -> None:
        """Let a stream wait for the loads that a product needs."""
        for load in product.loaded:
            if load.number in self._done:
                stream.wait_event(self._done[load.number])

    def note_use(self, step: ScheduleStep, over: cp.cuda.Event) -> None:
        """Note the event after which the buffers that a step multiplies may be loaded anew."""
        self._last_use |= {load.slot: over for product in step.products for load in product.loaded}

    def _issue(self, load: Load) -> None:
        """Put the pulls of a load on their stream, where they wait until its buffer is free."""
        stream, pull = self._sources.stream, self._found[load.number]
        self._sources.ask(pull)
        if self._pending:
            # While these parts are copied the next ones travel.
            self._sources.ask(self._found[self._pending[0].load.number])
        if load.slot in self._last_use:
            stream.wait_event(self._last_use[load.slot])
        with self._trace.step("pull", load.number, float(pull.away), stream):
            self._put(load, pull, stream)
        self._done[load.number] = record(stream)

    def _put(self, load: Load, pull: Pull, stream: cp.cuda.Stream) -> None:
        self._sources.pull(pull, stream)
        self._buffers.complete(load, stream)
