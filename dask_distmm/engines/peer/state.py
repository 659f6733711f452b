"""What a process keeps between its runs."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.peer.memory import Exporter, Mappings
from dask_distmm.engines.peer.trace import TracedOperation

__all__ = ["PeerState"]

# Streams that pull at the same time: from each other GPU of a host of 8.
_MOST_PULLING = 7
# What wakes a link.
_WAKING_BYTES = 2**16


class PeerState:
    """Streams, memory that others have mapped, and others' memory that is mapped here."""

    def __init__(self) -> None:
        # For whoever tunes it: a list gets each run's steps, with milliseconds from its beginning to their ends.
        self.trace: list[list[TracedOperation]] | None = None
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
