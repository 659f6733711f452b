"""Products with a symmetric or a triangular matrix, of which one triangle is read or made: BLAS' level 3."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.linalg.factorize import by_program, common_type, computed, matrix, operand, plus_ones, rows_of
from dask_distmm.arrays.linalg.public import PRODUCT, Operand, ProductOptions, public
from dask_distmm.arrays.product import multiply
from dask_distmm.arrays.request import parse
from dask_distmm.errors import PlanError, check_square
from dask_distmm.numeric.sparse import sparse_package


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
    x = computed("x", x, sparse_rows=True)
    if sparse_package(x._meta):
        if how.get("method") is not None:
            raise PlanError(f"method={how['method']!r} is not for sparse rows: leave it out")
        n = x.shape[1]
        g = by_program("gram", {"a": rows_of(x)}, {"g": (((n,), (n,)), x.dtype.name)}, how=how)["g"]
        return mirrored(g.rechunk((x.chunks[1],) * 2), lower=True, hermitian=True)
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


def op_of(trans: Literal["N", "T", "C"] | int) -> Literal["N", "T", "C"]:
    """Return SciPy's `trans` by its letter."""
    ops: dict[Any, Literal["N", "T", "C"]] = {0: "N", 1: "T", 2: "C", "T": "T", "C": "C"}
    return ops.get(trans, "N")


def _operands(a: Any, b: Any) -> tuple[Array, Array]:
    """Return a square matrix and its other factor, both in the type in which the product is computed."""
    a, b = matrix("a", a), operand("b", b)
    check_square("a", a.shape)
    dtype = common_type({"a": a, "b": b})
    return a.astype(dtype), b.astype(dtype)


def mirrored(a: Array, *, lower: bool, hermitian: bool) -> Array:
    """Return a matrix with one triangle mirrored over the other one."""
    a = a.rechunk({1: a.chunks[0]})
    return a.map_blocks(_mirror, a.T, lower, hermitian, dtype=a.dtype, meta=a._meta)


def _mirror(block: Any, other: Any, lower: bool, hermitian: bool, block_id: tuple[int, int]) -> Any:
    i, j = block_id
    if i == j:
        strict, diagonal = np.tril(block, -1) if lower else np.triu(block, 1), np.diagonal(block)
        mirrored = strict + (strict.conj() if hermitian else strict).T
        return mirrored + np.diag(diagonal.real if hermitian else diagonal).astype(block.dtype)
    if (i > j) == lower:
        return block
    return other.conj() if hermitian else other


def _chunk_triangle(block: Any, lower: bool, unit: bool, block_info: Any = None) -> Any:
    (rows, _), (cols, _) = block_info[0]["array-location"]
    offset: int = rows - cols
    if not unit:
        return np.tril(block, offset) if lower else np.triu(block, offset)
    strict = np.tril(block, offset - 1) if lower else np.triu(block, offset + 1)
    return plus_ones(strict, offset)
