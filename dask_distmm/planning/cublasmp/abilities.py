"""The abilities of the engine `cublasmp`."""

from __future__ import annotations

from dask_distmm.numeric.types import takes_on_gpus
from dask_distmm.planning.cublasmp.costs import consider, has_method
from dask_distmm.planning.cublasmp.epilogs import all_reduced, native_epilog
from dask_distmm.planning.cublasmp.tiles import blocks_misfit, make_tiles
from dask_distmm.planning.engines import Abilities

CUBLASMP = Abilities(
    "cublasmp",
    "dask_distmm.engines.cublasmp.engine",
    takes_on_gpus,
    on_gpus=True,
    collective=True,
    keeps=True,
    encrypted=False,
    minds_order=True,
    library="cuBLASMp",
    has_method=has_method,
    consider=consider,
    native_epilog=native_epilog,
    all_reduced=all_reduced,
    tiles=make_tiles,
    misfit=blocks_misfit,
)
