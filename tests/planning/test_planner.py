from __future__ import annotations

import cProfile
import dataclasses
import itertools

import numpy as np
import pytest
from conformance import make_problem, random_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.config import read_options
from dask_distmm.errors import PlanError, ProjectedMemoryError, ProtocolError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import EVERYWHERE, METHODS, Plan, Worker, plan, product
from dask_distmm.planning.planner import fits_easily, is_faster
from dask_distmm.programs.check import peak_bytes


def roster(number, memory_limit=0, nthreads=1):
    return [Worker(f"tcp://10.0.0.{i}:1", nthreads, memory_limit) for i in range(number)]


def square(size, chunk, **changes):
    sizes = (chunk,) * (size // chunk)
    return make_problem((sizes, sizes), (sizes, sizes), **changes)


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    m, n, k = (draw(st.integers(1, 60)) for _ in range(3))
    a = (random_chunks(rng, m, 6), random_chunks(rng, k, 6))
    b = (random_chunks(rng, k, 6), random_chunks(rng, n, 6))
    out = (random_chunks(rng, m, 6), random_chunks(rng, n, 6)) if draw(st.booleans()) else (a[0], b[1])
    return make_problem(a, b, out_chunks=out, method=draw(st.sampled_from(["auto", *METHODS])))


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 9), st.integers(0, 2), st.booleans(), st.data())
def test_every_plan_is_whole(problem, nworkers, nsources, known, data):
    """The box is covered once, no rank is empty, every chunk has an owner and every part a holder."""
    where = {}
    if known:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        counts = {op: int(np.prod(problem[op].counts)) for op in "ab"}
        where = {op: rng.integers(0, nworkers + nsources, count).astype(np.int32) for op, count in counts.items()}
    sources = [Worker(f"source-{i}") for i in range(nsources)]
    made = plan(problem, roster(nworkers), where=where, sources=sources)
    nranks = len(made.ranks)
    assert 1 <= nranks <= nworkers
    assert len(set(made.ranks)) == nranks
    assert max(made.ranks) < nworkers, "a source can't be a rank"

    work = np.zeros((problem.m, problem.n, problem.k), int)
    final = np.zeros((problem.m, problem.n), int)
    for rank in range(nranks):
        r0, r1, c0, c1 = made.region(rank)
        k0, k1 = made.k_range(rank)
        assert r0 < r1
        assert c0 < c1
        assert k0 < k1
        work[r0:r1, c0:c1, k0:k1] += 1
        for f0, f1, g0, g1 in made.final_rects(rank):
            final[f0:f1, g0:g1] += 1
    assert (work == 1).all()
    assert (final == 1).all()

    for index in range(len(made.owners)):
        r0, r1, c0, c1 = made.chunk_rect(index)
        held = np.zeros((r1 - r0, c1 - c0), int)
        for rank, (h0, h1, g0, g1) in made.final_holders(index):
            assert 0 <= rank < nranks
            held[h0 - r0 : h1 - r0, g0 - c0 : g1 - c0] += 1
        assert (held == 1).all()
    assert set(made.projected_bytes) == {worker.address for worker in made.participants}

    if known:
        again = Plan.from_wire(made.to_wire())
        for field in ("problem", "engine", "method", "participants", "ranks", "rows", "cols", "depth", "packing"):
            assert getattr(again, field) == getattr(made, field)
        np.testing.assert_array_equal(again.owners, made.owners)
        np.testing.assert_array_equal(again.where["a"], made.where["a"])


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 9), st.sampled_from([2**9, 2**13, 2**40]), st.integers(0, 2**32), st.booleans())
def test_the_fastest_way_is_found_without_a_look_at_all(problem, nworkers, memory, seed, on_gpus):
    rng, scale = np.random.default_rng(seed), 10 ** (seed % 4)
    chunks = [tuple(tuple(scale * size for size in axis) for axis in problem[name].chunks) for name in "abd"]
    array = "cupy" if on_gpus else "numpy"
    problem = make_problem(*chunks[:2], out_chunks=chunks[2], method=problem.method, array=array)
    counts = {name: int(np.prod(problem[name].counts)) for name in "ab"}
    where = {name: rng.integers(0, nworkers, count).astype(np.int32) for name, count in counts.items()}
    names = [str(i) for i in range(nworkers)]
    workers = [Worker(f"w{i}", 1 + seed % 3, memory * scale**2, "h", i, tuple({*names} - {i})) for i in names]
    engines = ("peer", "cublasmp") if on_gpus else ("numpy",)
    try:
        expected = plan(problem, workers, where, engine=engines)
    except (PlanError, ProjectedMemoryError) as error:
        with pytest.raises(type(error)):
            plan(problem, workers, where, engine=engines, thorough=False)
        return
    made = plan(problem, workers, where, engine=engines, thorough=False)
    assert made.to_wire() == expected.to_wire()
    assert (made.seconds, made.projected_bytes) == (expected.seconds, expected.projected_bytes)
    assert made.estimate in made.alternatives


