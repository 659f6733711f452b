"""The GPU engine over the stand-ins, one thread a rank."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading

import devices
import pytest


class Ranks:
    """The engine as the runner of jobs wants it: chunks become device arrays, each participant has its own engine."""

    name = "cublasmp"

    def __init__(self, module, host):
        self.module, self.host, self.engines, self.jobs = module, host, {}, []

    def job(self, plan, me, chunks, comm, progress):
        engine = self.engines.setdefault(me, self.module.CublasMpEngine())
        plan = dataclasses.replace(plan, group=hash(plan.workers) % 1000 + 1)
        chunks = {key: chunk if self.host else chunk.view(devices.ndarray) for key, chunk in chunks.items()}
        self.jobs.append(engine.job(plan, me, chunks, comm, progress))
        return self.jobs[-1]


@pytest.fixture
def make(monkeypatch):
    def make(host=False, shares_memory=True):
        world = devices.install(monkeypatch, shares_memory)
        engine = importlib.import_module("dask_distmm.engines.cublasmp")
        # One engine thread a process uses the pinned buffers; here ranks are threads.
        pinned, own = sys.modules["dask_distmm.engines.device.host"], threading.local()

        def buffers():
            if not hasattr(own, "buffers"):
                own.buffers = pinned._Buffers()
            return own.buffers

        monkeypatch.setattr(pinned, "_BUFFER_BYTES", 2**12)
        monkeypatch.setattr(pinned, "_buffers", buffers)
        return Ranks(engine, host), world

    yield make
    # What was imported over the stand-ins must not stay.
    for name in [n for n in sys.modules if n.startswith(devices.OVER_LIBRARIES)]:
        del sys.modules[name]
