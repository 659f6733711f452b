"""Arrays of other kinds than ``dask.array.core.Array``, in which everything here is written.

Two are made of expressions that are optimized before they become task graphs: those of Dask itself under
``array.query-planning: true``, and those of the package dask-array. `plain` makes the graph of such an array, as its
own ``persist`` would; `like` wraps what was made of it in an array of its kind again. Tasks keep their keys.

A third kind are Dask's own arrays whose chunks are tensors of PyTorch: a task a chunk, which copies nothing, turns a
tensor into a NumPy or CuPy array, and a chunk of the result into a tensor.

Tensors of PyTorch, and arrays of other packages that speak DLPack, become NumPy or CuPy arrays of the same memory.
Neither NumPy nor CuPy takes tensors of bfloat16 and FP8 by DLPack: these are passed as integers of as many bits, and
seen as their type again on the other side.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import dask.array
import dask.array as da
import dask.array.routines
import numpy as np
from dask.array.core import Array
from dask.base import is_dask_collection
from dask.core import flatten
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Future, get_worker

from dask_distmm.comms.serializers import register_serializers
from dask_distmm.errors import PlanError, page
from dask_distmm.numeric.sparse import compressed, sparse_package
from dask_distmm.numeric.types import FP8, dtype_from_name
from dask_distmm.runtime.chunks import array_kind

# Tensors


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
            f"or write a torch.autograd.Function as {page('examples')} has one"
        )
    if x.layout != sys.modules["torch"].strided or x.device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"the operand is a tensor of layout {x.layout} on device {x.device}; expected a dense one on cpu or cuda: "
            "pass x.to_dense(), x.cpu()"
        )
    name = str(x.dtype).removeprefix("torch.")
    x = x.resolve_conj().resolve_neg()
    carrier = _CARRIED.get(name)
    if carrier is None:
        return _from_dlpack(x, _CUDA if x.is_cuda else _CPU)
    array = _from_dlpack(x.view(getattr(sys.modules["torch"], carrier)), _CUDA if x.is_cuda else _CPU)
    # CuPy has no FP8: there it stays uint8, and `a_type` and `b_type` say what it is.
    return array if x.is_cuda and name in FP8 else array.view(dtype_from_name(name))


def _from_dlpack(x: Any, device: int) -> Any:
    if device == _CPU:
        return np.from_dlpack(x)
    if device != _CUDA:
        raise BufferError(f"device {device}")
    import cupy

    return cupy.from_dlpack(x)


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

    See Also
    --------
    matmul, distribute

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


# Arrays


P = ParamSpec("P")
T = TypeVar("T")


def planning() -> bool:
    """Whether Dask's own arrays are planned in this process (``array.query-planning``)."""
    return dask.array.Array is not Array


def kind_of(x: Any) -> str:
    """Return ``"planned"`` (query planning), ``"dask-array"`` (that package), ``"torch"`` (of tensors) or ``""``."""
    if isinstance(x, Array):
        return "torch" if is_tensor(x._meta) else ""
    if planning() and isinstance(x, dask.array.Array):
        return "planned"
    # Never imported here: importing it changes Dask's configuration.
    package = sys.modules.get("dask_array")
    return "dask-array" if package is not None and isinstance(x, getattr(package, "Array", ())) else ""


def check_planned(reason: str | None) -> str | None:
    """Return why a product is left to Dask; where arrays are planned there is nothing to leave it to."""
    if reason is not None and planning():
        raise PlanError(
            f"this product can't run here: {reason}. And Dask has none with array.query-planning: switch that off"
        )
    return reason


def plain(x: Any) -> Any:
    """Return an array of another kind as a ``dask.array.core.Array``, tensors by `shared_array`; others as they are."""
    kind = kind_of(x)
    if kind == "torch":
        meta = shared_array(x._meta)
        return x.map_blocks(shared_array, dtype=meta.dtype, meta=meta)
    if not kind:
        return x if isinstance(x, Array) else shared_array(x)
    array = x.optimize()
    (name, *_) = next(iter(flatten(array.__dask_keys__())))
    return Array(HighLevelGraph.from_collections(name, dict(array.__dask_graph__())), name, array.chunks, meta=x._meta)


def as_array(x: Any) -> Array:
    """Return a ``dask.array.core.Array`` of an array of any kind or an array_like."""
    if isinstance(x, Array) and not kind_of(x):
        return x
    if sparse_package(x):
        return dask.array.core.from_array(compressed(x), chunks=x.shape, asarray=False)
    return dask.array.core.asanyarray(plain(x))


