"""The work of one rank, in order: loads of parts of A and B, and the products that need them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dask_distmm.engines.panels import ChunkBlock
from dask_distmm.planning.plan import Rect

Slot = tuple[int, int]  # operand and number of a buffer


class Load(NamedTuple):
    """A part of A or B that GEMMs need: copied into a buffer, or multiplied in place."""

    # Counts all loads of the schedule.
    number: int
    # 0 for A, 1 for B.
    operand: int
    # Rows and columns of the operand.
    rect: Rect
    # The buffer that it is copied into; None if it is multiplied in place.
    slot: Slot | None
    # Where its own axis (rows of A, columns of B) begins in the buffer; k begins at 0.
    at: int
    # The rectangles of chunks that it consists of, placed relative to its first element.
    chunk_blocks: list[ChunkBlock]

    @property
    def own(self) -> tuple[int, int]:
        """First index and end along its own axis: rows of A, columns of B."""
        return self.rect[:2] if self.operand == 0 else self.rect[2:]

    @property
    def depth(self) -> tuple[int, int]:
        """First index and end along k."""
        return self.rect[2:] if self.operand == 0 else self.rect[:2]

    @property
    def kk(self) -> int:
        """Its extent along k."""
        return self.depth[1] - self.depth[0]


class Product(NamedTuple):
    """One GEMM of loads of A with loads of B."""

    # The loads of each operand: side by side in one buffer, or a single one that is multiplied in place.
    a: tuple[Load, ...]
    b: tuple[Load, ...]
    # Whether the GEMM adds to D instead of overwriting it.
    add: bool

    @property
    def rect(self) -> Rect:
        """The part of D that is multiplied into."""
        return self.a[0].rect[0], self.a[-1].rect[1], self.b[0].rect[2], self.b[-1].rect[3]

    @property
    def loaded(self) -> list[Load]:
        """The loads of both operands that are copied into buffers."""
        return [load for load in (*self.a, *self.b) if load.slot is not None]


class ScheduleStep(NamedTuple):
    """The loads and products of one panel of the streamed operand; the first step may have several panels."""

    # In the order in which they are issued.
    loads: list[Load]
    products: list[Product]
    # Ranks whose part of the partial sums is complete after the step.
    done: tuple[int, ...]


class Schedule(NamedTuple):
    """The work of one rank."""

    # All steps in their order.
    steps: list[ScheduleStep]
    # For each buffer the largest extents (own axis, k) of the loads into it.
    slots: dict[Slot, tuple[int, int]]


class PendingLoad(NamedTuple):
    """A load that is still to be issued."""

    # The load.
    load: Load
    # The last step that multiplies the earlier load of its buffer; -1 if there is none.
    after: int
    # The step that needs it.
    step: int


def pending_loads(steps: Sequence[ScheduleStep]) -> list[PendingLoad]:
    """Return all loads of some steps in the order in which they are issued."""
    last: dict[Slot | None, int] = {}
    found: list[PendingLoad] = []
    for number, step in enumerate(steps):
        found += [PendingLoad(load, last.get(load.slot, -1), number) for load in step.loads]
        last |= {load.slot: number for product in step.products for load in product.loaded}
    return found


def merged(rects: Sequence[Rect]) -> list[Rect]:
    """Merge rectangles into larger ones: neighbours in a row first, then rows of equal columns."""
    for own, other in ((2, 0), (0, 2)):
        found: list[Rect] = []
        for rect in rects:
            if found and found[-1][other : other + 2] == rect[other : other + 2] and found[-1][own + 1] == rect[own]:
                before = list(found.pop())
                before[own + 1] = rect[own + 1]
                rect = (before[0], before[1], before[2], before[3])  # noqa: PLW2901
            found.append(rect)
        rects = found
    return list(rects)
