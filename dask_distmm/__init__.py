"""``A @ B`` on Dask arrays as one collective matrix multiply across the cluster.

>>> import dask.array as da, dask_distmm
>>> from distributed import Client
>>> client = Client()                                  # doctest: +SKIP
>>> dask_distmm.enable()                               # doctest: +SKIP
>>> D = A @ B                                          # doctest: +SKIP
>>> dask_distmm.explain(A, B)                          # doctest: +SKIP

Importing this starts nothing and imports neither CUDA nor a dashboard.
"""

from dask_distmm._version import __version__
from dask_distmm.compat import check_imports as _check_imports
from dask_distmm.config import enabled_setting as _enabled_setting
from dask_distmm.config import register_defaults as _register_defaults

_check_imports()
_register_defaults()

import dask_distmm.show  # noqa: E402, F401
from dask_distmm import linalg  # noqa: E402
from dask_distmm.api import explain, matmul  # noqa: E402
from dask_distmm.arrays.dispatch import disable, enable, enabled, is_enabled  # noqa: E402
from dask_distmm.arrays.distribute import distribute  # noqa: E402
from dask_distmm.arrays.grouped import explain_grouped, matmul_grouped  # noqa: E402
from dask_distmm.arrays.prepared import Matmul  # noqa: E402
from dask_distmm.arrays.product import NotCollective  # noqa: E402
from dask_distmm.arrays.quantize import BlockScaled, dequantize, quantize  # noqa: E402
from dask_distmm.arrays.replicate import free_replicas, replicate  # noqa: E402
from dask_distmm.arrays.tensors import to_torch  # noqa: E402
from dask_distmm.diagnostics.attach import attach as _attach  # noqa: E402
from dask_distmm.diagnostics.bars import progress  # noqa: E402
from dask_distmm.errors import (  # noqa: E402
    DistMMError,
    EngineError,
    PlanError,
    ProjectedMemoryError,
    ProtocolError,
    RunFailedError,
)
from dask_distmm.numeric.epilogs import Epilog  # noqa: E402
from dask_distmm.planning import BatchPlan, Explanation, GroupPlan, Plan  # noqa: E402
from dask_distmm.planning.distribution import BlockCyclic, Slab  # noqa: E402
from dask_distmm.preload import dask_setup  # noqa: E402, F401  (Dask's --preload looks for it here)
from dask_distmm.runtime.client import free_workspaces  # noqa: E402
from dask_distmm.runtime.scheduler import attachments as _attachments  # noqa: E402

__all__ = [
    "BatchPlan",
    "BlockCyclic",
    "BlockScaled",
    "DistMMError",
    "EngineError",
    "Epilog",
    "Explanation",
    "GroupPlan",
    "Matmul",
    "NotCollective",
    "Plan",
    "PlanError",
    "ProjectedMemoryError",
    "ProtocolError",
    "RunFailedError",
    "Slab",
    "__version__",
    "dequantize",
    "disable",
    "distribute",
    "enable",
    "enabled",
    "explain",
    "explain_grouped",
    "free_replicas",
    "free_workspaces",
    "is_enabled",
    "linalg",
    "matmul",
    "matmul_grouped",
    "progress",
    "quantize",
    "replicate",
    "to_torch",
]


def __dir__() -> list[str]:
    """Return the public names, with the modules that have further ones."""
    return sorted([*__all__, "errors", "typing"])


_attachments.append(_attach)

try:
    if _enabled_setting() is True:
        enable()
except PlanError as _error:
    # An import must not fail by it, on a scheduler or worker least of all. Calls do.
    import warnings as _warnings

    _warnings.warn(str(_error), stacklevel=2)
