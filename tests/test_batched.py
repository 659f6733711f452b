"""Operands of more than two dimensions, without a cluster and on worker processes, both ways."""

from __future__ import annotations

import asyncio
import math
import sys
import types

import dask
import dask.array as da
import devices
import numpy as np
import pytest
from conformance import assert_product, random_chunks, random_matrix
from distributed import Client
from epilog_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import is_collective
from narrow_cases import Narrow, random_fp8

import dask_distmm
from dask_distmm import NotCollective, PlanError, ProjectedMemoryError, explain, matmul, matmul_grouped
from dask_distmm.arrays.product import multiply_items
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import FP8, dtype_from_name

WAYS = ["items", "collective"]


class FakeCuPy(types.ModuleType):
    """NumPy's functions with results of another type: what is not called by way of it shows."""

    def __getattr__(self, name):
        function = getattr(np, name)
        return lambda *args, **kwargs: np.asanyarray(function(*args, **kwargs)).view(devices.ndarray)


@pytest.mark.parametrize("epilog", ["", "relu_aux_bias", "gelu", "dgelu_bgrad", "drelu", "hardswish", "sigmoid_aux"])
def test_cupy_chunks_stay_cupy(monkeypatch, epilog):
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy("cupy"))
    # Nothing is sent, and Dask's serializers would be registered for the stand-in.
    monkeypatch.setattr("dask_distmm.arrays.product.register_serializers", lambda: None)
    case = Case(epilog, "float32")
    formula = Formula(epilog=epilog, amax=True)
    inputs = [np.atleast_2d(x).view(devices.ndarray) for x in case.inputs.values()]
    found = multiply_items(
        case.a.view(devices.ndarray),
        [case.b],  # NumPy's, as on a GPU worker that was sent one
        *inputs,
        dtypes=("float32",) * (3 + len(inputs)) if formula.gradient != "relu" else ("float32",) * 3 + ("bool",),
        names=tuple(case.inputs),
        formula=formula,
    )
    assert all(type(x) is devices.ndarray for x in found)
    d, *aux = (x.view(np.ndarray) for x in found)
    named = dict(zip(formula.per_element, aux, strict=True))
    assert named.pop("result_amax").shape == (1, 1)
    case.check(d, {name: x.reshape(-1) if name == formula.sums else x for name, x in named.items()})


def test_bfloat16_that_lost_its_name():
    rng = np.random.default_rng()
    a, b = (random_matrix(rng, shape, dtype_from_name("bfloat16"), "C") for shape in ((9, 8), (8, 7)))
    d = multiply_items(a.view("V2"), b, dtypes=("bfloat16",) * 3, names=(), formula=Formula())
    assert_product(a, b, d)


@pytest.mark.parametrize("to", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_fp8_on_cupy_chunks_is_bytes(monkeypatch, to):
    """Whole items on a GPU: bytes go in, and bytes come out where the result is FP8."""
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy("cupy"))
    # Nothing is sent, and Dask's serializers would be registered for the stand-in.
    monkeypatch.setattr("dask_distmm.arrays.product.register_serializers", lambda: None)
    rng = np.random.default_rng()
    pair = "float8_e4m3fn", "float8_e5m2"
    a, b = (random_fp8(rng, shape, name) for shape, name in zip(((3, 9, 8), (3, 8, 7)), pair, strict=True))
    scale = np.full((1, 1), 0.5, np.float32)
    formula = Formula(alpha=(0.25, 0.0), scale_d=0.02, scales=("scale_a",), amax=True)
    d, amax = multiply_items(
        *(x.view(np.uint8).view(devices.ndarray) for x in (a, b)),
        scale.view(devices.ndarray),
        dtypes=(to, *pair, "float32"),
        names=("scale_a",),
        formula=formula,
    )
    assert type(d) is type(amax) is devices.ndarray
    d = d.view(np.ndarray)
    assert (d.dtype == np.uint8) == (to in FP8)
    case = Narrow(a, b, {"a": 0.5, "b": 0.25, "d": 0.02})
    case.check(d.view(FP8[to]) if to in FP8 else d, to, np.asarray(amax).max())


