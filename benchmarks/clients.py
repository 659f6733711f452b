"""Programs of other libraries, unchanged, with and without ``enable()``: ``python -m benchmarks.clients``.

Each program gets fresh chunks that are in memory, ways take turns, and the best of some rounds counts; both results are
compared. A library that is not installed is named and left out: ``pip install dask-ml dask-glm xeofs eofs sgkit
hyperspy scanpy``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import pathlib
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import dask_distmm
from benchmarks.harness import environment
from benchmarks.revision import revision

ROUNDS = 5
LIBRARIES = ("dask-ml", "dask-glm", "xeofs", "eofs", "sgkit", "hyperspy", "scanpy", "scikit-learn")
# What results may differ by, relative to the largest element: randomized methods are as good as their spectrum.
LIMIT = 1e-5

Numbers = Mapping[str, Any]


def _dask_ml(name: str, **options: Any) -> Callable[[da.Array], Numbers]:
    def fit(x: da.Array) -> Numbers:
        found = getattr(importlib.import_module("dask_ml.decomposition"), name)(**options).fit(x)
        return {"values": found.singular_values_, "variances": found.explained_variance_}

    return fit


def _scores(x: da.Array) -> Numbers:
    """Scale, project, and predict the first column of the data, as a pipeline of scikit-learn does."""
    decomposition, preprocessing = (
        importlib.import_module(f"dask_ml.{part}") for part in ("decomposition", "preprocessing")
    )
    scaled = preprocessing.StandardScaler().fit_transform(x)
    scores = decomposition.PCA(8, svd_solver="full").fit(scaled).transform(scaled)
    return {"coefficients": da.linalg.lstsq(scores, x[:, 0])[0].compute()}


def _regression(x: da.Array) -> Numbers:
    algorithms = importlib.import_module("dask_glm.algorithms")
    chance = 1 / (1 + da.exp(-(x @ np.linspace(-1, 1, x.shape[1]) / 4)))
    y = (chance > 0.5 + 0.3 * da.sin(1e3 * x[:, 0])).astype(float).persist()
    return {"coefficients": algorithms.newton(x, y, max_iter=8)}


def _fields(x: da.Array) -> Any:
    import xarray

    side = 16
    return xarray.DataArray(
        x.reshape((x.shape[0], side, x.shape[1] // side)),
        dims=("time", "lat", "lon"),
        coords={"time": np.arange(x.shape[0]), "lat": np.linspace(-40, 40, side), "lon": np.arange(x.shape[1] // side)},
    )


def _xeofs(x: da.Array) -> Numbers:
    model = importlib.import_module("xeofs.single").EOF(n_modes=5, use_coslat=True, random_state=1)
    model.fit(_fields(x), dim="time")
    return {"variances": np.asarray(model.explained_variance())}


def _eofs(x: da.Array) -> Numbers:
    solver = importlib.import_module("eofs.standard").Eof(_fields(x).data)
    return {"variances": np.asarray(solver.eigenvalues(5))}


def _genotypes(x: da.Array, **more: Any) -> Any:
    import xarray

    # Dask can't send masked arrays of smaller integers.
    counts = (x > 2).astype(np.int32) + (x > 6)
    return xarray.Dataset({"call_alternate_allele_count": (("variants", "samples"), counts), **more})


def _sgkit_pca(algorithm: str) -> Callable[[da.Array], Numbers]:
    def fit(x: da.Array) -> Numbers:
        options = {"n_components": 8, "ploidy": 2, "algorithm": algorithm, "n_iter": 4, "check_missing": False}
        found = importlib.import_module("sgkit").pca(_genotypes(x), **options)
        names = {"variances": "sample_pca_explained_variance", "scores": "sample_pca_projection"}
        values = dask.compute(*(found[name].data for name in names.values()))
        return dict(zip(names, values, strict=True))

    return fit


def _sgkit_regression(x: da.Array) -> Numbers:
    genotypes, samples = _genotypes(x.T), np.random.default_rng(1)
    dosage = genotypes.call_alternate_allele_count.astype(float)
    covariates, traits = (samples.standard_normal((x.shape[0], count)) for count in (8, 2))
    data = genotypes.assign(
        dosage=dosage, ages=(("samples", "covariates"), covariates), heights=(("samples", "traits"), traits)
    )
    options = {"dosage": "dosage", "covariates": "ages", "traits": "heights"}
    found = importlib.import_module("sgkit").gwas_linear_regression(data, **options)
    return {"coefficients": found.variant_linreg_beta.compute(), "t": found.variant_linreg_t_value.compute()}


def _hyperspy(x: da.Array) -> Numbers:
    spectra = importlib.import_module("hyperspy.api").signals.Signal1D(x.reshape((40, -1, x.shape[1]))).as_lazy()
    options = {"algorithm": "SVD", "output_dimension": 8, "centre": "navigation", "print_info": False}
    # By default it is by Dask's scheduler of one thread, which can't read what workers have.
    spectra.decomposition(svd_solver="full", **options)
    results = spectra.learning_results
    return {"variances": np.asarray(results.explained_variance)[:8], "factors": np.asarray(results.factors)}


def _scanpy(x: da.Array) -> Numbers:
    options = {"n_comps": 8, "return_info": True, "dtype": "float64"}
    scores, components, _, variances = importlib.import_module("scanpy").pp.pca(x, **options)
    return {"scores": scores.compute(), "components": components, "variances": variances}


def _scanpy_sparse(x: da.Array) -> Numbers:
    csr = importlib.import_module("scipy.sparse").csr_matrix
    return _scanpy((x * (x > 20)).map_blocks(csr).persist())


# By name: the shape and the number of chunks of rows, and what is done.
PROGRAMS: dict[str, tuple[tuple[int, int, int], Callable[[da.Array], Numbers]]] = {
    "dask-ml: PCA, full": ((200_000, 128, 8), _dask_ml("PCA", n_components=8, svd_solver="full")),
    "dask-ml: PCA, tsqr": ((200_000, 128, 8), _dask_ml("PCA", n_components=8, svd_solver="tsqr")),
    "dask-ml: TruncatedSVD, tsqr": ((200_000, 128, 8), _dask_ml("TruncatedSVD", n_components=8)),
    "dask-ml: TruncatedSVD, randomized": (
        (200_000, 128, 8),
        _dask_ml("TruncatedSVD", n_components=8, algorithm="randomized", random_state=1, n_iter=4),
    ),
    "dask-ml: scaler, PCA, regression": ((200_000, 64, 8), _scores),
    "dask-glm: logistic regression, newton": ((200_000, 64, 8), _regression),
    "xeofs: EOF": ((20_000, 256, 8), _xeofs),
    "eofs: EOF": ((20_000, 256, 8), _eofs),
    "sgkit: PCA, tsqr": ((60_000, 128, 8), _sgkit_pca("tsqr")),
    "sgkit: PCA, randomized": ((60_000, 128, 8), _sgkit_pca("randomized")),
    "sgkit: regression of each variant": ((20_000, 128, 8), _sgkit_regression),
    "hyperspy: SVD, full": ((60_000, 128, 8), _hyperspy),
    "scanpy: PCA": ((60_000, 128, 8), _scanpy),
    "scanpy: PCA, sparse": ((60_000, 512, 8), _scanpy_sparse),
}


def _data(rows: int, cols: int, chunks: int) -> da.Array:
    """Return correlated samples, whose first components are well apart."""
    random = da.random.default_rng(secrets.randbits(30))
    noise = random.standard_normal((rows, cols), chunks=(rows // chunks, cols))
    mixed = random.standard_normal((rows, 8), chunks=(rows // chunks, 8)) * np.arange(16.0, 0, -2)
    made = (noise + mixed @ np.random.default_rng(0).standard_normal((8, cols)) + 3.0).persist()
    wait(made)
    return made


def _differ(found: Numbers, expected: Numbers) -> float:
    pairs = [(abs(np.asarray(found[name])), abs(np.asarray(x))) for name, x in expected.items()]
    return max(float(abs(a - b).max() / b.max()) for a, b in pairs)


def main() -> None:
    """Run from the command line; exit with 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="programs by how their names begin")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        print(f"{'milliseconds':40}{'without':>9}{'with':>9}{'times':>7}{'differ by':>11}")
        for name, ((rows, cols, chunks), program) in PROGRAMS.items():
            if not name.startswith(tuple(options.only)):
                continue
            seconds: dict[bool, list[float]] = {False: [], True: []}
            differ = 0.0
            try:
                for turn in range(ROUNDS + 1):
                    x = _data(int(rows * options.scale) // chunks * chunks, cols, chunks)
                    found = {}
                    for on in (False, True) if turn % 2 else (True, False):
                        with dask_distmm.enabled() if on else contextlib.nullcontext():
                            began = time.perf_counter()
                            # The same numbers under other names: what is persisted is not computed again.
                            found[on] = program(x.map_blocks(np.copy).persist())
                            seconds[on].append(time.perf_counter() - began)
                    differ = max(differ, _differ(found[True], found[False]))
            except ImportError as error:
                print(f"{name:40}left out: {error}", flush=True)
                continue
            except Exception as error:
                print(f"{name:40}fails, turn {turn}, {'with' if on else 'without'}: {error!r:.150}", flush=True)
                results[name] = repr(error)[:200]
                continue
            stock, ours = (min(seconds[on][1:]) for on in (False, True))
            print(f"{name:40}{stock * 1e3:9.0f}{ours * 1e3:9.0f}{stock / ours:7.2f}{differ:11.1e}", flush=True)
            results[name] = {"without": stock, "with": ours, "differ": differ}
    if options.json:
        software = environment.software("numpy", "dask", "distributed", "dask_distmm", *LIBRARIES)
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        options.json.write_text(json.dumps({**about, "programs": results}, indent=1))
    if any(isinstance(one, dict) and not one["differ"] <= LIMIT for one in results.values()):
        raise SystemExit("results differ")


if __name__ == "__main__":
    main()
