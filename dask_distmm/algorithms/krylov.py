"""Iterative solvers as textbooks have them: each function is one run, with a product of A and a vector in each turn.

A is in chunks of rows, and vectors are in the same rows. The vector that A is multiplied by is on all ranks: they get
the rows of others with the sums of dot products, and continue it themselves, so that a turn of conjugate gradients is
two messages. Numbers, in double precision, are computed by all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dask_distmm import random
from dask_distmm.arrays.jit import jit
from dask_distmm.errors import MatrixError, not_finite
from dask_distmm.tracing.control import (
    UserFunction,
    adjoint_product,
    callback,
    cond,
    decided,
    product,
    put_column,
    replicated,
    while_loop,
)


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
    number: Any = 0
    for passed, own in reversed(tests):
        number = np.where(passed, own, number)
    return number


def preconditioned(M: Any, r: Any) -> Any:
    """Return M r, of a matrix, its diagonal, a function, or none."""
    if M is None:
        return r
    if not isinstance(M, UserFunction) and M.shape[1] == 1 < len(M):
        return (M[:, 0] if r.ndim == 1 else M) * r
    return product(M, replicated(r), r)


def started(A: Any, b: Any, x0: Any, M: Any) -> tuple[Any, ...]:
    """Return b, |b|, the first x, the residual, and M times that; nothing is to be solved where b is 0."""
    b, x0 = column(b), column(x0)
    size = norm(b)
    x = np.zeros_like(b) if x0 is None else x0
    r = b if x0 is None else b - product(A, replicated(x), b)
    return b, size, x * over(size, size).astype(b.real.dtype), r, preconditioned(M, r)


def tell(function: Any, x: Any) -> None:
    """Call the user's function, if there is one."""
    if function is not None:
        callback(function, x)


@jit
def cg(A: Any, b: Any, x0: Any, M: Any, function: Any, rtol: float, atol: float, maxiter: int) -> tuple[Any, Any]:
    """Conjugate gradients (Hestenes, Stiefel 1952)."""
    b, size, x, r, z = started(A, b, x0, M)
    limit = np.maximum(atol, rtol * size)
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
    return x, np.where(met, 0, np.maximum(count, 1))


@jit
def minres(A: Any, b: Any, x0: Any, M: Any, function: Any, rtol: float, shift: float, maxiter: int) -> tuple[Any, Any]:
    """MINRES (Paige, Saunders 1975), with the tests of SciPy's."""
    b, size, x, r, y = started(A, b, x0, M)
    eps, real = float(np.finfo(b.dtype).eps), b.real.dtype
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
    return x, np.where((stop != 0) & (stop != 6), 0, np.maximum(count, 1))


def _check_positive(squared: Any) -> None:
    if squared < 0:
        raise MatrixError("M must be positive definite: r^H M r is negative")


def orthogonalized(w: Any, V: Any) -> tuple[Any, Any, Any, Any]:
    """Return w without what it has of the columns of V, Gram-Schmidt twice, and its norm; the products, |w| before."""
    h, before = V.conj().T @ w, square(w)
    w = w - V @ h
    again, squared = V.conj().T @ w, square(w)
    rest = np.sqrt(np.maximum(squared - square(again), 0))
    return w - V @ again, rest, h + again, np.sqrt(before)


