"""The engine for GPUs: one cuBLASMp multiply across dask-cuda workers, or cuBLAS where one GPU does.

`shuffle` and `exchange` redistribute with NCCL, `replication` copies D to all ranks, `matrices` has the tiles,
`library` calls cuBLASMp, `job` is one participant's side of a run.
"""

from __future__ import annotations

from typing import Any

import cupy as cp

from dask_distmm.engines.base import Engine, Side, log
from dask_distmm.engines.cublasmp.job import CublasMpJob
from dask_distmm.engines.cublasmp.library import CublasMpState, check_versions
from dask_distmm.engines.gpu.operands import check_arrays, check_gpu
from dask_distmm.errors import EngineError
from dask_distmm.installing import install_command


class CublasMpEngine(CublasMpState, Engine):
    """Multiplies on GPUs with cuBLASMp, one GPU a worker process."""

    name = "cublasmp"

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that must agree between workers."""
        check_gpu()
        try:
            return check_versions()
        except (ImportError, RuntimeError) as error:
            raise EngineError(
                f"cuBLASMp or NCCL can't be loaded ({error}): {install_command('cu13')} (cu12 for CUDA 12)"
            ) from error

    def memory(self) -> int:
        """Return the bytes of the device."""
        return int(cp.cuda.runtime.memGetInfo()[1])

    def job(self, side: Side[Any]) -> CublasMpJob:
        """Return what does a participant's part of a run."""
        check_arrays(self.name, side.chunks)
        return CublasMpJob(side, self)

    def release(self, group: int) -> None:
        """Free the communicator and the workspace of a group; all of its ranks do so at the same time."""
        found = self.groups.pop(group, None)
        if found is not None:
            found.close()

    def abandon(self, group: int) -> None:
        """Forget a group that has lost a rank: its shared memory can't be freed before this process ends."""
        found = self.groups.pop(group, None)
        if found is not None:
            log.warning(
                "a rank of group %s is gone: %d MiB of this GPU stay taken until the worker restarts",
                group,
                found.workspace_bytes >> 20,
            )


ENGINE = CublasMpEngine()
