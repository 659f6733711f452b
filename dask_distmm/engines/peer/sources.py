"""Where A, B and what the formula reads come from: pulls out of chunks, here and there, into this GPU's memory."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.dtypes import FP8, carried, typed
from dask_distmm.engines.base import ChunkKey, Comm, wait_checked
from dask_distmm.engines.device.finishing import Finishing, NativeBias
from dask_distmm.engines.device.operands import in_type
from dask_distmm.engines.panels import Piece
from dask_distmm.engines.peer.pulls import Copies, Rectangle, span_of
from dask_distmm.layout.rectangles import Span
from dask_distmm.plan import EVERYWHERE, Plan
from dask_distmm.plan.plan import Rect

if TYPE_CHECKING:
    from dask_distmm.engines.peer.remote import Remote

__all__ = ["Ended", "Pull", "Sources", "View", "record"]


class Ended:
    """Whether a run has been ended from outside; any thread may say so."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise if it has."""
        if self.error is not None:
            raise self.error


def record(stream: cp.cuda.Stream) -> cp.cuda.Event:
    """Return an event that is done when all that is on the stream now is."""
    event = cp.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


class View(NamedTuple):
    """A matrix on this GPU: where it lies, and which axis is dense."""

    span: Span
    order: str


class Pull(NamedTuple):
    """Copies that fill a part of an operand.

    Parameters
    ----------
    operand
        Its number.
    copies
        Of what lies here, and of what is mapped.
    outside
        For each participant that offers no memory, pieces and their addresses.
    target, size
        Where all of it goes, and bytes of an element.
    away
        Bytes that others have.
    """

    operand: int
    copies: list[Copies]
    outside: dict[int, list[tuple[Piece, int]]]
    target: Span
    size: int
    away: int