@pytest.mark.parametrize("method", METHODS)
def test_a_method_asked_for_takes_all_workers(method):
    made = plan(square(120, 30, method=method), roster(4))
    assert made.method == method
    assert len(made.ranks) == (1 if method == "local" else 4)


@pytest.mark.parametrize("engine", ["numpy", "peer", "cublasmp"])
def test_slabs_lie_on_all_workers_wherever_operands_do(engine):
    workers = [Worker(f"w{i}", 1, 2**30, "h", f"g{i}", (f"g{1 - i}",)) for i in range(2)]
    slabs = (256, 256), (512,)
    problem = make_problem(slabs, slabs, method="allgather", engine=engine)
    for places in itertools.product((0, 1), repeat=4):
        where = {"a": np.array(places[:2], np.int32), "b": np.array(places[2:], np.int32)}
        made = plan(problem, workers, where, engine=engine)
        assert {made.ranks[owner] for owner in made.owners} == {0, 1}


def test_tiny_problems_use_fewer_ranks():
    assert len(plan(make_problem(((2,), (50,)), ((50,), (1,)), method="allgather"), roster(6)).ranks) == 2
    assert plan(make_problem(((1,), (1,)), ((1,), (1,))), roster(8)).method == "local"


def test_the_cost_model_knows_the_shapes():
    big = roster(8)
    slabs = (10_000,) * 8
    tall = make_problem((slabs, (512,)), ((512,), (512,)))
    assert plan(tall, big).grid == (8, 1, 1)
    wide = make_problem(((512,), (512,)), ((512,), slabs))
    assert plan(wide, big).grid == (1, 8, 1)
    # A Gram matrix whose slabs lie one on each worker: sums are far less to move than slabs.
    where = np.arange(8, dtype=np.int32)
    gram = make_problem(((512,), (100_000,) * 8), ((100_000,) * 8, (512,)))
    made = plan(gram, big, where={"a": where, "b": where})
    assert made.grid == (1, 1, 8)
    assert made.ranks == tuple(range(8))
    assert plan(square(32_768, 4096), roster(16)).method == "summa"


def test_ranks_go_where_the_bytes_are():
    problem = square(4096, 1024, method="allgather")
    # Rows of A lie on workers 3, 2, 1, 0, in this order; B on all of them alike.
    where_a = np.repeat([3, 2, 1, 0], 4).astype(np.int32)
    where_b = np.tile([3, 2, 1, 0], 4).astype(np.int32)
    made = plan(problem, roster(4), where={"a": where_a, "b": where_b})
    assert made.ranks == (3, 2, 1, 0)
    blind = plan(problem, roster(4))
    assert made.bytes_moved < blind.bytes_moved
    # Exactly: each rank gets the three quarters of one operand that it lacks.
    assert made.bytes_moved == 4 * 3 * 4096 * 1024 * 8


def test_a_collective_library_fetches_over_dask_what_others_have():
    """A rank has no communicator with workers that are no ranks: one GPU is quickest with its own chunks alone."""
    gpus = [Worker(f"tcp://10.0.0.1:{port}", host="one", device=str(port)) for port in range(2)]
    problem = square(2048, 1024, dtype="bfloat16")
    there, spread = np.zeros(4, np.int32), np.arange(4, dtype=np.int32) % 2
    assert plan(problem, gpus, {"a": there, "b": there}, engine="cublasmp").method == "local"
    made = plan(problem, gpus, {"a": spread, "b": spread}, engine="cublasmp")
    assert len(made.ranks) == 2
    local = next(one for one in made.alternatives if one.method == "local")
    # Half of both matrices.
    machine = problem.options.machine("cublasmp")
    assert local.transfer_seconds > 2048 * 2048 * 2 / machine.dask_bandwidth
    assert machine.dask_bandwidth < machine.network_bandwidth < machine.bandwidth


