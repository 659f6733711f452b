"""The list of internals of Dask and distributed: complete, and any of them that is missing ends in one clear way."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker

import dask_distmm
from dask_distmm import EngineError, compat, linalg, matmul
from dask_distmm.runtime import client as cluster
from dask_distmm.runtime.keys import barrier_name

A = np.arange(36.0).reshape(6, 6)
ROOT = Path(compat.__file__).parent


class Hidden:
    """A name that this package does not find, while Dask does."""

    def __init__(self, owner, name):
        self.name, self.real = name, inspect.getattr_static(owner, name, None)

    def __get__(self, instance, owner=None):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("dask_distmm"):
            raise AttributeError(self.name)
        if hasattr(type(self.real), "__get__"):
            return self.real.__get__(instance, owner)
        try:
            return vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, instance, value):
        if hasattr(type(self.real), "__set__"):
            self.real.__set__(instance, value)
        else:
            vars(instance)[self.name] = value


def started(nworkers=2):
    return LocalCluster(n_workers=nworkers, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0")


def goes_on_without(what):
    """Products of ours end in one error that names what is missing, and Dask's own go on, also under enable()."""
    cluster._refused.clear()
    cluster._said.clear()
    x = da.from_array(A, chunks=3)
    for call in (lambda: matmul(x, x), lambda: linalg.cholesky(x)):
        with pytest.raises(EngineError, match=f"lacks {what}. Install one that works"):
            call().compute()
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0}):
        d = x @ x
        assert not any(barrier_name(key) for key in dict(d.dask))
        np.testing.assert_array_equal(d.compute(), A @ A)


def test_internals_of_the_scheduler(monkeypatch):
    """One cluster for all: nothing is attached as long as anything is missing."""
    owners = {kind: path for path in compat.CLASSES for kind in [path.rpartition(".")[2]]}
    names = [(Scheduler, name) for name in compat.SCHEDULER]
    for kind, path in owners.items():
        owner = getattr(importlib.import_module(path.rpartition(".")[0]), kind)
        names += [(owner, name) for name in compat.CLASSES[path]]
    with started() as local, Client(local):
        for owner, name in names:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, Hidden(owner, name), raising=False)
                goes_on_without(f"{owner.__name__}.{name}")
        for pair in compat.TRANSITIONS:
            with monkeypatch.context() as patch:
                table = {key: value for key, value in Scheduler._TRANSITIONS_TABLE.items() if key != pair}
                scheduler = local.scheduler
                found = compat.missing_on_scheduler(type("Without", (), {"_TRANSITIONS_TABLE": table})())
                assert f"the scheduler's transition {pair}" in found
                assert not any("transition (" in each for each in compat.missing_on_scheduler(scheduler))
        cluster._refused.clear()
        cluster._said.clear()
        x = da.from_array(A, chunks=3)
        np.testing.assert_array_equal(matmul(x, x).compute(), A @ A)


@pytest.mark.parametrize("name", sorted(compat.WORKER))
def test_internals_of_workers(monkeypatch, name):
    """The worker starts, and its other tasks run; also one that starts later."""
    monkeypatch.setattr(Worker, name, Hidden(Worker, name), raising=False)
    with started(1) as local, Client(local) as client:
        if name == "handlers":  # it can't even answer
            with pytest.raises(EngineError, match="none of 1 workers has dask_distmm"):
                matmul(da.from_array(A, chunks=3), da.from_array(A, chunks=3))
        else:
            goes_on_without(f"Worker.{name}")
        local.scale(2)
        client.wait_for_workers(2, timeout=120)
        addresses = list(client.nthreads())
        assert client.gather(client.map(np.square, [2, 3], workers=addresses[1], pure=False)) == [4, 9]


def test_what_is_called_otherwise_is_named():
    class Other(Scheduler):
        def _add_to_memory(self, ts, ws):
            raise NotImplementedError

        def __init__(self):
            pass

    missing = compat.missing_on_scheduler(Other())
    assert "Scheduler._add_to_memory(recommendations)" in missing
    assert "on the scheduler is not supported" in compat.unsupported("on the scheduler", missing)


def test_what_is_imported_is_named():
    """The package says at its import what is missing, and which version has it."""
    program = (
        "import dask.array, distributed.worker_state_machine as w; del dask._task_spec.Alias, w.FreeKeysEvent\n"
        "try:\n    import dask_distmm\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "lacks dask._task_spec.Alias, distributed.worker_state_machine.FreeKeysEvent. Install" in done.stdout


# Names of variables that are a scheduler, a worker, or their states of tasks and workers, by where they are so.
VARIABLES = {
    "runtime": {"scheduler": "Scheduler", "_scheduler": "Scheduler", "ts": "TaskState", "ws": "WorkerState"},
    "runtime/worker": {"worker": "Worker", "_worker": "Worker"},
}


def used(folder):
    """What modules of a folder read of a scheduler, workers and tasks, as ``(class, name)``."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                if name in VARIABLES[folder]:
                    yield VARIABLES[folder][name], node.attr


def test_the_list_has_all_that_is_used():
    listed = {"Scheduler": set(compat.SCHEDULER), "Worker": set(compat.WORKER) | {"log_event"}}
    for path, names in compat.CLASSES.items():
        listed[path.rpartition(".")[2]] = set(names)
    found = {pair for folder in VARIABLES for pair in used(folder)}
    # Modules of ours in folders of these names.
    ours = {path.stem for path in (ROOT / "runtime").rglob("*.py")}
    assert {(kind, name) for kind, name in found if name not in listed[kind] | ours} == set()


def test_all_that_is_imported_from_private_modules_is_in_the_list():
    private = {"dask._task_spec", "dask.order", "distributed.worker_state_machine", "distributed.core"}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in private:
                assert {alias.name for alias in node.names} <= compat.MODULES[node.module].keys(), path
