"""Functions of linalg with odd operands: a typed error at the call, or the right result; NaN and infinities."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from matrices import positive

from dask_distmm import linalg
from dask_distmm.errors import DistMMError, MatrixError

N = 6
S = positive(N)
B = np.arange(1.0, N + 1)


def cut(x):
    return da.from_array(x, chunks=3)


ONE = {
    **{
        name: getattr(linalg, name)
        for name in ("cho_factor", "cholesky", "cond", "det", "eigh", "eigvalsh", "gram", "inv", "lu", "lu_factor")
    },
    **{
        name: getattr(linalg, name)
        for name in ("matrix_rank", "norm", "pca", "pinv", "polar", "qr", "slogdet", "svd", "svdvals")
    },
    **{name: getattr(linalg, name) for name in ("eig", "eigvals", "expm", "logm", "schur", "sqrtm")},
    "cond 1": lambda x: linalg.cond(x, 1),
    "norm 1": lambda x: linalg.norm(x, 1),
    "norm inf": lambda x: linalg.norm(x, np.inf),
    "norm 2": lambda x: linalg.norm(x, 2),
    "eigvalsh of some": lambda x: linalg.eigvalsh(x, subset_by_index=(0, 1)),
    "polar by products": lambda x: linalg.polar(x, method="columns"),
    "svd_compressed": lambda x: linalg.svd_compressed(x, 2),
    "solve b": lambda x: linalg.solve(cut(S), x),
    "solve_triangular b": lambda x: linalg.solve_triangular(cut(S), x),
    "lstsq b": lambda x: linalg.lstsq(cut(S), x),
    "symm b": lambda x: linalg.symm(cut(S), x),
    "trmm b": lambda x: linalg.trmm(cut(S), x),
    "lu_solve b": lambda x: linalg.lu_solve(linalg.lu_factor(cut(S)), x),
    "cho_solve b": lambda x: linalg.cho_solve(linalg.cho_factor(cut(S)), x),
    "eigh b": lambda x: linalg.eigh(cut(S), b=x),
    "solve a": lambda x: linalg.solve(x, cut(B)),
    "solve_triangular a": lambda x: linalg.solve_triangular(x, cut(B)),
    "lstsq a": lambda x: linalg.lstsq(x, cut(B)),
    "symm a": lambda x: linalg.symm(x, cut(S)),
    "trmm a": lambda x: linalg.trmm(x, cut(S)),
    "lu_solve lu": lambda x: linalg.lu_solve((x, np.arange(N)), cut(B)),
    "cho_solve c": lambda x: linalg.cho_solve((x, True), cut(B)),
}
SAME = {
    "ndarray": S,
    "list": S.tolist(),
    "DataFrame": pd.DataFrame(S),
    "empty chunks": da.from_array(S, chunks=((3, 0, 3),) * 2),
}
# What has a meaning for some functions; the others say no.
ODD = {
    **{"number": 3.0, "0-D": da.from_array(np.float64(3)), "text": "abc", "None": None, "dict": {}},
    **{"0 x 0": da.zeros((0, 0)), "0 x 3": da.zeros((0, 3)), "3 x 0": da.zeros((3, 0)), "5 x 6": cut(S[:5])},
    **{"1-D": cut(B), "3-D": cut(np.stack([S, S])), "series": pd.Series(B), "ragged": [[1], [1, 2]]},
    **{f"of {x.dtype}": cut(x) for x in (S.astype(object), S.astype(str), S.astype("M8[s]"), S.astype(np.longdouble))},
    **{"masked": np.ma.masked_array(S, S > 9), "unknown chunks": cut(S)[cut(B) > -1]},
}


def results(made):
    made = dask.compute(made if isinstance(made, tuple) else (made,))[0]
    return [np.asarray(x) for x in made if not isinstance(x, bool)]


@pytest.mark.filterwarnings("error")
def test_odd_operands():
    with dask.config.set(scheduler="sync"):
        for name, call in ONE.items():
            expected = results(call(cut(S)))
            for kind, x in SAME.items():
                # Random vectors go by chunks, and signs by random vectors.
                same = abs if name == "svd_compressed" else np.asarray
                for mine, theirs in zip(map(same, results(call(x))), map(same, expected), strict=True):
                    np.testing.assert_allclose(mine, theirs, atol=1e-10, err_msg=f"{name}, {kind}")
            for kind, x in ODD.items():
                try:
                    made = call(x)
                except DistMMError:
                    continue
                except Exception as error:
                    pytest.fail(f"{name} of {kind}: {error!r}")
                # What is not refused has a result.
                results(made)


def test_factors_that_are_none():
    factor, piv = linalg.lu_factor(cut(S))
    for wrong in (cut(S), S, 3.0, "ab", None, (), (factor,), (factor, piv, piv), (factor, cut(S)), (factor, cut(B))):
        with pytest.raises(DistMMError, match=r"lu_and_piv|lu_solve"):
            linalg.lu_solve(wrong, cut(B))
    for wrong in (cut(S), S, 3.0, "ab", None, (), (factor,), (factor, "L")):
        with pytest.raises(DistMMError, match=r"c_and_lower|cho_solve"):
            linalg.cho_solve(wrong, cut(B))
    with pytest.raises(DistMMError, match=r"must have 6 rows; it has 5"):
        linalg.lu_solve((factor, piv), np.ones(5))
    for components in ("mle", 0.9, 7):
        with pytest.raises(DistMMError, match="n_components"):
            linalg.pca(cut(S), n_components=components)
    with pytest.raises(DistMMError, match="subset_by_index"):
        linalg.eigvalsh(da.zeros((0, 0)), subset_by_index=(0, 1))
    u, s, _ = linalg.svd_compressed(cut(S), 2, seed=None)
    np.testing.assert_allclose(s, np.linalg.svd(S)[1][:2])
    assert u.name != linalg.svd_compressed(cut(S), 2, seed=None)[0].name


def test_memory_of_tall_matrices(client):
    """Of m rows and n columns no matrix of m x m, and no Q where only R is needed."""
    m, n = 3_000_000, 20
    x = da.ones((m, n), chunks=(m // 30, n))
    for made in (linalg.pinv(x), linalg.pinv(x, method="local")):
        assert made.shape == (n, m)
    # Q U alone is 4.6 GB, the workers have 6.
    assert linalg.pca(da.ones((1_200_000, 480), chunks=(20_000, 480)))[0].shape == (480, 480)
    a = np.random.default_rng().standard_normal((40_000, 20))
    for method in ("auto", "columns"):
        found = linalg.pinv(da.from_array(a, chunks=(10_000, 20)), method=method).compute()
        np.testing.assert_allclose(found @ a, np.eye(20), atol=1e-12)
        np.testing.assert_allclose(found, np.linalg.pinv(a), atol=1e-12)


FINITE = {
    **{
        name: getattr(linalg, name)
        for name in ("cho_factor", "cholesky", "det", "eigh", "eigvalsh", "inv", "lu", "lu_factor", "pinv", "polar")
    },
    **{name: getattr(linalg, name) for name in ("qr", "slogdet", "svd", "svdvals", "cond", "matrix_rank", "pca")},
    **{name: getattr(linalg, name) for name in ("eig", "eigvals", "expm", "logm", "schur", "sqrtm")},
    "solve a": lambda x, **how: linalg.solve(x, cut(B), **how),
    "solve pos": lambda x, **how: linalg.solve(x, cut(B), assume_a="pos", **how),
    "solve_triangular a": lambda x, **how: linalg.solve_triangular(x, cut(B), **how),
    "lstsq a": lambda x, **how: linalg.lstsq(x, cut(B), **how),
    "solve b": lambda x, **how: linalg.solve(cut(S), x, **how),
    "solve_triangular b": lambda x, **how: linalg.solve_triangular(cut(S), x, **how),
    "lstsq b": lambda x, **how: linalg.lstsq(cut(S), x, **how),
    "lu_solve b": lambda x, **how: linalg.lu_solve(linalg.lu_factor(cut(S)), x, **how),
    "cho_solve b": lambda x, **how: linalg.cho_solve(linalg.cho_factor(cut(S)), x, **how),
    "qr by rows": lambda x, **how: linalg.qr(x, method="rows", **how),
    "R by rows": lambda x, **how: linalg.qr(x, "r", method="rows", **how),
    "lstsq by rows": lambda x, **how: linalg.lstsq(x, cut(B), method="rows", **how)[0],
    "lstsq by rows b": lambda x, **how: linalg.lstsq(cut(S), x, method="rows", **how)[0],
    "pinv by rows": lambda x, **how: linalg.pinv(x, method="rows", **how),
}
ALWAYS = ("cond", "matrix_rank", "pca", "expm", "logm", "sqrtm")


class NoResultError(Exception):
    """LAPACK has found no result."""


def computed(call, x, **how):
    try:
        return results(call(x, **how))
    except MatrixError as error:
        if "infs" in str(error):
            raise
        raise NoResultError from error


def check_not_finite(names, methods):
    for name, bad, (i, j), method in itertools.product(names, (np.nan, -np.inf), ((1, 1), (4, 4), (2, 5)), methods):
        a = S.copy()
        a[i, j] = a[j, i] = bad
        how = {} if " by rows" in name or method is None else {"method": method}
        with pytest.raises(MatrixError, match=r"must not contain infs or NaNs") as caught:
            results(FINITE[name](cut(a), **how))
        assert isinstance(caught.value, ValueError)
        if name in ALWAYS:
            continue
        with warnings.catch_warnings(), contextlib.suppress(NoResultError):
            warnings.simplefilter("ignore", RuntimeWarning)
            found = computed(FINITE[name], cut(a), check_finite=False, **how)
            assert bad == -np.inf or not all(np.isfinite(x).all() for x in found), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of plain tasks
def test_not_finite_without_a_cluster():
    with dask.config.set(scheduler="sync"):
        check_not_finite(FINITE, [None])


def test_not_finite_on_workers(inproc_client, caplog):
    caplog.set_level(logging.CRITICAL, "distributed.worker")
    check_not_finite(("cholesky", "solve b", "lu", "lstsq a", "solve_triangular a"), ["local", "columns"])


def test_finite_elements_are_not_refused():
    """Neither those whose sum overflows, nor others that no function reads."""
    with dask.config.set(scheduler="sync"):
        a = np.diag(np.full(N, 1.7e308))
        a[0, 1] = 1.7e308
        np.testing.assert_allclose(linalg.solve(cut(a), cut(a)), np.eye(N), atol=1e-15)
        for lower in (True, False):
            unread = np.tri(N, k=-1, dtype=bool).T if lower else np.tri(N, k=-1, dtype=bool)
            given = np.where(unread, np.nan, S)
            assert np.isfinite(linalg.cholesky(cut(given), lower=lower)).all()
            assert np.isfinite(linalg.eigh(cut(given), lower=lower)[1]).all()
            assert np.isfinite(linalg.solve_triangular(cut(given), cut(B), lower=lower)).all()
        given = given + np.diag(np.full(N, np.inf))
        assert np.isfinite(linalg.solve_triangular(cut(given), cut(B), unit_diagonal=True)).all()
