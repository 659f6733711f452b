"""The steps of a rank of a product: what it reads, multiplies, adds up and hands over. Pure.

A rank walks over its part of k in panels. For each it needs rows of A and columns of B. Chunks that are here are used
as they lie; the others are asked for some panels ahead. Panels that need nothing from others come first, and each rank
starts at another place, so that not all ask the same worker at once::

    asked for    [ 3 ][ 4 ]                      on their way
    multiplied        [ 2 ]                      D += A[:, panel] @ B[panel, :]
    done         [ 0 ][ 1 ]

Chunks of operands that are here need no step. Those that the rank makes itself are multiplied as soon as they are
there, while the next ones are made. D is summed up right in the chunks of the result where these are large enough
(`Plan.packing`). With several ranks along k, partial sums are then read from the others and added up where
`Plan.final_rects` says; parts of chunks that other ranks have computed come last.

Where B is A transposed, as in ``X.T @ X``, a part of both is read once, and of blocks of D on the diagonal, and of
pairs of blocks across it, the lower triangle is made; the upper one is its mirror image.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.cuts import Rect, chunk_cuts, overlaps, padded, pieces_of, shape_of
from dask_distmm.planning.footprint import panel_width
from dask_distmm.planning.placement import EVERYWHERE, GATHERED
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import is_gram
from dask_distmm.planning.program import remembered
from dask_distmm.programs.recorder import Recorder, Rows
from dask_distmm.programs.steps import PART, Buffer, Key, Publish, Step, View

# Products of fewer rows, or a shorter k, are not worth the mirroring.
_SYMMETRIC = 64
# Lists of plans of more bytes are not kept for the next run: there are thousands of chunks.
LONG = 2**14


# Parts of chunks, and the order in which a rank multiplies them


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


# Parts of chunks of A, and of B.
Pieces = tuple[list[ChunkBlock], list[ChunkBlock]]


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
    along_k = problem.a.chunks[1], problem.b.chunks[0]
    starts = (low for sizes in along_k for _, low, _ in overlaps(chunk_cuts(sizes), k0, k1))
    cuts = coalesce(sorted({*starts, k1}), int(panel_width(problem, r1 - r0 + c1 - c0, k1 - k0)))
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


# The steps


def chunk_name(operand: str, number: int) -> str:
    """Return the name of a chunk's buffer; inputs of the formula may be called as other buffers are, "d" or "sum"."""
    return f"{operand}.{number}" if operand in ("a", "b") else f"of-{operand}.{number}"


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
        rows, cols = slice(r0 - top, r1 - top), slice(c0 - left, c1 - left)
        return self.matrix[cols, rows] if self.transposed else self.matrix[rows, cols]


# Parts of A and B that are multiplied with each other: of one operand, and groups of the other one.
MultiplyStage = tuple[list[ChunkBlock], list[list[ChunkBlock]]]


def steps(plan: Plan, rank: int, begun: Collection[int] = ()) -> tuple[Step, ...]:
    """Return the steps of a rank, which has sums already in chunks of D that were begun, and adds to these."""
    return remembered((deciding(plan),), (rank, *sorted(begun)), lambda: record(plan, rank, begun), LONG)


def deciding(plan: Plan) -> Plan:
    """Return what lists of steps follow from: all that came to this worker, but names and constants of machines."""
    options = dataclasses.replace(plan.problem.options, machines=())
    problem = dataclasses.replace(plan.problem, name="", whole="", options=options)
    return dataclasses.replace(plan, problem=problem, participants=())


def record(plan: Plan, rank: int, begun: Collection[int] = ()) -> tuple[Step, ...]:
    """Record the steps of a rank."""
    p = _Chunks(plan, rank, begun)
    p.begin()
    p.multiply(_stages_of_sources(plan, rank) if plan.problem.by_ranks else _stages_of_panels(plan, rank))
    p.sum_up()
    p.assemble()
    p.hand_over()
    return p.end()


