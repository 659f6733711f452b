"""The memory that a rank sums its part of D into: one matrix, or right the chunks of the result."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.numpy.blas import add_lower, gemm, is_symmetric, mirror, reflect
from dask_distmm.engines.panels import ChunkBlock, split_at_chunks
from dask_distmm.numeric.types import round_tf32
from dask_distmm.planning import Plan, Problem
from dask_distmm.planning.plan import Rect
from dask_distmm.planning.problem import is_gram


class Block(NamedTuple):
    """A matrix and where it lies: rows and columns of D, or of a panel."""

    r0: int
    r1: int
    c0: int
    c1: int
    data: NDArray[Any]


def placed_block(piece: ChunkBlock, data: NDArray[Any]) -> Block:
    """Return the numbers of a part of a chunk with their place in the panel."""
    return Block(piece.row, piece.row + piece.rows, piece.col, piece.col + piece.cols, data)


def chunk_part(chunks: Mapping[ChunkKey, NDArray[Any]], piece: ChunkBlock) -> NDArray[Any]:
    """Return the numbers of a part of one of some chunks."""
    return chunks["ab"[piece.operand], piece.chunk][piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols]


def pack_blocks(blocks: list[Block], problem: Problem, *, conjugated: bool) -> Block:
    """Copy blocks that cover a rectangle, or their conjugates, into one matrix of the type that is computed in."""
    r0, r1 = min(b.r0 for b in blocks), max(b.r1 for b in blocks)
    c0, c1 = min(b.c0 for b in blocks), max(b.c1 for b in blocks)
    data = np.empty((r1 - r0, c1 - c0), problem.compute_type)
    for block in blocks:
        data[block.r0 - r0 : block.r1 - r0, block.c0 - c0 : block.c1 - c0] = block.data
    if conjugated:
        np.conjugate(data, out=data)
    if problem.compute == "tf32":
        round_tf32(data)
    return Block(r0, r1, c0, c1, data)


def _is_symmetric(plan: Plan, rank: int, begun: Container[int]) -> bool:
    """Whether a rank's sums, all of D, are symmetric or Hermitian, with what has been begun, and D is cut likewise."""
    (r0, r1, c0, c1), (rows, cols) = plan.region(rank), plan.chunk_cuts
    if not is_gram(plan.problem) or (r0, r1) != (c0, c1) or tuple(rows) != tuple(cols):
        return False
    count = len(rows) - 1
    return all((i * count + j in begun) == (j * count + i in begun) for i in range(count) for j in range(i))


