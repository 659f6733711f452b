"""Random programs on Dask arrays under ``enable()``, against NumPy.

A seed determines a program: operands of random types, chunks and origins, statements that multiply them, cut and join
what comes out, rewrite its graph, keep it on the workers or forget it, and statements that compute. All of it is
computed by NumPy, too, in extended precision and of absolute values, so that each result has a gate of its own: 16 eps
for each step that rounds, times the sum of the absolute values. Integers are exact. Warnings, and what Dask logs of
that level, are failures.

    python tests/test_random_programs.py 5000             so many programs, with fresh seeds, and what failed
    python tests/test_random_programs.py --seed 1234      one program, reduced to the statements that it fails by
    python tests/test_random_programs.py --stock ...      without dask_distmm: what fails is Dask's own
    python tests/test_random_programs.py --processes ...  on worker processes
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import logging
import pickle
import re
import secrets
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import random_chunks
from dask.graph_manipulation import bind, checkpoint, clone, wait_on
from distributed import Client, LocalCluster
from leaks import assert_nothing_left

import dask_distmm
from dask_distmm.errors import DistMMError

DTYPES = ["float64", "float32", "complex128", "complex64", "int64", ">f8"]
ORIGINS = ["memory", "memory", "persisted", "made", "made", "made", "zarr", "delayed", "fortran", "scattered"]
LENGTHS = (1, 2, 5, 8, 13, 24)
# Programs of larger numbers could overflow.
LARGEST = 1e8


@dataclasses.dataclass
class Value:
    """What a variable is: as NumPy has it, without rounding, and by absolute values; and how often it was rounded."""

    plain: Any
    exact: Any
    size: Any
    steps: int
    eps: float


class Program:
    """The lines of a program, and the values of its variables."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.inputs: list[Any] = []
        self.lines: list[str] = []
        # Those that can be used by the next statement, and all.
        self.live: dict[str, Value] = {}
        self.values: dict[str, Value] = {}
        self.dtypes = self.rng.choice(
            DTYPES, size=int(self.rng.choice([1, 1, 2, 3])), p=[0.4, 0.2, 0.1, 0.1, 0.15, 0.05]
        )
        self.minimum_flops = [0, 0, None, 1e15][self.rng.integers(4)]
        # Where tasks are said to take long what can be a region of a graph is one, if it begins with what is there.
        self.task, self.regions = self.choose(["0.5ms", "50ms", "50ms", "50ms"]), self.chance(0.9)
        self.origins = ORIGINS if self.chance(0.5) else ["persisted"]
        # Graphs that are optimized have other tasks of the same keys: Dask loses chunks where a program mixes the two.
        self.patient, self.optimized = self.chance(0.9), self.chance(0.85)
        for _ in range(int(self.rng.integers(2, 10))):
            self.add(STATEMENTS)
            if self.chance(0.1):
                self.add(ENDS)
        for _ in range(int(self.rng.integers(1, 3))):
            self.add(ENDS)

    def __str__(self) -> str:
        inputs = [f"# input {i}: {x.dtype} {x.shape}" for i, x in enumerate(self.inputs)]
        return "\n".join(
            [
                f"# minimum-flops: {self.minimum_flops}, task: {self.task}, regions: {self.regions}",
                f"# patient: {self.patient}",
                *inputs,
                *self.lines,
            ]
        )

    def add(self, kinds: list[Callable[[Program], None]]) -> None:
        """Add a statement of a random kind; one that finds no operands of its own makes some."""
        kinds[self.rng.integers(len(kinds))](self)

    def let(self, text: str, numpy: str | None = None, size: str | None = None, steps: int = 1) -> str:
        """Add a statement for one new variable: its text, NumPy's, and that of absolute values, where they differ."""
        name, numpy = f"v{len(self.values)}", text if numpy is None else numpy
        self.lines.append(f"{name} = {text}")
        parents = [self.values[found] for found in dict.fromkeys(re.findall(r"\bv\d+\b", numpy))]
        spaces = [{n: getattr(v, field) for n, v in self.values.items()} for field in ("plain", "exact", "size")]
        with np.errstate(all="ignore"):
            plain, exact, whole = (
                np.asarray(eval(line, {"np": np, "xp": np}, space))
                for line, space in zip((numpy, numpy, size or numpy), spaces, strict=True)
            )
        self.keep(name, plain, exact, whole, steps + sum(x.steps for x in parents), max(x.eps for x in parents))
        return name

    def keep(self, name: str, plain: Any, exact: Any, size: Any, steps: int, eps: float) -> None:
        assert plain.shape == exact.shape == size.shape
        own = float(np.finfo(plain.dtype).eps) if plain.dtype.kind in "fc" else 0.0
        self.live[name] = self.values[name] = Value(plain, exact, size.real, steps, max(eps, own))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, things: Any) -> Any:
        return things[self.rng.integers(len(things))]

    def form(self, forms: str) -> str:
        """Return one of several texts; XP in it is NumPy, whose functions ask Dask, or Dask."""
        return str(self.choose(forms.split(" | "))).replace("XP", self.choose(["np", "xp"]))

    def length(self) -> int:
        return int(self.choose(LENGTHS))

    def chunks(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        def cut(size: int) -> tuple[int, ...]:
            if size == 0 or self.chance(0.2):
                return (size,)
            return (1,) * size if size < 6 and self.chance(0.1) else random_chunks(self.rng, size, 3)

        return tuple(map(cut, shape))

    def new(self, shape: tuple[int, ...]) -> str:
        """Add an operand, and return its name."""
        dtype, name = np.dtype(self.choose(self.dtypes)), f"v{len(self.values)}"
        x = self.rng.integers(-9, 10, shape) if dtype.kind == "i" else self.rng.standard_normal(shape)
        x = (x + 1j * self.rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)
        self.lines.append(f"{name} = {self.choose(self.origins)}({len(self.inputs)}, {self.chunks(shape)})")
        self.inputs.append(x)
        wide = np.clongdouble if dtype.kind == "c" else np.longdouble
        self.keep(name, x, x if dtype.kind == "i" else x.astype(wide), abs(x.astype(wide)), 0, 0.0)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].plain.shape

    def pick(self, *ndims: int, wanted: Callable[[Value], bool] = lambda x: True) -> str:
        """Return a variable of so many dimensions; the latest are taken more often."""
        found = [
            name
            for name, x in self.live.items()
            if x.plain.ndim in ndims and 0 < x.plain.size < 3000 and x.size.max() < LARGEST and wanted(x)
        ]
        if found and not self.chance(0.15):
            return found[-1] if self.chance(0.4) else str(self.choose(found))
        return self.new(tuple(self.length() for _ in range(self.choose(ndims))))

    def like(self, shape: tuple[int, ...]) -> str:
        """Return a variable of one shape."""
        found = [n for n, x in self.live.items() if x.plain.shape == shape and x.size.max(initial=0) < LARGEST]
        return str(self.choose(found)) if found and self.chance(0.7) else self.new(shape)

    def some(self, most: int = 3) -> list[str]:
        """Return the newest variable and others."""
        names = list(self.live) or [self.new((5, 5))]
        others = self.rng.permutation(names[:-1])[: self.rng.integers(most)]
        return [names[-1], *map(str, others)]

    def same(self, names: list[str], text: str) -> None:
        """Add a statement whose results are what these variables are."""
        made = [f"v{len(self.values) + i}" for i in range(len(names))]
        self.lines.append(f"{', '.join(made)}{',' if len(made) == 1 else ''} = {text}")
        for name, before in zip(made, names, strict=True):
            self.live[name] = self.values[name] = self.values[before]
        if self.chance(0.5):
            self.forget(names)

    def forget(self, names: list[str]) -> None:
        if any("dask.optimize(" in line for line in self.lines):
            # What that returns does not keep chunks on the workers: Dask cancels them with what it was made of.
            return
        self.lines.append(f"del {', '.join(names)}")
        for name in names:
            del self.live[name]


