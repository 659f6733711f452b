"""Expressions of Dask's own query planning (``array.query-planning: true``); imported only where it is on."""

from __future__ import annotations

import functools
from typing import Any

import dask.array
from dask.array._array_expr._collection import new_collection
from dask.array._array_expr._io import FromGraph


class FromTasks(FromGraph):  # type: ignore[misc]
    """A graph whose tasks keep their keys; scheduler and workers know those of a multiply by them."""

    @functools.cached_property
    def _name(self) -> str:
        return str(self.operand("name_prefix"))

    def _layer(self) -> dict[Any, Any]:
        return dict(self.operand("layer"))


def from_array(x: dask.array.core.Array) -> Any:
    """Return a planned array of the graph of one that is not."""
    return new_collection(FromTasks(dict(x.dask), x._meta, x.chunks, list(x.__dask_keys__()), x.name))
