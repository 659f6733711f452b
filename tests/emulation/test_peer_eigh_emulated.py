"""Eigenvalues that GPUs share, over the stand-ins: the very kernels, compiled for the CPU; a thread for each rank."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
import sys
import time

import compiled
import devices
import numpy as np
import pytest
from factoring import factor_plan
from matrices import noise
from residuals import assert_eigh
from test_spectral import SPECTRA, hermitian

from dask_distmm.engines import tridiagonal
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.tridiagonal import HostReduction, panel_width
from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.planning import ENGINES
from dask_distmm.programs.factorizations import Factorization

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs g++: kernels are compiled for the CPU")
DTYPES = ["float32", "float64", "complex64", "complex128"]


@pytest.fixture
def reduction(peer_engine, monkeypatch):
    """The module of the reduction, with tiles and grids so small that small matrices have several."""
    module = sys.modules["dask_distmm.engines.gpu.tridiagonal"]
    for name, value in {"_ROWS": 64, "_THREADS": 64, "_BLOCKS": 3}.items():
        monkeypatch.setattr(module, name, value)
    smaller = {"#define ROWS 512": "#define ROWS 64", "#define THREADS 128": "#define THREADS 64"}
    monkeypatch.setattr(compiled, "CHANGED", smaller)
    monkeypatch.setattr(tridiagonal, "_LEAF", 16)
    return module


@pytest.fixture
def eigh(factorize, reduction, monkeypatch):
    def run(a, nranks, width=16, **options):
        monkeypatch.setitem(ENGINES, "peer", dataclasses.replace(ENGINES["peer"], widths=(width, width)))
        found = factorize("eigh", nranks, a, **options)
        return found["w"][0], found.get("v")

    run.ranks = factorize.ranks
    return run


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_types_and_ranks(eigh, nranks, dtype):
    n = int(np.random.default_rng().integers(34, 68))
    a = hermitian("random", n, dtype)
    assert_eigh(a, *eigh(a, nranks))


@pytest.mark.cases(4)
@pytest.mark.parametrize("what", SPECTRA)
def test_spectra(eigh, what):
    a = hermitian(what, 70, "float64")
    assert_eigh(a, *eigh(a, 2))


@pytest.mark.cases(2)
@pytest.mark.parametrize(("n", "nranks", "width"), [(140, 1, 64), (150, 2, 64), (200, 2, 8), (129, 1, 128)])
def test_several_tiles_and_panels(eigh, n, nranks, width):
    a = hermitian("random", n, "float64")
    assert_eigh(a, *eigh(a, nranks, width))


@pytest.mark.cases(4)
@pytest.mark.parametrize("n", [1, 2, 8, 9, 17, 33, 64, 65])
def test_small_and_even_orders(eigh, n):
    a = hermitian("random", n, "complex128")
    assert_eigh(a, *eigh(a, 2, 8))


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("nranks", [1, 2])
def test_one_triangle_and_some_vectors(eigh, nranks, lower):
    a = hermitian("random", 60, "complex64")
    other = np.full_like(a, np.nan)
    given = np.tril(a) + np.triu(other, 1) if lower else np.triu(a) + np.tril(other, -1)
    w, v = eigh(given, nranks, lower=lower, subset=(5, 25))
    assert w.shape == (21,)
    assert_eigh(a, w, v, first=5)
    alone, none = eigh(given, nranks, lower=lower, subset=(5, 25), vectors=False)
    assert none is None
    np.testing.assert_allclose(alone, w, rtol=0, atol=60 * 30 * np.finfo("float32").eps * abs(a).max())


def test_chunks_of_workers_that_offer_nothing(eigh):
    a = hermitian("random", 50, "float64")
    eigh.ranks.silent.add("s0")
    assert_eigh(a, *eigh(a, 2, sources=1))
    assert_eigh(a, *eigh(a, 2, host=True))


def test_diagonal_matrices(eigh):
    """All reflectors are none."""
    for dtype in ("float64", "complex64"):
        a = np.diag(np.random.default_rng().standard_normal(40)).astype(dtype)
        assert_eigh(a, *eigh(a, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [(0, 0), (39, 5), (39, 39)])
def test_elements_that_are_no_numbers(eigh, value, at):
    a = hermitian("random", 40, "float64")
    a[at] = a[at[::-1]] = value
    with pytest.raises(MatrixError, match="must not contain infs or NaNs"):
        eigh(a, 2)


@pytest.mark.parametrize(
    ("dtype", "width", "n"),
    [("float64", 64, 150), ("complex64", 16, 100), ("float32", 128, 140), ("complex128", 8, 60)],
)
def test_reductions_beside_numpys(reduction, monkeypatch, dtype, width, n):
    """The same tridiagonal matrix but for signs and rounding: its eigenvalues."""
    cp = sys.modules["cupy"]
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda: cp.cuda.Stream.null, raising=False)
    a = noise(np.random.default_rng(), (n, n), dtype)
    a = (a + a.conj().T).astype(dtype)
    columns = factor_plan(Factorization("eigh", a.shape, dtype), 1, width, shared=True).columns
    garbage = np.triu(np.full(a.shape, np.nan, a.dtype), 1)
    array = np.array(np.tril(a) + garbage, order="F").view(devices.ndarray)
    exchange = cp.zeros((reduction.exchange_bytes(n, a.itemsize), 1), np.uint8)
    one = reduction.DeviceReduction(columns, 0, a.dtype, ["me"], 60.0)
    peers = reduction.Peers([exchange.data.ptr], None)
    found = one.reduce(array, LapackKernels(), peers, lambda: None, lambda share: None)
    assert (one._graph is not None) == (n > 2 * panel_width(width))
    expected = HostReduction(columns, 0, np.asfortranarray(np.tril(a)), None).reduce()
    values = [np.linalg.eigvalsh(np.diag(d) + np.diag(e, -1)) for d, e, _ in (found, expected)]
    unit = np.finfo(dtype).eps * np.linalg.norm(a, 2)
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=10 * n * unit)
    assert found.factors.dtype == a.dtype
    # The first panel, before rounding has grown.
    np.testing.assert_allclose(found.d[:5], expected.d[:5], rtol=0, atol=100 * unit)


@pytest.fixture
def merging(reduction):
    return importlib.import_module("dask_distmm.engines.gpu.tridiagonal").DeviceMerging()


@pytest.mark.parametrize("n", [1, 2, 3, 40, 150])
@pytest.mark.parametrize("spread", [0, 6, 12])
def test_secular_equations_beside_numpys(merging, n, spread):
    rng = np.random.default_rng()
    poles = np.sort(rng.uniform(1, 2, n)) * 10.0 ** np.sort(rng.uniform(-spread, 0, n))
    weights = rng.standard_normal(n) * 10.0 ** -rng.uniform(0, spread, n)
    weights /= np.linalg.norm(weights)
    found, expected = merging.secular(poles, weights, 0.7), LapackKernels().secular(poles, weights, 0.7)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-13)
    rows, which = rng.permutation(n), np.arange(n // 3, n)
    vectors = [np.empty((n, len(which)), order="F").view(devices.ndarray) for _ in range(2)]
    for one, out in zip((found, expected), vectors, strict=True):
        one.vectors(rows, which, out)
    # Rounding turns vectors of eigenvalues that are close towards each other.
    gaps = np.diff(expected.values, prepend=-np.inf, append=np.inf)
    turned = 1e-15 * expected.values[-1] / np.maximum(np.minimum(gaps[:-1], gaps[1:]), 1e-300)
    assert (np.abs(vectors[0] - vectors[1]) <= np.maximum(1e-13, turned[which])).all()
    np.testing.assert_allclose(vectors[0].T @ vectors[0], np.eye(len(which)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 70])
def test_bisection_beside_numpys(merging, n):
    rng = np.random.default_rng()
    for d, e in (
        (rng.standard_normal(n), rng.standard_normal(n - 1)),
        (np.full(n, 2.0), np.full(n - 1, -1.0)),
        (np.geomspace(1, 1e-15, n), np.geomspace(1, 1e-15, n)[1:]),
        (np.ones(n), np.zeros(n - 1)),
    ):
        first, last = np.sort(rng.integers(0, n, 2)).tolist()
        found = merging.tridiagonal_values(d, e, first, last)
        expected = LapackKernels().tridiagonal_values(d, e, first, last)
        np.testing.assert_allclose(found, expected, rtol=0, atol=n * 1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_are_taken_and_rotated(merging, dtype):
    rng = np.random.default_rng()
    around = np.asfortranarray(rng.standard_normal((300, 20))).view(devices.ndarray)
    source, columns = around[7:290, 3:], rng.integers(0, 17, 9)
    frame = np.full((290, 12), 7, dtype, order="F").view(devices.ndarray)
    merging.take(source, columns, frame[4:287, 1:10])
    np.testing.assert_array_equal(frame[4:287, 1:10], source[:, columns].astype(dtype))
    frame[4:287, 1:10] = 7
    assert (frame == 7).all()
    pairs, angles = np.array([[0, 1], [1, 2], [2, 9], [0, 9]]), rng.uniform(0, 6, 4)
    factors, expected = np.stack([np.cos(angles), np.sin(angles)], 1), np.array(source)
    LapackKernels().rotate(expected, pairs, factors)
    merging.rotate(source, pairs, factors)
    np.testing.assert_allclose(source, expected, rtol=0, atol=1e-14)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which compiles for GPUs without one")
@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_sources_compile_for_gpus(peer_engine, tmp_path, dtype):
    sources = sys.modules["dask_distmm.engines.gpu.host"]
    code = sources.source("merging") if dtype is None else sources.source("tridiagonal", np.dtype(dtype))
    (tmp_path / "code.cu").write_text(code)
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Werror", "all-warnings", "-o", tmp_path / "code.cubin"]
    done = subprocess.run([*command, tmp_path / "code.cu"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def broken(monkeypatch, reduction, rank, change):
    """Let one rank do something else before it starts a panel."""
    panel = reduction.DeviceReduction._panel

    def changed(self, start, *args):
        if self._rank == rank:
            change(self, start)
        return panel(self, start, *args)

    monkeypatch.setattr(reduction.DeviceReduction, "_panel", changed)


def test_a_rank_that_fails_ends_those_that_wait(eigh, reduction, monkeypatch):
    def change(self, start):
        if start:
            raise RuntimeError("out of order")

    broken(monkeypatch, reduction, 1, change)
    # Kernels that wait are ended by the host: they would wait longer than the test may take.
    with pytest.raises(RuntimeError, match="out of order"):
        eigh(hermitian("random", 60, "float64"), 2, config={"transfer_timeout": 3600})


def test_a_rank_that_is_late_is_given_up(eigh, reduction, monkeypatch):
    broken(monkeypatch, reduction, 1, lambda self, start: time.sleep(4.0 if start else 0.0))
    with pytest.raises(EngineError, match=r"worker w1 has not multiplied its part for 1 s \(config"):
        eigh(hermitian("random", 60, "float64"), 2, config={"transfer_timeout": 1.4})


def test_ranks_that_compute_different_bits_are_found(eigh, reduction, monkeypatch):
    kernel = reduction.DeviceReduction._kernel

    def changed(self, name):
        found = kernel(self, name)
        if name != "collect" or self._rank != 1:
            return found

        def launch(*args):
            self._memory["scalars"][0] *= 1 + 1e-15
            found(*args)

        return launch

    monkeypatch.setattr(reduction.DeviceReduction, "_kernel", changed)
    with pytest.raises(EngineError, match="GPUs are of different kinds"):
        eigh(hermitian("random", 60, "float64"), 2)


def test_orders_that_are_too_large_are_refused(reduction):
    columns = factor_plan(Factorization("eigh", (64 * 1024 + 1,) * 2, "float32"), 1, 8, shared=True).columns
    with pytest.raises(reduction.PlanError, match="expected an order up to 65536"):
        reduction.DeviceReduction(columns, 0, np.dtype("float32"), ["me"], 1.0)
