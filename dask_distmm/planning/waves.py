"""A product that does not fit into memory as a sequence of runs, waves, each of which does. Pure.

::

    sums       D is in memory and grows: wave w adds A[:, kw] @ B[kw, :] to what wave w - 1 has left
    rows       B is in memory: wave w makes some rows of chunks of D of those of A
    cols       A is in memory: wave w makes some columns of chunks of D of those of B
    blocks     neither fits, nor does D: block by block of D, each in waves along k; operands are read again for each
    host       A and B are in host memory, and D does not fit on the GPUs: block by block of D, each in one wave

All are cuts along m, n and k, with a wave for each box between them; a wave is an ordinary `Problem`. While wave w is
multiplied the inputs of wave w + 1 are loaded, and no more: two waves' inputs are in memory, what the run itself takes,
and what stays. A wave is as large as these leave room for.

A block from host memory is one run over all of k: the ranks read A's rows and B's columns from host memory while they
multiply (`Plan.from_host`), and the block of D goes to host memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from dask_distmm.config import Budget, DaskCosts
from dask_distmm.errors import PlanError, ProjectedMemoryError, advice
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning.computation import Chunks, Worker
from dask_distmm.planning.cuts import touched
from dask_distmm.planning.footprint import held_bytes, made_bytes
from dask_distmm.planning.model import ENGINES, models_of, speeds
from dask_distmm.planning.planner import plan, run_overhead
from dask_distmm.planning.problem import AXES, METHODS, Problem, common_edges, part_of
from dask_distmm.shown import Explanation

# A scheme: the waves of a product, and the problem of each of them. Pure


Range = tuple[int, int]
# Where a product is cut along an axis: the first edge is 0, the last one its extent.
Cuts = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The waves of a product, and the estimate for them."""

    # ``"sums"``, ``"rows"``, ``"cols"``, ``"blocks"`` or ``"host"``; see the module.
    name: str
    # Along m, n and k.
    cuts: tuple[Cuts, Cuts, Cuts]
    # For A and B whether chunks are loaded for a wave and dropped after it; others stay in memory.
    streamed: tuple[bool, bool]
    # Whether ranks make the chunks that are streamed when they need them; else Dask loads those of the next wave.
    by_ranks: bool = False
    # Of each run.
    method: str = "auto"
    # Of a panel in flight between workers, and of the buffers of a GPU.
    panel_bytes: int = 0
    buffer_bytes: int = 0
    # Bytes that are loaded in all; estimated seconds of that, and of the runs.
    read_bytes: int = 0
    read_seconds: float = 0.0
    run_seconds: float = 0.0
    # Projected peak of a worker's memory, and what it may hold.
    peak_bytes: int = 0
    budget_bytes: int = 0
    # Where the waves of several products follow one another: the name of them all, empty for a single product, and the
    # number of waves of the products before.
    series: str = ""
    before: int = 0

    @property
    def waves(self) -> list[tuple[Range, Range, Range]]:
        """Rows, columns and depth of each wave, in the order in which they run."""
        m, n, k = map(itertools.pairwise, self.cuts)
        return list(itertools.product(m, n, k))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of waves along m, n and k."""
        m, n, k = (len(cuts) - 1 for cuts in self.cuts)
        return m, n, k

    @property
    def count(self) -> int:
        """Number of waves."""
        return math.prod(self.counts)

    @property
    def largest(self) -> int:
        """Number of the largest wave, and of one that adds to the sums of another if there are several."""
        m, n, k = (np.diff(cuts).tolist() for cuts in self.cuts)
        places = m.index(max(m)), n.index(max(n)), max(range(len(k)), key=lambda at: (k[at], at > 0))
        return int(np.ravel_multi_index(places, self.counts))

    def visit(self, number: int) -> int:
        """Return the number of a wave's visit: a chunk that several blocks of D need is loaded for each of them."""
        m, n, k = self.counts
        again = (self.streamed[0] and n > 1) or (self.streamed[1] and m > 1)
        return number // k if again else 0

    @property
    def seconds(self) -> float:
        """Estimated seconds in all: loads are hidden behind runs or runs behind loads, but for the first and last."""
        least, most = sorted((self.read_seconds, self.run_seconds))
        # Ranks multiply each chunk as soon as it is there.
        return most if self.by_ranks else most + least / self.count

    @property
    def binding(self) -> str:
        """The bottleneck: ``"loading"`` or ``"multiplying"``."""
        return "loading" if self.read_seconds > self.run_seconds else "multiplying"


