from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import re
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, wait

import dask_distmm
from dask_distmm import Matmul, NotCollective, PlanError, ProjectedMemoryError, Slab, explain, linalg, matmul
from dask_distmm.arrays.request import parse
from dask_distmm.graph import build_graph


def ones(*shape, chunks=10, dtype=float):
    return da.ones(shape, chunks=chunks, dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (ones(20, 30), ones(20, 30), r"shapes \(20, 30\) and \(20, 30\) don't match"),
        (ones(20, 30), ones(20), "don't match"),
        (da.asarray(1.0), ones(20, 30), "scalars"),
        (ones(20, 30), 2.0, "scalars"),
        (ones(20, 30)[ones(20, chunks=10) > 0], ones(30, 20), "compute_chunk_sizes"),
    ],
)
def test_bad_operands(inproc_client, a, b, message):
    with pytest.raises(PlanError, match=message) as caught:
        matmul(a, b)
    assert isinstance(caught.value, ValueError)
    if message == "compute_chunk_sizes":
        # The question is why `@` runs Dask's own function, and that is the answer.
        assert message in explain(a, b).reason
        return
    with pytest.raises(PlanError, match=message):
        explain(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "strassen"}, "unknown method 'strassen'.*'summa'"),
        ({"engine": "tpu"}, "unknown engine 'tpu'.*'numpy'"),
        ({"workers": ["tcp://127.0.0.1:1"]}, "tcp://127.0.0.1:1.*is not in the cluster"),
        ({"workers": 5}, "workers=5, but the cluster has 4"),
        ({"workers": 0}, "at least 1"),
        ({"workers": [7]}, "expected addresses"),
        ({"out_chunks": ((5, 5), (20,))}, "out_chunks"),
    ],
)
def test_bad_options(inproc_client, options, message):
    with pytest.raises(PlanError, match=message):
        matmul(ones(20, 30), ones(30, 20), **options)


def public_callables():
    for module in (dask_distmm, linalg):
        for name in module.__all__:
            found = getattr(module, name)
            if not callable(found):
                continue
            if inspect.isfunction(found):
                yield name, found
            elif "__init__" in vars(found) and not issubclass(found, Exception):
                yield name, found
                for method, one in vars(found).items():
                    if inspect.isfunction(one) and not method.startswith("_"):
                        yield f"{name}.{method}", one


def test_every_public_callable_refuses_unknown_options():
    found = list(public_callables())
    assert {"quantize", "enable", "enabled", "distribute", "Slab", "Matmul.plan", "solve"} <= {
        name for name, _ in found
    }
    for name, function in found:
        with pytest.raises(TypeError, match=rf"^{re.escape(name)}\(\) has no option 'xyzzy'$"):
            function(xyzzy=None)
        for one in inspect.signature(function).parameters.values():
            wrong = f"{one.name}_{one.name}"
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and len(one.name) > 2:
                with pytest.raises(TypeError, match=rf"^{re.escape(name)}\(\) has no option '{wrong}': "):
                    function(**{wrong: None})
    for function in (dask_distmm.quantize, dask_distmm.enabled, Slab):
        assert pickle.loads(pickle.dumps(function)) is function


def test_bad_configuration(inproc_client):
    with dask.config.set({"distmm.timeouts.vote": "soon"}), pytest.raises(PlanError, match=r"distmm\.timeouts\.vote"):
        matmul(ones(20, 30), ones(30, 20))
    with dask.config.set({"distmm.retries": -1}), pytest.raises(PlanError, match=r"distmm\.retries"):
        matmul(ones(20, 30), ones(30, 20))
    with dask.config.set({"distmm.method": "magic"}), pytest.raises(PlanError, match="magic"):
        matmul(ones(20, 30), ones(30, 20))


def test_projected_memory_at_the_call(client):
    a = da.ones((40_000, 40_000), chunks=4000)
    no_waves = dask.config.set({"distmm.waves.mode": "off"})
    with no_waves, pytest.raises(ProjectedMemoryError, match=r"GiB.*higher memory_limit") as caught:
        matmul(a, a)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert max(error.projected.values()) > 2**31 > max(error.limit.values())


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
def test_empty(inproc_client, shape):
    m, k, n = shape
    c = matmul(ones(m, k), ones(k, n, dtype="int8"))
    assert c.dtype == float
    np.testing.assert_array_equal(c.compute(), np.zeros((m, n)))


@pytest.mark.parametrize(("a", "b"), [((30,), (30,)), ((30,), (30, 20)), ((20, 30), (30,))])
def test_vectors(inproc_client, a, b):
    rng = np.random.default_rng()
    x, y = rng.standard_normal(a), rng.standard_normal(b)
    c = matmul(da.from_array(x, chunks=7), da.from_array(y, chunks=8))
    assert c.shape == (x @ y).shape
    np.testing.assert_allclose(c.compute(), x @ y, rtol=1e-12, atol=1e-13)


