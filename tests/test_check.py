"""``dask distmm check``: judging made-up facts, collecting real ones, and the command."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from click.testing import CliRunner
from distributed import Client

from dask_distmm import __version__, compat
from dask_distmm.tools import check, facts
from dask_distmm.tools.check import HERE, Report, differing
from dask_distmm.tools.cli import main


@pytest.fixture(autouse=True)
def _from_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that install are those of a package that came from an index."""
    monkeypatch.setattr(compat, "_origin", lambda: None)


VERSIONS = dict.fromkeys(facts.LIBRARIES, "1.2.3") | {"python": "3.12.1", "dask_distmm": __version__}
LIBRARIES = {"cublasmp": "1000", "nccl": "2.30.7", "nvmath": "1.0.0"}
DEVICES = [{"name": "H200", "uuid": f"GPU-{i}", "memory": 140 * 2**30} for i in range(4)]


def cpu_worker(**changes: Any) -> dict[str, Any]:
    """Facts of a worker on which everything is well."""
    return {
        "host": "one",
        "versions": dict(VERSIONS),
        "folder": "/lib",
        "cuda_major": None,
        "engines": {"cublasmp": {"error": "no module cupy"}, "numpy": {}},
        "gpus": {"error": "no NVML"},
        "driver_loaded": False,
        "visible_devices": None,
        "rmm": None,
        "blas": [{"internal_api": "openblas", "version": "0.3", "num_threads": 1, "architecture": "Zen"}],
        "cores": 8,
        "memory": 64 * 2**30,
        "threads": 2,
        "memory_limit": 16 * 2**30,
        "nanny": True,
        "plugin": True,
        "protocol": "tcp",
    } | changes


def gpu_worker(number: int, **changes: Any) -> dict[str, Any]:
    """Facts of a worker with a GPU of its own."""
    gpus = {"driver": "580.1", "cuda": "13.0", "devices": DEVICES, "without_peer_access": []}
    engines = {"cublasmp": LIBRARIES, "nccl": LIBRARIES, "numpy": {}}
    more = {"engines": engines, "gpus": gpus, "driver_loaded": True, "cuda_major": 13}
    return cpu_worker(**more, visible_devices=f"{number},{(number + 1) % 4}", threads=1, **changes)


def cpu_cluster() -> Report:
    workers = {f"tcp://{i}": cpu_worker() for i in range(3)}
    return _cluster(workers)


def gpu_cluster() -> Report:
    return _cluster({f"ucx://{i}": gpu_worker(i) for i in range(4)})


def peer_cluster(**changes: Any) -> Report:
    workers = {f"tcp://{i}": gpu_worker(i, **changes) for i in range(4)}
    for worker in workers.values():
        worker["engines"] = {"peer": LIBRARIES} | worker["engines"]
    return _cluster(workers)


def _cluster(workers: dict[str, Any]) -> Report:
    scheduler = {"host": "one", "versions": dict(VERSIONS), "folder": "/lib", "plugin": True, "package": True}
    return Report(workers, {"versions": dict(VERSIONS)}, scheduler, "tcp://scheduler:8786", "auto")


@pytest.mark.parametrize(
    ("make", "engine"), [(cpu_cluster, "numpy"), (gpu_cluster, "cublasmp"), (peer_cluster, "peer")]
)
def test_where_all_is_well_nothing_is_found(make: Callable[[], Report], engine: str) -> None:
    report = make()
    assert (report.findings, report.status, report.engine) == ([], 0, engine)
    text = check.report_text(report)
    assert text.endswith("No problems found.")
    assert all(address in text for address in report.workers)
    json.dumps(report.to_json(), allow_nan=False)


def test_gpus_that_do_not_reach_each_other() -> None:
    """The engine that pulls is for one host, and peer access between all of its GPUs."""
    report = peer_cluster()
    report.workers["tcp://3"]["host"] = "two"
    assert report.engine == "cublasmp"
    assert report.reason == "peer can't run: its GPUs are on 2 hosts"
    report = peer_cluster()
    for worker in report.workers.values():
        worker["gpus"]["without_peer_access"] = [[0, 3]]
    assert report.reason == "peer can't run: not all GPUs have peer access"


