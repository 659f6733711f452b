"""``plan(problem, roster)``: look at every way to run a problem, take the fastest that fits into memory.

Bytes received depend on where the chunks already lie: ranks are matched to workers so that as many bytes as possible
are at home (a linear assignment problem). `plan_computation` plans all kinds of computations.

Dask adds a fixed time to each run, and more for each chunk of operands and outputs; to a graph of its own tasks a fixed
time, and more for each task. Of b x b blocks a Cholesky factorization has (b-2)(b-1)b/6 products of blocks, a
triangular system b(b-1)/2 for each column of blocks of its right-hand sides, and a few other tasks for each block.
Each worker gets what it lacks of the smaller operand and its share of partial products; of a triangular system only
parts of the right-hand sides.

The tiles of each candidate, for distributions that were asked for, on cuBLASMp (`cublasmp.py` says why) and on the
other engines, numpy and peer:

===============  ============================================  =======================  =======================
method, grid     A                                             B                        D
===============  ============================================  =======================  =======================
allgather P x 1  row slabs                                     cublasmp: column slabs;  row slabs
                                                               others: anywhere
allgather 1 x P  cublasmp: row slabs; others: anywhere         column slabs             column slabs
reducescatter    column slabs                                  row slabs                row or column slabs
allreduce        column slabs                                  row slabs                not by a distribution
summa p x q      blocks on a p x q grid                        the same                 the same
===============  ============================================  =======================  =======================

On engines other than cuBLASMp a rank computes one block of D, so that blocks of m and n are distributed once; those of
k may be of any size. SUMMA of cuBLASMp takes blocks of any size that agree: of m in A and D, of n in B and D, of k in
A and B.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import DaskCosts, Machine
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.layout import ProcessGrid
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Chunks, Computation, Worker
from dask_distmm.planning.cuts import Candidate, Cuts, chunk_owners, grid_cuts, holder_cuts, reduce_cuts, uniform_cut
from dask_distmm.planning.factor import FactorPlacement, FactorProblem, plan_factorization
from dask_distmm.planning.footprint import formula_inputs, operand_needs, packing, spread
from dask_distmm.planning.model import ENGINES, EngineModel, Estimate, Phase, Work, estimate, models_of
from dask_distmm.planning.placement import P, Placement, Where, choose, estimated, match_ranks, over_limit
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import AXES, METHODS, BlockCyclic, Problem, Slab, is_gram
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem, plan_program
from dask_distmm.planning.region import RegionPlacement, RegionProblem, plan_region

# Candidates


def grids(problem: Problem, count: int) -> Iterator[Candidate]:
    """Yield the candidates that take exactly `count` workers."""
    m, n, k, method = problem.m, problem.n, problem.k, problem.method

    def wanted(name: str) -> bool:
        # On one worker all methods are the same thing; by choice it is called by its name.
        return method == name or (method == "auto" and (name == "local") == (count == 1))

    if wanted("local"):
        yield "local", (1, 1, 1)
    if wanted("allgather"):
        if count <= m:
            yield "allgather", (count, 1, 1)
        if count <= n and count > 1:
            yield "allgather", (1, count, 1)
    if wanted("summa"):
        grid = ProcessGrid.best(count, m, n)
        if grid is not None and (method == "summa" or min(grid.nprow, grid.npcol) > 1):
            yield "summa", (grid.nprow, grid.npcol, 1)
    if wanted("reducescatter") and count <= min(k, max(m, n)):
        yield "reducescatter", (1, 1, count)
    if wanted("allreduce") and count <= k:
        yield "allreduce", (1, 1, count)


# Distributions


def asked_ways(problem: Problem, nworkers: int, engine: str) -> list[Candidate]:
    """Return the (method, p x q x s) whose tiles of A, B and D are those that were asked for.

    As many workers as the grids asked for have, or as there are.
    """
    sizes = {math.prod(layout.grid) for layout in problem.distributions if isinstance(layout, BlockCyclic)}
    if len(sizes) > 1 or max(sizes, default=0) > nworkers:
        raise PlanError(
            f"distributions: {_asked_text(problem)} need {' and '.join(map(str, sorted(sizes)))} workers, and there "
            f"are {nworkers}: pass grids of one size, of at most {nworkers} workers"
        )
    # No slab may be empty.
    named = zip("abd", problem.distributions, strict=True)
    lengths = [problem[name].shape[layout.axis] for name, layout in named if isinstance(layout, Slab)]
    count = max(sizes) if sizes else min(nworkers, *lengths)
    ways = list(grids(problem, count))
    for layout in problem.distributions:
        if isinstance(layout, BlockCyclic) and problem.method in ("auto", "summa") and count > 1:
            p, q = layout.grid
            if p <= problem.m and q <= problem.n and (problem.method == "summa" or min(p, q) > 1):
                ways.append(("summa", (p, q, 1)))
    seen = {candidate: _misfit(problem, engine, candidate, count) for candidate in dict.fromkeys(ways)}
    if fitting := [candidate for candidate, reason in seen.items() if reason is None]:
        return fitting
    texts = []
    for (method, grid), reason in seen.items():
        text = ", ".join(f"{name.upper()} {_tiles_text(problem, engine, (method, grid), name)}" for name in "abd")
        texts.append(f"{method} {' x '.join(map(str, grid))} has {text}{reason and f' ({reason})'}")
    candidates = "; ".join(texts) or f"method {problem.method!r} does not fit the shapes"
    raise PlanError(
        f"distributions: no way to multiply on {nworkers} workers with engine {engine!r} has {_asked_text(problem)}. "
        f"{candidates}. Ask for one of these, or for less (None)"
    )


# The rows and columns of a grid over which a matrix is cut, and those of its blocks; None for blocks of any size.
_Cut = tuple[tuple[int, int], tuple[int | None, int | None]]


def _tiles(problem: Problem, engine: str, candidate: Candidate, name: str) -> list[_Cut] | None:
    """Return how a candidate can have A, B or D cut: slabs have one size; None where the matrix may be anywhere."""
    (method, (p, q, s)), library = candidate, ENGINES[engine].collective
    count = p * q * s
    row, col = (count, 1), (1, count)
    grids = [(p, q)]
    if s > 1:
        slabs = [row] * (count <= problem.m) + [col] * (count <= problem.n)
        grids = {"a": [col], "b": [row], "d": slabs * (method == "reducescatter")}[name]
    elif method == "allgather" and count > 1 and name != "d":
        # The operand that is gathered may be anywhere, but for a library.
        if not library and (name == "a") == (q > 1):
            return None
        grids = [row if name == "a" else col]
    exact = "mnk" if method != "summa" else "" if library else "mn"

    def block(axis: int, parts: int) -> int | None:
        size = problem[name].shape[axis]
        return -(-size // parts) if AXES.get(name, "mn")[axis] in exact and parts > 1 else None

    return [((rows, cols), (block(0, rows), block(1, cols))) for rows, cols in grids]


def _misfit(problem: Problem, engine: str, candidate: Candidate, count: int) -> str | None:
    """Return None if a candidate has what was asked for, else a reason (empty where what it has says it)."""
    for name, requested in zip("abd", problem.distributions, strict=True):
        if requested is None or (cuts := _tiles(problem, engine, candidate, name)) is None:
            continue
        layout = requested.layout(problem[name].shape, count)
        sides = layout.grid.nprow, layout.grid.npcol
        if not any(
            grid == sides and all(block in (None, size) for block, size in zip(blocks, layout.blocks, strict=True))
            for grid, blocks in cuts
        ):
            return ""
    return ENGINES[engine].misfit(problem, candidate[1]) if candidate[0] == "summa" and count > 1 else None


def _asked_text(problem: Problem) -> str:
    named = zip("ABD", problem.distributions, strict=True)
    return ", ".join(f"{name} as {layout}" for name, layout in named if layout is not None)


def _tiles_text(problem: Problem, engine: str, candidate: Candidate, name: str) -> str:
    """Say in words what tiles of a matrix a candidate has."""
    if (cuts := _tiles(problem, engine, candidate, name)) is None:
        return "anywhere"
    texts = []
    for (nprow, npcol), blocks in cuts:
        if min(nprow, npcol) > 1:
            size = " x ".join("any" if block is None else str(block) for block in blocks)
            texts.append(f"in blocks of {size} on a {nprow} x {npcol} grid")
        else:
            texts.append("on one worker" if nprow == npcol else f"in {'row' if npcol == 1 else 'column'} slabs")
    return " or ".join(texts) or "wherever its chunks will stay"


def operand_tiles(plan: Plan) -> dict[str, tuple[Chunks, NDArray[np.int64]]]:
    """Return for A and B the sizes of their tiles along both axes, and the rank that each tile, in C order, is for.

    With chunks that are these tiles, on these ranks, nothing is left for a run to move but what its method itself
    does: an operand that all gather is distributed evenly.
    """
    if (tiles := ENGINES[plan.engine].tiles(plan)) is not None:
        return {"a": tiles.a.layout.as_chunks(), "b": tiles.b.layout.as_chunks()}
    problem, (p, q, s) = plan.problem, plan.grid
    rows, cols, depth = (tuple(np.diff(cut).tolist()) for cut in (plan.rows, plan.cols, plan.depth))
    if s > 1:
        ranks = np.arange(s)
        return {"a": ((rows, depth), ranks), "b": ((depth, cols), ranks)}
    # k is gathered along the rows and columns of the grid: each rank brings a part of it.
    along, down = (tuple(np.diff(uniform_cut(problem.k, parts)).tolist()) for parts in (q, p))
    number = np.arange(p * q).reshape(p, q)
    return {"a": ((rows, along), number[:, : len(along)].ravel()), "b": ((down, cols), number[: len(down)].ravel())}


# Replicas


# Between GPUs chunks of this many bytes travel by themselves, smaller ones packed: in one vector to each rank.
SINGLE_BYTES = 2**16


def _replicas(plan: Plan, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes that participants hold, and get, so that the first `count` have all of `Plan.kept`."""
    ranks, engine = list(plan.ranks), ENGINES[plan.engine]
    held, moved = np.zeros((2, len(plan.participants)))
    for name in plan.kept:
        sizes = plan.problem[name].bytes
        missing = np.maximum(sizes.sum() - spread(plan, name, sizes), 0.0)
        held += missing
        if name != "d" and engine.by_panels:
            needed, at = operand_needs(plan, name)
            missing[ranks] -= needed - at[ranks, range(len(needed))]
        elif name == "d" and engine.all_reduced(plan):
            missing[ranks] = 0
        elif name == "d" and engine.collective:
            small = np.where(sizes < SINGLE_BYTES, sizes, 0)
            own = np.bincount(plan.owners, small, len(ranks))
            # A vector to each other rank, and one from it.
            held[ranks] += own * (len(ranks) - 1) + (small.sum() - own)
        moved += np.maximum(missing, 0.0)
    held[count:] = moved[count:] = 0
    return held, moved


