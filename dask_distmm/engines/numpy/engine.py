"""The engine for CPUs: panels of k arrive from other workers while BLAS works on the ones before.

A rank walks over its part of k in panels. For each it needs rows of A and columns of B. Chunks that
are here are used as they lie; the others are asked for some panels ahead. Panels that need nothing from others come
first, and each rank starts at another place, so that not all ask the same worker at once::

    asked for    [ 3 ][ 4 ]                      in flight, Comm.fetch
    multiplied        [ 2 ]                      D += A[:, panel] @ B[panel, :]
    done         [ 0 ][ 1 ]

D is summed up right in the chunks of the result where these are large enough (`Plan.packing`). With several
ranks along k, partial sums are then fetched from the others and added up where `Plan.final_rects` says;
parts of chunks that other ranks computed come last.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import GATHERED, Engine, Job, ResultKey, Side, settle, wait_checked
from dask_distmm.engines.numpy.blas import add_lower, blas_threads, gemm, is_symmetric, mirror, reflect
from dask_distmm.engines.panels import ChunkBlock, Panel, chunk_blocks_of, pairs, panels, twins
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import finish_by_rows, part_shape
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.numeric.types import dtype_from_name, round_tf32, store
from dask_distmm.planning import Plan, Problem
from dask_distmm.planning.cuts import Rect, pieces_of
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.planning.problem import accumulates_in_place, is_gram

# Boxes smaller than this on average travel in one vector.
_FLAT_BYTES = 2**20

# Waits for matrices that a peer was asked for, and returns them.
Answer = Callable[[], list[NDArray[Any]]]
# Pieces that were asked for, those of A that are transposes of some of these (with their places), and the answer.
Asked = tuple[list[ChunkBlock], list[tuple[ChunkBlock, int]], Answer]


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
        turned = any(problem[name].conjugated and plan.orders[name] == "C" for name in "ab")
        order: Literal["C", "F"] = "F" if turned else "C"
        packed = "d" in plan.packing
        # One matrix, or a block for each part of a chunk.
        self._cuts = (region[:2], region[2:]) if packed else plan.chunk_cuts
        mine = set() if packed else set(plan.owned(rank).tolist())
        for index in mine:
            r0, r1, c0, c1 = plan.chunk_rect(index)
            self.chunks[index] = (
                begun[index] if index in begun else np.zeros((r1 - r0, c1 - c0), problem.result_type, order)
            )
        for index, (r0, r1, c0, c1) in pieces_of(self._cuts, region):
            if index in mine:
                top, _, left, _ = plan.chunk_rect(index)
                data = self.chunks[index][r0 - top : r1 - top, c0 - left : c1 - left]
            else:
                data = np.zeros((r1 - r0, c1 - c0), problem.compute_type if packed else problem.result_type, order)
            self._block_of[index] = Block(r0, r1, c0, c1, data)
        self.blocks = list(self._block_of.values())
        if packed:
            for index, cell in pieces_of(plan.chunk_cuts, region) if begun else ():
                if index in begun:
                    top, _, left, _ = plan.chunk_rect(index)
                    self.view(cell)[...] = begun[index][cell[0] - top : cell[1] - top, cell[2] - left : cell[3] - left]
            self._full = {0} if begun and not self.symmetric else set()
        elif self.symmetric:
            at = {(block.r0, block.c0): number for number, block in enumerate(self.blocks)}
            self._mirrored = {number: at[c0, r0] for (r0, c0), number in at.items() if r0 < c0}
        elif begun and not is_gram(problem):
            self._full = {number for number, index in enumerate(self._block_of) if index in begun}

    def add(self, a: list[Block], b: list[Block], before: tuple[int, int], check: Callable[[], None]) -> None:
        """Add the products of all pairs of blocks, but of the first ``before[0]`` of A and ``before[1]`` of B."""
        problem, packing = self.plan.problem, self.plan.packing
        conjugated = problem.a.conjugated and "a" not in packing, problem.b.conjugated and "b" not in packing
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
        """Add a product to a part of a block; of a symmetric one the lower triangle, if that will do."""
        r0, _, c0, _, data = self.blocks[number]
        target = data[cell[0] : cell[1], cell[2] : cell[3]]
        whole = number not in self._full and target.shape == data.shape
        # Of symmetric sums only the lower triangle counts anyway.
        fits = whole or (self.symmetric and r0 + cell[0] == c0 + cell[2])
        if fits and is_symmetric(*factors, conjugated) and add_lower(factors[0], target, conjugated):
            self._lower |= {number} if whole else set()
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
        return (cell for _, cell in pieces_of(self._cuts, rect))

    def view(self, rect: Rect) -> NDArray[Any]:
        """Return the sums over a part of D that is in one block."""
        block = self._block_of[next(index for index, _ in pieces_of(self._cuts, rect))]
        return block.data[rect[0] - block.r0 : rect[1] - block.r0, rect[2] - block.c0 : rect[3] - block.c0]


# One participant's side of one run


class NumpyJob(Job[Plan]):
    """One participant's side of one run. See the module's text."""

    lends = True

    def __init__(self, side: Side[Plan]) -> None:
        super().__init__(side)
        self.compute_type = self.plan.problem.compute_type
        self.result: dict[ResultKey, NDArray[Any]] = {}
        self._sums: Sums
        # Chunks of `Problem.gathered`, if the plan keeps it: put together from the pieces that are fetched to be
        # multiplied. And how many of their elements are missing.
        self._gathered: dict[int, NDArray[Any]] = {}
        self._not_gathered: dict[int, int] = {}
        # Chunks of D that an earlier run has begun: sums go on in them.
        self._begun: dict[int, NDArray[Any]] = {}
        self._available: dict[str, Future[None]] = {"partial": Future(), "final": Future()}

    # The work

    def prepare(self) -> None:
        """Allocate the memory that this rank sums into, zeroed; where earlier sums are here it continues in these."""
        if self.rank is None:
            return
        if accumulates_in_place(self.plan.problem):
            for index in self.plan.owned(self.rank).tolist():
                chunk = self.chunks.get(("partial", index))
                # One that came from another process may be read-only.
                if chunk is not None and chunk.flags.writeable:
                    self._begun[index] = chunk
        self.consumed = [("partial", index) for index in self._begun]
        self._sums = Sums(self.plan, self.rank, self._begun)
        self.result |= {("", index): chunk for index, chunk in self._sums.chunks.items()}

    def execute(self) -> dict[ResultKey, NDArray[Any]]:
        """Multiply, add up partial sums, gather the chunks that this rank owns, apply the formula."""
        if self.rank is None:
            return {}
        started = time.perf_counter()
        with blas_threads(self.plan.participants[self.me].nthreads):
            self._multiply()
        self.timings["multiply"] = time.perf_counter() - started
        self._open("partial")
        if self.plan.grid[2] > 1:
            self._add_up()
        self._open("final")
        self._assemble()
        if not self.plan.problem.formula.trivial:
            self._finish()
        self.timings["deliver"] = time.perf_counter() - started - self.timings["multiply"]
        whole = {number: chunk for number, chunk in self._gathered.items() if not self._not_gathered[number]}
        return self.result | {(GATHERED, number): chunk for number, chunk in whole.items()}

    def _multiply(self) -> None:
        assert self.rank is not None
        if self.plan.problem.by_ranks:
            self._multiply_made()
            return
        todo = collections.deque(panels(self.plan, self.rank, self.me))
        total = max(1, len(todo))
        in_flight: collections.deque[tuple[Panel, list[Asked]]] = collections.deque()
        while todo or in_flight:
            while todo and len(in_flight) <= self.plan.problem.options.prefetch_panels:
                panel = todo.popleft()
                asked = []
                for peer, needed in panel.remote.items():
                    pieces, same = twins(self.plan, needed)
                    asked.append((pieces, same, self._ask(peer, pieces)))
                in_flight.append((panel, asked))
            panel, asked = in_flight.popleft()
            self._multiply_panel(panel, asked)
            self.progress(1 - (len(todo) + len(in_flight)) / total)
        self._sums.complete()

    def _multiply_panel(self, panel: Panel, asked: list[Asked]) -> None:
        packing = self.plan.packing
        operands: tuple[list[Block], list[Block]] = ([], [])
        for piece in panel.local:
            operands[piece.operand].append(placed_block(piece, self._here(piece)))
        before = (0, 0)
        if asked and not {*"ab"} & {*packing}:
            # Chunks that are here need no waiting.
            self._sums.add(*operands, (0, 0), self.ended.check)
            before = (len(operands[0]), len(operands[1]))
        for pieces, same, answer in asked:
            arrived = answer()
            transposed = [(piece, arrived[at].T) for piece, at in same]
            for piece, data in [*zip(pieces, arrived, strict=True), *transposed]:
                operands[piece.operand].append(placed_block(piece, data))
                self._keep(piece, data)
        a, b = operands
        problem = self.plan.problem
        if "b" in packing:
            b = [pack_blocks(b, problem, conjugated=problem.b.conjugated)]
        if "a" in packing and "b" in packing and self._sums.symmetric and problem.compute_type.kind != "c":
            # The same numbers, in the same memory.
            a = [Block(b[0].c0, b[0].c1, b[0].r0, b[0].r1, b[0].data.T)]
        elif "a" in packing:
            a = [pack_blocks(a, problem, conjugated=problem.a.conjugated)]
        self._sums.add(a, b, before, self.ended.check)

    def _here(self, piece: ChunkBlock) -> NDArray[Any]:
        """Return the numbers of a part of a chunk that is here."""
        part: NDArray[Any] = self.chunks[self.plan.problem.operands[piece.operand], piece.chunk][piece.inside]
        return part

    def _keep(self, piece: ChunkBlock, data: NDArray[Any]) -> None:
        """Keep a piece that has arrived, of a gathered operand; no two pieces of a rank have an element in common."""
        if (operand := self.plan.problem.operands[piece.operand]) not in self.plan.kept:
            return
        rows, cols = self.plan.problem[operand].chunks
        i, j = divmod(piece.chunk, len(cols))
        shape, number = (rows[i], cols[j]), piece.chunk
        if data.shape == shape:
            self._gathered[number], self._not_gathered[number] = data, 0
            return
        if number not in self._gathered:
            self._gathered[number], self._not_gathered[number] = np.empty(shape, data.dtype), rows[i] * cols[j]
        self._gathered[number][piece.inside] = data
        self._not_gathered[number] -= data.size

    # Chunks that this rank makes itself: each is multiplied as soon as it is there, while the next ones are made

    def _multiply_made(self) -> None:
        """Add all products to the sums; those of operands that are not made are in memory somewhere."""
        assert self.rank is not None
        plan, steps, waited = self.plan, pairs(self.plan, self.rank), 0.0
        threads = plan.participants[self.me].nthreads
        uses = [self._source(piece) for own, others in steps for piece in (own, *others)]
        loads = ChunkLoader([chunk for chunk in uses if chunk is not None], threads, made_ahead(threads))

        def block(piece: ChunkBlock) -> Block:
            """Return a part of a chunk with its place, once the chunk is there."""
            nonlocal waited
            if (chunk := self._source(piece)) is None:
                return resident[piece]
            started = time.perf_counter()
            data = loads.take(chunk, self.ended.check)
            waited += time.perf_counter() - started
            return self._packed(piece, data[piece.inside])

        try:
            there = {piece for _, others in steps for piece in others if self._source(piece) is None}
            resident = {piece: self._packed(piece, data) for piece, data in self._request(there)()}
            for number, (own, others) in enumerate(steps):
                outer = block(own)
                for piece in others:
                    a, b = ([outer], [block(piece)])[:: 1 if own.operand == 0 else -1]
                    self._sums.add(a, b, (0, 0), self.ended.check)
                self.progress((number + 1) / len(steps))
        finally:
            loads.close()
        self._sums.complete()
        self.timings["load"] = waited

    def _source(self, piece: ChunkBlock) -> SourceChunk | None:
        found = self.chunks.get(("ab"[piece.operand], piece.chunk))
        return found if isinstance(found, SourceChunk) else None

    def _packed(self, piece: ChunkBlock, data: NDArray[Any]) -> Block:
        """Return numbers with their place, copied to the type that is computed in where they have another one."""
        problem, block = self.plan.problem, placed_block(piece, data)
        if "ab"[piece.operand] in self.plan.packing:
            return pack_blocks([block], problem, conjugated=problem.matrices[piece.operand].conjugated)
        return block

    # The chunks of D

    def _add_up(self) -> None:
        """Add the other ranks' partial sums to this rank's part of D, in an order that is the same every time."""
        assert self.rank is not None
        cells = [cell for rect in self.plan.final_rects(self.rank) for cell in self._sums.cells(rect)]
        if not cells:
            return
        boxes = _result_boxes(cells)
        others = [rank for rank in range(len(self.plan.ranks)) if rank != self.rank]
        others = others[self.rank :] + others[: self.rank]
        answer = self._fetch(self.plan.ranks[others[0]], "partial", boxes, self.compute_type)
        for following in [*others[1:], None]:
            arrived = answer()
            if following is not None:
                answer = self._fetch(self.plan.ranks[following], "partial", boxes, self.compute_type)
            for cell, data in zip(cells, arrived, strict=True):
                own = self._sums.view(cell)
                np.add(own, data, out=own)

    def _assemble(self) -> None:
        """Make this rank's chunks of D complete, in the type of the result."""
        assert self.rank is not None
        plan = self.plan
        remote: dict[int, list[tuple[int, Rect]]] = collections.defaultdict(list)
        for index in plan.owned(self.rank).tolist():
            top, bottom, left, right = plan.chunk_rect(index)
            if ("", index) not in self.result:
                # The formula is applied in the type that is summed in.
                dtype = plan.problem.result_type if plan.problem.formula.trivial else self.compute_type
                made = self._begun.get(index)
                self.result["", index] = np.empty((bottom - top, right - left), dtype) if made is None else made
            for rank, rect in plan.final_holders(index):
                if rank != self.rank:
                    remote[rank].append((index, rect))
                elif "d" in plan.packing:
                    self._store(index, rect, self._sums.view(rect))
        asked = [
            (
                cells,
                self._fetch(plan.ranks[rank], "final", _result_boxes([rect for _, rect in cells]), self.compute_type),
            )
            for rank, cells in remote.items()
        ]
        for cells, answer in asked:
            for (index, rect), data in zip(cells, answer(), strict=True):
                # Where k is cut the sums of others have what was begun here.
                self._store(index, rect, data, onto=index in self._begun and plan.grid[2] == 1)

    def _finish(self) -> None:
        """Apply the formula to this rank's chunks of D, one by one; what it reads is asked for one ahead."""
        assert self.rank is not None
        problem, owned = self.plan.problem, self.plan.owned(self.rank).tolist()
        rest = dataclasses.replace(problem.formula, partial=False)
        # Sums that were begun are complete now, and may be all there is to do.
        done = set(self._begun) if rest.trivial else set()
        chunks = [index for index in owned if self.result["", index].size and index not in done]
        asked = self._ask_inputs(chunks[0]) if chunks else {}
        for at, index in enumerate(chunks, start=1):
            ahead = self._ask_inputs(chunks[at]) if at < len(chunks) else {}
            formula = rest if index in self._begun else problem.formula
            with np.errstate(all="ignore"):
                acc = self.result["", index]
                out = acc if acc.dtype == problem.result_type else np.empty(acc.shape, problem.result_type)
                aux = finish_by_rows(formula, acc, {name: wait() for name, wait in asked.items()}, out)
                self.result["", index] = out
                for name, values in aux.items():
                    dtype = problem.formula.dtype_of(name, problem.result_type)
                    self.result[name, index] = values.astype(dtype, copy=False)
            asked = ahead
        for index in set(owned) - set(chunks) - done:
            self.result["", index] = self.result["", index].astype(problem.result_type)
            for name in problem.formula.per_element:
                shape = part_shape(problem.formula.keeps(name), self.result["", index].shape)
                self.result[name, index] = np.zeros(shape, problem.formula.dtype_of(name, problem.result_type))

    def _ask_inputs(self, index: int) -> dict[str, Callable[[], NDArray[Any]]]:
        """Ask for what the formula reads for a chunk of D; return by name the functions that wait for the inputs."""
        return {
            name: self._ask_input(number, name, self.plan.chunk_rect(index))
            for number, name in enumerate(self.plan.problem.operands[2:], start=2)
            if name != "partial" or index not in self._begun
        }

    def _ask_input(self, number: int, name: str, rect: Rect) -> Callable[[], NDArray[Any]]:
        problem, sizes = self.plan.problem, self.plan.problem[name].chunks
        # An axis of length 1 is broadcast.
        top, bottom = rect[:2] if sum(sizes[0]) == problem.m else (0, 1)
        left, right = rect[2:] if sum(sizes[1]) == problem.n else (0, 1)
        data = np.empty((bottom - top, right - left), self.chunk_type(number))
        arrives = self._request(chunk_blocks_of(sizes, number, (top, bottom, left, right)))

        def wait() -> NDArray[Any]:
            for piece, part in arrives():
                data[piece.place] = part
            return data

        return wait

    def _store(self, index: int, rect: Rect, data: NDArray[Any], *, onto: bool = False) -> None:
        top, _, left, _ = self.plan.chunk_rect(index)
        target = self.result["", index][rect[0] - top : rect[1] - top, rect[2] - left : rect[3] - left]
        store(target, target + data if onto else data)

    # Matrices between participants

    def _request(self, pieces: Iterable[ChunkBlock]) -> Callable[[], Iterator[tuple[ChunkBlock, NDArray[Any]]]]:
        """Ask for parts of chunks where they are; return the function that waits, and yields each with its numbers."""
        holders: dict[int, list[ChunkBlock]] = collections.defaultdict(list)
        for piece in pieces:
            operand = self.plan.problem.operands[piece.operand]
            holder = self.me if (operand, piece.chunk) in self.chunks else int(self.plan.where[operand][piece.chunk])
            holders[holder].append(piece)
        here = holders.pop(self.me, [])
        asked = [(some, self._ask(peer, some)) for peer, some in holders.items()]

        def arrives() -> Iterator[tuple[ChunkBlock, NDArray[Any]]]:
            yield from ((piece, self._here(piece)) for piece in here)
            for some, answer in asked:
                yield from zip(some, answer(), strict=True)

        return arrives

    def _ask(self, peer: int, pieces: list[ChunkBlock]) -> Answer:
        """Ask a peer for parts of its chunks; return the function that waits for them."""
        boxes = np.array([(p.operand, p.chunk, p.r0, p.r0 + p.rows, p.c0, p.c0 + p.cols) for p in pieces], np.int64)
        dtypes = [self.chunk_type(piece.operand) for piece in pieces]
        return self._fetch(peer, "input", boxes, dtypes[0] if len(set(dtypes)) == 1 else None)

    def chunk_type(self, operand: int) -> np.dtype:
        """Type of the chunks of A (0), B (1) or an extra."""
        return dtype_from_name(self.plan.problem.matrices[operand].dtype)

    def _fetch(self, peer: int, kind: str, boxes: Boxes, dtype: np.dtype | None) -> Answer:
        """Ask a peer; return the function that waits. A vector for many small boxes needs them to be of one type."""
        shapes = [(int(r), int(c)) for r, c in zip(boxes[:, 3] - boxes[:, 2], boxes[:, 5] - boxes[:, 4], strict=True)]
        size = sum(r * c for r, c in shapes) * (dtype.itemsize if dtype else 0)
        flat = dtype is not None and len(shapes) > 1 and size < _FLAT_BYTES * len(shapes)
        future = self.comm.fetch(peer, kind, boxes, flat)

        def answer() -> list[NDArray[Any]]:
            arrived = list(wait_checked(future, self.ended.check))
            if flat and len(arrived) == 1:
                ends = np.cumsum([rows * cols for rows, cols in shapes])
                arrived = [x.reshape(shape) for x, shape in zip(np.split(arrived[0], ends[:-1]), shapes, strict=True)]
            found = [x.shape for x in arrived]
            if found != shapes:
                raise EngineError(f"a peer sent matrices of shapes {found}, expected {shapes}")
            return arrived

        return answer

    def _open(self, kind: str) -> None:
        """Let peers have what they ask for, unless the run has been ended."""
        settle(self._available[kind])
        self.ended.check()

    def available(self, kind: str, boxes: Boxes) -> Future[None]:
        """Return the future that says when `serve` can answer."""
        return self._available.get(kind, self._inputs)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[NDArray[Any]]:
        """Return boxes of the chunks that are here, or of D for a peer."""
        self.ended.check()
        found = (
            super().serve(kind, boxes, flat)
            if kind == "input"
            else [self._sums.view((r0, r1, c0, c1)) for r0, r1, c0, c1 in boxes[:, 2:].tolist()]
        )
        if flat:
            vector = np.empty(sum(x.size for x in found), found[0].dtype)
            at = 0
            for x in found:
                vector[at : at + x.size].reshape(x.shape)[...] = x
                at += x.size
            return [vector]
        return found

    # The end

    def abort(self, error: BaseException) -> None:
        """End everything with `error`."""
        super().abort(error)
        for future in self._available.values():
            settle(future, error=error)


