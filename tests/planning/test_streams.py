"""Plans whose ranks make chunks themselves on GPUs: steps, memory, and the waves that are chosen."""

from __future__ import annotations

import collections
import itertools

import dask
import numpy as np
import pytest
from conformance import make_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm import PlanError
from dask_distmm.config import DaskCosts
from dask_distmm.planning import Plan, Worker, plan, planner
from dask_distmm.planning import schedule as block_schedule
from dask_distmm.planning.footprint import made_bytes, multiplied_sizes
from dask_distmm.planning.groups import chunk_blocks_of
from dask_distmm.planning.product import record
from dask_distmm.planning.schedule import peer_reads
from dask_distmm.planning.waves import Budget, choose_scheme, wave_problem
from dask_distmm.programs.steps import Drop, Take

COSTS, BUDGET = DaskCosts(0.01, 0.00015, 0.01, 0.0005), Budget(0.6, 0.7, 5e8)
BOTH = ["cublasmp", "peer"]


def gpus(count, limit=20e9, threads=1, host=2**36):
    names = [str(number) for number in range(count)]
    return [
        Worker(f"tcp://w{n}", threads, int(limit / 0.8), "host", n, tuple({*names} - {n}), host_limit=host)
        for n in names
    ]


def gram(rows, cols, size, **changes):
    k = (size,) * (rows // size)
    fields = {"array": "cupy", "arrays": ("x", "x"), "transposed": (True, False)}
    return make_problem(((cols,), k), (k, (cols,)), "float64", **(fields | changes))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 30),
    st.integers(8, 60),
    st.sampled_from([1, 8]),
)
def test_chunks_are_joined_and_cut(lengths, least, most, step):
    edges = np.cumsum([0, *(length * step for length in lengths)]).tolist()
    most = most // step * step
    cuts = block_schedule._cut(edges, least, most, step)
    assert (cuts[0], cuts[-1]) == (edges[0], edges[-1])
    sizes = np.diff(cuts)
    assert (sizes > 0).all()
    assert sizes.max() <= max(most, step)
    assert not any(cut % step for cut in cuts[:-1])
    for low, high in itertools.pairwise(cuts):
        inside = [edge for edge in edges if low < edge < high]
        # What is joined has less than `least` each, and is no more than it takes.
        stretches = np.diff([low, *inside, high])
        assert not inside or (stretches < least).all()


