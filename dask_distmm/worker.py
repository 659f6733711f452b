"""The worker's side: staged chunks, one run at a time on one engine thread, results until they are collected.

Life of the data on a worker::

    stage()    a contribute task hands over its chunk              staged[name]
    prepare()  the scheduler asks for a vote: is all there?        runs[run_id]
    start()    the engine works in its thread; peers fetch()       outputs[run_id]
    finish()   all ranks are done: chunks and buffers go
    collect()  collect tasks take chunks of the result
    forget()   the barrier's result was released: the rest goes, but for replicas

Handlers run on the worker's event loop and never block it: what takes time goes to a thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import platform
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from dask.utils import parse_timedelta
from distributed import Worker, WorkerPlugin
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps
from distributed.utils import sync

from dask_distmm._version import __version__
from dask_distmm.chunks import Staged, check_boxes, check_chunks, numbered, order_of, stage
from dask_distmm.comms.dask import DaskComm, address_of
from dask_distmm.config import parsed
from dask_distmm.engines.base import ENGINES, ApartJob, Job, get_engine, log
from dask_distmm.engines.watchdog import Watchdog
from dask_distmm.errors import DistMMError, EngineError, ProtocolError
from dask_distmm.history import History
from dask_distmm.keys import parse_stage_key
from dask_distmm.plan import Plan
from dask_distmm.replicas import ReplicaStore
from dask_distmm.run import summarize
from dask_distmm.travel import let_types_travel

__all__ = ["DistMMWorkerPlugin", "WorkerSide", "worker_side"]

NAME = "distmm"

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
        self.staged: dict[str, dict[tuple[str, int, int], Staged]] = {}
        self.runs: dict[int, tuple[Plan, Job]] = {}
        self.outputs: dict[int, dict[Any, Any]] = {}
        self.replicas = ReplicaStore(worker)
        self.newest_run = 0
        self.progress: dict[int, float] = {}
        self.history = History()
        # Numbers of runs that are over. What comes late for them, because this process stood still, is refused.
        self._over: collections.deque[int] = collections.deque(maxlen=1000)
        self.scheduler_ready = False
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
            "distmm-forget": self.forget,
            "distmm-gone": self.gone,
            "distmm-adopt": self.adopt,
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

    # Called from tasks

    def stage(self, name: str, operand: str, chunks: Mapping[tuple[int, int], Any]) -> list[tuple[str, str]]:
        """Keep a task's chunks, by place, for the run of multiply `name`; return where they lie, and how."""
        by = next(iter(chunks))
        for place, chunk in chunks.items():
            self.staged.setdefault(name, {})[operand, *place] = stage(chunk, by)
        return [(self.address, order_of(chunk)) for chunk in chunks.values()]

    def collect(self, run_id: int, output: str, index: int) -> Any:
        """Return chunk number `index` of D (``""``) or of an auxiliary output of a run, or None if it is not here."""
        return self.outputs.get(run_id, {}).get((output, index) if output else index)

    def call_scheduler(self, op: str, **message: Any) -> Any:
        """Call a handler of the scheduler's plugin from a task's thread, and wait."""

        async def call() -> Any:
            return await getattr(self.worker.scheduler, op)(**message)

        return sync(self.worker.loop, call)

    def install_on_scheduler(self, plugin: Any) -> None:
        """Put the scheduler's plugin in place from a task's thread; does nothing where it is."""
        self.call_scheduler("register_scheduler_plugin", plugin=dumps(plugin), name=NAME, idempotent=True)
        self.scheduler_ready = True

    def fetch_output(self, address: str, run_id: int, output: str, index: int) -> Any:
        """Get a chunk of a result from the worker that has it, from a task's thread."""
        # Of this process: whoever collects need not have taken part in the run, whose options came with its plan.
        limit = parsed("timeouts.transfer", parse_timedelta)

        async def call() -> Any:
            box = np.array([[0, index, 0, 0, 0, 0]], np.int64).tobytes()
            asked = self.worker.rpc(address).distmm_fetch(run_id=run_id, kind=f"output-{output}", boxes=box, flat=False)
            return await asyncio.wait_for(asked, limit)

        try:
            answer = sync(self.worker.loop, call)
        except (OSError, TimeoutError):
            return None
        return answer["data"][0] if answer["status"] == "OK" else None

    # Called by the scheduler

    async def describe(self) -> dict[str, Any]:
        """Return what planning needs to know of this worker."""
        return await asyncio.to_thread(_describe)

    async def prepare(self, run_id: int, me: int, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Check that all is here and allocate; the answer is this worker's vote."""
        if not isinstance(run_id, int) or run_id <= self.newest_run or run_id in self._over:
            return _refusal(f"run {run_id!r} is stale: this worker has seen run {self.newest_run}, or its end")
        self.history.note(run_id, "asked for a vote")
        try:
            # On the engine's thread: after whatever may still be ending there.
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self.engine_thread, self._prepare, run_id, me, plan)
        except ProtocolError as error:
            answer = _refusal(str(error))
        except BaseException as error:
            answer = _failure(error)
        if run_id in self._over:  # ended meanwhile
            self._drop(run_id, "it was ended before it began")
        self.history.note(run_id, f"voted {answer['status']}")
        return answer

    def _prepare(self, run_id: int, me: int, wire: Mapping[str, Any]) -> dict[str, Any]:
        plan = Plan.from_wire(wire)
        if not 0 <= me < len(plan.participants):
            raise ProtocolError(f"this worker is to be participant {me} of {len(plan.participants)}")
        staged = self.staged.get(plan.problem.name, {})
        chunks, unkept = self.replicas.operands(plan, me)
        ready = []
        missing = []
        for operand, where in plan.where.items():
            assert where is not None
            for index in np.flatnonzero(where == me).tolist():
                found = staged.get(plan.problem.staged_as(operand, index))
                if found is None:
                    missing.append((operand, index))
                else:
                    chunks[operand, index] = found.array
                    if found.ready is not None:
                        ready.append(found.ready)
        if missing:
            return {"status": "missing", "count": len(missing)}
        if unkept:
            return {"status": "no replicas", "names": unkept}
        chunks = check_chunks(plan, chunks)
        addresses = [worker.address for worker in plan.participants]
        comm = DaskComm(self.worker, run_id, addresses, plan.problem.options.transfer_timeout)

        def progress(share: float) -> None:
            self.progress[run_id] = share

        job = get_engine(plan.engine).job(plan, me, chunks, comm, progress, ready)
        job.prepare()
        self.replicas.expect(run_id, plan)
        self.newest_run = run_id
        self.runs[run_id] = plan, job
        return {"status": "OK", "offer": job.offer}

    async def start(self, run_id: int, offers: Any = ()) -> dict[str, Any]:
        """Let the engine do this worker's part, with what all participants have offered; answer when it is done."""
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
        except BaseException as error:
            self.history.note(run_id, f"failed with {type(error).__name__}, {self.progress.get(run_id, 0):.0%} done")
            return _failure(error)
        finally:
            telling.cancel()
            self.progress.pop(run_id, None)
        self.history.note(run_id, "was done")
        if run_id in self.runs:  # not aborted meanwhile
            self.outputs[run_id] = numbered(plan, result)
        timings = {name: float(seconds) for name, seconds in job.timings.items()}
        seconds = loop.time() - started + timings.get("ahead", 0.0)
        answer = {"seconds": seconds, "timings": timings, "bytes": job.held_bytes}
        answer |= {"received": job.received_bytes + received, "kept": job.kept_bytes}
        answer["missing"] = list(job.missing) if isinstance(job, ApartJob) else []
        if log.isEnabledFor(logging.DEBUG):
            number = {address: rank for rank, address in enumerate(plan.workers)}.get(self.address, "none")
            what = summarize({self.address: answer})
            log.debug("run %d of %s: rank %s on %s done in %s", run_id, plan.problem.name, number, self.address, what)
        return {"status": "OK", **answer}

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

    async def abort(self, run_id: int, reason: str, keep: bool = False) -> dict[str, Any]:
        """End a run here that has not succeeded, but `keep` its results; the answer is what this worker did in it."""
        if keep:
            self._close(run_id)
        else:
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
        self.outputs.pop(run_id, None)

    def finish(self, run_id: int, name: str) -> None:
        """All ranks are done: what only the run needed goes, results stay."""
        self._close(run_id)
        self.staged.pop(name, None)

    def _close(self, run_id: int) -> None:
        self._over.append(run_id)
        self.runs.pop(run_id, None)
        self.replicas.end(run_id)

    def gone(self, run_id: int, address: str) -> None:
        """Let a run go on without a participant, which has left."""
        if run_id in self.runs:
            plan, job = self.runs[run_id]
            self.history.note(run_id, f"was told that {address} is gone")
            for participant, worker in enumerate(plan.participants):
                if worker.address == address and isinstance(job, ApartJob):
                    job.lose(participant)

    def adopt(self, run_id: int, before: int) -> None:
        """Keep what an earlier run has left here as results of the one that has made what was missing."""
        if before in self.outputs:
            self.outputs[run_id] = self.outputs.pop(before) | self.outputs.get(run_id, {})

    def forget(self, run_id: int | None, name: str | None) -> None:
        """Drop a run with its results, and, if named, all chunks staged for a multiply."""
        if run_id is not None:
            self._drop(run_id, "its task was released")
        if name is not None:
            self.staged.pop(name, None)
            self.replicas.drop(name)

    def dump_state(self, **kwargs: Any) -> dict[str, Any]:
        """Return what Dask itself says of this worker, for ``Client.dump_cluster_state()``, with our history."""
        return {**self._dask_dump(**kwargs), NAME: self.history._to_dict()}

    # Called by other workers

    async def fetch(self, run_id: int, kind: str, boxes: bytes, flat: bool) -> dict[str, Any]:
        """Return parts of this worker's matrices to a peer of the same run."""
        try:
            table = np.frombuffer(boxes, np.int64).reshape(-1, 6)
            if kind.startswith("output-"):
                chunk = self.collect(run_id, kind.removeprefix("output-"), int(table[0, 1]))
                if chunk is None:
                    return _refusal(f"no result of run {run_id!r} is here")
                return {"status": "OK", "data": [to_serialize(chunk)]}
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
        self.staged.clear()
        self.outputs.clear()
        self.replicas.drop()
        self.engine_thread.shutdown(wait=False, cancel_futures=True)
        for op, handler in self.handlers.items():
            if self.worker.handlers.get(op) == handler:
                del self.worker.handlers[op]
        if self._dask_dump:
            self.worker.handlers["dump_state"] = self._dask_dump
        # Stream handlers stay: what the scheduler has sent before it knew may still arrive.


