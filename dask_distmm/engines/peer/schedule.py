"""The work of one rank, in order: loads of parts of A and B, and the products that need them. Pure.

The first steps wait for as little as possible. Parts that are multiplied in place come first, then parts whose chunks
are on this GPU. The stationary part is loaded in pieces, and each piece is multiplied as soon as it has arrived; so is
the first panel, if it comes from another GPU. No piece is so small that its products leave multiprocessors idle. The
other panels follow in the order of the ranks that have them. Each rank begins with the panels of the next rank, so that
no two ranks pull from the same one at the same time::

    rank 0   0  1  2  3
    rank 1   1  2  3  0
    rank 2   2  3  0  1
    rank 3   3  0  1  2
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import Rect, full_side, padded, pieces_that_fill, unit
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.product import ChunkBlock, chunk_blocks_of, coalesce
from dask_distmm.planning.schedule import PANELS, BlockSchedule, ChunkSource, extent_multiple, source_cuts

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
    # Whether this rank makes these chunks itself, when it needs them.
    made: bool = False
    # The load of which it is a stretch along k, or, if that is of the other operand, the transpose.
    of: Load | None = None

    @property
    def own(self) -> tuple[int, int]:
        """First index and end along its own axis: rows of A, columns of B."""
        return self.rect[:2] if self.operand == 0 else self.rect[2:]

    @property
    def depth(self) -> tuple[int, int]:
        """First index and end along k."""
        return self.rect[2:] if self.operand == 0 else self.rect[:2]

    @property
    def depth_extent(self) -> int:
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

    @property
    def needed(self) -> list[Load]:
        """The loads that have to be issued before the product."""
        return [load for load in (*self.a, *self.b) if load.slot is not None or load.made]


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


# The work of a rank whose chunks are there: its `BlockSchedule`, applied to the places of the chunks


# A panel has only chunks of this GPU or only chunks of others, if no panel gets narrower than this part of the usual
# width, or if the products still fill a GPU.
_FINEST = 2
# A panel is ordered by the rank that has more than this part of its elements.
_MOSTLY = 0.5


class _Segment(NamedTuple):
    """A stretch of an operand's own axis; `is` says whether it is multiplied in place instead of in a buffer."""

    start: int
    stop: int
    in_place: bool


def make_schedule(
    plan: Plan, rank: int, block_schedule: BlockSchedule, in_place: Callable[[int, Rect], bool]
) -> Schedule:
    """Return the schedule of a rank."""
    return _ScheduleBuilder(plan, rank, block_schedule, in_place).make()


