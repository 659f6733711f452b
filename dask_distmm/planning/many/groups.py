"""Groups of products of different shapes: which run alone, which as a collective, in what order. Pure.

Products that would take one slot longer than its share of all the work keep the others waiting at the end: each of them
is a collective run if all is done sooner that way by the estimate. Of what is left, larger ones are cut into slabs of
rows, and the largest come first: what comes last is small, so all slots end at about the same time. (Graham's
longest-processing-time rule, 1969, is within 4/3 of the best order; slabs bring that down to about half a share.)
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from dask_distmm.planning.many.batches import WORTH, Sizes, resize
from dask_distmm.planning.placement import Shown

# Slabs lower than this keep BLAS from its speed.
_LEAST_ROWS = 256
# No piece takes a slot more than this part of its share of the work, where it can be cut so small.
_LARGEST_PIECE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The share of the workers that one product of a group gets."""

    # Whether it is a collective run.
    collective: bool
    # Otherwise the rows of each task.
    rows: Sizes
    # Its place in the order of the tasks: 0 is the longest.
    rank: int
    # Estimated time of its longest task, or of the run.
    seconds: float


def long_products(seconds: Sequence[float], slots: int) -> list[int]:
    """Return the products that would take one slot longer than its share of all, the longest first."""
    share = sum(seconds) / slots
    return sorted((i for i, each in enumerate(seconds) if each > share), key=lambda i: -seconds[i])


def share_out(
    seconds: Sequence[float],
    rows: Sequence[Sizes],
    collective: Sequence[float | None],
    slots: int,
    overhead: float,
    forced: Sequence[bool | None],
    spread: Sequence[float],
) -> tuple[list[Share], float]:
    """Share a group of products out."""
    order = sorted(range(len(seconds)), key=lambda i: (-seconds[i], i))
    must = [i for i in order if forced[i] is True]
    may = [i for i in order if forced[i] is None and collective[i] is not None]
    tries = [
        _try(seconds, rows, collective, slots, overhead, {*must, *may[:count]}, spread) for count in range(len(may) + 1)
    ]
    total, shares = min(tries, key=lambda pair: pair[0])
    return shares, total


def _try(
    seconds: Sequence[float],
    rows: Sequence[Sizes],
    collective: Sequence[float | None],
    slots: int,
    overhead: float,
    runs: set[int],
    spread: Sequence[float],
) -> tuple[float, list[Share]]:
    """Return the time of all, and the shares, if just `runs` are collective."""
    alone = [i for i in range(len(seconds)) if i not in runs]
    share = sum(seconds[i] for i in alone) / slots
    cuts: dict[int, Sizes] = {}
    longest: dict[int, float] = {}
    pieces: list[float] = []
    for i in alone:
        m = sum(rows[i])
        wanted = math.ceil(seconds[i] / (share * _LARGEST_PIECE)) if share else 1
        most = min(m // _LEAST_ROWS, int(seconds[i] / (overhead * WORTH)) if overhead else m)
        count = max(1, min(wanted, most, slots * 4))
        cuts[i] = resize(rows[i], -(-m // count)) if count > 1 else (m,)
        waits = spread[i] * min(1.0, slots / len(cuts[i])) if len(cuts[i]) > 1 else 0.0
        found = [seconds[i] * size / m + waits if m else 0.0 for size in cuts[i]]
        longest[i] = max(found)
        pieces += [each + overhead for each in found]
    order = sorted(alone, key=lambda i: (-longest[i], i))
    ranks = {i: rank for rank, i in enumerate(order)}
    shares = [
        Share(True, (), 0, collective[i] or 0.0) if i in runs else Share(False, cuts[i], ranks[i], longest[i])
        for i in range(len(seconds))
    ]
    return sum(collective[i] or 0.0 for i in runs) + _makespan(pieces, slots), shares


def _makespan(pieces: Sequence[float], slots: int) -> float:
    """Return when the last slot ends if the longest pieces go first, each to the slot that is free soonest."""
    free = [0.0] * slots
    for each in sorted(pieces, reverse=True):
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@dataclasses.dataclass(frozen=True, repr=False)
class GroupPlan(Shown):
    """How a group of products is computed. `explain_grouped` returns it.

    Parameters
    ----------
    shapes
        (m, n, k) of each product.
    shares
        What becomes of each; None where Dask's own function would run, or nothing is multiplied.
    slots
        Tasks that run at the same time.
    seconds
        Estimated time of all.
    """

    shapes: tuple[tuple[int, int, int], ...]
    shares: tuple[Share | None, ...]
    slots: int
    seconds: float
