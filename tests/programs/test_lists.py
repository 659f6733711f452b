"""Programs without numbers: every builder over random layouts goes through the checker, and faults are found."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from typing import Any

import dask.array as da
import numpy as np
import pytest
from conformance import make_problem, random_chunks
from factoring import factor_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import problem_of
from proof import all_flags, check, moved_bytes
from tracing_ranks import compiled, plan_of

from dask_distmm import fori_loop, linalg, while_loop
from dask_distmm.arrays.jit import Jitted
from dask_distmm.config import read_options
from dask_distmm.engines.numpy.engine import ProductKernels
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.tridiagonal import SharedEigh
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import METHODS, NamedMatrix, Worker, groups, plan, product
from dask_distmm.programs.check import ProgramError, Rates, cost, peak_bytes
from dask_distmm.programs.composite import BUILDERS, record
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.programs.recorder import Rows
from dask_distmm.programs.steps import (
    CONTRACTS,
    PART,
    Buffer,
    Call,
    Drop,
    If,
    Key,
    Loop,
    New,
    Publish,
    Pull,
    Step,
    Store,
    Take,
    View,
    flops_of,
    messages_to_all,
)

# Builder, options, all outputs.
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("qr", {}, ("q", "r")),
    ("svd", {}, ("u", "s", "vh")),
    ("polar", {}, ("u", "h")),
    ("pinv", {"rtol": None}, ("x",)),
    ("pinv", {"rtol": 1e-3}, ("x",)),
    ("svd_compressed", {"k": 3, "width": 5, "iterations": 2, "seed": 0}, ("u", "s", "vh")),
    ("cov", {"ddof": 1, "correlation": True}, ("c",)),
    ("gram", {}, ("g",)),
    ("pca", {"k": 2, "spread": 32}, ("components", "variances", "mean", "total")),
    ("lstsq", {"rtol": None}, ("x", "residuals", "rank", "s")),
    ("lstsq", {"rtol": 1e-8}, ("x", "residuals", "rank", "s")),
    ("ridge", {"alphas": (1.0, 2.0)}, ("x",)),
    ("ridge", {"alphas": (1.0, 2.0), "centred": True}, ("x", "center", "level")),
]
FACTORED = [("cholesky",), ("ldlt",), ("lu",), ("qr",), ("inv",), ("pinv",), ("eigh",)]
# The columns of operands beside A.
MORE = {"lstsq": {"b": 2}, "ridge": {"b": 2}}


def recorded(case, owners, ranks, sizes, wanted=None):
    builder, options, outputs = case
    rows, cols = Rows(tuple(sizes), tuple(owners), ranks), {"a": 8} | MORE.get(builder, {})
    return [
        record(BUILDERS[builder].record, options, rows, cols, "float64", outputs if wanted is None else wanted, me=me)
        for me in range(ranks)
    ]


def solved(name, more, ranks, rng):
    """Return the lists of a solver, with a preconditioner, a start or a callback."""
    n = 6 * ranks
    a, b = (da.ones((n, size), chunks=(6, size)) for size in (n, 1))
    options = {
        "": {},
        "x0": {"x0": b},
        "diagonal": {"M": b[:, 0]},
        "matrix": {"M": a},
        "function": {"M": abs},
        "callback": {"callback": print} | ({"callback_type": "pr_norm"} if name == "gmres" else {}),
    }[more]
    given = {"eigsh": (a, 2), "lobpcg": (a, b), "expm": (a,)}.get(name, (a, b))
    results = getattr(linalg, name)(*given, **options, **({"method": "rows"} if name == "expm" else {}))
    plan = plan_of(problem_of(results if name == "expm" else results[0]), ranks, rng)
    return [plan.steps(rank) for rank in range(len(plan.ranks))]


def test_contracts_and_kernels_and_builders_know_each_other():
    methods = {name for name in dir(ProgramKernels) if not name.startswith("_")}
    used: set[str] = set()
    tasks = [
        Factorization(kind, (40, 40), "float64") for kind in ("cholesky", "ldlt", "lu", "inv", "det", "eigh", "svd")
    ]
    tasks += [Factorization("lstsq", shape, "float64", (shape[0], 2)) for shape in ((40, 60), (60, 40))]
    refined = [{"assume_a": "pos"}, {}, {"has_factors": True}]
    tasks += [Factorization("solve", (40, 40), "float64", (40, 2), factor_dtype="tf32", **more) for more in refined]
    for task in tasks:
        factored = factor_plan(task, 1 if task.kind == "svd" else 2, 8, shared=task.kind == "eigh")
        steps = every(factored.steps(0) + factored.steps(factored.count - 1))
        used |= {step.kernel for step in steps if isinstance(step, Call)}
    assert all(callable(getattr(SharedEigh, name, getattr(LapackKernels, name, None))) for name in used)
    assert methods - CONTRACTS.keys() == {
        *("complete", "empty", "prepare", "reached", "reported"),
        # Of traced functions: what a run has beside kernels.
        *("compiled", "constants", "pool", "threads"),
    }
    lists = [steps for case in CASES for steps in recorded(case, [0, 1], 2, [9, 9])]
    for steps in (*lists, *solved("cg", "x0", 2, np.random.default_rng())):
        used |= {step.kernel for step in every(steps) if isinstance(step, Call)}
    for kind, seed in itertools.product(("gram", "formula"), range(20)):
        lists, made = product_lists(seed, "local", 2, kind)
        placed = dataclasses.replace(made, engine="peer").steps(0)
        on_gpu = [step for step in placed if isinstance(step, Call)]
        calls = [step for steps in lists for step in steps if isinstance(step, Call)]
        used |= {step.kernel for step in calls}
        assert all(callable(getattr(ProductKernels, step.kernel)) for step in calls)
        used |= {step.kernel for step in on_gpu}
    # All ranks meet in two of these; a tile of A is conjugated in place.
    halves = ((8, 8), (8, 8))
    problem = make_problem(
        halves, halves, "complex128", conjugated=(True, True), method="allgather", grid=(1, 2, 1), array="cupy"
    )
    where = {name: np.arange(4, dtype=np.int32) % 2 for name in "ab"}
    tiled = plan(problem, [Worker(f"w{i}") for i in range(2)], where, engine="cublasmp").steps(0)
    used |= {step.kernel for step in tiled if isinstance(step, Call)}
    for builder in ("svd",):
        used |= {s.kernel for s in every(recorded((builder, {}, ("s",)), [0], 1, [9])[0]) if isinstance(s, Call)}
    traced = compiled(Jitted(until_large, ()), da.ones((6, 2), chunks=2), np.ones(2))
    used |= {
        s.kernel for s in every(plan_of(traced.problem, 2, np.random.default_rng()).steps(0)) if isinstance(s, Call)
    }
    assert used == CONTRACTS.keys()
    assert {case[0] for case in CASES} == BUILDERS.keys()


def until_large(x, y):
    """Grow until a number is large; what is then returned depends on a turn's number."""
    state = while_loop(lambda s: s[1] < 99.0, lambda s: (s[0] * 2, abs(s[0]).sum()), (x, 0.0))
    return fori_loop(0, 3, lambda i, s: s * y + i, state[0])


