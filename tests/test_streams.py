"""Streams: what is loaded for a wave waits for its turn, is loaded once a visit, and is kept by nothing else."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef, convert_legacy_graph
from dask.array.optimization import optimize
from dask.core import flatten
from dask.local import get_sync
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.graph.waves import opened, self_contained, stream


def gates(count):
    return [f"gate-{number}" for number in range(count)]


def graph_of(array):
    keys = list(flatten(array.__dask_keys__()))
    return convert_legacy_graph(dict(optimize(array.dask, keys))), keys


def needs(tasks, key):
    """All that a key needs."""
    found, todo = set(), [key]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += tasks[name].dependencies if name in tasks else ()
    return found


def normal(chunks=(5, 6)):
    return da.random.default_rng(1).random((60, 6), chunks=chunks)


def running_sums(x):
    return np.cumsum(x, axis=0)


SOURCES = {
    "random": normal,
    "arrays": lambda: da.from_array(np.arange(360.0).reshape(60, 6), chunks=(5, 6)),
    "map_blocks": lambda: normal().map_blocks(np.sin) + 1,
    "rechunk": lambda: normal((7, 3)).rechunk((5, 6)),
    "overlap": lambda: normal().map_overlap(running_sums, depth=1),
    "mean": lambda: normal() - normal().mean(axis=0),
}


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_values_stay_and_loads_wait(source):
    array = SOURCES[source]()
    upstream, keys = graph_of(array)
    waves = [keys[at : at + 2] for at in range(0, len(keys), 2)]
    made = stream(upstream, waves, [0] * len(waves), gates(len(waves)), "t")
    whole = upstream | made[0] | {gate: Task(gate, opened) for gate in gates(len(waves))}
    values = array.compute(scheduler="sync")
    rows = np.split(values, len(keys))
    for number, wave in enumerate(waves):
        names = [made[1][number][key] for key in wave]
        assert not set(names) & set(keys)
        for key, got in zip(wave, get_sync(whole, names), strict=True):
            np.testing.assert_array_equal(got, rows[keys.index(key)])
        found = set().union(*(needs(whole, name) for name in names))
        waited = {int(gate.split("-")[1]) for gate in found if str(gate).startswith("gate-")}
        # Nothing waits for a wave that comes at the same time or later.
        assert not waited or max(waited) <= number - 2
        assert (number - 2 in waited) == (number >= 2)


def test_what_all_waves_need_is_computed_once_and_nothing_else_is_kept():
    upstream, keys = graph_of(SOURCES["mean"]())
    waves = [[key] for key in keys]
    made = stream(upstream, waves, [0] * len(waves), gates(len(waves)), "t")
    used = set().union(*(task.dependencies for task in made[0].values())) - set(made[0]) - set(gates(len(waves)))
    assert {key[0].split("-")[0] for key in used} == {"mean_agg"}


@given(st.lists(st.integers(0, 2), min_size=3, max_size=12))
def test_a_visit_of_its_own_loads_again(visits):
    visits = sorted(visits)
    upstream, keys = graph_of(SOURCES["random"]())
    made = stream(upstream, [keys[:1]] * len(visits), visits, gates(len(visits)), "t")
    # In one visit it is kept if waves far from one another need it.
    spread = any(visits.count(visit) > 2 for visit in visits)
    names = {name[keys[0]] for name in made[1]}
    assert names == ({keys[0]} if spread else {(f"{keys[0][0]}-t-{visit}", *keys[0][1:]) for visit in visits})


def test_what_is_fixed_is_used_as_it_is():
    upstream = {"x": Task("x", int), "y": Task("y", abs, TaskRef("x"))}
    made = stream(upstream, [["y"], ["y"]], [0, 1], gates(2), "t", lambda task: task.key == "x")
    assert all(task.dependencies == {"x"} for task in made[0].values())
    assert len(made[0]) == 2
    assert not stream(upstream, [["z"]], [0], gates(1), "t")[0]


def test_a_chain_is_one_task_that_makes_a_chunk():
    array = (normal() - 1) * np.linspace(1, 2, 6)
    upstream, keys = graph_of(array)
    made = self_contained(upstream, keys)
    assert list(made) == keys
    expected = get_sync(dict(array.dask), keys)
    for task, chunk in zip(made.values(), expected, strict=True):
        assert not task.dependencies
        np.testing.assert_array_equal(task(), chunk)


def test_chunks_that_share_a_task_are_no_chains():
    upstream = {"x": Task("x", int), "y": Task("y", abs, TaskRef("x")), "z": Task("z", abs, TaskRef("x"))}
    assert self_contained(upstream, ["y"]) is not None
    assert self_contained(upstream, ["y", "z"]) is None
