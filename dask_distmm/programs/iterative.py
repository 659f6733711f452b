"""Iterative solvers: one run each, a product with A in each turn, dot products summed over ranks; and exponentials.

A rank has its chunks of rows of A, and the same rows of each vector, in one buffer. The vector that A is multiplied by
comes to all ranks. Numbers are computed by all ranks alike, from sums in the same order, and so is the flag that says
whether there is another turn; where steps are not exact, it is rank 0's, which comes with a vector.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_distmm.programs.recorder import Operands, Recorder, Tall, Wanted
from dask_distmm.programs.steps import Buffer

# Expected number of turns, for the cost model.
EXPECTED = 100

# The numbers of the solvers, in the order in which they are kept: factors of vectors first.
CG = ("factor", "rho", "limit", "count", "met", "broken")
MINRES = (
    *("over_gamma", "minus_epsln", "minus_delta", "phi", "over_beta", "minus_beta", "minus_alpha", "keep", "count"),
    *("met", "stop", "alpha", "beta", "beta1", "epsln", "dbar", "gbar", "root", "cs", "sn", "phibar", "rhs1", "rhs2"),
    *("tnorm2", "gmax", "gmin", "minus_shift"),
)
BIDIAGONAL = ("over_beta", "minus_beta", "over_alpha", "minus_alpha", "alpha", "beta")
_RESULTS = ("stop", "count", "normb", "norma", "conda", "normar", "normx")
LSQR = (
    *(*BIDIAGONAL, *_RESULTS, "of_w", "minus_theta", "over_rho", "old_alpha", "rhobar", "phibar", "r1norm", "r2norm"),
    *("cs2", "sn2", "z", "ddnorm", "xxnorm", "res2"),
)
LSMR = (
    *(*BIDIAGONAL, *_RESULTS, "of_hbar_before", "of_hbar", "of_h", "normr", "zetabar", "alphabar", "rho", "rhobar"),
    *("cbar", "sbar", "zeta", "betadd", "betad", "rhodold", "tautilde", "thetatilde", "d", "norma2", "maxrbar"),
    "minrbar",
)

# The column of a basis that is next is the first number.
GMRES = ("column", "scale", "keep", "met", "count", "residual", "goal", "factor", "limit", "broken", "start", "normb")
LANCZOS = ("column", "scale", "beta", "broken", "count", "kept", "turns", "norm")

# Powers of two: what A, its square and its cube are multiplied by; squares that are to come.
EXPONENTIAL = ("of_a", "of_square", "of_cube", "left")
# The Taylor polynomial of degree 18 of the exponential function, in five products (Bader, Blanes, Casas 2019): factors
# of I, A, A^2, A^3, A^6 in five matrices, of which ``B2 + (B3 + C) C`` with ``C = B4 + B1 B5`` is the polynomial.
_TAYLOR = (
    (0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0.0),
    (0.0, 3.97849749499645077844e-01, 1.36783778460411720168, 4.98289622525382669416e-01, -6.37898194594723280150e-04),
    (-10.9676396052962061844, 1.68015813878906206114, 5.71779846478865511061e-02, -6.98210122488052056106e-03,
     3.34975017086070470649e-05),
    (-9.04316832390810593223e-02, -6.76404519071381882256e-02, 6.75961301770459654925e-02, 2.95552570429315521194e-02,
     -1.39180257516060693404e-05),
    (0.0, 0.0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)  # fmt: skip
# The norm up to which it has full precision, by bytes of a real number; squares that are expected, and the most.
_TAYLOR_NORMS = {4: 3.010066362817634, 8: 1.090863719290036}
_SQUARES, _MOST_SQUARES = 4, 1100


# Those of each solver by its name, with which the names of its steps begin.
NUMBERS = {"cg": CG, "minres": MINRES, "bidiagonal": BIDIAGONAL, "lsqr": LSQR, "lsmr": LSMR, "gmres": GMRES}
NUMBERS |= {"lanczos": LANCZOS, "lobpcg": ("worst",)}
# Steps that are exact, as contracts have it: neither LAPACK nor powers nor `hypot` are in them.
EXACT = {"cg_start", "cg_step", "cg_next", "gmres_start", "gmres_rotate", "gmres_restart", "lobpcg_test"}
EXACT |= {"minres_start", "minres_alpha", "minres_rotate", "minres_test"}
EXACT |= {"lanczos_start", "lanczos_step", "lanczos_next"}


def _advance(p: Recorder, step: str, reads: Sequence[Buffer], *updated: Buffer, **options: Any) -> None:
    """Take a step of a solver: its numbers, and others behind them, follow from those that are read."""
    kernel = "advance" if step in EXACT else "advance_inexactly"
    p.call(kernel, *reads, *updated, step=step, reads=len(reads), **options)


class Vectors:
    """Vectors in the rows of a rank, and what is done with them by all."""

    def __init__(self, p: Recorder, operands: Operands) -> None:
        self.p, self.operands = p, operands
        at = [0] * p.rows.ranks
        # For each chunk of rows its rank, its first row there, and its size.
        self.places: list[tuple[int, int, int]] = []
        for owner, size in zip(p.rows.owners, p.rows.sizes, strict=True):
            self.places.append((owner, at[owner], size))
            at[owner] += size
        # The same for chunks of one rank that follow each other.
        self.runs: list[tuple[int, int, int]] = []
        for owner, chunks in itertools.groupby(self.places, key=operator.itemgetter(0)):
            (_, first, size), *more = chunks
            self.runs.append((owner, first, size + sum(one[2] for one in more)))
        # The first row of each chunk.
        self.firsts = list(itertools.accumulate(p.rows.sizes, initial=0))

    def new(self, like: Buffer | None = None, *, zero: bool = False, cols: int = 1) -> Buffer:
        """Return a new vector: a copy, zeros, or not written yet."""
        part = self.p.part(cols if like is None else like.shape[1])
        self.p.new(part, zero=zero)
        if like is not None:
            self.p.call("copy", like, part)
        return part

    def load(self, name: str) -> Buffer:
        """Return an operand as a vector; zeros where it is not given."""
        if name not in self.operands:
            return self.new(zero=True)
        part = self.new(cols=self.operands[name].cols)
        for number, (piece,) in zip(self.p.mine, self.p.chunks(self.operands[name]), strict=True):
            self.p.call("put", piece, part, at=self.places[number][1])
        self.p.drop_tall(self.operands[name])
        return part

    def drawn(self, seed: int) -> Buffer:
        """Return a vector of random numbers, which do not depend on ranks."""
        part = self.new()
        for number in self.p.mine:
            _, start, size = self.places[number]
            self.p.call("draw", part, at=start, size=size, seed=(seed, number))
        return part

    def store(self, output: str, part: Buffer, cols: int = 1) -> None:
        """Hand a vector over as an output, or the first columns of a basis."""
        for number in self.p.mine:
            _, start, size = self.places[number]
            piece = Buffer(f"{output}.{number}", (size, cols), self.p.dtype, f"a.{number}")
            self.p.call("take", part, piece, at=start)
            self.p.leave(output, piece, number)
        self.p.drop(part)

    def whole(self, part: Buffer, into: Buffer | None = None) -> Buffer:
        """Return all rows of a vector, on all ranks."""
        return self._assembled([one for (one,) in self.p.share(part)], into)

    def together(self, part: Buffer, *own: Buffer, into: Buffer | None = None) -> list[Buffer]:
        """Return all rows of a vector, and sums of all ranks' buffers, by the same messages; one rank has them all."""
        parts, *numbers = zip(*self.p.share(part, *own), strict=True)
        whole = self._assembled(parts, into) if into or len(parts) > 1 else part
        return [whole, *map(self._summed, numbers)]

    def _assembled(self, parts: Sequence[Buffer], into: Buffer | None) -> Buffer:
        whole = into or self.p.small(sum(self.p.rows.sizes), parts[0].shape[1])
        self.p.call("assemble", whole, *parts, places=tuple(self.runs))
        self.p.drop(*(one for one in parts if "@" in one.name))
        return whole

    def times(self, operand: str, whole: Buffer, into: Buffer | None = None) -> Buffer:
        """Return the product of a matrix and a vector that all ranks have."""
        product, matrix = into or self.new(cols=whole.shape[1]), self.operands[operand]
        for number, chunk in self.p.numbered(matrix):
            if matrix.function:
                self.p.call("apply", whole, product, **self.applied(matrix, operand.upper(), number))
            else:
                self.p.call("times", chunk, whole, product, at=self.places[number][1])
        return product

    def applied(self, matrix: Tall, role: str, number: int) -> dict[str, Any]:
        """Return the options with which a user's function is called for a chunk of rows."""
        _, start, size = self.places[number]
        where = {"at": start, "first": self.firsts[number], "size": size}
        return {"function": matrix.function, "role": role, **where}

    def product(self, part: Buffer, whole: Buffer) -> Buffer:
        """Return the product of a matrix in the rows of a rank and one that all ranks have."""
        product = self.new(cols=whole.shape[1])
        self.p.call("times", part, whole, product, at=0)
        return product

    def add_polynomial(self, y: Buffer, factors: Sequence[float], *powers: Buffer) -> None:
        """Add multiples of the identity and of some matrices to one, all in the rows of a rank."""
        places = tuple((self.places[number][1], self.firsts[number], self.places[number][2]) for number in self.p.mine)
        self.p.call("add_polynomial", y, *powers, factors=tuple(factors), places=places)

    def dots(self, *pairs: tuple[Buffer, Buffer]) -> Buffer:
        """Return the dot products of pairs of vectors, summed over all ranks."""
        (total,) = self.totals(self.own_dots(*pairs))
        return total

    def own_dots(self, *pairs: tuple[Buffer, Buffer]) -> Buffer:
        """Return the dot products of pairs of vectors, in the rows of a rank."""
        own = self.p.numbers(len(pairs))
        self.p.call("dots", own, *(one for pair in pairs for one in pair))
        return own

    def totals(self, *own: Buffer) -> list[Buffer]:
        """Return sums of all ranks' buffers, on all of them."""
        return [self._summed(parts) for parts in zip(*self.p.share(*own), strict=True)]

    def _summed(self, parts: Sequence[Buffer]) -> Buffer:
        if len(parts) == 1:
            return parts[0]
        total = self.p.numbers(parts[0].shape[1], parts[0].dtype, parts[0].shape[0])
        self.p.call("total", total, *parts)
        self.p.drop(*parts)
        return total

    def preconditioned(self, r: Buffer) -> Buffer:
        """Return M r; r itself where there is no M."""
        m = self.operands.get("m")
        if m is None:
            return r
        if m.function or m.cols > 1 or sum(self.p.rows.sizes) == 1:
            whole = self.whole(r)
            z = self.times("m", whole)
            self.p.drop(whole)
            return z
        z = self.new(cols=r.shape[1])
        for number, piece in self.p.numbered(m):
            self.p.call("diagonal_times", piece, r, z, at=self.places[number][1])
        return z

    def orthogonal(self, state: Buffer, basis: Buffer, w: Buffer) -> Buffer:
        """Have W orthogonal to the columns of a basis; return the products with them, and then |W|^2 before."""
        own = self.p.numbers(basis.shape[1] + 1)
        self.p.call("project", own, state, basis, w)
        (sums,) = self.totals(own)
        self.p.call("orthogonalize", sums, state, basis, w)
        return sums

    def tell(self, x: Buffer) -> None:
        """Have rank 0 call the user's callback, if there is one, with all of x."""
        if "callback" in self.operands:
            whole = self.whole(x)
            self.call_back("callback", whole)
            self.p.drop(whole)

    def call_back(self, name: str, given: Buffer, **options: Any) -> None:
        """Have rank 0 call a function of the user's, if there is one, with what all ranks have, or a number of it."""
        if name in self.operands and self.p.me == 0:
            self.p.call("call_back", given, function=self.operands[name].function, **options)

    def residual(self, b: Buffer, x: Buffer) -> Buffer:
        """Return b - A x."""
        r = self.new(b)
        if "g" in self.operands:
            whole = self.whole(x)
            product = self.times("a", whole)
            self.p.call("subtract", product, r)
            self.p.drop(whole, product)
        return r