def every(steps):
    for step in steps:
        yield step
        if isinstance(step, If):
            yield from every(step.then + step.otherwise)
        elif isinstance(step, Loop):
            yield from every(step.body)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 9), st.data())
def test_programs_come_to_their_end(case, ranks, data):
    others = data.draw(st.lists(st.integers(0, ranks - 1), max_size=6))
    owners = data.draw(st.permutations([*range(ranks), *others]))
    sizes = data.draw(st.lists(st.sampled_from([-1, 0, 3, 50]), min_size=len(owners), max_size=len(owners)))
    wanted = data.draw(st.sets(st.sampled_from(case[2]), min_size=1))
    lists = recorded(case, owners, ranks, sizes, wanted)
    check(lists)
    for flags in all_flags([lists[0]]):
        assert cost(lists, Rates(1e9, 1e9, 1e9, 1e-3), flags).messages % max(1, ranks - 1) == 0
    assert peak_bytes(lists[0]) > 0


def test_memory_of_many_branches():
    """Twenty power iterations have millions of combinations of flags."""
    few, many = (("svd_compressed", {"k": 3, "width": 5, "iterations": n, "seed": 0}, ("u",)) for n in (1, 20))
    assert peak_bytes(recorded(few, [0, 1], 2, [9, 9])[0]) <= peak_bytes(recorded(many, [0, 1], 2, [9, 9])[0])


