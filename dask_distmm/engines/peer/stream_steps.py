"""The steps of a rank that makes chunks itself (`planning.peer.streams`), applied to these chunks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from dask_distmm.engines.panels import blocks_between
from dask_distmm.engines.peer.schedule import Load, Slot
from dask_distmm.planning import Plan
from dask_distmm.planning.cuts import padded
from dask_distmm.planning.footprint import chunk_edges
from dask_distmm.planning.peer.block_schedule import PANELS, extent_multiple
from dask_distmm.planning.peer.streams import Stream, stream_cuts
from dask_distmm.planning.plan import Rect


class StreamStep(NamedTuple):
    """One product."""

    # For each operand whose chunks are made what is multiplied: a part of one chunk as it lies, or a buffer.
    loads: tuple[Load, ...]
    # The part of D that is multiplied into.
    rect: Rect
    # The part of k.
    depth: tuple[int, int]
    # Whether the product is added to what D has there.
    add: bool


class StreamSteps(NamedTuple):
    """The work of one rank."""

    # In their order.
    steps: list[StreamStep]
    # For each buffer the largest extents (own axis, k) of what it holds.
    slots: dict[Slot, tuple[int, int]]
    # All that the rank needs of an operand whose chunks it does not make; None where it makes those of both.
    resident: Load | None
    # What they were made by.
    stream: Stream


def made_orders(plan: Plan) -> tuple[str, str]:
    """Return the memory orders of buffers for A and B: the library conjugates what it transposes."""
    problem = plan.problem
    each = zip(problem.by_ranks, problem.conjugated, (plan.order_a, plan.order_b), strict=True)
    a, b = ("F" if made and conjugated else order for made, conjugated, order in each)
    return a, b


def make_steps(plan: Plan, rank: int, stream: Stream, lies: Callable[[int, Rect], bool]) -> StreamSteps:
    """Return the steps of a rank."""
    problem, region, along_k = plan.problem, plan.region(rank), plan.k_range(rank)
    multiple, numbers = extent_multiple(problem), itertools.count()
    edges = [tuple(map(_edges, sizes)) for sizes in (problem.a_chunks, problem.b_chunks)]
    slots = dict[Slot, tuple[int, int]]()

    def load(operand: int, part: Rect, depth: tuple[int, int], buffer: int, in_place: bool | None = None) -> Load:
        """Return what a part of D needs of an operand: in a buffer of this number, unless it is used in place."""
        own = part[:2] if operand == 0 else part[2:]
        rect = (*own, *depth) if operand == 0 else (*depth, *own)
        blocks = blocks_between((edges[operand][0], edges[operand][1]), operand, rect)
        in_place = len(blocks) == 1 if in_place is None else in_place
        slot = None if in_place and multiple == 1 else (operand, buffer)
        if slot is not None:
            size = padded(own[1] - own[0], multiple), padded(depth[1] - depth[0], multiple)
            before = slots.get(slot, size)
            slots[slot] = max(before[0], size[0]), max(before[1], size[1])
        return Load(next(numbers), operand, rect, slot, 0, blocks)

    resident = None
    for operand in (0, 1):
        if not problem.by_ranks[operand]:
            rect = (*region[:2], *along_k) if operand == 0 else (*along_k, *region[2:])
            resident = load(operand, region, along_k, 0, lies(operand, rect))
    own_cuts, depth_cuts = (list(itertools.pairwise(cuts)) for cuts in stream_cuts(plan, rank, stream))
    steps = list[StreamStep]()
    for own, depth in itertools.product(own_cuts, depth_cuts):
        part = region
        if resident is not None:
            part = (*own, *region[2:]) if stream.made[0] == 0 else (*region[:2], *own)
        loads = tuple(load(operand, part, depth, len(steps) % PANELS) for operand in stream.made)
        steps.append(StreamStep(loads, part, depth, depth != depth_cuts[0]))
    return StreamSteps(steps, slots, resident, stream)


def _edges(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(chunk_edges(sizes).tolist())
