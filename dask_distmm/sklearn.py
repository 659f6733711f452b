"""Estimators of scikit-learn on Dask arrays: each fit is one run of a function of `linalg` or `algorithms`.

Names of estimators, parameters and fitted attributes are scikit-learn's; a parameter that a class does not list is an
error. NumPy arrays are taken, too. Fitted attributes are NumPy arrays, except ``labels_`` of a Dask array: those stay
on the workers. Of a Dask array `predict` and `transform` return lazy Dask arrays, in its chunks of rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Self

import dask
import dask.array as da
import numpy as np
from dask.base import is_dask_collection

from dask_distmm import algorithms, linalg
from dask_distmm.algorithms.arguments import matrix
from dask_distmm.algorithms.clusters import nearest_of
from dask_distmm.arrays.jit import jit
from dask_distmm.arrays.kinds import as_array, rechunked
from dask_distmm.compat import library_of
from dask_distmm.errors import PlanError
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.runtime.client import current_client

library_of("sklearn", "sklearn", "dask_distmm.sklearn")

from sklearn.base import (  # noqa: E402
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    ClusterMixin,
    MultiOutputMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

__all__ = ["NMF", "PCA", "KMeans", "LinearRegression", "LogisticRegression", "Ridge", "RidgeCV", "TruncatedSVD"]

_FLOATS = [np.float64, np.float32]
# Bytes of a chunk at least: less is computed sooner by one worker than by several that wait for each other (two busy
# cores, `PCA.fit`, as one chunk and as two: 8 MB 58 and 92 ms, 33 MB 117 and 105, 160 MB 2,684 and 793).
_LEAST = 2**24


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


def _array(X: Any) -> da.Array:
    """Return a Dask array; of NumPy's with a chunk of rows for each thread of the workers, if that is worth it.

    It has a name of its own: to hash the elements takes as long as many fits.
    """
    if not isinstance(X, np.ndarray):
        return as_array(X)
    client = current_client()
    threads = 1 if client is None else client.scheduler_info(n_workers=0)["total_threads"]
    # Not more of them than leave the matrix a tall one.
    count = min(threads, X.nbytes // _LEAST, len(X) // (2 * X.shape[1]))
    return da.from_array(X, chunks=(-(-len(X) // max(1, count)), X.shape[1]), name=False)


class _Estimator(BaseEstimator):
    """Checks X and y, and makes what was fitted NumPy arrays."""

    _sparse = False
    _least = 1

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self._sparse
        return tags

    def _checked(self, X: Any, y: Any = "no_validation", *, fitting: bool = True, **how: Any) -> Any:
        """Return X, or X and y, as NumPy or Dask arrays."""
        without = isinstance(y, str) and y == "no_validation"
        if not any(map(is_dask_collection, (X, y))):
            how |= {"dtype": _FLOATS, "accept_sparse": "csr" if self._sparse else False, "reset": fitting}
            how |= {"ensure_min_samples": self._least if fitting else 1}
            return validate_data(self, X, y, **how)
        X = matrix(as_array(X))
        validate_data(self, X, skip_check_array=True, reset=fitting)
        if len(X) < (self._least if fitting else 1):
            raise PlanError(f"X must have at least {self._least} rows, got n_samples={len(X)}")
        if without:
            return X
        if y is None:
            raise PlanError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        y = as_array(y)
        if y.shape[:1] != X.shape[:1] or y.ndim > 1 + how.get("multi_output", False):
            raise PlanError(f"y must have the {len(X)} rows of X, got the shape {y.shape}")
        return X, y

    def _set(self, **attributes: Any) -> Self:
        """Set what was fitted."""
        for name, x in self._computed(**attributes).items():
            setattr(self, name, x)
        return self

    def _computed(self, **attributes: Any) -> dict[str, Any]:
        """Return what was fitted, computed all together, of one run."""
        names = [name for name, x in attributes.items() if is_dask_collection(x)]
        persisted = dict(zip(names, dask.persist(*(attributes[name] for name in names)), strict=True))
        labels = {name: persisted.pop(name) for name in ["labels_"] if name in persisted}
        attributes |= labels | dict(zip(persisted, _values(*persisted.values()), strict=True))
        for name, x in attributes.items():
            if isinstance(x, np.ndarray | np.generic) and x.dtype.kind == "f" and not np.isfinite(x).all():
                raise ValueError(f"{name} is not finite: input X or y contains NaN or infinity, or is too large")
        return {name: x.item() if np.ndim(x) == 0 and hasattr(x, "item") else x for name, x in attributes.items()}

    def _of_rows(self, function: Callable[..., Any], X: Any, *names: str) -> Any:
        """Return a function of rows and of attributes, some of them fitted: of a Dask array a lazy one."""
        check_is_fitted(self)
        X, fitted = self._checked(X, fitting=False), tuple(getattr(self, name) for name in names)
        if not is_dask_collection(X):
            return function(X, *fitted)
        sample = np.asarray(function(np.ones((1, X.shape[1]), X.dtype), *fitted))
        X = rechunked(X, {1: -1}) if X.numblocks[1] > 1 else X
        chunks = (X.chunks[0], *((size,) for size in sample.shape[1:]))
        call = functools.partial(_beside, function, fitted=fitted)
        meta = sample[:0] if sparse_package(X._meta) else np.empty_like(X._meta, sample.dtype, shape=sample[:0].shape)
        return X.map_blocks(call, meta=meta, chunks=chunks, drop_axis=() if sample.ndim > 1 else 1)


def _beside(function: Callable[..., Any], X: Any, fitted: tuple[Any, ...]) -> Any:
    """Call a function with a chunk, and what was fitted where the chunk is."""
    if not sparse_package(X):
        # Classes may be strings, which are on the host.
        fitted = tuple(np.asarray(x, like=X) if getattr(x, "dtype", "") in _FLOATS else x for x in fitted)
    return function(X, *fitted)


def _values(*arrays: Any) -> list[Any]:
    """Compute arrays as NumPy arrays; those in one chunk without the task by which Dask puts chunks together."""
    chunks = [x.to_delayed().item() if x.npartitions == 1 else x for x in arrays]
    return _on_host(dask.compute(*chunks))


def _on_host(arrays: Iterable[Any]) -> list[Any]:
    return [x.get() if hasattr(x, "get") else x for x in arrays]


def _seed(random_state: Any) -> int:
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def _warn_if_not_converged(estimator: Any, n_iter: int) -> None:
    if n_iter >= estimator.max_iter:
        warnings.warn(f"max_iter={n_iter} turns did not converge: increase it", ConvergenceWarning, stacklevel=3)


def _linear(X: Any, coef: Any, intercept: Any) -> Any:
    return X @ coef.T + intercept


# Decompositions


class _Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Estimator):
    """A transformation by vectors in the rows of an attribute."""

    _vectors = "components_"
    components_: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return len(getattr(self, self._vectors))


class PCA(_Transformer):
    """Principal components, as ``sklearn.decomposition.PCA`` with an integer for `n_components`.

    Parameters
    ----------
    n_components : int, optional
        How many; the smaller extent by default.

    Attributes
    ----------
    components_, explained_variance_, explained_variance_ratio_, singular_values_, mean_, n_components_, n_samples_,
    noise_variance_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.linalg.pca, TruncatedSVD

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import PCA
    >>> fitted = PCA(1).fit(da.from_array([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]], chunks=(2, 2)))
    >>> fitted.transform(da.from_array([[5.0, 1.0]])).compute()
    array([[3.]])
    """

    _least = 2

    def __init__(self, n_components: int | None = None) -> None:
        self.n_components = n_components

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the components of X: one run."""
        X = _array(self._checked(X))
        m, n = X.shape
        components = linalg.pca(X, self.n_components)
        k, ratio = len(components.components), components.explained_variance_ratio
        self._set(
            components_=components.components, explained_variance_=components.variances,
            explained_variance_ratio_=ratio, mean_=components.mean, n_components_=k, n_samples_=m,
        )  # fmt: skip
        self.components_ = _with_signs(self.components_)
        self.singular_values_ = np.sqrt(self.explained_variance_ * (m - 1))
        rest = self.explained_variance_.sum() * (1 / self.explained_variance_ratio_.sum() - 1)
        self.noise_variance_ = float(rest / (min(m, n) - k)) if k < min(m, n) else 0.0
        return self

    def transform(self, X: Any) -> Any:
        """Return the scores of rows."""
        return self._of_rows(_scores, X, "components_", "mean_")

    def inverse_transform(self, X: Any) -> Any:
        """Return the rows that have these scores."""
        return X @ self.components_ + self.mean_


