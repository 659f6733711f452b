"""Where values are: along one axis in the rows of ranks, or on all of them. One rule for each family of statements.

A rule says in which placements a statement takes its inputs, and what that gives. Inputs that are elsewhere are brought
there by statements of their own: ``gather`` (all ranks get all rows) and ``local`` (each rank takes its own rows, for
which nothing travels). A reduction over rows is combined over ranks, and its result is on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dask_distmm.tracing.arrays import is_stackable, need_rows
from dask_distmm.tracing.form import UNKNOWN, Block, Kind, Literal, Program, Ref, Statement, letters_of, program_of

# The axis along which a value is in the rows of ranks; None where all ranks have all of it.
Axis = int | None


class Placed(NamedTuple):
    """In which placements a statement takes its inputs, and where its results are."""

    inputs: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    # How results of ranks, each of its own rows, are combined to that of all.
    combine: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """What a rule looks at: a statement, the kinds and placements of its inputs, its kinds, the rows of all."""

    statement: Statement
    kinds: tuple[Kind, ...]
    axes: tuple[Axis, ...]
    outputs: tuple[Kind, ...]
    rows: int

    @property
    def largest(self) -> int:
        """The number of the largest input that is in rows; -1 if there is none."""
        sizes = [
            (kind.nbytes, -i)
            for i, (kind, axis) in enumerate(zip(self.kinds, self.axes, strict=True))
            if axis is not None
        ]
        return -max(sizes)[1] if sizes else -1

    @property
    def axis(self) -> int:
        """The axis of rows of the largest input; not for statements without inputs in rows."""
        return self.axes[self.largest] or 0


def _everywhere(use: Given) -> Placed:
    """All ranks have it, and its inputs."""
    return Placed((None,) * len(use.kinds), (None,) * len(use.outputs))


def _map(use: Given) -> Placed:
    (out,) = use.outputs
    at = use.axis + len(out.shape) - len(use.kinds[use.largest].shape)
    if out.shape[at] != use.rows:
        return _everywhere(use)
    return Placed(tuple(_aligned(kind, at - len(out.shape), use.rows) for kind in use.kinds), (at,))


def _aligned(kind: Kind, from_end: int, rows: int) -> Axis:
    """Return the axis of an input of an elementwise function that is at one of its result."""
    axis = len(kind.shape) + from_end
    return axis if axis >= 0 and kind.shape[axis] == rows and (rows > 1 or axis == 0) else None


def _reduce(use: Given) -> Placed:
    axis, options = use.axis, use.statement.options
    if axis in options["axes"]:
        return Placed((axis,), (None,), options["f"])
    return Placed((axis,), (axis if options["keepdims"] else axis - sum(i < axis for i in options["axes"]),))


def _contract(use: Given) -> Placed:
    *letters, out = letters_of(use.statement.options["spec"])
    letter = letters[use.largest][use.axis]
    inputs = tuple(names.index(letter) if letter in names else None for names in letters)
    return Placed(inputs, (out.index(letter),)) if letter in out else Placed(inputs, (None,), "sum")


def _index(use: Given) -> Placed:
    seen, at = -1, 0
    for entry in use.statement.options["index"]:
        seen += entry is not None
        if seen == use.axis and entry is not None:
            # Some rows are taken from the ranks that have them.
            return Placed((use.axis,), (at,)) if entry == [None, None, None] else Placed((use.axis,), (None,), "select")
        at += not isinstance(entry, int)
    raise AssertionError(use)


def _transpose(use: Given) -> Placed:
    return Placed((use.axis,), (use.statement.options["axes"].index(use.axis),))


def _reshape(use: Given) -> Placed:
    (kind,), (out,) = use.kinds, use.outputs
    before = math.prod(kind.shape[: use.axis])
    for at, size in enumerate(out.shape):
        if size == use.rows and math.prod(out.shape[:at]) == before:
            return Placed((use.axis,), (at,))
    return _everywhere(use)


def _broadcast(use: Given) -> Placed:
    (kind,), (out,) = use.kinds, use.outputs
    at = use.axis + len(out.shape) - len(kind.shape)
    return Placed((use.axis,), (at,)) if kind.shape[use.axis] == out.shape[at] else _everywhere(use)


def _by_lines(use: Given) -> Placed:
    """Place results as inputs, but for a function along the axis of rows."""
    if use.axis == use.statement.options["axis"]:
        return _everywhere(use)
    return Placed((use.axis,) * len(use.kinds), (use.axis,))


def _take(use: Given) -> Placed:
    (of, by), axis = use.axes, use.statement.options["axis"]
    ndim = len(use.kinds[1].shape)
    if by is not None and (of is None or of == axis or use.kinds[0].nbytes <= use.kinds[1].nbytes):
        return Placed((None, by), (axis + by,))
    if of is None or of == axis:
        return Placed((of, None), (None,), "select")
    return Placed((of, None), (of if of < axis else of - 1 + ndim,))


def _segment_sum(use: Given) -> Placed:
    return Placed((0, 0), (None,), "sum") if 0 in use.axes else _everywhere(use)


def _whole(use: Given) -> Placed:
    """Stacks of matrices may be in rows."""
    if 0 in use.axes and is_stackable(use.statement.options["f"], [kind.shape for kind in use.kinds]):
        return Placed((0,) * len(use.kinds), (0,) * len(use.outputs))
    return _everywhere(use)


def _qr(use: Given) -> Placed:
    rows, cols = use.kinds[0].shape
    return Placed((0,), (0, None)) if use.axes == (0,) and rows >= cols else _everywhere(use)


def _random(use: Given) -> Placed:
    # The key is on all ranks.
    (out,) = use.outputs
    return Placed((None,), (0 if out.shape and out.shape[0] == use.rows > 1 else None,))


def _call(use: Given) -> Placed:
    """Pass rows of what is in rows, and all of the rest."""
    rows, slices = use.statement.options["rows"], use.statement.options.get("slices")
    if not rows and not slices:
        return _everywhere(use)
    inputs = tuple(0 if i in rows else None for i in range(len(use.kinds)))
    if use.statement.options["sums"]:
        return Placed(inputs, (None,) * len(use.outputs), "sum")
    return Placed(inputs, (0,) * len(use.outputs))


def _put(use: Given) -> Placed:
    return Placed((0, 0, None), (0,)) if 0 in use.axes[:2] else _everywhere(use)


# Called where an input is in rows; those of random numbers and of users' functions always.
RULES: Mapping[str, Callable[[Given], Placed]] = {
    "map": _map,
    "fill": _map,
    "reduce": _reduce,
    "contract": _contract,
    "index": _index,
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "concat": _by_lines,
    "take": _take,
    "segment_sum": _segment_sum,
    "along": _by_lines,
    "whole": _whole,
    "qr": _qr,
    "random": _random,
    "put": _put,
    "call": _call,
    "callback": _everywhere,
}


# Ways to combine results of ranks that go by the numbers of rows.
_BY_NUMBERS = ("select", "argmax", "argmin")


class Placements:
    """The placements of all values of a program, and its statements with what brings values to where they are read."""

    def __init__(self, program: Program) -> None:
        self.kinds, self.rows = dict(program.kinds), program.rows
        self.axes: dict[int, Axis] = dict(zip(program.block.inputs, program.axes, strict=True))
        # How ranks' results of a statement are combined, by the number of the value.
        self.combine: dict[int, str] = {}
        # Rows in another shape or order, by the numbers of the values.
        self.views: dict[int, Statement] = {}
        self.block = self._placed(program.block)

    def _new(self, kind: Kind, axis: Axis) -> int:
        number = len(self.kinds)
        self.kinds[number], self.axes[number] = kind, axis
        return number

    def _axis(self, ref: Ref) -> Axis:
        return None if isinstance(ref, Literal) else self.axes[ref]

    def _kind(self, ref: Ref) -> Kind:
        return Kind((), type(ref.value).__name__) if isinstance(ref, Literal) else self.kinds[ref]

    def _placed(self, block: Block) -> Block:
        into: list[Statement] = []
        # Copies in other placements that this block has, by value and axis.
        moved: dict[tuple[int, Axis], int] = {}
        for statement in block.statements:
            families = {"loop": self._loop, "cond": self._cond, "gather": self._gather}
            families.get(statement.family, self._one)(statement, into, moved)
        return Block(list(block.inputs), into, list(block.outputs))

    def _one(self, statement: Statement, into: list[Statement], moved: dict[tuple[int, Axis], int]) -> None:
        use = Given(
            statement,
            tuple(map(self._kind, statement.inputs)),
            tuple(map(self._axis, statement.inputs)),
            tuple(self.kinds[number] for number in statement.outputs),
            self.rows,
        )
        in_rows = use.largest >= 0 or statement.family in ("random", "call")
        placed = RULES[statement.family](use) if in_rows else _everywhere(use)
        numbered = statement.family in ("random", "qr") and any(axis is not None for axis in placed.outputs)
        if self.rows == UNKNOWN and (numbered or placed.combine in _BY_NUMBERS):
            need_rows()
        inputs = tuple(
            self._viewed(self._brought(ref, axis, into, moved, statement.line), into)
            for ref, axis in zip(statement.inputs, placed.inputs, strict=True)
        )
        options = statement.options | ({"length": self.rows} if placed.combine == "select" else {})
        into.append(dataclasses.replace(statement, inputs=inputs, options=options))
        self.axes.update(zip(statement.outputs, placed.outputs, strict=True))
        if placed.combine:
            self.combine.update(dict.fromkeys(statement.outputs, placed.combine))
        elif is_view(into[-1], self.kinds, self.axes):
            self.views[statement.outputs[0]] = into[-1]

    def _gather(self, statement: Statement, into: list[Statement], moved: dict[tuple[int, Axis], int]) -> None:
        """Bring a value to all ranks where a function says so."""
        ((ref,), (number,)) = statement.inputs, statement.outputs
        self.axes[number] = None
        if self._axis(ref) is None:
            statement = dataclasses.replace(statement, family="map", options={"f": "positive"})
        else:
            moved[ref, None] = number  # type: ignore[index]
        into.append(dataclasses.replace(statement, inputs=(self._viewed(ref, into),)))

    def _viewed(self, ref: Ref, into: list[Statement]) -> Ref:
        """Return a view of its own for each statement that reads one: nobody stores what is elsewhere already."""
        if isinstance(ref, Literal) or ref not in self.views:
            return ref
        view = self.views[ref]
        number = self._new(self.kinds[ref], self.axes[ref])
        inputs = tuple(self._viewed(x, into) for x in view.inputs)
        into.append(dataclasses.replace(view, inputs=inputs, outputs=(number,)))
        return number

    def _brought(
        self, ref: Ref, axis: Axis, into: list[Statement], moved: dict[tuple[int, Axis], int], line: int
    ) -> Ref:
        """Return a value in the placement in which it is read."""
        if isinstance(ref, Literal) or self.axes[ref] == axis:
            return ref
        if (ref, axis) not in moved:
            source: Ref = ref
            if axis is not None and self.axes[ref] is not None:
                source = self._brought(ref, None, into, moved, line)
            if self.rows == UNKNOWN and UNKNOWN in self.kinds[ref].shape:
                need_rows()
            number = self._new(self.kinds[ref], axis)
            family = "gather" if axis is None else "local"
            into.append(Statement(family, {} if axis is None else {"axis": axis}, (source,), (number,), (), line))
            moved[ref, axis] = number
        return moved[ref, axis]

    def _loop(self, loop: Statement, into: list[Statement], moved: dict[tuple[int, Axis], int]) -> None:
        *_, body = loop.blocks
        skipped = len(body.inputs) - len(loop.inputs)
        axes = [self._axis(ref) for ref in loop.inputs]
        while True:
            for block in loop.blocks:
                self.axes.update(dict.fromkeys(block.inputs[: len(block.inputs) - len(axes)]))
                self.axes.update(zip(block.inputs[len(block.inputs) - len(axes) :], axes, strict=True))
            placed = self._placed(body)
            ends = [self._axis(ref) for ref in placed.outputs]
            # A value that is in rows at the start or the end of a turn is in rows throughout.
            joined = [new if old is None else old for old, new in zip(axes, ends, strict=True)]
            if joined == axes:
                break
            axes = joined
        self._end(placed, axes, loop.line)
        blocks = [placed]
        if len(loop.blocks) > 1:
            flag = self._placed(loop.blocks[0])
            self._end(flag, [None], loop.line)
            blocks.insert(0, flag)
        inputs = tuple(
            self._brought(ref, axis, into, moved, loop.line) for ref, axis in zip(loop.inputs, axes, strict=True)
        )
        into.append(
            dataclasses.replace(loop, inputs=inputs, blocks=tuple(blocks), options={**loop.options, "skipped": skipped})
        )
        self.axes.update(zip(loop.outputs, axes, strict=True))

    def _cond(self, cond: Statement, into: list[Statement], moved: dict[tuple[int, Axis], int]) -> None:
        blocks = tuple(map(self._placed, cond.blocks))
        ends = [[self._axis(ref) for ref in block.outputs] for block in blocks]
        axes = [two if axis is None else axis for axis, two in zip(*ends, strict=True)]
        for block in blocks:
            self._end(block, axes, cond.line)
        flag = self._brought(cond.inputs[0], None, into, moved, cond.line)
        into.append(dataclasses.replace(cond, inputs=(flag,), blocks=blocks))
        self.axes.update(zip(cond.outputs, axes, strict=True))

    def _end(self, block: Block, axes: Sequence[Axis], line: int) -> None:
        """Bring the outputs of a block to some placements."""
        moved: dict[tuple[int, Axis], int] = {}
        block.outputs = [
            self._brought(ref, axis, block.statements, moved, line)
            for ref, axis in zip(block.outputs, axes, strict=True)
        ]

    # Passes

    def improve(self, wanted: Sequence[bool]) -> None:
        """Compute before a loop what does not change in it, and drop what nobody reads."""
        self.block.outputs = [ref for ref, is_wanted in zip(self.block.outputs, wanted, strict=True) if is_wanted]
        self._hoist(self.block)
        _drop_unread(self.block)

    def _hoist(self, block: Block) -> None:
        statements: list[Statement] = []
        for statement in block.statements:
            for inner in statement.blocks:
                self._hoist(inner)
            if statement.family == "loop":
                statements += self._invariant(statement.blocks[-1])
            statements.append(statement)
        block.statements = statements

    def _invariant(self, body: Block) -> list[Statement]:
        """Take the statements out of a loop's body that make the same in each turn, and are small."""
        changing, fixed = set(body.inputs), dict[int, Statement]()
        for statement in body.statements:
            if statement.blocks or has_effect(statement) or changing.intersection(statement.reads):
                changing.update(statement.outputs)
            else:
                fixed.update(dict.fromkeys(statement.outputs, statement))
        needed: dict[int, Statement] = {}
        taken = []
        for statement in body.statements:
            outputs = statement.outputs
            if outputs and all(x in fixed and self._is_small(x, fixed) for x in outputs):
                taken.append(statement)
                self._need(statement, fixed, needed)
        if not taken:
            return []
        own, every = {id(statement) for statement in taken}, body.statements
        body.statements = [statement for statement in body.statements if id(statement) not in own]
        # What they read of the body, too, is computed twice, under another number.
        names: dict[int, int] = {}
        hoisted = []
        for statement in every:
            if needed.keys().isdisjoint(statement.outputs):
                continue
            if id(statement) not in own:
                for number in statement.outputs:
                    names[number] = self._new(self.kinds[number], self.axes[number])
                    if number in self.combine:
                        self.combine[names[number]] = self.combine[number]
            hoisted.append(
                dataclasses.replace(
                    statement,
                    inputs=tuple(names.get(x, x) if isinstance(x, int) else x for x in statement.inputs),
                    outputs=tuple(names.get(x, x) for x in statement.outputs),
                )
            )
        return hoisted

    def _need(self, statement: Statement, fixed: Mapping[int, Statement], needed: dict[int, Statement]) -> None:
        if statement.outputs[0] not in needed:
            needed.update(dict.fromkeys(statement.outputs, statement))
            for ref in statement.reads:
                if ref in fixed:
                    self._need(fixed[ref], fixed, needed)

    def _is_small(self, number: int, fixed: Mapping[int, Statement]) -> bool:
        """Whether a value is kept rather than computed in each turn: it is on all ranks, or has few columns."""
        if self.axes[number] is None:
            return True
        read = [self.kinds[ref].nbytes for ref in fixed[number].reads if self.axes[ref] is not None]
        copied = fixed[number].family == "local" or is_view(fixed[number], self.kinds, self.axes)
        return self.kinds[number].size <= _NARROW * self.rows and not copied and bool(read)


