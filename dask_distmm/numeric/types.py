"""The types of A, of B, of the result, and the one that is computed and summed in.

Results have NumPy's type (``np.result_type``) unless another one is asked for. The type inside differs: 8-
and 16-bit floats are computed and summed in float32 and rounded once, as GPUs do; narrow integers and bool are
computed in float64, where their sums are exact, because BLAS is about 100 times as fast as NumPy's integer loops.

FP8 is ml_dtypes' ``float8_e4m3fn`` (NVIDIA's E4M3, also called ``"float8_e4m3"`` here) and ``float8_e5m2``. CuPy has
no such types: its arrays carry FP8 as uint8, and so may NumPy's; their type is then stated beside them.

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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from dask_distmm.errors import PlanError, unknown_name

# Conversions to and from FP8 and TF32, on arrays as they are, with NumPy or CuPy. Pure


# Bits of the mantissa, bias of the exponent, largest number, code of NaN.
_FORMATS = {"float8_e4m3fn": (3, 7, 448.0, 0x7F), "float8_e5m2": (2, 15, 57344.0, 0x7E)}


def largest(name: str) -> float:
    """Return the largest number of an FP8 type."""
    return _FORMATS[name][2]


def saturated(x: NDArray[Any], name: str) -> NDArray[Any]:
    """Return a NumPy array rounded to an FP8 type."""
    top = largest(name)
    clipped: NDArray[Any] = np.clip(x, -top, top).astype(FP8[name])
    return clipped


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


def store(target: NDArray[Any], data: NDArray[Any]) -> None:
    """Store sums in the type of the result: rounded once, integers wrapped around, FP8 saturated, bool "not zero"."""
    with np.errstate(over="ignore"):
        target[...] = data if target.dtype == data.dtype else stored(np, data, target.dtype.name, fp8_bytes=False)


def round_tf32(x: NDArray[Any]) -> None:
    """Round float32 (or complex64) numbers to 10 bits of mantissa in place, to the nearest, ties to even.

    Infinities and NaN stay; numbers that round above the largest one become infinite.
    """
    bits = x.view(np.float32).view(np.uint32)
    finite = (bits & np.uint32(0x7F800000)) != 0x7F800000
    rounded = (bits + (((bits >> 13) & 1) + 0xFFF)) & np.uint32(0xFFFFE000)
    np.copyto(bits, rounded, where=finite)


# The types of A, of B, of the result, and the one that is computed and summed in


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FP8 = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2")}
_NAMES = {"bfloat16": _BFLOAT16, **FP8}

# For each compute type, those that are summed in of which it is a way. The names are cuBLAS' in short.
COMPUTE_TYPES = {
    "fp32": ("float32", "complex64"),
    "tf32": ("float32", "complex64"),
    "bf16x9": ("float32", "complex64"),
    "fp64": ("float64", "complex128"),
    "fp64_emulated": ("float64", "complex128"),
}
_USUAL = ("fp32", "fp64")

# Narrow integers: a product is below 2**32, so sums of up to 2**21 of them are exact in float64.
_EXACT_IN_FLOAT64 = frozenset("bBhH")


def dtype_from_name(name: str) -> np.dtype:
    """Return the dtype called `name`, ``"bfloat16"`` included."""
    return _NAMES[name] if name in _NAMES else np.dtype(name)


def type_name(what: str, value: Any) -> str:
    """Return the name of a type that a user has given, ``"float8_e4m3"`` being NVIDIA's."""
    try:
        if isinstance(value, str):
            return str(dtype_from_name("float8_e4m3fn" if value == "float8_e4m3" else value).name)
        return str(np.dtype(value).name)
    except TypeError:
        raise PlanError(f"{what}={value!r} is not a type; expected one as 'float32' or 'float8_e4m3'") from None


def typed(array: Any, name: str) -> Any:
    """Return an array with its type, where Dask has lost it on the way, or where the array does not know it.

    CuPy arrays of bfloat16 that Dask moves between processes arrive as two bytes of nothing in particular; NumPy
    arrays of FP8 may come as uint8. CuPy arrays of FP8 stay so.
    """
    if name == "bfloat16" and getattr(array, "dtype", None) == "V2":
        return array.view(_BFLOAT16)
    return array.view(FP8[name]) if name in FP8 and type(array) is np.ndarray and array.dtype == np.uint8 else array


def carried(name: str, array: str) -> np.dtype:
    """Return the type that chunks have which hold `name`, where they are ``"numpy"`` or ``"cupy"``."""
    return np.dtype(np.uint8) if name in FP8 and array == "cupy" else dtype_from_name(name)


def supported(dtype: DTypeLike) -> bool:
    """Whether the numpy engine multiplies arrays of this type: bool, all integers, floats, FP8 and complex."""
    dtype = np.dtype(dtype)
    return dtype in _NAMES.values() or (dtype.kind in "biufc" and dtype.isnative)


_ON_GPUS = frozenset(["float16", "bfloat16", "float32", "float64", "complex64", "complex128", *FP8])
_BYTES = frozenset(["int8", "uint8"])