@pytest.mark.filterwarnings("ignore:Increasing number of chunks")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_batches_against_numpy_without_a_cluster(seed):
    """Without a cluster Dask's own function does it; with imagined workers both ways are planned."""
    a, b, x, y = operands(seed)
    found = matmul(x, y)
    assert found.shape == np.matmul(a, b).shape
    made = explain(x, y, workers=3)
    if 0 in (*a.shape, *b.shape):
        assert isinstance(made, NotCollective)
    else:
        assert made.items.seconds > 0
        assert made.collective.seconds > 0
        assert made.batch.count == math.prod(np.matmul(a, b).shape[: len(made.batch.shape)])
        assert made.route in repr(made)


def operands(seed=None, most=30):
    """Random operands that broadcast, one at least of more than two dimensions; as NumPy arrays and as Dask's."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 5, rng.integers(1, 4)).tolist()
    m, n, k = rng.integers(1, most, 3).tolist()
    shapes = []
    for core in ((m, k), (k, n)):
        own = [size if rng.random() < 0.8 else 1 for size in batch][rng.integers(0, len(batch) + 1) :]
        shapes.append((*own, *core))
    if max(map(len, shapes)) == 2:
        shapes[0] = (*batch, m, k)
    if rng.random() < 0.2 and len(shapes[0]) > 2:
        shapes[1] = (k,)
    elif rng.random() < 0.2 and len(shapes[1]) > 2:
        shapes[0] = (k,)
    a, b = (rng.standard_normal(shape) for shape in shapes)
    x, y = (da.from_array(v, chunks=tuple(random_chunks(rng, size, 3) for size in v.shape)) for v in (a, b))
    return a, b, x, y


# On the cluster


@pytest.mark.parametrize("way", [*WAYS, "without a cluster"])
@pytest.mark.parametrize("to", ["float32", "float8_e5m2"])
def test_fp8(client, way, to):
    rng = np.random.default_rng()
    a, b = random_fp8(rng, (3, 20, 30), "float8_e4m3fn"), random_fp8(rng, (30, 25), "float8_e5m2")
    b = np.stack([b, b[::-1]])[:, None]  # (2, 1, 30, 25): D is (2, 3, 20, 25)
    c = random_fp8(rng, (20, 25), "float8_e4m3fn")
    x = da.from_array(a.view(np.uint8), chunks=(2, 11, 30))
    y = da.from_array(b, chunks=(1, 1, 17, 25))
    scales = {"a": 0.25, "b": 3.0, "c": 2.0} | ({"d": 0.02} if to in FP8 else {})
    options = {"a_type": "float8_e4m3", "result_type": to, "alpha": -0.5, "result_amax": True}
    options |= {"batch": way} if way in WAYS else {}
    given = scales | {"a": da.from_array(np.float32(0.25))}
    with dask.config.set({} if way in WAYS else {"scheduler": "threads"}):
        d, aux = matmul(x, y, c, beta=0.5, quantization_scales=given, **options)
        assert d.dtype == dtype_from_name(to)
        d, aux = dask.compute(d, aux)
        Narrow(a, b, scales, alpha=-0.5, beta=0.5, c=c).check(d, to, aux["result_amax"])
        # C is not read, nor its scale; all items share A.
        d = matmul(x[0], y, c, beta=0, quantization_scales=scales, **options | {"result_amax": False})
        Narrow(a[0], b, scales, alpha=-0.5).check(d.compute(), to)


def assert_batch(a, b, d):
    """Every item passes the gate."""
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(x, (*shape, *x.shape[-2:])) for x in (a, b))
    assert d.shape == (*shape, a.shape[-2], b.shape[-1])
    for index in np.ndindex(shape):
        assert_product(a[index], b[index], d[index])


def is_items(array):
    return any(str(name).startswith("matmul-items") for name in array.dask.layers)


@pytest.mark.parametrize("way", WAYS)
def test_random_batches(client, way):
    for _ in range(6 if way == "items" else 3):
        a, b, x, y = operands()
        d = matmul(x, y, batch=way)
        assert (is_items if way == "items" else is_collective)(d)
        expected = np.matmul(a, b)
        assert d.shape == expected.shape
        assert d.dtype == float
        found = d.compute()
        bound = 32 * np.finfo(float).eps * np.matmul(abs(a), abs(b))
        assert found.shape == expected.shape
        assert (abs(found - expected) <= bound).all()


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "complex64", "complex128"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_types(client, way, dtype):
    rng = np.random.default_rng()
    a, b = (
        np.stack([random_matrix(rng, shape, dtype_from_name(dtype), "C") for _ in range(2)])
        for shape in ((20, 31), (31, 17))
    )
    d = matmul(da.from_array(a, chunks=(1, 9, 31)), da.from_array(b, chunks=(2, 20, 17)), batch=way)
    assert d.dtype == a.dtype
    assert_batch(a, b, d.compute())


def test_two_types(client):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((3, 8, 9)).astype("f4"), rng.integers(-9, 9, (9, 7))
    assert_batch(a, b, matmul(da.from_array(a, chunks=2), da.from_array(b)).compute())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epilog", ["", "relu_aux_bias", "gelu", "drelu_bgrad", "bgrada", "bgradb"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_formulas(client, way, epilog, dtype):
    cases = [Case(epilog, dtype, shape=(13, 11, 17), alpha=0.5, beta=-2.0, bias="row") for _ in range(3)]
    a, b, c = (np.stack([getattr(case, name) for case in cases]) for name in "abc")
    inputs = {name: np.stack([case.inputs[name] for case in cases]) for name in cases[0].inputs}
    a, b, c = (da.from_array(x, chunks=(2, 6, 7)) for x in (a, b, c))
    found = matmul(a, b, c, epilog_inputs=inputs, batch=way, **cases[0].options)
    d, aux = found if isinstance(found, tuple) else (found, {})
    assert {name: (array.shape, array.dtype) for name, array in aux.items()} == {
        name: ((3, *expected.shape), np.dtype(bool if name == "relu_aux" else dtype))
        for name, expected in cases[0].aux.items()
    }
    d, aux = dask.compute(d, aux)
    for i, case in enumerate(cases):
        case.check(d[i], {name: array[i] for name, array in aux.items()})


@pytest.mark.parametrize("way", WAYS)
def test_inputs_are_broadcast_and_operands_turned(client, way):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 1, 9, 6)), rng.standard_normal((3, 5, 9)) + 0j
    c, bias = rng.standard_normal((3, 1, 5)), rng.standard_normal(5)
    d, aux = matmul(
        *(da.from_array(x, chunks=2) for x in (a, b)), c, alpha=2, beta=1j, op_a="T", op_b="C",
        epilog="bias", epilog_inputs={"bias": bias}, result_amax=True, batch=way,
    )  # fmt: skip
    expected = 2 * np.matmul(a.swapaxes(-1, -2), b.conj().swapaxes(-1, -2)) + 1j * c + bias
    assert aux["result_amax"].shape == ()
    d, aux = dask.compute(d, aux)
    np.testing.assert_allclose(d, expected, rtol=1e-12, atol=1e-12)
    assert aux["result_amax"] == pytest.approx(abs(expected).max(), rel=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_functions_and_wider_results(client, way):
    rng = np.random.default_rng()
    a, b, shift = rng.standard_normal((3, 7, 9)), rng.standard_normal((3, 9, 5)), rng.standard_normal((3, 1, 5))
    x, y = (da.from_array(v, chunks=4) for v in (a, b))
    d = matmul(x, y, epilog=lambda x, shift: np.tanh(x) + shift, epilog_inputs={"shift": shift}, batch=way)
    np.testing.assert_allclose(d.compute(), np.tanh(a @ b) + shift, rtol=1e-12, atol=1e-12)
    small = [rng.integers(-128, 128, shape, dtype="int8") for shape in ((2, 5, 40), (40, 6))]
    d = matmul(*(da.from_array(v, chunks=4) for v in small), result_type="int32", batch=way)
    assert d.dtype == np.int32
    np.testing.assert_array_equal(d.compute(), np.matmul(*(v.astype("int32") for v in small)))
    half = [x.astype("float16") for x in (x, y)]
    d = matmul(*half, result_type="float32", batch=way)
    assert d.dtype == np.float32
    wide = [v.astype("float16").astype(float) for v in (a, b)]
    np.testing.assert_allclose(d.compute(), wide[0] @ wide[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", ["a", "b"])
def test_a_shared_operand_makes_it_one_run(client, shared):
    rng = np.random.default_rng()
    shapes = [(7, 9), (2, 3, 9, 8)] if shared == "a" else [(2, 3, 7, 9), (9, 8)]
    a, b = (rng.standard_normal(shape) for shape in shapes)
    x, y = (da.from_array(v, chunks=4) for v in (a, b))
    d = matmul(x, y, batch="collective", epilog="relu")
    assert len({key for key in d.dask if "distmm-barrier" in str(key)}) == 1
    np.testing.assert_allclose(d.compute(), np.maximum(np.matmul(a, b), 0), rtol=1e-12, atol=1e-12)
    assert explain(x, y).runs == 1
    assert explain(x, y, result_amax=True).runs == 6


def test_plain_tasks_may_be_asked_for_where_the_configuration_names_an_engine(client):
    x = da.ones((4, 8, 8), chunks=(2, 8, 8))
    with dask.config.set({"distmm.engine": "numpy", "distmm.method": "allgather"}):
        d = matmul(x, x, batch="items")
        assert is_items(d)
        assert (d.compute() == 8).all()
        with pytest.raises(PlanError, match="engine='numpy'"):
            matmul(x, x, batch="items", engine="numpy")


def test_the_cost_model_chooses(client):
    small = da.ones((256, 64, 64), chunks=(32, 64, 64))
    made = explain(small, small)
    assert made.route == "items"
    assert made.items.seconds < made.collective.seconds
    assert is_items(matmul(small, small))
    large = da.ones((2, 4000, 4000), chunks=(1, 1000, 1000))
    made = explain(large, large)
    assert made.route == "collective"
    assert made.plan.method in repr(made)
    assert is_collective(matmul(large, large))
    for text in (repr(made), repr(explain(small, small))):
        for word in ("items", "collective", "why", "against", "estimated", "flops"):
            assert word in text
    assert explain(small, small, batch="collective").reason == "batch='collective' was asked for"
    assert is_collective(matmul(small[:2], small[:2], method="summa"))
    assert "method='summa' was given" in explain(small[:2], small[:2], method="summa").reason


def test_few_chunks_are_cut_and_many_put_together(client):
    one = da.ones((512, 64, 64), chunks=(512, 64, 64))
    assert 3 <= matmul(one, one).numblocks[0] <= 24
    many = da.ones((300, 16, 16), chunks=(1, 16, 8))
    d = matmul(many, many)
    assert d.numblocks[0] < 30
    assert matmul(many, many, out_chunks=(100, 8, 16)).chunks == ((100,) * 3, (8, 8), (16,))
    np.testing.assert_array_equal(d.compute(), np.full((300, 16, 16), 16.0))


def test_operator(client):
    a, b, x, y = operands()
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        for d in (x @ y, da.matmul(x, y), np.matmul(x, y)):
            assert is_items(d)
        with pytest.raises(ValueError, match="(?i)chunks|shape|align"):
            da.ones((2, 3, 4), chunks=1) @ da.ones((3, 4, 5), chunks=1)
    np.testing.assert_allclose(d.compute(), a @ b, rtol=1e-12, atol=1e-12)
    assert not is_items(x @ y)
    x, y = (v.rechunk({v.ndim - 2: -1, v.ndim - 1: -1}) for v in (x, y))
    with dask_distmm.enabled():
        assert is_items(x @ y)
        with dask.config.set({"distmm.minimum-flops": 1e12}):
            assert not is_items(x @ y)  # too little work


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (((2, 3, 7), (1, 2, 3)), ((2, 7, 8), (2, 4, 5))),
        (((4, 1, 6, 7), (2, 1, 4, 7)), ((3, 7, 5), (1, 3, 2))),
        (((6, 5), (2, 3)), ((3, 5, 4), (2, 5, 4))),
        (((5,), (2,)), ((3, 5, 4), (1, 4, 3))),
        (((3, 4, 5), (1, 4, 3)), ((5,), (2,))),
    ],
)
def test_stacks_have_dasks_chunks_under_enable(client, first, second):
    rng = np.random.default_rng()
    (a, x), (b, y) = (
        (one := rng.standard_normal(shape), da.from_array(one, chunks)) for shape, chunks in (first, second)
    )
    stock = da.matmul(x, y)
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        d = x @ y
    assert is_items(d)
    # To put matrices together that are in several chunks takes as long: they are Dask's, and what regions make of them.
    with dask_distmm.enabled():
        left = x @ y
    assert not is_items(left)
    for result in (d, left):
        assert result.chunks == stock.chunks
        np.testing.assert_allclose(result.compute(), a @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharing", ["a", "b"])
def test_one_product_of_a_batch_has_no_shuffle(client, sharing):
    """Dask cuts an array again to reshape it, in a way that it would take P2P for."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((24, 13, 5)), rng.standard_normal((1, 5, 8))
    x, y = da.from_array(a, chunks=(24, 1, 3)), da.from_array(b, chunks=(1, 5, 8))
    if sharing == "a":
        a, b, x, y = (v.swapaxes(1, 2) for v in (b, a, y, x))
    d = matmul(x, y, batch="collective")
    assert is_collective(d)
    assert not any("rechunk-transfer" in str(key) for key in dict(dask.optimize(d)[0].dask))
    np.testing.assert_allclose(d.compute(), a @ b, rtol=1e-12, atol=1e-12)