# ``plan(problem, roster)``: look at every way to run a problem, take the fastest that fits into memory


# A new communicator takes about this long (seconds, spread over the runs that will use it).
_NEW_GROUP_SECONDS = 0.05
# In place of the bytes that a worker holds which is to be no rank.
_EXCLUDED = 1e18
# Weight of bytes of earlier sums, relative to bytes of inputs, where ranks are matched to workers.
_BEGUN = 4


class Situation(NamedTuple):
    """The workers, and where the chunks of operands are. Hashable: plans are cached by it."""

    # Workers that can be ranks, and others that hold chunks.
    roster: tuple[Worker, ...]
    sources: tuple[Worker, ...] = ()
    # By operand, where that is known, the worker that holds each chunk: an int32 array.
    raw: tuple[tuple[str, bytes], ...] = ()
    # Memory order of (most of) the chunks of A and B.
    orders: tuple[str, str] = ("C", "C")
    # Addresses of ranks, in their order, that have a communicator already.
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def where(self) -> Where:
        """The holders of chunks."""
        return {name: np.frombuffer(table, np.int32) for name, table in self.raw}


def plan(
    problem: Problem,
    roster: Sequence[Worker],
    where: Where | None = None,
    *,
    engine: str | Sequence[str] = "numpy",
    sources: Sequence[Worker] = (),
    orders: tuple[str, str] = ("C", "C"),
    groups: Sequence[tuple[str, ...]] = (),
    replica_runs: tuple[int, int] = (0, 0),
    thorough: bool = True,
) -> Plan:
    """Choose how `problem` runs on the workers of `roster`; `where` counts `sources` after these.

    If it is not thorough, ways that can't be clearly faster than another one are not looked at, and not among its
    alternatives.
    """
    where, names = where or {}, (engine,) if isinstance(engine, str) else tuple(engine)
    able = [model.name for model in models_of(names) if model.makes or not problem.by_ranks]
    if not able:
        raise PlanError(
            f"chunks of {problem.name} were to be made by the ranks that multiply them, which engine {names[0]!r} does "
            "not do: make the product anew on the cluster as it is now"
        )
    # The same multiply comes again and again in a loop: only its name differs.
    unnamed = problem.unnamed()
    raw = tuple((name, at.tobytes()) for name, at in where.items())
    situation = Situation(tuple(roster), tuple(sources), raw, orders, tuple(sorted(groups)))
    best = _plan(unnamed, situation, tuple(able), thorough)
    return dataclasses.replace(best, problem=problem, where=where, replica_runs=replica_runs)


