"""The protocol between client, scheduler and workers: every message, its operation, its fields and their types.

::

    scheduler  Describe, Prepare, Start, Abort, ReleaseGroup                  -> worker
               Begin, Finish, Abort, WorkerLost, GroupLost,
               ReleaseOperands, ReleaseReplica           (no answer)          -> worker
    worker     Progress, Gathered                        (no answer)          -> scheduler
               Fetch                                                          -> worker
    client     RosterQuestion, ProgressQuestion,
               ReleaseWorkspaces, ReleaseReplicas                             -> scheduler

Messages travel as dicts of plain types, whose fields the receiver checks. `ask` sends a request and returns its answer,
`post` makes a message for one of Dask's own streams. `answering` and `listening` make the handlers of the other end.

Numbers of runs and groups count within an *epoch*: the time of one scheduler plugin, from its start until another one
takes its place. Messages between the scheduler and workers, and between workers, carry a secret name of it; a message
of another epoch is refused and changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from dask_distmm.engines.base import log
from dask_distmm.errors import DistMMError, ProtocolError, as_plain, rebuild
from dask_distmm.planning import Demand, Worker
from dask_distmm.planning.wire import Wired

# How messages travel: as dicts of plain types, whose fields the receiver checks


Status = Literal[
    "OK", "missing", "no replicas", "orders", "refused", "failed", "matrix", "source", "function", "lost", "gone"
]

A = TypeVar("A", bound="Reply")

# The most axes that an array of NumPy has.
_AXES = 64


@dataclasses.dataclass(frozen=True)
class Message(Wired):
    """A message. Its class names the operation by which Dask finds the handler."""

    operation: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class Reply(Wired):
    """The answer to a request."""

    # ``"OK"``. ``"refused"``: the request was malformed, stale or for another run. ``"failed"``: the work raised an
    # error. ``"lost"``: a connection to another worker broke. Subclasses say what further statuses mean.
    status: Status
    # Why the status is not ``"OK"``.
    message: str = ""
    traceback: str = ""
    # What the user's code has raised, and its traceback, pickled, and the error as text. Of the statuses ``"source"``,
    # a chunk can't be made, and ``"function"``, an epilog has failed. Only the client opens them.
    error: bytes = b""
    error_traceback: bytes = b""
    error_text: str = ""


@dataclasses.dataclass(frozen=True)
class Call(Message, Generic[A]):
    """A message that has an answer, of the class `answer`."""

    answer: ClassVar[type[Reply]] = Reply


def post(message: Message, epoch: str = "") -> dict[str, Any]:
    """Return a message as one of Dask's own streams carries it."""
    return {"op": message.operation, **_enveloped(message, epoch)}


async def ask(rpc: Any, request: Call[A], epoch: str = "") -> A | None:
    """Send a request; return the answer, or None if the other end does not know it: dask_distmm is missing there."""
    wire = await getattr(rpc, request.operation)(**_enveloped(request, epoch))
    if not isinstance(wire, Mapping):
        return None
    if "kind" in wire:  # as `as_plain` makes it of an error
        raise rebuild(wire)
    return cast("A", request.answer.from_wire(wire))


def answering(
    kind: type[Call[A]],
    handle: Callable[[Any], Awaitable[A]],
    is_current: Callable[[Any], Awaitable[bool]] | None = None,
) -> dict[str, Callable[..., Awaitable[dict[str, Any]]]]:
    """Return the handler of a request by its operation; whatever happens, its answer is typed.

    It refuses what is malformed, and what is of an epoch that is not current, if it is to look at that.
    """

    async def answer(**wire: Any) -> dict[str, Any]:
        try:
            if is_current is not None and not await is_current(wire.pop(_EPOCH, "")):
                raise _of_another_epoch(kind)
            request = kind.from_wire(wire)
        except ProtocolError as error:
            return Reply("refused", str(error)).to_wire()
        try:
            return (await handle(request)).to_wire()
        except DistMMError as error:
            return as_plain(error)
        except Exception as error:
            log.warning("message %s failed", kind.__name__, exc_info=True)
            return Reply("failed", f"{type(error).__name__}: {error}").to_wire()

    return {kind.operation: answer}


def listening(
    kind: type[Message], handle: Callable[[Any], None], is_current: Callable[[Any], bool] | None = None
) -> dict[str, Callable[..., None]]:
    """Return the handler of a message on a stream by its operation; `is_current` as for `answering`.

    An exception would close the stream, which is Dask's own, and end the worker. So none leaves the handler.
    """

    def hear(**wire: Any) -> None:
        try:
            if is_current is not None and not is_current(wire.pop(_EPOCH, "")):
                raise _of_another_epoch(kind)
            handle(kind.from_wire(wire))
        except ProtocolError as error:
            log.debug("dropped: %s", error)
        except Exception:
            log.warning("message %s failed", kind.__name__, exc_info=True)

    return {kind.operation: hear}


# The name of the epoch, beside the fields of a message.
_EPOCH = "epoch"


