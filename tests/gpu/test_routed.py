"""Functions of ``da.linalg``, ``np.linalg`` and ``dask.array`` on CuPy chunks of tall matrices, beside stock Dask's.

``python tests/gpu/test_routed.py`` prints their times by turns, on all GPUs: stock, under ``enable()``, and the ratio.
"""

from __future__ import annotations

import statistics
import time

import dask
import dask.array as da
import numpy as np
import pytest
from leaks import assert_nothing_left
from matrices import problem_of
from routed_calls import CALLS, about, parts

import dask_distmm

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2)
NAMES = [
    *("da.cov", "da.cov rowvar", "da.corrcoef", "da.linalg.lstsq", "da.linalg.lstsq 2-D", "da.linalg.norm 2"),
    *("da.linalg.norm nuc", "da.linalg.qr", "da.linalg.svd", "da.linalg.svd wide", "da.linalg.svd_compressed"),
    *("np.linalg.cond", "np.linalg.matrix_rank", "np.linalg.pinv", "np.linalg.svdvals"),
]


def tall_operands(m, n, chunks):
    """Operands of CuPy's random numbers, on the workers."""
    from types import SimpleNamespace

    draw = da.random.default_rng(3).standard_normal
    rows = m // chunks
    shapes = {"tall": (m, n), "wide": (n, m), "c": (m,), "targets": (m, 2)}
    cuts = {"tall": (rows, n), "wide": (n, rows), "c": (rows,), "targets": (rows, 2)}
    return SimpleNamespace(**{name: draw(shape, chunks=cuts[name]).persist() for name, shape in shapes.items()})


def sums(client, result):
    """Sums of sizes of results, computed on the workers."""
    found = client.compute([abs(x).sum() for x in parts(result)], sync=True)
    return [float(x) for x in found]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_routed_functions_are_as_stock_dasks(clusters, nworkers, name):
    client, _ = clusters(nworkers)
    with dask.config.set({"array.backend": "cupy"}):
        x = tall_operands(40_000, 32, 8)
        with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
            found = CALLS[name](x)
            values = sums(client, found)
        if name.startswith("da."):
            expected = CALLS[name](x)
            assert about(found) == about(expected)
            # Random vectors are drawn otherwise.
            tolerance = 0.1 if "compressed" in name else 1e-8
            np.testing.assert_allclose(values, sums(client, expected), rtol=tolerance)
    assert_nothing_left(client)


@pytest.mark.parametrize("generator", ["default_rng", "RandomState", "seed"])
def test_random_projections_are_programs(clusters, nworkers, generator):
    """Whatever the random numbers come from; the same ones give the same result."""
    client, _ = clusters(nworkers)
    with dask.config.set({"array.backend": "cupy", "distmm.minimum-flops": 0}), dask_distmm.enabled():
        a = tall_operands(40_000, 32, 8).tall
        twice = []
        for _ in range(2):
            seed = 5 if generator == "seed" else getattr(da.random, generator)(5)
            u, s, v = da.linalg.svd_compressed(a, 4, n_power_iter=3, seed=seed)
            assert problem_of(s).builder == "svd_compressed"
            twice.append(client.compute([s, abs((u * s) @ v).sum()], sync=True))
        np.testing.assert_allclose(*(float(one[0].sum()) for one in twice), rtol=1e-12)
    assert_nothing_left(client)


def main() -> None:
    """Print the median of five turns of each function, after one that warms up."""
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    shapes = (400_000, 512, 8), (4_000_000, 64, 8), (2_000_000, 256, 16)
    with LocalCUDACluster() as cluster, Client(cluster) as client, dask.config.set({"array.backend": "cupy"}):
        for m, n, chunks in shapes:
            x = tall_operands(m, n, chunks)
            for name in (one for one in NAMES if one.startswith("da.")):
                seconds: dict[bool, list[float]] = {False: [], True: []}
                for turn in range(6):
                    for enabled in seconds:
                        begin = time.perf_counter()
                        with dask.config.set({"distmm.enabled": enabled}):
                            sums(client, CALLS[name](x))
                        seconds[enabled] += [time.perf_counter() - begin] * bool(turn)
                stock, ours = (1e3 * statistics.median(times) for times in seconds.values())
                print(f"{m} x {n} {name:28} {stock:8.0f} {ours:8.0f} ms {stock / ours:6.2f}", flush=True)


if __name__ == "__main__":
    dask_distmm.enable()
    main()
