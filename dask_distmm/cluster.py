"""The cluster as the client sees it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from numpy.typing import NDArray

from dask_distmm.answers import rebuild
from dask_distmm.config import read_options
from dask_distmm.errors import EngineError
from dask_distmm.plan import EVERYWHERE, Plan, Problem, Worker, plan

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Snapshot", "ask_roster", "current_client", "free_workspaces", "snapshot"]

_installed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Snapshot:
    """Who can take part now, and where the chunks of some arrays are.

    Parameters
    ----------
    workers
        Workers that can multiply.
    sources
        Others that hold chunks.
    placed
        For each array that was asked for, the index into ``[*workers, *sources]`` of each chunk's holder, or
        None where not all of its chunks are in memory. For `plan` these are the arrays under A and B (`view_of`).
    engines
        Names of the engines that could multiply; of several the cost model chooses.
    groups
        Addresses of ranks that have a communicator already.
    """

    def __init__(
        self,
        workers: list[Worker],
        sources: list[Worker],
        placed: list[NDArray[np.int32] | None],
        engines: Sequence[str],
        groups: list[tuple[str, ...]],
    ) -> None:
        self.workers, self.sources, self.placed, self.groups = workers, sources, placed, groups
        self.engines = tuple(engines)

    def plan(self, problem: Problem) -> Plan:
        """Return the plan for a problem, as things are."""
        a, b, *_ = self.placed or (None, None)
        where_a, where_b = _turned(problem, "a", a), _turned(problem, "b", b)
        return plan(
            problem,
            self.workers,
            where_a=where_a,
            where_b=where_b,
            sources=self.sources,
            engine=self.engines,
            groups=self.groups,
        )

    def holders(self, problem: Problem, arrays: Sequence[Any]) -> dict[str, NDArray[np.int32]]:
        """Return which worker has each chunk of operands that stay in memory.

        Parameters
        ----------
        problem
            What is to be multiplied.
        arrays
            Those of all operands, as they were asked for. Their chunks stay if their graphs hold them as futures, as
            those of persisted arrays do.
        """
        found = {}
        for operand, array, where in zip(problem.operands, arrays, self.placed, strict=True):
            turned = _turned(problem, operand, where)
            staged = not (operand == "b" and problem.same)
            if staged and turned is not None and (turned != EVERYWHERE).all() and _is_held(array):
                found[operand] = turned
        return found


def _is_held(array: Any) -> bool:
    """Whether all chunks of an array are futures."""
    from distributed import Future

    layer = array.dask.layers.get(array.name, {})
    keys = itertools.product((array.name,), *map(range, array.numblocks))
    return all(isinstance(layer.get(key), Future) for key in keys)


def _turned(problem: Problem, operand: str, where: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    """Return where A's or B's chunks are, in their order, from where those of the array underneath are."""
    if where is None or operand not in "ab" or not problem.turned["ab".index(operand)]:
        return where
    nrows, ncols = problem.chunk_counts(operand)
    return np.ascontiguousarray(where.reshape(ncols, nrows).T).ravel()


def current_client() -> Client | None:
    """Return the client that Dask would compute with here, or None if it would not use a cluster."""
    chosen = dask.config.get("scheduler", None)
    if chosen is not None and chosen not in ("dask.distributed", "distributed"):
        return None
    from distributed import get_client

    try:
        client = get_client()
    except ValueError:
        return None
    return client if client.status == "running" else None


def snapshot(client: Client, problem: Problem, arrays: Sequence[Any] = ()) -> Snapshot | None:
    """Ask the scheduler who would multiply; see `ask_roster`."""
    dtypes = [problem.a_dtype, problem.b_dtype, problem.dtype]
    return ask_roster(client, problem.engine, problem.array, dtypes, problem.workers, arrays)


def ask_roster(
    client: Client,
    engine: str,
    array: str,
    dtypes: Sequence[str],
    workers: Sequence[str] | int | None,
    arrays: Sequence[Any] = (),
) -> Snapshot | None:
    """Ask the scheduler who would multiply; None if that would block an event loop (asynchronous clients).

    Parameters
    ----------
    client
        Of the cluster.
    engine, array, dtypes, workers
        As for `Roster.choose`.
    arrays
        Dask arrays whose chunks are to be found.

    Raises
    ------
    PlanError
        `workers` are not in the cluster.
    EngineError
        dask_distmm is missing on the scheduler, or differs between workers.
    """
    if client.asynchronous:
        return None
    from dask_distmm.scheduler import DistMMSchedulerPlugin

    scheduler_id = str(client.scheduler_info(n_workers=0)["id"])
    if _installed.get(client) != scheduler_id:
        try:
            client.register_plugin(DistMMSchedulerPlugin())
        except ModuleNotFoundError as error:
            raise EngineError(f"the scheduler can't import dask_distmm ({error}): install it there") from error
        _installed[client] = scheduler_id
    answer = client.sync(
        client.scheduler.distmm_roster,
        engine=engine,
        array=array,
        dtypes=dtypes,
        wanted=workers,
        names=[array.name for array in arrays],
        counts=[array.numblocks for array in arrays],
        plaintext_nccl=read_options().allow_plaintext_nccl,
    )
    if not isinstance(answer, dict):
        _installed.pop(client, None)
        raise EngineError(f"the scheduler answered {answer!r} to distmm_roster: was it restarted? Try again")
    if answer["status"] != "OK":
        raise rebuild(answer)
    return Snapshot(
        [Worker.from_wire(w) for w in answer["workers"]],
        [Worker.from_wire(w) for w in answer["sources"]],
        [None if raw is None else np.frombuffer(raw, np.int32) for raw in answer["placed"]],
        answer["engines"],
        [tuple(group) for group in answer["groups"]],
    )


def free_workspaces(client: Client | None = None) -> int:
    """Free what engines keep on the workers between runs: communicators, workspaces, descriptors.

    The next multiply makes them again, which takes about a second on GPUs. Waits for runs that are under way.

    Parameters
    ----------
    client : distributed.Client, optional
        Of the cluster; the current one by default.

    Returns
    -------
    int
        How many groups of workers had something.

    Raises
    ------
    EngineError
        There is no cluster.
    """
    client = client or current_client()
    if client is None:
        raise EngineError("there is no cluster whose workspaces could be freed; give a distributed.Client")
    answer = client.sync(client.scheduler.distmm_free, grace=read_options().grace_timeout)
    # A scheduler that does not know the call has run nothing.
    return answer if isinstance(answer, int) else 0
