"""The engine for CPUs: SciPy's BLAS and LAPACK, and NumPy, in the memory of workers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import Engine, Job, Side
from dask_distmm.engines.numpy.blas import add_lower, gemm, mirror, reflect
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.engines.programs.region import RegionJob
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import Formula, finish_by_rows
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.numeric.types import dtype_from_name, round_tf32, store
from dask_distmm.planning import Plan
from dask_distmm.planning.region import RegionPlacement
from dask_distmm.programs.steps import Buffer, View

Array: TypeAlias = NDArray[Any]
Pair = tuple[bool, bool]


class ProductKernels(LapackKernels):
    """The kernels of products, as `programs.steps` names them."""

    reported = 0.0
    timings: Mapping[str, float] = MappingProxyType({})

    def __init__(self, plan: Plan) -> None:
        # BLAS conjugates, without a copy, the operand that is in the other order than D.
        transposed = any(plan.problem[name].conjugated and plan.orders[name] == "C" for name in "ab")
        self._order: Literal["C", "F"] = "F" if transposed else "C"
        self._outputs, self._rounded = [output.name for output in plan.problem.outputs], plan.problem.compute == "tf32"
        # What of A and B is conjugated in products, and on the way into panels.
        a, b = ((plan.problem[name].conjugated, name in plan.packing) for name in "ab")
        self._conjugated = a == (True, False), b == (True, False)
        self._conjugates = a == (True, True), b == (True, True)

    def complete(self) -> None:
        """Do nothing: all is done."""

    def new(self, buffer: Buffer, *, zero: bool) -> Array:
        """Return a new matrix; the system's zeros, for sums, cost nothing until they are written to."""
        dtype = dtype_from_name(buffer.dtype)
        return np.zeros(buffer.shape, dtype, self._order) if zero else np.empty(buffer.shape, dtype)

    def add_product(self, a: Array, b: Array, c: Array, *, transposed: Pair) -> None:
        """C += A B, of matrices as they lie or `transposed`."""
        gemm(a.T if transposed[0] else a, b.T if transposed[1] else b, c, self._conjugated)

    def add_symmetric(self, a: Array, b: Array, c: Array, *, transposed: Pair) -> None:
        """C += A A^H in the lower triangle of C, where B is A^H."""
        if not add_lower(a.T if transposed[0] else a, c, (self._conjugated[0], not self._conjugated[0])):
            self.add_product(a, b, c, transposed=transposed)

    def mirror(self, block: Array) -> None:
        """Make the upper triangle of a block of the lower one."""
        mirror(block)

    def join(self, *parts: Array, reads: int, whole: View, turned: Sequence[bool]) -> None:
        """Copy parts of A or B, or their transposes, to their places in a panel, conjugated or rounded."""
        for source, target, transposed in zip(parts, parts[reads:], turned, strict=False):
            target[...] = source.T if transposed else source
            if self._conjugates[whole.number]:
                np.conjugate(target, out=target)
            if self._rounded:
                round_tf32(target)

    def store(self, *parts: Array, reads: int, transposed: bool = False) -> None:
        """Write parts of sums, or their adjoints, to other ones, or to chunks of D."""
        for source, target in zip(parts, parts[reads:], strict=False):
            (reflect(source, target) if transposed else store(target, source))

    def finish(self, *parts: Array, reads: int, names: Sequence[str], formula: Formula) -> None:
        """Apply the formula to sums: D, where they are or apart, and auxiliary outputs."""
        acc, results = parts[reads], parts[reads + 1 :]
        targets = dict(zip(self._outputs[len(self._outputs) - len(results) :], results, strict=True))
        out = targets.pop("", acc)
        if acc.size:
            finish_by_rows(formula, acc, dict(zip(names, parts, strict=False)), out, targets)
            return
        for target in targets.values():
            target[...] = 0


class NumpyEngine(Engine):
    """Multiplies on CPUs with SciPy's BLAS and NumPy."""

    name = "numpy"

    def versions(self) -> dict[str, str]:
        """Return no versions: any NumPy works with any other."""
        return {"numpy": importlib.metadata.version("numpy").split(".")[0]}

    def job(self, side: Side[Any]) -> Job[Any]:
        """Return what does a participant's part of a run."""
        if isinstance(side.plan, RegionPlacement):
            return RegionJob(side)
        for (operand, number), chunk in side.chunks.items():
            there = not isinstance(chunk, SourceChunk)  # else looked at later
            fits = type(chunk) is np.ndarray or sparse_package(chunk) == "scipy"
            if there and (not fits or chunk.ndim != 2):
                raise EngineError(
                    f"chunk {number} of {operand.upper()} is a {type(chunk).__name__}; the numpy engine needs "
                    "2-D numpy.ndarray chunks: convert them with map_blocks(numpy.asarray), or pass meta= where the "
                    "array is made, so that it says what its chunks are and Dask's own tasks multiply"
                )
        return ProgramJob(side, ProductKernels(side.plan) if isinstance(side.plan, Plan) else LapackKernels())


ENGINE = NumpyEngine()