def is_faster(problem: Problem, roster: Sequence[Worker], limits: Mapping[str, float]) -> bool:
    """Whether some engine runs a problem within the seconds that it is given; how much memory that takes is not asked.

    `plan` would say the same, but for ways that are as fast as another one. Ways to run it are looked at only if the
    least and the most that a run can take do not decide.
    """
    unnamed, situation = problem.unnamed(), Situation(tuple(roster))
    return any(_is_faster(unnamed, situation, name, limit) for name, limit in limits.items())


# The best way to run a problem takes at most this many times the seconds of the smallest product, of its operations on
# all workers, and of a copy of all matrices by the slowest link: extents may be bad for GEMMs, shares uneven, and
# messages many.
_MOST = 12
# What a run takes differs from run to run by more than this share: what can't be faster by as much is not considered.
_CLOSE = 0.03
# No way holds more on a worker than this many copies of all matrices, and the buffers of a library.
_COPIES, _LIBRARY_BYTES = 8, 2**28


def _rates(problem: Problem, engine: str) -> list[float]:
    """Return the rates, a thread's, of the types in which a problem may be multiplied."""
    machine = problem.options.machine(engine)
    names = problem.compute_type.name, problem.operand_type.name, problem.compute or problem.operand_type.name
    return [*map(machine.rate, names), *([machine.rate("float8")] if problem.fp8 else [])]