def test_nan_and_infinity(inproc_client):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((40, 30)), rng.standard_normal((30, 20))
    a[3, 4], a[5, 6], b[7, 8], b[6, 1] = np.nan, np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = a @ b
    got = matmul(da.from_array(a, chunks=11), da.from_array(b, chunks=12)).compute()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-12, atol=1e-12)


def test_numpy_operands_and_out_chunks(inproc_client):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((40, 30)), rng.standard_normal((30, 20))
    c = matmul(a, da.from_array(b, chunks=7), out_chunks=(9, 20))
    assert c.chunks == ((9, 9, 9, 9, 4), (20,))
    assert_product(a, b, c.compute())


def test_other_types_are_dasks(inproc_client):
    objects = da.from_array(np.ones((4, 4), object), chunks=2)
    assert not any("distmm" in str(key) for key in matmul(objects, objects).dask)
    masked = da.ma.masked_greater(ones(20, 20), 5)
    assert not any("distmm" in str(key) for key in matmul(masked, masked).dask)


def test_without_a_cluster():
    a = da.from_array(np.random.default_rng().standard_normal((30, 30)), chunks=10)
    c = matmul(a, a)
    assert not any("distmm" in str(key) for key in c.dask)
    assert_product(a.compute(), a.compute(), c.compute())
    reason = explain(a, a)
    assert isinstance(reason, NotCollective)
    assert not reason
    assert "no cluster" in repr(reason)
    made = explain(a, a, workers=4, method="summa")
    assert made.grid == (2, 2, 1)
    assert made.workers == ("worker-0", "worker-1", "worker-2", "worker-3")


def test_made_for_a_cluster_computed_without(inproc_client):
    a = da.from_array(np.random.default_rng().standard_normal((30, 30)), chunks=10)
    c = matmul(a, a, method="summa")
    assert any("distmm" in str(key) for key in c.dask)
    for scheduler in ("threads", "sync"):
        assert_product(a.compute(), a.compute(), c.compute(scheduler=scheduler))


def test_explain_knows_placement(inproc_client):
    a = da.ones((400, 400), chunks=100)
    lazy = explain(a, a)
    assert "a" not in lazy.where
    persisted = inproc_client.persist(a)
    wait(persisted)
    made = explain(persisted, persisted, method="allgather")
    assert "a" in made.where
    assert len(made.where["a"]) == 16
    text = repr(made)
    for word in ("allgather", "method", "grid", "flops", "memory", "time", "against"):
        assert word in text or (word == "against" and len(made.alternatives) == 1)
    assert max(made.projected_bytes.values()) > 0
    assert made.estimate.seconds > 0


def test_names_are_deterministic(inproc_client):
    a = ones(20, 30)
    assert matmul(a, a.T).name == matmul(a, a.T).name
    assert matmul(a, a.T).name != matmul(a, a.T, method="local").name
    assert dask_distmm.matmul(a, a.T).dask.layers.keys() == matmul(a, a.T).dask.layers.keys()


def test_asynchronous_client(inproc_cluster):
    async def work() -> np.ndarray:
        async with Client(inproc_cluster.scheduler_address, asynchronous=True) as client:
            a = da.from_array(x, chunks=20)
            return await client.compute(matmul(a, a))

    x = np.random.default_rng().standard_normal((50, 50))
    assert_product(x, x, asyncio.run(work()))


def test_inside_a_running_event_loop(inproc_client):
    """As in Jupyter, where cells run inside a loop and the client has another one."""

    async def cell() -> None:
        a = da.ones((60, 60), chunks=20).persist()
        assert explain(a, a).method
        with Matmul(a, a) as mm:
            mm.plan()

    asyncio.run(cell())


def unchecked(a, b, **options):
    """Make the product without what `matmul` checks against the cluster at the call."""
    problem = parse(a, b, workers=options.get("workers")).problem
    return da.Array(build_graph(problem, a, b), problem.name, problem.d.chunks, dtype=problem.result_type)


def test_the_same_errors_when_the_run_starts(client):
    a = da.from_array(np.random.default_rng().standard_normal((60, 60)), chunks=20)
    with dask.config.set({"distmm.memory.limit-fraction": 1e-6}):
        c = unchecked(a, a)
    with pytest.raises(ProjectedMemoryError, match="limit-fraction") as caught:
        c.compute()
    assert max(caught.value.projected.values()) > max(caught.value.limit.values()) > 0
    with pytest.raises(PlanError, match="not in the cluster"):
        unchecked(a, a, workers=["tcp://127.0.0.1:1"]).compute()


def test_enabled_by_the_environment():
    program = "import dask.array as da, dask_distmm; assert dask_distmm.is_enabled(); assert da.matmul._distmm"
    environment = os.environ | {"DASK_DISTMM__ENABLED": "true"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)
