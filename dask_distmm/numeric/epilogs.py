"""The formula that is applied to the product before it is stored: scaling, C, bias, activations, gradients. Pure.

With ``acc = op(A) @ op(B)`` (in the type that is summed in)::

    x = alpha * acc + beta * C  (+ bias)
    D = F(x)

A run that continues with the sums of an earlier one (``Formula.partial``) adds them to ``acc`` before all else.

The names are those of cuBLASMp's epilogs, as nvmath-python spells them; all others follow their pattern.

==================  ================================================  ==========================================
F                   formula                                           source
==================  ================================================  ==========================================
relu                max(x, 0)
gelu                x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))     Hendrycks and Gimpel, 2016 (the tanh form,
                                                                      as cuBLASLt computes it)
leaky_relu          x where x > 0, else slope * x                     slope 0.01
tanh, sigmoid       tanh(x), 1 / (1 + exp(-x))
silu                x * sigmoid(x)
hardswish           x * min(max(x + 3, 0), 6) / 6                     Howard and others, 2019
clamp               min(max(x, low), high)                            low 0, high 6
drelu, dgelu        x * relu'(saved), x * gelu'(saved)                the backward pass of relu and gelu
==================  ================================================  ==========================================

``allreduce`` is not a formula: all of D is kept on every worker besides, for later multiplies.

A function of the user's in place of F gets x and its own inputs: ``f(x, **inputs)``, element by element.

Auxiliary outputs: ``relu_aux`` is the mask x > 0 (bool), ``gelu_aux`` and the ``_aux`` of all others x itself (the
pre-activation). ``..._bgrad`` is the sum of D along the other axis: the gradient of a bias. ``bgrada`` sums op(A),
``bgradb`` op(B), over k.

FP8 matrices stand for their numbers times a scale each: ``alpha`` above is then ``alpha * scale_a * scale_b`` and
``beta`` is ``beta * scale_c``, and an FP8 D is stored as ``saturate(scale_d * F(x))``. Auxiliary outputs, the largest
absolute value among them, are of F(x), before ``scale_d`` (cuBLAS, "Tensorwide scaling for FP8 data types").

The names of the epilogs, for programs and for type checkers. Pure.

A type checker reads names from the text of a module and can't run code, so that each one is written out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError, call_user, page, unknown_name
from dask_distmm.numeric.types import compute_dtype, store

# The names of the epilogs, for programs and for type checkers. Pure


class Epilog(enum.StrEnum):
    """The formula that is applied to the product before it is stored; see the module `dask_distmm.numeric.epilogs`.

    A member is the text of its name in small letters, as ``Epilog.RELU_BIAS == "relu_bias"``; functions take either.
    For each F of ``RELU``, ``GELU``, ``LEAKY_RELU``, ``TANH``, ``SIGMOID``, ``SILU``, ``HARDSWISH`` and ``CLAMP`` there
    are ``F``, ``F_BIAS``, ``F_AUX`` and ``F_AUX_BIAS``. The others are ``BIAS``, ``DRELU``, ``DGELU``,
    ``DRELU_BGRAD``, ``DGELU_BGRAD``, ``BGRADA``, ``BGRADB`` and ``ALLREDUCE``.

    See Also
    --------
    matmul
    """

    ALLREDUCE = "allreduce"
    BIAS = "bias"
    DRELU = "drelu"
    DGELU = "dgelu"
    DRELU_BGRAD = "drelu_bgrad"
    DGELU_BGRAD = "dgelu_bgrad"
    BGRADA = "bgrada"
    BGRADB = "bgradb"
    RELU = "relu"
    RELU_BIAS = "relu_bias"
    RELU_AUX = "relu_aux"
    RELU_AUX_BIAS = "relu_aux_bias"
    GELU = "gelu"
    GELU_BIAS = "gelu_bias"
    GELU_AUX = "gelu_aux"
    GELU_AUX_BIAS = "gelu_aux_bias"
    LEAKY_RELU = "leaky_relu"
    LEAKY_RELU_BIAS = "leaky_relu_bias"
    LEAKY_RELU_AUX = "leaky_relu_aux"
    LEAKY_RELU_AUX_BIAS = "leaky_relu_aux_bias"
    TANH = "tanh"
    TANH_BIAS = "tanh_bias"
    TANH_AUX = "tanh_aux"
    TANH_AUX_BIAS = "tanh_aux_bias"
    SIGMOID = "sigmoid"
    SIGMOID_BIAS = "sigmoid_bias"
    SIGMOID_AUX = "sigmoid_aux"
    SIGMOID_AUX_BIAS = "sigmoid_aux_bias"
    SILU = "silu"
    SILU_BIAS = "silu_bias"
    SILU_AUX = "silu_aux"
    SILU_AUX_BIAS = "silu_aux_bias"
    HARDSWISH = "hardswish"
    HARDSWISH_BIAS = "hardswish_bias"
    HARDSWISH_AUX = "hardswish_aux"
    HARDSWISH_AUX_BIAS = "hardswish_aux_bias"
    CLAMP = "clamp"
    CLAMP_BIAS = "clamp_bias"
    CLAMP_AUX = "clamp_aux"
    CLAMP_AUX_BIAS = "clamp_aux_bias"


# fmt: off
_PlainText: TypeAlias = Literal[
    "allreduce", "bias", "drelu", "dgelu", "relu", "relu_bias", "gelu", "gelu_bias", "leaky_relu",
    "leaky_relu_bias", "tanh", "tanh_bias", "sigmoid", "sigmoid_bias", "silu", "silu_bias", "hardswish",
    "hardswish_bias", "clamp", "clamp_bias",
]
_AuxText: TypeAlias = Literal[
    "drelu_bgrad", "dgelu_bgrad", "bgrada", "bgradb", "relu_aux", "relu_aux_bias", "gelu_aux", "gelu_aux_bias",
    "leaky_relu_aux", "leaky_relu_aux_bias", "tanh_aux", "tanh_aux_bias", "sigmoid_aux", "sigmoid_aux_bias",
    "silu_aux", "silu_aux_bias", "hardswish_aux", "hardswish_aux_bias", "clamp_aux", "clamp_aux_bias",
]
# Epilogs with which D is all that is returned, and those with an auxiliary output.
PlainEpilog: TypeAlias = _PlainText | Literal[
    Epilog.ALLREDUCE, Epilog.BIAS, Epilog.DRELU, Epilog.DGELU, Epilog.RELU, Epilog.RELU_BIAS, Epilog.GELU,
    Epilog.GELU_BIAS, Epilog.LEAKY_RELU, Epilog.LEAKY_RELU_BIAS, Epilog.TANH, Epilog.TANH_BIAS, Epilog.SIGMOID,
    Epilog.SIGMOID_BIAS, Epilog.SILU, Epilog.SILU_BIAS, Epilog.HARDSWISH, Epilog.HARDSWISH_BIAS, Epilog.CLAMP,
    Epilog.CLAMP_BIAS,
]
AuxEpilog: TypeAlias = _AuxText | Literal[
    Epilog.DRELU_BGRAD, Epilog.DGELU_BGRAD, Epilog.BGRADA, Epilog.BGRADB, Epilog.RELU_AUX, Epilog.RELU_AUX_BIAS,
    Epilog.GELU_AUX, Epilog.GELU_AUX_BIAS, Epilog.LEAKY_RELU_AUX, Epilog.LEAKY_RELU_AUX_BIAS, Epilog.TANH_AUX,
    Epilog.TANH_AUX_BIAS, Epilog.SIGMOID_AUX, Epilog.SIGMOID_AUX_BIAS, Epilog.SILU_AUX, Epilog.SILU_AUX_BIAS,
    Epilog.HARDSWISH_AUX, Epilog.HARDSWISH_AUX_BIAS, Epilog.CLAMP_AUX, Epilog.CLAMP_AUX_BIAS,
]
# fmt: on
# All of them. Type checkers print it in half the room that the two above take.
AnyEpilog: TypeAlias = _PlainText | _AuxText | Epilog

# The formula that is applied to the product before it is stored: scaling, C, bias, activations, gradients. Pure


_NAMES = tuple(epilog.value for epilog in Epilog)
_SQRT_2_OVER_PI = 0.7978845608028654
# NumPy works on so much at a time: it stays in a core's cache from one operation to the next.
_BLOCK_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Formula:
    """All of the formula but the product, as plain values.

    Parameters
    ----------
    alpha, beta
        Factors of the product and of C: real and imaginary part.
    epilog
        Its name; empty for none.
    bias_axis
        -1 or 1: bias gradients keep D's columns; 0: they keep its rows.
    amax
        Whether the largest absolute value of D is wanted too.
    function, names
        A function in place of `epilog`, pickled, and the names of its inputs.
    scale_d
        Factor of D after everything else.
    scales
        Which of ``"scale_a"`` to ``"scale_d"`` are further inputs, of one element; others are in the factors.
    partial
        Whether the input ``"partial"`` has sums over other parts of k, which are added to the product.
    """

    alpha: tuple[float, float] = (1.0, 0.0)
    beta: tuple[float, float] = (0.0, 0.0)
    epilog: str = ""
    bias_axis: int = -1
    amax: bool = False
    function: bytes = b""
    names: tuple[str, ...] = ()
    scale_d: float = 1.0
    scales: tuple[str, ...] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.epilog and self.epilog not in _NAMES:
            raise PlanError(unknown_name("epilog", self.epilog, _NAMES, page("epilogs")))
        if self.bias_axis not in (-1, 0, 1):
            raise PlanError(f"bias_axis={self.bias_axis!r}; expected -1 (one value per column of D) or 0 (one per row)")

    @property
    def trivial(self) -> bool:
        """Whether D is just the product."""
        return not self.scaled and not self.function and self.epilog in ("", "allreduce", "bgrada", "bgradb")

    @property
    def plain(self) -> bool:
        """Whether nothing but D is returned, and D is just the product."""
        return self.trivial and self.epilog in ("", "allreduce")

    @property
    def replicated(self) -> bool:
        """Whether all of D is kept on every worker, besides the chunks that Dask has."""
        return self.epilog == "allreduce"

    @property
    def scaled(self) -> bool:
        """Whether factors, scales or earlier sums do anything, or the largest value is wanted."""
        factors = complex(*self.alpha) != 1 or complex(*self.beta) != 0 or self.scale_d != 1
        return factors or self.amax or bool(self.scales) or self.partial

    @property
    def activation(self) -> str:
        """Name of F; empty for none."""
        return next((name for name in sorted(_ACTIVATIONS, key=len, reverse=True) if self.epilog.startswith(name)), "")

    @property
    def gradient(self) -> str:
        """Name of the activation whose backward pass this is; empty for none."""
        return self.epilog[1:5] if self.epilog.startswith(("drelu", "dgelu")) else ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the epilog needs."""
        if self.gradient:
            return (f"{self.gradient}_aux",)
        return ("bias",) if self.epilog.endswith("bias") else self.names

    @property
    def saved(self) -> str:
        """Name of the auxiliary output that is as large as D; empty for none."""
        return f"{self.activation}_aux" if "_aux" in self.epilog else ""

    @property
    def sums(self) -> str:
        """Name of the auxiliary output that sums D along an axis; empty for none."""
        return self.epilog if self.epilog.endswith("_bgrad") else ""

    @property
    def sum_axis(self) -> int:
        """The axis of D that `sums` adds up; the gradient keeps the other one, along which it is a gradient."""
        return 1 if self.bias_axis == 0 else 0

    @property
    def operand_sum(self) -> str:
        """Name of the auxiliary output that sums an operand over k; empty for none."""
        return self.epilog if self.epilog in ("bgrada", "bgradb") else ""

    @property
    def per_element(self) -> tuple[str, ...]:
        """Names of the auxiliary outputs that the run makes, chunk by chunk of D."""
        return tuple(name for name in (self.saved, self.sums, "result_amax" if self.amax else "") if name)

    def keeps(self, name: str) -> tuple[bool, bool]:
        """Whether a part of one of `per_element` is as long as D's part along its rows and columns; else it is 1."""
        if name == self.sums:
            return self.sum_axis == 1, self.sum_axis == 0
        return (True, True) if name == self.saved else (False, False)

    def dtype_of(self, name: str, dtype: np.dtype) -> np.dtype:
        """Type of one of `per_element`, where D is of type `dtype`: sums are kept in the type that is summed in."""
        if name == "relu_aux":
            return np.dtype(bool)
        wide = np.dtype(np.float32) if dtype.itemsize == 1 else compute_dtype(dtype, 1)
        if name == self.saved:
            return wide if dtype.itemsize == 1 else dtype
        return np.empty(0, wide).real.dtype if name == "result_amax" else wide


