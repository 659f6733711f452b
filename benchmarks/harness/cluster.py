"""Stock Dask and dask_distmm, and how a product on the cluster that they share is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

from benchmarks.harness.environment import blas_pools
from benchmarks.harness.protocol import Case, Contender, Sample, sample_rows, scaled_error
from dask_distmm import Plan, PlanError, explain, matmul

MEMORY_METHOD = (
    "Per worker process. baseline_bytes: resident set (VmRSS) before the inputs exist. inputs_bytes: bytes "
    "of the chunks of A and B that the worker holds. before_bytes: VmRSS with the inputs in memory, read "
    "just after the peak counter was reset (clear_refs 5). peak_bytes: VmHWM after the product is done. "
    "growth_bytes = peak_bytes - before_bytes: what the product added, the output included. "
    "total_bytes = peak_bytes - baseline_bytes: growth over an empty worker, inputs included. "
    "projected_bytes: what the engine said beforehand, where it says so; "
    "ratio = total_bytes / projected_bytes."
)


def resident(name: str) -> int:
    """Return a field of this process's memory status in bytes; runs on the workers."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def reset_peak() -> int:
    """Set this process's peak to its resident bytes now, and return them; runs on the workers."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def result_bytes(dask_worker: Any) -> int:
    """Return the bytes of the results that a worker holds; runs on the workers."""
    return sum(getattr(value, "nbytes", 0) for value in dask_worker.data.values())


def synchronize() -> None:
    """Wait for the GPU's kernels; runs on the workers."""
    import cupy

    cupy.cuda.Device().synchronize()


@contextlib.contextmanager
def started(*, gpu: bool, workers: int = 2, protocol: str = "ucx", **options: Any) -> Iterator[Client]:
    """Yield the client of new workers of one thread each, of one GPU each if there are to be any."""
    options = {"n_workers": workers, "dashboard_address": None, **options}
    if gpu:
        from dask_cuda import LocalCUDACluster

        made = LocalCUDACluster(protocol=protocol, **options)
    else:
        made = LocalCluster(threads_per_worker=1, **options)
    with made as cluster, Client(cluster) as client:
        yield client


