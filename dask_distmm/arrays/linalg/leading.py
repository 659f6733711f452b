"""The leading singular values of a Dask matrix, by random projection; and principal components."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import dask.array as da
import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.kinds import rechunked
from dask_distmm.arrays.linalg.factorize import (
    adjoint,
    by_program,
    common_type,
    computed,
    goes_by_rows,
    left_beyond_memory,
    matrix,
    operand,
    times,
    unchecked,
)
from dask_distmm.arrays.linalg.factors import qr, right_vectors, svd, with_noise
from dask_distmm.arrays.linalg.public import COMPONENTS, COMPRESSED, MOMENTS, Operand, RunOptions, check_range
from dask_distmm.arrays.linalg.stacks import public
from dask_distmm.arrays.request import check_names, check_workers
from dask_distmm.errors import PlanError
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.planning.program import ProgramProblem

# Deviations from a Gram matrix are as good as from the matrix if the largest is at most this many times the least.
# Those of sparse rows are computed in float64, and are as good as a covariance matrix has them.
_SPREAD, _SPARSE_SPREAD = 32, 2**12


@public(RunOptions, COMPRESSED)
def svd_compressed(
    a: Operand,
    k: int,
    *,
    n_power_iter: int = 0,
    n_oversamples: int = 10,
    seed: int | None = 0,
    **how: Unpack[RunOptions],
) -> tuple[Array, Array, Array]:
    """Return about the `k` largest singular values of a matrix, and their vectors.

    The products of the matrix and random vectors are made orthonormal; the matrix is projected on these and
    decomposed: N. Halko, P. G. Martinsson, J. A. Tropp, SIAM Review 53 (2011), algorithms 4.4 and 5.1. The matrix is
    read ``2 + 2 n_power_iter`` times, each time by one collective product; a tall one, whose rows stay where they are,
    ``1 + n_power_iter`` times, or once more. Persist it where it fits into memory.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.
    k : int
        How many singular values.
    n_power_iter : int
        Iterations that make the result more accurate where singular values decrease slowly.
    n_oversamples : int
        Number of random vectors in addition to `k`.
    seed : int, optional
        Seed for the random vectors: with the same seed and the same chunks the result is the same, up to rounding.

    Returns
    -------
    u : array, (m, k)
        Orthonormal columns.
    s : array, (k,), real
        In descending order; each at most as large as the true one, but for rounding.
    vh : array, (k, n)
        Orthonormal rows. The first one of the largest components of each is real and positive; where m < n that of each
        column of u.

    Raises
    ------
    PlanError
        `k` is not within 1 and the smaller extent, or another number is negative.
    MatrixError
        When it is computed: an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> u, s, vh = linalg.svd_compressed([[3.0, 0.0], [0.0, 1.0]], 1)
    >>> s.compute().round(6)
    array([3.])
    """
    a = computed("a", a, sparse=True)
    check_range(1, min(a.shape), k=k)
    check_range(0, n_power_iter=n_power_iter, n_oversamples=n_oversamples, seed=seed)
    seed = secrets.randbits(64) if seed is None else seed
    m, n = a.shape
    tall = adjoint(a) if m < n else a
    if goes_by_rows(tall, how):
        with left_beyond_memory(a):
            u, s, vh = compressed_by_rows(tall, k, n_power_iter, n_oversamples, seed, how)
            return (adjoint(vh), s, adjoint(u)) if m < n else (u, s, vh)
    count, across = min(k + n_oversamples, m, n), adjoint(a)
    vectors = with_noise(da.zeros_like(a, shape=(n, count), chunks=(a.chunks[1], (count,))), 1.0, seed)
    q, _ = qr(times(a, vectors, how), **how)
    for _ in range(n_power_iter):
        back, _ = qr(times(across, q, how), **how)
        q, _ = qr(times(a, back, how), **how)
    # Of the tall matrix A^H Q, so that signs are those of the right singular vectors of A.
    right, s, left = svd(times(across, q, how), full_matrices=False, **how)
    return times(q, adjoint(left[:k]), how), s[:k], adjoint(right[:, :k])


def compressed_by_rows(
    a: Array, k: int, iterations: int, more: int, seed: int | bytes, how: RunOptions, *, by_sum: bool = False
) -> tuple[Array, Array, Array]:
    """Return what `svd_compressed` does of a tall matrix, of random vectors or their seed; `by_sum`: as Dask's."""
    options: dict[str, Any] = {"k": k, "width": min(k + more, a.shape[1]), "iterations": iterations}
    options |= {"seed": seed, "by_sum": by_sum}
    wanted = {"u": "mk", "s": ".k real", "vh": "kn"}
    u, s, vh = by_program("svd_compressed", {"a": a}, wanted, how=how, axes={"k": (k,)}, **options)
    return u, s, vh


