"""What other libraries do with Dask arrays comes here under ``enable()``: docs/integrations.md has the table."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed
from scripts import count_runs

import dask_distmm
from dask_distmm.arrays.linalg.array_api import chain


@pytest.fixture
def computed(inproc_client, take_all):
    """Return a function that computes under ``enable()`` and checks whether runs took place."""

    def check(function, *, runs: int | None = None):
        before = inproc_client.run_on_scheduler(count_runs)
        # A region may have taken small products in.
        with dask.config.set({"distmm.regions": False}), dask_distmm.enabled():
            (result,) = dask.compute(function())
        took = inproc_client.run_on_scheduler(count_runs) - before
        assert took > 0 if runs is None else took == runs
        return result

    return check


def close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def tall():
    a = np.random.default_rng().standard_normal((60, 20))
    return a, da.from_array(a, chunks=(15, 20))


def square():
    a = np.random.default_rng().standard_normal((20, 20))
    return a, da.from_array(a, chunks=10)


NUMPY = {
    "multi_dot": (lambda f, x, s: f.linalg.multi_dot([x.T, x, s]), 2),
    "multi_dot of vectors": (lambda f, x, s: f.linalg.multi_dot([x[:, 0], x, s, s[0]]), 3),
    "matrix_power": (lambda f, x, s: f.linalg.matrix_power(s, 3), 2),
    "matrix_power 1": (lambda f, x, s: f.linalg.matrix_power(s, 1), 0),
    "linalg.matmul": (lambda f, x, s: f.linalg.matmul(x, s), 1),
    "linalg.tensordot": (lambda f, x, s: f.linalg.tensordot(x, s, axes=1), 1),
    "inner": (lambda f, x, s: f.inner(x, s), 1),
    "cov": (lambda f, x, s: f.cov(x), 1),
    "einsum": (lambda f, x, s: f.einsum("ij,jk->ik", x, s), 1),
    "einsum transposed": (lambda f, x, s: f.einsum("ji,jk->ki", x, x), 1),
    "einsum implicit": (lambda f, x, s: f.einsum("ji,ai", s, s), 1),
    "einsum of a batch": (lambda f, x, s: f.einsum("ij,ij->i", x, x), 0),
    "einsum of one": (lambda f, x, s: f.einsum("ij->j", x), 0),
}


@pytest.mark.parametrize("way", NUMPY)
def test_numpy_functions(computed, way):
    (a, x), (b, s) = tall(), square()
    function, runs = NUMPY[way]
    close(computed(lambda: function(np, x, s), runs=runs), function(np, a, b))


def test_numpy_functions_answer_lazily_and_only_while_enabled(inproc_client, take_all):
    (b, s), stock = square(), da.Array.__array_function__
    with dask_distmm.enabled():
        assert isinstance(np.linalg.multi_dot([s, s]), da.Array)
        # What is left to NumPy, as without us: Dask computes, and says so.
        warned = pytest.warns(FutureWarning, match="not implemented by Dask")
        with dask.config.set({"distmm.enabled": False}), warned:
            assert isinstance(np.linalg.multi_dot([s, s]), np.ndarray)
        close(np.linalg.matrix_power(s, -1), np.linalg.inv(b))
        with warned, pytest.raises(np.linalg.LinAlgError):
            np.linalg.multi_dot([s, da.ones((2, 20, 20)), s])
    assert da.Array.__array_function__ is stock


def test_multi_dot_takes_the_cheapest_order():
    # The example of Cormen, Leiserson, Rivest and Stein: ((A1 (A2 A3)) ((A4 A5) A6)).
    sizes, orders = [30, 35, 15, 5, 10, 20, 25], {}

    def product(a, b):
        found = np.empty((len(a), b.shape[1]))
        orders[id(found)] = orders.get(id(a), "A"), orders.get(id(b), "A"), found
        return found

    (first, second, _) = orders[id(chain([np.empty(shape) for shape in itertools.pairwise(sizes)], product))]
    assert (first[0], first[1][:2], second[0][:2], second[1]) == ("A", ("A", "A"), ("A", "A"), "A")


def test_linalg(computed):
    (a, x), (b, s) = tall(), square()
    y = x[:, 0] + 1
    close(computed(lambda: da.linalg.lstsq(x, y)[0]), np.linalg.lstsq(a, a[:, 0] + 1)[0])
    u, values, v = computed(lambda: da.linalg.svd_compressed(x.rechunk(10), 20, n_power_iter=1))
    # As exact as the random matrix that compresses is far from singular.
    np.testing.assert_allclose(values, np.linalg.svd(a)[1], rtol=1e-5)
    np.testing.assert_allclose(u * values @ v, a, atol=1e-5)
    definite = da.from_array(b @ b.T + 20 * np.eye(20), chunks=10)
    close(computed(lambda: da.linalg.solve(definite, s), runs=1), np.linalg.solve(b @ b.T + 20 * np.eye(20), b))
    # This multiplies blocks in tasks of its own.
    q, r = computed(lambda: da.linalg.tsqr(x), runs=0)
    close(q @ r, a)
    factor = computed(lambda: da.linalg.cholesky(definite, lower=True), runs=1)
    close(factor @ factor.T, b @ b.T + 20 * np.eye(20))


def test_delayed_of_a_product(computed):
    """Dask's delayed copies the whole graph of an array under other keys; steps are not copied."""
    b, s = square()
    close(computed(lambda: delayed(np.cumsum)(s @ s), runs=1), np.cumsum(b @ b))
    one = s.rechunk(20)
    close(computed(lambda: delayed(np.sum)(one @ one) + (one @ one).sum(), runs=1), 2 * (b @ b).sum())


