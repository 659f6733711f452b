"""Tensors of PyTorch, and arrays that speak DLPack, as operands; Dask arrays with tensors as chunks."""

from __future__ import annotations

import runpy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no requirement; .ci/run installs it at its end")

import dask  # noqa: E402
import dask.array as da  # noqa: E402
from conformance import assert_product  # noqa: E402
from distributed import Client, LocalCluster, wait  # noqa: E402
from run_events import newest_run, runs_after  # noqa: E402

import dask_distmm  # noqa: E402
from dask_distmm import PlanError, explain, matmul, to_torch  # noqa: E402
from dask_distmm.arrays.kinds import shared_array, tensor_of  # noqa: E402

rng = np.random.default_rng()

TYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int8", "uint8", "int32", "bool"]


def with_tensors(x: np.ndarray, chunks) -> da.Array:
    return da.from_array(x, chunks=chunks).map_blocks(as_tensor, meta=tensor_of(np.empty((0, 0), x.dtype)))


def as_tensor(block: np.ndarray):
    return tensor_of(block.copy())


def whole(d: da.Array) -> np.ndarray:
    """The chunks of an array with tensors as one array."""
    rows = [[shared_array(d.blocks[i, j].compute()) for j in range(d.numblocks[1])] for i in range(d.numblocks[0])]
    return np.block(rows)


# Without a cluster


@pytest.mark.parametrize("dtype", [*TYPES, "float8_e4m3fn", "float8_e5m2"])
def test_there_and_back_in_the_same_memory(dtype):
    x = torch.ones(3, 4).to(getattr(torch, dtype))
    array = shared_array(x)
    assert array.dtype.name == dtype
    assert array.shape == (3, 4)
    assert array.ctypes.data == x.data_ptr()
    np.testing.assert_array_equal(array.astype(np.complex128), np.ones((3, 4)))
    back = tensor_of(array)
    assert back.dtype == x.dtype
    assert back.data_ptr() == x.data_ptr()


def test_views_of_tensors():
    x = torch.arange(6.0).reshape(2, 3)
    assert shared_array(x.T).ctypes.data == x.data_ptr()
    assert shared_array(x.T).flags.f_contiguous
    z = torch.tensor([[1 + 2j, 3 - 1j]])
    np.testing.assert_array_equal(shared_array(z.conj()), [[1 - 2j, 3 + 1j]])
    np.testing.assert_array_equal(shared_array(z.conj().imag), [[-2, 1]])
    fixed = np.ones(3)
    fixed.flags.writeable = False
    assert tensor_of(fixed).data_ptr() != fixed.ctypes.data


def test_tensors_that_are_refused():
    with pytest.raises(PlanError, match="requires grad"):
        matmul(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))
    with pytest.raises(PlanError, match="dense one on cpu or cuda"):
        matmul(torch.ones(2, 2).to_sparse(), torch.ones(2, 2))
    with pytest.raises(PlanError, match="dense one on cpu or cuda"):
        matmul(torch.ones(2, 2, device="meta"), torch.ones(2, 2))
    with pytest.raises(PlanError, match="is not a worker"):
        to_torch("matmul-0")


class Exporter:
    """An array of another package: it speaks DLPack and nothing else."""

    def __init__(self, array, device=1):
        self.array, self.device = array, device

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.device, 0


def test_arrays_of_other_packages():
    x = rng.standard_normal((3, 4))
    assert shared_array(Exporter(x)).ctypes.data == x.ctypes.data
    d = matmul(Exporter(x), Exporter(x.T))
    np.testing.assert_allclose(d.compute(), x @ x.T)
    strange = Exporter(x, device=7)  # on a device that only its own package knows
    assert shared_array(strange) is strange
    narrow = Exporter(x.astype(ml_dtypes.bfloat16))  # DLPack of NumPy does not carry it
    assert shared_array(narrow) is narrow