class Components(NamedTuple("Components", [("components", Array), ("variances", Array), ("mean", Array)])):
    """Principal components, as `pca` returns them; and the share of each in the variance of all columns."""

    explained_variance_ratio: Array

    def transform(self, x: Operand) -> Array:
        """Return the scores of samples (rows) along the components. Lazy."""
        x = matrix("x", x, sparse=True)
        directions = adjoint(self.components)
        if sparse_package(x._meta):
            return times(x, directions, {}) - self.mean @ directions
        return times(x - self.mean, directions, {})

    def inverse_transform(self, scores: Operand) -> Array:
        """Return the samples that have these scores, as far as the components describe them. Lazy."""
        return times(matrix("scores", scores), self.components, {}) + self.mean


@public(RunOptions, COMPONENTS)
def pca(a: Operand, n_components: int | None = None, **how: Unpack[RunOptions]) -> Components:
    """Return the principal components of the rows of a matrix: right singular vectors of its centred columns.

    A tall matrix is read once, for means and the Gram matrix of the centred rows, if the variances that are asked for
    are not too far apart for that; otherwise again, for its QR factorization. Sparse rows are not made dense in the
    first case: a product of their means is subtracted from their Gram matrix, in float64. Columns that are filled
    beyond a half, in which that would lose digits, are centred first.

    Parameters
    ----------
    a : array, (m, n)
        m samples of n features; m is at least 2. Chunks may be sparse where m >= n.
    n_components : int, optional
        How many; min(m, n) by default.

    Returns
    -------
    components : array, (k, n)
        Orthonormal rows. Where m >= n the largest element of each is positive, as in scikit-learn's ``PCA``. The three
        results are a named tuple, whose ``transform(x)`` returns scores of samples, (m, k), and
        ``inverse_transform(scores)`` the samples that have them; both are lazy.
    variances : array, (k,), real
        In descending order, of m - 1 degrees of freedom. Their shares in the variance of all columns are the attribute
        ``explained_variance_ratio`` of the tuple, (k,).
    mean : array, (n,)
        The vector to subtract from each row before multiplying it by the components.

    Raises
    ------
    PlanError
        `n_components` is not within 1 and min(m, n), or there are fewer than 2 rows.
    MatrixError
        When it is computed: an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> components, variances, mean = linalg.pca([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]], 1)
    >>> variances.compute().round(6), mean.compute()
    (array([4.]), array([2., 1.]))
    >>> linalg.pca([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]], 1).transform([[5.0, 1.0]]).compute()
    array([[3.]])
    """
    a = matrix("a", a, sparse=True)
    sparse, kind = bool(sparse_package(a._meta)), common_type({"a": a})
    dtype = np.result_type(kind, np.float64) if sparse else kind
    most = min(a.shape)
    k = most if n_components is None else n_components
    if len(a) < 2:
        raise PlanError(f"a must have at least 2 rows, got {len(a)}")
    check_range(1, most, n_components=k)
    if goes_by_rows(a, how):
        wanted = {"components": "kn", "variances": ".k real", "mean": ".N", "total": ".. real"}
        options: dict[str, Any] = {"k": k, "spread": _SPARSE_SPREAD if sparse else _SPREAD}
        with left_beyond_memory(a):
            components, variances, mean, total = by_program(
                "pca", {"a": a}, wanted, how=how, axes={"k": (k,)}, dtype=dtype, **options
            )
            real = np.empty(0, kind).real.dtype
            result = Components(components.astype(kind), variances.astype(real), mean.astype(kind))
            result.explained_variance_ratio = (variances / total).astype(real)
            return result
    a = a.astype(dtype)
    mean = a.mean(axis=0)
    s, vh = right_vectors(a - mean, how)
    result = Components(vh[:k], s[:k] ** 2 / (len(a) - 1), mean)
    result.explained_variance_ratio = s[:k] ** 2 / (s**2).sum()
    return result


