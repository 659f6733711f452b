"""The kernels of iterative solvers: vectors in a rank's rows, and numbers on the host, which say what is done next."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.errors import not_finite
from dask_distmm.errors import MatrixError
from dask_distmm.numeric.epilogs import call_function
from dask_distmm.programs.iterative import EXPONENTIAL, LANCZOS, NUMBERS

# Rows of a column that a GPU's block of threads adds up at least, and sums that there are of parts of rows.
_SUMMED, _SUMS = 32, 2**16


def _rotation(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Return c, s, r of a Givens rotation, stably (Choi 2006)."""
    r = np.hypot(a, b)
    return (a / r, b / r, r) if r else (np.float64(1), np.float64(0), r)


def _length(a: Any, b: Any) -> Any:
    """Return the length of (a, b) as an exact kernel may: the C library's `hypot` depends on the machine."""
    low, high = np.minimum(abs(a), abs(b)), np.maximum(abs(a), abs(b))
    ratio = low / high if 0 < high < np.inf else np.float64(0)
    return high * np.sqrt(1 + ratio * ratio)


def _squares(x: Any) -> Any:
    """Return squared moduli as an exact kernel may."""
    return x.real * x.real + x.imag * x.imag


def _left_of(sums: Any, count: int) -> Any:
    """Return what is left of |w|^2, the last sum, without the components of w along the first vectors of a basis."""
    # An exact kernel adds one after the other.
    return sums[0, -1].real - _squares(sums[0, :count]).cumsum()[-1]


