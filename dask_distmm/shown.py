"""The attributes that all plans have, for users to look at. `dask_distmm.show` has their forms as text and as HTML.

The package's root says where the forms are, and they are imported when something is first shown: planning imports no
pages and no pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

# A text, and a page.
Forms = tuple[Callable[[Any], str], Callable[[Any], str]]
# The function that returns the forms by type; the root puts it here.
sources: list[Callable[[], Mapping[type, Forms]]] = []


def _forms(plan: Any) -> Forms:
    return sources[0]().get(type(plan), (object.__repr__, object.__repr__))


# The public attributes of all kinds of plans.
PUBLIC = {
    "alternatives", "around", "batch", "block_sizes", "bound", "by_tasks", "bytes_moved", "chunks", "collective",
    "compute_type", "engine", "estimate", "flops", "grid", "hosts", "items", "left", "method", "plan",
    "projected_bytes", "reason", "regions", "route", "runs", "scheme", "seconds", "shapes", "shares", "slots",
    "workers", "worth_it",
}  # fmt: skip


class Explanation:
    """How a product would be computed, as `dask_distmm.explain` returns it. Shown as text, and as HTML in notebooks.

    It is a `Plan` (a collective run), a `WavePlan` (a sequence of them), a `BatchPlan` (a batch) or a `NotCollective`
    (Dask's own function): ask with ``isinstance``; `explain_grouped` returns a `GroupPlan`. All of them have these
    attributes.

    Attributes
    ----------
    method : str
        The way: of a collective run its method; of a batch ``"items"`` or ``"collective"``; of a group ``"group"``;
        else ``"dask"``.
    seconds : float or None
        Estimated time from ``persist`` until all of D is in memory; None where nothing was estimated.
    bytes_moved : int or None
        Estimated bytes that travel between workers, all together; None where nothing was estimated.

    See Also
    --------
    explain, explain_grouped, linalg.explain
    """

    __slots__ = ()

    def __dir__(self) -> list[str]:
        """Return what users read of a plan; completion lists nothing else."""
        return [name for name in super().__dir__() if name in PUBLIC]

    def __repr__(self) -> str:
        return _forms(self)[0](self)

    def _repr_html_(self) -> str:
        return _forms(self)[1](self)

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
