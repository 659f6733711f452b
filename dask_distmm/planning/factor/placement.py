"""The plan of a factorization on a cluster: its placement, and as work the program of steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import ProtocolError
from dask_distmm.layout import ChunkGrid, redistribution
from dask_distmm.layout.redistribute import Copies
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.engines import ENGINES
from dask_distmm.planning.factor.plan import FactorPlan, factor_plan
from dask_distmm.planning.factor.problem import FactorProblem
from dask_distmm.planning.factor.steps import Part
from dask_distmm.planning.placement import Placement, in_range

# In a request for a panel, the part of it by its number.
PARTS: tuple[Part, ...] = get_args(Part)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FactorPlacement(Placement):
    """How a FactorProblem runs."""

    problem: FactorProblem
    # Columns of a block.
    width: int
    # For each output by name, int32, one for each of its chunks: the rank that puts it together.
    owners: Mapping[str, NDArray[np.int32]]

    @functools.cached_property
    def work(self) -> FactorPlan:
        """The layout of the matrices on the ranks, and each rank's steps."""
        return work_of(self.problem, self.engine, len(self.ranks), self.width, self.method)

    @property
    def grid(self) -> tuple[int, int, int]:
        """One row of ranks: each has all rows of its block columns."""
        return 1, len(self.ranks), 1

    @property
    def compute_type(self) -> str:
        """Name of the type of all matrices."""
        return self.problem.task.dtype

    def gathered(self, operand: str) -> Copies:
        """Return the copies out of an operand's chunks, in the form that ranks hold, to its block columns."""
        turned = self.problem.task.turned(operand).transposed
        chunks = held_chunks(self.problem.chunks_of(operand), turned)
        return redistribution(ChunkGrid(chunks), self.work.input_layout(operand))

    def delivered(self, output: str) -> Copies | None:
        """Return the copies from block columns to an output's chunks, in the form that ranks hold.

        None for an output without block columns: ranks that have it have all of it.
        """
        layout = self.work.output_layout(output)
        if layout is None:
            return None
        turned = self.work.output(output).turned.transposed
        return redistribution(layout, ChunkGrid(held_chunks(self.problem.output(output).chunks, turned)))

    def owned(self, output: str, rank: int) -> list[int]:
        """Return the numbers of an output's chunks that a rank puts together."""
        found: list[int] = np.flatnonzero(self.owners[output] == rank).tolist()
        return found

    def check_boxes(self, kind: str, boxes: NDArray[np.int64]) -> None:
        """Refuse a peer's request for a part that this plan does not have."""
        if kind not in ("input", "panel", "final", "enter") or not len(boxes):
            raise ProtocolError(f"unknown kind of request {kind!r}, or an empty one")
        if kind == "enter":
            if not 0 < boxes[0, 0] < len(self.ranks):
                raise ProtocolError(f"rank {boxes[0, 0]} of {len(self.ranks)} wants to enter")
            return
        if kind == "panel":
            part, panel = boxes[0, :2].tolist()
            if len(boxes) != 1 or not (0 <= part < len(PARTS) and 0 <= panel < self.work.numbers(PARTS[part])):
                raise ProtocolError(f"there is no part {part} of a panel {panel}")
            return
        for matrix, index, r0, r1, c0, c1 in boxes.tolist():
            names = self.problem.operands if kind == "input" else tuple(one.name for one in self.problem.outputs)
            if not 0 <= matrix < len(names):
                raise ProtocolError(f"there is no matrix {matrix} of kind {kind!r}")
            shape = self._shape(kind, names[matrix], index)
            if not (0 <= r0 < r1 <= shape[0] and 0 <= c0 < c1 <= shape[1]):
                raise ProtocolError(f"rows {r0}:{r1}, columns {c0}:{c1} are not within {shape}")

    def _shape(self, kind: str, name: str, index: int) -> tuple[int, int]:
        """Return the shape of a chunk of an operand, or of a rank's part of an output."""
        if kind == "final":
            layout = self.work.output_layout(name)
            if layout is None or not 0 <= index < len(self.ranks):
                raise ProtocolError(f"rank {index} has no block columns of {name!r}")
            return layout.local_shape(index)
        rows, cols = self.problem.chunks_of(name)
        if not 0 <= index < len(rows) * len(cols):
            raise ProtocolError(f"there is no chunk {index} of {name!r}")
        i, j = divmod(index, len(cols))
        return rows[i], cols[j]

    def to_wire(self) -> dict[str, Any]:
        """As a dict of plain types."""
        owners = {name: table.tobytes() for name, table in self.owners.items()}
        return {**super().to_wire(), "width": self.width, "owners": owners}

    @classmethod
    def fields(cls, wire: Any) -> dict[str, Any]:
        """Return the arguments of a plan from what ``to_wire`` gave."""
        return super().fields(wire) | {
            "problem": FactorProblem.from_wire(wire["problem"]),
            "width": int(wire["width"]),
            "owners": {str(name): np.frombuffer(raw, np.int32) for name, raw in wire["owners"].items()},
        }

    def check(self) -> None:
        """Raise `ProtocolError` if the parts of a plan do not fit each other."""
        super().check()
        counts = {one.name: one.count for one in self.problem.outputs}
        good = self.width > 0 and self.ranks and self.owners.keys() == counts.keys()
        if not good or not all(in_range(self.owners[name], counts[name], len(self.ranks)) for name in counts):
            raise ProtocolError(f"malformed plan: width {self.width} or owners do not fit {len(self.ranks)} ranks")


def work_of(problem: FactorProblem, engine: str, count: int, width: int, method: str) -> FactorPlan:
    """Return the layout and the steps of this many ranks of an engine."""
    abilities, shared = ENGINES[engine], method == "columns"
    return factor_plan(
        problem.task, count, width, carries=abilities.carries, collective=abilities.collective, shared=shared
    )


def held_chunks(chunks: Chunks, transposed: bool) -> Chunks:
    """Return chunk sizes in the form that ranks hold of a matrix."""
    return (chunks[1], chunks[0]) if transposed else chunks
