"""Functions of ``dask.array.linalg`` and ``np.linalg`` under ``enable()``: the same meaning, and what Dask can't do."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import assert_near, positive, problem_of
from residuals import (
    assert_cholesky,
    assert_eigh,
    assert_least_squares,
    assert_lu,
    assert_qr,
    assert_solution,
    assert_svd,
)
from routed_calls import CALLS, about, operands
from run_events import newest_run, runs_after

import dask_distmm
from dask_distmm.arrays import dispatch
from dask_distmm.arrays.linalg import routed as routed_functions
from dask_distmm.config import DaskCosts, read_options
from dask_distmm.planning import NamedMatrix, Worker
from dask_distmm.planning.factor import FactorProblem
from dask_distmm.planning.planner import run_overhead, tasks_estimate
from dask_distmm.programs.factorizations import Factorization

COSTS = DaskCosts(0.01, 0.00015, 0.01, 0.0005)


def cut(x, *chunks):
    return da.from_array(x, chunks=chunks)


def random(*shape):
    return np.random.default_rng().standard_normal(shape)


@pytest.fixture
def routed(inproc_client):
    """Enabled; returns a function that computes, and says how many runs that took."""

    def compute(*arrays):
        before = newest_run(inproc_client)
        found = dask.compute(*arrays)
        return runs_after(inproc_client, before), *found

    # What is around a function may be a run of its own.
    with dask.config.set({"distmm.regions": False}), dask_distmm.enabled():
        yield compute


def test_pivots_come_from_the_whole_column(routed):
    """Stock Dask says that this matrix is singular."""
    a = np.roll(np.eye(20), 10, axis=0) + random(20, 20) * 1e-9
    runs, p, low, up = routed(*da.linalg.lu(cut(a, 10, 10)))
    assert runs == 1
    assert_lu(a, low, up, p.argmax(axis=1))
    b = random(20)
    for function, expected in ((da.linalg.solve, 1), (np.linalg.solve, 0)):
        runs, x = routed(function(cut(a, 10, 10), cut(b, 10)))
        assert runs == expected
        assert_solution(a, x[:, None], b[:, None])


@pytest.mark.parametrize("name", ["det", "eig", "eigh", "eigvalsh", "inv", "slogdet", "solve"])
def test_numpys_functions_of_small_matrices_take_a_task_and_of_larger_ones_a_run(routed, name):
    function = getattr(np.linalg, name)
    for order, runs in ((23, 0), (520, 1)):
        a = np.eye(order) + random(order, order) / (9 * order)
        operands = ((a + a.T) / 2, random(order)) if name == "solve" else ((a + a.T) / 2,)
        made = function(*(cut(x, *[order // 2] * x.ndim) for x in operands))
        taken, *found = routed(*(made if isinstance(made, tuple) else (made,)))
        assert taken == runs
        if name in ("eig", "eigh"):
            w, v = found
            assert np.linalg.norm(operands[0] @ v - v * w) < 1e-12 * order
            continue
        expected = function(*operands)
        for x, y in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def test_numbers_are_scalars(routed):
    """As stock Dask's, they may be keys of a dict; a 0-d array may not."""
    a = np.eye(40) + random(40, 40) / 99
    x, tall = cut(a, 20, 20), cut(random(600, 7), 150, 7)
    with dask.config.set({"distmm.minimum-flops": 0}):
        lazy = [np.linalg.det(x), *np.linalg.slogdet(x), np.linalg.cond(x), da.linalg.lstsq(tall, tall[:, 0])[2]]
    runs, *numbers = routed(*lazy)
    assert runs
    assert [type(number) for number in numbers] == [np.float64] * 4 + [np.int64]
    expected = np.linalg.det(a), *np.linalg.slogdet(a), np.linalg.cond(a), 7
    np.testing.assert_allclose(numbers, expected, rtol=1e-10)
    assert type(dask_distmm.linalg.det(x).compute(scheduler="sync")) is np.float64
    assert np.linalg.cond(cut(np.diag([2.0, 0.0]), 1, 2)).compute() == np.inf


def test_covariances(routed):
    x = random(8, 600)
    for function in (da.cov, da.corrcoef, np.cov, np.corrcoef):
        with dask.config.set({"distmm.minimum-flops": 0}):
            made = function(cut(x, 3, 150))
        assert made.chunks == ((3, 3, 2), (3, 3, 2))
        runs, found = routed(made)
        assert runs == 1
        np.testing.assert_allclose(found, getattr(np, function.__name__)(x), atol=1e-13)
    with dask.config.set({"distmm.minimum-flops": 0}):
        weighted, both = da.cov(cut(x, 3, 150), fweights=np.ones(600, int)), np.cov(cut(x, 3, 150), cut(x, 3, 150))
    np.testing.assert_allclose(weighted.compute(), np.cov(x), atol=1e-13)
    np.testing.assert_allclose(both.compute(), np.cov(x, x), atol=1e-13)


