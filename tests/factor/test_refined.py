"""Solutions by factors of few bits, refined: with as many threads as ranks, products as GPUs round them, and LAPACK."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.linalg
from factoring import NarrowKernels, factor_plan, factor_problem, planned, run_factorization
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from proof import check
from residuals import assert_inverse, assert_solution

from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.errors import MatrixError, PlanError, ProjectedMemoryError
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.factor import _memory, plan_factorization
from dask_distmm.programs.check import peak_bytes
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.programs.refine import BACKWARD, FORWARD, TURNS, WAY

TYPES = ["float32", "tf32", "float16", "bfloat16"]
CLASSICAL, GMRES, EXACT = 0, 1, 2


def noise(rng, shape, dtype):
    found = rng.standard_normal(shape)
    return (found + 1j * rng.standard_normal(shape) if dtype[0] == "c" else found).astype(dtype)


def matrix(rng, n, dtype, condition, *, positive=False):
    """A matrix of a condition; a positive definite one is Hermitian to the last bit."""
    u, v = (np.linalg.qr(noise(rng, (n, n), dtype))[0] for _ in range(2))
    a = (u * np.geomspace(1, 1 / condition, n)) @ (u if positive else v).conj().T
    return (a + a.conj().T) / 2 if positive else a


def written(a, op):
    return {"N": a, "T": a.T, "C": a.conj().T}[op]


def run(kind, ranks, width, a, b=None, *, factor_dtype="float32", **options):
    task = Factorization(
        kind, a.shape, a.dtype.name, None if b is None else b.shape, factor_dtype=factor_dtype, **options
    )
    plan = factor_plan(task, ranks, width)
    check([plan.steps(rank) for rank in range(ranks)])
    return run_factorization(plan, a, b, kernels=NarrowKernels())


@given(
    st.sampled_from(TYPES),
    st.sampled_from(["solve", "solve of positive definite", "lstsq", "inv of positive definite"]),
    st.sampled_from("NTC"),
    st.booleans(),
    st.sampled_from(["float64", "complex128"]),
    st.floats(0, 14),
    st.integers(1, 90),
    st.sampled_from([1, 3, 40]),
    st.integers(1, 4),
    st.sampled_from([8, 64]),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_as_good_as_without_for_all_conditions(
    factor_dtype, kind, op, lower, dtype, exponent, n, nrhs, ranks, width, seed
):
    kind, _, positive = kind.partition(" of ")
    # Beyond that lstsq refuses a matrix, and a positive definite one may be none after rounding.
    assume(exponent < (10 if positive or kind == "lstsq" else 14))
    rng = np.random.default_rng(seed)
    a, b = matrix(rng, n, dtype, 10**exponent, positive=bool(positive)), noise(rng, (n, nrhs), dtype)
    options = {"op": op} if kind == "solve" else {}
    given_a = a
    if positive:
        options |= {"assume_a": "pos", "lower": lower}
        # The other triangle is not read.
        read = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
        given_a = np.where(read, a, np.nan)
    found = run(kind, ranks, width, given_a, None if kind == "inv" else b, factor_dtype=factor_dtype, **options)
    x, info = found["x"], found["info"].ravel()
    if kind == "inv":
        assert_inverse(a, x)
    else:
        assert_solution(written(a, options.get("op", "N")), x, b)
    assert info[WAY] in (CLASSICAL, GMRES, EXACT)
    if info[WAY] != EXACT and kind != "inv":
        exact = written(a, options.get("op", "N")).astype("clongdouble" if dtype[0] == "c" else "longdouble")
        residual = abs(b - exact @ x).max()
        rounding = 2 * info[BACKWARD] + n * np.finfo("float64").eps
        assert residual <= rounding * abs(exact).sum(axis=1).max() * abs(x).max(axis=0).max() + 1e-300


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize(
    ("factor_dtype", "exponent", "way"),
    [
        ("float32", 1, CLASSICAL), ("float32", 8, GMRES), ("float32", 12, EXACT), ("tf32", 1, CLASSICAL),
        ("tf32", 4, GMRES), ("tf32", 9, EXACT), ("float16", 1, CLASSICAL), ("float16", 4, GMRES),
        ("bfloat16", 1, CLASSICAL), ("bfloat16", 3, GMRES), ("bfloat16", 8, EXACT),
    ],
)  # fmt: skip
def test_the_way_follows_from_the_condition(factor_dtype, exponent, way, positive):
    rng = np.random.default_rng()
    a, b = matrix(rng, 200, "float64", 10**exponent, positive=positive), noise(rng, (200, 3), "float64")
    if exponent == 8 and not positive:
        exponent, a = 7, matrix(rng, 200, "float64", 3e7)
    options = {"assume_a": "pos"} if positive else {}
    found = run("solve", 2, 32, a, b, factor_dtype=factor_dtype, **options)
    assert_solution(a, found["x"], b)
    info = found["info"].ravel()
    # Near a border it may be the next one.
    assert info[WAY] in ((way,) if way != GMRES else (CLASSICAL, GMRES))
    if way != EXACT:
        # The bound of the error of x, by a solution in higher precision.
        exact = np.linalg.solve(a, b)
        for _ in range(3):
            left = b - (a.astype("longdouble") @ exact.astype("longdouble"))
            exact = exact + np.linalg.solve(a, left.astype("float64"))
        error = (abs(found["x"] - exact).max(axis=0) / abs(exact).max(axis=0)).max()
        assert error <= max(info[FORWARD], 8 * 10**exponent * np.finfo("float64").eps)
        assert 1 <= info[TURNS] <= 40


@pytest.mark.parametrize("op", "NTC")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("nrhs", "exponent"), [(1, 2), (40, 2), (3, 12)])
def test_factors_that_are_given(op, dtype, ranks, nrhs, exponent):
    rng, few = np.random.default_rng(), "complex64" if dtype[0] == "c" else "float32"
    a, b = matrix(rng, 70, dtype, 10**exponent), noise(rng, (70, nrhs), dtype)
    factors, pivots = scipy.linalg.lu_factor(a.astype(few))
    task = Factorization("solve", a.shape, dtype, b.shape, op=op, factor_dtype="float32", has_factors=True)
    plan = factor_plan(task, ranks, 16)
    check([plan.steps(rank) for rank in range(ranks)])
    found = run_factorization(plan, a, pivots[None], factors, b)
    assert_solution(written(a, op), found["x"], b)
    assert (found["info"].ravel()[WAY] == EXACT) == (exponent == 12)
    a = matrix(rng, 70, dtype, 10**exponent / 1e4 if exponent == 12 else 10, positive=True)
    for lower in (True, False):
        factor = scipy.linalg.cholesky(a.astype(few) + 1e-6 * np.eye(70, dtype=few) * (exponent == 12), lower=lower)
        options = {"assume_a": "pos", "lower": lower, "factor_dtype": "float32", "has_factors": True}
        plan = factor_plan(Factorization("solve", a.shape, dtype, b.shape, **options), ranks, 16)
        check([plan.steps(rank) for rank in range(ranks)])
        assert_solution(a, run_factorization(plan, a, factor, b)["x"], b)


@pytest.mark.parametrize("factor_dtype", TYPES)
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_no_element_is_too_large_or_too_small_for_few_bits(factor_dtype, positive, scale):
    rng = np.random.default_rng()
    rows, cols = (np.exp2(rng.integers(-40, 40, 60)) for _ in range(2))
    a = matrix(rng, 60, "float64", 10, positive=positive)
    a *= scale * rows[:, None] * (rows if positive else cols)
    b = noise(rng, (60, 2), "float64") * scale
    options = {"assume_a": "pos"} if positive else {}
    found = run("solve", 2, 16, a, b, factor_dtype=factor_dtype, **options)
    assert_solution(a, found["x"], b)
    assert found["info"].ravel()[WAY] == CLASSICAL


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["solve", "lstsq", "inv"])
def test_errors_are_those_without(ranks, kind):
    rng = np.random.default_rng()
    cases = [np.ones((40, 40)), np.zeros((40, 40)), np.diag(np.arange(40.0)), np.full((40, 40), 1e308)]
    b = None if kind == "inv" else noise(rng, (40, 2), "float64")
    for a in cases:
        texts = []
        for factor_dtype in ("float32", ""):
            with pytest.raises(MatrixError) as error:
                run(kind, ranks, 16, a, b, factor_dtype=factor_dtype)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
    if kind != "lstsq":
        a = np.diag(np.where(np.arange(40) == 30, -1.0, 1.0))
        with pytest.raises(MatrixError, match="leading minor of order 31 is not positive"):
            run(kind, ranks, 16, a, b, assume_a="pos")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_not_finite(ranks, value):
    rng = np.random.default_rng()
    a, b = noise(rng, (40, 40), "float64"), noise(rng, (40, 2), "float64")
    for x, name in ((a, "a"), (b, "b")):
        bad = x.copy()
        bad[20, 1] = value
        with pytest.raises(MatrixError, match=f"^{name} must not contain infs or NaNs"):
            run("solve", ranks, 16, bad if name == "a" else a, bad if name == "b" else b, check_finite=True)
    assert_solution(a * 1e305, run("solve", ranks, 16, a * 1e305, b, check_finite=True)["x"], b)


@given(
    st.integers(1, 70),
    st.sampled_from([1, 2, 8, 64]),
    st.booleans(),
    st.booleans(),
    st.sampled_from("NTC"),
    st.sampled_from(["float64", "complex128"]),
    st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_solves_with_inverses_of_blocks(n, size, lower, unit, op, dtype, seed):
    """The other triangle is not read."""
    rng, kernels = np.random.default_rng(seed), ProgramKernels(LapackKernels())
    factors, b = (
        np.asfortranarray(noise(rng, (n, n), dtype) / n + np.eye(n)),
        np.asfortranarray(noise(rng, (n, 3), dtype)),
    )
    inverses, x = kernels.empty((size, -(-n // size) * size), np.dtype(dtype), tall=False), b.copy(order="F")
    kernels.invert_blocks(factors, inverses, lower=lower, unit=unit)
    kernels.solve_whole(factors, inverses, x, lower=lower, op=op, unit=unit)
    expected = scipy.linalg.solve_triangular(factors, b, "NTC".index(op), lower=lower, unit_diagonal=unit)
    np.testing.assert_allclose(x, expected, rtol=1e-10, atol=1e-10)


def test_zeros_on_the_right():
    rng = np.random.default_rng()
    a, b = noise(rng, (40, 40), "float64"), noise(rng, (40, 3), "float64")
    b[:, 1] = 0
    x = run("solve", 2, 8, a, b)["x"]
    assert_solution(a, x, b)
    assert not x[:, 1].any()


@given(
    st.sampled_from(["solve", "lstsq", "inv"]),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from(["numpy", "peer"]),
)
@settings(max_examples=60, deadline=None)
def test_programs_are_right(kind, positive, n, nrhs, ranks, width, engine):
    options = {"assume_a": "pos"} if positive and kind != "lstsq" else {}
    task = Factorization(
        kind, (n, n), "float64", None if kind == "inv" else (n, nrhs), factor_dtype="float32", **options
    )
    plan = factor_plan(task, ranks, width, engine=engine)
    check([plan.steps(rank) for rank in range(ranks)])


@given(st.booleans(), st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(8, 64))
@settings(max_examples=40, deadline=None)
def test_memory_is_as_projected(positive, n, nrhs, ranks, width):
    options = {"assume_a": "pos"} if positive else {}
    task = Factorization("solve", (n, n), "float64", (n, nrhs), factor_dtype="float32", **options)
    plan = factor_plan(task, ranks, width)
    projected = _memory(plan)
    for rank, index in enumerate(plan.ranks):
        # Factors of few bits are in the memory of A itself, which the list has twice.
        held = peak_bytes(plan.steps(rank)) - plan.exact * n * plan.columns.local_cols(rank) * 4
        held += sum(int(plan.problem[x].elements[plan.where[x] == index].sum()) * 8 for x in plan.problem.operands)
        assert held <= projected[index] + 64 * (n + 16) + 2 * plan.columns.rows * plan.width * 8


def planned_here(n, nrhs, limit=10**12, workers=2, method="auto"):
    task = Factorization("solve", (n, n), "float64", (n, nrhs), factor_dtype="float32")
    problem = factor_problem(task, method=method)
    where = {one.name: np.arange(one.count, dtype=np.int32) % workers for one in problem.matrices}
    roster = [Worker(f"w{number}", memory_limit=limit) for number in range(workers)]
    return plan_factorization(problem, roster, where, engine="numpy")


def test_what_is_gone_without_where_there_is_less_memory():
    """First each rank's own copy of all factors, then the memory to factorize A itself."""
    n, found = 4000, []
    # Chunks are cut anew for each plan.
    for _ in range(5):
        plan = planned_here(n, 2, method="columns")
        problem, where, needed = plan.problem, plan.where, []
        for exact, whole in ((True, True), (True, False), (False, False)):
            assert (plan.exact, plan.whole) == (exact, whole)
            needed.append(max(plan.projected_bytes.values()))
            limit = int((needed[-1] - 1) / problem.options.limit_fraction)
            roster = [Worker(f"w{number}", memory_limit=limit) for number in range(2)]
            if exact:
                plan = plan_factorization(problem, roster, where, engine="numpy")
        found.append([before - after for before, after in itertools.pairwise(needed)])
    assert min(all_factors for all_factors, _ in found) > 4 * n * n * 0.9
    assert min(itself for _, itself in found) > n * n * 8 / 2 / 2 * 0.9
    with pytest.raises(ProjectedMemoryError):
        planned_here(n, 1, 10**6)


