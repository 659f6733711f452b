"""Shuffles on a device: their buffers, kernel launches and messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import REPLICA, ResultKey
from dask_distmm.engines.cublasmp.shuffle import Route, Shuffle
from dask_distmm.engines.gpu.copy_kernels import Launch, copy_rectangles
from dask_distmm.layout import Layout, Moves, redistribution
from dask_distmm.layout.rectangles import Span, Table
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Plan
from dask_distmm.planning.planner import ALONE_BYTES

if TYPE_CHECKING:
    from dask_distmm.comms.nccl import NcclComm
    from dask_distmm.engines.gpu.finishing import Input

# All of D on every rank: the chunks that a rank lacks come by NCCL from the ranks that own them


def named(chunks: Mapping[int, Any], owned: Collection[int]) -> dict[ResultKey, Any]:
    """Return chunks of D as `Job.execute` has them: those that this rank does not own are replicas."""
    return {("" if number in owned else REPLICA, number): array for number, array in chunks.items()}


class Replication:
    """The exchange of finished chunks between ranks; allocated before the vote."""

    def __init__(self, plan: Plan, me: int, own: Mapping[int, Any], order: str) -> None:
        problem, grid = plan.problem, Layout.of_chunks(plan.problem.out_chunks)
        dtype = carried(problem.dtype, "cupy")
        self.chunks = {
            index: cp.empty(grid.local_shape(index), dtype, order=order)
            for index in range(grid.grid.size)
            if index not in own
        }
        owner = np.asarray(plan.ranks)[plan.owners]
        copies = redistribution(grid, grid)
        every = [Moves.of(copies, owner, np.full(grid.grid.size, rank)) for rank in plan.ranks]
        moves = Moves(*(np.concatenate([getattr(m, f.name) for m in every]) for f in dataclasses.fields(Moves)))
        extents = [grid.local_shape(part)[order == "C"] for part in range(grid.grid.size)]
        route = Route(moves, me, plan.ranks, order, extents, skip_home=True, alone=ALONE_BYTES)
        self.exchange = Exchange(DeviceShuffle(route, dict(own), self.chunks, dtype.itemsize))

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        return [*self.chunks.values(), *self.exchange.buffers]


# Shuffles on a device: their buffers, kernel launches and messages


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
