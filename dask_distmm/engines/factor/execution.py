"""One rank's run of its program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.eigen import SharedEigh
from dask_distmm.engines.factor.exchange import Messages, PanelExchange
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.operations import apply, factor_panel, is_short, update_lower
from dask_distmm.engines.factor.spectral import decompose
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor import (
    Apply,
    Ask,
    Check,
    Decompose,
    Diagonalize,
    Drop,
    Factor,
    FactorPlan,
    Get,
    Key,
    Orient,
    Publish,
    Step,
    Tridiagonalize,
    launch_order,
)

# The share of the time that a reduction to a tridiagonal matrix takes, of the eigenvalues that ranks share.
_REDUCTION = 0.8


class Execution:
    """Runs the program of one rank, on its block columns.

    First the caller writes the rank's columns of the inputs into `held`; then `execute`; then
    `dask_distmm.engines.factor.outputs` has the results.
    """

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        exchange: PanelExchange,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[float], None] = lambda share: None,
        array: Any = None,
    ) -> None:
        self.plan, self.rank, self.kernels, self.exchange = plan, rank, kernels, exchange
        self._check, self._progress = check, progress
        self.columns = plan.columns
        shape = self.columns.rows, self.columns.local_cols(rank)
        self.array = kernels.empty(shape, np.dtype(plan.problem.dtype)) if array is None else array
        self.pivots: dict[int, tuple[Any, Any]] = {}
        self.decomposed: dict[str, Any] = {}
        self.rows_later: dict[int, NDArray[np.int64]] = {}
        self._extras: dict[int, tuple[Any, ...]] = {}
        self._carried: Any = None
        self._asked: dict[Key, Future[Sequence[Any]]] = {}
        self._here: dict[Key, Sequence[Any]] = {}
        # Looks at what was computed: they wait for it, so that where calls are asynchronous they come last.
        self._factored = plan.phases[0].operation.name if plan.phases else ""
        # Whether a panel has been made since the last time that all calls waited for those ahead.
        self._fresh = False
        # The panel that all panels before it have been applied to ahead.
        self._next = -1
        self._looks: list[Callable[[], None]] = []
        messages = Messages(exchange, check)
        self.eigen = SharedEigh(plan, rank, kernels, messages, check, lambda share: progress(_REDUCTION * share))

    def held(self, matrix: int) -> Any:
        """Return this rank's columns of A (0) or of the second matrix (1), with the rows that this matrix has."""
        rows = self.columns.matrices[matrix].shape[0]
        first, stop = self.columns.first(matrix), self.columns.first(matrix + 1)
        return self.array[:rows, self.columns.local(self.rank, first, stop)]

    def execute(self) -> None:
        """Take all steps."""
        self._complete_second()
        steps = self.plan.steps(self.rank)
        if self.kernels.asynchronous and self._factored == "qr":
            # The thread waits for what is found out about the Gram matrix of a panel.
            steps = tuple(launch_order(steps, self._is_short))
        for number, step in enumerate(steps, start=1):
            self._check()
            self._take(step)
            done = number / len(steps)
            self._progress(_REDUCTION + (1 - _REDUCTION) * done if self.plan.shared else done)
        self.kernels.join()
        for look in self._looks:
            look()

    def _look(self, look: Callable[[], None]) -> None:
        if self.kernels.asynchronous:
            self._looks.append(look)
        else:
            look()

    def _complete_second(self) -> None:
        """Set what no input has: the second matrix to an identity, or the rows below B to zero."""
        if len(self.columns.matrices) == 1 or self.plan.shared:
            return
        first, rows = self.columns.first(1), self.columns.matrices[1].shape[0]
        if self.plan.problem.b_order is None:
            assign(self.array[rows:, self.columns.local(self.rank, first, self.columns.count)], 0)
            return
        for block in self.columns.owned(self.rank, first):
            _, start, stop = self.columns.blocks[block]
            part = self.array[:, self.columns.local(self.rank, block, block + 1)]
            assign(part, 0)
            part[np.arange(start, stop), np.arange(stop - start)] = 1

    def _take(self, step: Step) -> None:
        match step:
            case Factor():
                with self.kernels.ahead(further=step.panel == self._next):
                    self._factor(step)
            case Check(panel, rank):
                with self.kernels.ahead(further=panel == self._next):
                    self._check_diagonal(panel, rank)
            case Publish(key):
                # The right-hand side has been changed by other calls.
                with self.kernels.ahead(further=key.part != "carried" and key.panel == self._next):
                    self.exchange.publish(key, self._own(key))
            case Ask(key, owner):
                self._asked[key] = self.exchange.ask(owner, key)
            case Get(key):
                arrays = self.exchange.get(self._asked.pop(key), self._check)
                if key.part == "pivots":
                    self.pivots[key.panel] = tuple(arrays)
                elif key.part == "carried":
                    self._right_hand_side()[...] = arrays[0]
                else:
                    self._here[key] = arrays
                    if self._factored == "lu" and key.part == "lower" and self.rank in self.plan.holders:
                        # The panel goes, its pivots stay.
                        diagonal = self.kernels.diagonal(arrays[0])
                        self.pivots[key.panel] = arrays[1].copy(), diagonal
                    elif self._factored == "cholesky" and key.part == "lower" and self.kernels.asynchronous:
                        # So that all ranks name the same minor, the first: those after it are wrong, too.
                        info = self.kernels.diagonal(arrays[1][:, None])
                        start = self.columns.place(key.panel).start
                        self._look(functools.partial(_check_minor, self.kernels, start, info))
            case Apply():
                if step.ahead:
                    with self.kernels.ahead():
                        self._apply(step)
                    self._next = step.first
                else:
                    self._apply(step)
            case Decompose():
                matrices = [self.held(number) for number in range(len(self.columns.matrices))]
                self.decomposed = decompose(self.kernels, self.plan.problem, *matrices)
            case Tridiagonalize():
                self._extras |= {panel: (t,) for panel, t in self.eigen.reduce(self.held(0)).items()}
            case Diagonalize():
                vectors = self.held(1) if len(self.columns.matrices) > 1 else None
                self.decomposed["w"] = self.eigen.diagonalize(vectors)
            case Orient():
                self.eigen.orient(self.held(1))
            case Drop(key):
                del self._here[key]
                self.exchange.drop(key)

    def _factor(self, step: Factor) -> None:
        operation, panel = step
        place, rows = self.columns.place(panel), self.panel(panel)
        made = factor_panel(self.kernels, operation, place, rows)
        self._extras[panel], self._fresh = made.extras, True
        if operation.name == "lu":
            self.pivots[panel] = made.extras[0], self.kernels.diagonal(rows[place.start :])
        if made.info is not None:
            self._look(functools.partial(_check_minor, self.kernels, place.start, made.info))

    def panel(self, panel: int) -> Any:
        """Return all rows of a panel of this rank."""
        return self.array[:, self.columns.local(self.rank, panel, panel + 1)]

    def _own(self, key: Key) -> Sequence[Any]:
        """Return the arrays of a part of a panel of this rank; panels are not copied."""
        if key.part == "pivots":
            return self.pivots[key.panel]
        if key.part == "carried":
            # It changes once it is back.
            return (self._right_hand_side().copy(order="F"),)
        rows = self.panel(key.panel)
        if key.part == "upper":
            return (rows[: self.columns.place(key.panel).stop],)
        return (rows[self.columns.place(key.panel).start :], *self._extras.get(key.panel, ()))

    def _right_hand_side(self) -> Any:
        """Return the right-hand side that is carried: its place on its own rank, and on others one for as long."""
        first = self.columns.first(1)
        if self.columns.owner(first) == self.rank:
            return self.array[:, self.columns.local(self.rank, first, first + 1)]
        if self._carried is None:
            self._carried = self.kernels.empty((self.columns.rows, 1), self.array.dtype)
        return self._carried

    def _apply(self, step: Apply) -> None:
        operation, key, first, stop, ahead = step
        panel = self._here[key] if key in self._here else self._own(key)
        if self._fresh and not ahead and (key not in self._here or self._is_short(step)):
            # The panel was made ahead; or the next one is, which others wait for: it has the device to itself.
            self.kernels.join()
            self._fresh = False
        place, boundary = self.columns.place(key.panel), self.columns.first(1)
        if operation.name == "cholesky" and first < boundary:
            end = min(stop, boundary)
            blocks = [self.columns.blocks[block][1:] for block in self.columns.owned(self.rank, first, end)]
            update_lower(self.kernels, place, panel, self.array[:, self.columns.local(self.rank, first, end)], blocks)
            first = end
        columns = self.array[:, self.columns.local(self.rank, first, stop)]
        if operation.name == "substitute" and not columns.shape[1]:
            columns = self._right_hand_side()
        if columns.shape[1]:
            apply(self.kernels, operation, place, panel, columns)

    def _is_short(self, step: Apply) -> bool:
        """Whether an update takes no longer than the next panel alone."""
        name, start = step.operation.name, self.columns.place(step.key.panel).start
        columns = self.columns.local(self.rank, step.first, step.stop)
        return name == self._factored and is_short(name, self.columns.rows - start, columns.stop - columns.start)

    def _check_diagonal(self, panel: int, rank: bool) -> None:
        kernels, (start, stop, _) = self.kernels, self.columns.place(panel)
        rows = self.panel(panel)[:, : stop - start]
        diagonal = kernels.diagonal(rows[start:])
        above = inside = None
        if rank:
            # The norm of R's column is that of A's: what is left of it is rounding if the columns before it span it.
            norm = kernels.xp.linalg.norm
            above = norm(rows[:start], axis=0)
            inside = norm(kernels.triangle(rows[start:stop], lower=False, unit=False), axis=0)

        def look() -> None:
            size = abs(kernels.host(diagonal))
            least = np.zeros(len(size), size.dtype)
            if rank:
                norms = np.hypot(kernels.host(above), kernels.host(inside))
                least = max(self.plan.problem.a_shape) * np.finfo(norms.dtype).eps * norms
            if (size <= least).any():
                raise MatrixError(singular(start + int(np.argmax(size <= least)), rank=rank))

        self._look(look)


def _check_minor(kernels: Kernels, start: int, info: Any) -> None:
    """Raise if the Cholesky factorization of a diagonal block, which begins at `start`, has found it indefinite."""
    if order := int(kernels.host(info)[0]):
        raise MatrixError(indefinite(start + order))


def indefinite(order: int) -> str:
    """Return the text for a matrix whose leading minor of some order is not positive."""
    return (
        f"the leading minor of order {order} is not positive: the matrix is not positive definite; give one that is, "
        "or factorize by lu or qr"
    )


def singular(at: int, *, rank: bool) -> str:
    """Return the text for a diagonal element of a triangular factor that is zero; `rank`: or rounding of its column."""
    if rank:
        return f"column {at} depends on those before it: the matrix is not of full rank; pass rcond="
    return f"the matrix is singular: diagonal element {at} of its triangular factor is exactly zero"
