"""Barriers: the tasks that wait for one, and the multiply that makes their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_distmm.errors import ProtocolError
from dask_distmm.planning import Computation, Problem, problem_from_wire
from dask_distmm.runtime.keys import ChunkTask, operand_keys
from dask_distmm.runtime.parts import part_of

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

# Number of tasks that are looked up before others get the event loop again.
_SLICE = 5000


class Barrier:
    """A barrier that is parked or on its way there."""

    def __init__(self, ts: TaskState) -> None:
        self.ts, self.key = ts, ts.key
        wire, keys = operand_keys(ts.run_spec)
        self.problem: Computation = problem_from_wire(wire)
        self.keys = dict(zip(self.problem.inputs, keys, strict=True))
        self.losses = self.moves = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def parked(self) -> bool:
        """Whether all inputs of the barrier are in memory."""
        return bool(self.ts.state == "no-worker")

    @property
    def over(self) -> bool:
        """Whether no task waits for the barrier any more, or it has failed."""
        return self.ts.state in ("released", "forgotten", "erred")

    async def wanted(self) -> dict[Any, tuple[str, int]]:
        """Return the tasks that wait for the barrier by key: which output's they are, and their chunks' numbers.

        Others get the event loop in between.
        """
        found: dict[Any, tuple[str, int]] = {}
        numbers = {output.name: self.problem.numbers(output.name).tolist() for output in self.problem.outputs}
        for at, ts in enumerate(list(self.ts.waiters or ())):
            if at and at % _SLICE == 0:
                await asyncio.sleep(0)
            found[ts.key] = self._chunk_of(ts, numbers)
        return found

    def _chunk_of(self, ts: TaskState, numbers: Mapping[str, Sequence[int]]) -> tuple[str, int]:
        """Return which output's chunk, and which of its chunks, a task is; its key has the place in its array."""
        task = ts.run_spec
        if isinstance(task, ChunkTask) and task.index < len(numbers.get(task.output, ())):
            number = numbers[task.output][task.index]
            if ts.key[1:] == divmod(number, self.problem.columns(task.output)):
                return task.output, number
        raise ProtocolError(f"task {ts.key!r} depends on {self.key!r}, and is not a chunk of its result")

    def part(self, wanted: Mapping[Any, tuple[str, int]]) -> tuple[Computation, dict[str, list[Any]]]:
        """Return the computation that makes the wanted chunks, and the keys of its operands' chunks."""
        # Only a product can be made in part.
        numbers = {number for _, number in wanted.values()}
        if isinstance(self.problem, Problem) and len(numbers) < len(self.problem.numbers("")):
            return part_of(self.problem, self.keys, numbers)
        return self.problem.making({output for output, _ in wanted.values()}), dict(self.keys)


def deliveries(problem: Computation, wanted: Mapping[Any, tuple[str, int]]) -> list[tuple[str, str, bytes]]:
    """Return for each array of which chunks are waited for its output, its name, and the others' numbers, as int64."""
    arrays: dict[tuple[str, str], list[int]] = {}
    for (array, *_), (output, number) in wanted.items():
        arrays.setdefault((output, array), []).append(number)
    return [
        (output, array, np.setdiff1d(problem.numbers(output), np.array(numbers, np.int64)).tobytes())
        for (output, array), numbers in arrays.items()
    ]
