"""Arguments of `dask_distmm.linalg`: names, places, defaults and results of NumPy and SciPy; all else is an error."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path

import dask
import dask.array as da
import ml_dtypes  # noqa: F401 - np.dtype knows bfloat16 then
import numpy as np
import pytest
import scipy.linalg
from matrices import assert_near, lazy, positive, random
from test_docs import load

import dask_distmm
from dask_distmm import PlanError, explain, linalg, matmul
from dask_distmm.errors import NotSquareError

ARGUMENTS = load(Path(__file__).parent.parent / "docs" / "make_arguments.py")
FUNCTIONS = ARGUMENTS.functions()
N = 12
# These have one right-hand side.
ITERATIVE = ("cg", "gmres", "lsmr", "lsqr", "minres")


def operands(name):
    """Return operands that a function takes."""
    a, b = lazy(positive(N)), lazy(random((N, 3)))
    if name in ("cho_solve", "lu_solve"):
        return ((a, True) if name == "cho_solve" else (a, da.arange(N))), b
    if name == "svd_compressed":
        return a, 2
    if name == "ridge":
        return a, b, 1.0
    if name in ("solve_banded", "solveh_banded"):
        return (((1, 1),) if name == "solve_banded" else ()) + (a[:3], b)
    if name == "solve_toeplitz":
        return a[0], b
    if name == "lobpcg":
        return a, lazy(random((N, 2)))
    if name in ITERATIVE:
        return a, b[:, 0]
    if name == "matrix_power":
        return a, 2
    if name == "multi_dot":
        return ([a, b],)
    if "x2" in ARGUMENTS.parameters(FUNCTIONS[name]):
        return (a[0], a[1]) if name == "outer" else (b, b) if name == "cross" else (a, a[0])
    return (a, b) if "b" in ARGUMENTS.by_place(ARGUMENTS.parameters(FUNCTIONS[name])) else (a,)


def test_places_and_defaults_are_those_of_the_namesake():
    for name, function in FUNCTIONS.items():
        ours, others = ARGUMENTS.parameters(function), ARGUMENTS.namesakes(name)
        first = next((library for library in others if library != "Dask"), None)
        if first is None:
            continue
        places, theirs = ARGUMENTS.by_place(ours), ARGUMENTS.by_place(others[first])
        if ours[places[0]].kind is others[first][theirs[0]].kind:
            assert places[0] == theirs[0], name
        assert places[1:] == theirs[1 : len(places)], name
        for one in ours:
            theirs = next((found[one] for found in others.values() if one in found), None)
            # None stands for the default of the other name that an argument has.
            if theirs is not None and ours[one].default is not None:
                assert ours[one].default == theirs.default, (name, one)


@pytest.mark.parametrize("name", sorted(ARGUMENTS.TABLES))
def test_the_page_has_the_table(name):
    found = ARGUMENTS.between(ARGUMENTS.PAGE.read_text(), name)[1]
    expected = ARGUMENTS.TABLES[name]()
    if name == "arguments" and found.partition("\n")[0] != expected.partition("\n")[0]:
        pytest.skip("the page is for other versions of the libraries")
    # Where this fails signatures or costs have changed since: run docs/make_arguments.py.
    assert found == expected


def test_unknown_options_are_errors():
    known = {one for function in FUNCTIONS.values() for one in inspect.signature(function).parameters}
    known |= {one for name in FUNCTIONS for found in ARGUMENTS.namesakes(name).values() for one in found}
    known |= set(inspect.signature(matmul).parameters) | {"enginee", "nonsense"}
    for name, function in FUNCTIONS.items():
        arrays = operands(name)
        for wrong in known - inspect.signature(function).parameters.keys():
            with pytest.raises(TypeError, match=rf"^{name}\(\) has no option '{wrong}'"):
                function(*arrays, **{wrong: None})
        if "method" in inspect.signature(function).parameters and name not in ("gram", "symm", "trmm"):
            with pytest.raises(TypeError, match="did you mean 'method'"):
                function(*arrays, methods="local")
        with pytest.raises(TypeError, match=rf"{name}\(\) (takes|missing)"):
            function()
        with pytest.raises(TypeError, match=rf"{name}\(\) takes .* positional argument"):
            function(*arrays, *[None] * 20)


def test_wrong_values_are_errors():
    wrong = ("nonsense", 2.5j, object(), [None], True, 7, -1.5, lazy(random((3, 3))))
    for name, function in FUNCTIONS.items():
        arrays = operands(name)
        for one, parameter in list(inspect.signature(function).parameters.items())[len(arrays) :]:
            kind = str(parameter.annotation)
            if one == "b":
                continue
            allowed = (
                (bool,) * ("bool" in kind) + (int,) * ("int" in kind.replace("Literal['N', 'T', 'C', 0, 1, 2]", ""))
                + (int, float) * ("float" in kind) + (str,) * (kind == "str")
            )  # fmt: skip
            for value in wrong:
                if type(value) in allowed or (one == "workers" and isinstance(value, int) and value is not True):
                    continue
                if one in ("engine", "workers") and isinstance(value, str):
                    continue
                with pytest.raises(PlanError, match=rf"^{name}\(\): .*{one}"):
                    function(*arrays, **{one: value})
        if "engine" not in inspect.signature(function).parameters:
            continue
        with pytest.raises(PlanError, match="unknown engine 'cuda'|no engine="):
            function(*arrays, engine="cuda")
        with pytest.raises(PlanError, match="workers=0|no workers="):
            function(*arrays, workers=0)
    a = lazy(positive(N))
    for call, message in (
        (lambda: linalg.eigh(a, "X"), r"eigh\(\): unknown UPLO 'X'"),
        (lambda: linalg.eigh(a, a), r"UPLO must be 'L' or 'U' or 'l' or 'u', got dask.array"),
        (lambda: linalg.eigh(a, lower="L"), "lower must be True or False or None, got 'L'"),
        (lambda: linalg.eigh(a, "U", lower=True), "two names"),
        (lambda: linalg.cholesky(a, upper=True, lower=False), "two names"),
        (lambda: linalg.pinv(a, 1e-3, rtol=1e-3), "two names"),
        (lambda: linalg.matrix_rank(a, 1e-3, rtol=1e-3), "two limits"),
        (lambda: linalg.solve_triangular(a, a, True), "trans must be"),
        (lambda: linalg.qr(lazy(random((90, 3))), "reducd"), "unknown mode 'reducd': did you mean 'reduced'"),
        (lambda: linalg.qr(lazy(random((90, 3))), method="rows", engine="nccl"), "is not for a program"),
        (lambda: linalg.cholesky(a, method="rows"), "method='rows' is for"),
        (lambda: linalg.norm(a, "fro", engine="numpy"), "ord='fro' here is computed by Dask's tasks"),
        (lambda: linalg.norm(a, axis=0, method="local"), "which have no method="),
        (lambda: linalg.norm(a, axis=5), r"norm\(\): axis 5 is out of bounds"),
        (lambda: linalg.lu(a, engine="cublasmp"), "'cublasmp' is not for a factorization"),
        (lambda: linalg.gram(a, engine="nccl"), "'nccl' is not for a product"),
        (lambda: matmul(a, a, engine="nccl"), "is not for a product"),
        (lambda: explain(a, a, engine="nccl", workers=2), "is not for a product"),
        (lambda: linalg.svd(lazy(random((9, 3))), method="columns"), "pass full_matrices=False"),
    ):
        with pytest.raises(PlanError, match=message):
            call()
    for function in (linalg.inv, linalg.det, linalg.slogdet, linalg.cholesky, linalg.eigh, linalg.lu_solve):
        wide = lazy(random((4, 6)))
        with pytest.raises(np.linalg.LinAlgError, match=rf"^{function.__name__}\(\): a must be square, got 4 x 6"):
            function(*(((wide, da.arange(4)), wide) if function is linalg.lu_solve else (wide,)))
    with dask.config.set({"distmm.engine": "nccl"}):
        assert explain(a, a, workers=2).engine == "numpy"


def close(mine, theirs):
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-9)
    assert np.shape(mine) == np.shape(theirs)


def test_results_are_those_of_the_namesake():
    a, s, tall, b, v = random((N, N)), positive(N), random((40, 7)), random((N, 3)), random(N)
    x, y, t = lazy(a), lazy(s), lazy(tall)
    numpys, scipys = np.linalg, scipy.linalg
    with dask.config.set(scheduler="sync"):
        for name, array, matrix, options in (
            ("lu", x, a, {}),
            ("lu", x, a, {"permute_l": True}),
            ("lu", x, a, {"p_indices": True}),
            ("lu", t, tall, {"permute_l": True, "p_indices": True}),
            ("lu_factor", x, a, {}),
            ("polar", t, tall, {"side": "left"}),
        ):
            theirs = getattr(scipys, name)(matrix, **options)
            for one, other in zip(dask.compute(*getattr(linalg, name)(array, **options)), theirs, strict=True):
                close(one, other)
        close(linalg.lu(x, True)[0], scipys.lu(a, True)[0])
        factor, right = linalg.cho_factor(y, True), lazy(b)
        close(np.tril(factor[0]), np.tril(scipys.cho_factor(s, True)[0]))
        close(linalg.cho_solve(factor, right), scipys.cho_solve(scipys.cho_factor(s, True), b))
        pivoted = scipys.lu_factor(a)
        for trans, right in itertools.product((0, 1, 2, "N", "T", "C"), (b, v)):
            op = {"N": 0, "T": 1, "C": 2}.get(trans, trans)
            close(
                linalg.lu_solve(linalg.lu_factor(x), lazy(right), trans),
                scipys.lu_solve(pivoted, right, op),
            )
            close(linalg.solve_triangular(y, lazy(right), trans, True), scipys.solve_triangular(s, right, op, True))
            close(linalg.solve_triangular(y, lazy(right), trans), scipys.solve_triangular(s, right, op))
        c = a + 1j * random((N, N))
        close(linalg.lu_solve(linalg.lu_factor(lazy(c)), lazy(b), 2), scipys.solve(c.conj().T, b))
        close(linalg.lu_solve(linalg.lu_factor(lazy(c)), lazy(b), 1), scipys.solve(c.T, b))
        close(linalg.cholesky(y), numpys.cholesky(s))
        for options in ({"upper": True}, {"upper": False}):
            close(linalg.cholesky(y, **options), numpys.cholesky(s, **options))
        for options in ({"lower": True}, {"lower": False}):
            close(linalg.cholesky(y, **options), scipys.cholesky(s, **options))
            close(linalg.eigh(lazy(a), eigvals_only=True, **options), scipys.eigh(a, eigvals_only=True, **options))
        for uplo in "LUlu":
            close(linalg.eigvalsh(x, uplo), numpys.eigvalsh(a, uplo))
            close(linalg.eigh(x, uplo).eigenvalues, numpys.eigh(a, uplo)[0])
        close(linalg.eigvalsh(x, b=y, subset_by_index=[2, 4]), scipys.eigvalsh(a, s, subset_by_index=[2, 4]))
        for name in ("svd", "slogdet", "eigh", "qr"):
            matrix = a + a.T if name == "eigh" else a if name == "slogdet" else tall
            mine, theirs = getattr(linalg, name)(lazy(matrix)), getattr(numpys, name)(matrix)
            assert type(mine) is type(theirs)
            for one, other in zip(dask.compute(*mine), theirs, strict=True):
                close(abs(one), abs(other)) if name != "svd" else np.testing.assert_equal(one.shape, other.shape)
        close(abs(linalg.qr(t, "complete")[1]), abs(numpys.qr(tall, "complete")[1]))
        close(linalg.svd(t, compute_uv=False), numpys.svd(tall, compute_uv=False))
        for right, rcond in itertools.product((random((40, 3)), random(40)), (None, -1, 1e-3)):
            mine, theirs = dask.compute(*linalg.lstsq(t, lazy(right), rcond)), numpys.lstsq(tall, right, rcond)
            for one, other in zip(mine, theirs, strict=True):
                close(one, other)
        close(linalg.pinv(t, 0.6), numpys.pinv(tall, 0.6))
        close(linalg.pinv(y, hermitian=True), numpys.pinv(s, hermitian=True))
        close(linalg.solve(y, lazy(b), lower=True, assume_a="pos"), scipys.solve(s, b, lower=True, assume_a="pos"))
        for order, axis, keepdims in itertools.product(
            (None, "fro", "nuc", 2, -2, 1, -1, np.inf, -np.inf, 0), (None, 0, -1, (0, 1), (-1, 0)), (False, True)
        ):
            try:
                expected = numpys.norm(tall, order, axis, keepdims)
            except ValueError:
                with pytest.raises(PlanError):
                    linalg.norm(t, order, axis, keepdims)
                continue
            close(linalg.norm(t, order, axis, keepdims), expected)


COMPLEX = {
    "cholesky": lambda a, b: linalg.cholesky(a),
    "lu": lambda a, b: linalg.lu(a)[1:],
    "permute_l": lambda a, b: linalg.lu(a, True),
    "lu_solve": lambda a, b: linalg.lu_solve(linalg.lu_factor(a), b),
    "cho_solve": lambda a, b: linalg.cho_solve(linalg.cho_factor(a), b),
    "solve": lambda a, b: linalg.solve(a, b),
    "solve sym": lambda a, b: linalg.solve(a, b, assume_a="sym"),
    "solve_triangular": lambda a, b: linalg.solve_triangular(a, b),
    "inv": lambda a, b: linalg.inv(a),
    "det": lambda a, b: linalg.det(a),
    "slogdet": lambda a, b: linalg.slogdet(a)[0],
    "qr": lambda a, b: linalg.qr(a),
    "qr by rows": lambda a, b: linalg.qr(a[:, :2], method="rows"),
    "lstsq": lambda a, b: linalg.lstsq(a, b)[0],
    "lstsq by rows": lambda a, b: linalg.lstsq(a[:, :2], b, method="rows")[0],
    "lstsq of any rank": lambda a, b: linalg.lstsq(a, b, 1e-3)[0],
    "pinv": lambda a, b: linalg.pinv(a),
    "pinv of any rank": lambda a, b: linalg.pinv(a, 1e-3),
    "eigh": lambda a, b: linalg.eigh(a)[1],
    "svd": lambda a, b: linalg.svd(a)[0],
    "svd by polar": lambda a, b: linalg.svd(a, method="columns")[2],
    "svd_compressed": lambda a, b: linalg.svd_compressed(a, 2)[2],
    "pca": lambda a, b: linalg.pca(a)[0],
    "pca mean": lambda a, b: linalg.pca(a)[2],
    "polar": lambda a, b: linalg.polar(a),
    "polar by runs": lambda a, b: linalg.polar(a, method="columns"),
    "gram": lambda a, b: linalg.gram(a),
    "symm": lambda a, b: linalg.symm(a, b, hermitian=True),
    "trmm": lambda a, b: linalg.trmm(a, b),
    "expm": lambda a, b: linalg.expm(a / 64),
    "schur": lambda a, b: linalg.schur(a)[0],
}
# Of real numbers.
REAL = {
    "lu p": lambda a, b: linalg.lu(a)[0],
    "logdet": lambda a, b: linalg.slogdet(a)[1],
    "residuals": lambda a, b: linalg.lstsq(a[:, :2], b)[1],
    "s of lstsq": lambda a, b: linalg.lstsq(a, b)[3],
    "eigvalsh": lambda a, b: linalg.eigvalsh(a),
    "svdvals": lambda a, b: linalg.svdvals(a),
    "cond": lambda a, b: linalg.cond(a, 1),
    "norm": lambda a, b: linalg.norm(a),
    "norm of columns": lambda a, b: linalg.norm(a, 1, 0),
    "norm 2": lambda a, b: linalg.norm(a, 2),
}
CALLS = COMPLEX | REAL
# Other types than integers, and in which they are computed.
COMPUTED = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "complex64": "complex64"}


def test_types_of_lazy_results():
    for dtype in ("bool", "int8", "uint16", "int32", "uint64", *COMPUTED):
        expected = np.dtype(COMPUTED.get(dtype, "float64"))
        x = da.ones((6, 6), dtype=np.dtype(dtype), chunks=3)
        for name, call in CALLS.items():
            real = expected if name in COMPLEX else np.zeros(0, expected).real.dtype
            made = call(x, x[:, :3])
            assert {one.dtype for one in (made if isinstance(made, tuple) else (made,))} == {real}, name


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "complex64"])
def test_types_do_not_depend_on_the_cluster(inproc_client, dtype):
    """Integers are computed in float64, float16 and bfloat16 in float32; no sum wraps."""
    matrix = np.eye(6) if dtype == "bool" else 110 * np.eye(6) + np.arange(36).reshape(6, 6) % 5
    a = (matrix + matrix.T).clip(max=1 if dtype == "bool" else 110).astype(dtype)
    b = a[:, :3].copy()
    expected = np.dtype(COMPUTED.get(dtype, "float64"))
    found = {name: call(da.from_array(a, chunks=3), da.from_array(b, chunks=3)) for name, call in CALLS.items()}
    here = dask.compute(found, scheduler="sync")[0]
    with dask.config.set(scheduler="sync"):
        alone = {name: call(da.from_array(a, chunks=3), da.from_array(b, chunks=3)) for name, call in CALLS.items()}
        here = dask.compute(alone)[0]
    there = dask.compute(found)[0]
    for name, made in found.items():
        real = expected if name in COMPLEX else np.zeros(0, expected).real.dtype
        results = (x if isinstance(x, tuple) else (x,) for x in (made, here[name], there[name]))
        for lazily, one, other in zip(*results, strict=True):
            assert lazily.dtype == one.dtype == other.dtype == real, name
            near = 1e-3 * abs(one).max() if real.itemsize <= 4 or dtype == "complex64" else 1e-9 * abs(one).max()
            np.testing.assert_allclose(abs(one), abs(other), rtol=0, atol=near, err_msg=name)
    wide = a.astype("complex128" if expected.kind == "c" else "float64")
    np.testing.assert_allclose(here["gram"], wide.conj().T @ wide, rtol=1e-5)
    np.testing.assert_allclose(here["symm"], wide @ wide[:, :3], rtol=1e-5)
    np.testing.assert_allclose(here["norm"], np.linalg.norm(wide), rtol=1e-5)
    np.testing.assert_allclose(here["norm of columns"], abs(wide).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(here["trmm"], np.triu(wide) @ wide[:, :3], rtol=1e-5)


def test_all_runs_of_a_result_are_explained(inproc_client):
    tall, square = da.ones((4000, 30), chunks=(500, 30)), da.ones((60, 60), chunks=20)
    for found, runs in (
        (linalg.svd(square, method="columns"), 15),
        (linalg.pinv(square, 1e-3), 2),
        (linalg.norm(square), 0),
    ):
        plan = linalg.explain(found)
        assert len(plan.runs) == runs
        assert plan.method == ("runs" if runs else "dask")
        assert (plan.seconds is None) == (not runs)
        assert len(repr(plan).splitlines()) >= 1 + runs
        assert "Plan: " in plan._repr_html_()
        assert plan._repr_html_().count("<details><summary>") == len(plan.runs)
    assert "svd of 60 x 60: local on 1 of" in repr(plan := linalg.explain(linalg.pinv(square, 1e-3)))
    assert "product of 60 x 60 and 60 x 60" in repr(plan)
    assert plan.seconds == sum(run.seconds for run in plan.runs)
    assert linalg.explain(linalg.gram(tall)).problem.kind == "product"
    assert linalg.explain(linalg.lu(square)).problem.task.kind == "lu"


def test_steps_of_programs_are_drawn_by_rank(inproc_client):
    """What the picture shows is what the model counts: nothing overlaps, and the last step ends with the estimate."""
    plan = linalg.explain(linalg.svd_compressed(da.ones((4000, 30), chunks=(500, 30)), 3))
    ends = {}
    for rank, _, start, stop in plan.spans:
        assert ends.get(rank, 0.0) <= start <= stop
        ends[rank] = stop
    assert set(ends) == set(range(len(plan.ranks)))
    assert max(ends.values()) == pytest.approx(plan.cost.seconds)
    html = plan._repr_html_()
    assert all(f"rank {rank}<" in html for rank in ends)
    assert all(f"<title>{name}: " in html for _, name, *_ in plan.spans)


def test_numpys_arguments_under_enable(inproc_client):
    """Whether they are taken does not depend on chunks; errors name the function that was called."""
    a, b, wide = random((40, 5)), random(40), da.ones((4, 6), chunks=2)
    with dask_distmm.enabled():
        for chunks in ((40, 2), (10, 5), (10, 2)):
            for rcond in (None, 1e-3):
                x, y = da.from_array(a, chunks=chunks), da.from_array(b, chunks=chunks[0])
                x = np.linalg.lstsq(x, y, rcond=rcond)
                for mine, theirs in zip(dask.compute(*x), np.linalg.lstsq(a, b, rcond), strict=True):
                    assert_near(mine, theirs, rtol=1e-9)
            s = np.linalg.svd(da.from_array(a, chunks=chunks), compute_uv=False)
            np.testing.assert_allclose(s, np.linalg.svd(a, compute_uv=False))
        for name in ("inv", "cholesky", "eigh", "det", "slogdet"):
            with pytest.raises(NotSquareError, match=rf"^{name}\(\): a must be square, got 4 x 6"):
                getattr(np.linalg, name)(wide)
        # It is left to NumPy, as without us.
        with pytest.warns(FutureWarning, match="not implemented by Dask"), pytest.raises(ValueError, match="UPLO"):
            np.linalg.eigh(wide[:, :4], "X")
        for name, options in (("svd", {"hermitian": True}), ("solve", {"lower": True}), ("qr", {"nonsense": 1})):
            with pytest.raises(TypeError, match=rf"^(DaskArray|)\(?{name}\(\)|^{name}\(\)"):
                getattr(da.linalg, name)(*(wide, wide)[: 1 + (name == "solve")], **options)
