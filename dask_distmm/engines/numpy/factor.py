"""Factorizations and programs on CPUs. Imported for one: workers that only multiply do without SciPy's larger half."""

from __future__ import annotations

from typing import Any

from dask_distmm.engines.base import ResultKey
from dask_distmm.engines.factor.job import FactorJob
from dask_distmm.engines.numpy.blas import blas_threads
from dask_distmm.engines.programs.job import TallJob


class NumpyFactorJob(FactorJob):
    """One participant's side of a factorization on CPUs, with SciPy's LAPACK."""

    lends = True

    def execute(self) -> dict[ResultKey, Any]:
        """Do this rank's part with as many threads as its worker has."""
        with blas_threads(self.plan.participants[self.me].nthreads):
            return super().execute()


class NumpyTallJob(TallJob):
    """One participant's side of a program on CPUs."""

    lends = True

    def execute(self) -> dict[ResultKey, Any]:
        """Do this rank's part with as many threads as its worker has."""
        with blas_threads(self.plan.participants[self.me].nthreads):
            return super().execute()
