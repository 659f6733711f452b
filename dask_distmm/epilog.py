r"""What happens to the product before it is stored: scaling, C, bias, activations, gradients. Pure.

With ``acc = op(A) @ op(B)`` (in the type that is summed in)::

    x = alpha * acc + beta * C  (+ bias)
    D = F(x)

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

Auxiliary outputs: ``relu_aux`` is the mask x > 0 (bool), ``gelu_aux`` and the ``_aux`` of all others x itself (the
pre-activation). ``..._bgrad`` is the sum of D along the other axis: the gradient of a bias. ``bgrada`` sums op(A),
``bgradb`` op(B), over k.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from dask_distmm.errors import PlanError

__all__ = ["PLAIN", "Epilog", "Finish", "finish", "part_shape"]

_ACTIVATIONS = ("relu", "gelu", "leaky_relu", "tanh", "sigmoid", "silu", "hardswish", "clamp")
_SQRT_2_OVER_PI = 0.7978845608028654


def _names() -> dict[str, str]:
    names = ["bias", "drelu", "dgelu", "drelu_bgrad", "dgelu_bgrad", "bgrada", "bgradb"]
    for activation in _ACTIVATIONS:
        names += [activation + suffix for suffix in ("", "_bias", "_aux", "_aux_bias")]
    return {name.upper(): name for name in names}


Epilog = enum.Enum("Epilog", _names(), type=str, module=__name__)  # type: ignore[misc]
Epilog.__doc__ = "What happens to the product before it is stored; see the module `dask_distmm.epilog`."


@dataclasses.dataclass(frozen=True)
class Finish:
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
    """

    alpha: tuple[float, float] = (1.0, 0.0)
    beta: tuple[float, float] = (0.0, 0.0)
    epilog: str = ""
    bias_axis: int = -1
    amax: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.epilog and self.epilog not in _names().values():
            known = ", ".join(map(repr, _names().values()))
            raise PlanError(f"unknown epilog {self.epilog!r}; known are {known}")
        if self.bias_axis not in (-1, 0, 1):
            raise PlanError(f"bias_axis={self.bias_axis!r}; expected -1 (a value a column of D) or 0 (a value a row)")

    @property
    def trivial(self) -> bool:
        """Whether D is just the product."""
        return not self.scaled and self.epilog in ("", "bgrada", "bgradb")

    @property
    def plain(self) -> bool:
        """Whether nothing but D is returned, and D is just the product."""
        return self.trivial and not self.epilog

    @property
    def scaled(self) -> bool:
        """Whether alpha or beta do anything, or the largest value is wanted."""
        return complex(*self.alpha) != 1 or complex(*self.beta) != 0 or self.amax

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
        return ("bias",) if self.epilog.endswith("bias") else ()

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
        """Type of one of `per_element`, where D is of type `dtype`."""
        if name == "relu_aux":
            return np.dtype(bool)
        return np.empty(0, dtype).real.dtype if name == "result_amax" else dtype


PLAIN = Finish()


def part_shape(keeps: tuple[bool, bool], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an output's part beside a part of D, from what `Finish.keeps` says."""
    return tuple(n if kept else 1 for n, kept in zip(shape, keeps, strict=True))


def finish(xp: Any, spec: Finish, acc: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Apply the formula to a part of the product.

    Parameters
    ----------
    xp
        The array module: numpy or cupy.
    spec
        The formula.
    acc
        A part of op(A) @ op(B), a matrix or a stack of them, in the type that is summed in. May be overwritten.
    inputs
        ``"c"`` and the epilog's inputs, each broadcast against `acc`.

    Returns
    -------
    D in the type of `acc`, and the auxiliary outputs by name: `Finish.saved` as large as `acc`; `Finish.sums` with the
    summed axis of length 1; ``"result_amax"`` with all axes of length 1.
    """
    real = acc.real.dtype
    if complex(*spec.alpha) != 1:
        acc *= _scalar(spec.alpha, acc.dtype)
    if complex(*spec.beta) != 0:
        # Not read at all for beta == 0: C may hold NaN then.
        acc += _scalar(spec.beta, acc.dtype) * inputs["c"].astype(acc.dtype)
    if "bias" in spec.inputs:
        acc += inputs["bias"].astype(acc.dtype)
    aux: dict[str, Any] = {}
    if spec.saved:
        aux[spec.saved] = (acc > 0) if spec.activation == "relu" else acc.copy()
    if spec.gradient == "relu":
        d = xp.where(inputs["relu_aux"].astype(bool), acc, real.type(0))
    elif spec.gradient == "gelu":
        d = acc * _gelu_slope(xp, inputs["gelu_aux"].astype(acc.dtype))
    else:
        d = _activate(xp, spec.activation, acc) if spec.activation else acc
    if spec.sums:
        aux[spec.sums] = d.sum(axis=spec.sum_axis - 2, keepdims=True)
    if spec.amax:
        one = (1,) * d.ndim
        aux["result_amax"] = abs(d).max(initial=0).reshape(one) if d.size else xp.zeros(one, real)
    return d, aux


def _scalar(value: tuple[float, float], dtype: Any) -> Any:
    return dtype.type(complex(*value) if dtype.kind == "c" else value[0])


def _activate(xp: Any, name: str, x: Any) -> Any:
    if name == "relu":
        return xp.maximum(x, 0)
    if name == "gelu":
        return 0.5 * x * (1 + xp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))
    if name == "leaky_relu":
        return xp.where(x > 0, x, 0.01 * x)
    if name == "tanh":
        return xp.tanh(x)
    if name == "sigmoid":
        return _sigmoid(xp, x)
    if name == "silu":
        return x * _sigmoid(xp, x)
    if name == "hardswish":
        return x * xp.clip(x + 3, 0, 6) / 6
    return xp.clip(x, 0, 6)


def _sigmoid(xp: Any, x: Any) -> Any:
    # By way of tanh: exp(-x) would overflow.
    return 0.5 * (1 + xp.tanh(0.5 * x))


def _gelu_slope(xp: Any, x: Any) -> Any:
    """Return the derivative of gelu."""
    t = xp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    inner = _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner
