"""The kernels of traced functions: a pass over rows is evaluated strip by strip, so that strips stay in the cache.

A pass (`tracing.lower.Pass`) is compiled once to a list of calls. Elementwise functions write to memory that is used
again as soon as nobody reads it any more. On GPUs a strip is a chunk.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.fused import groups, source
from dask_distmm.errors import MatrixError, call_user
from dask_distmm.numeric.epilogs import call_function
from dask_distmm.numeric.sparse import dense, sparse_package
from dask_distmm.random import drawn
from dask_distmm.tracing.arrays import elementwise, function_of, summed_by_label
from dask_distmm.tracing.form import Kind, Literal, Ref, Statement, index_of, letters_of
from dask_distmm.tracing.lower import Pass, identity
from dask_distmm.tracing.place import Axis

# Bytes of a strip's values that are used more than once, which stay in the cache, and the rows that it has at least,
# as long as they take at most `_STRIP_MOST` bytes; bytes that a thread reads at least.
_STRIP_BYTES, _STRIP_ROWS, _STRIP_MOST, _LEAST_BYTES = 2**20, 1024, 2**26, 2**17
# Elements of short rows, for each of which NumPy takes longer to start than to go over it.
_SHORT = 128
# Multiplications up to which OpenBLAS has kernels that copy nothing, twice as fast; the fewest rows of a piece.
_SMALL_PRODUCT, _SMALL_ROWS = 10**6, 64
# The ufunc that combines the results of ranks, and of strips.
UFUNCS = {"sum": "add", "select": "add", "prod": "multiply", "max": "maximum", "min": "minimum", "any": "logical_or",
           "all": "logical_and"}  # fmt: skip

_BLAS_TYPES = {"float32", "float64", "complex64", "complex128"}
# What GPUs' kernels solve without a look at the result.
_SOLVED = {"linalg.inv", "linalg.solve"}
_OUTSIDE = "an array of numbers is an index, and one of these is out of bounds"
_VIEWS = ("transpose", "index", "reshape", "broadcast")
# Families whose results are never views.
_NEW = {"contract", "reduce", "concat", "take", "fill", "segment_sum", "random", "qr"}
# Expressions of real numbers that all ranks have, and the kinds of types of their operands: ufuncs take ten times as
# long. Each makes the same bits as the ufunc.
_NUMBERS = {
    "add": ("{0} + {1}", "fiu"), "subtract": ("{0} - {1}", "fiu"), "multiply": ("{0} * {1}", "fiu"),
    "divide": ("{0} / {1}", "f"), "negative": ("-{0}", "fi"), "square": ("{0} * {0}", "fiu"),
    "absolute": ("abs({0})", "f"), "sqrt": ("root({0})", "f"), "isfinite": ("{0} - {0} == 0", "f"),
    "less": ("{0} < {1}", "bfiu"), "less_equal": ("{0} <= {1}", "bfiu"), "greater": ("{0} > {1}", "bfiu"),
    "greater_equal": ("{0} >= {1}", "bfiu"), "equal": ("{0} == {1}", "bfiu"), "not_equal": ("{0} != {1}", "bfiu"),
    "bitwise_and": ("{0} & {1}", "biu"), "bitwise_or": ("{0} | {1}", "biu"), "logical_and": ("{0} & {1}", "b"),
    "logical_or": ("{0} | {1}", "b"), "logical_not": ("~{0}", "b"), "invert": ("~{0}", "biu"),
}  # fmt: skip
# And those whose operands have the type of the result, but for a condition.
_CHOICES = {
    "where": "{1} if {0} else {2}", "maximum": "{0} if {0} >= {1} or {0} != {0} else {1}",
    "minimum": "{0} if {0} <= {1} or {0} != {0} else {1}",
}  # fmt: skip


def on_stream(program: Pass) -> bool:
    """Whether a pass on a GPU only queues work: the host calls no function, draws nothing and reads no result."""
    return not any(
        statement.family in ("call", "callback", "random", "qr")
        or (statement.family == "whole" and statement.options["f"] not in _SOLVED)
        for statement in program.statements
    )


def natural(array: Any, kind: Kind, axis: Axis) -> Any:
    """Return what is stored as a matrix in the shape that it has; its rows, stored first, along an axis."""
    if axis is None:
        return array if array.shape == kind.shape else array.reshape(kind.shape)
    rest = (*kind.shape[:axis], *kind.shape[axis + 1 :])
    if len(rest) != 1:
        array = array.reshape(len(array), *rest)
    return array.T if axis == 1 and array.ndim == 2 else array if axis == 0 else np.moveaxis(array, 0, axis)


class TracedKernels:
    """The kernels that `tracing.lower` calls, on one rank."""

    blas: Kernels
    xp: Any
    # The constants of the program.
    constants: Sequence[Any] = ()
    # The threads that share strips.
    threads = 1
    # How far a loop has come, from 0 to 1; its largest residual so far.
    reached = _largest = 0.0

    def __init__(self) -> None:
        self._compiled: dict[int, tuple[Pass, Compiled]] = {}

    @functools.cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that evaluate strips; shut down after the run."""
        return ThreadPoolExecutor(self.threads, thread_name_prefix="distmm-strip")

    def constant(self, out: Any, *, number: int) -> None:
        """Copy a constant of the program to a buffer."""
        out[...] = self.xp.asarray(np.frombuffer(self.constants[number], out.dtype).reshape(out.shape))

    def set_all(self, out: Any, *, value: Any) -> None:
        """Set all elements to one value."""
        out[...] = value

    def copy_all(self, *arrays: Any, **_: Any) -> None:
        """Copy the first half of some arrays to the second half."""
        count = len(arrays) // 2
        for array, target in zip(arrays[:count], arrays[count:], strict=True):
            target[...] = array

    def increment(self, number: Any) -> None:
        """Add one."""
        number += 1

    def decide(self, condition: Any, flag: Any) -> None:
        """Copy a condition to a flag on the host."""
        flag[...] = bool(self.blas.host(condition).all())

    def follow(self, *numbers: Any, limits: Sequence[Any]) -> None:
        """Report the progress of counts or residuals towards their limits."""
        values = iter(numbers)
        for limit in limits:
            number = self.blas.host(next(values)).item()
            end = self.blas.host(next(values)).item() if limit is None else limit
            self._report(number, end)

    def _report(self, number: float, limit: float) -> None:
        """Raise the share of work done to that of a count, or of a residual on a logarithmic scale."""
        if isinstance(number, int):
            self.reached = min(1.0, max(self.reached, number / max(1, limit)))
        elif math.isfinite(number) and number > 0 < limit:
            self._largest = max(self._largest, number)
            way = math.log(self._largest / limit)
            progress = math.log(self._largest / number) / way if way > 0 else 1.0
            self.reached = min(1.0, max(self.reached, progress))

    def merge(self, *arrays: Any, ops: Sequence[str], ranks: int, **_: Any) -> None:
        """Reduce partial results in the order of ranks into totals; arguments: ranks' parts op by op, then totals."""
        widths = [1 + op.startswith("arg") for op in ops]
        results, totals = iter(arrays), iter(arrays[ranks * sum(widths) :])
        for op, width in zip(ops, widths, strict=True):
            parts = [[next(results) for _ in range(width)] for _ in range(ranks)]
            total = [next(totals) for _ in range(width)]
            if width == 1 and ranks > 1:
                # The first two at once.
                getattr(self.xp, UFUNCS[op])(*parts.pop(0), *parts.pop(0), out=total[0])
            else:
                for target, part in zip(total, parts.pop(0), strict=True):
                    target[...] = part
            for part in parts:
                merge_into(self.xp, op, total, part)

    def assemble(self, whole: Any, *parts: Any, places: Sequence[tuple[int, int, int]]) -> None:
        """Copy chunks of rows from the parts of ranks, in their order."""
        whole, to = whole.reshape(-1, parts[0].shape[1]), 0
        for rank, at, size in places:
            whole[to : to + size] = parts[rank][at : at + size]
            to += size

    def evaluate(self, *arrays: Any, program: Pass, roles: str, **_: Any) -> Any:
        """Evaluate a pass."""
        return self.compiled(program).run(arrays)

    def compiled(self, program: Pass) -> Compiled:
        """Return a pass compiled to a function, which is kept."""
        key = id(program)
        if key not in self._compiled:
            self._compiled[key] = program, Compiled(program, self)
        return self._compiled[key][1]

    # Those that make the same bits everywhere.
    evaluate_exactly = evaluate


