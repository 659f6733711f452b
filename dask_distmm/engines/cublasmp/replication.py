"""All of D on every rank: the chunks that a rank lacks come by NCCL from the ranks that own them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import REPLICA, ResultKey
from dask_distmm.engines.cublasmp.exchange import DeviceShuffle, Exchange
from dask_distmm.engines.cublasmp.shuffle import Route
from dask_distmm.layout import ChunkGrid, Moves, redistribution
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Plan
from dask_distmm.planning.replicas import ALONE_BYTES


def named(chunks: Mapping[int, Any], owned: Collection[int]) -> dict[ResultKey, Any]:
    """Return chunks of D as `Job.execute` has them: those that this rank does not own are replicas."""
    return {("" if number in owned else REPLICA, number): array for number, array in chunks.items()}


class Replication:
    """The exchange of finished chunks between ranks; allocated before the vote."""

    def __init__(self, plan: Plan, me: int, own: Mapping[int, Any], order: str) -> None:
        problem, grid = plan.problem, ChunkGrid(plan.problem.out_chunks)
        dtype = carried(problem.dtype, "cupy")
        self.chunks = {
            index: cp.empty(grid.local_shape(index), dtype, order=order)
            for index in range(grid.nparts)
            if index not in own
        }
        owner = np.asarray(plan.ranks)[plan.owners]
        copies = redistribution(grid, grid)
        every = [Moves.of(copies, owner, np.full(grid.nparts, rank)) for rank in plan.ranks]
        moves = Moves(*(np.concatenate([getattr(m, f.name) for m in every]) for f in dataclasses.fields(Moves)))
        extents = [grid.local_shape(part)[order == "C"] for part in range(grid.nparts)]
        route = Route(moves, me, plan.ranks, order, extents, skip_home=True, alone=ALONE_BYTES)
        self.exchange = Exchange(DeviceShuffle(route, dict(own), self.chunks, dtype.itemsize))

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        return [*self.chunks.values(), *self.exchange.buffers]
