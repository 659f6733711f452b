"""What is under a lazy transpose or conjugate, and that nothing is copied for it."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_distmm
from dask_distmm import explain, matmul
from dask_distmm.arrays.request import view_of, without_axes
from dask_distmm.runtime.keys import barrier_name, operand_keys

rng = np.random.default_rng()


def matrix(*shape, chunks=(13, 9)):
    return da.from_array(rng.standard_normal(shape) + 1j * rng.standard_normal(shape), chunks=chunks)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("TC"), max_size=5), st.sampled_from(["complex128", "float32"]))
def test_chains_of_views(steps, dtype):
    base = da.ones((4, 3), chunks=2, dtype=dtype) + 1
    x = base
    for step in steps:
        x = x.T if step == "T" else x.conj()
    view = view_of(x)
    assert view[0].name == base.name
    assert view[0].chunks == base.chunks
    assert view[1] == bool(steps.count("T") % 2)
    assert view[2] == bool(steps.count("C") % 2 and dtype == "complex128")


@pytest.mark.parametrize(
    "make", [lambda x: x + 1, lambda x: x[::2], lambda x: x.rechunk(2), lambda x: (x + x.T).T + x, lambda x: x.real]
)
def test_what_is_no_view(make):
    x = make(da.ones((4, 4), chunks=2, dtype=complex))
    assert view_of(x) == (x, False, False)
    # A transpose that is there already is an array like any other.
    with dask.config.set(scheduler="sync"):
        held = x.T.persist()
    assert view_of(held) == (held, False, False)


@pytest.mark.parametrize(
    ("shape", "index", "axes"), [((7,), np.s_[:, None], (0,)), ((7,), np.s_[None], (1,)), ((), np.s_[None, None], ())]
)
def test_axes_that_an_index_has_added(shape, index, axes):
    x = da.ones(shape, chunks=3) + 1
    source, found = without_axes(x[index])
    assert (source.name, source.chunks, source.ndim, found) == (x.name, x.chunks, x.ndim, axes)
    for other in (x[index] + 1, x[index].T.T * 1, da.ones((7, 1), chunks=3)[:4], da.ones((3, 2), chunks=3)[:1]):
        assert without_axes(other) == (other, (0, 1))


@pytest.mark.parametrize("how", ["operator", "op_a"])
def test_a_conjugate_transpose_costs_no_task_and_no_copy(client, take_all, how):
    a, b = matrix(40, 30), matrix(40, 20, chunks=(13, 20))
    with dask_distmm.enabled():
        d = a.conj().T @ b if how == "operator" else matmul(a, b, op_a="C")
    (graph,) = dask.optimize(d)
    names = {key[0] for key in dict(graph.dask) if isinstance(key, tuple)}
    assert not [name for name in names if name.startswith(("conjugate", "transpose"))]
    (gate,) = (task for key, task in dict(graph.dask).items() if barrier_name(key))
    _, keys = operand_keys(gate)
    assert keys[0] == [(a.name, j, i) for i in range(4) for j in range(4)]
    assert_product(a.compute().conj().T, b.compute(), d.compute())
    with dask.config.set({"distmm.numpy.pack-below": 0}):
        d = matmul(b, a.conj(), op_a="C", op_b="N", alpha=2.0)
        np.testing.assert_allclose(d.compute(), 2 * b.compute().conj().T @ a.compute().conj(), rtol=1e-12, atol=1e-12)
    assert_product(a.compute().T, b.compute(), matmul(a.T, b).compute(scheduler="threads"))
    assert matmul(a, a, op_a="C").name != matmul(a, a, op_a="T").name


def test_explain_finds_the_chunks_under_a_transpose(client):
    a = client.persist(matrix(40, 30))
    b = client.persist(matrix(40, 20))
    wait([a, b])
    assert "4 x 4 chunks, read transposed and conjugated\n" in repr(explain(a, b, op_a="C"))
    made = explain(a.T, b)
    found = np.array([made.participants[index].address for index in made.where["a"]]).reshape(4, 4)
    holders = {str(key): addresses for key, addresses in client.who_has(a).items()}
    for i in range(4):
        for j in range(4):
            assert found[i, j] in holders[str((a.name, j, i))]


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_rechunked_operands(inproc_client, method):
    """The chunks before are multiplied, and no other tasks are made; D has the chunks that Dask gives it."""
    a, b = matrix(40, 36), matrix(36, 50)
    with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 0, "array.rechunk.method": method}):
        kept, held = inproc_client.persist([a, a.rechunk((5, 36))])
        for x in (a, kept):
            cut = x.rechunk((40, 5))
            assert cut.chunks == a.rechunk((40, 5)).chunks
            found = view_of(cut.T.rechunk(7).conj())
            assert (found[0].name, found[0].chunks, *found[1:]) == (x.name, x.chunks, True, True)
            for left, right in ((cut, b), (b.T, cut.T.rechunk(9)), (cut.rechunk((3, 36)), b.rechunk((6, -1)))):
                d = left @ right
                assert d.chunks == (left.chunks[0], right.chunks[1])
                graph = dict(dask.optimize(d)[0].dask)
                assert not any("rechunk" in str(key) for key in graph)
                assert_product(left.compute(), right.compute(), d.compute())
            np.testing.assert_allclose((cut @ b)[:3, -2:].compute(), (cut.compute() @ b.compute())[:3, -2:])
        # What is computed already is multiplied as it is.
        assert view_of(held)[0].name == held.name
        assert_product(held.compute(), b.compute(), (held @ b).compute())
        gram = cut.T @ cut
        assert_product(cut.compute().T, cut.compute(), gram.compute())
    assert view_of(a.rechunk(3))[0].chunks == a.rechunk(3).chunks
