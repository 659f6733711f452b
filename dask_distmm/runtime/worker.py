"""The worker's side: one run at a time on one engine thread; its chunks of D are given to Dask.

Life of a run on a worker::

    prepare()  the scheduler asks for a vote: are all chunks here?  runs[run_id]
    start()    the engine works in its thread; peers fetch()
               the chunks of D are put where Dask has its data      placed[run_id]
    finish()   all ranks are done: buffers go, the chunks are Dask's own
    abort()    the run has failed: buffers and its chunks of D go

Handlers run on the worker's event loop and never block it: what takes time goes to a thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import platform
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from dask.utils import typename
from distributed import Worker, WorkerPlugin
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps
from distributed.utils import sync

from dask_distmm._version import __version__
from dask_distmm.comms.dask import DaskComm, address_of
from dask_distmm.comms.serializers import let_types_travel
from dask_distmm.engines.base import ENGINES, ChunkKey, IndependentJob, Job, get_engine, log
from dask_distmm.engines.watchdog import Watchdog
from dask_distmm.errors import DistMMError, EngineError, ProtocolError
from dask_distmm.planning import Plan
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import check_boxes, check_chunks, numbered, order_of, ready_event
from dask_distmm.runtime.history import History
from dask_distmm.runtime.keys import output_name
from dask_distmm.runtime.replicas import ReplicaStore
from dask_distmm.runtime.run import summarize

__all__ = ["NAME", "DistMMWorkerPlugin", "WorkerSide", "call_scheduler"]

NAME = "distmm"

# So many chunks are given to Dask before others get the event loop again.
_SLICE = 500
# How often a worker says how far it is (seconds).
_TELL = 0.5


class WorkerSide:
    """All that dask_distmm keeps on one worker. Made once for each worker process' `Worker`.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.runs: dict[int, tuple[Plan, Job]] = {}
        # Keys of values that Dask's scheduler has not heard of yet.
        self.placed: dict[int, list[Any]] = {}
        self.replicas = ReplicaStore(worker)
        self.newest_run = 0
        self.progress: dict[int, float] = {}
        self.history = History()
        # Numbers of runs that are over. What comes late for them, because this process stood still, is refused.
        self._over: collections.deque[int] = collections.deque(maxlen=1000)
        # One thread, so that two collectives can never cross.
        self.engine_thread = ThreadPoolExecutor(1, thread_name_prefix="distmm-engine")
        self.handlers: dict[str, Callable[..., Any]] = {
            "distmm_describe": self.describe,
            "distmm_prepare": self.prepare,
            "distmm_start": self.start,
            "distmm_abort": self.abort,
            "distmm_fetch": self.fetch,
            "distmm_release": self.release,
        }
        self.stream_handlers = {
            "distmm-end": self.end,
            "distmm-finish": self.finish,
            "distmm-gone": self.gone,
            "distmm-abandon": self.abandon,
            "distmm-drop-replicas": self.replicas.drop,
        }
        self._dask_dump = worker.handlers.get("dump_state")
        if self._dask_dump:
            self.handlers["dump_state"] = self.dump_state
        let_types_travel()
        worker.handlers.update(self.handlers)
        worker.stream_handlers.update(self.stream_handlers)

    @property
    def address(self) -> str:
        """The address under which everybody else knows this worker."""
        return address_of(self.worker)

    # Called by the scheduler

    async def describe(self) -> dict[str, Any]:
        """Return what planning needs to know of this worker."""
        return await asyncio.to_thread(_describe)

    async def prepare(
        self,
        run_id: int,
        me: int,
        plan: Mapping[str, Any],
        keys: Mapping[str, Sequence[Any]],
        check_orders: bool = False,
    ) -> dict[str, Any]:
        """Check that all chunks are here and allocate; the answer is this worker's vote.

        Parameters
        ----------
        run_id, me, plan
            Number of the run, and which participant of its plan this worker is.
        keys
            For each operand of which chunks are here the keys of these, in the order of their numbers.
        check_orders
            Whether a plan for other memory orders than those of the chunks is refused.
        """
        if not isinstance(run_id, int) or run_id <= self.newest_run or run_id in self._over:
            return _refusal(f"run {run_id!r} is stale: this worker has seen run {self.newest_run}, or its end")
        self.history.note(run_id, "asked for a vote")
        try:
            # On the engine's thread: after whatever may still be ending there.
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self.engine_thread, self._prepare, run_id, me, plan, keys, check_orders)
        except ProtocolError as error:
            answer = _refusal(str(error))
        except BaseException as error:
            answer = _failure(error)
        if run_id in self._over:  # ended meanwhile
            self._drop(run_id, "it was ended before it began")
        self.history.note(run_id, f"voted {answer['status']}")
        return answer

    def _prepare(
        self, run_id: int, me: int, wire: Mapping[str, Any], keys: Mapping[str, Sequence[Any]], check_orders: bool
    ) -> dict[str, Any]:
        plan = Plan.from_wire(wire)
        if not 0 <= me < len(plan.participants):
            raise ProtocolError(f"this worker is to be participant {me} of {len(plan.participants)}")
        chunks, unkept = self.replicas.operands(plan, me)
        own, missing = self.read(plan, me, keys)
        if missing:
            return {"status": "missing", "keys": missing}
        if unkept:
            return {"status": "no replicas", "names": unkept}
        if check_orders and (orders := other_orders(plan, own)):
            return {"status": "orders", "orders": orders}
        chunks = check_chunks(plan, chunks | own)
        addresses = [worker.address for worker in plan.participants]
        comm = DaskComm(self.worker, run_id, addresses, plan.problem.options.transfer_timeout)

        def progress(share: float) -> None:
            self.progress[run_id] = share

        job = get_engine(plan.engine).job(plan, me, chunks, comm, progress, ready_event(own.values()))
        job.prepare()
        self.replicas.expect(run_id, plan)
        self.newest_run = run_id
        self.runs[run_id] = plan, job
        return {"status": "OK", "offer": job.offer}

    def read(self, plan: Plan, me: int, keys: Mapping[str, Sequence[Any]]) -> tuple[dict[ChunkKey, Any], list[Any]]:
        """Return the chunks that a participant has, and the keys of those that are not here. Any thread.

        What is on disk is read back, which may take long.
        """
        if not isinstance(keys, Mapping):
            raise ProtocolError(f"the keys of chunks are a {type(keys).__name__}, expected a dict")
        problem, data = plan.problem, self.worker.data
        chunks: dict[ChunkKey, Any] = {}
        missing = []
        for operand, where in plan.where.items():
            assert where is not None
            numbers = np.flatnonzero(where == me).tolist()
            names = keys.get("a" if operand == "b" and problem.same else operand, ())
            if len(names) != len(numbers):
                raise ProtocolError(f"{len(names)} keys for {len(numbers)} chunks of {operand.upper()}")
            turned = operand in "ab" and problem.turned["ab".index(operand)]
            for number, key in zip(numbers, names, strict=True):
                try:
                    chunk = data[key]
                except KeyError:
                    missing.append(key)
                else:
                    chunks[operand, number] = chunk.T if turned else chunk
        return chunks, missing

    async def start(self, run_id: int, offers: Any = (), unwanted: Sequence[tuple[str, bytes]] = ()) -> dict[str, Any]:
        """Let the engine do this worker's part, and give its chunks of D to Dask; answer when that is done.

        Parameters
        ----------
        run_id
            Number of the run.
        offers
            What all participants have offered.
        unwanted
            Names of outputs, and numbers of their chunks that nobody wants, as int64.
        """
        if run_id not in self.runs:
            return _refusal(f"run {run_id!r} was not prepared here, or is over")
        plan, job = self.runs[run_id]
        loop = asyncio.get_running_loop()
        self.history.note(run_id, "began")
        telling = asyncio.ensure_future(self._tell_progress(run_id, job))
        try:
            started = loop.time()
            made = await loop.run_in_executor(self.engine_thread, _execute, job, offers)
            result, received = await self.replicas.share(run_id, plan, made, job.timings)
            lost = set(job.missing) if isinstance(job, IndependentJob) else set()
            result = {key: x for key, x in result.items() if (key[1] if isinstance(key, tuple) else key) not in lost}
            placed = await self._place(run_id, plan, result, unwanted)
        except BaseException as error:
            self.history.note(run_id, f"failed with {type(error).__name__}, {self.progress.get(run_id, 0):.0%} done")
            return _failure(error)
        finally:
            telling.cancel()
            self.progress.pop(run_id, None)
        self.history.note(run_id, "was done")
        timings = {name: float(seconds) for name, seconds in job.timings.items()}
        seconds = loop.time() - started + timings.get("ahead", 0.0)
        answer = {"seconds": seconds, "timings": timings, "bytes": job.held_bytes}
        answer |= {"received": job.received_bytes + received, "kept": job.kept_bytes}
        kind = type(next(iter(result.values()), None))
        answer |= {"placed": placed, "type": [dumps(kind), typename(kind)]}
        if log.isEnabledFor(logging.DEBUG):
            number = {address: rank for rank, address in enumerate(plan.workers)}.get(self.address, "none")
            what = summarize({self.address: answer})
            log.debug("run %d of %s: rank %s on %s done in %s", run_id, plan.problem.name, number, self.address, what)
        return {"status": "OK", **answer}

    async def _place(
        self, run_id: int, plan: Plan, result: Mapping[Any, Any], unwanted: Sequence[tuple[str, bytes]]
    ) -> list[tuple[str, bytes, bytes]]:
        """Give chunks of D to Dask; return for each output their numbers and bytes, as int64."""
        name, problem = plan.problem.result_name, plan.problem
        ncols = problem.part.ncols if problem.part is not None else problem.chunk_counts("d")[1]
        skipped = {output: set(np.frombuffer(raw, np.int64).tolist()) for output, raw in unwanted}
        todo: dict[str, dict[int, Any]] = {}
        for key, value in numbered(plan, result).items():
            output, number = key if isinstance(key, tuple) else ("", key)
            if number not in skipped.get(output, ()):
                todo.setdefault(output, {})[number] = value
        placed = []
        for output, values in todo.items():
            sizes: list[int] = []
            array = output_name(name, output)
            every = list(values)
            for some in (every[at : at + _SLICE] for at in range(0, len(every), _SLICE)):
                if run_id not in self.runs:
                    raise EngineError(f"run {run_id} was ended")
                keys = [(array, *divmod(number, ncols)) for number in some]
                self.placed.setdefault(run_id, []).extend(keys)
                found = dict(zip(keys, (values[number] for number in some), strict=True))
                sizes.extend(direct.keep(self.worker, found, f"distmm-run-{run_id}").values())
                if len(values) > _SLICE:
                    await asyncio.sleep(0)
            placed.append((output, np.array(every, np.int64).tobytes(), np.array(sizes, np.int64).tobytes()))
        return placed

    async def _tell_progress(self, run_id: int, job: Job) -> None:
        """Tell the scheduler from time to time how far this worker is."""
        while True:
            await asyncio.sleep(_TELL)
            told = {"share": float(self.progress.get(run_id, 0.0)), "received": int(job.received_bytes)}
            self.worker.batched_send({"op": "distmm-progress", "run_id": run_id, **told})

    async def release(self, group: int, engine: str, grace: float) -> dict[str, Any]:
        """Free what the ranks of a group keep between runs; all of them are asked at the same time."""

        def free() -> None:
            with Watchdog(grace, f"freeing group {group} of engine {engine}"):
                get_engine(engine).release(group)

        await asyncio.get_running_loop().run_in_executor(self.engine_thread, free)
        return {"status": "OK"}

    def abandon(self, group: int, engine: str) -> None:
        """Forget a group of which a rank is gone."""
        with contextlib.suppress(RuntimeError):  # this worker is closing
            self.engine_thread.submit(get_engine(engine).abandon, group)

    async def abort(self, run_id: int, reason: str) -> dict[str, Any]:
        """End a run here that has not succeeded; the answer is what this worker did in it."""
        self.end(run_id, reason)
        return {"status": "OK", "history": self.history.brief(run_id)}

    def end(self, run_id: int, reason: str) -> None:
        """End a run here that has not succeeded; may be repeated."""
        if run_id in self.progress:
            self.history.note(run_id, f"was told to end, {self.progress[run_id]:.0%} done")
        self._drop(run_id, reason)
        self.replicas.drop(run_id=run_id)

    def _drop(self, run_id: int, reason: str) -> None:
        self._over.append(run_id)
        error = EngineError(f"run {run_id} was ended: {reason}")
        if run_id in self.runs:
            _, job = self.runs.pop(run_id)
            job.abort(error)
        self.replicas.end(run_id, error)
        if keys := self.placed.pop(run_id, ()):
            later = set(itertools.chain(*(found for number, found in self.placed.items() if number > run_id)))
            direct.let_go(self.worker, [key for key in keys if key not in later], run_id)

    def finish(self, run_id: int) -> None:
        """All ranks are done: what only the run needed goes, the chunks of D stay."""
        self._over.append(run_id)
        self.runs.pop(run_id, None)
        self.placed.pop(run_id, None)
        self.replicas.end(run_id)

    def gone(self, run_id: int, address: str) -> None:
        """Let a run go on without a participant, which has left."""
        if run_id in self.runs:
            plan, job = self.runs[run_id]
            self.history.note(run_id, f"was told that {address} is gone")
            for participant, worker in enumerate(plan.participants):
                if worker.address == address and isinstance(job, IndependentJob):
                    job.lose(participant)

    def dump_state(self, **kwargs: Any) -> dict[str, Any]:
        """Return what Dask itself says of this worker, for ``Client.dump_cluster_state()``, with our history."""
        return {**self._dask_dump(**kwargs), NAME: self.history._to_dict()}

    # Called by other workers

    async def fetch(self, run_id: int, kind: str, boxes: bytes, flat: bool) -> dict[str, Any]:
        """Return parts of this worker's matrices to a peer of the same run."""
        try:
            table = np.frombuffer(boxes, np.int64).reshape(-1, 6)
            if run_id not in self.runs:
                return {"status": "gone", "message": f"run {run_id!r} is not live here"}
            if kind == "replica":
                own = await self.replicas.serve(run_id, table[:, 1].tolist())
                return {"status": "OK", "data": [to_serialize(x) for x in own]}
            plan, job = self.runs[run_id]
            check_boxes(plan, kind, table)
            # Shielded: a peer's request that is given up must not cancel what others wait for too.
            await asyncio.shield(asyncio.wrap_future(job.available(kind, table)))
            data = await asyncio.to_thread(job.serve, kind, table, bool(flat))
            return {"status": "OK", "data": [to_serialize(x) for x in data]}
        except (ProtocolError, TypeError, ValueError, KeyError) as error:
            return _refusal(repr(error))
        except Exception as error:
            return _failure(error)

    def close(self) -> None:
        """End all runs and the engine thread."""
        for run_id in list(self.runs):
            self._drop(run_id, "the worker is closing")
        self.replicas.drop()
        self.engine_thread.shutdown(wait=False, cancel_futures=True)
        for op, handler in self.handlers.items():
            if self.worker.handlers.get(op) == handler:
                del self.worker.handlers[op]
        if self._dask_dump:
            self.worker.handlers["dump_state"] = self._dask_dump
        # Stream handlers stay: what the scheduler has sent before it knew may still arrive.


