"""Who computes a factorization: how many of the workers, and which; its time and its memory as projected.

::

    seconds    = the larger of compute and panels, + messages + transfer
    compute    = flops / (ranks * rate * share of a product's rate); of shared eigenvalues see `sharing`
    panels     = what one panel after the other takes (`EngineModel.panel_seconds`)
    messages   = one for each panel
    transfer   = (operands from their holders + panels of others + chunks of outputs from other ranks) / bandwidth

::

    seconds    = reads + columns + products
    reads      = n^3 / 6 elements, of one triangle for each column that is eliminated  / (ranks * memory bandwidth)
    columns    = n * (what a column takes beside that, and two messages between ranks)
    products   = updates of the triangle, merges, reflectors: at a share of a product's rate
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Worker, chunk_elements
from dask_distmm.planning.factor.plan import FactorPlacement, block_width, factored, work_of
from dask_distmm.planning.factor.problem import Factorization, FactorProblem
from dask_distmm.planning.model import ENGINES, Phase, Work
from dask_distmm.planning.placement import Where, choose, estimated, need_workers

# What it costs that several ranks share the eigenvalues of a Hermitian matrix, by way of a tridiagonal one. Pure


# The share of a product's rate at which products run.
_SHARE = 0.7
# Columns of vectors as long as the matrix that a rank has beside its block columns: reflectors twice, what belongs to
# them, a panel, and what columns are summed in.
_NARROW = 320
# Elements of the eigenvectors of a merge that are made at once.
_PANEL_ELEMENTS = 2**26


def _shared_phases(made: FactorPlacement) -> list[Phase]:
    """Return the computation itself: reads of one triangle for each column that is eliminated, columns, products."""
    task, ranks, machine, model = made.problem.task, len(made.ranks), made.machine, ENGINES[made.engine]
    threads = made.threads.sum() * _SHARE
    n, complexes = float(task.a_shape[0]), 4 if task.dtype.startswith("complex") else 1
    column = model.column_seconds + (ranks > 1 and not model.reads_peers) * 2 * made.message_seconds
    flops, vectors = (2 / 3 + 2 * task.vectors) * complexes * n**3, 4 / 3 * n**3 * task.vectors
    return [
        Phase(touched=n**3 / 6 * made.problem.dtype.itemsize / ranks),
        Phase(least=n * column),
        Phase(flops, machine.rate(task.dtype) * threads),
        Phase(vectors, machine.rate("float64") * threads),
    ]


def shared_bytes(task: Factorization, ranks: int, itemsize: int, width: int) -> int:
    """Return the bytes that a rank holds beside its block columns of the matrix and of eigenvectors.

    Its rows of eigenvectors of the tridiagonal matrix, twice; a panel of those of a merge; panels of reflectors.
    """
    n = task.a_shape[0]
    narrow = n * (_NARROW + 2 * width) * itemsize
    if not task.vectors:
        return narrow
    return narrow + 8 * (2 * math.ceil(n / ranks) * n + min(_PANEL_ELEMENTS, n * n))


# Who computes a factorization: how many of the workers, and which; its time and its memory as projected


# A reduction to tridiagonal form, and the way back of the vectors, move this many times what a factorization does.
_REDUCTIONS = 4


def algorithm_of(task: Factorization) -> str:
    """Return what A goes through, as shares of engines have it."""
    if task.spectral:
        return task.kind if task.vectors or task.decomposition.on_host else "values"
    return factored(task)


def plan_factorization(
    problem: FactorProblem,
    roster: Sequence[Worker],
    where: Where | None = None,
    *,
    engine: str,
    sources: Sequence[Worker] = (),
) -> FactorPlacement:
    """Choose how many of the workers of `roster` compute `problem`, and which."""
    need_workers(roster)
    if problem.method == "columns" and _alone(problem, engine) and problem.task.a_shape[0]:
        raise PlanError(
            f"{problem.task.kind} in this form is computed by one worker of engine {engine!r}: expected method 'auto' "
            "or 'local'"
        )
    where = where or {}
    candidates = sorted(_candidates(problem, len(roster), engine))
    found = [_consider(problem, roster, sources, where, engine, *candidate) for candidate in candidates]
    # The order says how eigenvalues are computed; the other way is taken where memory is short.
    large = _shares_eigh(problem, len(roster), engine)
    found.sort(key=lambda one: (one.work.shared != large, one.seconds))
    rows, cols = problem.task.a_shape
    what = f"{problem.task.kind} of a matrix of {rows} x {cols} ({problem.task.dtype})"
    return choose(found, what, _remedies(problem, len(roster), engine))


def _remedies(problem: FactorProblem, workers: int, engine: str) -> list[str]:
    """Return what would let a factorization fit that does not, in the way in which it was asked for."""
    smaller = {"svd": "full_matrices=False", "qr": "mode='reduced'"} if problem.task.mode == "complete" else {}
    found = [f"pass {smaller[problem.task.kind]}"] if problem.task.kind in smaller else []
    free = dataclasses.replace(problem, method="auto")
    if max(count for count, _ in _candidates(free, max(2, workers), engine)) == 1:
        return found
    if problem.method == "local":
        return [*found, "use method='auto', by which workers share it"]
    return [*found, "use more workers" if problem.workers is None else "name more workers by workers="]


def _shares_eigh(problem: FactorProblem, workers: int, engine: str) -> bool:
    """Whether eigenvalues by way of block columns are there sooner."""
    task, least = problem.task, ENGINES[engine].shares_eigh_from(problem.task.dtype, workers)
    return least is not None and task.shareable and task.a_shape[0] >= least


def _candidates(problem: FactorProblem, workers: int, engine: str) -> set[tuple[int, bool]]:
    """Return the numbers of ranks that are considered, and whether they share eigenvalues, as one can, too."""
    if _alone(problem, engine):
        return {(1, False)}
    model = ENGINES[engine]
    shared = problem.task.shareable and not model.collective
    width = block_width(problem.task, workers, model.widths, shared=shared)
    blocks = work_of(problem, engine, workers, width, "columns").columns.matrices[0].count
    most = max(1, min(workers, blocks))
    if problem.method == "local":
        return {(1, False)}
    if problem.method == "columns":
        return {(most, shared)}
    if shared:
        return {(1, False), (most, True)} if model.on_gpus else {(1, False)}
    return {(count, False) for count in (1, *(2**i for i in range(1, most.bit_length())), most)}


def _alone(problem: FactorProblem, engine: str) -> bool:
    """Whether one rank computes it, as it does spectral decompositions that the engine has no way to share."""
    return problem.task.spectral and not ENGINES[engine].decomposes(problem.task)


def _consider(
    problem: FactorProblem,
    roster: Sequence[Worker],
    sources: Sequence[Worker],
    where: Where,
    engine: str,
    count: int,
    shared: bool,
) -> FactorPlacement:
    """Return the plan on this many ranks of `roster`, with its estimate and its memory."""
    participants = (*roster, *sources)
    model = ENGINES[engine]
    width = block_width(problem.task, count, model.widths, shared=shared)
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
    by_library = problem.task.spectral and work.collective
    sweeps = _REDUCTIONS if by_library else len(work.sweeps) - work.carried
    streamed = (count - 1) * given / 2 * sweeps
    results = sum(math.prod(map(sum, one.chunks)) for one in problem.outputs)
    moved = (given - home + streamed + results * (1 - 1 / count)) * size
    return estimated(made, _memory(made), _work(made, moved))


def _work(made: FactorPlacement, moved: float) -> Work:
    """Return the work of a plan, given the bytes that move between workers."""
    problem, work, model, algorithm = made.problem, made.work, ENGINES[made.engine], algorithm_of(made.problem.task)
    count, panels, task = len(made.ranks), work.columns.matrices[0].count, problem.task
    if work.shared:
        phases = _shared_phases(made)
    else:
        # One panel comes after the other, however many ranks there are.
        least = panels * model.panel_seconds.get(algorithm, 0.0) if count > 1 else 0.0
        one = task.decomposition if task.spectral else None
        machine = problem.options.machine("numpy") if one and one.on_host else made.machine
        share = model.share(algorithm, count) or (one.shares[not task.vectors] if one else 0.0)
        phases = [Phase(problem.flops, machine.rate(task.dtype) * made.threads.sum() * share, least=least)]
    return Work([*phases, Phase(waited={"ranks": moved / count, "messages": panels * (count > 1)})], moved=moved)


def _in_held_order(made: FactorPlacement, name: str, table: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the holders of an operand's chunks in the order of the form that ranks hold."""
    if not made.problem.task.orientation(name).transposed:
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


