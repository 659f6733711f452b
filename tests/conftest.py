"""Clusters for the tests: one of worker processes and one in this process, shared by a session.

Every test that uses them ends with a look at all workers and the scheduler: nothing of ours may be left. Every module,
and every test that kills or stops workers, ends with another look: no process may hold more files, listening sockets,
threads or children than before.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import dask
import dask.array as da
import pytest
from distributed import Client, LocalCluster
from distributed.utils import get_mp_context
from faults import remove_faults
from hangs import MARGIN, watched
from hypothesis import settings
from leaks import assert_nothing_left, no_leaks
from threadpoolctl import threadpool_limits

import dask_distmm
from dask_distmm import matmul
from dask_distmm.engines import entry
from dask_distmm.engines.entry import watchdog
from dask_distmm.runtime import worker

# Files that take longest; processes share them out in this order, so that none is left over at the end. Before them
# the one that looks at a setting of the whole process, which runs of other tests change.
LONG = (
    "test_blas test_waves test_iterative test_docs test_demo test_peer_eigh_emulated test_random_programs test_stacks "
    "test_sparse test_spectral test_beyond_memory test_cross_memory test_public_functions test_linalg "
    "test_solver_peer test_peer_processes test_xarray test_factorizations test_cluster test_routed test_rewritten "
    "test_peer_eigh_processes test_peer_emulated test_random test_versions test_series test_numbers test_refined "
    "test_chaos test_network test_dask_suite test_lists test_numpy_meaning test_regions test_compat test_recipes "
    "test_replicas test_groups test_arguments test_batched test_stops test_types test_cublasmp_emulated "
    "test_benchmarks test_loading test_overwrite test_bare_workers test_peer_streams_emulated test_projects "
    "test_odd_operands test_multiply test_faults test_programs test_numpy test_routes test_structure test_stateful "
    "test_nccl_emulated test_algorithms test_contraction"
).split()

# Worker processes of clusters are forked from a process that has the libraries: they start in a tenth of the time that
# imports of NumPy, numba and pandas take in each. The package itself each of them imports. What users start as programs
# or by commands does all that itself in the tests, too.
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
get_mp_context().set_forkserver_preload(["distributed.nanny", "dask.array", "scipy.linalg", "scipy.sparse"])

# Four processes of tests share two cores: programs that they start multiply in one thread, as worker processes do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No test looks at profiles or ticks of all workers; with these, idle clusters of the session take a third of two cores.
dask.config.set({
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.monitor-interval": "500ms",
    # Which test has the twentieth product that is left to Dask differs between runs.
    "distmm.hints": False,
})  # fmt: skip


def _patient_watchdog(seconds: float, what: str) -> threading.Timer:
    return watchdog(max(seconds, 1000.0), what)


# Where ranks are threads of the tests' process, what is stuck fails its test: the process must not exit, also because a
# busy machine stood still for some seconds.
entry.watchdog = worker.watchdog = _patient_watchdog

# Small matrices gain nothing from a second thread of BLAS, and wait long for it where two processes test on two cores.
threadpool_limits(1, "blas")

# A busy machine makes no property false. What hangs is ended by pytest-timeout.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


# A test with more cases than this runs as many of them, drawn anew in each run; with --all it runs all of them. Of one
# whose cases take seconds the marker `cases` says how many. Of all tests of faults, which kill and stop processes, so
# many cases are run.
CASES, FAULTS = 6, 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"run all cases of each test, not {CASES} drawn at random")
    parser.addoption("--draw", metavar="SEED", help="draw the same cases as the run whose header named SEED")


def pytest_configure(config: pytest.Config) -> None:
    # Processes of xdist inherit it, and draw the same cases.
    os.environ["DISTMM_TEST_DRAW"] = config.getoption("--draw") or os.environ.get(
        "DISTMM_TEST_DRAW", f"{time.time_ns()}"
    )


def pytest_collection_finish() -> None:
    """Take what collection has made out of the sight of the garbage collector, and call it a tenth as often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


