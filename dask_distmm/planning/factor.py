"""Factorizations and solves: the mathematics, the ranks, their programs. Pure, and the same for all engines.

A `Factorization` says what is computed of one or two matrices, a `FactorPlan` which rank has which block column: it
puts the builders of `programs.factor` together.

How many of the workers compute it, and which, follows from its time and its memory as projected::

    seconds    = the larger of compute and panels, + messages + transfer
    compute    = flops / (ranks * rate * share of a product's rate); of shared eigenvalues see below
    panels     = what one panel after the other takes (`EngineModel.panel_seconds`)
    messages   = one for each panel
    transfer   = (operands from their holders + panels of others + chunks of outputs from other ranks) / bandwidth

::

    seconds    = reads + columns + products
    reads      = n^3 / 6 elements, of one triangle for each column that is eliminated  / (ranks * memory bandwidth)
    columns    = n * (what a column takes beside that, and two messages between ranks)
    products   = updates of the triangle, merges, reflectors: at a share of a product's rate
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError, ProtocolError, check_square
from dask_distmm.layout import Layout, redistribution
from dask_distmm.layout.redistribute import Copies
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Chunks, Computation, Worker
from dask_distmm.planning.model import ENGINES, EngineModel, Phase, Work
from dask_distmm.planning.placement import Placement, Where, choose, estimated, in_range, need_workers
from dask_distmm.planning.program import remembered
from dask_distmm.programs import factor
from dask_distmm.programs.factor import PANEL_PARTS, PARTS, Columns, Matrix, Panels
from dask_distmm.programs.steps import Buffer, Step

# A factorization of Dask arrays: the mathematics, and the chunks of its operands and outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorProblem(Computation):
    """A `Factorization` whose matrices are Dask arrays; a `Computation`.

    The outputs that are wanted have their names in the task. A vector is a row, a number a matrix of one element.
    """

    kind: ClassVar[str] = "factorization"

    # The factorization.
    task: Factorization

    def __post_init__(self) -> None:
        dealt = self.task.spectral and self.method == "columns" and self.task.a_shape[0]
        if dealt and not any(map(self._shared_by, ENGINES.values())):
            what = f"{self.task.kind} of a pair of matrices" if self.task.b_shape else f"{self.task.kind} in this form"
            raise PlanError(f"{what} is computed by one worker: expected method 'auto' or 'local'")
        for name, shape in {"a": self.task.a_shape, "b": self.task.b_shape}.items():
            if shape is not None and self[name].shape != shape:
                raise PlanError(f"{name.upper()} is {shape}, its chunks add up to {self[name].shape}")
        made = {one.name: one for one in self.task.outputs}
        for output in self.wanted:
            if output.name not in made:
                raise PlanError(f"{self.task.kind} has no output {output.name!r}; it has {', '.join(made)}")
            expected = as_matrix(made[output.name].shape)
            if output.shape != expected:
                raise PlanError(f"{output.name} is {expected}, its chunks are {output.chunks}")

    def _shared_by(self, model: EngineModel) -> bool:
        """Whether ranks of an engine, if it is one of those asked for, compute a spectral decomposition together."""
        return self.engine in ("auto", model.name) and model.decomposes(self.task)

    @property
    def compute_type(self) -> np.dtype:
        """NumPy type that is computed in."""
        return dtype_from_name(self.task.dtype)

    @property
    def flops(self) -> float:
        """Floating-point operations: as LAPACK Working Note 41 counts them; four times as many for complex types."""
        return self.task.flops

    def check(self) -> None:
        """Raise for a method that there is not."""
        super().check()
        if self.method not in ("auto", "local", "columns"):
            raise ValueError(f"method {self.method!r}")


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of an output as a matrix: a vector is a row, a number is a matrix of one element."""
    rows, cols = (*(1,) * (2 - len(shape)), *shape)
    return rows, cols


# What is computed of one or two matrices: a frozen value of plain types


# How an output is taken out of what a rank holds. Triangles have zeros, or ones, in place of the other elements.
Form = Literal[
    "full", "lower", "unit lower", "upper", "residuals", "pivots", "permutation", "sign", "logdet", "det", "spectral"
]


