"""One participant's side of a program on a GPU.

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

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ResultKey, Side, contiguous, log
from dask_distmm.engines.gpu.copy_kernels import Rectangle, make_copies, table_of
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.programs.blas import assign
from dask_distmm.engines.programs.evaluate import on_stream
from dask_distmm.engines.programs.job import TRIANGLES, Part, ProgramJob, keep_triangle, put
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.sources import ChunkLoader, Source, SourceChunk
from dask_distmm.layout.rectangles import span_of
from dask_distmm.numeric.sparse import rows_from, sparse_package
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.programs.steps import (
    CONTRACTS,
    PART,
    Buffer,
    Call,
    Drop,
    Loop,
    Make,
    New,
    Publish,
    Pull,
    Step,
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
_ON_STREAM = {"evaluate", "evaluate_exactly", "merge", "assemble", "copy", "set_all", "increment"}


class _Graph(NamedTuple):
    """What some steps do: to the device, and to what a job has of buffers and has counted."""

    graph: Any
    made: Mapping[str, Any]
    gone: Collection[str]
    messages: int
    pulled_bytes: int


class _Segment:
    """Steps that follow each other in a loop, of which the host does nothing but queue them, or does not."""

    def __init__(self, steps: Sequence[Step], *, queued: bool) -> None:
        self.steps, self.queued = steps, queued and any(isinstance(step, Call) for step in steps)
        made, reads = set[str](), dict[str, None]()
        for step in steps if self.queued else ():
            if isinstance(step, New):
                made.add(step.buffer.name)
            elif isinstance(step, Call):
                made.update(buffer.name for buffer in step.makes)
                reads |= dict.fromkeys(x.name for x in step.arguments if x.name not in made)
            elif isinstance(step, Publish | Pull):
                reads |= dict.fromkeys(x.name for x in step.buffers if x.name not in made)
            elif isinstance(step, Drop):
                made.discard(step.buffer.name)
        # Buffers that are there before.
        self.reads = tuple(reads)
        # Graphs by the places of these buffers; None where the steps were taken once.
        self.graphs: dict[Any, _Graph | None] = {}

    @functools.cached_property
    def pool(self) -> Any:
        """Memory of values inside of graphs: nothing else is ever there."""
        return cp.cuda.MemoryPool()


class GpuProgramJob(ProgramJob):
    """One participant's side of one run. See the module's text."""

    def __init__(self, side: Side[Any], state: Any) -> None:
        """`state` is what an engine keeps between runs: the `stream` of the work, and `solver()`, kernels on that."""
        super().__init__(side, state.solver())
        self._ready, self._stream = side.ready, state.stream
        self.lends = not self._gathers
        self._on_host = ProgramKernels(self.blas.on_host)
        # Memory that it has beside chunks; what is read by work that is queued, with the events after which it was.
        self._allocated: list[Any] = []
        self._being_read: list[tuple[Any, Sequence[Any]]] = []
        # Messages that went from GPU to GPU, in their order.
        self.messages = 0
        # The parts of bodies of loops; events at the ends of the last turns; whether work goes into a graph.
        self._segments: dict[int, list[_Segment]] = {}
        self._queued = collections.deque[Any]()
        self._captures = False

    def prepare(self) -> None:
        """Bring the chunks to the device, and allocate."""
        self._upload()
        super().prepare()
        # Others may ask for chunks from the vote on.
        cp.cuda.Stream.null.synchronize()

    def _upload(self) -> None:
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        dtype = self.plan.problem.compute_type if self._gathers else None
        self.chunks = {
            key: chunk if isinstance(chunk, SourceChunk) else _on_device(chunk, dtype)
            for key, chunk in self.chunks.items()
        }

    def execute(self) -> dict[ResultKey, Any]:
        """Queue all steps on the stream."""
        self._stream.wait_event(record(cp.cuda.Stream.null))
        try:
            # One thread for small decompositions; those of whole matrices have all.
            host = contextlib.nullcontext() if self._gathers else self.blas.on_host.working(1)
            with self._stream, host:
                made = super().execute()
        finally:
            self._settle()
        arrays = [*self._allocated, *self.chunks.values(), *made.values()] if self._allocated else []
        self.held_bytes = sum({int(x.data.ptr): int(x.nbytes) for x in arrays if hasattr(x.data, "ptr")}.values())
        return made

    # Turns of loops

    def _written_out(self, loop: Loop) -> None:
        """Leave turns to CUDA graphs."""

    def _take_turn(self, body: Sequence[Step]) -> None:
        """Take the steps of a turn: what was taken before by CUDA graphs."""
        if id(body) not in self._segments:
            # Chunks are made ahead of all steps of a turn.
            whole = any(isinstance(step, Make) for step in body)
            groups = [(False, body)] if whole else itertools.groupby(body, self._is_queued)
            self._segments[id(body)] = [_Segment(tuple(steps), queued=queued) for queued, steps in groups]
        for segment in self._segments[id(body)]:
            self.ended.check()
            self._take_segment(segment, functools.partial(self.take, segment.steps, 0.0, 0.0, len(segment.steps)))
        self._queued.append(record(self._stream))
        if len(self._queued) > _QUEUED:
            self.ended.wait(self._queued.popleft())

    def _is_queued(self, step: Step) -> bool:
        """Whether the host does nothing for a step but queue it."""
        if isinstance(step, Call):
            places = (x.buffer if isinstance(x, View) else x for x in (*step.arguments, *step.makes))
            if step.kernel not in _ON_STREAM or any(buffer.host for buffer in places):
                return False
            return "program" not in step.options or on_stream(step.options["program"])
        return isinstance(step, Drop) or (isinstance(step, New) and not step.buffer.host)

    def _take_segment(self, segment: _Segment, take: Callable[[], None]) -> None:
        """Take some steps of a turn; for the third time and later by a graph, if that can be."""
        outside = [self.arrays[name] for name in segment.reads]
        if not segment.queued or not all(isinstance(x, cp.ndarray) for x in outside):
            take()
            return
        key = self.messages % 2, *((x.data.ptr, x.shape, x.strides, x.dtype.char) for x in outside)
        graph = segment.graphs.get(key)
        if graph is None and key in segment.graphs:
            graph = segment.graphs[key] = self._captured(segment, take)
        if graph is None:
            # Kernels are compiled and loaded.
            if len(segment.graphs) < _MOST_GRAPHS:
                segment.graphs.setdefault(key)
            take()
            return
        graph.graph.launch(self._stream)
        self.arrays.update(graph.made)
        for name in graph.gone:
            del self.arrays[name]
        self.messages += graph.messages
        self.pulled_bytes += graph.pulled_bytes

    def _captured(self, segment: _Segment, take: Callable[[], None]) -> _Graph | None:
        """Return a graph of some steps; None where there can't be one."""
        before, messages, pulled, self._captures = self.arrays.copy(), self.messages, self.pulled_bytes, True
        try:
            with cp.cuda.using_allocator(segment.pool.malloc):
                self._stream.begin_capture()
                try:
                    take()
                finally:
                    graph = self._stream.end_capture()
            graph.upload(self._stream)
        except Exception as error:  # whatever it is, it comes again without a graph, or it is only that
            log.info("steps of a loop can't be captured: %s", error)
            segment.queued = False
            return None
        finally:
            # Nothing was done yet.
            after, self._captures = self.arrays.copy(), False
            sent = self.messages - messages, self.pulled_bytes - pulled
            self.messages, self.pulled_bytes = messages, pulled
            self.arrays.clear()
            self.arrays.update(before)
        made = {name: x for name, x in after.items() if before.get(name) is not x}
        return _Graph(graph, made, before.keys() - after.keys(), *sent)

    def _call(self, call: Call) -> None:
        on_host = CONTRACTS[call.kernel].decomposes
        if not on_host or max(math.prod(buffer.shape) for buffer in call.arguments) > _MOST_ON_HOST:
            super()._call(call)
            return
        arguments = [self._at(buffer) for buffer in call.arguments]
        copies = [x.get(self._stream, "A") if isinstance(x, cp.ndarray) else x for x in arguments]
        getattr(self._on_host, call.kernel)(*copies, **call.options)
        for (_, role), one, copy in zip(roles_of(call), arguments, copies, strict=True):
            if role != "r":
                self._write(one, copy)

    def _synchronize(self) -> None:
        self._stream.synchronize()
        self._being_read.clear()

    def _settle(self) -> None:
        """Wait until all work has ended, also after an error: the memory in which it is done is freed then."""
        self._stream.synchronize()

    def _memory(self, buffer: Buffer) -> Any:
        self._allocated.append(super()._memory(buffer))
        return self._allocated[-1]

    def _on_default_stream(self, make: Callable[[], Any]) -> Any:
        """Return new memory, which others use on the default stream, and free there."""
        if self._captures:
            # Of a graph, whose memory nobody else has.
            return make()
        with cp.cuda.Stream.null:
            made = make()
        # Whoever has freed this memory may still have kernels on that stream that use it.
        self._stream.wait_event(record(cp.cuda.Stream.null))
        return made

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return what is on the device for peers that ask over Dask's comms, or what was published on the host."""
        found = super().serve(kind, boxes)
        if kind == PART:
            return found
        found = contiguous(found)
        cp.cuda.Stream.null.synchronize()
        return found

    def _loader(self, uses: Sequence[SourceChunk]) -> ChunkLoader:
        threads = self.plan.participants[self.me].nthreads
        ahead = made_ahead(threads) * len(self.plan.problem.by_ranks)
        # Threads work on the default stream of this device, as tasks do.
        make = functools.partial(_made_on_device, self.plan.problem.compute_type)
        return ChunkLoader(uses, threads, ahead, make, cp.cuda.Device().use)

    def _made(self, loads: ChunkLoader, chunk: SourceChunk) -> Any:
        made, complete = super()._made(loads, chunk)
        self._stream.wait_event(complete)
        return made

    def _free(self, buffer: Buffer) -> None:
        if buffer.is_operand and buffer.name not in self._operands:
            # Its memory goes to the next chunk that is made.
            cp.cuda.Stream.null.wait_event(record(self._stream))
        super()._free(buffer)

    def _new(self, buffer: Buffer) -> Any:
        # Chunks of outputs are freed by others, on the stream that these use.
        make = functools.partial(super()._new, buffer)
        return self._on_default_stream(make) if buffer.like else make()

    def _lent(self, array: Any, *, copied: bool) -> Any:
        """Return what others get of an array: on the host, but for block columns, which stay in their memory."""
        if (self._gathers and not copied) or not isinstance(array, cp.ndarray):
            return super()._lent(array, copied=copied)
        return array.get(stream=self._stream)

    def _fill(self, target: Any, part: Any, owner: int) -> None:
        """Write what another rank has lent."""
        self._write(target, part)

    def _write(self, target: Any, part: Any) -> None:
        if isinstance(target, cp.ndarray):
            target.set(part, stream=self._stream)
        else:
            target[...] = part

    def _handed_over(self, array: Any, *, tall: bool) -> Any:
        """Return a chunk of an output as the user has given those of the operands: CuPy's, or NumPy's."""
        array = cp.asarray(array)
        if self.plan.problem.array == "numpy":
            return array.get(stream=self._stream)
        if tall:
            return array
        made = self._on_default_stream(functools.partial(cp.empty, array.shape, array.dtype))
        made[...] = array
        return made

    def _blank(self, shape: tuple[int, int], dtype: np.dtype, order: Literal["C", "F"], form: str) -> Any:
        """Return a new chunk of an output, with zeros where no rank has a part of it."""

        def make() -> Any:
            try:
                chunk = cp.empty(shape, dtype, order=order)
            except cp.cuda.memory.OutOfMemoryError:
                self._make_room()
                chunk = cp.empty(shape, dtype, order=order)
            if form in TRIANGLES:
                assign(chunk, 0)
            return chunk

        return self._on_default_stream(make)

    def _put(self, parts: Sequence[Part], found: Iterable[Any]) -> None:
        """Write parts to their places: all those that are copied as they are at once."""
        plain, arrays = list[tuple[Part, Rectangle]](), list(found)
        for part, array in zip(parts, arrays, strict=True):
            self.ended.check()
            same = isinstance(array, cp.ndarray) and array.dtype == part.place.dtype
            if same and not part.conjugated and not self._scales:
                source = span_of(array.T if part.transposed else array)
                plain.append((part, Rectangle(source, span_of(part.place), *part.place.shape)))
            else:
                put(self.blas, part, array, self._scales)
        if plain:
            size = parts[0].place.itemsize
            # Their tables may go at once: what is allocated next on this stream, the current one, is used after them.
            make_copies([table_of([one for _, one in plain], size)], size)[0].run(self._stream)
        for part, _ in plain:
            # Copies of what another GPU has are faster than kernels that read it.
            keep_triangle(self.blas, part.form, part.place, part.row, part.col)
        # What came over Dask's comms is nobody else's, and its memory others' as soon as it is let go.
        queued = [(event, some) for event, some in self._being_read if not event.done]
        self._being_read = [*queued, (record(self._stream), arrays)]

    def _make_room(self) -> None:
        """Free what the engine keeps for its next run, if memory is short."""

    def _end_results(self, moves: Sequence[Iterator[None]]) -> None:
        super()._end_results(moves)
        if self.plan.problem.array == "numpy":
            self._result = {key: chunk.get(stream=self._stream) for key, chunk in self._result.items()}


def _made_on_device(
    dtype: np.dtype, source: Source, chunks: Sequence[SourceChunk]
) -> dict[SourceChunk, tuple[Any, Any]]:
    """Make chunks; return them on the device, and the event after which they may be read."""
    made = source.make()
    arrays = {chunk: _on_device(chunk.view(made), dtype) for chunk in chunks}
    complete = record(cp.cuda.Stream.null)
    return {chunk: (array, complete) for chunk, array in arrays.items()}


def _on_device(chunk: Any, dtype: np.dtype | None = None) -> Any:
    if not sparse_package(chunk):
        return cp.asarray(chunk, dtype)
    return rows_from([cp.asarray(part) for part in (chunk.data, chunk.indices, chunk.indptr)], chunk.shape[1])
