"""Factorizations on CPUs: the programs of `engines.factor` with SciPy's LAPACK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey, Comm, ResultKey
from dask_distmm.engines.factor.job import FactorJob
from dask_distmm.engines.numpy.blas import blas_threads
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.planning.factor.placement import FactorPlacement

__all__ = ["NumpyFactorJob"]


class NumpyFactorJob(FactorJob):
    """One participant's side of a factorization on CPUs."""

    lends = True

    def __init__(
        self,
        plan: FactorPlacement,
        me: int,
        chunks: Mapping[ChunkKey, NDArray[Any]],
        comm: Comm,
        progress: Callable[[float], None],
    ) -> None:
        super().__init__(plan, me, chunks, comm, progress, LapackKernels())

    def execute(self) -> dict[ResultKey, Any]:
        """Do this rank's part with as many threads as its worker has."""
        with blas_threads(self.plan.participants[self.me].nthreads):
            return super().execute()
