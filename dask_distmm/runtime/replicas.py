"""Matrices that are on all workers, besides the chunks that Dask has: for operands of later multiplies.

A run that keeps D (epilog ``allreduce``) or an operand (``gathered``) ends with each worker fetching the chunks that it
still lacks from those who have them. They are kept here and not as Dask's own copies, which its memory manager would
reduce to one. So Dask knows nothing of them, and nothing rests on them: a later run uses them if every worker has them,
and else the chunks that Dask has.

::

    worker      ReplicaStore    share()  serve()  operands()    kept by name and run
    scheduler   Replicas        add()    where()  drop()        which workers have which run's, and for how long

They are dropped when nobody wants the array any more: none of its chunks is in memory or on its way, and no multiply
that is still to run has it as operand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes, Comm
from dask_distmm.engines.base import ChunkKey, ResultKey
from dask_distmm.errors import ProtocolError
from dask_distmm.planning import EVERYWHERE, Computation, Placement, Plan, Worker
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.placement import GATHERED, REPLICA, Where
from dask_distmm.runtime.keys import barrier_name
from dask_distmm.runtime.messages import Released
from dask_distmm.runtime.run import WorkerRun

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

# Chunks of up to this many bytes together travel in one message (one chunk at least), and this many messages at once.
_MESSAGE_BYTES = 2**26
_IN_FLIGHT = 2
# Seconds from the end of a task until the scheduler looks which arrays are still wanted, once for all tasks.
_SWEEP_SECONDS = 0.05
_OVER = ("released", "forgotten", "erred")


# Chunks by their places in their array.
Kept = Mapping[tuple[int, ...], Any]

# Numbers of the matrices in requests.
_MATRICES = {"d": 0, "a": 1, "b": 2}


class ReplicaStore:
    """The replicas on one worker. Methods run on its event loop unless they say otherwise."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Kept]] = {}

    def __len__(self) -> int:
        """Return how many matrices are kept."""
        return len(self._kept)

    def find(self, name: str, run_id: int) -> Kept | None:
        """Return all chunks that a run has left of an array, or None if they are not here. Any thread."""
        held_by, chunks = self._kept.get(name, (0, None))
        return chunks if held_by == run_id else None

    def operands(self, plan: Placement, me: int) -> tuple[dict[ChunkKey, Any], list[str]]:
        """Return the chunks of A and B that a plan takes from replicas, and the results not here. Any thread."""
        chunks: dict[ChunkKey, Any] = {}
        missing: list[str] = []
        for operand, run_id in zip("ab", plan.replica_runs, strict=True):
            if run_id and me in plan.ranks:
                matrix = plan.problem[operand]
                if (kept := self.find(matrix.array, run_id)) is None:
                    missing.append(matrix.array)
                else:
                    places = enumerate(map(matrix.place, matrix.every.tolist()))
                    chunks |= {(operand, number): _turned(matrix, kept[place]) for number, place in places}
        return chunks, missing

    async def share(self, run: WorkerRun, results: Mapping[ResultKey, Any]) -> dict[ResultKey, Any]:
        """All-gather the matrices that are to be on all workers, and keep them; return the other results."""
        own = {key: chunk for key, chunk in results.items() if key[0] not in (REPLICA, GATHERED)}
        plan, timings = run.plan, run.job.timings
        if not plan.replicas or not isinstance(plan, Plan):
            return own
        run.shared |= {("d", number): chunk for (name, number), chunk in own.items() if not name}
        run.ready.set_result(None)
        if run.me >= plan.replicas:
            return own
        started = time.perf_counter()
        for matrix in plan.kept:
            brought = REPLICA if matrix == "d" else GATHERED
            chunks = {number: chunk for (name, number), chunk in run.shared.items() if name == matrix}
            chunks |= {number: chunk for (name, number), chunk in results.items() if name == brought}
            await self.gather(plan, run.comm, run.me, matrix, chunks)
            if not run.over:
                of = plan.problem[matrix]
                by_place = {of.place(number): _turned(of, chunk) for number, chunk in chunks.items()}
                self._kept[_array_of(plan.problem, matrix)] = run.run_id, by_place
        timings["replicate"] = timings.get("replicate", 0.0) + time.perf_counter() - started
        return own

    async def serve(self, run: WorkerRun, boxes: Boxes) -> list[Any]:
        """Wait for some of this worker's own chunks, and return them."""
        if not run.plan.replicas:
            raise ProtocolError(f"run {run.run_id!r} makes no replicas here")
        # Shielded: a peer that cancels its request must not cancel the future, for which others wait too.
        await asyncio.shield(asyncio.wrap_future(run.ready))
        names = {number: name for name, number in _MATRICES.items()}
        return [run.shared[names[matrix], index] for matrix, index in boxes[:, :2].tolist()]

    async def gather(self, plan: Plan, comm: Comm, me: int, matrix: str, chunks: dict[int, Any]) -> None:
        """Fetch all missing chunks of a matrix from their participants."""
        window = asyncio.Semaphore(_IN_FLIGHT)

        async def ask(peer: int, indices: list[int]) -> None:
            boxes = np.zeros((len(indices), 6), np.int64)
            boxes[:, 0], boxes[:, 1] = _MATRICES[matrix], indices
            async with window:
                arrived = await asyncio.wrap_future(comm.fetch(peer, "replica", boxes))
            chunks.update(zip(indices, arrived, strict=True))

        await asyncio.gather(*itertools.starmap(ask, _messages(plan, me, matrix, chunks)))

    def drop(self, name: str | None = None, run_id: int | None = None) -> None:
        """Release the replicas of an array, those of a run, those of both, or all."""
        self._kept = {
            held: (run, chunks)
            for held, (run, chunks) in self._kept.items()
            if (name is not None and held != name) or (run_id is not None and run != run_id)
        }