def _with_signs(components: Any) -> Any:
    """Return vectors in rows with scikit-learn's signs: the largest element of each is positive."""
    return components * np.sign(np.take_along_axis(components, abs(components).argmax(1)[:, None], 1))


def _scores(X: Any, components: Any, mean: Any) -> Any:
    return X @ components.T - mean @ components.T


class TruncatedSVD(_Transformer):
    """Leading singular vectors, as ``sklearn.decomposition.TruncatedSVD``.

    Parameters
    ----------
    n_components : int
        How many.
    algorithm : "randomized" or "arpack"
        Random projection (`dask_distmm.linalg.svd_compressed`), or bidiagonalization (`dask_distmm.algorithms.svds`).
    n_iter, n_oversamples : int
        Of the random projection.
    random_state : int, RandomState or None
        The seed.
    tol : float
        Of ``"arpack"``; 0 stands for the accuracy of the type.

    Attributes
    ----------
    components_, explained_variance_, explained_variance_ratio_, singular_values_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.linalg.svd_compressed, dask_distmm.algorithms.svds, PCA

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import TruncatedSVD
    >>> TruncatedSVD(1).fit(da.from_array([[3.0, 0.0], [0.0, 1.0]])).singular_values_.round(6)
    array([3.])
    """

    _sparse = True

    def __init__(
        self,
        n_components: int = 2,
        *,
        algorithm: str = "randomized",
        n_iter: int = 5,
        n_oversamples: int = 10,
        random_state: Any = None,
        tol: float = 0.0,
    ) -> None:
        self.n_components, self.algorithm, self.n_iter = n_components, algorithm, n_iter
        self.n_oversamples, self.random_state, self.tol = n_oversamples, random_state, tol

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the vectors of X: one run, and another one for variances."""
        X = _array(self._checked(X))
        seed, k = _seed(self.random_state), self.n_components
        if self.algorithm == "randomized":
            _, s, vh = linalg.svd_compressed(
                X, k, n_power_iter=self.n_iter, n_oversamples=self.n_oversamples, seed=seed
            )
        elif self.algorithm == "arpack":
            triplets = algorithms.svds(X, k, tol=self.tol, seed=seed)
            s, vh = triplets.s[::-1], triplets.vh[::-1]
        else:
            raise ValueError(f"algorithm must be 'randomized' or 'arpack', got {self.algorithm!r}")
        mean, squares = _moments(X)
        computed = self._computed(vh=vh, s=s, mean=mean, squares=squares)
        s, mean = computed["s"], computed["mean"]
        self.components_, self.singular_values_ = _with_signs(computed["vh"]), s
        self.explained_variance_ = s**2 / len(X) - (self.components_ @ mean) ** 2
        self.explained_variance_ratio_ = self.explained_variance_ / (computed["squares"] - mean @ mean)
        return self

    def transform(self, X: Any) -> Any:
        """Return the products of rows and the vectors."""
        return self._of_rows(_products, X, "components_")

    def inverse_transform(self, X: Any) -> Any:
        """Return the rows that have these products, as far as the vectors describe them."""
        return X @ self.components_


@jit
def _moments(X: Any) -> tuple[Any, Any]:
    return X.sum(0) / len(X), np.square(X).sum() / len(X)


def _products(X: Any, components: Any) -> Any:
    return X @ components.T


class NMF(_Transformer):
    """Non-negative factors, as ``sklearn.decomposition.NMF(solver="mu")``.

    Parameters
    ----------
    n_components : int, optional
        How many; as many as there are columns by default.
    init : "nndsvda" or "random"
        The start.
    tol, max_iter
        As of `dask_distmm.algorithms.nmf`.
    random_state : int, RandomState or None
        The seed.

    Attributes
    ----------
    components_, reconstruction_err_, n_iter_, n_components_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.algorithms.nmf

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import NMF
    >>> NMF(1, tol=0).fit(da.ones((6, 4), chunks=(2, 4))).components_.shape
    (1, 4)
    """

    _sparse = True

    def __init__(
        self,
        n_components: int | None = None,
        *,
        init: str = "nndsvda",
        tol: float = 1e-4,
        max_iter: int = 200,
        random_state: Any = None,
    ) -> None:
        self.n_components, self.init, self.tol = n_components, init, tol
        self.max_iter, self.random_state = max_iter, random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Factorize X: one run."""
        X = _array(self._checked(X))
        k = X.shape[1] if self.n_components is None else self.n_components
        least, H, error, n_iter = _factors(X, k, self.init, self.max_iter, self.tol, _seed(self.random_state))
        computed = self._computed(components_=H, reconstruction_err_=error, n_iter_=n_iter, least=least)
        if computed.pop("least") < 0:
            raise ValueError("Negative values in data passed to NMF")
        self._set(n_components_=k, **computed)
        if self.tol > 0:
            _warn_if_not_converged(self, self.n_iter_)
        return self

    def transform(self, X: Any) -> Any:
        """Return the weights of the components that fit best to each row: non-negative least squares."""
        return self._of_rows(_weights, X, "components_", "max_iter")

    def inverse_transform(self, X: Any) -> Any:
        """Return the rows that have these weights."""
        return X @ self.components_


