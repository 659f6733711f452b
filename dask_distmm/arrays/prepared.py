r"""Operands laid out on the workers for later multiplies: ``distribute``, ``replicate`` and ``Matmul``.

Dask itself moves the data, holds it, spills it and makes it again: for each tile there is a task which is restricted to
one worker and puts the tile together from parts of the array's chunks. The restriction ends when its worker is gone::

    chunk (0, 0) -> part \
                           > tile (0, 0), on its worker
    chunk (0, 1) -> part /

A `Matmul` is the same multiply many times, prepared once::

    Matmul(a, b)      the operands are checked
    plan()            the method is chosen, A and B are laid out in its tiles, which stay on the workers
    execute()         a run on these tiles
    reset_operands()  other values, laid out in the same way
    free()            tiles and workspaces go
"""

from __future__ import annotations

import dataclasses
import operator
import uuid
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

import dask
import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_distmm.arrays.fallback import why_not
from dask_distmm.arrays.kinds import any_kind, as_array
from dask_distmm.arrays.product import as_pair, multiply, run_outputs
from dask_distmm.arrays.quantize import as_operands
from dask_distmm.arrays.request import Request, apply_op, check_workers, parse, takes, unfit, view_of, why_not_input
from dask_distmm.config import read_options, setting
from dask_distmm.errors import EngineError, PlanError
from dask_distmm.layout import Layout, redistribution
from dask_distmm.numeric.types import Types, typed
from dask_distmm.planning import ENGINES, Chunks, Demand, Plan, plan
from dask_distmm.planning.planner import operand_tiles
from dask_distmm.planning.problem import BlockCyclic, Distribution
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import ask_roster, current_client, free_workspaces, plan_on
from dask_distmm.runtime.keys import tile_name
from dask_distmm.runtime.messages import Snapshot, ask
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.typing import (
    AllOptions,
    AnyEpilog,
    ArrayLike,
    Engine,
    EpilogFunction,
    Method,
    Op,
    PreparedOptions,
    WithAux,
)

if TYPE_CHECKING:
    from distributed import Client


@any_kind
def replicate(a: ArrayLike) -> da.Array:
    """Keep all of a matrix on every worker, so that nothing of it has to move for later multiplies. Waits for that.

    ``matmul(a, b, gathered="a")`` does the same in the course of a multiply, without moving anything twice. Without a
    multiply the chunks travel in a run of their own, that of ``a @ v`` with a vector of zeros.

    Parameters
    ----------
    a : dask.array.Array or array_like
        (m, k), of a type that is multiplied, not FP8. Computed, if it is not on the cluster already.

    Returns
    -------
    dask.array.Array
        `a`, persisted. The replicas stay as long as any of its chunks is on the cluster, or until `free_replicas`. Each
        worker holds all bytes of `a`, which Dask counts as unmanaged memory and can't spill.

    Raises
    ------
    EngineError
        No cluster is connected, or its client is asynchronous.
    PlanError
        It is not a matrix, or of a type that no run multiplies.
    ProjectedMemoryError
        A worker would have to hold more than it may. Also a MemoryError.

    See Also
    --------
    free_replicas, distribute, matmul

    Examples
    --------
    >>> w = dask_distmm.replicate(w)      # doctest: +SKIP
    >>> d = dask_distmm.matmul(x, w)      # doctest: +SKIP
    """
    client = current_client()
    if client is None or client.asynchronous:
        raise EngineError(
            "replicate() needs a cluster and a client that is not asynchronous; make a distributed.Client, or pass "
            "gathered= to a matmul"
        )
    array = as_array(a)
    if array.ndim != 2:
        raise PlanError(f"replicate(): a must be 2-D, got {array.ndim}-D")
    array = client.persist(array)
    zeros = da.zeros((array.shape[1], 1), chunks=(array.chunks[1], 1), dtype=array.dtype)
    client.compute(multiply(parse(array, zeros, gathered="a")), sync=True)
    return array


