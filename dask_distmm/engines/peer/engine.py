"""The engine for GPUs of one host that can read each other's memory: no rank sends, each pulls what it needs."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import Engine, Side
from dask_distmm.engines.gpu.operands import check_arrays, check_gpu, device_memory
from dask_distmm.engines.gpu.program import DeviceMemory
from dask_distmm.engines.peer.memory import PeerState
from dask_distmm.engines.peer.products import PeerJob
from dask_distmm.engines.peer.transport import PeerTransport
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.engines.programs.region import RegionJob
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.planning import Plan
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.region import RegionPlacement


class PeerEngine(PeerState, Engine):
    """Multiplies on GPUs with cuBLAS, on panels that are pulled from other GPUs' memory; one GPU a worker process."""

    name = "peer"

    @functools.cached_property
    def between(self) -> Any:
        """Has the communicators of ranks that can't all read each other's memory."""
        # NCCL is loaded by those who use it.
        from dask_distmm.engines.gpu.collective import CollectiveEngine

        return CollectiveEngine()

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
        devices = [number for number in range(runtime.getDeviceCount()) if number != mine]
        reach = tuple(
            str(runtime.deviceGetPCIBusId(number)) for number in devices if runtime.deviceCanAccessPeer(mine, number)
        )
        return str(runtime.deviceGetPCIBusId(mine)), reach

    def job(self, side: Side[Any]) -> ProgramJob | RegionJob:
        """Return what does a participant's part of a run."""
        if isinstance(side.plan, RegionPlacement):
            return RegionJob(side)
        chunks = {key: chunk for key, chunk in side.chunks.items() if not isinstance(chunk, SourceChunk)}
        check_arrays(self.name, chunks, sparse=isinstance(side.plan, ProgramPlacement))
        if isinstance(side.plan, Plan):
            return PeerJob(side, self)
        kernels, transport = self.solver(), functools.partial(PeerTransport, self)
        return ProgramJob(side, kernels, DeviceMemory(side, kernels, self.exporter.free), transport)

    def release(self, group: int) -> None:
        """Unmap the memory that only the ranks of this group read of each other; free the memory kept for next runs."""
        if "between" in self.__dict__:
            self.between.release(group)
        self.mappings.release(group)
        self.exporter.free()

    def abandon(self, group: int) -> None:
        """Do the same as `release`: to unmap memory takes no other rank."""
        if "between" in self.__dict__:
            self.between.abandon(group)
        self.mappings.release(group)


ENGINE = PeerEngine()
