"""Products with a symmetric or a triangular matrix, of which one triangle is read or made: BLAS' level 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from dask.array.core import Array

from dask_distmm.arrays import batched
from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.linalg.factorize import matrix, plus_ones
from dask_distmm.arrays.request import parse
from dask_distmm.errors import PlanError
from dask_distmm.typing import Engine, Method


class ProductOptions(TypedDict, total=False):
    """The options of the run, as `dask_distmm.matmul` takes them."""

    method: Method | None
    engine: Engine | None
    workers: Sequence[str] | int | None


@any_kind
def gram(x: Any, **how: Unpack[ProductOptions]) -> Any:
    """Return ``x^H @ x``, exactly Hermitian: LAPACK's herk, and syrk of real matrices.

    Each chunk of `x` travels once. Of a block of the result that one rank has, and that lies on the diagonal, half of
    the operations are left out, but by the engine `cublasmp`.

    Parameters
    ----------
    x : array, (m, n)
        The matrix. ``gram(x.conj().T)`` is ``x @ x^H``.

    Returns
    -------
    array, (n, n)
        In the chunks of the columns of `x`. Its diagonal is real.
    """
    x = matrix("x", x)
    return mirrored(batched.multiply_batched(parse(x, x, op_a="C", **how)), lower=True, hermitian=True)


@any_kind
def symm(
    a: Any,
    b: Any,
    lower: bool = False,
    right: bool = False,
    hermitian: bool = False,
    **how: Unpack[ProductOptions],
) -> Any:
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

    Raises
    ------
    PlanError
        `a` is not square, or the shapes do not fit each other.
    """
    whole = mirrored(_square(a), lower=lower, hermitian=hermitian)
    return batched.multiply_batched(parse(b, whole, **how) if right else parse(whole, b, **how))


@any_kind
def trmm(
    a: Any,
    b: Any,
    lower: bool = False,
    trans: Literal["N", "T", "C"] = "N",
    unit_diagonal: bool = False,
    right: bool = False,
    **how: Unpack[ProductOptions],
) -> Any:
    """Return ``op(a) @ b`` of a triangular matrix, or ``b @ op(a)``. Zeros are multiplied, too.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; its other triangle is not read.
    b : array, (n, k), or (k, n) if `right`
        The other factor.
    lower, trans, unit_diagonal, right
        As in `solve_triangular`.

    Raises
    ------
    PlanError
        `a` is not square, or the shapes do not fit each other.
    """
    triangle = _square(a).map_blocks(_chunk_triangle, lower, unit_diagonal, dtype=a.dtype, meta=a._meta)
    if right:
        return batched.multiply_batched(parse(b, triangle, op_b=trans, **how))
    return batched.multiply_batched(parse(triangle, b, op_a=trans, **how))


def _square(a: Any) -> Array:
    a = matrix("a", a)
    if a.shape[0] != a.shape[1]:
        raise PlanError(f"a is {a.shape[0]} x {a.shape[1]}; expected a square matrix")
    return a


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
