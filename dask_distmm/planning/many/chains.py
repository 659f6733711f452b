"""The runs that one result takes, one after the other."""

from __future__ import annotations

import dataclasses

from dask_distmm.planning.placement import Explanation, Placement


@dataclasses.dataclass(frozen=True, repr=False)
class ChainPlan(Explanation):
    """How a result of `dask_distmm.linalg` comes about that is not one run."""

    # In an order in which each run comes after those whose results it reads.
    runs: tuple[Placement, ...] = ()

    @property
    def method(self) -> str:
        """``"runs"``, or ``"dask"`` without any."""
        return "runs" if self.runs else "dask"

    @property
    def seconds(self) -> float | None:
        """Estimated time of all runs; None where there are none."""
        return sum(run.seconds for run in self.runs) if self.runs else None

    @property
    def bytes_moved(self) -> int | None:
        """Estimated bytes that travel between workers in all runs; None where there are none."""
        return sum(run.bytes_moved for run in self.runs) if self.runs else None
