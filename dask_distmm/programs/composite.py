"""The functions of users on tall matrices: one run each, whatever it is made of. Only what is wanted is made.

Each builder takes operands by name and returns nothing: it leaves steps. `outputs` says which outputs one has, with
their shapes; a tall output has chunks of rows, as the operands.

QR of a matrix in chunks of rows: by Gram matrices where that is safe, otherwise by reflections.

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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dask_distmm.programs.recorder import Operands, Recorder, Rows, Tall, Wanted
from dask_distmm.programs.steps import CONTRACTS, COUNT, Buffer, Contract, Step, decomposition

CONTRACTS |= {
    # Chunks of rows.
    # C += A^H A, the lower triangle; C += A^H B; D = A X; Y = A X with C += A^H Y and G += Y^H Y; R = B - A X;
    # s += the squared norms of columns.
    "gram": Contract("ru", lambda a, g: a[0] * a[1] ** 2),
    "adjoint_times": Contract("rru", lambda a, b, c: 2 * a[0] * a[1] * b[1]),
    "times": Contract("rrw", lambda a, x, d: 2 * a[0] * a[1] * x[1]),
    "back_and_forth": Contract("rrwuu", lambda a, x, *_: 4 * a[0] * a[1] * x[1] + a[0] * x[1] ** 2),
    "residual": Contract("rrrw", lambda a, x, b, r: 2 * a[0] * a[1] * x[1]),
    "square_norms": Contract("ru", lambda r, s: 2 * r[0] * r[1]),
    # G += B^H B with B = A R^-1, which is not kept, or is Q; Q = Q R^-1, Q = Q W, X = W Q^H.
    "gram_of_quotient": Contract("rru", lambda r, a, g: 2 * a[0] * a[1] ** 2),
    "quotient_and_gram": Contract("rrwu", lambda r, a, q, g: 2 * a[0] * a[1] ** 2),
    "divide": Contract("ru", lambda r, q: q[0] * q[1] ** 2),
    "multiply": Contract("ru", lambda w, q: 2 * q[0] * q[1] ** 2),
    "times_adjoint": Contract("rrw", lambda w, q, x: 2 * q[0] * q[1] * w[0]),
    # R of [R; A]; Q and R of A, padded with zeros to n rows, and how many it has; [A B]; A and B of the last rows of
    # [A B]; A - the mean of its columns.
    "reflect": Contract("ru", lambda a, r: 2 * (a[0] + r[0]) * r[0] ** 2),
    "factor": Contract("rwww", lambda a, *_: 4 * a[0] * a[1] ** 2),
    "append": Contract("rrw"),
    "last_rows": Contract("rww"),
    "centre": Contract("rrw", lambda a, mean, c: a[0] * a[1]),
    # The number of rows, the means of columns, and the Gram matrix of the centred rows, of more rows; of two parts.
    "moments": Contract("ruuu", lambda a, *_: a[0] * a[1] ** 2),
    "merge_moments": Contract("rrruuu", lambda c, mean, g, *_: 2 * g[0] ** 2),
    # Raise if a matrix is not finite, by R of [A B], or by A^H B where A^H A is.
    "check": Contract("r"),
    "check_right": Contract("rr"),
    "normal": Contract("w"),
    # R of a Gram matrix; whether that is R of A already, and whether it is good enough to divide by.
    "gram_factor": decomposition("rwww", 2),
    # R2 of a Gram matrix of A R1^-1, R2 R1, and whether A (R2 R1)^-1 is orthonormal.
    "second_factor": decomposition("rrwww", 2),
    # R of stacked triangles, and how many rows it has; triangles become the blocks of the stack's Q.
    "stack": Contract("wwu", lambda r, _, *t: 2 * len(t) * r[0] ** 3),
    "orthonormalize": decomposition("rw", 4),
    "solve": Contract("ru", lambda r, b: r[0] ** 2 * b[1]),
    "quotient": Contract("rrw", lambda r, b, _: r[0] ** 2 * b[0]),
    "inverse": decomposition("rw", 1),
    "pseudo_inverse": decomposition("rrw", 1),
    "singular_values": decomposition("rw", 3),
    "singular_vectors": decomposition("rwww", 20),
    "covariance": Contract("rrw"),
    "hermitian": Contract("rrw", lambda s, vh, _: 2.0 * vh[0] ** 3),
    "principal": decomposition("rrwwww", 9),
    "principal_of_r": decomposition("rrww", 20),
    # Least squares: from R and A^H B; one step of refinement; from R of [A B]. Ridge: from A^H A and A^H B, or that R.
    "solve_normal": Contract("rrw", lambda r, c, x: 2 * r[0] ** 2 * c[1]),
    "refine": Contract("rrrrww", lambda r, d, *_: 2 * r[0] ** 2 * d[1]),
    "full_rank": decomposition("rww", 3),
    "least_squares": decomposition("rwwww", 20),
    "ridge": decomposition("rrwww", 1),
    "refine_ridge": decomposition("rrrw", 1),
    "ridge_of_r": decomposition("rw", 20),
}


# QR of a matrix in chunks of rows: by Gram matrices where that is safe, otherwise by reflections


def gram(p: Recorder, a: Tall) -> Buffer:
    """Return A^H A on rank 0."""
    g = p.zeros(a.cols, a.cols)
    p.each("gram", a, g)
    p.add_up(g)
    return g


def tall_r(p: Recorder, a: Tall) -> Buffer:
    """Return R on rank 0; A is read once, twice or three times."""
    return r_from_gram(p, a, gram(p, a))


def r_from_gram(p: Recorder, a: Tall, g: Buffer) -> Buffer:
    """Return R on rank 0 of a matrix with this Gram matrix."""
    n = g.shape[0]
    first, r, once, usable = p.small(n, n), p.small(n, n), p.flag(), p.flag()
    p.on_root("gram_factor", [g], [first, once, usable])
    p.drop(g)
    p.give(once, usable)

    def twice() -> None:
        p.give(first)
        h, second, good = p.zeros(n, n), p.small(n, n), p.flag()
        p.each("gram_of_quotient", first, a, h)
        p.add_up(h)
        p.on_root("second_factor", [h, first], [second, r, good])
        p.drop(h, second)
        p.give(good)
        p.either(good, lambda: None, lambda: reflected_r(p, a, r))

    p.either(
        once,
        lambda: p.on_root("copy", [first], [r]),
        lambda: p.either(usable, twice, lambda: reflected_r(p, a, r)),
    )
    p.drop(first)
    return r


def reflected_r(p: Recorder, a: Tall, r: Buffer, cols: int | None = None) -> None:
    """Compute R on rank 0 by reflections, as `r`; of its columns the first `cols` are those of A, others of B."""
    t = p.zeros(*r.shape)
    p.each("reflect", a, t)
    p.add_up(t, op="reflect")
    p.on_root("copy", [t], [r])
    _check(p, r, cols)
    p.drop(t)


def _check(p: Recorder, r: Buffer, cols: int | None = None) -> None:
    """Refuse a matrix that is not finite, by its R."""
    if p.finite:
        p.on_root("check", [r], [], cols=r.shape[1] if cols is None else cols)


def tall_qr(p: Recorder, a: Tall, q: Tall, r: Buffer, right: Callable[[], Buffer] | None = None) -> None:
    """Compute Q in the chunks of A, and R on rank 0; or Q W, if `right` makes a matrix W on rank 0 when R is there."""
    n = a.cols
    g = gram(p, a)
    first, once, usable = p.small(n, n), p.flag(), p.flag()
    p.on_root("gram_factor", [g], [first, once, usable])
    p.drop(g, once)
    p.give(usable, first)

    def by_gram() -> None:
        h, second, good = p.zeros(n, n), p.small(n, n), p.flag()
        p.each("quotient_and_gram", first, a, q, h)
        p.add_up(h)
        p.on_root("second_factor", [h, first], [second, r, good])
        p.drop(h)
        p.give(good, *([second] if right is None else []))
        p.either(good, lambda: finish(second), again)

    def finish(second: Buffer) -> None:
        if right is None:
            p.each("divide", second, q)
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


def multiply(p: Recorder, w: Buffer, q: Tall) -> None:
    """Overwrite Q by Q W; W is square, and on rank 0."""
    p.give(w)
    p.each("multiply", w, q)
    p.drop(w)


def tsqr(p: Recorder, a: Tall, q: Tall, r: Buffer) -> None:
    """Compute Q in the chunks of A, and R on rank 0, by reflections."""
    n = a.cols

    def triangle() -> tuple[Buffer, Buffer]:
        """Return the names of a triangle, and of the number of its rows, which may be less than n."""
        return p.small(n, n), p.numbers(1, COUNT)

    every = [triangle() for _ in p.rows.sizes]
    pairs = [every[number] for number in p.mine]
    for pair, (chunk, part) in zip(pairs, p.chunks(a, q), strict=True):
        p.call("factor", chunk, part, *pair)
    own, all_rows, top = triangle(), p.numbers(1, COUNT), p.small(n, n)
    p.call("stack", *own, *itertools.chain(*pairs))
    of_ranks = p.collect(*own)
    p.on_root("stack", [], [r, all_rows, *itertools.chain(*of_ranks)])
    _check(p, r)
    p.scatter([part for part, _ in of_ranks], top)
    for (block, _), (part,) in zip(pairs, p.chunks(q), strict=True):
        p.call("multiply", top, block)
        p.call("multiply", block, part)
    p.drop(*itertools.chain(*pairs, *of_ranks), *own, top)


# The functions of tall matrices that users call: one run each. Only the outputs that are wanted are computed


def qr(p: Recorder, operands: Operands, wanted: Wanted) -> None:
    """Factorize A = Q R."""
    a = operands["a"]
    q, r = p.tall(a.cols), p.small(a.cols, a.cols)
    if "q" in wanted:
        tall_qr(p, a, q, r)
    else:
        r = tall_r(p, a)
    _finish(p, operands, wanted, q=q, r=r)


def gram_matrix(p: Recorder, operands: Operands, wanted: Wanted) -> None:
    """Compute A^H A, of which only the lower triangle counts."""
    _finish(p, operands, wanted, g=gram(p, operands["a"]))


def svd(p: Recorder, operands: Operands, wanted: Wanted, *, by_sum: bool = False) -> None:
    """Decompose A = U diag(s) V^H; `by_sum`: with the signs that Dask's vectors have."""
    a = operands["a"]
    n = a.cols
    left, s, vh = p.small(n, n), p.small(1, n, p.real), p.small(n, n)
    u, r = p.tall(n), p.small(n, n)

    def right() -> Buffer:
        p.on_root("singular_vectors", [r], [left, s, vh], by_sum=by_sum)
        return left

    if "u" in wanted:
        tall_qr(p, a, u, r, right)
    else:
        r = tall_r(p, a)
        if "vh" in wanted:
            right()
        else:
            p.on_root("singular_values", [r], [s])
    _finish(p, operands, wanted, u=u, s=s, vh=vh)


