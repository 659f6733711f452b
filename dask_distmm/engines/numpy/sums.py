"""The memory that a rank sums its part of D into: one matrix, or right the chunks of the result."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import GATHERED, ChunkKey, ResultKey, wait_checked
from dask_distmm.engines.numpy.blas import add_lower, gemm, is_symmetric, mirror, reflect
from dask_distmm.engines.panels import ChunkBlock, chunk_blocks_of, pairs, split_at_chunks
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.numeric.types import dtype_from_name, round_tf32
from dask_distmm.planning import Plan, Problem
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.planning.plan import Rect
from dask_distmm.planning.problem import is_gram

# The operand that a run keeps: put together again from the pieces that a rank fetches in order to multiply. Pure


class GatheredChunks:
    """Chunks of `Problem.gathered` on one rank. Nothing, if the plan keeps no operand."""

    def __init__(self, plan: Plan) -> None:
        self._problem, self._kept = plan.problem, plan.kept
        self._chunks: dict[int, NDArray[Any]] = {}
        self._missing: dict[int, int] = {}

    def add(self, piece: ChunkBlock, data: NDArray[Any]) -> None:
        """Take a piece that has arrived; no two pieces of a rank have an element in common."""
        operand = self._problem.operands[piece.operand]
        if operand not in self._kept:
            return
        rows, cols = self._problem.chunks_of(operand)
        i, j = divmod(piece.chunk, len(cols))
        shape = rows[i], cols[j]
        if data.shape == shape:
            self._chunks[piece.chunk], self._missing[piece.chunk] = data, 0
            return
        if piece.chunk not in self._chunks:
            self._chunks[piece.chunk], self._missing[piece.chunk] = np.empty(shape, data.dtype), rows[i] * cols[j]
        self._chunks[piece.chunk][piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols] = data
        self._missing[piece.chunk] -= data.size

    def complete(self) -> dict[ResultKey, NDArray[Any]]:
        """Return the chunks of which all elements have arrived."""
        return {(GATHERED, number): chunk for number, chunk in self._chunks.items() if not self._missing[number]}


# Products of chunks that a rank makes itself, each multiplied as soon as it is there, while the next ones are made


class Streamed:
    """One rank's chunks that it makes itself, and those of the other operand, which are in memory somewhere."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, Any],
        ask: Callable[[int, list[ChunkBlock]], Answer],
        check: Callable[[], None],
    ) -> None:
        self._plan, self._chunks, self._ask, self._check = plan, chunks, ask, check
        self._steps = pairs(plan, plan.ranks.index(me))
        self._threads = plan.participants[me].nthreads
        self._waited = 0.0

    def multiply(self, sums: Sums, progress: Callable[[float], None]) -> float:
        """Add all products to the sums, and tell the share that is done; return the seconds of waiting for chunks."""
        uses = [self._source(piece) for own, others in self._steps for piece in (own, *others)]
        loads = ChunkLoader([chunk for chunk in uses if chunk is not None], self._threads, made_ahead(self._threads))
        try:
            resident = self._resident({piece for _, others in self._steps for piece in others})
            for number, (own, others) in enumerate(self._steps):
                outer = self._block(own, loads, resident)
                for piece in others:
                    blocks = [outer], [self._block(piece, loads, resident)]
                    a, b = blocks if own.operand == 0 else blocks[::-1]
                    sums.add(a, b, (0, 0), self._check)
                progress((number + 1) / len(self._steps))
        finally:
            loads.close()
        sums.complete()
        return self._waited

    def _block(self, piece: ChunkBlock, loads: ChunkLoader, resident: Mapping[ChunkBlock, Block]) -> Block:
        """Return a part of a chunk with its place, once the chunk is there."""
        chunk = self._source(piece)
        if chunk is None:
            return resident[piece]
        started = time.perf_counter()
        data = loads.take(chunk, self._check)
        self._waited += time.perf_counter() - started
        return self._packed(piece, data[piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols])

    def _source(self, piece: ChunkBlock) -> SourceChunk | None:
        found = self._chunks.get(("ab"[piece.operand], piece.chunk))
        return found if isinstance(found, SourceChunk) else None

    def _resident(self, pieces: Collection[ChunkBlock]) -> dict[ChunkBlock, Block]:
        """Return those of some pieces that are in memory, here or on other workers."""
        found: dict[ChunkBlock, NDArray[Any]] = {}
        remote: dict[int, list[ChunkBlock]] = collections.defaultdict(list)
        for piece in pieces:
            if ("ab"[piece.operand], piece.chunk) not in self._chunks:
                remote[int(self._plan.where["ab"[piece.operand]][piece.chunk])].append(piece)
            elif self._source(piece) is None:
                found[piece] = chunk_part(self._chunks, piece)
        for asked, answer in [(asked, self._ask(peer, asked)) for peer, asked in remote.items()]:
            found |= zip(asked, answer.wait(self._check), strict=True)
        return {piece: self._packed(piece, data) for piece, data in found.items()}

    def _packed(self, piece: ChunkBlock, data: NDArray[Any]) -> Block:
        """Return numbers with their place, copied to the type that is computed in where they have another one."""
        packing, problem = self._plan.packing, self._plan.problem
        block = placed_block(piece, data)
        if (packing.a, packing.b)[piece.operand]:
            return pack_blocks([block], problem, conjugated=problem.conjugated[piece.operand])
        return block