# SciPy, which Dask calls.
@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore:Calling .* with arguments of dtype=bool:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wide", [False, True])
def test_random_projections_are_dasks(routed, dtype, wide):
    """One run with the random vectors, the chunks and the signs of stock Dask's; also of fewer rows than columns."""
    a = (random(4000, 30) * np.arange(30, 0, -1)).astype(dtype)
    x, seed = (cut(a.T, 7, 4000) if wide else cut(a, 500, 30)).persist(), int(np.random.default_rng().integers(2**31))
    for options in ({}, {"n_power_iter": 1}, {"iterator": "QR", "n_power_iter": 2}, {"coerce_signs": False}):
        with dask.config.set({"distmm.enabled": False}):
            lazy = da.linalg.svd_compressed(x, 4, seed=seed, **options)
            expected = dask.compute(*lazy)
        with dask.config.set({"distmm.minimum-flops": 0}):
            made = da.linalg.svd_compressed(x, 4, seed=seed, **options)
        assert [one.chunks for one in made] == [one.chunks for one in lazy]
        runs, *found = routed(*made)
        assert runs == 1
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            same = np.asarray if options.get("coerce_signs", True) else abs
            np.testing.assert_allclose(same(one), same(other), atol=2e3 * np.finfo(dtype).eps * abs(other).max())
    # A generator goes on where the last call left it.
    for generator in (da.random.default_rng, da.random.RandomState):
        ours, theirs = generator(seed), generator(seed)
        for _ in range(2):
            with dask.config.set({"distmm.enabled": False}):
                expected = da.linalg.svd_compressed(x, 4, seed=theirs)[1].compute()
            with dask.config.set({"distmm.minimum-flops": 0}):
                made = da.linalg.svd_compressed(x, 4, seed=ours)[1]
            assert problem_of(made).builder == "svd_compressed"
            np.testing.assert_allclose(made.compute(), expected, rtol=2e3 * np.finfo(dtype).eps)


# SciPy 1.18 deprecates what Dask's functions pass on to it.
@pytest.mark.filterwarnings("ignore:Calling .* with arguments of dtype=bool:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16"])
@pytest.mark.parametrize("function", [da.linalg.solve, da.linalg.solve_triangular, np.linalg.solve])
def test_narrow_integers_stay_dasks(function, dtype):
    """It returns float32 for them, or float64, as SciPy's function of one chunk does."""
    a, b = cut(np.eye(20).astype(dtype), 10, 10), cut(np.ones(20, dtype), 10)
    expected = function(a, b).dtype
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        assert function(a, b).dtype == expected


@pytest.mark.parametrize("uplo", ["L", "u"])
def test_eigenvalues(routed, uplo):
    """Stock Dask gathers the matrix in this process, and returns NumPy arrays."""
    s = positive(30)
    given = np.tril(s) if uplo == "L" else np.triu(s)
    found = np.linalg.eigh(cut(given, 11, 13), UPLO=uplo)
    assert isinstance(found.eigenvalues, da.Array)
    runs, w, v = routed(*found)
    assert runs == 1
    assert_eigh(s, w, v)
    np.testing.assert_allclose(routed(np.linalg.eigvalsh(cut(given, 11, 13), uplo))[1], w)
    stacked = np.linalg.eigvalsh(da.ones((2, 3, 3), chunks=1))
    np.testing.assert_allclose(stacked, [[0, 0, 3]] * 2, atol=1e-12)


def test_singular_values_of_any_chunks(routed):
    a = random(40, 30)
    for x in (cut(a, 15, 20), cut(a.T, 15, 20)):
        _, u, s, vh = routed(*da.linalg.svd(x))
        assert_svd(x.compute(), u, s, vh)
    _, u, s, vh = routed(*da.linalg.svd(cut(a, 15, 20), full_matrices=False))
    assert_svd(a, u, s, vh)
    assert [x.shape for x in routed(*da.linalg.svd(cut(a, 15, 20), full_matrices=True))[1:]] == [
        (40, 40),
        (30,),
        (30, 30),
    ]
    for chunks in ((40, 20), (10, 30)):
        assert routed(*da.linalg.svd(cut(a, *chunks)))[0] == 0, "Dask's own"


