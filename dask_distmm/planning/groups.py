"""The schedule of a rank of a product: which parts of A and B it brings when, where to, and multiplies. Pure.

A schedule is a list of *groups*, each with what is brought for it and its products; `planning.product` makes the steps
of it.

On CPUs (`panels`) a rank walks over its part of k in panels. For each it needs rows of A and columns of B. Chunks that
are here are used as they lie; the others are asked for some panels ahead. Panels that need nothing from others come
first, and each rank starts at another place, so that not all ask the same worker at once::

    asked for    [ 3 ][ 4 ]                      on their way
    multiplied        [ 2 ]                      D += A[:, panel] @ B[panel, :]
    done         [ 0 ][ 1 ]

On GPUs (`planning.schedule`) the first products wait for as little as possible. Parts that are multiplied in place come
first, then parts whose chunks are on this GPU. The stationary part is loaded in pieces, and each piece is multiplied as
soon as it has arrived; so is the first panel, if it comes from another GPU. No piece is so small that its products
leave multiprocessors idle. The other panels follow in the order of the ranks that have them. Each rank begins with the
panels of the next rank, so that no two ranks pull from the same one at the same time::

    rank 0   0  1  2  3
    rank 1   1  2  3  0
    rank 2   2  3  0  1
    rank 3   3  0  1  2

Where a rank makes chunks of A or B itself, each is made, multiplied, or copied to a buffer beside others, and dropped.
Where B is A transposed, as in ``X.T @ X``, ranks on CPUs read a part of both once.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.cuts import (
    Rect,
    chunk_cuts,
    edges_within,
    full_side,
    overlaps,
    padded,
    pieces_that_fill,
    shape_of,
    unit,
)
from dask_distmm.planning.footprint import panel_width
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import is_gram
from dask_distmm.planning.schedule import (
    PANELS,
    BlockSchedule,
    LoadSchedule,
    block_schedules,
    extent_multiple,
    load_schedules,
    load_steps,
)
from dask_distmm.programs.steps import Buffer, View

# Parts of A and B, where they are, and what is done with them


class ChunkBlock(NamedTuple):
    """A rectangle of a chunk of an operand, by its number, A (0) or B (1), and where it is in the whole matrix."""

    operand: int
    chunk: int
    r0: int
    c0: int
    rows: int
    cols: int
    row: int
    col: int

    @property
    def rect(self) -> Rect:
        """Where it is in the whole matrix."""
        return self.row, self.row + self.rows, self.col, self.col + self.cols

    @property
    def depth(self) -> tuple[int, int]:
        """Its range of k."""
        return self.rect[2:] if self.operand == 0 else self.rect[:2]

    @property
    def box(self) -> Rect:
        """Where it is in its chunk."""
        return self.r0, self.r0 + self.rows, self.c0, self.c0 + self.cols


def chunk_blocks_of(chunks: Chunks, operand: int, rect: Rect, start: tuple[int, int] | None = None) -> list[ChunkBlock]:
    """Cut a part of a matrix at its chunks; places are counted from an element, else from the part's first one."""
    rows, cols = chunk_cuts(chunks[0]), chunk_cuts(chunks[1])
    (top, left), ncols = start or (rect[0], rect[2]), len(cols) - 1
    across = overlaps(cols, rect[2], rect[3])
    return [
        ChunkBlock(operand, i * ncols + j, r0 - rows[i], c0 - cols[j], r1 - r0, c1 - c0, r0 - top, c0 - left)
        for i, r0, r1 in overlaps(rows, rect[0], rect[1])
        for j, c0, c1 in across
    ]


def chunk_name(operand: str, number: int) -> str:
    """Return the name of a chunk's buffer; inputs of the formula may be called as other buffers are, "d" or "sum"."""
    return f"{operand}.{number}" if operand in ("a", "b") else f"of-{operand}.{number}"


def rect_around(rects: Iterable[Rect]) -> Rect:
    """Return the rectangle that some cover."""
    tops, bottoms, lefts, rights = zip(*rects, strict=True)
    return min(tops), max(bottoms), min(lefts), max(rights)


