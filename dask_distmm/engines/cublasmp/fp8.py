"""FP8 on one GPU alone, by cuBLASLt: cuBLAS' own GEMM does not take it."""

from __future__ import annotations

import functools

import cupy as cp
import numpy as np
from nvmath.bindings import cublasLt

from dask_distmm.engines.cublasmp.library import DATA_TYPES, OPS, Kinds, Memory, factors
from dask_distmm.errors import EngineError
from dask_distmm.plan.tiles import Tiles

__all__ = ["check_fp8", "multiply_fp8_alone"]

# The tensor cores of Ada, Hopper and newer.
_LEAST = 89


def check_fp8() -> None:
    """Raise `EngineError` if this GPU has no FP8."""
    found = cp.cuda.Device().compute_capability
    if int(found) < _LEAST:
        raise EngineError(
            f"FP8 needs compute capability 8.9 (Ada, Hopper or newer); this GPU has {found[:-1]}.{found[-1]}: "
            "dequantize to float16, which has all of its numbers"
        )


@functools.lru_cache(maxsize=1)
def _handle() -> int:
    return int(cublasLt.create())


def multiply_fp8_alone(
    stream: cp.cuda.Stream,
    tiles: Tiles,
    shape: tuple[int, int, int],
    types: Kinds,
    a: Memory,
    b: Memory,
    d: Memory,
) -> None:
    """Put ``D = A @ B`` on a stream. Parameters as for `Group.multiply`. Scales that are not set are 1."""
    m, n, k = shape
    x, y, rows, cols = (b, a, n, m) if tiles.flipped else (a, b, m, n)
    kinds = (types.b, types.a, types.d) if tiles.flipped else types[:3]
    alpha, beta = factors(types.a)
    attribute = cublasLt.MatmulDescAttribute
    descriptor = cublasLt.matmul_desc_create(types.compute_type, DATA_TYPES["float32"])
    layouts = [
        cublasLt.matrix_layout_create(DATA_TYPES[kind], height, width, memory.ld)
        for kind, height, width, memory in zip(kinds, (k, k, rows), (rows, cols, cols), (x, y, d), strict=True)
    ]
    try:
        for name, op in zip((attribute.TRANSA, attribute.TRANSB), tiles.ops, strict=True):
            held = np.array([OPS[op]], cublasLt.get_matmul_desc_attribute_dtype(int(name)))
            cublasLt.matmul_desc_set_attribute(descriptor, int(name), held.ctypes.data, held.nbytes)
        in_x, in_y, in_d = layouts
        # Without an algorithm the library looks for the best one that needs no workspace.
        cublasLt.matmul(
            *(_handle(), descriptor, alpha.ctypes.data, x.pointer, in_x, y.pointer, in_y),
            *(beta.ctypes.data, d.pointer, in_d, d.pointer, in_d, 0, 0, 0, stream.ptr),
        )
    finally:
        for layout in layouts:
            cublasLt.matrix_layout_destroy(layout)
        cublasLt.matmul_desc_destroy(descriptor)
