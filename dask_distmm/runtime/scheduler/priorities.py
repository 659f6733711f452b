"""The order in which a group's products start: the longest first, on the scheduler.

Dask orders tasks by the shape of the graph, and annotations with priorities do not survive its optimizer. So the
order is in the keys, and this plugin deals the priorities that Dask has given to a group's tasks, and to all that
they need, out again. Where it is missing everything works all the same, only in Dask's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

from dask_distmm.runtime.keys import GROUP_PREFIX, parse_group_key

if TYPE_CHECKING:
    from distributed import Scheduler


class GroupOrder(SchedulerPlugin):  # type: ignore[misc]
    """Lets products of a group start in the order of their ranks."""

    name = "distmm-group-order"
    idempotent = True

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Any], **kwargs: Any) -> None:
        """Reorder new tasks, before any of them starts."""
        if not any(name.startswith(GROUP_PREFIX) for name in scheduler.task_prefixes):
            return
        ranks = {key: found for key in tasks if (found := parse_group_key(key)) is not None}
        waiting = {key for key in tasks if scheduler.tasks[key].state in ("released", "waiting")}
        needs = {key: [dts.key for dts in scheduler.tasks[key].dependencies if dts.key in waiting] for key in waiting}
        priorities = {key: scheduler.tasks[key].priority for key in waiting}
        for key, priority in new_priorities(ranks, needs, priorities).items():
            scheduler.tasks[key].priority = priority


def new_priorities(
    ranks: Mapping[Any, Any], needs: Mapping[Any, Iterable[Any]], priorities: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Deal priorities out again. Pure."""
    dealt: dict[Any, None] = {}
    for product in sorted((key for key in ranks if key in priorities), key=lambda key: ranks[key]):
        found: set[Any] = set()
        stack = [product]
        while stack:
            key = stack.pop()
            if key in dealt or key in found:
                continue
            found.add(key)
            stack += needs[key]
        # In Dask's own order a task comes after the tasks that it needs.
        dealt.update(dict.fromkeys(sorted(found, key=lambda key: priorities[key])))
    return dict(zip(dealt, sorted(priorities[key] for key in dealt), strict=True))
