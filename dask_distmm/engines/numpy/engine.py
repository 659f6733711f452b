"""The engine for CPUs: panels of k arrive from other workers while BLAS works on the ones before.

A rank walks over its part of k in panels. For each it needs rows of A and columns of B. Chunks that
are here are used as they lie; the others are asked for some panels ahead. Panels that need nothing from others come
first, and each rank starts at another place, so that not all ask the same worker at once::

    asked for    [ 3 ][ 4 ]                      in flight, Comm.fetch
    multiplied        [ 2 ]                      D += A[:, panel] @ B[panel, :]
    done         [ 0 ][ 1 ]

D is summed up right in the chunks of the result where these are large enough (`Packing`). With several
ranks along k, partial sums are then fetched from the others and added up where `Plan.final_rects` says;
parts of chunks that other ranks computed come last.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import Engine, Job, ResultKey, Side
from dask_distmm.engines.numpy.blas import blas_threads
from dask_distmm.engines.numpy.sums import (
    Answer,
    Block,
    GatheredChunks,
    Inputs,
    Streamed,
    Sums,
    chunk_part,
    pack_blocks,
    placed_block,
)
from dask_distmm.engines.panels import ChunkBlock, Panel, panels, twins
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import finish_by_rows, part_shape
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.numeric.types import dtype_from_name, stored
from dask_distmm.planning import Plan
from dask_distmm.planning.plan import Rect
from dask_distmm.planning.problem import accumulates_in_place
from dask_distmm.planning.program import ProgramPlacement

# Boxes smaller than this on average travel in one vector.
_FLAT_BYTES = 2**20


class _AskedPieces(NamedTuple):
    """Pieces that were asked for, those of A that are transposes of some of these, and the answer."""

    pieces: list[ChunkBlock]
    same: list[tuple[ChunkBlock, int]]
    answer: Answer


class NumpyJob(Job[Plan]):
    """One participant's side of one run. See the module's text."""

    lends = True

    def __init__(self, side: Side[Plan]) -> None:
        super().__init__(side)
        self.compute_type = self.plan.problem.compute_type
        self.result: dict[ResultKey, NDArray[Any]] = {}
        self._sums: Sums
        self._gathered = GatheredChunks(self.plan)
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
        _open(self._available["partial"])
        if self.plan.grid[2] > 1:
            self._add_up()
        _open(self._available["final"])
        self._assemble()
        if not self.plan.problem.formula.trivial:
            self._finish()
        self.timings["deliver"] = time.perf_counter() - started - self.timings["multiply"]
        return self.result | self._gathered.complete()

    def _multiply(self) -> None:
        assert self.rank is not None
        if any(self.plan.problem.by_ranks):
            streamed = Streamed(self.plan, self.me, self.chunks, self._ask, self.ended.check)
            self.timings["load"] = streamed.multiply(self._sums, self.progress)
            return
        todo = collections.deque(panels(self.plan, self.rank, self.me))
        total = max(1, len(todo))
        in_flight: collections.deque[tuple[Panel, list[_AskedPieces]]] = collections.deque()
        while todo or in_flight:
            while todo and len(in_flight) <= self.plan.problem.options.prefetch_panels:
                panel = todo.popleft()
                asked = []
                for peer, needed in panel.remote.items():
                    pieces, same = twins(self.plan, needed)
                    asked.append(_AskedPieces(pieces, same, self._ask(peer, pieces)))
                in_flight.append((panel, asked))
            panel, asked = in_flight.popleft()
            self._multiply_panel(panel, asked)
            self.progress(1 - (len(todo) + len(in_flight)) / total)
        self._sums.complete()

    def _multiply_panel(self, panel: Panel, asked: list[_AskedPieces]) -> None:
        packing = self.plan.packing
        operands: tuple[list[Block], list[Block]] = ([], [])
        for piece in panel.local:
            operands[piece.operand].append(placed_block(piece, chunk_part(self.chunks, piece)))
        before = (0, 0)
        if asked and not (packing.a or packing.b):
            # Chunks that are here need no waiting.
            self._sums.add(*operands, (0, 0), self.ended.check)
            before = (len(operands[0]), len(operands[1]))
        for one in asked:
            arrived = one.answer.wait(self.ended.check)
            transposed = [(piece, arrived[at].T) for piece, at in one.same]
            for piece, data in [*zip(one.pieces, arrived, strict=True), *transposed]:
                operands[piece.operand].append(placed_block(piece, data))
                self._gathered.add(piece, data)
        a, b = operands
        problem = self.plan.problem
        if packing.b:
            b = [pack_blocks(b, problem, conjugated=problem.conjugated[1])]
        if packing.a and packing.b and self._sums.symmetric and problem.compute_type.kind != "c":
            # The same numbers, in the same memory.
            a = [Block(b[0].c0, b[0].c1, b[0].r0, b[0].r1, b[0].data.T)]
        elif packing.a:
            a = [pack_blocks(a, problem, conjugated=problem.conjugated[0])]
        self._sums.add(a, b, before, self.ended.check)

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
            arrived = answer.wait(self.ended.check)
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
                elif plan.packing.d:
                    self._store(index, rect, self._sums.view(rect))
        asked = [
            (
                cells,
                self._fetch(plan.ranks[rank], "final", _result_boxes([rect for _, rect in cells]), self.compute_type),
            )
            for rank, cells in remote.items()
        ]
        for cells, answer in asked:
            for (index, rect), data in zip(cells, answer.wait(self.ended.check), strict=True):
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
        inputs = Inputs(self.plan, self.me, self.chunks, self._ask, self.ended.check)

        def ask(index: int) -> list[Any]:
            return inputs.ask(index, ("partial",) if index in self._begun else ())

        asked = ask(chunks[0]) if chunks else []
        for at, index in enumerate(chunks, start=1):
            ahead = ask(chunks[at]) if at < len(chunks) else []
            formula = rest if index in self._begun else problem.formula
            with np.errstate(all="ignore"):
                acc = self.result["", index]
                out = acc if acc.dtype == problem.result_type else np.empty(acc.shape, problem.result_type)
                store = functools.partial(_round_rows_into, out)
                aux = finish_by_rows(formula, acc, inputs.wait(asked), store)
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

    def _store(self, index: int, rect: Rect, data: NDArray[Any], *, onto: bool = False) -> None:
        top, _, left, _ = self.plan.chunk_rect(index)
        target = self.result["", index][rect[0] - top : rect[1] - top, rect[2] - left : rect[3] - left]
        _round_into(target, target + data if onto else data)

    # Matrices between participants

    def _ask(self, peer: int, pieces: list[ChunkBlock]) -> Answer:
        boxes = np.array([(p.operand, p.chunk, p.r0, p.r0 + p.rows, p.c0, p.c0 + p.cols) for p in pieces], np.int64)
        dtypes = [self.chunk_type(piece.operand) for piece in pieces]
        return self._fetch(peer, "input", boxes, dtypes[0] if len(set(dtypes)) == 1 else None)

    def chunk_type(self, operand: int) -> np.dtype:
        """Type of the chunks of A (0), B (1) or an extra."""
        return dtype_from_name(self.plan.problem.dtype_of(self.plan.problem.operands[operand]))

    def _fetch(self, peer: int, kind: str, boxes: Boxes, dtype: np.dtype | None) -> Answer:
        """Ask a peer; a vector for many small boxes needs them to be of one type."""
        shapes = [(int(r), int(c)) for r, c in zip(boxes[:, 3] - boxes[:, 2], boxes[:, 5] - boxes[:, 4], strict=True)]
        size = sum(r * c for r, c in shapes) * (dtype.itemsize if dtype else 0)
        flat = dtype is not None and len(shapes) > 1 and size < _FLAT_BYTES * len(shapes)
        return Answer(self.comm.fetch(peer, kind, boxes, flat), shapes, flat)

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
            if not future.done():
                _open(future, error)


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
        from dask_distmm.engines.numpy.factor import NumpyFactorJob, NumpyTallJob
        from dask_distmm.engines.numpy.lapack import LapackKernels

        kind: Any = NumpyTallJob if isinstance(side.plan, ProgramPlacement) else NumpyFactorJob
        job: Job[Any] = kind(side, LapackKernels())
        return job


ENGINE = NumpyEngine()


def _open(future: Future[None], error: BaseException | None = None) -> None:
    """Complete a future, unless an abort has been faster."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except Exception:  # InvalidStateError: decided already
        if error is None and future.exception() is not None:
            raise future.exception() from None  # type: ignore[misc]


def _result_boxes(rects: Sequence[Rect]) -> Boxes:
    boxes = np.zeros((len(rects), 6), np.int64)
    boxes[:, 2:] = rects
    return boxes


def _round_rows_into(target: NDArray[Any], rows: slice, data: NDArray[Any]) -> None:
    _round_into(target[rows], data)


def _round_into(target: NDArray[Any], data: NDArray[Any]) -> None:
    """Store sums in the type of the result: rounded once, integers wrapped around, FP8 saturated, bool "not zero"."""
    with np.errstate(over="ignore"):
        target[...] = data if target.dtype == data.dtype else stored(np, data, target.dtype.name, fp8_bytes=False)
