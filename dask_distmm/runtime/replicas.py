r"""Results that are on all workers, besides the chunks that Dask has: for operands of later multiplies.

A run whose epilog is ``allreduce`` ends with each worker fetching the chunks of D that it lacks from those who own
them. They are kept here and not as Dask's own copies, which its memory manager would reduce to one. So Dask knows
nothing of them, and nothing rests on them: a later run uses them if every worker has them, and else D's chunks.

::

    worker      ReplicaStore    share()  serve()  operands()    kept by name and run
    scheduler   Replicas        add()    where()  drop()        which workers have which run's, and for how long

They are dropped when nobody wants D any more: none of its chunks is in memory or on its way, and no multiply that is
still to run has it as operand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import REPLICA, ChunkKey, ResultKey, is_of_d
from dask_distmm.errors import ProtocolError
from dask_distmm.planning import EVERYWHERE, Placement, Plan, Problem, Worker
from dask_distmm.planning.placement import Where
from dask_distmm.runtime.keys import barrier_key, barrier_name
from dask_distmm.runtime.messages import DropReplicas
from dask_distmm.runtime.questions import RosterReply
from dask_distmm.runtime.transfers import DaskComm, address_of
from dask_distmm.runtime.wire import Message

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed import Worker as DaskWorker

__all__ = ["ReplicaStore", "Replicas"]

# Chunks of up to so many bytes together travel in one message (one chunk at least), and so many messages at once.
_MESSAGE_BYTES = 2**26
_IN_FLIGHT = 2
# So long after a task has ended (seconds) the scheduler looks which results are still wanted, once for all tasks.
_SWEEP_SECONDS = 0.05
_OVER = ("released", "forgotten", "erred")


class ReplicaStore:
    """The replicas on one worker, and those that are being made. Methods run on its event loop if not said otherwise.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: DaskWorker) -> None:
        self._worker = worker
        self._kept: dict[str, tuple[int, Mapping[int, Any]]] = {}
        self._own: dict[int, Future[Mapping[Any, Any]]] = {}

    def __len__(self) -> int:
        """Return how many results are kept or being made."""
        return len(self._kept) + len(self._own)

    def find(self, name: str, run_id: int) -> Mapping[int, Any] | None:
        """Return all chunks that a run has left of a result, or None if they are not here. Any thread."""
        found, chunks = self._kept.get(name, (0, None))
        return chunks if found == run_id else None

    def operands(self, plan: Placement, me: int) -> tuple[dict[ChunkKey, Any], list[str]]:
        """Return the chunks of A and B that a plan takes from replicas, and the results that are not here. Any thread.

        Parameters
        ----------
        plan, me
            Of the run, and which participant this is.
        """
        chunks: dict[ChunkKey, Any] = {}
        missing: list[str] = []
        if not any(plan.replica_runs) or not isinstance(plan, Plan):
            return chunks, missing
        problem = plan.problem
        for operand, name, run_id, turned in zip("ab", problem.arrays, plan.replica_runs, problem.turned, strict=True):
            if not run_id or me not in plan.ranks:
                continue
            kept = self.find(name, run_id)
            if kept is None:
                missing.append(name)
                continue
            nrows, ncols = problem.chunk_counts(operand)
            for index, chunk in kept.items():
                j, i = divmod(index, nrows)
                chunks[operand, i * ncols + j if turned else index] = chunk.T if turned else chunk
        return chunks, missing

    def expect(self, run_id: int, plan: Placement) -> None:
        """Let others ask for what this worker will own, if there are to be replicas. Any thread."""
        if plan.replicas:
            self._own[run_id] = Future()

    async def share(
        self, run_id: int, plan: Placement, made: Mapping[ResultKey, Any], timings: dict[str, float]
    ) -> tuple[dict[ResultKey, Any], int]:
        """Give and get chunks of D, and keep all of them, if there are to be replicas.

        Parameters
        ----------
        run_id, plan
            Of the run.
        made
            The chunks that its job has returned.
        timings
            Of the job; the time that this takes is added.

        Returns
        -------
        The chunks that the job has returned but for replicas, and how many bytes have arrived from others.
        """
        own = {key: chunk for key, chunk in made.items() if key[0] != REPLICA}
        me = [worker.address for worker in plan.participants].index(address_of(self._worker))
        if run_id in self._own:
            self._own[run_id].set_result({number: chunk for (name, number), chunk in own.items() if not name})
        if me >= plan.replicas or not isinstance(plan, Plan):
            return own, 0
        started = time.perf_counter()
        chunks, received = await self.gather(plan, run_id, me, made)
        if run_id in self._own:  # not ended meanwhile
            self._kept[plan.problem.name] = run_id, chunks
        timings["replicate"] = timings.get("replicate", 0.0) + time.perf_counter() - started
        return own, received

    async def serve(self, run_id: int, indices: Sequence[int]) -> list[Any]:
        """Return some of this worker's own chunks, once it has them."""
        if run_id not in self._own:
            raise ProtocolError(f"run {run_id!r} makes no replicas here")
        # Shielded: a peer that gives up its request must not cancel the future, for which others wait too.
        own = await asyncio.shield(asyncio.wrap_future(self._own[run_id]))
        return [own[index] for index in indices]

    async def gather(
        self, plan: Plan, run_id: int, me: int, made: Mapping[ResultKey, Any]
    ) -> tuple[dict[int, Any], int]:
        """Return all chunks of D by number, and how many bytes have arrived from others.

        Parameters
        ----------
        plan, run_id, me
            Of the run, and which participant this is.
        made
            The chunks that its job has returned.
        """
        addresses = [worker.address for worker in plan.participants]
        comm = DaskComm(self._worker, run_id, addresses, plan.problem.options.transfer_timeout)
        found = {key[1]: chunk for key, chunk in made.items() if is_of_d(key)}
        window = asyncio.Semaphore(_IN_FLIGHT)

        async def ask(peer: int, indices: list[int]) -> None:
            boxes = np.zeros((len(indices), 6), np.int64)
            boxes[:, 1] = indices
            async with window:
                arrived = await asyncio.wrap_future(comm.fetch(peer, "replica", boxes, False))
            found.update(zip(indices, arrived, strict=True))

        await asyncio.gather(*itertools.starmap(ask, _messages(plan, me, found)))
        return found, comm.received_bytes

    def end(self, run_id: int, error: BaseException | None = None) -> None:
        """Hand out nothing more of a run, which is done, or has failed with an error."""
        own = self._own.pop(run_id, None)
        if own is not None and not own.done():
            own.set_exception(error or ProtocolError(f"run {run_id} is over"))

    def drop(self, name: str | None = None, run_id: int | None = None) -> None:
        """Let go of the replicas of a result, of those that a run has left, or of both at once; of all if neither."""
        self._kept = {
            held: (run, chunks)
            for held, (run, chunks) in self._kept.items()
            if (name is not None and held != name) or (run_id is not None and run != run_id)
        }


