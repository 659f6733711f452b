"""Each public function with default arguments, on chunks of NumPy and on a stand-in for CuPy that refuses to mix."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import types

import dask
import dask.array as da
import numpy as np
import pytest
import strict_cupy
from function_calls import CALLS, IDS, NARROW, check, given, in_narrow
from matrices import lazy

import dask_distmm
from dask_distmm import graph, linalg
from dask_distmm.arrays import dispatch
from dask_distmm.arrays.linalg import routed
from dask_distmm.engines.sources import ChunkTasks


@pytest.fixture
def routing():
    with dask_distmm.enabled(), dask.config.set(scheduler="synchronous"):
        yield


def test_every_public_function_is_called():
    functions = {name for name in linalg.__all__ if not isinstance(getattr(linalg, name), type)} - {"explain"}
    names = {f"linalg.{name}" for name in functions}
    names |= {f"da.linalg.{name}" for name in routed.DASKS}
    for function in dispatch._OURS:
        module = function.__module__.replace("numpy", "np").replace("._core.multiarray", "")
        names.add(f"{module}.{function.__name__}")
    assert names - {call.name for call in CALLS} == set()


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_numpy_chunks(routing, call):
    check(call, lazy, "numpy")


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", NARROW)
def test_numpy_chunks_of_other_types(routing, dtype):
    for call in in_narrow(dtype):
        check(call, lazy, "numpy", dtype=dtype)


def on_device(x, chunked):
    return chunked(x).map_blocks(
        strict_cupy.ndarray, dtype=x.dtype, meta=strict_cupy.ndarray(np.empty((0,) * x.ndim, x.dtype))
    )


CHUNKINGS = lazy, functools.partial(da.from_array, chunks=-1)
without_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="with CuPy itself tests/gpu does this"
)


@without_cupy
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_chunks_that_refuse_to_mix(routing, on_the_host, call):
    for chunked in CHUNKINGS:
        check(call, lambda x, chunked=chunked: on_device(x, chunked), "cupy")


@pytest.mark.cases(2)
@without_cupy
@pytest.mark.parametrize("dtype", NARROW)
def test_chunks_of_other_types_that_refuse_to_mix(routing, on_the_host, dtype):
    for call in in_narrow(dtype):
        check(call, lambda x: on_device(x, lazy), "cupy", dtype=dtype)


@without_cupy
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_chunks_that_are_not_of_numpy_are_not_cut_by_p2p(routing, on_the_host, call):
    """It fails on CuPy's, and Dask takes it for many small chunks."""

    def device(x):
        return on_device(x, lambda x: da.from_array(x, chunks=tuple(max(1, size // 4) for size in x.shape)))

    with dask.config.set({"array.rechunk.method": "p2p"}):
        results = call.ours(types.SimpleNamespace(**{name: device(x) for name, x in given().items()}))
        for x in results if isinstance(results, tuple | list) else [results]:
            names = x.dask.layers if isinstance(x, da.Array) else ()
            assert not any("p2p" in name for name in names)


@pytest.fixture
def on_the_host(monkeypatch):
    """The stand-in for CuPy, whose arrays runs and kernels take and return by way of the engine for CPUs."""
    run_alone = graph._run_alone

    def run(problem, inputs):
        chunks = [[task() for task in x.tasks] if isinstance(x, ChunkTasks) else x for x in inputs]
        if problem.array == "numpy":
            return run_alone(problem, chunks)
        done = run_alone(dataclasses.replace(problem, array="numpy"), [strict_cupy.on_host(x) for x in chunks])
        return {key: strict_cupy.wrapped(x) for key, x in done.items()}

    for name, module in strict_cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(graph, "_run_alone", run)
