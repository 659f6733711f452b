"""The turns of a loop as one function of Python's, which is written out for the arrays of a run.

Steps are looked up once: buffers stay from turn to turn, views of them and calls of kernels with their arguments are
made before. Numbers that all ranks have are NumPy's scalars in local variables, not arrays of one element. What is left
of a turn are the calls themselves. A loop with steps that can't be written out is taken step by step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dask_distmm.engines.programs.evaluate import UFUNCS, natural
from dask_distmm.numeric.types import dtype_from_name, store
from dask_distmm.programs.steps import (
    Buffer,
    Call,
    Drop,
    If,
    Loop,
    New,
    Publish,
    Pull,
    Step,
    View,
    has_messages,
    lists_in,
    roles_of,
)
from dask_distmm.tracing.form import Kind

# Kernels that are written out, of which numbers may be arguments; others are called.
_OF_NUMBERS = {"copy", "copy_all", "decide", "follow", "increment", "set_all", "merge"}
_WRITTEN = {*_OF_NUMBERS, "evaluate", "evaluate_exactly", "assemble"}
_EMPTY = np.empty(0)
# Bytes that buffers may take beside those that are there at the same time when steps are taken one by one.
_MORE_BYTES = 2**26


class _Unwritten(Exception):
    """A step can't be written out."""


def written_out(
    loop: Loop,
    arrays: Mapping[str, Any],
    kernels: Any,
    new: Callable[[Buffer], Any],
    functions: Mapping[str, Callable[..., Any]],
) -> Callable[[int], Iterator[int]] | None:
    """Return a generator function of a loop's iterations from a number on; None if a step can't be written out.

    `functions` are those of a job: ``begins`` and ``ends`` of a turn, ``publish``, ``request`` and ``get`` of messages,
    ``due`` and ``offset``.
    """
    try:
        return Writer(arrays, kernels, new, functions).loop(loop)
    except _Unwritten:
        return None