def product_lists(seed, method, workers, kind):
    """Return the lists of a product of random chunks, and its plan; chunks that are there from the start are made."""
    rng = np.random.default_rng(seed)
    m, n, k = (int(x) for x in rng.integers(1, 200, 3))
    if kind == "gram":
        n = m
    rows, depth, cols = (random_chunks(rng, x, 4) for x in (m, k, n))
    cols = rows if kind == "gram" else cols
    options = dataclasses.replace(
        read_options(), pack_below=int(rng.choice([0, 384])), panel_bytes=int(rng.integers(1, 2**20))
    )
    changes = {
        "plain": {},
        "gram": {"arrays": ("x", "x"), "transposed": (True, False)},
        "made": {"by_ranks": (bool(rng.integers(2)), True)},
        "formula": {
            "formula": Formula(beta=(1.0, 0.0), epilog="gelu_aux_bias", amax=True),
            "extras": (NamedMatrix("c", (rows, cols), "float64"), NamedMatrix("bias", ((1,), cols), "float64")),
        },
        "begun": {"formula": Formula(partial=True), "extras": (NamedMatrix("partial", (rows, cols), "float64"),)},
    }[kind]
    problem = make_problem((rows, depth), (depth, cols), method=method, options=options, **changes)
    where = {
        one.name: rng.integers(0, workers, one.count).astype(np.int32) for one in problem.matrices if not one.by_ranks
    }
    if kind == "gram":
        where["b"] = where["a"].reshape(problem.a.counts).T.ravel()
    made = plan(problem, [Worker(f"w{i}") for i in range(workers)], where, engine="numpy")
    lists = []
    for rank, me in enumerate(made.ranks):
        begun = {int(i) for i in made.owned(rank) if kind == "begun" and made.where["partial"][i] == me}
        steps = made.steps(rank, begun)
        used = [place.buffer for step in steps if isinstance(step, Call) for place in step.arguments]
        names = {
            groups.chunk_name(name, i): (name, int(i))
            for name in made.where
            for i in np.flatnonzero(made.where[name] == me)
        }
        there = [*{buffer.name: buffer for buffer in used if buffer.name in names}.values()]
        lists.append([*(Take(x, *names[x.name]) for x in there), *steps, *map(Drop, there)])
    return lists, made


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(METHODS),
    st.integers(1, 5),
    st.sampled_from(["plain", "gram", "made", "formula", "begun"]),
)
def test_products_come_to_their_end(seed, method, workers, kind):
    lists, made = product_lists(seed, method, workers, kind)
    check(lists)
    stored = collections.Counter(s.number for steps in lists for s in steps if isinstance(s, Store) and not s.output)
    assert stored == dict.fromkeys(range(made.problem.d.count), 1)
    flops = sum(flops_of(step) for steps in lists for step in steps if isinstance(step, Call))
    moved = sum(moved_bytes(made, rank, steps) for rank, steps in enumerate(lists))
    estimated = made.estimate.bytes_moved
    if kind != "gram":
        assert flops == pytest.approx(made.problem.flops)
        assert moved == pytest.approx(estimated, abs=1)
    else:
        # Rows of X that a rank needs as columns, too, come once.
        assert moved <= estimated + 1
        assert made.grid[0] > 1 or moved >= estimated - 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 3), st.integers(1, 3))
