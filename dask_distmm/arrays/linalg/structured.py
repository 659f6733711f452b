"""Equations whose matrix is given by its bands, or by a column and a row. The matrix itself is never made.

Bands and columns are small, so each worker gets them whole, and solves for the right-hand sides that it has: LAPACK's
banded solvers, and Levinson's recursion. Right-hand sides in chunks of rows are brought into chunks of columns, but for
those of a positive definite matrix. Its rows are cut into as many parts (substructuring; Przemieniecki 1963): the
last u rows of each part separate it from the next one, where u is the number of bands. All other unknowns of a part are
eliminated where they are, what is left is banded and small, and one task solves it. Every block that is eliminated
is positive definite and no worse conditioned than the matrix, so no pivots are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import Array, concatenate, from_delayed
from dask.delayed import delayed

from dask_distmm.arrays.kinds import ndim_of, rechunked
from dask_distmm.arrays.linalg.factorize import common_type, operand, right_sides
from dask_distmm.arrays.linalg.public import Cost, Operand
from dask_distmm.arrays.linalg.stacks import by_scipy, on_host, public, refuse_not_finite
from dask_distmm.errors import MatrixError, PlanError

BANDS: Cost = ("Dask's own tasks: each chunk of columns by itself", "the bands of the matrix, and the columns")
PARTS: Cost = (
    "Dask's own tasks: each chunk of columns by itself, or of rows, where `b` is in more of these",
    "the bands of the matrix, and the columns; of chunks of rows twice as many columns as there are bands",
)


def _bands(ab: Operand, b: Operand, rows: int) -> tuple[Array, Array]:
    """Return the bands in one chunk, and right-hand sides as a matrix, in the type in which all is computed."""
    ab, b = operand("ab", ab), operand("b", b)
    if ab.ndim != 2 or ab.shape[0] != rows:
        raise PlanError(f"ab must have {rows} rows, one for each band, got the shape {ab.shape}")
    dtype = common_type({"ab": ab, "b": b})
    n = ab.shape[1]
    columns = right_sides(da.zeros((n, n), chunks=-1), b)
    return rechunked(ab, -1).astype(dtype), columns.astype(dtype)


def _by_columns(function: Callable[..., Any], matrix: Array, columns: Array, check_finite: bool) -> Array:
    """Return the solutions for right-hand sides, each chunk of columns by itself."""
    columns = rechunked(columns, {0: -1})
    call = functools.partial(_solved, function=function, check_finite=check_finite)
    return da.blockwise(
        call, "ik", matrix, "pq", columns, "ik", dtype=columns.dtype, meta=columns._meta, concatenate=True
    )


def _solved(matrix: Any, columns: Any, function: Callable[..., Any], check_finite: bool) -> Any:
    if check_finite:
        refuse_not_finite({"a": matrix, "b": columns})
    if not columns.size:
        return columns
    try:
        return on_host(columns, functools.partial(function, matrix.get() if hasattr(matrix, "get") else matrix))
    except np.linalg.LinAlgError as error:
        raise MatrixError(f"the matrix is singular, or not positive definite: {error}") from error


@public(None, BANDS)
def solve_banded(l_and_u: Any, ab: Operand, b: Operand, *, check_finite: bool = True) -> Array:
    """Solve ``a @ x = b`` for a matrix of few diagonals, as ``scipy.linalg.solve_banded``.

    Parameters
    ----------
    l_and_u : tuple of two int
        The numbers of diagonals below and above the main one.
    ab : array, (l + u + 1, n)
        The diagonals: ``ab[u + i - j, j]`` is the element i, j of the matrix.
    b : array, (n,) or (n, k)
        Right-hand sides. Chunks of columns are solved where they are.
    check_finite : bool
        Whether NaN and infinities are refused.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    PlanError
        The shapes do not fit each other.
    MatrixError
        When it is computed: the matrix is singular, or an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.solve_banded((0, 1), [[0.0, 2.0], [1.0, 4.0]], [5.0, 8.0]).compute()
    array([1., 2.])
    """
    try:
        lower, upper = (int(x) for x in l_and_u)
    except (TypeError, ValueError):
        lower = upper = -1
    if min(lower, upper) < 0:
        raise PlanError(f"l_and_u must be two numbers of diagonals, got {l_and_u!r}")
    ab, columns = _bands(ab, b, lower + upper + 1)
    x = _by_columns(
        functools.partial(by_scipy, "solve_banded", (lower, upper), check_finite=False), ab, columns, check_finite
    )
    return x[:, 0] if ndim_of(b) == 1 else x


@public(None, PARTS)
def solveh_banded(ab: Operand, b: Operand, *, lower: bool = False, check_finite: bool = True) -> Array:
    """Solve ``a @ x = b`` for a Hermitian, positive definite matrix of few diagonals: ``scipy.linalg.solveh_banded``.

    Parameters
    ----------
    ab : array, (u + 1, n)
        The diagonals of one triangle: ``ab[u + i - j, j]`` is the element i, j of the matrix; with `lower` it is
        ``ab[i - j, j]``.
    b : array, (n,) or (n, k)
        Right-hand sides. Chunks of columns are solved where they are. So are chunks of rows, if there are more of
        those: where one has less than 2 u + 1 rows, neighbours are joined.
    lower : bool
        Which triangle `ab` has.
    check_finite : bool
        Whether NaN and infinities are refused.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    PlanError
        The shapes do not fit each other.
    MatrixError
        When it is computed: the matrix is not positive definite, or an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.solveh_banded([[0.0, -1.0], [2.0, 2.0]], [0.0, 3.0]).compute()
    array([1., 2.])
    """
    ab = operand("ab", ab)
    ab, columns = _bands(ab, b, ab.shape[0] if ab.ndim else 1)
    if not lower:
        ab = ab.map_blocks(_lower_bands, dtype=ab.dtype, meta=ab._meta)
    cuts = _cuts(columns.chunks[0], 2 * (ab.shape[0] - 1) + 1)
    if len(ab) > 1 and len(cuts) > len(columns.chunks[1]):
        x = _by_parts(ab, rechunked(columns, (cuts, -1)), check_finite)
    else:
        x = _by_columns(_positive, ab, columns, check_finite)
    return x[:, 0] if ndim_of(b) == 1 else x


def _cuts(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return chunks of rows, none of which is shorter than that: neighbours are joined."""
    cuts = [0]
    for size in sizes:
        if cuts[-1] >= least:
            cuts.append(size)
        else:
            cuts[-1] += size
    if len(cuts) > 1 and cuts[-1] < least:
        cuts[-2:] = [cuts[-2] + cuts[-1]]
    return tuple(cuts)


