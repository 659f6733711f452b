"""LAPACK's gates for decompositions and solutions: backward errors and orthogonality in units of rounding.

Each function takes what went in and what came out, and raises AssertionError if a residual is above `GATE`, as in
LAPACK's own test programs: norms are 1-norms, n is the larger extent of the matrix, eps belongs to the type of the
result. A NaN never passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

GATE = 30.0


def _in_double(*matrices: NDArray[Any]) -> list[NDArray[Any]]:
    """Return matrices in double precision."""
    return [x.astype(np.result_type(x.dtype, np.float64)) for x in matrices]


def _norm(x: NDArray[Any]) -> float:
    return float(np.linalg.norm(x, 1)) if x.size else 0.0


def _gate(what: str, error: NDArray[Any], scale: float, n: int, dtype: np.dtype) -> None:
    """Check the 1-norm of an error against GATE times n eps times `scale`."""
    bound = GATE * max(1, n) * float(np.finfo(dtype).eps) * scale
    found = _norm(error)
    assert found <= bound, f"{what} is {found / bound * GATE if bound else found:.3g}, expected at most {GATE:g}"


def _typed(dtype: np.dtype, **results: NDArray[Any]) -> None:
    for name, x in results.items():
        assert x.dtype == dtype, f"{name} is of {x.dtype}, expected {dtype}"


def assert_cholesky(a: NDArray[Any], factor: NDArray[Any], *, lower: bool = True) -> None:
    """Check that ``a`` is L L^H, or U^H U, and that the factor is triangular with a positive diagonal.

    Parameters
    ----------
    a
        The Hermitian matrix, all of it.
    factor
        L, or U where not `lower`.
    lower
        Which of them.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(a.dtype, factor=factor)
    left = factor if lower else factor.conj().T
    np.testing.assert_array_equal(np.triu(left, 1), 0, "the factor is not triangular")
    diagonal = np.diagonal(left)
    assert ((diagonal.real > 0) & (diagonal.imag == 0)).all(), "the diagonal of the factor is not positive"
    wide, full = _in_double(left, a)
    _gate("||A - L L^H|| / (n ||A|| eps)", full - wide @ wide.conj().T, _norm(full), len(a), a.dtype)


def assert_ldlt(a: NDArray[Any], lower: NDArray[Any], d: NDArray[Any]) -> None:
    """Check that a Hermitian ``a`` is L diag(d) L^H, that L has ones on its diagonal, and that d is real."""
    _typed(a.dtype, lower=lower)
    assert d.dtype == a.real.dtype
    np.testing.assert_array_equal(np.triu(lower), np.eye(len(a)), "L is not unit lower triangular")
    wide, full = _in_double(lower, a)
    _gate("||A - L D L^H|| / (n ||A|| eps)", full - wide * d @ wide.conj().T, _norm(full), len(a), a.dtype)


def assert_lu(a: NDArray[Any], lower: NDArray[Any], upper: NDArray[Any], p: NDArray[Any]) -> None:
    """Check that ``a`` is ``(L U)[p]``, that both are triangular, and that pivots were the largest of their columns.

    Parameters
    ----------
    a
        The matrix, m x n.
    lower, upper
        L, m x k with ones on its diagonal, and U, k x n; k is the smaller extent.
    p
        The permutation of rows, as SciPy has it.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(a.dtype, lower=lower, upper=upper)
    np.testing.assert_array_equal(np.sort(p), np.arange(len(a)), "p is not a permutation")
    np.testing.assert_array_equal(
        np.triu(lower), np.eye(*lower.shape), "L has no ones on its diagonal, or more above it"
    )
    np.testing.assert_array_equal(np.tril(upper, -1), 0, "U is not upper triangular")
    # LAPACK compares |re| + |im| of complex numbers.
    size, most = abs(lower), np.sqrt(2) if a.dtype.kind == "c" else 1.0
    assert (size <= most * (1 + 4 * np.finfo(a.dtype).eps)).all(), f"an element of L is {size.max()}: not pivoted"
    left, right, full = _in_double(lower, upper, a)
    _gate("||A - P L U|| / (n ||A|| eps)", full - (left @ right)[p], _norm(full), max(a.shape), a.dtype)


def assert_qr(a: NDArray[Any], q: NDArray[Any], r: NDArray[Any]) -> None:
    """Check that ``a`` is Q R, that Q's columns are orthonormal, and that R is upper triangular.

    Parameters
    ----------
    a
        The matrix, m x n.
    q, r
        Q, m x k, and R, k x n; k is m, or the smaller extent.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(a.dtype, q=q, r=r)
    np.testing.assert_array_equal(np.tril(r, -1), 0, "R is not upper triangular")
    left, right, full = _in_double(q, r, a)
    _gate("||A - Q R|| / (n ||A|| eps)", full - left @ right, _norm(full), max(a.shape), a.dtype)
    _gate("||I - Q^H Q|| / (n eps)", np.eye(q.shape[1]) - left.conj().T @ left, 1.0, len(q), a.dtype)