def test_what_is_not_ours_is_dasks(client):
    objects = da.from_array(np.ones((2, 4, 4), object), chunks=2)
    assert not is_items(matmul(objects, objects))
    assert not explain(objects, objects)
    empty = matmul(da.ones((3, 0, 5)), da.ones((5, 4)))
    assert empty.shape == (3, 0, 4)
    zeros, aux = matmul(da.ones((3, 2, 0)), da.ones((0, 4)), epilog="relu_aux")
    np.testing.assert_array_equal(zeros.compute(), np.zeros((3, 2, 4)))
    assert aux["relu_aux"].shape == (3, 2, 4)
    with dask.config.set(scheduler="threads"):
        cases = [Case("drelu_bgrad", shape=(5, 6, 7)) for _ in range(2)]
        a, b, mask = (np.stack(x) for x in zip(*((c.a, c.b, c.inputs["relu_aux"]) for c in cases), strict=True))
        d, aux = dask.compute(*matmul(da.from_array(a), b, epilog="drelu_bgrad", epilog_inputs={"relu_aux": mask}))
        for i, case in enumerate(cases):
            case.check(d[i], {name: x[i] for name, x in aux.items()})


ITEMS = np.ones((2, 6, 4)), np.ones((2, 4, 5))
BAD = [
    (*ITEMS, {"batch": "some"}, "unknown batch 'some'.*'items'"),
    (*ITEMS, {"method": "magic"}, "unknown method"),
    (np.ones((2, 6, 4)), np.ones((3, 4, 5)), {}, "batch axes"),
    (np.ones((2, 6, 4)), np.ones((2, 5, 4)), {}, "don't match"),
    (np.ones((2, 6, 4)), 3.0, {}, "scalars"),
    (*ITEMS, {"out_chunks": ((2,), (5,), (5,))}, "out_chunks"),
    (*ITEMS, {"c": np.ones((3, 6, 5)), "beta": 1.0}, r"c has the shape \(3, 6, 5\); expected"),
    (*ITEMS, {"epilog": "bias", "epilog_inputs": {"bias": np.ones(4)}}, r"bias has the shape"),
    (*ITEMS, {"epilog": "drelu", "epilog_inputs": {"relu_aux": np.ones((6, 5), bool)}}, "relu_aux has the shape"),
    (np.ones(4), ITEMS[1], {"epilog": "relu"}, "need matrices"),
    (np.ones(4), ITEMS[1], {"op_a": "T"}, "op_a='T'"),
    (ITEMS[0][0], ITEMS[1][0], {"batch": "items"}, "matrices"),
    (
        *(x.astype("float8_e4m3fn") for x in ITEMS),
        {"quantization_scales": {"a": 1}},
        r"needs \['a', 'b', 'd'\]",
    ),
    (*ITEMS, {"epilog": lambda x: x[:1]}, "must return an array like"),
]


