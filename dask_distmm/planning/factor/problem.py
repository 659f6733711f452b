"""A Factorization says what is computed of one or two matrices: a frozen value of plain types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np

from dask_distmm.config import Options
from dask_distmm.errors import PlanError, check_square
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Chunks, Computation, Output, Part
from dask_distmm.planning.model import ENGINES, EngineModel

# A factorization of Dask arrays: the mathematics, and the chunks of its operands and outputs


@dataclasses.dataclass(frozen=True, slots=True)
class FactorProblem(Computation):
    """A `Factorization` whose matrices are Dask arrays; a `Computation`."""

    kind: ClassVar[str] = "factorization"
    part: ClassVar[Part | None] = None
    by_ranks: ClassVar[tuple[bool, bool]] = (False, False)

    # Names the computation everywhere; the arrays of its outputs are called after it.
    name: str
    # The factorization.
    task: Factorization
    # For each input of the task Dask's chunk sizes along both axes, and the name of its type: ranks convert it.
    chunks: tuple[Chunks, ...]
    dtypes: tuple[str, ...]
    # The outputs to be made, with their names in the task. A vector is a row, a number a matrix of one element.
    wanted: tuple[Output, ...]
    # As asked for; ``"auto"`` leaves the choice to the cost model.
    engine: str
    # Addresses to use, or their number, or None for all.
    workers: tuple[str, ...] | int | None
    # What the run needs of the client's configuration.
    options: Options
    # What the chunks are: ``"numpy"`` or ``"cupy"``.
    array: str = "numpy"
    # As asked for: ``"auto"``, ``"local"`` or ``"columns"``.
    method: str = "auto"
    # Whether the user gives A up: its chunks may go as soon as all ranks have read them.
    overwrite_a: bool = False

    def __post_init__(self) -> None:
        dealt = self.task.spectral and self.method == "columns" and self.task.a_shape[0]
        if dealt and not any(map(self._shared_by, ENGINES.values())):
            what = f"{self.task.kind} of a pair of matrices" if self.task.b_shape else f"{self.task.kind} in this form"
            raise PlanError(f"{what} is computed by one worker: expected method 'auto' or 'local'")
        shapes = [self.task.a_shape, *([self.task.b_shape] if self.task.b_shape is not None else [])]
        for name, shape, chunks in zip(self.task.inputs, shapes, self.chunks, strict=True):
            if tuple(map(sum, chunks)) != shape:
                raise PlanError(f"{name.upper()} is {shape}, its chunks add up to {tuple(map(sum, chunks))}")
        made = {one.name: one for one in self.task.outputs}
        for output in self.wanted:
            if output.name not in made:
                raise PlanError(f"{self.task.kind} has no output {output.name!r}; it has {', '.join(made)}")
            expected = as_matrix(made[output.name].shape)
            if tuple(map(sum, output.chunks)) != expected:
                raise PlanError(f"{output.name} is {expected}, its chunks are {output.chunks}")

    def _shared_by(self, model: EngineModel) -> bool:
        """Whether ranks of an engine, if it is one of those asked for, compute a spectral decomposition together."""
        return self.engine in ("auto", model.name) and model.decomposes(self.task)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the matrices that are read."""
        return self.task.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The arrays that are made."""
        return self.wanted

    @property
    def dtype(self) -> np.dtype:
        """Type that is computed in."""
        return dtype_from_name(self.task.dtype)

    @property
    def dtypes_of_work(self) -> tuple[str, str, str]:
        """Three times the type that is computed in."""
        return (self.task.dtype,) * 3

    @property
    def flops(self) -> float:
        """Floating-point operations: as LAPACK Working Note 41 counts them; four times as many for complex types."""
        return self.task.flops

    def chunks_of(self, operand: str) -> Chunks:
        """Chunk sizes of an operand."""
        return self.chunks[self.operands.index(operand)]

    def dtype_of(self, operand: str) -> str:
        """Name of the type of an operand."""
        return self.dtypes[self.operands.index(operand)]

    def check(self) -> None:
        """Raise for a method that there is not."""
        Computation.check(self)
        if self.method not in ("auto", "local", "columns"):
            raise ValueError(f"method {self.method!r}")


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of an output as a matrix: a vector is a row, a number is a matrix of one element."""
    rows, cols = (*(1,) * (2 - len(shape)), *shape)
    return rows, cols