class IterationKernels:
    """Those of `programs.iterative`."""

    blas: Kernels
    xp: Any
    _report: Callable[[Any, Any], None]

    # Vectors. What they are multiplied by is the first of some numbers.

    def put(self, piece: Any, part: Any, *, at: int) -> None:
        """Copy a chunk of rows to its place in a rank's rows."""
        part[at : at + len(piece)] = piece

    def take(self, part: Any, piece: Any, *, at: int) -> None:
        """Copy a chunk of rows from its place in a rank's rows, of as many columns as it has."""
        piece[...] = part[at : at + len(piece), : piece.shape[1]]

    def apply(self, x: Any, y: Any, *, at: int, size: int, **given: Any) -> None:
        """Y = A X of a user's function in place of A, in the rows of a chunk."""
        y[at : at + size] = self._applied(x, (size, x.shape[1]), y.dtype, size=size, **given)

    def add_applied(self, x: Any, y: Any, *, at: int, size: int, **given: Any) -> None:
        """Y += A^H X of a user's function in place of A^H, of the rows of a chunk."""
        y += self._applied(x[at : at + size], y.shape, y.dtype, size=size, **given)

    def _applied(
        self, x: Any, shape: tuple[int, int], dtype: Any, *, function: bytes, role: str, first: int, size: int
    ) -> Any:
        """Return what a user's function makes of X for some rows, which has to have a shape and a type."""
        rows, given = slice(first, first + size), x.view()
        if self.xp is np:
            given.flags.writeable = False
        found = call_function(function, role, given, rows)
        fits = found.shape == shape or (shape[1] == 1 and found.shape == shape[:1])
        if not fits or not np.can_cast(found.dtype, dtype, "same_kind"):
            raise MatrixError(
                f"the function given as {role} returned {found.dtype} of shape {found.shape} for rows {first} to "
                f"{first + size} and x of shape {x.shape}; expected {dtype} of shape {shape}"
            )
        return found.reshape(shape)

    def call_back(self, x: Any, *, function: bytes, ratio: tuple[int, int] | None = None) -> None:
        """Call a user's function with a copy of a vector, or with the ratio of two numbers of a solver."""
        call_function(function, "callback", float(x[0, ratio[0]] / x[0, ratio[1]]) if ratio else x[:, 0].copy())

    def total(self, total: Any, *parts: Any) -> None:
        """Add up, in the order of ranks."""
        total[...] = parts[0]
        for part in parts[1:]:
            total += part

    def dots(self, out: Any, *vectors: Any) -> None:
        """Dot products of pairs of vectors."""
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        # Without a preconditioner some pairs are the same.
        distinct = {(id(x), id(y)): (x, y) for x, y in pairs}
        found = dict(zip(distinct, self.blas.dots(*itertools.chain(*distinct.values())), strict=True))
        out[0] = [found[id(x), id(y)] for x, y in pairs]

    def axpy(self, numbers: Any, x: Any, y: Any, *, at: int = 0, sign: int = 1) -> None:
        """Y += a X, or Y -= a X."""
        self.blas.axpby(sign * numbers[0, at].item(), x, 1, y)

    def xpay(self, numbers: Any, x: Any, y: Any, *, at: int = 0) -> None:
        """Y = X + a Y."""
        self.blas.axpby(1, x, numbers[0, at].item(), y)

    def combine(self, numbers: Any, y: Any, *vectors: Any, at: int = 0) -> None:
        """Y = a X + b Z + ..."""
        for number, x in enumerate(vectors, at):
            if number == at:
                self.xp.multiply(x, numbers[0, number].item(), out=y)
            else:
                self.blas.axpby(numbers[0, number].item(), x, 1, y)

    def add_squares(self, numbers: Any, x: Any, y: Any, *, at: int = 0) -> None:
        """Y += (a X)^2, by elements."""
        y += (numbers[0, at].item() * x) ** 2

    def scale(self, numbers: Any, x: Any, *, at: int = 0) -> None:
        """X = a X; zero if a is."""
        factor = numbers[0, at].item()
        if factor == 0:
            x[...] = 0
        elif factor != 1:
            x *= factor

    def subtract(self, x: Any, y: Any) -> None:
        """Y -= X."""
        y -= x

    def diagonal_times(self, d: Any, x: Any, y: Any, *, at: int) -> None:
        """Y = D X, in the rows of a chunk."""
        rows = slice(at, at + len(d))
        self.xp.multiply(d, x[rows], out=y[rows])

    # The exponential function of a matrix

    def column_sums(self, out: Any, *matrices: Any) -> None:
        """Add up the moduli of columns."""
        for row, x in zip(out, matrices, strict=True):
            row[:] = self.blas.host(abs(x).sum(axis=0, dtype=row.dtype))

    def add_polynomial(self, y: Any, *powers: Any, factors: Sequence[float], places: Sequence[Sequence[int]]) -> None:
        """Y += c I + a A + b B + ...; the identity's rows are those of chunks, from a row here and a row of all on."""
        for factor, power in zip(factors[1:], powers, strict=True):
            if factor:
                y += factor * power
        for at, first, size in places if factors[0] else ():
            rows = self.xp.arange(size)
            y[at + rows, first + rows] += y.dtype.type(factors[0])

    def exponential_start(self, sums: Any, state: Any, *, limit: float, most: int, finite: bool) -> None:
        """Find how often the polynomial is squared: powers of A divided by that power of two have norms below it."""
        first, square, cube = sums.max(axis=1, initial=0).tolist()
        if finite and not math.isfinite(first):
            raise MatrixError(not_finite("A", option=False))
        count = 0
        if math.isfinite(square) and math.isfinite(cube):
            for power, ratio in ((2, square / (limit * limit)), (3, cube / (limit * limit * limit))):
                # The ratio is below two to this power; without logarithms that is exact.
                _, exponent = math.frexp(ratio)
                count = min(most, max(count, -(-exponent // power)))
        elif finite:
            raise MatrixError("powers of A overflow, and so would its exponential: A has too large elements")
        state[0, : len(EXPONENTIAL)] = [*(math.ldexp(1, -power * count) for power in (1, 2, 3)), count + 1]

    def exponential_next(self, state: Any, go: Any) -> None:
        """Say whether another square is to come after this."""
        state[0, EXPONENTIAL.index("left")] -= 1
        go[...] = state[0, EXPONENTIAL.index("left")] > 0

    def info(self, state: Any, info: Any, *, count: int, met: int, most: int) -> None:
        """0 if the limit was met before the last turn, else the number of turns, as SciPy has it."""
        turns = int(state[0, count].real)
        info[...] = 0 if state[0, met].real and turns < most else max(1, turns)

    def advance(self, *arguments: Any, step: str, reads: int, **options: Any) -> None:
        """Compute the numbers of a solver anew, behind the arguments that are read, and what comes after them."""
        names, state = NUMBERS[step.partition("_")[0]], arguments[reads]
        s = types.SimpleNamespace(**dict(zip(names, state[0], strict=False)))
        come = _STEPS[step](s, *arguments[:reads], *arguments[reads + 1 :], **options)
        if isinstance(come, tuple):
            self._report(*come)
        elif come is not None:
            self.reached = come
        state[0, : len(names)] = [getattr(s, name) for name in names]

    # Those whose numbers may differ between machines.
    advance_inexactly = advance

    # A basis of vectors, of which the first columns are there

    def project(self, out: Any, state: Any, basis: Any, w: Any) -> None:
        """Products of a vector with those of a basis, and at last with itself."""
        count = int(state[0, 0]) + 1
        out[...] = 0
        found = basis[:, :count].conj().T @ w
        out[0, :count], out[0, -1] = self.blas.host(found)[:, 0], self.blas.dots(w, w)[0]

    def orthogonalize(self, sums: Any, state: Any, basis: Any, w: Any) -> None:
        """W -= V H, of the products with V."""
        count = int(state[0, 0]) + 1
        w -= basis[:, :count] @ self.xp.asarray(sums[0, :count, None], w.dtype)

    def put_column(self, state: Any, w: Any, basis: Any) -> None:
        """Make a vector one of a basis."""
        basis[:, int(state[0, 0])] = w[:, 0]

    def gmres_solve(self, state: Any, triangle: Any, side: Any, y: Any) -> None:
        """Solve with the triangle; what is singular is left out."""
        count = int(state[0, 0])
        y[...] = 0
        y[0, :count] = side[0, :count]
        for row in range(count - 1, -1, -1):
            pivot = triangle[row, row]
            y[0, row] = y[0, row] / pivot if pivot else 0
            y[0, :row] -= y[0, row] * triangle[:row, row]

    def basis_add(self, y: Any, basis: Any, x: Any) -> None:
        """X += V Y."""
        x += basis[:, : y.shape[1]] @ self.xp.asarray(y.T, x.dtype)

    # Eigenvalues of Hermitian matrices

    def draw(self, part: Any, *, at: int, size: int, seed: Sequence[int]) -> None:
        """Fill rows with normally distributed numbers, the same on CPUs and GPUs."""
        random = np.random.default_rng(seed)
        found = random.standard_normal((size, 1))
        if part.dtype.kind == "c":
            found = found + 1j * random.standard_normal((size, 1))
        part[at : at + size] = self.xp.asarray(found, part.dtype)

    def rotate_basis(self, state: Any, vectors: Any, basis: Any) -> None:
        """Have those combinations of a basis that stay, and the next vector behind them."""
        count, kept = (int(state[0, LANCZOS.index(name)]) for name in ("count", "kept"))
        last = basis[:, count].copy()
        basis[:, :kept] = basis[:, :count] @ self.xp.asarray(vectors[:count, :kept], basis.dtype)
        basis[:, kept] = last

    def lanczos_vector(self, state: Any, basis: Any, w: Any, *, seed: Sequence[int]) -> None:
        """Take the next vector of a basis, or draw one where its span is invariant."""
        broken, kept, turns = (int(state[0, LANCZOS.index(name)]) for name in ("broken", "kept", "turns"))
        if broken:
            self.draw(w, at=0, size=len(w), seed=(*seed, turns))
        else:
            w[:, 0] = basis[:, kept]

    # LOBPCG: X, the preconditioned residuals and the last step side by side

    def lobpcg_gram(self, out: Any, s: Any, image: Any) -> None:
        """Compute S^H S and S^H A S."""
        out[:, : s.shape[1]] = self.blas.host(s.conj().T @ s)
        out[:, s.shape[1] :] = self.blas.host(s.conj().T @ image)

    def lobpcg_ritz(self, grams: Any, values: Any, rotation: Any, *, largest: bool, eps: float) -> None:
        """Have the wanted Ritz values, and the combinations of S that are X and the next step."""
        if not np.isfinite(grams).all():
            raise MatrixError(not_finite("a", option=False))
        size, k = len(grams), values.shape[1]
        norms = np.sqrt(np.diagonal(grams).real)
        scale = np.where(norms > 0, 1 / norms, 0)
        gram, image = (x * scale * scale[:, None] for x in (grams[:, :size], grams[:, size:]))
        squares, basis = np.linalg.eigh((gram + gram.conj().T) / 2)
        kept = squares > eps**0.75
        if kept.sum() < k:
            raise MatrixError(f"X must have independent columns: {kept.sum()} of {k} are")
        basis = basis[:, kept] / np.sqrt(squares[kept])
        image = basis.conj().T @ image @ basis
        found, y = np.linalg.eigh((image + image.conj().T) / 2)
        order = np.argsort(-found if largest else found, kind="stable")[:k]
        x = basis @ y[:, order]
        # The next step has nothing of the last X, is orthogonal to the next X, and orthonormal.
        step = x.copy()
        step[:k] = 0
        for _ in range(2):
            step -= x @ (x.conj().T @ (gram @ step))
        squares, y = np.linalg.eigh(step.conj().T @ gram @ step)
        with np.errstate(all="ignore"):
            step = step @ (y * np.where(squares > eps * max(squares[-1], eps), 1 / np.sqrt(squares), 0))
        values[0] = found[order]
        rotation[:, :k], rotation[:, k:] = x * scale[:, None], step * scale[:, None]

    def lobpcg_update(self, rotation: Any, values: Any, s: Any, image: Any, r: Any) -> None:
        """Have X, the last step and the residuals."""
        k = r.shape[1]
        c = self.xp.asarray(rotation, s.dtype)
        for one in (s, image):
            both = one @ c
            one[:, :k], one[:, 2 * k :] = both[:, :k], both[:, k:]
        r[...] = image[:, :k] - s[:, :k] * self.xp.asarray(values, s.real.dtype)

    def _column_sums(self, x: Any) -> Any:
        """Return the sums of columns. CuPy has a block of threads for each, or for some: parts of rows come first."""
        (rows, cols), size = x.shape, max(_SUMMED, x.size // _SUMS)
        if not self.blas.asynchronous or rows <= size or not x.flags.c_contiguous:
            return x.sum(axis=0)
        parts = rows // size
        return x[: parts * size].reshape(parts, size, cols).sum(axis=1).sum(axis=0) + x[parts * size :].sum(axis=0)

    def column_squares(self, out: Any, r: Any) -> None:
        """Compute the squared norms of columns."""
        out[0] = self.blas.host(self._column_sums(abs(r) ** 2))

    def block_products(self, out: Any, s: Any, w: Any) -> None:
        """Compute X^H W."""
        out[...] = self.blas.host(s[:, : w.shape[1]].conj().T @ w)

    def subtract_block(self, products: Any, s: Any, w: Any) -> None:
        """W -= X (X^H W)."""
        w -= s[:, : w.shape[1]] @ self.xp.asarray(products, w.dtype)

    def put_block(self, w: Any, s: Any, *, at: int) -> None:
        """Have vectors in the place of others."""
        s[:, at : at + w.shape[1]] = w

    def row(self, state: Any, out: Any, *, at: Sequence[int]) -> None:
        """Copy some of the numbers."""
        out[0] = state[0, list(at)]


# The numbers `s` of a solver, by their names: what each step makes of sums over all ranks, and of other numbers. They
# are NumPy's scalars: dividing by zero gives infinity. Some steps return a residual and its limit, or the share of all
# that is done.

# Conjugate gradients


def cg_start(s: Any, sums: Any, go: Any, *, rtol: float, atol: float) -> Any:
    """Numbers from |b|^2, |r|^2, r^H M r. The factor is what x0 is multiplied by: 0 where b is."""
    bb, rr, s.rho = sums[0]
    s.limit, s.factor = max(atol, rtol * np.sqrt(bb.real)), bb / bb if bb else 0.0
    return _cg_go(s, rr if bb else bb, go)


def cg_step(s: Any, sums: Any) -> None:
    """Compute alpha from p^H A p."""
    s.broken = not sums[0, 0]
    s.factor = 0.0 if s.broken else s.rho / sums[0, 0]


def cg_next(s: Any, sums: Any, go: Any) -> Any:
    """Compute beta from |r|^2, r^H M r, and whether to go on."""
    rr, rho = sums[0]
    s.factor, s.rho, s.count = rho / s.rho, rho, s.count + 1
    return _cg_go(s, rr, go)


def _cg_go(s: Any, rr: Any, go: Any) -> Any:
    norm = np.sqrt(abs(rr.real))
    s.met = norm < s.limit.real or norm == 0
    # An infinite or NaN value, or a divisor of zero, ends the loop.
    go[...] = not s.met and s.rho != 0 and np.isfinite(s.rho) and np.isfinite(norm) and not s.broken
    return norm, s.limit.real


# MINRES (Paige, Saunders 1975), with the tests of SciPy's


def minres_start(s: Any, sums: Any, go: Any, *, shift: float) -> None:
    """Numbers from r^H M r and |b|^2."""
    s.minus_shift = -shift
    square, bb = sums[0].real
    if square < 0:
        raise MatrixError("M must be positive definite: r^H M r is negative")
    s.beta1 = s.beta = s.phibar = s.rhs1 = np.sqrt(square)
    s.gmin, s.cs = np.finfo(np.float64).max, -1.0
    s.over_beta = 1 / s.beta if s.beta else 0.0
    s.keep = bb / bb if bb else 0.0
    s.met = s.beta == 0 or bb == 0
    go[...] = not s.met and np.isfinite(s.beta) and np.isfinite(bb)


def minres_alpha(s: Any, sums: Any) -> None:
    """Compute the factor of r2, from v^H A v."""
    s.alpha = sums[0, 0].real
    s.minus_alpha = -s.alpha / s.beta


def minres_rotate(s: Any, sums: Any, *, eps: float) -> None:
    """Compute the factors of w and x, from r2^H M r2."""
    square = sums[0, 0].real
    if square < 0:
        raise MatrixError("M must be positive definite: r^H M r is negative")
    old, s.beta = s.beta, np.sqrt(square)
    s.over_beta = 1 / s.beta if s.beta else 0.0
    s.minus_beta = -s.beta / old
    s.tnorm2 += s.alpha * s.alpha + old * old + s.beta * s.beta
    s.count += 1
    if s.count == 1 and s.beta / s.beta1 <= 10 * eps:
        s.stop = -1
    s.minus_epsln = -s.epsln
    delta = s.cs * s.dbar + s.sn * s.alpha
    s.gbar = s.sn * s.dbar - s.cs * s.alpha
    s.epsln = s.sn * s.beta
    s.dbar = -s.cs * s.beta
    s.root = _length(s.gbar, s.dbar)
    gamma = max(_length(s.gbar, s.beta), np.float64(eps))
    s.cs, s.sn = s.gbar / gamma, s.beta / gamma
    s.phi = s.cs * s.phibar
    s.phibar *= s.sn
    s.over_gamma, s.minus_epsln, s.minus_delta = 1 / gamma, s.minus_epsln / gamma, -delta / gamma
    s.gmax, s.gmin = max(s.gmax, gamma), min(s.gmin, gamma)
    z = s.rhs1 / gamma
    s.rhs1, s.rhs2 = s.rhs2 - delta * z, -s.epsln * z


def minres_test(s: Any, sums: Any, go: Any, *, rtol: float, eps: float, maxiter: int) -> Any:
    """Whether to go on, from |x|^2."""
    size, norm = np.sqrt(sums[0, 0].real), np.sqrt(s.tnorm2)
    compatible = s.phibar / (norm * size) if norm * size else np.inf
    least = s.root / norm if norm else np.inf
    stop = int(s.stop)
    if not stop and np.isfinite(norm * size):
        for reached, number in (
            (1 + least <= 1, 2),
            (1 + compatible <= 1, 1),
            (s.count >= maxiter, 6),
            (s.gmax / s.gmin >= 0.1 / eps, 4),
            (norm * size * eps >= s.beta1, 3),
            (least <= rtol, 2),
            (compatible <= rtol, 1),
        ):
            stop = number if reached else stop
    s.stop, s.met = stop, stop not in (0, 6)
    go[...] = not stop and np.isfinite(s.phibar) and np.isfinite(norm * size)
    return min(least, compatible), rtol


# Golub-Kahan bidiagonalization, of LSQR and LSMR


def bidiagonal_beta(s: Any, sums: Any) -> None:
    """Compute the factors of u and v, from |u|^2."""
    s.beta = np.sqrt(sums[0, 0].real)
    s.over_beta, s.minus_beta = (1 / s.beta, -s.beta) if s.beta else (0.0, 1.0)


def bidiagonal_alpha(s: Any, square: Any) -> None:
    """Compute the norm of v from its square, if it has changed."""
    s.over_alpha = 1.0
    if s.beta != 0:
        s.alpha = np.sqrt(square[0, 0].real)
        s.over_alpha = 1 / s.alpha if s.alpha else 1.0
    s.minus_alpha = -s.alpha


def lsqr_start(s: Any, sums: Any, go: Any) -> None:
    """Numbers from |b|^2."""
    s.normb = np.sqrt(sums[0, 1].real)
    s.rhobar = s.old_alpha = s.alpha
    s.phibar = s.beta
    s.r1norm = s.r2norm = s.beta
    s.normar, s.cs2 = s.alpha * s.beta, -1.0
    go[...] = s.normar != 0 and np.isfinite(s.normar)


def lsqr_rotate(
    s: Any, square: Any, go: Any, *, damp: float, atol: float, btol: float, conlim: float, maxiter: int, eps: float
) -> Any:
    """Compute the factors of x and w, and whether to go on, from |w|^2."""
    s.count += 1
    if s.beta > 0:
        s.norma = np.sqrt(s.norma**2 + s.old_alpha**2 + s.beta**2 + damp**2)
    rhobar1, psi = s.rhobar, 0.0
    if damp > 0:
        rhobar1 = np.hypot(s.rhobar, damp)
        psi = damp / rhobar1 * s.phibar
        s.phibar *= s.rhobar / rhobar1
    cs, sn, rho = _rotation(rhobar1, s.beta)
    theta, s.rhobar = sn * s.alpha, -cs * s.alpha
    phi, s.phibar = cs * s.phibar, sn * s.phibar
    s.of_w, s.minus_theta, s.over_rho = phi / rho, -theta / rho, 1 / rho
    s.ddnorm += square[0, 0].real / rho**2
    delta, gambar = s.sn2 * rho, -s.cs2 * rho
    rhs = phi - delta * s.z
    s.normx = np.sqrt(s.xxnorm + (rhs / gambar) ** 2)
    gamma = np.hypot(gambar, theta)
    s.cs2, s.sn2, s.z = gambar / gamma, theta / gamma, rhs / gamma
    s.xxnorm += s.z**2
    s.conda = s.norma * np.sqrt(s.ddnorm)
    s.res2 += psi**2
    s.r2norm = np.hypot(s.phibar, np.sqrt(s.res2))
    s.normar = s.alpha * abs(sn * phi)
    square = s.r2norm**2 - damp**2 * s.xxnorm
    s.r1norm = np.copysign(np.sqrt(abs(square)), square) if damp > 0 else s.r2norm
    tests = s.r2norm / s.normb, s.normar / (s.norma * s.r2norm + eps), 1 / (s.conda + eps)
    s.stop = _stop_of_least_squares(s, *tests, atol, btol, conlim, s.count >= maxiter)
    s.old_alpha = s.alpha
    go[...] = not s.stop and np.isfinite(s.r2norm)
    return _nearest(*tests[:2], atol, btol)


def lsmr_start(s: Any, sums: Any, go: Any) -> None:
    """Numbers from |b|^2."""
    s.normb = np.sqrt(sums[0, 1].real)
    s.zetabar, s.alphabar = s.alpha * s.beta, s.alpha
    s.rho = s.rhobar = s.cbar = s.rhodold = s.conda = 1.0
    s.betadd = s.normr = s.beta
    s.norma2, s.norma = s.alpha**2, s.alpha
    s.minrbar, s.normar = 1e100, s.alpha * s.beta
    go[...] = s.normar != 0 and s.normb != 0 and np.isfinite(s.normar) and np.isfinite(s.normb)


def lsmr_rotate(s: Any, *, damp: float) -> None:
    """Compute the factors of hbar, x and h, and norms."""
    s.count += 1
    chat, shat, alphahat = _rotation(s.alphabar, np.float64(damp))
    rhoold, rhobarold, zetaold = s.rho, s.rhobar, s.zeta
    c, sn, s.rho = _rotation(alphahat, s.beta)
    thetanew, s.alphabar = sn * s.alpha, c * s.alpha
    thetabar, rhotemp = s.sbar * s.rho, s.cbar * s.rho
    s.cbar, s.sbar, s.rhobar = _rotation(rhotemp, thetanew)
    s.zeta, s.zetabar = s.cbar * s.zetabar, -s.sbar * s.zetabar
    s.of_hbar_before = -thetabar * s.rho / (rhoold * rhobarold)
    s.of_hbar = s.zeta / (s.rho * s.rhobar)
    s.of_h = -thetanew / s.rho
    acute, check = chat * s.betadd, -shat * s.betadd
    betahat, s.betadd = c * acute, -sn * acute
    thetatildeold = s.thetatilde
    ctilde, stilde, rhotilde = _rotation(s.rhodold, thetabar)
    s.thetatilde, s.rhodold = stilde * s.rhobar, ctilde * s.rhobar
    s.betad = -stilde * s.betad + ctilde * betahat
    s.tautilde = (zetaold - thetatildeold * s.tautilde) / rhotilde
    taud = (s.zeta - s.thetatilde * s.tautilde) / s.rhodold
    s.d += check**2
    s.normr = np.sqrt(s.d + (s.betad - taud) ** 2 + s.betadd**2)
    s.norma2 += s.beta**2
    s.norma = np.sqrt(s.norma2)
    s.norma2 += s.alpha**2
    s.maxrbar = max(s.maxrbar, rhobarold)
    s.minrbar = min(s.minrbar, rhobarold) if s.count > 1 else s.minrbar
    s.conda = max(s.maxrbar, rhotemp) / min(s.minrbar, rhotemp)
    s.normar = abs(s.zetabar)


def lsmr_test(s: Any, square: Any, go: Any, *, atol: float, btol: float, conlim: float, maxiter: int) -> Any:
    """Whether to go on, from |x|^2."""
    s.normx = np.sqrt(square[0, 0].real)
    product = s.norma * s.normr
    tests = s.normr / s.normb, s.normar / product if product else np.inf, 1 / s.conda
    s.stop = _stop_of_least_squares(s, *tests, atol, btol, conlim, s.count >= maxiter)
    go[...] = not s.stop and np.isfinite(s.normr)
    return _nearest(*tests[:2], atol, btol)


# GMRES


def gmres_start(s: Any, sums: Any, go: Any, inside: Any, *, rtol: float, atol: float) -> None:
    """Numbers from the squares of |b|, |r|, |M r| and |M b|."""
    b, r, z, right = np.sqrt(sums[0].real)
    s.limit, s.factor, s.normb = max(np.float64(atol), rtol * b), 1.0, b
    s.goal = right * min(1.0, s.limit / b)
    s.keep = b / b if b else 0.0
    s.start, s.scale = z, 1 / z if z else 0.0
    s.met = b == 0 or r < s.limit or r == 0
    go[...] = inside[...] = not s.met and z != 0 and np.isfinite(z) and np.isfinite(b)


def gmres_rotate(
    s: Any, first: Any, second: Any, inside: Any, triangle: Any, rotations: Any, side: Any, *, eps: float
) -> None:
    """Take a column of the Hessenberg matrix into its triangle; say whether to go on in this cycle."""
    at = int(s.column)
    column = triangle[:, at]
    column[...] = 0
    column[: at + 1] = first[0, : at + 1] + second[0, : at + 1]
    below = np.sqrt(max(0.0, _left_of(second, at + 1)))
    s.broken = below <= eps * np.sqrt(first[0, -1].real)
    s.scale = 0.0 if s.broken else 1 / below
    if at == 0:
        side[...] = 0
        side[0, 0] = s.start
    for row in range(at):
        c, sn = rotations[row]
        one, other = column[row], column[row + 1]
        column[row], column[row + 1] = c * one + sn * other, c * other - np.conj(sn) * one
    size, below = _length(column[at].real, column[at].imag), 0.0 if s.broken else below
    radius = _length(size, below)
    phase = column[at] / size if size else 1.0
    c, sn = (size / radius, phase * below / radius) if radius else (1.0, 0.0)
    rotations[at], column[at] = (c, sn), phase * radius
    side[0, at], side[0, at + 1] = c * side[0, at], -np.conj(sn) * side[0, at]
    s.residual = _length(side[0, at + 1].real, side[0, at + 1].imag)
    s.column += 1
    inside[...] = s.residual > s.goal and not s.broken and np.isfinite(s.residual)


def gmres_restart(s: Any, sums: Any, go: Any, inside: Any, *, eps: float) -> Any:
    """Say whether to go on, and how near, from the squares of |r| and |M r| (as SciPy does)."""
    r, z = np.sqrt(sums[0].real)
    s.count += 1
    s.met = r <= s.limit
    s.factor = max(eps, s.factor / 4) if s.residual <= s.goal else min(1.0, 1.5 * s.factor)
    s.goal = s.residual * min(s.factor, s.limit / r)
    s.start, s.scale, s.column = z, 1 / z if z else 0.0, 0
    go[...] = inside[...] = not s.met and not s.broken and z != 0 and np.isfinite(z) and np.isfinite(r)
    return r, s.limit


# Eigenvalues of Hermitian matrices


def lanczos_start(s: Any, sums: Any, go: Any, inside: Any) -> None:
    """Numbers from |v0|^2."""
    size = np.sqrt(sums[0, 0].real)
    if not np.isfinite(size) or not size:
        raise MatrixError("v0 must be finite and not zero")
    s.scale = 1 / size
    go[...] = inside[...] = True


def lanczos_step(s: Any, first: Any, second: Any, inside: Any, small: Any, *, eps: float, n: int) -> None:
    """Have a row and a column of the projected matrix, and the norm of what is left."""
    at = int(s.column)
    column = first[0, : at + 1] + second[0, : at + 1]
    small[: at + 1, at], small[at, : at + 1] = column, column.conj()
    small[at, at] = column[at].real
    s.beta = np.sqrt(max(0.0, _left_of(second, at + 1)))
    # The remainder may only be small.
    s.norm = max(s.norm, np.sqrt(_squares(small).max()))
    s.broken = s.beta <= 10 * eps * s.norm or at + 1 >= n
    s.scale = 0.0 if s.broken else 1 / s.beta
    s.column += 1
    inside[...] = not s.broken and np.isfinite(s.beta) and s.column < len(small)


def lanczos_restart(s: Any, *arrays: Any, which: str, tol: float, maxiter: int, eps: float, n: int) -> Any:
    """Decide which vectors stay, and whether those that are wanted have converged."""
    go, inside, small, vectors, values = arrays
    count, k, most = int(s.column), values.shape[1], len(small)
    if not np.isfinite(small).all():
        raise MatrixError(not_finite("a", option=False))
    s.turns, s.count = s.turns + 1, count
    inside[...] = True
    vectors[...] = 0
    if s.broken and count < min(most, n):
        # An invariant subspace: all of it stays, and another vector is drawn.
        np.fill_diagonal(vectors[:count, :count], 1)
        s.kept, s.column = count, count - 1
        return None
    found, y = _separated(*np.linalg.eigh(small[:count, :count]), 4 * eps * s.norm)
    order = _wanted(found, which)
    errors = s.beta * abs(y[-1, order[:k]])
    limits = tol * np.maximum(eps ** (2 / 3), abs(found[order[:k]]))
    converged = (errors <= np.maximum(limits, eps * s.norm)) | bool(s.broken)
    if not converged.all() and s.turns >= maxiter:
        raise MatrixError(
            f"{converged.sum()} of {k} eigenvalues have converged after {maxiter} restarts: pass a larger "
            "maxiter=, ncv= or tol="
        )
    go[...] = not converged.all()
    kept = min(k + (most - k) // 2, most - 1) if go.all() else k
    chosen = order[:kept] if go.all() else np.sort(order[:k])
    vectors[:count, :kept] = y[:, chosen]
    small[...] = 0
    np.fill_diagonal(small[:kept, :kept], found[chosen])
    values[0] = found[chosen[:k]]
    s.kept, s.column = kept, kept - 1
    return float(converged.mean())


def lanczos_next(s: Any, second: Any) -> None:
    """Go on with a vector that is orthogonal to what is there."""
    square = _left_of(second, int(s.kept))
    s.scale = 1 / np.sqrt(square) if square > 0 else 0.0
    s.column = s.kept


def lobpcg_test(s: Any, sums: Any, go: Any, *, tol: float) -> Any:
    """Say whether a residual is still large."""
    s.worst = np.sqrt(sums[0].max())
    go[...] = s.worst > tol
    return s.worst, tol


_STEPS: dict[str, Callable[..., Any]] = {
    name: step for name, step in globals().items() if name.partition("_")[0] in NUMBERS
}


def _separated(values: Any, y: Any, gap: float) -> tuple[Any, Any]:
    """Have at most one vector of equal eigenvalues, the last one, with a component that has not converged."""
    start = 0
    for stop in [*(np.flatnonzero(np.diff(values) > gap) + 1), len(values)]:
        if stop - start > 1:
            rotation = np.linalg.qr(y[-1:, start:stop].conj().T, mode="complete")[0][:, ::-1]
            y[:, start:stop] = y[:, start:stop] @ rotation
            values[start:stop] = values[start:stop].mean()
        start = stop
    return values, y


def _wanted(values: Any, which: str) -> Any:
    """Return the order of ascending eigenvalues by how much they are wanted."""
    if which == "BE":
        both, half = np.arange(len(values)), len(values) // 2
        low, high = both[:half].copy(), half + np.argsort(-values[half:], kind="stable")
        both[::2], both[1::2] = high, low
        return both
    keys = {"LM": -abs(values), "SM": abs(values), "LA": -values, "SA": values}
    return np.argsort(keys[which], kind="stable")


def _nearest(test1: Any, test2: Any, atol: float, btol: float) -> tuple[Any, float]:
    """Return how near LSQR or LSMR is to the first of its limits that it may reach."""
    return min(test1 / btol if btol else np.inf, test2 / atol if atol else np.inf), 1.0


def _stop_of_least_squares(
    s: Any, test1: Any, test2: Any, test3: Any, atol: float, btol: float, conlim: float, last: Any
) -> int:
    """Return why LSQR or LSMR stops, as SciPy's istop has it; 0 to go on."""
    more = s.norma * s.normx / s.normb
    stop = 0
    for reached, number in (
        (last, 7),
        (1 + test3 <= 1, 6),
        (1 + test2 <= 1, 5),
        (1 + test1 / (1 + more) <= 1, 4),
        (test3 <= (1 / conlim if conlim > 0 else 0), 3),
        (test2 <= atol, 2),
        (test1 <= btol + atol * more, 1),
    ):
        stop = number if reached else stop
    return stop
