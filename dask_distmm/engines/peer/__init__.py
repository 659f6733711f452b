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
from dask_distmm.engines.device.checks import check_arrays, check_gpu
from dask_distmm.engines.peer.job import PeerJob
from dask_distmm.engines.peer.memory import Exporter, Mappings
from dask_distmm.engines.peer.trace import Step
from dask_distmm.errors import EngineError
from dask_distmm.plan import Plan

__all__ = ["ENGINE", "PeerEngine"]

# Streams that pull at the same time: from each other GPU of a host of 8.
_MOST_PULLING = 7
# What wakes a link.
_WAKING_BYTES = 2**16


class PeerEngine:
    """Multiplies on GPUs with cuBLAS, on panels that are pulled from other GPUs' memory; one GPU a worker process."""

    name = "peer"

    def __init__(self) -> None:
        # For whoever tunes it: a list gets each run's steps, with milliseconds from its beginning to their ends.
        self.trace: list[list[Step]] | None = None
        self.exporter = Exporter()
        self.mappings = Mappings()
        self._streams: list[cp.cuda.Stream] = []
        self._pulling: list[cp.cuda.Stream] = []
        # What nobody needs.
        self._read: Any = None

    def _made(self) -> list[cp.cuda.Stream]:
        """Return the engine's own streams, on the process' current device."""
        if not self._streams:
            self._streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
        return self._streams

    @property
    def stream(self) -> cp.cuda.Stream:
        """What multiplies."""
        return self._made()[0]

    @property
    def looking(self) -> cp.cuda.Stream:
        """What reads flags, and what wakes links."""
        return self._made()[1]

    @property
    def sums(self) -> cp.cuda.Stream:
        """What pulls others' sums: these wait for products that others' panels must not wait for."""
        return self._made()[2]

    def pulls(self, others: int) -> list[cp.cuda.Stream]:
        """Return what pulls A and B, and what the formula reads: one or more streams, for so many participants."""
        wanted = min(max(1, others), _MOST_PULLING)
        self._pulling += [cp.cuda.Stream(non_blocking=True) for _ in range(wanted - len(self._pulling))]
        return self._pulling[:wanted]

    def wake(self, pointer: int, size: int) -> None:
        """Read a little of mapped memory: after an idle moment the first pull takes up to 0.2 ms more (H200)."""
        if self._read is None:
            self._read = cp.empty(_WAKING_BYTES, np.uint8)
        arguments = self._read.data.ptr, pointer, min(size, _WAKING_BYTES), cp.cuda.runtime.memcpyDefault
        cp.cuda.runtime.memcpyAsync(*arguments, self.looking.ptr)

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
