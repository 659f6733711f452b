"""The abilities of the engine `cusolvermp`."""

from __future__ import annotations

from dask_distmm.numeric.types import takes_on_gpus
from dask_distmm.planning.cusolvermp.costs import decomposes, share, workspace
from dask_distmm.planning.engines import Abilities

CUSOLVERMP = Abilities(
    "cusolvermp",
    "dask_distmm.engines.cusolvermp.engine",
    takes_on_gpus,
    frozenset(["factorization"]),
    (128, 1024),
    decomposes=decomposes,
    share=share,
    workspace=workspace,
    on_gpus=True,
    collective=True,
    keeps=True,
    encrypted=False,
    library="cuSOLVERMp",
)