class Placed(NamedTuple):
    """A matrix of a rank, or its transpose (`transposed`), and its place: rows and columns of D, or of an operand."""

    matrix: Buffer | View
    rect: Rect
    transposed: bool = False

    def part(self, rect: Rect) -> Buffer | View:
        """Return the intersection with a rectangle."""
        if rect == self.rect:
            return self.matrix
        (r0, r1, c0, c1), (top, _, left, _) = rect, self.rect
        if self.transposed:
            r0, r1, c0, c1, top, left = c0, c1, r0, r1, left, top
        row, col = self.matrix.box[0] - top, self.matrix.box[2] - left
        return View(self.matrix.buffer, (r0 + row, r1 + row, c0 + col, c1 + col))


class Part(NamedTuple):
    """A part of A (operand 0) or B (1) that is multiplied, or joined with others."""

    operand: int
    placed: Placed
    # In a chunk, which is in memory or which the rank makes, or in a buffer, which is loaded or joined of `sources`.
    how: Literal["here", "made", "loaded", "joined"]
    # Those that are to be there before it.
    sources: tuple[Part, ...] = ()

    @property
    def rect(self) -> Rect:
        """Its rows and columns."""
        return self.placed.rect

    @property
    def matrix(self) -> Buffer | View:
        """Where it is."""
        return self.placed.matrix

    @property
    def own(self) -> tuple[int, int]:
        """First index and end along its own axis: rows of A, columns of B."""
        return self.rect[:2] if self.operand == 0 else self.rect[2:]

    @property
    def loaded(self) -> bool:
        """Whether it is loaded to a buffer."""
        return self.how == "loaded"


class Multiply(NamedTuple):
    """The product of a part of A and a part of B; `needs` are to be there before it."""

    a: Placed
    b: Placed
    needs: tuple[Part, ...]
    # Whether it adds to D instead of overwriting it.
    add: bool


class Group(NamedTuple):
    """Loads and products, as of a panel."""

    # In the order in which they are issued; those of a tuple together.
    loads: list[tuple[Part, ...]]
    products: list[Multiply]
    # Ranks whose part of the partial sums is complete after it.
    done: tuple[int, ...] = ()
    # The number of a group which is over before any of these loads is issued.
    after: int = -1


# Whether the library can multiply a chunk of this GPU, by operand (0 or 1) and number, as it is.
Usable = Callable[[int, int], bool]


class _Schedule:
    """Base of schedules: the places of parts."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.problem, self.me, self.region = plan, plan.problem, rank, plan.region(rank)
        self.where = {name: where.tolist() for name, where in plan.where.items()}
        # Buffers for parts of A and B by name.
        self.slots: dict[str, Buffer] = {}
        self.kinds: Sequence[str] = [plan.problem.compute_type.name] * 2
        self.multiple = 1

    def is_here(self, parts: Sequence[Part]) -> bool:
        """Whether all of some parts is in the memory of this rank."""
        return False

    def has(self, block: ChunkBlock) -> bool:
        """Whether a part of a chunk is in the memory of this rank's worker."""
        holder = self.where[self.problem.matrices[block.operand].name][block.chunk]
        return holder in (self.plan.ranks[self.me], EVERYWHERE)

    def in_chunk(self, block: ChunkBlock, dtype: str) -> Buffer | View:
        """Return the place of a part of a chunk."""
        matrix = self.problem.matrices[block.operand]
        chunk = Buffer(chunk_name(matrix.name, block.chunk), matrix.chunk_shape(block.chunk), dtype)
        return chunk if chunk.shape == (block.rows, block.cols) else View(chunk, block.box)

    def _slot(self, operand: int, number: int, at: int, rect: Rect) -> View:
        """Return the place of a part in a buffer, which grows so that its parts fit; k begins at 0."""
        name = f"panel.{operand}.{number}"
        buffer = self.slots.setdefault(name, Buffer(name, (0, 0), self.kinds[operand]))
        rows, cols = shape_of(rect)
        top, left = (at, 0) if operand == 0 else (0, at)
        most = padded(top + rows, self.multiple), padded(left + cols, self.multiple)
        buffer.shape = max(buffer.shape[0], most[0]), max(buffer.shape[1], most[1])
        return View(buffer, (top, top + rows, left, left + cols))


