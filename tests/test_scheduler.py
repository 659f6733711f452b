"""The scheduler's protocol: what its plugin makes of messages that are malformed, stale or somebody else's."""

from __future__ import annotations

import uuid

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import List, Task, TaskRef
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_distmm import matmul
from dask_distmm.errors import ProtocolError
from dask_distmm.planning import Problem
from dask_distmm.runtime.keys import barrier_key, barrier_name
from dask_distmm.testing import make_problem

PROBLEM = make_problem(((4, 3), (5,)), ((5,), (6,)), name="matmul-nobody-s")

junk = st.one_of(
    st.none(), st.integers(-3, 9), st.floats(), st.text(max_size=5), st.binary(max_size=20), st.lists(st.integers())
)
questions = {
    "engine": junk | st.just("auto"),
    "array": junk,
    "dtypes": junk | st.just(["float64"]),
    "wanted": junk,
    "names": junk,
    "counts": junk,
}
calls = st.one_of(
    st.tuples(st.just("describe"), st.dictionaries(st.sampled_from([*questions, "x"]), junk)),
    st.tuples(st.just("describe"), st.fixed_dictionaries(questions)),
    st.tuples(st.just("free"), st.fixed_dictionaries({"grace": junk.filter(lambda x: not isinstance(x, int | float))})),
    st.tuples(st.just("progressed"), st.dictionaries(st.sampled_from(["worker", "run_id", "share", "x"]), junk)),
)


async def send(messages, dask_scheduler=None):
    """Give messages to the plugin; return what each led to, and what was known before and after."""
    plugin = dask_scheduler.plugins["distmm"]

    def state():
        return plugin.live.newest, sorted(plugin.live), sorted(plugin.gates), len(plugin.replicas)

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
    good = {"describe": {"OK", "failed"}, "free": {"refused"}}
    for (op, _), answer in zip(messages, found, strict=True):
        assert answer in good.get(op, {None})


def test_a_barrier_of_something_malformed_fails(inproc_client):
    """One typed error, also if nothing but the graph is wrong."""
    x = da.from_array(np.ones((20, 20)), chunks=10)
    good = dict(matmul(x, x).dask)
    (key,) = (key for key in good if barrier_name(key))
    for changes in ({"a_dtype": "nonsense"}, {"method": 7, "compute": "x"}, {"a_chunks": ((10, 10), (10, -10))}):
        name = f"matmul-{uuid.uuid4().hex}"
        wire = PROBLEM.to_wire() | {"name": name, "same": False} | changes
        gate = barrier_key(name)
        found = {**good, gate: Task(gate, good[key].func, wire, List(TaskRef((x.name, 0, 0))), List())}
        found[name, 0, 0] = Task((name, 0, 0), len, TaskRef(gate))
        future = inproc_client.get(found, (name, 0, 0), sync=False)
        with pytest.raises(ProtocolError, match="malformed problem"):
            future.result(timeout=30)


def test_a_task_that_is_no_chunk_of_the_result(inproc_client):
    x = da.from_array(np.ones((20, 20)), chunks=10)
    graph = dict(matmul(x, x).dask)
    (gate,) = (key for key in graph if barrier_name(key))
    future = inproc_client.get({**graph, "stranger": Task("stranger", len, TaskRef(gate))}, "stranger", sync=False)
    with pytest.raises(ProtocolError, match="'stranger' depends on .* and is no chunk of its result"):
        future.result(timeout=30)


def test_a_problem_survives_the_wire():
    assert Problem.from_wire(PROBLEM.to_wire()) == PROBLEM
