"""For tests of this package and of engines: the numeric gate, a network in memory, the conformance suite.

Every engine must pass `conformance`: fresh random inputs, every method, all chunk grids, orders and types,
outputs and guard zones poisoned, inputs unchanged. Factorizations have LAPACK's gates, and a check of their programs.
"""

from dask_distmm.testing.assertions import assert_large_product, assert_nothing_left, assert_product
from dask_distmm.testing.conforming import RandomProblem, conformance
from dask_distmm.testing.factoring import run_factorization
from dask_distmm.testing.faults import FAULT_POINTS, inject, remove_faults
from dask_distmm.testing.network import LocalComm, run_jobs
from dask_distmm.testing.problems import make_problem, random_chunks, random_matrix
from dask_distmm.testing.programs import check_programs
from dask_distmm.testing.residuals import (
    assert_cholesky,
    assert_eigh,
    assert_inverse,
    assert_least_squares,
    assert_lu,
    assert_polar,
    assert_pseudoinverse,
    assert_qr,
    assert_solution,
    assert_svd,
)

__all__ = [
    "FAULT_POINTS",
    "LocalComm",
    "RandomProblem",
    "assert_cholesky",
    "assert_eigh",
    "assert_inverse",
    "assert_large_product",
    "assert_least_squares",
    "assert_lu",
    "assert_nothing_left",
    "assert_polar",
    "assert_product",
    "assert_pseudoinverse",
    "assert_qr",
    "assert_solution",
    "assert_svd",
    "check_programs",
    "conformance",
    "inject",
    "make_problem",
    "random_chunks",
    "random_matrix",
    "remove_faults",
    "run_factorization",
    "run_jobs",
]