def _stages_of_panels(plan: Plan, rank: int) -> list[MultiplyStage]:
    """Return the stages of a rank that has chunks in memory, local chunks first."""
    turns: list[MultiplyStage] = []
    for panel in panels(plan, rank):
        (a, b), far = panel.local, panel.remote.values()
        far_a, far_b = ([*itertools.chain(*(some[operand] for some in far))] for operand in (0, 1))
        apart = far and not {*"ab"} & {*plan.packing}
        turns += [(a, [b]), (far_a, [b + far_b]), (a, [far_b])] if apart else [(a + far_a, [b + far_b])]
    return turns


def _stages_of_sources(plan: Plan, rank: int) -> list[MultiplyStage]:
    """Return the stages of a rank that computes chunks itself, in an order in which few chunks are held.

    Each part of the operand whose chunks it makes, of A where it makes both, comes with those of the other one along
    the same k, and all follow k.
    """
    pieces = sorted(_pieces(plan, rank, *plan.k_range(rank)), key=lambda piece: (piece.depth[0], piece.row + piece.col))
    outer = int(not plan.problem.a.by_ranks)
    own, inner = ([piece for piece in pieces if piece.operand == number] for number in (outer, 1 - outer))
    return [([y], [[x] for x in inner if x.depth[0] < y.depth[1] and y.depth[0] < x.depth[1]]) for y in own]


class Product(Recorder):
    """Base of the recorders of products: where sums are, and how they become chunks of D."""

    def __init__(self, plan: Plan, rank: int, dtype: str, begun: Collection[int] = (), *, packed: bool) -> None:
        super().__init__(rank, Rows((), (), len(plan.ranks)), dtype)
        self.plan, self.problem, self.begun, self.region = plan, plan.problem, begun, plan.region(rank)
        self.where = {name: where.tolist() for name, where in plan.where.items()}
        # Sums are in one matrix, or in a block for each part of a chunk.
        self.packed = packed
        self.cuts = (self.region[:2], self.region[2:]) if packed else plan.chunk_cuts
        self.blocks: dict[int, Placed] = {}
        # This rank's chunks of D.
        self.of_d: dict[int, Placed] = {}

    def _key(self, number: int, reader: int) -> Key:
        # Messages of one number are asked for together: those of finished parts.
        return Key(PART, number * len(self.plan.ranks) + reader)

    def _give(self, parts: Mapping[int, Sequence[Any]], number: int) -> None:
        """Publish parts of sums."""
        self.steps += (Publish(self._key(number, to), tuple(some), once=True) for to, some in parts.items())

    def allocate(self, dtype: str, *, zero: bool, chunks: bool) -> None:
        """Name the chunks of D, of a type, and the blocks of the sums, and allocate what does not exist yet."""
        for index in self.plan.owned(self.me).tolist():
            rect = self.plan.chunk_rect(index)
            chunk = Buffer(f"d.{index}", shape_of(rect), dtype)
            self.of_d[index] = Placed(chunk, rect)
            if index in self.begun:
                self._make("partial", index, chunk, donated=True)
            elif chunks:
                self.new(chunk, zero=zero)
        for at, (index, rect) in enumerate(pieces_of(self.cuts, self.region)):
            sums = Buffer(f"sum.{at}", shape_of(rect), self.dtype)
            inside = index in self.of_d and not self.packed
            self.blocks[index] = Placed(self.of_d[index].part(rect) if inside else sums, rect)
            if not inside:
                self.new(sums, zero=zero)

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

    def _read_of(self, name: str, rect: Rect) -> Rect:
        """Return the part that the formula reads of an operand for a part of D."""
        down, across = self.problem.varies(name)
        return (*(rect[:2] if down else (0, 1)), *(rect[2:] if across else (0, 1)))


