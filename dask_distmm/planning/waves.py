"""A product that does not fit into memory as a sequence of runs, waves, each of which does. Pure.

::

    sums       D is in memory and grows: wave w adds A[:, kw] @ B[kw, :] to what wave w - 1 has left
    rows       B is in memory: wave w makes some rows of chunks of D of those of A
    cols       A is in memory: wave w makes some columns of chunks of D of those of B
    blocks     neither fits, nor does D: block by block of D, each in waves along k; operands are read again for each
    host       A and B are in host memory, and D does not fit on the GPUs: block by block of D, each in one wave

While wave w is multiplied the inputs of wave w + 1 are loaded, and no more: two waves' inputs are in memory, what the
run itself takes, and what stays. A wave is as large as these leave room for; each is an ordinary `Problem`.

A block is one run over all of k: the ranks read A's rows and B's columns from host memory while they multiply
(`Plan.from_host`), and the block of D goes to host memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import Budget, DaskCosts
from dask_distmm.errors import PlanError, ProjectedMemoryError, advice
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning.computation import Chunks, Part, Worker
from dask_distmm.planning.footprint import chunk_bytes, held_bytes, made_bytes
from dask_distmm.planning.model import ENGINES, models_of, speeds
from dask_distmm.planning.placement import Explanation
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.planner import plan, product_remedies
from dask_distmm.planning.problem import AXES, METHODS, Problem, part_of
from dask_distmm.planning.tasks import run_overhead

# A scheme: the waves of a product, and the problem of each of them. Pure


Range = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Wave:
    """One run of a product in waves."""

    # Its ranges of m, n and k.
    rows: Range
    cols: Range
    depth: Range
    # Whether it begins and ends the sums over k of its block of D.
    first: bool
    last: bool
    # Number of that block: a chunk of A or B is loaded once for each block that needs it.
    visit: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """The waves of a product, and the estimate for them."""

    # ``"sums"``, ``"rows"``, ``"cols"``, ``"blocks"`` or ``"host"``; see the package.
    name: str
    # In the order in which they run.
    waves: tuple[Wave, ...]
    # For A and B whether chunks are loaded for a wave and dropped after it; others stay in memory.
    streamed: tuple[bool, bool]
    # Whether ranks make the chunks that are streamed when they need them; else Dask loads those of the next wave.
    by_ranks: bool
    # Of each run.
    method: str
    # Of a panel in flight between workers, and of the buffers of a GPU.
    panel_bytes: int
    buffer_bytes: int
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
    def seconds(self) -> float:
        """Estimated seconds in all: loads are hidden behind runs or runs behind loads, but for the first and last."""
        least, most = sorted((self.read_seconds, self.run_seconds))
        # Ranks multiply each chunk as soon as it is there.
        return most if self.by_ranks else most + least / len(self.waves)

    @property
    def binding(self) -> str:
        """The resource that decides how long it takes: ``"loading"`` or ``"multiplying"``."""
        return "loading" if self.read_seconds > self.run_seconds else "multiplying"


@dataclasses.dataclass(frozen=True, repr=False)
class WavePlan(Explanation):
    """A product in waves, as `dask_distmm.explain` returns it."""

    # The product and its waves.
    problem: Problem
    scheme: Scheme

    @property
    def method(self) -> str:
        """``"waves"``."""
        return "waves"

    @property
    def seconds(self) -> float:
        """Estimated time, loading included."""
        return self.scheme.seconds

    @property
    def bytes_moved(self) -> None:
        """Not estimated: where chunks will be loaded is not known."""
        return None


def part_scheme(problem: Problem, scheme: Scheme, part: Part, name: str) -> Scheme:
    """Return the waves, called after `name`, that make a part of a product.

    Waves along k are joined as long as they read no more than a wave of the whole.
    """
    rows, cols = _kept(problem, part)
    sizes = problem.itemsize("a") * scheme.streamed[0], problem.itemsize("b") * scheme.streamed[1]

    def read(nrows: int, ncols: int, depth: Range) -> int:
        return (nrows * sizes[0] + ncols * sizes[1]) * (depth[1] - depth[0])

    most = max(read(wave.rows[1] - wave.rows[0], wave.cols[1] - wave.cols[0], wave.depth) for wave in scheme.waves)
    found: list[Wave] = []
    for wave in scheme.waves:
        extents = int(rows[slice(*wave.rows)].sum()), int(cols[slice(*wave.cols)].sum())
        if 0 in extents:
            continue
        joined = (found[-1].depth[0], wave.depth[1]) if found and not wave.first else wave.depth
        if joined != wave.depth and read(*extents, joined) <= most:
            found[-1] = dataclasses.replace(found[-1], depth=joined, last=wave.last)
        else:
            found.append(wave)
    return dataclasses.replace(scheme, waves=tuple(found), series=name, before=0)


def _kept(problem: Problem, part: Part) -> list[NDArray[np.bool_]]:
    """Return which rows, and which columns, of D are in a part."""
    return [
        np.repeat(np.isin(np.arange(len(sizes)), numbers), sizes)
        for sizes, numbers in zip(problem.out_chunks, part.of("d")[:2], strict=True)
    ]


def wave_problem(problem: Problem, scheme: Scheme, number: int, part: Part | None = None) -> Problem:
    """Return one wave of a product, or of its part, as a problem called ``...-wave-00012`` after it or the series."""
    wave = scheme.waves[number]
    axes, extents = {"m": wave.rows, "n": wave.cols, "k": wave.depth}, {"m": problem.m, "n": problem.n}

    def take(name: str, sizes: Chunks, along: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        taken = []
        for axis, own in zip(along, sizes, strict=True):
            ends, (start, stop) = np.cumsum(own), axes[axis]
            if name not in ("a", "b", "d", "partial") and sum(own) != extents[axis]:
                start, stop = 0, sum(own)  # broadcast
            taken.append(tuple(np.flatnonzero((ends > start) & (ends <= stop)).tolist()))
        if part is not None:
            kept = part.of("d" if name == "partial" else name)
            taken = [tuple(x for x in mine if x in of) for mine, of in zip(taken, kept[:2], strict=True)]
        return taken[0], taken[1]

    taken = {name: take(name, problem.chunks_of(name), AXES[name]) for name in "ab"}
    taken |= {extra.name: take(extra.name, extra.chunks, "mn") for extra in problem.extras if wave.last}
    of_d = {name: take(name, problem.out_chunks, "mn") for name in ("partial",) * (not wave.first) + ("d",)}
    formula = problem.formula if wave.last else Formula()
    # The same chunks, as in X.T @ X: transposed once, and in the same columns.
    across = problem.transposed in ((True, False), (False, True)) and taken["a"][0] == taken["b"][1]
    shared = problem.shared and across
    series, number = scheme.series or problem.name, scheme.before + number
    return part_of(
        problem,
        taken | of_d,
        problem.name if wave.last else f"{series}-sum-{number:05d}",
        name=f"{series}-wave-{number:05d}",
        dtype=problem.dtype if wave.last else problem.compute_type.name,
        method=scheme.method,
        same=False,
        options=dataclasses.replace(problem.options, panel_bytes=scheme.panel_bytes, buffer_bytes=scheme.buffer_bytes),
        formula=dataclasses.replace(formula, partial=not wave.first),
        arrays=(f"{problem.name}-stream",) * 2 if shared else ("", ""),
        stationary=not (wave.first and wave.last),
        by_ranks=scheme.streamed if scheme.by_ranks else (False, False),
    )


# Where a product can be cut into waves: at edges of all chunks along an axis. Pure


# Number of blocks of D along an axis.
BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@functools.lru_cache(maxsize=16)
def common_edges(problem: Problem, axis: str) -> tuple[int, ...]:
    """Return where an axis, of ``"m"``, ``"n"`` and ``"k"``, can be cut: at edges of all chunks along it."""
    inputs = [extra.chunks for extra in problem.extras]
    chunkings = {
        "m": [problem.a_chunks[0], problem.out_chunks[0], *(c[0] for c in inputs if sum(c[0]) == problem.m)],
        "n": [problem.b_chunks[1], problem.out_chunks[1], *(c[1] for c in inputs if sum(c[1]) == problem.n)],
        "k": [problem.a_chunks[1], problem.b_chunks[0]],
    }[axis]
    common = set.intersection(*({0, *itertools.accumulate(sizes)} for sizes in chunkings))
    return tuple(sorted(common))


def grouped(edges: Sequence[int], groups: int) -> tuple[int, ...]:
    """Return those edges that cut the segments between edges into groups of about as many segments."""
    count = len(edges) - 1
    return tuple(edges[round(i * count / groups)] for i in range(groups + 1))


# Blocks of D one after the other, for operands in host memory and a D that does not fit on the GPUs. Pure


# Blocks are planned for this share of what a worker may hold: whole chunks of D are shared out by where A and B lie,
# which may be less even than here.
_SHARE = 0.75


def in_host_memory(problem: Problem, engine: str | Sequence[str]) -> bool:
    """Whether chunks are in host memory, and the engines that may multiply work in the memory of GPUs."""
    names = [engine] if isinstance(engine, str) else engine
    return problem.array == "numpy" and all(one.on_gpus for one in models_of(names))


def in_host(worker: Worker) -> Worker:
    """Return a worker with its host memory in place of that of its GPU."""
    return dataclasses.replace(worker, memory_limit=worker.host_limit, used=0)


def choose_blocks(
    problem: Problem, workers: Sequence[Worker], costs: DaskCosts, engine: str | Sequence[str]
) -> Scheme | None:
    """Return the blocks that read the fewest bytes, of those that fit on the GPUs; None if none do."""
    names = [one.name for one in models_of([engine] if isinstance(engine, str) else engine) if one.reads_peers]
    if not names:
        return None
    some = [dataclasses.replace(worker, memory_limit=int(_SHARE * worker.memory_limit)) for worker in workers]
    sizes = problem.m * problem.k * problem.itemsize("a"), problem.k * problem.n * problem.itemsize("b")
    for rows, cols in _splits(problem, *sizes):
        waves, options = tuple(_waves(rows, cols, (0, problem.k))), problem.options
        read = sizes[0] * (len(cols) - 1) + sizes[1] * (len(rows) - 1)
        how = "host", waves, (False, False), False, problem.method, options.panel_bytes, options.buffer_bytes
        scheme, volumes = Scheme(*how, read), [_volume(wave) for wave in waves]
        try:
            made = plan(wave_problem(problem, scheme, int(np.argmax(volumes))), some, engine=names)
        except (PlanError, ProjectedMemoryError):
            continue
        machine, fraction = problem.options.machine(made.engine), problem.options.limit_fraction
        seconds = made.estimate.compute_seconds if made.estimate else 0.0
        return dataclasses.replace(
            scheme,
            method=made.method,
            read_seconds=read / (len(made.ranks) * speeds(machine)["host"]),
            run_seconds=seconds * sum(volumes) / max(volumes) + len(waves) * run_overhead(made.problem, costs),
            peak_bytes=_peak(made),
            budget_bytes=int(min(worker.memory_limit for worker in workers) * fraction),
        )
    return None


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
    """Return the fastest scheme that fits into the memory of the workers; one by ranks only, if that is asked for."""
    # The same product comes again and again in a loop: only its name differs.
    anonymous = dataclasses.replace(problem, name="the product", arrays=problem.anonymous)
    engines = (engine,) if isinstance(engine, str) else tuple(engine)
    asked = anonymous, tuple(workers), lazy, budget, costs, engines, by_ranks, products, only_by_ranks
    return _choose(_Choice(*asked))


@functools.lru_cache(maxsize=64)
def _choose(choice: _Choice) -> Scheme:
    return choice.best()


def _why_whole(problem: Problem, lazy: tuple[bool, bool], *, apart: bool) -> str:
    if not any(lazy) and not apart:
        return "all chunks of A and B are in memory already"
    if problem.part is not None or any(problem.distributions) or problem.grid or problem.replicated:
        return "its layout is asked for, or all of D or of an operand is to be on every worker"
    if any(0 in sizes for sizes in (*problem.a_chunks, *problem.b_chunks, *problem.out_chunks)):
        return "it has empty chunks"
    return ""


def _splits(problem: Problem, a_bytes: int, b_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the edges of blocks of D along rows and columns; those first by which fewest bytes are read."""
    edges = common_edges(problem, "m"), common_edges(problem, "n")
    counts = [sorted({min(len(along) - 1, count) for count in BLOCKS}) for along in edges]
    splits = [split for split in itertools.product(*counts) if split != (1, 1)]
    splits.sort(key=lambda split: (a_bytes * split[1] + b_bytes * split[0], math.prod(split)))
    for p, q in splits:
        yield grouped(edges[0], p), grouped(edges[1], q)


