"""Faults on purpose, which the tests of reliability put into a worker's process."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle

# Modules, classes or none where it is a function of the module, and names.
FAULT_POINTS = {
    # A request for a vote is being read; its chunks have been.
    "read": ("dask_distmm.runtime.worker", "", "plan_from_wire"),
    "vote": ("dask_distmm.runtime.worker", "", "check_chunks"),
    "execute": ("dask_distmm.engines.programs.job", "ProgramJob", "execute"),
    "tiles": ("dask_distmm.engines.programs.job", "ProgramJob", "serve"),
    "assemble": ("dask_distmm.engines.programs.job", "ProgramJob", "_store"),
    "replicate": ("dask_distmm.runtime.replicas", "ReplicaStore", "gather"),
    # Results go into the worker's memory.
    "place": ("dask_distmm.runtime.direct", "", "keep"),
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


def inject(point: str, action: str, skip: int = 0, seconds: float = 0.0, release: str = "") -> None:
    """Make something go wrong in this process; for ``client.run(inject, ..., workers=[...])``.

    Parameters
    ----------
    point
        Where: a key of `FAULT_POINTS`.
    action
        ``"kill"`` (SIGKILL), ``"exit"`` (the process exits), ``"segfault"``, ``"stop"`` (SIGSTOP: it stands still
        until somebody sends SIGCONT), ``"sleep"``, ``"hold"`` (until there is a file of the name `release`; that it
        stands there says a file with the process' number behind that name), ``"error"`` (ZeroDivisionError),
        ``"memory"`` (MemoryError) or ``"device memory"`` (CuPy's OutOfMemoryError).
    skip
        How often that place is passed before it happens; it happens once.
    seconds
        How long to sleep.
    release
        The file that ends a hold.
    """
    module, owner, name = FAULT_POINTS[point]
    kind: Any = importlib.import_module(module)
    kind = getattr(kind, owner) if owner else kind
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
            elif action == "hold":
                _hold(Path(release))
            if action in (*_SIGNALS, "sleep", "hold"):
                return method(*args, **kwargs)
            if action == "device memory":
                from cupy.cuda.memory import OutOfMemoryError

                raise OutOfMemoryError(0, 0)
            raise {"error": ZeroDivisionError, "memory": MemoryError}[action](f"injected at {point}")
        return method(*args, **kwargs)

    setattr(kind, name, faulty)


def _hold(release: Path) -> None:
    release.with_name(f"{release.name}.{os.getpid()}").touch()
    while not release.exists():
        time.sleep(0.005)


def held_processes(release: Path) -> set[int]:
    """Return the numbers of the processes that stand, or have stood, at a hold."""
    return {int(path.suffix[1:]) for path in release.parent.glob(f"{release.name}.*")}


def remove_faults() -> None:
    """Take back the faults that `inject` has put into this process, also those that have not happened yet."""
    for module, owner, name in FAULT_POINTS.values():
        if module not in sys.modules:
            continue  # an engine that this machine lacks
        kind: Any = sys.modules[module]
        kind = getattr(kind, owner) if owner else kind
        method = getattr(kind, name)
        if hasattr(method, "__wrapped__"):
            setattr(kind, name, method.__wrapped__)


# Workers that are started from the command line can't import this module: its functions go there as they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
