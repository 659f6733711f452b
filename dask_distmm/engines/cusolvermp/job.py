"""One participant's side of a factorization that all ranks compute together.

::

    prepare()   chunks are brought to the device, block columns are allocated
    execute()   chunks of workers that are no ranks are fetched over Dask's comms
                the gate: all ranks go on, or none
                block columns are made of the ranks' chunks, by NCCL
                the library's calls
                chunks of the outputs are made of all ranks' block columns, by NCCL

What can fail on one rank alone, such as an allocation, is agreed on by all of them (`Group.together`). A rank that is
alone does as the other engines do: it takes the steps of a factorization on its own, and needs no library that several
share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.engines.base import ChunkKey, ResultKey, wait_checked
from dask_distmm.engines.cusolvermp.execution import SharedExecution
from dask_distmm.engines.cusolvermp.library import Group
from dask_distmm.engines.cusolvermp.state import CusolverMpState
from dask_distmm.engines.cusolvermp.trade import Gift, Receipt, trade
from dask_distmm.engines.gpu.entry import CollectiveEntry
from dask_distmm.engines.gpu.factor import GpuFactorJob
from dask_distmm.engines.gpu.operands import record
from dask_distmm.planning.computation import Output
from dask_distmm.planning.cusolvermp.costs import share
from dask_distmm.planning.factor.placement import FactorPlacement
from dask_distmm.planning.factor.planner import way_of

# Seconds that work which was begun may take to end after an error, and between two looks whether it has.
_SETTLING, _LOOK = 5.0, 1e-3


class CusolverMpJob(GpuFactorJob):
    """One participant's side of one run; see the text of the module."""

    def __init__(
        self,
        plan: FactorPlacement,
        me: int,
        chunks: Mapping[ChunkKey, Any],
        comm: Comm,
        progress: Callable[[float], None],
        ready: Sequence[Any],
        engine: CusolverMpState,
    ) -> None:
        super().__init__(plan, me, chunks, comm, progress, ready, engine)
        self._state, self._shared = engine, len(plan.ranks) > 1
        least = share(way_of(plan.problem.task), len(plan.ranks))
        self._entry = CollectiveEntry(plan, self.rank, comm, self.ended, least)
        self._traded = 0

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices that have arrived from other participants, but for what the library moves."""
        return self.comm.received_bytes + self._traded

    def prepare(self) -> None:
        """Bring chunks to the device, and allocate this rank's block columns."""
        self._upload()
        if self.rank is None or not self._shared:
            super().prepare()
            return
        columns = self.plan.work.columns
        # Ranks without a column have memory, too: the library wants a pointer.
        shape = columns.rows, max(1, columns.local_cols(self.rank))
        array = cp.empty(shape, self.plan.problem.dtype, order="F")
        self._execution = SharedExecution(
            self.plan.work, self.rank, self.kernels, self.exchange, self.ended.check, self.progress, array
        )

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Gather the operands, let the library compute, put the outputs together."""
        if self.rank is None:
            return {}
        self._stream.wait_event(record(cp.cuda.Stream.null))
        try:
            with self._stream:
                if self._shared:
                    self._outside = self._fetched()
                    self._entry.enter(has_group=self.plan.group in self._state.groups)
                    self._group = self._joined()
                made = self._given_back(super().execute())
            self._stream.synchronize()
        except BaseException:
            self._settle()
            raise
        finally:
            self._entry.leave()
        arrays = [self._execution.array, *self.chunks.values(), *made.values()]
        self.held_bytes = sum({int(x.data.ptr): int(x.nbytes) for x in arrays if hasattr(x.data, "ptr")}.values())
        return made

    def _settle(self) -> None:
        """Let work end that was begun before an error: what it is done in is freed then. It may never end."""
        end = time.monotonic() + _SETTLING
        while not self._stream.done and time.monotonic() < end:
            time.sleep(_LOOK)

    def _joined(self) -> Group:
        """Return the ranks' group; all have it, or all make it now."""
        groups, number = self._state.groups, self.plan.group
        if number not in groups:
            assert self.rank is not None
            groups[number] = Group(
                len(self.plan.ranks),
                self.rank,
                self._entry.unique_id,
                self.plan.workers,
                self._stream,
                self._state.handle,
            )
        assert isinstance(self._execution, SharedExecution)
        self._execution.group = groups[number]
        return groups[number]

    def _fetched(self) -> dict[tuple[str, int], list[Any]]:
        """Return by operand and holder the parts that workers have which are no ranks."""
        assert self.rank is not None
        asked: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        for number, name in enumerate(self.plan.problem.operands):
            for _, box in self._parts_of(name, self.rank):
                holder = int(self.plan.where[name][box[0]])
                if holder not in self.plan.ranks:
                    asked.setdefault((name, holder), []).append((number, *box))
        answers = {key: self.comm.fetch(key[1], "input", np.array(boxes), False) for key, boxes in asked.items()}
        return {key: list(wait_checked(answer, self.ended.check)) for key, answer in answers.items()}

    def _gather(self) -> None:
        """Write this rank's block columns of the operands."""
        if not self._shared:
            super()._gather()
            return
        assert self.rank is not None
        plan, rank_of = self.plan, {index: rank for rank, index in enumerate(self.plan.ranks)}
        for name in plan.problem.operands:
            where = plan.where[name]

            def putting(copy: Any, name: str = name) -> Callable[[Any], None]:
                return lambda part: self._put(name, copy, part)

            gifts, receipts = [], []
            outside = {holder: iter(parts) for (operand, holder), parts in self._outside.items() if operand == name}
            for peer in range(len(plan.ranks)):
                for copy, (index, r0, r1, c0, c1) in self._parts_of(name, peer):
                    holder = int(where[index])
                    if peer != self.rank:
                        if holder == self.me:
                            gifts.append(Gift(peer, self.chunks[name, index][r0:r1, c0:c1]))
                    elif holder == self.me:
                        putting(copy)(self.chunks[name, index][r0:r1, c0:c1])
                    elif holder in outside:
                        putting(copy)(cp.asarray(next(outside[holder]), plan.problem.dtype))
                    else:
                        receipts.append(Receipt(rank_of[holder], (r1 - r0, c1 - c0), putting(copy)))
            self._traded += trade(self._group.comm, gifts, receipts, plan.problem.dtype)
        self._outside = {}

    def _refuse(self, problem: str) -> None:
        """Raise on all ranks if there is a problem with the operands on one of them."""
        if self._shared and self.plan.problem.task.check_finite:
            self._group.refuse(problem)
        else:
            super()._refuse(problem)

    def _assemble(self, number: int, output: Output) -> dict[ResultKey, Any]:
        """Return the chunks of an output that this rank puts together."""
        if not self._shared or self.plan.work.output_layout(output.name) is None:
            return super()._assemble(number, output)
        found: dict[ResultKey, Any] = self._group.together(lambda: self._blanks(output))
        part = self._parts[output.name]

        def storing(index: int, copy: Any) -> Callable[[Any], None]:
            return lambda part: self._store(output, found[output.name, index], copy, part)

        gifts, receipts = [], []
        for peer in range(len(self.plan.ranks)):
            for index, copy in self._taken(output, peer):
                if peer != self.rank:
                    if copy.src == self.rank:
                        gifts.append(Gift(peer, part[copy.src_index]))
                elif copy.src == self.rank:
                    storing(index, copy)(part[copy.src_index])
                else:
                    receipts.append(Receipt(copy.src, (copy.nrows, copy.ncols), storing(index, copy)))
        self._traded += trade(self._group.comm, gifts, receipts, np.dtype(output.dtype))
        return found

    # Messages between participants

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self._entry.entered(int(boxes[0, 0])) if kind == "enter" else super().available(kind, boxes)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of the chunks that are here, or the id under which the ranks make their communicator."""
        return list(self._entry.answer()) if kind == "enter" else super().serve(kind, boxes, flat)

    # The end

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._entry.abort(error)
        super().abort(error)
