"""Products on one GPU: cuBLASLt, prepared before they are put on a stream.

The library's description of a product, and its best algorithm for it, are found out ahead and kept for the next run.
That takes as long as a small product does (about 0.1 ms where nothing is in the processor's caches), and the GPU would
wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import threading
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from nvmath.bindings import cublas, cublasLt

from dask_distmm.engines.base import log
from dask_distmm.errors import EngineError
from dask_distmm.numeric.types import FP8, compute_dtype, dtype_from_name

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
    "float16": "COMPUTE_32F_FAST_16F",
    "bfloat16": "COMPUTE_32F_FAST_16BF",
    "bf16x9": "COMPUTE_32F_EMULATED_16BFX9",
    "fp64_emulated": "COMPUTE_64F_EMULATED_FIXEDPOINT",
}
OPS = {"N": 0, "T": 1, "C": 2}
# cuBLASLt's numbers (cublasLtEpilogue_t).
_EPILOGS = {"": 1, "relu": 2, "bias": 4, "relu_bias": 6, "gelu": 32, "gelu_bias": 36}
# NVIDIA's advice for Hopper.
_WORKSPACE_BYTES = 32 * 2**20
_MOST_ALIGNED = 256
# cublasLtReductionScheme_t
_IN_PLACE, _IN_COMPUTE_TYPE = 1, 2


class MatrixRef(NamedTuple):
    """A local matrix: its address, and the distance of its columns (rows in C order) in elements."""

    pointer: int
    ld: int


class GemmShape(NamedTuple):
    """Of one multiply: extents, whether the library computes D's transpose, and op of its first and second operand."""

    m: int
    n: int
    k: int
    flipped: bool
    ops: tuple[str, str]


class GemmTypes(NamedTuple):
    """Types of A, B and D, and how they are multiplied (one of `COMPUTE_TYPES` or empty), by name."""

    a: str
    b: str
    d: str
    compute: str = ""

    @property
    def compute_type(self) -> int:
        """The library's number for it."""
        if not self.compute:
            return int(_COMPUTE_TYPES[self.a])
        return compute_number(self.compute)


def compute_number(name: str) -> int:
    """Return cuBLAS' constant for an alternative compute type of float32 and float64."""
    number = getattr(_Compute, _OTHER_COMPUTE_TYPES[name], None)
    if number is None:
        version = importlib.metadata.version("nvmath-python")
        raise EngineError(
            f"compute_type={name!r} is {_OTHER_COMPUTE_TYPES[name]}, which cuBLAS as nvmath-python {version} knows it "
            "does not have: use a newer one, or another compute_type"
        )
    return int(number)


class FusedEpilog(NamedTuple):
    """The factor, the epilog (one of `NATIVE_EPILOGS` or empty) and the address of its bias that a library applies."""

    alpha: complex = 1.0
    epilog: str = ""
    bias: int = 0


PLAIN = FusedEpilog()


