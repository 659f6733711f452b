"""Runs programs (`dask_distmm.programs`); for all engines.

`kernels` has what their contracts promise, on the BLAS and LAPACK that an engine brings, `job` one rank's run.
"""