@jit
def gmres(
    A: Any, b: Any, x0: Any, M: Any, function: Any, shows_norm: bool, rtol: float, atol: float, m: int, maxiter: int
) -> tuple[Any, Any]:
    """GMRES (Saad, Schultz 1986) with restarts, and Gram-Schmidt twice in place of its modified form."""
    b, size, x, r, z = started(A, b, x0, M)
    m, real, eps = min(m, len(b)), b.real.dtype, float(np.finfo(b.dtype).eps)
    limit = np.maximum(atol, rtol * size)
    start, residual, right = norm(z), norm(r), norm(preconditioned(M, b))
    numbers, rows = np.arange(m + 1), np.arange(m + 1)[:, None]
    empty = np.where(numbers[None] < 0, z[:, None], np.zeros((), b.dtype))
    triangle, identity = np.zeros((m + 1, m), b.dtype, like=size), np.eye(m + 1, dtype=b.dtype, like=size)

    def column_of(V: Any, j: Any, z: Any, scale: Any) -> tuple[Any, Any]:
        scale = scale.astype(real)
        return put_column(V, j, z * scale), scale * replicated(z)

    def step(state: Any) -> Any:
        V, w, R, Q, start, goal, *_, j = state
        z, rest, h, before = orthogonalized(preconditioned(M, product(A, w, b)), V)
        broken = rest <= eps * before
        below = np.where(broken, 0, rest)
        V, w = column_of(V, j + 1, z, over(1, below))
        # The rotations so far, and one more, which takes what is below the diagonal to it.
        h = Q @ h
        top, modulus = h[j], abs(h[j]).astype(np.float64)
        radius = length(modulus, below)
        phase = over(top, modulus.astype(real), 1)
        c, s = over(modulus, radius, 1).astype(real), phase * over(below, radius).astype(real)
        R = put_column(R, j, np.where(numbers < j, h, np.where(numbers == j, phase * radius.astype(real), 0)))
        row, next_row = Q[j], Q[j + 1]
        Q = np.where(rows == j, c * row + s * next_row, np.where(rows == j + 1, c * next_row - s.conj() * row, Q))
        residual = start * abs(Q[j + 1, 0]).astype(np.float64)
        if shows_norm:
            tell(function, residual / size)
        return V, w, R, Q, start, goal, residual, broken, j + 1

    def cycle(state: Any) -> Any:
        x, V, w, start, goal, factor, *_, count = state
        state = V, w, triangle, identity, start, goal, np.inf, False, 0
        V, w, R, Q, *_, inner, broken, j = while_loop(
            lambda s: (s[-3] > s[-4]) & (s[-3] < np.inf) & ~s[-2] & (s[-1] < m) | (s[-1] == 0), step, state
        )
        y = _solved_triangle(R[:m], start.astype(real) * Q[:m, 0], j)
        x = x + V[:, :m] @ y
        if not shows_norm:
            tell(function, x)
        r = b - product(A, replicated(x), b)
        z = preconditioned(M, r)
        residual, start, count = norm(r), norm(z), count + 1
        factor = np.where(inner <= goal, np.maximum(eps, factor / 4), np.minimum(1.0, 1.5 * factor))
        goal = inner * np.minimum(factor, limit / residual)
        V, w = column_of(empty, 0, z, over(1, start))
        return x, V, w, start, goal, factor, residual, broken, count

    V, w = column_of(empty, 0, z, over(1, start))
    met = (size == 0) | (residual < limit) | (residual == 0)
    residual = np.where(met, 0, residual)
    state = x, V, w, start, right * np.minimum(1.0, limit / size), 1.0, residual, False, 0
    x, *_, residual, _, count = while_loop(
        lambda s: (s[-3] > limit) & ~s[-2] & (s[3] > 0) & np.isfinite(s[3] + s[-3]) & (s[-1] < maxiter), cycle, state
    )
    return x, np.where((residual <= limit) | (size == 0), 0, np.maximum(count, 1))


def _solved_triangle(R: Any, g: Any, count: Any) -> Any:
    """Solve with the first columns of a triangle; what is singular is left out."""
    numbers, pivots = np.arange(len(g)), np.diagonal(R)
    used = (numbers < count) & (pivots != 0)
    R = np.where(used[:, None] & used, R, np.where(numbers[:, None] == numbers, 1, 0).astype(R.dtype))
    return np.linalg.solve(R, np.where(used, g, 0))


