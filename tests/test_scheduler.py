"""The scheduler's protocol: what its plugin makes of messages that are malformed, stale or somebody else's."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_distmm import matmul
from dask_distmm.errors import ProtocolError
from dask_distmm.plan import Problem
from dask_distmm.roster import Staging
from dask_distmm.testing import assert_product, make_problem

PROBLEM = make_problem(((4, 3), (5,)), ((5,), (6,)), name="matmul-nobody-s")
WHERE = [np.zeros(2, np.int32).tobytes(), np.zeros(1, np.int32).tobytes()]

junk = st.one_of(
    st.none(), st.integers(-3, 9), st.floats(), st.text(max_size=5), st.binary(max_size=20), st.lists(st.integers())
)
wires = junk | st.dictionaries(st.sampled_from(list(PROBLEM.to_wire())), junk).map(lambda x: PROBLEM.to_wire() | x)
runs = {
    "problem": wires,
    "addresses": junk | st.just(["tcp://127.0.0.1:1"]),
    "where": junk | st.just(WHERE) | st.lists(st.binary(max_size=12), max_size=3),
    "orders": junk | st.just(["C", "F"]),
    "worker": junk | st.just("tcp://127.0.0.1:1"),
}
questions = {
    "engine": junk | st.just("auto"),
    "array": junk,
    "dtypes": junk | st.just(["float64"]),
    "wanted": junk,
    "names": junk,
    "counts": junk,
}
calls = st.one_of(
    st.tuples(st.just("run"), st.fixed_dictionaries(runs)),
    st.tuples(st.just("describe"), st.dictionaries(st.sampled_from([*questions, "x"]), junk)),
    st.tuples(st.just("describe"), st.fixed_dictionaries(questions)),
    st.tuples(st.just("locate"), st.fixed_dictionaries({"name": junk, "run_id": junk, "index": junk})),
    st.tuples(st.just("lost"), st.fixed_dictionaries({"name": junk, "run_id": junk})),
    st.tuples(st.just("free"), st.fixed_dictionaries({"grace": junk.filter(lambda x: not isinstance(x, int | float))})),
    st.tuples(st.just("progressed"), st.dictionaries(st.sampled_from(["worker", "run_id", "share", "x"]), junk)),
)


async def send(messages, dask_scheduler=None):
    """Give messages to the plugin; return what each led to, and what was known before and after."""
    plugin = dask_scheduler.plugins["distmm"]

    def state():
        return plugin.live.newest, sorted(plugin.live), sorted(plugin.done), dict(plugin.restarts), len(plugin.pinned)

    before, found = state(), []
    for op, arguments in messages:
        try:
            answer = getattr(plugin, op)(**arguments)
            answer = await answer if hasattr(answer, "__await__") else answer
            found.append(answer["status"] if isinstance(answer, dict) else answer)
        except ProtocolError:
            found.append("refused")
    return found, before, state()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls, min_size=1, max_size=12))
def test_any_message(inproc_client, messages):
    """Nothing but a typed refusal, and what is known stays as it is."""
    x = da.ones((20, 20), chunks=10)
    if not inproc_client.run_on_scheduler(lambda dask_scheduler: "distmm" in dask_scheduler.plugins):
        matmul(x, x).compute()
    found, before, after = inproc_client.run_on_scheduler(send, messages)
    assert before == after
    good = {"describe": {"OK", "failed"}, "locate": {"unknown"}, "run": {"failed"}, "free": {"refused"}}
    for (op, _), answer in zip(messages, found, strict=True):
        assert answer in good.get(op, {None})


def test_a_run_that_is_no_task_is_refused(inproc_client):
    """A good message, but no barrier of that name runs anywhere: nobody would ever fetch its result."""
    a, b = np.random.default_rng().standard_normal((2, 50, 50))
    assert_product(a, b, matmul(da.from_array(a, chunks=20), da.from_array(b, chunks=30)).compute())
    message = {"problem": PROBLEM.to_wire(), "addresses": ["inproc://1"], "where": WHERE, "orders": ["C", "C"]}
    found, before, after = inproc_client.run_on_scheduler(send, [("run", message | {"worker": "inproc://1"})])
    assert found == ["failed"]
    assert before == after


@given(st.lists(st.binary(max_size=12), max_size=3), st.lists(st.sampled_from("CFX"), max_size=3), st.integers(0, 2))
def test_staging_fits_its_problem(where, orders, count):
    addresses = [f"tcp://127.0.0.1:{i}" for i in range(count)]
    lengths = [len(raw) for raw in where]
    fits = lengths == [8, 4] and len(orders) >= 2 and set(orders[:2]) <= {"C", "F"}
    fits = fits and all(0 <= i < count for raw in where for i in np.frombuffer(raw, np.int32))
    if fits:
        assert Staging.from_wire(PROBLEM, addresses, where, orders).orders == tuple(orders[:2])
    else:
        with pytest.raises(ProtocolError, match="staging of matmul-nobody-s"):
            Staging.from_wire(PROBLEM, addresses, where, orders)
    assert Staging.from_wire(PROBLEM, ["a"], WHERE, ["C", "F"]).orders == ("C", "F")


def test_a_problem_survives_the_wire():
    assert Problem.from_wire(PROBLEM.to_wire()) == PROBLEM
