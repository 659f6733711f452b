"""What can't be traced is an error at the call, which says what to write instead; plans tell where values are."""

from __future__ import annotations

import pickle

import array_api_compat
import cloudpickle
import dask.array as da
import numpy as np
import pytest

import dask_distmm
from dask_distmm import cond, explain, fori_loop, jit, while_loop
from dask_distmm.errors import PlanError, TracingError

X = da.ones((12, 3), chunks=4)
NUMBERS = np.arange(3.0)


def set_first(x):
    x[0] = 1
    return x


MISTAKES = {
    "truth": (lambda x: x if x.sum() > 0 else -x, "the truth value .*cond or numpy.where"),
    "float": (lambda x: float(x.sum()), "float\\(\\)"),
    "elements": (lambda x: np.asarray(x), "its elements are not known"),
    "assignment": (set_first, "can't be assigned to: write x = numpy.where"),
    "shapes": (lambda x: x + np.ones(5), "\\(12, 3\\), \\(5,\\), which do not fit"),
    "product": (lambda x: x @ np.ones((5, 2)), "\\(12, 3\\) and \\(5, 2\\), which do not fit"),
    "bools": (lambda x: x[x > 0], "an index of bools"),
    "data": (lambda x: np.unique(x), "numpy.unique .* depends on elements"),
    "unknown": (lambda x: np.partition(x, 1), "numpy.partition is not available .*map_rows"),
    "one ufunc": (lambda x: np.modf(x), "numpy.modf is not available"),
    "in place": (lambda x: np.add(x, 1, out=np.ones((12, 3))), "out="),
    "types": (lambda x: x & 1, "bitwise_and of arrays of float64"),
    "axis": (lambda x: x.sum(2), "axis 2 of an array with 2 axes"),
    "reshape": (lambda x: x.reshape(5, 5), "can't be reshaped"),
    "index": (lambda x: x[12], "index 12 of an axis of length 12"),
    "state": (lambda x: fori_loop(0, 3, lambda i, s: s[:2], x), "expected the same shape and type"),
    "type of state": (lambda x: fori_loop(0, 3, lambda i, s: s * 1j, x), "an array of complex128"),
    "structure": (lambda x: fori_loop(0, 3, lambda i, s: (s, s), x), "returns a tuple of 2; expected an array"),
    "condition": (lambda x: while_loop(lambda s: s > 0, lambda s: s, x), "expected a bool without axes"),
    "branches": (lambda x: cond(x.sum() > 0, lambda: x, lambda: x.sum()), "the same structures, shapes and types"),
    "rows": (lambda x: dask_distmm.map_rows(lambda rows: rows[:0], x), "for one row; expected 1"),
    "failing": (lambda x: dask_distmm.map_rows(lambda rows: rows.nothing, x), "fails for one row .* Pass meta="),
    "text": (lambda x: x + np.array(["a"]), "arrays of float64, <U1"),
    "other": (lambda x: np.concatenate([x, np.ones((2, 2))]), "do not fit"),
    "singular": (lambda x: np.linalg.inv(x), "linalg.inv of arrays of float64 \\(12, 3\\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    function, message = MISTAKES[name]
    with pytest.raises(TracingError, match=message):
        jit(function)(X)


def test_the_line_is_in_the_traceback():
    with pytest.raises(TracingError) as caught:
        jit(set_first)(X)
    assert any(entry.name == "set_first" for entry in caught.traceback)


def test_what_leaks():
    kept = []

    def body(i, s):
        kept.append(s * 2)
        return s + 1

    def leaking(x):
        return fori_loop(0, 3, body, x) + kept[-1]

    with pytest.raises(TracingError, match="outside of the function, or of the body"):
        jit(leaking)(X)


def test_arguments():
    with pytest.raises(PlanError, match="static_argnames has 'missing'"):
        jit(lambda x: x, static_argnames=("missing",))
    with pytest.raises(PlanError, match="takes a function"):
        jit(3)
    for wrong in (0, 2.0, True, "3"):
        with pytest.raises(PlanError, match="keep_every must be a positive integer, got"):
            jit(keep_every=wrong)(lambda x: x)
    for loop in (lambda s: while_loop(lambda s: s.sum() < 9, lambda s: s * 2, s), lambda s: s):
        with pytest.raises(TracingError, match="keep_every=3: <lambda> has no fori_loop of a known number of turns"):
            jit(lambda x, loop=loop: loop(x), keep_every=3)(X)
    unknown = da.from_array(np.arange(9.0), chunks=3)
    with pytest.raises(TracingError, match="compute_chunk_sizes"):
        jit(lambda x: x.sum() + unknown[unknown > 2])(X)


def test_numpy_arrays_are_computed_at_once():
    function = jit(lambda x: fori_loop(0, 3, lambda i, s: s + i, x))
    assert isinstance(function(NUMBERS), np.ndarray)
    np.testing.assert_array_equal(function(NUMBERS), NUMBERS + 3)


def test_a_trace_is_kept():
    calls = []

    @jit
    def function(x, y):
        calls.append(1)
        return x @ y

    for y in (np.ones(3), np.zeros(3)):
        np.testing.assert_array_equal(function(X, y).compute(scheduler="sync"), np.full(12, y.sum()))
    assert len(calls) == 1
    function(X, np.ones((3, 2)))
    assert len(calls) == 2


def test_nested_functions_and_closures():
    inner = jit(lambda x: x * 2)
    kept = da.full((12, 3), 5.0, chunks=6)
    found = jit(lambda x: {"sum": inner(x) + kept, "same": [x, 3]})(X)
    assert found["same"][1] == 3
    np.testing.assert_array_equal(found["sum"].compute(scheduler="sync"), np.full((12, 3), 7.0))


class Model:
    def __init__(self, factor):
        self.factor = factor

    @jit
    def predict(self, x):
        return x * self.factor


def test_methods_and_pickles():
    np.testing.assert_array_equal(Model(3).predict(X).compute(scheduler="sync"), np.full((12, 3), 3.0))
    again = cloudpickle.loads(cloudpickle.dumps(jit(lambda x: x + 1)))
    np.testing.assert_array_equal(again(X).compute(scheduler="sync"), np.full((12, 3), 2.0))
    assert pickle.loads(pickle.dumps(jit(np.linalg.norm)))(NUMBERS) == np.linalg.norm(NUMBERS)


def test_array_api():
    def function(x):
        xp = array_api_compat.array_namespace(x)
        return xp.astype(xp.sum(xp.where(x > 0, x, xp.zeros_like(x)), axis=0), xp.float32)

    found = jit(function)(X).compute(scheduler="sync")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [12, 12, 12])


def test_explain():
    @jit
    def function(x, w):
        gradient = x.T @ np.tanh(x @ w)
        return w - gradient

    text = repr(explain(function, X, NUMBERS))
    assert text.startswith("Plan: function on 1 of 1 workers")
    (line,) = [row for row in text.splitlines() if "gradient = x.T" in row]
    assert "# test_errors.py:" in line
    assert "all, sum over ranks, 24 B of each other rank" in text
    assert "rows" in text
    assert "gradient" in explain(function, X, NUMBERS)._repr_html_()
