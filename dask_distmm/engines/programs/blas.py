"""The arithmetic of the steps, on one rank's part of a matrix: BLAS and LAPACK, in place. A protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.programs.steps import Lane

# How products of float32 are computed by three of float16.
HALVED = "fp16x3"


class Kernels(Protocol):
    """BLAS and LAPACK of one device, on column-major matrices of one type.

    All matrices are two-dimensional and may be parts of larger ones: their columns are contiguous, and one is any
    distance behind the other. ``op_a`` and the like are ``"N"``, ``"T"`` or ``"C"``: the matrix itself, its
    transpose, its conjugate transpose (the transpose of real ones).
    """

    @property
    def xp(self) -> Any:
        """The array module: numpy or cupy."""

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before their work is done. Then matrices are looked at when all is done."""

    @property
    def on_host(self) -> Any:
        """LAPACK on the host, for what no library of GPUs has: these kernels, with `gees` and `trsyl`."""

    def working(self, threads: int) -> contextlib.AbstractContextManager[None]:
        """Compute inside of a ``with`` block, with as many threads as a worker has."""

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        """Queue the calls inside of a ``with`` block on a lane."""

    def empty(self, shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return a column-major matrix whose elements may be anything."""

    def gemm(
        self, a: Any, b: Any, c: Any, op_a: str = "N", op_b: str = "N", *, alpha: float, beta: float, compute: str = ""
    ) -> None:
        """Compute ``c = alpha op(a) op(b) + beta c``. With `beta` 0 it does not matter what `c` holds.

        `compute`: factors of products may be rounded to ``"tf32"``, ``"float16"`` or ``"bfloat16"``, on GPUs, or are
        two numbers of float16 each (`HALVED`).
        """

    def operand(
        self, a: Any, compute: str, *, right: bool, op: str = "N", changes: bool = False, ranged: bool = False
    ) -> Any:
        """Return what `gemm` is to read in place of a factor that is in several products, or that it `changes`.

        `ranged`: it may have elements that are not below 1024.
        """

    def adjoint(self, a: Any, out: Any) -> None:
        """Write ``a^H``."""

    def herk(self, a: Any, c: Any, *, alpha: float = -1) -> None:
        """Add ``alpha a a^H`` to `c`, only in the lower triangle."""

    def trsm(self, a: Any, b: Any, *, right: bool, lower: bool, op: str, unit: bool, compute: str = "") -> None:
        """Overwrite `b` with the solution of ``op(a) x = b``, or of ``x op(a) = b`` (`right`).

        `a` is square. One triangle of it is read; its diagonal, too, unless it is taken for ones (`unit`). `compute` is
        that of products (`gemm`).
        """

    def potrf(self, a: Any) -> Any:
        """Overwrite the lower triangle of `a` with its Cholesky factor."""

    def getrf(self, a: Any, *, pivoting: bool = True) -> Any:
        """Overwrite `a`, of any shape, with L (ones on its diagonal are left out) and U."""

    def geqrt(self, a: Any) -> Any:
        """Overwrite `a` with R and below it the reflectors V (ones on its diagonal are left out).

        `a` has at least as many rows as columns.
        """

    def eigh(self, a: Any, subset: tuple[int, int] | None, *, vectors: bool) -> tuple[Any, Any]:
        """Return the eigenvalues of a Hermitian matrix in ascending order, and the eigenvectors as columns."""

    def svd(self, a: Any, *, vectors: bool, full: bool = False) -> tuple[Any, Any, Any]:
        """Return U, values and V^H (None without `vectors`), thin or `full`; LinAlgError if that does not converge."""

    def eig(self, a: Any, *, left: bool, right: bool) -> tuple[Any, Any, Any]:
        """Return complex eigenvalues of any matrix, and left and right eigenvectors, or None; `a` is overwritten."""

    def laswp(self, a: Any, pivots: Any) -> None:
        """Swap rows of `a` as `getrf` has done."""

    def triangle(self, a: Any, *, lower: bool, unit: bool) -> Any:
        """Return a copy of `a`, of any shape, with zeros outside of a triangle; `unit`: with ones on its diagonal."""

    def diagonal(self, a: Any) -> Any:
        """Return a copy of the diagonal of `a`."""

    def distance(self, a: Any) -> Any:
        """Return the square of the distance of a Hermitian matrix, its lower triangle, to the identity (Frobenius)."""

    def host(self, a: Any) -> NDArray[Any]:
        """Return an array of any shape on the host."""

    def hosts(self, arrays: Sequence[Any]) -> Sequence[NDArray[Any]]:
        """Return arrays of any shapes on the host, by one copy."""

    # Tridiagonal matrices, and what divide and conquer takes beside products; matrices are in float64 (`take`: any)

    def tridiagonal_values(self, d: Any, e: Any, first: int, last: int) -> Any:
        """Return the eigenvalues `first` to `last` of a tridiagonal matrix, in ascending order, on the host."""

    def secular(self, poles: Any, weights: Any, rho: float) -> Any:
        """Solve the secular equation of at least one pole; see `dask_distmm.engines.tridiagonal`."""

    def rotate(self, z: Any, pairs: Any, factors: Any) -> None:
        """Rotate pairs of columns in their order: column p becomes c p + s q, column q c q - s p."""

    def add_sizes(self, a: Any, sums: Any) -> None:
        """Add to a vector the sums of rows of any matrix: of moduli, or of those of both parts of complex numbers."""

    def take(self, source: Any, columns: Any, target: Any) -> None:
        """Copy some columns of `source` to `target`, which may be of another type."""


def solve_by_halves(
    kernels: Kernels, a: Any, b: Any, *, right: bool, lower: bool, op: str, unit: bool, **compute: str
) -> None:
    """Do what `Kernels.trsm` does by two triangles of half the order, and a product, which is faster."""
    half = len(a) // 2
    low, high = slice(0, half), slice(half, len(a))
    # With which half of the unknowns the solution begins.
    i, j = (high, low) if right == (lower == (op == "N")) else (low, high)
    beside = a[high, low] if lower else a[low, high]
    solved, left = (b[:, i], b[:, j]) if right else (b[i], b[j])
    kernels.trsm(a[i, i], solved, right=right, lower=lower, op=op, unit=unit, **compute)
    if right:
        kernels.gemm(solved, beside, left, "N", op, alpha=-1, beta=1, **compute)
    else:
        kernels.gemm(beside, solved, left, op, alpha=-1, beta=1, **compute)
    kernels.trsm(a[j, j], left, right=right, lower=lower, op=op, unit=unit, **compute)


def diagonal_view(xp: Any, a: Any) -> Any:
    """Return the diagonal of a matrix in its memory, which may be written to."""
    return xp.lib.stride_tricks.as_strided(a, (min(a.shape),), (sum(a.strides),))


def assign(target: Any, source: Any) -> None:
    """Write a matrix, or one number, to all of a matrix.

    CuPy goes through rows, whatever the order of the memory. So column-major matrices are written as their transposes
    (1 H200, 32768 x 512 of float64: 0.06 ms, and 0.44 ms otherwise).
    """
    if target.strides[0] < target.strides[-1]:
        target, source = target.T, source.T if np.ndim(source) == 2 else source
    target[...] = source
