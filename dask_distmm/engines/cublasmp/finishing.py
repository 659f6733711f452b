"""The formula on one rank's chunks of D: its inputs are gathered as operands are, its outputs allocated ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.dtypes import dtype_from_name
from dask_distmm.engines.base import ChunkKey, log
from dask_distmm.engines.cublasmp.exchange import DeviceShuffle, Exchange
from dask_distmm.epilog import Finish, elementwise, part_shape, reductions
from dask_distmm.layout import ChunkGrid, Moves, redistribution
from dask_distmm.plan import Plan

__all__ = ["Finishing"]


class _Input:
    """One input: the parts that this rank's chunks of D need, by number, and how they get here."""

    def __init__(self, plan: Plan, me: int, name: str, chunks: Mapping[ChunkKey, Any]) -> None:
        problem = plan.problem
        self.name, self.dtype = name, dtype_from_name(problem.dtype_of(name))
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
        self._spec = problem.finish
        self.inputs = [_Input(plan, me, name, chunks) for name in problem.operands[2:]]
        self._out: dict[Any, Any] = {}
        for index in plan.owned(rank).tolist():
            r0, r1, c0, c1 = plan.chunk_rect(index)
            shape = (r1 - r0, c1 - c0)
            self._out[index] = cp.empty(shape, problem.result_type, order=order)
            for name in self._spec.per_element:
                dtype = self._spec.dtype_of(name, problem.result_type)
                self._out[name, index] = cp.zeros(part_shape(self._spec.keeps(name), shape), dtype)

    def outside(self) -> Iterator[tuple[int, np.dtype, Moves, Mapping[int, Any]]]:
        """Return what has to be fetched from workers that are no ranks: number, type, rectangles, where they go."""
        for number, one in enumerate(self.inputs, start=2):
            yield number, one.dtype, one.outside, one.parts

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
                inputs = [one.parts[one.part(index)] for one in self.inputs]
                d = self._out[index]
                saved = [self._out[self._spec.saved, index]] if self._spec.saved else []
                kernel = _kernel(self._spec, tuple(one.name for one in self.inputs))
                kernel(acc, inputs, [d, *saved])
                for name, values in reductions(cp, self._spec, d.astype(acc.dtype, copy=False)).items():
                    self._out[name, index][...] = values
        return self._out

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        parts = [array for one in self.inputs for array in one.parts.values()]
        return [*self._out.values(), *parts, *(b for one in self.inputs for b in one.exchange.buffers)]


@functools.lru_cache(maxsize=64)
def _kernel(spec: Finish, names: tuple[str, ...]) -> _Kernel:
    return _Kernel(spec, names)


class _Kernel:
    """The formula as one kernel, fused by CuPy; where CuPy can't, as one kernel for each operation."""

    def __init__(self, spec: Finish, names: tuple[str, ...]) -> None:
        def apply(*arrays: Any) -> None:
            acc, *rest = arrays
            inputs, outputs = rest[: len(names)], rest[len(names) :]
            found = elementwise(cp, spec, acc, dict(zip(names, inputs, strict=True)))
            for target, values in zip(outputs, found, strict=True):
                target[...] = values

        self._plain: Callable[..., None] = apply
        self._fused: Callable[..., None] | None = cp.fuse()(apply)

    @property
    def is_fused(self) -> bool:
        """Whether it is one kernel, as far as is known."""
        return self._fused is not None

    def __call__(self, acc: Any, inputs: list[Any], outputs: list[Any]) -> None:
        arrays = [acc, *inputs, *outputs]
        if self._fused is not None and all(x.dtype.kind != "V" for x in arrays):
            try:
                self._fused(*arrays)
                return
            except Exception as error:  # whatever a function of the user's meets in CuPy's tracing
                log.info("not fused to one kernel: %s: %s", type(error).__name__, error)
                self._fused = None
        self._plain(*arrays)
