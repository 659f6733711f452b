"""The twelve kinds of steps, and the buffers that they name.

Contracts of kernels, whoever implements them: which arguments they read, update and write, and their flops.

Nothing else counts flops or knows roles. A tall argument is a chunk of rows, m x n; all others are small.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dask_distmm.numeric.types import dtype_from_name

# The twelve kinds of steps, and the buffers that they name


# The types of flags, and of numbers of rows: they are on the host.
FLAG, COUNT = "bool", "int32"
# The kind of messages of programs without names of their own for them; and of ranks' parts of outputs, by the output's
# number.
PART, FINAL = "part", "final"
# Kinds of messages that stay until the end of the run, also if they are pulled in a loop.
LASTING = "lower", "upper", "pivots"
# The number of a message of a later turn of a loop is this many times the number of turns before it larger.
TURN = 1 << 32
# Of a message to all: bytes of which its parts are multiples, and of the largest that goes from GPU to GPU.
ALIGNED, _MOST_TO_ALL = 256, 2**26


# Operands of programs, and those of products whose chunks ranks make.
_OPERANDS = {"a", "b", "g", "m"}
# Rows and columns, from the first to the last + 1.
Box = tuple[int, int, int, int]


def crossing(first: Box, second: Box) -> bool:
    """Whether two rectangles of a buffer have elements in common."""
    # The rows of a chunk may not be known.
    apart = first[0] >= second[1] or second[0] >= first[1] or first[2] >= second[3] or second[2] >= first[3]
    return first == second or not apart


class Key(NamedTuple):
    """Names what a rank publishes: a kind and a number; it is the same until the end of the run."""

    part: str
    number: int


# Nothing changes them; but it takes four times as long to make frozen ones, and lists have thousands.
@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Buffer:
    """A matrix in the memory of one rank."""

    # What it is for, and numbers, with dots between: ``a.3`` is chunk 3 of operand a, ``panel.1.0`` buffer 0 of B.
    name: str
    # Where the number of rows is not known before the run it is -1: that of the chunk `like`.
    shape: tuple[int, int]
    dtype: str
    like: str = ""
    # Whether it is in the memory of the host, whatever computes: numbers that decide what is done next.
    host: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, without rows that are not known."""
        return max(0, math.prod(self.shape)) * dtype_from_name(self.dtype).itemsize

    @property
    def buffer(self) -> Buffer:
        """The buffer, as a `View` has it."""
        return self

    @property
    def role(self) -> str:
        """What it is for: the name of its operand, for example."""
        return self.name.partition(".")[0]

    @property
    def number(self) -> int:
        """The number behind its role: of an operand, a chunk or a block of D."""
        return int(self.name.split(".")[1])

    @property
    def is_operand(self) -> bool:
        """Whether it is a chunk of an operand: a, b, g or m, of traced functions also b1, b2, ..."""
        return self.role.rstrip("0123456789") in _OPERANDS

    @property
    def box(self) -> Box:
        """The rectangle of the whole buffer."""
        return 0, self.shape[0], 0, self.shape[1]

    def __getitem__(self, index: tuple[slice, slice]) -> View:
        return View(self, self.box)[index]


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class View:
    """A rectangle of a buffer, cut by slices as NumPy cuts."""

    buffer: Buffer
    box: Box

    @property
    def name(self) -> str:
        """Name of the buffer."""
        return self.buffer.name

    @property
    def role(self) -> str:
        """What the buffer is for."""
        return self.buffer.role

    @property
    def number(self) -> int:
        """The number behind the role of the buffer."""
        return self.buffer.number

    @property
    def dtype(self) -> str:
        """Name of the type."""
        return self.buffer.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.box[1] - self.box[0], self.box[3] - self.box[2]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * dtype_from_name(self.dtype).itemsize

    def __getitem__(self, index: tuple[slice, slice]) -> View:
        top, bottom, left, right = self.box
        first, stop, _ = index[0].indices(bottom - top)
        begin, end, _ = index[1].indices(right - left)
        return View(self.buffer, (top + first, top + max(first, stop), left + begin, left + max(begin, end)))


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class New:
    """Allocate; `zero`: filled with zeros, as sums need."""

    buffer: Buffer
    zero: bool = False


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Reserve:
    """Use memory that was allocated before the vote, as other ranks read it."""

    buffer: Buffer


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Take:
    """Take a chunk of an operand: one that is in memory here, or elsewhere, or is still to be made.

    `donated`: it may be overwritten.
    """

    buffer: Buffer
    operand: str
    number: int = 0
    donated: bool = False


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Load:
    """Fill places with parts of operands (`rects`), whose chunks may be anywhere: one message from each holder of some.

    They come later than this step: who uses a place waits. A place that is a buffer begins as what comes. Without
    rectangles it is the rank's block columns: all parts of the operand that belong there, multiplied `by` numbers for
    its rows, and for its columns; then the step waits.
    """

    places: tuple[Buffer | View, ...]
    operands: tuple[str, ...]
    rects: tuple[Box, ...] = ()
    by: tuple[Buffer, ...] = ()

    def __iter__(self) -> Iterator[tuple[Buffer | View, str, Box]]:
        return zip(self.places, self.operands, self.rects, strict=True)


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Call:
    """Call a kernel: all arithmetic. `arguments` are in the order of its contract; it returns what it `makes`."""

    kernel: str
    arguments: tuple[Buffer | View, ...]
    options: Mapping[str, Any]
    makes: tuple[Buffer, ...] = ()
    lane: Lane = ""


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Publish:
    """Publish buffers under a key that is the same on all ranks; they must not change afterwards.

    `copied`: others get them as they are, and they may change. `once`: one rank gets them, after which they may.
    """

    key: Key
    buffers: tuple[Buffer | View, ...]
    copied: bool = False
    lane: Lane = ""
    once: bool = False


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Pull:
    """Copy the buffers that another rank publishes under a key: one message.

    `taken`: buffers begin as what arrives, without another copy. `op`: ``"add"`` in place of a copy.
    """

    owner: int
    key: Key
    buffers: tuple[Buffer | View, ...]
    taken: bool = False
    op: Literal["", "add"] = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class If:
    """A branch: all ranks have the same flag, which one rank or all have computed."""

    flag: Buffer
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Loop:
    """Repeat a list while a flag is set, which is the same on all ranks, up to a limit of iterations.

    In a turn with messages all ranks wait for each other. So at its end nobody needs what was published before it.
    """

    flag: Buffer
    body: tuple[Step, ...]
    most: int
    # How many turns are expected: for the cost model.
    expected: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class LoopIteration:
    """The start or the end of an iteration of a loop, in flat lists."""

    loop: Loop
    starts: bool


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Store:
    """Store a buffer as a chunk of an output, after which it is not used; or a copy of a rectangle of one."""

    buffer: Buffer | View
    output: str
    number: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Deliver:
    """Make this rank's chunks of outputs of the block columns that all ranks have published, and wait for these.

    The mirror of `Load` without rectangles. A chunk's name is that of its output, with its number.
    """

    keys: tuple[Key, ...]
    chunks: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Drop:
    """Free a buffer."""

    buffer: Buffer


