"""Whole algorithms, each of which is one run: NumPy in the language of `jit`, to call or to copy.

They take Dask arrays of any chunks, and return lazy ones. Called with NumPy arrays they just compute. The same
functions can be called in functions of `jit`, as parts of larger ones.
"""

from __future__ import annotations

from dask_distmm.algorithms.clusters import gmm, kmeans
from dask_distmm.algorithms.factors import als, eigs, nmf, pagerank, svds
from dask_distmm.algorithms.regression import lasso, logistic_regression, poisson_regression, ridge_cv

__all__ = [
    "als", "eigs", "gmm", "kmeans", "lasso", "logistic_regression", "nmf", "pagerank", "poisson_regression",
    "ridge_cv", "svds",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
