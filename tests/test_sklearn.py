"""Estimators are scikit-learn's, on Dask arrays: its own conformance suite, its results, and one run for each fit."""

from __future__ import annotations

import pickle
import warnings

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
import sklearn.cluster
import sklearn.decomposition
import sklearn.linear_model
from dask.base import is_dask_collection
from run_events import newest_run, runs_after
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import dask_distmm.sklearn
from dask_distmm.sklearn import NMF, PCA, KMeans, LinearRegression, LogisticRegression, Ridge, RidgeCV, TruncatedSVD

CLASSES = (PCA, TruncatedSVD, NMF, LinearRegression, Ridge, RidgeCV, LogisticRegression, KMeans)
M, N = 240, 6


def chunked(x):
    return da.from_array(x, chunks=((100, 60, 80), 4)[: x.ndim])


class _Lazily:
    """Computes with Dask arrays of what it is given, and has NumPy's results."""

    def _checked(self, X, *args, **how):
        found = super()._checked(X, *args, **how)
        X, *y = found if isinstance(found, tuple) else (found,)
        if not is_dask_collection(X) and not scipy.sparse.issparse(X):
            X = da.from_array(X, chunks=(max(1, len(X) // 3), -1))
        return (X, *y) if y else X

    def _of_rows(self, *args):
        return np.asarray(super()._of_rows(*args))

    def _set(self, **found):
        found = super()._set(**found)
        if hasattr(self, "labels_"):
            self.labels_ = np.asarray(self.labels_)
        return found


# Classes that are pickled by their names.
LAZY = [type(f"Lazy{cls.__name__}", (_Lazily, cls), {"__module__": __name__}) for cls in CLASSES]
globals().update({cls.__name__: cls for cls in LAZY})


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([cls() for cls in (*CLASSES, *LAZY)])
def test_conformance(estimator, check):
    check(estimator)


def problem(rng, targets=()):
    X = rng.standard_normal((M, N)) + 3 * rng.standard_normal(N)
    return X, X @ rng.standard_normal((N, *targets)) + 2 + rng.standard_normal((M, *targets))


def close(found, expected, names, rtol=1e-6):
    for name in names.split():
        one, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.max(abs(np.asarray(other))), err_msg=name)
        assert np.shape(one) == np.shape(other), name


@pytest.fixture(params=["here", "cluster"])
def fitted(request):
    """Fit an estimator with Dask arrays, by one run where there is a cluster."""
    if request.param == "here":
        return lambda estimator, *given, runs=1: estimator.fit(*map(chunked, given))
    client = request.getfixturevalue("inproc_client")

    def fit(estimator, *given, runs=1):
        moment = newest_run(client)
        estimator.fit(*map(chunked, given))
        assert runs_after(client, moment) == runs
        return estimator

    return fit


LINEAR = [
    (LinearRegression(), sklearn.linear_model.LinearRegression(), "coef_ intercept_ rank_ singular_"),
    (LinearRegression(fit_intercept=False), sklearn.linear_model.LinearRegression(fit_intercept=False), "coef_ rank_"),
    (Ridge(2.5), sklearn.linear_model.Ridge(2.5), "coef_ intercept_"),
    (Ridge(2.5, fit_intercept=False), sklearn.linear_model.Ridge(2.5, fit_intercept=False), "coef_ intercept_"),
    (RidgeCV(), sklearn.linear_model.RidgeCV(), "coef_ intercept_ alpha_ best_score_"),
    (RidgeCV((1, 9), cv=4), sklearn.linear_model.RidgeCV((1, 9), cv=4), "coef_ intercept_ alpha_ best_score_"),
]


@pytest.mark.parametrize("targets", [(), (2,)])
@pytest.mark.parametrize(("ours", "theirs", "names"), LINEAR)
def test_linear_models(fitted, ours, theirs, names, targets):
    X, y = problem(np.random.default_rng(), targets)
    found, expected = fitted(ours, X, y), theirs.fit(X, y)
    close(found, expected, names)
    predicted = found.predict(chunked(X))
    assert is_dask_collection(predicted)
    np.testing.assert_allclose(predicted.compute(), expected.predict(X), rtol=1e-6)
    assert found.score(chunked(X), chunked(y)) == pytest.approx(expected.score(X, y))


def test_columns_that_depend_on_each_other(fitted):
    """The solution of least norm."""
    X, y = problem(np.random.default_rng())
    X[:, 1] = X[:, 0]
    close(fitted(LinearRegression(), X, y), sklearn.linear_model.LinearRegression().fit(X, y), "coef_ intercept_ rank_")


@pytest.mark.parametrize("names", [["no", "yes"], ["blue", "green", "red"]])
def test_logistic_regression(fitted, names):
    rng = np.random.default_rng()
    X = rng.standard_normal((M, N))
    y = np.array(names)[
        (X[:, :2] @ [1, 2] + rng.standard_normal(M) > np.array([[-0.5], [0.5]])[: len(names) - 1]).sum(0)
    ]
    expected = sklearn.linear_model.LogisticRegression(tol=1e-8).fit(X, y)
    found = fitted(LogisticRegression(tol=1e-8), X, y)
    close(found, expected, "coef_ intercept_", rtol=1e-4)
    for name in ("predict", "predict_proba", "predict_log_proba", "decision_function"):
        one, other = getattr(found, name)(chunked(X)), getattr(expected, name)(X)
        assert one.shape == other.shape
        if name == "predict":
            np.testing.assert_array_equal(one.compute(), other)
        else:
            np.testing.assert_allclose(one.compute(), other, atol=1e-3)


def test_components(fitted):
    X, _ = problem(np.random.default_rng())
    names = "components_ explained_variance_ explained_variance_ratio_ singular_values_ mean_ noise_variance_"
    for k in (2, None):
        expected = sklearn.decomposition.PCA(k, svd_solver="full").fit(X)
        found = fitted(PCA(k), X)
        close(found, expected, names)
        scores = found.transform(chunked(X))
        np.testing.assert_allclose(scores.compute(), expected.transform(X), atol=1e-6)
        back = found.inverse_transform(scores).compute()
        np.testing.assert_allclose(back, expected.inverse_transform(expected.transform(X)), atol=1e-6)
    assert list(found.get_feature_names_out()) == [f"pca{i}" for i in range(N)]


@pytest.mark.parametrize("algorithm", ["randomized", "arpack"])
def test_singular_vectors(fitted, algorithm):
    X, _ = problem(np.random.default_rng())
    expected = sklearn.decomposition.TruncatedSVD(2, algorithm="arpack").fit(X)
    found = fitted(TruncatedSVD(2, algorithm=algorithm, random_state=0), X, runs=2)
    names = "explained_variance_ explained_variance_ratio_ singular_values_"
    close(found, expected, names, rtol=1e-3)
    np.testing.assert_allclose(abs(found.transform(chunked(X)).compute()), abs(expected.transform(X)), atol=1e-2)


def test_non_negative_factors(fitted):
    rng = np.random.default_rng()
    X = rng.random((M, 3)) @ rng.random((3, N))
    model = NMF(3, max_iter=2000, tol=1e-6, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = fitted(model, X)
    W = found.transform(chunked(X)).compute()
    assert W.min() >= 0
    error = np.linalg.norm(X - found.inverse_transform(W))
    assert error <= found.reconstruction_err_ * 1.001
    assert error < 0.02 * np.linalg.norm(X)
    with pytest.raises(ValueError, match="Negative values"):
        NMF(3).fit(chunked(X - 1))


def test_clusters(fitted):
    rng = np.random.default_rng()
    places = 9 * rng.standard_normal((3, N))
    X = places[rng.integers(0, 3, M)] + 0.1 * rng.standard_normal((M, N))
    expected = sklearn.cluster.KMeans(3, init=places, n_init=1).fit(X)
    found = fitted(KMeans(3, init=places), X)
    close(found, expected, "cluster_centers_ inertia_ labels_")
    assert is_dask_collection(found.labels_)
    assert found.labels_.dtype == np.int32
    np.testing.assert_array_equal(found.predict(chunked(X)).compute(), expected.labels_)
    np.testing.assert_allclose(found.transform(chunked(X)).compute(), expected.transform(X), atol=1e-5)
    assert found.score(chunked(X)) == pytest.approx(expected.score(X))


def test_numpy_arrays_are_cut(inproc_client, monkeypatch):
    """Each thread of the workers gets a chunk of rows, but not of what is small or not tall; one run makes all."""
    threads = sum(inproc_client.nthreads().values())
    X = np.random.default_rng().random((M, N))
    assert dask_distmm.sklearn._array(X).numblocks == (1, 1)
    monkeypatch.setattr(dask_distmm.sklearn, "_LEAST", X.nbytes // threads)
    assert dask_distmm.sklearn._array(X).numblocks == (threads, 1)
    assert dask_distmm.sklearn._array(np.ones((M, M))).numblocks == (1, 1)
    how = {"init": X[:3], "tol": 0}
    for estimator, expected, names in (
        (KMeans(3, **how), sklearn.cluster.KMeans(3, n_init=1, **how), "cluster_centers_ labels_"),
        (Ridge(), sklearn.linear_model.Ridge(), "coef_ intercept_"),
    ):
        moment = newest_run(inproc_client)
        found = estimator.fit(X, X.sum(1))
        assert runs_after(inproc_client, moment) == 1
        close(found, expected.fit(X, X.sum(1)), names)
        assert not any(map(is_dask_collection, vars(found).values()))


def test_sparse_rows():
    """Chunks that are sparse stay so, and predictions of them are dense."""
    X = scipy.sparse.random_array((M, N), density=0.3, format="csr", rng=np.random.default_rng())
    meta = scipy.sparse.csr_array((0, 0), dtype=X.dtype)
    lazy = chunked(X.toarray()).rechunk((100, -1)).map_blocks(scipy.sparse.csr_array, dtype=X.dtype, meta=meta)
    y = X.toarray().sum(1)
    for estimator in (TruncatedSVD(2), KMeans(3), NMF(2, max_iter=20, tol=0), LogisticRegression()):
        found = estimator.fit(lazy, y > y.mean())
        method = found.predict if hasattr(found, "predict") else found.transform
        result = method(lazy)
        assert isinstance(result.compute(), np.ndarray)
        np.testing.assert_allclose(result.compute(), method(X.toarray()), atol=1e-9)


def test_what_can_not_be_fitted():
    X, y = map(chunked, problem(np.random.default_rng()))
    for estimator in (Ridge(), LinearRegression(), PCA(), RidgeCV(), KMeans(2)):
        with pytest.raises((ValueError, np.linalg.LinAlgError), match="NaN"):
            estimator.fit(da.where(X > 3, np.nan, X), y)
    with pytest.raises(ValueError, match="240 rows of X"):
        Ridge().fit(X, y[:100])
    with pytest.raises(ValueError, match="has 5 features, but Ridge is expecting 6"):
        Ridge().fit(X, y).predict(X[:, :5])
    with pytest.raises(ValueError, match="one class"):
        LogisticRegression().fit(X, da.zeros_like(y))


def test_with_scikit_learn():
    """Pipelines, and cross validation of NumPy arrays; fitted estimators are pickled."""
    X, y = problem(np.random.default_rng())
    model = make_pipeline(PCA(4), Ridge()).fit(X, y)
    expected = make_pipeline(sklearn.decomposition.PCA(4), sklearn.linear_model.Ridge()).fit(X, y)
    np.testing.assert_allclose(model.predict(X), expected.predict(X))
    lazy = make_pipeline(PCA(4), Ridge()).fit(chunked(X), chunked(y))
    np.testing.assert_allclose(pickle.loads(pickle.dumps(lazy)).predict(chunked(X)).compute(), expected.predict(X))
    np.testing.assert_allclose(cross_val_score(Ridge(), X, y), cross_val_score(sklearn.linear_model.Ridge(), X, y))
