"""The memory of a GPU, in which a rank takes the steps of a program.

For tall matrices, kernels are queued on one stream, and what is small goes by the host. For a factorization, chunks are
there and results are made there, however its ranks get at each other's matrices.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.engines.base import ChunkKey, Side, contiguous
from dask_distmm.engines.gpu.copy_kernels import Rectangle, make_copies, table_of
from dask_distmm.engines.gpu.host import kernel
from dask_distmm.engines.gpu.operands import captured, record
from dask_distmm.engines.programs.blas import assign
from dask_distmm.engines.programs.evaluate import on_stream
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.engines.programs.job import TRIANGLES, Memory, Part, ProgramJob, keep_triangle, put
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.layout.rectangles import span_of
from dask_distmm.numeric.sparse import rows_from, sparse_package
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.programs.steps import (
    CONTRACTS,
    Call,
    Drop,
    New,
    Publish,
    Pull,
    Step,
    Take,
    View,
    roles_of,
)

# Elements of the largest argument of a decomposition that the host does: it is five times as fast for order 64, and
# twice for 128 (Xeon, H200).
_MOST_ON_HOST = 2**14
# So many places in memory are known of the same steps: more hardly come again.
_MOST_GRAPHS = 16
# Turns of a loop that are on the stream: the host is not farther ahead.
_QUEUED = 8
# Kernels that only put work on the stream, whatever their arguments are. Passes of `evaluate` may need the host.
_ON_STREAM = {"evaluate", "evaluate_exactly", "merge", "assemble", "copy", "set_all", "increment", "add"}
_ON_STREAM |= {"scale_residual", "permute_rows", "solve_whole", "correct", "multiply_chunks"}


class _Graph(NamedTuple):
    """What some steps do: to the device, and to what a job has of buffers and has counted."""

    graph: Any
    arrays: Mapping[str, Any]
    gone: Collection[str]
    messages: int
    pulled_bytes: int


class _Segment:
    """Steps that follow each other in a loop, of which the host does nothing but queue them, or does not."""

    def __init__(self, steps: Sequence[Step], *, queued: bool) -> None:
        self.steps, self.queued = steps, queued and any(isinstance(step, Call) for step in steps)
        produced, reads = set[str](), dict[str, None]()
        for step in steps if self.queued else ():
            if isinstance(step, New):
                produced.add(step.buffer.name)
            elif isinstance(step, Call):
                produced.update(buffer.name for buffer in step.makes)
                reads |= dict.fromkeys(x.name for x in step.arguments if x.name not in produced)
            elif isinstance(step, Publish | Pull):
                reads |= dict.fromkeys(x.name for x in step.buffers if x.name not in produced)
            elif isinstance(step, Drop):
                produced.discard(step.buffer.name)
        # Buffers that are there before.
        self.reads = tuple(reads)
        # Graphs by the places of these buffers; None where the steps were taken once.
        self.graphs: dict[Any, _Graph | None] = {}

    @functools.cached_property
    def pool(self) -> Any:
        """Memory of values inside of graphs: nothing else is ever there."""
        return cp.cuda.MemoryPool()


class DeviceMemory(Memory):
    """The memory of a GPU; what is small is decomposed on the host."""

    def __init__(self, side: Side[Any], kernels: Any, make_room: Callable[[], None] | None = None) -> None:
        # `make_room` frees what the engine keeps for its next run.
        self._plan, self._ready, self._blas, self._make_room = side.plan, side.ready, kernels, make_room
        self._stream, self._gathers = kernels.streams[0], isinstance(side.plan, FactorPlacement)
        # Memory that it has beside chunks; what is read by work that is queued, with the events after which it was.
        self._allocated: list[Any] = []
        self._being_read: list[tuple[Any, Sequence[Any]]] = []
        # The parts of bodies of loops; events at the ends of the last turns; whether work goes into a graph.
        self._segments: dict[int, list[_Segment]] = {}
        self._queued = collections.deque[Any]()
        self._captures = False

    @functools.cached_property
    def _on_host(self) -> ProgramKernels:
        return ProgramKernels(self._blas.on_host)

    def upload(self, chunks: dict[ChunkKey, Any]) -> dict[ChunkKey, Any]:
        """Return chunks on the device, of a factorization in the type of that."""
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        dtype = self._plan.problem.compute_type if self._gathers else None
        return {
            key: chunk if isinstance(chunk, SourceChunk) else _on_device(chunk, dtype) for key, chunk in chunks.items()
        }

    def complete(self) -> None:
        """Wait until what others read from the vote on is here."""
        cp.cuda.Stream.null.synchronize()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Queue all work on the stream."""
        self._stream.wait_event(record(cp.cuda.Stream.null))
        # One thread for small decompositions; those of whole matrices have all.
        with self._stream, contextlib.nullcontext() if self._gathers else self._blas.on_host.working(1):
            yield

    def held_bytes(self, chunks: Sequence[Any]) -> int:
        """Return the bytes of device memory that were held for the run, with those of chunks."""
        arrays = [*self._allocated, *chunks] if self._allocated else []
        return sum({int(x.data.ptr): int(x.nbytes) for x in arrays if isinstance(x, cp.ndarray)}.values())

    # Turns of loops

    def take_turn(self, job: ProgramJob, body: Sequence[Step]) -> None:
        """Take the steps of a turn: what was taken before by CUDA graphs."""
        if id(body) not in self._segments:
            # Chunks are made ahead of all steps of a turn.
            whole = any(isinstance(step, Take) for step in body)
            queues = functools.partial(_is_queued, job.exchange)
            groups = [(False, body)] if whole else itertools.groupby(body, queues)
            self._segments[id(body)] = [_Segment(tuple(steps), queued=queued) for queued, steps in groups]
        for segment in self._segments[id(body)]:
            job.ended.check()
            take = functools.partial(job.take, segment.steps, 0.0, 0.0, len(segment.steps))
            self._take_segment(job, segment, take)
        self._queued.append(record(self._stream))
        if len(self._queued) > _QUEUED:
            job.ended.wait(self._queued.popleft())

    def _take_segment(self, job: ProgramJob, segment: _Segment, take: Callable[[], None]) -> None:
        """Take some steps of a turn; for the third time and later by a graph, if that can be."""
        outside, messages = [job.arrays[name] for name in segment.reads], job.exchange
        if not segment.queued or not all(isinstance(x, cp.ndarray) for x in outside):
            take()
            return
        key = messages.messages % 2, *((x.data.ptr, x.shape, x.strides, x.dtype.char) for x in outside)
        graph = segment.graphs.get(key)
        if graph is None and key in segment.graphs:
            graph = segment.graphs[key] = self._captured(job, segment, take)
        if graph is None:
            # Kernels are compiled and loaded.
            if len(segment.graphs) < _MOST_GRAPHS:
                segment.graphs.setdefault(key)
            take()
            return
        graph.graph.launch(self._stream)
        job.arrays.update(graph.arrays)
        for name in graph.gone:
            del job.arrays[name]
        messages.messages += graph.messages
        messages.pulled_bytes += graph.pulled_bytes

    def _captured(self, job: ProgramJob, segment: _Segment, take: Callable[[], None]) -> _Graph | None:
        """Return a graph of some steps; None where there can't be one."""
        messages, before = job.exchange, job.arrays.copy()
        counts, self._captures = (messages.messages, messages.pulled_bytes), True

        def queue() -> None:
            with cp.cuda.using_allocator(segment.pool.malloc):
                take()

        graph = captured(self._stream, queue, "steps of a loop")
        # Nothing was done yet.
        after, self._captures = job.arrays.copy(), False
        sent = messages.messages - counts[0], messages.pulled_bytes - counts[1]
        messages.messages, messages.pulled_bytes = counts
        job.arrays.clear()
        job.arrays.update(before)
        if graph is None:
            segment.queued = False
            return None
        produced = {name: x for name, x in after.items() if before.get(name) is not x}
        return _Graph(graph, produced, before.keys() - after.keys(), *sent)

    def kernel(self, kernels: Any, call: Call) -> Any:
        """Return what a call calls: for small decompositions on the host."""
        on_host = CONTRACTS[call.kernel].decomposes
        if not on_host or max(math.prod(buffer.shape) for buffer in call.arguments) > _MOST_ON_HOST:
            return super().kernel(kernels, call)
        return functools.partial(self._call_on_host, call)

    def _call_on_host(self, call: Call, *arguments: Any, **options: Any) -> None:
        copies = [x.get(self._stream, "A") if isinstance(x, cp.ndarray) else x for x in arguments]
        getattr(self._on_host, call.kernel)(*copies, **options)
        for (_, role), array, copy in zip(roles_of(call), arguments, copies, strict=True):
            if role != "r":
                self.write(array, copy)

    def synchronize(self) -> None:
        """Wait until all work that was queued is done."""
        self._stream.synchronize()
        self._being_read.clear()

    def note(self, *arrays: Any) -> None:
        """Note memory that was allocated beside chunks."""
        self._allocated += arrays

    def new(self, make: Callable[[], Any], *, kept: bool) -> Any:
        """Return new memory; what Dask keeps others use on the default stream, and free there."""
        if not kept or self._captures:  # of a graph, whose memory nobody else has
            return make()
        with cp.cuda.Stream.null:
            array = make()
        # Whoever has freed this memory may still have kernels on that stream that use it.
        self._stream.wait_event(record(cp.cuda.Stream.null))
        return array

    def sent(self, arrays: list[Any]) -> list[Any]:
        """Return arrays as they are sent over Dask's comms."""
        if not any(isinstance(x, cp.ndarray) for x in arrays):
            return arrays
        arrays = contiguous(arrays)
        cp.cuda.Stream.null.synchronize()
        return arrays

    @property
    def making(self) -> tuple[Any, ...]:
        """Functions by which loader threads load chunks to the device, on its default stream, as tasks do."""
        return functools.partial(_made_on_device, self._plan.problem.compute_type), cp.cuda.Device().use

    def arrived(self, chunk: Any) -> Any:
        """Return what was made of a chunk, once it may be read."""
        array, complete = chunk
        self._stream.wait_event(complete)
        return array

    def reuse(self) -> None:
        """Let the memory of a chunk that was made go to the next one."""
        cp.cuda.Stream.null.wait_event(record(self._stream))

    def lent(self, array: Any, *, copied: bool) -> Any:
        """Return what others get of an array: on the host, but for block columns, which stay in their memory."""
        if (self._gathers and not copied) or not isinstance(array, cp.ndarray):
            return super().lent(array, copied=copied)
        return array.get(stream=self._stream)

    def write(self, target: Any, part: Any) -> None:
        """Write what another rank has lent."""
        if isinstance(target, cp.ndarray):
            target.set(part, stream=self._stream)
        else:
            target[...] = part

    def handed_over(self, array: Any, *, tall: bool) -> Any:
        """Return a chunk of an output as the user has given those of the operands: CuPy's, or NumPy's."""
        array = self.delivered(cp.asarray(array))
        if tall or not isinstance(array, cp.ndarray):
            return array
        copied = self.new(functools.partial(cp.empty, array.shape, array.dtype), kept=True)
        copied[...] = array
        return copied

    def delivered(self, chunk: Any, output: str = "") -> Any:
        """Return a chunk of a factorization's result as Dask gets it."""
        return chunk.get(stream=self._stream) if self._plan.problem.array == "numpy" else chunk

    def blank(self, shape: tuple[int, int], dtype: np.dtype, order: Literal["C", "F"], form: str) -> Any:
        """Return a new chunk of an output, with zeros where no rank has a part of it."""

        def make() -> Any:
            try:
                chunk = cp.empty(shape, dtype, order=order)
            except cp.cuda.memory.OutOfMemoryError:
                if self._make_room is not None:
                    self._make_room()
                chunk = cp.empty(shape, dtype, order=order)
            if form in TRIANGLES:
                assign(chunk, 0)
            return chunk

        return self.new(make, kept=True)

    def put(self, job: ProgramJob, parts: Sequence[Part], arrays: Iterable[Any]) -> None:
        """Write parts to their places: all those that are copied as they are at once."""
        plain, sources = list[tuple[Part, Rectangle]](), list(arrays)
        for part, array in zip(parts, sources, strict=True):
            job.ended.check()
            same = isinstance(array, cp.ndarray) and array.dtype == part.place.dtype
            if same and not part.conjugated and not job.scales:
                source = span_of(array.T if part.transposed else array)
                plain.append((part, Rectangle(source, span_of(part.place), *part.place.shape)))
            elif _narrows(job, part, array):
                _gather(part, array, [x.data.ptr for x in job.scales])
            else:
                put(job.blas, part, array, job.scales)
        if plain:
            size = parts[0].place.itemsize
            # Their tables may go at once: what is allocated next on this stream, the current one, is used after them.
            make_copies([table_of([rectangle for _, rectangle in plain], size)], size)[0].run(self._stream)
        for part, _ in plain:
            # Copies of what another GPU has are faster than kernels that read it.
            keep_triangle(job.blas, part.form, part.place, part.row, part.col)
        # What came over Dask's comms is nobody else's, and its memory others' as soon as it is let go.
        queued = [(event, some) for event, some in self._being_read if not event.done]
        self._being_read = [*queued, (record(self._stream), sources)]


