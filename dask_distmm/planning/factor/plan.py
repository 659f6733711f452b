"""How a Factorization is computed by this many ranks: the layout of its matrices, and each rank's program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.layout import Layout, redistribution
from dask_distmm.layout.redistribute import Copies
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.factor.problem import Factorization, FactorProblem, TaskOutput, as_matrix
from dask_distmm.planning.model import ENGINES
from dask_distmm.planning.placement import Placement, in_range
from dask_distmm.programs import factor
from dask_distmm.programs.factor import PANEL_PARTS, PARTS, Columns, Matrix, Panels
from dask_distmm.programs.steps import Buffer, Step

# The plan of a factorization on a cluster: its placement, and as work the program of steps


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FactorPlacement(Placement):
    """How a FactorProblem runs."""

    asked_for: ClassVar[tuple[str, ...]] = ("input", "final", "enter", *PARTS)
    problem: FactorProblem
    # Columns of a block.
    width: int
    # For each output by name, int32, one for each of its chunks: the rank that puts it together.
    owners: Mapping[str, NDArray[np.int32]]

    @functools.cached_property
    def work(self) -> FactorPlan:
        """The layout of the matrices on the ranks, and each rank's steps."""
        return work_of(self.problem, self.engine, len(self.ranks), self.width, self.method)

    @property
    def grid(self) -> tuple[int, int, int]:
        """One row of ranks: each has all rows of its block columns."""
        return 1, len(self.ranks), 1

    @property
    def compute_type(self) -> str:
        """Name of the type of all matrices."""
        return self.problem.task.dtype

    def gathered(self, operand: str) -> Copies:
        """Return the copies out of an operand's chunks, in the form that ranks hold, to its block columns."""
        transposed = self.problem.task.orientation(operand).transposed
        chunks = held_chunks(self.problem.chunks_of(operand), transposed)
        return redistribution(Layout.of_chunks(chunks), self.work.input_layout(operand))

    def delivered(self, output: str) -> Copies | None:
        """Return the copies from block columns to an output's chunks, in the form that ranks hold.

        None for an output without block columns: ranks that have it have all of it.
        """
        layout = self.work.output_layout(output)
        if layout is None:
            return None
        transposed = self.work.output(output).orientation.transposed
        return redistribution(layout, Layout.of_chunks(held_chunks(self.problem.output(output).chunks, transposed)))

    def owned(self, output: str, rank: int) -> list[int]:
        """Return the numbers of an output's chunks that a rank puts together."""
        found: list[int] = np.flatnonzero(self.owners[output] == rank).tolist()
        return found

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks publish such a part of a panel of this number."""
        return any(part == kind and 0 <= number < self.work.numbers(part) for part in PARTS)

    def shape_of(self, kind: str, matrix: int, number: int) -> tuple[int, int] | None:
        """Return the shape of a chunk of an operand, or of a rank's part of an output."""
        if kind == "input":
            return super().shape_of(kind, matrix, number)
        outputs = self.problem.outputs
        layout = self.work.output_layout(outputs[matrix].name) if 0 <= matrix < len(outputs) else None
        return layout.local_shape(number) if layout is not None and 0 <= number < len(self.ranks) else None

    def check(self) -> None:
        """Raise `ProtocolError` if the parts of a plan do not fit each other."""
        super().check()
        counts = {one.name: one.count for one in self.problem.outputs}
        good = self.width > 0 and self.ranks and self.owners.keys() == counts.keys()
        if not good or not all(in_range(self.owners[name], counts[name], len(self.ranks)) for name in counts):
            raise ProtocolError(f"malformed plan: width {self.width} or owners do not fit {len(self.ranks)} ranks")


def work_of(problem: FactorProblem, engine: str, count: int, width: int, method: str) -> FactorPlan:
    """Return the layout and the steps of the given number of ranks of an engine."""
    model, shared = ENGINES[engine], method == "columns"
    ways = {"carries": model.by_panels, "collective": model.collective, "queued": model.on_gpus}
    return factor_plan(problem.task, count, width, shared=shared, **ways)


def held_chunks(chunks: Chunks, transposed: bool) -> Chunks:
    """Return chunk sizes in the form that ranks hold of a matrix."""
    return (chunks[1], chunks[0]) if transposed else chunks


# How a Factorization is computed by this many ranks


def factored(problem: Factorization) -> str:
    """Return which factorization A goes through: ``"cholesky"``, ``"lu"``, ``"qr"``, or ``""`` for none."""
    if problem.kind in ("qr", "lstsq", "pinv"):
        return "qr"
    if problem.kind == "solve_triangular" or problem.spectral:
        return ""
    return "cholesky" if problem.hermitian else "lu"


# The least and the most columns of a block on CPUs: wide enough for BLAS.
_WIDTHS = (32, 256)
# Number of blocks that a rank should have: with fewer, ranks finish far apart.
_BLOCKS = 8
# With this many blocks a rank of twice the width the next panel is there in time all the same, and products have a
# higher rate (1 H200, float64, 32768 x 512 by 512, by 1024: 47 and 53 TFLOP/s).
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
    queued: bool = False,
) -> FactorPlan:
    """Return how `ranks` ranks compute `problem`, in blocks of `width` columns; 0 is for `block_width`."""
    shared = shared and problem.shareable and not collective
    if problem.spectral and ranks != 1 and not (collective or shared):
        raise PlanError(f"{problem.kind} on {ranks} ranks: expected one")
    if ranks < 1 or width < 0:
        raise PlanError(f"{ranks} ranks, blocks of {width} columns: expected at least one rank and a width above 0")
    width = width or block_width(problem, ranks, shared=shared)
    return FactorPlan(problem, ranks, width, carries, collective and ranks > 1, shared, queued)


