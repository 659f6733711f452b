"""Types that Dask's serializers would lose on the way to another process."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest
from distributed.protocol import deserialize, serialize

from dask_distmm.comms import serializers as travel


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32])
def test_numpy_arrays_arrive_as_they_were(dtype, order):
    travel.register_serializers()
    sent = np.asarray(np.random.default_rng().standard_normal((5, 7)).astype(dtype), order=order)
    found = deserialize(*serialize(sent))
    assert found.dtype == sent.dtype
    assert found.flags.f_contiguous == sent.flags.f_contiguous
    assert found.tobytes() == sent.tobytes()


def test_cupy_arrays_of_bfloat16_are_told_by_name():
    """CuPy's interface tells two bytes of nothing in particular; Dask's deserializer makes of the name what it is."""
    sender = travel._with_bfloat16(lambda x: ({"typestr": x.dtype.str, "shape": x.shape}, [x]))
    header, _ = sender(np.zeros(3, ml_dtypes.bfloat16))
    assert header == {"typestr": "bfloat16", "shape": (3,)}
    assert np.dtype(header["typestr"]) == ml_dtypes.bfloat16
    assert sender(np.zeros(3))[0]["typestr"] == "<f8"


def test_cupy_where_dask_can_not_send_it_is_left_alone(monkeypatch):
    """Its serializers for CuPy need RMM or Numba."""
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=type("ndarray", (), {})))
    monkeypatch.setitem(sys.modules, "distributed.protocol.cupy", None)
    travel._let_bfloat16_travel.cache_clear()
    travel.register_serializers()
    found = deserialize(*serialize(np.arange(3.0)))
    assert found.tolist() == [0, 1, 2]
