"""Random programs: what they compute is what NumPy computes, on one to five ranks."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_programs import Program
from tracing_ranks import on_ranks

import dask_distmm


def inputs(rng):
    m, n, k = (int(x) for x in rng.integers(1, (30, 6, 4)))
    arrays = [rng.standard_normal((m, n)), rng.standard_normal(m), rng.integers(-2, 3, (m,)), rng.standard_normal((n, k))]
    if rng.integers(2):
        arrays.append(rng.standard_normal((m, m)))
    cuts = np.sort(rng.integers(0, m + 1, int(rng.integers(0, 5))))
    chunks = tuple(int(x) for x in np.diff([0, *cuts, m]))
    return arrays, [da.from_array(x, chunks=(chunks, *x.shape[1:])) if len(x) == m and i != 3 else x for i, x in enumerate(arrays)]


def assert_close(found, expected):
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-4 if expected.dtype.name in ("float32", "complex64") else 1e-7, atol=1e-5 if expected.dtype.name in ("float32", "complex64") else 1e-9)


def check(seed, ranks, compute):
    rng = np.random.default_rng(seed)
    arrays, lazy = inputs(rng)
    with np.errstate(all="ignore"):
        program = Program(rng, int(rng.integers(1, 14)), arrays)
        expected = program(*arrays)
    found = compute(program, lazy, ranks)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 5))
def test_on_ranks(seed, ranks):
    check(seed, ranks, lambda program, lazy, ranks: on_ranks(lambda *x: program(*x), *lazy, ranks=ranks))
