"""A Problem says what is to be multiplied; planning turns it into a Plan.

It is a frozen value, which crosses the network.

The peer engine's products are cuBLASLt's. It computes the transpose of D, so a value for each column of D is native to
it; and an element of D must be computed in one go (see `schedule.native`). With 16-bit types its epilogs are not
exact either where extents or addresses are odd (measured: some algorithms round the product first, up to 31 times the
bound, some make 0 of relu(NaN), some refuse); with float32 and float64 they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import Options
from dask_distmm.errors import PlanError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import COMPUTE_TYPES, FP8, dtype_from_name, operand_dtype, sum_dtype
from dask_distmm.planning.computation import Chunks, Computation, NamedMatrix, Part
from dask_distmm.planning.distribution import FREE, Distributions

# The formulas that NVIDIA's libraries can do inside of a multiply. Pure


NATIVE_EPILOGS = ("relu", "gelu", "bias", "relu_bias", "gelu_bias")


def library_epilog(problem: Problem) -> str | None:
    """Return the epilog that NVIDIA's libraries have for a formula, ``""`` for only a factor, or None."""
    formula, dtype = problem.formula, problem.result_type
    more = formula.function or formula.amax or formula.partial or formula.scales or formula.scale_d != 1
    if formula.trivial or more or complex(*formula.beta) != 0 or problem.matrix_types != (problem.dtype,) * 2:
        return None
    if not formula.epilog or formula.operand_sum:
        return ""
    inexact = dtype.kind == "c" or (dtype == np.float64 and formula.activation == "gelu")
    return None if inexact or formula.epilog not in NATIVE_EPILOGS else str(formula.epilog)


# A part of a multiply as a problem of its own: where only some chunks of D are wanted, or others are there already


# The axes of an operand; those of C and other inputs are D's.
AXES = {"a": "mk", "b": "kn"}


