"""Epilogs and their auxiliary outputs on GPU workers, against their formulas in extended precision."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import random_chunks
from epilog_cases import ALL, Case
from run_events import events

from dask_distmm import matmul

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


def on_gpus(x):
    import cupy

    chunks = tuple(random_chunks(np.random.default_rng(), size, 4) for size in x.shape)
    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray, meta=cupy.empty((0,) * x.ndim, x.dtype))


def computed(client, array):
    """A Dask array of CuPy chunks as one NumPy array, put together on a worker."""
    found = client.compute(array, sync=True)
    assert found.dtype == array.dtype
    return found.get() if hasattr(found, "get") else found


def finished(client):
    """Numbers of the runs that are over, as far as the scheduler remembers."""
    return {event["run"] for event in events(client, "done")}


def check(client, case, method, with_c=False, kind="cupy", **more):
    make = on_gpus if kind == "cupy" else lambda x: da.from_array(x, chunks=tuple(max(1, s // 2) for s in x.shape))
    operands = [make(x) for x in (case.a, case.b, case.c)[: 3 if with_c else 2]]
    inputs = {name: make(x) for name, x in case.inputs.items()}
    found = matmul(*operands, epilog_inputs=inputs or None, method=method, **case.options, **more)
    d, aux = found if isinstance(found, tuple) else (found, {})
    before = finished(client)
    d, aux = dask.persist(d, aux)
    case.check(computed(client, d), {name: computed(client, x) for name, x in aux.items()})
    assert len(finished(client) - before) == 1


@pytest.mark.parametrize("epilog", ALL)
def test_each_epilog(clusters, nworkers, epilog):
    check(clusters(nworkers)[0], Case(epilog), "auto")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epilog", ["relu_aux_bias", "gelu_aux", "drelu_bgrad", "silu_bias"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_methods_and_types(clusters, nworkers, method, epilog, dtype):
    check(clusters(nworkers)[0], Case(epilog, dtype, alpha=0.5, beta=-2.0), method, with_c=True)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_factors(clusters, nworkers, dtype):
    check(clusters(nworkers)[0], Case("bias", dtype, alpha=0.5 - 2j, beta=1j), "auto", with_c=True)


@pytest.mark.parametrize("epilog", ["relu_aux_bias", "dgelu_bgrad"])
def test_numpy_chunks(clusters, nworkers, epilog):
    case = Case(epilog, bias="row", bias_axis=0)
    check(clusters(nworkers)[0], case, "allgather", kind="numpy")


@pytest.mark.parametrize("method", ["allgather", "reducescatter"])
@pytest.mark.parametrize("bias", ["row", "column"])
@pytest.mark.parametrize("epilog", ["", "relu", "gelu", "bias", "relu_bias", "gelu_bias"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_the_library_does_itself(clusters, nworkers, method, bias, epilog, dtype):
    check(clusters(nworkers)[0], Case(epilog, dtype, bias=bias, alpha=-1.5), method)


@pytest.mark.parametrize("method", ["allgather", "reducescatter", "summa"])
@pytest.mark.parametrize("epilog", ["relu", "relu_bias", "gelu", "gelu_bias", "bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_stays_nan(clusters, nworkers, method, epilog, dtype):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, b, bias = (rng.standard_normal(size).astype(dtype) for size in ((64, 48), (48, 80), (80,)))
    a[5, 7], b[3, 11] = np.nan, np.nan
    inputs = {"bias": on_gpus(bias)} if "bias" in epilog else None
    d = matmul(on_gpus(a), on_gpus(b), epilog=epilog, epilog_inputs=inputs, method=method)
    lost = np.zeros((64, 80), bool)
    lost[5], lost[:, 11] = True, True
    np.testing.assert_array_equal(np.isnan(computed(client, d.persist()).astype(np.float32)), lost)


def swish(x, shift, gate):
    return np.where(gate > 0, (x + shift) / (1 + np.exp(-x)), np.maximum(x, -1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_functions_of_the_user(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    case, rng = Case("", dtype, alpha=0.5), np.random.default_rng()
    shift, gate = rng.standard_normal((43, 1)), rng.standard_normal((43, 38))
    inputs = {"shift": on_gpus(shift), "gate": on_gpus(gate)}
    d = matmul(on_gpus(case.a), on_gpus(case.b), alpha=0.5, epilog=swish, epilog_inputs=inputs)
    x = case.d.astype(np.float64)
    bound = (case.error + 32 * case.eps) * (1.5 + abs(shift)) + case.own * abs(swish(x, shift, gate))
    assert (abs(computed(client, d.persist()).astype(np.float64) - swish(x, shift, gate)) <= bound).all()


def test_one_kernel_each(clusters, nworkers):
    """CuPy has fused the formulas of the other tests, the user's function too."""

    def kernels():
        import gc

        from dask_distmm.engines.gpu.products import Kernel

        return [found.is_fused for found in gc.get_objects() if isinstance(found, Kernel)]

    client, _ = clusters(nworkers)
    for epilog in ("gelu_aux_bias", "drelu_bgrad", "hardswish", "clamp_aux"):
        check(client, Case(epilog, "float32"), "summa")
    inputs = {"shift": on_gpus(np.ones((43, 1))), "gate": on_gpus(np.ones((43, 38)))}
    a, b = (on_gpus(np.random.default_rng().standard_normal(s)) for s in ((43, 20), (20, 38)))
    matmul(a, b, epilog=swish, epilog_inputs=inputs).persist().compute()
    found = [fused for fused_here in client.run(kernels).values() for fused in fused_here]
    assert found
    assert all(found), f"{found.count(False)} of {len(found)} are not fused"
