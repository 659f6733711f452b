"""Copies of rectangles into this GPU's memory: by copy engines where rows are dense, else by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from dask_distmm.engines.device.kernels import copy_rectangles
from dask_distmm.layout.rectangles import Span

__all__ = ["Rectangle", "copy", "span_of"]

# A copy engine has a cost for each copy (some microseconds, on the host too): many small ones go into one kernel.
_SMALL_BYTES = 64 * 2**10
_MANY = 16


class Rectangle(NamedTuple):
    """What is to be copied: addresses of both first elements, with strides, and rows and columns."""

    source: Span
    target: Span
    rows: int
    cols: int


def copy(found: Sequence[Rectangle], itemsize: int, stream: cp.cuda.Stream, *, here: bool = False) -> list[Any]:
    """Put copies on a stream; return what has to be kept until they are done.

    Targets do not overlap, and are dense along one axis. Copies of what is `here` already are quickest by a kernel.
    """
    by_kernel: list[Rectangle] = []
    small = here or sum(one.rows * one.cols * itemsize < _SMALL_BYTES for one in found) >= _MANY
    runtime = cp.cuda.runtime
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
            runtime.memcpyAsync(dst, src, width * height, runtime.memcpyDefault, stream.ptr)
        else:
            runtime.memcpy2DAsync(dst, dst_outer, src, src_outer, width, height, runtime.memcpyDefault, stream.ptr)
    launches: list[Any] = []
    if by_kernel:
        tables = [_row(one, itemsize) for one in by_kernel]
        launches = copy_rectangles([np.array(tables, np.int64)], itemsize)
        # Their tables were put on the device by the default stream.
        ready = cp.cuda.Event(disable_timing=True)
        ready.record(cp.cuda.Stream.null)
        stream.wait_event(ready)
        for launch in launches:
            launch.run(stream)
    return launches


def _row(one: Rectangle, itemsize: int) -> tuple[int, ...]:
    """Return a row of the table of a copy kernel."""
    (src, src_row, src_col), (dst, dst_row, dst_col), rows, cols = one
    if dst_col == itemsize or cols == 1:
        return src, dst, cols, rows, src_col, src_row, dst_row
    return src, dst, rows, cols, src_row, src_col, dst_col


def span_of(array: Any) -> Span:
    """Return where a device array lies."""
    return Span(int(array.data.ptr), *map(int, array.strides))
