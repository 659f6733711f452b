"""Random multiplies with epilogs, their references in extended precision, and bounds on rounding."""

from __future__ import annotations

import dask.array as da
import ml_dtypes
import numpy as np
from conformance import make_problem, random_chunks, run_jobs
from dask.array.core import slices_from_chunks

from dask_distmm import matmul
from dask_distmm.numeric.epilogs import Epilog, Formula
from dask_distmm.numeric.types import compute_dtype
from dask_distmm.planning import NamedMatrix, Worker, plan

ALL = [epilog.value for epilog in Epilog]
BF16 = np.dtype(ml_dtypes.bfloat16)

FORMULAS = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "clamp": lambda x: np.clip(x, 0, 6),
    "": lambda x: x,
}
# The largest slope of each: what becomes of an error in x.
SLOPES = {"gelu": 1.2, "silu": 1.2, "hardswish": 1.6}


def gelu_slope(x):
    """By the central difference of the formula, in double precision."""
    h = 1e-5
    return (FORMULAS["gelu"](x + h) - FORMULAS["gelu"](x - h)) / (2 * h)


class Case:
    """Random operands, the reference in float64 (complex128), and a bound on what rounding does to it."""

    def __init__(self, epilog, dtype="float64", shape=(43, 38, 51), alpha=1.0, beta=None, bias="column", bias_axis=-1):
        rng = np.random.default_rng()
        m, n, k = shape
        kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)

        def matrix(*size):
            x = rng.standard_normal(size)
            return (x + 1j * rng.standard_normal(size) if kind.kind == "c" else x).astype(kind)

        self.a, self.b, self.c = matrix(m, k), matrix(k, n), matrix(m, n)
        self.options = {"alpha": alpha, "epilog": epilog or None, "bias_axis": bias_axis}
        if beta is not None:
            self.options |= {"beta": beta}
        formula = Formula(epilog=epilog)
        self.inputs = {}
        if "bias" in formula.inputs:
            self.inputs["bias"] = matrix(m, 1) if bias == "row" else matrix(n)
        if formula.gradient == "relu":
            self.inputs["relu_aux"] = rng.random((m, n)) < 0.5
        if formula.gradient == "gelu":
            self.inputs["gelu_aux"] = matrix(m, n)
        high = np.clongdouble if kind.kind == "c" else np.longdouble
        wide = [x.astype(np.float32) if kind == BF16 else x for x in (self.a, self.b, self.c)]
        a, b, c = (x.astype(high) for x in wide)
        x = alpha * (a @ b) + (beta or 0) * c
        magnitude = abs(alpha) * (abs(a) @ abs(b)) + abs(beta or 0) * abs(c)
        for name, value in self.inputs.items():
            if name == "bias":
                bias = value.astype(np.float32).astype(high) if kind == BF16 else value.astype(high)
                x, magnitude = x + bias, magnitude + abs(bias)
        inner = compute_dtype(kind, k)
        eps = float(np.finfo(inner).eps)
        self.aux = {}
        error = 16 * eps * magnitude
        if formula.saved:
            self.aux[formula.saved] = (x > 0) if formula.saved == "relu_aux" else x
        d = FORMULAS[formula.activation](x)
        error = error * SLOPES.get(formula.activation, 1.0) + 8 * eps * (1 + abs(d))
        if formula.gradient == "relu":
            d = np.where(self.inputs["relu_aux"], x, 0)
        elif formula.gradient == "gelu":
            slope = gelu_slope(self.inputs["gelu_aux"].astype(np.float64))
            d, error = x * slope, error * abs(slope) + abs(x) * (16 * eps + 1e-9 * (eps > 1e-10) + 1e-9)
        own = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(kind.name, 0.0)
        self.d, self.x, self.inner_error = d, x, 16 * eps * magnitude
        self.error = error + own * abs(d) + (2.0**-24 if own else 0)
        self.own, self.eps, self.kind = own, eps, kind
        if formula.sums:
            axis = 1 if bias_axis == 0 else 0
            self.aux[formula.sums] = d.sum(axis=axis)
            self.sum_error = (error + (self.eps * 64 + own * 2) * abs(d)).sum(axis=axis) + own * abs(d).sum(axis=axis)
        if formula.operand_sum:
            x, axis = (a, 1) if formula.operand_sum == "bgrada" else (b, 0)
            self.aux[formula.operand_sum] = x.sum(axis=axis)
            self.sum_error = 16 * eps * abs(x).sum(axis=axis) + own * abs(x.sum(axis=axis))

    def check(self, d, aux=None):
        assert d.dtype == self.kind
        wide = np.clongdouble if self.kind.kind == "c" else np.longdouble
        self._near("D", d.astype(np.float32) if self.kind == BF16 else d, self.d, self.error, wide)
        assert set(aux or {}) == set(self.aux)
        for name, value in (aux or {}).items():
            expected = self.aux[name]
            assert value.shape == expected.shape, name
            if name == "relu_aux":
                assert value.dtype == bool
                sure = abs(self.x) > self.inner_error
                np.testing.assert_array_equal(value[sure], expected[sure])
                continue
            assert value.dtype == self.kind
            bound = (
                self.sum_error
                if value.ndim == 1
                else self.inner_error + self.own * abs(expected) + 1e-7 * (self.own > 0)
            )
            self._near(name, value.astype(np.float32) if self.kind == BF16 else value, expected, bound, wide)

    def _near(self, name, value, expected, bound, wide):
        off = abs(value.astype(wide) - expected)
        assert (off <= bound).all(), f"{name}: {float(np.nanmax(off / bound)):.3g} times the bound"

    def arrays(self, most=4):
        rng = np.random.default_rng()
        return [
            da.from_array(x, chunks=tuple(random_chunks(rng, size, most) for size in x.shape))
            for x in (self.a, self.b, self.c)
        ]

    def run(self, method="auto", with_c=False, **more):
        a, b, c = self.arrays()
        inputs = {name: da.from_array(x, chunks=max(1, x.shape[0] // 3)) for name, x in self.inputs.items()}
        d = matmul(a, b, *([c] if with_c else []), epilog_inputs=inputs or None, method=method, **self.options, **more)
        return d if isinstance(d, tuple) else (d, {})


def run_case(engine, case, method, nranks, sources, with_c, amax=True):
    """Run a multiply with an epilog on the jobs of an engine, without a cluster; return D and the auxiliary outputs."""
    rng = np.random.default_rng()
    (m, k), n = case.a.shape, case.b.shape[1]
    extras = {"c": case.c} if with_c else {}
    extras |= {name: x.reshape(1, -1) if x.ndim == 1 else x for name, x in case.inputs.items()}
    arrays = {"a": case.a, "b": case.b, **extras}
    rows, inner, cols = (random_chunks(rng, size, 4) for size in (m, k, n))
    sizes = {"a": (rows, inner), "b": (random_chunks(rng, k, 3), cols)}
    sizes |= {name: tuple(random_chunks(rng, size, 3) for size in x.shape) for name, x in extras.items()}
    options = case.options
    formula = Formula(
        (complex(options["alpha"]).real, complex(options["alpha"]).imag),
        (complex(options.get("beta", 0)).real, complex(options.get("beta", 0)).imag),
        options["epilog"] or "",
        options["bias_axis"],
        amax=amax,
    )
    problem = make_problem(
        sizes["a"],
        sizes["b"],
        case.a.dtype.name,
        method=method,
        formula=formula,
        extras=tuple(NamedMatrix(name, sizes[name], x.dtype.name) for name, x in extras.items()),
    )
    where, chunks = {}, {}
    for name, x in arrays.items():
        places = slices_from_chunks(sizes[name])
        where[name] = rng.integers(0, nranks + sources, len(places)).astype(np.int32)
        for index, place in enumerate(places):
            chunks[name, index] = np.ascontiguousarray(x[place])
    roster = [Worker(f"w{i}") for i in range(nranks)]
    others = [Worker(f"s{i}") for i in range(sources)]
    made = plan(problem, roster, where, sources=others, engine=engine.name)
    result = run_jobs(engine, type(made).from_wire(made.to_wire()), chunks)
    nrows, ncols = problem.d.counts
    numbers = [[i * ncols + j for j in range(ncols)] for i in range(nrows)]
    d = np.block([[np.asarray(result["", index]) for index in row] for row in numbers])
    aux = {}
    for name in formula.per_element:
        parts = [[np.asarray(result[name, index]) for index in row] for row in numbers]
        if name == formula.saved:
            aux[name] = np.block(parts)
        elif name == formula.sums:
            aux[name] = np.block(parts).astype(np.float64).sum(axis=1 if formula.bias_axis == 0 else 0).astype(d.dtype)
        else:
            amax = max(float(part[0, 0]) for row in parts for part in row)
            assert abs(amax - float(abs(case.d).max())) <= float(case.error.max()) + 1e-6 * amax
    return d, aux