@dataclasses.dataclass(frozen=True)
class FactorPlan:
    """How `ranks` ranks compute `problem`: the layout of its matrices, and each rank's program."""

    # The factorization.
    problem: Factorization
    # Number of ranks.
    ranks: int
    # Columns of a block of A.
    width: int
    # Whether a single right-hand side may go from rank to rank in a substitution (`FactorPlan.carried`).
    carries: bool = False
    # Whether a library computes on all ranks together, on matrices of square blocks that begin on rank 0. It takes no
    # steps, and a spectral decomposition has block columns, too.
    collective: bool = False
    # Whether the block columns of a matrix whose eigenvalues are wanted are distributed, for ranks that take steps;
    # otherwise one rank has it all.
    shared: bool = False
    # Whether calls are queued, so that updates come before a panel that the thread waits for.
    queued: bool = False

    @functools.cached_property
    def columns(self) -> Columns:
        """Where block columns lie."""
        problem = self.problem
        m, n = problem.a_shape
        a = (n, m) if problem.orientation("a").transposed else (m, n)
        second: tuple[int, int] | None = None
        if problem.b_shape is not None:
            rows, cols = problem.b_shape
            second = (cols, rows) if problem.orientation("b").transposed else (rows, cols)
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
    def sweeps(self) -> tuple[str, ...]:
        """How often all panels are applied, one after the other: a factorization, substitution, or reflections."""
        second, name = len(self.columns.matrices) > 1, factored(self.problem)
        if self.problem.spectral:
            return ("reflect",) if self.shared and second and self.panels else ()
        substituted = second and self.problem.kind != "qr"
        reflected = second and (self.problem.kind == "qr" or self.problem.by_adjoint)
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
        return self.carries and self.ranks > 1 and single and "substitute" in self.sweeps

    @property
    def holders(self) -> range:
        """The ranks that have the results without block columns: those with all pivots in the end, or the only one."""
        if self.problem.spectral:
            return range(1)
        return range({"lu": self.ranks, "slogdet": 1, "det": 1}.get(self.problem.kind, 0))

    @functools.lru_cache(maxsize=16)  # noqa: B019 - plans are few, and small
    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the program of a rank."""
        task, columns, panels = self.problem, self.columns, self.panels
        name, last, count = factored(task), columns.first(1), columns.count
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
            queued=self.queued and name == "qr",
        )
        if len(columns.matrices) > 1 and not self.shared:
            factor.complete_second(p, identity=task.b_order is not None)
        if self.collective:
            return p.end()
        if task.spectral:
            results = [Buffer(f"result.{one.name}", as_matrix(one.shape), one.dtype) for one in task.outputs]
            if self.shared:
                factor.eigenvalues(p, panels if self.sweeps else (), results[:1], vectors=task.vectors)
            else:
                factor.decompose(p, results)
            return p.end()
        # Right-hand sides go through the factorization with A; but not the columns that are to become Q, or a solution
        # of an underdetermined system.
        together = len(columns.matrices) > 1 and task.kind != "qr" and not task.by_adjoint
        if name:
            {"cholesky": factor.cholesky, "lu": factor.lu, "qr": factor.qr}[name](
                p, panels, count if together else last
            )
        else:
            p.complete(panels)
        if "substitute" in self.sweeps:
            factor.substitute(p, panels, carried=self.carried, **substitution)
        if "reflect" in self.sweeps:
            # The columns of Q before a panel's first one are those of the identity in its rows: they stay as they are.
            factor.reflect(p, panels, lambda k: last + k if task.kind == "qr" else last)
        return p.end()

    @property
    def _check(self) -> str:
        """What the diagonal of a factor must not have: ``"zero"``, ``"rank"``, or ``""`` for nothing to look for."""
        if self.problem.kind in ("lstsq", "pinv"):
            return "rank"
        solved = self.problem.kind in ("solve", "inv", "solve_triangular") and not self.problem.unit_diagonal
        return "zero" if solved and factored(self.problem) != "cholesky" else ""

    def numbers(self, part: str) -> int:
        """Return how many arrays there are of what ranks ask each other for; they are numbered from 0."""
        if part in PANEL_PARTS:
            return self.columns.count
        if part in ("vector", "product", "reflectors"):
            return self.problem.a_shape[0]
        return self.ranks

    def input_layout(self, name: str) -> Layout:
        """Return the layout of ``"a"`` or ``"b"``, in the form that ranks are given (`Factorization.orientation`)."""
        return self.columns.layout("ab".index(name))

    def output(self, name: str) -> TaskOutput:
        """Return a result by its name."""
        found = next(one for one in self.problem.outputs if one.name == name)
        # The block columns of eigenvectors are distributed as those of a second matrix.
        if (self.collective or self.shared) and found.form == "spectral" and len(found.shape) > 1:
            return dataclasses.replace(found, matrix=1, form="full")
        return found

    def output_layout(self, name: str) -> Layout | None:
        """Return the layout of a result, of the form of it that ranks hold; None if it has no block columns."""
        output = self.output(name)
        return None if output.matrix is None else self.columns.layout(output.matrix, output.held)