def check_operand(name: str, x: Any) -> None:
    """Refuse what is not an array, and what NumPy takes for an array of one object."""
    each, remedy = x[0] if type(x) in (list, tuple) and x else x, ""
    if isinstance(each, Future):
        remedy = ": pass the Dask array that it is computed from, or dask.array.from_delayed(future, shape, dtype)"
    elif isinstance(each, Delayed):
        remedy = ": pass dask.array.from_delayed(x, shape, dtype) with the shape and the type of its value"
    elif is_dask_collection(x) and hasattr(x, "to_dask_array"):
        remedy = ": pass x.to_dask_array(lengths=True)"
    elif (
        isinstance(x, str | bytes | list | tuple)
        or hasattr(x, "shape")
        or (as_array := np.asanyarray(x)).shape
        or as_array.dtype != object
    ):
        return
    several = "" if each is x else f"{type(x).__name__} of "
    passed = "None" if x is None else f"a {several}{type(each).__name__}"
    raise PlanError(f"{name} is {passed}; expected an array{remedy}")


def ndim_of(x: Any) -> int:
    """Return the number of dimensions, as ``np.ndim``, which Dask does not answer where arrays are planned."""
    try:
        ndim: Any = x.ndim if isinstance(x, Array) else np.ndim(x)
    except ValueError:
        return 0  # of lists that no array can be made of
    return int(ndim) if isinstance(ndim, int) else 0  # A Delayed has any attribute, as one more Delayed.


def like(kind: str, x: Any) -> Any:
    """Return a ``dask.array.core.Array`` as one of that kind; anything else as it is."""
    if not kind or not isinstance(x, Array):
        return x
    if kind == "torch":
        meta = tensor_of(x._meta if array_kind(x._meta) == "cupy" else np.empty((0,) * x.ndim, x.dtype))
        return x.map_blocks(tensor_of, dtype=meta.dtype, meta=meta)
    if kind == "planned":
        from dask_distmm.arrays.expressions import from_array

        return from_array(x)
    from dask_array._collection import from_graph

    return from_graph(dict(x.dask), x._meta, x.chunks, list(flatten(x.__dask_keys__())), x.name)


def reducible(x: Array) -> Any:
    """Return an array whose ``sum`` and ``max`` work: where arrays are planned, those of no others do."""
    return like("planned" if planning() else "", x)


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _each(function, x) for key, x in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        copied = type(value)(*(_each(function, x) for x in value))
        for name, x in getattr(value, "__dict__", {}).items():
            setattr(copied, name, _each(function, x))
        return copied
    return tuple(_each(function, x) for x in value) if type(value) is tuple else function(value)


def kinds(values: Any) -> set[str]:
    """Return the kinds of the arrays among some values; ``"plain"`` for a ``dask.array.core.Array``."""
    return {kind_of(x) or ("plain" if isinstance(x, Array) else "") for x in values} - {""}


def owners() -> list[Any]:
    """Return the modules and classes of this process in which the ways to multiply arrays have their names."""
    # The `@` of planned arrays asks no module, it raises NotImplementedError.
    modules = [dask.array.routines, dask.array, *([dask.array.Array] if planning() else _compats())]
    names = ("dask_array", "dask_array.linalg", "dask_array.linalg._tensordot", "dask_array._einsum")
    return modules + [sys.modules[name] for name in names if name in sys.modules]


# How the names of array-api-compat's modules end, also those of copies that other packages bring.
COMPAT = "array_api_compat.dask.array"
COMPAT_LINALG = f"{COMPAT}.linalg"


def _compats() -> list[Any]:
    if _has_compat():
        with contextlib.suppress(ImportError):
            importlib.import_module(COMPAT)
    return [module for name, module in list(sys.modules.items()) if name.endswith((COMPAT, COMPAT_LINALG))]


@functools.cache
def _has_compat() -> bool:
    """Whether array-api-compat is installed: to look for it takes as long as all else in `enable`."""
    return importlib.util.find_spec(COMPAT.partition(".")[0]) is not None


def any_kind(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function of plain arrays that takes and returns arrays of other kinds too."""

    @functools.wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        seen_kinds: set[str] = set()

        def lowered(x: Any) -> Any:
            seen_kinds.update(kinds([x]))
            return plain(x)

        args, kwargs = _each(lowered, args), _each(lowered, kwargs)
        if "torch" in seen_kinds:
            seen_kinds.discard("plain")
        if len(seen_kinds) > 1:
            raise PlanError(
                f"the operands are arrays of different kinds ({', '.join(sorted(seen_kinds))}): make all of them with "
                "the same package, dask.array or dask_array"
            )
        (kind,) = seen_kinds or {"planned" if planning() else ""}
        return _each(functools.partial(like, kind if kind != "plain" else ""), function(*args, **kwargs))

    return cast(Callable[P, T], adapted)


def rechunked(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an array of any kind cut in another way, or as it is."""
    return x.rechunk(*args, **kwargs, method=how_to_cut(x))


def how_to_cut(x: da.Array) -> str | None:
    """Return the method where Dask might take P2P, which fails on chunks that are no NumPy arrays."""
    return None if isinstance(x._meta, np.ndarray) else "tasks"
