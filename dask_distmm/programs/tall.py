"""QR of a matrix in chunks of rows: by Gram matrices where that is safe, otherwise by reflections.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya 2015)::

    R1^H R1 = A^H A        Q1 = A R1^-1
    R2^H R2 = Q1^H Q1      Q  = Q1 R2^-1        R = R2 R1

Q1 loses orthogonality with the square of the condition of A; Q does not, as long as Q1^H Q1 is near to the identity,
which rank 0 looks at. If R1 is so well-conditioned that it is R up to rounding, one pass is enough for R.

TSQR (Demmel, Grigori, Hoemmen, Langou 2012): each chunk is factorized, then the stacked triangles of each rank, then
those of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from dask_distmm.programs.recorder import Recorder, Tall
from dask_distmm.programs.steps import COUNT, Buffer

ChunksOfRows = Callable[[], Iterator[Buffer]]


def gram(p: Recorder, a: Tall) -> Buffer:
    """Return A^H A on rank 0."""
    g = p.zeros(a.cols, a.cols)
    for (chunk,) in p.chunks(a):
        p.call("gram", chunk, g)
    p.add_up(g)
    return g


def tall_r(p: Recorder, a: Tall) -> Buffer:
    """Return R on rank 0; A is read once, twice or three times."""
    return r_from_gram(p, lambda: (chunk for (chunk,) in p.chunks(a)), gram(p, a))


def r_from_gram(p: Recorder, rows: ChunksOfRows, g: Buffer) -> Buffer:
    """Return R on rank 0 of rows with this Gram matrix."""
    n = g.shape[0]
    first, r, once, usable = p.small(n, n), p.small(n, n), p.flag(), p.flag()
    p.on_root("cholesky", [g], [first, once, usable])
    p.drop(g)
    p.give(once, usable)

    def twice() -> None:
        p.give(first)
        h, second, good = p.zeros(n, n), p.small(n, n), p.flag()
        for chunk in rows():
            p.call("gram_of_quotient", first, chunk, h)
        p.add_up(h)
        p.on_root("second_factor", [h, first], [second, r, good])
        p.drop(h, second)
        p.give(good)
        p.either(good, lambda: None, lambda: reflected_r(p, rows, r))

    p.either(
        once,
        lambda: p.on_root("copy", [first], [r]),
        lambda: p.either(usable, twice, lambda: reflected_r(p, rows, r)),
    )
    p.drop(first)
    return r


def reflected_r(p: Recorder, rows: ChunksOfRows, r: Buffer, cols: int | None = None) -> None:
    """Have R on rank 0 by reflections, as `r`; of its columns the first `cols` are those of A, others of B."""
    t = p.zeros(*r.shape)
    for chunk in rows():
        p.call("reflect", chunk, t)
    p.add_up(t, op="reflect")
    p.on_root("copy", [t], [r])
    _check(p, r, cols)
    p.drop(t)


def _check(p: Recorder, r: Buffer, cols: int | None = None) -> None:
    """Refuse a matrix that is not finite, by its R."""
    if p.finite:
        p.on_root("check", [r], [], cols=r.shape[1] if cols is None else cols)


def tall_qr(p: Recorder, a: Tall, q: Tall, r: Buffer, right: Callable[[], Buffer] | None = None) -> None:
    """Have Q in the chunks of A, and R on rank 0; or Q W, if `right` makes a matrix W on rank 0 when R is there."""
    n = a.cols
    g = gram(p, a)
    first, once, usable = p.small(n, n), p.flag(), p.flag()
    p.on_root("cholesky", [g], [first, once, usable])
    p.drop(g, once)
    p.give(usable, first)

    def by_gram() -> None:
        h, second, good = p.zeros(n, n), p.small(n, n), p.flag()
        for chunk, part in p.chunks(a, q):
            p.new(part)
            p.call("quotient_and_gram", first, chunk, part, h)
        p.add_up(h)
        p.on_root("second_factor", [h, first], [second, r, good])
        p.drop(h)
        p.give(good, *([second] if right is None else []))
        p.either(good, lambda: finish(second), again)

    def finish(second: Buffer) -> None:
        if right is None:
            divide(p, second, q)
        else:
            w = right()
            p.on_root("solve", [second], [w])
            multiply(p, w, q)

    def again() -> None:
        p.drop_tall(q)
        reflections()

    def reflections() -> None:
        tsqr(p, a, q, r)
        if right is not None:
            multiply(p, right(), q)

    p.either(usable, by_gram, reflections)
    p.drop(first)


def divide(p: Recorder, r: Buffer, q: Tall) -> None:
    """Have Q R^-1 in the place of Q; all ranks have R."""
    for (part,) in p.chunks(q):
        p.call("divide", r, part)


def multiply(p: Recorder, w: Buffer, q: Tall) -> None:
    """Have Q W in the place of Q; W is square, and on rank 0."""
    p.give(w)
    for (part,) in p.chunks(q):
        p.call("multiply", w, part)
    p.drop(w)


def tsqr(p: Recorder, a: Tall, q: Tall, r: Buffer) -> None:
    """Have Q in the chunks of A, and R on rank 0, by reflections."""
    n, pairs = a.cols, []

    def triangle() -> tuple[Buffer, Buffer]:
        """Return the names of a triangle, and of the number of its rows, which may be less than n."""
        return p.small(n, n), p.small(1, 1, COUNT)

    names = [triangle() for _ in p.rows.sizes]
    for (number, _), (chunk, part) in zip(p.numbered(a), p.chunks(a, q), strict=True):
        p.new(part, *names[number])
        p.call("factor", chunk, part, *names[number])
        pairs.append(names[number])
    own, all_rows, top = triangle(), p.small(1, 1, COUNT), p.small(n, n)
    p.new(*own, top)
    p.call("stack", *own, *itertools.chain(*pairs))
    of_ranks = p.collect(*own)
    p.on_root("stack", [], [r, all_rows, *itertools.chain(*of_ranks)])
    _check(p, r)
    p.scatter([part for part, _ in of_ranks], top)
    for (block, _), (part,) in zip(pairs, p.chunks(q), strict=True):
        p.call("multiply", top, block)
        p.call("multiply", block, part)
    p.drop(*itertools.chain(*pairs, *of_ranks), *own, top)
