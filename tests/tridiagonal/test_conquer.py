"""Divide and conquer, the secular equation and eigenvalues without vectors beside LAPACK, on spectra of all kinds."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.engines import tridiagonal
from dask_distmm.engines.numpy.lapack import LapackKernels, Secular
from dask_distmm.engines.tridiagonal import DivideAndConquer, deflate, row_bounds

EPS = np.finfo(float).eps
# Residuals in units of n eps, in the 1-norm; LAPACK's tests allow 30.
GATE = 5


class Hub:
    """The way of small arrays between ranks that are threads: copies, as networks make them."""

    def __init__(self):
        self.futures, self.lock = {}, threading.Lock()

    def future(self, *key):
        with self.lock:
            return self.futures.setdefault(key, Future())

    def publish(self, key, arrays):
        self.future(*key).set_result([np.array(x) for x in arrays])

    def fetch(self, key, owner):
        return self.future(*key).result(30)


def decomposed(d, e, ranks, first=0, last=None, **options):
    """Return eigenvalues and eigenvectors by so many ranks."""
    n, hub = len(d), Hub()
    last, bounds = n - 1 if last is None else last, row_bounds(n, ranks)
    rows = [np.full((stop - start, n), np.nan, order="F") for start, stop in itertools.pairwise(bounds)]

    def run(rank):
        memory = rows[rank], np.full_like(rows[rank], np.nan)
        return DivideAndConquer(LapackKernels(), hub, (rank, ranks), (d, e), memory, **options).solve(first, last)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    for values, columns in found[1:]:
        np.testing.assert_array_equal(values, found[0][0])
        np.testing.assert_array_equal(columns, found[0][1])
    return found[0][0], np.concatenate(rows)[:, found[0][1]]


def dense(d, e):
    return np.diag(d) + np.diag(e, 1) + np.diag(e, -1)


def norm(x):
    return np.linalg.norm(x, 1) if x.size else 0.0


def check(d, e, w, v, first=0, rounding=EPS):
    """Residual, orthogonality, and LAPACK's values."""
    n, t = len(d), dense(d, e)
    unit = n * rounding
    assert (np.diff(w) >= 0).all()
    assert norm(t @ v - v * w) <= GATE * unit * norm(t)
    assert norm(v.T @ v - np.eye(len(w))) <= GATE * unit
    assert abs(w - np.linalg.eigvalsh(t)[first : first + len(w)]).max() <= GATE * unit * norm(t)


def wilkinson(half):
    """W+ of order 2 half + 1: its largest eigenvalues come in pairs that agree in all digits."""
    return abs(np.arange(-half, half + 1.0)), np.ones(2 * half)


def glued(count, half, glue):
    d, e = wilkinson(half)
    return np.tile(d, count), np.tile(np.append(e, glue), count)[:-1]


def matrices(n, rng):
    sizes = np.geomspace(1, 1e-15, n)
    yield "random", rng.standard_normal(n), rng.standard_normal(n - 1)
    yield "differences", np.full(n, 2.0), np.full(n - 1, -1.0)
    yield "zero", np.zeros(n), np.zeros(n - 1)
    yield "identity", np.ones(n), np.zeros(n - 1)
    yield "graded", sizes, sizes[1:] / 3
    yield "graded, the other way", sizes[::-1].copy(), sizes[:0:-1] / 3
    yield "integers", np.zeros(n), np.sqrt(np.arange(1.0, n) * (n - np.arange(1.0, n)))
    yield "clustered", np.ones(n), 1e-15 * rng.standard_normal(n - 1)
    yield "two clusters", np.where(np.arange(n) % 2, 1.0, -1.0), 1e-14 * rng.standard_normal(n - 1)
    yield "nearly torn", rng.standard_normal(n), rng.standard_normal(n - 1) * 10.0 ** -rng.integers(0, 18, n - 1)
    yield "tiny", 1e-140 * rng.standard_normal(n), 1e-140 * rng.standard_normal(n - 1)
    yield "huge", 1e140 * rng.standard_normal(n), 1e140 * rng.standard_normal(n - 1)
    # An isolated large value, and many small ones.
    yield "one large", np.append(1e10, rng.standard_normal(n - 1)), rng.standard_normal(n - 1)


@pytest.fixture(params=[3, 16, 256])
def leaf(request, monkeypatch):
    """The order of what is not torn."""
    monkeypatch.setattr(tridiagonal, "_LEAF", request.param)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 5, 41, 130])
def test_all_eigenvectors(leaf, ranks, n):
    for name, d, e in matrices(n, np.random.default_rng()):
        if n >= ranks:
            try:
                check(d, e, *decomposed(d, e, ranks))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}\nd={d.tolist()}\ne={e.tolist()}") from error


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("glue", [0.0, 1e-15, 1e-8, 1e-2, 1.0])
def test_glued_wilkinson_matrices(leaf, ranks, glue):
    d, e = glued(9, 10, glue)
    check(d, e, *decomposed(d, e, ranks))


