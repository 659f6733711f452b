"""Streams: what is loaded for a wave waits for its turn, is loaded once a visit, and is kept by nothing else."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import List, Task, TaskRef, convert_legacy_graph
from dask.array.optimization import optimize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.local import get_sync
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.graph import TasksLayer, self_contained, streams
from dask_distmm.runtime.keys import RunTask, barrier_key, held_back, wave_name


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


def keys_of(array):
    return list(flatten(array.__dask_keys__()))


def streamed(array, waves, visits=None):
    """The tasks of waves of some chunks each, with their barriers; and the chunks' keys for each wave."""
    visits = visits or [0] * len(waves)
    by_visit = {visit: [w for w, own in zip(waves, visits, strict=True) if own == visit] for visit in visits}
    loads, names = streams(array.dask, by_visit, "t")
    found = [
        [(names.get((array.name, visit), array.name), *at) for _, *at in keys]
        for keys, visit in zip(waves, visits, strict=True)
    ]
    graph = HighLevelGraph(array.dask.layers | loads.layers, array.dask.dependencies | loads.dependencies)
    tasks = convert_legacy_graph(dict(optimize(graph, [key for keys in found for key in keys])))
    for number, keys in enumerate(found):
        key = barrier_key(wave_name("p", number))
        tasks[key] = RunTask(key, list, List(*map(TaskRef, keys)))
    return tasks, found


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_values_stay_and_loads_wait(source):
    array = SOURCES[source]()
    keys = keys_of(array)
    waves = [keys[at : at + 2] for at in range(0, len(keys), 2)]
    tasks, found = streamed(array, waves)
    rows = np.split(array.compute(scheduler="sync"), len(keys))
    held = held_back(tasks)
    for number, (wave, names) in enumerate(zip(waves, found, strict=True)):
        assert not set(names) & set(keys)
        for key, got in zip(wave, get_sync(tasks, names), strict=True):
            np.testing.assert_array_equal(got, rows[keys.index(key)])
        waited = {held[key] for key in set().union(*(needs(tasks, name) for name in names)) & held.keys()}
        # Nothing waits for a wave that comes at the same time or later.
        allowed = [barrier_key(wave_name("p", before)) for before in range(number - 1)]
        assert waited <= set(allowed)
        assert not allowed or allowed[-1] in waited


def test_what_all_waves_need_is_computed_once_and_nothing_else_is_kept():
    array = SOURCES["mean"]()
    tasks, found = streamed(array, [[key] for key in keys_of(array)])
    chunks = [needs(tasks, name) & tasks.keys() for (name,) in found]
    both = {
        key for key in chunks[0] & chunks[-1] if key in set().union(*(tasks[name].dependencies for (name,) in found))
    }
    assert {key[0].split("-")[0] for key in both} == {"mean_agg"}
    # What the mean is made of waits for nothing.
    assert not needs(tasks, next(iter(both))) & held_back(tasks).keys()


@given(st.lists(st.integers(0, 2), min_size=3, max_size=12))
def test_a_visit_of_its_own_loads_again(visits):
    visits = sorted(visits)
    array = SOURCES["random"]()
    keys = keys_of(array)
    names = {name[0] for name in streamed(array, [keys[:1]] * len(visits), visits)[1]}
    # In one visit it is kept if waves far from one another need it.
    kept = {visit for visit in visits if visits.count(visit) > 2}
    assert names == {keys[0] if visit in kept else (f"{array.name}-t-{visit}", *keys[0][1:]) for visit in visits}


def test_what_is_fixed_is_used_as_it_is():
    """Layers of ours, objects that are not arrays, and futures."""
    ours = TasksLayer({("x", 0): Task(("x", 0), int)})
    source = HighLevelGraph({"x": ours, "s": {"s": object()}}, {"x": set(), "s": set()})
    layer = {("y", 0): Task(("y", 0), max, TaskRef(("x", 0)), TaskRef("s"))}
    graph = HighLevelGraph(source.layers | {"y": layer}, source.dependencies | {"y": {"x", "s"}})
    loads, names = streams(graph, {0: [[("y", 0)]], 1: [[("y", 0)]]}, "t")
    assert names == {("y", 0): "y-t-0", ("y", 1): "y-t-1"}
    for layer in loads.layers.values():
        assert all(task.dependencies == {("x", 0), "s"} for task in layer.values())
    assert not streams(graph, {0: [[("x", 0)]]}, "t")[1]
    for future in (("z", 0), "other"):
        graph = HighLevelGraph({"z": {("z", 0): TaskRef(future)}}, {"z": set()})
        assert not streams(graph, {0: [[("z", 0)]]}, "t")[1]


def test_what_others_need_is_not_held_back():
    def barrier(series, number, *keys):
        key = barrier_key(wave_name(series, number))
        return {key: RunTask(key, list, List(*map(TaskRef, keys)))}

    graph = {name: Task(name, int) for name in ("a0", "a1", "a2", "a3", "a4", "b2", "c0")}
    graph["a4+"] = Task("a4+", abs, TaskRef("a4"))
    for number in range(4):
        graph |= barrier("p", number, f"a{number}", "c0")
    graph |= barrier("p", 4, "a4+")
    first = [barrier_key(wave_name("p", number)) for number in range(3)]
    assert held_back(graph) == {"a2": first[0], "a3": first[1], "a4": first[2]}
    # A task of the user's needs one, and a wave of another product one.
    graph["mean"] = Task("mean", abs, TaskRef("a4+"))
    graph |= barrier("q", 0, "b2") | barrier("q", 1, "a3") | barrier("q", 2, "b2")
    last = [barrier_key(wave_name(series, number)) for series, number in (("p", 3), ("p", 4), ("q", 2))]
    assert held_back(graph) == {"a2": first[0]} | dict(
        zip(last, (first[1], first[2], barrier_key(wave_name("q", 0))), strict=True)
    )


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
