"""What a type checker says of programs that use the package: wrong calls are found, right ones pass.

mypy is there where `.[dev]` is installed.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from test_docs import PRINTED, fences

import dask_distmm
import dask_distmm.typing as names
from dask_distmm import linalg
from dask_distmm.arrays.request import DEFAULTS, takes
from dask_distmm.numeric.epilogs import Epilog, Formula
from dask_distmm.numeric.types import COMPUTE_TYPES
from dask_distmm.planning import ENGINES, METHODS

ROOT = Path(__file__).parents[1]
PROGRAM = """
import logging
from typing import assert_type

import dask.array as da
import ml_dtypes
import numpy as np

from dask_distmm import BlockScaled, Epilog, Matmul, Plan, Slab, distribute, explain, explain_grouped, matmul
from dask_distmm import linalg, matmul_grouped, quantize
from dask_distmm.sklearn import PCA, Ridge
from dask_distmm.typing import Engine, MatmulOptions, Method, WithAux


def right(a: da.Array, b: da.Array, amax: bool, options: MatmulOptions) -> None:
    assert_type(matmul(a, b), da.Array)
    assert_type(matmul(a, b, method="summa", engine="numpy", op_a="T", workers=2, out_chunks=(5, 5)), da.Array)
    assert_type(matmul(a, b, a, alpha=2, beta=1j, distributions=[Slab(0), None]), da.Array)
    assert_type(matmul(a, b, **options), da.Array)
    assert_type(matmul(a, b, epilog="relu"), da.Array)
    assert_type(matmul(a, b, epilog=Epilog.RELU, epilog_inputs={}), da.Array)
    assert_type(matmul(a, b, epilog=np.tanh), da.Array)
    assert_type(matmul(a, b, epilog="relu_aux"), WithAux)
    assert_type(matmul(a, b, epilog=Epilog.DRELU_BGRAD, bias_axis=0), WithAux)
    assert_type(matmul(a, b, result_amax=True), WithAux)
    assert_type(matmul(a, b, epilog="gelu", result_amax=True), WithAux)
    assert_type(matmul(a, b, result_amax=amax), da.Array | WithAux)
    matmul([[1, 2.0]], np.ones((2, 2)), logger=logging.getLogger(), result_type=ml_dtypes.bfloat16)
    found = explain(a, b, workers=4)
    assert_type(found.seconds, float | None)
    assert_type(found.bytes_moved, int | None)
    assert_type(found.method, str)
    if isinstance(found, Plan):
        assert_type(found.grid, tuple[int, int, int])
    with Matmul(a, b, method="allgather") as mm:
        assert_type(mm.plan(epilog=Epilog.RELU_BIAS, epilog_inputs={"bias": a[0]}), Plan)
        assert_type(mm.execute(), da.Array | WithAux)
        mm.reset_operands(a=b, alpha=2)
    assert_type(matmul_grouped([(a, b), (b, a)], epilog="tanh", batch="items"), list[da.Array])
    explain_grouped([(a, b)], workers=["tcp://127.0.0.1:1"])
    assert_type(quantize(a, "mxfp8"), BlockScaled)
    assert_type(quantize(a, "float8_e4m3"), tuple[da.Array, da.Array])
    assert_type(distribute(a, Slab(0)), da.Array)
    assert_type(linalg.solve(a, [1.0, 2.0], assume_a="pos", overwrite_a=True), da.Array)
    assert_type(linalg.ridge(a, b, [1.0, 2.0]), da.Array)
    assert_type(linalg.ridge(a, b, 1.0, fit_intercept=True).intercept, da.Array)
    assert_type(linalg.pca(a, 2).explained_variance_ratio, da.Array)
    assert_type(linalg.solve_banded((1, 1), [[1.0], [2.0], [3.0]], a), da.Array)
    assert_type(linalg.solve_toeplitz(([1.0], [1.0]), a), da.Array)
    assert_type(PCA(2).fit(a), PCA)
    assert_type(Ridge(alpha=2.0).fit(a, b), Ridge)
    assert_type(linalg.lu(a), tuple[da.Array, da.Array, da.Array])
    assert_type(linalg.lu(a, True), tuple[da.Array, da.Array])
    assert_type(linalg.qr(a, "r"), da.Array)
    assert_type(linalg.qr(a).R, da.Array)
    assert_type(linalg.eigh(a, b=b).eigenvalues, da.Array)
    assert_type(linalg.eigh(a, eigvals_only=True), da.Array)
    assert_type(linalg.eig(a).eigenvectors, da.Array)
    assert_type(linalg.eig(a, right=False), da.Array)
    assert_type(linalg.schur(a, "complex"), tuple[da.Array, da.Array])
    assert_type(linalg.svd(a, compute_uv=False), da.Array)
    u, s, vh = linalg.svd(a, full_matrices=False, method="rows")
    assert_type(linalg.slogdet(a).sign, da.Array)
    assert_type(linalg.lstsq(a, b)[2], int | da.Array)