def _messages(plan: Plan, me: int, matrix: str, here: Mapping[int, Any]) -> list[tuple[int, list[int]]]:
    """Return whom to ask for which chunks, message by message; not all participants begin with the same one."""
    holders = np.asarray(plan.ranks)[plan.owners] if matrix == "d" else plan.where[matrix]
    sizes, count = plan.problem[matrix].bytes, len(plan.participants)
    messages: list[tuple[int, list[int]]] = []
    for peer in ((me + turn) % count for turn in range(count)):
        size = 0
        for index in np.flatnonzero(holders == peer).tolist():
            if index in here:
                continue
            size += int(sizes[index])
            if not messages or messages[-1][0] != peer or size > _MESSAGE_BYTES:
                messages.append((peer, []))
                size = 0
            messages[-1][1].append(index)
    return messages


def _array_of(problem: Computation, matrix: str) -> str:
    """Return the name of the array whose chunks are those of a matrix, or of its transpose."""
    return problem.name if matrix == "d" else problem[matrix].array


def _turned(matrix: NamedMatrix, chunk: Any) -> Any:
    """Return a chunk of the array of a matrix, which may be its transpose, as one of the matrix, and the other way."""
    return chunk.T if matrix.transposed else chunk


@dataclasses.dataclass(frozen=True, slots=True)
class _Left:
    """The replicas that a run has left: their holders, and the tasks of the chunks that Dask has.

    These say which array it is: another array may later have the name that a user gave to this one.
    """

    run_id: int
    holders: set[str]
    tasks: list[TaskState]


class Replicas:
    """The replicas of the cluster: which workers have those of which run."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[Sequence[str], str, int], None]) -> None:
        self._scheduler, self._tell = scheduler, tell
        self._held: dict[str, _Left] = {}
        self._due = False

    def __len__(self) -> int:
        """Return of how many arrays there are replicas."""
        return len(self._held)

    def add(self, run_id: int, plan: Placement) -> None:
        """Record the replicas that a run has left; release those of an earlier run of the same array."""
        holders = {worker.address for worker in plan.participants[: plan.replicas]}
        for matrix in plan.kept:
            name = _array_of(plan.problem, matrix)
            places = map(plan.problem[matrix].place, plan.problem[matrix].every.tolist())
            before = self._held.get(name)
            tasks = [self._scheduler.tasks.get((name, *place)) for place in places]
            self._held[name] = _Left(run_id, holders, [ts for ts in tasks if ts is not None])
            if before is not None:
                self._tell(sorted(before.holders - holders), name, before.run_id)
            # The array may have been released while the run was ending.
            self._sweep_soon()

    def where(
        self, problem: Computation, workers: Sequence[Worker], held: Where
    ) -> tuple[dict[str, NDArray[np.int32]], tuple[int, int]]:
        """Return where the operands' chunks are, and the numbers of the runs that have left replicas; 0 for none."""
        runs = {name: self._run(problem[name].array, [worker.address for worker in workers]) for name in "ab"}
        where = {name: np.full_like(table, EVERYWHERE) if runs.get(name) else table for name, table in held.items()}
        return where, (runs["a"], runs["b"])

    def everywhere(
        self, names: Sequence[str], workers: Sequence[Worker], placed: Sequence[bytes | None]
    ) -> list[bytes | None]:
        """Return the places of arrays' chunks, of which those that all workers have as replicas lie everywhere."""
        addresses = [worker.address for worker in workers]
        return [
            np.full(len(raw) // 4, EVERYWHERE, np.int32).tobytes() if raw and self._run(name, addresses) else raw
            for name, raw in zip(names, placed, strict=True)
        ]

    def _run(self, name: str, addresses: Sequence[str]) -> int:
        left = self._held.get(name)
        return left.run_id if left and left.holders.issuperset(addresses) and self._wanted(left) else 0

    def drop(self, *names: str) -> None:
        """Drop the replicas of some arrays."""
        for name in names:
            if (left := self._held.pop(name, None)) is not None:
                self._tell(sorted(left.holders), name, left.run_id)

    async def free_replicas(self, names: Sequence[str] | None = None) -> Released:
        """Drop the replicas of the arrays that a client names, or of all; return of how many there were any."""
        freed = [name for name in self._held if names is None or name in names]
        self.drop(*freed)
        return Released("OK", count=len(freed))

    def lose(self, address: str) -> None:
        """Forget the replicas of a lost worker."""
        for left in self._held.values():
            left.holders.discard(address)

    def clear(self) -> None:
        """Forget all replicas: all workers are new."""
        self._held.clear()

    def transition(self, key: Any, finish: str) -> None:
        """Schedule a check of which arrays are still needed, after the end of a task that may need them."""
        if not self._held or finish not in _OVER:
            return
        if barrier_name(key) is not None or (isinstance(key, tuple) and key[0] in self._held):
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._due = False
        self.drop(*[name for name, left in self._held.items() if not self._wanted(left)])

    def _wanted(self, left: _Left) -> bool:
        """Whether a chunk of an array is there or on its way, or a multiply still to run has it as operand."""
        for ts in left.tasks:
            if self._scheduler.tasks.get(ts.key) is not ts:
                continue  # forgotten
            if ts.state not in _OVER or any(d.state not in _OVER and barrier_name(d.key) for d in ts.dependents):
                return True
        return False
