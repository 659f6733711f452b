"""The language of builders: the steps of one rank, as a program of MPI would be written.

A builder is run once for each rank. All runs call the same methods in the same order, so that names of buffers and
numbers of messages agree; each leaves the steps of its own rank. Small matrices are on rank 0 (`on_root`, `add_up`)
until they are given to all (`give`): what is not unique, as signs of vectors, is computed once and copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dask_distmm.programs.steps import (
    CONTRACTS,
    FLAG,
    PART,
    Buffer,
    Call,
    Drop,
    If,
    Key,
    Lane,
    Loop,
    New,
    Publish,
    Pull,
    Step,
    Store,
    Take,
    View,
    roles_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Chunks of rows, and the rank that has each; they stay there."""

    # -1 where the number of rows is not known.
    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int

    def count(self, least: int) -> int:
        """Return the number of all rows; `least` where that is not known."""
        return sum(self.sizes) if min(self.sizes) >= 0 else least


@dataclasses.dataclass(frozen=True, slots=True)
class Tall:
    """A matrix in chunks of rows; of an operand a rank may make each chunk when it needs it (`by_ranks`)."""

    name: str
    cols: int
    operand: bool = False
    by_ranks: bool = False
    # The kernel that makes each chunk when it is needed, and what that reads: buffers, and chunks of other matrices.
    formula: tuple[Any, ...] = ()
    # The name of its type; that of the computation by default.
    dtype: str = ""
    # Whether all ranks read all of it; it is in one chunk.
    whole: bool = False


Operands = Mapping[str, Tall]
# The names of the outputs that are to be made.
Wanted = Collection[str]


