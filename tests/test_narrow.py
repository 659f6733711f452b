"""FP8, block scales, bytes to int32, compute types: conversions, on worker processes, without a run, refused."""

from __future__ import annotations

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from conformance import assert_product, make_problem, random_chunks
from hypothesis import given
from hypothesis import strategies as st
from narrow_cases import PAIRS, Narrow, random_fp8, to_float64

import dask_distmm
from dask_distmm import PlanError, dequantize, explain, matmul, quantize
from dask_distmm.numeric.types import (
    FP8,
    decode,
    encode,
    resolve_types,
    round_tf32,
    saturated,
    takes_on_cpus,
    takes_on_gpus,
)
from dask_distmm.planning import Problem

METHODS = ["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]
RESULTS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
ONE = {"a": 1.0, "b": 1.0}


def to_dask(x, most=4):
    return da.from_array(x, chunks=tuple(random_chunks(np.random.default_rng(), size, most) for size in x.shape))


def operands(pair, shape=(43, 38, 51)):
    rng, (m, n, k) = np.random.default_rng(), shape
    return random_fp8(rng, (m, k), pair[0]), random_fp8(rng, (k, n), pair[1])


# Conversions


@pytest.mark.parametrize("name", FP8)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_integers_round_as_ml_dtypes_does(name, bits):
    x = np.array(bits, np.uint32).view(np.float32)
    x[np.isnan(x)] = np.nan  # signalling ones warn
    expected = saturated(x, name).view(np.uint8)
    found = encode(np, x, name)
    nan = np.isnan(x)
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    np.testing.assert_array_equal(found[nan] & 0x7F, expected[nan] & 0x7F)


@pytest.mark.parametrize("name", FP8)
def test_all_numbers_ties_and_neighbours(name):
    """Every number, the middle of every two, and what lies next to these middles."""
    numbers = np.arange(256, dtype=np.uint8).view(FP8[name]).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = (np.nextafter(middles, np.float32(to)) for to in (np.inf, -np.inf))
    x = np.concatenate([numbers, middles, up, down, np.array([np.inf, -np.inf, 1e30], np.float32)]).astype(np.float32)
    codes = encode(np, x, name)
    np.testing.assert_array_equal(codes, saturated(x, name).view(np.uint8))
    np.testing.assert_array_equal(decode(np, codes[: len(numbers)], name, np.dtype(np.float32)), numbers)
    assert abs(decode(np, codes, name, np.dtype(np.float16)).astype(np.float32)).max() == numbers[-1]
    assert np.isnan(decode(np, encode(np, np.full(1, np.nan, np.float32), name), name, np.dtype(np.float32))).all()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50))
def test_tf32_is_to_the_nearest_of_10_bits(bits):
    x = np.array(bits[: len(bits) // 2 * 2], np.uint32).view(np.float32)
    x[np.isnan(x)] = np.nan
    y = x.copy()
    round_tf32(y.view(np.complex64))
    np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
    assert not (y.view(np.uint32)[~np.isnan(x)] & 0x1FFF).any()
    normal = np.isfinite(x) & np.isfinite(y) & (abs(x) >= 2.0**-126)
    assert (abs(y[normal].astype(float) - x[normal]) <= 2.0**-11 * abs(x[normal].astype(float))).all()
    np.testing.assert_array_equal(x[np.isinf(x)], y[np.isinf(x)])


def test_ties_of_tf32_go_to_even():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 2**-149], np.float32)
    round_tf32(x)
    np.testing.assert_array_equal(x, np.array([1, 1 + 2**-9, -1, 0], np.float32))


# Quantizing


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32"])
def test_quantize(client, name, dtype):
    rng = np.random.default_rng()
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x = (rng.standard_normal((40, 30)) * 1000).astype(kind)
    q, scale = quantize(to_dask(x), name)
    back = dequantize(q, scale, "float64")
    q, scale, back = dask.compute(q, scale, back)
    stored = "float8_e4m3fn" if name == "float8_e4m3" else name
    top, half, least = (448, 2.0**-4, 2.0**-10) if stored == "float8_e4m3fn" else (57344, 2.0**-3, 2.0**-17)
    assert q.dtype == FP8[stored]
    assert scale.dtype == np.float32
    exact = to_float64(x)
    assert abs(exact).max() / top == pytest.approx(float(scale), rel=1e-6)
    assert abs(to_float64(q)).max() == top
    assert (abs(back - exact) <= (half + 2.0**-22) * abs(exact) + least * float(scale)).all()


