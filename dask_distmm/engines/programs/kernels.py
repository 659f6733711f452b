"""The kernels of programs, as `programs.steps` names them, on BLAS and LAPACK of CPUs or GPUs.

Chunks of rows may be of any memory order; those that programs make are row-major. Small matrices are column-major, and
only the lower triangle of a Gram matrix counts. Flags are on the host.

Chunks of rows of A may be sparse, in compressed rows. Products with small matrices read them as they are; their Gram
matrices are dense, and added up in place: of the elements that are there, or of rows that are made dense strip by
strip, whichever is faster. Programs that need Q make them dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.evaluate import TracedKernels
from dask_distmm.engines.programs.factor import FactorKernels, add_gram, is_near, singular, strips_of, upper_of
from dask_distmm.engines.programs.refine import RefineKernels
from dask_distmm.engines.programs.spectral import unit_factors
from dask_distmm.errors import MatrixError, not_finite
from dask_distmm.numeric.sparse import add_thin_gram, dense, sparse_package

# R of a Gram matrix is R of A up to rounding if the square of the condition of A's scaled columns is not above this;
# as good are the solutions of its normal equations.
_ONCE = 100
# Means are those of as many strips of rows; these are centred around the means of the first one before.
_AROUND = 8
# Sparse rows of which more is filled are multiplied faster as dense ones (2,000 columns, one core: float32 at 0.13,
# float64 at 0.17).
_FILLED = 1 / 8
# Up to this share of all eigenvectors, they are computed without the others (n = 2,000, one core: 50 of them twice as
# fast, half of them as fast).
_FEW = 1 / 10
# Columns from which on a product with a narrow matrix is faster column-major, and then copied (one core, 20 columns,
# row-major: of 64 columns 0.75 times as fast, of 256 1.06, of 1,000 1.55).
_LONG = 256
# A product with an inverse loses this factor against a solution at most.
_WELL = 16
# Elements that NumPy takes at once, of rows that are shorter (one core, rows without the means of columns, which are
# added up: of 3 columns in 0.08 of the time, of 10 in 0.2, of 32 in 0.5, of 64 in 0.6).
_WIDE = 512
# Rows of a column that a GPU's block of threads adds up at least, and sums that there are of parts of rows.
_SUMMED, _SUMS = 32, 2**16


class ProgramKernels(FactorKernels, TracedKernels, RefineKernels):
    """The kernels of one run."""

    def __init__(self, kernels: Kernels, *, may_skip: bool = True) -> None:
        super().__init__(kernels)
        TracedKernels.__init__(self)
        self.xp = kernels.xp
        # Whether the function may have the option not to check elements.
        self.may_skip = may_skip
        # By the number of an array that divides others: itself, its inverse, and whether that is as good.
        self._inverses: dict[int, tuple[Any, Any, bool]] = {}
        self._spare = np.empty(0)

    def empty(self, shape: tuple[int, int], dtype: np.dtype, *, tall: bool) -> Any:
        """Allocate a row-major matrix."""
        rows_only = tall or (shape[0] == 1 and not self.blas.asynchronous)
        return self.xp.empty(shape, dtype) if rows_only else self.blas.empty(shape, dtype)

    # Chunks of rows

    def gram(self, a: Any, g: Any) -> None:
        """G += A^H A."""
        if self._is_thin(a):
            add_thin_gram(a, g)
            return
        for part in (strip for _, strip in self._strips(a)) if sparse_package(a) else [a]:
            add_gram(self.blas, part, g)

    def adjoint_times(self, a: Any, b: Any, c: Any, *, at: int | None = None) -> None:
        """C += A^H B, of a narrow B, or of its rows from `at` on."""
        b = b if at is None else b[at : at + a.shape[0]]
        if sparse_package(a):
            c += (a.T @ b.conj()).conj()
        elif a.dtype.kind == "c" or not self.blas.asynchronous:
            # On CPUs BLAS is up to twice as fast where the long side of a narrow result is the contiguous one.
            c += (b.conj().T @ a).conj().T
        else:
            c += a.T @ b

    def times(self, a: Any, x: Any, d: Any, *, at: int | None = None) -> None:
        """D = A X, or the rows of D from `at` on."""
        d = d if at is None else d[at : at + a.shape[0]]
        if sparse_package(a):
            d[...] = a @ x
        elif self.blas.asynchronous or a.shape[1] < _LONG:
            self.xp.matmul(a, x, out=d)
        else:
            for rows in strips_of(self.blas, a):
                d[rows] = (x.T @ a[rows].T).T

    def back_and_forth(self, a: Any, x: Any, y: Any, c: Any, g: Any) -> None:
        """Y = A X, C += A^H Y, G += Y^H Y: rows of A are in the cache when they are needed again."""
        for rows in strips_of(self.blas, a):
            self.times(a[rows], x, y[rows])
            self.adjoint_times(a[rows], y[rows], c)
        self.gram(y, g)

    def residual(self, a: Any, x: Any, b: Any, r: Any) -> None:
        """R = B - A X; B is repeated for each of the solutions that are side by side in X."""
        self.times(a, x, r)
        for at in range(0, r.shape[1], max(1, b.shape[1])):
            part = r[:, at : at + b.shape[1]]
            self.xp.subtract(b, part, out=part)

    def square_norms(self, r: Any, s: Any) -> None:
        """Add the squared norms of columns to S."""
        s += self._column_sums(r.real**2 + r.imag**2 if r.dtype.kind == "c" else r * r)

    def gram_of_quotient(self, r: Any, a: Any, g: Any) -> None:
        """G += B^H B of B = A R^-1, which is not kept."""
        for _, strip in self._strips(a):
            part = self._scratch(strip)
            self._divide_into(strip, r, part)
            add_gram(self.blas, part, g)

    def quotient_and_gram(self, r: Any, a: Any, q: Any, g: Any) -> None:
        """Q = A R^-1, and G += Q^H Q."""
        for rows, strip in self._strips(a):
            self._divide_into(strip, r, q[rows])
            add_gram(self.blas, q[rows], g)

    def divide(self, r: Any, q: Any) -> None:
        """Q = Q R^-1."""
        for rows in strips_of(self.blas, q):
            self._divide_into(part := q[rows], r, part)

    def multiply(self, w: Any, q: Any) -> None:
        """Q = Q W."""
        for rows in strips_of(self.blas, q):
            q[rows] = self.xp.matmul(q[rows], w, out=self._scratch(q[rows]))

    def times_adjoint(self, w: Any, q: Any, x: Any) -> None:
        """X = W Q^H."""
        self.xp.matmul(w, q.conj().T if q.dtype.kind == "c" else q.T, out=x)

    def reflect(self, a: Any, r: Any) -> None:
        """Overwrite R with that of [R; A]."""
        r[...] = self.xp.linalg.qr(self.xp.concatenate([r, dense(a)]), mode="r")

    def factor(self, a: Any, q: Any, r: Any, count: Any) -> None:
        """Q and R of A; where it has fewer rows than columns, zeros beside Q and below R."""
        count[...] = rows = min(a.shape)
        q[:, rows:], r[rows:] = 0, 0
        q[:, :rows], r[:rows] = self.xp.linalg.qr(dense(a))

    def append(self, a: Any, b: Any, c: Any) -> None:
        """C = [A B]."""
        c[:, : a.shape[1]], c[:, a.shape[1] :] = dense(a), dense(b)

    def last_rows(self, c: Any, a: Any, b: Any) -> None:
        """Split the last rows of C = [A B] into A and B."""
        rows = c[len(c) - len(a) :]
        a[...], b[...] = rows[:, : a.shape[1]], rows[:, a.shape[1] :]

    def centre(self, a: Any, mean: Any, c: Any) -> None:
        """C = A without means of columns."""
        for rows, strip in self._strips(a):
            self._subtract(strip, mean, c[rows])

    def moments(self, a: Any, count: Any, mean: Any, g: Any) -> None:
        """Add rows to moments (Chan, Golub, LeVeque 1983): strip by strip, each around its own means."""
        if self._is_thin(a):
            self._merge_means(a.shape[0], self._thin_moments(a, g), count, mean, g)
            return
        strips = list(strips_of(self.blas, a))
        for at in range(0, len(strips), _AROUND):
            some = strips[at : at + _AROUND]
            own, rest = self._means(dense(a[some[0]])), self._zeros(mean)
            for rows in some:
                strip = dense(a[rows])
                centred = self._subtract(strip, own, self._scratch(strip))
                rest += self._column_sums(centred)
                add_gram(self.blas, centred, g)
            # The first strip is an eighth of these rows, so its means cost a digit at most.
            size = a[some[0].start : some[-1].stop].shape[0]
            rest /= size
            self.blas.gemm(rest, rest * size, g, "C", "N", alpha=-1, beta=1)
            own += rest
            self._merge_means(size, own, count, mean, g)

    def _thin_moments(self, a: Any, g: Any) -> Any:
        """Add the Gram matrix of centred sparse rows, and return the means of columns.

        A column of which a part p is filled has a squared mean of at most p / (1 - p) times its variance. So the
        Gram matrix without that of the means, a correction of rank one, has lost a bit at most where p is up to 1/2.
        Columns that are filled beyond that are few, are made dense, and centred before they are multiplied.
        """
        m, n = a.shape
        mean = np.asarray(a.sum(axis=0), g.dtype).reshape(1, n) / m
        full = 2 * np.bincount(a.indices, minlength=n) > m
        columns, rest = a[:, full].toarray() - mean[:, full], mean * ~full
        mean[:, full] += (error := columns.mean(axis=0))
        columns -= error
        part = self._zeros(g) if full.any() else g
        add_thin_gram(a, part)
        self.blas.gemm(rest, rest * m, part, "C", "N", alpha=-1, beta=1)
        if full.any():
            crossed = (a.conj() if a.dtype.kind == "c" else a).T @ columns
            crossed[full] = columns.conj().T @ columns
            part[:, full], part[full] = crossed, crossed.conj().T
            g += part
        return mean

    def _is_thin(self, a: Any) -> bool:
        """Whether rows are so sparse that their Gram matrix is made of them as they are."""
        return bool(sparse_package(a)) and not self.blas.asynchronous and a.nnz < _FILLED * a.shape[0] * a.shape[1]

    def _strips(self, a: Any) -> Iterator[tuple[slice, Any]]:
        """Yield slices of rows, and these rows, dense."""
        for rows in strips_of(self.blas, a):
            yield rows, dense(a[rows])

    def merge_moments(self, other_count: Any, other_mean: Any, other_g: Any, count: Any, mean: Any, g: Any) -> None:
        """Merge moments into totals."""
        g += other_g
        self._merge_means(other_count, other_mean, count, mean, g)

    def _merge_means(self, other_count: Any, other_mean: Any, count: Any, mean: Any, g: Any) -> None:
        """Add the means of others to means; G has both Gram matrices, and gets what the distance of the means adds."""
        total, distance = self.xp.maximum(count + other_count, 1), other_mean - mean
        self.blas.gemm(distance, distance * (count * (other_count / total)), g, "C", "N", alpha=1, beta=1)
        mean += distance * (other_count / total)
        count += other_count

    # Small matrices

    def check(self, r: Any, *, cols: int) -> None:
        """Raise if R of [A B] is not finite; A has this many columns."""
        if not self._is_finite(r):
            raise MatrixError(not_finite("b" if self._is_finite(r[:cols, :cols]) else "a", option=self.may_skip))

    def check_right(self, good: Any, c: Any) -> None:
        """Raise if A^H B is not finite, where A^H A is good."""
        if good.all() and not self._is_finite(c):
            raise MatrixError(not_finite("b"))

    def _is_finite(self, x: Any) -> bool:
        return bool(self.blas.host(self.xp.isfinite(x).all()))

    def add(self, a: Any, c: Any) -> None:
        """C += A."""
        c += a

    def copy(self, a: Any, c: Any) -> None:
        """C = A."""
        c[...] = a

    def adjoint(self, a: Any, c: Any) -> None:
        """C = A^H."""
        c[...] = a.conj().T

    def normal(self, x: Any, *, seed: int | bytes) -> None:
        """Draw normally distributed numbers, the same on CPUs and GPUs, or copy the constants."""
        if isinstance(seed, bytes):
            x[...] = self.xp.asarray(np.frombuffer(seed, x.dtype).reshape(x.shape))
            return
        random = np.random.default_rng(seed)
        drawn = random.standard_normal(x.shape)
        x[...] = self.xp.asarray(drawn + 1j * random.standard_normal(x.shape) if x.dtype.kind == "c" else drawn)

    def gram_factor(
        self, g: Any, r: Any, once: Any, usable: Any, good: Any = None, *, least: float | None = None
    ) -> None:
        """R of a Gram matrix, and what its condition allows.

        `once`: it is R of A. `usable`: to divide by. `good`: to solve with, if the result is refined, and no singular
        value is up to `least` times the largest one.
        """
        condition = self._cholesky(g, r)
        eps = float(np.finfo(r.dtype).eps)
        once[...], usable[...] = condition <= _ONCE, condition * eps <= len(g)
        if good is not None:
            good[...] = condition <= eps**-0.5
            if good.all() and least is not None:
                s = self.blas.host(self._svdvals(r))
                good[...] = s[-1] > 2 * least * s[0]

    def _cholesky(self, g: Any, r: Any) -> float:
        """Write R of a Gram matrix; return a bound of the square of the condition of A's scaled columns."""
        xp, info = self.xp, np.finfo(r.dtype)
        if not g.size:
            return 1.0
        squares = self.blas.host(self.blas.diagonal(g)).real
        # Smaller squares have lost digits, infinite ones all.
        if not (squares > info.tiny / info.eps).all() or not np.isfinite(squares).all():
            r[...] = 0
            return np.inf
        norms = xp.asarray(np.sqrt(squares), r.real.dtype)
        scaled = self.blas.empty(g.shape, g.dtype)
        scaled[...] = g / norms / norms[:, None]
        below = abs(xp.tril(scaled, -1))
        size = (below.sum(axis=0) + below.sum(axis=1)).max() + 1
        failed = self.blas.potrf(scaled)
        factor = upper_of(self.blas, scaled)
        with np.errstate(all="ignore"):
            inverse = abs(self._inverse(factor))
            said = self.blas.host(xp.stack([size * inverse.sum(axis=0).max() * inverse.sum(axis=1).max(), *failed]))
        r[...] = factor * norms
        return np.inf if said[1] or not np.isfinite(said[0]) else float(said[0])

    def second_factor(self, g: Any, first: Any, second: Any, r: Any, good: Any) -> None:
        """R2 of the Gram matrix of A R1^-1, R2 R1, and whether A is to be divided by these."""
        good[...] = is_near(self.blas, g)
        failed = self.blas.potrf(g_copy := self._copy(g))
        second[...] = upper_of(self.blas, g_copy)
        good &= not self.blas.host(failed)[0]
        self.blas.gemm(second, first, r, alpha=1, beta=0)

    def stack(self, r: Any, count: Any, *pairs: Any) -> None:
        """R of stacked triangles of this many rows, which become the blocks of Q; zeros where there are none."""
        triangles, rows = pairs[::2], [int(size.item()) for size in pairs[1::2]]
        used = [triangle[:size] for triangle, size in zip(triangles, rows, strict=True)]
        q, upper = self.xp.linalg.qr(self.xp.concatenate([r[:0], *used]))
        count[...] = k = len(upper)
        r[:k], r[k:] = upper, 0
        at = 0
        for triangle, size in zip(triangles, rows, strict=True):
            triangle[...] = 0
            triangle[:size, :k] = q[at : at + size]
            at += size

    def orthonormalize(self, z: Any, x: Any) -> None:
        """X = the left singular vectors of Z; zeros if that is not finite."""
        x[...] = self._svd(z)[0] if self._is_finite(z) else 0

    def solve(self, r: Any, b: Any) -> None:
        """B = R^-1 B."""
        self.blas.trsm(r, b, right=False, lower=False, op="N", unit=False)

    def quotient(self, r: Any, b: Any, x: Any) -> None:
        """X = B R^-1."""
        x[...] = b
        self.blas.trsm(r, x, right=True, lower=False, op="N", unit=False)

    def inverse(self, r: Any, w: Any, *, rows: int) -> None:
        """R^-1 of a matrix of this many rows and full rank."""
        self._check_rank(r, rows)
        w[...] = self._inverse(r)

    def pseudo_inverse(self, s: Any, vh: Any, w: Any, *, rtol: float) -> None:
        """V S^+."""
        w[...] = vh.conj().T * self._inverted(s[0], rtol)

    def singular_values(self, r: Any, s: Any) -> None:
        """Singular values."""
        s[0] = self._svdvals(r)

    def singular_vectors(self, r: Any, u: Any, s: Any, vh: Any, *, by_left: bool = False, by_sum: bool = False) -> None:
        """Compute the leading singular values, as many as `s` has columns, and their vectors.

        The first one of the largest components of each right vector, or left one, is real and positive; or the sum of
        its components is not negative, as Dask has it.
        """
        left, values, right = self._svd(r)
        k = s.shape[1]
        left, right = left[:, :k], right[:k]
        vectors, unit = left if by_left else right.conj().T, right.dtype.type(1)
        if by_sum:
            factors = self.xp.where(vectors.sum(axis=0).real >= 0, unit, -unit)
        else:
            factors = unit_factors(self.blas, vectors)
        u[...], s[0], vh[...] = left * factors, values[:k], right * factors.conj()[:, None]

    def hermitian(self, s: Any, vh: Any, h: Any) -> None:
        """H = V diag(s) V^H, exactly Hermitian."""
        product = (vh.conj().T * s) @ vh
        h[...] = (product + product.conj().T) / 2

    def covariance(self, count: Any, g: Any, c: Any, *, ddof: int, correlation: bool) -> None:
        """Covariances, or correlations, as NumPy has them: of variables, not of their conjugates."""
        lower = self.xp.tril(g)
        c[...] = (lower.conj() + self.xp.tril(g, -1).T) / self.xp.maximum(count - ddof, 0)
        if correlation:
            sizes = self.xp.sqrt(self.blas.diagonal(c).real)[None]
            c /= sizes.T
            c /= sizes
            for part in (c.real, c.imag) if c.dtype.kind == "c" else (c,):
                self.xp.clip(part, -1, 1, out=part)

    def principal(
        self, count: Any, g: Any, variances: Any, total: Any, components: Any, good: Any, *, spread: int
    ) -> None:
        """Compute the leading eigenvalues and eigenvectors, and whether the largest has not too many times the least.

        Its root may be up to `spread` times that of the least one.
        """
        n, k = len(g), variances.shape[1]
        lower = self.xp.tril(g)
        total[...] = g.real.trace() / (count[0, 0] - 1)
        if not self._is_finite(lower):
            good[...] = False
            return
        wanted = (n - k, n - 1) if k <= _FEW * n else None
        w, v = self.blas.eigh(self._copy(lower + self.xp.tril(g, -1).conj().T), wanted, vectors=True)
        w, v = w[::-1][:k], v[:, ::-1][:, :k]
        squares = self.blas.host(w)
        good[...] = squares[0] <= spread**2 * squares[-1] and squares[-1] > np.finfo(squares.dtype).tiny
        self._store_principal(count, w, v, variances, components)

    def principal_of_r(self, count: Any, r: Any, variances: Any, components: Any) -> None:
        """Compute principal components from R, or from A itself."""
        k = variances.shape[1]
        _, s, vh = self._svd(r)
        self._store_principal(count, s[:k] ** 2, vh[:k].conj().T, variances, components)

    def _store_principal(self, count: Any, squares: Any, v: Any, variances: Any, components: Any) -> None:
        variances[0] = squares / (count[0, 0] - 1)
        components[...] = (v * unit_factors(self.blas, v)).conj().T

    # Least squares

    def solve_normal(self, r: Any, c: Any, x: Any) -> None:
        """Solve R^H R X = C."""
        x[...] = c
        self.blas.trsm(r, x, right=False, lower=False, op="C", unit=False)
        self.solve(r, x)

    def refine(self, r: Any, difference: Any, x0: Any, norms: Any, x: Any, residuals: Any) -> None:
        """Correct a solution by A^H of its residual, and the squared norms of that."""
        self.solve_normal(r, difference, x)
        change = r @ x
        x += x0
        residuals[...] = norms
        with np.errstate(invalid="ignore"):
            residuals -= (abs(change) ** 2).sum(axis=0)
        self.xp.maximum(residuals, 0, out=residuals)

    def full_rank(self, r: Any, rank: Any, s: Any, *, values: bool) -> None:
        """Write the rank, which is full, and the singular values if there is an output for them."""
        rank[...] = len(r)
        s[0] = self._svdvals(r) if values else 0

    def least_squares(
        self, r: Any, x: Any, residuals: Any, rank: Any, s: Any, *, rows: int, rtol: float | None
    ) -> None:
        """Solve with R of [A B]: of full rank, or with singular values above `rtol` times the largest one."""
        n = len(x)
        square, c, rest = r[:n, :n], r[:n, n:], r[n:, n:]
        residuals[0] = (abs(rest) ** 2).sum(axis=0)
        if rtol is None:
            self._check_rank(self._copy(square), rows)
            x[...] = c
            self.solve(self._copy(square), x)
            rank[...], s[0] = n, self._svdvals(square)
            return
        u, s[0], vh = self._svd(square)
        inverted = self._inverted(s[0], rtol)
        along = u.conj().T @ c
        residuals[0] += (abs(along[inverted == 0]) ** 2).sum(axis=0)
        x[...] = vh.conj().T @ (along * inverted[:, None])
        rank[...] = (inverted > 0).sum()

    def ridge(self, g: Any, c: Any, x: Any, once: Any, good: Any, *, alphas: Sequence[float]) -> None:
        """(G + alpha I) X = C for each alpha, and whether X is good, or is if it is refined."""
        worst = 1.0
        for part, r, condition in self._shifted(g, x, alphas, c.shape[1]):
            worst = max(worst, condition)
            self.solve_normal(r, c, part)
        once[...], good[...] = worst <= _ONCE, worst <= float(np.finfo(x.dtype).eps) ** -0.5

    def refine_ridge(self, g: Any, difference: Any, x0: Any, x: Any, *, alphas: Sequence[float]) -> None:
        """Correct ridge solutions by A^H of their residuals."""
        cols = x.shape[1] // len(alphas)
        for at, (part, r, _) in enumerate(self._shifted(g, x, alphas, cols)):
            before = x0[:, at * cols : (at + 1) * cols]
            self.solve_normal(r, difference[:, at * cols : (at + 1) * cols] - alphas[at] * before, part)
            x[:, at * cols : (at + 1) * cols] += before

    def _shifted(self, g: Any, x: Any, alphas: Sequence[float], cols: int) -> Iterator[tuple[Any, Any, float]]:
        """Yield for each alpha the part of X, and R of G + alpha I with its condition."""
        for at, alpha in enumerate(alphas):
            shifted, r = self._copy(g), self.blas.empty(g.shape, g.dtype)
            shifted += alpha * self.xp.eye(len(g), dtype=g.dtype)
            condition = self._cholesky(shifted, r)
            yield (
                x[:, at * cols : (at + 1) * cols],
                r if np.isfinite(condition) else self.xp.eye(len(g), dtype=g.dtype, order="F"),
                condition,
            )

    def ridge_of_r(self, r: Any, x: Any, *, alphas: Sequence[float]) -> None:
        """Ridge regression by the SVD of R of [A B]."""
        n = len(x)
        u, s, vh = self._svd(r[:n, :n])
        along = u.conj().T @ r[:n, n:]
        least = s[0] * len(s) * float(np.finfo(s.dtype).eps)
        for at, alpha in enumerate(alphas):
            cols = slice(at * along.shape[1], (at + 1) * along.shape[1])
            # s / (s^2 + alpha), without squares.
            with np.errstate(all="ignore"):
                factors = self.xp.where(s > (0 if alpha else least), 1 / (s + alpha / s), 0)
            x[:, cols] = vh.conj().T @ (along * factors[:, None])

    # Helpers

    def _subtract(self, x: Any, row: Any, out: Any) -> Any:
        """Write all rows without one to row-major memory. NumPy takes them one by one: of few columns some at once."""
        count, whole = max(1, _WIDE // max(1, x.shape[1])), 0
        if count > 1 and not self.blas.asynchronous and x.flags.c_contiguous and out.flags.c_contiguous:
            whole, wide = len(x) // count * count, count * x.shape[1]
            self.xp.subtract(x[:whole].reshape(-1, wide), self.xp.tile(row, count), out=out[:whole].reshape(-1, wide))
        self.xp.subtract(x[whole:], row, out=out[whole:])
        return out

    def _column_sums(self, x: Any) -> Any:
        """Return the sums of columns, by parts of rows.

        CuPy has a block of threads for each column, or for some, and sums parts first; NumPy takes rows one by one, and
        some of few columns at once.
        """
        (rows, cols), on_device = x.shape, self.blas.asynchronous
        size = max(_SUMMED, x.size // _SUMS) if on_device else _WIDE // max(1, cols)
        if size < 2 or rows <= size or not x.flags.c_contiguous:
            return x.sum(axis=0)
        parts = x[: rows // size * size].reshape(-1, size, cols)
        return parts.sum(axis=int(on_device)).sum(axis=0) + x[len(parts) * size :].sum(axis=0)

    def _means(self, x: Any) -> Any:
        return self._column_sums(x)[None] / len(x)

    def _scratch(self, like: Any) -> Any:
        """Return row-major scratch memory, which the next call reuses: new memory costs page faults."""
        if self.blas.asynchronous:
            return self.xp.empty(like.shape, like.dtype)
        if self._spare.dtype != like.dtype or self._spare.size < like.size:
            self._spare = self.xp.empty(like.size, like.dtype)
        return self._spare[: like.size].reshape(like.shape)

    def _zeros(self, like: Any) -> Any:
        zeros = self.blas.empty(like.shape, like.dtype)
        zeros[...] = 0
        return zeros

    def _copy(self, a: Any) -> Any:
        copied = self.blas.empty(a.shape, a.dtype)
        copied[...] = a
        return copied

    def _svd(self, r: Any) -> tuple[Any, Any, Any]:
        try:
            return self.blas.svd(r, vectors=True)
        except np.linalg.LinAlgError as error:
            raise MatrixError(f"svd of A: {error}; scale A, or compute in a wider type") from error

    def _svdvals(self, r: Any) -> Any:
        if not self._is_finite(r):  # LAPACK has an error for these
            return self.xp.full(min(r.shape), np.nan, r.real.dtype)
        return self.blas.svd(r, vectors=False)[1]

    def _inverted(self, s: Any, rtol: float) -> Any:
        """Return reciprocals, zero for values up to `rtol` times the largest."""
        with np.errstate(divide="ignore"):
            return self.xp.where(s > s[:1] * s.dtype.type(rtol), 1 / s, 0) if len(s) else s

    def _check_rank(self, r: Any, rows: int) -> None:
        """Raise if a diagonal element of R is no more than rounding of its column."""
        size, norms = abs(self.blas.host(self.blas.diagonal(r))), self.blas.host(self.xp.linalg.norm(r, axis=0))
        low = size <= rows * np.finfo(norms.dtype).eps * norms
        if low.any():
            eps = float(np.finfo(norms.dtype).eps)
            raise MatrixError(singular(int(np.argmax(low)), max(rows, len(r)) * eps, rank=True))

    def _inverse(self, r: Any) -> Any:
        """Return the inverse of an upper triangular matrix, column-major."""
        inverse = self.blas.empty(r.shape, r.dtype)
        inverse[...] = self.xp.eye(len(r), dtype=r.dtype)
        self.solve(r, inverse)
        return inverse

    def _divide_into(self, a: Any, r: Any, out: Any) -> None:
        """Write A R^-1 into a row-major matrix, which may be A."""
        if not self.blas.asynchronous:
            if out is not a:
                out[...] = a
            self.blas.trsm(r, out.T, right=False, lower=False, op="T", unit=False)
            return
        # GPUs multiply many times as fast as they solve (1 H200, float64, 2097152 x 256: 4 ms, cuBLAS' trsm 50).
        inverse, well_conditioned = self._inverse_of(r)
        quotient = self.xp.matmul(a, inverse, out=None if out is a else out)
        if not well_conditioned:
            # One step of iterative refinement, which is enough (Higham 2002, section 12.2).
            quotient += (a - quotient @ r) @ inverse
        if quotient is not out:
            out[...] = quotient

    def _inverse_of(self, r: Any) -> tuple[Any, bool]:
        """Return the inverse of a triangle, and whether multiplying by it is as accurate as solving."""
        if id(r) not in self._inverses:
            inverse, norms = self._inverse(r), self.xp.linalg.norm(r, axis=0)
            errors = norms @ abs(inverse)
            loss = self.blas.host(self.xp.maximum(errors.max(), ((errors @ abs(r)) / norms).max()))
            self._inverses[id(r)] = r, inverse, bool(loss <= _WELL)
        return self._inverses[id(r)][1:]
