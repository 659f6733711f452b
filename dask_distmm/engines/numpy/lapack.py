"""The kernels of factorizations and programs on CPUs: SciPy's BLAS and LAPACK, in place on parts of matrices."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.numpy.blas import blas_threads, column_major, ld_of, routine
from dask_distmm.engines.programs.blas import assign, solve_by_halves
from dask_distmm.errors import EngineError
from dask_distmm.programs.steps import Lane

_ref = ctypes.byref
# Columns that start at the same place of a page compete for the same lines of a cache: their distance is kept from
# being a multiple of this many bytes.
_PAGE, _LINE = 1024, 64
# Columns that are eliminated one by one before a product of matrices.
_ELIMINATED = 32
# Triangles of a larger order are solved with by halves.
_SOLVED = 64


# Elements of a matrix of all differences that are worked on at once.
_ELEMENTS = 2**21


class Secular:
    """Eigenvalues and eigenvectors of ``diag(poles) + rho weights weights^T``; see `engines.tridiagonal`."""

    def __init__(self, poles: NDArray[np.float64], weights: NDArray[np.float64], rho: float) -> None:
        self._poles = poles
        self._origins, self._shifts = _secular_roots(poles, weights, rho)
        self.values = poles[self._origins] + self._shifts
        self._fitted = np.copysign(np.sqrt(self._squares()), weights)

    def _squares(self) -> NDArray[np.float64]:
        """Return the squares of the weights for which the roots are exact."""
        poles, count = self._poles, len(self._poles)
        squares, step = np.empty(count), max(1, _ELEMENTS // count)
        for first in range(0, count, step):
            rows = np.arange(count)[first : first + step]
            # Of each row i the distances of all roots j, and of all poles j, from pole i.
            far = (poles[self._origins] - poles[rows, None]) + self._shifts
            near = poles - poles[rows, None]
            near[np.arange(len(rows)), rows] = 1.0
            squares[rows] = np.abs(np.prod(far / near, axis=1))
        return squares

    def vectors(self, rows: NDArray[np.int64], which: NDArray[np.int64], out: NDArray[np.float64]) -> None:
        """Write some eigenvectors, of length 1, to the columns of `out`."""
        difference = (self._poles[rows, None] - self._poles[self._origins[which]]) - self._shifts[which]
        np.divide(self._fitted[rows, None], difference, out=out)
        out /= np.sqrt((out * out).sum(axis=0))


# Rows and columns of a part of a matrix that is in a cache.
_CACHED = 256


class LapackKernels:
    """`dask_distmm.engines.programs.Kernels` for NumPy arrays."""

    asynchronous, xp = False, np

    @property
    def on_host(self) -> LapackKernels:
        """Return these kernels."""
        return self

    def working(self, threads: int) -> contextlib.AbstractContextManager[None]:
        """Compute with this many threads."""
        return blas_threads(threads)

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        """Do nothing: a call is done when it returns."""
        return contextlib.nullcontext()

    def empty(self, shape: tuple[int, int], dtype: np.dtype) -> NDArray[Any]:
        """Return a column-major matrix whose elements may be anything."""
        rows, cols = shape
        line = max(1, _LINE // dtype.itemsize)
        distance = -(-rows // line) * line
        if cols > 1 and rows * dtype.itemsize >= _PAGE and distance * dtype.itemsize % _PAGE == 0:
            distance += line
        return np.empty((distance, cols), dtype, order="F")[:rows]

    def gemm(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        c: NDArray[Any],
        op_a: str = "N",
        op_b: str = "N",
        *,
        alpha: float,
        beta: float,
        compute: str = "",
    ) -> None:
        """Compute ``c = alpha op(a) op(b) + beta c``, in no other way than in the type of `c`."""
        depth = a.shape[1 if op_a == "N" else 0]
        if c.size and (depth or not beta):
            a, b = _as_column_major(a), _as_column_major(b)
            alphas, betas = np.full(1, alpha, c.dtype), np.full(1, beta, c.dtype)
            _call_routine(
                c, "gemm", op_a.encode(), op_b.encode(), *c.shape, depth, alphas, a, ld_of(a), b, ld_of(b), betas,
                c, ld_of(c),
            )  # fmt: skip

    def operand(
        self,
        a: NDArray[Any],
        compute: str,
        *,
        right: bool,
        op: str = "N",
        changes: bool = False,
        ranged: bool = False,
    ) -> NDArray[Any]:
        """Return a factor, or a copy if it `changes`."""
        return a.copy(order="F") if changes else a

    def adjoint(self, a: NDArray[Any], out: NDArray[Any]) -> None:
        """Write ``a^H``."""
        assign(out, a.conj().T)

    def herk(self, a: NDArray[Any], c: NDArray[Any], *, alpha: float = -1) -> None:
        """Add ``alpha a a^H`` to `c`, only in the lower triangle."""
        if c.size and a.shape[1]:
            a = _as_column_major(a)
            factors = np.array([alpha, 1], c.real.dtype)
            name = "herk" if c.dtype.kind == "c" else "syrk"
            _call_routine(c, name, b"L", b"N", *a.shape, factors, a, ld_of(a), factors[1:], c, ld_of(c))

    def trsm(
        self, a: NDArray[Any], b: NDArray[Any], *, right: bool, lower: bool, op: str, unit: bool, compute: str = ""
    ) -> None:
        """Overwrite `b` with the solution of ``op(a) x = b``, or of ``x op(a) = b``.

        By halves: OpenBLAS multiplies faster than it solves.
        """
        if len(a) > _SOLVED:
            solve_by_halves(self, a, b, right=right, lower=lower, op=op, unit=unit, compute=compute)
        elif b.size:
            a = _as_column_major(a)
            letters = b"R" if right else b"L", b"L" if lower else b"U", op.encode(), b"U" if unit else b"N"
            _call_routine(b, "trsm", *letters, *b.shape, np.ones(1, b.dtype), a, ld_of(a), b, ld_of(b))

    def potrf(self, a: NDArray[Any]) -> NDArray[np.int32]:
        """Overwrite the lower triangle of `a` with its Cholesky factor; return LAPACK's info."""
        info = ctypes.c_int(0)
        if a.size:
            _call_routine(a, "potrf", b"L", len(a), a, ld_of(a), info)
        return np.array([info.value], np.int32)

    def getrf(self, a: NDArray[Any], *, pivoting: bool = True) -> NDArray[Any] | None:
        """Overwrite `a` with L and U; return the pivots, from 0."""
        if not pivoting:
            self._eliminate(a)
            return None
        info, pivots = ctypes.c_int(0), np.zeros(min(a.shape), np.int32)
        if a.size:
            _call_routine(a, "getrf", *a.shape, a, ld_of(a), pivots, info)
        pivots -= np.int32(1)
        return pivots

    def _eliminate(self, a: NDArray[Any]) -> None:
        """Overwrite `a` with L and U without pivots, for which LAPACK has no routine."""
        for start in range(0, min(a.shape), _ELIMINATED):
            stop = min(*a.shape, start + _ELIMINATED)
            for at in range(start, stop):
                a[at + 1 :, at] /= a[at, at]
                a[at + 1 :, at + 1 : stop] -= np.multiply.outer(a[at + 1 :, at], a[at, at + 1 : stop])
            block, beside = a[start:stop, start:stop], a[start:stop, stop:]
            self.trsm(block, beside, right=False, lower=True, op="N", unit=True)
            self.gemm(a[stop:, start:stop], beside, a[stop:, stop:], alpha=-1, beta=1)

    def geqrt(self, a: NDArray[Any]) -> NDArray[Any]:
        """Overwrite `a` with R and reflectors; return T. Recursive: most of it is products of matrices."""
        # CholeskyQR2 and the reconstruction of the reflectors (Ballard et al. 2014) take 5 m n^2 operations in place of
        # 3 m n^2: 62 ms in place of 34 for 4096 x 256 in float64, 16 in place of 12 for 128 columns (one thread).
        size = a.shape[1]
        t = np.zeros((size, size), a.dtype, order="F")
        if size:
            info = ctypes.c_int(0)
            _call_routine(a, "geqrt3", len(a), size, a, ld_of(a), t, ld_of(t), info)
            # LAPACK leaves other numbers below the diagonal.
            t = np.asfortranarray(np.triu(t))
        return t

    def eigh(
        self, a: NDArray[Any], subset: tuple[int, int] | None, *, vectors: bool
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return eigenvalues and eigenvectors of a Hermitian matrix.

        By NumPy, which calls syevd or heevd without the GIL; SciPy's calls hold it, and a worker that is silent for so
        long is taken for lost.
        """
        first, last = subset or (0, len(a) - 1)
        if not vectors:
            return np.linalg.eigvalsh(a)[first : last + 1], None
        if last - first + 1 == len(a):
            w, v = np.linalg.eigh(a)
            return w, v
        return _some_eigenpairs(a, first, last)

    def svd(self, a: NDArray[Any], *, vectors: bool, full: bool = False) -> tuple[Any, Any, Any]:
        """Return U, values and V^H, thin or full; only values without `vectors`."""
        return np.linalg.svd(a, full) if vectors else (None, np.linalg.svd(a, compute_uv=False), None)

    def eig(self, a: NDArray[Any], *, left: bool, right: bool) -> tuple[Any, Any, Any]:
        """Return eigenvalues, and left and right eigenvectors, or None; `a` is overwritten."""
        n, values = len(a), _values_of(a)
        vl, vr = (np.empty((n, n) if yes else (1, 1), a.dtype, order="F") for yes in (left, right))
        letters, spaces = [b"V" if yes else b"N" for yes in (left, right)], _spaces(a, 2 * n)

        def call(work: NDArray[Any], size: int, info: ctypes.c_int) -> None:
            args = a, ld_of(a), *values, vl, ld_of(vl), vr, ld_of(vr)
            _call_routine(a, "geev", *letters, n, *args, work, size, *spaces, info)

        if n:
            _with_workspace(a, call)
        w = values[0] if len(values) == 1 else values[0] + 1j * values[1]
        return w, _vectors(w, vl) if left else None, _vectors(w, vr) if right else None

    def gees(self, a: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return T and Z of the Schur decomposition ``a = Z T Z^H``; `a` is overwritten, by T."""
        n, values, unused = len(a), _values_of(a), np.zeros(1, np.int32)
        z, spaces = np.empty((n, n), a.dtype, order="F"), _spaces(a, n)

        def call(work: NDArray[Any], size: int, info: ctypes.c_int) -> None:
            args = n, a, ld_of(a), 0, *values, z, ld_of(z)
            _call_routine(a, "gees", b"V", b"N", unused, *args, work, size, *spaces, unused, info)

        if n:
            _with_workspace(a, call)
        return a, z

    def trsyl(self, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> None:
        """Overwrite `c` with the solution of ``a x + x b = c``, of triangular complex matrices."""
        info, scale = ctypes.c_int(0), np.ones(1, c.real.dtype)
        if c.size:
            args = (x for matrix in (a, b, c) for x in (matrix, ld_of(matrix)))
            _call_routine(c, "trsyl", b"N", b"N", 1, *c.shape, *args, scale, info)
        if scale[0] != 1:
            c /= scale[0]

    def laswp(self, a: NDArray[Any], pivots: NDArray[np.int32]) -> None:
        """Swap rows of `a` as `getrf` has done."""
        if a.size and len(pivots):
            _call_routine(a, "laswp", a.shape[1], a, ld_of(a), 1, len(pivots), np.asarray(pivots + 1, np.int32), 1)

    def triangle(self, a: NDArray[Any], *, lower: bool, unit: bool) -> NDArray[Any]:
        """Return a copy of a triangle of `a` with zeros in place of the rest; and ones on its diagonal."""
        t = np.asfortranarray(np.tril(a) if lower else np.triu(a))
        if unit:
            np.fill_diagonal(t, 1)
        return t

    def diagonal(self, a: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of the diagonal of `a`."""
        return np.diagonal(a).copy()

    def distance(self, a: NDArray[Any]) -> Any:
        """Return the square of the distance of a Hermitian matrix, its lower triangle, to the identity."""
        # Each element below the diagonal stands for two.
        return 2 * (abs(np.tril(a, -1)) ** 2).sum() + (abs(np.diagonal(a) - 1) ** 2).sum()

    def host(self, a: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return a

    def hosts(self, arrays: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Return the arrays themselves."""
        return arrays

    def tridiagonal_values(
        self, d: NDArray[np.float64], e: NDArray[np.float64], first: int, last: int
    ) -> NDArray[np.float64]:
        """Return the eigenvalues `first` to `last` of a tridiagonal matrix, in ascending order."""
        values, beside, info = d.copy(), np.append(e, 0.0), ctypes.c_int(0)
        _call_routine(values[:, None], "sterf", len(d), values, beside, info)
        if info.value:
            raise np.linalg.LinAlgError("eigenvalues did not converge")
        return values[first : last + 1]

    def secular(self, poles: NDArray[np.float64], weights: NDArray[np.float64], rho: float) -> Secular:
        """Solve the secular equation of at least one pole."""
        return Secular(poles, weights, rho)

    def rotate(self, z: NDArray[np.float64], pairs: NDArray[np.int64], factors: NDArray[np.float64]) -> None:
        """Rotate pairs of columns in their order: column p becomes c p + s q, column q c q - s p."""
        for (p, q), (c, s) in zip(pairs.tolist(), factors.tolist(), strict=True):
            z[:, p], z[:, q] = c * z[:, p] + s * z[:, q], c * z[:, q] - s * z[:, p]

    def add_sizes(self, a: NDArray[Any], sums: NDArray[Any]) -> None:
        """Add to a vector the sums of rows: of moduli, or of those of both parts of complex numbers."""
        for row in range(0, a.shape[0], _CACHED):
            for col in range(0, a.shape[1], _CACHED):
                part = a[row : row + _CACHED, col : col + _CACHED]
                size = abs(part.real) + abs(part.imag) if part.dtype.kind == "c" else abs(part)
                # Products with ones are faster than sums.
                sums[row : row + _CACHED] += size @ np.ones(part.shape[1], sums.dtype)

    def take(self, source: NDArray[Any], columns: NDArray[np.int64], target: NDArray[Any]) -> None:
        """Copy some columns of `source` to `target`, which may be of another type."""
        target.T[...] = np.take(source.T, columns, axis=0)


def _secular_roots(
    poles: NDArray[np.float64], weights: NDArray[np.float64], rho: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the roots of a secular equation: for each the number of the nearest pole, and the distance from it."""
    count, factor, info = len(poles), np.array([rho]), ctypes.c_int(0)
    far, value = np.empty(count), np.empty(1)

    def solve(number: int, poles: NDArray[np.float64]) -> float:
        """Return a root; the distances of three poles or more from it are in `far`."""
        _call_routine(far[:, None], "laed4", count, number + 1, poles, weights, far, factor, value, info)
        if info.value:
            raise np.linalg.LinAlgError(f"root {number} of a secular equation of {count} poles did not converge")
        return float(value[0])

    origins, shifts = np.empty(count, np.int64), np.empty(count)
    for number in range(count):
        solve(number, poles)
        if count < 3:
            far[:] = [-solve(number, poles - pole) for pole in poles]
        origins[number] = nearest = np.abs(far).argmin()
        shifts[number] = -far[nearest]
    return origins, shifts


def _some_eigenpairs(a: NDArray[Any], first: int, last: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a range of the eigenvalues and the eigenvectors: by syevr or heevr, which spares the others' vectors."""
    n, count, real, is_complex = len(a), last - first + 1, a.real.dtype, a.dtype.kind == "c"
    values, vectors = np.empty(n, real), np.empty((n, count), a.dtype, order="F")
    info, m, zero = ctypes.c_int(0), ctypes.c_int(0), np.zeros(1, real)
    support = np.zeros(2 * count, np.int32)
    # The routine is asked for the sizes of its workspaces first, then called with them.
    sizes = {"work": -1, "rwork": -1, "iwork": -1}
    for _ in range(2):
        spaces = {
            "work": np.zeros(max(1, sizes["work"]), a.dtype),
            "rwork": np.zeros(max(1, sizes["rwork"]), real),
            "iwork": np.zeros(max(1, sizes["iwork"]), np.int32),
        }
        used = [name for name in spaces if name != "rwork" or is_complex]
        workspaces = (argument for name in used for argument in (spaces[name], sizes[name]))
        _call_routine(
            a, "heevr" if is_complex else "syevr", b"V", b"I", b"L", n, a, ld_of(a), zero, zero, first + 1, last + 1,
            zero, m, values, vectors, ld_of(vectors), support, *workspaces, info,
        )  # fmt: skip
        sizes = {name: int(space[0].real) for name, space in spaces.items()}
    if info.value or m.value != count:
        raise np.linalg.LinAlgError(f"eigenvalues {first} to {last} did not converge")
    return values[:count], vectors


def _values_of(a: NDArray[Any]) -> NDArray[Any]:
    """Return a row for eigenvalues; of a real matrix one for their real parts, and one for the others."""
    return np.empty((1 if a.dtype.kind == "c" else 2, len(a)), a.dtype)


def _spaces(a: NDArray[Any], size: int) -> list[NDArray[Any]]:
    """Return the real workspace that routines for complex matrices have beside the other one."""
    return [np.empty(max(1, size), a.real.dtype)] if a.dtype.kind == "c" else []


def _with_workspace(a: NDArray[Any], call: Callable[[NDArray[Any], int, ctypes.c_int], None]) -> None:
    """Call a routine, which is asked for the size of its workspace first."""
    size, info = -1, ctypes.c_int(0)
    for _ in range(2):
        work = np.empty(max(1, size), a.dtype)
        call(work, size, info)
        size = int(work[0].real)
    if info.value:
        raise np.linalg.LinAlgError("eigenvalues did not converge")


def _vectors(w: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """Return complex vectors; of a real matrix a pair of columns has the real and the imaginary part of two."""
    if v.dtype == w.dtype:
        return v
    vectors, first = v.astype(w.dtype), np.flatnonzero(w.imag > 0)
    vectors[:, first] += 1j * v[:, first + 1]
    vectors[:, first + 1] = vectors[:, first].conj()
    return vectors


def _as_column_major(a: NDArray[Any]) -> NDArray[Any]:
    """Return a matrix that is read, column-major."""
    return a if column_major(a) else np.asfortranarray(a)


def _call_routine(out: NDArray[Any], name: str, *arguments: Any) -> None:
    """Call a routine for the type of `out`, which it overwrites: arrays by address, integers by reference."""
    function = routine(out.dtype.char, name)
    if function is None:
        raise EngineError(
            f"SciPy has no {name!r} with 32-bit integers for {out.dtype}: install SciPy from PyPI or conda-forge"
        )
    if not column_major(out):
        raise ValueError(f"a matrix of shape {out.shape} has strides {out.strides}: its columns are not contiguous")
    # NumPy's arrays of no columns may have no address; no call gets here with one.
    function(*map(_argument, arguments))


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, bytes):
        return value
    return _ref(value if isinstance(value, ctypes.c_int) else ctypes.c_int(value))