class _ScheduleBuilder:
    def __init__(
        self, plan: Plan, rank: int, block_schedule: BlockSchedule, in_place: Callable[[int, Rect], bool]
    ) -> None:
        self.plan, self.rank, self.block_schedule, self.in_place = plan, rank, block_schedule, in_place
        self.multiple, self.side = extent_multiple(plan.problem), full_side(plan.problem)
        self.stationary, self.streamed = block_schedule.stationary, 1 - block_schedule.stationary
        self.numbers, self.panels = itertools.count(), itertools.count()
        self.slots: dict[Slot, tuple[int, int]] = {}

    def make(self) -> Schedule:
        plan, block_schedule = self.plan, self.block_schedule
        r0, r1, c0, c1 = plan.region(self.rank)
        span = (c0, c1) if self.streamed == 1 else (r0, r1)
        steps: list[ScheduleStep] = []
        epochs = list(
            itertools.product(itertools.pairwise(block_schedule.parts), itertools.pairwise(block_schedule.depth))
        )
        for epoch, (part, depth) in enumerate(epochs):
            panels = self._panels(span, depth)
            here = self._here(panels, depth)
            resident = self._stationary_loads(part, depth, epoch, self._width(panels, here))
            if epoch == 0 and not here and all(load.slot is not None for load in resident):
                panels = self._ramp(panels, resident)
            wholes = _side_by_side(resident)
            # Parts that are multiplied in place come first, then other parts on this GPU.
            resident.sort(key=lambda load: (load.slot is not None, self._is_away(load)))
            wholes.sort(key=lambda group: group[0].slot is not None)
            fresh = [load for load in resident if load.slot is not None]
            add = depth[0] > block_schedule.depth[0]
            # The panels on this GPU, or else the first panel, are multiplied with each stationary piece as it arrives.
            at_first = max(1, here) if fresh else 1
            last = {to: segment for segment, to in panels}
            for number, group in enumerate([panels[:at_first], *([panel] for panel in panels[at_first:])]):
                loaded = []
                for segment, _ in group:
                    slot = None if segment.in_place else (self.streamed, next(self.panels) % PANELS)
                    loaded.append(self._load(self.streamed, (segment.start, segment.stop), depth, slot, 0))
                loads = [panel for panel in loaded if panel.slot is not None]
                if number == 0:
                    loads = [*fresh[:1], *loads, *fresh[1:]]
                stationary = [(load,) for load in resident] if number == 0 else wholes
                products = [self._product(together, panel, add) for together in stationary for panel in loaded]
                done: tuple[int, ...] = ()
                if plan.grid[2] > 1 and epoch == len(epochs) - 1:
                    done = tuple(to for segment, to in group if segment == last[to])
                    if -1 in done:
                        done = tuple(range(len(plan.ranks)))
                steps.append(ScheduleStep(loads, products, done))
        return Schedule(steps, self.slots)

    def _here(self, panels: Sequence[tuple[_Segment, int]], depth: tuple[int, int]) -> int:
        """Return how many panels at the front are on this GPU; one buffer is left for the first panel that is not."""
        away = [self._away(self.streamed, segment, depth) for segment, _ in panels[: PANELS - 1]]
        return away.index(True) if True in away else len(away)

    def _width(self, panels: Sequence[tuple[_Segment, int]], here: int) -> int:
        """Return the mean width of the panels that are multiplied first; a panel from another GPU will be cut."""
        widths = [segment.stop - segment.start for segment, _ in panels[: max(1, here)]]
        return sum(widths) // here if here else min(*widths, self.side)

    def _product(self, stationary: tuple[Load, ...], panel: Load, add: bool) -> Product:
        return Product(stationary, (panel,), add) if self.stationary == 0 else Product((panel,), stationary, add)

    def _load(self, operand: int, own: tuple[int, int], depth: tuple[int, int], slot: Slot | None, at: int) -> Load:
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        chunks = self.plan.problem.matrices[operand].chunks
        if slot is not None:
            before = self.slots.get(slot, (0, 0))
            extent, depth_extent = at + own[1] - own[0], depth[1] - depth[0]
            extents = padded(extent, self.multiple), padded(depth_extent, self.multiple)
            self.slots[slot] = max(before[0], extents[0]), max(before[1], extents[1])
        return Load(next(self.numbers), operand, rect, slot, at, chunk_blocks_of(chunks, operand, rect))

    def _stationary_loads(self, part: tuple[int, int], depth: tuple[int, int], epoch: int, width: int) -> list[Load]:
        """Return the stationary part in pieces, for panels of this width."""
        found: list[Load] = []
        slot, at = (self.stationary, epoch % self.block_schedule.stationary_buffers), 0
        for segment in self._segments(self.stationary, part, depth):
            if segment.in_place:
                found.append(self._load(self.stationary, (segment.start, segment.stop), depth, None, 0))
                continue
            length = segment.stop - segment.start
            size = self._piece(length, width) if epoch == 0 and self._away(self.stationary, segment, depth) else length
            for start in range(segment.start, segment.stop, size):
                stop = min(start + size, segment.stop)
                found.append(self._load(self.stationary, (start, stop), depth, slot, at))
                at += stop - start
        return found

    def _panels(self, span: tuple[int, int], depth: tuple[int, int]) -> list[tuple[_Segment, int]]:
        """Return the panels in order, each with the rank whose part of the partial sums it belongs to, or -1."""
        plan, rank = self.plan, self.rank
        count = len(plan.ranks)
        slabs = [(span, -1)]
        if plan.grid[2] > 1 and plan.method == "reducescatter":
            rects = [plan.final_rects(to)[0] for to in range(count)]
            slabs = [((x[0], x[1]) if self.streamed == 0 else (x[2], x[3]), to) for to, x in enumerate(rects)]
            # The rank's own slab comes first: others' sums are added to it while the other slabs are multiplied.
            slabs = slabs[rank:] + slabs[:rank]
            if any(start % self.multiple for (start, _), _ in slabs):
                # The padding of a slab would be multiplied into the next slab.
                slabs = [(span, -1)]
        found: list[tuple[_Segment, int]] = []
        for slab, to in slabs:
            pieces: list[_Segment] = []
            for segment in self._segments(self.streamed, slab, depth):
                if segment.in_place:
                    pieces.append(segment)
                    continue
                for run in self._runs(segment, depth):
                    edges = self._edges(self.streamed, (run.start, run.stop))
                    cuts = coalesce(edges, self.block_schedule.width, unit(self.block_schedule.width, self.multiple))
                    pieces += [_Segment(low, high, False) for low, high in itertools.pairwise(cuts)]
            found += [(piece, to) for piece in self._in_order(pieces, depth)]
        return found

    def _ramp(self, panels: Sequence[tuple[_Segment, int]], resident: Sequence[Load]) -> list[tuple[_Segment, int]]:
        """Cut the first panel, which comes from another GPU, into pieces."""
        (first, to), *rest = panels
        size = self._piece(first.stop - first.start, max(load.own[1] - load.own[0] for load in resident))
        starts = range(first.start, first.stop, size)
        return [(_Segment(start, min(start + size, first.stop), False), to) for start in starts] + rest

    def _runs(self, segment: _Segment, depth: tuple[int, int]) -> list[_Segment]:
        """Cut a stretch of the streamed operand into parts on this GPU and parts on others, if these are wide."""
        found: list[tuple[_Segment, bool]] = []
        for start, stop in itertools.pairwise(self._edges(self.streamed, (segment.start, segment.stop))):
            one = _Segment(start, stop, False)
            away = self._away(self.streamed, one, depth)
            if found and found[-1][1] == away:
                one = one._replace(start=found.pop()[0].start)
            found.append((one, away))
        least = min(
            self.block_schedule.width // _FINEST,
            self.side**2 // (self.block_schedule.parts[1] - self.block_schedule.parts[0]),
        )
        if any(one.stop - one.start < least for one, _ in found):
            return [segment]
        return [one for one, _ in found]

    def _in_order(self, segments: list[_Segment], depth: tuple[int, int]) -> list[_Segment]:
        """Return panels in the order in which they are pulled."""
        count, ranks = len(self.plan.ranks), self.plan.ranks
        holders = [self._holders(self.streamed, segment, depth) for segment in segments]
        me, first = ranks[self.rank], self.rank * len(segments) // count
        whole = all(max(found.values()) > _MOSTLY * sum(found.values()) for found in holders)

        def key(at: int) -> tuple[bool, bool, int, int]:
            most = max(holders[at], key=lambda holder: holders[at][holder])
            behind = (ranks.index(most) - self.rank) % count if most in ranks else count
            away = self.plan.from_host or set(holders[at]) != {me}
            return not segments[at].in_place, away, behind if whole else 0, (at - first) % len(segments)

        return [segments[at] for at in sorted(range(len(segments)), key=key)]

    def _segments(self, operand: int, span: tuple[int, int], depth: tuple[int, int]) -> list[_Segment]:
        """Cut a stretch of an operand's own axis into parts that are multiplied in place and parts that are loaded."""
        edges = self._edges(operand, span)
        found: list[_Segment] = []
        for start, stop in itertools.pairwise(edges):
            in_place = self.in_place(operand, (start, stop, *depth) if operand == 0 else (*depth, start, stop))
            if found and not in_place and not found[-1].in_place:
                start = found.pop().start  # noqa: PLW2901
            found.append(_Segment(start, stop, in_place))
        return found

    def _edges(self, operand: int, span: tuple[int, int]) -> list[int]:
        """Return the edges of chunks within a stretch, its ends included."""
        if self.multiple > 1:
            # Extents of GEMMs are padded, so the places of their results inside of D must be multiples, too.
            return [span[0], span[1]]
        sizes = self.plan.problem.a.chunks[0] if operand == 0 else self.plan.problem.b.chunks[1]
        inside = {edge for edge in itertools.accumulate(sizes) if span[0] < edge < span[1]}
        return sorted({*span, *inside})

    def _holders(self, operand: int, segment: _Segment, depth: tuple[int, int]) -> dict[int, int]:
        """Return how many elements of a stretch each participant has."""
        own = (segment.start, segment.stop)
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        chunks = self.plan.problem.matrices[operand].chunks
        where = self.plan.where["ab"[operand]]
        found: dict[int, int] = collections.defaultdict(int)
        for piece in chunk_blocks_of(chunks, operand, rect):
            holder = int(where[piece.chunk])
            found[self.plan.ranks[self.rank] if holder == EVERYWHERE else holder] += piece.rows * piece.cols
        return found

    def _piece(self, length: int, other: int) -> int:
        """Return the size of pieces whose products with a part of extent `other` still fill a GPU."""
        count = pieces_that_fill(self.plan.problem, length, other)
        return padded(length, unit(length // count, self.multiple), count)

    def _away(self, operand: int, segment: _Segment, depth: tuple[int, int]) -> bool:
        return self.plan.from_host or set(self._holders(operand, segment, depth)) != {self.plan.ranks[self.rank]}

    def _is_away(self, load: Load) -> bool:
        return self._away(load.operand, _Segment(*load.own, load.slot is None), load.depth)


def _side_by_side(resident: Sequence[Load]) -> list[tuple[Load, ...]]:
    """Group loads that are side by side both in one buffer and in the matrix."""
    found: list[tuple[Load, ...]] = []
    for load in resident:
        before = found[-1][-1] if found else None
        if before is not None and load.slot is not None and before.slot == load.slot:
            size = before.own[1] - before.own[0]
            if before.own[1] == load.own[0] and before.at + size == load.at:
                found[-1] = (*found[-1], load)
                continue
        found.append((load,))
    return found


# The work of a rank that makes chunks itself: `planning.schedule` has the steps


def made_orders(plan: Plan) -> tuple[str, str]:
    """Return the memory orders of buffers for A and B: the library conjugates what it transposes."""
    factors = plan.problem.a, plan.problem.b
    a, b = ("F" if one.by_ranks and one.conjugated else plan.orders[one.name] for one in factors)
    return a, b


def make_source_schedule(plan: Plan, rank: int, source: ChunkSource, in_place: Callable[[int, Rect], bool]) -> Schedule:
    """Return the schedule of a rank that makes chunks: a step for each product, whose chunks are made for it."""
    problem, region, along_k = plan.problem, plan.region(rank), plan.k_range(rank)
    multiple, numbers = extent_multiple(problem), itertools.count()
    slots = dict[Slot, tuple[int, int]]()

    def load(operand: int, part: Rect, depth: tuple[int, int], buffer: int) -> Load:
        """Return what a part of D needs of an operand: in a buffer of this number, unless it is used in place."""
        own, made = (part[:2] if operand == 0 else part[2:]), problem.matrices[operand].by_ranks
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        blocks = chunk_blocks_of(problem.matrices[operand].chunks, operand, rect)
        slot = None
        if multiple > 1 or not (len(blocks) == 1 if made else in_place(operand, rect)):
            slot, size = (operand, buffer), (padded(own[1] - own[0], multiple), padded(depth[1] - depth[0], multiple))
            before = slots.get(slot, size)
            slots[slot] = max(before[0], size[0]), max(before[1], size[1])
        return Load(next(numbers), operand, rect, slot, 0, blocks, made)

    # All that the rank needs of an operand whose chunks it does not make.
    held = [load(operand, region, along_k, 0) for operand in (0, 1) if not problem.matrices[operand].by_ranks]
    own_cuts, depth_cuts = (list(itertools.pairwise(cuts)) for cuts in source_cuts(plan, rank, source))
    steps = list[ScheduleStep]()
    for own, depth in itertools.product(own_cuts, depth_cuts):
        part = region
        if held:
            part = (*own, *region[2:]) if source.made[0] == 0 else (*region[:2], *own)
        made = [load(operand, part, depth, len(steps) % PANELS) for operand in source.made]
        pair = {one.operand: one for one in made}
        for other in held:
            rect = (*region[:2], *depth) if other.operand == 0 else (*depth, *region[2:])
            pair[other.operand] = other._replace(rect=rect, slot=None if steps else other.slot, of=other)
        if source.twin:
            (one,) = made
            pair[1 - one.operand] = Load(
                one.number, 1 - one.operand, (*one.rect[2:], *one.rect[:2]), None, 0, [], of=one
            )
        first = [one for one in held if one.slot is not None] if not steps else []
        steps.append(ScheduleStep([*first, *made], [Product((pair[0],), (pair[1],), depth != depth_cuts[0])], ()))
    if plan.grid[2] > 1:
        steps[-1] = steps[-1]._replace(done=tuple(range(len(plan.ranks))))
    return Schedule(steps, slots)


# What is derived from steps


def pending_loads(steps: Sequence[ScheduleStep]) -> list[tuple[Load, int]]:
    """Return all loads of some steps in the order in which they are issued.

    Each with the last step that multiplies the earlier load of its buffer; -1 if there is none.
    """
    last: dict[Slot | None, int] = {}
    found: list[tuple[Load, int]] = []
    for number, step in enumerate(steps):
        found += [(load, last.get(load.slot, -1)) for load in step.loads]
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
