"""Sparse chunks: SciPy's arrays and matrices, those of the package sparse, and CuPy's. No package is imported for them.

Kernels and products see compressed rows (CSR) of SciPy or CuPy: SciPy's products need no compiler, which those of the
package sparse call for each combination of types (Numba).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dask_distmm.errors import EngineError

# The bytes of a sparse matrix, which nobody knows before its chunks are there: relative to those of a dense one, and of
# a row in elements of a dense one, at most. (27 elements of float64 take 41, with their columns.)
_SHARE, _ROW = 1 / 8, 64
# Elements whose Gram matrix is made at once, so that they stay in a core's caches; as many for each column at least, as
# that is a call.
_AT_ONCE, _EACH = 2**18, 2**7
_MODULES = {"scipy": "sparse", "cupyx": "scipy", "sparse": ""}


def sparse_package(x: Any) -> str:
    """Return the package of a sparse array, ``"scipy"``, ``"sparse"`` or ``"cupyx"``; empty for all others."""
    for kind in type(x).__mro__[:-1]:
        package, _, module = kind.__module__.partition(".")
        if package in _MODULES and module.startswith(_MODULES[package]):
            return package
    return ""


def share_of(cols: float) -> float:
    """Return the bytes that a sparse matrix of `cols` columns is taken to have, relative to a dense matrix."""
    return min(_SHARE, _ROW / max(1, cols))


def compressed(x: Any) -> Any:
    """Return a sparse matrix in compressed rows, of SciPy or CuPy."""
    package = sparse_package(x)
    if package == "cupyx":
        return x.tocsr()
    import scipy.sparse

    try:
        return scipy.sparse.csr_array(x.to_scipy_sparse() if package == "sparse" else x)
    except ValueError as error:
        raise EngineError(f"a sparse chunk is not read: {error}. Elements that are not stored must be 0") from error


def rows_from(parts: Sequence[Any], cols: int) -> Any:
    """Return compressed rows that are made of data, indices of columns and pointers to rows."""
    on_device = type(parts[0]).__module__.startswith("cupy")
    module: Any = importlib.import_module("cupyx.scipy.sparse" if on_device else "scipy.sparse")
    kind = module.csr_matrix if on_device else module.csr_array
    return kind(tuple(parts), shape=(len(parts[-1]) - 1, cols))


def beside(parts: Sequence[Any]) -> Any:
    """Return matrices in compressed rows side by side."""
    module = importlib.import_module("cupyx.scipy.sparse" if sparse_package(parts[0]) == "cupyx" else "scipy.sparse")
    return parts[0] if len(parts) == 1 else module.hstack(parts, format="csr")


def dense(x: Any) -> Any:
    """Return a sparse array as a dense one; others as they are."""
    return compressed(x).toarray() if sparse_package(x) else x


def add_thin_gram(a: Any, g: Any) -> None:
    """Add the lower triangle of A^H A to a column-major matrix of the same type; A is in SciPy's compressed rows."""
    import scipy.sparse

    # SciPy's own product counts elements first, and keeps a list of them: what it calls for a vector needs neither.
    kernels: Any = getattr(scipy.sparse, "_sparsetools", None)
    if not hasattr(kernels, "csc_matvec"):
        g += np.tril((a.conj().T @ a).toarray())
        return
    if not a.has_canonical_format:
        (a := a.copy()).sum_duplicates()
    cols = a.shape[1]
    ends = np.arange(0, a.nnz, max(_AT_ONCE, _EACH * cols))
    bounds = np.unique([*np.searchsorted(a.indptr, ends, "right") - 1, a.shape[0]])
    for first, stop in itertools.pairwise(bounds.tolist()):
        rows = a[first:stop]
        kind, conjugate = rows.indices.dtype, rows.data.conj()
        # The elements by columns, those of the last rows first: each with the elements from it to the end of its row.
        places = scipy.sparse.csr_array(
            (np.arange(rows.nnz, dtype=kind), rows.indices, rows.indptr), rows.shape
        ).tocsc()
        at = places.data[::-1]
        # As the row of an element is before that of the element before, nothing is between them: an empty column.
        begins, factors = np.empty((rows.nnz, 2), kind), np.zeros((rows.nnz, 2), rows.dtype)
        begins[:, 0], begins[:, 1] = at, rows.indptr[places.indices[::-1] + 1]
        factors[:, 0] = rows.data[at]
        begins, factors = begins.ravel(), factors.ravel()
        pointers = (2 * (rows.nnz - places.indptr)).tolist()
        for column, (end, begin) in enumerate(itertools.pairwise(pointers)):
            if begin < end:
                csc = begins[begin:end], rows.indices, conjugate, factors[begin:end]
                kernels.csc_matvec(cols, end - begin - 1, *csc, g[:, column])


def multiply(a: Any, b: Any) -> Any:
    """Return the product of two matrices: sparse if both are, in the class of `a` if that is of the package sparse."""
    packages = sparse_package(a), sparse_package(b)
    if not all(packages):
        return operator.matmul(*(compressed(x) if sparse_package(x) else x for x in (a, b)))
    product = a @ b if packages == ("scipy", "scipy") else compressed(a) @ compressed(b)
    return type(a).from_scipy_sparse(product) if packages[0] == "sparse" else product


def total(parts: Iterable[Any]) -> Any:
    """Return the sum of matrices."""
    return functools.reduce(operator.add, parts)
