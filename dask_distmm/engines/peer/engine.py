"""The engine for GPUs of one host that can read each other's memory: no rank sends, each pulls what it needs.

`memory` exports and maps device memory, `pulls` issues copies, `remote` is what others offer as one rank sees it,
`job` is one side of a run, `ahead` what it does of that before the vote, `trace` when it did what. The parts that know
no GPU are beside this package: `engines.offers`, what a process tells others of its memory, and `engines.schedule`, the
order of a rank's work.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import ChunkKey, Comm
from dask_distmm.engines.gpu.checks import check_arrays, check_gpu
from dask_distmm.engines.peer.job import PeerJob
from dask_distmm.engines.peer.state import PeerState
from dask_distmm.errors import EngineError
from dask_distmm.planning import Plan

__all__ = ["ENGINE", "PeerEngine"]


class PeerEngine(PeerState):
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
        return int(cp.cuda.runtime.memGetInfo()[1])

    def links(self) -> tuple[str, tuple[str, ...]]:
        """Return the PCI address of this process' GPU, and of those whose memory it can read."""
        runtime = cp.cuda.runtime
        mine = int(runtime.getDevice())
        others = [number for number in range(runtime.getDeviceCount()) if number != mine]
        reach = tuple(
            str(runtime.deviceGetPCIBusId(number)) for number in others if runtime.deviceCanAccessPeer(mine, number)
        )
        return str(runtime.deviceGetPCIBusId(mine)), reach

    def job(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, Any],
        comm: Comm,
        progress: Callable[[float], None] = lambda share: None,
        ready: Sequence[Any] = (),
    ) -> PeerJob:
        """Return participant `me`'s side of a run."""
        check_arrays(self.name, chunks)
        return PeerJob(plan, me, chunks, comm, progress, ready, self)

    def release(self, group: int) -> None:
        """Unmap what the ranks of a group have read of each other, if no other group does; free what is kept."""
        self.mappings.release(group)
        self.exporter.free()

    def abandon(self, group: int) -> None:
        """Do the same: nothing here is shared that takes two to free."""
        self.mappings.release(group)


ENGINE = PeerEngine()
