"""The kernels of factorizations, as `programs.steps` names them, in terms of `Kernels`: the same on all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.engines.factor.gram import gram_reflectors
from dask_distmm.engines.factor.kernels import Kernels, assign
from dask_distmm.engines.factor.spectral import decompose
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor.problem import Factorization

# One GEMM of several block columns has a higher rate than one of each (1 H200, float64, 16384 rows, a panel of 512
# columns: of 512, 1024 and 4096 columns 37, 41 and 46 TFLOP/s). It computes elements above the diagonal, too: at most
# this share of the others.
_BESIDE = 1 / 12
# Rows that one GEMM adds up at a time. One block of a GEMM that adds up 32768 rows takes 1 ms, and the small kernels of
# a panel wait for it one by one (1 H200, a QR panel of 32768 x 512: alone 7 ms, beside that 31, beside parts 19; the
# parts take 6 % more).
_DEPTH, _WIDE = 4096, 2048


class FactorKernels:
    """The kernels of one rank's run: those of `Kernels`, and those made of them."""

    def __init__(self, blas: Kernels, task: Factorization) -> None:
        self.blas, self.task = blas, task
        # Looks at what was computed: they wait for it, so that where calls are asynchronous they come last.
        self._looks: list[Callable[[], None]] = []
        # Seconds of the parts of what ranks share.
        self.timings: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blas, name)

    def complete(self) -> None:
        """Look at what was computed, when all is queued."""
        with self.blas.on("join"):
            for look in self._looks:
                look()

    def _look(self, look: Callable[[], None]) -> None:
        if self.blas.asynchronous:
            self._looks.append(look)
        else:
            look()

    def check_minor(self, info: Any, *, start: int, copied: bool = False) -> None:
        """Raise if the Cholesky factorization of a diagonal block, which begins at `start`, has found it indefinite."""
        info = self.blas.diagonal(info[:, None]) if copied and self.blas.asynchronous else info

        def look() -> None:
            if order := int(self.blas.host(info)[0]):
                raise MatrixError(indefinite(start + order))

        self._look(look)

    def check_diagonal(self, rows: Any, *, start: int, rank: bool) -> None:
        """Raise if the diagonal of a panel, all rows, says that the matrix is singular."""
        kernels, stop = self.blas, start + rows.shape[1]
        diagonal = kernels.diagonal(rows[start:])
        above = inside = None
        if rank:
            # The norm of R's column is that of A's: what is left of it is rounding if the columns before it span it.
            norm = kernels.xp.linalg.norm
            above = norm(rows[:start], axis=0)
            inside = norm(kernels.triangle(rows[start:stop], lower=False, unit=False), axis=0)

        def look() -> None:
            size = abs(kernels.host(diagonal))
            least = np.zeros(len(size), size.dtype)
            if rank:
                norms = np.hypot(kernels.host(above), kernels.host(inside))
                least = max(self.task.a_shape) * np.finfo(norms.dtype).eps * norms
            if (size <= least).any():
                raise MatrixError(singular(start + int(np.argmax(size <= least)), rank=rank))

        self._look(look)

    def copied(self, a: Any) -> Any:
        """Return a copy."""
        return a.copy()

    def clear(self, a: Any) -> None:
        """Set A to zero."""
        assign(a, 0)

    def identity(self, a: Any, *, start: int) -> None:
        """Set A to columns of an identity, from `start` on."""
        assign(a, 0)
        at = np.arange(a.shape[1])
        a[start + at, at] = 1

    def decompose(self, *matrices: Any) -> tuple[Any, ...]:
        """Return a spectral decomposition, or a function, of the whole matrix."""
        found = decompose(self.blas, self.task, *matrices)
        return tuple(found[one.name] for one in self.task.outputs)

    def geqrt(self, a: Any) -> Any:
        """Overwrite A with R and reflectors V; return T."""
        # cuSOLVER's geqrf of a panel takes longer than its update (1 H200, 32768 x 512: 12 and 10 ms). On CPUs LAPACK's
        # recursive geqrt3 is faster than the Gram matrix (4096 x 256, float64, one thread: 34 and 62 ms).
        t = gram_reflectors(self.blas, a) if self.blas.asynchronous else None
        return self.blas.geqrt(a) if t is None else t

    def larfb(self, panel: Any, t: Any, columns: Any, *, op: str) -> None:
        """Multiply columns by ``I - V T V^H`` (``op="N"``), or by its conjugate transpose (``"C"``)."""
        kernels, size, width = self.blas, t.shape[0], columns.shape[1]
        if not size or not width:
            return
        # V has ones on its diagonal and zeros above it; R is there in the panel.
        top, rest = kernels.triangle(panel[:size], lower=True, unit=True), panel[size:]
        first = kernels.empty((size, width), columns.dtype)
        kernels.gemm(top, columns[:size], first, "C", alpha=1, beta=0)
        below = columns[size:]
        depth = _DEPTH if kernels.asynchronous and width >= _WIDE else max(1, len(rest))
        for at in range(0, len(rest), depth):
            kernels.gemm(rest[at : at + depth], below[at : at + depth], first, "C", alpha=1, beta=1)
        second = kernels.empty((size, width), columns.dtype)
        kernels.gemm(t, first, second, op, alpha=1, beta=0)
        kernels.gemm(top, second, columns[:size], alpha=-1, beta=1)
        kernels.gemm(rest, second, below, alpha=-1, beta=1)

    def update_lower(self, rows: Any, columns: Any, *, blocks: Sequence[tuple[int, int]]) -> None:
        """Apply a panel of a Cholesky factorization to block columns of A, only in the lower triangle.

        Rows of both begin with the diagonal block of the first one.
        """
        kernels, at = self.blas, 0
        if kernels.asynchronous:
            # Calls cost time, too: one for several block columns, and some operations too many around the diagonal.
            beside = _rows_of(kernels, rows, blocks)
            for group in _grouped(blocks, len(rows)):
                first, width = group[0][0], sum(stop - start for start, stop in group)
                block, own = columns[first:, at : at + width], beside[at : at + width]
                kernels.gemm(rows[first:], own, block, "N", "C", alpha=-1, beta=1)
                at += width
            return
        for first, stop in blocks:
            block = columns[:, at : at + stop - first]
            at += stop - first
            kernels.herk(rows[first:stop], block[first:stop])
            kernels.gemm(rows[stop:], rows[first:stop], block[stop:], "N", "C", alpha=-1, beta=1)