class DistMMWorkerPlugin(WorkerPlugin):  # type: ignore[misc]
    """Puts a `WorkerSide` on a worker. Installed by the scheduler's plugin, by preload, or by the first task."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Attach; what a task may have staged already is kept."""
        if NAME not in worker.extensions:
            worker.extensions[NAME] = WorkerSide(worker)
        self._side: WorkerSide = worker.extensions[NAME]

    def teardown(self, worker: Worker) -> None:
        """Detach when the worker closes (a plugin that is only replaced keeps its `WorkerSide`)."""
        if worker.status.name in ("closing", "closing_gracefully", "closed", "failed"):
            side = worker.extensions.pop(NAME, None)
            if side is not None:
                side.close()

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Drop what a contribute task staged that was cancelled while it ran: nobody else knows of it."""
        # The end of a cancelled task is announced as the transition that it would have made.
        over = start == "cancelled" and finish in ("released", "forgotten", "memory", "error", "rescheduled")
        if over and (stage := parse_stage_key(key)):
            name, operand, by = stage
            chunks = self._side.staged.get(name, {})
            for place, found in list(chunks.items()):
                if place[0] == operand and found.by == by:
                    del chunks[place]
            if not chunks:
                self._side.staged.pop(name, None)


def worker_side(worker: Worker) -> WorkerSide:
    """Return the `WorkerSide` of a worker, made on its event loop if it is missing; from a task's thread."""
    if NAME not in worker.extensions:

        async def install() -> None:
            if NAME not in worker.extensions:
                await worker.plugin_add(DistMMWorkerPlugin(), name=NAME, catch_errors=False)

        sync(worker.loop, install)
    side: WorkerSide = worker.extensions[NAME]
    return side


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