class NumpyEngine(Engine):
    """Multiplies on CPUs with SciPy's BLAS and NumPy."""

    name = "numpy"

    def versions(self) -> dict[str, str]:
        """Return no versions: any NumPy works with any other."""
        return {"numpy": importlib.metadata.version("numpy").split(".")[0]}

    def job(self, side: Side[Any]) -> Job[Any]:
        """Return what does a participant's part of a run."""
        for (operand, number), chunk in side.chunks.items():
            made = not isinstance(chunk, SourceChunk)  # else looked at later
            fits = type(chunk) is np.ndarray or sparse_package(chunk) == "scipy"
            if made and (not fits or chunk.ndim != 2):
                raise EngineError(
                    f"chunk {number} of {operand.upper()} is a {type(chunk).__name__}; the numpy engine needs "
                    "2-D numpy.ndarray chunks: convert them with map_blocks(numpy.asarray), or pass meta= where the "
                    "array is made, so that it says what its chunks are and Dask's own tasks multiply"
                )
        if isinstance(side.plan, Plan):
            return NumpyJob(side)
        # Workers that only multiply import none of it.
        from dask_distmm.engines.numpy.lapack import LapackKernels
        from dask_distmm.engines.programs.job import ProgramJob

        return ProgramJob(side, LapackKernels())


ENGINE = NumpyEngine()


def _result_boxes(rects: Sequence[Rect]) -> Boxes:
    boxes = np.zeros((len(rects), 6), np.int64)
    boxes[:, 2:] = rects
    return boxes
