"""Arrays whole on every worker, by hand: made, and freed."""

from __future__ import annotations

import dask.array as da

from dask_distmm.arrays import product
from dask_distmm.arrays.kinds import any_kind, as_array
from dask_distmm.arrays.request import parse
from dask_distmm.arrays.views import view_of
from dask_distmm.errors import EngineError, PlanError
from dask_distmm.runtime.client import current_client
from dask_distmm.runtime.questions import FreeReplicas
from dask_distmm.runtime.wire import ask
from dask_distmm.typing import ArrayLike


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
        There is no cluster, or its client is asynchronous.
    PlanError
        It is no matrix, or of a type that no run multiplies.
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
            "replicate() needs a cluster and a client that is not asynchronous; make a distributed.Client, or give "
            "gathered= to a matmul"
        )
    array = as_array(a)
    if array.ndim != 2:
        raise PlanError(f"replicate() is for matrices; found {array.ndim} dimensions")
    array = client.persist(array)
    zeros = da.zeros((array.shape[1], 1), chunks=(array.chunks[1], 1), dtype=array.dtype)
    client.compute(product.multiply_matrices(parse(array, zeros, gathered="a")), sync=True)
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
        There is no cluster.
    """
    client = current_client()
    if client is None:
        raise EngineError("there is no cluster with replicas; make a distributed.Client")
    names = [view_of(as_array(array)).array.name for array in arrays] or None
    answer = client.sync(ask, client.scheduler, FreeReplicas(names))
    # A scheduler that does not know the request has run nothing.
    return answer.count if answer is not None else 0
