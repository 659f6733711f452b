"""The chunks that a rank can read, on its own GPU and on others, and the pulls that copy them into its memory."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import Job, wait_checked
from dask_distmm.engines.gpu.copy_kernels import CopyBatch, make_copies, pull_table
from dask_distmm.engines.gpu.finishing import Finishing, NativeBias
from dask_distmm.engines.gpu.gemm import MatrixRef
from dask_distmm.engines.gpu.host import Uploads, in_type, staging
from dask_distmm.engines.gpu.operands import array_at, record
from dask_distmm.engines.peer.memory import PeerState, Remote
from dask_distmm.engines.peer.offers import BLOCKS
from dask_distmm.layout.rectangles import Span, Table, span_of
from dask_distmm.numeric.types import FP8, carried, typed
from dask_distmm.planning import EVERYWHERE, Plan
from dask_distmm.planning.cuts import Rect
from dask_distmm.planning.product import ChunkBlock

# Columns of a table of chunk blocks.
_CHUNK, _R0, _C0, _ROWS, _COLS, _ROW, _COL = map(
    ChunkBlock._fields.index, ("chunk", "r0", "c0", "rows", "cols", "row", "col")
)


class DeviceView(NamedTuple):
    """A matrix on this GPU: its address, and which axis is dense."""

    span: Span
    order: str


def moved(view: DeviceView, axis: int, by: int, size: int) -> MatrixRef:
    """Return a matrix from a later row (axis 0) or column on, as the library wants it."""
    pointer, row, col = view.span.at(*((by, 0) if axis == 0 else (0, by)))
    return MatrixRef(pointer, max(1, (row if view.order == "C" else col) // size))


class Parts(NamedTuple):
    """Pieces of chunks that fill a part of an operand, a row for each: in the order in which they are to be copied."""

    # Its number.
    operand: int
    # Participants that have the chunks.
    holders: NDArray[np.int64]
    # Columns as in `ChunkBlock`.
    blocks: NDArray[np.int64]
    # Address of the first element, row stride and column stride of where each goes.
    targets: NDArray[np.int64]
    # Bytes of an element.
    size: int

    @property
    def bytes(self) -> int:
        """How many there are."""
        return int((self.blocks[:, _ROWS] * self.blocks[:, _COLS]).sum()) * self.size

    def take(self, which: NDArray[np.bool_]) -> Parts:
        """Return some of them."""
        return self._replace(holders=self.holders[which], blocks=self.blocks[which], targets=self.targets[which])

    def table(self, chunks: NDArray[np.int64]) -> Table:
        """Return what copies them out of chunks at some addresses, each with its row and column stride."""
        pointers = chunks[:, 0] + self.blocks[:, _R0] * chunks[:, 1] + self.blocks[:, _C0] * chunks[:, 2]
        sources = np.column_stack([pointers, chunks[:, 1:]])
        return pull_table(sources, self.targets, self.blocks[:, _ROWS], self.blocks[:, _COLS], self.size)


class Pull(NamedTuple):
    """Copies that fill a part of an operand."""

    # Of what is here, and of what is mapped.
    copies: list[CopyBatch]
    # For each participant whose chunks can't be mapped, its parts: it offers no memory, or the chunks are in host
    # memory.
    outside: dict[int, Parts]
    # Bytes that others have.
    away: int
    # The answers of those participants of `outside` that were asked; filled by `Sources.ask`.
    asked: dict[int, Future[Sequence[Any]]]


class Sources:
    """All that one rank can read."""

    def __init__(self, job: Job[Plan], engine: PeerState) -> None:
        self.plan, self.me, self.comm, self.chunks, self.ended = job.plan, job.me, job.comm, job.chunks, job.ended
        self.engine, self.streams = engine, engine.pulls(len(job.plan.participants) - 1)
        self.remote: Remote | None = None
        # Bytes that were pulled from other participants.
        self.pulled_bytes = 0
        self.kept: list[Any] = []
        # Kept until all is over.
        self._copies: list[CopyBatch] = []
        self._staging: cp.ndarray | None = None

    @property
    def stream(self) -> cp.cuda.Stream:
        """The first stream of pulls, which has their order."""
        return self.streams[0]

    def run(self, copies: CopyBatch, stream: cp.cuda.Stream) -> None:
        """Put copies on a stream; they are kept until all is over."""
        copies.run(stream, self.streams[1:])
        self._copies.append(copies)

    def parts(self, operand: int, blocks: Sequence[ChunkBlock], target: Span, size: int) -> Parts:
        """Return blocks of an operand, which are placed from the target on.

        Those of the next participant come first, so that ranks that pull the same part at the same time do not all read
        from one.
        """
        where = self.plan.where[self.plan.problem.operands[operand]]
        assert where is not None
        table = np.array(blocks, np.int64).reshape(-1, len(ChunkBlock._fields))
        holders = np.asarray(where, np.int64)[table[:, _CHUNK]]
        holders = np.where(holders == EVERYWHERE, self.me, holders)
        order = np.argsort((holders - self.me) % len(self.plan.participants), kind="stable")
        holders, table = holders[order], table[order]
        starts = target.pointer + table[:, _ROW] * target.row_stride + table[:, _COL] * target.col_stride
        strides = np.broadcast_to(np.array(target[1:], np.int64), (len(table), 2))
        return Parts(operand, holders, table, np.column_stack([starts, strides]), size)

    def chunk_at(self, operand: int, rect: Rect, size: int) -> tuple[DeviceView, int, int] | None:
        """Return the part of the one chunk of this GPU that a part of an operand is; None if there is none such.

        With its rows and columns; `size` is what an element has in bytes.
        """
        name = "ab"[operand]
        sizes = self.plan.problem[name].chunks
        where = self.plan.where[name]
        at = []
        for axis, (start, stop) in enumerate((rect[:2], rect[2:])):
            ends = np.cumsum(sizes[axis])
            number = int(np.searchsorted(ends, start, "right"))
            if stop > ends[number]:
                return None
            at.append((number, start - int(ends[number] - sizes[axis][number])))
        index = at[0][0] * len(sizes[1]) + at[1][0]
        assert where is not None
        if where[index] not in (self.me, EVERYWHERE):
            return None
        span = span_of(self.chunks[name, index])
        rows, cols = rect[1] - rect[0], rect[3] - rect[2]
        order = "C" if span.col_stride == size or (cols == 1 and rows > 1) else "F"
        if rows == 1 and cols > 1 and span.col_stride != size:
            order = "F"
        return DeviceView(span.at(at[0][1], at[1][1]), order), rows, cols

    def own_copies(self, parts: Parts) -> CopyBatch:
        """Return the copies of the parts whose chunks are on this GPU."""
        own, name = parts.take(parts.holders == self.me), self.plan.problem.operands[parts.operand]
        chunks = [span_of(self.chunks[name, index]) for index in own.blocks[:, _CHUNK].tolist()]
        # Memcpy is as fast as a kernel for a single chunk.
        table = own.table(np.array(chunks, np.int64).reshape(-1, 3))
        return make_copies([table], parts.size, here=len(chunks) > 1)[0]

    def find(
        self, every: Mapping[int, tuple[Parts, list[CopyBatch]]], at_first: Collection[int] = ()
    ) -> dict[int, Pull]:
        """Return the pulls of several parts, and map the memory that they read."""
        found: dict[int, Pull] = {}
        for operand in {parts.operand for parts, _ in every.values()}:
            these = {number: one for number, one in every.items() if one[0].operand == operand}
            made = self._find(list(these.values()), [number in at_first for number in these])
            found |= zip(these, made, strict=True)
        return found

    def _find(self, every: Sequence[tuple[Parts, list[CopyBatch]]], at_first: Sequence[bool]) -> list[Pull]:
        """Return the pulls of parts of one operand, all at once, because the GPUs wait for the first pull of a run."""
        offering = np.zeros(len(self.plan.participants), bool) if self.remote is None else self.remote.offering
        offering[self.me] = False
        in_host = self.is_in_host(every[0][0].operand)
        if in_host:
            offering[:] = False
        theres = [parts.take(offering[parts.holders]) for parts, _ in every]
        first, holders = theres[0], np.concatenate([there.holders for there in theres])
        tables, lanes = [np.empty((0, 7), np.int64)] * len(every), [np.empty(0, np.int64)] * len(every)
        if self.remote is not None and len(holders):
            blocks = np.concatenate([there.blocks for there in theres])
            targets = np.concatenate([there.targets for there in theres])
            spans = self.remote.spans(first.operand, holders, blocks[:, _CHUNK])
            table = first._replace(holders=holders, blocks=blocks, targets=targets).table(spans)
            ends = np.cumsum([len(there.holders) for there in theres])[:-1]
            tables, lanes = np.split(table, ends), np.split(holders, ends)
        found = []
        made = make_copies(tables, first.size, at_first=at_first, lanes=lanes)
        for (parts, own_copies), there, copies in zip(every, theres, made, strict=True):
            outside = set() if len(there.holders) == len(parts.holders) else set(parts.holders.tolist())
            outside -= set() if in_host else {self.me}
            others = {holder: parts.take(parts.holders == holder) for holder in sorted(outside) if not offering[holder]}
            found.append(Pull([*own_copies, copies], others, there.bytes, {}))
        return found

    def pull(self, pull: Pull, stream: cp.cuda.Stream) -> None:
        """Put a pull on a stream."""
        for copies in pull.copies:
            self.run(copies, stream)
        self.pulled_bytes += pull.away
        if pull.outside:
            self._upload(pull, stream)

    def block(self, holder: int, number: int, size: int) -> Span | None:
        """Return where a block of another rank's is, mapped here, of which `size` bytes are wanted."""
        if self.remote is None or not self.remote.offering[holder]:
            return None
        self.pulled_bytes += size
        return Span(*self.remote.spans(BLOCKS, np.array([holder]), np.array([number]))[0].tolist())

    def is_in_host(self, operand: int) -> bool:
        """Whether chunks of an operand are read from host memory while the GPU multiplies."""
        return self.plan.from_host and self.plan.problem.operands[operand] in ("a", "b")

    def allocate(self) -> None:
        """Allocate what it takes to read host memory."""
        if self._staging is None:
            self._staging = staging()

    def ask(self, pull: Pull) -> None:
        """Ask other participants for the parts of a pull that can't be mapped, unless they were; do not wait."""
        for holder in pull.outside.keys() - pull.asked.keys() - {self.me}:
            pull.asked[holder] = self.comm.fetch(holder, "input", _boxes(pull.outside[holder]))

    def _upload(self, pull: Pull, stream: cp.cuda.Stream) -> None:
        """Put on a stream the copies of the parts that can't be mapped, as they come."""
        self.ask(pull)
        self.allocate()
        uploads = Uploads(stream, self._staging)
        # The own parts are there already.
        for holder, parts in sorted(pull.outside.items(), key=lambda one: one[0] != self.me):
            name = self.plan.problem.operands[parts.operand]
            if holder == self.me:
                boxes = _boxes(parts)[:, 1:].tolist()
                self._put(parts, [self.chunks[name, at][r0:r1, c0:c1] for at, r0, r1, c0, c1 in boxes], uploads, stream)
            else:
                self._put(parts, wait_checked(pull.asked.pop(holder), self.ended.check), uploads, stream)
        uploads.finish()

    def _put(self, parts: Parts, found: Sequence[Any], uploads: Uploads, stream: cp.cuda.Stream) -> None:
        """Copy matrices to the places of the parts that they are."""
        problem = self.plan.problem
        type_name = problem.matrices[parts.operand].dtype
        goal = problem.matrix_types[parts.operand] if parts.operand < len(problem.matrix_types) else type_name
        shapes = parts.blocks[:, [_ROWS, _COLS]].tolist()
        for data, span, shape in zip(found, parts.targets.tolist(), shapes, strict=True):
            self.ended.check()
            is_fp8 = type_name in FP8 and data.dtype.itemsize == 1
            part = data.view(np.uint8) if is_fp8 else typed(data, type_name)
            target = array_at(Span(*span), shape, carried(goal, "cupy"), self)
            # A sender with a GPU has converted chunks that are multiplied in another type.
            held = goal if part.dtype == target.dtype else type_name
            if not isinstance(part, cp.ndarray):
                uploads.put(part, target, held)
                continue
            self.kept.append(part)
            stream.wait_event(record(cp.cuda.Stream.null))
            with stream:
                target[...] = in_type(part, held, target.dtype)

    def gather(self, finishing: Finishing | NativeBias, stream: cp.cuda.Stream) -> None:
        """Pull the inputs of the formula on this rank; let a stream wait for them."""
        pulls = self.stream
        for one in finishing.inputs:
            number = self.plan.problem.operands.index(one.name)
            moves = one.moves.take(one.moves.dst_owner == self.me)
            columns = (moves.src, moves.src_row, moves.src_col, moves.nrows, moves.ncols, moves.dst_row, moves.dst_col)
            blocks: dict[int, list[ChunkBlock]] = collections.defaultdict(list)
            for part, *piece in zip(moves.dst.tolist(), *(x.tolist() for x in columns), strict=True):
                blocks[part].append(ChunkBlock(number, *piece))
            size = one.dtype.itemsize
            every = [self.parts(number, these, span_of(one.parts[part]), size) for part, these in blocks.items()]
            for pull in self.find({at: (parts, [self.own_copies(parts)]) for at, parts in enumerate(every)}).values():
                self.pull(pull, pulls)
        stream.wait_event(record(pulls))


def _boxes(parts: Parts) -> Boxes:
    """Return parts as they are asked for."""
    table = parts.blocks
    first = table[:, [_R0, _C0]]
    edges = np.stack([first, first + table[:, [_ROWS, _COLS]]], 2).reshape(-1, 4)
    return np.column_stack([table[:, : _CHUNK + 1], edges])
