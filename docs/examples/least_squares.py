"""Ridge regression of a tall matrix: two products of which only sums travel between workers.

    w = solve(X.T X + penalty I, X.T y)

X stays where it is. ``python docs/examples/least_squares.py`` runs on two worker processes of this machine.
"""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_distmm
from dask_distmm import matmul


def fit(x: da.Array, y: da.Array, penalty: float) -> np.ndarray:
    """Return the weights, (features, targets)."""
    # op_a="T" costs no copy; both products are computed at once, by one run each.
    gram, moments = dask.compute(matmul(x, x, op_a="T"), matmul(x, y, op_a="T"))
    return np.linalg.solve(gram + penalty * np.eye(len(gram)), moments)


def main() -> None:
    """Recover weights from noisy observations."""
    random = da.random.default_rng(1)
    x = random.standard_normal((100_000, 300), chunks=(10_000, 300)).persist()
    truth = np.random.default_rng(2).standard_normal((300, 8))
    y = (x @ truth + 0.1 * random.standard_normal((100_000, 8), chunks=(10_000, 8))).persist()

    plan = dask_distmm.explain(x, x, op_a="T")
    print(f"X is {x.nbytes / 2**20:.0f} MiB in {x.npartitions} chunks")
    print(f"X.T X: {plan.method}, {(plan.bytes_moved or 0) / 2**20:.2f} MiB move")
    w = fit(x, y, penalty=1e-3)
    print(f"weights {w.shape}, off by {abs(w - truth).max():.4f} at most, with noise of 0.1")


if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        main()
