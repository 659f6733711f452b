"""``A @ B`` on Dask arrays as one collective matrix multiply across the cluster.

>>> import dask.array as da, dask_distmm
>>> from distributed import Client
>>> client = Client()                                  # doctest: +SKIP
>>> dask_distmm.enable()                               # doctest: +SKIP
>>> D = A @ B                                          # doctest: +SKIP
>>> dask_distmm.explain(A, B)                          # doctest: +SKIP

Importing this starts nothing and imports neither CUDA nor a dashboard.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dask_distmm._version import __version__
from dask_distmm.compat import check_imports as _check_imports
from dask_distmm.config import enabled_setting as _enabled_setting
from dask_distmm.config import register_defaults as _register_defaults
from dask_distmm.errors import DistMMError, EngineError, PlanError, ProjectedMemoryError, ProtocolError, RunFailedError
from dask_distmm.errors import options_checked as _options_checked
from dask_distmm.runtime import attachments as _attachments
from dask_distmm.shown import sources as _sources_of_forms

if TYPE_CHECKING:
    from dask_distmm import algorithms, linalg, random
    from dask_distmm.api import explain, matmul
    from dask_distmm.arrays.dispatch import disable, enable, enabled, is_enabled
    from dask_distmm.arrays.jit import jit
    from dask_distmm.arrays.kinds import to_torch
    from dask_distmm.arrays.prepared import Matmul, distribute, free_replicas, replicate
    from dask_distmm.arrays.product import NotCollective, explain_grouped, matmul_grouped
    from dask_distmm.arrays.quantize import BlockScaled, dequantize, quantize
    from dask_distmm.diagnostics import progress
    from dask_distmm.numeric.epilogs import Epilog
    from dask_distmm.planning import BatchPlan, Explanation, GroupPlan, Plan
    from dask_distmm.planning.problem import BlockCyclic, Slab
    from dask_distmm.runtime.client import free_workspaces
    from dask_distmm.tracing.arrays import logsumexp, segment_sum
    from dask_distmm.tracing.control import callback, cond, fori_loop, map_rows, sum_rows, while_loop

# Where the names are that are imported when they are first used: workers and schedulers need few of them.
_HOMES = {
    "api": ("explain", "matmul"),
    "arrays.dispatch": ("disable", "enable", "enabled", "is_enabled"),
    "arrays.jit": ("jit",),
    "arrays.kinds": ("to_torch",),
    "arrays.prepared": ("Matmul", "distribute", "free_replicas", "replicate"),
    "arrays.product": ("NotCollective", "explain_grouped", "matmul_grouped"),
    "arrays.quantize": ("BlockScaled", "dequantize", "quantize"),
    "diagnostics": ("progress",),
    "numeric.epilogs": ("Epilog",),
    "planning": ("BatchPlan", "Explanation", "GroupPlan", "Plan"),
    "planning.problem": ("BlockCyclic", "Slab"),
    "runtime.client": ("free_workspaces",),
    "tracing.arrays": ("logsumexp", "segment_sum"),
    "tracing.control": ("callback", "cond", "fori_loop", "map_rows", "sum_rows", "while_loop"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "BatchPlan", "BlockCyclic", "BlockScaled", "DistMMError", "EngineError", "Epilog", "Explanation", "GroupPlan",
    "Matmul", "NotCollective", "Plan", "PlanError", "ProjectedMemoryError", "ProtocolError", "RunFailedError", "Slab",
    "__version__", "algorithms", "callback", "cond", "dequantize", "disable", "distribute", "enable", "enabled",
    "explain", "explain_grouped", "fori_loop", "free_replicas", "free_workspaces", "is_enabled", "jit", "linalg",
    "logsumexp", "map_rows", "matmul", "matmul_grouped", "progress", "quantize", "random", "replicate", "segment_sum",
    "sum_rows", "to_torch", "while_loop",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names, with the modules that have further ones."""
    return sorted([*__all__, "errors", "sklearn", "typing"])


def __getattr__(name: str) -> Any:
    """Import what a public name stands for, once."""
    if name in _MODULES:
        module = importlib.import_module(_MODULES[name])
        member = _options_checked(getattr(module, name))
        # The same object there, or it could not be pickled.
        setattr(module, name, member)
    elif name in ("algorithms", "linalg", "random", "sklearn", "typing"):
        member = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = member
    return member


async def dask_setup(server: Any) -> None:
    """Put the plugin on a scheduler or worker that starts; called by Dask for ``--preload``."""
    from distributed import Scheduler, Worker

    from dask_distmm.engines.base import log
    from dask_distmm.errors import MissingEngineError
    from dask_distmm.runtime.messages import NAME
    from dask_distmm.runtime.plugin import DistMMSchedulerPlugin
    from dask_distmm.runtime.worker import worker_plugin

    if isinstance(server, Scheduler):
        try:
            await server.register_scheduler_plugin(DistMMSchedulerPlugin(), name=NAME, idempotent=True)
        except MissingEngineError as error:
            log.warning("%s", error)
    elif isinstance(server, Worker):
        await server.plugin_add(worker_plugin(), name=NAME, catch_errors=False)


def _attach(scheduler: Any, plugin: Any) -> None:
    importlib.import_module(f"{__name__}.diagnostics").attach(scheduler, plugin)


_check_imports()
_register_defaults()
_attachments.append(_attach)
_sources_of_forms.append(lambda: importlib.import_module(f"{__name__}.show").FORMS)

try:
    if _enabled_setting() is True:
        __getattr__("enable")()
except PlanError as _error:
    # An import must not fail by it, on a scheduler or worker least of all. Calls do.
    import warnings as _warnings

    _warnings.warn(str(_error), stacklevel=2)
