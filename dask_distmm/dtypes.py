"""Which types there are: of A, of B, of the result, and the one that is computed and summed in.

Results have NumPy's type (``np.result_type``). What differs is the type inside: 16-bit floats are
computed and summed in float32 and rounded once, as GPUs do; narrow integers and bool are computed in
float64, where their sums are exact, because BLAS is about 100 times as fast as NumPy's integer loops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

__all__ = ["compute_dtype", "dtype_from_name", "rounded", "supported", "takes", "typed"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Narrow integers: a product is below 2**32, so sums of up to 2**21 of them are exact in float64.
_EXACT_IN_FLOAT64 = frozenset("bBhH")


def dtype_from_name(name: str) -> np.dtype:
    """Return the dtype called `name`, ``"bfloat16"`` included.

    Raises
    ------
    TypeError
        There is no such type.
    """
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


def typed(array: Any, name: str) -> Any:
    """Return an array with its type, where Dask has lost it on the way.

    CuPy arrays of bfloat16 that Dask moves between processes arrive as two bytes of nothing in particular.
    """
    return array.view(_BFLOAT16) if name == "bfloat16" and getattr(array, "dtype", None) == "V2" else array


def supported(dtype: DTypeLike) -> bool:
    """Whether the numpy engine multiplies arrays of this type: bool, all integers, floats and complex."""
    dtype = np.dtype(dtype)
    return dtype == _BFLOAT16 or (dtype.kind in "biufc" and dtype.isnative)


_ON_GPUS = frozenset(["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])


def takes(engine: str, array: str, dtypes: Sequence[str]) -> bool:
    """Whether an engine multiplies arrays of these types.

    Parameters
    ----------
    engine
        Its name.
    array
        What the chunks are: ``"numpy"`` or ``"cupy"``.
    dtypes
        Names of the types of A, B and the result.
    """
    if engine == "numpy":
        return array == "numpy" and all(supported(dtype_from_name(name)) for name in dtypes)
    return array in ("numpy", "cupy") and _ON_GPUS.issuperset(dtypes)


@functools.lru_cache(maxsize=256)
def compute_dtype(dtype: np.dtype, k: int) -> np.dtype:
    """Return the type that a product of results in `dtype` is computed and summed in.

    Parameters
    ----------
    dtype
        Type of the result.
    k
        Length of the contraction: beyond 2**21 float64 would no longer be exact for 16-bit integers.

    Returns
    -------
    numpy.dtype
        float32 for float16 and bfloat16; float64 for bool and integers of up to 16 bits;
        otherwise `dtype` itself. Integers of 32 and 64 bits wrap around, as in NumPy.
    """
    if dtype == np.float16 or dtype == _BFLOAT16:
        return np.dtype(np.float32)
    if (dtype.char in _EXACT_IN_FLOAT64 and k <= 2**21) or dtype == np.bool_:
        return np.dtype(np.float64)
    return dtype


def rounded(sums: Any, dtype: np.dtype) -> Any:
    """Return sums in the type of the result: rounded once, integers wrapped around, bool as "not zero".

    Parameters
    ----------
    sums
        NumPy or CuPy array in the type that `compute_dtype` names.
    dtype
        Type of the result.
    """
    if sums.dtype == dtype:
        return sums
    if dtype.kind in "iu":
        return sums.astype(np.int64).astype(dtype)
    if dtype.kind == "b":
        return sums != 0
    with np.errstate(over="ignore"):
        return sums.astype(dtype)
