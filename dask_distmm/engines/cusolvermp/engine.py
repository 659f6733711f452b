"""The engine for factorizations on GPUs that can't read each other's memory: those of several hosts.

`library` calls cuSOLVERMp and cuBLASMp, and keeps what a process keeps between runs; `job` is one participant's side of
a run.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import cupy as cp

from dask_distmm.engines.base import Engine, Side, log
from dask_distmm.engines.cusolvermp.job import CusolverMpJob
from dask_distmm.engines.cusolvermp.library import CusolverMpState, check_versions
from dask_distmm.engines.gpu.operands import check_arrays, check_gpu
from dask_distmm.errors import EngineError
from dask_distmm.installing import install_command


class CusolverMpEngine(CusolverMpState, Engine):
    """Factorizes on GPUs with cuSOLVERMp, one GPU a worker process."""

    name = "cusolvermp"

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that must agree between workers."""
        check_gpu()
        try:
            return {**check_versions(self.handle), "nvmath": importlib.metadata.version("nvmath-python")}
        except (ImportError, RuntimeError) as error:
            raise EngineError(
                f"cuSOLVERMp or NCCL can't be loaded ({error}): {install_command('cu13')} (cu12 for CUDA 12)"
            ) from error

    def memory(self) -> int:
        """Return the bytes of the device."""
        return int(cp.cuda.runtime.memGetInfo()[1])

    def job(self, side: Side[Any]) -> CusolverMpJob:
        """Return what does a participant's part of a run."""
        check_arrays(self.name, side.chunks)
        return CusolverMpJob(side, self)

    def release(self, group: int) -> None:
        """Free the communicator of a group; all of its ranks do so at the same time."""
        found = self.groups.pop(group, None)
        if found is not None:
            found.close()

    def abandon(self, group: int) -> None:
        """Forget a group that has lost a rank: its communicator can't be freed before this process ends."""
        if self.groups.pop(group, None) is not None:
            log.warning("a rank of group %s is gone: its communicator stays until the worker restarts", group)


ENGINE = CusolverMpEngine()
