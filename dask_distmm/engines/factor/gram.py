"""Gram matrices, and what is made of them: QR of matrices with many more rows than columns, if that is safe.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya 2015) is made of products of matrices; `programs.composite` has
its steps. Matrices that are ill-conditioned (beyond about 10^7 in float64), of lower rank, or whose squares overflow go
to Householder's reflections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dask_distmm.engines.factor.kernels import Kernels, assign

# If Q1^H Q1 differs from the identity by less in the 2-norm, Q is orthonormal up to rounding (section 3 there). The
# norm of Frobenius, which is computed, is not below that.
_NEAR = 5 / 64
# A triangle is made in this many parts of its columns, unless they have fewer columns than this.
_PARTS, _COLUMNS = 2, 128
# The diagonal of U is at least 1 in modulus, if each sign is chosen when its column is eliminated. Here all are chosen
# before, so that is looked at.
_AWAY = 0.5
# Bytes of a part of a chunk of rows, on GPUs and in the caches of a CPU.
_DEVICE_BYTES, _HOST_BYTES = 2**29, 2**22


def add_gram(kernels: Kernels, a: Any, g: Any) -> None:
    """Add the lower triangle of ``A^H A``, of a matrix of any memory order, to that of a column-major matrix."""
    a = a if min(a.strides) == a.itemsize else kernels.xp.array(a, order="C")
    if _by_columns(a) or g.dtype.kind != "c":
        _gram(kernels, a, g, beta=1)
        return
    # Of a row-major matrix it is the conjugate.
    found = kernels.empty(g.shape, g.dtype)
    found[...] = 0
    _gram(kernels, a, found)
    g += kernels.xp.conjugate(found, out=found)


def is_near(kernels: Kernels, gram: Any) -> bool:
    """Whether a Gram matrix is so near to the identity that one more division makes its matrix orthonormal."""
    with np.errstate(all="ignore"):
        # NaN is not near.
        return bool(kernels.host(kernels.distance(gram) < _NEAR**2))


def strips_of(kernels: Kernels, a: Any) -> Iterator[slice]:
    """Yield slices of the rows of a matrix, of a size that is worth a call of BLAS."""
    size = _DEVICE_BYTES if kernels.asynchronous else _HOST_BYTES
    step = max(a.shape[1], size // max(1, a.dtype.itemsize * a.shape[1]))
    for start in range(0, a.shape[0], step):
        yield slice(start, start + step)


def upper_of(kernels: Kernels, factor: Any) -> Any:
    """Return the conjugate transpose of a lower triangle, column-major, with zeros below the diagonal."""
    found = kernels.empty(factor.shape, factor.dtype)
    found[...] = kernels.triangle(factor, lower=True, unit=False).conj().T
    return found


def gram_reflectors(kernels: Kernels, a: Any) -> Any:
    """Overwrite a column-major matrix with R and reflectors and return T, as `Kernels.geqrt`, by CholeskyQR2.

    The reflectors are reconstructed (Ballard, Demmel, Grigori, Jacquelin, Nguyen, Solomonik 2014)::

        Q - [S; 0] = V U        T = -U S V1^-H        A = (I - V T V1^H) S R

    S has the signs that keep the diagonal of Q - S away from zero, and V1 is the upper block of V. Of Q only the upper
    block is computed: the rows of V below are those of ``Q1 (U R2)^-1``.
    """
    (m, n), xp = a.shape, kernels.xp
    if not 0 < n <= m:
        return None
    # Beside products of large matrices each kernel of a GPU waits for its turn: the fewer, the better.
    q, top = kernels.empty((m, n), a.dtype), kernels.empty((n, n), a.dtype)
    first, second, product, divisor = (kernels.empty((n, n), a.dtype) for _ in range(4))
    assign(q, a)
    # Each look at a device is a wait for it: it computes all, and is asked once whether that was safe.
    with np.errstate(all="ignore"):
        _gram(kernels, q, first)
        infos = [kernels.potrf(first)]
        kernels.trsm(first, q, right=True, lower=True, op="C", unit=False)
        _gram(kernels, q, second)
        distance = kernels.distance(second)
        infos.append(kernels.potrf(second))
        assign(top, q[:n])
        kernels.trsm(second, top, right=True, lower=True, op="C", unit=False)
        diagonal = xp.lib.stride_tricks.as_strided(top, (n,), (sum(top.strides),))
        signs = xp.copysign(1, -diagonal.real)
        diagonal -= signs
        kernels.getrf(top, pivoting=False)
        pivots = kernels.diagonal(top)
        good = kernels.host(distance) < _NEAR**2 and not any(kernels.host(info)[0] for info in infos)
        if not good or not (abs(kernels.host(pivots)) > _AWAY).all():
            return None
    upper, l1, l2 = (
        kernels.triangle(one, lower=lower, unit=False) for one, lower in ((top, False), (first, True), (second, True))
    )
    kernels.gemm(upper, l2, divisor, "N", "C", alpha=1, beta=0)
    assign(a[n:], q[n:])
    kernels.trsm(divisor, a[n:], right=True, lower=False, op="N", unit=False)
    # T is made where U is.
    upper *= -signs
    kernels.trsm(top, upper, right=True, lower=True, op="C", unit=True)
    kernels.gemm(l1, l2, product, alpha=1, beta=0)
    assign(a[:n], xp.where(xp.tri(n, k=-1, dtype=bool), top, signs[:, None] * product.conj().T))
    return upper


def _columns(n: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts of n columns: of few, as each is a call."""
    step = max(_COLUMNS, -(-n // _PARTS))
    for start in range(0, n, step):
        yield start, min(n, start + step)


def _by_columns(a: Any) -> bool:
    return bool(a.strides[0] < a.strides[1])


def _gram(kernels: Kernels, q: Any, gram: Any, beta: int = 0) -> None:
    """Write the lower triangle of ``Q^H Q`` to a column-major matrix of zeros; of a row-major Q the conjugate of that.

    Where calls are asynchronous the matrix may hold anything. With `beta` 1 it is added to what is there.
    """
    n, columns = q.shape[1], _by_columns(q)
    if columns or kernels.asynchronous:
        # In float32 cuBLAS' syrk takes ten times as long as its gemm (1 H200, 32768 x 512: 2.8 and 0.3 ms).
        for start, stop in _columns(n):
            strip, below, target = q[:, start:stop], q[:, start:], gram[start:, start:stop]
            if columns:
                kernels.gemm(below, strip, target, "C", "N", alpha=1, beta=beta)
            else:
                kernels.gemm(below.T, strip.T, target, "N", "C", alpha=1, beta=beta)
    else:
        if beta:
            kernels.xp.negative(gram, out=gram)
        kernels.herk(q.T, gram)
        # To multiply a complex infinity by -1 is an invalid operation, to turn its sign is none.
        kernels.xp.negative(gram, out=gram)
