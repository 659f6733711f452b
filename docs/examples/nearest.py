"""For each query the most similar of many vectors: one product, and a reduction of its chunks.

Similarities are never held as a whole in this process: Dask reduces the chunks of D on the workers that have them.
``python docs/examples/nearest.py`` runs on two worker processes of this machine.
"""

from __future__ import annotations

import dask.array as da
import numpy as np
from distributed import Client

from dask_distmm import matmul


def normalized(x: da.Array) -> da.Array:
    """Return rows of length 1."""
    return x / da.sqrt((x**2).sum(axis=1, keepdims=True))


def nearest(queries: da.Array, vectors: da.Array) -> tuple[da.Array, da.Array]:
    """Return the number of the most similar vector for each query, and its cosine. Lazy."""
    # D has all vectors in one chunk along its second axis, so that argmax needs one chunk for each query.
    cosines = matmul(normalized(queries), normalized(vectors), op_b="T", out_chunks=(500, -1))
    return cosines.argmax(axis=1), cosines.max(axis=1)


def main() -> None:
    """Look for vectors that were disturbed a little."""
    random = da.random.default_rng(3)
    vectors = random.standard_normal((20_000, 128), chunks=(2_500, 128)).persist()
    wanted = np.random.default_rng(4).integers(0, 20_000, 2_000)
    noise = random.standard_normal((2_000, 128), chunks=(500, 128))
    queries = (vectors[wanted].rechunk((500, 128)) + 2 * noise).persist()

    found, cosine = da.compute(*nearest(queries, vectors))
    print(f"{len(found)} queries among {len(vectors)} vectors of {vectors.shape[1]} numbers")
    print(f"found {(found == wanted).mean():.1%}, at a cosine of {np.median(cosine):.2f} in the middle")


if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        main()
