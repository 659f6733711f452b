"""Checks of the engines for GPUs: that there is a GPU, and that chunks are matrices of CuPy or NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy as cp

from dask_distmm.engines.base import ChunkKey
from dask_distmm.errors import EngineError


def check_gpu() -> None:
    """Raise `EngineError` if this process sees no GPU."""
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise EngineError(f"no NVIDIA GPU: {error}") from error
    if not count:
        raise EngineError("no NVIDIA GPU is visible to this process")


def check_arrays(engine: str, chunks: Mapping[ChunkKey, Any]) -> None:
    """Raise `EngineError` if a chunk is no matrix of CuPy or NumPy; it names the engine."""
    for (operand, number), chunk in chunks.items():
        kind = type(chunk).__module__.split(".")[0]
        if kind not in ("cupy", "numpy") or chunk.ndim != 2:
            raise EngineError(
                f"chunk {number} of {operand.upper()} is a {type(chunk).__name__}; the {engine} engine needs 2-D "
                "cupy.ndarray or numpy.ndarray chunks: convert them with map_blocks(cupy.asarray)"
            )
