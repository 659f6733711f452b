"""The gate before a collective, the groups of ranks that keep something, the watchdog of stuck processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.engines.base import Ended, settle
from dask_distmm.engines.entry import EXIT_STUCK, CollectiveEntry, watchdog
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.errors import EngineError
from dask_distmm.programs.steps import Key
from dask_distmm.runtime.freezing import RankGroups


def new_gate(nranks):
    return CollectiveEntry(SimpleNamespace(ranks=range(nranks)), 0, None, Ended())


@given(st.permutations(range(4)))
def test_nobody_goes_in_before_all_are_there(order):
    gate = new_gate(4)
    futures = []
    for rank in order:
        assert not any(future.done() for future in futures)
        futures.append(gate.entered(rank))
    assert all(future.result(0) is None for future in futures)
    assert not gate.close(RuntimeError("too late"))
    assert futures[0].result(0) is None


def test_a_closed_gate_stays_closed():
    gate = new_gate(2)
    waiting = gate.entered(1)
    assert gate.close(RuntimeError("a rank is gone"))
    assert gate.close(RuntimeError("another reason"))
    for future in (waiting, gate.entered(0)):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            future.result(0)


def test_asking_twice_counts_once():
    gate = new_gate(2)
    assert not gate.entered(1).done()
    assert not gate.entered(1).done()
    assert gate.entered(0).done()


def test_open_and_close_at_once_is_one_of_both():
    for _ in range(200):
        gate = new_gate(1)
        threads = [
            threading.Thread(target=gate.entered, args=(0,)),
            threading.Thread(target=gate.close, args=(RuntimeError("closed"),)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gate.opened.done()


def test_groups_keep_the_latest():
    groups = RankGroups()
    first = groups.use("cublasmp", ("a", "b"), meets=True)
    second = groups.use("cublasmp", ("b", "a"), meets=True)
    assert first.number != second.number
    assert groups.use("cublasmp", ("a", "b"), meets=True) == first
    assert groups.surplus(2) == []
    assert groups.surplus(1) == [second]
    assert groups.orders(["cublasmp"]) == [("a", "b")]
    assert groups.orders(["other"]) == []
    third = groups.use("cublasmp", ("c",), meets=True)
    assert groups.lose("a") == [first]
    assert groups.drop(first.number) is None
    assert groups.drop(third.number) == third
    assert len(groups) == 0
    assert groups.use("cublasmp", ("a", "b"), meets=True).number > third.number


def test_groups_that_keep_too_much_leave():
    groups = RankGroups()
    first, second, third = (
        groups.use("cublasmp", workers, meets=True) for workers in (("a", "b"), ("c", "d"), ("b", "a"))
    )
    for group, size in ((first, 40), (second, 90), (third, 50)):
        groups.keeps(group.number, size)
    assert groups.surplus(4, 100) == []
    assert groups.surplus(4, 89) == [first, second]  # the oldest of those who share a worker with too much
    assert groups.orders(["cublasmp"]) == [("b", "a")]
    assert groups.surplus(4, 10) == []  # the latest stays
    fourth = groups.use("cublasmp", ("a", "b"), meets=True)
    assert fourth.number > third.number
    assert groups.surplus(4, 50) == []  # it keeps nothing yet
    groups.keeps(fourth.number, 1)
    assert groups.surplus(4, 50) == [third]


def test_a_stuck_process_ends_itself():
    program = (
        "import logging, time; logging.basicConfig(); from dask_distmm.engines.entry import watchdog\n"
        "watchdog(120, 'this one').cancel(); watchdog(0.2, 'a collective'); time.sleep(120)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == EXIT_STUCK
    assert "a collective does not end" in done.stderr


def test_a_watchdog_that_is_called_off_does_nothing():
    dog = watchdog(60, "nothing")
    dog.cancel()
    dog.join(30)
    assert not dog.is_alive()


class Late(Future):
    """Another thread completes it between a look and what follows."""

    def done(self):
        if not (found := super().done()):
            self.set_result("first")
        return found


def test_a_run_may_end_while_a_rank_publishes():
    """An event loop that ends a run must not be kept from the rest by a rank that is faster."""
    assert settle(future := Future(), 1)
    assert not settle(future, error=EngineError("late"))
    assert future.result() == 1
    exchange = Transport([0, 1], None, lambda: None)
    futures = exchange._futures = {("x", number): Late() for number in range(3)}
    exchange.abort(EngineError("enough"))
    assert [str(future.exception()) for future in futures.values()] == ["enough"] * 3
    exchange.publish(Key("x", 1), ())
    assert str(exchange.published("x", np.full((1, 6), 7)).exception()) == "enough"


def test_only_communicators_know_an_order_of_ranks():
    groups = RankGroups()
    pulling = groups.use("peer", ("b", "a"), meets=False)
    assert groups.use("peer", ("a", "b"), meets=False) == pulling
    groups.use("cublasmp", ("b", "a"), meets=True)
    assert groups.orders(["peer", "cublasmp"]) == [("b", "a")]
    assert groups.orders(["peer"]) == []
    assert set(groups.lose("b")) == {pulling, (2, "cublasmp", ("b", "a"), True)}
