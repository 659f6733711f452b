"""PCA of counts: sparse rows stay sparse, where they are, and are centred without being made dense.

``python docs/examples/counts.py`` runs on two worker processes of this machine.
"""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse
from distributed import Client

from dask_distmm import linalg, matmul

CELLS, GENES, KINDS = 20_000, 300, 3


def counts(block: Any, block_id: tuple[int, int]) -> Any:
    """Return counts of cells of three kinds; each kind has 30 genes that others rarely have."""
    random = np.random.default_rng(block_id[0])
    kinds = random.integers(KINDS, size=len(block))
    rates = np.full((KINDS, GENES), 0.02)
    for kind in range(KINDS):
        rates[kind, 30 * kind : 30 * (kind + 1)] = 0.5 * (kind + 1)
    return scipy.sparse.csr_array(random.poisson(rates[kinds]).astype(np.float32))


def main() -> None:
    """Print the variances of components, and how far apart the scores of cells are."""
    shape = da.zeros((CELLS, GENES), chunks=(5000, GENES), dtype=np.float32)
    meta = scipy.sparse.csr_array((0, 0), dtype=np.float32)
    x = shape.map_blocks(counts, dtype=np.float32, meta=meta).persist()
    components, variances, mean = linalg.pca(x, 4)
    scores = matmul(x, components.T) - matmul(mean, components.T)
    found, spread = dask.compute(variances, scores.std(axis=0))
    print("variances:", found.round(1))
    print("deviations of scores:", spread.round(1))


if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None):
        main()
