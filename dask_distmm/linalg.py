"""Linear algebra on Dask arrays, beyond the product, for any chunks: one collective run each.

Functions take and return lazy arrays, as `dask.array.linalg` does, and mean the same as those of ``scipy.linalg`` and
``numpy.linalg`` of the same name. Matrices may be of any chunks, also uneven ones, in float32, float64, complex64 or
complex128; integers are computed in float64, float16 in float32. All of them take

engine, workers
    As `dask_distmm.matmul` takes them: the engine's name, and addresses of workers or their number.
method
    ``"local"``: one worker has the whole matrix; ``"columns"``: block columns are dealt out to all workers; ``"auto"``:
    the cost model chooses. `qr` and `lstsq` also know ``"rows"``: each chunk of rows is factorized where it lies, in
    plain tasks; ``"auto"`` takes that for tall matrices if neither `engine` nor `workers` is given.

Without a cluster the same graphs run in this process.
"""

from __future__ import annotations

from typing import Any

from dask.array.core import Array

from dask_distmm.arrays.linalg.factorize import problem_of
from dask_distmm.arrays.linalg.factors import cholesky, lu, lu_factor, qr
from dask_distmm.arrays.linalg.leading import pca, svd_compressed
from dask_distmm.arrays.linalg.level3 import gram, symm, trmm
from dask_distmm.arrays.linalg.norms import cond, matrix_rank, norm
from dask_distmm.arrays.linalg.solutions import (
    cho_factor,
    cho_solve,
    det,
    inv,
    lstsq,
    lu_solve,
    pinv,
    slogdet,
    solve,
    solve_triangular,
)
from dask_distmm.arrays.linalg.spectral import eigh, eigvalsh, polar, svd, svdvals
from dask_distmm.errors import MatrixError, PlanError
from dask_distmm.planning.computation_kinds import plan_computation
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.factor.placement import FactorPlacement
from dask_distmm.runtime.client import ask_roster, current_client

__all__ = [
    "MatrixError",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "cond",
    "det",
    "eigh",
    "eigvalsh",
    "explain",
    "gram",
    "inv",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_rank",
    "norm",
    "pca",
    "pinv",
    "polar",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svd_compressed",
    "svdvals",
    "symm",
    "trmm",
]


def explain(x: Any) -> FactorPlacement:
    """Return the plan of the run that an array comes from: how many workers, which method, memory and time.

    Parameters
    ----------
    x : array
        A result of a function of this module, not computed yet.

    Raises
    ------
    PlanError
        There is no such run in its graph.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import linalg
    >>> explain(linalg.cholesky(da.eye(100, chunks=30)))  # doctest: +SKIP
    """
    problem = problem_of(x) if isinstance(x, Array) else None
    if problem is None:
        raise PlanError(f"{type(x).__name__} is no lazy result of dask_distmm.linalg: give one, before it is persisted")
    client = current_client()
    known = ask_roster(client, problem.demand) if client is not None else None
    workers, engines = (
        (known.workers, known.engines) if known is not None else ([Worker("here")], (problem.engine_alone,))
    )
    made = plan_computation(problem, workers, engine=engines)
    assert isinstance(made, FactorPlacement)
    return made
