"""The protocol between client, scheduler and workers: a message is a call of a handler of the other end.

::

    scheduler  describe, trim, prepare, start, abort, release                 -> worker
               begin, finish, end, release_operands, worker_lost,
               abandon, release_replica              (no answer)              -> worker
    worker     hear_progress, gathered               (no answer)              -> scheduler
               fetch                                                          -> worker
    client     answer_roster, answer_progress, answer_regions,
               free_workspaces, free_replicas                                 -> scheduler
               hear_enabled             (no answer)                           -> scheduler

The handlers are methods of `runtime.worker.WorkerService`, and of the scheduler's plugin and what it has made. A call
travels as a dict of plain types: the arguments by name, which the receiver checks by the handler's annotations. `ask`
sends a call and returns the answer, `post` makes one for one of Dask's own streams. `answering` and `listening`
register the handlers of the other end.

Numbers of runs and groups count within an *epoch*: the time of one scheduler plugin, from its start until another one
takes its place. Messages between the scheduler and workers, and between workers, carry a secret name of it; a message
of another epoch is refused and changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

from dask_distmm.engines.base import log
from dask_distmm.errors import DistMMError, ProtocolError, as_plain, rebuild
from dask_distmm.planning import Worker
from dask_distmm.planning.region import Region
from dask_distmm.planning.wire import Wired

# The name of the plugins, of a worker's extension, and of the topic under which the scheduler logs events.
NAME = "distmm"
# The name of the epoch, beside the arguments of a message.
_EPOCH = "epoch"

# Numbers within bounds.
Count = Annotated[int, (0, math.inf)]
Seconds = Annotated[int | float, (0, math.inf)]
Share = Annotated[float, (0, 1)]

Status = Literal["OK", "missing", "no replicas", "orders", "refused", "failed", "matrix", "source", "function", "lost"]

# How messages travel


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


A = TypeVar("A", bound=Reply)
P = ParamSpec("P")


def operation_of(handler: Callable[..., Any]) -> str:
    """Return the name by which Dask finds a handler."""
    return f"distmm_{handler.__name__}"


def message(
    handler: Callable[Concatenate[Any, P], Any], epoch: str, *args: P.args, **kwargs: P.kwargs
) -> dict[str, Any]:
    """Return a call of a method as plain types; `epoch` is empty where the method does not look at it."""
    return {**_arguments(handler)(*args, **kwargs).to_wire(), **({_EPOCH: epoch} if epoch else {})}


def post(handler: Callable[Concatenate[Any, P], None], epoch: str, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
    """Return a message as one of Dask's own streams carries it."""
    return {"op": operation_of(handler), **message(handler, epoch, *args, **kwargs)}


async def ask(
    rpc: Any, handler: Callable[Concatenate[Any, P], Awaitable[A]], epoch: str, *args: P.args, **kwargs: P.kwargs
) -> A | None:
    """Call a method of the other end; return None if that does not know it: dask_distmm is missing there."""
    wire = await getattr(rpc, operation_of(handler))(**message(handler, epoch, *args, **kwargs))
    if not isinstance(wire, Mapping):
        return None
    if "kind" in wire:  # as `as_plain` makes it of an error
        raise rebuild(wire)
    answer: A = _answer(handler).from_wire(wire)
    return answer


@functools.cache
def _answer(handler: Callable[..., Any]) -> Any:
    """Return the class of a method's answer."""
    return typing.get_type_hints(handler)["return"]


@functools.cache
def _arguments(handler: Callable[..., Any]) -> type[Any]:
    """Return the dataclass of a method's arguments: it makes messages, and reads and checks them."""
    hints, listed = typing.get_type_hints(handler, include_extras=True), inspect.signature(handler).parameters
    fields: list[Any] = [
        (name, hints[name], *(() if arg.default is arg.empty else (dataclasses.field(default=arg.default),)))
        for name, arg in listed.items()
        if name != "self"
    ]
    return dataclasses.make_dataclass(handler.__name__, fields, bases=(Wired,), frozen=True)


def answering(
    handle: Callable[..., Awaitable[Reply]], is_current: Callable[[Any], Awaitable[bool]] | None = None
) -> dict[str, Callable[..., Awaitable[dict[str, Any]]]]:
    """Return a handler of requests by its operation; whatever happens, its answer is typed.

    It refuses what is malformed, and what is of an epoch that is not current, if it is to look at that.
    """

    async def answer(**wire: Any) -> dict[str, Any]:
        try:
            if is_current is not None and not await is_current(wire.pop(_EPOCH, "")):
                raise _of_another_epoch(handle)
            request = arguments_of(handle, wire)
        except ProtocolError as error:
            return Reply("refused", str(error)).to_wire()
        try:
            return (await handle(**request)).to_wire()
        except DistMMError as error:
            return as_plain(error)
        except Exception as error:
            log.warning("message %s failed", handle.__name__, exc_info=True)
            return Reply("failed", f"{type(error).__name__}: {error}").to_wire()

    return {operation_of(handle): answer}


def listening(
    handle: Callable[..., None], is_current: Callable[[Any], bool] | None = None
) -> dict[str, Callable[..., None]]:
    """Return a handler of messages on a stream by its operation; `is_current` as for `answering`.

    An exception would close the stream, which is Dask's own, and end the worker. So none leaves the handler.
    """

    def hear(**wire: Any) -> None:
        try:
            if is_current is not None and not is_current(wire.pop(_EPOCH, "")):
                raise _of_another_epoch(handle)
            handle(**arguments_of(handle, wire))
        except ProtocolError as error:
            log.debug("dropped: %s", error)
        except Exception:
            log.warning("message %s failed", handle.__name__, exc_info=True)

    return {operation_of(handle): hear}


def arguments_of(handle: Callable[..., Any], wire: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a message, checked."""
    # Of the function, as all methods of one class: what is kept must not keep objects.
    return dict(vars(_arguments(getattr(handle, "__func__", handle)).from_wire(wire)))


def _of_another_epoch(handle: Callable[..., Any]) -> ProtocolError:
    return ProtocolError(
        f"message {handle.__name__} is not of the scheduler plugin that is installed: it is from before that plugin, "
        "or forged"
    )


# The answers


@dataclasses.dataclass(frozen=True)
class Snapshot(Reply):
    """The workers that can take part now, and the places of the chunks of some arrays."""

    # Names of the engines that could multiply.
    engines: Sequence[str] = ()
    # The workers that would multiply, and others that hold chunks.
    workers: Sequence[Worker] = ()
    sources: Sequence[Worker] = ()
    # For each array that was asked for the index into ``[*workers, *sources]`` of each chunk's holder, as int32; None
    # where not all chunks are in memory.
    placed: Sequence[bytes | None] = ()
    # Addresses of ranks that have a communicator already.
    groups: Sequence[tuple[str, ...]] = ()


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
    all_present: bool = False
    lines: Sequence[ProgressLine] = ()


@dataclasses.dataclass(frozen=True)
class RegionsReply(Reply):
    """The regions of a graph, and how many of its other tasks are in none, by the reasons."""

    regions: Sequence[Region] = ()
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Released(Reply):
    """Groups, or replicas of arrays, were freed: how many."""

    count: int = 0


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
class Delivery(Reply):
    """Parts of a participant's matrices, or a loan of them (`cross_memory`); ``"lost"``: the run is not live there."""

    data: Sequence[Any] = ()
    # Of arrays that come in one vector.
    shapes: Sequence[Sequence[int]] = ()
    loan: Sequence[Any] = ()
