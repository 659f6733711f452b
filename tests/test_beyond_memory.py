"""Tall matrices that the workers can't hold: R by Dask's tasks, whose chunks come and go, and all else from R."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from residuals import assert_least_squares, assert_qr

from dask_distmm import linalg
from dask_distmm.arrays.linalg import factorize
from dask_distmm.errors import ProjectedMemoryError
from dask_distmm.planning.program import ProgramProblem


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of more than 200 rows do not fit."""

    def check(problem: ProgramProblem, arrays: object) -> None:
        if sum(problem.chunks["a"][0]) > 200:
            raise ProjectedMemoryError("too large", {}, {})

    monkeypatch.setattr(factorize, "_check_fit", check)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32"])
def test_results_are_those_of_matrices_that_fit(dtype: str) -> None:
    rng = np.random.default_rng()
    x, y = ((20 * rng.standard_normal((900, n))).astype(dtype) for n in (12, 2))
    a, b = da.from_array(x, chunks=(150, 5)), da.from_array(y, chunks=(150, 2))
    kind = np.dtype("float64" if dtype == "int32" else dtype)
    x, y = x.astype(kind), y.astype(kind)
    near = {"rtol": 1e-3 if dtype == "complex64" else 1e-9, "atol": 1e-3 if dtype == "complex64" else 1e-9}

    q, r = da.compute(*linalg.qr(a))
    assert_qr(x, q, r)
    assert linalg.qr(a, "r").chunks == ((5, 5, 2), (5, 5, 2))
    u, s, vh = da.compute(*linalg.svd(a, full_matrices=False))
    np.testing.assert_allclose((u * s) @ vh, x, rtol=0, atol=near["atol"] * 100)
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), **near)
    solution, residuals, rank, values = linalg.lstsq(a, b)
    expected = np.linalg.lstsq(x, y, rcond=None)
    assert_least_squares(x, solution.compute(), y)
    np.testing.assert_allclose(residuals.compute(), expected[1], **near)
    np.testing.assert_allclose(values.compute(), expected[3], **near)
    assert rank == 12
    np.testing.assert_allclose(linalg.pinv(a).compute(), np.linalg.pinv(x), **near)
    gram = x.conj().T @ x
    found = linalg.ridge(a, b[:, 0], [0.0, 2.5]).compute()
    for alpha, weights in zip([0.0, 2.5], found, strict=True):
        np.testing.assert_allclose(weights, np.linalg.solve(gram + alpha * np.eye(12), x.conj().T @ y[:, 0]), **near)
    components, variances, mean = da.compute(*linalg.pca(a, 3))
    centred = x - x.mean(axis=0)
    np.testing.assert_allclose(mean, x.mean(axis=0), **near)
    np.testing.assert_allclose(variances, np.linalg.svd(centred, compute_uv=False)[:3] ** 2 / 899, **near)
    np.testing.assert_allclose(abs((components @ centred.conj().T) ** 2).sum(axis=1) / 899, variances, **near)
    _, leading, _ = linalg.svd_compressed(a, 2, n_power_iter=4)
    np.testing.assert_allclose(leading.compute(), s[:2], rtol=1e-2)


def test_workers_with_little_memory() -> None:
    """A matrix that is made chunk by chunk, and is larger than what is left of it."""
    with (
        LocalCluster(2, threads_per_worker=1, memory_limit="300MiB", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster),
    ):
        a = da.random.default_rng(5).standard_normal((600_000, 100), chunks=(25_000, 100))
        r, (components, variances, _) = da.compute(linalg.qr(a, "r"), linalg.pca(a, 3))
        np.testing.assert_allclose(r.T @ r / len(a), np.eye(100), atol=0.02)
        np.testing.assert_allclose(components @ components.T, np.eye(3), atol=1e-12)
        assert (variances > 0.9).all()
