"""The form that traced functions have: statements on values, in nested blocks. Written and read as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """A number of Python's, whose type follows that of what it is combined with; or an argument that is static."""

    value: bool | int | float | complex


# What a statement reads: the number of a value, or a literal.
Ref = int | Literal


@dataclasses.dataclass(slots=True)
class Statement:
    """One operation: its family has the rules, its options say which of them it is. Blocks are those of loops."""

    family: str
    options: dict[str, Any]
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    # The number of a line of the user's source.
    line: int = -1
    _inputs_read: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._inputs_read = tuple(ref for ref in self.inputs if isinstance(ref, int))

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbers of the values that it reads, those of its blocks among them."""
        if not self.blocks:
            return self._inputs_read
        return (*self._inputs_read, *(number for block in self.blocks for number in block.captured))


@dataclasses.dataclass(slots=True)
class Block:
    """Statements in order. They may read values of the blocks around them."""

    inputs: list[int]
    statements: list[Statement]
    outputs: list[Ref]

    @property
    def captured(self) -> set[int]:
        """The numbers of the values that come from the blocks around this one."""
        own = set(self.inputs).union(*(statement.outputs for statement in self.statements))
        read = {ref for ref in self.outputs if isinstance(ref, int)}
        return read.union(*(statement.reads for statement in self.statements)) - own


# Stands for a number of rows that is unknown before the run: a prime number.
UNKNOWN = 16_777_213


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Shape and type of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(slots=True)
class Program:
    """A traced function: the kinds of its values, its statements, and lines of its source."""

    kinds: dict[int, Kind]
    block: Block
    lines: list[str]
    # For each input the axis along which it is in the rows of ranks; None if all ranks have it. The rows of all.
    axes: tuple[int | None, ...] = ()
    rows: int = 0

    def to_text(self) -> str:
        """Return it as JSON."""
        kinds = [[number, list(kind.shape), kind.dtype] for number, kind in self.kinds.items()]
        fields = {"kinds": kinds, "block": _plain(self.block), "lines": self.lines}
        return json.dumps(fields | {"axes": list(self.axes), "rows": self.rows}, separators=(",", ":"))


def pieces(program: Program, turns: int) -> list[Program]:
    """Cut a program behind some turns of its outermost loops: each piece reads what those before it make."""
    kinds, parts = dict(program.kinds), list[list[Statement]]([[]])
    for statement in program.block.statements:
        rest, count = statement, statement.options.get("count") or 0
        for first in range(0, count - turns, turns) if statement.family == "loop" else ():
            state = tuple(range(len(kinds), len(kinds) + len(statement.outputs)))
            kinds |= {new: kinds[old] for new, old in zip(state, statement.outputs, strict=True)}
            done = {"count": turns, "first": first}, {"count": count - first - turns, "first": first + turns}
            some, left = (dataclasses.replace(rest, options={**statement.options, **bounds}) for bounds in done)
            parts[-1].append(dataclasses.replace(some, outputs=state))
            parts.append([])
            rest = dataclasses.replace(left, inputs=state)
        parts[-1].append(rest)
    programs, needed = list[Program](), list[Ref](program.block.outputs)
    for statements in reversed(parts):
        written = {x for statement in statements for x in statement.outputs}
        outputs = [ref for ref in needed if ref in written or not programs]
        block = Block([], statements, outputs)
        block.inputs = sorted(block.captured)
        programs.insert(0, dataclasses.replace(program, kinds=kinds, block=block))
        needed = list[Ref](sorted({ref for ref in needed if isinstance(ref, int)}.union(block.inputs) - written))
    return programs


@functools.lru_cache(32)
def program_of(text: str) -> Program:
    """Return the program that a text is, which nobody changes."""
    fields = json.loads(text)
    kinds = {number: Kind(tuple(shape), dtype) for number, shape, dtype in fields["kinds"]}
    return Program(kinds, _block(fields["block"]), fields["lines"], tuple(fields["axes"]), fields["rows"])


def _plain(block: Block) -> list[Any]:
    statements = [
        [x.family, x.options, _refs(x.inputs), list(x.outputs), list(map(_plain, x.blocks)), x.line]
        for x in block.statements
    ]
    return [list(block.inputs), statements, _refs(block.outputs)]


def _block(plain: Sequence[Any]) -> Block:
    inputs, statements, outputs = plain
    block = [
        Statement(family, options, _values(reads), tuple(writes), tuple(map(_block, blocks)), line)
        for family, options, reads, writes, blocks, line in statements
    ]
    return Block(inputs, block, list(_values(outputs)))


def _refs(refs: Sequence[Ref]) -> list[Any]:
    return [ref if isinstance(ref, int) else _literal(ref.value) for ref in refs]


def _literal(value: complex) -> list[Any]:
    return [value.real, value.imag] if isinstance(value, complex) else [value]


def _values(refs: Sequence[Any]) -> tuple[Ref, ...]:
    return tuple(ref if isinstance(ref, int) else Literal(complex(*ref) if len(ref) > 1 else ref[0]) for ref in refs)


# Indices as plain types


def index_to_plain(index: Sequence[Any]) -> list[Any]:
    """Return a basic index, without an ellipsis, as plain types."""
    return [[x.start, x.stop, x.step] if isinstance(x, slice) else x for x in index]


def index_of(plain: Sequence[Any]) -> tuple[Any, ...]:
    """Return the index that `index_to_plain` was given."""
    return tuple(slice(*x) if isinstance(x, list) else x for x in plain)


# Contractions: the letters of two operands and of the result


def letters_of(spec: str) -> tuple[str, str, str]:
    """Return the letters of ``"ij,jk->ik"``, one for each axis."""
    operands, out = spec.split("->")
    first, second = operands.split(",")
    return first, second, out


def extents(spec: str, shapes: Sequence[tuple[int, ...]]) -> Mapping[str, int]:
    """Return the extent of each letter of a contraction."""
    first, second, _ = letters_of(spec)
    return dict(zip(first + second, (*shapes[0], *shapes[-1]), strict=True))
