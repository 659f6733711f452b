"""The Plan: how one Problem is multiplied by one roster of workers. A frozen value, a pure function of both.

The work is a box of m x n x k products. It is cut into p x q x s blocks, one for each rank: rank
``(i, j, l)`` computes rows ``rows[i]`` and columns ``cols[j]`` of D, summed over ``depth[l]`` of k.
Every method is such a grid::

    local           1 x 1 x 1    one worker does it all
    allgather       P x 1 x 1    each has a slab of rows of A and D, and gathers all of B
                    1 x P x 1    each has a slab of columns of B and D, and gathers all of A
    summa           p x q x 1    each gathers its rows of A and its columns of B
    reducescatter   1 x 1 x P    each sums all of D over its part of k; then D is added up in P slabs
    allreduce       1 x 1 x P    the same, but each chunk of D is added up where it will stay (small D)

The part that a rank computes need not end at chunk edges. `final_rects` says which part of D a rank ends up with,
`owners` which rank holds each chunk of the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.compat import cached_property
from dask_distmm.errors import ProtocolError
from dask_distmm.planning.cuts import Bounds, Rect, chunk_cuts, pieces_of, rect_between, touched, traffic
from dask_distmm.planning.model import ENGINES
from dask_distmm.planning.placement import Placement, everywhere, in_range
from dask_distmm.planning.problem import METHODS, Problem
from dask_distmm.planning.wire import HERE
from dask_distmm.programs.steps import PART, Step

T = TypeVar("T")


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Keep what a function of a plan returns with the plan; what else it takes must follow from the plan."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(plan: Plan, *more: Any) -> T:
        if name not in plan.__dict__:
            plan.__dict__[name] = function(plan, *more)
        value: T = plan.__dict__[name]
        return value

    return kept


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Plan(Placement):
    """How a product is computed as one collective run. `explain` returns it.

    Attributes
    ----------
    method, engine : str
        How the work is distributed, and what multiplies.
    grid : tuple of int
        Into how many parts m, n and k are cut, one for each rank.
    block_sizes : tuple of int
        The largest extent of a rank's part of m, n and k.
    workers, hosts : tuple of str, set of str
        Addresses of the ranks, in their order, and their hosts.
    seconds : float
        Estimated time from ``persist`` until all of D is in memory; `around` of it is Dask's.
    by_tasks : Estimate or None
        The estimate for Dask's own tasks, with ``seconds`` and ``bytes_moved``; None where nobody asked.
    worth_it, left : bool, str
        Whether the run is expected to be over clearly before Dask's own tasks would be; why `@` under `enable` leaves
        this product to Dask's own tasks, empty where it does not, None where nobody asked.
    bytes_moved : int
        Estimated bytes that travel between workers.
    projected_bytes : dict
        Projected peak of this run's memory for each worker's address.
    flops, bound : float
        Floating-point operations, and how many of them all ranks could do in a second.
    estimate, alternatives : Estimate, tuple of Estimate
        The cost model's view of this plan, and of all that it was chosen from, best first.

    See Also
    --------
    explain
    """

    asked_for: ClassVar[tuple[str, ...]] = ("input", PART, "enter")
    problem: Problem
    # Cuts of m, n and k: p + 1, q + 1 and s + 1 increasing numbers from 0.
    rows: Bounds
    cols: Bounds
    depth: Bounds
    # Cuts of D's rows and columns into the parts that ranks hold in full, after sums over k are added up
    # (`final_ranks`).
    d_cuts: tuple[Bounds, Bounds]
    # One for each chunk of D: the rank that holds it.
    owners: NDArray[np.int32]
    # Which of A, B and D are copied to one contiguous panel before they are multiplied, as "ab" (`footprint.packing`).
    packing: str
    # Whether ranks read chunks of A and B from host memory while they multiply: they do not fit on the GPUs.
    from_host: bool = False
    left: str | None = dataclasses.field(default=None, metadata=HERE)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The ranks' p x q x s."""
        return len(self.rows) - 1, len(self.cols) - 1, len(self.depth) - 1

    @property
    def kept(self) -> tuple[str, ...]:
        """D, or the gathered operand, where every worker is to have all of it and does not yet."""
        problem, gathered = self.problem, self.problem.gathered
        new = gathered and not everywhere(self.where.get(gathered))
        return ("d",) * problem.formula.replicated + (gathered,) * bool(new)

    def steps(
        self, rank: int, begun: Collection[int] = (), usable: Callable[[int, int], bool] = lambda *chunk: True
    ) -> tuple[Step, ...]:
        """Return the steps of a rank; see `EngineModel.steps`."""
        steps: tuple[Step, ...] = ENGINES[self.engine].steps(self, rank, begun=begun, usable=usable)
        return steps

    @property
    def independent(self) -> bool:
        """Whether ranks need nothing of each other but what was there before the run."""
        return ENGINES[self.engine].independent(self)

    @property
    def meets(self) -> bool:
        """Whether ranks meet in a library: also where GPUs that read each other's memory get chunks from others."""
        return super().meets or (ENGINES[self.engine].reads_peers and len({*self.islands[list(self.ranks)]}) > 1)

    @property
    def block_sizes(self) -> tuple[int, int, int]:
        """The largest extent of a rank's part of m, n and k."""
        return tuple(int(np.diff(cut).max()) for cut in (self.rows, self.cols, self.depth))  # type: ignore[return-value]

    @cached_property
    def extents(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Rows, columns and depth of each rank's block."""
        (p, q, s), (rows, cols, depth) = self.grid, (np.diff(cut) for cut in (self.rows, self.cols, self.depth))
        return np.repeat(rows, q * s), np.tile(np.repeat(cols, s), p), np.tile(depth, p * q)

    @cached_property
    def final_ranks(self) -> NDArray[np.int32]:
        """The rank that has each part of D between `d_cuts` in full: of each chunk, as allreduce has it, its owner."""
        by_chunks = self.grid[2] > 1 and self.method == "allreduce"
        return self.owners if by_chunks else np.arange(len(self.ranks), dtype=np.int32)

    @cached_property
    def final_elements(self) -> NDArray[np.int64]:
        """Elements of D that each rank has in full, after sums over k are added up."""
        sizes = np.multiply.outer(*map(np.diff, self.d_cuts)).ravel()
        return np.bincount(self.final_ranks, sizes, len(self.ranks)).astype(np.int64)

    @cached_property
    def final_traffic(self) -> NDArray[np.float64]:
        """Elements of the chunks of each rank (rows) that each rank (columns) has in full."""
        if self.final_ranks is self.owners:
            return np.diag(self.final_elements.astype(float))
        return traffic(self.problem.d.chunks, self.d_cuts, self.owners, len(self.ranks))

    def coords(self, rank: int) -> tuple[int, int, int]:
        """Return (i, j, l) of a rank; l varies fastest."""
        _, q, s = self.grid
        return rank // (q * s), rank // s % q, rank % s

    def region(self, rank: int) -> Rect:
        """Return the part of D that `rank` computes (its sum over its own part of k)."""
        i, j, _ = self.coords(rank)
        return self.rows[i], self.rows[i + 1], self.cols[j], self.cols[j + 1]

    def k_range(self, rank: int) -> tuple[int, int]:
        """Return the part of k that `rank` sums over."""
        depth = self.coords(rank)[2]
        return self.depth[depth], self.depth[depth + 1]

    def chunks_read(self, rank: int, operand: str) -> tuple[slice, slice]:
        """Return the rows and the columns of chunks of A or B of which a rank multiplies parts."""
        (r0, r1, c0, c1), depth = self.region(rank), self.k_range(rank)
        down, across = ((r0, r1), depth) if operand == "a" else (depth, (c0, c1))
        rows, cols = self.problem[operand].chunks
        return touched(rows, *down), touched(cols, *across)

    def needed(self, rank: int, operand: str) -> NDArray[np.int64]:
        """Return the numbers of the chunks of A or B of which a rank needs any part."""
        matrix = self.problem[operand]
        return np.arange(matrix.count).reshape(matrix.counts)[self.chunks_read(rank, operand)].ravel()

    @cached_property
    def chunk_cuts(self) -> tuple[Bounds, Bounds]:
        """Edges of D's chunks along rows and columns, from 0; an empty chunk repeats an edge."""
        rows, cols = map(chunk_cuts, self.problem.d.chunks)
        return rows, cols

    def chunk_rect(self, index: int) -> Rect:
        """Return where chunk number `index` of D (in C order) is in D."""
        return rect_between(self.chunk_cuts, index)

    def owned(self, rank: int) -> NDArray[np.int64]:
        """Return the numbers of the chunks of D that `rank` holds in the end."""
        return np.flatnonzero(self.owners == rank)

    def final_rects(self, rank: int) -> list[Rect]:
        """Return the parts of D that `rank` has in full, after sums over k are added up."""
        rects = (rect_between(self.d_cuts, part) for part in np.flatnonzero(self.final_ranks == rank).tolist())
        return [r for r in rects if r[0] < r[1] and r[2] < r[3]]

    def final_holders(self, index: int) -> list[tuple[int, Rect]]:
        """Return which ranks have which part of chunk number `index` of D in full."""
        ranks = self.final_ranks
        return [(int(ranks[part]), rect) for part, rect in pieces_of(self.d_cuts, self.chunk_rect(index))]

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks may publish something under a key."""
        return 0 <= number < len(self.ranks) * (len(self.ranks) + 1)

    def check(self) -> None:
        """Raise `ProtocolError` if the parts of a plan do not fit each other."""
        for name, cuts, length in (
            ("rows", self.rows, self.problem.m),
            ("cols", self.cols, self.problem.n),
            ("depth", self.depth, self.problem.k),
        ):
            if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != length or np.any(np.diff(cuts) <= 0):
                raise ProtocolError(f"malformed plan: {name} are cut at {cuts}, the length is {length}")
        super().check()
        nranks = len(self.ranks)
        checks = {
            "method": self.method in METHODS,
            "orders": self.orders.keys() == {"a", "b"} and set(self.orders.values()) <= {"C", "F"},
            "packing": set(self.packing) <= set("abd"),
            "d_cuts": (len(self.d_cuts[0]) - 1) * (len(self.d_cuts[1]) - 1) == self.final_ranks.size,
            "owners": in_range(self.owners, self.problem.d.count, nranks),
        }
        for name, good in checks.items():
            if not good:
                raise ProtocolError(f"malformed plan: {name} do not fit {nranks} ranks")
