"""One rank's run of its program.

::

    Tridiagonalize   Q^H A Q = T; block columns of A become those of reflectors
    Diagonalize      T = Z W Z^T by divide and conquer, where ranks have rows of Z; then block columns are distributed
    (reflections)    V = Q Z, panel by panel
    NormalizePhases           the factors of modulus one

The matrix is scaled by a power of two to elements of about 1, so that no square overflows.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.exchange import Messages, RankExchange
from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.operations import apply, factor_panel, is_short, update_lower
from dask_distmm.engines.factor.spectral import decompose, not_finite, unit_factors
from dask_distmm.engines.tridiagonal.conquer import DivideAndConquer, row_bounds
from dask_distmm.engines.tridiagonal.reduction import HostReduction, Tridiagonal
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor.plan import FactorPlan, launch_order
from dask_distmm.planning.factor.steps import (
    Apply,
    Ask,
    Check,
    Decompose,
    Diagonalize,
    Drop,
    Factor,
    Get,
    Key,
    NormalizePhases,
    Publish,
    Step,
    Tridiagonalize,
)

# The steps of a rank that shares the eigenvalues of a Hermitian matrix with others: by way of a tridiagonal one


# Matrices whose largest element is between 2^-16 and 2^16 are not scaled. No factor overflows.
_MODERATE, _MOST = 16, {"float32": 100, "float64": 1000}
# Columns of vectors that are looked at together.
_STRIP = 1024


class Shares(Protocol):
    """What an engine has for it: the reduction, and the way of rows of vectors between ranks."""

    def reduce(self, array: Any, check: Callable[[], None], progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix whose block columns ranks have in `array`, which then has reflectors."""
        ...

    def memory(self) -> tuple[Any, Any]:
        """Return memory for a rank's rows of all eigenvectors of the tridiagonal matrix, and as much more."""
        ...

    def deal(self, columns: NDArray[np.int64], target: Any) -> None:
        """Fill block columns of vectors, after all ranks' rows are complete."""
        ...


class HostShares:
    """`Shares` of ranks that talk over Dask's comms."""

    def __init__(self, plan: FactorPlan, rank: int, messages: Messages) -> None:
        self._plan, self._rank, self._messages = plan, rank, messages
        self._order = plan.problem.a_shape[0]
        self._bounds = row_bounds(self._order, plan.ranks)
        self._rows: NDArray[np.float64]

    def reduce(self, array: Any, check: Callable[[], None], progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix."""
        return HostReduction(self._plan.columns, self._rank, array, self._messages, check, progress).reduce()

    def memory(self) -> tuple[Any, Any]:
        """Return memory for rows of vectors."""
        shape = self._bounds[self._rank + 1] - self._bounds[self._rank], self._order
        self._rows, spare = (np.empty(shape, order="F") for _ in range(2))
        return self._rows, spare

    def deal(self, columns: NDArray[np.int64], target: Any) -> None:
        """Send each rank its columns of this rank's rows, and get those of the others."""
        for turn in range(self._plan.ranks):
            rank = (self._rank + turn) % self._plan.ranks
            held = columns[self._plan.columns.held(1, rank)]
            if rank == self._rank:
                target[self._bounds[rank] : self._bounds[rank + 1]] = self._rows[:, held]
            else:
                self._messages.publish("rows", rank, (self._rows[:, held],))
        for rank in range(self._plan.ranks):
            if rank != self._rank:
                (rows,) = self._messages.fetch("rows", self._rank, rank)
                target[self._bounds[rank] : self._bounds[rank + 1]] = rows


class SharedEigh:
    """One rank's part of the eigenvalues that ranks share."""

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        messages: Messages,
        check: Callable[[], None],
        progress: Callable[[float], None],
    ) -> None:
        self._plan, self._rank, self._kernels, self._messages = plan, rank, kernels, messages
        self._check, self._progress = check, progress
        self.shares: Shares = HostShares(plan, rank, messages)
        self.timings: dict[str, float] = {}
        self._exponent, self._reduced = 0, Tridiagonal(*(np.zeros(0) for _ in range(3)))
        self._last = 0.0

    def reduce(self, a: Any) -> dict[int, Any]:
        """Reduce the matrix; return for each of this rank's panels T of its reflectors, ``I - V T V^H``."""
        self._last = time.perf_counter()
        self._scale(a)
        self._reduced = self.shares.reduce(a, self._check, self._progress)
        if not all(np.isfinite(x).all() for x in self._reduced):
            # The matrix had no such elements.
            raise MatrixError(f"the reduction of A, {self._plan.problem.a_shape}, has overflowed: scale A")
        found = {}
        for panel in self._plan.phases[0].panels if self._plan.phases else ():
            if self._plan.columns.owner(panel) == self._rank:
                start, stop, _ = self._plan.columns.place(panel)
                rows = a[start:, self._plan.columns.local(self._rank, panel, panel + 1)][:, : stop - start]
                found[panel] = triangular_factor(self._kernels, rows, self._reduced.factors[start - 1 : stop - 1])
        self._note("reduce", a)
        return found

    def _scale(self, a: Any) -> None:
        """Multiply the matrix by a power of two, the same one on all ranks."""
        sizes = np.array([self._largest(a)])
        if self._plan.ranks > 1:
            self._messages.publish("size", self._rank, (sizes,))
            others = (rank for rank in range(self._plan.ranks) if rank != self._rank)
            sizes = np.concatenate([sizes, *(self._messages.fetch("size", rank, rank)[0] for rank in others)])
        if not np.isfinite(sizes).all():
            raise MatrixError(not_finite("a"))
        exponent = int(np.frexp(sizes.max())[1])
        most = _MOST[np.finfo(self._plan.problem.dtype).dtype.name]
        self._exponent = 0 if abs(exponent) <= _MODERATE else max(-most, min(most, exponent))
        if self._exponent:
            with np.errstate(all="ignore"):
                # Elements above the diagonal are arbitrary.
                transposed = a.T
                transposed *= math.ldexp(1.0, -self._exponent)

    def _largest(self, a: Any) -> float:
        """Return the largest modulus of a real or imaginary part in this rank's block columns; NaN if there is one."""
        columns, xp, found = self._plan.columns, self._kernels.xp, []
        for block in columns.owned(self._rank, 0, columns.first(1)):
            _, start, stop = columns.blocks[block]
            rows = a[start:, columns.local(self._rank, block, block + 1)]
            corner = self._kernels.triangle(rows[: stop - start], lower=True, unit=False)
            parts = [x for x in (corner, rows[stop - start :]) if x.size]
            real = [y for x in parts for y in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))]
            found += [xp.abs(x.T).max() for x in real]
        return float(self._kernels.host(xp.stack(found).max())) if found else 0.0

    def diagonalize(self, target: Any) -> Any:
        """Return the wanted eigenvalues, on the device; fill block columns of the tridiagonal matrix' eigenvectors."""
        problem, (d, e, _) = self._plan.problem, self._reduced
        first, last = problem.subset or (0, len(d) - 1)
        if target is not None:
            single = np.finfo(problem.dtype).dtype == np.float32
            conquest = DivideAndConquer(
                self._kernels,
                self._messages,
                (self._rank, self._plan.ranks),
                (d, e),
                self.shares.memory(),
                rounding=2.0**-24 if single else 2.0**-53,
                check=self._check,
            )
            values, columns = conquest.solve(first, last)
            self.shares.deal(columns, target)
        elif self._rank not in self._plan.holders:
            return None
        elif d.any() or e.any():
            values = self._kernels.merging.eigenvalues(d, e, first, last)
        else:
            values = np.zeros(last - first + 1)
        self._note("diagonalize", target)
        real = next(one.dtype for one in problem.outputs if one.name == "w")
        return self._kernels.xp.asarray(np.ldexp(values, self._exponent).astype(real))

    def orient(self, vectors: Any) -> None:
        """Make the first one of the largest components of each of this rank's vectors real and positive."""
        for at in range(0, vectors.shape[1], _STRIP):
            strip = vectors[:, at : at + _STRIP]
            # The transpose is in the order in which CuPy's kernels are fastest.
            transposed = strip.T
            transposed *= unit_factors(self._kernels, strip)[:, None]
        self._note("reflect", vectors)

    def _note(self, name: str, made: Any) -> None:
        """Note the seconds since the last note, when a matrix is complete."""
        if made is not None and made.size:
            self._kernels.host(made[:1, :1])
        now = time.perf_counter()
        self.timings[name], self._last = now - self._last, now