class Sources:
    """All that one rank can read.

    Parameters
    ----------
    plan, me, comm
        Of the run.
    chunks
        What this participant has staged, on the device.
    streams
        For pulls, used in turn.
    ended
        Whether the run still goes on.

    Attributes
    ----------
    remote
        What others offer; None if nobody else takes part.
    kept
        Device memory that must stay until all pulls are over.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        comm: Comm,
        chunks: Mapping[ChunkKey, Any],
        streams: Sequence[cp.cuda.Stream],
        ended: Ended,
    ) -> None:
        self.plan, self.me, self.comm, self.chunks, self.ended = plan, me, comm, chunks, ended
        self.remote: Remote | None = None
        self.kept: list[Any] = []
        # Kept until all is over.
        self._copies: list[Copies] = []
        self._streams, self._turn = streams, 0

    @property
    def pulled_bytes(self) -> int:
        """Bytes that others had."""
        return self.remote.pulled_bytes if self.remote is not None else 0

    def next_stream(self) -> cp.cuda.Stream:
        """Return a stream for the next pulls."""
        self._turn += 1
        return self._streams[self._turn % len(self._streams)]

    def copy(self, found: Sequence[Rectangle], itemsize: int, stream: cp.cuda.Stream, *, here: bool = False) -> None:
        """Put copies on a stream; parameters as `Copies`."""
        self._run(Copies(found, itemsize, here=here), stream)

    def _run(self, copies: Copies, stream: cp.cuda.Stream) -> None:
        copies.run(stream)
        self._copies.append(copies)

    def has(self, operand: int, pieces: Sequence[Piece]) -> bool:
        """Whether all pieces of an operand are of chunks that lie here."""
        name = self.plan.problem.operands[operand]
        return all(self._holder(name, piece) == self.me for piece in pieces)

    def chunk_at(self, operand: int, rect: Rect, size: int) -> tuple[View, int, int] | None:
        """Return the part of the one chunk of this GPU that a part of an operand is; None if there is none such.

        With its rows and columns; `size` is what an element has in bytes.
        """
        name = "ab"[operand]
        sizes = self.plan.problem.chunks_of(name)
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
        start = span.pointer + at[0][1] * span.row_stride + at[1][1] * span.col_stride
        order = "C" if span.col_stride == size or (cols == 1 and rows > 1) else "F"
        if rows == 1 and cols > 1 and span.col_stride != size:
            order = "F"
        return View(Span(start, span.row_stride, span.col_stride), order), rows, cols

    def at_home(self, operand: int, pieces: Sequence[Piece], target: Span, size: int) -> Copies:
        """Find out what is to be copied of chunks that lie here, for pieces that are placed from the target on."""
        name, found = self.plan.problem.operands[operand], []
        for piece in pieces:
            if self._holder(name, piece) == self.me:
                found.append(_copy_of(piece, span_of(self.chunks[name, piece.chunk]), target))
        # One chunk is what memcpy does as quickly.
        return Copies(found, size, here=len(found) > 1)

    def find(
        self, operand: int, pieces: Sequence[Piece], target: Span, size: int, at_home: Copies | None = None
    ) -> Pull:
        """Find out all that is to be copied for some pieces of an operand, which are placed from the target on."""
        name = self.plan.problem.operands[operand]
        there: list[Rectangle] = []
        away, outside = 0, collections.defaultdict(list)
        for piece in pieces:
            holder, amount = self._holder(name, piece), piece.rows * piece.cols * size
            if holder == self.me:
                continue
            if (told := self.there(holder, operand, piece.chunk, amount)) is not None:
                there.append(_copy_of(piece, told, target))
                away += amount
            else:
                outside[holder].append((piece, _start(piece, target)))
        copies = [at_home or self.at_home(operand, pieces, target, size), Copies(there, size)]
        return Pull(operand, copies, dict(outside), target, size, away)

    def _holder(self, name: str, piece: Piece) -> int:
        where = self.plan.where[name]
        assert where is not None
        holder = int(where[piece.chunk])
        return self.me if holder == EVERYWHERE else holder

    def pull(self, what: Pull, stream: cp.cuda.Stream) -> None:
        """Put what was found on a stream."""
        for copies in what.copies:
            self._run(copies, stream)
        for holder, these in what.outside.items():
            self._fetch(holder, what.operand, these, what.target, what.size, stream)

    def there(self, holder: int, operand: int, number: int, size: int) -> Span | None:
        """Return where a matrix of another participant is, mapped here; None if it offers nothing."""
        return None if self.remote is None else self.remote.span(holder, operand, number, size)

    def _fetch(
        self, holder: int, operand: int, pieces: list[tuple[Piece, int]], target: Span, size: int, stream: Any
    ) -> None:
        """Get what a participant has that offers no memory, over Dask's comms."""
        held = self.plan.problem.dtype_of(self.plan.problem.operands[operand])
        dtype = carried(self.plan.problem.matrix_types[operand] if operand < 2 else held, "cupy")
        boxes = np.array([(operand, p.chunk, p.r0, p.r0 + p.rows, p.c0, p.c0 + p.cols) for p, _ in pieces], np.int64)
        answer = self.comm.fetch(holder, "input", boxes, False)
        found = []
        for (piece, start), data in zip(pieces, wait_checked(answer, self.ended.check), strict=True):
            # What is multiplied in another type has been converted there.
            bare = data.view(np.uint8) if held in FP8 and data.dtype.itemsize == 1 else data
            part = typed(cp.asarray(bare), held)
            part = part if part.dtype == dtype else in_type(part, held, dtype)
            self.kept.append(part)
            found.append(Rectangle(span_of(part), target._replace(pointer=start), piece.rows, piece.cols))
        # The default stream has done this.
        stream.wait_event(record(cp.cuda.Stream.null))
        self.copy(found, size, stream)

    def gather(self, finishing: Finishing | NativeBias, stream: cp.cuda.Stream) -> None:
        """Pull what the formula reads on this rank; let a stream wait for it."""
        pulls = self.next_stream()
        for one in finishing.inputs:
            number = self.plan.problem.operands.index(one.name)
            moves = one.moves.take(one.moves.dst_owner == self.me)
            columns = (moves.src, moves.src_row, moves.src_col, moves.nrows, moves.ncols, moves.dst_row, moves.dst_col)
            pieces: dict[int, list[Piece]] = collections.defaultdict(list)
            for part, *piece in zip(moves.dst.tolist(), *(x.tolist() for x in columns), strict=True):
                pieces[part].append(Piece(number, *piece))
            for part, these in pieces.items():
                self.pull(self.find(number, these, span_of(one.parts[part]), one.dtype.itemsize), pulls)
        stream.wait_event(record(pulls))


def _start(piece: Piece, target: Span) -> int:
    return target.pointer + piece.row * target.row_stride + piece.col * target.col_stride


def _copy_of(piece: Piece, chunk: Span, target: Span) -> Rectangle:
    """Return the copy of a piece of a chunk to where it belongs."""
    pointer = chunk.pointer + piece.r0 * chunk.row_stride + piece.c0 * chunk.col_stride
    to = target._replace(pointer=_start(piece, target))
    return Rectangle(chunk._replace(pointer=pointer), to, piece.rows, piece.cols)
