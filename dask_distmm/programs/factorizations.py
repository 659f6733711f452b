"""Factorizations, solutions and decompositions as values: what is computed of one or two matrices.

`Factorization` says what a user asked for; `KINDS` has all that there is to know of each kind beside how its steps are
recorded (`programs.factor`) and the functions that one rank calls (`engines.programs.spectral`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from dask_distmm.errors import PlanError, check_square
from dask_distmm.layout import Layout

# How an output is taken out of what a rank holds. Triangles have zeros, or ones, in place of the other elements.
Form = Literal[
    "full", "lower", "unit lower", "upper", "residuals", "pivots", "permutation", "diagonal", "sign", "logdet", "det",
    "spectral", "info",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Orientation:
    """Whether the transpose of a matrix is what ranks hold, and whether they hold its conjugate."""

    transposed: bool = False
    conjugated: bool = False

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of a matrix in the form that ranks hold."""
        return (shape[1], shape[0]) if self.transposed else shape

    def of_chunks(self, chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout:
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
    # the ranks that `FactorPlacement.holders` names.
    matrix: int | None
    # How it is taken out of what a rank holds.
    form: Form
    # How ranks hold it.
    orientation: Orientation = Orientation()
    # Whether panels swap its rows after they were computed, so that it is a copy.
    swapped: bool = False


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of an output as a matrix: a vector is a row, a number is a matrix of one element."""
    rows, cols = (*(1,) * (2 - len(shape)), *shape)
    return rows, cols


_DTYPES = ("float32", "float64", "complex64", "complex128")
_CHOICES = {
    "op": ("N", "T", "C"),
    "mode": ("reduced", "complete", "r"),
    "assume_a": ("gen", "pos"),
    # "" for factors in the type of A; otherwise that of their products. All else in factors is float32 or complex64.
    "factor_dtype": ("", "float32", "tf32", "float16", "bfloat16"),
}
# How many numbers tell how a solution was refined: see `programs.refine`.
NUMBERS = 6


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
    # solve, inv, lstsq of a square matrix: the type of factors with which the solution is refined, see `_CHOICES`.
    # cholesky, lu: that of products.
    factor_dtype: str = ""
    # solve: factors are operands, in few bits: L as `f`, or L and U, and pivots as `p`.
    has_factors: bool = False
    # All kinds: whether a NaN or an infinity among the elements that are read is an error.
    check_finite: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"unknown factorization {self.kind!r}; known are {', '.join(map(repr, KINDS))}")
        if self.dtype not in _DTYPES:
            raise PlanError(f"{self.kind} of {self.dtype}: convert A and B to one of {', '.join(_DTYPES)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise PlanError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(map(repr, choices))}")
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
        if self.refines and m != n:
            raise PlanError(f"factor_dtype is for square matrices, a is {m} x {n}: leave it out")

    @property
    def refines(self) -> bool:
        """Whether a solution by factors in low precision is refined."""
        return bool(self.factor_dtype) and self.kind in ("solve", "inv", "lstsq")

    def products(self, *, on_gpus: bool) -> str:
        """Return how products are computed in low-precision factorizations; empty for the type of the factors.

        On GPUs those of float32 are computed by three of float16 (``"fp16x3"``), which have 22 bits and are three times
        as fast.
        """
        if self.factor_dtype == "float32":
            return "fp16x3" if on_gpus and self.dtype_of_factors == "float32" else ""
        return self.factor_dtype

    @property
    def dtype_of_factors(self) -> str:
        """Name of the factors' type: of low precision if the solution is refined."""
        if not self.refines:
            return self.dtype
        return "complex64" if self.dtype.startswith("complex") else "float32"

    @property
    def refined_way(self) -> str:
        """Return the factorization that refinement uses."""
        return "cholesky" if self.hermitian else "lu"

    @property
    def entry(self) -> Kind:
        """The entry of its kind in `KINDS`."""
        return KINDS[self.kind]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the matrices that are read: ``"a"``, and ``"b"`` where there are right-hand sides."""
        if self.has_factors:
            return ("a", "f", "b") if self.hermitian else ("a", "p", "f", "b")
        return ("a",) if self.b_shape is None else ("a", "b")

    @property
    def spectral(self) -> bool:
        """Whether one rank computes it by one call of LAPACK (or cuSOLVER)."""
        return self.entry.workspace is not None

    @property
    def shareable(self) -> bool:
        """Whether ranks can share this spectral decomposition, by tridiagonalization."""
        return self.spectral and self.hermitian and self.b_shape is None and self.a_shape[0] > 0

    @property
    def hermitian(self) -> bool:
        """Whether A is taken for Hermitian; ranks read the lower triangle of what they hold."""
        return self.entry.hermitian or self.assume_a == "pos"

    @property
    def factored(self) -> str:
        """The factorization of A: ``"cholesky"``, ``"ldlt"``, ``"lu"``, ``"qr"``, or ``""`` for none."""
        return "cholesky" if self.assume_a == "pos" else self.entry.factored

    @property
    def algorithm(self) -> str:
        """Name of A's algorithm in the engines' table of shares."""
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
        if name in "fp":
            upper = self.hermitian and not self.lower
            return Orientation(upper, upper)
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
        if self.hermitian and (name in "af" or self.spectral):
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
        if self.refines:
            return (*_solution(self), TaskOutput("info", (NUMBERS,), "float64", None, "info"))
        return self.entry.outputs(self)


# What there is to know of each kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A factorization, a solver with its factors, or a spectral task of one rank.

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
    factors = 0.0 if task.has_factors else (_cholesky_flops if task.hermitian else _lu_flops)(task)
    return factors + 2 * _triangular_flops(task)


def _solution(task: Factorization) -> tuple[TaskOutput, ...]:
    shape = task.b_shape if task.right and task.b_shape else (task.a_shape[1], task.nrhs)
    return (TaskOutput("x", shape, task.dtype, 1, "full", task.orientation("b")),)


def _cholesky_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    # U is the conjugate transpose of the L that ranks compute.
    return (TaskOutput("ul"[task.lower], task.a_shape, task.dtype, 0, "lower", Orientation(*2 * [not task.lower])),)


def _ldlt_outputs(task: Factorization) -> tuple[TaskOutput, ...]:
    return (
        TaskOutput("l", task.a_shape, task.dtype, 0, "unit lower"),
        TaskOutput("d", task.a_shape[:1], _real(task.dtype), None, "diagonal"),
    )


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
    """Return an output that one rank has as a whole."""
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
        options=["lower", "factor_dtype"],
        hermitian=True,
        factored="cholesky",
        outputs=_cholesky_outputs,
        flops=_cholesky_flops,
    ),
    "ldlt": Kind(hermitian=True, factored="ldlt", outputs=_ldlt_outputs, flops=_cholesky_flops, shares=(0.75, 0.75)),
    "lu": Kind(options=["factor_dtype"], square=False, factored="lu", outputs=_lu_outputs, flops=_lu_flops),
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
        options=["assume_a", "lower", "op", "factor_dtype", "has_factors"],
        with_b=True,
        factored="lu",
        outputs=_solution,
        flops=_solve_flops,
    ),
    "solve_triangular": Kind(
        options=["lower", "op", "unit_diagonal", "right"], with_b=True, outputs=_solution, flops=_triangular_flops
    ),
    "inv": Kind(
        options=["assume_a", "lower", "factor_dtype"],
        factored="lu",
        identity=lambda task: task.a_shape[0],
        outputs=_solution,
        flops=_solve_flops,
    ),
    "det": Kind(factored="lu", outputs=_determinants("det"), flops=_lu_flops),
    "slogdet": Kind(factored="lu", outputs=_determinants("sign", "logdet"), flops=_lu_flops),
    "lstsq": Kind(
        options=["factor_dtype"],
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