@jit
def _factors(X: Any, k: int, init: str, max_iter: int, tol: float, seed: int) -> tuple[Any, ...]:
    return X.min(), *algorithms.nmf(X, k, init=init, max_iter=max_iter, tol=tol, seed=seed)[1:]


def _weights(X: Any, H: Any, max_iter: int) -> Any:
    """Minimize ``norm(X - W @ H)`` over non-negative W by coordinates: each row by itself, whatever is beside it."""
    products, gram = X @ H.T, H @ H.T
    W, limit = np.zeros_like(products), 1e-9 if X.dtype == np.float64 else 1e-5
    for _ in range(10 * max_iter):
        moved = 0.0
        for i in range(len(H)):
            old = W[:, i].copy()
            if gram[i, i] > 0:
                W[:, i] = np.maximum(old + (products[:, i] - W @ gram[i]) / gram[i, i], 0)
            moved = max(moved, float(abs(W[:, i] - old).max(initial=0)))
        if moved <= limit * float(W.max(initial=0)):
            break
    return W


# Linear models


class _Regressor(MultiOutputMixin, RegressorMixin, _Estimator):
    """A linear model of one or several targets."""

    coef_: Any
    intercept_: Any

    def predict(self, X: Any) -> Any:
        """Return the values of rows."""
        return self._of_rows(_linear, X, "coef_", "intercept_")

    def _set_model(self, coef: Any, intercept: Any, **more: Any) -> Self:
        self._set(coef_=coef, intercept_=intercept, **more)
        self.coef_ = self.coef_.T
        return self

    def _targets(self, X: Any, y: Any) -> tuple[Any, Any]:
        targets: tuple[Any, Any] = self._checked(X, y, multi_output=True, y_numeric=True)
        return targets


