"""The kernels of `programs.refine`: scales, residuals out of chunks, and what becomes of a correction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from dask_distmm.engines.programs.blas import Kernels, assign, diagonal_view
from dask_distmm.errors import MatrixError, not_finite
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.programs.refine import (
    BEGAN,
    CROSSING,
    DONE,
    KEEPING,
    MOST,
    SO_FAR,
    TAKEN,
    UNFINISHED,
)

# A residual that is at most this share of the one before is on a good way without more; where nothing more can be done
# it is to be at most that share. It is good where it is up to _NEAR times as large as rounding, or sqrt(n) times.
_FAST, _SLOW, _NEAR = 0.1, 0.5, 8
# Corrections that are looked at before one knows whether they lead anywhere; the share of the residual that is to be
# gone by each.
_TRIED, _WORTH = 4, 0.6
# Powers of two are not above this one. Columns are as they are if their largest elements are above the second one, and
# alike up to the third one.
_LARGEST, _SMALL, _ALIKE = 1000, -24, 4
# Columns from which on a product is one of matrices, not of vectors.
_WIDE = 4


class Piece(NamedTuple):
    """A part of A in a chunk, as ranks hold A: where it begins, its elements, and whether the diagonal crosses it."""

    row: int
    col: int
    array: Any
    crossing: bool = False

    @property
    def rows(self) -> slice:
        """Its rows in A."""
        return slice(self.row, self.row + self.array.shape[0])

    @property
    def cols(self) -> slice:
        """Its columns in A."""
        return slice(self.col, self.col + self.array.shape[1])


def _sub_blocks(xp: Any, stack: Any, size: int, row: int, col: int) -> Any:
    """Return one of the four parts of all blocks of twice this order on the diagonals of a stack of matrices."""
    count, (along, down, across) = stack.shape[1] // (2 * size), stack.strides
    shape, strides = (len(stack), count, size, size), (along, 2 * size * (down + across), down, across)
    return xp.lib.stride_tricks.as_strided(stack[:, row * size :, col * size :], shape, strides)


class RefineKernels:
    """The kernels that `programs.refine` calls, on one rank."""

    blas: Kernels
    xp: Any
    # A reference to what yields the parts of A that this rank multiplies. Whether they are those of its conjugate, and
    # whether only its lower triangle is read; whether elements that are NaN or infinite are refused.
    _parts_of_a: Callable[[], Any]
    _pivots: Callable[[], Any]
    _conjugated = _by_triangle = _check_finite = False

    def prepare(self, parts_of_a: Callable[[], Any], pivots: Callable[[], Any], task: Factorization) -> None:
        """Keep the functions that yield this rank's parts of A, with their first rows and columns, and the pivots."""
        self._pivots = pivots
        self._parts_of_a, self._conjugated = parts_of_a, task.orientation("a").conjugated
        self._by_triangle, self._check_finite = task.hermitian, task.check_finite

    @functools.cached_property
    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        for row, col, chunk in self._parts_of_a()():
            # Products read rows or columns that are contiguous, as those of a reversed matrix may not be.
            array = chunk if min(chunk.strides) == chunk.itemsize else self.xp.ascontiguousarray(chunk)
            pieces += self._cut(row, col, array) if self._by_triangle else [Piece(row, col, array)]
        return pieces

    def _cut(self, row: int, col: int, array: Any) -> Iterator[Piece]:
        """Yield the parts of a chunk below the diagonal, and the small ones that the diagonal crosses.

        The small ones are copies with zeros above the diagonal, and half of its elements: they are read twice, and are
        real.
        """
        rows, cols = array.shape
        if not rows or not cols or col >= row + rows:
            return
        if row >= col + cols:
            yield Piece(row, col, array)
        elif max(rows, cols) <= CROSSING[self.blas.asynchronous]:
            piece = Piece(row, col, self.xp.tril(array, row - col), crossing=True)
            diagonal = self._diagonal(piece)
            diagonal[...] = diagonal.real / 2
            yield piece
        elif rows >= cols:
            half = rows // 2
            yield from self._cut(row, col, array[:half])
            yield from self._cut(row + half, col, array[half:])
        else:
            half = cols // 2
            yield from self._cut(row, col, array[:, :half])
            yield from self._cut(row, col + half, array[:, half:])

    # Scales

    def measure(self, sizes: Any) -> None:
        """Compute the sums of moduli along the rows of this rank's chunks, and the diagonal of a Hermitian A."""
        assign(sizes, 0)
        for piece in self._pieces:
            self.blas.add_sizes(piece.array, sizes[piece.rows, 0])
            if self._by_triangle:
                self.blas.add_sizes(piece.array.T, sizes[piece.cols, 0])
            if piece.crossing:
                diagonal, first = self._diagonal(piece), max(piece.row, piece.col)
                sizes[first : first + len(diagonal), 1] = 2 * diagonal.real
        host, isfinite = self.blas.host, self.xp.isfinite
        suspect = self._check_finite and not host(isfinite(sizes[:, 0]).all())
        # Sums may have overflowed.
        if suspect and not all(host(isfinite(piece.array).all()) for piece in self._pieces):
            raise MatrixError(not_finite("a"))

    def _diagonal(self, piece: Piece) -> Any:
        """Return the elements of a part that are on the diagonal of A."""
        offset = piece.row - piece.col
        return diagonal_view(self.xp, piece.array[max(0, -offset) :, max(0, offset) :])

    def weigh(self, weights: Any, norm: Any, *parts: Any, positive: bool, has_factors: bool) -> None:
        """Compute scales of rows (of columns, too, if positive definite), powers of two, and the norm of A."""
        xp, sizes = self.xp, self.blas.empty(parts[0].shape, parts[0].dtype)
        assign(sizes, 0)
        for part in parts:
            # CuPy does not copy from another GPU's memory.
            sizes += part
        norm[...] = self.blas.host(sizes[:, 0].max())
        exponents = xp.frexp(sizes[:, int(positive)])[1]
        if positive:
            exponents = xp.where(sizes[:, 1] > 0, exponents, 0) // 2
        weights[...] = self._powers(-exponents * (not has_factors))[:, None].astype(weights.dtype)
        if not np.isfinite(norm).all():
            weights[...] = np.nan

    def _powers(self, exponents: Any) -> Any:
        exponents = self.xp.clip(exponents, -_LARGEST, _LARGEST)
        return self.xp.ldexp(self.xp.ones(exponents.shape), exponents)

    def scale_columns(self, a: Any, scales: Any, *, places: Sequence[tuple[int, int]], narrow: bool) -> None:
        """Scale columns by powers of two; all of them if the factors' type is `narrow`; `places` are theirs in A."""
        xp, at = self.xp, 0
        parts = (a.real, a.imag) if a.dtype.kind == "c" else (a,)
        largest = functools.reduce(xp.maximum, [xp.maximum(x.max(axis=0), -x.min(axis=0)) for x in parts])
        exponents = self.blas.host(xp.frexp(largest)[1])
        for start, stop in places:
            own = exponents[at : at + stop - start]
            at += stop - start
            if not narrow and own.max() - _ALIKE <= own.min() and own.min() > _SMALL:
                own[...] = 0
        factors = self._powers(-xp.asarray(exponents)).astype(scales.dtype)
        assign(scales, 0)
        if places:
            scales[np.concatenate([np.arange(*place) for place in places]), 0] = factors
        if exponents.any():
            a *= factors.astype(largest.dtype)

    def order_of_rows(self, rows: Any, *, back: bool) -> None:
        """Compute the permutation of rows that the pivots make, or its inverse."""
        pivots = [self.blas.host(x).real.ravel().astype(np.int32) for x in self._pivots()()]
        numbers = np.arange(len(rows), dtype=np.float64)[:, None]
        order = scipy.linalg.lapack.dlaswp(numbers, np.concatenate(pivots))[:, 0].astype(np.int64)
        rows[...] = self.xp.asarray(np.argsort(order) if back else order)[:, None]

    def count_rows(self, rows: Any) -> None:
        """Fill with 0, 1, 2, ...: the permutation of a matrix without swaps."""
        rows[...] = self.xp.arange(len(rows))[:, None]

    def permute_rows(self, rows: Any, side: Any) -> None:
        """Permute the rows of a matrix, into another one."""
        assign(side, self.xp.take(side.T, rows[:, 0], axis=1).T)

    def keep_panel(self, panel: Any, place: Any) -> None:
        """Copy a panel, or a part of it, which another rank may have sent."""
        assign(place, self.blas.xp.asarray(panel))

    def swap_later(self, panel: Any, rows: Any, pivots: Any) -> None:
        """Order a panel's rows below its diagonal block as later panels did; then `rows` by its own swaps, too."""
        size, start = panel.shape[1], len(rows)
        later = rows[size:, 0] - rows[:1, 0]
        assign(panel[size:], self.xp.take(panel.T, later, axis=1).T)
        numbers = self.blas.empty((start, 1), np.dtype(np.float64))
        numbers[...] = self.xp.arange(start, dtype=np.float64)[:, None]
        self.blas.laswp(numbers, pivots.ravel())
        own = numbers[:, 0].astype(np.int64) + rows[0, 0]
        rows[size:, 0] = self.xp.take(own, later)
        rows[:size, 0] = own[:size]

    def invert_blocks(self, factors: Any, inverses: Any, *, lower: bool, unit: bool) -> None:
        """Invert blocks on the diagonal of a triangle, side by side, by halves; the last one may have fewer rows."""
        xp, size, n = self.xp, len(inverses), len(factors)
        if not size:
            return
        assign(inverses, 0)
        blocks = self.blas.empty(inverses.shape, inverses.dtype)
        assign(blocks, 0)
        for at in range(0, n, size):
            block = factors[at : at + size, at : at + size]
            rows = len(block)
            assign(blocks[:rows, at : at + rows], block)
        # Each matrix of the stack is the transpose of a block; all of it is as for lower triangles.
        stack, blockwise = (x.T.reshape(-1, size, size) for x in (blocks, inverses))
        if lower:
            stack, blockwise = stack.swapaxes(1, 2), blockwise.swapaxes(1, 2)
        every = xp.arange(size)
        diagonal = stack[:, every, every]
        # Beyond the last row there are zeros.
        blockwise[:, every, every] = 1 if unit else 1 / xp.where(diagonal == 0, 1, diagonal)
        half = 1
        while half < size:
            places = (blockwise, 0, 0), (blockwise, 1, 1), (stack, 1, 0), (blockwise, 1, 0)
            a, b, c, beside = (_sub_blocks(xp, x, half, row, col) for x, row, col in places)
            beside[...] = -(b @ (c @ a))
            half *= 2

    def solve_whole(self, factors: Any, inverses: Any, side: Any, *, lower: bool, op: str, unit: bool) -> None:
        """Solve with a triangle by inverses of blocks on its diagonal, or without these."""
        size, n = len(inverses), len(factors)
        if not size:
            self.blas.trsm(factors, side, right=False, lower=lower, op=op, unit=unit)
            return
        forward = lower == (op == "N")
        starts = range(0, n, size)
        for start in starts if forward else reversed(starts):
            here = slice(start, min(n, start + size))
            rest = slice(here.stop, n) if forward else slice(start)
            copy = self.blas.empty(side[here].shape, side.dtype)
            assign(copy, side[here])
            inverse = inverses[: len(copy), here]
            self.blas.gemm(inverse, copy, side[here], op, alpha=1, beta=0)
            beside = factors[rest, here] if op == "N" else factors[here, rest]
            self.blas.gemm(beside, side[here], side[rest], op, alpha=-1, beta=1)

    def diagonal_range(self, measured: Any, a: Any, *infos: Any, places: Sequence[tuple[int, int, int]]) -> None:
        """Compute the least and the largest modulus on panels' diagonals, and whether the factors are unusable."""
        if not places:
            measured[0] = math.inf, 0, 0
            return
        diagonals = [self.blas.diagonal(a[start:stop, col : col + stop - start]) for col, start, stop in places]
        values, *said = self.blas.hosts([self.xp.concatenate(diagonals), *infos])
        modulus = abs(values)
        bad = (
            any(info.any() for info in said)
            or not np.isfinite(modulus).all()
            or (bool(said) and (values.real <= 0).any())
        )
        measured[0] = modulus.min(), modulus.max(), bad

    def judge_factors(self, go: Any, good: Any, numbers: Any, *parts: Any, positive: bool, eps: float) -> None:
        """Decide by the range of their diagonal whether refinement with these factors may converge."""
        least, largest = min(part[0, 0] for part in parts), max(part[0, 1] for part in parts)
        ratio = least / largest if largest > 0 else 0.0
        good[...] = go[...] = not any(part[0, 2] for part in parts) and (ratio * ratio if positive else ratio) > eps
        numbers[...] = 0

    # Turns

    def multiply_chunks(self, x: Any, y: Any, **_: Any) -> None:
        """Y = A X, with the chunks of A that this rank multiplies."""
        conjugated = self._conjugated and x.dtype.kind == "c"
        if conjugated:
            copy = self.blas.empty(x.shape, x.dtype)
            self.xp.conjugate(x, out=copy)
            x = copy
        assign(y, 0)
        for piece in self._pieces:
            self._add_times(piece.array, x[piece.cols], y[piece.rows], "N")
            if self._by_triangle:
                self._add_times(piece.array, x[piece.rows], y[piece.cols], "C")
        if conjugated:
            self.xp.conjugate(y, out=y)

    def _add_times(self, a: Any, x: Any, y: Any, op: str) -> None:
        """Y += op(A) X, of a matrix of any memory order."""
        by_rows = a.strides[0] > a.strides[1]
        is_complex = a.dtype.kind == "c"
        if x.shape[1] >= _WIDE and not (by_rows and op == "C" and is_complex):
            factor = (a.T, {"N": "T", "C": "N"}[op]) if by_rows else (a, op)
            self.blas.gemm(factor[0], x, y, factor[1], alpha=1, beta=1)
        elif op == "N":
            y += a @ x
        else:
            y += (a.T @ x.conj()).conj() if is_complex else a.T @ x

    def scale_residual(self, r: Any, active: Any, scale: Any, side: Any) -> None:
        """Convert a residual to the factors' type, with elements of about 1; zeros where nothing is left to do."""
        xp = self.xp
        largest = xp.maximum(abs(r.real), abs(r.imag)) if r.dtype.kind == "c" else abs(r)
        exponents = xp.frexp(largest.max(axis=0))[1]
        scale[...] = self._powers(exponents).astype(scale.dtype)
        assign(side, r * (self._powers(-exponents) * active).astype(scale.dtype))

    def weighted(self, weights: Any, x: Any, y: Any) -> None:
        """Y = X with rows multiplied by numbers."""
        self.xp.multiply(weights, x, out=y)

    def correct(self, side: Any, scales: Any, scale: Any, z: Any, x: Any) -> None:
        """Add a correction to x, in the type of A."""
        z[...] = side
        z *= scales
        z *= scale
        x += z

    def refine_step(
        self,
        b: Any,
        weights: Any,
        norm: Any,
        y: Any,
        x: Any,
        r: Any,
        z: Any,
        zs: Any,
        ws: Any,
        state: Any,
        mask: Any,
        row: Any,
    ) -> None:
        """Test the residual of x for convergence; write the next one to solve for, less earlier corrections."""
        xp, n, eps = self.xp, len(b), float(np.finfo(b.dtype).eps)
        trial = b - y
        weighted = trial * weights
        residuals, sizes, steps, now, before = self._largest_of(trial, x, z, weighted, r)
        scale = float(norm[0, 0]) * eps * sizes
        ratio = np.where(residuals > 0, residuals / np.where(scale > 0, scale, eps * eps), 0)
        rate = np.where(before > 0, now / np.where(before > 0, before, 1), 0)
        state[DONE] = (state[DONE] > 0) | (ratio <= min(_NEAR, math.sqrt(n)))
        state[SO_FAR] += 1
        active, turns = state[DONE] == 0, int(state[SO_FAR, 0])
        row[0] = 0
        done = ~active & (sizes > 0)
        row[0, 2:] = turns, state[TAKEN, 0], max(1, ratio.max()) * eps, (steps[done] / sizes[done]).max(initial=eps)
        row[0, UNFINISHED] = active.any()
        mask[...] = xp.asarray(active[None].astype(mask.dtype))
        if not active.any():
            return
        if not np.isfinite(residuals[active] + sizes[active]).all() or turns >= MOST:
            row[0, 1] = 1
            return
        if (rate[active] <= _FAST).all():
            r[...] = weighted
            state[KEEPING] = 0
            return
        most = zs.shape[1] // max(1, x.shape[1])
        if not most:
            row[0, 1] = bool((rate[active] > _SLOW).any())
            r[...] = weighted
            return
        state[TAKEN] = row[0, 3] = 1
        count = int(state[KEEPING, 0])
        if count:
            # By how much each of the corrections that are kept has reduced the residual.
            share = (before[active] / state[BEGAN][active]).max() ** (1 / count)
            if not np.isfinite(share) or (count >= _TRIED and share > _WORTH):
                row[0, 1] = 1
                return
        if count in (0, most):
            count, state[BEGAN] = 0, before
        self._keep(weighted, x, r, z, (zs, ws), count, mask)
        state[KEEPING] = count + 1

    def _largest_of(self, *matrices: Any) -> list[Any]:
        """Return the largest moduli of columns, on the host."""
        xp, width = self.xp, matrices[0].shape[1]
        every = xp.concatenate([x.T for x in matrices])
        every = xp.maximum(abs(every.real), abs(every.imag)) if every.dtype.kind == "c" else abs(every)
        largest = np.asarray(self.blas.host(every.max(axis=1)), np.float64)
        return [largest[at : at + width] for at in range(0, len(largest), width)]

    def _keep(self, trial: Any, x: Any, r: Any, z: Any, bases: tuple[Any, Any], count: int, mask: Any) -> None:
        """Add the combination of the correction and the kept ones that minimizes the residual."""
        xp, (n, width) = self.xp, x.shape
        # All by columns, which are contiguous.
        kept_z, kept_w = (basis.T[: (count + 1) * width].reshape(count + 1, width, n) for basis in bases)
        trial, x, r, z, mask = trial.T, x.T, r.T, z.T, mask.T
        w, v = (r - trial) * mask, z * mask
        x -= v
        if count:
            h = (kept_w[:count].conj() * w).sum(axis=2)[:, :, None]
            w -= (kept_w[:count] * h).sum(axis=0)
            v -= (kept_z[:count] * h).sum(axis=0)
        size = xp.sqrt((w.real**2 + w.imag**2 if w.dtype.kind == "c" else w * w).sum(axis=1))[:, None]
        size = xp.where(size > 0, size, 1)
        w /= size
        v /= size
        alpha = (w.conj() * r).sum(axis=1)[:, None]
        kept_w[count], kept_z[count] = w, v
        x += v * alpha
        r -= w * alpha

    def judge(self, go: Any, good: Any, numbers: Any, *parts: Any) -> None:
        """Decide whether to iterate once more, and whether x has converged."""
        numbers[...] = functools.reduce(np.maximum, parts)
        good[...] = not numbers[0, 1]
        go[...] = bool(numbers[0, UNFINISHED]) and not numbers[0, 1]

    def take_other_way(self, numbers: Any, *, there: bool) -> None:
        """Note that A itself is factorized; raise if its memory was not planned for."""
        if not there:
            raise MatrixError(
                "the matrix is too ill-conditioned for factors of factor_dtype, and the workers have no memory for "
                "others: leave factor_dtype out, with more workers"
            )
        numbers[0, 3:] = 2, math.nan, math.nan
