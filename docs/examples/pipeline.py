"""Zarr in, a product and least squares, Zarr out, on a cluster that runs already.

`pipeline.sh` beside this file starts a cluster of two hosts, and this program. All hosts see the folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dask.array as da
import numpy as np
from distributed import Client

from dask_distmm import linalg, matmul

ROWS, COLUMNS, FEATURES = 40_000, 200, 50


def make(folder: Path) -> np.ndarray:
    """Write the input, and return the weights that it was made with."""
    random = da.random.default_rng()
    x = random.standard_normal((ROWS, COLUMNS), chunks=(ROWS // 8, COLUMNS)).persist()
    w = random.standard_normal((COLUMNS, FEATURES), chunks=-1).persist()
    truth = np.random.default_rng().standard_normal((FEATURES, 1))
    y = da.maximum(x @ w, 0) @ truth + 0.1 * random.standard_normal((ROWS, 1), chunks=(ROWS // 8, 1))
    for name, array in {"x": x, "w": w, "y": y}.items():
        da.to_zarr(array, folder / f"{name}.zarr", overwrite=True)
    return truth


def main() -> None:
    """Run, and compare with the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="how many to wait for")
    parser.add_argument("--cupy", action="store_true", help="compute on GPUs")
    options = parser.parse_args()
    folder, backend = options.folder, "cupy" if options.cupy else "numpy"
    with Client(scheduler_file=str(folder / "scheduler.json")) as client:
        client.wait_for_workers(options.workers, timeout=120)
        truth = make(folder)

        x, w, y = (da.from_zarr(folder / f"{name}.zarr").to_backend(backend) for name in "xwy")
        features = matmul(x, w, epilog="relu").persist()
        weights = linalg.lstsq(features, y)[0]
        for name, array in {"features": features, "weights": weights}.items():
            da.to_zarr(array.to_backend("numpy"), folder / f"{name}.zarr", overwrite=True)

        error = abs(da.from_zarr(folder / "weights.zarr").compute() - truth).max()
        print(f"features {features.shape}, weights off by {error:.4f} at most, with noise of 0.1")
        runs = [event for _, event in client.get_events("distmm") if event["action"] == "done"]
        print(
            len(runs),
            "runs on",
            ", ".join(sorted(worker["name"] for worker in client.scheduler_info()["workers"].values())),
        )
        assert error < 0.02


if __name__ == "__main__":
    main()