class LinearRegression(_Regressor):
    """Least squares, as ``sklearn.linear_model.LinearRegression``.

    Parameters
    ----------
    fit_intercept : bool
        Whether there is a constant term.

    Attributes
    ----------
    coef_, intercept_, rank_, singular_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.linalg.lstsq, Ridge

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import LinearRegression
    >>> fitted = LinearRegression().fit(da.from_array([[0.0], [1.0], [2.0]], chunks=2), [1.0, 3.0, 5.0])
    >>> fitted.coef_.round(6), round(fitted.intercept_, 6)
    (array([2.]), 1.0)
    """

    def __init__(self, *, fit_intercept: bool = True) -> None:
        self.fit_intercept = fit_intercept

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X and y: one run."""
        X, y = self._targets(X, y)
        coef, intercept, rank, s = _least_squares(_array(X), y, self.fit_intercept)
        return self._set_model(coef, intercept, rank_=rank, singular_=s)


@jit
def _least_squares(X: Any, y: Any, fit_intercept: bool) -> tuple[Any, ...]:
    y = y.astype(X.dtype)
    center, level = (X.sum(0) / len(X), y.sum(0) / len(X)) if fit_intercept else (0 * X.sum(0), 0 * y.sum(0))
    # LAPACK fails for NaN; here that arrives in the constant term.
    finite = np.isfinite(center.sum() + level.sum())
    coef, _, rank, s = np.linalg.lstsq(np.where(finite, X - center, 0), y - level)
    return coef, level - center @ coef, rank, s


class Ridge(_Regressor):
    """Ridge regression, as ``sklearn.linear_model.Ridge`` with one `alpha`.

    Parameters
    ----------
    alpha : float
        The weight of the squares of coefficients.
    fit_intercept : bool
        Whether there is a constant term, which has no penalty.

    Attributes
    ----------
    coef_, intercept_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.linalg.ridge, RidgeCV

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import Ridge
    >>> Ridge(alpha=2.0).fit(da.from_array([[0.0], [1.0], [2.0]], chunks=2), [1.0, 3.0, 5.0]).coef_.round(6)
    array([1.])
    """

    def __init__(self, alpha: float = 1.0, *, fit_intercept: bool = True) -> None:
        self.alpha, self.fit_intercept = alpha, fit_intercept

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X and y: one run."""
        X, y = self._targets(X, y)
        if not self.fit_intercept:
            return self._set_model(linalg.ridge(_array(X), y, self.alpha), 0.0)
        return self._set_model(*linalg.ridge(_array(X), y, self.alpha, fit_intercept=True))