def polar(p: Recorder, operands: Operands, wanted: Wanted) -> None:
    """Decompose A = U P: of R = W diag(s) V^H these are Q W V^H and V diag(s) V^H."""
    a = operands["a"]
    n = a.cols
    left, s, vh, positive = p.small(n, n), p.small(1, n, p.real), p.small(n, n), p.small(n, n)
    u, r = p.tall(n), p.small(n, n)

    def right() -> Buffer:
        p.on_root("singular_vectors", [r], [left, s, vh])
        p.on_root("multiply", [vh], [left])
        return left

    if "u" in wanted:
        tall_qr(p, a, u, r, right)
    else:
        r = tall_r(p, a)
        right()
    p.on_root("hermitian", [s, vh], [positive])
    _finish(p, operands, wanted, u=u, h=positive)


def pinv(p: Recorder, operands: Operands, wanted: Wanted, *, rtol: float | None) -> None:
    """Invert: X = R^-1 Q^H of a matrix of full rank, X = V S^+ U^H with `rtol`."""
    a = operands["a"]
    n = a.cols
    q, r, w = p.tall(n), p.small(n, n), p.small(n, n)
    left, s, vh = p.small(n, n), p.small(1, n, p.real), p.small(n, n)

    def right() -> Buffer:
        p.on_root("singular_vectors", [r], [left, s, vh])
        return left

    tall_qr(p, a, q, r, None if rtol is None else right)
    p.drop_tall(*operands.values())
    if rtol is None:
        p.on_root("inverse", [r], [w], rows=p.rows.count(n))
    else:
        p.on_root("pseudo_inverse", [s, vh], [w], rtol=rtol)
    p.give(w)
    for number, part in p.numbered(q):
        x = Buffer(f"x.{number}", (n, p.rows.sizes[number]), p.dtype, f"a.{number}")
        p.call("times_adjoint", w, part, x)
        p.drop(part)
        p.leave("x", x, number)


