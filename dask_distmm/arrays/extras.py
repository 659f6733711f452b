"""The formula ``D = F(alpha * op(A) @ op(B) + beta * C)`` as a user gives it: checked, with the arrays it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from distributed.protocol.pickle import dumps

from dask_distmm.arrays.kinds import as_array
from dask_distmm.arrays.quantize import with_scales
from dask_distmm.errors import PlanError
from dask_distmm.numeric.epilogs import Epilog, Formula
from dask_distmm.numeric.types import Types, sum_dtype, supported
from dask_distmm.runtime.chunks import array_kind

# Arrays beside A and B by name, each of two dimensions, or more for a batch.
Extras = Sequence[tuple[str, da.Array]]

_TAKEN = {"a", "b", "c", "scale_a", "scale_b", "scale_c", "scale_d"}


@dataclasses.dataclass(frozen=True)
class Asked:
    """The formula as a user gives it; the parameters are those of `dask_distmm.matmul`."""

    c: Any
    alpha: complex
    beta: complex | None
    epilog: str | Callable[..., Any] | None
    epilog_inputs: Mapping[str, Any]
    bias_axis: int
    result_amax: bool
    quantization_scales: Mapping[str, Any] | None

    def checked(self, dtype: np.dtype) -> Formula:
        """Return the formula as plain values; `dtype` is the type of A @ B."""
        if self.beta is None and self.c is not None:
            raise PlanError("c was given without beta; pass beta=1 to add C")
        if self.c is None and self.beta is not None and self.beta != 0:
            raise PlanError(f"beta={self.beta!r} needs c; pass C too, or leave beta out")
        factors = []
        for name, value in (("alpha", self.alpha), ("beta", 0.0 if self.beta is None else self.beta)):
            try:
                number = complex(value)
            except (TypeError, ValueError):
                raise PlanError(f"{name}={value!r}; expected a number") from None
            if number.imag and dtype.kind != "c":
                raise PlanError(f"{name}={value!r} is complex; A @ B is {dtype}: convert one of them to a complex type")
            factors.append((number.real, number.imag))
        epilog = self.epilog
        if epilog is not None and not isinstance(epilog, str) and not callable(epilog):
            raise PlanError(f"epilog={epilog!r}; expected a name, an Epilog or a function")
        pickled, names = (dumps(epilog), tuple(self.epilog_inputs)) if callable(epilog) else (b"", ())
        alpha, beta = factors
        return Formula(alpha, beta, epilog_name(epilog), self.bias_axis, bool(self.result_amax), pickled, names)


def epilog_name(epilog: str | Callable[..., Any] | None) -> str:
    """Return the name of an epilog; empty for none, and for a function."""
    return "" if epilog is None or callable(epilog) else str(getattr(epilog, "value", epilog)).lower()


def parse_formula(a: da.Array, b: da.Array, asked: Asked, types: Types) -> tuple[Formula, list[tuple[str, da.Array]]]:
    """Return the formula, and the arrays that it reads beside A and B, each 2-D (or more, for a batch)."""
    formula, inputs, dtype = asked.checked(types.operand), asked.epilog_inputs, types.operand
    if formula.replicated and (a.ndim, b.ndim) != (2, 2):
        raise PlanError(f"epilog 'allreduce' is for products of matrices; found {a.ndim} and {b.ndim} dimensions")
    if formula.plain and not inputs and not types.fp8 and not asked.quantization_scales:
        return formula, []
    if a.ndim < 2 or b.ndim < 2:
        raise PlanError(f"alpha, C, epilogs and scales need matrices; found {a.ndim} and {b.ndim} dimensions")
    _check_fitting(formula, inputs, types)
    with_c = asked.c is not None and complex(*formula.beta) != 0
    extras = [("c", _broadcastable("c", asked.c, a, b, dtype))] if with_c else []
    fitting = [(key, _broadcastable(key, inputs[key], a, b, dtype)) for key in formula.inputs]
    if callable(asked.epilog):
        _call_on_zeros(asked.epilog, sum_dtype(types.operand, dtype, 1), dtype, fitting)
    formula, factors_too = with_scales(types, formula, asked.quantization_scales, asked.c is not None)
    return formula, extras + fitting + [(key, array) for key, array in factors_too if key != "scale_c" or with_c]


def _check_fitting(formula: Formula, inputs: Mapping[str, Any], types: Types) -> None:
    """Refuse a formula that is not defined for the types, and inputs that are missing or too many."""
    dtype, name = types.operand, formula.epilog
    floating = dtype.kind in "fc" or dtype.name == "bfloat16" or types.fp8
    if not floating:
        raise PlanError(
            f"alpha, C and epilogs need floating-point matrices; A @ B is {dtype}: convert them, as by "
            "astype('float64')"
        )
    if dtype.kind == "c" and (formula.activation or formula.gradient):
        raise PlanError(f"epilog {name!r} is not defined for complex numbers; A @ B is {dtype}")
    if set(inputs) != set(formula.inputs):
        raise PlanError(_wrong_inputs(formula, inputs))
    if types.fp8 and formula.operand_sum:
        raise PlanError(f"epilog {name!r} is not there for FP8: sum what dequantize returns")
    if not _TAKEN.isdisjoint(inputs) or not all(str(key).isidentifier() for key in inputs):
        raise PlanError(f"inputs must have names of their own, not a, b or c; found {sorted(map(str, inputs))}")


def _wrong_inputs(formula: Formula, inputs: Mapping[str, Any]) -> str:
    """Say which inputs an epilog needs, and which it was given."""
    name, found, needed = formula.epilog, sorted(map(str, inputs)), list(formula.inputs)
    if not name and not formula.function:
        fitting = [epilog.value for epilog in Epilog if set(Formula(epilog=epilog.value).inputs) == set(inputs)]
        given = f"epilog_inputs has {', '.join(map(repr, found))}, and no epilog reads it"
        if not fitting:
            return f"{given}: pass epilog=..., which names its inputs (docs/epilogs.md), or leave epilog_inputs out"
        known = ", ".join(map(repr, fitting[:3])) + ", ..." * (len(fitting) > 3)
        return f"{given}: pass epilog= too, one of {known}"
    example = ", ".join(f"{key!r}: ..." for key in needed)
    advice = f"pass epilog_inputs={{{example}}}" if needed else "leave epilog_inputs out"
    return f"epilog {name!r} needs the inputs {needed}, found {found}; {advice}"


def _call_on_zeros(function: Callable[..., Any], inner: np.dtype, dtype: np.dtype, inputs: Extras) -> None:
    """Call a function on small arrays of zeros, so that its mistakes are found before anything moves."""
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


def _broadcastable(name: str, value: Any, a: da.Array, b: da.Array, dtype: np.dtype) -> da.Array:
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
