"""Iterative solvers as textbooks have them: each function is one run, with a product of A and a vector in each turn.

A is in chunks of rows, and vectors are in the same rows. The vector that A is multiplied by is on all ranks: they get
the rows of others with the sums of dot products, and continue it themselves, so that a turn of conjugate gradients is
two messages. Numbers, in double precision, are computed by all ranks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from dask_distmm.arrays.jit import jit
from dask_distmm.errors import MatrixError
from dask_distmm.tracing.control import while_loop
from dask_distmm.tracing.functions import UserFunction, adjoint_product, callback, product, replicated


class Solution(NamedTuple):
    """The solution of linear equations, and SciPy's info."""

    x: Any
    info: Any


def column(x: Any) -> Any:
    """Return a vector of a matrix with one column, if it is given."""
    return None if x is None else x[:, 0]


def dot(x: Any, y: Any) -> Any:
    """Return x^H y."""
    return x.conj() @ y


def square(x: Any, y: Any = None) -> Any:
    """Return |x|^2, or the real part of x^H y."""
    return dot(x, x if y is None else y).real.astype(np.float64)


def norm(x: Any) -> Any:
    """Return |x|."""
    return np.sqrt(square(x))


def over(x: Any, y: Any, instead: float = 0) -> Any:
    """Return x / y, or something else where y is 0."""
    return np.where(y == 0, instead, x / y)


def length(a: Any, b: Any) -> Any:
    """Return the length of (a, b), which are real, from operations that are exact everywhere, as `hypot` is not."""
    low, high = np.minimum(abs(a), abs(b)), np.maximum(abs(a), abs(b))
    ratio = np.where((high > 0) & (high < np.inf), low / high, 0)
    return high * np.sqrt(1 + ratio * ratio)


def first(*tests: tuple[Any, int]) -> Any:
    """Return the number of the first test that is passed; 0 if none is."""
    return functools.reduce(lambda rest, one: np.where(*one, rest), tests[::-1], 0)


def preconditioned(M: Any, r: Any) -> Any:
    """Return M r, of a matrix, its diagonal, a function, or none."""
    if M is None:
        return r
    if not isinstance(M, UserFunction) and M.shape[1] == 1 < len(M):
        return (M[:, 0] if r.ndim == 1 else M) * r
    return product(M, replicated(r), r)


def started(A: Any, b: Any, x0: Any, size: Any) -> tuple[Any, Any]:
    """Return the first x, and the residual; nothing is to be solved where b is 0."""
    x = np.zeros_like(b) if x0 is None else x0
    r = b if x0 is None else b - product(A, replicated(x), b)
    return x * over(size, size).astype(b.real.dtype), r


def tell(function: Any, x: Any) -> None:
    """Call the user's function, if there is one."""
    if function is not None:
        callback(function, x)


@jit
def cg(A: Any, b: Any, x0: Any, M: Any, function: Any, rtol: float, atol: float, maxiter: int) -> Solution:
    """Conjugate gradients (Hestenes, Stiefel 1952)."""
    b, x0 = column(b), column(x0)
    size = norm(b)
    limit = np.maximum(atol, rtol * size)
    x, r = started(A, b, x0, size)
    z = preconditioned(M, r)
    p, rho, residual = replicated(z), dot(r, z), np.where(size == 0, 0, norm(r))

    def turn(state: Any) -> Any:
        x, r, p, rho, *_, count = state
        q = product(A, p, b)
        curvature = dot(p, q)
        alpha = over(rho, curvature)
        x, r = x + alpha * p, r - alpha * q
        tell(function, x)
        z = preconditioned(M, r)
        last, rho, residual = rho, dot(r, z), norm(r)
        p = replicated(z) + rho / last * p
        return x, r, p, rho, residual, curvature != 0, count + 1

    def goes_on(state: Any) -> Any:
        # An infinite or NaN value, or a divisor of zero, ends the loop.
        *_, rho, residual, divides, count = state
        return (residual >= limit) & (residual > 0) & (rho != 0) & np.isfinite(rho) & divides & (count < maxiter)

    x, *_, residual, _, count = while_loop(goes_on, turn, (x, r, p, rho, residual, True, 0))
    met = ((residual < limit) | (residual == 0)) & (count < maxiter)
    return Solution(x, np.where(met, 0, np.maximum(count, 1)))


