"""Errors as plain types, for messages: what the scheduler answers, and what is raised again from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask_distmm.errors import (
    DistMMError,
    EngineError,
    MissingEngineError,
    NoWorkersError,
    PlanError,
    ProjectedMemoryError,
    RunFailedError,
)

__all__ = ["as_plain", "rebuild"]


def as_plain(error: DistMMError) -> dict[str, Any]:
    """Return an error as a dict of plain types."""
    message = error.args[0] if isinstance(error, RunFailedError) else str(error)
    answer: dict[str, Any] = {"status": "failed", "kind": type(error).__name__, "message": message}
    if isinstance(error, ProjectedMemoryError):
        answer |= {"projected": error.projected, "limit": error.limit}
    if isinstance(error, RunFailedError):
        answer |= {"run_id": error.run_id, "phase": error.phase, "ranks": error.ranks}
        answer["history"] = error.history
    return answer


def rebuild(answer: Mapping[str, Any]) -> DistMMError:
    """Make the typed error again from what `as_plain` gave."""
    kind, message = answer["kind"], answer["message"]
    if kind == "ProjectedMemoryError":
        return ProjectedMemoryError(message, answer["projected"], answer["limit"])
    if kind == "RunFailedError":
        return RunFailedError(message, answer["run_id"], answer["phase"], answer["ranks"], answer["history"])
    kinds = {found.__name__: found for found in (PlanError, EngineError, MissingEngineError, NoWorkersError)}
    return kinds.get(kind, DistMMError)(message)
