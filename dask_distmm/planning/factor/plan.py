"""How a Factorization is computed by so many ranks."""

from __future__ import annotations

import dataclasses
import functools

from dask_distmm.errors import PlanError
from dask_distmm.layout import BlockCyclicLayout
from dask_distmm.planning.factor.columns import Columns, Matrix
from dask_distmm.planning.factor.lookahead import steps_of
from dask_distmm.planning.factor.phases import Phase, carrying, factored, phases
from dask_distmm.planning.factor.problem import Factorization, TaskOutput
from dask_distmm.planning.factor.steps import Decompose, Diagonalize, Orient, Part, Step, Tridiagonalize

# The least and the most columns of a block on CPUs: wide enough for BLAS.
_WIDTHS = (32, 256)
# So many blocks a rank should have, or ranks finish far apart.
_BLOCKS = 8
# With so many blocks a rank of twice the width the next panel is there in time all the same, and products have a higher
# rate (1 H200, float64, 32768 x 512 by 512, by 1024: 47 and 53 TFLOP/s).
_MANY = 32
# The most columns of a block where all ranks read their whole share for each column that is eliminated.
_EVEN = 256


def block_width(problem: Factorization, ranks: int, widths: tuple[int, int] = _WIDTHS, *, shared: bool = False) -> int:
    """Return the columns of a block of A."""
    least, most = widths
    if shared:
        most = max(least, min(most, _EVEN))
    elif ranks == 1:
        # LAPACK cuts a matrix better than we do; of a QR factorization each block has a triangle T of its width.
        return most if factored(problem) == "qr" else max(most, *problem.a_shape)
    if factored(problem) != "qr" and min(problem.a_shape) >= _MANY * ranks * 2 * most:
        most *= 2
    even = -(-min(problem.a_shape) // (ranks * _BLOCKS))
    return max(least, min(most, -(-even // least) * least))


def factor_plan(
    problem: Factorization,
    ranks: int,
    width: int = 0,
    *,
    carries: bool = False,
    collective: bool = False,
    shared: bool = False,
) -> FactorPlan:
    """Return how `ranks` ranks compute `problem`, in blocks of `width` columns; 0 is for `block_width`."""
    shared = shared and problem.shareable and not collective
    if problem.spectral and ranks != 1 and not (collective or shared):
        raise PlanError(f"{problem.kind} on {ranks} ranks: expected one")
    if ranks < 1 or width < 0:
        raise PlanError(f"{ranks} ranks, blocks of {width} columns: expected at least one rank and a width above 0")
    width = width or block_width(problem, ranks, shared=shared)
    return FactorPlan(problem, ranks, width, carries, collective and ranks > 1, shared)


@dataclasses.dataclass(frozen=True)
class FactorPlan:
    """How `ranks` ranks compute `problem`: the layout of its matrices, and each rank's program."""

    # What is computed.
    problem: Factorization
    # Number of ranks.
    ranks: int
    # Columns of a block of A.
    width: int
    # Whether a single right-hand side may go from rank to rank in a substitution (`Phase.carried`).
    carries: bool = False
    # Whether a library computes on all ranks together, on matrices of square blocks that begin on rank 0. It takes no
    # steps, and a spectral decomposition has block columns, too.
    collective: bool = False
    # Whether the block columns of a matrix whose eigenvalues are wanted are dealt out, for ranks that take steps;
    # otherwise one rank has it all.
    shared: bool = False

    @functools.cached_property
    def columns(self) -> Columns:
        """Where block columns lie."""
        problem = self.problem
        m, n = problem.a_shape
        a = (n, m) if problem.turned("a").transposed else (m, n)
        second: tuple[int, int] | None = None
        if problem.b_shape is not None:
            rows, cols = problem.b_shape
            second = (cols, rows) if problem.turned("b").transposed else (rows, cols)
        elif problem.b_order is not None:
            second = (m if problem.kind == "qr" else problem.b_order, problem.b_order)
        elif problem.spectral and problem.vectors and self.collective:
            second = a
        elif self.shared and problem.vectors:
            second = next(one.shape for one in problem.outputs if one.name == "v")  # type: ignore[assignment]
        below = int(self.shared)
        if second is None:
            return Columns((Matrix(a, self.width),), self.ranks, below=below)
        # The block columns of Q begin where those of A do. Of right-hand sides each rank gets some if it can.
        even = -(-second[1] // self.ranks)
        width = self.width if problem.kind == "qr" or self.collective else max(1, min(self.width, even))
        matrices = Matrix(a, self.width), Matrix(second, width)
        return Columns(matrices, self.ranks, aligned=self.collective, below=below)

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Which panels are applied to which block columns, in which order."""
        found = phases(self.problem, self.columns)
        return carrying(found, self.columns) if self.carries else found

    @property
    def holders(self) -> range:
        """The ranks that have the results without block columns: those with all pivots in the end, or the only one."""
        if self.problem.spectral:
            return range(1)
        return range({"lu": self.ranks, "slogdet": 1, "det": 1}.get(self.problem.kind, 0))

    @functools.lru_cache(maxsize=16)  # noqa: B019 - plans are few, and small
    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the program of a rank."""
        if self.shared:
            applied = steps_of(rank, self.phases, self.columns)
            return (Tridiagonalize(), Diagonalize(), *applied, *([Orient()] if self.problem.vectors else []))
        if self.problem.spectral:
            return (Decompose(),)
        kind, checked = self.problem.kind, ""
        if kind in ("lstsq", "pinv"):
            checked = "rank"
        elif kind in ("solve", "inv", "solve_triangular") and not self.problem.unit_diagonal:
            checked = "zero" if factored(self.problem) != "cholesky" else ""
        return steps_of(rank, self.phases, self.columns, check=checked, pivots_on=self.holders)

    def numbers(self, part: Part) -> int:
        """Return how many arrays there are of what ranks ask each other for; they are numbered from 0."""
        if part in ("lower", "upper", "pivots", "carried"):
            return self.columns.count
        if part in ("vector", "product", "reflectors"):
            return self.problem.a_shape[0]
        return self.ranks

    def input_layout(self, name: str) -> BlockCyclicLayout:
        """Return the layout of ``"a"`` or ``"b"``, of the form of it that ranks are given (`Factorization.turned`)."""
        return self.columns.layout("ab".index(name))

    def output(self, name: str) -> TaskOutput:
        """Return a result by its name."""
        found = next(one for one in self.problem.outputs if one.name == name)
        # The block columns of eigenvectors are dealt out as those of a second matrix.
        if (self.collective or self.shared) and found.form == "spectral" and len(found.shape) > 1:
            return dataclasses.replace(found, matrix=1, form="full")
        return found

    def output_layout(self, name: str) -> BlockCyclicLayout | None:
        """Return the layout of a result, of the form of it that ranks hold; None if it has no block columns."""
        output = self.output(name)
        return None if output.matrix is None else self.columns.layout(output.matrix, output.held)
