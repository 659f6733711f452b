"""One participant's side of a run in which ranks take the steps of a program.

A job is given kernels, the memory in which they compute (`Memory`), and a `Transport`. What a rank publishes others get
by that, as soon as it is there.

Chunks of tall matrices stay where they are. Those that are elsewhere are asked for before the first step; those that
this rank makes are made in threads, some ahead of the steps, once for each pass over the operand, and dropped.

Of a factorization, whose matrices are in block columns::

    prepare()   the rank's block columns are allocated
    Load        parts of an operand's chunks are fetched from their holders (``"input"``), and written there
    Publish     the rank's block columns of a result are complete (``"final"``)
    Deliver     the rank's chunks of the results are put together from all ranks' block columns
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ChunkKey, Job, ResultKey, Side, wait_checked
from dask_distmm.engines.heap import heap
from dask_distmm.engines.programs.blas import Kernels, assign
from dask_distmm.engines.programs.exchange import Transport
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.layout import Copy
from dask_distmm.numeric.sparse import rows_from, sparse_package
from dask_distmm.numeric.types import dtype_from_name, store
from dask_distmm.planning import Plan
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.footprint import made_ahead
from dask_distmm.planning.groups import ChunkBlock, chunk_blocks_of, chunk_name
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.programs.steps import (
    CONTRACTS,
    FINAL,
    LASTING,
    TURN,
    Buffer,
    Call,
    Deliver,
    Drop,
    If,
    Key,
    Lane,
    Load,
    Loop,
    New,
    Publish,
    Pull,
    Reserve,
    Step,
    Store,
    Take,
    View,
    has_messages,
)

# Rows that are transposed at once: 16 of float64 fill two lines of a cache in each column.
_STRIP = 16
# Elements that are multiplied by numbers at once.
_ELEMENTS = 2**26
# Forms with zeros in the other triangle.
TRIANGLES = ("lower", "unit lower", "upper")


class Part(NamedTuple):
    """A part of a matrix to fetch from a participant, and its destination."""

    # The row of `Boxes` that it is.
    box: tuple[int, ...]
    # The rectangle that it fills, and the row and column of the whole matrix at which that begins.
    place: Any
    row: int
    col: int
    # What there is of it in its place; see `keep_triangle`.
    form: str
    # Whether its transpose, or conjugate, is written.
    transposed: bool
    conjugated: bool


class Transfer(NamedTuple):
    """Parts of a matrix on their way: of an operand to block columns of ranks, or of these to chunks of an output."""

    # ``"input"`` or `FINAL`, and the number of the operand or output.
    kind: str
    number: int
    # The copies that a rank takes, by its number; the participant that holds each source; the destinations on this one.
    taken: Callable[[int], Iterable[Copy]]
    holders: Sequence[int] | NDArray[np.int32]
    targets: Mapping[int, Any]
    # See `Part`.
    form: str
    transposed: bool
    conjugated: bool


# Number of messages that are requested before they are needed: then they come as soon as they are there. Only one if it
# keeps the memory in which it comes, and that is more than this many bytes.
_AHEAD, _LARGE = 4, 2**20
_HERE = contextlib.nullcontext()
# Turns of a loop whose steps are taken one by one: it takes as long as some of them to write the others out.
_BY_STEPS = 4
# Seconds between two looks at how far turns of a loop have come.
_REPORTED = 0.01


class Memory:
    """Allocates and copies the arrays that a rank computes with; here in the host memory of its process."""

    @property
    def making(self) -> tuple[Any, ...]:
        """Functions that a `ChunkLoader` calls on loaded chunks."""
        return ()

    def upload(self, chunks: dict[ChunkKey, Any]) -> dict[ChunkKey, Any]:
        """Copy chunks to this memory."""
        return chunks

    def fill(self) -> None:
        """Copy uploaded chunks to their memory, where that is not done at once."""

    def complete(self) -> None:
        """Wait for the uploads that other ranks read after the vote."""

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """Compute here inside of a ``with`` block."""
        return _HERE

    def take_turn(self, job: ProgramJob, body: Sequence[Step]) -> None:
        """Run the steps of an iteration of a loop."""
        job.take(body, share=0.0, ahead=len(body))

    def kernel(self, kernels: Any, call: Call) -> Any:
        """Return the kernel of a call."""
        return getattr(kernels, call.kernel)

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def note(self, *arrays: Any) -> None:
        """Record memory that was allocated beside chunks."""

    def new(self, make: Callable[[], Any], *, kept: bool) -> Any:
        """Allocate an array; `kept`: it is returned to Dask."""
        return make()

    def blank(self, shape: tuple[int, int], dtype: np.dtype, order: Literal["C", "F"], form: str) -> Any:
        """Allocate a chunk of an output, zero where no rank computes a part of it."""
        # Zeros, as the system gives them, are free of charge until they are written to.
        return np.zeros(shape, dtype, order)

    def arrived(self, chunk: Any) -> Any:
        """Return a loaded chunk, after its upload."""
        return chunk

    def reuse(self) -> None:
        """Reuse a loaded chunk's memory for the next one."""

    def lent(self, array: Any, *, copied: bool) -> Any:
        """Return the form in which an array is published."""
        return array.copy(order="K") if copied else array

    def write(self, target: Any, part: Any) -> None:
        """Copy a published array of another rank to a buffer."""
        store(target, part)

    def put(self, job: ProgramJob, parts: Sequence[Part], arrays: Iterable[Any]) -> None:
        """Copy arrays to the destinations of parts."""
        for part, array in zip(parts, arrays, strict=True):
            job.ended.check()
            put(job.blas, part, array, job.scales)

    def handed_over(self, array: Any, *, tall: bool) -> Any:
        """Return a chunk of an output in the form that is returned to Dask."""
        return np.ascontiguousarray(array)

    def stored(self, array: Any, *, tall: bool) -> Any:
        """Return a chunk of a product's output, which may be on its way to the host; see `delivered`."""
        return array

    def delivered(self, chunk: Any, output: str) -> Any:
        """Return a chunk of a result of a factorization, or of a product, in the form that is returned to Dask."""
        return chunk

    def sent(self, arrays: list[Any]) -> list[Any]:
        """Return arrays in the form that is sent over Dask's comms."""
        return arrays

    def held_bytes(self, chunks: Sequence[Any]) -> int:
        """Return the bytes of device memory held by the run, with its chunks."""
        return 0