def test_quantize_what_is_not_finite_or_zero(client):
    q, scale = dask.compute(*quantize(da.zeros((4, 4), chunks=2), "float8_e4m3"))
    assert scale == 1
    assert not to_float64(q).any()
    x = da.from_array(np.array([[1.0, np.inf], [np.nan, -3.5]]), chunks=1)
    q, scale = dask.compute(*quantize(x, "float8_e4m3"))
    assert scale == np.float32(3.5 / 448)
    np.testing.assert_array_equal(to_float64(q), [[128, 448], [np.nan, -448]])
    q, scale = dask.compute(*quantize(da.ones((0, 3)), "float8_e5m2"))
    assert (q.shape, scale) == ((0, 3), 1)


def test_a_scale_from_elsewhere_saturates(client):
    q, scale = dask.compute(*quantize(da.from_array(np.array([1.0, 1000.0])), "float8_e4m3", scale=1.0))
    np.testing.assert_array_equal(to_float64(q), [1, 448])
    assert scale == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8_e3m4"}, "float8_e3m4"),
        ({"dtype": "float32"}, "unknown dtype"),
        ({"dtype": "mxfp8", "scale": 1.0}, "finds its own"),
        ({"dtype": "nvfp4", "axis": 2}, "axis=2"),
    ],
)
def test_quantize_refuses(options, words):
    with pytest.raises(PlanError, match=words):
        quantize(da.ones((4, 4)), **options)
    with pytest.raises(PlanError, match="real numbers"):
        quantize(da.ones((4, 4), dtype=complex), "float8_e4m3")
    with pytest.raises(PlanError, match="expected FP8"):
        dequantize(da.ones((4, 4)), 1.0)


# Products


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("to", RESULTS)
def test_pairs_and_results(client, pair, to):
    a, b = operands(pair)
    scales = {"a": 0.25, "b": 3.0} | ({"d": 0.02} if to in FP8 else {})
    d, aux = matmul(to_dask(a), to_dask(b), quantization_scales=scales, result_type=to, result_amax=True, alpha=-0.5)
    d, aux = dask.compute(d, aux)
    Narrow(a, b, scales, alpha=-0.5).check(d, to, aux["result_amax"])


@pytest.mark.parametrize("method", METHODS)
def test_methods(client, method):
    a, b = operands(PAIRS[1])
    scales = {"a": 2.0, "b": 0.125, "c": 4.0, "d": 0.02}
    c = random_fp8(np.random.default_rng(), (43, 38), "float8_e5m2")
    options = {"beta": 0.5, "quantization_scales": scales, "method": method}
    d = matmul(to_dask(a), to_dask(b), to_dask(c), **options)
    Narrow(a, b, scales, beta=0.5, c=c).check(d.compute(), "float8_e4m3fn")


@pytest.mark.parametrize("to", ["float32", "float8_e5m2"])
def test_epilogs(client, to):
    a, b = operands(PAIRS[0])
    bias = np.random.default_rng().standard_normal(38).astype(np.float32) * 100
    scales = {"a": 0.5, "b": 1.0} | ({"d": 3.0} if to in FP8 else {})
    options = {"quantization_scales": scales, "result_type": to, "result_amax": True}
    d, aux = dask.compute(
        *matmul(to_dask(a), to_dask(b), epilog="gelu_aux_bias", epilog_inputs={"bias": bias}, **options)
    )
    case = Narrow(a, b, scales, f=lambda x: np.maximum(x + bias, 0))
    # GELU's tanh form is ReLU but near 0, where the difference is below 0.2.
    case.error = case.error * 1.2 + 0.2
    case.check(d, to, aux["result_amax"])
    plain = Narrow(a, b, scales, f=lambda x: x + bias)
    assert aux["gelu_aux"].dtype == np.float32
    plain.check(aux["gelu_aux"] * np.float32(plain.scale_d), "float32")


