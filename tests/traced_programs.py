"""Random functions for `jit`: lists of operations on what there is, with loops and branches."""

from __future__ import annotations

import dask.array as da
import numpy as np

from dask_distmm import cond, fori_loop, logsumexp, segment_sum, while_loop


def _bounded(x):
    """Return values that neither overflow nor vanish when operations are repeated."""
    return x if x.dtype.kind in "bi" else np.tanh(x) if x.dtype.kind == "f" else x / (1 + abs(x))


def _float(x):
    return x * 1.0 if x.dtype.kind in "bi" else x


UNARY = [
    lambda x: np.exp(-abs(_float(x))),
    lambda x: x * 2 + 1,
    lambda x: abs(x),
    lambda x: np.where(abs(x) > 0.5, x, 0),
    lambda x: (x > 0) if x.dtype.kind != "c" else x.real > 0,
    lambda x: _float(x) / 3,
    lambda x: np.sqrt(abs(_float(x))),
    lambda x: x.astype("f8") if x.dtype.kind == "b" else -x,
    lambda x: x + 0.5j,
    lambda x: x.astype(np.float32) if x.dtype.kind == "f" else x,
]
BINARY = [
    lambda x, y: x * y,
    lambda x, y: _float(x) - _float(y),
    lambda x, y: x + y,
    lambda x, y: np.maximum(x, y) if "c" not in (x.dtype.kind, y.dtype.kind) else x + 2 * y,
    lambda x, y: _float(x) / (1 + abs(y)),
    lambda x, y: np.where(abs(x) > abs(y), x, y),
]
REDUCTIONS = ["sum", "mean", "max", "min", "any", "all", "argmax", "var"]


def _reduce(x, how, axis, keepdims):
    if how in ("max", "min", "argmax") and x.dtype.kind == "c":
        x = abs(x)
    if how == "argmax" and x.ndim:
        # Equal elements, up to rounding, may be found anywhere.
        axis = 0 if axis is None else axis
        x = np.round(_float(x), 3) if x.dtype.kind != "b" else x
        return (x == x.max(axis=axis, keepdims=True)).sum(axis=axis) if x.shape[axis] else x.sum(axis=axis)
    if how == "argmax":
        return x
    if how in ("any", "all"):
        x = abs(x) > 0.25
    return getattr(x, how)(axis=axis, keepdims=keepdims)


