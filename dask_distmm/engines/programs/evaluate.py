"""The kernels of traced functions: a pass over rows is evaluated strip by strip, so that strips stay in the cache.

A pass (`tracing.lower.Pass`) is compiled once to a list of calls. Elementwise functions write to memory that is used
again as soon as nobody reads it any more. On GPUs a strip is a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.numeric.sparse import dense, sparse_package
from dask_distmm.tracing.arrays import elementwise, function_of, summed_by_label
from dask_distmm.tracing.form import Kind, Literal, Ref, Statement, index_of, letters_of
from dask_distmm.tracing.lower import Pass
from dask_distmm.tracing.place import Axis

# Bytes of rows that a strip has at most, and the rows that it has at least.
_STRIP_BYTES, _STRIP_ROWS = 2**20, 64
# What combines the results of ranks, and of strips.
_UFUNCS = {"sum": "add", "select": "add", "prod": "multiply", "max": "maximum", "min": "minimum", "any": "logical_or",
           "all": "logical_and"}  # fmt: skip

Call = Callable[[dict[int, Any], int, int], Any]


def natural(array: Any, kind: Kind, axis: Axis) -> Any:
    """Return what is stored as a matrix in the shape that it has; its rows, stored first, along an axis."""
    if axis is None:
        return array if array.shape == kind.shape else array.reshape(kind.shape)
    rest = (*kind.shape[:axis], *kind.shape[axis + 1 :])
    if len(rest) != 1:
        array = array.reshape(len(array), *rest)
    return array.T if axis == 1 and array.ndim == 2 else array if axis == 0 else np.moveaxis(array, 0, axis)


class TracedKernels:
    """Those of `tracing.lower`."""

    blas: Kernels
    xp: Any
    # The constants of the program.
    constants: Sequence[Any] = ()

    def __init__(self) -> None:
        self._compiled: dict[int, tuple[Pass, _Compiled]] = {}

    def constant(self, out: Any, *, number: int) -> None:
        """Write a constant of the program."""
        out[...] = self.xp.asarray(np.frombuffer(self.constants[number], out.dtype).reshape(out.shape))

    def set_all(self, out: Any, *, value: Any) -> None:
        """Set all elements to one value."""
        out[...] = value

    def increment(self, number: Any) -> None:
        """Add one."""
        number += 1

    def decide(self, condition: Any, flag: Any) -> None:
        """Have a condition as a flag on the host."""
        flag[...] = bool(self.blas.host(condition).all())

    def merge(self, *arrays: Any, op: str, roles: str, **_: Any) -> None:
        """Combine the results of ranks, in their order."""
        count = roles.count("w")
        totals = arrays[len(arrays) - count :]
        for i, total in enumerate(totals):
            total[...] = arrays[i]
        for at in range(count, len(arrays) - count, count):
            combine_into(self.xp, op, totals, arrays[at : at + count])

    def evaluate(self, *arrays: Any, program: Pass, roles: str, **_: Any) -> Any:
        """Take the statements of a pass."""
        key = id(program)
        if key not in self._compiled:
            self._compiled[key] = program, _Compiled(program, self)
        return self._compiled[key][1].run(arrays)

    # Those that make the same bits everywhere.
    evaluate_exactly = evaluate


def combine_into(xp: Any, op: str, totals: Sequence[Any], others: Sequence[Any]) -> None:
    """Combine results with others, in place."""
    if op in ("argmax", "argmin"):
        (best, at), (other, found) = totals, others
        better = (other > best) if op == "argmax" else (other < best)
        if other.dtype.kind == "f":
            better |= xp.isnan(other) & ~xp.isnan(best)
        better |= at < 0
        better &= found >= 0
        best[...], at[...] = xp.where(better, other, best), xp.where(better, found, at)
        return
    (total,), (other,) = totals, others
    getattr(xp, _UFUNCS[op])(total, other, out=total)


class _Compiled:
    """A pass as calls, with the memory that they use again."""

    def __init__(self, program: Pass, kernels: TracedKernels) -> None:
        self.program, self.xp = program, kernels.xp
        self.kinds, self.axes, self.ops = program.kinds, program.axes, dict(program.sums)
        self.local = bool(program.sizes)
        self.strip = self._strip_rows()
        # For each value that has memory of its own in a strip, the number of that memory; its type and shape.
        self.slots: dict[int, int] = {}
        self.memory: list[Any] = []
        if self.local and self.xp is np:
            self._plan_memory()
        self.calls = [(statement, self._call(statement)) for statement in program.statements]

    # Memory of strips

    def _strip_rows(self) -> int:
        """Return how many rows a strip has."""
        if not self.local or self.xp is not np:
            return 2**62
        widths = [self._width(x) for x in self.kinds if self.axes[x] is not None]
        return max(_STRIP_ROWS, _STRIP_BYTES // max(1, sum(widths)))

    def _width(self, number: int) -> int:
        """Return the bytes of a row of a value."""
        kind, axis = self.kinds[number], self.axes[number]
        return kind.nbytes // max(1, kind.shape[axis or 0])

    def _rest(self, number: int) -> tuple[int, ...]:
        """Return the lengths of a value's axes but for that of its rows."""
        kind, axis = self.kinds[number], self.axes[number]
        assert axis is not None
        return (*kind.shape[:axis], *kind.shape[axis + 1 :])

    def _plan_memory(self) -> None:
        """Let elementwise functions and products write to memory whose values nobody reads any more."""
        statements, root, end = self.program.statements, dict[int, int](), dict[int, int]()
        for i, statement in enumerate(statements):
            for ref in statement.reads:
                end[root.get(ref, ref)] = i
            if statement.family in ("transpose", "index", "reshape", "broadcast"):
                (ref,) = statement.inputs
                assert isinstance(ref, int)
                # A view keeps what it is of.
                root[statement.outputs[0]] = root.get(ref, ref)
        end.update((root.get(x, x), len(statements)) for x in self.program.rows)
        free: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        taken: dict[int, tuple[int, tuple[str, tuple[int, ...]]]] = {}

        def release(at: int) -> None:
            for number in [x for x in taken if end.get(x, -1) <= at]:
                slot, key = taken.pop(number)
                free.setdefault(key, []).append(slot)

        for i, statement in enumerate(statements):
            # One that reads and writes the same elements may do so in place.
            in_place = statement.family == "map" and statement.options["f"] not in ("where", "nan_to_num", "round")
            release(i if in_place else i - 1)
            (number, *more) = statement.outputs
            if statement.family in ("map", "contract") and self.axes[number] is not None and not more:
                key = self.kinds[number].dtype, self._rest(number)
                if not free.get(key):
                    free.setdefault(key, []).append(len(self.memory))
                    self.memory.append(np.empty((self._most_rows(), *key[1]), key[0]))
                slot = free[key].pop()
                self.slots[number] = slot
                taken[number] = slot, key

    def _most_rows(self) -> int:
        sizes = [size for size in self.program.sizes if size >= 0]
        return min(self.strip, max(sizes)) if len(sizes) == len(self.program.sizes) else self.strip

    def _out(self, number: int, rows: int) -> Any:
        """Return memory for a value of a strip, in its shape; None where it has none."""
        slot = self.slots.get(number)
        if slot is None or rows > len(self.memory[slot]):
            return None
        found, axis = self.memory[slot][:rows], self.axes[number]
        return found if axis == 0 else np.moveaxis(found, 0, axis or 0)

    # The calls

    def run(self, arrays: Sequence[Any]) -> Any:
        """Take the statements; add to sums and write rows, or return what all ranks have."""
        program, kinds, axes = self.program, self.kinds, self.axes
        given, count = iter(arrays), len(program.sizes)
        env: dict[int, Any] = {}
        pieces: dict[int, list[Any]] = {}
        for number in program.reads:
            if axes[number] is None:
                env[number] = self._whole(number, next(given))
            else:
                pieces[number] = [next(given) for _ in range(count)]
        totals = {}
        for number, op in program.sums:
            arg = op in ("argmax", "argmin")
            own = [next(given) for _ in range(1 + arg)]
            totals[number] = [natural(x, Kind(kinds[number].shape, x.dtype.name), None) for x in own]
        written = {number: [next(given) for _ in range(count)] for number in program.rows}
        pieces |= {old: written[number] for number, old in program.over.items()}
        if not self.local:
            for statement, call in self.calls:
                self._take(env, statement, call, 0, 0, totals)
            return tuple(self._stored(number, env[number]) for number in program.whole)
        for index in range(count):
            chunks = {number: some[index] for number, some in pieces.items()}
            out = {number: some[index] for number, some in written.items()}
            rows = max((x.shape[0] for x in (*chunks.values(), *out.values())), default=max(0, program.sizes[index]))
            sparse = any(sparse_package(x) for x in chunks.values())
            step = rows if sparse else self.strip
            for start in range(0, rows, max(1, step)):
                stop = min(rows, start + step)
                whole = stop - start == rows
                for number, chunk in chunks.items():
                    part = chunk if whole else chunk[start:stop]
                    env[number] = part if sparse_package(part) else natural(part, kinds[number], axes[number])
                for statement, call in self.calls:
                    self._take(env, statement, call, program.firsts[index] + start, stop - start, totals)
                for number, chunk in out.items():
                    value, axis = env[number], axes[number] or 0
                    rest = chunk.shape[1:]
                    chunk[start:stop] = (np.moveaxis(value, axis, 0) if axis else value).reshape(stop - start, *rest)
        return ()

    def _take(
        self, env: dict[int, Any], statement: Statement, call: Call, first: int, rows: int, totals: dict[int, list[Any]]
    ) -> None:
        (number, *more) = statement.outputs
        op = self.ops.get(number)
        if op == "select":
            _select(self.xp, statement, env, self.axes, totals[number][0], first, rows)
            return
        found = call(env, first, rows)
        if more:
            for one, value in zip(statement.outputs, found, strict=True):
                if one in self.ops:
                    combine_into(self.xp, self.ops[one], totals[one], [value])
                else:
                    env[one] = value
        elif op is None:
            env[number] = found
        elif op in ("argmax", "argmin"):
            if rows:
                combine_into(self.xp, op, totals[number], found)
        elif rows or op in ("sum", "any", "all", "prod"):
            combine_into(self.xp, op, totals[number], [found])

    def _whole(self, number: int, array: Any) -> Any:
        kind, axis = self.kinds[number], self.program.moved.get(number)
        return array if sparse_package(array) else natural(array, kind, axis)

    def _stored(self, number: int, value: Any) -> Any:
        """Return what all ranks have as the matrix that it is stored in."""
        kind = self.kinds[number]
        value = self.xp.asarray(value, kind.dtype)
        shape = kind.shape if len(kind.shape) == 2 else (1, kind.size)
        return value.reshape(shape) if value.shape != shape else value

    def _call(self, statement: Statement) -> Call:
        return _FAMILIES[statement.family](self, statement)

    def _getter(self, ref: Ref) -> Callable[[dict[int, Any]], Any]:
        if isinstance(ref, Literal):
            value = ref.value
            return lambda env: value
        return lambda env: env[ref]

    def _dense(self, ref: Ref) -> Callable[[dict[int, Any]], Any]:
        get = self._getter(ref)
        if isinstance(ref, Literal) or self.axes[ref] is None:
            return get
        return lambda env: dense(get(env))

    # Families

    def map(self, statement: Statement) -> Call:
        """Elementwise functions."""
        xp, (number,) = self.xp, statement.outputs
        options = {k: v for k, v in statement.options.items() if k != "f"}
        name, gets = statement.options["f"], [self._dense(ref) for ref in statement.inputs]
        if number not in self.slots:
            return lambda env, first, rows: elementwise(xp, name, [get(env) for get in gets], options)

        def call(env: dict[int, Any], first: int, rows: int) -> Any:
            out, given = self._out(number, rows), [get(env) for get in gets]
            if out is None or name in ("clip", "nan_to_num", "round", "angle", "copy"):
                return elementwise(xp, name, given, options)
            if name == "where":
                np.copyto(out, given[2])
                np.copyto(out, given[1], where=given[0])
            elif name in ("astype", "real", "imag"):
                np.copyto(out, given[0] if name == "astype" else getattr(given[0], name), casting="unsafe")
            else:
                getattr(np, name)(*given, out=out)
            return out

        return call

    def fill(self, statement: Statement) -> Call:
        """One value in the shape of an array."""
        like, value = (self._getter(ref) for ref in statement.inputs)
        return lambda env, first, rows: self.xp.full(like(env).shape, value(env), statement.options["dtype"])

    def reduce(self, statement: Statement) -> Call:
        """Sums and the like, of a strip where they go over rows."""
        xp, (number,), (ref,) = self.xp, statement.outputs, statement.inputs
        options, get = statement.options, self._dense(ref)
        name, axes, keepdims = options["f"], tuple(options["axes"]), options["keepdims"]
        if name not in ("argmax", "argmin"):
            function, dtype = getattr(xp, name), self.kinds[number].dtype
            how = {"dtype": dtype} if name in ("sum", "prod") else {}
            raw = self._getter(ref)

            def call(env: dict[int, Any], first: int, rows: int) -> Any:
                x = raw(env)
                if sparse_package(x) and name == "sum" and len(axes) == 1 and not keepdims:
                    return xp.asarray(x.sum(axis=axes[0])).ravel()
                return function(dense(x) if sparse_package(x) else x, axis=axes, keepdims=keepdims, **how)

            return call
        (axis,) = axes
        if number not in self.ops:
            return lambda env, first, rows: getattr(xp, name)(get(env), axis=axis, keepdims=keepdims)

        def best(env: dict[int, Any], first: int, rows: int) -> Any:
            x = get(env)
            if not rows:
                return None
            at = xp.expand_dims(getattr(xp, name)(x, axis=axis), axis)
            values, found = xp.take_along_axis(x, at, axis), at + first
            return (values, found) if keepdims else (xp.squeeze(values, axis), xp.squeeze(found, axis))

        return best

    def contract(self, statement: Statement) -> Call:
        """Products."""
        (one, two), (number,) = map(self._getter, statement.inputs), statement.outputs
        product = contraction(self.xp, statement.options["spec"])
        if number not in self.slots:
            return lambda env, first, rows: product(one(env), two(env), None)
        return lambda env, first, rows: product(one(env), two(env), self._out(number, rows))

    def index(self, statement: Statement) -> Call:
        """Basic indices."""
        index, get = index_of(statement.options["index"]), self._dense(statement.inputs[0])
        return lambda env, first, rows: get(env)[index]

    def transpose(self, statement: Statement) -> Call:
        """Axes in another order."""
        axes, get = statement.options["axes"], self._getter(statement.inputs[0])
        if axes == [1, 0]:
            return lambda env, first, rows: get(env).T
        return lambda env, first, rows: get(env).transpose(axes)

    def reshape(self, statement: Statement) -> Call:
        """Another shape."""
        shape, get, axis = list(statement.options["shape"]), self._dense(statement.inputs[0]), self.axes[statement.outputs[0]]

        def call(env: dict[int, Any], first: int, rows: int) -> Any:
            if axis is not None:
                return get(env).reshape([rows if i == axis else n for i, n in enumerate(shape)])
            return get(env).reshape(shape)

        return call

    def broadcast(self, statement: Statement) -> Call:
        """Axes of length 1 are repeated."""
        shape, get, axis = statement.options["shape"], self._dense(statement.inputs[0]), self.axes[statement.outputs[0]]
        return lambda env, first, rows: self.xp.broadcast_to(
            get(env), [rows if i == axis else n for i, n in enumerate(shape)]
        )

    def concat(self, statement: Statement) -> Call:
        """Arrays one behind the other."""
        gets, axis = [self._dense(ref) for ref in statement.inputs], statement.options["axis"]
        return lambda env, first, rows: self.xp.concatenate([get(env) for get in gets], axis)

    def take(self, statement: Statement) -> Call:
        """Rows by numbers."""
        (get, number), axis = map(self._dense, statement.inputs), statement.options["axis"]
        return lambda env, first, rows: self.xp.take(get(env), number(env), axis)

    def segment_sum(self, statement: Statement) -> Call:
        """Sums of rows by labels."""
        (get, labels), count = map(self._dense, statement.inputs), statement.options["count"]
        return lambda env, first, rows: summed_by_label(get(env), labels(env), count)

    def along(self, statement: Statement) -> Call:
        """Functions along an axis that is not that of rows."""
        options, get = dict(statement.options), self._dense(statement.inputs[0])
        function = getattr(self.xp, options.pop("f"))
        return lambda env, first, rows: function(get(env), **options)

    def whole(self, statement: Statement) -> Call:
        """Functions of matrices."""
        xp, options, gets = self.xp, statement.options["how"], [self._getter(ref) for ref in statement.inputs]
        function = functools.partial(function_of(xp, statement.options["f"]), **options)
        several = len(statement.outputs) > 1
        return lambda env, first, rows: tuple(function(*(get(env) for get in gets))) if several else function(
            *(get(env) for get in gets)
        )

    def qr(self, statement: Statement) -> Call:
        """QR of a matrix that all ranks have."""
        get = self._getter(statement.inputs[0])
        return lambda env, first, rows: tuple(self.xp.linalg.qr(get(env)))

    def local(self, statement: Statement) -> Call:
        """A rank's own rows of what all ranks have."""
        get, before = self._getter(statement.inputs[0]), (slice(None),) * statement.options["axis"]
        return lambda env, first, rows: get(env)[(*before, slice(first, first + rows))]


