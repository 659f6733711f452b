"""The engine for GPUs of one host that can read each other's memory: no rank sends, each pulls what it needs.

One participant's side of one run of a product::

    prepare()   chunks are brought to the device and offered to the others; buffers and D are allocated; own chunks are
                copied into buffers, and the first products are begun. An error here is a vote against the run
    accept()    the offers of all others are read and their memory is mapped; mappings that are out of date are closed
    execute()   step by step: pulls on streams of their own, GEMMs on another stream as soon as their operands are here;
                partial sums of other ranks are pulled and added as they get ready;
                parts of this rank's chunks of D that other ranks computed are pulled; the formula is applied

No rank sends anything, and no kernel waits for another rank. A flag in a peer's memory says whether its sums are ready.
The memory that a rank offers stays as it is until all participants have answered that they are done.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ChunkKey, Engine, Job, ResultKey, Side, contiguous
from dask_distmm.engines.gpu.finishing import BiasCut, NativeBias
from dask_distmm.engines.gpu.gemm import GemmTypes, check_fp8
from dask_distmm.engines.gpu.operands import DeviceChunks, array_at, check_arrays, check_gpu, device_memory, mark
from dask_distmm.engines.gpu.program import GpuProgramJob
from dask_distmm.engines.peer.factor import PeerFactorJob
from dask_distmm.engines.peer.loads import Loads, OperandBuffers
from dask_distmm.engines.peer.memory import PeerState, Remote
from dask_distmm.engines.peer.offers import BLOCKS, FLAGS, Expected, offer_of, place_of, read_place, read_told
from dask_distmm.engines.peer.products import Multiplication
from dask_distmm.engines.peer.readable import Sources
from dask_distmm.engines.peer.result import Downloads, Result
from dask_distmm.engines.peer.schedule import make_schedule, make_source_schedule
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.layout.rectangles import Span
from dask_distmm.planning import Plan
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.peer import reaches
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.schedule import (
    block_schedules,
    chunk_sources,
    native,
    peer_reads,
    sums_in,
)
from dask_distmm.programs.steps import Make

# Bytes of a matrix that GPUs read out of each other's memory; less goes by the host as fast.
_LEAST_DIRECT = 2**18


class PeerJob(Job[Plan]):
    """One participant's side of one run; see the text of the module."""

    def __init__(self, side: Side[Plan], engine: PeerState) -> None:
        super().__init__(side)
        plan = self.plan
        self.engine, self._address = engine, plan.participants[self.me].address
        self._lost: set[int] = set()
        self._ready, self._stream = side.ready, engine.stream
        self._kinds = GemmTypes(*plan.problem.matrix_types, sums_in(plan).name, plan.problem.compute)
        self._expected: Expected | None = None
        self._multiplication: Multiplication | None = None
        self._downloads: Downloads | None = None
        self.lends = plan.from_host
        self._sources = Sources(self, engine)

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices that were pulled from other participants, or that came over Dask's comms."""
        return self.comm.received_bytes + self._sources.pulled_bytes

    # Before the vote

    def prepare(self) -> None:
        """Allocate, make the offer, and begin the first products.

        Memory is allocated on the default stream, because its users will free it.
        """
        problem, stream = self.plan.problem, self._stream
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        if problem.fp8:
            check_fp8()
        self._kinds.compute_type  # noqa: B018 - the library must have it
        self.engine.exporter.begin(self._address, problem.options.keep_workspace_bytes)
        stays = ("a", "b") if self.plan.from_host else ()
        there = {key: x for key, x in self.chunks.items() if key[0] not in stays and not isinstance(x, SourceChunk)}
        self._on_device = DeviceChunks(problem, there)
        self.chunks |= self._on_device.arrays
        self._sources.chunks = self.chunks
        if self.rank is not None:
            self._allocate()
        allocated = cp.cuda.Event(disable_timing=True)
        allocated.record(cp.cuda.Stream.null)
        stream.wait_event(allocated)
        try:
            self._on_device.fill(stream)
            if self._multiplication is not None:
                self._multiplication.loads.copy_own_chunks(self.me, stream)
            if len(self.plan.participants) > 1:
                read = peer_reads(self.plan, problem.operands)
                self.offer = self._make_offer(read)
                if self.rank is not None:
                    self._expected = Expected.of_product(self.plan, self.me, sums_in(self.plan).itemsize, read)
        finally:
            # Others may read chunks from the vote on, so the chunks must be complete. And an abort may free memory, so
            # no copy into it may be under way.
            stream.synchronize()
        if self._multiplication is not None:
            rate = problem.options.machine("peer").rate(self._kinds.compute or self._kinds.a)
            self._multiplication.begin_early(rate)

    def _allocate(self) -> None:
        """Allocate buffers and D, and make all GEMMs."""
        assert self.rank is not None
        plan = self.plan
        source = chunk_sources(plan)[self.rank] if plan.problem.by_ranks else None
        self._buffers = OperandBuffers(self._sources)
        if plan.from_host:
            self._sources.allocate()
        if source is not None:
            schedule = make_source_schedule(plan, self.rank, source, self._buffers.in_place)
        else:
            schedule = make_schedule(plan, self.rank, block_schedules(plan)[self.rank], self._buffers.in_place)
        self._buffers.allocate(schedule.slots)
        self._result = Result(self.rank, self._sources)
        self._bias: NativeBias | None = None
        if native(plan) is not None and "bias" in plan.problem.formula.inputs:
            sizes = tuple(np.diff(plan.cols).tolist())
            parts = [plan.coords(rank)[1] for rank in range(len(plan.ranks))]
            cut = BiasCut(1, sizes, parts, sizes[parts[self.rank]])
            self._bias = NativeBias(plan, self.me, self.rank, self.chunks, cut)
        loads = Loads(schedule.steps, self._buffers, source)
        self._multiplication = Multiplication(loads, self._result, self._kinds, self._bias)
        if plan.problem.array == "numpy":
            self._downloads = Downloads(self._result, schedule.steps)

    def _make_offer(self, read: Mapping[str, NDArray[np.bool_]]) -> dict[str, Any]:
        """Offer all memory that others read; chunks in memory that can't be exported are copied once."""
        exporter, stream, offered = self.engine.exporter, self._stream, dict[int, Any]()
        matrices = []
        for number, name in enumerate(self.plan.problem.operands):
            for index in np.flatnonzero(read[name][self.me]).tolist():
                array = self.chunks[name, index]
                if id(array) not in offered:  # A and B may be the same
                    offered[id(array)] = exporter.exportable(array, stream)
                matrices.append((number, index, offered[id(array)]))
        if self.rank is not None:
            matrices += [(BLOCKS, number, array) for number, array in self._result.shared() if array.size]
            flags = self._result.flags
            matrices.append((FLAGS, 0, flags))
            cp.cuda.runtime.memsetAsync(flags.data.ptr, 0, flags.nbytes, stream.ptr)
        self._sources.kept += offered.values()
        return exporter.offer(matrices)

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer, and map what this rank needs of it."""
        self._began = time.perf_counter()
        if self._multiplication is None:
            return
        if self._expected is not None:
            self._sources.remote = Remote(self.plan, self._expected.read(offers), self.engine, self._lost)
        self._multiplication.find_loads()
        self.timings["offers"] = time.perf_counter() - self._began

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Multiply; return this rank's chunks of D and of auxiliary outputs."""
        if self._multiplication is None:
            return {}
        started = time.perf_counter()
        marks = [mark(self._stream)]
        try:
            self._multiplication.run(self.progress, self._downloads)
            marks.append(mark(self._stream))
            outputs = self._result.deliver()
            self.missing = self._result.missing
            marks.append(mark(self._stream))
            self.ended.wait(marks[-1])
            if self._downloads is not None:
                outputs = self._downloads.all(outputs)
        finally:
            if self._downloads is not None:
                self._downloads.close()
            # The memory of this run may be freed now, so its streams must be idle. No kernel waits for another rank, so
            # this takes no longer than the work that is on the streams.
            for stream in (*self._sources.streams, self.engine.looking, self.engine.sums, self._stream):
                stream.synchronize()
        for name, first, last in zip(("multiply", "deliver"), marks[:-1], marks[1:], strict=True):
            self.timings[name] = cp.cuda.get_elapsed_time(first, last) / 1e3
        if self.plan.problem.by_ranks:
            self.timings["load"] = self._multiplication.loads.waited
        early = self._multiplication.early
        if early is not None:
            seconds, self.timings["ahead"] = early.over(self._began)
            self.timings["multiply"] += seconds
        self.timings["total"] = time.perf_counter() - started
        self.held_bytes = self._count()
        self.engine.mappings.trim()
        self.progress(1.0)
        return outputs

    def _count(self) -> int:
        """Return the bytes of all device memory that this rank holds for the run."""
        buffers = self._buffers.arrays.values()
        arrays = [*self._on_device.all_arrays, *buffers, *self._sources.kept, *self._result.arrays]
        arrays += self._bias.arrays if self._bias is not None else []
        made = self._multiplication.loads.most_held if self._multiplication is not None else 0
        return sum({int(x.data.ptr): int(x.nbytes) for x in arrays}.values()) + made

    # Messages between participants

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return boxes of the chunks that are here, for participants that can't map this process' memory."""
        found = super().serve(kind, boxes)
        if self.lends and all(isinstance(one, np.ndarray) for one in found):
            return found
        found = contiguous(found)
        cp.cuda.Stream.null.synchronize()
        return found

    def lose(self, participant: int) -> None:
        """Go on without a participant that is gone: what is mapped of its memory stays. Any thread."""
        self._lost.add(participant)

    def abort(self, error: BaseException) -> None:
        """End with `error`, before the next step. Any thread; may be repeated."""
        super().abort(error)
        if self._multiplication is not None and self._multiplication.early is not None:
            self._multiplication.early.give_up()


class PeerTallJob(GpuProgramJob):
    """One participant's side of a program: where all GPUs can read each other's memory, what is large stays there.

    Chunks that are elsewhere than the steps that need them are offered. The message of a large matrix says where a copy
    of it is, which stays until the end of the run. In loops matrices go by the host: copies would have to go after a
    turn, when others may still read them.
    """

    def __init__(self, side: Side[ProgramPlacement], state: PeerState) -> None:
        super().__init__(side, state)
        self._state, workers = state, self.plan.participants
        # The same on all participants.
        self._direct = len(workers) > 1 and all(reaches(*pair) for pair in itertools.permutations(workers, 2))
        # Arrays that others read until the end of the run. Of others: processes; chunks: owner, place, memory order.
        self._lending: list[Any] = []
        self._processes: list[bytes] = []
        self._near: dict[ChunkKey, tuple[int, NDArray[np.uint8], str]] = {}

    def prepare(self) -> None:
        """Offer this process' memory, too."""
        exporter, most = self._state.exporter, self.plan.problem.options.keep_workspace_bytes
        exporter.begin(self.plan.participants[self.me].address, most)
        super().prepare()
        if not self._direct:
            return
        offered = []
        for (name, number), chunk in self.chunks.items():
            dense = isinstance(chunk, cp.ndarray) and chunk.size and chunk.shape == self.plan.whole(name, number)[1::2]
            user = self.plan.ranks[self.plan.owners[number]]
            if dense and user != self.me and chunk.dtype == self.plan.problem.compute_type:
                (whole,) = contiguous([chunk])
                whole = exporter.exportable(whole, cp.cuda.Stream.null)
                order = "C" if whole.flags.c_contiguous else "F"
                offered.append((self.plan.problem.operands.index(name), number, order, self._place(whole).tobytes()))
        cp.cuda.Stream.null.synchronize()
        self.offer = (self.offer or {}) | offer_of(exporter.process, exporter.alive(), ()) | {"chunks": offered}

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer."""
        super().accept(offers)
        for participant, worker in enumerate(self.plan.participants if self._direct else ()):
            if offers[participant] is None and participant not in self.plan.ranks:  # it has no chunk either
                self._processes.append(b"")
                continue
            try:
                told = read_told(offers[participant])
                for operand, number, order, place in offers[participant]["chunks"]:
                    key = self.plan.problem.operands[operand], int(number)
                    self._near[key] = participant, np.frombuffer(place, np.uint8), str(order)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ProtocolError(f"malformed offer of {worker.address}: {type(error).__name__}: {error}") from error
            self._processes.append(told.process)
            if told.process != self._state.exporter.process:
                self._state.mappings.begin(self.plan.group, told.process, told.alive)

    def execute(self) -> dict[ResultKey, Any]:
        """Queue all steps on the stream."""
        try:
            return super().execute()
        finally:
            self._state.mappings.trim()

    def _place(self, array: Any) -> NDArray[np.uint8]:
        """Return what says where an array is, which can be exported; keep it."""
        self._lending.append(array)
        allocation = self._state.exporter.find(array.data.ptr)
        assert allocation is not None
        return place_of(allocation, array.data.ptr)

    def _there(self, owner: int, place: NDArray[Any], shape: tuple[int, int], dtype: np.dtype, order: str) -> Any:
        """Return a dense matrix in the memory of a participant."""
        size = math.prod(shape) * dtype.itemsize
        allocation, offset = read_place(place, size)
        self.pulled_bytes += size
        process, state = self._processes[owner], self._state
        base = allocation.address
        if process != state.exporter.process:
            base = state.mapped(self.plan.participants[owner].address, process, allocation, self._ended)
        steps = (shape[1], 1) if order == "C" else (1, shape[0])
        return array_at(Span(base + offset, *(dtype.itemsize * step for step in steps)), shape, dtype, self)

    def _ended(self) -> bool:
        self.ended.check()
        return False

    def _ask(self, step: Make) -> Future[Sequence[Any]]:
        """Copy a chunk out of another GPU's memory, or ask the participant that has it."""
        key = step.operand, step.number
        if key not in self._near:
            return super()._ask(step)
        owner, place, order = self._near[key]
        _, rows, _, cols = self.plan.whole(*key)
        there = self._there(owner, place, (rows, cols), self.plan.problem.compute_type, order)
        # CuPy's own copies of arrays of other devices use a context there, which this process does not have.
        here = cp.empty(there.shape, there.dtype, order=order)
        here[...] = there
        found: Future[Sequence[Any]] = Future()
        found.set_result([here])
        return found

    def _by_device(self, array: Any) -> bool:
        """Whether a message says where this matrix is, on the side of its owner and on that of its reader."""
        return self._direct and not self._offset and isinstance(array, cp.ndarray) and array.nbytes >= _LEAST_DIRECT

    def _lent(self, array: Any, *, copied: bool) -> Any:
        """Return what others get of an array: where a copy of it is, or a copy on the host."""
        if not self._by_device(array):
            return super()._lent(array, copied=copied)
        copy = self._state.exporter.own(array.shape, array.dtype, "F")
        copy[...] = array
        self._stream.synchronize()
        return self._place(copy)

    def _fill(self, target: Any, part: Any, owner: int) -> None:
        """Write what another rank has lent."""
        if self._by_device(target):
            part = self._there(self.plan.ranks[owner], part, target.shape, target.dtype, "F")
            target[...] = part
        else:
            super()._fill(target, part, owner)


