"""The loads of one rank: the copies that bring parts of A and B into buffers, issued in the order of the schedule."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from typing import Any

import cupy as cp

from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.buffers import OperandBuffers
from dask_distmm.engines.peer.readable import CopyBatch, Parts, Pull, Sources
from dask_distmm.engines.peer.schedule import Load, PendingLoad, Product, ScheduleStep, Slot, pending_loads
from dask_distmm.engines.peer.state import Trace


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
