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


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Contract:
    """The promise of one kernel."""

    # r (read), u (updated) or w (written) for each argument; the last one is that of all that follow.
    roles: str
    # Takes the shapes of the arguments. Real operations; four times as many for complex types.
    flops: Flops
    # Whether it decomposes a small matrix: many short steps, one after the other.
    decomposes: bool = False
    # Whether it makes the same bits of the same values everywhere: sums, products, quotients and square roots of single
    # numbers, one after the other. BLAS, LAPACK, powers, `hypot` and NumPy's products of complex arrays depend on the
    # machine.
    exact: bool = False
    # Whether all ranks meet in it, and send each other what it needs: of products by a library, which is the
    # transport's; of factorizations kernels send messages, more than could be steps.
    together: bool = False


def _none(*shapes: tuple[int, int]) -> float:
    return 0.0


def _decomposition(roles: str, factor: float) -> Contract:
    return Contract(roles, lambda r, *_: factor * r[0] * r[1] * min(r), decomposes=True)


CONTRACTS: dict[str, Contract] = {
    # Chunks of rows.
    # C += A^H A, the lower triangle; C += A^H B; D = A X; Y = A X with C += A^H Y and G += Y^H Y; R = B - A X;
    # s += the squared norms of columns.
    "gram": Contract("ru", lambda a, g: a[0] * a[1] ** 2),
    "adjoint_times": Contract("rru", lambda a, b, c: 2 * a[0] * a[1] * b[1]),
    "times": Contract("rrw", lambda a, x, d: 2 * a[0] * a[1] * x[1]),
    "back_and_forth": Contract("rrwuu", lambda a, x, *_: 4 * a[0] * a[1] * x[1] + a[0] * x[1] ** 2),
    "residual": Contract("rrrw", lambda a, x, b, r: 2 * a[0] * a[1] * x[1]),
    "square_norms": Contract("ru", lambda r, s: 2 * r[0] * r[1]),
    # G += B^H B with B = A R^-1, which is not kept, or is Q; Q = Q R^-1, Q = Q W, X = W Q^H.
    "gram_of_quotient": Contract("rru", lambda r, a, g: 2 * a[0] * a[1] ** 2),
    "quotient_and_gram": Contract("rrwu", lambda r, a, q, g: 2 * a[0] * a[1] ** 2),
    "divide": Contract("ru", lambda r, q: q[0] * q[1] ** 2),
    "multiply": Contract("ru", lambda w, q: 2 * q[0] * q[1] ** 2),
    "times_adjoint": Contract("rrw", lambda w, q, x: 2 * q[0] * q[1] * w[0]),
    # R of [R; A]; Q and R of A, padded with zeros to n rows, and how many it has; [A B]; A and B of the last rows of
    # [A B]; A - the mean of its columns.
    "reflect": Contract("ru", lambda a, r: 2 * (a[0] + r[0]) * r[0] ** 2),
    "factor": Contract("rwww", lambda a, *_: 4 * a[0] * a[1] ** 2),
    "append": Contract("rrw", _none),
    "last_rows": Contract("rww", _none),
    "centre": Contract("rrw", lambda a, mean, c: a[0] * a[1]),
    # The number of rows, the means of columns, and the Gram matrix of the centred rows, of more rows; of two parts.
    "moments": Contract("ruuu", lambda a, *_: a[0] * a[1] ** 2),
    "merge_moments": Contract("rrruuu", lambda c, mean, g, *_: 2 * g[0] ** 2),
    # Raise if a matrix is not finite, by R of [A B], or by A^H B where A^H A is.
    "check": Contract("r", _none),
    "check_right": Contract("rr", _none),
    # Small matrices, on one rank or on all.
    "add": Contract("ru", _none),
    # Products. C += A B; C = A B; the lower triangle of C += A A^H; the upper triangle as the lower one.
    "add_product": Contract("rru", lambda *s: 2 * math.sqrt(math.prod(s[-3] + s[-2] + s[-1]))),
    "product": Contract("rrw", lambda *s: 2 * math.sqrt(math.prod(s[-3] + s[-2] + s[-1]))),
    "add_symmetric": Contract("rru", lambda a, b, c: math.sqrt(math.prod(a + b + c))),
    "mirror": Contract("u", _none),
    # Parts of A or B, side by side in a panel; parts of sums, and of chunks of D, or their adjoints; what the formula
    # reads, and sums, become D, here or where they are, and auxiliary outputs.
    "join": Contract("w", _none),
    "store": Contract("w", _none),
    "finish": Contract("uw", _none),
    "copy": Contract("rw", _none, exact=True),
    "conjugate": Contract("u", _none),
    # Matrices of all ranks become others in other layouts; D's tiles = A's tiles B's tiles.
    "redistribute": Contract("w", _none, together=True),
    "multiply_tiles": Contract("rrw", _none, together=True),
    "adjoint": Contract("rw", _none),
    "normal": Contract("w", _none),
    # R of a Gram matrix; whether that is R of A already, and whether it is good enough to divide by.
    "gram_factor": _decomposition("rwww", 2),
    # R2 of a Gram matrix of A R1^-1, R2 R1, and whether A (R2 R1)^-1 is orthonormal.
    "second_factor": _decomposition("rrwww", 2),
    # R of stacked triangles, and how many rows it has; triangles become the blocks of the stack's Q.
    "stack": Contract("wwu", lambda r, _, *t: 2 * len(t) * r[0] ** 3),
    "orthonormalize": _decomposition("rw", 4),
    "solve": Contract("ru", lambda r, b: r[0] ** 2 * b[1]),
    "quotient": Contract("rrw", lambda r, b, _: r[0] ** 2 * b[0]),
    "inverse": _decomposition("rw", 1),
    "pseudo_inverse": _decomposition("rrw", 1),
    "singular_values": _decomposition("rw", 3),
    "singular_vectors": _decomposition("rwww", 20),
    "covariance": Contract("rrw", _none),
    "hermitian": Contract("rrw", lambda s, vh, _: 2.0 * vh[0] ** 3),
    "principal": _decomposition("rrwwww", 9),
    "principal_of_r": _decomposition("rrww", 20),
    # Least squares: from R and A^H B; one step of refinement; from R of [A B]. Ridge: from A^H A and A^H B, or that R.
    "solve_normal": Contract("rrw", lambda r, c, x: 2 * r[0] ** 2 * c[1]),
    "refine": Contract("rrrrww", lambda r, d, *_: 2 * r[0] ** 2 * d[1]),
    "full_rank": _decomposition("rww", 3),
    "least_squares": _decomposition("rwwww", 20),
    "ridge": _decomposition("rrwww", 1),
    "refine_ridge": _decomposition("rrrw", 1),
    "ridge_of_r": _decomposition("rw", 20),
    # Traced functions: statements, whose roles and flops are options; exact ones; a constant; one value everywhere;
    # several copies; results of ranks are combined; rows of all ranks; a flag; numbers on their way to limits; the next
    # turn.
    "evaluate": Contract("r", _none),
    "evaluate_exactly": Contract("r", _none, exact=True),
    "constant": Contract("w", _none, exact=True),
    "set_all": Contract("w", _none, exact=True),
    "merge": Contract("r", _none, exact=True),
    "copy_all": Contract("r", _none, exact=True),
    "assemble": Contract("wr", _none, exact=True),
    "decide": Contract("rw", _none, exact=True),
    "follow": Contract("r", _none),
    "increment": Contract("u", _none, exact=True),
    # Factorizations in block columns, in place; what a kernel returns is named behind a colon.
    # L : info. L U : pivots. R and reflectors V : T, with I - V T V^H.
    "potrf": Contract("u", lambda a: a[1] ** 3 / 3),
    # L and D of L D L^H: D; each column divided by a number.
    "ldlt": Contract("u", lambda a: 2 * a[1] ** 3 / 3),
    "divide_columns": Contract("ur", lambda b, d: b[0] * b[1]),
    "getrf": Contract("u", lambda a: a[0] * a[1] * min(a) - (a[0] + a[1]) * min(a) ** 2 / 2 + min(a) ** 3 / 3),
    "geqrt": Contract("u", lambda a: 2 * a[0] * a[1] ** 2 - 2 * a[1] ** 3 / 3),
    # B = op(A)^-1 B, or B op(A)^-1; C = alpha op(A) op(B) + beta C; B with rows swapped; B = (I - V T V^H) B, or by ^H.
    "trsm": Contract("ru", lambda a, b: a[0] * b[0] * b[1]),
    "gemm": Contract("rru", lambda a, b, c: 2 * math.sqrt(math.prod(a + b + c))),
    "laswp": Contract("ur", _none),
    "larfb": Contract("rru", lambda v, t, b: 4 * v[0] * v[1] * b[1]),
    # Block columns of the lower triangle of A - V V^H, or A - V D V^H: half of what the first one has, on average.
    "update_lower": Contract("rur", lambda v, b, *_: v[0] * v[1] * b[1]),
    # Raise if a matrix is not positive definite, by potrf's info; or is singular, by the diagonal of a factor.
    "check_minor": Contract("r", _none),
    "check_diagonal": Contract("r", _none),
    # : a copy; : the diagonal. Zeros; an identity's columns.
    "copied": Contract("r", _none),
    "diagonal": Contract("r", _none),
    # By the pivots of all panels: L's block columns with all rows swapped; rows and numbers of the whole matrix. The
    # squared norms of columns.
    "swap_rows": Contract("rwr", _none),
    "pivots": Contract("r", _none),
    "permutation": Contract("r", _none),
    "concatenate": Contract("r", _none),
    "determinant": Contract("r", _none),
    "column_norms": Contract("rw", _none),
    "clear": Contract("u", _none),
    "identity": Contract("u", _none),
    # Refinement (`programs.refine`). Of A as chunks have it: sums and maxima of rows, and the diagonal; a product.
    "measure": Contract("w", _none),
    "multiply_chunks": Contract("ru", _none),
    # Numbers for rows, and the norm; A's columns by numbers; the least and the largest element of a factor's diagonal.
    "weigh": Contract("wwr", _none, exact=True),
    "scale_columns": Contract("uw", _none),
    # The order of rows: by pivots that are an operand; as they are. Rows in that order; a panel of L and the order as
    # the swaps of later panels, and then of its own, make them.
    "order_of_rows": Contract("w", _none),
    "count_rows": Contract("w", _none),
    "permute_rows": Contract("ru", _none),
    "swap_later": Contract("uur", _none),
    # Of factors that a rank has all of: a part of a panel; inverses of blocks on the diagonal; a triangle, with these.
    "keep_panel": Contract("rw", _none),
    "invert_blocks": Contract("rw", lambda a, v: a[0] * v[0] ** 2),
    "solve_whole": Contract("rru", lambda a, v, b: a[0] * b[0] * b[1]),
    "diagonal_range": Contract("wr", _none),
    # A residual in the type of the factors; a correction in that of A; the next residual, or the end.
    "weighted": Contract("rrw", _none),
    "scale_residual": Contract("rrww", _none),
    "correct": Contract("rrrwu", _none),
    "refine_step": Contract("rrrruuuuuuuu", _none),
    "judge_factors": Contract("wwwr", _none, exact=True),
    "judge": Contract("wwwr", _none, exact=True),
    "take_other_way": Contract("u", _none, exact=True),
    # Of the whole matrix: eigenvalues and the like. Of all ranks' block columns: T of the reflectors; eigenvalues, and
    # the eigenvectors of a tridiagonal matrix; their phases.
    "decompose": Contract("u", _none),
    "tridiagonalize": Contract("u", lambda a: 4 / 3 * a[0] ** 2 * a[1], together=True),
    "diagonalize": Contract("u", _none, together=True),
    "normalize_phases": Contract("u", _none),
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
