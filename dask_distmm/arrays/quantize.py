"""``quantize``, ``dequantize``: Dask arrays to and from FP8, MXFP8 and NVFP4; and the scales that go with them.

A quantized array stands for its numbers times a scale::

    x  ~  q * scale,   scale = max |x| / largest number of the type     (1 where all of x is 0)

MXFP8 has a scale, a power of two, for every 32 numbers along k (OCP Microscaling Formats 1.0)::

    scale = 2 ** (floor(log2(max |x| of the block)) - 8)                stored as float8_e8m0fnu

NVFP4 has numbers of 4 bits, an E4M3 scale for every 16 of them along k, and one for the whole matrix::

    scale = max |x| / (6 * 448),   of a block: max |x of the block| / (6 * scale), rounded to E4M3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, overload

import dask.array as da
import ml_dtypes
import numpy as np
import numpy.typing as npt
from dask.array.utils import meta_from_array

from dask_distmm.arrays.kinds import as_array, check_operand, rechunked
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.errors import PlanError, unknown_name
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import FP8, Types, carried, decode, largest, saturated, stored, type_name
from dask_distmm.runtime.chunks import array_kind, array_module
from dask_distmm.typing import ArrayLike, BlockFormat, Scaled

_E8M0, _E2M1 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float4_e2m1fn)
_BLOCKS = {"mxfp8": 32, "nvfp4": 16}
_LARGEST_FP4 = 6.0


@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A matrix with a scale for each block of its elements, as `quantize` makes it.

    Parameters
    ----------
    values : dask.array.Array
        The numbers, float8_e4m3fn or float4_e2m1fn, one a byte.
    block_scales : dask.array.Array
        float8_e8m0fnu or float8_e4m3fn; shorter than `values` along `axis` by the size of a block.
    scale : dask.array.Array
        0-d float32: of all blocks together. 1 for MXFP8.
    format : str
        ``"mxfp8"`` or ``"nvfp4"``.
    axis : int
        The axis along which blocks lie: 1 for A, 0 for B.

    See Also
    --------
    quantize, dequantize
    """

    values: da.Array
    block_scales: da.Array
    scale: da.Array
    format: str
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.values.shape)


@overload
def quantize(a: ArrayLike, dtype: BlockFormat, *, axis: int = -1, scale: None = None) -> BlockScaled: ...


@overload
def quantize(
    a: ArrayLike, dtype: Scaled | np.dtype[Any] | type[Any], *, axis: int = -1, scale: Any = None
) -> tuple[da.Array, da.Array]: ...


