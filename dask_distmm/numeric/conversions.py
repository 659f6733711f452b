"""Conversions to and from FP8 and TF32, on arrays as they are, with NumPy or CuPy. Pure.

FP8 saturates: numbers above the largest one become that one, infinities too; NaN stays NaN. Rounding is to the
nearest, ties to even. Formats: FP8 Formats for Deep Learning (Micikevicius and others, 2022), OCP OFP8 1.0.

=================  ========  ========  =======  =================  ==================
type               exponent  mantissa  largest  smallest normal    smallest subnormal
=================  ========  ========  =======  =================  ==================
``float8_e4m3fn``  4 bits    3 bits    448      2**-6              2**-9
``float8_e5m2``    5 bits    2 bits    57344    2**-14             2**-16
=================  ========  ========  =======  =================  ==================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.numeric.types import FP8, dtype_from_name


class _Format(NamedTuple):
    """Bits of the mantissa, bias of the exponent, largest number, code of NaN."""

    mantissa: int
    bias: int
    largest: float
    nan: int


_FORMATS = {"float8_e4m3fn": _Format(3, 7, 448.0, 0x7F), "float8_e5m2": _Format(2, 15, 57344.0, 0x7E)}


def largest(name: str) -> float:
    """Return the largest number of an FP8 type."""
    return _FORMATS[name].largest


def saturated(x: NDArray[Any], name: str) -> NDArray[Any]:
    """Return a NumPy array rounded to an FP8 type."""
    top = largest(name)
    found: NDArray[Any] = np.clip(x, -top, top).astype(FP8[name])
    return found


def encode(xp: Any, x: Any, name: str) -> Any:
    """Return the bytes of an array rounded to an FP8 type, with integer operations only."""
    mantissa, bias, top, nan = _FORMATS[name]
    x = x.astype(np.float32)
    size = xp.minimum(abs(x), np.float32(top))
    bits = size.view(np.uint32)
    shift = 23 - mantissa
    half = (1 << (shift - 1)) - 1
    normal = ((bits + (((bits >> shift) & 1) + half)) >> shift) - ((127 - bias) << mantissa)
    # A sum with this number has the smallest subnormal as its last place.
    magic = np.float32(2.0 ** (24 - bias - mantissa))
    small = (size + magic).view(np.uint32) - magic.view(np.uint32)
    code = xp.where(size < np.float32(2.0 ** (1 - bias)), small, normal)
    code = xp.where(xp.isnan(x), np.uint32(nan), code)
    return (code | ((x.view(np.uint32) >> 24) & 0x80)).astype(np.uint8)


def decode(xp: Any, codes: Any, name: str, dtype: np.dtype) -> Any:
    """Return the numbers whose bytes in an FP8 type are given, in a float type that has them all."""
    table = np.arange(256, dtype=np.uint8).view(FP8[name]).astype(dtype)
    return xp.asarray(table)[codes]


def stored(xp: Any, x: Any, name: str, fp8_bytes: bool) -> Any:
    """Return sums in the type of the result."""
    dtype = dtype_from_name(name)
    if name in FP8:
        return encode(xp, x, name) if fp8_bytes else saturated(x, name)
    if dtype.kind in "iu" and x.dtype.kind == "f":
        # By way of int64: then they wrap around.
        return x.astype(np.int64).astype(dtype)
    return x != 0 if dtype.kind == "b" else x.astype(dtype, copy=False)


def round_tf32(x: NDArray[Any]) -> None:
    """Round float32 (or complex64) numbers to 10 bits of mantissa in place, to the nearest, ties to even.

    Infinities and NaN stay; numbers that round above the largest one become infinite.
    """
    bits = x.view(np.float32).view(np.uint32)
    finite = (bits & np.uint32(0x7F800000)) != 0x7F800000
    rounded = (bits + (((bits >> 13) & 1) + 0xFFF)) & np.uint32(0xFFFFE000)
    np.copyto(bits, rounded, where=finite)
