"""FP8, bytes and compute types on GPU workers, within the bounds that docs/precision.md derives."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product, random_chunks
from narrow_cases import PAIRS, Narrow, random_fp8, to_float64

from dask_distmm import DistMMError, PlanError, dequantize, matmul, quantize
from dask_distmm.numeric.types import FP8, typed

METHODS = ["auto", "local", "allgather", "reducescatter", "allreduce"]
RESULTS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def hopper(k):
    """Of a sum on tensor cores with 13 bits: 32 products and the sum so far are cut off at a time."""
    return 34 * -(-k // 32) * 2.0**-13


def to_dask(x, kind="cupy"):
    chunks = tuple(random_chunks(np.random.default_rng(), size, 4) for size in x.shape)
    array = da.from_array(x, chunks=chunks)
    if kind == "numpy":
        return array
    import cupy

    carried = np.uint8 if x.dtype in FP8.values() else x.dtype
    return array.map_blocks(
        lambda chunk: cupy.asarray(chunk.view(carried)), dtype=carried, meta=cupy.empty((0,) * x.ndim, carried)
    )


def computed(client, array, name=""):
    """A Dask array of CuPy or NumPy chunks as one NumPy array, its bytes read as a type."""
    parts = np.empty(array.numblocks, object)
    futures = client.compute(list(array.to_delayed().ravel()))
    for index, part in zip(np.ndindex(array.numblocks), client.gather(futures), strict=True):
        host = part.get() if hasattr(part, "get") else part
        parts[index] = typed(np.asarray(host), name or array.dtype.name)
    return np.block(parts.tolist()) if array.ndim else parts[()]


def check(client, pair, to, method="auto", kind="cupy", shape=(67, 59, 71), orders="CC", lazy=False, **more):
    rng, (m, n, k) = np.random.default_rng(), shape
    a, b = random_fp8(rng, (m, k), pair[0], orders[0]), random_fp8(rng, (k, n), pair[1], orders[1])
    scales = {"a": 0.25, "b": 3.0} | ({"d": 0.01} if to in FP8 else {})
    given = {key: da.from_array(np.float32(value)) for key, value in scales.items()} if lazy else scales
    stated = {"a_type": pair[0], "b_type": pair[1], "quantization_scales": given, "result_type": to}
    formula = {}
    if "beta" in more:
        formula = {"beta": more["beta"], "c": rng.standard_normal((m, n)).astype(np.float32)}
        stated |= {"c": to_dask(formula["c"], kind), "beta": more["beta"]}
    operands = to_dask(a, kind), to_dask(b, kind)
    amax = to in FP8 or to == "float32"
    found = matmul(*operands, method=method, result_amax=amax, **stated)
    d, aux = dask.persist(*(found if amax else (found, {})))
    case = Narrow(a, b, scales, sums=hopper(k), **formula)
    case.check(computed(client, d, to), to, computed(client, aux["result_amax"]) if amax else None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("orders", ["CC", "FF", "CF", "FC"])
def test_methods_and_orders(clusters, nworkers, method, orders):
    check(clusters(nworkers)[0], PAIRS[0], "float32", method, orders=orders)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("to", RESULTS)
def test_pairs_and_results(clusters, nworkers, pair, to):
    check(clusters(nworkers)[0], pair, to)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 64, 48), (5, 130, 3), (256, 512, 1024)])
def test_shapes(clusters, nworkers, method, shape):
    check(clusters(nworkers)[0], PAIRS[1], "bfloat16", method, shape=shape)


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]])
@pytest.mark.parametrize("kind", ["numpy", "cupy"])
def test_kinds_of_chunks_lazy_scales_and_c(clusters, nworkers, pair, kind):
    check(clusters(nworkers)[0], pair, "float8_e5m2", kind=kind, lazy=True, beta=0.5)


@pytest.mark.engines("cublasmp")
def test_summa_is_refused(clusters, nworkers):
    clusters(nworkers)
    with pytest.raises(PlanError, match="summa"):
        check(None, PAIRS[0], "float32", "summa")


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_quantize(clusters, nworkers, name):
    client, _ = clusters(nworkers)
    x = np.random.default_rng().standard_normal((60, 50)).astype(np.float32)
    q, scale = quantize(to_dask(x), name)
    back = dequantize(q, scale, q_type=name)
    q, scale, back = dask.persist(q, scale, back)
    expected, by = dask.compute(*quantize(da.from_array(x), name))
    np.testing.assert_array_equal(computed(client, scale), by)
    np.testing.assert_array_equal(computed(client, q, expected.dtype.name).view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(computed(client, back), to_float64(expected).astype(np.float32) * by)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_block_scales_are_refused(clusters, nworkers, form):
    clusters(nworkers)
    with pytest.raises(PlanError, match=r"compute capability 10\.0 .*this GPU has \d+\.\d"):
        quantize(to_dask(np.ones((32, 32), np.float32)), form)


@pytest.mark.parametrize("method", [*METHODS, "summa"])
def test_int8_to_int32(clusters, nworkers, method):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((60, 70), (70, 50)))
    d = matmul(to_dask(a), to_dask(b), result_type="int32", method=method).persist()
    np.testing.assert_array_equal(computed(client, d), a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("method", [*METHODS, "summa"])
def test_tf32(clusters, nworkers, method):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 80)))
    d = computed(client, matmul(to_dask(a), to_dask(b), compute_type="tf32", method=method).persist())
    exact, magnitude = a.astype(float) @ b.astype(float), abs(a).astype(float) @ abs(b)
    # The hardware may cut operands off instead of rounding them: 2**-10 each.
    assert (abs(d - exact) <= (2 * 2.0**-10 + 2.0**-18) * magnitude).all()


@pytest.mark.parametrize(("compute_type", "dtype"), [("bf16x9", "float32"), ("fp64_emulated", "float64")])
def test_emulation_is_right_or_says_why_not(clusters, nworkers, compute_type, dtype):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((64, 96), (96, 80)))
    try:
        d = computed(client, matmul(to_dask(a), to_dask(b), compute_type=compute_type).persist())
    except DistMMError as error:
        pytest.skip(f"the library does not do it here: {error}")
    assert_product(a, b, d)
