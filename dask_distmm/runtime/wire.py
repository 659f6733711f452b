"""How messages travel: as dicts of plain types, whose fields the receiver checks.

`ask` sends a request and returns its answer, `post` makes a message for one of Dask's own streams. `answering` and
`listening` make the handlers of the other end. `dask_distmm.runtime.messages` has the messages.

Numbers of runs and groups count within an *epoch*: the time of one scheduler plugin, from its start until another one
takes its place. Messages between the scheduler and workers, and between workers, carry a secret name of it; a message
of another epoch is refused and changes nothing.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from dask_distmm.engines.base import log
from dask_distmm.errors import DistMMError, ProtocolError, as_plain, rebuild

Status = Literal[
    "OK", "missing", "no replicas", "orders", "refused", "failed", "matrix", "source", "function", "lost", "gone"
]

A = TypeVar("A", bound="Reply")
D = TypeVar("D")


@dataclasses.dataclass(frozen=True)
class Message:
    """A message. Its class names the operation by which Dask finds the handler."""

    operation: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class Reply:
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


def to_wire(message: Message | Reply) -> dict[str, Any]:
    """Return the fields of a message as plain types, but for those that have their default values."""
    kind = type(message)
    found = {name: getattr(message, name) for name in _checks(kind)}
    return {name: value for name, value in found.items() if value is not getattr(kind, name, _REQUIRED)}


def from_wire(kind: type[D], wire: Any) -> D:
    """Return the message that ``to_wire`` gave, checked: each field, but not what is inside of a container."""
    if not isinstance(wire, Mapping):
        raise ProtocolError(f"malformed message {kind.__name__}: it is a {type(wire).__name__}, expected a dict")
    checks = _checks(kind)
    for name, value in wire.items():
        if name not in checks:
            raise ProtocolError(f"malformed message {kind.__name__}: it has no field {name!r}")
        if not checks[name].fits(value):
            expected = checks[name].expected
            raise ProtocolError(
                f"malformed message {kind.__name__}: its field {name} is {reprlib.repr(value)}, expected {expected}"
            )
    for name, check in checks.items():
        if check.required and name not in wire:
            raise ProtocolError(f"malformed message {kind.__name__}: its field {name} is missing")
    return kind(**wire)


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
    return typing.cast("A", from_wire(request.answer, wire))


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
            request = from_wire(kind, wire)
        except ProtocolError as error:
            return to_wire(Reply("refused", str(error)))
        try:
            return to_wire(await handle(request))
        except DistMMError as error:
            return as_plain(error)
        except Exception as error:
            log.warning("message %s failed", kind.__name__, exc_info=True)
            return to_wire(Reply("failed", f"{type(error).__name__}: {error}"))

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
            handle(from_wire(kind, wire))
        except ProtocolError as error:
            log.debug("dropped: %s", error)
        except Exception:
            log.warning("message %s failed", kind.__name__, exc_info=True)

    return {kind.operation: hear}


# The name of the epoch, beside the fields of a message.
_EPOCH = "epoch"


def _enveloped(message: Message, epoch: str) -> dict[str, Any]:
    return {**to_wire(message), **({_EPOCH: epoch} if epoch else {})}


def _of_another_epoch(kind: type[Message]) -> ProtocolError:
    return ProtocolError(
        f"message {kind.__name__} is not of the scheduler plugin that is installed: it is from before that plugin, or "
        "forged"
    )


_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class _Check:
    """How the receiver checks a field."""

    # Whether a value is of the field's type.
    fits: Callable[[Any], bool]
    # The type in words.
    expected: str
    # Whether the field must be there.
    required: bool


_checked: dict[type, dict[str, _Check]] = {}


def _checks(kind: type) -> dict[str, _Check]:
    """Return the checks of a message's fields by name; made once for each class."""
    if kind not in _checked:
        hints = typing.get_type_hints(kind, include_extras=True)
        made = {}
        for field in dataclasses.fields(kind):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            made[field.name] = _Check(*_test(hints[field.name]), required)
        _checked[kind] = made
    return _checked[kind]


def _test(hint: Any) -> tuple[Callable[[Any], bool], str]:
    """Return whether a value is of a type, as a function, and the type in words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (fits, expected), (least, most) = _test(inside[0]), inside[1]
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        return lambda value: fits(value) and least <= value <= most, f"{expected} {bounds}"
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in inside, f"one of {', '.join(map(repr, inside))}"
    if origin in (typing.Union, types.UnionType):
        tests = [_test(one) for one in inside]
        return lambda value: any(fits(value) for fits, _ in tests), " or ".join(words for _, words in tests)
    if hint is Any:
        return lambda value: True, "anything"
    plain = origin or hint
    kinds = {collections.abc.Sequence: (list, tuple), collections.abc.Mapping: (dict,)}.get(plain, (plain,))
    return lambda value: isinstance(value, kinds), " or ".join(one.__name__ for one in kinds)
