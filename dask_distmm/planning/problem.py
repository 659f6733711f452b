"""A Problem says what is to be multiplied; planning turns it into a Plan.

It is a frozen value, which crosses the network. How a matrix is to lie on the workers, as a user says it::

    Slab(0) on 3 workers        Slab(1) on 3 workers       BlockCyclic((2, 2), (4, 3)) on 4 workers
    +-----------+  worker 0     +---+---+---+              +---+---+---+
    +-----------+  worker 1     | 0 | 1 | 2 |              | 0 | 1 | 0 |
    +-----------+  worker 2     +---+---+---+              | 2 | 3 | 2 |
                                                           +---+---+---+

Which worker is which rank is the order of the workers, along the rows of a grid first.

The peer engine's products are cuBLASLt's. It computes the transpose of D, so a value for each column of D is native to
it; and an element of D must be computed in one go (see `schedule.native`). With 16-bit types its epilogs are not
exact either where extents or addresses are odd (measured: some algorithms round the product first, up to 31 times the
bound, some make 0 of relu(NaN), some refuse); with float32 and float64 they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.compat import cached_property
from dask_distmm.errors import PlanError
from dask_distmm.layout import Layout, ProcessGrid
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import COMPUTE_TYPES, FP8, dtype_from_name, operand_dtype, sum_dtype
from dask_distmm.planning.computation import Computation, NamedMatrix


@dataclasses.dataclass(frozen=True, slots=True)
class Slab:
    """Consecutive rows (or columns) for each worker: ``ceil(length / workers)`` of them, the last ones fewer or none.

    Parameters
    ----------
    axis : int
        The axis that is cut: 0 for slabs of rows, 1 for slabs of columns; -2 and -1 mean the same.

    Raises
    ------
    PlanError
        A matrix has no such axis.

    See Also
    --------
    BlockCyclic, distribute, matmul
    """

    axis: int

    def __post_init__(self) -> None:
        """Check the axis."""
        if isinstance(self.axis, bool) or self.axis not in (-2, -1, 0, 1):
            raise PlanError(f"Slab(axis={self.axis!r}): expected 0 for slabs of rows or 1 for slabs of columns")
        object.__setattr__(self, "axis", int(self.axis) % 2)

    def layout(self, shape: tuple[int, int], nranks: int) -> Layout:
        """Return which element of a matrix is on which of `nranks` ranks."""
        size = max(1, -(-shape[self.axis] // nranks))
        blocks = (size, max(1, shape[1])) if self.axis == 0 else (max(1, shape[0]), size)
        return Layout(shape, blocks, ProcessGrid(*((nranks, 1) if self.axis == 0 else (1, nranks))))


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCyclic:
    """Blocks of one size, distributed round-robin over a grid of workers (ScaLAPACK's layout).

    Parameters
    ----------
    grid : tuple of int
        Rows and columns of the grid of workers; block (i, j) is on that at ``(i % grid[0], j % grid[1])``.
    blocks : tuple of int
        Rows and columns of a block.

    Raises
    ------
    PlanError
        These are not two positive numbers each.

    See Also
    --------
    Slab, distribute, matmul
    """

    grid: tuple[int, int]
    blocks: tuple[int, int]

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("grid", "blocks"):
            sides = getattr(self, name)
            try:
                pair = tuple(int(x) for x in sides)
                good = len(pair) == 2 and min(pair) >= 1 and all(x == y for x, y in zip(pair, sides, strict=True))
            except (TypeError, ValueError):
                good = False
            if not good:
                raise PlanError(f"BlockCyclic({name}={sides!r}): expected two positive numbers, of rows and columns")
            object.__setattr__(self, name, pair)

    def layout(self, shape: tuple[int, int], nranks: int) -> Layout:
        """Return which element of a matrix is on which of the grid's ranks."""
        return Layout(shape, self.blocks, ProcessGrid(*self.grid))


Distribution = Slab | BlockCyclic
# Of A, B and D; None leaves the choice to the planner.
Distributions = tuple[Distribution | None, Distribution | None, Distribution | None]
FREE: Distributions = (None, None, None)


# The formulas that NVIDIA's libraries can do inside of a multiply

NATIVE_EPILOGS = ("relu", "gelu", "bias", "relu_bias", "gelu_bias")


def library_epilog(problem: Problem) -> str | None:
    """Return the epilog that NVIDIA's libraries have for a formula, ``""`` for only a factor, or None."""
    formula, dtype = problem.formula, problem.result_type
    more = formula.function or formula.amax or formula.partial or formula.scales or formula.scale_d != 1
    if formula.trivial or more or complex(*formula.beta) != 0 or problem.matrix_types != (problem.d.dtype,) * 2:
        return None
    if not formula.epilog or formula.operand_sum:
        return ""
    inexact = dtype.kind == "c" or (dtype == np.float64 and formula.activation == "gelu")
    return None if inexact or formula.epilog not in NATIVE_EPILOGS else str(formula.epilog)


# A part of a multiply as a problem of its own: where only some chunks of D are wanted, or others are there already


# The axes of an operand; those of C and other inputs are D's.
AXES = {"a": "mk", "b": "kn"}


@functools.lru_cache(maxsize=16)
def common_edges(problem: Problem, axis: str) -> tuple[int, ...]:
    """Return where an axis, of ``"m"``, ``"n"`` and ``"k"``, can be cut: at edges of all chunks along it."""
    edges = ({0, *itertools.accumulate(sizes)} for sizes in problem.chunkings(axis))
    return tuple(sorted(set.intersection(*edges)))


def restrict(problem: Problem, wanted: Collection[int]) -> Problem | None:
    """Return the problem whose D is the least part of another's that has some chunks, cut where all chunks are.

    Chunks have the numbers that they have for the user, also where the problem itself is a part.
    """
    of_d, marks = problem.d.in_whole, dict[str, NDArray[np.bool_]]()
    if problem.laid_out or any(0 in sizes for axis in "mn" for sizes in problem.chunkings(axis)):
        return None
    places = divmod(np.array(sorted(wanted), np.int64), of_d[2])
    for at, axis in enumerate("mn"):
        sizes, edges = problem.d.chunks[at], np.array(common_edges(problem, axis))
        starts = (np.cumsum(sizes) - sizes)[np.searchsorted(of_d[at], places[at])]
        # All between two common edges is needed where any chunk there is.
        needed = np.searchsorted(edges, starts, "right") - 1
        marks[axis] = np.isin(np.arange(len(edges) - 1), needed).repeat(np.diff(edges))
    if all(mask.all() for mask in marks.values()):
        return None

    def kept(axis: str, sizes: Sequence[int]) -> list[int]:
        # Neither k nor what is broadcast along an axis is cut.
        is_cut = axis != "k" and sum(sizes) == len(marks[axis])
        chunks = np.flatnonzero(marks[axis][np.cumsum(sizes) - sizes]) if is_cut else np.arange(len(sizes))
        return list(chunks.tolist())

    taken = {}
    for name in (*problem.operands, "d"):
        axes, chunks = AXES.get(name, "mn"), problem[name].chunks
        taken[name] = kept(axes[0], chunks[0]), kept(axes[1], chunks[1])
    return part_of(problem, taken, whole=problem.result_name, method="auto")


def part_of(
    problem: Problem, taken: Mapping[str, tuple[Sequence[int], Sequence[int]]], *, array: str = "", **changes: Any
) -> Problem:
    """Return the problem of some rows and columns of chunks of its matrices; inputs that are not named are left out.

    A's and B's chunks are those of `array`. ``"partial"`` are sums of D that an earlier run has left.
    """
    every = list(problem.matrices)
    if "partial" in taken and "partial" not in problem.operands:
        every.append(dataclasses.replace(problem.d, name="partial", dtype=problem.compute_type.name))
    matrices = (matrix.part(*taken[matrix.name], array=array) for matrix in every if matrix.name in taken)
    d = problem.d.part(*taken["d"])
    return dataclasses.replace(problem, matrices=tuple(matrices), wanted=(d,), same=False, **changes)


# A Problem says what is to be multiplied; planning turns it into a Plan


METHODS = ("local", "allgather", "reducescatter", "allreduce", "summa")


# The same types come again and again.
@functools.lru_cache(maxsize=256)
def _resolved(a_dtype: str, b_dtype: str, dtype: str, k: int) -> tuple[np.dtype, np.dtype, tuple[str, str]]:
    """Return what A and B are promoted to, what is computed in, and what a GPU library is given A and B in."""
    operand = operand_dtype(dtype_from_name(a_dtype), dtype_from_name(b_dtype))
    compute = sum_dtype(operand, dtype_from_name(dtype), k)
    if a_dtype in FP8:
        # No GPU multiplies E5M2 by itself; all of its numbers are float16's.
        passed = ("float16", "float16") if a_dtype == b_dtype == "float8_e5m2" else (a_dtype, b_dtype)
        return operand, compute, passed
    name = compute.name if operand.kind in "iu" else operand.name
    return operand, compute, (name, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(Computation):
    """One multiply ``D = F(A @ B)``: A is m x k, B is k x n, D is m x n.

    Its matrices are A, B, and those that the formula reads beside them; D is wanted.
    """

    kind: ClassVar[str] = "product"

    # B is A: its chunks are needed once.
    same: bool = False
    # The formula but for the product.
    formula: Formula = dataclasses.field(default_factory=Formula)
    # How it is multiplied, one of `COMPUTE_TYPES`; empty for as usual.
    compute: str = ""
    # How A, B and D must lie on the ranks; None leaves the choice to the planner.
    distributions: Distributions = FREE
    # The only p x q x s that may be taken, with `method`; None leaves the choice to the planner.
    grid: tuple[int, int, int] | None = None
    # Whether other runs continue with D, or it continues with others': chunks must lie where those of all such runs do.
    stationary: bool = False
    # The operand, ``"a"`` or ``"b"``, that every worker is to keep whole after the run; empty for none.
    gathered: str = ""

    def __post_init__(self) -> None:
        if len(self.matrices) < 2 or len(self.wanted) != 1:
            raise ValueError(f"{len(self.matrices)} matrices and {len(self.wanted)} results of a product")
        (m, k), (b_rows, n) = self.a.shape, self.b.shape
        if k != b_rows:
            raise PlanError(f"A has {k} columns, B {b_rows} rows: they must agree")
        for axis, size in enumerate((m, n)):
            if self.d.shape[axis] != size:
                text = f"out_chunks[{axis}] adds up to {self.d.shape[axis]}, the result's shape says {size}"
                raise PlanError(f"{text}: pass chunk sizes that add up to it")

    @property
    def a(self) -> NamedMatrix:
        """The first factor."""
        return self.matrices[0]

    @property
    def b(self) -> NamedMatrix:
        """The second factor."""
        return self.matrices[1]

    @property
    def d(self) -> NamedMatrix:
        """The result."""
        return self.wanted[0]

    @property
    def extras(self) -> tuple[NamedMatrix, ...]:
        """The matrices that the formula reads."""
        return self.matrices[2:]

    @property
    def m(self) -> int:
        """Rows of A and D."""
        return self.a.shape[0]

    @property
    def n(self) -> int:
        """Columns of B and D."""
        return self.b.shape[1]

    @property
    def k(self) -> int:
        """Columns of A and rows of B, which are summed over."""
        return self.a.shape[1]

    def chunkings(self, axis: str) -> list[tuple[int, ...]]:
        """Return the chunk sizes along ``"m"``, ``"n"`` or ``"k"`` of D and all that is not broadcast along it."""
        if axis == "k":
            return [self.a.chunks[1], self.b.chunks[0]]
        at = "mn".index(axis)
        inputs = (extra for extra in self.extras if extra.shape[at] == self.d.shape[at])
        return [matrix.chunks[at] for matrix in (self.d, self.matrices[at], *inputs)]

    @property
    def flops(self) -> float:
        """Floating-point operations: 2 m n k, four times as many for complex types."""
        return 2.0 * self.m * self.n * self.k * (4 if self.result_type.kind == "c" else 1)

    @cached_property
    def result_type(self) -> np.dtype:
        """NumPy type of D."""
        return dtype_from_name(self.d.dtype)

    @cached_property
    def _types(self) -> tuple[np.dtype, np.dtype, tuple[str, str]]:
        return _resolved(self.a.dtype, self.b.dtype, self.d.dtype, self.k)

    @property
    def operand_type(self) -> np.dtype:
        """NumPy type that A and B are promoted to."""
        return self._types[0]

    @property
    def compute_type(self) -> np.dtype:
        """NumPy type that is computed and summed in."""
        return self._types[1]

    @property
    def matrix_types(self) -> tuple[str, str]:
        """Names of the types in which a GPU library is given A and B; no information is lost on the way to these."""
        return self._types[2]

    @property
    def fp8(self) -> bool:
        """Whether a GPU library is given FP8."""
        return self.matrix_types[0] in FP8

    @property
    def finished(self) -> bool:
        """Whether anything is done on GPUs between what the library returns and what is stored."""
        return not self.formula.trivial or self.d.dtype in FP8 or self.result_type.kind in "iu"

    @property
    def sum_type(self) -> np.dtype:
        """NumPy type in which a GPU library is to return D: not rounded yet where something is done to it."""
        return self.compute_type if self.finished else self.result_type

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands of which a run is given the chunks: B is not among them where it is A."""
        return tuple(name for name in self.operands if name != "b" or not self.same)

    @property
    def outputs(self) -> tuple[NamedMatrix, ...]:
        """D, and the auxiliary outputs that the run makes chunk by chunk of it."""
        outputs = [self.d]
        for name in self.formula.per_element:
            rows, cols = (
                sizes if kept else (1,) * len(sizes)
                for sizes, kept in zip(self.d.chunks, self.formula.keeps(name), strict=True)
            )
            dtype = self.formula.dtype_of(name, self.result_type).name
            outputs.append(NamedMatrix(name, (rows, cols), dtype, numbers=self.d.numbers))
        return tuple(outputs)

    @property
    def dtypes_of_work(self) -> tuple[str, str, str]:
        """Names of the types of A, B and D."""
        return self.a.dtype, self.b.dtype, self.d.dtype

    @property
    def shared(self) -> bool:
        """Whether A and B are made of the same chunks, as in ``X.T @ X``, so that each is held once."""
        return self.same or bool(self.a.array and self.a.array == self.b.array)

    @property
    def accumulates_in_place(self) -> bool:
        """Whether sums of an earlier run can grow in place: their type is that of D."""
        return self.formula.partial and self.result_type == self.compute_type

    @property
    def remedies(self) -> list[str]:
        """Remedies to suggest if a product does not fit in memory, as it was requested."""
        remedies = ["use a larger grid"] if self.grid is not None else super().remedies
        remedies += ["use method='auto'"] * (self.grid is None and self.method not in ("auto", "local"))
        remedies += ["leave out epilog 'allreduce'"] * self.formula.replicated
        return remedies + [f"leave out gathered={self.gathered!r}"] * bool(self.gathered)

    @property
    def laid_out(self) -> bool:
        """Whether the user has set the places of matrices: by distributions, a grid, or replication."""
        return any(self.distributions) or self.grid is not None or self.replicated

    @property
    def replicated(self) -> bool:
        """Whether every worker is to keep all of D, or of an operand."""
        return bool(self.formula.replicated or self.gathered)

    def varies(self, name: str) -> tuple[bool, bool]:
        """Whether an input of the formula has values along rows and columns of D; an axis of length 1 is broadcast."""
        rows, cols = self[name].shape
        return rows == self.m, cols == self.n

    def source_of(self, operand: str) -> str:
        """Return the name of the input whose chunks are those of an operand: A's for B where these are the same."""
        return "a" if operand == "b" and self.same else operand

    def check(self) -> None:
        """Raise for inconsistent fields."""
        super().check()
        self.compute_type, self.result_type  # noqa: B018 - the types must exist
        if self.operands[:2] != ("a", "b") or self.d.name:
            raise ValueError(f"a product of {self.operands[:2]} called {self.d.name!r}")
        if self.compute not in ("", *COMPUTE_TYPES) or self.gathered not in ("", "a", "b"):
            raise ValueError(f"compute {self.compute!r}, gathered {self.gathered!r}")


def is_gram(problem: Problem) -> bool:
    """Whether D is symmetric, or Hermitian, because B is A transposed, or conjugated too, as in ``X.T @ X``."""
    a, b = problem.a, problem.b
    across = a.transposed != b.transposed and not problem.same
    hermitian = problem.shared and across and (problem.operand_type.kind != "c" or a.conjugated != b.conjugated)
    # One array of bytes can be two matrices of FP8, and a part can have rows and columns of D that are not the same.
    return hermitian and a.dtype == b.dtype and _along(a, 0) == _along(b, 1)


def _along(matrix: NamedMatrix, axis: int) -> tuple[Any, Any]:
    """Return sizes and numbers of a matrix' chunks along an axis."""
    return matrix.chunks[axis], matrix.in_whole[axis]
