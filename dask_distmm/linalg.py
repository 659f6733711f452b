"""Linear algebra on Dask arrays, beyond the product, for any chunks.

Functions take and return lazy arrays, as `dask.array.linalg` does. One that ``numpy.linalg`` has takes NumPy's
arguments, and has its defaults and results; any other that ``scipy.linalg`` or ``scipy.sparse.linalg`` has takes
SciPy's. What only SciPy has of a function that both have is passed by name. Matrices may be of any chunks, also uneven
ones, in float32, float64, complex64 or complex128; integers are computed in float64, float16 and bfloat16 in float32.

Most functions are one collective run; the docstring of each says where it runs and what a worker holds, and `explain`
has the plan of a result. Functions of which NumPy has one of stacks, (..., m, n), take stacks, too, as plain tasks over
chunks of the other axes. Without a cluster the same graphs run in this process.
"""

from __future__ import annotations

from typing import Any

from dask_distmm.algorithms.iterative import cg, eigsh, expm, gmres, lobpcg, lsmr, lsqr, minres
from dask_distmm.arrays.linalg.array_api import (
    cond,
    cross,
    diagonal,
    gram,
    kron,
    matrix_norm,
    matrix_power,
    matrix_rank,
    matrix_transpose,
    matvec,
    multi_dot,
    norm,
    outer,
    symm,
    trace,
    trmm,
    vecdot,
    vecmat,
    vector_norm,
)
from dask_distmm.arrays.linalg.factorize import explain_result
from dask_distmm.arrays.linalg.factors import (
    cholesky,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    ldlt,
    logm,
    lu,
    lu_factor,
    polar,
    qr,
    schur,
    sqrtm,
    svd,
    svdvals,
)
from dask_distmm.arrays.linalg.leading import corrcoef, cov, pca, svd_compressed
from dask_distmm.arrays.linalg.public import relate
from dask_distmm.arrays.linalg.solutions import (
    cho_factor,
    cho_solve,
    det,
    inv,
    lstsq,
    lu_solve,
    pinv,
    ridge,
    slogdet,
    solve,
    solve_triangular,
)
from dask_distmm.arrays.linalg.structured import solve_banded, solve_toeplitz, solveh_banded
from dask_distmm.errors import MatrixError, NotSquareError, options_checked
from dask_distmm.planning.many import ChainPlan
from dask_distmm.planning.placement import Placement

__all__ = [
    "MatrixError", "NotSquareError", "cg", "cho_factor", "cho_solve", "cholesky", "cond", "corrcoef", "cov", "cross",
    "det", "diagonal", "eig", "eigh", "eigsh", "eigvals", "eigvalsh", "explain", "expm", "gmres", "gram", "inv",
    "kron", "ldlt", "lobpcg", "logm", "lsmr", "lsqr", "lstsq", "lu", "lu_factor", "lu_solve", "matrix_norm",
    "matrix_power", "matrix_rank", "matrix_transpose", "matvec", "minres", "multi_dot", "norm", "outer", "pca", "pinv",
    "polar", "qr", "ridge", "schur", "slogdet", "solve", "solve_banded", "solve_toeplitz", "solve_triangular",
    "solveh_banded", "sqrtm", "svd", "svd_compressed", "svdvals", "symm", "trace", "trmm", "vecdot", "vecmat",
    "vector_norm",
]  # fmt: skip
# Functions that belong together.
relate(
    globals(),
    "gram symm trmm multi_dot matrix_power",
    "multi_dot matvec vecmat vecdot",
    "cholesky cho_factor cho_solve solve",
    "cholesky ldlt lu",
    "lu lu_factor lu_solve solve",
    "solve solve_triangular inv lstsq cg minres gmres",
    "solve solve_banded solveh_banded solve_toeplitz",
    "cg minres gmres lsqr lsmr",
    "det slogdet lu_factor cho_factor",
    "qr lstsq polar svd",
    "lstsq ridge lsqr lsmr pinv",
    "pinv inv",
    "eigh eigvalsh eig eigvals eigsh lobpcg svd",
    "eig eigvals schur",
    "schur sqrtm logm expm",
    "svd svdvals svd_compressed pca",
    "pca cov corrcoef",
    "svdvals matrix_rank cond norm",
    "norm matrix_norm vector_norm",
    "cross outer kron vecdot",
    "trace diagonal matrix_transpose",
)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


@options_checked
def explain(x: Any) -> Placement | ChainPlan:
    """Return the plan of the runs that an array comes from: how many workers, which method, memory and time.

    Parameters
    ----------
    x : array, or tuple of arrays
        A result of a function of this module, not computed yet.

    Returns
    -------
    plan
        The plan of the run; if there are several, one that lists all of them in its attribute ``runs``. If ``runs`` is
        empty, only Dask's own tasks compute the array.

    Raises
    ------
    PlanError
        `x` is not a lazy array: it has been computed, or persisted.

    See Also
    --------
    dask_distmm.explain

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> plan = linalg.explain(linalg.cholesky(da.eye(100, chunks=30)))
    >>> plan.method, plan.engine, len(plan.workers)
    ('local', 'numpy', 1)
    """
    return explain_result(x)
