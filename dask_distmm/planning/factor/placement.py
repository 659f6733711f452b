"""The plan of a factorization on a cluster: its placement, and as work the program of steps; and who plans it.

::

    seconds    = compute + panels + transfer
    compute    = flops / (ranks * rate * share of a product's rate); of shared eigenvalues see `sharing`
    panels     = a message for each panel
    transfer   = (operands from their holders + panels of others + chunks of outputs from other ranks) / bandwidth
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import NoWorkersError, ProjectedMemoryError, ProtocolError
from dask_distmm.layout import ChunkGrid, redistribution
from dask_distmm.layout.redistribute import Copies
from dask_distmm.planning.computation import Chunks, chunk_elements
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.engines import ENGINES
from dask_distmm.planning.factor.computation import FactorProblem
from dask_distmm.planning.factor.phases import factored
from dask_distmm.planning.factor.plan import FactorPlan, block_width, factor_plan
from dask_distmm.planning.factor.sharing import shared_bytes, shared_seconds
from dask_distmm.planning.factor.steps import Part
from dask_distmm.planning.placement import Estimate, Placement, Where, in_range, over_limit

__all__ = ["PARTS", "SHARES", "FactorPlacement", "held_chunks", "plan_factorization"]

# A factorization runs at this share of a product's rate: 2 workers of one thread, float64, N = 4096 and 8192; a
# spectral decomposition, and one of values alone: one thread, N = 1200.
SHARES = {"cholesky": 0.85, "lu": 0.75, "qr": 0.7, "": 0.8, "eigh": 0.35, "svd": 0.45, "values": 0.1}
# In a request for a panel, the part of it by its number.
PARTS: tuple[Part, ...] = get_args(Part)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FactorPlacement(Placement):
    """How a FactorProblem runs.

    Parameters
    ----------
    width
        Columns of a block.
    owners
        For each output by name, int32, one for each of its chunks: the rank that puts it together.
    """

    problem: FactorProblem
    width: int
    owners: Mapping[str, NDArray[np.int32]]

    @functools.cached_property
    def work(self) -> FactorPlan:
        """The layout of the matrices on the ranks, and each rank's steps."""
        carries, shared = ENGINES[self.engine].carries, self.method == "columns"
        return factor_plan(self.problem.task, len(self.ranks), self.width, carries=carries, shared=shared)

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
        if kind not in ("input", "panel", "final") or not len(boxes):
            raise ProtocolError(f"unknown kind of request {kind!r}, or an empty one")
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


def held_chunks(chunks: Chunks, transposed: bool) -> Chunks:
    """Return chunk sizes in the form that ranks hold of a matrix."""
    return (chunks[1], chunks[0]) if transposed else chunks


def plan_factorization(
    problem: FactorProblem,
    roster: Sequence[Worker],
    where: Where | None = None,
    *,
    engine: str,
    sources: Sequence[Worker] = (),
) -> FactorPlacement:
    """Choose how many of the workers of `roster` compute `problem`, and which.

    Parameters
    ----------
    problem
        What is computed.
    roster
        Workers that can be ranks, at least one.
    where
        For each chunk of an operand in C order, int32, the worker that holds it, as an index into
        ``[*roster, *sources]``. Those of a missing operand are taken as spread evenly.
    engine
        Name of the engine.
    sources
        Workers that hold chunks but can't be ranks.

    Raises
    ------
    NoWorkersError
        There is no worker.
    ProjectedMemoryError
        Every number of workers projects more memory on some worker than it may hold.
    """
    if not roster:
        raise NoWorkersError("no worker can take part: start workers, or name some of the cluster's with workers=")
    participants, where = (*roster, *sources), where or {}
    counts = sorted(_rank_counts(problem, len(roster), engine))
    found = [_consider(problem, roster, sources, where, engine, count) for count in counts]
    # The order says whether eigenvalues are shared; the other way is taken where memory is short.
    large = problem.task.shareable and problem.task.a_shape[0] >= ENGINES[engine].shares_eigh_from
    found.sort(key=lambda one: (one.work.shared != large, one.estimate.seconds if one.estimate else 0.0))
    alternatives = tuple(one.estimate for one in found if one.estimate)
    for one in found:
        if not over_limit(one):
            return dataclasses.replace(one, alternatives=alternatives)
    leanest = min(found, key=lambda one: max(one.projected_bytes.values()))
    limits = {w.address: int(w.memory_limit * problem.options.limit_fraction) for w in participants}
    remedy = "a" if counts == [1] and problem.task.spectral else "more workers or a"
    raise ProjectedMemoryError(
        f"{problem.task.kind} of a matrix of {problem.task.a_shape} ({problem.task.dtype}) would hold "
        f"{max(leanest.projected_bytes.values()) / 2**30:.2f} GiB on a worker, which may hold "
        f"{min(limits.values()) / 2**30:.2f} GiB. Use {remedy} higher memory_limit, or raise the config "
        "distmm.memory.limit-fraction",
        leanest.projected_bytes,
        limits,
    )


def _rank_counts(problem: FactorProblem, workers: int, engine: str) -> set[int]:
    """Return the numbers of ranks that are considered."""
    shared = problem.task.shareable
    if problem.task.spectral and not shared:
        return {1}
    width = block_width(problem.task, workers, ENGINES[engine].widths, shared=shared)
    blocks = factor_plan(problem.task, workers, width, shared=shared).columns.matrices[0].count
    most = max(1, min(workers, blocks))
    if shared and problem.method == "auto":
        return {1, most} if ENGINES[engine].shares_eigh_from else {1}
    every = {1, *(2**i for i in range(1, most.bit_length())), most}
    return {"local": {1}, "columns": {most}}.get(problem.method, every)


