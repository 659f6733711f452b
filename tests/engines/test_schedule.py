"""The order of a rank's work in the peer engine: everything multiplied once, out of buffers that hold it."""

from __future__ import annotations

import collections
import functools
import itertools

import dask
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.model import lies_in_one
from dask_distmm.engines.peer.schedule import make_schedule, merged, pending_loads
from dask_distmm.planning import METHODS, Worker, plan
from dask_distmm.planning import cuts as extents
from dask_distmm.planning import schedule as reads
from dask_distmm.planning import schedule as schedules
from dask_distmm.planning.schedule import PANELS, block_schedules, extent_multiple
from dask_distmm.testing import make_problem, random_chunks

SMALL = {"_LEAST_DEPTH": 16, "_LEAST_WIDTH": 8, "_LEAST_BLOCK": 8, "_LEAST_ROWS": 4}
FULL = extents._FULL
AS_THEY_ARE = {name: getattr(schedules, name) for name in SMALL}
KINDS = ["float64", "float16", "float8_e4m3fn"]


@pytest.fixture(scope="module", autouse=True)
def small():
    """Constants for matrices of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(schedules, name, value)
        patch.setattr(extents, "_FULL", (8, 8))
        # FP8 has multiples of 16 anyway.
        patch.setattr(extents, "_TILE", 16)
        # Padded are float16, as if all extents were large, and FP8.
        patch.setattr(schedules, "_LEAST_PADDED", 0)
        patch.setitem(extents._SLOWDOWN, "float64", (1.0, 1.0))
        yield


def made(seed, method, nranks, kind, size, sources=0, together=False, scheme=""):
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(1, 120, 3).tolist()
    a_chunks = random_chunks(rng, m, 5), random_chunks(rng, k, 5)
    b_chunks = random_chunks(rng, k, 5), random_chunks(rng, n, 5)
    out = random_chunks(rng, m, 4), random_chunks(rng, n, 4)
    with dask.config.set({"distmm.peer.buffer-bytes": size}):
        problem = make_problem(a_chunks, b_chunks, kind, method=method, out_chunks=out, array="cupy")
    where = [rng.integers(0, 1 if together else nranks + sources, len(x[0]) * len(x[1])) for x in (a_chunks, b_chunks)]
    roster = [Worker(f"{scheme}w{i}") for i in range(nranks)]
    others = [Worker(f"{scheme}s{i}") for i in range(sources)]
    where = [x.astype(np.int32) for x in where]
    return plan(problem, roster, {"a": where[0], "b": where[1]}, sources=others, engine="peer")


def lies_as_planned(found, me):
    """Whether a part is within one chunk of a participant, as the engine looks it up."""
    return functools.partial(lies_in_one, found, me)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(METHODS),
    st.integers(1, 6),
    st.sampled_from(KINDS),
    st.sampled_from([2**11, 2**13, 2**16, 2**30]),
    st.booleans(),
)
def test_every_product_once_out_of_buffers_that_hold_it(seed, method, nranks, kind, size, together):
    found = made(seed, method, nranks, kind, size, sources=1, together=together)
    multiple = extent_multiple(found.problem)
    box = np.zeros((found.problem.m, found.problem.n), np.int64)
    for rank, block_schedule in enumerate(block_schedules(found)):
        lies = lies_as_planned(found, found.ranks[rank])
        schedule = make_schedule(found, rank, block_schedule, lies)
        inside, counts = {}, collections.Counter()
        summed = np.zeros_like(box)
        finished = []
        for step in schedule.steps:
            for load in step.loads:
                # The load replaces the earlier content of this part of the buffer.
                inside[load.slot, load.at] = load
                extents, depth_extent = schedule.slots[load.slot]
                own, depth = (load.rect[:2], load.rect[2:]) if load.operand == 0 else (load.rect[2:], load.rect[:2])
                assert load.at + own[1] - own[0] <= extents
                assert depth[1] - depth[0] <= depth_extent
                assert load.at % multiple == 0
                covered = sum(piece.rows * piece.cols for piece in load.chunk_blocks)
                assert covered == (own[1] - own[0]) * (depth[1] - depth[0])
            for product in step.products:
                for load in (*product.a, *product.b):
                    if load.slot is None:
                        assert lies(load.operand, load.rect)
                    else:
                        assert inside[load.slot, load.at] is load, "a product reads what is not there (any more)"
                for side in (product.a, product.b):
                    own = 0 if side[0].operand == 0 else 2
                    for one, other in itertools.pairwise(side):
                        assert one.slot == other.slot is not None
                        assert one.rect[own + 1] == other.rect[own]
                        assert other.at - one.at == one.rect[own + 1] - one.rect[own]
                r0, r1, c0, c1 = product.rect
                key = product.rect, product.a[0].rect[2:]
                counts[key] += 1
                assert product.b[0].rect[:2] == product.a[0].rect[2:]
                top, _, left, _ = found.region(rank)
                assert not (r0 - top) % multiple
                assert not (c0 - left) % multiple
                # The first one stores, all others add.
                assert (summed[r0:r1, c0:c1] > 0).all() == product.add
                summed[r0:r1, c0:c1] += product.a[0].rect[3] - product.a[0].rect[2]
            finished += step.done
            for to in step.done:
                for r0, r1, c0, c1 in found.final_rects(to):
                    k0, k1 = found.k_range(rank)
                    assert (summed[r0:r1, c0:c1] == k1 - k0).all(), "told to be complete too early"
        assert max(counts.values()) == 1
        assert sorted(finished) == (list(range(len(found.ranks))) if found.grid[2] > 1 else [])
        slots = {slot for slot in schedule.slots if slot[0] != block_schedule.stationary}
        assert len(slots) <= PANELS
        box += summed
    assert (box == found.problem.k).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 4), st.sampled_from([2**14, 2**16]))
def test_buffers_are_as_projected(seed, method, nranks, size):
    """And below what they may be, where that is not too little for any GEMM."""
    found = made(seed, method, nranks, "float64", size)
    for rank, block_schedule in enumerate(block_schedules(found)):
        schedule = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank]))
        used = sum(extent * depth_extent * 8 for extent, depth_extent in schedule.slots.values())
        assert used <= block_schedule.buffer_bytes
        assert block_schedule.buffer_bytes <= size or block_schedule.width == 1 or len(block_schedule.parts) > 2
        assert found.projected_bytes[found.workers[rank]] >= block_schedule.buffer_bytes


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 4), st.integers(0, 2))
def test_what_others_read_is_offered_and_nothing_else(seed, method, nranks, sources):
    """And with UCX, which needs copies of it, projected."""
    found = made(seed, method, nranks, "float64", 2**14, sources)
    count = len(found.participants)
    read = [set() for _ in range(count)]
    for rank, block_schedule in enumerate(block_schedules(found)):
        me = found.ranks[rank]
        for step in make_schedule(found, rank, block_schedule, lies_as_planned(found, me)).steps:
            pieces = [("ab"[load.operand], piece.chunk) for load in step.loads for piece in load.chunk_blocks]
            for name, chunk in pieces:
                if (holder := int(found.where[name][chunk])) != me:
                    read[holder].add((name, chunk))
    offered = reads.peer_reads(found, "ab")
    told = [{name: every[me] for name, every in offered.items()} for me in range(count)]
    assert read == [{(name, int(i)) for name, mine in one.items() for i in np.flatnonzero(mine)} for one in told]
    ucx = made(seed, method, nranks, "float64", 2**14, sources, scheme="ucx://")
    sizes = {name: np.multiply.outer(*map(np.asarray, found.problem[name].chunks)).ravel() * 8 for name in "ab"}
    for me, worker in enumerate(found.participants):
        copies = sum(int(sizes[name][mine].sum()) for name, mine in told[me].items())
        assert ucx.projected_bytes["ucx://" + worker.address] == found.projected_bytes[worker.address] + copies


def test_ranks_do_not_pull_from_the_same_one_at_the_same_time():
    n = 4096
    sizes = ((n // 4,) * 4, (n,)), ((n,), (n // 4,) * 4)
    problem = make_problem(*sizes, "float32", method="allgather", array="cupy")
    where = np.arange(4, dtype=np.int32)
    found = plan(problem, [Worker(f"w{i}") for i in range(4)], {"a": where, "b": where}, engine="peer")
    held = 0 if found.grid[1] == 1 else 1
    order = []
    for rank, block_schedule in enumerate(block_schedules(found)):
        schedule = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank]))
        assert len(schedule.steps) == 4
        assert block_schedule.stationary == held
        assert not schedule.steps[0].loads, "what lies right comes first"
        panels = [product.b[0] if held == 0 else product.a[0] for step in schedule.steps for product in step.products]
        order.append([int(where[panel.chunk_blocks[0].chunk]) for panel in panels])
    assert all(len(set(together)) == 4 for together in zip(*order, strict=True))
    assert [row[0] for row in order] == list(found.ranks)


def test_panels_that_are_here_meet_what_is_held_as_it_lands():
    """Dask puts whole columns of chunks on one worker."""
    n, chunks = 2048, 16
    sizes = ((n // chunks,) * chunks,) * 2
    problem = make_problem(sizes, sizes, "float32", method="summa", array="cupy")
    where = np.tile(np.array([2, 0, 2, 0, 1, 3, 2, 0, 1, 3, 1, 3, 2, 0, 1, 3], np.int32), chunks)
    found = plan(problem, [Worker(f"w{i}") for i in range(4)], {"a": where, "b": where}, engine="peer")
    assert found.grid == (2, 2, 1)

    def is_here(load, rank):
        return all(where[piece.chunk] == found.ranks[rank] for piece in load.chunk_blocks)

    for rank, block_schedule in enumerate(block_schedules(found)):
        assert block_schedule.stationary == 0
        first, *others = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank])).steps
        panels = {product.b[0].number: product.b[0] for product in first.products}
        assert len(panels) == PANELS - 1, "one buffer is left for the first one that is pulled"
        assert all(is_here(load, rank) for load in panels.values())
        held = [product.a for product in first.products][:: len(panels)]
        assert len(held) == 4
        assert len(first.products) == len(held) * len(panels)
        # Each piece of what is held meets them all before the next one is needed.
        assert [product.a for product in first.products] == [a for a in held for _ in panels]
        later = [product.b[0] for step in others for product in step.products]
        assert [is_here(load, rank) for load in later] == sorted((is_here(load, rank) for load in later), reverse=True)
        assert all(len(product.a) == len(held) for step in others for product in step.products)


def test_pieces_of_what_is_held_that_are_here_come_first():
    n, chunks = 1024, 8
    sizes = ((n // chunks,) * chunks,) * 2
    problem = make_problem(sizes, sizes, "float32", method="allgather", array="cupy")
    where = np.tile(np.array([2, 0, 1, 3, 2, 0, 1, 3], np.int32), chunks)
    found = plan(problem, [Worker(f"w{i}") for i in range(4)], {"a": where, "b": where}, engine="peer")
    seen = 0
    for rank, block_schedule in enumerate(block_schedules(found)):
        first, *others = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank])).steps
        held = [(product.a, product.b)[block_schedule.stationary] for product in first.products]
        here = [
            all(where[piece.chunk] == found.ranks[rank] for part in one for piece in part.chunk_blocks) for one in held
        ]
        assert here == sorted(here, reverse=True)
        seen += here.count(True)
        # Later panels meet all that is held in one product.
        assert all(len(step.products) == 1 for step in others)
    assert seen


@pytest.mark.parametrize("method", ["allgather", "summa"])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("n", "nranks"), [(8192, 2), (8192, 4), (16384, 4), (32768, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_pieces_fill_a_gpu(monkeypatch, n, nranks, chunks, method, dtype):
    """Products of pieces took up to three times as long as one of all of them."""
    for name, value in AS_THEY_ARE.items():
        monkeypatch.setattr(schedules, name, value)
    monkeypatch.setattr(extents, "_FULL", FULL)
    sizes = ((n // chunks,) * chunks,) * 2
    problem = make_problem(sizes, sizes, dtype, method=method, array="cupy")
    where = np.tile(np.arange(chunks, dtype=np.int32) % nranks, chunks)
    found = plan(problem, [Worker(f"w{i}") for i in range(nranks)], {"a": where, "b": where}, engine="peer")
    full = extents.full_side(problem)
    assert full == (2048 if dtype == "bfloat16" else 1024)
    for rank, block_schedule in enumerate(block_schedules(found)):
        r0, r1, c0, c1 = found.region(rank)
        least = min(full**2, (r1 - r0) * (c1 - c0))
        schedule = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank]))
        products = [product for step in schedule.steps for product in step.products]
        areas = [(bottom - top) * (right - left) for top, bottom, left, right in (x.rect for x in products)]
        cut = [area for area, product in zip(areas, products, strict=True) if len(product.a) * len(product.b) == 1]
        assert min(cut, default=least) >= least // 2


@pytest.mark.parametrize("room", ["256 MiB", "2 GiB"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize(("size", "parts"), [(131072, 2), (20000, 4), (65536, 3)])
def test_large_matrices_are_cut_where_gemms_are_quick(monkeypatch, size, parts, dtype, room):
    """cuBLAS took twice as long for panels of 9,363 columns as for those of 8,192."""
    for name, value in AS_THEY_ARE.items():
        monkeypatch.setattr(schedules, name, value)
    monkeypatch.setattr(extents, "_TILE", 128)
    large = dtype == "float16" and room == "2 GiB"
    edge = size // parts // 128 * 128
    sizes = (edge,) * (parts - 1) + (size - edge * (parts - 1),)
    with dask.config.set({"distmm.peer.buffer-bytes": room}):
        problem = make_problem((sizes, (size,)), ((size,), sizes), dtype, method="allgather", array="cupy")
    where = np.arange(parts, dtype=np.int32)
    found = plan(problem, [Worker(f"w{i}") for i in range(parts)], {"a": where, "b": where}, engine="peer")
    for rank, block_schedule in enumerate(block_schedules(found)):
        schedule = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank]))
        r0, r1, c0, c1 = found.region(rank)
        for product in (product for step in schedule.steps for product in step.products):
            top, bottom, left, right = product.rect
            k0, k1 = product.a[0].rect[2:]
            starts = {top - r0, left - c0, k0}
            ends = {bottom - r0, right - c0, k1} - {r1 - r0, c1 - c0, size}
            assert not any(x % (128 if large else 16) for x in starts | ends)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 4), st.sampled_from([2**12, 2**14, 2**16]))
def test_a_load_is_pending_until_the_last_use_of_its_buffer_and_before_its_first(seed, method, nranks, size):
    found = made(seed, method, nranks, "float64", size)
    for rank, block_schedule in enumerate(block_schedules(found)):
        steps = make_schedule(found, rank, block_schedule, lies_as_planned(found, found.ranks[rank])).steps
        uses = [{f.number for product in step.products for f in (*product.a, *product.b)} for step in steps]
        slot = {load.number: load.slot for step in steps for load in step.loads}
        pending = pending_loads(steps)
        assert [load for load, _ in pending] == [load for step in steps for load in step.loads]
        for load, after in pending:
            first = next(number for number, used in enumerate(uses) if load.number in used)
            before = [n for n, used in enumerate(uses[:first]) if any(slot.get(x) == load.slot for x in used)]
            assert after == max(before, default=-1)


def test_rectangles_that_are_one_are_put_together():
    assert merged([(0, 2, 0, 3), (0, 2, 3, 5), (2, 4, 0, 5)]) == [(0, 4, 0, 5)]
    assert merged([(0, 2, 3, 5), (2, 4, 0, 5)]) == [(0, 2, 3, 5), (2, 4, 0, 5)]
    assert merged([]) == []
