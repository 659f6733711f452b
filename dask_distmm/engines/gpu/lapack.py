"""The kernels of factorizations on GPUs: cuBLAS and cuSOLVER, in place on parts of matrices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from cupyx import errstate
from cupyx.cusolver import check_availability
from numpy.typing import NDArray
from nvmath.bindings import cublas, cusolverDn

from dask_distmm.engines.gpu.gemm import DATA_TYPES, OPS, GemmTypes, compute_number
from dask_distmm.engines.gpu.operands import FIRST, record
from dask_distmm.engines.gpu.tridiagonal import DeviceMerging
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.blas import HALVED, assign, solve_by_halves
from dask_distmm.programs.steps import Lane

_WORKSPACE_BYTES = 2**25
# Triangles of a larger order are solved with by halves, where there are this many unknowns that the calls do not count
# (1 H200, float64, order 512, 32768 columns: 1.0 ms, cuBLAS 1.5; from the right cuBLAS is as fast).
_SOLVED, _MANY = 128, 4096
# Orders of which singular values come from the polar decomposition, which takes more memory.
_POLAR = 128, 8192
_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
# cublasFillMode_t, cublasSideMode_t, cublasDiagType_t, cublasDirectMode_t, cublasStorevMode_t
_LOWER, _UPPER, _LEFT, _RIGHT, _NON_UNIT, _UNIT, _FORWARD, _COLUMNWISE = 0, 1, 0, 1, 0, 1, 0, 0
# cublasPointerMode_t
_ON_HOST, _ON_DEVICE = 0, 1


# Elements are counted as in the transposes of column-major matrices.
_copy_triangle = cp.ElementwiseKernel(
    "T a, int64 rows, bool lower, bool unit",
    "T out",
    """
    const long long row = i % rows, col = i / rows;
    out = unit && row == col ? T(1) : (lower ? row >= col : row <= col) ? a : T(0);
    """,
    "distmm_copy_triangle",
)
_distances = cp.ElementwiseKernel(
    "T real, T imag, int64 rows",
    "T out",
    """
    const long long row = i % rows, col = i / rows;
    const T from = row == col ? real - T(1) : real;
    // Each element below the diagonal stands for two.
    out = row < col ? T(0) : T(row == col ? 1 : 2) * (from * from + imag * imag);
    """,
    "distmm_distances",
)

# A number as two of float16: what is left of it by the first one, with as many bits again. Numbers are multiplied by a
# power of two, so that neither part is too large or has lost bits: the largest one is known, or below 1024. Then it is
# from 2 to this exponent on.
_EXPONENT = 6
_halve = cp.ElementwiseKernel(
    "float32 a, float32 largest, bool right",
    "float16 first, float16 second, float16 third",
    f"""
    const float x = ldexpf(a, {_EXPONENT} - (largest > 0.0f ? ilogbf(largest) : 0));
    const float16 high(x), low(x - float(high));
    first = right ? high : low;
    second = right ? low : high;
    third = high;
    """,
    "distmm_halve",
)
_unscaled = cp.ElementwiseKernel(
    "float32 a, float32 b, float32 alpha",
    "float32 factor",
    f"factor = ldexpf(alpha, (a > 0.0f ? ilogbf(a) : 0) + (b > 0.0f ? ilogbf(b) : 0) - {2 * _EXPONENT})",
    "distmm_unscaled",
)
_largest = cp.ReductionKernel(
    "float32 value", "float32 result", "fabsf(value)", "fmaxf(a, b)", "result = a", "0", "distmm_largest"
)


class Halves(NamedTuple):
    """A factor of products of float32 by three of float16 (Ootomo, Yokota 2022), three times as deep.

    A left one is low, high, high parts, a right one high, low, high parts; low times low is left out. Tensor cores cut
    off bits of sums: products of low parts come first, while sums are small.
    """

    array: Any
    # None where it is below 1024.
    largest: Any

    def __getitem__(self, key: Any) -> Halves:
        return Halves(self.array[key], self.largest)


class _Handles:
    """The libraries' handles for one stream.

    With one handle for two streams the libraries give wrong results: they share its workspace.
    """

    def __init__(self, stream: cp.cuda.Stream) -> None:
        self.stream, self.blas, self.solver = stream, cublas.create(), cusolverDn.create()
        cublas.set_stream(self.blas, stream.ptr)
        cusolverDn.set_stream(self.solver, stream.ptr)
        # Large products take it in place of the library's own.
        self.workspace = cp.empty(_WORKSPACE_BYTES, np.uint8)
        cublas.set_workspace(self.blas, self.workspace.data.ptr, self.workspace.nbytes)


def _in_order(x: Any) -> tuple[Any, bool, int]:
    """Return a matrix or a copy, whether its columns are contiguous, else its rows, and how far these are apart."""
    (rows, cols), (down, across), size = x.shape, x.strides, x.itemsize
    if rows == 1 or cols == 1:
        down, across = down if rows > 1 else size, across if cols > 1 else size
    if down == size and (cols == 1 or across >= rows * size):
        return x, True, rows if cols == 1 else across // size
    if across == size and (rows == 1 or down >= cols * size):
        return x, False, cols if rows == 1 else down // size
    return cp.ascontiguousarray(x), False, cols


class SolverKernels(DeviceMerging):
    """`dask_distmm.engines.programs.Kernels` for CuPy arrays, on two streams."""

    asynchronous, xp = True, cp

    def __init__(self, stream: cp.cuda.Stream) -> None:
        self._main, self._ahead = _Handles(stream), _Handles(cp.cuda.Stream(non_blocking=True, priority=FIRST))
        self._now = self._main
        self._parameters = cusolverDn.create_params()
        self._info = cp.zeros(1, np.int32)
        self.on_host = LapackKernels()

    @property
    def streams(self) -> tuple[cp.cuda.Stream, cp.cuda.Stream]:
        """The stream of the work, and that of the work ahead, which goes first."""
        return self._main.stream, self._ahead.stream

    def working(self, threads: int) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Queue the calls inside on a lane: the stream of the work, or that of the work ahead."""
        if lane == "ahead":
            self._ahead.stream.wait_event(record(self._main.stream))
        elif lane == "join":
            self._main.stream.wait_event(record(self._ahead.stream))
        handles = self._ahead if lane in ("ahead", "panel") else self._main
        self._now = handles
        try:
            with handles.stream:
                yield
        finally:
            self._now = self._main

    def empty(self, shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return a column-major matrix whose elements may be anything."""
        return cp.empty(shape, dtype, order="F")

    def gemm(
        self, a: Any, b: Any, c: Any, op_a: str = "N", op_b: str = "N", *, alpha: float, beta: float, compute: str = ""
    ) -> None:
        """Compute ``c = alpha op(a) op(b) + beta c``."""
        if compute == HALVED:
            self._by_halves(a, b, c, op_a, op_b, alpha, beta)
            return
        depth = a.shape[1 if op_a == "N" else 0]
        if c.size and (depth or not beta):
            scale, scale_c = _scalar(alpha, c.dtype), _scalar(beta, c.dtype)
            if compute:
                kind, sizes = DATA_TYPES[c.dtype.name], (OPS[op_a], OPS[op_b], *c.shape, depth)
                (at_a, ld_a), (at_b, ld_b), (at_c, ld_c) = _at(a), _at(b), _at(c)
                cublas.gemm_ex_64(
                    self._now.blas, *sizes, scale.ctypes.data, at_a, kind, ld_a, at_b, kind, ld_b, scale_c.ctypes.data,
                    at_c, kind, ld_c, compute_number(compute), -1,
                )  # fmt: skip
                return
            function = getattr(cublas, f"{_LETTERS[c.dtype.name]}gemm")
            arguments = OPS[op_a], OPS[op_b], *c.shape, depth, scale.ctypes.data, *_at(a), *_at(b), scale_c.ctypes.data
            function(self._now.blas, *arguments, *_at(c))

    def operand(
        self, a: Any, compute: str, *, right: bool, op: str = "N", changes: bool = False, ranged: bool = False
    ) -> Any:
        """Return what `gemm` is to read in place of a factor: its halves, or a copy if it `changes`, or itself."""
        if compute != HALVED:
            if not changes:
                return a
            copy = self.empty(a.shape, a.dtype)
            assign(copy, a)
            return copy
        axis = int(right == (op != "N"))
        largest = _largest(_largest(a, axis=0)) if ranged else None
        array = cp.empty([size * (1 + 2 * (at == axis)) for at, size in enumerate(a.shape)], np.float16, order="F")
        if a.size:
            # As rows, in which CuPy's kernels are fastest.
            parts = cp.split(array.T, 3, axis=1 - axis)
            _halve(a.T, np.float32(0) if largest is None else largest, right, *parts)
        return Halves(array, largest)

    def _by_halves(self, a: Any, b: Any, c: Any, op_a: str, op_b: str, alpha: float, beta: float) -> None:
        """Compute ``c = alpha op(a) op(b) + beta c`` of float32 by products of float16."""
        a = a if isinstance(a, Halves) else self.operand(a, HALVED, right=False, op=op_a)
        b = b if isinstance(b, Halves) else self.operand(b, HALVED, right=True, op=op_b)
        depth = a.array.shape[op_a == "N"]
        if not c.size or not (depth or not beta):
            return
        half, single, blas = DATA_TYPES["float16"], DATA_TYPES["float32"], self._now.blas
        factors: Any = _scalar(alpha / 4**_EXPONENT, c.dtype), _scalar(beta, c.dtype)
        at = [x.ctypes.data for x in factors]
        ranged = a.largest is not None or b.largest is not None
        if ranged:
            # How large numbers are is known on the device only.
            sizes = (np.float32(0) if x.largest is None else x.largest for x in (a, b))
            factors = _unscaled(*sizes, np.float32(alpha), cp.empty((), np.float32)), cp.full((), beta, np.float32)
            at = [x.data.ptr for x in factors]
            cublas.set_pointer_mode(blas, _ON_DEVICE)
        (at_a, ld_a), (at_b, ld_b), (at_c, ld_c) = _at(a.array), _at(b.array), _at(c)
        cublas.gemm_ex_64(
            blas, OPS[op_a], OPS[op_b], *c.shape, depth, at[0], at_a, half, ld_a, at_b, half, ld_b, at[1], at_c, single,
            ld_c, GemmTypes("float16", "float16", "float32").compute_type, -1,
        )  # fmt: skip
        if ranged:
            cublas.set_pointer_mode(blas, _ON_HOST)

    def product(self, a: Any, b: Any, out: Any = None, *, beta: float = 0) -> Any:
        """Return ``a b``, of matrices and vectors of one type in any order; with `out` ``out = a b + beta out``."""
        shape = (*a.shape[:-1], *b.shape[1:])
        if not (a.size and b.size and shape):
            total = cp.sum(a * b) if not shape else cp.zeros(shape, a.dtype)
            if out is None:
                return total
            out[...] = total if beta == 0 else out + total
            return out
        out = cp.empty(shape, a.dtype) if out is None else out
        letter, unit, scale_c = _LETTERS[a.dtype.name], _scalar(1, a.dtype), _scalar(beta, a.dtype)
        if len(shape) == 1:
            matrix, vector = (a, b) if b.ndim == 1 else (b.T, a)
            matrix, by_columns, distance = _in_order(matrix)
            sizes = matrix.shape if by_columns else matrix.shape[::-1]
            getattr(cublas, f"{letter}gemv")(
                self._now.blas, OPS["N" if by_columns else "T"], *sizes, unit.ctypes.data, matrix.data.ptr, distance,
                vector.data.ptr, vector.strides[0] // vector.itemsize, scale_c.ctypes.data, out.data.ptr,
                out.strides[0] // out.itemsize,
            )  # fmt: skip
            return out
        out, columns, width = _in_order(out)
        # A row-major result is the transpose of a column-major one.
        first, second, target = (a, b, out) if columns else (b.T, a.T, out.T)
        (first, n1, d1), (second, n2, d2) = _in_order(first), _in_order(second)
        getattr(cublas, f"{letter}gemm")(
            self._now.blas, OPS["N" if n1 else "T"], OPS["N" if n2 else "T"], *target.shape, first.shape[1],
            unit.ctypes.data, first.data.ptr, d1, second.data.ptr, d2, scale_c.ctypes.data, target.data.ptr, width,
        )  # fmt: skip
        return out

    def adjoint(self, a: Any, out: Any) -> None:
        """Write ``a^H``."""
        if out.size:
            unit, none = _scalar(1, out.dtype), _scalar(0, out.dtype)
            function = getattr(cublas, f"{_LETTERS[out.dtype.name]}geam")
            arguments = OPS["C"], OPS["N"], *out.shape, unit.ctypes.data, *_at(a), none.ctypes.data
            function(self._now.blas, *arguments, *_at(out), *_at(out))

    def herk(self, a: Any, c: Any, *, alpha: float = -1) -> None:
        """Add ``alpha a a^H`` to `c`, only in the lower triangle."""
        if c.size and a.shape[1]:
            letter = _LETTERS[c.dtype.name]
            real = c.real.dtype
            function = getattr(cublas, f"{letter}{'herk' if c.dtype.kind == 'c' else 'syrk'}")
            scale, unit = _scalar(alpha, real), _scalar(1, real)
            shape = len(a), a.shape[1]
            function(self._now.blas, _LOWER, OPS["N"], *shape, scale.ctypes.data, *_at(a), unit.ctypes.data, *_at(c))

    def trsm(self, a: Any, b: Any, *, right: bool, lower: bool, op: str, unit: bool, compute: str = "") -> None:
        """Overwrite `b` with the solution of ``op(a) x = b``, or of ``x op(a) = b``."""
        if not right and len(a) > _SOLVED and b.shape[1] >= _MANY:
            solve_by_halves(self, a, b, right=right, lower=lower, op=op, unit=unit, compute=compute)
        elif b.size:
            modes = _RIGHT if right else _LEFT, _LOWER if lower else _UPPER, OPS[op], _UNIT if unit else _NON_UNIT
            scale = _scalar(1, b.dtype)
            function = getattr(cublas, f"{_LETTERS[b.dtype.name]}trsm")
            function(self._now.blas, *modes, *b.shape, scale.ctypes.data, *_at(a), *_at(b))

    def potrf(self, a: Any) -> Any:
        """Overwrite the lower triangle of `a` with its Cholesky factor; return cuSOLVER's info."""
        info = cp.zeros(1, np.int32)
        if not a.size:
            return info
        kind = DATA_TYPES[a.dtype.name]
        sizes = cusolverDn.xpotrf_buffer_size(self._now.solver, self._parameters, _LOWER, len(a), kind, *_at(a), kind)
        device, host = self._buffers(sizes)
        cusolverDn.xpotrf(
            self._now.solver, self._parameters, _LOWER, len(a), kind, *_at(a), kind, *_memory(device), *_memory(host),
            info.data.ptr,
        )  # fmt: skip
        return info

    def getrf(self, a: Any, *, pivoting: bool = True) -> Any:
        """Overwrite `a` with L and U; return the pivots, from 0, on the device."""
        pivots = cp.zeros(min(a.shape), np.int32) if pivoting else None
        if a.size:
            letter = _LETTERS[a.dtype.name]
            size = getattr(cusolverDn, f"{letter}getrf_buffer_size")(self._now.solver, *a.shape, *_at(a))
            workspace = cp.empty(max(1, size), a.dtype)
            # Without an address for pivots cuSOLVER looks for none.
            address = 0 if pivots is None else pivots.data.ptr
            getattr(cusolverDn, f"{letter}getrf")(
                self._now.solver, *a.shape, *_at(a), workspace.data.ptr, address, self._info.data.ptr
            )
        return None if pivots is None else pivots - np.int32(1)

    def solve(self, a: Any, b: Any = None) -> Any:
        """Return the solution of ``a x = b``, or the inverse of `a`, without a look at the device; of any order."""
        factors, order, letter = self.empty(a.shape, a.dtype), len(a), _LETTERS[a.dtype.name]
        b = cp.eye(order, dtype=a.dtype) if b is None else b
        x = self.empty((order, b.size // max(1, order)), a.dtype)
        factors[...], x[...] = a, b.reshape(x.shape)
        if x.size:
            pivots = self.getrf(factors) + np.int32(1)
            getattr(cusolverDn, f"{letter}getrs")(
                self._now.solver, OPS["N"], order, x.shape[1], *_at(factors), pivots.data.ptr, *_at(x),
                self._info.data.ptr,
            )  # fmt: skip
        return x.reshape(b.shape)

    def geqrt(self, a: Any) -> Any:
        """Overwrite `a` with R and reflectors; return T."""
        rows, size = a.shape
        t = cp.zeros((size, size), a.dtype, order="F")
        if not size:
            return t
        kind, tau = DATA_TYPES[a.dtype.name], cp.empty(size, a.dtype)
        solver, parameters = self._now.solver, self._parameters
        sizes = cusolverDn.xgeqrf_buffer_size(solver, parameters, rows, size, kind, *_at(a), kind, tau.data.ptr, kind)
        device, host = self._buffers(sizes)
        cusolverDn.xgeqrf(
            solver, parameters, rows, size, kind, *_at(a), kind, tau.data.ptr, kind, *_memory(device), *_memory(host),
            self._info.data.ptr,
        )  # fmt: skip
        args = _FORWARD, _COLUMNWISE, rows, size, kind, *_at(a), kind, tau.data.ptr, kind, *_at(t), kind
        # It leaves the bytes of a workspace on the host as they were: it needs none.
        device_bytes, _ = cusolverDn.xlarft_buffer_size(solver, parameters, *args)
        device, host = self._buffers((device_bytes, 0))
        cusolverDn.xlarft(solver, parameters, *args, *_memory(device), *_memory(host))
        return t

    def eigh(self, a: Any, subset: tuple[int, int] | None, *, vectors: bool) -> tuple[Any, Any]:
        """Return eigenvalues and eigenvectors of a Hermitian matrix; cuSOLVER computes all of them."""
        first, last = subset or (0, len(a) - 1)
        if not vectors:
            return cp.linalg.eigvalsh(a)[first : last + 1], None
        w, v = cp.linalg.eigh(a)
        return w[first : last + 1], v[:, first : last + 1]

    def svd(self, a: Any, *, vectors: bool, full: bool = False) -> tuple[Any, Any, Any]:
        """Return the singular value decomposition, of larger square matrices of float64 by way of the polar one.

        cuSOLVER, H200, ms: order 256 5 (gesvd 27), 512 12 (66), 1024 29 (166), with backward errors of 5e-15.
        """
        order = len(a)
        if a.shape[1] == order and _POLAR[0] <= order <= _POLAR[1] and a.dtype == np.float64:
            kind = DATA_TYPES[a.dtype.name]
            matrix, u, v = (self.empty(a.shape, a.dtype) for _ in range(3))
            matrix[...] = a
            s, info = cp.empty(order, a.dtype), cp.zeros(1, np.int32)
            places = kind, *_at(matrix), kind, s.data.ptr, kind, *_at(u), kind, *_at(v), kind
            args = self._now.solver, self._parameters, int(vectors), 1, order, order, *places
            device, host = self._buffers(cusolverDn.xgesvdp_buffer_size(*args))
            # It has perturbed the matrix by more than rounding unless it says that it has by nothing.
            if cusolverDn.xgesvdp(*args, *_memory(device), *_memory(host), info.data.ptr) == 0 == self.host(info)[0]:
                return (u, s, v.T) if vectors else (None, s, None)
        factors = cp.linalg.svd(a, full_matrices=full, compute_uv=vectors)
        return factors if vectors else (None, factors, None)

    def eig(self, a: Any, *, left: bool, right: bool) -> tuple[Any, Any, Any]:
        """Return eigenvalues, and left and right eigenvectors, or None: by cuSOLVER where it has that, or the host."""
        if left or not check_availability("geev"):
            pairs = self.on_host.eig(np.asfortranarray(self.host(a)), left=left, right=right)
            w, vl, v = (None if x is None else cp.asarray(x) for x in pairs)
            return w, vl, v
        with errstate(linalg="raise"):
            w, v = cp.linalg.eig(a) if right else (cp.linalg.eigvals(a), None)
        return w, None, v

    def laswp(self, a: Any, pivots: Any) -> None:
        """Swap rows of `a` as `getrf` has done."""
        if a.size and len(pivots):
            order = cp.asarray(pivots, np.int32) + np.int32(1)
            function = getattr(cusolverDn, f"{_LETTERS[a.dtype.name]}laswp")
            function(self._now.solver, a.shape[1], *_at(a), 1, len(order), order.data.ptr, 1)

    def triangle(self, a: Any, *, lower: bool, unit: bool) -> Any:
        """Return a copy of a triangle of `a` with zeros in place of the rest; and ones on its diagonal."""
        t = self.empty(a.shape, a.dtype)
        # The transpose is in C order, in which CuPy's kernels are fastest.
        _copy_triangle(a.T, len(a), lower, unit, t.T)
        return t

    def diagonal(self, a: Any) -> Any:
        """Return a copy of the diagonal of `a`."""
        return cp.diagonal(a).copy()

    def distance(self, a: Any) -> Any:
        """Return the square of the distance of a Hermitian matrix, its lower triangle, to the identity."""
        imaginary = a.imag.T if a.dtype.kind == "c" else a.dtype.type(0)
        return _distances(a.real.T, imaginary, len(a)).sum()

    def host(self, a: Any) -> NDArray[Any]:
        """Return an array of any shape on the host."""
        return a if isinstance(a, np.ndarray) else a.get(stream=self._now.stream)

    def hosts(self, arrays: Sequence[Any]) -> Sequence[NDArray[Any]]:
        """Return arrays of any shapes on the host, by one copy."""
        flat = [x.ravel().view(np.uint8) for x in arrays if not isinstance(x, np.ndarray)]
        ends = np.cumsum([0, *map(len, flat)])
        parts = iter(np.split(self.host(cp.concatenate(flat)), ends[1:-1]) if flat else ())
        return [x if isinstance(x, np.ndarray) else next(parts).view(x.dtype).reshape(x.shape) for x in arrays]

    def _buffers(self, sizes: tuple[int, int]) -> tuple[Any, NDArray[np.uint8]]:
        """Return the workspaces that a routine asks for, on the device and on the host."""
        return cp.empty(max(1, sizes[0]), np.uint8), _host_buffer(max(1, sizes[1]))


@functools.lru_cache(maxsize=64)
def _scalar(value: float, dtype: np.dtype) -> NDArray[Any]:
    return np.array([value], dtype)


@functools.lru_cache(maxsize=8)
def _host_buffer(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def _memory(buffer: Any) -> tuple[int, int]:
    """Return address and bytes of a buffer."""
    return int(buffer.data.ptr if isinstance(buffer, cp.ndarray) else buffer.ctypes.data), int(buffer.nbytes)


def _at(a: Any) -> tuple[int, int]:
    """Return the address of a column-major matrix, and the distance of its columns in elements."""
    rows, cols = a.shape
    if a.size and a.strides[0] != a.itemsize and rows > 1:
        raise ValueError(f"a matrix of shape {a.shape} has strides {a.strides}: its columns are not contiguous")
    return int(a.data.ptr), max(1, rows, a.strides[1] // a.itemsize if cols > 1 and a.size else 1)
