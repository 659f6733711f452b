"""The steps of a rank of a product: what it loads, multiplies, adds up and hands over. Pure.

A rank takes the groups of its schedule (`planning.groups`), the same on CPUs and GPUs. A load is a step of its own. On
CPUs it comes some groups before its products. On GPUs it comes as soon as the products that use its buffer are on their
way, but behind the first of those that come next: it takes the host as long to put a load on a stream as it takes a GPU
to do it; and all buffers are there from the start to the end.

D is summed up right in the chunks of the result where these are large enough (`Plan.packing`, `schedule.in_chunks`).
With several ranks along k, partial sums are then read from the others and added up where `Plan.final_rects` says; parts
of chunks that other ranks have computed come last.

Where B is A transposed, as in ``X.T @ X``, of blocks of D on the diagonal, and of pairs of blocks across it, the lower
triangle is made; the upper one is its mirror image. On GPUs that is a `Triangle`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dask_distmm.planning.cuts import Rect, common, pieces_of, shape_of
from dask_distmm.planning.groups import (
    DeviceSchedule,
    Group,
    Multiply,
    PanelSchedule,
    Part,
    Placed,
    Usable,
    chunk_blocks_of,
    rect_around,
)
from dask_distmm.planning.placement import GATHERED
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import is_gram
from dask_distmm.planning.program import remembered
from dask_distmm.planning.schedule import in_chunks, native, square_on_diagonal, sums_in
from dask_distmm.programs.recorder import Recorder, Rows
from dask_distmm.programs.steps import PART, Buffer, Call, Key, Load, Publish, Pull, Step, Store, View

# Products of fewer rows, or a shorter k, are not worth the mirroring.
_SYMMETRIC = 64
# Lists of plans of more bytes are not kept for the next run: there are thousands of chunks.
_LONG = 2**14
# Lists that are kept for plans that are alike, whose chunks may be stored differently.
_KEPT = 4


def steps(plan: Plan, rank: int, begun: Collection[int], usable: Usable | None) -> tuple[Step, ...]:
    """Return the steps of a rank, which adds to chunks of D that were begun.

    `usable` says which chunks in the memory of a GPU can be multiplied as they are; None on CPUs.
    """
    if plan.problem.by_ranks and usable is not None:  # their steps follow from machines, too
        return record(plan, rank, begun, usable)
    answers: dict[tuple[int, int], bool] = {}
    kept: list[tuple[dict[tuple[int, int], bool], tuple[Step, ...]]]
    kept = remembered((_deciding(plan),), (rank, *sorted(begun)), list, _LONG)
    for before, before_steps in kept:
        if usable is None or all(usable(*chunk) == answer for chunk, answer in before.items()):
            return before_steps

    def answered(operand: int, number: int) -> bool:
        assert usable is not None
        if (operand, number) not in answers:
            answers[operand, number] = usable(operand, number)
        return answers[operand, number]

    recorded = record(plan, rank, begun, answered if usable else None)
    kept[:] = [*kept[1 - _KEPT :], (answers, recorded)]
    return recorded


def _deciding(plan: Plan) -> Plan:
    """Return what lists of steps follow from: all that came to this worker, but names and constants of machines."""
    options = dataclasses.replace(plan.problem.options, machines=())
    problem = dataclasses.replace(plan.problem, name="", whole="", options=options)
    return dataclasses.replace(plan, problem=problem, participants=())


def record(plan: Plan, rank: int, begun: Collection[int] = (), usable: Usable | None = None) -> tuple[Step, ...]:
    """Record the steps of a rank."""
    p = Product(plan, rank, begun, usable)
    groups = p.schedule.groups()
    p.begin()
    p.add_groups(groups)
    p.sum_up()
    p.assemble()
    p.hand_over()
    return p.end() if usable is None else _stored_soon(p.end())


class Product(Recorder):
    """Records the steps of a rank."""

    def __init__(self, plan: Plan, rank: int, begun: Collection[int], usable: Usable | None) -> None:
        self.on_cpus, problem = usable is None, plan.problem
        dtype = (problem.compute_type if self.on_cpus else sums_in(plan)).name
        super().__init__(rank, Rows((), (), len(plan.ranks)), dtype)
        self.plan, self.problem, self.begun, self.region = plan, problem, begun, plan.region(rank)
        self.schedule = PanelSchedule(plan, rank) if usable is None else DeviceSchedule(plan, rank, usable)
        # Sums are in one matrix, or in a block for each part of a chunk. On GPUs D is multiplied into its chunks if all
        # are large, or if the rank's part of it is within one of its own.
        self.packed = "d" in plan.packing
        if not self.on_cpus:
            inside = [index for index, _ in pieces_of(plan.chunk_cuts, self.region)]
            within = plan.grid[2] == self.schedule.multiple == len(inside) == 1 and int(plan.owners[inside[0]]) == rank
            self.packed = not (in_chunks(plan)[plan.coords(rank)[:2]] or within)
        self.cuts = (self.region[:2], self.region[2:]) if self.packed else plan.chunk_cuts
        self.blocks: dict[int, Placed] = {}
        # This rank's chunks of D.
        self.of_d: dict[int, Placed] = {}
        # The bias, if the library adds it.
        self.bias: Placed | None = None
        # On GPUs the square of which a triangle is multiplied. On CPUs blocks above and on the diagonal, and of which
        # ones' lower triangles they are made at the end.
        self.triangle = None if self.on_cpus else square_on_diagonal(plan, rank, native(plan))
        self.mirrored: dict[int, int] = {}
        # Loads, each with the group which is to be over before; the identities of parts that are there or on their way.
        self.pending, self.issued = collections.deque[tuple[tuple[Part, ...], int]](), set[int]()
        # Parts of a gathered operand that come from others.
        self.gathered: list[Part] = []
        # Ranks whose sums are to be added: the one before this one computes this rank's part right after its own.
        behind_me = range(1, len(plan.ranks)) if plan.grid[2] > 1 and plan.final_rects(rank) else ()
        self.coming, self.complete = collections.deque((rank - behind) % len(plan.ranks) for behind in behind_me), 0
        # Whether the formula is applied to chunks of D. On GPUs the library may do it, and sums may be rounded.
        self.finished = not problem.formula.trivial if self.on_cpus else problem.finished and native(plan) is None
        # What it reads for each chunk, and which parts of that are there or on their way.
        self.inputs: list[dict[str, Rect]] = []
        self.inputs_loaded, self.parts = 0, dict[tuple[str, Rect], Buffer | View]()

    def _key(self, number: int, reader: int) -> Key:
        # Messages of one number are asked for together: those of finished parts.
        return Key(PART, number * len(self.plan.ranks) + reader)

    def _give(self, parts: Mapping[int, Sequence[Any]], number: int) -> None:
        """Publish parts of sums."""
        self.steps += (Publish(self._key(number, to), tuple(some), once=True) for to, some in parts.items())

    # Sums

    def begin(self) -> None:
        """Allocate panels, sums and chunks of D; load the bias where the library adds it."""
        plan, problem, dtype = self.plan, self.problem, self.dtype
        if self.on_cpus and (problem.formula.trivial or not self.packed):
            dtype = problem.d.dtype
        # On CPUs they are allocated when they are needed.
        self.new(*(() if self.on_cpus else self.schedule.slots.values()))
        for index in plan.owned(self.me).tolist():
            rect = plan.chunk_rect(index)
            chunk = Buffer(f"d.{index}", shape_of(rect), dtype)
            self.of_d[index] = Placed(chunk, rect)
            if index in self.begun:
                self._take_chunk("partial", index, chunk, donated=True)
            elif not (self.on_cpus and self.packed):
                self.new(chunk, zero=self.on_cpus)
            self.inputs.append(self._inputs_of(index, rect))
        for at, (index, rect) in enumerate(pieces_of(self.cuts, self.region)):
            sums = Buffer(f"sum.{at}", shape_of(rect), self.dtype)
            inside = index in self.of_d and not self.packed
            self.blocks[index] = Placed(self.of_d[index].part(rect) if inside else sums, rect)
            if not inside:
                self.new(sums, zero=self.on_cpus)
        if self.on_cpus:
            self._continue()
        elif native(plan) is not None and "bias" in problem.formula.inputs:
            rect = (0, 1, *self.region[2:])
            bias = self._loaded("bias", rect)
            if (goal := problem.d.dtype) != bias.dtype:
                bias, loaded = self.small(1, bias.shape[1], goal), bias
                self.call("copy", loaded, bias)
            self.bias = Placed(bias, rect)

    def _continue(self) -> None:
        """Copy what was begun to the sums, and find the blocks that are mirrored."""
        for index, cell in pieces_of(self.plan.chunk_cuts, self.region) if self.packed and self.begun else ():
            if index in self.begun:
                self.call("store", self.of_d[index].part(cell), self.blocks[0].part(cell), reads=1)
        # Of one matrix some parts may have been begun.
        even = is_gram(self.problem) and (not self.packed or len(self.begun) in (0, self.problem.d.count))
        by_rect = {block.rect: index for index, block in self.blocks.items() if even}
        for (r0, r1, c0, c1), index in by_rect.items():
            lower = by_rect.get((c0, c1, r0, r1), -1)
            large = r0 < c0 or (r0 == c0 and r1 - r0 >= _SYMMETRIC)
            if large and lower >= 0 and (lower in self.begun) == (index in self.begun):
                self.mirrored[index] = lower

    # Loads and products

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Record loads and products: loads in their order, each once its memory is free."""
        # The names of the buffers of each group, and by these the last group that multiplies what is there.
        named, last = list[Collection[str]](), dict[str, int]()
        for number, group in enumerate(groups):
            for parts in group.loads:
                after = max(group.after, *(last.get(part.matrix.name, -1) for part in parts))
                self.pending.append((parts, after))
                if after < 0 and self.schedule.is_here(parts):
                    # Those on this GPU are there before the run.
                    self._issue(-1)
            named.append(_names({id(part): part for product in group.products for part in product.needs}.values()))
            last |= dict.fromkeys(named[-1], number)
        while self.on_cpus and self._can_come(-1):
            self._issue()
        stays = (*self.plan.kept, *(() if self.on_cpus else ("panel",)))
        for number, group in enumerate(groups):
            if self.on_cpus and group is groups[-1]:
                self._load_inputs(1)
            for product in group.products:
                for part in product.needs:
                    self._bring(part)
                self._add_product(product)
                if not self.on_cpus and self._can_come(number - 1):
                    self._issue()
            over = {name for name in named[number] if last[name] == number and name in self._here}
            self.drop(*(self._here[name] for name in sorted(over) if self._here[name].role not in stays))
            if group is groups[-1]:
                self._mirror()
            # Of a triangle nothing is complete before all of it is.
            if self.triangle is None:
                self._publish_sums(group.done)
            elif group is groups[-1]:
                self._publish_sums(itertools.chain(*(some.done for some in groups)))
            while self._can_come(number):
                self._issue()

    def _can_come(self, after: int) -> bool:
        """Whether the next load may be issued once a group is over."""
        return bool(self.pending) and self.pending[0][1] <= after

    def _issue(self, at: int = 0) -> None:
        """Load what is pending first, or last."""
        parts, _ = self.pending[at]
        del self.pending[at]
        self.issued.update(map(id, parts))
        self._here |= {part.matrix.name: part.matrix for part in parts if isinstance(part.matrix, Buffer)}
        self.gathered += (part for part in parts if "ab"[part.operand] in self.plan.kept)
        places, names, rects = zip(*((part.matrix, "ab"[part.operand], part.rect) for part in parts), strict=True)
        self.steps.append(Load(places, names, rects))

    def _bring(self, part: Part) -> None:
        """Record what brings a part, unless that is done."""
        while part.loaded and id(part) not in self.issued:
            self._issue()
        if id(part) in self.issued:
            return
        self.issued.add(id(part))
        for source in part.sources:
            self._bring(source)
        if part.how == "joined":
            self._join(part)
        elif part.how == "made" and part.matrix.name not in self._here:
            self._take_chunk("ab"[part.operand], part.matrix.number, part.matrix.buffer)

    def _join(self, part: Part) -> None:
        """Copy parts of chunks side by side to a panel."""
        if part.matrix.name not in self._here:
            self.new(part.matrix.buffer)
        targets = [part.placed.part(source.rect) for source in part.sources]
        turned = tuple(source.placed.transposed for source in part.sources)
        sources = [source.matrix for source in part.sources]
        self.call("join", *sources, *targets, reads=len(sources), whole=part.matrix, turned=turned)

    def _add_product(self, product: Multiply) -> None:
        """Add a product to the blocks that it is a part of."""
        a, b, kernel = product.a, product.b, "add_product" if product.add else "product"
        k0, k1 = max(a.rect[2], b.rect[0]), min(a.rect[3], b.rect[1])
        for index, whole in pieces_of(self.cuts, (*a.rect[:2], *b.rect[2:])) if k0 < k1 else ():
            for part, symmetric in self._multiplied(index, whole, k1 - k0):
                r0, r1, c0, c1 = part
                how: dict[str, Any] = {"transposed": (a.transposed, b.transposed)}
                matrices = [a.part((r0, r1, k0, k1)), b.part((k0, k1, c0, c1)), self.blocks[index].part(part)]
                if self.bias is not None:
                    matrices.insert(0, self.bias.part((0, 1, c0, c1)))
                    how["reads"] = 1
                self.call("add_symmetric" if symmetric else kernel, *matrices, **how)

    def _multiplied(self, index: int, rect: Rect, depth: int) -> Iterator[tuple[Rect, bool]]:
        """Yield the parts of a rectangle of a block that are multiplied; whether only the lower triangle of it is."""
        lower, (r0, r1, c0, c1) = self.mirrored.get(index), rect
        if self.triangle is not None:
            yield from ((part, False) for part in self.triangle.kept(rect))
        elif lower is None or (lower == index and c0 < r1):
            yield rect, lower == index and (r0, r1) == (c0, c1) and min(r1 - r0, depth) >= _SYMMETRIC

    def _mirror(self) -> None:
        """Record the copies that complete a symmetric D: an element (i, j) is that at (j, i), or its conjugate."""
        pairs = [
            (source.part((j0, j1, i0, i1)), target.part((i0, i1, j0, j1)))
            for part in (self.triangle.copied() if self.triangle else ())
            for target, source in itertools.product(self.blocks.values(), repeat=2)
            for inside in filter(None, (common(part, target.rect),))
            for i0, i1, j0, j1 in filter(None, (common(inside, (*source.rect[2:], *source.rect[:2])),))
        ]
        for upper, lower in self.mirrored.items():
            if upper == lower:
                self.call("mirror", self.blocks[upper].matrix)
            else:
                pairs.append((self.blocks[lower].matrix, self.blocks[upper].matrix))
        if pairs:
            below, above = zip(*pairs, strict=True)
            self.call("store", *below, *above, reads=len(pairs), transposed=True)

    # Sums over k

    def _final_parts(self, rank: int) -> list[Buffer | View]:
        rects = merged(self.plan.final_rects(rank))
        return [self.blocks[index].part(cell) for rect in rects for index, cell in pieces_of(self.cuts, rect)]

    def _publish_sums(self, done: Iterable[int]) -> None:
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

    # Chunks of D

    def assemble(self) -> None:
        """Complete this rank's chunks of D, and convert them to the type of the result."""
        plan = self.plan
        offered, wanted = (collections.defaultdict[int, list[Any]](list) for _ in range(2))
        own: list[tuple[Any, Any]] = []
        # Elements of this rank's chunks that it has itself.
        there = dict.fromkeys(self.of_d, 0)
        for index, cell in itertools.chain(*(pieces_of(plan.chunk_cuts, rect) for rect in plan.final_rects(self.me))):
            if index not in there:
                offered[int(plan.owners[index])].append(self.blocks[0 if self.packed else index].part(cell))
                continue
            there[index] += (cell[1] - cell[0]) * (cell[3] - cell[2])
            if self.packed:
                own.append((self.blocks[0].part(cell), self.of_d[index].part(cell)))
        self._give(offered, len(plan.ranks))
        for index, chunk in self.of_d.items():
            if chunk.matrix.name not in self._here:
                self.new(chunk.matrix, zero=bool(self.begun))  # type: ignore[arg-type]
            if there[index] < math.prod(chunk.matrix.shape):
                for holder, rect in plan.final_holders(index):
                    if holder != self.me:
                        wanted[holder].append(chunk.part(rect))
        if own:
            self.call("store", *itertools.chain(*zip(*own, strict=True)), reads=len(own))
        # Not all ranks begin with the same one.
        for holder in sorted(wanted, key=lambda rank: (rank - self.me) % len(plan.ranks)):
            # Where k is cut the sums of others have what was begun here.
            op = "add" if self.begun and plan.grid[2] == 1 else ""
            self.pull(holder, self._key(len(plan.ranks), self.me), tuple(wanted[holder]), op=op)

    # The formula

    def _inputs_of(self, index: int, rect: Rect) -> dict[str, Rect]:
        """Return the part of each operand that the formula reads for a chunk of D."""
        problem, parts = self.problem, dict[str, Rect]()
        for name in problem.operands[2:] if self.finished and all(shape_of(rect)) else ():
            # Sums that were begun are in the chunk.
            if name != "partial" or index not in self.begun:
                down, across = problem.varies(name)
                parts[name] = (*(rect[:2] if down else (0, 1)), *(rect[2:] if across else (0, 1)))
        return parts

    def _load_inputs(self, count: int) -> None:
        """Load what the formula reads for the first chunks of D; on CPUs chunks that are here are read as they lie."""
        start, self.inputs_loaded = self.inputs_loaded, max(self.inputs_loaded, count)
        for parts in self.inputs[start : self.inputs_loaded]:
            for name, rect in parts.items():
                if (name, rect) not in self.parts:
                    self.parts[name, rect] = self._in_chunk(name, rect) or self._loaded(name, rect)

    def _in_chunk(self, name: str, rect: Rect) -> Buffer | View | None:
        """Return the place of a part of an input that is in one chunk of this worker."""
        matrix, number = self.problem[name], self.problem.operands.index(name)
        block, *more = chunk_blocks_of(matrix.chunks, number, rect)
        alone = self.on_cpus and not more and self.schedule.has(block)
        return self.schedule.in_chunk(block, matrix.dtype) if alone else None

    def _loaded(self, name: str, rect: Rect) -> Buffer:
        """Load a part of an input to a new matrix."""
        buffer = self.small(*shape_of(rect), self.problem[name].dtype)
        if self.on_cpus:
            self._here[buffer.name] = buffer
        else:
            self.new(buffer)
        self.steps.append(Load((buffer if self.on_cpus else buffer[:, :],), (name,), (rect,)))
        return buffer

    def hand_over(self) -> None:
        """Apply the formula to this rank's chunks of D, or round them; hand them over, and what is kept."""
        problem, formula = self.problem, self.problem.formula
        rest, ahead = dataclasses.replace(formula, partial=False), problem.options.prefetch_panels
        last = {at: number for number, parts in enumerate(self.inputs) for at in parts.items()}
        for number, (index, (sums, _, _)) in enumerate(self.of_d.items()):
            self._load_inputs(number + 1 + ahead if self.on_cpus else len(self.inputs))
            if not self.finished or (index in self.begun and rest.trivial):
                result = sums
                if problem.d.dtype != sums.dtype:
                    result = Buffer(f"rounded.{index}", sums.shape, problem.d.dtype)
                    self.call("copy", sums, result)
                self.leave("", result, index)
                continue
            inputs = self.inputs[number]
            read = [self.parts[at] for at in inputs.items()]
            # On CPUs D takes the place of its sums.
            there = self.on_cpus and sums.dtype == problem.d.dtype
            results = [Buffer(f"{x.name}@{index}", x.chunk_shape(index), x.dtype) for x in problem.outputs[there:]]
            how: dict[str, Any] = {"names": tuple(inputs), "formula": rest if index in self.begun else formula}
            self.call("finish", *read, sums, *results, reads=len(read), **how)
            if self.on_cpus:
                over = [self.parts[at] for at in inputs.items() if last[at] == number]
                self.drop(*(place.buffer for place in over), *(() if there else (sums.buffer,)))
            for output, buffer in zip(problem.outputs, [*[sums] * there, *results], strict=True):
                self.leave(output.name, buffer, index)
        for number, some in itertools.groupby(sorted(self.gathered, key=_chunk), _chunk):
            self._keep(number, list(some))

    def _keep(self, number: int, parts: Sequence[Part]) -> None:
        """Hand over a chunk of a gathered operand if all of it has come."""
        matrix = self.problem[self.problem.gathered]
        if sum(math.prod(part.matrix.shape) for part in parts) == matrix.elements[number]:
            whole = parts[0].matrix
            if len(parts) > 1:
                whole = self.small(*matrix.chunk_shape(number), matrix.dtype)
                around = Placed(whole, rect_around(part.rect for part in parts))
                places = [around.part(part.rect) for part in parts]
                self.call("store", *(part.matrix for part in parts), *places, reads=len(parts))
            self.leave(GATHERED, whole, number)


def _chunk(part: Part) -> int:
    return part.matrix.number


def _names(parts: Iterable[Part]) -> set[str]:
    """Return the names of the buffers in which parts are, and those that they are made of."""
    names = set[str]()
    for part in parts:
        names.add(part.matrix.name)
        if part.sources:
            names |= _names(part.sources)
    return names


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