def _ways(problem: Problem, roster: Sequence[Worker], engine: str) -> list[tuple[float, Candidate]]:
    """Return the candidates of an engine, each with the least seconds that it takes, the fastest first."""
    threads = sorted((max(1, worker.nthreads) for worker in roster), reverse=True)
    operations = problem.flops * (0.5 if is_gram(problem) else 1) / max(_rates(problem, engine))
    machine, model = problem.options.machine(engine), ENGINES[engine]
    # Ranks may be on one host or on several.
    machine = dataclasses.replace(machine, bandwidth=max(machine.bandwidth, machine.network_bandwidth))
    ways = list[tuple[float, Candidate]]()
    for candidate in _candidates(problem, len(roster), engine):
        beside = estimate(model.least(problem, candidate), machine, *candidate).seconds
        ways.append((operations / sum(threads[: math.prod(candidate[1])]) + beside, candidate))
    return sorted(ways, key=lambda way: way[0])


@functools.lru_cache(maxsize=64)
def _is_faster(problem: Problem, situation: Situation, engine: str, limit: float) -> bool:
    machine, roster = problem.options.machine(engine), situation.roster
    a, b, d = (dataclasses.replace(matrix, chunks=((1,), (1,))) for matrix in (problem.a, problem.b, problem.d))
    smallest = dataclasses.replace(problem, matrices=(a, b), wanted=(d,), formula=Formula(), gathered="")
    around = _plan(smallest, situation, (engine,), True).seconds
    if problem.method == "auto":
        parts, slowest = min(len(roster), max(problem.m, problem.n)), min(max(1, worker.nthreads) for worker in roster)
        operations = problem.flops / (min(_rates(problem, engine)) * slowest * parts)
        links = machine.bandwidth, machine.network_bandwidth, machine.dask_bandwidth, machine.host_bandwidth
        copies = _all_bytes(problem) / min(filter(None, (*links, machine.memory_bandwidth)))
        if _MOST * (around + operations + copies) <= limit:
            return True
    return any(
        _consider(problem, situation, engine, candidate).seconds <= limit
        for least, candidate in _ways(problem, roster, engine)
        if max(around, least) <= limit
    )


def fits_easily(problem: Problem, room: float) -> bool:
    """Whether no way to run a problem holds more than this number of bytes on a worker."""
    return _COPIES * _all_bytes(problem) + _LIBRARY_BYTES <= room


