"""Values on the wire: dataclasses as dicts of plain types, which the receiver makes again and checks.

What each field has to be follows from its annotation, so that no class has a text of its own for either way, and no
message of ours needs unpickling. Fields that have their default values may be missing.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

from dask_distmm.errors import DistMMError, ProtocolError

# The metadata of a field that stays where the value was made, and of one whose value is the same in most messages: it
# travels as text, which receivers cache.
HERE, TEXT = {"here": True}, {"text": True}
_WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError, DistMMError)
_REQUIRED = object()
_LISTS = (tuple, list)
# Functions to a value's plain form, None where the value is plain already, and back, which may raise a `_WRONG`.
_Coder = tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]


class Wired:
    """Base of the dataclasses that cross the network."""

    __slots__ = ()
    # What it is called in errors; the name of its class where that is empty.
    what: ClassVar[str] = ""

    def to_wire(self) -> dict[str, Any]:
        """As a dict of plain types."""
        return _plain(self)

    @classmethod
    def from_wire(cls, wire: Any) -> Self:
        """Decode and check the output of ``to_wire``."""
        try:
            value: Self = _made(cls, wire)
        except ProtocolError:
            raise
        except _WRONG as error:
            raise ProtocolError(f"malformed {cls.what or f'message {cls.__name__}'}: {error}") from error
        return value

    def check(self) -> None:
        """Raise an error if the fields do not fit each other."""


def _plain(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    wire = {"kind": kind.kind} if hasattr(kind, "kind") else {}
    for name, (encode, _) in _coders(kind).items():
        if (own := getattr(value, name)) is not getattr(kind, name, _REQUIRED):
            wire[name] = own if encode is None else encode(own)
    return wire


def _made(kind: Any, wire: Any) -> Any:
    coders = _coders(kind)
    if unknown := _instance(Mapping, wire).keys() - coders.keys() - {"kind"}:
        raise TypeError(f"it has no field {min(unknown, key=str)!r}")
    fields = {}
    for name, (_, decode) in coders.items():
        if name in wire:
            try:
                fields[name] = decode(wire[name])
            except _WRONG as error:
                raise TypeError(f"its field {name} is wrong: {error}") from error
    value = kind(**fields)
    if isinstance(value, Wired):
        value.check()
    return value


@functools.cache
def _coders(kind: Any) -> dict[str, _Coder]:
    hints = typing.get_type_hints(kind, include_extras=True)
    every = dataclasses.fields(kind)
    return {
        field.name: _text_coder(hints[field.name]) if "text" in field.metadata else _coder(hints[field.name])
        for field in every
        if field.init and "here" not in field.metadata
    }


_SIMPLE: dict[Any, Callable[[Any], Any]] = {
    int: operator.index,
    float: lambda wire: float(_instance(int | float | np.number, wire)),
    bool: lambda wire: bool(_instance(bool | np.bool_, wire)),
    Any: lambda wire: tuple(wire) if isinstance(wire, list) else wire,
}


@functools.cache
def _coder(hint: Any) -> _Coder:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if (alias := getattr(origin, "__value__", None)) is not None:
        # `NDArray` of newer versions of NumPy, and what else a `type` statement names.
        return _coder(alias[inside])
    if dataclasses.is_dataclass(hint):
        return _plain, functools.partial(_made, hint)
    if origin is Annotated:
        return None, functools.partial(_bounded, _coder(inside[0])[1], *inside[1])
    if origin is Literal:
        return None, functools.partial(_one_of, inside)
    if origin is np.ndarray:
        return np.ndarray.tobytes, lambda wire: np.frombuffer(wire, typing.get_args(inside[1])[0])
    if origin is None:
        return None, _SIMPLE.get(hint) or functools.partial(_instance, hint)
    if origin is collections.abc.Sequence and inside[0] is Any:
        return None, functools.partial(_instance, _LISTS)
    each = [_coder(x) for x in inside if x is not Ellipsis]
    (encode, decode), nested = each[-1], any(put for put, _ in each)
    if origin in (typing.Union, types.UnionType):
        return _plain_if_nested if nested else None, functools.partial(_first, [get for _, get in each])
    if origin is collections.abc.Mapping:
        return (
            encode and (lambda own: {name: encode(x) for name, x in own.items()}),
            lambda wire: {_instance(str, name): decode(x) for name, x in _instance(Mapping, wire).items()},
        )
    if origin is tuple and inside[-1] is not Ellipsis:
        return None if not nested else lambda own: tuple(
            put(x) if put else x for (put, _), x in zip(each, own, strict=True)
        ), lambda wire: tuple(get(x) for (_, get), x in zip(each, _instance(_LISTS, wire), strict=True))
    return encode and (lambda own: tuple(map(encode, own))), lambda wire: tuple(map(decode, _instance(_LISTS, wire)))


def _text_coder(hint: Any) -> _Coder:
    encode, decode = _coder(hint)

    @functools.lru_cache(16)
    def text(value: Any) -> str:
        return json.dumps(value if encode is None else encode(value))

    @functools.lru_cache(16)
    def of_text(wire: str) -> Any:
        return decode(json.loads(_instance(str, wire)))

    return text, of_text


def _plain_if_nested(value: Any) -> Any:
    return _plain(value) if dataclasses.is_dataclass(value) else value


def _instance(kind: Any, wire: Any) -> Any:
    if not isinstance(wire, kind):
        raise TypeError(f"{reprlib.repr(wire)} is not a {getattr(kind, '__name__', kind)}")
    return wire


def _bounded(decode: Callable[[Any], Any], least: float, most: float, wire: Any) -> Any:
    if not least <= (value := decode(wire)) <= most:
        raise ValueError(f"{value!r} is not from {least} to {most}")
    return value


def _one_of(choices: tuple[str, ...], wire: Any) -> Any:
    if not isinstance(wire, str) or wire not in choices:
        raise ValueError(f"{reprlib.repr(wire)} is not one of {', '.join(map(repr, choices))}")
    return wire


def _first(decoders: list[Callable[[Any], Any]], wire: Any) -> Any:
    """Return the result of the first decoder that accepts a value."""
    for decode in decoders[:-1]:
        try:
            return decode(wire)
        except _WRONG:
            continue
    return decoders[-1](wire)
