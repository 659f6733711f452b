"""A and B on one rank: the chunks that are multiplied in place, and the buffers for all other parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy as cp

from dask_distmm.engines.peer.readable import DeviceView, Sources
from dask_distmm.engines.peer.result import ALIGNED
from dask_distmm.engines.peer.schedule import Load, Slot
from dask_distmm.layout.rectangles import span_of
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import padded
from dask_distmm.planning.peer.block_schedule import extent_multiple
from dask_distmm.planning.plan import Rect


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

    def _buffer(self, slot: Slot, extent: int, kk: int) -> Any:
        """Return a buffer for parts of A (own axis x k) or of B (k x own axis)."""
        dtype = carried(self._plan.problem.matrix_types[slot[0]], "cupy")
        shape, order = ((extent, kk) if slot[0] == 0 else (kk, extent)), self._orders[slot[0]]
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
            at, along_k = slice(load.at, load.at + load.own[1] - load.own[0]), slice(load.kk)
            part = self.arrays[load.slot][(at, along_k) if load.operand == 0 else (along_k, at)]
            with stream:
                cp.conjugate(part, out=part)

    def _pad(self, load: Load, stream: cp.cuda.Stream) -> None:
        """Set the padding of k to zero: GEMMs sum over it."""
        multiple, kk = self._multiple, load.kk
        if kk % multiple:
            assert load.slot is not None
            buffer, more = self.arrays[load.slot], padded(kk, multiple)
            at = slice(load.at, padded(load.at + load.own[1] - load.own[0], multiple))
            with stream:
                buffer[(at, slice(kk, more)) if load.operand == 0 else (slice(kk, more), at)] = 0
