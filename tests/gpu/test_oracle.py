"""The same inputs through ``nvmath.distributed.linalg.advanced.matmul``, launched apart, and through a cluster."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product, random_matrix
from nvmath_oracle import load

import dask_distmm
from dask_distmm.numeric.types import dtype_from_name, typed

CASES = [
    {"name": f"{dtype}-{method}", "dtype": dtype, "method": method}
    for dtype in ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
    for method in ("allgather", "reducescatter")
]
M, N, K = 192, 320, 448


def oracle(folder, size):
    """Run nvmath on GPU processes of their own; return when all are done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("nvmath_oracle.py"))
    processes = []
    for rank in range(size):
        command = [sys.executable, script, str(rank), str(size), str(port), str(folder)]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        ended = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(size))
    assert not any(ended), said


@pytest.mark.timeout(150)
@pytest.mark.gpus(2)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="nvmath is launched over PyTorch's process group")
def test_agrees_with_nvmath(clusters, tmp_path):
    import cupy

    rng = np.random.default_rng()
    operands = {}
    for case in CASES:
        dtype = dtype_from_name(case["dtype"])
        operands[case["name"]] = random_matrix(rng, (M, K), dtype, "C"), random_matrix(rng, (K, N), dtype, "C")
        for operand, x in zip("ab", operands[case["name"]], strict=True):
            # NumPy's files know no bfloat16.
            np.save(tmp_path / f"{case['name']}-{operand}.npy", x.view(np.int16) if case["dtype"] == "bfloat16" else x)
    (tmp_path / "cases.json").write_text(json.dumps(CASES))
    oracle(tmp_path, 2)
    client, _ = clusters(2)
    for case in CASES:
        a, b = operands[case["name"]]
        x, y = (
            da.from_array(v, chunks=(101, 97)).map_blocks(cupy.asarray, meta=cupy.empty((0, 0), v.dtype))
            for v in (a, b)
        )
        d = dask_distmm.matmul(x, y, method=case["method"])
        delayed = client.compute(list(d.to_delayed().ravel()))
        nrows, ncols = d.numblocks
        parts = [typed(part.get(), case["dtype"]) for part in client.gather(delayed)]
        ours = np.block([[parts[i * ncols + j] for j in range(ncols)] for i in range(nrows)])
        theirs = [load(tmp_path / f"{case['name']}-d{rank}.npy", case["dtype"]) for rank in range(2)]
        theirs = np.concatenate(theirs, axis=0 if case["method"] == "allgather" else 1)
        assert_product(a, b, ours)
        # Both are within the gate of the reference: of each other within twice of that.
        wide = np.clongdouble if ours.dtype.kind == "c" else np.longdouble
        magnitude = abs(a.astype(wide)) @ abs(b.astype(wide))
        coarse = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(case["dtype"], 0.0)
        eps = float(np.finfo(np.float32 if coarse else ours.dtype).eps)
        off = abs(ours.astype(wide) - theirs.astype(wide))
        bound = 2 * (16 * eps * magnitude + coarse * abs(ours.astype(wide)) * 1.01 + (2.0**-25 if coarse else 0))
        assert (off <= bound).all(), case
