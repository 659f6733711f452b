"""Reads of another process' memory: arrays of any memory order, and all that can go wrong."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm import linalg, matmul
from dask_distmm.comms import cross_memory
from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.types import dtype_from_name


def _arrays(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    whole = rng.random((3000, 700))
    return [
        whole,
        whole.T,
        whole[:, 100:400],
        whole[5:2900, 13:600].T,
        whole[::2, :300],
        whole[100:101, :],
        rng.random(50_000),
        rng.random((300, 200)).astype(np.complex64),
        rng.random((300, 200)).astype(dtype_from_name("bfloat16")),
        np.empty((0, 7)),
    ]


def _lender(pipe: Any) -> None:
    arrays = _arrays(7)
    while (borrower := pipe.recv()) is not None:
        pipe.send(cross_memory.lend(arrays, borrower))


@pytest.fixture(scope="module")
def lender() -> Iterator[Any]:
    """Another process, which lends `_arrays(7)`: it takes a place and answers with a loan."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_lender, args=(there,), daemon=True)
    process.start()
    yield here
    here.send(None)
    process.join(120)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cross_memory.process_name():
        pytest.skip("processes can't read each other's memory here")
    monkeypatch.setattr(cross_memory, "_refused", False)


def _ask(lender: Any, borrower: str) -> Any:
    lender.send(borrower)
    return lender.recv()


def test_arrays_arrive_as_they_are(lender):
    borrowed = cross_memory.borrow(_ask(lender, cross_memory.process_name()))
    for found, expected in zip(borrowed, _arrays(7), strict=True):
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
        assert found.size == 0 or (found.strides[0] >= found.strides[-1]) == (
            expected.strides[0] >= expected.strides[-1] or expected.shape[0] == 1
        )


def test_more_than_one_call_reads(lender, monkeypatch):
    """The system may stop anywhere: the rest is read from there."""
    libc = cross_memory._libc()

    class Short:
        """Reads at most 100,000 bytes in a call."""

        @staticmethod
        def process_vm_readv(process, local, lines, remote, count, flags):
            size = ctypes.c_uint64.from_address(local + 8)
            size.value = min(size.value, 100_000)
            return libc.process_vm_readv(process, local, 1, remote, count, flags)

    loan = _ask(lender, cross_memory.process_name())
    monkeypatch.setattr(cross_memory, "_libc", lambda: Short)
    for found, expected in zip(cross_memory.borrow(loan), _arrays(7), strict=True):
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [5_000, 70_000, 2**26])
def test_large_reads_are_shared_by_threads(lender, monkeypatch, size):
    used, read = set(), cross_memory._read_part

    def read_part(process, table):
        used.add(threading.get_ident())
        read(process, table)

    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(cross_memory, "_PART_BYTES", size)
        monkeypatch.setattr(cross_memory, "_readers", lambda: pool)
        monkeypatch.setattr(cross_memory, "_read_part", read_part)
        loan = _ask(lender, cross_memory.process_name())
        for found, expected in zip(cross_memory.borrow(loan), _arrays(7), strict=True):
            assert found.tobytes() == expected.tobytes()
        assert (len(used) > 1) == (size < 2**26)
        # An error of one thread is that of the read.
        _, *gone = loan
        with pytest.raises(OSError, match="can't be read"):
            cross_memory.borrow([2**22 + 1, *gone])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 30))
def test_parts_of_reads_cover_them_once(lengths, size):
    starts, places = np.cumsum(lengths) * 10, np.cumsum(lengths) - lengths
    expected = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    found = np.full(sum(lengths), -1)
    for some in cross_memory._parts(np.stack([places, starts, lengths], 1), size):
        assert some[:, 2].sum() < 2 * size
        for at, start, count in some.tolist():
            assert (found[at : at + count] == -1).all()
            found[at : at + count] = np.arange(start, start + count)
    np.testing.assert_array_equal(found, expected)


