"""The hardware and the versions on which a figure depends beside the code measured. Knows no engine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import threadpoolctl


def blas_pools() -> list[dict[str, Any]]:
    """Return this process's BLAS libraries, without the folders that they lie in."""
    pools = []
    for pool in threadpoolctl.threadpool_info():
        kept = {key: value for key, value in pool.items() if key != "filepath"}
        pools.append({**kept, "file": Path(pool["filepath"]).name})
    return pools


def _field(path: str, name: str) -> str | None:
    """Return the first value of a ``name: value`` line in a file of /proc, None if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, None)


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> list[float] | None:
    """Return the load averages of 1, 5 and 15 minutes; None where the system has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def hardware() -> dict[str, Any]:
    """Return the hardware of the machine; never its name."""
    total = _field("/proc/meminfo", "MemTotal")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores_usable": usable_cores(),
        "cores_total": os.cpu_count(),
        "memory_bytes": int(total.split()[0]) * 1024 if total else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def software(*distributions: str) -> dict[str, str | None]:
    """Return the versions of Python and of some distributions, None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
