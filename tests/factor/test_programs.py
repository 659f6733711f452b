"""The programs of factorizations, without numbers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from factoring import factor_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from proof import check, moved_bytes

from dask_distmm.engines.programs.job import inside
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.layout import Copy
from dask_distmm.planning.factor import _costed, _held, _memory, block_width
from dask_distmm.programs import factor
from dask_distmm.programs.check import ProgramError, Rates, cost, peak_bytes
from dask_distmm.programs.factor import Columns, Matrix
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.programs.steps import Call, Deliver, Drop, Key, Load, Publish, Pull, Store, roles_of

WAYS = [
    {"kind": "cholesky"},
    {"kind": "lu"},
    *({"kind": "qr", "mode": mode} for mode in ("reduced", "complete", "r")),
    *({"kind": "solve", "assume_a": assume_a} for assume_a in ("gen", "pos")),
    *({"kind": "solve_triangular", "lower": low, "op": op} for low, op in itertools.product((True, False), "NTC")),
    {"kind": "solve_triangular", "right": True},
    {"kind": "inv"},
    {"kind": "det"},
    {"kind": "slogdet"},
    {"kind": "lstsq"},
    {"kind": "pinv"},
]
SQUARE = {"cholesky", "solve", "solve_triangular", "inv", "det", "slogdet"}


def problem(way: dict, m: int, n: int, nrhs: int) -> Factorization:
    shape = (m, m) if way["kind"] in SQUARE else (m, n)
    with_b = way["kind"] in ("solve", "solve_triangular", "lstsq")
    b = ((nrhs, m) if way.get("right") else (m, nrhs)) if with_b else None
    return Factorization(a_shape=shape, dtype="float64", b_shape=b, **way)


def travelled(plan):
    """Check the programs of all ranks; return how many parts of panels travel."""
    lists = [plan.steps(rank) for rank in range(plan.count)]
    check(lists)
    copies = [(step.output, step.number) for steps in lists for step in steps if isinstance(step, Store)]
    chunks = [chunk for steps in lists for step in steps if isinstance(step, Deliver) for chunk in step.chunks]
    stored = collections.Counter([*copies, *((chunk.role, chunk.number) for chunk in chunks)])
    assert stored == {(x.name, number): 1 for x in plan.problem.outputs for number in range(x.count)}
    pulls = 0
    for steps in lists:
        here = None
        for step in steps:
            if isinstance(step, Pull) and step.taken:
                assert plan.columns.owner(step.key.number % plan.columns.count) == step.owner
                assert here is None, f"{step.key} comes while {here} is here"
                here, pulls = None if step.key.part == "pivots" else step.buffers[0], pulls + 1
            elif isinstance(step, Drop) and step.buffer == here:
                here = None
        assert here is None
    return pulls


@given(
    st.sampled_from(WAYS),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 12),
    st.integers(1, 8),
    st.integers(1, 12),
    st.sampled_from(["numpy", "peer", "nccl"]),
)
@settings(max_examples=600, deadline=None)
def test_programs_are_right(way, m, n, nrhs, ranks, width, engine):
    plan = factor_plan(problem(way, m, n, nrhs), ranks, width, engine=engine)
    travelled(plan)
    if engine == "nccl":
        messages = [
            [step.key for step in plan.steps(rank) if isinstance(step, Publish | Pull)] for rank in range(plan.count)
        ]
        assert all(one == messages[0] for one in messages), "ranks meet for broadcasts in different orders"
        assert len(set(messages[0])) == len(messages[0])


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12), st.booleans(), st.integers(0), st.integers(0))
@settings(max_examples=200, deadline=None)
def test_programs_of_shared_eigenvalues(n, ranks, width, vectors, first, count):
    subset = (first % n, min(n - 1, first % n + count % n))
    problem = Factorization("eigh", (n, n), "float64", vectors=vectors, subset=subset)
    plan = factor_plan(problem, ranks, width, shared=True)
    assert plan.shared
    assert not travelled(plan) or (vectors and ranks > 1)
    # Reflectors are one fewer than columns.
    assert len(plan.panels) == -(-(n - 1) // width)
    assert plan.sweeps == (("reflect",) if vectors and n > 1 else ())
    assert plan.output("w").matrix is None


def test_ranks_that_share_eigenvalues_in_another_order_are_found():
    plan = factor_plan(Factorization("eigh", (40, 40), "float64"), 2, 8, shared=True)
    lists = [list(plan.steps(rank)) for rank in range(2)]
    calls = {step.kernel: at for at, step in enumerate(lists[1]) if isinstance(step, Call)}
    first, second = calls["tridiagonalize"], calls["diagonalize"]
    swapped, missing = list(lists[1]), [*lists[1][:first], *lists[1][first + 1 :]]
    swapped[first], swapped[second] = lists[1][second], lists[1][first]
    for steps in (swapped, missing):
        with pytest.raises(ProgramError, match="ranks meet in different steps"):
            check([lists[0], steps])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("way", [way for way in WAYS if way["kind"] in ("solve", "solve_triangular", "lstsq")], ids=str)
def test_one_right_hand_side_travels_in_place_of_panels(way, ranks):
    pulled = travelled(factor_plan(problem(way, 60, 60, 1), ranks, 3, engine="peer"))
    carried = factor_plan(problem(way, 60, 60, 1), ranks, 3)
    assert carried.carried
    assert travelled(carried) == (0 if way["kind"] == "solve_triangular" else pulled - 20 + 20 // ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_many_blocks(way, ranks):
    plan = factor_plan(problem(way, 60, 60, 20), ranks, 3)
    assert (travelled(plan) == 0) == (ranks == 1)
    # Contracts of kernels say about as many operations as the formula for the whole.
    flops = cost([plan.steps(rank) for rank in range(ranks)], Rates(1.0, 1.0, 1.0, 0.0)).flops
    assert 0.7 < flops / plan.problem.flops < 1.1


@given(
    st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9)
)
@settings(max_examples=100, deadline=None)
def test_every_column_is_in_one_place(m, n, nrhs, ranks, width, width_b):
    columns = Columns((Matrix((m, n), width), Matrix((m, nrhs), width_b)), ranks)
    assert sum(columns.local_cols(rank) for rank in range(ranks)) == n + nrhs
    for rank in range(ranks):
        places = [columns.local(rank, block, block + 1) for block in columns.owned(rank)]
        assert [x for place in places for x in range(place.start, place.stop)] == list(range(columns.local_cols(rank)))
        for matrix in (0, 1):
            layout = columns.layout(matrix)
            part = columns.local(rank, columns.first(matrix), columns.first(matrix + 1))
            assert layout.local_shape(rank) == (m, part.stop - part.start)
            for block in columns.owned(rank, columns.first(matrix), columns.first(matrix + 1)):
                assert not m or layout.owner(0, columns.blocks[block].start) == rank


@pytest.mark.parametrize("way", WAYS, ids=str)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(8, 64))
@settings(max_examples=20, deadline=None)
def test_memory_is_as_projected(way, m, n, nrhs, ranks, width):
    m, n = (max(m, n), min(m, n)) if way["kind"] in ("lstsq", "pinv") else (m, n)
    plan = factor_plan(problem(way, m, n, nrhs), ranks, width)
    projected, panels = _memory(plan), 2 * plan.columns.rows * plan.width * 8
    for rank, index in enumerate(plan.ranks):
        held = peak_bytes(plan.steps(rank))
        held += sum(int(plan.problem[x].elements[plan.where[x] == index].sum()) * 8 for x in plan.problem.operands)
        # Pivots and the like, which are small, are not projected.
        assert held - 64 * (m + n) <= projected[index] <= held + panels


@pytest.mark.parametrize("way", WAYS, ids=str)
@given(st.integers(150, 300), st.integers(100, 150), st.integers(20, 60), st.integers(1, 5), st.integers(4, 12))
@settings(max_examples=10, deadline=None)
def test_moved_bytes_are_as_estimated(way, m, n, nrhs, ranks, width):
    plan = factor_plan(problem(way, m, n, nrhs), ranks, width)
    plan = _costed(plan, _held(plan))
    lists = [plan.steps(rank) for rank in range(ranks)]
    moved = sum(itertools.starmap(functools.partial(moved_bytes, plan), enumerate(lists)))
    assert moved == pytest.approx(plan.bytes_moved, rel=0.15)
    loads = [[step for step in steps if isinstance(step, Load)] for steps in lists]
    loaded = sum(itertools.starmap(functools.partial(moved_bytes, plan), enumerate(loads)))
    assert moved - loaded == pytest.approx(cost(lists, Rates(1.0, 1.0, 1.0, 0.0)).bytes_moved, rel=0.15)


PLAN = factor_plan(Factorization("lu", (40, 40), "float64"), 2, 8)


def without(steps, kind, at=0):
    found = [step for step in steps if isinstance(step, kind)][at]
    return [step for step in steps if step is not found]


def before(steps, place, *more):
    at = next(at for at, step in enumerate(steps) if place(step))
    return [*steps[:at], *more, *steps[at:]]


def is_call(kernel):
    return lambda step: isinstance(step, Call) and step.kernel == kernel


def delivers(steps, **changes):
    return [dataclasses.replace(x, **changes) if isinstance(x, Deliver) else x for x in steps]


ARRAY = PLAN.steps(0)[0].buffer
RESULTS = PLAN.steps(0)[-1].keys


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, lambda steps: without(steps, Publish), "no rank can go on"),
        (0, lambda steps: without(steps, Drop), "leave"),
        (1, lambda steps: without(steps, Pull), "is not there"),
        (1, lambda steps: without(steps, Call), "is not there"),
        (0, lambda steps: [*steps[:5], steps[4], *steps[5:]], "published twice"),
        (0, lambda steps: before(steps, is_call("laswp"), Call("clear", (ARRAY[:, :9],), {})), "must not change"),
        (0, lambda steps: before(steps, is_call("laswp"), Call("gemm", (ARRAY, ARRAY, ARRAY), {})), "given twice"),
        (
            1,
            lambda steps: [*without(steps, Publish), next(step for step in steps if isinstance(step, Publish))],
            "no rank can go on",
        ),
        (0, lambda steps: [dataclasses.replace(x, lane="") if is_call("swap_rows")(x) else x for x in steps], "lane"),
        # Columns of a result that a rank does not publish, and ranks that deliver other ones, or not at all.
        (1, lambda steps: [x for x in steps if getattr(x, "key", None) != RESULTS[0]], "no rank can go on"),
        (1, lambda steps: delivers(steps, keys=RESULTS[::-1]), "ranks meet in different steps"),
        (0, lambda steps: without(steps, Deliver), "no rank can go on"),
        (0, lambda steps: delivers(steps, chunks=steps[-1].chunks * 2), "delivered twice"),
        (0, lambda steps: [*steps, Call("clear", (ARRAY,), {})], "is not there"),
    ],
)
def test_the_check_finds_wrong_programs(rank, change, message):
    lists = [PLAN.steps(rank) for rank in range(2)]
    check(lists)
    lists[rank] = change(list(lists[rank]))
    with pytest.raises(ProgramError, match=message):
        check(lists)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("kind", ["cholesky", "lu", "qr"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_panel_is_published_before_others_are_updated(kind, ranks, queued, monkeypatch):
    """But updates are queued before a panel of QR that the thread waits for, unless they are short."""
    entries = {name: entry._replace(short=0) for name, entry in factor.FACTORED.items()}
    monkeypatch.setattr(factor, "FACTORED", entries)
    task = Factorization(kind, (90, 90), "float64", mode="r" if kind == "qr" else "reduced")
    plan = factor_plan(task, ranks, 9, engine="peer" if queued else "numpy")
    for rank in range(ranks):
        steps = list(enumerate(plan.steps(rank)))
        calls = [(at, step) for at, step in steps if isinstance(step, Call)]
        for panel in plan.columns.owned(rank, 1, 9):
            names = {f"{part}.{panel - 1}" for part in ("lower", "extra")}
            used = [(at, call) for at, call in calls if names & {one.name for one in call.arguments}]
            ahead = max(at for at, call in used if call.lane in ("ahead", "panel"))
            made = next(at for at, call in calls if [one.name for one in call.makes] == [f"extra.{panel}"])
            told = next(at for at, step in steps if isinstance(step, Publish) and step.key == Key("lower", panel))
            assert ahead < made < told
            for at, _ in used:
                assert at <= ahead or (at < made if queued and kind == "qr" else at > told)


def collide(call, other):
    """Whether one of two calls writes what the other one touches."""
    pairs = itertools.product(*([*roles_of(one), *((made, "w") for made in one.makes)] for one in (call, other)))
    for (one, role), (two, role_of_two) in pairs:
        (top, bottom, left, right), (first, last, start, stop) = one.box, two.box
        both = top < last and first < bottom and left < stop and start < right
        if one.name == two.name and both and (role, role_of_two) != ("r", "r"):
            return True
    return False


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("kind", ["cholesky", "lu", "qr", "solve"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_on_two_streams_wait_for_each_other(kind, ranks, collective):
    """Where one writes what another one touches, one of them is queued after the other one has been waited for."""
    b, options = ((90, 20), {"assume_a": "pos"}) if kind == "solve" else (None, {})
    engine = "nccl" if collective else "peer"
    plan = factor_plan(Factorization(kind, (90, 90), "float64", b, **options), ranks, 9, engine=engine)
    for rank in range(ranks):
        # Calls on the stream of the work and on that of the work ahead; how many of the other one's each waits for.
        queued, known = ([], []), [0, 0]
        for step in plan.steps(rank):
            if not isinstance(step, Call | Publish):
                continue
            on = int(step.lane in ("ahead", "panel"))
            if step.lane in ("ahead", "join"):
                known[on] = len(queued[not on])
            if isinstance(step, Call):
                assert not [other for other in queued[not on][known[on] :] if collide(step, other)], step
                queued[on].append(step)
        assert queued[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hessenberg", (3, 3), "float64"), "unknown factorization 'hessenberg'"),
        (("lu", (3, 3), "int64"), "convert A and B to one of"),
        (("cholesky", (3, 4), "float64"), "must be square, got 3 x 4"),
        (("solve", (3, 3), "float64"), "needs right-hand sides"),
        (("lu", (3, 3), "float64", (3, 1)), "has no right-hand sides"),
        (("solve", (3, 3), "float64", (4, 1)), "b must have 3 rows; it has 4"),
    ],
)
def test_bad_problems(arguments, message):
    with pytest.raises(PlanError, match=message):
        Factorization(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "full"}, "mode='full'; expected one of 'reduced'"),
        ({"op": "X"}, "op='X'"),
        ({"assume_a": "sym"}, "assume_a='sym'"),
        ({"right": True}, "solve has no option right"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(PlanError, match=message):
        Factorization("solve", (3, 3), "float64", (3, 1), **options)


def test_bad_numbers_of_ranks():
    with pytest.raises(ProtocolError, match="do not fit 0 ranks"):
        dataclasses.replace(PLAN, ranks=()).check()


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_widths(n, ranks):
    width = block_width(Factorization("lu", (n, n), "float64"), ranks)
    # One rank has LAPACK cut the matrix.
    most = 512 if n >= 32 * ranks * 512 else 256
    assert width >= max(n, 256) if ranks == 1 else 32 <= width <= most
    assert most == 256 or ranks == 1 or width == 512


@pytest.mark.parametrize(("n", "ranks", "width"), [(16384, 2, 512), (32768, 2, 768), (32768, 4, 512), (65536, 2, 1024)])
def test_widths_of_cholesky_on_gpus(n, ranks, width):
    assert block_width(Factorization("cholesky", (n, n), "float64"), ranks, (128, 512)) == width


@given(st.sampled_from(["full", "lower", "unit lower", "upper"]), *[st.integers(0, 9)] * 2, *[st.integers(1, 9)] * 2)
def test_what_is_outside_of_a_triangle_is_not_copied(form, row, col, rows, cols):
    whole = np.arange(400).reshape(20, 20)
    copy = Copy(0, 0, 0, 0, 0, 0, rows, cols, row, col)
    source, found = whole[row : row + rows, col : col + cols], np.full((rows, cols), -1)
    parts = list(inside(form, [copy]))
    for part in parts:
        assert (found[part.dst_index] == -1).all(), "copied twice"
        found[part.dst_index] = source[part.src_index]
        assert (part.row, part.col) == (row + part.dst_row, col)
    triangle = {"full": np.ones_like(whole), "upper": np.triu(np.ones_like(whole))}.get(form, np.tri(20, dtype=int))
    inner = triangle[row : row + rows, col : col + cols].astype(bool)
    np.testing.assert_array_equal(found[inner], source[inner])
    assert all(inner[part.dst_index].any() for part in parts)
    assert any(inner[part.dst_index].all() for part in parts) or len(parts) < 2
