"""Offers that processes make of their memory, and offers that are refused."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import pytest
from conformance import make_problem

from dask_distmm.engines.peer.offers import BLOCKS, FLAGS, Allocation, Expected, offer_of, place_of, read_place
from dask_distmm.errors import ProtocolError
from dask_distmm.layout.rectangles import Span
from dask_distmm.planning import Worker, plan
from dask_distmm.planning.schedule import peer_reads

# Bytes of a float32.
SUMS = 4
HERE = 10**6


@pytest.fixture
def made():
    problem = make_problem(((4, 4), (6,)), ((6,), (8,)), "float32", method="allgather", array="cupy")
    where = {"a": np.array([0, 1], np.int32), "b": np.array([1], np.int32)}
    return plan(problem, [Worker("w0"), Worker("w1")], where, engine="peer")


def offer(made):
    """The offer of participant 1: the second chunk of A, the one of B, a block of D."""
    allocation = Allocation(b"h" * 64, 4096, 77, HERE)
    places = {
        (0, 1): Span(HERE, 24, 4),
        (1, 0): Span(HERE + 256 + 5 * 32, -32, 4),
        (BLOCKS, 0): Span(HERE + 1024, 64, 4),
        (FLAGS, 0): Span(HERE + 2048, 0, 4),
    }
    return offer_of(b"p" * 16, [77, 2**63 + 5], [(*which, allocation, span) for which, span in places.items()])


def read(wires, made, mine=0):
    return Expected.of_product(made, mine=mine, sums=SUMS, read=peer_reads(made, made.problem.operands)).read(wires)


def test_there_and_back(made):
    found = read(msgpack.unpackb(msgpack.packb([None, offer(made)])), made)
    (nothing, told), places = found
    assert nothing is None
    assert told.process == b"p" * 16
    assert told.alive == [77, 2**63 + 5]
    assert told.allocation(0) == Allocation(b"h" * 64, 4096, 77, HERE)
    assert len(told.numbers) == 1
    assert places[0][1].tolist() == [[-1] * 4, [0, 0, 24, 4]]
    assert places[1][1].tolist() == [[0, 256 + 5 * 32, -32, 4]]
    assert places[BLOCKS][1].tolist() == [[0, 1024, 64, 4]]
    assert places[FLAGS][1].tolist() == [[0, 2048, 0, 4]]
    assert (places[0][0] == -1).all()


def test_its_own_and_what_is_out_of_reach_are_not_read(made):
    assert read([None, {"nonsense": 1}], made, mine=1)[0] == [None, None]
    near, far = Worker("w0", host="a", device="x", reach=("y",)), Worker("w1", host="b", device="y")
    apart = dataclasses.replace(made, participants=(near, far))
    assert read([None, offer(made)], apart)[0] == [None, None]
    together = dataclasses.replace(made, participants=(near, dataclasses.replace(far, host="a", reach=("x",))))
    assert read([None, offer(made)], together)[0][1] is not None
    # A participant whose memory nobody can map offers nothing.
    assert read([None, None], made)[0] == [None, None]


def change(key, value):
    return lambda wire: wire.__setitem__(key, value)


def allocations(numbers):
    def apply(wire):
        wire["handles"] = b"h" * 64 * len(numbers)
        wire["allocations"] = np.array(numbers, np.uint64).tobytes()

    return apply


def move(row, column, value):
    def apply(wire):
        table = np.frombuffer(wire["places"], np.int64).reshape(-1, 6).copy()
        table[row, column] = value
        wire["places"] = table.tobytes()

    return apply


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (change("process", b"short"), "process"),
        (change("process", "p" * 16), "process"),
        (change("alive", ["x"]), "bytes-like|buffer"),
        (change("alive", b"1234567"), "buffer size"),
        (change("handles", b"h" * 63), "handles are not"),
        (change("handles", "h" * 64), "handles are not"),
        (change("allocations", [[4096, 77, HERE]]), "bytes-like|buffer"),
        (change("allocations", b"\1" * 16), "reshape"),
        (change("allocations", b""), "handles are not"),
        (allocations([]), "allocation 0"),
        (allocations([(15, 77, HERE)]), "reaches"),
        (allocations([(2**64 - 1, 77, HERE)]), None),
        (change("places", b"12345"), "buffer size"),
        (change("places", b""), "a rank without flags"),
        (lambda wire: change("places", wire["places"][:48] + wire["places"][96:])(wire), "chunk 0 of B is not in it"),
        (move(3, 0, BLOCKS), "without flags"),
        (move(3, 1, 1), "matrix 1 of operand -1 does not exist"),
        (move(3, 3, 4096 - 8), "reaches"),
        (move(3, 2, 3), "allocation 3"),
        (move(0, 3, -4), "reaches"),
        (move(0, 3, 4096 - 16), "reaches"),
        (move(0, 4, 2**40), "reaches"),
        (move(0, 4, 2**60), "out of range"),
        (move(0, 4, 2**63 - 1), "out of range"),
        (move(0, 2, 1), "allocation 1"),
        (move(0, 2, -1), "allocation -1"),
        (move(0, 1, 2), "matrix 2 of operand 0 does not exist"),
        (move(0, 1, -1), "matrix -1 of operand 0 does not exist"),
        (move(0, 0, 2), "matrix 1 of operand 2 does not exist"),
        (move(0, 0, -3), "matrix 1 of operand -3 does not exist"),
        (move(3, 3, 2**61), "reaches"),
        (move(3, 3, 2**61 + 2**10), "out of range"),
        (move(0, 3, -(2**63)), "out of range"),
        (move(1, 3, 0), "reaches from byte -160"),
        (move(2, 4, 4000), "reaches"),
        (lambda wire: wire.pop("places"), "KeyError"),
    ],
)
def test_what_is_malformed_or_outside_is_refused(made, spoil, what):
    wire = offer(made)
    spoil(wire)
    if what is None:  # odd, but nothing is outside of it
        assert read([None, wire], made)[0][1] is not None
        return
    with pytest.raises(ProtocolError, match=rf"malformed offer of w1: .*({what})"):
        read([None, wire], made)


def test_other_things_than_offers_are_refused(made):
    for wire in ("text", 5, [1]):
        with pytest.raises(ProtocolError, match="malformed offer of w1"):
            read([None, wire], made)
    with pytest.raises(ProtocolError, match="1 offers for 2 participants"):
        read([None], made)


def test_a_place_in_a_message_is_inside_its_allocation():
    allocation = Allocation(b"h" * 64, 4096, 77, HERE)
    assert read_place(place_of(allocation, HERE + 96), 4000) == (allocation, 96)
    for pointer, size in ((HERE + 97, 4000), (HERE - 1, 8), (HERE, 4097)):
        with pytest.raises(ProtocolError, match=rf"{size} bytes at byte {pointer - HERE} of an allocation of 4096"):
            read_place(place_of(allocation, pointer), size)
    for strange in (np.zeros(4), np.zeros(7, np.uint8)):
        with pytest.raises(ProtocolError, match="expected a place of 96 bytes"):
            read_place(strange, 8)
