"""The engine that pulls, on emulated devices: the same conformance suite as on GPUs, and what passes between processes."""

from __future__ import annotations

import dask
import pytest

from dask_distmm.testing import conformance

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("orders", ["CC", "FF", "CF", "FC"])
def test_methods_and_orders(make_peers, method, nranks, orders):
    ranks, _ = make_peers()
    conformance(ranks, method, nranks, orders=orders, own_out_chunks=True)
