"""The exponential function: ranks have rows of all matrices; the second one of each product comes to all."""

from __future__ import annotations

from typing import Any, Unpack, cast

import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.jit import jit
from dask_distmm.arrays.linalg.factorize import computed
from dask_distmm.arrays.linalg.public import POWERS, Operand, RunOptions
from dask_distmm.arrays.linalg.stacks import public
from dask_distmm.errors import MatrixError, PlanError, check_square, not_finite
from dask_distmm.tracing.control import fori_loop
from dask_distmm.tracing.functions import callback

# From this order on all workers compute exponentials. Two of one thread, 1024 and 2048: 0.35 and 1.9 s of each one's
# CPU, of one alone 0.55 and 3.2; of smaller matrices messages take longer than what is saved.
_SHARED = 1024
# The Taylor polynomial of degree 18 of the exponential function, in five products (Bader, Blanes, Casas 2019): factors
# of I, A, A^2, A^3, A^6 in five matrices, of which ``B2 + (B3 + C) C`` with ``C = B4 + B1 B5`` is the polynomial.
_TAYLOR = (
    (0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0.0),
    (0.0, 3.97849749499645077844e-01, 1.36783778460411720168, 4.98289622525382669416e-01, -6.37898194594723280150e-04),
    (-10.9676396052962061844, 1.68015813878906206114, 5.71779846478865511061e-02, -6.98210122488052056106e-03,
     3.34975017086070470649e-05),
    (-9.04316832390810593223e-02, -6.76404519071381882256e-02, 6.75961301770459654925e-02, 2.95552570429315521194e-02,
     -1.39180257516060693404e-05),
    (0.0, 0.0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)  # fmt: skip
# The norm up to which it has full precision, by bytes of a real number.
_NORMS = {4: 3.010066362817634, 8: 1.090863719290036}


@public(RunOptions, POWERS)
def expm(A: Operand, **how: Unpack[RunOptions]) -> Array:
    """Return the exponential of a matrix.

    A Taylor polynomial of a fraction of the matrix is squared again and again (Al-Mohy, Higham 2009; Bader, Blanes,
    Casas 2019). All is products, in one run: each worker has rows of all matrices, and gets the second matrix of
    each product. ``method="rows"``: rows are cut as the axis of `A` that is in more chunks. ``"local"``: one worker has
    the whole matrix. ``"auto"``: that for small matrices.

    Parameters
    ----------
    A : array, (n, n)
        The matrix.

    Returns
    -------
    array, (n, n)
        The exponential, in the chunks of `A`.

    Raises
    ------
    PlanError
        `A` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or too large.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.expm([[0.0, 1.0], [0.0, 0.0]]).compute().round(12)
    array([[1., 1.],
           [0., 1.]])
    """
    a, method = computed("A", A), how.get("method", "auto")
    check_square("A", a.shape)
    if method == "columns":
        raise PlanError("method='columns' is not for expm: pass 'rows' or 'local', or leave it out")
    if not a.size:
        return a
    whole = method == "local" or (method == "auto" and len(a) < _SHARED)
    rows = a.rechunk((-1 if whole else max(a.chunks, key=len), -1))
    return cast(Array, _expm.run(how, rows).rechunk(a.chunks))


@jit
def _expm(A: Any) -> Any:
    """Square a Taylor polynomial of A / 2^s, s times.

    The s is that of norms of A^2 and A^3, which for matrices that are far from normal is less than that of A's.
    """
    square = A @ A
    cube = square @ A
    norms = [abs(x).sum(0).astype(np.float64).max() for x in (A, square, cube)]
    callback(_check, *norms)
    # Divided by that power of two, powers of A have norms below the limit.
    real, limit, least = A.real.dtype, _NORMS[A.real.dtype.itemsize], np.arange(512.0)
    counts = [(x >= limit**p * 2.0 ** (p * least[: 1018 // p])).sum() for p, x in ((2, norms[1]), (3, norms[2]))]
    s = np.maximum(*counts)
    scale = np.exp2(-s).astype(real)
    third = cube * scale**3
    powers = A * scale, square * scale**2, third, third @ third
    rows, columns = np.zeros_like(A[:, 0], dtype=int) + np.arange(len(A)), np.arange(len(A))

    def polynomial(factors: Any) -> Any:
        terms = sum(c * x for c, x in zip(factors[1:], powers, strict=True) if c)
        return np.where(rows[:, None] == columns, factors[0], 0).astype(real) + terms if factors[0] else terms

    b1, b2, b3, b4, b5 = map(polynomial, _TAYLOR)
    middle = b4 + b1 @ b5
    return fori_loop(0, s, lambda i, x: x @ x, b2 + (b3 + middle) @ middle)


def _check(norm: Any, *of_powers: Any) -> None:
    if not np.isfinite(norm):
        raise MatrixError(not_finite("A", option=False))
    if not np.isfinite(of_powers).all():
        raise MatrixError("powers of A overflow, and so would its exponential: A has too large elements")
