"""Run Dask's own tests of matrix products with dask_distmm enabled, on a cluster of worker processes.

    python tests/run_dask_tests.py [--baseline] [--all] [pytest arguments]

Takes the tests from the installed Dask: of ``test_linalg`` and others those that multiply or factorize Dask arrays.
Norms and ``einsum`` (which Dask does chunk by chunk) come to nothing that could be routed here, and tests that Dask
refuses some chunks fail, as these are taken here. ``test_lu_2`` multiplies its hundred small chunks for long, and one
test of tensordot 1 GiB of zero strides (``test_contraction.py`` has as many axes, and less in them). Work
of any size is routed here (``minimum-flops`` 0), and ``assert_eq`` computes on the cluster instead of in this
thread. Prints how many collective runs took place; none is a failure. Of a test with many parameters `SOME` are
run, or ``--all``. ``--baseline`` does the same without dask_distmm, to tell its failures from Dask's.
"""

from __future__ import annotations

import sys
import time

import dask
import dask.array
import dask.array.utils
import pytest
from distributed import Client, LocalCluster
from scripts import count_runs

import dask_distmm

MODULES = ("test_routines", "test_linalg", "test_array_core", "test_array_function", "test_gufunc", "test_masked")
# Of a matrix of rank 1, as one test has it, the second singular vector is rounding: two computations have two.
NAMES = (
    "not norm and not lu_2 and not lu_errors and not triangular_errors and not NotImplementedError and "
    "not more_than_26_dims and not svd_flip and not svd_incompatible and not einsum and not invert and "
    "not full_matrices and not svd_compressed_compute and "
    "(matmul or dot or tensordot or linalg or lu or solve or cholesky or inv or lstsq or svd or qr or cov or corrcoef)"
)
SOME = 1


def compute_on_the_cluster() -> None:
    """Make ``assert_eq`` use the default client."""
    function = dask.array.utils.assert_eq
    function.__defaults__ = tuple(None if value == "sync" else value for value in function.__defaults__)


def forget_released(dask_scheduler) -> int:
    """Forget tasks that nobody wants; arrays of unknown chunks leave some behind, with or without us."""
    unwanted = {key: "forgotten" for key, ts in dask_scheduler.tasks.items() if ts.state == "released"}
    dask_scheduler.transitions(unwanted, stimulus_id="test-over")
    return len(dask_scheduler.tasks)


class SomeOfEach:
    """Leaves of each test at most `SOME` sets of parameters, evenly spread."""

    def pytest_collection_modifyitems(self, config, items):
        tests = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = [item for found in tests.values() for item in found[:: -(-len(found) // SOME)]]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


class ClientOfItsOwn:
    """A client for each test, whose end makes the scheduler forget the test's tasks.

    Many of Dask's tests give the same name to different arrays, which is fine in one thread and wrong on a
    cluster that still holds the array of the test before.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        with Client(self.cluster):
            result = yield
        with Client(self.cluster, set_as_default=False) as client:
            deadline = time.monotonic() + 120
            while client.run_on_scheduler(forget_released):
                assert time.monotonic() < deadline, "tasks were left on the scheduler"
                time.sleep(0.005)
        return result


def main(arguments: list[str]) -> int:
    baseline = "--baseline" in arguments
    some = [] if "--all" in arguments else [SomeOfEach()]
    arguments = [argument for argument in arguments if argument not in ("--baseline", "--all")]
    compute_on_the_cluster()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        dask.config.set({"distmm.minimum-flops": 0}),
    ):
        if not baseline:
            dask_distmm.enable()
        status = pytest.main(
            [
                "-p", "no:cacheprovider", "--assert", "plain", "-q", "--pyargs", "-c", "/dev/null", "--rootdir", "/",
                "-k", NAMES, "-W", "ignore", "--timeout", "300",
                *(f"dask.array.tests.{module}" for module in MODULES), *arguments,
            ],
            plugins=[ClientOfItsOwn(cluster), *some],
        )  # fmt: skip
        dask_distmm.disable()
        with Client(cluster) as client:
            runs = client.run_on_scheduler(count_runs)
    print(f"collective runs: {runs}")
    return int(status) if runs or baseline else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
