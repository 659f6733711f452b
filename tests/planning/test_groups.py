"""The steps of products: every product once, out of buffers that hold it, and sums that come together."""

from __future__ import annotations

import dataclasses
import itertools

import dask
import numpy as np
import pytest
from conformance import make_problem, random_chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from proof import check

from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import METHODS, NamedMatrix, Worker, plan
from dask_distmm.planning import cuts as extents
from dask_distmm.planning import schedule as schedules
from dask_distmm.planning.groups import DeviceSchedule, chunk_blocks_of, chunk_name
from dask_distmm.planning.product import merged, record
from dask_distmm.planning.schedule import PANELS, block_schedules, extent_multiple, peer_reads
from dask_distmm.programs.check import walk
from dask_distmm.programs.steps import (
    Buffer,
    Call,
    Drop,
    Load,
    New,
    Publish,
    Pull,
    Store,
    Take,
    View,
    crossing,
    flops_of,
)

SMALL = {"_LEAST_DEPTH": 16, "_LEAST_WIDTH": 8, "_LEAST_BLOCK": 8, "_LEAST_ROWS": 4, "_LEAST_EXTENT": 8}
FULL = extents._FULL
AS_THEY_ARE = {name: getattr(schedules, name) for name in SMALL}
PRODUCTS = "product", "add_product", "add_symmetric"


