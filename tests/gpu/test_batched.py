"""Batches and groups of products of CuPy chunks."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from conformance import assert_product
from epilog_cases import BF16
from test_epilogs import computed, on_gpus

from dask_distmm import enabled, matmul, matmul_grouped


def random(*shape, dtype="float64"):
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    found = np.random.default_rng().standard_normal(shape)
    return (found + 1j * found[..., ::-1] if kind.kind == "c" else found).astype(kind)


def check(client, a, b, d):
    found = computed(client, d.persist())
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(x, shape + x.shape[-2:]) for x in (a, b))
    for index in np.ndindex(shape):
        assert_product(a[index], b[index], found[index])


@pytest.mark.parametrize("batch", ["auto", "items", "collective"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64"])
def test_batches(clusters, nworkers, batch, dtype):
    client, _ = clusters(nworkers)
    a, b = random(3, 2, 17, 23, dtype=dtype), random(2, 23, 19, dtype=dtype)
    check(client, a, b, matmul(on_gpus(a), on_gpus(b), batch=batch))


def test_operator(clusters, nworkers):
    client, _ = clusters(nworkers)
    a, b = random(4, 31, 33), random(33, 29)
    with enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        check(client, a, b, on_gpus(a) @ on_gpus(b))


@pytest.mark.parametrize("batch", ["items", "collective"])
def test_formula(clusters, nworkers, batch):
    client, _ = clusters(nworkers)
    a, b, bias = random(3, 20, 30), random(3, 30, 25), random(25)
    inputs = {"bias": on_gpus(bias)}
    d, aux = matmul(on_gpus(a), on_gpus(b), alpha=0.5, epilog="relu_aux_bias", epilog_inputs=inputs, batch=batch)
    x = 0.5 * (a @ b) + bias
    np.testing.assert_allclose(computed(client, d.persist()), np.maximum(x, 0), rtol=1e-10, atol=1e-10)
    sure = abs(x) > 1e-8
    np.testing.assert_array_equal(computed(client, aux["relu_aux"].persist())[sure], (x > 0)[sure])


def test_groups(clusters, nworkers):
    client, _ = clusters(nworkers)
    shapes = [(64, 48, 32), (5, 7, 9), (256, 200, 300), (1, 1, 1), (90, 512, 64)]
    pairs = [(random(m, k), random(k, n)) for m, n, k in shapes]
    found = dask.persist(*matmul_grouped([(on_gpus(a), on_gpus(b)) for a, b in pairs]))
    for (a, b), d in zip(pairs, found, strict=True):
        assert_product(a, b, computed(client, d))
