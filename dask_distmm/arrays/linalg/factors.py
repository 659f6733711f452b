"""Factorizations of Dask arrays, their eigenvalues and singular values, and what these solve for any rank.

The unitary factor of a polar decomposition is made on all workers, by QDWH, out of products, QR and Cholesky
factorizations. The iteration takes all singular values of a matrix to one and leaves its singular vectors as they are:
Y. Nakatsukasa, Z. Bai, F. Gygi, Optimizing Halley's iteration for computing the matrix polar decomposition, SIAM J.
Matrix Anal. Appl. 31 (2010). A step with weights a, b, c is

    X (a + b X^H X) (1 + c X^H X)^-1  =  b/c X + (a - b/c) X (1 + c X^H X)^-1

where the inverse comes from the QR factorization of X above an identity while c is large, and from a Cholesky
factorization when it is not. The weights depend only on a lower bound of the singular values. So the graph of all
steps is made at once, for a bound that holds for all matrices: noise is added to the matrix, no larger than its
rounding, which lifts singular values from zero.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, Unpack, overload

import dask.array as da
import numpy as np
from dask.array.core import Array, blockwise, from_array, normalize_chunks
from dask.array.gufunc import apply_gufunc

from dask_distmm.arrays.kinds import rechunked
from dask_distmm.arrays.linalg.factorize import (
    adjoint,
    by_program,
    common_type,
    computed,
    factorize,
    filled,
    goes_by_rows,
    left_beyond_memory,
    matrix,
    plus_identity,
    reduced,
    rows_of,
    times,
    unchecked,
)
from dask_distmm.arrays.linalg.public import (
    ALONE,
    EIGEN,
    PANELS,
    POLAR,
    SINGULAR,
    TALL,
    EighResult,
    EigResult,
    FactorOptions,
    Operand,
    QRResult,
    RefinedOptions,
    RunOptions,
    SVDResult,
)
from dask_distmm.arrays.linalg.stacks import public
from dask_distmm.errors import MatrixError, PlanError
from dask_distmm.runtime.chunks import array_kind


@public(FactorOptions, PANELS)
def cholesky(
    a: Operand, *, upper: bool | None = None, lower: bool | None = None, **how: Unpack[FactorOptions]
) -> Array:
    """Return the Cholesky factor of a Hermitian, positive definite matrix.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only the triangle that is returned is read.
    upper, lower : bool, optional
        Whether U with ``a = U^H @ U`` is computed, or L with ``a = L @ L^H``; by default L, as in NumPy. `upper` is
        NumPy's name for the choice, `lower` is SciPy's (which has U by default). Pass one of them.

    Returns
    -------
    array, (n, n)
        The factor, with zeros in the other triangle, in the chunks of `a`.

    Raises
    ------
    PlanError
        `a` is not square, or of a type that is not supported; both `upper` and `lower` are passed.
    MatrixError
        When it is computed: `a` is not positive definite. The message names the leading minor. It is a
        ``numpy.linalg.LinAlgError``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.cholesky([[4.0, 2.0], [2.0, 10.0]]).compute()
    array([[2., 0.],
           [1., 3.]])
    """
    if upper is not None and lower is not None:
        raise PlanError(f"upper={upper} and lower={lower} are two names for one choice: pass one of them")
    a = matrix("a", a)
    lower = not upper if lower is None else lower
    name = "l" if lower else "u"
    return factorize("cholesky", {"a": a}, {name: "mn"}, lower=bool(lower), how=how)[0]


@public(FactorOptions, PANELS)
def ldlt(a: Operand, **how: Unpack[FactorOptions]) -> tuple[Array, Array]:
    """Return L and d with ``a = L @ diag(d) @ L^H`` of a Hermitian matrix, without pivots.

    It is backward stable for matrices that are definite, quasi-definite (``[[E, B^H], [B, -F]]`` with definite E and F,
    not too ill-conditioned: R. Vanderbei, Symmetric quasidefinite matrices, SIAM J. Optimization 5, 1995) or diagonally
    dominant; others may have no such factors, or very large ones. d has the inertia of `a`. It takes the operations of
    a Cholesky factorization, half of those of `lu`. SciPy's ``ldl`` swaps rows, and has blocks in D.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only its lower triangle is read.

    Returns
    -------
    l : array, (n, n)
        Lower triangular with ones on its diagonal, in the chunks of `a`.
    d : array, (n,)
        The diagonal of D: real numbers, as many of them positive as eigenvalues of `a` are.

    Raises
    ------
    PlanError
        `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element of d is exactly zero. It is a ``numpy.linalg.LinAlgError``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> low, d = linalg.ldlt([[2.0, 1.0], [1.0, -1.0]])
    >>> d.compute()
    array([ 2. , -1.5])
    """
    low, d = factorize("ldlt", {"a": matrix("a", a)}, {"l": "mn", "d": ".m"}, how=how)
    return low, d


@overload
def lu(
    a: Operand, permute_l: Literal[False] = False, *, p_indices: bool = False, **how: Unpack[FactorOptions]
) -> tuple[Array, Array, Array]: ...


@overload
def lu(
    a: Operand, permute_l: Literal[True], *, p_indices: bool = False, **how: Unpack[FactorOptions]
) -> tuple[Array, Array]: ...


@public(FactorOptions, PANELS)
def lu(a: Operand, permute_l: bool = False, *, p_indices: bool = False, **how: Unpack[FactorOptions]) -> Any:
    """Return P, L and U with ``a = P @ L @ U``, with partial pivoting over whole columns.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.
    permute_l : bool
        Whether ``P @ L`` is returned in place of P and L.
    p_indices : bool
        Whether P is returned as indices p with ``a = (L @ U)[p]``, and not as a matrix. Of no effect with `permute_l`.

    Returns
    -------
    p : array, (m, m), or (m,) of int64
        The permutation; not with `permute_l`.
    l : array, (m, min(m, n))
        Lower triangular with ones on its diagonal; with `permute_l` its rows are permuted.
    u : array, (min(m, n), n)
        Upper triangular.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> p, low, up = linalg.lu([[1.0, 2.0], [2.0, 4.0]])
    >>> up.compute()
    array([[2., 4.],
           [0., 0.]])
    """
    a = matrix("a", a)
    p, low, up = factorize("lu", {"a": a}, {"p": ".m", "l": "mr", "u": "rn"}, how=how)
    if permute_l:
        return picked(low, p), up
    return p if p_indices else _permutation(p, low.dtype), low, up


def picked(x: Array, rows: Array) -> Array:
    """Return ``x[rows]``, also of stacks, in the chunks of `x`: of whole columns, which one worker has at a time."""
    if max(x.ndim, rows.ndim + 1) > 2:
        return apply_gufunc(_taken, "(m,k),(m)->(m,k)", x, rows, meta=x._meta, allow_rechunk=True)
    columns = rechunked(x, {0: -1})
    picked_rows = blockwise(
        operator.getitem, "ij", columns, "ij", rechunked(rows, -1), "i", dtype=x.dtype, meta=x._meta
    )
    return rechunked(picked_rows, x.chunks)


def _taken(x: Any, rows: Any) -> Any:
    batch = np.broadcast_shapes(x.shape[:-2], rows.shape[:-1])
    rows = np.broadcast_to(np.asarray(rows, like=x)[..., None], batch + x.shape[-2:])
    return np.take_along_axis(np.broadcast_to(x, batch + x.shape[-2:]), rows, axis=-2)


def _permutation(p: Array, dtype: np.dtype) -> Array:
    """Return the matrix P with ``P @ x = x[p]``, in real numbers."""
    real, columns = np.empty(0, dtype).real.dtype, from_array(np.arange(len(p)), chunks=p.chunks)
    meta = p._meta[:, None].astype(real)
    return blockwise(_ones_at, "ij", p, "i", columns, "j", real, None, dtype=real, meta=meta)


def _ones_at(p: Any, columns: Any, dtype: np.dtype) -> Any:
    return (p[:, None] == np.asarray(columns, like=p)).astype(dtype)


@public(RefinedOptions, PANELS)
def lu_factor(a: Operand, **how: Unpack[RefinedOptions]) -> tuple[Array, Array]:
    """Return L and U in one matrix, and the pivots, as ``scipy.linalg.lu_factor`` does; for `lu_solve`.

    Parameters
    ----------
    a : array, (m, n)
        The matrix.

    Returns
    -------
    lu : array, (m, n)
        U in its upper triangle, L below without its ones.
    piv : array, (min(m, n),) of int32
        Row i was swapped with row ``piv[i]``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> lu, piv = linalg.lu_factor([[1.0, 2.0], [2.0, 8.0]])
    >>> piv.compute()
    array([1, 1], dtype=int32)
    """
    lu, piv = factorize("lu", {"a": matrix("a", a)}, {"lu": "mn", "piv": ".R"}, how=how)
    return lu, piv


@overload
def qr(a: Operand, mode: Literal["reduced", "complete"] = "reduced", **how: Unpack[FactorOptions]) -> QRResult: ...


@overload
def qr(a: Operand, mode: Literal["r"], **how: Unpack[FactorOptions]) -> Array: ...


@public(FactorOptions, TALL)
def qr(a: Operand, mode: Literal["reduced", "complete", "r"] = "reduced", **how: Unpack[FactorOptions]) -> Any:
    """Return Q and R with ``a = Q @ R``: Q has orthonormal columns, R is upper triangular.

    With ``method="rows"``, and by itself for a matrix with many more rows than columns, chunks of rows stay where they
    are. The number of rows in each of them need not be known.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.
    mode : {"reduced", "complete", "r"}
        ``"reduced"``: Q is (m, min(m, n)). ``"complete"``: Q is (m, m). ``"r"``: only R is returned.

    Returns
    -------
    Q, R : array
        A named tuple, as in NumPy; only R if `mode` is ``"r"``.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.qr([[3.0, 0.0], [4.0, 5.0]]).R.shape
    (2, 2)
    """
    a = matrix("a", a, unknown_rows=mode != "complete", sparse=True)
    if mode != "complete" and goes_by_rows(a, how):
        factors: tuple[Array, ...] = ()
        with left_beyond_memory(a):
            factors = by_program("qr", {"a": a}, {"r": "nn"} if mode == "r" else {"q": "mn", "r": "nn"}, how=how)
        *q, r = factors or reduced(rows_of(a))
        r = rechunked(r, (a.chunks[1], a.chunks[1]))
        return r if mode == "r" else QRResult(rechunked(q[0], {1: a.chunks[1]}), r)
    inner = "m" if mode == "complete" else "r"
    wanted = {"r": "rn"} if mode == "r" else {"q": f"m{inner}", "r": f"{inner}n"}
    factors = factorize("qr", {"a": a}, wanted, mode=mode, how=how)
    return factors[0] if mode == "r" else QRResult(*factors)


# The unitary factor of a polar decomposition
# Up to this weight c the Cholesky factorization is as accurate as the QR factorization (Nakatsukasa and others, 2010).
_CHOLESKY = 100
# The least singular value of a random matrix is this many times smaller than expected once in 10^9 matrices.
_RARE = 1e-9


def weights(least: float, eps: float) -> list[tuple[float, float, float]]:
    """Return the weights of all steps that take singular values from `least` on to 1, up to a rounding `eps`."""
    triples = []
    while abs(1 - least) > eps:
        square = least**2
        root = math.sqrt(1 + (d := (4 * (1 - square) / square**2) ** (1 / 3)))
        a = root + math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root)) / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        triples.append((a, b, c))
        least = min(1.0, least * (a + b * square) / (1 + c * square))
    return triples


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
        operands = {"a": plus_identity(c * times(adjoint(x), x, how)), "b": adjoint(x)}
        axes = {"k": x.chunks[0]}
        return adjoint(factorize("solve", operands, {"x": "nk"}, how=how, axes=axes, assume_a="pos")[0])
    identity = plus_identity(da.zeros_like(x, shape=(n, n), chunks=(cols, cols)))
    q, _ = qr(da.concatenate([math.sqrt(c) * x, identity]), **how)
    return times(q[:m], adjoint(q[m:]), how) / math.sqrt(c)


# A matrix so much longer than wide, and of this many elements, is reduced to R before its SVD: all workers share in the
# QR factorization. For smaller ones the runs take longer than they save.
_TALL, _LARGE = 2, 2**20
# From these orders on the polar decomposition is faster than the SVD of one GPU, with vectors and without. One H200,
# float64, 2048, 4096, 8192: 0.62, 1.04, 2.65 s, and by cuSOLVER's gesvd 0.43, 1.71, 9.72; singular values alone 0.49,
# 1.01, 2.88 s, and 0.18, 0.59, 2.36. On CPUs LAPACK's gesdd on one worker is faster than QDWH on two (N = 1200: 1.1
# and 5.2 s).
_POLAR, _POLAR_VALUES = 3072, 16384


@overload
def eigh(
    a: Operand,
    UPLO: Literal["L", "U", "l", "u"] = "L",
    *,
    b: Operand | None = None,
    lower: bool | None = None,
    eigvals_only: Literal[False] = False,
    subset_by_index: tuple[int, int] | None = None,
    **how: Unpack[FactorOptions],
) -> EighResult: ...


@overload
def eigh(
    a: Operand,
    UPLO: Literal["L", "U", "l", "u"] = "L",
    *,
    b: Operand | None = None,
    lower: bool | None = None,
    eigvals_only: Literal[True],
    subset_by_index: tuple[int, int] | None = None,
    **how: Unpack[FactorOptions],
) -> Array: ...


@public(FactorOptions, EIGEN)
def eigh(
    a: Operand,
    UPLO: Literal["L", "U", "l", "u"] = "L",
    *,
    b: Operand | None = None,
    lower: bool | None = None,
    eigvals_only: bool = False,
    subset_by_index: tuple[int, int] | None = None,
    **how: Unpack[FactorOptions],
) -> Any:
    """Return eigenvalues and eigenvectors of a Hermitian matrix: ``a @ v = v * w``, or ``a @ v = b @ v * w``.

    ``method="local"``: one worker does it, by LAPACK's ``syevd``, or ``syevr`` for a range. ``"columns"``, for one
    matrix: all workers reduce the matrix to a tridiagonal one, and have the eigenvectors of that by divide and conquer.
    ``"auto"``: the one that is expected to be faster, which on CPUs is always the first one.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only one triangle is read.
    UPLO, lower : optional
        Which triangle: ``"L"`` (the default) or ``"U"``, as in NumPy, or `lower` as in SciPy. Pass one of them.
    b : array, (n, n), optional
        A Hermitian, positive definite matrix; the same triangle of it is read.
    eigvals_only : bool
        Whether only w is returned.
    subset_by_index : (int, int), optional
        The first and the last index of the eigenvalues that are computed, from 0; all by default.

    Returns
    -------
    eigenvalues : array, (k,), real
        In ascending order. A named tuple of these and the eigenvectors, as in NumPy.
    eigenvectors : array, (n, k)
        Columns v with ``v^H @ v = 1``, or ``v^H @ b @ v = 1``. The first one of the largest components of each is real
        and positive.

    Raises
    ------
    PlanError
        A matrix is not square, the range is not within 0 and n - 1, or a type is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or `b` is not positive definite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.eigh([[2.0, 0.0], [0.0, 1.0]]).eigenvalues.compute()
    array([1., 2.])
    """
    if lower is not None and UPLO in "Uu":
        raise PlanError(f"UPLO={UPLO!r} and lower={lower} are two names for one choice: pass one of them")
    a, subset = matrix("a", a), subset_by_index
    operands, cols = {"a": a} if b is None else {"a": a, "b": matrix("b", b)}, a.chunks[1]
    if subset is not None:
        first, last = subset = operator.index(subset[0]), operator.index(subset[1])
        cols = normalize_chunks(max(1, *cols), (max(0, last - first + 1),))[0]
    wanted = {"w": ".K"} if eigvals_only else {"w": ".K", "v": "mk"}
    options: dict[str, Any] = {"axes": {"k": cols}, "subset": subset, "vectors": not eigvals_only}
    options["lower"] = UPLO in "Ll" if lower is None else bool(lower)
    results = factorize("eigh", operands, wanted, how=how, **options)
    return results[0] if eigvals_only else EighResult(*results)


@public(FactorOptions, EIGEN)
def eigvalsh(
    a: Operand,
    UPLO: Literal["L", "U", "l", "u"] = "L",
    *,
    b: Operand | None = None,
    lower: bool | None = None,
    subset_by_index: tuple[int, int] | None = None,
    **how: Unpack[FactorOptions],
) -> Array:
    """Return the eigenvalues of a Hermitian matrix in ascending order, without vectors; see `eigh`.

    With ``method="columns"`` those of the tridiagonal matrix are found by bisection on GPUs.

    Parameters
    ----------
    a : array, (n, n)
        The matrix; only one triangle is read.
    UPLO, lower, b, subset_by_index
        As for `eigh`.

    Returns
    -------
    array, (k,), real
        The eigenvalues.

    Raises
    ------
    PlanError
        When it is called: `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or `b` is not positive definite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.eigvalsh([[2.0, 0.0], [0.0, 1.0]]).compute()
    array([1., 2.])
    """
    return eigh(a, UPLO, b=b, lower=lower, eigvals_only=True, subset_by_index=subset_by_index, **how)


@overload
def eig(
    a: Operand, *, left: Literal[False] = False, right: Literal[True] = True, **how: Unpack[FactorOptions]
) -> EigResult: ...


@overload
def eig(a: Operand, *, left: Literal[True], right: bool = True, **how: Unpack[FactorOptions]) -> tuple[Array, ...]: ...


@overload
def eig(a: Operand, *, left: Literal[False] = False, right: Literal[False], **how: Unpack[FactorOptions]) -> Array: ...


@public(FactorOptions, ALONE)
def eig(a: Operand, *, left: bool = False, right: bool = True, **how: Unpack[FactorOptions]) -> Any:
    """Return eigenvalues and eigenvectors of any square matrix: ``a @ v = v * w``.

    One worker has the whole matrix and calls LAPACK's ``geev``, on a GPU cuSOLVER's through CuPy where they have it.
    Results are complex, also if all eigenvalues are real: the type of a lazy array is known before its values. NumPy
    returns real ones then; take ``.real`` of those that are known to be real, or `eigh` of a Hermitian matrix.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    left, right : bool
        Which eigenvectors are computed, as in SciPy.

    Returns
    -------
    eigenvalues : array, (n,), complex
        In no order. A named tuple of these and the eigenvectors, as in NumPy; with `left` w, left and right vectors,
        as in SciPy; only w without any.
    eigenvectors : array, (n, n), complex
        Columns v of norm 1; left ones with ``vl^H @ a = w[:, None] * vl^H``. The first one of the largest components of
        each is real and positive. Of a matrix that lacks eigenvectors some are parallel up to rounding.

    Raises
    ------
    PlanError
        `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or eigenvalues did not converge.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.eig([[0.0, 2.0], [-2.0, 0.0]]).eigenvalues.compute()
    array([0.+2.j, 0.-2.j])
    """
    wanted = {"w": ".N", **{name: "mn" for name, side in (("vl", left), ("v", right)) if side}}
    results = factorize("eig", {"a": matrix("a", a)}, wanted, how=how, left=left, vectors=right)
    return results if left else EigResult(*results) if right else results[0]


@public(FactorOptions, ALONE)
def eigvals(a: Operand, **how: Unpack[FactorOptions]) -> Array:
    """Return the eigenvalues of any square matrix, in no order and always complex; see `eig`.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.

    Returns
    -------
    array, (n,), complex
        The eigenvalues.

    Raises
    ------
    PlanError
        When it is called: `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or eigenvalues did not converge.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.eigvals([[0.0, 2.0], [-2.0, 0.0]]).compute()
    array([0.+2.j, 0.-2.j])
    """
    return eig(a, right=False, **how)


@public(FactorOptions, ALONE)
def schur(
    a: Operand, output: Literal["real", "complex", "r", "c"] = "real", **how: Unpack[FactorOptions]
) -> tuple[Array, Array]:
    """Return the Schur decomposition ``a = z @ t @ z^H`` by LAPACK's ``gees``, which one worker calls.

    Parameters
    ----------
    a : array, (n, n)
        The matrix.
    output : {"real", "complex"}
        Of a real matrix: whether t is real with 2 x 2 blocks for pairs of complex eigenvalues, or complex and
        triangular.

    Returns
    -------
    t : array, (n, n)
        The Schur form, in the chunks of `a`.
    z : array, (n, n)
        Unitary.

    Raises
    ------
    PlanError
        `a` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or eigenvalues did not converge.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> t, z = linalg.schur([[2.0, 1.0], [0.0, 3.0]])
    >>> t.compute()
    array([[2., 1.],
           [0., 3.]])
    """
    a = matrix("a", a)
    dtype = common_type({"a": a})
    dtype = np.result_type(dtype, np.complex64) if output[0] == "c" else dtype
    t, z = factorize("schur", {"a": a}, {"t": "mn", "z": "mn"}, how=how, dtype=dtype)
    return t, z


@public(RunOptions, ALONE)
def sqrtm(A: Operand, **how: Unpack[RunOptions]) -> Array:
    """Return the principal square root of a matrix, on one worker: ``x @ x = A``.

    It is computed from the Schur decomposition, and always complex: whether it is real is known only after it. SciPy
    returns a real one then; take ``.real`` if no eigenvalue is negative.

    Parameters
    ----------
    A : array, (n, n)
        The matrix.

    Returns
    -------
    array, (n, n), complex
        The root, in the chunks of `A`. Its eigenvalues have real parts that are not negative.

    Raises
    ------
    PlanError
        `A` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or `A` is singular and has no square root.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.sqrtm([[4.0, 0.0], [0.0, 9.0]]).compute().real
    array([[2., 0.],
           [0., 3.]])
    """
    return factorize("sqrtm", {"a": matrix("A", A)}, {"x": "mn"}, how=how)[0]


@public(RunOptions, ALONE)
def logm(A: Operand, **how: Unpack[RunOptions]) -> Array:
    """Return the principal logarithm of a matrix, on one worker: ``expm(x) = A``.

    It is computed from the Schur decomposition, and always complex, as `sqrtm`.

    Parameters
    ----------
    A : array, (n, n)
        The matrix, not singular.

    Returns
    -------
    array, (n, n), complex
        The logarithm, in the chunks of `A`. Imaginary parts of its eigenvalues are between -pi and pi.

    Raises
    ------
    PlanError
        `A` is not square, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite, or `A` is singular.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.logm([[1.0, 0.0], [0.0, 1.0]]).compute().real
    array([[0., 0.],
           [0., 0.]])
    """
    return factorize("logm", {"a": matrix("A", A)}, {"x": "mn"}, how=how)[0]


@overload
def svd(
    a: Operand, full_matrices: bool = True, compute_uv: Literal[True] = True, **how: Unpack[FactorOptions]
) -> SVDResult: ...


@overload
def svd(
    a: Operand, full_matrices: bool = True, *, compute_uv: Literal[False], **how: Unpack[FactorOptions]
) -> Array: ...


@public(FactorOptions, SINGULAR)
def svd(a: Operand, full_matrices: bool = True, compute_uv: bool = True, **how: Unpack[FactorOptions]) -> Any:
    """Return the singular value decomposition ``a = u @ diag(s) @ vh``.

    ``method="local"``: one worker decomposes the matrix, by LAPACK's ``gesdd``, in one run. ``"columns"``: a matrix
    that is much longer than wide, or the other way round, is reduced to a square one by a QR factorization; its polar
    decomposition is computed, and the eigenvalues of its Hermitian factor as `eigh` has them by itself. ``"rows"``:
    chunks of rows of a tall matrix, or of columns of a wide one, stay where they are, in one run. ``"auto"``: each of
    these where it is expected to save time.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.
    full_matrices : bool
        Whether u and vh are square, as they are by default in NumPy and SciPy. Pass False for a matrix that is much
        longer than wide: a square u has m * m elements, and only one worker can compute it.
    compute_uv : bool
        Whether vectors are computed; if not, s alone is returned.

    Returns
    -------
    U : array, (m, m), or (m, k) without `full_matrices`
        Orthonormal columns; k is the smaller extent. The results are a named tuple, as in NumPy.
    S : array, (k,), real
        Singular values in descending order.
    Vh : array, (n, n), or (k, n) without `full_matrices`
        Orthonormal rows. The first one of the largest components of each row, where m < n of each column of U, is real
        and positive.

    Raises
    ------
    PlanError
        `a` is not a matrix, or of a type that is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.svd([[0.0, 2.0], [1.0, 0.0]]).S.compute()
    array([2., 1.])
    """
    a = matrix("a", a, unknown_rows=not (full_matrices and compute_uv), sparse=True)
    m, n = a.shape
    full, method = full_matrices and compute_uv and m != n, how.get("method", "auto")
    if full and method != "auto" and method != "local" and a.size:
        raise PlanError(f"method={method!r} of {m} x {n} has no full_matrices: pass full_matrices=False")
    factors = _decomposition(a, full, compute_uv, how)
    return SVDResult(*factors) if compute_uv else factors[0]


def _decomposition(a: Array, full: bool, compute_uv: bool, how: FactorOptions) -> tuple[Array, ...]:
    """Return what `svd` does, s alone in a tuple, too; `full` only of a matrix that is not square."""
    m, n = a.shape
    if not all(a.shape):
        how["method"] = "local"
    method = how.get("method", "auto")
    if full or method == "local":
        return _decomposed(a, full, compute_uv, how)
    if m < n:
        factors = _decomposition(adjoint(a), False, compute_uv, how)
        return tuple(x if x.ndim == 1 else adjoint(x) for x in reversed(factors))
    if goes_by_rows(a, how):
        with left_beyond_memory(a):
            return svd_by_rows(a, compute_uv, how)
    q: list[Array] = []
    if _goes_by_r(a, how):
        *q, a = qr(a, **how) if compute_uv else (qr(a, "r", **how),)
    by_polar = method == "columns" or _quicker_by_polar(a, compute_uv)
    factors = _by_polar(a, compute_uv, how) if by_polar else _decomposed(a, False, compute_uv, how)
    return (times(q[0], factors[0], how), *factors[1:]) if q else factors


def right_vectors(a: Array, how: RunOptions) -> tuple[Any, Any]:
    """Return s and vh of `svd`; of a matrix that is much longer than wide without its Q."""
    if _goes_by_r(a, how):
        a = qr(a, "r", **how)
    vectors: tuple[Any, Any] = svd(a, full_matrices=False, **how)[1:]
    return vectors


def _goes_by_r(a: Array, how: RunOptions) -> bool:
    """Whether a matrix that is not wide is reduced to R before its decomposition."""
    (m, n), method = a.shape, how.get("method", "auto")
    return method != "local" and m >= _TALL * n and (m * n >= _LARGE or method == "columns")


def svd_by_rows(a: Array, vectors: bool, how: RunOptions | FactorOptions, **options: Any) -> tuple[Array, ...]:
    """Return the decomposition of a tall matrix whose rows stay where they are."""
    wanted = {"u": "mn", "s": ".N real", "vh": "nn"} if vectors else {"s": ".N real"}
    return by_program("svd", {"a": a}, wanted, how=how, **options)


def _quicker_by_polar(a: Array, vectors: bool) -> bool:
    return array_kind(a._meta) == "cupy" and min(a.shape) >= (_POLAR if vectors else _POLAR_VALUES)


def _by_polar(a: Array, vectors: bool, how: FactorOptions) -> tuple[Array, ...]:
    """Return the decomposition of a matrix that is not wide by way of the polar one, which all workers compute.

    With A = U P and -P = V W V^H, where eigenvalues ascend, A = (U V) (-W) V^H: Y. Nakatsukasa, N. J. Higham, SIAM J.
    Sci. Comput. 35 (2013).
    """
    a = computed("a", a)
    unitary, best = unitary_factor(a, how), FactorOptions(**{**how, "method": "auto"})
    negative = -times(adjoint(unitary), a, how)
    if not vectors:
        return (da.maximum(-eigvalsh(negative, **best), 0),)
    w, v = eigh(negative, **best)
    return times(unitary, v, how), da.maximum(-w, 0), adjoint(v)


def _decomposed(a: Array, full: bool, vectors: bool, how: FactorOptions) -> tuple[Array, ...]:
    """Return the decomposition of a matrix by one worker."""
    wanted = {"u": "mm" if full else "mr", "s": ".R", "vh": "nn" if full else "rn"} if vectors else {"s": ".R"}
    return factorize("svd", {"a": a}, wanted, how=how, vectors=vectors, mode="complete" if full else "reduced")


@public(FactorOptions, SINGULAR)
def svdvals(a: Operand, **how: Unpack[FactorOptions]) -> Array:
    """Return the singular values of a matrix in descending order, without vectors; see `svd`.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape and any chunks.

    Returns
    -------
    array, (min(m, n),), real
        The singular values.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> linalg.svdvals([[0.0, 2.0], [1.0, 0.0]]).compute()
    array([2., 1.])
    """
    return svd(a, compute_uv=False, **how)


@public(FactorOptions, POLAR)
def polar(a: Operand, side: Literal["right", "left"] = "right", **how: Unpack[FactorOptions]) -> tuple[Array, Array]:
    """Return the polar decomposition ``a = u @ p``, or ``a = p @ u``: p is Hermitian and positive semidefinite.

    ``method="columns"``: all workers take the steps of QDWH, each a product and a factorization. ``"local"``: by the
    singular value decomposition on one worker. ``"auto"``: the one that is expected to be faster.

    Parameters
    ----------
    a : array, (m, n)
        The matrix, of any shape, any rank and any chunks.
    side : {"right", "left"}
        On which side of u p is.

    Returns
    -------
    u : array, (m, n)
        Orthonormal columns, where m < n rows. Of a matrix that is not of full rank there are many; one is returned.
    p : array, (n, n), or (m, m) if it is on the left
        Hermitian and positive semidefinite.

    Raises
    ------
    PlanError
        `a` is not a matrix, or a type is not supported.
    MatrixError
        When it is computed: an element is NaN or infinite.

    Examples
    --------
    >>> from dask_distmm import linalg
    >>> u, p = linalg.polar([[0.0, 2.0], [1.0, 0.0]])
    >>> abs(p.compute()).round(6)
    array([[1., 0.],
           [0., 2.]])
    """
    a = computed("a", a)
    method = how.get("method", "auto")
    if a.shape[0] < a.shape[1] and side == "left":
        u, p = polar(adjoint(a), **how)
        return adjoint(u), p
    if side == "right" and goes_by_rows(a, how):
        with left_beyond_memory(a):
            u, p = by_program("polar", {"a": a}, {"u": "mn", "h": "nn"}, how=how)
            return u, p
    if a.size and (method == "columns" or (method == "auto" and _quicker_by_polar(a, True))):
        u = unitary_factor(a, how)
        return u, times(adjoint(u), a, how) if side == "right" else times(a, adjoint(u), how)
    u, s, vh = svd(a, full_matrices=False, **how)
    p = times(adjoint(vh) * s, vh, how) if side == "right" else times(u * s, adjoint(u), how)
    return times(u, vh, how), p


def zero_below(s: Array, shape: tuple[int, ...], rtol: float | None) -> Array:
    """Return the size up to which singular values count as zero; `shape` is that of the matrix."""
    relative = max(shape) * float(np.finfo(s.dtype).eps) if rtol is None else rtol
    largest = (s.max if s.size else s.sum)(axis=-1, keepdims=s.ndim > 1)
    return largest * s.dtype.type(relative)


def pseudoinverse(a: Array, rtol: float | None, hermitian: bool, how: FactorOptions) -> Array:
    """Return the pseudo-inverse of a matrix of any rank: by its singular values, or its eigenvalues."""
    if hermitian:
        s, v = eigh(a, **how)
        left, right = v, adjoint(v)
    else:
        u, s, vh = svd(a, full_matrices=False, **how)
        left, right = adjoint(vh), adjoint(u)
    return times(left * _inverted(s, zero_below(abs(s), a.shape, rtol)), right, how)


def least_squares_of_any_rank(a: Array, b: Array, rcond: float, how: FactorOptions) -> tuple[Array, Any, Array, Array]:
    """Return what `lstsq` does of matrices of as many rows; residuals only where there are any."""
    a, b = (x.astype(common_type({"a": a, "b": b})) for x in (a, b))
    u, s, vh = svd(a, full_matrices=False, **how)
    limit = zero_below(s, a.shape, rcond)
    x = times(adjoint(vh), times(adjoint(u), b, how) * _inverted(s, limit)[:, None], how)
    residuals = (abs(b - times(a, x, how)) ** 2).sum(axis=0) if a.shape[0] > a.shape[1] else None
    return x, residuals, (s > limit).sum(), s


def _inverted(s: Array, limit: Array) -> Array:
    """Return reciprocals, and zeros in place of those of what is not above a limit."""
    return 1 / da.where(abs(s) > limit, s, s.dtype.type(np.inf))
