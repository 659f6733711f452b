"""How the order of a run's pulls and products works out, without GPUs: ``python -m benchmarks.gpu.model``.

A fluid model of the peer engine. Ranks begin a little apart. Each pulls and multiplies in the engine's own order
(`dask_distmm.planning.groups`). A GPU sends and receives so many bytes a second in all, which copies that
go on at the same time share as evenly as can be; products take what their operations take at the rate of a large one,
or longer if they are too small to fill a GPU. The host, latencies and the sums that ranks pull at the end are left out:
the model tells orders from each other, and no milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import cases
from dask_distmm.planning import Plan, Worker, plan
from dask_distmm.planning.cuts import full_side
from dask_distmm.planning.groups import chunk_blocks_of
from dask_distmm.programs.steps import Box, Call, Load, crossing
from tests.conformance import make_problem

# In place of a number of chunks.
SLABS = 0


class Pull(NamedTuple):
    """What fills a part of an operand: bytes from each other rank, and the step that it must come after."""

    number: int
    sources: list[tuple[int, float]]
    after: int


class Product(NamedTuple):
    """Operations, the share of a large product's rate, the step, and the numbers of the pulls that are needed."""

    flops: float
    share: float
    step: int
    needs: frozenset[int]


class Rank(NamedTuple):
    """What one rank does, in order."""

    pulls: list[Pull]
    products: list[Product]


def even_shares(flows: Sequence[tuple[int, int]], bandwidth: float) -> list[float]:
    """Return the rate of each flow (from one GPU to another one): max-min fair, by progressive filling.

    All rates grow alike until a GPU sends or receives `bandwidth`; those of its flows stay, the others grow on.
    """
    ends = [{("out", source), ("in", target)} for source, target in flows]
    left = dict.fromkeys(itertools.chain(*ends), bandwidth)
    rates: dict[int, float] = {}
    while len(rates) < len(flows):
        growing = [number for number in range(len(flows)) if number not in rates]
        count = {end: sum(end in ends[number] for number in growing) for end in left}
        step, full = min((left[end] / count[end], end) for end in left if count[end])
        for number in growing:
            if full in ends[number]:
                rates[number] = step
                for end in ends[number] - {full}:
                    left[end] -= step
        del left[full]
    return [rates[number] for number in range(len(flows))]


def rank_of(made: Plan, rank: int) -> Rank:
    """Return what a rank does in a plan."""
    me, full = made.ranks[rank], full_side(made.problem)
    pulls, products = list[Pull](), list[Product]()
    # For each buffer the loads that are in it, and the last product that has read it.
    inside, used = dict[str, list[tuple[Box, int]]](), dict[str, int]()
    for step in made.steps(rank):
        if isinstance(step, Load):
            ((place, operand, rect),) = step
            matrix = made.problem[operand]
            held: dict[int, float] = {}
            for piece in chunk_blocks_of(matrix.chunks, "ab".index(operand), rect):
                holder = int(made.where[matrix.name][piece.chunk])
                held[holder] = held.get(holder, 0.0) + piece.rows * piece.cols * matrix.itemsize
            held.pop(me, None)
            # The next rank first, as the engine has it.
            sources = sorted(held.items(), key=lambda one: (one[0] - me) % len(made.participants))
            name, box = place.name, place.box
            kept = [one for one in inside.get(name, ()) if not crossing(one[0], box)]
            after = used.get(name, -1) if len(kept) < len(inside.get(name, ())) else -1
            inside[name] = [*kept, (box, len(pulls))]
            pulls.append(Pull(len(pulls), sources, after))
        elif isinstance(step, Call) and step.kernel in ("product", "add_product"):
            a, _, d = step.arguments
            needs = {
                number
                for place in step.arguments[:2]
                for box, number in inside.get(place.name, ())
                if crossing(box, place.box)
            }
            used |= {place.name: len(products) for place in step.arguments}
            area = d.shape[0] * d.shape[1]
            # Near what was measured: see `dask_distmm.planning.cuts`.
            share = math.sqrt(min(1.0, area / full**2))
            products.append(Product(2.0 * area * a.shape[1], share, len(products), frozenset(needs)))
    return Rank(pulls, products)


class _State:
    """How far one rank is."""

    def __init__(self, rank: Rank, start: float, *, together: bool) -> None:
        self.rank, self.start, self.together = rank, start, together
        self.landed: set[int] = set()
        self.pulled = self.multiplied = 0
        self.steps_over = -1
        self.ends: float | None = None
        # How long all that has ended took.
        self.took = 0.0
        self._left = [list(pull.sources) for pull in rank.pulls]

    @property
    def flows(self) -> list[tuple[int, float]]:
        """Sources that are read now, each with the bytes that are left."""
        if self.pulled == len(self.rank.pulls) or self.rank.pulls[self.pulled].after > self.steps_over:
            return []
        left = self._left[self.pulled]
        return left if self.together else left[:1]

    def go_on(self, now: float, rate: float) -> None:
        """Begin all that can begin."""
        while self.pulled < len(self.rank.pulls) and not self._left[self.pulled]:
            if self.rank.pulls[self.pulled].after > self.steps_over:
                break
            self.landed.add(self.rank.pulls[self.pulled].number)
            self.pulled += 1
        if self.ends is None and self.multiplied < len(self.rank.products):
            product = self.rank.products[self.multiplied]
            if product.needs <= self.landed:
                self.ends = now + product.flops / (product.share * rate)

    def advance(self, now: float, moved: Sequence[float]) -> None:
        """Note what has been pulled of each flow, and a product that has ended."""
        if moved:
            left = self._left[self.pulled]
            rest = [(one, size - more) for (one, size), more in zip(left, moved, strict=False)]
            # A byte is nothing, and rounding must not leave one.
            self._left[self.pulled] = [(one, size) for one, size in rest if size > 1] + left[len(moved) :]
        if self.ends is not None and self.ends <= now:
            step, self.ends, self.took = self.rank.products[self.multiplied].step, None, now - self.start
            self.multiplied += 1
            last = self.multiplied == len(self.rank.products)
            if last or self.rank.products[self.multiplied].step != step:
                self.steps_over = step


