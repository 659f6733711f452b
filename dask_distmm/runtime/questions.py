"""The protocol between client, or task, and scheduler: every message, its operation, its fields and their types.

::

    client     RosterQuestion, ProgressQuestion, Free, FreeReplicas      -> scheduler
    task       Supported                                                 -> scheduler

`dask_distmm.runtime.wire` sends and checks them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dask_distmm.runtime.messages import Seconds
from dask_distmm.runtime.wire import Call, Reply


@dataclasses.dataclass(frozen=True)
class RosterReply(Reply):
    """The workers that would multiply, and the places of chunks."""

    # Names of the engines that could multiply.
    engines: Sequence[str] = ()
    # The workers that would multiply, and others that hold chunks, as `Worker.to_wire` gives them.
    workers: Sequence[Any] = ()
    sources: Sequence[Any] = ()
    # For each array that was asked for the index into ``[*workers, *sources]`` of each chunk's holder, as int32; None
    # where not all chunks are in memory.
    placed: Sequence[bytes | None] = ()
    # Addresses of ranks that have a communicator already.
    groups: Sequence[Sequence[str]] = ()


@dataclasses.dataclass(frozen=True)
class RosterQuestion(Call[RosterReply]):
    """A client asks who would multiply for a demand (`Demand.to_wire`), and where the chunks of some arrays are.

    `counts` says how many chunks each of the arrays `names` has along its axes.
    """

    operation, answer = "distmm_roster", RosterReply
    demand: Sequence[Any]
    names: Sequence[str] = ()
    counts: Sequence[Sequence[int]] = ()


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

    # Whether the scheduler has all the tasks that were asked for (a graph may still be on its way), and for each
    # multiply the fields of its `ProgressLine`, in their order.
    known: bool = False
    found: Sequence[Sequence[Any]] = ()


@dataclasses.dataclass(frozen=True)
class ProgressQuestion(Call[ProgressReply]):
    """A client asks how far the multiplies `names` are, or where that is None those that the tasks `keys` need."""

    operation, answer = "distmm_progress", ProgressReply
    names: Sequence[str] | None = None
    keys: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class Freed(Reply):
    """So many groups, or replicas of so many arrays, were freed."""

    count: int = 0


@dataclasses.dataclass(frozen=True)
class Free(Call[Freed]):
    """A client has all groups freed, each within a time of `grace` (seconds)."""

    operation, answer = "distmm_free", Freed
    grace: Seconds


@dataclasses.dataclass(frozen=True)
class FreeReplicas(Call[Freed]):
    """A client has the replicas of the arrays `names` freed, of all arrays where that is None."""

    operation, answer = "distmm_free_replicas", Freed
    names: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Supported(Call[Reply]):
    """A barrier that runs as a task asks whether the scheduler can take it; else the error says what is lacking."""

    operation = "distmm_supported"
