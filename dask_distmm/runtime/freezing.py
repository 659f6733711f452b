"""Freezes a run: the workers that can take part, which chunks lie where, and the plan that is made of both.

Barriers: the tasks that wait for one, and the multiply that makes their chunks.

Which groups of workers share something costly between runs (a communicator, mappings), and when it goes. Pure.

Only the scheduler decides: workers make a group when a plan names one that they don't have yet, and free it
when they are told. So all ranks of a group always agree on whether it is there.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from distributed.metrics import time
from numpy.typing import NDArray

from dask_distmm._version import __version__
from dask_distmm.compat import install_command
from dask_distmm.engines.base import log
from dask_distmm.errors import (
    EngineError,
    MissingEngineError,
    NoWorkersError,
    PlanError,
    ProjectedMemoryError,
    ProtocolError,
)
from dask_distmm.planning import (
    ENGINES,
    Computation,
    Demand,
    Placement,
    Plan,
    Problem,
    Worker,
    plan,
    plan_computation,
    problem_from_wire,
)
from dask_distmm.planning.computation import islands
from dask_distmm.planning.cuts import by_holder, reorder
from dask_distmm.planning.placement import Where
from dask_distmm.planning.region import RegionProblem
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import pack_tasks
from dask_distmm.runtime.keys import ChunkTask, operand_keys, part_of
from dask_distmm.runtime.messages import Description, ask, post
from dask_distmm.runtime.replicas import Replicas
from dask_distmm.runtime.run import Lost, Run, raise_if_ended
from dask_distmm.runtime.worker import WorkerService

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState


# The workers that can take part in a run, and their descriptions


T = TypeVar("T")

# A worker that does not describe itself within this time (seconds) is left out.
_DESCRIBE_TIMEOUT = 30.0
# How often the scheduler looks whether a run fits, and whether there are workers that may multiply (seconds).
_LOOK = 0.2
# Seconds between two requests that workers hand unused memory back, those within which they are to do so, and those
# after the request within which the scheduler is to know.
_TRIMMED, _TRIM_TIMEOUT, _TOLD = 10.0, 5.0, 3.0
# Memory that a process holds is told in steps of this many bytes, at least this many of them a worker's memory: a plan
# serves as long as no step changes.
_STEP, _STEPS = 2**26, 32
# Of a worker that has not described itself: it may hold chunks all the same.
_UNKNOWN = Description("OK")
# An error names this many workers.
_LISTED = 8


class Roster:
    """The workers of a cluster and their descriptions, requested once from each."""

    def __init__(self, scheduler: Scheduler, epoch: str = "") -> None:
        self._scheduler, self._epoch = scheduler, epoch
        self._described: dict[str, Description] = {}
        # When a worker was last left out as it was paused; when workers were last told to hand memory back.
        self._paused = self._trimmed = 0.0
        # Workers that have said that they lack this package, and why.
        self.bare: dict[str, str] = {}

    def __contains__(self, address: str) -> bool:
        """Whether a worker has reported that it has dask_distmm: others may not understand its messages."""
        return address in self._described

    def forget(self, address: str) -> None:
        """Forget a worker that has left, or an earlier one of the same address."""
        self._described.pop(address, None)

    def clear(self) -> None:
        """Forget all workers."""
        self._described.clear()

    async def choose(
        self, demand: Demand, allowed: tuple[set[str], str] | None = None
    ) -> tuple[tuple[str, ...], list[Worker]]:
        """Return the engines that can multiply, and the workers that can take part, in the scheduler's order.

        `allowed` are the workers on which the user lets a result lie, and how that was asked for.
        """
        engine, array, dtypes, wanted = demand.engine, demand.array, demand.dtypes, demand.workers
        running = {address: ws for address, ws in self._scheduler.workers.items() if ws.status.name == "running"}
        if any(ws.status.name == "paused" for ws in self._scheduler.workers.values()):
            self._paused = time()
        if isinstance(wanted, tuple):
            if missing := [address for address in wanted if address not in self._scheduler.workers]:
                raise PlanError(f"workers={missing[0]!r} is not in the cluster; it has {_listed(running)}")
            if paused := [address for address in wanted if address not in running]:
                status = self._scheduler.workers[paused[0]].status.name
                raise NoWorkersError(f"workers={paused[0]!r} was asked for, and that worker is {status}")
            running = {address: running[address] for address in wanted}
        if allowed is not None:
            (places, request), there = allowed, running
            running = {a: ws for a, ws in there.items() if a in places}
            if there and not running:
                raise NoWorkersError(
                    f"{request} was asked for (dask.annotate, or client.compute(workers=)), and no such worker "
                    f"is running; the cluster has {_listed(there)}"
                )
        silent = await self.describe([address for address in running if address not in self._described])
        # Meanwhile workers may have died: they are not workers without an engine.
        running = {
            address: ws
            for address, ws in running.items()
            if address not in silent and self._scheduler.workers.get(address) is ws
        }
        self._check_versions(demand.version, running)
        offered = [name for name in ENGINES if engine in (name, "auto")]
        fitting = [
            name for name in offered if ENGINES[name].takes(array, dtypes) and demand.kind in ENGINES[name].computes
        ]
        able: dict[str, list[WorkerState]] = {}
        for name in fitting:
            equipped = [ws for address, ws in running.items() if self._has_engine(address, name)]
            able[name] = equipped[:wanted] if isinstance(wanted, int) else equipped
        reasons = {name: self._unfit(name, workers_of, demand) for name, workers_of in able.items()}
        fit = [name for name, reason in reasons.items() if reason is None]
        # GPUs where there are some; the engine that most workers have.
        chosen = max(
            [name for name in fit if ENGINES[name].on_gpus] or fit, key=lambda name: len(able[name]), default=None
        )
        if chosen is None:
            if unfit := [reason for reason in reasons.values() if reason]:
                raise EngineError(unfit[0])
            if not running:
                raise NoWorkersError("the cluster has no running worker: start some, or wait until they are there")
            raise MissingEngineError(self._why_none(fitting, demand, list(running)))
        if isinstance(wanted, int) and wanted > len(able[chosen]):
            raise PlanError(
                f"workers={wanted}, but the cluster has {len(able[chosen])}; ask for no more, or wait until there are"
            )
        on_gpus = ENGINES[chosen].on_gpus
        engines = tuple(name for name in fit if able[name] == able[chosen] and ENGINES[name].on_gpus == on_gpus)
        workers = [self.worker(ws, chosen) for ws in able[chosen]]
        addresses = [worker.address for worker in workers]
        for name in engines:
            self._check_libraries(name, addresses)
            joined = demand.kind == "product" and ENGINES[name].reads_peers and len({*islands(tuple(workers))}) > 1
            if joined:
                self._check_libraries("nccl", addresses)
            if (joined or ENGINES[name].collective) and not demand.plaintext_nccl:
                self._check_encryption(name, addresses)
        return engines, workers

    async def until_it_fits(self, plan: Callable[[], Awaitable[T]], limit: float) -> T:
        """Return the outcome of `plan`, called again while it does not fit and workers are left out as they are paused.

        One that reads chunks back from disk is paused for a moment. What processes hold anyway may be garbage.
        """
        deadline = time() + limit
        while True:
            begun = time()
            try:
                return await plan()
            except ProjectedMemoryError as error:
                # By itself: what processes hold anyway is not in it.
                fits = error.projected and all(size <= error.limit.get(a, 0) for a, size in error.projected.items())
                if fits and begun - self._trimmed > _TRIMMED:
                    self._trimmed = begun
                    await self._trim()
                # What they hold then comes with a heartbeat.
                awaited = fits and begun - self._trimmed < _TOLD
                if not awaited and (self._paused < begun or begun > deadline):
                    raise
            await asyncio.sleep(_LOOK)

    async def _trim(self) -> None:
        """Ask workers to hand memory that they do not use back to the system."""
        requests = (ask(self._scheduler.rpc(address), WorkerService.trim, self._epoch) for address in self._described)
        waits = (asyncio.wait_for(request, _TRIM_TIMEOUT) for request in requests)
        await asyncio.gather(*waits, return_exceptions=True)

    def _unfit(self, engine: str, able: Sequence[WorkerState], demand: Demand) -> str | None:
        """Return None if an engine can run on workers that have it; else why not, empty where there are none."""
        if not able:
            return ""
        # One that first brings all chunks to where they can be read is not chosen by itself: `cublasmp` multiplies
        # meanwhile.
        joined = demand.engine == engine and all(self._has_engine(ws.address, "nccl") for ws in able)
        workers = [self.worker(ws, engine) for ws in able]
        if not (reason := ENGINES[engine].unfit(workers, demand.kind, joined=joined)):
            return None
        usable = [x.name for x in ENGINES.values() if x.on_gpus and x.collective and demand.kind in x.computes]
        return (
            f"engine {engine!r} is for GPUs of one host that can read each other's memory"
            f"{', or products of GPUs that all have NCCL' * (demand.kind == 'product')}: {reason}. Use "
            f"{' or '.join(f'engine={name!r}' for name in usable)}, or name workers that can with workers="
        )

    def worker(self, ws: WorkerState, engine: str) -> Worker:
        """Return a worker as planning sees it, with the memory that an engine works in."""
        described = self._described.get(ws.address, _UNKNOWN)
        host_limit, used = int(ws.memory_limit or 0), 0
        memory = described.memory.get(engine)
        if not memory:
            host_limit, memory = 0, int(ws.memory_limit or 0)
            step = max(1, min(_STEP, memory // _STEPS))
            used = -(-int(ws.memory.unmanaged_old) // step) * step
        links = described.links
        # Engines also read the memory of workers that only hand out chunks.
        candidates = [links[engine]] if engine in links else list(links.values())
        device, reach = next((tuple(link) for link in candidates if link[0]), ("", ()))
        return Worker(ws.address, ws.nthreads, memory, described.host, device, tuple(reach), used, host_limit)

    def _check_versions(self, client: str, addresses: Iterable[str]) -> None:
        """Refuse clients and workers that have imported another version of this package than this scheduler."""
        versions = {"client": client, "scheduler": __version__}
        # A worker to which nothing can be attached says so, without a version.
        versions |= {
            address: said.version for address in addresses if (said := self._described.get(address, _UNKNOWN)).version
        }
        if differing := _differing(versions):
            raise EngineError(
                f"client, scheduler and workers have different versions of dask_distmm: {differing}. Install the same "
                f"on all of them, and start them again: {install_command(elsewhere=True)}"
            )

    def _check_libraries(self, engine: str, addresses: Iterable[str]) -> None:
        """Refuse workers that differ in the versions of an engine's libraries."""
        libraries = {address: sorted(self._described[address].engines[engine].items()) for address in addresses}
        if differing := _differing(
            {address: ", ".join(f"{n} {v}" for n, v in names) for address, names in libraries.items()}
        ):
            gpus = f"{install_command('cu13', elsewhere=True)} (cu12 for CUDA 12)"
            raise EngineError(
                f"workers have different versions of the libraries of engine {engine!r}: {differing}. Install the same "
                f"on all: {gpus if ENGINES[engine].on_gpus else install_command(elsewhere=True)}"
            )

    def _check_encryption(self, engine: str, addresses: Sequence[str]) -> None:
        """Refuse to leave a host without encryption where the cluster requires it."""
        hosts = sorted({self._described[address].host for address in addresses})
        if self._scheduler.security.require_encryption and len(hosts) > 1:
            raise EngineError(
                f"this cluster requires encryption, and engine {engine!r} would send matrices between the hosts "
                f"{' and '.join(hosts)} by NCCL, which is not encrypted. Take workers of one host (workers=[...]), or "
                "allow it where the network is trusted: config distmm.allow-plaintext-nccl: true"
            )

    def _why_none(self, fitting: Sequence[str], demand: Demand, addresses: Sequence[str]) -> str:
        """Return the reason why no worker can take part."""
        if not fitting:
            kinds = demand.array, demand.dtypes
            types = " and ".join(dict.fromkeys(demand.dtypes))
            verb = "multiply" if demand.kind == "product" else "factorize"
            what = f"{verb} {demand.array} arrays of {types}"
            able = [name for name, engine in ENGINES.items() if engine.takes(*kinds) and demand.kind in engine.computes]
            if demand.engine != "auto" and able:
                return f"engine {demand.engine!r} can't {what}; use engine={' or '.join(map(repr, able))}"
            return f"no engine can {what}; convert them, for example by astype('float64')"
        for address in addresses:
            engines = self._described.get(address, _UNKNOWN).engines
            for engine in fitting:
                if engine in engines:
                    gpus = f"{install_command('cu13', elsewhere=True)} (cu12 for CUDA 12) on workers with a GPU each"
                    more = f". For GPUs: {gpus}" if ENGINES[engine].on_gpus else ""
                    return f"no worker has engine {engine!r}; {address} says: {engines[engine].get('error')}{more}"
        report = next(((address, self.bare[address]) for address in addresses if address in self.bare), None)
        return (
            f"none of {len(addresses)} workers has dask_distmm; install it there, and start them again: "
            f"{install_command(elsewhere=True)}{f' ({report[0]} says: {report[1]})' if report else ''}"
        )

    async def describe(self, addresses: Sequence[str]) -> set[str]:
        """Ask workers to describe themselves; return those that can't be reached, or do not answer in time."""
        silent: set[str] = set()

        async def ask_one(address: str) -> None:
            try:
                request = ask(self._scheduler.rpc(address), WorkerService.describe, "")
                answer = await asyncio.wait_for(request, _DESCRIBE_TIMEOUT)
            except (OSError, TimeoutError):
                silent.add(address)
                return
            except ProtocolError:
                return
            if answer is not None and address in self._scheduler.workers:
                self._described[address] = answer
                # A worker to which nothing of ours is attached does not know the message.
                if answer.version:
                    self._scheduler.worker_send(address, post(WorkerService.begin, "", self._epoch))

        await asyncio.gather(*map(ask_one, addresses))
        return silent

    def _has_engine(self, address: str, engine: str) -> bool:
        engines = self._described.get(address, _UNKNOWN).engines
        return engine in engines and "error" not in engines[engine]