def merge_into(xp: Any, op: str, totals: Sequence[Any], results: Sequence[Any]) -> None:
    """Reduce candidates into totals, in place."""
    if op in ("argmax", "argmin"):
        (best, at), (candidates, candidates_at) = totals, results
        better = (candidates > best) if op == "argmax" else (candidates < best)
        same = candidates == best
        if candidates.dtype.kind == "f":
            better |= xp.isnan(candidates) & ~xp.isnan(best)
            same |= xp.isnan(candidates) & xp.isnan(best)
        # The first row of several, whichever rank has it.
        better |= (same & (candidates_at < at)) | (at < 0)
        better &= candidates_at >= 0
        best[...], at[...] = xp.where(better, candidates, best), xp.where(better, candidates_at, at)
        return
    (total,), (candidates,) = totals, results
    getattr(xp, UFUNCS[op])(total, candidates, out=total)


class _Strip(NamedTuple):
    """Some rows of a chunk: the function to call, inputs, and where results are written."""

    function: Callable[..., Any]
    # The first of the rows of all, and how many there are; what is read of them.
    first: int
    size: int
    parts: list[Any]
    # Where results are written: as they are stored, as they are, and the axis of their rows.
    out: list[tuple[Any, Any, int]]


# Type and shape of memory for a strip, without rows; along which axis these are; whether it is column-major.
_Memory = tuple[str, tuple[int, ...], Axis, bool]


