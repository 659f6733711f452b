"""Epilogs: the formulas, on engines without a cluster, on worker processes, without any run."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from epilog_cases import ALL, Case
from hypothesis import given
from hypothesis import strategies as st
from matrices import assert_near
from run_events import newest_run, runs_after

import dask_distmm
from dask_distmm import matmul
from dask_distmm.errors import PlanError
from dask_distmm.numeric.epilogs import Formula, finish

METHODS = ["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]


@pytest.mark.parametrize("epilog", ALL)
def test_each_epilog_on_the_cluster(client, epilog):
    case = Case(epilog)
    case.check(*dask.compute(*case.run()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epilog", ["relu_aux_bias", "drelu_bgrad"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_methods_and_types(client, method, epilog, dtype):
    """All others, without a cluster: test_formula_properties.py."""
    case = Case(epilog, dtype, alpha=0.5, beta=-2.0)
    case.check(*dask.compute(*case.run(method, with_c=True)))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_factors(client, dtype):
    case = Case("bias", dtype, alpha=0.5 - 2j, beta=1j)
    case.check(*dask.compute(*case.run(with_c=True)))
    with pytest.raises(PlanError, match="not defined for complex"):
        matmul(*case.arrays()[:2], epilog="relu")


@pytest.mark.parametrize("bias_axis", [-1, 0])
@pytest.mark.parametrize("epilog", ["drelu_bgrad", "dgelu_bgrad"])
def test_bias_gradients_keep_the_axis_that_is_asked_for(client, epilog, bias_axis):
    case = Case(epilog, bias_axis=bias_axis)
    case.check(*dask.compute(*case.run("summa")))


@pytest.mark.parametrize("shape", ["column", "row"])
def test_biases_of_both_shapes(client, shape):
    case = Case("relu_bias", bias=shape)
    case.check(*dask.compute(*case.run()))


@pytest.mark.parametrize("epilog", ALL)
def test_without_a_cluster_dask_does_the_same(epilog):
    with dask.config.set(scheduler="threads"):
        case = Case(epilog, alpha=2.0)
        d, aux = case.run()
        assert not any("distmm-barrier" in str(key) for key in d.dask)
        case.check(*dask.compute(d, aux))


def test_a_collective_graph_without_a_cluster(client):
    case = Case("gelu_aux_bias", beta=3.0)
    d, aux = case.run(with_c=True)
    case.check(*dask.compute(d, aux, scheduler="threads"))


def test_one_run_makes_all_outputs(client):
    case = Case("relu_aux_bias")
    d, aux = case.run()
    before = newest_run(client)
    case.check(*dask.compute(d, aux))
    assert runs_after(client, before) == 1
    case = Case("gelu_aux")
    d, aux = case.run(result_amax=True)
    before = newest_run(client)
    alone = aux["gelu_aux"].compute()
    assert runs_after(client, before) == 1
    amax = aux["result_amax"].compute()
    np.testing.assert_allclose(alone, case.aux["gelu_aux"].astype(float), rtol=1e-9, atol=1e-9)
    assert amax == pytest.approx(float(abs(case.d).max()), rel=1e-9)


def test_two_layers_forward_and_backward_match_autograd(client):
    """y = relu(x W1 + b1) W2; the gradients of sum(y * g) by these epilogs, against the chain rule by hand."""
    rng = np.random.default_rng()
    x, w1, b1, w2, g = (rng.standard_normal(s) for s in ((40, 30), (30, 20), (20,), (20, 10), (40, 10)))
    dx, dw1, dw2, dg = (da.from_array(v, chunks=11) for v in (x, w1, w2, g))
    hidden, aux = matmul(dx, dw1, epilog="relu_aux_bias", epilog_inputs={"bias": b1})
    y = matmul(hidden, dw2)
    grad_w2 = matmul(hidden, dg, op_a="T")
    back, sums = matmul(dg, dw2, op_b="T", epilog="drelu_bgrad", epilog_inputs={"relu_aux": aux["relu_aux"]})
    grad_w1 = matmul(dx, back, op_a="T")
    found = dask.compute(y, grad_w2, grad_w1, sums["drelu_bgrad"])
    pre = x @ w1 + b1
    h = np.maximum(pre, 0)
    delta = (g @ w2.T) * (pre > 0)
    for value, expected in zip(found, (h @ w2, h.T @ g, x.T @ delta, delta.sum(0)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10)


def test_beta_zero_reads_no_nan(client):
    case = Case("", beta=0.0)
    case.c[...] = np.nan
    case.check(*dask.compute(*case.run(with_c=True)))


def test_c_broadcasts(client):
    rng = np.random.default_rng()
    a, b, c = rng.standard_normal((30, 20)), rng.standard_normal((20, 25)), rng.standard_normal(25)
    d = matmul(da.from_array(a, 7), da.from_array(b, 9), c, beta=2)
    np.testing.assert_allclose(d.compute(), a @ b + 2 * c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["T", "C"])
def test_op(client, op):
    rng = np.random.default_rng()
    a = rng.standard_normal((20, 30)) + 1j * rng.standard_normal((20, 30))
    b = rng.standard_normal((25, 20)) + 0j
    d = matmul(da.from_array(a, 7), da.from_array(b, 9), op_a=op, op_b="T")
    np.testing.assert_allclose(d.compute(), (a.T if op == "T" else a.conj().T) @ b.T, rtol=1e-12, atol=1e-12)


def scaled_swish(x, shift, gate):
    return np.where(gate > 0, (x + shift) / (1 + np.exp(-x)), -x)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_functions_of_the_user(client, method, dtype):
    case = Case("", dtype, alpha=0.5)
    rng = np.random.default_rng()
    shift, gate = rng.standard_normal((43, 1)), rng.standard_normal((43, 38))
    a, b, _ = case.arrays()
    inputs = {"shift": da.from_array(shift, chunks=13), "gate": da.from_array(gate, chunks=(11, 9))}
    d = matmul(a, b, alpha=0.5, epilog=scaled_swish, epilog_inputs=inputs, method=method)
    assert d.dtype == case.kind
    before = newest_run(client)
    found = d.compute()
    assert runs_after(client, before) == 1
    x = case.d.astype(np.float64)
    slope = 1.5 + abs(shift)
    bound = (case.error + 32 * case.eps) * slope + case.own * abs(scaled_swish(x, shift, gate))
    assert (abs(found.astype(np.float64) - scaled_swish(x, shift, gate)) <= bound).all()
    if dtype == "bfloat16":
        return  # Dask's own product of several chunks does not know it
    with dask.config.set(scheduler="threads"):
        again = matmul(a, b, alpha=0.5, epilog=scaled_swish, epilog_inputs=inputs, result_amax=True)
    d, aux = dask.compute(*again, scheduler="threads")
    assert (abs(d.astype(np.float64) - scaled_swish(x, shift, gate)) <= bound).all()
    assert aux["result_amax"] == abs(d).max()


@pytest.mark.parametrize("method", METHODS)
def test_inputs_may_be_called_as_what_a_run_has(client, method):
    a, b, d, panel = (np.random.default_rng().standard_normal((40, 40)) for _ in range(4))
    inputs = {"d": da.from_array(d, chunks=10), "sum": da.from_array(panel, chunks=10)}
    product = matmul(
        *(da.from_array(x, 10) for x in (a, b)),
        method=method,
        epilog=lambda x, d, sum: x + d * sum,
        epilog_inputs=inputs,
    )
    assert_near(product.compute(), a @ b + d * panel)


def test_a_function_that_fails_on_one_rank_is_one_error(client):
    def picky(x, limit):
        if limit.max() > 1:
            raise ArithmeticError("no more than one")
        return x * limit

    a, b = (da.from_array(np.random.default_rng().standard_normal((40, 40)), chunks=20) for _ in "ab")
    limit = np.ones((40, 1))
    limit[-1] = 2
    d = matmul(a, b, epilog=picky, epilog_inputs={"limit": da.from_array(limit, chunks=20)}, method="allgather")
    with pytest.raises(ArithmeticError, match="^no more than one") as found:
        d.compute()
    assert found.value.__notes__[0].startswith("the epilog picky has failed on tcp://")
    limit[-1] = 1
    d = matmul(a, b, epilog=picky, epilog_inputs={"limit": da.from_array(limit, chunks=20)}, method="allgather")
    assert_product(a.compute(), b.compute(), d.compute())


BAD = [
    ({"epilog": lambda x: x.sum()}, "must return an array like its first argument; for float64"),
    ({"epilog": lambda x, y: x + y}, r"raised TypeError: .*missing 1 required positional argument: 'y'"),
    ({"epilog": lambda x, y: x + 1j * y, "epilog_inputs": {"y": np.ones(5)}}, "it returned complex128"),
    ({"epilog": lambda x, c: x + c, "epilog_inputs": {"c": np.ones(5)}}, "names of their own"),
    ({"epilog": lambda x, partial: x + partial, "epilog_inputs": {"partial": np.ones(5)}}, "names of their own"),
    ({"epilog": lambda x, y: x + y, "epilog_inputs": {"y": np.ones(4)}}, r"y has the shape \(4,\); expected"),
    ({"epilog": "swish"}, "unknown epilog 'swish'"),
    ({"epilog": 3}, "expected a name, an Epilog or a function"),
    ({"epilog": "relu_bias"}, r"needs the inputs \['bias'\], got \[\]"),
    ({"epilog": "relu", "epilog_inputs": {"bias": np.ones(5)}}, r"needs the inputs \[\]"),
    ({"epilog": "bias", "epilog_inputs": {"bias": np.ones(4)}}, r"bias has the shape \(4,\); expected"),
    ({"epilog": "drelu", "epilog_inputs": {"relu_aux": np.ones((1, 5), bool)}}, r"relu_aux has the shape"),
    ({"epilog": "bias", "epilog_inputs": {"bias": np.ones(5, complex)}}, "bias is complex128"),
    ({"c": np.ones((6, 5))}, "c was given without beta"),
    ({"beta": 1.0}, "beta=1.0 needs c"),
    ({"alpha": 1j}, "alpha=1j is complex"),
    ({"alpha": "2x"}, "expected a number"),
    ({"op_a": "H"}, "op_a='H'"),
    ({"epilog": "drelu_bgrad", "epilog_inputs": {"relu_aux": np.ones((6, 5), bool)}, "bias_axis": 2}, "bias_axis=2"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_input_is_refused_at_the_call(options, words):
    a, b = np.ones((6, 4)), np.ones((4, 5))
    options = dict(options)
    c = options.pop("c", None)
    with pytest.raises(PlanError, match=words):
        matmul(da.from_array(a), da.from_array(b), c, **options)


def test_integers_and_vectors_have_no_epilog():
    with pytest.raises(PlanError, match="floating-point"):
        matmul(da.ones((3, 3), dtype=int), da.ones((3, 3), dtype=int), epilog="relu")
    with pytest.raises(PlanError, match="need matrices"):
        matmul(da.ones(3), da.ones((3, 3)), epilog="relu")


@given(st.sampled_from(ALL), st.integers(0, 2**32 - 1))
def test_formulas_on_the_whole_line(epilog, seed):
    """Huge, tiny, infinite and NaN: no warning, and NaN stays NaN."""
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.standard_normal(20) * 10.0 ** rng.integers(-300, 300, 20), [np.inf, -np.inf, np.nan, 0.0]])
    formula = Formula(epilog=epilog)
    inputs = {"bias": np.zeros((1, 24)), "relu_aux": np.ones((1, 24), bool), "gelu_aux": np.ones((1, 24))}
    with np.errstate(all="ignore"):
        d, _ = finish(np, formula, x.reshape(1, -1).copy(), inputs)
    assert np.isnan(d[0, 22])
    assert d.dtype == np.float64


def test_operator_is_untouched_by_all_this(client):
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        a = da.ones((20, 20), chunks=5)
        np.testing.assert_array_equal((a @ a).compute(), np.full((20, 20), 20.0))


def test_explain_shows_the_formula(client):
    case = Case("relu_aux_bias")
    a, b, c = case.arrays()
    options = {"epilog": "relu_aux_bias", "epilog_inputs": case.inputs}
    text = repr(dask_distmm.explain(a, b, c, alpha=2, beta=-0.5, result_amax=True, **options))
    assert "formula   D = relu(2 A B + -0.5 C + bias); also relu_aux, result_amax" in text
    mask = {"relu_aux": da.ones((43, 38), dtype=bool)}
    text = repr(dask_distmm.explain(a, b, epilog="drelu_bgrad", epilog_inputs=mask))
    assert "D = (A B) relu'(relu_aux); also drelu_bgrad" in text
    assert "formula" not in repr(dask_distmm.explain(a, b))
    with pytest.raises(PlanError, match="needs the inputs"):
        dask_distmm.explain(a, b, epilog="bias")
    assert "no engine" in repr(dask_distmm.explain(a, b, epilog="bias", epilog_inputs={"bias": np.array(["x"] * 38)}))