# What one rank makes of a whole matrix by one call of LAPACK


# The results by name: shapes, and names of types.
Results = dict[str, tuple[tuple[int, ...], str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Decomposition:
    """What one rank makes of a whole matrix; `engines.programs.spectral.FUNCTIONS` has the function of the same name.

    A new one is an entry here, that function, and what the user calls.
    """

    # Which options of `Factorization` it knows.
    options: frozenset[str]
    results: Callable[[Factorization], Results]
    # Real operations; four times as many for complex types. Those of iterations depend on the values.
    flops: Callable[[Factorization], float]
    # Elements that the call holds beside A and the results.
    workspace: Callable[[Factorization], int]
    # The share of a product's rate at which it runs, with vectors, and if only values are computed.
    shares: tuple[float, float]
    # Whether the host computes it, also if A is on a GPU.
    on_host: bool = False


def _eigh_results(task: Factorization) -> Results:
    n, real = task.a_shape[0], np.empty(0, task.dtype).real.dtype.name
    count = n if task.subset is None else task.subset[1] - task.subset[0] + 1
    return {"w": ((count,), real), **({"v": ((n, count), task.dtype)} if task.vectors else {})}


def _svd_results(task: Factorization) -> Results:
    (m, n), k, real = task.a_shape, min(task.a_shape), np.empty(0, task.dtype).real.dtype.name
    left, right = (m, n) if task.mode == "complete" else (k, k)
    vectors = {"u": ((m, left), task.dtype), "vh": ((right, n), task.dtype)} if task.vectors else {}
    return {"s": ((k,), real), **vectors}


def _eig_results(task: Factorization) -> Results:
    # Whether all are real is known only when they are there.
    shape, dtype = task.a_shape, np.result_type(task.dtype, np.complex64).name
    sides = [name for name, made in (("vl", task.left), ("v", task.vectors)) if made]
    return {"w": (shape[:1], dtype), **dict.fromkeys(sides, (shape, dtype))}


def _cube(task: Factorization) -> float:
    return float(task.a_shape[0]) ** 3


def _square(task: Factorization) -> int:
    return math.prod(task.a_shape)


def _of_complex_triangle(factor: float, matrices: int, share: float) -> Decomposition:
    """Return a function of the complex triangle of the Schur decomposition, also of a real matrix."""

    def complexes(task: Factorization) -> int:
        return 1 if task.dtype.startswith("complex") else 2

    return Decomposition(
        frozenset(),
        lambda task: {"x": (task.a_shape, np.result_type(task.dtype, np.complex64).name)},
        lambda task: (25 + factor * complexes(task) ** 2) * _cube(task),
        lambda task: matrices * complexes(task) * _square(task),
        (share, share),
        on_host=True,
    )


# Operations are Golub and Van Loan's (Matrix Computations, 4th ed., 7.5, 8.3 and 8.6) and Higham's (Functions of
# Matrices, 6.2 and 11.5; five square roots and seven terms). Shares of one thread: N = 1200.
DECOMPOSITIONS: dict[str, Decomposition] = {
    "eigh": Decomposition(
        frozenset(["lower", "subset", "vectors"]),
        _eigh_results,
        lambda task: ((9.0 if task.vectors else 4 / 3) + (0.0 if task.b_shape is None else 10 / 3)) * _cube(task),
        lambda task: _square(task) * (3 if task.vectors else 1),
        (0.35, 0.1),
    ),
    "svd": Decomposition(
        frozenset(["mode", "vectors"]),
        _svd_results,
        lambda task: (
            6 * _square(task) * min(task.a_shape) + 20 * float(min(task.a_shape)) ** 3
            if task.vectors
            else 4 * _square(task) * min(task.a_shape) - 4 / 3 * float(min(task.a_shape)) ** 3
        ),
        # gesdd's 4 k^2, and NumPy's copies.
        lambda task: (
            _square(task)
            + (4 * min(task.a_shape) ** 2 if task.vectors else 0)
            + sum(math.prod(shape) for shape, _ in task.decomposition.results(task).values())
        ),
        (0.45, 0.1),
    ),
    "eig": Decomposition(
        frozenset(["vectors", "left"]),
        _eig_results,
        lambda task: (25.0 if task.vectors or task.left else 10.0) * _cube(task),
        lambda task: _square(task) * (1 + task.vectors + task.left),
        (0.2, 0.15),
        on_host=True,
    ),
    "schur": Decomposition(
        frozenset(),
        lambda task: {"t": (task.a_shape, task.dtype), "z": (task.a_shape, task.dtype)},
        lambda task: 25 * _cube(task),
        lambda task: 0,
        (0.3, 0.3),
        on_host=True,
    ),
    "sqrtm": _of_complex_triangle(10 / 3, 5, 0.25),
    "logm": _of_complex_triangle(7, 8, 0.12),
}


# A Factorization says what is computed of one or two matrices: a frozen value of plain types


# Each kind with the options that it knows.
KINDS: dict[str, frozenset[str]] = {
    "cholesky": frozenset(["lower"]),
    "lu": frozenset(),
    "qr": frozenset(["mode"]),
    "solve": frozenset(["assume_a", "lower", "op"]),
    "solve_triangular": frozenset(["lower", "op", "unit_diagonal", "right"]),
    "inv": frozenset(["assume_a", "lower"]),
    "det": frozenset(),
    "slogdet": frozenset(),
    "lstsq": frozenset(),
    "pinv": frozenset(),
    **{kind: one.options for kind, one in DECOMPOSITIONS.items()},
}
_SQUARE = frozenset(["cholesky", "solve", "solve_triangular", "inv", "det", "slogdet", *DECOMPOSITIONS]) - {"svd"}
_WITH_B = frozenset(["solve", "solve_triangular", "lstsq"])
_DTYPES = ("float32", "float64", "complex64", "complex128")
_CHOICES = {"op": ("N", "T", "C"), "mode": ("reduced", "complete", "r"), "assume_a": ("gen", "pos")}

# How an output is taken out of what a rank holds. Triangles have zeros, or ones, in place of the other elements.
Form = Literal[
    "full", "lower", "unit lower", "upper", "residuals", "pivots", "permutation", "sign", "logdet", "det", "spectral"
]


@dataclasses.dataclass(frozen=True, slots=True)
class Orientation:
    """Whether the transpose of a matrix is what ranks hold, and whether they hold its conjugate."""

    transposed: bool = False
    conjugated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOutput:
    """A result."""

    # Its name.
    name: str
    # As the user gets it.
    shape: tuple[int, ...]
    dtype: str
    # 0 or 1: its block columns are on the ranks that have those of A or of the second matrix. None: all of it is on
    # the ranks that `FactorPlan.holders` names.
    matrix: int | None
    # How it is taken out of what a rank holds.
    form: Form
    # How ranks hold it.
    orientation: Orientation = Orientation()

    @property
    def held(self) -> tuple[int, int]:
        """Shape of the matrix whose block columns ranks hold."""
        rows, cols = self.shape
        return (cols, rows) if self.orientation.transposed else (rows, cols)


@dataclasses.dataclass(frozen=True, slots=True)
class Factorization:
    """A factorization or a decomposition of a matrix A, or the solution of a system with A."""

    # One of `KINDS`.
    kind: str
    # Rows and columns of A.
    a_shape: tuple[int, int]
    # Name of the type of A, B and all results: float32, float64, complex64 or complex128.
    dtype: str
    # Rows and columns of B, which solve, solve_triangular and lstsq have; a vector is one column. eigh may have the B
    # of ``A v = w B v``.
    b_shape: tuple[int, int] | None = None
    # cholesky, solve and inv with ``assume_a="pos"``: the lower triangle of A is read, and L is computed; otherwise
    # the upper one, and U. solve_triangular: A is lower triangular. eigh: the lower triangles of A and B are read.
    lower: bool = True
    # solve, solve_triangular: ``op(A) X = B`` is solved, with A itself (``"N"``), its transpose (``"T"``) or its
    # conjugate transpose (``"C"``).
    op: str = "N"
    # solve_triangular: the diagonal of A is not read, but taken for ones.
    unit_diagonal: bool = False
    # solve_triangular: ``X op(A) = B`` is solved.
    right: bool = False
    # qr: ``"reduced"``, ``"complete"`` or ``"r"``, as `numpy.linalg.qr` has them. svd: one of the first two.
    mode: str = "reduced"
    # solve, inv: ``"gen"``: A is any matrix; ``"pos"``: it is Hermitian and positive definite.
    assume_a: str = "gen"
    # eigh, svd, eig: whether vectors (of eig the right ones) are computed, and not only values.
    vectors: bool = True
    # eig: whether left eigenvectors are computed.
    left: bool = False
    # eigh: the first and the last index of the eigenvalues that are computed, counted from the least one; None for
    # all.
    subset: tuple[int, int] | None = None
    # All kinds: whether a NaN or an infinity among the elements that are read is an error.
    check_finite: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"unknown factorization {self.kind!r}; known are {', '.join(map(repr, KINDS))}")
        if self.dtype not in _DTYPES:
            raise PlanError(f"{self.kind} of {self.dtype}: convert A and B to one of {', '.join(_DTYPES)}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise PlanError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(map(repr, known))}")
        for field in dataclasses.fields(self)[4:]:
            if getattr(self, field.name) != field.default and field.name not in KINDS[self.kind] | {"check_finite"}:
                raise PlanError(f"{self.kind} has no option {field.name}: leave it out")
        self._check_shapes()

    def _check_shapes(self) -> None:
        m, n = self.a_shape
        if self.kind in _SQUARE:
            check_square("a", self.a_shape)
        if self.kind != "eigh" and (self.b_shape is None) == (self.kind in _WITH_B):
            raise PlanError(f"{self.kind} {'needs' if self.b_shape is None else 'has no'} right-hand sides B")
        if self.b_shape is not None:
            axis = 1 if self.right else 0
            if self.b_shape[axis] != m:
                found, side = self.b_shape[axis], ("rows", "columns")[axis]
                raise PlanError(f"a is {m} x {n}, so b must have {m} {side}; it has {found}")
            if self.kind == "eigh" and self.b_shape != (m, m):
                raise PlanError(f"a is {m} x {m}, so b must be {m} x {m}; it is {self.b_shape[0]} x {self.b_shape[1]}")
        if self.subset is not None and not 0 <= self.subset[0] <= self.subset[1] < m:
            raise PlanError(f"subset_by_index must be (first, last) with 0 <= first <= last < {m}, got {self.subset}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the matrices that are read: ``"a"``, and ``"b"`` where there are right-hand sides."""
        return ("a",) if self.b_shape is None else ("a", "b")

    @property
    def spectral(self) -> bool:
        """Whether it is a decomposition that one rank makes by one call of LAPACK (or cuSOLVER)."""
        return self.kind in DECOMPOSITIONS

    @property
    def decomposition(self) -> Decomposition:
        """The entry of its kind in `DECOMPOSITIONS`."""
        return DECOMPOSITIONS[self.kind]

    @property
    def shareable(self) -> bool:
        """Whether it is a spectral decomposition that several ranks can share, by way of a tridiagonal matrix."""
        return self.kind == "eigh" and self.b_shape is None and self.a_shape[0] > 0

    @property
    def _wide(self) -> bool:
        """Whether it is a least-squares problem with fewer equations than unknowns: there A^H is factorized."""
        return self.kind in ("lstsq", "pinv") and self.a_shape[0] < self.a_shape[1]

    @property
    def by_adjoint(self) -> bool:
        """Whether the equations are solved with R^H, and the solution is multiplied by Q.

        So it is of fewer equations than unknowns. Of a pseudo-inverse, or its conjugate transpose, that takes an
        identity of the smaller order of A.
        """
        return self.kind == "pinv" or self._wide

    @property
    def hermitian(self) -> bool:
        """Whether A is taken for Hermitian and positive definite; ranks read the lower triangle of what they hold."""
        return self.kind == "cholesky" or self.assume_a == "pos"

    @property
    def b_order(self) -> int | None:
        """Columns of the identity that takes the place of B; None where it is B itself, or nothing."""
        m, n = self.a_shape
        if self.kind == "qr" and self.mode != "r":
            return m if self.mode == "complete" else min(m, n)
        return min(m, n) if self.kind in ("inv", "pinv") else None

    @property
    def flops(self) -> float:
        """Floating-point operations: as LAPACK Working Note 41 counts them; four times as many for complex types."""
        complexes = 4 if self.dtype.startswith("complex") else 1
        if self.spectral:
            return self.decomposition.flops(self) * complexes
        rows, cols = (float(x) for x in self.a_shape)
        m, n = max(rows, cols), min(rows, cols)
        nrhs = float((self.b_order or 0) if self.b_shape is None else self.b_shape[0 if self.right else 1])
        lu = m * n * n - n**3 / 3
        counts = {
            "cholesky": n**3 / 3,
            "lu": lu,
            "slogdet": lu,
            "det": lu,
            "qr": 2 * lu + 2 * n * nrhs * (2 * m - n),
            "lstsq": 2 * lu + 2 * n * nrhs * (2 * m - n) + n * n * nrhs,
            "solve_triangular": n * n * nrhs,
        }
        counts["pinv"] = counts["lstsq"]
        counts["solve"] = counts["inv"] = (n**3 / 3 if self.hermitian else lu) + 2 * n * n * nrhs
        return counts[self.kind] * complexes

    def orientation(self, name: str) -> Orientation:
        """Return which form of ``"a"`` or ``"b"`` ranks are given."""
        if self.kind == "eigh":
            return Orientation(not self.lower, not self.lower)
        if name == "b":
            # X op(A) = B is op(A)^T X^T = B^T; and where op(A)^T is A's conjugate, A X^H = B^H.
            return Orientation(self.right, self.right and self.op == "C")
        if self.hermitian:
            # Its lower triangle is the conjugate transpose of the upper one, and its transpose is its conjugate.
            other = self.kind == "solve" and self.op == "T"
            return Orientation(not self.lower, self.lower == other)
        if self.kind == "solve":
            return Orientation(self.op != "N", self.op == "C")
        return Orientation(self._wide, self._wide)

    def read(self, name: str) -> Form:
        """Return which part of ``"a"`` or ``"b"`` is read, in the form that ranks are given: a triangle or all."""
        if self.kind == "eigh" or (name == "a" and self.hermitian):
            return "lower"
        if name == "a" and self.kind == "solve_triangular":
            return "lower" if self.lower else "upper"
        return "full"

    @property
    def substituted(self) -> str:
        """``"N"``, ``"T"`` or ``"C"``: the form of A in the system that solve_triangular's ranks solve."""
        if not self.right:
            return self.op
        return "T" if self.op == "N" else "N"

    @property
    def outputs(self) -> tuple[TaskOutput, ...]:
        """The results."""
        (m, n), dtype, real = self.a_shape, self.dtype, np.zeros(0, self.dtype).real.dtype.name
        k = min(m, n)
        nrhs = self.b_shape[1] if self.b_shape is not None else self.b_order or 0
        x = TaskOutput("x", (n, nrhs), dtype, 1, "full", self.orientation("b"))
        if self.right and self.b_shape is not None:
            x = dataclasses.replace(x, shape=self.b_shape)
        if self.kind == "pinv":
            x = dataclasses.replace(x, shape=(n, m), orientation=Orientation(not self._wide, not self._wide))
        if self.kind == "cholesky":
            # U is the conjugate transpose of the L that ranks compute.
            name, orientation = ("l", Orientation()) if self.lower else ("u", Orientation(True, True))
            return (TaskOutput(name, (n, n), dtype, 0, "lower", orientation),)
        if self.kind == "lu":
            return (
                TaskOutput("l", (m, k), dtype, 0, "unit lower"),
                TaskOutput("u", (k, n), dtype, 0, "upper"),
                TaskOutput("lu", (m, n), dtype, 0, "full"),
                TaskOutput("piv", (k,), "int32", None, "pivots"),
                TaskOutput("p", (m,), "int64", None, "permutation"),
            )
        if self.kind == "qr":
            r = TaskOutput("r", (m if self.mode == "complete" else k, n), dtype, 0, "upper")
            return (r,) if self.mode == "r" else (TaskOutput("q", (m, nrhs), dtype, 1, "full"), r)
        if self.kind == "det":
            return (TaskOutput("det", (), dtype, None, "det"),)
        if self.kind == "slogdet":
            return TaskOutput("sign", (), dtype, None, "sign"), TaskOutput("logdet", (), real, None, "logdet")
        if self.spectral:
            made = self.decomposition.results(self).items()
            return tuple(TaskOutput(name, shape, kind, None, "spectral") for name, (shape, kind) in made)
        if self.kind == "lstsq":
            found = (x, TaskOutput("r", (k, k), dtype, 0, "upper"))
            return found if self._wide else (*found, TaskOutput("residuals", (1, nrhs), real, 1, "residuals"))
        return (x,)
