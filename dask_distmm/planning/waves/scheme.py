"""A scheme: the waves of a product, and the problem of each of them. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.part import Part
from dask_distmm.planning.placement import Explanation
from dask_distmm.planning.problem import Extra, Problem

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
    read_bytes: int
    read_seconds: float
    run_seconds: float
    # Projected peak of a worker's memory, and what it may hold.
    peak_bytes: int
    budget_bytes: int
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
    axes = {"m": wave.rows, "n": wave.cols, "k": wave.depth}
    extents = {"m": problem.m, "n": problem.n}
    inputs = problem.extras if wave.last else ()
    numbers, chunks = [], {}

    def take(name: str, sizes: Chunks, along: str) -> None:
        taken = []
        for axis, own in zip(along, sizes, strict=True):
            start, stop = axes[axis]
            if name not in ("a", "b", "d", "partial") and sum(own) != extents[axis]:
                start, stop = 0, sum(own)  # broadcast
            ends = np.cumsum(own)
            taken.append(tuple(np.flatnonzero((ends > start) & (ends <= stop)).tolist()))
        if part is not None:
            kept = part.of("d" if name == "partial" else name)
            taken = [tuple(x for x in mine if x in of) for mine, of in zip(taken, kept[:2], strict=True)]
        rows, cols = taken
        numbers.append((name, rows, cols, len(sizes[1])))
        chunks[name] = tuple(sizes[0][i] for i in rows), tuple(sizes[1][j] for j in cols)

    take("a", problem.a_chunks, "mk")
    take("b", problem.b_chunks, "kn")
    for extra in inputs:
        take(extra.name, extra.chunks, "mn")
    if not wave.first:
        take("partial", problem.out_chunks, "mn")
    take("d", problem.out_chunks, "mn")
    extras = [dataclasses.replace(extra, chunks=chunks[extra.name]) for extra in inputs]
    sums = problem.compute_type.name
    if not wave.first:
        extras.append(Extra("partial", chunks["partial"], sums))
    formula = problem.formula if wave.last else Formula()
    # The same chunks, as in X.T @ X: transposed once, and in the same columns.
    across = problem.turned in ((True, False), (False, True)) and numbers[0][1] == numbers[1][2]
    shared = problem.shared and across
    series, number = scheme.series or problem.name, scheme.before + number
    whole = problem.name if wave.last else f"{series}-sum-{number:05d}"
    return dataclasses.replace(
        problem,
        name=f"{series}-wave-{number:05d}",
        a_chunks=chunks["a"],
        b_chunks=chunks["b"],
        out_chunks=chunks["d"],
        dtype=problem.dtype if wave.last else sums,
        method=scheme.method,
        same=False,
        options=dataclasses.replace(problem.options, panel_bytes=scheme.panel_bytes, buffer_bytes=scheme.buffer_bytes),
        extras=tuple(extras),
        formula=dataclasses.replace(formula, partial=not wave.first),
        arrays=(f"{problem.name}-stream",) * 2 if shared else ("", ""),
        part=Part(tuple(numbers), whole),
        stationary=not (wave.first and wave.last),
        by_ranks=scheme.streamed if scheme.by_ranks else (False, False),
    )