def assert_solution(a: NDArray[Any], x: NDArray[Any], b: NDArray[Any]) -> None:
    """Check that ``a @ x`` is ``b``, column by column, up to the backward error of a stable method.

    Parameters
    ----------
    a
        The square matrix, as it stands in the system: a transpose is given as such, a triangle without the rest.
    x, b
        The solutions and right-hand sides, a column each.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(a.dtype, x=x)
    wide, solution, right = _in_double(a, x, b)
    for column in range(b.shape[1]):
        error = right[:, column : column + 1] - wide @ solution[:, column : column + 1]
        scale = _norm(wide) * _norm(solution[:, column : column + 1])
        _gate(f"||b - A x|| / (n ||A|| ||x|| eps) of column {column}", error, scale, len(a), a.dtype)


def assert_inverse(a: NDArray[Any], x: NDArray[Any]) -> None:
    """Check that ``x`` is the inverse of ``a``.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(a.dtype, x=x)
    wide, inverse = _in_double(a, x)
    scale = _norm(wide) * _norm(inverse)
    _gate("||I - A X|| / (n ||A|| ||X|| eps)", np.eye(len(a)) - wide @ inverse, scale, len(a), a.dtype)


def assert_least_squares(a: NDArray[Any], x: NDArray[Any], b: NDArray[Any]) -> None:
    """Check that ``x`` makes ``||a @ x - b||`` least, and is the shortest of all that do, for ``a`` of full rank.

    Parameters
    ----------
    a
        The matrix, m x n.
    x, b
        The solutions and right-hand sides, a column each.

    Raises
    ------
    AssertionError
        It does not.
    """
    _typed(a.dtype, x=x)
    wide, solution, right = _in_double(a, x, b)
    m, n = a.shape
    error = right - wide @ solution
    scale = _norm(wide) * _norm(solution) + _norm(right)
    if m >= n:
        _gate("||A^H (b - A x)|| / (n ||A|| ...)", wide.conj().T @ error, _norm(wide.conj().T) * scale, m, a.dtype)
        return
    _gate("||b - A x|| / (n ||A|| ||x|| eps)", error, scale, n, a.dtype)
    # The shortest solution is a combination of A's rows; rounding of A turns the space of these by its condition.
    basis, triangle = np.linalg.qr(wide.conj().T)
    outside = solution - basis @ (basis.conj().T @ solution)
    scale = _norm(solution) * (float(np.linalg.cond(triangle)) if m else 1.0)
    _gate("x outside of A's rows / (n ||x|| cond(A) eps)", outside, scale, n, a.dtype)