def _consider(
    problem: FactorProblem,
    roster: Sequence[Worker],
    sources: Sequence[Worker],
    where: Where,
    engine: str,
    count: int,
) -> FactorPlacement:
    """Return the plan on so many ranks of `roster`, with its estimate and its memory."""
    participants = (*roster, *sources)
    # One rank, too, can go by way of block columns.
    shared = problem.task.shareable and (count > 1 or problem.method == "columns")
    width = block_width(problem.task, count, ENGINES[engine].widths, shared=shared)
    made = FactorPlacement(
        problem=problem,
        engine=engine,
        method="columns" if count > 1 or shared else "local",
        participants=participants,
        ranks=tuple(range(count)),
        where=where,
        width=width,
        owners={},
    )
    held = np.zeros((count, len(participants)))
    for name, table in where.items():
        held += made.gathered(name).traffic(_in_held_order(made, name, table), len(participants)).T
    if count == 1 and held.any():
        # One rank alone is where most threads are, and of these where most of the operands is.
        best = max(range(len(roster)), key=lambda index: (roster[index].nthreads, held[0, index]))
        made = dataclasses.replace(made, ranks=(best,))
    made = dataclasses.replace(made, owners=_owners(made))
    work, size = made.work, problem.dtype.itemsize
    given = sum(math.prod(map(sum, chunks)) for chunks in problem.chunks)
    home = held[range(count), list(made.ranks)].sum() if held.any() else given / len(participants)
    panels = work.columns.matrices[0].count
    streamed = (count - 1) * given / 2 * sum(not phase.carried for phase in work.phases)
    results = sum(math.prod(map(sum, one.chunks)) for one in problem.outputs)
    moved = (given - home + streamed + results * (1 - 1 / count)) * size
    machine = problem.options.machine(engine)
    threads = sum(participants[index].nthreads for index in made.ranks)
    way = factored(problem.task)
    if problem.task.spectral:
        way = problem.task.kind if problem.task.vectors else "values"
    compute = problem.flops / (machine.rate(problem.task.dtype) * threads * SHARES[way])
    if work.shared:
        compute = shared_seconds(problem.task, count, threads, machine, ENGINES[engine].column_seconds)
    transfer = moved / count / machine.bandwidth + (panels * machine.latency if count > 1 else 0.0)
    made.projected_bytes.update(_projected(made))
    estimate = Estimate(
        method=made.method,
        grid=made.grid,
        seconds=compute + transfer,
        compute_seconds=compute,
        transfer_seconds=transfer,
        bytes_moved=int(moved),
        peak_bytes=max(made.projected_bytes.values()),
    )
    return dataclasses.replace(made, estimate=estimate)


def _in_held_order(made: FactorPlacement, name: str, table: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the holders of an operand's chunks in the order of the form that ranks hold."""
    if not made.problem.task.turned(name).transposed:
        return table
    return np.ascontiguousarray(table.reshape(made.problem.chunk_counts(name)).T).ravel()


def _owners(made: FactorPlacement) -> dict[str, NDArray[np.int32]]:
    """Share the chunks of each output out, evenly by their bytes: block columns of all ranks are in most of them."""
    found, holders = {}, list(made.work.holders)
    for output in made.problem.outputs:
        ranks = range(len(made.ranks)) if made.work.output_layout(output.name) is not None else holders
        sizes = chunk_elements(output.chunks)
        loads = collections.Counter(dict.fromkeys(ranks, 0))
        table = np.zeros(output.count, np.int32)
        for index in np.argsort(-sizes, kind="stable").tolist():
            rank = min(ranks, key=lambda one: loads[one])
            loads[rank] += int(sizes[index]) + 1
            table[index] = rank
        found[output.name] = table
    return found


def _projected(made: FactorPlacement) -> dict[str, int]:
    """Return the bytes that each participant holds at most.

    Its chunks of the operands; a rank also its block columns, two panels that are under way, and at the end its part
    of every output and its chunks of that. A spectral decomposition has a workspace, and its vectors, before they are
    cut into chunks.
    """
    problem, size, npart = made.problem, made.problem.dtype.itemsize, len(made.participants)
    total = np.zeros(npart)
    for name in problem.operands:
        sizes = chunk_elements(problem.chunks_of(name)) * size
        if name in made.where:
            total += np.bincount(made.where[name], sizes, npart)
        else:
            total += sizes.sum() / npart
    work = made.work
    for rank, index in enumerate(made.ranks):
        array = work.columns.rows * work.columns.local_cols(rank)
        beside = 2 * work.columns.rows * made.width * size
        if work.shared:
            beside = shared_bytes(problem.task, len(made.ranks), size, made.width)
        elif problem.task.spectral:
            beside = _spectral_workspace(problem) * size
        results = 0
        for output in problem.outputs:
            layout = work.output_layout(output.name)
            sizes = chunk_elements(output.chunks)
            results += int(sizes[made.owners[output.name] == rank].sum())
            # L is copied, as its rows are swapped in the end.
            if layout is not None and factored(problem.task) == "lu":
                results += math.prod(layout.local_shape(rank))
        total[index] += (array + results) * size + beside
    return {worker.address: int(total[index]) for index, worker in enumerate(made.participants)}


def _spectral_workspace(problem: FactorProblem) -> int:
    """Return the elements that LAPACK's driver holds: syevd's 2 n^2, gesdd's 4 k^2, NumPy's copy, and all results."""
    (m, n), task = problem.task.a_shape, problem.task
    results = sum(math.prod(one.shape) for one in task.outputs)
    if task.kind == "eigh":
        return (3 * n * n if task.vectors else n * n) + results
    return m * n + (4 * min(m, n) ** 2 if task.vectors else 0) + 2 * results
