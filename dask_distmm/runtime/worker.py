"""The worker's end of the protocol, and its plugin: one run at a time on one engine thread.

Life of a run on a worker::

    prepare()  the scheduler asks for a vote: are all chunks here?  runs[run_id]
    start()    the engine works in its thread; peers fetch()
               the chunks of D are put where Dask has its data      chunks
    finish()   all ranks are done: buffers go, the chunks are Dask's own
    abort()    the run has failed: buffers and its chunks of D go

Handlers run on the worker's event loop and never block it: work that takes time goes to a thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import gc
import logging
import math
import platform
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import cloudpickle
import numpy as np
from dask.utils import typename
from distributed import Worker, WorkerPlugin
from distributed.core import error_message
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps
from numpy.typing import NDArray

from dask_distmm import compat
from dask_distmm._version import __version__
from dask_distmm.comms import cross_memory
from dask_distmm.comms.base import Boxes, PeerLostError
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.engines.base import ChunkKey, Job, ResultKey, Side, contiguous, get_engine, log
from dask_distmm.engines.entry import watchdog
from dask_distmm.engines.heap import heap
from dask_distmm.errors import DistMMError, EngineError, MatrixError, ProtocolError, brief, in_words, raised_by_user
from dask_distmm.planning import ENGINES, Placement, plan_from_wire
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import aligned, check_chunks, numbered, other_orders, ready_event, unpack_tasks
from dask_distmm.runtime.messages import (
    NAME,
    Delivery,
    Description,
    Done,
    Reply,
    Seconds,
    Vote,
    answering,
    ask,
    listening,
)
from dask_distmm.runtime.replicas import ReplicaStore
from dask_distmm.runtime.run import History, WorkerRun, in_short, summarize


def address_of(worker: Worker) -> str:
    """Return a worker's contact address, which may differ from the one that it listens on."""
    return str(getattr(worker, "contact_address", None) or worker.address)


# Matrices over Dask's own comms, and so by the protocol and with the encryption that the cluster uses. Between workers
# of one host large matrices do not travel at all: they are read out of the other worker's memory.


class DaskComm:
    """The `Comm` of one run on one worker."""

    def __init__(
        self,
        worker: Worker,
        run_id: int,
        addresses: Sequence[str],
        timeout: float,
        *,
        epoch: str = "",
        cross_memory: bool = False,
    ) -> None:
        self._worker, self._run_id, self._addresses, self._timeout = worker, run_id, addresses, timeout
        self._epoch, self._cross_memory = epoch, cross_memory
        self.received_bytes = 0

    def fetch(self, peer: int, kind: str, boxes: Boxes) -> Future[Sequence[NDArray[Any]]]:
        """Ask a participant for boxes of its matrices; see `Comm.fetch`."""
        request = self._request(self._addresses[peer], kind, boxes)
        try:
            return asyncio.run_coroutine_threadsafe(request, self._worker.loop.asyncio_loop)
        except RuntimeError:  # the event loop is closed: this process ends
            request.close()
            raise PeerLostError(f"worker {address_of(self._worker)} is closing") from None

    async def _request(self, address: str, kind: str, boxes: Boxes) -> Sequence[NDArray[Any]]:
        place = cross_memory.process_name() if self._cross_memory else ""
        wanted = self._run_id, kind, boxes.tobytes(), place
        call = ask(self._worker.rpc(address), WorkerService.fetch, self._epoch, *wanted)
        try:
            # Sums are there when the peer has multiplied, which may take any time; chunks are there now.
            async with asyncio.timeout(self._timeout if kind == "input" else None):
                answer = await call
        except TimeoutError:
            raise EngineError(
                f"worker {address} did not deliver its chunks within {self._timeout:g} s (config "
                "distmm.timeouts.transfer)"
            ) from None
        except OSError as error:  # CommClosedError among them
            raise PeerLostError(f"worker {address}: {error}") from error
        if answer is None or answer.status == "lost":
            # Either the run was ended, or another process has taken the worker's place, perhaps without the plugin yet.
            message = "it does not know the run" if answer is None else answer.message
            raise PeerLostError(f"worker {address}: {message}")
        if answer.status != "OK":
            raise ProtocolError(f"worker {address} refused a request of run {self._run_id}: {answer.message}")
        data: Sequence[NDArray[Any]] = answer.data
        if answer.loan:
            try:
                data = await asyncio.to_thread(cross_memory.borrow, answer.loan)
            except OSError as error:
                log.info("worker %s sends what can't be read in its memory: %s", address, error)
                self._cross_memory = False
                return await self._request(address, kind, boxes)
        if any(type(x) is np.ndarray and not x.flags.aligned for x in data):
            data = await asyncio.to_thread(list, map(aligned, data))
        if answer.shapes:
            parts = np.split(data[0], np.cumsum([math.prod(shape) for shape in answer.shapes])[:-1])
            data = [part.reshape(shape) for part, shape in zip(parts, answer.shapes, strict=True)]
        if kind != "enter":
            self.received_bytes += sum(x.nbytes for x in data)
        return data


