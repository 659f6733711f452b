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

What a rank computes need not end at chunk edges. `final_rects` says which part of D a rank ends up with,
`owners` which rank holds each chunk of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import ProtocolError
from dask_distmm.planning.cuts import Bounds, overlaps, reduce_cuts
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.display import Shown
from dask_distmm.planning.problem import METHODS, Problem

__all__ = ["EVERYWHERE", "Estimate", "Packing", "Plan", "Rect", "everywhere"]

Rect = tuple[int, int, int, int]  # row start, row stop, column start, column stop

# In place of the participant that holds a chunk: every rank has it.
EVERYWHERE = -1
# Estimates are not better than this: a run is taken under `enable` where it is expected in that share of Dask's time.
_CLEARLY = 0.9


def everywhere(where: NDArray[np.int32] | None) -> bool:
    """Whether every rank has all chunks of an operand."""
    return where is not None and bool(np.all(where == EVERYWHERE))


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Which operands are copied to one contiguous panel before they are multiplied (see `memory.packing`)."""

    a: bool = False
    b: bool = False
    d: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The cost model's estimate of one way to run a problem.

    Parameters
    ----------
    method, grid
        Name of the method and its p x q x s.
    seconds, compute_seconds, transfer_seconds
        Estimated time: in all, multiplying, and receiving and adding up.
    bytes_moved
        Bytes that travel between workers, all ranks together.
    peak_bytes
        The largest projection of a worker's memory.
    """

    method: str
    grid: tuple[int, int, int]
    seconds: float
    compute_seconds: float
    transfer_seconds: float
    bytes_moved: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Shown):
    """How a Problem runs.

    Parameters
    ----------
    problem
        What is multiplied.
    engine
        Name of the engine.
    method
        Name of the method.
    participants
        All workers that take part. Those not in `ranks` only hand out chunks.
    ranks
        For each rank, its index into `participants`.
    rows, cols, depth
        Cuts of m, n and k: p + 1, q + 1 and s + 1 increasing numbers from 0.
    owners
        int32, one for each chunk of D: the rank that holds it.
    where_a, where_b
        int32, one for each chunk of A and B: the participant that holds it. `EVERYWHERE` for all chunks of an
        operand of which every rank has a replica. None if not known yet.
    packing
        Which operands are packed.
    order_a, order_b
        Memory order of (most of) the chunks of A and B, ``"C"`` or ``"F"``.
    where_extras
        As `where_a`, for the problem's extras.
    d_cuts
        Cuts of D's rows and columns into the slabs that the ranks hold after sums over k are added up; None where
        they hold what they compute.
    replicas
        So many participants, the first ones, keep all of D after the run.
    replica_runs
        For A and B the number of the run that has left their replicas on the ranks; 0 where their chunks are read.
    group
        Number under which the ranks keep what they share between runs; 0 for none.
    projected_bytes
        Projected peak of this run's memory for each participant's address.
    estimate, alternatives
        The cost model's view of this plan, and of all ways it looked at, best first.
    around, by_tasks
        Seconds that Dask takes around the run, and what the product would take as Dask's own tasks; None where that was
        not looked at.
    """

    problem: Problem
    engine: str
    method: str
    participants: tuple[Worker, ...]
    ranks: tuple[int, ...]
    rows: Bounds
    cols: Bounds
    depth: Bounds
    owners: NDArray[np.int32]
    where_a: NDArray[np.int32] | None
    where_b: NDArray[np.int32] | None
    packing: Packing
    order_a: str = "C"
    order_b: str = "C"
    where_extras: tuple[NDArray[np.int32], ...] = ()
    d_cuts: tuple[Bounds, Bounds] | None = None
    replicas: int = 0
    replica_runs: tuple[int, int] = (0, 0)
    group: int = 0
    projected_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    estimate: Estimate | None = None
    alternatives: tuple[Estimate, ...] = ()
    around: float = 0.0
    by_tasks: Estimate | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """The ranks' p x q x s."""
        return len(self.rows) - 1, len(self.cols) - 1, len(self.depth) - 1

    @property
    def block_sizes(self) -> tuple[int, int, int]:
        """The largest extent of a rank's part of m, n and k."""
        return tuple(int(np.diff(cut).max()) for cut in (self.rows, self.cols, self.depth))  # type: ignore[return-value]

    @property
    def bytes_moved(self) -> int:
        """Estimated bytes that travel between workers."""
        return self.estimate.bytes_moved if self.estimate else 0

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole multiply."""
        return self.problem.flops

    @property
    def bound(self) -> float:
        """Floating-point operations that all ranks could do in a second, by the rates of the cost model."""
        rate = self.problem.options.machine(self.engine).rate(self.problem.compute_type.name)
        return rate * sum(self.participants[index].nthreads for index in self.ranks)

    @property
    def worth_it(self) -> bool:
        """Whether the run is expected to be over clearly before Dask's own tasks would be."""
        return self.by_tasks is None or self.estimate is None or self.expected <= _CLEARLY * self.by_tasks.seconds

    @property
    def expected(self) -> float:
        """Seconds that are expected from ``persist`` to all of D in memory."""
        return self.around + (self.estimate.seconds if self.estimate else 0.0)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the ranks, in their order."""
        return tuple(self.participants[index].address for index in self.ranks)

    def coords(self, rank: int) -> tuple[int, int, int]:
        """Return (i, j, l) of a rank; l varies fastest."""
        _, q, s = self.grid
        return rank // (q * s), rank // s % q, rank % s

    @property
    def where(self) -> dict[str, NDArray[np.int32] | None]:
        """For each operand by name, who holds its chunks."""
        known = dict(zip(self.problem.operands[2:], self.where_extras, strict=False))
        return {"a": self.where_a, "b": self.where_b, **known}

    def region(self, rank: int) -> Rect:
        """Return the part of D that `rank` computes (its sum over its own part of k)."""
        i, j, _ = self.coords(rank)
        return self.rows[i], self.rows[i + 1], self.cols[j], self.cols[j + 1]

    def k_range(self, rank: int) -> tuple[int, int]:
        """Return the part of k that `rank` sums over."""
        depth = self.coords(rank)[2]
        return self.depth[depth], self.depth[depth + 1]

    @functools.cached_property
    def chunk_cuts(self) -> tuple[Bounds, Bounds]:
        """Edges of D's chunks along rows and columns, from 0; an empty chunk repeats an edge."""
        rows, cols = (tuple(itertools.accumulate(c, initial=0)) for c in self.problem.out_chunks)
        return rows, cols

    def chunk_rect(self, index: int) -> Rect:
        """Return where chunk number `index` of D (in C order) lies in D."""
        rows, cols = self.chunk_cuts
        i, j = divmod(index, len(cols) - 1)
        return rows[i], rows[i + 1], cols[j], cols[j + 1]

    def owned(self, rank: int) -> NDArray[np.int64]:
        """Return the numbers of the chunks of D that `rank` holds in the end."""
        return np.flatnonzero(self.owners == rank)

    @functools.cached_property
    def _final_cuts(self) -> tuple[Bounds, Bounds]:
        """Cuts of D's rows and columns into the slabs in which partial sums are added up."""
        return self.d_cuts or reduce_cuts(self.problem, self.grid[2])

    def final_rects(self, rank: int) -> list[Rect]:
        """Return the parts of D that `rank` has in full, after sums over k are added up."""
        if self.grid[2] == 1:
            return [self.region(rank)]
        if self.method == "allreduce":
            rects = [self.chunk_rect(int(index)) for index in self.owned(rank)]
            return [r for r in rects if r[0] < r[1] and r[2] < r[3]]
        rows, cols = self._final_cuts
        i, j = divmod(rank, len(cols) - 1)
        return [(rows[i], rows[i + 1], cols[j], cols[j + 1])]

    def final_holders(self, index: int) -> list[tuple[int, Rect]]:
        """Return which ranks have which part of chunk number `index` of D in full."""
        rect = self.chunk_rect(index)
        if rect[0] == rect[1] or rect[2] == rect[3]:
            return []
        if self.grid[2] > 1 and self.method == "allreduce":
            return [(int(self.owners[index]), rect)]
        rows, cols = (self.rows, self.cols) if self.grid[2] == 1 else self._final_cuts
        ncols = len(cols) - 1
        return [
            (i * ncols + j, (r0, r1, c0, c1))
            for i, r0, r1 in overlaps(rows, rect[0], rect[1])
            for j, c0, c1 in overlaps(cols, rect[2], rect[3])
        ]

    def to_wire(self) -> dict[str, Any]:
        """As a dict of plain types: what a worker needs to do its part."""
        return {
            "problem": self.problem.to_wire(),
            "engine": self.engine,
            "method": self.method,
            "participants": [worker.to_wire() for worker in self.participants],
            "ranks": list(self.ranks),
            "rows": list(self.rows),
            "cols": list(self.cols),
            "depth": list(self.depth),
            "owners": self.owners.tobytes(),
            "where_a": None if self.where_a is None else self.where_a.tobytes(),
            "where_b": None if self.where_b is None else self.where_b.tobytes(),
            "packing": dataclasses.astuple(self.packing),
            "orders": [self.order_a, self.order_b],
            "d_cuts": None if self.d_cuts is None else [list(cut) for cut in self.d_cuts],
            "where_extras": [where.tobytes() for where in self.where_extras],
            "replicas": self.replicas,
            "replica_runs": list(self.replica_runs),
            "group": self.group,
        }

    @classmethod
    def from_wire(cls, wire: Any) -> Plan:
        """Make it from what `to_wire` gave, checked.

        Raises
        ------
        ProtocolError
            Something is missing, of the wrong type or size, or out of range.
        """
        try:
            problem = Problem.from_wire(wire["problem"])
            where = {op: None if (raw := wire[f"where_{op}"]) is None else np.frombuffer(raw, np.int32) for op in "ab"}
            order_a, order_b = wire["orders"]
            slabs = wire["d_cuts"]
            run_a, run_b = map(int, wire["replica_runs"])
            plan = cls(
                problem=problem,
                engine=str(wire["engine"]),
                method=str(wire["method"]),
                participants=tuple(map(Worker.from_wire, wire["participants"])),
                ranks=tuple(map(int, wire["ranks"])),
                rows=tuple(map(int, wire["rows"])),
                cols=tuple(map(int, wire["cols"])),
                depth=tuple(map(int, wire["depth"])),
                owners=np.frombuffer(wire["owners"], np.int32),
                where_a=where["a"],
                where_b=where["b"],
                packing=Packing(*map(bool, wire["packing"])),
                order_a=str(order_a),
                order_b=str(order_b),
                d_cuts=None if slabs is None else (tuple(map(int, slabs[0])), tuple(map(int, slabs[1]))),
                where_extras=tuple(np.frombuffer(raw, np.int32) for raw in wire["where_extras"]),
                replicas=int(wire["replicas"]),
                replica_runs=(run_a, run_b),
                group=int(wire["group"]),
            )
        except ProtocolError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"malformed plan: {error!r}") from error
        _check(plan)
        return plan


