"""The names of the epilogs, for programs and for type checkers. Pure.

A type checker reads names from the text of a module and can't run code, so that each one is written out.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias


class Epilog(enum.StrEnum):
    """The formula that is applied to the product before it is stored; see the module `dask_distmm.numeric.epilogs`.

    A member is the text of its name in small letters, as ``Epilog.RELU_BIAS == "relu_bias"``; functions take either.
    For each F of ``RELU``, ``GELU``, ``LEAKY_RELU``, ``TANH``, ``SIGMOID``, ``SILU``, ``HARDSWISH`` and ``CLAMP`` there
    are ``F``, ``F_BIAS``, ``F_AUX`` and ``F_AUX_BIAS``. The others are ``BIAS``, ``DRELU``, ``DGELU``,
    ``DRELU_BGRAD``, ``DGELU_BGRAD``, ``BGRADA``, ``BGRADB`` and ``ALLREDUCE``.
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
