"""What a rank fills and multiplies, in order: a `BlockSchedule` put together with where the chunks lie. Pure.

The first turns wait for least: what lies right already comes first, and what else is here; the stationary part is filled in
pieces that are used as they land, and so is the first panel if it has to come from elsewhere, but in none so small that
products leave multiprocessors idle. Then panels go round by the rank that has them, each rank beginning with its next
one, so that no two pull from the same at the same time::

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

from dask_distmm.engines.panels import ChunkBlock, chunk_blocks_of, coalesce
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import padded
from dask_distmm.planning.gemm_sizes import full_side, pieces_that_fill, unit
from dask_distmm.planning.peer.block_schedule import PANELS, BlockSchedule, extent_multiple
from dask_distmm.planning.plan import EVERYWHERE, Rect

__all__ = ["Due", "Fill", "Product", "Schedule", "Slot", "Turn", "dues", "make_schedule", "merged"]

# Panels of what is here and what is not are apart, if none gets narrower than such a part of the others, or if products
# still fill a GPU.
_FINEST = 2
# A panel that mostly comes from one rank is pulled in that rank's turn.
_MOSTLY = 0.5

Slot = tuple[int, int]  # operand and number of a buffer


class Fill(NamedTuple):
    """A part of A (operand 0) or B (1) that is to be somewhere on this GPU.

    Parameters
    ----------
    number
        Counts all fills.
    operand, rect
        Which part: rows and columns of the operand.
    slot
        The buffer that it is put into; None if it is used as it lies.
    at
        Where its own axis (rows of A, columns of B) begins in the buffer; k begins at 0.
    pieces
        Of which parts of chunks it consists, placed relative to its first element.
    """

    number: int
    operand: int
    rect: Rect
    slot: Slot | None
    at: int
    pieces: list[ChunkBlock]

    @property
    def own(self) -> tuple[int, int]:
        """The stretch of its own axis: rows of A, columns of B."""
        return self.rect[:2] if self.operand == 0 else self.rect[2:]

    @property
    def depth(self) -> tuple[int, int]:
        """The stretch of k."""
        return self.rect[2:] if self.operand == 0 else self.rect[:2]

    @property
    def kk(self) -> int:
        """How long that is."""
        return self.depth[1] - self.depth[0]


class Product(NamedTuple):
    """One GEMM: fills of A and of B that lie side by side in one buffer each, or one that is used as it lies."""

    a: tuple[Fill, ...]
    b: tuple[Fill, ...]
    add: bool

    @property
    def rect(self) -> Rect:
        """The part of D that is multiplied into."""
        return self.a[0].rect[0], self.a[-1].rect[1], self.b[0].rect[2], self.b[-1].rect[3]

    @property
    def filled(self) -> list[Fill]:
        """Those that are put into buffers."""
        return [fill for fill in (*self.a, *self.b) if fill.slot is not None]


class Turn(NamedTuple):
    """One panel: what is filled for it, and what is multiplied then.

    Parameters
    ----------
    fills, products
        In the order in which they are begun.
    done
        Ranks whose part of the partial sums is complete after it.
    """

    fills: list[Fill]
    products: list[Product]
    done: tuple[int, ...]


class Schedule(NamedTuple):
    """All turns, and for each buffer the largest extents (own axis, k) of what is put into it."""

    turns: list[Turn]
    slots: dict[Slot, tuple[int, int]]


class Due(NamedTuple):
    """A fill that can be begun once the products of the turn `after` have been (-1: at once), and must be by `turn`."""

    fill: Fill
    after: int
    turn: int


def dues(turns: Sequence[Turn]) -> list[Due]:
    """Return all fills in the order in which they are begun."""
    last: dict[Slot | None, int] = {}
    found: list[Due] = []
    for number, turn in enumerate(turns):
        found += [Due(fill, last.get(fill.slot, -1), number) for fill in turn.fills]
        last |= {fill.slot: number for product in turn.products for fill in product.filled}
    return found


class _Segment(NamedTuple):
    """A stretch of an operand's own axis: one that lies right, or one that is put into a buffer."""

    start: int
    stop: int
    lies: bool


def make_schedule(plan: Plan, rank: int, block_schedule: BlockSchedule, lies: Callable[[int, Rect], bool]) -> Schedule:
    """Return what a rank does.

    Parameters
    ----------
    plan, rank, block_schedule
        Of the run, and of `pulls.block_schedules`.
    lies
        Whether a part of an operand can be multiplied as it lies on this GPU.
    """
    return _Maker(plan, rank, block_schedule, lies).make()


class _Maker:
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
        turns: list[Turn] = []
        epochs = list(
            itertools.product(itertools.pairwise(block_schedule.parts), itertools.pairwise(block_schedule.depth))
        )
        for epoch, (part, depth) in enumerate(epochs):
            panels = self._panels(span, depth)
            here = self._here(panels, depth)
            cells = self._cells(part, depth, epoch, self._width(panels, here))
            if epoch == 0 and not here and all(cell.slot is not None for cell in cells):
                panels = self._ramp(panels, cells)
            wholes = _side_by_side(cells)
            # What lies right is multiplied first, then what else is here.
            cells.sort(key=lambda cell: (cell.slot is not None, self._is_away(cell)))
            wholes.sort(key=lambda group: group[0].slot is not None)
            fresh = [cell for cell in cells if cell.slot is not None]
            add = depth[0] > block_schedule.depth[0]
            # What is here, or else the first panel, meets what is stationary piece by piece, as it lands.
            at_first = max(1, here) if fresh else 1
            last = {to: segment for segment, to in panels}
            for number, group in enumerate([panels[:at_first], *([panel] for panel in panels[at_first:])]):
                filled = [
                    self._fill(self.streamed, (segment.start, segment.stop), depth, self._ring(segment), 0)
                    for segment, _ in group
                ]
                fills = [panel for panel in filled if panel.slot is not None]
                if number == 0:
                    fills = [*fresh[:1], *fills, *fresh[1:]]
                stationary = [(cell,) for cell in cells] if number == 0 else wholes
                products = [self._product(together, panel, add) for together in stationary for panel in filled]
                done: tuple[int, ...] = ()
                if plan.grid[2] > 1 and epoch == len(epochs) - 1:
                    done = tuple(to for segment, to in group if segment == last[to])
                    if -1 in done:
                        done = tuple(range(len(plan.ranks)))
                turns.append(Turn(fills, products, done))
        return Schedule(turns, self.slots)

    def _here(self, panels: Sequence[tuple[_Segment, int]], depth: tuple[int, int]) -> int:
        """Return how many panels are here, from the first one on; one buffer is left for the first one that is not."""
        away = [self._away(self.streamed, segment, depth) for segment, _ in panels[: PANELS - 1]]
        return away.index(True) if True in away else len(away)

    def _width(self, panels: Sequence[tuple[_Segment, int]], here: int) -> int:
        """Return how wide the panels are, on average, that what is stationary meets first; if they come they will be cut."""
        widths = [segment.stop - segment.start for segment, _ in panels[: max(1, here)]]
        return sum(widths) // here if here else min(*widths, self.side)

    def _product(self, stationary: tuple[Fill, ...], panel: Fill, add: bool) -> Product:
        return Product(stationary, (panel,), add) if self.stationary == 0 else Product((panel,), stationary, add)

    def _ring(self, segment: _Segment) -> Slot | None:
        return None if segment.lies else (self.streamed, next(self.panels) % PANELS)

    def _fill(self, operand: int, own: tuple[int, int], depth: tuple[int, int], slot: Slot | None, at: int) -> Fill:
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        chunks = (self.plan.problem.a_chunks, self.plan.problem.b_chunks)[operand]
        if slot is not None:
            extent, kk = padded(at + own[1] - own[0], self.multiple), padded(depth[1] - depth[0], self.multiple)
            before = self.slots.get(slot, (0, 0))
            self.slots[slot] = max(before[0], extent), max(before[1], kk)
        return Fill(next(self.numbers), operand, rect, slot, at, chunk_blocks_of(chunks, operand, rect))

    def _cells(self, part: tuple[int, int], depth: tuple[int, int], epoch: int, width: int) -> list[Fill]:
        """Return the stationary part in pieces, for panels of this width: what lies right, and what is filled."""
        found: list[Fill] = []
        slot, at = (self.stationary, epoch % self.block_schedule.stationary_buffers), 0
        for segment in self._segments(self.stationary, part, depth):
            if segment.lies:
                found.append(self._fill(self.stationary, (segment.start, segment.stop), depth, None, 0))
                continue
            length = segment.stop - segment.start
            size = self._piece(length, width) if epoch == 0 and self._away(self.stationary, segment, depth) else length
            for start in range(segment.start, segment.stop, size):
                stop = min(start + size, segment.stop)
                found.append(self._fill(self.stationary, (start, stop), depth, slot, at))
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
            # Its own comes first: others' sums are added to that one while the rest is multiplied.
            slabs = slabs[rank:] + slabs[:rank]
            if any(start % self.multiple for (start, _), _ in slabs):
                # What pads a slab would be multiplied into the next one.
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

    def _ramp(self, panels: Sequence[tuple[_Segment, int]], cells: Sequence[Fill]) -> list[tuple[_Segment, int]]:
        """Cut the first panel into pieces: it comes from elsewhere."""
        (first, to), *rest = panels
        size = self._piece(first.stop - first.start, max(cell.own[1] - cell.own[0] for cell in cells))
        starts = range(first.start, first.stop, size)
        return [(_Segment(start, min(start + size, first.stop), False), to) for start in starts] + rest

    def _runs(self, segment: _Segment, depth: tuple[int, int]) -> list[_Segment]:
        """Cut a stretch of the streamed operand into what is here, if wide enough for panels, and what is not."""
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
        """Return panels as they are to be pulled."""
        count, ranks = len(self.plan.ranks), self.plan.ranks
        holders = [self._holders(self.streamed, segment, depth) for segment in segments]
        me, turn = ranks[self.rank], self.rank * len(segments) // count
        whole = all(max(found.values()) > _MOSTLY * sum(found.values()) for found in holders)

        def key(at: int) -> tuple[bool, bool, int, int]:
            most = max(holders[at], key=lambda holder: holders[at][holder])
            behind = (ranks.index(most) - self.rank) % count if most in ranks else count
            away = set(holders[at]) != {me}
            return not segments[at].lies, away, behind if whole else 0, (at - turn) % len(segments)

        return [segments[at] for at in sorted(range(len(segments)), key=key)]

    def _segments(self, operand: int, span: tuple[int, int], depth: tuple[int, int]) -> list[_Segment]:
        """Cut a stretch of an operand's own axis into what lies right and what does not."""
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
            # Extents of GEMMs are padded there, so that places inside of D must be multiples too.
            return [span[0], span[1]]
        sizes = self.plan.problem.a_chunks[0] if operand == 0 else self.plan.problem.b_chunks[1]
        inside = {edge for edge in itertools.accumulate(sizes) if span[0] < edge < span[1]}
        return sorted({*span, *inside})

    def _holders(self, operand: int, segment: _Segment, depth: tuple[int, int]) -> dict[int, int]:
        """Return how many elements of a stretch each participant has."""
        own = (segment.start, segment.stop)
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        chunks = (self.plan.problem.a_chunks, self.plan.problem.b_chunks)[operand]
        where = (self.plan.where_a, self.plan.where_b)[operand]
        assert where is not None
        found: dict[int, int] = collections.defaultdict(int)
        for piece in chunk_blocks_of(chunks, operand, rect):
            holder = int(where[piece.chunk])
            found[self.plan.ranks[self.rank] if holder == EVERYWHERE else holder] += piece.rows * piece.cols
        return found

    def _piece(self, length: int, other: int) -> int:
        """Return the size of pieces whose products with something of an extent `other` still fill a GPU."""
        count = pieces_that_fill(self.plan.problem, length, other)
        return padded(length, unit(length // count, self.multiple), count)

    def _away(self, operand: int, segment: _Segment, depth: tuple[int, int]) -> bool:
        return set(self._holders(operand, segment, depth)) != {self.plan.ranks[self.rank]}

    def _is_away(self, fill: Fill) -> bool:
        return self._away(fill.operand, _Segment(*fill.own, fill.slot is None), fill.depth)


def _side_by_side(cells: Sequence[Fill]) -> list[tuple[Fill, ...]]:
    """Put together what lies side by side in one buffer and in the matrix."""
    found: list[tuple[Fill, ...]] = []
    for cell in cells:
        before = found[-1][-1] if found else None
        if before is not None and cell.slot is not None and before.slot == cell.slot:
            size = before.own[1] - before.own[0]
            if before.own[1] == cell.own[0] and before.at + size == cell.at:
                found[-1] = (*found[-1], cell)
                continue
        found.append((cell,))
    return found


def merged(rects: Sequence[Rect]) -> list[Rect]:
    """Put rectangles together that are one: neighbours in a row first, then rows of equal columns."""
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
