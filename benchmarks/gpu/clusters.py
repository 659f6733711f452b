"""Peers on a Dask cluster with one worker a GPU: this plugin and stock Dask, on the same inputs and chunks."""

from __future__ import annotations

import logging
import secrets
import time
import warnings
from collections.abc import Iterable
from itertools import product
from typing import Any

from benchmarks.gpu.cases import ENGINES, SLABS, Case, Chunks, chunks
from benchmarks.gpu.matrices import (
    as_dtype,
    free_pools,
    keys_held,
    make_block,
    make_chunk,
    row_error,
    synchronize,
    used_bytes,
)
from benchmarks.gpu.team import describe

_EMPTY_SECONDS, _STOCK_ERROR = 20.0, 1e4


class TaskError(Exception):
    """A task failed."""


class Cluster:
    """The member of a team that has the cluster."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        import cupy
        import dask
        from dask.array import PerformanceWarning
        from dask_cuda import LocalCUDACluster
        from distributed import Client

        warnings.simplefilter("ignore", PerformanceWarning)

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
            silence_logs=logging.CRITICAL,
            **more,
        )
        self.client = Client(self.cluster)
        self.client.wait_for_workers(self.gpus, timeout=60)
        self.addresses = sorted(self.client.nthreads())
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
            once = self._once(case, check=turn in (0, case.repeat), first=turn == 0)
            last = time.time() - began
            errors += [once["error"]] if "error" in once else []
            if turn == 0:
                if case.peer in ENGINES and self.first is None:
                    self.first = answer["first_seconds"] = once["build_seconds"] + once["seconds"]
                after = once["used_bytes"]
                answer |= once["plan"] | {"warmup_seconds": once["seconds"]}
                answer |= {
                    "used_bytes_before": max(before.values()),
                    "used_bytes_after": max(after.values()),
                    "used_bytes_growth": max(after[address] - before[address] for address in before),
                }
                continue
            for name in ("seconds", "build_seconds", "run_seconds"):
                if name in once:
                    answer[name].append(once[name])
            for name, value in once.get("timings", {}).items():
                answer["timings"].setdefault(name, []).append(value)
        answer["error"] = max(errors)
        # Stock Dask rounds each product before it adds them up, so its sums of 16-bit ones are less exact.
        if not answer["error"] <= (1 if case.peer in ENGINES else _STOCK_ERROR):
            answer["failure"] = f"wrong result: {answer['error']:.3g} times the rounding error that is possible"
            answer["error"] = str(answer["error"])
        return answer

    def _once(self, case: Case, *, check: bool, first: bool) -> dict[str, Any]:
        """Multiply once."""
        from distributed import wait

        left = max(5.0, case.deadline - time.time()) if case.deadline != float("inf") else None
        sources = self._inputs(case)
        wait(list(sources), timeout=left)
        _raise_errors(sources)
        a, b = (sources[0].T, sources[0]) if case.shape.gram else sources
        options: dict[str, Any] = {}
        if case.peer in ENGINES:
            used = self.addresses[: case.workers] if case.workers else None
            options = {"engine": ENGINES[case.peer], "method": case.method, "workers": used}
        multiply = self._engine().matmul if case.peer in ENGINES else _stock
        start = time.perf_counter()
        d = multiply(a, b, **options)
        built = time.perf_counter()
        d = d.persist()
        wait(d, timeout=left)
        if case.peer == "dask":
            self.client.run(synchronize)  # distmm's tasks end when their GPUs have
        done = time.perf_counter()
        _raise_errors([d])
        once: dict[str, Any] = {"seconds": done - built, "build_seconds": built - start, "plan": {}}
        if first:
            once["used_bytes"] = self.client.run(used_bytes)  # before the check takes some
        if case.peer in ENGINES:
            once |= self._logged(d.name)
            if first:
                plan = self._engine().explain(a, b, **options)
                once["plan"] = {name: once.pop(name, None) for name in ("method", "grid", "engine")}
                once["plan"]["projected_bytes"] = max(map(int, plan.projected_bytes.values())) if plan else None
        if check:
            gram = case.shape.gram
            once["error"] = row_error(
                self.client, sources[0], sources[-1], d, case.dtype, transposed=gram, count=2 if gram else 4
            )
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
            return [self._placed(cut, case, meta) for cut in cuts]
        seeds = [secrets.randbits(30) for _ in cuts]
        lazy = [
            da.map_blocks(make_block, case.dtype, seed, chunks=cut, dtype=dtype, meta=meta)
            for cut, seed in zip(cuts, seeds, strict=True)
        ]
        return list(self.client.persist(lazy, workers=self.addresses[: case.workers or None]))

    def _placed(self, cuts: Chunks, case: Case, meta: Any) -> Any:
        """Return a matrix with one chunk on each worker."""
        import dask.array as da

        name, graph = f"slabs-{secrets.token_hex(8)}", {}
        for number, (i, j) in enumerate(product(*(range(len(cut)) for cut in cuts))):
            # Under the array's own keys, as in a persisted one.
            graph[name, i, j] = self.client.submit(
                make_chunk,
                (cuts[0][i], cuts[1][j]),
                case.dtype,
                secrets.randbits(31),
                key=(name, i, j),
                workers=[self.addresses[number % (case.workers or len(self.addresses))]],
            )
        return da.Array(graph, name, cuts, meta=meta)

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
            present = sorted(self.client.nthreads())
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
            if future.status == "error":
                # Not raised itself: the future would keep its traceback, that this frame, and that the arrays.
                raise TaskError(describe(future.exception(timeout=5)))
            if future.status != "finished":
                raise TaskError(f"a task is {future.status}")
