"""The GPUs that a benchmark has, found without CUDA, and what its processes are told about them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

# NVLink multicast stays off: on a shared host it can take all GPUs out of service.
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUBLASMP_DISABLE_MULTICAST": "1",
}


def find_gpus() -> tuple[list[str], dict[str, Any]]:
    """Return what CUDA_VISIBLE_DEVICES calls the GPUs, and what they are; this process stays clear of CUDA."""
    fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    found = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(found) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names, dict(zip(fields, found[0], strict=False)) if found else {}
