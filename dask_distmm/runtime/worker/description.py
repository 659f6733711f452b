"""A worker describes itself: versions, engines, memory, links."""

from __future__ import annotations

import platform

from dask_distmm._version import __version__
from dask_distmm.comms.serializers import let_types_travel
from dask_distmm.engines.base import get_engine
from dask_distmm.errors import EngineError
from dask_distmm.planning import ENGINES
from dask_distmm.runtime.messages import Description

__all__ = ["describe_process"]


def describe_process() -> Description:
    """Return the facts about this process that planning needs. Imports all engines, which may take seconds."""
    engines, memory, links = {}, {}, {}
    for name in ENGINES:
        try:
            engine = get_engine(name)
            engines[name], memory[name] = dict(engine.versions()), engine.memory()
            device, reach = engine.links()
            links[name] = [device, list(reach)]
        except EngineError as error:
            engines[name] = {"error": str(error)}
    # An engine for GPUs has imported CuPy, whose types need help to travel.
    let_types_travel()
    return Description("OK", version=__version__, engines=engines, memory=memory, links=links, host=platform.node())