def _enveloped(message: Message, epoch: str) -> dict[str, Any]:
    return {**message.to_wire(), **({_EPOCH: epoch} if epoch else {})}


def _of_another_epoch(kind: type[Message]) -> ProtocolError:
    return ProtocolError(
        f"message {kind.__name__} is not of the scheduler plugin that is installed: it is from before that plugin, or "
        "forged"
    )


# The protocol between client and scheduler: every message, its operation, its fields and their types


@dataclasses.dataclass(frozen=True)
class RosterReply(Reply):
    """The workers that would multiply, and the places of chunks."""

    # Names of the engines that could multiply.
    engines: Sequence[str] = ()
    # The workers that would multiply, and others that hold chunks.
    workers: Sequence[Worker] = ()
    sources: Sequence[Worker] = ()
    # For each array that was asked for the index into ``[*workers, *sources]`` of each chunk's holder, as int32; None
    # where not all chunks are in memory.
    placed: Sequence[bytes | None] = ()
    # Addresses of ranks that have a communicator already.
    groups: Sequence[Sequence[str]] = ()


@dataclasses.dataclass(frozen=True)
class RosterQuestion(Call[RosterReply]):
    """A client asks who would multiply for a demand, and where the chunks of some arrays are.

    `counts` says how many chunks each of the arrays `names` has along its axes.
    """

    operation, answer = "distmm_roster", RosterReply
    demand: Demand
    names: Sequence[str] = ()
    counts: Sequence[Sequence[int]] = ()

    def check(self) -> None:
        """Raise for numbers of chunks that no arrays have."""
        wrong = any(len(along) > _AXES or min(along, default=0) < 0 for along in self.counts)
        if wrong or len(self.names) != len(self.counts):
            raise ValueError(
                f"counts must be at most {_AXES} numbers of chunks for each array, got {reprlib.repr(self.counts)}"
            )


@dataclasses.dataclass(frozen=True)
class ProgressLine:
    """How far one multiply is."""

    # Name of the multiply, and number of its run; 0 before there is one.
    name: str
    # ``"reading"``, ``"waiting"``, ``"voting"``, ``"multiplying"``, ``"ending"``, ``"done"`` or ``"failed"``, and the
    # share of that phase's work which is done.
    phase: str
    share: float
    run: int = 0
    # Bytes of matrices that have travelled between workers, and how many will have when the run is done; 0 where that
    # is not known.
    received_bytes: int = 0
    expected_bytes: int = 0
    # Of a product in waves how far these are, in words.
    note: str = ""


@dataclasses.dataclass(frozen=True)
class ProgressReply(Reply):
    """How far multiplies are."""

    # Whether the scheduler has all the tasks that were asked for (a graph may still be on its way), and each multiply.
    known: bool = False
    found: Sequence[ProgressLine] = ()


@dataclasses.dataclass(frozen=True)
class ProgressQuestion(Call[ProgressReply]):
    """A client asks how far the multiplies `names` are, or where that is None those that the tasks `keys` need."""

    operation, answer = "distmm_progress", ProgressReply
    names: Sequence[str] | None = None
    keys: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class Released(Reply):
    """Groups, or replicas of arrays, were freed: how many."""

    count: int = 0


@dataclasses.dataclass(frozen=True)
class ReleaseWorkspaces(Call[Released]):
    """A client has all groups freed, each within a time of `grace` (seconds)."""

    operation, answer = "distmm_release_workspaces", Released
    grace: Seconds


@dataclasses.dataclass(frozen=True)
class ReleaseReplicas(Call[Released]):
    """A client has the replicas of the arrays `names` freed, of all arrays where that is None."""

    operation, answer = "distmm_release_replicas", Released
    names: Sequence[str] | None = None


# The protocol between scheduler and workers: every message, its operation, its fields and their types


# The name of the plugins, of a worker's extension, and of the topic under which the scheduler logs events.
NAME = "distmm"

# Numbers within bounds.
Count = Annotated[int, (0, math.inf)]
Seconds = Annotated[int | float, (0, math.inf)]
Share = Annotated[float, (0, 1)]


# From the scheduler to a worker, with an answer


@dataclasses.dataclass(frozen=True)
class Description(Reply):
    """The facts about a worker that planning needs."""

    # The version of dask_distmm; empty where it can't be attached.
    version: str = ""
    # For each engine the versions of its libraries, or ``{"error": why it can't run here}``.
    engines: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    # For each engine the bytes of the memory that it works in (0 for the worker's own), and the process' device with
    # the devices whose memory that can read.
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    links: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    # The name of the machine.
    host: str = ""


@dataclasses.dataclass(frozen=True)
class Describe(Call[Description]):
    """The scheduler asks a worker to describe itself."""

    operation, answer = "distmm_describe", Description


