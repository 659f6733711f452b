"""What traced functions compute is what NumPy computes, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from traced_cases import CASES, arguments, assert_equal, operands
from tracing_ranks import on_ranks

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
