"""A cluster of worker processes on this machine, for one command: as many as fit, and always stopped again."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster
from distributed.system import MEMORY_LIMIT

from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.planning import ENGINES

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
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no such module, no driver, no permission: NVML has an error class for each
        return 0
    try:
        return int(nvml.nvmlDeviceGetCount())
    finally:
        nvml.nvmlShutdown()


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


class CtrlC:
    """Has Ctrl-C raise, as Python does, but neither among complaints nor where it is lost."""

    def __init__(self) -> None:
        self.raised = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise; end all logging first, since other threads complain before anybody can catch it."""
        self.raised += 1
        logging.disable(logging.CRITICAL)
        raise KeyboardInterrupt

    def report(self, lost: sys.UnraisableHookArgs) -> None:
        """Take an error that was raised in a finalizer or in a callback of the collector; Python goes on after it."""
        if isinstance(lost.exc_value, KeyboardInterrupt):
            # Later: in here it would be lost again.
            threading.Thread(target=self._insist, args=(self.raised,), daemon=True).start()
        else:
            sys.__unraisablehook__(lost)

    def _insist(self, lost: int) -> None:
        """Send signals until one has raised: one that comes just before a wait begins does not end it."""
        main = threading.main_thread().ident
        assert main is not None
        time.sleep(0.01)
        while self.raised == lost and signal.getsignal(signal.SIGINT) == self.handle:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.01)


CTRL_C = CtrlC()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block: a cluster that is half started or half closed can't be cleaned up.

    After the first one all others are ignored: it ends the program, and that takes a second.
    """
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.default_int_handler, CTRL_C.handle):  # ignored, or somebody else's
        yield
        return
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if noted else before)
    if noted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_blocked_for_children() -> Iterator[None]:
    """Start processes that Ctrl-C in a terminal, which goes to all of them, does not reach.

    Threads and processes inherit the set of blocked signals from the thread that starts them.
    """
    # Started later, within a worker's start, it would unblock SIGINT again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def quiet_failure() -> Iterator[None]:
    """Have an error or Ctrl-C end the program without the complaints of work that is cut short.

    Dask, Zarr and asyncio have such, some as late as at the program's end. The error itself is on its way to the user
    already.
    """
    hook, ours = sys.unraisablehook, signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:  # neither ignored nor somebody else's
        signal.signal(signal.SIGINT, CTRL_C.handle)
        sys.unraisablehook = CTRL_C.report
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ours = False
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")  # coroutines that are never awaited
        raise
    finally:
        sys.unraisablehook = hook
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


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
        with quiet_failure():
            with interrupts_deferred():
                temporary = tempfile.TemporaryDirectory(prefix=f"dask-distmm-{name}-", ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(temporary))
                with interrupts_blocked_for_children():
                    cluster = stack.enter_context(make_cluster(workers, folder / "workers"))
                client = stack.enter_context(Client(cluster))
                client.wait_for_workers(workers, timeout=60)
            yield client, folder
    finally:
        with interrupts_deferred():
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
    with quiet_failure():
        try:
            client = Client(scheduler, timeout=CONNECT_SECONDS)
        except ValueError as error:
            raise PlanError(f"--scheduler {scheduler} is no address; expected one as tcp://host:8786") from error
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise DistMMError(
                f"no Dask scheduler answers at {scheduler} ({reason}): is it running, is it reachable?"
            ) from error
        with client:
            yield client