def test_a_larger_matrix():
    n, rng = 1100, np.random.default_rng()
    d, e = rng.standard_normal(n), rng.standard_normal(n - 1)
    check(d, e, *decomposed(d, e, 2))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_some_eigenvectors(leaf, ranks):
    rng = np.random.default_rng()
    for _, d, e in matrices(60, rng):
        first, last = np.sort(rng.integers(0, 60, 2)).tolist()
        w, v = decomposed(d, e, ranks, first, last)
        assert w.shape == (last - first + 1,)
        check(d, e, w, v, first)


def test_single_precision_deflates_more(monkeypatch):
    monkeypatch.setattr(tridiagonal, "_LEAF", 8)
    made = []
    monkeypatch.setattr(tridiagonal, "deflate", lambda *args: made.append(deflate(*args)) or made[-1])
    rng, n = np.random.default_rng(), 200
    d, e = rng.standard_normal(n), rng.standard_normal(n - 1)
    w, v = decomposed(d, e, 2, rounding=2.0**-24)
    check(d, e, w, v, rounding=2.0**-23)
    assert norm(v.T @ v - np.eye(n)) <= GATE * n * EPS, "deflation is a rotation"
    single = sum(len(one.poles) for one in made)
    made.clear()
    decomposed(d, e, 2)
    assert single < sum(len(one.poles) for one in made)


def secular_matrix(d, z, rho):
    return np.diag(d) + rho * np.outer(z, z)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.sampled_from([1e-8, 1.0, 1e8]), st.integers(0, 16), st.integers(0, 16), st.integers(0))
def test_secular_equations(n, rho, spread, small, seed):
    rng = np.random.default_rng(seed)
    d = np.sort(rng.uniform(0, 1, n)) * 10.0**-spread + 1
    z = rng.choice([-1, 1], n) * 10.0 ** -rng.uniform(0, small, n)
    z /= np.linalg.norm(z)
    if (np.diff(d) <= 0).any():
        return
    found, v = Secular(d, z, rho), np.empty((n, n))
    found.vectors(np.arange(n), np.arange(n), v)
    a = secular_matrix(d, z, rho)
    w, size, unit = found.values, np.linalg.norm(a, 2), 4 * (n + 5) * EPS
    assert (w >= d).all()
    assert (w[:-1] <= d[1:]).all()
    assert abs(v.T @ v - np.eye(n)).max() <= unit
    assert abs(a @ v - v * w).max() <= unit * size
    assert abs(w - np.linalg.eigvalsh(a)).max() <= unit * size
    rows, which = rng.permutation(n), np.sort(rng.permutation(n)[: n // 2])
    some = np.empty((n, len(which)))
    found.vectors(rows, which, some)
    np.testing.assert_allclose(some, v[np.ix_(rows, which)], rtol=1e-13, atol=1e-300)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 17), st.integers(0, 17), st.integers(0))
def test_deflation_changes_the_matrix_by_rounding_alone(first, second, near, small, seed):
    """Undo the rotations and the order: what is left must be the matrix that was given."""
    rng, n = np.random.default_rng(seed), first + second
    d = rng.integers(0, 4, n) + 10.0**-near * rng.standard_normal(n)
    z = np.concatenate([x / np.linalg.norm(x) for x in (rng.standard_normal(first), rng.standard_normal(second))])
    z[rng.integers(0, n, n // 2)] *= 10.0**-small
    coupling = 10.0 ** -rng.uniform(0, 3)
    merge = deflate(d, z, coupling, first, 2.0**-53)
    k = len(merge.poles)
    assert sorted(merge.columns.tolist()) == list(range(n))
    assert (np.diff(merge.poles) > 0).all()
    # Columns of the identity, rotated and ordered as those of eigenvectors are.
    q = np.eye(n)
    for (p, r), (c, s) in zip(merge.pairs.tolist(), merge.factors.tolist(), strict=True):
        q[:, [p, r]] = q[:, [p, r]] @ [[c, -s], [s, c]]
    q = q[:, merge.columns]
    inner = np.zeros((n, n))
    inner[:k, :k] = secular_matrix(merge.poles, merge.weights, merge.rho)[np.ix_(merge.order, merge.order)]
    inner[range(k, n), range(k, n)] = merge.deflated
    given_matrix = secular_matrix(d, z, coupling)
    tolerance = 8 * 2.0**-53 * max(abs(d).max(), 1)
    assert np.linalg.norm(q @ inner @ q.T - given_matrix, 2) <= 3 * n * tolerance
    alone, both, _ = merge.counts
    assert not q[first:, :alone].any()
    assert not q[:first, alone + both : k].any()


@pytest.mark.parametrize("n", [1, 2, 41, 90])
def test_eigenvalues_without_vectors(n):
    rng, eigenvalues = np.random.default_rng(), LapackKernels().tridiagonal_values
    for name, d, e in matrices(n, rng):
        expected = np.linalg.eigvalsh(dense(d, e))
        found = eigenvalues(d, e, 0, n - 1)
        assert abs(found - expected).max() <= GATE * n * EPS * norm(dense(d, e)) + 1e-300, name
        first, last = np.sort(rng.integers(0, n, 2)).tolist()
        np.testing.assert_array_equal(eigenvalues(d, e, first, last), found[first : last + 1])