@dataclasses.dataclass(frozen=True, slots=True)
class Orientation:
    """Whether the transpose of a matrix is what ranks hold, and whether they hold its conjugate."""

    transposed: bool = False
    conjugated: bool = False

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of what ranks hold of a matrix of a shape."""
        return (shape[1], shape[0]) if self.transposed else shape

    def of_chunks(self, chunks: Chunks) -> Layout:
        """Return the layout of a matrix in chunks, in the form that ranks hold; chunks have their own numbers."""
        layout = Layout.of_chunks(chunks)
        return layout.transpose() if self.transposed else layout


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
    # Whether panels swap its rows after they were computed, so that it is a copy.
    swapped: bool = False


_DTYPES = ("float32", "float64", "complex64", "complex128")
_CHOICES = {"op": ("N", "T", "C"), "mode": ("reduced", "complete", "r"), "assume_a": ("gen", "pos")}


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
            if getattr(self, field.name) != field.default and field.name not in (*self.entry.options, "check_finite"):
                raise PlanError(f"{self.kind} has no option {field.name}: leave it out")
        self._check_shapes()

    def _check_shapes(self) -> None:
        m, n = self.a_shape
        if self.entry.square:
            check_square("a", self.a_shape)
        if self.entry.with_b not in (None, self.b_shape is not None):
            raise PlanError(f"{self.kind} {'needs' if self.b_shape is None else 'has no'} right-hand sides B")
        if self.b_shape is not None:
            axis = 1 if self.right else 0
            if self.b_shape[axis] != m:
                rows, side = self.b_shape[axis], ("rows", "columns")[axis]
                raise PlanError(f"a is {m} x {n}, so b must have {m} {side}; it has {rows}")
            if self.spectral and self.b_shape != (m, m):
                raise PlanError(f"a is {m} x {m}, so b must be {m} x {m}; it is {self.b_shape[0]} x {self.b_shape[1]}")
        if self.subset is not None and not 0 <= self.subset[0] <= self.subset[1] < m:
            raise PlanError(f"subset_by_index must be (first, last) with 0 <= first <= last < {m}, got {self.subset}")

    @property
    def entry(self) -> Kind:
        """The entry of its kind in `KINDS`."""
        return KINDS[self.kind]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the matrices that are read: ``"a"``, and ``"b"`` where there are right-hand sides."""
        return ("a",) if self.b_shape is None else ("a", "b")

    @property
    def spectral(self) -> bool:
        """Whether it is a decomposition that one rank makes by one call of LAPACK (or cuSOLVER)."""
        return self.entry.workspace is not None

    @property
    def shareable(self) -> bool:
        """Whether it is a spectral decomposition that several ranks can share, by way of a tridiagonal matrix."""
        return self.spectral and self.hermitian and self.b_shape is None and self.a_shape[0] > 0

    @property
    def hermitian(self) -> bool:
        """Whether A is taken for Hermitian; ranks read the lower triangle of what they hold."""
        return self.entry.hermitian or self.assume_a == "pos"

    @property
    def factored(self) -> str:
        """Which factorization A goes through: ``"cholesky"``, ``"lu"``, ``"qr"``, or ``""`` for none."""
        return "cholesky" if self.assume_a == "pos" else self.entry.factored

    @property
    def algorithm(self) -> str:
        """What A goes through, as shares of engines have it."""
        if self.spectral:
            return self.kind if self.vectors or self.entry.on_host else "values"
        return self.factored

    @property
    def wide(self) -> bool:
        """Whether it is a least-squares problem with fewer equations than unknowns: there A^H is factorized."""
        return self.entry.least_squares and self.a_shape[0] < self.a_shape[1]

    @property
    def by_adjoint(self) -> bool:
        """Whether the equations are solved with R^H, and the solution is multiplied by Q.

        So it is of fewer equations than unknowns. Of a pseudo-inverse, or its conjugate transpose, that takes an
        identity of the smaller order of A.
        """
        return self.wide or (self.entry.least_squares and self.b_shape is None)

    @property
    def forms_q(self) -> bool:
        """Whether the second matrix is to become Q."""
        return self.factored == "qr" and not self.entry.least_squares

    @property
    def b_order(self) -> int | None:
        """Columns of the identity that takes the place of B; None where it is B itself, or nothing."""
        return self.entry.identity(self)

    @property
    def nrhs(self) -> int:
        """Number of right-hand sides, or columns of an identity in their place."""
        return (self.b_order or 0) if self.b_shape is None else self.b_shape[0 if self.right else 1]

    @property
    def flops(self) -> float:
        """Floating-point operations: as LAPACK Working Note 41 counts them; four times as many for complex types."""
        return self.entry.flops(self) * (4 if self.dtype.startswith("complex") else 1)

    def orientation(self, name: str) -> Orientation:
        """Return which form of ``"a"`` or ``"b"`` ranks are given."""
        if self.hermitian and (name == "a" or self.spectral):
            # Its lower triangle is the conjugate transpose of the upper one, and its transpose is its conjugate.
            return Orientation(not self.lower, self.lower == (self.op == "T"))
        if name == "b":
            # X op(A) = B is op(A)^T X^T = B^T; and where op(A)^T is A's conjugate, A X^H = B^H.
            return Orientation(self.right, self.right and self.op == "C")
        transposed = self.wide or (self.op != "N" and bool(self.factored))
        return Orientation(transposed, transposed and self.op != "T")

    def read(self, name: str) -> Form:
        """Return which part of ``"a"`` or ``"b"`` is read, in the form that ranks are given: a triangle or all."""
        if self.hermitian and (name == "a" or self.spectral):
            return "lower"
        if name == "a" and not self.factored and not self.spectral:
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
        return self.entry.outputs(self)