def _lower_bands(ab: Any) -> Any:
    """Return the diagonals of the lower triangle, of those of the upper one."""
    lower, u = np.zeros_like(ab), len(ab) - 1
    for d in range(u + 1):
        lower[d, : ab.shape[1] - d] = ab[u - d, d:].conj()
    return lower


_positive = functools.partial(by_scipy, "solveh_banded", lower=True, check_finite=False)


def _by_parts(ab: Array, b: Array, check_finite: bool) -> Array:
    """Solve with the lower diagonals of a positive definite matrix, where the rows of B are."""
    sizes, u, k, ends = b.chunks[0], ab.shape[0] - 1, b.shape[1], np.cumsum(b.chunks[0])
    parts, count = b.to_delayed()[:, 0], len(sizes)
    eliminate = delayed(functools.partial(_eliminated, u=u, check_finite=check_finite), pure=True)
    # Diagonals of the part, and of the separator before it.
    bands = [ab[:, max(end - size - u, 0) : end].to_delayed()[0, 0] for size, end in zip(sizes, ends, strict=True)]
    eliminated = [eliminate(x, y, i > 0, i < count - 1) for i, (x, y) in enumerate(zip(bands, parts, strict=True))]
    separators = delayed(_separators, pure=True)([x[0] for x in eliminated], u, k)
    finish = delayed(_finished, pure=True)
    rows = [finish(x[1], separators, i, i < count - 1, u) for i, x in enumerate(eliminated)]
    return concatenate([from_delayed(x, (size, k), meta=b._meta) for x, size in zip(rows, sizes, strict=True)])


