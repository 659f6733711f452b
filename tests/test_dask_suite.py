"""Dask's own tests of matrix products pass with the plugin enabled on a cluster (see ``run_dask_tests.py``)."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_dasks_own_tests():
    script = pathlib.Path(__file__).with_name("run_dask_tests.py")
    # One test of the package sparse has a few elements, and numba compiles ten seconds for them.
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50
    assert int(re.search(r"collective runs: (\d+)", done.stdout)[1]) > 100
