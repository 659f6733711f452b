"""Groups of products of different shapes, on worker processes."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product, random_chunks, random_matrix
from distributed import wait
from matrices import is_collective

from dask_distmm import PlanError, explain_grouped, matmul_grouped
from dask_distmm.numeric.types import dtype_from_name

MIXED = [(40, 30, 20), (700, 50, 90), (1, 1, 1), (33, 250, 41), (0, 5, 6), (600, 300, 350), (20, 20, 0)]


def pairs_of(shapes, dtype="float64"):
    rng = np.random.default_rng()
    kind = dtype_from_name(dtype)
    arrays = [(random_matrix(rng, (m, k), kind, "C"), random_matrix(rng, (k, n), kind, "F")) for m, n, k in shapes]
    cut = [
        tuple(
            da.from_array(x, chunks=tuple(random_chunks(rng, size, 3) if size else (0,) for size in x.shape))
            for x in pair
        )
        for pair in arrays
    ]
    return arrays, cut


@pytest.mark.parametrize("batch", ["auto", "items", "collective"])
def test_mixed_shapes(client, batch):
    arrays, pairs = pairs_of(MIXED)
    found = matmul_grouped(pairs, batch=batch)
    assert [is_collective(d) for d, (m, n, k) in zip(found, MIXED, strict=True) if m * n * k] == [
        batch == "collective"
    ] * 5
    for (a, b), d in zip(arrays, dask.compute(*found), strict=True):
        assert_product(a, b, d)
    text = repr(explain_grouped(pairs, batch=batch))
    assert ("collective run," in text) == (batch == "collective")
    assert "Dask's own" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "complex64"])
def test_types_in_groups(client, dtype):
    arrays, pairs = pairs_of([(30, 20, 10), (15, 25, 35)], dtype)
    for (a, b), d in zip(arrays, dask.compute(*matmul_grouped(pairs)), strict=True):
        assert_product(a, b, d)


def test_a_common_formula(client):
    arrays, pairs = pairs_of([(30, 20, 10), (15, 25, 10)])
    transposed = [(a.T, b) for a, b in pairs]
    for batch in ("items", "collective"):
        found = dask.compute(*matmul_grouped(transposed, alpha=-2, op_a="T", epilog="relu", batch=batch))
        for (a, b), d in zip(arrays, found, strict=True):
            np.testing.assert_allclose(d, np.maximum(-2 * (a @ b), 0), rtol=1e-12, atol=1e-12)


def test_the_longest_first_and_each_alone(client):
    shapes = [(16, 16, 16), (200, 200, 200), (64, 64, 64), (400, 400, 400), (100, 100, 100)] * 2
    arrays, pairs = pairs_of(shapes)
    found = matmul_grouped(pairs, batch="items")
    assert [d.name for d in found] == [d.name for d in matmul_grouped(pairs, batch="items")]
    # One alone: nothing of the others is in its graph.
    for i in (0, 3):
        (own,) = dask.optimize(found[i])
        names = {key[0] for key in dict(own.dask) if "distmm-group" in str(key)}
        assert names == {found[i].name}
        assert_product(*arrays[i], found[i].compute())
    # All: one graph, in which the order is that of the sizes.
    held = client.persist(found)
    wait(held)
    priorities = client.run_on_scheduler(group_priorities)
    assert len(priorities) == len(shapes)
    ordered = [name for name, _ in sorted(priorities.items(), key=lambda pair: pair[1])]
    assert ordered == sorted(ordered, key=lambda name: int(name.split("-")[3]))
    assert len({priority[:2] for priority in priorities.values()}) == 1


def group_priorities(dask_scheduler):
    return {
        key[0]: ts.priority
        for key, ts in dask_scheduler.tasks.items()
        if key[0].startswith("distmm-group-") and key[1] == 0
    }


def test_long_ones_of_a_group_are_runs(client):
    large = da.ones((4000, 4000), chunks=1000)
    small = da.ones((50, 50))
    found = explain_grouped([(small, small), (large, large), (small, small)])
    assert [share.collective for share in found.shares] == [False, True, False]
    found = explain_grouped([(small, small)], method="summa")
    assert found.shares[0].collective


@pytest.mark.parametrize(
    ("pairs", "options", "words"),
    [
        (
            [(np.ones((2, 3)), np.ones((3, 2))), (np.ones((2, 3)), np.ones((2, 3)))],
            {},
            r"product 1: shapes .* don't match",
        ),
        ([(np.ones((1, 2, 3)), np.ones((3, 2)))], {}, "product 0: a and b must be 2-D, got 3-D and 2-D"),
        ([np.ones((2, 2))], {}, r"product 0 is ndarray; expected a pair"),
        ([(np.ones((2, 3)), np.ones((3, 2)))], {"epilog": "relu_bias"}, "use matmul for each"),
        ([(np.ones((2, 3)), np.ones((3, 2)))], {"epilog": "swish"}, "unknown epilog"),
        ([(np.ones((2, 3)), np.ones((3, 2)))], {"batch": "some"}, "unknown batch"),
        (
            [(np.ones((2, 3)), np.ones((3, 2)))],
            {"batch": "items", "method": "summa"},
            "batch='items' and method='summa'",
        ),
        ([(np.ones((2, 3), int), np.ones((3, 2), int))], {"alpha": 2}, "product 0: .*floating-point"),
    ],
)
def test_bad_groups_are_refused_at_the_call(pairs, options, words):
    for function in (matmul_grouped, explain_grouped):
        with pytest.raises(PlanError, match=words):
            function(pairs, **options)


def test_groups_without_a_cluster():
    arrays, pairs = pairs_of(MIXED)
    for (a, b), d in zip(arrays, dask.compute(*matmul_grouped(pairs)), strict=True):
        assert_product(a, b, d)
    assert matmul_grouped([]) == []
