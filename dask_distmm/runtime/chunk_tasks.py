"""The tasks by which ranks make chunks themselves, on their way to the ranks and there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps, loads
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.errors import EngineError, call_user, in_words
from dask_distmm.planning import Placement, Plan, Problem
from dask_distmm.planning.cuts import overlaps
from dask_distmm.planning.footprint import is_by_ranks
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import check_chunks

if TYPE_CHECKING:
    from distributed import Worker


def pack_tasks(
    plan: Placement, tasks: Mapping[str, Sequence[Any]], retries: int = 0, at_once: Mapping[str, int] | None = None
) -> dict[str, bytes]:
    """Return for each rank's address the tasks of those chunks that it needs, pickled, and how it may run them."""
    found = {}
    for rank, address in enumerate(plan.workers):
        parts = {name: _needed_chunks(plan, rank, name).tolist() for name in tasks}
        # Together, so that a task of both operands stays one.
        needed = {name: (parts[name], [tasks[name][number] for number in parts[name]]) for name in tasks}
        try:
            found[address] = dumps((retries, (at_once or {}).get(address, 0), needed))
        except BaseException as error:  # of the user's objects: none may end the scheduler
            raise EngineError(f"the tasks that make chunks can't be pickled: {in_words(error)}") from None
    return found


def _needed_chunks(plan: Placement, rank: int, operand: str) -> NDArray[np.int64]:
    """Return the numbers of an operand's chunks of which a rank needs any part."""
    if isinstance(plan, ProgramPlacement):
        return np.flatnonzero(np.array(plan.owners) == rank)
    assert isinstance(plan, Plan)
    r0, r1, c0, c1 = plan.region(rank)
    along = plan.k_range(rank)
    ranges = ((r0, r1), along) if operand == "a" else (along, (c0, c1))
    rows, cols = (
        np.array(
            [number for number, _, _ in overlaps(tuple(itertools.accumulate(sizes, initial=0)), *wanted)], np.int64
        )
        for sizes, wanted in zip(plan.problem.chunks_of(operand), ranges, strict=True)
    )
    return np.add.outer(rows * plan.problem.chunk_counts(operand)[1], cols).ravel()


def unpack_tasks(plan: Placement, packed: bytes, worker: Worker) -> dict[ChunkKey, SourceChunk]:
    """Return the chunks that a rank on a worker makes itself, from what `pack_tasks` gave."""
    made: dict[Any, Source] = {}
    chunks: dict[ChunkKey, SourceChunk] = {}
    if not packed:
        return chunks
    what = "the tasks that make chunks can't be unpickled"
    retries, at_once, found = call_user("source", what, loads, packed)
    turn = threading.Semaphore(at_once) if at_once else contextlib.nullcontext()
    # A chunk of both operands is used by both at one place of k, or else made anew: it would have to be kept.
    together = isinstance(plan.problem, Problem) and plan.problem.shared
    for operand, (numbers, tasks) in found.items():
        for number, task in zip(numbers, tasks, strict=True):
            where = plan.problem.place_of(operand, number)
            make = functools.partial(_make_chunk, task, worker, turn, f"chunk {where} of {operand.upper()}")
            source = made.setdefault((id(task), together or operand), Source(make, retries))
            chunks[operand, number] = SourceChunk(source, functools.partial(_view, plan, operand, number))
    return chunks


def _make_chunk(task: Any, worker: Worker, turn: AbstractContextManager[Any], name: str) -> Any:
    direct.act_as_task(worker)
    with turn:
        return call_user("source", f"{name} can't be made", task)


def _view(plan: Placement, operand: str, number: int, made: Any) -> Any:
    chunk = made.T if plan.problem.is_turned(operand) else made
    return check_chunks(plan, {(operand, number): chunk})[operand, number]


def by_ranks(problem: Any) -> list[str]:
    """Return the operands of a computation whose chunks ranks make."""
    known = isinstance(problem, Problem | ProgramProblem)
    return [name for name in "ab" if known and is_by_ranks(problem, name)]