# On a cluster


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "int8"])
def test_tensors_as_operands(client, dtype):
    a, b = (tensor_of((4 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
            for shape in ((60, 50), (50, 40)))  # fmt: skip
    d = matmul(a, b, out_chunks=20)
    assert d.dtype.name == dtype
    assert isinstance(d._meta, np.ndarray)
    assert_product(shared_array(a), shared_array(b), d.compute())
    assert "Plan" in repr(explain(a, b))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_chunks_that_are_tensors(client, dtype):
    """Tensors in, tensors out, one run; the result is an operand again."""
    x, y = (rng.standard_normal(shape).astype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
            for shape in ((60, 50), (50, 40)))  # fmt: skip
    a, b = with_tensors(x, (20, 25)), with_tensors(y, (25, 20))
    before = newest_run(client)
    d = matmul(a, b)
    assert d.dtype == getattr(torch, dtype)
    assert isinstance(d._meta, torch.Tensor)
    d = d.persist()
    assert_product(x, y, whole(d))
    assert runs_after(client, before) == 1
    assert isinstance(d.blocks[0, 0].compute(), torch.Tensor)
    if dtype == "float64":
        joined = d.map_blocks(np.asarray, dtype=dtype, meta=np.empty((0, 0)))
        assert_product(x, y, joined.compute())
    again = matmul(d, d, op_a="T")
    assert isinstance(again._meta, torch.Tensor)
    assert whole(again).shape == (40, 40)


def test_tensors_beside_arrays(client):
    """One operand with tensors, the other and the epilog's inputs without; auxiliary outputs are tensors too."""
    x, y, bias = (rng.standard_normal(shape) for shape in ((60, 50), (50, 40), (40,)))
    options = {"epilog": "relu_aux_bias", "epilog_inputs": {"bias": torch.from_numpy(bias)}}
    d, aux = matmul(with_tensors(x, 20), da.from_array(y, chunks=20), **options)
    expected = x @ y + bias
    np.testing.assert_allclose(whole(d), np.maximum(expected, 0), rtol=1e-10, atol=1e-10)
    assert aux["relu_aux"].dtype == torch.bool
    np.testing.assert_array_equal(whole(aux["relu_aux"]), expected > 0)


def test_enable(client):
    x = rng.standard_normal((60, 60))
    a = with_tensors(x, 20)
    before = newest_run(client)
    with dask.config.set({"distmm.minimum-flops": 0}), dask_distmm.enabled():
        d = a @ a
        assert isinstance(d._meta, torch.Tensor)
        assert_product(x, x, whole(d.persist()))
    assert runs_after(client, before) == 1


def test_shards_of_each_process(client):
    """Every chunk is a tensor on one worker, in the memory that Dask has."""
    x = rng.standard_normal((60, 60))
    a = da.from_array(x, chunks=20)
    d = matmul(a, a).persist()
    wait(d)

    def look(name, dask_worker):
        shards = to_torch(name, dask_worker)
        again = to_torch(name, dask_worker)
        same = {index: tensor.data_ptr() == again[index].data_ptr() for index, tensor in shards.items()}
        return {index: tensor.numpy().copy() for index, tensor in shards.items()}, same

    found = client.run(look, d.name)
    assert sorted(index for shards, _ in found.values() for index in shards) == [
        (i, j) for i in range(3) for j in range(3)
    ]
    assert all(all(same.values()) for _, same in found.values())
    shards = {index: value for shards, _ in found.values() for index, value in shards.items()}
    assert_product(x, x, np.block([[shards[i, j] for j in range(3)] for i in range(3)]))
    assert client.submit(lambda name: len(to_torch(name)), d.name, pure=False).result() <= 9


# The example of a layer


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent / "docs" / "examples" / "linear_layer.py"
    return runpy.run_path(str(path))


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_layer_has_the_gradients_of_pytorch(client, example, kind):
    x, w, b, t = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((60, 20), (7, 20), (7,), (60, 7)))
    found, expected = ([y.clone().requires_grad_() for y in (x, w, b)] for _ in range(2))
    torch.nn.functional.mse_loss(torch.nn.functional.linear(*expected), t).backward()
    before = newest_run(client)
    if kind == "array":
        found[0] = da.from_array(x.numpy(), chunks=(20, 20))
    y = example["Linear"].apply(*found)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, b))
    torch.nn.functional.mse_loss(y, t).backward()
    assert runs_after(client, before) == (3 if kind == "tensor" else 2)
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_layer_learns(client, example):
    x = rng.standard_normal((200, 5))
    t = torch.from_numpy(x @ rng.standard_normal((5, 2)) + 1)
    losses, _ = example["fit"](da.from_array(x, chunks=(50, 5)), t, steps=8)
    assert losses[-1] < 0.1 * losses[0]


def test_shards_are_those_of_a_dtensor(tmp_path):
    """In a `torch.distributed` program on the workers; the rank of a worker is the number of its slab of D.

    On a cluster of its own: PyTorch leaves files and a listener behind in the processes.
    """
    x = rng.standard_normal((40, 30))

    def rank(name, store):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        (((row, _), local),) = to_torch(name).items()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=row, world_size=2)
        try:
            whole = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])
            return tuple(whole.shape), whole.full_tensor().numpy().copy()
        finally:
            dist.destroy_process_group()

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        a = client.persist(da.from_array(x, chunks=(20, 30)))
        d = matmul(a, x.T, out_chunks=(20, 40), distributions=[None, None, dask_distmm.Slab(0)]).persist()
        wait(d)
        names = d.name, str(tmp_path / "store")
        futures = [client.submit(rank, *names, workers=[w], pure=False) for w in client.nthreads()]
        for shape, value in client.gather(futures):
            assert shape == (40, 40)
            assert_product(x, x.T, value)
