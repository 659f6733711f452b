"""How a Factorization is computed by this many ranks.

A panel can be factorized as soon as all panels before it have been applied to its own block column. So the owner of the
next panel applies this one to that block column first, factorizes it, publishes it, and only then updates its other
blocks. Meanwhile the other ranks update theirs, and the next panel travels::

    rank 0   F0 |  A0 to its blocks               | A1 to 2 | F2 | A1 to the rest
    rank 1      | A0 to 1 | F1 | A0 to the rest   |    A1 to its blocks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.layout import Layout, redistribution
from dask_distmm.layout.redistribute import Copies
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.factor.problem import Factorization, FactorProblem, TaskOutput
from dask_distmm.planning.factor.steps import (
    Apply,
    Ask,
    Check,
    Columns,
    Decompose,
    Diagonalize,
    Drop,
    Factor,
    Get,
    Key,
    Matrix,
    NormalizePhases,
    Operation,
    Part,
    Publish,
    Step,
    Tridiagonalize,
)
from dask_distmm.planning.model import ENGINES
from dask_distmm.planning.placement import Placement, in_range

# The plan of a factorization on a cluster: its placement, and as work the program of steps


# What a rank asks another for by the number of a panel.
PARTS: tuple[Part, ...] = get_args(Part)


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
    return factor_plan(problem.task, count, width, carries=model.by_panels, collective=model.collective, shared=shared)


def held_chunks(chunks: Chunks, transposed: bool) -> Chunks:
    """Return chunk sizes in the form that ranks hold of a matrix."""
    return (chunks[1], chunks[0]) if transposed else chunks


# The phases of each kind of problem: which panels, in which order, are applied to which block columns


_FACTORS = ("cholesky", "lu", "qr")


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Panels that are applied to block columns, one panel after the other."""

    # How a panel changes a block column. Of a factorization, each panel is factorized by its owner first.
    operation: Operation
    # Which part of the panel is needed.
    part: Part
    # Numbers of the panels in their order.
    panels: tuple[int, ...]
    # For each panel, the first and the last + 1 of the block columns that it is applied to.
    targets: tuple[tuple[int, int], ...]
    # Whether the one block column that panels are applied to goes from owner to owner of these, and home again.
    # Otherwise its rank gets all panels, which is far more than one right-hand side.
    carried: bool = False

    @property
    def factors(self) -> bool:
        """Whether panels are factorized."""
        return self.operation.name in _FACTORS


def factored(problem: Factorization) -> str:
    """Return which factorization A goes through: ``"cholesky"``, ``"lu"``, ``"qr"``, or ``""`` for none."""
    if problem.kind in ("qr", "lstsq", "pinv"):
        return "qr"
    if problem.kind == "solve_triangular" or problem.spectral:
        return ""
    return "cholesky" if problem.hermitian else "lu"


