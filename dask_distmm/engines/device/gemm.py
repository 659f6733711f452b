"""Multiplies on one GPU: cuBLAS, and cuBLASLt for FP8, which cuBLAS' own GEMM does not take."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import NamedTuple

import cupy as cp
import numpy as np
from nvmath.bindings import cublas, cublasLt

from dask_distmm.dtypes import FP8, compute_dtype, dtype_from_name
from dask_distmm.errors import EngineError

__all__ = ["DATA_TYPES", "OPS", "Kinds", "Memory", "Shape", "check_fp8", "factors", "multiply"]

# The tensor cores of Ada, Hopper and newer.
_LEAST_FP8 = 89

DATA_TYPES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "complex64": 4,
    "complex128": 5,
    "bfloat16": 14,
    "float8_e4m3fn": 28,
    "float8_e5m2": 29,
}  # cudaDataType
_Compute = cublas.ComputeType
_COMPUTE_TYPES = {
    **dict.fromkeys((*FP8, "float16", "bfloat16"), _Compute.COMPUTE_32F),
    "float32": _Compute.COMPUTE_32F,
    "complex64": _Compute.COMPUTE_32F,
    "float64": _Compute.COMPUTE_64F,
    "complex128": _Compute.COMPUTE_64F,
}
_OTHER_COMPUTE_TYPES = {
    "tf32": "COMPUTE_32F_FAST_TF32",
    "bf16x9": "COMPUTE_32F_EMULATED_16BFX9",
    "fp64_emulated": "COMPUTE_64F_EMULATED_FIXEDPOINT",
}
OPS = {"N": 0, "T": 1, "C": 2}


class Memory(NamedTuple):
    """A local matrix: its address, and the distance of its columns (rows in C order) in elements."""

    pointer: int
    ld: int


class Shape(NamedTuple):
    """Of one multiply: extents, whether the library computes D's transpose, and op of its first and second operand."""

    m: int
    n: int
    k: int
    flipped: bool
    ops: tuple[str, str]


class Kinds(NamedTuple):
    """Types of A, B and D, and how they are multiplied (one of `COMPUTE_TYPES` or empty), by name."""

    a: str
    b: str
    d: str
    compute: str = ""

    @property
    def compute_type(self) -> int:
        """The library's number for it.

        Raises
        ------
        EngineError
            The library has no such compute type.
        """
        if not self.compute:
            return int(_COMPUTE_TYPES[self.a])
        found = getattr(_Compute, _OTHER_COMPUTE_TYPES[self.compute], None)
        if found is None:
            version = importlib.metadata.version("nvmath-python")
            raise EngineError(
                f"compute_type={self.compute!r} is {_OTHER_COMPUTE_TYPES[self.compute]}, which cuBLAS as nvmath-python "
                f"{version} knows it does not have: use a newer one, or another compute_type"
            )
        return int(found)


def factors(dtype: str, alpha: complex = 1.0, beta: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return alpha and beta in the type that the libraries take them in: the one of the sums."""
    scale = compute_dtype(dtype_from_name(dtype), 1)
    number = alpha if scale.kind == "c" else complex(alpha).real
    return np.full(1, number, scale), np.full(1, beta, scale)


def check_fp8() -> None:
    """Raise `EngineError` if this GPU has no FP8."""
    found = cp.cuda.Device().compute_capability
    if int(found) < _LEAST_FP8:
        raise EngineError(
            f"FP8 needs compute capability 8.9 (Ada, Hopper or newer); this GPU has {found[:-1]}.{found[-1]}: "
            "dequantize to float16, which has all of its numbers"
        )


def multiply(
    stream: cp.cuda.Stream, shape: Shape, types: Kinds, a: Memory, b: Memory, d: Memory, *, add: bool = False
) -> None:
    """Put ``D = A @ B``, or ``D += A @ B``, on a stream.

    Parameters
    ----------
    stream
        What it runs on.
    shape
        Extents, and how the matrices lie; FP8 wants op T, N.
    types
        Of A, B and D.
    a, b, d
        The matrices.
    add
        Add to what D holds, in D's type.
    """
    x, y, rows, cols = (b, a, shape.n, shape.m) if shape.flipped else (a, b, shape.m, shape.n)
    kind_x, kind_y = (types.b, types.a) if shape.flipped else (types.a, types.b)
    scalars = factors(types.a, beta=float(add))
    if types.a in FP8:
        _multiply_fp8(stream, (rows, cols, shape.k), shape.ops, types, (kind_x, kind_y), (x, y, d), scalars)
        return
    alpha, beta = scalars
    op_x, op_y = (OPS[op] for op in shape.ops)
    handle = _cublas_handle()
    cublas.set_stream(handle, stream.ptr)
    cublas.gemm_ex_64(
        *(handle, op_x, op_y, rows, cols, shape.k, alpha.ctypes.data, x.pointer, DATA_TYPES[kind_x], x.ld),
        *(y.pointer, DATA_TYPES[kind_y], y.ld, beta.ctypes.data, d.pointer, DATA_TYPES[types.d], d.ld),
        *(types.compute_type, -1),
    )


@functools.lru_cache(maxsize=1)
def _cublas_handle() -> int:
    return int(cublas.create())


@functools.lru_cache(maxsize=1)
def _lt_handle() -> int:
    return int(cublasLt.create())


def _multiply_fp8(
    stream: cp.cuda.Stream,
    extents: tuple[int, int, int],
    ops: tuple[str, str],
    types: Kinds,
    kinds: tuple[str, str],
    memories: tuple[Memory, Memory, Memory],
    scalars: tuple[np.ndarray, np.ndarray],
) -> None:
    """Put the library's own product of column-major matrices on a stream. Scales that are not set are 1."""
    (rows, cols, k), (x, y, d), (alpha, beta) = extents, memories, scalars
    attribute = cublasLt.MatmulDescAttribute
    descriptor = cublasLt.matmul_desc_create(types.compute_type, DATA_TYPES["float32"])
    layouts = [
        cublasLt.matrix_layout_create(DATA_TYPES[kind], height, width, memory.ld)
        for kind, height, width, memory in zip(
            (*kinds, types.d), (k, k, rows), (rows, cols, cols), (x, y, d), strict=True
        )
    ]
    try:
        for name, op in zip((attribute.TRANSA, attribute.TRANSB), ops, strict=True):
            held = np.array([OPS[op]], cublasLt.get_matmul_desc_attribute_dtype(int(name)))
            cublasLt.matmul_desc_set_attribute(descriptor, int(name), held.ctypes.data, held.nbytes)
        in_x, in_y, in_d = layouts
        # Without an algorithm the library looks for the best one that needs no workspace.
        cublasLt.matmul(
            *(_lt_handle(), descriptor, alpha.ctypes.data, x.pointer, in_x, y.pointer, in_y),
            *(beta.ctypes.data, d.pointer, in_d, d.pointer, in_d, 0, 0, 0, stream.ptr),
        )
    finally:
        for layout in layouts:
            cublasLt.matrix_layout_destroy(layout)
        cublasLt.matmul_desc_destroy(descriptor)
