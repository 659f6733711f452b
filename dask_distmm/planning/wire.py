"""Values of planning on the wire: dataclasses as dicts of plain types, which the receiver makes again and checks.

What each field has to be follows from its annotation, so that no class has a text of its own for either way, and no
message of ours needs unpickling.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from dask_distmm.errors import DistMMError, ProtocolError

# The metadata of a field that stays where the value was made.
HERE = {"here": True}
_WRONG = (KeyError, TypeError, ValueError, AttributeError, DistMMError)


class Wired:
    """Base of the dataclasses that cross the network by themselves."""

    __slots__ = ()
    # What it is called in errors.
    what: ClassVar[str]

    def to_wire(self) -> dict[str, Any]:
        """As a dict of plain types."""
        found: dict[str, Any] = _encode(self)
        return found

    @classmethod
    def from_wire(cls, wire: Any) -> Self:
        """Make it from what ``to_wire`` gave, checked."""
        try:
            found: Self = _made(cls, wire)
        except ProtocolError:
            raise
        except _WRONG as error:
            raise ProtocolError(f"malformed {cls.what}: {error!r}") from error
        return found

    def check(self) -> None:
        """Raise an error if the fields do not fit each other."""


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        names = [*_fields(kind), *(["kind"] if hasattr(kind, "kind") else [])]
        return {name: _encode(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return {name: _encode(one) for name, one in value.items()}
    return tuple(map(_encode, value)) if isinstance(value, tuple | list) else value


@functools.cache
def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    every = dataclasses.fields(kind)
    return {field.name: field for field in every if field.init and not field.metadata.get("here")}


@functools.cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a type from its plain form; it raises one of `_WRONG` for another value."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return functools.partial(_made, hint)
    if origin in (typing.Union, types.UnionType):
        return functools.partial(_first, [_decoder(one) for one in inside])
    if origin is np.ndarray:
        return lambda wire: np.frombuffer(wire, typing.get_args(inside[1])[0])
    if origin is tuple and inside[-1] is Ellipsis:
        each = _decoder(inside[0])
        return lambda wire: tuple(map(each, _instance(tuple | list, wire)))
    if origin is tuple:
        parts = [_decoder(one) for one in inside]
        return lambda wire: tuple(part(one) for part, one in zip(parts, _instance(tuple | list, wire), strict=True))
    if origin is collections.abc.Mapping:
        value = _decoder(inside[1])
        return lambda wire: {_instance(str, name): value(one) for name, one in wire.items()}
    if hint is Any:
        return lambda wire: tuple(wire) if isinstance(wire, list) else wire
    plain: dict[Any, Callable[[Any], Any]] = {
        int: operator.index,
        float: lambda wire: float(_instance(int | float | np.number, wire)),
        bool: lambda wire: bool(_instance(bool | np.bool_, wire)),
    }
    return plain.get(hint) or functools.partial(_instance, hint)


def _instance(kind: Any, wire: Any) -> Any:
    if not isinstance(wire, kind):
        raise TypeError(f"{wire!r} is not a {getattr(kind, '__name__', kind)}")
    return wire


def _first(decoders: list[Callable[[Any], Any]], wire: Any) -> Any:
    """Return what the first decoder makes that can."""
    for decoder in decoders[:-1]:
        try:
            return decoder(wire)
        except _WRONG:
            continue
    return decoders[-1](wire)


@functools.cache
def _decoders(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind)
    return {name: _decoder(hints[name]) for name in _fields(kind)}


def _made(kind: Any, wire: Any) -> Any:
    decoders = _decoders(kind)
    if unknown := wire.keys() - decoders.keys() - {"kind"}:
        raise TypeError(f"{kind.__name__} has no field {min(unknown)!r}")
    found = kind(**{name: decoder(wire[name]) for name, decoder in decoders.items()})
    if isinstance(found, Wired):
        found.check()
    return found
