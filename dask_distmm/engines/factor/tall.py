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

from dask_distmm.engines.factor.kernels import Kernels

__all__ = ["tall_qr"]

# If Q1^H Q1 differs from the identity by less in the 2-norm, Q is orthonormal up to rounding (section 3 there). The
# norm of Frobenius, which is computed, is not below that.
_NEAR = 5 / 64


def tall_qr(kernels: Kernels, a: Any) -> tuple[Any, Any]:
    """Return Q, (m, min(m, n)), and R, (min(m, n), n), of a matrix.

    Parameters
    ----------
    kernels
        The arithmetic.
    a
        The matrix, (m, n), of any memory order.
    """
    m, n = a.shape
    if 0 < n <= m:
        q = kernels.xp.array(a, order="C")
        if (first := _orthogonalize(kernels, q)) is not None:
            second = _orthogonalize(kernels, q, near=True)
            if second is not None:
                return q, second @ first
    q, r = kernels.xp.linalg.qr(a)
    return q, r


def _orthogonalize(kernels: Kernels, q: Any, *, near: bool = False) -> Any:
    """Overwrite a row-major Q with ``Q R^-1``, where ``R^H R = Q^H Q``, and return R; None if there is no such R.

    With `near`, Q is to be orthonormal already, but for a small error; otherwise None is returned, too.
    """
    # In memory it is the column-major transpose: Q^T = L X with L = R^T, and conj(Q^H Q) = Q^T conj(Q) = L L^H.
    turned, n = q.T, q.shape[1]
    gram = kernels.empty((n, n), q.dtype)
    gram[...] = 0
    kernels.herk(turned, gram)
    # To multiply a complex infinity by -1 is an invalid operation, to turn its sign is none.
    kernels.xp.negative(gram, out=gram)
    if near and not _near_identity(kernels.host(kernels.triangle(gram, lower=True, unit=False))):
        return None
    if int(kernels.host(kernels.potrf(gram))[0]):
        return None
    kernels.trsm(gram, turned, right=False, lower=True, op="N", unit=False)
    return kernels.triangle(gram, lower=True, unit=False).T


def _near_identity(lower: Any) -> bool:
    """Whether a Hermitian matrix, given by its lower triangle, is near to the identity. NaN is not."""
    with np.errstate(all="ignore"):
        error = abs(lower - np.eye(len(lower))) ** 2
        return bool(2 * error.sum() - np.trace(error) < _NEAR**2)
