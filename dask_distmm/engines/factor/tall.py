"""QR of matrices with many more rows than columns, by their Gram matrices, if that is safe.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya 2015) is made of products of matrices::

    R1^H R1 = A^H A        Q1 = A R1^-1
    R2^H R2 = Q1^H Q1      Q  = Q1 R2^-1        R = R2 R1

Q1 loses orthogonality with the square of the condition of A; Q does not, as long as Q1^H Q1 is near to the identity. So
that is looked at. Matrices that are ill-conditioned (beyond some 10^7 in float64), of lower rank, or whose squares
overflow go to Householder's reflections.

Gram matrices of parts of the rows add up, and each part of Q is made of the same part of A: `gram`, `first_divisor`,
`gram_of_quotient`, `both_divisors` and `quotient` are the steps for a matrix whose rows are in several places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.kernels import Kernels

# If Q1^H Q1 differs from the identity by less in the 2-norm, Q is orthonormal up to rounding (section 3 there). The
# norm of Frobenius, which is computed, is not below that.
_NEAR = 5 / 64
# A triangle is made, and multiplied by, in so many parts of its columns, unless they have fewer columns than this.
_PARTS, _COLUMNS = 2, 128
# The diagonal of U is at least 1 in modulus, if each sign is chosen when its column is eliminated. Here all are chosen
# before, so that is looked at.
_AWAY = 0.5
# A product with an inverse loses this factor against a solution at most.
_WELL = 16
# Bytes of Q1 that are there at a time, on GPUs and in the caches of a CPU.
_DEVICE_BYTES, _HOST_BYTES = 2**29, 2**22


class Divisor:
    """An upper triangular matrix R that matrices are divided by from the right.

    It travels by way of the host.
    """

    def __init__(self, r: Any, well: bool, inverse: Any = None, xp: Any = np) -> None:
        self._r, self.well, self._inverse, self._xp = r, well, inverse, xp
        self._travels = r if xp is np else None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._travels is None:
            # On a stream of its own, which does not wait for work that has begun since; so as it lies in memory.
            with self._r.device:
                self._travels = self._r.T.get(stream=self._xp.cuda.Stream(non_blocking=True)).T
        return type(self), (self._travels, self.well)

    def r(self, kernels: Kernels) -> Any:
        """Return R on the device."""
        if self._xp is not kernels.xp:
            self._r, self._xp = kernels.xp.asarray(self._r, order="F"), kernels.xp
        return self._r

    def inverse(self, kernels: Kernels) -> Any:
        """Return the inverse of R on the device."""
        if self._inverse is None:
            self._inverse = _inverse(kernels, self.r(kernels))
        return self._inverse


@dataclasses.dataclass(frozen=True)
class Divisors:
    """The matrices that a matrix is divided by for Q, one after the other: one where that is as exact, or two."""

    each: tuple[Divisor, ...]

    def r(self, kernels: Kernels) -> Any:
        """Return R, (n, n), on the device."""
        first, *others = (one.r(kernels) for one in self.each)
        return others[0] @ first if others else first


def tall_qr(kernels: Kernels, a: Any) -> tuple[Any, Any]:
    """Return Q, (m, min(m, n)), and R, (min(m, n), n), of a matrix."""
    divisors = _divisors(kernels, a)
    if divisors is not None:
        return quotient(kernels, a, divisors), divisors.r(kernels)
    q, r = kernels.xp.linalg.qr(a)
    return q, r


def tall_r(kernels: Kernels, a: Any) -> Any:
    """Return R alone; as `tall_qr`."""
    divisors = _divisors(kernels, a)
    return kernels.xp.linalg.qr(a, mode="r") if divisors is None else divisors.r(kernels)


def _divisors(kernels: Kernels, a: Any) -> Divisors | None:
    """Return what a matrix is divided by for Q, if that is safe."""
    m, n = a.shape
    if not 0 < n <= m or (first := first_divisor(kernels, gram(kernels, a))) is None:
        return None
    return both_divisors(kernels, first, gram_of_quotient(kernels, a, first))


def gram(kernels: Kernels, a: Any) -> Any:
    """Return the lower triangle of ``A^H A`` in a column-major matrix, of a matrix of any memory order."""
    a, found = _contiguous(kernels, a), kernels.empty((a.shape[1],) * 2, a.dtype)
    found[...] = 0
    _gram(kernels, a, found)
    # In place: CuPy's result of a function is row-major.
    return found if _by_columns(a) else kernels.xp.conjugate(found, out=found)


def first_divisor(kernels: Kernels, gram: Any) -> Divisor | None:
    """Return R1, whose ``R1^H R1`` has this lower triangle, which is overwritten; None if there is no such R1."""
    xp, good, r = kernels.xp, kernels.potrf(gram)[0] == 0, _upper(kernels, gram)
    with np.errstate(all="ignore"):
        # Of A a column has the norm of R's. Rounding A R^-1 makes errors of |A| |R^-1| in Q, |A| |R^-1| |R| in Q R.
        norms = xp.linalg.norm(r, axis=0)
        inverse = _inverse(kernels, r)
        errors = norms @ abs(inverse)
        loss = xp.maximum(errors.max(), ((errors @ abs(r)) / norms).max())
        said = kernels.host(xp.stack([good.astype(loss.dtype), loss]))
    return Divisor(r, bool(said[1] <= _WELL), inverse, xp) if said[0] else None


def gram_of_quotient(kernels: Kernels, a: Any, first: Divisor) -> Any:
    """Return the lower triangle of ``Q1^H Q1``, of ``Q1 = A R1^-1``, in a column-major matrix."""
    found = kernels.empty((a.shape[1],) * 2, a.dtype)
    found[...] = 0
    for rows in _strips(kernels, a):
        found += gram(kernels, _divided(kernels, a[rows], first))
    return found


def both_divisors(kernels: Kernels, first: Divisor, gram: Any) -> Divisors | None:
    """Return what A is divided by for Q; None if that is not safe."""
    with np.errstate(all="ignore"):
        # NaN is not near.
        good = kernels.distance(gram) < _NEAR**2
    good &= kernels.potrf(gram)[0] == 0
    r = second = _upper(kernels, gram)
    if first.well:
        r = kernels.empty(gram.shape, gram.dtype)
        kernels.gemm(second, first.r(kernels), r, alpha=1, beta=0)
    # The look waits for R, too.
    if not bool(kernels.host(good)):
        return None
    last = Divisor(r, well=True, xp=kernels.xp)
    return Divisors((last,) if first.well else (first, last))


def quotient(kernels: Kernels, a: Any, divisors: Divisors) -> Any:
    """Return ``A R^-1``, row-major."""
    q = kernels.xp.empty(a.shape, a.dtype)
    *before, last = divisors.each
    for rows in _strips(kernels, a) if before else [slice(None)]:
        part = a[rows]
        for divisor in before:
            part = _divided(kernels, part, divisor)
        _divide_into(kernels, part, last, q[rows])
    return q


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


def _strips(kernels: Kernels, a: Any) -> Iterator[slice]:
    """Yield slices of the rows of a matrix, of a size that is worth a call of BLAS."""
    size = _DEVICE_BYTES if kernels.asynchronous else _HOST_BYTES
    step = max(a.shape[1], size // max(1, a.itemsize * a.shape[1]))
    for start in range(0, len(a), step):
        yield slice(start, start + step)


def _upper(kernels: Kernels, factor: Any) -> Any:
    """Return the conjugate transpose of a lower triangle, column-major, with zeros below the diagonal."""
    found = kernels.empty(factor.shape, factor.dtype)
    found[...] = kernels.triangle(factor, lower=True, unit=False).conj().T
    return found


def _inverse(kernels: Kernels, r: Any) -> Any:
    """Return the inverse of an upper triangular matrix, column-major."""
    found = kernels.empty(r.shape, r.dtype)
    found[...] = kernels.xp.eye(len(r), dtype=r.dtype)
    kernels.trsm(r, found, right=False, lower=False, op="N", unit=False)
    return found


def _divided(kernels: Kernels, a: Any, divisor: Divisor) -> Any:
    """Return ``A R^-1``, row-major."""
    found = kernels.xp.empty(a.shape, a.dtype)
    _divide_into(kernels, a, divisor, found)
    return found


def _divide_into(kernels: Kernels, a: Any, divisor: Divisor, out: Any) -> None:
    """Write ``A R^-1`` into a row-major matrix."""
    if not kernels.asynchronous:
        out[...] = a
        kernels.trsm(divisor.r(kernels), out.T, right=False, lower=False, op="T", unit=False)
        return
    # GPUs multiply many times as quick as they solve (1 H200, float64, 2097152 x 256: 4 ms, cuBLAS' trsm 50).
    a, inverse = _contiguous(kernels, a), divisor.inverse(kernels)
    _multiply(kernels, a, inverse, out, alpha=1, beta=0)
    if not divisor.well:
        # One step of iterative refinement, which is enough (Higham 2002, section 12.2).
        rest = kernels.xp.array(a, order="C")
        _multiply(kernels, out, divisor.r(kernels), rest, alpha=-1, beta=1)
        _multiply(kernels, rest, inverse, out, alpha=1, beta=1)


def _multiply(kernels: Kernels, a: Any, upper: Any, out: Any, *, alpha: float, beta: float) -> None:
    """Compute ``out = alpha A U + beta out``, row-major, of an upper triangular U."""
    columns = _by_columns(a)
    for start, stop in _columns(a.shape[1]):
        left, op = (a[:, :stop], "T") if columns else (a.T[:stop], "N")
        kernels.gemm(upper[:stop, start:stop], left, out.T[start:stop], "T", op, alpha=alpha, beta=beta)


def _columns(n: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts of n columns: of few, as each is a call."""
    step = max(_COLUMNS, -(-n // _PARTS))
    for start in range(0, n, step):
        yield start, min(n, start + step)


def _contiguous(kernels: Kernels, a: Any) -> Any:
    """Return a matrix whose rows or columns are contiguous."""
    return a if min(a.strides) == a.itemsize else kernels.xp.array(a, order="C")


def _by_columns(a: Any) -> bool:
    return bool(a.strides[0] < a.strides[1])


def _gram(kernels: Kernels, q: Any, gram: Any) -> None:
    """Write the lower triangle of ``Q^H Q`` to a column-major matrix of zeros; of a row-major Q the conjugate of that.

    Where calls are asynchronous the matrix may hold anything.
    """
    n, columns = q.shape[1], _by_columns(q)
    if columns or kernels.asynchronous:
        # In float32 cuBLAS' syrk takes ten times as long as its gemm (1 H200, 32768 x 512: 2.8 and 0.3 ms).
        for start, stop in _columns(n):
            strip, below, target = q[:, start:stop], q[:, start:], gram[start:, start:stop]
            if columns:
                kernels.gemm(below, strip, target, "C", "N", alpha=1, beta=0)
            else:
                kernels.gemm(below.T, strip.T, target, "N", "C", alpha=1, beta=0)
    else:
        kernels.herk(q.T, gram)
        # To multiply a complex infinity by -1 is an invalid operation, to turn its sign is none.
        kernels.xp.negative(gram, out=gram)
