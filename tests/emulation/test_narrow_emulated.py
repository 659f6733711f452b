"""FP8, bytes and compute types on the GPU engine on emulated libraries, which demand what cuBLASMp demands."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import make_problem, random_chunks, run_jobs
from dask.array.core import slices_from_chunks
from narrow_cases import PAIRS, Narrow, random_fp8

from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import FP8
from dask_distmm.planning import NamedMatrix, Worker, plan

FP8_METHODS = ["local", "allgather", "reducescatter", "allreduce"]


def run_narrow(ranks, method, nranks, pair, to, *, shape=(67, 59, 71), orders="CC", sources=0, lazy=False, **terms):
    """Multiply FP8 matrices on jobs; check D and its largest value."""
    rng = np.random.default_rng()
    m, n, k = shape
    arrays = {"a": random_fp8(rng, (m, k), pair[0], orders[0]), "b": random_fp8(rng, (k, n), pair[1], orders[1])}
    kinds = {"a": pair[0], "b": pair[1]}
    scales = {"a": 0.25, "b": 3.0, "d": 0.01}
    case = Narrow(arrays["a"], arrays["b"], scales if to in FP8 else {"a": 0.25, "b": 3.0}, **terms)
    extras = []
    if lazy:
        arrays["scale_a"], kinds["scale_a"] = np.full((1, 1), 0.25, np.float32), "float32"
        extras.append(NamedMatrix("scale_a", ((1,), (1,)), "float32"))
    if "c" in terms:
        arrays["c"], kinds["c"] = terms["c"], terms["c"].dtype.name
        extras.insert(0, NamedMatrix("c", ((m,), (n,)), kinds["c"]))
    formula = Formula(
        (terms.get("alpha", 1.0) * (3.0 if lazy else 0.75), 0.0),
        (terms.get("beta", 0.0), 0.0),
        amax=True,
        scale_d=0.01 if to in FP8 else 1.0,
        scales=("scale_a",) if lazy else (),
    )
    sizes = {name: tuple(random_chunks(rng, size, 4) for size in x.shape) for name, x in arrays.items()}
    for extra in extras:
        sizes[extra.name] = extra.chunks
    problem = make_problem(
        sizes["a"],
        sizes["b"],
        pair[0],
        b_dtype=pair[1],
        method=method,
        formula=formula,
        extras=tuple(extras),
        array="numpy" if ranks.host else "cupy",
        out_dtype=to,
    )
    where, chunks = {}, {}
    for name, x in arrays.items():
        places = slices_from_chunks(sizes[name])
        where[name] = rng.integers(0, nranks + sources, len(places)).astype(np.int32)
        for index, place in enumerate(places):
            part = np.array(x[place], order="K")
            chunks[name, index] = part.view(np.uint8) if kinds[name] in FP8 and not ranks.host else part
    roster = [Worker(f"w{i}") for i in range(nranks)]
    others = [Worker(f"s{i}") for i in range(sources)]
    made = plan(problem, roster, where, engine=ranks.name, sources=others, orders=tuple(orders))
    result = run_jobs(ranks, type(made).from_wire(made.to_wire()), chunks)
    nrows, ncols = problem.d.counts
    d = np.block([[np.asarray(result["", i * ncols + j]) for j in range(ncols)] for i in range(nrows)])
    amax = max(float(result["result_amax", index][0, 0]) for index in range(nrows * ncols))
    if to in FP8 and not ranks.host:
        assert d.dtype == np.uint8
        d = d.view(FP8[to])
    case.check(d, to, amax)
    return made


@pytest.mark.parametrize("method", FP8_METHODS)
@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize("orders", ["CC", "FF", "CF"])
def test_fp8_keeps_the_rules(make, method, nranks, orders):
    ranks, world = make()
    made = run_narrow(ranks, method, nranks, PAIRS[0], "float32", orders=orders)
    calls = {call[1] for call in world.calls}
    assert calls == ({"lt"} if len(made.ranks) == 1 else {"matmul"})


@pytest.mark.parametrize("method", FP8_METHODS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 64, 48), (5, 130, 3), (200, 3, 100)])
def test_fp8_of_any_shape(make, method, shape):
    ranks, _ = make()
    run_narrow(ranks, method, 4, PAIRS[0], "bfloat16", shape=shape)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_fp8_pairs_and_results(make, pair, to):
    ranks, world = make()
    run_narrow(ranks, "auto", 3, pair, to, lazy=True)
    # E5M2 by E5M2 goes as float16.
    assert {call[1] for call in world.calls} <= {"matmul", "lt", "gemm"}


@pytest.mark.parametrize("pair", PAIRS[::3])
@pytest.mark.parametrize("host", [False, True])
def test_fp8_with_c_and_chunks_of_others(make, pair, host):
    ranks, _ = make(host)
    rng = np.random.default_rng()
    c = random_fp8(rng, (67, 59), "float8_e4m3fn") if host else rng.standard_normal((67, 59)).astype(np.float32)
    run_narrow(ranks, "allgather", 2, pair, "float8_e4m3fn", sources=2, alpha=0.5, beta=2.0, c=c)


def test_fp8_on_old_gpus_says_what_is_needed(make):
    ranks, world = make()
    world.compute_capability = "80"
    with pytest.raises(EngineError, match=r"FP8 needs compute capability 8\.9.*this GPU has 8\.0"):
        run_narrow(ranks, "allgather", 2, PAIRS[0], "float32")
    run_narrow(ranks, "allgather", 2, PAIRS[3], "float32")


@pytest.mark.parametrize("method", ["summa", *FP8_METHODS])
def test_bytes_to_int32_are_exact(make, method):
    ranks, _ = make()
    rng = np.random.default_rng()
    sizes = [random_chunks(rng, size, 3) for size in (30, 50, 40)]
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((30, 50), (50, 40)))
    problem = make_problem(tuple(sizes[:2]), tuple(sizes[1:]), "int8", method=method, array="cupy", out_dtype="int32")
    where, chunks = {}, {}
    for name, x in (("a", a), ("b", b)):
        places = slices_from_chunks(problem[name].chunks)
        where[name] = rng.integers(0, 3, len(places)).astype(np.int32)
        for index, place in enumerate(places):
            chunks[name, index] = np.ascontiguousarray(x[place])
    made = plan(problem, [Worker(f"w{i}") for i in range(3)], where, engine=ranks.name)
    result = run_jobs(ranks, made, chunks)
    nrows, ncols = problem.d.counts
    d = np.block([[np.asarray(result["", i * ncols + j]) for j in range(ncols)] for i in range(nrows)])
    assert d.dtype == np.int32
    np.testing.assert_array_equal(d, a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("nranks", [1, 3])
def test_compute_types_reach_the_library(make, monkeypatch, nranks):
    ranks, world = make()
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((20, 20)).astype(np.float32) for _ in "ab")
    zero = np.zeros(1, np.int32)

    def run(compute):
        problem = make_problem(((20,),) * 2, ((20,),) * 2, "float32", method="allgather", compute=compute, array="cupy")
        made = plan(problem, [Worker(f"w{i}") for i in range(nranks)], {"a": zero, "b": zero}, engine=ranks.name)
        run_jobs(ranks, made, {("a", 0): a, ("b", 0): b})
        return world.computed[-1]

    assert (run(""), run("tf32"), run("")) == (68, 77, 68)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0.0")
    with pytest.raises(EngineError, match=r"compute_type='bf16x9' is COMPUTE_32F_EMULATED_16BFX9"):
        run("bf16x9")