def cg(p: Recorder, operands: Operands, wanted: Wanted, *, rtol: float, atol: float, maxiter: int) -> None:
    """Solve A x = b by conjugate gradients (Hestenes, Stiefel 1952)."""
    v = Vectors(p, operands)
    b, x = v.load("b"), v.load("g")
    r = v.residual(b, x)
    z = v.preconditioned(r)
    state, go = p.numbers(len(CG)), p.flag()
    p.new(state, go, zero=True)
    d = v.new(z)
    whole, sums = v.together(d, v.own_dots((b, b), (r, r), (r, z)))
    _advance(p, "cg_start", [sums], state, go, rtol=rtol, atol=atol)
    p.call("scale", state, x)
    p.drop(b, sums, *({z} - {r}))

    def turn() -> None:
        q = v.times("a", whole)
        sums = v.dots((d, q))
        _advance(p, "cg_step", [sums], state)
        p.call("axpy", state, d, x, sign=1)
        v.tell(x)
        p.call("axpy", state, q, r, sign=-1)
        p.drop(q, sums)
        z = v.preconditioned(r)
        rows, sums = v.together(z, v.own_dots((r, r), (r, z)))
        _advance(p, "cg_next", [sums], state, go)
        for direction, come in {d: z, whole: rows}.items():
            p.call("xpay", state, come, direction)
        p.drop(sums, *(one for one in (z, rows) if one != r))

    p.loop(go, turn, maxiter, min(maxiter, EXPECTED))
    _results(p, v, wanted, x, state, CG, maxiter)