# The inputs of the formula beside the product, gathered for one chunk of D at a time


class _AskedInput(NamedTuple):
    """One input on its way: where it goes, which pieces are here, which come from others."""

    name: str
    data: NDArray[Any]
    here: list[ChunkBlock]
    answers: list[tuple[list[ChunkBlock], Any]]


class Inputs:
    """The problem's extras, as one rank needs them."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, NDArray[Any]],
        ask: Callable[[int, list[ChunkBlock]], Any],
        check: Callable[[], None],
    ) -> None:
        self._plan, self._me, self._chunks, self._ask, self._check = plan, me, chunks, ask, check

    def ask(self, index: int, without: Collection[str] = ()) -> list[_AskedInput]:
        """Ask for the parts that chunk number `index` of D needs, but of some inputs, without waiting."""
        problem, found = self._plan.problem, []
        r0, r1, c0, c1 = self._plan.chunk_rect(index)
        for number, name in enumerate(problem.operands[2:], start=2):
            if name in without:
                continue
            sizes, where = problem.chunks_of(name), self._plan.where[name]
            assert where is not None
            # An axis of length 1 is broadcast.
            top, bottom = (r0, r1) if sum(sizes[0]) == problem.m else (0, 1)
            left, right = (c0, c1) if sum(sizes[1]) == problem.n else (0, 1)
            data = np.empty((bottom - top, right - left), dtype_from_name(problem.dtype_of(name)))
            here: list[ChunkBlock] = []
            away: dict[int, list[ChunkBlock]] = collections.defaultdict(list)
            for piece in chunk_blocks_of(sizes, number, (top, bottom, left, right)):
                peer = int(where[piece.chunk])
                (here if peer == self._me else away[peer]).append(piece)
            found.append(
                _AskedInput(name, data, here, [(pieces, self._ask(peer, pieces)) for peer, pieces in away.items()])
            )
        return found

    def wait(self, asked: list[_AskedInput]) -> dict[str, NDArray[Any]]:
        """Return the inputs by name once they are here."""
        for one in asked:
            for piece in one.here:
                chunk = self._chunks[one.name, piece.chunk]
                _put_piece(one.data, piece, chunk[piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols])
            for pieces, answer in one.answers:
                for piece, arrived in zip(pieces, answer.wait(self._check), strict=True):
                    _put_piece(one.data, piece, arrived)
        return {one.name: one.data for one in asked}


def _put_piece(data: NDArray[Any], piece: ChunkBlock, values: NDArray[Any]) -> None:
    data[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols] = values


# Matrices that a peer has been asked for


class Answer:
    """Matrices on their way."""

    def __init__(self, future: Future[Sequence[NDArray[Any]]], shapes: list[tuple[int, int]], flat: bool) -> None:
        self._future, self._shapes, self._flat = future, shapes, flat

    def wait(self, check: Callable[[], None]) -> list[NDArray[Any]]:
        """Return them once they are here; `check` raises if the run has been aborted."""
        arrived = list(wait_checked(self._future, check))
        if self._flat and len(arrived) == 1 < len(self._shapes):
            ends = np.cumsum([rows * cols for rows, cols in self._shapes])
            arrived = [x.reshape(shape) for x, shape in zip(np.split(arrived[0], ends[:-1]), self._shapes, strict=True)]
        found = [x.shape for x in arrived]
        if found != self._shapes:
            raise EngineError(f"a peer sent matrices of shapes {found}, expected {self._shapes}")
        return arrived


# The memory that a rank sums its part of D into: one matrix, or right the chunks of the result


class Block(NamedTuple):
    """A matrix and its place: rows and columns of D, or of a panel."""

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
        # BLAS conjugates, without a copy, the operand that is in the other order than D.
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
        """Cut a part of D so that each piece is in one block."""
        if self.plan.packing.d:
            yield rect
        else:
            yield from (cell for _, cell in split_at_chunks(self.plan, rect))

    def view(self, rect: Rect) -> NDArray[Any]:
        """Return the sums over a part of D that is in one block."""
        if self.plan.packing.d:
            block = self.blocks[0]
        else:
            block = self._block_of[next(index for index, _ in split_at_chunks(self.plan, rect))]
        return block.data[rect[0] - block.r0 : rect[1] - block.r0, rect[2] - block.c0 : rect[3] - block.c0]