def quantize(a: ArrayLike, dtype: Any, *, axis: int = -1, scale: Any = None) -> Any:
    """Return an array in a narrow type, and its scale. Lazy.

    Parameters
    ----------
    a : dask.array.Array or array_like
        Real numbers.
    dtype : str or dtype
        ``"float8_e4m3"``, ``"float8_e5m2"``, ``"mxfp8"`` or ``"nvfp4"``.
    axis : int, optional
        For MXFP8 and NVFP4: the axis of k, along which blocks lie; -1 for A, 0 for B. Chunks are cut anew along it
        where they are not multiples of a block.
    scale : number or 0-d array, optional
        For FP8: a scale from elsewhere, as delayed scaling has it; larger numbers are saturated then. By default
        the one with which the largest absolute value becomes the type's largest number.

    Returns
    -------
    q : dask.array.Array
        In the type asked for (CuPy arrays: uint8, to be stated as ``a_type`` or ``b_type`` of `matmul`).
    scale : dask.array.Array
        0-d float32: ``a`` is about ``q * scale``. 1 where all of `a` is 0. NaN and infinities in `a` do not count;
        infinities are saturated, NaN stays NaN.

    For ``"mxfp8"`` and ``"nvfp4"`` one `BlockScaled` is returned instead.

    Raises
    ------
    PlanError
        The type is none of these, or `a` is complex, no matrix, or on a GPU for the types with block scales.

    See Also
    --------
    dequantize, matmul

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import dequantize, matmul, quantize
    >>> a, b = da.ones((64, 32), chunks=16), da.ones((32, 48), chunks=16)
    >>> (qa, sa), (qb, sb) = quantize(a, "float8_e4m3"), quantize(b, "float8_e4m3")
    >>> d = matmul(qa, qb, quantization_scales={"a": sa, "b": sb}, result_type="float32")
    >>> round(float(d[0, 0].compute()), 4)
    32.0
    """
    array: da.Array = da.asanyarray(a)
    if array.dtype.kind == "c" or (array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16"):
        raise PlanError(f"quantize takes real numbers, got {array.dtype}")
    if isinstance(dtype, str) and dtype in _BLOCKS:
        if scale is not None:
            raise PlanError(f"scale={scale!r}: {dtype} finds its own")
        return _in_blocks(array, dtype, axis)
    try:
        name = type_name("dtype", dtype)
    except PlanError:
        name = ""
    if name not in FP8:
        raise PlanError(unknown_name("dtype", dtype, ("float8_e4m3", "float8_e5m2", *_BLOCKS)))
    array = array.astype(np.float32)
    scale = _scale(array, largest(name)) if scale is None else da.asanyarray(scale).astype(np.float32).reshape(())
    kind = array_kind(array._meta)
    meta = meta_from_array(array._meta, dtype=carried(name, kind))
    return da.map_blocks(_quantized, array, scale, name=None, to=name, dtype=meta.dtype, meta=meta), scale


def dequantize(
    q: ArrayLike, scale: Any = 1.0, dtype: npt.DTypeLike = "float32", *, q_type: npt.DTypeLike | None = None
) -> da.Array:
    """Return the numbers that a quantized array stands for. Lazy.

    Parameters
    ----------
    q : dask.array.Array or BlockScaled
        As `quantize` or `matmul` has made it.
    scale : number or 0-d array, optional
        Its scale; `BlockScaled` has its own. Of a D that was stored with ``quantization_scales["d"]``: one over that.
    dtype : dtype, optional
        Of the result.
    q_type : str, optional
        The FP8 type that a `q` of uint8 holds.

    Returns
    -------
    dask.array.Array
        Of the shape and the chunks of `q`.

    Raises
    ------
    PlanError
        `q` is not FP8.

    See Also
    --------
    quantize, matmul

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import dequantize, quantize
    >>> q, scale = quantize(da.ones((4, 4), chunks=2), "float8_e4m3")
    >>> round(float(dequantize(q, scale)[0, 0].compute()), 4)
    1.0
    """
    if isinstance(q, BlockScaled):
        options = {"axis": q.axis, "block": _BLOCKS[q.format], "chunks": q.values.chunks}
        expanded = da.map_blocks(_expanded, q.values, q.block_scales, **options, meta=np.empty((0, 0), np.float32))
        return (expanded * q.scale).astype(dtype)
    array: da.Array = da.asanyarray(q)
    name = array.dtype.name if q_type is None else type_name("q_type", q_type)
    if name not in FP8 or array.dtype not in (FP8[name], np.uint8):
        raise PlanError(f"the array is {array.dtype}, q_type={q_type!r}; expected FP8, or uint8 with q_type stated")
    wide, scale = widened(array, name, np.dtype(np.float32)), da.asanyarray(scale).reshape(())
    return da.map_blocks(_rescaled, wide, scale, dtype=np.float32, meta=wide._meta).astype(dtype)


def widened(array: da.Array, name: str, dtype: np.dtype) -> da.Array:
    """Return an array that holds `name` in a type that has all of its numbers."""
    if name not in FP8:
        return array.astype(dtype)
    meta = meta_from_array(array._meta, dtype=dtype)
    return da.map_blocks(widen_chunk, array, held=name, wide=dtype, dtype=dtype, meta=meta)


def as_operands(a: Any, b: Any) -> tuple[da.Array, da.Array]:
    """Return two operands as Dask arrays; those with block scales as the float32 numbers that they stand for.

    These products are a reference: each scale times each number is exact in float32 (but where it leaves its range).
    """
    for name, x in (("first", a), ("second", b)):
        check_operand(f"the {name} operand", x)
        if hasattr(x, "columns") and hasattr(x, "dtypes"):
            raise PlanError(f"the {name} operand is a {type(x).__name__}; expected an array: pass x.to_numpy()")
    if not isinstance(a, BlockScaled) and not isinstance(b, BlockScaled):
        return as_array(a), as_array(b)
    forms = [f"{x.format} in blocks along axis {x.axis}" if isinstance(x, BlockScaled) else "unscaled" for x in (a, b)]
    if forms[0].replace("axis 1", "axis 0") != forms[1] or forms[0] == forms[1]:
        raise PlanError(f"A is {forms[0]}, B {forms[1]}; expected one format for both, along axis 1 of A and 0 of B")
    return dequantize(a), dequantize(b)


def with_scales(
    types: Types, formula: Formula, scales: Mapping[str, Any] | None, with_c: bool
) -> tuple[Formula, list[tuple[str, da.Array]]]:
    """Put quantization scales into the formula: numbers into its factors, arrays as further inputs."""
    if scales is None and not types.fp8:
        return formula, []
    scales = dict(scales or {})
    needed = ({"a", "b"} if types.fp8 else set()) | ({"d"} if types.d in FP8 else set())
    allowed = needed | ({"c"} if types.fp8 and with_c else set())
    if not needed <= set(scales) <= allowed:
        raise PlanError(
            f"quantization_scales has {sorted(scales)}; {types.a} @ {types.b} in {types.d} needs {sorted(needed)} and "
            f"takes {sorted(allowed)}: a scale for each FP8 operand and an FP8 result, 1.0 where there is none"
        )
    factor = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    inputs = []
    for key, value in sorted(scales.items()):
        if getattr(value, "shape", ()) not in ((), (1,)):
            raise PlanError(f"quantization_scales[{key!r}] has the shape {value.shape}; expected a number")
        if isinstance(value, da.Array) or array_kind(value) == "cupy":
            inputs.append((f"scale_{key}", da.asanyarray(value).astype(np.float32).reshape((1, 1))))
            continue
        try:
            factor[key] = float(np.asarray(value).reshape(()))
        except (TypeError, ValueError):
            raise PlanError(f"quantization_scales[{key!r}]={value!r}; expected a number") from None
        if not 0 < factor[key] < np.inf:
            raise PlanError(f"quantization_scales[{key!r}]={value!r}; expected a positive number")
    alpha, beta = factor["a"] * factor["b"], factor["c"]
    formula = dataclasses.replace(
        formula,
        alpha=(formula.alpha[0] * alpha, formula.alpha[1] * alpha),
        beta=(formula.beta[0] * beta, formula.beta[1] * beta),
        scale_d=factor["d"],
        scales=tuple(name for name, _ in inputs),
    )
    return formula, inputs


# On chunks


def _scale(a: da.Array, top: float) -> da.Array:
    """Return the 0-d scale with which the largest finite absolute value of an array becomes `top`."""
    if not a.size:
        return da.ones((), dtype=np.float32)
    sizes = da.map_blocks(_finite_sizes, a, dtype=a.dtype, meta=a._meta)
    return da.map_blocks(_scale_from, sizes.max(), top=top, dtype=np.float32, meta=meta_from_array(a._meta, ndim=0))


def _finite_sizes(x: Any) -> Any:
    xp = array_module(x)
    return xp.where(xp.isfinite(x), abs(x), x.dtype.type(0))


def _scale_from(amax: Any, top: float) -> Any:
    xp = array_module(amax)
    scale = xp.asarray(amax, np.float32) / np.float32(top)
    # Where the quotient underflows there is nothing to scale by.
    return xp.where(scale > 0, scale, np.float32(1))


def _quantized(x: Any, scale: Any, to: str) -> Any:
    register_serializers()
    xp = array_module(x)
    with np.errstate(all="ignore"):
        return stored(xp, x / xp.asarray(scale, np.float32), to, fp8_bytes=xp is not np)


def widen_chunk(x: Any, held: str, wide: np.dtype) -> Any:
    """Return a chunk in a type that has all numbers of the one that it holds."""
    if held in FP8 and x.dtype == np.uint8:
        return decode(array_module(x), x, held, wide)
    return x.astype(wide, copy=False)


def _rescaled(x: Any, scale: Any) -> Any:
    return x * array_module(x).asarray(scale, np.float32)


def _in_blocks(a: da.Array, form: str, axis: int) -> BlockScaled:
    """Quantize with a scale a block."""
    if array_kind(a._meta) == "cupy":
        import cupy

        cc = cupy.cuda.Device().compute_capability
        raise PlanError(
            f"{form} on GPUs needs compute capability 10.0 (Blackwell) and an engine that hands block scales to it; "
            f"this GPU has {cc[:-1]}.{cc[-1]}, and the cublasmp engine multiplies FP8 with one scale a matrix: "
            "quantize to 'float8_e4m3', or use NumPy chunks for the reference implementation"
        )
    if a.ndim != 2 or axis not in (-2, -1, 0, 1):
        raise PlanError(f"{form} needs a matrix and axis 0 or 1, got {a.ndim} dimensions and axis={axis}")
    axis, block = axis % 2, _BLOCKS[form]
    a = a.astype(np.float32)
    edges = np.unique([min(-(-edge // block) * block, a.shape[axis]) for edge in np.cumsum(a.chunks[axis])])
    a = rechunked(a, {axis: tuple(np.diff(edges, prepend=0).tolist())})
    short = tuple(-(-size // block) for size in a.chunks[axis])
    chunks = (short, a.chunks[1]) if axis == 0 else (a.chunks[0], short)
    fp4, e4m3, options = form == "nvfp4", FP8["float8_e4m3fn"], {"axis": axis, "form": form}
    scale = _scale(a, _LARGEST_FP4 * largest("float8_e4m3fn")) if fp4 else da.ones((), dtype=np.float32)
    meta, block_meta = (np.empty((0, 0), dtype) for dtype in ((_E2M1, e4m3) if fp4 else (e4m3, _E8M0)))
    scales = da.map_blocks(_block_scales, a, scale, **options, chunks=chunks, meta=block_meta)
    values = da.map_blocks(_block_values, a, scales, scale, **options, chunks=a.chunks, meta=meta)
    return BlockScaled(values, scales, scale, form, axis)


def _block_scales(x: Any, scale: Any, axis: int, form: str) -> Any:
    starts = np.arange(0, x.shape[axis], _BLOCKS[form])
    amax = np.maximum.reduceat(_finite_sizes(x), starts, axis=axis)
    if form == "nvfp4":
        # Numbers of 4 bits have no NaN: their scale has it for them.
        lost = np.logical_or.reduceat(np.isnan(x), starts, axis=axis)
        return saturated(np.where(lost, np.float32(np.nan), amax / (_LARGEST_FP4 * scale)), "float8_e4m3fn")
    exponent = np.where(amax > 0, np.frexp(amax)[1] - 1 - 8, 0)
    return np.ldexp(np.float32(1), np.clip(exponent, -127, 127)).astype(_E8M0)


def _block_values(x: Any, scales: Any, scale: Any, axis: int, form: str) -> Any:
    by = _repeated(scales, _BLOCKS[form], axis, x.shape) * scale
    with np.errstate(all="ignore"):
        if form != "nvfp4":
            return saturated(x / by, "float8_e4m3fn")
        return np.clip(np.where(by > 0, x / by, np.float32(0)), -_LARGEST_FP4, _LARGEST_FP4).astype(_E2M1)


def _repeated(scales: Any, block: int, axis: int, shape: tuple[int, int]) -> Any:
    """Return the scale of each element."""
    return np.repeat(scales.astype(np.float32), block, axis)[: shape[0], : shape[1]]


def _expanded(values: Any, scales: Any, axis: int, block: int) -> Any:
    return values.astype(np.float32) * _repeated(scales, block, axis, values.shape)
