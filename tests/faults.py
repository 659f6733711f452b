"""Faults on purpose, which the tests of reliability put into a worker's process."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import sys
import time
from typing import Any

import cloudpickle

FAULT_POINTS = {
    "read": ("dask_distmm.runtime.worker", "WorkerService", "_read"),
    "vote": ("dask_distmm.runtime.worker", "WorkerService", "_prepare"),
    "execute": ("dask_distmm.engines.programs.job", "ProgramJob", "execute"),
    "tiles": ("dask_distmm.engines.programs.job", "ProgramJob", "serve"),
    "assemble": ("dask_distmm.engines.programs.job", "ProgramJob", "_store"),
    "replicate": ("dask_distmm.runtime.replicas", "ReplicaStore", "gather"),
    "place": ("dask_distmm.runtime.worker", "WorkerService", "_place"),
    "exchange": ("dask_distmm.comms.nccl", "NcclComm", "exchange"),
    "library": ("dask_distmm.engines.cublasmp", "Group", "multiply"),
    "steps": ("dask_distmm.engines.programs.job", "ProgramJob", "_call"),
    "region": ("dask_distmm.engines.programs.region", "RegionJob", "_arrive"),
    "broadcast": ("dask_distmm.comms.nccl", "NcclComm", "broadcast"),
    "panel": ("dask_distmm.engines.peer.products", "PeerJob", "_multiply"),
    "step": ("dask_distmm.engines.peer.products", "PeerJob", "_begin"),
    "turn": ("dask_distmm.engines.programs.job", "ProgramJob", "_begin_turn"),
    "workspace": ("dask_distmm.engines.cublasmp", "Group", "allocate"),
}


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}


def inject(point: str, action: str, skip: int = 0, seconds: float = 0.0) -> None:
    """Make something go wrong in this process; for ``client.run(inject, ..., workers=[...])``.

    Parameters
    ----------
    point
        Where: a key of `FAULT_POINTS`.
    action
        ``"kill"`` (SIGKILL), ``"exit"`` (the process exits), ``"segfault"``, ``"stop"`` (SIGSTOP: it stands still
        until somebody sends SIGCONT), ``"sleep"``, ``"error"`` (ZeroDivisionError), ``"memory"`` (MemoryError) or
        ``"device memory"`` (CuPy's OutOfMemoryError).
    skip
        How often that place is passed before it happens; it happens once.
    seconds
        How long to sleep.
    """
    module, owner, name = FAULT_POINTS[point]
    kind = getattr(importlib.import_module(module), owner)
    method = getattr(kind, name)
    left = itertools.count(-skip)

    @functools.wraps(method)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(left) == 0:
            setattr(kind, name, method)
            if action in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[action])
            elif action == "exit":
                os._exit(1)
            elif action == "sleep":
                time.sleep(seconds)
            if action in (*_SIGNALS, "sleep"):
                return method(*args, **kwargs)
            if action == "device memory":
                from cupy.cuda.memory import OutOfMemoryError

                raise OutOfMemoryError(0, 0)
            raise {"error": ZeroDivisionError, "memory": MemoryError}[action](f"injected at {point}")
        return method(*args, **kwargs)

    setattr(kind, name, faulty)


def remove_faults() -> None:
    """Take back the faults that `inject` has put into this process, also those that have not happened yet."""
    for module, owner, name in FAULT_POINTS.values():
        if module not in sys.modules:
            continue  # an engine that this machine lacks
        kind = getattr(sys.modules[module], owner)
        method = getattr(kind, name)
        if hasattr(method, "__wrapped__"):
            setattr(kind, name, method.__wrapped__)


# Workers that are started from the command line can't import this module: its functions go there as they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