def _is_queued(messages: Transport, step: Step) -> bool:
    """Whether the host does nothing for a step of a loop but queue it."""
    if isinstance(step, Call):
        places = (x.buffer if isinstance(x, View) else x for x in (*step.arguments, *step.makes))
        if step.lane or step.kernel not in _ON_STREAM or any(buffer.host for buffer in places):
            return False
        return "program" not in step.options or on_stream(step.options["program"])
    return messages.queues(step) or isinstance(step, Drop) or (isinstance(step, New) and not step.buffer.host)


def _narrows(job: ProgramJob, part: Part, array: Any) -> bool:
    """Whether a part of a matrix goes to columns of factors of few bits."""
    place, convertible = part.place, isinstance(array, cp.ndarray) and array.dtype == job.plan.problem.compute_type
    by_columns = place.dtype.char in "fF" and place.strides[0] == place.itemsize
    return convertible and by_columns and part.form == "full" and array.dtype.kind == place.dtype.kind


def _gather(part: Part, array: Any, scales: Sequence[int]) -> None:
    """Write a part to columns of factors of few bits, its rows and columns multiplied by numbers at some addresses."""
    array, place = array.T if part.transposed else array, part.place
    (rows, columns), size = place.shape, array.itemsize
    if not rows or not columns:
        return
    # Scales are of the real type.
    first = [x + at * array.real.itemsize for x, at in zip(scales, (part.row, part.col), strict=False)]
    numbers = array.data.ptr, *(x // size for x in array.strides), *(*first, 0, 0)[:2], rows, columns
    numbers = *numbers, place.data.ptr, place.strides[1] // place.itemsize
    blocks = -(-rows // 32) * -(-columns // 32)
    arguments = *map(np.int64, numbers), np.int32(part.conjugated)
    kernel("refining", "gather_scaled", array.dtype)((blocks,), (32, 8), arguments)


def _made_on_device(
    dtype: np.dtype, source: Source, chunks: Sequence[SourceChunk]
) -> dict[SourceChunk, tuple[Any, Any]]:
    """Make chunks; return them on the device, and the event after which they may be read."""
    loaded = source.make()
    arrays = {chunk: _on_device(chunk.view(loaded), dtype) for chunk in chunks}
    complete = record(cp.cuda.Stream.null)
    return {chunk: (array, complete) for chunk, array in arrays.items()}


def _on_device(chunk: Any, dtype: np.dtype | None = None) -> Any:
    if not sparse_package(chunk):
        return cp.asarray(chunk, dtype)
    return rows_from([cp.asarray(part) for part in (chunk.data, chunk.indices, chunk.indptr)], chunk.shape[1])
