"""Every error that dask_distmm raises, under one root.

An error says what was found, what is expected and what to do. All of them survive pickling with their attributes: they
are raised on a worker or the scheduler and read by the user at the client. In messages they are plain types
(`as_plain`, `rebuild`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from numpy.linalg import LinAlgError

T = TypeVar("T")

# Where the documentation is read.
DOCS = "https://dask-distmm.readthedocs.io/en/latest"

# Longer reasons are cut: they are kept, logged and sent to all participants of a run.
_BRIEF = 1000
# Number of workers whose histories go into an error's text.
_TOLD = 8
# A list of more names than this is left out of a message that has a similar name to offer.
_LISTED = 10


class DistMMError(Exception):
    """Root of all errors of this package."""


class PlanError(DistMMError, ValueError):
    """The multiply can't be planned: shapes, chunks, options or workers do not fit.

    Raised at the call where that is possible, before anything is computed.
    """


class TracingError(PlanError, TypeError):
    """A function can't be traced by `dask_distmm.jit`: it needs elements of its arrays, or what it does has no rule."""


class ProjectedMemoryError(DistMMError, MemoryError):
    """The projected memory of a worker is above its limit. Nothing was moved.

    Parameters
    ----------
    message
        The projected bytes, the limit, and what to do.
    projected
        Projected bytes for each worker address.
    limit
        Limit in bytes for each worker address.
    """

    def __init__(
        self, message: str, projected: Mapping[str, int] | None = None, limit: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.projected = dict(projected or {})
        self.limit = dict(limit or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.projected, self.limit)


class EngineError(DistMMError):
    """An engine is missing on a worker, or failed inside a multiply."""


class MatrixError(DistMMError, LinAlgError):
    """The numbers in a matrix allow no such result: it is not positive definite, singular, or not of full rank.

    It is a ``numpy.linalg.LinAlgError``. No result is visible.
    """


class NotSquareError(PlanError, MatrixError):
    """A matrix is not square. It is a ``numpy.linalg.LinAlgError``, as NumPy's error, and a ValueError."""


class MissingEngineError(EngineError):
    """No worker has an engine that multiplies such arrays."""


class NoWorkersError(MissingEngineError):
    """The cluster has no worker at this time: none has started yet, or all are being restarted."""


class ProtocolError(DistMMError):
    """A control or data message was refused: malformed, stale, or for another run."""


class RunFailedError(DistMMError, RuntimeError):
    """A run failed on one or more ranks. No result of it is visible.

    Parameters
    ----------
    message
        The whole story in one text.
    run_id
        Number of the run.
    phase
        Phase in which it failed: ``"voting"`` or ``"running"``.
    ranks
        For each rank or worker that failed, ``address -> reason``.
    history
        What each worker that took part did and when, ``address -> events``, as far as it could still be asked.
    """

    def __init__(
        self,
        message: str,
        run_id: int | None = None,
        phase: str | None = None,
        ranks: Mapping[str, str] | None = None,
        history: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.phase = phase
        self.ranks = dict(ranks or {})
        self.history = dict(history or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.run_id, self.phase, self.ranks, self.history)

    def __str__(self) -> str:
        lines = [f"\n  {address}: {events}" for address, events in self.history.items()]
        more = [f"\n  and {len(lines) - _TOLD} more, see the attribute history"] if len(lines) > _TOLD else []
        return str(self.args[0]) + "".join(["\nWhat took part:" if lines else "", *lines[:_TOLD], *more])


def check_square(name: str, shape: Sequence[float]) -> None:
    """Raise if the last two axes of a shape are not those of a square matrix."""
    rows, cols = shape[-2:]
    if rows != cols:
        raise NotSquareError(f"{name} must be square, got {rows} x {cols}")


def unknown_name(what: str, value: object, choices: Iterable[str], where: str = "") -> str:
    """Return the message for a name that is none of those that are known: the similar ones, or all.

    Parameters
    ----------
    what
        The kind of name: ``"method"``, ``"config key"``.
    value
        The name that was found.
    known
        The names that are expected.
    where
        A page that lists them all, for long lists.
    """
    names = list(choices)
    close = difflib.get_close_matches(str(value).lower(), names, 3, 0.6)
    listed = f"known are {', '.join(map(repr, names))}"
    if not close:
        return f"unknown {what} {value!r}; {f'{where} lists all' if where and len(names) > _LISTED else listed}"
    text = f"unknown {what} {value!r}: did you mean {' or '.join(map(repr, close))}?"
    if len(names) <= _LISTED:
        return f"{text} K{listed[1:]}"
    return f"{text} {where} lists all {len(names)}" if where else text


def check_options(called: str, names: Iterable[str], accepted: Collection[str], hints: Mapping[str, str]) -> None:
    """Refuse an option that a function does not have, with a hint or the nearest name."""
    for name in names:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = hints.get(name) or "".join(f"did you mean {guess!r}?" for guess in near)
            raise TypeError(f"{called.removesuffix('.__init__')}() has no option {name!r}{': ' * bool(hint)}{hint}")


def options_checked(target: T) -> T:
    """Return a function, or a class with its public methods, of which each call goes through `check_options`."""
    if inspect.isclass(target):
        for name, method in list(vars(target).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                setattr(target, name, options_checked(method))
    # A function that has a signature of its own, by `takes`, is checked by that.
    if not inspect.isfunction(target) or hasattr(target, "__signature__"):
        return target
    accepted = inspect.signature(target).parameters

    @functools.wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_options(target.__qualname__, kwargs, accepted, {})
        return target(*args, **kwargs)

    return cast(T, checked)


def page(name: str) -> str:
    """Return the address of a page of the documentation, by the name of its file: ``"epilogs"``."""
    return f"{DOCS}/{name}.html"


def advice(remedies: Sequence[str]) -> str:
    """Return a sentence that offers remedies, each of which begins with a verb."""
    text = ", ".join(remedies[:-1]) + " or " * (len(remedies) > 1) + remedies[-1]
    return text[0].upper() + text[1:]


def as_plain(error: DistMMError) -> dict[str, Any]:
    """Return an error as a dict of plain types."""
    full = isinstance(error, ProjectedMemoryError | RunFailedError)
    return {"status": "failed", "kind": type(error).__name__, "args": error.__reduce__()[1] if full else (str(error),)}


def rebuild(answer: Mapping[str, Any]) -> DistMMError:
    """Make the typed error again from what `as_plain` gave."""
    kind: Any = globals().get(answer["kind"])
    ours = isinstance(kind, type) and issubclass(kind, DistMMError)
    return cast(DistMMError, kind(*answer["args"]) if ours else DistMMError(*answer["args"]))


def brief(text: str, most: int = _BRIEF) -> str:
    """Return a text, cut where it is too long to be kept and sent about."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def in_words(error: BaseException) -> str:
    """Return the class and the text of an error in one line, as far as its class lets it."""
    try:
        return brief(f"{type(error).__name__}: {error}")
    except Exception as failure:
        return f"{type(error).__name__} (its text can't be made: {type(failure).__name__})"


def call_user(status: str, what: str, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function of the user's: by this frame `raised_by_user` finds whose error it is, which stays as it is."""
    return function(*args, **kwargs)


def raised_by_user(error: BaseException) -> tuple[str, str, TracebackType | None] | None:
    """Return `status` and `what` of the `call_user` that an error left, and its traceback there; None if it is ours."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not call_user.__code__:
        traceback = traceback.tb_next
    if traceback is None:
        return None
    variables = traceback.tb_frame.f_locals
    return variables["status"], variables["what"], traceback.tb_next


def not_finite(name: str, *, option: bool = True) -> str:
    """Return the text for a matrix with elements that are NaN or infinite; `option`: functions may have one for it."""
    text = f"{name} must not contain infs or NaNs: replace them, for example by dask.array.nan_to_num"
    return f"{text}, or pass check_finite=False if the function has it" if option else text