@jit
def minres(A: Any, b: Any, x0: Any, M: Any, function: Any, rtol: float, shift: float, maxiter: int) -> Solution:
    """MINRES (Paige, Saunders 1975), with the tests of SciPy's."""
    b, x0 = column(b), column(x0)
    eps, real = float(np.finfo(b.dtype).eps), b.real.dtype
    size = norm(b)
    x, r = started(A, b, x0, size)
    y = preconditioned(M, r)
    squared = square(r, y)
    beta1 = np.sqrt(squared)
    v = over(1, beta1).astype(real) * replicated(y)
    nothing, done = np.zeros_like(b), (beta1 == 0) | (size == 0)

    def turn(state: Any) -> Any:
        x, v, r1, r2, w1, w2, beta, ratio, epsln, dbar, phibar, cs, sn, tnorm2, gmax, gmin, *_, count = state
        y = product(A, v, b) - shift * v - ratio.astype(real) * r1
        alpha = square(v, y)
        r1, r2 = r2, y - (alpha / beta).astype(real) * r2
        y = preconditioned(M, r2)
        squared, last = square(r2, y), beta
        beta = np.sqrt(squared)
        v, before = over(1, beta).astype(real) * replicated(y), v
        tnorm2 = tnorm2 + alpha * alpha + last * last + beta * beta
        # The last rotation, and the next one.
        delta, gbar = cs * dbar + sn * alpha, sn * dbar - cs * alpha
        old, epsln, dbar = epsln, sn * beta, -cs * beta
        gamma = np.maximum(length(gbar, beta), eps)
        root, cs, sn = length(gbar, dbar), gbar / gamma, beta / gamma
        phi, phibar = cs * phibar, sn * phibar
        w1, w2 = w2, (before - old.astype(real) * w1 - delta.astype(real) * w2) * (1 / gamma).astype(real)
        x = x + phi.astype(real) * w2
        tell(function, x)
        gmax, gmin, count = np.maximum(gmax, gamma), np.minimum(gmin, gamma), count + 1
        xnorm, anorm = norm(x), np.sqrt(tnorm2)
        compatible, least = over(phibar, anorm * xnorm, np.inf), over(root, anorm, np.inf)
        stop = first(
            ((count == 1) & (beta <= 10 * eps * beta1), -1),
            (compatible <= rtol, 1),
            (least <= rtol, 2),
            (anorm * xnorm * eps >= beta1, 3),
            (gmax >= 0.1 / eps * gmin, 4),
            (count >= maxiter, 6),
            (1 + compatible <= 1, 1),
            (1 + least <= 1, 2),
        )
        finite, ratio = np.isfinite(phibar) & np.isfinite(anorm * xnorm), beta / last
        numbers = beta, ratio, epsln, dbar, phibar, cs, sn, tnorm2, gmax, gmin
        return x, v, r1, r2, w1, w2, *numbers, squared, np.minimum(least, compatible), finite, stop, count

    def goes_on(state: Any) -> Any:
        *_, near, finite, stop, count = state
        return (near > rtol) & finite & (stop == 0) & (count < maxiter)

    numbers = beta1, 0.0, 0.0, 0.0, beta1, -1.0, 0.0, 0.0, 0.0, np.finfo(np.float64).max
    state = x, v, nothing, r, nothing, nothing, *numbers, squared, np.inf, np.isfinite(beta1 + size), done * 1, 0
    x, *_, squared, _, _, stop, count = while_loop(goes_on, turn, state)
    callback(_check_positive, squared)
    return Solution(x, np.where((stop != 0) & (stop != 6), 0, np.maximum(count, 1)))


def _check_positive(squared: Any) -> None:
    if squared < 0:
        raise MatrixError("M must be positive definite: r^H M r is negative")


class LeastSquares(NamedTuple):
    """A least-squares solution, and the numbers that SciPy returns with it."""

    x: Any
    numbers: Any
    var: Any = None


def bidiagonalized(A: Any, adjoint: Any, u: Any, n: int) -> tuple[Any, Any]:
    """Return a step of Golub and Kahan's bidiagonalization, and its state: u, v, alpha, and the sums A^H u and |u|^2.

    u is in the rows of ranks and not yet divided by its norm; v is on all ranks.
    """
    real = u.real.dtype

    def step(state: Any, turn: Any) -> Any:
        """Continue; `turn` gets v, alpha and beta, before ranks send what is then added up: one message."""
        u, v, alpha, product_u, squared = state
        beta = np.sqrt(squared)
        v = over(1, beta).astype(real) * product_u - np.where(beta == 0, -1, beta).astype(real) * v
        size = norm(v)
        alpha = np.where(beta == 0, alpha, size)
        v = over(1, np.where(beta == 0, 0, alpha), 1).astype(real) * v
        found = turn(v, alpha, beta)
        u = product(A, v, u) - (alpha * over(1, beta)).astype(real) * u
        return (u, v, alpha, adjoint_product(adjoint or A, u, n), square(u)), found

    sums = adjoint_product(adjoint or A, u, n)
    return step, (u, np.zeros_like(sums), 0.0 * square(u), sums, square(u))


