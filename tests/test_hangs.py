"""What tests that hang show of the processes that they have started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import pathlib, threading
from distributed import Client, LocalCluster
from hangs import watched
from matrices import until

begun = pathlib.Path("begun")

def waits_for_ever():
    begun.touch()
    threading.Event().wait()

if __name__ == "__main__":
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        with Client(cluster) as client:
            future = client.submit(waits_for_ever, key="hung")
            until(begun.exists)
            with watched(0):
                threading.Event().wait(0.5)
"""


def test_a_hang_shows_tasks_and_the_stacks_of_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
        capture_output=True, text=True, timeout=350, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode != 0
    assert "hung processing" in found.stderr
    assert "in waits_for_ever" in found.stderr