def _all_bytes(problem: Problem) -> int:
    """Return the bytes of all matrices of a problem, each in the largest of its types."""
    types = *map(dtype_from_name, problem.dtypes_of_work), problem.compute_type
    elements = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n
    extras = sum(math.prod(extra.shape) * extra.itemsize for extra in problem.extras)
    return elements * max(dtype.itemsize for dtype in types) + extras


@functools.lru_cache(maxsize=64)
def _plan(problem: Problem, situation: Situation, engines: tuple[str, ...], thorough: bool) -> Plan:
    """Return the fastest plan that fits into memory; of an engine that is preferred if several are as fast."""
    ways, plans, refusals, best = list[tuple[float, int, Candidate]](), list[Plan](), list[PlanError](), None
    for number, name in enumerate(engines):
        try:
            ways += ((least, number, candidate) for least, candidate in _ways(problem, situation.roster, name))
        except PlanError as error:
            # The reason of the last engine counts: the others are there to be faster where they can.
            refusals.append(error)
    bound = math.inf, 0, 0
    for least, number, candidate in sorted(ways, key=lambda way: way[:2]):
        # Rows and columns may change places in what is as fast: then memory decides.
        mirrored = best is not None and (number, candidate[0]) == (bound[1], best.method)
        slower = least > bound[0] * (1 if mirrored else 1 - _CLOSE)
        if slower and not thorough:
            continue
        plan = _consider(problem, situation, engines[number], candidate, math.inf if thorough else bound[0])
        if not plan.projected_bytes:
            continue
        plans.append(plan)
        key = plan.seconds, number, max(plan.projected_bytes.values())
        if not slower and key < bound and not over_limit(plan):
            bound, best = key, plan
    engine = engines[-1] if best is None else best.engine
    plans = [plan for plan in plans if plan.engine == engine]
    if not plans:
        raise refusals[-1]
    plans.sort(key=lambda plan: (plan is not best, plan.seconds, max(plan.projected_bytes.values())))

    def why(plan: Plan) -> str:
        kept = " and ".join(f"all of {name.upper()} is to be on each worker" for name in plan.kept)
        chosen_as = "the leanest there is" if problem.method == "auto" else "as asked for"
        return f" with method {plan.method!r}, {chosen_as}{', since ' * bool(kept)}{kept}"

    what = f"the multiply of {problem.m} x {problem.k} by {problem.k} x {problem.n} ({problem.d.dtype})"
    return choose([plans], what, problem.remedies, why)


def _candidates(problem: Problem, nworkers: int, engine: str) -> list[Candidate]:
    """Return the methods and grids to look at.

    With ``method="auto"`` also on fewer workers: 1 and the powers of two, since a small product is faster on few. A
    method that is asked for takes as many workers as have something to do.
    """
    m, n, k, method = problem.m, problem.n, problem.k, problem.method
    if not nworkers:
        raise PlanError("no worker can take part: start workers, or name some of the cluster's with workers=")
    if method not in ("auto", *METHODS):
        raise PlanError(f"unknown method {method!r}; known are 'auto', {', '.join(map(repr, METHODS))}")
    if 0 in (m, n, k):
        raise PlanError(f"nothing to plan: m, n, k = {m}, {n}, {k}")
    candidates = list[Candidate]()
    if problem.grid is not None:
        if math.prod(problem.grid) > nworkers:
            raise PlanError(f"a grid of {problem.grid} was asked for, and there are {nworkers} workers")
        candidates = [(method, problem.grid)]
    elif any(problem.distributions):
        candidates = asked_ways(problem, nworkers, engine)
    else:
        auto = method == "auto"
        counts = {nworkers, 1} | {2**e for e in range(nworkers.bit_length()) if 2**e < nworkers}
        for count in sorted(counts if auto else range(1, nworkers + 1), reverse=True):
            if auto or not candidates:
                candidates += grids(problem, count)
    candidates = [candidate for candidate in candidates if ENGINES[engine].has_method(problem, candidate[0])]
    if not candidates and not ENGINES[engine].has_method(problem, method):
        raise PlanError(f"engine {engine!r} has no method {method!r} for FP8; use method='auto'")
    if not candidates:
        raise PlanError(
            f"method {method!r} does not fit m, n, k = {m}, {n}, {k} on {nworkers} workers; use method='auto'"
        )
    return candidates