def minres(
    p: Recorder, operands: Operands, wanted: Wanted, *, rtol: float, shift: float, maxiter: int, eps: float
) -> None:
    """Solve A x = b by MINRES (Paige, Saunders 1975)."""
    v, at = Vectors(p, operands), MINRES.index
    b, x = v.load("b"), v.load("g")
    old = v.residual(b, x)
    y = v.preconditioned(old)
    state, go = p.numbers(len(MINRES), "float64"), p.flag()
    p.new(state, go, zero=True)
    last, before, now, direction = v.new(old), v.new(zero=True), v.new(zero=True), v.new(y)
    whole, sums = v.together(direction, v.own_dots((old, y), (b, b)))
    _advance(p, "minres_start", [sums], state, go, shift=shift)
    p.call("scale", state, x, at=at("keep"))
    # The rows of a rank, and all of them.
    directions = dict.fromkeys((direction, whole))
    for one in directions:
        p.call("scale", state, one, at=at("over_beta"))
    p.drop(b, sums, *({y} - {old}))

    def turn() -> None:
        y = v.times("a", whole)
        if shift:
            p.call("axpy", state, direction, y, at=at("minus_shift"))
        p.call("axpy", state, old, y, at=at("minus_beta"))
        sums = v.dots((direction, y))
        _advance(p, "minres_alpha", [sums], state)
        p.call("axpy", state, last, y, at=at("minus_alpha"))
        p.call("copy", last, old)
        p.call("copy", y, last)
        p.drop(sums, y)
        y = v.preconditioned(last)
        _, sums = v.together(y, v.own_dots((last, y)), into=whole if whole != direction else None)
        _advance(p, "minres_rotate", [sums], state, eps=eps)
        new = v.new()
        p.call("combine", state, new, direction, before, now)
        p.call("copy", now, before)
        p.call("copy", new, now)
        p.call("axpy", state, now, x, at=at("phi"))
        v.tell(x)
        p.drop(sums, new)
        sums = v.dots((x, x))
        _advance(p, "minres_test", [sums], state, go, rtol=rtol, eps=eps, maxiter=maxiter)
        p.call("copy", y, direction)
        for one in directions:
            p.call("scale", state, one, at=at("over_beta"))
        p.drop(sums, *({y} - {last}))

    p.loop(go, turn, maxiter, min(maxiter, EXPECTED))
    _results(p, v, wanted, x, state, MINRES, maxiter + 1)


