"""Products that are asked for together: one series of waves where they do not fit into memory at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dask.array as da
from dask.base import tokenize

from dask_distmm.arrays.choice import budget_now
from dask_distmm.arrays.outputs import as_they_lie
from dask_distmm.arrays.request import Request, problem_of_request
from dask_distmm.config import dask_costs
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.graph.waves import can_be_made
from dask_distmm.planning import Problem, Worker
from dask_distmm.planning.waves import Scheme, choose_scheme
from dask_distmm.runtime.client import current_client, recent_snapshot, snapshot

if TYPE_CHECKING:
    from distributed import Client


def in_series(requests: Sequence[Request], sources: Sequence[tuple[da.Array, da.Array]]) -> list[Scheme] | None:
    """Return the waves of products that do not fit into memory at once; None if they are runs of their own."""
    client = current_client()
    if client is None or len(requests) < 2:
        return None
    first = problem_of_request(requests[0])
    known = recent_snapshot(client, first)
    if known is None or fit_together([x for pair in sources for x in pair], made_bytes(requests), known.workers):
        return None
    return _schemes(requests, [first, *map(problem_of_request, requests[1:])], client, sources)


def fit_together(arrays: Sequence[da.Array], more: float, workers: Sequence[Worker]) -> bool:
    """Whether arrays, and some more bytes, are in memory at once without spilling; true where waves are off."""
    budget = budget_now()
    needed = sum({array.name: array.nbytes for array in arrays}.values()) + more
    return budget is None or needed <= sum(map(budget.of, workers))


def made_bytes(requests: Sequence[Request]) -> float:
    """Return the bytes of D of products."""
    return sum(float(math.prod(request.shape)) * request.dtype.itemsize for request in requests)


def _schemes(
    requests: Sequence[Request],
    problems: Sequence[Problem],
    client: Client,
    sources: Sequence[tuple[da.Array, da.Array]],
) -> list[Scheme] | None:
    """Return the waves of products that follow one another; None if these can't be, or fit at once after all."""
    distinct = {array.name: array for pair in sources for array in pair}
    known, budget = snapshot(client, problems[0], list(distinct.values())), budget_now()
    if known is None or budget is None or len({problem.demand for problem in problems}) > 1:
        return None
    there = {name for name, where in zip(distinct, known.placed, strict=True) if where is not None}
    # That stays in memory.
    held = sum(distinct[name].nbytes for name in there) / len(known.workers)
    workers = [_less(worker, held / min(budget.managed, budget.process)) for worker in known.workers]
    if fit_together([x for name, x in distinct.items() if name not in there], made_bytes(requests), workers):
        return None
    lazy = [(a.name not in there, b.name not in there) for a, b in sources]
    try:
        for able in (_can_be_made(requests, problems, lazy), (False, False)):
            chosen: dict[Any, Scheme] = {}
            for problem, is_lazy in zip(problems, lazy, strict=True):
                if (key := _alike(problem, is_lazy)) not in chosen:
                    chosen[key] = choose_scheme(
                        problem, workers, is_lazy, budget, dask_costs(),
                        engine=known.engines, by_ranks=able, products=len(problems),
                    )  # fmt: skip
            if len({scheme.by_ranks for scheme in chosen.values()}) == 1:
                break
    except (PlanError, ProjectedMemoryError) as error:
        requests[0].logger.info("%s", error)
        return None
    return _numbered([chosen[_alike(*one)] for one in zip(problems, lazy, strict=True)], problems)


def _less(worker: Worker, held: float) -> Worker:
    limit = max(1, int(worker.memory_limit - held)) if worker.memory_limit else 0
    return dataclasses.replace(worker, memory_limit=limit)


def _can_be_made(
    requests: Sequence[Request], problems: Sequence[Problem], lazy: Sequence[tuple[bool, bool]]
) -> tuple[bool, bool]:
    """Return for A and for B whether ranks can make the chunks of all products."""
    lying = [as_they_lie(problem, one.a, one.b, ()) for one, problem in zip(requests, problems, strict=True)]

    def can(at: int) -> bool:
        return can_be_made(*(arrays["ab"[at]] for arrays, is_lazy in zip(lying, lazy, strict=True) if is_lazy[at]))

    return can(0), can(1)


def _alike(problem: Problem, lazy: tuple[bool, bool]) -> Any:
    """Return a key that products have in common which have the same waves."""
    chunks = problem.a_chunks, problem.b_chunks, problem.out_chunks
    return chunks, problem.a_dtype, problem.b_dtype, problem.dtype, problem.shared, lazy


def _numbered(schemes: Sequence[Scheme], problems: Sequence[Problem]) -> list[Scheme]:
    """Return schemes with the name of their series and their place there."""
    series, before, found = f"matmul-{tokenize([problem.name for problem in problems])}", 0, []
    for scheme in schemes:
        found.append(dataclasses.replace(scheme, series=series, before=before))
        before += len(scheme.waves)
    return found
