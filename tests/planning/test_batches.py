"""Batches and groups of products: the cuts, the estimates and the choice."""

from __future__ import annotations

import itertools
import math

import dask
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm import PlanError
from dask_distmm.config import read_options
from dask_distmm.planning.many import (
    Batch,
    GroupedProduct,
    Pool,
    choose_batch_route,
    efficiency,
    item_plan,
    long_products,
    recut,
    resize,
    share_out,
)
from dask_distmm.planning.model import Estimate
from dask_distmm.runtime.keys import group_name, parse_group_key
from dask_distmm.runtime.plugin import order_groups

MACHINE = read_options().machine("numpy")

axis = st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple)


@given(axis, st.integers(1, 50))
def test_an_axis_is_cut_at_its_edges_where_that_fits(sizes, length):
    found = resize(sizes, length)
    assert sum(found) == sum(sizes)
    assert max(found) <= length
    assert min(found) > 0
    edges = set(np.cumsum(found).tolist())
    for stop, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        if size > length:
            assert {stop, stop - size} <= edges | {0}
    # Neighbours that fit together are one, unless one is a piece of what was too long.
    if max(sizes) <= length:
        assert all(one + two > length for one, two in itertools.pairwise(found))


@given(st.lists(axis, min_size=1, max_size=3).map(tuple), st.integers(1, 500))
def test_blocks_have_as_many_items_as_wanted(chunks, items):
    found = recut(chunks, items)
    assert [sum(sizes) for sizes in found] == [sum(sizes) for sizes in chunks]
    assert math.prod(max(sizes) for sizes in found) <= max(items, 1)
    before, after = (math.prod(len(sizes) for sizes in cut) for cut in (chunks, found))
    if math.prod(max(sizes) for sizes in chunks) <= items:
        assert after <= before


def batch_of(count, size, chunk, dtype="float64"):
    sizes = (chunk,) * (count // chunk) + ((count % chunk,) if count % chunk else ())
    return Batch(
        (count,), (count,), (count,), (sizes,), size, size, size, dtype, dtype, dtype, chunk_count=2 * len(sizes)
    )


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 600), st.integers(1, 40))
def test_tasks_are_neither_too_large_nor_too_few(count, chunk, size, slots):
    batch = batch_of(count, size, min(chunk, count))
    limit = 2**26
    chunks, estimate = item_plan(batch, Pool(slots, slots), MACHINE, limit, 5e-4)
    tasks = math.prod(map(len, chunks))
    assert sum(chunks[0]) == count
    assert estimate.peak_bytes <= max(limit, batch.held_bytes)
    assert tasks >= min(slots, count) * 0.5
    parts = estimate.compute_seconds, estimate.transfer_seconds, estimate.rest_seconds
    assert estimate.seconds == pytest.approx(sum(parts))
    assert estimate.grid == (tasks, 1, 1)
    assert estimate.rest_seconds >= 5e-4 * tasks * (1 - 1e-9)
    assert estimate.compute_seconds >= count * batch.flops / slots / MACHINE.rate("float64")


def test_chunks_that_do_are_kept():
    batch = batch_of(256, 128, 16)
    assert item_plan(batch, Pool(4, 4), MACHINE, 2**26, 5e-4)[0] == batch.chunks
    # One a task for thousands of tiny items would be all overhead; one task would leave three slots idle.
    assert len(item_plan(batch_of(2000, 64, 1), Pool(2, 2), MACHINE, 2**26, 5e-4)[0][0]) < 100
    assert len(item_plan(batch_of(256, 128, 256), Pool(4, 4), MACHINE, 2**26, 5e-4)[0][0]) >= 4


def test_memory_bounds_a_task():
    pool = Pool(2, 2, memory=2**20)
    chunks, estimate = item_plan(batch_of(1000, 64, 1000), pool, MACHINE, 2**26, 5e-4)
    assert estimate.peak_bytes <= 2**20
    assert len(chunks[0]) >= 1000 * 3 * 64 * 64 * 8 / 2**20


def test_small_products_do_not_reach_the_full_rate():
    shares = [efficiency(size, size, size) for size in (16, 64, 256, 4096)]
    assert shares == sorted(shares)
    assert 0.2 < shares[0] < 0.5
    assert 0.98 < shares[-1] < 1