class Compiled:
    """A pass as a function of Python's, written out statement by statement, and the memory that it uses again."""

    def __init__(self, program: Pass, kernels: TracedKernels) -> None:
        self.program, self.kernels, self.xp = program, kernels, kernels.xp
        self.kinds, self.axes, self.ops = program.kinds, program.axes, dict(program.sums)
        self.in_rows = bool(program.sizes)
        self.rows_read = [x for x in program.reads if self.axes[x] is not None] + list(program.over.values())
        self.whole_read = [x for x in program.reads if self.axes[x] is None]
        self.least = max(1, _LEAST_BYTES // max(1, sum(map(self._width, self.rows_read))))
        # For each value that has memory of its own in a strip, the number of that memory; what that is; of those that
        # may be written to chunks at once the place among what is written.
        self.slots: dict[int, int] = {}
        self.direct: dict[int, int] = {}
        self.memory: list[_Memory] = []
        # Matrices that say which label each row has, and that only sums over rows read: labels, and what they may be.
        self.one_hot: dict[int, tuple[int, int]] = {}
        if self.in_rows and self.xp is np:
            self._find_one_hot()
            self._plan_memory()
        self.strip = self._strip_rows()
        # The function for chunks of which those of some values are sparse, and memory for strips of some rows.
        self.functions: dict[frozenset[int], Callable[..., Any]] = {}
        self.arrays: dict[int, tuple[int, list[Any]]] = {}
        self.parts: dict[tuple[int, int], list[Any]] = {}
        self.vectors: dict[tuple[int, Any], Any] = {}
        # Kinds of inputs, and where their rows are stored; types and shapes of results; initial values of sums.
        self.layouts = [(self.kinds[x], program.moved.get(x)) for x in program.reads]
        kinds = [self.kinds[x] for x in program.whole]
        self.stored = [(np.dtype(x.dtype), x.shape if len(x.shape) == 2 else (1, x.size)) for x in kinds]
        self.nothing: dict[int, tuple[Any, int]] = {}
        # Numbers that are NumPy's scalars of their type.
        self.numbers: set[int] = set()

    # Memory of strips

    def _strip_rows(self) -> int:
        """Compute the number of rows of a strip, so that its values fit in the cache."""
        if not self.in_rows or self.xp is not np or any(x.family == "call" for x in self.program.statements):
            return 2**62
        uses = collections.Counter(x for node in self.program.statements for x in (*node.reads, *node.outputs))
        views = {
            x for node in self.program.statements if node.family in _VIEWS for x in node.outputs
        } | self.one_hot.keys()
        widths = {
            self.slots.get(x, ~x): self._width(x)
            for x, n in uses.items()
            if n > 1 and self.axes[x] is not None and x not in views
        }
        width = max(1, sum(widths.values()))
        return max(_STRIP_BYTES // width, min(_STRIP_ROWS, _STRIP_MOST // width), 1)

    def _width(self, number: int) -> int:
        """Return the bytes of a row of a value."""
        kind, axis = self.kinds[number], self.axes[number]
        return kind.nbytes // max(1, kind.shape[axis or 0])

    def _rest(self, number: int) -> tuple[int, ...]:
        """Return the shape of a value without its axis of rows."""
        kind, axis = self.kinds[number], self.axes[number]
        assert axis is not None
        return (*kind.shape[:axis], *kind.shape[axis + 1 :])

    def _plan_memory(self) -> None:
        """Assign memory to the results of elementwise functions and products, reusing that of dead values."""
        statements, root, end = self.program.statements, dict[int, int](), dict[int, int]()
        for i, statement in enumerate(statements):
            for ref in statement.reads:
                end[root.get(ref, ref)] = i
            if statement.family in _VIEWS:
                (source,) = statement.reads
                # A view keeps what it is of.
                root[statement.outputs[0]] = root.get(source, source)
        end.update((root.get(x, x), len(statements)) for x in self.program.rows)
        free: dict[_Memory, list[int]] = {}
        taken: dict[int, tuple[int, _Memory]] = {}
        # Values of which the best element of each row is taken, and what they are made of.
        columns: set[int] = set()
        for statement in reversed(statements):
            is_read = statement.family == "map" and not columns.isdisjoint(statement.outputs)
            if is_read or self._is_of_few(statement):
                columns.update(x for x in statement.reads if len(self.kinds[x].shape) == 2 and self.axes[x] == 0)

        def reserve(key: _Memory, *, new: bool = False) -> int:
            """Take free memory, or more of it."""
            if free.get(key) and not new:
                return free[key].pop()
            self.memory.append(key)
            return len(self.memory) - 1

        def release(at: int) -> None:
            for number in [x for x in taken if end.get(x, -1) <= at]:
                slot, key = taken.pop(number)
                free.setdefault(key, []).append(slot)

        for i, statement in enumerate(statements):
            # One that reads and writes the same elements may do so in place.
            release(i if self._is_ufunc(statement) else i - 1)
            if not statement.outputs:
                continue
            (number, *more) = statement.outputs
            if self._has_out(statement) and self.axes[number] is not None and not more and number not in self.one_hot:
                key = self.kinds[number].dtype, self._rest(number), self.axes[number], number in columns
                direct = number in self.program.rows and self._is_last(
                    statements[i:], root, self.program.over.get(number)
                )
                self.slots[number] = slot = reserve(key, new=direct)
                if direct:
                    self.direct[slot] = self.program.rows.index(number)
                else:
                    taken[number] = slot, key

    def _is_last(self, statements: Sequence[Statement], root: Mapping[int, int], old: int | None) -> bool:
        """Whether the first of some statements may write over an old value: it is elementwise, and the last reader."""
        if old is None:
            return True
        later = any(root.get(x, x) == old or old in node.reads for node in statements[1:] for x in node.reads)
        return self._is_ufunc(statements[0]) and not later

    def _is_ufunc(self, statement: Statement) -> bool:
        return statement.family == "map" and isinstance(getattr(np, statement.options["f"], None), np.ufunc)

    def _has_out(self, statement: Statement) -> bool:
        return (
            self._is_ufunc(statement)
            or statement.options.get("f") in ("astype", "where")
            or (statement.family == "contract" and is_product(statement.options["spec"]))
        )

    def _find_one_hot(self) -> None:
        """Find the matrices that say which label each row has, and that only sums over rows read."""
        one_hot, wrong = self.one_hot, {*self.program.rows, *self.program.whole}
        for statement in self.program.statements:
            reads, name = list(statement.reads), statement.options.get("f")
            if statement.family == "map" and name == "equal" and (pair := self._labels_of(statement)):
                one_hot[statement.outputs[0]] = pair
            elif (statement.family == "transpose" or name == "astype") and reads and reads[0] in one_hot:
                one_hot[statement.outputs[0]] = one_hot[reads[0]]
            elif not self._sums_labels(statement):
                wrong.update(reads)
        kept = set(one_hot.values()) - {one_hot[x] for x in wrong if x in one_hot}
        self.one_hot = {x: pair for x, pair in one_hot.items() if pair in kept}

    def _labels_of(self, statement: Statement) -> tuple[int, int] | None:
        """Return the labels of rows, and the numbers on all ranks with which a statement compares each of them."""
        (number,), reads = statement.outputs, list(statement.reads)
        shape, axis = list(self.kinds[number].shape), self.axes[number]
        if len(reads) < 2 or len(shape) != 2 or axis is None or any(self.kinds[x].dtype[0] not in "iu" for x in reads):
            return None
        labels, numbers = sorted(reads, key=lambda x: self.axes[x] is None)
        sizes = [self.kinds[x].size for x in (labels, numbers)]
        fits = sizes == [shape[axis], shape[1 - axis]] and self.axes[numbers] is None
        return (labels, numbers) if fits else None

    def _sums_labels(self, statement: Statement) -> bool:
        """Whether a statement counts the rows of each label, or adds them up."""
        hot = [x for x in statement.reads if x in self.one_hot]
        if len(hot) != 1 or self.ops.get(statement.outputs[0]) != "sum":
            return False
        if statement.family == "reduce":
            return bool(statement.options["axes"] == [self.axes[hot[0]]])
        kinds = {self.kinds[x].dtype for x in (*statement.reads, *statement.outputs)}
        return (
            statement.family == "contract"
            and is_product(statement.options["spec"])
            and len(kinds & _BLAS_TYPES) == len(kinds) == 1
        )

    def _by_labels(self, statement: Statement) -> str:
        """Return the call that adds rows up by their labels."""
        (number,), reads = statement.outputs, list(statement.reads)
        at = next(i for i, x in enumerate(reads) if x in self.one_hot)
        rows, flipped = "None", False
        self.names[f"t{number}"] = np.dtype(self.kinds[number].dtype)
        if statement.family == "contract":
            operand, (*letters, out) = reads[1 - at], letters_of(statement.options["spec"])
            rows, flipped = f"v{operand}" + ".T" * (self.axes[operand] == 1), out[0] not in letters[at]
        labels, numbers = self.one_hot[reads[at]]
        counts = self._prepare(f"counts(v{numbers})")
        text = self._called(number, _summed_by_label, labels, numbers, rows, f"t{number}", counts)
        total = f"totals[{number}][0]" + ".T" * flipped
        return f"add({total}, {text}.reshape({total}.shape), {total})"

    def _memory_of(self, thread: int, strip: _Strip) -> list[Any]:
        """Allocate a thread's memory for the values of a strip."""
        rows = strip.size
        if (thread, rows) not in self.parts:
            most, arrays = self.arrays.get(thread, (0, []))
            if rows > most:
                # Nothing is written to the memory of those that are written to chunks.
                arrays = [
                    np.empty((*rest, rows), dtype).T if by_columns else np.empty((rows, *rest), dtype)
                    for dtype, rest, _, by_columns in self.memory
                ]
                self.arrays[thread] = rows, arrays
            self.parts[thread, rows] = [
                np.moveaxis(x[:rows], 0, axis) if axis else x[:rows]
                for x, (_, _, axis, _) in zip(arrays, self.memory, strict=True)
            ]
        memory = self.parts[thread, rows]
        if self.direct:
            memory = memory.copy()
            for slot, place in self.direct.items():
                stored, target, _ = strip.out[place]
                if np.may_share_memory(stored, target):
                    memory[slot] = target
        return memory

    # A strip

    def function(self, sparse: frozenset[int] = frozenset()) -> Callable[..., Any]:
        """Return the function ``strip(first, rows, read, whole, memory, totals)``, compiled on first use."""
        if sparse in self.functions:
            return self.functions[sparse]
        program, lines = self.program, list[str]()
        self.sparse, self.names = set(sparse), {
            "dense": dense, "merge": functools.partial(merge_into, self.xp), "add": self.xp.add, "xp": self.xp,
            "ones": self._ones, "root": _root, "repeated": _repeated, "counts": _counts,
        }  # fmt: skip
        self.prepared: dict[str, str] = {}
        lines += [f"({''.join(f'm{i}, ' for i in range(len(self.memory)))}) = memory"] if self.slots else []
        for statement in self._kernels():
            if isinstance(statement, tuple):
                lines.append(self._fused(*statement))
                continue
            if not statement.outputs:
                lines.append(self.callback(statement))
                continue
            (number, *more) = statement.outputs
            op = self.ops.get(number)
            if number in self.one_hot:
                continue
            if not self.one_hot.keys().isdisjoint(statement.reads):
                lines.append(self._by_labels(statement))
                continue
            if op == "select":
                select = functools.partial(_select, self.xp, statement, self.axes[statement.reads[0]] or 0)
                arguments = (*statement.inputs, f"totals[{number}][0], first, rows")
                lines.append(self._called(number, select, *arguments, dense=False))
                continue
            if op == "sum" and self._by_blas(statement):
                first, second = map(self._name, statement.inputs)
                lines.append(self._blas(statement, first, second, f"totals[{number}][0]", "1"))
                continue
            if op == "sum" and self.xp is not np and self._sums_by_blas(statement):
                product, source = self.kernels.blas.product, self._name(statement.inputs[0])  # type: ignore[attr-defined]
                total = f"totals[{number}][0]" + "[0]" * bool(statement.options["keepdims"])
                lines.append(self._called(number, product, f"ones(rows, {source}.dtype)", source, total, "beta=1"))
                continue
            text = getattr(self, statement.family)(statement)
            if more:
                lines.append(f"{', '.join(f'v{x}' for x in statement.outputs)} = {text}")
                lines += [f"merge({self.ops[x]!r}, totals[{x}], [v{x}])" for x in statement.outputs if x in self.ops]
            elif op is None:
                lines.append(f"v{number} = {text}")
            elif op == "sum":
                lines.append(f"add(totals[{number}][0], {text}, totals[{number}][0])")
            else:
                lines.append(f"merge({op!r}, totals[{number}], {text if op.startswith('arg') else f'[{text}]'})")
        # Inputs may be the state of a loop, which is overwritten before a view of it is read.
        views = self._views_of_reads()
        results = [f"v{x}" for x in program.rows] + [f"v{x}" + ".copy()" * (x in views) for x in program.whole]
        lines.append(f"return ({''.join(f'{x}, ' for x in results)})")
        read, whole = ("".join(f"v{x}, " for x in some) for some in (self.rows_read, self.whole_read))
        begin = [f"({read}) = read"] if read else []
        begin += [f"({whole}{', '.join(self.prepared.values())}) = whole"] if whole else []
        before = [f"({whole}) = whole"] * bool(whole) + [f"return ({whole}{', '.join(self.prepared)})"]
        for head, body in (
            ("before(whole, most)", before),
            ("strip(first, rows, read, whole, memory, totals)", begin + lines),
        ):
            exec(f"def {head}:\n" + "\n".join(f"    {x}" for x in body), self.names)
        self.names["strip"].before = self.names["before"] if self.prepared else None
        self.functions[sparse] = strip = self.names["strip"]
        return strip  # type: ignore[no-any-return]

    def _prepare(self, text: str) -> str:
        """Return the variable of an expression that is computed once for all strips, of what all ranks have."""
        return self.prepared.setdefault(text, f"w{len(self.prepared)}")

    def _views_of_reads(self) -> set[int]:
        """Return the values that may alias inputs."""
        views = set(self.program.reads)
        for statement in self.program.statements:
            if statement.family not in _NEW and not self._is_ufunc(statement) and not views.isdisjoint(statement.reads):
                views.update(statement.outputs)
        return views

    def _kernels(self) -> Sequence[Any]:
        """Return the statements; on GPUs grouped into fused kernels."""
        if not hasattr(self.xp, "ElementwiseKernel"):
            return self.program.statements
        kept = {*self.program.rows, *self.program.whole}
        return groups(self.program.statements, self.kinds, kept)

    def _fused(self, statements: Sequence[Statement], targets: Sequence[int]) -> str:
        """Return the call of a fused elementwise kernel."""
        reads, inputs, outputs, body = source(statements, self.kinds, targets)
        kernel = self.xp.ElementwiseKernel(inputs, outputs, body, "distmm_fused")
        called = self._called(targets[0], kernel, *reads)
        return f"{', '.join(f'v{x}' for x in targets)} = {called}"

    def _name(self, ref: Ref | str, *, dense: bool = True) -> str:
        """Return an operand as the text of an argument."""
        if isinstance(ref, Literal):
            name = f"k{len(self.names)}"
            self.names[name] = ref.value
            return name
        if isinstance(ref, str):
            return ref
        return f"dense(v{ref})" if dense and ref in self.sparse else f"v{ref}"

    def _called(self, number: int, function: Callable[..., Any], *arguments: Ref | str, dense: bool = True) -> str:
        """Return the text of a call of a function."""
        self.names[f"f{number}"] = function
        return f"f{number}({', '.join(self._name(x, dense=dense) for x in arguments)})"

    def run(self, arrays: Sequence[Any]) -> Any:
        """Evaluate the statements; add to sums and write rows, or return replicated results."""
        if self.in_rows:
            lengths = [1 if self.axes[x] is None else len(self.program.sizes) for x in self.program.reads]
            places = zip(self.program.reads, itertools.accumulate(lengths, initial=0), self.layouts, strict=False)
            self.bound(arrays)([natural(arrays[at], *how) for x, at, how in places if self.axes[x] is None])
            return ()
        numbers = () if self.xp is np else None
        inputs = [
            x[()] if (x := natural(array, *how)).shape == numbers else x
            for array, how in zip(arrays, self.layouts, strict=True)
        ]
        results, asarray = self.function()(0, 0, (), inputs, (), {}), self.xp.asarray
        return tuple(asarray(x, dtype).reshape(shape) for x, (dtype, shape) in zip(results, self.stored, strict=True))

    def bound(self, arrays: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """Return a function that evaluates the pass over the rows of these arrays, of replicated inputs."""
        program, kinds, count = self.program, self.kinds, len(self.program.sizes)
        rest = iter(arrays)
        pieces = {
            number: [next(rest) for _ in range(count if self.axes[number] is not None else 1)]
            for number in program.reads
        }
        totals, starts = dict[int, list[Any]](), list[tuple[Any, Any]]()
        for number, op in program.sums:
            own = [next(rest) for _ in range(1 + op.startswith("arg"))]
            starts += zip(own, self.begin(number, own) if program.fresh else (), strict=False)
            totals[number] = [natural(x, kinds[number], None) for x in own]
        written = {number: [next(rest) for _ in range(count)] for number in program.rows}
        pieces |= {old: written[number] for number, old in program.over.items()}
        strips = [strip for index in range(count) for strip in self._strips(index, pieces, written)]
        threads = max(1, min(self.kernels.threads, len(strips))) if self.xp is np else 1
        shares = [
            [(strip, self._memory_of(thread, strip)) for strip in strips[start : len(strips) * (thread + 1) // threads]]
            for thread in range(threads)
            for start in [len(strips) * thread // threads]
        ]

        def call(whole: Sequence[Any]) -> None:
            for part, value in starts:
                part[...] = value
            if threads == 1:
                self._take(shares[0], whole, totals)
                return
            sums = [totals, *(self._empty_sums(totals) for _ in shares[1:])]
            deque(self.kernels.pool.map(self._take_in_thread, shares, [whole] * threads, sums), 0)
            # In the order of rows.
            for number, op in program.sums:
                for more in sums[1:]:
                    merge_into(np, op, totals[number], more[number])

        return call

    def begin(self, number: int, totals: Sequence[Any]) -> tuple[Any, int]:
        """Return the initial value of a reduction; for argmin and argmax with index -1."""
        if number not in self.nothing:
            self.nothing[number] = identity(self.ops[number], totals[0].dtype.name), -1
        return self.nothing[number]

    def _empty_sums(self, totals: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
        """Allocate totals with initial values."""
        return {
            number: [np.full(x.shape, value, x.dtype) for x, value in zip(own, self.begin(number, own), strict=False)]
            for number, own in totals.items()
        }

    def _strips(
        self, index: int, pieces: Mapping[int, Sequence[Any]], written: Mapping[int, Sequence[Any]]
    ) -> Iterator[_Strip]:
        """Yield the strips of a chunk."""
        chunks = [(x, pieces[x][index]) for x in self.rows_read]
        out = [(number, some[index]) for number, some in written.items()]
        lengths = [x.shape[0] for _, x in (*chunks, *out)]
        rows = max(lengths, default=max(0, self.program.sizes[index]))
        if min(lengths, default=rows) != rows:
            raise MatrixError(f"arrays of unknown sizes have chunks of {min(lengths)} and {rows} rows side by side")
        sparse = frozenset(x for x, chunk in chunks if sparse_package(chunk))
        # Inputs that are read once are shared by all threads, too.
        step = max(1, rows if sparse else min(rows, self.strip, max(self.least, -(-rows // self.kernels.threads))))
        function, first = self.function(sparse), self.program.firsts[index]
        for start in range(0, rows, step):
            some = slice(start, min(rows, start + step))
            parts = {
                x: chunk if x in sparse else natural(chunk[some], self.kinds[x], self.axes[x]) for x, chunk in chunks
            }
            places = [
                (
                    stored := chunk[some],
                    parts.get(
                        self.program.over.get(number, -1), natural(stored, self.kinds[number], self.axes[number])
                    ),
                    self.axes[number] or 0,
                )
                for number, chunk in out
            ]
            yield _Strip(function, first + start, some.stop - start, list(parts.values()), places)

    def _take_in_thread(self, *arguments: Any) -> None:
        with np.errstate(all="ignore"):
            self._take(*arguments)

    def _take(self, strips: Sequence[tuple[_Strip, Any]], whole: Sequence[Any], totals: Mapping[int, Any]) -> None:
        """Evaluate strips, each in its own memory."""
        most, prepared = max((strip.size for strip, _ in strips), default=0), dict[Any, Any]()
        for (function, first, size, parts, out), memory in strips:
            if function not in prepared:
                prepared[function] = function.before(whole, most) if function.before else whole  # type: ignore[attr-defined]
            results = function(first, size, parts, prepared[function], memory, totals)
            for (stored, target, axis), value in zip(out, results, strict=True):
                if value is not target:  # else it was written there
                    by_rows = self.xp.moveaxis(value, axis, 0) if axis else value
                    stored[...] = by_rows.reshape(stored.shape)

    # Families: each as an expression

    def map(self, statement: Statement) -> str:
        """Elementwise functions."""
        if text := self._number(statement):
            return text
        options = {k: v for k, v in statement.options.items() if k != "f"}
        name, (number,) = statement.options["f"], statement.outputs
        slot = self.slots.get(number)
        if self._is_ufunc(statement):
            out = () if slot is None else (f"out=m{slot}",)
            inputs = [self._repeated(x, number) if slot is not None else x for x in statement.inputs]
            return self._called(number, getattr(self.xp, name), *inputs, *out)
        if slot is not None and name == "where":
            return self._called(number, _where, *statement.inputs, f"m{slot}")
        if slot is not None and name == "astype":
            return self._called(number, _cast, *statement.inputs, f"m{slot}")
        function = functools.partial(elementwise, self.xp, name, options=options)
        return self._called(number, lambda *arguments: function(arguments), *statement.inputs)

    def _repeated(self, ref: Ref, number: int) -> Ref | str:
        """Return a short row of an elementwise function as many rows: NumPy takes long to start for each row."""
        shape, axis = self.kinds[number].shape, self.axes[number]
        if (
            isinstance(ref, Literal)
            or self.axes[ref] is not None
            or axis
            or len(shape) != 2
            or self.memory[self.slots[number]][-1]
            or not 1 < shape[1] <= _SHORT
        ):
            return ref
        kind = self.kinds[ref]
        return (
            self._prepare(f"repeated(v{ref}, most)") + "[:rows]"
            if kind.shape[-1:] == shape[1:] == (kind.size,)
            else ref
        )

    def _number(self, statement: Statement) -> str:
        """Return an elementwise function of replicated real numbers as an expression of Python's, or None."""
        name, (number,), kinds = statement.options["f"], statement.outputs, self.kinds
        reads, dtype = [kinds[x] for x in statement.reads], np.dtype(kinds[number].dtype)
        if self.xp is not np or self.in_rows or not reads or any(x.shape for x in reads) or dtype.kind not in "biuf":
            return ""
        values: list[Any] = [np.dtype(kinds[x].dtype) if isinstance(x, int) else x.value for x in statement.inputs]
        kept = [x for x in values if isinstance(x, np.dtype)]
        if name == "astype" and dtype.kind == "f" and kept[0].kind in "biuf":
            self.names[f"t{number}"], text = dtype.type, f"t{number}({{0}})"
        elif name in _CHOICES:
            first = name == "where"
            if any(
                x != dtype if isinstance(x, np.dtype) else type(x) not in (bool, int, float) for x in values[first:]
            ):
                return ""
            text = _CHOICES[name]
            values = [x if isinstance(x, np.dtype) else dtype.type(x) for x in values]
        elif name in _NUMBERS and all(x.kind in _NUMBERS[name][1] for x in kept):
            text = _NUMBERS[name][0]
            exact = (bool,) if name.startswith("logical") else (bool, int, float)
            if any(type(x) not in exact for x in values if not isinstance(x, np.dtype)):
                return ""
        else:
            return ""
        self.numbers.add(number)
        inputs = zip(statement.inputs, values, strict=True)
        return text.format(*(self._name(x if isinstance(x, int) else Literal(value)) for x, value in inputs))

    def fill(self, statement: Statement) -> str:
        """One value in the shape of an array."""
        full, dtype = self.xp.full, statement.options["dtype"]
        return self._called(
            statement.outputs[0], lambda like, value: full(like.shape, value, dtype), *statement.inputs, dense=False
        )

    def reduce(self, statement: Statement) -> str:
        """Reduce a strip, or a replicated array."""
        xp, (number,), options = self.xp, statement.outputs, statement.options
        name, axes, keepdims = options["f"], tuple(options["axes"]), options["keepdims"]
        function = getattr(xp, name)
        if name in ("argmax", "argmin"):
            (axis,) = axes
            if self._is_of_few(statement):
                return self._called(number, functools.partial(_first_of_few, name, keepdims), *statement.inputs)
            if number not in self.ops:
                return self._called(number, lambda x: function(x, axis=axis, keepdims=keepdims), *statement.inputs)
            best = functools.partial(_best, xp, function, axis, keepdims)
            return self._called(number, best, *statement.inputs, "first")
        if name == "sum" and len(axes) == 1 and not keepdims and statement.inputs[0] in self.sparse:
            summed = functools.partial(_sparse_sum, xp, axes[0])
            return self._called(number, summed, *statement.inputs, dense=False)
        if self.xp is np and self._sums_by_blas(statement):
            source = self._name(statement.inputs[0])
            if axes == (0,):
                return f"(ones(rows, {source}.dtype) @ {source})" + "[None]" * bool(keepdims)
            return f"({source} @ ones({source}.shape[1], {source}.dtype))" + "[:, None]" * bool(keepdims)
        how = {"axis": axes, "keepdims": keepdims}
        if name in ("sum", "prod"):
            how["dtype"] = self.kinds[number].dtype
        return self._called(number, functools.partial(function, **how), *statement.inputs)

    def _is_of_few(self, statement: Statement) -> bool:
        """Whether a statement finds the best elements of short rows."""
        kinds = [self.kinds[x] for x in statement.reads]
        return (
            statement.options.get("f") in ("argmax", "argmin")
            and statement.outputs[0] not in self.ops
            and self.xp is np
            and statement.options["axes"] == [1] == [len(x.shape) - 1 for x in kinds]
            and 0 < kinds[0].shape[1] * np.dtype(kinds[0].dtype).itemsize <= _SHORT
        )

    def contract(self, statement: Statement) -> str:
        """Products."""
        (number,), spec = statement.outputs, statement.options["spec"]
        first, second = (self._name(x, dense=False) for x in statement.inputs)
        if self._by_blas(statement):
            return self._blas(statement, first, second)
        if not is_product(spec):
            return self._called(number, contraction(self.xp, spec), *statement.inputs)
        if self.sparse.isdisjoint(statement.reads):
            flip_a, flip_b, transposed = product_of(spec)
            first, second = first + ".T" * flip_a, second + ".T" * flip_b
            slot = self.slots.get(number)
            if most := self._rows_of_products(statement):
                if number in self.ops:
                    return self._called(number, _summed_in_pieces, first, second, str(most))
                # BLAS is faster for narrow products of what is not transposed.
                second = self._prepare(f"xp.ascontiguousarray({second})")
                return self._called(
                    number, _in_pieces, first, second, "None" if slot is None else f"m{slot}", str(most)
                )
            if slot is None or transposed:
                return f"xp.matmul({first}, {second})" + ".T" * transposed
            return f"xp.matmul({first}, {second}, m{slot})"
        return self._called(
            number, functools.partial(_sparse_product, product_of(spec)), *statement.inputs, dense=False
        )

    def _rows_of_products(self, statement: Statement) -> int:
        """Return of how many rows a product with what all ranks have, or a sum of rows, is fastest; 0 for others."""
        (number,), spec, reads = statement.outputs, statement.options["spec"], list(statement.reads)
        kinds, axes = [self.kinds[x] for x in (*reads, number)], [self.axes[x] for x in reads]
        flip_a, _, turned = product_of(spec)
        by_rows = axes[0] == flip_a and axes[1:] == [None]
        sums = self.ops.get(number) == "sum" and None not in axes
        alike = {kind.dtype for kind in kinds} in ({"float32"}, {"float64"})
        if self.xp is not np or turned or not (by_rows or sums) or not alike or any(len(x.shape) != 2 for x in kinds):
            return 0
        work, rows = kinds[1 if by_rows else 2].size, min(self.strip, 2**16)
        most = -(-rows // -(-rows * work // _SMALL_PRODUCT)) if work else 0
        return most if most >= _SMALL_ROWS else 0

    def _sums_by_blas(self, statement: Statement) -> bool:
        """Whether a statement is a sum of the columns of a matrix in rows, on CPUs also of short rows.

        CuPy's own sum over the long axis takes 30 times as long as a product with ones (H100, 200,000 x 32: 3.7 ms),
        NumPy's of both 4 to 10 times (one core, 200,000 x 8: 3.2 and 3.6 ms, 200,000 x 32: 4.1 and 4.7). An infinite
        complex number times one has a part that is NaN.
        """
        if statement.family != "reduce" or statement.options["f"] != "sum" or not self.in_rows:
            return False
        (source,), (number,), axes = statement.reads, statement.outputs, statement.options["axes"]
        kind = self.kinds[source]
        is_short = self.xp is np and axes == [1] and kind.shape[-1] <= _SHORT
        return (
            (axes == [0] or is_short)
            and len(kind.shape) == 2
            and self.axes[source] == 0
            and kind.dtype == self.kinds[number].dtype
            and kind.dtype in _BLAS_TYPES
            and (kind.dtype[0] == "f" or self.xp is not np)
            and source not in self.sparse
        )

    def _ones(self, rows: int, dtype: Any) -> Any:
        """Return a vector of ones, allocated once."""
        if (rows, dtype) not in self.vectors:
            self.vectors[rows, dtype] = self.xp.ones(rows, dtype)
        return self.vectors[rows, dtype]

    def _by_blas(self, statement: Statement) -> bool:
        """Whether a statement is a product for the GPU's BLAS, which can accumulate into its output."""
        kinds = {self.kinds[x].dtype for x in (*statement.reads, *statement.outputs)}
        return (
            statement.family == "contract"
            and self.xp is not np
            and is_product(statement.options["spec"])
            and len(kinds) == 1
            and kinds <= _BLAS_TYPES
            and self.sparse.isdisjoint(statement.reads)
        )

    def _blas(self, statement: Statement, first: str, second: str, out: str = "None", beta: str = "0") -> str:
        """Return the text of a call of the GPU's BLAS."""
        flip_a, flip_b, transposed = product_of(statement.options["spec"])
        a, b, product = first + ".T" * flip_a, second + ".T" * flip_b, self.kernels.blas.product  # type: ignore[attr-defined]
        out = out + ".T" * (transposed and out != "None")
        called = self._called(statement.outputs[0], product, a, b, out, f"beta={beta}")
        return called + ".T" * (transposed and out == "None")

    def index(self, statement: Statement) -> str:
        """Index with integers and slices."""
        index = index_of(statement.options["index"])
        return self._called(statement.outputs[0], lambda x: x[index], *statement.inputs)

    def transpose(self, statement: Statement) -> str:
        """Transposition."""
        if statement.options["axes"] == [1, 0]:
            # Of sparse rows, too.
            (source,) = statement.inputs
            self.sparse.update(statement.outputs if source in self.sparse else ())
            return f"v{source}.T"
        axes = statement.options["axes"]
        return self._called(statement.outputs[0], lambda x: x.transpose(axes), *statement.inputs)

    def _local_shape(self, statement: Statement) -> Callable[[int], list[int]]:
        """Return a function of the number of rows that returns the shape of a statement's result."""
        shape, axis = list(statement.options["shape"]), self.axes[statement.outputs[0]]
        return lambda rows: [rows if i == axis else n for i, n in enumerate(shape)]

    def reshape(self, statement: Statement) -> str:
        """Reshape."""
        shape = self._local_shape(statement)
        return self._called(statement.outputs[0], lambda x, rows: x.reshape(shape(rows)), *statement.inputs, "rows")

    def broadcast(self, statement: Statement) -> str:
        """Broadcast axes of length 1."""
        xp, shape = self.xp, self._local_shape(statement)
        return self._called(
            statement.outputs[0], lambda x, rows: xp.broadcast_to(x, shape(rows)), *statement.inputs, "rows"
        )

    def concat(self, statement: Statement) -> str:
        """Concatenate arrays."""
        xp, axis = self.xp, statement.options["axis"]
        return self._called(statement.outputs[0], lambda *arrays: xp.concatenate(arrays, axis), *statement.inputs)

    def take(self, statement: Statement) -> str:
        """Gather rows by their numbers."""
        take = functools.partial(self.xp.take, axis=statement.options["axis"])
        if self.xp is np:
            take = functools.partial(call_user, "function", _OUTSIDE, take)
        return self._called(statement.outputs[0], take, *statement.inputs)

    def put(self, statement: Statement) -> str:
        """Replace a column; in place if the matrix is not read later and its memory is that of the result."""
        (number,), (source, *_) = statement.outputs, statement.inputs
        same, after = {source}, False
        in_place = self.program.over.get(number) == source
        for reader in self.program.statements:
            in_place &= not after or same.isdisjoint(reader.reads)
            after |= reader is statement
            same.update(reader.outputs if reader.family in _VIEWS and not same.isdisjoint(reader.reads) else ())
        return self._called(number, functools.partial(_put, self.xp, in_place), *statement.inputs)

    def segment_sum(self, statement: Statement) -> str:
        """Sum rows by labels."""
        count = statement.options["count"]
        return self._called(
            statement.outputs[0], lambda x, labels: summed_by_label(x, labels, count), *statement.inputs
        )

    def along(self, statement: Statement) -> str:
        """Functions along an axis that is not that of rows."""
        options = dict(statement.options)
        function = getattr(self.xp, options.pop("f"))
        return self._called(statement.outputs[0], functools.partial(function, **options), *statement.inputs)

    def whole(self, statement: Statement) -> str:
        """Functions of whole matrices; on the host if CuPy lacks them."""
        kinds = [self.kinds[x] for x in (*statement.reads, *statement.outputs)]
        types, plain = {x.dtype for x in kinds}, self.xp is not np and all(len(x.shape) < 3 for x in kinds)
        if plain and statement.options["f"] in _SOLVED and len(types) == 1 and types <= _BLAS_TYPES:
            solve = self.kernels.blas.solve  # type: ignore[attr-defined]
            return self._called(statement.outputs[0], solve, *statement.inputs)
        function = functools.partial(_whole, self.xp, self.kernels.blas.host, statement.options)
        return self._called(statement.outputs[0], function, *statement.inputs)

    def random(self, statement: Statement) -> str:
        """Draw random numbers, on the host."""
        xp, how, host = self.xp, statement.options, self.kernels.blas.host
        drawing = how["f"], how["shape"], how["dtype"]
        size = how["shape"][0] if how["shape"] else 1
        if self.axes[statement.outputs[0]] is None:
            return self._called(
                statement.outputs[0], lambda key: xp.asarray(drawn(host(key), *drawing, 0, size)), *statement.inputs
            )
        return self._called(
            statement.outputs[0],
            lambda key, *rows: xp.asarray(drawn(host(key), *drawing, *rows)),
            *statement.inputs,
            "first",
            "rows",
        )

    def call(self, statement: Statement) -> str:
        """Call a user's function for rows."""
        kernels, options = self.kernels, statement.options
        kinds = [self.kinds[x] for x in statement.outputs]
        rows = "rows" if not options["sums"] and self.axes[statement.outputs[0]] is not None else "None"
        number = str(options["function"])
        call = functools.partial(_user_rows, kernels, kinds, options["name"])
        beside = ("slice(first, first + rows)",) if options.get("slices") else ()
        if not options["rows"] and not beside:
            # One rank decides, with NumPy.
            def call_on_host(function: int, rows: None, *arguments: Any) -> Any:
                return call(function, rows, *map(kernels.blas.host, arguments))

            return self._called(statement.outputs[0], call_on_host, number, rows, *statement.inputs)
        return self._called(statement.outputs[0], call, number, rows, *statement.inputs, *beside)

    def callback(self, statement: Statement) -> str:
        """Call a user's function on one rank."""
        kernels, function = self.kernels, statement.options["function"]

        def call(*arguments: Any) -> None:
            call_function(kernels.constants[function], "callback", *(kernels.blas.host(x).copy() for x in arguments))

        return self._called(id(statement), call, *statement.inputs)

    def qr(self, statement: Statement) -> str:
        """QR of a matrix that all ranks have."""
        return self._called(statement.outputs[0], self.xp.linalg.qr, *statement.inputs)

    def local(self, statement: Statement) -> str:
        """Slice a rank's own rows out of a replicated array."""
        (source,) = statement.inputs
        return f"v{source}[{':, ' * statement.options['axis']}first:first + rows]"


def _whole(xp: Any, host: Callable[[Any], Any], options: Mapping[str, Any], *parts: Any) -> Any:
    """Call a function of matrices, on the host if CuPy does not have it."""
    name, how = options["f"], options["how"]
    try:
        function = function_of(xp, name)
    except AttributeError:
        result = function_of(np, name)(*map(host, parts), **how)
        return tuple(map(xp.asarray, result)) if isinstance(result, tuple) else xp.asarray(result)
    try:
        return function(*parts, **how)
    except np.linalg.LinAlgError as error:
        raise MatrixError(f"{name.removeprefix('linalg.')} of a matrix of shape {parts[0].shape}: {error}") from error


def _user_rows(
    kernels: TracedKernels, kinds: Sequence[Kind], name: str, function: int, rows: int | None, *arguments: Any
) -> Any:
    """Call a user's function with read-only arrays; check the shapes and dtypes of its results."""
    if kernels.xp is np:
        arguments = tuple(x.view() if isinstance(x, np.ndarray) else x for x in arguments)
        for x in arguments:
            if isinstance(x, np.ndarray):
                x.flags.writeable = False
    returned = call_function(kernels.constants[function], name, *arguments)
    results = returned if isinstance(returned, tuple) else (returned,)
    expected = [(rows, *kind.shape[1:]) if rows is not None else kind.shape for kind in kinds]
    for_rows = ""
    if arguments and isinstance(arguments[-1], slice):
        # In place of a matrix: one vector may be without its second axis.
        results = tuple(x[:, None] if np.ndim(x) == 1 and kinds[0].shape[1] == 1 else x for x in results)
        for_rows = f" for rows {arguments[-1].start} to {arguments[-1].stop} and an array of shape {arguments[0].shape}"
    shapes, dtypes = [np.shape(x) for x in results], [kind.dtype for kind in kinds]
    fits = all(np.can_cast(x.dtype, t, "same_kind") for x, t in zip(results, dtypes, strict=False) if for_rows)
    if shapes != expected or not fits:
        shown = ", ".join(f"{getattr(x, 'dtype', type(x).__name__)} of shape {np.shape(x)}" for x in results)
        wanted = ", ".join(f"{t} of shape {shape}" for t, shape in zip(dtypes, expected, strict=True))
        raise MatrixError(f"the function given as {name} returned {shown}{for_rows}; expected {wanted}")
    arrays = tuple(kernels.xp.asarray(x, t) for x, t in zip(results, dtypes, strict=True))
    return arrays if isinstance(returned, tuple) else arrays[0]


def _in_pieces(a: Any, b: Any, out: Any, most: int) -> Any:
    """Return a product of rows, some at a time."""
    pieces = len(a) // most if a.flags.c_contiguous and (out is None or out.flags.c_contiguous) else 0
    if pieces < 2:
        return np.matmul(a, b, out)
    out, rows = np.empty((len(a), b.shape[1]), a.dtype) if out is None else out, pieces * most
    np.matmul(a[:rows].reshape(pieces, most, -1), b, out[:rows].reshape(pieces, most, -1))
    np.matmul(a[rows:], b, out[rows:])
    return out


def _summed_in_pieces(a: Any, b: Any, most: int) -> Any:
    """Return a product that sums over rows, some at a time."""
    pieces = len(b) // most if a.T.flags.c_contiguous and b.flags.c_contiguous else 0
    if pieces < 2:
        return a @ b
    rows = pieces * most
    first, second = (x[:rows].reshape(pieces, most, -1) for x in (a.T, b))
    return np.matmul(first.transpose(0, 2, 1), second).sum(0) + a[:, rows:] @ b[rows:]


def _where(condition: Any, x: Any, y: Any, out: Any) -> Any:
    np.copyto(out, y)
    np.copyto(out, x, where=condition)
    return out


def _summed_by_label(labels: Any, numbers: Any, rows: Any, dtype: Any, is_numbered: bool) -> Any:
    """Return the product of a matrix that is 1 where a label is a number, else 0, and rows; of no rows its sums."""
    labels, numbers = labels.ravel(), numbers.ravel()
    is_small = np.ndim(rows) == 2 and not sparse_package(rows) and numbers.size * rows.shape[1] <= _SHORT
    if is_numbered and not is_small:
        sums = summed_by_label(rows, labels, len(numbers))
        # A product with 0 is NaN where rows are not finite.
        if sums.dtype.kind not in "fc" or np.isfinite(sums).all():
            return sums
    one_hot = (numbers[:, None] == labels).astype(dtype)
    return one_hot.sum(1) if rows is None else dense(one_hot @ rows)


def _counts(numbers: Any) -> bool:
    """Whether numbers are 0, 1, 2 ..."""
    return np.array_equal(numbers.ravel(), np.arange(numbers.size))


def _repeated(row: Any, count: int) -> Any:
    """Return a row many times."""
    return np.repeat(row.reshape(1, -1), count, 0)


def _root(x: Any) -> Any:
    return type(x)(math.sqrt(x)) if x >= 0 and type(x) is np.float64 else np.sqrt(x)


def _cast(x: Any, out: Any) -> Any:
    np.copyto(out, x, casting="unsafe")
    return out


def _put(xp: Any, in_place: bool, x: Any, column: Any, j: Any) -> Any:
    result = x if in_place else x.copy()
    if xp is np or isinstance(j, int):
        result[:, int(j)] = column
    else:
        result[:, j.reshape(1)] = column[:, None]  # without a look at the number
    return result


def _sparse_sum(xp: Any, axis: int, x: Any) -> Any:
    return xp.asarray(x.sum(axis=axis)).ravel()


def _best(xp: Any, function: Any, axis: int, keepdims: bool, x: Any, first: int) -> tuple[Any, Any]:
    """Return the extreme elements along the axis of rows, and their global row numbers."""
    at = xp.expand_dims(function(x, axis=axis), axis)
    values, rows = xp.take_along_axis(x, at, axis), at + first
    return (values, rows) if keepdims else (xp.squeeze(values, axis), xp.squeeze(rows, axis))


def _first_of_few(name: str, keepdims: bool, x: Any) -> Any:
    """Return where the best element of each row is; NumPy's function takes as long to start for each of the rows."""
    count, columns = x.shape[1], x.T if x.strides[0] == x.itemsize else np.ascontiguousarray(x.T)
    places = (columns == getattr(columns, name[3:])(0)).view(np.uint8)
    places *= np.arange(count, 0, -1, dtype=np.uint8)[:, None]
    at = count - places.max(0).astype(np.int64)
    if at.max(initial=0) == count:  # no NaN equals itself
        at = getattr(x, name)(1)
    return at[:, None] if keepdims else at


def _select(xp: Any, statement: Statement, axis: int, x: Any, *rest: Any) -> None:
    """Add the selected rows that this rank has to `total`."""
    *inputs, total, first, rows = rest
    if statement.family == "take":
        (numbers,) = inputs
        length = statement.options["length"]
        if xp is np:
            call_user("function", _OUTSIDE, _check_numbers, numbers, length)
        numbers = xp.where(numbers < 0, numbers + length, numbers)
        inside = (numbers >= first) & (numbers < first + rows)
        if rows:
            at = xp.where(inside, numbers - first, 0)
            # Of sparse rows only those that are chosen become dense.
            selected = dense(x[at]) if sparse_package(x) and not axis and at.ndim == 1 else xp.take(dense(x), at, axis)
            shape = [1] * axis + list(numbers.shape) + [1] * (x.ndim - axis - 1)
            total += xp.where(inside.reshape(shape), selected, selected.dtype.type(0))
        return
    x, index = dense(x), list(index_of(statement.options["index"]))
    place = [i for i, entry in enumerate(index) if entry is not None][axis]
    entry, out = index[place], sum(not isinstance(x, int) for x in index[:place])
    size = statement.options["length"]
    if isinstance(entry, int):
        at = entry % size - first
        if 0 <= at < rows:
            index[place] = at
            total[...] = x[tuple(index)]
        return
    wanted = range(*entry.indices(size))
    inside = list(_between(wanted, first, first + rows))
    if inside:
        low, high = inside[0], inside[-1] + 1
        begin, stop = wanted[low] - first, wanted[high - 1] - first + (1 if wanted.step > 0 else -1)
        index[place] = slice(begin, stop if stop >= 0 else None, wanted.step)
        total[(*(slice(None),) * out, slice(low, high))] = x[tuple(index)]


def _check_numbers(numbers: Any, length: int) -> None:
    """Raise NumPy's IndexError for row numbers out of bounds."""
    wrong = (numbers < -length) | (numbers >= length)
    if wrong.any():
        raise IndexError(f"index {numbers[wrong][0]} is out of bounds for axis 0 with size {length}")


def _between(wanted: range, first: int, stop: int) -> range:
    """Return the positions within a range of its elements in ``[first, stop)``."""
    if wanted.step > 0:
        low, high = math.ceil((first - wanted.start) / wanted.step), math.ceil((stop - wanted.start) / wanted.step)
    else:
        low = math.floor((wanted.start - stop) / -wanted.step) + 1
        high = math.floor((wanted.start - first) / -wanted.step) + 1
    return range(max(0, low), max(0, min(len(wanted), high)))


def is_product(spec: str) -> bool:
    """Whether a contraction is a product of two matrices or vectors."""
    first, second, out = letters_of(spec)
    summed = [x for x in first if x in second]
    return len(summed) == 1 and summed[0] not in out and len(first) <= 2 and len(second) <= 2


def product_of(spec: str) -> tuple[bool, bool, bool]:
    """Return whether A, B, and the result of a product are transposed."""
    first, second, out = letters_of(spec)
    (summed,) = [x for x in first if x in second]
    left, right = first.replace(summed, ""), second.replace(summed, "")
    return (
        bool(left) and first[0] == summed,
        bool(right) and second[-1] == summed,
        bool(left and right) and out[0] == right,
    )


def _sparse_product(how: tuple[bool, bool, bool], a: Any, b: Any) -> Any:
    flip_a, flip_b, transposed = how
    a, b = (a.T if flip_a else a), (b.T if flip_b else b)
    product = a @ b if sparse_package(a) else (b.T @ a.T).T
    product = dense(product)
    return product.T if transposed else product


def contraction(xp: Any, spec: str) -> Callable[[Any, Any], Any]:
    """Return a function that contracts any axes of two arrays."""
    first, second, out = letters_of(spec)
    batch = [x for x in out if x in first and x in second]
    summed = [x for x in first if x in second and x not in out]
    left = [x for x in first if x not in second]
    right = [x for x in second if x not in first]
    order = [*batch, *left, *right]
    back = [order.index(x) for x in out]
    axes_a = [first.index(x) for x in (*batch, *left, *summed)]
    axes_b = [second.index(x) for x in (*batch, *summed, *right)]

    def contracted(a: Any, b: Any) -> Any:
        a, b = a.transpose(axes_a), b.transpose(axes_b)
        shape = (*a.shape[: len(batch) + len(left)], *b.shape[len(batch) + len(summed) :])
        lead, depth = a.shape[: len(batch)], math.prod(a.shape[len(batch) + len(left) :])
        x = a.reshape(*lead, math.prod(a.shape[len(batch) : len(batch) + len(left)]), depth)
        y = b.reshape(*lead, depth, math.prod(b.shape[len(batch) + len(summed) :]))
        return xp.matmul(x, y).reshape(shape).transpose(back)

    return contracted