_FAMILIES: dict[str, Callable[[_Compiled, Statement], Call]] = {
    name: getattr(_Compiled, name)
    for name in (
        "map", "fill", "reduce", "contract", "index", "transpose", "reshape", "broadcast", "concat", "take",
        "segment_sum", "along", "whole", "qr", "local",
    )
}  # fmt: skip


def _select(
    xp: Any, statement: Statement, env: dict[int, Any], axes: Any, total: Any, first: int, rows: int
) -> None:
    """Write those of some rows that this rank has."""
    source = statement.inputs[0]
    assert isinstance(source, int)
    x, axis = dense(env[source]), axes[source]
    if statement.family == "take":
        numbers = env[statement.inputs[1]]  # type: ignore[index]
        length = statement.options.get("length")
        numbers = xp.where(numbers < 0, numbers + length, numbers) if length else numbers
        inside = (numbers >= first) & (numbers < first + rows)
        if rows:
            found = xp.take(x, xp.where(inside, numbers - first, 0), axis)
            shape = [1] * axis + list(numbers.shape) + [1] * (x.ndim - axis - 1)
            total += xp.where(inside.reshape(shape), found, found.dtype.type(0))
        return
    index = list(index_of(statement.options["index"]))
    place = [i for i, one in enumerate(index) if one is not None][axis]
    one, out = index[place], sum(not isinstance(x, int) for x in index[:place])
    size = statement.options["length"]
    if isinstance(one, int):
        at = one % size - first
        if 0 <= at < rows:
            index[place] = at
            total[...] = x[tuple(index)]
        return
    wanted = range(*one.indices(size))
    inside = [k for k in _between(wanted, first, first + rows)]
    if inside:
        low, high = inside[0], inside[-1] + 1
        begin, stop = wanted[low] - first, wanted[high - 1] - first + (1 if wanted.step > 0 else -1)
        index[place] = slice(begin, stop if stop >= 0 else None, wanted.step)
        total[(*(slice(None),) * out, slice(low, high))] = x[tuple(index)]