def triangular_factor(kernels: Kernels, v: Any, tau: NDArray[Any]) -> Any:
    """Return T with ``H_0 H_1 ... = I - V T V^H``, where ``H_i = I - tau_i v_i v_i^H``.

    Its inverse is the upper triangle of V^H V with 1 / tau in place of the diagonal: C. Puglisi, Modification of the
    Householder method based on the compact WY representation, SIAM J. Sci. Stat. Comput. 13 (1992).
    """
    xp, size = kernels.xp, v.shape[1]
    gram = kernels.empty((size, size), v.dtype)
    kernels.gemm(v, v, gram, "C", alpha=1, beta=0)
    some = tau != 0
    diagonal = np.arange(size)
    inverse = kernels.triangle(gram, lower=False, unit=False)
    inverse *= xp.asarray(np.outer(some, some).astype(v.dtype))
    inverse[diagonal, diagonal] = xp.asarray(1 / np.where(some, tau, 1).astype(v.dtype))
    found = kernels.empty((size, size), v.dtype)
    found[...] = xp.asarray(np.diag(some).astype(v.dtype))
    kernels.trsm(inverse, found, right=False, lower=False, op="N", unit=False)
    return found


# One rank's run of its program


# The share of the time that a reduction to a tridiagonal matrix takes, of the eigenvalues that ranks share.
_REDUCTION = 0.8


class Execution:
    """Runs the program of one rank, on its block columns.

    First the caller writes the rank's columns of the inputs into `held`; then `execute`; then
    `dask_distmm.engines.factor.job` has the results.
    """

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        exchange: RankExchange[Key],
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
        # Seconds of the steps by kind, where a call returns when it is done.
        self.timings: dict[str, float] = {}
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
            began = time.perf_counter()
            self._take(step)
            if not self.kernels.asynchronous:
                phase = "panel" if isinstance(step, Factor) else "wait" if isinstance(step, Get) else "update"
                self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - began
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
                arrays = self.exchange.get(self._asked.pop(key), self._check, again=True)
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
            case NormalizePhases():
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
        """Whether an update takes no longer than the next panel by itself."""
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
        f"the leading minor of order {order} is not positive: the matrix is not positive definite; pass one that is, "
        "or factorize by lu or qr"
    )


def singular(at: int, *, rank: bool) -> str:
    """Return the text for a diagonal element of a triangular factor that is zero; `rank`: or rounding of its column."""
    if rank:
        return f"column {at} depends on those before it: the matrix is not of full rank; pass rcond="
    return f"the matrix is singular: diagonal element {at} of its triangular factor is exactly zero"
