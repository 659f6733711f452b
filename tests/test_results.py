"""Where the chunks of D are after runs that some ranks did not outlive."""

from __future__ import annotations

import numpy as np
import pytest

from dask_distmm.errors import ProtocolError
from dask_distmm.plan import Worker, plan, restrict
from dask_distmm.results import Survivors, of_survivors, together
from dask_distmm.testing import make_problem

PROBLEM = make_problem(((9, 9, 9, 9), (8,)), ((8,), (2, 2)), method="allgather", name="m")
EVERYBODY = frozenset(["w0", "w1", "x"])


def made(problem=PROBLEM, workers=("w0", "w1")):
    places = [np.zeros(int(np.prod(problem.chunk_counts(operand))), np.int32) for operand in "ab"]
    return plan(problem, [Worker(address) for address in workers], *places, engine="numpy")


def survivors(missing=()):
    told = []
    found = Survivors(lambda addresses, message: told.append((addresses, message)))
    found["m"] = of_survivors(3, made(), {"w1": {"missing": list(missing)}}, ["w0", "x"], EVERYBODY)
    return found, told


def test_what_survivors_hold_and_what_is_left():
    found, told = survivors()
    kept, part = found.left(PROBLEM)
    assert kept.holders == dict.fromkeys([4, 5, 6, 7], "w1")
    assert kept.missing == [0, 1, 2, 3]
    assert (kept.workers, kept.participants) == ({"w1"}, {"w1"})
    assert part.part.every("d").tolist() == [0, 1, 2, 3]
    assert not told
    # The rest, done by others.
    rest = made(part, ("w2", "w1"))
    whole = together(5, rest, frozenset(["w1", "w2"]), kept)
    assert whole.run_id == 5
    assert not whole.missing
    assert [whole.holders[i] for i in range(4)] == [rest.workers[rank] for rank in rest.owners]
    assert [whole.holders[i] for i in range(4, 8)] == ["w1"] * 4
    assert whole.participants == {"w1", "w2"}


def test_without_any_loss_nothing_is_left():
    assert Survivors(lambda addresses, message: None).left(PROBLEM) == (None, PROBLEM)
    result = together(2, made(), EVERYBODY, None)
    assert not result.missing
    assert result.workers == {"w0", "w1"}


def test_all_of_it_may_be_done():
    found = Survivors(lambda addresses, message: None)
    found["m"] = of_survivors(3, made(), {"w0": {"missing": []}, "w1": {"missing": []}}, ["x"], EVERYBODY)
    kept, part = found.left(PROBLEM)
    assert part is None
    assert not kept.missing


def test_what_needs_all_of_it_again_is_dropped():
    """Every row and every column lacks a chunk."""
    found, told = survivors(missing=[4, 5, 6, 7])
    assert found.left(PROBLEM) == (None, PROBLEM)
    assert not found
    assert told == [(["w1"], {"op": "distmm-forget", "run_id": 3, "name": None})]
    found.discard("m")
    assert len(told) == 1


def test_a_survivor_that_goes_too():
    found, _ = survivors()
    found.lose("w1")
    kept = found["m"]
    assert not kept.holders
    with_part = together(5, made(restrict(PROBLEM, [0]), ("w2",)), frozenset(["w2"]), kept)
    assert with_part.missing == [1, 2, 3, 4, 5, 6, 7]


def test_chunks_that_there_are_not_are_refused():
    with pytest.raises(ProtocolError, match="said to be missing"):
        survivors(missing=[8])