class Session:
    """A cluster that is there already."""

    def __init__(self, client: Client, timeout: float = 600.0, array: str = "numpy", here: bool = False) -> None:
        self._client, self.timeout, self.array, self.here = client, timeout, array, here
        found = client.nthreads().values()
        self.workers, self.threads = len(found), max(found, default=0)

    @property
    def client(self) -> Client:
        """The client of the cluster."""
        return self._client

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the worker processes for a while: idle ones still take several percent of a core each."""
        if not self.here or self._client is None:
            yield
            return
        pids = list(self._client.run(os.getpid).values())
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def synchronize(self) -> None:
        """Wait until the results are in memory: tasks on GPUs end before their kernels do."""
        if self.array == "cupy":
            self.client.run(synchronize)

    def wait_until_empty(self, seconds: float = 10.0) -> None:
        """Wait until the workers have dropped their results, so that no run sees another's memory."""
        deadline = time.monotonic() + seconds
        while any(self.client.run(result_bytes).values()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Leave the cluster running: others have started it."""


class ClusterPeer(Contender):
    """A way to multiply Dask arrays on a cluster; a subclass says which in `multiply`."""

    def __init__(self, session: Session, grids: Sequence[int]) -> None:
        self.session = session
        self._grids = list(grids)
        self.pools: list[dict[str, Any]] = []

    def grids(self) -> list[int | None]:
        """Return the chunk grids that were asked for."""
        return [*self._grids]

    def multiply(self, a: da.Array, b: da.Array) -> da.Array:
        """Return the lazy product."""
        raise NotImplementedError

    def projection(self, a: da.Array, b: da.Array) -> tuple[dict[str, int], dict[str, Any]]:
        """Return the bytes projected per worker address, and other details; empty if there is none."""
        return {}, {}

    def describe(self) -> dict[str, Any]:
        """Return the shape of the cluster and how memory is measured."""
        return {
            "workers": self.session.workers,
            "threads_per_worker": self.session.threads,
            "blas_of_a_worker": self.pools,
            "memory_method": MEMORY_METHOD,
        }

    def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
        """Persist fresh inputs, then time the product from its persist until all of it is in memory."""
        try:
            sample = self._measure(case, seed)
            if warmup:
                self.pools = next(iter(self.session.client.run(blas_pools).values()))
        except BaseException:
            # Tasks that still run or hang there would disturb the next engine, which gets a fresh cluster.
            self.session.close()
            raise
        return sample

    def _measure(self, case: Case, seed: int) -> Sample:
        """Take one sample on the cluster."""
        client = self.session.client
        baseline = self._read("VmRSS")
        a, b = (self._input(case, [seed, which]) for which in (0, 1))
        a, b = client.persist([a, b])
        wait([a, b], timeout=self.session.timeout)
        self.session.synchronize()
        projected, details = self.projection(a, b)
        inputs = client.run(result_bytes)
        before = self._reset()
        start = time.perf_counter()
        product = self.multiply(a, b)
        built = time.perf_counter()
        product = client.persist(product)
        wait(product, timeout=self.session.timeout)
        self.session.synchronize()
        done = time.perf_counter()
        peak = self._read("VmHWM")
        details["build_seconds"] = built - start
        if baseline and before and peak:
            details["memory"] = {
                f"worker-{index}": memory_of(
                    baseline[address], inputs[address], before[address], peak[address], projected.get(address)
                )
                for index, address in enumerate(sorted(peak))
            }
        error = self._error(a, b, product, seed)
        del product, a, b
        self.session.wait_until_empty()
        return Sample(done - built, error, details)

    def _input(self, case: Case, seed: list[int]) -> da.Array:
        """Return a lazy random matrix in square chunks, of zero mean."""
        side = -(-case.size // (case.grid or 1))
        generator = da.random.default_rng(np.random.default_rng(seed).integers(2**63))
        shape = (case.size, case.size)
        dtype = np.dtype(case.dtype)
        matrix: da.Array = generator.random(shape, dtype=dtype, chunks=(side, side)) - dtype.type(0.5)
        return matrix if self.session.array == "numpy" else matrix.to_backend(self.session.array)

    def _read(self, name: str) -> dict[str, int]:
        """Return a memory field of every worker; nothing where the system does not tell."""
        try:
            return dict(self.session.client.run(resident, name))
        except (OSError, LookupError):
            return {}

    def _reset(self) -> dict[str, int]:
        """Reset the peak on every worker and return the resident bytes; nothing where that is not allowed."""
        try:
            return dict(self.session.client.run(reset_peak))
        except OSError:
            return {}

    def _error(self, a: da.Array, b: da.Array, product: da.Array, seed: int) -> float:
        """Return the scaled error of some rows against NumPy, a strip of columns at a time."""
        rows = sample_rows(a.shape[0], seed)
        if self.session.array != "numpy":
            a, b, product = (x.to_backend("numpy") for x in (a, b, product))
        a_rows, c_rows = self.session.client.compute([a[rows], product[rows]], sync=True)
        errors = []
        begin = 0
        for width in b.chunks[1]:
            strip = slice(begin, begin + width)
            errors.append(scaled_error(a_rows, b[:, strip].compute(), c_rows[:, strip]))
            begin += width
        return float(np.max(errors))


class DaskMatmul(ClusterPeer):
    """``A @ B`` with dask_distmm not enabled."""

    name = "dask"

    def multiply(self, a: da.Array, b: da.Array) -> da.Array:
        """Return Dask's own lazy product."""
        product: da.Array = a @ b
        # A plugin that someone's configuration enables would otherwise be compared with itself.
        if any("distmm" in str(layer) for layer in product.dask.layers):
            raise RuntimeError("dask_distmm has taken over A @ B: this would not measure stock Dask")
        return product


class Distmm(ClusterPeer):
    """``dask_distmm.matmul(A, B)``."""

    name = "distmm"

    def multiply(self, a: da.Array, b: da.Array) -> da.Array:
        """Return the lazy product."""
        product: da.Array = matmul(a, b)
        return product

    def projection(self, a: da.Array, b: da.Array) -> tuple[dict[str, int], dict[str, Any]]:
        """Return the plan's projected bytes per worker address, and its choices."""
        plan = explain(a, b)
        if not isinstance(plan, Plan):
            raise PlanError(f"no collective run would take place: {plan!r}")
        return dict(plan.projected_bytes), {"method": plan.method}


def memory_of(baseline: int, inputs: int, before: int, peak: int, projected: int | None) -> dict[str, Any]:
    """Return one worker's memory as `MEMORY_METHOD` describes it."""
    total = peak - baseline
    return {
        "baseline_bytes": baseline,
        "inputs_bytes": inputs,
        "before_bytes": before,
        "peak_bytes": peak,
        "growth_bytes": peak - before,
        "total_bytes": total,
        "projected_bytes": projected,
        "ratio": total / projected if projected else None,
    }
