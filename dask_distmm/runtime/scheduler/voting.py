"""One question to all participants of a run: asked at once; the first failure, or the end of the run, ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.metrics import time

from dask_distmm.errors import EngineError, MatrixError, RunFailedError, in_words
from dask_distmm.installing import install_command
from dask_distmm.runtime.messages import Vote
from dask_distmm.runtime.run import Lost, Released, Replan, Run, TaskFailed
from dask_distmm.runtime.wire import Reply

if TYPE_CHECKING:
    from distributed import Scheduler

A = TypeVar("A", bound=Reply)

# Number of failed ranks that a message names; the error's attribute `ranks` has all.
_NAMED = 8
# How often the scheduler looks whether a run makes progress (seconds).
_LOOK = 0.5


async def ask_all(
    scheduler: Scheduler,
    run: Run,
    ask: Callable[[str], Awaitable[A | None]],
    ended: Awaitable[None],
    lose: Callable[[Run, str], bool],
    *,
    timeout: float | None = None,
    silence: float | None = None,
) -> dict[str, A]:
    """Ask every participant; return their answers by address, when all that are not gone have answered well."""
    tasks: dict[asyncio.Future[Any], str] = {asyncio.ensure_future(ask(a)): a for a in run.participants}
    over = asyncio.ensure_future(ended)
    answers: dict[str, A] = {}
    deadline = None if timeout is None else time() + timeout
    try:
        pending: set[asyncio.Future[Any]] = {*tasks, over}
        while run.waiting_for:
            left = _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time()))
            finished, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            raise_if_ended(run)
            for task in finished & tasks.keys():
                address = tasks[task]
                if address in run.gone or (isinstance(task.exception(), OSError) and lose(run, address)):
                    continue
                answers[address] = _judge(run, address, task)
                run.answer(address, run.run_id)
                run.moved = time()
            if deadline is not None and time() >= deadline and run.waiting_for:
                reason = f"no answer within {timeout:g} s (config distmm.timeouts.vote)"
                run.unresponsive.update(run.waiting_for)
                raise failed(run, reason, dict.fromkeys(run.waiting_for, reason))
            if silence is None:
                continue
            seen = {a: scheduler.workers[a].last_seen for a in run.participants if a in scheduler.workers}
            if silent := run.silent(seen, time(), silence):
                reason = f"no sign of life, and no progress of the run, for {silence:g} s (distmm.timeouts.silence)"
                run.unresponsive.update(silent)
                raise failed(run, reason, dict.fromkeys(silent, reason))
        return {address: answer for address, answer in answers.items() if address not in run.gone}
    finally:
        for task in (*tasks, over):
            task.cancel()
        await asyncio.gather(*tasks, over, return_exceptions=True)


def raise_if_ended(run: Run) -> None:
    """Raise `Lost` or `Released` if the run was ended from outside."""
    if run.phase == "failed":
        if run.released:
            raise Released
        reasons = "; ".join(f"{address}: {reason}" for address, reason in run.failures.items())
        raise Lost(reasons)


def _judge(run: Run, address: str, task: asyncio.Future[A | None]) -> A:
    """Return a participant's good answer; raise the error that a bad one stands for."""
    error = task.exception()
    if isinstance(error, OSError):  # CommClosedError among them: the worker is going
        raise Lost(f"{address}: {error}") from error
    if error is not None:
        raise failed(run, in_words(error), {address: in_words(error)}) from error
    answer = task.result()
    if run.gone and (answer is None or answer.status != "OK"):
        raise Lost(f"{address} can't go on without {', '.join(sorted(run.gone))}")
    if answer is None:
        raise EngineError(
            f"worker {address} has chunks of this product and lacks dask_distmm; install it there and start it again "
            f"by {install_command(elsewhere=True)}, or take it out of the cluster: client.retire_workers([{address!r}])"
        )
    if answer.status == "OK":
        return answer
    if isinstance(answer, Vote):
        _judge_vote(address, answer)
    if answer.status == "lost":
        raise Lost(f"{address}: {answer.message}")
    if answer.status == "matrix":
        raise MatrixError(answer.message)
    if answer.status in ("source", "function"):
        raise TaskFailed(answer)
    detail = f"\n{answer.traceback}" if answer.traceback else ""
    raise failed(run, answer.message + detail, {address: answer.message})


def _judge_vote(address: str, vote: Vote) -> None:
    """Raise the error that a vote against a plan stands for."""
    if vote.status == "missing":
        raise Replan(f"{address} does not have {len(vote.keys)} chunks")
    if vote.status == "orders":
        raise Replan(f"chunks on {address} lie in the orders {vote.orders}", vote.orders)
    if vote.status == "no replicas":
        raise Lost(f"{address} no longer has replicas of {vote.names}", vote.names)


def failed(run: Run, reason: str, ranks: Mapping[str, str] | None = None) -> RunFailedError:
    """Return the error that says of a run in which phase it failed, where (reasons by address) and why."""
    named = sorted(ranks or ())
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    who = f" on {', '.join(named[:_NAMED])}{more}" if named else ""
    phase = run.failed_in or run.phase
    message = f"run {run.run_id} of {run.name} failed while {phase}{who}: {reason}"
    return RunFailedError(message, run.run_id, phase, ranks)