@given(st.integers(0, 2**32 - 1))
def test_the_transpose_of_a_product_takes_the_peer_engine_as_long(seed):
    """B^T A^T is pulled as A B is, with A and B in each other's place."""
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(20, 60, 3).tolist()
    a = (random_chunks(rng, m, 5), random_chunks(rng, k, 5))
    b = (random_chunks(rng, k, 5), random_chunks(rng, n, 5))
    gpus = roster(int(rng.integers(2, 5)))
    where_a, where_b = (rng.integers(0, len(gpus), (len(x[0]), len(x[1]))).astype(np.int32) for x in (a, b))

    def seconds(problem, *where):
        made = plan(
            problem, gpus, {n: np.ascontiguousarray(x).ravel() for n, x in zip("ab", where, strict=True)}, engine="peer"
        )
        return {one.grid: one.seconds for one in made.alternatives}

    options = {"dtype": "float32", "method": "allgather", "array": "cupy"}
    expected = seconds(make_problem(a, b, **options), where_a, where_b)
    found = seconds(make_problem(b[::-1], a[::-1], **options), where_b.T, where_a.T)
    assert {(q, p, s): pytest.approx(one) for (p, q, s), one in expected.items()} == found


def test_explanation_says_what_it_was_against():
    made = plan(square(8192, 2048), roster(4, 2**34))
    seconds = [estimate.seconds for estimate in made.alternatives]
    assert seconds == sorted(seconds)
    assert {estimate.method for estimate in made.alternatives} == set(METHODS)
    assert made.estimate is made.alternatives[0] or made.estimate == made.alternatives[0]
    text = repr(made)
    assert all(method in text for method in METHODS)
    assert "16.00 GiB" in text


def test_leaner_method_before_giving_up():
    problem = square(8192, 1024)
    free = plan(problem, roster(4))
    by_peak = sorted({estimate.peak_bytes for estimate in free.alternatives})
    quickest = free.estimate.peak_bytes
    leaner = [size for size in by_peak if size < quickest]
    fraction = problem.options.limit_fraction
    if leaner:
        limit = int(leaner[-1] / fraction) + 1
        tight = plan(problem, roster(4, limit))
        assert max(tight.projected_bytes.values()) <= fraction * limit
        assert tight.estimate.seconds >= free.estimate.seconds
    with pytest.raises(ProjectedMemoryError, match="leanest") as caught:
        plan(problem, roster(4, by_peak[0] // 2))
    assert max(caught.value.projected.values()) == by_peak[0]


def test_errors():
    with pytest.raises(PlanError, match="no worker"):
        plan(square(100, 50), [])
    with pytest.raises(PlanError, match="unknown method"):
        plan(dataclasses.replace(square(100, 50), method="cannon"), roster(2))
    with pytest.raises(PlanError, match="must agree"):
        make_problem(((10,), (20,)), ((10,), (20,)))
    with pytest.raises(PlanError, match="adds up to 7"):
        make_problem(((10,), (20,)), ((20,), (10,)), out_chunks=((7,), (10,)))


def mangled(wire, path, value):
    wire = dict(wire) if isinstance(wire, dict) else list(wire)
    if len(path) == 1:
        wire[path[0]] = value
    else:
        wire[path[0]] = mangled(wire[path[0]], path[1:], value)
    return wire


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows",), [0, 50]),
        (("rows",), [0, 60, 50, 100]),
        (("rows",), "abc"),
        (("depth",), [0]),
        (("ranks",), [0, 0]),
        (("ranks",), [0, 9]),
        (("owners",), b"\x00"),
        (("owners",), np.full(4, 7, np.int32).tobytes()),
        (("where", "a"), np.full(4, -1, np.int32).tobytes()),
        (("where", "b"), None),
        (("replica_runs",), [0, 7]),
        (("replica_runs",), [0]),
        (("replicas",), 3),
        (("problem", "matrices", 0, "array"), 7),
        (("problem", "matrices", 0, "transposed"), (True,)),
        (("problem", "matrices", 1, "conjugated"), None),
        (("problem", "matrices", 1, "numbers"), ((0,), (0,), 1)),
        (("problem", "matrices", 1, "name"), "x"),
        (("problem", "matrices"), ()),
        (("problem", "wanted"), ()),
        (("d_cuts",), ((0, 100), (0, 100))),
        (("method",), "magic"),
        (("participants",), [(1, 2, 3)]),
        (("problem",), None),
        (("problem", "matrices", 0, "chunks"), ((-1, 101), (100,))),
        (("problem", "wanted", 0, "dtype"), "float63"),
        (("problem", "options"), {}),
    ],
)
def test_malformed_plans_are_refused(path, value):
    where = np.zeros(4, np.int32)
    wire = plan(square(100, 50, method="allgather"), roster(2), where={"a": where, "b": where}).to_wire()
    Plan.from_wire(wire)
    wire = mangled(wire, path, value)
    with pytest.raises((ProtocolError, PlanError)):
        Plan.from_wire(wire)


