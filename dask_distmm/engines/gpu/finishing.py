"""The formula on one rank's chunks of D: the parts of its inputs, its outputs, and one fused kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import ChunkKey, ResultKey, log
from dask_distmm.layout import Layout, Moves, redistribution
from dask_distmm.numeric.epilogs import Formula, elementwise, part_shape, reductions, scalars, scaled
from dask_distmm.numeric.types import FP8, carried, decode, stored
from dask_distmm.planning import Chunks, Plan, Problem


class Input:
    """One input of the formula, cut into parts: this rank's parts, and the rectangles to copy into the parts of all."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        name: str,
        chunks: Mapping[ChunkKey, Any],
        sizes: Chunks,
        needed: Sequence[Sequence[int]],
        parts: dict[int, Any] | None = None,
    ) -> None:
        problem = plan.problem
        self.name, self.type_name = name, problem[name].dtype
        self.dtype = carried(self.type_name, "cupy")
        grid = Layout.of_chunks(sizes)
        where = plan.where[name]
        assert where is not None
        copies = redistribution(Layout.of_chunks(problem[name].chunks), grid)
        if parts is None:
            mine = needed[plan.ranks.index(me)]
            parts = {part: cp.empty(grid.local_shape(part), self.dtype) for part in mine}
        self.parts = parts
        self.moves = Moves.to_each(copies, where, dict(zip(plan.ranks, needed, strict=True)))
        self.arrays = {index: chunk for (operand, index), chunk in chunks.items() if operand == name}


class _ByChunk(Input):
    """One input of the formula, cut into the parts that chunks of D need."""

    def __init__(self, plan: Plan, me: int, name: str, chunks: Mapping[ChunkKey, Any]) -> None:
        problem = plan.problem
        sizes, (rows, cols) = problem[name].chunks, problem.d.chunks
        # An axis of length 1 is broadcast: all chunks of D along it need the same part.
        self._by_row, self._by_col = sum(sizes[0]) == problem.m, sum(sizes[1]) == problem.n
        parts = (rows if self._by_row else (1,), cols if self._by_col else (1,))
        self._width, self._columns = len(parts[1]), len(cols)
        needed = [sorted({self.part(i) for i in plan.owned(rank).tolist()}) for rank in range(len(plan.ranks))]
        super().__init__(plan, me, name, chunks, parts, needed)

    def part(self, index: int) -> int:
        """Return the number of the part that chunk `index` of D needs."""
        i, j = divmod(index, self._columns)
        return (i if self._by_row else 0) * self._width + (j if self._by_col else 0)

    def values(self, index: int) -> Any:
        """Return the part that chunk `index` of D needs, in float32 if the input is FP8."""
        return decoded(self.parts[self.part(index)], self.type_name)


@dataclasses.dataclass(frozen=True)
class BiasCut:
    """How the bias is cut along the one axis of D along which it has values."""

    # That axis: 0 for a value for each row of D, 1 for a value for each column.
    axis: int
    # The lengths of all parts.
    sizes: tuple[int, ...]
    # The number of each rank's part.
    parts: Sequence[int]
    # The extent along the axis of the product that this rank computes; beyond its part it is padding.
    length: int


class NativeBias:
    """The bias that the library adds on this rank, a value for each row or column of the product that it computes."""

    def __init__(self, plan: Plan, me: int, rank: int, chunks: Mapping[ChunkKey, Any], cut: BiasCut) -> None:
        own, dtype = carried(plan.problem["bias"].dtype, "cupy"), plan.problem.result_type
        self._padded = cp.zeros(cut.length, own)
        self.vector = self._padded if own == dtype else cp.empty(cut.length, dtype)
        number = cut.parts[rank]
        part = self._padded[: cut.sizes[number]].reshape((-1, 1) if cut.axis == 0 else (1, -1))
        sizes = (cut.sizes, (1,)) if cut.axis == 0 else ((1,), cut.sizes)
        needed = [[part] for part in cut.parts]
        self.inputs: list[Input] = [Input(plan, me, "bias", chunks, sizes, needed, {number: part})]

    def convert(self, stream: cp.cuda.Stream) -> None:
        """Put the conversion to the type of D on a stream."""
        if self.vector is not self._padded:
            with stream:
                self.vector[...] = self._padded

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        return [self._padded, self.vector]


class Finishing:
    """The formula on one rank's chunks of D after the product; its outputs are allocated when it is made."""

    def __init__(self, plan: Plan, me: int, rank: int, chunks: Mapping[ChunkKey, Any], order: str) -> None:
        self._problem = problem = plan.problem
        self.inputs: list[_ByChunk] = [_ByChunk(plan, me, name, chunks) for name in problem.operands[2:]]
        self.made: dict[ResultKey, Any] = {}
        for index in plan.owned(rank).tolist():
            r0, r1, c0, c1 = plan.chunk_rect(index)
            shape = (r1 - r0, c1 - c0)
            self.made["", index] = cp.empty(shape, carried(problem.d.dtype, "cupy"), order=order)
            for name in problem.formula.per_element:
                dtype = problem.formula.dtype_of(name, problem.result_type)
                self.made[name, index] = cp.empty(part_shape(problem.formula.keeps(name), shape), dtype)

    def apply(self, sums: Mapping[int, Any], stream: cp.cuda.Stream) -> dict[ResultKey, Any]:
        """Put the formula on the stream; return the outputs."""
        with stream:
            for index, acc in sums.items():
                results = {name: self.made[name, index] for name in ("", *self._problem.formula.per_element)}
                finish_into(self._problem, acc, {x.name: x.values(index) for x in self.inputs}, results)
        return self.made

    @property
    def d(self) -> dict[int, Any]:
        """The chunks of D by number."""
        return {number: chunk for (name, number), chunk in self.made.items() if not name}

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        parts = [array for x in self.inputs for array in x.parts.values()]
        return [*self.made.values(), *parts]