class Bidiagonal:
    """Golub-Kahan bidiagonalization: u in the rows of ranks, v on all of them."""

    def __init__(self, p: Recorder, operands: Operands, names: tuple[str, ...], start: str) -> None:
        self.p, self.vectors, self.cols = p, Vectors(p, operands), operands["a"].cols
        self.adjoint = operands.get("adjoint")
        self.state, self.go, self.v = p.numbers(len(names), "float64"), p.flag(), self.zeros()
        p.new(self.state, self.go, zero=True)
        b = self.vectors.load("b")
        self.u = self.vectors.load("g") if "g" in operands else self.vectors.new(b)
        self.product, self.sums, self.square = self.zeros(), p.numbers(2), p.numbers(1)
        self._adjoint(b)
        self.next_v()
        _advance(p, start, [self.sums], self.state, self.go)
        p.drop(b)

    def zeros(self) -> Buffer:
        """Return a vector of zeros that all ranks have."""
        return self.p.zeros(self.cols, 1)

    def advance(self, step: str, vector: Buffer, *updated: Buffer, **options: Any) -> None:
        """Compute numbers from the square of a vector's norm, which all ranks have."""
        self.p.call("dots", self.square, vector, vector)
        _advance(self.p, step, [self.square], self.state, *updated, **options)

    def next_v(self) -> None:
        """Have beta, u, alpha and v."""
        p, state, new = self.p, self.state, self.zeros()
        _advance(p, "bidiagonal_beta", [self.sums], state)
        p.call("scale", state, self.u, at=BIDIAGONAL.index("over_beta"))
        p.call("combine", state, new, self.product, self.v)
        p.call("copy", new, self.v)
        self.advance("bidiagonal_alpha", self.v)
        p.call("scale", state, self.v, at=BIDIAGONAL.index("over_alpha"))
        p.drop(new)

    def next_u(self) -> None:
        """Have u, without its factor, and A^H u; the flag of rank 0 comes with them."""
        new = self.vectors.times("a", self.v)
        self.p.call("axpy", self.state, self.u, new, at=BIDIAGONAL.index("minus_alpha"))
        self.p.call("copy", new, self.u)
        self.p.drop(new)
        self._adjoint(self.u)

    def _adjoint(self, b: Buffer) -> None:
        p, product, sums = self.p, self.zeros(), self.p.numbers(2)
        for number, chunk in p.numbered(self.vectors.operands["a"]):
            if self.adjoint:
                options = self.vectors.applied(self.adjoint, "the adjoint of A", number)
                p.call("add_applied", self.u, product, **options)
            else:
                p.call("adjoint_times", chunk, self.u, product, at=self.vectors.places[number][1])
        p.call("dots", sums, self.u, self.u, *((b, b) if b != self.u else (b, self.u)))
        parts = p.share(product, sums, flags=(self.go,))
        for target, those in ((self.product, [one for one, _ in parts]), (self.sums, [one for _, one in parts])):
            p.call("total", target, *those)
            p.drop(*those)

    def results(self, wanted: Wanted, names: tuple[str, ...], **vectors: Buffer) -> None:
        """Hand over numbers and vectors."""
        p = self.p
        if "numbers" in wanted:
            numbers = p.numbers(len(names), "float64")
            known = LSQR if "r1norm" in names else LSMR
            p.on_root("row", [self.state], [numbers], at=tuple(map(known.index, names)))
            vectors["numbers"] = numbers
        for name, buffer in vectors.items():
            if name in wanted:
                p.store(name, buffer)


