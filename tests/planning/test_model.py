"""The roofline by which all work is estimated, and the form in which planning's values cross the network."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from conformance import make_problem

from dask_distmm import ProtocolError
from dask_distmm.config import Machine
from dask_distmm.planning import Demand, Plan, Worker, plan
from dask_distmm.planning.model import Phase, Work, estimate
from dask_distmm.planning.problem import Problem

MACHINE = Machine((("other", 1.0),), bandwidth=10.0, memory_bandwidth=100.0, latency=0.5, network_bandwidth=5.0)


def seconds(*phases, hosts=(), **more):
    found = estimate(Work(phases, **more), MACHINE, "local", (1, 1, 1), hosts=hosts)
    return found.seconds, found.compute_seconds, found.transfer_seconds


def test_the_roofline():
    """What is pulled is hidden but for a share; what is waited for is not; the slowest rank decides each phase."""
    assert seconds(Phase(flops=6.0, rate=2.0, touched=100.0)) == (4.0, 4.0, 0.0)
    assert seconds(Phase(flops=6.0, rate=2.0, least=5.0)) == (5.0, 5.0, 0.0)
    assert seconds(Phase(flops=6.0, rate=2.0, pulled={"ranks": 20.0})) == (3.0, 3.0, 0.0)
    assert seconds(Phase(flops=6.0, rate=2.0, pulled={"ranks": 50.0}, exposed=0.1)) == (5.5, 3.0, 2.5)
    assert seconds(Phase(waited={"ranks": 10.0, "memory": 100.0, "messages": 2})) == (3.0, 0.0, 3.0)
    ranks = Phase(flops=np.array([4.0, 1.0]), waited={"ranks": np.array([0.0, 50.0])})
    assert seconds(ranks) == (6.0, 1.0, 5.0)
    assert seconds(Phase(flops=np.array([4.0, 1.0])), Phase(waited={"ranks": np.array([0.0, 50.0])})) == (9.0, 4.0, 5.0)
    # Between hosts, over Dask's own connections, which have no figure of their own here; messages and what Dask takes.
    assert seconds(Phase(waited={"ranks": 10.0, "dask": 10.0}), hosts={"x", "y"}) == (4.0, 0.0, 4.0)
    assert seconds(Phase(flops=1.0), messages=4, seconds=7.0) == (10.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", 7),
        ("nthreads", 1.5),
        ("nthreads", "1"),
        ("reach", "gpu"),
        ("reach", (1,)),
        ("device", None),
        ("secret", 1),
    ],
)
def test_fields_of_another_type_are_refused(field, value):
    worker = Worker("tcp://x", 2, reach=("gpu",))
    assert Worker.from_wire(worker.to_wire() | {"nthreads": np.int64(2), "reach": ["gpu"]}) == worker
    with pytest.raises(ProtocolError, match="malformed worker: "):
        Worker.from_wire(worker.to_wire() | {field: value})


def test_one_of_several_types():
    for workers in (None, 3, ("a", "b")):
        demand = Demand("auto", "numpy", ("float64",) * 3, workers)
        assert Demand.from_wire(demand.to_wire()) == demand
    for bad in ({"workers": 1.5}, {"workers": (1,)}, {"dtypes": ("float64",)}, {"plaintext_nccl": 1}):
        with pytest.raises(ProtocolError, match="malformed demand: "):
            Demand.from_wire(demand.to_wire() | bad)
    for wire in (None, [], {}):
        with pytest.raises(ProtocolError, match="malformed demand: "):
            Demand.from_wire(wire)


@pytest.mark.parametrize("bad", ["", "{", "[]", "null", "[" * 10**5, '{"retries": 1}', "1e", 7, None, b"{}", {}, []])
def test_options_are_a_text_that_is_checked(bad):
    problem = make_problem(((4,), (5,)), ((5,), (6,)))
    again = dataclasses.replace(problem, options=dataclasses.replace(problem.options, grace_timeout=1 / 3))
    wire = again.to_wire()
    assert Problem.from_wire(wire) == again != problem
    changed = json.loads(wire["options"])
    for text in (bad, json.dumps(changed | {"retries": "1"}), json.dumps(changed | {"secret": 1})):
        for _ in range(2):
            with pytest.raises(ProtocolError, match="malformed problem: its field options is wrong"):
                Problem.from_wire(wire | {"options": text})
    assert Problem.from_wire(wire) == again


def test_participants_are_a_text_that_is_checked():
    chosen = plan(make_problem(((4, 3), (5,)), ((5,), (6,))), [Worker(f"w{i}", 2, 2**30) for i in range(3)])
    wire = chosen.to_wire()
    assert Plan.from_wire(wire).participants == chosen.participants
    # What is the same each time is read once.
    assert Plan.from_wire(wire).participants is Plan.from_wire(chosen.to_wire()).participants
    for bad in ("[]", "[{}]", wire["participants"][:-1], [], json.dumps([{"address": 1}])):
        with pytest.raises(ProtocolError, match="malformed plan"):
            Plan.from_wire(wire | {"participants": bad})