class _Chunks(Product):
    """Records the steps of a rank that multiplies chunks, and panels that they are copied to."""

    def __init__(self, plan: Plan, rank: int, begun: Collection[int]) -> None:
        super().__init__(plan, rank, plan.problem.compute_type.name, begun, packed="d" in plan.packing)
        self.packing, self.gram, self.keeps = plan.packing, is_gram(plan.problem), plan.kept
        self.conjugated = tuple(self.problem[name].conjugated and name not in self.packing for name in "ab")
        # Blocks above and on the diagonal, and of which ones' lower triangles they are made at the end.
        self.mirrored: dict[int, int] = {}
        # Parts of chunks of operands that are here; numbers of messages.
        self.at: dict[ChunkBlock, Placed] = {}
        self.needed: Collection[ChunkBlock] = ()
        # Those of them that are freed after their last use.
        self.held: list[ChunkBlock] = []
        self.asked = itertools.count()
        # Parts that have come of an operand that is kept, by chunk; matrices that parts were copied to, by their place.
        self.kept = collections.defaultdict[int, list[ChunkBlock]](list)
        self.joined: dict[Rect, Placed] = {}

    # Sums

    def begin(self) -> None:
        """Allocate the memory of sums."""
        plan = self.plan
        dtype = self.problem.d.dtype if self.problem.formula.trivial or not self.packed else self.dtype
        self.allocate(dtype, zero=True, chunks=not self.packed)
        for index, cell in pieces_of(plan.chunk_cuts, self.region) if self.packed and self.begun else ():
            if index in self.begun:
                self.call("store", self.of_d[index].part(cell), self.blocks[0].part(cell), reads=1)
        # Of one matrix some parts may have been begun.
        even = self.gram and (not self.packed or len(self.begun) in (0, self.problem.d.count))
        by_rect = {block.rect: index for index, block in self.blocks.items() if even}
        for (r0, r1, c0, c1), index in by_rect.items():
            lower = by_rect.get((c0, c1, r0, r1), -1)
            large = r0 < c0 or (r0 == c0 and r1 - r0 >= _SYMMETRIC)
            if large and lower >= 0 and (lower in self.begun) == (index in self.begun):
                self.mirrored[index] = lower

    # Operands

    def _once(self, piece: ChunkBlock) -> ChunkBlock:
        """Return the piece of B that is a piece of A transposed, if both are needed."""
        if piece.operand or not self.gram or self.keeps:
            return piece
        row, col = divmod(piece.chunk, self.problem.a.counts[1])
        _, _, r0, c0, rows, cols, top, left = piece
        twin = ChunkBlock(1, col * self.problem.b.counts[1] + row, c0, r0, cols, rows, left, top)
        return twin if twin in self.needed else piece

    def fetch(self, pieces: Iterable[ChunkBlock]) -> None:
        """Receive parts of chunks: one message from each holder, all of which are requested together."""
        requests, at = collections.defaultdict[int, list[tuple[Any, ...]]](list), self.at
        near, matrices, gram = (self.plan.ranks[self.me], EVERYWHERE), self.problem.matrices, self.gram
        for wanted in pieces:
            piece = self._once(wanted) if gram else wanted
            if piece not in at:
                operand, number, r0, c0, rows, cols, row, col = piece
                matrix, box = matrices[operand], (r0, r0 + rows, c0, c0 + cols)
                rect = row, row + rows, col, col + cols
                holder = EVERYWHERE if matrix.by_ranks else self.where[matrix.name][number]
                if holder in near:
                    shape = matrix.chunk_shape(number)
                    chunk = Buffer(chunk_name(matrix.name, number), shape, matrix.dtype)
                    if matrix.by_ranks:
                        self._make(matrix.name, number, chunk)
                        self.held.append(piece)
                    at[piece] = Placed(chunk if (rows, cols) == shape else View(chunk, box), rect)
                else:
                    part = Buffer(f"{matrix.name}.{number}.{r0}.{c0}", (rows, cols), matrix.dtype)
                    at[piece] = Placed(part, rect)
                    requests[holder].append((part, (operand, number, *box)))
                    (self.kept[number] if matrix.name in self.keeps else self.held).append(piece)
            if wanted is not piece:
                at[wanted] = Placed(at[piece].matrix, wanted.rect, transposed=True)
        number = next(self.asked) if requests else 0
        for holder, some in requests.items():
            buffers, boxes = zip(*some, strict=True)
            self.pull(holder, Key("input", number), buffers, taken=True, boxes=boxes)

    def free(self, pieces: Iterable[ChunkBlock]) -> None:
        """Free parts of chunks."""
        names = [self.at.pop(piece).matrix.name for piece in pieces]
        self.drop(*(self._here[name] for name in names if name in self._here))

    def join(self, parts: Sequence[Placed], dtype: str = "", **how: Any) -> Placed:
        """Join the parts that cover a rectangle in a new matrix, of the type of the sums or another one."""
        top, bottom, left, right = rect = _around(parts)
        whole = self.small(bottom - top, right - left, dtype)
        places = [(r0 - top, r1 - top, c0 - left, c1 - left, transposed) for _, (r0, r1, c0, c1), transposed in parts]
        self.call("join", *(part.matrix for part in parts), whole, reads=len(parts), places=places, **how)
        return Placed(whole, rect)

    # Products

    def multiply(self, turns: Sequence[MultiplyStage]) -> None:
        """Add all products to the sums; parts of chunks are here as long as they are needed."""
        problem = self.problem
        last: dict[ChunkBlock, int] = {}
        for number, (own, some) in enumerate(turns):
            last.update(dict.fromkeys(itertools.chain(own, *some), number))
        if self.gram:
            self.needed, uses = set(last), sorted(last.items(), key=lambda item: item[1])
            last = {self._once(piece): number for piece, number in uses}
        by_ranks = problem.by_ranks
        if by_ranks:
            self.fetch(piece for piece in last if not problem.matrices[piece.operand].by_ranks)
        for number, (own, some) in enumerate(turns):
            self.fetch(own if by_ranks else itertools.chain(own, *some))
            with self.copied(own) as firsts:
                for group in some:
                    self.fetch(group if by_ranks else ())
                    with self.copied(group) as seconds:
                        for pair in itertools.product(firsts, seconds):
                            self.add(*pair[:: -1 if own[0].operand else 1])
            self.free(piece for piece in self.held if last[piece] == number)
            self.held = [piece for piece in self.held if last[piece] != number]
        for upper, lower in self.mirrored.items():
            self.call("mirror", *dict.fromkeys((self.blocks[upper].matrix, self.blocks[lower].matrix)))

    @contextlib.contextmanager
    def copied(self, pieces: Sequence[ChunkBlock]) -> Iterator[list[Placed]]:
        """Yield parts of A or B as they are multiplied: in place, or copied to one matrix of the type of the sums."""
        placed = [self.at[piece] for piece in pieces]
        if not pieces or (name := "ab"[pieces[0].operand]) not in self.packing:
            yield placed
            return
        if self.joined and self.gram and self.dtype == self.real:
            rect = _around(placed)
            if twin := self.joined.get((*rect[2:], *rect[:2])):
                yield [Placed(twin.matrix, rect, transposed=True)]
                return
        whole = self.join(placed, conjugated=self.problem[name].conjugated, rounded=self.problem.compute == "tf32")
        self.joined[whole.rect] = whole
        yield [whole]
        self.joined.pop(whole.rect, None)
        self.drop(whole.matrix)  # type: ignore[arg-type]

    def add(self, a: Placed, b: Placed) -> None:
        """Add a product to the blocks that it is a part of."""
        k0, k1 = max(a.rect[2], b.rect[0]), min(a.rect[3], b.rect[1])
        for index, (r0, r1, c0, c1) in pieces_of(self.cuts, (*a.rect[:2], *b.rect[2:])) if k0 < k1 else ():
            lower = self.mirrored.get(index)
            if lower is None or (lower == index and c0 < r1):
                symmetric = lower == index and (r0, r1) == (c0, c1) and min(r1 - r0, k1 - k0) >= _SYMMETRIC
                how: dict[str, Any] = {"transposed": (a.transposed, b.transposed), "conjugated": self.conjugated}
                block = self.blocks[index].part((r0, r1, c0, c1))
                parts = a.part((r0, r1, k0, k1)), b.part((k0, k1, c0, c1)), block
                self.call("add_symmetric" if symmetric else "add_product", *parts, **how)

    # Chunks of D

    def sum_up(self) -> None:
        """Add the other ranks' partial sums to this rank's part of D, in an order that is the same every time."""
        ranks = range(len(self.plan.ranks) if self.plan.grid[2] > 1 else 0)
        parts = {rank: self._final_parts(rank) for rank in ranks}
        # Not all ranks begin with the same one.
        peers = [*ranks[self.me + 1 :], *ranks[: self.me]]
        self._give({reader: parts[reader] for reader in peers if parts[reader]}, self.me)
        for owner in peers if ranks and parts[self.me] else ():
            self.pull(owner, self._key(owner, self.me), tuple(parts[self.me]), op="add")

    def _final_parts(self, rank: int) -> list[Any]:
        rects = self.plan.final_rects(rank)
        return [self.blocks[index].part(cell) for rect in rects for index, cell in pieces_of(self.cuts, rect)]

    def hand_over(self) -> None:
        """Apply the formula to this rank's chunks of D, one by one, and hand them over, and what is kept."""
        formula, outputs, names = self.problem.formula, self.problem.outputs, self.problem.operands
        rest = dataclasses.replace(formula, partial=False)
        for index, (chunk, rect, _) in self.of_d.items():
            continues = index in self.begun
            # Sums that were begun are complete now, and may be all there is to do.
            if formula.trivial or (continues and rest.trivial):
                self.leave("", chunk, index)
                continue
            read = [name for name in names[2:] if (name != "partial" or not continues) and 0 not in chunk.shape]
            pieces = [
                chunk_blocks_of(self.problem[name].chunks, names.index(name), self._read_of(name, rect), (0, 0))
                for name in read
            ]
            self.fetch(itertools.chain(*pieces))
            inputs = [self._whole(some, self.problem[name].dtype) for name, some in zip(read, pieces, strict=True)]
            results = [Buffer(f"{x.name}@{index}", x.chunk_shape(index), x.dtype) for x in outputs]
            how: dict[str, Any] = {"formula": rest if continues else formula, "dtypes": [x.dtype for x in outputs]}
            self.call("finish", *inputs, chunk, makes=results, reads=len(inputs), names=read, **how)
            self.free(itertools.chain(*pieces))
            self.drop(chunk, *inputs)  # type: ignore[arg-type]
            for output, buffer in zip(outputs, results, strict=True):
                self.leave(output.name, buffer, index)
        for number, some in self.kept.items():
            matrix = self.problem[self.problem.gathered]
            if sum(piece.rows * piece.cols for piece in some) == matrix.elements[number]:
                self.leave(GATHERED, self._whole(some, matrix.dtype), number)

    def _whole(self, pieces: Sequence[ChunkBlock], dtype: str) -> Any:
        placed = [self.at[piece] for piece in pieces]
        return (placed[0] if len(placed) == 1 else self.join(placed, dtype)).matrix


def _around(parts: Sequence[Placed]) -> Rect:
    """Return the rectangle that parts cover."""
    tops, bottoms, lefts, rights = zip(*(placed.rect for placed in parts), strict=True)
    return min(tops), max(bottoms), min(lefts), max(rights)
