"""Batches: many products of one shape. Whole items to workers, or a collective run for each? Pure.

The estimates of the two ways are::

    items       flops / (rate * s / (s + 45)) of the slot with most tasks  +  copied bytes / memory bandwidth
                + received bytes of a worker / bandwidth  +  tasks * overhead
    collective  runs * seconds of one by `planner`  +  tasks * overhead

s is the cube root of m n k: a stack of small products does not reach BLAS' full rate (on one x86 core with
OpenBLAS, NumPy's matmul of stacks of 32, 64, 128, 256 ran at 0.40, 0.58, 0.74, 0.93 of its rate at 1024). A slot is a
thread of a worker, or a GPU. Runs that share workers follow one another, so their times add up.

Products that would take one slot longer than its share of all the work keep the others waiting at the end: each of them
is a collective run if all is done sooner that way by the estimate. Of what is left, larger ones are cut into slabs of
rows, and the largest come first: what comes last is small, so all slots end at about the same time. (Graham's
longest-processing-time rule, 1969, is within 4/3 of the best order; slabs bring that down to about half a share.)
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dask.utils import format_time

from dask_distmm.config import Machine
from dask_distmm.errors import PlanError
from dask_distmm.numeric.types import dtype_from_name, operand_dtype, sum_dtype
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.model import Estimate
from dask_distmm.planning.placement import Placement
from dask_distmm.planning.region import Region
from dask_distmm.shown import Explanation

# The runs that one result takes, one after the other


@dataclasses.dataclass(frozen=True, repr=False)
class ChainPlan(Explanation):
    """How a result of `dask_distmm.linalg` comes about that is not one run."""

    # In an order in which each run comes after those whose results it reads.
    runs: tuple[Placement, ...] = ()
    # Parts of the graph that are runs, or might be, under `enable`; how many other tasks are in none, by the reasons.
    regions: tuple[Region, ...] = ()
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def method(self) -> str:
        """``"runs"``, or ``"dask"`` without any."""
        return "runs" if self.runs or any(region.chosen for region in self.regions) else "dask"

    @property
    def seconds(self) -> float | None:
        """Estimated time of all runs; None where there are none."""
        return sum(run.seconds for run in self.runs) if self.runs else None

    @property
    def bytes_moved(self) -> int | None:
        """Estimated bytes that travel between workers in all runs; None where there are none."""
        return sum(run.bytes_moved for run in self.runs) if self.runs else None


# Groups of products of different shapes: which run as one task, which as a collective, in what order. Pure


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


@dataclasses.dataclass(kw_only=True)
class GroupedProduct:
    """What one product of a group takes."""

    # Chunks of A along its rows.
    rows: Sizes
    # Seconds that it takes one slot; and that each slot waits for B if it is cut.
    seconds: float
    spread: float = 0.0
    # Seconds of a collective run; None where none is possible, or worth a look.
    run: float | None = None
    # Whether it has to be a collective run, or plain tasks; None for what is sooner done.
    forced: bool | None = None


def long_products(seconds: Sequence[float], slots: int) -> list[int]:
    """Return the products that would take one slot longer than its share of all, the longest first."""
    share = sum(seconds) / slots * (1 + 1e-9)  # equal ones are not longer by what is rounded
    return sorted((i for i, each in enumerate(seconds) if each > share), key=lambda i: -seconds[i])


def share_out(products: Sequence[GroupedProduct], slots: int, overhead: float) -> tuple[list[Share], float]:
    """Share a group of products out; a plain task costs `overhead` seconds."""
    order = sorted(range(len(products)), key=lambda i: (-products[i].seconds, i))
    must = [i for i in order if products[i].forced is True]
    may = [i for i in order if products[i].forced is None and products[i].run is not None]

    def tried(runs: set[int]) -> tuple[float, list[Share]]:
        """Return the time of all, and the shares, if just `runs` are collective."""
        separate = {i: product for i, product in enumerate(products) if i not in runs}
        share = sum(product.seconds for product in separate.values()) / slots
        shares = {i: Share(True, (), 0, products[i].run or 0.0) for i in runs}
        total, pieces = sum(share_of.seconds for share_of in shares.values()), []
        for i, product in separate.items():
            m = sum(product.rows)
            wanted = math.ceil(product.seconds / (share * _LARGEST_PIECE)) if share else 1
            most = min(m // _LEAST_ROWS, int(product.seconds / (overhead * WORTH)) if overhead else m)
            count = max(1, min(wanted, most, slots * 4))
            cut = resize(product.rows, -(-m // count)) if count > 1 else (m,)
            waits = product.spread * min(1.0, slots / len(cut)) if len(cut) > 1 else 0.0
            each = [product.seconds * size / m + waits if m else 0.0 for size in cut]
            shares[i] = Share(False, cut, 0, max(each))
            pieces += [piece + overhead for piece in each]
        for rank, i in enumerate(sorted(separate, key=lambda i: (-shares[i].seconds, i))):
            shares[i] = dataclasses.replace(shares[i], rank=rank)
        return total + _makespan(pieces, slots), [shares[i] for i in range(len(products))]

    total, shares = min((tried({*must, *may[:count]}) for count in range(len(may) + 1)), key=lambda pair: pair[0])
    return shares, total


def _makespan(pieces: Sequence[float], slots: int) -> float:
    """Return when the last slot ends if the longest pieces go first, each to the slot that is free soonest."""
    free = [0.0] * slots
    for each in sorted(pieces, reverse=True):
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@dataclasses.dataclass(frozen=True, repr=False)
class GroupPlan(Explanation):
    """How a group of products is computed. `explain_grouped` returns it.

    Parameters
    ----------
    shapes
        (m, n, k) of each product.
    shares
        How each is computed; None where Dask's own function would run, or nothing is multiplied.
    slots
        Tasks that run at the same time.
    seconds
        Estimated time of all.

    See Also
    --------
    explain_grouped
    """

    shapes: tuple[tuple[int, int, int], ...]
    shares: tuple[Share | None, ...]
    slots: int
    seconds: float
    method: ClassVar[str] = "group"
    bytes_moved: ClassVar[int | None] = None


# Batches: many products of one shape. Whole items to workers, or a collective run for each? Pure


Sizes = tuple[int, ...]

# Matrices of this size are multiplied at half the rate of large ones; fitted to the figures above.
_HALF_RATE = 45.0
# Tasks for each slot: the last ones to end differ by a fraction of the whole.
_TASKS_PER_SLOT = 4
# A task should work this many times as long as it costs to have it.
WORTH = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Products of one shape: D[i] = A[i] @ B[i], where axes of length 1 of A's and B's batch are broadcast."""

    # Batch axes of D.
    shape: Sizes
    # Batch axes of A and B, as many.
    a_shape: Sizes
    b_shape: Sizes
    # Chunk sizes along the batch axes as they are, of the operand that is larger.
    chunks: tuple[Sizes, ...]
    # Of one item.
    m: int
    n: int
    k: int
    # Names of the types of A, B and D.
    a_dtype: str
    b_dtype: str
    dtype: str
    # Whether every item of A, of B, is in one chunk, and the batch axes are cut as `chunks` says.
    a_whole: bool = True
    b_whole: bool = True
    # Chunks of A and B, and of what the formula reads.
    chunk_count: int = 1
    # Bytes of what the formula reads for one item.
    extra_bytes: int = 0

    @property
    def count(self) -> int:
        """Items of D."""
        return math.prod(self.shape)

    @property
    def flops(self) -> float:
        """Floating-point operations of one item: 2 m n k, four times as many for complex types."""
        return 2.0 * self.m * self.n * self.k * (4 if dtype_from_name(self.dtype).kind == "c" else 1)

    @property
    def compute_type(self) -> str:
        """Name of the type that is computed and summed in."""
        operand = operand_dtype(dtype_from_name(self.a_dtype), dtype_from_name(self.b_dtype))
        return str(sum_dtype(operand, dtype_from_name(self.dtype), max(1, self.k)).name)

    @property
    def item_bytes(self) -> tuple[int, int, int]:
        """Bytes of one item of A, B and D."""
        a, b, d = (dtype_from_name(name).itemsize for name in (self.a_dtype, self.b_dtype, self.dtype))
        return self.m * self.k * a, self.k * self.n * b, self.m * self.n * d

    @property
    def copied_bytes(self) -> int:
        """Bytes of one item that are copied before or after the multiply, to another type."""
        inner = dtype_from_name(self.compute_type).itemsize
        sizes = (self.m * self.k, self.k * self.n, self.m * self.n)
        names = (self.a_dtype, self.b_dtype, self.dtype)
        return sum(size * inner for size, name in zip(sizes, names, strict=True) if name != self.compute_type)

    @property
    def held_bytes(self) -> int:
        """Bytes that a task holds for one item."""
        return sum(self.item_bytes) + self.copied_bytes + self.extra_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The workers, as far as plain tasks care."""

    # How many.
    workers: int
    # Tasks that run at the same time.
    slots: int
    # Bytes that each of these may hold; 0 if unlimited.
    memory: int = 0

    @classmethod
    def of(cls, workers: Sequence[Worker], fraction: float, array: str) -> Pool:
        """Return the pool of these workers; with ``"cupy"`` arrays a worker has one device for all its threads."""
        threads = [1 if array == "cupy" else worker.nthreads for worker in workers]
        some = [(worker.memory_limit, count) for worker, count in zip(workers, threads, strict=True)]
        limits = [int(limit * fraction) // count for limit, count in some if limit]
        return cls(len(workers), sum(threads), min(limits, default=0))


def efficiency(m: int, n: int, k: int) -> float:
    """Return the share of BLAS' full rate that products of this shape reach."""
    size: float = math.cbrt(m * n * k)
    return size / (size + _HALF_RATE)


