"""What functions of `dask_distmm.linalg` share: options of a run, the check of every value, their names in errors.

A function is annotated ``**how: Unpack[RunOptions]``, and its values by types; `public` makes its signature list the
options, and refuses what is not among them and what the annotations do not allow. The rule for names and places is in
``docs/linear-algebra.md``: those of NumPy, else SciPy's; ``docs/make_arguments.py`` compares signatures.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, cast

import numpy as np

from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.options import takes
from dask_distmm.errors import PlanError, unknown_name
from dask_distmm.typing import Engine, Method

P = ParamSpec("P")
T = TypeVar("T")

# NumPy's named tuples. It has no public names for them.
_one = np.ones((1, 1))
EighResult: Any = type(np.linalg.eigh(_one))
QRResult: Any = type(np.linalg.qr(_one))
SlogdetResult: Any = type(np.linalg.slogdet(_one))
SVDResult: Any = type(np.linalg.svd(_one))


class RunOptions(TypedDict, total=False):
    """The options of a run: `engine` and `workers` as `dask_distmm.matmul` takes them.

    `method` is ``"auto"``, ``"local"`` (one worker has the whole matrix) or ``"columns"`` (all workers have block
    columns); of tall matrices also ``"rows"``: chunks of rows stay where they are (`dask_distmm.programs`).
    """

    engine: Engine | None
    workers: Sequence[str] | int | None
    method: Literal["auto", "local", "columns", "rows"] | None


class SolveOptions(RunOptions, total=False):
    """The options of functions that refuse elements that are NaN or infinite, unless `check_finite` is False.

    A rank finds them while it copies its part of the matrix.
    """

    check_finite: bool


class FactorOptions(SolveOptions, total=False):
    """The options of functions that can give up A.

    Its chunks go as soon as all workers have read them, unless others want them: a client that holds them, other tasks.
    """

    overwrite_a: bool


class ProductOptions(TypedDict, total=False):
    """The options of a product, as `dask_distmm.matmul` takes them."""

    engine: Engine | None
    workers: Sequence[str] | int | None
    method: Method | None


# Names that other functions have, and what stands for them here.
_HINTS = {
    **dict.fromkeys(("overwrite_b", "lwork", "lapack_driver", "driver"), "leave it out, it does not change results"),
    "dtype": "convert the operands by astype",
    "chunks": "rechunk the operands or the result",
}
_inside = contextvars.ContextVar("inside", default=False)


def public(options: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function public: see the module's docstring. Options that have their defaults are not handed on."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        allowed = typing.get_type_hints(function) | typing.get_type_hints(options)
        # A program can register more engines than type checkers know.
        allowed["engine"] = str | None
        adapted, signature = any_kind(function), inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> T:
            try:
                values = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # raises Python's own error, which names the function
            options_given = values.pop("how", {})
            for name, value in {**values, **options_given}.items():
                check_value(name, value, allowed[name])
            return adapted(*args, **{name: x for name, x in kwargs.items() if x is not defaults.get(name, checked)})

        shown = takes(options, _HINTS)(cast(Callable[P, T], checked))
        listed = inspect.signature(shown).parameters
        defaults = {name: listed[name].default for name in typing.get_type_hints(options)}

        @functools.wraps(shown)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with named(function.__name__):
                return shown(*args, **kwargs)

        return called

    return decorate


@contextlib.contextmanager
def named(function: str) -> Iterator[None]:
    """Put the name of the function that the user called before the text of a PlanError."""
    if _inside.get():
        yield
        return
    token = _inside.set(True)
    try:
        yield
    except PlanError as error:
        error.args = (f"{function}(): {error}",)
        raise
    finally:
        _inside.reset(token)


def check_value(name: str, value: Any, allowed: Any) -> None:
    """Refuse a value that an annotation does not allow."""
    kinds = typing.get_args(allowed) if typing.get_origin(allowed) in (types.UnionType, typing.Union) else (allowed,)
    if any(_fits(value, kind) for kind in kinds):
        return
    choices = [one for kind in kinds if typing.get_origin(kind) is Literal for one in typing.get_args(kind)]
    if isinstance(value, str) and choices and all(isinstance(one, str) for one in choices):
        raise PlanError(unknown_name(name, value, choices))
    raise PlanError(f"{name} must be {' or '.join(map(_text, kinds))}, got {reprlib.repr(value)}")


# How a kind of values is called, and its classes.
_CLASSES: dict[Any, tuple[str, Any]] = {
    bool: ("True or False", (bool, np.bool)),
    int: ("an integer", numbers.Integral),
    float: ("a number", numbers.Real),
    str: ("a name", str),
    types.NoneType: ("None", types.NoneType),
}


def _fits(value: Any, kind: Any) -> bool:
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    truth = isinstance(value, bool | np.bool)
    if kind is Any or origin is None:
        return kind is Any or (isinstance(value, _CLASSES[kind][1]) and truth == (kind is bool))
    if origin is Literal:
        return not truth and isinstance(value, str | numbers.Integral) and value in arguments
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return isinstance(value, str) and origin is not tuple
    fixed = origin is tuple and arguments[-1] is not Ellipsis
    each = arguments if fixed else arguments[:1] * len(value)
    return len(value) == len(each) and all(map(_fits, value, each))


def _text(kind: Any) -> str:
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        kind = "values" if Any in arguments else "integers"
        return kind if arguments[-1] is Ellipsis else f"{len(arguments)} {kind}"
    return "addresses" if origin is not None else _CLASSES[kind][0]