@dataclasses.dataclass(frozen=True)
class _Sketch:
    """A scheme but for the size of its waves: the edges of D's blocks, and the axis along which waves follow."""

    name: str
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    axis: str
    streamed: tuple[bool, bool]
    by_ranks: bool = False


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The choice of a scheme; see `choose_scheme`."""

    problem: Problem
    workers: tuple[Worker, ...]
    lazy: tuple[bool, bool]
    budget: Budget
    costs: DaskCosts
    engines: tuple[str, ...]
    # The operands whose chunks ranks can make.
    able: tuple[bool, bool]
    products: int
    only_by_ranks: bool

    @functools.cached_property
    def _apart(self) -> bool:
        return in_host_memory(self.problem, self.engines)

    @functools.cached_property
    def _holders(self) -> Sequence[Worker]:
        """The workers with the memory in which chunks are."""
        return [in_host(worker) for worker in self.workers] if self._apart else self.workers

    @functools.cached_property
    def _room(self) -> float:
        return min(self.budget.of(worker) for worker in self._holders)

    @functools.cached_property
    def _makers(self) -> list[str]:
        return [one.name for one in models_of(self.engines) if one.makes]

    @property
    def _fewest(self) -> int:
        return -(-_FEWEST // self.products)

    def best(self) -> Scheme:
        """Return the fastest scheme of those that fit."""
        problem, lazy = self.problem, self.lazy
        if reason := _why_whole(problem, lazy, apart=self._apart):
            raise PlanError(f"{problem.name} can't be made in waves: {reason}")
        if self._apart and not any(lazy):
            if (blocks := choose_blocks(problem, self.workers, self.costs, self.engines)) is not None:
                return blocks
            raise ProjectedMemoryError(
                f"{problem.name} does not fit in waves either: a chunk of D, and what is read for it, are more than "
                "the GPUs may hold. Use smaller chunks or more workers",
                {},
                {worker.address: worker.memory_limit for worker in self.workers},
            )
        found: list[Scheme] = []
        methods = METHODS if problem.method == "auto" else (problem.method,)
        for sketch in self._sketches():
            if (self.products > 1 and sketch.streamed != lazy) or (self.only_by_ranks and not sketch.by_ranks):
                continue
            if self.only_by_ranks and found and sketch.name == "blocks":
                break
            similar = [one for one in found if one.name == sketch.name]
            if any(one.by_ranks == sketch.by_ranks or sketch.name != "blocks" for one in similar):
                continue  # it reads more blocks, or loads what ranks can make
            schemes = [self._scheme(sketch, method) for method in methods] if self._may_fit(sketch) else []
            found += [scheme for scheme in schemes if scheme is not None]
        if not found:
            limits = {worker.address: int(self.budget.of(worker)) for worker in self._holders}
            raise ProjectedMemoryError(
                f"{problem.name} does not fit in waves either: two chunks of each operand along k, and what stays in "
                f"memory, are more than the {min(limits.values()) / 2**20:.0f} MiB that a worker may hold without "
                f"spilling. {advice(['use smaller chunks', *product_remedies(problem), 'use a higher memory_limit'])}",
                {},
                limits,
            )
        # Where one of loading and multiplying decides it, the other one may still be less.
        return min(found, key=lambda scheme: (scheme.seconds, scheme.read_seconds + scheme.run_seconds))

    def _sketches(self) -> Iterator[_Sketch]:
        """Yield the schemes to look at, those of blocks by the bytes that they read.

        First come those in which ranks make the chunks that are streamed, if ranks of some engines can, and these are
        fit.
        """
        problem, lazy = self.problem, self.lazy

        def fit(chunks: Chunks) -> bool:
            # BLAS is slow on chunks one by one that are small on average, where the engine does not join them.
            large = all(len(sizes) == 1 or sum(sizes) >= problem.options.pack_below * len(sizes) for sizes in chunks)
            return large or not any(ENGINES[name].by_panels for name in self._makers)

        both = zip(self.able, (problem.a_chunks, problem.b_chunks), strict=True)
        made = [bool(self._makers) and can and fit(chunks) for can, chunks in both]
        m, n = (0, problem.m), (0, problem.n)
        found = [_Sketch("sums", m, n, "k", lazy)]
        found += [_Sketch("rows", m, n, "m", (True, False))] * lazy[0]
        found += [_Sketch("cols", m, n, "n", (False, True))] * lazy[1]
        read = problem.m * problem.k * problem.itemsize("a"), problem.n * problem.k * problem.itemsize("b")
        splits = _splits(problem, read[0] * lazy[0], read[1] * lazy[1])
        blocks = (_Sketch("blocks", rows, cols, "k", lazy) for rows, cols in splits)
        for sketch in itertools.chain(found, blocks):
            if all(can for can, streamed in zip(made, sketch.streamed, strict=True) if streamed):
                yield dataclasses.replace(sketch, by_ranks=True)
            yield sketch

    def _may_fit(self, sketch: _Sketch) -> bool:
        """Whether D's block alone fits, before anything is planned."""
        if sketch.axis != "k":
            return True
        rows, cols = (max(np.diff(edges).tolist()) for edges in (sketch.rows, sketch.cols))
        return float(rows) * cols * self.problem.compute_type.itemsize < self._room * len(self.workers)

    def _scheme(self, sketch: _Sketch, method: str) -> Scheme | None:
        """Return the scheme with the largest waves that fit, of which there are enough; None if none fit."""
        segments = len(common_edges(self.problem, sketch.axis)) - 1
        if segments < 2 and self._fewest == _FEWEST:
            return None
        # Where ranks make chunks the largest waves mostly fit, too.
        if segments <= _FEW and not sketch.by_ranks and self._try(sketch, segments, method) is None:
            return None
        # Numbers of waves along the axis: more fit sooner, and take longer to look at.
        low = high = 1
        while (found := self._try(sketch, high, method)) is None:
            if high == segments:
                return None
            low, high = high + 1, min(segments, 2 * high)
        while low < high:
            middle = (low + high) // 2
            if (smaller := self._try(sketch, middle, method)) is not None:
                found, high = smaller, middle
            else:
                low = middle + 1
        if sketch.by_ranks:
            # On GPUs a wave is over so soon that the time around the runs would count.
            fewest = 1 if ENGINES[self._makers[0]].on_gpus else self._fewest // 2
            fine = max(fewest, math.ceil(found.seconds / _LONGEST))
            # Each rank needs chunks of its own in each wave.
            fine = max(low, min(fine, max(1, segments // len(self.workers))))
            return self._try(sketch, fine, method) or found
        better = self._try(sketch, min(segments, max(self._fewest, low)), method)
        if better is not None and better.run_seconds / len(better.waves) > _SHORTEST:
            return better
        return found

    def _try(self, sketch: _Sketch, count: int, method: str) -> Scheme | None:
        """Return the scheme with `count` waves along the axis, or None if it does not fit."""
        edges = grouped(common_edges(self.problem, sketch.axis), count)
        whole = {"m": sketch.rows, "n": sketch.cols, "k": (0, self.problem.k)}
        waves = tuple(_waves(*(whole | {sketch.axis: edges}).values(), again=sketch.axis == "k"))
        options = self.problem.options
        panel = int(min(options.panel_bytes, self._room / _PANEL_SHARE))
        most = min((worker.memory_limit for worker in self.workers if worker.memory_limit), default=math.inf)
        buffers = int(min(options.buffer_bytes, most / _BUFFER_SHARE))
        room = int(self._room) if math.isfinite(self._room) else 0
        how = sketch.name, waves, sketch.streamed, sketch.by_ranks
        scheme = Scheme(*how, method, panel, buffers, budget_bytes=room)
        largest = max(range(len(waves)), key=lambda w: (_volume(waves[w]), not waves[w].first))
        beside = self._beside(scheme, largest)
        # The run has what is left.
        left = [
            dataclasses.replace(worker, memory_limit=int(max(1.0, self.budget.of(worker) - beside)), used=0)
            if worker.memory_limit and not self._apart
            else worker
            for worker in self.workers
        ]
        try:
            plans = [self._plan(scheme, number, left) for number in dict.fromkeys((largest, len(waves) - 1))]
        except (ProjectedMemoryError, PlanError):
            return None
        if self._apart and any(beside + held_bytes(one).max() > self._room for one in plans):
            return None
        if scheme.by_ranks and any({*"ab"} & {*one.packing} for one in plans):
            return None  # they would be copied one by one
        return self._estimated(scheme, plans, beside)

    def _plan(self, scheme: Scheme, number: int, workers: Sequence[Worker]) -> Plan:
        sub = wave_problem(self.problem, scheme, number)
        if not self._apart:
            sub = dataclasses.replace(sub, options=dataclasses.replace(sub.options, limit_fraction=1.0))
        return plan(sub, workers, engine=self._makers if scheme.by_ranks else self.engines)

    def _beside(self, scheme: Scheme, number: int) -> float:
        """Return the bytes on a worker that are not part of the largest run."""
        problem, count = self.problem, len(self.workers)
        sub = wave_problem(problem, scheme, number)
        total, loaded, largest = 0.0, 0, 0.0
        for operand, lazy, streamed in zip("ab", self.lazy, scheme.streamed, strict=True):
            if operand == "b" and sub.shared:
                break
            mine = chunk_bytes(sub, operand)
            if streamed and scheme.by_ranks:
                continue  # the plan's own
            if streamed:
                loaded, largest = loaded + len(mine), max(largest, float(mine.max()))
            elif not lazy:
                total += (chunk_bytes(problem, operand).sum() - mine.sum()) / count
        # Chunks loaded for the next wave, and one more that is being made.
        total += largest * (math.ceil(loaded / count) + 1)
        if scheme.waves[number].last:
            # Chunks of the wave before, on their way out.
            total += chunk_bytes(sub, "d").sum() / count
        elif scheme.waves[number].visit:
            total += chunk_bytes(problem, "d").mean()
        return total

    def _estimated(self, scheme: Scheme, plans: Sequence[Plan], beside: float) -> Scheme:
        problem, count = self.problem, len(self.workers)
        one, estimate = plans[0].problem, plans[0].estimate
        share = sum(map(_volume, scheme.waves)) / (float(one.m) * one.n * one.k)
        read = made_bytes(plans[0]) * share if scheme.by_ranks else 0.0
        for operand, lazy, streamed, axis in zip("ab", self.lazy, scheme.streamed, ("rows", "cols"), strict=True):
            if not lazy or (operand == "b" and problem.shared and scheme.name == "sums"):
                continue
            boxes = [(getattr(wave, axis), wave.depth) for wave in scheme.waves]
            if streamed and not scheme.by_ranks:
                elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
                read += float(elements) * problem.itemsize(operand)
            elif not streamed:
                read += float(chunk_bytes(problem, operand).sum())
        run = 0.0 if estimate is None else estimate.compute_seconds if scheme.by_ranks else estimate.seconds
        run *= share
        around_all = len(scheme.waves) * run_overhead(one, self.costs)
        return dataclasses.replace(
            scheme,
            read_bytes=int(read),
            read_seconds=read / ((len(plans[0].ranks) if scheme.by_ranks else count) * self.budget.rate(problem.array)),
            run_seconds=run + around_all,
            peak_bytes=int(beside + max(held_bytes(x).max() if self._apart else _peak(x) for x in plans)),
        )


def _waves(rows: Sequence[int], cols: Sequence[int], depth: Sequence[int], *, again: bool = True) -> Iterator[Wave]:
    """Yield the waves of blocks of D that are cut at certain edges; `again`: each block has chunks loaded anew."""
    steps = list(itertools.pairwise(depth))
    for visit, (down, across) in enumerate(itertools.product(itertools.pairwise(rows), itertools.pairwise(cols))):
        for step in steps:
            yield Wave(down, across, step, step == steps[0], step == steps[-1], visit * again)


def _peak(made: Plan) -> int:
    return max(made.projected_bytes.values())


def _volume(wave: Wave) -> float:
    return math.prod(float(stop - start) for start, stop in (wave.rows, wave.cols, wave.depth))
