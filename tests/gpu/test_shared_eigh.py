"""Eigenvalues that GPU workers share, by LAPACK's residuals."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from leaks import assert_nothing_left
from residuals import assert_eigh
from test_epilogs import computed, finished, on_gpus
from test_spectral import SPECTRA, hermitian

from dask_distmm import linalg

pytestmark = pytest.mark.engines("peer")
COUNTS = range(1, 4)
DTYPES = ["float32", "float64", "complex64", "complex128"]
# Of each type random matrices, and of one type all others.
CASES = [(dtype, "random") for dtype in DTYPES] + [("float64", what) for what in SPECTRA if what != "random"]


def shared(client, a, **options):
    """Return what the workers compute together, in one run."""
    w, v = linalg.eigh(on_gpus(a), method="columns", **options)
    before = finished(client)
    w, v = (computed(client, x) for x in client.persist((w, v)))
    assert len(finished(client) - before) == 1
    return w, v


@pytest.mark.parametrize(("dtype", "what"), CASES)
def test_spectra(clusters, nworkers, dtype, what):
    client, _ = clusters(nworkers)
    a = hermitian(what, int(np.random.default_rng().integers(260, 330)), dtype)
    made = linalg.explain(linalg.eigh(on_gpus(a), method="columns")[0])
    assert (made.method, len(made.ranks)) == ("columns", nworkers)
    assert_eigh(a, *shared(client, a))
    assert_nothing_left(client)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_tiles_and_panels(clusters, nworkers, dtype):
    """Several tiles of 512 rows, panels of 64 columns, and merges."""
    client, _ = clusters(nworkers)
    a = hermitian("random", 1500, dtype)
    assert_eigh(a, *shared(client, a))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128, 129, 257, 513])
def test_orders_at_edges(clusters, nworkers, n):
    client, _ = clusters(nworkers)
    a = hermitian("random", n, "float64")
    assert_eigh(a, *shared(client, a))


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("lower", [True, False])
def test_one_triangle_some_vectors_and_values_alone(clusters, nworkers, dtype, lower):
    client, _ = clusters(nworkers)
    a = hermitian("random", 290, dtype)
    other = np.full_like(a, np.nan)
    given = np.tril(a) + np.triu(other, 1) if lower else np.triu(a) + np.tril(other, -1)
    w, v = shared(client, given, lower=lower, subset_by_index=(20, 99))
    assert w.shape == (80,)
    assert_eigh(a, w, v, first=20)
    options = {"lower": lower, "method": "columns"}
    values = computed(client, linalg.eigvalsh(on_gpus(given), **options))
    unit = 290 * np.finfo(dtype).eps * abs(a).sum(axis=0).max()
    assert abs(values - np.linalg.eigvalsh(a.astype("complex128"))).max() < 30 * unit
    some = computed(client, linalg.eigvalsh(on_gpus(given), subset_by_index=(20, 99), **options))
    np.testing.assert_array_equal(some, values[20:100])


def test_diagonal_matrices(clusters, nworkers):
    client, _ = clusters(nworkers)
    a = np.diag(np.random.default_rng().standard_normal(280)).astype("complex64")
    assert_eigh(a, *shared(client, a))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_no_numbers(clusters, nworkers, value):
    client, _ = clusters(nworkers)
    a = hermitian("random", 270, "float64")
    bad = a.copy()
    bad[200, 7] = bad[7, 200] = value
    for call in (linalg.eigvalsh, lambda x, **options: linalg.eigh(x, **options)[1]):
        with pytest.raises(np.linalg.LinAlgError, match="must not contain infs or NaNs"):
            computed(client, call(on_gpus(bad), method="columns"))
    # And the workers are as good as before.
    assert_eigh(a, *shared(client, a))
    assert_nothing_left(client)


def test_the_same_results_each_time(clusters, nworkers):
    client, _ = clusters(nworkers)
    a = hermitian("random", 700, "float32")
    first, second = (shared(client, a) for _ in range(2))
    # The bits of the values; products of matrices may choose another kernel.
    np.testing.assert_array_equal(first[0], second[0])


def test_numpy_chunks(clusters, nworkers):
    client, _ = clusters(nworkers)
    a = hermitian("random", 300, "float64")
    with dask.config.set({"distmm.engine": "peer"}):
        x = dask.array.from_array(a, chunks=77)
        w, v = client.compute(linalg.eigh(x, method="columns"), sync=True)
    assert isinstance(v, np.ndarray)
    assert_eigh(a, w, v)
