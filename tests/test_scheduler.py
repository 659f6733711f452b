"""The scheduler's end of the protocol: malformed, stale and strangers' messages."""

from __future__ import annotations

import uuid
from threading import Event

import dask.array as da
import numpy as np
import pytest
from conformance import make_problem
from dask._task_spec import List, Task, TaskRef
from distributed import wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_distmm import matmul
from dask_distmm.errors import ProtocolError
from dask_distmm.planning import Demand, Problem
from dask_distmm.runtime.keys import barrier_key, barrier_name
from dask_distmm.runtime.messages import NAME, Reply, ask, operation_of
from dask_distmm.runtime.plugin import DistMMSchedulerPlugin

PROBLEM = make_problem(((4, 3), (5,)), ((5,), (6,)), name="matmul-nobody-s")
DEMAND = Demand("auto", "numpy", ("float64",) * 3)

junk = st.one_of(
    st.none(), st.integers(-3, 9), st.floats(), st.text(max_size=5), st.binary(max_size=20), st.lists(st.integers())
)
questions = {"demand": junk | st.just(DEMAND.to_wire()), "names": junk, "counts": junk}
reports = {"worker": junk, "run_id": junk, "share": junk, "received_bytes": junk, "x": junk}
answer_roster = DistMMSchedulerPlugin.answer_roster
free_workspaces, hear_progress = DistMMSchedulerPlugin.free_workspaces, DistMMSchedulerPlugin.hear_progress
asked, free, told = map(operation_of, (answer_roster, free_workspaces, hear_progress))
calls = st.one_of(
    st.tuples(st.just(asked), st.dictionaries(st.sampled_from([*questions, "x"]), junk)),
    st.tuples(st.just(asked), st.fixed_dictionaries(questions)),
    st.tuples(st.just(free), st.fixed_dictionaries({"grace": junk.filter(lambda x: not isinstance(x, int | float))})),
    st.tuples(st.just(told), st.dictionaries(st.sampled_from(sorted(reports)), junk)),
)


async def send(messages, dask_scheduler=None):
    """Give messages to the plugin; return what each led to, and what was known before and after."""
    plugin = dask_scheduler.plugins[NAME]

    def state():
        return plugin.queue.newest, sorted(plugin.queue), sorted(plugin.barriers), len(plugin.replicas)

    before, found = state(), []
    handlers = {**dask_scheduler.handlers, **dask_scheduler.stream_handlers}
    for operation, fields in messages:
        answer = handlers[operation](**fields)
        found.append(None if answer is None else Reply.from_wire({"status": (await answer)["status"]}).status)
    return found, before, state()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls, min_size=1, max_size=12))
def test_any_message(inproc_client, messages):
    """Nothing but a typed refusal, and what is known stays as it is."""
    x = da.ones((20, 20), chunks=10)
    if not inproc_client.run_on_scheduler(lambda dask_scheduler: NAME in dask_scheduler.plugins):
        matmul(x, x).compute()
    found, before, after = inproc_client.run_on_scheduler(send, messages)
    assert before == after
    good = {asked: {"OK", "failed", "refused"}, free: {"refused"}}
    for (operation, _), answer in zip(messages, found, strict=True):
        assert answer in good.get(operation, {None})


def test_the_places_of_more_chunks_than_there_are(inproc_client):
    """No look at each of them: that would keep the scheduler busy for years."""
    x, y = (da.ones((20, 20), chunks=size).persist() for size in (10, 5))
    wait([x, y])
    matmul(x, x).compute()

    def question(*counts, names=(x.name,)):
        return inproc_client.sync(ask, inproc_client.scheduler, answer_roster, "", DEMAND, names, counts)

    several = question([2, 2], [1, 1], [4, 4], names=(x.name, "missing", y.name)).placed
    assert [placed and len(placed) for placed in several] == [4 * 4, None, 4 * 16]

    assert len(question([2, 2]).placed[0]) == 4 * 4
    assert question([5 * 10**15]).placed == (None,)
    assert question([10**15, 0, 10**15]).placed == (b"",)
    for wrong in ([-1], [1.5], ["2", 2]):
        answer = question(wrong)
        assert (answer.status, "malformed message answer_roster: " in answer.message) == ("refused", True)
    assert "its field counts is wrong: -1 is not from 0 to inf" in question([-1]).message


def test_a_barrier_of_something_malformed_fails(inproc_client):
    """One typed error, also if nothing but the graph is wrong."""
    x = da.from_array(np.ones((20, 20)), chunks=10)
    good = dict(matmul(x, x).dask)
    (key,) = (key for key in good if barrier_name(key))
    a, b = PROBLEM.to_wire()["matrices"]
    wrong = [
        {"matrices": ({**a, **change}, b)} for change in ({"dtype": "nonsense"}, {"chunks": ((10, 10), (10, -10))})
    ]
    for changes in (*wrong, {"method": 7, "compute": "x"}):
        name = f"matmul-{uuid.uuid4().hex}"
        wire = PROBLEM.to_wire() | {"name": name, "same": False} | changes
        barrier = barrier_key(name)
        found = {**good, barrier: Task(barrier, good[key].func, wire, List(TaskRef((x.name, 0, 0))), List())}
        found[name, 0, 0] = Task((name, 0, 0), len, TaskRef(barrier))
        future = inproc_client.get(found, (name, 0, 0), sync=False)
        with pytest.raises(ProtocolError, match="malformed problem"):
            future.result(timeout=120)


BEGUN, GO_ON = Event(), Event()


def held(block):
    BEGUN.set()
    assert GO_ON.wait(120)
    return block


def test_a_task_that_is_no_chunk_of_the_result(inproc_client):
    """It gets all that one worker makes, but for a run that has begun."""
    x = da.from_array(np.ones((20, 20)), chunks=10)
    for lazy in (x, x.map_blocks(held, meta=x._meta)):
        graph = dict(matmul(lazy, lazy).dask)
        (barrier,) = (key for key in graph if barrier_name(key))
        run = (
            []
            if lazy is x
            else [
                inproc_client.get(graph, key, sync=False)
                for key in graph
                if isinstance(key, tuple) and key[0] in barrier
            ]
        )
        assert not run or BEGUN.wait(120)
        name = f"stranger-{lazy.name}"
        future = inproc_client.get({**graph, name: Task(name, len, TaskRef(barrier))}, name, sync=False)
        if not run:
            assert future.result(timeout=120) == 4
            continue
        GO_ON.set()
        with pytest.raises(ProtocolError, match="'stranger-.*' depends on .* and is not a chunk of its result"):
            future.result(timeout=120)


def test_a_problem_survives_the_wire():
    assert Problem.from_wire(PROBLEM.to_wire()) == PROBLEM
