"""Engines do the multiplying. `base` has the base classes; `numpy` runs on CPUs, on the chunks as they lie."""

from dask_distmm.comms.base import Comm
from dask_distmm.engines.base import Engine, Job, get_engine

__all__ = ["Comm", "Engine", "Job", "get_engine"]
