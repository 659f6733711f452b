"""Many runs one after the other, some of them failing: what is left of them in memory, files, threads and processes.

    python -m benchmarks.soak [--runs 2000] [--failures 20] [--json FILE]
    python -m benchmarks.soak --gpus 4 --runs 300 [--engine peer]

Every process of the cluster is looked at at every tenth of the way. Warm-up (the first fifth) is not counted: pools
of connections, threads and memory reach their sizes there. Dask's logs, which hold graphs with their data, are bounded
to 20 entries. Exits with 1 if a process has more open files, threads or children afterwards than after warm-up, or its
memory, that of its GPU or CuPy's pool there has grown by more than `GROWTH`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
from dask.utils import key_split
from distributed import Client, LocalCluster
from distributed.scheduler import DEFAULT_EXTENSIONS

from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm import RunFailedError, free_workspaces, matmul
from dask_distmm.typing import Method
from tests.conformance import assert_product
from tests.faults import inject, remove_faults
from tests.leaks import assert_nothing_left
from tests.matrices import assert_large_product

GROWTH = 16 * 2**20
# Dask's own logs and profiles grow for hours before they reach their bounds; what is looked for is ours.
_BOUNDED = {
    "distributed.admin.low-level-log-length": 20,
    "distributed.admin.log-length": 20,
    "distributed.worker.profile.enabled": False,
}
_UNITS = {"bytes": 2**20, "device": 2**20, "pool": 2**20, "files": 1, "threads": 1}
_NAMES = {"bytes": "MiB", "device": "MiB of the GPU", "pool": "MiB of the pool"}
# How runs are made to fail: in turn at a fault point of `tests.faults`, with an action of it.
_FAULTS = {
    "numpy": (("vote", "memory"), ("execute", "error")),
    "peer": (("vote", "memory"), ("panel", "error")),
    "cublasmp": (("vote", "memory"), ("workspace", "device memory")),
}
# Extents of the products; on GPUs several ranks are to be worth it, without the latency that they are told of.
_SMALL, _LARGE = (96, 112, 80), (768, 640, 512)
_NO_LATENCY = {"distmm.machine.peer.latency": 0, "distmm.machine.cublasmp.latency": 0}
_METHODS: tuple[Method, ...] = ("auto", "summa", "allgather", "reducescatter", "allreduce")


def resources() -> dict[str, int]:
    """Return what this process holds: resident bytes, open files, threads, child processes; bytes of its GPU."""
    # Dask's memory of the last 100,000 keys: about 11 KiB a run until it is full.
    key_split.cache_clear()
    gc.collect()
    process = psutil.Process()
    found = {
        "bytes": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }
    if cupy := sys.modules.get("cupy"):
        free, total = cupy.cuda.runtime.memGetInfo()
        found |= {"device": total - free, "pool": cupy.get_default_memory_pool().total_bytes()}
    return found


def everywhere(client: Client) -> dict[str, dict[str, int]]:
    """Return `resources` of the scheduler (this process) and of all workers."""
    return {"scheduler": client.run_on_scheduler(resources), **client.run(resources)}


def soak(
    client: Client,
    runs: int,
    failures: int,
    engine: str = "numpy",
    tell: Callable[[dict[str, Any]], None] = lambda look: None,
) -> dict[str, Any]:
    """Run; return the resources of each process at every tenth of the way.

    Parameters
    ----------
    client
        Of a cluster that nobody else uses.
    runs
        How many multiplies, each of new random operands and checked.
    failures
        How many of them are made to fail on one rank.
    engine
        What multiplies; operands lie on GPUs unless it is numpy.
    tell
        Gets the resources at once, too.
    """
    rng, gpus = np.random.default_rng(), engine != "numpy"
    (m, n, k), check = (_LARGE, assert_large_product) if gpus else (_SMALL, assert_product)

    def lazy(x: np.ndarray[Any, Any], chunks: int) -> da.Array:
        found = da.from_array(x, chunks=chunks)
        return found.to_backend("cupy") if gpus else found

    workers = sorted(client.nthreads())
    failing = {int(x) for x in np.linspace(runs / 5, runs - 1, failures)}
    looks, failed = [], 0
    started = time.monotonic()
    for number, method in zip(range(runs), itertools.cycle(_METHODS), strict=False):
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
        d = matmul(lazy(a, m // 3), lazy(b, k // 2), method=method)
        d = d.to_backend("numpy") if gpus else d
        if number in failing:
            victim = [workers[failed % len(workers)]]
            fault = _FAULTS[engine][failed % 2]
            if fault[0] == "workspace":
                # It is allocated where none is kept.
                free_workspaces()
            client.run(inject, *fault, workers=victim)
            future = client.compute(d)
            try:
                future.result(timeout=60)
            except RunFailedError:
                failed += 1
            # With Dask the traceback of a future's error holds the future, and that the graph with its data.
            future.release()
            # It has not happened where that worker had no part in the run.
            client.run(remove_faults)
        else:
            check(a, b, client.compute(d).result(timeout=60))
        if (number + 1) % max(1, runs // 10) == 0:
            del d
            assert_nothing_left(client)
            looks.append({"runs": number + 1, "seconds": time.monotonic() - started, "held": everywhere(client)})
            tell(looks[-1])
    return {"runs": runs, "failed": failed, "looks": looks}


def grown(looks: list[dict[str, Any]]) -> list[str]:
    """Return what any process holds more of at the end than after the warm-up."""
    first, last = looks[1]["held"], looks[-1]["held"]
    allowed = {"bytes": GROWTH, "device": GROWTH, "pool": GROWTH}
    return [
        f"{where}: {kind} from {first[where][kind]} to {last[where][kind]}"
        for where in first
        for kind in first[where]
        if last[where][kind] > first[where][kind] + allowed.get(kind, 0)
    ]


class NoSpans:
    """In place of Dask's extension of the scheduler."""

    def __init__(self, scheduler: Any) -> None:
        pass

    def observe_tasks(self, *arguments: Any, **options: Any) -> dict[Any, Any]:
        """Annotate no task."""
        return {}

    def heartbeat(self, worker: Any, data: Any) -> None:
        """Forget what a worker tells."""


