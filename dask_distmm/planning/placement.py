"""Placement: the part of a plan that the runtime reads. How the work is done on it is the engine's business.

It says who takes part, who of them are ranks, and which participant holds each chunk of the operands. `Plan` adds the
cuts of a product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.compat import cached_property
from dask_distmm.config import Budget, Machine
from dask_distmm.errors import NoWorkersError, PlanError, ProjectedMemoryError, ProtocolError, advice
from dask_distmm.planning.computation import Computation, Worker, islands
from dask_distmm.planning.model import ENGINES, Estimate, Work, estimate
from dask_distmm.planning.wire import HERE, TEXT, Wired
from dask_distmm.shown import Explanation

# Placement: the part of a plan that the runtime reads. How the work is done on it is the engine's business


# For each operand of which it is known, int32: the participant that holds each chunk, in C order.
Where = Mapping[str, NDArray[np.int32]]

# The names under which a rank hands over a chunk of D that another rank owns, and a chunk of `Problem.gathered` that
# another participant has.
REPLICA, GATHERED = "replica", "gathered"
# In place of the participant that holds a chunk: every rank has it.
EVERYWHERE = -1
# Estimates are not more accurate: a choice counts as faster if it is expected to take this share of the other's time.
CLEARLY = 0.9
# Seconds of a message: over Dask's comms at least, whatever the engine's own links do; and between ranks of one host,
# which read each other's memory (2 cores, two workers: 20 us where nothing else runs).
_LATENCY, _NEAR = 2e-3, 1e-4


def everywhere(where: NDArray[np.int32] | None) -> bool:
    """Whether every rank has all chunks of an operand."""
    return where is not None and bool(np.all(where == EVERYWHERE))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Placement(Explanation, Wired):
    """The participants of a run, and the holders of all chunks.

    Parameters
    ----------
    problem
        The computation.
    engine
        Name of the engine.
    method
        Name of the method.
    participants
        All workers that take part. Those not in `ranks` only hand out chunks.
    ranks
        For each rank, its index into `participants`.
    where
        For each operand by name, int32, one for each of its chunks: the participant that holds it. `EVERYWHERE` for all
        chunks of an operand of which every rank has a replica. An operand of which nothing is known yet is missing.
    orders
        For operands of which it matters, the memory order, ``"C"`` or ``"F"``, that the plan expects most chunks to
        have.
    replicas
        So many participants, the first ones, keep all of the matrices `kept` after the run.
    replica_runs
        For A and B the number of the run that has left their replicas on the ranks; 0 where their chunks are read.
    group
        Number under which the ranks keep what they share between runs; 0 for none.
    projected_bytes
        Projected peak of this run's memory for each participant's address.
    estimate, alternatives
        The cost model's view of this plan, and of all ways it looked at, best first.
    around, by_tasks
        Seconds that Dask takes around the run, and the estimate for Dask's own tasks; None where that was not looked
        at.
    """

    what: ClassVar[str] = "plan"
    # The kinds of data for which ranks may ask each other.
    asked_for: ClassVar[tuple[str, ...]]
    problem: Computation
    engine: str
    method: str
    participants: tuple[Worker, ...] = dataclasses.field(metadata=TEXT)
    ranks: tuple[int, ...]
    where: Where = dataclasses.field(default_factory=dict)
    orders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replicas: int = 0
    replica_runs: tuple[int, int] = (0, 0)
    group: int = 0
    projected_bytes: dict[str, int] = dataclasses.field(default_factory=dict, metadata=HERE)
    estimate: Estimate | None = dataclasses.field(default=None, metadata=HERE)
    alternatives: tuple[Estimate, ...] = dataclasses.field(default=(), metadata=HERE)
    around: float = dataclasses.field(default=0.0, metadata=HERE)
    by_tasks: Estimate | None = dataclasses.field(default=None, metadata=HERE)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The ranks' p x q x s over rows, columns and the contraction: one column of ranks by default."""
        return len(self.ranks), 1, 1

    @property
    def compute_type(self) -> str:
        """Name of the type that is computed in."""
        return self.problem.compute_type.name

    @property
    def kept(self) -> tuple[str, ...]:
        """The matrices, of ``"a"``, ``"b"`` and ``"d"``, of which participants keep replicas after the run."""
        return ()

    @property
    def independent(self) -> bool:
        """Whether ranks need nothing of each other but what was there before the run."""
        return False

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the ranks, in their order."""
        return tuple(self.participants[index].address for index in self.ranks)

    @property
    def hosts(self) -> set[str]:
        """Names of the ranks' hosts."""
        return {self.participants[index].host for index in self.ranks}

    @cached_property
    def islands(self) -> NDArray[np.int64]:
        """For each participant the first one of those whose GPUs read each other's memory; see `islands`."""
        return np.array(islands(self.participants), np.int64)

    @property
    def meets(self) -> bool:
        """Whether ranks meet in a library, with a communicator in which they have an order."""
        return ENGINES[self.engine].collective

    @property
    def machine(self) -> Machine:
        """Constants of the machine that the engine runs on."""
        return self.problem.options.machine(self.engine)

    @property
    def threads(self) -> NDArray[np.int64]:
        """Threads of each rank."""
        return np.array([self.participants[index].nthreads for index in self.ranks])

    @property
    def message_seconds(self) -> float:
        """Seconds of a message between ranks: over Dask's comms, or out of each other's memory on one host."""
        near = len(self.hosts) == 1 and self.problem.options.cross_memory
        return _NEAR if near else max(_LATENCY, self.machine.latency)

    @property
    def bytes_moved(self) -> int:
        """Estimated bytes that travel between workers."""
        return self.estimate.bytes_moved if self.estimate else 0

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole computation."""
        return self.problem.flops

    @property
    def bound(self) -> float:
        """Floating-point operations that all ranks could do in a second, by the rates of the cost model."""
        return self.machine.rate(self.compute_type) * int(self.threads.sum())

    @property
    def worth_it(self) -> bool:
        """Whether the run is expected to be over clearly before Dask's own tasks would be."""
        return self.by_tasks is None or self.estimate is None or self.seconds <= CLEARLY * self.by_tasks.seconds

    @property
    def seconds(self) -> float:
        """Seconds that are expected from ``persist`` to all of the result in memory."""
        return self.around + (self.estimate.seconds if self.estimate else 0.0)

    def check_boxes(self, kind: str, boxes: NDArray[np.int64]) -> None:
        """Refuse a peer's request for a part that this plan does not have, or for nothing.

        It asks for `kind`, one of `asked_for`, a row for each part: matrix, number, start and stop of rows, of columns.
        """
        if kind not in self.asked_for or not len(boxes):
            raise ProtocolError(f"unknown kind of request {kind!r}, or an empty one")
        if kind == "enter" and not 0 < boxes[0, 0] < len(self.ranks):
            raise ProtocolError(f"rank {boxes[0, 0]} of {len(self.ranks)} wants to enter")
        boxed = kind in ("input", "partial", "final")
        if not boxed and kind != "enter" and (len(boxes) != 1 or not self.has_part(kind, int(boxes[0, 0]))):
            raise ProtocolError(f"{kind} {boxes[:, 0].tolist()} does not exist")
        for matrix, number, r0, r1, c0, c1 in boxes.tolist() if boxed else ():
            shape = self.shape_of(kind, matrix, number)
            if shape is None:
                raise ProtocolError(f"{kind} {number} of matrix {matrix} does not exist")
            whole = (r0, r1, c0, c1) == (0, shape[0], 0, shape[1])  # chunks may be empty
            if not whole and not (0 <= r0 < r1 <= shape[0] and 0 <= c0 < c1 <= shape[1]):
                raise ProtocolError(f"rows {r0}:{r1}, columns {c0}:{c1} are not within {shape}")

    def needed(self, rank: int, operand: str) -> NDArray[np.int64]:
        """Return the numbers of the chunks that a rank needs of an operand whose chunks ranks can make."""
        raise NotImplementedError

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks publish something of a kind under this number."""
        return False

    def shape_of(self, kind: str, matrix: int, number: int) -> tuple[int, int] | None:
        """Return the shape of what a peer asks for parts of, a chunk of an operand by default; None for nothing."""
        operands = self.problem.matrices
        exists = 0 <= matrix < len(operands) and 0 <= number < operands[matrix].count
        return operands[matrix].chunk_shape(number) if exists else None

    def check(self) -> None:
        """Check that the parts of a placement fit each other.

        Raises
        ------
        ProtocolError
            They do not.
        """
        nranks, npart = math.prod(self.grid), len(self.participants)
        runs = dict(zip("ab", self.replica_runs, strict=True))
        counts = {matrix.name: matrix.count for matrix in self.problem.matrices}
        checks = {
            "ranks": len(set(self.ranks)) == nranks == len(self.ranks) and all(0 <= r < npart for r in self.ranks),
            "replicas": 0 <= self.replicas <= npart,
            "where": self.where.keys() <= counts.keys()
            and all(name in self.where for name, run in runs.items() if run)
            and all(
                where.size == counts[name] and everywhere(where)
                if runs.get(name)
                else in_range(where, counts[name], npart)
                for name, where in self.where.items()
            ),
        }
        for name, good in checks.items():
            if not good:
                raise ProtocolError(f"malformed plan: {name} do not fit {nranks} ranks and {npart} participants")


def in_range(values: NDArray[np.int32], size: int, stop: int) -> bool:
    """Whether there are this many values, all of them from 0 to below `stop`."""
    return values.size == size and (size == 0 or bool(values.min() >= 0 and values.max() < stop))


P = TypeVar("P", bound=Placement)


def estimated(plan: P, held: NDArray[np.float64], work: Work) -> P:
    """Return a plan with the bytes that its participants hold, and with the estimate of its work."""
    held_by = {worker.address: int(size) for worker, size in zip(plan.participants, held, strict=True)}
    peak = max(held_by.values())
    seconds_of = estimate(work, plan.machine, plan.method, plan.grid, peak, plan.hosts)
    return dataclasses.replace(plan, projected_bytes=held_by, estimate=seconds_of)


# A run that holds less than this share of what a worker may hold does not fill it, whatever its process holds anyway.
_SLIGHT = 1 / 32


def spills(plan: Placement, budget: Budget) -> bool:
    """Whether Dask would move chunks to disk while a plan runs."""
    return any(plan.projected_bytes[worker.address] > budget.of(worker) for worker in plan.participants)


def over_limit(plan: Placement, share: float = 1.0) -> dict[str, int]:
    """Return the bytes of workers beyond a share of what they may hold, with what their processes hold anyway."""
    fraction = share * plan.problem.options.limit_fraction
    held = {worker: plan.projected_bytes[worker.address] + worker.used for worker in plan.participants}
    return {
        worker.address: size
        for worker, size in held.items()
        if worker.memory_limit
        and size > worker.memory_limit * fraction
        and plan.projected_bytes[worker.address] > worker.memory_limit * fraction * _SLIGHT
    }


# For each round the plans to choose from; what they are plans of; what would let it fit if none does.
Considered = tuple[Iterable[Sequence[P]], str, Sequence[str]]


# Plans of computations whose text has more bytes are not kept.
_LONG = 2**17


def planner(plans: Callable[..., Considered[P]]) -> Callable[..., P]:
    """Return what plans a kind of computation; `plans` says what there is to choose from, by fields of a `Placement`.

    An engine that comes before others is left out where it can't run it in the memory that there is. The last plans are
    kept: in a loop the same computation comes again and again, and only names differ.
    """

    @functools.lru_cache(maxsize=64)
    def kept(digest: bytes) -> list[P]:
        return []

    @functools.wraps(plans)
    def planned(
        problem: Computation,
        roster: Sequence[Worker],
        where: Where | None = None,
        *,
        engine: str | Sequence[str],
        sources: Sequence[Worker] = (),
    ) -> P:
        if not roster:
            raise NoWorkersError("no worker can take part: start workers, or name some of the cluster's with workers=")
        engines, participants = (engine,) if isinstance(engine, str) else tuple(engine), (*roster, *sources)
        text = pickle.dumps((problem.unnamed(), len(roster), participants, where, engines))
        chosen = kept(hashlib.sha256(text).digest()) if len(text) <= _LONG else []
        if not chosen:
            chosen.append(
                fastest(
                    problem, roster, {"problem": problem, "participants": participants, "where": where or {}}, engines
                )
            )
        return dataclasses.replace(chosen[0], problem=problem)

    def fastest(problem: Computation, roster: Sequence[Worker], fields: dict[str, Any], engines: Sequence[str]) -> P:
        for name in engines[:-1]:
            with contextlib.suppress(PlanError, ProjectedMemoryError):
                return choose(*plans(problem, roster, {**fields, "engine": name}))
        return choose(*plans(problem, roster, {**fields, "engine": engines[-1]}))

    return planned


def choose(
    rounds: Iterable[Sequence[P]], what: str, remedies: Sequence[str], why: Callable[[P], str] = lambda plan: ""
) -> P:
    """Return the first plan that fits into memory, with the estimates of its round: leaner rounds come later.

    Raises
    ------
    ProjectedMemoryError
        None does. It tells about the leanest one; `remedies` begin with verbs.
    """
    for plans in rounds:
        for plan in plans:
            if not over_limit(plan):
                return dataclasses.replace(plan, alternatives=tuple(plan.estimate for plan in plans if plan.estimate))
    plan = min(plans, key=lambda candidate: max(candidate.projected_bytes.values()))
    workers, over = {worker.address: worker for worker in plan.participants}, over_limit(plan)
    fraction = plan.problem.options.limit_fraction
    limit = {address: int(worker.memory_limit * fraction) for address, worker in workers.items()}
    worst = max(over, key=lambda address: over[address] / limit[address])
    used, on_gpus = workers[worst].used, ENGINES[plan.engine].on_gpus
    beside = f", {_gib(used)} of it what its process holds anyway" if used else ""
    advised = [*remedies, "use GPUs with more memory" if on_gpus else "use a higher memory_limit"]
    if all(size <= workers[address].memory_limit for address, size in over.items()):
        advised.append("raise the config distmm.memory.limit-fraction")
    raise ProjectedMemoryError(
        f"{what} would hold {_gib(over[worst])} on worker {worst}{why(plan)}{beside}; it may hold {_gib(limit[worst])} "
        f"({fraction:.0%} of its memory{'' if on_gpus else ' limit'}). {advice(advised)}",
        plan.projected_bytes,
        limit,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def match_ranks(costs: NDArray[Any]) -> list[int]:
    """Return for each rank (row) a worker (column) of its own, so that the costs of all pairs together are least."""
    rows, least = np.arange(len(costs)), costs.min(axis=1)
    # Mostly each rank has a worker of its own that is best for it. SciPy's optimizers take 14 MiB and 0.1 s to import.
    for chosen in (rows, costs.argmin(axis=1)):
        if len(set(chosen.tolist())) == len(rows) and np.array_equal(costs[rows, chosen], least):
            return list(chosen.tolist())
    from scipy.optimize import linear_sum_assignment

    return list(linear_sum_assignment(costs)[1].tolist())
