"""The workers that can take part in a run, and their descriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from distributed.metrics import time

from dask_distmm.errors import (
    EngineError,
    MissingEngineError,
    NoWorkersError,
    PlanError,
    ProjectedMemoryError,
    ProtocolError,
)
from dask_distmm.installing import install_command
from dask_distmm.planning import ENGINES, Demand, Worker
from dask_distmm.runtime.messages import Description, ask, post
from dask_distmm.runtime.worker import WorkerService

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

T = TypeVar("T")

# A worker that does not describe itself within this time (seconds) is left out.
_DESCRIBE_TIMEOUT = 30.0
# How often it is looked whether a run fits (seconds).
_LOOK = 0.2
# Memory that a process holds is told in steps of this many bytes, at least this many of them a worker's memory: a plan
# serves as long as no step changes.
_STEP, _STEPS = 2**26, 32
# Of a worker that has not described itself: it may hold chunks all the same.
_UNKNOWN = Description("OK")
# An error names this many workers.
_LISTED = 8


class Roster:
    """The workers of a cluster and their descriptions, for which each is asked once."""

    def __init__(self, scheduler: Scheduler, epoch: str = "") -> None:
        self._scheduler, self._epoch = scheduler, epoch
        self._described: dict[str, Description] = {}
        # When a worker was last left out as it was paused.
        self._paused = 0.0
        # Workers that have said that they lack this package, and why.
        self.bare: dict[str, str] = {}

    def __contains__(self, address: str) -> bool:
        """Whether a worker is known to have dask_distmm: others may not understand its messages."""
        return address in self._described

    def forget(self, address: str) -> None:
        """Forget a worker that has left, or an earlier one of the same address."""
        self._described.pop(address, None)

    def clear(self) -> None:
        """Forget all workers."""
        self._described.clear()

    async def choose(
        self,
        demand: Demand,
        allowed: tuple[set[str], str] | None = None,
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
            (places, asked), there = allowed, running
            running = {a: ws for a, ws in there.items() if a in places}
            if there and not running:
                raise NoWorkersError(
                    f"{asked} was asked for (dask.annotate, or client.compute(workers=)), and no such worker "
                    f"is running; the cluster has {_listed(there)}"
                )
        silent = await self.describe([address for address in running if address not in self._described])
        # Meanwhile workers may have died: they are not workers without an engine.
        running = {
            address: ws
            for address, ws in running.items()
            if address not in silent and self._scheduler.workers.get(address) is ws
        }
        offered = [name for name in ENGINES if engine in (name, "auto")]
        fitting = [
            name for name in offered if ENGINES[name].takes(array, dtypes) and demand.kind in ENGINES[name].computes
        ]
        able: dict[str, list[WorkerState]] = {}
        for name in fitting:
            found = [ws for address, ws in running.items() if self._has_engine(address, name)]
            able[name] = found[:wanted] if isinstance(wanted, int) else found
        reasons = {name: self._unfit(name, found, demand.kind) for name, found in able.items()}
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
        for name in engines:
            self._check_versions(name, [ws.address for ws in able[chosen]])
            if ENGINES[name].collective and not demand.plaintext_nccl:
                self._check_encryption(name, [ws.address for ws in able[chosen]])
        return engines, [self.worker(ws, chosen) for ws in able[chosen]]

    async def until_it_fits(self, plan: Callable[[], Awaitable[T]], limit: float) -> T:
        """Return the outcome of `plan`, called again while it does not fit and workers are left out as they are paused.

        One that reads chunks back from disk is paused for a moment.
        """
        deadline = time() + limit
        while True:
            begun = time()
            try:
                return await plan()
            except ProjectedMemoryError:
                if self._paused < begun or begun > deadline:
                    raise
            await asyncio.sleep(_LOOK)

    def _unfit(self, engine: str, able: Sequence[WorkerState], kind: str) -> str | None:
        """Return None if an engine can run on workers that have it; else why not, empty where there are none."""
        if not able:
            return ""
        if not (reason := ENGINES[engine].unfit([self.worker(ws, engine) for ws in able], kind)):
            return None
        others = [one.name for one in ENGINES.values() if one.on_gpus and one.collective and kind in one.computes]
        return (
            f"engine {engine!r} is for GPUs of one host that can read each other's memory: {reason}. Use "
            f"{' or '.join(f'engine={name!r}' for name in others)}, or name workers that can with workers="
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
        found = [links[engine]] if engine in links else list(links.values())
        device, reach = next((tuple(link) for link in found if link[0]), ("", ()))
        return Worker(ws.address, ws.nthreads, memory, described.host, device, tuple(reach), used, host_limit)

    def _check_versions(self, engine: str, addresses: Sequence[str]) -> None:
        """Refuse workers that differ in the version of this package or of the engine's libraries."""
        described = {address: self._described[address] for address in addresses}
        libraries = {address: found.engines[engine].items() for address, found in described.items()}
        for what, texts in (
            ("dask_distmm", {address: found.version for address, found in described.items()}),
            (
                f"the libraries of engine {engine!r}",
                {address: ", ".join(f"{n} {v}" for n, v in sorted(found)) for address, found in libraries.items()},
            ),
        ):
            versions: dict[str, str] = {}
            for address, text in texts.items():
                versions.setdefault(text, address)
            if len(versions) > 1:
                listed = "; ".join(f"{version} on {address}" for version, address in versions.items())
                raise EngineError(
                    f"workers have different versions of {what}: {listed}. Install the same on all: "
                    f"{install_command('cu13', elsewhere=True)} (cu12 for CUDA 12, no brackets for CPUs)"
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
        """Say why no worker can do it."""
        if not fitting:
            asked = demand.array, demand.dtypes
            types = " and ".join(dict.fromkeys(demand.dtypes))
            verb = "multiply" if demand.kind == "product" else "factorize"
            what = f"{verb} {demand.array} arrays of {types}"
            others = [name for name, one in ENGINES.items() if one.takes(*asked) and demand.kind in one.computes]
            if demand.engine != "auto" and others:
                return f"engine {demand.engine!r} can't {what}; use engine={' or '.join(map(repr, others))}"
            return f"no engine can {what}; convert them, for example by astype('float64')"
        for address in addresses:
            engines = self._described.get(address, _UNKNOWN).engines
            for engine in fitting:
                if engine in engines:
                    gpus = f"{install_command('cu13', elsewhere=True)} (cu12 for CUDA 12) on workers with a GPU each"
                    more = f". For GPUs: {gpus}" if ENGINES[engine].on_gpus else ""
                    return f"no worker has engine {engine!r}; {address} says: {engines[engine].get('error')}{more}"
        told = next(((address, self.bare[address]) for address in addresses if address in self.bare), None)
        return (
            f"none of {len(addresses)} workers has dask_distmm; install it there, and start them again: "
            f"{install_command(elsewhere=True)}{f' ({told[0]} says: {told[1]})' if told else ''}"
        )

    async def describe(self, addresses: Sequence[str]) -> set[str]:
        """Ask workers to describe themselves; return those that can't be reached, or do not answer in time."""
        silent: set[str] = set()

        async def ask_one(address: str) -> None:
            try:
                asked = ask(self._scheduler.rpc(address), WorkerService.describe, "")
                answer = await asyncio.wait_for(asked, _DESCRIBE_TIMEOUT)
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


def _listed(addresses: Iterable[str]) -> str:
    """Return some addresses as a text, and how many more there are."""
    found = sorted(addresses)
    more = [f"{len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return ", ".join(found[:_LISTED] + more) or "none that is running"
