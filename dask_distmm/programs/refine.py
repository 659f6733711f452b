"""Solutions by factors of fewer bits, refined in the type of A: the builder of each rank's program.

A is scaled by powers of two, so that no element is above 1, converted while it is gathered, and factorized. Then::

    r = R B          x = 0             R and C are the scales of rows and columns
    turn:  z = C (L U)^-1 r            in the type of the factors
           x = x + z,  s = R (B - A x) in the type of A, of which ranks multiply the chunks that they have
           |s| is small                done
           |s| far below |r|           r = s: classical refinement (Wilkinson 1963; Carson, Higham 2018)
           else                        of all z so far those multiples are added that make the residual least, with
                                       R A z = r - s: GMRES with the factors as preconditioner, as GCR does it
    too slow, or no factors: A itself is factorized

So a turn reads A once and the factors twice, whichever way it goes, and the residual that decides is always that of x.
X, B and what belongs to them are with those ranks that have block columns of B.

If there is memory for it, each rank gets all panels once, with all rows swapped. Then its solves take no messages and
few, large steps; on GPUs these are products with the inverses of blocks on the diagonal. Otherwise panels, or a narrow
B, go from rank to rank in each turn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dask_distmm.programs.factor import Panels, apply_panels, cholesky, eliminate, lu, substitute
from dask_distmm.programs.factorizations import NUMBERS
from dask_distmm.programs.recorder import Recorder
from dask_distmm.programs.steps import CONTRACTS, Buffer, Contract, Key, Load, Publish, View

# Turns at most, those that are expected, and earlier corrections that are kept at most.
MOST, EXPECTED, KEPT = 40, 3, 16
# The most rows and columns of blocks on the diagonal of factors that are inverted; a power of two.
INVERTED = 2048
# Parts of a triangle of at most this many rows and columns are copied, with zeros outside of it: on CPUs, on GPUs.
CROSSING = 512, 2048
# Numbers that a turn ends with: columns that are not done, whether that is of no use, turns, the way (0: classical, 1:
# GMRES, 2: by A itself), backward error, and the last correction relative to x.
UNFINISHED, FAILED, TURNS, WAY, BACKWARD, FORWARD = range(6)
# Of each column: whether it is done, its residual when corrections began to be kept, and turns, kept ones, and the way.
DONE, BEGAN, SO_FAR, KEEPING, TAKEN = range(5)
STATE = 5
CONTRACTS |= {
    # Of A as chunks have it: sums and maxima of rows, and the diagonal; a product.
    "measure": Contract("w"),
    "multiply_chunks": Contract("ru"),
    # Numbers for rows, and the norm; A's columns by numbers; the least and the largest element of a factor's diagonal.
    "weigh": Contract("wwr", exact=True),
    "scale_columns": Contract("uw"),
    # The order of rows: by pivots that are an operand; as they are. Rows in that order; a panel of L and the order as
    # the swaps of later panels, and then of its own, make them.
    "order_of_rows": Contract("w"),
    "count_rows": Contract("w"),
    "permute_rows": Contract("ru"),
    "swap_later": Contract("uur"),
    # Of factors that a rank has all of: a part of a panel; inverses of blocks on the diagonal; a triangle, with these.
    "keep_panel": Contract("rw"),
    "invert_blocks": Contract("rw", lambda a, v: a[0] * v[0] ** 2),
    "solve_whole": Contract("rru", lambda a, v, b: a[0] * b[0] * b[1]),
    "diagonal_range": Contract("wr"),
    # A residual in the type of the factors; a correction in that of A; the next residual, or the end.
    "weighted": Contract("rrw"),
    "scale_residual": Contract("rrww"),
    "correct": Contract("rrrwu"),
    "refine_step": Contract("rrrruuuuuuuu"),
    "judge_factors": Contract("wwwr", exact=True),
    "judge": Contract("wwwr", exact=True),
    "take_other_way": Contract("u", exact=True),
}


def kept_columns(n: int, columns: int) -> int:
    """Return how many corrections are kept: with many right-hand sides they take more memory than A."""
    return min(KEPT, n // max(1, 4 * columns))


def inverted_order(n: int) -> int:
    """Return the order of the blocks on the diagonal of factors that are inverted."""
    return min(INVERTED, 1 << max(0, n - 1).bit_length())


def refined(
    p: Panels,
    order: Sequence[int],
    *,
    dtype: str,
    positive: bool,
    narrow: bool,
    identity: bool,
    has_factors: bool,
    op: str,
    carried: bool,
    whole: bool,
    inverts: bool,
    otherwise: Callable[[], Panels] | None,
) -> tuple[Buffer, Buffer]:
    """Solve A X = B, of which `p` has A in the type of the factors; `otherwise` begins the way by A itself.

    Returns this rank's columns of X, and the numbers that say how it was solved.
    """
    columns, first, n, rank_count = p.columns, p.columns.first(1), p.columns.order, p.columns.ranks
    real = np.empty(0, dtype).real.dtype.name
    widths = [columns.local(rank, first, columns.count) for rank in range(rank_count)]
    ends = [0, *itertools.accumulate(widths_of.stop - widths_of.start for widths_of in widths)]
    places = [slice(*pair) for pair in itertools.pairwise(ends)]
    width, mine = widths[p.me].stop - widths[p.me].start, places[p.me]

    # Scales
    sizes, weights, norm = p.small(n, 2, real), p.small(n, 1, real), p.numbers(1, "float64")
    p.call("measure", sizes)
    ((parts,), _) = p.share_rows([sizes], [])
    p.call("weigh", weights, norm, *parts, positive=positive, has_factors=has_factors)
    p.drop(*parts)
    # Names are the same on all ranks.
    rows, swapped = p.small(n, 1, "int64"), not positive and width > 0 and (has_factors or whole)
    op = op if has_factors else "N"
    if has_factors:
        if swapped:
            p.call("order_of_rows", rows, back=op != "N")
        p.gather("f", 0)
    else:
        p.gather("a", 0, (weights, weights) if positive else (weights,))
    scales = weights if positive or has_factors else _column_scales(p, n, real, narrow=narrow)
    b = p.small(n, width, dtype)
    p.new(b, zero=identity)
    if identity:
        for block in columns.owned(p.me, first, columns.count):
            at = columns.local(p.me, first, block)
            _, start, stop = columns.blocks[block]
            here = at.stop - at.start
            p.call("identity", b[:, here : here + stop - start], start=start)
    else:
        p.steps.append(Load((b[:, :],), ("b",)))

    # Factors
    if has_factors:
        p.complete(order)
    else:
        (cholesky if positive else lu)(p, order, first)
    ranges = p.numbers(3, "float64")
    owned = [k for k in order if p.owns(k)]
    spots = [(columns.local(p.me, 0, k).stop, *columns.place(k)) for k in owned]
    extras = [p.extra(k) for k in owned] if positive and not has_factors else []
    with p.on("join"):
        p.call("diagonal_range", ranges, p.matrix(0), *extras, places=spots)
    go, good, numbers = p.flag(), p.flag(), p.numbers(NUMBERS, "float64")
    ((parts,), _) = p.share_rows([ranges], [])
    p.call("judge_factors", go, good, numbers, *parts, positive=positive, eps=float(np.finfo(p.dtype).eps))
    p.drop(*parts)

    # Turns
    solve = (
        _solved_by_all(p, order, rows, positive=positive, op=op, has_factors=has_factors, inverts=inverts)
        if whole
        else None
    )
    every, product, x = p.small(n, ends[-1], dtype), p.small(n, ends[-1], dtype), p.small(n, width, dtype)
    r, z, step = p.small(n, width, dtype), p.small(n, width, dtype), p.small(1, width, real)
    count = kept_columns(n, ends[-1])
    bases = p.small(n, count * width, dtype), p.small(n, count * width, dtype)
    state, row = dataclasses.replace(p.numbers(width, "float64"), shape=(STATE, width)), p.numbers(NUMBERS, "float64")
    p.new(every, product, x, state, row, *bases, zero=True)
    # By what residuals are multiplied: zeros for columns that are done.
    active = p.small(1, width, real)
    p.new(z, step)
    p.call("set_all", active, value=1)
    p.call("weighted", weights, b, r)
    side = p.blocks(first, columns.count)

    def turn() -> None:
        if width:
            p.call("scale_residual", r, active, step, side)
        if swapped and op == "N":
            p.call("permute_rows", rows, side)
        if not (positive or has_factors or solve):
            apply_panels(p, order, lambda k, some: eliminate(p, k, some), "lower", carried=carried)
            substitute(p, order, lower=False, carried=carried)
        for lower, form in _triangles(positive, op) if solve or positive or has_factors else ():
            if solve is None:
                substitute(p, order, lower=lower, op=form, unit=lower and not positive, carried=carried)
            elif width:
                solve(side, lower, form)
        with p.on("" if solve else "join"):
            if swapped and op != "N":
                p.call("permute_rows", rows, side)
            if width:
                p.call("correct", side, scales, step, z, x)
        _spread(p, x, every, places)
        p.call("multiply_chunks", every, product, flops=2.0 * n * n * ends[-1] / rank_count)
        _collect(p, product, places)
        if width:
            p.call("refine_step", b, weights, norm, product[:, mine], x, r, z, *bases, state, active, row)
        ((parts,), _) = p.share_rows([row], [])
        p.call("judge", go, good, numbers, *parts)
        p.drop(*(part for part in parts if part != row))

    p.loop(go, turn, MOST, EXPECTED)

    def by_itself() -> None:
        p.drop(*(buffer for name, buffer in list(p.here.items()) if buffer not in (x, numbers, go, good)))
        if otherwise is None:
            p.call("take_other_way", numbers, there=False)
            return
        p.call("take_other_way", numbers, there=True)
        exact = otherwise()
        p.go_on(exact)
        if width:
            with p.on("join"):
                p.call("copy", exact.matrix(1)[:n, :], x)
        p.drop(*list(exact.here.values()))

    p.either(good, lambda: None, by_itself)
    part = Buffer("part.x", (n, width), dtype)
    p.call("copy", x, part)
    return part, numbers


def _column_scales(p: Panels, n: int, real: str, *, narrow: bool) -> Buffer:
    """Scale the columns of A so that elements are about 1 at most; return the scales of all columns."""
    own, scales = p.small(n, 1, real), p.small(n, 1, real)
    blocks = [p.columns.blocks[block] for block in p.columns.owned(p.me, 0, p.columns.first(1))]
    p.call("scale_columns", p.matrix(0), own, places=[(block.start, block.stop) for block in blocks], narrow=narrow)
    ((parts,), _) = p.share_rows([own], [])
    p.call("merge", *parts, scales, ops=("sum",), ranks=len(parts), roles="r" * len(parts) + "w")
    p.drop(*parts)
    return scales


def _triangles(positive: bool, op: str) -> tuple[tuple[bool, str], ...]:
    """Return the triangles that equations are solved with, and their form, the first one first."""
    if positive:
        return (True, "N"), (True, "C")
    return ((True, op), (False, op)) if op == "N" else ((False, op), (True, op))


def _solved_by_all(
    p: Panels, order: Sequence[int], rows: Buffer, *, positive: bool, op: str, has_factors: bool, inverts: bool
) -> Callable[[View, bool, str], None]:
    """All-gather all panels, the last ones first, and the order of rows; return the recorder of solves."""
    columns, n, single = p.columns, p.columns.order, p.columns.ranks == 1
    factors = p.matrix(0) if single else p.small(n, n)
    used, swaps = p.blocks(columns.first(1), columns.count).shape[1] > 0, not (positive or has_factors)
    if isinstance(factors, Buffer) and used:
        p.new(factors)
    if swaps and used:
        p.call("count_rows", rows)
    for k in reversed(order) if used else ():
        (_, left, right), start = columns.blocks[k], columns.place(k)[0]
        for part in ("lower",) if positive else ("lower", "upper"):
            pulled = panel, *extra = p.with_extra(k, part)
            place = factors[slice(start, None) if part == "lower" else slice(start), left:right]
            if not p.owns(k):
                p.pull(columns.owner(k), Key(part, k), pulled, taken=True)
            if not single:
                p.call("keep_panel", panel if part == "lower" else panel[:start, :], place)
            if swaps and extra:
                p.call("swap_later", place, rows[start:, :], *extra)
            if not p.owns(k):
                p.drop(*pulled)
    size = inverted_order(n) if inverts else 0
    inverses = {lower: p.small(size, -(-n // max(1, size)) * size) for lower in (True, False)}
    for lower in (True, False)[: 1 if positive else 2] if used else ():
        p.call("invert_blocks", factors, inverses[lower], lower=lower, unit=lower and not positive)

    def solve(side: View, lower: bool, form: str) -> None:
        p.call("solve_whole", factors, inverses[lower], side, lower=lower, op=form, unit=lower and not positive)

    return solve


def _spread(p: Recorder, own: Buffer, every: Buffer, places: Sequence[slice]) -> None:
    """All-gather the columns of a matrix."""
    key, rows, parts = p.next_key(), own.shape[0], dict[int, Buffer]()
    if len(places) > 1:
        p.steps.append(Publish(key, (own,), copied=True))
    for rank, place in enumerate(places):
        parts[rank] = own
        if rank != p.me:
            parts[rank] = Buffer(f"{own.name}@{rank}", (rows, place.stop - place.start), own.dtype)
            p.pull(rank, key, (parts[rank],))
    for rank, part in parts.items():
        p.call("copy", part, every[:, places[rank]])
    p.drop(*(part for part in parts.values() if part != own))


def _collect(p: Recorder, product: Buffer, places: Sequence[slice]) -> None:
    """Reduce-scatter a matrix by columns."""
    if product.shape[1] * len(places) <= product.shape[0]:
        # One message of each rank to all, most of which is not read, is sooner there.
        ((parts,), _) = p.share_rows([product], [])
        for rank, part in enumerate(parts):
            if rank != p.me:
                p.call("add", part[:, places[p.me]], product[:, places[p.me]])
                p.drop(part)
        return
    for owner, place in enumerate(places):
        key = p.next_key()
        if place.stop == place.start:
            continue
        if owner != p.me:
            p.steps.append(Publish(key, (product[:, place],), copied=True))
            continue
        for rank in range(len(places)):
            if rank != p.me:
                part = p.small(product.shape[0], place.stop - place.start, product.dtype)
                p.pull(rank, key, (part,))
                p.call("add", part, product[:, place])
                p.drop(part)