def _most_held(steps):
    """Return the most bytes of chunks that a list holds, each of which is made once."""
    made, held, most = collections.Counter(), 0, 0
    for step in steps:
        match step:
            case Take(buffer):
                made[buffer.name] += 1
                held += buffer.nbytes
                most = max(most, held)
            case Drop(buffer) if buffer.is_operand:
                held -= buffer.nbytes
    assert set(made.values()) == {1}
    assert held == 0
    return most


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(*[st.integers(8, 60)] * 3), st.tuples(*[st.integers(2, 30)] * 3), st.integers(1, 3),
    st.sampled_from([(True, True), (True, False), (False, True)]), st.sampled_from([0.0, 1e-9, 1.0]),
    st.sampled_from([2**12, 2**31]), st.sampled_from(["float64", "float16"]), st.sampled_from([8, 512]),
)  # fmt: skip
def test_memory_is_as_projected(shape, sizes, count, by_ranks, seconds, room, dtype, padded):
    rows, cols, depth = (
        (size,) * (extent // size) + ((extent % size,) if extent % size else ())
        for extent, size in zip(shape, sizes, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch, dask.config.set({"distmm.peer.buffer-bytes": room}):
        patch.setattr(block_schedule, "_LEAST_SECONDS", seconds)
        patch.setattr(block_schedule, "_LEAST_EXTENT", 8)
        patch.setattr(block_schedule, "_LEAST_PADDED", padded)
        problem = make_problem((rows, depth), (depth, cols), dtype, array="cupy", by_ranks=by_ranks)
        places = {
            name: np.arange(problem[name].count, dtype=np.int32) % count
            for name in problem.operands
            if not problem[name].by_ranks
        }
        planner._plan.cache_clear()
        made = plan(problem, gpus(count), places, engine="peer")
        assert made.engine == "peer"
        size = multiplied_sizes(problem)[0]
        for rank, stream in enumerate(block_schedule.load_schedules(made)):
            steps = block_schedule.load_steps(made, rank, stream)
            needed, region = 0, made.region(rank)
            for operand in stream.operands:
                most = 0
                for own, (start, stop) in steps:
                    axis = (region[:2] if operand == 0 else region[2:]) if all(by_ranks) else own
                    rect = (*axis, start, stop) if operand == 0 else (start, stop, *axis)
                    if len(chunk_blocks_of(problem.matrices[operand].chunks, operand, rect)) > 1:
                        most = max(most, (axis[1] - axis[0]) * (stop - start))
                needed += block_schedule.PANELS * most * size
            assert needed <= stream.buffer_bytes
            assert stream.ahead > stream.threads >= 1
            assert 0 < _most_held(record(made, rank, (), lambda *_: True)) <= stream.held_bytes
        assert max(made.projected_bytes.values()) >= max(stream.bytes for stream in block_schedule.load_schedules(made))


@pytest.mark.parametrize("by_ranks", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_gram", [False, True])
@pytest.mark.parametrize("method", ["local", "allgather", "reducescatter", "summa"])
def test_what_ranks_make_is_counted_once_for_each(by_ranks, is_gram, method):
    rng = np.random.default_rng()
    m, k = (tuple(rng.integers(1, 9, count).tolist()) for count in (5, 7))
    changes = {"arrays": ("x", "x"), "transposed": (True, False)} if is_gram else {}
    problem = make_problem((m, k), (k, m), array="cupy", by_ranks=by_ranks, method=method, **changes)
    made = plan(problem, gpus(4), engine="peer")
    sizes = np.multiply.outer(k, m) * 8
    found = 0
    for rank in range(len(made.ranks)):
        seen = np.zeros((2, len(k), len(m)), bool)
        for operand in "ab":
            if by_ranks["ab".index(operand)]:
                numbers = made.needed(rank, operand)
                table = np.zeros(len(k) * len(m), bool)
                table[numbers] = True
                seen["ab".index(operand)] = (
                    table.reshape(len(m), len(k)).T if operand == "a" else table.reshape(len(k), -1)
                )
        found += ((seen[0] | seen[1]) * sizes).sum() if is_gram and all(by_ranks) else (seen * sizes).sum()
    assert made_bytes(made) == found


def test_a_long_gram_matrix_is_one_wave_and_ranks_share_k():
    scheme = choose_scheme(
        gram(2**22, 1024, 2**14), gpus(2), (True, True), BUDGET, COSTS, engine=BOTH, by_ranks=(True, True)
    )
    assert (scheme.name, scheme.by_ranks, scheme.method, len(scheme.waves)) == ("sums", True, "reducescatter", 1)
    assert scheme.read_bytes == 2**32 * 8
    assert scheme.peak_bytes < scheme.budget_bytes
    made = plan(wave_problem(gram(2**22, 1024, 2**14), scheme, 0), gpus(2), engine=BOTH)
    assert made.engine == "peer"
    assert Plan.from_wire(made.to_wire()).problem.by_ranks == ("a", "b")
    assert not any(read.any() for read in peer_reads(made, "ab").values())
    assert block_schedule.native(made) is None
    (stream, other) = block_schedule.load_schedules(made)
    # A chunk is multiplied as it lies, and is its own other side.
    assert stream == other
    assert stream.twin
    assert not stream.buffer_bytes
    assert "makes     chunks of B" in repr(made)


@pytest.mark.parametrize(("size", "threads"), [(2**14, 8), (2**16, 3), (2**18, 1)])
def test_large_chunks_are_made_by_few_threads(size, threads):
    problem = gram(2**22, 1024, size).made_by_ranks("ab")
    made = plan(problem, gpus(1, threads=8), engine="peer")
    (stream,) = block_schedule.load_schedules(made)
    assert stream.threads == threads
    assert stream.threads * size * 1024 * 8 <= max(25e9 / 12, size * 1024 * 8)


def test_small_chunks_are_joined():
    problem = gram(2**22, 1024, 2**10)
    scheme = choose_scheme(problem, gpus(1), (True, True), BUDGET, COSTS, engine=BOTH, by_ranks=(True, True))
    assert scheme.by_ranks
    made = plan(wave_problem(problem, scheme, 0), gpus(1), engine="peer")
    (stream,) = block_schedule.load_schedules(made)
    steps = [stop - start for _, (start, stop) in block_schedule.load_steps(made, 0, stream)]
    assert set(steps[:-1]) == {6 * 2**10}
    assert stream.ahead == 64


def test_waves_on_gpus_are_no_longer_than_some_seconds():
    problem = gram(2**24, 4096, 2**14)
    scheme = choose_scheme(problem, gpus(1), (True, True), BUDGET, COSTS, engine=BOTH, by_ranks=(True, True))
    assert scheme.by_ranks
    assert 1 < len(scheme.waves) <= scheme.seconds


def test_engines_that_can_not_make_chunks_are_left_out():
    problem = gram(2**22, 1024, 2**14)
    scheme = choose_scheme(problem, gpus(2), (True, True), BUDGET, COSTS, engine="cublasmp", by_ranks=(True, True))
    assert not scheme.by_ranks
    made = problem.made_by_ranks("ab")
    with pytest.raises(PlanError, match=r"engine 'cublasmp' does not do"):
        plan(made, gpus(2), engine="cublasmp")
    assert plan(made, gpus(2), engine=BOTH).engine == "peer"


@pytest.mark.parametrize(
    ("problem", "lazy", "name"),
    [
        (make_problem(((2**16,) * 64, (4096,)), ((4096,), (64,)), "float32", array="cupy"), (True, False), "rows"),
        (make_problem(((64,), (4096,)), ((4096,), (2**16,) * 64), "float32", array="cupy"), (False, True), "cols"),
        (make_problem(((8192,) * 8,) * 2, ((8192,) * 8,) * 2, "float32", array="cupy"), (True, True), "blocks"),
    ],
)
def test_other_schemes(problem, lazy, name):
    scheme = choose_scheme(problem, gpus(2, 12e9), lazy, BUDGET, COSTS, engine=BOTH, by_ranks=lazy)
    assert scheme.name == name
    assert scheme.by_ranks
    for number in (0, len(scheme.waves) - 1):
        one = wave_problem(problem, scheme, number)
        assert max(plan(one, gpus(2, 12e9), engine=BOTH).projected_bytes.values()) < 12e9


def test_numpy_chunks_are_copied_while_they_are_multiplied():
    problem = gram(2**22, 1024, 2**14, array="numpy")
    workers = gpus(2, host=2**33)
    scheme = choose_scheme(problem, workers, (True, True), BUDGET, COSTS, engine=BOTH, by_ranks=(True, True))
    assert scheme.by_ranks
    made = plan(wave_problem(problem, scheme, 0), workers, engine=BOTH)
    assert not made.from_host
    bus = made.problem.k * 1024 * 8 / 2 / problem.options.machine("peer").host_bandwidth
    assert made.estimate.compute_seconds == pytest.approx(bus)