@pytest.mark.parametrize("wide", [True, False])
def test_signs_of_singular_vectors_are_dasks(routed, wide):
    """One run of a matrix in chunks of rows, or of columns."""
    a = random(600, 20) * np.geomspace(1, 9, 20)
    x = (cut(a, 100, 20).T if wide else cut(a, 100, 20)).persist()
    with dask.config.set({"distmm.enabled": False}):
        lazy = da.linalg.svd(x)
        expected = dask.compute(*lazy)
    with dask.config.set({"distmm.minimum-flops": 0}):
        made = da.linalg.svd(x)
    assert [one.chunks for one in made] == [one.chunks for one in lazy]
    runs, *found = routed(*made)
    assert runs == 1
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12 * abs(other).max())


def test_chunks_that_dask_refuses(routed):
    a, s, b = random(40, 30), positive(30), random(40)
    runs, q, r = routed(*da.linalg.qr(cut(a, 15, 20)))
    assert runs == 1
    assert_qr(a, q, r)
    assert_cholesky(s, routed(da.linalg.cholesky(cut(s, 7, 30), lower=True))[1], lower=True)
    runs, x, residuals, rank, values = routed(*da.linalg.lstsq(cut(a, 15, 20), cut(b, 15)))
    assert runs == 1
    assert_least_squares(a, x[:, None], b[:, None])
    expected = np.linalg.lstsq(a, b)
    np.testing.assert_allclose(residuals, expected[1])
    assert residuals.shape == (1,)
    assert rank == 30
    np.testing.assert_allclose(values, expected[3])
    x, residuals, rank, values = dask.compute(*da.linalg.lstsq(cut(a.T, 15, 20), cut(b[:30], 30)))
    expected = np.linalg.lstsq(a.T, b[:30])
    assert_near(x, expected[0])
    np.testing.assert_allclose(values, expected[3])
    assert (residuals.shape, rank) == ((0,), 30)
    for size in (5, 30):
        x = routed(da.linalg.solve_triangular(cut(s, 7, 30), cut(b[:30], size), True))[1]
        assert_solution(np.tril(s), x[:, None], b[:30, None])


def test_options_of_numpy(routed):
    a, s = random(30, 20), positive(20)
    assert_cholesky(s, routed(np.linalg.cholesky(cut(s, 10, 10), upper=False))[1], lower=True)
    assert_cholesky(s, routed(np.linalg.cholesky(cut(s, 10, 10), upper=True))[1], lower=False)
    np.testing.assert_allclose(abs(routed(np.linalg.qr(cut(a, 10, 10), mode="r"))[1]), abs(np.linalg.qr(a, mode="r")))
    x = routed(np.linalg.lstsq(cut(a, 10, 10), cut(a[:, 0], 10), rcond=None)[0])[1]
    np.testing.assert_allclose(x, np.eye(20)[0], atol=1e-12)


def test_determinants_are_lazy(routed):
    a = random(20, 20)
    sign, logarithm = np.linalg.slogdet(cut(a, 10, 7))
    determinant = np.linalg.det(cut(a, 10, 7))
    assert all(isinstance(x, da.Array) for x in (sign, logarithm, determinant))
    np.testing.assert_allclose(routed(sign, logarithm)[1:], np.linalg.slogdet(a))
    np.testing.assert_allclose(routed(determinant)[1], np.linalg.det(a))
    assert isinstance(np.linalg.slogdet(cut(a, 10, 7)), type(np.linalg.slogdet(a)))
    # Of stacks, and the pseudo-inverse, which may be of a deficient matrix.
    np.testing.assert_array_equal(routed(np.linalg.det(da.ones((3, 2, 2))))[1], np.zeros(3))
    np.testing.assert_array_equal(routed(np.linalg.pinv(cut(a * 0, 10, 10)))[1], np.zeros((20, 20)))


