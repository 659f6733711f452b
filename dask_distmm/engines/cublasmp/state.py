"""The stream and the communicators that a process keeps between its runs."""

from __future__ import annotations

import cupy as cp

from dask_distmm.engines.cublasmp.library import Group


class CublasMpState:
    """A stream, and by number the groups of ranks that have a communicator."""

    def __init__(self) -> None:
        self._stream: cp.cuda.Stream | None = None
        self.groups: dict[int, Group] = {}

    @property
    def stream(self) -> cp.cuda.Stream:
        """The engine's own stream, on the process' current device."""
        if self._stream is None:
            self._stream = cp.cuda.Stream(non_blocking=True)
        return self._stream