def test_no_memory_for_another_way():
    rng = np.random.default_rng()
    a, b = matrix(rng, 60, "float64", 1e13), noise(rng, (60, 1), "float64")
    plan = factor_plan(Factorization("solve", a.shape, "float64", b.shape, factor_dtype="float32"), 2, 16)
    plan = dataclasses.replace(plan, exact=False)
    check([plan.steps(rank) for rank in range(2)])
    with pytest.raises(MatrixError, match="too ill-conditioned for factors of factor_dtype"):
        run_factorization(plan, a, b)
    a = matrix(rng, 60, "float64", 10)
    assert_solution(a, run_factorization(plan, a, b)["x"], b)


@pytest.mark.parametrize(
    ("engine", "factor_dtype", "message"),
    [
        ("numpy", "tf32", "engine 'numpy' has no factors of tf32; it has 'float32'"),
        ("nccl", "float32", "engine 'nccl' has no factors of float32: leave it out"),
    ],
)
def test_engines_say_which_factors_they_have(engine, factor_dtype, message):
    task = Factorization("solve", (40, 40), "float64", (40, 1), factor_dtype=factor_dtype)
    with pytest.raises(PlanError, match=message):
        planned(task, 2, engine=engine)


def test_bad_options():
    for options, message in (
        ({"factor_dtype": "int8"}, "factor_dtype='int8'; expected one of"),
        ({"kind": "qr", "b_shape": None, "factor_dtype": "float32"}, "qr has no option factor_dtype"),
        ({"kind": "lstsq", "a_shape": (40, 30), "factor_dtype": "float32"}, "factor_dtype is for square matrices"),
    ):
        given_options = {"kind": "solve", "a_shape": (40, 40), "dtype": "float64", "b_shape": (40, 1)} | options
        with pytest.raises(PlanError, match=message):
            Factorization(**given_options)


def test_costs_of_both_ways():
    """Few bits pay where the factorization is most of the work, not where solutions are."""
    few, many = (planned_here(8000, nrhs) for nrhs in (1, 8000))
    assert few.estimate.seconds < 0.75 * few.plain.seconds
    assert many.estimate.seconds > many.plain.seconds
    assert "without factor_dtype: " in repr(few)
    assert "else factors in float64" in repr(few)
