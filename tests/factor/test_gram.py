"""Reflectors of panels out of their Gram matrices, by LAPACK's gates."""

from __future__ import annotations

import numpy as np
import pytest
from factoring import factor_plan, run_factorization
from matrices import noise
from residuals import assert_qr

from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs import factor
from dask_distmm.engines.programs.factor import gram_reflectors
from dask_distmm.programs.factorizations import Factorization

K = LapackKernels()
DTYPES = ["float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (60, 7), (300, 40), (60, 20)])
def test_reflectors_out_of_the_gram_matrix(monkeypatch, dtype, shape):
    monkeypatch.setattr(factor, "_COLUMNS", 4)
    a = noise(np.random.default_rng(), shape, dtype)
    (m, n), panel = shape, K.empty(shape, a.dtype)
    panel[...] = a
    t = gram_reflectors(K, panel)
    v = np.tril(panel, -1) + np.eye(m, n, dtype=dtype)
    assert not np.tril(t, -1).any()
    q = np.eye(m, dtype=dtype) - v @ t @ v.conj().T
    assert_qr(a, q, np.vstack([np.triu(panel[:n]), np.zeros((m - n, n), dtype)]))


class Device(LapackKernels):
    asynchronous = True


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_no_reflectors_out_of_a_bad_gram_matrix(value):
    a = np.asfortranarray(np.random.default_rng().standard_normal((40, 6)))
    a[:, 2] = value
    before = a.copy()
    with np.errstate(all="ignore"):
        assert gram_reflectors(K, a) is None
    np.testing.assert_array_equal(a, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeated", [False, True])
def test_panels_of_asynchronous_engines(monkeypatch, dtype, repeated):
    asked = []
    monkeypatch.setattr(Device, "geqrt", lambda self, a: asked.append(a.shape) or LapackKernels.geqrt(self, a))
    a = noise(np.random.default_rng(), (120, 80), dtype)
    if repeated:
        a[:, 1] = a[:, 0]
    found = run_factorization(factor_plan(Factorization("qr", a.shape, dtype), 2, 16), a, kernels=Device())
    assert_qr(a, found["q"], found["r"])
    assert ((120, 16) in asked) == repeated
