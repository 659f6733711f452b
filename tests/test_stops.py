"""Workers that stand still, leave, come or differ while a multiply runs: the right result or one error, in time."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import threading
import time
from collections.abc import Iterator

import dask
import msgpack
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster, wait
from faults import inject
from leaks import assert_nothing_left
from matrices import LIMIT, operands, until
from run_events import until_running

from dask_distmm import DistMMError, RunFailedError, explain, matmul
from dask_distmm.errors import NoWorkersError
from dask_distmm.runtime.messages import NAME

pytestmark = pytest.mark.faults

# Short limits, so that what must end does so while somebody watches.
SHORT = {"distmm.timeouts": {"vote": "6s", "transfer": "6s", "silence": "6s", "grace": "5s"}}


def works(client) -> None:
    a, b, x, y = operands()
    assert_product(a, b, client.compute(matmul(x, y, method="summa")).result(timeout=120))


@contextlib.contextmanager
def continued(pid: int) -> Iterator[None]:
    """Let a process go on afterwards, come what may."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("point", ["vote", "execute", "tiles"])
def test_a_rank_stands_still_for_a_while(fault_client, point):
    address, pid = sorted(fault_client.run(os.getpid).items())[1]
    fault_client.run(inject, point, "stop", workers=[address])
    a, b, x, y = operands()
    with continued(pid):
        future = fault_client.compute(matmul(x, y, method="summa"))
        until(lambda: stopped(pid))
        time.sleep(1)
        assert not future.done()
    assert_product(a, b, future.result(timeout=120))


@pytest.mark.parametrize(("point", "victim"), [("vote", 0), ("execute", 1), ("tiles", 2)])
def test_a_rank_stands_still_for_too_long(fault_client, point, victim, record_property):
    """One error names it; awake again, the same processes multiply."""
    before = fault_client.run(os.getpid)
    address, pid = sorted(before.items())[victim]
    fault_client.run(inject, point, "stop", workers=[address])
    _, _, x, y = operands()
    with continued(pid), dask.config.set(SHORT):
        started = time.monotonic()
        with pytest.raises(RunFailedError) as caught:
            fault_client.compute(matmul(x, y, method="summa")).result(timeout=120)
        record_property("seconds", round(time.monotonic() - started, 1))
    error = caught.value
    assert address in error.args[0]
    assert error.phase == ("voting" if point == "vote" else "running")
    assert error.history[address] == "it does not answer"
    others = [told for who, told in error.history.items() if who != address]
    assert len(others) == 2
    assert all("asked for a vote at " in told for told in others)
    assert f"{address}: it does not answer" in str(error)
    works(fault_client)
    assert fault_client.run(os.getpid) == before


@pytest.fixture
def small() -> Iterator[Client]:
    """Four workers in this process that no other test needs."""
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        works(client)
        yield client
        assert_nothing_left(client)


@pytest.fixture
def go(monkeypatch) -> Iterator[threading.Event]:
    """Runs whose ranks wait for this event before they work."""
    from dask_distmm.engines.programs.job import ProgramJob

    execute, go = ProgramJob.execute, threading.Event()

    def execute_then(self):
        assert go.wait(LIMIT)
        return execute(self)

    monkeypatch.setattr(ProgramJob, "execute", execute_then)
    yield go
    go.set()


def test_members_of_a_run_are_not_scaled_away(small, go):
    a, b, x, y = operands()
    members = sorted(small.nthreads())[:3]
    future = small.compute(matmul(x, y, method="summa", workers=members))
    assert set(until_running(small)) >= set(members)
    bystanders = set(small.nthreads()) - set(until_running(small))
    offered = small.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=4))
    assert set(offered) == bystanders
    go.set()
    assert_product(a, b, future.result(timeout=120))
    del future
    until(lambda: len(small.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=4))) == 4)


def test_a_member_is_retired_by_name(small, go):
    """Dask lets nobody veto that: what is lost is computed again."""
    a, b, x, y = operands()
    future = small.compute(matmul(x, y, method="summa"))
    member = until_running(small)[1]
    retired = threading.Thread(target=small.retire_workers, args=([member],))
    retired.start()
    until(lambda: member not in small.nthreads())
    go.set()
    retired.join()
    assert_product(a, b, future.result(timeout=120))
    assert member not in small.nthreads()


def test_a_worker_that_joins_takes_part_in_the_next_run(small, go):
    a, b, x, y = operands()
    before = set(small.nthreads())
    first = matmul(x, y, method="summa")
    future = small.compute(first)
    until_running(small)
    small.cluster.scale(5)
    small.wait_for_workers(5, timeout=120)
    assert until_running(small)
    assert set(until_running(small)) <= before
    go.set()
    assert_product(a, b, future.result(timeout=120))
    a, b, x, y = operands()
    future = small.compute(matmul(x, y, method="allgather"))
    assert set(until_running(small)) > before
    assert_product(a, b, future.result(timeout=120))


def test_the_client_goes_while_it_runs(small, go):
    _, _, x, y = operands()
    with Client(small.cluster, set_as_default=False) as other:
        future = other.compute(matmul(x, y))
        until_running(small)
    go.set()
    del future
    assert_nothing_left(small)
    works(small)


def test_everything_is_restarted_while_it_runs(fault_client):
    _, _, x, y = operands()
    for address in fault_client.nthreads():
        fault_client.run(inject, "execute", "sleep", 0, 5.0, workers=[address])
    future = fault_client.compute(matmul(x, y, method="summa"))
    until_running(fault_client)
    fault_client.restart(timeout=120)
    assert future.status == "cancelled"
    assert_nothing_left(fault_client)
    works(fault_client)


