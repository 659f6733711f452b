"""Copies of rectangles into this GPU's memory: by copy engines where rows are dense, else by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.engines.device.kernels import Launch, copy_rectangles
from dask_distmm.layout.rectangles import Span

__all__ = ["Copies", "Rectangle", "span_of"]

# A copy engine has a cost for each copy (some microseconds, on the host too): many small ones go into one kernel.
_SMALL_BYTES = 64 * 2**10
_MANY = 16


class Rectangle(NamedTuple):
    """What is to be copied: addresses of both first elements, with strides, and rows and columns."""

    source: Span
    target: Span
    rows: int
    cols: int


class Copies:
    """Copies that are ready to be put on a stream, once. Targets do not overlap, and are dense along one axis.

    Parameters
    ----------
    found
        What is to be copied.
    itemsize
        Bytes of an element.
    here
        Whether all of it is in this GPU's memory: then a kernel is quickest.
    """

    def __init__(self, found: Sequence[Rectangle], itemsize: int, *, here: bool = False) -> None:
        self._whole: list[tuple[int, int, int]] = []
        self._by_rows: list[tuple[int, int, int, int, int, int]] = []
        by_kernel: list[Rectangle] = []
        small = here or sum(one.rows * one.cols * itemsize < _SMALL_BYTES for one in found) >= _MANY
        for one in found:
            (src, src_row, src_col), (dst, dst_row, dst_col), rows, cols = one
            # Along the axis that is dense in the target.
            if dst_col == itemsize or cols == 1:
                src_inner, src_outer, dst_outer, width, height = src_col, src_row, dst_row, cols * itemsize, rows
                single = cols == 1
            else:
                src_inner, src_outer, dst_outer, width, height = src_row, src_col, dst_col, rows * itemsize, cols
                single = rows == 1
            dense = (single or src_inner == itemsize) and (height == 1 or (src_outer >= width and dst_outer >= width))
            if not dense or (small and (here or width * height < _SMALL_BYTES)):
                by_kernel.append(one)
            elif height == 1 or src_outer == dst_outer == width:
                self._whole.append((dst, src, width * height))
            else:
                self._by_rows.append((dst, dst_outer, src, src_outer, width, height))
        self._launches: list[Launch] = []
        if by_kernel:
            self._launches = copy_rectangles([np.array([_row(one, itemsize) for one in by_kernel], np.int64)], itemsize)
            # Their tables are put on the device by the default stream.
            self._ready = cp.cuda.Event(disable_timing=True)
            self._ready.record(cp.cuda.Stream.null)

    def run(self, stream: cp.cuda.Stream) -> None:
        """Put them on a stream; must be kept until they are done."""
        runtime = cp.cuda.runtime
        for whole in self._whole:
            runtime.memcpyAsync(*whole, runtime.memcpyDefault, stream.ptr)
        for by_rows in self._by_rows:
            runtime.memcpy2DAsync(*by_rows, runtime.memcpyDefault, stream.ptr)
        if self._launches:
            stream.wait_event(self._ready)
        for launch in self._launches:
            launch.run(stream)


def _row(one: Rectangle, itemsize: int) -> tuple[int, ...]:
    """Return a row of the table of a copy kernel."""
    (src, src_row, src_col), (dst, dst_row, dst_col), rows, cols = one
    if dst_col == itemsize or cols == 1:
        return src, dst, cols, rows, src_col, src_row, dst_row
    return src, dst, rows, cols, src_row, src_col, dst_col


def span_of(array: Any) -> Span:
    """Return where a device array lies."""
    return Span(int(array.data.ptr), *map(int, array.strides))
