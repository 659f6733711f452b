"""A call of each public function of linear algebra with default arguments, and what NumPy or SciPy makes of it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
import scipy.linalg
from matrices import noise, positive

from dask_distmm import linalg

# Types that functions of linear algebra compute in others.
NARROW = ("int64", "int16", "bool", "float16", "float32")


def given(dtype: str = "") -> dict[str, Any]:
    """Return the matrices that the calls take, all of them in a type if one is named."""
    rng = np.random.default_rng()
    found = {
        "a": noise(rng, (20, 20), "float64") + 5 * np.eye(20),
        "c": noise(rng, (20, 20), "complex128") + 5 * np.eye(20),
        "s": positive(20),
        "t": noise(rng, (30, 8), "float64"),
        "w": noise(rng, (8, 20), "float64"),
        # A matrix of integers, of so few chunks and rows as one types in.
        "i": rng.integers(-9, 9, (12, 3)),
        "j": rng.integers(-9, 9, 12),
        "q": np.eye(6, dtype=np.int64) * 9 + rng.integers(-1, 2, (6, 6)),
        # Many rows, of which each chunk is factorized where it lies.
        "r": noise(rng, (400, 6), "float32"),
        "v": noise(rng, (20,), "float64"),
        "b": noise(rng, (30, 2), "float64"),
        # The diagonals of a matrix, and the first column of another one.
        "d": np.concatenate([np.full((1, 20), 9.0), rng.uniform(-0.4, 0.4, (2, 20))]),
        "e": np.concatenate([[9.0], rng.uniform(-0.4, 0.4, 19)]),
        # Stacks.
        "k": noise(rng, (5, 2, 3, 3), "float64") + 5 * np.eye(3),
        "h": np.stack([positive(3) for _ in range(5)]),
        "l": noise(rng, (5, 4, 3), "float32") + 5 * np.eye(4, 3, dtype="float32"),
    }
    return {name: in_type(name, x, dtype) for name, x in found.items()} if dtype else found


def in_type(name: str, x: Any, dtype: str) -> Any:
    """Return a matrix in another type, of full rank if it was; those that are to be positive definite still are."""
    if dtype == "bool":
        found = x.real > 0.5
        if x.ndim > 1 and name != "d":
            # Ones on the diagonal, and some on the longer side of it.
            rows, columns = x.shape[-2:]
            found = (np.tril(found, -1) if rows >= columns else np.triu(found, 1)) | np.eye(rows, columns, dtype=bool)
        return np.broadcast_to(np.eye(x.shape[-1], dtype=bool), x.shape).copy() if name in "sh" else found
    whole = np.dtype(dtype).kind == "i" and x.dtype.kind in "fc"
    return (np.round(4 * x.real) if whole else x.real).astype(dtype)


class Call(NamedTuple):
    """A call, what it returns, and whether only up to signs."""

    name: str
    ours: Callable[[Any], Any]
    expected: Callable[[Any], Any]
    signs: bool = False


def _solved(a: Any, b: Any) -> Any:
    return np.linalg.solve(a, b)


def _last_pairs(a: Any, k: int) -> Any:
    w, v = np.linalg.eigh(a)
    return w[-k:], v[:, -k:]


def _least(a: Any, b: Any) -> Any:
    return np.linalg.lstsq(a, b)[0]


def _residual(x: Any, found: Any) -> Any:
    """Return ``a @ v - v * w``; in which order eigenvalues are depends on the library."""
    return x @ found.eigenvectors - found.eigenvectors * found.eigenvalues


def _stack_rebuilt(found: Any) -> Any:
    w, v = found
    return linalg.solve(v.swapaxes(-1, -2), (v * w[..., None, :]).swapaxes(-1, -2)).swapaxes(-1, -2)


def _squared(x: Any) -> Any:
    return x @ x


def _rebuilt(t: Any, z: Any) -> Any:
    return z @ t @ z.swapaxes(-1, -2)


def _svd(x: Any) -> Any:
    return np.linalg.svd(x, full_matrices=False)


def _norms(x: Any) -> Any:
    return [np.linalg.norm(x, order) for order in (None, 1, 2, "nuc", np.inf)]


def _with_intercept(x: Any, y: Any, alpha: float) -> Any:
    center, level = x.mean(0), y.mean(0)
    away = x - center
    coef = np.linalg.solve(away.T @ away + alpha * np.eye(x.shape[1]), away.T @ (y - level))
    return coef, level - center @ coef


def _pca(x: Any) -> Any:
    _, s, vh = _svd(x - x.mean(axis=0))
    return vh, s**2 / (len(x) - 1), x.mean(axis=0)


def _ldlt(a: Any) -> Any:
    factor = np.linalg.cholesky(a)
    diagonal = np.diagonal(factor)
    return factor / diagonal, diagonal**2


def _lower(x: Any) -> Any:
    return scipy.linalg.solve_triangular(x.a, x.v, lower=True)


def _many_least_squares(x: Any) -> Any:
    each = [np.linalg.lstsq(one, one[:, :2]) for one in x.l]
    return [np.stack(parts) for parts in zip(*each, strict=True)]


CALLS = [
    Call("linalg.cholesky", lambda x: linalg.cholesky(x.s), lambda x: np.linalg.cholesky(x.s)),
    Call("linalg.cho_factor", lambda x: linalg.cho_factor(x.s), lambda x: np.linalg.cholesky(x.s).T),
    Call(
        "linalg.cho_solve", lambda x: linalg.cho_solve(linalg.cho_factor(x.s), x.v), lambda x: np.linalg.solve(x.s, x.v)
    ),
    Call(
        "linalg.cond",
        lambda x: [linalg.cond(x.a), linalg.cond(x.a, 1)],
        lambda x: [np.linalg.cond(x.a), np.linalg.cond(x.a, 1)],
    ),
    Call("linalg.cov", lambda x: linalg.cov(x.t), lambda x: np.cov(x.t)),
    Call("linalg.cov", lambda x: linalg.cov(x.i, rowvar=False), lambda x: np.cov(x.i, rowvar=False)),
    Call("linalg.corrcoef", lambda x: linalg.corrcoef(x.r, None, False), lambda x: np.corrcoef(x.r, None, False)),
    Call("linalg.det", lambda x: linalg.det(x.a), lambda x: np.linalg.det(x.a)),
    Call("linalg.det", lambda x: linalg.det(x.q), lambda x: np.linalg.det(x.q)),
    Call("linalg.eigh", lambda x: linalg.eigh(x.s), lambda x: np.linalg.eigh(x.s), signs=True),
    Call("linalg.eig", lambda x: _residual(x.a, linalg.eig(x.a)), lambda x: 0j * x.a),
    Call("linalg.eig", lambda x: _residual(x.q, linalg.eig(x.q)), lambda x: 0j * x.q),
    Call("linalg.eigvals", lambda x: linalg.eigvals(x.a).sum(), lambda x: np.trace(x.a)),
    Call("linalg.eigvals", lambda x: (linalg.eigvals(x.c) ** 2).sum(), lambda x: np.trace(x.c @ x.c)),
    Call("linalg.expm", lambda x: linalg.expm(x.a / 9), lambda x: scipy.linalg.expm(x.a / 9)),
    Call("linalg.expm", lambda x: linalg.expm(x.q), lambda x: scipy.linalg.expm(x.q)),
    Call("linalg.expm of a stack", lambda x: linalg.expm(x.k), lambda x: scipy.linalg.expm(x.k)),
    Call("linalg.logm", lambda x: linalg.logm(x.s), lambda x: scipy.linalg.logm(x.s)),
    Call("linalg.logm", lambda x: linalg.logm(x.c), lambda x: scipy.linalg.logm(x.c)),
    Call("linalg.schur", lambda x: _rebuilt(*linalg.schur(x.a)), lambda x: x.a),
    Call("linalg.sqrtm", lambda x: linalg.sqrtm(x.s), lambda x: scipy.linalg.sqrtm(x.s)),
    Call("linalg.sqrtm", lambda x: _squared(linalg.sqrtm(x.a)), lambda x: x.a),
    Call("linalg.eigvalsh", lambda x: linalg.eigvalsh(x.s), lambda x: np.linalg.eigvalsh(x.s)),
    Call("linalg.gram", lambda x: linalg.gram(x.t), lambda x: x.t.T @ x.t),
    Call("linalg.gram", lambda x: linalg.gram(x.i), lambda x: (x.i.T @ x.i).astype(float)),
    Call("linalg.cg", lambda x: linalg.cg(x.s, x.v, rtol=1e-12)[0], lambda x: _solved(x.s, x.v)),
    Call(
        "linalg.cg",
        lambda x: linalg.cg(lambda y, rows: 3 * y[rows], x.v, M=lambda y, rows: y[rows])[0],
        lambda x: x.v / 3,
    ),
    Call("linalg.minres", lambda x: linalg.minres(x.s, x.v, rtol=1e-12)[0], lambda x: _solved(x.s, x.v)),
    Call("linalg.gmres", lambda x: linalg.gmres(x.a, x.v, rtol=1e-12)[0], lambda x: _solved(x.a, x.v)),
    Call("linalg.gmres", lambda x: linalg.gmres(x.q, x.j[:6], rtol=1e-12), lambda x: (_solved(x.q, x.j[:6]), 0)),
    Call("linalg.eigsh", lambda x: linalg.eigsh(x.s, 3), lambda x: _last_pairs(x.s, 3), signs=True),
    Call(
        "linalg.lobpcg",
        lambda x: linalg.lobpcg(x.s, x.b[:20], tol=1e-9, maxiter=200),
        lambda x: tuple(y[..., ::-1] for y in _last_pairs(x.s, 2)),
        signs=True,
    ),
    Call("linalg.lsqr", lambda x: linalg.lsqr(x.t, x.b[:, 0], 0, 1e-13, 1e-13)[0], lambda x: _least(x.t, x.b[:, 0])),
    Call("linalg.lsmr", lambda x: linalg.lsmr(x.t, x.b[:, 0], 0, 1e-13, 1e-13)[0], lambda x: _least(x.t, x.b[:, 0])),
    Call("linalg.inv", lambda x: linalg.inv(x.a), lambda x: np.linalg.inv(x.a)),
    Call("linalg.inv", lambda x: linalg.inv(x.q), lambda x: np.linalg.inv(x.q)),
    Call("linalg.lstsq", lambda x: linalg.lstsq(x.t, x.b), lambda x: np.linalg.lstsq(x.t, x.b)),
    Call("linalg.lstsq", lambda x: linalg.lstsq(x.i, x.j), lambda x: np.linalg.lstsq(x.i, x.j)),
    Call("linalg.lstsq", lambda x: linalg.lstsq(x.q, x.j[:6]), lambda x: np.linalg.lstsq(x.q, x.j[:6])),
    Call("linalg.ldlt", lambda x: linalg.ldlt(x.s), lambda x: _ldlt(x.s)),
    Call("linalg.lu", lambda x: linalg.lu(x.a), lambda x: scipy.linalg.lu(x.a)),
    Call("linalg.lu", lambda x: linalg.lu(x.c), lambda x: scipy.linalg.lu(x.c)),
    Call("linalg.lu", lambda x: linalg.lu(x.a, True), lambda x: scipy.linalg.lu(x.a, True)),
    Call("linalg.lu", lambda x: linalg.lu(x.t, p_indices=True), lambda x: scipy.linalg.lu(x.t, p_indices=True)),
    Call("linalg.lu_factor", lambda x: linalg.lu_factor(x.a), lambda x: scipy.linalg.lu_factor(x.a)),
    Call("linalg.lu_solve", lambda x: linalg.lu_solve(linalg.lu_factor(x.a), x.v), lambda x: np.linalg.solve(x.a, x.v)),
    Call("linalg.matrix_rank", lambda x: linalg.matrix_rank(x.t), lambda x: np.linalg.matrix_rank(x.t)),
    Call(
        "linalg.norm",
        lambda x: [linalg.norm(x.a, order) for order in (None, 1, 2, "nuc", np.inf)],
        lambda x: _norms(x.a),
    ),
    Call("linalg.pca", lambda x: linalg.pca(x.t), lambda x: _pca(x.t), signs=True),
    Call("linalg.pinv", lambda x: linalg.pinv(x.t), lambda x: np.linalg.pinv(x.t)),
    Call("linalg.pinv", lambda x: linalg.pinv(x.w), lambda x: np.linalg.pinv(x.w)),
    Call("linalg.pinv", lambda x: linalg.pinv(x.i), lambda x: np.linalg.pinv(x.i)),
    Call("linalg.polar", lambda x: linalg.polar(x.a), lambda x: scipy.linalg.polar(x.a)),
    Call("linalg.qr", lambda x: linalg.qr(x.a), lambda x: np.linalg.qr(x.a), signs=True),
    Call("linalg.qr", lambda x: linalg.qr(x.r), lambda x: np.linalg.qr(x.r), signs=True),
    Call("linalg.qr", lambda x: linalg.qr(x.i), lambda x: np.linalg.qr(x.i), signs=True),
    Call(
        "linalg.ridge",
        lambda x: linalg.ridge(x.t, x.b, 2.0),
        lambda x: np.linalg.solve(x.t.T @ x.t + 2 * np.eye(x.t.shape[1]), x.t.T @ x.b),
    ),
    Call(
        "linalg.ridge",
        lambda x: linalg.ridge(x.t, x.b, 2.0, fit_intercept=True),
        lambda x: _with_intercept(x.t, x.b, 2.0),
    ),
    Call("linalg.slogdet", lambda x: linalg.slogdet(x.a), lambda x: np.linalg.slogdet(x.a)),
    Call("linalg.solve", lambda x: linalg.solve(x.a, x.v), lambda x: np.linalg.solve(x.a, x.v)),
    Call("linalg.solve", lambda x: linalg.solve(x.q, x.j[:6]), lambda x: np.linalg.solve(x.q, x.j[:6])),
    Call(
        "linalg.solve_banded",
        lambda x: linalg.solve_banded((2, 0), x.d, x.a),
        lambda x: scipy.linalg.solve_banded((2, 0), x.d, x.a),
    ),
    Call(
        "linalg.solveh_banded",
        lambda x: linalg.solveh_banded(x.d, x.v, lower=True),
        lambda x: scipy.linalg.solveh_banded(x.d, x.v, lower=True),
    ),
    Call(
        "linalg.solve_toeplitz",
        lambda x: linalg.solve_toeplitz(x.e, x.a),
        lambda x: scipy.linalg.solve_toeplitz(x.e, x.a),
    ),
    Call("linalg.solve_triangular", lambda x: linalg.solve_triangular(x.a, x.v, lower=True), _lower),
    Call("linalg.svd", lambda x: linalg.svd(x.t, full_matrices=False), lambda x: _svd(x.t), signs=True),
    Call("linalg.svdvals", lambda x: linalg.svdvals(x.t), lambda x: np.linalg.svd(x.t, compute_uv=False)),
    Call("linalg.svd_compressed", lambda x: linalg.svd_compressed(x.t, 8), lambda x: _svd(x.t), signs=True),
    Call("linalg.symm", lambda x: linalg.symm(x.s, x.a), lambda x: x.s @ x.a),
    Call("linalg.trmm", lambda x: linalg.trmm(x.a, x.s), lambda x: np.triu(x.a) @ x.s),
    Call("linalg.cross", lambda x: linalg.cross(x.l, x.k[:, 0, :1]), lambda x: np.cross(x.l, x.k[:, 0, :1])),
    Call("linalg.diagonal", lambda x: linalg.diagonal(x.k), lambda x: np.linalg.diagonal(x.k)),
    Call("linalg.kron", lambda x: linalg.kron(x.t, x.i), lambda x: np.kron(x.t, x.i)),
    Call("linalg.matrix_norm", lambda x: linalg.matrix_norm(x.k), lambda x: np.linalg.matrix_norm(x.k)),
    Call("linalg.matrix_power", lambda x: linalg.matrix_power(x.k, -2), lambda x: np.linalg.matrix_power(x.k, -2)),
    Call("linalg.matrix_transpose", lambda x: linalg.matrix_transpose(x.k), lambda x: x.k.swapaxes(-1, -2)),
    Call("linalg.matvec", lambda x: linalg.matvec(x.w, x.v), lambda x: x.w @ x.v),
    Call("linalg.multi_dot", lambda x: linalg.multi_dot([x.w, x.a, x.v]), lambda x: x.w @ x.a @ x.v),
    Call("linalg.outer", lambda x: linalg.outer(x.v, x.j), lambda x: np.outer(x.v, x.j)),
    Call("linalg.trace", lambda x: linalg.trace(x.k), lambda x: np.linalg.trace(x.k)),
    Call("linalg.vecdot", lambda x: linalg.vecdot(x.a, x.c), lambda x: (x.a * x.c).sum(axis=-1)),
    Call("linalg.vecmat", lambda x: linalg.vecmat(x.v, x.c), lambda x: x.v @ x.c),
    Call("linalg.vector_norm", lambda x: linalg.vector_norm(x.k), lambda x: np.linalg.vector_norm(x.k)),
    *(
        Call(f"linalg.{name} of a stack", call(linalg), call(np.linalg), signs=name in ("qr", "svd", "eigh"))
        for name, call in {
            "cholesky": lambda la: lambda x: la.cholesky(x.h, upper=True),
            "cond": lambda la: lambda x: [la.cond(x.k), la.cond(x.k, 1)],
            "det": lambda la: lambda x: la.det(x.k),
            "eigh": lambda la: lambda x: la.eigh(x.h),
            "eigvalsh": lambda la: lambda x: la.eigvalsh(x.h, "U"),
            "inv": lambda la: lambda x: la.inv(x.k),
            "matrix_rank": lambda la: lambda x: la.matrix_rank(x.l),
            "norm": lambda la: lambda x: [la.norm(x.k, order, (0, 3)) for order in (None, 1, 2, "nuc")],
            "pinv": lambda la: lambda x: la.pinv(x.l),
            "qr": lambda la: lambda x: la.qr(x.l),
            "slogdet": lambda la: lambda x: la.slogdet(x.k),
            "solve": lambda la: lambda x: la.solve(x.k, x.h[:, None]),
            "svd": lambda la: lambda x: la.svd(x.l),
            "svdvals": lambda la: lambda x: la.svdvals(x.l),
        }.items()
    ),
    *(
        Call(f"linalg.{name} of a stack", call, lambda x: x.k)
        for name, call in {
            "eig": lambda x: _stack_rebuilt(linalg.eig(x.k)),
            "logm": lambda x: linalg.expm(linalg.logm(x.k)),
            "schur": lambda x: _rebuilt(*linalg.schur(x.k)),
            "sqrtm": lambda x: _squared(linalg.sqrtm(x.k)),
        }.items()
    ),
    Call(
        "linalg.cho_solve of a stack",
        lambda x: linalg.cho_solve(linalg.cho_factor(x.h, True), x.l[:, :3]),
        lambda x: _solved(x.h, x.l[:, :3]),
    ),
    Call(
        "linalg.solve_triangular of a stack",
        lambda x: linalg.solve_triangular(x.k, x.h[:, None], "T", right=True),
        lambda x: _solved(np.triu(x.k), x.h[:, None].swapaxes(-1, -2)).swapaxes(-1, -2),
    ),
    Call("linalg.lu of a stack", lambda x: linalg.lu(x.l), lambda x: scipy.linalg.lu(x.l)),
    Call(
        "linalg.lu_solve of a stack",
        lambda x: linalg.lu_solve(linalg.lu_factor(x.k), x.h[:, None], 1),
        lambda x: _solved(x.k.swapaxes(-1, -2), x.h[:, None]),
    ),
    Call("linalg.eigvals of a stack", lambda x: linalg.eigvals(x.k).sum(axis=-1), lambda x: np.linalg.trace(x.k)),
    Call("linalg.lstsq of a stack", lambda x: linalg.lstsq(x.l, x.l[..., :2]), _many_least_squares),
    Call("da.linalg.norm", lambda x: da.linalg.norm(x.k, 2, (2, 3)), lambda x: np.linalg.norm(x.k, 2, (2, 3))),
    Call("da.linalg.solve", lambda x: da.linalg.solve(x.k, x.h[:, None]), lambda x: np.linalg.solve(x.k, x.h[:, None])),
    Call("da.linalg.cholesky", lambda x: da.linalg.cholesky(x.s), lambda x: np.linalg.cholesky(x.s).T),
    Call("da.linalg.inv", lambda x: da.linalg.inv(x.a), lambda x: np.linalg.inv(x.a)),
    Call("da.linalg.lstsq", lambda x: da.linalg.lstsq(x.t, x.b[:, 0]), lambda x: np.linalg.lstsq(x.t, x.b[:, 0])),
    Call("da.linalg.lu", lambda x: da.linalg.lu(x.a), lambda x: scipy.linalg.lu(x.a)),
    Call("da.linalg.qr", lambda x: da.linalg.qr(x.a), lambda x: np.linalg.qr(x.a), signs=True),
    Call("da.linalg.solve", lambda x: da.linalg.solve(x.a, x.v), lambda x: np.linalg.solve(x.a, x.v)),
    Call("da.linalg.solve_triangular", lambda x: da.linalg.solve_triangular(x.a, x.v, True), _lower),
    Call("da.linalg.svd", lambda x: da.linalg.svd(x.t), lambda x: _svd(x.t), signs=True),
    Call(
        "da.linalg.svd_compressed", lambda x: da.linalg.svd_compressed(x.t, 8, seed=1), lambda x: _svd(x.t), signs=True
    ),
    Call("np.linalg.cholesky", lambda x: np.linalg.cholesky(x.s), lambda x: np.linalg.cholesky(x.s)),
    Call("np.linalg.det", lambda x: np.linalg.det(x.a), lambda x: np.linalg.det(x.a)),
    Call("np.linalg.eig", lambda x: _residual(x.a, np.linalg.eig(x.a)), lambda x: 0j * x.a),
    Call("np.linalg.eigvals", lambda x: np.linalg.eigvals(x.a).sum(), lambda x: np.trace(x.a)),
    Call("np.linalg.eigh", lambda x: np.linalg.eigh(x.s), lambda x: np.linalg.eigh(x.s), signs=True),
    Call("np.linalg.eigvalsh", lambda x: np.linalg.eigvalsh(x.s), lambda x: np.linalg.eigvalsh(x.s)),
    Call("np.linalg.inv", lambda x: np.linalg.inv(x.a), lambda x: np.linalg.inv(x.a)),
    Call("np.linalg.slogdet", lambda x: np.linalg.slogdet(x.a), lambda x: np.linalg.slogdet(x.a)),
    Call("np.linalg.solve", lambda x: np.linalg.solve(x.a, x.v), lambda x: np.linalg.solve(x.a, x.v)),
    Call("np.linalg.lstsq", lambda x: np.linalg.lstsq(x.t, x.b[:, 0]), lambda x: np.linalg.lstsq(x.t, x.b[:, 0])),
    *(
        Call(f"np.linalg.{name}", call, call)
        for name, call in {
            "cond": lambda x: np.linalg.cond(x.a),
            "cross": lambda x: np.linalg.cross(x.k, x.k[0]),
            "diagonal": lambda x: np.linalg.diagonal(x.k, offset=1),
            "matrix_norm": lambda x: np.linalg.matrix_norm(x.k, ord="nuc"),
            "matrix_rank": lambda x: np.linalg.matrix_rank(x.t),
            "matrix_transpose": lambda x: np.linalg.matrix_transpose(x.k),
            "outer": lambda x: np.linalg.outer(x.v, x.v),
            "pinv": lambda x: np.linalg.pinv(x.t),
            "svdvals": lambda x: np.linalg.svdvals(x.t),
            "trace": lambda x: np.linalg.trace(x.k),
            "vecdot": lambda x: np.linalg.vecdot(x.a, x.v),
            "vector_norm": lambda x: np.linalg.vector_norm(x.k, axis=(0, 1)),
        }.items()
    ),
    Call("np.kron", lambda x: np.kron(x.w, x.i), lambda x: np.kron(x.w, x.i)),
    Call("np.linalg.norm", lambda x: np.linalg.norm(x.a), lambda x: np.linalg.norm(x.a)),
    Call("np.linalg.qr", lambda x: np.linalg.qr(x.a), lambda x: np.linalg.qr(x.a), signs=True),
    Call("np.linalg.svd", lambda x: np.linalg.svd(x.t, full_matrices=False), lambda x: _svd(x.t), signs=True),
    Call("np.linalg.matmul", lambda x: np.linalg.matmul(x.a, x.s), lambda x: x.a @ x.s),
    Call("np.linalg.matrix_power", lambda x: np.linalg.matrix_power(x.a, 3), lambda x: x.a @ x.a @ x.a),
    Call("np.linalg.multi_dot", lambda x: np.linalg.multi_dot([x.w, x.a, x.v]), lambda x: x.w @ x.a @ x.v),
    Call("np.linalg.tensordot", lambda x: np.linalg.tensordot(x.a, x.w, axes=(0, 1)), lambda x: x.a.T @ x.w.T),
    Call("np.inner", lambda x: np.inner(x.a, x.w), lambda x: x.a @ x.w.T),
    Call("np.matmul", lambda x: np.matmul(x.w, x.a), lambda x: x.w @ x.a),
    Call("np.dot", lambda x: np.dot(x.w, x.a), lambda x: x.w @ x.a),
    Call("np.tensordot", lambda x: np.tensordot(x.w, x.a, axes=1), lambda x: x.w @ x.a),
    Call("np.einsum", lambda x: np.einsum("ij,jk", x.w, x.a), lambda x: x.w @ x.a),
    Call("da.matmul", lambda x: da.matmul(x.w, x.a), lambda x: x.w @ x.a),
    Call("da.dot", lambda x: da.dot(x.w, x.a), lambda x: x.w @ x.a),
    Call("da.tensordot", lambda x: da.tensordot(x.w, x.a, axes=1), lambda x: x.w @ x.a),
    Call("da.einsum", lambda x: da.einsum("ij,jk", x.w, x.a), lambda x: x.w @ x.a),
]
IDS = [f"{call.name}-{number}" for number, call in enumerate(CALLS)]
# Of matrices of bools and small integers eigenvectors are not unique, or there are too few; NumPy has no cross product
# of bools; in float32 the limits of these iterations are out of reach.
# Vectors of matrices with equal values are not unique.
_NOT_IN = {"bool": ("eigsh", "lobpcg", "cross", *(f"{name} of a stack" for name in ("eig", "eigh", "svd")))}
_NOT_IN |= dict.fromkeys(("float16", "float32"), ("gmres", "lobpcg"))
_NOT_IN |= dict.fromkeys(("int16", "int64"), ("eig of a stack",))


def in_narrow(dtype: str) -> list[Call]:
    """Return the calls of this package's functions that have a result of matrices in one of `NARROW`."""
    without = {f"linalg.{name}" for name in _NOT_IN.get(dtype, ())}
    return [call for call in CALLS if call.name.startswith("linalg.") and call.name not in without]