def _grouped(blocks: Sequence[tuple[int, int]], end: int) -> list[list[tuple[int, int]]]:
    """Return block columns of a lower triangle in groups: rows from the first one's diagonal block to `end`."""
    found: list[list[tuple[int, int]]] = []
    for block in blocks:
        group = [*found[-1], block] if found else [block]
        above = sum((first - group[0][0]) * (stop - first) for first, stop in group)
        if found and above <= _BESIDE * sum((end - first) * (stop - first) for first, stop in group):
            found[-1].append(block)
        else:
            found.append([block])
    return found


def _rows_of(kernels: Kernels, rows: Any, blocks: Sequence[tuple[int, int]]) -> Any:
    """Return those rows of a panel that are the columns of some blocks, one below the other."""
    (first, stop), count, depth = blocks[0], len(blocks), rows.shape[1]
    if count == 1:
        return rows[first:stop]
    width, distance = stop - first, blocks[1][0] - first
    found = kernels.empty((sum(stop - first for first, stop in blocks), depth), rows.dtype)
    whole = count if blocks[-1][1] - blocks[-1][0] == width else count - 1
    strided = kernels.xp.lib.stride_tricks.as_strided
    # Columns first, so that the elements that lie side by side are copied together.
    to, by = found.strides, rows.strides
    given = strided(rows[first:].T, (depth, whole, width), (by[1], distance * by[0], by[0]))
    strided(found.T, (depth, whole, width), (to[1], width * to[0], to[0]))[...] = given
    if whole < count:
        assign(found[whole * width :], rows[slice(*blocks[-1])])
    return found


def indefinite(order: int) -> str:
    """Return the text for a matrix whose leading minor of some order is not positive."""
    return (
        f"the leading minor of order {order} is not positive: the matrix is not positive definite; pass one that is, "
        "or factorize by lu or qr"
    )


def singular(at: int, *, rank: bool) -> str:
    """Return the text for a diagonal element of a triangular factor that is zero; `rank`: or rounding of its column."""
    if rank:
        return f"column {at} depends on those before it: the matrix is not of full rank; pass rcond="
    return f"the matrix is singular: diagonal element {at} of its triangular factor is exactly zero"