def test_work_that_dask_does_as_well_is_left(routed):
    s, a = positive(20), random(40, 5)
    low = da.linalg.cholesky(cut(s, 20, 20), lower=True)
    x = da.linalg.solve_triangular(low, cut(s, 20, 10), lower=True)
    assert routed(low, x, *da.linalg.lu(cut(s, 20, 20)), *da.linalg.qr(cut(a, 40, 5)))[0] == 0
    assert routed(da.linalg.lstsq(cut(a * 0 + 1, 10, 5), cut(a[:, 0], 10))[2])[1] == 1
    with dask.config.set({"distmm.minimum-flops": 0}):
        assert routed(da.linalg.cholesky(cut(s, 20, 20)))[0] == 1
        assert routed(*da.linalg.qr(cut(random(20, 15), 10, 15)))[0] == 1
        with dask.config.set({"distmm.minimum-flops": 1e9}):
            assert routed(da.linalg.cholesky(cut(s, 10, 10)))[0] == 0
    # Large blocks in few tasks, and small ones in many.
    large, small = da.ones((40_000, 40_000), chunks=10_000), da.ones((4_000, 4_000), chunks=200)
    assert da.linalg.solve_triangular(large, large[0]).name.startswith("solve-triangular-")
    assert da.linalg.cholesky(small).name.endswith("-u")


def test_too_little_memory_is_no_error_where_dask_may_do_it(client):
    a = da.ones((100_000, 100_000), chunks=20_000)
    with dask_distmm.enabled():
        assert da.linalg.solve_triangular(a, a[0]).name.startswith("solve-triangular-")
        with pytest.raises(dask_distmm.ProjectedMemoryError):
            da.linalg.lu(a[:70_000, :70_000])
        assert da.linalg.lu(a)[0].name.startswith("lu-p-")
        with (
            dask.config.set({"distmm.memory.exceeded": "raise"}),
            pytest.raises(dask_distmm.ProjectedMemoryError, match="may hold"),
        ):
            da.linalg.solve_triangular(a, a[0])
        with dask.config.set({"distmm.memory.exceeded": "hope"}), pytest.raises(dask_distmm.PlanError, match="'hope'"):
            da.linalg.solve_triangular(a, a[0])


