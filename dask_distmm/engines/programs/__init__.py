"""Runs programs (`dask_distmm.programs`); for all engines.

`job` takes the steps of one participant of a run, `exchange` hands arrays from rank to rank. `blas` is the arithmetic
that an engine brings; `kernels` makes of it what contracts promise for tall matrices, `factor` for factorizations,
`evaluate` for traced functions, `spectral` for eigenvalues and functions of a whole matrix.
"""
