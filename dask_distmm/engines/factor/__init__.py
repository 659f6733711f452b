"""Runs the programs of factorizations; for all engines.

`kernels` is the arithmetic that an engine brings, `operations` what is made of it, `spectral` has the eigenvalues and
singular values of a whole matrix, `execution` one rank's run, `job` the operands and results.
"""