def lsqr(
    p: Recorder, operands: Operands, wanted: Wanted, *, damp: float, maxiter: int, calc_var: bool, **limits: float
) -> None:
    """Minimize |A x - b|^2 + damp^2 |x|^2 by LSQR (Paige, Saunders 1982)."""
    k, at = Bidiagonal(p, operands, LSQR, "lsqr_start"), LSQR.index
    x, w, var = k.zeros(), k.zeros(), k.zeros()
    p.call("copy", k.v, w)
    k.next_u()

    def turn() -> None:
        k.next_v()
        k.advance("lsqr_rotate", w, k.go, damp=damp, maxiter=maxiter, **limits)
        p.call("axpy", k.state, w, x, at=at("of_w"))
        if calc_var:
            p.call("add_squares", k.state, w, var, at=at("over_rho"))
        p.call("xpay", k.state, k.v, w, at=at("minus_theta"))
        k.next_u()

    p.loop(k.go, turn, maxiter, min(maxiter, EXPECTED))
    names = ("stop", "count", "r1norm", "r2norm", "norma", "conda", "normar", "normx")
    k.results(wanted, names, x=x, var=var)


def lsmr(p: Recorder, operands: Operands, wanted: Wanted, *, damp: float, maxiter: int, **limits: float) -> None:
    """Minimize |A x - b|^2 + damp^2 |x|^2 by LSMR (Fong, Saunders 2011)."""
    k, at = Bidiagonal(p, operands, LSMR, "lsmr_start"), LSMR.index
    x, h, hbar = k.zeros(), k.zeros(), k.zeros()
    p.call("copy", k.v, h)
    k.next_u()

    def turn() -> None:
        k.next_v()
        _advance(p, "lsmr_rotate", [], k.state, damp=damp)
        p.call("xpay", k.state, h, hbar, at=at("of_hbar_before"))
        p.call("axpy", k.state, hbar, x, at=at("of_hbar"))
        p.call("xpay", k.state, k.v, h, at=at("of_h"))
        k.advance("lsmr_test", x, k.go, maxiter=maxiter, **limits)
        k.next_u()

    p.loop(k.go, turn, maxiter, min(maxiter, EXPECTED))
    k.results(wanted, ("stop", "count", "normr", "normar", "norma", "conda", "normx"), x=x)


