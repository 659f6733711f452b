"""Sparse chunks: SciPy's arrays and matrices, those of the package sparse, and CuPy's. No package is imported for them.

Kernels and products see compressed rows (CSR) of SciPy or CuPy: SciPy's products need no compiler, which those of the
package sparse call for each combination of types (Numba).
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dask_distmm.errors import EngineError

# The bytes of a sparse matrix, relative to those of a dense one: nobody knows them before its chunks are there.
SHARE = 1 / 8
_MODULES = {"scipy": "sparse", "cupyx": "scipy", "sparse": ""}


def sparse_package(x: Any) -> str:
    """Return the package of a sparse array, ``"scipy"``, ``"sparse"`` or ``"cupyx"``; empty for all others."""
    for kind in type(x).__mro__[:-1]:
        package, _, module = kind.__module__.partition(".")
        if package in _MODULES and module.startswith(_MODULES[package]):
            return package
    return ""


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


def dense_product(a: Any, b: Any) -> Any:
    """Return the product of SciPy's compressed rows as a dense matrix."""
    import scipy.sparse

    rows, cols = a.shape[0], b.shape[1]
    # SciPy's operator first counts elements, which takes as long as the rest; what it calls then may have another name.
    kernels: Any = getattr(scipy.sparse, "_sparsetools", None)
    parts = a.indptr, a.indices, b.indptr, b.indices
    if not hasattr(kernels, "csr_matmat") or not hasattr(kernels, "csr_todense") or a.dtype != b.dtype:
        return (a @ b).toarray()
    kind = scipy.sparse.get_index_dtype(parts, maxval=max(a.nnz, b.nnz, rows * cols, *b.shape))
    given = [x.astype(kind, copy=False) for x in parts]
    pointers, indices, data = np.empty(rows + 1, kind), np.empty(rows * cols, kind), np.empty(rows * cols, a.dtype)
    kernels.csr_matmat(rows, cols, *given[:2], a.data, *given[2:], b.data, pointers, indices, data)
    found = np.zeros((rows, cols), a.dtype)
    kernels.csr_todense(rows, cols, pointers, indices, data, found)
    return found


def multiply(a: Any, b: Any) -> Any:
    """Return the product of two matrices: sparse if both are, in the class of `a` if that is of the package sparse."""
    packages = sparse_package(a), sparse_package(b)
    if not all(packages):
        return operator.matmul(*(compressed(x) if sparse_package(x) else x for x in (a, b)))
    found = a @ b if packages == ("scipy", "scipy") else compressed(a) @ compressed(b)
    return type(a).from_scipy_sparse(found) if packages[0] == "sparse" else found


def total(parts: Iterable[Any]) -> Any:
    """Return the sum of matrices."""
    return functools.reduce(operator.add, parts)
