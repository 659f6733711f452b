"""Which parts of a symmetric D a rank multiplies."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import make_problem
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import Worker, plan
from dask_distmm.planning import schedule as block_schedule
from dask_distmm.planning.cuts import reorder
from dask_distmm.planning.schedule import Triangle, square_on_diagonal

EXTENTS = st.integers(0, 60)


@given(st.tuples(EXTENTS, EXTENTS), st.tuples(EXTENTS, EXTENTS), st.tuples(EXTENTS, EXTENTS), st.integers(1, 20))
def test_each_element_is_multiplied_once_or_copied(square, rows, cols, width):
    (start, stop), (r0, r1), (c0, c1) = map(sorted, (square, rows, cols))
    found = Triangle(start, stop, width)
    times = np.zeros((60, 60), int)
    for top, bottom, left, right in found.kept((r0, r1, c0, c1)):
        assert top < bottom
        assert left < right
        times[top:bottom, left:right] += 1
    expected = np.zeros((60, 60), int)
    expected[r0:r1, c0:c1] = 1
    for top, bottom, left, right in found.copied():
        expected[top:bottom, left:right] = 0
        # What is copied lies above the diagonal, and its mirror image is multiplied.
        assert start <= top < bottom <= left < right <= stop
    np.testing.assert_array_equal(times, expected)


def gram(n=4096, dtype="float64", **changes):
    sizes = (n // 2,) * 2
    fields = {"arrays": ("x", "x"), "transposed": (True, False), "conjugated": (np.dtype(dtype).kind == "c", False)}
    return make_problem((sizes, (50, 50)), ((50, 50), sizes), dtype, method="local", **(fields | changes))


def square_of(problem, epilog=None):
    where = np.zeros(4, np.int32)
    made = plan(problem, [Worker("w", device="gpu")], {"a": where, "b": where}, engine="peer")
    return square_on_diagonal(made, 0, epilog)


def test_squares_of_products_that_are_symmetric():
    assert square_of(gram()) == Triangle(0, 4096, 512)
    assert square_of(reorder(gram(), {"m": [1, 0], "n": [1, 0]})[0]) == Triangle(0, 4096, 512)
    assert square_of(gram(16384)) == Triangle(0, 16384, 1024)
    assert square_of(gram(dtype="complex64")) == Triangle(0, 4096, 512)
    assert square_of(gram(formula=Formula(alpha=(2.0, 0.0))), "") is not None
    assert sum((b - t) * (r - c) for t, b, c, r in square_of(gram()).copied()) == 4096**2 * 7 // 16


@pytest.mark.parametrize(
    ("problem", "epilog"),
    [
        (gram(1024), None),
        (gram(arrays=("x", "y")), None),
        (gram(transposed=(False, False)), None),
        (gram(dtype="complex64", conjugated=(False, False)), None),
        (gram(dtype="complex64", formula=Formula(alpha=(1.0, 1.0))), ""),
        (gram(), "relu"),
        (gram(b_dtype="float32", dtype="float64"), None),
        (reorder(gram(), {"m": [1, 0]})[0], None),
    ],
)
def test_products_that_are_multiplied_whole(problem, epilog):
    assert square_of(problem, epilog) is None


def test_less_work_takes_less_time():
    where = np.zeros(4, np.int32)
    seconds = [
        plan(problem, [Worker("w", device="gpu")], {"a": where, "b": where}, engine="peer").estimate.compute_seconds
        for problem in (gram(), gram(arrays=("x", "y")))
    ]
    assert seconds[0] == pytest.approx(seconds[1] * 9 / 16)
    assert block_schedule._LEAST_SQUARE <= 4096
