"""The attributes that all plans have, and how plans show themselves.

`dask_distmm.show` registers the forms, and is imported when something is first shown: planning imports no pages and no
pictures.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

_forms: dict[type, tuple[Callable[[Any], str], Callable[[Any], str]]] = {}


def register_forms(kind: type, text: Callable[[Any], str], html: Callable[[Any], str] | None = None) -> None:
    """Say how objects of a type are written as text and as HTML; without `html` that is the text as it stands."""
    _forms[kind] = text, html or (lambda shown: f"<pre>{escape(text(shown))}</pre>")


def _forms_of(kind: type) -> tuple[Callable[[Any], str], Callable[[Any], str]]:
    if kind not in _forms:
        importlib.import_module("dask_distmm.show")
    return _forms.get(kind, (object.__repr__, object.__repr__))


class Shown:
    """Base of classes whose forms as text and HTML are registered."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _forms_of(type(self))[0](self)

    def _repr_html_(self) -> str:
        return _forms_of(type(self))[1](self)


class Explanation(Shown):
    """How a product would be computed, as `dask_distmm.explain` returns it. Shown as text, and as HTML in notebooks.

    It is a `Plan` (a collective run), a `WavePlan` (a sequence of them), a `BatchPlan` (a batch) or a `NotCollective`
    (Dask's own function): ask with ``isinstance``. All of them have these attributes.

    Attributes
    ----------
    method : str
        The way: of a collective run its method; of a batch ``"items"`` or ``"collective"``; else ``"dask"``.
    seconds : float or None
        Estimated time from ``persist`` until all of D is in memory; None where nothing was estimated.
    bytes_moved : int or None
        Estimated bytes that travel between workers, all together; None where nothing was estimated.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # Some subclasses have these as fields of a dataclass, which a property here would take for their defaults.
        @property
        def method(self) -> str:
            """The way."""

        @property
        def seconds(self) -> float | None:
            """Estimated time."""

        @property
        def bytes_moved(self) -> int | None:
            """Estimated bytes that travel."""