# Products.


def operator(p: Program) -> None:
    a = p.pick(2, 2, 1)
    b = p.like((p.shape(a)[-1], p.length()) if p.chance(0.8) else p.shape(a)[-1:])
    p.let(p.form(f"{a} @ {b} | {a}.dot({b}) | XP.matmul({a}, {b}) | XP.dot({a}, {b})"))


def of_one(p: Program) -> None:
    """Products of a matrix and its own transpose."""
    a = p.pick(2)
    p.let(p.form(f"{a}.T @ {a} | {a} @ {a}.T | np.linalg.matmul({a}, {a}.T) | {a}.conj().T @ {a}"))


def of_vectors(p: Program) -> None:
    a = p.pick(1)
    p.let(p.form(f"XP.outer({a}, {p.pick(1)}) | XP.vdot({a}, {p.like(p.shape(a))})"))


def batched(p: Program) -> None:
    a = p.pick(3)
    *batch, _, k = p.shape(a)
    shapes = [(*batch, k, p.length()), (k, p.length()), (k,), (1, k, p.length())]
    p.let(p.form(f"XP.matmul({a}, {p.like(p.choose(shapes))})"))


def tensordot(p: Program) -> None:
    a = p.pick(1, 2, 2, 3)
    ndim = len(p.shape(a))
    count = int(p.rng.integers(1, min(ndim, 2) + 1))
    left = [int(x) for x in p.rng.permutation(ndim)[:count]]
    contracted = [p.shape(a)[axis] for axis in left]
    rest = [p.length() for _ in range(p.rng.integers(0, 2 if ndim == 3 else 3))]
    places = [int(x) for x in p.rng.permutation(count + len(rest))]
    shape: list[int] = [0] * len(places)
    for place, size in zip(places, contracted + rest, strict=True):
        shape[place] = size
    b = p.like(tuple(shape))
    right = places[:count]
    left = [axis - ndim if p.chance(0.3) else axis for axis in left]
    right = [axis - len(shape) if p.chance(0.3) else axis for axis in right]
    axes: Any = (left, right) if count > 1 or p.chance(0.5) else (left[0], right[0])
    p.let(p.form("XP.TENSORDOT | np.linalg.TENSORDOT").replace("TENSORDOT", f"tensordot({a}, {b}, axes={axes})"))


