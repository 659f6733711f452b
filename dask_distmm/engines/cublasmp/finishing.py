"""The formula on one rank's chunks of D: its inputs are gathered as operands are, its outputs allocated ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.dtypes import FP8, carried
from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.cublasmp.exchange import DeviceShuffle, Exchange
from dask_distmm.epilog import finish, part_shape
from dask_distmm.layout import ChunkGrid, Moves, redistribution
from dask_distmm.narrow import decode, stored
from dask_distmm.plan import Plan

__all__ = ["Finishing"]


class _Input:
    """One input: the parts that this rank's chunks of D need, by number, and how they get here."""

    def __init__(self, plan: Plan, me: int, name: str, chunks: Mapping[ChunkKey, Any]) -> None:
        problem = plan.problem
        self.name, self.held = name, problem.dtype_of(name)
        self.dtype = carried(self.held, "cupy")
        sizes, (rows, cols) = problem.chunks_of(name), problem.out_chunks
        # An axis of length 1 is broadcast: all chunks of D along it need the same part.
        self._by_row, self._by_col = sum(sizes[0]) == problem.m, sum(sizes[1]) == problem.n
        parts = ChunkGrid((rows if self._by_row else (1,), cols if self._by_col else (1,)))
        self._width, self._columns = parts.numblocks[1], len(cols)
        where = plan.where[name]
        assert where is not None
        copies = redistribution(ChunkGrid(sizes), parts)
        every = []
        for rank, participant in enumerate(plan.ranks):
            needed = np.unique([self.part(index) for index in plan.owned(rank).tolist()])
            moves = Moves.of(copies, where, np.full(parts.nparts, participant))
            every.append(moves.take(np.isin(moves.dst, needed)))
        moves = Moves(*(np.concatenate([getattr(m, f) for m in every]) for f in Moves.__dataclass_fields__))
        mine = np.unique([self.part(index) for index in plan.owned(plan.ranks.index(me)).tolist()]).tolist()
        self.parts = {part: cp.empty(parts.local_shape(part), self.dtype) for part in mine}
        among, self.outside = moves.among(plan.ranks, me)
        widths = [parts.local_shape(part)[1] for part in range(parts.nparts)]
        arrays = {index: chunk for (operand, index), chunk in chunks.items() if operand == name}
        shuffle = DeviceShuffle(among, me, plan.ranks, "C", widths, arrays, self.parts, itemsize=self.dtype.itemsize)
        self.exchange = Exchange(shuffle)

    def part(self, index: int) -> int:
        """Return the number of the part that chunk `index` of D needs."""
        i, j = divmod(index, self._columns)
        return (i if self._by_row else 0) * self._width + (j if self._by_col else 0)

    def values(self, index: int) -> Any:
        """Return what chunk `index` of D needs."""
        found = self.parts[self.part(index)]
        return decode(cp, found, self.held, np.dtype(np.float32)) if self.held in FP8 else found


class Finishing:
    """All that one rank does to its chunks of D after the product.

    Parameters
    ----------
    plan
        Of the run.
    me, rank
        This participant, as which rank.
    chunks
        What it has staged, on the device.
    order
        Memory order of its chunks of D.
    """

    def __init__(self, plan: Plan, me: int, rank: int, chunks: Mapping[ChunkKey, Any], order: str) -> None:
        problem = plan.problem
        self._spec, self._to = problem.finish, problem.dtype
        self.inputs = [_Input(plan, me, name, chunks) for name in problem.operands[2:]]
        self._out: dict[Any, Any] = {}
        for index in plan.owned(rank).tolist():
            r0, r1, c0, c1 = plan.chunk_rect(index)
            shape = (r1 - r0, c1 - c0)
            self._out[index] = cp.empty(shape, carried(self._to, "cupy"), order=order)
            for name in self._spec.per_element:
                dtype = self._spec.dtype_of(name, problem.result_type)
                self._out[name, index] = cp.zeros(part_shape(self._spec.keeps(name), shape), dtype)

    def outside(self) -> Iterator[tuple[int, str, Moves, Mapping[int, Any]]]:
        """Return what has to be fetched from workers that are no ranks: number, type, rectangles, where they go."""
        for number, one in enumerate(self.inputs, start=2):
            yield number, one.held, one.outside, one.parts

    def gather(self, stream: cp.cuda.Stream, comm: Any) -> None:
        """Put the exchange of the inputs on the stream."""
        for one in self.inputs:
            one.exchange.run(stream, comm)

    def apply(self, sums: Mapping[int, Any], stream: cp.cuda.Stream) -> dict[Any, Any]:
        """Put the formula on the stream; return the outputs."""
        with stream:
            for index, acc in sums.items():
                if not acc.size:
                    continue
                inputs = {one.name: one.values(index) for one in self.inputs}
                d, aux = finish(cp, self._spec, acc, inputs)
                self._out[index][...] = stored(cp, d, self._to, fp8_bytes=True)
                for name, values in aux.items():
                    self._out[name, index][...] = values
        return self._out

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        parts = [array for one in self.inputs for array in one.parts.values()]
        return [*self._out.values(), *parts, *(b for one in self.inputs for b in one.exchange.buffers)]
