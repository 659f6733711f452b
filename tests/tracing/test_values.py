"""What traced functions compute is what NumPy computes, on any number of ranks."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from matrices import assert_near
from traced_cases import CASES, arguments, assert_equal, operands
from tracing_ranks import on_ranks

import dask_distmm
from dask_distmm import cond, explain, fori_loop
from dask_distmm import random as draws
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.errors import MatrixError, TracingError
from dask_distmm.tracing.control import flattened


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_values(name, ranks):
    function = CASES[name]
    arrays, lazy = operands(np.random.default_rng())
    with np.errstate(all="ignore"):
        expected, tree = flattened(function(*arguments(function, arrays)))
    found, same = flattened(on_ranks(function, *arguments(function, lazy), ranks=ranks))
    assert same == tree
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("keep_every", [1, 3, 4, 11, 30])
def test_loops_in_pieces(keep_every):
    def function(X, A):
        centred = X - X.mean(0)

        def turn(i, state):
            B, n, rows, columns = state
            B = fori_loop(0, 2, lambda j, B: 0.5 * B + A * (i + j), B)
            return B, n + i, rows + (centred @ B).sum(1), columns + i * X[:, :2].T

        first = fori_loop(2, 9, turn, (A, 0, X[:, 0], 0 * X[:, :2].T))
        second = fori_loop(0, 11, turn, first)
        return {"state": second, "before": (first[0], first[3]), "others": [centred.sum(1), X, 3]}

    rng = np.random.default_rng()
    X, A = rng.standard_normal((40, 5)), rng.standard_normal((5, 2))
    expected, tree = flattened(function(X, A))
    lazy = dask_distmm.jit(function, keep_every=keep_every)(da.from_array(X, chunks=(15, 3)), A)
    found, same = flattened(lazy)
    assert same == tree
    for one, other in zip(dask.compute(*found, scheduler="sync"), expected, strict=True):
        assert_near(one, other, rtol=1e-9)
    runs = explain(lazy["state"]).runs if keep_every < 11 else [explain(lazy["state"])]
    assert len(runs) == -(-7 // keep_every) + -(-11 // keep_every) - 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_of_a_state(ranks):
    """What is a view of one part of a state, and becomes the next value of another part, is read before that."""

    def function(X, A, B):
        def turn(i, state):
            A, B, x, total = state
            return B.T, A.T, x[::-1], total + x[0] * X.sum()

        return fori_loop(0, 7, turn, (A, B, A[0], 0.0))

    rng = np.random.default_rng()
    X, A, B = rng.standard_normal((12, 3)), rng.standard_normal((4, 4)), rng.standard_normal((4, 4))
    found = on_ranks(function, da.from_array(X, chunks=(5, 3)), A, B, ranks=ranks)
    for one, other in zip(found, function(X, A, B), strict=True):
        np.testing.assert_allclose(one, other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_turns_are_taken_once(ranks, monkeypatch):
    """Turns of nested loops, branches and messages are written out, whatever their number is."""
    taken = []
    take = ProgramJob._take
    monkeypatch.setattr(ProgramJob, "_take", lambda self, step: (taken.append(step), take(self, step)))

    def function(X, x, turns):
        def inner(j, x):
            return x + X.T @ (X @ x) * 1e-3

        def turn(i, state):
            x, n, y = state
            x = cond(x.sum() > 100.0, lambda x: x / abs(x).max(), lambda x: x + 1.0, x)
            _values, vectors = np.linalg.eigh(X.T @ (X * y[:, None]))
            return fori_loop(0, 3, inner, x + 1e-3 * abs(vectors[:, 0])), n + 1, y / (1 + n) + 1

        return fori_loop(0, turns, turn, (x, 0, X[:, 0]))

    rng, counts = np.random.default_rng(), []
    X, x = rng.random((30, 4)), rng.random(4)
    for turns in (3, 30):
        taken.clear()
        found = on_ranks(function, da.from_array(X, chunks=(8, 4)), x, turns=turns, ranks=ranks)
        counts.append(len(taken))
        for one, other in zip(found, function(X, x, turns), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert counts[0] == counts[1]


def unknown(x, sizes=(9, 0, 14, 7)):
    """Return an array whose chunks have sizes that Dask does not know."""
    lazy = da.from_array(x, chunks=(sizes, *x.shape[1:]))
    return lazy.map_blocks(np.array, chunks=((np.nan,) * len(sizes), *lazy.chunks[1:]), dtype=x.dtype)


def of_unknown_rows(X, y, A):
    def turn(i, state):
        W, g = state
        residual = np.tanh(X @ W) - y[:, None]
        return W - 0.01 * (X.T @ residual), g + abs(residual).max(1)

    W, g = fori_loop(0, 7, turn, (A, 0 * y))
    Z = (X - X.mean(0)) / X.std(0, ddof=1)
    gram = Z.T @ Z
    rows = dask_distmm.map_rows(np.expm1, y)
    labels = (abs(y) * 2).astype(int)
    sums = np.linalg.solve(gram + np.eye(5), X.T @ y), X.max(0), X.var(), y.mean(), y.sum(), (y > 0).any()
    chosen = dask_distmm.segment_sum(X, labels, 4), A[labels % 3], np.linalg.norm(X, axis=1), y.astype("f4").mean()
    return (W, g), (Z, rows, np.concatenate([X, Z[:, :2]], 1), Z.T, X[:, None, :2] + y[:, None, None]), sums, chosen


@pytest.mark.parametrize("keep_every", [None, 3])
def test_unknown_sizes(keep_every):
    rng = np.random.default_rng()
    X, y, A = rng.standard_normal((30, 5)), rng.standard_normal(30), rng.standard_normal((5, 2))
    expected, _ = flattened(of_unknown_rows(X, y, A))
    function = dask_distmm.jit(of_unknown_rows, keep_every=keep_every)
    found, _ = flattened(function(unknown(X), unknown(y), A))
    assert np.isnan(found[1].shape[0])
    for one, other in zip(dask.compute(*found, scheduler="sync"), expected, strict=True):
        assert_equal(np.asarray(one), np.asarray(other))
    # Another operand whose rows are known is on all ranks.
    both = dask_distmm.jit(lambda x, v: (x @ v, v.sum(0)))
    for one, other in zip(dask.compute(*both(unknown(X), da.from_array(A, chunks=2))), (X @ A, A.sum(0)), strict=True):
        assert_near(one, other, rtol=1e-9)


NEED_ROWS = {
    "len": lambda x: x * len(x),
    "shape": lambda x: x.sum() / x.shape[0],
    "size": lambda x: x.sum() / x.size,
    "zeros": lambda x: x[:, 0] + np.zeros(x.shape[0], bool),
    "row": lambda x: x[0],
    "some rows": lambda x: x[:3],
    "last rows": lambda x: x[1:] * 2,
    "take": lambda x: x[np.array([1, 2])],
    "argmax": lambda x: x.argmax(0),
    "gathered": lambda x: np.linalg.inv(x.T @ x) @ x.T @ x[:, 0] + np.sort(x, 0)[0],
    "kernel": lambda x: x @ x.T,
    "ravel": lambda x: x.ravel(),
    "below": lambda x: np.concatenate([x, x]),
    "qr": lambda x: np.linalg.qr(x),
    "matrices": lambda x: np.linalg.pinv(x),
    "random": lambda x: x + draws.normal(draws.key(3), x.shape),
}


@pytest.mark.parametrize("name", NEED_ROWS)
def test_sizes_that_must_be_known(name):
    with pytest.raises(TracingError, match="the number of its rows is needed here: call its compute_chunk_sizes"):
        dask_distmm.jit(NEED_ROWS[name])(unknown(np.ones((30, 3))))


def test_unknown_sizes_that_do_not_fit():
    function, x = dask_distmm.jit(lambda x, y: x * y), np.ones((30, 3))
    with pytest.raises(TracingError, match="have 4 and 2 chunks of rows; expected as many"):
        function(unknown(x), unknown(x, (10, 20)))
    with pytest.raises(MatrixError, match="have chunks of 13 and 14 rows side by side"):
        function(unknown(x), unknown(x, (9, 0, 13, 8))).compute(scheduler="sync")


@pytest.mark.parametrize("spoil", [None, "rows", "labels", "numbers"])
@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_rows_by_labels(kind, spoil):
    """A product with a matrix that says which label each row has is NumPy's, of NaN and of labels that none has."""
    rng = np.random.default_rng()
    X, labels, numbers = rng.standard_normal((3000, 5)).astype(kind), rng.integers(0, 7, 3000), np.arange(7)
    if spoil == "rows":
        X[rng.integers(3000, size=3), rng.integers(5, size=3)] = np.nan, np.inf, -np.inf
    elif spoil == "labels":
        labels[rng.integers(3000, size=40)] = rng.choice([-1, 7, 2**40], 40)
    elif spoil == "numbers":
        numbers = rng.permutation(9)[:7]

    def function(X, labels, numbers):
        chosen = labels[:, None] == numbers
        turned = (numbers[:, None] == labels).astype(X.dtype)
        sums = chosen.astype(X.dtype).T @ X, X.T @ chosen.astype(X.dtype), turned @ X[:, 0], X[:, 1] @ turned.T
        # What others read, too, is a matrix.
        read = labels[:, None] == numbers + 0
        return sums, chosen.sum(0), chosen.sum(0, keepdims=True), turned.sum(1), (read.sum(0), read.any(1))

    lazy = da.from_array(X, chunks=(1100, 5)), da.from_array(labels, chunks=700)
    found, _ = flattened(on_ranks(function, *lazy, numbers, ranks=2))
    with np.errstate(invalid="ignore"):
        expected, _ = flattened(function(X, labels, numbers))
    for array, reference in zip(found, expected, strict=True):
        assert array.dtype == reference.dtype
        np.testing.assert_allclose(
            array, reference, rtol=1e-3 if kind == "float32" else 1e-9, atol=1e-3 if kind == "float32" else 1e-9
        )