def inner(p: Program) -> None:
    a = p.pick(1, 2, 2)
    k = p.shape(a)[-1]
    p.let(f"np.inner({a}, {p.like((p.length(), k) if p.chance(0.7) else (k,))})")


def einsum(p: Program) -> None:
    a = p.pick(2)
    i, k = p.shape(a)
    j = p.length()
    spec, shape = p.choose([
        ("ik,kj->ij", (k, j)), ("ik,kj->ji", (k, j)), ("ik,jk", (j, k)), ("ik,k->i", (k,)), ("ik,ij->kj", (i, j)),
        ("ik,ik->i", (i, k)), ("ik,ik->", (i, k)), ("ik,kj->j", (k, j)),
    ])  # fmt: skip
    p.let(p.form(f"XP.einsum('{spec}', {a}, {p.like(shape)})"))


def multi_dot(p: Program) -> None:
    a = p.pick(2, 1)
    b = p.like((p.shape(a)[-1], p.length()))
    c = p.like((p.shape(b)[-1], p.length()) if p.chance(0.7) else p.shape(b)[-1:])
    p.let(f"np.linalg.multi_dot([{a}, {b}, {c}])", steps=3)


def matrix_power(p: Program) -> None:
    a = p.pick(2, wanted=lambda x: x.plain.shape[0] == x.plain.shape[1] and x.size.max() < 1e2)
    if p.shape(a)[0] != p.shape(a)[1] or p.values[a].size.max() > 1e2:
        a = p.new((p.length(),) * 2)
    n = int(p.rng.integers(1, 5))
    p.let(f"np.linalg.matrix_power({a}, {n})", steps=n + (n - 1) * p.values[a].steps)


# Parts of what there is.


def slices(p: Program) -> None:
    a = p.pick(1, 2, 2, 3)

    def index(size: int) -> str:
        low, high = sorted(int(x) for x in p.rng.integers(-size, size + 1, 2))
        step = p.choose(["", ":2", ":-1", ":-3", ""])
        return p.form(f": | {low}:{high}{step} | :{high} | {low}: | ::{step[1:] or 1} | {p.rng.integers(-size, size)}")

    p.let(f"{a}[{', '.join(index(size) for size in p.shape(a))}]", steps=0)


def fancy(p: Program) -> None:
    a = p.pick(1, 2, 2)
    axis = int(p.rng.integers(len(p.shape(a))))
    size = p.shape(a)[axis]
    rows = [int(x) for x in p.rng.integers(-size, size, p.rng.integers(1, size + 2))]
    before = ":, " * axis
    if p.chance(0.3):
        p.let(p.form(f"XP.take({a}, {rows}, axis={axis})"), steps=0)
    else:
        p.let(f"{a}[{before}{rows if p.chance(0.6) else f'np.array({rows})'}]", steps=0)


def boolean(p: Program) -> None:
    a = p.pick(1, 2, 2)
    axis = int(p.rng.integers(len(p.shape(a))))
    mask = (p.rng.random(p.shape(a)[axis]) < 0.5).tolist()
    p.let(f"{a}[{':, ' * axis}np.array({mask})]", steps=0)


def unknown(p: Program) -> None:
    """A choice by a Dask array, whose length nobody knows before."""
    a = p.pick(1, 2, 2)
    mask = f"np.array({(p.rng.random(p.shape(a)[0]) < 0.5).tolist()})"
    text = f"{a}[da.from_array({mask}, chunks=2)]"
    if p.chance(0.5):
        p.let(f"{text}.sum(axis=0)", f"{a}[{mask}].sum(axis=0)")
    else:
        p.let(f"{text}.compute_chunk_sizes()", f"{a}[{mask}]", steps=0)