def _consider(
    problem: Problem, situation: Situation, engine: str, candidate: Candidate, limit: float = math.inf
) -> Plan:
    """Return the plan that runs `problem` in one certain way, with its estimate, and its memory up to some seconds."""
    every = ENGINES[engine].cuts(problem, candidate) or [
        (*grid_cuts(problem, candidate[1]), None),
        # Moving nothing may be faster than sharing the work evenly.
        *((*cuts, None) for cuts in [holder_cuts(problem, situation.where, candidate[1])] if cuts is not None),
    ]
    plans = [_cut(problem, situation, engine, candidate[0], cuts, limit) for cuts in every]
    return min(plans, key=lambda plan: plan.seconds)


def _cut(problem: Problem, situation: Situation, engine: str, method: str, cuts: Cuts, limit: float) -> Plan:
    """Return the plan with certain cuts of m, n and k, and of D."""
    rows, cols, depth, d_cuts = cuts
    model, s, nroster = ENGINES[engine], len(depth) - 1, len(situation.roster)
    nranks = (len(rows) - 1) * (len(cols) - 1) * s
    d_cuts = d_cuts or ((rows, cols) if s == 1 else reduce_cuts(problem, method, s))
    plan = Plan(
        problem=problem,
        engine=engine,
        participants=(*situation.roster, *situation.sources),
        where=situation.where,
        orders=dict(zip("ab", situation.orders, strict=True)),
        method="local" if nranks == 1 and model.collective else method,
        ranks=tuple(range(nranks)),
        rows=rows,
        cols=cols,
        depth=depth,
        d_cuts=d_cuts,
        owners=chunk_owners(problem, method, d_cuts, nranks),
        packing=packing(problem, (rows, cols, depth)) if model.by_panels else "",
    )
    needs = {operand: operand_needs(plan, operand) for operand in "ab"}
    held = (needs["a"][1] + needs["b"][1])[:nroster].T
    plan = dataclasses.replace(plan, ranks=_matched(plan, held, situation.groups), replicas=nroster if plan.kept else 0)

    # Chunks of A and B may stay in host memory. A rank that is alone reads each once, and need not wait for all.
    may_stay = model.reads_peers and problem.array == "numpy" and not problem.replicated and not problem.by_ranks

    def finished(plan: Plan) -> Plan:
        work = model.work(plan, needs)
        if problem.extras:
            work = _more(work, formula_inputs(plan)[1])
        if limit < math.inf and not may_stay:
            estimated_time = estimate(work, plan.machine, plan.method, plan.grid, hosts=plan.hosts)
            if estimated_time.seconds > limit:
                return dataclasses.replace(plan, estimate=estimated_time)
        memory = model.memory(plan, needs)
        if plan.kept:
            more, moved = _replicas(plan, nroster)
            memory, work = memory + more, _more(work, moved)
        return estimated(plan, memory, work)

    plan = finished(plan)
    if may_stay and (over_limit(plan) or len(plan.participants) == 1):
        plan = finished(dataclasses.replace(plan, from_host=True))
    return plan


def _more(work: Work, moved: NDArray[np.float64]) -> Work:
    """Return the work of a plan of which each rank gets more bytes from others."""
    phases = [*work.phases, Phase(waited={"ranks": moved})]
    return Work(phases, work.messages + bool(moved.any()), work.seconds, work.moved + moved.sum())