def simulate(
    ranks: Sequence[Rank], starts: Sequence[float], bandwidth: float, rate: float, *, together: bool = True
) -> list[float]:
    """Return how long each rank takes, from its own beginning on.

    Parameters
    ----------
    ranks
        What each does.
    starts
        When each begins, in seconds.
    bandwidth
        Bytes that a GPU sends, and receives, in a second.
    rate
        Operations that a GPU does in a second.
    together
        Whether what one pull reads of several GPUs is read at the same time, else of one after the other.
    """
    states = [_State(rank, start, together=together) for rank, start in zip(ranks, starts, strict=True)]
    now = 0.0
    while True:
        begun = [number for number, state in enumerate(states) if state.start <= now]
        for number in begun:
            states[number].go_on(now, rate)
        flows = [(source, number) for number in begun for source, _ in states[number].flows]
        rates = iter(even_shares(flows, bandwidth))
        shares = {number: [next(rates) for _ in states[number].flows] for number in begun}
        times = [state.start for state in states if state.start > now]
        times += [ends for number in begun if (ends := states[number].ends) is not None]
        for number in begun:
            times += [now + size / share for (_, size), share in zip(states[number].flows, shares[number], strict=True)]
        if not times:
            return [state.took for state in states]
        before, now = now, min(times)
        for number in begun:
            states[number].advance(now, [share * (now - before) for share in shares[number]])


def placed(gpus: int, chunks: int) -> NDArray[np.int32]:
    """Return where Dask puts the chunks of a matrix that `da.map_blocks` makes: columns in turn."""
    return np.tile(np.arange(chunks, dtype=np.int32) % gpus, chunks)


def plan_of(case: cases.Case, gpus: int) -> Plan:
    """Return the plan of a case of an engine, whose chunks are where the benchmark has them."""
    cuts, slabs = cases.chunks(case, gpus), case.variant == cases.SLABS
    where = {
        name: np.arange(gpus, dtype=np.int32) if slabs else placed(gpus, len(cut[1]))
        for name, cut in zip("ab", cuts, strict=True)
    }
    problem = make_problem(*cuts, case.dtype, method=case.method, array="cupy")
    return plan(problem, [Worker(f"gpu{number}") for number in range(gpus)], where, engine=case.peer)


def make_plan(gpus: int, n: int, chunks: int, dtype: str, method: str = "auto") -> Plan:
    """Return the plan of a square product; with `SLABS` from one chunk a GPU."""
    variant = cases.SLABS if chunks == SLABS else f"{chunks}x{chunks}"
    return plan_of(cases.Case("peer", variant, dtype, cases.square(n), 1, method=method), gpus)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.model", description=__doc__)
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=[4])
    add("--sizes", type=int, nargs="+", default=[8192, 16384, 32768])
    add("--chunks", type=int, nargs="+", default=[SLABS, 4, 8, 16], help="chunks per side; 0 for one chunk a GPU")
    add("--type", default="bfloat16")
    add("--method", default="auto")
    add("--bandwidth", type=float, default=366e9, help="bytes a second that a GPU sends, and receives (H200: 366e9)")
    add("--rate", type=float, default=790e12, help="operations a second of a GPU (H200, bfloat16: 790e12)")
    add("--skew", type=float, default=1e-4, help="seconds within which ranks begin")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    print("Share of the bound, if a pull reads one GPU after the other, and all at the same time (as the engine does)")
    for gpus, n, chunks in itertools.product(options.gpus, options.sizes, options.chunks):
        made = make_plan(gpus, n, chunks, options.type, options.method)
        ranks = [rank_of(made, rank) for rank in range(len(made.ranks))]
        bound = 2.0 * n**3 / gpus / options.rate
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(5):
            starts = (rng.random(len(ranks)) * options.skew).tolist()
            for together, times in found.items():
                took = simulate(ranks, starts, options.bandwidth, options.rate, together=together)
                times.append(max(took))
        shares = "  ".join(f"{bound / float(np.mean(times)):.2f}" for times in found.values())
        what = f"{chunks} x {chunks} chunks" if chunks else "one chunk a GPU"
        print(f"{gpus} GPUs, N={n:<6} {what:16} {made.method:13} {shares}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