def points(p: Program) -> None:
    a = p.pick(2)
    rows, cols = ([int(x) for x in p.rng.integers(0, size, 4)] for size in p.shape(a))
    p.let(f"{a}.vindex[{rows}, {cols}]", f"{a}[{rows}, {cols}]", steps=0)


def blocks(p: Program) -> None:
    a = p.pick(2)
    chunks = p.chunks(p.shape(a))
    where = [int(p.rng.integers(len(sizes))) for sizes in chunks]
    starts = [sum(sizes[:at]) for at, sizes in zip(where, chunks, strict=True)]
    numpy = ", ".join(f"{low}:{low + sizes[at]}" for low, at, sizes in zip(starts, where, chunks, strict=True))
    p.let(f"{a}.rechunk({chunks}).blocks[{', '.join(map(str, where))}]", f"{a}[{numpy}]", steps=0)


def assignment(p: Program) -> None:
    a = p.pick(1, 2, 2)
    size = p.shape(a)[0]
    low, high = sorted(int(x) for x in p.rng.integers(0, size + 1, 2))
    rows = f"np.arange({size})[{':, None' if len(p.shape(a)) == 2 else ':'}]"
    numpy = f"np.where(({rows} >= {low}) & ({rows} < {high}), np.zeros_like({a}), {a})"
    p.let(f"assigned({a}, {low}, {high})", numpy, steps=0)


def diagonals(p: Program) -> None:
    a = p.pick(2)
    offset = int(p.choose([0, 0, 1, -1, 2]))
    p.let(p.form(f"XP.trace({a}) | XP.trace({a}, {offset}) | XP.diagonal({a}, {offset}) | XP.diag({a})"))


# Other shapes.


def triangles(p: Program) -> None:
    a = p.pick(2)
    if p.values[a].plain.dtype.kind != "c":  # for which Dask warns
        p.let(p.form(f"XP.{p.choose(['tril', 'triu'])}({a}, {p.choose([0, -1, 2])})"), steps=0)


def from_diagonal(p: Program) -> None:
    p.let(f"xp.diag({p.pick(1)})", steps=0)


def join(p: Program) -> None:
    a = p.pick(1, 2, 2)
    others = [a, *(p.like(p.shape(a)) for _ in range(p.rng.integers(1, 3)))]
    p.rng.shuffle(others)
    axis = int(p.rng.integers(-len(p.shape(a)), len(p.shape(a))))
    given = f"[{', '.join(others)}]"
    joins = ["XP.concatenate(GIVEN, axis=AXIS)", "XP.stack(GIVEN, axis=AXIS)", "XP.vstack(GIVEN)", "XP.hstack(GIVEN)"]
    p.let(p.form(" | ".join(joins)).replace("GIVEN", given).replace("AXIS", str(axis)), steps=0)


def block(p: Program) -> None:
    a = p.pick(2)
    b = p.like(p.shape(a))
    p.let(p.form(f"XP.block([[{a}, {b}], [{b}, {a}]])"), steps=0)


def reshape(p: Program) -> None:
    a = p.pick(1, 2, 2, 3)
    size = p.values[a].plain.size
    first = int(p.choose([x for x in range(1, size + 1) if size % x == 0]))
    if p.chance(0.5):
        p.let(p.form(f"{a}.ravel() | {a}.flatten()"), steps=0)
    else:
        # Of other chunks Dask refuses some shapes.
        form = p.form(f"A.reshape({first}, {size // first}) | XP.reshape(A, ({first}, {size // first}))")
        p.let(form.replace("A", f"{a}.rechunk(-1)"), form.replace("A", a), steps=0)


def turn(p: Program) -> None:
    a = p.pick(2)
    forms = f"{a}.T | XP.transpose({a}) | XP.swapaxes({a}, 0, 1) | XP.flip({a}, {p.rng.integers(2)})"
    p.let(p.form(f"{forms} | XP.roll({a}, 3, axis=1) | XP.moveaxis({a}, 0, 1) | XP.rot90({a})"), steps=0)


def axes(p: Program) -> None:
    a = p.pick(1, 2)
    forms = f"{a}[None] | {a}[..., None] | np.expand_dims({a}, 0) | xp.broadcast_to({a}, {(2, *p.shape(a))})"
    forms += f" | xp.pad({a}, 1) | xp.repeat({a}, 2, axis=0) | xp.tile({a}, 2) | xp.squeeze({a}[None])"
    p.let(p.form(forms), steps=0)


def rechunk(p: Program) -> None:
    a = p.pick(1, 2, 2, 3)
    chunks = p.choose([p.chunks(p.shape(a)), -1, 3])
    p.let(f"{a}.rechunk({chunks})", a, steps=0)


# What goes element by element, and what reduces.


