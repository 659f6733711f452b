r"""Eigenvalues and eigenvectors of a symmetric tridiagonal matrix by divide and conquer, on one or several ranks.

The matrix is torn in two, again and again, until the parts are small; these are solved by LAPACK. Then parts are
merged by twos (J. J. M. Cuppen 1981; `deflation` and `secular` have the mathematics): the eigenvectors Z of both are
multiplied by those of the merge, ``Z := Z U``.

Each rank has some rows of Z, of all columns. So it multiplies its own rows, and a merge needs from others nothing but
the two rows of Z on both sides of the cut. The matrix is torn between ranks' rows first. Here four ranks have 40 rows::

    rank 0   [ 0:10)  \
    rank 1   [10:20)  /  cut at 10  \
    rank 2   [20:30)  \              cut at 20, all ranks merge
    rank 3   [30:40)  /  cut at 30  /

Parts within a rank's own rows are merged by this rank only. For a cut between ranks both neighbours publish a row of Z,
and the eigenvalues of their part. All ranks that merge take these very numbers, and so come to the same decisions
(`deflation`). Each solves the secular equation for itself: where its roots differ by rounding, so do its rows of U.

A tridiagonal matrix is torn at an element off its diagonal. With the eigenvectors of its two parts it becomes a
diagonal matrix and one of rank one. An eigenvalue does not change where z is zero, or where two elements of d are the
same and a rotation makes one of theirs in z zero: M. Gu, S. C. Eisenstat, A divide-and-conquer algorithm for the
symmetric tridiagonal eigenproblem, SIAM J. Matrix Anal. Appl. 16 (1995); LAPACK's ``laed2``.

Several ranks decide on the same numbers each for itself, and must come to the same decisions. So there are only sums,
products, quotients, square roots and comparisons of single numbers here, which IEEE 754 rounds alike everywhere;
nothing is summed in an order that a library chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.exchange import Messages
from dask_distmm.engines.tridiagonal.kernels import Merging, Solved

# The first half of a merge in divide and conquer: what of ``diag(d) + rho z z^T`` is solved already. Pure


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
    """Return what is left of the merge of two parts."""
    # z z^T of a vector of length 1.
    z, rho = z * np.sqrt(0.5), 2.0 * coupling
    size = np.abs(z)
    tolerance = _TOLERANCE * rounding * max(np.abs(d).max(initial=0.0), size.max(initial=0.0))
    order = np.argsort(d, kind="stable")
    left = order[rho * size[order] > tolerance]
    found = _Chains(d[left], z[left], np.where(left < first, _FIRST, _SECOND), tolerance)
    kept = found.kept
    gone = np.setdiff1d(order, left[kept], assume_unique=True)
    values = d.copy()
    values[left] = found.d
    kinds = found.kinds[kept]
    grouped = np.argsort(kinds, kind="stable")
    counts = tuple(int(np.count_nonzero(kinds == kind)) for kind in (_FIRST, _BOTH, _SECOND))
    return Merge(
        poles=found.d[kept],
        weights=found.z[kept],
        rho=rho,
        deflated=values[gone],
        columns=np.concatenate([left[kept][grouped], gone]),
        counts=counts,  # type: ignore[arg-type]
        order=grouped,
        pairs=left[np.array(found.pairs, np.int64).reshape(-1, 2)],
        factors=np.array(found.factors, np.float64).reshape(-1, 2),
    )


class _Chains:
    """Pairs of neighbouring poles that are nearly the same: one of each pair is deflated, the next pair looked at."""

    def __init__(
        self, d: NDArray[np.float64], z: NDArray[np.float64], kinds: NDArray[np.int64], tolerance: float
    ) -> None:
        self.d, self.z, self.kinds, self.kept = d, z, kinds, np.ones(len(d), bool)
        self.pairs: list[tuple[int, int]] = []
        self.factors: list[tuple[float, float]] = []
        # Few pairs are close, and are looked for all at once. The second one of a pair that is rotated changes.
        close = np.abs((d[1:] - d[:-1]) * z[1:] * z[:-1]) <= tolerance * (z[1:] * z[1:] + z[:-1] * z[:-1])
        at = 0
        for start in np.flatnonzero(close).tolist():
            at = max(at, start)
            while at + 1 < len(d) and self._rotate(at, tolerance):
                at += 1

    def _rotate(self, at: int, tolerance: float) -> bool:
        """Deflate a pole against the next one if they are close; return whether they are."""
        d, z = self.d, self.z
        p, q, gap = float(z[at]), float(z[at + 1]), float(d[at + 1] - d[at])
        length = (p * p + q * q) ** 0.5
        c, s = q / length, -p / length
        if abs(gap * c * s) > tolerance:
            return False
        z[at], z[at + 1] = 0.0, length
        low, high = float(d[at]), float(d[at + 1])
        d[at], d[at + 1] = low * c * c + high * s * s, low * s * s + high * c * c
        if self.kinds[at] != self.kinds[at + 1]:
            self.kinds[at + 1] = _BOTH
        self.kept[at] = False
        self.pairs.append((at, at + 1))
        self.factors.append((c, s))
        return True


# Eigenvalues and eigenvectors of a symmetric tridiagonal matrix by divide and conquer, on one or several ranks


# Parts of at most this order are LAPACK's.
_LEAF = 256
# Elements of U that are made at once.
_PANEL_ELEMENTS = 2**26
# Small parts that are solved at the same time on a host of GPUs.
_THREADS = 8

Vector = NDArray[np.float64]
Pair = tuple[Vector, Vector]


class Ends(NamedTuple):
    """The data of a part for others: its eigenvalues and one row of its eigenvectors, in the order of Z's columns."""

    values: Vector
    row: Vector


