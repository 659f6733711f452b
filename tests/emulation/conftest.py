"""The GPU engines over the stand-ins, one thread a rank."""

from __future__ import annotations

import collections
import dataclasses
import gc
import importlib
import itertools
import sys
import threading
import weakref

import devices
import msgpack
import numpy as np
import pytest
import shared
from conformance import conformance
from factoring import planned, run_plan
from lapack_kernels import DeviceKernels, QueuedKernels

from dask_distmm.comms.cross_memory import BoardReader
from dask_distmm.config import read_options
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.planning import ENGINES, METHODS, Plan
from dask_distmm.planning import cuts as extents
from dask_distmm.programs import refine
from dask_distmm.programs.factorizations import Factorization


class Ranks:
    """The engine as the runner of jobs wants it: chunks become device arrays, each participant has its own engine."""

    name = "cublasmp"

    def __init__(self, module, host):
        self.module, self.host, self.engines, self.jobs = module, host, {}, []
        # As the scheduler numbers them: two groups of workers never have the same number.
        self.groups = collections.defaultdict(itertools.count(1).__next__)

    def job(self, side):
        engine = self.engines.get(side.me) or self.engines.setdefault(side.me, self.module.CublasMpEngine())
        plan = dataclasses.replace(side.plan, group=self.groups[side.plan.workers])
        chunks = {key: chunk if self.host else chunk.view(devices.ndarray) for key, chunk in side.chunks.items()}
        self.jobs.append(engine.job(dataclasses.replace(side, plan=plan, chunks=chunks)))
        return self.jobs[-1]

    def check_that_runs_are_freed(self):
        """Without the garbage collector: it does not know how much device memory waits for it."""
        gc.collect()
        gc.disable()
        try:
            for method in METHODS:
                conformance(self, method, 3)
                made = [weakref.ref(job) for job in self.jobs]
                for job in self.jobs:
                    job.comm.jobs = None  # the network in memory knows the jobs, and they know it
                    del job
                self.jobs.clear()
                assert made
                assert not [job for job in made if job() is not None]
        finally:
            gc.enable()


class NcclRanks(Ranks):
    """The engine of factorizations whose panels are broadcast, with LAPACK for kernels."""

    name = "nccl"

    def __init__(self, module, host, kernels):
        super().__init__(module, host)
        self.kernels = kernels

    def job(self, side):
        if side.me not in self.engines:
            self.engines[side.me] = self.module.NcclEngine()
            self.engines[side.me].solver = lambda: self.kernels
        return super().job(side)


class AsProcess:
    """A job as if its participant were a process of its own; what passes between them passes as messages do."""

    def __init__(self, job, memory, process):
        self.__dict__.update(job=job, memory=memory, process=process)

    def __getattr__(self, name):
        found = getattr(self.job, name)
        if name not in ("prepare", "execute", "serve"):
            return found

        def call(*args):
            with self.memory.as_process(self.process):
                return found(*args)

        return call

    def accept(self, offers):
        with self.memory.as_process(self.process):
            self.job.accept(msgpack.unpackb(msgpack.packb(offers)))


class PeerRanks(Ranks):
    """The engine that pulls: each participant stands for a process with device memory of its own."""

    name = "peer"

    def __init__(self, module, host, memory):
        super().__init__(module, host)
        self.memory, self.placed = memory, []
        # Whether A and B stay in host memory.
        self.from_host = False
        # Of those that are to offer nothing.
        self.silent = set()
        # Of how many hosts participants are.
        self.islands = 1

    def job(self, side):
        everyone = [
            dataclasses.replace(worker, host=f"host{at * self.islands // len(side.plan.participants)}")
            for at, worker in enumerate(side.plan.participants)
        ]
        plan = dataclasses.replace(side.plan, participants=tuple(everyone)) if self.islands > 1 else side.plan
        process = plan.participants[side.me].address
        with self.memory.as_process(process):
            engine = self.engines.setdefault(process, self.module.PeerEngine())
            plan = dataclasses.replace(plan, group=self.groups[plan.workers if plan.meets else ()])
            if isinstance(plan, Plan):
                plan = dataclasses.replace(plan, from_host=self.from_host)
            made = {key for key, chunk in side.chunks.items() if isinstance(chunk, SourceChunk)}
            chunks = {key: x if self.host or key in made else self.on_device(x) for key, x in side.chunks.items()}
            job = engine.job(dataclasses.replace(side, plan=plan, chunks=chunks))
        if process in self.silent:
            job.__class__ = type("Silent", (type(job),), {"prepare": _prepare_in_silence})
        self.jobs.append(job)
        return AsProcess(job, self.memory, process)

    def on_device(self, chunk):
        """Copy a chunk, and what it lies in, to this process' device memory."""
        base = chunk
        while isinstance(base.base, np.ndarray):
            base = base.base
        order = "F" if base.flags.f_contiguous and not base.flags.c_contiguous else "C"
        copy = self.memory.array(devices.ndarray, base.shape, base.dtype, order)
        copy[...] = base
        self.placed.append((base, copy))
        offset = chunk.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        flat = np.asarray(copy).reshape(-1, order="A").view(np.uint8)[offset:]
        return np.ndarray(chunk.shape, chunk.dtype, flat, strides=chunk.strides).view(devices.ndarray)

    def check_inputs(self):
        for base, copy in self.placed:
            assert base.tobytes() == np.asarray(copy).tobytes(), "inputs or what lies around them were changed"


