r"""Eigenvalues of a Hermitian matrix that several ranks have: by way of a tridiagonal one; for all engines.

**Reduction**, where ranks talk over Dask's comms, with NumPy. Householder's reflectors ``H_j = I - tau v v^H``
eliminate column after column: ``T = Q^H A Q`` with ``Q = H_0 H_1 ...``, as LAPACK's ``hetrd`` has them. Of a column the
owner makes the reflector. Each rank multiplies its own block columns of the lower triangle by v, each element once for
itself and once for its mirror image, and the owner adds the products up. The matrix is updated after a narrow panel of
columns by ``A - V W^H - W V^H``; within a panel products are corrected for what has not been done yet (``latrd``). Only
the owner decides on a reflector, and tells the others: the same sums elsewhere may be rounded differently.

**Eigenvalues without vectors** are LAPACK's ``sterf``; on GPUs they are bisected.

**Divide and conquer** has eigenvalues and eigenvectors. The matrix is torn in two, again and again, until the parts are
small; these are solved by LAPACK. Then parts are merged by twos (J. J. M. Cuppen 1981): the eigenvectors Z of both are
multiplied by those of the merge, ``Z := Z U``.

Each rank has some rows of Z, of all columns. So it multiplies its own rows, and a merge needs from others nothing but
the two rows of Z on both sides of the cut. The matrix is torn between ranks' rows first. Here four ranks have 40 rows::

    rank 0   [ 0:10)  \
    rank 1   [10:20)  /  cut at 10  \
    rank 2   [20:30)  \              cut at 20, all ranks merge
    rank 3   [30:40)  /  cut at 30  /

Parts within a rank's own rows are merged by this rank only. For a cut between ranks both neighbours publish a row of Z,
and the eigenvalues of their part. All ranks that merge take these very numbers, and so come to the same decisions. Each
solves the secular equation for itself: where its roots differ by rounding, so do its rows of U.

A tridiagonal matrix is torn at an element off its diagonal. With the eigenvectors of its two parts it becomes a
diagonal matrix and one of rank one, ``diag(d) + rho z z^T``. *Deflation*: an eigenvalue does not change where z is
zero, or where two elements of d are the same and a rotation makes one of theirs in z zero: M. Gu, S. C. Eisenstat, A
divide-and-conquer algorithm for the symmetric tridiagonal eigenproblem, SIAM J. Matrix Anal. Appl. 16 (1995); LAPACK's
``laed2``. Several ranks decide on the same numbers each for itself, and must come to the same decisions. So there are
only sums, products, quotients, square roots and comparisons of single numbers, which IEEE 754 rounds alike everywhere;
nothing is summed in an order that a library chooses.

The other eigenvalues are the roots of the *secular equation* ``1/rho + sum_i z_i^2 / (d_i - x) = 0``: one between each
pole and the next one, one above the last. A root is kept as the nearest pole and its distance from that, so that its
distance from every pole has a small relative error. Of roots with any error there is a vector z' close to z for which
they are exact (Gu and Eisenstat 1995)::

    z'_i^2 = (x_i - d_i) prod_{j != i} (x_j - d_i) / (d_j - d_i)        (times a constant)

The eigenvectors are ``z'_i / (d_i - x_j)``, which are orthogonal whatever the errors of the roots.

Roots are found by rational interpolation: the function is replaced by ``c + s / (d_p - x) + S / (d_q - x)`` with the
poles p and q on both sides of the root, the value and the derivatives of both sums (the *middle way*: R.-C. Li, LAPACK
Working Note 89, 1993), in LAPACK by ``laed4``. The kernels for GPUs have a group of threads for each root; a bracket
guards their steps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.programs.spectral import unit_factors
from dask_distmm.errors import MatrixError, not_finite
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.programs.factor import Columns
from dask_distmm.programs.steps import Key

Vector = NDArray[np.float64]
Pair = tuple[Vector, Vector]

# Reduction


# Columns of a narrow panel.
_NARROW = 64
# Squares of lengths that count as zero, by the type of real numbers.
TINY = {"float64": 2.0**-900, "float32": 2.0**-200}


class Tridiagonal(NamedTuple):
    """A tridiagonal matrix, and the reflectors that lead to it."""

    # Its diagonal, (n,), and the elements beside it, (n - 1,), in float64 on the host.
    d: NDArray[np.float64]
    e: NDArray[np.float64]
    # tau of each reflector, (n - 1,), on the host.
    factors: NDArray[Any]


def panel_width(width: int) -> int:
    """Return the columns of a narrow panel, of which a block column of a width has a whole number."""
    return width if width <= _NARROW else math.gcd(width, _NARROW)


class HostReduction:
    """One rank's part of a reduction."""

    def __init__(
        self,
        columns: Columns,
        rank: int,
        array: NDArray[Any],
        comm: Transport,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._columns, self._rank, self._array, self._comm = columns, rank, array, comm
        self._check, self._progress = check, progress
        self._order, self._width = columns.matrices[0].shape[0], columns.matrices[0].width
        self._d, self._e = np.zeros(self._order), np.zeros(max(0, self._order - 1))
        self._factors = np.zeros(max(0, self._order - 1), array.dtype)

    def reduce(self) -> Tridiagonal:
        """Reduce the matrix, whose elements should be of about the size of 1."""
        step = panel_width(self._width)
        for number, start in enumerate(range(0, self._order, step)):
            self._check()
            stop, owner = min(start + step, self._order), self._columns.owner(start // self._width)
            if owner == self._rank:
                v, w = self._make(start, stop)
                here = slice(start, stop)
                if self._columns.ranks > 1:
                    message = v, w, self._d[here], self._e[here], self._factors[here]
                    self._comm.publish(Key("reflectors", number), message)
            else:
                for column in range(start, min(stop, self._order - 1)):
                    (vector,) = self._comm.fetch(Key("vector", column), owner)
                    self._comm.publish(Key("product", column), (self._multiply(column, vector),))
                    if column > start:
                        self._comm.forget(Key("product", column - 1))
                v, w, *factors = self._comm.fetch(Key("reflectors", number), owner)
                self._comm.forget(Key("product", min(stop, self._order - 1) - 1))
                for values, part in zip((self._d, self._e, self._factors), factors, strict=True):
                    values[start : start + len(part)] = part
            self._update(stop, v[stop - start :], w[stop - start :])
            self._progress(1 - (1 - stop / self._order) ** 3)
        return Tridiagonal(self._d, self._e, self._factors)

    def _make(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Make the reflectors of a panel of this rank; return V and W, whose rows begin with the panel's diagonal."""
        block = start // self._width
        place = self._columns.local(self._rank, block, block + 1).start + start - block * self._width
        columns = self._array[: self._order, place : place + stop - start]
        panel = columns[start:]
        v, w = (np.zeros(panel.shape, panel.dtype, order="F") for _ in range(2))
        for at, column in enumerate(range(start, stop)):
            x = panel[at:, at] - v[at:, :at] @ w[at, :at].conj() - w[at:, :at] @ v[at, :at].conj()
            self._d[column] = x[0].real
            if column == self._order - 1:
                break
            vector, tau, self._e[column] = reflector(x[1:])
            v[at + 1 :, at], self._factors[column] = vector, tau
            y = self._gather(column, vector)
            before, beside = v[at + 1 :, :at], w[at + 1 :, :at]
            y -= before @ (beside.conj().T @ vector) + beside @ (before.conj().T @ vector)
            w[at + 1 :, at] = tau * y - abs(tau) ** 2 / 2 * np.vdot(vector, y).real * vector
        panel[...] = v
        # Later the reflectors of a whole block column are one panel.
        columns[block * self._width : start] = 0
        return v, w

    def _gather(self, column: int, vector: NDArray[Any]) -> NDArray[Any]:
        """Return the matrix, as it was before the panel, times the reflector of a column of this rank."""
        if self._columns.ranks == 1:
            return self._multiply(column, vector)
        self._comm.publish(Key("vector", column), (vector,))
        product = self._multiply(column, vector)
        owner = self._rank
        for rank in (rank for rank in range(self._columns.ranks) if rank != owner):
            product = product + self._comm.fetch(Key("product", column), rank)[0]
        self._comm.forget(Key("vector", column))
        return product

    def _multiply(self, column: int, vector: NDArray[Any]) -> NDArray[Any]:
        """Return this rank's part of the product with a reflector, which begins below the diagonal of a column."""
        product, first = np.zeros_like(vector), column + 1
        for start, stop, part in self._blocks(first):
            size, here, below = stop - start, slice(start - first, stop - first), slice(stop - first, None)
            corner = np.tril(part[:size], -1)
            product[here] += part.diagonal()[:size].real * vector[here] + corner @ vector[here]
            product[here] += corner.conj().T @ vector[here] + part[size:].conj().T @ vector[below]
            product[below] += part[size:] @ vector[here]
        return product

    def _update(self, first: int, v: NDArray[Any], w: NDArray[Any]) -> None:
        """Update the lower triangle of this rank's columns from one on."""
        for start, stop, part in self._blocks(first):
            here, below = slice(start - first, stop - first), slice(start - first, None)
            change = v[below] @ w[here].conj().T + w[below] @ v[here].conj().T
            np.subtract(part, change, out=part)

    def _blocks(self, first: int) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield this rank's block columns from a column on: first and last + 1, and the rows from the diagonal on."""
        for block in self._columns.owned(self._rank, first // self._width, self._columns.first(1)):
            _, start, stop = self._columns.blocks[block]
            begin = max(start, first)
            if begin < stop:
                place = self._columns.local(self._rank, block, block + 1)
                yield begin, stop, self._array[begin : self._order, place.start + begin - start : place.stop]


def reflector(x: NDArray[Any]) -> tuple[NDArray[Any], Any, float]:
    """Return v, tau and beta of ``(I - tau v v^H)^H x = beta e_0``; v begins with 1, and beta is real.

    Numbers far below the rounding of a matrix of about the size of 1 count as zero.
    """
    wide = x.astype(np.result_type(x.dtype, np.float64))
    head, rest = complex(wide[0]), wide[1:]
    square = float((rest.real**2).sum() + (rest.imag**2).sum() + head.imag**2)
    v = np.zeros_like(x)
    v[0] = 1
    if square <= TINY[x.real.dtype.name]:
        return v, x.dtype.type(0), head.real
    beta = -math.copysign(math.sqrt(head.real**2 + square), head.real)
    factor = (beta - head) / beta
    v[1:] = rest / (wide[0] - beta)
    return v, x.dtype.type(factor if x.dtype.kind == "c" else factor.real), beta


# Deflation


# The tolerance in units of rounding, as LAPACK has it.
_TOLERANCE = 8.0
# Where a column of eigenvectors is not zero: in the rows of the first part, of both, of the second one.
_FIRST, _BOTH, _SECOND = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Merge:
    """The rest of ``diag(d) + rho z z^T`` after deflation, and the order of the columns of eigenvectors."""

    # d and z of what is left, (k,); the poles ascend.
    poles: NDArray[np.float64]
    weights: NDArray[np.float64]
    # The factor; positive.
    rho: float
    # Eigenvalues that are found, (n - k,).
    deflated: NDArray[np.float64]
    # The columns of the two parts, (n,): those that are not zero only in the first part's rows, those that are not
    # in any, those only in the second part's rows; and those of `deflated`.
    columns: NDArray[np.int64]
    # How many columns the first three of these groups have; their sum is k.
    counts: tuple[int, int, int]
    # For each of the first k columns the number of its pole.
    order: NDArray[np.int64]
    # Rotations of columns that come before, in their order, (r, 2): column p becomes c p + s q, column q c q - s p.
    pairs: NDArray[np.int64]
    factors: NDArray[np.float64]


def deflate(d: NDArray[np.float64], z: NDArray[np.float64], coupling: float, first: int, rounding: float) -> Merge:
    """Deflate the merge of two parts."""
    # z z^T of a vector of length 1.
    z, rho = z * np.sqrt(0.5), 2.0 * coupling
    size = np.abs(z)
    tolerance = _TOLERANCE * rounding * max(np.abs(d).max(initial=0.0), size.max(initial=0.0))
    order = np.argsort(d, kind="stable")
    left = order[rho * size[order] > tolerance]
    near, weights, kinds = d[left], z[left], np.where(left < first, _FIRST, _SECOND)
    turns = np.array(list(_rotated(near, weights, kinds, tolerance))).reshape(-1, 3)
    rotated, kept = turns[:, 0].astype(np.int64), np.ones(len(left), bool)
    kept[rotated] = False
    gone = np.setdiff1d(order, left[kept], assume_unique=True)
    values = d.copy()
    values[left] = near
    kinds = kinds[kept]
    grouped = np.argsort(kinds, kind="stable")
    counts = tuple(int(np.count_nonzero(kinds == kind)) for kind in (_FIRST, _BOTH, _SECOND))
    return Merge(
        poles=near[kept],
        weights=weights[kept],
        rho=rho,
        deflated=values[gone],
        columns=np.concatenate([left[kept][grouped], gone]),
        counts=counts,  # type: ignore[arg-type]
        order=grouped,
        pairs=left[np.stack([rotated, rotated + 1], 1)],
        factors=turns[:, 1:],
    )


def _rotated(d: Vector, z: Vector, kinds: NDArray[np.int64], tolerance: float) -> Iterator[tuple[int, float, float]]:
    """Rotate pairs of neighbouring poles that are nearly the same, in place: the first one of each is deflated.

    Yields its number, and the factors.
    """
    # Few pairs are close, and are looked for all at once. The second one of a pair that is rotated changes.
    close = np.abs((d[1:] - d[:-1]) * z[1:] * z[:-1]) <= tolerance * (z[1:] * z[1:] + z[:-1] * z[:-1])
    at = 0
    for start in np.flatnonzero(close).tolist():
        at = max(at, start)
        while at + 1 < len(d):
            p, q, gap = float(z[at]), float(z[at + 1]), float(d[at + 1] - d[at])
            length = (p * p + q * q) ** 0.5
            c, s = q / length, -p / length
            if abs(gap * c * s) > tolerance:
                break
            z[at], z[at + 1] = 0.0, length
            low, high = float(d[at]), float(d[at + 1])
            d[at], d[at + 1] = low * c * c + high * s * s, low * s * s + high * c * c
            if kinds[at] != kinds[at + 1]:
                kinds[at + 1] = _BOTH
            yield at, c, s
            at += 1


# Divide and conquer


# Parts of at most this order are LAPACK's.
_LEAF = 256
# Elements of U that are made at once.
_PANEL_ELEMENTS = 2**26
# Small parts that are solved at the same time on a host of GPUs.
_THREADS = 8


def row_bounds(order: int, ranks: int) -> list[int]:
    """Return the first row of each rank, and behind the last one the order of the matrix."""
    return [order * rank // ranks for rank in range(ranks + 1)]


class DivideAndConquer:
    """One rank's part of divide and conquer."""

    def __init__(
        self,
        kernels: Kernels,
        comm: Transport,
        place: tuple[int, int],
        matrix: tuple[Vector, Vector],
        memory: tuple[Any, Any],
        *,
        rounding: float = 2.0**-53,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._kernels, self._comm, (self._rank, self._ranks), self._check = kernels, comm, place, check
        # Deflation takes the largest element for about 1.
        largest = max(np.abs(x).max(initial=0.0) for x in matrix)
        self._unit = float(np.exp2(np.frexp(largest)[1])) if largest else 1.0
        self._d, self._e = (x / self._unit for x in matrix)
        self._z, self._spare = memory
        self._rounding, self._order = rounding, len(self._d)
        self._bounds = row_bounds(self._order, self._ranks)
        self._rows = slice(self._bounds[self._rank], self._bounds[self._rank + 1])
        self._wanted = 0, self._order

    def solve(self, first: int, last: int) -> tuple[Vector, NDArray[np.int64]]:
        """Compute some eigenvalues, and this rank's rows of their eigenvectors."""
        self._wanted = first, last + 1
        self._z.T[...] = 0
        leaves = list(_leaves(self._rows.start, self._rows.stop))
        for cut in {edge for leaf in leaves for edge in leaf} - {0, self._order}:
            coupling = abs(self._e[cut - 1])
            for side in (cut - 1, cut):
                if self._rows.start <= side < self._rows.stop:
                    self._d[side] -= coupling
        # NumPy calls LAPACK without the interpreter's lock.
        with ThreadPoolExecutor(_THREADS if self._kernels.asynchronous else 1) as pool:
            solved = dict(zip(leaves, pool.map(self._leaf, leaves), strict=True))
        values = self._across(0, self._ranks, solved)
        columns = np.argsort(values, kind="stable")[first : last + 1]
        return values[columns] * self._unit, columns

    def _leaf(self, leaf: tuple[int, int]) -> Pair:
        """Return eigenvalues and eigenvectors of a small part."""
        d, e = self._d[slice(*leaf)], self._e[leaf[0] : leaf[1] - 1]
        pairs = np.linalg.eigh(np.diag(d) + np.diag(e, -1))
        return pairs[0], pairs[1]

    def _across(self, low: int, high: int, leaves: Mapping[tuple[int, int], Pair]) -> Vector:
        """Return the eigenvalues of the part of some ranks, of which this is one."""
        if high - low == 1:
            return self._local(self._rows.start, self._rows.stop, leaves)
        middle = (low + high) // 2
        mine = (low, middle) if self._rank < middle else (middle, high)
        values = self._across(*mine, leaves)
        start, cut, stop = self._bounds[low], self._bounds[middle], self._bounds[high]
        ends: list[Sequence[Vector]] = []
        sides: tuple[tuple[str, int, int, slice], ...] = (
            ("above", middle - 1, cut - 1, slice(start, cut)),
            ("below", middle, cut, slice(cut, stop)),
        )
        for part, owner, row, columns in sides:
            if owner == self._rank:
                ends.append((values, self._row(row, columns)))
                self._comm.publish(Key(part, middle), ends[-1])
            else:
                ends.append(self._comm.fetch(Key(part, middle), owner))
        return self._merge(start, cut, stop, *ends)

    def _local(self, start: int, stop: int, leaves: Mapping[tuple[int, int], Pair]) -> Vector:
        """Return the eigenvalues of a part all of whose rows this rank has."""
        if (start, stop) in leaves:
            values, vectors = leaves[start, stop]
            rows = slice(start - self._rows.start, stop - self._rows.start)
            self._z[rows, start:stop] = self._kernels.xp.asarray(vectors)
            return values
        middle = (start + stop) // 2
        first, second = self._local(start, middle, leaves), self._local(middle, stop, leaves)
        above, below = (
            (first, self._row(middle - 1, slice(start, middle))),
            (second, self._row(middle, slice(middle, stop))),
        )
        return self._merge(start, middle, stop, above, below)

    def _row(self, row: int, columns: slice) -> Vector:
        """Return a part of a row of eigenvectors, on the host."""
        return np.array(self._kernels.host(self._z[row - self._rows.start, columns]))

    def _merge(self, start: int, middle: int, stop: int, above: Sequence[Vector], below: Sequence[Vector]) -> Vector:
        """Merge two parts; return the eigenvalues in the order of the columns of this rank's rows.

        Each part comes as its eigenvalues, and its row of Z beside the cut.
        """
        self._check()
        coupling, first = float(self._e[middle - 1]), middle - start
        d, z = (
            np.concatenate([above[0], below[0]]),
            np.concatenate([above[1], below[1] if coupling >= 0 else -below[1]]),
        )
        merge = deflate(d, z, abs(coupling), first, self._rounding)
        kernels, here = self._kernels, slice(*(max(0, edge - self._rows.start) for edge in (start, stop)))
        mine, count = self._z[here, start:stop], len(merge.poles)
        if len(merge.pairs):
            kernels.rotate(mine, merge.pairs, merge.factors)
        kernels.take(mine, merge.columns, spare := self._spare[: len(mine), : stop - start])
        solved = kernels.secular(merge.poles, merge.weights, merge.rho) if count else None
        values = merge.deflated if solved is None else np.concatenate([solved.values, merge.deflated])
        needed = slice(0, count)
        if stop - start == self._order:
            values = self._agreed(values)
            wanted = np.argsort(values, kind="stable")[slice(*self._wanted)]
            roots = np.sort(wanted[wanted < count])
            needed = slice(int(roots[0]), int(roots[-1]) + 1) if len(roots) else slice(0, 0)
        kernels.take(spare[:, count:], np.arange(stop - start - count), mine[:, count:])
        if solved is not None:
            cut = min(max(0, middle - self._rows.start - here.start), len(mine))
            self._multiply(merge, solved, (spare, mine), cut, needed)
        return values

    def _agreed(self, values: Vector) -> Vector:
        """Broadcast the eigenvalues of the whole matrix from rank 0."""
        if self._ranks == 1:
            return values
        if self._rank == 0:
            self._comm.publish(Key("values", 0), (values,))
            return values
        (values,) = self._comm.fetch(Key("values", 0), 0)
        return values

    def _multiply(self, merge: Merge, solved: Any, matrices: tuple[Any, Any], cut: int, needed: slice) -> None:
        """Multiply this rank's rows by the eigenvectors of a merge; `cut` of them are the first part's."""
        source, target = matrices
        count, (alone, both, _) = len(merge.poles), merge.counts
        width = max(1, min(needed.stop - needed.start, _PANEL_ELEMENTS // count))
        panel = self._kernels.empty((count, width), np.dtype(np.float64))
        for column in range(needed.start, needed.stop, width):
            which = np.arange(column, min(column + width, needed.stop))
            u, places = panel[:, : len(which)], slice(column, column + len(which))
            solved.vectors(merge.order, which, u)
            # In the rows of each part the columns of the other one are zero.
            for rows, some in ((slice(0, cut), slice(0, alone + both)), (slice(cut, None), slice(alone, count))):
                if some.start < some.stop:
                    self._kernels.gemm(source[rows, some], u[some], target[rows, places], alpha=1, beta=0)
                else:
                    target[rows, places].T[...] = 0


def _leaves(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts that are not torn any more, as `DivideAndConquer._local` tears them."""
    if stop - start <= _LEAF:
        yield start, stop
        return
    middle = (start + stop) // 2
    yield from _leaves(start, middle)
    yield from _leaves(middle, stop)


# Eigenvalues that ranks share: the kernels that know of other ranks
#
# The matrix is scaled by a power of two to elements of about 1, so that no square overflows.


# Matrices whose largest element is between 2^-16 and 2^16 are not scaled. No factor overflows.
_MODERATE, _MOST = 16, {"float32": 100, "float64": 1000}
# Columns of vectors that are looked at together.
_STRIP = 1024


class SharedEigh(ProgramKernels):
    """One rank's part of a distributed `eigh`; here rows of vectors are sent over Dask's comms."""

    # The share of the time that the reduction takes.
    reported = 0.8

    def __init__(
        self,
        plan: FactorPlacement,
        rank: int,
        kernels: Kernels,
        messages: Transport,
        check: Callable[[], None],
        progress: Callable[[float], None],
    ) -> None:
        super().__init__(kernels)
        self._plan, self._rank, self._messages = plan, rank, messages
        self._check, self._progress = check, progress
        self._order, self._rows = plan.task.a_shape[0], np.zeros((0, 0))
        self._bounds = row_bounds(self._order, plan.count)
        self._exponent, self._reduced = 0, Tridiagonal(*(np.zeros(0) for _ in range(3)))
        self._last = 0.0

    def _reduce(self, array: Any, progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix whose block columns ranks have in `array`, which then has reflectors."""
        return HostReduction(self._plan.columns, self._rank, array, self._messages, self._check, progress).reduce()

    def _memory(self) -> tuple[Any, Any]:
        """Allocate two matrices for a rank's rows of all eigenvectors of the tridiagonal matrix."""
        shape = self._bounds[self._rank + 1] - self._bounds[self._rank], self._order
        self._rows, spare = (np.empty(shape, order="F") for _ in range(2))
        return self._rows, spare

    def _redistribute_eigenvectors(self, columns: NDArray[np.int64], target: Any) -> None:
        """Redistribute eigenvectors from block rows to block columns (all-to-all)."""
        for turn in range(self._plan.count):
            rank = (self._rank + turn) % self._plan.count
            held = columns[self._plan.columns.held(1, rank)]
            if rank == self._rank:
                target[self._bounds[rank] : self._bounds[rank + 1]] = self._rows[:, held]
            else:
                self._messages.publish(Key("rows", rank), (self._rows[:, held],))
        for rank in range(self._plan.count):
            if rank != self._rank:
                (rows,) = self._messages.fetch(Key("rows", self._rank), rank)
                target[self._bounds[rank] : self._bounds[rank + 1]] = rows

    def tridiagonalize(self, a: Any) -> tuple[Any, ...]:
        """Reduce the matrix; return for each of this rank's panels T of its reflectors, ``I - V T V^H``."""
        self._last = time.perf_counter()
        self._scale(a)
        self._reduced = self._reduce(a, lambda share: self._progress(self.reported * share))
        if not all(np.isfinite(x).all() for x in self._reduced):
            # The matrix had no such elements.
            raise MatrixError(f"the reduction of A, {self._plan.task.a_shape}, has overflowed: scale A")
        factors = []
        for panel in self._plan.panels if self._plan.sweeps else ():
            if self._plan.columns.owner(panel) == self._rank:
                start, stop = self._plan.columns.place(panel)
                rows = a[start:, self._plan.columns.local(self._rank, panel, panel + 1)][:, : stop - start]
                factors.append(triangular_factor(self.blas, rows, self._reduced.factors[start - 1 : stop - 1]))
        self._note("reduce", a)
        return tuple(factors)

    def _scale(self, a: Any) -> None:
        """Multiply the matrix by a power of two, the same one on all ranks."""
        sizes = np.array([self._largest_part(a)])
        if self._plan.count > 1:
            self._messages.publish(Key("size", self._rank), (sizes,))
            peers = (rank for rank in range(self._plan.count) if rank != self._rank)
            sizes = np.concatenate([sizes, *(self._messages.fetch(Key("size", rank), rank)[0] for rank in peers)])
        if not np.isfinite(sizes).all():
            raise MatrixError(not_finite("a"))
        exponent = int(np.frexp(sizes.max())[1])
        most = _MOST[np.finfo(self._plan.task.dtype).dtype.name]
        self._exponent = 0 if abs(exponent) <= _MODERATE else max(-most, min(most, exponent))
        if self._exponent:
            with np.errstate(all="ignore"):
                # Elements above the diagonal are arbitrary.
                transposed = a.T
                transposed *= math.ldexp(1.0, -self._exponent)

    def _largest_part(self, a: Any) -> float:
        """Return the largest modulus of a real or imaginary part in this rank's block columns; NaN if there is one."""
        columns, xp, sizes = self._plan.columns, self.blas.xp, []
        for block in columns.owned(self._rank, 0, columns.first(1)):
            _, start, stop = columns.blocks[block]
            rows = a[start:, columns.local(self._rank, block, block + 1)]
            corner = self.blas.triangle(rows[: stop - start], lower=True, unit=False)
            parts = [x for x in (corner, rows[stop - start :]) if x.size]
            real = [y for x in parts for y in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))]
            sizes += [xp.abs(x.T).max() for x in real]
        return float(self.blas.host(xp.stack(sizes).max())) if sizes else 0.0

    def diagonalize(self, target: Any, *, vectors: bool) -> Any:
        """Return the wanted eigenvalues, on the device; fill block columns of the tridiagonal matrix' eigenvectors."""
        problem, (d, e, _) = self._plan.task, self._reduced
        first, last = problem.subset or (0, len(d) - 1)
        if vectors:
            single = np.finfo(problem.dtype).dtype == np.float32
            solver = DivideAndConquer(
                self.blas,
                self._messages,
                (self._rank, self._plan.count),
                (d, e),
                self._memory(),
                rounding=2.0**-24 if single else 2.0**-53,
                check=self._check,
            )
            values, columns = solver.solve(first, last)
            self._redistribute_eigenvectors(columns, target)
        elif self._rank not in self._plan.holders:
            return None
        elif d.any() or e.any():
            values = self.blas.tridiagonal_values(d, e, first, last)
        else:
            values = np.zeros(last - first + 1)
        self._note("diagonalize", target if vectors else None)
        real = next(output.dtype for output in problem.outputs if output.name == "w")
        return self.blas.xp.asarray(np.ldexp(values, self._exponent).astype(real))

    def normalize_phases(self, vectors: Any) -> None:
        """Make the first one of the largest components of each of this rank's vectors real and positive."""
        for at in range(0, vectors.shape[1], _STRIP):
            strip = vectors[:, at : at + _STRIP]
            # The transpose is in the order in which CuPy's kernels are fastest.
            transposed = strip.T
            transposed *= unit_factors(self.blas, strip)[:, None]
        self._note("reflect", vectors)

    def _note(self, name: str, array: Any) -> None:
        """Record the seconds since the last record, after a matrix is complete."""
        if array is not None and array.size:
            self.blas.host(array[:1, :1])
        now = time.perf_counter()
        self.timings[name], self._last = now - self._last, now


def triangular_factor(kernels: Kernels, v: Any, tau: NDArray[Any]) -> Any:
    """Return T with ``H_0 H_1 ... = I - V T V^H``, where ``H_i = I - tau_i v_i v_i^H``.

    Its inverse is the upper triangle of V^H V with 1 / tau in place of the diagonal: C. Puglisi, Modification of the
    Householder method based on the compact WY representation, SIAM J. Sci. Stat. Comput. 13 (1992).
    """
    xp, size = kernels.xp, v.shape[1]
    gram = kernels.empty((size, size), v.dtype)
    kernels.gemm(v, v, gram, "C", alpha=1, beta=0)
    some = tau != 0
    diagonal = np.arange(size)
    inverse = kernels.triangle(gram, lower=False, unit=False)
    inverse *= xp.asarray(np.outer(some, some).astype(v.dtype))
    inverse[diagonal, diagonal] = xp.asarray(1 / np.where(some, tau, 1).astype(v.dtype))
    t = kernels.empty((size, size), v.dtype)
    t[...] = xp.asarray(np.diag(some).astype(v.dtype))
    kernels.trsm(inverse, t, right=False, lower=False, op="N", unit=False)
    return t
