"""QR of a matrix with many more rows than columns, on one rank: by its Gram matrix, if that is safe.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya 2015) is made of products of matrices::

    R1^H R1 = A^H A        Q1 = A R1^-1
    R2^H R2 = Q1^H Q1      Q  = Q1 R2^-1        R = R2 R1

Q1 loses orthogonality with the square of the condition of A; Q does not, as long as Q1^H Q1 is near to the identity. So
that is looked at. Matrices that are ill-conditioned (beyond some 10^7 in float64), of lower rank, or whose squares
overflow go to Householder's reflections.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.kernels import Kernels

__all__ = ["gram_qr", "gram_reflectors", "tall_qr"]

# If Q1^H Q1 differs from the identity by less in the 2-norm, Q is orthonormal up to rounding (section 3 there). The
# norm of Frobenius, which is computed, is not below that.
_NEAR = 5 / 64
# Columns of the Gram matrix that one GEMM makes.
_STRIP = 512
# The diagonal of U is at least 1 in modulus, if each sign is chosen when its column is eliminated. Here all are chosen
# before, so that is looked at.
_AWAY = 0.5


def tall_qr(kernels: Kernels, a: Any) -> tuple[Any, Any]:
    """Return Q, (m, min(m, n)), and R, (min(m, n), n), of a matrix.

    Parameters
    ----------
    kernels
        The arithmetic.
    a
        The matrix, (m, n), of any memory order.
    """
    if (found := gram_qr(kernels, a)) is not None:
        return found
    q, r = kernels.xp.linalg.qr(a)
    return q, r


def gram_qr(kernels: Kernels, a: Any) -> tuple[Any, Any] | None:
    """Return Q, row-major, and R of a matrix by CholeskyQR2, or None where that is not safe; as for `tall_qr`."""
    m, n = a.shape
    if not 0 < n <= m:
        return None
    q = kernels.xp.array(a, order="C")
    if (first := _gram_factor(kernels, q)) is None:
        return None
    _divide(kernels, q, first)
    if (second := _gram_factor(kernels, q, near=True)) is None:
        return None
    _divide(kernels, q, second)
    return q, kernels.triangle(second, lower=True, unit=False).T @ kernels.triangle(first, lower=True, unit=False).T


def gram_reflectors(kernels: Kernels, a: Any) -> Any:
    """Overwrite a column-major matrix with R and reflectors and return T, as `Kernels.geqrt`, by CholeskyQR2.

    The reflectors are reconstructed (Ballard, Demmel, Grigori, Jacquelin, Nguyen, Solomonik 2014)::

        Q - [S; 0] = V U        T = -U S V1^-H        A = (I - V T V1^H) S R

    S has the signs that keep the diagonal of Q - S away from zero, and V1 is the upper block of V. Of Q only the upper
    block is computed: the rows of V below are those of ``Q1 (U R2)^-1``.

    Returns
    -------
    matrix or None
        T; None, with `a` as it was, where the factorization into V and U would need pivots, or Q is not safe.
    """
    (m, n), xp = a.shape, kernels.xp
    if not 0 < n <= m:
        return None
    q = kernels.empty((m, n), a.dtype)
    assign(q, a)
    # Each look at a device is a wait for it: it computes all, and is asked once whether that was safe.
    with np.errstate(all="ignore"):
        first = _gram(kernels, q)
        good = kernels.potrf(first)[0] == 0
        _divide(kernels, q, first)
        second = _gram(kernels, q)
        good &= _near_identity(kernels, second)
        good &= kernels.potrf(second)[0] == 0
        top = kernels.empty((n, n), a.dtype)
        top[...] = q[:n]
        _divide(kernels, top, second)
        signs = xp.where(kernels.diagonal(top).real > 0, -1, 1).astype(a.dtype)
        top -= xp.diag(signs)
        good &= (kernels.getrf(top) == xp.arange(n)).all()
        good &= (abs(kernels.diagonal(top)) > _AWAY).all()
    if not bool(kernels.host(good)):
        return None
    r1, r2 = (kernels.triangle(lower, lower=True, unit=False).conj().T for lower in (first, second))
    upper, divisor = kernels.triangle(top, lower=False, unit=False), kernels.empty((n, n), a.dtype)
    divisor[...] = upper @ r2
    assign(a[n:], q[n:])
    kernels.trsm(divisor, a[n:], right=True, lower=False, op="N", unit=False)
    t = upper
    t *= -signs
    kernels.trsm(top, t, right=True, lower=True, op="C", unit=True)
    a[:n] = xp.tril(top, -1) + xp.triu(signs[:, None] * (r2 @ r1))
    return t


def _gram_factor(kernels: Kernels, q: Any, *, near: bool = False) -> Any:
    """Return L, in the lower triangle of a column-major matrix, with ``L L^H = Q^H Q``; None if there is no such L.

    Of a row-major Q it is the conjugate of that: in memory Q is its transpose.

    Parameters
    ----------
    near
        Whether Q is to be orthonormal already, but for a small error; if it is not, None is returned.
    """
    gram = _gram(kernels, q)
    if near and not bool(kernels.host(_near_identity(kernels, gram))):
        return None
    return None if int(kernels.host(kernels.potrf(gram))[0]) else gram


def _gram(kernels: Kernels, q: Any) -> Any:
    """Return the lower triangle of ``Q^H Q``, in a column-major matrix; of a row-major Q the conjugate of that."""
    n, columns = q.shape[1], q.strides[0] < q.strides[1]
    gram = kernels.empty((n, n), q.dtype)
    if columns or kernels.asynchronous:
        # In float32 cuBLAS' syrk takes ten times as long as its gemm (1 H200, 32768 x 512: 2.8 and 0.3 ms).
        for at in range(0, n, _STRIP):
            strip, below = q[:, at : at + _STRIP], q[:, at:]
            target = gram[at:, at : at + _STRIP]
            if columns:
                kernels.gemm(below, strip, target, "C", "N", alpha=1, beta=0)
            else:
                kernels.gemm(below.T, strip.T, target, "N", "C", alpha=1, beta=0)
    else:
        gram[...] = 0
        kernels.herk(q.T, gram)
        # To multiply a complex infinity by -1 is an invalid operation, to turn its sign is none.
        kernels.xp.negative(gram, out=gram)
    return gram


def _divide(kernels: Kernels, q: Any, factor: Any) -> None:
    """Overwrite Q with ``Q R^-1``, R from `_gram_factor` of a matrix of the same order of memory."""
    if q.strides[0] < q.strides[1]:
        kernels.trsm(factor, q, right=True, lower=True, op="C", unit=False)
    else:
        kernels.trsm(factor, q.T, right=False, lower=True, op="N", unit=False)


def _near_identity(kernels: Kernels, gram: Any) -> Any:
    """Return whether a Hermitian matrix, its lower triangle, is near to the identity, on its device. NaN is not."""
    with np.errstate(all="ignore"):
        # Each element below the diagonal stands for two.
        error = 2 * (abs(kernels.xp.tril(gram, -1)) ** 2).sum() + (abs(kernels.diagonal(gram) - 1) ** 2).sum()
        return error < _NEAR**2