# What there is to know of each kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A factorization, what is solved with its factors, or what one rank makes of a whole matrix.

    A new one is an entry in `KINDS`, and what the user calls; of the last sort also a function of the same name in
    `engines.programs.spectral.FUNCTIONS`.
    """

    # Which options of `Factorization` it knows.
    options: Sequence[str] = ()
    # Whether A is square; whether there is a B, None where there may be one; whether A is taken for Hermitian.
    square: bool = True
    with_b: bool | None = False
    hermitian: bool = False
    # Which factorization A goes through if it may be any matrix (`programs.factor.FACTORED`).
    factored: str = ""
    # Whether it minimizes |A X - B|, by QR, so that R must be of full rank.
    least_squares: bool = False
    # Columns of an identity in the place of B.
    identity: Callable[[Factorization], int | None] = lambda task: None
    outputs: Callable[[Factorization], tuple[TaskOutput, ...]]
    # Real operations; four times as many for complex types. Those of iterations depend on the values.
    flops: Callable[[Factorization], float]
    # What to pass for results that are no longer than A.
    reduced: str = ""
    # Of what one rank makes by a call of LAPACK or cuSOLVER: the elements that this holds beside A and the results; the
    # share of a product's rate at which it runs, with vectors, and if only values are computed; and whether the host
    # computes it, also if A is on a GPU.
    workspace: Callable[[Factorization], int] | None = None
    shares: tuple[float, float] = (0.0, 0.0)
    on_host: bool = False


def _real(dtype: str) -> str:
    return np.empty(0, dtype).real.dtype.name


def _sizes(task: Factorization) -> tuple[float, float]:
    m, n = map(float, task.a_shape)
    return max(m, n), min(m, n)


def _lu_flops(task: Factorization) -> float:
    m, n = _sizes(task)
    return m * n * n - n**3 / 3


def _cholesky_flops(task: Factorization) -> float:
    return float(task.a_shape[0]) ** 3 / 3


def _qr_flops(task: Factorization) -> float:
    m, n = _sizes(task)
    return 2 * _lu_flops(task) + 2 * n * task.nrhs * (2 * m - n)


def _triangular_flops(task: Factorization) -> float:
    return _sizes(task)[1] ** 2 * task.nrhs


def _solve_flops(task: Factorization) -> float:
    return (_cholesky_flops if task.hermitian else _lu_flops)(task) + 2 * _triangular_flops(task)


def _solution(task: Factorization) -> tuple[TaskOutput, ...]:
    shape = task.b_shape if task.right and task.b_shape else (task.a_shape[1], task.nrhs)
    return (TaskOutput("x", shape, task.dtype, 1, "full", task.orientation("b")),)


def _cholesky_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    # U is the conjugate transpose of the L that ranks compute.
    return (TaskOutput("ul"[task.lower], task.a_shape, task.dtype, 0, "lower", Orientation(*2 * [not task.lower])),)


def _lu_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    (m, n), k = task.a_shape, min(task.a_shape)
    return (
        TaskOutput("l", (m, k), task.dtype, 0, "unit lower", swapped=True),
        TaskOutput("u", (k, n), task.dtype, 0, "upper"),
        TaskOutput("lu", (m, n), task.dtype, 0, "full", swapped=True),
        TaskOutput("piv", (k,), "int32", None, "pivots"),
        TaskOutput("p", (m,), "int64", None, "permutation"),
    )


def _qr_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    (m, n), complete = task.a_shape, task.mode == "complete"
    r = TaskOutput("r", (m if complete else min(m, n), n), task.dtype, 0, "upper")
    return (r,) if task.b_order is None else (TaskOutput("q", (m, task.b_order), task.dtype, 1, "full"), r)


def _lstsq_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    k = min(task.a_shape)
    outputs = (*_solution(task), TaskOutput("r", (k, k), task.dtype, 0, "upper"))
    residuals = TaskOutput("residuals", (1, task.nrhs), _real(task.dtype), 1, "residuals")
    return outputs if task.wide else (*outputs, residuals)


def _pinv_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    return (TaskOutput("x", task.a_shape[::-1], task.dtype, 1, "full", Orientation(*2 * [not task.wide])),)


def _determinants(*names: Literal["det", "sign", "logdet"]) -> Callable[[Factorization], tuple[TaskOutput, ...]]:
    def outputs(task: Factorization) -> tuple[TaskOutput, ...]:
        dtypes = (_real(task.dtype) if name == "logdet" else task.dtype for name in names)
        return tuple(TaskOutput(name, (), dtype, None, name) for name, dtype in zip(names, dtypes, strict=True))

    return outputs


def _whole(name: str, shape: tuple[int, ...], dtype: str) -> TaskOutput:
    """Return a result that one rank has all of."""
    return TaskOutput(name, shape, dtype, None, "spectral")


def _eigh_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    n = task.a_shape[0]
    count = n if task.subset is None else task.subset[1] - task.subset[0] + 1
    w, v = _whole("w", (count,), _real(task.dtype)), _whole("v", (n, count), task.dtype)
    return (w, v) if task.vectors else (w,)


def _svd_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    (m, n), k = task.a_shape, min(task.a_shape)
    left, right = (m, n) if task.mode == "complete" else (k, k)
    vectors = _whole("u", (m, left), task.dtype), _whole("vh", (right, n), task.dtype)
    return (_whole("s", (k,), _real(task.dtype)), *(vectors if task.vectors else ()))


def _svd_flops(task: Factorization) -> float:
    elements, k = _square(task), min(task.a_shape)
    return 6 * elements * k + 20 * float(k) ** 3 if task.vectors else 4 * elements * k - 4 / 3 * float(k) ** 3


def _svd_workspace(task: Factorization) -> int:
    # gesdd's 4 k^2, and NumPy's copies.
    beside = 4 * min(task.a_shape) ** 2 if task.vectors else 0
    return _square(task) + beside + sum(math.prod(output.shape) for output in task.outputs)


def _complex(dtype: str) -> str:
    return np.result_type(dtype, np.complex64).name


def _eig_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    # Whether all are real is known only when they are there.
    shape, dtype = task.a_shape, _complex(task.dtype)
    sides = (_whole(name, shape, dtype) for name, wanted in (("vl", task.left), ("v", task.vectors)) if wanted)
    return (_whole("w", shape[:1], dtype), *sides)


def _cube(task: Factorization) -> float:
    return float(task.a_shape[0]) ** 3


def _square(task: Factorization) -> int:
    return math.prod(task.a_shape)


def _of_complex_triangle(factor: float, matrices: int, share: float) -> Kind:
    """Return a function of the complex triangle of the Schur decomposition, also of a real matrix."""

    def complexes(task: Factorization) -> int:
        return 1 if task.dtype.startswith("complex") else 2

    return Kind(
        outputs=lambda task: (_whole("x", task.a_shape, _complex(task.dtype)),),
        flops=lambda task: (25 + factor * complexes(task) ** 2) * _cube(task),
        workspace=lambda task: matrices * complexes(task) * _square(task),
        shares=(share, share),
        on_host=True,
    )


# Operations of decompositions are Golub and Van Loan's (Matrix Computations, 4th ed., 7.5, 8.3 and 8.6) and Higham's
# (Functions of Matrices, 6.2 and 11.5; five square roots and seven terms). Shares of one thread: N = 1200.
KINDS: dict[str, Kind] = {
    "cholesky": Kind(
        options=["lower"], hermitian=True, factored="cholesky", outputs=_cholesky_outputs, flops=_cholesky_flops
    ),
    "lu": Kind(square=False, factored="lu", outputs=_lu_outputs, flops=_lu_flops),
    "qr": Kind(
        options=["mode"],
        square=False,
        factored="qr",
        identity=lambda task: {"r": None, "complete": task.a_shape[0], "reduced": min(task.a_shape)}[task.mode],
        outputs=_qr_outputs,
        flops=_qr_flops,
        reduced="mode='reduced'",
    ),
    "solve": Kind(
        options=["assume_a", "lower", "op"], with_b=True, factored="lu", outputs=_solution, flops=_solve_flops
    ),
    "solve_triangular": Kind(
        options=["lower", "op", "unit_diagonal", "right"], with_b=True, outputs=_solution, flops=_triangular_flops
    ),
    "inv": Kind(
        options=["assume_a", "lower"],
        factored="lu",
        identity=lambda task: task.a_shape[0],
        outputs=_solution,
        flops=_solve_flops,
    ),
    "det": Kind(factored="lu", outputs=_determinants("det"), flops=_lu_flops),
    "slogdet": Kind(factored="lu", outputs=_determinants("sign", "logdet"), flops=_lu_flops),
    "lstsq": Kind(
        square=False,
        with_b=True,
        factored="qr",
        least_squares=True,
        outputs=_lstsq_outputs,
        flops=lambda task: _qr_flops(task) + _triangular_flops(task),
    ),
    "pinv": Kind(
        square=False,
        factored="qr",
        least_squares=True,
        identity=lambda task: min(task.a_shape),
        outputs=_pinv_outputs,
        flops=lambda task: _qr_flops(task) + _triangular_flops(task),
    ),
    "eigh": Kind(
        options=["lower", "subset", "vectors"],
        with_b=None,
        hermitian=True,
        outputs=_eigh_outputs,
        flops=lambda task: ((9.0 if task.vectors else 4 / 3) + (10 / 3 if task.b_shape else 0.0)) * _cube(task),
        workspace=lambda task: _square(task) * (3 if task.vectors else 1),
        shares=(0.35, 0.1),
    ),
    "svd": Kind(
        options=["mode", "vectors"],
        square=False,
        outputs=_svd_outputs,
        flops=_svd_flops,
        reduced="full_matrices=False",
        workspace=_svd_workspace,
        shares=(0.45, 0.1),
    ),
    "eig": Kind(
        options=["vectors", "left"],
        outputs=_eig_outputs,
        flops=lambda task: (25.0 if task.vectors or task.left else 10.0) * _cube(task),
        workspace=lambda task: _square(task) * (1 + task.vectors + task.left),
        shares=(0.2, 0.15),
        on_host=True,
    ),
    "schur": Kind(
        outputs=lambda task: (_whole("t", task.a_shape, task.dtype), _whole("z", task.a_shape, task.dtype)),
        flops=lambda task: 25 * _cube(task),
        workspace=lambda task: 0,
        shares=(0.3, 0.3),
        on_host=True,
    ),
    "sqrtm": _of_complex_triangle(10 / 3, 5, 0.25),
    "logm": _of_complex_triangle(7, 8, 0.12),
}


# How a Factorization is computed by some ranks, and by which


# The least and the most columns of a block on CPUs: wide enough for BLAS.
_WIDTHS = (32, 256)
# Number of blocks that a rank should have: with fewer, ranks finish far apart.
_BLOCKS = 8
# With this many blocks a rank of twice the width the next panel is there in time all the same, and products have a
# higher rate (1 H200, float64, 32768 x 512 by 512, by 1024: 47 and 53 TFLOP/s). Panels of Cholesky take less time: with
# the second number of blocks these are wider, up to twice (2 H200, float64, N = 32768: 768 columns 179 ms, 512 181).
_MANY, _MANY_CHOLESKY = 32, 21
# The most columns of a block where all ranks read their whole share for each column that is eliminated.
_EVEN = 256


def block_width(problem: Factorization, ranks: int, widths: tuple[int, int] = _WIDTHS, *, shared: bool = False) -> int:
    """Return the columns of a block of A."""
    least, most = widths
    if shared:
        most = max(least, min(most, _EVEN))
    elif ranks == 1:
        # LAPACK cuts a matrix better than we do; of a QR factorization each block has a triangle T of its width.
        return most if problem.factored == "qr" else max(most, *problem.a_shape)
    if (name := problem.factored) != "qr":
        many, step = (_MANY_CHOLESKY, least) if name == "cholesky" else (_MANY, most)
        most = max(most, min(2 * most, min(problem.a_shape) // (many * ranks) // step * step))
    even = -(-min(problem.a_shape) // (ranks * _BLOCKS))
    return max(least, min(most, -(-even // least) * least))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FactorPlacement(Placement):
    """How a FactorProblem runs."""

    asked_for: ClassVar[tuple[str, ...]] = ("input", "final", "enter", *PARTS)
    problem: FactorProblem
    # Columns of a block.
    width: int
    # For each output by name, int32, one for each of its chunks: the rank that puts it together.
    owners: Mapping[str, NDArray[np.int32]]

    @property
    def task(self) -> Factorization:
        """The factorization."""
        return self.problem.task

    @property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def shared(self) -> bool:
        """Whether ranks share the eigenvalues of a matrix in block columns; otherwise one of them has all of it."""
        return self.method == "columns" and self.task.shareable

    @property
    def grid(self) -> tuple[int, int, int]:
        """One row of ranks: each has all rows of its block columns."""
        return 1, len(self.ranks), 1

    def gathered(self, operand: str) -> Copies:
        """Return the copies out of an operand's chunks, in the form that ranks hold, to its block columns."""
        chunks = self.task.orientation(operand).of_chunks(self.problem[operand].chunks)
        return redistribution(chunks, self.columns.layout("ab".index(operand)))

    def delivered(self, output: str) -> Copies | None:
        """Return the copies from block columns to an output's chunks, in the form that ranks hold.

        None for an output without block columns: ranks that have it have all of it.
        """
        layout = self.output_layout(output)
        if layout is None:
            return None
        return redistribution(layout, self.output(output).orientation.of_chunks(self.problem.output(output).chunks))

    def owned(self, output: str, rank: int) -> list[int]:
        """Return the numbers of an output's chunks that a rank puts together."""
        found: list[int] = np.flatnonzero(self.owners[output] == rank).tolist()
        return found

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks publish such a part of a panel of this number."""
        return any(part == kind and 0 <= number < self.numbers(part) for part in PARTS)

    def shape_of(self, kind: str, matrix: int, number: int) -> tuple[int, int] | None:
        """Return the shape of a chunk of an operand, or of a rank's part of an output."""
        if kind == "input":
            return super().shape_of(kind, matrix, number)
        outputs = self.problem.outputs
        layout = self.output_layout(outputs[matrix].name) if 0 <= matrix < len(outputs) else None
        return layout.local_shape(number) if layout is not None and 0 <= number < len(self.ranks) else None

    def check(self) -> None:
        """Raise `ProtocolError` if the parts of a plan do not fit each other."""
        super().check()
        counts = {one.name: one.count for one in self.problem.outputs}
        good = self.width > 0 and self.ranks and self.owners.keys() == counts.keys()
        good = good and (not self.task.spectral or self.count == 1 or self.shared)
        if not good or not all(in_range(self.owners[name], counts[name], len(self.ranks)) for name in counts):
            raise ProtocolError(f"malformed plan: width {self.width} or owners do not fit {len(self.ranks)} ranks")

    @functools.cached_property
    def columns(self) -> Columns:
        """Where block columns lie."""
        problem = self.task
        a = problem.orientation("a").shape(problem.a_shape)
        second: tuple[int, int] | None = None
        if problem.b_shape is not None:
            second = problem.orientation("b").shape(problem.b_shape)
        elif problem.b_order is not None:
            second = (problem.a_shape[0] if problem.forms_q else problem.b_order, problem.b_order)
        elif self.shared and problem.vectors:
            second = next(one.shape for one in problem.outputs if one.name == "v")  # type: ignore[assignment]
        below = int(self.shared)
        if second is None:
            return Columns((Matrix(a, self.width),), self.count, below=below)
        # The block columns of Q begin where those of A do. Of right-hand sides each rank gets some if it can.
        even = -(-second[1] // self.count)
        width = self.width if problem.forms_q else max(1, min(self.width, even))
        return Columns((Matrix(a, self.width), Matrix(second, width)), self.count, below=below)

    @functools.cached_property
    def sweeps(self) -> tuple[str, ...]:
        """How often all panels are applied, one after the other: a factorization, substitution, or reflections."""
        second, name = len(self.columns.matrices) > 1, self.task.factored
        if self.task.spectral:
            return ("reflect",) if self.shared and second and self.panels else ()
        substituted = second and not self.task.forms_q
        reflected = second and (self.task.forms_q or self.task.by_adjoint)
        return (*[name] * bool(name), *["substitute"] * substituted, *["reflect"] * reflected)

    @functools.cached_property
    def panels(self) -> range:
        """Numbers of the panels of A: one fewer reflector than columns leads to a tridiagonal matrix."""
        return range(-(-(min(self.columns.matrices[0].shape) - self.columns.below) // self.width))

    @functools.cached_property
    def carried(self) -> bool:
        """Whether a single right-hand side goes from rank to rank in a substitution, which is far less than panels."""
        first = self.columns.first(1)
        single = self.columns.count == first + 1 and self.columns.blocks[first].stop <= 1
        return ENGINES[self.engine].by_panels and self.count > 1 and single and "substitute" in self.sweeps

    @property
    def holders(self) -> range:
        """The ranks that have the results without block columns: those with all pivots in the end, or the only one."""
        outputs = self.task.outputs
        return range(self.count if any(x.swapped for x in outputs) else any(x.matrix is None for x in outputs))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the steps of a rank."""
        names = tuple(one.name for one in self.problem.outputs)
        what = self.task, self.engine, self.method, self.count, self.width, names
        return remembered(what, rank, lambda: self._record(rank))

    def _record(self, rank: int) -> tuple[Step, ...]:
        task, columns, panels = self.task, self.columns, self.panels
        name, last, count = task.factored, columns.first(1), columns.count
        substitution: dict[str, Any] = {"lower": task.lower, "op": task.substituted, "unit": task.unit_diagonal}
        if name:
            adjoint = name == "cholesky" or task.by_adjoint
            substitution = {"lower": name == "cholesky", "op": "C" if adjoint else "N"}
        parts = {"lower"} if name or "reflect" in self.sweeps else set()
        if "substitute" in self.sweeps and not self.carried:
            parts.add("lower" if substitution["lower"] else "upper")
        p = Panels(
            rank,
            columns,
            task.dtype,
            factored=name or ("reflect" if self.shared else ""),
            parts=sorted(parts),
            check=self._check,
            holders=() if task.spectral else self.holders,
            queued=ENGINES[self.engine].on_gpus and name == "qr",
            together=ENGINES[self.engine].collective,
        )
        for number, operand in enumerate(task.inputs):
            p.gather(operand, number)
        if len(columns.matrices) > 1 and not self.shared:
            factor.complete_second(p, identity=task.b_order is not None)
        # Right-hand sides go through the factorization with A; but not the columns that are to become Q, or a solution
        # of an underdetermined system.
        beside = len(columns.matrices) > 1 and not task.forms_q and not task.by_adjoint
        if task.spectral:
            results = list(map(self._buffer, task.outputs))
            if self.shared:
                factor.eigenvalues(p, panels if self.sweeps else (), results[:1], vectors=task.vectors)
            else:
                factor.decompose(p, results, task)
        elif name:
            factor.FACTORED[name].record(p, panels, count if beside else last)
        else:
            p.complete(panels)
        if "substitute" in self.sweeps:
            factor.substitute(p, panels, carried=self.carried, **substitution)
        if "reflect" in self.sweeps and not self.shared:
            # The columns of Q before a panel's first one are those of the identity in its rows: they stay as they are.
            factor.reflect(p, panels, lambda k: last + k if task.forms_q else last)
        with p.on("join"):
            for output in map(self.output, (one.name for one in self.problem.outputs)):
                self._store(p, output)
        return p.end()

    def _store(self, p: Panels, output: TaskOutput) -> None:
        """Record how a result is handed over."""
        layout = self.output_layout(output.name)
        if layout is None:
            if p.me in self.holders:
                factor.store_numbers(p, self._buffer(output), output.name, output.form, self.panels)
            return
        if output.form == "residuals":
            factor.store_columns(p, output.name, p.matrix(1)[self.task.a_shape[1] :, :], "residuals")
            return
        (rows, cols), first = layout.local_shape(p.me), self.columns.first(output.matrix or 0)
        place = p.blocks(first, self.columns.count)[:rows, :cols]
        factor.store_columns(p, output.name, place, "swapped" * output.swapped, self.panels)

    def _buffer(self, output: TaskOutput) -> Buffer:
        """Return the name of a result without block columns."""
        return Buffer(f"result.{output.name}", as_matrix(output.shape), output.dtype)

    @property
    def _check(self) -> int | None:
        """How diagonals of factors are looked at: the size for rounding, 0 for zeros, None where they are not."""
        if self.task.entry.least_squares:
            return max(self.task.a_shape)
        solved = "substitute" in self.sweeps and not self.task.unit_diagonal
        return 0 if solved and self.task.factored != "cholesky" else None

    def numbers(self, part: str) -> int:
        """Return how many arrays there are of what ranks ask each other for; they are numbered from 0."""
        if part in PANEL_PARTS:
            return self.columns.count
        if part in ("vector", "product", "reflectors"):
            return self.task.a_shape[0]
        return self.count

    def output(self, name: str) -> TaskOutput:
        """Return a result by its name."""
        found = next(one for one in self.task.outputs if one.name == name)
        # The block columns of eigenvectors are distributed as those of a second matrix.
        if self.shared and found.form == "spectral" and len(found.shape) > 1:
            return dataclasses.replace(found, matrix=1, form="full")
        return found

    def output_layout(self, name: str) -> Layout | None:
        """Return the layout of a result, of the form of it that ranks hold; None if it has no block columns."""
        output = self.output(name)
        return (
            None
            if output.matrix is None
            else self.columns.layout(output.matrix, output.orientation.shape(as_matrix(output.shape)))
        )


# What it costs that several ranks share the eigenvalues of a Hermitian matrix, by way of a tridiagonal one. Pure


# The share of a product's rate at which products run.
_SHARE = 0.7
# Columns of vectors as long as the matrix that a rank has beside its block columns: reflectors twice, what belongs to
# them, a panel, and what columns are summed in.
_NARROW = 320
# Elements of the eigenvectors of a merge that are made at once.
_PANEL_ELEMENTS = 2**26


def _shared_phases(made: FactorPlacement) -> list[Phase]:
    """Return the computation itself: reads of one triangle for each column that is eliminated, columns, products."""
    task, ranks, machine, model = made.problem.task, len(made.ranks), made.machine, ENGINES[made.engine]
    threads = made.threads.sum() * _SHARE
    n, complexes = float(task.a_shape[0]), 4 if task.dtype.startswith("complex") else 1
    column = model.column_seconds + (ranks > 1 and not model.reads_peers) * 2 * made.message_seconds
    flops, vectors = (2 / 3 + 2 * task.vectors) * complexes * n**3, 4 / 3 * n**3 * task.vectors
    return [
        Phase(touched=n**3 / 6 * made.problem.compute_type.itemsize / ranks),
        Phase(least=n * column),
        Phase(flops, machine.rate(task.dtype) * threads),
        Phase(vectors, machine.rate("float64") * threads),
    ]


def shared_bytes(task: Factorization, ranks: int, itemsize: int, width: int) -> int:
    """Return the bytes that a rank holds beside its block columns of the matrix and of eigenvectors.

    Its rows of eigenvectors of the tridiagonal matrix, twice; a panel of those of a merge; panels of reflectors.
    """
    n = task.a_shape[0]
    narrow = n * (_NARROW + 2 * width) * itemsize
    if not task.vectors:
        return narrow
    return narrow + 8 * (2 * math.ceil(n / ranks) * n + min(_PANEL_ELEMENTS, n * n))


# Who computes a factorization: how many of the workers, and which; its time and its memory as projected


def plan_factorization(
    problem: FactorProblem,
    roster: Sequence[Worker],
    where: Where | None = None,
    *,
    engine: str,
    sources: Sequence[Worker] = (),
) -> FactorPlacement:
    """Choose how many of the workers of `roster` compute `problem`, and which."""
    need_workers(roster)
    if problem.method == "columns" and _alone(problem, engine) and problem.task.a_shape[0]:
        raise PlanError(
            f"{problem.task.kind} in this form is computed by one worker of engine {engine!r}: expected method 'auto' "
            "or 'local'"
        )
    where = where or {}
    candidates = sorted(_candidates(problem, len(roster), engine))
    found = [_consider(problem, roster, sources, where, engine, *candidate) for candidate in candidates]
    # The order says how eigenvalues are computed; the other way is taken where memory is short.
    large = _shares_eigh(problem, len(roster), engine)
    found.sort(key=lambda one: (one.shared != large, one.seconds))
    rows, cols = problem.task.a_shape
    what = f"{problem.task.kind} of a matrix of {rows} x {cols} ({problem.task.dtype})"
    return choose(found, what, _remedies(problem, len(roster), engine))


def reduced_mode(task: Factorization) -> list[str]:
    """Return what to pass so that results are no longer than the matrix, where they are."""
    return [f"pass {task.entry.reduced}"] if task.mode == "complete" else []


def _remedies(problem: FactorProblem, workers: int, engine: str) -> list[str]:
    """Return what would let a factorization fit that does not, in the way in which it was asked for."""
    found = reduced_mode(problem.task)
    free = dataclasses.replace(problem, method="auto")
    if max(count for count, _ in _candidates(free, max(2, workers), engine)) == 1:
        return found
    if problem.method == "local":
        return [*found, "use method='auto', by which workers share it"]
    return [*found, "use more workers" if problem.workers is None else "name more workers by workers="]


def _shares_eigh(problem: FactorProblem, workers: int, engine: str) -> bool:
    """Whether eigenvalues by way of block columns are there sooner."""
    task, least = problem.task, ENGINES[engine].shares_eigh_from(problem.task.dtype, workers)
    return least is not None and task.shareable and task.a_shape[0] >= least


def _candidates(problem: FactorProblem, workers: int, engine: str) -> set[tuple[int, bool]]:
    """Return the numbers of ranks that are considered, and whether they share eigenvalues, as one can, too."""
    if _alone(problem, engine) or problem.method == "local":
        return {(1, False)}
    model = ENGINES[engine]
    shared = problem.task.shareable
    width = block_width(problem.task, workers, model.widths, shared=shared)
    blocks = -(-problem.task.orientation("a").shape(problem.task.a_shape)[1] // width)
    most = max(1, min(workers, blocks))
    if problem.method == "columns":
        return {(most, shared)}
    if shared:
        return {(1, False), (most, True)} if model.on_gpus else {(1, False)}
    return {(count, False) for count in (1, *(2**i for i in range(1, most.bit_length())), most)}


def _alone(problem: FactorProblem, engine: str) -> bool:
    """Whether one rank computes it, as it does spectral decompositions that the engine has no way to share."""
    return problem.task.spectral and not ENGINES[engine].decomposes(problem.task)


def _consider(
    problem: FactorProblem,
    roster: Sequence[Worker],
    sources: Sequence[Worker],
    where: Where,
    engine: str,
    count: int,
    shared: bool,
) -> FactorPlacement:
    """Return the plan on this many ranks of `roster`, with its estimate and its memory."""
    participants = (*roster, *sources)
    model = ENGINES[engine]
    width = block_width(problem.task, count, model.widths, shared=shared)
    made = FactorPlacement(
        problem=problem,
        engine=engine,
        method="columns" if count > 1 or shared else "local",
        participants=participants,
        ranks=tuple(range(count)),
        where=where,
        width=width,
        owners={},
    )
    held = np.zeros((count, len(participants)))
    for name, table in where.items():
        held += made.gathered(name).traffic(table, len(participants)).T
    if count == 1 and held.any():
        # One rank alone is where most threads are, and of these where most of the operands is.
        best = max(range(len(roster)), key=lambda index: (roster[index].nthreads, held[0, index]))
        made = dataclasses.replace(made, ranks=(best,))
    made = dataclasses.replace(made, owners=_owners(made))
    size = problem.compute_type.itemsize
    given = sum(math.prod(matrix.shape) for matrix in problem.matrices)
    home = held[range(count), list(made.ranks)].sum() if held.any() else given / len(participants)
    streamed = (count - 1) * given / 2 * (len(made.sweeps) - made.carried)
    results = sum(math.prod(one.shape) for one in problem.outputs)
    moved = (given - home + streamed + results * (1 - 1 / count)) * size
    return estimated(made, _memory(made), _work(made, moved))


def _work(made: FactorPlacement, moved: float) -> Work:
    """Return the work of a plan, given the bytes that move between workers."""
    problem, model, algorithm = made.problem, ENGINES[made.engine], made.problem.task.algorithm
    count, panels, task = len(made.ranks), made.columns.matrices[0].count, problem.task
    if made.shared:
        phases = _shared_phases(made)
    else:
        # One panel comes after the other, however many ranks there are.
        least = panels * model.panel_seconds.get(algorithm, 0.0) if count > 1 else 0.0
        machine = problem.options.machine("numpy") if task.entry.on_host else made.machine
        share = model.share(algorithm, count) or task.entry.shares[not task.vectors]
        phases = [Phase(problem.flops, machine.rate(task.dtype) * made.threads.sum() * share, least=least)]
    return Work([*phases, Phase(waited={"ranks": moved / count, "messages": panels * (count > 1)})], moved=moved)


def _owners(made: FactorPlacement) -> dict[str, NDArray[np.int32]]:
    """Share the chunks of each output out, evenly by their bytes: block columns of all ranks are in most of them."""
    found, holders = {}, list(made.holders)
    for output in made.problem.outputs:
        ranks = range(len(made.ranks)) if made.output_layout(output.name) is not None else holders
        sizes = output.elements
        loads = collections.Counter(dict.fromkeys(ranks, 0))
        table = np.zeros(output.count, np.int32)
        for index in np.argsort(-sizes, kind="stable").tolist():
            rank = min(ranks, key=lambda one: loads[one])
            loads[rank] += int(sizes[index]) + 1
            table[index] = rank
        found[output.name] = table
    return found


def _memory(made: FactorPlacement) -> NDArray[np.float64]:
    """Return the bytes that each participant holds at most.

    Its chunks of the operands; a rank also its block columns, two panels that are under way, and at the end its part
    of every output and its chunks of that. Chunks of an operand with donated memory are freed before any chunk of the
    outputs exists. A spectral decomposition has a workspace, and its vectors, before they are cut into chunks.
    """
    problem, size, npart = made.problem, made.problem.compute_type.itemsize, len(made.participants)
    total, going = np.zeros(npart), np.zeros(npart)
    for name in problem.operands:
        sizes = problem[name].elements * size
        held = going if name in problem.donated else total
        if name in made.where:
            held += np.bincount(made.where[name], sizes, npart)
        else:
            held += sizes.sum() / npart
    at_the_end = np.zeros(npart)
    for rank, index in enumerate(made.ranks):
        array = made.columns.rows * made.columns.local_cols(rank)
        beside = 2 * made.columns.rows * made.width * size
        if made.shared:
            beside = shared_bytes(problem.task, len(made.ranks), size, made.width)
        elif (workspace := problem.task.entry.workspace) is not None:
            beside = workspace(problem.task) * size
            beside += sum(math.prod(one.shape) * dtype_from_name(one.dtype).itemsize for one in problem.task.outputs)
        results = 0
        for output in problem.outputs:
            layout = made.output_layout(output.name)
            sizes = output.elements
            results += int(sizes[made.owners[output.name] == rank].sum()) * dtype_from_name(output.dtype).itemsize
            if layout is not None and made.output(output.name).swapped:
                results += math.prod(layout.local_shape(rank)) * size
        total[index] += array * size + beside
        at_the_end[index] = results
    return total + (np.maximum(going, at_the_end) if problem.donated else at_the_end)
