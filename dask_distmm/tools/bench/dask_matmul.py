"""Stock Dask: the matmul that its arrays come with."""

from __future__ import annotations

import dask.array as da

from dask_distmm.tools.bench.cluster import ClusterPeer


class DaskMatmul(ClusterPeer):
    """``A @ B`` with dask_distmm not enabled."""

    name = "dask"

    def multiply(self, a: da.Array, b: da.Array) -> da.Array:
        """Return Dask's own lazy product."""
        product: da.Array = a @ b
        # A plugin that someone's configuration enables would otherwise be compared with itself.
        if any("distmm" in str(layer) for layer in product.dask.layers):
            raise RuntimeError("dask_distmm has taken over A @ B: this would not measure stock Dask")
        return product
