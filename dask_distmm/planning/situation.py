"""The cluster as one plan sees it: who can multiply, and where the chunks of A and B are."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.demand import Worker

__all__ = ["Situation", "Way"]

Way = tuple[str, tuple[int, int, int]]  # method, and p x q x s ranks over m x n x k


@dataclasses.dataclass(frozen=True)
class Situation:
    """The workers, and where the chunks of A and B are. Hashable: plans are cached by it.

    Parameters
    ----------
    roster
        Workers that can be ranks.
    sources
        Workers that hold chunks but can't be ranks.
    raw_a, raw_b
        For each chunk of A and B in C order, the worker that holds it, as an index into ``[*roster, *sources]``: the
        bytes of an int32 array. None where that is not known.
    orders
        Memory order of (most of) the chunks of A and B.
    groups
        Addresses of ranks, in their order, that have a communicator already.
    """

    roster: tuple[Worker, ...]
    sources: tuple[Worker, ...] = ()
    raw_a: bytes | None = None
    raw_b: bytes | None = None
    orders: tuple[str, str] = ("C", "C")
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def participants(self) -> tuple[Worker, ...]:
        """All workers, those of the roster first."""
        return (*self.roster, *self.sources)

    @functools.cached_property
    def where_a(self) -> NDArray[np.int32] | None:
        """The holder of each chunk of A, or None."""
        return None if self.raw_a is None else np.frombuffer(self.raw_a, np.int32)

    @functools.cached_property
    def where_b(self) -> NDArray[np.int32] | None:
        """The holder of each chunk of B, or None."""
        return None if self.raw_b is None else np.frombuffer(self.raw_b, np.int32)