def _check(plan: Plan) -> None:
    """Raise ProtocolError if the parts of a plan do not fit each other."""
    counts = {op: int(np.prod(plan.problem.chunk_counts(op))) for op in "abd"}
    run_a, run_b = plan.replica_runs
    for name, cuts, length in (
        ("rows", plan.rows, plan.problem.m),
        ("cols", plan.cols, plan.problem.n),
        ("depth", plan.depth, plan.problem.k),
    ):
        if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != length or np.any(np.diff(cuts) <= 0):
            raise ProtocolError(f"malformed plan: {name} are cut at {cuts}, the length is {length}")
    nranks, npart = int(np.prod(plan.grid)), len(plan.participants)
    checks = {
        "method": plan.method in METHODS,
        "ranks": len(set(plan.ranks)) == nranks == len(plan.ranks) and all(0 <= r < npart for r in plan.ranks),
        "orders": {plan.order_a, plan.order_b} <= {"C", "F"},
        "owners": _in_range(plan.owners, counts["d"], nranks),
        "where_extras": len(plan.where_extras) in (0, len(plan.problem.extras))
        and all(
            _in_range(where, int(np.prod(plan.problem.chunk_counts(extra.name))), npart)
            for where, extra in zip(plan.where_extras, plan.problem.extras, strict=False)
        ),
        "replicas": 0 <= plan.replicas <= npart,
        "where_a": _placed(plan.where_a, counts["a"], npart, run_a),
        "where_b": _placed(plan.where_b, counts["b"], npart, run_b),
    }
    for name, good in checks.items():
        if not good:
            raise ProtocolError(f"malformed plan: {name} do not fit {nranks} ranks and {npart} participants")


def _placed(where: NDArray[np.int32] | None, size: int, stop: int, run: int) -> bool:
    if run:
        return where is not None and where.size == size and everywhere(where)
    return where is None or _in_range(where, size, stop)


def _in_range(values: NDArray[np.int32], size: int, stop: int) -> bool:
    return values.size == size and (size == 0 or bool(values.min() >= 0 and values.max() < stop))