def bidiagonalized(A: Any, adjoint: Any, u: Any, n: int) -> tuple[Any, ...]:
    """Return a step of Golub and Kahan's bidiagonalization, its state after the first one, v, alpha and beta.

    The state is u, v, alpha, and the sums A^H u and |u|^2. u is in the rows of ranks and not yet divided by its norm;
    v is on all ranks.
    """
    u, real = column(u), u.real.dtype

    def step(state: Any, turn: Any) -> Any:
        """Continue; `turn` gets v, alpha and beta, before ranks send what is then added up: one message."""
        u, v, alpha, product_u, squared = state
        beta = np.sqrt(squared)
        v = over(1, beta).astype(real) * product_u - np.where(beta == 0, -1, beta).astype(real) * v
        size = norm(v)
        alpha = np.where(beta == 0, alpha, size)
        v = over(1, np.where(beta == 0, 0, alpha), 1).astype(real) * v
        ends = turn(v, alpha, beta)
        u = product(A, v, u) - (alpha * over(1, beta)).astype(real) * u
        return (u, v, alpha, adjoint_product(adjoint or A, u, n), square(u)), ends

    sums = adjoint_product(adjoint or A, u, n)
    state, first = step((u, np.zeros_like(sums), 0.0 * square(u), sums, square(u)), lambda *state: state)
    return step, state, *first


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
) -> tuple[Any, Any, Any]:
    """LSQR (Paige, Saunders 1982)."""
    normb, real, eps = norm(column(b)), b.real.dtype, float(np.finfo(b.dtype).eps)
    step, k, v, alpha, beta = bidiagonalized(A, adjoint, b if r is None else r, n)
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

        k, ends = step(k, rotated)
        return k, *ends

    normar = alpha * beta
    numbers, shown = (alpha, alpha, beta, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (beta, beta, 0.0, 0.0, normar, 0.0)
    near = np.where((normar != 0) & np.isfinite(normar), np.inf, 0)
    state = k, nothing, v, nothing, *numbers, *shown, near, 0, 0
    _, x, _, var, *_, r1, r2, norma, conda, normar, normx, _, stop, count = while_loop(goes_on(maxiter), turn, state)
    return x, np.stack([stop * 1.0, count * 1.0, r1, r2, norma, conda, normar, normx]), var


@jit
def lsmr(A: Any, adjoint: Any, b: Any, r: Any, n: int, damp: float, limits: Any, maxiter: int) -> tuple[Any, Any, Any]:
    """LSMR (Fong, Saunders 2011)."""
    normb, real = norm(column(b)), b.real.dtype
    step, k, v, alpha, beta = bidiagonalized(A, adjoint, b if r is None else r, n)

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

        k, ends = step(k, rotated)
        return k, *ends

    normar, nothing = alpha * beta, np.zeros_like(v)
    numbers = normar, alpha, 1.0, 1.0, 1.0, 0.0, 0.0, beta, 0.0, 1.0, 0.0, 0.0, 0.0, alpha**2, 0.0, 1e100
    near = np.where((normar != 0) & (normb != 0) & np.isfinite(normar + normb), np.inf, 0)
    state = k, nothing, v, nothing, *numbers, beta, normar, alpha, 1.0, 0.0, near, 0, 0
    _, x, *_, normr, normar, norma, conda, normx, _, stop, count = while_loop(goes_on(maxiter), turn, state)
    return x, np.stack([stop * 1.0, count * 1.0, normr, normar, norma, conda, normx]), None


@jit
def eigsh(A: Any, v0: Any, key: Any, k: int, m: int, which: str, tol: float, maxiter: int) -> tuple[Any, Any]:
    """Lanczos with thick restarts (Wu, Simon 2000), with vectors that are orthogonal throughout."""
    like = A if v0 is None else column(v0)
    n, dtype, real = len(like), like.dtype, like.real.dtype
    eps, columns = float(np.finfo(dtype).eps), np.arange(m + 1)

    def drawn(key: Any) -> Any:
        parts = [random.normal(part, (n,)) for part in random.split(key)]
        return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)

    def step(state: Any) -> Any:
        V, w, T, largest, *_, j = state
        z, rest, h, _ = orthogonalized(product(A, w, like), V)
        h = np.where(columns == j, h.real, h)[:m]
        T = np.where(columns[:m, None] == j, h.conj(), put_column(T, j, h))
        largest = np.maximum(largest, abs(T).max().astype(np.float64))
        # The remainder may only be small.
        broken = (rest <= 10 * eps * largest) | (j + 1 >= n)
        v, scale = z, np.where(broken, 0, 1 / rest).astype(real)
        return put_column(V, j + 1, v * scale), scale * replicated(v), T, largest, rest, broken, j + 1

    def cycle(state: Any) -> Any:
        V, w, T, largest, kept, *_, turns = state
        state = V, w, T, largest, np.inf, False, kept
        V, w, T, largest, rest, broken, j = while_loop(
            lambda s: ~s[-2] & ((s[-3] < np.inf) | (s[-1] == kept)) & (s[-1] < m), step, state
        )
        decide = functools.partial(restarted, k=k, n=n, which=which, tol=tol, maxiter=maxiter, eps=eps)
        meta = T, T, np.zeros(k), np.zeros((), int), np.zeros((), bool)
        Y, T, values, kept, done = decided(decide, T, rest, largest, broken, j, turns + 1, meta=meta)
        last = cond(broken, lambda V: drawn(random.fold_in(key, turns)), lambda V: V[:, j], V)
        V = np.concatenate([V[:, :m] @ Y, np.zeros_like(V[:, :1])], 1)
        z, rest, _, _ = orthogonalized(last, V)
        scale = over(1, rest).astype(real)
        return put_column(V, kept, z * scale), scale * replicated(z), T, largest, kept, values, done, turns + 1

    v = drawn(key) if v0 is None else column(v0)
    size = norm(v)
    callback(_check_start, size)
    scale = (1 / size).astype(real)
    V, w = np.where(columns == 0, (v * scale)[:, None], np.zeros((), dtype)), scale * replicated(v)
    state = V, w, np.zeros((m, m), dtype, like=size), 0.0, 0, np.zeros(k, like=size), False, 0
    V, *_, values, _, _ = while_loop(lambda s: ~s[-2] & (s[-1] <= maxiter), cycle, state)
    return values, V[:, :k]


