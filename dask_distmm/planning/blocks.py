"""The steps of a rank of a product on a GPU: what it loads and multiplies when, adds up and hands over. Pure.

The first steps wait for as little as possible. Parts that are multiplied in place come first, then parts whose chunks
are on this GPU. The stationary part is loaded in pieces, and each piece is multiplied as soon as it has arrived; so is
the first panel, if it comes from another GPU. No piece is so small that its products leave multiprocessors idle. The
other panels follow in the order of the ranks that have them. Each rank begins with the panels of the next rank, so that
no two ranks pull from the same one at the same time::

    rank 0   0  1  2  3
    rank 1   1  2  3  0
    rank 2   2  3  0  1
    rank 3   3  0  1  2

A load is a step of its own, which comes as soon as the products that use its buffer are on their way, but behind the
first of those that come next: it takes the host as long to put a load on a stream as it takes a GPU to do it.

Where a rank makes chunks of A or B itself, each is made, multiplied, or copied to a buffer beside others, and dropped.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dask_distmm.planning.cuts import Rect, common, full_side, padded, pieces_of, pieces_that_fill, shape_of, unit
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.product import LONG, ChunkBlock, Placed, Product, chunk_blocks_of, coalesce, deciding
from dask_distmm.planning.program import remembered
from dask_distmm.planning.schedule import (
    PANELS,
    BlockSchedule,
    LoadSchedule,
    block_schedules,
    extent_multiple,
    in_chunks,
    load_schedules,
    load_steps,
    native,
    square_on_diagonal,
    sums_in,
)
from dask_distmm.programs.steps import Buffer, Call, Make, Publish, Pull, Step, Store, View

# A panel has only chunks of this GPU or only chunks of others, if no panel gets narrower than this part of the usual
# width, or if the products still fill a GPU.
_FINEST = 2
# A panel is ordered by the rank that has more than this part of its elements.
_MOSTLY = 0.5


class Part(NamedTuple):
    """A part of A (operand 0) or B (1) that is multiplied."""

    operand: int
    # Its rows and columns.
    rect: Rect
    # Where it is: in a chunk, or in a buffer to which it is loaded.
    matrix: View
    loaded: bool
    # The parts of chunks that it consists of where this rank makes these.
    sources: tuple[ChunkBlock, ...] = ()

    @property
    def own(self) -> tuple[int, int]:
        """First index and end along its own axis: rows of A, columns of B."""
        return self.rect[:2] if self.operand == 0 else self.rect[2:]

    @property
    def placed(self) -> Placed:
        """The part as a placed matrix."""
        return Placed(self.matrix, self.rect)


class Multiply(NamedTuple):
    """The product of a part of A and a part of B; `needs` are to be there before it."""

    a: Placed
    b: Placed
    needs: tuple[Part, ...]
    # Whether it adds to D instead of overwriting it.
    add: bool


class Group(NamedTuple):
    """The loads and products of one panel of the streamed operand; the first group may have several panels."""

    # In the order in which they are issued.
    loads: list[Part]
    products: list[Multiply]
    # Ranks whose part of the partial sums is complete after it.
    done: tuple[int, ...] = ()


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


# Whether the library can multiply a chunk of this GPU, by operand (0 or 1) and number, as it is.
Usable = Callable[[int, int], bool]
# Lists that are kept for plans that are alike, whose chunks may be stored differently.
_KEPT = 4


def steps(plan: Plan, rank: int, usable: Usable) -> tuple[Step, ...]:
    """Return the steps of a rank; `usable` says which chunks in its memory can be multiplied as they are."""
    if plan.problem.by_ranks:  # which follow from machines, too
        return record(plan, rank, usable)
    answers: dict[tuple[int, int], bool] = {}
    kept: list[tuple[dict[tuple[int, int], bool], tuple[Step, ...]]]
    kept = remembered((deciding(plan),), ("blocks", rank), list, LONG)
    for before, before_steps in kept:
        if all(usable(*chunk) == answer for chunk, answer in before.items()):
            return before_steps

    def asked(operand: int, number: int) -> bool:
        if (operand, number) not in answers:
            answers[operand, number] = usable(operand, number)
        return answers[operand, number]

    recorded = record(plan, rank, asked)
    kept[:] = [*kept[1 - _KEPT :], (answers, recorded)]
    return recorded


def record(plan: Plan, rank: int, usable: Usable) -> tuple[Step, ...]:
    """Record the steps of a rank."""
    p = _Blocks(plan, rank, usable)
    groups = (
        p.groups_of_made(load_schedules(plan)[rank]) if plan.problem.by_ranks else p.groups(block_schedules(plan)[rank])
    )
    p.begin()
    p.take(groups)
    p.sum_up()
    p.assemble()
    p.hand_over()
    return _stored_soon(p.end())


class _Blocks(Product):
    """Records the steps of a rank."""

    def __init__(self, plan: Plan, rank: int, usable: Usable) -> None:
        i, j, _ = plan.coords(rank)
        self.usable, self.multiple, self.side = usable, extent_multiple(plan.problem), full_side(plan.problem)
        # D is multiplied into its chunks if all are large, or if the rank's part of it is within one of its own.
        inside = [index for index, _ in pieces_of(plan.chunk_cuts, plan.region(rank))]
        within = plan.grid[2] == self.multiple == len(inside) == 1 and int(plan.owners[inside[0]]) == rank
        super().__init__(plan, rank, sums_in(plan).name, packed=not (in_chunks(plan)[i, j] or within))
        self.triangle = square_on_diagonal(plan, rank, native(plan))
        self.kinds = plan.problem.matrix_types
        # Buffers for parts of A and B by name; the bias, if the library adds it.
        self.slots: dict[str, Buffer] = {}
        self.bias: Placed | None = None
        # Ranks whose sums are to be added: the one before this one computes this rank's part right after its own.
        behind_me = range(1, len(plan.ranks)) if plan.grid[2] > 1 and plan.final_rects(rank) else ()
        self.coming, self.complete = collections.deque((rank - behind) % len(plan.ranks) for behind in behind_me), 0

    # Which part of what is loaded when: the plan's `BlockSchedule`, applied to the places of the chunks

    def groups(self, schedule: BlockSchedule) -> list[Group]:
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
                groups.append(Group(loads, products, done))
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
        """Return a part that is multiplied in place, or loaded to a place of the buffer with a number."""
        operand, rect = segment.operand, segment.rect
        if segment.in_place:
            (block,) = chunk_blocks_of(self.problem.matrices[operand].chunks, operand, rect, (0, 0))
            return Part(operand, rect, self._in_chunk(block), loaded=False)
        return Part(operand, rect, self._in_slot(operand, slot, at, rect), loaded=True)

    def _in_chunk(self, block: ChunkBlock) -> View:
        matrix = self.problem.matrices[block.operand]
        buffer = Buffer(f"{matrix.name}.{block.chunk}", matrix.chunk_shape(block.chunk), self.kinds[block.operand])
        return View(buffer, (block.r0, block.r0 + block.rows, block.c0, block.c0 + block.cols))

    def _in_slot(self, operand: int, number: int, at: int, rect: Rect) -> View:
        """Return the place of a part in a buffer, which grows so that its parts fit; k begins at 0."""
        name = f"panel.{operand}.{number}"
        buffer = self.slots.setdefault(name, Buffer(name, (0, 0), self.kinds[operand]))
        rows, cols = shape_of(rect)
        top, left = (at, 0) if operand == 0 else (0, at)
        most = padded(top + rows, self.multiple), padded(left + cols, self.multiple)
        buffer.shape = max(buffer.shape[0], most[0]), max(buffer.shape[1], most[1])
        return View(buffer, (top, top + rows, left, left + cols))

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
        runs: list[tuple[_Segment, bool]] = []
        for start, stop in itertools.pairwise(self._edges(self.streamed, (segment.start, segment.stop))):
            run = segment._replace(start=start, stop=stop)
            away = self._away(self.streamed, run.rect)
            if runs and runs[-1][1] == away:
                run = run._replace(start=runs.pop()[0].start)
            runs.append((run, away))
        low, high = self.schedule.parts[:2]
        least = min(self.schedule.width // _FINEST, self.side**2 // (high - low))
        if any(run.stop - run.start < least for run, _ in runs):
            return [segment]
        return [run for run, _ in runs]

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
        segments: list[_Segment] = []
        for start, stop in itertools.pairwise(self._edges(operand, span)):
            segment = _Segment(operand, depth, start, stop)
            segment = segment._replace(in_place=self._in_place(operand, segment.rect))
            if segments and not segment.in_place and not segments[-1].in_place:
                segment = segment._replace(start=segments.pop().start)
            segments.append(segment)
        return segments

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
        here = self.where[matrix.name][block.chunk] in (self.plan.ranks[self.me], EVERYWHERE)
        return here and not self.plan.from_host and self.usable(operand, block.chunk)

    def _edges(self, operand: int, span: tuple[int, int]) -> list[int]:
        """Return the edges of chunks within a stretch, its ends included."""
        if self.multiple > 1:
            # Extents of GEMMs are padded, so the places of their results inside of D must be multiples, too.
            return [span[0], span[1]]
        sizes = self.problem.a.chunks[0] if operand == 0 else self.problem.b.chunks[1]
        inside = {edge for edge in itertools.accumulate(sizes) if span[0] < edge < span[1]}
        return sorted({*span, *inside})

    def _holders(self, operand: int, rect: Rect) -> dict[int, int]:
        """Return how many elements of a part each participant has."""
        matrix, elements = self.problem.matrices[operand], collections.defaultdict[int, int](int)
        for piece in chunk_blocks_of(matrix.chunks, operand, rect):
            holder = self.where[matrix.name][piece.chunk]
            elements[self.plan.ranks[self.me] if holder == EVERYWHERE else holder] += piece.rows * piece.cols
        return elements

    def _piece(self, length: int, width: int) -> int:
        """Return the size of pieces whose products with a part of extent `other` still fill a GPU."""
        count = pieces_that_fill(self.problem, length, width)
        return padded(length, unit(length // count, self.multiple), count)

    def _away(self, operand: int, rect: Rect) -> bool:
        """Whether not all of a part is on this GPU."""
        return self.plan.from_host or set(self._holders(operand, rect)) != {self.plan.ranks[self.me]}

    # The same where the rank makes chunks: a group for each product, whose chunks are made for it

    def groups_of_made(self, schedule: LoadSchedule) -> list[Group]:
        """Return the groups of a rank that computes chunks."""
        plan, problem, region, along_k = self.plan, self.problem, self.region, self.plan.k_range(self.me)

        def part(operand: int, of_d: Rect, depth: tuple[int, int], buffer: int) -> Part:
            """Return the part of an operand that a part of D needs: in a numbered buffer, or in place."""
            own, matrix = (of_d[:2] if operand == 0 else of_d[2:]), problem.matrices[operand]
            segment = _Segment(operand, depth, *own)
            loaded = self._part(segment._replace(in_place=self._in_place(operand, segment.rect)), buffer)
            chunks = chunk_blocks_of(matrix.chunks, operand, segment.rect) if matrix.by_ranks else ()
            return loaded._replace(sources=tuple(chunks))

        # All that the rank needs of an operand whose chunks it does not make.
        held = [part(operand, region, along_k, 0) for operand in (0, 1) if not problem.matrices[operand].by_ranks]
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
            first = [piece for piece in held if piece.loaded] if not groups else []
            needs = (*(piece for piece in held if piece.loaded), *makes)
            groups.append(Group([*first, *makes], [Multiply(pair[0], pair[1], needs, depth[0] > along_k[0])]))
        if plan.grid[2] > 1:
            groups[-1] = groups[-1]._replace(done=tuple(range(len(plan.ranks))))
        return groups

    # The steps

    def begin(self) -> None:
        """Allocate buffers, sums and chunks of D, and load the bias where the library adds it."""
        self.new(*self.slots.values())
        self.allocate(self.dtype, zero=False, chunks=True)
        if native(self.plan) is not None and "bias" in self.problem.formula.inputs:
            rect = (0, 1, *self.region[2:])
            bias = self._load("bias", rect)
            if (goal := self.problem.d.dtype) != bias.dtype:
                bias, loaded = self.small(1, bias.shape[1], goal), bias
                self.call("copy", loaded, bias)
            self.bias = Placed(bias, rect)

    def _load(self, name: str, rect: Rect) -> Buffer:
        """Copy a part of an operand to a new matrix."""
        buffer = self.small(*shape_of(rect), self.problem[name].dtype)
        self.new(buffer)
        self.steps.append(Make(buffer[:, :], name, rect=rect))
        return buffer

    def take(self, groups: Sequence[Group]) -> None:
        """Record loads and products: loads in their order, each once its buffer is free."""
        pending = collections.deque[tuple[Part, int]]()
        issued, held = set[int](), set[str]()
        # By the names of buffers, and of chunks that are made, the last group that multiplies what is there.
        last: dict[str, int] = {}
        for number, group in enumerate(groups):
            for part in group.loads:
                after = last.get(part.matrix.name, -1)
                if after < 0 and not part.sources and not self._away(part.operand, part.rect):
                    # A part that is all on this GPU is there before the run.
                    self._issue(part)
                    issued.add(id(part))
                else:
                    pending.append((part, after))
            for part in itertools.chain(*(product.needs for product in group.products)):
                chunks = [self._in_chunk(block).name for block in part.sources]
                last |= dict.fromkeys([part.matrix.name, *chunks], number)

        def issue() -> None:
            part, _ = pending.popleft()
            self._issue(part)
            issued.add(id(part))

        def can_come(after: int) -> bool:
            return bool(pending) and not pending[0][0].sources and pending[0][1] <= after

        for number, group in enumerate(groups):
            for product in group.products:
                while not all(id(part) in issued for part in product.needs):
                    issue()
                self._add_product(product)
                if can_come(number - 1):
                    issue()
            held |= {self._in_chunk(block).name for part in group.loads for block in part.sources}
            over = {name for name in held if last[name] == number}
            self.drop(*(self._here[name] for name in sorted(over)))
            held -= over
            # Of a triangle nothing is complete before all of it is.
            if self.triangle is None or group is groups[-1]:
                self._mirror()
                self._publish_sums(itertools.chain(*(x.done for x in groups)) if self.triangle else group.done)
            while can_come(number):
                issue()

    def _issue(self, part: Part) -> None:
        """Record the steps that fill a part."""
        for block in part.sources:
            chunk = self._in_chunk(block).buffer
            if chunk.name not in self._here:
                self._make(self.problem.matrices[part.operand].name, block.chunk, chunk)
        if part.sources and part.loaded:
            top, _, left, _ = part.matrix.box
            places = [(block.row, block.row + block.rows, block.col, block.col + block.cols) for block in part.sources]
            targets = [
                View(part.matrix.buffer, (top + r0, top + r1, left + c0, left + c1)) for r0, r1, c0, c1 in places
            ]
            self.call("join", *map(self._in_chunk, part.sources), *targets, reads=len(targets), whole=part.matrix)
        elif part.loaded:
            self.steps.append(Make(part.matrix, self.problem.matrices[part.operand].name, rect=part.rect))

    def _add_product(self, product: Multiply) -> None:
        a, b, kernel = product.a, product.b, "add_product" if product.add else "product"
        for block in self.blocks.values():
            inside = common((*a.rect[:2], *b.rect[2:]), block.rect)
            for part in filter(None, self.triangle.kept(inside) if self.triangle and inside else (inside,)):
                r0, r1, c0, c1 = part
                bias = () if self.bias is None else (self.bias.part((0, 1, c0, c1)),)
                matrices = a.part((r0, r1, *a.rect[2:])), b.part((*b.rect[:2], c0, c1)), block.part(part)
                self.call(kernel, *bias, *matrices, reads=len(bias), transposed=(a.transposed, b.transposed))

    def _mirror(self) -> None:
        """Record the copies that complete a symmetric D: an element (i, j) is that at (j, i), or its conjugate."""
        pairs = [
            (source.part((j0, j1, i0, i1)), target.part((i0, i1, j0, j1)))
            for part in (self.triangle.copied() if self.triangle else ())
            for target, source in itertools.product(self.blocks.values(), repeat=2)
            for inside in filter(None, (common(part, target.rect),))
            for i0, i1, j0, j1 in filter(None, (common(inside, (*source.rect[2:], *source.rect[:2])),))
        ]
        if pairs:
            lower, upper = zip(*pairs, strict=True)
            self.call("store", *lower, *upper, reads=len(pairs), transposed=True)

    # Sums over k

    def _final_parts(self, rank: int) -> list[Buffer | View]:
        return [self.blocks[0].part(rect) for rect in merged(self.plan.final_rects(rank))]

    def _publish_sums(self, done: Iterator[int] | tuple[int, ...]) -> None:
        """Publish other ranks' parts of the sums; add those of other ranks that are complete to this rank's."""
        for to in done:
            self.complete += 1
            if to != self.me and (parts := self._final_parts(to)):
                self._give({to: parts}, self.me)
        # The host waits for them, so that this GPU is to have a slab more to multiply.
        count = len(self.plan.ranks)
        while self.coming and (self.me - self.coming[0]) % count <= self.complete - 2:
            self._add_sums()

    def _add_sums(self) -> None:
        owner = self.coming.popleft()
        self.pull(owner, self._key(owner, self.me), tuple(self._final_parts(self.me)), op="add")

    def sum_up(self) -> None:
        """Add the remaining partial sums."""
        while self.coming:
            self._add_sums()

    # The formula

    def hand_over(self) -> None:
        """Apply the formula to this rank's chunks of D, or round them; hand them over."""
        problem, formula, parts = self.problem, self.problem.formula, dict[tuple[str, Rect], Buffer]()
        if not problem.finished or native(self.plan) is not None:
            for index, chunk in self.of_d.items():
                result = chunk.matrix
                if problem.d.dtype != self.dtype:
                    result = Buffer(f"rounded.{index}", chunk.matrix.shape, problem.d.dtype)
                    self.call("copy", chunk.matrix, result)
                self.leave("", result, index)
            return
        names = problem.operands[2:]
        for rect, name in itertools.product([chunk.rect for chunk in self.of_d.values()], names):
            at = name, self._read_of(name, rect)
            if at not in parts:
                parts[at] = self._load(*at)
        for index, (sums, rect, _) in self.of_d.items():
            results = [Buffer(f"{x.name}@{index}", x.chunk_shape(index), x.dtype) for x in problem.outputs]
            read = [parts[name, self._read_of(name, rect)] for name in names]
            self.call("finish_into", *read, sums, *results, reads=len(read), names=names, formula=formula)
            for output, buffer in zip(problem.outputs, results, strict=True):
                self.leave(output.name, buffer, index)


def merged(rects: Sequence[Rect]) -> list[Rect]:
    """Merge rectangles into larger ones: neighbours in a row first, then rows of equal columns."""
    for own, across in ((2, 0), (0, 2)):
        rows: list[Rect] = []
        for rect in rects:
            if rows and rows[-1][across : across + 2] == rect[across : across + 2] and rows[-1][own + 1] == rect[own]:
                before = list(rows.pop())
                before[own + 1] = rect[own + 1]
                rect = (before[0], before[1], before[2], before[3])  # noqa: PLW2901
            rows.append(rect)
        rects = rows
    return list(rects)


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


def _stored_soon(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Store each buffer after its last use, so that results are copied to the host while others are computed."""
    last, at = dict[str, int](), collections.defaultdict[int, list[Step]](list)
    for number, step in enumerate(steps):
        match step:
            case Call(_, buffers) | Publish(_, buffers) | Pull(_, _, buffers):
                last |= dict.fromkeys((x.name for x in buffers), number)
            case Store(buffer):
                at[last[buffer.name]].append(step)
                continue
        at[number].insert(0, step)
    return tuple(itertools.chain(*(at[number] for number in range(len(steps)))))
