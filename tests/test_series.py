"""Products that do not fit into memory at once, in one series of waves: batches and groups."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster
from leaks import assert_nothing_left

import dask_distmm
from dask_distmm import ProjectedMemoryError, matmul, matmul_grouped
from dask_distmm.arrays import product
from dask_distmm.planning import Worker
from dask_distmm.planning.waves import choose_scheme
from dask_distmm.runtime.keys import series_of_waves


@pytest.fixture(autouse=True)
def whole_chunks():
    """Panels of tiny products are used as they lie, as those of large ones."""
    with dask.config.set({"distmm.numpy.pack-below": 0}):
        yield


@pytest.fixture
def little_memory(monkeypatch):
    """Products are planned as for workers that have so little memory that each takes several waves."""

    def choose_waves(problem, workers, *args, **kwargs):
        for exponent in range(28, 60):
            imagined = [Worker(f"w{number}", 1, int(2 ** (exponent / 2))) for number in range(2)]
            try:
                return choose_scheme(problem, imagined, *args, **kwargs)
            except ProjectedMemoryError:
                continue
        raise AssertionError("never")

    monkeypatch.setattr(product, "fit_together", lambda *args: False)
    monkeypatch.setattr(product, "choose_scheme", choose_waves)


def lazy(x, chunks, by_ranks):
    """An array whose chunks Dask has to load, or ranks can make."""
    if by_ranks:
        return da.map_blocks(lambda block_info=None: x[location(block_info)], chunks=normal(x, chunks), dtype=x.dtype)
    return da.from_array(x, chunks=chunks).map_blocks(np.copy, dtype=x.dtype)


def normal(x, chunks):
    return da.core.normalize_chunks(chunks, x.shape)


def location(block_info):
    return tuple(slice(*ends) for ends in block_info[None]["array-location"])


def assert_products(a, b, d):
    assert len(a) == len(d)
    for one in zip(a, b, d, strict=True):
        assert_product(*one)


def waves(d):
    """How many waves the series of a product has."""
    (series,) = series_of_waves(dict(d.dask))
    return len(series)


@pytest.mark.parametrize("by_ranks", [False, True])
def test_batch(inproc_client, little_memory, by_ranks):
    """Each item has waves of its own; all of them follow one another; a part of D needs its own items only."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((5, 40, 900)), rng.standard_normal((5, 900, 30))
    d = matmul(lazy(a, (1, 40, 100), by_ranks), lazy(b, (1, 100, 30), by_ranks), batch="collective")
    assert waves(d) >= 10
    assert_products(a, b, d.compute())
    assert_product(a[3], b[3], d[3].compute())
    assert_nothing_left(inproc_client)


@pytest.mark.parametrize("by_ranks", [False, True])
def test_batch_with_a_formula(inproc_client, little_memory, by_ranks):
    rng = np.random.default_rng(4)
    a, b, c = (rng.standard_normal((2, 2, *shape)) for shape in ((30, 600), (600, 40), (30, 40)))
    bias = rng.standard_normal(40)
    d, aux = matmul(
        lazy(a, (1, 1, 30, 100), by_ranks), lazy(b, (1, 1, 100, 40), by_ranks), da.from_array(c, chunks=(1, 2, 15, 40)),
        batch="collective", alpha=0.5, beta=2.0, epilog="relu_aux_bias", epilog_inputs={"bias": bias},
    )  # fmt: skip
    assert waves(d) >= 4
    x = 0.5 * a @ b + 2 * c + bias
    got, mask = dask.compute(d, aux["relu_aux"])
    np.testing.assert_allclose(got, np.maximum(x, 0), atol=1e-10)
    clear = abs(x) > 1e-9
    np.testing.assert_array_equal(mask[clear], (x > 0)[clear])


def test_a_task_that_all_items_need(inproc_client, little_memory):
    """The mean over the batch is computed once; a persisted operand is used as it is."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((4, 40, 600)), rng.standard_normal((4, 600, 30))
    lazy_a = lazy(a, (1, 40, 100), by_ranks=False)
    centered = lazy_a - lazy_a.mean(axis=0)
    kept = inproc_client.persist(da.from_array(b, chunks=(1, 100, 30)))
    d = matmul(centered, kept, batch="collective")
    assert waves(d) >= 4
    assert_products(a - a.mean(axis=0), b, d.compute())


@pytest.mark.parametrize("by_ranks", [False, True])
def test_group(inproc_client, little_memory, by_ranks):
    """Products of different shapes follow one another too; one of them is transposed."""
    rng = np.random.default_rng(6)
    shapes = [(40, 900, 30), (20, 500, 50), (40, 900, 30)]
    pairs = [(rng.standard_normal((m, k)), rng.standard_normal((k, n))) for m, k, n in shapes]
    operands = [(lazy(a.T.copy(), 100, by_ranks).T, lazy(b, 100, by_ranks)) for a, b in pairs]
    found = matmul_grouped(operands, batch="collective")
    assert waves(found[2]) >= 2
    for (a, b), got in zip(pairs, dask.compute(*found), strict=True):
        assert_product(a, b, got)


def spilled(dask_worker):
    return dask_worker.data.spilled_total.disk


def test_larger_than_memory():
    """By call and under enable(): items that fit one by one, and items that do not fit alone."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="400MiB", dashboard_address="127.0.0.1:0") as made,
        Client(made) as client,
    ):
        rng = da.random.default_rng(12)
        a = rng.random((60, 300, 2000), chunks=(1, 300, 1000))
        b = rng.random((60, 2000, 300), chunks=(1, 1000, 300))
        small = matmul(a, b, batch="collective")
        assert "one after the other" in repr(dask_distmm.explain(a, b, batch="collective"))
        long_a = rng.random((2, 400, 60_000), chunks=(1, 400, 2500))
        long_b = rng.random((2, 60_000, 400), chunks=(1, 2500, 400))
        with dask_distmm.enabled():
            large = long_a @ long_b
        assert "waves" in repr(dask_distmm.explain(long_a, long_b))
        for d, left, right in ((small, a, b), (large, long_a, long_b)):
            assert waves(d) >= 4
            got = d.sum(axis=(1, 2)).compute()
            np.testing.assert_allclose(got[1], (left[1].sum(axis=0) @ right[1].sum(axis=1)).compute(), rtol=1e-10)
        assert sum(client.run(spilled).values()) == 0
        assert_nothing_left(client)
