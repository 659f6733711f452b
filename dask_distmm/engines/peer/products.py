"""The products of a schedule as GEMMs into the blocks of D."""

from __future__ import annotations

import numpy as np

from dask_distmm.engines.gpu.finishing import NativeBias
from dask_distmm.engines.gpu.gemm import PLAIN, Gemm, Kinds, Memory, Native, Shape
from dask_distmm.engines.peer.ahead import Work
from dask_distmm.engines.peer.buffers import OperandBuffers
from dask_distmm.engines.peer.pulls import span_of
from dask_distmm.engines.peer.readable import DeviceView, moved
from dask_distmm.engines.peer.result import Result
from dask_distmm.engines.peer.schedule import Product
from dask_distmm.planning.cuts import padded
from dask_distmm.planning.peer.block_schedule import extent_multiple
from dask_distmm.planning.plan import Rect


class Gemms:
    """Makes the GEMMs of one rank."""

    def __init__(
        self, kinds: Kinds, buffers: OperandBuffers, result: Result, epilog: str | None, bias: NativeBias | None
    ) -> None:
        self._problem, self._kinds, self._buffers = result.plan.problem, kinds, buffers
        self._blocks, self._triangle = result.blocks, result.triangle
        self._rects = np.array([rect for rect, _ in result.blocks], np.int64).reshape(-1, 4)
        self._epilog, self._bias = epilog, bias
        self._first_column = result.plan.region(result.rank)[2]
        self._multiple = extent_multiple(self._problem)

    def of(self, product: Product) -> list[Work]:
        """Return a product as GEMMs: one or some for each block of D that it is multiplied into."""
        a, b = self._buffers.view(product.a[0]), self._buffers.view(product.b[0])
        return self.between(product.rect, product.a[0].kk, a, b, add=product.add)

    def between(self, rect: Rect, kk: int, a: DeviceView, b: DeviceView, *, add: bool) -> list[Work]:
        """Return the product of matrices on this GPU as GEMMs, as `of` does."""
        found = list[Work]()
        for number in self._touched(rect):
            (top, bottom, left, right), array = self._blocks[number]
            part = max(top, rect[0]), min(bottom, rect[1]), max(left, rect[2]), min(right, rect[3])
            for i0, i1, j0, j1 in self._triangle.kept(part) if self._triangle is not None else (part,):
                rows, cols = (
                    moved(x, axis, at, self._buffers.itemsizes[axis])
                    for x, axis, at in ((a, 0, i0 - rect[0]), (b, 1, j0 - rect[2]))
                )
                m, n, k = (padded(extent, self._multiple) for extent in (i1 - i0, j1 - j0, kk))
                shape = Shape(m, n, k, True, (self._op(1, b), self._op(0, a)))
                at = span_of(array)
                start = at.pointer + (i0 - top) * at.row_stride + (j0 - left) * at.col_stride
                d = Memory(start, max(1, at.row_stride // array.dtype.itemsize))
                found.append(Gemm(shape, self._kinds, rows, cols, d, add=add, native=self._native(j0)))
        return found

    def _touched(self, rect: Rect) -> list[int]:
        """Return the numbers of the blocks of D that a part of it overlaps."""
        if len(self._blocks) == 1:
            return [0]
        top, bottom, left, right = self._rects.T
        here = (top < rect[1]) & (bottom > rect[0]) & (left < rect[3]) & (right > rect[2])
        found: list[int] = np.flatnonzero(here).tolist()
        return found

    def _native(self, column: int) -> Native:
        """Return the library's factor, epilog and bias for a product whose first column is this one of D."""
        if self._epilog is None:
            return PLAIN
        bias = 0
        if self._bias is not None:
            vector = self._bias.vector
            bias = int(vector.data.ptr) + (column - self._first_column) * vector.itemsize
        return Native(complex(*self._problem.formula.alpha), self._epilog, bias)

    def _op(self, operand: int, view: DeviceView) -> str:
        if view.order == "C":
            return "N"
        return "C" if self._problem.conjugated[operand] else "T"
