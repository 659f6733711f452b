"""A linear layer for PyTorch whose products run on a Dask cluster, forward and backward, each with its epilog.

    y  = x W^T + b      bias
    dW = dy^T x         bgrada: db, the sum of dy over its rows, comes out of the same run
    dx = dy W

x has many rows and is a Dask array, on the cluster, or a tensor; the weights are parameters of PyTorch, which records
the layer like any other. ``python docs/examples/linear_layer.py`` fits one on a cluster of this machine.
"""

from __future__ import annotations

import dask
import dask.array as da
import torch
from distributed import Client

from dask_distmm import matmul


class Linear(torch.autograd.Function):
    """``torch.nn.functional.linear`` on the cluster."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        """Return y, a tensor: (rows, outputs) from x (rows, inputs), weight (outputs, inputs) and bias (outputs,)."""
        ctx.x, ctx.weight = as_operand(x), weight.detach()
        y = matmul(ctx.x, ctx.weight, op_b="T", epilog="bias", epilog_inputs={"bias": bias.detach()})
        return torch.from_numpy(y.compute())

    @staticmethod
    def backward(ctx, dy):
        """Return the gradients with respect to x, weight and bias; a Dask array has none."""
        rows = da.from_array(dy.numpy(), chunks=(ctx.x.chunks[0], dy.shape[1]))
        dweight, sums = matmul(rows, ctx.x, op_a="T", epilog="bgrada")
        wanted = [dweight, sums["bgrada"]]
        if ctx.needs_input_grad[0]:
            wanted.append(matmul(rows, ctx.weight))
        dweight, dbias, *dx = map(torch.from_numpy, dask.compute(*wanted))
        return (dx[0] if dx else None), dweight, dbias


def as_operand(x):
    """Return x as a Dask array, a tensor in four chunks of rows."""
    if isinstance(x, da.Array):
        return x
    return da.from_array(x.detach().numpy(), chunks=(max(1, -(-x.shape[0] // 4)), x.shape[1]))


def fit(x: da.Array, t: torch.Tensor, steps: int = 15, rate: float = 1.0) -> tuple[list[float], torch.Tensor]:
    """Return the loss of each step of a gradient descent, and the weights."""
    weight = torch.zeros(t.shape[1], x.shape[1], dtype=t.dtype, requires_grad=True)
    bias = torch.zeros(t.shape[1], dtype=t.dtype, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(Linear.apply(x, weight, bias), t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weight.detach()


def main() -> None:
    """Find the weights that have made the targets."""
    with Client(n_workers=2, threads_per_worker=1):
        x = da.random.default_rng(1).standard_normal((20_000, 16), chunks=(5_000, 16)).persist()
        true = torch.arange(48.0, dtype=torch.float64).reshape(3, 16) / 48
        t = torch.from_numpy(matmul(x, true, op_b="T").compute()) + 1
        losses, weight = fit(x, t)
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.1e}, weights off by {float((weight - true).abs().max()):.1e} at most"
        )


if __name__ == "__main__":
    main()
