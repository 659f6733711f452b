r"""Chunks where they are wanted: ``distribute`` lays an array out for later multiplies.

Dask itself moves the data, holds it, spills it and makes it again: for each tile there is a task which is restricted to
one worker and puts the tile together from parts of the array's chunks::

    chunk (0, 0) -> part \
                           > tile (0, 0), on its worker
    chunk (0, 1) -> part /

The restriction of a tile ends when its worker is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_distmm.arrays.kinds import any_kind, as_array
from dask_distmm.arrays.product import multiply
from dask_distmm.arrays.request import check_workers, parse, view_of, why_not_input
from dask_distmm.config import read_options, setting
from dask_distmm.errors import EngineError, PlanError
from dask_distmm.layout import Layout, redistribution
from dask_distmm.numeric.types import typed
from dask_distmm.planning import Chunks, Demand
from dask_distmm.planning.distribution import BlockCyclic, Distribution
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import ask_roster, current_client
from dask_distmm.runtime.keys import tile_name
from dask_distmm.runtime.messages import Snapshot, ask
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.typing import ArrayLike

if TYPE_CHECKING:
    from distributed import Client

# Arrays whole on every worker, by hand: made, and freed


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
    """
    client = current_client()
    if client is None:
        raise EngineError("no cluster is connected; create a distributed.Client")
    names = [view_of(as_array(array))[0].name for array in arrays] or None
    answer = client.sync(ask, client.scheduler, Replicas.free_replicas, "", names)
    # A scheduler that does not know the request has run nothing.
    return answer.count if answer is not None else 0


# Chunks where they are wanted: ``distribute`` lays an array out for later multiplies


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
    known = ask_roster(client, demand)
    if known is None:
        raise PlanError("an asynchronous client can't be asked for its workers here; distribute with a synchronous one")
    ranks = _rank_addresses(distribution, known)
    m, n = map(int, array.shape)
    chunks, owners = distribution.layout((m, n), len(ranks)).as_chunks()
    return place_chunks(client, array, chunks, [ranks[owner] for owner in owners.tolist()])


def _rank_addresses(distribution: Distribution, known: Snapshot) -> tuple[str, ...]:
    """Return the addresses of the ranks, in their order."""
    addresses = tuple(worker.address for worker in known.workers)
    count = len(addresses)
    if isinstance(distribution, BlockCyclic):
        count = distribution.grid[0] * distribution.grid[1]
        if count > len(addresses):
            raise PlanError(f"{distribution} needs {count} workers, and there are {len(addresses)}")
    made = [group for group in known.groups if len(group) == count and set(group) <= set(addresses)]
    return made[-1] if made else addresses[:count]


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
        found: list[TaskRef] = []
        corners: list[tuple[int, int]] = []
        for copy in copies.for_dst(index):
            source = (array.name, *copies.src.grid.coords(copy.src))
            if (copy.nrows, copy.ncols) != copies.src.local_shape(copy.src):
                key = (part_name, index, len(found))
                parts[key] = Task(key, operator.getitem, TaskRef(source), copy.src_index)
                source = key
            found.append(TaskRef(source))
            corners.append((copy.dst_row, copy.dst_col))
        where[name, i, j] = address
        shape = (chunks[0][i], chunks[1][j])
        tiles[name, i, j] = Task((name, i, j), _assemble, shape, array.dtype.name, corners, List(*found))
    layers = {**array.dask.layers, part_name: parts, name: MaterializedLayer(tiles, annotations={"workers": where.get})}
    needs = {**array.dask.dependencies, part_name: {array.name}, name: {array.name, part_name}}
    graph = HighLevelGraph(layers, needs)
    # The optimizer would drop the annotations.
    made: da.Array = client.persist(da.Array(graph, name, chunks, meta=array._meta), optimize_graph=False)
    return made


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