def estimate(way, seconds):
    return Estimate(way, (1, 1, 1), seconds, seconds, 0.0, 0, 0)


def test_the_choice():
    quick, slow = estimate("items", 1.0), estimate("collective", 2.0)
    assert choose_batch_route("auto", quick, slow)[0] == "items"
    assert choose_batch_route("auto", estimate("items", 3.0), slow)[0] == "collective"
    assert choose_batch_route("auto", quick, None)[0] == "items"
    assert choose_batch_route("auto", None, slow)[0] == "collective"
    assert choose_batch_route("collective", quick, slow) == ("collective", "batch='collective' was asked for")
    assert choose_batch_route("auto", quick, slow, ["method='summa'"])[0] == "collective"
    with pytest.raises(PlanError, match="batch='items' and method='summa'"):
        choose_batch_route("items", quick, slow, ["method='summa'"])


@given(
    st.lists(st.floats(1e-4, 10), min_size=1, max_size=20) | st.tuples(st.floats(1e-4, 10)).map(lambda one: [*one] * 3),
    st.integers(1, 8),
    st.data(),
)
def test_groups_are_shared_out(seconds, slots, data):
    rows = [data.draw(axis) for _ in seconds]
    rows = [tuple(size * 100 for size in sizes) for sizes in rows]
    long = long_products(seconds, slots)
    assert len(long) < max(2, slots)
    collective = [each / slots + 0.02 if i in long else None for i, each in enumerate(seconds)]
    every = zip(rows, seconds, collective, strict=True)
    products = [GroupedProduct(rows=sizes, seconds=each, run=run) for sizes, each, run in every]
    shares, total = share_out(products, slots, 5e-4)
    tasks = [i for i, share in enumerate(shares) if not share.collective]
    assert {i for i, share in enumerate(shares) if share.collective} <= set(long)
    assert all(sum(shares[i].rows) == sum(rows[i]) for i in tasks)
    assert sorted(shares[i].rank for i in tasks) == list(range(len(tasks)))
    in_order = sorted(tasks, key=lambda i: shares[i].rank)
    assert [shares[i].seconds for i in in_order] == sorted((shares[i].seconds for i in tasks), reverse=True)
    assert total >= sum(seconds) / slots * 0.999
    # Graham's bound for the tasks, whatever is collective.
    work = sum(seconds[i] + len(shares[i].rows) * 5e-4 for i in tasks)
    runs = sum(collective[i] for i, share in enumerate(shares) if share.collective)
    longest = max((shares[i].seconds for i in tasks), default=0.0)
    assert total <= runs + work / slots + longest + 5e-4 + 1e-9


def test_long_products_are_runs_or_slabs():
    def shared(run, forced=None):
        large = GroupedProduct(rows=(1000, 1000), seconds=10.0, spread=0.1, run=run, forced=forced)
        small = GroupedProduct(rows=(100,), seconds=0.1, spread=0.1, forced=forced)
        return share_out([large] + [small] * 9, 4, 5e-4)[0]

    assert len(shared(4.0)[0].rows) > 4
    assert shared(2.0)[0].collective
    assert not any(share.collective for share in shared(2.0, forced=False))


def test_priorities_are_dealt_out_by_rank():
    #  x -> p, y -> q, and s for both; r is no product.
    needs = {"x": [], "y": [], "s": [], "r": [], "p": ["x", "s"], "q": ["y", "s"]}
    names = {"p": (group_name("0a1b", 1, 0.02), 0, 0), "q": (group_name("0a1b", 0, 0.02), 0, 0)}
    graph = {
        names.get(key, key): Task(names.get(key, key), sum, *map(TaskRef, needed)) for key, needed in needs.items()
    }
    before = {names.get(key, key): at for at, key in enumerate(["s", "x", "r", "p", "y", "q"])}
    after = dict(before)
    order_groups(graph, after)
    assert sorted(after, key=after.__getitem__) == ["s", "y", "r", names["q"], "x", names["p"]]
    assert sorted(after.values()) == sorted(before.values())
    name = group_name("0a1b", 12, 0.02)
    assert parse_group_key((name, 0, 0)) == 12
    assert parse_group_key(("matmul-0a1b", 0, 0)) is None
    assert dask.utils.key_split(name) == dask.utils.key_split(group_name("ffff", 7, 0.03)) != "distmm-group"
