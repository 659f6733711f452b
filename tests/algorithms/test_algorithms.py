"""Algorithms compute what scikit-learn, SciPy and NumPy do, on any number of ranks, and without Dask arrays."""

from __future__ import annotations

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from run_events import newest_run, runs_after
from sklearn.cluster import KMeans
from sklearn.decomposition import NMF
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LogisticRegression, PoissonRegressor, RidgeCV
from sklearn.mixture import GaussianMixture
from tracing_ranks import compiled, on_ranks, plan_of

import dask_distmm
from dask_distmm import PlanError, algorithms
from dask_distmm.planning import program
from dask_distmm.programs.steps import Call, Loop

M, N, K = 120, 6, 4
CHUNKS = (50, 20, 50)


def chunked(x):
    """Return an array in uneven chunks."""
    return da.from_array(x, chunks=(CHUNKS, 4)[: x.ndim])


def sparse(x):
    return (
        chunked(x)
        .rechunk((CHUNKS, -1))
        .map_blocks(scipy.sparse.csr_array, dtype=x.dtype, meta=scipy.sparse.csr_array((0, 0), dtype=x.dtype))
    )


def blobs(rng):
    return 3 * rng.standard_normal((K, N))[rng.integers(0, K, M)] + rng.standard_normal((M, N))


