"""The transport of GPUs of one host: nobody sends, each rank pulls.

Of a factorization::

    prepare()   chunks are brought to the device; block columns, and the parts of outputs, are allocated; the memory
                that others may read is offered
    execute()   this rank's block columns are read out of the chunks of all holders
                the program's steps, on one stream; panels are pulled on another one
                flags say that this rank's parts of the outputs are complete; its chunks of the outputs are read out
                of all ranks' parts

Chunks of workers whose memory this GPU can't read come over Dask's comms.

A rank offers one allocation each for its block columns, for what belongs to its panels beside these (pivots, T), and
for its parts of the outputs; and a flag for each part of each panel, and for each output. It raises a flag on its own
stream, after the work that makes a panel. On the GPU of a rank that needs the panel a kernel reads the flag over NVLink
until it is up; then a copy engine pulls the panel, while the GEMMs of the panel before run. So the host queues steps
without a look at the flags: with one, each panel would be there 0.3 ms later (2 H200).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cupy as cp
import cupyx
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.gpu.host import kernel
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.gpu.panels import DevicePanels, copy_columns
from dask_distmm.engines.gpu.tridiagonal import DeviceReduction, Peers, exchange_bytes
from dask_distmm.engines.peer.memory import PeerState, Remote
from dask_distmm.engines.peer.offers import BLOCKS, FLAG_BYTES, FLAGS, Expected, place_of
from dask_distmm.engines.peer.window import Window
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.engines.tridiagonal import SharedEigh, Tridiagonal, row_bounds
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.programs.factor import FACTORED
from dask_distmm.programs.steps import FINAL, Buffer, Key, Publish, Pull, messages_to_all

# Panels and block columns in the memory of other GPUs: what each rank offers, and pulls of it


# Numbers of what a rank offers beside chunks of operands, under `BLOCKS`; its parts of outputs follow. Where ranks
# share eigenvalues, also the products of the reduction and its rows of eigenvectors; where they refine, factors.
COLUMNS, EXTRAS, EXCHANGE, ROWS, FACTORS, RESULTS = 0, 1, 2, 3, 4, 5
# The flag that says that these rows are complete: the last one.
ROWS_COMPLETE = Key("rows", 0)


def flag_of(plan: FactorPlacement, key: Key) -> int:
    """Return the number of the flag of a part of a panel, of an output, or of `ROWS_COMPLETE`."""
    # Panels of A itself come after those of the factors of few bits.
    count, outputs = plan.columns.count * (2 if plan.task.refines else 1), len(plan.problem.outputs)
    return {"lower": 0, "upper": count, FINAL: 2 * count, "rows": 2 * count + outputs}[key.part] + key.number


def _extra_bytes(plan: FactorPlacement, factored: str) -> int:
    """Return the bytes of what goes with a panel, of the widest."""
    if (entry := FACTORED.get(factored)) is None:
        return 0
    return math.prod(entry.extra(plan.width, plan.width)) * np.dtype(entry.extra_dtype or plan.task.dtype).itemsize


def offered_by(plan: FactorPlacement, rank: int) -> NDArray[np.int64]:
    """Return rows, columns and bytes of an element of each matrix that a rank offers, in the order of their numbers."""
    panels = -(-(plan.columns.count - rank) // len(plan.ranks))
    refined, size = plan.task.refines, plan.problem.compute_type.itemsize
    names = (*plan.sweeps, "")[0], plan.task.refined_way if refined else ""
    each = max(_extra_bytes(plan, name) for name in names)
    columns = plan.columns.rows, plan.columns.local_cols(rank)
    few = np.dtype(plan.task.dtype_of_factors).itemsize
    shapes = [(*(columns if plan.exact else (0, 0)), size), (-(-each // 16) * 16, max(1, panels), 1)]
    order, vectors = plan.problem.task.a_shape[0], plan.shared and plan.problem.task.vectors
    bounds = row_bounds(order, len(plan.ranks))
    shapes += [
        (exchange_bytes(order, size) if plan.shared else 0, int(plan.shared), 1),
        (bounds[rank + 1] - bounds[rank] if vectors else 0, order if vectors else 0, 8),
        (*(columns if refined else (0, 0)), few),
    ]
    for output in plan.problem.outputs:
        layout = plan.output_layout(output.name)
        shape = (0, 0) if layout is None else layout.local_shape(rank)
        shapes.append((*shape, np.dtype(output.dtype).itemsize))
    return np.array(shapes, np.int64)


# Pulls that are queued, at most: after a run has been ended, what is queued is done all the same.
_QUEUED = 8
# Bytes of a matrix of a program that GPUs read out of each other's memory; less goes by the host as fast.
_LEAST_DIRECT = 2**18


class PeerTransport(DevicePanels):
    """The transport of GPUs of one host: what ranks offer others read; see the module's text.

    Of programs the message of a large matrix says where a copy of it is, which stays until the end of the run. Messages
    of all ranks to all, as those of loops, go by a `Window`; others in loops by the host: copies would have to go after
    a turn, when others may still read them.
    """

    def __init__(self, state: PeerState, job: ProgramJob) -> None:
        super().__init__(job.plan.ranks, job.comm, job.ended.check, state.coming, job.blas.streams)
        self._plan: Any = job.plan
        self._me, self._rank, self._state, self._ended = job.me, job.rank, state, job.ended
        workers = job.plan.participants
        # Whether all GPUs read each other's memory, the same on all participants.
        self._direct = len(workers) > 1 and len({*job.plan.islands.tolist()}) == 1
        # The host says here that the run is over.
        self._over = cupyx.empty_pinned(1, np.uint32)
        self._over[...] = 0
        self._events = collections.deque[Any]()
        # After which pivots are there.
        self.made: dict[Key, Any] = {}
        # Operand, number and memory of what others read; what messages lend.
        self._offered: list[tuple[int, int, Any]] = []
        self._lending: list[Any] = []
        # Memory of parts of results, by the name of the buffer that a step makes of it.
        self._new_parts: dict[str, Any] = {}
        # Memory for A itself, where there are factors of few bits first; flags; what goes with panels.
        self._columns: Any = None
        self.flags: Any = None
        self._extras: Any = None
        # Where ranks talk to each other, and its number under `BLOCKS`, behind results.
        self._window: Window | None = None
        self._window_number = RESULTS + len(job.plan.problem.outputs)
        self.remote: Any = None
        # What else ends kernels that wait for other ranks.
        self.ending: list[Callable[[], None]] = []
        self.exporter = state.exporter
        self.exporter.begin(workers[job.me].address, job.plan.problem.options.keep_workspace_bytes)

    # Before the vote

    def columns(self, job: ProgramJob, buffer: Buffer) -> Any:
        """Allocate all that this rank works in, and offer the memory that others read; return its block columns."""
        assert self._rank is not None
        if self._columns is not None:
            return self._columns
        plan, exporter, shape = self._plan, self.exporter, buffer.shape
        self._extras = exporter.empty(offered_by(plan, self._rank)[EXTRAS, :2].tolist(), np.dtype(np.uint8), "F")
        self.flags = exporter.empty((1, flag_of(plan, ROWS_COMPLETE) + 1), np.dtype(np.int32))
        self.flags[...] = 0
        array = exporter.empty(shape, np.dtype(plan.problem.compute_type if plan.exact else buffer.dtype), "F")
        offered = [(COLUMNS, array), (EXTRAS, self._extras)]
        if plan.task.refines:
            # Factors of few bits are in the same memory: none is of use any more when A itself is factorized.
            self._columns = array
            few = array.T.reshape(-1).view(np.dtype(buffer.dtype))[: math.prod(shape)]
            array = few.reshape(shape, order="F")
            offered = [(COLUMNS, self._columns)] * plan.exact + [(EXTRAS, self._extras), (FACTORS, array)]
        for step in job.steps:
            if isinstance(step, Publish) and step.key.part == FINAL:
                (part,) = step.buffers
                top, bottom, left, right = part.box
                if isinstance(part, Buffer):
                    self._new_parts[part.name] = exporter.empty(part.shape, np.dtype(part.dtype), "F")
                memory = self._new_parts.get(part.name, array)
                offered.append((RESULTS + step.key.number, memory[top:bottom, left:right]))
        self._offered += ((BLOCKS, number, memory) for number, memory in offered)
        job.memory.note(array)
        return array

    def new(self, buffer: Buffer) -> Any:
        """Return the memory that others read of a part of a result; None if it is like all other memory."""
        return self._new_parts.pop(buffer.name, None)

    def offer(self, job: ProgramJob) -> dict[str, Any] | None:
        """Return what lets others read chunks, and what this rank works in."""
        plan, exporter, offer = self._plan, self.exporter, super().offer(job)
        if isinstance(job.kernels, PeerEigh):
            self._offered += [(BLOCKS, EXCHANGE, job.kernels.meeting), (BLOCKS, ROWS, job.kernels.vectors)]
            job.memory.note(*job.kernels.arrays)
        job.memory.note(*(array for _, _, array in self._offered))
        by_messages = self._direct and (not isinstance(plan, FactorPlacement) or plan.task.refines)
        to_all = messages_to_all(job.steps, len(plan.ranks)) if by_messages else {}
        if to_all:
            self._window = Window(to_all, exporter, self._over)
            self._offered.append((BLOCKS, self._window_number, self._window.memory))
        if len(plan.participants) == 1:
            return offer
        read = {key: x for key, x in job.chunks.items() if job.gathers or self._is_read(*key, x)}
        memory = exporter.exportable([*read.values()], cp.cuda.Stream.null)
        names = plan.problem.operands
        self._offered += ((names.index(name), at, x) for (name, at), x in zip(read, memory, strict=True))
        flags = [] if self.flags is None else [(FLAGS, 0, self.flags)]
        # Others may read all that from the vote on, so it must be complete.
        cp.cuda.Stream.null.synchronize()
        return exporter.offer(entry for entry in (*self._offered, *flags) if entry[2].size) | (offer or {})

    def _is_read(self, name: str, number: int, chunk: Any) -> bool:
        """Whether others read a chunk of a program's operand where it is."""
        plan = self._plan
        dense = isinstance(chunk, cp.ndarray) and chunk.shape == plan.whole(name, number)[1::2]
        user = plan.ranks[plan.owners[number]]
        return bool(dense and user != self._me and chunk.dtype == plan.problem.compute_type)

    def let_go(self, operands: Sequence[str]) -> None:
        """Release the chunks of some operands, which all ranks have read. Thread-safe."""
        # Of a program others may still have queued reads: its host is ahead of its GPU.
        names = operands if isinstance(self._plan, FactorPlacement) else ()
        numbers = [self._plan.problem.operands.index(name) for name in names]
        self._offered = [entry for entry in self._offered if entry[0] not in numbers]

    def accept(self, offers: Sequence[Any]) -> None:
        """Map the memory that participants have offered."""
        super().accept(offers)
        plan, problem = self._plan, self._plan.problem
        if self._rank is None or len(plan.participants) == 1:
            return
        participants, ranks = np.arange(len(plan.participants))[:, None], range(len(plan.ranks))
        # Of a program's chunks those that are not offered are asked for.
        read = {name: np.zeros((len(participants), problem[name].count), bool) for name in problem.operands}
        blocks = [np.zeros((self._window_number, 3), np.int64) for _ in ranks]
        if isinstance(plan, FactorPlacement):
            read = {name: (plan.where[name] == participants) & (problem[name].elements > 0) for name in read}
            blocks = [offered_by(plan, rank) for rank in ranks]
        if self._window is not None:
            blocks = [np.vstack([block, (1, self._window.nbytes, 1)]) for block in blocks]
        sizes = dict.fromkeys(read, problem.compute_type.itemsize)
        flags = 0 if self.flags is None else self.flags.size
        expected = Expected(plan, self._me, read, sizes, blocks, flags)
        self.remote = Remote(plan, expected.read(offers), self._state, check=self._check)

    # The work

    def begin(self, job: ProgramJob) -> None:
        """Map the windows of all ranks."""
        if self._window is not None:
            assert self._rank is not None
            shape, memory = (1, self._window.nbytes), {self._me: self._window.memory}
            for holder in set(self._plan.ranks) - {self._me}:
                memory[holder] = self.remote.view(holder, BLOCKS, self._window_number, shape, np.dtype(np.uint8))
            self._window.begin([int(memory[holder].data.ptr) for holder in self._plan.ranks], self._rank)

    def queues(self, step: Any) -> bool:
        """Whether a message goes from device to device, so that the host does nothing but queue it."""
        return self._window is not None and isinstance(step, Publish | Pull) and step.key in self._window.keys

    def write(self, arrays: Sequence[Any]) -> None:
        """Queue an all-gather of a message through the windows."""
        assert self._window is not None
        self.messages += 1
        self._window.write(self.messages, arrays)

    def read(self, pull: Pull) -> Iterable[Any]:
        """Return the parts of a message where their owner has them."""
        assert self._window is not None
        self.pulled_bytes += pull.nbytes
        return self._window.read(pull.owner, self.messages, pull.buffers)

    def meet(self) -> None:
        """Wait for all messages that this rank has requested."""
        if self._window is not None:
            # The host is ahead of its messages.
            self._streams[0].synchronize()

    def _by_device(self, job: ProgramJob, array: Any) -> bool:
        """Whether a message says where this matrix is, on the side of its owner and on that of its reader."""
        large = isinstance(array, cp.ndarray) and array.nbytes >= _LEAST_DIRECT
        return large and self._direct and not job.gathers and not job.in_loop

    def lend(self, job: ProgramJob, array: Any, *, copied: bool) -> Any:
        """Return the form in which an array is published: the address of a device copy, or a host copy."""
        if not self._by_device(job, array):
            return super().lend(job, array, copied=copied)
        copy = self.exporter.own(array.shape, array.dtype, "F")
        copy[...] = array
        self._streams[0].synchronize()
        self._lending.append(copy)
        allocation = self.exporter.find(copy.data.ptr)
        assert allocation is not None
        return place_of(allocation, copy.data.ptr)

    def fill(self, job: ProgramJob, target: Any, part: Any, owner: int) -> None:
        """Copy a published array of another rank to a buffer."""
        if self._by_device(job, target):
            self.pulled_bytes += target.nbytes
            target[...] = self.remote.at(self._ranks[owner], part, target.shape, target.dtype)
        else:
            super().fill(job, target, part, owner)

    def reads(self, kind: str, holder: int, box: Sequence[int]) -> bool:
        """Whether this process can read what another participant holds of a matrix."""
        remote = self.remote
        return kind == FINAL or (remote is not None and remote.has(holder, box[0], box[1]))

    def view(self, kind: str, holder: int, matrix: int, number: int) -> Any:
        """Return a chunk of an operand, or a rank's part of an output, in another participant's memory."""
        plan, problem = self._plan, self._plan.problem
        if kind == "input":
            shape, dtype = problem.matrices[matrix].chunk_shape(number), problem.compute_type
            return self.remote.view(holder, matrix, number, shape, dtype)
        self.remote.wait(holder, flag_of(plan, Key(kind, matrix)), self._check)
        (rows, cols, _), dtype = offered_by(plan, number)[RESULTS + matrix].tolist(), problem.outputs[matrix].dtype
        return self.remote.view(holder, BLOCKS, RESULTS + matrix, (rows, cols), np.dtype(dtype))

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Publish a panel, to be pulled after the work queued on the current stream."""
        current = cp.cuda.get_current_stream()
        if key.part == "pivots":
            self.made[key] = record(current)
        if key.part not in self.parts:
            super().publish(key, arrays)
        elif len(arrays) > 1:
            extra = arrays[1].ravel(order="F")
            slot = self._slot(self._extras, key.number, extra.dtype)
            slot[: extra.size] = extra
        if key.part in (*self.parts, FINAL):
            self.raise_flag(key)

    def raise_flag(self, key: Key) -> None:
        """Raise a flag after the work that is on the current stream."""
        pointer = self.flags.data.ptr + flag_of(self._plan, key) * FLAG_BYTES
        cp.cuda.runtime.memsetAsync(pointer, 1, FLAG_BYTES, cp.cuda.get_current_stream().ptr)

    def _slot(self, extras: Any, panel: int, dtype: np.dtype) -> Any:
        """Return a panel's slot in a rank's extra buffers."""
        column: Any = extras[:, panel % self._plan.columns.count // len(self._plan.ranks)]
        return column.view(dtype)

    def _come(self, owner: int, key: Key, like: Sequence[Buffer]) -> tuple[Any, ...]:
        """Pull a panel as soon as its flag is up."""
        plan = self._plan
        holder = plan.ranks[owner]
        words = self.remote.flag(holder, flag_of(plan, key)), self._over.ctypes.data
        with self._coming:
            kernel("system", "wait_for_word")((1,), (1,), tuple(map(np.int64, words)))
        shape = plan.columns.rows, plan.columns.local_cols(owner)
        panel = key.number % plan.columns.count
        columns = plan.columns.local(owner, panel, panel + 1)
        few = plan.task.refines and panel == key.number
        there = (FACTORS, np.dtype(plan.task.dtype_of_factors)) if few else (COLUMNS, plan.problem.compute_type)
        source = self.remote.view(holder, BLOCKS, there[0], shape, there[1])[:, columns]
        start, stop = plan.columns.place(panel)
        sources = [source[start:] if key.part == "lower" else source[:stop]]
        if len(like) > 1:
            rows, count, _ = offered_by(plan, owner)[EXTRAS].tolist()
            extras = self.remote.view(holder, BLOCKS, EXTRAS, (rows, count), np.dtype(np.uint8))
            slot = self._slot(extras, key.number, np.dtype(like[1].dtype))
            sources.append(slot[: math.prod(like[1].shape)])
        _, places = self._room(key, like)
        for part, place in zip(sources, places, strict=True):
            copy_columns(part, place, self._coming)
        self._events.append(record(self._coming))
        if len(self._events) > _QUEUED:
            self._ended.wait(self._events.popleft())
        return places

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        # Others may wait for a panel of this rank, which then waits for theirs.
        self._over[0] |= kind is not None
        super().__exit__(kind, *failure)

    def answer(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return the published arrays that answer a peer's request; pivots on the host."""
        if kind != "pivots":
            return super().answer(kind, boxes)
        self.made[Key("pivots", int(boxes[0, 0]))].synchronize()
        return [x.get() for x in super().answer(kind, boxes)]

    # The end

    def look(self, job: ProgramJob) -> None:
        """Raise if the run was aborted, so that received data is not valid."""
        self._synchronize()
        self._check()

    def _synchronize(self) -> None:
        if self._window is not None:
            # After an error of this rank it may wait for messages that do not come. Without one it waits for nothing.
            self._over[0] = 1
        for stream in (*self._streams, self._state.looking, self._state.coming):
            stream.synchronize()

    def settle(self, job: ProgramJob) -> None:
        """Wait for all queued work; unmap memory beyond the limit."""
        self._synchronize()
        super().settle(job)
        self._state.mappings.trim()

    def abort(self, error: BaseException) -> None:
        """Fail all pending requests, and stop kernels that wait for flags."""
        super().abort(error)
        self._over[0] = 1
        for end in self.ending:
            end()


