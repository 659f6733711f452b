"""The model of the engine `cusolvermp`.

The rates are shares of a product's, of fp64 on H200s with NVLink: cuSOLVER on one, N = 32768 (eigh: 16384, svd: 8192),
and cuSOLVERMp 0.9.1 on two (eigh: 16384, the others 32768, the better one of 1 x 2 and 2 x 1 processes). Those of
triangular systems and of values alone have not been measured. Workspaces are counted in panels of all rows, of which
the library broadcasts one while another is made, and for an eigen decomposition in matrices: the ones that LAPACK's
syevd has, distributed over the ranks.
"""

from __future__ import annotations

from typing import ClassVar

from dask_distmm.planning.factor import Factorization, FactorPlacement
from dask_distmm.planning.model import EngineModel

_PANELS, _MATRICES, _VALUES = 6, 4, 2


class CusolvermpModel(EngineModel):
    """The model of the engine."""

    shares: ClassVar = {
        "cholesky": (0.72, 0.55),
        "lu": (0.54, 0.20),
        "qr": (0.51, 0.36),
        "": (0.70, 0.50),
        "eigh": (0.20, 0.085),
        "svd": (0.023, 0.0),
        "values": (0.10, 0.05),
    }

    def decomposes(self, task: Factorization) -> bool:
        """Whether ranks compute a spectral decomposition together: all eigenvalues of one matrix (syevd)."""
        return task.kind == "eigh" and task.b_shape is None and task.subset is None

    def workspace(self, plan: FactorPlacement, rank: int) -> int:
        """Return the elements that the library holds on a rank beside its matrices."""
        n, panels = plan.columns.rows, _PANELS * plan.columns.rows * plan.width
        if not plan.task.spectral:
            return panels
        return panels + (_MATRICES if plan.task.vectors else _VALUES) * n * -(-n // plan.count)


CUSOLVERMP = CusolvermpModel(
    "cusolvermp",
    "dask_distmm.engines.cusolvermp",
    frozenset(["factorization"]),
    (128, 1024),
    on_gpus=True,
    collective=True,
    library="cuSOLVERMp",
)
