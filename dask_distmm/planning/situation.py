"""The cluster as one plan sees it: who can multiply, and where the chunks of A and B are."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from dask_distmm.planning.demand import Worker
from dask_distmm.planning.placement import Where

Way = tuple[str, tuple[int, int, int]]  # method, and p x q x s ranks over m x n x k


@dataclasses.dataclass(frozen=True)
class Situation:
    """The workers, and where the chunks of A, B and earlier sums are. Hashable: plans are cached by it."""

    # Workers that can be ranks.
    roster: tuple[Worker, ...]
    # Workers that hold chunks but can't be ranks.
    sources: tuple[Worker, ...] = ()
    # For each chunk of A and B in C order, the worker that holds it, as an index into ``[*roster, *sources]``: the
    # bytes of an int32 array. None where that is not known.
    raw_a: bytes | None = None
    raw_b: bytes | None = None
    # Memory order of (most of) the chunks of A and B.
    orders: tuple[str, str] = ("C", "C")
    # Addresses of ranks, in their order, that have a communicator already.
    groups: tuple[tuple[str, ...], ...] = ()
    # As `raw_a`, for earlier sums that the product is added to (`Formula.partial`).
    raw_sums: bytes | None = None

    @property
    def participants(self) -> tuple[Worker, ...]:
        """All workers, those of the roster first."""
        return (*self.roster, *self.sources)

    @functools.cached_property
    def where(self) -> Where:
        """The holders of the chunks of A, B and earlier sums, where they are known."""
        raw = {"a": self.raw_a, "b": self.raw_b, "partial": self.raw_sums}
        return {name: np.frombuffer(found, np.int32) for name, found in raw.items() if found is not None}