class Recorder:
    """Records the steps of rank `me`."""

    _lane: Lane = ""

    def __init__(self, me: int, rows: Rows, dtype: str, *, finite: bool = True) -> None:
        self.me, self.rows, self.dtype = me, rows, dtype
        # Whether elements that are NaN or infinite are refused. None of them has a usable Gram matrix.
        self.finite = finite
        self.real = np.empty(0, dtype).real.dtype.name
        self.steps: list[Step] = []
        self._names, self._keys = itertools.count(), (Key(PART, number) for number in itertools.count())
        # Buffers in memory, by name; the chunks of matrices.
        self._here: dict[str, Buffer] = {}
        self._pieces: dict[str, list[Buffer]] = {}
        # The numbers of this rank's chunks.
        self.mine = [number for number, owner in enumerate(rows.owners) if owner == me]

    # Names

    @property
    def here(self) -> Mapping[str, Buffer]:
        """The buffers in memory, by name."""
        return self._here

    def next_key(self) -> Key:
        """Return the key of a message, the same on all ranks."""
        return next(self._keys)

    def small(self, rows: int, cols: int, dtype: str | None = None) -> Buffer:
        """Return a new small matrix, not yet allocated."""
        return Buffer(f"s{next(self._names)}", (rows, cols), dtype or self.dtype)

    def flag(self) -> Buffer:
        """Return the name of a flag."""
        return self.numbers(1, FLAG)

    def tall(self, cols: int, *formula: Any) -> Tall:
        """Return the name of a matrix in the same chunks of rows as the operands."""
        return Tall(f"t{next(self._names)}", cols, formula=formula)

    def pieces(self, matrix: Tall) -> list[Buffer]:
        """Return this rank's chunks of a matrix."""
        if matrix.name not in self._pieces:
            self._pieces[matrix.name] = [self.chunk_of(matrix, number) for number in self.mine]
        return self._pieces[matrix.name]

    def chunk_of(self, matrix: Tall, number: int) -> Buffer:
        """Return the name of a chunk of a matrix, whoever has it."""
        shape, dtype = (self.rows.sizes[number], matrix.cols), matrix.dtype or self.dtype
        return Buffer(f"{matrix.name}.{number}", shape, dtype, "" if matrix.operand else f"a.{number}")

    def numbered(self, matrix: Tall) -> Iterator[tuple[int, Buffer]]:
        """Yield this rank's chunks of a matrix with their numbers."""
        return zip(self.mine, self.pieces(matrix), strict=True)

    # Steps of this rank

    def make(self, *operands: Tall) -> None:
        """Take all chunks of operands that are not computed one by one."""
        for operand in operands:
            for number, piece in () if operand.by_ranks or operand.whole else self.numbered(operand):
                self._take_chunk(operand.name, number, piece)

    def _take_chunk(self, operand: str, number: int, piece: Buffer, *, donated: bool = False) -> None:
        self._here[piece.name] = piece
        self.steps.append(Take(piece, operand, number, donated))

    def chunks(self, *arguments: Buffer | Tall) -> Iterator[list[Buffer]]:
        """Yield arguments with each of this rank's chunks in the places of matrices.

        One that is made when it is needed is there until the next one.
        """
        for index in range(len(self.mine)):
            loaded: list[Buffer] = []
            yield [self._at(index, argument, loaded) for argument in arguments]
            self.drop(*loaded)

    def _at(self, index: int, argument: Buffer | Tall, loaded: list[Buffer]) -> Buffer:
        if isinstance(argument, Buffer):
            return argument
        piece = self.pieces(argument)[index]
        if (argument.by_ranks or argument.formula) and piece.name not in self._here:
            if argument.by_ranks:
                self._take_chunk(argument.name, self.mine[index], piece)
            else:
                kernel, *reads = argument.formula
                self.call(kernel, *(self._at(index, source, loaded) for source in reads), piece)
            loaded.append(piece)
        return piece

    def each(self, kernel: str, *arguments: Buffer | Tall) -> None:
        """Call a kernel for each of this rank's chunks."""
        for buffers in self.chunks(*arguments):
            self.call(kernel, *buffers)

    def call(self, kernel: str, *arguments: Buffer | View, makes: Sequence[Buffer] = (), **options: Any) -> None:
        """Call a kernel; outputs that do not exist are allocated."""
        call, here = Call(kernel, arguments, options, tuple(makes), self._lane), self._here
        writes = "w" in (options.get("roles") or CONTRACTS[kernel].roles)
        for buffer, role in roles_of(call) if writes else ():
            if role == "w" and buffer.name not in here:
                self.new(buffer)  # type: ignore[arg-type]
        for buffer in makes:
            here[buffer.name] = buffer
        self._add(call)

    def _add(self, step: Call | Publish) -> None:
        self.steps.append(step)
        if self._lane:
            # Steps after the first one of a lane need not wait for more.
            self._lane = {"ahead": "panel", "join": ""}.get(self._lane, self._lane)  # type: ignore[assignment]

    def new(self, *buffers: Buffer, zero: bool = False) -> None:
        """Allocate buffers."""
        for buffer in buffers:
            self._here[buffer.name] = buffer
            self.steps.append(New(buffer, zero))

    def zeros(self, rows: int, cols: int, dtype: str | None = None) -> Buffer:
        """Return a new small matrix of zeros on this rank, for a sum."""
        buffer = self.small(rows, cols, dtype)
        self.new(buffer, zero=True)
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """Free buffers, if they exist."""
        here = self._here
        for buffer in buffers:
            if buffer.name in here:
                del here[buffer.name]
                self.steps.append(Drop(buffer))

    def drop_tall(self, *matrices: Tall) -> None:
        """Free this rank's chunks of matrices."""
        self.drop(*itertools.chain(*map(self.pieces, matrices)))

    @contextlib.contextmanager
    def keeping(self, *kept: Buffer | Tall) -> Iterator[None]:
        """Free new buffers at the end of a ``with`` block, except some."""
        before = set(self._here)
        yield
        names = before.union(*([x.name] if isinstance(x, Buffer) else [y.name for y in self.pieces(x)] for x in kept))
        self.drop(*(self._here[name] for name in sorted(self._here.keys() - names)))

    def store(self, output: str, matrix: Buffer | Tall) -> None:
        """Store chunks as those of an output: a small matrix on rank 0, others drop theirs."""
        if isinstance(matrix, Tall):
            for own, piece in self.numbered(matrix):
                self.leave(output, piece, own)
        elif self.me:
            self.drop(matrix)
        else:
            self.leave(output, matrix)

    def leave(self, output: str, place: Buffer | View, number: int = 0) -> None:
        """Store a chunk of an output."""
        if isinstance(place, Buffer):
            del self._here[place.name]
        self.steps.append(Store(place, output, number))

    # Steps of all ranks

    def pull(self, owner: int, key: Key, buffers: tuple[Any, ...], *, taken: bool = False, **how: Any) -> None:
        """Pull what another rank publishes; buffers that do not exist are allocated, or bound to the message."""
        missing = [buffer for buffer in buffers if buffer.name not in self._here]
        if taken:
            self._here |= {buffer.name: buffer for buffer in missing}
        else:
            self.new(*missing)
        self.steps.append(Pull(owner, key, buffers, taken, **how))

    def add_up(self, *buffers: Buffer, op: str = "") -> None:
        """Reduce buffers of all ranks to rank 0 along a binary tree; other ranks drop theirs.

        `op` is a kernel that adds some buffers to others, in place of the sum.
        """
        step, ranks = 1, self.rows.ranks
        while step < ranks:
            key, giver = next(self._keys), self.me % (2 * step)
            if giver == step:
                self.steps.append(Publish(key, buffers))
                self.drop(*buffers)
            elif giver == 0 and self.me + step < ranks:
                theirs = tuple(dataclasses.replace(buffer, name=f"{buffer.name}+{step}") for buffer in buffers)
                self.pull(self.me + step, key, theirs)
                if op:
                    self.call(op, *theirs, *buffers)
                else:
                    for theirs_part, buffer in zip(theirs, buffers, strict=True):
                        self.call("add", theirs_part, buffer)
                self.drop(*theirs)
            step *= 2

    def on_root(self, kernel: str, reads: Sequence[Buffer], writes: Sequence[Buffer], **options: Any) -> None:
        """Call a kernel on rank 0, where its outputs are."""
        if self.me == 0:
            self.call(kernel, *reads, *writes, **options)

    def give(self, *buffers: Buffer) -> None:
        """Broadcast small matrices from rank 0, in one message."""
        key = next(self._keys)
        if self.rows.ranks == 1:
            return
        if self.me == 0:
            self.steps.append(Publish(key, buffers))
        else:
            self.pull(0, key, buffers)

    def scatter(self, parts: Sequence[Buffer], own: Buffer) -> None:
        """Scatter rank 0's parts: each rank gets the one of its number as `own`."""
        keys = [next(self._keys) for _ in parts]
        if self.me == 0:
            self.steps += (Publish(key, (part,)) for key, part in zip(keys[1:], parts[1:], strict=True))
            self.call("copy", parts[0], own)
            self.drop(*parts)
        else:
            self.pull(0, keys[self.me], (own,))

    def collect(self, *own: Buffer) -> list[tuple[Buffer, ...]]:
        """Gather the buffers of all ranks on rank 0."""
        ranks = range(self.rows.ranks)
        keys = [next(self._keys) for _ in ranks]
        parts = [tuple(dataclasses.replace(buffer, name=f"{buffer.name}@{rank}") for buffer in own) for rank in ranks]
        if self.me == 0:
            for buffer, part in zip(own, parts[0], strict=True):
                self.call("copy", buffer, part)
            for rank in ranks[1:]:
                self.pull(rank, keys[rank], parts[rank])
        else:
            self.steps.append(Publish(keys[self.me], own))
        return parts

    def numbers(self, count: int, dtype: str) -> Buffer:
        """Return the name of numbers on the host, which each rank computes alike."""
        return Buffer(f"s{next(self._names)}", (1, count), dtype, host=True)

    def share_rows(
        self, sums: Sequence[Buffer], matrices: Sequence[Tall], flags: Sequence[Buffer] = ()
    ) -> tuple[list[list[Buffer]], list[list[Buffer]]]:
        """All-gather some buffers and all chunks of matrices, in one message from each rank.

        With the same messages they get `flags` from rank 0.
        """
        key, ranks = next(self._keys), range(self.rows.ranks)
        pieces = {(x.name, i): self.chunk_of(x, i) for x in matrices for i in range(len(self.rows.sizes))}
        # The number of rows of what others have is known.
        pieces |= {
            at: dataclasses.replace(piece, like="")
            for at, piece in pieces.items()
            if self.rows.owners[at[1]] != self.me
        }
        chunks = [[i for i, owner in enumerate(self.rows.owners) if owner == rank] for rank in ranks]
        if self.rows.ranks > 1:
            theirs = (pieces[x.name, i] for x in matrices for i in chunks[self.me])
            self.steps.append(Publish(key, (*sums, *theirs, *(() if self.me else flags)), copied=True))
        parts: list[list[Buffer]] = [[] for _ in sums]
        for rank in ranks:
            own = list(sums)
            if rank != self.me:
                own = [dataclasses.replace(buffer, name=f"{buffer.name}@{rank}") for buffer in sums]
                theirs = (pieces[x.name, i] for x in matrices for i in chunks[rank])
                self.pull(rank, key, (*own, *theirs, *(() if rank else flags)))
            for some, buffer in zip(parts, own, strict=True):
                some.append(buffer)
        return parts, [[pieces[x.name, i] for i in range(len(self.rows.sizes))] for x in matrices]

    def whole_operand(self, operand: Tall, shape: tuple[int, int]) -> Buffer:
        """Take all of an operand."""
        buffer = Buffer(f"{operand.name}.0", shape, operand.dtype)
        self._take_chunk(operand.name, 0, buffer)
        return buffer

    def loop(self, flag: Buffer, body: Callable[[], Any], most: int, expected: int) -> None:
        """Repeat steps while a flag is set, the same on all ranks; an iteration leaves the same buffers."""
        outside, before = self.steps, self._here.copy()
        self.steps = []
        body()
        self.steps, steps = outside, tuple(self.steps)
        assert self._here == before, self._here.keys() ^ before.keys()
        self.steps.append(Loop(flag, steps, most, expected))

    def either(self, flag: Buffer, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
        """Record a branch by a flag that is the same on all ranks; both sides leave the same buffers."""
        outside, before, lists, ends = self.steps, self._here, [], []
        for branch in (then, otherwise):
            self.steps, self._here = [], before.copy()
            branch()
            lists.append(self.steps)
            ends.append(self._here)
        kept = ends[0].keys() & ends[1].keys()
        # What only one of them leaves is of no use after it.
        for self.steps, self._here in zip(lists, ends, strict=True):
            self.drop(*(self._here[name] for name in sorted(self._here.keys() - kept)))
        self.steps = outside
        self.steps.append(If(flag, *map(tuple, lists)))

    def go_on(self, branch: Recorder) -> None:
        """Append the steps of another recorder, and take over its buffers."""
        self.steps += branch.steps
        self._here |= branch._here

    def end(self) -> tuple[Step, ...]:
        """Free all remaining buffers, and return the steps."""
        self.drop(*(self._here[name] for name in sorted(self._here)))
        return tuple(self.steps)