def _matched(plan: Plan, held: NDArray[np.float64], groups: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Match ranks (rows) to workers so that most bytes lie right; a group that exists already saves making one."""
    model, nroster = ENGINES[plan.engine], held.shape[1]
    if apart := model.reads_peers and len({*(islands := plan.islands[:nroster]).tolist()}) > 1:
        # On as few islands as there can be, those that have most.
        order = sorted(set(islands.tolist()), key=lambda island: -held[:, islands == island].sum())
        before = np.cumsum([0, *(np.count_nonzero(islands == island) for island in order)])[:-1]
        held = np.where(np.isin(islands, np.array(order)[before < len(held)]), held, -_EXCLUDED)
    if not (model.collective or apart):
        begun = np.zeros((len(plan.ranks), len(plan.participants)))
        if "partial" in plan.where:
            # Earlier sums of a rank would not only move: they could not grow in place.
            np.add.at(begun, (plan.owners, plan.where["partial"]), _BEGUN * plan.problem["partial"].bytes)
        return tuple(match_ranks(-held - begun[:, :nroster]))
    best, ranks = tuple(match_ranks(-held)), range(len(held))
    if not groups:
        return best
    number = {worker.address: index for index, worker in enumerate(plan.participants[:nroster])}
    fitting = [group for group in groups if len(group) == len(best) and number.keys() >= set(group)]
    orders = [tuple(number[address] for address in group) for group in fitting]
    worth = _NEW_GROUP_SECONDS * plan.machine.bandwidth * len(best)
    worthwhile = [order for order in orders if held[ranks, best].sum() - held[ranks, order].sum() < worth]
    return max(worthwhile, key=lambda order: held[ranks, order].sum(), default=best)


# The seconds that Dask takes around a run, and the work of its own tasks for the same


# Number of partial products of which Dask makes one sum.
_SUMMED = 4
# LAPACK's QR of a chunk, as NumPy calls it, runs at this share of a product's rate; and tasks for each chunk.
_QR_SHARE, _QR_TASKS = 0.25, 6


def run_overhead(problem: Computation, costs: DaskCosts) -> float:
    """Return the seconds that Dask adds to a run; chunks that ranks compute are unknown to it."""
    names = [name for name in problem.inputs if not (problem[name].by_ranks or (name == "b" and problem.shared))]
    inputs = sum(problem[name].count for name in names)
    return costs.run + costs.chunk * (inputs + sum(output.count for output in problem.outputs))


def with_tasks(plan: P, workers: Sequence[Worker], costs: DaskCosts, *, lazy: bool = False, by_tasks: bool = True) -> P:
    """Return a plan with Dask's overhead, and with `by_tasks` the estimate for its own tasks."""
    problem = plan.problem
    around = run_overhead(problem, costs) + lazy * costs.start
    own = tasks_estimate(problem, workers, problem.machine_of_tasks(plan.engine), costs) if by_tasks else None
    return dataclasses.replace(plan, around=around, by_tasks=own)


def tasks_estimate(problem: Any, workers: Sequence[Worker], machine: Machine, costs: DaskCosts) -> Estimate:
    """Estimate the time of Dask's own tasks for a computation."""
    kinds: dict[str, Callable[..., _Tasks]] = {
        "product": _tasks_of_product, "factorization": _tasks_of_factor, "program": _tasks_of_program,
    }  # fmt: skip
    threads = sum(worker.nthreads for worker in workers)
    grid, tasks, own, received, moved, held = kinds[problem.kind](problem, len(workers), threads, machine)
    phases = [own, Phase(waited={"dask": received})]
    work = Work(phases, seconds=costs.start + tasks * costs.task, moved=moved)
    return estimate(work, machine, "dask", grid, held)


# Numbers of blocks and of tasks; what a worker computes; bytes that a worker receives, that all move, a worker holds.
_Tasks = tuple[tuple[int, int, int], int, Phase, float, float, float]


def _tasks_of_product(problem: Problem, count: int, threads: int, machine: Machine) -> _Tasks:
    rows, cols = len(problem.a.chunks[0]), len(problem.b.chunks[1])
    edges = [set(itertools.accumulate(sizes)) for sizes in (problem.a.chunks[1], problem.b.chunks[0])]
    depth = len(edges[0] | edges[1])
    products = rows * cols * depth
    sums = rows * cols * math.ceil(max(0, depth - 1) / (_SUMMED - 1))
    # Where A and B are cut differently along k, one of them is cut again.
    again = products if edges[0] != edges[1] else 0
    a_bytes, b_bytes = problem.a.itemsize * problem.m * problem.k, problem.b.itemsize * problem.k * problem.n
    d_bytes = problem.d.itemsize * problem.m * problem.n
    flops = math.ceil(products / threads) * problem.flops / products
    added = (depth > 1) * depth * d_bytes / count
    received = (1 - 1 / count) * (min(a_bytes, b_bytes) * (1 + bool(again)) + added)
    held = (a_bytes + b_bytes + (1 + (depth > 1) * min(depth, _SUMMED)) * d_bytes) / count + received
    own = Phase(flops, machine.rate(problem.compute_type.name), added)
    return (rows, cols, depth), products + sums + again, own, received, received * count, held


def _tasks_of_program(problem: ProgramProblem, count: int, threads: int, machine: Machine) -> _Tasks:
    """QR of each chunk, and of all R; or products."""
    (rows, cols), chunks, dtype = problem["a"].shape, problem["a"].counts[0], problem.compute_type
    size = dtype.itemsize
    flops, tasks = 4 * (rows + chunks * cols) * cols**2 * (4 if dtype.kind == "c" else 1), _QR_TASKS
    rate, touched, moved = machine.rate(problem.dtype) * min(threads, chunks), 0.0, chunks * cols**2
    if problem.builder == "svd_compressed":
        # Products by narrow matrices, QR of the last one, and the products that make U.
        width, passes = problem.options_of_builder["width"], 2 + 2 * problem.options_of_builder["iterations"]
        flops, tasks = rows * width * (2 * passes * cols + 6 * width), 2 * passes + 2 * _QR_TASKS
        touched, moved = float(passes * rows * cols * size), chunks * passes * cols * width
    elif problem.builder == "cov":
        # Means, differences and their transposes are read and written beside the product.
        flops, touched = flops // 2, 4.0 * rows * cols * size
    else:
        rate *= _QR_SHARE
    return (chunks, 1, 1), chunks * tasks, Phase(flops, rate, touched), moved * size, moved * size, 0.0


def _tasks_of_factor(problem: FactorProblem, count: int, threads: int, machine: Machine) -> _Tasks:
    blocks, (rows, cols) = problem["a"].counts[0], problem.task.a_shape
    name, right, columns = problem.task.factored, 0, 0
    if problem.task.b_shape is not None:
        right, columns = problem["b"].counts[1], problem.task.b_shape[1]
    if name == "qr":
        # Q and R of each chunk; R of all of these R; its Q in parts, and their products with the first Q.
        products, small_tasks, elements = blocks, 4 * blocks, cols * cols
    else:
        triangles = right * (2 if name else 1)
        products = triangles * blocks * (blocks - 1) // 2
        if name:
            products += (blocks - 2) * (blocks - 1) * blocks // 6 + blocks * (blocks - 1) // 2
        small_tasks = (2 * blocks * blocks if name else 0) + triangles * blocks
        elements = rows // blocks * (cols // blocks if name else -(-columns // right))
    moved = (1 - 1 / count) * (products * elements + rows * cols * (name == "cholesky"))
    moved *= problem.compute_type.itemsize
    rate = machine.rate(problem.task.dtype) * min(threads, blocks) * EngineModel.shares[name][0]
    own = Phase(problem.flops, rate)
    return (blocks, blocks, blocks), products + small_tasks, own, moved / count, moved, 0.0


# The kinds of computations: which class a message means, and who plans it


# By the kind that ``to_wire`` names: the class of the computation, that of its plans, and who plans it.
_KINDS: dict[str, tuple[type[Computation], type[Placement], Callable[..., Placement]]] = {
    Problem.kind: (Problem, Plan, plan),
    FactorProblem.kind: (FactorProblem, FactorPlacement, plan_factorization),
    ProgramProblem.kind: (ProgramProblem, ProgramPlacement, plan_program),
    RegionProblem.kind: (RegionProblem, RegionPlacement, plan_region),
}


def problem_from_wire(wire: Any) -> Computation:
    """Make a computation from what its ``to_wire`` gave, checked."""
    return _KINDS[_kind(wire)][0].from_wire(wire)


def plan_from_wire(wire: Any) -> Placement:
    """Make a plan from what its ``to_wire`` gave, checked."""
    return _KINDS[_kind(wire.get("problem") if isinstance(wire, dict) else None)][1].from_wire(wire)


def _kind(wire: Any) -> str:
    kind = wire.get("kind") if isinstance(wire, dict) else None
    if kind not in _KINDS:
        raise ProtocolError(f"malformed problem: a computation of kind {kind!r}; known are {', '.join(_KINDS)}")
    return str(kind)


def plan_computation(
    problem: Computation,
    roster: Sequence[Worker],
    where: Where | None = None,
    *,
    engine: Sequence[str],
    sources: Sequence[Worker] = (),
) -> Placement:
    """Choose how a computation of any kind runs, fast; parameters and errors are those of `planner.plan`.

    A factorization or a program is for the first engine that can run it in the memory that there is.
    """
    return _KINDS[problem.kind][2](problem, roster, where, engine=engine, sources=sources)