def wrong(a: da.Array, b: da.Array, text: str) -> None:
    matmul(a, b, method="suma")  # "method" to "matmul" has incompatible type
    matmul(a, b, method=text)  # "method" to "matmul" has incompatible type
    matmul(a, b, op_a="t")  # "op_a" to "matmul" has incompatible type
    matmul(a, b, engine="cuda")  # "engine" to "matmul" has incompatible type
    matmul(a, b, epilog="rellu")  # "epilog" to "matmul" has incompatible type
    matmul(a, b, epilog="relu_aux", engine="nump")  # "engine" to "matmul" has incompatible type
    matmul(a, b, epilog="relu", result_amax=True, op_a="t")  # "op_a" to "matmul" has incompatible type
    matmul(a, b, compute_type="fp16")  # "compute_type" to "matmul" has incompatible type
    matmul(a, b, metod="summa")  # "metod" to "matmul" has incompatible type "str"; expected "NoSuchOption[
    matmul(a, b, epilogue="relu")  # "epilogue" to "matmul" has incompatible type "str"; expected "NoSuchOption[
    matmul(a, b, epilog="relu_aux", result_amax=True, foo=3)  # "foo" to "matmul" has incompatible type
    matmul(a)  # Argument 1 to "matmul" has incompatible type "Array"; expected "TwoOperands[
    matmul(a, b, a, b)  # Argument 4 to "matmul" has incompatible type "Array"; expected "OneArgumentFewer[
    matmul(a, "x")  # Argument 2 to "matmul" has incompatible type "str"
    matmul(a, 2.0)  # Argument 2 to "matmul" has incompatible type "float"
    matmul(a, b, epilog="relu_aux").compute()  # has no attribute "compute"
    Epilog.RELLU  # has no attribute "RELLU"
    explain(a, b, method="suma")  # "method" to "explain" has incompatible type "Literal['suma']"
    explain(a, "x")  # Argument 2 to "explain" has incompatible type "str"
    explain(a, b).grid  # "Explanation" has no attribute "grid"
    Matmul(a, b, op_b="t")  # "op_b" to "Matmul" has incompatible type
    Matmul(a, b, epilog="relu")  # Unexpected keyword argument "epilog"
    Matmul(a, b).plan(bias_axis=1)  # "bias_axis" to "plan" of "Matmul" has incompatible type
    matmul_grouped([(a, b)], epilog="relu_aux")  # "epilog" to "matmul_grouped" has incompatible type
    explain_grouped([(a, b)], batch="item")  # "batch" to "explain_grouped" has incompatible type
    quantize(a, "int3")  # No overload
    linalg.cholesky("abc")  # Argument 1 to "cholesky" has incompatible type "str"
    linalg.cholesky(a).foo  # "Array" has no attribute "foo"
    linalg.solve(a, b, engine="nump")  # No overload variant of "solve" matches
    linalg.solve(a, b, assume_a="foo")  # No overload variant of "solve" matches
    linalg.cond(a, p="foo")  # "p" to "cond" has incompatible type "Literal['foo']"
    linalg.qr(a, "foo")  # No overload
    distribute(a, 0)  # Argument 2 to "distribute" has incompatible type "int"
