"""dask_distmm: the product as one collective GEMM over the workers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import dask.array as da

from benchmarks.peers.cluster import ClusterPeer, ClusterSession


def load() -> ModuleType:
    """Import the engine; here rather than above, so that the other peers run without it."""
    module = importlib.import_module("dask_distmm")
    if not (hasattr(module, "matmul") and hasattr(module, "explain")):
        raise ImportError("dask_distmm has no matmul and explain")
    return module


def plan_facts(plan: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """Return a plan's projected bytes per worker address, and what it chose: all that is read of it."""
    projected: Mapping[str, int] = plan.projected_bytes
    return {address: int(value) for address, value in projected.items()}, {"method": str(plan.method)}


class Distmm(ClusterPeer):
    """``dask_distmm.matmul(A, B)``."""

    name = "distmm"

    def __init__(self, session: ClusterSession, grids: list[int]) -> None:
        super().__init__(session, grids)
        self.engine: Any = None

    def unavailable(self) -> str | None:
        """Return why dask_distmm cannot be imported, if it cannot."""
        try:
            self.engine = load()
        except ImportError as error:
            return str(error)
        return None

    def multiply(self, a: da.Array, b: da.Array) -> da.Array:
        """Return the engine's lazy product."""
        product: da.Array = self.engine.matmul(a, b)
        return product

    def projection(self, a: da.Array, b: da.Array) -> tuple[dict[str, int], dict[str, Any]]:
        """Return what the engine's plan says."""
        return plan_facts(self.engine.explain(a, b))