def test_nothing_is_lent_to_others(lender):
    home, _, number = cross_memory.process_name().rpartition(" ")
    assert _ask(lender, "") is None
    assert _ask(lender, f"elsewhere {number}") is None
    arrays = [np.ones((500, 500))]
    assert cross_memory.lend(arrays, cross_memory.process_name()) is None, "this process has them"
    other = f"{home} {int(number) + 1}"
    assert cross_memory.lend(arrays, other) is not None
    assert cross_memory.lend([np.ones((5, 5))], other) is None, "an answer has place for them"
    assert cross_memory.lend([np.ones((5000, 500))[:, :3]], other) is None, "three elements at a time"
    assert cross_memory.lend([np.ones((5000, 500))[:, ::2]], other) is None, "every second element"
    assert cross_memory.lend([np.ones((50, 50, 50))], other) is None


def test_a_process_that_ended_is_an_error_of_that_process_alone(lender):
    context = multiprocessing.get_context("spawn")
    gone = context.Process(target=os.getpid)
    gone.start()
    gone.join()
    _, *loan = _ask(lender, cross_memory.process_name())
    with pytest.raises(ProcessLookupError, match="can't be read"):
        cross_memory.borrow((gone.pid, *loan))
    assert cross_memory.process_name()


def test_another_process_of_the_same_number_is_refused(lender):
    process, address, proof, described = _ask(lender, cross_memory.process_name())
    with pytest.raises(PermissionError, match="not the one that lends"):
        cross_memory.borrow((process, address, proof[::-1], described))
    assert cross_memory.process_name() == "", "there is something wrong with this host"


def test_the_system_forbids_it(lender, monkeypatch):
    loan = _ask(lender, cross_memory.process_name())

    class Forbidden:
        @staticmethod
        def process_vm_readv(*args):
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(cross_memory, "_libc", lambda: Forbidden)
    with pytest.raises(PermissionError, match="can't be read"):
        cross_memory.borrow(loan)
    assert cross_memory.process_name() == ""


# Boards


def _shower(pipe: Any) -> None:
    """Lend on a board what is asked for, and answer on it what another board has."""
    board = cross_memory.Board()
    pipe.send(board.offer())
    reader = cross_memory.BoardReader(pipe.recv())
    kept = []
    while (what := pipe.recv()) is not None:
        if what == "arrays":
            kept.append(_arrays(7))
            board.lend(("part", 5), kept[-1])
            board.lend(("part", -6), [])
            board.lend(("other", 5), [kept[-1][0][:, ::2]])
            board.lend(("other", 6), [np.ones((2, 2, 2))])
            board.lend(("other", 7), [np.ones(1)] * 100)
        elif what == "many":
            kept.append(np.arange(9000.0))
            for number in range(9000):
                board.lend(("many", number), [kept[-1][number : number + 1]])
        else:
            for number in range(what):
                kept.append(reader.borrow(("there", number), lambda: None))
                board.lend(("back", number), kept[-1])
        pipe.send("done")


