"""Factorizations whose panels are broadcast, over the stand-ins: layouts, pivots, the order in which ranks meet."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest
from factoring import planned, run_plan
from matrices import noise
from residuals import (
    assert_cholesky,
    assert_inverse,
    assert_ldlt,
    assert_least_squares,
    assert_lu,
    assert_pseudoinverse,
    assert_qr,
    assert_solution,
)

from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.planning import ENGINES
from dask_distmm.programs.factorizations import Factorization

DTYPES = ["float32", "float64", "complex64", "complex128"]
RANKS = [1, 2, 3]
CASES = [*((3, dtype) for dtype in DTYPES), (1, "float64"), (2, "complex128")]


class Factorizing:
    """Runs factorizations on stand-ins of GPUs, from chunks of any sizes that lie anywhere."""

    def __init__(self, ranks, world):
        self.ranks, self.world = ranks, world

    def __call__(self, kind, nranks, *matrices, sources=0, host=False, **options):
        self.ranks.host = host
        shape, *others = (x.shape for x in matrices)
        task = Factorization(kind, shape, matrices[0].dtype.name, *others, **options)
        how = {"array": "numpy" if host else "cupy", "method": "columns" if nranks > 1 else "auto"}
        made = planned(task, nranks, engine="nccl", sources=sources, **how)
        assert len(made.ranks) == nranks
        return run_plan(self.ranks, made, *matrices)

    def release(self):
        """Free the group on all ranks, which is collective."""
        threads = [
            threading.Thread(target=engine.release, args=(number,))
            for engine in self.ranks.engines.values()
            for number in list(engine.groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def factorize(make_broadcasting, monkeypatch):
    monkeypatch.setitem(ENGINES, "nccl", dataclasses.replace(ENGINES["nccl"], widths=(8, 8)))
    found = Factorizing(*make_broadcasting())
    yield found
    found.release()
    assert found.world.open["communicator"] == 0


def positive(rng, n, dtype):
    x = noise(rng, (n, n), dtype)
    return (x @ x.conj().T + np.eye(n)).astype(dtype)


def triangle(a, lower):
    """A matrix of which only one triangle is given."""
    nothing = np.full_like(a, np.nan)
    return np.tril(a) + np.triu(nothing, 1) if lower else np.triu(a) + np.tril(nothing, -1)


@pytest.mark.parametrize(("nranks", "dtype"), CASES)
def test_cholesky(factorize, nranks, dtype):
    rng = np.random.default_rng()
    for lower, n in itertools.product((True, False), (25, 70)):
        a = positive(rng, n, dtype)
        (factor,) = factorize("cholesky", nranks, triangle(a, lower), lower=lower).values()
        assert_cholesky(a, factor, lower=lower)
        if lower:
            assert_ldlt(a, *factorize("ldlt", nranks, triangle(a, True)).values())


@pytest.mark.parametrize(("nranks", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(60, 60), (70, 41), (41, 70)], ids=str)
def test_lu(factorize, nranks, dtype, shape):
    a = noise(np.random.default_rng(), shape, dtype)
    found = factorize("lu", nranks, a)
    assert_lu(a, found["l"], found["u"], found["p"][0])
    k = min(shape)
    np.testing.assert_array_equal(np.tril(found["lu"], -1)[:, :k], np.tril(found["l"], -1))
    rows = np.arange(len(a))
    for i, other in enumerate(found["piv"][0].tolist()):
        rows[[i, other]] = rows[[other, i]]
    np.testing.assert_array_equal(np.argsort(rows), found["p"][0])


@pytest.mark.parametrize(("nranks", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(60, 60), (70, 41), (41, 70)], ids=str)
def test_qr(factorize, nranks, dtype, shape):
    a = noise(np.random.default_rng(), shape, dtype)
    for mode in ("reduced", "complete"):
        found = factorize("qr", nranks, a, mode=mode)
        assert_qr(a, found["q"], found["r"])
    (r,) = factorize("qr", nranks, a, mode="r").values()
    np.testing.assert_allclose(abs(r), abs(found["r"][: len(r)]), rtol=0, atol=1e-3 * abs(r).max())


@pytest.mark.parametrize(("nranks", "dtype"), CASES)
@pytest.mark.parametrize("nrhs", [1, 30])
def test_equations(factorize, nranks, dtype, nrhs):
    rng = np.random.default_rng()
    a, s, b = noise(rng, (50, 50), dtype), positive(rng, 50, dtype), noise(rng, (50, nrhs), dtype)
    for op, of in (("N", lambda x: x), ("T", lambda x: x.T), ("C", lambda x: x.conj().T)):
        assert_solution(of(a), factorize("solve", nranks, a, b, op=op)["x"], b)
        lower = bool(rng.integers(2))
        found = factorize("solve", nranks, triangle(s, lower), b, assume_a="pos", lower=lower, op=op)
        assert_solution(of(s), found["x"], b)
        well = a + 8 * np.eye(50, dtype=dtype)
        for right in (True, False):
            side = b.T.copy() if right else b
            given = triangle(well, lower)
            (x,) = factorize("solve_triangular", nranks, given, side, lower=lower, op=op, right=right).values()
            whole = of(np.tril(well) if lower else np.triu(well))
            assert_solution(whole.T if right else whole, x.T if right else x, b)


@pytest.mark.parametrize(("nranks", "dtype"), CASES)
def test_inverses_and_determinants(factorize, nranks, dtype):
    rng = np.random.default_rng()
    a, s = noise(rng, (45, 45), dtype), positive(rng, 45, dtype)
    assert_inverse(a, factorize("inv", nranks, a)["x"])
    assert_inverse(s, factorize("inv", nranks, triangle(s, False), assume_a="pos", lower=False)["x"])
    wide = a.astype(np.result_type(a.dtype, np.float64))
    # The determinant of a matrix that is close to singular has few right digits.
    close = {"rtol": 1e3 * np.finfo(dtype).eps * np.linalg.cond(wide)}
    np.testing.assert_allclose(factorize("det", nranks, a)["det"][0, 0], np.linalg.det(wide), **close)
    found, (sign, logarithm) = factorize("slogdet", nranks, a), np.linalg.slogdet(wide)
    np.testing.assert_allclose(found["sign"][0, 0], sign, **close)
    np.testing.assert_allclose(found["logdet"][0, 0], logarithm, **close)


@pytest.mark.parametrize(("nranks", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(70, 33), (33, 70), (40, 40)], ids=str)
def test_least_squares(factorize, nranks, dtype, shape):
    rng = np.random.default_rng()
    a, b = noise(rng, shape, dtype), noise(rng, (shape[0], 5), dtype)
    found = factorize("lstsq", nranks, a, b)
    assert_least_squares(a, found["x"], b)
    if shape[0] > shape[1]:
        expected = np.linalg.norm(a @ found["x"] - b, axis=0) ** 2
        np.testing.assert_allclose(found["residuals"][0], expected, rtol=1e-3)
    assert_pseudoinverse(a, factorize("pinv", nranks, a)["x"])


@pytest.mark.parametrize("host", [True, False])
def test_chunks_of_workers_that_are_no_ranks(factorize, host):
    rng = np.random.default_rng()
    a, b = noise(rng, (80, 80), "float64"), noise(rng, (80, 12), "float64")
    for nranks in RANKS:
        assert_solution(a, factorize("solve", nranks, a, b, sources=2, host=host)["x"], b)
    assert any(job.received_bytes > job.comm.received_bytes for job in factorize.ranks.jobs)


def test_few_rows_more_columns_than_one_batch(factorize, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["dask_distmm.engines.nccl"], "_BATCH_BYTES", 300)
    a = noise(np.random.default_rng(), (90, 90), "float64")
    found = factorize("lu", 3, a)
    assert_lu(a, found["l"], found["u"], found["p"][0])


@pytest.mark.parametrize("nranks", RANKS)
def test_matrices_that_have_no_such_factor(factorize, nranks):
    rng = np.random.default_rng()
    a, b = positive(rng, 60, "float64"), noise(rng, (60, 3), "float64")
    a[37, 37] = -1
    with pytest.raises(MatrixError, match="order 38 is not positive"):
        factorize("cholesky", nranks, a)
    a[37, 37] = np.nan
    assert np.isnan(factorize("solve", nranks, a, b, assume_a="pos")["x"]).any()
    for kind, given, options in (("cholesky", (a,), {}), ("solve", (a, b), {"assume_a": "pos"})):
        with pytest.raises(MatrixError, match="a must not contain infs or NaNs"):
            factorize(kind, nranks, *given, check_finite=True, **options)
    singular = noise(rng, (60, 60), "float64")
    singular[:, 41] = 0
    for kind in ("solve", "inv"):
        with pytest.raises(MatrixError, match="element 41 of"):
            factorize(kind, nranks, *((singular, b) if kind == "solve" else (singular,)))
    assert factorize("det", nranks, singular)["det"] == 0
    with pytest.raises(MatrixError, match="element 20 of"):
        factorize("solve_triangular", nranks, np.tril(noise(rng, (60, 60), "float64")) * (np.arange(60) != 20), b)
    deficient = noise(rng, (70, 40), "float64")
    deficient[:, 29] = deficient[:, 3] - deficient[:, 11]
    for kind, given in (("lstsq", (deficient, noise(rng, (70, 3), "float64"))), ("pinv", (deficient.T.copy(),))):
        with pytest.raises(MatrixError, match="column 29 depends"):
            factorize(kind, nranks, *given)


@pytest.mark.parametrize("kind", ["cholesky", "lu", "qr", "solve", "inv"])
def test_all_memory_for_panels_is_there_before_the_first_step(factorize, monkeypatch, kind):
    """Later no rank could say that it lacks some, as the others wait in the library."""
    from dask_distmm.engines.gpu.panels import DevicePanels

    rng = np.random.default_rng()
    a, reserve, sizes, calls = positive(rng, 60, "float64"), DevicePanels.reserve, [], itertools.count()

    def counted(panels, size):
        sizes.append(size)
        reserve(panels, size)

    monkeypatch.setattr(DevicePanels, "reserve", counted)
    given = (a, noise(rng, (60, 9), "float64")) if kind == "solve" else (a,)
    factorize(kind, 3, *given)
    assert len(sizes) == 2 * 3
    assert len(set(sizes)) == 1

    def missing(panels, size):
        if next(calls) == 1:
            raise MemoryError(f"no {size} bytes")
        counted(panels, size)

    monkeypatch.setattr(DevicePanels, "reserve", missing)
    with pytest.raises(EngineError, match=f"MemoryError: no {sizes[0]} bytes"):
        factorize(kind, 3, *given)
    monkeypatch.setattr(DevicePanels, "reserve", reserve)
    factorize(kind, 3, *given)


def test_nan_stays_nan(factorize):
    a = noise(np.random.default_rng(), (40, 40), "float64")
    a[7, 5] = np.nan
    found = factorize("lu", 2, a)
    assert np.isnan(found["u"]).any()
    assert sorted(found["p"][0].tolist()) == list(range(40))