class DistMMWorkerPlugin(WorkerPlugin):  # type: ignore[misc]
    """Puts a `WorkerSide` on a worker. Installed by the scheduler's plugin, or by preload."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Attach, once."""
        if NAME not in worker.extensions:
            worker.extensions[NAME] = WorkerSide(worker)

    def teardown(self, worker: Worker) -> None:
        """Detach when the worker closes (a plugin that is only replaced keeps its `WorkerSide`)."""
        if worker.status.name in ("closing", "closing_gracefully", "closed", "failed"):
            side = worker.extensions.pop(NAME, None)
            if side is not None:
                side.close()


def call_scheduler(worker: Worker, op: str, **message: Any) -> Any:
    """Call a handler of the scheduler from a task's thread, and wait."""

    async def call() -> Any:
        return await getattr(worker.scheduler, op)(**message)

    return sync(worker.loop, call)


def other_orders(plan: Plan, chunks: Mapping[ChunkKey, Any]) -> dict[str, str]:
    """Return the memory orders of most chunks of A and B here, where they matter and are not as planned."""
    problem = plan.problem
    found = {}
    for operand, planned, conjugated in zip("ab", (plan.order_a, plan.order_b), problem.conjugated, strict=True):
        here = collections.Counter(order_of(chunk) for (name, _), chunk in chunks.items() if name == operand)
        order = here.most_common(1)[0][0] if here else planned
        if order != planned and (plan.engine != "numpy" or conjugated):
            found[operand] = order
    return found