# Where calls are queued, what runs beside what. "": one after the other. "ahead": beside those that follow, after all
# before it. "panel": beside them, after only what was ahead. "join": as "", after all that was ahead.
Lane = Literal["", "ahead", "panel", "join"]
Step = New | Reserve | Take | Load | Call | Publish | Pull | If | Loop | Store | Deliver | Drop
FlatStep = Step | LoopIteration


def flatten(steps: Sequence[Step], flags: Mapping[str, bool], turns: int = 1) -> Iterator[FlatStep]:
    """Yield the steps that are run with certain values of the flags; True for those that are not named.

    A loop whose flag is True has `turns` turns, others have none.
    """
    yield from _flat(steps, flags, turns, itertools.count(1), 0)


def _flat(
    steps: Sequence[Step], flags: Mapping[str, bool], turns: int, before: Iterator[int], offset: int
) -> Iterator[FlatStep]:
    for step in steps:
        if isinstance(step, Publish | Pull) and offset and step.key.part not in LASTING:
            yield dataclasses.replace(step, key=step.key._replace(number=step.key.number + offset))
            continue
        yield step
        entered = isinstance(step, If | Loop) and flags.get(step.flag.name, True)
        if isinstance(step, If):
            yield from _flat(step.then if entered else step.otherwise, flags, turns, before, offset)
        elif isinstance(step, Loop):
            for _ in range(min(turns, step.most) if entered else 0):
                yield LoopIteration(step, starts=True)
                yield from _flat(step.body, flags, turns, before, next(before) * TURN)
                yield LoopIteration(step, starts=False)


def meeting(step: FlatStep) -> tuple[Any, ...] | None:
    """Return what all ranks do together in a step, the same on all of them; None if they do not meet in it."""
    if isinstance(step, Call) and CONTRACTS[step.kernel].together:
        return step.kernel, step.options.get("copies")
    return step.keys if isinstance(step, Deliver) else None


def has_messages(steps: Sequence[Step]) -> bool:
    """Whether ranks have messages in steps, as in a turn of a loop: those in a loop or a branch may be left out."""
    return any(isinstance(step, Publish | Pull) for step in steps)