class Products(Protocol):
    """The products of matrices, as `dask_distmm.engines.factor.Kernels` has them."""

    @property
    def xp(self) -> Any:
        """The array module: numpy or cupy."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before their work is done."""
        ...

    @property
    def merging(self) -> Merging:
        """The parts of a merge beside products."""
        ...

    def empty(self, shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return a column-major matrix whose elements may be anything."""
        ...

    def gemm(self, a: Any, b: Any, c: Any, op_a: str = "N", op_b: str = "N", *, alpha: float, beta: float) -> None:
        """Compute ``c = alpha op(a) op(b) + beta c``."""
        ...

    def host(self, a: Any) -> NDArray[Any]:
        """Return an array of any shape on the host."""
        ...


def row_bounds(order: int, ranks: int) -> list[int]:
    """Return the first row of each rank, and behind the last one the order of the matrix."""
    return [order * rank // ranks for rank in range(ranks + 1)]


class DivideAndConquer:
    """One rank's part of divide and conquer."""

    def __init__(
        self,
        kernels: Products,
        talk: Messages,
        place: tuple[int, int],
        matrix: tuple[Vector, Vector],
        memory: tuple[Any, Any],
        *,
        rounding: float = 2.0**-53,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._kernels, self._talk, (self._rank, self._ranks), self._check = kernels, talk, place, check
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
            found = dict(zip(leaves, pool.map(self._leaf, leaves), strict=True))
        values = self._across(0, self._ranks, found)
        columns = np.argsort(values, kind="stable")[first : last + 1]
        return values[columns] * self._unit, columns

    def _leaf(self, leaf: tuple[int, int]) -> Pair:
        """Return eigenvalues and eigenvectors of a small part."""
        d, e = self._d[slice(*leaf)], self._e[leaf[0] : leaf[1] - 1]
        found = np.linalg.eigh(np.diag(d) + np.diag(e, -1))
        return found[0], found[1]

    def _across(self, low: int, high: int, leaves: Mapping[tuple[int, int], Pair]) -> Vector:
        """Return the eigenvalues of the part of some ranks, of which this is one."""
        if high - low == 1:
            return self._local(self._rows.start, self._rows.stop, leaves)
        middle = (low + high) // 2
        mine = (low, middle) if self._rank < middle else (middle, high)
        values = self._across(*mine, leaves)
        start, cut, stop = self._bounds[low], self._bounds[middle], self._bounds[high]
        ends = []
        sides: tuple[tuple[str, int, int, slice], ...] = (
            ("above", middle - 1, cut - 1, slice(start, cut)),
            ("below", middle, cut, slice(cut, stop)),
        )
        for part, owner, row, columns in sides:
            if owner == self._rank:
                ends.append(Ends(values, self._row(row, columns)))
                self._talk.publish(part, middle, ends[-1])
            else:
                ends.append(Ends(*self._talk.fetch(part, middle, owner)))
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
        above = Ends(first, self._row(middle - 1, slice(start, middle)))
        return self._merge(start, middle, stop, above, Ends(second, self._row(middle, slice(middle, stop))))

    def _row(self, row: int, columns: slice) -> Vector:
        """Return a part of a row of eigenvectors, on the host."""
        return np.array(self._kernels.host(self._z[row - self._rows.start, columns]))

    def _merge(self, start: int, middle: int, stop: int, above: Ends, below: Ends) -> Vector:
        """Merge two parts; return the eigenvalues in the order of the columns of this rank's rows."""
        self._check()
        coupling, first = float(self._e[middle - 1]), middle - start
        row = below.row if coupling >= 0 else -below.row
        merge = deflate(
            np.concatenate([above.values, below.values]),
            np.concatenate([above.row, row]),
            abs(coupling),
            first,
            self._rounding,
        )
        merging, here = self._kernels.merging, slice(*(max(0, edge - self._rows.start) for edge in (start, stop)))
        mine, count = self._z[here, start:stop], len(merge.poles)
        if len(merge.pairs):
            merging.rotate(mine, merge.pairs, merge.factors)
        merging.take(mine, merge.columns, spare := self._spare[: len(mine), : stop - start])
        solved = merging.secular(merge.poles, merge.weights, merge.rho) if count else None
        values = merge.deflated if solved is None else np.concatenate([solved.values, merge.deflated])
        needed = slice(0, count)
        if stop - start == self._order:
            values = self._agreed(values)
            wanted = np.argsort(values, kind="stable")[slice(*self._wanted)]
            roots = np.sort(wanted[wanted < count])
            needed = slice(int(roots[0]), int(roots[-1]) + 1) if len(roots) else slice(0, 0)
        merging.take(spare[:, count:], np.arange(stop - start - count), mine[:, count:])
        if solved is not None:
            cut = min(max(0, middle - self._rows.start - here.start), len(mine))
            self._multiply(merge, solved, (spare, mine), cut, needed)
        return values

    def _agreed(self, values: Vector) -> Vector:
        """Return the eigenvalues of the whole matrix as the first rank has them."""
        if self._ranks == 1:
            return values
        if self._rank == 0:
            self._talk.publish("values", 0, (values,))
            return values
        return self._talk.fetch("values", 0, 0)[0]

    def _multiply(self, merge: Merge, solved: Solved, matrices: tuple[Any, Any], cut: int, needed: slice) -> None:
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