def restrict(problem: Problem, wanted: Collection[int]) -> Problem | None:
    """Return the problem whose D is the least part of another's that has some chunks, cut where all chunks are.

    Chunks have the numbers that they have for the user, also where the problem itself is a part.
    """
    if any(problem.distributions) or problem.grid or problem.replicated:
        return None
    extras = [extra.chunks for extra in problem.extras]
    sizes = ([problem.out_chunks[0], problem.a_chunks[0]], [problem.out_chunks[1], problem.b_chunks[1]])
    at = np.divmod(np.asarray(sorted(wanted), np.int64), problem.columns(""))
    marks: list[NDArray[np.bool_]] = []
    for axis, length in enumerate((problem.m, problem.n)):
        # An input that is broadcast along an axis is needed whole.
        long = [*sizes[axis], *(chunks[axis] for chunks in extras if sum(chunks[axis]) == length)]
        if any(0 in chunking for chunking in long):
            return None
        numbers_here = np.unique(at[axis])
        if problem.part is not None:
            numbers_here = np.searchsorted(problem.part.of("d")[axis], numbers_here)
        marks.append(_mark(long, numbers_here, length))
    if all(mask.all() for mask in marks):
        return None

    def kept(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows and columns of chunks that are left of a matrix."""
        found = []
        for axis, along, chunking in zip((0, 1), AXES.get(name, "mn"), problem.chunks_of(name), strict=True):
            # Neither k nor what is broadcast is cut.
            is_cut = along != "k" and sum(chunking) == len(marks[axis])
            starts = np.cumsum(chunking) - chunking
            found.append(np.flatnonzero(marks[axis][starts]) if is_cut else np.arange(len(chunking)))
        return tuple(found[0].tolist()), tuple(found[1].tolist())

    taken = {name: kept(name) for name in (*problem.operands, "d")}
    return part_of(problem, taken, problem.result_name, method="auto", same=False, arrays=("", ""))


def part_of(
    problem: Problem, taken: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], whole: str, **changes: Any
) -> Problem:
    """Return the problem of some rows and columns of chunks of its matrices; inputs that are not named are left out."""
    numbers, chunks = [], {}
    for name, (rows, cols) in taken.items():
        own = problem.out_chunks if name == "partial" and name not in problem.operands else problem.chunks_of(name)
        before = (range(len(own[0])), range(len(own[1])), len(own[1]))
        of_rows, of_cols, ncols = before if problem.part is None else problem.part.of(name)
        numbers.append((name, tuple(of_rows[i] for i in rows), tuple(of_cols[j] for j in cols), ncols))
        chunks[name] = tuple(own[0][i] for i in rows), tuple(own[1][j] for j in cols)
    extras = [dataclasses.replace(one, chunks=chunks[one.name]) for one in problem.extras if one.name in chunks]
    if "partial" in chunks and "partial" not in problem.operands:
        extras.append(NamedMatrix("partial", chunks["partial"], problem.compute_type.name))
    return dataclasses.replace(
        problem,
        a_chunks=chunks["a"],
        b_chunks=chunks["b"],
        out_chunks=chunks["d"],
        extras=tuple(extras),
        part=Part(tuple(numbers), whole),
        **changes,
    )


def _mark(chunkings: Sequence[Sequence[int]], chunks: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Mark the elements of an axis from one common edge of all chunkings to another that have any of these chunks."""
    ends = [np.cumsum(sizes) for sizes in chunkings]
    common = np.concatenate([[0], ends[0][np.all([np.isin(ends[0], other) for other in ends], axis=0)]])
    marked = np.zeros(length, bool)
    for chunk in chunks.tolist():
        start = int(ends[0][chunk] - chunkings[0][chunk])
        at = int(np.searchsorted(common, start, "right"))
        marked[common[at - 1] : common[at]] = True
    return marked


# A Problem says what is to be multiplied; planning turns it into a Plan


METHODS = ("local", "allgather", "reducescatter", "allreduce", "summa")


# Asked for each chunk, while GPUs wait.
@functools.lru_cache(maxsize=256)
def _types(a_dtype: str, b_dtype: str, dtype: str, k: int) -> tuple[np.dtype, np.dtype, tuple[str, str]]:
    """Return what A and B are promoted to, what is computed in, and what a GPU library is given A and B in."""
    operand = operand_dtype(dtype_from_name(a_dtype), dtype_from_name(b_dtype))
    compute = sum_dtype(operand, dtype_from_name(dtype), k)
    if a_dtype in FP8:
        # No GPU multiplies E5M2 by itself; all of its numbers are float16's.
        given = ("float16", "float16") if a_dtype == b_dtype == "float8_e5m2" else (a_dtype, b_dtype)
        return operand, compute, given
    name = compute.name if operand.kind in "iu" else operand.name
    return operand, compute, (name, name)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem(Computation):
    """One multiply ``D = F(A @ B)``: A is m x k, B is k x n, D is m x n."""

    kind: ClassVar[str] = "product"
    overwrite_a: ClassVar[bool] = False

    # Name of the result array; names the multiply everywhere.
    name: str
    # Dask's chunk sizes along both axes.
    a_chunks: Chunks
    b_chunks: Chunks
    out_chunks: Chunks
    # Names of the types of A, B and D.
    a_dtype: str
    b_dtype: str
    dtype: str
    # As asked for; ``"auto"`` leaves the choice to the cost model.
    method: str
    engine: str
    # Addresses to use, or their number, or None for all.
    workers: tuple[str, ...] | int | None
    # B is A: its chunks are needed once.
    same: bool
    # What the run needs of the client's configuration.
    options: Options
    # What the chunks of D are: ``"numpy"`` or ``"cupy"``.
    array: str = "numpy"
    # Further arrays that the formula reads, and the formula but for the product.
    extras: tuple[NamedMatrix, ...] = ()
    formula: Formula = dataclasses.field(default_factory=Formula)
    # How it is multiplied, one of `COMPUTE_TYPES`; empty for as usual.
    compute: str = ""
    # How A, B and D must lie on the ranks; None leaves the choice to the planner.
    distributions: Distributions = FREE
    # The only p x q x s that may be taken, with `method`; None leaves the choice to the planner.
    grid: tuple[int, int, int] | None = None
    # Names of the arrays whose chunks A's and B's are; empty where nothing of them may be on the workers already.
    arrays: tuple[str, str] = ("", "")
    # Whether A and B are the transposes, of which views are taken, and the conjugates of these.
    transposed: tuple[bool, bool] = (False, False)
    conjugated: tuple[bool, bool] = (False, False)
    # The part of a larger multiply that this is, or None.
    part: Part | None = None
    # Whether other runs continue with D, or it continues with others': chunks must lie where those of all such runs do.
    stationary: bool = False
    # The operand, ``"a"`` or ``"b"``, that every worker is to keep whole after the run; empty for none.
    gathered: str = ""
    # Whether ranks make the chunks of A and of B themselves when they need them; none is in memory before.
    by_ranks: tuple[bool, bool] = (False, False)
    m: int = dataclasses.field(init=False, repr=False, compare=False)
    n: int = dataclasses.field(init=False, repr=False, compare=False)
    k: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        (m, k), (b_rows, n) = (tuple(map(sum, chunks)) for chunks in (self.a_chunks, self.b_chunks))
        if k != b_rows:
            raise PlanError(f"A has {k} columns, B {b_rows} rows: they must agree")
        for axis, size in enumerate((m, n)):
            if sum(self.out_chunks[axis]) != size:
                text = f"out_chunks[{axis}] adds up to {sum(self.out_chunks[axis])}, the result's shape says {size}"
                raise PlanError(f"{text}: pass chunk sizes that add up to it")
        for name, value in (("m", m), ("n", n), ("k", k)):
            object.__setattr__(self, name, value)

    @property
    def flops(self) -> float:
        """Floating-point operations: 2 m n k, four times as many for complex types."""
        return 2.0 * self.m * self.n * self.k * (4 if self.result_type.kind == "c" else 1)

    @property
    def result_type(self) -> np.dtype:
        """NumPy type of D."""
        return dtype_from_name(self.dtype)

    @property
    def operand_type(self) -> np.dtype:
        """NumPy type that A and B are promoted to."""
        return _types(self.a_dtype, self.b_dtype, self.dtype, self.k)[0]

    @property
    def compute_type(self) -> np.dtype:
        """NumPy type that is computed and summed in."""
        return _types(self.a_dtype, self.b_dtype, self.dtype, self.k)[1]

    @property
    def fp8(self) -> bool:
        """Whether a GPU library is given FP8."""
        return self.matrix_types[0] in FP8

    @property
    def matrix_types(self) -> tuple[str, str]:
        """Names of the types in which a GPU library is given A and B; no information is lost on the way to these."""
        return _types(self.a_dtype, self.b_dtype, self.dtype, self.k)[2]

    @property
    def finished(self) -> bool:
        """Whether anything is done on GPUs between what the library returns and what is stored."""
        return not self.formula.trivial or self.dtype in FP8 or self.result_type.kind in "iu"

    @property
    def sum_type(self) -> np.dtype:
        """NumPy type in which a GPU library is to return D: not rounded yet where something is done to it."""
        return self.compute_type if self.finished else self.result_type

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the arrays that are read, in the order of their numbers."""
        return ("a", "b", *(extra.name for extra in self.extras))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays of which a run is given the chunks: B is not among them where it is A."""
        return tuple(name for name in self.operands if name != "b" or not self.same)

    @property
    def outputs(self) -> tuple[NamedMatrix, ...]:
        """D, and the auxiliary outputs that the run makes chunk by chunk of it."""
        found = [NamedMatrix("", self.out_chunks, self.dtype)]
        for name in self.formula.per_element:
            rows, cols = (
                sizes if kept else (1,) * len(sizes)
                for sizes, kept in zip(self.out_chunks, self.formula.keeps(name), strict=True)
            )
            found.append(NamedMatrix(name, (rows, cols), self.formula.dtype_of(name, self.result_type).name))
        return tuple(found)

    @property
    def dtypes_of_work(self) -> tuple[str, str, str]:
        """Names of the types of A, B and D."""
        return self.a_dtype, self.b_dtype, self.dtype

    def chunks_of(self, operand: str) -> Chunks:
        """Chunk sizes of an operand, or of ``"d"``."""
        extras = {extra.name: extra.chunks for extra in self.extras}
        return ({"a": self.a_chunks, "b": self.b_chunks, "d": self.out_chunks} | extras)[operand]

    def dtype_of(self, operand: str) -> str:
        """Name of the type of an operand, or of ``"d"``."""
        extras = {extra.name: extra.dtype for extra in self.extras}
        return ({"a": self.a_dtype, "b": self.b_dtype, "d": self.dtype} | extras)[operand]

    @property
    def shared(self) -> bool:
        """Whether A and B are made of the same chunks, as in ``X.T @ X``, so that each is held once."""
        return self.same or bool(self.arrays[0] and self.arrays[0] == self.arrays[1])

    @property
    def replicated(self) -> bool:
        """Whether every worker is to keep all of D, or of an operand."""
        return bool(self.formula.replicated or self.gathered)

    @property
    def anonymous(self) -> tuple[str, str]:
        """Names of A's and B's arrays that say no more than whether they are the same."""
        return ("x", "x") if self.shared else ("", "")

    @property
    def result_name(self) -> str:
        """Name of the array of D that the user has, also where this is a part of its multiply."""
        return self.name if self.part is None else self.part.whole

    def place_of(self, operand: str, index: int) -> tuple[int, int]:
        """Return row and column of chunk `index` of an operand, or of ``"d"``, in the multiply that the user sees."""
        return divmod(index, self.chunk_counts(operand)[1]) if self.part is None else self.part.at(operand, index)

    def is_transposed(self, operand: str) -> bool:
        """Whether an operand's chunks are the transposes of those that a run is given."""
        return operand in ("a", "b") and self.transposed["ab".index(operand)]

    def numbers(self, name: str) -> NDArray[np.int64]:
        """Return the numbers that all chunks of an operand or an output have in the multiply that the user sees."""
        name = name if name in self.operands else "d"
        return np.arange(math.prod(self.chunk_counts(name))) if self.part is None else self.part.every(name)

    def columns(self, output: str) -> int:
        """Return how many columns of chunks an output has in the multiply that the user sees: as many as D."""
        return self.chunk_counts("d")[1] if self.part is None else self.part.ncols

    def source_of(self, operand: str) -> str:
        """Return the name of the input whose chunks are those of an operand: A's for B where these are the same."""
        return "a" if operand == "b" and self.same else operand

    def is_conjugated(self, operand: str) -> bool:
        """Whether an operand is the conjugate of the chunks that a run is given."""
        return operand in ("a", "b") and self.conjugated["ab".index(operand)]

    def itemsize(self, operand: str) -> int:
        """Bytes of an element of an operand, or of ``"d"``."""
        return dtype_from_name(self.dtype_of(operand)).itemsize

    def check(self) -> None:
        """Raise for values that no problem has, and for chunks that are not those of the part that it is."""
        Computation.check(self)
        self.compute_type, self.result_type  # noqa: B018 - the types must exist
        if self.compute not in ("", *COMPUTE_TYPES) or self.gathered not in ("", "a", "b"):
            raise ValueError(f"compute {self.compute!r}, gathered {self.gathered!r}")
        counts = {name: self.chunk_counts(name) for name in (*self.operands, "d")}
        if self.part is not None and counts != {one[0]: (len(one[1]), len(one[2])) for one in self.part.numbers}:
            raise ValueError(f"a part of other chunks than {counts}")


def accumulates_in_place(problem: Problem) -> bool:
    """Whether sums of an earlier run can grow in place: their type is that of D."""
    return problem.formula.partial and problem.result_type == problem.compute_type


def is_gram(problem: Problem) -> bool:
    """Whether D is symmetric, or Hermitian, because B is A transposed, or conjugated too, as in ``X.T @ X``."""
    across = problem.transposed[0] != problem.transposed[1] and not problem.same
    real = problem.operand_type.kind != "c"
    hermitian = problem.shared and across and (real or problem.conjugated[0] != problem.conjugated[1])
    # One array of bytes can be two matrices of FP8, and a part can have rows and columns of D that are not the same.
    return hermitian and problem.a_dtype == problem.b_dtype and _along("a", 0, problem) == _along("b", 1, problem)


def _along(operand: str, axis: int, problem: Problem) -> tuple[Any, Any]:
    """Return sizes and numbers of an operand's chunks along an axis."""
    numbers = None if problem.part is None else problem.part.of(operand)[axis]
    return problem.chunks_of(operand)[axis], numbers
