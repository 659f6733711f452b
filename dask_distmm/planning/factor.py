"""Factorizations and solves of Dask arrays: the ranks, their steps, time and memory. The same for all engines.

A `FactorPlacement` says which rank has which block column: it puts the builders of `programs.factor` together.

How many of the workers compute it, and which, follows from its time and its memory as projected::

    seconds    = the larger of compute and panels, + messages + transfer
    compute    = flops / (ranks * rate * share of a product's rate); of shared eigenvalues see below
    panels     = what one panel after the other takes (`EngineModel.panel_seconds`)
    messages   = one for each panel
    transfer   = (operands from their holders + panels of others + chunks of outputs from other ranks) / bandwidth

::

    seconds    = reads + columns + products + messages + transfer
    reads      = n^3 / 6 elements, of one triangle for each column that is eliminated  / (ranks * memory bandwidth)
    columns    = n * (what a column takes beside that, and two messages between ranks)
    products   = updates of the triangle, merges, reflectors: at a share of a product's rate
    transfer   = the same, with what kernels send: reflectors, products, and rows of eigenvectors
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dask_distmm.compat import cached_property
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.layout import Copies, Layout, redistribution
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.computation import Computation, Worker
from dask_distmm.planning.model import ENGINES, Estimate, Phase, Work
from dask_distmm.planning.placement import Considered, Placement, estimated, in_range, planner
from dask_distmm.planning.program import remembered
from dask_distmm.programs import factor
from dask_distmm.programs.factor import PANEL_PARTS, PARTS, Columns, Matrix, Panels
from dask_distmm.programs.factorizations import Factorization, TaskOutput, as_matrix
from dask_distmm.programs.refine import CROSSING, EXPECTED, inverted_order, kept_columns, refined
from dask_distmm.programs.steps import FINAL, PART, Buffer, Deliver, Key, Step, View

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
        task = self.task
        able = (self.engine in ("auto", model.name) and model.decomposes(task) for model in ENGINES.values())
        if task.spectral and self.method == "columns" and task.a_shape[0] and not any(able):
            what = f"{task.kind} of a pair of matrices" if task.b_shape else f"{task.kind} in this form"
            raise PlanError(f"{what} is computed by one worker: expected method 'auto' or 'local'")
        shapes = {"a": task.a_shape, "b": task.b_shape, "f": task.a_shape, "p": (1, task.a_shape[0])}
        for name in task.inputs:
            if self[name].shape != shapes[name]:
                raise PlanError(f"{name.upper()} is {shapes[name]}, its chunks add up to {self[name].shape}")
        outputs = {output.name: output for output in task.outputs}
        for output in self.wanted:
            if output.name not in outputs:
                raise PlanError(f"{task.kind} has no output {output.name!r}; it has {', '.join(outputs)}")
            expected = as_matrix(outputs[output.name].shape)
            if output.shape != expected:
                raise PlanError(f"{output.name} is {expected}, its chunks are {output.chunks}")

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


def block_width(
    problem: Factorization,
    ranks: int,
    widths: tuple[int, int] = _WIDTHS,
    *,
    shared: bool = False,
    on_gpus: bool = False,
) -> int:
    """Return the columns of a block of A."""
    (least, most), products = widths, problem.products(on_gpus=on_gpus)
    if shared:
        most = max(least, min(most, _EVEN))
    elif ranks == 1 and not products:
        # LAPACK cuts a matrix better than we do; of a QR factorization each block has a triangle T of its width.
        return most if problem.factored == "qr" else max(most, *problem.a_shape)
    if (name := problem.factored) != "qr":
        many, step = (_MANY_CHOLESKY, least) if name == "cholesky" else (_MANY, most)
        # Where tensor cores compute in few bits, what panels take is calls of kernels.
        many = many * 3 // 4 if name == "cholesky" and products else many
        most = max(most, min(2 * most, min(problem.a_shape) // (many * ranks) // step * step))
    even = -(-min(problem.a_shape) // (ranks * _BLOCKS))
    return max(least, min(most, -(-even // least) * least))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FactorPlacement(Placement):
    """How a FactorProblem runs."""

    asked_for: ClassVar[tuple[str, ...]] = ("input", FINAL, "enter", PART, *PARTS)
    problem: FactorProblem
    # Columns of a block.
    width: int
    # For each output by name, int32, one for each of its chunks: the rank that puts it together.
    owners: Mapping[str, NDArray[np.int32]]
    # Whether there is memory to factorize A itself where factors of few bits are of no use.
    exact: bool = True
    # Whether there is memory for all ranks to have all factors of few bits.
    whole: bool = True

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

    def delivered(self, output: str) -> Copies:
        """Return the copies from block columns to an output's chunks, in the form that ranks hold."""
        layout = self.output_layout(output)
        assert layout is not None
        return redistribution(layout, self.output(output).orientation.of_chunks(self.problem.output(output).chunks))

    def owned(self, output: str, rank: int) -> list[int]:
        """Return the numbers of an output's chunks that a rank puts together."""
        numbers: list[int] = np.flatnonzero(self.owners[output] == rank).tolist()
        return numbers

    def has_part(self, kind: str, number: int) -> bool:
        """Whether ranks publish such a part of a panel of this number."""
        if self.task.refines:
            return number >= 0
        lines = self.task.a_shape[0] if kind in ("vector", "product", "reflectors") else self.count
        return kind in PARTS and 0 <= number < (self.columns.count if kind in PANEL_PARTS else lines)

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

    @property
    def products(self) -> str:
        """How products are computed; see `Factorization.products`."""
        return self.task.products(on_gpus=ENGINES[self.engine].on_gpus)

    @property
    def plain(self) -> Estimate | None:
        """What it takes to factorize A itself at once."""
        if not self.task.refines or self.task.has_factors:
            return None
        x = tuple(output for output in self.problem.wanted if output.name == "x")
        task = dataclasses.replace(self.task, factor_dtype="")
        problem = dataclasses.replace(self.problem, task=task, wanted=x)
        model = ENGINES[self.engine]
        width = block_width(task, self.count, model.widths, on_gpus=model.on_gpus)
        plan = dataclasses.replace(self, problem=problem, width=width, exact=True, whole=True)
        return _costed(plan, _held(plan)).estimate

    @cached_property
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

    @cached_property
    def sweeps(self) -> tuple[str, ...]:
        """How often all panels are applied, one after the other: a factorization, substitution, or reflections."""
        second, name = len(self.columns.matrices) > 1, self.task.factored
        if self.task.spectral:
            return ("reflect",) if self.shared and second and self.panels else ()
        substituted = second and not self.task.forms_q
        reflected = second and (self.task.forms_q or self.task.by_adjoint)
        return (*[name] * bool(name), *["substitute"] * substituted, *["reflect"] * reflected)

    @cached_property
    def panels(self) -> range:
        """Numbers of the panels of A: one fewer reflector than columns leads to a tridiagonal matrix."""
        return range(-(-(min(self.columns.matrices[0].shape) - self.columns.below) // self.width))

    @cached_property
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
        outputs = tuple((x.name, x.chunks, self.owners[x.name].tobytes()) for x in self.problem.outputs)
        what = self.task, self.engine, self.method, self.count, self.width, outputs
        return remembered((*what, self.exact, self.whole), rank, lambda: self._record(rank))

    def multiplied(self, rank: int) -> list[int]:
        """Return the numbers of A's chunks that a rank multiplies: those that it holds, and its share of others'."""
        rank_of = {participant: rank_number for rank_number, participant in enumerate(self.ranks)}
        holders = self.where["a"].tolist()
        turns = itertools.count()
        by = [rank_of[holder] if holder in rank_of else next(turns) % self.count for holder in holders]
        return [number for number, owner in enumerate(by) if owner == rank]

    def _record(self, rank: int) -> tuple[Step, ...]:
        p = self._refined(rank) if self.task.refines else self._recorded(rank)
        keys, chunks = list[Key](), list[Buffer]()
        for number, output in enumerate(self.problem.outputs):
            if self.output_layout(output.name) is not None:
                keys.append(Key(FINAL, number))
                owned = self.owned(output.name, rank)
                chunks += (Buffer(f"{output.name}.{i}", output.chunk_shape(i), output.dtype) for i in owned)
        return *p.end(), Deliver(tuple(keys), tuple(chunks))

    def _refined(self, rank: int) -> Panels:
        """Return the steps with factors of few bits, and behind a flag those with A itself."""
        task = self.task
        parts = {"lower"} if (self.carried and not self.whole) or task.hermitian else {"lower", "upper"}
        p = Panels(
            rank,
            self.columns,
            task.dtype_of_factors,
            factored="" if task.has_factors else task.refined_way,
            parts=sorted(parts),
            compute=self.products,
            lenient=True,
        )
        x, info = refined(
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
            otherwise=functools.partial(self._recorded, rank, self.columns.count) if self.exact else None,
        )
        with p.on("join"):
            for number, output in enumerate(self.problem.outputs):
                self._leave(p, number, info if self.output_layout(output.name) is None else x)
        return p

    def _recorded(self, rank: int, numbered: int = 0) -> Panels:
        """Record the steps in the type of A; `numbered` panels of earlier factors have used their numbers."""
        task, columns, panels, model = self.task, self.columns, self.panels, ENGINES[self.engine]
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
            compute="" if task.refines else self.products,
            queued=model.on_gpus and name == "qr",
            together=model.collective,
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
            for number, matrix in enumerate(() if task.refines else self.problem.outputs):
                self._leave(p, number, self._completed(p, self.output(matrix.name)))
        return p

    def _completed(self, p: Panels, output: TaskOutput) -> Buffer | View:
        """Record what completes a result; return all of it, or this rank's columns."""
        if (layout := self.output_layout(output.name)) is None:
            if p.me in self.holders:
                factor.compute_numbers(p, self._buffer(output), output.form, self.panels)
            return self._buffer(output)
        if output.form == "residuals":
            return factor.columns_of_result(p, output.name, p.matrix(1)[self.task.a_shape[1] :, :], "residuals")
        (rows, cols), first = layout.local_shape(p.me), self.columns.first(output.matrix or 0)
        place = p.blocks(first, self.columns.count)[:rows, :cols]
        return factor.columns_of_result(p, output.name, place, "swapped" * output.swapped, self.panels)

    def _leave(self, p: Panels, number: int, place: Buffer | View) -> None:
        """Record that this rank's columns of an output are published, or its chunks cut out of all of it."""
        output = self.problem.outputs[number]
        if self.output_layout(output.name) is not None:
            p.publish(FINAL, number, place)
            return
        rows, cols = (np.cumsum([0, *sizes]).tolist() for sizes in output.chunks)
        for index in self.owned(output.name, p.me):
            i, j = divmod(index, len(output.chunks[1]))
            p.leave(output.name, place[rows[i] : rows[i + 1], cols[j] : cols[j + 1]], index)

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
        shape = output.orientation.shape(as_matrix(output.shape))
        return None if output.matrix is None else self.columns.layout(output.matrix, shape)


# What it costs that several ranks share the eigenvalues of a Hermitian matrix, by way of a tridiagonal one. Pure


# The share of a product's rate at which products run.
_SHARE = 0.7
# Columns of vectors as long as the matrix that a rank has beside its block columns: reflectors twice, what belongs to
# them, a panel, and what columns are summed in.
_NARROW = 320
# Elements of the eigenvectors of a merge that are made at once.
_PANEL_ELEMENTS = 2**26


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


@planner
def plan_factorization(
    problem: FactorProblem, roster: Sequence[Worker], fields: Mapping[str, Any]
) -> Considered[FactorPlacement]:
    """Choose how many of the workers of `roster` compute `problem`, and which."""
    task, engine, workers = problem.task, fields["engine"], len(roster)
    model = ENGINES[engine]
    if problem.method == "columns" and _alone(problem, engine) and task.a_shape[0]:
        raise PlanError(
            f"{task.kind} in this form is computed by one worker of engine {engine!r}: expected method 'auto' "
            "or 'local'"
        )
    if task.factor_dtype and task.factor_dtype not in (choices := model.factor_dtypes):
        text = f"; it has {', '.join(map(repr, choices))}" if choices else ""
        remedy = "use one of these" if choices else "leave it out, or use engine 'peer'"
        raise PlanError(f"engine {engine!r} has no factors of {task.factor_dtype}{text}: {remedy}")
    # The order says how eigenvalues are computed; the other way is taken where memory is short.
    least = model.shares_eigh_from(task.dtype, workers)
    large = least is not None and task.shareable and task.a_shape[0] >= least

    def placed(count: int, shared: bool, **memory: Any) -> FactorPlacement:
        width = block_width(task, count, model.widths, shared=shared, on_gpus=model.on_gpus)
        method = "columns" if count > 1 or shared else "local"
        plan = FactorPlacement(method=method, ranks=tuple(range(count)), width=width, owners={}, **memory, **fields)
        held = _held(plan)
        if count == 1 and held.any():
            # One rank alone is where most threads are, and of these where most of the operands is.
            best = max(range(workers), key=lambda index: (roster[index].nthreads, held[0, index]))
            plan = dataclasses.replace(plan, ranks=(best,))
        return _costed(plan, held)

    def plans(exact: bool, whole: bool) -> list[FactorPlacement]:
        every = (placed(*way, exact=exact, whole=whole) for way in sorted(_candidates(problem, workers, engine)))
        return sorted(every, key=lambda plan: (plan.shared != large, plan.seconds))

    # First what is gone without is that each rank has all factors, then factors of A itself.
    rounds = ((True, True), (True, False), (False, False))[: 3 if task.refines else 1]
    rows, cols = task.a_shape
    what = f"{task.kind} of a matrix of {rows} x {cols} ({task.dtype})"
    return (plans(*memory) for memory in rounds), what, _remedies(problem, workers, engine)


def reduced_mode(task: Factorization) -> list[str]:
    """Return what to pass so that results are no longer than the matrix, where they are."""
    return [f"pass {task.entry.reduced}"] if task.mode == "complete" else []


def _remedies(problem: FactorProblem, workers: int, engine: str) -> list[str]:
    """Return what would let a factorization fit that does not, in the way in which it was asked for."""
    remedies = reduced_mode(problem.task)
    free = dataclasses.replace(problem, method="auto")
    shared = max(count for count, _ in _candidates(free, max(2, workers), engine)) > 1
    return remedies + problem.remedies * shared


def _candidates(problem: FactorProblem, workers: int, engine: str) -> set[tuple[int, bool]]:
    """Return the numbers of ranks that are considered, and whether they share eigenvalues, as one can, too."""
    if _alone(problem, engine) or problem.method == "local":
        return {(1, False)}
    model = ENGINES[engine]
    shared = problem.task.shareable
    width = block_width(problem.task, workers, model.widths, shared=shared, on_gpus=model.on_gpus)
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


def _held(plan: FactorPlacement) -> NDArray[np.float64]:
    """Return the elements of each rank's (rows) block columns that each participant has."""
    tables = (plan.gathered(name).traffic(table, len(plan.participants)).T for name, table in plan.where.items())
    return np.asarray(sum(tables, start=np.zeros((plan.count, len(plan.participants)))))


def _costed(plan: FactorPlacement, held: NDArray[np.float64]) -> FactorPlacement:
    """Return a plan with the owners of chunks, its estimate and its memory; `held` is that of `_held`."""
    problem, task, count = plan.problem, plan.task, plan.count
    plan = dataclasses.replace(plan, owners=_owners(plan))
    size = problem.compute_type.itemsize
    elements = sum(math.prod(matrix.shape) for matrix in problem.matrices)
    home = held[range(count), list(plan.ranks)].sum() if held.any() else elements / len(plan.participants)
    # What each rank gets from each other one: panels, which are columns from the diagonal on, of a square where
    # equations are solved; to reduce a matrix to a tridiagonal one, a reflector and a product for each column, and once
    # more for all columns of a panel.
    (rows, cols), order = plan.columns.matrices[0].shape, plan.columns.order
    heights = (order if sweep == "substitute" else rows for sweep in plan.sweeps)
    streamed = sum(order * (height - order / 2) for height in heights) - order**2 / 2 * plan.carried
    streamed += 2 * rows * cols * plan.shared
    # Results come out of block columns; eigenvectors of the tridiagonal matrix go there from block rows.
    results = sum(math.prod(output.shape) for output in problem.outputs) + rows * cols * (plan.shared and task.vectors)
    moved = (elements - home + (count - 1) * streamed + results * (1 - 1 / count)) * size
    return estimated(plan, _memory(plan), _work(plan, moved))


def _work(plan: FactorPlacement, moved: float) -> Work:
    """Return the work of a plan, given the bytes that move between workers."""
    problem, task, machine, model = plan.problem, plan.task, plan.machine, ENGINES[plan.engine]
    count, panels, threads = plan.count, plan.columns.matrices[0].count, plan.threads.sum()
    n, size, complexes = float(task.a_shape[0]), problem.compute_type.itemsize, 4 if task.dtype[0] == "c" else 1
    share = model.share(task.algorithm, count) or task.entry.shares[not task.vectors]
    # One panel comes after the other, however many ranks there are.
    least = panels * model.panel_seconds.get(task.algorithm, 0.0) if count > 1 else 0.0
    if plan.shared:
        # Reads of one triangle for each column that is eliminated, columns, products.
        column = model.column_seconds + (count > 1 and not model.reads_peers) * 2 * plan.message_seconds
        flops, vectors = (2 / 3 + 2 * task.vectors) * complexes * n**3, 4 / 3 * n**3 * task.vectors
        phases = [
            Phase(touched=n**3 / 6 * size / count),
            Phase(least=n * column),
            Phase(flops, machine.rate(task.dtype) * (threads * _SHARE)),
            Phase(vectors, machine.rate("float64") * (threads * _SHARE)),
        ]
    elif task.refines:
        # Factors of few bits, about half of whose time is spent outside of products; and turns in which A is read once
        # and factors twice.
        low, few = dtype_from_name(task.dtype_of_factors).itemsize, machine.rate(task.dtype_of_factors)
        fast = {"": few, "fp16x3": machine.rate("float16") / 4}.get(plan.products) or machine.rate(plan.products)
        rate = 2 / (1 / few + 1 / fast)
        factors = 0.0 if task.has_factors else (n**3 / 3 if task.hermitian else 2 * n**3 / 3) * complexes
        product, square = EXPECTED * (2 * n * n * plan.columns.matrices[1].shape[1] * complexes), n * n
        phases = [
            Phase(touched=2 * square * size / count),
            Phase(factors, rate * threads * share, least=least),
            Phase(product, machine.rate(task.dtype) * threads, touched=EXPECTED * square * size / count),
            Phase(product, few * threads, touched=EXPECTED * square * low),
        ]
    else:
        rate = (problem.options.machine("numpy") if task.entry.on_host else machine).rate(task.dtype)
        phases = [Phase(problem.flops, rate * threads * share, least=least)]
    return Work([*phases, Phase(waited={"ranks": moved / count, "messages": panels * (count > 1)})], moved=moved)


def _owners(plan: FactorPlacement) -> dict[str, NDArray[np.int32]]:
    """Share the chunks of each output out, evenly by their bytes: block columns of all ranks are in most of them."""
    owners = {}
    for output in plan.problem.outputs:
        ranks = plan.holders if plan.output_layout(output.name) is None else range(plan.count)
        sizes, loads, table = output.elements, dict.fromkeys(ranks, 0), np.zeros(output.count, np.int32)
        for index in np.argsort(-sizes, kind="stable").tolist():
            rank = min(loads, key=loads.__getitem__)
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
    problem, task, size, npart = plan.problem, plan.task, plan.problem.compute_type.itemsize, len(plan.participants)
    total, donated, at_the_end = np.zeros((3, npart))
    # Without memory for A itself, block columns are those of low-precision factors.
    block_size = size if plan.exact else dtype_from_name(task.dtype_of_factors).itemsize
    for name in problem.operands:
        sizes, holders = problem[name].elements * size, plan.where.get(name)
        held = donated if name in problem.donated else total
        held += sizes.sum() / npart if holders is None else np.bincount(holders, sizes, npart)
    for rank, index in enumerate(plan.ranks):
        beside = 2 * plan.columns.rows * plan.width * block_size
        if plan.products == "fp16x3":
            # Three numbers of float16 for each element of a panel and of what it is multiplied by, ahead and beside.
            beside += 2 * 6 * plan.width * (plan.columns.rows + plan.columns.local_cols(rank))
        if task.refines:
            total[index] += _refined_bytes(plan, rank)
        if plan.shared:
            beside = shared_bytes(task, len(plan.ranks), size, plan.width)
        elif (workspace := task.entry.workspace) is not None:
            beside = workspace(task) * size
            beside += sum(math.prod(out.shape) * dtype_from_name(out.dtype).itemsize for out in task.outputs)
        total[index] += plan.columns.rows * plan.columns.local_cols(rank) * block_size + beside
        for output in problem.outputs:
            at_the_end[index] += int(output.bytes[plan.owners[output.name] == rank].sum())
            layout = plan.output_layout(output.name)
            if layout is not None and plan.output(output.name).swapped:
                at_the_end[index] += math.prod(layout.local_shape(rank)) * size
    return total + (np.maximum(donated, at_the_end) if problem.donated else at_the_end)
