"""Where the chunks of D are after a run: one that is done, or one that went on without some of its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dask_distmm.errors import ProtocolError
from dask_distmm.plan import Plan, Problem, restrict

__all__ = ["Result", "Survivors", "of_survivors", "together"]


@dataclasses.dataclass(frozen=True)
class Result:
    """Chunks of D that workers hold.

    Parameters
    ----------
    run_id
        The run under whose number they hold them.
    shape
        Rows and columns of chunks of D.
    holders
        For chunks by number: the address of its worker.
    participants
        Workers that know of the run.
    """

    run_id: int
    shape: tuple[int, int]
    holders: dict[int, str]
    participants: frozenset[str]

    @property
    def missing(self) -> list[int]:
        """Numbers of the chunks that nobody holds."""
        return [index for index in range(self.shape[0] * self.shape[1]) if index not in self.holders]

    @property
    def workers(self) -> frozenset[str]:
        """Addresses of all that hold chunks."""
        return frozenset(self.holders.values())


class Survivors(dict[str, Result]):
    """For multiplies by name that start again: what survivors of the last run hold of D.

    Parameters
    ----------
    tell
        Sends a message to the `WorkerSide` of some addresses.
    """

    def __init__(self, tell: Callable[[Sequence[str], dict[str, Any]], None]) -> None:
        super().__init__()
        self._tell = tell

    def left(self, problem: Problem) -> tuple[Result | None, Problem | None]:
        """Return what survivors hold of a multiply, and what is left to do; None for nothing."""
        kept = self.get(problem.name)
        if kept is None:
            return None, problem
        missing = kept.missing
        part = restrict(problem, missing) if missing else None
        if missing and part is None:
            self.discard(problem.name)
            return None, problem
        return kept, part

    def discard(self, name: str) -> None:
        """Have survivors drop what they hold of a multiply."""
        kept = self.pop(name, None)
        if kept is not None:
            self._tell(sorted(kept.participants), {"op": "distmm-forget", "run_id": kept.run_id, "name": None})

    def lose(self, address: str) -> None:
        """Forget what a worker held that is gone."""
        for kept in self.values():
            for index in [index for index, holder in kept.holders.items() if holder == address]:
                del kept.holders[index]


def of_survivors(
    run_id: int, made: Plan, answers: Mapping[str, Mapping[str, Any]], gone: Iterable[str], participants: frozenset[str]
) -> Result:
    """Return what there is of D after a run without some of its ranks.

    Raises
    ------
    ProtocolError
        A rank names chunks that there are not.
    """
    missing = {index for answer in answers.values() for index in answer["missing"]}
    if not missing <= set(range(len(made.owners))):
        raise ProtocolError(f"chunks {sorted(missing)} are said to be missing of {len(made.owners)}")
    dead = set(gone)
    holders = {i: address for i, address in _holders(made).items() if i not in missing and address not in dead}
    return Result(run_id, made.problem.chunk_counts("d"), holders, participants - dead)


def together(run_id: int, made: Plan, participants: frozenset[str], kept: Result | None) -> Result:
    """Return where all of D is after a run, which may have done what was left of an earlier one.

    Parameters
    ----------
    run_id, made, participants
        Of the run.
    kept
        What the earlier one has left.
    """
    mine = _holders(made)
    if kept is None:
        return Result(run_id, made.problem.chunk_counts("d"), mine, participants)
    return Result(run_id, kept.shape, kept.holders | mine, participants | kept.participants)


def _holders(made: Plan) -> dict[int, str]:
    """Return the address that has each chunk of D after a run, by the number that it has for the user."""
    owners = [made.workers[rank] for rank in made.owners.tolist()]
    return dict(zip(made.problem.every_chunk("d").tolist(), owners, strict=True))