@functools.lru_cache(16)
def placements_of(program: str, wanted: tuple[bool, ...]) -> Placements:
    """Return where the values of a program are; the same for all ranks."""
    placements = Placements(program_of(program))
    placements.improve(wanted)
    return placements


class Row(NamedTuple):
    """A statement as people read it."""

    # How many loops and branches it is in.
    depth: int
    # The line of the user's source; what is done; where the result is; its type and shape; bytes that travel.
    line: str
    what: str
    where: str
    kind: str
    moved: int


def described(placements: Placements, block: Block, lines: Sequence[str], depth: int = 0) -> Iterator[Row]:
    """Yield statements in their order: where values are, and the bytes that each rank gets from others."""
    for statement in block.statements:
        line = lines[statement.line] if 0 <= statement.line < len(lines) else ""
        if statement.blocks:
            count = statement.options.get("count")
            name = (
                "cond" if statement.family == "cond" else "while_loop" if count is None else f"fori_loop, {count} turns"
            )
            yield Row(depth, line, name, "", "", 0)
            for inner in statement.blocks:
                yield from described(placements, inner, lines, depth + 1)
            continue
        for number in statement.outputs:
            kind, axis = placements.kinds[number], placements.axes[number]
            options = statement.options
            what = str(options.get("f", options.get("spec", statement.family)))
            travels = number in placements.combine or statement.family == "gather"
            where = "all" if axis is None else "rows" if axis == 0 else f"rows, axis {axis}"
            if travels:
                where = f"all, {placements.combine.get(number, 'gathered')} over ranks"
            shape = " x ".join("?" if n == UNKNOWN else str(n) for n in kind.shape) or "number"
            yield Row(depth, line, what, where, f"{kind.dtype} {shape}", kind.nbytes if travels else 0)


def is_view(statement: Statement, kinds: Mapping[int, Kind], axes: Mapping[int, Axis]) -> bool:
    """Whether a statement only looks at all elements of what is in rows in another way."""
    if statement.family not in ("transpose", "reshape", "index", "broadcast"):
        return False
    (ref,), (number,) = statement.inputs, statement.outputs
    return isinstance(ref, int) and None not in (axes[ref], axes[number]) and kinds[number].size >= kinds[ref].size


# Values in rows with up to this many columns are kept over the turns of a loop.
_NARROW = 2


def has_effect(statement: Statement) -> bool:
    """Whether a statement is taken for what it does, whatever is read of it."""
    return statement.family == "callback" or any(
        has_effect(inner) for block in statement.blocks for inner in block.statements
    )


def _drop_unread(block: Block) -> None:
    read = {ref for ref in block.outputs if isinstance(ref, int)}
    kept = []
    for statement in reversed(block.statements):
        if read.isdisjoint(statement.outputs) and not has_effect(statement):
            continue
        for inner in statement.blocks:
            _drop_unread(inner)
        read.update(statement.reads)
        kept.append(statement)
    block.statements = kept[::-1]
