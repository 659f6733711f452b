"""Many copies of rectangles by one call of the driver: cuMemcpy3DBatchAsync, of CUDA 12.8 and later.

A candidate for what the peer engine does with one call for each chunk. `benchmarks.gpu.links` measures it: on H200 it
takes as long as these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dask_distmm.engines.gpu.copy_kernels import Rectangle

__all__ = ["OPERATION", "Batch", "operations"]

# CUmemcpy3DOperand with a pointer, and CUDA_MEMCPY3D_BATCH_OP, as cuda.h has them.
_OPERAND = np.dtype(
    [("type", "i4"), ("pointer", "u8"), ("row_length", "u8"), ("layer_height", "u8"), ("location", "2i4")], align=True
)
OPERATION = np.dtype(
    [("source", _OPERAND), ("target", _OPERAND), ("extent", "3u8"), ("access_order", "i4"), ("flags", "u4")], align=True
)
# CU_MEMCPY_OPERAND_TYPE_POINTER, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_POINTER, _IN_STREAM_ORDER, _OVERLAP = 1, 1, 1


def operations(found: Sequence[Rectangle], *, overlap: bool) -> np.ndarray:
    """Return the operations that copy rectangles of bytes, whose rows are dense."""
    made = np.zeros(len(found), OPERATION)
    for name, spans in (("source", [one.source for one in found]), ("target", [one.target for one in found])):
        made[name]["type"] = _POINTER
        made[name]["pointer"] = [span.pointer for span in spans]
        made[name]["row_length"] = [span.row_stride for span in spans]
        made[name]["layer_height"] = [one.rows for one in found]
    made["extent"] = [(one.cols, one.rows, 1) for one in found]
    made["access_order"], made["flags"] = _IN_STREAM_ORDER, _OVERLAP if overlap else 0
    return made


class Batch:
    """Copies of rectangles of bytes, ready to be put on a stream.

    Parameters
    ----------
    found
        What is to be copied; rows are dense, targets do not overlap.
    overlap
        Whether the driver is to leave the multiprocessors to others.
    """

    def __init__(self, found: Sequence[Rectangle], *, overlap: bool) -> None:
        self._operations = operations(found, overlap=overlap)
        library = ctypes.CDLL("libcuda.so.1")
        # Since CUDA 13 without the place for the index of what failed.
        self._new = hasattr(library, "cuMemcpy3DBatchAsync_v2")
        self._call = library.cuMemcpy3DBatchAsync_v2 if self._new else library.cuMemcpy3DBatchAsync

    def run(self, stream: Any) -> None:
        """Put them on a stream."""
        failed = ctypes.c_size_t()
        where = () if self._new else (ctypes.byref(failed),)
        count, data = ctypes.c_size_t(len(self._operations)), ctypes.c_void_p(self._operations.ctypes.data)
        code = self._call(count, data, *where, ctypes.c_ulonglong(0), ctypes.c_void_p(stream.ptr))
        if code:
            raise RuntimeError(f"cuMemcpy3DBatchAsync: CUDA error {code}")