def test_lists_are_kept_for_like_plans_only(seed, method, workers, others):
    plans = [product_lists(seed, method, count, kind)[1] for count in (workers, others) for kind in ("plain", "made")]
    plans += [
        dataclasses.replace(made, **change)
        for made in plans[:1]
        for change in (
            {"packing": "ab" if made.packing == "" else ""},
            {"where": {name: np.full_like(at, made.ranks[-1]) for name, at in made.where.items()}},
            {"owners": np.full_like(made.owners, len(made.ranks) - 1)},
            {"problem": dataclasses.replace(made.problem, formula=Formula(alpha=(2.0, 0.0)))},
            {"problem": dataclasses.replace(made.problem, name="another")},
        )
    ]
    for one in plans * 2:
        for rank in range(len(one.ranks)):
            assert one.steps(rank) == product.record(one, rank)
    assert plans[-1].steps(0) is plans[0].steps(0)


def mutated(number, steps):
    """Return steps of which one is deleted, or has another key, and that step; None for arithmetic and branches."""
    at = number.randrange(len(steps))
    step, rest = steps[at], (steps[:at], steps[at + 1 :])
    if isinstance(step, If | Call):
        return steps, None  # arithmetic is the business of numeric tests
    if isinstance(step, Loop):
        body, inner = mutated(number, step.body)
        return (*rest[0], dataclasses.replace(step, body=body), *rest[1]), inner
    if number.random() < 0.5 or not isinstance(step, Pull | Publish):
        return (*rest[0], *rest[1]), step
    return (*rest[0], dataclasses.replace(step, key=Key(step.key.part, step.key.number + 1)), *rest[1]), step


@pytest.mark.parametrize("case", [*CASES, *FACTORED], ids=lambda case: case[0])
def test_mutations_are_found(case):
    """A step that is deleted, moved or changed is found, unless it makes no difference."""
    number, found, tried = random.Random(0), 0, 0
    if case in FACTORED:
        plan = factor_plan(Factorization(case[0], (40, 40), "float64"), 2, 8, shared=True)
        lists = [plan.steps(0), plan.steps(1)]
    else:
        lists = recorded(case, [0, 1, 1], 2, [9, 9, 9])
    check(lists)
    for _ in range(60):
        changed: list[Any] = list(lists)
        rank = number.randrange(2)
        changed[rank], step = mutated(number, lists[rank])
        if step is None:
            continue
        tried += 1
        try:
            check(changed)
        except (ProgramError, KeyError):
            found += 1
        else:
            # What nobody pulls, or is freed at the end anyway; the next message of one kind in place of another; a
            # chunk of a result that is a copy.
            stays = isinstance(step, Store) and isinstance(step.buffer, View)
            assert isinstance(step, Publish | Pull) or stays, step
            tried -= stays
    assert found > 0.8 * tried


def test_loops_that_run_ahead_are_found():
    """A rank that does not wait for others in a turn would free what they still need."""
    go, back = Buffer("s0", (1, 1), "bool"), Buffer("s1", (1, 1), "bool")

    def turn(rank: int, *, waiting: bool) -> tuple[Step, ...]:
        if rank == 0:
            answer = (New(back), Pull(1, Key(PART, 9), (back,)), Drop(back)) if waiting else ()
            return Publish(Key(PART, 1), (go,), copied=True), *answer
        answer = (New(back, zero=True), Publish(Key(PART, 9), (back,)), Drop(back)) if waiting else ()
        return Pull(0, Key(PART, 1), (go,)), *answer

    for waiting in (True, False):
        lists = [
            (New(go, zero=True), *turn(rank, waiting=True), Loop(go, turn(rank, waiting=waiting), 5, 5), Drop(go))
            for rank in (0, 1)
        ]
        if waiting:
            check(lists)
            assert peak_bytes(lists[0]) <= 4
            # The turn before the loop, and all turns that are expected.
            assert cost(lists, Rates(1.0, 1.0, 1.0, 1.0)).messages == 12
            continue
        with pytest.raises(ProgramError, match="freed before|may still pull"):
            check(lists)