PLAIN = Formula()


def elementwise(
    xp: Any, formula: Formula, acc: Any, inputs: Mapping[str, Any], factors: tuple[Any, Any] | None = None
) -> tuple[Any, ...]:
    """Apply the formula to a part of the product, element by element.

    Parameters
    ----------
    xp
        The array module: numpy, cupy or dask.array.
    formula
        The formula.
    acc
        A part of op(A) @ op(B), a matrix or a stack of them, in the type that is summed in.
    inputs
        ``"c"``, ``"partial"``, the epilog's inputs and `Formula.scales`, each broadcast against `acc`.
    factors
        alpha and beta in the type of `acc`; those of `formula` if None.

    Returns
    -------
    D in the type of `acc`, and the output that `Formula.saved` names, if there is one.
    """
    x, dtype = acc, acc.dtype
    alpha, beta = factors or scalars(formula, dtype)
    if formula.partial:
        x = x + inputs["partial"].astype(dtype)
    if complex(*formula.alpha) != 1:
        x = x * alpha
    for name in ("scale_a", "scale_b"):
        if name in formula.scales:
            x = x * inputs[name].astype(dtype)
    if complex(*formula.beta) != 0:
        # Not read at all for beta == 0: C may hold NaN then.
        c = inputs["c"].astype(dtype) * beta
        x = x + (c * inputs["scale_c"].astype(dtype) if "scale_c" in formula.scales else c)
    if formula.function:
        d = call_function(formula.function, "epilog", x, **{name: inputs[name] for name in formula.names})
        return (d.astype(dtype),)
    if "bias" in formula.inputs:
        x = x + inputs["bias"].astype(dtype)
    if formula.gradient == "relu":
        return (xp.where(inputs["relu_aux"].astype(bool), x, dtype.type(0)),)
    if formula.gradient == "gelu":
        return (x * _gelu_slope(xp, inputs["gelu_aux"].astype(dtype)),)
    d = _ACTIVATIONS[formula.activation](xp, x) if formula.activation else x
    if formula.saved:
        return d, (x > 0) if formula.activation == "relu" else x
    return (d,)