def _memory(made: FactorPlacement) -> NDArray[np.float64]:
    """Return the bytes that each participant holds at most.

    Its chunks of the operands; a rank also its block columns, two panels that are under way, and at the end its part
    of every output and its chunks of that. Chunks of an operand with donated memory are freed before any chunk of the
    outputs exists. A spectral decomposition has a workspace, and its vectors, before they are
    cut into chunks; a library has its workspace.
    """
    problem, size, npart = made.problem, made.problem.dtype.itemsize, len(made.participants)
    total, going = np.zeros(npart), np.zeros(npart)
    for name in problem.operands:
        sizes = chunk_elements(problem.chunks_of(name)) * size
        held = going if name in problem.donated else total
        if name in made.where:
            held += np.bincount(made.where[name], sizes, npart)
        else:
            held += sizes.sum() / npart
    at_the_end = np.zeros(npart)
    work = made.work
    for rank, index in enumerate(made.ranks):
        array = work.columns.rows * work.columns.local_cols(rank)
        beside = 2 * work.columns.rows * made.width * size
        if work.collective:
            beside = ENGINES[made.engine].workspace(work, rank) * size
        elif work.shared:
            beside = shared_bytes(problem.task, len(made.ranks), size, made.width)
        elif problem.task.spectral:
            made_whole = sum(math.prod(one.shape) * dtype_from_name(one.dtype).itemsize for one in problem.task.outputs)
            beside = problem.task.decomposition.workspace(problem.task) * size + made_whole
        results = 0
        for output in problem.outputs:
            layout = work.output_layout(output.name)
            sizes = chunk_elements(output.chunks)
            results += int(sizes[made.owners[output.name] == rank].sum()) * dtype_from_name(output.dtype).itemsize
            # L is copied, as its rows are swapped in the end.
            if layout is not None and factored(problem.task) == "lu" and not work.collective:
                results += math.prod(layout.local_shape(rank)) * size
        total[index] += array * size + beside
        at_the_end[index] = results
    return total + (np.maximum(going, at_the_end) if problem.donated else at_the_end)
