"""How plans show themselves: `dask_distmm.show` says how, so that planning imports no pages and no pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Shown", "register_forms"]

_forms: dict[type, tuple[Callable[[Any], str], Callable[[Any], str]]] = {}


def register_forms(kind: type, text: Callable[[Any], str], html: Callable[[Any], str]) -> None:
    """Say how objects of a type are written as text and as HTML."""
    _forms[kind] = text, html


class Shown:
    """Base of classes whose forms as text and HTML are registered."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _forms[type(self)][0](self) if type(self) in _forms else object.__repr__(self)

    def _repr_html_(self) -> str:
        return _forms[type(self)][1](self)