def svd_compressed(
    p: Recorder,
    operands: Operands,
    wanted: Wanted,
    *,
    k: int,
    width: int,
    iterations: int,
    seed: int | bytes,
    by_sum: bool = False,
) -> None:
    """Find leading singular values by a random projection (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1).

    X = orth(A^H orth(A X)) takes one pass over A, as A^H orth(Y) is A^H Y R^-1. So does the last projection, if Y is
    near enough to orthogonal columns, as it is where X has singular vectors; else A is read again.
    """
    a = operands["a"]
    n, x, y, u = a.cols, p.small(a.cols, width), p.tall(width), p.tall(k)
    p.call("normal", x, seed=seed)
    for _ in range(iterations):
        x = _iterated(p, a, x)
    right, s, left = p.small(n, k), p.small(1, k, p.real), p.small(k, width)
    vh, across = p.small(k, n), p.small(width, k)
    z, once, usable, first = p.small(n, width), p.flag(), p.flag(), p.small(width, width)

    def finish(basis: Tall, divisor: Buffer | None = None) -> None:
        # Of the tall matrix A^H Q, so that signs are those of the right singular vectors of A.
        p.on_root("singular_vectors", [z], [right, s, left], by_left=True, by_sum=by_sum)
        p.on_root("adjoint", [right], [vh])
        p.on_root("adjoint", [left], [across])
        if divisor is not None:
            p.on_root("solve", [divisor], [across])
        if "u" in wanted:
            p.give(across)
            p.each("times", basis, across, u)

    def again() -> None:
        q = p.tall(width)
        _project(p, a, y, q, z, first, usable)
        finish(q)

    if iterations:
        product = _back_and_forth(p, a, x, y, [first, once, usable])
        p.on_root("quotient", [first, product], [z])
        p.give(once, usable, first)
        p.either(once, lambda: finish(y, first), again)
    else:
        p.each("times", a, x, y)
        p.on_root("gram_factor", [gram(p, y)], [first, once, usable])
        p.give(usable, first)
        again()
    _finish(p, operands, wanted, u=u, s=s, vh=vh)