def test_xarray(computed):
    xr = pytest.importorskip("xarray", reason="needs xarray")
    (a, x), (b, s) = tall(), square()
    first, second = xr.DataArray(x, dims=("i", "k")), xr.DataArray(s, dims=("k", "j"))
    for way in (lambda: xr.dot(first, second, dim="k"), lambda: first @ second, lambda: second.dot(first).T):
        found = computed(way, runs=1)
        assert found.dims == ("i", "j") or found.dims == ("j", "i")
        close(found.transpose("i", "j").data, a @ b)
    close(computed(lambda: xr.dot(first, first.rename(k="l"), dim="i"), runs=1).data, a.T @ a)
    cube = xr.DataArray(da.stack([x, x]), dims=("t", "i", "k"))
    close(computed(lambda: cube @ second, runs=1).data, np.stack([a @ b] * 2))


@pytest.mark.filterwarnings("ignore")
def test_dask_ml(computed):
    pytest.importorskip("dask_ml", reason="needs dask-ml, which brings numba and others")
    from dask_ml.decomposition import PCA, TruncatedSVD
    from dask_ml.metrics import euclidean_distances

    a, x = tall()
    centred = a - a.mean(axis=0)
    pca = PCA(3, svd_solver="randomized", iterated_power=6, random_state=0)
    assert computed(lambda: pca.fit(x).singular_values_) == pytest.approx(np.linalg.svd(centred)[1][:3], rel=0.2)
    pca = PCA(3, svd_solver="full").fit(x)
    close(computed(lambda: pca.transform(x), runs=1), (a - pca.mean_) @ pca.components_.T)
    svd = TruncatedSVD(19, algorithm="randomized", n_iter=2, random_state=0)
    assert computed(lambda: svd.fit(x).singular_values_)[0] == pytest.approx(np.linalg.svd(a)[1][0], rel=1e-5)
    expected = np.linalg.norm(a[:, None] - a[None], axis=-1)
    np.testing.assert_allclose(computed(lambda: euclidean_distances(x, x + 0)), expected, atol=1e-5)


@pytest.mark.parametrize("cases", ["planned_cases.py", "dask_array_cases.py"])
def test_other_kinds_of_arrays(cases):
    """A process has query planning on or off, and importing dask_array changes Dask's configuration."""
    if cases == "dask_array_cases.py" and importlib.util.find_spec("dask_array") is None:
        pytest.skip("needs dask-array")
    script = pathlib.Path(__file__).with_name(cases)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
