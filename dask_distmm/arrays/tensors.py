"""Tensors of PyTorch, and arrays of other packages that speak DLPack, as NumPy or CuPy arrays of the same memory.

Neither NumPy nor CuPy takes tensors of bfloat16 and FP8 by DLPack: these are passed as integers of as many bits, and
seen as their type again on the other side.
"""

from __future__ import annotations

import sys
from typing import Any

import dask.array as da
import numpy as np
from distributed import get_worker

from dask_distmm.comms.serializers import register_serializers
from dask_distmm.errors import PlanError
from dask_distmm.numeric.types import FP8, dtype_from_name
from dask_distmm.runtime.chunks import array_kind

# Types that DLPack does not carry everywhere, and those of as many bits that it does.
_CARRIED = {"bfloat16": "int16", **dict.fromkeys(FP8, "uint8")}
# As DLPack numbers devices.
_CPU, _CUDA = 1, 2


def is_tensor(x: Any) -> bool:
    """Whether this is a tensor of PyTorch, which is never imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def shared_array(x: Any) -> Any:
    """Return an array or tensor that speaks DLPack as a NumPy or CuPy array of the same memory; others as they are."""
    if is_tensor(x):
        register_serializers()
        return _of_tensor(x)
    if isinstance(x, np.ndarray) or array_kind(x) == "cupy" or not hasattr(x, "__dlpack_device__"):
        return x
    try:
        return _from_dlpack(x, x.__dlpack_device__()[0])
    except (BufferError, TypeError, RuntimeError, ValueError):
        return x  # of a type that DLPack does not carry; NumPy may take it in another way


def _of_tensor(x: Any) -> Any:
    if x.requires_grad:
        raise PlanError(
            "the operand is a tensor that requires grad, and nothing here is recorded for autograd: pass x.detach(), "
            "or write a torch.autograd.Function as in docs/examples/linear_layer.py"
        )
    if x.layout != sys.modules["torch"].strided or x.device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"the operand is a tensor of layout {x.layout} on device {x.device}; expected a dense one on cpu or cuda: "
            "pass x.to_dense(), x.cpu()"
        )
    name = _name_of(x.dtype)
    x = x.resolve_conj().resolve_neg()
    carrier = _CARRIED.get(name)
    if carrier is None:
        return _from_dlpack(x, _CUDA if x.is_cuda else _CPU)
    found = _from_dlpack(x.view(getattr(sys.modules["torch"], carrier)), _CUDA if x.is_cuda else _CPU)
    # CuPy has no FP8: there it stays uint8, and `a_type` and `b_type` say what it is.
    return found if x.is_cuda and name in FP8 else found.view(dtype_from_name(name))


def _from_dlpack(x: Any, device: int) -> Any:
    if device == _CPU:
        return np.from_dlpack(x)
    if device != _CUDA:
        raise BufferError(f"device {device}")
    import cupy

    return cupy.from_dlpack(x)


def _name_of(dtype: Any) -> str:
    """Return NumPy's name of a type of PyTorch."""
    return str(dtype).removeprefix("torch.")


def tensor_of(array: Any) -> Any:
    """Return a NumPy or CuPy array as a tensor of the same memory; a copy of one that may not be written to."""
    import torch

    register_serializers()
    name = array.dtype.name
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        # A tensor can't be read-only.
        array = array.copy()
    carrier = _CARRIED.get(name)
    if carrier is None:
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(carrier)).view(getattr(torch, name))


def tensor_meta(meta: Any) -> Any:
    """Return the meta of a Dask array whose chunks are to be tensors, from that of one with NumPy or CuPy chunks."""
    return tensor_of(np.empty((0,) * meta.ndim, meta.dtype) if array_kind(meta) != "cupy" else meta)


def to_torch(array: da.Array | str, worker: Any = None) -> dict[tuple[int, ...], Any]:
    """Return the chunks of a persisted array that lie in this worker's process, as tensors of the same memory.

    For code that runs on the workers, in a task or by ``client.run``, as the ranks of a `torch.distributed` program.

    Parameters
    ----------
    array : dask.array.Array or str
        The array, or its name, which is all that has to travel to the workers: ``D.name``.
    worker : distributed.Worker, optional
        Of this process, as ``client.run`` gives functions with an argument ``dask_worker``. In a task it is known.

    Returns
    -------
    dict
        The tensors by their chunk's number along each axis; no item for chunks on other workers. They are the chunks
        that Dask has: changes of them are changes of the array. A chunk that may not be written to is copied.

    Raises
    ------
    PlanError
        The call is outside a task, and no worker was given. Also a ValueError.

    Examples
    --------
    >>> def largest(name, dask_worker):
    ...     return {index: float(x.max()) for index, x in dask_distmm.to_torch(name, dask_worker).items()}
    >>> client.run(largest, D.name)  # doctest: +SKIP
    """
    try:
        worker = worker or get_worker()
    except ValueError:
        raise PlanError(
            "to_torch() returns chunks of the calling worker, but this process is not a worker: call it in a task, "
            "or by client.run(f, D.name), where f(name, dask_worker) calls to_torch(name, dask_worker)"
        ) from None
    name = array if isinstance(array, str) else array.name
    here = [key for key in list(worker.data) if isinstance(key, tuple) and key[0] == name]
    return {key[1:]: x if is_tensor(x := worker.data[key]) else tensor_of(x) for key in here}