def decoded(array: Any, type_name: str) -> Any:
    """Return an input of the formula in the type for computing: FP8 as float32."""
    return decode(cp, array, type_name, np.dtype(np.float32)) if type_name in FP8 else array


def finish_into(problem: Problem, acc: Any, inputs: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """Apply the formula to a chunk of sums, on the current stream; `made` are D, under no name, and other outputs."""
    formula, d = problem.formula, targets[""]
    if not acc.size:
        for name in formula.per_element:
            targets[name][...] = 0
        return
    # The scale of D, and what FP8 and integers need, come after the kernel.
    last = d.dtype.kind in "iu" or formula.scale_d != 1 or "scale_d" in formula.scales
    target = cp.empty(acc.shape, acc.dtype) if last else d
    saved = [targets[formula.saved]] if formula.saved else []
    kernel = _formula_kernel(formula, tuple(inputs))
    kernel(acc, list(inputs.values()), [target, *saved], scalars(formula, acc.dtype))
    reduced = reductions(cp, formula, target.astype(acc.dtype, copy=False))
    if last:
        d[...] = stored(cp, scaled(formula, target, inputs), problem.d.dtype, fp8_bytes=True)
    for name, values in reduced.items():
        targets[name][...] = values


def _formula_kernel(formula: Formula, names: tuple[str, ...]) -> Kernel:
    """Return the kernel of a formula, made once for all factors: these are its arguments."""
    alpha = (1.0, 0.0) if complex(*formula.alpha) == 1 else (2.0, 0.0)
    beta = (0.0, 0.0) if complex(*formula.beta) == 0 else (1.0, 0.0)
    return _made(dataclasses.replace(formula, alpha=alpha, beta=beta, scale_d=1.0), names)


@functools.lru_cache(maxsize=64)
def _made(formula: Formula, names: tuple[str, ...]) -> Kernel:
    return Kernel(formula, names)


class Kernel:
    """The formula as one kernel, fused by CuPy; where CuPy can't, as one kernel for each operation."""

    def __init__(self, formula: Formula, names: tuple[str, ...]) -> None:
        def apply(xp: Any, arrays: Sequence[Any], factors: tuple[Any, Any]) -> Iterator[Any]:
            return iter(elementwise(xp, formula, arrays[0], dict(zip(names, arrays[1:], strict=True)), factors))

        def traced(alpha: Any, beta: Any, *arguments: Any) -> None:
            arrays, outputs = arguments[: 1 + len(names)], arguments[1 + len(names) :]
            traced_results = apply(np, [_Traced(x) for x in arrays], (_Traced(alpha), _Traced(beta)))
            for target, values in zip(outputs, traced_results, strict=True):
                target[...] = values.value

        self._apply, self._fused, self.is_fused = apply, cp.fuse()(traced), True

    def __call__(self, acc: Any, inputs: list[Any], outputs: list[Any], factors: tuple[Any, Any]) -> None:
        """Fill `outputs`: D, and what is saved."""
        if self.is_fused:
            # CuPy does not fuse bfloat16: its values are read and written in the type of the sums.
            values = [x.astype(acc.dtype) if x.dtype.kind == "V" else x for x in inputs]
            targets = [cp.empty(x.shape, acc.dtype) if x.dtype.kind == "V" else x for x in outputs]
            try:
                self._fused(*factors, acc, *values, *targets)
                for output, target in zip(outputs, targets, strict=True):
                    if output is not target:
                        output[...] = target
                return
            except Exception as error:  # whatever a function of the user's meets while it is traced
                log.info("not fused to one kernel: %s: %s", type(error).__name__, error)
                self.is_fused = False
        for output, result in zip(outputs, self._apply(cp, [acc, *inputs], factors), strict=True):
            output[...] = result


class _Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """A stand-in for an array while CuPy traces a formula: NumPy's functions of it become CuPy's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def dtype(self) -> np.dtype:
        dtype: np.dtype = np.dtype(self.value.dtype)
        return dtype

    def astype(self, dtype: Any, copy: bool = True) -> _Traced:
        return self if dtype == self.dtype else _Traced(self.value.astype(dtype))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return _Traced(getattr(cp, ufunc.__name__)(*map(_bare, inputs)))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        bare = {name: _bare(value) for name, value in kwargs.items()}
        return _Traced(getattr(cp, function.__name__)(*map(_bare, args), **bare))


def _bare(x: Any) -> Any:
    return x.value if isinstance(x, _Traced) else x
