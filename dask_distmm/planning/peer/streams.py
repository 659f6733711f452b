"""How a rank multiplies chunks that it makes itself, and the memory that this takes. Pure.

Each chunk is made by tasks that run in threads of the rank, a few ahead of its use (`engines.peer.streaming`). D's
block stays on the GPU and grows; an operand whose chunks the rank does not make is there from the start. A *step* is
one product::

    both are made       [ A, all own rows ]  @  [ B, all own columns ]     over a part of k
    A is made           [ A, some rows and a part of k ]  @  [ B, the same part of k ]

What a step needs of an operand is a part of one chunk, which is multiplied as it is; or parts of several, which are
copied side by side into a buffer. So small chunks are joined until their product is worth its launch; long ones are cut
where a buffer would be too large. Of a Gram matrix one operand is made, and the other one is its transpose.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.cuts import Bounds, chunk_edges, padded
from dask_distmm.planning.footprint import made_ahead, multiplied_sizes, multiply_rate
from dask_distmm.planning.peer.block_schedule import PANELS, extent_multiple, longest_depth
from dask_distmm.planning.plan import Plan, once
from dask_distmm.planning.problem import is_gram

# Chunks are joined until their product takes so long (seconds): the host needs half of it to put it on its way.
_LEAST_SECONDS = 2e-4
# The shortest part that the room for buffers may lead to.
_LEAST_EXTENT = 512
# Shares of ``distmm.peer.buffer-bytes``: for buffers, and for chunks that are made ahead, and as much for those in use;
# and the most that are made ahead.
_BUFFERS, _AHEAD, _MOST_AHEAD = 0.5, 0.25, 64
# Threads that make chunks are fewer than a worker has where their chunks would take more than this part of its memory.
_THREAD_SHARE = 12
# Steps whose chunks are held at least: one is multiplied, and the next one is ready. And at most, where they are small:
# the host has to see the end of one before it is taken off.
_STEPS_HELD, _MOST_HELD = 2, 6


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSource:
    """The steps of one rank; the plan alone decides them."""

    # The operands (0 for A, 1 for B) whose chunks it makes; one of them where the other one is its transpose.
    made: tuple[int, ...]
    # Whether the other one is.
    twin: bool
    # Along the made operand's own axis and along k: parts of chunks are joined until they have `least`, and cut where
    # they have more than `most`. The own axis is not cut where both are made.
    least: tuple[int, int]
    most: tuple[int, int]
    # Of all buffers in which parts are put together.
    buffer_bytes: int
    # Number of chunks that are made at the same time.
    threads: int
    # Number of chunks that are made before they are used.
    ahead: int
    # The bytes of chunks that may be in use.
    held_bytes: int
    # Of chunks that are made ahead, and in the making.
    making_bytes: int

    @property
    def bytes(self) -> int:
        """Of all that it holds of the operands that it makes."""
        return self.buffer_bytes + self.held_bytes + self.making_bytes


@once
def chunk_sources(plan: Plan) -> list[ChunkSource]:
    """Return the stream of each rank of a plan, in the order of the ranks."""
    return [_chunk_source(plan, rank) for rank in range(len(plan.ranks))]


def _chunk_source(plan: Plan, rank: int) -> ChunkSource:
    problem = plan.problem
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    made = tuple(operand for operand in (0, 1) if problem.by_ranks[operand])
    twin = len(made) > 1 and is_gram(problem) and (r0, r1) == (c0, c1)
    if twin:
        # The library conjugates what it transposes, so this one is right for both.
        made = (0 if problem.conjugated[0] else 1,)
    both = all(problem.by_ranks)
    extents, sizes, depth = (r1 - r0, c1 - c0), multiplied_sizes(problem), k1 - k0
    along_k = np.diff(_edges(plan, rank, made, None))
    across = [np.diff(_edges(plan, rank, (operand,), operand)) for operand in made]
    room, deepest = int(_BUFFERS * problem.options.buffer_bytes) // PANELS, longest_depth(problem, extents)
    if both:
        width = sum(extents[operand] * sizes[operand] for operand in made)
        most = 0, min(depth, deepest, max(_LEAST_EXTENT, room // width))
        wanted = math.ceil(_LEAST_SECONDS / _seconds(plan, extents[0] * extents[1], width))
        least = 0, max(1, min(most[1] // 2, wanted))
        broad = [extents[operand] for operand in made]
    else:
        size, widest = sizes[made[0]], int(across[0].max())
        wanted = math.ceil(_LEAST_SECONDS / _seconds(plan, extents[1 - made[0]], size))
        wanted = max(1, min(wanted, room // size // 4))
        least_k = max(1, min(depth, wanted // widest))
        deep = min(depth, max(2 * least_k, int(along_k.max())))
        least = max(1, min(extents[made[0]], wanted // deep)), least_k
        broad = [min(extents[made[0]], max(2 * least[0], widest))]
        most_k = min(depth, deepest, max(_LEAST_EXTENT, room // size // broad[0]))
        most = min(extents[made[0]], max(_LEAST_EXTENT, room // size // min(deep, most_k))), most_k
        broad = [min(broad[0], most[0])]
    deep = min(most[1], max(2 * least[1], int(along_k.max())))
    multiple, joined = extent_multiple(problem), _joins(along_k, least[1])
    buffer, panel, largest, place = 0, 0, 0, 0
    for operand, own, extent in zip(made, across, broad, strict=True):
        size = max(sizes[operand], problem.itemsize("ab"[operand]))
        chunk = size * math.prod(max(axis) for axis in (problem.a_chunks, problem.b_chunks)[operand])
        if multiple > 1 or joined or (len(own) > 1 if both else _joins(own, least[0])):
            buffer += padded(extent, multiple) * padded(deep, multiple) * sizes[operand]
        panel, largest = panel + extent * deep * size, max(largest, chunk)
        place += chunk * (len(own) if both else 1)
    worker = plan.participants[plan.ranks[rank]]
    most_threads = max(1, worker.memory_limit // _THREAD_SHARE // largest) if worker.memory_limit else worker.nthreads
    threads = min(worker.nthreads, most_threads)
    share, step = int(_AHEAD * problem.options.buffer_bytes), max(place, panel if buffer else 0)
    ahead = max(made_ahead(threads), min(_MOST_AHEAD, share // largest))
    held = max(_STEPS_HELD * step, min(_MOST_HELD * step, share))
    return ChunkSource(made, twin, least, most, PANELS * buffer, threads, ahead, held, (ahead + threads) * largest)


def _edges(plan: Plan, rank: int, operands: Sequence[int], own: int | None) -> NDArray[np.int64]:
    """Return the edges of chunks within a rank's part, along the own axis of one operand, or along k of several."""
    region, (start, stop) = plan.region(rank), plan.k_range(rank)
    if own is not None:
        start, stop = region[:2] if own == 0 else region[2:]
    found = [np.array([start, stop])]
    for operand in operands:
        sizes = (plan.problem.a_chunks, plan.problem.b_chunks)[operand]
        every = chunk_edges(sizes[operand if own is not None else 1 - operand])
        found.append(every[np.searchsorted(every, start, "right") : np.searchsorted(every, stop, "left")])
    return np.unique(np.concatenate(found))