"""
PROGRAM += "".join(
    f'    matmul(a, b, {name}=object())  # Argument "{name}" to "matmul" has incompatible type\n' for name in DEFAULTS
)
# Names that pages take for granted, as `test_docs.as_printed` has them.
# What `strict` adds, taken back: pages and examples are checked as of a user who does not ask for it.
NOT_STRICT = "# mypy: " + ", ".join(
    [
        *["allow-untyped-defs", "allow-untyped-calls", "allow-incomplete-defs", "allow-any-generics"],
        *["allow-subclassing-any", "allow-untyped-decorators", "no-check-untyped-defs"],
        *["no-strict-equality", "no-warn-return-any", "no-warn-unused-ignores", "no-extra-checks"],
    ]
)
# Of pages one name can be several things, one after the other.
OF_PAGES = f'{NOT_STRICT}, allow-redefinition, disable-error-code="var-annotated"\n'


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The program, the pages and the examples as files, and the errors of each: the lines' numbers and messages."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    # A configuration of its own: the project's treats Dask's types as unknown. Of packages this one alone says what it
    # exports.
    (folder / "mypy.ini").write_text("[mypy]\n[mypy-dask_distmm.*]\nimplicit_reexport = False\n")
    (folder / "program.py").write_text(PROGRAM)
    for path in (ROOT / "docs" / "examples").glob("*.py"):
        (folder / f"example_{path.name}").write_text(f"{NOT_STRICT}\n{path.read_text()}")
    for page in PRINTED:
        text = OF_PAGES
        for code, *_ in fences(page):
            if ">>>" in code:
                lines = [line[4:] for line in code.splitlines() if line[:4] in (">>> ", "... ")]
                text += "\n".join([*lines, ""])
            else:
                text += code
        if fences(page):
            (folder / f"page_{page.stem.replace('-', '_')}.py").write_text(text)
    files = sorted(path.name for path in folder.glob("*.py"))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--implicit-reexport",
        "--ignore-missing-imports",
        f"--cache-dir={folder / 'cache'}",
    ]
    done = subprocess.run(
        [*command, *files],
        # As an installed package: of those mypy takes the types and reports no errors.
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=380,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {name: {} for name in files}
    for name, line, message in re.findall(r"^(.+?):(\d+): ((?:error|note): .*)$", done.stdout, re.MULTILINE):
        found[name][int(line)] = found[name].get(int(line), "") + message
    return found


def test_wrong_calls_are_found_and_right_ones_pass(checked):
    found = checked["program.py"]
    expected = {
        number: line.rpartition("  # ")[2] for number, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line
    }
    assert len(expected) > 20
    assert found.keys() == expected.keys(), found
    assert not [(found[at], message) for at, message in expected.items() if message not in found[at]]
    # What is wrong with a call stands in a few lines, not in all overloads.
    lines = PROGRAM.splitlines()
    assert not {lines[at - 1]: found[at] for at in found if "matmul(" in lines[at - 1] and len(found[at]) > 900}


@pytest.mark.parametrize(("kind", "least"), [("page_", 9), ("example_", 4)])
def test_pages_and_examples_pass(checked, kind, least):
    """Code that pages print passes as it is; lines of doctests without their results."""
    found = {name: errors for name, errors in checked.items() if name.startswith(kind)}
    assert len(found) >= least
    assert not {name: errors for name, errors in found.items() if errors}


@pytest.mark.parametrize(
    ("alias", "known"),
    [
        (names.Method, {"auto", *METHODS}),
        (names.Engine, {"auto", *ENGINES}),
        (names.ComputeType, set(COMPUTE_TYPES)),
        (names.PlainEpilog | names.AuxEpilog, set(Epilog)),
        (names.AnyEpilog, set(Epilog)),
    ],
)
def test_names_are_those_that_are_taken(alias, known):
    values = {value for one in typing.get_args(alias) for value in (typing.get_args(one) or [one])} - {Epilog}
    assert values == known
    assert {"numpy", "peer", "cublasmp"} <= set(ENGINES)


def test_epilogs_are_told_apart_by_what_they_return():
    for alias, more in ((names.PlainEpilog, False), (names.AuxEpilog, True)):
        found = [name for part in typing.get_args(alias) for name in typing.get_args(part)]
        for name in found:
            formula = Formula(epilog=str(name))
            assert bool(formula.per_element or formula.operand_sum) is more, name
        # As text and as members.
        assert sorted(name for name in found if isinstance(name, Epilog)) == sorted(
            name for name in found if not isinstance(name, Epilog)
        )


@pytest.mark.parametrize("function", ["matmul", "explain", "matmul_grouped", "explain_grouped", "Matmul"])
def test_signatures_list_the_options(function):
    found = inspect.signature(getattr(dask_distmm, function)).parameters
    assert not [one for one in found.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    assert {"alpha", "op_a", "op_b", "method", "engine", "workers"} <= set(found)
    options = {name: one for name, one in found.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {name: one.default for name, one in options.items()} == {name: DEFAULTS[name] for name in options}
    doc = getattr(dask_distmm, function).__doc__
    assert not [name for name in found if not re.search(rf"\b{name}\b", doc)]


@pytest.mark.parametrize("name", sorted(set(linalg.__all__) - {"MatrixError", "NotSquareError"}))
def test_docstrings_of_linalg_have_every_argument_an_example_and_the_costs(name):
    function = getattr(linalg, name)
    doc, signature = inspect.getdoc(function), inspect.signature(function)
    parameters = doc.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    named = {one for line in re.findall(r"^(\w[\w, ]*)(?: :|$)", parameters, re.MULTILINE) for one in line.split(", ")}
    assert named >= set(signature.parameters)
    assert not [one for one in signature.parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    assert "\nExamples\n" in doc
    for text in () if name == "explain" else ("Where it runs: ", "Memory of a worker", "NaN"):
        assert text in doc.partition("\nNotes\n")[2]


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match=r"matmul\(\) has no option 'metod': did you mean 'method'\?"):
        dask_distmm.matmul([[1.0]], [[1.0]], metod="summa")
    with pytest.raises(TypeError, match=r"Matmul\(\) has no option 'epilog'$"):
        dask_distmm.Matmul([[1.0]], [[1.0]], epilog="relu")


def test_defaults_are_those_of_all_options():
    hints = typing.get_type_hints(names.AllOptions)
    assert set(DEFAULTS) == set(hints)
    (listed,) = [
        one for one in typing.get_overloads(dask_distmm.matmul) if "wrong" in inspect.signature(one).parameters
    ]
    options = {name: one for name, one in inspect.signature(listed).parameters.items() if name in hints}
    assert {name: one.default for name, one in options.items()} == DEFAULTS
    assert {name: hint for name, hint in typing.get_type_hints(listed).items() if name in hints} == hints

    @takes(names.GroupedOptions)
    def function(x: int, **options: object) -> object:
        return options

    assert function(1, epilog="relu") == {"epilog": "relu"}
    assert str(inspect.signature(function)).startswith("(x: 'int', *, alpha: 'complex' = 1.0, op_a: 'Op' = 'N'")


def test_dir_shows_the_public_names():
    assert set(dir(dask_distmm)) == {*dask_distmm.__all__, "errors", "sklearn", "typing"}
    assert not [name for name in dir(dask_distmm) if not hasattr(dask_distmm, name)]
    assert dir(linalg) == sorted(linalg.__all__)
    # The scheduler's and workers' --preload looks for it.
    assert callable(dask_distmm.dask_setup)
    assert "dask_setup" not in dir(dask_distmm)