def test_hundred_thousand_chunks_stay_small_on_the_wire():
    problem = square(31_600, 100)
    where = np.zeros(316 * 316, np.int32)
    wire = plan(problem, roster(8), where={"a": where, "b": where}).to_wire()
    assert sum(len(value) for value in (wire["owners"], *wire["where"].values())) == 3 * 4 * 316 * 316
    assert read_options().prefetch_panels >= 1


@pytest.mark.parametrize(
    ("changes", "advised", "useless"),
    [
        ({}, ["Use more workers", "higher memory_limit"], ["method='auto'", "grid"]),
        ({"method": "local"}, ["Use method='auto', by which workers share it"], ["more workers", "grid"]),
        ({"method": "summa"}, ["Use more workers", "use method='auto'"], ["grid"]),
        ({"method": "summa", "grid": (2, 1, 1)}, ["Use a larger grid"], ["more workers", "method='auto'"]),
        ({"workers": 2}, ["Name more workers by workers="], ["Use more workers"]),
        ({"gathered": "a"}, ["all of A is to be on each worker", "leave out gathered='a'"], ["grid"]),
    ],
)
def test_what_is_advised_where_memory_is_short(changes, advised, useless):
    """What would not help in the way that was asked for is not advised."""
    with pytest.raises(ProjectedMemoryError) as caught:
        plan(square(64, 16, **changes), roster(2, memory_limit=2000))
    text = str(caught.value)
    assert all(each in text for each in advised), text
    # The whole memory would not do either.
    assert not any(each in text for each in [*useless, "limit-fraction"]), text


def test_a_larger_share_of_the_memory_is_advised_where_that_would_do():
    problem = square(64, 16, method="allgather")
    peak = max(plan(problem, roster(2)).projected_bytes.values())
    with pytest.raises(
        ProjectedMemoryError, match=r"use a higher memory_limit or raise the config distmm.memory.limit-fraction"
    ):
        plan(problem, roster(2, memory_limit=int(peak * 1.1)))
    cupy = make_problem(((16,) * 4,) * 2, ((16,) * 4,) * 2, array="cupy")
    with pytest.raises(ProjectedMemoryError, match="Use more workers or use GPUs with more memory"):
        plan(cupy, roster(2, memory_limit=2000), engine="cublasmp")