class Sums:
    """One rank's sums, zero at first but for chunks that an earlier run has begun."""

    def __init__(self, plan: Plan, rank: int, begun: Mapping[int, NDArray[Any]]) -> None:
        self.plan = plan
        self.chunks: dict[Any, NDArray[Any]] = {}
        self._block_of: dict[int, Block] = {}
        # Blocks, by number, of which only the lower triangle has been added to, and those that may not be symmetric.
        self._lower: set[int] = set()
        self._full: set[int] = set()
        # Blocks above the diagonal that are made of those below it at the end.
        self._mirrored: dict[int, int] = {}
        self.symmetric = _is_symmetric(plan, rank, begun)
        problem, region = plan.problem, plan.region(rank)
        # BLAS conjugates, without a copy, the operand that lies in the other order than D.
        orders = zip(problem.conjugated, (plan.order_a, plan.order_b), strict=True)
        order: Literal["C", "F"] = "F" if (True, "C") in orders else "C"
        if plan.packing.d:
            r0, r1, c0, c1 = region
            self.blocks = [Block(*region, np.zeros((r1 - r0, c1 - c0), problem.compute_type, order))]
            for index, cell in split_at_chunks(plan, region) if begun else ():
                if index in begun:
                    top, _, left, _ = plan.chunk_rect(index)
                    self.view(cell)[...] = begun[index][cell[0] - top : cell[1] - top, cell[2] - left : cell[3] - left]
            self._full = {0} if begun and not self.symmetric else set()
            return
        mine = set(plan.owned(rank).tolist())
        for index in mine:
            r0, r1, c0, c1 = plan.chunk_rect(index)
            self.chunks[index] = (
                begun[index] if index in begun else np.zeros((r1 - r0, c1 - c0), problem.result_type, order)
            )
        for index, (r0, r1, c0, c1) in split_at_chunks(plan, region):
            if index in mine:
                top, _, left, _ = plan.chunk_rect(index)
                data = self.chunks[index][r0 - top : r1 - top, c0 - left : c1 - left]
            else:
                data = np.zeros((r1 - r0, c1 - c0), problem.result_type, order)
            self._block_of[index] = Block(r0, r1, c0, c1, data)
        self.blocks = list(self._block_of.values())
        if self.symmetric:
            at = {(block.r0, block.c0): number for number, block in enumerate(self.blocks)}
            self._mirrored = {number: at[c0, r0] for (r0, c0), number in at.items() if r0 < c0}
        elif begun and not is_gram(problem):
            self._full = {number for number, index in enumerate(self._block_of) if index in begun}

    def add(self, a: list[Block], b: list[Block], before: tuple[int, int], check: Callable[[], None]) -> None:
        """Add the products of all pairs of blocks, but of the first ``before[0]`` of A and ``before[1]`` of B."""
        conj_a, conj_b = self.plan.problem.conjugated
        packing = self.plan.packing
        conjugated = conj_a and not packing.a, conj_b and not packing.b
        for i, left in enumerate(a):
            for j, right in enumerate(b):
                k0, k1 = max(left.c0, right.r0), min(left.c1, right.r1)
                if k0 >= k1 or (i < before[0] and j < before[1]):
                    continue
                rows = left.data[:, k0 - left.c0 : k1 - left.c0]
                cols = right.data[k0 - right.r0 : k1 - right.r0, :]
                for number, block in enumerate(self.blocks):
                    if number in self._mirrored:
                        continue
                    r0, r1 = max(block.r0, left.r0), min(block.r1, left.r1)
                    c0, c1 = max(block.c0, right.c0), min(block.c1, right.c1)
                    if r0 < r1 and c0 < c1 and not (self.symmetric and r1 <= c0):
                        check()
                        cell = r0 - block.r0, r1 - block.r0, c0 - block.c0, c1 - block.c0
                        factors = rows[r0 - left.r0 : r1 - left.r0], cols[:, c0 - right.c0 : c1 - right.c0]
                        self._add(number, cell, factors, conjugated)

    def _add(
        self, number: int, cell: Rect, factors: tuple[NDArray[Any], NDArray[Any]], conjugated: tuple[bool, bool]
    ) -> None:
        """Add a product to a part of a block; of a symmetric one of all of it the lower triangle, if that will do."""
        data = self.blocks[number].data
        target = data[cell[0] : cell[1], cell[2] : cell[3]]
        whole = number not in self._full and target.shape == data.shape
        if whole and is_symmetric(*factors, conjugated) and add_lower(factors[0], target):
            self._lower.add(number)
            return
        if number in self._lower:
            mirror(data)
            self._lower.discard(number)
        self._full.add(number)
        gemm(*factors, target, conjugated)

    def complete(self) -> None:
        """Make the sums complete where only triangles have been added to."""
        for number, block in enumerate(self.blocks):
            if number in self._lower or (self.symmetric and block.r0 == block.c0):
                mirror(block.data)
        self._lower.clear()
        for upper, lower in self._mirrored.items():
            reflect(self.blocks[lower].data, self.blocks[upper].data)

    def cells(self, rect: Rect) -> Iterator[Rect]:
        """Cut a part of D so that each piece lies in one block."""
        if self.plan.packing.d:
            yield rect
        else:
            yield from (cell for _, cell in split_at_chunks(self.plan, rect))

    def view(self, rect: Rect) -> NDArray[Any]:
        """Return the sums over a part of D that lies in one block."""
        if self.plan.packing.d:
            block = self.blocks[0]
        else:
            block = self._block_of[next(index for index, _ in split_at_chunks(self.plan, rect))]
        return block.data[rect[0] - block.r0 : rect[1] - block.r0, rect[2] - block.c0 : rect[3] - block.c0]