def alpha_beta(dtype: str, alpha: complex = 1.0, beta: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return alpha and beta in the type that the libraries take them in: the one of the sums."""
    scale = compute_dtype(dtype_from_name(dtype), 1)
    number = alpha if scale.kind == "c" else complex(alpha).real
    return np.full(1, number, scale), np.full(1, beta, scale)


def check_fp8() -> None:
    """Raise `EngineError` if this GPU has no FP8."""
    capability = cp.cuda.Device().compute_capability
    if int(capability) < _LEAST_FP8:
        raise EngineError(
            f"FP8 needs compute capability 8.9 (Ada, Hopper or newer); this GPU has "
            f"{capability[:-1]}.{capability[-1]}: dequantize to float16, which has all of its numbers"
        )


class Gemm:
    """``D = epilog(alpha A @ B)``, or ``D = epilog(alpha A @ B + D)``, ready to be put on streams."""

    def __init__(
        self,
        shape: GemmShape,
        types: GemmTypes,
        a: MatrixRef,
        b: MatrixRef,
        d: MatrixRef,
        *,
        add: bool = False,
        native: FusedEpilog = PLAIN,
    ) -> None:
        x, y, rows, cols = (b, a, shape.n, shape.m) if shape.flipped else (a, b, shape.m, shape.n)
        kinds = (types.b, types.a, types.d) if shape.flipped else types[:3]
        self._places, self._types, self._bias = (x, y, d), types, native.bias
        self._extents, self._kinds, self._ops = (rows, cols, shape.k), kinds, shape.ops
        # They are read when the product is put on a stream.
        self._factors = alpha_beta(types.a, native.alpha, float(add))
        self._call: _LtProduct | None = None
        if not types.compute and 0 not in self._extents:
            aligned = (min(_MOST_ALIGNED, matrix.pointer & -matrix.pointer) for matrix in (x, y, d))
            lds = (x.ld, y.ld, d.ld)
            self._call = _call(self._extents, shape.ops, kinds, types.compute_type, lds, tuple(aligned), native.epilog)
        if self._call is None and (native.epilog or types.a in FP8):
            raise EngineError(f"cuBLASLt has no algorithm for {kinds} of {self._extents} with epilog {native.epilog!r}")

    @property
    def ran(self) -> bool:
        """Whether cuBLASLt has run this kind of product before, at any addresses."""
        return self._call is not None and self._call.ran

    @property
    def flops(self) -> float:
        """Floating-point operations, counted in real numbers."""
        rows, cols, k = self._extents
        return 2.0 * rows * cols * k

    def run(self, stream: cp.cuda.Stream) -> None:
        """Put it on a stream."""
        x, y, d = self._places
        alpha, beta = self._factors
        if self._call is not None:
            self._call(stream, alpha, beta, x.pointer, y.pointer, d.pointer, self._bias)
            return
        # Empty matrices, and other ways to compute float32 and float64: cuBLAS knows where they are worth it.
        (rows, cols, k), (op_x, op_y) = self._extents, (OPS[op] for op in self._ops)
        kind_x, kind_y, kind_d = (DATA_TYPES[kind] for kind in self._kinds)
        handle = _cublas_handle()
        cublas.set_stream(handle, stream.ptr)
        cublas.gemm_ex_64(
            *(handle, op_x, op_y, rows, cols, k, alpha.ctypes.data, x.pointer, kind_x, x.ld),
            *(y.pointer, kind_y, y.ld, beta.ctypes.data, d.pointer, kind_d, d.ld, self._types.compute_type, -1),
        )


@functools.lru_cache(maxsize=1)
def _cublas_handle() -> int:
    return int(cublas.create())


@functools.lru_cache(maxsize=1)
def _lt_handle() -> int:
    return int(cublasLt.create())


@functools.lru_cache(maxsize=4)
def _workspace(stream: int) -> Any:
    """Return a stream's workspace, which its products share."""
    return cp.empty(_WORKSPACE_BYTES, cp.uint8)


class _LtProduct:
    """The library's own product of column-major matrices, wherever they are. Scales that are not set are 1."""

    def __init__(
        self,
        extents: tuple[int, int, int],
        ops: tuple[str, str],
        kinds: tuple[str, str, str],
        compute: int,
        lds: tuple[int, int, int],
        epilog: str,
    ) -> None:
        rows, cols, k = extents
        scale = DATA_TYPES[compute_dtype(dtype_from_name(kinds[0]), 1).name]
        self.descriptor = cublasLt.matmul_desc_create(compute, scale)
        shapes = ((rows, k) if ops[0] == "N" else (k, rows), (k, cols) if ops[1] == "N" else (cols, k), (rows, cols))
        self.layouts = [
            cublasLt.matrix_layout_create(DATA_TYPES[kind], *shape, ld)
            for kind, shape, ld in zip(kinds, shapes, lds, strict=True)
        ]
        wide = compute_dtype(dtype_from_name(kinds[0]), 1) == dtype_from_name(kinds[2])
        self._reductions = (_IN_PLACE if wide else 0) | _IN_COMPUTE_TYPE
        self._biased, self._lock, self.ran = epilog.endswith("bias"), threading.Lock(), False
        self._set("EPILOGUE", _EPILOGS[epilog])
        for name, op in zip(("TRANSA", "TRANSB"), ops, strict=True):
            self._set(name, OPS[op])
        self.algorithm = cublasLt.MatmulHeuristicResult()

    def _set(self, name: str, value: int) -> None:
        at = int(cublasLt.MatmulDescAttribute[name])
        number = np.array([value], cublasLt.get_matmul_desc_attribute_dtype(at))
        cublasLt.matmul_desc_set_attribute(self.descriptor, at, number.ctypes.data, number.nbytes)

    def __del__(self) -> None:
        # At the end of the process the library may be gone already.
        with contextlib.suppress(Exception):
            for layout in self.layouts:
                cublasLt.matrix_layout_destroy(layout)
            cublasLt.matmul_desc_destroy(self.descriptor)

    def find(self, aligned: tuple[int, int, int]) -> bool:
        """Find the best algorithm for matrices at multiples of this many bytes; return whether there is one."""
        preference, attributes = cublasLt.matmul_preference_create(), cublasLt.MatmulPreferenceAttribute
        wanted = dict(zip(("A", "B", "C", "D"), (*aligned, aligned[2]), strict=True))
        values = {f"MIN_ALIGNMENT_{name}_BYTES": value for name, value in wanted.items()}
        try:
            # Where k is cut, parts are added in the type that is computed in, never in a narrower one of D.
            values |= {"MAX_WORKSPACE_BYTES": _WORKSPACE_BYTES, "REDUCTION_SCHEME_MASK": self._reductions}
            for name, value in values.items():
                at = int(attributes[name])
                number = np.array([value], cublasLt.get_matmul_preference_attribute_dtype(at))
                cublasLt.matmul_preference_set_attribute(preference, at, number.ctypes.data, number.nbytes)
            x, y, d = self.layouts
            count = np.zeros(1, np.int32)
            arguments = (_lt_handle(), self.descriptor, x, y, d, d, preference, 1)
            try:
                cublasLt.matmul_algo_get_heuristic(*arguments, self.algorithm.ptr, count.ctypes.data)
            except cublasLt.cuBLASLtError as error:
                log.info("cuBLASLt has no algorithm: %s", error)
            return bool(count[0])
        finally:
            cublasLt.matmul_preference_destroy(preference)

    def __call__(
        self, stream: cp.cuda.Stream, alpha: np.ndarray, beta: np.ndarray, x: int, y: int, d: int, bias: int
    ) -> None:
        """Put it on a stream."""
        in_x, in_y, in_d = self.layouts
        with self._lock:
            if self._biased:
                self._set("BIAS_POINTER", bias)
            # The algorithm is the first member of its structure.
            cublasLt.matmul(
                *(_lt_handle(), self.descriptor, alpha.ctypes.data, x, in_x, y, in_y),
                *(beta.ctypes.data, d, in_d, d, in_d),
                *(self.algorithm.ptr, _workspace(stream.ptr).data.ptr, _WORKSPACE_BYTES, stream.ptr),
            )
            self.ran = True


@functools.lru_cache(maxsize=1024)
def _call(
    extents: tuple[int, int, int],
    ops: tuple[str, str],
    kinds: tuple[str, str, str],
    compute: int,
    lds: tuple[int, int, int],
    aligned: tuple[int, int, int],
    epilog: str,
) -> _LtProduct | None:
    """Return a product with its algorithm; None if cuBLASLt has none."""
    product = _LtProduct(extents, ops, kinds, compute, lds, epilog)
    return product if product.find(aligned) else None