def test_gpus_of_several_hosts_factorize_by_one_engine() -> None:
    report = peer_cluster()
    for worker in report.workers.values():
        worker["engines"]["nccl"] = {"error": "no NCCL"}
    assert report.findings == []
    report.workers["tcp://3"]["host"] = "two"
    assert [found.level for found in report.findings] == ["note"]
    text = report.findings[0].text
    assert "no engine factorizes matrices on these GPUs" in text
    assert "peer: its GPUs are on 2 hosts; nccl: no NCCL" in text
    assert "dask_distmm[cu13]" in report.findings[0].remedy


def test_gpus_are_used_by_either_engine() -> None:
    report = peer_cluster()
    for worker in report.workers.values():
        worker["engines"]["cublasmp"] = {"error": "no NCCL"}
    assert (report.engine, report.findings) == ("peer", [])
    for worker in report.workers.values():
        worker["engines"]["peer"] = {"error": "no cupy"}
    assert report.engine == "numpy"
    assert any("GPUs that are not used" in found.text for found in report.findings)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return what sets a fact, named by keys with dots in between."""

    def apply(found: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for key in parents:
            found = found[key]
        found[last] = value

    return apply


@pytest.mark.parametrize(
    ("make", "path", "value", "level", "text", "remedy"),
    [
        (cpu_cluster, "versions.dask_distmm", None, "error", "is not installed", f"dask_distmm=={__version__}"),
        (cpu_cluster, "versions.dask_distmm", "0.0.9", "error", f"is imported there, from /lib, {__version__}", "=="),
        (cpu_cluster, "versions.dask", "2020.1", "warning", "versions of dask differ", "dask==1.2.3"),
        (cpu_cluster, "versions.python", "3.11.1", "warning", "versions of python differ", "Python 3.12"),
        (cpu_cluster, "versions.python", "3.12.9", None, "", ""),
        (cpu_cluster, "versions.rmm", None, None, "", ""),
        (cpu_cluster, "engines", {"error": "broken"}, "error", "can't be imported: broken", ""),
        (cpu_cluster, "engines.numpy", {"error": "broken"}, "warning", "only 2 of 3 workers have engine 'numpy'", ""),
        (cpu_cluster, "threads", 8, "warning", "12 threads of 3 workers on 8 cores", "--nworkers 3 --nthreads 2"),
        (cpu_cluster, "memory_limit", 60 * 2**30, "warning", "add up to 92.00 GiB of 64.00 GiB", "--memory-limit"),
        (cpu_cluster, "memory_limit", 0, "note", "no memory limit", "--memory-limit auto"),
        (cpu_cluster, "blas", [], "warning", "no BLAS that threadpoolctl knows", "numpy"),
        (cpu_cluster, "blas", {"error": "broken"}, None, "", ""),
        (cpu_cluster, "driver_loaded", True, "warning", "its GPUs can't be listed: no NVML", "nvidia-ml-py"),
        (
            cpu_cluster, "gpus", {"driver": "1", "cuda": "12.4", "devices": DEVICES, "without_peer_access": []},
            "warning", "has GPUs that are not used: no module cupy", "dask_distmm[cu12]",
        ),
        (cpu_cluster, "engines.numpy", {"numpy": "0"}, "error", "different libraries", "dask_distmm=="),
        (gpu_cluster, "engines.cublasmp", {"error": "broken"}, "warning", "only 3 of 4 workers", "dask_distmm[cu13]"),
        (gpu_cluster, "engines.cublasmp", LIBRARIES | {"nccl": "1"}, "error", "different libraries", "[cu13]"),
        (gpu_cluster, "visible_devices", "0", "error", "2 workers share one GPU (one GPU-0)", "dask cuda worker"),
        (gpu_cluster, "visible_devices", None, "error", "2 workers share one GPU", "dask cuda worker"),
        (gpu_cluster, "visible_devices", "GPU-2", "error", "2 workers share one GPU (one GPU-2)", "dask cuda worker"),
        (gpu_cluster, "visible_devices", "", None, "", ""),
        (gpu_cluster, "gpus.cuda", "12.8", "error", "is for CUDA 12.8, the libraries are for CUDA 13", "[cu12]"),
        (gpu_cluster, "gpus.without_peer_access", [[0, 3]], "warning", "without peer access: 0-3", "nvidia-smi topo"),
        (gpu_cluster, "gpus.without_peer_access", {"error": "unknown"}, None, "", ""),
        (gpu_cluster, "nanny", False, "warning", "without a nanny", "dask cuda worker"),
        (
            gpu_cluster, "rmm", {"resource": "PoolMemoryResource", "pool_bytes": 2**30, "used_by_cupy": False},
            "warning", "the RMM pool (1.00 GiB) is not used by CuPy", "--rmm-allocator-external-lib-list cupy",
        ),
        (
            gpu_cluster, "rmm", {"resource": "PoolMemoryResource", "pool_bytes": 2**30, "used_by_cupy": True},
            None, "", "",
        ),
    ],
)  # fmt: skip
def test_one_fact_that_is_wrong_is_one_finding(
    make: Callable[[], Report], path: str, value: Any, level: str | None, text: str, remedy: str
) -> None:
    report = copy.deepcopy(make())
    address = sorted(report.workers)[1]
    change(path, value)(report.workers[address])
    found = report.findings
    shown = check.report_text(report)
    json.dumps(report.to_json(), allow_nan=False)
    if level is None:
        assert found == []
        return
    assert [one.level for one in found] == [level]
    assert text in found[0].text
    assert remedy in found[0].remedy
    assert report.status == {"note": 0, "warning": 1, "error": 2}[level]
    assert found[0].remedy in shown
    assert " ".join(found[0].text.split())[:30] in " ".join(shown.split())


@pytest.mark.parametrize(
    ("path", "value", "level", "text"),
    [
        ("versions.dask_distmm", None, "error", "the scheduler lacks dask_distmm"),
        (
            "versions.dask_distmm",
            "0.0.9",
            "error",
            f"the scheduler has dask_distmm 0.0.9, from /lib, this client {__version__}",
        ),
        ("package", {"error": "broken"}, "error", "the scheduler can't import dask_distmm: broken"),
        ("versions.numpy", None, None, ""),
        ("versions.distributed", "2020.1", "warning", "versions of distributed differ"),
        ("plugin", False, "note", "the first multiply puts it in place"),
    ],
)
def test_the_scheduler_is_judged(path: str, value: Any, level: str | None, text: str) -> None:
    report = copy.deepcopy(cpu_cluster())
    assert isinstance(report.scheduler, dict)
    change(path, value)(report.scheduler)
    assert [one.level for one in report.findings] == [level] * (level is not None)
    assert all(text in one.text for one in report.findings)


def test_clusters_that_can_not_multiply() -> None:
    empty = _cluster({})
    assert (empty.status, empty.engine) == (2, None)
    assert "no workers" in check.report_text(empty)
    silent = _cluster({"tcp://1": {"error": "OSError: gone"}, "tcp://2": cpu_worker()})
    assert silent.status == 2
    assert "could not be asked: OSError: gone" in check.report_text(silent)
    asked = Report(cpu_cluster().workers, {"versions": VERSIONS}, None, "tcp://x", "cublasmp")
    assert (asked.status, asked.engine) == (2, None)
    assert "dask_distmm[cu13]" in check.report_text(asked)


def test_a_newer_dask_is_a_note() -> None:
    report = cpu_cluster()
    newer = report.client | {"versions": report.client["versions"] | {"distributed": "2999.1.0"}}
    found = [one for one in dataclasses.replace(report, client=newer).findings if "newer than those tested" in one.text]
    assert [one.level for one in found] == ["note"]


def test_differing_counts_the_most_common_first() -> None:
    assert differing({"a": 1, "b": 2, "c": 2, "d": None}) == {"2": ["b", "c"], "1": ["a"], "none": ["d"]}


# Collecting


def test_this_machine_can_be_asked() -> None:
    report = check.examine()
    assert list(report.workers) == [HERE]
    assert report.engine is not None
    assert report.workers[HERE]["versions"]["dask_distmm"] == __version__
    assert report.workers[HERE]["blas"]
    assert f"dask_distmm check: {HERE}" in check.report_text(report)


def test_broken_libraries_take_no_other_answer_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *arguments: Any) -> Any:
        raise {"pynvml": OSError, "dask_distmm.engines.base": SystemError}.get(name, ImportError)(f"{name}\nis broken")

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", broken)
        patch.setitem(sys.modules, "rmm", types.ModuleType("rmm"))
        found = facts.of_process()
    assert found["gpus"] == {"error": "OSError: pynvml"}
    assert found["engines"] == {"error": "SystemError: dask_distmm.engines.base"}
    assert found["rmm"]["error"].startswith("AttributeError")
    assert found["versions"]["dask_distmm"] == __version__
    report = Report({HERE: found}, {"versions": facts.versions()}, None, "", "auto")
    assert report.status == 2
    assert "dask_distmm can't be imported: SystemError" in " ".join(check.report_text(report).split())


def test_one_cause_is_said_once() -> None:
    missing = {
        name: {"error": f"EngineError: engine {name!r} can't be imported: no cupy"} for name in ("peer", "cublasmp")
    }
    report = _cluster({"tcp://0": cpu_worker(engines=missing | {"numpy": {}})})
    assert report.reason == "peer and cublasmp can't run: no cupy"


class Nvml(types.ModuleType):
    """NVML of a machine with three GPUs, of which the last one reaches no other."""

    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = 0, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlSystemGetDriverVersion": lambda: b"570.1",
            "nvmlDeviceGetName": lambda handle: "H200",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=2**30),
            "nvmlDeviceGetP2PStatus": lambda one, other, index: int(2 in (one, other)),
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]


def test_gpus_are_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = facts.gpus()
    assert nvml.open == 0
    assert (found["driver"], found["cuda"]) == ("570.1", "12.8")
    assert [device["uuid"] for device in found["devices"]] == ["GPU-0", "GPU-1", "GPU-2"]
    assert found["without_peer_access"] == [[0, 2], [1, 2]]


def test_workers_without_the_package_can_be_asked() -> None:
    cloudpickle.register_pickle_by_value(facts)
    try:
        sent = cloudpickle.dumps(facts.of_process)
    finally:
        cloudpickle.unregister_pickle_by_value(facts)
    program = (
        "import sys; sys.modules['dask_distmm'] = None; import json, pickle; "
        "print(json.dumps(pickle.loads(sys.stdin.buffer.read())()))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert "dask_distmm" in found["engines"]["error"]
    assert found["versions"]["dask"]


def test_the_command_asks_all_workers(client: Client) -> None:
    registered = cloudpickle.list_registry_pickle_by_value()
    done = CliRunner().invoke(main, ["check", "--scheduler", client.scheduler.address, "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == found["status"]
    assert found["engine"] == "numpy"
    assert set(found["workers"]) == set(client.nthreads())
    for one in found["workers"].values():
        assert (one["threads"], one["nanny"]) == (1, True)
        assert one["versions"] == found["client"]["versions"]
    assert cloudpickle.list_registry_pickle_by_value() == registered


def test_a_cluster_that_is_not_there_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setattr("dask_distmm.tools.local.CONNECT_SECONDS", 0.2)
    done = CliRunner().invoke(main, ["check", "--scheduler", "tcp://127.0.0.1:1"])
    logging.disable(logging.NOTSET)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: DistMMError: no Dask scheduler answers")
