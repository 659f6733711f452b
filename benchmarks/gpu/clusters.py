"""Peers on a Dask cluster with one worker a GPU: this plugin and stock Dask, on the same inputs and chunks."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from typing import Any

import numpy as np

from benchmarks.gpu.cases import SLABS, Case, Chunks, chunks

# Most elements that are made at once, and columns of B that the check takes at once.
_PIECE, _STRIP = 2**27, 2048
_EMPTY_SECONDS = 20.0

Array = np.ndarray[Any, np.dtype[np.float64]]


# What runs on the workers


def make_chunk(shape: tuple[int, int], dtype: str, seed: int) -> Any:
    """Return a standard normal matrix on this worker's GPU, made in pieces of whole rows."""
    import cupy

    cupy.random.seed(seed)
    found = cupy.empty(shape, as_dtype(dtype))
    step = max(1, _PIECE // max(1, shape[1]))
    made = dtype if dtype in ("float32", "float64") else "float32"
    for start in range(0, shape[0], step):
        size = (min(step, shape[0] - start), shape[1])
        found[start : start + step] = cupy.random.standard_normal(size, dtype=made).astype(found.dtype)
    return found


def make_block(dtype: str, seed: int, block_info: Any = None) -> Any:
    """Return one block of a matrix, for `map_blocks`."""
    rows, cols = block_info[None]["chunk-location"]
    return make_chunk(block_info[None]["chunk-shape"], dtype, (seed + 65537 * rows + cols) % 2**31)


def used_bytes() -> int:
    """Return how much of this worker's GPU is taken, by anybody."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def free_pools() -> None:
    """Give back what CuPy keeps for later."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def keys_held(dask_worker: Any) -> int:
    """Return how many results a worker holds."""
    return len(dask_worker.data)


def take(wanted: Sequence[tuple[Any, list[int]]], axis: int, dask_worker: Any) -> dict[Any, Array]:
    """Return rows (or with axis 1 columns, as rows) of chunks that this worker holds, in float64 on the host."""
    found = {}
    for key, places in wanted:
        if places and key in dask_worker.data:
            chunk = dask_worker.data[key]
            lines = [chunk[i : i + 1] if axis == 0 else chunk[:, i : i + 1].T for i in places]
            found[key] = np.concatenate([_wide(line).get() for line in lines])
    return found


def project(wanted: Sequence[tuple[Any, int, int]], left: Array, dask_worker: Any) -> dict[Any, tuple[Array, Array]]:
    """Return ``left @ B`` and ``|left| @ |B|`` for chunks of B that this worker holds, each with its part of k."""
    import cupy

    found = {}
    on_device = cupy.asarray(left)
    for key, begin, end in wanted:
        if key in dask_worker.data:
            chunk, part = dask_worker.data[key], on_device[:, begin:end]
            sums = []
            for at in range(0, chunk.shape[1], _STRIP):
                strip = _wide(chunk[:, at : at + _STRIP])
                sums.append(((part @ strip).get(), (abs(part) @ abs(strip)).get()))
            found[key] = tuple(np.concatenate(which, axis=1) for which in zip(*sums, strict=True))
    return found


def _wide(x: Any) -> Any:
    """Return an array in float64; from 16-bit floats by way of float32."""
    return (x.astype(np.float32) if x.dtype.itemsize == 2 else x).astype(np.float64)


def as_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


# What runs beside the scheduler


class Cluster:
    """The member of a team that has the cluster."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        import cupy
        import dask
        from dask_cuda import LocalCUDACluster
        from distributed import Client

        # A worker that hangs is this benchmark's to report.
        dask.config.set({"distributed.comm.timeouts.connect": "30s", "distributed.scheduler.worker-ttl": None})
        self.gpus = options["gpus"]
        more = {}
        if options["rmm_pool_size"]:
            more = {"rmm_pool_size": options["rmm_pool_size"], "rmm_allocator_external_lib_list": "cupy"}
        self.cluster = LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=options["devices"],
            protocol=options["protocol"],
            dashboard_address=None,
            silence_logs=logging.ERROR,
            **more,
        )
        self.client = Client(self.cluster)
        self.client.wait_for_workers(self.gpus, timeout=60)
        self.addresses = sorted(self.client.scheduler_info(n_workers=-1)["workers"])
        self.first: float | None = None
        self.info = {
            "workers": len(self.addresses),
            "protocol": options["protocol"],
            "rmm_pool_size": options["rmm_pool_size"],
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        }

    def measure(self, case: Case) -> dict[str, Any]:
        """Time fresh products of fresh inputs, each from its persist until all of it is in memory."""
        self.client.run(free_pools)
        before = self.client.run(used_bytes)
        answer: dict[str, Any] = {"seconds": [], "build_seconds": [], "run_seconds": [], "timings": {}}
        errors, last = [], 0.0
        for turn in range(case.repeat + 1):
            began = time.time()
            if answer["seconds"] and began + 1.5 * last > case.deadline:
                break
            once = self._once(case, check=turn in (0, case.repeat), explain=turn == 0)
            last = time.time() - began
            errors += [once["error"]] if "error" in once else []
            if turn == 0:
                if case.peer == "distmm" and self.first is None:
                    self.first = answer["first_seconds"] = once["build_seconds"] + once["seconds"]
                answer |= once["plan"] | {"warmup_seconds": once["seconds"]}
                continue
            for name in ("seconds", "build_seconds", "run_seconds"):
                if name in once:
                    answer[name].append(once[name])
            for name, value in once.get("timings", {}).items():
                answer["timings"].setdefault(name, []).append(value)
        after = self.client.run(used_bytes)
        answer |= {
            "error": max(errors),
            "used_bytes_before": max(before.values()),
            "used_bytes_after": max(after.values()),
            "used_bytes_growth": max(after[address] - before[address] for address in before),
        }
        if not answer["error"] <= 1:
            answer["failure"] = f"wrong result: {answer['error']:.3g} times the rounding error that is possible"
            answer["error"] = str(answer["error"])
        return answer

    def _once(self, case: Case, *, check: bool, explain: bool) -> dict[str, Any]:
        """Multiply once."""
        from distributed import wait

        left = max(5.0, case.deadline - time.time()) if case.deadline != float("inf") else None
        sources = self._inputs(case)
        wait(list(sources), timeout=left)
        _raise_errors(sources)
        a, b = (sources[0].T, sources[0]) if case.shape.gram else sources
        multiply = self._engine().matmul if case.peer == "distmm" else _stock
        start = time.perf_counter()
        d = multiply(a, b)
        built = time.perf_counter()
        d = d.persist()
        wait(d, timeout=left)
        done = time.perf_counter()
        _raise_errors([d])
        once: dict[str, Any] = {"seconds": done - built, "build_seconds": built - start, "plan": {}}
        if case.peer == "distmm":
            once |= self._logged(d.name)
            if explain:
                plan = self._engine().explain(a, b)
                once["plan"] = {name: once.pop(name, None) for name in ("method", "grid", "engine")}
                once["plan"]["projected_bytes"] = max(map(int, plan.projected_bytes.values())) if plan else None
        if check:
            once["error"] = self._error(case, sources, d)
        del a, b, d, sources
        self._wait_until_empty()
        return once

    def _engine(self) -> Any:
        import dask_distmm

        return dask_distmm

    def _logged(self, name: str) -> dict[str, Any]:
        """Return what the scheduler's log says of a multiply."""
        events = [event for _, event in self.client.get_events("distmm") if event.get("name") == name]
        found: dict[str, Any] = {}
        for event in events:
            if event["action"] == "start":
                found |= {"method": event["method"], "grid": list(event["grid"]), "engine": event["engine"]}
            elif event["action"] == "done":
                found |= {"run_seconds": event["seconds"], "timings": dict(event["timings"])}
        return found

    # Inputs

    def _inputs(self, case: Case) -> list[Any]:
        """Return fresh persisted matrices: A and B, or X alone for a Gram product."""
        import cupy
        import dask.array as da

        cuts = chunks(case, self.gpus)[: 1 if case.shape.gram else 2]
        dtype = as_dtype(case.dtype)
        meta = cupy.empty((0, 0), dtype)
        if case.variant == SLABS:
            return [self._placed(cut, case.dtype, meta) for cut in cuts]
        seeds = [secrets.randbits(30) for _ in cuts]
        lazy = [
            da.map_blocks(make_block, case.dtype, seed, chunks=cut, dtype=dtype, meta=meta)
            for cut, seed in zip(cuts, seeds, strict=True)
        ]
        return list(self.client.persist(lazy))

    def _placed(self, cuts: Chunks, dtype: str, meta: Any) -> Any:
        """Return a matrix with one chunk on each worker."""
        import dask.array as da

        name, graph = f"slabs-{secrets.token_hex(8)}", {}
        for number, (i, j) in enumerate(product(*(range(len(cut)) for cut in cuts))):
            # Under the array's own keys, as in a persisted one.
            graph[name, i, j] = self.client.submit(
                make_chunk,
                (cuts[0][i], cuts[1][j]),
                dtype,
                secrets.randbits(31),
                key=(name, i, j),
                workers=[self.addresses[number % len(self.addresses)]],
            )
        return da.Array(graph, name, cuts, meta=meta)

    # The check: where the chunks lie, as 16-bit ones lose their type when Dask moves them

    def _error(self, case: Case, sources: Sequence[Any], d: Any) -> float:
        """Return the largest error in some rows over what rounding can do (16 eps sum |a| |b|, half an ulp)."""
        shape = case.shape
        count = 2 if shape.gram else 4
        rows = sorted(secrets.randbelow(shape.m) for _ in range(count))
        left = self._lines(sources[0], rows, axis=1 if shape.gram else 0)
        found = self._lines(d, rows, axis=0)
        expected, magnitude = np.zeros((count, shape.n)), np.zeros((count, shape.n))
        b = sources[-1]
        ks, ns = _edges(b)
        wanted = [((b.name, i, j), ks[i], ks[i + 1]) for i, j in _blocks(b)]
        for (_, _, j), (sums, absolute) in _together(self.client.run(project, wanted, left)).items():
            expected[:, ns[j] : ns[j + 1]] += sums
            magnitude[:, ns[j] : ns[j + 1]] += absolute
        eps = np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps
        bound = 16 * eps * magnitude
        if case.dtype in ("bfloat16", "float16"):
            bound = bound + 0.5 * (2.0**-7 if case.dtype == "bfloat16" else 2.0**-10) * abs(expected)
        return float(np.max(abs(found - expected) / bound))

    def _lines(self, x: Any, places: Sequence[int], axis: int) -> Array:
        """Return rows (or columns, as rows) of a persisted matrix in float64."""
        edges = _edges(x)
        wanted = []
        for key in _blocks(x):
            begin, end = edges[axis][key[axis]], edges[axis][key[axis] + 1]
            wanted.append(((x.name, *key), [place - begin for place in places if begin <= place < end]))
        result = np.full((len(places), x.shape[1 - axis]), np.nan)
        for (_, *key), part in _together(self.client.run(take, wanted, axis)).items():
            begin, end = edges[axis][key[axis]], edges[axis][key[axis] + 1]
            across = edges[1 - axis]
            at = [number for number, place in enumerate(places) if begin <= place < end]
            result[at, across[key[1 - axis]] : across[key[1 - axis] + 1]] = part
        return result

    # Between measurements

    def _wait_until_empty(self, seconds: float = _EMPTY_SECONDS) -> bool:
        """Wait until the workers have dropped their results, so that no run sees another's memory."""
        deadline = time.monotonic() + seconds
        while any(self.client.run(keys_held).values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def healthy(self) -> bool:
        """Whether all workers are there and empty again after a failure."""
        try:
            present = sorted(self.client.scheduler_info(n_workers=-1)["workers"])
            return present == self.addresses and self._wait_until_empty()
        except Exception:
            return False

    def close(self) -> None:
        """Stop the cluster."""
        self.client.close()
        self.cluster.close()


def _stock(a: Any, b: Any) -> Any:
    return a @ b


def _raise_errors(arrays: Iterable[Any]) -> None:
    """Raise the error of the first task that failed."""
    from distributed.client import futures_of

    for array in arrays:
        for future in futures_of(array):
            if future.status != "finished":
                future.result(timeout=5)
                raise RuntimeError(f"a task is {future.status}")


def _edges(x: Any) -> list[list[int]]:
    """Return where the chunks of a matrix begin and end along both axes."""
    return [list(accumulate(sizes, initial=0)) for sizes in x.chunks]


def _blocks(x: Any) -> Iterable[tuple[int, int]]:
    return product(*(range(count) for count in x.numblocks))


def _together(answers: dict[str, dict[Any, Any]]) -> dict[Any, Any]:
    """Return what the workers said, by chunk; the same chunk on two workers counts once."""
    return {key: value for found in answers.values() for key, value in found.items()}