def _between(wanted: range, first: int, stop: int) -> range:
    """Return the places in a range of those of its numbers that are from `first` to below `stop`."""
    if wanted.step > 0:
        low, high = math.ceil((first - wanted.start) / wanted.step), math.ceil((stop - wanted.start) / wanted.step)
    else:
        low = math.floor((wanted.start - stop) / -wanted.step) + 1
        high = math.floor((wanted.start - first) / -wanted.step) + 1
    return range(max(0, low), max(0, min(len(wanted), high)))


def contraction(xp: Any, spec: str) -> Callable[[Any, Any, Any], Any]:
    """Return a function that contracts two arrays, and may write to a third one."""
    first, second, out = letters_of(spec)
    batch = [x for x in out if x in first and x in second]
    summed = [x for x in first if x in second and x not in out]
    left = [x for x in first if x not in second]
    right = [x for x in second if x not in first]
    order = [*batch, *left, *right]
    back = [order.index(x) for x in out]
    if not batch and len(summed) == 1 and len(left) <= 1 and len(right) <= 1:
        flip_a, flip_b = first == "".join([*summed, *left]) and bool(left), second == "".join([*right, *summed]) and bool(right)
        turned = back == [1, 0]

        def product(a: Any, b: Any, into: Any) -> Any:
            a, b = (a.T if flip_a else a), (b.T if flip_b else b)
            if sparse_package(a) or sparse_package(b):
                found = a @ b if sparse_package(a) else (b.T @ a.T).T
                return found.T if turned else found
            if into is None or (into.ndim == 2 and turned):
                found = xp.matmul(a, b)
                return found.T if turned else found
            return xp.matmul(a, b, out=into)

        return product
    axes_a = [first.index(x) for x in (*batch, *left, *summed)]
    axes_b = [second.index(x) for x in (*batch, *summed, *right)]

    def general(a: Any, b: Any, into: Any) -> Any:
        a, b = dense(a).transpose(axes_a), dense(b).transpose(axes_b)
        shape = (*a.shape[: len(batch) + len(left)], *b.shape[len(batch) + len(summed) :])
        lead, depth = a.shape[: len(batch)], math.prod(a.shape[len(batch) + len(left) :])
        x = a.reshape(*lead, math.prod(a.shape[len(batch) : len(batch) + len(left)]), depth)
        y = b.reshape(*lead, depth, math.prod(b.shape[len(batch) + len(summed) :]))
        return xp.matmul(x, y).reshape(shape).transpose(back)

    return general
