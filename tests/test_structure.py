"""Imports point one way, and the pure parts stay pure."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import dask_distmm

ROOT = pathlib.Path(dask_distmm.__file__).parent

# From the top down: a module may import those of later lines only (and of its own line).
ORDER = [
    ["__main__", "cli"],
    ["demo", "commands", "doctor"],
    ["local", "bench"],
    ["__init__"],
    ["testing"],
    ["stateful"],
    ["placement", "likeness"],
    ["grouped"],
    ["api", "batched", "preload"],
    ["stacks"],
    ["formula", "problems"],
    ["operator", "quantize", "views"],
    ["collections", "numpy_functions"],
    ["planned"],
    ["graph", "cluster"],
    ["scheduler"],
    ["coordinator", "loading"],
    ["gates"],
    ["live", "priorities"],
    ["rounds"],
    ["worker"],
    ["replicas"],
    ["roster"],
    ["diagnostics"],
    ["direct"],
    ["run", "groups", "history"],
    ["chunks", "travel"],
    ["engines"],
    ["comms"],
    ["plan"],
    ["distribution"],
    ["layout"],
    ["narrow"],
    ["config", "dtypes", "epilog", "keys"],
    ["answers"],
    ["errors", "_version", "faults"],
]
PURE = [
    *["plan", "distribution", "layout", "run", "groups", "history"],
    *["keys", "dtypes", "narrow", "epilog", "errors", "engines"],
]
ON_GPUS = {"cublasmp", "device", "peer"}
IMPURE_PACKAGES = {"distributed", "cupy", "nvmath", "nccl", "tornado", "bokeh", "socket", "asyncio"}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield parts[0], path, ast.parse(path.read_text())


def imports(tree):
    """Names of imported modules: (full name, whether at the top of the module)."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in top
            if node.module == "dask_distmm":
                for alias in node.names:
                    yield f"dask_distmm.{alias.name}", id(node) in top


def test_every_module_has_its_place():
    placed = {name for line in ORDER for name in line}
    assert {name for name, _, _ in modules()} == placed


def test_imports_point_one_way():
    level = {name: number for number, line in enumerate(ORDER) for name in line}
    wrong = []
    for name, path, tree in modules():
        for imported, at_top in imports(tree):
            if not at_top or not imported.startswith("dask_distmm."):
                continue
            target = imported.split(".")[1]
            if target in level and level[target] < level[name]:
                wrong.append(f"{path.relative_to(ROOT)} imports {imported}")
    assert not wrong


def test_pure_parts_know_no_cluster_and_no_gpu():
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for name, path, tree in modules()
        if name in PURE and not ON_GPUS & set(path.parts)
        for imported, _ in imports(tree)
        if imported.split(".")[0] in IMPURE_PACKAGES
    ]
    assert not wrong


def test_importing_is_cheap():
    """No CUDA, no dashboard, no plotting; no thread and no patch."""
    program = (
        "import sys, threading, dask.array as da; before = da.matmul, da.routines.matmul; import dask_distmm; "
        "bad = {'cupy', 'nvmath', 'nccl', 'bokeh', 'prometheus_client', 'matplotlib', 'zarr', 'sklearn'}; "
        "bad &= set(sys.modules); "
        "assert not bad, bad; assert threading.active_count() == 1; "
        "assert (da.matmul, da.routines.matmul) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_modules_fit_in_a_head():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for _, path, _ in modules()}
    assert not {name: size for name, size in long.items() if size > 450}
