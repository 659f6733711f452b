"""Each public function with default arguments, on chunks of NumPy and on a stand-in for CuPy that refuses to mix."""

from __future__ import annotations

import importlib.util
import sys

import dask
import dask.array as da
import numpy as np
import pytest
import strict_cupy
from function_calls import CALLS, IDS, check
from matrices import lazy

import dask_distmm
from dask_distmm import linalg
from dask_distmm.arrays import numpy_functions
from dask_distmm.arrays.linalg import routed, tall
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.graph import build


@pytest.fixture
def routing():
    with dask_distmm.enabled(), dask.config.set(scheduler="synchronous"):
        yield


def test_every_public_function_is_called():
    names = {f"linalg.{name}" for name in linalg.__all__} - {"linalg.MatrixError", "linalg.explain"}
    names |= {f"da.linalg.{name}" for name in routed.DASKS}
    for function in numpy_functions._OURS:
        module = function.__module__.replace("numpy", "np").replace("._core.multiarray", "")
        names.add(f"{module}.{function.__name__}")
    assert names - {call.name for call in CALLS} == set()


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_numpy_chunks(routing, call):
    check(call, lazy, "numpy")


def run_on_the_host(problem, inputs):
    """Have a run's chunks in host memory, where the engine is that of CPUs."""
    import dataclasses

    lists = [[task() for task in x.tasks] if isinstance(x, ChunkTasks) else x for x in inputs]
    if all(isinstance(chunk, np.ndarray) for chunks in lists for chunk in chunks):
        return before(problem, inputs)
    kinds = {"array": "numpy"}
    done = before(dataclasses.replace(problem, **kinds), [[strict_cupy._index(chunk) for chunk in x] for x in lists])
    return build.Alone({key: strict_cupy.wrapped(x) for key, x in done.chunks.items()})


before = build._run_alone


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy itself is tested on GPUs")
@pytest.mark.parametrize("call", CALLS, ids=IDS)
@pytest.mark.parametrize("single", [False, True], ids=["chunks", "one-chunk"])
def test_cupy_chunks(routing, monkeypatch, call, single):
    for name, module in strict_cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(build, "_run_alone", run_on_the_host)
    monkeypatch.setattr(tall, "_kernels", lambda chunk: strict_cupy.Kernels(LapackKernels()))

    def on_device(x):
        meta = strict_cupy.ndarray(np.empty((0,) * x.ndim, x.dtype))
        host = da.from_array(x, chunks=-1) if single else lazy(x)
        return host.map_blocks(strict_cupy.ndarray, dtype=x.dtype, meta=meta)

    check(call, on_device, "cupy")
