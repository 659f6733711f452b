"""The runs that one result takes, one after the other."""

from __future__ import annotations

import dataclasses

from dask_distmm.planning.placement import Explanation, Placement


@dataclasses.dataclass(frozen=True, repr=False)
class ChainPlan(Explanation):
    """How a result of `dask_distmm.linalg` comes about that is not one run."""

    # In an order in which each run comes after those whose results it reads.
    runs: tuple[Placement, ...] = ()
    # The plain tasks of QR by chunks of rows.
    row_tasks: int = 0

    @property
    def method(self) -> str:
        """``"rows"`` where a matrix is factorized by its chunks of rows, else ``"runs"``, or ``"dask"`` without any."""
        return "rows" if self.row_tasks else "runs" if self.runs else "dask"

    @property
    def seconds(self) -> float | None:
        """Estimated time of all runs; None where plain tasks do more than move chunks."""
        return None if self.row_tasks or not self.runs else sum(run.seconds for run in self.runs)

    @property
    def bytes_moved(self) -> int | None:
        """Estimated bytes that travel between workers in all runs; None where there are none."""
        return sum(run.bytes_moved for run in self.runs) if self.runs else None
