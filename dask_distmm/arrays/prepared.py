"""``Matmul``: the same multiply many times, prepared once.

::

    Matmul(a, b)      what is multiplied; checked
    plan()            the method is chosen, A and B are laid out in its tiles, which stay on the workers
    execute()         a run on these tiles
    reset_operands()  other values, laid out in the same way
    free()            tiles and workspaces go

The tiles are persisted Dask arrays: Dask holds them, spills them and makes them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import dask.array as da
import numpy as np

from dask_distmm.arrays import formula
from dask_distmm.arrays.distribute import place
from dask_distmm.arrays.fallback import why_not
from dask_distmm.arrays.quantize import operands
from dask_distmm.arrays.request import (
    Request,
    check_distributions,
    check_names,
    check_shapes,
    check_workers,
    make_problem,
)
from dask_distmm.arrays.signature import Like
from dask_distmm.arrays.views import under
from dask_distmm.config import setting
from dask_distmm.engines.base import log
from dask_distmm.errors import PlanError
from dask_distmm.numeric.epilogs import Finish
from dask_distmm.numeric.types import Types, resolve_types
from dask_distmm.planning import Plan, Problem, plan
from dask_distmm.planning.assignment import operand_tiles
from dask_distmm.planning.distribution import Distribution
from dask_distmm.runtime.client import Snapshot, current_client, free_workspaces, snapshot

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Matmul"]


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """What `Matmul.plan` has settled for all executions."""

    plan: Plan
    known: Snapshot


class Matmul:
    """``D = F(alpha * op(A) @ op(B) + beta * C)``, prepared once and executed many times.

    After nvmath's ``nvmath.distributed.linalg.advanced.Matmul``. Use it in a ``with`` block.

    Parameters
    ----------
    a, b, c : dask.array.Array or array_like
        Matrices of known chunk sizes: op(A) (m, k), op(B) (k, n), and C, which broadcasts against D.
    alpha, beta, op_a, op_b
        As for `dask_distmm.matmul`.
    method, engine, out_chunks, workers, distributions, logger
    a_type, b_type, result_type, quantization_scales, compute_type
        As for `dask_distmm.matmul`. What `plan` chooses is fixed for all executions.

    Raises
    ------
    PlanError
        As `dask_distmm.matmul`; and if the operands can't be multiplied collectively: there is no cluster, they are no
        matrices, or no engine takes them.

    Notes
    -----
    Operands are held as tiles on the workers from `plan` to `free`, beside the arrays that they were made from if these
    are held too. A `Matmul` belongs to the client that was current when it was made: when that closes, Dask releases
    the tiles. It is not meant for several threads at once.

    Examples
    --------
    >>> with Matmul(a, b) as mm:                       # doctest: +SKIP
    ...     mm.plan(epilog="relu")
    ...     r = mm.execute()
    ...     mm.reset_operands(a=a2)
    ...     r2 = mm.execute()
    """

    def __init__(
        self,
        a: Any,
        b: Any,
        c: Any = None,
        *,
        alpha: complex = 1.0,
        beta: complex | None = None,
        op_a: str = "N",
        op_b: str = "N",
        method: str | None = None,
        engine: str | None = None,
        out_chunks: Any = None,
        workers: Sequence[str] | int | None = None,
        distributions: Sequence[Distribution | None] | None = None,
        logger: logging.Logger | None = None,
        a_type: Any = None,
        b_type: Any = None,
        result_type: Any = None,
        quantization_scales: Mapping[str, Any] | None = None,
        compute_type: str | None = None,
    ) -> None:
        self._names = check_names(method, engine)
        self._workers, self._distributions = check_workers(workers), check_distributions(distributions)
        self._out_chunks, self._ops = out_chunks, {"a": op_a, "b": op_b}
        self._log = logger or log
        a, b = operands(a, b)
        arrays = {"a": a, "b": b} | ({} if c is None else {"c": da.asanyarray(c)})
        asked = a_type, b_type, result_type, compute_type
        self._types: Types = resolve_types(a.dtype, b.dtype, *asked, setting("compute-type"))
        self._scales = quantization_scales
        self._like = {name: Like.of(array) for name, array in arrays.items()}
        # As they go into the run: op applied, laid out once there is a plan.
        self._arrays: dict[str, da.Array] = {}
        self._finalizer = weakref.finalize(self, self._arrays.clear)
        self._factors: dict[str, Any] = {"alpha": alpha, "beta": beta}
        self._formula: dict[str, Any] = {"epilog": None, "bias_axis": -1, "amax": False}
        self._input_names: tuple[str, ...] = ()
        self._placed: set[str] = set()
        self._fixed: _Fixed | None = None
        self._problem: Problem | None = None
        client = current_client()
        self._client = weakref.ref(client) if client is not None else lambda: None
        for name, array in arrays.items():
            self._arrays[name] = self._with_op(name, array)
        check_shapes(self._arrays["a"], self._arrays["b"])
        self._check_collective()
        self._parse()

    # What users call

    def plan(
        self,
        epilog: str | Callable[..., Any] | None = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        bias_axis: int = -1,
        result_amax: bool = False,
    ) -> Plan:
        """Choose how to multiply, and lay the operands out for it. May be called again, for another epilog.

        Parameters
        ----------
        epilog, epilog_inputs, bias_axis, result_amax
            As for `dask_distmm.matmul`.

        Returns
        -------
        Plan
            Of an execution: with the operands laid out.

        Raises
        ------
        PlanError, ProjectedMemoryError
            As `dask_distmm.matmul`; also if operands were released or the client is closed.
        """
        client = self._open()
        self._need_operands()
        inputs = {name: da.asanyarray(value) for name, value in (epilog_inputs or {}).items()}
        with self._all_or_nothing():
            for name in self._input_names:
                del self._arrays[name]
            self._formula = {"epilog": epilog, "bias_axis": bias_axis, "amax": result_amax}
            self._input_names = tuple(inputs)
            self._arrays |= inputs
            spec, extras = self._parse()
            a, b = self._arrays["a"], self._arrays["b"]
            request = Request(
                a, b, self._types, spec, extras, *self._names, self._workers, self._distributions,
                out_chunks=self._out_chunks,
            )  # fmt: skip
            problem = make_problem(request)
            known = snapshot(client, problem, [*map(under, (a, b), problem.arrays, problem.turned)])
            if known is None:
                raise PlanError("an asynchronous client can't be asked for its workers here; use a synchronous one")
            made = known.plan(problem)
        self._like |= {name: Like.of(array) for name, array in inputs.items()}
        # Later plans start from tiles; the result keeps the chunks that the operands have given it.
        self._out_chunks = problem.out_chunks
        self._fixed, self._placed = _Fixed(made, known), set()
        self._prepare(client)
        tiled = self._tiled_plan()
        self._log.info("Matmul: planned, operands laid out\n%r", tiled)
        return tiled

    def execute(self, *, release_workspace: bool = False) -> da.Array | tuple[da.Array, dict[str, da.Array]]:
        """Multiply: start a run and return its result, which is on its way.

        Each call is a run of its own, also on the same operands.

        Parameters
        ----------
        release_workspace : bool
            Wait for the run, and free what engines keep on the workers between runs. The next one makes it again.

        Returns
        -------
        dask.array.Array
            (m, n), persisted: it is computed on the workers from now on, and stays there as long as it is held. With
            auxiliary outputs a pair of it and a dict of these arrays by name, persisted too.

        Raises
        ------
        PlanError
            `plan` was not called, operands were released, or the client is closed. A worker that `plan` chose and that
            is gone is named by the error of the result: call `plan` again.
        """
        client = self._open()
        if self._fixed is None or self._problem is None:
            raise PlanError("nothing is planned: call plan() before execute()")
        self._need_operands()
        problem = dataclasses.replace(self._problem, name=f"matmul-{uuid.uuid4().hex}")
        a, b = self._arrays["a"], self._arrays["b"]
        found = formula.result(problem, a, b, [self._arrays[extra.name] for extra in problem.extras])
        d, aux = found if isinstance(found, tuple) else (found, {})
        # Nothing in here needs the optimizer.
        d, *others = client.persist([d, *aux.values()], optimize_graph=False)
        self._log.info("Matmul: execution %s on %d workers", problem.name, len(self._fixed.plan.ranks))
        if release_workspace:
            from distributed import wait

            wait([d, *others])
            free_workspaces(client)
        return (d, dict(zip(aux, others, strict=True))) if aux else d

    def reset_operands(
        self,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        *,
        alpha: complex | None = None,
        beta: complex | None = None,
        epilog_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Take other values for the next executions. What is not given stays; only what is given is laid out again.

        Parameters
        ----------
        a, b, c : dask.array.Array or array_like, optional
            Of the same shape, type and chunks as those before.
        alpha, beta : number, optional
            Factors.
        epilog_inputs : mapping, optional
            Those inputs of the planned epilog that change, of the same shapes, types and chunks.

        Raises
        ------
        PlanError
            One is of another shape, type or chunking (the message has both), or there was none of its name. Then
            nothing has changed.
        """
        client = self._open()
        given = {name: da.asanyarray(x) for name, x in (("a", a), ("b", b), ("c", c)) if x is not None}
        for name, array in given.items():
            if name not in self._like:
                raise PlanError("c was given; this Matmul was made without one: make another one with c and beta")
            self._like[name].check(name, array)
        inputs = {name: da.asanyarray(x) for name, x in (epilog_inputs or {}).items()}
        for name, array in inputs.items():
            if name not in self._input_names:
                known = ", ".join(map(repr, self._input_names)) or "none"
                raise PlanError(f"epilog_inputs has {name!r}; the planned epilog's inputs are: {known}")
            self._like[name].check(name, array)
        new = {name: self._with_op(name, array) for name, array in given.items()} | inputs
        with self._all_or_nothing():
            self._factors |= {name: x for name, x in (("alpha", alpha), ("beta", beta)) if x is not None}
            self._arrays |= new
            if not self._missing():
                self._parse()
        self._placed -= new.keys()
        if self._fixed is not None and not self._missing():
            self._prepare(client)

    def release_operands(self) -> None:
        """Let go of all operands, to make room: their tiles go from the workers. The plan stays.

        `reset_operands` must give all of them again, also C and the epilog's inputs, before the next execution.
        """
        self._open()
        self._arrays.clear()
        self._placed.clear()

    def free(self) -> None:
        """Let go of everything: operands, and workspaces on the workers once runs that are under way are done.

        Results stay. May be called again; everything else is refused from now on.
        """
        if not self._finalizer.alive:
            return
        self._finalizer()
        self._placed.clear()
        client = self._client()
        fixed, self._fixed, self._problem = self._fixed, None, None
        if fixed is not None and fixed.plan.engine != "numpy" and client is not None and client.status == "running":
            free_workspaces(client)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        a, b = self._like["a"], self._like["b"]
        state = "freed" if not self._finalizer.alive else "planned" if self._fixed is not None else "not planned"
        return f"<Matmul {a.shape} {a.dtype} by {b.shape} {b.dtype}, {state}>"

    # Checks

    def _open(self) -> Client:
        """Return the client; refuse what comes after the end."""
        if not self._finalizer.alive:
            raise PlanError("this Matmul was freed: make another one")
        client = self._client()
        if client is None or client.status != "running":
            raise PlanError("the client of this Matmul is closed, and its operands are released: make another one")
        return client

    def _check_collective(self) -> None:
        a, b = self._arrays["a"], self._arrays["b"]
        reason = why_not(a, b, self._types)
        if reason is None and (a.ndim != 2 or b.ndim != 2):
            reason = f"the operands have {a.ndim} and {b.ndim} dimensions; it takes matrices"
        if reason is None and 0 in (*a.shape, *b.shape):
            reason = "the product is empty or all zeros"
        if reason is None and "c" in self._arrays and (unfit := formula.why_not_input(self._arrays["c"])):
            reason = f"c: {unfit}"
        if reason is not None:
            raise PlanError(f"a Matmul can't be made here: {reason}")

    def _missing(self) -> list[str]:
        expected = ("a", "b", *(("c",) if "c" in self._like else ()), *self._input_names)
        return [name for name in expected if name not in self._arrays]

    def _need_operands(self) -> None:
        if missing := self._missing():
            raise PlanError(f"{', '.join(missing)} released: give them again with reset_operands()")

    # Preparation

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Take back what a block that fails has changed."""
        arrays, factors = dict(self._arrays), dict(self._factors)
        formula_before, names = self._formula, self._input_names
        try:
            yield
        except BaseException:
            self._arrays.clear()
            self._arrays |= arrays
            self._factors, self._formula, self._input_names = factors, formula_before, names
            raise

    def _with_op(self, name: str, array: da.Array) -> da.Array:
        return formula.apply_op(name, array, self._ops[name]) if name in self._ops else array

    def _parse(self) -> tuple[Finish, list[tuple[str, da.Array]]]:
        """Return the formula and what it reads beside A and B."""
        inputs = {name: self._arrays[name] for name in self._input_names}
        a, b, c = self._arrays["a"], self._arrays["b"], self._arrays.get("c")
        alpha, beta, form = self._factors["alpha"], self._factors["beta"], self._formula
        spec, extras = formula.parse(
            *(a, b, c, alpha, beta, form["epilog"], inputs, form["bias_axis"], form["amax"], self._types, self._scales)
        )
        if reason := formula.unfit(extras):
            raise PlanError(reason)
        return spec, extras

    def _prepare(self, client: Client) -> None:
        """Lay out what is not yet, and make the problem of the next executions."""
        assert self._fixed is not None
        made = self._fixed.plan
        for name, (chunks, ranks) in operand_tiles(made).items():
            if name not in self._placed:
                addresses = [made.workers[rank] for rank in ranks.tolist()]
                self._arrays[name] = place(client, self._arrays[name], chunks, addresses)
                self._placed.add(name)
        spec, extras = self._parse()
        for number, (name, array) in enumerate(extras):
            if name not in self._placed:
                laid_out = self._place_extra(client, array)
                self._arrays[name] = laid_out
                extras[number] = name, laid_out
                self._placed.add(name)
        a, b = self._arrays["a"], self._arrays["b"]
        # The ranks, and after them those who multiply nothing but are to have all of D.
        others = [worker.address for worker in self._fixed.known.workers if worker.address not in made.workers]
        workers = (*made.workers, *(others if spec.replicated else ()))
        request = Request(
            a, b, self._types, spec, extras, made.method, made.engine, workers, self._distributions,
            out_chunks=self._out_chunks,
        )  # fmt: skip
        self._problem = dataclasses.replace(make_problem(request), grid=made.grid)

    def _place_extra(self, client: Client, array: da.Array) -> da.Array:
        """Lay C or an epilog's input out: with the chunks of D that it is for, if it is as large as D."""
        assert self._fixed is not None
        made = self._fixed.plan
        if array.shape != (made.problem.m, made.problem.n):
            small: da.Array = client.persist(array)
            return small
        return place(client, array, self._out_chunks, [made.workers[rank] for rank in made.owners.tolist()])

    def _tiled_plan(self) -> Plan:
        """Return the plan of an execution: the tiles lie where they were put."""
        assert self._fixed is not None
        assert self._problem is not None
        made, known = self._fixed.plan, self._fixed.known
        ranks = {worker.address: worker for worker in known.workers}
        addresses = self._problem.workers if isinstance(self._problem.workers, tuple) else ()
        tiles = operand_tiles(made)
        return plan(
            self._problem,
            [ranks[address] for address in addresses],
            where_a=tiles["a"][1].astype(np.int32),
            where_b=tiles["b"][1].astype(np.int32),
            engine=made.engine,
            groups=known.groups,
        )
