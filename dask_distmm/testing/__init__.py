"""For tests of this package and of engines: the numeric gate, a network in memory, the conformance suite.

Every engine must pass `conformance`: fresh random inputs, every method, all chunk grids, orders and types,
outputs and guard zones poisoned, inputs unchanged.
"""

from dask_distmm.testing.assertions import assert_large_product, assert_nothing_left, assert_product
from dask_distmm.testing.conforming import RandomProblem, conformance
from dask_distmm.testing.network import LocalComm, run_jobs
from dask_distmm.testing.problems import make_problem, random_chunks, random_matrix

__all__ = [
    "LocalComm",
    "RandomProblem",
    "assert_large_product",
    "assert_nothing_left",
    "assert_product",
    "conformance",
    "make_problem",
    "random_chunks",
    "random_matrix",
    "run_jobs",
]
