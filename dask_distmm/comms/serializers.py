"""Narrow types between processes: Dask's serializers name some so that nobody can read them, or refuse them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from typing import Any

import numpy as np
from distributed.protocol import dask_serialize
from distributed.protocol.cuda import cuda_serialize

from dask_distmm.numeric.types import FP8


def register_serializers() -> None:
    """Let this process send NumPy arrays of float8_e5m2, CuPy arrays of bfloat16, and tensors of both. May be repeated.

    Only how these are sent is changed, in ways that Dask's own deserializers read, wherever they are.
    """
    _let_e5m2_travel()
    if "cupy" in sys.modules:
        with contextlib.suppress(ImportError):  # without RMM or Numba Dask sends no CuPy arrays at all
            _let_bfloat16_travel()
    if "torch" in sys.modules:
        _let_narrow_tensors_travel()


@functools.cache
def _let_e5m2_travel() -> None:
    """Dask names the type ``"<f1"``, which NumPy does not know.

    Types of ml_dtypes that call themselves void, as all others of 8 bits do, are pickled; here this one is too.
    """
    serialize, e5m2 = dask_serialize.dispatch(np.ndarray), FP8["float8_e5m2"]

    def serialize_array(x: Any, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
        if x.dtype != e5m2:
            return serialize(x, context=context)  # type: ignore[no-any-return]
        header, frames = serialize(x.view(np.uint8), context=context)
        return header | {"dtype": (1, pickle.dumps(e5m2))}, frames

    dask_serialize.register(np.ndarray)(serialize_array)


@functools.cache
def _let_bfloat16_travel() -> None:
    """CuPy's array interface tells the type as ``"<V2"``, two bytes of nothing in particular; by name it is found."""
    array_type = importlib.import_module("cupy").ndarray
    # It replaces what is registered when it is imported first.
    importlib.import_module("distributed.protocol.cupy")
    for registry in (dask_serialize, cuda_serialize):
        registry.register(array_type)(_with_bfloat16(registry.dispatch(array_type)))


@functools.cache
def _let_narrow_tensors_travel() -> None:
    """Dask sends tensors as NumPy arrays, which PyTorch does not make of its narrow types; these are pickled."""
    torch = importlib.import_module("torch")
    # It replaces what is registered when it is imported first.
    importlib.import_module("distributed.protocol.torch")
    serialize = dask_serialize.dispatch(torch.Tensor)
    narrow = {getattr(torch, name) for name in ("bfloat16", *FP8)}

    def serialize_tensor(x: Any) -> tuple[dict[str, Any], list[Any]]:
        if x.dtype in narrow:
            raise NotImplementedError(f"{x.dtype} is left to pickle")
        return serialize(x)  # type: ignore[no-any-return]

    dask_serialize.register(torch.Tensor)(serialize_tensor)


def _with_bfloat16(serialize: Any) -> Any:
    def serialize_array(x: Any) -> tuple[dict[str, Any], list[Any]]:
        header, frames = serialize(x)
        return (header | {"typestr": "bfloat16"} if x.dtype.name == "bfloat16" else header), frames

    return serialize_array
