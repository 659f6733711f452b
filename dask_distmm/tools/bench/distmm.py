"""dask_distmm: the product as one collective GEMM over the workers."""

from __future__ import annotations

from typing import Any

import dask.array as da

from dask_distmm import Plan, PlanError, explain, matmul
from dask_distmm.tools.bench.cluster import ClusterPeer


class Distmm(ClusterPeer):
    """``dask_distmm.matmul(A, B)``."""

    name = "distmm"

    def multiply(self, a: da.Array, b: da.Array) -> da.Array:
        """Return the lazy product."""
        product: da.Array = matmul(a, b)
        return product

    def projection(self, a: da.Array, b: da.Array) -> tuple[dict[str, int], dict[str, Any]]:
        """Return the plan's projected bytes per worker address, and its choices."""
        plan = explain(a, b)
        if not isinstance(plan, Plan):
            raise PlanError(f"no collective run would take place: {plan!r}")
        return dict(plan.projected_bytes), {"method": plan.method}
