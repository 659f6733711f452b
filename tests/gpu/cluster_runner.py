"""Runs the conformance suite on a cluster of GPU workers: each chunk is put on the worker that it is meant for."""

from __future__ import annotations

import itertools

import dask.array as da
import numpy as np

import dask_distmm
from dask_distmm.numeric.types import dtype_from_name, typed

_number = itertools.count()


def place(base, offset, shape, strides, dtype, kind, name):
    """Make a chunk inside its guarded array, on this worker; remember the array."""
    from distributed import get_worker

    if kind == "cupy":
        import cupy as xp
    else:
        xp = np
    order = "F" if base.flags.f_contiguous and not base.flags.c_contiguous else "C"
    guarded = xp.empty(base.shape, base.dtype, order=order)
    guarded[...] = xp.asarray(base)
    assert guarded.strides == base.strides
    view = guarded.reshape(-1, order="A")[offset // base.dtype.itemsize :]
    assert view.size == 0 or view.base is not None
    chunk = xp.lib.stride_tricks.as_strided(view, shape, strides)
    keep = get_worker().__dict__.setdefault("_guarded", {})
    keep[name] = guarded
    return chunk


def unchanged(base, name):
    """Whether an array and its guard zones are what they were."""
    from distributed import get_worker

    found = get_worker()._guarded.pop(name)
    found = found.get() if hasattr(found, "get") else found
    return found.tobytes() == base.tobytes()


class ClusterRunner:
    """``runner(problem, nranks, chunks, where)`` for `conformance`."""

    def __init__(self, client, engine=None, kind="cupy"):
        self.client, self.engine, self.kind = client, engine, kind
        self.addresses = sorted(client.nthreads())
        self.plans = []

    def __call__(self, problem, nranks, chunks, where):
        run = f"conformance-{next(_number)}"
        arrays, placed, bases = [], [], []
        for op, sizes, dtype in (("a", problem.a.chunks, problem.a.dtype), ("b", problem.b.chunks, problem.b.dtype)):
            name, graph = f"{run}-{op}", {}
            for index, key in enumerate(itertools.product(range(len(sizes[0])), range(len(sizes[1])))):
                chunk = chunks[op, index]
                base = chunk
                while base.base is not None:
                    base = base.base
                offset = chunk.__array_interface__["data"][0] - base.__array_interface__["data"][0]
                address = self.addresses[where["ab".index(op)][index] % len(self.addresses)]
                label = f"{name}-{index}"
                graph[(name, *key)] = self.client.submit(
                    place,
                    base,
                    offset,
                    chunk.shape,
                    chunk.strides,
                    chunk.dtype,
                    self.kind,
                    label,
                    key=f"{label}-place",
                    workers=[address],
                    allow_other_workers=False,
                    pure=False,
                )
                placed.append(graph[(name, *key)])
                bases.append((base, label, address))
            meta = np.empty((0, 0), dtype_from_name(dtype))
            if self.kind == "cupy":
                import cupy

                meta = cupy.empty((0, 0), dtype_from_name(dtype))
            arrays.append(da.Array(graph, name, sizes, meta=meta))
        d = dask_distmm.matmul(
            *arrays,
            method=problem.method,
            engine=self.engine,
            out_chunks=problem.d.chunks,
            workers=self.addresses[:nranks],
        )
        futures = self.client.compute(list(d.to_delayed().ravel()))
        result = {}
        for index, future in enumerate(futures):
            chunk = future.result(timeout=120)
            assert type(chunk).__module__.split(".")[0] == self.kind, type(chunk)
            result[index] = typed(chunk.get() if self.kind == "cupy" else chunk, problem.d.dtype)
        same = [self.client.submit(unchanged, base, label, workers=[at], pure=False) for base, label, at in bases]
        assert all(self.client.gather(same)), "inputs or the guard zones around them were changed"
        return result