def _joins(stretches: NDArray[np.int64], least: int) -> bool:
    """Whether neighbours are joined: those that both have less than `least`."""
    small = stretches < least
    return bool((small[:-1] & small[1:]).any())


def source_cuts(plan: Plan, rank: int, source: ChunkSource) -> tuple[Bounds, Bounds]:
    """Return where a rank's own axis of the operand that it makes, and where its part of k, are cut into steps."""
    along_k, own = _edges(plan, rank, source.made, None), _edges(plan, rank, source.made, source.made[0])
    if all(plan.problem.by_ranks):
        return (int(own[0]), int(own[-1])), _cut(along_k.tolist(), source.least[1], source.most[1])
    multiple, found = extent_multiple(plan.problem), []
    for edges, least, most in zip((own, along_k), source.least, source.most, strict=True):
        # The padding behind one part must be neither part of the next one nor multiplied with it.
        at = np.append(edges[0] + (edges[:-1] - edges[0]) // multiple * multiple, edges[-1])
        found.append(_cut(np.unique(at).tolist(), least, most // multiple * multiple, multiple))
    return found[0], found[1]


def _cut(edges: Sequence[int], least: int, most: int, step: int = 1) -> Bounds:
    """Join neighbours that have less than `least` until they have it; cut what has more than `most` evenly."""
    found, begun = [edges[0]], edges[0]

    def close(stop: int) -> None:
        nonlocal begun
        if stop > begun:
            size = padded(stop - begun, step, -(-(stop - begun) // max(step, most)))
            found.extend(range(begun + size, stop, size))
            found.append(stop)
            begun = stop

    for low, high in itertools.pairwise(edges):
        if high - low >= least:
            close(low)
        if high - begun >= least:
            close(high)
    close(edges[-1])
    return tuple(found)


def _seconds(plan: Plan, products: float, size: float) -> float:
    """Return the seconds for this many multiplications and additions that read this many bytes."""
    problem = plan.problem
    operations = problem.flops / (float(problem.m) * problem.n * problem.k)
    return max(operations * products / multiply_rate(plan), size / plan.machine.memory_bandwidth)