class RidgeCV(_Regressor):
    """Ridge regression with the best of some penalties, as ``sklearn.linear_model.RidgeCV``.

    Parameters
    ----------
    alphas : sequence of floats
        The penalties, which are positive.
    fit_intercept : bool
        Whether there is a constant term, which has no penalty.
    cv : int, optional
        The number of folds; each row is left out by itself by default.

    Attributes
    ----------
    coef_, intercept_, alpha_, best_score_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.algorithms.ridge_cv, Ridge

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_distmm.sklearn import RidgeCV
    >>> X = np.arange(12.0)[:, None]
    >>> RidgeCV([0.1, 10.0]).fit(da.from_array(X, chunks=(4, 1)), 3 * X[:, 0] + 1).alpha_
    0.1
    """

    _least = 2
    best_score_: Any

    def __init__(self, alphas: Any = (0.1, 1.0, 10.0), *, fit_intercept: bool = True, cv: int | None = None) -> None:
        self.alphas, self.fit_intercept, self.cv = alphas, fit_intercept, cv

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X and y, for the penalty with the best score: one run."""
        X, y = self._targets(X, y)
        model = algorithms.ridge_cv(X, y, self.alphas, cv=self.cv, fit_intercept=self.fit_intercept)
        coef, intercept, alpha, scores = model
        self._set_model(coef, intercept, alpha_=alpha, best_score_=scores)
        self.best_score_ = self.best_score_.max()
        return self


class LogisticRegression(ClassifierMixin, _Estimator):
    """Logistic regression of two or more classes, as ``sklearn.linear_model.LogisticRegression`` with its L2 penalty.

    Parameters
    ----------
    C : float
        The inverse of the penalty.
    fit_intercept : bool
        Whether there is a constant term, which has no penalty.
    solver : "lbfgs" or "newton-cholesky"
        As of `dask_distmm.algorithms.logistic_regression`.
    max_iter, tol
        As of that.

    Attributes
    ----------
    classes_, coef_, intercept_, n_iter_, n_features_in_
        As scikit-learn's.

    See Also
    --------
    dask_distmm.algorithms.logistic_regression

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import LogisticRegression
    >>> X = da.from_array([[0.0], [1.0], [2.0], [3.0]], chunks=2)
    >>> LogisticRegression().fit(X, ["no", "no", "yes", "yes"]).predict(X).compute()
    array(['no', 'no', 'yes', 'yes'], dtype='<U3')
    """

    _sparse = True
    coef_: Any

    def __init__(
        self,
        C: float = 1.0,
        *,
        fit_intercept: bool = True,
        solver: str = "lbfgs",
        max_iter: int = 100,
        tol: float = 1e-4,
    ) -> None:
        self.C, self.fit_intercept, self.solver = C, fit_intercept, solver
        self.max_iter, self.tol = max_iter, tol

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X and the classes y: one run, after the classes of a Dask array y have been found."""
        X, y = self._checked(X, y)
        if is_dask_collection(y):
            parts = dask.compute(*y.map_blocks(np.unique, dtype=y.dtype).to_delayed())
            self.classes_ = np.unique(np.concatenate(_on_host(parts)))
            y = y.map_blocks(functools.partial(_numbered, self.classes_), dtype=np.int64)
        else:
            check_classification_targets(y)
            self.classes_, y = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count < 2:
            raise ValueError(f"y must have two classes at least, got one class: {self.classes_}")
        coef, intercept, n_iter = algorithms.logistic_regression(
            _array(X), y, C=self.C, fit_intercept=self.fit_intercept, solver=self.solver, n_classes=count,
            max_iter=self.max_iter, tol=self.tol,
        )  # fmt: skip
        computed = self._computed(coef_=coef, intercept=intercept, n_iter=n_iter)
        _warn_if_not_converged(self, computed["n_iter"])
        self.coef_, self.intercept_ = np.atleast_2d(computed["coef_"].T), np.atleast_1d(computed["intercept"])
        self.n_iter_ = np.array([computed["n_iter"]], np.int32)
        return self

    def decision_function(self, X: Any) -> Any:
        """Return the logarithms of odds, or for several classes those of probabilities but for a constant."""
        return self._of_rows(_decisions, X, "coef_", "intercept_")

    def predict(self, X: Any) -> Any:
        """Return the most likely class of each row."""
        return self._of_rows(_classes, X, "coef_", "intercept_", "classes_")

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities of all classes."""
        return self._of_rows(_probabilities, X, "coef_", "intercept_")

    def predict_log_proba(self, X: Any) -> Any:
        """Return their logarithms."""
        return np.log(self.predict_proba(X))


def _numbered(classes: Any, y: Any) -> Any:
    return np.searchsorted(np.asarray(classes, like=y), y)


def _decisions(X: Any, coef: Any, intercept: Any) -> Any:
    decisions = _linear(X, coef, intercept)
    return decisions[:, 0] if len(coef) == 1 else decisions


def _classes(X: Any, coef: Any, intercept: Any, classes: Any) -> Any:
    decisions = _decisions(X, coef, intercept)
    number = (decisions > 0) * 1 if decisions.ndim == 1 else decisions.argmax(1)
    return classes[number.get() if hasattr(number, "get") else number]


def _probabilities(X: Any, coef: Any, intercept: Any) -> Any:
    scores = _linear(X, coef, intercept)
    if len(coef) == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], 1)
    scores = np.exp(scores - scores.max(1)[:, None])
    return scores / scores.sum(1)[:, None]


# Clusters


class KMeans(ClusterMixin, _Transformer):
    """Clusters by Lloyd's algorithm, as ``sklearn.cluster.KMeans`` with one start.

    Parameters
    ----------
    n_clusters : int
        How many.
    init : "k-means++", "random" or array, (n_clusters, n)
        The start.
    max_iter, tol
        As of `dask_distmm.algorithms.kmeans`.
    random_state : int, RandomState or None
        The seed.

    Attributes
    ----------
    cluster_centers_, labels_, inertia_, n_iter_, n_features_in_
        As scikit-learn's; ``labels_`` of a Dask array is one, which the workers hold.

    See Also
    --------
    dask_distmm.algorithms.kmeans

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm.sklearn import KMeans
    >>> fitted = KMeans(2, random_state=0).fit(da.from_array([[0.0], [1.0], [10.0], [11.0]], chunks=2))
    >>> sorted(fitted.cluster_centers_.ravel().tolist())
    [0.5, 10.5]
    """

    _sparse, _vectors = True, "cluster_centers_"
    cluster_centers_: Any

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        self.n_clusters, self.init, self.max_iter = n_clusters, init, max_iter
        self.tol, self.random_state = tol, random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of X: one run."""
        X = self._checked(X)
        seed = _seed(self.random_state)
        fitted = self._computed(**_clusters(_array(X), self.n_clusters, self.init, self.max_iter, self.tol, seed))
        return self._set(**fitted | ({} if is_dask_collection(X) else {"labels_": np.asarray(fitted["labels_"])}))

    def predict(self, X: Any) -> Any:
        """Return the number of the nearest centre of each row."""
        return self._of_rows(_nearest, X, "cluster_centers_")

    def transform(self, X: Any) -> Any:
        """Return the distances of rows from all centres."""
        return self._of_rows(_distances, X, "cluster_centers_")

    def score(self, X: Any, y: Any = None) -> float:
        """Return the negative sum of squared distances of rows from their centres."""
        score = -(self.transform(X).min(1) ** 2).sum()
        return float(score.compute() if is_dask_collection(score) else score)


@jit
def _clusters(X: Any, count: int, init: Any, max_iter: int, tol: float, seed: int) -> dict[str, Any]:
    C, labels, inertia, n_iter = algorithms.kmeans(X, count, init=init, max_iter=max_iter, tol=tol, seed=seed)
    return {"cluster_centers_": C, "labels_": labels.astype(np.int32), "inertia_": inertia, "n_iter_": n_iter}


def _nearest(X: Any, C: Any) -> Any:
    return nearest_of(X, C).astype(np.int32)


def _distances(X: Any, C: Any) -> Any:
    squares = X.multiply(X).sum(1) if sparse_package(X) else np.square(X).sum(1)
    return np.sqrt(np.maximum(squares.reshape(-1, 1) - 2 * (X @ C.T) + (C * C).sum(1), 0))