def _prepare_in_silence(self):
    """As a worker whose memory can't be told: it has no GPU, or another host."""
    self.plan, plan = dataclasses.replace(self.plan, participants=self.plan.participants[:1]), self.plan
    try:
        super(type(self), self).prepare()
    finally:
        self.plan = plan


def _release(ranks, process, engine):
    with ranks.memory.as_process(process):
        for number in sorted(ranks.groups.values()):
            engine.release(number)


def _forget():
    # Modules that were imported over the stand-ins must not stay.
    for name in [n for n in sys.modules if n.startswith(devices.OVER_LIBRARIES)]:
        del sys.modules[name]


def _small_pinned_buffers(monkeypatch):
    # One engine thread a process uses the pinned buffers; here ranks are threads.
    pinned, own = sys.modules["dask_distmm.engines.gpu.host"], threading.local()

    def buffers(way):
        if not hasattr(own, way):
            setattr(own, way, pinned._Buffers())
        return getattr(own, way)

    monkeypatch.setattr(pinned, "_BUFFER_BYTES", 2**12)
    monkeypatch.setattr(pinned, "_buffers", buffers)


@pytest.fixture
def forget():
    yield
    _forget()


@pytest.fixture
def make(monkeypatch):
    def make(host=False, shares_memory=True):
        world = devices.install(monkeypatch, shares_memory)
        engine = importlib.import_module("dask_distmm.engines.cublasmp")
        _small_pinned_buffers(monkeypatch)
        return Ranks(engine, host), world

    yield make
    _forget()


@pytest.fixture
def make_broadcasting(monkeypatch):
    def make(host=False):
        world = devices.install(monkeypatch)
        engine = importlib.import_module("dask_distmm.engines.nccl")
        return NcclRanks(engine, host, DeviceKernels()), world

    yield make
    _forget()


@pytest.fixture(scope="module")
def peer_engine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = devices.install(monkeypatch, memory=shared.Memory(tmp_path_factory.mktemp("devices")))
        engine = importlib.import_module("dask_distmm.engines.peer.engine")
        _small_pinned_buffers(monkeypatch)
        # Small products are cut into pieces, and begun before the vote, too.
        monkeypatch.setattr(extents, "_FULL", (8, 8))
        monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.products"], "_LEAST_SECONDS", 0.0)
        # What arrays do here is done at once, and is in no graph.
        monkeypatch.setattr(importlib.import_module("dask_distmm.engines.gpu.program"), "_MOST_GRAPHS", 0)
        yield engine, world
    _forget()


@pytest.fixture
def make_peers(peer_engine):
    engine, world = peer_engine
    world.memory.most_mapped = 0
    made = []

    def make(host=False):
        made.append(PeerRanks(engine, host, world.memory))
        return made[-1], world

    yield make
    for ranks in made:
        ranks.check_inputs()
        # To free a communicator is collective.
        threads = [threading.Thread(target=_release, args=(ranks, *entry)) for entry in ranks.engines.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not world.memory.mapped
    assert not world.open["communicator"]
    world.compute_capability = "90"
    world.memory.not_exportable.clear()


@pytest.fixture
def factorize(make_peers, monkeypatch):
    ranks, world = make_peers()
    monkeypatch.setitem(ENGINES, "peer", dataclasses.replace(ENGINES["peer"], widths=(16, 16)))
    monkeypatch.setattr(refine, "INVERTED", 32)

    def solver(state):
        # Panels are published on the stream of the work.
        monkeypatch.setattr(sys.modules["cupy"].cuda, "get_current_stream", current, raising=False)
        return QueuedKernels(state.stream)

    def current():
        return shared.current_stream(ranks.engines[world.memory.process].stream)

    def waits(reader, count, sleep=BoardReader._sleep):
        # A device works while its host waits for another one's.
        current().some()
        sleep(reader, count)

    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.memory"].PeerState, "solver", solver)
    monkeypatch.setattr(BoardReader, "_sleep", waits)

    def run(kind, nranks, *matrices, sources=0, host=False, config=None, **options):
        ranks.host = host
        shape, *others = (x.shape for x in matrices)
        task = Factorization(kind, shape, matrices[0].dtype.name, *others, **options)
        how = {
            "options": dataclasses.replace(read_options(), **(config or {})),
            "array": "cupy",
            "method": "local" if task.spectral and not task.shareable else "columns",
        }
        return run_plan(ranks, planned(task, nranks, engine="peer", sources=sources, **how), *matrices)

    run.ranks = ranks
    return run