# On CPUs


# Parts of chunks of A, and of B.
Pieces = tuple[list[ChunkBlock], list[ChunkBlock]]
# Parts of A and B that are multiplied with each other: of one operand, and groups of the other one.
_Stage = tuple[list[ChunkBlock], list[list[ChunkBlock]]]


class Panel(NamedTuple):
    """A stretch of k: pieces that are at home, and pieces to ask each other participant for."""

    k0: int
    k1: int
    local: Pieces
    remote: dict[int, Pieces]


def panels(plan: Plan, rank: int) -> list[Panel]:
    """Return the panels of a rank in the order in which it multiplies them.

    Every element of ``A[rows, depth]`` and ``B[depth, cols]`` is in exactly one piece. Panels that need
    nothing from others come first; the rest begins at another place on each rank.
    """
    problem, (r0, r1, c0, c1), (k0, k1) = plan.problem, plan.region(rank), plan.k_range(rank)
    edges = edges_within(k0, k1, problem.a.chunks[1], problem.b.chunks[0])
    cuts = coalesce(edges, int(panel_width(problem, r1 - r0 + c1 - c0, k1 - k0)))
    where, here = [plan.where[name].tolist() for name in "ab"], (plan.ranks[rank], EVERYWHERE)
    recorded: list[Panel] = []
    for low, high in itertools.pairwise(cuts):
        panel = Panel(low, high, ([], []), {})
        for piece in _pieces(plan, rank, low, high):
            holder = where[piece.operand][piece.chunk]
            some = panel.local if holder in here else panel.remote.setdefault(holder, ([], []))
            some[piece.operand].append(piece)
        recorded.append(panel)
    turn = rank * len(recorded) // len(plan.ranks)
    order = sorted(range(len(recorded)), key=lambda x: (bool(recorded[x].remote), (x - turn) % len(recorded)))
    return [recorded[x] for x in order]


def _pieces(plan: Plan, rank: int, low: int, high: int) -> list[ChunkBlock]:
    """Return the parts of chunks that a rank multiplies along a stretch of k, first those of A."""
    r0, r1, c0, c1 = plan.region(rank)
    of_a = chunk_blocks_of(plan.problem.a.chunks, 0, (r0, r1, low, high), (0, 0))
    return of_a + chunk_blocks_of(plan.problem.b.chunks, 1, (low, high, c0, c1), (0, 0))


