"""Factorizations in block columns, in place: the layout, and the builders of each rank's program.

A factorization works on the matrix A and often on a second one with as many rows: right-hand sides, or an identity that
becomes Q. Both are cut into block columns, which are numbered on: A's first, then the second one's. Block ``g`` belongs
to rank ``g mod P``. Here A has four blocks, B two, and there are three ranks::

    block       0   1   2   3 | 4   5
    rank        0   1   2   0 | 1   2
    rank 0     [0][3]
    rank 1     [1][4]
    rank 2     [2][5]

All rows of a block column are on one rank. So a panel is factorized without any message, pivots are searched for over
the whole column, and rows are swapped at home.

A panel can be factorized as soon as all panels before it have been applied to its own block column. So the owner of the
next panel applies this one to that block column first, factorizes it, publishes it, and only then updates its other
blocks. Meanwhile the other ranks update theirs, and the next panel travels::

    rank 0   F0 |  A0 to its blocks               | A1 to 2 | F2 | A1 to the rest
    rank 1      | A0 to 1 | F1 | A0 to the rest   |    A1 to its blocks
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.compat import cached_property
from dask_distmm.layout import Layout, ProcessGrid
from dask_distmm.programs.recorder import Recorder, Rows
from dask_distmm.programs.steps import CONTRACTS, Buffer, Contract, Key, Lane, Load, Publish, Reserve, View

# Where block columns lie: distributed round-robin over the ranks, each rank's side by side in one array


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that is cut into block columns."""

    # Its rows and columns.
    shape: tuple[int, int]
    # Columns of a block; the last one may have fewer.
    width: int

    @property
    def count(self) -> int:
        """Number of its blocks."""
        return -(-self.shape[1] // self.width)


class BlockColumn(NamedTuple):
    """A block column."""

    # 0 for A, 1 for the second one.
    matrix: int
    # Its columns of that matrix.
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """Block columns of one or two matrices over `ranks` ranks."""

    # A, and the second matrix if there is one.
    matrices: tuple[Matrix, ...]
    # Number of ranks.
    ranks: int
    # Rows below the diagonal at which panels begin: 1 for the reflectors of a tridiagonal reduction.
    below: int = 0

    @cached_property
    def rows(self) -> int:
        """Rows of each rank's array: those of the longest matrix."""
        return max(matrix.shape[0] for matrix in self.matrices)

    @cached_property
    def count(self) -> int:
        """Number of all blocks."""
        return self.first(len(self.matrices))

    def first(self, matrix: int) -> int:
        """Return the number of the first block of a matrix, and behind the last matrix the number of all blocks."""
        return sum(part.count for part in self.matrices[:matrix])

    def owner(self, block: int) -> int:
        """Return the rank that has a block."""
        return block % self.ranks

    @cached_property
    def blocks(self) -> tuple[BlockColumn, ...]:
        """All blocks in the order of their numbers."""
        blocks: list[BlockColumn] = []
        for number, matrix in enumerate(self.matrices):
            cols = matrix.shape[1]
            blocks += (BlockColumn(number, at, min(at + matrix.width, cols)) for at in range(0, cols, matrix.width))
        return tuple(blocks)

    @property
    def order(self) -> int:
        """Number of diagonal elements of A."""
        return min(self.matrices[0].shape)

    def place(self, panel: int) -> tuple[int, int]:
        """Return the rows and columns of the diagonal block of a panel of A, or those of the block `below` it.

        In the last panel of a matrix with more columns than rows the panel continues beyond it.
        """
        _, start, stop = self.blocks[panel]
        return start + self.below, min(stop + self.below, self.order)

    def owned(self, rank: int, first: int = 0, stop: int | None = None) -> range:
        """Return the numbers of a rank's blocks in ``range(first, stop)``; without `stop`, of all from `first`."""
        return range(first + (rank - first) % self.ranks, self.count if stop is None else stop, self.ranks)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """For each block, the column of its rank's array at which it begins; behind the last one the ranks' columns."""
        ends = [0] * self.ranks
        starts = []
        for number, block in enumerate(self.blocks):
            starts.append(ends[self.owner(number)])
            ends[self.owner(number)] += block.stop - block.start
        return (*starts, *ends)

    def local_cols(self, rank: int) -> int:
        """Return the number of columns of a rank's array."""
        return self._starts[self.count + rank]

    def local(self, rank: int, first: int, stop: int) -> slice:
        """Return the columns of a rank's array that hold its blocks in ``range(first, stop)``, which are neighbours."""
        owned = self.owned(rank, first, stop)
        if not owned:
            return slice(0, 0)
        last = self.blocks[owned[-1]]
        return slice(self._starts[owned[0]], self._starts[owned[-1]] + last.stop - last.start)

    def held(self, matrix: int, rank: int) -> NDArray[np.int64]:
        """Return which columns of a matrix a rank's array has, in the order in which they lie there."""
        blocks = (self.blocks[block] for block in self.owned(rank, self.first(matrix), self.first(matrix + 1)))
        return np.concatenate([np.arange(0), *(np.arange(start, stop) for _, start, stop in blocks)])

    def layout(self, matrix: int, shape: tuple[int, int] | None = None) -> Layout:
        """Return the layout of a matrix, or of one of `shape` whose block columns lie as those of that matrix do."""
        rows, cols = shape or self.matrices[matrix].shape
        width = self.matrices[matrix].width
        return Layout(
            (rows, cols), (max(1, rows), width), ProcessGrid(1, self.ranks), (0, self.first(matrix) % self.ranks)
        )


# The steps of one rank


# The kinds of messages between ranks. Of a panel, "lower": its rows from the diagonal on, with what goes with them;
# "upper": its rows up to and with the diagonal block; "pivots": only pivots and diagonal. "carried": the right-hand
# side on its way to the owner of the panel, or to its own rank under its own number.
#
# Of shared eigenvalues, each kind with numbers of its own. "size": the largest element of a rank's block columns.
# "vector": the reflector of a column; "product": the matrix times that, a rank's part; "reflectors": those of a narrow
# panel. "above" and "below": what a merge needs of the parts on both sides of a rank's first row; "values": all
# eigenvalues; "rows": a rank's rows of eigenvectors, in the columns of another one.
PANEL_PARTS = "lower", "upper", "pivots", "carried"
PARTS = *PANEL_PARTS, "size", "vector", "product", "reflectors", "above", "below", "values", "rows"
# They record how a panel is factorized, and how it is applied to a rank's block columns from the first to the last + 1.
Factor = Callable[[int], None]
Update = Callable[[int, int, int], None]


class Panels(Recorder):
    """Records the steps of rank `me` on its block columns, which are side by side in one array."""

    def __init__(
        self,
        me: int,
        columns: Columns,
        dtype: str,
        *,
        factored: str = "",
        parts: Sequence[str] = (),
        check: int | None = None,
        holders: Sequence[int] = (),
        queued: bool = False,
        together: bool = False,
        numbered: int = 0,
        compute: str = "",
        lenient: bool = False,
    ) -> None:
        super().__init__(me, Rows((), (), columns.ranks), dtype)
        self.columns = columns
        # The number of the first panel in messages; how GPUs multiply; whether whoever uses factors looks at them; how
        # often right-hand sides have gone from rank to rank.
        self._numbered, self._compute, self.lenient, self._carried = numbered, compute, lenient, 0
        # What panels are of: one of `FACTORED`, ``"reflect"`` for reflectors, or nothing; the parts of them that others
        # need; the size that diagonals are looked at with, if they are; the ranks that have all pivots in the end;
        # whether updates are queued before a panel that is waited for; whether all ranks meet for each panel of a
        # sweep, also those that do not need it, as a broadcast wants it.
        self._factored, self._parts, self._check, self._holders, self._queued = factored, parts, check, holders, queued
        self._together, self._sweeps = together and columns.ranks > 1, 0
        self.array = Buffer("x", (columns.rows, columns.local_cols(me)), dtype)
        self._here[self.array.name] = self.array
        self.steps.append(Reserve(self.array))
        # Whether a panel was made since the last call that came after all that was ahead; the panel that all panels
        # before it have been applied to ahead.
        self._fresh, self._next = False, -1

    # Steps

    def gather(self, operand: str, number: int, by: tuple[Buffer, ...] = ()) -> None:
        """Gather this rank's columns of an operand, which is A (0) or the second matrix (1)."""
        self.steps.append(Load((self.matrix(number),), (operand,), by=by))

    def update(self, kernel: str, *arguments: Buffer | View, **options: Any) -> None:
        """Call a kernel whose products may be less accurate than what panels need."""
        self.call(kernel, *arguments, **options, **({"compute": self._compute} if self._compute else {}))  # type: ignore[arg-type]

    def publish(self, part: str, k: int, *buffers: Buffer | View, copied: bool = False) -> None:
        """Publish a part of a panel."""
        self._add(Publish(Key(part, k), buffers, copied, self._lane))

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Record steps of a lane."""
        self._lane = lane
        yield
        self._lane = ""

    # Block columns, and parts of panels

    def owns(self, block: int) -> bool:
        """Whether this rank has a block column."""
        return self.columns.owner(block) == self.me

    def blocks(self, first: int, stop: int) -> View:
        """Return this rank's block columns in ``range(first, stop)``, which are neighbours: all rows."""
        return self.array[:, self.columns.local(self.me, first, stop)]

    def matrix(self, number: int) -> View:
        """Return this rank's columns of A (0) or the second matrix (1), with the rows that this matrix has."""
        rows = self.columns.matrices[number].shape[0]
        return self.blocks(self.columns.first(number), self.columns.first(number + 1))[:rows, :]

    def whole(self, k: int, part: str) -> Buffer | View:
        """Return a part of a panel with all its columns: this rank's own, or the received copy."""
        (start, stop), (_, left, right) = self.columns.place(k), self.columns.blocks[k]
        if self.owns(k):
            return self.blocks(k, k + 1)[(slice(start, None) if part == "lower" else slice(stop)), :]
        return Buffer(f"{part}.{k}", (self.columns.rows - start if part == "lower" else stop, right - left), self.dtype)

    def panel(self, k: int, part: str = "lower") -> View:
        """Return a part of a panel, as wide as its diagonal block."""
        start, stop = self.columns.place(k)
        return self.whole(k, part)[:, : stop - start]

    def extra(self, k: int) -> Buffer:
        """Return the extra output of a panel: info of potrf, pivots of getrf, or T of reflectors."""
        start, stop = self.columns.place(k)
        entry = FACTORED[self._factored]
        return Buffer(
            f"extra.{k}", entry.extra(min(self.whole(k, "lower").shape), stop - start), entry.extra_dtype or self.dtype
        )

    def with_extra(self, k: int, part: str) -> tuple[Any, ...]:
        """Return a part of a panel, and its extra output."""
        return self.whole(k, part), *([self.extra(k)] if part == "lower" and self._factored else [])

    # Panel after panel

    def sweep(
        self,
        order: Iterable[int],
        targets: Callable[[int], tuple[int, int]],
        update: Update,
        part: str = "lower",
        factor: Factor | None = None,
    ) -> None:
        """Apply panels to block columns; if panels are factorized, the next one before the others are updated."""
        todo = [(k, *targets(k)) for k in order]
        # A panel has another number in each sweep for which all ranks meet.
        offset = self._numbered + self._sweeps * self.columns.count
        self._sweeps += self._together
        if factor and todo and self.owns(todo[0][0]):
            self._factor(todo[0][0], factor)
        for at, (k, first, stop) in enumerate(todo):
            remote = not self.owns(k) and (self._together or bool(self._owned(first, stop)))
            if remote:
                self.pull(self.columns.owner(k), Key(part, offset + k), self.with_extra(k, part), taken=True)
                if factor:
                    self._note(k)
            elif self._together and self.owns(k) and not factor:
                with self._joining(k):
                    self.publish(part, offset + k, *self.with_extra(k, part))
            following = todo[at + 1][0] if at + 1 < len(todo) else self.columns.count
            ahead = factor is not None and at + 1 < len(todo) and self.owns(following)
            if ahead:
                with self.on("ahead"):
                    update(k, following, following + 1)
                self._next = following
            rest = first + ahead, stop
            short = factor is not None and self._is_short(k, *rest)
            late = self._queued and not short and bool(self._owned(*rest))
            if factor and ahead and not late:
                self._factor(following, factor)
            if self._owned(*rest):
                with self._joining(k, short=short):
                    update(k, *rest)
            if factor and ahead and late:
                self._factor(following, factor)
            if remote:
                self.drop(*self.with_extra(k, part))

    def _owned(self, first: int, stop: int) -> range:
        return self.columns.owned(self.me, first, stop)

    def _is_short(self, k: int, first: int, stop: int) -> bool:
        rows = self.columns.rows - self.columns.place(k)[0]
        return FACTORED[self._factored].is_short(rows, self.blocks(first, stop).shape[1])

    @contextlib.contextmanager
    def _joining(self, k: int, *, short: bool = False) -> Iterator[None]:
        """Apply a panel that was factorized ahead; after the next panel if others wait for that on the device."""
        join = self._fresh and (self.owns(k) or short)
        with self.on("join" if join else ""):
            yield
        self._fresh &= not join

    def _factor(self, k: int, factor: Factor) -> None:
        """Factorize a panel of this rank."""
        with self.on("panel" if k == self._next else "ahead"):
            factor(k)
            self._fresh = True
            if self._holders:
                self.call("diagonal", self.panel(k), makes=[self._diagonal(k)])
            self._complete(k, ["lower"] if self._together else self._parts)

    def _diagonal(self, k: int) -> Buffer:
        return Buffer(f"diagonal.{k}", (self.panel(k).shape[1], 1), self.dtype)

    def _pivots(self, k: int) -> tuple[Buffer, Buffer]:
        """Return the kept copies of the pivots and the diagonal of another rank's panel."""
        return dataclasses.replace(self.extra(k), name=f"pivots.{k}"), self._diagonal(k)

    def _note(self, k: int) -> None:
        """Keep the pivots of a received panel, and free the panel."""
        if self._factored in ("lu", "ldlt") and self.me in self._holders:
            pivots, diagonal = self._pivots(k)
            self.call("diagonal", self.panel(k), makes=[diagonal])
            self.call("copied", self.extra(k), makes=[pivots])
        elif self._factored == "cholesky" and not self.lenient:
            # So that all ranks name the same minor, the first: those after it are wrong, too.
            self.call("check_minor", self.extra(k), start=self.columns.place(k)[0], copied=True)

    def _complete(self, k: int, parts: Sequence[str]) -> None:
        """Finish a panel of this rank: check it, keep its pivots, and publish parts of it."""
        start, stop = self.columns.place(k)
        if self._check is not None:
            rows = self.blocks(k, k + 1)[:, : stop - start]
            self.call("check_diagonal", rows, start=start, size=self._check)
        for part in parts if self.columns.ranks > 1 else ():
            self.publish(part, self._numbered + k, *self.with_extra(k, part))
        if set(self._holders) - {self.me} and not self._together:
            self.publish("pivots", k, self.extra(k), self._diagonal(k))

    def complete(self, order: Iterable[int]) -> None:
        """Publish this rank's panels, which are inputs."""
        for k in order:
            if self.owns(k):
                with self.on("ahead"):
                    self._complete(k, () if self._together else self._parts)

    def starts(self, order: Iterable[int]) -> list[int]:
        """Return the first rows of panels."""
        return [self.columns.place(k)[0] for k in order]

    def known(self, order: Iterable[int]) -> tuple[list[Buffer], list[Buffer]]:
        """Return the pivots and the diagonals of all panels, on a rank that has received them."""
        pairs = [(self.extra(k), self._diagonal(k)) if self.owns(k) else self._pivots(k) for k in order]
        return [pivots for pivots, _ in pairs], [diagonal for _, diagonal in pairs]

    def pivots(self, order: Iterable[int], last: int) -> None:
        """Pull the pivots that were not received with panels, if all are wanted."""
        for k in () if self._together else order:
            if self.me in self._holders and not self.owns(k) and not self._owned(k + 1, last):
                self.pull(self.columns.owner(k), Key("pivots", k), self._pivots(k), taken=True)

    def carry(self, order: Iterable[int], update: Callable[[int, Buffer | View], None]) -> None:
        """Apply each rank's panels to a right-hand side that is passed from rank to rank."""
        home = self.columns.first(1)
        holder = self.columns.owner(home)
        cols = self.columns.matrices[1].shape[1]
        away = Buffer("carried", (self.columns.rows, cols), self.dtype)
        side: Buffer | View = self.blocks(home, home + 1) if self.owns(home) else away
        offset, self._carried = self._numbered + self._carried * self.columns.count, self._carried + 1
        for k in (*order, home):
            owner = self.columns.owner(k)
            if owner != holder and self.me == holder:
                self.publish("carried", offset + k, side, copied=True)
            elif owner != holder and self.me == owner:
                self.pull(holder, Key("carried", offset + k), (side,))
            if k != home and self.me == owner:
                with self._joining(k):
                    update(k, side)
            holder = owner
        self.drop(away)


CONTRACTS |= {
    # Factorizations in block columns, in place; what a kernel returns is named behind a colon.
    # L : info. L U : pivots. R and reflectors V : T, with I - V T V^H.
    "potrf": Contract("u", lambda a: a[1] ** 3 / 3),
    # L and D of L D L^H: D; each column divided by a number.
    "ldlt": Contract("u", lambda a: 2 * a[1] ** 3 / 3),
    "divide_columns": Contract("ur", lambda b, d: b[0] * b[1]),
    "getrf": Contract("u", lambda a: a[0] * a[1] * min(a) - (a[0] + a[1]) * min(a) ** 2 / 2 + min(a) ** 3 / 3),
    "geqrt": Contract("u", lambda a: 2 * a[0] * a[1] ** 2 - 2 * a[1] ** 3 / 3),
    # B = op(A)^-1 B, or B op(A)^-1; C = alpha op(A) op(B) + beta C; B with rows swapped; B = (I - V T V^H) B, or by ^H.
    "trsm": Contract("ru", lambda a, b: a[0] * b[0] * b[1]),
    "gemm": Contract("rru", lambda a, b, c: 2 * math.sqrt(math.prod(a + b + c))),
    "laswp": Contract("ur"),
    "larfb": Contract("rru", lambda v, t, b: 4 * v[0] * v[1] * b[1]),
    # Block columns of the lower triangle of A - V V^H, or A - V D V^H: half of what the first one has, on average.
    "update_lower": Contract("rur", lambda v, b, *_: v[0] * v[1] * b[1]),
    # Raise if a matrix is not positive definite, by potrf's info; or is singular, by the diagonal of a factor.
    "check_minor": Contract("r"),
    "check_diagonal": Contract("r"),
    # : a copy; : the diagonal. Zeros; an identity's columns.
    "copied": Contract("r"),
    "diagonal": Contract("r"),
    # By the pivots of all panels: L's block columns with all rows swapped; rows and numbers of the whole matrix. The
    # squared norms of columns.
    "swap_rows": Contract("rwr"),
    "pivots": Contract("r"),
    "permutation": Contract("r"),
    "concatenate": Contract("r"),
    "determinant": Contract("r"),
    "column_norms": Contract("rw"),
    "clear": Contract("u"),
    "identity": Contract("u"),
    # Of the whole matrix: eigenvalues and the like. Of all ranks' block columns: T of the reflectors; eigenvalues, and
    # the eigenvectors of a tridiagonal matrix; their phases.
    "decompose": Contract("u"),
    "tridiagonalize": Contract("u", lambda a: 4 / 3 * a[0] ** 2 * a[1], together=True),
    "diagonalize": Contract("u", together=True),
    "normalize_phases": Contract("u"),
}


# Factorizations, and what is done with their factors


def cholesky(p: Panels, order: Sequence[int], last: int, *, unit: bool = False) -> None:
    """Factorize A = L L^H, of which the lower triangle is read; right-hand sides before block `last` become L^-1 B.

    `unit`: A = L D L^H without pivots, with ones on the diagonal of L; D is on that of panels, and goes with them.
    """

    def factor(k: int) -> None:
        panel = p.panel(k)
        size = panel.shape[1]
        diagonal, below = panel[:size, :], panel[size:, :]
        if unit:
            p.call("ldlt", diagonal, start=p.columns.place(k)[0], makes=[p.extra(k)])
        else:
            p.call("potrf", diagonal, makes=[p.extra(k)])
            if not p.lenient:
                p.call("check_minor", p.extra(k), start=p.columns.place(k)[0])
        p.update("trsm", diagonal, below, right=True, lower=True, op="C", unit=unit)
        if unit:
            p.call("divide_columns", below, p.extra(k))

    def update(k: int, first: int, stop: int) -> None:
        start, end = p.columns.place(k)[0], min(stop, p.columns.first(1))
        if owned := p.columns.owned(p.me, first, end):
            top = p.columns.blocks[owned[0]].start
            blocks = [(b.start - top, b.stop - top) for b in map(p.columns.blocks.__getitem__, owned)]
            rows, middle = p.panel(k)[top - start :, :], [p.extra(k)] * unit
            p.update("update_lower", rows, p.blocks(first, end)[top:, :], *middle, blocks=blocks)
        if p.columns.owned(p.me, max(first, end), stop):
            substitute_block(p, k, p.blocks(max(first, end), stop), lower=True)

    p.sweep(order, lambda k: (k + 1, last), update, factor=factor)
    p.pivots(order if unit else (), last)


def lu(p: Panels, order: Sequence[int], last: int) -> None:
    """Factorize P A = L U with partial pivoting; right-hand sides before block `last` become L^-1 P B."""

    def factor(k: int) -> None:
        p.call("getrf", p.whole(k, "lower"), makes=[p.extra(k)])

    def update(k: int, first: int, stop: int) -> None:
        eliminate(p, k, p.blocks(first, stop))

    p.sweep(order, lambda k: (k + 1, last), update, factor=factor)
    p.pivots(order, last)


def eliminate(p: Panels, k: int, columns: Buffer | View) -> None:
    """Apply a panel of LU to columns: swaps, the block row of U or of the solution, and the rows below."""
    panel, columns = p.panel(k), columns[p.columns.place(k)[0] :, :]
    size = panel.shape[1]
    p.call("laswp", columns, p.extra(k))
    p.update("trsm", panel[:size, :], columns[:size, :], right=False, lower=True, op="N", unit=True)
    p.update("gemm", panel[size:, :], columns[:size, :], columns[size:, :], alpha=-1, beta=1)


def qr(p: Panels, order: Sequence[int], last: int) -> None:
    """Factorize A = Q R by Householder's reflectors I - V T V^H; right-hand sides before block `last` become Q^H B."""

    def factor(k: int) -> None:
        panel, rest = p.panel(k), p.whole(k, "lower")[:, p.panel(k).shape[1] :]
        p.call("geqrt", panel, makes=[p.extra(k)])
        if rest.shape[1]:
            p.call("larfb", panel, p.extra(k), rest, op="C")

    p.sweep(order, lambda k: (k + 1, last), functools.partial(_reflect_blocks, p, op="C"), factor=factor)


def reflect(p: Panels, order: Sequence[int], first: Callable[[int], int]) -> None:
    """Multiply: B = Q B, with the reflectors of all panels, the last ones first: block columns of B from `first` on."""
    p.sweep(order[::-1], lambda k: (first(k), p.columns.count), functools.partial(_reflect_blocks, p, op="N"))


def _reflect_blocks(p: Panels, k: int, first: int, stop: int, *, op: str) -> None:
    """Multiply block columns by the reflectors of a panel, or by their conjugate transpose."""
    p.call("larfb", p.panel(k), p.extra(k), p.blocks(first, stop)[p.columns.place(k)[0] :, :], op=op)


class Factored(NamedTuple):
    """How panels of A are factorized, one after the other."""

    record: Callable[[Panels, Sequence[int], int], None]
    # The shape of what goes with a panel, by the order of its pivots and of its diagonal block; its type, or A's.
    extra: Callable[[int, int], tuple[int, int]]
    extra_dtype: str
    # Operations of an update for each of its elements and each column of the panel; and for each of these columns those
    # of an update that takes no longer than what the other ranks wait for meanwhile: the next panel, alone, and its way
    # to them (1 H200, 512 columns: 1.3, 2.7 and 4.5 ms).
    each: int = 0
    short: float = 0.0

    def is_short(self, rows: int, columns: int) -> bool:
        """Whether an update by a panel takes no longer than the panel after it, alone.

        Then a device gains nothing from doing both at once, as others wait for the panel, which takes twice as long so.
        """
        return self.each * rows * columns < self.short


FACTORED = {
    "cholesky": Factored(cholesky, lambda pivots, order: (1, 1), "int32", 1, 1.3e8),
    "ldlt": Factored(functools.partial(cholesky, unit=True), lambda pivots, order: (order, 1), "", 1, 1.3e8),
    "lu": Factored(lu, lambda pivots, order: (pivots, 1), "int32", 2, 2.7e8),
    "qr": Factored(qr, lambda pivots, order: (order, order), "", 4, 4.5e8),
    "reflect": Factored(lambda p, order, last: None, lambda pivots, order: (order, order), ""),
}


def substitute(
    p: Panels, order: Sequence[int], *, lower: bool, op: str = "N", unit: bool = False, carried: bool = False
) -> None:
    """Solve: B = op(A)^-1 B of a triangle: from the first block row to the last one, or from the last one."""
    order = order if lower == (op == "N") else order[::-1]
    solve = functools.partial(substitute_block, p, lower=lower, op=op, unit=unit)
    apply_panels(p, order, solve, "lower" if lower else "upper", carried=carried)


def apply_panels(
    p: Panels, order: Sequence[int], update: Callable[[int, Buffer | View], None], part: str, *, carried: bool
) -> None:
    """Apply all panels to the second matrix: it goes from rank to rank (`carried`), or panels do."""
    if carried:
        p.carry(order, update)
        return
    targets = p.columns.first(1), p.columns.count
    p.sweep(order, lambda k: targets, lambda k, first, stop: update(k, p.blocks(first, stop)), part)


def substitute_block(
    p: Panels, k: int, columns: Buffer | View, *, lower: bool, op: str = "N", unit: bool = False
) -> None:
    """Solve for the unknowns of a panel: one block row of op(A) X = B, in place.

    With A itself the solution is then taken out of the equations that are left. Of its transpose the panel is a block
    row: the solutions that are there are taken out of it first.
    """
    (start, stop), order = p.columns.place(k), p.columns.order
    rows, here = p.panel(k, "lower" if lower else "upper"), columns[start:stop, :]
    if lower:
        block, remaining, left = rows[: stop - start, :], rows[stop - start : order - start, :], columns[stop:order, :]
    else:
        block, remaining, left = rows[start:, :], rows[:start, :], columns[:start, :]
    if op != "N":
        p.call("gemm", remaining, left, here, op_a=op, alpha=-1, beta=1)
    p.call("trsm", block, here, right=False, lower=lower, op=op, unit=unit)
    if op == "N":
        p.call("gemm", remaining, here, left, alpha=-1, beta=1)


def complete_second(p: Panels, *, identity: bool) -> None:
    """Fill the second matrix with an identity, or the rows below B with zeros."""
    first, count, rows = p.columns.first(1), p.columns.count, p.columns.matrices[1].shape[0]
    if identity:
        for block in p.columns.owned(p.me, first, count):
            p.call("identity", p.blocks(block, block + 1), start=p.columns.blocks[block].start)
    elif rows < p.columns.rows:
        p.call("clear", p.blocks(first, count)[rows:, :])


def eigenvalues(p: Panels, order: Sequence[int], results: Sequence[Buffer], *, vectors: bool) -> None:
    """Decompose A V = V diag(w) of a Hermitian matrix, by all ranks together.

    ::

        tridiagonalize      Q^H A Q = T; block columns of A become those of reflectors
        diagonalize         T = Z W Z^T by divide and conquer, where ranks have rows of Z; then block columns
        reflect             V = Q Z, panel by panel
        normalize_phases    the factors of modulus one that make vectors unique
    """
    p.call("tridiagonalize", p.matrix(0), makes=[p.extra(k) for k in order if p.owns(k)])
    p.call("diagonalize", p.matrix(1) if vectors else p.matrix(0)[:, :0], vectors=vectors, makes=results)
    if vectors:
        p.complete(order)
        last = p.columns.first(1)
        reflect(p, order, lambda k: last)
        p.call("normalize_phases", p.matrix(1))


def decompose(p: Panels, results: Sequence[Buffer], task: Any) -> None:
    """Compute a spectral decomposition, or a function, of the whole matrix, by one call of LAPACK or the like."""
    p.call("decompose", *map(p.matrix, range(len(p.columns.matrices))), makes=results, task=task)


# What is made of the factors


def columns_of_result(p: Panels, output: str, place: View, form: str = "", order: Sequence[int] = ()) -> Buffer | View:
    """Return this rank's columns of a result.

    These are squared norms (``"residuals"``), or the rows of L in the order into which all pivots of panels have
    swapped them (``"swapped"``), or what is there.
    """
    part = Buffer(f"part.{output}", place.shape, p.dtype)
    if form == "residuals":
        part = dataclasses.replace(part, shape=(1, place.shape[1]), dtype=p.real)
        p.call("column_norms", place, part)
    elif form == "swapped":
        blocks = [p.columns.blocks[block] for block in p.columns.owned(p.me, 0, p.columns.first(1))]
        ends = [(block.stop - block.start, block.stop) for block in blocks]
        p.call("swap_rows", place, part, *p.known(order)[0], starts=p.starts(order), blocks=ends)
    return part if form else place


def compute_numbers(p: Panels, result: Buffer, form: str, order: Sequence[int]) -> None:
    """Compute a result without block columns, if it is not there: pivots, a determinant, or a small matrix."""
    if form in ("sign", "logdet", "det"):
        (pivots, diagonals), dtype = p.known(order), result.dtype
        p.call("determinant", *pivots, *diagonals, starts=p.starts(order), form=form, dtype=dtype, makes=[result])
    elif form in ("pivots", "permutation"):
        p.call(form, *p.known(order)[0], starts=p.starts(order), count=result.shape[1], makes=[result])
    elif form == "diagonal":
        p.call("concatenate", *p.known(order)[0], makes=[result])
