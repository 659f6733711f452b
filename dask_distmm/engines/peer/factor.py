"""One participant's side of a factorization on GPUs of one host: nobody sends, each rank pulls.

::

    prepare()   chunks are brought to the device; block columns, and the parts of outputs, are allocated; the memory
                that others may read is offered
    execute()   this rank's block columns are read out of the chunks of all holders
                the program's steps, on one stream; panels are pulled on another one (`PulledPanels`)
                a flag says that this rank's parts of the outputs are complete; its chunks of the outputs are read out
                of all ranks' parts

Chunks of workers whose memory this GPU can't read come over Dask's comms.

A rank offers one allocation each for its block columns, for what belongs to its panels beside these (pivots, T), and
for its parts of the outputs; and flags, one for each part of each panel, one for the end. It raises a flag on its own
stream, after the work that makes a panel. On the GPU of a rank that needs the panel a kernel reads the flag over NVLink
until it is up; then a copy engine pulls the panel, while the GEMMs of the panel before run. So the host queues steps
without a look at the flags: with one, each panel would be there 0.3 ms later (2 H200).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import cupyx
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.engines.base import Ended, ResultKey, Side
from dask_distmm.engines.gpu.host import kernel
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.gpu.panels import DevicePanels, copy_columns
from dask_distmm.engines.gpu.program import GpuProgramJob
from dask_distmm.engines.gpu.tridiagonal import DeviceReduction, Peers, exchange_bytes
from dask_distmm.engines.peer.memory import Exporter, PeerState, Remote
from dask_distmm.engines.peer.offers import BLOCKS, FLAG_BYTES, FLAGS, Expected
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.tridiagonal import SharedEigh, Tridiagonal, row_bounds
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.programs.factor import FACTORED, PARTS
from dask_distmm.programs.steps import Buffer, Key, Store

# Panels and block columns in the memory of other GPUs: what each rank offers, and pulls of it


# Numbers of what a rank offers beside chunks of operands, under `BLOCKS`; its parts of outputs follow. Where ranks
# share eigenvalues, also the products of the reduction and its rows of eigenvectors; where they refine, factors.
COLUMNS, EXTRAS, EXCHANGE, ROWS, FACTORS, RESULTS = 0, 1, 2, 3, 4, 5
# The number of the flag that says that these rows are complete, from that of the end on.
ROWS_COMPLETE = 1


def flag_of(plan: FactorPlacement, key: Key | None) -> int:
    """Return the number of the flag of a part of a panel; of the end for None."""
    # Panels of A itself come after those of the factors of few bits.
    count = plan.columns.count * (2 if plan.task.refines else 1)
    return 2 * count if key is None else PARTS.index(key.part) * count + key.number


def flag_count(plan: FactorPlacement) -> int:
    """Return how many flags a rank has."""
    return flag_of(plan, None) + ROWS_COMPLETE + 1


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
    found = [(*(columns if plan.exact else (0, 0)), size), (-(-each // 16) * 16, max(1, panels), 1)]
    order, vectors = plan.problem.task.a_shape[0], plan.shared and plan.problem.task.vectors
    bounds = row_bounds(order, len(plan.ranks))
    found += [
        (exchange_bytes(order, size) if plan.shared else 0, int(plan.shared), 1),
        (bounds[rank + 1] - bounds[rank] if vectors else 0, order if vectors else 0, 8),
        (*(columns if refined else (0, 0)), few),
    ]
    for output in plan.problem.outputs:
        layout = plan.output_layout(output.name)
        shape = (0, 0) if layout is None else layout.local_shape(rank)
        found.append((*shape, np.dtype(output.dtype).itemsize))
    return np.array(found, np.int64)


# Pulls that are queued, at most: after a run has been ended, what is queued is done all the same.
_QUEUED = 8


class PulledPanels(DevicePanels):
    """The exchange of one rank's panels by pulls from other GPUs' memory."""

    def __init__(
        self,
        plan: FactorPlacement,
        comm: Comm,
        state: PeerState,
        streams: Sequence[cp.cuda.Stream],
        flags: Any,
        extras: Any,
        ended: Ended,
    ) -> None:
        super().__init__(plan.ranks, comm, ended.check, state.coming, streams)
        self._plan, self._flags, self._extras = plan, flags, extras
        # The host says here that the run is over.
        self._over = cupyx.empty_pinned(1, np.uint32)
        self._over[...] = 0
        self._ended, self._events = ended, collections.deque[Any]()
        # After which pivots are there.
        self.made: dict[Key, Any] = {}
        self.remote: Remote

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Let others pull a panel after the work that is on the current stream now."""
        if key.part not in (*self.parts, "pivots"):
            super().publish(key, arrays)
            return
        current = cp.cuda.get_current_stream()
        if key.part == "pivots":
            self.made[key] = record(current)
            super().publish(key, arrays)
            return
        if len(arrays) > 1:
            extra = arrays[1].ravel(order="F")
            slot = self._slot(self._extras, key.number, extra.dtype)
            slot[: extra.size] = extra
        pointer = self._flags.data.ptr + flag_of(self._plan, key) * FLAG_BYTES
        cp.cuda.runtime.memsetAsync(pointer, 1, FLAG_BYTES, current.ptr)

    def _slot(self, extras: Any, panel: int, dtype: np.dtype) -> Any:
        """Return the memory that belongs to a panel, in a rank's extras."""
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
        for one, place in zip(sources, places, strict=True):
            copy_columns(one, place, self._coming)
        self._events.append(record(self._coming))
        if len(self._events) > _QUEUED:
            self._ended.wait(self._events.popleft())
        return places

    def __exit__(self, kind: type[BaseException] | None, *given: object) -> None:
        # Others may wait for a panel of this rank, which then waits for theirs.
        self._over[0] |= kind is not None
        super().__exit__(kind, *given)

    def abort(self, error: BaseException) -> None:
        """End all requests, and kernels that wait."""
        super().abort(error)
        self._over[0] = 1


