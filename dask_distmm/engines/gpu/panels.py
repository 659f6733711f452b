"""Panels of other ranks' block columns on this rank's GPU: the memory into which they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.comms.base import Comm
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.programs.steps import Buffer, Key

# Each array in a buffer begins at a multiple of this many bytes.
_ALIGNED = 16


class DevicePanels(Transport):
    """The exchange of panels that come on a stream of their own, while the ones before are applied."""

    # The parts of panels that come so.
    parts = "lower", "upper"

    def __init__(
        self,
        ranks: Sequence[int],
        comm: Comm,
        check: Callable[[], None],
        coming: cp.cuda.Stream,
        streams: Sequence[cp.cuda.Stream],
    ) -> None:
        super().__init__(ranks, comm, check)
        self._coming, self._streams = coming, streams
        # Buffers that are free, with the events after which they may be filled; and those of panels that are here.
        self._free: list[tuple[Any, list[Any]]] = []
        self._used: dict[Key, Any] = {}

    def ask(self, owner: int, key: Key, like: Sequence[Any] = ()) -> Any:
        """Note what is to come, and into buffers like which."""
        return (owner, key, like) if key.part in self.parts else super().ask(owner, key, like)

    def get(self, request: Any, *, again: bool = False) -> Sequence[Any]:
        """Request a panel; the streams of the work wait for it."""
        if not isinstance(request, tuple) or request[1].part not in self.parts:
            return super().get(request, again=again)
        panel = self._come(*request)
        self.pulled_bytes += sum(x.nbytes for x in panel)
        self.complete()
        return panel

    def complete(self) -> None:
        """Let what comes next on the streams of the work wait for all that comes until now."""
        event = record(self._coming)
        for stream in self._streams:
            stream.wait_event(event)

    def _come(self, owner: int, key: Key, like: Sequence[Buffer]) -> tuple[Any, ...]:
        """Copy what belongs to a panel to buffers, on the stream for that; return it in the form of `like`."""
        raise NotImplementedError

    def _room(self, key: Key, like: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """Return a buffer for a panel, which may be filled on the stream for that, and the places of arrays in it."""
        ends = ends_of(like)
        fitting = [at for at, (x, _) in enumerate(self._free) if len(x) >= ends[-1]]
        idle = (at for at in fitting if all(event.done for event in self._free[at][1]))
        # With two of them one panel comes while the other one is applied.
        at = next(idle, fitting[0] if len(fitting) > 1 else None)
        if at is None:
            self.reserve(ends[-1])
            at = -1
        buffer, events = self._free.pop(at)
        for event in events:
            self._coming.wait_event(event)
        self._used[key] = buffer
        return buffer[: ends[-1]], tuple(placed(buffer[at:], x) for at, x in zip(ends, like, strict=False))

    def reserve(self, size: int) -> None:
        """Allocate one more buffer of this many bytes."""
        # Straight from the pool of the default stream, on which nothing else runs: its memory is free now.
        with cp.cuda.Stream.null:
            self._free.append((cp.empty(max(1, size), np.uint8), []))

    def drop(self, key: Key) -> None:
        """Let a panel's buffers be filled again after the work that is on the streams now."""
        self._release(key, self._streams)

    def _release(self, key: Key, streams: Sequence[cp.cuda.Stream]) -> None:
        """Let the buffer of a panel be filled again after the work that is on some streams now."""
        if key in self._used:
            self._free.append((self._used.pop(key), [record(stream) for stream in streams]))


def ends_of(arrays: Sequence[Any]) -> list[int]:
    """Return where arrays begin in one buffer, in bytes, and where the last one ends."""
    ends: list[int] = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    return ends


def placed(buffer: Any, like: Any) -> Any:
    """Return the first bytes of a buffer as a column-major matrix like another, or as the vector of numbers."""
    dtype = np.dtype(like.dtype)
    array = buffer[: like.nbytes].view(dtype)
    return array if dtype.kind == "i" else array.reshape(like.shape, order="F")


def copy_columns(source: Any, target: Any, stream: cp.cuda.Stream) -> None:
    """Copy a matrix to a contiguous one column by column, by a copy engine."""
    if source.size:
        rows = len(source) * source.itemsize
        columns, pitch = source.size // len(source), source.strides[1] if source.size > len(source) else rows
        arguments = target.data.ptr, rows, source.data.ptr, pitch, rows, columns
        cp.cuda.runtime.memcpy2DAsync(*arguments, cp.cuda.runtime.memcpyDeviceToDevice, stream.ptr)