@pytest.mark.parametrize(("a", "b", "options", "words"), BAD)
def test_bad_input_is_refused_at_the_call(a, b, options, words):
    options = dict(options)
    c = options.pop("c", None)
    for function in (matmul, explain):
        with pytest.raises(PlanError, match=words):
            function(a, da.asanyarray(b), c, **options)


def test_what_plain_tasks_can_not_do(client):
    x = da.ones((2, 6, 6))
    for options, words in (({"workers": 2}, "workers=2"), ({"compute_type": "fp64"}, "compute_type='fp64'")):
        with pytest.raises(PlanError, match=f"batch='items' and {words}"):
            matmul(x, x, batch="items", **options)
    assert is_collective(matmul(x, x, distributions=[dask_distmm.Slab(0)]))
    large = da.ones((2, 12_000, 12_000), chunks=3000)
    with pytest.raises(ProjectedMemoryError, match="one item of the batch would hold 3.22 GiB"):
        matmul(large, large, batch="items")
    unknown = x[da.ones(2) > 0]
    with pytest.raises(PlanError, match="compute_chunk_sizes"):
        matmul(unknown, x)
    with dask.config.set({"distmm.batch.task-bytes": "much"}), pytest.raises(PlanError, match=r"batch\.task-bytes"):
        matmul(x, x)


def test_names_are_deterministic_and_parts_can_be_used_alone(client):
    x = da.ones((64, 8, 8), chunks=(8, 8, 8))
    d = matmul(x, x, batch="items")
    assert d.name == matmul(x, x, batch="items").name
    (part,) = dask.optimize(d[:8])
    assert sum("matmul-items" in str(key) for key in dict(part.dask)) <= 1
    np.testing.assert_array_equal(d[3:5].compute(), np.full((2, 8, 8), 8.0))


def test_asynchronous_client(inproc_cluster):
    async def work():
        async with Client(inproc_cluster.scheduler_address, asynchronous=True) as client:
            d = matmul(da.from_array(x, chunks=20), da.from_array(x, chunks=20))
            group = matmul_grouped([(x[0], x[1]), (x[1], x[2])])
            return await asyncio.gather(*client.compute([d, *group]))

    x = np.random.default_rng().standard_normal((4, 30, 30))
    d, *group = asyncio.run(work())
    assert_batch(x, x, d)
    for i, found in enumerate(group):
        assert_product(x[i], x[i + 1], found)