class PeerEngine(PeerState, Engine):
    """Multiplies on GPUs with cuBLAS, on panels that are pulled from other GPUs' memory; one GPU a worker process."""

    name = "peer"

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that must agree between workers."""
        check_gpu()
        some = self.exporter.empty((1,), np.dtype(np.uint8))
        if self.exporter.find(some.data.ptr) is None:
            raise EngineError("CUDA does not let other processes map memory of this GPU (cudaIpcGetMemHandle)")
        return {
            "cuda": str(cp.cuda.runtime.runtimeGetVersion()),
            "nvmath": importlib.metadata.version("nvmath-python"),
        }

    def memory(self) -> int:
        """Return the bytes of the device."""
        return device_memory()

    def links(self) -> tuple[str, tuple[str, ...]]:
        """Return the PCI address of this process' GPU, and of those whose memory it can read."""
        runtime = cp.cuda.runtime
        mine = int(runtime.getDevice())
        others = [number for number in range(runtime.getDeviceCount()) if number != mine]
        reach = tuple(
            str(runtime.deviceGetPCIBusId(number)) for number in others if runtime.deviceCanAccessPeer(mine, number)
        )
        return str(runtime.deviceGetPCIBusId(mine)), reach

    def job(self, side: Side[Any]) -> PeerJob | PeerFactorJob | PeerTallJob:
        """Return what does a participant's part of a run."""
        chunks = {key: chunk for key, chunk in side.chunks.items() if not isinstance(chunk, SourceChunk)}
        check_arrays(self.name, chunks, sparse=isinstance(side.plan, ProgramPlacement))
        if isinstance(side.plan, FactorPlacement):
            return PeerFactorJob(side, self)
        if isinstance(side.plan, ProgramPlacement):
            return PeerTallJob(side, self)
        return PeerJob(side, self)

    def release(self, group: int) -> None:
        """Unmap the memory that only the ranks of this group read of each other; free the memory kept for next runs."""
        self.mappings.release(group)
        self.exporter.free()

    def abandon(self, group: int) -> None:
        """Do the same as `release`: to unmap memory takes no other rank."""
        self.mappings.release(group)


ENGINE = PeerEngine()