def pytest_report_header(config: pytest.Config) -> str:
    drawn = f"--draw {os.environ['DISTMM_TEST_DRAW']} draws the same {CASES} cases of each test"
    return "cases: all" if config.getoption("--all") else f"cases: {drawn}, --all takes all"


def _drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return some of each test's cases, and `FAULTS` of all tests of faults; of tests for GPUs all."""
    cases = collections.defaultdict(list)
    for item in items:
        cases["faults" if item.get_closest_marker("faults") else item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for name, group in cases.items():
        rng = random.Random(f"{os.environ['DISTMM_TEST_DRAW']} {name}")
        marker = group[0].get_closest_marker("cases")
        some = marker.args[0] if marker else CASES
        most = len(group) if "gpu/" in name else FAULTS if name == "faults" else some
        kept.update(rng.sample(group, min(most, len(group))))
    return [item for item in items if item in kept]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw cases, and put the files that take longest first."""
    # A test that was asked for by its full name runs.
    if not config.getoption("--all") and not any("[" in argument for argument in config.args):
        items[:] = _drawn(items)
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True)
def _hangs_are_shown(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("timeout")
    with watched(float(marker.args[0] if marker else request.config.getini("timeout")) - MARGIN):
        yield


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    # A client that is closed while another one lives leaves its mark here.
    dask.config.config.pop("scheduler", None)
    yield
    dask_distmm.disable()
    assert not dask_distmm.is_enabled()


@pytest.fixture
def terminal() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal, also where pytest is in a shell's background; programs that are started do too.

    All is as before afterwards: a command that fails ends its program, and switches off logging and Ctrl-C.
    """
    before, disabled = signal.signal(signal.SIGINT, signal.default_int_handler), logging.root.manager.disable
    yield
    signal.signal(signal.SIGINT, before)
    logging.disable(disabled)


@pytest.fixture(scope="session")
def process_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", memory_limit="2GiB"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def _process_leaks(process_cluster: LocalCluster) -> Iterator[None]:
    with no_leaks(process_cluster):
        yield


@pytest.fixture
def client(process_cluster: LocalCluster, _process_leaks: None) -> Iterator[Client]:
    """A client of three worker processes of one thread."""
    with Client(process_cluster) as client:
        yield client
        assert_nothing_left(client)


@pytest.fixture(scope="session")
def inproc_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=4, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", memory_limit=0
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def _inproc_leaks(inproc_cluster: LocalCluster) -> Iterator[None]:
    with no_leaks(inproc_cluster):
        yield


@pytest.fixture
def inproc_client(inproc_cluster: LocalCluster, _inproc_leaks: None) -> Iterator[Client]:
    """A client of four workers in this process."""
    with Client(inproc_cluster) as client:
        yield client
        assert_nothing_left(client)


@pytest.fixture
def take_all() -> Iterator[None]:
    """Route products of any size here."""
    with dask.config.set({"distmm.minimum-flops": 0}):
        yield


@pytest.fixture(scope="session")
def fault_cluster() -> Iterator[LocalCluster]:
    # LocalCluster gives up a worker that is not there 15 s after an earlier one of its name has gone, even if
    # it has been back meanwhile and was killed again just now.
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        cluster = LocalCluster(
            n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", memory_limit="2GiB"
        )
        yield cluster
        # Closing nannies whose workers were killed many times can take for ever; Dask ends them at exit.
        with contextlib.suppress(TimeoutError):
            cluster.close(timeout=20)


@pytest.fixture
def fault_client(fault_cluster: LocalCluster) -> Iterator[Client]:
    """A client of three worker processes that may be killed."""
    with Client(fault_cluster) as client:
        client.wait_for_workers(3, timeout=120)
        # Warm: the plugins are there before anything goes wrong.
        x = da.ones((30, 30), chunks=10)
        matmul(x, x).compute()
        with no_leaks(fault_cluster):
            yield client
            client.wait_for_workers(3, timeout=120)
            client.run(remove_faults)
            assert_nothing_left(client)
