"""Epilogs: the formulas, on engines without a cluster, on worker processes, without any run."""

from __future__ import annotations

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_distmm
from dask_distmm import matmul
from dask_distmm.dtypes import compute_dtype
from dask_distmm.epilog import Epilog, Finish, finish
from dask_distmm.errors import PlanError
from dask_distmm.testing import random_chunks

ALL = [epilog.value for epilog in Epilog]
METHODS = ["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]
BF16 = np.dtype(ml_dtypes.bfloat16)

SCIPY = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "clamp": lambda x: np.clip(x, 0, 6),
    "": lambda x: x,
}
# The largest slope of each: what becomes of an error in x.
SLOPES = {"gelu": 1.2, "silu": 1.2, "hardswish": 1.6}


def gelu_slope(x):
    """By the central difference of the formula, in double precision."""
    h = 1e-5
    return (SCIPY["gelu"](x + h) - SCIPY["gelu"](x - h)) / (2 * h)


class Case:
    """Random operands, the reference in float64 (complex128), and a bound on what rounding does to it."""

    def __init__(self, epilog, dtype="float64", shape=(43, 38, 51), alpha=1.0, beta=None, bias="column", bias_axis=-1):
        rng = np.random.default_rng()
        m, n, k = shape
        kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)

        def matrix(*size):
            x = rng.standard_normal(size)
            return (x + 1j * rng.standard_normal(size) if kind.kind == "c" else x).astype(kind)

        self.a, self.b, self.c = matrix(m, k), matrix(k, n), matrix(m, n)
        self.options = {"alpha": alpha, "epilog": epilog or None, "bias_axis": bias_axis}
        if beta is not None:
            self.options |= {"beta": beta}
        spec = Finish(epilog=epilog)
        self.inputs = {}
        if "bias" in spec.inputs:
            self.inputs["bias"] = matrix(m, 1) if bias == "row" else matrix(n)
        if spec.gradient == "relu":
            self.inputs["relu_aux"] = rng.random((m, n)) < 0.5
        if spec.gradient == "gelu":
            self.inputs["gelu_aux"] = matrix(m, n)
        high = np.clongdouble if kind.kind == "c" else np.longdouble
        wide = [x.astype(np.float32) if kind == BF16 else x for x in (self.a, self.b, self.c)]
        a, b, c = (x.astype(high) for x in wide)
        x = alpha * (a @ b) + (beta or 0) * c
        magnitude = abs(alpha) * (abs(a) @ abs(b)) + abs(beta or 0) * abs(c)
        for name, value in self.inputs.items():
            if name == "bias":
                bias = value.astype(np.float32).astype(high) if kind == BF16 else value.astype(high)
                x, magnitude = x + bias, magnitude + abs(bias)
        inner = compute_dtype(kind, k)
        eps = float(np.finfo(inner).eps)
        self.aux = {}
        error = 16 * eps * magnitude
        if spec.saved:
            self.aux[spec.saved] = (x > 0) if spec.saved == "relu_aux" else x
        d = SCIPY[spec.activation](x)
        error = error * SLOPES.get(spec.activation, 1.0) + 8 * eps * (1 + abs(d))
        if spec.gradient == "relu":
            d = np.where(self.inputs["relu_aux"], x, 0)
        elif spec.gradient == "gelu":
            slope = gelu_slope(self.inputs["gelu_aux"].astype(np.float64))
            d, error = x * slope, error * abs(slope) + abs(x) * (16 * eps + 1e-9 * (eps > 1e-10) + 1e-9)
        own = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(kind.name, 0.0)
        self.d, self.x, self.inner_error = d, x, 16 * eps * magnitude
        self.error = error + own * abs(d) + (2.0**-24 if own else 0)
        self.own, self.eps, self.kind = own, eps, kind
        if spec.sums:
            axis = 1 if bias_axis == 0 else 0
            self.aux[spec.sums] = d.sum(axis=axis)
            self.sum_error = (error + (self.eps * 64 + own * 2) * abs(d)).sum(axis=axis) + own * abs(d).sum(axis=axis)
        if spec.operand_sum:
            x, axis = (a, 1) if spec.operand_sum == "bgrada" else (b, 0)
            self.aux[spec.operand_sum] = x.sum(axis=axis)
            self.sum_error = 16 * eps * abs(x).sum(axis=axis) + own * abs(x.sum(axis=axis))

    def check(self, d, aux=None):
        assert d.dtype == self.kind
        wide = np.clongdouble if self.kind.kind == "c" else np.longdouble
        self._near("D", d.astype(np.float32) if self.kind == BF16 else d, self.d, self.error, wide)
        assert set(aux or {}) == set(self.aux)
        for name, value in (aux or {}).items():
            expected = self.aux[name]
            assert value.shape == expected.shape, name
            if name == "relu_aux":
                assert value.dtype == bool
                sure = abs(self.x) > self.inner_error
                np.testing.assert_array_equal(value[sure], expected[sure])
                continue
            assert value.dtype == self.kind
            bound = (
                self.sum_error
                if value.ndim == 1
                else self.inner_error + self.own * abs(expected) + 1e-7 * (self.own > 0)
            )
            self._near(name, value.astype(np.float32) if self.kind == BF16 else value, expected, bound, wide)

    def _near(self, name, value, expected, bound, wide):
        off = abs(value.astype(wide) - expected)
        assert (off <= bound).all(), f"{name}: {float(np.nanmax(off / bound)):.3g} times the bound"

    def arrays(self, most=4):
        rng = np.random.default_rng()
        return [
            da.from_array(x, chunks=tuple(random_chunks(rng, size, most) for size in x.shape))
            for x in (self.a, self.b, self.c)
        ]

    def run(self, method="auto", with_c=False, **more):
        a, b, c = self.arrays()
        inputs = {name: da.from_array(x, chunks=max(1, x.shape[0] // 3)) for name, x in self.inputs.items()}
        d = matmul(a, b, *([c] if with_c else []), epilog_inputs=inputs or None, method=method, **self.options, **more)
        return d if isinstance(d, tuple) else (d, {})


@pytest.mark.parametrize("epilog", ALL)
def test_each_epilog_on_the_cluster(client, epilog):
    case = Case(epilog)
    case.check(*dask.compute(*case.run()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epilog", ["relu_aux_bias", "gelu_aux", "drelu_bgrad", "silu_bias"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_methods_and_types(client, method, epilog, dtype):
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


def runs(client):
    return sum(1 for _, event in client.get_events("distmm") if event["action"] == "done")


def test_one_run_makes_all_outputs(client):
    case = Case("relu_aux_bias")
    d, aux = case.run()
    before = runs(client)
    case.check(*dask.compute(d, aux))
    assert runs(client) == before + 1
    case = Case("gelu_aux")
    d, aux = case.run(result_amax=True)
    before = runs(client)
    alone = aux["gelu_aux"].compute()
    assert runs(client) == before + 1
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


BAD = [
    ({"epilog": "swish"}, "unknown epilog 'swish'"),
    ({"epilog": 3}, "expected a name"),
    ({"epilog": "relu_bias"}, r"needs the inputs \['bias'\]; found \[\]"),
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
    spec = Finish(epilog=epilog)
    inputs = {"bias": np.zeros((1, 24)), "relu_aux": np.ones((1, 24), bool), "gelu_aux": np.ones((1, 24))}
    with np.errstate(all="ignore"):
        d, _ = finish(np, spec, x.reshape(1, -1).copy(), inputs)
    assert np.isnan(d[0, 22])
    assert d.dtype == np.float64


def test_operator_is_untouched_by_all_this(client):
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        a = da.ones((20, 20), chunks=5)
        np.testing.assert_array_equal((a @ a).compute(), np.full((20, 20), 20.0))