# Eigenvalues that GPUs of one host share: what each lets the others read, and reads of them


# The first bytes of the memory by which ranks meet, which have to be zero.
_WORDS = 256


class PeerEigh(SharedEigh):
    """One rank's part of the eigenvalues that ranks share; all its memory is allocated when it is made."""

    def __init__(self, plan: FactorPlacement, rank: int, flags: Any, exporter: Exporter, *given: Any) -> None:
        super().__init__(plan, rank, *given)
        self._flags = flags
        shapes = [(rows, cols) for rows, cols, _ in offered_by(plan, rank).tolist()]
        self.meeting = exporter.empty(shapes[EXCHANGE], np.dtype(np.uint8), "F")
        self.meeting[:_WORDS] = 0
        self.vectors = exporter.empty(shapes[ROWS], np.dtype(np.float64), "F")
        self._spare = cp.empty(shapes[ROWS], np.float64, order="F")
        names = [plan.participants[index].address for index in plan.ranks]
        limit = plan.problem.options.transfer_timeout
        self._reduction = DeviceReduction(plan.columns, rank, plan.problem.compute_type, names, limit)
        self.remote: Remote | None = None

    @property
    def arrays(self) -> list[Any]:
        """The large arrays that it holds."""
        return [self.meeting, self.vectors, self._spare, *self._reduction.arrays]

    def abort(self) -> None:
        """Let kernels that wait for other ranks end; any thread."""
        self._reduction.abort()

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
        assert self.remote is not None
        return self.remote.view(self._plan.ranks[rank], BLOCKS, number, shape, np.dtype(dtype))

    def _memory(self) -> tuple[Any, Any]:
        return self.vectors, self._spare

    def _deal(self, columns: NDArray[np.int64], target: Any) -> None:
        bounds, mine = self._bounds, columns[self._plan.columns.held(1, self._rank)]
        flag = flag_of(self._plan, None) + ROWS_COMPLETE
        current = cp.cuda.get_current_stream()
        cp.cuda.runtime.memsetAsync(self._flags.data.ptr + flag * FLAG_BYTES, 1, FLAG_BYTES, current.ptr)
        for turn in range(self._plan.count):
            # Not all ranks read of the same one.
            rank = (self._rank + turn) % self._plan.count
            source = self.vectors
            if turn:
                assert self.remote is not None
                self.remote.wait(self._plan.ranks[rank], flag, self._check)
                source = self._view(rank, ROWS, (bounds[rank + 1] - bounds[rank], self._order), np.float64)
            self.blas.take(source, mine, target[bounds[rank] : bounds[rank + 1]])


