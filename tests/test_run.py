"""The state machine of a run: no order of messages may bring it into a state that is not in its picture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.errors import ProtocolError
from dask_distmm.runtime.run import Run

WORKERS = ("a", "b", "c")


def make(**changes) -> Run:
    return Run(**({"run_id": 3, "name": "m", "key": "k", "participants": frozenset(WORKERS)} | changes))


def start(run: Run) -> None:
    """Have everybody vote for it, and begin."""
    run.begin_vote()
    for worker in WORKERS:
        run.answer(worker, 3)
    run.begin_running(0.0)


def test_the_straight_way():
    run = make()
    run.begin_vote()
    for worker in WORKERS:
        assert worker in run.waiting_for
        run.answer(worker, 3)
    run.begin_running(0.0)
    for worker in WORKERS:
        assert run.live
        run.answer(worker, 3)
    assert run.phase == "done"
    assert not run.live


@pytest.mark.parametrize(
    "wrong",
    [
        lambda run: run.answer("a", 2),
        lambda run: run.answer("stranger", 3),
        lambda run: run.answer("a", 3),
        lambda run: run.begin_vote(),
        lambda run: run.begin_running(0.0),
    ],
    ids=["old run", "stranger", "twice", "vote again", "start before all have voted"],
)
def test_refused_without_a_change(wrong):
    run = make()
    run.begin_vote()
    run.answer("a", 3)
    before = (run.phase, set(run.answered))
    with pytest.raises(ProtocolError):
        wrong(run)
    assert (run.phase, run.answered) == before


@pytest.mark.parametrize("lost", WORKERS)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_losing_a_worker(lost, steps):
    run = make()
    if steps:
        run.begin_vote()
    if steps == 2:
        for worker in WORKERS:
            run.answer(worker, 3)
        run.begin_running(0.0)
    phase = run.phase
    assert not run.lose(["bystander"])
    assert run.lose([lost])
    assert run.phase == "failed"
    assert run.failed_in == phase
    assert set(run.failures) == {lost}
    assert not run.lose([lost])


def test_independent_ranks_go_on_without_the_others():
    run = make(independent=True)
    start(run)
    run.report("a", 0.5, 1.0)
    run.report("b", 0.2, 1.0)
    # The one with the barrier too.
    assert run.lose(["a"])
    assert not run.lose(["a"])
    assert run.live
    assert run.waiting_for == {"b", "c"}
    assert run.share == pytest.approx(0.1)
    assert run.silent({"a": 0.0, "b": 90.0, "c": 0.0}, 100.0, 50.0) == ["c"]
    with pytest.raises(ProtocolError, match="continues without it"):
        run.answer("a", 3)
    run.answer("b", 3)
    assert run.lose(["c"])
    assert run.phase == "done"
    assert run.lost == {"a", "c"}


def test_somebody_must_be_left():
    run = make(independent=True)
    start(run)
    assert run.lose(["a", "b"])
    assert run.lose(["c"])
    assert run.phase == "failed"


@pytest.mark.parametrize("vote", [False, True])
def test_before_they_run_they_need_each_other(vote):
    run = make(independent=True)
    if vote:
        run.begin_vote()
    assert run.lose(["b"])
    assert run.phase == "failed"


messages = st.one_of(
    st.tuples(st.just("answer"), st.sampled_from([*WORKERS, "x"]), st.sampled_from([2, 3, 4])),
    st.tuples(st.just("begin_vote")),
    st.tuples(st.just("begin_running"), st.floats(0, 100)),
    st.tuples(st.just("report"), st.sampled_from([*WORKERS, "x"]), st.floats(0, 1), st.floats(0, 100)),
    st.tuples(st.just("fail"), st.just({"a": "why"})),
    st.tuples(st.just("lose"), st.lists(st.sampled_from([*WORKERS, "x"]))),
)


@given(st.booleans(), st.lists(messages, max_size=30))
def test_any_order_of_messages(independent, sequence):
    run = make(independent=independent)
    votes: set[str] = set()
    order = ["planned", "voting", "running", "done"]
    for name, *arguments in sequence:
        before, answered = run.phase, set(run.answered)
        try:
            getattr(run, name)(*arguments)
        except ProtocolError:
            assert (run.phase, run.answered) == (before, answered)
            continue
        if before in ("done", "failed"):
            assert run.phase == before
        elif run.phase not in (before, "failed"):
            assert order.index(run.phase) == order.index(before) + 1
        if before == "voting":
            votes |= run.answered | answered
        if run.phase == "running":
            assert votes >= set(WORKERS)
            assert run.waiting_for
        assert not run.lost or independent


@given(
    st.lists(st.tuples(st.sampled_from(WORKERS), st.floats(0, 1), st.floats(0, 100)), max_size=20),
    st.dictionaries(st.sampled_from([*WORKERS, "x"]), st.floats(0, 200)),
    st.floats(0, 200),
    st.floats(1, 100),
)
def test_silence_ends_no_run_that_makes_progress(reports, seen, now, limit):
    """Only who gave no sign of life is named, and only where nobody got any further for as long."""
    run = make()
    assert run.silent(seen, now, limit) == []
    start(run)
    furthest: dict[str, float] = {}
    moved = [0.0]
    for worker, share, when in sorted(reports, key=lambda x: x[2]):
        run.report(worker, share, when)
        if share > furthest.get(worker, 0):
            furthest[worker] = share
            moved.append(when)
    assert run.share == pytest.approx(sum(furthest.values()) / 3)
    late = sorted(worker for worker in WORKERS if worker in seen and now - seen[worker] >= limit)
    assert run.silent(seen, now, limit) == (late if now - max(moved) >= limit else [])
    run.fail({})
    assert run.silent(seen, now, limit) == []