@pytest.fixture
def shown() -> Iterator[tuple[Any, cross_memory.Board, cross_memory.BoardReader]]:
    """Another process with a board, by a pipe; a board here, and the reader of the other one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_shower, args=(there,), daemon=True)
    process.start()
    board = cross_memory.Board()
    here.send(board.offer())
    yield here, board, cross_memory.BoardReader(here.recv())
    here.send(None)
    process.join(120)


def never() -> None:
    """Let a borrower wait."""


def test_a_board_has_arrays_by_their_keys(shown):
    pipe, _, reader = shown
    pipe.send("arrays")
    assert reader.borrow(("other", 5), never) is None, "they have to be asked for"
    assert reader.borrow(("other", 6), never) is None
    assert reader.borrow(("other", 7), never) is None
    assert reader.borrow(("part", -6), never) == []
    for again in (True, False):
        for found, one in zip(reader.borrow(("part", 5), never, again=again), _arrays(7), strict=True):
            assert found.dtype == one.dtype
            assert found.shape == one.shape
            assert found.tobytes() == one.tobytes()
    pipe.recv()


def test_processes_answer_each_other(shown):
    pipe, board, reader = shown
    numbers = np.random.default_rng().random((200, 3))
    pipe.send(200)
    for number, row in enumerate(numbers):
        if number % 50 == 0:
            time.sleep(0.01)  # the other one sleeps, and is woken
        board.lend(("there", number), [row, row[:1]])
        found = reader.borrow(("back", number), never)
        np.testing.assert_array_equal(found[0], row)
        np.testing.assert_array_equal(found[1], row[:1])
    pipe.recv()


def test_what_a_board_has_no_room_for_is_asked_for(shown):
    pipe, _, reader = shown
    pipe.send("many")
    pipe.recv()
    assert reader.borrow(("many", 3), never) is None
    pipe.send("many")
    pipe.recv()
    assert reader.borrow(("many", 8999), never) is None


def test_a_run_that_is_over_ends_the_waiting(shown):
    _, _, reader = shown
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise InterruptedError("the run was ended")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.borrow, ("part", 1), check)
        time.sleep(0.05)
        assert not waiting.done()
        over.set()
        with pytest.raises(InterruptedError):
            waiting.result(120)


def test_keys_that_a_board_has_no_room_for_are_refused(shown):
    _, board, _ = shown
    board.lend(("k" * 16, 1), [np.ones(3)])
    with pytest.raises(ProtocolError, match="'kkkkkkkkkkkkkkkkk' has 17 bytes: expected a kind of at most 16 bytes"):
        board.lend(("k" * 17, 1), [np.ones(3)])


def test_boards_of_others_are_refused(shown):
    board = cross_memory.Board()
    home, *place = board.offer()
    with pytest.raises(PermissionError, match="another host"):
        cross_memory.BoardReader([f"{home} elsewhere", *place])
    with pytest.raises(PermissionError, match="not the one that lends"):
        cross_memory.BoardReader([home, *place[:-1], bytes(16)])
    reader = cross_memory.BoardReader(board.offer())
    board.lend(("part", 1), [np.ones(3)])
    board.close()
    with pytest.raises(FileNotFoundError):
        cross_memory.BoardReader([home, *place])
    with open("/dev/zero", "rb") as file, pytest.raises(PermissionError, match="not the one that lends"):
        cross_memory.BoardReader([home, place[0], file.fileno(), *place[2:]])
    # It is read as long as it is mapped, but not out of a process that is another one.
    reader._loan = reader._loan[0], reader._loan[1], bytes(16)
    assert reader.borrow(("part", 1), never) is None


@pytest.mark.parametrize("allowed", [True, False])
def test_ranks_ask_for_what_they_can_not_read(client, allowed):
    a = np.random.default_rng().random((300, 20))
    x = da.from_array(a, chunks=(60, -1))
    with dask.config.set({"distmm.numpy.cross-memory": allowed}):
        r = linalg.qr(client.persist(x), "r").compute()
        g = linalg.cholesky(client.persist(da.from_array(a.T @ a, chunks=(7, 7))), method="columns").compute()
    np.testing.assert_allclose(r.T @ r, a.T @ a)
    np.testing.assert_allclose(g @ g.T, a.T @ a)


# Workers


def _count(dask_worker: Any) -> None:
    """Count what this worker borrows."""
    cross_memory.original, cross_memory.counted = cross_memory.borrow, []

    def counting(loan: Any) -> Any:
        found = cross_memory.original(loan)
        cross_memory.counted += [x.nbytes for x in found]
        return found

    cross_memory.borrow = counting


def _counted(dask_worker: Any) -> int:
    return sum(cross_memory.counted)


def _uncount(dask_worker: Any) -> None:
    cross_memory.borrow = cross_memory.original


@pytest.fixture
def counting(client: Client) -> Iterator[Client]:
    """Worker processes that count what they borrow."""
    client.run(_count)
    yield client
    client.run(_uncount)


@pytest.mark.parametrize("allowed", [True, False])
def test_workers_of_one_host_read_each_other(counting, allowed):
    rng = np.random.default_rng()
    x, y = rng.random((600, 500)), rng.random((500, 700))
    with dask.config.set({"distmm.numpy.cross-memory": allowed}):
        a, b = (counting.persist(da.from_array(one, chunks=(250, 300))) for one in (x, y))
        d = matmul(a, b, method="allgather").compute()
    assert_product(x, y, d)
    assert (sum(counting.run(_counted).values()) > 0) == allowed
