"""From statements in placements to the steps of a rank.

Statements on rows that wait for the same messages are one *pass*: one call that goes over the rows of a rank once,
strip by strip, and keeps intermediate values in the cache. So between two messages each chunk is read once.
What the ranks' passes add up, and what all ranks need of rows, is one message; then come the statements on what all
ranks have. Each of these has a *stage*, the number of messages before it::

    stage 0   statements of all ranks   pass over rows   message
    stage 1   statements of all ranks   pass over rows   message   ...

A loop, a branch, or a factorization of what is in rows stands between two such sequences. The state of a loop stays in
its buffers: a pass writes the next state over the last one where nothing reads that any more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dask_distmm.programs.composite import tall_qr
from dask_distmm.programs.recorder import Operands, Recorder, Tall, Wanted
from dask_distmm.programs.steps import Buffer
from dask_distmm.tracing.form import UNKNOWN, Block, Kind, Literal, Ref, Statement, extents
from dask_distmm.tracing.place import Axis, Placements, is_view, placements_of

# Loops end when their flag says so.
_MOST = 2**62
# Expected number of turns of a loop without a count, for the cost model.
EXPECTED = 100
# Functions whose results are not unique: one rank computes them for all.
_OF_ONE_RANK = {"linalg.eigh", "linalg.eig", "linalg.eigvals", "linalg.svd", "linalg.qr", "argsort", "argmin", "argmax"}
# Statements that make the same bits of the same values everywhere, as contracts of exact kernels have it.
_EXACT = {"index", "transpose", "reshape", "broadcast", "concat", "take", "fill", "gather"}
_EXACT_FUNCTIONS = {
    "absolute", "add", "astype", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "clip", "conjugate", "divide",
    "equal", "floor", "floor_divide", "greater", "greater_equal", "imag", "invert", "isfinite", "isinf", "isnan",
    "left_shift", "less", "less_equal", "logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum",
    "multiply", "negative", "not_equal", "positive", "real", "right_shift", "sign", "sqrt", "square", "subtract",
    "trunc", "where",
}  # fmt: skip
# Those of them that are exact of complex numbers, too: each part of the result is one sum or copy.
_EXACT_OF_COMPLEX = {
    "add", "astype", "conjugate", "equal", "imag", "isfinite", "negative", "not_equal", "positive", "real", "subtract",
    "where",
}  # fmt: skip


_LATE = {"map", "index", "reshape", "transpose", "broadcast", "concat"}
_COMPARISONS = {"less", "less_equal", "greater", "greater_equal"}

# Memory for a value, which may be written when another value is not read any more; by the value's number.
Targets = Mapping[int, tuple[Any, int]]
_NO_TARGETS: Targets = {}


@dataclasses.dataclass(frozen=True)
class Pass:
    """Statements that are one call, with what that is given and makes.

    Arguments are, in this order: what it reads, of which values in rows are as many arrays as this rank has chunks;
    sums, to which it adds; values in rows that it writes, chunk by chunk. It returns values that all ranks have.
    """

    reads: tuple[int, ...]
    statements: tuple[Statement, ...]
    # Values that ranks combine, and by what.
    sums: tuple[tuple[int, str], ...]
    rows: tuple[int, ...]
    # Those of them that are written over another value, which it reads there.
    over: Mapping[int, int]
    whole: tuple[int, ...]
    kinds: Mapping[int, Kind]
    axes: Mapping[int, Axis]
    # Values on all ranks whose axis of rows is stored first.
    moved: Mapping[int, Axis]
    # The numbers of rows before each chunk, and of rows in it; -1 where that is not known.
    firsts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    # Whether sums begin here, else it adds to them.
    fresh: bool = True


def stored_shape(kind: Kind, axis: Axis) -> tuple[int, int]:
    """Return the rows and columns in which a value is stored; rows of all ranks."""
    if axis is not None:
        return kind.shape[axis], math.prod((*kind.shape[:axis], *kind.shape[axis + 1 :]))
    return (kind.shape[0], kind.shape[1]) if len(kind.shape) == 2 else (1, kind.size)


def traced(
    p: Recorder,
    operands: Operands,
    wanted: Wanted,
    *,
    program: str,
    sources: Sequence[str | int],
    names: Sequence[str],
) -> None:
    """Take the steps of a traced function: `sources` are the operands and constants of its inputs."""
    placements = placements_of(program, tuple(name in wanted for name in names))
    inputs, outputs = placements.block.inputs, placements.block.outputs
    lowering = Lowering(p, placements)
    for number, source in zip(inputs, sources, strict=True):
        lowering.begin(number, operands[source] if isinstance(source, str) else source)
    lowering.take(placements.block.statements, {x for x in outputs if isinstance(x, int)})
    kept = [name for name in names if name in wanted]
    for at, (name, ref) in enumerate(zip(kept, outputs, strict=True)):
        # A value that nothing else needs is handed over without a copy.
        assert isinstance(ref, int)
        p.store(name, lowering.copied(ref) if ref in inputs or ref in outputs[at + 1 :] else lowering.here[ref])


class Lowering:
    """The steps of one rank, and where the values are that are there."""

    def __init__(self, p: Recorder, placements: Placements) -> None:
        self.p, self.kinds, self.axes, self.combine = p, placements.kinds, placements.axes, placements.combine
        # Of rows whose number is not known each chunk counts as one.
        self.scale = sum(map(abs, p.rows.sizes)) / UNKNOWN if placements.rows == UNKNOWN else 1.0
        self.here: dict[int, Any] = {}
        self.moved: dict[int, Axis] = {}
        # Values of which all ranks have the same bits.
        self.exact: set[int] = set()
        # Values that decide about turns: where bits may differ, those of rank 0 come to all by a message that is sent.
        self.deciding: set[int] = set()
        # How often all ranks have waited for each other.
        self.meetings = 0
        # The number of loops around what is taken.
        self.depth = 0
        firsts = np.cumsum([0, *map(abs, p.rows.sizes)]).tolist()
        self.firsts = tuple(firsts[number] for number in p.mine)
        self.sizes = tuple(p.rows.sizes[number] for number in p.mine)

    # Values

    def begin(self, number: int, source: Tall | int) -> None:
        """Begin with an input: an operand, or a constant by its number."""
        kind = self.kinds[number]
        if isinstance(source, int):
            buffer = self.buffer(number)
            self.p.call("constant", buffer, number=source)
            self.here[number] = buffer
        elif source.whole:
            self.here[number] = self.p.whole_operand(source, stored_shape(kind, None))
        else:
            self.here[number] = source
        if self.axes[number] is None:
            self.exact.add(number)

    def buffer(self, number: int) -> Buffer:
        """Return the name of memory for a value that all ranks have."""
        kind = self.kinds[number]
        return self.p.small(*stored_shape(kind, self.moved.get(number)), kind.dtype)

    def tall(self, number: int) -> Tall:
        """Return the name of memory for a value in rows."""
        kind = self.kinds[number]
        return dataclasses.replace(self.p.tall(stored_shape(kind, self.axes[number])[1]), dtype=kind.dtype)

    def place(self, number: int) -> Buffer | Tall:
        """Return the name of memory for a value."""
        return self.buffer(number) if self.axes[number] is None else self.tall(number)

    def drop(self, place: Buffer | Tall) -> None:
        """Free a value."""
        if isinstance(place, Buffer):
            self.p.drop(place)
        else:
            self.p.drop_tall(place)

    def _drop_but(self, kept: Collection[int]) -> None:
        """Free all values but some."""
        for number in [x for x in self.here if x not in kept]:
            self.drop(self.here.pop(number))

    def copy(self, source: Buffer | Tall, target: Buffer | Tall) -> None:
        """Copy a value."""
        if isinstance(source, Buffer):
            assert isinstance(target, Buffer)
            self.p.call("copy", source, target)
        else:
            self.p.each("copy", source, target)

    def _copy_all(self, moves: Sequence[tuple[Any, Any]]) -> None:
        """Copy values; those that all ranks have by one call, of which all have the same bits by another one."""
        alike = {id(self.here[number]) for number in self.exact & self.here.keys()}
        small = [(source, place) for source, place in moves if isinstance(place, Buffer)]
        for is_alike in (True, False):
            if some := [move for move in small if (id(move[0]) in alike) == is_alike]:
                sources, places = zip(*some, strict=True)
                self.p.call("copy_all", *sources, *places, roles="r" * len(some) + "w" * len(some))
        for source, place in moves:
            if not isinstance(place, Buffer):
                self.copy(source, place)

    def copied(self, ref: Ref) -> Buffer | Tall:
        """Return a value of its own for an output; a number of Python's becomes an array."""
        assert isinstance(ref, int)
        place = self.place(ref)
        self.copy(self.here[ref], place)
        return place

    # Sequences of statements

    def take(self, statements: Sequence[Statement], kept: Collection[int], targets: Targets = _NO_TARGETS) -> set[int]:
        """Take statements; free what they make but for what is kept. Return the values that are in their targets.

        A target is memory for a value that may be written once another value is not read any more.
        """
        before, placed = set(self.here), set[int]()
        after = self._read_after(statements, kept)
        at = 0
        while at < len(statements):
            if self._is_apart(statements[at]):
                {"loop": self._loop, "cond": self._cond, "qr": self._qr}[statements[at].family](statements[at])
                at += 1
            else:
                end = next((i for i in range(at, len(statements)) if self._is_apart(statements[i])), len(statements))
                placed |= self._sequence(statements[at:end], after[end - 1], targets)
                at = end
            self._drop_but(before | after[at - 1])
        return placed

    def _read_after(self, statements: Sequence[Statement], kept: Collection[int]) -> list[set[int]]:
        sets, now = [], set(kept)
        for statement in reversed(statements):
            sets.append(set(now))
            now.update(statement.reads)
        return sets[::-1]

    def _is_apart(self, statement: Statement) -> bool:
        tall = statement.family == "qr" and self.axes[statement.outputs[0]] is not None
        return statement.family in ("loop", "cond") or tall

    def _is_local(self, statement: Statement) -> bool:
        """Whether each rank works on its own rows."""
        places = [self.axes[x] for x in (*statement.reads, *statement.outputs)]
        return statement.family != "gather" and any(axis is not None for axis in places)

    def _stages(self, statements: Sequence[Statement]) -> list[int]:
        """Return after how many messages each statement is taken."""
        level, stages = dict[int, int](), []
        for statement in statements:
            stage = max((level.get(x, 0) for x in statement.reads), default=0)
            stages.append(stage)
            combined = statement.family == "gather" or any(x in self.combine for x in statement.outputs)
            level.update(dict.fromkeys(statement.outputs, stage + combined))
        last, first_read = max(stages, default=0), dict[int, int]()
        for i in reversed(range(len(statements))):
            here = statements[i]
            # A view is taken in the pass in which it is read first, and what all ranks have when it is, with more.
            late = here.family in _LATE and all(self.axes[x] is None for x in (*here.reads, *here.outputs))
            if is_view(here, self.kinds, self.axes) or (late and self.deciding.isdisjoint(here.outputs)):
                stages[i] = min(
                    (first_read.get(x, last if late else stages[i]) for x in here.outputs), default=stages[i]
                )
            for x in here.reads:
                first_read[x] = min(stages[i], first_read.get(x, stages[i]))
        return stages

    def _sequence(self, statements: Sequence[Statement], kept: Collection[int], targets: Targets) -> set[int]:
        """Take statements between which nothing stands."""
        stages = self._stages(statements)
        before = set(self.here)
        placed = set[int]()
        for stage in range(max(stages, default=-1) + 1):
            now = [x for x, s in zip(statements, stages, strict=True) if s == stage]
            later = [x for x, s in zip(statements, stages, strict=True) if s > stage]
            read_later = set(kept).union(*(x.reads for x in later))
            local = [x for x in now if self._is_local(x)]
            gathers = [x for x in now if x.family == "gather"]
            whole = [x for x in now if not self._is_local(x) and x.family != "gather"]
            self._whole(whole, read_later.union(*(x.reads for x in (*local, *gathers))))
            gathered = {x for statement in gathers for x in statement.reads}
            sums, there = self._pass(local, read_later | gathered, targets)
            placed |= there
            self._message(sums, gathers)
            self._drop_but(before | read_later)
        return placed

    # Statements on what all ranks have

    def _whole(self, statements: Sequence[Statement], read: Collection[int]) -> None:
        """Take statements on what all ranks have: exact ones first, and apart those of which one rank decides."""
        groups: list[tuple[str, list[Statement]]] = []
        between, after = self._decided(statements)
        for statement in sorted(statements, key=lambda x: not after.isdisjoint((*x.reads, *x.outputs))):
            kind = "one" if id(statement) in between else self._kind_of(statement)
            if kind == "exact":
                self.exact.update(statement.outputs)
            # Into the first group behind what it reads; of several functions whose results are not unique one rank
            # takes also what is between them, so that all get what they need of it by one message.
            at = 0
            for i, (_, group) in enumerate(groups):
                if any(not set(earlier.outputs).isdisjoint(statement.reads) for earlier in group):
                    at = i if groups[i][0] == kind else i + 1
            place = next((i for i in range(at, len(groups)) if groups[i][0] == kind), None)
            if place is None:
                groups.append((kind, [statement]))
            else:
                groups[place][1].append(statement)
            if kind == "one":
                self.exact.update(statement.outputs)
        for i, (kind, group) in enumerate(groups):
            after = set(read).union(*(statement.reads for _, later in groups[i + 1 :] for statement in later))
            outputs = [x for statement in group for x in statement.outputs if x in after]
            reads = self._outer_reads(group)
            call = Pass(reads, tuple(group), (), (), {}, tuple(outputs), **self._described(group, reads))
            buffers = [self.buffer(number) for number in outputs]
            self.here.update(zip(outputs, buffers, strict=True))
            if kind != "one" or self.p.me == 0:
                self._evaluate(call, [self.here[x] for x in reads], len(reads), 0, buffers, kind)
            if kind == "one" and buffers:
                self.p.give(*buffers)

    def _decided(self, statements: Sequence[Statement]) -> tuple[set[int], set[int]]:
        """Return the statements of one rank, with those between them, and the values that follow from these."""
        after, before, decided = set[int](), set[int](), set[int]()
        for statement in statements:
            if self._kind_of(statement) == "one" or not after.isdisjoint(statement.reads):
                after.update(statement.outputs)
        for statement in reversed(statements):
            is_one = self._kind_of(statement) == "one"
            if is_one or not before.isdisjoint(statement.outputs):
                before.update(statement.reads)
            if is_one or not (before.isdisjoint(statement.outputs) or after.isdisjoint(statement.outputs)):
                decided.add(id(statement))
        return decided, after

    def _kind_of(self, statement: Statement) -> str:
        function = statement.options.get("f")
        if statement.family in ("whole", "along", "reduce") and function in _OF_ONE_RANK:
            return "one"
        if statement.family in ("qr", "callback", "call"):
            return "one"
        real = all(self.kinds[x].dtype[0] != "c" for x in (*statement.reads, *statement.outputs))
        functions = _EXACT_FUNCTIONS if real else _EXACT_OF_COMPLEX
        fine = statement.family in _EXACT or (statement.family == "map" and function in functions)
        # Whole numbers have no rounding, and neither has the choice of one.
        whole = all(self.kinds[x].dtype[0] in "biu" for x in statement.outputs)
        fine |= statement.family == "reduce" and (whole or function in ("max", "min"))
        return "exact" if fine and self.exact.issuperset(statement.reads) else "same"

    def _outer_reads(self, statements: Sequence[Statement]) -> tuple[int, ...]:
        own = {x for statement in statements for x in statement.outputs}
        return tuple(dict.fromkeys(x for statement in statements for x in statement.reads if x not in own))

    def _described(self, statements: Sequence[Statement], reads: Sequence[int]) -> dict[str, Any]:
        numbers = {*reads, *(x for statement in statements for x in statement.outputs)}
        return {
            "kinds": {x: self.kinds[x] for x in sorted(numbers)},
            "axes": {x: self.axes[x] for x in sorted(numbers)},
            "moved": {x: self.moved[x] for x in sorted(numbers) if x in self.moved},
        }

    # Passes over rows

    def _pass(
        self, statements: Sequence[Statement], read: Collection[int], targets: Targets
    ) -> tuple[list[tuple[int, list[Buffer]]], set[int]]:
        """Take statements on rows; return the sums of this rank, and values that are in their targets."""
        if not statements:
            return [], set()
        values = [x for statement in statements for x in statement.outputs]
        sums = [(x, self.combine[x]) for x in values if x in self.combine]
        rows = [x for x in values if x not in self.combine and x in read]
        reads = self._outer_reads(statements)
        described = self._described(statements, reads)
        placed, over = set(), dict[int, int]()
        for number in rows:
            target, old = targets.get(number, (None, -1))
            if target is not None and old not in read and self.axes[number] is not None:
                self.here[number] = target
                placed.add(number)
                if old in reads:
                    over[number] = old
            else:
                self.here[number] = self.tall(number)
        arguments = [self.here[x] for x in reads if x not in over.values()]
        fresh = not any(isinstance(x, Tall) and (x.by_ranks or x.formula) for x in arguments)
        buffers = []
        for number, op in sums:
            source = next(statement for statement in statements if number in statement.outputs).inputs[0]
            parts = self._parts(number, op, self.kinds[source].dtype if isinstance(source, int) else "")
            buffers.append((number, parts))
            if not fresh:
                for part, value in parts:
                    self.p.call("set_all", part, value=value)
        reads = tuple(x for x in reads if x not in over.values())
        described |= {"firsts": self.firsts, "sizes": self.sizes, "fresh": fresh}
        call = Pass(reads, tuple(statements), tuple(sums), tuple(rows), over, (), **described)
        outputs = [part for _, parts in buffers for part, _ in parts]
        written = [self.here[x] for x in rows]
        if not fresh:
            for index, arrays in enumerate(self.p.chunks(*arguments, *outputs, *written)):
                here = slice(index, index + 1)
                share = dataclasses.replace(call, firsts=self.firsts[here], sizes=self.sizes[here])
                self._evaluate(share, arrays, len(arguments), len(outputs), [])
        else:
            pieces = [self.p.pieces(x) if isinstance(x, Tall) else [x] for x in (*arguments, *outputs, *written)]
            first = sum(map(len, pieces[: len(arguments)]))
            self._evaluate(call, [x for some in pieces for x in some], first, len(outputs), [])
        return [(number, [part for part, _ in parts]) for number, parts in buffers], placed

    def _parts(self, number: int, op: str, source: str) -> list[tuple[Buffer, Any]]:
        """Return what a rank adds to, and what it begins with."""
        kind = self.kinds[number]
        if op in ("argmax", "argmin"):
            values = Kind(kind.shape, source)
            best = self.p.small(*stored_shape(values, None), values.dtype)
            return [(best, identity(op[3:], values.dtype)), (self.buffer(number), -1)]
        return [(self.buffer(number), identity(op, kind.dtype))]

    def _evaluate(
        self, call: Pass, arguments: Sequence[Any], reads: int, updates: int, makes: Sequence[Buffer], kind: str = ""
    ) -> None:
        written = "".join(("u" if x in call.over else "w") * len(call.sizes) for x in call.rows)
        roles = "r" * reads + ("w" if call.fresh else "u") * updates + written
        share = sum(map(abs, call.sizes)) / max(1, sum(map(abs, self.p.rows.sizes))) if call.sizes else 1.0
        flops = self._flops(call) * share * self.scale
        kernel = "evaluate_exactly" if kind == "exact" else "evaluate"
        self.p.call(kernel, *arguments, makes=makes, program=call, roles=roles, flops=flops)

    def _flops(self, call: Pass) -> float:
        total = 0.0
        for statement in call.statements:
            sizes = [call.kinds[x].size for x in statement.outputs]
            if statement.family == "contract":
                lengths = extents(statement.options["spec"], [call.kinds[x].shape for x in statement.reads])
                total += 2.0 * math.prod(lengths.values())
            elif statement.family in ("whole", "qr"):
                read = [call.kinds[x] for x in statement.reads if call.kinds[x].shape]
                total += max((4.0 * kind.size * kind.shape[-1] for kind in read), default=0.0)
            else:
                total += max([*sizes, *(call.kinds[x].size for x in statement.reads)], default=0)
        return total

    # Messages

    def _message(self, sums: Sequence[tuple[int, list[Buffer]]], gathers: Sequence[Statement]) -> None:
        """Combine the sums of all ranks, and give all rows of some values to all, in one message."""
        if not sums and not gathers:
            return
        p = self.p
        sources = {x: self._in_memory(x) for statement in gathers for x in statement.reads}
        talls = list(dict.fromkeys(sources.values()))
        decided = sorted(self.deciding & self.here.keys() - self.exact)
        flags = [self.here[number] for number in decided]
        parts, rows = p.share_rows([part for _, some in sums for part in some], talls, flags)
        self.exact.update(decided)
        self.meetings += 1
        every, totals = list[Buffer](), list[Buffer]()
        at = 0
        for number, own in sums:
            of_ranks = parts[at : at + len(own)]
            at += len(own)
            if p.rows.ranks > 1:
                every += (part for of_rank in zip(*of_ranks, strict=True) for part in of_rank)
                totals += (dataclasses.replace(buffer, name=p.small(1, 1).name) for buffer in own)
            self.here[number] = totals[-1] if p.rows.ranks > 1 else own[-1]
            self.exact.add(number)
        if totals:
            ops = tuple(self.combine[number] for number, _ in sums)
            roles = "r" * len(every) + "w" * len(totals)
            p.call("merge", *every, *totals, ops=ops, ranks=p.rows.ranks, roles=roles)
        kept = {self.here[number] for number, _ in sums}
        p.drop(*(x for x in (*every, *totals, *(x for _, own in sums for x in own)) if x not in kept))
        for statement in gathers:
            (source,), (number,) = statement.reads, statement.outputs
            if self.axes[source]:
                self.moved[number] = self.axes[source]
            buffer = self.buffer(number)
            pieces = rows[talls.index(sources[source])]
            p.call("assemble", buffer, *pieces, places=tuple((i, 0, n) for i, n in enumerate(p.rows.sizes)))
            self.here[number] = buffer
            self.exact.add(number)
        own_pieces = {piece.name for tall in talls for piece in p.pieces(tall)}
        p.drop(*(piece for some in rows for piece in some if piece.name not in own_pieces))
        p.drop_tall(*(tall for x, tall in sources.items() if tall != self.here[x]))

    def _in_memory(self, number: int) -> Tall:
        """Return a value in rows, or a copy if its chunks are made one by one: others read all of them at once."""
        source: Tall = self.here[number]
        if not (source.by_ranks or source.formula):
            return source
        copy = self.tall(number)
        self.p.each("copy", source, copy)
        return copy

    # Loops, branches, factorizations

    def _flag(self, ref: Ref, flag: Buffer, compared: Sequence[tuple[int, Ref]] = ()) -> None:
        """Compute a flag, the same on all ranks: what they decide by. Progress is that of numbers to their limits."""
        if isinstance(ref, Literal):
            self.p.call("set_all", flag, value=bool(ref.value))
            return
        limits = tuple(None if isinstance(x, int) else x.value for _, x in compared)
        numbers = [self.here[x] for pair in compared for x in pair if isinstance(x, int)]
        if numbers:
            self.p.call("follow", *numbers, limits=limits)
        if ref in self.exact:
            self.p.call("decide", self.here[ref], flag)
        else:
            self.p.on_root("decide", [self.here[ref]], [flag])
            self.p.share_rows([], [], [flag])
            self.meetings += 1

    def _compared(self, condition: Sequence[Statement]) -> list[tuple[int, Ref]]:
        """Return the numbers that a condition compares with limits: those that are above, and counts that are below."""
        compared = []
        for statement in condition:
            name = statement.options.get("f", "")
            if statement.family == "map" and name in _COMPARISONS:
                low, high = statement.inputs if name.startswith("less") else statement.inputs[::-1]
                kinds = [self.kinds[x] for x in (low, high) if isinstance(x, int)]
                is_count = kinds[0].dtype[0] in "iu"
                number, limit = (low, high) if is_count else (high, low)
                real = all(kind.shape == () and kind.dtype[0] in ("iu" if is_count else "f") for kind in kinds)
                if isinstance(number, int) and real and all(self.axes[x] is None for x in statement.reads):
                    compared.append((number, limit))
        return compared

    def _loop(self, loop: Statement) -> None:
        p, body = self.p, loop.blocks[-1]
        skipped = loop.options["skipped"]
        numbers, states = body.inputs[:skipped], body.inputs[skipped:]
        flag = p.flag()
        # The state, in memory of its own.
        places = []
        for ref, number in zip(loop.inputs, states, strict=True):
            assert isinstance(ref, int)
            self.here[number] = place = self.place(number)
            self.copy(self.here[ref], place)
            places.append(place)
        self.exact.update(self._exact_states(loop, nested=self.depth > 0))
        for number in numbers:
            self.here[number] = self.buffer(number)
            p.call("set_all", self.here[number], value=loop.options.get("first", 0))
            self.exact.add(number)
        count, expected = loop.options.get("count"), self._expected(loop)
        # The statements that say whether there is another turn are those of the turn before it.
        first, ref = _looked_at(loop, loop.inputs)
        before = set(self.here)
        self.take(first, {ref} if isinstance(ref, int) else ())
        self._flag(ref, flag)
        self._drop_but(before)
        then, ref = _looked_at(loop, body.outputs)
        compared = [] if self.depth else self._compared(then)
        self.exact.difference_update(x for statement in then for x in statement.outputs)

        def turn() -> None:
            met = self.meetings
            self.depth += 1
            outputs = [x for x in body.outputs if isinstance(x, int)]
            targets: dict[int, tuple[Any, int]] = {}
            for out, number, place in zip(body.outputs, states, places, strict=True):
                if isinstance(out, int) and out not in states and outputs.count(out) == 1 and number not in outputs:
                    targets.setdefault(out, (place, number))
            before = set(self.here)
            wanted = {x for x in (ref, *itertools.chain(*compared)) if isinstance(x, int)}
            placed = self.take([*body.statements, *then], wanted.union(outputs), targets)
            moves = [
                (self.here[out], place)
                for out, number, place in zip(body.outputs, states, places, strict=True)
                if isinstance(out, int) and out != number and not (out in placed and self.here[out] is place)
            ]
            own = {id(place) for place in places}
            # Parts of the state that are read are copied before they are overwritten.
            spare = {}
            for source, _ in moves:
                if id(source) in own and id(source) not in spare:
                    spare[id(source)] = fresh = self._like(source)
                    self.copy(source, fresh)
            if then:
                self._flag(ref, flag, compared)
            self._copy_all([(spare.get(id(source), source), place) for source, place in moves])
            for fresh in spare.values():
                self.drop(fresh)
            for number in [x for x in self.here if x not in before]:
                gone = self.here.pop(number)
                if id(gone) not in own:
                    self.drop(gone)
            for number in numbers:
                p.call("increment", self.here[number])
            self.depth -= 1
            if self.meetings == met:
                # Nobody may be a turn ahead: what was published is freed.
                p.share_rows([], [])

        met = self.meetings
        p.loop(flag, turn, _MOST if count is None else count, expected)
        if not count:
            # There may be no turn at all, in which ranks would meet.
            self.meetings = met
        p.drop(flag)
        for number in numbers:
            self.drop(self.here.pop(number))
        for number, out in zip(states, loop.outputs, strict=True):
            self.here[out] = self.here.pop(number)
            if number in self.exact:
                self.exact.add(out)

    def _expected(self, loop: Statement) -> int:
        """Return how many turns a loop is expected to have, for the cost model: some turns in all, of those inside."""
        if (count := loop.options.get("count")) is not None:
            return int(count)
        inside = [self._expected(statement) for statement in loop.blocks[-1].statements if statement.family == "loop"]
        compared = self._compared(loop.blocks[0].statements)
        counts = [int(x.value.real) for n, x in compared if isinstance(x, Literal) and self.kinds[n].dtype[0] in "iu"]
        return max(1, min([EXPECTED // max([1, *inside]), *counts]))

    def _like(self, place: Buffer | Tall) -> Buffer | Tall:
        """Return the name of memory like some."""
        if isinstance(place, Buffer):
            return dataclasses.replace(place, name=self.p.small(1, 1).name)
        return dataclasses.replace(self.p.tall(place.cols), dtype=place.dtype)

    def _exact_states(self, loop: Statement, *, nested: bool) -> set[int]:
        """Return the parts of a loop's state of which all ranks have the same bits in each turn.

        Values that decide about turns come with messages: the condition, of an inner loop also what it reads.
        """
        body, skipped = loop.blocks[-1], loop.options["skipped"]
        states = body.inputs[skipped:]
        outputs = dict(zip(states, body.outputs, strict=True))
        then, ref = _looked_at(loop, body.outputs)
        deciding = {ref} | ({x for statement in then for x in statement.reads} if nested else set())
        statements = [*body.statements, *then]
        self.deciding.update(x for x in deciding if isinstance(x, int))
        exact = {
            number
            for ref, number in zip(loop.inputs, states, strict=True)
            if isinstance(ref, int) and ref in self.exact and self.axes[number] is None
        }
        while True:
            derived = self._exact_in(statements, self.exact | exact | set(body.inputs[:skipped]))
            sent = {x for x in self._sent(statements, deciding) if x not in derived}
            wrong = {x for x in exact if isinstance(outputs[x], int) and outputs[x] not in derived | sent}
            if not wrong:
                return exact
            exact -= wrong

    def _sent(self, statements: Sequence[Statement], values: Collection[Ref]) -> set[int]:
        """Return those values that all ranks have, and that are there when a message is sent."""
        sent, waiting = set[int](), set[int]()
        starts = [i for i, statement in enumerate(statements) if self._is_apart(statement)]
        for start, end in itertools.pairwise([-1, *starts, len(statements)]):
            some = statements[start + 1 : end]
            stages = self._stages(some)
            messages = [
                stage
                for statement, stage in zip(some, stages, strict=True)
                if statement.family == "gather" or any(x in self.combine for x in statement.outputs)
            ]
            if messages:
                sent |= waiting
            for statement, stage in zip(some, stages, strict=True):
                for number in statement.outputs:
                    if number in values and self.axes[number] is None:
                        (sent if stage <= max(messages, default=-1) else waiting).add(number)
        return sent

    def _exact_in(self, statements: Sequence[Statement], held: Collection[int]) -> set[int]:
        outside, self.exact = self.exact, set(held)
        for statement in statements:
            combined = [x for x in statement.outputs if x in self.combine]
            if statement.family == "loop":
                states = statement.blocks[-1].inputs[statement.options["skipped"] :]
                exact = self._exact_states(statement, nested=True)
                self.exact.update(out for x, out in zip(states, statement.outputs, strict=True) if x in exact)
            elif (
                combined
                or statement.family == "gather"
                or (
                    not statement.blocks
                    and all(self.axes[x] is None for x in statement.outputs)
                    and self._kind_of(statement) != "same"
                )
            ):
                self.exact.update(statement.outputs)
        inner, self.exact = self.exact, outside
        return inner

    def _cond(self, cond: Statement) -> None:
        p, flag = self.p, self.p.flag()
        self._flag(cond.inputs[0], flag)
        places = [self.place(number) for number in cond.outputs]
        for place in places:
            if isinstance(place, Buffer):
                p.new(place)
            else:
                p.new(*p.pieces(place))

        def branch(block: Any) -> None:
            before = set(self.here)
            self.take(block.statements, {x for x in block.outputs if isinstance(x, int)})
            for ref, place in zip(block.outputs, places, strict=True):
                self.copy(self.here[ref], place)
            self._drop_but(before)

        met, exact = self.meetings, set(self.exact)
        then, otherwise = cond.blocks
        p.either(flag, lambda: branch(then), lambda: branch(otherwise))
        self.meetings, self.exact = met, exact
        p.drop(flag)
        self.here.update(zip(cond.outputs, places, strict=True))

    def _qr(self, statement: Statement) -> None:
        """Factorize what is in rows, in its type."""
        p, (source,), (q, r) = self.p, statement.reads, statement.outputs
        kind = self.kinds[source]
        outside = p.dtype, p.real, p.finite
        p.dtype, p.real, p.finite = kind.dtype, np.empty(0, kind.dtype).real.dtype.name, False
        a, result, triangle = self.here[source], self.tall(q), self.buffer(r)
        assert isinstance(a, Tall)
        with p.keeping(result, triangle):
            tall_qr(p, a, result, triangle)
        p.dtype, p.real, p.finite = outside
        p.give(triangle)
        self.here[q], self.here[r] = result, triangle
        self.exact.add(r)


def _looked_at(loop: Statement, values: Sequence[Ref]) -> tuple[list[Statement], Ref]:
    """Return the statements of a loop's condition, of these values, and its result; nothing if it only counts."""
    if len(loop.blocks) == 1:
        return [], Literal(True)
    condition = loop.blocks[0]
    names = dict(zip(condition.inputs, values, strict=True))
    (ref,) = condition.outputs
    return _renamed(condition.statements, names), names.get(ref, ref) if isinstance(ref, int) else ref


def _renamed(statements: Sequence[Statement], names: Mapping[int, Ref]) -> list[Statement]:
    def named(refs: Sequence[Ref]) -> list[Ref]:
        return [names.get(x, x) if isinstance(x, int) else x for x in refs]

    return [
        dataclasses.replace(
            statement,
            inputs=tuple(named(statement.inputs)),
            blocks=tuple(Block(x.inputs, _renamed(x.statements, names), named(x.outputs)) for x in statement.blocks),
        )
        for statement in statements
    ]


def identity(op: str, dtype: str) -> Any:
    """Return what changes nothing when it is combined with others."""
    kind = np.dtype(dtype)
    if op in ("max", "min"):
        if kind.kind == "b":
            return op == "min"
        limits = (-np.inf, np.inf) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
        return limits[op == "min"]
    return {"prod": 1, "all": True}.get(op, 0)
