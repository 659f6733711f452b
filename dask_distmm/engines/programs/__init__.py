"""Runs programs (`dask_distmm.programs`); for all engines.

`executor` takes the steps of one rank, `job` has one participant's side of a run, and `kernels` what contracts promise
for tall matrices, on the BLAS and LAPACK that an engine brings.
"""
