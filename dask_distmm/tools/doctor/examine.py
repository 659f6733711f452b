"""Collect the facts of this machine, or of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle
from distributed import Client

from dask_distmm.config import setting
from dask_distmm.planning import ENGINES
from dask_distmm.tools.doctor import facts
from dask_distmm.tools.doctor.findings import HERE, Report
from dask_distmm.tools.local import connected

_PROGRAM = "import json, sys; from dask_distmm.tools.doctor import facts; json.dump(facts.of_process(), sys.stdout)"
# Loading the libraries for GPUs takes seconds.
_SECONDS = 120


def examine(scheduler: str | None = None) -> Report:
    """Return the facts of this machine, or of every worker of a cluster."""
    client = {"versions": facts.versions()}
    wanted, engines = str(setting("engine")), tuple(ENGINES)
    if scheduler is None:
        return Report({HERE: _of_this_machine()}, client, None, "", wanted, engines)
    with connected(scheduler, None, "check") as found:
        workers, answer = _of_cluster(found)
        return Report(workers, client, answer, scheduler, wanted, engines)


def _of_this_machine() -> dict[str, Any]:
    """Ask a process of its own: a library that it loads may end it, and goes with it."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"a process that loads the engines' libraries did not end within {_SECONDS} s"}
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"a process that loads the engines' libraries ended with status {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _of_cluster(client: Client) -> tuple[dict[str, Mapping[str, Any]], Mapping[str, Any]]:
    """Ask all workers at the same time, and the scheduler. They need not have this package."""
    cloudpickle.register_pickle_by_value(facts)
    try:
        answers = client.run(facts.of_worker, on_error="return")
        scheduler: Mapping[str, Any] = client.run_on_scheduler(facts.of_scheduler)
    finally:
        cloudpickle.unregister_pickle_by_value(facts)
    workers = {
        address: answer if isinstance(answer, Mapping) else {"error": f"{type(answer).__name__}: {answer}"[:300]}
        for address, answer in answers.items()
    }
    return workers, scheduler