def _messages(plan: Plan, me: int, chunks: Mapping[int, Any]) -> list[tuple[int, list[int]]]:
    """Return whom to ask for which chunks, message by message; not all participants begin with the same one."""
    count, ranks = len(plan.ranks), np.asarray(plan.ranks)
    found: list[tuple[int, list[int]]] = []
    for turn in range(count):
        rank = (me + turn) % count
        size = 0
        for index in plan.owned(rank).tolist():
            if index in chunks:
                continue
            r0, r1, c0, c1 = plan.chunk_rect(index)
            size += (r1 - r0) * (c1 - c0) * plan.problem.itemsize("d")
            if not found or found[-1][0] != ranks[rank] or size > _MESSAGE_BYTES:
                found.append((int(ranks[rank]), []))
                size = 0
            found[-1][1].append(index)
    return found


class Replicas:
    """The replicas of the cluster: which workers have those of which run.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    tell
        Sends a message to the `WorkerSide` of some addresses.
    """

    def __init__(self, scheduler: Scheduler, tell: Callable[[Sequence[str], Message], None]) -> None:
        self._scheduler, self._tell = scheduler, tell
        self._held: dict[str, tuple[int, set[str]]] = {}
        self._due = False

    def __len__(self) -> int:
        """Return of how many results there are replicas."""
        return len(self._held)

    def add(self, name: str, run_id: int, made: Placement) -> None:
        """Note that a run has left replicas, if it has; those of an earlier run of the same multiply are dropped."""
        if not made.replicas:
            return
        holders = {worker.address for worker in made.participants[: made.replicas]}
        before = self._held.get(name, (0, set()))
        self._held[name] = run_id, holders
        self._tell_dropped(name, before[0], before[1] - holders)

    def where(
        self, problem: Problem, workers: Sequence[Worker], held: Where
    ) -> tuple[dict[str, NDArray[np.int32]], tuple[int, int]]:
        """Return where the operands' chunks are, and the numbers of the runs that have left replicas; 0 for none.

        Parameters
        ----------
        problem
            The multiply.
        workers
            Those that can be ranks: a replica is of use if all have it.
        held
            Who holds the chunks of each operand.
        """
        a, b = (self._run(name, [worker.address for worker in workers]) for name in problem.arrays)
        runs = {"a": a, "b": b}
        where = {name: np.full_like(table, EVERYWHERE) if runs.get(name) else table for name, table in held.items()}
        return where, (a, b)

    def mark(self, names: Sequence[str], answer: RosterReply) -> RosterReply:
        """Return an answer to a client in which arrays that all workers have as replicas lie everywhere."""
        addresses = [address for address, *_ in answer.workers]
        placed = [
            np.full(len(raw) // 4, EVERYWHERE, np.int32).tobytes() if raw and self._run(name, addresses) else raw
            for name, raw in zip(names, answer.placed, strict=True)
        ]
        return dataclasses.replace(answer, placed=placed)

    def _run(self, name: str, addresses: Sequence[str]) -> int:
        run_id, holders = self._held.get(name, (0, set()))
        return run_id if holders.issuperset(addresses) else 0

    def drop(self, *names: str) -> None:
        """Have the replicas of some results dropped."""
        for name in names:
            run_id, holders = self._held.pop(name, (0, set()))
            self._tell_dropped(name, run_id, holders)

    def _tell_dropped(self, name: str, run_id: int, holders: set[str]) -> None:
        self._tell(sorted(holders), DropReplicas(name, run_id))

    def lose(self, address: str) -> None:
        """Forget the replicas of a worker that is gone."""
        for _, holders in self._held.values():
            holders.discard(address)

    def clear(self) -> None:
        """Forget all: the workers are new."""
        self._held.clear()

    def transition(self, key: Any, finish: str) -> None:
        """Look soon which results are still wanted, if a task has ended that may matter."""
        if not self._held or self._due or finish not in _OVER:
            return
        if barrier_name(key) is not None or (isinstance(key, tuple) and key[0] in self._held):
            self._due = True
            asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._due = False
        self.drop(*[name for name in self._held if not self._wanted(name)])

    def _wanted(self, name: str) -> bool:
        """Whether a chunk of a result is there or on its way, or a multiply still to run has it as operand."""
        barrier = self._scheduler.tasks.get(barrier_key(name))
        for ts in barrier.dependents if barrier is not None else ():
            if ts.key[0] != name:
                continue  # of an auxiliary output
            if ts.state not in _OVER or any(d.state not in _OVER and barrier_name(d.key) for d in ts.dependents):
                return True
        return False
