"""Which products GEMMs are slow with, and what the plan of the peer engine does about it."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import make_problem

from dask_distmm.planning import Worker, plan
from dask_distmm.planning.cuts import slowdown, unit
from dask_distmm.planning.schedule import block_schedules, extent_multiple
from dask_distmm.show.text import plan_text


def problem(m, n, k, dtype="float16", parts=1, **options):
    def cut(length):
        return (length // parts,) * (parts - 1) + (length - length // parts * (parts - 1),)

    return make_problem((cut(m), cut(k)), (cut(k), cut(n)), dtype, method="allgather", array="cupy", **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((4096, 4096, 4096), "float16", 1.0),
        ((4099, 4096, 4096), "float16", 1.0),  # how many rows there are does not matter
        ((4096, 4099, 4096), "float16", 6.0),
        ((4096, 4096, 4099), "bfloat16", 6.0),
        ((4096, 4100, 4096), "float16", 3.0),
        ((4096, 4098, 4098), "float64", 1.0),
        ((4096, 4099, 4096), "float64", 1.4),
        ((4099, 4099, 4099), "float32", 1.0),
        ((4099, 4099, 4099), "complex128", 1.0),
    ],
)
def test_rows_that_are_no_multiple_of_16_bytes_are_slow(shape, dtype, expected):
    found = problem(*shape, dtype)
    assert slowdown(found, in_chunks=True) == slowdown(found, in_chunks=False) == expected
    assert extent_multiple(found) == (16 if expected > 1 else 1)


def test_chunks_count_where_they_are_multiplied_as_they_are():
    found = problem(6000, 6000, 6000, parts=5)  # of 1200
    assert slowdown(found, in_chunks=True) == 1
    found = problem(6000, 6000, 6000, parts=16)  # of 375
    assert slowdown(found, in_chunks=True) == 6
    assert slowdown(found, in_chunks=False) == 1


def test_in_chunks_of_a_transpose_no_row_is_along_k():
    found = problem(4096, 4096, 4099)
    assert slowdown(found, in_chunks=True) == 6
    transposed = problem(4096, 4096, 4099, transposed=(True, False))
    assert slowdown(transposed, in_chunks=True) == extent_multiple(transposed) == 1
    assert slowdown(problem(4096, 4099, 4096, transposed=(True, False)), in_chunks=True) == 6
    # A library that lays matrices out anew may have rows along k.
    assert slowdown(transposed, in_chunks=False) == 6


def test_products_for_which_copies_take_longer_are_left_as_they_are():
    assert extent_multiple(problem(4096, 101, 4096)) == 1
    assert extent_multiple(problem(131001, 131001, 4096)) == 1  # there is no room for two D
    assert extent_multiple(problem(4096, 4096, 4096, "float8_e4m3fn")) == 16


@pytest.mark.parametrize("step", [1, 16])
def test_pieces_are_multiples_of_tiles_where_they_are_long(step):
    assert [unit(length, step) for length in (1023, 1024, 9363)] == [16, 128, 128]
    assert [unit(length, step) for length in (1, 63, 64)] == [step, step, 16]


def test_a_plan_says_that_matrices_are_padded():
    where, roster = np.arange(4, dtype=np.int32) % 2, [Worker("w0"), Worker("w1")]
    told = {}
    for n in (4096, 4099):
        made = plan(problem(4096, n, 4096, parts=2), roster, {"a": where, "b": where}, engine="peer")
        told[n] = plan_text(made)
        # Buffers for both operands: what lies there is not used as it lies.
        assert n == 4096 or all(one.stationary_bytes and one.panel_bytes for one in block_schedules(made))
    assert "padded to multiples of 16" in told[4099]
    assert "padded" not in told[4096]