def _execute(job: Job, offers: Any) -> Mapping[int, Any]:
    if not isinstance(offers, list | tuple):
        raise ProtocolError(f"offers are a {type(offers).__name__}, expected a list")
    job.accept(offers)
    return job.execute()


def _describe() -> dict[str, Any]:
    engines, memory, links = {}, {}, {}
    for name in ENGINES:
        try:
            engine = get_engine(name)
            engines[name], memory[name] = dict(engine.versions()), engine.memory()
            device, reach = engine.links()
            links[name] = [device, list(reach)]
        except EngineError as error:
            engines[name] = {"error": str(error)}
    let_types_travel()  # of CuPy's too, now that it is here if it ever will
    known = {"engines": engines, "memory": memory, "links": links, "host": platform.node()}
    return {"status": "OK", "version": __version__, **known}


def _refusal(message: str) -> dict[str, Any]:
    return {"status": "refused", "message": message}


def _failure(error: BaseException) -> dict[str, Any]:
    """Return an error as plain types; a connection that broke means a worker that is gone."""
    if isinstance(error, OSError):
        return {"status": "lost", "message": f"{type(error).__name__}: {error}"}
    text = f"{type(error).__name__}: {error}"
    detail = "" if isinstance(error, DistMMError) else "".join(traceback.format_exception(error)[-6:])
    return {"status": "failed", "message": text, "traceback": detail}
