"""The products of a schedule as GEMMs into the blocks of D."""

from __future__ import annotations

from typing import Any

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

__all__ = ["Gemms"]


class Gemms:
    """Makes the GEMMs of one rank.

    Parameters
    ----------
    kinds
        The types of A, B and the sums.
    buffers
        Where parts of A and B are.
    result
        The rank's block of D.
    epilog
        The epilog that the library does with each product, ``""`` for a factor alone; None if it does none.
    bias
        The bias of that epilog, or None.
    """

    def __init__(
        self, kinds: Kinds, buffers: OperandBuffers, result: Result, epilog: str | None, bias: NativeBias | None
    ) -> None:
        self._problem, self._kinds, self._buffers = result.plan.problem, kinds, buffers
        self._blocks, self._triangle = result.blocks, result.triangle
        self._epilog, self._bias = epilog, bias
        self._first_column = result.plan.region(result.rank)[2]
        self._multiple = extent_multiple(self._problem)

    def of(self, product: Product) -> list[Work]:
        """Return a product as GEMMs: one or some for each block of D that it is multiplied into."""
        r0, r1, c0, c1 = product.rect
        found = list[Work]()
        for (top, bottom, left, right), array in self._blocks:
            i0, i1, j0, j1 = rect = max(top, r0), min(bottom, r1), max(left, c0), min(right, c1)
            if i0 >= i1 or j0 >= j1:
                continue
            for part in self._triangle.kept(rect) if self._triangle is not None else (rect,):
                found.append(self._gemm(product, part, (top, left), array))
        return found

    def _gemm(self, product: Product, rect: Rect, corner: tuple[int, int], array: Any) -> Gemm:
        """Return a product as far as it goes into a rectangle of D, in the block that begins at a corner."""
        multiple, (i0, i1, j0, j1), (top, left) = self._multiple, rect, corner
        a, b = self._buffers.view(product.a[0]), self._buffers.view(product.b[0])
        kk = padded(product.a[0].kk, multiple)
        ops = self._op(1, b), self._op(0, a)
        size_a, size_b = self._buffers.itemsizes
        at = span_of(array)
        start = at.pointer + (i0 - top) * at.row_stride + (j0 - left) * at.col_stride
        shape = Shape(padded(i1 - i0, multiple), padded(j1 - j0, multiple), kk, True, ops)
        rows, cols = moved(a, 0, i0 - product.rect[0], size_a), moved(b, 1, j0 - product.rect[2], size_b)
        d = Memory(start, max(1, at.row_stride // array.dtype.itemsize))
        return Gemm(shape, self._kinds, rows, cols, d, add=product.add, native=self._native(j0))

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
