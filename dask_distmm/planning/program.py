"""Computations on tall matrices by programs: what is computed, on which ranks, and what that takes.

Ranks are the workers that hold chunks of A: rows stay where they are, unless the program is expected to be clearly
faster when these workers have as many rows each, or one has all. Chunks of B that are elsewhere are fetched.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.sparse import share_of
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Computation, Worker
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.planning.model import ENGINES, Phase, Work, speeds
from dask_distmm.planning.placement import CLEARLY, Considered, Placement, estimated, in_range, planner
from dask_distmm.programs.check import Cost, Rates, Span, cost, peak_bytes
from dask_distmm.programs.composite import BUILDERS, Composite, record
from dask_distmm.programs.recorder import Rows
from dask_distmm.programs.steps import PART, Step, messages_to_all
from dask_distmm.tracing.form import program_of
from dask_distmm.tracing.lower import traced
from dask_distmm.tracing.place import Row, described, placements_of

T = TypeVar("T")
# Builders of programs by name.
_BUILDERS: Mapping[str, Composite] = {**BUILDERS, "traced": Composite(traced)}
# The end of a range of rows whose number is not known.
_ALL = 2**62
# Seconds from which another assignment of rows is planned, too: where ranks wait this long for messages, as in each
# turn of a loop, that of one rank; where they work this long, that of as many rows each.
_WORTH_MOVING = 5e-3
# Where one chunk has more than this share of a worker's memory, smaller chunks are advised.
_COARSE = 1 / 8
# Steps of programs of more chunks are not kept: they are large.
_MANY_CHUNKS = 32


@functools.lru_cache(16)
def _known(digest: bytes) -> dict[Any, Any]:
    """Return the cache of the program with a digest; of the last few programs."""
    return {}


def remembered(arguments: tuple[Any, ...], what: Any, make: Callable[[], T], most: float = math.inf) -> T:
    """Return a value computed from a program, cached by a digest of its parameters of at most `most` bytes."""
    text = pickle.dumps(arguments)
    values = _known(hashlib.sha256(text).digest()) if len(text) <= most else {}
    if what not in values:
        values[what] = make()
    value: T = values[what]
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramProblem(Computation):
    """What a program computes of Dask arrays in chunks of rows, each with all columns; a `Computation`.

    Rows whose number is not known are -1. A vector is a row.
    """

    kind: ClassVar[str] = "program"

    # Name of the builder (`programs.composite`), and its options.
    builder: str
    options_of_builder: Mapping[str, Any]
    # Name of the type that is computed in.
    dtype: str
    # Arrays that the builder names by their numbers; nothing else that is known of the program follows from them.
    constants: Sequence[bytes] = ()
    # Names of the operands of which workers keep two copies until the run is done.
    kept: tuple[str, ...] = ()

    def making(self, outputs: Collection[str]) -> Self:
        """Return the computation of only some outputs."""
        return dataclasses.replace(self, wanted=tuple(output for output in self.wanted if output.name in outputs))

    @property
    def compute_type(self) -> np.dtype:
        """NumPy type that is computed in."""
        return dtype_from_name(self.dtype)

    @property
    def flops(self) -> float:
        """Floating-point operations of the program, as on one rank."""
        owners = (0,) * self["a"].counts[0]
        return self.figures(owners, 1, Rates(1.0, 1.0, 1.0, 0.0, self.shares))[0].flops

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        """The names of sparse operands, and their bytes relative to those of dense ones."""
        return tuple((x.name, share_of(x.shape[1])) for x in self.matrices if x.sparse)

    def steps(self, owners: tuple[int, ...], ranks: int, rank: int) -> tuple[Step, ...]:
        """Return the steps of a rank, if `owners` have the chunks of rows."""
        arguments = self._arguments(owners, ranks)
        make = functools.partial(record, _BUILDERS[self.builder].record, *arguments[1:], me=rank)
        return remembered(arguments, rank, make) if len(owners) <= _MANY_CHUNKS else make()

    @property
    def may_skip(self) -> bool:
        """Whether users may have elements not checked."""
        return _BUILDERS[self.builder].may_skip

    @property
    def title(self) -> str:
        """Name of the builder, or of the user's function."""
        return self.name.rpartition("-")[0] if self.builder == "traced" else self.builder

    @property
    def statements(self) -> list[Row]:
        """The statements of a traced function."""
        text = self.options_of_builder.get("program")
        if text is None:
            return []
        wanted = {output.name for output in self.wanted}
        placements = placements_of(text, tuple(name in wanted for name in self.options_of_builder["names"]))
        return list(described(placements, placements.block, program_of(text).lines))

    @property
    def replicated(self) -> Collection[str]:
        """Names of the operands of which all ranks need all."""
        replicated: Collection[str] = self.options_of_builder.get("whole", ())
        return replicated

    def figures(self, owners: tuple[int, ...], ranks: int, rates: Rates) -> tuple[Cost, list[int], int]:
        """Return cost (for a well-conditioned matrix), peak bytes of each rank, and bytes of the largest message."""

        def made() -> tuple[Cost, list[int], int]:
            lists = [self.steps(owners, ranks, rank) for rank in range(ranks)]
            largest = max(messages_to_all(lists[0], ranks).values(), default=0)
            return cost(lists, rates), list(map(peak_bytes, lists)), largest

        return remembered(self._arguments(owners, ranks), rates, made)

    def _arguments(self, owners: tuple[int, ...], ranks: int) -> tuple[Any, ...]:
        """Return the arguments of `record`."""
        rows = Rows(self["a"].chunks[0], owners, ranks)
        cols = {matrix.name: matrix.shape[1] for matrix in self.matrices}
        wanted = [output.name for output in self.wanted]
        return self.builder, self.options_of_builder, rows, cols, self.dtype, wanted, list(self.by_ranks)

    def check(self) -> None:
        """Raise for a builder or an array that there is not; numbers of rows need not be known."""
        if self.builder not in _BUILDERS or self.array not in ("numpy", "cupy") or "a" not in self.operands:
            raise ValueError(f"builder {self.builder!r}, array {self.array!r}")


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ProgramPlacement(Placement):
    """How a ProgramProblem runs."""

    asked_for: ClassVar[tuple[str, ...]] = ("input", PART)
    problem: ProgramProblem
    # For each chunk of rows the rank that has it.
    owners: tuple[int, ...]

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the steps of a rank."""
        return self.problem.steps(self.owners, len(self.ranks), rank)

    def needed(self, rank: int, operand: str) -> NDArray[np.int64]:
        """Return the numbers of the chunks of rows that a rank has, or of all chunks."""
        if operand in self.problem.replicated:
            return np.arange(self.problem[operand].count)
        return np.flatnonzero(np.array(self.owners) == rank)

    @property
    def figures(self) -> tuple[Cost, list[int], int]:
        """Cost (for a well-conditioned matrix), peak bytes of ranks, and bytes of the largest message."""
        return self.problem.figures(self.owners, len(self.ranks), self._rates())

    @property
    def cost(self) -> Cost:
        """Cost of the program, for a well-conditioned matrix."""
        return self.figures[0]

    @property
    def flops(self) -> float:
        """Floating-point operations of all ranks, where the matrix is well-conditioned."""
        return self.cost.flops

    @property
    def spans(self) -> list[Span]:
        """Timeline of each rank, for a well-conditioned matrix."""
        spans: list[Span] = []
        cost([self.steps(rank) for rank in range(len(self.ranks))], self._rates(), spans=spans)
        return spans

    def _rates(self) -> Rates:
        machine, threads = self.machine, int(self.threads.min(initial=2**31 if len(self.ranks) else 1))
        flops, network = machine.rate(self.compute_type) * threads, speeds(machine, self.hosts)["ranks"]
        return Rates(flops, machine.memory_bandwidth, network, self.message_seconds, self.problem.shares)

    def whole(self, operand: str, number: int) -> tuple[int, int, int, int]:
        """Return the rows and columns of all of a chunk of an operand."""
        rows, cols = self.problem[operand].chunks
        return 0, rows[number] if rows[number] >= 0 else _ALL, 0, cols[0]

    def check_boxes(self, kind: str, boxes: NDArray[np.int64]) -> None:
        """Refuse a peer's request for a part that this plan does not have: chunks are asked for whole."""
        super().check_boxes(kind, boxes)
        for operand, number, *box in boxes.tolist() if kind == "input" else ():
            if tuple(box) != self.whole(self.problem.operands[operand], number):
                raise ProtocolError(f"part {box} of chunk {number} of operand {operand} does not exist")

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks may publish something under a key."""
        return number >= 0

    def shape_of(self, kind: str, matrix: int, number: int) -> tuple[int, int] | None:
        """Return the shape of a chunk of an operand."""
        shape = super().shape_of(kind, matrix, number)
        return shape and (_ALL if shape[0] < 0 else shape[0], shape[1])

    def check(self) -> None:
        """Raise `ProtocolError` if the parts of a plan do not fit each other."""
        super().check()
        count = self.problem["a"].counts[0]
        if not self.ranks or not in_range(np.array(self.owners, np.int32), count, len(self.ranks)):
            raise ProtocolError(f"malformed plan: owners do not fit {count} chunks and {len(self.ranks)} ranks")


@planner
def plan_program(
    problem: ProgramProblem, roster: Sequence[Worker], fields: Mapping[str, Any]
) -> Considered[ProgramPlacement]:
    """Plan a program: chunks stay on those workers of `roster` that have them, or all go to one of these."""
    where = fields["where"]

    def placed(workers: Sequence[int]) -> ProgramPlacement:
        ranks = tuple(sorted(set(workers)))
        plan = ProgramPlacement(method="rows", ranks=ranks, owners=tuple(map(ranks.index, workers)), **fields)
        (held, moved), taken = _memory(plan), plan.cost
        own, waited = Phase(least=taken.seconds - taken.waiting), {"seconds": taken.waiting, "ranks": moved}
        return estimated(plan, held, Work([own, Phase(waited=waited)], moved=taken.bytes_moved + moved))

    workers = _workers_of_rows(problem, len(roster), where.get("a", where.get("b")))
    plans = [placed(workers)]
    if problem.workers is None and "a" in where:
        assignments = []
        if plans[0].cost.waiting > _WORTH_MOVING:
            ((most, _),) = collections.Counter(workers).most_common(1)
            assignments.append([most] * len(workers))
        if plans[0].seconds > _WORTH_MOVING:
            assignments += _evened(workers, problem["a"].chunks[0])
        # Results lie where rows are computed: what is computed of them and of A later has to fetch either.
        clearly = [plan for plan in map(placed, assignments) if plan.seconds < CLEARLY * plans[0].seconds]
        plans = sorted([*plans, *clearly], key=lambda plan: plan.seconds)
    remedies = problem.remedies
    limits, a = [worker.memory_limit for worker in roster if worker.memory_limit], problem["a"]
    if limits and not a.sparse and (largest := max(a.chunks[0]) * a.shape[1] * a.itemsize) > min(limits) * _COARSE:
        remedies.insert(0, f"use smaller chunks of rows: the largest one of A has {format_bytes(largest)}")
    chunks = f"{len(workers)} chunk{'s' * (len(workers) != 1)} of rows"
    return [plans], f"{problem.builder} of a matrix in {chunks}", remedies


def _workers_of_rows(problem: ProgramProblem, count: int, where: NDArray[np.int32] | None) -> list[int]:
    """Assign each chunk of rows to a worker: to its holder, if that is among the `count` chosen ones."""
    rows = problem["a"].chunks[0]
    if where is None:
        return [number * min(count, len(rows)) // len(rows) for number in range(len(rows))]
    loads = collections.Counter(dict.fromkeys(range(count), 0))
    chosen = []
    for holder, size in zip(where.tolist(), rows, strict=True):
        worker = holder if 0 <= holder < count else min(loads, key=loads.__getitem__)
        loads[worker] += abs(size) + 1
        chosen.append(worker)
    return chosen


def _evened(workers: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    """Return the assignment in which the workers that have chunks have about as many rows each, if it is another one.

    As few chunks move as lead there, from the one with most rows to the one with fewest.
    """
    evened, loads = list(workers), collections.Counter[int]()
    for worker, size in zip(workers, rows, strict=True):
        loads[worker] += abs(size)
    while True:
        (most, load), *_, (least, fewest) = [*loads.most_common(), *loads.most_common()[-1:]]
        fitting = [x for x, worker in enumerate(evened) if worker == most and abs(rows[x]) < load - fewest]
        if not fitting:
            return [evened] * (evened != list(workers))
        moved = max(fitting, key=lambda x: min(abs(rows[x]), load - fewest - abs(rows[x])))
        evened[moved] = least
        loads[most] -= abs(rows[moved])
        loads[least] += abs(rows[moved])


def _memory(plan: ProgramPlacement) -> tuple[NDArray[np.float64], int]:
    """Return the bytes that participants hold at most, and those of operands that are fetched."""
    problem, fetched = plan.problem, 0
    held = np.zeros(len(plan.participants))
    owners = np.array(plan.ranks)[list(plan.owners)]
    itemsize, shares = problem.compute_type.itemsize, dict(problem.shares)
    for operand in problem.matrices:
        elements = np.maximum(0, operand.elements)
        share, converted = shares.get(operand.name, 1), operand.dtype != problem.dtype
        sizes = elements * operand.itemsize * share
        if operand.by_ranks:
            for index in plan.ranks:
                # One in use, and some ahead; as they are made, and converted.
                own = int((owners == index).sum())
                count = min(own, 1 + made_ahead(plan.participants[index].nthreads))
                held[index] += count * sizes.max() + bool(own and converted) * int(elements.max()) * itemsize
            continue
        if operand.name in problem.replicated:
            held += sizes.sum()
            fetched += int(sizes.sum()) * (len(plan.ranks) - 1)
            continue
        holders = plan.where.get(operand.name, owners)
        held += np.bincount(holders, sizes, len(held))
        copied = holders != owners
        fetched += int(sizes[copied].sum())
        held += np.bincount(owners, np.where(copied | converted, elements * (itemsize * share), 0), len(held))
        held += np.roll(np.bincount(holders, sizes, len(held)), 1) * (operand.name in problem.kept)
    _, peaks, message = plan.figures
    # GPUs that read each other's memory have places for two messages to all.
    held[list(plan.ranks)] += np.array(peaks) + 2 * message * ENGINES[plan.engine].reads_peers
    return held, fetched
