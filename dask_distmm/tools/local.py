"""A cluster of worker processes on this machine for one command, or the cluster at an address."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask.array as da
import psutil
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, as_completed, futures_of
from distributed.system import MEMORY_LIMIT

from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.planning import ENGINES
from dask_distmm.tools.facts import attempt, gpus

# Dask's own default for a chunk is 128 MiB, which is 4096 x 4096 float64.
MOST_ROWS = 4096
# How long to look for a scheduler.
CONNECT_SECONDS = 10


def use_gpus() -> bool:
    """Whether a cluster here is one of GPUs: there are some, Dask can use them, and so can an engine of ours."""
    on_gpus = any(engine.on_gpus for engine in ENGINES.values())
    return on_gpus and importlib.util.find_spec("dask_cuda") is not None and gpu_count() > 0


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs; 0 where that can't be asked."""
    return len(attempt(gpus).get("devices", ()))


def default_workers() -> int:
    """Return how many workers to start if the user does not say."""
    return gpu_count() if use_gpus() else max(2, CPU_COUNT)


def available_memory() -> int:
    """Return the bytes that are free, within the limit of a container."""
    return min(int(psutil.virtual_memory().available), int(MEMORY_LIMIT))


def chunk_rows(length: int, workers: int) -> int:
    """Return the length of chunks for an axis: some for each worker, but none above Dask's own default."""
    count = max(4, math.isqrt(4 * workers - 1) + 1)
    return min(-(-length // count), MOST_ROWS)


def computed(array: da.Array) -> da.Array:
    """Compute an array on the cluster; return it once all of it is in the cluster's memory."""
    array = array.persist()
    for future in as_completed(futures_of(array)):
        if future.status != "finished":
            future.result()  # raises the task's error
    return array


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C in a with block: who presses it again while all is put away would keep half of it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C in a terminal does not reach: they inherit what is blocked."""
    # Started later, within a worker's start, it would unblock SIGINT again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_cluster(workers: int, folder: Path) -> Any:
    """Start a cluster of worker processes on this machine: one thread each, or one GPU each."""
    options = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": "127.0.0.1:0",
        # Errors that matter arrive as exceptions; the rest is the noise of workers that are stopped.
        "silence_logs": logging.CRITICAL,
        "local_directory": str(folder),
    }
    if use_gpus():
        return importlib.import_module("dask_cuda").LocalCUDACluster(**options)
    return LocalCluster(processes=True, host="127.0.0.1", **options)


@contextlib.contextmanager
def running_cluster(workers: int, name: str) -> Iterator[tuple[Client, Path]]:
    """Give a client of a new cluster and a new folder, named after a command; stop and remove both afterwards."""
    stack = contextlib.ExitStack()
    try:
        temporary = tempfile.TemporaryDirectory(prefix=f"dask-distmm-{name}-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        with _without_interrupts():
            cluster = stack.enter_context(make_cluster(workers, folder / "workers"))
        client = stack.enter_context(Client(cluster))
        client.wait_for_workers(workers, timeout=60)
        yield client, folder
    finally:
        with undisturbed():
            stack.close()


@contextlib.contextmanager
def connected(scheduler: str | None, workers: int | None, name: str) -> Iterator[Client]:
    """Give a client of the cluster at an address, or of a new one on this machine."""
    if scheduler is None:
        # The scheduler is in this process, and tells of every worker that is stopped.
        logging.getLogger("dask_distmm").setLevel(logging.ERROR)
        with running_cluster(workers or default_workers(), name) as (client, _):
            yield client
        return
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except ValueError as error:
        raise PlanError(f"--scheduler {scheduler} is not an address; expected, for example, tcp://host:8786") from error
    except OSError as error:
        reason = str(error).splitlines()[0]
        message = f"no Dask scheduler answers at {scheduler} ({reason}): is it running, is it reachable?"
        raise DistMMError(message) from error
    with client:
        yield client
