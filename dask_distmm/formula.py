"""All of ``D = F(alpha * op(A) @ op(B) + beta * C)`` but the product, as Dask arrays: checks, inputs, outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from dask_distmm.chunks import array_kind
from dask_distmm.dtypes import compute_dtype, supported
from dask_distmm.epilog import Finish, finish
from dask_distmm.errors import PlanError
from dask_distmm.graph import build_output
from dask_distmm.keys import output_name
from dask_distmm.plan import Problem

__all__ = ["apply_op", "operand_sum", "output_meta", "outputs", "parse", "why_not", "without_a_run"]

Extras = Sequence[tuple[str, da.Array]]


def apply_op(name: str, array: da.Array, op: str) -> da.Array:
    """Return op(array): views of its chunks, but for conjugates of complex ones."""
    if op not in ("N", "T", "C"):
        raise PlanError(f"op_{name}={op!r}; expected 'N', 'T' or 'C'")
    if op == "N":
        return array
    if array.ndim < 2:
        raise PlanError(f"op_{name}={op!r}: {name.upper()} has {array.ndim} dimensions, transposed are matrices of 2")
    turned = array.swapaxes(-1, -2)
    return turned.conj() if op == "C" and array.dtype.kind == "c" else turned


def parse(
    a: da.Array,
    b: da.Array,
    c: Any,
    alpha: complex,
    beta: complex | None,
    epilog: str | None,
    inputs: Mapping[str, Any],
    bias_axis: int,
    amax: bool,
) -> tuple[Finish, list[tuple[str, da.Array]]]:
    """Return the formula, and the arrays that it reads beside A and B, each of two dimensions or more.

    Raises
    ------
    PlanError
        Something is missing, too much, unknown, or does not fit D.
    """
    if beta is None and c is not None:
        raise PlanError("c was given without beta; give beta=1 to add C")
    if c is None and beta is not None and beta != 0:
        raise PlanError(f"beta={beta!r} needs c")
    dtype = np.result_type(a.dtype, b.dtype)
    factors = []
    for name, value in (("alpha", alpha), ("beta", 0.0 if beta is None else beta)):
        try:
            number = complex(value)
        except (TypeError, ValueError):
            raise PlanError(f"{name}={value!r}; expected a number") from None
        if number.imag and dtype.kind != "c":
            raise PlanError(f"{name}={value!r} is complex; A @ B is {dtype}: convert one of them to a complex type")
        factors.append((number.real, number.imag))
    if epilog is not None and not isinstance(epilog, str):
        raise PlanError(f"epilog={epilog!r}; expected a name or an Epilog")
    name = "" if epilog is None else str(getattr(epilog, "value", epilog)).lower()
    spec = Finish(factors[0], factors[1], name, bias_axis, bool(amax))
    if spec.plain and not inputs:
        return spec, []
    if a.ndim < 2 or b.ndim < 2:
        raise PlanError(f"alpha, C and epilogs need matrices; found {a.ndim} and {b.ndim} dimensions")
    floating = dtype.kind in "fc" or dtype.name == "bfloat16"
    if not floating:
        raise PlanError(f"alpha, C and epilogs need floating-point matrices; A @ B is {dtype}: convert them")
    if dtype.kind == "c" and (spec.activation or spec.gradient):
        raise PlanError(f"epilog {name!r} is not defined for complex numbers; A @ B is {dtype}")
    if set(inputs) != set(spec.inputs):
        raise PlanError(f"epilog {name or None!r} needs the inputs {list(spec.inputs)}; found {sorted(inputs)}")
    extras = [("c", _fit("c", c, a, b))] if c is not None and complex(*spec.beta) != 0 else []
    return spec, extras + [(key, _fit(key, inputs[key], a, b)) for key in spec.inputs]


def _fit(name: str, value: Any, a: da.Array, b: da.Array) -> da.Array:
    """Return an input as a matrix, or a batch of them, that broadcasts against D."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    array, shape = da.asanyarray(value), (*batch, a.shape[-2], b.shape[-1])
    if array.ndim < 2:
        array = array.reshape((1, -1)) if array.ndim else array.reshape((1, 1))
    whole = name.endswith("_aux")
    good = array.ndim == len(shape) or (array.ndim < len(shape) and not whole)
    good = good and all(
        n == size or (n == 1 and not whole) for n, size in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not good:
        expected = f"{shape}" if whole else f"one that broadcasts to {shape}, as ({shape[-1]},) or ({shape[-2]}, 1) do"
        raise PlanError(f"{name} has the shape {np.shape(value)}; expected {expected}")
    dtype = np.result_type(a.dtype, b.dtype)
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise PlanError(f"{name} is {array.dtype}; A @ B is {dtype}: convert one of them")
    return array


def why_not(array: da.Array) -> str | None:
    """Return why an input can't take part in a run, or None if it can."""
    if array_kind(array._meta) not in ("numpy", "cupy") or not supported(array.dtype):
        return f"no engine takes {array_kind(array._meta)} arrays of {array.dtype}"
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        return "its chunk sizes are unknown"
    return None


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
        array = da.Array(build_output(problem, name, d), output_name(problem.name, name), chunks, meta=meta)
        if name == spec.sums:
            array = array.sum(axis=spec.sum_axis, dtype=dtype)
        found[name] = array.max() if name == "result_amax" else array
    if spec.operand_sum:
        found[spec.operand_sum] = operand_sum(spec, a, b)
    return (d, found) if found else d


def output_meta(d: da.Array, dtype: np.dtype) -> Any:
    """Return the meta of an auxiliary output in chunks like those of D."""
    # NumPy warns when complex numbers become real, even if there are none.
    return meta_from_array(d._meta if dtype.kind == "c" else d._meta.real, dtype=dtype)


def operand_sum(spec: Finish, a: da.Array, b: da.Array) -> da.Array:
    """Return op(A) or op(B) summed over k, in the type of D."""
    dtype = np.result_type(a.dtype, b.dtype)
    array, axis = (a, -1) if spec.operand_sum == "bgrada" else (b, -2)
    return array.astype(compute_dtype(dtype, a.shape[-1])).sum(axis=axis).astype(dtype)


def without_a_run(
    product: da.Array, a: da.Array, b: da.Array, spec: Finish, extras: Extras
) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return what a run would, made of Dask's own operations, where no run is possible."""
    dtype = product.dtype
    wide = product.astype(compute_dtype(dtype, max(1, a.shape[-1])))
    d, aux = finish(da, dataclasses.replace(spec, amax=False), wide, dict(extras))
    d = d.astype(dtype)
    found = {name: array if array.dtype.kind == "b" else array.astype(dtype) for name, array in aux.items()}
    if spec.sums:
        found[spec.sums] = found[spec.sums].squeeze(spec.sum_axis - 2)
    if spec.amax:
        found["result_amax"] = abs(d).max() if d.size else da.zeros((), dtype=abs(d).dtype)
    if spec.operand_sum:
        found[spec.operand_sum] = operand_sum(spec, a, b)
    return (d, found) if found else d
