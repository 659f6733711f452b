"""Chunks that ranks make themselves: each once, few ahead, none kept; and the tasks that make them, on their way."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from conformance import make_problem
from dask._task_spec import Task
from hypothesis import given
from hypothesis import strategies as st

import dask_distmm.runtime.chunks
from dask_distmm.engines.sources import ChunkLoader, Source, SourceChunk
from dask_distmm.graph import can_be_made
from dask_distmm.planning import Worker, plan
from dask_distmm.runtime.chunks import pack_tasks, unpack_tasks
from dask_distmm.runtime.freezing import _at_once


def never():
    """Nobody ends the run."""


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 4))
def test_each_is_made_once_in_order_and_few_ahead(uses, threads, ahead):
    made, taken, lock = [], set(), threading.Lock()

    def source(number):
        def make():
            with lock:
                made.append(number)
                assert len(set(made) - taken) <= ahead
            return np.full((1, 1), number)

        return Source(make)

    chunks = [SourceChunk(source(number), lambda x: x.T) for number in range(6)]
    loads = ChunkLoader([chunks[number] for number in uses], threads, ahead)
    for number in uses:
        # Taken from now on: the next one may be made as soon as this one is here.
        with lock:
            taken.add(number)
        assert loads.take(chunks[number], never) == number
    loads.close()
    assert sorted(made) == sorted(set(uses))
    if threads == 1:
        assert made == list(dict.fromkeys(uses))
    assert not loads._made


def test_an_error_comes_where_the_chunk_is_used_and_the_rest_is_not_made():
    made = []

    def make(number):
        made.append(number)
        if number == 1:
            raise OSError("it is torn")
        return np.zeros((1, 1))

    chunks = [SourceChunk(Source(lambda number=number: make(number)), lambda x: x) for number in range(9)]
    loads = ChunkLoader(chunks, 1, 2)
    loads.take(chunks[0], never)
    with pytest.raises(OSError, match="torn"):
        loads.take(chunks[1], never)
    loads.close()
    assert max(made) <= 3


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_call_that_fails_is_made_again(failures):
    """As often as it may be, and not once nobody wants the chunk any more."""
    calls = []

    def make():
        calls.append(len(calls))
        if len(calls) <= failures:
            raise OSError("it is torn")
        return np.ones((1, 1))

    chunk = SourceChunk(Source(make, retries=2), lambda x: x)
    loads = ChunkLoader([chunk], 1, 1)
    if failures <= 2:
        assert loads.take(chunk, never) == 1
    else:
        with pytest.raises(OSError, match="torn"):
            loads.take(chunk, never)
    loads.close()
    assert len(calls) == min(failures, 2) + 1
    calls.clear()
    if failures:
        with pytest.raises(OSError, match="torn"):
            chunk.source.make()
        assert len(calls) == 1


def test_as_many_at_once_as_resources_allow(monkeypatch):
    """Tasks meet in pairs: fewer at once would wait for ever."""
    pairs, active, most, lock = threading.Barrier(2, timeout=120), [], [], threading.Lock()

    def task(number):
        with lock:
            active.append(number)
            most.append(len(active))
        pairs.wait()
        with lock:
            active.remove(number)
        pairs.wait()
        return np.full((4, 4), number)

    tasks = [functools.partial(task, number) for number in range(4)]
    ws = SimpleNamespace(address="w", resources={"R": 5.0, "S": 9.0})
    at_once = _at_once(SimpleNamespace(annotations={"resources": {"R": 2, "S": 3, "T": 0}}), [ws])
    assert at_once == {"w": 2}
    assert _at_once(SimpleNamespace(annotations=None), [ws]) == {}
    made = plan(make_problem(((4,) * 4, (4,)), ((4,), (4,)), by_ranks=(True, False)), [Worker("w")])
    # As `pack_tasks` gives them, but that a lock can't be pickled.
    monkeypatch.setattr(
        dask_distmm.runtime.chunks, "loads", lambda packed: (0, at_once["w"], {"a": (list(range(4)), tasks)})
    )
    chunks = unpack_tasks(made, b"packed", None)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda chunk: chunk.source.make(), chunks.values()))
    assert max(most) == 2


def test_arrays_that_ranks_can_make(tmp_path):
    stored = da.from_zarr(zarr.create_array(str(tmp_path / "x.zarr"), data=np.ones((60, 6)), chunks=(5, 6)))
    generated = da.random.default_rng(1).random((60, 6), chunks=(5, 6))
    row = np.linspace(1, 2, 6)
    for array in (stored, generated, stored.map_blocks(np.sin) + 1, generated * row, (stored - 1) * row):
        assert can_be_made(array)
    here = da.from_array(np.ones((60_000, 6)), chunks=(20_000, 6))
    split = generated.rechunk((5, 3))
    for array in (stored - stored.mean(axis=0), generated.rechunk((7, 6)), split, here, stored[::-1] + stored):
        assert not can_be_made(array)
    # Only Dask's tasks can do what annotations ask for.
    for annotation in ({"retries": 2}, {"resources": {"GPU": 1}}, {"workers": ["w"]}, {"priority": 1}):
        with dask.annotate(**annotation):
            annotated = stored.map_blocks(np.sin)
        assert not can_be_made(annotated + 1)


@pytest.mark.parametrize("gram", [True, False])
def test_a_chunk_of_both_operands_is_made_once_where_both_use_it_together(gram):
    sizes = (4, 4), (4, 4)
    names = {"arrays": ("x", "x"), "transposed": (True, False)} if gram else {}
    problem = make_problem(*(sizes,) * 2, by_ranks=(True, True), **names)
    made = plan(problem, [Worker("w")])
    tasks = [Task(("x", number), np.full, (4, 4), float(number)) for number in range(4)]
    of_a = [tasks[0], tasks[2], tasks[1], tasks[3]] if gram else tasks
    chunks = unpack_tasks(made, pack_tasks(made, {"a": of_a, "b": tasks})["w"], None)
    assert len({chunk.source for chunk in chunks.values()}) == (4 if gram else 8)
