"""What a process keeps between its runs: a stream, the library's handle, and the communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy as cp
from nvmath.bindings import cusolverMp

if TYPE_CHECKING:
    from dask_distmm.engines.cusolvermp.library import Group


class CusolverMpState:
    """A stream, the handle of cuSOLVERMp, and by number the groups of ranks that have a communicator."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self._stream: cp.cuda.Stream | None = None
        self._handle = 0
        self._solver: Any = None

    @property
    def stream(self) -> cp.cuda.Stream:
        """The engine's own stream, on the process' current device."""
        if self._stream is None:
            self._stream = cp.cuda.Stream(non_blocking=True)
        return self._stream

    @property
    def handle(self) -> int:
        """The library's handle. One process may have no more than one for its GPU."""
        if not self._handle:
            self._handle = int(cusolverMp.create(int(cp.cuda.runtime.getDevice()), self.stream.ptr))
        return self._handle

    def solver(self) -> Any:
        """Return the kernels of one GPU (`SolverKernels`), on the engine's stream."""
        if self._solver is None:
            # cuSOLVER is loaded by those who use it.
            from dask_distmm.engines.gpu.lapack import SolverKernels

            self._solver = SolverKernels(self.stream)
        return self._solver
