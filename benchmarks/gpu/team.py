"""Processes of one peer, one a GPU or one for all: started, asked case by case, killed if they do not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from benchmarks.gpu.cases import Case

# When one rank has failed the others may wait for it for ever.
_AFTER_A_FAILURE = 10.0
_CLOSING = 20.0
# A variant that hangs would otherwise take all the time that there is.
_MOST_ENDS = 2
_SLOW = 2.0
NO_TIME = "no time left"


class Member(Protocol):
    """What runs in a process: made from ``(rank, size, port, options)``."""

    info: dict[str, Any]

    def measure(self, case: Any) -> dict[str, Any]:
        """Return the seconds of each repetition and what else there is to say."""

    def healthy(self) -> bool:
        """Whether another case can be measured after a failure."""

    def close(self) -> None:
        """Stop what it started."""


class TeamError(Exception):
    """A team can't go on: it did not start, did not answer, or died."""


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _visible(gpus: Sequence[str]) -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class Team:
    """The processes of one peer.

    Parameters
    ----------
    member
        ``module:class`` of what runs in each process.
    gpus
        What CUDA_VISIBLE_DEVICES calls them.
    size
        Number of processes.
    own
        Whether each process sees its own GPU only.
    options
        For the members.
    timeout
        Seconds that the start may take.
    """

    def __init__(
        self, member: str, gpus: Sequence[str], *, size: int, own: bool, options: dict[str, Any], timeout: float
    ) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            with _visible([gpus[rank]] if own else gpus):
                process = context.Process(target=_serve, args=(theirs, os.getpid(), member, rank, size, port, options))
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            answers = self._answers(timeout)
            failures = [answer["failure"] for answer in answers if "failure" in answer]
            if failures:
                raise TeamError(f"did not start: {failures[0]}")
        except BaseException:
            self.kill()
            raise
        self.info: dict[str, Any] = answers[0]

    def ask(self, case: Any, timeout: float) -> tuple[dict[str, Any], bool]:
        """Return what was measured, the slowest rank in each repetition; and whether the team can go on."""
        for pipe in self._pipes:
            pipe.send(case)
        answers = self._answers(timeout)
        failures = [answer["failure"] for answer in answers if "failure" in answer]
        if failures:
            # If not all have failed, they no longer agree on where they are.
            fine = len(failures) == len(answers) and not any(answer.get("broken") for answer in answers)
            return {"failure": failures[0]}, fine
        seconds = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        return answers[0] | {"seconds": seconds}, True

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        """Return what all ranks say."""
        waiting = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            pipes = [self._pipes[rank] for rank in waiting.values()]
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                told = [answer["failure"] for answer in answers.values() if "failure" in answer]
                raise TeamError(told[0] if told else f"no answer within {timeout:.0f} s from {len(waiting)} processes")
            for pipe in ready:
                rank = waiting.pop(id(pipe))
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    code = self._processes[rank].exitcode
                    raise TeamError(f"process {rank} died with exit code {code}") from None
                if "failure" in answers[rank]:
                    deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Let the processes end; kill those that do not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + _CLOSING
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()


class Crew:
    """The team that cases are asked of: started for the first one, and again where one has ended it.

    Parameters
    ----------
    start
        Makes the team.
    timeout
        Seconds that a case may take.
    end
        When no case is begun any more (`time.time`).
    """

    def __init__(self, start: Callable[[], Team], timeout: float, end: float) -> None:
        self._start, self._timeout, self._end = start, timeout, end
        self._team: Team | None = None
        self._hopeless = ""
        self._ended: list[tuple[str, str]] = []

    def ask(self, case: Any) -> dict[str, Any]:
        """Return what was measured, or the failure, of a frozen dataclass with `peer`, `variant` and `deadline`."""
        if time.time() >= self._end:
            return {"failure": NO_TIME}
        if self._ended.count((case.peer, case.variant)) >= _MOST_ENDS:
            return {"failure": f"skipped: this variant has ended its processes {_MOST_ENDS} times"}
        if self._team is None and not self._hopeless:
            try:
                self._team = self._start()
            except TeamError as error:
                self._hopeless = str(error)
        if self._team is None:
            return {"failure": self._hopeless}
        timeout = min(self._timeout, self._end + 30 - time.time())
        try:
            asked = dataclasses.replace(case, deadline=time.time() + 0.8 * timeout)
            answer, fine = self._team.ask(asked, timeout)
        except (TeamError, OSError) as error:
            answer, fine = {"failure": describe(error) if isinstance(error, OSError) else str(error)}, False
        if not fine:
            self._ended.append((case.peer, case.variant))
            self._team.kill()
            self._team = None
        return answer

    def close(self) -> None:
        """Let the team go."""
        if self._team is not None:
            self._team.close()


def in_rounds(
    cases: Sequence[Case], ask: Callable[[Case], dict[str, Any]], rounds: int
) -> list[tuple[Case, dict[str, Any]]]:
    """Have the cases of one product take turns, so that what drifts is the same for all; return their answers.

    In each round the next one comes first. Who takes more than twice as long as the best, or fails, has one turn.
    """
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    best = float("inf")
    for turn in range(rounds):
        first = turn % len(cases)
        for case in (*cases[first:], *cases[:first]):
            if turn and (found[case][0].get("failure") or _seconds(found[case][0]) > _SLOW * best):
                continue
            found[case].append(ask(dataclasses.replace(case, repeat=-(-case.repeat // rounds))))
        best = min(map(_seconds, (answers[0] for answers in found.values())))
    return [(case, _together(answers)) for case, answers in found.items()]


def _seconds(answer: dict[str, Any]) -> float:
    times = answer.get("run_seconds") or answer.get("seconds")
    return statistics.median(times) if times and not answer.get("failure") else float("inf")


def _together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several answers to one case as one; a failure of the first or a wrong result is one of all."""
    good = [answer for answer in answers if not answer.get("failure")]
    bad = [answer for answer in answers if answer.get("failure") not in (None, NO_TIME)]
    if bad or not good:
        return (bad or list(answers))[0]
    whole = dict(good[0])
    for answer in good[1:]:
        for name in ("seconds", "build_seconds", "run_seconds"):
            if name in whole:
                whole[name] = whole[name] + answer[name]
        more = answer.get("timings", {})
        whole["timings"] = {name: times + more.get(name, []) for name, times in whole.get("timings", {}).items()}
    return whole


def _serve(pipe: Connection, parent: int, name: str, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
    """Run in a process: make the member, then measure what is asked for."""
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        module, _, member = name.partition(":")
        peer: Member = getattr(importlib.import_module(module), member)(rank, size, port, options)
    except BaseException as error:
        pipe.send(_failed(error, rank))
        _leave()
    pipe.send(peer.info)
    while True:
        try:
            case = pipe.recv()
        except (EOFError, OSError):
            case = None
        if case is None:
            break
        answer: dict[str, Any] = {}
        try:
            answer = peer.measure(case)
        except BaseException as error:
            answer = _failed(error, rank)
        # Only now is what the failed measurement held free again.
        gc.collect()
        if "failure" in answer:
            answer["broken"] = not peer.healthy()
        pipe.send(answer)
    with contextlib.suppress(Exception):
        peer.close()
    _leave()


def _failed(error: BaseException, rank: int) -> dict[str, Any]:
    if rank == 0:
        traceback.print_exception(error, limit=-4)
    return {"failure": describe(error)}


def _leave() -> None:
    """End this process; what libraries do at exit can wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
