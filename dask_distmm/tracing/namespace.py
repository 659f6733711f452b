"""The array API's namespace of traced arrays: NumPy, whose functions take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_distmm.tracing.arrays import TracedArray, as_traced

__array_api_version__ = np.__array_api_version__


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> TracedArray:
    """Return an array in another type: NumPy's function is for its own arrays only."""
    return as_traced(x).astype(dtype)


def asarray(x: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Any:
    """Return an array, which may be traced."""
    if not isinstance(x, TracedArray):
        return np.asarray(x, dtype)
    return x if dtype is None else x.astype(dtype)


def __getattr__(name: str) -> Any:
    return getattr(np, name)
