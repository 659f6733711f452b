"""Results on all GPU workers, and conjugates without a copy."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from leaks import assert_nothing_left
from run_events import events
from test_epilogs import computed, on_gpus

from dask_distmm import explain, free_replicas, matmul, replicate

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


def random(*shape, dtype="float64"):
    x = np.random.default_rng().standard_normal(shape)
    return (x * (1 + 1j) if np.dtype(dtype).kind == "c" else x).astype(dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_later_multiplies_move_nothing(clusters, nworkers, method, beta):
    client, _ = clusters(nworkers)
    a, b, c = random(192, 128), random(128, 192), random(192, 192)
    more = {"c": on_gpus(c), "beta": beta} if beta else {}
    d = matmul(on_gpus(a), on_gpus(b), epilog="allreduce", method=method, **more).persist()
    wait(d)
    client.amm.run_once()
    value = computed(client, d)
    np.testing.assert_allclose(value, a @ b + beta * c, rtol=1e-12, atol=1e-11)
    assert "on all workers" in repr(explain(d.T, d))
    e = matmul(d, d, op_a="T", method="allgather", out_chunks=(192 // nworkers, 192)).persist()
    wait(e)
    assert events(client, "done")[-1]["received_bytes"] == 0
    assert_product(value.T, value, computed(client, e))
    del d, e
    assert_nothing_left(client)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ops", ["CN", "NC", "CC"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_conjugates(clusters, nworkers, method, ops, dtype):
    """cuBLASMp's op C where the layout transposes the operand, else on the tile."""
    client, _ = clusters(nworkers)
    a, b = random(96, 130, dtype=dtype), random(130, 67, dtype=dtype)
    stored = [x.conj().T.copy() if op == "C" else x for x, op in zip((a, b), ops, strict=True)]
    d = matmul(*map(on_gpus, stored), op_a=ops[0], op_b=ops[1], method=method)
    assert_product(a, b, computed(client, d))


@pytest.mark.parametrize("method", ["allgather", "local"])
@pytest.mark.parametrize("operand", ["a", "b"])
def test_gathered_operands_move_once(clusters, nworkers, method, operand):
    client, _ = clusters(nworkers)
    a, b = client.persist([on_gpus(random(192, 128)), on_gpus(random(128, 192))])
    d = matmul(a, b, gathered=operand, method=method)
    left, right = computed(client, a), computed(client, b)
    assert_product(left, right, computed(client, d))
    assert f"{operand.upper()} on all workers" in repr(explain(a, b))
    again = matmul(
        a, b, method="allgather", out_chunks=(192 // nworkers, 192) if operand == "b" else (192, 192 // nworkers)
    )
    assert_product(left, right, computed(client, again))
    del d, again
    assert free_replicas() == 1
    replicate(a)
    assert free_replicas(a) == 1
    del a, b
    assert_nothing_left(client)
