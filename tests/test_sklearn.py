"""Estimators are scikit-learn's, on Dask arrays: its own conformance suite, and its results."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from dask_distmm.sklearn import NMF, PCA, KMeans, LinearRegression, LogisticRegression, Ridge, RidgeCV, TruncatedSVD

ESTIMATORS = [
    PCA(),
    TruncatedSVD(),
    NMF(),
    LinearRegression(),
    Ridge(),
    RidgeCV(),
    LogisticRegression(),
    KMeans(),
]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(ESTIMATORS)
def test_conformance(estimator, check):
    check(estimator)
