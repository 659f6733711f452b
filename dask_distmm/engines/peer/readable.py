"""The chunks that a rank can read, on its own GPU and on others, and copies of them; and chunks that it makes.

Of operands whose chunks a rank makes itself it waits for the tasks that make them, a few ahead, in threads.

Each thread has a CUDA stream of its own, which is CuPy's current stream there. So the kernels of a task overlap with
those of other threads and with GEMMs, and the thread puts the next task's kernels on its stream while they run. An
event tells when a chunk is complete, and the stream of GEMMs waits for it.

Memory. A chunk's memory comes from CuPy's pool in the order of its thread's stream (CuPy's own pool has free blocks for
each stream; RMM's waits where a block goes from one stream to another). When the last reference is dropped, the pool
may hand it to the next task of that thread at once, whose kernels come later *on that stream*, but not later than a
GEMM on another one. So a reference is kept until the event behind the last work that reads the chunk is done, as the
host has seen it (`products`). What a task allocates and frees itself is used only on its thread's stream; so are
the original of a chunk that is converted, and what is copied to the GPU: all of that may be dropped at once.

These streams and CUDA's default stream wait for each other (they are not created as non-blocking). Without that, tasks
would be wrong that use libraries which work on the default stream (cuDF, Numba, PyTorch), or arrays that other tasks
have made there. Streams of the engine are non-blocking: GEMMs do not wait for the default stream. With several threads,
what one task leaves on the GPU for others, as in a cache, has to be complete when it leaves it: others run on other
streams. A worker of dask-cuda has one thread unless it is told otherwise.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ChunkKey, wait_checked
from dask_distmm.engines.gpu.copy_kernels import CopyBatch, make_copies, pull_table
from dask_distmm.engines.gpu.host import Uploads, device_like, in_type, staging, to_device
from dask_distmm.engines.gpu.operands import array_at, check_arrays, record
from dask_distmm.engines.peer.memory import PeerState, Remote
from dask_distmm.engines.peer.offers import BLOCKS, FLAGS, Expected
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.layout.rectangles import Span, Table, span_of
from dask_distmm.numeric.types import FP8, carried, typed
from dask_distmm.planning import EVERYWHERE, Problem
from dask_distmm.planning.groups import ChunkBlock
from dask_distmm.planning.schedule import imports, peer_reads, sent_between, sums_in
from dask_distmm.programs.steps import Box, Buffer, View

# Columns of a table of chunk blocks.
_CHUNK, _R0, _C0, _ROWS, _COLS, _ROW, _COL = map(
    ChunkBlock._fields.index, ("chunk", "r0", "c0", "rows", "cols", "row", "col")
)


class DeviceView(NamedTuple):
    """A matrix on this GPU: its address, and which axis is dense."""

    span: Span
    order: str

    def distance(self, size: int) -> int:
        """Return the distance of rows (order ``"C"``) or columns (``"F"``), in elements of `size` bytes."""
        return max(1, (self.span.row_stride if self.order == "C" else self.span.col_stride) // size)


class Parts(NamedTuple):
    """Pieces of chunks that fill a part of an operand, a row for each: in the order in which they are to be copied."""

    # Its number.
    operand: int
    # Participants that have the chunks, or get them from ranks out of reach; and whether they get them.
    holders: NDArray[np.int64]
    imported: NDArray[np.bool_]
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
        return self._replace(
            holders=self.holders[which],
            imported=self.imported[which],
            blocks=self.blocks[which],
            targets=self.targets[which],
        )

    def own(self, me: int) -> NDArray[np.bool_]:
        """Whether each is of a chunk that a participant had before the run."""
        return np.asarray((self.holders == me) & ~self.imported)

    def table(self, chunks: NDArray[np.int64]) -> Table:
        """Return what copies them out of chunks at some addresses, each with its row and column stride."""
        pointers = chunks[:, 0] + self.blocks[:, _R0] * chunks[:, 1] + self.blocks[:, _C0] * chunks[:, 2]
        sources = np.column_stack([pointers, chunks[:, 1:]])
        return pull_table(sources, self.targets, self.blocks[:, _ROWS], self.blocks[:, _COLS], self.size)


@dataclasses.dataclass(eq=False)
class LoadPulls:
    """A part of an operand that is loaded to a place, and what copies it."""

    place: Buffer | View
    operand: str
    rect: Box
    # Its pieces, once located; whether it is issued at once; whether its pulls are located.
    parts: Parts | None = None
    urgent: bool = False
    located: bool = False
    # Copies of what is here, and of what is mapped; of those of chunks from ranks out of reach.
    copies: list[CopyBatch] = dataclasses.field(default_factory=list)
    imports: CopyBatch | None = None
    # For each participant whose chunks can't be mapped, its parts: it offers no memory, or the chunks are in host
    # memory.
    outside: dict[int, Parts] = dataclasses.field(default_factory=dict)
    # Bytes that others have.
    away: int = 0
    # The answers of those participants of `outside` that were asked; filled by `ChunkPulls.request`.
    requested: dict[int, Future[Sequence[Any]]] = dataclasses.field(default_factory=dict)


class ChunkPulls(Transport):
    """The chunks that a rank can read: its own, mapped ones, and those that it must request."""

    def __init__(self, engine: PeerState, job: ProgramJob) -> None:
        super().__init__(job.plan.ranks, job.comm, job.ended.check)
        self.plan, self.me, self.comm, self.chunks, self.ended = job.plan, job.me, job.comm, job.chunks, job.ended
        self.engine, self.streams, self.note = engine, engine.pulls(len(job.plan.participants) - 1), job.memory.note
        # Flags that others read: one for each rank whose part of the sums is complete, one for all sums.
        self.flags: Any = None
        self.remote: Remote | None = None
        self._expected: Expected | None = None
        self._mark = job.kernels.mark
        # Participants that are gone.
        self.lost: set[int] = set()
        # By operand the participants that get chunks from ranks out of reach; after which event these are there.
        self.getters = {name: rows[job.me] for name, rows in imports(job.plan).items()} if job.rank is not None else {}
        self.imported: cp.cuda.Event | None = None
        # Kept until all is over.
        self._copies: list[CopyBatch] = []
        self._staging: cp.ndarray | None = None

    def offer(self, job: ProgramJob) -> dict[str, Any] | None:
        """Return the offer of all memory that others read; copy chunks whose memory can't be exported."""
        job.memory.fill()
        plan, exporter, stream = job.plan, self.engine.exporter, self.engine.stream
        if len(plan.participants) == 1:
            return None
        read = peer_reads(plan, plan.problem.operands)
        every = enumerate(plan.problem.operands)
        offered = [(number, name, at) for number, name in every for at in np.flatnonzero(read[name][self.me]).tolist()]
        arrays = exporter.exportable([job.chunks[name, at] for _, name, at in offered], stream)
        self.note(*arrays)
        matrices = [(number, at, array) for (number, _, at), array in zip(offered, arrays, strict=True)]
        for name, (chunks, _, getters) in sent_between(plan).items():
            read[name][getters, chunks] = True
        matrices += self._imports(job)
        if job.rank is not None:
            # Blocks that are in this rank's chunks nobody else reads.
            sums = ((name, x) for name, x in job.arrays.items() if name.startswith("sum.") and x.size)
            matrices += [(BLOCKS, int(name.removeprefix("sum.")), x) for name, x in sums]
            matrices.append((FLAGS, 0, self.flags))
            cp.cuda.runtime.memsetAsync(self.flags.data.ptr, 0, self.flags.nbytes, stream.ptr)
            self._expected = Expected.of_product(plan, self.me, sums_in(plan).itemsize, read)
        return exporter.offer(matrices)

    def _imports(self, job: ProgramJob) -> list[tuple[int, int, Any]]:
        """Return the memory for chunks from ranks out of reach, each with its operand's number and its own."""
        return []

    def reads(self, kind: str, holder: int, box: Sequence[int] = ()) -> bool:
        """Whether this GPU can read the memory of another participant."""
        return bool(self.plan.islands[holder] == self.plan.islands[self.me])

    def accept(self, offers: Sequence[Any]) -> None:
        """Map the memory that this rank reads."""
        if self._expected is not None:
            self.remote = Remote(self.plan, self._expected.read(offers), self.engine, self.lost)

    def complete(self) -> None:
        """Wait for all work."""
        self.ended.wait(self._mark(""))

    def settle(self, job: ProgramJob) -> None:
        """Let all streams end: no kernel waits for another rank."""
        for stream in (*self.streams, self.engine.looking, self.engine.sums, self.engine.stream):
            stream.synchronize()
        self.engine.mappings.trim()

    @property
    def stream(self) -> cp.cuda.Stream:
        """The first stream of pulls, which has their order."""
        return self.streams[0]

    def run(self, copies: CopyBatch, stream: cp.cuda.Stream) -> None:
        """Queue copies on a stream, and keep them until the run is over."""
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
        holders, imported = np.where(holders == EVERYWHERE, self.me, holders), np.zeros(len(table), bool)
        if (getters := self.getters.get(self.plan.problem.operands[operand])) is not None:
            imported = getters[table[:, _CHUNK]] >= 0
            holders = np.where(imported, getters[table[:, _CHUNK]], holders)
        order = np.argsort((holders - self.me) % len(self.plan.participants), kind="stable")
        holders, table, imported = holders[order], table[order], imported[order]
        starts = target.pointer + table[:, _ROW] * target.row_stride + table[:, _COL] * target.col_stride
        strides = np.broadcast_to(np.array(target[1:], np.int64), (len(table), 2))
        return Parts(operand, holders, imported, table, np.column_stack([starts, strides]), size)

    def copy_own(self, loads: Sequence[LoadPulls]) -> None:
        """Add to several loads the copies of what is on this GPU; together, as to make them takes long."""
        by_size = collections.defaultdict[int, list[tuple[LoadPulls, Table]]](list)
        for load in loads:
            assert load.parts is not None
            if self.is_in_host(load.parts.operand):
                continue
            own = load.parts.take(load.parts.own(self.me))
            chunks = [span_of(self.chunks[load.operand, index]) for index in own.blocks[:, _CHUNK].tolist()]
            table = own.table(np.array(chunks, np.int64).reshape(-1, 3))
            by_size[own.size].append((load, table))
        for size, pairs in by_size.items():
            tables = [table for _, table in pairs]
            # Memcpy is as fast as a kernel for a single chunk.
            batches = make_copies(tables, size, here=[len(table) > 1 for table in tables])
            for (load, _), copies in zip(pairs, batches, strict=True):
                load.copies.append(copies)

    def find(self, loads: Sequence[LoadPulls]) -> None:
        """Locate the sources of several loads, and map the memory that they read."""
        by_operand = collections.defaultdict[int, list[tuple[LoadPulls, Parts]]](list)
        for load in loads:
            assert load.parts is not None
            by_operand[load.parts.operand].append((load, load.parts))
        for operand, pairs in by_operand.items():
            self._find(operand, *zip(*pairs, strict=True))

    def _find(self, operand: int, loads: Sequence[LoadPulls], every: Sequence[Parts]) -> None:
        """Locate the sources of all loads of an operand at once, since GPUs wait for the first pull of a run."""
        offering = np.zeros(len(self.plan.participants), bool) if self.remote is None else self.remote.offering
        offering[self.me] = False
        in_host = self.is_in_host(operand)
        if in_host:
            offering[:] = False
        near = [parts.take(offering[parts.holders] & ~parts.imported) for parts in every]
        imported = [parts.take(parts.imported) for parts in every] if self.getters else []
        theres = near + imported
        first, holders = theres[0], np.concatenate([there.holders for there in theres])
        tables, lanes = [np.empty((0, 7), np.int64)] * len(theres), [np.empty(0, np.int64)] * len(theres)
        if self.remote is not None and len(holders):
            blocks = np.concatenate([there.blocks for there in theres])
            targets = np.concatenate([there.targets for there in theres])
            spans = self.remote.spans(operand, holders, blocks[:, _CHUNK])
            table = first._replace(holders=holders, blocks=blocks, targets=targets).table(spans)
            ends = np.cumsum([len(there.holders) for there in theres])[:-1]
            tables, lanes = np.split(table, ends), np.split(holders, ends)
        urgent = [*(load.urgent for load in loads), *[False] * len(imported)]
        batches = make_copies(tables, first.size, at_first=urgent, lanes=lanes)
        for load, parts, there, copies in zip(loads, every, near, batches, strict=False):
            outside = set() if len(there.holders) == len(parts.holders) else set(parts.holders.tolist())
            outside -= set() if in_host else {self.me}
            load.outside = {x: parts.take(parts.holders == x) for x in sorted(outside) if not offering[x]}
            load.away, load.located = there.bytes, True
            load.copies.append(copies)
        for load, parts, copies in zip(loads, imported, batches[len(loads) :], strict=False):
            load.away += parts.bytes
            load.imports = copies if len(parts.holders) else None

    def pull(self, load: LoadPulls, stream: cp.cuda.Stream) -> None:
        """Put a pull on a stream."""
        for copies in load.copies:
            self.run(copies, stream)
        if load.imports is not None:
            assert self.imported is not None
            stream.wait_event(self.imported)
            self.run(load.imports, stream)
        self.pulled_bytes += load.away
        if load.outside:
            self._upload(load, stream)

    def block(self, holder: int, number: int, size: int) -> Span | None:
        """Return the address at which a block of another rank is mapped here."""
        if self.remote is None or not self.remote.offering[holder]:
            return None
        self.pulled_bytes += size
        return Span(*self.remote.spans(BLOCKS, np.array([holder]), np.array([number]))[0].tolist())

    def is_in_host(self, operand: int) -> bool:
        """Whether chunks of an operand are read from host memory while the GPU multiplies."""
        return self.plan.from_host and self.plan.problem.operands[operand] in ("a", "b")

    def allocate(self) -> None:
        """Allocate the staging buffers for reading host memory."""
        if self._staging is None:
            self._staging = staging()

    def request(self, load: LoadPulls) -> None:
        """Request the parts of a load that can't be mapped, once, without waiting."""
        for holder in load.outside.keys() - load.requested.keys() - {self.me}:
            load.requested[holder] = self.comm.fetch(holder, "input", _boxes(load.outside[holder]))

    def _upload(self, load: LoadPulls, stream: cp.cuda.Stream) -> None:
        """Queue uploads of the parts that can't be mapped, as they are received."""
        self.request(load)
        self.allocate()
        uploads = Uploads(stream, self._staging)
        # The own parts are there already.
        for holder, parts in sorted(load.outside.items(), key=lambda item: item[0] != self.me):
            name = self.plan.problem.operands[parts.operand]
            if holder == self.me:
                boxes = _boxes(parts)[:, 1:].tolist()
                self._put(parts, [self.chunks[name, at][r0:r1, c0:c1] for at, r0, r1, c0, c1 in boxes], uploads, stream)
            else:
                self._put(parts, wait_checked(load.requested.pop(holder), self.ended.check), uploads, stream)
        uploads.finish()

    def _put(self, parts: Parts, arrays: Sequence[Any], uploads: Uploads, stream: cp.cuda.Stream) -> None:
        """Copy received matrices to the destinations of their parts."""
        problem = self.plan.problem
        type_name = problem.matrices[parts.operand].dtype
        goal = problem.matrix_types[parts.operand] if parts.operand < len(problem.matrix_types) else type_name
        shapes = parts.blocks[:, [_ROWS, _COLS]].tolist()
        for data, span, shape in zip(arrays, parts.targets.tolist(), shapes, strict=True):
            self.ended.check()
            is_fp8 = type_name in FP8 and data.dtype.itemsize == 1
            part = data.view(np.uint8) if is_fp8 else typed(data, type_name)
            target = array_at(Span(*span), shape, carried(goal, "cupy"), self)
            # A sender with a GPU has converted chunks that are multiplied in another type.
            held = goal if part.dtype == target.dtype else type_name
            if not isinstance(part, cp.ndarray):
                uploads.put(part, target, held)
                continue
            self.note(part)
            stream.wait_event(record(cp.cuda.Stream.null))
            with stream:
                target[...] = in_type(part, held, target.dtype)