def assert_pseudoinverse(a: NDArray[Any], x: NDArray[Any]) -> None:
    """Check the four conditions of Moore and Penrose, for ``a`` of full rank.

    Raises
    ------
    AssertionError
        One does not hold.
    """
    _typed(a.dtype, x=x)
    wide, inverse = _in_double(a, x)
    left, right, n = wide @ inverse, inverse @ wide, max(a.shape)
    cond = _norm(wide) * _norm(inverse)
    _gate("||A X A - A||", left @ wide - wide, cond * _norm(wide), n, a.dtype)
    _gate("||X A X - X||", right @ inverse - inverse, cond * _norm(inverse), n, a.dtype)
    _gate("||A X - (A X)^H||", left - left.conj().T, cond, n, a.dtype)
    _gate("||X A - (X A)^H||", right - right.conj().T, cond, n, a.dtype)


def assert_eigh(
    a: NDArray[Any], w: NDArray[Any], v: NDArray[Any], b: NDArray[Any] | None = None, first: int = 0
) -> None:
    """Check eigenvalues and eigenvectors of a Hermitian matrix: residuals, order, values, and the factors of vectors.

    Parameters
    ----------
    a
        The matrix, all of it.
    w, v
        Eigenvalues in ascending order and eigenvectors as columns, all or a range of them.
    b
        Of ``a @ v = b @ v * w``: the positive definite matrix; None for the identity.
    first
        Index of the first eigenvalue.

    Raises
    ------
    AssertionError
        They are not.
    """
    _typed(a.dtype, v=v)
    _typed(a.real.dtype, w=w)
    assert (np.diff(w) >= 0).all(), "eigenvalues are not in ascending order"
    n, (full, vectors, values) = len(a), _in_double(a, v, w)
    other = np.eye(n) if b is None else _in_double(b)[0]
    size = 1.0 if b is None else _norm(vectors)
    error = full @ vectors - other @ vectors * values
    _gate("||A V - B V W|| / (n ||A|| ||V|| eps)", error, _norm(full) * size, n, a.dtype)
    identity, scale = np.eye(len(w)), 1.0 if b is None else _norm(other) * size**2
    _gate("||I - V^H B V|| / (n ||B|| ||V||^2 eps)", identity - vectors.conj().T @ other @ vectors, scale, n, a.dtype)
    if b is None:
        expected = np.linalg.eigvalsh(full)[first : first + len(w)]
        _gate("||w - w of LAPACK|| / (n ||A|| eps)", (values - expected)[None], _norm(full), n, a.dtype)
    _assert_factors(vectors)


def assert_eig(a: NDArray[Any], w: NDArray[Any], v: NDArray[Any], vl: NDArray[Any] | None = None) -> None:
    """Check eigenvalues and eigenvectors of any matrix: residuals, norms, and the factors of vectors.

    Parameters
    ----------
    a
        The matrix.
    w, v
        Eigenvalues and eigenvectors as columns.
    vl
        Left eigenvectors as columns.

    Raises
    ------
    AssertionError
        They are not.
    """
    _typed(np.result_type(a.dtype, np.complex64), w=w, v=v)
    (full, values, right), n = _in_double(a, w, v), len(a)
    assert values.shape == (n,), "not all eigenvalues"
    _gate("||A V - V W|| / (n ||A|| eps)", full @ right - right * values, _norm(full), n, a.dtype)
    sides = [right]
    if vl is not None:
        _typed(w.dtype, vl=vl)
        (left,) = _in_double(vl)
        sides.append(left)
        error = (left.conj().T @ full - values[:, None] * left.conj().T).conj().T
        _gate("||V^H A - W V^H|| / (n ||A|| eps)", error, _norm(full), n, a.dtype)
    _gate("||trace A - sum W|| / (n ||A|| eps)", np.array([[np.trace(full) - values.sum()]]), _norm(full), n, a.dtype)
    for vectors in sides:
        _gate("||1 - |V||| / (n eps)", 1 - np.linalg.norm(vectors, axis=0)[None], 1.0, n, a.dtype)
        _assert_factors(vectors)