def check(
    call: Call,
    as_dask: Callable[[Any], Any],
    kind: str,
    compute: Callable[..., Any] = dask.compute,
    dtype: str = "",
) -> None:
    """Compare what a call returns with what is expected; its chunks, and what it says of them, are of one kind."""
    matrices = given(dtype)
    wide = {
        name: x.astype("float64" if x.dtype.kind == "f" else "int64") if dtype else x for name, x in matrices.items()
    }
    found = call.ours(types.SimpleNamespace(**{name: as_dask(x) for name, x in matrices.items()}))
    expected = call.expected(types.SimpleNamespace(**wide))
    lazy = [x for x in (found if isinstance(found, tuple | list) else [found]) if isinstance(x, da.Array)]
    wanted = list(expected) if isinstance(expected, tuple | list) else [expected]
    if len(lazy) < len(wanted):
        # Least squares know the rank of a matrix of full rank.
        found, wanted = [np.asarray(x) for x in wanted], [x for x in wanted if not isinstance(x, int | np.integer)]
    assert len(lazy) == len(wanted), call.name
    for x, result, right in zip(lazy, compute(*lazy), wanted, strict=True):
        assert type(x._meta).__module__.split(".")[0] == kind or not x.ndim, f"{call.name}: {type(x._meta)}"
        # The rank of a matrix that has all of it is known before.
        assert type(result).__module__.split(".")[0] == kind or not x.ndim, f"{call.name}: {type(result)}"
        host = np.asarray(result.get() if hasattr(result, "get") else result)
        assert host.dtype == x.dtype
        ours, theirs = (abs(host), abs(np.asarray(right))) if call.signs else (host, np.asarray(right))
        near = 1e-3 if host.dtype == np.float32 else 1e-8
        if dtype:
            # Sums of integers wrap around; those of bool are whether there is any.
            theirs = theirs.astype(host.dtype) if host.dtype.kind in "bi" else theirs
            near *= max(1, abs(theirs).max(initial=0)) * (10 if host.dtype == np.float16 else 1)
            near = max(near, 1e-3 * max(1, abs(theirs).max(initial=0))) if dtype.startswith("float") else near
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near, err_msg=f"{call.name} {dtype}")