# One participant's side of a factorization on GPUs of one host: nobody sends, each rank pulls


class PeerFactorJob(GpuProgramJob):
    """One participant's side of a factorization on GPUs; see the text of the module."""

    def __init__(self, side: Side[FactorPlacement], state: PeerState) -> None:
        super().__init__(side, state)
        self._state = state
        self._streams: tuple[cp.cuda.Stream, ...] = state.solver().streams
        self._address = self.plan.participants[self.me].address
        self._offered: list[tuple[int, int, Any]] = []
        self._remote: Remote | None = None
        # Memory of parts of results, by the name of the buffer that a step makes of it.
        self._new_parts: dict[str, Any] = {}
        # Memory for A itself, where there are factors of few bits first.
        self._columns: Any = None
        # Where ranks share eigenvalues.
        self._shares: PeerEigh | None = None

    # Before the vote

    def prepare(self) -> None:
        """Bring chunks to the device, allocate, and make the offer."""
        problem, exporter = self.plan.problem, self._state.exporter
        exporter.begin(self._address, problem.options.keep_workspace_bytes)
        super().prepare()
        if len(self.plan.participants) > 1:
            for (name, index), chunk in self.chunks.items():
                self._offer(problem.operands.index(name), index, exporter.exportable(chunk, cp.cuda.Stream.null))
            # Others may read chunks from the vote on, so these must be complete.
            cp.cuda.Stream.null.synchronize()
            self.offer = exporter.offer(self._offered) | (self.offer or {})

    def _memory(self, buffer: Buffer) -> Any:
        """Allocate all that this rank works in, and offer the memory that others read; return its block columns."""
        assert self.rank is not None
        if self._columns is not None:
            return self._columns
        plan, exporter, shape = self.plan, self._state.exporter, buffer.shape
        shapes: list[tuple[int, int]] = [(rows, cols) for rows, cols, _ in offered_by(plan, self.rank).tolist()]
        extras = exporter.empty(shapes[EXTRAS], np.dtype(np.uint8), "F")
        flags = exporter.empty((1, flag_count(plan)), np.dtype(np.int32))
        flags[...] = 0
        given = self._state, self._streams, flags, extras, self.ended
        self._flags, self.exchange = flags, PulledPanels(plan, self.comm, *given)
        array = exporter.empty(shape, np.dtype(plan.problem.compute_type if plan.exact else buffer.dtype), "F")
        offered = [(COLUMNS, array), (EXTRAS, extras)]
        if plan.task.refines:
            # Factors of few bits are in the same memory: none is of use any more when A itself is factorized.
            self._columns = array
            few = array.T.reshape(-1).view(np.dtype(buffer.dtype))[: math.prod(shape)]
            array = few.reshape(shape, order="F")
            offered = [(COLUMNS, self._columns)] * plan.exact + [(EXTRAS, extras), (FACTORS, array)]
        if plan.shared:
            kernels = self.blas, self.exchange, self.ended.check, self.progress
            self._shares = PeerEigh(plan, self.rank, flags, exporter, *kernels)
            offered += [(EXCHANGE, self._shares.meeting), (ROWS, self._shares.vectors)]
            self._allocated += self._shares.arrays
        names = [output.name for output in plan.problem.outputs]
        for step in self._steps:
            if isinstance(step, Store) and plan.output_layout(step.output) is not None:
                part = step.buffer
                if isinstance(part, Buffer):
                    self._new_parts[part.name] = exporter.empty(part.shape, np.dtype(part.dtype), "F")
                    offered.append((RESULTS + names.index(step.output), self._new_parts[part.name]))
                else:
                    top, bottom, left, right = part.box
                    offered.append((RESULTS + names.index(step.output), array[top:bottom, left:right]))
        self._allocated += [array, *(one for _, one in offered)]
        for number, one in offered if len(plan.participants) > 1 else ():
            self._offer(BLOCKS, number, one)
        if len(plan.participants) > 1:
            self._offer(FLAGS, 0, flags)
        return array

    def _program_kernels(self, rank: int) -> ProgramKernels:
        return self._shares or super()._program_kernels(rank)

    def _new(self, buffer: Buffer) -> Any:
        part = self._new_parts.pop(buffer.name, None)
        return super()._new(buffer) if part is None else part

    def _offer(self, operand: int, number: int, array: Any) -> None:
        if array.size:
            self._offered.append((operand, number, array))

    def forget(self, operands: Sequence[str]) -> None:
        """Hold the chunks of some operands no longer: all ranks have read them. Any thread."""
        super().forget(operands)
        numbers = [self.plan.problem.operands.index(name) for name in operands]
        self._offered = [one for one in self._offered if one[0] not in numbers]

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer."""
        super().accept(offers)
        if self.rank is not None and self.offer is not None:
            plan, problem = self.plan, self.plan.problem
            participants = np.arange(len(plan.participants))[:, None]
            filled = {name: problem[name].elements > 0 for name in problem.operands}
            read = {name: (plan.where[name] == participants) & some for name, some in filled.items()}
            blocks = [offered_by(plan, rank) for rank in range(len(plan.ranks))]
            sizes = dict.fromkeys(problem.operands, problem.compute_type.itemsize)
            expected = Expected(plan, self.me, read, sizes, blocks, flag_count(plan))
            self._remote = Remote(plan, expected.read(offers), self._state)
            assert isinstance(self.exchange, PulledPanels)
            self.exchange.remote = self._remote
            if self._shares is not None:
                self._shares.remote = self._remote

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Queue all steps on the stream."""
        made = super().execute()
        self._state.mappings.trim()
        return made

    def _settle(self) -> None:
        for one in (*self._streams, self._state.looking, self._state.coming):
            one.synchronize()

    def _look(self) -> None:
        # What came may be anything if the run was ended.
        self._settle()
        self.ended.check()
        super()._look()

    def _reads(self, kind: str, holder: int) -> bool:
        return (
            holder == self.me or kind == "final" or (self._remote is not None and bool(self._remote.offering[holder]))
        )

    def _view(self, kind: str, holder: int, matrix: int, number: int) -> Any:
        if holder == self.me:
            return super()._view(kind, holder, matrix, number)
        assert self._remote is not None
        problem = self.plan.problem
        if kind == "input":
            rows, cols = problem.matrices[matrix].chunks
            i, j = divmod(number, len(cols))
            return self._remote.view(holder, matrix, number, (rows[i], cols[j]), problem.compute_type)
        self._remote.wait(holder, flag_of(self.plan, None), self.ended.check)
        (rows, cols, _), dtype = offered_by(self.plan, number)[RESULTS + matrix].tolist(), problem.outputs[matrix].dtype
        return self._remote.view(holder, BLOCKS, RESULTS + matrix, (rows, cols), np.dtype(dtype))

    def _make_room(self) -> None:
        """Free what the engine keeps for its next run."""
        self._state.exporter.free()

    def _complete_parts(self) -> None:
        """Raise the flag of the end."""
        pointer = self._flags.data.ptr + flag_of(self.plan, None) * FLAG_BYTES
        cp.cuda.runtime.memsetAsync(pointer, 1, FLAG_BYTES, self._stream.ptr)

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return boxes of the chunks that are here, or pivots, for peers that ask over Dask's comms."""
        if kind == "pivots" and isinstance(self.exchange, PulledPanels):
            self.exchange.made[Key("pivots", int(boxes[0, 0]))].synchronize()
            return [x.get() for x in super().serve(kind, boxes)]
        return super().serve(kind, boxes)

    def abort(self, error: BaseException) -> None:
        """End everything with `error`, kernels that wait for other ranks, too."""
        super().abort(error)
        if self._shares is not None:
            self._shares.abort()