@settings(max_examples=100, deadline=None)
@given(
    problems(),
    st.sampled_from(["numpy", "peer", "cublasmp"]),
    st.sampled_from([("float32",) * 3, ("float64",) * 3, ("bfloat16",) * 3, ("complex128",) * 3, ("int8",) * 3]),
    st.integers(1, 9),
    st.integers(0, 12),
    st.booleans(),
)
def test_the_short_choice_is_that_of_plans(problem, engine, types, nworkers, scale, shared):
    """It is faster if the fastest plan is; what fits easily fits in all ways, whatever is large of it."""
    scaled = [[tuple(2**scale * size for size in sizes) for sizes in x] for x in (problem.a.chunks, problem.b.chunks)]
    chunks = [tuple(x) for x in scaled]
    changes = {"b_dtype": types[1], "out_dtype": types[2], "array": "numpy" if engine == "numpy" else "cupy"}
    if shared:
        changes |= {"arrays": ("x", "x"), "transposed": (True, False)}
        chunks[1] = chunks[0][::-1]
    problem = make_problem(*chunks, types[0], **changes)
    workers = [Worker(f"tcp://10.0.0.{i}:1", 1, host="host", device=str(i)) for i in range(nworkers)]
    made = plan(problem, workers, engine=engine)
    for factor in (0.5, 0.999, 1.001, 2.0):
        fastest = min(one.seconds for one in made.alternatives)
        assert is_faster(problem, workers, {engine: factor * fastest}) == (factor > 1)
    held = max(one.peak_bytes for one in made.alternatives)
    assert not fits_easily(problem, held - 1)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["numpy", "peer"]),
    st.sampled_from(["auto", *METHODS]),
    st.sampled_from(
        [
            {},
            {"arrays": ("x", "x"), "transposed": (True, False)},
            {"out_dtype": "float32"},
            {"formula": Formula(epilog="gelu_aux")},
            {"formula": Formula(alpha=(2.0, 0.0))},
        ]
    ),
    st.tuples(*[st.integers(1, 2000)] * 3),
    st.integers(1, 5),
    st.sampled_from([0, 384]),
    st.integers(0, 2**32),
)
def test_no_list_holds_more_than_is_projected(engine, method, changes, shape, nworkers, pack_below, seed):
    """Chunks of A and B, and the most that a rank's list allocates beside them: exactly that on one rank in place."""
    rng, (m, n, k) = np.random.default_rng(seed), shape
    rows, depth, cols = (random_chunks(rng, size, 6) for size in (m, k, n))
    if "arrays" in changes:
        cols = rows
    panel_bytes = int(rng.integers(2**12, 2**22))
    options = dataclasses.replace(read_options(), pack_below=pack_below, panel_bytes=panel_bytes)
    changes = {"method": method, "options": options, "array": "numpy" if engine == "numpy" else "cupy"} | changes
    problem = make_problem((rows, depth), (depth, cols), **changes)
    where = {name: rng.integers(0, nworkers, problem[name].count).astype(np.int32) for name in "ab"}
    if problem.shared:
        where["b"] = where["a"].reshape(problem.a.counts).T.ravel()
    try:
        made = plan(problem, roster(nworkers), where, engine=engine)
    except PlanError:
        return
    for rank, index in enumerate(made.ranks):
        steps = made.steps(rank)
        names = "a" if problem.shared else "ab"
        held = sum(int(problem[name].bytes[where[name] == index].sum()) for name in names)
        projected = made.projected_bytes[made.participants[index].address]
        assert held + peak_bytes(steps) <= projected
        if engine == "numpy" and nworkers == 1 and not made.packing and not changes.keys() & {"arrays", "formula"}:
            assert held + peak_bytes(steps) == projected


@pytest.mark.parametrize("workers", [8, 32, 64])
def test_tiny_products_of_chunks_on_many_workers_are_for_few(workers):
    """A request to each holder takes longer than such a product; large ones are for all workers."""
    rng = np.random.default_rng(workers)
    where = {name: rng.integers(0, workers, 64).astype(np.int32) for name in "ab"}
    chosen = plan(square(64, 8), roster(workers), where)
    every = plan(square(64, 8, method="summa"), roster(workers), where)
    assert len(chosen.ranks) <= workers // 4
    assert chosen.seconds < every.seconds
    assert len(plan(square(8192, 1024), roster(workers), where).ranks) == workers


def test_requests_are_counted_where_it_is_known_who_holds_what():
    """Each of two ranks needs half of what the other one has."""
    problem, where = square(64, 32, method="allgather"), {"a": np.int32([0, 0, 1, 1]), "b": np.int32([0, 0, 1, 1])}
    apart = plan(problem, roster(2), where).estimate.seconds
    where["b"][:] = EVERYWHERE
    together = plan(problem, roster(2), where, replica_runs=(0, 1)).estimate.seconds
    # One request that is sent, and one that is answered.
    assert apart - together >= 4e-4


def test_lists_of_large_products_take_time_that_grows_with_their_steps():
    counts = []
    for chunks in (8, 16):
        where = {name: (np.arange(chunks**2) % 2).astype(np.int32) for name in "ab"}
        chosen = plan(square(chunks * 512, 512, method="allgather"), roster(2), where)
        profile = cProfile.Profile()
        recorded = profile.runcall(product.record, chosen, 0)
        counts.append(sum(entry.callcount for entry in profile.getstats()) / len(recorded))
    assert counts[1] < 1.3 * counts[0]
