"""The engine for GPUs of one host that can read each other's memory: no rank sends, each pulls what it needs."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey, Engine, ResultKey, Side, contiguous
from dask_distmm.engines.gpu.operands import array_at, check_arrays, check_gpu, device_memory
from dask_distmm.engines.gpu.program import GpuProgramJob
from dask_distmm.engines.peer.factor import PeerFactorJob
from dask_distmm.engines.peer.memory import PeerState
from dask_distmm.engines.peer.offers import offer_of, place_of, read_place, read_told
from dask_distmm.engines.peer.products import PeerJob
from dask_distmm.engines.peer.window import Window
from dask_distmm.engines.programs.region import RegionJob
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.layout.rectangles import Span
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.peer import reaches
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.region import RegionPlacement
from dask_distmm.programs.steps import Make, Publish, Pull, Step, messages_to_all

# Bytes of a matrix that GPUs read out of each other's memory; less goes by the host as fast.
_LEAST_DIRECT = 2**18


class PeerTallJob(GpuProgramJob):
    """One participant's side of a program: where all GPUs can read each other's memory, what is large stays there.

    Chunks that are elsewhere than the steps that need them are offered. The message of a large matrix says where a copy
    of it is, which stays until the end of the run. Messages of all ranks to all, as those of loops, go by a `Window`;
    others in loops by the host: copies would have to go after a turn, when others may still read them.
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
        # Where ranks talk by it, and where those of others are.
        self._window: Window | None = None
        self._windows: dict[int, NDArray[np.uint8]] = {}

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
        told: dict[str, Any] = {"chunks": offered}
        if self.rank is not None and (by_window := messages_to_all(self._steps, len(self.plan.ranks))):
            self._window = Window(by_window, exporter)
            told["window"] = self._place(self._window.memory).tobytes()
        cp.cuda.Stream.null.synchronize()
        self.offer = (self.offer or {}) | offer_of(exporter.process, exporter.alive(), ()) | told

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
                if self._window is not None and participant in self.plan.ranks:
                    self._windows[self.plan.ranks.index(participant)] = np.frombuffer(
                        offers[participant]["window"], np.uint8
                    )
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ProtocolError(f"malformed offer of {worker.address}: {type(error).__name__}: {error}") from error
            self._processes.append(told.process)
            if told.process != self._state.exporter.process:
                self._state.mappings.begin(self.plan.group, told.process, told.alive)

    def execute(self) -> dict[ResultKey, Any]:
        """Queue all steps on the stream."""
        if self._window is not None and self.rank is not None:
            ranks, size = self.plan.ranks, self._window.nbytes
            addresses = [self._address(ranks[rank], self._windows[rank], size) for rank in range(len(ranks))]
            self._window.begin(addresses, self.rank)
        try:
            return super().execute()
        finally:
            self._state.mappings.trim()

    def abort(self, error: BaseException) -> None:
        """End everything with `error`, kernels that wait for other ranks, too."""
        super().abort(error)
        if self._window is not None:
            self._window.end()

    def _settle(self) -> None:
        # After an error of this rank it may wait for messages that do not come. Without one it waits for nothing.
        if self._window is not None:
            self._window.end()
        super()._settle()

    def _look(self) -> None:
        # What came may be anything if the run was ended.
        self.ended.check()
        super()._look()

    def _by_window(self, step: Step) -> bool:
        return self._window is not None and isinstance(step, Publish | Pull) and step.key in self._window.keys

    def _is_queued(self, step: Step) -> bool:
        """Whether the host does nothing for a step but queue it."""
        return self._by_window(step) or super()._is_queued(step)

    def _publish_step(self, step: Publish) -> None:
        """Let other ranks have buffers."""
        if not self._by_window(step):
            super()._publish_step(step)
            return
        assert self._window is not None
        self.messages += 1
        self._window.write(self.messages, [self._at(buffer) for buffer in step.buffers])

    def _request(self, pull: Pull) -> Any:
        """Ask for a message."""
        return None if self._by_window(pull) else super()._request(pull)

    def _arrive(self, pull: Pull, asked: Any) -> None:
        """Take a message where its owner has it, which the next steps read, or as others come."""
        if not self._by_window(pull):
            super()._arrive(pull, asked)
            return
        assert self._window is not None
        parts = self._window.read(pull.owner, self.messages, pull.buffers)
        self.arrays |= {buffer.name: part for buffer, part in zip(pull.buffers, parts, strict=True)}
        self.pulled_bytes += pull.nbytes

    def _meet(self) -> None:
        """Wait until all that this rank has asked others for is here."""
        if self._window is not None:
            # The host is ahead of its messages.
            self._stream.synchronize()

    def _place(self, array: Any) -> NDArray[np.uint8]:
        """Return what says where an array is, which can be exported; keep it."""
        self._lending.append(array)
        allocation = self._state.exporter.find(array.data.ptr)
        assert allocation is not None
        return place_of(allocation, array.data.ptr)

    def _there(self, owner: int, place: NDArray[Any], shape: tuple[int, int], dtype: np.dtype, order: str) -> Any:
        """Return a dense matrix in the memory of a participant."""
        size = math.prod(shape) * dtype.itemsize
        self.pulled_bytes += size
        steps = (shape[1], 1) if order == "C" else (1, shape[0])
        span = Span(self._address(owner, place, size), *(dtype.itemsize * step for step in steps))
        return array_at(span, shape, dtype, self)

    def _address(self, owner: int, place: NDArray[Any], size: int) -> int:
        """Return where memory of a participant is, here."""
        allocation, offset = read_place(place, size)
        process, state, address = self._processes[owner], self._state, allocation.address
        if process != state.exporter.process:
            address = state.mapped(self.plan.participants[owner].address, process, allocation, self._ended)
        return address + offset

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

    def job(self, side: Side[Any]) -> PeerJob | PeerFactorJob | PeerTallJob | RegionJob:
        """Return what does a participant's part of a run."""
        if isinstance(side.plan, RegionPlacement):
            return RegionJob(side)
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
