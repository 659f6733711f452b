"""Runs the programs of factorizations; for all engines.

`kernels` is the arithmetic that an engine brings, `operations` how a panel is made and applied, `spectral` has the
eigenvalues and singular values of a whole matrix, `execution` one rank's run, `outputs` the results that it holds in
the end.
"""

from dask_distmm.engines.factor.execution import Execution
from dask_distmm.engines.factor.kernels import Kernels

__all__ = ["Execution", "Kernels"]