def elementwise(p: Program) -> None:
    a = p.pick(1, 2, 2)
    b = p.like(p.shape(a) if p.chance(0.7) else p.shape(a)[-1:])
    if p.chance(0.5):
        plus = f"{a} + {b}"
        p.let(*p.choose([(plus,), (f"{a} - {b}", None, plus), (f"-{a}", None, a), (f"{a}.real", None, a)]))
    elif p.chance(0.4):
        number = p.values[a].plain.dtype.kind
        texts = [(f"{a}.map_blocks(np.negative)", f"-{a}", a)]
        texts += [(f"xp.map_blocks(np.add, {a}, {a}, dtype={a}.dtype)", f"{a} + {a}", None)]
        if number != "c":
            texts += [(f"xp.where({a} > 0, {a}, -{a})", f"abs({a})", a), (f"xp.clip({a}, -1, 2)", None, a)]
            texts += [(f"xp.maximum({a}, 0.5)", None, f"{a} + 0.5"), (f"{a}.astype('float64')", None, None)]
        p.let(*p.choose(texts))
    else:
        p.let(p.form(f"{a} * {b} | {a} * 2 + {b} | abs({a}) | {a}.conj() | np.square({a})"))


def mean(p: Program) -> None:
    a = p.pick(1, 2, 2, 3)
    axis = p.choose([None, *range(len(p.shape(a)))])
    names = ["sum", "sum", "mean", "cumsum"] if axis is not None else ["sum", "sum", "mean"]
    if p.values[a].plain.dtype.kind != "c":
        names += ["max", "min", "var"]
        if p.values[a].steps == 0:
            names += ["argmax", "argmin"] if axis is not None else ["argmax"]
    name = p.choose(names)
    if name == "var":
        p.let(f"{a}.var(axis={axis})", size=f"4 * np.square({a}).mean(axis={axis})", steps=5)
    elif name.startswith("arg"):
        p.let(f"{a}.{name}(axis={axis})", steps=0)
    else:
        p.let(f"{a}.{name}(axis={axis})", size=f"{a}.{'max' if name == 'min' else name}(axis={axis})")


def norm(p: Program) -> None:
    a = p.pick(1, 2)
    p.let(p.form(f"XP.linalg.norm({a}) | XP.linalg.norm({a}, axis=0)"))


# Other graphs of the same, and what is kept of them.


def persist(p: Program) -> None:
    names = p.some()
    p.same(names, f"dask.persist({', '.join(names)})")


def persist_part(p: Program) -> None:
    """Keep a part of something on the workers, which is computed as a whole later."""
    a = p.pick(2)
    p.let(f"{a}[:{max(1, p.shape(a)[0] // 2)}].persist()", f"{a}[:{max(1, p.shape(a)[0] // 2)}]", steps=0)


def optimize(p: Program) -> None:
    names = p.some()
    p.same(names, f"dask.optimize({', '.join(names)})")


def rewrite(p: Program) -> None:
    names = p.some(2)
    name, other = names[0], names[-1]
    texts = [f"[clone({name})]", f"[bind({name}, {other})]", f"[wait_on({name})]"]
    if len(p.shape(name)) < 2:
        # Products of vectors end in a choice of a column, and Dask can't fuse its copies of a choice.
        texts = [f"[wait_on({name})]"]
    elif any("dask.optimize(" in line for line in p.lines):
        # Dask's clones of an optimized graph lack what they depend on.
        texts = [f"[wait_on({name})]", f"[bind({name}, {other})]"]
    elif name != other:
        texts += [f"[clone({name}, omit={other})]", f"[bind({name}, {other}, omit={other}, assume_layers=False)]"]
    texts += [f"[pickle.loads(pickle.dumps({name}))]", f"annotated(lambda: [{name} + 0])", f"[{name}.copy()]"]
    texts += [f"[dask.delayed(lambda x: x)({name})]"]
    text = p.choose(texts)
    if "delayed" in text:
        x = p.values[name].plain
        text = f"[da.from_delayed({text[1:-1]}, shape={x.shape}, dtype='{x.dtype}')]"
    p.same([name], text)


def store(p: Program) -> None:
    # Zarr has no empty chunks.
    names = [name for name in p.some() if p.values[name].plain.size and p.values[name].plain.ndim]
    if names:
        p.same(names[:1], f"[stored({names[0]})]")


def forget(p: Program) -> None:
    if len(p.live) > 2:
        p.forget([str(p.choose(list(p.live)[:-1]))])


# What computes.