@dataclasses.dataclass(frozen=True, repr=False)
class WavePlan(Explanation):
    """A product in waves, as `dask_distmm.explain` returns it."""

    # The product and its waves.
    problem: Problem
    scheme: Scheme
    # As of a `Plan`.
    left: str | None = None
    method: ClassVar[str] = "waves"
    # Where chunks will be loaded is not known.
    bytes_moved: ClassVar[int | None] = None

    @property
    def seconds(self) -> float:
        """Estimated time, loading included."""
        return self.scheme.seconds


def part_scheme(problem: Problem, scheme: Scheme, part: Problem) -> Scheme:
    """Return the waves, called after a part of a product, of which some make that part, and the others nothing.

    Waves along k are joined as long as they read no more than a wave of the whole.
    """
    sizes = [problem[name].itemsize * yes for name, yes in zip("ab", scheme.streamed, strict=True)]
    rows, cols, depth = (np.diff(cuts).max() for cuts in scheme.cuts)
    most = (rows * sizes[0] + cols * sizes[1]) * depth
    extents = []
    for cuts, chunks, numbers in zip(scheme.cuts[:2], problem.d.chunks, part.d.in_whole[:2], strict=True):
        kept = np.repeat(np.isin(np.arange(len(chunks)), numbers), chunks)
        extents.append(np.add.reduceat(kept, cuts[:-1], dtype=int).max())
    steps = [0]
    for start, stop in itertools.pairwise(scheme.cuts[2]):
        if start and (extents[0] * sizes[0] + extents[1] * sizes[1]) * (stop - steps[-1]) > most:
            steps.append(start)
    return dataclasses.replace(scheme, cuts=(*scheme.cuts[:2], (*steps, problem.k)), series=part.name, before=0)


def wave_problem(problem: Problem, scheme: Scheme, number: int, part: Problem | None = None) -> Problem:
    """Return one wave of a product, or of its part, as a problem called ``...-wave-00012`` after it or the series."""
    places = np.unravel_index(number, scheme.counts)
    axes = {axis: cuts[at : at + 2] for axis, cuts, at in zip("mnk", scheme.cuts, places, strict=True)}
    first, last = axes["k"][0] == 0, axes["k"][1] == problem.k
    extents = {"m": problem.m, "n": problem.n, "k": problem.k}

    def take(name: str) -> tuple[list[int], list[int]]:
        taken = []
        for axis, own in zip(AXES.get(name, "mn"), problem[name].chunks, strict=True):
            # What is broadcast along an axis is taken whole.
            cut = sum(own) == extents[axis]
            taken.append(list(range(len(own))[touched(own, *axes[axis])] if cut else range(len(own))))
        if part is not None:
            kept = part[name].in_whole
            taken = [[x for x in mine if x in of] for mine, of in zip(taken, kept[:2], strict=True)]
        return taken[0], taken[1]

    taken = {name: take(name) for name in (*(problem.operands if last else "ab"), "d")}
    if not first:
        taken["partial"] = taken["d"]
    formula = problem.formula if last else Formula()
    # The same chunks, as in X.T @ X: transposed once, and in the same columns.
    across = problem.a.transposed != problem.b.transposed and taken["a"][0] == taken["b"][1]
    shared = problem.shared and across
    series, number = scheme.series or problem.name, scheme.before + number
    by_ranks = [name for name, yes in zip("ab", scheme.streamed, strict=True) if yes and scheme.by_ranks]
    wave = part_of(
        problem.made_by_ranks(by_ranks),
        taken,
        array=f"{problem.name}-stream" * shared,
        whole=problem.name if last else f"{series}-sum-{number:05d}",
        name=f"{series}-wave-{number:05d}",
        method=scheme.method,
        options=dataclasses.replace(problem.options, panel_bytes=scheme.panel_bytes, buffer_bytes=scheme.buffer_bytes),
        formula=dataclasses.replace(formula, partial=not first),
        stationary=not (first and last),
    )
    if last:
        return wave
    return dataclasses.replace(wave, wanted=(dataclasses.replace(wave.d, dtype=problem.compute_type.name),))