def test_scales_as_lazy_arrays(client):
    a, b = operands(PAIRS[0])
    given = {"a": 0.3, "b": 7.0, "c": 11.0, "d": 0.05}
    c = random_fp8(np.random.default_rng(), (43, 38), "float8_e4m3fn")
    lazy = {
        "a": da.from_array(np.float32(0.3)),
        "b": da.from_array(np.full(1, 7.0, np.float32)),
        "c": da.from_array(np.float64(11.0)),
        "d": da.from_array(np.full(1, 0.05, np.float32))[0],
    }
    d, aux = matmul(to_dask(a), to_dask(b), to_dask(c), beta=1, quantization_scales=lazy, result_amax=True)
    d, aux = dask.compute(d, aux)
    Narrow(a, b, given, beta=1.0, c=c).check(d, "float8_e4m3fn", aux["result_amax"])
    numpy_scales = {key: np.array([value], np.float32) for key, value in given.items() if key != "c"}
    d = matmul(to_dask(a), to_dask(b), quantization_scales=numpy_scales).compute()
    Narrow(a, b, given).check(d, "float8_e4m3fn")


def test_bytes_with_a_stated_type(client):
    a, b = operands(PAIRS[2])
    x, y = to_dask(a.view(np.uint8)), to_dask(b.view(np.uint8))
    options = {"a_type": "float8_e5m2", "b_type": "float8_e4m3", "quantization_scales": ONE, "result_type": "float32"}
    Narrow(a, b, ONE).check(matmul(x, y, **options).compute(), "float32")
    Narrow(a, b, ONE).check(matmul(x, y, **options).compute(scheduler="threads"), "float32")
    # One array of bytes, read in two ways.
    square = random_fp8(np.random.default_rng(), (20, 20), "float8_e5m2")
    x = to_dask(np.abs(square.astype(np.float32)).astype(FP8["float8_e5m2"]).view(np.uint8) & 0x6F)
    found = matmul(x, x, **options).compute()
    left, right = (x.compute().view(FP8[name]) for name in ("float8_e5m2", "float8_e4m3fn"))
    Narrow(left, right, ONE).check(found, "float32")


@pytest.mark.parametrize("to", RESULTS)
def test_without_a_cluster_dask_does_the_same(to):
    with dask.config.set(scheduler="threads"):
        a, b = operands(PAIRS[1])
        scales = {"a": da.from_array(np.float32(0.25)), "b": 3.0} | ({"d": 0.02} if to in FP8 else {})
        d, aux = matmul(to_dask(a), to_dask(b), quantization_scales=scales, result_type=to, result_amax=True)
        assert not any("distmm-barrier" in str(key) for key in d.dask)
        d, aux = dask.compute(d, aux)
        Narrow(a, b, scales | {"a": 0.25}).check(d, to, aux["result_amax"])


def test_e5m2_travels_between_processes(client):
    """distributed alone can't send these; see `comms.serializers`."""
    a, b = operands(PAIRS[3], (60, 60, 60))
    d = matmul(to_dask(a), to_dask(b), quantization_scales=ONE | {"d": 0.01}).rechunk((60, 7)).persist()
    np.testing.assert_array_equal(d.T.compute(), d.compute().T)
    assert d.compute().dtype == FP8["float8_e5m2"]


def test_nan_stays_nan_and_infinities_saturate(client):
    a = np.array([[np.nan, 1], [1, 1], [np.inf, 0]], np.float32).astype(FP8["float8_e5m2"])
    b = np.ones((2, 2), FP8["float8_e5m2"])
    d = matmul(to_dask(a), to_dask(b), quantization_scales=ONE | {"d": 1e9}).compute()
    np.testing.assert_array_equal(to_float64(d)[:, 0], [np.nan, 57344, 57344])


def test_delayed_scaling(client):
    """The example of docs/precision.md: scales come from earlier steps' largest values."""
    rng = np.random.default_rng()
    history, scale = [], da.ones((), dtype=np.float32)
    weights = rng.standard_normal((30, 30))
    qw, sw = quantize(to_dask(weights), "float8_e4m3")
    for step in range(5):
        x = rng.standard_normal((40, 30)) * (1 + step / 10)
        qx, sx = quantize(to_dask(x), "float8_e4m3")
        scales = {"a": sx, "b": sw, "d": 1 / scale}
        d, aux = dask.persist(*matmul(qx, qw, quantization_scales=scales, result_amax=True))
        history = [*history, aux["result_amax"]][-16:]
        used, scale = scale, da.stack(history).max() / 448
        found = dequantize(d, used, "float64").compute()
        exact, reach = x @ weights, 448 * float(used)
        # A 16th for each of A and B along the sum, and for D; E4M3 has 448 * 2**9 as its range. What a step grows
        # beyond the largest values before it is cut off, which makes no error larger.
        rounding = 0.14 * (abs(x) @ abs(weights)) + 0.01
        assert (abs(found - exact.clip(-reach, reach)) <= rounding + 0.07 * abs(exact)).all()
        assert abs(float(aux["result_amax"]) - abs(exact).max()) <= rounding.max()
        if step:
            # Not saturated by more than a step can grow, nor far below the range.
            assert 100 < abs(to_float64(d.compute())).max() <= 448


