"""The transport of a product on several islands: GPUs that read each other's memory, and none of the others'.

::

    prepare()   memory for chunks from other islands is allocated, and offered to the ranks of this one
    execute()   the gate: all ranks go on, or none
                NCCL sends each chunk once to each island that needs it, while what is here is multiplied
                the steps; these chunks are pulled from the rank that got them, as other chunks are
                partial sums, and parts of chunks of D, of ranks on other islands come over Dask's comms

All ranks meet behind the exchange, on the device: from then on each chunk is on its island.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.gpu.collective import GroupTransport, RankGroup
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.readable import ChunkPulls
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.layout import Moves
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Plan
from dask_distmm.planning.schedule import sent_between
from dask_distmm.programs.steps import Key


class IslandPulls(GroupTransport, ChunkPulls):
    """The chunks that a rank can read: those of its island, and those that its island gets from others."""

    def __init__(self, engine: Any, job: ProgramJob) -> None:
        ChunkPulls.__init__(self, engine, job)
        self.join(engine.between, job, [engine.coming, *self.streams, engine.looking, engine.sums, engine.stream])
        self._sent = job.memory.sent
        self._exchanges: list[Exchange] = []
        # Where chunks come, with their operands and numbers.
        self._targets: list[tuple[int, int, Any]] = []

    def _imports(self, job: ProgramJob) -> list[tuple[int, int, Any]]:
        plan = self.plan
        for name, sent in sent_between(plan).items():
            moves = _moves(plan, name, *sent)
            dtype, order = np.dtype(carried(plan.problem.matrix_types["ab".index(name)], "cupy")), plan.orders[name]
            numbers = moves.dst[moves.dst_owner == self.me].tolist()
            shapes = map(plan.problem[name].chunk_shape, numbers)
            arrays = self.engine.exporter.together([(shape, dtype, order) for shape in shapes])
            targets = dict(zip(numbers, arrays, strict=True))
            sources = {at: job.chunks[name, at] for at in moves.src[moves.src_owner == self.me].tolist()}
            shuffle = Shuffle(moves, self.me, plan.ranks, sources, targets, order, device_bytes)
            self._exchanges.append(Exchange(shuffle))
            self._targets += ((plan.problem.operands.index(name), at, array) for at, array in targets.items())
        self.note(*(x for *_, x in self._targets), *itertools.chain(*(x.buffers for x in self._exchanges)))
        return self._targets

    def begin(self, job: ProgramJob) -> None:
        """Enter what is collective, and queue the exchange between islands."""
        if not any(len(chunks) for chunks, _, _ in sent_between(self.plan).values()):
            return
        self.enter(job, RankGroup)
        stream = self._work[0]
        # Tables of copies are put on the device by the default stream.
        stream.wait_event(record(cp.cuda.Stream.null))
        for exchange in self._exchanges:
            exchange.run(stream, self.group.comm)
            self.pulled_bytes += exchange.received_bytes
        self.group.comm.meet()
        self.imported = record(stream)

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Publish sums for ranks out of reach, which are complete when the stream has come here."""
        super().publish(key, [record(self.engine.stream), *arrays])

    def answer(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return what a peer has asked for."""
        if kind == "enter":
            return super().answer(kind, boxes)
        complete, *arrays = self.published(kind, boxes).result()
        self.ended.wait(complete)
        return self._sent(arrays)

    def settle(self, job: ProgramJob) -> None:
        """Let all streams end. Those that wait for a rank which is gone never do: then the process has to."""
        if self.settled():
            self._entry.leave()
            self.engine.mappings.trim()
        else:
            self._engine.stuck += [job.arrays, self]
            self._entry.watch()


def _moves(plan: Plan, name: str, chunks: Any, senders: Any, getters: Any) -> Moves:
    """Return whole chunks on their way between participants."""
    rows, cols = (np.asarray(sizes, np.int64) for sizes in plan.problem[name].chunks)
    row, col = np.divmod(chunks, len(cols))
    none = np.zeros_like(chunks)
    return Moves(chunks, chunks, none, none, none, none, rows[row], cols[col], senders, getters)