def _back_and_forth(p: Recorder, a: Tall, x: Buffer, y: Tall, factor: list[Buffer]) -> Buffer:
    """Compute Y = A X, and its R on rank 0 with flags by its condition; return A^H Y on rank 0."""
    g, product = p.zeros(y.cols, y.cols), p.zeros(*x.shape)
    p.each("back_and_forth", a, x, y, product, g)
    p.add_up(g, product)
    p.on_root("gram_factor", [g], factor)
    return product


def _iterated(p: Recorder, a: Tall, x: Buffer) -> Buffer:
    """Compute an orthonormal basis of A^H A X, near to singular vectors, on all ranks."""
    (n, width), y = x.shape, p.tall(x.shape[1])
    first, once, usable = p.small(width, width), p.flag(), p.flag()
    z, basis, vectors = p.small(n, width), p.small(n, width), p.small(n, width)
    product = _back_and_forth(p, a, x, y, [first, once, usable])
    p.on_root("quotient", [first, product], [z])
    p.on_root("orthonormalize", [z], [basis])
    p.drop(x, product, first, once)
    p.give(usable, basis)

    def by_reflections() -> None:
        q = p.tall(width)
        tsqr(p, y, q, p.small(width, width))
        _adjoint_times(p, a, q, z)
        p.on_root("orthonormalize", [z], [vectors])
        p.give(vectors)

    p.either(usable, lambda: p.call("copy", basis, vectors), by_reflections)
    p.drop_tall(y)
    p.drop(z, basis)
    return vectors


def _adjoint_times(p: Recorder, a: Tall, q: Tall, z: Buffer) -> None:
    """Compute Z = A^H Q on rank 0."""
    product = p.zeros(*z.shape)
    p.each("adjoint_times", a, q, product)
    p.add_up(product)
    p.on_root("copy", [product], [z])


def _project(p: Recorder, a: Tall, y: Tall, q: Tall, z: Buffer, first: Buffer, usable: Buffer) -> None:
    """Compute Q = orth(Y), and Z = A^H Q on rank 0; A is read while the Gram matrix of Q is made."""
    width, r = y.cols, p.small(y.cols, y.cols)

    def by_gram() -> None:
        h, product, second, good = p.zeros(width, width), p.zeros(a.cols, width), p.small(width, width), p.flag()
        for whole, chunk, part in p.chunks(a, y, q):
            p.call("quotient_and_gram", first, chunk, part, h)
            p.call("adjoint_times", whole, part, product)
        p.add_up(h, product)
        p.on_root("second_factor", [h, first], [second, r, good])
        p.on_root("quotient", [second, product], [z])
        p.drop(h, product)
        p.give(good, second)
        p.either(good, lambda: p.each("divide", second, q), again)

    def again() -> None:
        p.drop_tall(q)
        reflections()

    def reflections() -> None:
        tsqr(p, y, q, r)
        _adjoint_times(p, a, q, z)

    p.either(usable, by_gram, reflections)