@pytest.mark.parametrize("kind", ["float64", "float32", "int16", "bool"])
@pytest.mark.parametrize("columns", [1, 4, 16, 40])
def test_best_of_short_rows(kind, columns):
    """It is the first one of several, and NaN where there is one."""
    rng = np.random.default_rng()
    X = rng.integers(0, 6, (2500, columns)).astype(kind)
    if kind.startswith("float"):
        X[rng.integers(2500, size=90), rng.integers(columns, size=90)] = rng.choice([np.nan, np.inf, -np.inf], 90)

    def function(X):
        # Values that other statements read, too, and that are results.
        near = np.maximum(X[:, ::-1], 2)
        first = X.argmin(1), np.argmax(X, axis=1, keepdims=True), (X == 3).argmax(1), X.T.argmax(1)
        return *first, near, near.argmin(1), np.where(near > X, near, X).argmax(1)

    for rows in (2500, 12):
        found = on_ranks(function, da.from_array(X[:rows], chunks=(-(-rows // 2), columns)), ranks=2)
        for array, reference in zip(found, function(X[:rows]), strict=True):
            np.testing.assert_array_equal(array, reference)
            assert array.dtype == reference.dtype


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["float64", "float32", "complex64", "int32", "bool"])
@pytest.mark.parametrize("spoiled", [False, True])
def test_sums_of_rows_and_columns(kind, order, spoiled):
    rng = np.random.default_rng()
    X = rng.integers(0, 2, (2500, 12)) if kind in ("int32", "bool") else rng.standard_normal((2500, 12))
    X = X.astype(kind)
    if spoiled and kind[0] in "fc":
        X[rng.integers(2500, size=5), rng.integers(12, size=5)] = np.nan, np.inf, -np.inf, np.inf, -np.inf

    def function(X):
        every = X.sum(0), X.sum(1), X.sum(0, keepdims=True), X.sum(1, keepdims=True), X[:, ::3].sum(1)
        return *every, X.sum(1, dtype=np.complex128), X.T.sum(0), X.T.sum(1), (X + 1).sum(0), X.sum()

    lazy = da.from_array(X, chunks=(1200, 12)).map_blocks(np.array, order=order, dtype=X.dtype)
    with np.errstate(invalid="ignore"):
        expected = function(X)
    for array, reference in zip(on_ranks(function, lazy, ranks=2), expected, strict=True):
        np.testing.assert_allclose(array, reference, rtol=1e-3, atol=1e-3 if kind.endswith(("32", "64")) else 0)
        assert array.dtype == reference.dtype


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("columns", [0, 1, 3, 40, 300])
def test_products_in_pieces(columns, order):
    rng = np.random.default_rng()
    X, A, y = rng.standard_normal((9000, 32)), rng.standard_normal((32, columns)), rng.standard_normal(columns)

    def function(X, A, y):
        def turn(i, A):
            # The row is another one in each turn.
            return X.T @ ((X @ A - y * i) / (1 + y * y)) / len(X)

        last = fori_loop(0, 4, turn, A)
        return last, X @ last, (last.T @ X.T).sum(1), X @ A[::-1]

    lazy = da.from_array(X, chunks=(4700, 32)).map_blocks(np.array, order=order, dtype=X.dtype)
    for array, reference in zip(on_ranks(function, lazy, A, y, ranks=2), function(X, A, y), strict=True):
        np.testing.assert_allclose(array, reference, rtol=1e-8, atol=1e-11)
