"""The example of two layers, forward and backward, against PyTorch's autograd; it learns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from run_events import newest_run, runs_after


@pytest.fixture(scope="module")
def perceptron():
    path = Path(__file__).parent.parent / "docs" / "examples" / "perceptron.py"
    found = importlib.util.spec_from_file_location("perceptron", path)
    module = importlib.util.module_from_spec(found)
    sys.modules["perceptron"] = module
    found.loader.exec_module(module)
    yield module
    del sys.modules["perceptron"]


def arrays():
    rng = np.random.default_rng()
    shapes = {"x": (60, 24), "t": (60, 7), "w1": (24, 33), "b1": (33,), "w2": (33, 7), "b2": (7,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def gradients(perceptron, values):
    lazy = {name: da.from_array(v, chunks=max(1, v.shape[0] // 3)) for name, v in values.items()}
    layers = perceptron.Layers(*(lazy[name] for name in perceptron.Layers._fields))
    return dask.compute(*perceptron.step(lazy["x"], lazy["t"], layers))


def test_gradients_are_those_of_autograd(client, perceptron):
    torch = pytest.importorskip("torch", reason="PyTorch is the reference")
    values = arrays()
    before = newest_run(client)
    loss, found = gradients(perceptron, values)
    runs = runs_after(client, before)
    assert runs == 5
    tensors = {name: torch.tensor(v, requires_grad=name[0] in "wb") for name, v in values.items()}
    hidden = torch.relu(tensors["x"] @ tensors["w1"] + tensors["b1"])
    expected = ((hidden @ tensors["w2"] + tensors["b2"] - tensors["t"]) ** 2).sum() / 60
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, value in found._asdict().items():
        np.testing.assert_allclose(value, tensors[name].grad.numpy(), rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_differences(client, perceptron):
    """Without PyTorch too: against central differences of the loss in NumPy."""
    values = arrays()

    def loss_of(changed):
        hidden = np.maximum(changed["x"] @ changed["w1"] + changed["b1"], 0)
        return ((hidden @ changed["w2"] + changed["b2"] - changed["t"]) ** 2).sum() / 60

    loss, found = gradients(perceptron, values)
    assert loss == pytest.approx(loss_of(values), rel=1e-12)
    rng, h = np.random.default_rng(), 1e-6
    for name, gradient in found._asdict().items():
        direction = rng.standard_normal(values[name].shape)
        ends = [loss_of(values | {name: values[name] + sign * h * direction}) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx((gradient * direction).sum(), rel=1e-4, abs=1e-4)


def test_it_learns(client, perceptron):
    losses = perceptron.train(rows=512, inside=64, steps=12, rate=0.05)
    assert losses[-1] < 0.5 * losses[0]