def _moments(p: Recorder, a: Tall) -> tuple[Buffer, Buffer, Buffer]:
    """Return on rank 0 the number of rows, the means of columns, and the Gram matrix of the centred rows."""
    count, mean, g = p.zeros(1, 1, p.real), p.zeros(1, a.cols), p.zeros(a.cols, a.cols)
    p.each("moments", a, count, mean, g)
    p.add_up(count, mean, g, op="merge_moments")
    return count, mean, g


def cov(p: Recorder, operands: Operands, wanted: Wanted, *, ddof: int, correlation: bool) -> None:
    """Compute covariances of columns, or correlations: A is read once."""
    a = operands["a"]
    c = p.small(a.cols, a.cols)
    count, _, g = _moments(p, a)
    p.on_root("covariance", [count, g], [c], ddof=ddof, correlation=correlation)
    _finish(p, operands, wanted, c=c)


def pca(p: Recorder, operands: Operands, wanted: Wanted, *, k: int, spread: int) -> None:
    """Find principal components. A is read once, if the deviations that are wanted are within a factor of `spread`."""
    a = operands["a"]
    n = a.cols
    count, mean, g = _moments(p, a)
    variances, total = p.small(1, k, p.real), p.small(1, 1, p.real)
    components, good = p.small(k, n), p.flag()
    p.on_root("principal", [count, g], [variances, total, components, good], spread=spread)
    p.give(good)

    def by_r() -> None:
        p.give(mean)
        r = r_from_gram(p, p.tall(n, "centre", a, mean), g)
        p.on_root("principal_of_r", [count, r], [variances, components])

    p.either(good, lambda: None, by_r)
    _finish(p, operands, wanted, variances=variances, total=total, components=components, mean=mean)


def _both(p: Recorder, operands: Operands) -> tuple[Buffer, Buffer]:
    """Return A^H A and A^H B on rank 0: A is read once."""
    a, b = operands["a"], operands["b"]
    g, c = p.zeros(a.cols, a.cols), p.zeros(a.cols, b.cols)
    for left, right in p.chunks(a, b):
        p.call("gram", left, g)
        p.call("adjoint_times", left, right, c)
    p.add_up(g, c)
    return g, c


def _check_right(p: Recorder, good: Buffer, c: Buffer) -> None:
    """Refuse right-hand sides that are not finite, where the matrix is."""
    if p.finite:
        p.on_root("check_right", [good, c], [])


def _residuals(p: Recorder, operands: Operands, x: Buffer, *norms: Buffer) -> Buffer:
    """Return A^H (B - A X) on rank 0, and the squared norms of columns, of solutions that are side by side in X."""
    a, b = operands["a"], operands["b"]
    rest, difference = p.tall(x.shape[1], "residual", a, x, b), p.zeros(*x.shape)
    for chunk, part in p.chunks(a, rest):
        p.call("adjoint_times", chunk, part, difference)
        for total in norms:
            p.call("square_norms", part, total)
    p.add_up(difference, *norms)
    return difference


def _r_of_both(p: Recorder, operands: Operands) -> Buffer:
    """Return R of [A B] on rank 0, by reflections."""
    a, b = operands["a"], operands["b"]
    r = p.small(a.cols + b.cols, a.cols + b.cols)
    reflected_r(p, p.tall(r.shape[1], "append", a, b), r, a.cols)
    return r


def lstsq(p: Recorder, operands: Operands, wanted: Wanted, *, rtol: float | None) -> None:
    """Minimize |A X - B|: from A^H A with a step of refinement, where its condition allows that, else from R."""
    a, b = operands["a"], operands["b"]
    n, cols = a.cols, b.cols
    x, residuals = p.small(n, cols), p.small(1, cols, p.real)
    rank, s = p.small(1, 1, "int64"), p.small(1, n, p.real)
    g, c = _both(p, operands)
    first, once, usable, good = p.small(n, n), p.flag(), p.flag(), p.flag()
    p.on_root("gram_factor", [g], [first, once, usable, good], least=rtol)
    p.drop(g, once, usable)
    x0 = p.small(n, cols)
    _check_right(p, good, c)
    p.on_root("solve_normal", [first, c], [x0])
    p.give(good, x0)

    def by_gram() -> None:
        norms = p.zeros(1, cols, p.real)
        difference = _residuals(p, operands, x0, norms)
        p.on_root("refine", [first, difference, x0, norms], [x, residuals])
        p.on_root("full_rank", [first], [rank, s], values="s" in wanted)

    def by_reflections() -> None:
        r = _r_of_both(p, operands)
        p.on_root("least_squares", [r], [x, residuals, rank, s], rows=p.rows.count(n), rtol=rtol)

    p.either(good, by_gram, by_reflections)
    _finish(p, operands, wanted, x=x, residuals=residuals, rank=rank, s=s)