def coalesce(edges: Sequence[int], width: int, step: int = 1) -> tuple[int, ...]:
    """Join stretches between edges up to `width`; cut longer ones evenly, at multiples of `step` from the edge."""
    cuts = [edges[0]]
    for previous, edge in itertools.pairwise(edges):
        if edge - cuts[-1] > width and cuts[-1] != previous:
            cuts.append(previous)
        while edge - cuts[-1] > width:
            left = edge - cuts[-1]
            cuts.append(cuts[-1] + padded(left, step, -(-left // width)))
    if cuts[-1] != edges[-1]:
        cuts.append(edges[-1])
    return tuple(cuts)


def _stages_of_panels(plan: Plan, rank: int) -> list[_Stage]:
    """Return the stages of a rank that has chunks in memory, local chunks first."""
    stages: list[_Stage] = []
    for panel in panels(plan, rank):
        (a, b), far = panel.local, panel.remote.values()
        far_a, far_b = ([*itertools.chain(*(some[operand] for some in far))] for operand in (0, 1))
        apart = far and not {*"ab"} & {*plan.packing}
        stages += [(a, [b]), (far_a, [b + far_b]), (a, [far_b])] if apart else [(a + far_a, [b + far_b])]
    return stages


def _stages_of_sources(plan: Plan, rank: int) -> list[_Stage]:
    """Return the stages of a rank that computes chunks itself, in an order in which few chunks are held.

    Each part of the operand whose chunks it makes, of A where it makes both, comes with those of the other one along
    the same k, and all follow k.
    """
    pieces = sorted(_pieces(plan, rank, *plan.k_range(rank)), key=lambda piece: (piece.depth[0], piece.row + piece.col))
    outer = int(not plan.problem.a.by_ranks)
    own, inner = ([piece for piece in pieces if piece.operand == number] for number in (outer, 1 - outer))
    return [([y], [[x] for x in inner if x.depth[0] < y.depth[1] and y.depth[0] < x.depth[1]]) for y in own]


class PanelSchedule(_Schedule):
    """The order of a rank on CPUs, which multiplies chunks, and panels that they are copied to."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self._gram = is_gram(self.problem)
        # The parts of chunks so far, and those that are loaded for the next group.
        self._parts, self._new = dict[ChunkBlock, Part](), list[Part]()
        self._needed: Collection[ChunkBlock] = ()

    def groups(self) -> list[Group]:
        """Return the groups of the rank."""
        plan, problem, recorded = self.plan, self.problem, list[Group]()
        stages = (_stages_of_sources if problem.by_ranks else _stages_of_panels)(plan, self.me)
        if self._gram and not {*"ab"} & {*plan.kept}:
            self._needed = set(itertools.chain(*(itertools.chain(own, *some) for own, some in stages)))
        # The numbers of groups with loads.
        loading = list[int]()
        for own, some in stages if all(shape_of(self.region)) else ():
            firsts, products = self._together(own), list[Multiply]()
            for group in some if firsts else ():
                for pair in itertools.product(firsts, self._together(group, firsts)):
                    a, b = pair[::-1] if pair[0].operand else pair
                    products.append(Multiply(a.placed, b.placed, pair, add=True))
            loads, self._new = self._new, []
            before = len(loading) - problem.options.prefetch_panels - 1
            after = loading[before] if before >= 0 else -1
            if loads:
                loading.append(len(recorded))
            recorded.append(Group([tuple(loads)] if loads else [], products, after=after))
        if problem.by_ranks and loading:
            # What the rank does not make is there from the start.
            every = tuple(itertools.chain(*(loads for group in recorded for loads in group.loads)))
            recorded = [group._replace(loads=[], after=-1) for group in recorded]
            recorded[0] = recorded[0]._replace(loads=[every])
        if plan.grid[2] > 1:
            recorded = recorded or [Group([], [])]
            recorded[-1] = recorded[-1]._replace(done=tuple(range(len(plan.ranks))))
        return recorded

    def _part(self, piece: ChunkBlock) -> Part:
        """Return a part of a chunk; of A where B is A transposed, what is there as a part of B."""
        if piece not in self._parts:
            self._parts[piece] = self._twin_of(piece) if piece.operand == 0 and self._needed else self._placed(piece)
        return self._parts[piece]

    def _twin_of(self, piece: ChunkBlock) -> Part:
        row, col = divmod(piece.chunk, self.problem.a.counts[1])
        _, _, r0, c0, rows, cols, top, left = piece
        twin = ChunkBlock(1, col * self.problem.b.counts[1] + row, c0, r0, cols, rows, left, top)
        if twin not in self._needed:
            return self._placed(piece)
        source = self._part(twin)
        return Part(0, Placed(source.matrix, piece.rect, transposed=True), "here", (source,))

    def _placed(self, piece: ChunkBlock) -> Part:
        matrix = self.problem.matrices[piece.operand]
        if matrix.by_ranks or self.has(piece):
            place = Placed(self.in_chunk(piece, matrix.dtype), piece.rect)
            return Part(piece.operand, place, "made" if matrix.by_ranks else "here")
        name = f"{matrix.name}.{piece.chunk}.{piece.r0}.{piece.c0}"
        part = Part(piece.operand, Placed(Buffer(name, (piece.rows, piece.cols), matrix.dtype), piece.rect), "loaded")
        self._new.append(part)
        return part

    def _together(self, pieces: Sequence[ChunkBlock], firsts: Sequence[Part] = ()) -> list[Part]:
        """Return parts of A or B as they are multiplied: where they are, or in one panel of the type of the sums."""
        parts = [self._part(piece) for piece in pieces]
        if not parts or "ab"[(operand := parts[0].operand)] not in self.plan.packing:
            return parts
        rect = rect_around(part.rect for part in parts)
        real = self.problem.compute_type.kind != "c"
        for first in firsts if self._gram and real else ():
            if first.how == "joined" and first.rect == (*rect[2:], *rect[:2]):
                return [Part(operand, Placed(first.matrix, rect, transposed=True), "here", (first,))]
        return [Part(operand, Placed(self._slot(operand, 0, 0, rect), rect), "joined", tuple(parts))]


# On GPUs


# A panel has only chunks of this GPU or only chunks of others, if no panel gets narrower than this part of the usual
# width, or if the products still fill a GPU.
_FINEST = 2
# A panel is ordered by the rank that has more than this part of its elements.
_MOSTLY = 0.5


class _Segment(NamedTuple):
    """A stretch of an operand's own axis and of k; `in_place`: it is multiplied there instead of in a buffer."""

    operand: int
    depth: tuple[int, int]
    start: int
    stop: int
    in_place: bool = False

    @property
    def rect(self) -> Rect:
        """Its rows and columns."""
        own = self.start, self.stop
        return (*own, *self.depth) if self.operand == 0 else (*self.depth, *own)


class DeviceSchedule(_Schedule):
    """The order of a rank on a GPU: its plan's `BlockSchedule` or `LoadSchedule`, applied to the places of chunks."""

    def __init__(self, plan: Plan, rank: int, usable: Usable) -> None:
        super().__init__(plan, rank)
        self.usable, self.multiple, self.side = usable, extent_multiple(plan.problem), full_side(plan.problem)
        self.kinds = plan.problem.matrix_types

    def groups(self) -> list[Group]:
        """Return the groups of the rank."""
        if self.problem.by_ranks:
            return self._groups_of_made(load_schedules(self.plan)[self.me])
        return self._groups_of_blocks(block_schedules(self.plan)[self.me])

    def is_here(self, parts: Sequence[Part]) -> bool:
        """Whether all of some parts is on this GPU."""
        return not any(self._away(part.operand, part.rect) for part in parts)

    def _groups_of_blocks(self, schedule: BlockSchedule) -> list[Group]:
        """Return the groups of a rank whose chunks are in memory."""
        plan, (r0, r1, c0, c1) = self.plan, self.region
        self.schedule, self.stationary, self.streamed = schedule, schedule.stationary, 1 - schedule.stationary
        span, panel_numbers = ((c0, c1) if self.streamed == 1 else (r0, r1)), itertools.count()
        groups: list[Group] = []
        epochs = list(itertools.product(itertools.pairwise(schedule.parts), itertools.pairwise(schedule.depth)))
        for epoch, (part, depth) in enumerate(epochs):
            panels = self._panels(span, depth)
            # Panels at the front that are on this GPU; one buffer is left for the first panel that is not.
            away = [self._away(self.streamed, segment.rect) for segment, _ in panels[: PANELS - 1]]
            here = [*away, True].index(True)
            resident = self._stationary_parts(part, depth, epoch, self._width(panels, here))
            if epoch == 0 and not here and all(x.loaded for x in resident):
                panels = self._ramp(panels, resident)
            wholes = _side_by_side(resident)
            # Parts that are multiplied in place come first, then other parts on this GPU.
            resident.sort(key=lambda x: (x.loaded, self._away(x.operand, x.rect)))
            wholes.sort(key=lambda group: group[0].loaded)
            fresh = [x for x in resident if x.loaded]
            add = depth[0] > schedule.depth[0]
            # The panels on this GPU, or else the first panel, are multiplied with each stationary piece as it arrives.
            at_first = max(1, here) if fresh else 1
            last = {to: segment for segment, to in panels}
            for number, group in enumerate([panels[:at_first], *([panel] for panel in panels[at_first:])]):
                parts = [
                    self._part(segment, 0 if segment.in_place else next(panel_numbers) % PANELS) for segment, _ in group
                ]
                loads = [x for x in parts if x.loaded]
                if number == 0:
                    loads = [*fresh[:1], *loads, *fresh[1:]]
                stationary = [(x,) for x in resident] if number == 0 else wholes
                products = [self._multiply(together, panel, add) for together in stationary for panel in parts]
                done: tuple[int, ...] = ()
                if plan.grid[2] > 1 and epoch == len(epochs) - 1:
                    done = tuple(to for segment, to in group if segment == last[to])
                    if -1 in done:
                        done = tuple(range(len(plan.ranks)))
                groups.append(Group([(load,) for load in loads], products, done))
        return groups

    def _width(self, panels: Sequence[tuple[_Segment, int]], here: int) -> int:
        """Return the mean width of the panels that are multiplied first; a panel from another GPU will be cut."""
        widths = [segment.stop - segment.start for segment, _ in panels[: max(1, here)]]
        return sum(widths) // here if here else min(*widths, self.side)

    def _multiply(self, stationary: tuple[Part, ...], panel: Part, add: bool) -> Multiply:
        """Return the product of parts that are side by side in one buffer, or of one, with a panel."""
        first, last = stationary[0], stationary[-1]
        whole = first.placed
        if first is not last:
            (top, _, left, _), (_, bottom, _, right) = first.matrix.box, last.matrix.box
            rect = (first.rect[0], last.rect[1], first.rect[2], last.rect[3])
            whole = Placed(View(first.matrix.buffer, (top, bottom, left, right)), rect)
        a, b = (whole, panel.placed) if self.stationary == 0 else (panel.placed, whole)
        return Multiply(a, b, tuple(part for part in (*stationary, panel) if part.loaded), add)

    def _part(self, segment: _Segment, slot: int, at: int = 0) -> Part:
        """Return a part that is multiplied in place, or brought to a place of the buffer with a number."""
        operand, rect = segment.operand, segment.rect
        matrix, kind = self.problem.matrices[operand], self.kinds[operand]
        blocks = chunk_blocks_of(matrix.chunks, operand, rect, (0, 0)) if segment.in_place or matrix.by_ranks else []
        how: Literal["here", "made"] = "made" if matrix.by_ranks else "here"
        in_chunks = tuple(Part(operand, Placed(self.in_chunk(block, kind), block.rect), how) for block in blocks)
        if segment.in_place:
            return in_chunks[0]
        place = Placed(self._slot(operand, slot, at, rect), rect)
        return Part(operand, place, "joined" if in_chunks else "loaded", in_chunks)

    def _stationary_parts(self, part: tuple[int, int], depth: tuple[int, int], epoch: int, width: int) -> list[Part]:
        """Return the stationary part in pieces, for panels of this width."""
        pieces: list[Part] = []
        operand, slot, at = self.stationary, epoch % self.schedule.stationary_buffers, 0
        for segment in self._segments(operand, part, depth):
            length = segment.stop - segment.start
            cut = epoch == 0 and not segment.in_place and self._away(operand, segment.rect)
            size = self._piece(length, width) if cut else length
            for start in range(segment.start, segment.stop, size):
                piece = segment._replace(start=start, stop=min(start + size, segment.stop))
                pieces.append(self._part(piece, slot, at))
                at += 0 if segment.in_place else piece.stop - start
        return pieces

    def _panels(self, span: tuple[int, int], depth: tuple[int, int]) -> list[tuple[_Segment, int]]:
        """Return the panels in order, each with the rank whose part of the partial sums it belongs to, or -1."""
        plan, rank = self.plan, self.me
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
        panels: list[tuple[_Segment, int]] = []
        for slab, to in slabs:
            pieces: list[_Segment] = []
            for segment in self._segments(self.streamed, slab, depth):
                if segment.in_place:
                    pieces.append(segment)
                    continue
                for run in self._runs(segment):
                    edges, width = self._edges(self.streamed, (run.start, run.stop)), self.schedule.width
                    cuts = itertools.pairwise(coalesce(edges, width, unit(width, self.multiple)))
                    pieces += [run._replace(start=low, stop=high) for low, high in cuts]
            panels += [(piece, to) for piece in self._in_order(pieces)]
        return panels

    def _ramp(self, panels: Sequence[tuple[_Segment, int]], resident: Sequence[Part]) -> list[tuple[_Segment, int]]:
        """Cut the first panel, which comes from another GPU, into pieces."""
        (first, to), *rest = panels
        size = self._piece(first.stop - first.start, max(part.own[1] - part.own[0] for part in resident))
        starts = range(first.start, first.stop, size)
        pieces = [first._replace(start=start, stop=min(start + size, first.stop)) for start in starts]
        return [(piece, to) for piece in pieces] + rest

    def _runs(self, segment: _Segment) -> list[_Segment]:
        """Cut a stretch of the streamed operand into parts on this GPU and parts on others, if these are wide."""
        ends = itertools.pairwise(self._edges(self.streamed, (segment.start, segment.stop)))
        stretches = (segment._replace(start=start, stop=stop) for start, stop in ends)
        grouped = itertools.groupby(stretches, key=lambda stretch: self._away(self.streamed, stretch.rect))
        runs = [_joined(some) for _, some in grouped]
        low, high = self.schedule.parts[:2]
        least = min(self.schedule.width // _FINEST, self.side**2 // (high - low))
        return [segment] if any(run.stop - run.start < least for run in runs) else runs

    def _in_order(self, segments: list[_Segment]) -> list[_Segment]:
        """Return panels in the order in which they are pulled."""
        count, ranks = len(self.plan.ranks), self.plan.ranks
        holders = [self._holders(self.streamed, segment.rect) for segment in segments]
        me, first = ranks[self.me], self.me * len(segments) // count
        whole = all(max(elements.values()) > _MOSTLY * sum(elements.values()) for elements in holders)

        def key(at: int) -> tuple[bool, bool, int, int]:
            most = max(holders[at], key=lambda holder: holders[at][holder])
            behind = (ranks.index(most) - self.me) % count if most in ranks else count
            away = self.plan.from_host or set(holders[at]) != {me}
            return not segments[at].in_place, away, behind if whole else 0, (at - first) % len(segments)

        return [segments[at] for at in sorted(range(len(segments)), key=key)]

    def _segments(self, operand: int, span: tuple[int, int], depth: tuple[int, int]) -> list[_Segment]:
        """Cut a stretch of an operand's own axis into parts that are multiplied in place and parts that are loaded."""
        stretches = (_Segment(operand, depth, *ends) for ends in itertools.pairwise(self._edges(operand, span)))
        placed = (stretch._replace(in_place=self._in_place(operand, stretch.rect)) for stretch in stretches)
        grouped = itertools.groupby(placed, key=lambda stretch: stretch.in_place)
        return [x for in_place, some in grouped for x in (some if in_place else [_joined(some)])]

    def _in_place(self, operand: int, rect: Rect) -> bool:
        """Whether a part of an operand is in one chunk of this GPU, where the library can multiply it."""
        matrix = self.problem.matrices[operand]
        blocks = chunk_blocks_of(matrix.chunks, operand, rect, (0, 0))
        if len(blocks) > 1 or (self.problem.by_ranks and self.multiple > 1):
            return False
        if matrix.by_ranks:
            return True
        (block,) = blocks
        if self.multiple > 1 and any(x % 16 for x in (block.r0, block.c0, block.rows, block.cols)):
            return False
        return self.has(block) and not self.plan.from_host and self.usable(operand, block.chunk)

    def _edges(self, operand: int, span: tuple[int, int]) -> list[int]:
        """Return the edges of chunks within a stretch, its ends included."""
        if self.multiple > 1:
            # Extents of GEMMs are padded, so the places of their results inside of D must be multiples, too.
            return [span[0], span[1]]
        return edges_within(*span, self.problem.matrices[operand].chunks[operand])

    def _holders(self, operand: int, rect: Rect) -> dict[int, int]:
        """Return how many elements of a part each participant has."""
        matrix, elements = self.problem.matrices[operand], collections.defaultdict[int, int](int)
        for piece in chunk_blocks_of(matrix.chunks, operand, rect):
            holder = self.where[matrix.name][piece.chunk]
            elements[self.plan.ranks[self.me] if holder == EVERYWHERE else holder] += piece.rows * piece.cols
        return elements

    def _piece(self, length: int, width: int) -> int:
        """Return the size of pieces whose products with a part of extent `width` still fill a GPU."""
        count = pieces_that_fill(self.problem, length, width)
        return padded(length, unit(length // count, self.multiple), count)

    def _away(self, operand: int, rect: Rect) -> bool:
        """Whether not all of a part is on this GPU."""
        return self.plan.from_host or set(self._holders(operand, rect)) != {self.plan.ranks[self.me]}

    def _groups_of_made(self, schedule: LoadSchedule) -> list[Group]:
        """Return the groups of a rank that computes chunks: one for each product, whose chunks are made for it."""
        plan, problem, region, along_k = self.plan, self.problem, self.region, self.plan.k_range(self.me)

        def part(operand: int, of_d: Rect, depth: tuple[int, int], buffer: int) -> Part:
            """Return the part of an operand that a part of D needs: in a numbered buffer, or in place."""
            segment = _Segment(operand, depth, *(of_d[:2] if operand == 0 else of_d[2:]))
            return self._part(segment._replace(in_place=self._in_place(operand, segment.rect)), buffer)

        # All that the rank needs of an operand whose chunks it does not make.
        held = [part(operand, region, along_k, 0) for operand in (0, 1) if not problem.matrices[operand].by_ranks]
        loads: list[tuple[Part, ...]] = [(stationary,) for stationary in held if stationary.loaded]
        groups = list[Group]()
        for own, depth in load_steps(plan, self.me, schedule):
            of_d = region
            if held:
                of_d = (*own, *region[2:]) if schedule.operands[0] == 0 else (*region[:2], *own)
            makes = [part(operand, of_d, depth, len(groups) % PANELS) for operand in schedule.operands]
            pair = {piece.operand: piece.placed for piece in makes}
            for stationary in held:
                (r0, r1), (c0, c1) = (region[:2], depth) if stationary.operand == 0 else (depth, region[2:])
                rect = (r0, r1, c0, c1)
                pair[stationary.operand] = Placed(stationary.placed.part(rect), rect)
            if schedule.twin:
                ((operand, sole),) = pair.items()
                pair[1 - operand] = Placed(sole.matrix, (*sole.rect[2:], *sole.rect[:2]), transposed=True)
            product = Multiply(pair[0], pair[1], (*held, *makes), depth[0] > along_k[0])
            groups.append(Group([] if groups else loads, [product]))
        if plan.grid[2] > 1:
            groups[-1] = groups[-1]._replace(done=tuple(range(len(plan.ranks))))
        return groups


def _joined(stretches: Iterable[_Segment]) -> _Segment:
    """Return neighbours as one stretch."""
    every = list(stretches)
    return every[0]._replace(stop=every[-1].stop)


def _side_by_side(resident: Sequence[Part]) -> list[tuple[Part, ...]]:
    """Group parts that are side by side both in one buffer and in the matrix."""
    groups: list[tuple[Part, ...]] = []
    for part in resident:
        before = groups[-1][-1] if groups else None
        if before is not None and part.loaded and before.matrix.buffer is part.matrix.buffer:
            axis = 2 * part.operand
            if before.own[1] == part.own[0] and before.matrix.box[axis + 1] == part.matrix.box[axis]:
                groups[-1] = (*groups[-1], part)
                continue
        groups.append((part,))
    return groups
