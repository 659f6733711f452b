"""Imports point one way, and the pure parts stay pure."""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import structure

import dask_distmm

ROOT = pathlib.Path(dask_distmm.__file__).parent

# A module imports from its own line and from those above it. Imports inside of functions and under TYPE_CHECKING
# count, too: they hide a circle, they do not undo it.
ORDER = [
    "_version",
    "errors",
    "shown",
    "config",
    "compat",
    "layout",
    "numeric",
    "programs",
    "tracing",
    "random",
    "planning",
    "typing",
    "comms",
    "engines",
    "runtime",
    "graph",
    "arrays",
    "api",
    "algorithms",
    "linalg",
    "sklearn",
    "show",
    "diagnostics",
    "__init__",
    "tools",
    "__main__",
]
PURE = {
    "errors",
    "shown",
    "layout",
    "numeric",
    "programs",
    "tracing",
    "random",
    "algorithms",
    "planning",
    "typing",
    "engines",
    "show",
}
ON_GPUS = {"cublasmp", "nccl", "gpu", "peer"}
IMPURE_PACKAGES = {"distributed", "cupy", "nvmath", "nccl", "tornado", "bokeh", "socket", "asyncio"}
ENGINES = {"numpy", "peer", "cublasmp", "nccl"}

PATHS = sorted(ROOT.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    return ".".join(("dask_distmm", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PATHS}


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: pathlib.Path) -> Iterator[str]:
    """Names of all modules that a module imports, wherever it does."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def place_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def ours(path: pathlib.Path) -> set[str]:
    return {name for name in imports(path) if name in MODULES} - {name_of(path)}


def test_every_folder_has_its_place() -> None:
    assert {place_of(name) for name in MODULES} == set(ORDER)


def test_imports_point_one_way() -> None:
    level = {place: number for number, place in enumerate(ORDER)}
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in ours(path)
        if level[place_of(other)] > level[place_of(name)]
    ]
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    graph = {name: ours(path) for name, path in MODULES.items()}
    # What imports nothing that is left is taken away; what can't be is in a circle, or imports one.
    while free := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in free}
    assert not graph


def test_planning_and_engines_know_only_their_own_engine() -> None:
    wrong = []
    for name, path in MODULES.items():
        parts = name.split(".")
        if parts[1:2] not in (["planning"], ["engines"]) or not (own := ENGINES & set(parts[2:3])):
            continue
        for other in ours(path):
            if other.split(".")[1] in ("planning", "engines") and set(other.split(".")[2:3]) & (ENGINES - own):
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_pure_parts_know_no_cluster_and_no_gpu() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in MODULES.items()
        if place_of(name) in PURE and not ON_GPUS & set(name.split("."))
        for imported in imports(path)
        if imported.split(".")[0] in IMPURE_PACKAGES
    ]
    assert not wrong


def run_alone(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_importing_is_cheap() -> None:
    """No CUDA, no dashboard, no plotting, no optimizers; little of our own; no thread and no patch."""
    run_alone(
        "import sys, threading, dask.array as da; before = da.matmul, da.routines.matmul; import dask_distmm; "
        "bad = {'cupy', 'nvmath', 'nccl', 'bokeh', 'prometheus_client', 'matplotlib', 'zarr', 'sklearn', 'ml_dtypes', "
        "'scipy.optimize', 'scipy.linalg', 'dask_distmm.planning', 'dask_distmm.arrays', 'dask_distmm.show'}; "
        "bad &= set(sys.modules); "
        "assert not bad, bad; assert threading.active_count() == 1; "
        "assert (da.matmul, da.routines.matmul) == before"
    )


def test_what_multiplies_imports_neither_optimizers_nor_factorizations() -> None:
    """SciPy's optimizers are 14 MiB and 0.1 s, the package scipy.linalg 5 MiB; its BLAS can be imported afterwards."""
    run_alone(
        "import sys, dask.array as da, dask_distmm; x = da.ones((80, 80), chunks=40); "
        "assert dask_distmm.matmul(x, x).sum().compute() == 80**3; "
        "import dask_distmm.runtime.worker, dask_distmm.runtime.plugin; "
        "bad = {'scipy.optimize', 'scipy.linalg', 'dask_distmm.engines.programs', 'dask_distmm.show'}; "
        "bad &= set(sys.modules); "
        "assert not bad, bad; import scipy.linalg.cython_blas; assert scipy.linalg.cython_blas.__pyx_capi__; "
        "assert (dask_distmm.linalg.solve(x + 80 * da.eye(80, chunks=40), x[0]).compute() > 0).all()"
    )


def test_the_package_does_not_grow() -> None:
    """A change that needs more room says so: ``python -m tests.structure --write``."""
    recorded = json.loads(structure.RECORD.read_text())
    most = {what: count * (1 + structure.GROWTH) for what, count in recorded.items()}
    grown = {what: count for what, count in structure.measured().items() if count > most[what]}
    assert not grown, f"recorded were {recorded}"
