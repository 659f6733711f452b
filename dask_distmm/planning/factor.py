"""Factorizations and solves of Dask arrays: the ranks, their steps, time and memory. The same for all engines.

A `FactorPlacement` says which rank has which block column: it puts the builders of `programs.factor` together.

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
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError, ProjectedMemoryError, ProtocolError
from dask_distmm.layout import Layout, redistribution
from dask_distmm.layout.redistribute import Copies
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Computation, Worker
from dask_distmm.planning.model import ENGINES, EngineModel, Estimate, Phase, Work
from dask_distmm.planning.placement import Placement, Where, choose, estimated, in_range, need_workers
from dask_distmm.planning.program import remembered
from dask_distmm.planning.wire import HERE
from dask_distmm.programs import factor
from dask_distmm.programs.factor import PANEL_PARTS, PARTS, Columns, Matrix, Panels
from dask_distmm.programs.factorizations import Factorization, TaskOutput, as_matrix
from dask_distmm.programs.refine import CROSSING, EXPECTED, inverted_order, kept_columns, refined
from dask_distmm.programs.steps import PART, Buffer, Step

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
        shapes = {
            "a": self.task.a_shape,
            "b": self.task.b_shape,
            "f": self.task.a_shape,
            "p": (1, self.task.a_shape[0]),
        }
        for name, shape in shapes.items():
            if name in self.task.inputs and self[name].shape != shape:
                raise PlanError(f"{name.upper()} is {shape}, its chunks add up to {self[name].shape}")
        outputs = {output.name: output for output in self.task.outputs}
        for output in self.wanted:
            if output.name not in outputs:
                raise PlanError(f"{self.task.kind} has no output {output.name!r}; it has {', '.join(outputs)}")
            expected = as_matrix(outputs[output.name].shape)
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
    elif ranks == 1 and problem.factor_dtype in ("", "float32"):
        # LAPACK cuts a matrix better than we do; of a QR factorization each block has a triangle T of its width.
        return most if problem.factored == "qr" else max(most, *problem.a_shape)
    if (name := problem.factored) != "qr":
        many, step = (_MANY_CHOLESKY, least) if name == "cholesky" else (_MANY, most)
        # Where tensor cores compute in few bits, what panels take is calls of kernels.
        many = many * 3 // 4 if name == "cholesky" and problem.products else many
        most = max(most, min(2 * most, min(problem.a_shape) // (many * ranks) // step * step))
    even = -(-min(problem.a_shape) // (ranks * _BLOCKS))
    return max(least, min(most, -(-even // least) * least))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FactorPlacement(Placement):
    """How a FactorProblem runs."""

    asked_for: ClassVar[tuple[str, ...]] = ("input", "final", "enter", PART, *PARTS)
    problem: FactorProblem
    # Columns of a block.
    width: int
    # For each output by name, int32, one for each of its chunks: the rank that puts it together.
    owners: Mapping[str, NDArray[np.int32]]
    # Whether there is memory to factorize A itself where factors of few bits are of no use; what it takes to do so at
    # once.
    exact: bool = True
    # Whether there is memory for all ranks to have all factors of few bits.
    whole: bool = True
    plain: Estimate | None = dataclasses.field(default=None, metadata=HERE)

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
        shape = (1, self.task.a_shape[0]) if operand == "p" else None
        return redistribution(chunks, self.columns.layout(int(operand == "b"), shape))

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
        numbers: list[int] = np.flatnonzero(self.owners[output] == rank).tolist()
        return numbers

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks publish such a part of a panel of this number."""
        if self.task.refines:
            return number >= 0
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
        counts = {output.name: output.count for output in self.problem.outputs}
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
            second = next(output.shape for output in problem.outputs if output.name == "v")  # type: ignore[assignment]
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
        most = self.width if self.task.refines else 1
        single = self.columns.count == first + 1 and self.columns.blocks[first].stop <= most
        return ENGINES[self.engine].by_panels and self.count > 1 and single and "substitute" in self.sweeps

    @property
    def holders(self) -> range:
        """The ranks that have the results without block columns: those with all pivots in the end, or the only one."""
        outputs = self.task.outputs
        return range(self.count if any(x.swapped for x in outputs) else any(x.matrix is None for x in outputs))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the steps of a rank."""
        names = tuple(output.name for output in self.problem.outputs)
        what = self.task, self.engine, self.method, self.count, self.width, names
        return remembered((*what, self.exact, self.whole), rank, lambda: self._record(rank))

    def multiplied(self, rank: int) -> list[int]:
        """Return the numbers of A's chunks that a rank multiplies: those that it holds, and its share of others'."""
        rank_of = {participant: rank_number for rank_number, participant in enumerate(self.ranks)}
        holders = self.where["a"].tolist()
        turns = itertools.count()
        by = [rank_of[holder] if holder in rank_of else next(turns) % self.count for holder in holders]
        return [number for number, owner in enumerate(by) if owner == rank]

    def _record(self, rank: int) -> tuple[Step, ...]:
        return self._refined(rank) if self.task.refines else self._recorded(rank).end()

    def _refined(self, rank: int) -> tuple[Step, ...]:
        """Return the steps with factors of few bits, and behind a flag those with A itself."""
        task = self.task
        parts = {"lower"} if (self.carried and not self.whole) or task.hermitian else {"lower", "upper"}
        p = Panels(
            rank,
            self.columns,
            task.dtype_of_factors,
            factored="" if task.has_factors else task.refined_way,
            parts=sorted(parts),
            compute=task.products,
            lenient=True,
        )
        refined(
            p,
            self.panels,
            dtype=task.dtype,
            positive=task.hermitian,
            narrow=task.factor_dtype == "float16",
            identity=task.b_order is not None,
            has_factors=task.has_factors,
            op="N" if task.hermitian else task.op,
            carried=self.carried,
            whole=self.whole,
            inverts=ENGINES[self.engine].on_gpus,
            info="info" if any(output.name == "info" for output in self.problem.outputs) else "",
            otherwise=functools.partial(self._recorded, rank, self.columns.count) if self.exact else None,
        )
        return p.end()

    def _recorded(self, rank: int, numbered: int = 0) -> Panels:
        """Record the steps in the type of A; `numbered` panels of earlier factors have used their numbers."""
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
            holders=() if task.spectral or task.refines else self.holders,
            numbered=numbered,
            compute="" if task.refines else task.products,
            queued=ENGINES[self.engine].on_gpus and name == "qr",
            together=ENGINES[self.engine].collective,
        )
        for operand in task.inputs:
            if operand in "ab":
                p.gather(operand, int(operand == "b"))
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
            for output in map(self.output, () if task.refines else (output.name for output in self.problem.outputs)):
                self._store(p, output)
        return p

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
        output = next(output for output in self.task.outputs if output.name == name)
        # The block columns of eigenvectors are distributed as those of a second matrix.
        if self.shared and output.form == "spectral" and len(output.shape) > 1:
            return dataclasses.replace(output, matrix=1, form="full")
        return output

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


def _shared_phases(plan: FactorPlacement) -> list[Phase]:
    """Return the computation itself: reads of one triangle for each column that is eliminated, columns, products."""
    task, ranks, machine, model = plan.problem.task, len(plan.ranks), plan.machine, ENGINES[plan.engine]
    threads = plan.threads.sum() * _SHARE
    n, complexes = float(task.a_shape[0]), 4 if task.dtype.startswith("complex") else 1
    column = model.column_seconds + (ranks > 1 and not model.reads_peers) * 2 * plan.message_seconds
    flops, vectors = (2 / 3 + 2 * task.vectors) * complexes * n**3, 4 / 3 * n**3 * task.vectors
    return [
        Phase(touched=n**3 / 6 * plan.problem.compute_type.itemsize / ranks),
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
    _check_factors(problem, engine)
    where = where or {}
    candidates = sorted(_candidates(problem, len(roster), engine))
    plans = [_consider(problem, roster, sources, where, engine, *candidate) for candidate in candidates]
    # The order says how eigenvalues are computed; the other way is taken where memory is short.
    large = _shares_eigh(problem, len(roster), engine)
    plans.sort(key=lambda plan: (plan.shared != large, plan.seconds))
    rows, cols = problem.task.a_shape
    what = f"{problem.task.kind} of a matrix of {rows} x {cols} ({problem.task.dtype})"
    remedies = _remedies(problem, len(roster), engine)
    if not problem.task.refines:
        return choose(plans, what, remedies)
    # First what is gone without is that each rank has all factors, then factors of A itself.
    for exact, whole in ((True, True), (True, False), (False, False)):
        plans = [_consider(problem, roster, sources, where, engine, *pair, exact, whole) for pair in candidates]
        with contextlib.suppress(ProjectedMemoryError) if exact else contextlib.nullcontext():
            best = choose(sorted(plans, key=lambda plan: plan.seconds), what, remedies)
            break
    if problem.task.has_factors:
        return best
    x = tuple(output for output in problem.wanted if output.name == "x")
    plain = dataclasses.replace(problem, task=dataclasses.replace(problem.task, factor_dtype=""), wanted=x)
    return dataclasses.replace(best, plain=_consider(plain, roster, sources, where, engine, best.count, False).estimate)


def _check_factors(problem: FactorProblem, engine: str) -> None:
    """Refuse a type of factors that an engine does not have."""
    name, choices = problem.task.factor_dtype, ENGINES[engine].factor_dtypes
    if name and name not in choices:
        text = f"; it has {', '.join(map(repr, choices))}" if choices else ""
        remedy = "use one of these" if choices else "leave it out, or use engine 'peer'"
        raise PlanError(f"engine {engine!r} has no factors of {name}{text}: {remedy}")


def reduced_mode(task: Factorization) -> list[str]:
    """Return what to pass so that results are no longer than the matrix, where they are."""
    return [f"pass {task.entry.reduced}"] if task.mode == "complete" else []


def _remedies(problem: FactorProblem, workers: int, engine: str) -> list[str]:
    """Return what would let a factorization fit that does not, in the way in which it was asked for."""
    remedies = reduced_mode(problem.task)
    free = dataclasses.replace(problem, method="auto")
    if max(count for count, _ in _candidates(free, max(2, workers), engine)) == 1:
        return remedies
    if problem.method == "local":
        return [*remedies, "use method='auto', by which workers share it"]
    return [*remedies, "use more workers" if problem.workers is None else "name more workers by workers="]


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
    exact: bool = True,
    whole: bool = True,
) -> FactorPlacement:
    """Return the plan on this many ranks of `roster`, with its estimate and its memory."""
    participants = (*roster, *sources)
    model = ENGINES[engine]
    width = block_width(problem.task, count, model.widths, shared=shared)
    plan = FactorPlacement(
        problem=problem,
        engine=engine,
        method="columns" if count > 1 or shared else "local",
        participants=participants,
        ranks=tuple(range(count)),
        where=where,
        width=width,
        owners={},
        exact=exact,
        whole=whole,
    )
    held = np.zeros((count, len(participants)))
    for name, table in where.items():
        held += plan.gathered(name).traffic(table, len(participants)).T
    if count == 1 and held.any():
        # One rank alone is where most threads are, and of these where most of the operands is.
        best = max(range(len(roster)), key=lambda index: (roster[index].nthreads, held[0, index]))
        plan = dataclasses.replace(plan, ranks=(best,))
    plan = dataclasses.replace(plan, owners=_owners(plan))
    size = problem.compute_type.itemsize
    elements = sum(math.prod(matrix.shape) for matrix in problem.matrices)
    home = held[range(count), list(plan.ranks)].sum() if held.any() else elements / len(participants)
    streamed = (count - 1) * elements / 2 * (len(plan.sweeps) - plan.carried)
    results = sum(math.prod(output.shape) for output in problem.outputs)
    moved = (elements - home + streamed + results * (1 - 1 / count)) * size
    return estimated(plan, _memory(plan), _work(plan, moved))


def _work(plan: FactorPlacement, moved: float) -> Work:
    """Return the work of a plan, given the bytes that move between workers."""
    problem, model, algorithm = plan.problem, ENGINES[plan.engine], plan.problem.task.algorithm
    count, panels, task = len(plan.ranks), plan.columns.matrices[0].count, problem.task
    if plan.shared:
        phases = _shared_phases(plan)
    else:
        # One panel comes after the other, however many ranks there are.
        least = panels * model.panel_seconds.get(algorithm, 0.0) if count > 1 else 0.0
        machine = problem.options.machine("numpy") if task.entry.on_host else plan.machine
        share = model.share(algorithm, count) or task.entry.shares[not task.vectors]
        phases = [Phase(problem.flops, machine.rate(task.dtype) * plan.threads.sum() * share, least=least)]
        if task.refines:
            phases = _refined_phases(plan, share, least)
    return Work([*phases, Phase(waited={"ranks": moved / count, "messages": panels * (count > 1)})], moved=moved)


def _refined_phases(plan: FactorPlacement, share: float, least: float) -> list[Phase]:
    """Return the phases of factors of few bits, and of turns in which A is read once and factors twice."""
    task, machine, ranks = plan.problem.task, plan.machine, len(plan.ranks)
    n, complexes = float(task.a_shape[0]), 4 if task.dtype.startswith("complex") else 1
    low, size = dtype_from_name(task.dtype_of_factors).itemsize, plan.problem.compute_type.itemsize
    # About half of the time is spent outside of products.
    rates = [machine.rate(task.dtype_of_factors)]
    rates += [machine.rate(task.factor_dtype)] * (task.factor_dtype != "float32")
    rate, threads = len(rates) / sum(1 / part for part in rates), plan.threads.sum()
    factors = 0.0 if task.has_factors else (n**3 / 3 if task.hermitian else 2 * n**3 / 3) * complexes
    columns = plan.columns.matrices[1].shape[1]
    product = 2 * n * n * columns * complexes
    turn = Phase(
        EXPECTED * product,
        machine.rate(task.dtype) * threads,
        touched=EXPECTED * n * n * size / ranks,
    )
    solves = Phase(EXPECTED * product, machine.rate(task.dtype_of_factors) * threads, touched=EXPECTED * n * n * low)
    return [Phase(touched=2 * n * n * size / ranks), Phase(factors, rate * threads * share, least=least), turn, solves]


def _owners(plan: FactorPlacement) -> dict[str, NDArray[np.int32]]:
    """Share the chunks of each output out, evenly by their bytes: block columns of all ranks are in most of them."""
    owners, holders = {}, list(plan.holders)
    for output in plan.problem.outputs:
        ranks = range(len(plan.ranks)) if plan.output_layout(output.name) is not None else holders
        sizes = output.elements
        loads = collections.Counter(dict.fromkeys(ranks, 0))
        table = np.zeros(output.count, np.int32)
        for index in np.argsort(-sizes, kind="stable").tolist():
            rank = min(ranks, key=lambda candidate: loads[candidate])
            loads[rank] += int(sizes[index]) + 1
            table[index] = rank
        owners[output.name] = table
    return owners


def _refined_bytes(plan: FactorPlacement, rank: int) -> float:
    """Return the bytes of vectors, and of copies of chunks of A, that a rank holds to refine a solution."""
    n, a, size = plan.task.a_shape[0], plan.problem["a"], plan.problem.compute_type.itemsize
    first, count = plan.columns.first(1), plan.columns.count
    own = plan.columns.local(rank, first, count)
    width, columns = own.stop - own.start, plan.columns.matrices[1].shape[1]
    # Two vectors, and copies of three turns that others get.
    vectors = (2 + 3 * (plan.count > 1)) * columns + (7 + 2 * kept_columns(n, columns)) * width
    few, low = 0, dtype_from_name(plan.task.dtype_of_factors).itemsize
    if plan.whole and width:
        # All factors, and inverses of blocks, of which one triangle has copies while they are made.
        few = n * n * (plan.count > 1)
        if ENGINES[plan.engine].on_gpus:
            few += (3 if plan.task.hermitian else 4) * inverted_order(n) * (n + inverted_order(n))
    elif plan.carried:
        # Twice a turn it goes from rank to rank, in few bits.
        vectors += 2 * math.ceil(len(plan.panels) / plan.count) * columns
    copied = n * CROSSING[ENGINES[plan.engine].on_gpus] / plan.count * plan.task.hermitian
    if "a" in plan.where:
        copied += sum(int(a.elements[i]) for i in plan.multiplied(rank) if plan.where["a"][i] != plan.ranks[rank])
    return float((n * vectors + copied) * size + few * low)


def _memory(plan: FactorPlacement) -> NDArray[np.float64]:
    """Return the bytes that each participant holds at most.

    Its chunks of the operands; a rank also its block columns, two panels that are under way, and at the end its part
    of every output and its chunks of that. Chunks of an operand with donated memory are freed before any chunk of the
    outputs exists. A spectral decomposition has a workspace, and its vectors, before they are cut into chunks.
    """
    problem, size, npart = plan.problem, plan.problem.compute_type.itemsize, len(plan.participants)
    total, donated = np.zeros(npart), np.zeros(npart)
    # Without memory for A itself, block columns are those of low-precision factors.
    block_size = size if plan.exact else dtype_from_name(problem.task.dtype_of_factors).itemsize
    for name in problem.operands:
        sizes = problem[name].elements * size
        held = donated if name in problem.donated else total
        if name in plan.where:
            held += np.bincount(plan.where[name], sizes, npart)
        else:
            held += sizes.sum() / npart
    at_the_end = np.zeros(npart)
    for rank, index in enumerate(plan.ranks):
        array = plan.columns.rows * plan.columns.local_cols(rank)
        beside = 2 * plan.columns.rows * plan.width * block_size
        if problem.task.refines:
            total[index] += _refined_bytes(plan, rank)
        if plan.shared:
            beside = shared_bytes(problem.task, len(plan.ranks), size, plan.width)
        elif (workspace := problem.task.entry.workspace) is not None:
            beside = workspace(problem.task) * size
            beside += sum(math.prod(out.shape) * dtype_from_name(out.dtype).itemsize for out in problem.task.outputs)
        results = 0
        for output in problem.outputs:
            layout = plan.output_layout(output.name)
            sizes = output.elements
            results += int(sizes[plan.owners[output.name] == rank].sum()) * dtype_from_name(output.dtype).itemsize
            if layout is not None and plan.output(output.name).swapped:
                results += math.prod(layout.local_shape(rank)) * size
        total[index] += array * block_size + beside
        at_the_end[index] = results
    return total + (np.maximum(donated, at_the_end) if problem.donated else at_the_end)
