"""Barriers: the tasks that wait for one, and the multiply that makes their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_distmm.errors import ProtocolError
from dask_distmm.planning import Computation, Problem, problem_from_wire, restrict
from dask_distmm.runtime.keys import operand_keys, output_name

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

# So many tasks are looked up before others get the event loop again.
_SLICE = 5000


class Barrier:
    """A barrier that is parked or on its way there."""

    def __init__(self, ts: TaskState) -> None:
        self.ts, self.key = ts, ts.key
        wire, keys = operand_keys(ts.run_spec)
        self.problem: Computation = problem_from_wire(wire)
        self.keys = dict(zip(self.problem.inputs, keys, strict=True))
        part = self.problem.part
        # For each output by the name of its array: its name, its columns of chunks, and which chunks it has.
        self._outputs = {
            output_name(self.problem.result_name, output.name): (
                output.name,
                self.problem.columns(output.name),
                range(output.count) if part is None else frozenset(part.every("d").tolist()),
            )
            for output in self.problem.outputs
        }
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
        for at, ts in enumerate(list(self.ts.waiters or ())):
            if at and at % _SLICE == 0:
                await asyncio.sleep(0)
            match ts.key:
                case (str(array), int(i), int(j)) if array in self._outputs:
                    output, ncols, numbers = self._outputs[array]
                    found[ts.key] = output, i * ncols + j
                    known = i * ncols + j in numbers
                case _:
                    known = False
            if not known:
                raise ProtocolError(f"task {ts.key!r} depends on {self.key!r}, and is no chunk of its result")
        return found

    def part(self, wanted: Mapping[Any, tuple[str, int]]) -> tuple[Computation, dict[str, list[Any]]]:
        """Return the computation that makes the wanted chunks, and the keys of its operands' chunks."""
        problem, keys = self.problem, self.keys
        numbers = {number for _, number in wanted.values()}
        # Only a product can be made in part.
        part = None
        if isinstance(problem, Problem) and len(numbers) < len(problem.numbers("")):
            part = restrict(problem, numbers)
        if part is None:
            return problem, dict(keys)
        every = {name: keys[problem.source_of(name)] for name in part.operands}
        return part, {name: [every[name][number] for number in part.numbers(name).tolist()] for name in every}


def unwanted(problem: Computation, wanted: Mapping[Any, tuple[str, int]]) -> list[tuple[str, bytes]]:
    """Return the numbers, as int64, of chunks that a run makes and nobody waits for, for each output that has some."""
    found = []
    for output in (output.name for output in problem.outputs):
        every = problem.numbers(output)
        asked = np.array([number for name, number in wanted.values() if name == output], np.int64)
        if len(asked) < len(every):
            found.append((output, np.setdiff1d(every, asked).tobytes()))
    return found
