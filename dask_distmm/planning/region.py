"""Regions: a part of a graph of Dask's own tasks as one run, a static schedule. Pure.

The tasks of a region depend on nothing but chunks that are there before the run, on small constants, and on each other.
They are the graph's own tasks, so that values, types and errors are those that Dask would have. Each has an owner, the
rank that has most bytes of what the task reads; what other ranks need of it they pull as soon as it is there.

A run calls each task once, in any order in which a task comes after those that it depends on. So ranks can't wait for
each other in a circle, whatever the tasks do.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.planning.computation import Computation, NamedMatrix, Worker
from dask_distmm.planning.model import Phase, Work
from dask_distmm.planning.placement import Considered, Placement, estimated, in_range, planner
from dask_distmm.programs.steps import PART

# Seconds that a rank takes around a task, and for a value that comes from another rank.
TASK_SECONDS, MESSAGE_SECONDS = 5e-5, 2e-4
# The operands: chunks that are there, and tasks.
INPUTS, TASKS = "a", "g"
Needs = Sequence[Sequence[int]]
_NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Region:
    """A region of a graph as `explain` shows it."""

    # How many tasks of each name it has, how many chunks it begins with and makes; names of products that are part of
    # it.
    counts: Mapping[str, int]
    inputs: int
    outputs: int
    products: Sequence[str]
    # Seconds that the tasks take, and what comes to that with a run, and with Dask's own tasks.
    seconds: tuple[float, float, float]
    # Whether it is a run.
    chosen: bool


def operand(name: str, sizes: Sequence[int]) -> NamedMatrix:
    """Return an operand of a region: chunks of these sizes in bytes, of any type."""
    return NamedMatrix(name, (tuple(sizes), (1,)), "uint8", by_ranks=name == TASKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionProblem(Computation):
    """A part of a graph of Dask's own tasks; a `Computation`.

    Values have numbers: chunks that are there first, then those that tasks make, in an order of the graph.
    """

    kind: ClassVar[str] = "region"

    # For each task the values that it reads; for each chunk of all outputs the task that makes it, -1 if it is not
    # wanted.
    needs: Sequence[Sequence[int]]
    results: Sequence[int]
    # Of each task the bytes that its value is expected to have, and the seconds that it is expected to take.
    sizes: Sequence[int]
    seconds: Sequence[float]
    # How many tasks of each name there are, by Dask's names of tasks without their tokens.
    counts: Mapping[str, int]

    @property
    def compute_type(self) -> np.dtype:
        """A type that every engine accepts."""
        return np.dtype("float64")

    @property
    def flops(self) -> float:
        """Zero: unknown."""
        return 0.0

    def part(self, wanted: Collection[tuple[str, int]]) -> tuple[Self, list[int], list[int]]:
        """Return the region that computes some chunks of outputs, and the numbers of its inputs and tasks."""
        first, places = self[INPUTS].count, [(output.name, x) for output in self.wanted for x in range(output.count)]
        results = [task if place in wanted else -1 for task, place in zip(self.results, places, strict=True)]
        needed = {first + task for task in results if task >= 0}
        for task in reversed(range(len(self.needs))):
            if first + task in needed:
                needed.update(self.needs[task])
        kept = [value for value in range(first) if value in needed]
        tasks = [task for task in range(len(self.needs)) if first + task in needed]
        number = {value: at for at, value in enumerate([*kept, *(first + task for task in tasks)])}
        sizes = [self.sizes[task] for task in tasks]
        part = dataclasses.replace(
            self,
            matrices=(operand(INPUTS, [self[INPUTS].chunks[0][x] for x in kept]), operand(TASKS, sizes)),
            needs=[[number[value] for value in self.needs[task]] for task in tasks],
            results=[number[first + task] - len(kept) if task >= 0 else -1 for task in results],
            sizes=sizes,
            seconds=[self.seconds[task] for task in tasks],
        )
        return part, kept, tasks

    def check(self) -> None:
        """Raise if tasks need what is made after them, or an output what no task makes."""
        super().check()
        inputs, tasks = (self[name].count for name in (INPUTS, TASKS))
        lists = self.needs, self.sizes, self.seconds
        if any(len(listed) != tasks for listed in lists) or len(self.results) != sum(x.count for x in self.wanted):
            raise ValueError(f"lists of {[*map(len, lists)]} for {tasks} tasks")
        for number, needed in enumerate(self.needs):
            if any(not 0 <= value < inputs + number for value in needed):
                raise ValueError(f"task {number} needs {needed}")
        if any(not -1 <= task < tasks for task in self.results):
            raise ValueError(f"outputs {self.results} of {tasks} tasks")


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class RegionPlacement(Placement):
    """How a region runs."""

    asked_for: ClassVar[tuple[str, ...]] = (PART,)
    problem: RegionProblem
    # For each task the rank that calls it.
    owners: tuple[int, ...]

    def needed(self, rank: int, operand: str) -> NDArray[np.int64]:
        """Return the numbers of the tasks that a rank calls."""
        return np.flatnonzero(np.array(self.owners) == rank)

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks may publish a value of this number."""
        return 0 <= number < sum(self.problem[name].count for name in (INPUTS, TASKS))

    def holders(self) -> list[int]:
        """Return for each value the rank that has it."""
        number = {participant: rank for rank, participant in enumerate(self.ranks)}
        return [*(number[holder] for holder in self.where[INPUTS].tolist()), *self.owners]

    def check(self) -> None:
        """Raise `ProtocolError` if the parts of a plan do not fit each other."""
        super().check()
        owned = in_range(np.array(self.owners, np.int32), len(self.problem.needs), len(self.ranks))
        if not owned or not {*self.where.get(INPUTS, np.array([-1])).tolist()} <= {*self.ranks}:
            raise ProtocolError("malformed plan: owners of tasks, or holders of chunks, are not ranks")