@public(RunOptions, MOMENTS)
def cov(
    m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None, **how: Unpack[RunOptions]
) -> Any:
    """Return the covariance matrix of variables, as ``numpy.cov``.

    Of many more observations than variables it is one run, which reads them once: chunks are centred around their own
    means, so that large means cost no digits.

    Parameters
    ----------
    m : array, (n, observations), or (observations, n) without `rowvar`
        The variables; one of them if it is 1-D. Chunks may be sparse where there are as many observations as variables.
    y : array, optional
        More variables, in the same form.
    rowvar : bool
        Whether variables are rows.
    bias : bool
        Whether sums are divided by the number of observations, and not by one less.
    ddof : int, optional
        Takes the place of `bias`: sums are divided by the number of observations less `ddof`.

    Returns
    -------
    array, (n, n)
        Of one variable its variance, (). In float64 or complex128. Of a DataArray a DataArray: the axis of its
        variables, ``"x"``, and ``"x_2"``, both with its labels.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.cov([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]).compute()
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    return _covariances({"m": m, "y": y}, rowvar, int(not bias) if ddof is None else ddof, False, how)


@public(RunOptions, MOMENTS)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, **how: Unpack[RunOptions]) -> Any:
    """Return the correlation coefficients of variables, as ``numpy.corrcoef``; see `cov`.

    Parameters
    ----------
    x, y, rowvar
        As for `cov`.

    Returns
    -------
    array, (n, n)
        Of one variable 1, ().

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.corrcoef([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]).compute().round(6)
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    return _covariances({"x": x, "y": y}, rowvar, 1, True, how)


def _covariances(arrays: Mapping[str, Any], rowvar: bool, ddof: int, correlation: bool, how: RunOptions) -> Any:
    """Return covariances, or correlations."""
    variables = [_observations(name, x, rowvar) for name, x in arrays.items() if x is not None or name != "y"]
    if not variables or len({len(x) for x in variables}) > 1:
        counts = " and ".join(str(len(x)) for x in variables)
        raise PlanError(f"{' and '.join(arrays)} must have as many observations, got {counts}")
    if len(variables) > 1 and any(sparse_package(x._meta) for x in variables):
        raise PlanError(f"{' and '.join(arrays)} must be dense: pass sparse variables as one matrix")
    rows = variables[0].chunks[0]
    a = variables[0] if len(variables) == 1 else da.concatenate([rechunked(x, {0: rows}) for x in variables], axis=1)
    check_names(None, how.get("engine"), kind=ProgramProblem.kind)
    check_workers(how.get("workers"))
    if len(a) <= ddof:
        warnings.warn(f"{len(a)} observations leave no degree of freedom", RuntimeWarning, stacklevel=4)
    if goes_by_rows(a, how):
        options: dict[str, Any] = {"ddof": ddof, "correlation": correlation}
        (c,) = by_program("cov", {"a": a}, {"c": "nn"}, how=unchecked(how), **options)
    else:
        centred = a - a.mean(axis=0)
        c = times(centred.T, centred.conj(), how) * np.true_divide(1, max(len(a) - ddof, 0))
        if correlation:
            sizes = da.sqrt(da.diagonal(c).real)
            c = c / sizes[:, None] / sizes
            c = da.clip(c.real, -1, 1) + 1j * da.clip(c.imag, -1, 1) if c.dtype.kind == "c" else da.clip(c, -1, 1)
    if a.shape[1] == 1:
        return c[0, 0]
    (first, *more) = (x for name, x in arrays.items() if x is not None or name != "y")
    return _labelled(c, first, int(not rowvar)) if not more and hasattr(first, "coords") else c


def _labelled(c: Array, x: Any, axis: int) -> Any:
    """Return the matrix of the variables of a DataArray as one: its axis, and the same with another name."""
    names = x.dims[axis], f"{x.dims[axis]}_2"
    labels = dict.fromkeys(names, x.coords[names[0]].data) if names[0] in x.coords else {}
    return type(x)(c, dims=names, coords=labels)


def _observations(name: str, x: Any, rowvar: bool) -> Array:
    """Return a matrix with a column for each variable, in the type in which NumPy has covariances."""
    array = operand(name, x, sparse=True)
    observations = matrix(name, array if array.ndim == 1 or not rowvar else array.T, vector=True, sparse=True)
    return observations.astype(np.result_type(common_type({name: observations}), np.float64))
