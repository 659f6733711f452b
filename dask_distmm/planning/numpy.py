"""The model of the engine `numpy`: operands come in panels over Dask's comms, while BLAS works on others. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning import product
from dask_distmm.planning.cuts import Candidate
from dask_distmm.planning.footprint import Needs, delivered, held_operands, panel_width, spread
from dask_distmm.planning.groups import Usable
from dask_distmm.planning.model import EngineModel, Phase, Work
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem, is_gram
from dask_distmm.programs.steps import Step

# The share of the operations that is left of a symmetric product.
_HALF = 0.55
# Processor time of a request, on the worker that sends it and on the one that answers (seconds): 8 workers on 2 cores.
_REQUEST = 2e-4


class NumpyModel(EngineModel):
    """The model of engines that multiply in the memory of hosts."""

    # Seconds of processor time, float64, N = 250 to 1000: 0.15, 0.16, 0.2 ms on each of two ranks.
    column_seconds: ClassVar = 1.5e-4

    def steps(self, plan: Plan, rank: int, *, begun: Collection[int], usable: Usable) -> tuple[Step, ...]:
        """Return the steps of a rank of a plan."""
        return product.steps(plan, rank, begun, None)

    def least(self, problem: Problem, candidate: Candidate) -> Work:
        """Return the messages of any ranks, and the sums of others that each adds: all of D but one part."""
        count, s = math.prod(candidate[1]), candidate[1][2]
        added = problem.m * problem.n * problem.compute_type.itemsize * (s - 1) / s
        return Work([Phase(waited={"ranks": added, "memory": added})], 4 + (count > 1) + (s > 1))

    def work(self, plan: Plan, needs: Mapping[str, Needs]) -> Work:
        """Return the work of a plan: what is packed is in memory beside the operations, and so are sums of others."""
        problem, machine, ranks = plan.problem, plan.machine, range(len(plan.ranks))
        p, q, s = plan.grid
        height, width, k = plan.extents
        itemsize = problem.compute_type.itemsize
        flops = problem.flops * (height / problem.m) * (width / problem.n) * (k / problem.k)
        sizes = {"a": height * k, "b": k * width, "d": height * width}
        packed = sum((sizes[name] for name in plan.packing), np.zeros(len(ranks))) * itemsize
        fetched = _fetched(plan, needs)
        if is_gram(problem) and p == q == 1 and problem.d.chunks[0] == problem.d.chunks[1]:
            # A triangle of D is multiplied, and what is A's and B's arrives once.
            flops, fetched = _HALF * flops, fetched / 2
        added = (s - 1) * plan.final_elements * itemsize
        arriving = delivered(plan) * problem.d.itemsize
        received = fetched + added + arriving
        requests = _requests(plan, needs)
        panels = int(np.max(-(-k // panel_width(problem, height + width, k))))
        more = min(panels, 2) - (len(ranks) > 1) + bool(arriving.any())
        return Work(
            [
                Phase(flops, machine.rate(problem.compute_type.name) * plan.threads, packed),
                Phase(waited={"ranks": received, "memory": added, "seconds": _REQUEST * requests}),
            ],
            messages=self.least(problem, (plan.method, plan.grid)).messages + more * (len(plan.participants) > 1),
            # Chunks that ranks make come from no other worker.
            moved=received.sum() - sum(needs[name][0].sum() for name in "ab" if problem[name].by_ranks),
        )

    def memory(self, plan: Plan, needs: Mapping[str, Needs]) -> NDArray[np.float64]:
        """Return the bytes that each participant holds at most.

        Counted are: chunks of A and B there, what the rank sums into, its chunks of D, panels in flight, packed
        panels, and partial sums of others. Not counted is what the worker holds anyway for other tasks.
        """
        problem, npart, nranks = plan.problem, len(plan.participants), len(plan.ranks)
        compute, (height, width, k) = problem.compute_type.itemsize, plan.extents
        total = held_operands(plan)
        # Of these the parts that a rank fetches are chunks' parts, one at a time.
        inputs = [extra for extra in problem.extras if extra.name != "partial"]
        total += sum((spread(plan, extra.name, extra.bytes) for extra in inputs), np.zeros(npart))
        owned = np.bincount(plan.owners, problem.d.bytes, nranks) * (2 if problem.formula.saved else 1)
        own = height * width * float(compute)
        if problem.formula.partial and not problem.accumulates_in_place:
            # Else the earlier sums become the chunks of D.
            own += np.bincount(plan.owners, problem["partial"].bytes, nranks)
        if plan.grid[2] > 1:
            # Another rank's partial sum of the part that is added up here, and the finished chunks.
            own += plan.final_elements * compute + owned
        elif "d" in plan.packing:
            own += owned
        else:
            # Chunks are summed into in place; parts of them that others compute come on top.
            own += np.maximum(0.0, owned - np.diagonal(plan.final_traffic) * problem.d.itemsize)
        if not dataclasses.replace(problem.formula, partial=False).trivial:
            # Results of a chunk, and what the formula reads for it, come beside its sums.
            read = sum(2 * extra.itemsize for extra in problem.extras if extra.shape == problem.d.shape)
            largest = np.zeros(nranks)
            np.maximum.at(largest, plan.owners, problem.d.elements)
            own += largest * (compute + read)
        if problem.by_ranks:
            # All that it needs of the other operand is there from the start.
            own += k * sum(
                extent * matrix.itemsize
                for matrix, extent in zip(problem.matrices, (height, width), strict=False)
                if not matrix.by_ranks
            )
        else:
            panel = panel_width(problem, height + width, k)
            own += panel * (("a" in plan.packing) * height + ("b" in plan.packing) * width) * compute
            # In flight towards this rank, and one on its way out.
            flights, each = np.minimum(problem.options.prefetch_panels + 1, -(-k // panel)), panel * (height + width)
            own += np.minimum(_fetched(plan, needs), flights * each * compute) + each * compute * (1 - 1 / npart)
        total[list(plan.ranks)] += own
        return total


def _fetched(plan: Plan, needs: Mapping[str, Needs]) -> NDArray[np.float64]:
    """Return the bytes of A and B that each rank gets from others."""
    ranks = list(plan.ranks), range(len(plan.ranks))
    return np.asarray(sum(needed - held[ranks] for needed, held in needs.values()))


def _requests(plan: Plan, needs: Mapping[str, Needs]) -> NDArray[np.int64]:
    """Return how many requests each rank sends and answers: one to each holder of operands, of sums, and of chunks."""
    ranks, count = list(plan.ranks), len(plan.ranks)
    holders = np.zeros((len(plan.participants), count), bool)
    for needed, held in needs.values():
        holders |= (held > 0) & (needed > held[ranks, range(count)])
    holders[ranks, range(count)] = False
    across = plan.final_traffic > 0
    np.fill_diagonal(across, False)
    # Chunks of which it is not known where they are may be fewer than workers.
    sent = np.minimum(holders.sum(axis=0), plan.problem.a.count + plan.problem.b.count)
    sums = 2 * (count - 1) * (plan.grid[2] > 1)
    return np.asarray(sent + holders[ranks].sum(axis=1) + across.sum(axis=0) + across.sum(axis=1) + sums)


NUMPY = NumpyModel(
    "numpy",
    "dask_distmm.engines.numpy.engine",
    frozenset(["product", "factorization", "program", "region"]),
    makes=True,
    by_panels=True,
)