# The service


A = TypeVar("A", bound=Reply)
T = TypeVar("T")

# Arrays smaller than this on average travel in one vector.
_FLAT_BYTES = 2**20
# Number of chunks that are handed to Dask before others get the event loop again.
_SLICE = 500
# How often a worker says how far it is (seconds).
_TELL = 0.5
# UCX's event loops look for messages all the time, and whoever calls CUDA in another thread waits for the interpreter
# after each call: 14 us in place of 2 (H200). So they sleep for this long between two looks while the engine works.
_REST = 1e-4
# A request may overtake the stream that tells of its epoch, by so much (seconds).
_OVERTAKES = 5.0
# A process that frees a group's memory is not ended sooner than this (seconds).
_LEAST_GRACE = 1.0
# Longer texts of a user's errors are cut.
_LONG = 10_000
# The share of a GPU's memory above which dask-cuda moves results to the host, unless it is told another limit.
_SPILLED_FROM = 0.8


class WorkerService:
    """Serves runs on one worker: their state, handlers and engine thread. One for each `Worker`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        # Runs from this worker's vote until it hears of their end.
        self.runs: dict[int, WorkerRun] = {}
        self.replicas = ReplicaStore()
        self.newest_run = 0
        self.history = History()
        self._closed = False
        # The epoch that runs and groups count in. Until the scheduler tells of its own, one that nobody else knows.
        self.epoch = uuid.uuid4().hex
        self._begun = asyncio.Event()
        # Held while the epoch changes, and while a run of it becomes known here.
        self._changing = threading.Lock()
        # Groups that may keep something here, each with its engine.
        self._groups: set[tuple[int, str]] = set()
        # Numbers of runs that are over. Messages that come late for them, as this process stood still, are refused.
        self._over: collections.deque[int] = collections.deque(maxlen=1000)
        # One thread, so that two collectives can never cross. Functions of users in it find the worker, as tasks do.
        as_task = functools.partial(direct.act_as_task, worker)
        self.engine_thread = ThreadPoolExecutor(1, thread_name_prefix="distmm-engine", initializer=as_task)
        self.handlers: dict[str, Callable[..., Any]] = {**answering(self.describe)}
        for answer in (self.trim, self.prepare, self.start, self.abort, self.fetch, self.release):
            self.handlers |= answering(answer, self._is_current)
        self._dask_dump = worker.handlers.get("dump_state")
        if self._dask_dump:
            self.handlers["dump_state"] = self.dump_state
        register_serializers()
        worker.handlers.update(self.handlers)
        handlers = self.end, self.finish, self.release_operands, self.worker_lost, self.abandon, self.release_replica
        for handle in handlers:
            worker.stream_handlers.update(listening(handle, lambda epoch: epoch == self.epoch))
        # The epoch itself comes on the scheduler's own stream only.
        worker.stream_handlers.update(listening(self.begin))

    @property
    def address(self) -> str:
        """The address under which everybody else knows this worker."""
        return address_of(self.worker)

    @property
    def spins(self) -> bool:
        """Whether this process' event loop never sleeps."""
        return self.address.startswith("ucx")

    async def _is_current(self, epoch: Any) -> bool:
        """Whether a request is of the scheduler's plugin."""
        if epoch != self.epoch and not self._closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._begun.wait(), _OVERTAKES)
        return bool(epoch == self.epoch)

    # Called by the scheduler

    def begin(self, epoch: str) -> None:
        """Abort the runs of an earlier epoch, and start a new one."""
        if epoch == self.epoch:
            return
        with self._changing:
            for run_id in list(self.runs):
                self._drop(run_id, "the scheduler's plugin was installed anew")
            self.replicas.drop()
            for group, engine in list(self._groups):
                self.abandon(group, engine)
            self._over.clear()
            self.newest_run, self.history, self.epoch = 0, History(), epoch
        self._begun.set()
        self._begun = asyncio.Event()

    async def describe(self) -> Description:
        """Return the facts about this worker that planning needs."""
        return await asyncio.to_thread(_process_facts, self.worker.data)

    async def trim(self) -> Reply:
        """Hand memory that this process does not use back to the system, and report what it holds then."""
        await asyncio.to_thread(_trim)
        self.worker.monitor.update()
        await self.worker.heartbeat()
        return Reply("OK")

    async def prepare(
        self,
        run_id: int,
        me: int,
        plan: Mapping[str, Any],
        keys: Mapping[str, Sequence[Any]],
        check_orders: bool = False,
        sources: bytes = b"",
    ) -> Vote:
        """Check that all chunks are here and allocate, as participant `me`; the answer is this worker's vote.

        `keys` has for each operand of which this worker has chunks their keys, in the order of the chunks' numbers.
        With `check_orders` a plan for other memory orders than the chunks' is refused; `sources` are tasks that make
        chunks here, pickled.
        """
        epoch = self.epoch
        if run_id <= self.newest_run or run_id in self._over:
            return Vote("refused", f"run {run_id} is stale: this worker has seen run {self.newest_run}, or its end")
        self.history.note(run_id, "asked for a vote")
        try:
            # On the engine's thread: after the previous run, which may still be ending there.
            arguments = epoch, run_id, me, plan, keys, check_orders, sources
            vote = await self._in_engine(self.spins, self._prepare, *arguments)
        except BaseException as error:
            vote = _failure(Vote, error, self._closed)
        if run_id in self._over and epoch == self.epoch:  # ended meanwhile
            self._drop(run_id, "it was ended before it began")
        self.history.note(run_id, f"voted {vote.status}")
        return vote

    def _prepare(
        self,
        epoch: str,
        run_id: int,
        me: int,
        wire: Mapping[str, Any],
        keys: Mapping[str, Sequence[Any]],
        check_orders: bool,
        sources: bytes,
    ) -> Vote:
        plan = plan_from_wire(wire)
        if not 0 <= me < len(plan.participants):
            raise ProtocolError(f"this worker is to be participant {me} of {len(plan.participants)}")
        chunks, unkept = self.replicas.operands(plan, me)
        names, own = self._read(plan, me, keys)
        if missing := names.keys() - own.keys():
            return Vote("missing", keys=[key for place, key in names.items() if place in missing])
        if unkept:
            return Vote("no replicas", names=unkept)
        if check_orders and (orders := other_orders(plan, own)):
            return Vote("orders", orders=orders)
        chunks = check_chunks(plan, chunks | own) | unpack_tasks(plan, sources, self.worker)
        addresses = [worker.address for worker in plan.participants]
        options = plan.problem.options
        comm = DaskComm(
            *(self.worker, run_id, addresses, options.transfer_timeout), epoch=epoch, cross_memory=options.cross_memory
        )
        run = WorkerRun(run_id, plan, me, comm)
        progress = functools.partial(run.figures.__setitem__, "done")
        run.job = get_engine(plan.engine).job(Side(plan, me, chunks, comm, progress, ready_event(own.values())))
        run.job.prepare()
        run.claimed = [names[place] for place in run.job.consumed]
        run.shared = {place: x for place, x in chunks.items() if place[0] in plan.kept} if plan.replicas else {}
        with self._changing:
            if epoch != self.epoch:
                raise ProtocolError(f"run {run_id} is of a plugin of the scheduler that another one has replaced")
            if self._closed:
                raise EngineError("it is closing")
            if plan.group:
                self._groups.add((plan.group, plan.engine))
            self.newest_run = run_id
            self.runs[run_id] = run
        return Vote("OK", offer=run.job.offer)

    def _read(
        self, plan: Placement, me: int, keys: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[ChunkKey, Any], dict[ChunkKey, Any]]:
        """Return the keys of a participant's chunks of operands, and those chunks that are here. Any thread.

        Dask reads back chunks that it has spilled to disk, which may take long.
        """
        problem = plan.problem
        names: dict[ChunkKey, Any] = {}
        chunks: dict[ChunkKey, Any] = {}
        read: dict[Any, Any] = {}  # Of operands that are the same array each chunk is read once.
        for operand, where in plan.where.items():
            numbers, operand_keys = np.flatnonzero(where == me).tolist(), keys.get(problem.source_of(operand), ())
            if len(operand_keys) != len(numbers):
                raise ProtocolError(f"{len(operand_keys)} keys for {len(numbers)} chunks of {operand.upper()}")
            transposed = problem[operand].transposed
            for number, key in zip(numbers, operand_keys, strict=True):
                names[operand, number] = key
                try:
                    if key not in read:
                        stored = self.worker.data[key]
                        if (chunk := aligned(stored)) is not stored:
                            self.worker.loop.add_callback(direct.replace, self.worker, key, stored, chunk)
                        read[key] = chunk
                except KeyError:
                    continue
                chunks[operand, number] = read[key].T if transposed else read[key]
        return names, chunks

    async def start(
        self, run_id: int, offers: Sequence[Any] = (), deliver: Sequence[tuple[str, str, bytes]] = ()
    ) -> Done:
        """Execute this worker's part of a run, and store its chunks of D in Dask's memory.

        `offers` are those of all participants, in their order. `deliver` has for each array of which tasks wait for
        chunks which output it is, its name, and the numbers of its chunks that no task waits for, as int64.
        """
        if run_id not in self.runs:
            return Done("lost" if self._closed else "refused", f"run {run_id} was not prepared here, or is over")
        run = self.runs[run_id]
        plan, job = run.plan, run.job
        epoch, loop = self.epoch, asyncio.get_running_loop()
        self.history.note(run_id, "began")
        telling = asyncio.ensure_future(self._tell_progress(run, epoch))
        try:
            started = loop.time()
            # So that nobody reads them half way. The scheduler drops its knowledge of them when the run is over,
            # whether it has succeeded or not.
            for key in run.claimed:
                if key in self.worker.data:
                    del self.worker.data[key]
            if plan.problem.donated:
                message = {"op": "distmm_gathered", "run_id": run_id, "epoch": epoch}
                job.on_gathered = functools.partial(loop.call_soon_threadsafe, self.worker.batched_send, message)
            # Large matrices go from host to host over Dask's comms, which the event loop drives.
            near = len({participant.host for participant in plan.participants}) == 1
            results = await self._in_engine(near and self.spins, _execute, job, offers)
            run.raise_if_over()
            result = await self.replicas.share(run, results)
            missing = set(job.missing)
            result = {key: x for key, x in result.items() if key[1] not in missing}
            placed = await self._place(run, result, deliver)
        except BaseException as error:
            name = error.name if isinstance(error, _FailedError) else type(error).__name__
            self.history.note(run_id, f"failed with {name}, {run.figures.get('done', 0):.0%} done")
            return _failure(Done, error, self._closed)
        finally:
            telling.cancel()
            run.figures.clear()
        self.history.note(run_id, "was done")
        timings = {name: float(seconds) for name, seconds in job.timings.items()}
        kind = type(next(iter(result.values()), None))
        done = Done(
            "OK",
            seconds=loop.time() - started + timings.get("ahead", 0.0),
            timings=timings,
            held_bytes=int(job.held_bytes),
            kept_bytes=int(job.kept_bytes),
            received_bytes=int(job.received_bytes),
            placed=placed,
            type=[dumps(kind), typename(kind)],
        )
        if log.isEnabledFor(logging.DEBUG):
            number = {address: rank for rank, address in enumerate(plan.workers)}.get(self.address, "none")
            summary = in_short(summarize({self.address: done}))
            log.debug(
                "run %d of %s: rank %s on %s done in %s", run_id, plan.problem.name, number, self.address, summary
            )
        return done

    async def _place(
        self, run: WorkerRun, result: Mapping[ResultKey, Any], deliver: Sequence[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes, bytes]]:
        """Store a run's chunks of D in Dask's memory; the scheduler learns of them when all participants are done."""
        by_output: dict[str, dict[int, Any]] = {}
        for (output, number), value in numbered(run.plan, result).items():
            by_output.setdefault(output, {})[number] = value
        placed, problem = [], run.plan.problem
        for output, array, raw in deliver:
            skipped = set(np.frombuffer(raw, np.int64).tolist())
            values = {number: value for number, value in by_output.get(output, {}).items() if number not in skipped}
            sizes: list[int] = []
            place, every = problem.output(output).place, list(values)
            for some in (every[at : at + _SLICE] for at in range(0, len(every), _SLICE)):
                run.raise_if_over()
                arrived = {(array, *place(number)): values[number] for number in some}
                run.placed += arrived
                sizes.extend(direct.keep(self.worker, arrived, f"distmm-run-{run.run_id}").values())
                if len(values) > _SLICE:
                    await asyncio.sleep(0)
            if values:
                placed.append((array, np.array(every, np.int64).tobytes(), np.array(sizes, np.int64).tobytes()))
        return placed

    async def _in_engine(self, rests: bool, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the engine's thread, which raises `_FailedError`; rest the event loop if `rests`."""
        work = functools.partial(_in_thread, self.address, function, *args)
        future = asyncio.get_running_loop().run_in_executor(self.engine_thread, work)
        while rests and not future.done():
            time.sleep(_REST)
            await asyncio.sleep(0)
        try:
            return await future
        finally:
            del future  # else an error and this frame would keep each other

    async def _tell_progress(self, run: WorkerRun, epoch: str) -> None:
        """Report this worker's progress to the scheduler periodically."""
        reported, names = (0.0, 0, 0, 0), ("share", "received_bytes", "turns", "turns_in_all")
        while True:
            await asyncio.sleep(_TELL)
            turns = run.job.turns if run.job.rank == 0 else (0, 0)
            now = float(run.figures.get("done", 0.0)), int(run.job.received_bytes), *turns
            if now != reported:
                message = {"op": "distmm_hear_progress", "run_id": run.run_id}
                message |= zip(names, now, strict=True)
                self.worker.batched_send(message | {"epoch": epoch})
                reported = now

    async def release(self, group: int, engine: str, grace: Seconds) -> Reply:
        """Free the memory that a group keeps between runs; the scheduler asks all ranks at the same time."""
        self._groups.discard((group, engine))
        if not self._closed:
            await asyncio.get_running_loop().run_in_executor(self.engine_thread, _release, group, engine, grace)
        return Reply("OK")

    def abandon(self, group: int, engine: str) -> None:
        """Drop a group of which a rank was lost; not collective."""
        self._groups.discard((group, engine))

        def forget() -> None:
            try:
                get_engine(engine).abandon(group)
            except Exception:
                log.warning("group %d of engine %r was not forgotten", group, engine, exc_info=True)

        with contextlib.suppress(RuntimeError):  # this worker is closing
            self.engine_thread.submit(forget)

    async def abort(self, run_id: int, reason: str) -> Reply:
        """End a run here that has not succeeded; the answer is this worker's history of it."""
        self.end(run_id, reason)
        return Reply("OK", self.history.brief(run_id))

    def end(self, run_id: int, reason: str) -> None:
        """End a run here that has not succeeded; may be repeated."""
        if run_id in self.runs and (figures := self.runs[run_id].figures):
            self.history.note(run_id, f"was told to end, {figures['done']:.0%} done")
        self._drop(run_id, reason)
        self.replicas.drop(run_id=run_id)

    def _drop(self, run_id: int, reason: str) -> None:
        self._over.append(run_id)
        if (run := self.runs.pop(run_id, None)) is None:
            return
        run.end(error := EngineError(f"run {run_id} was ended: {reason}"))
        run.job.abort(error)
        # Its chunks of D go, but for those that a later run has made again.
        later = {key for number, later_run in self.runs.items() if number > run_id for key in later_run.placed}
        if keys := [key for key in run.placed if key not in later]:
            direct.let_go(self.worker, keys, run_id)

    def finish(self, run_id: int) -> None:
        """Free the buffers of a run that all ranks have done; the chunks of D stay."""
        self._over.append(run_id)
        if (run := self.runs.pop(run_id, None)) is not None:
            run.end(ProtocolError(f"run {run_id} is over"))

    def release_operands(self, run_id: int) -> None:
        """Release the chunks of operands that may be freed: all ranks have read them."""
        if run_id in self.runs:
            run = self.runs[run_id]
            run.job.forget(run.plan.problem.donated)

    def release_replica(self, name: str, run_id: int) -> None:
        """Release the replicas that a run has left of an array: nobody wants them any more."""
        self.replicas.drop(name, run_id)

    def worker_lost(self, run_id: int, address: str) -> None:
        """Continue a run without a lost participant."""
        if run_id in self.runs:
            run = self.runs[run_id]
            self.history.note(run_id, f"was told that {address} is gone")
            for participant, worker in enumerate(run.plan.participants):
                if worker.address == address:
                    run.job.lose(participant)

    def dump_state(self, **kwargs: Any) -> dict[str, Any]:
        """Return Dask's own state of this worker, for ``Client.dump_cluster_state()``, with our history."""
        return {**self._dask_dump(**kwargs), NAME: self.history._to_dict()}

    # Called by other workers

    async def fetch(self, run_id: int, kind: str, boxes: bytes, place: str = "") -> Delivery:
        """Return parts of this worker's matrices to a peer of the same run; see `Comm.fetch`.

        `place` is the peer's `cross_memory.process_name`.
        """
        try:
            table = np.frombuffer(boxes, np.int64).reshape(-1, 6)
            if run_id not in self.runs:
                return Delivery("lost", f"run {run_id} is not live here")
            run = self.runs[run_id]
            plan, job = run.plan, run.job
            if kind == "replica":
                own = await self.replicas.serve(run, table)
                loan = cross_memory.lend(own, place)
                return Delivery("OK", loan=loan) if loan else Delivery("OK", data=[to_serialize(x) for x in own])
            plan.check_boxes(kind, table)
            available = job.available(kind, table)
            if not available.done():
                # Shielded: a peer that cancels its request must not cancel the future, for which others wait too.
                await asyncio.shield(asyncio.wrap_future(available))
            available.result()
            on_gpus = ENGINES[plan.engine].on_gpus
            data = await asyncio.to_thread(job.serve, kind, table) if on_gpus else job.serve(kind, table)
            if job.lends and (loan := cross_memory.lend(data, place)):
                return Delivery("OK", loan=loan)
            # A thread takes longer than to copy so little.
            few = not on_gpus and sum(x.nbytes for x in data) < cross_memory.LEAST_BYTES
            data, shapes = _as_sent(data) if few else await asyncio.to_thread(_as_sent, data)
            return Delivery("OK", data=[to_serialize(x) for x in data], shapes=shapes)
        except (ProtocolError, TypeError, ValueError, KeyError) as error:
            return Delivery("refused", repr(error))
        except Exception as error:
            return _failure(Delivery, error, self._closed)

    def close(self) -> None:
        """End all runs and the engine thread."""
        with self._changing:
            self._closed = True
            for run_id in list(self.runs):
                self._drop(run_id, "the worker is closing")
        self.replicas.drop()
        self.engine_thread.shutdown(wait=False, cancel_futures=True)
        if self._dask_dump:
            self.worker.handlers["dump_state"] = self._dask_dump
        # All other handlers stay: messages that the scheduler has sent before it knew may still arrive. A worker that
        # does not know them is taken for one without this package.


def _as_sent(arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[tuple[int, ...]]]:
    """Return arrays without gaps; many small ones of one type as one vector, with their shapes."""
    small = len(arrays) > 1 and sum(x.nbytes for x in arrays) < _FLAT_BYTES * len(arrays)
    if not small or any(type(x) is not np.ndarray or x.dtype != arrays[0].dtype for x in arrays):
        return contiguous(arrays), ()
    return [np.concatenate([x.ravel() for x in arrays])], [x.shape for x in arrays]


def _device_limit(data: Any) -> float:
    """Return the bytes of a GPU's memory that a worker may use: what it was started with, by where it keeps results.

    dask-cuda moves results from the GPU to the host above its ``device_memory_limit``, by default 0.8 of the memory.
    """
    limit = getattr(getattr(getattr(data, "device_buffer", None), "fast", None), "n", None)
    return limit / _SPILLED_FROM if isinstance(limit, int | float) and limit > 0 else math.inf


def _process_facts(data: Any) -> Description:
    """Return the facts about this process that planning needs. Imports all engines, which may take seconds."""
    engines, memory, links = {}, {}, {}
    for name in ENGINES:
        try:
            engine = get_engine(name)
            engines[name] = dict(engine.versions())
            memory[name] = int(min(engine.memory(), _device_limit(data)))
            device, reach = engine.links()
            links[name] = [device, list(reach)]
        except EngineError as error:
            engines[name] = {"error": str(error)}
    # An engine for GPUs has imported CuPy, whose types need help to travel.
    register_serializers()
    return Description("OK", version=__version__, engines=engines, memory=memory, links=links, host=platform.node())


def _trim() -> None:
    gc.collect()
    heap.trim()


def _release(group: int, engine: str, grace: float) -> None:
    dog = watchdog(max(_LEAST_GRACE, grace), f"freeing group {group} of engine {engine}")
    try:
        get_engine(engine).release(group)
    finally:
        dog.cancel()


def _execute(job: Job[Any], offers: Any) -> Mapping[ResultKey, Any]:
    job.accept(offers)
    return job.execute()


class _FailedError(Exception):
    """An error raised in a thread, as the fields of a reply. The error itself stays in its thread.

    A future of asyncio can't take every error of a user's, and what pickling runs is the user's too.
    """

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        super().__init__(fields["message"])
        self.name, self.fields = name, fields


def _in_thread(address: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function; convert its errors to `_FailedError`."""
    try:
        return function(*args)
    except BaseException as error:
        failed = type(error).__name__, _fields(error, address)
        _let_go(error)
    # Not in the block above: as its context the error would keep all that it has met.
    raise _FailedError(*failed)


def _failure(kind: type[A], error: BaseException, closed: bool) -> A:
    """Return an error as a reply; a worker that closes says only that."""
    if closed:
        reply = kind("lost", "it is closing")
    else:
        reply = kind(**(error.fields if isinstance(error, _FailedError) else _fields(error)))
    _let_go(error)
    return reply


def _let_go(error: BaseException | None) -> None:
    """Clear the tracebacks of an error: their frames would keep the run alive."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _fields(error: BaseException, address: str = "") -> dict[str, Any]:
    """Return the fields of a reply for an error that is being handled; only one of the transport is a lost worker."""
    if (user := raised_by_user(error)) is not None:
        status, what, within = user
        return {"status": status, **_user_fields(error.with_traceback(within), f"{what} on {address}")}
    if isinstance(error, PeerLostError):
        return {"status": "lost", "message": in_words(error)}
    if isinstance(error, MatrixError | ProtocolError):
        return {"status": "matrix" if isinstance(error, MatrixError) else "refused", "message": brief(str(error))}
    lines = [] if isinstance(error, DistMMError) else traceback.format_exception(error)[-6:]
    return {"status": "failed", "message": in_words(error), "traceback": "".join(map(brief, lines))}


def _user_fields(error: BaseException, what: str) -> dict[str, Any]:
    """Return a reply's fields for a user's error being handled: what Dask would send, and its traceback."""
    text = f"{what}: {in_words(error)}"
    plain = EngineError(text).with_traceback(error.__traceback__)
    with contextlib.suppress(Exception):  # its class may not let it
        error.add_note(what)
    # One that would end a process ends only what it was raised in; the other where that can't be pickled at all.
    for sent in (error, plain) if isinstance(error, Exception) else (plain,):
        with contextlib.suppress(BaseException):
            message = error_message(sent)
            break
    pickles = message["exception"].data, message["traceback"].data if message["traceback"] is not None else b""
    texts = brief(message["traceback_text"], _LONG), brief(message["exception_text"], _LONG)
    fields = "error", "error_traceback", "traceback", "error_text"
    return {"message": brief(text), **dict(zip(fields, (*pickles, *texts), strict=True))}


# The worker's plugin


# The topic of Dask's events under which a worker says that it lacks this package.
MISSING = f"{NAME}-missing"


def attach(worker: Worker) -> None:
    """Attach a `WorkerService` to a worker, once; report an unsupported version of distributed on request."""
    if missing := compat.missing_on_worker(worker):
        _say_unfit(worker, compat.unsupported("on this worker", missing))
    elif NAME not in worker.extensions:
        worker.extensions[NAME] = WorkerService(worker)


def _say_unfit(worker: Worker, reason: str) -> None:
    """Answer the scheduler that this worker has no engine. Nothing is raised: the worker would not start."""

    async def describe() -> Description:
        return Description("OK", engines={name: {"error": reason} for name in ENGINES})

    log.warning("%s", reason)
    if hasattr(worker, "handlers"):
        worker.handlers.update(answering(describe))
    elif hasattr(worker, "log_event"):
        worker.log_event(MISSING, {"worker": worker.address, "reason": reason})


def worker_plugin() -> WorkerPlugin:
    """Return the worker's plugin, which workers without this package can load, too.

    Such a worker says so, under the topic `MISSING`. With a plugin that it can't load it would not start.
    """
    key, topic = NAME, MISSING

    # Of a local class pickles have all, and not the name of the module that has it.
    class Installer(WorkerPlugin):  # type: ignore[misc]
        name = key
        idempotent = True

        def setup(self, worker: Worker) -> None:
            try:
                from dask_distmm.runtime.worker import attach
            except ImportError as error:
                worker.log_event(topic, {"worker": worker.address, "reason": str(error)})
            else:
                attach(worker)

        def teardown(self, worker: Worker) -> None:
            # A plugin that is only replaced keeps its service.
            if worker.status.name in ("closing", "closing_gracefully", "closed", "failed"):
                side = getattr(worker, "extensions", {}).pop(key, None)
                if side is not None:
                    side.close()

    return Installer()


def for_any_worker() -> bytes:
    """Return `worker_plugin`, pickled as it is sent."""
    pickled: bytes = cloudpickle.dumps(worker_plugin())
    return pickled