def item_seconds(batch: Batch, machine: Machine) -> float:
    """Return how long one slot multiplies one item."""
    rate = machine.rate(batch.compute_type) * efficiency(batch.m, batch.n, batch.k)
    return batch.flops / rate + batch.copied_bytes / machine.memory_bandwidth


def resize(sizes: Sizes, length: int) -> Sizes:
    """Cut an axis into chunks of at most `length`, at the edges that are there as far as possible.

    Longer chunks are cut evenly, neighbours that fit together are merged.
    """
    pieces_of: list[int] = []
    open_ended = False  # whether the last one may grow: pieces of a chunk stay among themselves
    for size in sizes:
        if size > length:
            pieces = -(-size // length)
            pieces_of += [size // pieces + (i < size % pieces) for i in range(pieces)]
            open_ended = False
        elif open_ended and pieces_of[-1] + size <= length:
            pieces_of[-1] += size
        else:
            pieces_of.append(size)
            open_ended = True
    return tuple(pieces_of)


def recut(chunks: tuple[Sizes, ...], items: int) -> tuple[Sizes, ...]:
    """Cut batch axes anew into blocks of at most `items` items, about as many where chunks allow it.

    Blocks are made smaller along the first axes, and larger along the last ones.
    """
    lengths = [max(sizes, default=0) for sizes in chunks]
    if 0 in lengths:
        return chunks
    grow = math.prod(lengths) < items
    for axis in range(len(lengths))[:: -1 if grow else 1]:
        fitting = max(1, items // (math.prod(lengths) // lengths[axis]))
        lengths[axis] = min(sum(chunks[axis]), max(lengths[axis], fitting)) if grow else min(lengths[axis], fitting)
    return tuple(resize(sizes, length) for sizes, length in zip(chunks, lengths, strict=True))


def item_plan(
    batch: Batch, pool: Pool, machine: Machine, task_bytes: int, overhead: float
) -> tuple[tuple[Sizes, ...], Estimate]:
    """Cut the batch axes for plain tasks, and estimate the time."""
    each = item_seconds(batch, machine)
    limit = min(task_bytes, pool.memory) if pool.memory else task_bytes
    most = max(1, limit // max(1, batch.held_bytes))
    least = math.ceil(min(batch.count, WORTH * overhead / each))
    even = -(-batch.count // (pool.slots * _TASKS_PER_SLOT))
    # Where even the tasks of two for each slot are hardly worth having, still every slot gets one.
    target = max(1, min(most, max(even, min(least, -(-batch.count // pool.slots)))))
    chunks = batch.chunks
    count, largest = math.prod(map(len, chunks)), _largest(chunks)
    few = count < min(pool.slots, batch.count)
    tiny = largest * each < overhead and count > pool.slots * _TASKS_PER_SLOT
    if largest > most or few or tiny:
        chunks = recut(chunks, target)
        count, largest = math.prod(map(len, chunks)), _largest(chunks)
    kept = chunks == batch.chunks
    compute = -(-count // pool.slots) * largest * each
    needed, both = [], (batch.a_whole, batch.b_whole)
    for size, shape, whole in zip(batch.item_bytes, (batch.a_shape, batch.b_shape), both, strict=False):
        items = math.prod(shape)
        needed.append((size * items / min(pool.workers, items), whole and kept))
        if not whole:
            # Chunks are put together to items.
            compute += size * items / min(pool.slots, items) / machine.memory_bandwidth
    # A task runs where the largest thing that it needs is: that does not travel.
    stays = max((size for size, whole in needed if whole), default=0.0)
    received = (sum(size for size, _ in needed) - stays) * (1 - 1 / pool.workers)
    transfer = received / machine.bandwidth
    moved = 0 if kept and all(both) else batch.chunk_count + count
    tasks = count + moved
    seconds = compute + transfer + tasks * overhead
    moved_bytes, held = round(received * pool.workers), largest * batch.held_bytes
    return chunks, Estimate("items", (count, 1, 1), seconds, compute, transfer, moved_bytes, held)


def _largest(chunks: tuple[Sizes, ...]) -> int:
    return math.prod(max(sizes, default=0) for sizes in chunks)


@dataclasses.dataclass(frozen=True, repr=False)
class BatchPlan(Explanation):
    """How a batch is computed. `explain` returns it for operands of more than two dimensions.

    Parameters
    ----------
    batch
        The products.
    route
        ``"items"``: plain tasks, of whole items each; ``"collective"``: collective runs.
    reason
        Why.
    chunks
        Chunks of D along the batch axes.
    items, collective
        The cost model's view of both; None where a way can't be taken, or nothing is known.
    runs
        Collective runs that the second way takes.
    plan
        The plan of one such run, or the waves of one product that does not fit as a run.

    See Also
    --------
    explain
    """

    batch: Batch
    route: str
    reason: str
    chunks: tuple[Sizes, ...]
    items: Estimate | None
    collective: Estimate | None
    runs: int
    plan: Explanation | None

    @property
    def estimate(self) -> Estimate | None:
        """The cost model's view of the route that is taken."""
        return self.items if self.route == "items" else self.collective

    @property
    def method(self) -> str:
        """The route that is taken."""
        return self.route

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of the route that is taken; None where nothing was estimated."""
        return self.estimate.seconds if self.estimate else None

    @property
    def bytes_moved(self) -> int | None:
        """Estimated bytes that travel between workers; None where nothing was estimated."""
        return self.estimate.bytes_moved if self.estimate else None


def choose_batch_route(
    wanted: str, items: Estimate | None, collective: Estimate | None, demands: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the route to take, and why."""
    if wanted == "items" and demands:
        raise PlanError(f"batch='items' and {demands[0]}: plain tasks run where Dask puts them; leave one of them out")
    if wanted != "auto":
        return wanted, f"batch={wanted!r} was asked for"
    if demands:
        return "collective", f"{demands[0]} was given, which plain tasks can't meet"
    if collective is None or items is None:
        route = "items" if collective is None else "collective"
        return route, "the other way does not fit, or no worker has an engine for it"
    route = "items" if items.seconds <= collective.seconds else "collective"
    less, more = sorted((items.seconds, collective.seconds))
    return route, f"the faster by the cost model: {format_time(less)} against {format_time(more)}"
