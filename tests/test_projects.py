"""Ten small projects: with this package, with stock Dask and in one process people find the same."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from benchmarks.projects import PROJECTS


@pytest.mark.parametrize("name", PROJECTS)
def test_all_find_the_same(client, name):
    if name == "fields":
        pytest.importorskip("xarray", reason="needs xarray")
    project = PROJECTS[name](da.random.default_rng(), 0.05)
    expected = project.alone()
    for work in (project.ours, project.stock):
        if work is not None:
            for one, other in zip(work(), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.max(abs(other)))