def gmres(
    p: Recorder, operands: Operands, wanted: Wanted, *, rtol: float, atol: float, restart: int, maxiter: int, eps: float
) -> None:
    """Solve A x = b by GMRES (Saad, Schultz 1986), with Gram-Schmidt twice in place of its modified form."""
    v, at = Vectors(p, operands), GMRES.index
    b, x = v.load("b"), v.load("g")
    r = v.residual(b, x)
    z, right = v.preconditioned(r), v.preconditioned(b)
    state, go, inside = p.numbers(len(GMRES), "float64"), p.flag(), p.flag()
    p.new(state, go, inside, zero=True)
    sums = v.dots((b, b), (r, r), (z, z), (right, right))
    _advance(p, "gmres_start", [sums], state, go, inside, rtol=rtol, atol=atol)
    p.call("scale", state, x, at=at("keep"))
    basis, triangle = p.part(restart + 1), p.numbers(restart, rows=restart + 1)
    rotations, side, y = p.numbers(2, rows=restart), p.numbers(restart + 1), p.numbers(restart)
    p.new(basis, triangle, rotations, side, y, zero=True)
    w = v.new(z)
    p.call("scale", state, w, at=at("scale"))
    p.call("put_column", state, w, basis)
    whole = p.zeros(sum(p.rows.sizes), 1)
    p.drop(sums, *({z, r, right} - {b}))

    def step() -> None:
        v.whole(w, whole)
        z = v.preconditioned(v.times("a", whole, w))
        first, second = (v.orthogonal(state, basis, z) for _ in range(2))
        _advance(p, "gmres_rotate", [first, second], state, inside, triangle, rotations, side, eps=eps)
        v.call_back("pr_norm", state, ratio=(at("residual"), at("normb")))
        p.call("scale", state, z, at=at("scale"))
        p.call("put_column", state, z, basis)
        if z != w:
            p.call("copy", z, w)
        p.drop(first, second, *({z} - {w}))

    def cycle() -> None:
        p.loop(inside, step, restart, restart)
        p.call("gmres_solve", state, triangle, side, y)
        p.call("basis_add", y, basis, x)
        v.whole(x, whole)
        v.call_back("callback", whole)
        product, r = v.times("a", whole), v.new(b)
        p.call("subtract", product, r)
        z = v.preconditioned(r)
        sums = v.dots((r, r), (z, z))
        _advance(p, "gmres_restart", [sums], state, go, inside, eps=eps)
        p.call("copy", z, w)
        p.call("scale", state, w, at=at("scale"))
        p.call("put_column", state, w, basis)
        p.drop(product, sums, *{r, z})

    p.loop(go, cycle, maxiter, min(maxiter, max(1, EXPECTED // restart)))
    _results(p, v, wanted, x, state, GMRES, maxiter + 1)


def eigsh(
    p: Recorder, operands: Operands, wanted: Wanted, *, k: int, ncv: int, seed: int, eps: float, **limits: Any
) -> None:
    """Find eigenvalues of a Hermitian matrix by Lanczos with thick restarts (Wu, Simon 2000), orthogonal throughout."""
    v, n = Vectors(p, operands), sum(p.rows.sizes)
    w = v.load("g") if "g" in operands else v.drawn(seed)
    state, go, inside = p.numbers(len(LANCZOS), "float64"), p.flag(), p.flag()
    values, small, vectors = p.numbers(k, "float64"), p.numbers(ncv, rows=ncv), p.numbers(ncv, rows=ncv)
    basis = p.part(ncv + 1)
    p.new(state, go, inside, values, small, vectors, basis, zero=True)
    sums = v.dots((w, w))
    _advance(p, "lanczos_start", [sums], state, go, inside)
    p.call("scale", state, w, at=1)
    p.call("put_column", state, w, basis)
    whole = p.zeros(n, 1)
    p.drop(sums)

    def step() -> None:
        v.whole(w, whole)
        v.times("a", whole, w)
        first, second = (v.orthogonal(state, basis, w) for _ in range(2))
        _advance(p, "lanczos_step", [first, second], state, inside, small, eps=eps, n=n)
        p.call("scale", state, w, at=1)
        p.call("put_column", state, w, basis)
        p.drop(first, second)

    def cycle() -> None:
        p.loop(inside, step, ncv, max(1, (ncv - k) // 2))
        numbers = state, go, inside, small, vectors, values
        if p.me == 0:
            _advance(p, "lanczos_restart", [], *numbers, eps=eps, n=n, **limits)
        p.share(flags=numbers)
        p.call("rotate_basis", state, vectors, basis)
        p.call("lanczos_vector", state, basis, w, seed=(seed, p.me))
        first, second = (v.orthogonal(state, basis, w) for _ in range(2))
        _advance(p, "lanczos_next", [second], state)
        p.call("scale", state, w, at=1)
        p.call("put_column", state, w, basis)
        p.drop(first, second)

    # The kernel raises an error if nothing has converged within the allowed turns.
    p.loop(go, cycle, limits["maxiter"] + 1, min(limits["maxiter"], 10))
    if "v" in wanted:
        v.store("v", basis, k)
    if "w" in wanted:
        p.store("w", values)


def lobpcg(
    p: Recorder, operands: Operands, wanted: Wanted, *, tol: float, maxiter: int, largest: bool, eps: float
) -> None:
    """Find the ends of a Hermitian matrix's spectrum by LOBPCG (Knyazev 2001): in the span of X, residuals, steps."""
    v, x = Vectors(p, operands), operands["g"]
    k, first = x.cols, v.load("g")
    # X, the preconditioned residuals, and the last step; and what A makes of them.
    s, image = v.new(zero=True, cols=3 * k), v.new(zero=True, cols=3 * k)
    values, rotation = p.numbers(k, "float64"), p.numbers(2 * k, rows=3 * k)
    state, go = p.numbers(1, "float64"), p.flag()
    p.new(values, rotation, state, go, zero=True)
    p.call("put_block", first, s, at=0)
    whole = v.whole(first)
    product = v.times("a", whole)
    p.call("put_block", product, image, at=0)
    p.drop(first, product)

    def ritz() -> None:
        own = p.numbers(6 * k, rows=3 * k)
        p.call("lobpcg_gram", own, s, image)
        (grams,) = v.totals(own)
        if p.me == 0:
            p.call("lobpcg_ritz", grams, values, rotation, largest=largest, eps=eps)
        p.share(flags=(values, rotation))
        r, own_norms, own_products = v.new(cols=k), p.numbers(k, "float64"), p.numbers(k, rows=k)
        p.call("lobpcg_update", rotation, values, s, image, r)
        p.call("column_squares", own_norms, r)
        w = v.preconditioned(r)
        p.call("block_products", own_products, s, w)
        norms, products = v.totals(own_norms, own_products)
        _advance(p, "lobpcg_test", [norms], state, go, tol=tol)
        p.call("subtract_block", products, s, w)
        p.call("put_block", w, s, at=k)
        v.whole(w, whole)
        p.drop(grams, norms, products, *{w, r})

    def turn() -> None:
        product = v.times("a", whole)
        p.call("put_block", product, image, at=k)
        p.drop(product)
        ritz()

    ritz()
    p.loop(go, turn, maxiter, maxiter)
    if "v" in wanted:
        v.store("v", s, k)
    if "w" in wanted:
        p.store("w", values)


def expm(p: Recorder, operands: Operands, wanted: Wanted) -> None:
    """Compute the exponential of A: a Taylor polynomial of A / 2^s, squared s times.

    Ranks have rows of all matrices; of each product the second one comes to all. The s is that of norms of A^2 and A^3,
    which for matrices that are far from normal is less than that of A's (Al-Mohy, Higham 2009).
    """
    v, at = Vectors(p, operands), EXPONENTIAL.index
    state, go, own = p.numbers(len(EXPONENTIAL), "float64"), p.flag(), p.numbers(operands["a"].cols, "float64", 3)
    a = v.load("a")
    whole = v.whole(a)
    square = v.product(a, whole)
    cube = v.product(square, whole)
    p.call("column_sums", own, a, square, cube)
    (sums,) = v.totals(own)
    limit = _TAYLOR_NORMS[np.dtype(p.real).itemsize]
    p.call("exponential_start", sums, state, limit=limit, most=_MOST_SQUARES, finite=p.finite)
    p.drop(own, *({sums} - {own}))
    for name, power in (("of_a", a), ("of_square", square), ("of_cube", cube)):
        p.call("scale", state, power, at=at(name))
    v.whole(cube, whole)
    powers = (a, square, cube, v.product(cube, whole))
    first, last = v.new(zero=True, cols=a.shape[1]), v.new(zero=True, cols=a.shape[1])
    v.add_polynomial(first, _TAYLOR[0], *powers)
    v.add_polynomial(last, _TAYLOR[4], *powers)
    v.whole(last, whole)
    p.drop(last)
    middle = v.product(first, whole)
    p.drop(first)
    v.add_polynomial(middle, _TAYLOR[3], *powers)
    p.call("exponential_next", state, go)
    v.whole(middle, whole)
    v.add_polynomial(middle, _TAYLOR[2], *powers)
    x = v.product(middle, whole)
    p.drop(middle)
    v.add_polynomial(x, _TAYLOR[1], *powers)
    p.drop(*powers)

    def turn() -> None:
        p.call("exponential_next", state, go)
        v.whole(x, whole)
        squared = v.product(x, whole)
        p.call("copy", squared, x)
        p.drop(squared)

    p.loop(go, turn, _MOST_SQUARES, _SQUARES)
    p.drop(whole)
    v.store("x", x, a.shape[1])


def _results(
    p: Recorder, v: Vectors, wanted: Wanted, x: Buffer, state: Buffer, names: tuple[str, ...], most: int
) -> None:
    """Hand over x and SciPy's info."""
    if "info" in wanted:
        info = p.small(1, 1, "int64")
        p.on_root("info", [state], [info], count=names.index("count"), met=names.index("met"), most=most)
        p.store("info", info)
    if "x" in wanted:
        v.store("x", x)
