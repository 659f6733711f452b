"""A factorization of Dask arrays: the mathematics, and the chunks of its operands and outputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import Options, options_from_wire
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Chunks, Computation, Output, chunks_from_wire
from dask_distmm.planning.demand import Demand
from dask_distmm.planning.engines import ENGINES, Abilities
from dask_distmm.planning.factor.problem import Factorization
from dask_distmm.planning.part import Part


@dataclasses.dataclass(frozen=True, slots=True)
class FactorProblem(Computation):
    """A `Factorization` whose matrices are Dask arrays; a `Computation`."""

    kind: ClassVar[str] = "factorization"
    part: ClassVar[Part | None] = None

    # Names the computation everywhere; the arrays of its outputs are called after it.
    name: str
    # What is computed.
    task: Factorization
    # For each input of the task Dask's chunk sizes along both axes, and the name of its type: ranks convert it.
    chunks: tuple[Chunks, ...]
    dtypes: tuple[str, ...]
    # The outputs to be made, with their names in the task. A vector is a row, a number a matrix of one element.
    wanted: tuple[Output, ...]
    # As asked for; ``"auto"`` leaves the choice to the cost model.
    engine: str
    # Addresses to use, or their number, or None for all.
    workers: tuple[str, ...] | int | None
    # What the run needs of the client's configuration.
    options: Options
    # What the chunks are: ``"numpy"`` or ``"cupy"``.
    array: str = "numpy"
    # As asked for: ``"auto"``, ``"local"`` or ``"columns"``.
    method: str = "auto"
    # Whether the user gives A up: its chunks may go as soon as all ranks have read them.
    overwrite_a: bool = False

    def __post_init__(self) -> None:
        dealt = self.task.spectral and self.method == "columns" and self.task.a_shape[0]
        if dealt and not any(map(self._shared_by, ENGINES.values())):
            what = f"{self.task.kind} of a pair of matrices" if self.task.b_shape else f"{self.task.kind} in this form"
            raise PlanError(f"{what} is computed by one worker: expected method 'auto' or 'local'")
        shapes = [self.task.a_shape, *([self.task.b_shape] if self.task.b_shape is not None else [])]
        for name, shape, chunks in zip(self.task.inputs, shapes, self.chunks, strict=True):
            if tuple(map(sum, chunks)) != shape:
                raise PlanError(f"{name.upper()} is {shape}, its chunks add up to {tuple(map(sum, chunks))}")
        made = {one.name: one for one in self.task.outputs}
        for output in self.wanted:
            if output.name not in made:
                raise PlanError(f"{self.task.kind} has no output {output.name!r}; it has {', '.join(made)}")
            expected = as_matrix(made[output.name].shape)
            if tuple(map(sum, output.chunks)) != expected:
                raise PlanError(f"{output.name} is {expected}, its chunks are {output.chunks}")

    def _shared_by(self, abilities: Abilities) -> bool:
        """Whether ranks of an engine, if it is one of those asked for, compute a spectral decomposition together."""
        return self.engine in ("auto", abilities.name) and abilities.decomposes(self.task)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the matrices that are read."""
        return self.task.inputs

    @property
    def given_up(self) -> tuple[str, ...]:
        """A, if it is to be overwritten."""
        return ("a",) if self.overwrite_a else ()

    def keeping(self) -> Self:
        """Return the same computation, by which A is not given up."""
        return dataclasses.replace(self, overwrite_a=False)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The arrays that are made."""
        return self.wanted

    @property
    def dtype(self) -> np.dtype:
        """Type that is computed in."""
        return dtype_from_name(self.task.dtype)

    @property
    def demand(self) -> Demand:
        """The demand that it makes on the workers."""
        dtypes = (self.task.dtype,) * 3
        plaintext = self.options.allow_plaintext_nccl
        return Demand(self.engine, self.array, dtypes, self.workers, plaintext, self.kind)

    @property
    def flops(self) -> float:
        """Floating-point operations: as LAPACK Working Note 41 counts them; four times as many for complex types."""
        return self.task.flops

    def chunks_of(self, operand: str) -> Chunks:
        """Chunk sizes of an operand."""
        return self.chunks[self.operands.index(operand)]

    def dtype_of(self, operand: str) -> str:
        """Name of the type of an operand."""
        return self.dtypes[self.operands.index(operand)]

    def output(self, name: str) -> Output:
        """Return an output by its name."""
        return next(one for one in self.wanted if one.name == name)

    def numbers(self, name: str) -> NDArray[np.int64]:
        """Return the numbers of all chunks of an operand or an output."""
        counts = self.chunk_counts(name) if name in self.operands else self.output(name).counts
        return np.arange(math.prod(counts))

    def columns(self, output: str) -> int:
        """Return how many columns of chunks an output has."""
        return self.output(output).counts[1]

    @classmethod
    def from_wire(cls, wire: Any) -> FactorProblem:
        """Make it from what ``to_wire`` gave, checked."""
        try:
            task = dict(wire["task"])
            m, n = map(int, task["a_shape"])
            task["a_shape"] = m, n
            if task["b_shape"] is not None:
                m, n = map(int, task["b_shape"])
                task["b_shape"] = m, n
            if task["subset"] is not None:
                first, last = map(int, task["subset"])
                task["subset"] = first, last
            wanted = tuple(
                Output(str(one["name"]), chunks_from_wire(one["chunks"]), dtype_from_name(one["dtype"]).name)
                for one in wire["wanted"]
            )
            workers = wire["workers"]
            problem = cls(
                name=str(wire["name"]),
                task=Factorization(**task),
                chunks=tuple(map(chunks_from_wire, wire["chunks"])),
                dtypes=tuple(dtype_from_name(name).name for name in wire["dtypes"]),
                wanted=wanted,
                engine=str(wire["engine"]),
                workers=tuple(map(str, workers)) if isinstance(workers, list | tuple) else workers,
                options=options_from_wire(wire["options"]),
                array=str(wire["array"]),
                method=str(wire["method"]),
                overwrite_a=bool(wire["overwrite_a"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"malformed problem: {error!r}") from error
        if problem.array not in ("numpy", "cupy") or problem.method not in ("auto", "local", "columns"):
            raise ProtocolError(f"malformed problem: array {problem.array!r}, method {problem.method!r}")
        return problem


def as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an output as a matrix: a vector is a row, a number is a matrix of one element."""
    return (*(1,) * (2 - len(shape)), *shape)