def start(workers: int, gpus: int) -> Any:
    """Start a cluster of CPU workers, or of one for each of so many GPUs.

    Without Dask's spans: of each compute the scheduler keeps one for ever, and the workers their times by span. With
    them stock Dask grows too, by some 40 KiB a compute on the scheduler and 20 KiB on each worker.
    """
    kept = {"scheduler_kwargs": {"extensions": DEFAULT_EXTENSIONS | {"spans": NoSpans}}}
    if not gpus:
        return LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0", **kept)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(n_workers=gpus, protocol="tcp", dashboard_address=None, **kept)


def tell(look: dict[str, Any]) -> None:
    """Print what all processes hold."""
    held = look["held"].values()
    told = ", ".join(
        " ".join(str(one[kind] // unit) for one in held if kind in one) + f" {_NAMES.get(kind, kind)}"
        for kind, unit in _UNITS.items()
        if any(kind in one for one in held)
    )
    print(f"{look['runs']:6d} runs {look['seconds']:7.1f} s: {told}", flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=0, help="on so many GPUs, a worker on each")
    parser.add_argument("--engine", choices=["peer", "cublasmp"], default="peer", help="of GPUs")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    engine = arguments.engine if arguments.gpus else "numpy"
    with (
        dask.config.set(_BOUNDED | _NO_LATENCY | {"distmm.engine": engine}),
        start(arguments.workers, arguments.gpus) as cluster,
        Client(cluster) as client,
    ):
        found = soak(client, arguments.runs, arguments.failures, engine, tell)
    more = grown(found["looks"])
    print(f"{found['failed']} runs failed as they were meant to; " + ("; ".join(more) or "nothing has grown"))
    if arguments.json:
        with open(arguments.json, "w") as file:
            told = {"hardware": environment.hardware(), "revision": revision()}
            told["software"] = environment.software("dask_distmm", "dask", "distributed", "numpy")
            json.dump({**told, **found}, file, indent=1)
    return 1 if more else 0


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")
    sys.exit(main())
