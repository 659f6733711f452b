"""A perceptron of two layers, forward and backward, each product one collective run with its epilog.

    hidden = relu(x W1 + b1)        relu_aux_bias: the mask of the relu is kept
    y      = hidden W2 + b2         bias
    loss   = sum((y - t) ** 2) / rows

``python docs/examples/perceptron.py`` trains it on a cluster of this machine, on GPUs if there are any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np

from dask_distmm import matmul


class Layers(NamedTuple):
    """Weights and biases, or the gradients of the loss with respect to them."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any


def forward(x: da.Array, p: Layers) -> tuple[da.Array, da.Array, da.Array]:
    """Return y, and what the backward pass needs: the hidden layer, and the mask of its relu."""
    hidden, saved = matmul(x, p.w1, epilog="relu_aux_bias", epilog_inputs={"bias": p.b1})
    y = matmul(hidden, p.w2, epilog="bias", epilog_inputs={"bias": p.b2})
    return y, hidden, saved["relu_aux"]


def backward(x: da.Array, p: Layers, hidden: da.Array, mask: da.Array, dy: da.Array) -> Layers:
    """Return the gradients, from that of the loss with respect to y."""
    # The mask is applied, and the gradient of the bias summed up, in the run that makes the gradient of the layer.
    dhidden, sums = matmul(dy, p.w2, op_b="T", epilog="drelu_bgrad", epilog_inputs={"relu_aux": mask})
    return Layers(
        w1=matmul(x, dhidden, op_a="T"),
        b1=sums["drelu_bgrad"],
        w2=matmul(hidden, dy, op_a="T"),
        b2=dy.sum(axis=0),
    )


def step(x: da.Array, t: da.Array, p: Layers) -> tuple[da.Array, Layers]:
    """Return the loss and its gradients, all lazy: one ``dask.compute`` runs each product once."""
    y, hidden, mask = forward(x, p)
    off = y - t
    return (off**2).sum() / x.shape[0], backward(x, p, hidden, mask, 2 * off / x.shape[0])


def train(rows: int = 4096, inside: int = 256, steps: int = 30, rate: float = 0.02) -> list[float]:
    """Fit a smooth function of 64 numbers; return the losses."""
    rng = np.random.default_rng(7)
    x = da.random.default_rng(7).standard_normal((rows, 64), chunks=(rows // 4, 64)).persist()
    t = da.tanh(x @ da.from_array(rng.standard_normal((64, 8)) / 8)).persist()
    w1, w2 = rng.standard_normal((64, inside)) / 8, rng.standard_normal((inside, 8)) / inside**0.5
    p = Layers(w1, np.zeros(inside), w2, np.zeros(8))
    losses = []
    for _ in range(steps):
        loss, gradient = dask.compute(*step(x, t, p))
        losses.append(float(loss))
        p = Layers(*(value - rate * g for value, g in zip(p, gradient, strict=True)))
    return losses


if __name__ == "__main__":
    from distributed import Client

    with Client(n_workers=2, threads_per_worker=1) as client:
        for number, loss in enumerate(train()):
            if number % 5 == 4:
                print(f"step {number:2d}: loss {loss:.4f}")
