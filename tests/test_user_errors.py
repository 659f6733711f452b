"""Errors of a user's own functions: they arrive as from Dask's tasks, unopened, and end or retry what Dask would."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator

import dask
import dask.array as da
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster, get_worker
from leaks import assert_nothing_left
from run_events import events_after, newest_run
from test_waves import in_waves

from dask_distmm import EngineError, matmul


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b


class Locked(Exception):
    """Can't be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Exits(Exception):
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return sys.exit, (3,)


class Mute(Exception):
    """Has no text."""

    def __str__(self):
        raise ZeroDivisionError


class Watched(Exception):
    """Notes who unpickles it."""

    def __reduce__(self):
        return opened, self.args


OPENED = []


def opened(*args):
    OPENED.append([frame.filename for frame in traceback.extract_stack()])
    return Watched(*args)


@pytest.fixture(scope="module")
def cluster_client() -> Iterator[Client]:
    options = {"n_workers": 2, "threads_per_worker": 2, "memory_limit": "2GiB"}
    with (
        # Panels of tiny products are used as they lie: only such chunks are made by ranks.
        dask.config.set({"distmm.numpy.pack-below": 0}),
        LocalCluster(dashboard_address="127.0.0.1:0", **options) as cluster,
        Client(cluster) as client,
    ):
        yield client
        assert_nothing_left(client)


def failing(make):
    def fail(x, *args):
        if x.any():
            raise make()
        return x

    return fail


def by_dask(make):
    return da.ones((8, 8), chunks=4).map_blocks(failing(make), dtype=float).sum()


def by_ranks(make):
    x = da.ones((6000, 60), chunks=(300, 60)).map_blocks(failing(make), dtype=float)
    return in_waves(x.T, x, by_ranks=True)


def by_epilog(make):
    x = da.ones((60, 60), chunks=30)
    return matmul(x, x, epilog=failing(make))


def error_of(client, array, **options):
    """The error of a result with its traceback. (One that is raised holds its future, which keeps the graph.)"""
    future = client.compute(array, **options)
    return future.exception(timeout=120).with_traceback(future.traceback())


ERRORS = [
    *(lambda kind=kind: kind("it is torn") for kind in (OSError, TimeoutError, ConnectionError, ArithmeticError)),
    lambda: StopIteration("no more"),
    lambda: TwoArguments("one", "two"),
    lambda: Locked("it is torn"),
    lambda: ValueError("x" * 10**7),
]


def test_they_arrive_as_from_dask(cluster_client):
    """The same class, text and innermost frame; one run, and no more than a short text of it is kept."""
    for make in ERRORS:
        expected = error_of(cluster_client, by_dask(make))
        for array in (by_ranks(make), by_epilog(make)):
            before = newest_run(cluster_client)
            found = error_of(cluster_client, array)
            assert (type(found), str(found)) == (type(expected), str(expected))
            frames, right = (traceback.extract_tb(error.__traceback__) for error in (found, expected))
            assert (frames[-1].name, frames[-1].line) == (right[-1].name, right[-1].line)
            (event,) = events_after(cluster_client, before, "failed")
            assert not events_after(cluster_client, before, "restart")
            assert type(make()).__name__ in event["reason"]
            assert len(event["reason"]) < 1200
    texts = cluster_client.run_on_scheduler(kept_texts)
    for state in cluster_client.run(lambda dask_worker: dask_worker.extensions["distmm"].history._to_dict()).values():
        texts += [event["what"] for event in state]
    assert max(map(len, texts)) < 1200


def kept_texts(dask_scheduler):
    plugin = dask_scheduler.plugins["distmm"]
    return [record.reason for record in plugin.records] + [event["what"] for event in plugin.history._to_dict()]


def test_what_ends_processes_ends_none(cluster_client):
    """What would end a process, or stop a coroutine, and what can't be sent at all: one error that names it."""
    before = newest_run(cluster_client)
    processes = cluster_client.run(lambda dask_worker: dask_worker.id)
    kinds = [GeneratorExit, KeyboardInterrupt, SystemExit, asyncio.CancelledError, Exits, Mute]
    for kind in kinds:
        for array in (by_ranks(lambda kind=kind: kind("enough")), by_epilog(lambda kind=kind: kind("enough"))):
            found = error_of(cluster_client, array)
            assert type(found) is EngineError
            assert kind.__name__ in str(found)
            assert traceback.extract_tb(found.__traceback__)[-1].name == "fail"
    assert not events_after(cluster_client, before, "restart")
    assert cluster_client.run(lambda dask_worker: dask_worker.id) == processes


def test_only_the_client_opens_them(cluster_client):
    """In the process of the scheduler and the client each error is unpickled once, and not by us."""
    for array in (by_ranks(lambda: Watched("it is torn")), by_epilog(lambda: Watched("it is torn"))):
        OPENED.clear()
        assert type(error_of(cluster_client, array)) is Watched
        assert OPENED
        for files in OPENED:
            assert not any("dask_distmm" in file or file.endswith("scheduler.py") for file in files)


def flaky(failures):
    """A function that fails so often on each worker for each chunk before it is right, and counts its calls there."""

    def read(x, block_info=None):
        worker, place = get_worker(), block_info[0]["chunk-location"]
        calls = worker.__dict__.setdefault("_flaky_calls", {})
        calls[place] = calls.get(place, 0) + 1
        if calls[place] <= failures:
            raise OSError("it is torn")
        return x

    return read


def calls(client):
    """The calls of `flaky` for each place by worker; they are forgotten."""
    return client.run(lambda dask_worker: dask_worker.__dict__.pop("_flaky_calls", {}))


def test_retries_hold_for_chunks_that_ranks_make(cluster_client):
    """Each chunk as often as a task of Dask's; restrictions to workers hold, too."""
    calls(cluster_client)
    x = da.random.default_rng(1).random((6000, 60), chunks=(300, 60))
    values = x.compute(scheduler="sync")

    def product(failures):
        y = x.map_blocks(flaky(failures), dtype=float)
        return in_waves(y.T, y, by_ranks=True)

    address = sorted(cluster_client.nthreads())[0]
    future = cluster_client.compute(product(2), retries=2, workers=[address])
    assert_product(values.T, values, future.result())
    found = calls(cluster_client)
    assert {who: len(places) for who, places in found.items() if places} == {address: 20}
    # Made for A and for B at a time, or for each; the second time it is right at once.
    assert set(found[address].values()) <= {3, 4}
    assert str(error_of(cluster_client, product(9), retries=2)) == "it is torn"
    assert max(n for places in calls(cluster_client).values() for n in places.values()) <= 6
    assert str(error_of(cluster_client, product(1))) == "it is torn"
    calls(cluster_client)


FAILED = []


def once(x):
    """Fail once in each process."""
    if x.any() and not FAILED:
        FAILED.append(1)
        raise OSError("it is torn")
    return x


def forget_failures():
    FAILED.clear()


def test_retries_hold_for_runs(cluster_client):
    """An epilog that fails makes a run begin again, as often as is allowed."""
    x = da.ones((60, 60), chunks=30)
    before = newest_run(cluster_client)
    # Both workers fail once, at the same time or one after the other.
    assert cluster_client.compute(matmul(x, x, epilog=once), retries=2).result()[0, 0] == 60
    assert 1 <= len(events_after(cluster_client, before, "restart")) <= 2
    cluster_client.run(forget_failures)
    assert str(error_of(cluster_client, matmul(x, x, alpha=2, epilog=once))) == "it is torn"
