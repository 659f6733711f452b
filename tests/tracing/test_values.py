"""What traced functions compute is what NumPy computes, on any number of ranks."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from traced_cases import CASES, arguments, assert_equal, operands
from tracing_ranks import on_ranks

import dask_distmm
from dask_distmm import explain, fori_loop
from dask_distmm.tracing.control import flattened


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_values(name, ranks):
    function = CASES[name]
    arrays, lazy = operands(np.random.default_rng())
    with np.errstate(all="ignore"):
        expected, tree = flattened(function(*arguments(function, arrays)))
    found, same = flattened(on_ranks(function, *arguments(function, lazy), ranks=ranks))
    assert same == tree
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("keep_every", [1, 3, 4, 11, 30])
def test_loops_in_pieces(keep_every):
    def function(X, A):
        centred = X - X.mean(0)

        def turn(i, state):
            B, n, rows, columns = state
            B = fori_loop(0, 2, lambda j, B: 0.5 * B + A * (i + j), B)
            return B, n + i, rows + (centred @ B).sum(1), columns + i * X[:, :2].T

        first = fori_loop(2, 9, turn, (A, 0, X[:, 0], 0 * X[:, :2].T))
        second = fori_loop(0, 11, turn, first)
        return {"state": second, "before": (first[0], first[3]), "others": [centred.sum(1), X, 3]}

    rng = np.random.default_rng()
    X, A = rng.standard_normal((40, 5)), rng.standard_normal((5, 2))
    expected, tree = flattened(function(X, A))
    lazy = dask_distmm.jit(function, keep_every=keep_every)(da.from_array(X, chunks=(15, 3)), A)
    found, same = flattened(lazy)
    assert same == tree
    for one, other in zip(dask.compute(*found, scheduler="sync"), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    runs = explain(lazy["state"]).runs if keep_every < 11 else [explain(lazy["state"])]
    assert len(runs) == -(-7 // keep_every) + -(-11 // keep_every) - 1