@dataclasses.dataclass(frozen=True)
class Vote(Reply):
    """A participant can take part in a run, or says why not.

    Statuses besides those of `Reply` are ``"missing"`` (the chunks `keys` are not here), ``"no replicas"`` (those of
    the results `names` are not here) and ``"orders"`` (A's and B's chunks lie in other memory `orders` than planned).
    An `offer` lets others read this participant's memory, in plain types; None for nothing.
    """

    offer: Any = None
    keys: Sequence[Any] = ()
    names: Sequence[str] = ()
    orders: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Prepare(Call[Vote]):
    """The scheduler asks a participant whether all chunks are there, and to allocate."""

    operation, answer = "distmm_prepare", Vote
    # Number of the run, which participant this worker is, the plan as `Plan.to_wire` gives it, and for each operand
    # of which this worker has chunks their keys, in the order of the chunks' numbers.
    run_id: int
    me: int
    plan: Mapping[str, Any]
    keys: Mapping[str, Sequence[Any]]
    # Whether to refuse a plan for other memory orders than the chunks', and tasks that make chunks here, pickled.
    check_orders: bool = False
    sources: bytes = b""


@dataclasses.dataclass(frozen=True)
class Done(Reply):
    """A participant has done its part, and has given its chunks of D to Dask."""

    # How long it took in all, and each phase by name (seconds).
    seconds: float = 0.0
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # The most bytes that the engine held (0 where it does not count), those of them that its group keeps, and the
    # bytes of matrices that have arrived from other participants.
    held_bytes: Count = 0
    kept_bytes: Count = 0
    received_bytes: Count = 0
    # For each array the name, the numbers of its chunks and their bytes, both as int64.
    placed: Sequence[tuple[str, bytes, bytes]] = ()
    # The type of the chunks: pickled, and its name.
    type: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class Start(Call[Done]):
    """The scheduler asks a participant to do its part of a run."""

    operation, answer = "distmm_start", Done
    # Number of the run, and the offers of all participants, in their order.
    run_id: int
    offers: Sequence[Any] = ()
    # For each array of which tasks wait for chunks: which output it is, its name, and the numbers of its chunks that no
    # task waits for, as int64.
    deliver: Sequence[tuple[str, str, bytes]] = ()


@dataclasses.dataclass(frozen=True)
class Abort(Call[Reply]):
    """The scheduler ends a run that has not succeeded; a participant's history of it is the `message` of its answer.

    May be repeated, and sent on a stream, without an answer.
    """

    operation = "distmm_abort"
    run_id: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ReleaseGroup(Call[Reply]):
    """The scheduler has a rank free the memory that its group keeps between runs, within a time of `grace` (seconds).

    It asks all ranks of the group at the same time.
    """

    operation = "distmm_release_group"
    group: int
    engine: str
    grace: Seconds


# From the scheduler to a worker, on Dask's own stream


@dataclasses.dataclass(frozen=True)
class Begin(Message):
    """The scheduler has a plugin whose messages carry this `epoch`: all that belongs to another one is over."""

    operation = "distmm-begin"
    epoch: str


@dataclasses.dataclass(frozen=True)
class Finish(Message):
    """All participants are done: each frees the buffers of the run."""

    operation = "distmm-finish"
    run_id: int


@dataclasses.dataclass(frozen=True)
class ReleaseOperands(Message):
    """All ranks have read the operands that may be freed: participants release their chunks."""

    operation = "distmm-release-operands"
    run_id: int


@dataclasses.dataclass(frozen=True)
class WorkerLost(Message):
    """A run continues without the participant of an address, which has left the cluster."""

    operation = "distmm-worker-lost"
    run_id: int
    address: str


@dataclasses.dataclass(frozen=True)
class GroupLost(Message):
    """A rank of a group is gone: each other rank forgets the group by itself."""

    operation = "distmm-group-lost"
    group: int
    engine: str


@dataclasses.dataclass(frozen=True)
class ReleaseReplica(Message):
    """Nobody wants the replicas any more that a run has left of the result `name`."""

    operation = "distmm-release-replica"
    name: str
    run_id: int


# From a worker


@dataclasses.dataclass(frozen=True)
class Gathered(Message):
    """A rank has read all that it needs of the operands' chunks. Dask adds the address of the `worker` on arrival."""

    operation = "distmm-gathered"
    run_id: int
    worker: str = ""


@dataclasses.dataclass(frozen=True)
class Progress(Message):
    """A participant tells the scheduler which share of its work is done, and how many bytes have arrived so far.

    Dask adds the address of the `worker` on arrival.
    """

    operation = "distmm-progress"
    run_id: int
    share: Share
    received_bytes: Count = 0
    worker: str = ""


@dataclasses.dataclass(frozen=True)
class Delivery(Reply):
    """Parts of a participant's matrices, or a loan of them (`cross_memory`); ``"gone"``: the run is not live there."""

    data: Sequence[Any] = ()
    loan: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class Fetch(Call[Delivery]):
    """A participant (its `cross_memory.process_name`) asks another for parts of its matrices; see `Comm.fetch`."""

    operation, answer = "distmm_fetch", Delivery
    run_id: int
    kind: str
    boxes: bytes
    flat: bool
    place: str = ""
