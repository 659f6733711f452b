"""The defaults of the options, and the signatures of the functions that take them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from dask_distmm.errors import check_options
from dask_distmm.typing import AllOptions

P = ParamSpec("P")
T = TypeVar("T")

# In the order in which signatures show them.
_NAMES = (
    "alpha beta op_a op_b epilog epilog_inputs bias_axis result_amax a_type b_type result_type quantization_scales "
    "compute_type method engine out_chunks workers distributions logger batch gathered"
)
_NOT_NONE = {"alpha": 1.0, "op_a": "N", "op_b": "N", "bias_axis": -1, "result_amax": False}
DEFAULTS = cast(AllOptions, {name: _NOT_NONE.get(name) for name in _NAMES.split()})


# Names that similar functions have, and how the same is written here.
HINTS = {
    "bias": "pass epilog='bias' and epilog_inputs={'bias': ...}",
    "relu_aux": "pass epilog_inputs={'relu_aux': ...}",
    "gelu_aux": "pass epilog_inputs={'gelu_aux': ...}",
    "scales": "pass quantization_scales={'a': ..., 'b': ...}",
    "transa": "pass op_a='T'",
    "transb": "pass op_b='T'",
    "dtype": "pass result_type=..., or convert the operands by astype",
    "out_dtype": "pass result_type=...",
    "chunks": "pass out_chunks=...",
    "out": "results can't be written into an existing array: a result is a new lazy array",
    "axes": "for contractions over other axes enable() takes da.tensordot and da.einsum",
}


def takes(
    options: type, hints: Mapping[str, str] | None = None, positional: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a function with ``**options`` show each option in its signature, and refuse a name that is none."""
    known = options.__annotations__

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        shown = inspect.signature(function)
        own = [one for one in shown.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=text)
            for name, value in {**DEFAULTS, "overwrite_a": False, "check_finite": True}.items()
            if (text := str(getattr(known.get(name), "__forward_arg__", "")).replace(" | NoOther", ""))
        ]
        names = [one.name for one in (*own, *listed)]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if positional and len(args) > len(own):
                raise TypeError(f"{function.__name__}() takes 1 argument without a name, got {len(args)}: {positional}")
            check_options(function.__qualname__, kwargs, names, hints or {})
            return function(*args, **kwargs)

        cast(Any, checked).__signature__ = shown.replace(parameters=[*own, *listed])
        return checked

    return decorate