def takes_on_cpus(array: str, dtypes: Sequence[str]) -> bool:
    """Whether CPUs multiply chunks of a kind (``"numpy"``, ``"cupy"``), of A's, B's and D's types by their names."""
    return array == "numpy" and all(supported(dtype_from_name(name)) for name in dtypes)


def takes_on_gpus(array: str, dtypes: Sequence[str]) -> bool:
    """Whether GPUs multiply chunks of a kind (``"numpy"``, ``"cupy"``), of A's, B's and D's types by their names."""
    # Sums of 8-bit integers are exact in float64.
    exact = dtypes[-1] == "int32" and set(dtypes[:-1]) <= _BYTES
    return array in ("numpy", "cupy") and (exact or _ON_GPUS.issuperset(dtypes))


@functools.lru_cache(maxsize=256)
def compute_dtype(dtype: np.dtype, k: int) -> np.dtype:
    """Return the type that a product of operands in `dtype` is computed and summed in."""
    if dtype == np.float16 or dtype in _NAMES.values():
        return np.dtype(np.float32)
    if (dtype.char in _EXACT_IN_FLOAT64 and k <= 2**21) or dtype == np.bool_:
        return np.dtype(np.float64)
    return dtype


def sum_dtype(operand: np.dtype, result: np.dtype, k: int) -> np.dtype:
    """Return `compute_dtype`; for a result with more bits than its integer operands the float64 that holds its sums.

    These are bytes: sums of up to 2**37 of their products are exact in float64.
    """
    wider = operand.kind in "iu" and result.itemsize > operand.itemsize
    return np.dtype(np.float64) if wider else compute_dtype(operand, k)


def operand_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the type that A and B are promoted to; of two FP8 types, which have no common one, the first."""
    return a if a.name in FP8 and b.name in FP8 else np.result_type(a, b)


class Types(NamedTuple):
    """The types of a multiply by name: of A, of B, of D; and how it is computed, empty for as usual."""

    a: str
    b: str
    d: str
    compute: str = ""

    @property
    def operand(self) -> np.dtype:
        """Type that A and B are promoted to."""
        return operand_dtype(dtype_from_name(self.a), dtype_from_name(self.b))

    @property
    def fp8(self) -> bool:
        """Whether A and B are FP8."""
        return self.a in FP8

    @property
    def usual(self) -> bool:
        """Whether they are as NumPy's matmul has them."""
        return not self.fp8 and not self.compute and self.d == self.operand.name


def resolve_types(
    a: np.dtype,
    b: np.dtype,
    a_type: Any = None,
    b_type: Any = None,
    result_type: Any = None,
    compute_type: str | None = None,
    default_compute: str | None = None,
) -> Types:
    """Return the types of a multiply, from those of the arrays and those asked for."""
    names = []
    for name, dtype, stated in (("a", a, a_type), ("b", b, b_type)):
        chosen = dtype.name if stated is None else type_name(f"{name}_type", stated)
        if chosen != dtype.name and not (chosen in FP8 and dtype == np.uint8):
            raise PlanError(f"{name}_type={stated!r}, but the array is {dtype}: FP8 can be stated for arrays of uint8")
        names.append(chosen)
    narrow = [name in FP8 for name in names]
    if any(narrow) and not all(narrow):
        raise PlanError(f"A is {names[0]} and B {names[1]}: FP8 is multiplied by FP8; dequantize one, or quantize both")
    operand = FP8[names[0]] if all(narrow) else np.result_type(a, b)
    result = operand.name if result_type is None else type_name("result_type", result_type)
    wider = {
        **dict.fromkeys(FP8, (*FP8, "float16", "bfloat16", "float32")),
        **dict.fromkeys(("float16", "bfloat16"), ("float32",)),
    }
    choices = {operand.name, *wider.get(operand.name, ()), *(["int32"] if set(names) <= _BYTES else [])}
    if result not in choices:
        raise PlanError(f"result_type={result!r}; for {names[0]} @ {names[1]} there are {', '.join(sorted(choices))}")
    return Types(names[0], names[1], result, _compute(operand, compute_type, default_compute))


def _compute(operand: np.dtype, wanted: str | None, default: str | None) -> str:
    """Return the compute type, empty for the usual one; a default that does not fit the operands is left out."""
    for what, value in (("compute_type", wanted), ("config distmm.compute-type", default)):
        if value is not None and value not in COMPUTE_TYPES:
            raise PlanError(unknown_name(what, value, COMPUTE_TYPES))
    summed = compute_dtype(operand, 1).name
    # The usual ones are right for all that is summed in them anyway.
    fitting = [name for name, kinds in COMPUTE_TYPES.items() if (summed if name in _USUAL else operand.name) in kinds]
    if wanted is not None and wanted not in fitting:
        choices = ", ".join(map(repr, fitting)) or "none to choose from"
        raise PlanError(f"compute_type={wanted!r} is not for {operand} operands; for these there are {choices}")
    chosen = wanted or (default if default in fitting else None)
    return "" if chosen is None or chosen in _USUAL else chosen