def quiet(estimator, *given, **more):
    """Fit for the turns that were asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(*given, **more)


# Each returns the function on arrays, arrays, and what is expected of its result: by fields, or by a check of it.


def kmeans(rng):
    X = blobs(rng)
    C = X[:K]
    found = quiet(KMeans(K, init=C, n_init=1, max_iter=5, tol=0, algorithm="lloyd"), X)
    expected = {"centers": found.cluster_centers_, "labels": found.labels_, "inertia": found.inertia_}
    return lambda X, C: algorithms.kmeans(X, K, init=C, max_iter=5, tol=0), (X, C), expected


def kmeans_tolerance(rng):
    X = rng.standard_normal((M, N))
    C, tol = X[:K], 1e-2
    found = KMeans(K, init=C, n_init=1, tol=tol, algorithm="lloyd").fit(X)
    expected = {"centers": found.cluster_centers_, "labels": found.labels_, "inertia": found.inertia_}
    return lambda X, C: algorithms.kmeans(X, K, init=C, tol=tol), (X, C), expected | {"n_iter": found.n_iter_}


def kmeans_plus_plus(rng):
    """Far clusters are all found."""
    X = np.repeat(1e3 * np.eye(K, N), M // K, axis=0) + rng.standard_normal((M, N))
    seed = int(rng.integers(2**31))
    centers = X.reshape(K, M // K, N).mean(1)

    def check(found):
        order = found.centers.argmax(1).argsort()
        np.testing.assert_allclose(found.centers[order], centers, rtol=1e-9)
        np.testing.assert_array_equal(np.sort(found.labels), np.repeat(np.arange(K), M // K))

    return lambda X: algorithms.kmeans(X, K, seed=seed), (X,), check


def kmeans_random(rng):
    X, seed = blobs(rng), int(rng.integers(2**31))
    C = X[np.random.default_rng(seed).choice(M, K, replace=False)]
    expected = algorithms.kmeans(X, K, init=C)._asdict()
    return lambda X: algorithms.kmeans(X, K, init="random", seed=seed), (X,), expected


def gmm(rng):
    X = blobs(rng)
    labels = np.argmin(((X[:, None] - X[:K]) ** 2).sum(2), 1)
    for _ in range(300):
        centers = np.stack([X[labels == k].mean(0) for k in range(K)])
        labels = np.argmin(((X[:, None] - centers) ** 2).sum(2), 1)
    parts = [X[labels == k] for k in range(K)]
    precisions = [np.linalg.inv(np.cov(x.T, bias=True) + 1e-2 * np.eye(N)) for x in parts]
    start = {"weights_init": [len(x) / M for x in parts], "means_init": centers, "precisions_init": precisions}
    found = quiet(GaussianMixture(K, tol=1e-9, max_iter=20, reg_covar=1e-2, **start), X)
    expected = {
        "weights": found.weights_, "means": found.means_, "covariances": found.covariances_,
        "probabilities": found.predict_proba(X), "labels": found.predict(X), "lower_bound": found.lower_bound_,
        "n_iter": found.n_iter_,
    }  # fmt: skip
    function = lambda X, C: algorithms.gmm(X, K, init=C, tol=1e-9, max_iter=20, reg_covar=1e-2)  # noqa: E731
    return function, (X, X[:K]), expected


def nmf(rng):
    X, W, H = rng.random((M, N)), rng.random((M, 3)), rng.random((3, N))
    model = NMF(3, init="custom", solver="mu", max_iter=200, tol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        # scikit-learn works in place.
        fitted = model.fit_transform(X, W=W.copy(), H=H.copy())
    expected = {"W": fitted, "H": model.components_, "error": model.reconstruction_err_, "n_iter": model.n_iter_}
    return lambda X, W, H: algorithms.nmf(X, 3, init=(W, H)), (X, W, H), expected


def nmf_starts(rng):
    X, seed = rng.random((M, 3)) @ rng.random((3, N)), int(rng.integers(2**31))

    def check(found):
        assert min(found.W.min(), found.H.min()) >= 0
        np.testing.assert_allclose(np.linalg.norm(X - found.W @ found.H), found.error, rtol=1e-6)
        assert found.error < 0.2 * np.linalg.norm(X)

    init = str(rng.choice(["nndsvda", "random"]))
    return lambda X: algorithms.nmf(X, 3, init=init, seed=seed), (X,), check


def als(rng):
    X = rng.standard_normal((M, 3)) @ rng.standard_normal((3, N))

    def check(found):
        # Half of the penalty is the sum of singular values (Srebro, Rennie, Jaakkola 2004).
        U, s, Vh = np.linalg.svd(X, full_matrices=False)
        np.testing.assert_allclose(found.W @ found.H, (U * np.maximum(s - 0.5, 0)) @ Vh, atol=1e-4)
        penalty = 0.5 * ((found.W**2).sum() + (found.H**2).sum())
        np.testing.assert_allclose(found.error, ((X - found.W @ found.H) ** 2).sum() + penalty, rtol=1e-9)

    return lambda X: algorithms.als(X, 3, reg=0.5, max_iter=500, tol=1e-13), (X,), check


def als_weights(rng):
    X = rng.standard_normal((M, 2)) @ rng.standard_normal((2, N))
    known = (rng.random((M, N)) < 0.9).astype(float)
    with_holes = np.where(known > 0, X, np.nan)

    def check(found):
        for W, H, A, weights in ((found.W, found.H, X, known), (found.H.T, found.W.T, X.T, known.T)):
            # Each row solves its own equations.
            for w, x, row in zip(W, A, weights, strict=True):
                G = (H * row) @ H.T + 0.1 * np.eye(2)
                np.testing.assert_allclose(G @ w, H @ (row * x), atol=1e-4)

    function = lambda X, known: algorithms.als(X, 2, weights=known, max_iter=3000, tol=1e-12)  # noqa: E731
    return function, (with_holes, known), check


def logistic(rng):
    X, C = rng.standard_normal((M, N)), float(rng.uniform(0.1, 2))
    y = (X @ rng.standard_normal(N) + rng.standard_normal(M) > 0.3).astype(int)
    intercept, solver = bool(rng.integers(2)), str(rng.choice(["lbfgs", "newton-cholesky"]))
    model = LogisticRegression(C=C, tol=1e-10, solver="newton-cholesky", fit_intercept=intercept).fit(X, y)
    expected = {"coef": model.coef_[0], "intercept": model.intercept_[0] if intercept else 0.0}

    def function(X, y):
        return algorithms.logistic_regression(X, y, C=C, solver=solver, fit_intercept=intercept, tol=1e-9)

    return function, (X, y), expected


def logistic_of_three(rng):
    X = rng.standard_normal((M, N))
    y = (X @ rng.standard_normal((N, 3)) + rng.standard_normal((M, 3))).argmax(1)
    model = LogisticRegression(tol=1e-12, max_iter=1000).fit(X, y)
    expected = {"coef": model.coef_.T, "intercept": model.intercept_ - model.intercept_.mean()}
    return lambda X, y: algorithms.logistic_regression(X, y, n_classes=3, tol=1e-9, max_iter=500), (X, y), expected


def poisson(rng):
    X = rng.standard_normal((M, N))
    y = rng.poisson(np.exp(X @ rng.standard_normal(N) / 3))
    intercept, solver = bool(rng.integers(2)), str(rng.choice(["lbfgs", "newton-cholesky"]))
    model = PoissonRegressor(alpha=0.1, tol=1e-9, max_iter=500, fit_intercept=intercept).fit(X, y)
    expected = {"coef": model.coef_, "intercept": model.intercept_}

    def function(X, y):
        return algorithms.poisson_regression(X, y, alpha=0.1, solver=solver, fit_intercept=intercept, tol=1e-9)

    return function, (X, y), expected


def lasso(rng):
    X, intercept = rng.standard_normal((M, N)) + 5, bool(rng.integers(2))
    y = X @ np.array([1.0, 0, -2, 0, 0, 0.5]) + rng.standard_normal(M) + 1
    model = Lasso(alpha=0.2, tol=1e-13, max_iter=100_000, fit_intercept=intercept).fit(X, y)
    expected = {"coef": model.coef_, "intercept": model.intercept_}
    return lambda X, y: algorithms.lasso(X, y, alpha=0.2, fit_intercept=intercept, tol=1e-13), (X, y), expected


def ridge_cv(rng):
    X, intercept, cv = rng.standard_normal((M, N)) + 5, bool(rng.integers(2)), (None, 5)[rng.integers(2)]
    y, alphas = X @ rng.standard_normal((N, 2)) + 2 + 5 * rng.standard_normal((M, 2)), (0.1, 3.0, 100.0)
    model = RidgeCV(alphas, cv=cv, fit_intercept=intercept).fit(X, y)

    def check(found):
        np.testing.assert_allclose(found.coef.T, model.coef_, rtol=1e-8)
        np.testing.assert_allclose(found.intercept, model.intercept_ + np.zeros(2), rtol=1e-8, atol=1e-9)
        assert found.alpha == model.alpha_
        assert found.scores.max() == pytest.approx(model.best_score_)

    return lambda X, y: algorithms.ridge_cv(X, y, alphas, cv=cv, fit_intercept=intercept), (X, y), check


def pagerank(rng):
    A = (rng.random((M, M)) < 0.05) * rng.random((M, M))
    A[3] = 0
    p = rng.random(M)
    links = A.sum(1)
    followed = np.where(links[:, None] > 0, A / np.where(links > 0, links, 1)[:, None], p / p.sum())
    w, v = np.linalg.eig((0.9 * followed + 0.1 * p / p.sum()).T)
    leading = v[:, abs(w).argmax()].real
    function = lambda A, p: algorithms.pagerank(A, alpha=0.9, personalization=p, tol=1e-13, max_iter=500)  # noqa: E731
    return function, (A, p), {"ranks": leading / leading.sum()}


def pagerank_without_preference(rng):
    A = (rng.random((M, M)) < 0.1) * 1.0
    expected = algorithms.pagerank(A, personalization=np.ones(M))._asdict()
    return algorithms.pagerank, (A,), expected


def eigs(rng):
    A, which = rng.standard_normal((M, M)), str(rng.choice(["LM", "LR", "SR", "LI"]))
    if rng.integers(2):
        A = A + 1j * rng.standard_normal((M, M))
    A *= 0.97 ** np.arange(M)
    expected = scipy.sparse.linalg.eigs(A, 5, which=which, return_eigenvectors=False)

    def check(found):
        key = {"LM": abs, "LR": np.real, "SR": np.real, "LI": np.imag}[which]
        np.testing.assert_allclose(np.sort(abs(key(found.w))), np.sort(abs(key(expected))), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(A @ found.v, found.v * found.w, atol=1e-8)
        np.testing.assert_allclose(np.linalg.norm(found.v, axis=0), 1)

    return lambda A: algorithms.eigs(A, 5, which=which), (A,), check


def svds(rng):
    A = rng.standard_normal((M, int(rng.choice([N * 5, M, 2 * M]))))
    if rng.integers(2):
        A = A + 1j * rng.standard_normal(A.shape)
    A *= 0.97 ** np.arange(A.shape[1])
    expected = scipy.sparse.linalg.svds(A, 3, return_singular_vectors=False)

    def check(found):
        np.testing.assert_allclose(found.s, np.sort(expected), rtol=1e-9)
        np.testing.assert_allclose(A @ found.vh.conj().T, found.u * found.s, atol=1e-8)
        np.testing.assert_allclose(A.conj().T @ found.u, found.vh.conj().T * found.s, atol=1e-6)
        np.testing.assert_allclose(found.u.conj().T @ found.u, np.eye(3), atol=1e-9)

    return lambda A: algorithms.svds(A, 3), (A,), check


CASES = {
    case.__name__: case
    for case in (
        kmeans, kmeans_tolerance, kmeans_plus_plus, kmeans_random, gmm, nmf, nmf_starts, als, als_weights, logistic,
        logistic_of_three, poisson, lasso, ridge_cv, pagerank, pagerank_without_preference, eigs, svds,
    )
}  # fmt: skip


def check(found, expected, rtol=1e-6):
    if callable(expected):
        return expected(found)
    for name, value in expected.items():
        result = np.asarray(getattr(found, name))
        assert result.shape == np.shape(value), name
        np.testing.assert_allclose(result, value, rtol=rtol, atol=rtol, err_msg=name)
    return None


def lazily(function, arrays, chunked=chunked):
    """Call a function with Dask arrays of those that have M rows."""
    return function(*(chunked(x) if len(x) == M else x for x in arrays))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(name, ranks):
    function, arrays, expected = CASES[name](np.random.default_rng())
    check(on_ranks(function, *(chunked(x) if len(x) == M else x for x in arrays), ranks=ranks), expected)


ONE_PASS = ["kmeans", "gmm", "nmf", "als", "logistic", "logistic_of_three", "poisson", "pagerank"]


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_turn_reads_the_data_once(name):
    function, arrays, _ = CASES[name](np.random.default_rng())
    given = [chunked(x) if len(x) == M else x for x in arrays]
    plan = plan_of(compiled(function, *given).problem, 2, np.random.default_rng())
    *_, loop = (step for step in plan.steps(0) if isinstance(step, Loop))
    passes = [step.options["program"] for step in loop.body if isinstance(step, Call) and "program" in step.options]
    assert sum(0 in one.reads for one in passes) == 1


@pytest.mark.parametrize("name", CASES)
def test_without_dask_arrays(name):
    function, arrays, expected = CASES[name](np.random.default_rng())
    check(function(*arrays), expected)


@pytest.mark.parametrize("name", CASES)
def test_without_a_cluster(name):
    function, arrays, expected = CASES[name](np.random.default_rng())
    found = lazily(function, arrays)
    assert all(isinstance(x, da.Array) for x in found)
    check(type(found)(*dask.compute(*found, scheduler="threads")), expected)


@pytest.mark.parametrize("name", CASES)
def test_one_run_on_worker_processes(client, monkeypatch, name):
    """Leave rows where they are: by itself a matrix of this size goes to one worker."""
    monkeypatch.setattr(program, "_WORTH_MOVING", np.inf)
    function, arrays, expected = CASES[name](np.random.default_rng())
    moment = newest_run(client)
    found = lazily(function, arrays)
    check(type(found)(*dask.compute(*found)), expected)
    assert runs_after(client, moment) == 1


@pytest.mark.parametrize(
    "name", ["kmeans", "kmeans_plus_plus", "nmf", "nmf_starts", "logistic", "poisson", "pagerank", "svds"]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_sparse_rows(name, ranks):
    function, arrays, expected = CASES[name](np.random.default_rng())
    given = [sparse(x) if i == 0 else chunked(x) if len(x) == M else x for i, x in enumerate(arrays)]
    check(on_ranks(function, *given, ranks=ranks), expected)


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    """Results have the type of the data, but for labels and counts of turns."""
    function, arrays, _ = CASES[name](np.random.default_rng())
    single = [x.astype(np.result_type(x.dtype, np.complex64) if x.dtype.kind == "c" else np.float32) for x in arrays]
    if np.iscomplexobj(single[0]):
        single[0] = single[0].astype(np.complex64)
    found = lazily(lambda *arrays: function(*arrays), single)
    wanted = {np.dtype(name) for name in ("float32", "complex64")}
    for field, lazy in found._asdict().items():
        if field not in ("labels", "n_iter"):
            assert lazy.dtype in wanted, field
    dask.compute(*found, scheduler="synchronous")


def test_integers_are_computed_in_float64():
    X = da.from_array(np.array([[0, 0], [0, 1], [9, 9], [9, 8]]), chunks=2)
    found = algorithms.kmeans(X, 2)
    assert found.centers.dtype == np.float64
    np.testing.assert_array_equal(np.sort(found.centers.compute(), axis=0), [[0, 0.5], [9, 8.5]])


def test_a_cluster_without_rows_keeps_its_centre():
    X = np.array([[0.0], [1.0], [2.0]])
    found = algorithms.kmeans(X, 2, init=np.array([[1.0], [50.0]]))
    np.testing.assert_array_equal(found.centers, [[1.0], [50.0]])


def test_the_same_seed_gives_the_same_centres_for_any_chunks():
    X = np.random.default_rng().standard_normal((M, N))
    one, other = (algorithms.kmeans(da.from_array(X, chunks=(c, N)), K, seed=5).centers.compute() for c in (50, 7))
    np.testing.assert_allclose(one, other)
    assert not np.allclose(one, algorithms.kmeans(X, K, seed=6).centers)


def test_as_parts_of_other_functions():
    X = np.random.default_rng().random((M, N))

    @dask_distmm.jit
    def clusters_of_factors(X):
        return algorithms.kmeans(algorithms.nmf(X, 3, max_iter=20).W, 2).inertia

    np.testing.assert_allclose(clusters_of_factors(chunked(X)).compute(), clusters_of_factors(X), rtol=1e-6)


X, Y, V = np.ones((20, 4)), np.ones(20), np.ones(4)
MISTAKES = [
    (lambda a: a.kmeans(Y, 2), "X must be 2-D, got 1-D"),
    (lambda a: a.kmeans(X.astype(complex), 2), "X must have real numbers, got complex128"),
    (lambda a: a.kmeans(X, 0), "n_clusters must be an integer of at least 1, got 0"),
    (lambda a: a.kmeans(X, 2.5), "n_clusters must be an integer of at least 1, got 2.5"),
    (lambda a: a.kmeans(X, 21), "n_clusters must be at most 20, got 21"),
    (lambda a: a.kmeans(X, 2, init="k-mean++"), r"unknown init 'k-mean\+\+': did you mean 'k-means\+\+'"),
    (lambda a: a.kmeans(X, 2, init=X), r"init must have the shape \(2, 4\), got \(20, 4\)"),
    (lambda a: a.kmeans(X, 2, max_iter=0), "max_iter must be an integer of at least 1"),
    (lambda a: a.kmeans(X, 2, tol=-1), "tol must be a number that is not negative, got -1"),
    (lambda a: a.kmeans(X, 2, seed=-1), "seed must be an integer of at least 0"),
    (lambda a: a.gmm(X, 2, reg_covar=np.nan), "reg_covar must be a number that is not negative, got nan"),
    (lambda a: a.gmm(X, 21), "n_components must be at most 20"),
    (lambda a: a.nmf(X, 5), "n_components must be at most 4, got 5"),
    (lambda a: a.nmf(X, 2, init=7), "init must be a name or a tuple of W and H, got 7"),
    (lambda a: a.nmf(X, 2, init=(X, X)), r"W must have the shape \(20, 2\), got \(20, 4\)"),
    (lambda a: a.als(X, 2, reg=0), "reg must be positive, got 0"),
    (lambda a: a.als(X, 2, weights=V), r"weights must have the shape \(20, 4\), got \(4,\)"),
    (lambda a: a.logistic_regression(X, V), r"y must have the shape \(20,\), got \(4,\)"),
    (lambda a: a.logistic_regression(X, Y * 1j), "y must have real numbers, got complex128"),
    (lambda a: a.logistic_regression(X, Y, C=0), "C must be positive, got 0"),
    (lambda a: a.logistic_regression(X, Y, solver="lbgfs"), "unknown solver 'lbgfs': did you mean 'lbfgs'"),
    (lambda a: a.logistic_regression(X, Y, n_classes=3, solver="newton-cholesky"), "fits two classes, got n_classes=3"),
    (lambda a: a.poisson_regression(X, Y, alpha=True), "alpha must be a number that is not negative, got True"),
    (lambda a: a.lasso(X, Y, alpha=0), "alpha must be positive, got 0"),
    (lambda a: a.ridge_cv(X, Y, [0.0]), r"alphas must be positive numbers, got \[0.0\]"),
    (lambda a: a.ridge_cv(X, Y, cv=11), "cv must be at most 10, got 11"),
    (lambda a: a.ridge_cv(X, X[:, :, None]), r"y must have the shape \(20,\), got \(20, 4, 1\)"),
    (lambda a: a.pagerank(X), "A must be square, got 20 x 4"),
    (lambda a: a.pagerank(X @ X.T, alpha=1.5), "alpha must be at most 1, got 1.5"),
    (lambda a: a.pagerank(X @ X.T, personalization=V), r"personalization must have the shape \(20,\)"),
    (lambda a: a.eigs(X), "A must be square"),
    (lambda a: a.eigs(X @ X.T, 19), "k must be at most 18, got 19"),
    (lambda a: a.eigs(X @ X.T, 2, which="SM"), "unknown which 'SM'"),
    (lambda a: a.eigs(X @ X.T, 5, ncv=6), "ncv must be an integer of at least 7, got 6"),
    (lambda a: a.svds(X, 4), "k must be at most 3, got 4"),
    (lambda a: a.svds(X, 1, v0=Y), r"v0 must have the shape \(4,\), got \(20,\)"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes_are_refused_at_the_call(call, message):
    with pytest.raises(PlanError, match=message):
        call(algorithms)


def test_unknown_sizes_are_refused():
    x = da.ones((20, 4), chunks=5)
    with pytest.raises(PlanError, match="compute_chunk_sizes"):
        algorithms.kmeans(x[x[:, 0] > 0], 2)