def test_results_are_as_dask_makes_them(inproc_client):
    s, b = positive(20).astype("float32"), random(20).astype("float32")
    calls = (
        lambda: da.linalg.lu(cut(s, 10, 10)),
        lambda: (da.linalg.inv(cut(s, 10, 10)),),
        lambda: (da.linalg.solve(cut(s, 10, 10), cut(b, 10)),),
        lambda: (da.linalg.solve(cut(s, 10, 10), cut(s, 10, 5), assume_a="pos"),),
        lambda: (da.linalg.solve_triangular(cut(s, 10, 10), cut(b, 10), lower=True),),
        lambda: (da.linalg.cholesky(cut(s, 10, 10)),),
        lambda: da.linalg.qr(cut(random(40, 5), (11, 9, 20), 5)),
        lambda: da.linalg.qr(cut(random(40, 5), 4, 5)),
    )
    for call in calls:
        expected = call()
        with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
            found = call()
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.name != theirs.name
            assert (mine.shape, mine.chunks, mine.dtype) == (theirs.shape, theirs.chunks, theirs.dtype)
        for mine, theirs in zip(dask.compute(*found), dask.compute(*expected), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def test_chunks_that_dask_leaves_in_the_wrong_type(routed):
    a = np.diag([4, 9, 16, 25]) + 1
    with dask.config.set({"distmm.enabled": False}):
        low = da.linalg.cholesky(cut(a, 2, 2), lower=True)
    assert low.blocks[0, 1].compute().dtype == int
    with dask.config.set({"distmm.minimum-flops": 0}):
        x = da.linalg.solve_triangular(low, cut(np.ones(4), 2), lower=True)
        runs, x, product = routed(x, low @ low.T)
    assert runs > 1
    np.testing.assert_allclose(product, a)
    np.testing.assert_allclose(x, np.linalg.solve(np.linalg.cholesky(a), np.ones(4)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: da.linalg.lu(da.ones(3, chunks=2)),
        lambda: da.linalg.solve(da.ones((4, 4), chunks=2), da.ones(3, chunks=2)),
        lambda: da.linalg.solve(da.ones((4, 4), chunks=2), da.ones(4, chunks=2), assume_a="nonsense"),
        lambda: da.linalg.cholesky(da.ones(4, chunks=2)),
        lambda: np.linalg.qr(da.ones((4, 4), chunks=2), mode="nonsense"),
    ],
)
def test_mistakes_are_dasks_own(routed, call):
    with pytest.raises(Exception) as ours:  # noqa: PT011 - the type is what is compared
        call()
    with dask.config.set({"distmm.enabled": False}), pytest.raises(Exception) as daskss:  # noqa: PT011
        call()
    # Products inside of Dask's functions may have an error of ours, which is a ValueError, too.
    assert isinstance(ours.value, type(daskss.value))


def test_without_a_cluster_what_dask_does_right_is_dasks():
    s = positive(20)
    with dask_distmm.enabled(), dask.config.set({"scheduler": "sync", "distmm.minimum-flops": 0}):
        assert "cholesky-" in da.linalg.cholesky(cut(s, 10, 10)).name
        a = np.roll(np.eye(20), 10, axis=0)
        np.testing.assert_allclose(da.linalg.inv(cut(a, 10, 10)).compute(), a.T)
        x = da.linalg.solve(cut(s, 10, 7), cut(s[0], 3)).compute()
        np.testing.assert_allclose(x, np.eye(20)[0], atol=1e-14)


def _uneven(size):
    return (size // 3, 1, size - size // 3 - 1) if size > 2 else size


CUTS = {"even": lambda size: size // 4 if size % 4 == 0 else size, "uneven": _uneven, "single": lambda size: -1}
# Where a name of NumPy's means what it means there, and where stock Dask says another type than its result has.
OTHERWISE = {("np.linalg.inv", "float32")}


@pytest.mark.cases(3)
@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning", "ignore::FutureWarning", "ignore:overflow")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("cluster", [True, False])
def test_chunks_types_and_metas_are_those_of_stock_dask(cluster, cut, request):
    """Of small operands and large ones, taken by what they cost and in any case."""
    if cluster:
        request.getfixturevalue("inproc_client")
    compared = set()
    for order, tall in ((24, (96, 8)), (520, (4000, 24))):
        dtype = str(np.random.default_rng().choice(["float32", "float64", "int64"]))
        x = operands(order, tall, CUTS[cut], dtype)
        for name, call in CALLS.items():
            try:
                with dask.config.set({"distmm.enabled": False, "scheduler": "sync"}):
                    expected = call(x)
            except (TypeError, ValueError, NotImplementedError):
                continue
            if (name, dtype) in OTHERWISE or not about(expected):
                continue
            for least in (None, 0):
                with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": least}):
                    found = call(x)
                assert isinstance(found, type(expected)), name
                assert about(found) == about(expected), (name, dtype, least)
            compared.add(name)
    assert len(compared) > 25


def test_the_table_of_calls_has_all_functions_that_are_routed():
    names = {f"da.linalg.{name}" for name in routed_functions.DASKS} | {f"da.{x}" for x in routed_functions.STATISTICS}
    for function in dispatch._OURS:
        module = "np.linalg" if function in vars(np.linalg).values() else "np"
        names.add(f"{module}.{function.__name__}")
    assert names <= {name.split()[0] for name in CALLS}


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning", "ignore::FutureWarning")
def test_residuals_and_solutions_go_with_their_operands():
    x = operands(24, (96, 8), _uneven)
    with dask_distmm.enabled():
        residuals = da.linalg.lstsq(x.tall, x.targets)[1]
        assert residuals.chunks == x.targets.chunks[1:]
        solution = np.linalg.solve(x.square, x.b)
        np.testing.assert_allclose(da.map_blocks(np.subtract, solution, x.b).compute(), (solution - x.b).compute())


@given(st.sampled_from(["cholesky", "solve", "solve_triangular", "qr"]), st.integers(1, 30), st.integers(1, 64))
def test_costs_grow_with_the_work(kind, blocks, workers):
    def problem(blocks, size):
        rows, cols = (size,) * blocks, (size,) if kind == "qr" else (size,) * blocks
        b = None if kind in ("cholesky", "qr") else (size * blocks, 1)
        options = {"assume_a": "pos"} if kind == "solve" else {}
        task = Factorization(kind, (sum(rows), sum(cols)), "float64", b, **options)
        chunks = {"a": (rows, cols)} if b is None else {"a": (rows, cols), "b": (rows, (1,))}
        matrices = tuple(NamedMatrix(name, sizes, "float64") for name, sizes in chunks.items())
        return FactorProblem(name="x", task=task, matrices=matrices, wanted=(), options=read_options())

    machine = read_options().machine("numpy")
    roster = [Worker(str(i)) for i in range(workers)]
    seconds = tasks_estimate(problem(blocks, 100), roster, machine, COSTS).seconds
    assert COSTS.start < seconds < tasks_estimate(problem(blocks, 200), roster, machine, COSTS).seconds
    assert seconds < tasks_estimate(problem(blocks + 1, 100), roster, machine, COSTS).seconds
    assert COSTS.run < run_overhead(problem(blocks, 100), COSTS) < run_overhead(problem(blocks + 1, 100), COSTS)