def lists_in(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Yield a list, and those in it."""
    yield steps
    for step in steps:
        if isinstance(step, If):
            yield from itertools.chain(lists_in(step.then), lists_in(step.otherwise))
        elif isinstance(step, Loop):
            yield from lists_in(step.body)


def messages_to_all(steps: Sequence[Step], ranks: int) -> dict[Key, int]:
    """Return the messages of each rank to all others whose buffers are free again before the next one; and their bytes.

    Their sizes are known, and they are not the host's. The same on all ranks.
    """
    messages: dict[Key, int] = {}
    for some in lists_in(steps):
        own = {step.key: step for step in some if isinstance(step, Publish)}
        pulls: dict[Key, list[Pull]] = {}
        here: dict[str, Key] = {}
        late = set[Key]()
        for step in some:
            if isinstance(step, Pull) and step.key in own and not (step.taken or step.op):
                pulls.setdefault(step.key, []).append(step)
                here.update((buffer.name, step.key) for buffer in step.buffers)
            elif isinstance(step, Drop):
                here.pop(step.buffer.name, None)
            elif isinstance(step, Publish | If | Loop):
                late.update(here.values())
        late.update(here.values())
        for key, theirs in pulls.items():
            parts = [own[key].buffers, *(step.buffers for step in theirs)]
            plain = all(isinstance(x, Buffer) and not x.host and min(x.shape) >= 0 for x in itertools.chain(*parts))
            most = max(sum(-(-x.nbytes // ALIGNED) * ALIGNED for x in buffers) for buffers in parts)
            if len(theirs) == ranks - 1 and plain and key not in late and most <= _MOST_TO_ALL:
                messages[key] = most
    return messages


# What kernels promise, whoever implements them: which arguments they read, update and write, and their flops


Flops = Callable[..., float]


def _none(*shapes: tuple[int, int]) -> float:
    return 0.0


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Contract:
    """The promise of one kernel."""

    # r (read), u (updated) or w (written) for each argument; the last one is that of all that follow.
    roles: str
    # Takes the shapes of the arguments. Real operations; four times as many for complex types.
    flops: Flops = _none
    # Whether it decomposes a small matrix: many short steps, one after the other.
    decomposes: bool = False
    # Whether it makes the same bits of the same values everywhere: sums, products, quotients and square roots of single
    # numbers, one after the other. BLAS, LAPACK, powers, `hypot` and NumPy's products of complex arrays depend on the
    # machine.
    exact: bool = False
    # Whether all ranks meet in it, and send each other what it needs: of products by a library, which is the
    # transport's; of factorizations kernels send messages, more than could be steps.
    together: bool = False


def decomposition(roles: str, factor: float) -> Contract:
    """Return the promise of a kernel that decomposes its first argument."""
    return Contract(roles, lambda r, *_: factor * r[0] * r[1] * min(r), decomposes=True)


# Those of kernels that no builder has for itself; modules of builders add theirs.
CONTRACTS: dict[str, Contract] = {
    # Small matrices, on one rank or on all.
    "add": Contract("ru"),
    # Products. C += A B; C = A B; the lower triangle of C += A A^H; the upper triangle as the lower one.
    "add_product": Contract("rru", lambda *s: 2 * math.sqrt(math.prod(s[-3] + s[-2] + s[-1]))),
    "product": Contract("rrw", lambda *s: 2 * math.sqrt(math.prod(s[-3] + s[-2] + s[-1]))),
    "add_symmetric": Contract("rru", lambda a, b, c: math.sqrt(math.prod(a + b + c))),
    "mirror": Contract("u"),
    # Parts of A or B, side by side in a panel; parts of sums, and of chunks of D, or their adjoints; what the formula
    # reads, and sums, become D, here or where they are, and auxiliary outputs.
    "join": Contract("w"),
    "store": Contract("w"),
    "finish": Contract("uw"),
    "copy": Contract("rw", exact=True),
    "conjugate": Contract("u"),
    # Matrices of all ranks become others in other layouts; D's tiles = A's tiles B's tiles.
    "redistribute": Contract("w", together=True),
    "multiply_tiles": Contract("rrw", together=True),
    "adjoint": Contract("rw"),
    # Traced functions: statements, whose roles and flops are options; exact ones; a constant; one value everywhere;
    # several copies; results of ranks are combined; rows of all ranks; a flag; numbers on their way to limits; the next
    # turn.
    "evaluate": Contract("r"),
    "evaluate_exactly": Contract("r", exact=True),
    "constant": Contract("w", exact=True),
    "set_all": Contract("w", exact=True),
    "merge": Contract("r", exact=True),
    "copy_all": Contract("r", exact=True),
    "assemble": Contract("wr", exact=True),
    "decide": Contract("rw", exact=True),
    "follow": Contract("r"),
    "increment": Contract("u", exact=True),
}


def roles_of(call: Call) -> Iterator[tuple[Buffer | View, str]]:
    """Yield the arguments of a call, and what becomes of each: r, u or w."""
    roles = call.options.get("roles") or "r" * call.options.get("reads", 0) + CONTRACTS[call.kernel].roles
    count = len(call.arguments)
    # There may be none of the last ones.
    roles = roles[: max(count, len(roles) - 1)] + roles[-1] * (count - len(roles))
    yield from zip(call.arguments, roles, strict=True)


def flops_of(call: Call) -> float:
    """Return the floating-point operations of a call."""
    if "flops" in call.options:
        return float(call.options["flops"])
    shapes = [buffer.shape for buffer in call.arguments]
    flops = CONTRACTS[call.kernel].flops(*((max(0, rows), max(0, cols)) for rows, cols in shapes))
    return flops * 4 if any(buffer.dtype.startswith("complex") for buffer in call.arguments) else flops
