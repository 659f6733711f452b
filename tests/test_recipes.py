"""The recipes of docs/beyond-one-host.md: the commands, and what SLURM, MPI and Kubernetes would start, multiply."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import hosts
import pytest
from distributed import Client
from matrices import until
from test_docs import load

EXAMPLES = pathlib.Path(__file__).parents[1] / "docs" / "examples"

# In place of SLURM: a job is a process group of its own, as a batch script is on a host.
SBATCH = """#!/bin/sh
cp "$1" "$JOBS/$$.sh"
setsid bash "$JOBS/$$.sh" >"$JOBS/$$.log" 2>&1 &
echo $! >>"$JOBS/started"
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/sh
kill -TERM -- "-$1"
"""


def run(folder: pathlib.Path, *command: str, **environment: str) -> str:
    """Run an example and return what it printed."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, check=False, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def has_ended(group: int) -> bool:
    """Return whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def slurm_works() -> bool:
    return bool(shutil.which("sinfo")) and subprocess.run(["sinfo"], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "slurm"])
def test_slurm(real, tmp_path):
    """Two jobs of two workers; nothing is left of them."""
    pytest.importorskip("dask_jobqueue")
    environment = {}
    if real:
        if not slurm_works():
            pytest.skip("needs SLURM")
    else:
        for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOBS": str(tmp_path)}
    options = ["--interface", "lo", "--cores", "2" if not real else "1"]
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "on_slurm.py"), *options, **environment)
    assert "right on 4 workers" in printed
    assert " on 4 of 4 workers, engine numpy" in printed
    if not real:
        jobs = (tmp_path / "started").read_text().split()
        assert len(jobs) == 2
        for job in jobs:
            try:
                until(lambda: has_ended(int(job)))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(job), signal.SIGKILL)


def test_pipeline(tmp_path):
    """A scheduler and two workers by their commands; Zarr in and out."""
    pytest.importorskip("zarr")
    commands = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = run(tmp_path, "bash", str(EXAMPLES / "pipeline.sh"), str(tmp_path), PATH=commands)
    assert "2 runs on host-0, host-1" in printed
    assert {"features.zarr", "weights.zarr"} <= {path.name for path in tmp_path.iterdir()}


def test_mpi(tmp_path):
    """A scheduler, the program and four workers, of one ``mpiexec``."""
    pytest.importorskip("dask_mpi")
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=str(pathlib.Path(sys.executable).parent))
    if mpiexec is None:
        pytest.skip("needs the package mpich")
    printed = run(tmp_path, mpiexec, "-n", "6", sys.executable, str(EXAMPLES / "on_mpi.py"), "--interface", "lo")
    assert "right on 4 workers" in printed


def test_kubernetes(tmp_path, monkeypatch):
    """The commands and environment that the operator would give to pods, in network namespaces."""
    pytest.importorskip("dask_kubernetes")
    if hosts.why_not():
        pytest.skip(hosts.why_not())
    monkeypatch.syspath_prepend(EXAMPLES)
    example = load(EXAMPLES / "on_kubernetes.py")
    spec = example.resource("image", workers=2)["spec"]
    assert spec["worker"]["replicas"] == 2

    def start(made, host, part, **given):
        (container,) = spec[part]["spec"]["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]} | given
        args = container["args"]
        for name, value in environment.items():
            args = [text.replace(f"$({name})", value) for text in args]
        assert args[0] == "dask"
        made.start(host, *args[1:], **environment)

    with hosts.Hosts(3, tmp_path) as made:
        address = f"tcp://{made.addresses[0]}:8786"
        start(made, 0, "scheduler")
        for i in (1, 2):
            start(made, i, "worker", DASK_WORKER_NAME=f"distmm-worker-{i}", DASK_SCHEDULER_ADDRESS=address)
        with Client(address, timeout=120) as client:
            example.multiply(client, 2)
            names = client.run_on_scheduler(lambda dask_scheduler: {x.name for x in dask_scheduler.workers.values()})
            assert names == {"distmm-worker-1", "distmm-worker-2"}
            assert "distmm" in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