def free_replicas(*arrays: da.Array) -> int:
    """Free what `replicate`, ``gathered=`` and ``epilog="allreduce"`` keep on all workers; the arrays stay as they are.

    Parameters
    ----------
    *arrays : dask.array.Array
        Of which replicas are to go; of all arrays without any argument.

    Returns
    -------
    int
        Of how many arrays there were replicas.

    Raises
    ------
    EngineError
        No cluster is connected.

    See Also
    --------
    replicate, free_workspaces

    Examples
    --------
    >>> import dask_distmm
    >>> w = dask_distmm.replicate(w)    # doctest: +SKIP
    >>> dask_distmm.free_replicas(w)      # doctest: +SKIP
    1
    """
    client = current_client()
    if client is None:
        raise EngineError("no cluster is connected; create a distributed.Client")
    names = [view_of(as_array(array))[0].name for array in arrays] or None
    answer = client.sync(ask, client.scheduler, Replicas.free_replicas, "", names)
    # A scheduler that does not know the request has run nothing.
    return answer.count if answer is not None else 0


def distribute(a: ArrayLike, distribution: Distribution, *, workers: Sequence[str] | int | None = None) -> da.Array:
    """Lay an array out over the cluster's workers, so that later multiplies in that distribution need not move it.

    The first worker of the cluster is the first rank, and so on; if ranks of that number have a communicator already,
    their order is taken. The chunks stay what they are, NumPy or CuPy arrays.

    Parameters
    ----------
    a : dask.array.Array or array_like
        A matrix, (m, n).
    distribution : Slab or BlockCyclic
        Where the chunks go: with ``Slab(0)`` one chunk of ``ceil(m / workers)`` rows each, with
        ``BlockCyclic((p, q), blocks)`` block (i, j) is a chunk on worker ``(i % p) * q + j % q``. An axis that is not
        shared between workers is not cut.
    workers : sequence of str or int, optional
        Addresses of the workers, in the order of their ranks, or how many; all by default.

    Returns
    -------
    dask.array.Array
        (m, n), the same values, persisted. Its chunks are the tiles, each on its worker.

    Raises
    ------
    PlanError
        No cluster is connected, `a` is not a matrix that engines multiply, or there are too few workers.

    See Also
    --------
    Slab, BlockCyclic, replicate, Matmul

    Examples
    --------
    >>> from dask_distmm import Slab, distribute, matmul
    >>> a = distribute(a, Slab(0))                     # doctest: +SKIP
    >>> matmul(a, b, distributions=[Slab(0)])          # doctest: +SKIP
    """
    if not isinstance(distribution, Distribution):
        raise PlanError(f"distribution={distribution!r}: expected a Slab or a BlockCyclic")
    array = da.asanyarray(a)
    if array.ndim != 2 or 0 in array.shape:
        raise PlanError(f"a must be 2-D and not empty, got the shape {array.shape}")
    if reason := why_not_input(array):
        raise PlanError(f"the array can't be distributed: {reason}")
    client = current_client()
    if client is None:
        raise PlanError("the array can't be distributed, as no cluster is connected; create a distributed.Client")
    name, plaintext = array.dtype.name, read_options().allow_plaintext_nccl
    demand = Demand(setting("engine"), array_kind(array._meta), (name, name, name), check_workers(workers), plaintext)
    snapshot = ask_roster(client, demand)
    if snapshot is None:
        raise PlanError("an asynchronous client can't be asked for its workers here; distribute with a synchronous one")
    ranks = _rank_addresses(distribution, snapshot)
    m, n = map(int, array.shape)
    chunks, owners = distribution.layout((m, n), len(ranks)).as_chunks()
    return place_chunks(client, array, chunks, [ranks[owner] for owner in owners.tolist()])


