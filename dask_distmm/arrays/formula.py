"""All of ``D = F(alpha * op(A) @ op(B) + beta * C)`` but the product, as Dask arrays: checks, inputs, outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.array.utils import meta_from_array
from distributed.protocol.pickle import dumps

from dask_distmm.arrays.kinds import as_array, reducible
from dask_distmm.arrays.quantize import scaled, widened
from dask_distmm.arrays.stock import dask_matmul
from dask_distmm.arrays.views import under
from dask_distmm.comms.serializers import let_types_travel
from dask_distmm.errors import PlanError
from dask_distmm.graph.build import build_graph, build_output
from dask_distmm.numeric.conversions import stored
from dask_distmm.numeric.epilogs import Finish, elementwise, reductions
from dask_distmm.numeric.epilogs import scaled as scaled_result
from dask_distmm.numeric.types import FP8, Types, carried, compute_dtype, dtype_from_name, sum_dtype, supported
from dask_distmm.planning import Problem
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.keys import output_name

__all__ = ["apply_op", "operand_sum", "output_meta", "parse", "result", "unfit", "why_not_input", "without_a_run"]

Extras = Sequence[tuple[str, da.Array]]


def apply_op(name: str, array: da.Array, op: str) -> da.Array:
    """Return op(array): lazily, so that `views` sees through it."""
    if op not in ("N", "T", "C"):
        raise PlanError(f"op_{name}={op!r}; expected 'N', 'T' or 'C'")
    if op == "N":
        return array
    if array.ndim < 2:
        raise PlanError(f"op_{name}={op!r}: {name.upper()} has {array.ndim} dimensions, transposed are matrices of 2")
    turned = array.T if array.ndim == 2 else array.swapaxes(-1, -2)
    return turned.conj() if op == "C" and array.dtype.kind == "c" else turned


def parse(
    a: da.Array,
    b: da.Array,
    c: Any,
    alpha: complex,
    beta: complex | None,
    epilog: str | Callable[..., Any] | None,
    inputs: Mapping[str, Any],
    bias_axis: int,
    amax: bool,
    types: Types,
    scales: Mapping[str, Any] | None = None,
) -> tuple[Finish, list[tuple[str, da.Array]]]:
    """Return the formula, and the arrays that it reads beside A and B, each of two dimensions (or more, for a batch).

    Raises
    ------
    PlanError
        Something is missing, too much, unknown, or does not fit D.
    """
    if beta is None and c is not None:
        raise PlanError("c was given without beta; give beta=1 to add C")
    if c is None and beta is not None and beta != 0:
        raise PlanError(f"beta={beta!r} needs c")
    dtype = types.operand
    factors = []
    for name, value in (("alpha", alpha), ("beta", 0.0 if beta is None else beta)):
        try:
            number = complex(value)
        except (TypeError, ValueError):
            raise PlanError(f"{name}={value!r}; expected a number") from None
        if number.imag and dtype.kind != "c":
            raise PlanError(f"{name}={value!r} is complex; A @ B is {dtype}: convert one of them to a complex type")
        factors.append((number.real, number.imag))
    if epilog is not None and not isinstance(epilog, str) and not callable(epilog):
        raise PlanError(f"epilog={epilog!r}; expected a name, an Epilog or a function")
    function = epilog if callable(epilog) else None
    name = "" if epilog is None or function else str(getattr(epilog, "value", epilog)).lower()
    pickled, names = (dumps(function), tuple(inputs)) if function else (b"", ())
    spec = Finish(factors[0], factors[1], name, bias_axis, bool(amax), pickled, names)
    if spec.replicated and (a.ndim, b.ndim) != (2, 2):
        raise PlanError(f"epilog 'allreduce' is for products of matrices; found {a.ndim} and {b.ndim} dimensions")
    if spec.plain and not inputs and not types.fp8 and not scales:
        return spec, []
    if a.ndim < 2 or b.ndim < 2:
        raise PlanError(f"alpha, C, epilogs and scales need matrices; found {a.ndim} and {b.ndim} dimensions")
    floating = dtype.kind in "fc" or dtype.name == "bfloat16" or types.fp8
    if not floating:
        raise PlanError(f"alpha, C and epilogs need floating-point matrices; A @ B is {dtype}: convert them")
    if dtype.kind == "c" and (spec.activation or spec.gradient):
        raise PlanError(f"epilog {name!r} is not defined for complex numbers; A @ B is {dtype}")
    if set(inputs) != set(spec.inputs):
        raise PlanError(f"epilog {name or None!r} needs the inputs {list(spec.inputs)}; found {sorted(inputs)}")
    if types.fp8 and spec.operand_sum:
        raise PlanError(f"epilog {name!r} is not there for FP8: sum what dequantize returns")
    taken = {"a", "b", "c", "scale_a", "scale_b", "scale_c", "scale_d"}
    if not taken.isdisjoint(inputs) or not all(str(key).isidentifier() for key in inputs):
        raise PlanError(f"inputs must have names of their own, not a, b or c; found {sorted(map(str, inputs))}")
    with_c = c is not None and complex(*spec.beta) != 0
    extras = [("c", _fit("c", c, a, b, dtype))] if with_c else []
    fitting = [(key, _fit(key, inputs[key], a, b, dtype)) for key in spec.inputs]
    if function:
        _try(function, sum_dtype(types.operand, dtype, 1), dtype, fitting)
    spec, factors_too = scaled(types, spec, scales, c is not None)
    return spec, extras + fitting + [(key, array) for key, array in factors_too if key != "scale_c" or with_c]


def _try(function: Callable[..., Any], inner: np.dtype, dtype: np.dtype, inputs: Extras) -> None:
    """Call a function on small arrays of zeros: what is wrong with it is found before anything moves."""
    shape = (*(1,) * max((array.ndim - 2 for _, array in inputs), default=0), 2, 3)
    small = {
        name: np.zeros(
            [1 if n == 1 else size for n, size in zip(array.shape, shape[-array.ndim :], strict=True)], array.dtype
        )
        for name, array in inputs
    }
    asked = f"epilog {getattr(function, '__name__', function)!r} must return an array like its first argument"
    try:
        with np.errstate(all="ignore"):
            found = np.asanyarray(function(np.zeros(shape, inner), **small))
    except Exception as error:
        raise PlanError(f"{asked}; on zeros of the shape {shape} it raised {type(error).__name__}: {error}") from error
    if np.shape(found) != shape or (found.dtype.kind == "c" and dtype.kind != "c"):
        raise PlanError(f"{asked}; for {inner} of the shape {shape} it returned {found.dtype} of {np.shape(found)}")


def _fit(name: str, value: Any, a: da.Array, b: da.Array, dtype: np.dtype) -> da.Array:
    """Return an input as a matrix, or a batch of them, that broadcasts against D."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    array, shape = as_array(value), (*batch, a.shape[-2], b.shape[-1])
    if array.ndim < 2:
        array = array.reshape((1, -1)) if array.ndim else array.reshape((1, 1))
    whole = name in ("relu_aux", "gelu_aux")
    good = array.ndim == len(shape) or (array.ndim < len(shape) and not whole)
    good = good and all(
        n == size or (n == 1 and not whole) for n, size in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not good:
        expected = f"{shape}" if whole else f"one that broadcasts to {shape}, as ({shape[-1]},) or ({shape[-2]}, 1) do"
        raise PlanError(f"{name} has the shape {np.shape(value)}; expected {expected}")
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise PlanError(f"{name} is {array.dtype}; A @ B is {dtype}: convert one of them")
    return array


def why_not_input(array: da.Array) -> str | None:
    """Return why an input can't take part in a run, or None if it can."""
    if array_kind(array._meta) not in ("numpy", "cupy") or not supported(array.dtype):
        return f"no engine takes {array_kind(array._meta)} arrays of {array.dtype}"
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        return "its chunk sizes are unknown"
    return None


def unfit(extras: Extras) -> str | None:
    """Return why some input can't take part in a run, with its name, or None if all can."""
    return next((f"{name}: {reason}" for name, array in extras if (reason := why_not_input(array))), None)


def result(
    problem: Problem,
    a: da.Array,
    b: da.Array,
    extras: Sequence[da.Array],
) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return what a run returns: D, and the auxiliary outputs if there are any.

    A and B are those of `make_problem`.
    """
    prototype = b._meta if array_kind(b._meta) == "cupy" else a._meta
    meta = meta_from_array(prototype, ndim=2, dtype=carried(problem.dtype, problem.array))
    lying_a, lying_b = map(under, (a, b), problem.arrays, problem.turned)
    graph = build_graph(problem, lying_a, lying_b, extras)
    d = Array(graph, problem.name, problem.out_chunks, meta=meta)
    return d if problem.finish.plain else outputs(problem, d, a, b)


def outputs(problem: Problem, d: da.Array, a: da.Array, b: da.Array) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return D and the auxiliary outputs of a run by name; D alone if there are none."""
    spec = problem.finish
    found: dict[str, da.Array] = {}
    for name in spec.per_element:
        dtype = spec.dtype_of(name, problem.result_type)
        chunks = tuple(
            sizes if kept else (1,) * len(sizes)
            for sizes, kept in zip(problem.out_chunks, spec.keeps(name), strict=True)
        )
        meta = output_meta(d, dtype)
        array = reducible(Array(build_output(problem, name, d), output_name(problem.name, name), chunks, meta=meta))
        if name == spec.sums:
            array = array.sum(axis=spec.sum_axis, dtype=dtype).astype(problem.result_type)
        found[name] = array.max() if name == "result_amax" else array
    if spec.operand_sum:
        found[spec.operand_sum] = operand_sum(spec, a, b, problem.result_type)
    return (d, found) if found else d


def output_meta(d: da.Array, dtype: np.dtype) -> Any:
    """Return the meta of an auxiliary output in chunks like those of D."""
    # NumPy warns when complex numbers become real, even if there are none.
    return meta_from_array(d._meta if dtype.kind == "c" else d._meta.real, dtype=dtype)


def _mapped(spec: Finish, x: da.Array, extras: Extras) -> da.Array:
    """Apply a user's function chunk by chunk, as a run does."""
    names = [name for name, _ in extras]

    def apply(part: Any, *inputs: Any) -> Any:
        return elementwise(np, spec, part, dict(zip(names, inputs, strict=True)))[0]

    return da.core.elemwise(apply, x, *(array for _, array in extras), dtype=x.dtype)


def operand_sum(spec: Finish, a: da.Array, b: da.Array, dtype: np.dtype) -> da.Array:
    """Return op(A) or op(B) summed over k, in the type of D."""
    array, axis = (a, -1) if spec.operand_sum == "bgrada" else (b, -2)
    return reducible(array).astype(compute_dtype(dtype, a.shape[-1])).sum(axis=axis).astype(dtype)


def without_a_run(
    a: da.Array, b: da.Array, spec: Finish, extras: Extras, types: Types
) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return what a run would, made of Dask's own operations, where no run is possible."""
    dtype = dtype_from_name(types.d)
    inner = sum_dtype(types.operand, dtype, max(1, a.shape[-1]))
    if types.usual:
        wide = dask_matmul(a, b).astype(inner)
    else:
        wide = dask_matmul(widened(a, types.a, inner), widened(b, types.b, inner))
    if spec.function:
        d, *saved = [_mapped(spec, wide, extras)]
    else:
        d, *saved = elementwise(da, spec, wide, dict(extras))
    aux = dict(zip([spec.saved], saved, strict=False)) | reductions(da, dataclasses.replace(spec, amax=False), d)
    found = {
        name: array.astype(dtype if name == spec.sums and types.d not in FP8 else spec.dtype_of(name, dtype))
        for name, array in aux.items()
    }
    if spec.sums:
        found[spec.sums] = found[spec.sums].squeeze(spec.sum_axis - 2)
    if spec.amax:
        found["result_amax"] = abs(d).max() if d.size else da.zeros((), dtype=abs(d).dtype)
    d = scaled_result(spec, d, dict(extras))
    kind = array_kind(d._meta)
    meta = meta_from_array(d._meta, dtype=carried(types.d, kind))
    d = da.map_blocks(_stored, d, to=types.d, dtype=meta.dtype, meta=meta)
    if spec.operand_sum:
        found[spec.operand_sum] = operand_sum(spec, a, b, dtype)
    return (d, found) if found else d


def _stored(x: Any, to: str) -> Any:
    let_types_travel()
    if array_kind(x) != "cupy":
        return stored(np, x, to, fp8_bytes=False)
    import cupy as cp

    return stored(cp, x, to, fp8_bytes=True)