class Writer:
    """The text of a loop, and what it names."""

    def __init__(
        self,
        arrays: Mapping[str, Any],
        kernels: Any,
        new: Callable[[Buffer], Any],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.kernels, self.new, self.outside = kernels, new, arrays
        self.names: dict[str, Any] = {
            **functions, "copyto": np.copyto, "store": store, "natural": natural, "asarray": np.asarray,
            "array": np.array, "none": {},
        }  # fmt: skip
        self.lines: list[str] = []
        self.depth = 1
        self.numbers: set[str] = set()
        # Buffers that stay, by name; those that are results of calls, with their kinds.
        self.fixed = dict(arrays)
        self.forms: dict[str, tuple[Any, ...]] = {}
        self.results: dict[str, Kind] = {}
        self.variables: dict[str, int] = {}
        self.constants: dict[int, tuple[str, Any]] = {}
        # Memory of chunks that is used again, but not in branches; bytes of buffers by steps, at most, and of all.
        self.free: dict[tuple[Any, ...], list[Any]] = {}
        # For each branch that is being written the buffers that the other way has left.
        self.branches: list[dict[str, Any]] = []
        # Calls that note how far the outermost loop has come.
        self.follows: list[str] = []
        self.now = self.most = self.all = 0

    # Names

    def constant(self, value: Any) -> str:
        """Return the name under which the text refers to a constant."""
        if id(value) not in self.constants:
            name = f"k{len(self.constants)}"
            self.constants[id(value)], self.names[name] = (name, value), value
        return self.constants[id(value)][0]

    def line(self, text: str) -> None:
        """Append a line to the text."""
        self.lines.append("    " * self.depth + text)

    def variable(self, name: str) -> str:
        """Return the name of the variable of a buffer."""
        return f"x{self.variables.setdefault(name, len(self.variables))}"

    def value(self, name: str, kind: Kind, axis: int | None) -> str:
        """Return the text for a buffer's value, in its own shape."""
        if name in self.numbers:
            return self.variable(name)
        if name in self.results:
            is_plain = axis is None and self.results[name].shape == kind.shape
            return self.variable(name) if is_plain else f"natural({self.variable(name)}, {self.constant(kind)}, {axis})"
        array = self.fixed[name]
        view = natural(array, kind, axis)
        if isinstance(array, np.ndarray) and not np.may_share_memory(view, array):
            return f"natural({self.constant(array)}, {self.constant(kind)}, {axis})"
        return self.constant(view) + "[()]" * (kind.shape == ())

    def stored(self, place: Buffer | View) -> str:
        """Return the text for a buffer, or a rectangle of one, as the stored 2-D array."""
        name, variable = place.name, self.variable(place.name)
        if name in self.numbers:
            return f"array([[{variable}]], {self.constant(np.dtype(place.dtype))})"
        if name in self.results:
            if isinstance(place, View):
                raise _Unwritten
            return f"{variable}.reshape({place.shape})"
        if isinstance(place, View):
            top, bottom, left, right = place.box
            return self.constant(self.fixed[name][top:bottom, left:right])
        return self.constant(self.fixed[name])

    def condition(self, flag: Buffer | View) -> str:
        """Return whether a number, or all elements of an array, are true."""
        return self.variable(flag.name) if flag.name in self.numbers else f"{self.stored(flag)}.all()"

    # Numbers

    def find_numbers(self, loop: Loop) -> None:
        """Find the buffers that can be local variables: 1 x 1, and used only by kernels that take numbers."""
        buffers: dict[str, Buffer | View] = {loop.flag.name: loop.flag}
        wrong = set[str]()
        merged: list[Sequence[Buffer | View]] = []
        for step in itertools.chain.from_iterable(lists_in(loop.body)):
            if isinstance(step, If | Loop):
                buffers[step.flag.name] = step.flag
            elif isinstance(step, Publish | Pull):
                buffers |= {x.name: x for x in step.buffers}
            elif isinstance(step, Call):
                buffers |= {x.name: x for x in (*step.arguments, *step.makes)}
                if step.kernel.startswith("evaluate"):
                    wrong |= {x.name for x, kind, _ in self.described(step) if kind is None or kind.shape}
                elif step.kernel == "merge" and all(op in UFUNCS for op in step.options["ops"]):
                    count, ranks = len(step.options["ops"]), step.options["ranks"]
                    merged += [
                        (*step.arguments[i * ranks : (i + 1) * ranks], step.arguments[count * ranks + i])
                        for i in range(count)
                    ]
                elif step.kernel not in _OF_NUMBERS or step.kernel == "merge":
                    wrong |= {x.name for x in step.arguments}
        wrong |= {name for name, x in buffers.items() if isinstance(x, View) or x.shape != (1, 1) or x.like}
        # The operands of a merge are all numbers, or none of them is.
        while more := {x.name for some in merged if any(x.name in wrong for x in some) for x in some} - wrong:
            wrong |= more
        self.numbers = buffers.keys() - wrong

    def described(self, call: Call) -> Iterator[tuple[Buffer | View, Kind | None, str]]:
        """Yield the buffers of a pass with their kinds (None for sums of argmin and argmax) and roles."""
        program = call.options["program"]
        count, rest = len(program.sizes), iter(call.arguments)
        for number in program.reads:
            in_rows = program.axes[number] is not None
            for _ in range(count if in_rows else 1):
                yield next(rest), program.kinds[number], "rows" if in_rows else "all"
        for number, op in program.sums:
            for _ in range(1 + op.startswith("arg")):
                yield next(rest), program.kinds[number] if op in UFUNCS else None, "sum"
        for number in program.rows:
            for _ in range(count):
                yield next(rest), program.kinds[number], "rows"
        for number, buffer in zip(program.whole, call.makes, strict=True):
            yield buffer, program.kinds[number], "made"

    # Steps

    def loop(self, loop: Loop) -> Callable[[int], Iterator[int]]:
        """Return the function of a loop."""
        self.find_numbers(loop)
        outside = [name for name in self.numbers if name in self.outside]
        for name in outside:
            self.line(f"{self.variable(name)} = {self.constant(self.fixed[name])}[0, 0]")
        self.repeat(loop, "first, ")
        for name in outside:
            self.line(f"{self.constant(self.fixed[name])}[0, 0] = {self.variable(name)}")
        if self.all > self.most + _MORE_BYTES:
            raise _Unwritten
        exec("def turns(first):\n" + "\n".join(self.lines), self.names)
        return self.run

    def run(self, first: int) -> Iterator[int]:
        """Run the iterations; then clear all references to memory that the function holds."""
        try:
            yield from self.names["turns"](first)
        finally:
            self.names.clear()

    def repeat(self, loop: Loop, first: str = "") -> None:
        """Write a loop; the outermost yields after each iteration."""
        turn, held = f"turn{self.depth}", f"held{self.depth}"
        self.line(f"for {turn} in range({first}{loop.most}):")
        self.depth += 1
        self.line(f"if not {self.condition(loop.flag)}: break")
        self.line(f"{held} = begins()")
        self.take(loop.body)
        for text in self.follows if first else ():
            self.line(f"if not {self.condition(loop.flag)} or due(): {text}")
        self.line(f"ends({held if has_messages(loop.body) else []})")
        if first:
            self.line(f"yield {turn}")
        self.depth -= 1

    def take(self, steps: Sequence[Step]) -> None:
        """Write steps, after the requests of all their messages."""
        pulls = iter([step for step in steps if isinstance(step, Pull)])
        requests = iter([self.request(pull) for pull in pulls])
        for step in steps:
            match step:
                case New(buffer, zero):
                    self.begin(buffer, zero=zero)
                case Drop(buffer):
                    self.drop(buffer)
                case Call(lane=""):
                    write = getattr(self, step.kernel) if step.kernel in _WRITTEN else self.kernel
                    write(step)
                case Publish(lane=""):
                    parts = [self.stored(x) + '.copy("K")' * (x.name not in self.numbers) for x in step.buffers]
                    self.line(f"publish({self.constant(step.key)}, [{', '.join(parts)}])")
                case Pull():
                    self.pull(step, next(requests))
                case If(flag, then, otherwise):
                    self.branch(flag, then, otherwise)
                case Loop():
                    offset = f"offset{self.depth}"
                    self.line(f"{offset} = offset()")
                    self.repeat(step)
                    self.line(f"offset({offset})")
                case _:
                    raise _Unwritten

    def branch(self, flag: Buffer, then: Sequence[Step], otherwise: Sequence[Step]) -> None:
        """Write both branches, which leave the same buffers in the same memory."""
        before = self.fixed.copy(), self.results.copy()
        self.branches.append({})
        ends = []
        for text, steps in ((f"if {self.condition(flag)}:", then), ("else:", otherwise)):
            self.line(text)
            self.fixed, self.results = before[0].copy(), before[1].copy()
            self.depth += 1
            self.line("pass")
            self.take(steps)
            self.depth -= 1
            self.branches[-1] = self.fixed
            ends.append((self.fixed, self.results.keys()))
        self.branches.pop()
        (first, of_first), (second, of_second) = ends
        if of_first != of_second or any(second.get(name, array) is not array for name, array in first.items()):
            raise _Unwritten

    def begin(self, buffer: Buffer, *, zero: bool) -> None:
        """Allocate a buffer that is kept between iterations."""
        name = buffer.name
        if name in self.numbers:
            if zero:
                self.line(f"{self.variable(name)} = {self.constant(np.dtype(buffer.dtype).type(0))}")
            return
        if name in self.outside or name in self.results:
            raise _Unwritten
        form = buffer.shape, buffer.dtype, buffer.like
        free = self.free.get(form)
        left = [end[name] for end in self.branches if name in end and self.forms.get(name) == form]
        if left:
            array = left[-1]
        elif free and not self.branches:
            array = free.pop()
        else:
            array = self.new(buffer)
            self.all += array.nbytes
        self.fixed[name], self.forms[name] = array, form
        self.now += array.nbytes
        self.most = max(self.most, self.now)
        if zero:
            self.line(f"{self.constant(array)}.fill(0)")

    def drop(self, buffer: Buffer) -> None:
        """Release the memory of a chunk for reuse; small buffers are kept, as there may be views of them."""
        if buffer.name in self.outside:
            raise _Unwritten
        self.results.pop(buffer.name, None)
        if (array := self.fixed.pop(buffer.name, None)) is not None:
            self.now -= array.nbytes
            if buffer.like and not self.branches:
                self.free.setdefault((buffer.shape, buffer.dtype, buffer.like), []).append(array)

    # Messages

    def request(self, pull: Pull) -> str:
        """Write the request of a message; return the variable that holds it."""
        if pull.taken or pull.op:
            raise _Unwritten
        variable = self.variable(repr(pull))
        self.line(f"{variable} = request({self.constant(pull)})")
        return variable

    def pull(self, pull: Pull, variable: str) -> None:
        """Write the wait for a message, and its copy to buffers."""
        self.line(f"parts = get({variable})")
        for i, buffer in enumerate(pull.buffers):
            if buffer.name in self.numbers:
                self.line(f"{self.variable(buffer.name)} = parts[{i}][0, 0]")
            elif buffer.name in self.results:
                raise _Unwritten
            else:
                self.line(f"store({self.stored(buffer)}, parts[{i}])")

    # Kernels

    def kernel(self, call: Call) -> None:
        """Write the call of a kernel."""
        if call.makes or any(role != "r" and x.name in self.results for x, role in roles_of(call)):
            raise _Unwritten
        function = functools.partial(getattr(self.kernels, call.kernel), **call.options)
        self.line(f"{self.constant(function)}({', '.join(map(self.stored, call.arguments))})")

    def evaluate(self, call: Call) -> None:
        """Write the evaluation of a pass."""
        program = call.options["program"]
        compiled, described = self.kernels.compiled(program), list(self.described(call))
        whole = [x.name for x, _, role in described if role == "all"]
        numbers = [x for x in program.reads if program.axes[x] is None] if program.sizes else program.reads
        reads = [
            self.value(name, program.kinds[number], program.moved.get(number))
            for name, number in zip(whole, numbers, strict=True)
        ]
        inputs = f"({''.join(f'{x}, ' for x in reads)})"
        if not program.sizes:
            self.line_of_results(call, self.constant(compiled.function()) + f"(0, 0, (), {inputs}, (), none)", compiled)
            return
        if not program.fresh:
            raise _Unwritten
        sums = {
            x.name: np.empty((1, 1), np.dtype(x.dtype))
            for x, _, role in described
            if x.name in self.numbers and role == "sum"
        }
        places = self.fixed | sums
        if any(x.name not in places for x, _, role in described if role != "all"):
            raise _Unwritten
        bound = compiled.bound([None if role == "all" else places[x.name] for x, _, role in described])
        self.line(f"{self.constant(bound)}({inputs})")
        for name, array in sums.items():
            self.line(f"{self.variable(name)} = {self.constant(array)}[0, 0]")

    evaluate_exactly = evaluate

    def line_of_results(self, call: Call, text: str, compiled: Any) -> None:
        """Write the evaluation of a pass over replicated values."""
        program = call.options["program"]
        if not call.makes:
            self.line(text)
            return
        self.line(f"({''.join(f'{self.variable(x.name)}, ' for x in call.makes)}) = {text}")
        for number, buffer in zip(program.whole, call.makes, strict=True):
            variable, kind = self.variable(buffer.name), program.kinds[number]
            dtype = np.dtype(kind.dtype)
            if buffer.name not in self.numbers:
                self.line(f"{variable} = asarray({variable}, {self.constant(dtype)}).reshape({kind.shape})")
                if buffer.name in self.fixed:
                    raise _Unwritten
                self.results[buffer.name] = kind
            elif number not in compiled.numbers:
                self.line(f"{variable} = {self.constant(dtype.type)}({variable})")

    def copy(self, call: Call) -> None:
        """Write the copy of a value."""
        if all(isinstance(self.fixed.get(x.name, _EMPTY), np.ndarray) for x in call.arguments):
            self.copy_all(call)
        else:
            self.kernel(call)

    def copy_all(self, call: Call) -> None:
        """Write the copies of values; numbers are only renamed."""
        count = len(call.arguments) // 2
        for source, target in zip(call.arguments[:count], call.arguments[count:], strict=True):
            text = self.stored(source) if source.name not in self.numbers else self.variable(source.name)
            if target.name in self.results:
                raise _Unwritten
            if target.name in self.numbers:
                self.line(f"{self.variable(target.name)} = {text}" + "[0, 0]" * (source.name not in self.numbers))
            else:
                self.line(f"copyto({self.stored(target)}, {text})")

    def decide(self, call: Call) -> None:
        """Write the copy of a condition to a flag."""
        condition, flag = call.arguments
        self.assign(flag, f"bool({self.condition(condition)})")

    def assign(self, target: Buffer | View, text: str) -> None:
        """Write the assignment of a number to all elements."""
        if target.name in self.results:
            raise _Unwritten
        self.line(
            f"{self.variable(target.name)} = {text}"
            if target.name in self.numbers
            else f"{self.stored(target)}[...] = {text}"
        )

    def set_all(self, call: Call) -> None:
        """Write the assignment of a value to all elements."""
        (target,) = call.arguments
        self.assign(target, self.constant(dtype_from_name(target.dtype).type(call.options["value"])))

    def increment(self, call: Call) -> None:
        """Write the increment of a counter."""
        (target,) = call.arguments
        self.line(f"{self.variable(target.name) if target.name in self.numbers else self.stored(target)} += 1")

    def follow(self, call: Call) -> None:
        """Write the report of progress, at the end of an iteration and not more often than is due."""
        arguments = [self.variable(x.name) if x.name in self.numbers else self.stored(x) for x in call.arguments]
        function = self.constant(functools.partial(self.kernels.follow, **call.options))
        self.follows.append(f"{function}({', '.join(arguments)})")

    def assemble(self, call: Call) -> None:
        """Write the assembly of rows from ranks' parts."""
        if any(x.name in self.results for x in call.arguments):
            raise _Unwritten
        whole, *parts = (self.fixed[x.name] for x in call.arguments)
        whole, to = whole.reshape(-1, parts[0].shape[1]), 0
        for rank, at, size in call.options["places"]:
            target, source = whole[to : to + size], parts[rank][at : at + size]
            self.line(f"copyto({self.constant(target)}, {self.constant(source)})")
            to += size

    def merge(self, call: Call) -> None:
        """Write the reduction of ranks' results, in the order of ranks."""
        ops, ranks = call.options["ops"], call.options["ranks"]
        if any(op not in UFUNCS for op in ops) or ranks < 2:
            self.kernel(call)
            return
        totals = call.arguments[len(ops) * ranks :]
        for i, (op, total) in enumerate(zip(ops, totals, strict=True)):
            parts, ufunc = call.arguments[i * ranks : (i + 1) * ranks], self.constant(getattr(np, UFUNCS[op]))
            if total.name in self.numbers:
                first, *more = (self.variable(x.name) for x in parts)
                adds = UFUNCS[op] == "add" and np.dtype(total.dtype).kind != "b"
                for part in more:
                    first = f"({first} + {part})" if adds else f"{ufunc}({first}, {part})"
                self.line(f"{self.variable(total.name)} = {first}")
                continue
            if any(x.name in self.results for x in (total, *parts)):
                raise _Unwritten
            first, *more = (self.stored(x) for x in parts)
            out = self.stored(total)
            for part in more:
                self.line(f"{ufunc}({first}, {part}, out={out})")
                first = out