def assert_schur(a: NDArray[Any], t: NDArray[Any], z: NDArray[Any]) -> None:
    """Check that ``a`` is Z T Z^H, that Z is unitary, and that T is triangular, with 2 x 2 blocks if it is real.

    Parameters
    ----------
    a, t, z
        The matrix, its Schur form, and the unitary factor.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(t.dtype, z=z)
    (full, form, unitary), n = _in_double(a, t, z), len(a)
    real = t.dtype.kind != "c"
    np.testing.assert_array_equal(np.tril(form, -1 - real), 0, "T is not triangular")
    below = np.diagonal(form, -1) != 0
    assert not (below[1:] & below[:-1]).any(), "blocks of T are larger than 2 x 2"
    _gate("||A - Z T Z^H|| / (n ||A|| eps)", full - unitary @ form @ unitary.conj().T, _norm(full), n, t.dtype)
    _gate("||I - Z^H Z|| / (n eps)", np.eye(n) - unitary.conj().T @ unitary, 1.0, n, t.dtype)


def assert_svd(a: NDArray[Any], u: NDArray[Any], s: NDArray[Any], vh: NDArray[Any]) -> None:
    """Check a singular value decomposition: residuals, order, values, and the factors of vectors.

    Parameters
    ----------
    a
        The matrix, m x n.
    u, s, vh
        Left singular vectors as columns, singular values in descending order, right singular vectors as rows.

    Raises
    ------
    AssertionError
        They are not.
    """
    _typed(a.dtype, u=u, vh=vh)
    _typed(a.real.dtype, s=s)
    assert (np.diff(s, append=0) <= 0).all(), "singular values are not in descending order"
    (full, left, values, right), (m, n), k = _in_double(a, u, s, vh), a.shape, len(s)
    _gate("||A - U S V^H|| / (n ||A|| eps)", full - left[:, :k] * values @ right[:k], _norm(full), max(m, n), a.dtype)
    for name, one in (("U^H U", left), ("V^H V", right.conj().T)):
        identity = np.eye(one.shape[1])
        _gate(f"||I - {name}|| / (n eps)", identity - one.conj().T @ one, 1.0, max(m, n), a.dtype)
    if k:
        expected = np.linalg.svd(full, compute_uv=False)
        _gate("||s - s of LAPACK|| / (n ||A|| eps)", (values - expected)[None], _norm(full), max(m, n), a.dtype)
    _assert_factors(right.conj().T if m >= n else left)


def assert_polar(a: NDArray[Any], u: NDArray[Any], p: NDArray[Any]) -> None:
    """Check that ``a`` is U P, that the shorter vectors of U are orthonormal, and that P is positive semidefinite.

    Parameters
    ----------
    a, u
        The matrix, and its unitary factor, m x n.
    p
        The Hermitian factor, n x n.

    Raises
    ------
    AssertionError
        It is not.
    """
    _typed(a.dtype, u=u, p=p)
    (full, unitary, hermitian), n = _in_double(a, u, p), max(a.shape)
    short = unitary if a.shape[0] >= a.shape[1] else unitary.conj().T
    _gate("||A - U P|| / (n ||A|| eps)", full - unitary @ hermitian, _norm(full), n, a.dtype)
    _gate("||I - U^H U|| / (n eps)", np.eye(short.shape[1]) - short.conj().T @ short, 1.0, n, a.dtype)
    _gate("||P - P^H|| / (n ||A|| eps)", hermitian - hermitian.conj().T, _norm(full), n, a.dtype)
    negative = np.minimum(np.linalg.eigvalsh(hermitian), 0)
    _gate("negative eigenvalues of P / (n ||A|| eps)", negative[None], _norm(full), n, a.dtype)


def _assert_factors(vectors: NDArray[Any]) -> None:
    """Check that the first one of the largest components of each column is real and positive."""
    if vectors.size:
        size = abs(vectors)
        # Components of nearly the same size may have changed places by rounding.
        near = size >= size.max(axis=0) * (1 - 1e-3)
        good = (vectors.real > 0) & (abs(vectors.imag) <= 1e-3 * size)
        assert (near & good).any(axis=0).all(), "the largest component of a vector is not real and positive"