# Eigenvalues that GPUs of one host share: what each lets the others read, and reads of them


# The first bytes of the memory by which ranks meet, which have to be zero.
_WORDS = 256


class PeerEigh(SharedEigh):
    """One rank's part of the eigenvalues that ranks share; all its memory is allocated when it is made."""

    def __init__(self, plan: FactorPlacement, rank: int, kernels: Any, messages: PeerTransport, *rest: Any) -> None:
        super().__init__(plan, rank, kernels, messages, *rest)
        self._peers, exporter = messages, messages.exporter
        shapes = [(rows, cols) for rows, cols, _ in offered_by(plan, rank).tolist()]
        self.meeting = exporter.empty(shapes[EXCHANGE], np.dtype(np.uint8), "F")
        self.meeting[:_WORDS] = 0
        self.vectors = exporter.empty(shapes[ROWS], np.dtype(np.float64), "F")
        self._spare = cp.empty(shapes[ROWS], np.float64, order="F")
        names = [plan.participants[index].address for index in plan.ranks]
        limit = plan.problem.options.transfer_timeout
        self._reduction = DeviceReduction(plan.columns, rank, plan.problem.compute_type, names, limit)
        messages.ending.append(self._reduction.abort)

    @property
    def arrays(self) -> list[Any]:
        """The large arrays that it holds."""
        return [self.meeting, self.vectors, self._spare, *self._reduction.arrays]

    def _reduce(self, array: Any, progress: Callable[[float], None]) -> Tridiagonal:
        bytes_ = exchange_bytes(self._order, self._plan.problem.compute_type.itemsize)
        addresses = [
            int((self.meeting if rank == self._rank else self._view(rank, EXCHANGE, (bytes_, 1), np.uint8)).data.ptr)
            for rank in range(self._plan.count)
        ]
        return self._reduction.reduce(array, self.blas, Peers(addresses, self._columns), self._check, progress)

    def _columns(self, rank: int, columns: slice) -> Any:
        """Return columns of another rank's block columns."""
        shape = self._plan.columns.rows, self._plan.columns.local_cols(rank)
        return self._view(rank, COLUMNS, shape, self._plan.problem.compute_type)[:, columns]

    def _view(self, rank: int, number: int, shape: tuple[int, int], dtype: Any) -> Any:
        """Return what another rank offers."""
        return self._peers.remote.view(self._plan.ranks[rank], BLOCKS, number, shape, np.dtype(dtype))

    def _memory(self) -> tuple[Any, Any]:
        return self.vectors, self._spare

    def _redistribute_eigenvectors(self, columns: NDArray[np.int64], target: Any) -> None:
        bounds, mine = self._bounds, columns[self._plan.columns.held(1, self._rank)]
        self._peers.raise_flag(ROWS_COMPLETE)
        for turn in range(self._plan.count):
            # Not all ranks read of the same one.
            rank = (self._rank + turn) % self._plan.count
            source = self.vectors
            if turn:
                self._peers.remote.wait(self._plan.ranks[rank], flag_of(self._plan, ROWS_COMPLETE), self._check)
                source = self._view(rank, ROWS, (bounds[rank + 1] - bounds[rank], self._order), np.float64)
            self.blas.take(source, mine, target[bounds[rank] : bounds[rank + 1]])


PeerTransport.eigh = PeerEigh
