"""Operands of a `Matmul`: kept by name, checked when others take their place, laid out as tiles on the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import dask.array as da
import numpy as np

from dask_distmm.arrays.distribute import place_chunks
from dask_distmm.arrays.request import Request
from dask_distmm.arrays.views import apply_op
from dask_distmm.errors import PlanError
from dask_distmm.planning import Chunks, Plan, Problem, plan
from dask_distmm.planning.assignment import operand_tiles
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import Snapshot

if TYPE_CHECKING:
    from distributed import Client


@dataclasses.dataclass(frozen=True)
class Signature:
    """Shape, type, chunk sizes and kind of chunks (``"numpy"`` or ``"cupy"``) for which an operand was prepared."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[tuple[int, ...], ...]
    array: str

    @classmethod
    def of(cls, array: da.Array) -> Signature:
        """Return the signature of an array."""
        return cls(array.shape, array.dtype, array.chunks, array_kind(array._meta))

    def check(self, name: str, array: da.Array) -> None:
        """Raise `PlanError` if an array differs; `name` is its name in the message."""
        other = Signature.of(array)
        for field in ("shape", "dtype", "chunks", "array"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise PlanError(
                    f"{name} has the {field} {theirs}; this Matmul was made for {mine}. Make another one for it"
                    + (f", or rechunk it to {mine}" if field == "chunks" else "")
                )


@dataclasses.dataclass(frozen=True)
class Layout:
    """The plan that holds for all executions, and with it where their operands lie."""

    # Of the operands as they were given.
    plan: Plan
    # The cluster when the plan was made.
    known: Snapshot

    def place_input(self, client: Client, array: da.Array, chunks: Chunks) -> da.Array:
        """Lay C or an epilog's input out: in the chunks of D and beside them, if it is as large as D."""
        problem = self.plan.problem
        if array.shape != (problem.m, problem.n):
            small: da.Array = client.persist(array)
            return small
        return place_chunks(client, array, chunks, [self.plan.workers[rank] for rank in self.plan.owners.tolist()])

    def fixed(self, request: Request) -> Request:
        """Return a request that leaves no choice: the method, the engine and the workers are those of the plan."""
        made = self.plan
        # The ranks, and after them the workers that multiply nothing but are to have all of D.
        others = [worker.address for worker in self.known.workers if worker.address not in made.workers]
        workers = (*made.workers, *(others if request.formula.replicated else ()))
        return dataclasses.replace(request, method=made.method, engine=made.engine, workers=workers)

    def plan_on_tiles(self, problem: Problem) -> Plan:
        """Return the plan of an execution: the tiles lie where `Operands.lay_out` has put them."""
        workers = {worker.address: worker for worker in self.known.workers}
        addresses = problem.workers if isinstance(problem.workers, tuple) else ()
        tiles = operand_tiles(self.plan)
        return plan(
            problem,
            [workers[address] for address in addresses],
            {name: tiles[name][1].astype(np.int32) for name in "ab"},
            engine=self.plan.engine,
            groups=self.known.groups,
        )


class Operands:
    """The arrays of a `Matmul` by name, as they go into a run: op() is applied, they are tiles once there is a plan."""

    def __init__(self, given: Mapping[str, da.Array], ops: Mapping[str, str]) -> None:
        self._ops = ops
        self.signatures = {name: Signature.of(array) for name, array in given.items()}
        self.arrays = self._turned(given)
        # Names of the planned epilog's inputs.
        self.inputs: tuple[str, ...] = ()
        self._placed: set[str] = set()

    def matching(
        self, operands: Mapping[str, da.Array], inputs: Mapping[str, da.Array]
    ) -> tuple[dict[str, da.Array], list[str]]:
        """Return all arrays with some of them replaced, and the names of the new ones; nothing is changed yet."""
        for name, array in operands.items():
            if name not in self.signatures:
                raise PlanError("c was given; this Matmul was made without one: make another one with c and beta")
            self.signatures[name].check(name, array)
        for name, array in inputs.items():
            if name not in self.inputs:
                known = ", ".join(map(repr, self.inputs)) or "none"
                raise PlanError(f"epilog_inputs has {name!r}; the planned epilog's inputs are: {known}")
            self.signatures[name].check(name, array)
        return {**self.arrays, **self._turned(operands), **inputs}, [*operands, *inputs]

    def replace(self, arrays: Mapping[str, da.Array], new: list[str]) -> None:
        """Take the arrays that `matching` has returned."""
        self.arrays.update(arrays)
        self._placed.difference_update(new)

    def replace_inputs(self, inputs: Mapping[str, da.Array]) -> None:
        """Take the inputs of another epilog, for another plan: all arrays are to be laid out again."""
        for name in self.inputs:
            del self.arrays[name]
        self.arrays.update(inputs)
        self.signatures.update({name: Signature.of(array) for name, array in inputs.items()})
        self.inputs = tuple(inputs)
        self._placed.clear()

    def missing(self, arrays: Mapping[str, da.Array] | None = None) -> list[str]:
        """Return the names of the arrays that were released and not given again."""
        expected = ("a", "b", *(("c",) if "c" in self.signatures else ()), *self.inputs)
        return [name for name in expected if name not in (self.arrays if arrays is None else arrays)]

    def need_all(self) -> None:
        """Refuse to go on without arrays that were released."""
        if missing := self.missing():
            raise PlanError(f"{', '.join(missing)} released: give them again with reset_operands()")

    def lay_out(self, client: Client, layout: Layout, request: Request) -> Request:
        """Lay the arrays out that are not yet; return the request with all of them laid out."""
        made = layout.plan
        for name, (chunks, ranks) in operand_tiles(made).items():
            if name not in self._placed:
                addresses = [made.workers[rank] for rank in ranks.tolist()]
                self.arrays[name] = place_chunks(client, self.arrays[name], chunks, addresses)
                self._placed.add(name)
        for name, array in request.extras:
            if name not in self._placed:
                self.arrays[name] = layout.place_input(client, array, request.out_chunks)
                self._placed.add(name)
        extras = [(name, self.arrays[name]) for name, _ in request.extras]
        return dataclasses.replace(request, a=self.arrays["a"], b=self.arrays["b"], extras=extras)

    def release(self) -> None:
        """Let go of all arrays: Dask frees their tiles."""
        self.arrays.clear()
        self._placed.clear()

    def _turned(self, given: Mapping[str, da.Array]) -> dict[str, da.Array]:
        """Apply op() to those of A and B that are given."""
        return {name: apply_op(name, x, self._ops[name]) if name in self._ops else x for name, x in given.items()}