# What a turn of the innermost loop pulls from each other rank, one message after the other, with whatever else.
# Of LOBPCG rank 0 decides, whose message comes in addition.
PULLS = {"cg": 2, "minres": 3, "gmres": 3, "eigsh": 3, "expm": 1, "lobpcg": 3, "lsqr": 1, "lsmr": 1}
MORE_OF = {"": [*PULLS], "x0": ["cg", "minres", "gmres", "lsqr", "lsmr"], "callback": ["cg", "minres", "gmres"]}
MORE_OF |= {key: ["cg", "minres", "gmres", "lobpcg"] for key in ("diagonal", "matrix", "function")}


@pytest.mark.parametrize(("more", "name"), [(more, name) for more, names in MORE_OF.items() for name in names])
def test_messages_of_a_turn(more, name):
    """A full M takes one more."""
    rng = np.random.default_rng()
    for ranks in (1, 2, 4):
        lists = solved(name, more, ranks, rng)
        check(lists)
        for rank, steps in enumerate(lists):
            loop = [step for step in every(steps) if isinstance(step, Loop)][-1]
            pulls = sum(isinstance(step, Pull) for step in every(loop.body))
            full, decided = more in ("matrix", "function"), name == "lobpcg" and rank > 0
            assert pulls == (PULLS[name] + full) * (len(lists) - 1) + decided


def rewritten(steps, change):
    """Return steps with what `change` returns for each call in its place."""
    for step in steps:
        if isinstance(step, Loop):
            yield dataclasses.replace(step, body=tuple(rewritten(step.body, change)))
        else:
            yield from change(step) if isinstance(step, Call) else [step]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["cg", "minres"]), st.integers(2, 4), st.data())
def test_flags_of_own_numbers_are_found(name, ranks, data):
    """A rank that adds up in another order, leaves out a part, or takes other options may decide otherwise."""
    lists = solved(name, "", ranks, np.random.default_rng(0))
    check(lists)
    rank = data.draw(st.integers(0, ranks - 1))
    (loop,) = [step for step in every(lists[rank]) if isinstance(step, Loop)]
    calls = [step for step in loop.body if isinstance(step, Call)]
    (condition,) = [step.arguments[0] for step in calls if step.kernel == "decide"]
    chosen = data.draw(st.sampled_from([x for x in calls if x.kernel == "merge" or condition in x.makes]))
    first, second, *rest = chosen.arguments
    change = data.draw(st.sampled_from(["options", "order", "left out"] if chosen.kernel == "merge" else ["options"]))
    changed = {
        "options": dataclasses.replace(chosen, options={**chosen.options, "flops": 0.5}),
        "order": dataclasses.replace(chosen, arguments=(second, first, *rest)),
        "left out": None,
    }[change]
    lists[rank] = tuple(rewritten(lists[rank], lambda x: [x] if x is not chosen else [changed] if changed else []))
    with pytest.raises(ProgramError, match="may have other bits|is not replicated|was not written"):
        check(lists)


def test_flags_that_are_the_same_bits():
    """From one rank, whichever it is; of zeros, by an exact kernel; not one that has changed since, or of operands."""
    go, own, a = Buffer("s0", (1, 1), "bool"), Buffer("s1", (1, 1), "float64", host=True), Buffer("a.0", (1, 1), "bool")
    key = Key(PART, 1)
    here: list[Step] = [New(own, zero=True), New(go, zero=True)]
    step = Call("evaluate_exactly", (own, go), {"roles": "uw"})
    estimated = Call("singular_values", (own, go), {})
    branch, end = If(go, (), ()), [Drop(own), Drop(go)]
    given, taken = Publish(key, (go,), copied=True), Pull(1, key, (go,))
    for first, second, alike in (
        ([step, branch], [step, branch], True),
        ([step, branch], [step, step, branch], False),
        ([estimated, branch], [estimated, branch], False),
        ([taken, branch], [estimated, given, branch], True),
        ([taken, branch], [given, step, branch], False),
        ([taken, branch, step, branch], [step, given, branch, branch], True),
        ([taken, branch, step, step, branch], [step, given, branch, branch], False),
    ):
        lists = [[*here, *first, *end], [*here, *second, *end]]
        if alike:
            check(lists)
            continue
        with pytest.raises(ProgramError, match="s0 may have other bits than that of another rank"):
            check(lists)
    operands: list[Step] = [Take(a, "a"), If(a, (), ()), Drop(a)]
    with pytest.raises(ProgramError, match="a.0 may have other bits"):
        check([operands, operands])


