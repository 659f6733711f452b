"""Eigenvalues of a Hermitian matrix that several ranks have: by way of a tridiagonal one; for all engines.

`reduction` makes the tridiagonal matrix where ranks talk over Dask's comms, `conquer` has its eigenvalues and
eigenvectors by divide and conquer, of which `deflation` and `secular` are the mathematics; `bisection` has eigenvalues
alone. `kernels` is the arithmetic that an engine brings, and that of CPUs.
"""
