"""All that one rank loads and multiplies, in order: its `BlockSchedule`, applied to the places of the chunks. Pure.

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

from dask_distmm.engines.panels import chunk_blocks_of, coalesce
from dask_distmm.engines.peer.schedule import Load, Product, Schedule, ScheduleStep, Slot
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import padded
from dask_distmm.planning.gemm_sizes import full_side, pieces_that_fill, unit
from dask_distmm.planning.peer.block_schedule import PANELS, BlockSchedule, extent_multiple
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.plan import Rect

# A panel has only chunks of this GPU or only chunks of others, if no panel gets narrower than this part of the usual
# width, or if the products still fill a GPU.
_FINEST = 2
# A panel is ordered by the rank that has more than this part of its elements.
_MOSTLY = 0.5


class _Segment(NamedTuple):
    """A stretch of an operand's own axis; `lies` says whether it is multiplied in place instead of in a buffer."""

    start: int
    stop: int
    lies: bool


def make_schedule(plan: Plan, rank: int, block_schedule: BlockSchedule, lies: Callable[[int, Rect], bool]) -> Schedule:
    """Return the schedule of a rank."""
    return _ScheduleBuilder(plan, rank, block_schedule, lies).make()


class _ScheduleBuilder:
    def __init__(self, plan: Plan, rank: int, block_schedule: BlockSchedule, lies: Callable[[int, Rect], bool]) -> None:
        self.plan, self.rank, self.block_schedule, self.lies = plan, rank, block_schedule, lies
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
                loaded = [
                    self._load(self.streamed, (segment.start, segment.stop), depth, self._panel_slot(segment), 0)
                    for segment, _ in group
                ]
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

    def _panel_slot(self, segment: _Segment) -> Slot | None:
        return None if segment.lies else (self.streamed, next(self.panels) % PANELS)

    def _load(self, operand: int, own: tuple[int, int], depth: tuple[int, int], slot: Slot | None, at: int) -> Load:
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        chunks = (self.plan.problem.a_chunks, self.plan.problem.b_chunks)[operand]
        if slot is not None:
            extent, kk = padded(at + own[1] - own[0], self.multiple), padded(depth[1] - depth[0], self.multiple)
            before = self.slots.get(slot, (0, 0))
            self.slots[slot] = max(before[0], extent), max(before[1], kk)
        return Load(next(self.numbers), operand, rect, slot, at, chunk_blocks_of(chunks, operand, rect))

    def _stationary_loads(self, part: tuple[int, int], depth: tuple[int, int], epoch: int, width: int) -> list[Load]:
        """Return the stationary part in pieces, for panels of this width."""
        found: list[Load] = []
        slot, at = (self.stationary, epoch % self.block_schedule.stationary_buffers), 0
        for segment in self._segments(self.stationary, part, depth):
            if segment.lies:
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
                if segment.lies:
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
            return not segments[at].lies, away, behind if whole else 0, (at - first) % len(segments)

        return [segments[at] for at in sorted(range(len(segments)), key=key)]

    def _segments(self, operand: int, span: tuple[int, int], depth: tuple[int, int]) -> list[_Segment]:
        """Cut a stretch of an operand's own axis into parts that are multiplied in place and parts that are loaded."""
        edges = self._edges(operand, span)
        found: list[_Segment] = []
        for start, stop in itertools.pairwise(edges):
            lies = self.lies(operand, (start, stop, *depth) if operand == 0 else (*depth, start, stop))
            if found and not lies and not found[-1].lies:
                start = found.pop().start  # noqa: PLW2901
            found.append(_Segment(start, stop, lies))
        return found

    def _edges(self, operand: int, span: tuple[int, int]) -> list[int]:
        """Return the edges of chunks within a stretch, its ends included."""
        if self.multiple > 1:
            # Extents of GEMMs are padded, so the places of their results inside of D must be multiples, too.
            return [span[0], span[1]]
        sizes = self.plan.problem.a_chunks[0] if operand == 0 else self.plan.problem.b_chunks[1]
        inside = {edge for edge in itertools.accumulate(sizes) if span[0] < edge < span[1]}
        return sorted({*span, *inside})

    def _holders(self, operand: int, segment: _Segment, depth: tuple[int, int]) -> dict[int, int]:
        """Return how many elements of a stretch each participant has."""
        own = (segment.start, segment.stop)
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        chunks = (self.plan.problem.a_chunks, self.plan.problem.b_chunks)[operand]
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
