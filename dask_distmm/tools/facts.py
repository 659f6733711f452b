"""Facts that one process knows of its machine and its libraries, as plain types. Crashes nowhere, changes nothing.

Imports nothing but the standard library at the top: the whole module is sent by value to workers that may lack this
package. Each library is asked in a function of its own, so that a broken one takes no other answer with it.
No CUDA context is made: GPUs are asked by NVML, versions by functions that need no device.

``python -m dask_distmm.tools.facts`` prints the facts of a fresh process: a library that ends the process
when it is loaded then takes no more than that process with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

# Libraries by their name here, in the order in which they are shown: the name that is shown, and the distributions, of
# which the first that is installed counts.
LIBRARIES = {
    "dask_distmm": ("dask_distmm", "dask_distmm"),
    "python": ("Python",),
    "cublasmp": ("cuBLASMp", "nvidia-cublasmp-cu13", "nvidia-cublasmp-cu12"),
    "nccl": ("NCCL", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nvmath": ("nvmath-python", "nvmath-python"),
    "cupy": ("CuPy", "cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "dask_cuda": ("dask-cuda", "dask-cuda"),
    "ucxx": ("UCX (distributed-ucxx)", "distributed-ucxx-cu13", "distributed-ucxx-cu12", "distributed-ucxx"),
    "rmm": ("RMM", "rmm-cu13", "rmm-cu12", "rmm"),
    "numpy": ("NumPy", "numpy"),
    "zarr": ("Zarr", "zarr"),
    "dask": ("dask", "dask"),
    "distributed": ("distributed", "distributed"),
    "nccl4py": ("nccl4py", "nccl4py"),
}
# Of these counts the code that is imported: a path may have another version before the one that is installed.
_IMPORTED = ("dask_distmm", "numpy", "dask", "distributed")


def attempt(question: Callable[[], Any]) -> Any:
    """Return an answer, or ``{"error": ...}``: libraries that are missing or broken raise whatever they like."""
    try:
        return question()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def installed(*names: str) -> tuple[str, str] | tuple[None, None]:
    """Return the first of some distributions that is installed, and its version."""
    for name in names:
        with contextlib.suppress(Exception):  # not installed, or without metadata that can be read
            return name, importlib.metadata.version(name)
    return None, None


def versions() -> dict[str, str | None]:
    """Return the version of each library by its name here, None where it is missing."""
    installed_versions = {name: installed(*distributions)[1] for name, (_, *distributions) in LIBRARIES.items()}
    for name in _IMPORTED:
        with contextlib.suppress(Exception):  # missing or broken
            installed_versions[name] = str(importlib.import_module(name).__version__)
    return installed_versions | {"python": platform.python_version()}


def folder() -> str:
    """Return the folder that this package is imported from, empty where it is missing."""
    with contextlib.suppress(Exception):
        return os.path.dirname(str(importlib.import_module("dask_distmm").__file__))
    return ""


def cuda_major() -> int | None:
    """Return the CUDA version that the installed CuPy was made for, None if there is none or it doesn't say."""
    return {"cupy-cuda13x": 13, "cupy-cuda12x": 12}.get(installed(*LIBRARIES["cupy"][1:])[0] or "")


def engine_versions() -> dict[str, Any]:
    """Return for each engine of this package its libraries' versions, or why it can't run here."""
    base = importlib.import_module("dask_distmm.engines.base")
    planning = importlib.import_module("dask_distmm.planning")

    def ask(name: str) -> dict[str, str]:
        return dict(base.get_engine(name).versions())

    return {name: attempt(functools.partial(ask, name)) for name in planning.ENGINES}


def gpus() -> dict[str, Any]:
    """Return the GPUs, the driver, the pairs without peer access; asked of NVML, which makes no context."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()

        def name(text: Any) -> str:
            return text.decode() if isinstance(text, bytes) else str(text)

        def reaches(gpu: Any, peer: Any) -> bool:
            status = nvml.nvmlDeviceGetP2PStatus(gpu, peer, nvml.NVML_P2P_CAPS_INDEX_READ)
            return bool(status == nvml.NVML_P2P_STATUS_OK)

        pairs = list(itertools.combinations(range(len(handles)), 2))
        both = [(handles[i], handles[j]) for i, j in pairs]
        apart = attempt(
            lambda: [[*at] for at, (x, y) in zip(pairs, both, strict=True) if not (reaches(x, y) and reaches(y, x))]
        )
        return {
            "driver": name(nvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "devices": [
                {
                    "name": name(nvml.nvmlDeviceGetName(handle)),
                    "uuid": name(nvml.nvmlDeviceGetUUID(handle)),
                    "memory": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                }
                for handle in handles
            ],
            "without_peer_access": apart,
        }
    finally:
        nvml.nvmlShutdown()


def rmm() -> dict[str, Any] | None:
    """Return the pool of this process's device memory; None if it has not loaded RMM, which sets no pool then."""
    if "rmm" not in sys.modules:
        return None
    resource = sys.modules["rmm"].mr.get_current_device_resource()
    size = getattr(resource, "pool_size", None)
    cupy = sys.modules.get("cupy")
    allocator = cupy.cuda.get_allocator() if cupy is not None else None
    return {
        "resource": type(resource).__name__,
        "pool_bytes": int(size()) if callable(size) else 0,
        "used_by_cupy": "rmm" in str(getattr(allocator, "__module__", "")),
    }


def blas_libraries() -> list[dict[str, Any]]:
    """Return the BLAS libraries of this process, as NumPy has loaded them."""
    importlib.import_module("numpy")
    pools = importlib.import_module("threadpoolctl").threadpool_info()
    kept = ("internal_api", "version", "num_threads", "architecture", "threading_layer")
    return [{key: pool.get(key) for key in kept} for pool in pools if pool.get("user_api") == "blas"]


def of_process() -> dict[str, Any]:
    """Return the facts of this process. May take seconds, as it loads the engines' libraries."""
    return {
        "host": platform.node(),
        "versions": versions(),
        "folder": folder(),
        "cuda_major": cuda_major(),
        "engines": attempt(engine_versions),
        "gpus": attempt(gpus),
        "driver_loaded": os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/dxg"),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "rmm": attempt(rmm),
        "blas": attempt(blas_libraries),
        # Those that it may use, within its container.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": attempt(lambda: int(importlib.import_module("distributed.system").MEMORY_LIMIT)),
    }


async def of_worker(dask_worker: Any = None) -> dict[str, Any]:
    """Return the facts of a worker; called by ``Client.run``. Off the event loop, which continues."""
    facts = await asyncio.to_thread(of_process)
    return facts | {
        "threads": int(dask_worker.state.nthreads),
        "memory_limit": int(getattr(dask_worker.memory_manager, "memory_limit", None) or 0),
        "nanny": bool(dask_worker.nanny),
        "plugin": "distmm" in dask_worker.extensions,
        "protocol": str(dask_worker.address).partition("://")[0],
    }


async def of_scheduler(dask_scheduler: Any = None) -> dict[str, Any]:
    """Return the facts of a scheduler, which needs no GPU; called by ``Client.run_on_scheduler``."""
    return {
        "host": platform.node(),
        "versions": versions(),
        "folder": folder(),
        "plugin": "distmm" in dask_scheduler.plugins,
        "package": attempt(lambda: bool(importlib.import_module("dask_distmm"))),
    }


if __name__ == "__main__":
    json.dump(of_process(), sys.stdout)