def test_cancelled_twenty_times(fault_client):
    rng = np.random.default_rng()
    for _ in range(20):
        _, _, x, y = operands()
        future = fault_client.compute(matmul(x, y))
        time.sleep(float(rng.uniform(0, 0.12)))
        future.cancel()
        del future
    works(fault_client)


def test_a_function_of_the_user_fails_on_one_rank(fault_client):
    """Its own error, which names the worker; the same processes go on."""
    before = fault_client.run(os.getpid)
    address = sorted(before)[1]

    def touchy(acc, pid=before[address]):
        import os

        if os.getpid() == pid:
            raise ArithmeticError("the function's own")
        return acc

    _, _, x, y = operands()
    with pytest.raises(ArithmeticError, match="the function's own") as caught:
        fault_client.compute(matmul(x, y, method="summa", epilog=touchy)).result(timeout=120)
    assert caught.value.__notes__ == [f"the epilog touchy has failed on {address}"]
    assert [entry.name for entry in caught.traceback][-1] == "touchy"
    works(fault_client)
    assert fault_client.run(os.getpid) == before


def test_clients_that_share_workers(fault_client):
    """Overlapping rosters on workers of one thread, many runs each: all right, in one order everywhere."""
    addresses = sorted(fault_client.nthreads())
    wrong = []

    def work(number: int) -> None:
        with Client(fault_client.scheduler.address, set_as_default=False) as own:
            mine = [addresses[number % 3], addresses[(number + 1) % 3]]
            for _ in range(20):
                a, b, x, y = operands()
                c = matmul(x, y, method="summa", workers=mine)
                try:
                    assert_product(a, b, own.compute(c).result(timeout=120))
                except BaseException as error:
                    wrong.append(error)
                    return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    orders = fault_client.run(runs_in_order)
    assert all(order == sorted(order) for order in orders.values())
    assert sum(map(len, orders.values())) >= 40 * 3


def runs_in_order(dask_worker) -> list[int]:
    events = dask_worker.extensions[NAME].history._to_dict()
    return [event["run"] for event in events if event["what"] == "began"]


def pretend(version: str) -> None:
    from dask_distmm.runtime import worker

    worker.__version__ = version


def forget_what_workers_said(dask_scheduler) -> None:
    dask_scheduler.plugins[NAME].roster.clear()


def test_another_version_on_one_worker(fault_client):
    from dask_distmm import __version__

    address = sorted(fault_client.nthreads())[1]
    _, _, x, y = operands()
    try:
        fault_client.run(pretend, "0.0.1", workers=[address])
        fault_client.run_on_scheduler(forget_what_workers_said)
        with pytest.raises(DistMMError, match=f"different versions of dask_distmm.*0.0.1 on {address}") as caught:
            fault_client.compute(matmul(x, y)).result(timeout=120)
        assert __version__ in str(caught.value)
    finally:
        fault_client.run(pretend, __version__, workers=[address])
        fault_client.run_on_scheduler(forget_what_workers_said)
    works(fault_client)


def deafen(dask_worker):
    """What a worker without the plugin does: it does not know our calls."""
    side = dask_worker.extensions[NAME]
    for op in side.handlers:
        if op.startswith(NAME):
            del dask_worker.handlers[op]


def hear(dask_worker):
    dask_worker.handlers.update(dask_worker.extensions[NAME].handlers)


def test_a_worker_without_the_plugin_is_left_out(fault_client):
    address = sorted(fault_client.nthreads())[1]
    others = [worker for worker in fault_client.nthreads() if worker != address]
    a, b, x, y = operands()
    x, y = (fault_client.persist(z, workers=others) for z in (x, y))
    wait([x, y])
    try:
        fault_client.run(deafen, workers=[address])
        fault_client.run_on_scheduler(forget_what_workers_said)
        c = fault_client.persist(matmul(x, y, method="summa"))
        wait(c)
        assert address not in {who for found in fault_client.who_has(c).values() for who in found}
        assert_product(a, b, c.compute())
    finally:
        fault_client.run(hear, workers=[address])
        fault_client.run_on_scheduler(forget_what_workers_said)
    works(fault_client)


def test_the_last_events_are_in_a_dump(fault_client, tmp_path):
    works(fault_client)
    fault_client.dump_cluster_state(str(tmp_path / "dump"))
    with gzip.open(tmp_path / "dump.msgpack.gz") as file:
        state = msgpack.load(file, strict_map_key=False)
    newest = max(event["run"] for event in state["scheduler"]["extensions"][NAME]["history"])
    for worker in state["workers"].values():
        events = [event["what"] for event in worker[NAME] if event["run"] == newest]
        assert events[:4] == ["asked for a vote", "voted OK", "began", "was done"]
    events = [e["what"] for e in state["scheduler"]["extensions"][NAME]["history"] if e["run"] == newest]
    assert events[0].startswith("start method=summa")
    assert events[-1].startswith("done seconds=")


def test_no_worker_is_there_yet():
    """The multiply is built all the same, as Dask's own would be; it runs when there are workers."""
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        a, b, x, y = operands()
        with pytest.raises(NoWorkersError, match="no running worker: start some"):
            explain(x, y)
        c = matmul(x, y, method="summa")
        cluster.scale(2)
        client.wait_for_workers(2, timeout=120)
        assert_product(a, b, client.compute(c).result(timeout=120))