def restarted(
    T: Any, rest: Any, largest: Any, broken: Any, j: Any, turns: Any, **how: Any
) -> tuple[Any, Any, Any, int, bool]:
    """Decide which combinations of vectors stay, and whether those that are wanted have converged."""
    k, n, eps, maxiter, m, count = how["k"], how["n"], how["eps"], how["maxiter"], len(T), int(j)
    if not np.isfinite(T).all():
        raise MatrixError(not_finite("a", option=False))
    Y, values = np.zeros_like(T), np.zeros(k)
    if broken and count < min(m, n):
        # An invariant subspace: all of it stays, and another vector is drawn.
        return np.diag(np.arange(m) < count).astype(T.dtype), T, values, count, False
    ritz, y = _separated(*np.linalg.eigh(T[:count, :count]), 4 * eps * largest)
    order = _wanted(ritz, how["which"])
    errors = rest * abs(y[-1, order[:k]])
    limits = how["tol"] * np.maximum(eps ** (2 / 3), abs(ritz[order[:k]]))
    converged = (errors <= np.maximum(limits, eps * largest)) | broken
    if not converged.all() and turns >= maxiter:
        raise MatrixError(
            f"{converged.sum()} of {k} eigenvalues have converged after {maxiter} restarts: pass a larger "
            "maxiter=, ncv= or tol="
        )
    kept = k if converged.all() else min(k + (m - k) // 2, m - 1)
    chosen = np.sort(order[:k]) if converged.all() else order[:kept]
    Y[:count, :kept] = y[:, chosen]
    T = np.diag(np.where(np.arange(m) < kept, np.resize(ritz[chosen], m), 0)).astype(T.dtype)
    return Y, T, ritz[chosen[:k]], kept, bool(converged.all())


def _check_start(size: Any) -> None:
    if not np.isfinite(size) or not size:
        raise MatrixError("v0 must be finite and not zero")


def _separated(values: Any, y: Any, gap: float) -> tuple[Any, Any]:
    """Leave at most one vector of equal eigenvalues, the last one, with a component that has not converged."""
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


@jit
def lobpcg(A: Any, X: Any, M: Any, tol: float, maxiter: int, largest: bool) -> tuple[Any, Any]:
    """LOBPCG (Knyazev 2001): Ritz vectors in the span of X, preconditioned residuals, and the last steps."""
    k, real = X.shape[1], X.real.dtype

    def ritz(S: Any, AS: Any, *, starts: bool = False) -> Any:
        values, rotation, fits = _ritz(S.conj().T @ S, S.conj().T @ AS, k, largest, starts)
        XP, AXP = S @ rotation, AS @ rotation
        X, AX = XP[:, :k], AXP[:, :k]
        R = AX - X * values.astype(real)
        W = preconditioned(M, R)
        worst = np.sqrt((R.real**2 + R.imag**2 if R.dtype.kind == "c" else R * R).sum(0).max())
        W = W - X @ (X.conj().T @ W)
        return X, W, XP[:, k:], AX, AXP[:, k:], values, np.where(fits, worst.astype(np.float64), np.inf)

    def turn(state: Any) -> Any:
        (X, W, P, AX, AP, *_), best, count = state
        AW = product(A, replicated(W), X)
        ends = ritz(np.concatenate([X, W, P], 1), np.concatenate([AX, AW, AP], 1))
        # Behind the residuals that rounding allows come worse ones.
        better = ends[-1] < best[-1]
        best = tuple(np.where(better, new, old) for new, old in zip((ends[0], *ends[-2:]), best, strict=True))
        return ends, best, count + 1

    def goes_on(state: Any) -> Any:
        pair, best, count = state
        return (best[-1] > tol) & (pair[-1] < np.inf) & (count < maxiter)

    nothing = np.zeros_like(X)
    image = product(A, replicated(X), X)
    first = ritz(np.concatenate([X, nothing, nothing], 1), np.concatenate([image, nothing, nothing], 1), starts=True)
    _, (X, values, _), _ = while_loop(goes_on, turn, (first, (first[0], *first[-2:]), 0))
    return values, X


def _ritz(G: Any, H: Any, k: int, largest: bool, starts: bool) -> tuple[Any, Any, Any]:
    """Return the wanted Ritz values, the combinations of S that are X and the next step, and whether there are enough.

    G is S^H S and H is S^H A S. One rank computes them for all.
    """
    eps, many, sign = float(np.finfo(G.dtype).eps), np.arange(3 * k, like=G), -1 if largest else 1
    if starts:
        callback(_check_finite, G, H)
    finite = np.isfinite(G).all() & np.isfinite(H).all()
    G, H = np.where(finite, G, 0), np.where(finite, H, 0)
    norms = np.sqrt(np.diagonal(G).real)
    scale = over(1, norms)
    G, H = G * scale * scale[:, None], H * scale * scale[:, None]
    squares, basis = np.linalg.eigh((G + G.conj().T) / 2)
    kept = squares > eps**0.75
    if starts:
        callback(functools.partial(_check_independent, k), kept)
    basis = np.where(kept, basis / np.sqrt(np.where(kept, squares, 1)), 0)
    image = basis.conj().T @ H @ basis
    # Directions that are left out come last.
    far = sign * np.where(kept, 0, 4 * np.sqrt((abs(image) ** 2).sum()) + 1)
    values, y = np.linalg.eigh((image + image.conj().T) / 2 + np.diag(far).astype(image.dtype))
    order = slice(None, None, -1) if largest else slice(None)
    values, x = values[order][:k], basis @ y[:, order][:, :k]
    # The next step has nothing of the last X, is orthogonal to the next X, and orthonormal.
    step = np.where(many[:, None] < k, 0, x)
    for _ in range(2):
        step = step - x @ (x.conj().T @ (G @ step))
    squares, y = np.linalg.eigh(step.conj().T @ G @ step)
    least = eps * np.maximum(squares[-1], eps)
    step = step @ (y * np.where(squares > least, 1 / np.sqrt(np.maximum(squares, least)), 0))
    rotation = np.concatenate([x, step], 1) * scale[:, None]
    return values.astype(np.float64), rotation, finite & (kept.sum() >= k)


def _check_finite(*arrays: Any) -> None:
    if not all(np.isfinite(x).all() for x in arrays):
        raise MatrixError(not_finite("a", option=False))


def _check_independent(k: int, kept: Any) -> None:
    if kept.sum() < k:
        raise MatrixError(f"X must have independent columns: {kept.sum()} of {k} are")