def _boxes(parts: Parts) -> Boxes:
    """Return parts as the boxes of a request."""
    table = parts.blocks
    first = table[:, [_R0, _C0]]
    edges = np.stack([first, first + table[:, [_ROWS, _COLS]]], 2).reshape(-1, 4)
    return np.column_stack([table[:, : _CHUNK + 1], edges])


# Chunks that tasks make in threads of the rank, on the GPU, in the type in which they are multiplied


# One thread at a time copies to the GPU: several have no more of the bus, and the pinned buffers are for one.
_copying = threading.Lock()


class Made(NamedTuple):
    """A chunk on the GPU."""

    # Keeps its memory.
    array: Any
    # Where it is.
    view: DeviceView
    # The event after which it may be read.
    complete: cp.cuda.Event


class DeviceMaker:
    """Loads chunks to the device, in the threads of a `ChunkLoader`."""

    def __init__(
        self,
        problem: Problem,
        chunks: Mapping[ChunkKey, SourceChunk],
        streams: Sequence[cp.cuda.Stream],
        begin: cp.cuda.Event,
    ) -> None:
        self._problem, self._event = problem, begin
        self._keys = {chunk: key for key, chunk in chunks.items()}
        self._free, self._own = list(streams), threading.local()
        # A thread begins with the first GPU that the process sees.
        self._use_device = cp.cuda.Device().use

    def begin(self) -> None:
        """Create a loader thread's stream."""
        self._use_device()
        self._own.stream = self._free.pop()
        self._own.stream.wait_event(self._event)

    def make(self, source: Source, chunks: Sequence[SourceChunk]) -> dict[SourceChunk, Made]:
        """Run the task of a source; return those of its chunks that are used."""
        stream = self._own.stream
        # Not by `use`: a task that has a stream of its own for a while would leave its thread on the default stream.
        with stream:
            value = source.make()
            current = cp.cuda.get_current_stream()
            if current.ptr != stream.ptr:
                # The task has left its thread with another one.
                stream.wait_event(record(current))
            with stream:
                arrays = {chunk: self._on_device(*self._keys[chunk], chunk.view(value), stream) for chunk in chunks}
        complete = record(stream)
        return {chunk: Made(*array, complete) for chunk, array in arrays.items()}

    def _on_device(self, operand: str, number: int, chunk: Any, stream: cp.cuda.Stream) -> tuple[Any, DeviceView]:
        """Return a chunk on the GPU, in the type and the memory order in which it is multiplied, and where it is."""
        check_arrays("peer", {(operand, number): chunk})
        problem, type_name = self._problem, self._problem[operand].dtype
        goal = problem.matrix_types["ab".index(operand)]
        if not isinstance(chunk, cp.ndarray):
            part = chunk.view(np.uint8) if type_name in FP8 else chunk
            chunk = device_like(part)
            with _copying:
                to_device(part, chunk, stream, "made")
        if type_name != goal:
            order = "F" if dense_view(chunk, "F") and not dense_view(chunk, "C") else "C"
            source, chunk = chunk, cp.empty(chunk.shape, carried(goal, "cupy"), order=order)
            chunk[...] = in_type(source, type_name, chunk.dtype)
        # The library conjugates what it transposes.
        wanted = "F" if problem[operand].conjugated else ""
        if (view := dense_view(chunk, wanted)) is None:
            source, chunk = chunk, cp.empty(chunk.shape, chunk.dtype, order=wanted or "C")
            bits(chunk)[...] = bits(source)
            view = dense_view(chunk, wanted)
        assert view is not None
        return chunk, view


def bits(array: Any) -> Any:
    """Return an array to be copied as it is: CuPy has no kernels for some types of two bytes."""
    return array.view(np.uint16) if array.dtype.kind == "V" and array.dtype.itemsize == 2 else array


def dense_view(array: Any, wanted: str = "") -> DeviceView | None:
    """Return the storage of a matrix if its rows (order ``"C"``) or columns (``"F"``) are dense; None if not."""
    (rows, cols), (down, across), size = array.shape, map(int, array.strides), int(array.itemsize)
    pointer = int(array.data.ptr)
    if pointer % size:
        return None
    # The stride along an axis of length 1 means nothing.
    if wanted != "F" and (across == size or cols == 1) and (rows == 1 or (down >= cols * size and not down % size)):
        return DeviceView(Span(pointer, down if rows > 1 else cols * size, size), "C")
    if wanted != "C" and (down == size or rows == 1) and (cols == 1 or (across >= rows * size and not across % size)):
        return DeviceView(Span(pointer, size, across if cols > 1 else rows * size), "F")
    return None