def test_what_the_checker_says():
    lists = recorded(CASES[0], [0, 1], 2, [9, 9])
    drop = next(step for step in lists[0] if isinstance(step, Drop))

    def without(kind: type[Step], rank: int = 0) -> list[Any]:
        steps = list(lists[rank])
        steps.remove(next(step for step in steps if isinstance(step, kind)))
        return [steps if rank == one else lists[one] for one in range(2)]

    for changed, said in (
        (without(Publish, 1), "no rank can go on"),
        (without(New), "is not there"),
        (without(Drop), "leave|there already"),
        ([[*lists[0], drop], lists[1]], "is not there"),
    ):
        with pytest.raises(ProgramError, match=said):
            check(changed)


def test_passes_over_a():
    def passes(case, wanted, **flags):
        lists = recorded(case, [0, 1] * 49, 2, [500] * 98, wanted)  # 1 / 49 has no exact sum of 49
        names = [step.flag.name for step in every(lists[0]) if isinstance(step, If)]
        values = dict(zip(names, flags.values(), strict=False))
        return cost(lists, Rates(1e9, 1e9, 1e9, 1e-3), values).passes

    by_name = {case[0]: case for case in CASES}
    assert passes(by_name["qr"], ["r"]) == 1
    assert passes(by_name["qr"], ["r"], once=False) == 2
    assert passes(by_name["qr"], ["r"], once=False, usable=False) == 2
    assert passes(by_name["qr"], ["q", "r"]) == 2
    assert passes(by_name["svd"], ["s"]) == 1
    assert passes(by_name["pca"], ["components"]) == 1
    assert passes(by_name["ridge"], ["x"]) == 1
    assert passes(by_name["lstsq"], ["x"]) == 2
    assert passes(by_name["svd_compressed"], ["u"]) == 3
    assert passes(by_name["svd_compressed"], ["u"], usable=True, again=True, once=False) == 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_of_all_ranks_to_all(ranks):
    """Those of a traced loop go from GPU to GPU; each is free again before the next one, whatever it is called."""

    def turn(x, w, h):
        h = h * (w.T @ x) / (w.T @ w @ h + 1)
        return w * (x @ h.T) / (w @ (h @ h.T) + 1), h

    rng = np.random.default_rng()
    x, w = (da.from_array(rng.random((60, cols)), chunks=(15, cols)) for cols in (8, 3))
    function = Jitted(lambda x, w, h: fori_loop(0, 5, lambda i, s: turn(x, *s), (w, h)), ())
    problem = compiled(function, x, w, rng.random((3, 8))).problem
    lists = [plan_of(problem, ranks, rng).steps(rank) for rank in range(ranks)]
    (loop,) = [step for step in lists[0] if isinstance(step, Loop)]
    inside = {step.key for step in loop.body if isinstance(step, Publish)}
    found = messages_to_all(lists[0], ranks)
    assert inside
    assert inside <= found.keys()
    # W^T X of 3 x 8, and W^T W.
    assert [found[key] for key in inside] == [256 + 256]
    late = [step for step in loop.body if not isinstance(step, Drop)]
    assert not messages_to_all(late, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_meet_in_turns_whose_inner_loop_has_none(ranks):
    """One rank decomposes for all in each turn: it may not be a turn ahead where only the inner loop has messages."""

    def turn(i, state):
        x, s = state
        u, d, _ = np.linalg.svd(s)
        return fori_loop(i, 2, lambda j, x: x / (x * x).sum(), x), u * d

    rng = np.random.default_rng()
    x = da.from_array(rng.random((60, 4)), chunks=(15, 4))
    function = Jitted(lambda x, s: np.matmul(*fori_loop(0, 5, turn, (x, s))), ())
    problem = compiled(function, x, rng.random((4, 4))).problem
    for _ in range(5):
        plan = plan_of(problem, ranks, rng)
        check([plan.steps(rank) for rank in range(ranks)])