class Assignment(NamedTuple):
    """The rank that calls each task, with the messages and the memory that follow."""

    owners: list[int]
    # Of each worker: seconds of its tasks, values that it gets from others and their bytes, and the most bytes that it
    # holds.
    seconds: list[float]
    messages: list[int]
    moved: list[int]
    held: list[int]


def assign(
    needs: Needs, sizes: Sequence[int], seconds: Sequence[float], held: Sequence[int], where: Sequence[int], count: int
) -> Assignment:
    """Assign each task to the one of `count` workers that has most bytes of its inputs, or to the idlest of several.

    `held` and `where` are bytes and holders of the chunks that are there.
    """
    holders, nbytes, first = list(where), [*held, *sizes], len(held)
    busy = [0.0] * count
    messages, moved, live, peak = ([0] * count for _ in range(4))
    here: list[set[int]] = [set() for _ in range(count)]
    uses = collections.Counter(value for needed in needs for value in set(needed))
    published = set[int]()
    for value, holder in enumerate(where):
        live[holder] += held[value]

    def give(task: int, owner: int) -> None:
        holders[first + task] = owner
        busy[owner] += seconds[task] + TASK_SECONDS
        live[owner] += sizes[task]

    for task, needed in enumerate(needs):
        holders.append(_NOBODY)
        # A task without inputs is called on the first rank that needs it.
        if not needed:
            continue
        weights = collections.Counter[int]()
        for value in needed:
            if (holder := holders[value]) != _NOBODY:
                weights[holder] += nbytes[value] + 1
        most = max(weights.values(), default=0)
        fitting = [worker for worker, weight in weights.items() if weight >= most] or range(count)
        owner = min(fitting, key=busy.__getitem__)
        for value in set(needed):
            if holders[value] == _NOBODY:
                give(value - first, owner)
            if holders[value] != owner and value not in here[owner]:
                here[owner].add(value)
                messages[owner] += 1
                published.add(value)
                moved[owner] += nbytes[value]
                live[owner] += nbytes[value]
        give(task, owner)
        peak[owner] = max(peak[owner], live[owner])
        for value in set(needed):
            uses[value] -= 1
            # Published values stay until the end of the run.
            if not uses[value] and value >= first and value not in published:
                live[holders[value]] -= nbytes[value]
    for task, holder in enumerate(holders[first:]):
        if holder == _NOBODY:
            give(task, 0)
    return Assignment(holders[first:], busy, messages, moved, list(map(max, peak, live)))


def expected_seconds(assignment: Assignment, threads: Sequence[int]) -> float:
    """Return the seconds of the slowest rank of an assignment, by the ranks' threads."""
    return max(
        seconds / max(1, nthreads) + MESSAGE_SECONDS * messages
        for seconds, nthreads, messages in zip(assignment.seconds, threads, assignment.messages, strict=True)
    )


@planner
def plan_region(
    problem: RegionProblem, roster: Sequence[Worker], fields: Mapping[str, Any]
) -> Considered[RegionPlacement]:
    """Plan a region: tasks run where the chunks are that they read."""
    inputs, count = problem[INPUTS], len(roster)
    places = fields["where"].get(INPUTS)
    if places is None:
        places = np.arange(inputs.count, dtype=np.int32) * count // max(1, inputs.count)
    if places.size and places.max() >= count:
        workers = fields["participants"][count:]
        raise PlanError(f"{workers[0].address if workers else 'a worker'} has chunks, and can't take part in the run")
    assignment = assign(problem.needs, problem.sizes, problem.seconds, inputs.chunks[0], places.tolist(), count)
    ranks = sorted({*assignment.owners, *places.tolist()})
    number = {worker: rank for rank, worker in enumerate(ranks)}
    where, owners = {INPUTS: places.astype(np.int32)}, tuple(number[owner] for owner in assignment.owners)
    fields = {**fields, "participants": tuple(roster), "where": where, "method": "tasks"}
    plan = RegionPlacement(ranks=tuple(ranks), owners=owners, **fields)
    seconds = expected_seconds(assignment, [worker.nthreads for worker in roster])
    work = Work([Phase(least=seconds)], moved=sum(assignment.moved))
    return [[estimated(plan, np.array(assignment.held, float), work)]], f"{len(problem.needs)} tasks of a graph", []