def compute(p: Program) -> None:
    names = p.some(4)
    given = ", ".join(names)
    texts = [f"dask.compute({given})", f"client.gather(client.compute([{given}]))", f"[x.compute() for x in [{given}]]"]
    texts += [f"dask.compute({', '.join(f'dask.delayed(np.asarray)({name})' for name in names)})"]
    texts += [f"into_memory({given})", f"[np.asarray(x) for x in [{given}]]"]
    if not p.optimized:
        option = "optimize_graph=False"
        texts = [f"client.gather(client.compute([{given}], {option}))", f"[x.compute({option}) for x in [{given}]]"]
    p.lines.append(f"check('{' '.join(names)}', {p.choose(texts)})")


def whole_and_part(p: Program) -> None:
    a = p.pick(2)
    rows = max(1, p.shape(a)[0] // 2)
    part = p.let(f"{a}[:{rows}]", steps=0)
    lines = [f"check('{a}', [{a}.compute()])", f"check('{part}', [{part}.compute()])"]
    if p.chance(0.5):
        lines.insert(0, f"{a}.sum().compute()")
    p.rng.shuffle(lines)
    p.lines += lines


def chunks(p: Program) -> None:
    p.lines.append(f"check_chunks('{(name := p.some()[0])}', {name})")


def refusal(p: Program) -> None:
    """A function of the user's that raises for some of the chunks, or all."""
    a = p.pick(1, 2)
    size = sorted(abs(p.values[a].plain).ravel().tolist())
    p.lines.append(f"check_error({a}, {2 * size[len(size) // 2]}, {size[-1] > 2 * size[len(size) // 2] + 1e-3})")


def wait(p: Program) -> None:
    p.lines.append(f"assert checkpoint({', '.join(p.some())}).compute() is None")


PRODUCTS = [*[operator] * 3, of_one, of_vectors, batched, tensordot, inner, einsum, multi_dot, matrix_power]
PARTS = [*[slices, diagonals] * 2, fancy, boolean, unknown, points, blocks, assignment]
SHAPES = [triangles, from_diagonal, join, block, reshape, turn, axes, rechunk]
NUMBERS = [elementwise, elementwise, mean, mean, norm]
GRAPHS = [persist, persist_part, optimize, rewrite, rewrite, store, forget]
ENDS = [compute, compute, compute, chunks, whole_and_part, refusal, wait]
STATEMENTS = PRODUCTS * 2 + PARTS + SHAPES + NUMBERS + GRAPHS


def execute(program: Program, lines: list[str], client: Any, folder: Path) -> None:
    """Execute lines of a program; AssertionError if a result is wrong or Dask warns."""
    numbers = itertools.count()

    def stored(x: Any) -> Any:
        path = str(folder / f"{next(numbers)}.zarr")
        x.rechunk(tuple(max(sizes[0], 1) for sizes in x.chunks)).to_zarr(path)
        return da.from_zarr(path)

    def memory(i: int, chunks: Any) -> Any:
        return da.from_array(program.inputs[i], chunks=chunks)

    def made(i: int, chunks: Any) -> Any:
        x = program.inputs[i]
        return da.map_blocks(
            functools.partial(_block, x), chunks=chunks, dtype=x.dtype, meta=x[(slice(0, 0),) * x.ndim]
        )

    def delayed(i: int, chunks: Any, wrap: Any = dask.delayed) -> Any:
        x = program.inputs[i]
        return da.from_delayed(wrap(x), shape=x.shape, dtype=x.dtype).rechunk(chunks)

    def into_memory(*arrays: Any) -> Any:
        return [client.compute(x.to_delayed().ravel().tolist(), sync=True) and x.compute() for x in arrays]

    def annotated(make: Callable[[], Any]) -> Any:
        with dask.annotate(priority=3, retries=1):
            return make()

    def check(names: str, results: Any) -> None:
        for name, found in zip(names.split(), results, strict=True):
            compare(name, program.values[name], space[name], found)

    def check_chunks(name: str, array: Any) -> None:
        """Check what each chunk is on its worker: the type, and the shape that the lazy array says."""
        array = array.persist()
        parts = client.compute(array.to_delayed().ravel().tolist(), sync=True)
        for part, sizes in zip(parts, itertools.product(*array.chunks), strict=True):
            shape = tuple(size if np.isnan(size) else int(size) for size in sizes)
            assert type(part) is type(array._meta) or not shape, f"{name} has a chunk of {type(part)}"
            dtypes = np.promote_types(part.dtype, part.dtype), np.promote_types(array.dtype, array.dtype)
            found = part.shape, dtypes[0]
            assert found == (shape, dtypes[1]), f"{name} has a chunk {found}, not {shape}, {dtypes[1]}"
        check(name, [array.compute()])

    def check_error(array: Any, most: float, fails: bool) -> None:
        """Check that an error in a function of the user's is that error."""
        array = (array * 1).map_blocks(_refusing, most, dtype=array.dtype, meta=array._meta)
        with pytest.raises(ArithmeticError, match="a chunk has") if fails else contextlib.nullcontext():
            array.sum().compute()

    space = {
        "np": np if dask_distmm.is_enabled() else _numpy_of_dask(),
        "xp": da, "da": da, "dask": dask, "client": client, "pickle": pickle,
        "bind": bind, "checkpoint": checkpoint, "clone": clone, "wait_on": wait_on,
        "memory": memory, "made": made, "delayed": delayed, "stored": stored, "into_memory": into_memory,
        "persisted": lambda i, chunks: memory(i, chunks).persist(),
        "zarr": lambda i, chunks: stored(memory(i, chunks)),
        "fortran": lambda i, chunks: da.from_array(np.asfortranarray(program.inputs[i]), chunks=chunks),
        "scattered": lambda i, chunks: delayed(i, chunks, client.scatter),
        "assigned": _assigned, "annotated": annotated, "check": check,
        "check_chunks": check_chunks, "check_error": check_error,
    }  # fmt: skip
    options = {
        "distmm.minimum-flops": program.minimum_flops,
        "distmm.dask.task": program.task,
        "distmm.regions": program.regions,
    }
    with no_warnings(), dask.config.set(options):
        for line in lines:
            if program.patient:
                _settle(client)
            exec(line, space)
            # NumPy's functions that Dask lacks compute, if they are not routed.
            space.update({name: da.asarray(x) for name, x in space.items() if isinstance(x, np.ndarray | np.generic)})
        # What is freed late belongs to this program, too.
        space.clear()


def _numpy_of_dask() -> Any:
    """Return NumPy with Dask's products in place of those functions that Dask lacks, and would compute at once."""

    def tensordot(a: Any, b: Any, axes: Any) -> Any:
        left, right = (x if isinstance(x, tuple | list) else [x] for x in axes)
        return da.tensordot(a, b, axes=([x % a.ndim for x in left], [x % b.ndim for x in right]))

    return types.SimpleNamespace(
        **{
            **vars(np),
            "inner": lambda a, b: tensordot(a, b, (-1, -1)),
            "linalg": types.SimpleNamespace(
                **{
                    **vars(np.linalg),
                    "matmul": da.matmul,
                    "tensordot": tensordot,
                    "multi_dot": lambda arrays: functools.reduce(da.matmul, arrays),
                    "matrix_power": lambda a, n: functools.reduce(da.matmul, [a] * n),
                }
            ),
        }
    )


def _settle(client: Any) -> None:
    """Wait until the scheduler has forgotten what nobody holds.

    Dask submits keys again with other dependencies (whatever is fused with what depends on what is wanted), and what
    it has not yet forgotten of the last time makes it warn, or lose chunks.
    """
    scheduler = client.cluster.scheduler
    while any(ts.who_wants and ts.key not in client.futures for ts in list(scheduler.tasks.values())):
        time.sleep(0.002)


def _block(x: Any, block_info: Any = None) -> Any:
    return x[tuple(slice(*ends) for ends in block_info[None]["array-location"])].copy()


def _refusing(x: Any, most: float) -> Any:
    if x.size and abs(x).max() > most + 5e-4:
        raise ArithmeticError(f"a chunk has {abs(x).max()}")
    return x


def _assigned(x: Any, low: int, high: int) -> Any:
    x = x.copy()
    x[low:high] = 0
    return x


def compare(name: str, value: Value, array: Any, found: Any) -> None:
    """Check a result: its type, its shape, what the lazy array says of them, and each element."""
    found = np.asarray(found)
    assert found.shape == value.plain.shape, f"{name} has the shape {found.shape}, expected {value.plain.shape}"
    # The order of bytes is lost in some of Dask's and NumPy's functions.
    expected, said = (np.promote_types(x.dtype, x.dtype) for x in (value.plain, array))
    found = found.astype(found.dtype.newbyteorder("="), copy=False)
    assert said == found.dtype, f"{name} is {found.dtype}, its lazy array {said}"
    assert found.dtype == expected, f"{name} is {found.dtype}, expected {expected}"
    assert array.shape == found.shape, f"{name} has the shape {found.shape}, its lazy array {array.shape}"
    exact = value.exact.astype(found.dtype) if value.eps == 0 else value.exact
    bound = 16 * value.eps * value.steps * value.size
    good = (found == exact) | (abs(found - exact) <= bound)
    assert good.all(), (
        f"{name}: {np.count_nonzero(~good)} of {good.size} elements are outside the gate of {value.steps} steps; "
        f"{found[~good].ravel()[:3]}, expected {exact[~good].ravel()[:3]}"
    )


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Let warnings, and what Dask and dask_distmm log of that level, be an AssertionError."""
    found: list[str] = []

    class Collected(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = f"{record.name}: {record.getMessage()}"
            # A busy machine makes its loop unresponsive and its collections of garbage long. And Dask itself submits
            # keys with other dependencies: whatever is fused with what depends on what is wanted.
            busy = record.name.startswith(("distributed.core", "distributed.gc", "distributed.utils_perf"))
            busy |= "ArithmeticError('a chunk has" in text  # an error that a program expects
            if not busy and ("different `run_spec`" not in text or "distmm" in text):
                found.append(text)

    loggers = [logging.getLogger(name) for name in ("distributed", "dask_distmm")]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [Collected(logging.WARNING)], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", da.PerformanceWarning)
            warnings.filterwarnings("ignore", "The `numpy.* function is not implemented by Dask array", FutureWarning)
            yield
    finally:
        for logger, logger.handlers, logger.propagate in before:  # noqa: B007
            pass
    assert not found, f"logged: {found}"


class Machine:
    """Clusters to execute programs on; a new one after each failure, since one that has lost chunks goes on to fail."""

    def __init__(self, stock: bool = False, processes: bool = False) -> None:
        self.stock, self.processes, self.client = stock, processes, None

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client.cluster.close()
            self.client = None

    def failure(self, program: Program, lines: list[str] | None = None) -> BaseException | None:
        """Execute a program, or some of its lines, and return what it fails by."""
        if self.client is None:
            cluster = LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                processes=self.processes,
                dashboard_address="127.0.0.1:0",
                memory_limit=0,
            )
            self.client = Client(cluster)
        found: list[BaseException | None] = []
        # Dask can wait for ever for what it has lost.
        thread = threading.Thread(
            target=lambda: found.append(self._failure(program, lines or program.lines)), daemon=True
        )
        thread.start()
        thread.join(120)
        error = found[0] if found else TimeoutError("no end after 120 s")
        if error is not None:
            self.close()
            thread.join(120)
        return error

    def _failure(self, program: Program, lines: list[str]) -> BaseException | None:
        with tempfile.TemporaryDirectory() as folder, contextlib.nullcontext() if self.stock else dask_distmm.enabled():
            try:
                execute(program, lines, self.client, Path(folder))
            except BaseException as error:
                return error.with_traceback(None)
        return None

    def reduced(self, program: Program, kind: type) -> list[str]:
        """Return lines of a program that still fail by an error of one kind, none of which can be left out."""
        lines = program.lines
        for line in reversed(program.lines):
            fewer = [other for other in lines if other is not line]
            if type(self.failure(program, fewer)) is kind:
                lines = fewer
        return lines


def failures(seeds: Iterable[int], ours: Machine) -> Iterator[tuple[Program, BaseException | None]]:
    """Execute programs, and yield each with what it fails by. What it fails by in stock Dask, too, does not count.

    Dask loses chunks now and then, where it submits keys again: an error that is not ours counts if it comes again.
    """
    for seed in seeds:
        program = Program(seed)
        error = ours.failure(program)
        if error is not None and not ours.stock:
            own = isinstance(error, AssertionError | DistMMError | TimeoutError) or "distmm" in repr(error)
            if not own and not any(ours.failure(program) is not None for _ in range(3)):
                print(f"once: --seed {seed}: {type(error).__name__}: {repr(error)[:200]}")
                error = None
        if error is not None and not ours.stock:
            with Machine(stock=True) as stock:
                if any(stock.failure(program) is not None for _ in range(3)):
                    print(f"stock fails, too: --seed {seed}: {type(error).__name__}: {repr(error)[:200]}")
                    error = None
        yield program, error
    if ours.client is not None and not ours.stock:
        assert_nothing_left(ours.client)


@pytest.mark.parametrize("part", range(4))
def test_random_programs(request, part):
    count = 250 if request.config.getoption("--all") else 50
    with Machine() as machine:
        for program, error in failures((secrets.randbits(32) for _ in range(count)), machine):
            again = f"Once more, and shorter: python tests/test_random_programs.py --seed {program.seed}"
            assert error is None, f"{error!r}\n{program}\n{again}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--processes", action="store_true")
    options = parser.parse_args()
    failed, start = 0, time.monotonic()
    seeds = [secrets.randbits(32) for _ in range(options.count)] if options.seed is None else [options.seed]
    with Machine(options.stock, options.processes) as machine:
        for number, (program, error) in enumerate(failures(seeds, machine), 1):
            if error is not None:
                failed += 1
                lines = [] if options.seed is None else machine.reduced(program, type(error))
                print(f"--seed {program.seed}: {type(error).__name__}: {repr(error)[:600]}", program, *lines, sep="\n")
            if number % 100 == 0:
                print(f"{number} programs in {time.monotonic() - start:.0f} s, {failed} failed", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