class ProgramJob(Job[Any]):
    """One participant's side of a run whose ranks take steps, and publish what others need."""

    lends = True

    def __init__(
        self,
        side: Side[Any],
        kernels: Any,
        memory: Memory | None = None,
        transport: Callable[[ProgramJob], Transport] | None = None,
    ) -> None:
        super().__init__(side)
        self.memory = memory or Memory()
        # Steps call methods of `kernels` by name; `blas` queues calls on lanes.
        self.blas: Any = kernels
        self.kernels: Any = kernels
        self.arrays: dict[str, Any] = {}
        # Keys published so far, in order; the turns of all loops so far; the offset of numbers of messages.
        self._held: dict[Key, None] = {}
        self._turns = self._offset = 0
        # How many loops are around what is taken; when the next look at how far it has come is due.
        self._depth, self._due = 0, 0.0
        # Of what came from others and is kept in the memory in which it came, by the name of the first buffer.
        self._taken: dict[str, Key] = {}
        # Whether operands are gathered into block columns, and results are delivered from there.
        self.gathers = isinstance(self.plan, FactorPlacement)
        # Whether it is a product.
        self.multiplies = isinstance(self.plan, Plan)
        self.steps: tuple[Any, ...] = ()
        self.result: dict[ResultKey, Any] = {}
        # By the names of buffers the blocks that are loaded to them, with requests of which they are parts.
        self._coming: dict[str, Any] = {}
        # Rows of chunks of operands by their names, also when they are gone.
        self._lengths: dict[str, int] = {}
        self._asked: dict[ChunkKey, Future[Sequence[Any]]] = {}
        # Chunks of operands that were here before the run, and are still needed.
        self._operands: set[str] = set()
        # The loader of chunks in the order of the steps, and those chunks.
        self._loads: ChunkLoader | None = None
        self._uses = collections.deque[SourceChunk]()
        # Parts of operands that are to be finite: row and column at which they begin, where they are, and their sums.
        self._sums: list[tuple[str, int, int, Any, Any]] = []
        # By what rows, and columns, of an operand are multiplied while they are gathered.
        self.scales: Sequence[Any] = ()
        self.exchange = transport(self) if transport else Transport(self.plan.ranks, self.comm, self.ended.check)

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices received from other participants."""
        return super().received_bytes + self.exchange.pulled_bytes

    @property
    def in_loop(self) -> bool:
        """Whether an iteration of a loop is running."""
        return self._offset > 0

    # Before the work

    def prepare(self) -> None:
        """Allocate the memory of the run, and return the handles by which other ranks read it."""
        self.chunks = self.memory.upload(self.chunks)
        if self.multiplies and self.rank is not None:
            self._prepare_product(self.rank)
        elif self.rank is not None:
            self.steps = self.plan.steps(self.rank)
            for step in self.steps[:1]:
                if isinstance(step, Reserve):
                    self._take(step)
            self.kernels = self._program_kernels(self.rank)
        if not self.multiplies or self.blas.asynchronous or has_messages(self.steps):
            self.offer = self.exchange.offer(self)
        self.memory.complete()

    def _prepare_product(self, rank: int) -> None:
        """Allocate this rank's sums, or reuse the earlier ones that it adds to; on GPUs allocate all buffers."""
        plan, here = self.plan, ((key, x) for key, x in self.chunks.items() if not isinstance(x, SourceChunk))
        self.arrays = {chunk_name(*key): chunk for key, chunk in here}
        if plan.problem.accumulates_in_place:
            keys = [("partial", index) for index in plan.owned(rank).tolist()]
            # One that came from another process may be read-only.
            self.consumed = [key for key in keys if key in self.chunks and self.chunks[key].flags.writeable]
        steps = plan.steps(rank, {index for _, index in self.consumed}, self._is_usable)
        if self.blas.asynchronous:
            # Queued work needs its memory until it is done.
            before = [step for step in steps if isinstance(step, New)]
            steps = tuple(step for step in steps if not isinstance(step, New | Drop) or step.buffer.is_operand)
        else:
            first = itertools.takewhile(lambda x: isinstance(x, New) or getattr(x, "operand", "") == "partial", steps)
            before = [*first]
            steps = steps[len(before) :]
        for step in before:
            self._take(step)
        self.memory.note(*self.arrays.values())
        self.steps = self._compiled(steps)

    def _compiled(self, steps: tuple[Step, ...]) -> tuple[Any, ...]:
        """Return what is taken in place of steps, when all buffers are there."""
        return steps

    def _is_usable(self, operand: int, number: int) -> bool:
        """Whether a chunk of A (0) or B (1) can be multiplied as it is."""
        return bool(self.kernels.usable(operand, self.chunks["ab"[operand], number]))

    def _program_kernels(self, rank: int) -> Any:
        """Return the kernels of this plan's programs."""
        # Workers that only multiply import none of it.
        from dask_distmm.engines.programs.kernels import ProgramKernels
        from dask_distmm.engines.tridiagonal import SharedEigh

        if not (self.gathers and self.plan.shared):
            problem = self.plan.problem
            kernels = ProgramKernels(self.blas, may_skip=getattr(problem, "may_skip", True))
            kernels.constants = getattr(problem, "constants", ())
            if self.gathers:
                # A circle would keep the job until Python looks for such.
                kernels.prepare(weakref.WeakMethod(self._multiplied), weakref.WeakMethod(self._pivots), problem.task)
            return kernels
        return (self.exchange.eigh or SharedEigh)(
            self.plan, rank, self.blas, self.exchange, self.ended.check, self.progress
        )

    def accept(self, offers: Sequence[Any]) -> None:
        """Take what all participants offer."""
        self.exchange.accept(offers)

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Run all steps; return the chunks of results."""
        if self.rank is None:
            return {}
        # Infinities and NaN are checked for where they matter.
        threads, reported = self.plan.participants[self.me].nthreads, self.kernels.reported
        # Of a traced function threads share strips of rows, each with a BLAS of one thread.
        shared = getattr(self.plan.problem, "builder", "") == "traced" and not self.blas.asynchronous
        self.kernels.threads = threads if shared else 1
        try:
            with np.errstate(all="ignore"), self.blas.working(1 if shared else threads), self.memory.working():
                self.exchange.begin(self)
                with heap if shared else _HERE, self.exchange:
                    self._take_all(reported)
        finally:
            self.exchange.settle(self)
        self.timings |= self.kernels.timings
        self.held_bytes += self.memory.held_bytes((*self.chunks.values(), *self.result.values()))
        return self.result

    def _take_all(self, reported: float) -> None:
        for step in self.steps if not self.gathers else ():
            if isinstance(step, Take) and not self._is_made(step):
                self._operands.add(step.buffer.name)
                if (step.operand, step.number) not in self.chunks:
                    self._asked[step.operand, step.number] = self._ask(step)
        began = time.perf_counter()
        self.timings |= {"wait": 0.0} | ({"load": 0.0} if self.plan.problem.by_ranks else {})
        self.take(self.steps, reported, 1 - reported)
        self._synchronize()
        phases = "wait", "load", "gather", *["deliver"] * self.gathers
        spent = sum(self.timings.get(phase, 0.0) for phase in phases)
        self.timings["work"] = time.perf_counter() - began - spent
        if self.blas.asynchronous and not self.multiplies:
            self.timings["compute"] = self.timings["work"]
        began = time.perf_counter()
        self._look()
        self._synchronize()
        if self.gathers or self.multiplies:
            self.result = {key: self.memory.delivered(chunk, key[0]) for key, chunk in self.result.items()}
        if self.gathers:
            self._note("deliver", began)

    def _look(self) -> None:
        """Run the deferred checks; raise on all ranks if one of them fails."""
        self.exchange.look(self)
        problem = ""
        try:
            self.kernels.complete()
        except MatrixError as error:
            problem = str(error)
        self._refuse(problem)

    def _synchronize(self) -> None:
        """Wait for all messages and queued work."""
        self.exchange.complete()
        self.memory.synchronize()

    def take(self, steps: Sequence[Any], before: float = 0.0, share: float = 1.0, ahead: int = _AHEAD) -> None:
        """Run steps, which are this `share` of the work, with at most `ahead` requests in flight."""
        pulls = collections.deque(step for step in steps if isinstance(step, Pull))
        requests = collections.deque[tuple[Pull, Any]]()
        with self._making(steps):
            for number, step in enumerate(steps):
                self.ended.check()
                while pulls and self._may_ask(pulls[0], requests, ahead):
                    requests.append((pulls[0], self._request(pulls.popleft())))
                done, part = before + share * number / len(steps), share / len(steps)
                if isinstance(step, If):
                    self.take(step.then if self._is_set(step.flag) else step.otherwise, done, part)
                elif isinstance(step, Loop):
                    self._repeat(step, done, part)
                elif isinstance(step, Pull):
                    self._arrive(*requests.popleft())
                else:
                    self._take(step)
                if share:
                    self.progress(done + part)

    def _repeat(self, loop: Loop, before: float, share: float) -> None:
        outside = self._offset
        self._depth += 1
        for turn in self._turns_of(loop):
            if share:
                self.turns = turn + 1, loop.most * (loop.most == loop.expected)
            self.progress(before + share * max(self.kernels.reached, (turn + 1) / loop.most))
        self._depth -= 1
        self._offset = outside

    def _turns_of(self, loop: Loop) -> Iterator[int]:
        """Run the iterations of a loop, the later ones by its compiled function; yield after each."""
        nested, frees = any(isinstance(step, Loop) for step in loop.body), has_messages(loop.body)
        for turn in range(loop.most):
            if not self._is_set(loop.flag):
                return
            if turn == (0 if nested else _BY_STEPS) and (turns := self._written_out(loop)):
                yield from turns(turn)
                return
            held = self._begin_turn()
            self.memory.take_turn(self, loop.body)
            self._end_turn(held if frees else [])
            yield turn

    def _written_out(self, loop: Loop) -> Callable[[int], Iterator[int]] | None:
        """Return a loop's iterations compiled to a function, or None."""
        if self.gathers or self._depth > 1 or self.kernels.xp is not np:
            return None
        from dask_distmm.engines.programs.turns import written_out

        functions: dict[str, Callable[..., Any]] = {
            "begins": self._begin_turn,
            "ends": self._end_turn,
            "publish": self._publish,
            "request": self._request,
            "get": self._get,
            "due": self._is_due,
            "offset": self._continue_at,
        }
        return written_out(loop, self.arrays, self.kernels, self._new, functions)

    def _continue_at(self, offset: int | None = None) -> int:
        """Set and return the offset of message numbers in an iteration."""
        self._offset = self._offset if offset is None else offset
        return self._offset

    def _is_due(self) -> bool:
        """Whether a report of progress is due."""
        if (now := time.perf_counter()) < self._due:
            return False
        self._due = now + _REPORTED
        return True

    def _begin_turn(self) -> list[Key]:
        """Begin an iteration; return the keys published before it."""
        self._turns += 1
        self._offset = self._turns * TURN
        return list(self._held)

    def _end_turn(self, held: Sequence[Key]) -> None:
        """End an iteration; if it synchronized all ranks, release what was published before it."""
        self.ended.check()
        if held:
            self.exchange.meet()
        for key in held:
            if key in self._held and key.part not in LASTING:
                del self._held[key]
                self.exchange.forget(key)

    def _is_set(self, flag: Buffer) -> bool:
        return bool(self.arrays[flag.name].all())

    def _numbered(self, key: Key) -> Key:
        """Return a message's key in this iteration."""
        return key if key.part in LASTING else Key(key.part, key.number + self._offset)

    def _request(self, pull: Pull) -> Any:
        """Request a message."""
        if self.exchange.queues(pull):
            return None
        return self.exchange.ask(pull.owner, self._numbered(pull.key), pull.buffers)

    def _may_ask(self, pull: Pull, requests: Sequence[tuple[Pull, Any]], ahead: int) -> bool:
        """Whether another message may be requested while these are in flight."""
        if self.multiplies:
            # Those of one number come together: parts of chunks of D that others have finished.
            most: int = self.plan.problem.options.prefetch_panels
            return len({earlier.key for earlier, _ in requests} | {pull.key}) <= most
        return len(requests) < (1 if pull.taken and pull.nbytes > _LARGE else ahead)

    def _take(self, step: Step) -> None:
        arrays = self.arrays
        match step:
            case Drop(buffer):
                self._free(buffer)
                if buffer.name in self._taken:
                    self.exchange.drop(self._taken.pop(buffer.name))
            case New(buffer, zero) if self.multiplies:
                arrays[buffer.name] = self.kernels.new(buffer, zero=zero)
            case New(buffer, zero):
                arrays[buffer.name] = self._zeros(buffer) if zero else self._new(buffer)
            case Call():
                self._call(step)
            case Take():
                self._make(step)
            case Load():
                self._load(step)
            case Reserve(buffer) if buffer.name not in arrays:
                arrays[buffer.name] = self.exchange.columns(self, buffer)
            case Publish():
                self._publish_step(step)
            case Store():
                self._store(step)
            case Deliver():
                self._deliver(step)

    def _publish_step(self, step: Publish) -> None:
        """Publish buffers."""
        if self.exchange.queues(step):
            self.exchange.write([self.at(buffer) for buffer in step.buffers])
            return
        with self._on(step.lane):
            lent = [self.exchange.lend(self, self.at(buffer), copied=step.copied) for buffer in step.buffers]
            self._publish(step.key, lent)

    def _publish(self, key: Key, arrays: Sequence[Any]) -> None:
        key = self._numbered(key)
        self._held[key] = None
        self.exchange.publish(key, arrays)

    def _on(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        return self.blas.on(lane) if lane else _HERE

    def _call(self, call: Call) -> None:
        for place in call.arguments if self._coming else ():
            self._await(place)
        began, contract = time.perf_counter(), CONTRACTS[call.kernel]
        kernel = self.memory.kernel(self.exchange if contract.together and self.multiplies else self.kernels, call)
        arguments = [self.at(buffer) for buffer in call.arguments]
        if call.lane:
            with self.blas.on(call.lane):
                outputs = kernel(*arguments, **call.options)
        else:
            outputs = kernel(*arguments, **call.options)
        if call.makes:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            self.arrays |= {buffer.name: array for buffer, array in zip(call.makes, outputs, strict=True)}
        if not self.blas.asynchronous:
            self._note(self._phase(call), began)

    def _phase(self, call: Call) -> str:
        if self.gathers:
            return "panel" if call.lane in ("ahead", "panel") else "update"
        if self.multiplies:
            return "deliver" if call.kernel in ("store", "finish") else "multiply"
        return f"{call.kernel}()"

    def _arrive(self, pull: Pull, request: Any) -> None:
        if self.exchange.queues(pull):
            parts = self.exchange.read(pull)
            self.arrays |= {buffer.name: part for buffer, part in zip(pull.buffers, parts, strict=True)}
            return
        key, arrays = self._numbered(pull.key), self._get(request, again=pull.taken)
        for buffer, part in zip(pull.buffers, arrays, strict=True):
            if pull.taken:
                self.arrays[buffer.name] = part
                self._taken.setdefault(pull.buffers[0].name, key)
            elif pull.op:
                place = self.at(buffer)
                place += part
            else:
                self.exchange.fill(self, self.at(buffer), part, pull.owner)

    def _get(self, request: Any, *, again: bool = False) -> Sequence[Any]:
        """Wait for the arrays of a request, and time the wait."""
        began = time.perf_counter()
        arrays = self.exchange.get(request, again=again)
        self._note("wait", began)
        return arrays

    def _note(self, phase: str, began: float) -> None:
        self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - began

    def at(self, place: Buffer | View) -> Any:
        """Return the array of a buffer, or of a rectangle of one."""
        if isinstance(place, Buffer):
            return self.arrays[place.name]
        top, bottom, left, right = place.box
        return self.arrays[place.buffer.name][top:bottom, left:right]

    # What steps mean for chunks, and for the memory of a device

    def _make(self, step: Take) -> None:
        """Put a chunk of an operand into its buffer."""
        made = self._loads is not None and self._is_made(step)
        chunk = self._made(self._uses.popleft()) if made else self._chunk(step.operand, step.number)
        self._begin(step, chunk)

    def _load(self, load: Load) -> None:
        """Ask for parts of operands; gather this rank's block columns."""
        if not load.rects:
            self.scales = [self.at(scale) for scale in load.by]
            self._fill_columns(load.operands[0], self.at(load.places[0]))
            self.scales = ()
            return
        pieces = collections.defaultdict[int, list[tuple[Buffer | View, ChunkBlock]]](list)
        for place, name, rect in load:
            number, where = self.plan.problem.operands.index(name), self.plan.where[name]
            for block in chunk_blocks_of(self.plan.problem[name].chunks, number, rect):
                pieces[int(where[block.chunk])].append((place, block))
        coming = []
        for holder, some in pieces.items():
            boxes = np.array([(block.operand, block.chunk, *block.box) for _, block in some], np.int64)
            here = holder in (self.me, EVERYWHERE)
            coming.append((some, self.serve("input", boxes) if here else self.comm.fetch(holder, "input", boxes)))
        self._coming |= dict.fromkeys((place.name for place in load.places), coming)

    def _await(self, place: Buffer | View) -> None:
        """Wait for what is loaded to a buffer, and with it: a buffer begins as what comes, or that is copied to it."""
        for some, answer in self._coming.get(place.name, ()):
            arrays = self._get(answer) if isinstance(answer, Future) else answer
            for (target, block), array in zip(some, arrays, strict=True):
                self._coming.pop(target.name, None)
                if array.shape != (block.rows, block.cols):
                    raise EngineError(f"a participant sent a matrix of shape {array.shape}, expected {block}")
                if target.shape == array.shape:
                    self.arrays[target.name] = array
                    continue
                if target.name not in self.arrays:
                    self.arrays[target.name] = self.kernels.new(target.buffer, zero=False)
                self.arrays[target.name][block.row : block.row + block.rows, block.col : block.col + block.cols] = array

    def _store(self, step: Store) -> None:
        """Store a buffer, or a copy of a rectangle of one, as a chunk of an output."""
        place, key = step.buffer, (step.output, step.number)
        if self._coming:
            self._await(place)
        if isinstance(place, Buffer):
            hand_over = self.memory.stored if self.multiplies else self.memory.handed_over
            self.result[key] = hand_over(self.arrays.pop(place.name), tall=bool(place.like))
            return
        top, bottom, left, right = place.box
        # Kernels return vectors and numbers as such.
        part = self.blas.xp.asarray(self.arrays[place.name].reshape(place.buffer.shape)[top:bottom, left:right])
        order: Literal["C", "F"] = "F" if part.strides[0] < part.strides[1] else "C"
        self.result[key] = chunk = self.memory.blank(part.shape, np.dtype(place.dtype), order, "full")
        assign(chunk, part)

    def _new(self, buffer: Buffer) -> Any:
        """Allocate a buffer."""
        rows, cols = buffer.shape
        if (part := self.exchange.new(buffer)) is not None:
            return part
        if buffer.host:
            return np.empty((rows, cols), np.dtype(buffer.dtype))
        if buffer.like:
            here = self._lengths[buffer.like]
            rows, cols = (here if rows < 0 else rows), (here if cols < 0 else cols)
        tall, dtype = bool(buffer.like), dtype_from_name(buffer.dtype)
        return self.memory.new(lambda: self.kernels.empty((rows, cols), dtype, tall=tall), kept=tall)

    def _zeros(self, buffer: Buffer) -> Any:
        """Allocate a buffer filled with zeros."""
        array = self._new(buffer)
        array[...] = 0
        return array

    # Chunks of tall matrices

    def _is_made(self, step: Step) -> TypeGuard[Take]:
        """Whether a step needs a chunk that this rank computes."""
        return isinstance(step, Take) and isinstance(self.chunks.get((step.operand, step.number)), SourceChunk)

    @contextlib.contextmanager
    def _making(self, steps: Sequence[Step]) -> Iterator[None]:
        """Compute the chunks that some steps need in background threads, within a ``with`` block (nestable)."""
        chunks = (self.chunks[step.operand, step.number] for step in steps if self._is_made(step))
        # Chunks are loaded again in each pass over an operand, those of A and B of a product once.
        uses = [chunk if self.multiplies else chunk.again() for chunk in chunks]
        if not uses:
            yield
            return
        outside, loads = (self._loads, self._uses), self._loader(uses)
        self._loads, self._uses = loads, collections.deque(uses)
        try:
            yield
        finally:
            loads.close()
            self._loads, self._uses = outside

    def _loader(self, uses: Sequence[SourceChunk]) -> ChunkLoader:
        """Return a loader of chunks in this order."""
        threads = self.plan.participants[self.me].nthreads
        return ChunkLoader(uses, threads, made_ahead(threads) * len(self.plan.problem.by_ranks), *self.memory.making)

    def _made(self, chunk: SourceChunk) -> Any:
        """Wait for a chunk of the loader."""
        assert self._loads is not None
        began = time.perf_counter()
        array = self._loads.take(chunk, self.ended.check)
        self.timings["load"] += time.perf_counter() - began
        return self.memory.arrived(array)

    def _begin(self, step: Take, chunk: Any) -> None:
        """Bind a chunk of an operand to its buffer, converted to the buffer's type."""
        name, dtype = step.buffer.name, dtype_from_name(step.buffer.dtype)
        if sparse_package(chunk):
            self.arrays[name] = chunk if chunk.dtype == dtype else chunk.astype(dtype)
        else:
            array = self.kernels.xp.asarray(chunk, dtype)
            # BLAS reads no broadcast rows, as those of `da.zeros`; what NumPy does instead takes 15 times as long.
            self.arrays[name] = array.copy() if 0 in array.strides else array
        self._lengths[name] = chunk.shape[0]

    def _ask(self, step: Take) -> Future[Sequence[Any]]:
        """Return the future of another participant's chunk: copied if readable, else requested."""
        operand, holder = (
            self.plan.problem.operands.index(step.operand),
            int(self.plan.where[step.operand][step.number]),
        )
        box = operand, step.number, *self.plan.whole(step.operand, step.number)
        if not self.exchange.reads("input", holder, box):
            return self.comm.fetch(holder, "input", np.array([box], np.int64))
        copied: Future[Sequence[Any]] = Future()
        copied.set_result([self._whole(step.operand, step.number)])
        return copied

    def _chunk(self, operand: str, number: int) -> Any:
        """Return a chunk of an operand that was there before the run."""
        if (operand, number) in self._asked:
            parts = wait_checked(self._asked.pop((operand, number)), self.ended.check)
            return rows_from(parts, self.plan.whole(operand, number)[-1]) if len(parts) > 1 else parts[0]
        return self.chunks[operand, number]

    def _free(self, buffer: Buffer) -> None:
        """Free a buffer; report when the last operand chunk of this rank is freed."""
        if self._coming:
            # No product may have needed it.
            self._await(buffer)
        if buffer.is_operand and buffer.name not in self._operands:
            self.memory.reuse()
        del self.arrays[buffer.name]
        if buffer.name in self._operands:
            self._operands.discard(buffer.name)
            if not self._operands:
                self.on_gathered()

    # Operands in block columns

    def _fill_columns(self, name: str, target: Any) -> None:
        """Gather this rank's block columns of an operand; after the last operand raise if elements are not finite."""
        began = time.perf_counter()
        collections.deque(self.exchange.carry(self, self.gathered(name, target)), 0)
        self._add_up(name, target)
        if name == self.plan.problem.operands[-1]:
            self._synchronize()
            if self.plan.problem.task.check_finite:
                self._refuse(self._unfit())
            self.on_gathered()
        self._note("gather", began)

    def gathered(self, name: str, target: Any) -> Transfer:
        """Return the transfer of an operand to this rank's block columns."""
        assert self.rank is not None
        task, copies, number = self.plan.problem.task, self.plan.gathered(name), self.plan.problem.operands.index(name)

        def taken(rank: int) -> Iterator[Copy]:
            return inside(task.read(name), copies.for_dst(rank))

        orientation, targets = task.orientation(name), {self.rank: target}
        how = "full", orientation.transposed, orientation.conjugated and target.dtype.kind == "c"
        return Transfer("input", number, taken, self.plan.where[name], targets, *how)

    def parts(self, transfer: Transfer) -> dict[int, list[Part]]:
        """Return the parts that this rank takes of a transfer, by holder."""
        assert self.rank is not None
        parts: dict[int, list[Part]] = collections.defaultdict(list)
        for copy in transfer.taken(self.rank):
            rows, cols = (copy.src_row, copy.src_row + copy.nrows), (copy.src_col, copy.src_col + copy.ncols)
            sides = (*cols, *rows) if transfer.transposed else (*rows, *cols)
            place = transfer.targets[copy.dst][copy.dst_index]
            part = Part((transfer.number, copy.src, *sides), place, copy.row, copy.col, *transfer[-3:])
            parts[int(transfer.holders[copy.src])].append(part)
        return parts

    def fetch(self, kind: str, holder: int, parts: Sequence[Part]) -> Future[Sequence[Any]]:
        """Request parts from a participant."""
        return self.comm.fetch(holder, kind, np.array([part.box for part in parts], np.int64))

    def read(self, kind: str, holder: int, boxes: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield views of boxes in memory that this process can read."""
        views = dict[tuple[int, int], Any]()
        for matrix, number, r0, r1, c0, c1 in boxes:
            if (matrix, number) not in views:
                view = self._view if holder == self.me else self.exchange.view
                views[matrix, number] = view(kind, holder, matrix, number)
            yield views[matrix, number][r0:r1, c0:c1]

    def _view(self, kind: str, holder: int, matrix: int, number: int) -> Any:
        """Return a chunk of an operand, or this rank's block columns of an output."""
        if kind != FINAL:
            return self.chunks[self.plan.problem.operands[matrix], number]
        (columns,) = self.exchange.answer(kind, np.array([[matrix]]))
        return columns

    def source(self, transfer: Transfer, number: int) -> Any:
        """Return a matrix here that a transfer takes parts of."""
        view = self._view(transfer.kind, self.me, transfer.number, number)
        return view.T if transfer.transposed else view

    def _add_up(self, name: str, target: Any) -> None:
        """Add up what was read of an operand, if it is to be finite: so is its sum then, or too large."""
        assert self.rank is not None
        task = self.plan.problem.task
        if not task.check_finite or target.dtype.kind not in "fc" or self.scales:
            return
        places = [(0, 0, target)]
        if (form := task.read(name)) != "full":
            # Of the columns of one chunk and one block the same rows were read.
            columns = {(copy.col, copy.dst_col, copy.ncols) for copy in self.plan.gathered(name).for_dst(self.rank)}
            if form == "lower":
                places = [(col, col, target[col:, at : at + count]) for col, at, count in sorted(columns)]
            else:
                places = [(0, col, target[: col + count, at : at + count]) for col, at, count in sorted(columns)]
        # CuPy has one block of threads for the sum of all, and one for each column.
        self._sums += ((name, row, col, place, place.sum(axis=0).sum()) for row, col, place in places)

    def _unfit(self) -> str:
        """Return the message about elements of operands that are not finite, or an empty one."""
        from dask_distmm.errors import not_finite

        xp, task = self.blas.xp, self.plan.problem.task
        sums, self._sums = self._sums, []
        good = self.blas.host(xp.isfinite(xp.stack([total for *_, total in sums]))) if sums else ()
        for (name, row, col, place, _), fine in zip(sums, good, strict=True):
            if not fine:
                # The sum may have overflowed, and the other triangle may hold anything.
                rows, cols = place.shape
                below = xp.arange(row, row + rows)[:, None] - xp.arange(col, col + cols)
                unit = int(name == "a" and task.unit_diagonal)
                read = {"lower": below >= unit, "upper": -below >= unit}.get(task.read(name), True)
                if self.blas.host((~xp.isfinite(place) & read).any()):
                    return not_finite(name)
        return ""

    def _refuse(self, problem: str) -> None:
        """Raise if this rank has a problem, or any rank if all must fail together."""
        if problem := self.exchange.agree(problem):
            raise MatrixError(problem)

    def _multiplied(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the chunks of A that this rank multiplies, as ranks hold A, with their first rows and columns."""
        assert self.rank is not None
        rows, cols = self.plan.problem["a"].chunks
        transposed = self.plan.problem.task.orientation("a").transposed
        for index in self.plan.multiplied(self.rank):
            i, j = divmod(index, len(cols))
            if rows[i] and cols[j]:
                array, row, col = self._whole("a", index), sum(rows[:i]), sum(cols[:j])
                yield (col, row, array.T) if transposed else (row, col, array)

    def _pivots(self) -> Iterator[Any]:
        """Yield the chunks of the operand that has the pivots."""
        for index in range(self.plan.problem["p"].count):
            yield self._whole("p", index)

    def _whole(self, name: str, index: int) -> Any:
        """Return a chunk of an operand, here and in the type of the computation."""
        problem, holder = self.plan.problem, int(self.plan.where[name][index])
        rows, cols = problem[name].chunk_shape(index)
        box = problem.operands.index(name), index, 0, rows, 0, cols
        reads = holder == self.me or self.exchange.reads("input", holder, box)
        if reads:
            (array,) = self.read("input", holder, [box])
        else:
            whole = Part(box, None, 0, 0, "full", False, False)
            (array,) = wait_checked(self.fetch("input", holder, [whole]), self.ended.check)
        dtype = problem.compute_type
        array = self.blas.xp.asarray(array, dtype)
        if holder == self.me or not reads:
            return array
        self.pulled_bytes += array.nbytes
        order: Literal["C", "F"] = "F" if array.strides[0] < array.strides[1] else "C"
        copy = self.blas.xp.empty(array.shape, dtype, order)
        assign(copy, array)
        return copy

    # Results from block columns

    def _deliver(self, step: Deliver) -> None:
        """Make this rank's chunks of outputs of all ranks' block columns."""
        with self.blas.on("join"):
            transfers = [self._delivered(key.number, step.chunks) for key in step.keys]
            # Copies that are queued now begin as soon as the last steps are done.
            for transfer in transfers if self.blas.asynchronous else ():
                next(transfer, None)
        self._synchronize()
        began = time.perf_counter()
        for transfer in transfers:
            collections.deque(transfer, 0)
        self._note("deliver", began)

    def _delivered(self, number: int, chunks: Sequence[Buffer]) -> Iterator[None]:
        """Put this rank's chunks of an output together; yield after the parts that are here."""
        output = self.plan.problem.outputs[number]
        described, copies = self.plan.output(output.name), self.plan.delivered(output.name)
        transposed, conjugated = described.orientation.transposed, described.orientation.conjugated
        order: Literal["C", "F"] = "C" if transposed else "F"

        def blanks() -> dict[int, Any]:
            own = (chunk for chunk in chunks if chunk.role == output.name)
            return {x.number: self.memory.blank(x.shape, np.dtype(x.dtype), order, described.form) for x in own}

        def taken(rank: int) -> Iterator[Copy]:
            for index in self.plan.owned(output.name, rank):
                yield from inside(described.form, copies.for_dst(index))

        results = self.exchange.together(blanks)
        self.result |= {(output.name, index): chunk for index, chunk in results.items()}
        targets = {index: chunk.T if transposed else chunk for index, chunk in results.items()}
        how = described.form, False, conjugated and np.dtype(output.dtype).kind == "c"
        yield from self.exchange.carry(self, Transfer(FINAL, number, taken, self.plan.ranks, targets, *how))

    # For peers

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self._inputs if kind == "input" else self.exchange.published(kind, boxes)

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return boxes of chunks or of this rank's block columns of outputs, or what this rank has published."""
        self.ended.check()
        if kind not in ("input", FINAL):
            return self.exchange.answer(kind, boxes)
        first = self._view(kind, self.me, *boxes[0, :2].tolist())
        # Sparse chunks are asked for whole, one at a time.
        sparse = sparse_package(first)
        return self.memory.sent(
            [first.data, first.indices, first.indptr] if sparse else list(self.read(kind, self.me, boxes.tolist()))
        )

    def forget(self, operands: Sequence[str]) -> None:
        """Release the chunks of some operands, which all ranks have read. Thread-safe."""
        super().forget(operands)
        self.exchange.let_go(operands)

    # The end

    def abort(self, error: BaseException) -> None:
        """Fail all pending requests and steps with `error`."""
        super().abort(error)
        self.exchange.abort(error)


def inside(form: str, copies: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the parts of copies that are not wholly outside of a triangle: rows on the diagonal, and the others."""
    for copy in copies:
        first, end = copy.row, copy.row + copy.nrows
        on, off = (min(max(first, column), end) for column in (copy.col, copy.col + copy.ncols))
        kept = {"lower": ((on, off), (off, end)), "upper": ((first, on), (on, off)), "full": ((first, end),)}
        for row, stop in kept[form.removeprefix("unit ") if form in TRIANGLES else "full"]:
            if row < stop:
                skip = row - first
                yield copy._replace(src_row=copy.src_row + skip, dst_row=copy.dst_row + skip, row=row, nrows=stop - row)


def put(kernels: Kernels, part: Part, array: Any, scales: Sequence[Any] = ()) -> None:
    """Copy a part to its destination, with rows and columns scaled."""
    array, place = kernels.xp.asarray(array), part.place
    array = array.T if part.transposed else array
    array = array.conj() if part.conjugated else array
    if scales:
        sides = zip(scales, (part.row, part.col), array.shape, strict=False)
        _put_scaled(place, array, [side[at : at + size] for side, at, size in sides])
        return
    across = array.ndim == 2 and (array.strides[0] < array.strides[1]) != (place.strides[0] < place.strides[1])
    if across and isinstance(array, np.ndarray):
        # NumPy turns a matrix slowly where columns are far apart: what it reads and writes has to stay in the caches.
        for row in range(0, len(array), _STRIP):
            place[row : row + _STRIP] = array[row : row + _STRIP]
    else:
        assign(place, array)
    keep_triangle(kernels, part.form, place, part.row, part.col)


def _put_scaled(place: Any, array: Any, scales: Sequence[Any]) -> None:
    """Write a scaled part, in the type of its destination."""
    (rows, cols), here = array.shape, isinstance(array, np.ndarray)
    by_rows = not here or array.strides[0] > array.strides[1]
    # On GPUs, so that little memory is needed beside.
    step = _STRIP if here else max(1, _ELEMENTS // max(1, cols))
    down, across = (step, max(1, cols)) if by_rows else (max(1, rows), step)
    for row in range(0, rows, down):
        for col in range(0, cols, across):
            part = array[row : row + down, col : col + across] * scales[0][row : row + down]
            for factors in scales[1:]:
                part *= factors[col : col + across].T
            place[row : row + down, col : col + across] = part


def keep_triangle(kernels: Kernels, form: str, place: Any, row: int, col: int) -> None:
    """Zero the part of a result outside of its triangle; ones on a unit diagonal."""
    (rows, cols), xp = place.shape, kernels.xp
    if form not in TRIANGLES or not (col < row + rows if form == "upper" else row < col + cols):
        return
    triangle = (xp.triu if form == "upper" else xp.tril)(place, row - col - (form == "unit lower"))
    if form == "unit lower":
        triangle += xp.eye(rows, cols, row - col, dtype=place.dtype)
    assign(place, triangle)
