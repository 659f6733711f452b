"""The models of the engines `peer`, for GPUs that read each other's memory, and `nccl`, for those that don't. Pure.

Beside the roofline a run of several ranks, or of chunks of others, has 4 messages (2 for a single rank), 2 more
for sums of others, 1 where several ranks pull parts of both A and B, 0.75 each time that twice as many chunks are
pulled: as two H200 took for small products; 0.5 more on a grid of two dimensions, where a rank has less of both A and B
(`benchmarks.gpu.model`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from dask_distmm.layout.rectangles import SINGLE_BYTES
from dask_distmm.planning import product
from dask_distmm.planning.computation import Worker, islands
from dask_distmm.planning.cuts import Candidate, pieces_that_fill, shape_of, slowdown
from dask_distmm.planning.footprint import (
    Needs,
    delivered,
    formula_inputs,
    held_operands,
    multiplied_sizes,
    multiply_rate,
    spread,
    uploaded,
)
from dask_distmm.planning.groups import Usable
from dask_distmm.planning.model import EngineModel, Phase, Work
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.schedule import (
    block_schedules,
    copied_again,
    extent_multiple,
    load_schedules,
    native,
    peer_reads,
    sent_between,
    square_on_diagonal,
    stored_again,
    sums_in,
)
from dask_distmm.programs.steps import Step

# How many times longer sums take over Dask's comms than what NCCL sends.
_DASK = 20.0
# Messages: see above.
_ALONE, _TOGETHER, _SUMS, _BOTH, _TWICE_AS_MANY, _GRID = 2.0, 4.0, 2.0, 1.0, 0.75, 0.5


class SolverModel(EngineModel):
    """The model of engines whose ranks factorize on GPUs."""

    # One GPU: H200, float64, N = 32768.
    shares: ClassVar = {**EngineModel.shares, "cholesky": (0.75, 0.85), "lu": (0.55, 0.75), "qr": (0.72, 0.7)}
    # A panel of 512 columns, its way to another rank, what it is applied to first: two H200, float64, N = 16384, 32768.
    panel_seconds: ClassVar = {"cholesky": 1.8e-3, "lu": 3.5e-3, "qr": 6e-3}


class PeerModel(SolverModel):
    """The model of the engine."""

    # Exchanges included: two H200, float64, N = 16384 and 32768.
    column_seconds: ClassVar = 4e-5

    def unfit(self, workers: Sequence[Worker], kind: str, *, joined: bool = False) -> str:
        """Say why not every worker's GPU can read the memory of all others; empty if it can, or need not."""
        if kind == "program":  # what is small goes by the host
            return ""
        apart = kind == "product" and joined
        every = zip(workers, islands(tuple(workers)), strict=True)
        for (reader, near), (holder, far) in itertools.product(every, repeat=2):
            if not (apart or reader.host == holder.host):
                return f"{reader.address} is on host {reader.host!r}, {holder.address} on {holder.host!r}"
            if not (reader.device and holder.device):
                return f"{(holder if reader.device else reader).address} does not say which GPU it has"
            if not (reader.reaches(holder) or (apart and near != far)):
                return (
                    f"the GPU of {reader.address} ({reader.device}) can't read the memory of that of {holder.address} "
                    f"({holder.device}): they have no NVLink or PCIe peer access, or the process does not see both "
                    "(CUDA_VISIBLE_DEVICES; dask-cuda shows all)"
                )
        return ""

    def steps(self, plan: Plan, rank: int, *, begun: Collection[int], usable: Usable) -> tuple[Step, ...]:
        """Return the steps of a rank of a plan; earlier sums are an input of the formula."""
        return product.steps(plan, rank, (), usable)

    def least(self, problem: Problem, candidate: Candidate) -> Work:
        """Return the messages of any ranks, and the sums of others that each adds: all of D but one part."""
        p, q, s = candidate[1]
        if p * q * s == 1:
            return Work([], _ALONE)
        part = problem.m * problem.n * problem.compute_type.itemsize / s * (s > 1)
        adding = Phase(waited={"ranks": part, "memory": 3 * (s - 1) * part})
        return Work([adding], _TOGETHER + _SUMS * (s > 1) + _GRID * (min(p, q) > 1))

    def memory(self, plan: Plan, needs: Mapping[str, Needs]) -> NDArray[np.float64]:
        """Return the bytes of device memory that each participant holds at most.

        Counted are chunks of A and B (also in the type in which they are multiplied) unless they are read from host
        memory, buffers, the sums, and D; of operands whose chunks ranks make themselves those that are there at a time.
        """
        problem, npart = plan.problem, len(plan.participants)
        total = np.zeros(npart) if plan.from_host else held_operands(plan, on_gpus=True)
        copied = np.array([worker.address.startswith("ucx") for worker in plan.participants])
        if copied.any():
            # Chunks that others read are copied into memory that UCX does not map: see the engine's `memory`.
            for name, read in peer_reads(plan, [name for name in "ab" if name in plan.where]).items():
                itemsize = multiplied_sizes(problem)["ab".index(name)]
                total += copied * (read @ problem[name].bytes) / problem[name].itemsize * itemsize
        # Each rank has copies of what its chunks need.
        total += sum((spread(plan, extra.name, extra.bytes) for extra in problem.extras), np.zeros(npart))
        total[list(plan.ranks)] += formula_inputs(plan)[0]
        sums = sums_in(plan).itemsize
        if schedules := block_schedules(plan):
            own = np.array([schedule.buffer_bytes for schedule in schedules], float)
        else:
            # All that they need of an operand that they do not make is there from the start.
            own = np.array([source.bytes for source in load_schedules(plan)]) + _bytes_of(plan, by_ranks=False)
        owned = np.bincount(plan.owners, problem.d.bytes, len(plan.ranks))
        height, width, _ = plan.extents
        own += (height * width + copied_again(plan)) * sums
        if stored_again(plan):
            own += owned * (2 if problem.formula.saved else 1)
        if plan.grid[2] > 1:
            own += 2 * np.minimum(plan.final_elements * sums, problem.options.buffer_bytes // 4)
        total[list(plan.ranks)] += own
        if not plan.from_host:
            # Parts of chunks that come over Dask's comms are there until they are copied.
            far = plan.islands[:, None] != plan.islands[list(plan.ranks)]
            far[list(plan.ranks)] &= not plan.meets
            total[list(plan.ranks)] += sum((held * far).sum(axis=0) for _, held in needs.values())
        got, buffers = _from_islands(plan)
        return total + got + buffers

    def work(self, plan: Plan, needs: Mapping[str, Needs]) -> Work:
        """Return the work of a plan.

        Pulled is what others have. A rank waits for what must be here before its first GEMM, if it has none of it, and
        at the end for the last partial sums and chunks of D, and passes over D.
        """
        problem, machine, s = plan.problem, plan.machine, plan.grid[2]
        ranks, schedules = range(len(plan.ranks)), block_schedules(plan)
        sums, epilog = sums_in(plan).itemsize, native(plan)
        depth = plan.extents[2].astype(float)
        area = np.array([_multiplied(plan, rank, epilog) for rank in ranks], float)
        flops = problem.flops * area * depth / (problem.m * problem.n * problem.k)
        if extent_multiple(problem) == 1:
            flops *= slowdown(problem, in_chunks=True)
        least: Any = 0.0
        if problem.by_ranks and problem.array == "numpy" and machine.host_bandwidth:
            # Chunks are copied to the GPU while others are multiplied.
            sizes = [count * problem[name].itemsize for count, name in zip(_elements(plan), "ab", strict=True)]
            copied = [sum(sizes[name][rank] for name in x.operands) for rank, x in enumerate(load_schedules(plan))]
            least = np.array(copied) / machine.host_bandwidth
        # Chunks that ranks make belong to no worker.
        needed = sum(needed for needed, _ in needs.values()) - _bytes_of(plan, by_ranks=True)
        home = sum(held[list(plan.ranks), ranks] for _, held in needs.values())
        link, pulled, away = "near", needed - home, 1 - home / np.maximum(needed, 1.0)
        if plan.from_host:
            # All comes from host memory, at the rate of the host's bus.
            link, pulled, away = "host", needed, np.ones(len(ranks))
        partial, begin = (s - 1) * plan.final_elements * float(sums), pulled
        if schedules:
            bytes_of = [x * float(size) for x, size in zip(_elements(plan), multiplied_sizes(problem), strict=True)]
            streamed = np.array([bytes_of[1 - schedule.stationary][rank] for rank, schedule in enumerate(schedules)])
            pulled = pulled + away * np.array([len(schedule.parts) - 2 for schedule in schedules]) * streamed
            # The first GEMM needs one piece of the stationary part and one piece of a panel.
            first = [
                (x.stationary_bytes + x.panel_bytes) / pieces_that_fill(problem, x.parts[1] - x.parts[0], x.width)
                for x in schedules
            ]
            begin = away**2 * np.array(first)
        arriving = delivered(plan) * sums
        stored = stored_again(plan) * np.bincount(plan.owners, problem.d.elements, len(ranks))
        passes = 3.0 * partial + 2.0 * sums * (copied_again(plan) + stored)
        between, last = partial * (s > 1) * (s - 2) / max(1, s - 1), partial / max(1, s - 1) + arriving
        by_ranks = link == "near"
        together = {link: pulled, "near": between + by_ranks * pulled}
        waited = {link: begin, "memory": passes, "near": last + by_ranks * begin}
        if plan.meets:
            # All chunks come before the first product of one of them; sums come over Dask's comms.
            far = _from_islands(plan)[0][list(plan.ranks)] if plan.where else needed - _on_island(plan, needs)
            together, waited = (
                {"near": pulled},
                {"near": begin, "memory": passes, "far": far + _DASK * (last + between)},
            )
        chunks = max((schedule.fetched for schedule in schedules), key=sum, default=(0.0, 0.0))
        messages = self.least(problem, (plan.method, plan.grid)).messages
        if len(ranks) > 1 or any(chunks):
            messages = max(messages, _TOGETHER) + _BOTH * (len(ranks) > 1 and all(chunks))
            messages += _TWICE_AS_MANY * math.log2(max(1.0, sum(chunks)))
        exposed = dict(machine.exposed).get(plan.method, 1.0)
        phase = Phase(flops, multiply_rate(plan), least=least, pulled=together, waited=waited, exposed=exposed)
        return Work([phase, uploaded(plan)], messages, moved=(pulled + partial + arriving).sum())

    def native_epilog(self, plan: Plan) -> str | None:
        """Return the epilog that cuBLASLt does."""
        return native(plan)

    def independent(self, plan: Plan) -> bool:
        """Whether each rank can make its own chunks of D from the chunks that are offered before the run starts.

        If a rank of such a run dies, the other ranks still finish theirs, and the missing chunks of D are computed as a
        problem of their own.
        """
        whole = not (any(plan.problem.distributions) or plan.problem.grid or plan.meets)
        kept = bool(plan.replicas) or any(plan.replica_runs)
        return len(plan.participants) > 1 and not plan.from_host and plan.grid[2] == 1 and whole and not kept

    def describe(self, plan: Plan) -> list[tuple[str, str]]:
        """Return facts: the stationary and the streamed operand of the rank with the largest buffers; islands."""
        if plan.problem.by_ranks:
            most = max(load_schedules(plan), key=lambda x: x.bytes)
            operands = " and ".join("AB"[operand] for operand in most.operands)
            size, buffers = (format_bytes(n) for n in (most.held_bytes + most.making_bytes, most.buffer_bytes))
            return [
                ("makes", f"chunks of {operands}, up to {most.ahead} ahead, {size} at a time; buffers of {buffers}")
            ]
        schedule = max(block_schedules(plan), key=lambda x: x.buffer_bytes)
        names = ("A", "B")[:: -1 if schedule.stationary else 1]
        what = ("rows", "columns")[:: 1 if schedule.stationary else -1]
        parts, depth = len(schedule.parts) - 1, len(schedule.depth) - 1
        cut = f" in {parts} x {depth} parts" if parts * depth > 1 else ""
        stored = " as it is stored" if schedule.in_place[schedule.stationary] and not schedule.stationary_bytes else ""
        padded = "; padded to multiples of 16, where GEMMs are fast" if extent_multiple(plan.problem) > 1 else ""
        read = "; A and B from host memory" if plan.from_host else ""
        panels = f"{names[1]} in panels of up to {schedule.width} {what[0]}"
        buffers = f"buffers of {format_bytes(schedule.buffer_bytes)}"
        pulls = "pulls", f"{names[0]} held{cut}{stored}, {panels}; {buffers}{padded}{read}"
        if not plan.meets:
            return [pulls]
        count, size = len({*plan.islands[list(plan.ranks)].tolist()}), format_bytes(int(_from_islands(plan)[0].sum()))
        known = f"NCCL brings {size} of chunks to them first" if plan.where else "NCCL brings chunks to them first"
        return [pulls, ("islands", f"{count}, of GPUs that read each other's memory; {known}")]

    def shares_eigh_from(self, dtype: str, workers: int) -> int | None:
        """Return from which order on eigenvalues are there sooner than by cuSOLVER on one GPU.

        H200, seconds: two GPUs, float64, N = 8192 0.58 and 0.55, 12288 1.07 and 1.48; float32, 12288 1.02 and 1.08.
        One, N = 16384, float64 2.6 and 3.2; float32 2.3 and 2.1.
        """
        if workers > 1:
            return 12288
        return 16384 if dtype == "float64" else None


def _from_islands(plan: Plan) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes of chunks that each participant gets from ranks out of reach, and those of buffers for them."""
    got, buffers = np.zeros((2, len(plan.participants)))
    for name, (chunks, sending, getting) in sent_between(plan).items():
        sizes = plan.problem[name].elements[chunks] * multiplied_sizes(plan.problem)["ab".index(name)]
        small = np.where(sizes < SINGLE_BYTES, sizes, 0)
        got += np.bincount(getting, sizes, len(got))
        buffers += np.bincount(getting, small, len(got)) + np.bincount(sending, small, len(got))
    return got, buffers


def _on_island(plan: Plan, needs: Mapping[str, Needs]) -> NDArray[np.float64]:
    """Return the bytes of A and B that each rank needs and its island has."""
    near = plan.islands[:, None] == plan.islands[list(plan.ranks)]
    return np.asarray(sum((held * near).sum(axis=0) for _, held in needs.values()))


def _multiplied(plan: Plan, rank: int, epilog: str | None) -> int:
    """Return the elements of D that a rank multiplies."""
    triangle = square_on_diagonal(plan, rank, epilog)
    rows, cols = shape_of(plan.region(rank))
    return rows * cols - (sum(math.prod(shape_of(rect)) for rect in triangle.copied()) if triangle is not None else 0)


def _elements(plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Elements of each rank's parts of A and of B."""
    height, width, depth = plan.extents
    return height * depth, width * depth


def _bytes_of(plan: Plan, *, by_ranks: bool) -> NDArray[np.float64]:
    """Bytes of each rank's parts of operands: of those that it makes as they are made, of others as multiplied."""
    problem = plan.problem
    sizes = (problem.a.itemsize, problem.b.itemsize) if by_ranks else multiplied_sizes(problem)
    every = zip(_elements(plan), sizes, problem.matrices, strict=False)
    sums = [count * float(size) for count, size, matrix in every if matrix.by_ranks == by_ranks]
    return np.asarray(sum(sums, start=0.0) + np.zeros(len(plan.ranks)))


# Factorizations on GPUs that can't read each other's memory: panels are broadcast.
NCCL = SolverModel(
    "nccl", "dask_distmm.engines.nccl", frozenset(["factorization"]), (128, 512), on_gpus=True, collective=True
)
PEER = PeerModel(
    "peer",
    "dask_distmm.engines.peer.engine",
    frozenset(["product", "factorization", "program", "region"]),
    (128, 512),
    on_gpus=True,
    reads_peers=True,
    makes=True,
    library="cuBLASLt",
)