def _both_centred(p: Recorder, operands: Operands) -> tuple[Operands, Buffer, Buffer, Buffer, Buffer]:
    """Return A and B without the means of columns; A^H A and A^H B of these on rank 0, means on all: one pass."""
    a, b = operands["a"], operands["b"]
    n, k = a.cols, b.cols
    g, c, center, level = p.small(n, n), p.small(n, k), p.small(1, n), p.small(1, k)
    _, mean, both = _moments(p, p.tall(k + n, "append", b, a))
    p.on_root("last_rows", [both], [c, g])
    p.on_root("last_rows", [mean], [level, center])
    p.drop(mean, both)
    p.give(center, level)
    return {"a": p.tall(n, "centre", a, center), "b": p.tall(k, "centre", b, level)}, g, c, center, level


def ridge(p: Recorder, operands: Operands, wanted: Wanted, *, alphas: tuple[float, ...], centred: bool = False) -> None:
    """Solve (A^H A + alpha I) X = A^H B for each alpha, side by side in X, with one Gram matrix.

    `centred`: of A and B without the means of columns, which are outputs, too.
    """
    n, cols, means = operands["a"].cols, operands["b"].cols, {}
    passed = operands
    if centred:
        operands, g, c, means["center"], means["level"] = _both_centred(p, operands)
    else:
        g, c = _both(p, operands)
    width = cols * len(alphas)
    first, x, once, good = p.small(n, width), p.small(n, width), p.flag(), p.flag()
    p.on_root("ridge", [g, c], [first, once, good], alphas=alphas)
    _check_right(p, good, c)
    p.drop(c)
    p.give(once, good)

    def refined() -> None:
        p.give(first)
        difference = _residuals(p, operands, first)
        p.on_root("refine_ridge", [g, difference, first], [x], alphas=alphas)

    def by_reflections() -> None:
        r = _r_of_both(p, operands)
        p.on_root("ridge_of_r", [r], [x], alphas=alphas)

    p.either(
        once,
        lambda: p.on_root("copy", [first], [x]),
        lambda: p.either(good, refined, by_reflections),
    )
    _finish(p, passed, wanted, x=x, **means)


def _finish(p: Recorder, operands: Operands, wanted: Wanted, **outputs: Buffer | Tall) -> None:
    """Free the operands, and store the wanted matrices."""
    p.drop_tall(*operands.values())
    for name, matrix in outputs.items():
        if name in wanted:
            p.store(name, matrix)


class Composite(NamedTuple):
    """A function of tall matrices."""

    record: Callable[..., None]
    # Whether it needs the means of columns, which R does not have; whether users may have elements not checked.
    centred: bool = False
    may_skip: bool = True


BUILDERS: Mapping[str, Composite] = {
    "gram": Composite(gram_matrix),
    "qr": Composite(qr),
    "svd": Composite(svd),
    "polar": Composite(polar),
    "pinv": Composite(pinv),
    "svd_compressed": Composite(svd_compressed, may_skip=False),
    "pca": Composite(pca, centred=True, may_skip=False),
    "cov": Composite(cov, centred=True, may_skip=False),
    "lstsq": Composite(lstsq),
    "ridge": Composite(ridge),
}


def record(
    builder: Callable[..., None],
    options: Mapping[str, Any],
    rows: Rows,
    cols: Mapping[str, int],
    dtype: str,
    wanted: Wanted,
    by_ranks: Wanted = (),
    *,
    me: int,
) -> tuple[Step, ...]:
    """Return the steps of rank `me`; `cols`: operands' columns by name, `by_ranks`: those computed by ranks."""
    options = dict(options)
    p = Recorder(me, rows, dtype, finite=options.pop("finite", True))
    types, whole = options.pop("types", {}), options.pop("whole", ())
    operands = {
        name: Tall(name, count, operand=True, by_ranks=name in by_ranks, dtype=types.get(name, ""), whole=name in whole)
        for name, count in cols.items()
    }
    p.make(*operands.values())
    builder(p, operands, wanted, **options)
    return p.end()