def _differing(versions: Mapping[str, str]) -> str:
    """Return the owners of each version as text; empty if all have the same."""
    owners: dict[str, list[str]] = {}
    for owner, version in versions.items():
        owners.setdefault(version, []).append(owner)
    return "; ".join(f"{version} on {_listed(names)}" for version, names in owners.items()) if len(owners) > 1 else ""


def _listed(addresses: Iterable[str]) -> str:
    """Return some addresses as text, and the number of the others."""
    ordered = sorted(addresses)
    more = [f"{len(ordered) - _LISTED} more"] if len(ordered) > _LISTED else []
    return ", ".join(ordered[:_LISTED] + more) or "none that is running"


# Barriers: the tasks that wait for one, and the multiply that makes their chunks


# Number of tasks that are looked up before others get the event loop again.
_LOOKED_UP = 5000


async def with_breaks(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items; sleep regularly so that the event loop serves others."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _LOOKED_UP == 0:
            await asyncio.sleep(0)


class Barrier:
    """A barrier that is parked or on its way there."""

    def __init__(self, ts: TaskState) -> None:
        self.ts, self.key = ts, ts.key
        wire, keys = operand_keys(ts.run_spec)
        self.problem: Computation = problem_from_wire(wire)
        self.keys = dict(zip(self.problem.inputs, keys, strict=True))
        self.losses = self.moves = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def parked(self) -> bool:
        """Whether all inputs of the barrier are in memory."""
        return bool(self.ts.state == "no-worker")

    @property
    def over(self) -> bool:
        """Whether no task waits for the barrier any more, or it has failed."""
        return self.ts.state in ("released", "forgotten", "erred")

    async def wanted(self) -> dict[Any, tuple[str, int]]:
        """Return the tasks that wait for the barrier by key: which output's they are, and their chunks' numbers.

        Others get the event loop in between.
        """
        wanted: dict[Any, tuple[str, int]] = {}
        outputs = {output.name: (output, output.every.tolist()) for output in self.problem.outputs}
        async for ts in with_breaks(list(self.ts.waiters or ())):
            if isinstance(task := ts.run_spec, ChunkTask) and task.output in outputs:
                output, numbers = outputs[task.output]
                # The key has the place in its array.
                if task.index < len(numbers) and ts.key[1:] == output.place(numbers[task.index]):
                    wanted[ts.key] = task.output, numbers[task.index]
                    continue
            raise ProtocolError(f"task {ts.key!r} depends on {self.key!r}, and is not a chunk of its result")
        return wanted

    def part(self, wanted: Mapping[Any, tuple[str, int]]) -> tuple[Computation, dict[str, list[Any]]]:
        """Return the computation that makes the wanted chunks, and the keys of its operands' chunks."""
        # Only products and regions can be made in part.
        if isinstance(self.problem, RegionProblem):
            if len({*wanted.values()}) == sum(output.count for output in self.problem.outputs):
                return self.problem, dict(self.keys)
            part, *kept = self.problem.part({*wanted.values()})
            return part, {name: [self.keys[name][x] for x in some] for name, some in zip(self.keys, kept, strict=True)}
        numbers = {number for _, number in wanted.values()}
        if isinstance(self.problem, Problem) and len(numbers) < self.problem.d.count:
            return part_of(self.problem, self.keys, numbers)
        return self.problem.making({output for output, _ in wanted.values()}), dict(self.keys)


def deliveries(problem: Computation, wanted: Mapping[Any, tuple[str, int]]) -> list[tuple[str, str, bytes]]:
    """Return for each array with waiting chunks its output, its name, and the numbers of unwanted chunks (int64)."""
    arrays: dict[tuple[str, str], list[int]] = {}
    for (array, *_), (output, number) in wanted.items():
        arrays.setdefault((output, array), []).append(number)
    delivered = []
    for (output, array), numbers in arrays.items():
        every = problem.output(output).every
        missing = np.setdiff1d(every, np.array(numbers, np.int64)) if len(numbers) < len(every) else every[:0]
        delivered.append((output, array, missing.tobytes()))
    return delivered


# Which groups of workers share something costly between runs (a communicator, mappings), and when it goes. Pure


class RankGroup(NamedTuple):
    """A group of ranks, or for an engine whose ranks map others' memory of all who take part."""

    # Its number; never used again.
    number: int
    # Name of the engine that it belongs to.
    engine: str
    # Their addresses, those of ranks that have a communicator in their order; whether they have one.
    workers: tuple[str, ...]
    meets: bool


class RankGroups:
    """All groups of a cluster, the least recently used first."""

    def __init__(self) -> None:
        self._groups: collections.OrderedDict[tuple[str, tuple[str, ...]], RankGroup] = collections.OrderedDict()
        self._kept: dict[int, int] = {}
        self._newest = 0

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    def orders(self, engines: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the workers of each group that has a communicator, of some engines."""
        return [group.workers for group in self._groups.values() if group.engine in engines and group.meets]

    def use(self, engine: str, workers: tuple[str, ...], *, meets: bool) -> RankGroup:
        """Return the group of these workers, a new one if there is none; `meets`: they have a communicator."""
        # The order of ranks is part of a communicator, and of nothing else that engines keep.
        key = engine, workers if meets else tuple(sorted(workers))
        if key not in self._groups:
            self._newest += 1
            self._groups[key] = RankGroup(self._newest, engine, key[1], meets)
        self._groups.move_to_end(key)
        return self._groups[key]

    def keeps(self, number: int, size: int) -> None:
        """Record the bytes that each rank of a group keeps for its next run."""
        self._kept[number] = size

    def surplus(self, most: int, most_bytes: int | None = None) -> list[RankGroup]:
        """Remove and return the least recently used groups until no limit is exceeded."""
        surplus = [self._groups.popitem(last=False)[1] for _ in range(len(self._groups) - most)]
        while most_bytes is not None and len(self._groups) > 1:
            total: collections.Counter[str] = collections.Counter()
            for group in self._groups.values():
                total.update(dict.fromkeys(group.workers, self._kept.get(group.number, 0)))
            over = {address for address, size in total.items() if size > most_bytes}
            *older, _ = self._groups.items()
            oldest = next((key for key, g in older if self._kept.get(g.number) and over.intersection(g.workers)), None)
            if oldest is None:
                break
            surplus.append(self._groups.pop(oldest))
        self._kept = {group.number: self._kept.get(group.number, 0) for group in self._groups.values()}
        return surplus

    def drop(self, number: int) -> RankGroup | None:
        """Remove and return a group, if it exists."""
        for key, group in self._groups.items():
            if group.number == number:
                return self._groups.pop(key)
        return None

    def lose(self, address: str) -> list[RankGroup]:
        """Remove and return the groups of a lost worker."""
        gone = [key for key in self._groups if address in key[1]]
        return [self._groups.pop(key) for key in gone]

    def clear(self) -> None:
        """Forget all."""
        self._groups.clear()


# Which workers hold which chunks, as plans need it


# How long chunks may take from workers without this package to others, and how often that is looked at (seconds).
_BRING_SECONDS = 60.0
_LOOK_AT_HOLDERS = 0.01


async def find_holders(
    scheduler: Scheduler, roster: Roster, workers: Sequence[Worker], keys: Sequence[Sequence[Any]]
) -> tuple[list[Worker], list[NDArray[np.int32]]]:
    """Return holders outside of the workers that can take part, and for each operand the holder of each chunk."""
    if roster.bare:
        addresses = [worker.address for worker in workers]
        await _bring(scheduler, roster, addresses, [key for operand in keys for key in operand])
    tables, outside = await _locate(scheduler, roster, workers, keys)
    if lost := [key for _, key in tables if key is not None]:
        raise Lost(f"chunk {lost[0]!r} is not in memory any more", moved=True)
    await roster.describe([address for address in outside if address not in roster])
    if gone := [address for address in outside if address not in scheduler.workers]:
        raise Lost(f"{gone[0]} left the cluster with chunks", moved=True)
    return [roster.worker(scheduler.workers[address], "") for address in outside], [table for table, _ in tables]


async def known_places(
    scheduler: Scheduler,
    roster: Roster,
    workers: Sequence[Worker],
    names: Sequence[str],
    counts: Sequence[Sequence[int]],
) -> tuple[list[Worker], list[bytes | None]]:
    """Return the holders of the chunks of some arrays; None for arrays that are incomplete."""
    keys: list[Iterable[Any]] = []
    for name, along in zip(names, counts, strict=True):
        # An array of more chunks than there are tasks is not there, which one of its keys shows.
        places: Iterable[Any] = ()
        if (count := math.prod(along)) > len(scheduler.tasks):
            places = [(-1,) * len(along)]
        elif count:
            places = itertools.product(*map(range, along))
        keys.append(map((name,).__add__, places))
    tables, outside = await _locate(scheduler, roster, workers, keys)
    held = ((address, scheduler.workers.get(address)) for address in outside)
    placed = [table.tobytes() if lost is None else None for table, lost in tables]
    return [Worker(address) if ws is None else roster.worker(ws, "") for address, ws in held], placed


async def _locate(
    scheduler: Scheduler, roster: Roster, workers: Sequence[Worker], arrays: Iterable[Iterable[Any]]
) -> tuple[list[tuple[NDArray[np.int32], Any]], list[str]]:
    """Return for each array the holder of each chunk, up to the first without one, and the key of that chunk or None.

    Then the addresses of those holders, in the order of their numbers, that are not among the workers.
    """
    number, count = {worker.address: index for index, worker in enumerate(workers)}, len(workers)
    tables = []
    for keys in arrays:
        where, lost = list[int](), None
        async for key in with_breaks(keys):
            ts = scheduler.tasks.get(key)
            holders = [ws.address for ws in ts.who_has or ()] if ts is not None else []
            if not holders:
                lost = key
                break
            holder = next((address for address in holders if number.get(address, count) < count), None)
            if holder is None:
                holder = next((address for address in holders if address in roster), holders[0])
            where.append(number.setdefault(holder, len(number)))
        tables.append((np.array(where, np.int32), lost))
    return tables, list(number)[count:]


async def _bring(scheduler: Scheduler, roster: Roster, ranks: Sequence[str], keys: Iterable[Any]) -> None:
    """Copy chunks to the ranks by Dask that only workers without this package have: those can't send them."""
    bare, tasks = roster.bare, scheduler.tasks

    def stranded(key: Any) -> bool:
        holders = {ws.address for ws in ts.who_has or ()} if (ts := tasks.get(key)) is not None else set()
        return bool(holders) and holders <= bare.keys()

    waiting = [key for key in dict.fromkeys(keys) if stranded(key)]
    for index, address in enumerate(ranks):
        if share := waiting[index :: len(ranks)]:
            direct.copy_to(scheduler, address, share, f"distmm-bring-{time()}")
    deadline = time() + _BRING_SECONDS
    while waiting := [key for key in waiting if stranded(key)]:
        if time() >= deadline:
            raise EngineError(
                f"workers that lack dask_distmm have {len(waiting)} chunks of this product, which others did not "
                f"get within {_BRING_SECONDS:g} s; install it on {', '.join(sorted(bare))} and start them "
                f"again, by {install_command(elsewhere=True)}"
            )
        await asyncio.sleep(_LOOK_AT_HOLDERS)


# Freezes a run: who takes part, which chunks lie where, and the plan that is made of both


# Up to this number of chunks, keys are assigned to their holders at once; those of more chunks in a thread.
_FEW = 1000
# The memory orders of this many arrays are remembered.
_ORDERS = 1000


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The roster, the placement of chunks and the plan of one run, as they were when it was frozen."""

    # The plan.
    plan: Placement
    # For each participant by address: for each operand the keys of its chunks there, in the order of their numbers.
    keys: dict[str, dict[str, list[Any]]]
    # The scheduler's state of each participant.
    states: dict[str, WorkerState]
    # The tasks that wait for the run, as `Barrier.wanted` returns them.
    wanted: dict[Any, tuple[str, int]]
    # For each rank by address the tasks by which it makes chunks itself, packed.
    sources: dict[str, bytes]

    @property
    def donated(self) -> list[Any]:
        """Keys of the chunks to free after all ranks have read them."""
        names = self.plan.problem.donated
        return [key for keys in self.keys.values() for name in names for key in keys.get(name, ())]

    @property
    def consumed(self) -> list[Any]:
        """Keys of the chunks to free after the run has begun."""
        problem = self.plan.problem
        if not (problem.accumulates_in_place and ENGINES[self.plan.engine].by_panels):
            return []
        return [key for keys in self.keys.values() for key in keys.get("partial", ())]


class RunPlanner:
    """Freezes runs. On the scheduler's event loop."""

    def __init__(self, scheduler: Scheduler, roster: Roster, groups: RankGroups, replicas: Replicas) -> None:
        self._scheduler, self._roster, self._groups, self._replicas = scheduler, roster, groups, replicas
        # Memory orders of arrays' chunks, where they are not as expected.
        self._orders: collections.OrderedDict[str, str] = collections.OrderedDict()

    def note_orders(self, barrier: Barrier, orders: Mapping[str, str]) -> None:
        """Remember in which memory orders chunks of A and B really lie, by operand."""
        for operand, order in orders.items():
            self._orders[_lasting_array_of(barrier, operand)] = order
        while len(self._orders) > _ORDERS:
            self._orders.popitem(last=False)

    async def freeze(self, run: Run, barrier: Barrier) -> RunPlan:
        """Choose the participants and the plan of a run."""

        async def frozen() -> RunPlan:
            raise_if_ended(run)
            return await self._freeze(run, barrier)

        return await self._roster.until_it_fits(frozen, barrier.problem.options.load_timeout)

    async def _freeze(self, run: Run, barrier: Barrier) -> RunPlan:
        wanted = await barrier.wanted()
        problem, keys = barrier.part(wanted)
        engines, workers = await self._workers(run, problem, wanted)
        made_there = problem.by_ranks
        read = [name for name in keys if name not in made_there]
        sources, tables = await find_holders(self._scheduler, self._roster, workers, [keys[name] for name in read])
        located = dict(zip(read, tables, strict=True))
        held: Where = {
            name: located[problem.source_of(name)] for name in problem.operands if problem.source_of(name) in located
        }
        plan: Placement
        if isinstance(problem, Problem):
            plan, keys, held = await self._plan_product(barrier, problem, (engines, workers, sources), keys, held)
        else:
            if not self._may_donate(barrier, problem, keys):
                problem = problem.keeping()
            plan = await asyncio.to_thread(plan_computation, problem, workers, held, engine=engines, sources=sources)
        # Workers that neither multiply nor hold a chunk have no part in it.
        needed = np.unique(np.concatenate([np.asarray(plan.ranks), np.arange(plan.replicas), *held.values()]))
        addresses = [plan.participants[index].address for index in needed.tolist()]
        run.participants = frozenset(addresses)
        if gone := run.participants - self._scheduler.workers.keys():
            raise Lost(f"{', '.join(sorted(gone))} left the cluster")
        # A communicator is that of ranks. Any participant may map another's memory: of one rank too.
        sharing = plan.workers if plan.meets else tuple(run.participants)
        if ENGINES[plan.engine].on_gpus and len(sharing) > 1:
            group = self._groups.use(plan.engine, sharing, meets=plan.meets)
            plan = dataclasses.replace(plan, group=group.number)
        run.independent = plan.independent
        states = {address: self._scheduler.workers[address] for address in addresses}
        tasks = {name: keys[problem.source_of(name)] for name in made_there}
        packed: dict[str, bytes] = {}
        if tasks:
            terms = barrier.ts.retries, _at_once(barrier.ts, map(states.__getitem__, plan.workers))
            packed = await asyncio.to_thread(pack_tasks, plan, tasks, *terms)
        few = sum(map(len, keys.values())) <= _FEW
        held_by = _by_address(plan, keys) if few else await asyncio.to_thread(_by_address, plan, keys)
        return RunPlan(plan, held_by, states, wanted, packed)

    async def _plan_product(
        self,
        barrier: Barrier,
        problem: Problem,
        roster: tuple[Sequence[str], Sequence[Worker], Sequence[Worker]],
        keys: dict[str, list[Any]],
        held: Where,
    ) -> tuple[Plan, dict[str, list[Any]], Where]:
        """Return the plan of a product, and the keys and holders of its operands' chunks in the plan's order."""
        engines, workers, sources = roster
        where, replica_runs = self._replicas.where(problem, workers, held)
        if not any(replica_runs) and (orders := by_holder(problem, where)):
            keys = {name: keys[problem.source_of(name)] for name in problem.operands}
            problem, before = reorder(problem, orders)
            keys = {name: [keys[name][number] for number in before[name].tolist()] for name in keys}
            where = {name: where[name][before[name]] for name in where}
            held = where
        expected = {name: "F" if problem[name].transposed else "C" for name in "ab"}
        order_a, order_b = (self._orders.get(_lasting_array_of(barrier, name), expected[name]) for name in "ab")
        chosen = await asyncio.to_thread(
            plan,
            problem,
            workers,
            where,
            sources=sources,
            engine=engines,
            orders=(order_a, order_b),
            groups=self._groups.orders(engines),
            replica_runs=replica_runs,
            thorough=False,
        )
        return chosen, keys, held

    def _may_donate(self, barrier: Barrier, problem: Computation, keys: Mapping[str, Sequence[Any]]) -> bool:
        """Whether nobody else needs the chunks of the operands that may be freed, and Dask could recompute them."""
        tasks = (self._scheduler.tasks.get(key) for name in problem.donated for key in keys[name])
        return all(
            ts is not None and ts.run_spec and not ts.who_wants and set(ts.waiters or ()) <= {barrier.ts}
            for ts in tasks
        )

    async def _workers(
        self, run: Run, problem: Computation, wanted: Iterable[Any]
    ) -> tuple[tuple[str, ...], list[Worker]]:
        """Wait for workers that can take part (`Roster.choose`): all may be paused, or starting again."""
        limits = {"distmm.timeouts.load": problem.options.load_timeout}
        if self._scheduler.no_workers_timeout is not None:
            limits["distributed.scheduler.no-workers-timeout"] = self._scheduler.no_workers_timeout
        name, limit = min(limits.items(), key=lambda entry: entry[1])
        deadline, reported = time() + limit, False
        while True:
            try:
                allowed = await self._allowed(wanted)
                return await self._roster.choose(problem.demand, allowed)
            except NoWorkersError as error:
                if time() > deadline:
                    raise NoWorkersError(f"{error}; waited for {limit:g} s (config {name})") from error
                if not reported:
                    log.warning("%s waits for workers, up to %g s (config %s): %s", problem.name, limit, name, error)
                    reported = True
            await asyncio.sleep(_LOOK)
            raise_if_ended(run)

    async def _allowed(self, wanted: Iterable[Any]) -> tuple[set[str], str] | None:
        """Return the workers to which the user restricts the wanted tasks, and the restrictions as text, or None."""
        allowed: set[str] | None = None
        requests: list[str] = []
        async for key in with_breaks(wanted):
            ts = self._scheduler.tasks.get(key)
            if ts is None or not (ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions):
                continue
            valid = self._scheduler.valid_workers(ts)
            if valid is not None and (valid or not ts.loose_restrictions):
                here = {ws.address for ws in valid}
                requests.append(_asked(ts))
                if allowed and here and not allowed & here:
                    raise PlanError(
                        f"one run makes all chunks, which are to lie on different workers: {requests[0]} was asked for "
                        f"some, {requests[-1]} for others; ask for the same workers for all of them"
                    )
                allowed = here if allowed is None else allowed & here
        return None if allowed is None else (allowed, " and ".join(dict.fromkeys(requests)))


def _asked(ts: TaskState) -> str:
    """Return the workers and resources that were asked for a task, as the user has written them."""
    workers = sorted({*(ts.worker_restrictions or ()), *(ts.host_restrictions or ())})
    parts = [f"workers={workers}"] if workers else []
    return ", ".join(parts + ([f"resources={ts.resource_restrictions}"] if ts.resource_restrictions else []))


def _at_once(ts: TaskState, workers: Iterable[WorkerState]) -> dict[str, int]:
    """Return how many tasks each worker may run at once by the annotation ``resources`` of a barrier, if it has one."""
    needed = (ts.annotations or {}).get("resources") or {}
    amounts = [(name, amount) for name, amount in needed.items() if amount > 0]
    if not amounts:
        return {}
    return {ws.address: max(1, min(int(ws.resources.get(name, 0) // x) for name, x in amounts)) for ws in workers}


def _lasting_array_of(barrier: Barrier, operand: str) -> str:
    """Return the name of the array of A or B; where it has none that lasts, one only for this multiply."""
    return barrier.problem[operand].array or f"{barrier.key}{operand}"


def _by_address(plan: Placement, keys: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return the keys of the chunks that each participant holds, by operand."""
    by_address: dict[str, dict[str, list[Any]]] = {}
    for operand, where in plan.where.items():
        if operand not in keys or (where < 0).any():
            continue
        order: NDArray[np.int64] = np.argsort(where, kind="stable")
        bounds = np.searchsorted(where[order], np.arange(len(plan.participants) + 1))
        for index, worker in enumerate(plan.participants):
            numbers = order[bounds[index] : bounds[index + 1]].tolist()
            if numbers:
                by_address.setdefault(worker.address, {})[operand] = [keys[operand][number] for number in numbers]
    return by_address