def _rank_addresses(distribution: Distribution, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the addresses of the ranks, in their order."""
    addresses = tuple(worker.address for worker in snapshot.workers)
    count = len(addresses)
    if isinstance(distribution, BlockCyclic):
        count = distribution.grid[0] * distribution.grid[1]
        if count > len(addresses):
            raise PlanError(f"{distribution} needs {count} workers, and there are {len(addresses)}")
    groups = [group for group in snapshot.groups if len(group) == count and set(group) <= set(addresses)]
    return groups[-1] if groups else addresses[:count]


def place_chunks(client: Client, array: da.Array, chunks: Chunks, addresses: Sequence[str]) -> da.Array:
    """Return a matrix persisted in other chunks, each on a certain worker."""
    (array,) = dask.optimize(array)  # tasks that are added below must not be changed by it
    token = tokenize(array.name, chunks, addresses)
    name, part_name = tile_name(token), f"distmm-part-{token}"
    copies = redistribution(Layout.of_chunks(array.chunks), Layout.of_chunks(chunks))
    parts: dict[Hashable, Task] = {}
    tiles: dict[Hashable, Task] = {}
    where: dict[Hashable, str] = {}
    ncols = len(chunks[1])
    for index, address in enumerate(addresses):
        i, j = divmod(index, ncols)
        sources: list[TaskRef] = []
        corners: list[tuple[int, int]] = []
        for copy in copies.for_dst(index):
            source = (array.name, *copies.src.grid.coords(copy.src))
            if (copy.nrows, copy.ncols) != copies.src.local_shape(copy.src):
                key = (part_name, index, len(sources))
                parts[key] = Task(key, operator.getitem, TaskRef(source), copy.src_index)
                source = key
            sources.append(TaskRef(source))
            corners.append((copy.dst_row, copy.dst_col))
        where[name, i, j] = address
        shape = (chunks[0][i], chunks[1][j])
        tiles[name, i, j] = Task((name, i, j), _assemble, shape, array.dtype.name, corners, List(*sources))
    layers = {**array.dask.layers, part_name: parts, name: MaterializedLayer(tiles, annotations={"workers": where.get})}
    needs = {**array.dask.dependencies, part_name: {array.name}, name: {array.name, part_name}}
    graph = HighLevelGraph(layers, needs)
    # The optimizer would drop the annotations.
    placed: da.Array = client.persist(da.Array(graph, name, chunks, meta=array._meta), optimize_graph=False)
    return placed


def _assemble(shape: tuple[int, int], dtype: str, corners: Sequence[tuple[int, int]], parts: Sequence[Any]) -> Any:
    """Put a tile together from its parts; a chunk that is the tile already is not copied."""
    parts = [typed(part, dtype) for part in parts]
    if len(parts) == 1 and _owns(parts[0]):
        return parts[0]
    tile = np.empty_like(parts[0], shape=shape)  # of CuPy's too, in the memory order of the parts
    for (row, col), part in zip(corners, parts, strict=True):
        tile[row : row + part.shape[0], col : col + part.shape[1]] = part
    return tile


def _owns(part: Any) -> bool:
    """Whether an array is most of the larger one that it would keep in memory."""
    base = getattr(part, "base", None)
    return base is None or getattr(base, "nbytes", part.nbytes) <= part.nbytes


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
        As for `dask_distmm.matmul`. The choices of `plan` hold for all executions.

    Raises
    ------
    PlanError
        As `dask_distmm.matmul`; and if the operands can't be multiplied collectively: no cluster is connected, they are
        not matrices, or no engine takes them.

    See Also
    --------
    matmul, distribute, free_workspaces

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

    @takes(PreparedOptions)
    def __init__(
        self, a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, **options: Unpack[PreparedOptions]
    ) -> None:
        operands = dict(zip("ab", as_operands(a, b), strict=True)) | ({} if c is None else {"c": da.asanyarray(c)})
        self._ops = {"a": cast(Op, options.pop("op_a", "N")), "b": cast(Op, options.pop("op_b", "N"))}
        self._signatures = {name: _signature(array) for name, array in operands.items()}
        # As they go into a run: op() is applied, they are tiles once there is a plan. And those that are tiles.
        self._arrays, self._placed = self._transposed(operands), set[str]()
        self._finalizer = weakref.finalize(self, self._arrays.clear)
        # Names of the planned epilog's inputs, and arguments of `parse` beside the arrays.
        self._inputs: tuple[str, ...] = ()
        self._asked, self._types = cast(AllOptions, options), cast(Types | None, None)
        request = self._request(self._arrays, (), self._asked)
        _check_collective(self._arrays, request)
        # The configuration is read once: `plan` may be called under another one.
        self._types, self._log = request.types, request.logger
        self._asked["method"], self._asked["engine"] = cast(Method, request.method), cast(Engine, request.engine)
        # The plan that holds for all executions, of the operands as they were given, and the cluster when it was made.
        self._made: tuple[Plan, Snapshot] | None = None
        # Of the next execution; None before `plan`, and while operands are missing.
        self._run: Request | None = None
        client = current_client()
        self._client = weakref.ref(client) if client is not None else lambda: None

    def plan(
        self,
        epilog: AnyEpilog | EpilogFunction | None = None,
        epilog_inputs: Mapping[str, ArrayLike] | None = None,
        bias_axis: Literal[-1, 0] = -1,
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
        self._need_all()
        inputs = {name: da.asanyarray(value) for name, value in (epilog_inputs or {}).items()}
        run_options: AllOptions = {**self._asked, "epilog": epilog, "bias_axis": bias_axis, "result_amax": result_amax}
        request = self._request(self._arrays | inputs, tuple(inputs), run_options)
        problem = request.problem
        state = ask_roster(client, problem.demand, request.lying)
        if state is None:
            raise PlanError("an asynchronous client can't be asked for its workers here; use a synchronous one")
        first = plan_on(state, problem)
        self._made = first, state
        # Later plans start from tiles; the result keeps the chunks that the operands have given it.
        self._asked = {**run_options, "out_chunks": problem.d.chunks}
        for name in self._inputs:
            del self._arrays[name]
        self._arrays.update(inputs)
        self._signatures |= {name: _signature(array) for name, array in inputs.items()}
        self._inputs = tuple(inputs)
        self._placed.clear()
        fixed = self._lay_out(client, first, state, dataclasses.replace(request, out_chunks=problem.d.chunks)).problem
        workers, tiles = {worker.address: worker for worker in state.workers}, operand_tiles(first)
        roster = [workers[address] for address in cast(tuple[str, ...], fixed.workers)]
        where = {name: tiles[name][1].astype(np.int32) for name in "ab"}
        tiled = plan(fixed, roster, where, engine=first.engine, groups=state.groups)
        self._log.info("Matmul: planned, operands laid out\n%r", tiled)
        return tiled

    def execute(self, *, release_workspace: bool = False) -> da.Array | WithAux:
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
        if self._made is None:
            raise PlanError("nothing is planned: call plan() before execute()")
        self._need_all()
        assert self._run is not None
        # There is nothing in this graph that the optimizer could improve.
        d, aux = as_pair(run_outputs(dataclasses.replace(self._run, name=f"matmul-{uuid.uuid4().hex}")))
        d, *more = client.persist([d, *aux.values()], optimize_graph=False)
        aux = dict(zip(aux, more, strict=True))
        self._log.info("Matmul: execution %s on %d workers", d.name, len(self._made[0].ranks))
        if release_workspace:
            from distributed import wait

            wait([d, *aux.values()])
            free_workspaces(client)
        return (d, aux) if aux else d

    def reset_operands(
        self,
        a: ArrayLike | None = None,
        b: ArrayLike | None = None,
        c: ArrayLike | None = None,
        *,
        alpha: complex | None = None,
        beta: complex | None = None,
        epilog_inputs: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Take other values for the next executions. Only the operands that are given are laid out again.

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
        operands = {name: da.asanyarray(x) for name, x in (("a", a), ("b", b), ("c", c)) if x is not None}
        inputs = {name: da.asanyarray(x) for name, x in (epilog_inputs or {}).items()}
        if "c" in operands and "c" not in self._signatures:
            raise PlanError("c was given; this Matmul was made without one: make another one with c and beta")
        if unknown := [name for name in inputs if name not in self._inputs]:
            accepted = ", ".join(map(repr, self._inputs)) or "none"
            raise PlanError(f"epilog_inputs has {unknown[0]!r}; the planned epilog's inputs are: {accepted}")
        for name, array in {**operands, **inputs}.items():
            for field, theirs in _signature(array).items():
                if theirs != (mine := self._signatures[name][field]):
                    raise PlanError(
                        f"{name} has the {field} {theirs}; this Matmul was made for {mine}. Make another one for it"
                        + (f", or rechunk it to {mine}" if field == "chunks" else "")
                    )
        arrays = {**self._arrays, **self._transposed(operands), **inputs}
        factors = {name: x for name, x in (("alpha", alpha), ("beta", beta)) if x is not None}
        run_options = cast(AllOptions, {**self._asked, **factors})
        request = None if self._missing(arrays) else self._request(arrays, self._inputs, run_options)
        self._arrays.update(arrays)
        self._placed.difference_update(operands, inputs)
        self._asked = run_options
        if request is not None and self._made is not None:
            self._lay_out(client, *self._made, request)

    def release_operands(self) -> None:
        """Let go of all operands, to make room: their tiles go from the workers. The plan stays.

        `reset_operands` must give all of them again, also C and the epilog's inputs, before the next execution.
        """
        self._open()
        self._arrays.clear()
        self._placed.clear()
        self._run = None

    def free(self) -> None:
        """Let go of everything: operands, and workspaces on the workers once runs that are under way are done.

        Results stay. May be called again; everything else is refused from now on.
        """
        if not self._finalizer.alive:
            return
        self._finalizer()
        client = self._client()
        prepared, self._made, self._run = self._made, None, None
        kept = prepared is not None and ENGINES[prepared[0].engine].on_gpus
        if kept and client is not None and client.status == "running":
            free_workspaces(client)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        self.free()

    def __repr__(self) -> str:
        a, b = self._signatures["a"], self._signatures["b"]
        state = "freed" if not self._finalizer.alive else "planned" if self._made is not None else "not planned"
        return f"<Matmul {a['shape']} {a['dtype']} by {b['shape']} {b['dtype']}, {state}>"

    def _open(self) -> Client:
        """Return the client; refuse to go on once it is closed, or the `Matmul` was freed."""
        if not self._finalizer.alive:
            raise PlanError("this Matmul was freed: make another one")
        client = self._client()
        if client is None or client.status != "running":
            raise PlanError("the client of this Matmul is closed, and its operands are released: make another one")
        return client

    def _transposed(self, operands: Mapping[str, da.Array]) -> dict[str, da.Array]:
        """Apply op() to those of A and B that are given."""
        return {name: apply_op(name, x, self._ops[name]) if name in self._ops else x for name, x in operands.items()}

    def _missing(self, arrays: Mapping[str, da.Array]) -> list[str]:
        """Return the names of the arrays that were released and not given again."""
        expected = ("a", "b", *(("c",) if "c" in self._signatures else ()), *self._inputs)
        return [name for name in expected if name not in arrays]

    def _need_all(self) -> None:
        """Refuse to go on without arrays that were released."""
        if missing := self._missing(self._arrays):
            raise PlanError(f"{', '.join(missing)} released: pass them again with reset_operands()")

    def _request(self, arrays: Mapping[str, da.Array], inputs: Sequence[str], run_options: AllOptions) -> Request:
        """Return the request of arrays to which op() is applied; of the types that were settled when this was made."""
        options: AllOptions = {**run_options, "epilog_inputs": {name: arrays[name] for name in inputs}}
        request = parse(arrays["a"], arrays["b"], arrays.get("c"), **options)
        if reason := unfit(request.extras):
            raise PlanError(reason)
        return dataclasses.replace(request, types=self._types or request.types)

    def _lay_out(self, client: Client, planned: Plan, snapshot: Snapshot, request: Request) -> Request:
        """Lay out the arrays that are not yet; return the request of the next executions, which leaves no choice."""
        tiles = operand_tiles(planned)
        for name, array in (("a", request.a), ("b", request.b), *request.extras):
            if name in self._placed:
                continue
            # C and the epilog's inputs go in the chunks of D and beside them, if they are as large as D.
            chunks, ranks = tiles.get(name, (request.out_chunks, planned.owners))
            addresses = [planned.workers[rank] for rank in ranks.tolist()]
            laid_out = name in tiles or array.shape == request.shape
            self._arrays[name] = place_chunks(client, array, chunks, addresses) if laid_out else client.persist(array)
            self._placed.add(name)
        # The ranks, and after them the workers that multiply nothing but are to have all of D.
        bystanders = [worker.address for worker in snapshot.workers if worker.address not in planned.workers]
        workers = (*planned.workers, *(bystanders if request.formula.replicated else ()))
        extras = [(name, self._arrays[name]) for name, _ in request.extras]
        self._run = dataclasses.replace(
            request, a=self._arrays["a"], b=self._arrays["b"], extras=extras,
            method=planned.method, engine=planned.engine, grid=planned.grid, workers=workers,
        )  # fmt: skip
        return self._run


def _signature(array: da.Array) -> dict[str, Any]:
    """Return what an operand and all that take its place have in common."""
    return {"shape": array.shape, "dtype": array.dtype, "chunks": array.chunks, "array": array_kind(array._meta)}


def _check_collective(arrays: Mapping[str, da.Array], request: Request) -> None:
    """Refuse a product that no run can make."""
    a, b = arrays["a"], arrays["b"]
    matrices = f"the operands have {a.ndim} and {b.ndim} dimensions; it takes matrices" * (a.ndim != 2 or b.ndim != 2)
    empty = "the product is empty or all zeros" * request.empty
    if reason := why_not(a, b, request.types) or matrices or empty:
        raise PlanError(f"a Matmul can't be made here: {reason}")