# Where a product can be cut into waves: at edges of all chunks along an axis. Pure


# Number of blocks of D along an axis.
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def grouped(edges: Sequence[int], groups: int) -> Cuts:
    """Return those edges that cut the segments between edges into groups of about as many segments."""
    count = len(edges) - 1
    return tuple(edges[round(i * count / groups)] for i in range(groups + 1))


def _splits(problem: Problem, streamed: tuple[bool, bool]) -> Iterator[tuple[Cuts, Cuts]]:
    """Yield the edges of blocks of D along rows and columns; those first by which fewest bytes are read."""
    edges = common_edges(problem, "m"), common_edges(problem, "n")
    counts = [sorted({min(len(along) - 1, count) for count in _BLOCKS}) for along in edges]
    splits = [split for split in itertools.product(*counts) if split != (1, 1)]
    for p, q in sorted(splits, key=lambda split: (sum(_read(problem, streamed, split)), math.prod(split))):
        yield grouped(edges[0], p), grouped(edges[1], q)


def _read(problem: Problem, streamed: tuple[bool, bool], blocks: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that are read of A and of B if those streamed are read again for each block of D."""
    a, b = problem.m * problem.k * problem.a.itemsize, problem.k * problem.n * problem.b.itemsize
    return a * (blocks[1] if streamed[0] else 1), b * (blocks[0] if streamed[1] else 1)


# The choice of a scheme: which waves fit into the memory of the workers, and which are fastest. Pure


# With fewer waves too much time would go by before the first one can be multiplied, and after the last was loaded.
_FEWEST = 8
# More of them than this and the time around each run is what counts (seconds of a wave).
_SHORTEST = 0.1
# Where ranks make chunks themselves memory does not limit a wave: so long ones are lost with a worker (seconds).
_LONGEST = 4.0
# If the finest waves are at most this many, they are examined first: mostly they show that none fit.
_FEW = 500
# A panel in flight takes this share of the budget at most, and the buffers of a GPU this one of its memory.
_PANEL_SHARE, _BUFFER_SHARE = 16, 8
# Blocks from host memory are planned for this share of what a worker may hold: whole chunks of D are shared out by
# where A and B lie, which may be less even than here.
_HOST_SHARE = 0.75


def in_host_memory(problem: Problem, engine: str | Sequence[str]) -> bool:
    """Whether chunks are in host memory, and the engines that may multiply work in the memory of GPUs."""
    names = [engine] if isinstance(engine, str) else engine
    return problem.array == "numpy" and all(model.on_gpus for model in models_of(names))


def in_host(worker: Worker) -> Worker:
    """Return a worker with its host memory as the limit in place of its GPU's."""
    return dataclasses.replace(worker, memory_limit=worker.host_limit, used=0)


def choose_scheme(
    problem: Problem,
    workers: Sequence[Worker],
    lazy: tuple[bool, bool],
    budget: Budget,
    costs: DaskCosts,
    *,
    engine: str | Sequence[str] = "numpy",
    by_ranks: tuple[bool, bool] = (False, False),
    products: int = 1,
    only_by_ranks: bool = False,
) -> Scheme:
    """Return the fastest scheme that fits into the memory of the workers; one by ranks only, if that is asked for.

    `by_ranks` are the operands whose chunks ranks can make.
    """
    # The same product comes again and again in a loop: only its name differs.
    engines = (engine,) if isinstance(engine, str) else tuple(engine)
    return _choose(
        problem.unnamed("the product"), tuple(workers), lazy, budget, costs, engines, by_ranks, products, only_by_ranks
    )


@functools.lru_cache(maxsize=64)
def _choose(
    problem: Problem, workers: tuple[Worker, ...], lazy: tuple[bool, bool], budget: Budget, costs: DaskCosts,
    engines: tuple[str, ...], able: tuple[bool, bool], products: int, only_by_ranks: bool,
) -> Scheme:  # fmt: skip
    apart = in_host_memory(problem, engines)
    reasons = {
        "all chunks of A and B are in memory already": not any(lazy) and not apart,
        "its layout is asked for, or all of D or of an operand is to be on every worker": problem.laid_out,
        "it has empty chunks": any(0 in sizes for x in (problem.a, problem.b, problem.d) for sizes in x.chunks),
    }
    if reason := next((text for text, holds in reasons.items() if holds), ""):
        raise PlanError(f"{problem.name} can't be made in waves: {reason}")
    if apart and not any(lazy):
        return _from_host(problem, workers, costs, engines)
    holders = [in_host(worker) for worker in workers] if apart else workers
    fitting = functools.partial(_fitting, problem, workers, holders, lazy, budget, costs, engines)
    methods = METHODS if problem.method == "auto" else (problem.method,)
    schemes: list[Scheme] = []
    for candidate in _candidates(problem, lazy, able, engines):
        # It reads more blocks, or loads what ranks can make.
        needless = any(
            x.name == candidate.name and (x.by_ranks == candidate.by_ranks or x.name != "blocks") for x in schemes
        ) or (only_by_ranks and schemes and candidate.name == "blocks")
        if needless or (products > 1 and candidate.streamed != lazy) or (only_by_ranks and not candidate.by_ranks):
            continue
        for method in methods:
            scheme = _longest(dataclasses.replace(candidate, method=method), fitting, len(workers), products, engines)
            schemes += [scheme] if scheme is not None else []
    if not schemes:
        limits = {worker.address: int(budget.of(worker)) for worker in holders}
        raise ProjectedMemoryError(
            f"{problem.name} does not fit in waves either: two chunks of each operand along k, and what stays in "
            f"memory, are more than the {min(limits.values()) / 2**20:.0f} MiB that a worker may hold without "
            f"spilling. {advice(['use smaller chunks', *problem.remedies, 'use a higher memory_limit'])}",
            {},
            limits,
        )
    # Where one of loading and multiplying decides it, the other one may still be less.
    return min(schemes, key=lambda scheme: (scheme.seconds, scheme.read_seconds + scheme.run_seconds))


def _candidates(
    problem: Problem, lazy: tuple[bool, bool], able: tuple[bool, bool], engines: Sequence[str]
) -> Iterator[Scheme]:
    """Yield the schemes to look at with the finest waves along one axis, those of blocks by the bytes that they read.

    First come those in which ranks make the chunks that are streamed, if ranks of some engines can, and these are fit.
    """
    makers = _makers(engines)

    def fit(chunks: Chunks) -> bool:
        # BLAS is slow on chunks one by one that are small on average, where the engine does not join them.
        large = all(len(sizes) == 1 or sum(sizes) >= problem.options.pack_below * len(sizes) for sizes in chunks)
        return large or not any(ENGINES[name].by_panels for name in makers)

    both = zip(able, (problem.a.chunks, problem.b.chunks), strict=True)
    makes = [bool(makers) and can and fit(chunks) for can, chunks in both]
    m, n, k = (0, problem.m), (0, problem.n), (0, problem.k)
    rows, cols, depth = (common_edges(problem, axis) for axis in "mnk")
    schemes = [Scheme("sums", (m, n, depth), lazy)]
    schemes += [Scheme("rows", (rows, n, k), (True, False))] * lazy[0]
    schemes += [Scheme("cols", (m, cols, k), (False, True))] * lazy[1]
    blocks = (Scheme("blocks", (*split, depth), lazy) for split in _splits(problem, lazy))
    for candidate in itertools.chain(schemes, blocks):
        if all(can for can, streamed in zip(makes, candidate.streamed, strict=True) if streamed):
            yield dataclasses.replace(candidate, by_ranks=True)
        yield candidate


def _makers(engines: Sequence[str]) -> list[str]:
    return [model.name for model in models_of(engines) if model.makes]


def _longest(
    finest: Scheme, fitting: Callable[[Scheme], Scheme | None], workers: int, products: int, engines: Sequence[str]
) -> Scheme | None:
    """Return the scheme with the largest waves that fit, of which there are enough; None if none fit."""
    axis = {"rows": 0, "cols": 1}.get(finest.name, 2)
    segments, fewest = finest.counts[axis], -(-_FEWEST // products)

    @functools.cache
    def of(count: int) -> Scheme | None:
        m, n, k = (grouped(cuts, count) if at == axis else cuts for at, cuts in enumerate(finest.cuts))
        return fitting(dataclasses.replace(finest, cuts=(m, n, k)))

    # Where ranks make chunks the largest waves mostly fit, too.
    if (segments < 2 and products == 1) or (segments <= _FEW and not finest.by_ranks and of(segments) is None):
        return None
    # More waves fit sooner. Fewer take longer to look at.
    low = high = 1
    while of(high) is None:
        if high == segments:
            return None
        low, high = high + 1, min(segments, 2 * high)
    low = bisect.bisect_left(range(high), True, lo=low, key=lambda count: of(count) is not None)
    longest = of(low)
    assert longest is not None
    if finest.by_ranks:
        # On GPUs a wave is over so soon that the time around the runs would count.
        least = 1 if ENGINES[_makers(engines)[0]].on_gpus else fewest // 2
        # Each rank needs chunks of its own in each wave.
        fine = min(max(least, math.ceil(longest.seconds / _LONGEST)), max(1, segments // workers))
        return of(max(low, fine)) or longest
    better = of(min(segments, max(fewest, low)))
    enough = better is not None and better.run_seconds / better.count > _SHORTEST
    return better if enough else longest


def _fitting(
    problem: Problem, workers: Sequence[Worker], holders: Sequence[Worker], lazy: tuple[bool, bool], budget: Budget,
    costs: DaskCosts, engines: Sequence[str], scheme: Scheme,
) -> Scheme | None:  # fmt: skip
    """Return a scheme with its estimate, or None if it does not fit."""
    apart, room = holders is not workers, min(map(budget.of, holders))
    names = _makers(engines) if scheme.by_ranks else engines
    options = problem.options
    most = min((worker.memory_limit for worker in workers if worker.memory_limit), default=math.inf)
    scheme = dataclasses.replace(
        scheme,
        panel_bytes=int(min(options.panel_bytes, room / _PANEL_SHARE)),
        buffer_bytes=int(min(options.buffer_bytes, most / _BUFFER_SHARE)),
        budget_bytes=int(room) if math.isfinite(room) else 0,
    )
    block = math.prod(max(np.diff(cuts).tolist()) for cuts in scheme.cuts[:2]) * problem.compute_type.itemsize
    if scheme.cuts[2] != (0, problem.k) and block >= room * len(workers):
        return None  # nor does what follows
    beside = _beside(problem, scheme, lazy, len(workers))
    # The run has what is left.
    left = [
        dataclasses.replace(worker, memory_limit=int(max(1.0, budget.of(worker) - beside)), used=0)
        if worker.memory_limit and not apart
        else worker
        for worker in workers
    ]
    plans = []
    for number in dict.fromkeys((scheme.largest, scheme.count - 1)):
        wave = wave_problem(problem, scheme, number)
        if not apart:
            wave = dataclasses.replace(wave, options=dataclasses.replace(wave.options, limit_fraction=1.0))
        try:
            plans.append(plan(wave, left, engine=names))
        except (ProjectedMemoryError, PlanError):
            return None
    held = max(held_bytes(wave_plan).max() if apart else max(wave_plan.projected_bytes.values()) for wave_plan in plans)
    # Operands that are packed would be copied one by one.
    if (apart and beside + held > room) or (
        scheme.by_ranks and any({*"ab"} & {*wave_plan.packing} for wave_plan in plans)
    ):
        return None
    wave_plan, share = plans[0], problem.flops / plans[0].problem.flops
    once, estimate = problem.shared and scheme.name == "sums", wave_plan.estimate
    read = made_bytes(wave_plan) * share if scheme.by_ranks else 0.0
    for at, size in enumerate(_read(problem, scheme.streamed, scheme.counts)):
        if lazy[at] and not (at == 1 and once) and not (scheme.streamed[at] and scheme.by_ranks):
            read += size
    assert estimate is not None
    run = estimate.compute_seconds if scheme.by_ranks else estimate.seconds
    readers = len(wave_plan.ranks) if scheme.by_ranks else len(workers)
    return dataclasses.replace(
        scheme,
        read_bytes=int(read),
        read_seconds=read / (readers * budget.rate(problem.array)),
        run_seconds=run * share + scheme.count * run_overhead(wave_plan.problem, costs),
        peak_bytes=int(beside + held),
    )


def _beside(problem: Problem, scheme: Scheme, lazy: tuple[bool, bool], workers: int) -> float:
    """Return the bytes on a worker that are not part of the largest run."""
    wave = wave_problem(problem, scheme, scheme.largest)
    total, loaded, largest = 0.0, 0, 0.0
    for operand, is_lazy, streamed in zip("ab", lazy, scheme.streamed, strict=True):
        if (operand == "b" and wave.shared) or (streamed and scheme.by_ranks):
            continue  # the plan's own
        mine = wave[operand].bytes
        if streamed:
            loaded, largest = loaded + len(mine), max(largest, float(mine.max()))
        elif not is_lazy:
            total += (problem[operand].bytes.sum() - mine.sum()) / workers
    # Chunks loaded for the next wave, and one more that is being made.
    total += largest * (math.ceil(loaded / workers) + 1)
    if wave.result_name == problem.name:
        # Chunks of the wave before, on their way out.
        total += wave.d.bytes.sum() / workers
    elif scheme.visit(scheme.largest):
        total += problem.d.bytes.mean()
    return total


def _from_host(problem: Problem, workers: Sequence[Worker], costs: DaskCosts, engines: Sequence[str]) -> Scheme:
    """Return the blocks from host memory that read the fewest bytes, of those that fit on the GPUs."""
    names = [model.name for model in models_of(engines) if model.reads_peers]
    some = [dataclasses.replace(worker, memory_limit=int(_HOST_SHARE * worker.memory_limit)) for worker in workers]
    both, options = (True, True), problem.options
    for split in _splits(problem, both) if names else ():
        sizes = options.panel_bytes, options.buffer_bytes
        scheme = Scheme("host", (*split, (0, problem.k)), (False, False), False, problem.method, *sizes)
        try:
            wave_plan = plan(wave_problem(problem, scheme, scheme.largest), some, engine=names)
        except (PlanError, ProjectedMemoryError):
            continue
        read = sum(_read(problem, both, scheme.counts))
        share = problem.flops / wave_plan.problem.flops
        seconds = wave_plan.estimate.compute_seconds * share if wave_plan.estimate else 0.0
        return dataclasses.replace(
            scheme,
            method=wave_plan.method,
            read_bytes=read,
            read_seconds=read / (len(wave_plan.ranks) * speeds(options.machine(wave_plan.engine))["host"]),
            run_seconds=seconds + scheme.count * run_overhead(wave_plan.problem, costs),
            peak_bytes=max(wave_plan.projected_bytes.values()),
            budget_bytes=int(min(worker.memory_limit for worker in workers) * options.limit_fraction),
        )
    raise ProjectedMemoryError(
        f"{problem.name} does not fit in waves either: a chunk of D, and what is read for it, are more than "
        "the GPUs may hold. Use smaller chunks or more workers",
        {},
        {worker.address: worker.memory_limit for worker in workers},
    )
