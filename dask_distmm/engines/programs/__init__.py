"""Runs programs (`dask_distmm.programs`); for all engines.

`executor` takes the steps of one rank, `job` has one participant's side of a run. `blas` is the arithmetic that an
engine brings; `kernels` makes of it what contracts promise for tall matrices, `factor` for factorizations, `iterations`
for iterative solvers, `spectral` for eigenvalues and functions of a whole matrix.
"""
