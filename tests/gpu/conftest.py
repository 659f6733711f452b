"""GPU tests: skipped with a reason where there is no GPU or no GPU stack; clusters are shared by number of workers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path

import dask
import pytest


def gpu_count() -> int:
    """Number of GPUs that tests can use; 0 without CuPy, dask-cuda, cuBLASMp."""
    if any(importlib.util.find_spec(name) is None for name in ("cupy", "dask_cuda", "nvmath", "nccl")):
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


GPUS = gpu_count()
# With it the peer engine's tests that want more GPUs than there are give one to several workers. cuBLASMp refuses that.
SHARED = os.environ.get("DISTMM_TEST_SHARED_GPUS") == "1"


def pytest_generate_tests(metafunc):
    """``-k 4workers`` selects, and ``-k peer``; tests for one engine alone say so, modules their `COUNTS`."""
    marker = metafunc.definition.get_closest_marker("engines")
    metafunc.parametrize("engine", marker.args if marker else ["cublasmp", "peer"], indirect=True)
    if "nworkers" in metafunc.fixturenames:
        most = max(4, 2 * GPUS if SHARED else GPUS)
        counts = [n for n in getattr(metafunc.module, "COUNTS", (1, 2, 3, 4, 8)) if n <= most]
        metafunc.parametrize("nworkers", counts, ids=lambda n: f"{n}workers", scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    # Tests with as many workers one after the other: each change of the number starts a cluster.
    items.sort(key=lambda item: item.callspec.params.get("nworkers", 0) if hasattr(item, "callspec") else 0)
    skipped = {}
    for item in items:
        if "gpu" not in Path(str(item.fspath)).parts[-2:]:
            continue
        item.add_marker(pytest.mark.gpu)
        # Their inputs are made here and go to the workers within the graph.
        item.add_marker(pytest.mark.filterwarnings("ignore:Sending large graph"))
        needed = item.callspec.params.get("nworkers", 1) if hasattr(item, "callspec") else 1
        marker = item.get_closest_marker("gpus")
        needed = max(needed, marker.args[0] if marker else 1)
        alone = SHARED and GPUS and "[peer" in item.name and "both_engines" not in item.name
        enough = needed if alone else GPUS
        if needed > enough:
            skipped.setdefault(item.path, []).append(item)
    # One a file stands for all: thousands would take a minute to skip.
    dropped = set()
    for first, *others in skipped.values():
        reason = f"{1 + len(others)} tests of the file need more GPUs with the GPU extra than {GPUS}"
        first.add_marker(pytest.mark.skip(reason=reason))
        dropped.update(others)
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


# Between hosts that are made of one machine NCCL takes what there is between machines.
_APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def sharing(nworkers, devices, env=None, hosts=1, **options):
    """Return a cluster whose workers, taken in turn, have the devices of their host: as many for each."""
    from distributed import Nanny, Scheduler, SpecCluster

    def worker(number):
        host, each = number * hosts // nworkers, len(devices) // hosts
        own, first = devices[host * each : (host + 1) * each], number % each
        apart = _APART | {"NCCL_HOSTID": f"host{host}"} if hosts > 1 else {}
        environment = (env or {}) | {"CUDA_VISIBLE_DEVICES": ",".join([*own[first:], *own[:first]])} | apart
        return {"cls": Nanny, "options": {"nthreads": 1, "env": environment, "silence_logs": options["silence_logs"]}}

    scheduler = {"cls": Scheduler, "options": {"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1", "port": 0}}
    return SpecCluster({number: worker(number) for number in range(nworkers)}, scheduler, silence_logs=50)


@contextlib.contextmanager
def started(nworkers, protocol="ucx", hosts=1, **options):
    """Yield a client of a cluster with one worker process a GPU, the machine as one host or in the place of several."""
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    options = {"dashboard_address": "127.0.0.1:0", "silence_logs": 50} | options
    # Of those that this process may use: several can test on one host at the same time.
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
    with (
        LocalCUDACluster(CUDA_VISIBLE_DEVICES=devices[:nworkers], protocol=protocol, **options)
        if nworkers <= len(devices) and hosts == 1
        else sharing(nworkers, devices[:nworkers], hosts=hosts, **options) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(nworkers, timeout=60)
        yield client


@pytest.fixture(autouse=True)
def engine(request):
    """Name of the engine that multiplies where a test does not say otherwise."""
    with dask.config.set({"distmm.engine": request.param}):
        yield request.param


@pytest.fixture(scope="session")
def start():
    return started


@pytest.fixture(scope="session")
def clusters(tmp_path_factory):
    """Return the client of a shared cluster with so many workers; only the latest one is kept."""

    def cut_into_pieces():
        # Products of these sizes fill no GPU, so that what is pulled would never be cut.
        from dask_distmm.planning import cuts as extents
        from dask_distmm.planning import schedule as block_schedule

        extents._FULL = (16, 16)
        # And triangles of symmetric products into strips.
        block_schedule._LEAST_SQUARE, block_schedule._NARROWEST = 64, 16

    stack, at = contextlib.ExitStack(), [0, None]
    logs = tmp_path_factory.mktemp("cublasmp")

    def get(nworkers):
        if at[0] != nworkers:
            stack.close()
            environment = {"CUBLASMP_LOG_LEVEL": "5", "CUBLASMP_LOG_FILE": f"{logs}/%i.log"}
            at[:] = nworkers, stack.enter_context(started(nworkers, env=environment))
            at[1].run(cut_into_pieces)
        return at[1], logs

    yield get
    stack.close()
