"""What cuSOLVERMp is asked to do, and how its results are checked: block-cyclic matrices of random numbers.

Nothing is gathered: results are checked by products with a random vector, and by norms.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Elements that are made, masked or summed at a time.
_SLAB = 2**25
# cudaDataType, cublasFillMode, cublasOperation, cusolverEigMode.
_TYPES = {"float32": 0, "float64": 1}
_LOWER, _FULL, _NO_TRANSPOSE = 0, 2, 0
_NO_VECTORS, _VECTORS = 0, 1


@dataclass(frozen=True)
class SolverCase:
    """One routine on one square matrix.

    Attributes
    ----------
    kind
        A name in `JOBS`.
    n, dtype
        Rows and columns, and the name of the type.
    grid, block
        Rows and columns of processes; rows and columns of a block.
    repeat
        Repetitions; the first one counts, too.
    limit
        Seconds after which a repetition is the last one.
    """

    kind: str
    n: int
    dtype: str
    grid: tuple[int, int]
    block: int
    repeat: int = 2
    limit: float = float("inf")
    peer: str = "cusolvermp"
    deadline: float = float("inf")

    @property
    def variant(self) -> str:
        """What is not asked for again where it has ended its processes."""
        return f"{self.kind} {self.grid[0]}x{self.grid[1]} {self.block}"


class Call(NamedTuple):
    """A routine of the library: what it and the question for its workspace get after the handle."""

    name: str
    arguments: tuple[int, ...]
    # If other than those of the routine.
    for_size: tuple[int, ...] | None = None


def _indices(length: int, block: int, place: int, count: int) -> np.ndarray:
    """Return the rows or columns that one place of the grid has."""
    every = np.arange(length)
    found: np.ndarray = every[every // block % count == place]
    rounds, left = divmod(length, block * count)
    assert len(found) == rounds * block + min(max(left - place * block, 0), block)
    return found


class Part:
    """A rank's blocks of a matrix. ``local`` is the transpose of its local array."""

    def __init__(self, ranks: Any, case: SolverCase, grid: int, shape: tuple[int, int]) -> None:
        cp, (across, along) = ranks.cp, case.grid
        rows = _indices(shape[0], case.block, ranks.rank % across, across)
        cols = _indices(shape[1], case.block, ranks.rank // across, along)
        self.ranks, self.shape, self.rows, self.cols = ranks, shape, cp.asarray(rows), cp.asarray(cols)
        # Routines want a pointer of ranks that have nothing, too.
        self._memory = cp.empty(max(1, len(rows) * len(cols)), case.dtype)
        self.local = self._memory[: len(rows) * len(cols)].reshape(len(cols), len(rows))
        _, on_cols, on_rows = np.intersect1d(cols, rows, assume_unique=True, return_indices=True)
        self._diagonal = cp.asarray(on_cols), cp.asarray(on_rows)
        self.desc = ranks.library.bindings.create_matrix_desc(
            grid, _TYPES[case.dtype], *shape, case.block, case.block, 0, 0, max(1, len(rows))
        )

    @property
    def pointer(self) -> int:
        """Where the local array begins."""
        return int(self._memory.data.ptr)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The arguments for the whole matrix: pointer, first row and column, descriptor."""
        return self.pointer, 1, 1, int(self.desc)

    def slabs(self) -> list[slice]:
        """Cut the columns."""
        width = max(1, _SLAB // max(1, self.local.shape[1]))
        return [slice(first, first + width) for first in range(0, len(self.cols), width)]

    def fill(self, diagonal: float) -> None:
        """Put the same random numbers in, whenever it is called, and more on the diagonal."""
        rng = self.ranks.cp.random.default_rng([7, self.ranks.rank])
        for slab in self.slabs():
            self.local[slab] = rng.standard_normal(self.local[slab].shape, dtype=self.local.dtype)
        if diagonal:
            self.local[self._diagonal] += self.local.dtype.type(diagonal)

    def times(self, vector: Any, triangle: str = "", adjoint: bool = False) -> Any:
        """Return the matrix, or a triangle of it (``"lower"``, ``"strict"``, ``"upper"``), times a vector of all."""
        found = self.ranks.cp.zeros(self.shape[1 if adjoint else 0], self.local.dtype)
        for slab in self.slabs():
            part, cols = self._masked(slab, triangle), self.cols[slab]
            if adjoint:
                found[cols] = part @ vector[self.rows]
            else:
                found[self.rows] += part.T @ vector[cols]
        return self.ranks.total(found)

    def sums(self, triangle: str = "") -> tuple[Any, Any]:
        """Return the sum of the squares and that of the diagonal."""
        cp, found = self.ranks.cp, self.ranks.cp.zeros(2, "f8")
        for slab in self.slabs():
            found[0] += (self._masked(slab, triangle).astype("f8") ** 2).sum()
        found[1] += self.local[self._diagonal].astype("f8").sum()
        found = self.ranks.total(found)
        return cp.asarray(found[0]), cp.asarray(found[1])

    def _masked(self, slab: slice, triangle: str) -> Any:
        part, rows, cols = self.local[slab], self.rows[None, :], self.cols[slab][:, None]
        if not triangle:
            return part
        kept = {"lower": rows >= cols, "strict": rows > cols, "upper": rows <= cols}[triangle]
        return self.ranks.cp.where(kept, part, part.dtype.type(0))

    def close(self) -> None:
        """Let the descriptor go."""
        self.ranks.library.bindings.destroy_matrix_desc(self.desc)


class Job:
    """A routine and its matrices. ``calls`` are made one after the other, and the first ``timed`` of them are timed."""

    timed = 1
    diagonal = 0.0
    calls: list[Call]

    def __init__(self, ranks: Any, case: SolverCase, grid: int) -> None:
        self.ranks, self.cp, self.n, self.dtype, self.code = ranks, ranks.cp, case.n, case.dtype, _TYPES[case.dtype]
        self.v = self.cp.asarray(np.random.default_rng(case.n).standard_normal(case.n).astype(case.dtype))
        self._case, self._grid, self._parts = case, grid, list[Part]()
        self.a = self.part()
        self.set_up()

    def set_up(self) -> None:
        """Allocate what else there is, and say what is called."""
        raise NotImplementedError

    def part(self, columns: int = 0) -> Part:
        """Return one more matrix of n rows, n columns if not given otherwise."""
        self._parts.append(Part(self.ranks, self._case, self._grid, (self.n, columns or self.n)))
        return self._parts[-1]

    def fill(self) -> None:
        """Make the input."""
        self.a.fill(self.diagonal * self.n)

    def expected(self) -> Any:
        """Return what `found` must be, before the routine is called."""
        return self.a.times(self.v)

    def found(self) -> Any:
        """Return the same out of the results."""
        raise NotImplementedError

    def symmetric(self) -> Any:
        """Return the matrix whose lower triangle is given, times the vector."""
        return self.a.times(self.v, "lower") + self.a.times(self.v, "strict", adjoint=True)

    def close(self) -> None:
        """Let the descriptors go."""
        for part in self._parts:
            part.close()


class Cholesky(Job):
    """potrf of the lower triangle."""

    diagonal = 2.0

    def set_up(self) -> None:
        """Say what is called."""
        self.calls = [Call("potrf", (_LOWER, self.n, *self.a.place))]

    def expected(self) -> Any:
        """Return A v."""
        return self.symmetric()

    def found(self) -> Any:
        """Return L (L^T v)."""
        return self.a.times(self.a.times(self.v, "lower", adjoint=True), "lower")


class Lu(Job):
    """getrf; checked by a solution."""

    def set_up(self) -> None:
        """Allocate the pivots and the right-hand side."""
        self.b, self.right = self.part(1), self.v
        # As many as there are local columns; more do no harm.
        self.pivots = self.cp.zeros(self.n + self._case.block, np.int64)
        n, a, b, pivots = self.n, self.a.place, self.b.place, int(self.pivots.data.ptr)
        self.calls = [Call("getrf", (n, n, *a, pivots)), Call("getrs", (_NO_TRANSPOSE, n, 1, *a, pivots, *b))]

    def fill(self) -> None:
        """Make A, and b = A v once that is known."""
        super().fill()
        if len(self.b.cols):
            self.b.local[0] = self.right[self.b.rows]

    def expected(self) -> Any:
        """Return A v, which is b, too: with b = v the solution would be large, and its residual with it."""
        self.right = super().expected()
        self.fill()
        return self.right

    def found(self) -> Any:
        """Return A x."""
        x = self.b.times(self.cp.ones(1, self.dtype))
        self.a.fill(self.diagonal * self.n)
        return self.a.times(x)


class Solve(Lu):
    """getrf and getrs."""

    timed = 2


class Qr(Job):
    """geqrf."""

    def set_up(self) -> None:
        """Allocate the factors of the reflectors."""
        self.tau = self.cp.zeros(self.n + self._case.block, self.dtype)
        size = self.n, self.n, *self.a.place
        self.calls = [Call("geqrf", (*size, int(self.tau.data.ptr)), size)]

    def expected(self) -> Any:
        """Return A^T (A v)."""
        return self.a.times(self.a.times(self.v), adjoint=True)

    def found(self) -> Any:
        """Return R^T (R v)."""
        return self.a.times(self.a.times(self.v, "upper"), "upper", adjoint=True)


class Eigh(Job):
    """syevd of the lower triangle with vectors."""

    job = b"V"

    def set_up(self) -> None:
        """Allocate values and vectors."""
        self.q, self.w = self.part(), self.cp.zeros(self.n, self.dtype)
        self._text = ctypes.create_string_buffer(self.job)
        w = int(self.w.data.ptr)
        self.calls = [Call("syevd", (ctypes.addressof(self._text), _LOWER, self.n, *self.a.place, w, *self.q.place))]

    def expected(self) -> Any:
        """Return A v."""
        return self.symmetric()

    def found(self) -> Any:
        """Return Q (w Q^T v)."""
        return self.q.times(self.w * self.q.times(self.v, adjoint=True))


class Eigvalsh(Eigh):
    """syevd of the lower triangle without vectors."""

    job = b"N"

    def expected(self) -> Any:
        """Return the Frobenius norm and the trace."""
        (lower, trace), (strict, _) = self.a.sums("lower"), self.a.sums("strict")
        return self.cp.stack([self.cp.sqrt(lower + strict), trace])

    def found(self) -> Any:
        """Return the same of the values."""
        w = self.w.astype("f8")
        return self.cp.stack([self.cp.sqrt((w**2).sum()), w.sum()])


class Svd(Job):
    """gesvd with all vectors."""

    vectors = _VECTORS

    def set_up(self) -> None:
        """Allocate values and vectors."""
        self.s, places = self.cp.zeros(self.n, self.dtype), [(0, 1, 1, 0)] * 2
        if self.vectors:
            self.u, self.vt = self.part(), self.part()
            places = [self.u.place, self.vt.place]
        s = int(self.s.data.ptr)
        self.calls = [
            Call("gesvd", (0, self.vectors, self.vectors, self.n, self.n, *self.a.place, s, *places[0], *places[1]))
        ]

    def found(self) -> Any:
        """Return U (s V^T v)."""
        return self.u.times(self.s * self.vt.times(self.v))


class Svdvals(Svd):
    """gesvd without vectors."""

    vectors = _NO_VECTORS

    def expected(self) -> Any:
        """Return the Frobenius norm."""
        return self.cp.sqrt(self.a.sums()[0]).reshape(1)

    def found(self) -> Any:
        """Return the same of the values."""
        return self.cp.sqrt((self.s.astype("f8") ** 2).sum()).reshape(1)


class Polar(Job):
    """The polar decomposition."""

    def set_up(self) -> None:
        """Allocate the Hermitian factor."""
        self.h = self.part()
        self.calls = [Call("polar", (0, _FULL, self.n, self.n, *self.a.place, *self.h.place))]

    def found(self) -> Any:
        """Return U (H v)."""
        return self.a.times(self.h.times(self.v))


JOBS: dict[str, type[Job]] = {
    **{"cholesky": Cholesky, "lu": Lu, "solve": Solve, "qr": Qr},
    **{"eigh": Eigh, "eigvalsh": Eigvalsh, "svd": Svd, "svdvals": Svdvals, "polar": Polar},
}