def rotation(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Return c, s, r of a Givens rotation, stably (Choi 2006)."""
    r = np.hypot(a, b)
    return over(a, r, 1), over(b, r), r


def stopped(tests: Any, more: Any, limits: Any, last: Any) -> tuple[Any, Any]:
    """Return why LSQR or LSMR stops, as SciPy's istop, and how far it is from the first limit that it may reach."""
    (test1, test2, test3), (atol, btol, conlim) = tests, limits
    stop = first(
        (test1 <= btol + atol * more, 1),
        (test2 <= atol, 2),
        (test3 <= (1 / conlim if conlim > 0 else 0), 3),
        (1 + test1 / (1 + more) <= 1, 4),
        (1 + test2 <= 1, 5),
        (1 + test3 <= 1, 6),
        (last, 7),
    )
    return stop, np.minimum(over(test1, btol + atol * more, np.inf), over(test2, atol, np.inf))


def goes_on(maxiter: int) -> Any:
    """Return the condition of LSQR and LSMR."""
    return lambda state: (state[-3] > 1) & (state[-2] == 0) & (state[-1] < maxiter)


@jit
def lsqr(
    A: Any, adjoint: Any, b: Any, r: Any, n: int, damp: float, limits: Any, maxiter: int, calc_var: bool
) -> LeastSquares:
    """LSQR (Paige, Saunders 1982)."""
    b, real, eps = column(b), b.real.dtype, float(np.finfo(b.dtype).eps)
    step, k = bidiagonalized(A, adjoint, b if r is None else column(r), n)
    normb = norm(b)
    k, (v, alpha, beta) = step(k, lambda *found: found)
    nothing = np.zeros_like(v)

    def turn(state: Any) -> Any:
        k, x, w, var, old, rhobar, phibar, norma, cs2, sn2, z, ddnorm, xxnorm, res2, *_, count = state

        def rotated(v: Any, alpha: Any, beta: Any) -> Any:
            norm_a = np.where(beta > 0, np.sqrt(norma**2 + old**2 + beta**2 + damp**2), norma)
            rhobar1 = np.hypot(rhobar, damp)
            psi, phibar1 = damp / rhobar1 * phibar, (rhobar / rhobar1 if damp > 0 else 1) * phibar
            cs, sn, rho = rotation(rhobar1 if damp > 0 else rhobar, beta)
            theta, phi = sn * alpha, cs * phibar1
            w1 = v - (theta / rho).astype(real) * w
            var1 = var + (w / rho.astype(real)) ** 2 if calc_var else var
            dd = ddnorm + square(w) / rho**2
            delta, gambar = sn2 * rho, -cs2 * rho
            rhs = phi - delta * z
            gamma = np.hypot(gambar, theta)
            normx, z1 = np.sqrt(xxnorm + (rhs / gambar) ** 2), rhs / gamma
            xx, conda, res = xxnorm + z1**2, norm_a * np.sqrt(dd), res2 + (psi**2 if damp > 0 else 0)
            phibar2 = sn * phibar1
            r2norm, normar = np.hypot(phibar2, np.sqrt(res)), alpha * abs(sn * phi)
            rest = r2norm**2 - damp**2 * xx
            r1norm = np.copysign(np.sqrt(abs(rest)), rest) if damp > 0 else r2norm
            tests = r2norm / normb, normar / (norm_a * r2norm + eps), 1 / (conda + eps)
            stop, near = stopped(tests, norm_a * normx / normb, limits, count + 1 >= maxiter)
            near = np.where(np.isfinite(r2norm), near, 0)
            numbers = alpha, -cs * alpha, phibar2, norm_a, gambar / gamma, theta / gamma, z1, dd, xx, res
            shown = r1norm, r2norm, norm_a, conda, normar, normx
            return x + (phi / rho).astype(real) * w, w1, var1, *numbers, *shown, near, stop, count + 1

        k, found = step(k, rotated)
        return k, *found

    normar = alpha * beta
    numbers, shown = (alpha, alpha, beta, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (beta, beta, 0.0, 0.0, normar, 0.0)
    near = np.where((normar != 0) & np.isfinite(normar), np.inf, 0)
    state = k, nothing, v, nothing, *numbers, *shown, near, 0, 0
    _, x, _, var, *_, r1, r2, norma, conda, normar, normx, _, stop, count = while_loop(goes_on(maxiter), turn, state)
    return LeastSquares(x, np.stack([stop * 1.0, count * 1.0, r1, r2, norma, conda, normar, normx]), var)


@jit
def lsmr(A: Any, adjoint: Any, b: Any, r: Any, n: int, damp: float, limits: Any, maxiter: int) -> LeastSquares:
    """LSMR (Fong, Saunders 2011)."""
    b, real = column(b), b.real.dtype
    step, k = bidiagonalized(A, adjoint, b if r is None else column(r), n)
    normb = norm(b)
    k, (v, alpha, beta) = step(k, lambda *found: found)

    def turn(state: Any) -> Any:
        k, x, h, hbar, zetabar, alphabar, rho, rhobar, cbar, sbar, zeta, *estimates, maxrbar, minrbar = state[:20]
        betadd, betad, rhodold, tautilde, thetatilde, d, norma2 = estimates
        count = state[-1] + 1

        def rotated(v: Any, alpha: Any, beta: Any) -> Any:
            chat, shat, alphahat = rotation(alphabar, np.float64(damp))
            c, sn, rho1 = rotation(alphahat, beta)
            thetanew, alphabar1 = sn * alpha, c * alpha
            thetabar, rhotemp = sbar * rho1, cbar * rho1
            cbar1, sbar1, rhobar1 = rotation(rhotemp, thetanew)
            zeta1, zetabar1 = cbar1 * zetabar, -sbar1 * zetabar
            hbar1 = h - (thetabar * rho1 / (rho * rhobar)).astype(real) * hbar
            x1 = x + (zeta1 / (rho1 * rhobar1)).astype(real) * hbar1
            h1 = v - (thetanew / rho1).astype(real) * h
            # |r|, |A|, the condition of A, |A^H r|.
            acute, check = chat * betadd, -shat * betadd
            betahat, betadd1 = c * acute, -sn * acute
            ctilde, stilde, rhotilde = rotation(rhodold, thetabar)
            thetatilde1, rhodold1 = stilde * rhobar1, ctilde * rhobar1
            betad1 = -stilde * betad + ctilde * betahat
            tautilde1 = (zeta - thetatilde * tautilde) / rhotilde
            taud, d1 = (zeta1 - thetatilde1 * tautilde1) / rhodold1, d + check**2
            normr = np.sqrt(d1 + (betad1 - taud) ** 2 + betadd1**2)
            norma = np.sqrt(norma2 + beta**2)
            largest = np.maximum(maxrbar, rhobar)
            least = np.where(count > 1, np.minimum(minrbar, rhobar), minrbar)
            conda = np.maximum(largest, rhotemp) / np.minimum(least, rhotemp)
            normar, normx = abs(zetabar1), norm(x1)
            tests = normr / normb, over(normar, norma * normr, np.inf), 1 / conda
            stop, near = stopped(tests, norma * normx / normb, limits, count >= maxiter)
            near = np.where(np.isfinite(normr), near, 0)
            estimates = betadd1, betad1, rhodold1, tautilde1, thetatilde1, d1, norma**2 + alpha**2, largest, least
            numbers = zetabar1, alphabar1, rho1, rhobar1, cbar1, sbar1, zeta1, *estimates
            return x1, h1, hbar1, *numbers, normr, normar, norma, conda, normx, near, stop, count

        k, found = step(k, rotated)
        return k, *found

    normar, nothing = alpha * beta, np.zeros_like(v)
    numbers = normar, alpha, 1.0, 1.0, 1.0, 0.0, 0.0, beta, 0.0, 1.0, 0.0, 0.0, 0.0, alpha**2, 0.0, 1e100
    near = np.where((normar != 0) & (normb != 0) & np.isfinite(normar + normb), np.inf, 0)
    state = k, nothing, v, nothing, *numbers, beta, normar, alpha, 1.0, 0.0, near, 0, 0
    _, x, *_, normr, normar, norma, conda, normx, _, stop, count = while_loop(goes_on(maxiter), turn, state)
    return LeastSquares(x, np.stack([stop * 1.0, count * 1.0, normr, normar, norma, conda, normx]))
