"""ScaLAPACK's pdgemm under Open MPI: as packaged by Debian, or with its algorithmic block tuned."""

from __future__ import annotations

import ctypes.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.protocol import Case, Contender, Quiet, Sample

BLOCKS = [64, 128, 256]
PACKAGES = "libscalapack-openmpi-dev openmpi-bin libopenblas0-pthread"


class Pdgemm(Contender):
    """pdgemm (psgemm for float32) on one-threaded ranks, launched anew for each timing.

    The warm-up tries every block size in `BLOCKS` and the fastest is kept: the peer is shown at its best.
    Each launch multiplies once, untimed, before it times.
    """

    def __init__(self, ranks: int, *, tuned: bool = False, timeout: float = 600.0, quiet: Quiet = nullcontext) -> None:
        self.name = "pdgemm-tuned" if tuned else "pdgemm"
        self.tuned, self.quiet = tuned, quiet
        rows = next(rows for rows in range(math.isqrt(ranks), 0, -1) if ranks % rows == 0)
        self.process_grid = [rows, ranks // rows]
        self.timeout = timeout
        self.library = ctypes.util.find_library("scalapack-openmpi")
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-pdgemm-")
        self.tuner: str | None = None
        self.best: dict[Case, int] = {}
        self.facts: dict[str, Any] = {}

    def unavailable(self) -> str | None:
        """Return what is missing; a small product is tried, as MPI has many ways not to start."""
        if not (shutil.which("mpirun") and self.library):
            return f"no ScaLAPACK with Open MPI here; on Debian: apt-get install {PACKAGES}"
        try:
            if self.tuned:
                self._build_tuner()
            found = self._launch(Case(64, "float64"), 0, BLOCKS[:1], warmups=0)[0]
        except (OSError, subprocess.SubprocessError) as error:
            text = str(getattr(error, "stderr", None) or error).strip()
            return f"a trial run failed: {text[-300:]}"
        used = [pool for pool in found["pools"] if "scipy" not in (pool.get("prefix") or "")]
        if not any(pool["user_api"] == "blas" for pool in used):
            return f"ScaLAPACK finds no optimised BLAS here; on Debian: apt-get install {PACKAGES}"
        keys = ("internal_api", "version", "architecture", "threading_layer", "num_threads")
        self.facts["blas"] = [{key: pool.get(key) for key in keys} for pool in used]
        self.facts["algorithmic_block"] = found["blocks"][0]["algorithmic_block"]
        return None

    def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
        """Time one product; the warm-up picks the block size for the case."""
        blocks = BLOCKS if warmup or case not in self.best else [self.best[case]]
        with self.quiet():
            ranks = self._launch(case, seed, blocks, warmups=1)
        # Rank 0 leaves the closing barrier when all are done, so that its clock covers everybody.
        fastest = min(ranks[0]["blocks"], key=lambda found: found["seconds"][0])
        self.best[case] = fastest["block"]
        # NumPy's maximum, as the built-in one can lose a NaN.
        worst = float(np.max([found["error"] for rank in ranks for found in rank["blocks"]]))
        keys = ("block", "algorithmic_block")
        details: dict[str, Any] = {key: fastest[key] for key in keys}
        if len(blocks) > 1:
            details["tried"] = {str(found["block"]): found["seconds"][0] for found in ranks[0]["blocks"]}
        return Sample(fastest["seconds"][0], worst, details)

    def describe(self) -> dict[str, Any]:
        """Return the process grid, the BLAS and the version of MPI."""
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
        return {
            "process_grid": self.process_grid,
            "threads_per_rank": 1,
            "library": Path(self.library or "").name,
            "mpi": version.stdout.partition("\n")[0],
            **self.facts,
        }

    def close(self) -> None:
        """Remove the temporary files."""
        self.folder.cleanup()

    def _build_tuner(self) -> None:
        """Compile the replacement for the compiled-in algorithmic block."""
        self.tuner = str(Path(self.folder.name, "pilaenv.so"))
        source = str(Path(__file__).with_name("pilaenv.c"))
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", self.tuner, source]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def _launch(self, case: Case, seed: int, blocks: list[int], warmups: int) -> list[dict[str, Any]]:
        """Run the ranks once and return what each one found, by rank."""
        count = math.prod(self.process_grid)
        with tempfile.TemporaryDirectory(dir=self.folder.name) as directory:
            task = {
                "size": case.size,
                "dtype": case.dtype,
                "seed": seed,
                "grid": self.process_grid,
                "blocks": blocks,
                "warmups": warmups,
                "timings": 1,
                "library": self.library,
                "tuner": self.tuner,
                "directory": directory,
            }
            program = [sys.executable, "-m", "benchmarks.peers.pdgemm_rank", json.dumps(task)]
            # Shared memory and loopback only: nothing is offered to the network.
            flags = ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo", "--oversubscribe"]
            if os.geteuid() == 0:
                flags.append("--allow-run-as-root")
            root = str(Path(__file__).parents[2])
            paths = [root, os.environ.get("PYTHONPATH", "")]
            subprocess.run(
                ["mpirun", "-np", str(count), *flags, *program],
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                },
                stdin=subprocess.DEVNULL,
                check=True,
                capture_output=True,
                text=True,
                timeout=self.timeout,
            )
            return [json.loads(Path(directory, f"rank-{rank}.json").read_text()) for rank in range(count)]
