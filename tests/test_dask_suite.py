"""Dask's own tests of matrix products pass with the plugin enabled on a cluster (see ``run_dask_tests.py``)."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_dasks_own_tests():
    script = pathlib.Path(__file__).with_name("run_dask_tests.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50
    assert int(re.search(r"collective runs: (\d+)", done.stdout)[1]) > 100