def _eliminated(ab: Any, b: Any, before: bool, after: bool, u: int, check_finite: bool) -> tuple[Any, ...]:
    """Eliminate the rows of a part but for its separator: what is left for the separators; what its rows depend on."""
    import scipy.linalg

    if check_finite:
        refuse_not_finite({"a": ab, "b": b})
    kind, (ab, b) = b[:0], (x.get() if hasattr(x, "get") else x for x in (ab, b))
    n, first, last = ab.shape[1], u * before, u * after
    inner = n - first - last
    # The first and the last rows of the separators beside the inner ones.
    beside = np.zeros((inner, first + last), ab.dtype)
    for d in range(1, u + 1):
        j = np.arange(max(first - d, 0), first)
        beside[j + d - first, j] = ab[d, j]
        j = np.arange(n - last - d, n - last) if last else j[:0]
        beside[j - first, first + j + d - (n - last)] = ab[d, j].conj()
    separator = np.zeros((first + last, first + last), ab.dtype)
    for d in range(u + 1):
        j = np.arange(n - last, n - d)
        at = first + j - (n - last)
        separator[at + d, at], separator[at, at + d] = ab[d, j], ab[d, j].conj()
    own = np.concatenate([np.zeros((first, b.shape[1]), b.dtype), b[len(b) - last :] if last else b[:0]])
    bands = np.array(ab[:, first : n - last])
    for d in range(1, u + 1):
        bands[d, max(inner - d, 0) :] = 0
    try:
        factor = scipy.linalg.cholesky_banded(bands, lower=True, check_finite=False)
    except np.linalg.LinAlgError as error:
        raise MatrixError(f"the matrix is not positive definite: {error}") from error
    solved = scipy.linalg.cho_solve_banded(
        (factor, True), np.concatenate([beside, b[: len(b) - last]], 1), False, False
    )
    left, right = solved[:, : first + last], solved[:, first + last :]
    across = beside.conj().T
    return (separator - across @ left, own - across @ right, first), (left, right, kind)


def _separators(parts: list[tuple[Any, Any, int]], u: int, k: int) -> Any:
    """Return the unknowns of all separators: a banded, positive definite system."""
    n, kind = u * (len(parts) - 1), parts[0][0].dtype
    bands, b = np.zeros((min(2 * u, n), n), kind), np.zeros((n, k), kind)
    for i, (block, right, first) in enumerate(parts):
        at = i * u - first
        b[at : at + len(right)] += right
        for d in range(len(block)):
            diagonal = np.diagonal(block, -d)
            bands[d, at : at + len(diagonal)] += diagonal
    try:
        return _positive(bands, b)
    except np.linalg.LinAlgError as error:
        raise MatrixError(f"the matrix is not positive definite: {error}") from error


def _finished(part: tuple[Any, Any, Any], separators: Any, number: int, after: bool, u: int) -> Any:
    """Return the unknowns of a part."""
    left, right, kind = part
    neighbours = separators[max(number - 1, 0) * u : (number + after) * u]
    x = right - left @ neighbours
    return np.asarray(np.concatenate([x, neighbours[len(neighbours) - u :]]) if after else x, like=kind)


@public(None, BANDS)
def solve_toeplitz(c_or_cr: Any, b: Operand, check_finite: bool = True) -> Array:
    """Solve ``a @ x = b`` for a matrix of constant diagonals, as ``scipy.linalg.solve_toeplitz``.

    By Levinson's recursion: some n^2 operations for each right-hand side.

    Parameters
    ----------
    c_or_cr : array, (n,), or tuple of two arrays
        The first column of the matrix, and its first row; that is the conjugate of the column by default.
    b : array, (n,) or (n, k)
        Right-hand sides. Chunks of columns are solved where they are.
    check_finite : bool
        Whether NaN and infinities are refused.

    Returns
    -------
    array
        x, of the shape of `b`.

    Raises
    ------
    PlanError
        The shapes do not fit each other.
    MatrixError
        When it is computed: a leading part of the matrix is singular, or an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.solve_toeplitz([2.0, 1.0], [4.0, 5.0]).compute()
    array([1., 2.])
    """
    pair = c_or_cr if isinstance(c_or_cr, tuple) else (c_or_cr, None)
    column = operand("c", pair[0]).ravel()
    row = column.conj() if pair[1] is None else operand("r", pair[1]).ravel()
    if row.shape != column.shape:
        raise PlanError(f"the first row must have as many elements as the first column, {len(column)}; got {len(row)}")
    both, columns = _bands(da.stack([column, row]), b, 2)
    x = _by_columns(_toeplitz, both, columns, check_finite)
    return x[:, 0] if ndim_of(b) == 1 else x


def _toeplitz(both: Any, b: Any) -> Any:
    return by_scipy("solve_toeplitz", (both[0], both[1]), b, check_finite=False).astype(b.dtype)