def phases(problem: Factorization, columns: Columns) -> tuple[Phase, ...]:
    """Return the phases of a problem; a decomposition on one rank has none.

    Where eigenvalues are shared out, the reflectors of the tridiagonal reduction are applied to eigenvectors.
    """
    name, last, count = factored(problem), columns.first(1), columns.count
    second = len(columns.matrices) > 1
    if problem.spectral:
        reflectors = columns.matrices[0].shape[0] - 1 if columns.below and second else 0
        order = tuple(range(-(-reflectors // columns.matrices[0].width)))[::-1]
        return (Phase(Operation("reflect"), "lower", order, ((last, count),) * len(order)),) if order else ()
    panels = tuple(range(-(-min(columns.matrices[0].shape) // columns.matrices[0].width)))
    # Right-hand sides go through the factorization with A; but not the columns that are to become Q, or a solution of
    # an underdetermined system.
    together = second and problem.kind != "qr" and not problem.by_adjoint
    found = []
    if name:
        stop = count if together else last
        found.append(Phase(Operation(name), "lower", panels, tuple((panel + 1, stop) for panel in panels)))
    others = ((last, count),) * len(panels)
    if problem.kind == "solve_triangular":
        found.append(_substitution(problem.lower, problem.substituted, problem.unit_diagonal, panels, others))
    elif second and problem.kind != "qr":
        if name == "cholesky":
            found.append(_substitution(True, "C", False, panels, others))
        else:
            found.append(_substitution(False, "C" if problem.by_adjoint else "N", False, panels, others))
    if second and (problem.kind == "qr" or problem.by_adjoint):
        # The columns of Q before a panel's first one are those of the identity in its rows: they stay as they are.
        reflected = tuple((last + panel, count) for panel in panels) if problem.kind == "qr" else others
        found.append(Phase(Operation("reflect"), "lower", panels[::-1], reflected[::-1]))
    return tuple(found)


def carrying(found: tuple[Phase, ...], columns: Columns) -> tuple[Phase, ...]:
    """Return the phases, with a single right-hand side carried in substitutions."""
    first = columns.first(1)
    if columns.ranks == 1 or columns.count != first + 1 or columns.blocks[first].stop > 1:
        return found
    return tuple(dataclasses.replace(one, carried=one.operation.name == "substitute") for one in found)


def _substitution(
    lower: bool, op: str, unit: bool, panels: tuple[int, ...], targets: tuple[tuple[int, int], ...]
) -> Phase:
    """Return the solution of a triangular system: from the first block row to the last one, or from the last one."""
    order = panels if lower == (op == "N") else panels[::-1]
    return Phase(Operation("substitute", lower, op, unit), "lower" if lower else "upper", order, targets)


# The steps of one rank, from the phases: with one panel of lookahead


def steps_of(
    rank: int, phases: Sequence[Phase], columns: Columns, *, check: str = "", pivots_on: Sequence[int] = ()
) -> tuple[Step, ...]:
    """Return the steps of a rank in their order."""
    return tuple(_Builder(rank, phases, columns, check, frozenset(pivots_on)).build())


def launch_order(steps: Iterable[Step], is_short: Callable[[Apply], bool] = lambda step: False) -> Iterator[Step]:
    """Yield the steps of a rank in an order for devices that only put them on streams, and panels that are waited for.

    What a panel is applied to besides the next one comes before that is factorized, so that the device has it to do
    while the thread waits.
    """
    later: list[Step] = []
    ahead: Apply | None = None
    for step in steps:
        if ahead and isinstance(step, Factor | Check | Publish):
            later.append(step)
            continue
        rest = ahead is not None and isinstance(step, Apply) and step[:2] == ahead[:2] and not is_short(step)
        if rest:
            yield step
        yield from later
        if not rest:
            yield step
        later, ahead = [], step if isinstance(step, Apply) and step.ahead else None
    yield from later


class _Builder:
    def __init__(
        self, rank: int, phases: Sequence[Phase], columns: Columns, check: str, pivots_on: frozenset[int]
    ) -> None:
        self.rank, self.phases, self.columns = rank, phases, columns
        self.check, self.pivots_on = check, pivots_on

    def build(self) -> Iterator[Step]:
        if self.phases and not self.phases[0].factors:
            for panel in self.phases[0].panels:
                if self.mine(panel):
                    yield from self.complete(panel)
        for phase in self.phases:
            yield from self.phase(phase)
        if self.rank in self.pivots_on:
            # Pivots come with the panels that are applied here.
            applied = {
                panel
                for panel, targets in zip(self.phases[0].panels, self.phases[0].targets, strict=True)
                if self.columns.owned(self.rank, *targets)
            }
            missing = [panel for panel in self.phases[0].panels if not self.mine(panel) and panel not in applied]
            keys = [(Key("pivots", panel), self.columns.owner(panel)) for panel in missing]
            yield from (Ask(key, owner) for key, owner in keys)
            yield from (Get(key) for key, _ in keys)

    def mine(self, block: int) -> bool:
        return self.columns.owner(block) == self.rank

    def phase(self, phase: Phase) -> Iterator[Step]:
        if phase.carried:
            yield from self.carry(phase)
            return
        todo = list(zip(phase.panels, phase.targets, strict=True))
        if todo:
            yield from self.begin(phase, *todo[0])
        for at, (panel, (begin, stop)) in enumerate(todo):
            first, key = begin, Key(phase.part, panel)
            remote = bool(self.columns.owned(self.rank, first, stop)) and not self.mine(panel)
            if remote:
                yield Get(key)
            if at + 1 < len(todo):
                following, targets = todo[at + 1]
                ahead = phase.factors and self.mine(following)
                if ahead:
                    yield Apply(phase.operation, key, following, following + 1, ahead=True)
                    first = following + 1
                yield from self.begin(phase, following, targets)
            if self.columns.owned(self.rank, first, stop):
                yield Apply(phase.operation, key, first, stop)
            if remote:
                yield Drop(key)

    def carry(self, phase: Phase) -> Iterator[Step]:
        """Apply the rank's own panels to the right-hand side when it comes, and hand it on."""
        home = self.columns.first(1)
        holder = self.columns.owner(home)
        for panel in (*phase.panels, home):
            key, owner = Key("carried", panel), self.columns.owner(panel)
            if owner != holder and self.rank == holder:
                yield Publish(key)
            elif owner != holder and self.rank == owner:
                yield Ask(key, holder)
                yield Get(key)
            if panel != home and self.rank == owner:
                yield Apply(phase.operation, Key(phase.part, panel), home, home + 1)
            holder = owner

    def begin(self, phase: Phase, panel: int, targets: tuple[int, int]) -> Iterator[Step]:
        """Make a panel, or ask for it."""
        if not self.mine(panel):
            if self.columns.owned(self.rank, *targets):
                yield Ask(Key(phase.part, panel), self.columns.owner(panel))
        elif phase.factors:
            yield Factor(phase.operation, panel)
            yield from self.complete(panel)

    def complete(self, panel: int) -> Iterator[Step]:
        """Check and publish a panel of this rank that does not change any more."""
        if self.check:
            yield Check(panel, self.check == "rank")
        parts = {phase.part for phase in self.phases if not phase.carried}
        for part in ("lower", "upper"):
            if part in parts and self.columns.ranks > 1:
                yield Publish(Key(part, panel))
        if self.pivots_on - {self.rank}:
            yield Publish(Key("pivots", panel))


# How a Factorization is computed by this many ranks


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

    # The factorization.
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
    # Whether the block columns of a matrix whose eigenvalues are wanted are distributed, for ranks that take steps;
    # otherwise one rank has it all.
    shared: bool = False

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
            return (Tridiagonalize(), Diagonalize(), *applied, *([NormalizePhases()] if self.problem.vectors else []))
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
