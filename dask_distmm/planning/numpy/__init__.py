"""The engine `numpy`: its abilities and its costs. Pure."""

from dask_distmm.numeric.types import takes_on_cpus
from dask_distmm.planning.engines import Abilities

__all__ = ["NUMPY"]

NUMPY = Abilities(
    "numpy",
    "dask_distmm.engines.numpy.engine",
    takes_on_cpus,
    frozenset(["product", "factorization", "program"]),
    carries=True,
    decomposes=lambda task: task.shareable,
    in_place=True,
    makes=True,
    packs=True,
    keeps_gathered=True,
)