def reductions(xp: Any, formula: Formula, d: Any) -> dict[str, Any]:
    """Return the auxiliary outputs that sum up a part of D: summed axes have length 1."""
    sums = {}
    if formula.sums:
        sums[formula.sums] = d.sum(axis=formula.sum_axis - 2, keepdims=True)
    if formula.amax:
        sums["result_amax"] = abs(d).max(keepdims=True) if d.size else xp.zeros((1,) * d.ndim, d.real.dtype)
    return sums


def scaled(formula: Formula, d: Any, inputs: Mapping[str, Any]) -> Any:
    """Return D times its scale, which comes last: the outputs kept beside D are not scaled."""
    if formula.scale_d != 1:
        d = d * d.dtype.type(formula.scale_d)
    return d * inputs["scale_d"].astype(d.dtype) if "scale_d" in formula.scales else d


def finish(xp: Any, formula: Formula, acc: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Apply the formula; return D in the type of `acc`, and auxiliary outputs by name. Parameters as `elementwise`."""
    d, *saved = elementwise(xp, formula, acc, inputs)
    aux = dict(zip([formula.saved], saved, strict=False)) | reductions(xp, formula, d)
    return scaled(formula, d, inputs), aux


def finish_by_rows(
    formula: Formula, acc: Any, inputs: Mapping[str, Any], out: NDArray[Any], aux_out: Mapping[str, Any]
) -> None:
    """Apply the formula to a NumPy array, a few rows at a time.

    D, which may lie over the sums, is stored in `out`, auxiliary outputs in `aux_out`. Parameters as `elementwise`.
    """
    step = max(1, _BLOCK_BYTES // max(1, acc.shape[1] * acc.itemsize))
    reduced: dict[str, Any] = {}
    for top in range(0, len(acc), step):
        rows = slice(top, top + step)
        parts = {name: x[rows] if len(x) == len(acc) else x for name, x in inputs.items()}
        d, aux = finish(np, formula, acc[rows], parts)
        for name, values in aux.items():
            if formula.keeps(name)[0]:
                aux_out[name][rows] = values
            else:
                together = np.maximum if name == "result_amax" else np.add
                reduced[name] = together(reduced[name], values) if name in reduced else values.copy()
        store(out[rows], d)
    for name, values in reduced.items():
        aux_out[name][...] = values


def call_function(pickled: bytes, role: str, *args: Any, **kwargs: Any) -> Any:
    """Call a user's function, which was given as `role`."""
    function = call_user("function", f"the function given as {role} can't be unpickled", _load, pickled)
    what = f"the {role} {getattr(function, '__name__', type(function).__name__)} has failed"
    return call_user("function", what, function, *args, **kwargs)


_load = functools.lru_cache(maxsize=64)(pickle.loads)


def scalars(formula: Formula, dtype: Any) -> tuple[Any, Any]:
    """Return alpha and beta in a type."""
    alpha, beta = (
        dtype.type(complex(*value) if dtype.kind == "c" else value[0]) for value in (formula.alpha, formula.beta)
    )
    return alpha, beta


def _sigmoid(xp: Any, x: Any) -> Any:
    # By way of tanh: exp(-x) would overflow.
    return 0.5 * (1 + xp.tanh(0.5 * x))


def _gelu_slope(xp: Any, x: Any) -> Any:
    """Return the derivative of gelu."""
    t = xp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    inner = _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


_ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda xp, x: xp.maximum(x, 0),
    "gelu": _gelu,
    "leaky_relu": lambda xp, x: xp.where(x > 0, x, 0.01 * x),
    "tanh": lambda xp, x: xp.tanh(x),
    "sigmoid": _sigmoid,
    "silu": lambda xp, x: x * _sigmoid(xp, x),
    "hardswish": lambda xp, x: x * xp.clip(x + 3, 0, 6) / 6,
    "clamp": lambda xp, x: xp.clip(x, 0, 6),
}
