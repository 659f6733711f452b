"""The gates of factorizations let no wrong result through."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from residuals import (
    assert_cholesky,
    assert_eig,
    assert_eigh,
    assert_inverse,
    assert_least_squares,
    assert_lu,
    assert_polar,
    assert_pseudoinverse,
    assert_qr,
    assert_schur,
    assert_solution,
    assert_svd,
)

RNG = np.random.default_rng(0)
A = RNG.standard_normal((30, 30))
TALL = RNG.standard_normal((40, 20))
S = A @ A.T + np.eye(30)
L = np.linalg.cholesky(S)
Q, R = np.linalg.qr(TALL)
B = RNG.standard_normal((30, 2))
TALL_B = RNG.standard_normal((40, 2))
P, LOWER, UPPER = scipy.linalg.lu(A, p_indices=True)


def positive_rows(x):
    """Return rows of which the largest component is positive, and the signs."""
    signs = np.sign(x[np.arange(len(x)), abs(x).argmax(axis=1)])
    return x * signs[:, None], signs


W, V = np.linalg.eigh(S)
V = positive_rows(V.T)[0].T
VALUES, RIGHT = np.linalg.eig(A)
_at = RIGHT[abs(RIGHT).argmax(axis=0), np.arange(30)]
EIG = VALUES.astype(complex), RIGHT * _at.conj() / abs(_at)
U, SV, VH = np.linalg.svd(TALL, full_matrices=False)
VH, SIGNS = positive_rows(VH)

GOOD = [
    (assert_cholesky, (S, L)),
    (assert_lu, (A, LOWER, UPPER, P)),
    (assert_qr, (TALL, Q, R)),
    (assert_solution, (A, np.linalg.solve(A, B), B)),
    (assert_inverse, (A, np.linalg.inv(A))),
    (assert_least_squares, (TALL, np.linalg.lstsq(TALL, TALL_B)[0], TALL_B)),
    (assert_least_squares, (TALL.T, np.linalg.lstsq(TALL.T, B[:20])[0], B[:20])),
    (assert_pseudoinverse, (TALL, np.linalg.pinv(TALL))),
    (assert_eigh, (S, W, V)),
    (assert_eig, (A, *EIG)),
    (assert_schur, (A, *scipy.linalg.schur(A))),
    (assert_schur, (A, *scipy.linalg.schur(A, "complex"))),
    (assert_svd, (TALL, U * SIGNS, SV, VH)),
    (assert_polar, (A, *scipy.linalg.polar(A))),
]


@pytest.mark.parametrize(("gate", "matrices"), GOOD)
def test_lapacks_results_pass(gate, matrices):
    gate(*matrices)


@pytest.mark.parametrize("value", [1e-8, np.nan])
@pytest.mark.parametrize(("gate", "matrices", "number"), [(g, m, i) for g, m in GOOD for i in range(1, len(m))])
def test_a_wrong_element_is_found(gate, matrices, number, value):
    if matrices[number].dtype.kind == "i":
        wrong = np.roll(matrices[number], 1)
    else:
        wrong = matrices[number].copy()
        wrong[(2, 1)[: wrong.ndim]] += value
    with pytest.raises(AssertionError):
        gate(*matrices[:number], wrong, *matrices[number + 1 :])


def test_wrong_types_and_forms_are_found():
    with pytest.raises(AssertionError, match="float32, expected float64"):
        assert_cholesky(S, L.astype(np.float32))
    with pytest.raises(AssertionError, match="not positive"):
        assert_cholesky(S, -L)
    with pytest.raises(AssertionError, match="not triangular"):
        assert_cholesky(S, L + np.triu(np.full_like(L, 1e-300), 1))


def test_pivots_of_the_diagonal_block_alone_are_found():
    """What stock Dask does: right up to rounding for harmless matrices, but not partial pivoting."""
    a = A.copy()
    a[:5, :5] *= 1e-3
    rows = np.arange(30)
    rows[:5] = np.argsort(scipy.linalg.lu(a[:5, :5], p_indices=True)[0])
    permuted = a[rows]
    lower = np.eye(30)
    upper = permuted.copy()
    for k in range(30):
        lower[k + 1 :, k] = upper[k + 1 :, k] / upper[k, k]
        upper[k + 1 :] -= np.outer(lower[k + 1 :, k], upper[k])
    with pytest.raises(AssertionError, match="not pivoted"):
        assert_lu(a, lower, np.triu(upper), np.argsort(rows))
