"""CUDA sources of this folder as modules of kernels, compiled when they are first needed."""

from __future__ import annotations

import functools
import importlib.resources

import cupy as cp
import numpy as np

_NUMBERS = {
    "float32": ("float", 4, 0),
    "float64": ("double", 8, 0),
    "complex64": ("float", 4, 1),
    "complex128": ("double", 8, 1),
}


def source(name: str, dtype: np.dtype | None = None) -> str:
    """Return the code of a module: ``"merging"``, or ``"tridiagonal"`` for a type of numbers."""
    folder = importlib.resources.files("dask_distmm.engines.gpu")
    if dtype is None:
        return folder.joinpath(f"{name}.cu").read_text()
    real, size, is_complex = _NUMBERS[dtype.name]
    defined = f"#define REAL {real}\n#define REAL_BYTES {size}\n#define COMPLEX {is_complex}\n"
    return defined + "\n".join(folder.joinpath(f"{part}.cu").read_text() for part in ("numbers", "system", name))


@functools.lru_cache(maxsize=64)
def kernel(module: str, name: str, dtype: np.dtype | None = None) -> cp.RawKernel:
    """Return a kernel of a module."""
    return _module(module, dtype).get_function(name)


@functools.lru_cache(maxsize=16)
def _module(name: str, dtype: np.dtype | None) -> cp.RawModule:
    return cp.RawModule(code=source(name, dtype))
