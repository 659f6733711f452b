"""Programs of several products, unchanged: on stock Dask, and under enable(); on data that fits into memory or not.

    python -m benchmarks.programs [--memory 500MiB] [--gigabytes 10] [--only svd] [--repeat 1] [--json FILE]

Dask's `svd_compressed`, dask-ml's `TruncatedSVD` and `PCA`, and xeofs' `EOF`, each of which is left out where its
package is not installed. By turns, on two worker processes of little memory: the median of the seconds, the most memory
of a worker, what was spilled, and the singular values, by which both ways are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
from dask.utils import parse_bytes

from benchmarks.harness import environment
from benchmarks.revision import revision
from benchmarks.waves import measure
from dask_distmm import disable, enable

WAYS = ("dask", "enabled")
_COLS, _ROWS, _RANK = 1000, 2000, 5  # of the matrix, of a chunk, and how many singular values are asked for


def data(gigabytes: float) -> da.Array:
    """Return a generated matrix with a few large singular values, so that all programs must find the same ones."""
    rows = int(gigabytes * 1e9 / 8 / _COLS) // _ROWS * _ROWS
    noise = da.random.default_rng(1).standard_normal((rows, _COLS), chunks=(_ROWS, _COLS))
    return noise * da.from_array(np.r_[np.arange(_RANK, 0, -1) * 10.0, np.ones(_COLS - _RANK)], chunks=-1)


def svd(x: da.Array) -> Any:
    """Return the singular values that Dask's randomized SVD finds."""
    return da.linalg.svd_compressed(x, _RANK, n_power_iter=1, seed=1)[1].compute()


def truncated_svd(x: da.Array) -> Any:
    """Return those of dask-ml's TruncatedSVD."""
    from dask_ml.decomposition import TruncatedSVD

    made = TruncatedSVD(n_components=_RANK, algorithm="randomized", n_iter=1, random_state=1)
    return made.fit(x).singular_values_


def pca(x: da.Array) -> Any:
    """Return those of dask-ml's PCA."""
    from dask_ml.decomposition import PCA

    return PCA(n_components=_RANK, svd_solver="randomized", iterated_power=1, random_state=1).fit(x).singular_values_


def eof(x: da.Array) -> Any:
    """Return those of xeofs' EOF analysis, with the rows as times."""
    import xarray
    from xeofs.single import EOF

    field = xarray.DataArray(x.reshape((-1, 20, _COLS // 20)), dims=("time", "lat", "lon"))
    field = field.assign_coords({name: np.arange(size) for name, size in field.sizes.items()})
    model = EOF(n_modes=_RANK, random_state=1)
    model.fit(field, dim="time")
    return model.singular_values().compute().values


PROGRAMS = {"svd_compressed": ("dask", svd), "TruncatedSVD": ("dask_ml", truncated_svd)}
PROGRAMS |= {"PCA": ("dask_ml", pca), "EOF": ("xeofs", eof)}


def run(program: Callable[[da.Array], Any], gigabytes: float, memory: int, enabled: bool) -> dict[str, Any]:
    """Return what a program took, and the singular values that it found."""
    values: list[float] = []

    def build() -> Callable[[], da.Array]:
        def made() -> da.Array:
            values.extend(np.asarray(program(data(gigabytes))).tolist())
            return da.ones(1)

        return made

    if enabled:
        enable()
    try:
        return {**measure(build, memory, limit=60.0), "values": values}
    except Exception as error:  # a program that runs by itself ends with its own error
        return {"outcome": type(error).__name__, "seconds": math.nan, "values": []}
    finally:
        disable()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="500MiB", help="of a worker")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the data")
    parser.add_argument("--only", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.only:
        package, program = PROGRAMS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed")
            continue
        turns = [
            {way: run(program, options.gigabytes, parse_bytes(options.memory), way == "enabled") for way in WAYS}
            for _ in range(options.repeat)
        ]
        for way in WAYS:
            every = sorted((turn[way] for turn in turns), key=lambda one: float(one["seconds"]))
            one = found[f"{name}: {way}"] = every[len(every) // 2]
            one["every"] = [turn[way]["seconds"] for turn in turns]
            print(
                f"{name:16s} {way:8s} {one['seconds']:7.1f} s  peak {one.get('peak', 0) / 2**20:5.0f} MiB, "
                f"{one.get('spilled', 0) / 2**20:6.0f} MiB spilled  {one['outcome']}",
                flush=True,
            )
        stock, ours = (np.array(found[f"{name}: {way}"]["values"]) for way in WAYS)
        if stock.size and ours.size:
            np.testing.assert_allclose(ours, stock, rtol=1e-6)
    if options.json:
        software = environment.software("numpy", "dask", "distributed", "dask_distmm", "dask_ml", "xeofs", "xarray")
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        with open(options.json, "w") as file:
            json.dump(
                {**about, "memory": options.memory, "gigabytes": options.gigabytes, "programs": found}, file, indent=1
            )


if __name__ == "__main__":
    main()
