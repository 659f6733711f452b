"""A network in memory, and runs of a plan over it with a thread for each participant."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import GATHERED, REPLICA, ChunkKey, Engine, Job, ResultKey, Side
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.planning import EVERYWHERE, Placement


class LocalComm:
    """A network in memory: `Comm` for jobs that run as threads of one process.

    Parameters
    ----------
    jobs
        Filled by the caller, one job for each participant.
    hook
        Called as ``hook(peer, kind)`` before a request is served; may raise or wait, to inject faults.
    """

    def __init__(self, jobs: Sequence[Job[Any]], hook: Callable[[int, str], None] = lambda peer, kind: None) -> None:
        self.jobs, self.hook = jobs, hook
        self.pool = ThreadPoolExecutor(8, thread_name_prefix="local-comm")
        self.requests: list[tuple[int, str, int]] = []
        self.received_bytes = 0
        self._lock = threading.Lock()

    def fetch(self, peer: int, kind: str, boxes: Boxes, flat: bool) -> Future[Sequence[NDArray[Any]]]:
        """Ask a peer; answered by a thread once the peer is ready."""
        answer: Future[Sequence[NDArray[Any]]] = Future()
        with self._lock:
            self.requests.append((peer, kind, len(boxes)))

        def serve(ready: Future[None]) -> None:
            try:
                ready.result()
                self.hook(peer, kind)
                # Copies, as a network makes: a peer must not see later changes of ours.
                answer.set_result([x.copy(order="K") for x in self.jobs[peer].serve(kind, boxes, flat)])
            except BaseException as error:
                answer.set_exception(error)

        self.jobs[peer].available(kind, boxes).add_done_callback(lambda ready: self.pool.submit(serve, ready))
        return answer

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown()


def run_jobs(
    engine: Engine,
    made: Placement,
    chunks: Mapping[ChunkKey, NDArray[Any]],
    timeout: float = 60.0,
    sources: Callable[[int], Mapping[ChunkKey, SourceChunk]] = lambda rank: {},
) -> dict[ResultKey, NDArray[Any]]:
    """Run a plan with one thread a participant; return the chunks of its outputs by name and number, D's name is "".

    Replicas that ranks bring are compared with the chunks of the owners, gathered chunks with those that were given.
    `sources` returns the chunks that a rank makes itself.
    """
    jobs: list[Job[Any]] = []
    comm = LocalComm(jobs)
    where = made.where
    try:
        for me in range(len(made.participants)):
            mine = {key: chunk for key, chunk in chunks.items() if where[key[0]][key[1]] in (me, EVERYWHERE)}
            making = sources(made.ranks.index(me)) if me in made.ranks else {}
            jobs.append(engine.job(Side(made, me, {**mine, **making}, comm)))
        for job in jobs:
            job.prepare()
        offers = [job.offer for job in jobs]
        for job in jobs:
            job.accept(offers)
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [pool.submit(job.execute) for job in jobs]
            result: dict[ResultKey, NDArray[Any]] = {}
            replicas: list[tuple[int, NDArray[Any]]] = []
            finished, waiting = wait(futures, timeout, return_when=FIRST_EXCEPTION)
            failed = [error for future in finished if (error := future.exception())]
            if failed or waiting:
                error = failed[0] if failed else TimeoutError(f"{len(waiting)} jobs hang")
                for job in jobs:
                    job.abort(error)
                raise error
            for future in futures:
                part = dict(future.result())
                copies = [key for key in part if key[0] == REPLICA]
                replicas += [(key[1], part.pop(key)) for key in copies]
                for number in [number for name, number in part if name == GATHERED]:
                    gathered = part.pop((GATHERED, number))
                    np.testing.assert_array_equal(gathered, chunks[made.kept[-1], number], strict=True)
                own = [key for key in part if not key[0]]
                assert not copies or len(own) + len(copies) == made.problem.outputs[0].count, "a rank lacks chunks"
                assert not set(part) & set(result), "two ranks own one chunk"
                result.update(part)
            for index, copy in replicas:
                assert copy.dtype == result["", index].dtype
                assert copy.shape == result["", index].shape
                assert copy.tobytes("C") == result["", index].tobytes("C"), f"the replica of chunk {index} differs"
        return result
    finally:
        comm.close()