BAD = [
    ({}, "needs \\['a', 'b', 'd'\\]"),
    ({"quantization_scales": ONE}, "needs \\['a', 'b', 'd'\\]"),
    ({"quantization_scales": ONE | {"d": 1}, "result_type": "float32"}, "takes \\['a', 'b'\\]"),
    ({"quantization_scales": ONE | {"c": 1}, "result_type": "float32"}, "takes \\['a', 'b'\\]"),
    ({"quantization_scales": ONE | {"d": 0}}, "positive"),
    ({"quantization_scales": ONE | {"d": np.nan}}, "positive"),
    ({"quantization_scales": ONE | {"d": "x"}}, "expected a number"),
    ({"quantization_scales": ONE | {"d": np.ones(3)}}, "shape"),
    ({"quantization_scales": ONE, "result_type": "float64"}, "result_type='float64'; for float8_e4m3fn @"),
    ({"quantization_scales": ONE, "result_type": "float7"}, "float7"),
    ({"quantization_scales": ONE, "result_type": "float32", "epilog": "bgrada"}, "bgrada"),
    ({"quantization_scales": ONE, "result_type": "float32", "compute_type": "tf32"}, "there are 'fp32'"),
    ({"quantization_scales": ONE, "a_type": "float8_e5m2"}, "a_type='float8_e5m2', but the array is float8_e4m3fn"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_input_is_refused_at_the_call(options, words):
    a, b = map(to_dask, operands(PAIRS[0], (4, 4, 4)))
    for function in (matmul, explain):
        with pytest.raises(PlanError, match=words):
            function(a, b, **options)


def test_other_operands_are_refused():
    a = to_dask(operands(PAIRS[0], (4, 4, 4))[0])
    with pytest.raises(PlanError, match="FP8 is multiplied by FP8"):
        matmul(a, da.ones((4, 4)), quantization_scales=ONE)
    with pytest.raises(PlanError, match="takes \\[\\]"):
        matmul(da.ones((4, 4)), da.ones((4, 4)), quantization_scales=ONE)
    with pytest.raises(PlanError, match="need matrices"):
        matmul(a, a[:, 0], quantization_scales=ONE | {"d": 1.0})
    with pytest.raises(PlanError, match="can be stated for arrays of uint8"):
        matmul(da.ones((4, 4)), a, a_type="float8_e4m3")
    with pytest.raises(PlanError, match="result_type='float64'; for float32 @ float32 there are float32"):
        matmul(da.ones((4, 4), dtype="f4"), da.ones((4, 4), dtype="f4"), result_type="float64")


def test_the_operator_leaves_fp8_alone(client, take_all):
    a = to_dask(operands(PAIRS[0], (4, 4, 4))[0])
    with dask_distmm.enabled():
        assert not any("distmm-barrier" in str(key) for key in (a @ a).dask)


# Block scales


@pytest.mark.parametrize(("form", "block", "share"), [("mxfp8", 32, 0.125), ("nvfp4", 16, 0.3)])
def test_block_scales(client, form, block, share):
    rng = np.random.default_rng()
    x = rng.standard_normal((70, 101)) * 10.0 ** rng.integers(-4, 5, (70, 1))
    x[3, :40] = 0
    q = quantize(to_dask(x, 5), form)
    values, scales, one, back = dask.compute(q.values, q.block_scales, q.scale, dequantize(q, dtype="float64"))
    assert values.shape == q.shape == (70, 101)
    assert scales.shape == (70, -(-101 // block))
    by = np.repeat(scales.astype(np.float64), block, 1)[:, :101]
    np.testing.assert_array_equal(back, (values.astype(np.float64) * by).astype(np.float32) * one)
    # The spacing of numbers is a share of the block's largest one, and what is above the format is cut off.
    edges = np.arange(0, 101, block)
    largest = np.repeat(np.maximum.reduceat(abs(x), edges, axis=1), block, 1)[:, :101]
    assert (abs(back - x) <= share * largest + 448 * 6 * float(one) * 2.0**-9).all()


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_products_with_block_scales(client, form):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((40, 70)), rng.standard_normal((70, 30))
    qa, qb = quantize(to_dask(a), form), quantize(to_dask(b), form, axis=0)
    d, wide_a, wide_b = dask.compute(matmul(qa, qb, op_a="N"), dequantize(qa), dequantize(qb))
    assert_product(wide_a, wide_b, d)
    with pytest.raises(PlanError, match="expected one format for both"):
        matmul(qa, to_dask(b))
    with pytest.raises(PlanError, match="expected one format for both"):
        matmul(qa, quantize(to_dask(b), form))
    other = "nvfp4" if form == "mxfp8" else "mxfp8"
    with pytest.raises(PlanError, match="expected one format for both"):
        explain(qa, quantize(to_dask(b), other, axis=0))


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_block_scales_of_what_is_not_finite(client, form):
    x = np.ones((2, 64))
    x[0, 5], x[1, 5] = np.nan, np.inf
    back = dequantize(quantize(da.from_array(x, chunks=(1, 50)), form)).compute()
    assert np.isnan(back[0, 5])
    assert not np.isnan(back[:, 32:]).any()
    assert np.isfinite(back[1]).all()
    assert (back[1, :5] > 0.9).all()


# Bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pair", [("int8", "int8"), ("uint8", "int8")])
def test_int8_to_int32(client, method, pair):
    rng = np.random.default_rng()
    a, b = (
        rng.integers(np.iinfo(name).min, np.iinfo(name).max, shape, dtype=name, endpoint=True)
        for name, shape in zip(pair, ((40, 50), (50, 30)), strict=True)
    )
    d = matmul(to_dask(a), to_dask(b), result_type="int32", method=method).compute()
    assert d.dtype == np.int32
    np.testing.assert_array_equal(d, a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize(
    ("pair", "values", "most"),
    [
        (("int8", "int8"), (-128, -128), 2**17 - 1),
        (("uint8", "int8"), (255, -128), 65793),
        (("uint8", "uint8"), (255, 255), 33025),
    ],
)
def test_int32_holds_the_longest_sums_that_are_promised(client, pair, values, most):
    """And one product more wraps around, as NumPy's sums do."""
    for k in (most, most + 1):
        a, b = (da.full(s, v, dtype=p, chunks=50000) for s, v, p in zip(((1, k), (k, 1)), values, pair, strict=True))
        found = int(matmul(a, b, result_type="int32").compute()[0, 0])
        exact = k * values[0] * values[1]
        assert found == (exact + 2**31) % 2**32 - 2**31
        assert (found == exact) == (k == most)


@pytest.mark.parametrize("scheduler", ["distributed", "threads"])
def test_very_long_sums_of_bytes_wrap_around(client, scheduler):
    k = 2**21 + 3
    with dask.config.set(scheduler=scheduler):
        a, b = da.full((1, k), 255, dtype="uint8", chunks=700000), da.full((k, 1), -128, dtype="int8", chunks=700000)
        found = int(matmul(a, b, result_type="int32").compute()[0, 0])
    assert found == (-255 * 128 * k + 2**31) % 2**32 - 2**31


def test_int8_alone_is_numpys(client):
    a = da.from_array(np.full((4, 4), 100, np.int8), chunks=2)
    assert matmul(a, a).dtype == np.int8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_to_float32(client, dtype):
    rng = np.random.default_rng()
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    a, b = (rng.standard_normal(shape).astype(kind) for shape in ((40, 50), (50, 30)))
    d, aux = dask.compute(*matmul(to_dask(a), to_dask(b), result_type="float32", epilog="relu_aux"))
    wide = [x.astype(np.float32) for x in (a, b)]
    product = matmul(to_dask(a), to_dask(b), result_type=np.float32).compute()
    assert_product(*wide, product)
    np.testing.assert_allclose(d, np.maximum(product, 0), rtol=1e-4, atol=1e-4)
    assert aux["relu_aux"].dtype == bool


# Compute types


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_tf32(client, method, dtype):
    """Operands have 11 bits: each is off by 2**-11 of itself at most, each product by 2**-10 and a little."""
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((43, 51), (51, 38)))
    if dtype == "complex64":
        a, b = a + 1j * a[::-1], b * np.complex64(1 - 2j)
    d = matmul(to_dask(a), to_dask(b), compute_type="tf32", method=method).compute()
    assert d.dtype == dtype
    rounded = [x.copy() for x in (a, b)]
    for x in rounded:
        round_tf32(x)
    assert_product(*rounded, d)
    exact = a.astype(complex) @ b.astype(complex)
    bound = (2 * 2.0**-11 * (2 if dtype == "complex64" else 1) + 2.0**-18) * (abs(a) @ abs(b)).astype(float)
    assert (abs(d - exact) <= bound).all()
    assert (abs(d - exact) > 2.0**-20 * (abs(a) @ abs(b))).any(), "not rounded at all"


@pytest.mark.parametrize(
    ("compute_type", "dtype"),
    [
        ("fp32", "float32"),
        ("fp32", "bfloat16"),
        ("bf16x9", "float32"),
        ("fp64", "float64"),
        ("fp64_emulated", "float64"),
    ],
)
def test_the_others_are_as_good_as_usual(client, compute_type, dtype):
    rng = np.random.default_rng()
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    a, b = (rng.standard_normal(shape).astype(kind) for shape in ((43, 51), (51, 38)))
    assert_product(a, b, matmul(to_dask(a), to_dask(b), compute_type=compute_type).compute())


def test_config_is_a_default_where_it_fits(client):
    f4, f8 = da.ones((8, 8), dtype="f4"), da.ones((8, 8))
    with dask.config.set({"distmm.compute-type": "tf32"}):
        assert explain(f4, f4).problem.compute == "tf32"
        assert explain(f8, f8).problem.compute == ""
        assert explain(f4, f4, compute_type="fp32").problem.compute == ""
    with dask.config.set({"distmm.compute-type": "fast"}), pytest.raises(PlanError, match="distmm.compute-type 'fast'"):
        matmul(f4, f4)
    assert explain(f4, f4).problem.compute == ""
    assert "computed in float32, tf32" in repr(explain(f4, f4, compute_type="tf32"))


def test_compute_types_that_do_not_fit():
    x = da.ones((4, 4))
    with pytest.raises(PlanError, match="compute_type='tf32' is not for float64 operands; .* 'fp64', 'fp64_emulated'"):
        matmul(x, x, compute_type="tf32")
    with pytest.raises(PlanError, match="unknown compute_type 'fast'"):
        matmul(x, x, compute_type="fast")
    with pytest.raises(PlanError, match="is not for int64 operands; .* none"):
        matmul(x.astype(int), x.astype(int), compute_type="fp32")


# What the plan and messages say


def test_explain_shows_scales(client):
    a, b = map(to_dask, operands(PAIRS[0]))
    scales = {"a": da.ones(()), "b": 2.0, "d": 0.5}
    text = repr(explain(a, b, quantization_scales=scales, epilog="relu", result_type="float8_e5m2"))
    assert "D = 0.5 (relu(2 scale_a A B))" in text
    assert "43 x 38 float8_e5m2" in text
    assert "computed in float32" in text


def test_problems_survive_the_wire():
    chunks = ((4, 4), (3, 5))
    problem = make_problem(chunks, ((3, 5), (4,)), "float8_e4m3fn", b_dtype="float8_e5m2", compute="")
    assert Problem.from_wire(problem.to_wire()) == problem
    assert problem.matrix_types == ("float8_e4m3fn", "float8_e5m2")
    with pytest.raises(dask_distmm.ProtocolError, match="compute 'x'"):
        Problem.from_wire(problem.to_wire() | {"compute": "x"})


def test_what_engines_take():
    fp8 = ["float8_e4m3fn", "float8_e5m2", "bfloat16"]
    assert takes_on_cpus("numpy", fp8)
    assert takes_on_gpus("numpy", fp8)
    assert takes_on_gpus("cupy", ["int8", "uint8", "int32"])
    assert not takes_on_gpus("cupy", ["int8", "int8", "int8"])
    types = resolve_types(np.dtype(np.uint8), FP8["float8_e5m2"], a_type="float8_e4m3")
    assert types[:3] == ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn")
