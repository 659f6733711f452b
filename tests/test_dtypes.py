from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dask_distmm.numeric.types import compute_dtype, dtype_from_name, supported


def test_names():
    assert dtype_from_name("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert dtype_from_name("complex64") == np.complex64
    with pytest.raises(TypeError):
        dtype_from_name("float63")


@pytest.mark.parametrize("char", "?bBhHiIlLqQefdgFDG")
def test_numbers_are_supported(char):
    assert supported(np.dtype(char))


@pytest.mark.parametrize("dtype", ["O", "U3", "S2", "M8[s]", "m8[s]", ">f8" if np.little_endian else "<f8", "f8,i4"])
def test_the_rest_is_not(dtype):
    assert not supported(np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "k", "expected"),
    [
        ("float16", 10, "float32"),
        ("bfloat16", 10, "float32"),
        ("int16", 2**21, "float64"),
        ("uint16", 2**21 + 1, "uint16"),
        ("bool", 2**30, "float64"),
        ("int32", 10, "int32"),
        ("complex64", 10, "complex64"),
    ],
)
def test_compute_dtype(dtype, k, expected):
    assert compute_dtype(dtype_from_name(dtype), k) == np.dtype(expected)


def test_narrow_integers_are_exact_at_the_bound():
    """The largest sum that is computed in float64 is below 2**53."""
    assert (2**16 - 1) ** 2 * 2**21 < 2**53