class Program:
    """Operations by numbers of values; `run` does them on arrays of any kind."""

    def __init__(self, rng, length, arrays, depth=0):
        self.steps, self.rough = [], False
        self.count = len(arrays)
        values = list(arrays)
        for _ in range(length):
            step = self._step(rng, values, depth)
            if step is None:
                continue
            with np.errstate(all="ignore"):
                made = step(values)
            if made.size > 20000 or made.ndim > 3:
                continue
            self.steps.append(step)
            values.append(made)
        # Whether single precision is somewhere in it.
        self.rough |= any(x.dtype.name in ("float32", "complex64") for x in values)
        self.wanted = sorted({len(values) - 1, *rng.choice(len(values), 3).tolist()})

    def __call__(self, *arrays):
        """Return some of the values."""
        values = list(arrays)
        for step in self.steps:
            values.append(step(values))
        return [values[i] for i in self.wanted]

    def _step(self, rng, values, depth):
        def pick(fits=lambda x: True):
            found = [i for i, x in enumerate(values) if fits(x)]
            return None if not found else found[int(rng.integers(max(0, len(found) - 6), len(found)))]

        kind = rng.choice(
            ["unary", "binary", "reduce", "product", "shape", "other", "loop"],
            p=[0.2, 0.25, 0.15, 0.15, 0.1, 0.1, 0.05],
        )
        i = pick()
        if kind == "unary":
            f = UNARY[rng.integers(len(UNARY))]
            return lambda v: _bounded(f(v[i]))
        if kind == "binary":
            shape = values[i].shape

            def fits(x):
                try:
                    return np.broadcast_shapes(x.shape, shape) is not None
                except ValueError:
                    return False

            j, f = pick(fits), BINARY[rng.integers(len(BINARY))]
            return lambda v: _bounded(f(v[i], v[j]))
        if kind == "reduce":
            if not values[i].size:
                return None
            axis = rng.choice([None, *range(values[i].ndim)])
            how, keepdims = rng.choice(REDUCTIONS), bool(rng.integers(2))
            return lambda v: _bounded(_reduce(v[i], how, axis, keepdims))
        if kind == "product":
            a = pick(lambda x: 1 <= x.ndim <= 2 and x.dtype.kind in "fc")
            if a is None:
                return None
            flip = bool(rng.integers(2))
            k = values[a].shape[0 if flip or values[a].ndim == 1 else -1]
            b = pick(lambda x: 1 <= x.ndim <= 2 and x.dtype.kind in "fc" and k in x.shape)
            if b is None:
                return None
            other = values[b].shape[0] != k
            return lambda v: _bounded(((v[a].T if flip else v[a]) @ (v[b].T if other else v[b])) / max(1, k))
        if kind == "shape":
            x = values[i]
            choices = [lambda v: v[i].T]
            if x.ndim:
                choices.append(lambda v: v[i][None])
                choices.append(lambda v: v[i][..., None])
            if x.ndim and x.shape[-1] > 1:
                choices.append(lambda v: v[i][..., 1:])
                choices.append(lambda v: v[i][..., ::-1])
                choices.append(lambda v: np.concatenate([v[i], v[i] * 2], axis=-1))
            if x.ndim and x.shape[0] > 2:
                choices.append(lambda v: v[i][1])
                choices.append(lambda v: v[i][-2::-2])
            return choices[rng.integers(len(choices))]
        if kind == "other":
            x = pick(lambda x: x.ndim == 2 and x.dtype.kind == "f" and x.shape[1])
            if x is None:
                return None
            which = rng.integers(5)
            if which == 0:
                return lambda v: logsumexp(v[x], 1)
            if which == 1:
                return lambda v: segment_sum(v[x], (abs(v[x][:, 0]) * 3).astype(np.int64), 3) / len(v[x])
            if which == 2:
                return lambda v: np.cumsum(v[x], axis=1) / v[x].shape[1]
            if which == 3:
                return lambda v: np.linalg.solve(v[x].T @ v[x] + 2 * np.eye(v[x].shape[1]), v[x].T @ v[x])
            return lambda v: np.linalg.qr(v[x])[1].T @ np.linalg.qr(v[x])[1] / len(v[x])
        x = pick(lambda x: x.dtype.kind == "f" and x.dtype.itemsize == 8)
        if x is None or depth > 1:
            return None
        inner = Program(rng, 4, [*values[-3:], values[x]], depth + 1)
        self.rough |= inner.rough
        first, shape = max(0, len(values) - 3), values[x].shape

        def same(state, v):
            made = inner(*v[first : first + len(values[-3:])], state)[-1]
            total = abs(made).mean() if made.size else made.sum().real
            return np.tanh(state * 0.7 + total * 0.1)

        assert shape == values[x].shape
        which = rng.integers(3)
        if which == 0:
            turns = int(rng.integers(0, 4))
            return lambda v: fori_loop(0, turns, lambda t, s: same(s, v[: len(values)]) + t * 0.01, v[x])
        if which == 1:

            def repeated(v):
                def turn(s):
                    return same(s[0], v[: len(values)]), s[1] + 1 + 0 * abs(s[0]).sum()

                return while_loop(lambda s: s[1] < 2.5, turn, (v[x], 0.0))[0]

            return repeated
        return lambda v: cond(abs(v[x]).sum() > 3.3, lambda s: same(s, v), lambda s: s * 0.5, v[x])


def inputs(rng):
    """Return random arrays, and Dask arrays of those that are in rows."""
    m, n, k = (int(x) for x in rng.integers(1, (30, 6, 4)))
    arrays = [
        rng.standard_normal((m, n)),
        rng.standard_normal(m),
        rng.integers(-2, 3, (m,)),
        rng.standard_normal((n, k)),
    ]
    if rng.integers(2):
        arrays.append(rng.standard_normal((m, m)))
    cuts = np.sort(rng.integers(0, m + 1, int(rng.integers(0, 5))))
    chunks = tuple(int(x) for x in np.diff([0, *cuts, m]))
    return arrays, [
        da.from_array(x, chunks=(chunks, *x.shape[1:])) if len(x) == m and i != 3 else x for i, x in enumerate(arrays)
    ]


def assert_close(found, expected, *, rough=False):
    """Compare results, with their shapes and types."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    rtol, atol = (2e-4, 1e-5) if rough else (1e-7, 1e-9)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def check_program(seed, ranks, compute):
    rng = np.random.default_rng(seed)
    arrays, lazy = inputs(rng)
    with np.errstate(all="ignore"):
        program = Program(rng, int(rng.integers(1, 14)), arrays)
        expected = program(*arrays)
    found = compute(program, lazy, ranks)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rough=program.rough)
