"""Shuffles on a device: their buffers, kernel launches and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from dask_distmm.engines.cublasmp.shuffle import Route, Shuffle
from dask_distmm.engines.gpu.copy_kernels import Launch, copy_rectangles
from dask_distmm.layout.rectangles import Span, Table

if TYPE_CHECKING:
    from dask_distmm.comms.nccl import NcclComm
    from dask_distmm.engines.gpu.finishing import Input


class DeviceShuffle:
    """A `Shuffle` between device arrays, which it keeps together with its buffers."""

    def __init__(self, route: Route, src: dict[int, Any], dst: dict[int, Any], itemsize: int = 0) -> None:
        self.buffers: list[Any] = []
        self._keep = (src, dst)
        spans = [{n: Span(x.data.ptr, *x.strides) for n, x in arrays.items()} for arrays in (src, dst)]
        self.itemsize = itemsize or next(iter((*src.values(), *dst.values()))).dtype.itemsize
        source, target = spans
        self.shuffle = Shuffle(route, self.itemsize, source, target, self._allocate)

    def _allocate(self, size: int) -> int:
        self.buffers.append(cp.empty(size, cp.uint8))
        return int(self.buffers[-1].data.ptr)


class Exchange:
    """Several shuffles at once: one launch to pack, one group of messages, one launch to unpack."""

    def __init__(self, *found: DeviceShuffle) -> None:
        self.buffers = [buffer for one in found for buffer in one.buffers]
        self._keep, itemsize = found, found[0].itemsize
        shuffles = [one.shuffle for one in found]
        self._pack = _launches([t for s in shuffles for t in s.packing], itemsize)
        self._unpack = _launches([t for s in shuffles for t in s.unpacking], itemsize)
        self._sends = [send for s in shuffles for send in s.sends]
        self._receives = [receive for s in shuffles for receive in s.receives]
        self.received_bytes = sum(size for _, _, size in self._receives)

    def run(self, stream: Any, comm: NcclComm | None) -> None:
        """Put packing, messages and unpacking on the stream."""
        for launch in self._pack:
            launch.run(stream)
        if self._sends or self._receives:
            assert comm is not None
            comm.exchange(self._sends, self._receives)
        for launch in self._unpack:
            launch.run(stream)


class InputExchange:
    """How one input of the formula gets to the ranks that need its parts."""

    def __init__(self, one: Input, me: int, ranks: tuple[int, ...]) -> None:
        among, self.outside = one.moves.among(ranks, me)
        self.input = one
        route = Route(among, me, ranks, "C", one.widths)
        self.exchange = Exchange(DeviceShuffle(route, one.arrays, one.parts, one.dtype.itemsize))


def _launches(tables: Sequence[Table], itemsize: int) -> list[Launch]:
    return copy_rectangles([np.concatenate(tables)], itemsize)[0] if tables else []
