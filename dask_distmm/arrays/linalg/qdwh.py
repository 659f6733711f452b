"""The unitary factor of a polar decomposition, on all workers: QDWH, out of products, QR and Cholesky factorizations.

The iteration takes all singular values of a matrix to one and leaves its singular vectors as they are: Y. Nakatsukasa,
Z. Bai, F. Gygi, Optimizing Halley's iteration for computing the matrix polar decomposition, SIAM J. Matrix Anal. Appl.
31 (2010). A step with weights a, b, c is

    X (a + b X^H X) (1 + c X^H X)^-1  =  b/c X + (a - b/c) X (1 + c X^H X)^-1

where the inverse comes from the QR factorization of X above an identity while c is large, and from a Cholesky
factorization when it is not. The weights depend only on a lower bound of the singular values. So the graph of all
steps is made at once, for a bound that holds for all matrices: noise is added to the matrix, no larger than its
rounding, which lifts singular values from zero.
"""

from __future__ import annotations

import math
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.linalg.factorize import adjoint, factorize, filled, plus_ones, times, unchecked
from dask_distmm.arrays.linalg.factors import qr
from dask_distmm.arrays.linalg.public import RunOptions
from dask_distmm.errors import MatrixError

# Up to this weight c the Cholesky factorization is as accurate as the QR factorization (Nakatsukasa and others, 2010).
_CHOLESKY = 100
# The least singular value of a random matrix is this many times smaller than expected once in 10^9 matrices.
_RARE = 1e-9


def weights(least: float, eps: float) -> list[tuple[float, float, float]]:
    """Return the weights of all steps that take singular values from `least` on to 1, up to a rounding `eps`."""
    found = []
    while abs(1 - least) > eps:
        square = least**2
        root = math.sqrt(1 + (d := (4 * (1 - square) / square**2) ** (1 / 3)))
        a = root + math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root)) / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        found.append((a, b, c))
        least = min(1.0, least * (a + b * square) / (1 + c * square))
    return found


def unitary_factor(a: Array, how: RunOptions) -> Array:
    """Return the unitary factor of a matrix by QDWH, in the chunks of the matrix."""
    if not a.size:
        return a
    if a.shape[0] < a.shape[1]:
        return adjoint(unitary_factor(adjoint(a), how))
    n, eps = a.shape[1], float(np.finfo(a.dtype).eps)
    x, how = _scaled(a, eps / (2 * math.sqrt(n))), unchecked(how)
    for first, second, third in weights(_RARE * eps / (2 * n), eps):
        x = second / third * x + (first - second / third) * _inverse_applied(x, third, how)
    return x


def _scaled(a: Array, noise: float) -> Array:
    """Return a matrix, scaled to singular values of at most 1, with noise of a standard deviation."""
    a = filled(a)
    largest = abs(a).max()
    a = a / largest.map_blocks(_divisor, dtype=largest.dtype, meta=largest._meta)
    # The 2-norm is at most the root of the product of these two.
    bound = da.sqrt(da.linalg.norm(a, 1) * da.linalg.norm(a, np.inf))
    a = a / bound.map_blocks(_divisor, dtype=bound.dtype, meta=bound._meta)
    return with_noise(a, noise)


def _divisor(size: Any) -> Any:
    """Return the size of a matrix to divide by."""
    if not np.isfinite(size):
        raise MatrixError("the matrix must not contain infs or NaNs: replace them")
    return size if size > 0 else size + 1


def with_noise(a: Array, deviation: float, seed: int = 0) -> Array:
    """Return a matrix with random numbers of a standard deviation added, the same ones for the same seed and chunks."""
    return a.map_blocks(_with_noise, deviation, seed, dtype=a.dtype, meta=a._meta)


def _with_noise(block: Any, deviation: float, seed: int, block_info: Any = None) -> Any:
    rng = np.random.default_rng([seed, *block_info[0]["chunk-location"]])
    return block + np.asarray(deviation * rng.standard_normal(block.shape), block.dtype, like=block)


def _inverse_applied(x: Array, c: float, how: RunOptions) -> Array:
    """Return ``x @ inv(1 + c x^H x)``."""
    (m, n), cols = x.shape, x.chunks[1]
    if c <= _CHOLESKY:
        operands = {"a": _plus_identity(c * times(adjoint(x), x, how)), "b": adjoint(x)}
        wanted = {"x": (cols, x.chunks[0])}
        return adjoint(factorize("solve", operands, wanted, how=how, assume_a="pos")["x"])
    identity = _plus_identity(da.zeros_like(x, shape=(n, n), chunks=(cols, cols)))
    q, _ = qr(da.concatenate([math.sqrt(c) * x, identity]), **how)
    return times(q[:m], adjoint(q[m:]), how) / math.sqrt(c)


def _plus_identity(x: Array) -> Array:
    return x.map_blocks(_plus_ones, dtype=x.dtype, meta=x._meta)


def _plus_ones(block: Any, block_info: Any = None) -> Any:
    first, other = (start for start, _ in block_info[0]["array-location"])
    return plus_ones(block, first - other)
