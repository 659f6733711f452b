"""Programs of other libraries, unchanged, with and without ``enable()``: ``python -m benchmarks.clients``.

Each program gets fresh chunks that are in memory, ways take turns, and the best of some rounds counts; both results are
compared. Processor seconds of all processes and the number of runs are beside them: on a machine that does other things
these say more. A library that is not installed is named and left out: ``pip install dask-ml dask-glm xeofs eofs sgkit
hyperspy scanpy xarray flox``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
LIBRARIES = ("dask-ml", "dask-glm", "xeofs", "eofs", "sgkit", "hyperspy", "scanpy", "scikit-learn", "xarray", "flox")
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


def _labels(x: da.Array) -> da.Array:
    chance = 1 / (1 + da.exp(-(x @ np.linspace(-1, 1, x.shape[1]) / 4)))
    return (chance > 0.5 + 0.3 * da.sin(1e3 * x[:, 0])).astype(float).persist()


def _regression(x: da.Array) -> Numbers:
    algorithms = importlib.import_module("dask_glm.algorithms")
    return {"coefficients": algorithms.newton(x, _labels(x), max_iter=8)}


def _classified(**options: Any) -> Callable[[da.Array], Numbers]:
    def fit(x: da.Array) -> Numbers:
        y = _labels(x)
        model = importlib.import_module("dask_ml.linear_model").LogisticRegression(**options).fit(x, y)
        return {"coefficients": model.coef_, "score": model.score(x, y)}

    return fit


def _clusters(x: da.Array) -> Numbers:
    model = importlib.import_module("dask_ml.cluster").KMeans(8, max_iter=10, init_max_iter=4, random_state=0).fit(x)
    return {"centers": model.cluster_centers_, "inertia": model.inertia_}


def _fields(x: da.Array) -> Any:
    import xarray

    side = 16
    days = np.datetime64("1900-01-01", "ns") + np.arange(x.shape[0]).astype("timedelta64[D]")
    return xarray.DataArray(
        x.reshape((x.shape[0], side, x.shape[1] // side)),
        dims=("time", "lat", "lon"),
        coords={"time": days, "lat": np.linspace(-40, 40, side), "lon": np.arange(x.shape[1] // side)},
    )


def _xeofs(x: da.Array, *, rotated: bool = False) -> Numbers:
    analyses = importlib.import_module("xeofs.single")
    model = analyses.EOF(n_modes=5, use_coslat=True, random_state=1)
    model.fit(_fields(x), dim="time")
    if rotated:
        model = analyses.EOFRotator(n_modes=5).fit(model)
    return {"variances": np.asarray(model.explained_variance()), "components": np.asarray(model.components())}


def _anomalies(x: da.Array) -> Any:
    months = _fields(x).groupby("time.month")
    return months - months.mean()


def _index(anomalies: Any) -> Any:
    index = anomalies.sel(lat=slice(-10, 10)).mean(("lat", "lon"))
    return (index - index.mean()) / index.std()


def _regression_map(x: da.Array) -> Numbers:
    import xarray

    anomalies = _anomalies(x)
    slopes = xarray.dot(anomalies, _index(anomalies), dim="time") / anomalies.sizes["time"]
    return {"slopes": slopes.compute().values}


def _correlation_map(x: da.Array) -> Numbers:
    import xarray

    anomalies = _anomalies(x)
    return {"correlations": xarray.corr(anomalies, _index(anomalies), dim="time").compute().values}


def _space_covariance(x: da.Array) -> Numbers:
    import xarray

    places = _anomalies(x).coarsen(lon=4, boundary="trim").mean().stack(place=("lat", "lon"))
    matrix = xarray.dot(places, places.rename(place="to"), dim="time") / (places.sizes["time"] - 1)
    return {"covariances": matrix.compute().values}


def _trends(**options: Any) -> Callable[[da.Array], Numbers]:
    def fit(x: da.Array) -> Numbers:
        return {"slopes": _fields(x).polyfit("time", 1, **options).polyfit_coefficients.compute().values}

    return fit


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


def _cells(x: da.Array) -> Numbers:
    scanpy, anndata = map(importlib.import_module, ("scanpy", "anndata"))
    cells = anndata.AnnData(da.maximum(x, 0).round().astype(np.float32))
    scanpy.pp.normalize_total(cells, target_sum=1e4)
    scanpy.pp.log1p(cells)
    scanpy.pp.scale(cells, max_value=10)
    scanpy.pp.pca(cells, n_comps=8)
    return {"scores": np.asarray(cells.obsm["X_pca"]), "variances": cells.uns["pca"]["variance"]}


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
    "dask-ml: KMeans": ((200_000, 64, 8), _clusters),
    "dask-ml: LogisticRegression, admm": ((200_000, 64, 8), _classified(solver="admm", max_iter=5)),
    "dask-ml: LogisticRegression, lbfgs": ((200_000, 64, 8), _classified(solver="lbfgs")),
    "dask-ml: LogisticRegression, gradient descent": (
        (200_000, 64, 8),
        _classified(solver="gradient_descent", max_iter=20),
    ),
    "dask-glm: logistic regression, newton": ((200_000, 64, 8), _regression),
    "xeofs: EOF": ((20_000, 256, 8), _xeofs),
    "xeofs: EOF, few times": ((1_200, 5_408, 10), _xeofs),
    "xeofs: EOFRotator, few times": ((1_200, 5_408, 10), functools.partial(_xeofs, rotated=True)),
    "xarray: regression map of anomalies": ((2_400, 10_816, 10), _regression_map),
    "xarray: correlation map of anomalies": ((2_400, 10_816, 10), _correlation_map),
    "xarray: covariances of anomalies": ((2_400, 10_816, 10), _space_covariance),
    "xarray: trends by polyfit, skipna=False": ((2_400, 10_816, 10), _trends(skipna=False)),
    "xarray: trends by polyfit": ((1_200, 5_408, 10), _trends()),
    "eofs: EOF": ((20_000, 256, 8), _eofs),
    "sgkit: PCA, tsqr": ((60_000, 128, 8), _sgkit_pca("tsqr")),
    "sgkit: PCA, randomized": ((60_000, 128, 8), _sgkit_pca("randomized")),
    "sgkit: regression of each variant": ((20_000, 128, 8), _sgkit_regression),
    "hyperspy: SVD, full": ((60_000, 128, 8), _hyperspy),
    "scanpy: PCA": ((60_000, 128, 8), _scanpy),
    "scanpy: counts, log1p, scale, PCA": ((40_000, 512, 8), _cells),
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


def _processor_seconds(client: Client) -> float:
    return time.process_time() + float(sum(client.run(time.process_time).values()))


def _run_once(client: Client, program: Callable[[da.Array], Numbers], x: da.Array, on: bool) -> tuple[Any, ...]:
    """Return results, seconds, processor seconds and the number of runs."""
    # The same numbers under other names: what is persisted is not computed again.
    data = x.map_blocks(np.copy).persist()
    wait(data)
    last = max((when for when, _ in client.get_events("distmm")), default=-1)
    with dask_distmm.enabled() if on else contextlib.nullcontext():
        spent, began = _processor_seconds(client), time.perf_counter()
        results = program(data)
        seconds, spent = time.perf_counter() - began, _processor_seconds(client) - spent
    events = client.get_events("distmm")
    return results, seconds, spent, sum(when > last and event["action"] == "done" for when, event in events)


def main() -> None:
    """Run from the command line; exit with 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="programs by how their names begin")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="that count; one goes before them")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        print(
            f"{'milliseconds':46}{'without':>9}{'with':>9}{'times':>7}{'CPU':>9}{'with':>9}{'runs':>6}{'differ by':>11}"
        )
        for name, ((rows, cols, chunks), program) in PROGRAMS.items():
            if not name.startswith(tuple(options.only)):
                continue
            samples: dict[bool, list[tuple[Any, ...]]] = {False: [], True: []}
            differ = 0.0
            try:
                for turn in range(options.rounds + 1):
                    x = _data(int(rows * options.scale) // chunks * chunks, cols, chunks)
                    for on in (False, True) if turn % 2 else (True, False):
                        samples[on].append(_run_once(client, program, x, on))
                    differ = max(differ, _differ(*(samples[on][-1][0] for on in (True, False))))
            except ImportError as error:
                print(f"{name:46}left out: {error}", flush=True)
                continue
            except Exception as error:
                print(f"{name:46}fails, turn {turn}, {'with' if on else 'without'}: {error!r:.150}", flush=True)
                results[name] = repr(error)[:200]
                continue
            (stock, ours), (spent, ours_spent) = (
                [min(sample[figure] for sample in samples[on][1:]) for on in (False, True)] for figure in (1, 2)
            )
            runs = samples[True][-1][3]
            print(
                f"{name:46}{stock * 1e3:9.0f}{ours * 1e3:9.0f}{stock / ours:7.2f}{spent * 1e3:8.0f}"
                f"{ours_spent * 1e3:8.0f}{runs:5}{differ:10.1e}",
                flush=True,
            )
            processor = {"without": spent, "with": ours_spent}
            results[name] = {"without": stock, "with": ours, "processor": processor, "runs": runs, "differ": differ}
    if options.json:
        software = environment.software("numpy", "dask", "distributed", "dask_distmm", *LIBRARIES)
        about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
        options.json.write_text(json.dumps({**about, "programs": results}, indent=1))
    if any(isinstance(one, dict) and not one["differ"] <= LIMIT for one in results.values()):
        raise SystemExit("results differ")


if __name__ == "__main__":
    main()
