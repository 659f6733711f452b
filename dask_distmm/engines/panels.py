"""In which order a rank walks over its part of k, and what it needs from whom for each panel. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from dask_distmm.planning import Chunks, Plan
from dask_distmm.planning.cuts import Rect, chunk_cuts, overlaps, padded
from dask_distmm.planning.footprint import panel_width
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.problem import is_gram


class ChunkBlock(NamedTuple):
    """A rectangle of a chunk of A (operand 0) or B (1), and where it is in the whole matrix."""

    operand: int
    chunk: int
    r0: int
    c0: int
    rows: int
    cols: int
    row: int
    col: int

    @property
    def inside(self) -> tuple[slice, slice]:
        """Where it is in the chunk."""
        return slice(self.r0, self.r0 + self.rows), slice(self.c0, self.c0 + self.cols)

    @property
    def place(self) -> tuple[slice, slice]:
        """Where it is in the whole matrix."""
        return slice(self.row, self.row + self.rows), slice(self.col, self.col + self.cols)

    @property
    def depth(self) -> tuple[int, int]:
        """Its range of k."""
        return (self.col, self.col + self.cols) if self.operand == 0 else (self.row, self.row + self.rows)


class Panel(NamedTuple):
    """A stretch of k: pieces that are at home, and pieces to ask each other participant for."""

    k0: int
    k1: int
    local: list[ChunkBlock]
    remote: dict[int, list[ChunkBlock]]


def panels(plan: Plan, rank: int, me: int) -> list[Panel]:
    """Return the panels of a rank in the order in which it multiplies them.

    Every element of ``A[rows, depth]`` and ``B[depth, cols]`` is in exactly one piece. Panels that need
    nothing from others come first; the rest begins at another place on each rank.
    """
    k0, k1 = plan.k_range(rank)
    pieces = _pieces(plan, rank)
    height, cols, depth = (int(extents[rank]) for extents in plan.extents)
    width = int(panel_width(plan.problem, height + cols, depth))
    cuts = coalesce(sorted({k0, k1, *(piece.depth[0] for piece in pieces)}), width)
    made = [Panel(low, high, [], {}) for low, high in itertools.pairwise(cuts)]
    for piece in pieces:
        start, stop = piece.depth
        holder = int(plan.where["ab"[piece.operand]][piece.chunk])
        for number, low, high in overlaps(cuts, start, stop):
            cut = _along_k(piece, low - start, high - low)
            here = holder in (me, EVERYWHERE)
            (made[number].local if here else made[number].remote.setdefault(holder, [])).append(cut)
    turn = rank * len(made) // len(plan.ranks)
    order = sorted(range(len(made)), key=lambda x: (bool(made[x].remote), (x - turn) % len(made)))
    return [made[x] for x in order]


def _pieces(plan: Plan, rank: int) -> list[ChunkBlock]:
    """Return the parts of chunks that a rank multiplies, first those of A."""
    problem, (r0, r1, c0, c1), along_k = plan.problem, plan.region(rank), plan.k_range(rank)
    of_a = chunk_blocks_of(problem.a.chunks, 0, (r0, r1, *along_k), (0, 0))
    return of_a + chunk_blocks_of(problem.b.chunks, 1, (*along_k, c0, c1), (0, 0))


def pairs(plan: Plan, rank: int) -> list[tuple[ChunkBlock, list[ChunkBlock]]]:
    """Return the parts of chunks that a rank multiplies where it makes chunks itself, so ordered that few are held.

    Each part of the operand whose chunks it makes, of A where it makes both, comes with those of the other one along
    the same k, and all follow k.
    """
    outer = 0 if plan.problem.a.by_ranks else 1
    pieces = sorted(_pieces(plan, rank), key=lambda piece: (piece.depth[0], piece.row + piece.col))
    own, other = ([piece for piece in pieces if piece.operand == number] for number in (outer, 1 - outer))
    return [
        (piece, [one for one in other if one.depth[0] < piece.depth[1] and piece.depth[0] < one.depth[1]])
        for piece in own
    ]


def twins(plan: Plan, pieces: Sequence[ChunkBlock]) -> tuple[list[ChunkBlock], list[tuple[ChunkBlock, int]]]:
    """Return the pieces to ask for, and those of A that are one of these transposed, with its place among them.

    Where A and B are made of the same chunks, as in ``X.T @ X``, a piece of both travels once.
    """
    problem = plan.problem
    if not is_gram(problem):
        return list(pieces), []
    acols, bcols = problem.a.counts[1], problem.b.counts[1]
    asked = [piece for piece in pieces if piece.operand == 1]
    number = {(p.chunk, p.r0, p.c0, p.rows, p.cols): at for at, p in enumerate(asked)}
    found = []
    for piece in pieces:
        if piece.operand == 0:
            row, col = divmod(piece.chunk, acols)
            at = number.get((col * bcols + row, piece.c0, piece.r0, piece.cols, piece.rows))
            if at is None:
                asked.append(piece)
            else:
                found.append((piece, at))
    return asked, found


def _along_k(piece: ChunkBlock, offset: int, size: int) -> ChunkBlock:
    if piece.operand == 0:
        return piece._replace(c0=piece.c0 + offset, cols=size, col=piece.col + offset)
    return piece._replace(r0=piece.r0 + offset, rows=size, row=piece.row + offset)


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