@pytest.fixture(scope="module", autouse=True)
def small():
    """Constants for matrices of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(schedules, name, value)
        patch.setattr(schedules, "_LEAST_SQUARE", 32)
        patch.setattr(schedules, "_NARROWEST", 16)
        patch.setattr(extents, "_FULL", (8, 8))
        # FP8 has multiples of 16 anyway.
        patch.setattr(extents, "_TILE", 16)
        # Padded are float16, as if all extents were large, and FP8.
        patch.setattr(schedules, "_LEAST_PADDED", 0)
        patch.setitem(extents._SLOWDOWN, "float64", (1.0, 1.0))
        yield


def made(seed, method, nranks, kind, size, sources=0, together=False, scheme="", engine="peer", **changes):
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(1, 120, 3).tolist()
    rows, depth, cols = (random_chunks(rng, x, 5) for x in (m, k, n))
    other = random_chunks(rng, k, 5)
    out = random_chunks(rng, m, 4), random_chunks(rng, n, 4)
    if "arrays" in changes:  # of a Gram matrix
        other, cols, out = depth, rows, (out[0], out[0])
    if "formula" in changes:
        extras = (NamedMatrix("c", out, "float64"), NamedMatrix("bias", ((1,), cols), "float64"))
        changes = {**changes, "extras": extras}
    numbers = {"peer.buffer-bytes": size, "numpy.panel-bytes": size, "numpy.pack-below": int(rng.choice([0, 384]))}
    changes = {"out_chunks": out, "array": "numpy" if engine == "numpy" else "cupy"} | changes
    with dask.config.set({f"distmm.{name}": number for name, number in numbers.items()}):
        problem = make_problem((rows, depth), (other, cols), kind, method=method, **changes)
    count = 1 if together else nranks + sources
    where = {x.name: rng.integers(0, count, x.count).astype(np.int32) for x in problem.matrices if not x.by_ranks}
    if "arrays" in changes and "b" in where:
        where["b"] = where["a"].reshape(problem.a.counts).T.ravel()
    roster = [Worker(f"{scheme}w{i}") for i in range(nranks)]
    others = [Worker(f"{scheme}s{i}") for i in range(sources)]
    return plan(problem, roster, where, sources=others, engine=engine)


def lists_of(found, usable=lambda operand, number: True):
    return [found.steps(rank, usable=usable) for rank in range(len(found.ranks))]


def calls_of(steps):
    return [step for step in steps if isinstance(step, Call) and step.kernel in PRODUCTS]


def loads_of(steps):
    return [step for step in steps if isinstance(step, Load)]


def in_memory(found, rank, steps):
    """Return the chunks that a rank reads where they lie: they must be its own."""
    used = {x.name: x.buffer for step in steps if isinstance(step, Call) for x in step.arguments}
    there = [x for x in found.problem.matrices if not x.by_ranks]
    keys = {chunk_name(x.name, i): (x.name, i) for x in there for i in range(x.count)}
    chunks = {used[name]: keys[name] for name in used.keys() & keys.keys()}
    for operand, number in chunks.values():
        assert found.where[operand][number] == found.ranks[rank]
    return chunks


def multiplied(found, every, matrices):
    """Take all steps with numbers; return D. What nobody has written is NaN."""
    memory = [{} for _ in every]
    lent, d = {}, np.full((found.problem.m, found.problem.n), np.nan)

    def chunk(operand, number):
        rows, cols = (np.cumsum([0, *sizes]) for sizes in found.problem[operand].chunks)
        i, j = divmod(number, len(cols) - 1)
        return matrices[operand][rows[i] : rows[i + 1], cols[j] : cols[j + 1]].copy()

    def at(rank, place):
        top, bottom, left, right = place.box
        assert bottom <= memory[rank][place.name].shape[0]
        assert right <= memory[rank][place.name].shape[1]
        return memory[rank][place.name][top:bottom, left:right]

    for rank, steps in enumerate(every):
        memory[rank] |= {buffer.name: chunk(*key) for buffer, key in in_memory(found, rank, steps).items()}
    for rank, step in walk(every, {}):
        here = memory[rank]
        match step:
            case New(buffer, zero):
                here[buffer.name] = np.full(buffer.shape, 0.0 if zero else np.nan)
            case Load():
                for place, operand, (r0, r1, c0, c1) in step:
                    if isinstance(place, Buffer):
                        here[place.name] = np.full(place.shape, np.nan)
                    at(rank, place)[...] = matrices[operand][r0:r1, c0:c1]
            case Take(buffer, operand, number):
                here[buffer.name] = chunk(operand, number)
            case Call("product" | "add_product" | "add_symmetric" as kernel, (*_, a, b, target), options):
                turns = options["transposed"]
                x, y = (part.T if turn else part for part, turn in zip((at(rank, a), at(rank, b)), turns, strict=True))
                product = np.tril(x @ y) if kernel == "add_symmetric" else x @ y
                at(rank, target)[...] = product + (0 if kernel == "product" else at(rank, target))
            case Call("mirror", (block,)):
                lower = np.tril(at(rank, block))
                at(rank, block)[...] = lower + np.tril(lower, -1).T
            case Call("store" | "join" | "copy", places, options):
                count = options.get("reads", 1)
                parts = [at(rank, place).copy() for place in places[:count]]
                turns = options.get("turned", [options.get("transposed")] * count)
                for part, place, turn in zip(parts, places[count:], turns, strict=True):
                    at(rank, place)[...] = part.T if turn else part
            case Call("finish", places, {"reads": 0}):  # of FP8 D is stored so, though no formula changes it
                at(rank, places[1])[...] = at(rank, places[0])
            case Publish(key, buffers):
                lent[rank, key] = [at(rank, buffer) for buffer in buffers]
            case Pull(owner, key, buffers, op=op):
                for source, target in zip(lent[owner, key], buffers, strict=True):
                    at(rank, target)[...] = source + (at(rank, target) if op else 0)
            case Store(buffer, "", number):
                r0, r1, c0, c1 = found.chunk_rect(number)
                assert found.owners[number] == rank
                d[r0:r1, c0:c1] = here[buffer.name]
            case Drop(buffer):
                del here[buffer.name]
    return d


GRAM = {"arrays": ("x", "x"), "transposed": (False, True)}
CHANGES = [
    *({}, GRAM, {"by_ranks": (True, True)}, {"by_ranks": (True, False)}, {"by_ranks": (False, True)}),
    *({"by_ranks": (True, True)} | GRAM, {"formula": Formula(beta=(1.0, 0.0), epilog="gelu_aux_bias", amax=True)}),
]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(METHODS),
    st.integers(1, 6),
    st.sampled_from([("peer", "float64"), ("peer", "float16"), ("peer", "float8_e4m3fn"), ("numpy", "float64")]),
    st.sampled_from([2**11, 2**13, 2**16, 2**30]),
    st.booleans(),
    st.sampled_from(CHANGES),
)
def test_every_product_once_out_of_buffers_that_hold_it(seed, method, nranks, where, size, together, changes):
    engine, kind = where
    found = made(seed, method, nranks, kind, size, sources=1, together=together, engine=engine, **changes)
    every = lists_of(found, lambda operand, number: (number + operand + seed) % 3 > 0)
    around = []
    for rank, steps in enumerate(every):
        there = in_memory(found, rank, steps)
        around.append([*(Take(buffer, *key) for buffer, key in there.items()), *steps, *map(Drop, there)])
    check(around)
    multiple = extent_multiple(found.problem) if engine == "peer" else 1
    for steps in every:
        for step in calls_of(steps):
            places = {place.name[:5]: place.box for place in step.arguments if isinstance(place, View)}
            starts = [places[name][at] for name in places if name in ("panel", "sum.0") for at in (0, 2)]
            # Padding of k must not be multiplied: but for the last part, its stretches are multiples.
            assert not any(start % multiple for start in starts)
    if "formula" in changes:
        return
    rng = np.random.default_rng(seed)
    a = rng.integers(-9, 9, (found.problem.m, found.problem.k)).astype(float)
    b = a.T.copy() if "arrays" in changes else rng.integers(-9, 9, (found.problem.k, found.problem.n)).astype(float)
    np.testing.assert_array_equal(multiplied(found, every, {"a": a, "b": b}), a @ b)
    flops = sum(flops_of(step) for steps in every for step in calls_of(steps))
    assert flops == pytest.approx(found.problem.flops) or ("arrays" in changes and flops < found.problem.flops)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 4), st.sampled_from([2**14, 2**16]))
def test_buffers_are_as_projected(seed, method, nranks, size):
    """And below what they may be, where that is not too little for any GEMM."""
    found = made(seed, method, nranks, "float64", size)
    for rank, block_schedule in enumerate(block_schedules(found)):
        steps = found.steps(rank)
        panels = [step.buffer for step in steps if isinstance(step, New) and step.buffer.name.startswith("panel")]
        assert sum(buffer.nbytes for buffer in panels) <= block_schedule.buffer_bytes
        streamed = f"panel.{1 - block_schedule.stationary}"
        assert sum(buffer.name.startswith(streamed) for buffer in panels) <= PANELS
        assert block_schedule.buffer_bytes <= size or block_schedule.width == 1 or len(block_schedule.parts) > 2
        assert found.projected_bytes[found.workers[rank]] >= block_schedule.buffer_bytes


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 3), st.integers(1, 3))
def test_lists_are_kept_for_like_plans_and_chunks_that_lie_alike_only(seed, method, nranks, others):
    plans = [made(seed, method, count, "float64", 2**13) for count in (nranks, others)]
    plans += [
        dataclasses.replace(plans[0], owners=np.full_like(plans[0].owners, len(plans[0].ranks) - 1)),
        dataclasses.replace(plans[0], problem=dataclasses.replace(plans[0].problem, name="another")),
    ]
    answers = [lambda operand, number: True, lambda operand, number: False, lambda operand, number: number % 2 == 0]
    for found, usable in list(itertools.product(plans, answers)) * 2:
        for rank in range(len(found.ranks)):
            assert found.steps(rank, usable=usable) == record(found, rank, (), usable)
    for usable in answers:
        assert plans[-1].steps(0, usable=usable) is plans[0].steps(0, usable=usable)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 4), st.integers(0, 2))
def test_what_others_read_is_offered_and_nothing_else(seed, method, nranks, sources):
    """And with UCX, which needs copies of it, projected."""
    found = made(seed, method, nranks, "float64", 2**14, sources)
    count = len(found.participants)
    read = [set() for _ in range(count)]
    for rank, steps in enumerate(lists_of(found)):
        for load in loads_of(steps):
            ((_, operand, rect),) = load
            for piece in chunk_blocks_of(found.problem[operand].chunks, 0, rect):
                if (holder := int(found.where[operand][piece.chunk])) != found.ranks[rank]:
                    read[holder].add((operand, piece.chunk))
    offered = peer_reads(found, "ab")
    told = [{name: every[me] for name, every in offered.items()} for me in range(count)]
    assert read == [{(name, int(i)) for name, mine in one.items() for i in np.flatnonzero(mine)} for one in told]
    ucx = made(seed, method, nranks, "float64", 2**14, sources, scheme="ucx://")
    sizes = {name: np.multiply.outer(*map(np.asarray, found.problem[name].chunks)).ravel() * 8 for name in "ab"}
    for me, worker in enumerate(found.participants):
        copies = sum(int(sizes[name][mine].sum()) for name, mine in told[me].items())
        assert ucx.projected_bytes["ucx://" + worker.address] == found.projected_bytes[worker.address] + copies


def groups_of(found, rank):
    return DeviceSchedule(found, rank, lambda operand, number: True).groups()


def holders(found, operand, rect):
    """Return the participants that have chunks of a part of an operand."""
    matrix = found.problem.matrices[operand]
    return {int(found.where[matrix.name][piece.chunk]) for piece in chunk_blocks_of(matrix.chunks, operand, rect)}


def test_ranks_do_not_pull_from_the_same_one_at_the_same_time():
    n = 4096
    sizes = ((n // 4,) * 4, (n,)), ((n,), (n // 4,) * 4)
    problem = make_problem(*sizes, "float32", method="allgather", array="cupy")
    where = np.arange(4, dtype=np.int32)
    found = plan(problem, [Worker(f"w{i}") for i in range(4)], {"a": where, "b": where}, engine="peer")
    held, order = block_schedules(found)[0].stationary, []
    for rank in range(4):
        groups = groups_of(found, rank)
        assert len(groups) == 4
        assert not groups[0].loads, "what lies right comes first"
        panels = [(product.a, product.b)[1 - held] for group in groups for product in group.products]
        order.append([holders(found, 1 - held, panel.rect).pop() for panel in panels])
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
    for rank in range(4):
        assert block_schedules(found)[rank].stationary == 0
        first, *others = groups_of(found, rank)
        panels = list(dict.fromkeys(product.b.rect for product in first.products))
        assert len(panels) == PANELS - 1, "one buffer is left for the first one that is pulled"
        assert all(holders(found, 1, rect) == {found.ranks[rank]} for rect in panels)
        held = [product.a.rect for product in first.products][:: len(panels)]
        assert len(held) == 4
        # Each piece of what is held meets them all before the next one is needed.
        assert [product.a.rect for product in first.products] == [rect for rect in held for _ in panels]
        here = [holders(found, 1, x.b.rect) == {found.ranks[rank]} for group in others for x in group.products]
        assert here == sorted(here, reverse=True)
        whole = held[0][0], held[-1][1], held[0][2], held[0][3]
        assert all(product.a.rect == whole for group in others for product in group.products)


def test_pieces_of_what_is_held_that_are_here_come_first():
    n, chunks = 1024, 8
    sizes = ((n // chunks,) * chunks,) * 2
    problem = make_problem(sizes, sizes, "float32", method="allgather", array="cupy")
    where = np.tile(np.array([2, 0, 1, 3, 2, 0, 1, 3], np.int32), chunks)
    found = plan(problem, [Worker(f"w{i}") for i in range(4)], {"a": where, "b": where}, engine="peer")
    seen = 0
    for rank in range(4):
        first, *others = groups_of(found, rank)
        held = block_schedules(found)[rank].stationary
        pieces = [(product.a, product.b)[held].rect for product in first.products]
        here = [holders(found, held, rect) == {found.ranks[rank]} for rect in pieces]
        assert here == sorted(here, reverse=True)
        seen += here.count(True)
        # Later panels meet all that is held in one product.
        assert all(len(group.products) == 1 for group in others)
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
    for rank in range(nranks):
        r0, r1, c0, c1 = found.region(rank)
        least = min(full**2, (r1 - r0) * (c1 - c0))
        for product in (product for group in groups_of(found, rank) for product in group.products):
            (top, bottom, *_), (*_, left, right) = product.a.rect, product.b.rect
            assert len(product.needs) > 2 or (bottom - top) * (right - left) >= least // 2


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
    for rank in range(parts):
        r0, r1, c0, c1 = found.region(rank)
        for product in (product for group in groups_of(found, rank) for product in group.products):
            (top, bottom, k0, k1), (_, _, left, right) = product.a.rect, product.b.rect
            starts = {top - r0, left - c0, k0}
            ends = {bottom - r0, right - c0, k1} - {r1 - r0, c1 - c0, size}
            assert not any(x % (128 if large else 16) for x in starts | ends)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 4), st.sampled_from([2**12, 2**14, 2**16]))
def test_a_load_comes_once_its_buffer_is_free_and_long_before_its_first_use(seed, method, nranks, size):
    found = made(seed, method, nranks, "float64", size)
    for rank, steps in enumerate(lists_of(found)):
        schedule = block_schedules(found)[rank]
        streamed = "ab"[1 - schedule.stationary]
        # Panels that are loaded and not used, each with the number of products before it.
        waiting, number, products = [], 0, 0
        for step in steps:
            if isinstance(step, Load) and step.operands == (streamed,):
                waiting.append((step.places[0], number, products))
                number += 1
            elif isinstance(step, Call) and step.kernel in PRODUCTS:
                used = {place.name: place.box for place in step.arguments[:2]}
                for one in [x for x in waiting if x[0].name in used and crossing(used[x[0].name], x[0].box)]:
                    # The first ones may all be on this GPU, and later ones have as many buffers less one.
                    assert one[1] < PANELS or products > one[2], "nothing is multiplied while it comes"
                    waiting.remove(one)
                products += 1
        assert not waiting
        assert number == sum(load.operands == (streamed,) for load in loads_of(steps))


def test_rectangles_that_are_one_are_put_together():
    assert merged([(0, 2, 0, 3), (0, 2, 3, 5), (2, 4, 0, 5)]) == [(0, 4, 0, 5)]
    assert merged([(0, 2, 3, 5), (2, 4, 0, 5)]) == [(0, 2, 3, 5), (2, 4, 0, 5)]
    assert merged([]) == []
