"""Random FP8 operands and their scales, the formula in float64, and a bound on what rounding does to it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dask_distmm.numeric.types import FP8

# Of a stored result: half a unit in the last place relative to the number, half the smallest subnormal, the largest.
STORED = {
    "float32": (2.0**-24, 2.0**-150, np.inf),
    "bfloat16": (2.0**-8, 2.0**-134, np.inf),
    "float16": (2.0**-11, 2.0**-25, np.inf),
    "float8_e4m3fn": (2.0**-4, 2.0**-10, 448.0),
    "float8_e5m2": (2.0**-3, 2.0**-17, 57344.0),
}
PAIRS = [
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e5m2"),
]


def random_fp8(rng, shape, name, order="C"):
    return np.asarray(np.clip(rng.standard_normal(shape) * 20, -400, 400).astype(FP8[name]), order=order)


def to_float64(x):
    return x.astype(np.float32).astype(np.float64) if x.dtype.kind == "V" or x.dtype.itemsize == 1 else x.astype(float)


class Narrow:
    """``D = saturate(scale_d * F(alpha scale_a scale_b A B + beta scale_c C))`` in float64, and its error's bound.

    Parameters
    ----------
    sums
        Relative error of a sum over k, as a share of the sum of absolute values: numbers of FP8 and their products
        are exact in float32, so that only additions round. 16 * 2**-23 covers float32's in any order of blocks
        for k here (PBLAS' gate); GPUs add FP8 with fewer bits.
    """

    def __init__(self, a, b, scales, alpha=1.0, beta=0.0, c=None, f=lambda x: x, sums=16 * 2.0**-23):
        product = to_float64(a) @ to_float64(b)
        factor = alpha * scales["a"] * scales["b"]
        self.before = f(factor * product + (beta * scales.get("c", 1.0) * to_float64(c) if beta else 0.0))
        magnitude = abs(factor) * (abs(to_float64(a)) @ abs(to_float64(b)))
        magnitude = magnitude + (abs(beta * scales.get("c", 1.0)) * abs(to_float64(c)) if beta else 0.0)
        # The factors are rounded to float32 and multiplied with in it, as is the scale of D.
        self.error = (sums + 8 * 2.0**-24) * magnitude
        self.scale_d = scales.get("d", 1.0)

    def check(self, d, name, amax=None):
        assert d.dtype == (FP8.get(name) or (ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)))
        half, least, top = STORED[name]
        low, high = (self.scale_d * (self.before + sign * self.error) for sign in (-1, 1))
        low, high = np.clip(low, -top, top), np.clip(high, -top, top)
        off = half * np.maximum(abs(low), abs(high)) + least
        x = to_float64(d)
        good = (x >= low - off) & (x <= high + off)
        worst = float(np.nanmax(np.where(good, 0, abs(x - (low + high) / 2)), initial=0))
        assert good.all(), f"{(~good).sum()} of {good.size} are outside, by up to {worst}"
        if amax is not None:
            found, error = float(amax), float(self.error.max())
            slack = 2.0**-8 if name == "bfloat16" else 2.0**-10
            assert abs(found - abs(self.before).max()) <= error + slack * abs(found)
