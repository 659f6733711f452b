"""Functions of the array API's `linalg` that need no factorization of their own: Dask's own, products, and norms."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import dask.array as da
import dask.config
import numpy as np
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.utils import parse_bytes
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from dask_distmm.arrays.kinds import rechunked
from dask_distmm.arrays.linalg.factorize import (
    by_program,
    common_type,
    computed,
    filled,
    matrix,
    mirrored,
    op_of,
    operand,
    plus_identity,
    plus_ones,
)
from dask_distmm.arrays.linalg.factors import eigvalsh, svdvals, zero_below
from dask_distmm.arrays.linalg.public import NORM, PRODUCT, SINGULAR, TASKS, Operand, ProductOptions, RunOptions
from dask_distmm.arrays.linalg.solutions import inv
from dask_distmm.arrays.linalg.stacks import by_tasks, public
from dask_distmm.arrays.product import multiply
from dask_distmm.arrays.request import check_names, check_workers, parse
from dask_distmm.errors import PlanError, check_square
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.runtime.client import current_client

Product = Callable[[Any, Any], Any]


def _stack(name: str, x: Any, least: int = 2) -> Array:
    """Return an operand with at least the given number of dimensions."""
    array = operand(name, x)
    if array.ndim < least:
        raise PlanError(f"{name} must be at least {least}-D, got {array.ndim}-D")
    return array


@public(None, TASKS)
def matrix_transpose(x: Any) -> Any:
    """Return the transposes of the matrices in the last two axes of `x`.

    Parameters
    ----------
    x : array, (..., m, n)
        Matrices.

    Returns
    -------
    array, (..., n, m)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.matrix_transpose(da.ones((4, 3, 2))).shape
    (4, 2, 3)
    """
    return _stack("x", x).swapaxes(-1, -2)


@public(None, TASKS)
def diagonal(x: Any, *, offset: int = 0) -> Any:
    """Return diagonals of the matrices in the last two axes of `x`, `offset` above the main one.

    Parameters
    ----------
    x : array, (..., m, n)
        Matrices.
    offset : int
        How many diagonals above the main one.

    Returns
    -------
    array, (..., k)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.diagonal(da.ones((4, 3, 2))).shape
    (4, 2)
    """
    return da.diagonal(_stack("x", x), offset, -2, -1)


@public(None, TASKS)
def trace(x: Any, *, offset: int = 0, dtype: Any = None) -> Any:
    """Return sums of diagonals of the matrices in the last two axes of `x`, added in `dtype`.

    Parameters
    ----------
    x : array, (..., m, n)
        Matrices.
    offset : int
        How many diagonals above the main one.
    dtype : dtype, optional
        The type of the sums.

    Returns
    -------
    array, (...)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.trace(da.ones((4, 3, 2))).compute()
    array([2., 2., 2., 2.])
    """
    if not isinstance(dtype, str | type | np.dtype | None):
        raise PlanError(f"dtype must be a type of numbers, got {reprlib.repr(dtype)}")
    try:
        return diagonal(x, offset=offset).sum(axis=-1, dtype=dtype and np.dtype(dtype))
    except TypeError as error:
        raise PlanError(f"dtype={dtype!r}: {error}") from error


@public(RunOptions, NORM)
def matrix_norm(
    x: Any, *, keepdims: bool = False, ord: Literal["fro", "nuc"] | float | None = "fro", **how: Unpack[RunOptions]
) -> Any:
    """Return norms of the matrices in the last two axes of `x`; see `norm`.

    Parameters
    ----------
    x : array, (..., m, n)
        Matrices.
    keepdims : bool
        Whether the last two axes are left in the result, with size one.
    ord : optional
        As `norm` has it.

    Returns
    -------
    array, (...), real

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.matrix_norm(da.ones((2, 3, 3))).compute()
    array([3., 3.])
    """
    return norm(_stack("x", x), ord, (-2, -1), keepdims, **how)


@public(None, TASKS)
def vector_norm(
    x: Any, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, ord: float | None = 2
) -> Any:
    """Return norms of vectors along one or more axes; by default of all elements of `x`.

    Parameters
    ----------
    x : array
        The vectors.
    axis : int or tuple of ints, optional
        The axes of a vector.
    keepdims : bool
        Whether these axes are left in the result, with size one.
    ord : float
        The order, also inf, -inf and 0: the number of elements that are not zero.

    Returns
    -------
    array, real

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.vector_norm(da.ones((2, 4)), axis=1).compute()
    array([2., 2.])
    """
    x = _stack("x", x, 0)
    r, over = abs(x.astype(common_type({"x": x}))), {"axis": axis, "keepdims": keepdims}
    if ord in (np.inf, -np.inf):
        return (r.max if ord > 0 else r.min)(**over)
    if ord == 0:
        return (r != 0).sum(**over).astype(r.dtype)
    power = 2 if ord is None else ord
    return (r**power).sum(**over) ** r.dtype.type(1 / power)


@public(None, TASKS)
def vecdot(x1: Any, x2: Any, *, axis: int = -1) -> Any:
    """Return the sums of ``conj(x1) * x2`` along an axis of both; others are broadcast.

    Parameters
    ----------
    x1, x2 : array
        Vectors along `axis`.
    axis : int
        The axis of the vectors in both.

    Returns
    -------
    array, (...)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.vecdot(da.ones((2, 4)), da.ones(4)).compute()
    array([4., 4.])
    """
    first, second = _vectors(x1, x2, axis)
    return (first.conj() * second).sum(axis=-1, dtype=np.result_type(first.dtype, second.dtype))


@public(None, TASKS)
def cross(x1: Any, x2: Any, *, axis: int = -1) -> Any:
    """Return cross products of the vectors of three elements along an axis of both; others are broadcast.

    Parameters
    ----------
    x1, x2 : array
        Vectors along `axis`.
    axis : int
        The axis of the vectors in both.

    Returns
    -------
    array

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.cross(da.ones((4, 3)), da.ones(3)).shape
    (4, 3)
    """
    first, second = _vectors(x1, x2, axis)
    if first.shape[-1] != 3:
        raise PlanError(f"x1 and x2 must have 3 elements along axis {axis}; they have {first.shape[-1]}")
    ndim = max(first.ndim, second.ndim)
    product = by_tasks("(m),(m)->(m)", np.cross, {"x1": first, "x2": second}, exact=True)
    return da.moveaxis(product, -1, normalize_axis_index(axis, ndim))


def _vectors(x1: Any, x2: Any, axis: int) -> tuple[Array, Array]:
    """Return two operands whose vectors are along the last axis."""
    arrays = {"x1": _stack("x1", x1, 1), "x2": _stack("x2", x2, 1)}
    for name, x in arrays.items():
        if not -x.ndim <= axis < x.ndim:
            raise PlanError(f"{name} has {x.ndim} dimensions: axis must be between {-x.ndim} and {x.ndim - 1}")
    first, second = (da.moveaxis(x, axis, -1) for x in arrays.values())
    if first.shape[-1] != second.shape[-1]:
        raise PlanError(
            f"x1 has {first.shape[-1]} elements along axis {axis}, so x2 must have as many, got {second.shape[-1]}"
        )
    return first, second


@public(None, TASKS)
def outer(x1: Any, x2: Any) -> Any:
    """Return all products of an element of the vector `x1` and one of the vector `x2`, (m, n).

    Parameters
    ----------
    x1 : array, (m,)
        The vector of rows.
    x2 : array, (n,)
        The vector of columns.

    Returns
    -------
    array, (m, n)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.outer(da.ones(3), da.ones(2)).shape
    (3, 2)
    """
    first, second = operand("x1", x1), operand("x2", x2)
    if (first.ndim, second.ndim) != (1, 1):
        raise PlanError(f"x1 and x2 must be 1-D, got {first.ndim}-D and {second.ndim}-D")
    return first[:, None] * second[None, :]


@public(None, TASKS)
def kron(a: Any, b: Any) -> Any:
    """Return the Kronecker product; `b` is made one chunk, which each task has.

    Parameters
    ----------
    a, b : array
        Arrays of any number of dimensions.

    Returns
    -------
    array

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.kron(da.ones((4, 3)), da.ones((2, 2))).shape
    (8, 6)
    """
    first, second = operand("a", a), operand("b", b)
    ndim = max(first.ndim, second.ndim)
    first, second = (x[(None,) * (ndim - x.ndim)] for x in (first, second))
    dtype, limit = np.result_type(first.dtype, second.dtype), parse_bytes(dask.config.get("array.chunk-size"))
    if np.prod(first.chunksize) * second.size * dtype.itemsize > limit:
        first = rechunked(first, "auto", block_size_limit=max(first.itemsize, limit // max(1, second.size)))
    grown = tuple(tuple(size * n for size in sizes) for sizes, n in zip(first.chunks, second.shape, strict=True))
    meta = meta_from_array(first._meta, ndim, dtype=dtype)
    return first.map_blocks(np.kron, rechunked(second, -1), chunks=grown, meta=meta)


@public(ProductOptions, PRODUCT)
def matvec(x1: Any, x2: Any, **how: Unpack[ProductOptions]) -> Any:
    """Return products of the matrices `x1`, (..., m, n), and the vectors `x2`, (..., n).

    Parameters
    ----------
    x1 : array, (..., m, n)
        Matrices.
    x2 : array, (..., n)
        Vectors.

    Returns
    -------
    array, (..., m)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.matvec(da.ones((4, 3, 2)), da.ones(2)).shape
    (4, 3)
    """
    return _product(how)(_stack("x1", x1), _stack("x2", x2, 1)[..., None])[..., 0]


@public(ProductOptions, PRODUCT)
def vecmat(x1: Any, x2: Any, **how: Unpack[ProductOptions]) -> Any:
    """Return products of the conjugate vectors `x1`, (..., m), and the matrices `x2`, (..., m, n).

    Parameters
    ----------
    x1 : array, (..., m)
        Vectors.
    x2 : array, (..., m, n)
        Matrices.

    Returns
    -------
    array, (..., n)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.vecmat(da.ones(3), da.ones((4, 3, 2))).shape
    (4, 2)
    """
    return _product(how)(_stack("x1", x1, 1).conj()[..., None, :], _stack("x2", x2))[..., 0, :]


@public(ProductOptions, PRODUCT)
def matrix_power(a: Any, n: int, **how: Unpack[ProductOptions]) -> Any:
    """Return the n-th power of square matrices, by squares; of their inverses where n is negative.

    Parameters
    ----------
    a : array, (..., m, m)
        The matrices.
    n : int
        The exponent.

    Returns
    -------
    array, (..., m, m)

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.matrix_power(2 * da.eye(2), 3).compute()
    array([[8., 0.],
           [0., 8.]])
    """
    return power(_stack("a", a), int(n), _product(how))


@public(ProductOptions, PRODUCT)
def multi_dot(arrays: Sequence[Any], **how: Unpack[ProductOptions]) -> Any:
    """Return the product of two or more matrices, in the order that takes the fewest multiplications.

    Parameters
    ----------
    arrays : sequence of arrays
        Matrices; the first and the last may be vectors.

    Returns
    -------
    array

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> linalg.multi_dot([da.ones((3, 2)), da.ones((2, 4)), da.ones(4)]).compute()
    array([8., 8., 8.])
    """
    terms = [operand(f"arrays[{number}]", x) for number, x in enumerate(arrays)]
    if len(terms) < 2 or any(x.ndim != 2 for x in terms[1:-1]) or not {terms[0].ndim, terms[-1].ndim} <= {1, 2}:
        dims = ", ".join(f"{x.ndim}-D" for x in terms)
        raise PlanError(
            f"arrays must be two or more matrices, of which the first and the last may be vectors; got {dims}"
        )
    return chain(terms, _product(how))


def _product(how: ProductOptions) -> Product:
    check_names(how.get("method"), how.get("engine"))
    check_workers(how.get("workers"))
    options = how if current_client() is not None else {}
    return lambda a, b: multiply(parse(a, b, **options))


def chain(arrays: Sequence[Array], product: Product) -> Any:
    """Return the product of matrices, in the order that takes the fewest multiplications."""
    sizes = [1 if arrays[0].ndim == 1 else arrays[0].shape[0], *(x.shape[0] for x in arrays[1:])]
    sizes.append(1 if arrays[-1].ndim == 1 else arrays[-1].shape[1])

    @functools.cache
    def cheapest(i: int, j: int) -> tuple[int, int]:
        """Return the multiplications of the product of matrices i to j, and behind which of them it is split."""
        last = {s: sizes[i] * sizes[s + 1] * sizes[j + 1] for s in range(i, j)}
        return min(((cheapest(i, s)[0] + cheapest(s + 1, j)[0] + last[s], s) for s in last), default=(0, i))

    def part(i: int, j: int) -> Any:
        _, split = cheapest(i, j)
        return arrays[i] if i == j else product(part(i, split), part(split + 1, j))

    return part(0, len(arrays) - 1)


def power(a: Array, n: int, product: Product) -> Any:
    """Return a power of square matrices by squares."""
    check_square("a", a.shape)
    if n < 0:
        a, n = inv(a), -n
    if not n:
        return plus_identity(da.zeros_like(a))
    result, square = None, a
    while True:
        if n % 2:
            result = square if result is None else product(result, square)
        n //= 2
        if not n:
            return result
        square = product(square, square)


@public(RunOptions, SINGULAR)
def matrix_rank(
    A: Operand,
    tol: float | None = None,
    hermitian: bool = False,
    *,
    rtol: float | None = None,
    **how: Unpack[RunOptions],
) -> Array:
    """Return the number of singular values above a limit.

    Parameters
    ----------
    A : array, (m, n)
        The matrix.
    tol : float, optional
        The limit.
    hermitian : bool
        Whether `A` is Hermitian: then its eigenvalues are computed, which is faster.
    rtol : float, optional
        The limit in units of the largest singular value; by default ``max(m, n) * eps``, as in NumPy.

    Returns
    -------
    array, (), int64
        The rank.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> int(linalg.matrix_rank([[1.0, 1.0], [1.0, 1.0]]).compute())
    1
    """
    if tol is not None and rtol is not None:
        raise PlanError(f"tol={tol} and rtol={rtol} are two limits: pass one of them")
    a = matrix("A", A, stack=True)
    s = abs(eigvalsh(a, **how)) if hermitian else svdvals(a, **how)
    return (s > (zero_below(s, a.shape[-2:], rtol) if tol is None else tol)).sum(axis=-1).astype(np.int64)


@public(RunOptions, SINGULAR)
def cond(x: Operand, p: Literal["fro", "nuc"] | float | None = None, **how: Unpack[RunOptions]) -> Array:
    """Return the condition number of a matrix.

    Parameters
    ----------
    x : array, (m, n)
        The matrix; square unless `p` is None, 2 or -2.
    p : None, 1, -1, 2, -2, inf, -inf, "fro" or "nuc"
        The norm; None for the 2-norm: the largest singular value in units of the smallest.

    Returns
    -------
    array, ()
        The condition number; inf for a singular matrix.

    Raises
    ------
    MatrixError
        When it is computed: the matrix is singular, and `p` is neither None nor 2 nor -2.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> float(linalg.cond([[4.0, 0.0], [0.0, 2.0]]).compute())
    2.0
    """
    a = matrix("x", x, stack=True)
    if p not in (None, 2, -2):
        if a.ndim > 2 and not how:
            return by_tasks("(m,m)->()", functools.partial(np.linalg.cond, p=p), {"x": a}, finite=True)
        # Only the nuclear norm is a run itself.
        options = how if p == "nuc" else RunOptions()
        return norm(a, p, **options) * norm(inv(a, **how), p, **options)
    s = svdvals(a, **how)
    above, below = (_end(s, largest=largest) for largest in (p != -2, p == -2))
    # The sum with a quotient is a scalar, where `where` would return an array without axes.
    limit, divisor = (da.where(below == 0, s.dtype.type(x), y) for x, y in ((np.inf, s.dtype.type(0)), (1, below)))
    return above / divisor + limit


@public(RunOptions, NORM)
def norm(
    x: Operand,
    ord: Literal["fro", "nuc"] | float | None = None,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    **how: Unpack[RunOptions],
) -> Array:
    """Return a norm of a matrix or a vector, as ``numpy.linalg.norm`` does.

    Parameters
    ----------
    x : array
        The matrix or vector; with `axis` of any number of dimensions.
    ord : optional
        As NumPy has it. Of a matrix 2, -2 and ``"nuc"`` come from its singular values, and only for these there is a
        run, which has options; ``dask.array.linalg.norm`` computes all others.
    axis : int or (int, int), optional
        The axis of vectors, or the two axes of matrices; by default `x` is one vector or matrix.
    keepdims : bool
        Whether the axes of the norm are left in the result, with size one.

    Returns
    -------
    array, real
        0-d by default.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> float(linalg.norm([[3.0, 0.0], [0.0, 4.0]]).compute())
    5.0
    """
    x = filled(operand("x", x))
    if not x.ndim and ord is not None:
        raise PlanError("x must have at least 1 dimension, got a number")
    if not x.size and ord not in (None, "fro", "nuc"):
        raise PlanError(f"x is empty, {x.shape}: it has no norm of ord={ord!r}")
    if x.dtype.kind in "biu" or x.dtype.char in "eE":
        x = x.astype(common_type({"x": x}))
    try:
        axes = normalize_axis_tuple(range(x.ndim) if axis is None else axis, x.ndim)
        of_values = len(axes) == 2 and ord in (2, -2, "nuc")
        if not of_values and not how:
            return da.linalg.norm(x, ord, axis, keepdims)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise PlanError(str(error)) from error
    if not of_values:
        raise PlanError(f"ord={ord!r} here is computed by Dask's tasks, which have no {min(how)}=: leave it out")
    s = svdvals(da.moveaxis(x, axes, (-2, -1)), **how)
    result = s.sum(axis=-1) if ord == "nuc" else _end(s, largest=ord == 2)
    return da.expand_dims(result, tuple(sorted(axes))) if keepdims else result


def _end(s: Array, *, largest: bool) -> Array:
    """Return the largest or the smallest singular value."""
    if not s.shape[-1]:
        raise PlanError("the matrix is empty: it has no singular values; pass one with rows and columns")
    return s[..., 0 if largest else -1]


# Products with a symmetric or a triangular matrix, of which one triangle is read or made: BLAS' level 3


@public(ProductOptions, PRODUCT)
def gram(x: Operand, **how: Unpack[ProductOptions]) -> Array:
    """Return ``x^H @ x``, exactly Hermitian: LAPACK's herk, and syrk of real matrices.

    Each chunk of `x` travels once. Of a block of the result that one rank has, and that is on the diagonal, half of
    the operations are left out, but by the engine `cublasmp`.

    Parameters
    ----------
    x : array, (m, n)
        The matrix. ``gram(x.conj().T)`` is ``x @ x^H``.

    Returns
    -------
    array, (n, n)
        In the chunks of the columns of `x`, in float64 if `x` has integers. Its diagonal is real.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.gram([[1.0, 2.0], [3.0, 4.0]]).compute()
    array([[10., 14.],
           [14., 20.]])
    """
    x = computed("x", x, sparse=True)
    if sparse_package(x._meta):
        if how.get("method") is not None:
            raise PlanError(f"method={how['method']!r} is not for sparse rows: leave it out")
        return mirrored(by_program("gram", {"a": x}, {"g": "nn"}, how=how)[0], lower=True, hermitian=True)
    return mirrored(multiply(parse(x, x, op_a="C", **how)), lower=True, hermitian=True)


@public(ProductOptions, PRODUCT)
def symm(
    a: Operand,
    b: Operand,
    *,
    lower: bool = False,
    right: bool = False,
    hermitian: bool = False,
    **how: Unpack[ProductOptions],
) -> Array:
    """Return ``a @ b`` of a symmetric matrix of which one triangle is read; ``b @ a`` if `right`.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    b : array, (n, k), or (k, n) if `right`
        The other factor.
    lower : bool
        Which triangle of `a` is read.
    right : bool
        Whether `a` is the right factor.
    hermitian : bool
        Whether `a` is Hermitian: hemm, and not symm.

    Returns
    -------
    array
        The product, of the shape of `b`.

    Raises
    ------
    PlanError
        `a` is not square, or the shapes do not fit each other.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.symm([[1.0, 2.0], [0.0, 1.0]], [[1.0], [1.0]]).compute()
    array([[3.],
           [3.]])
    """
    a, b = _operands(a, b)
    whole = mirrored(a, lower=lower, hermitian=hermitian)
    return multiply(parse(b, whole, **how) if right else parse(whole, b, **how))


@public(ProductOptions, PRODUCT)
def trmm(
    a: Operand,
    b: Operand,
    *,
    trans: Literal["N", "T", "C", 0, 1, 2] = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    right: bool = False,
    **how: Unpack[ProductOptions],
) -> Array:
    """Return ``op(a) @ b`` of a triangular matrix, or ``b @ op(a)``. Zeros are multiplied, too.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; its other triangle is not read.
    b : array, (n, k), or (k, n) if `right`
        The other factor.
    trans, lower, unit_diagonal, right
        As in `solve_triangular`.

    Returns
    -------
    array
        The product, of the shape of `b`.

    Raises
    ------
    PlanError
        `a` is not square, or the shapes do not fit each other.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.trmm([[1.0, 2.0], [9.0, 1.0]], [[1.0], [1.0]]).compute()
    array([[3.],
           [1.]])
    """
    (a, b), op = _operands(a, b), op_of(trans)
    triangle = a.map_blocks(_chunk_triangle, lower, unit_diagonal, dtype=a.dtype, meta=a._meta)
    if right:
        return multiply(parse(b, triangle, op_b=op, **how))
    return multiply(parse(triangle, b, op_a=op, **how))


def _operands(a: Any, b: Any) -> tuple[Array, Array]:
    """Return a square matrix and its other factor, both in the type in which the product is computed."""
    a, b = matrix("a", a), operand("b", b)
    check_square("a", a.shape)
    dtype = common_type({"a": a, "b": b})
    return a.astype(dtype), b.astype(dtype)


def _chunk_triangle(block: Any, lower: bool, unit: bool, block_info: Any = None) -> Any:
    (rows, _), (cols, _) = block_info[0]["array-location"]
    offset: int = rows - cols
    triangle = np.tril(block, offset - unit) if lower else np.triu(block, offset + unit)
    return plus_ones(triangle, offset) if unit else triangle
