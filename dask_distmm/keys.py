"""The names of tasks, from which scheduler and workers know which multiply a task belongs to.

For a result array called ``matmul-3f...`` there are

- ``("distmm-stage-a-matmul-3f...", i, j)``: contribute, one for each chunk of A, and so for B;
- ``"distmm-barrier-matmul-3f..."``: the barrier;
- ``("matmul-3f...", i, j)``: collect, one for each chunk of the result.

``("distmm-tile-7a...", i, j)`` is a chunk that was laid out by hand on a certain worker.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "barrier_key",
    "barrier_name",
    "is_output",
    "is_tile",
    "output_name",
    "parse_stage_key",
    "stage_name",
    "tile_name",
]

_STAGE, _BARRIER, _TILE = "distmm-stage-", "distmm-barrier-", "distmm-tile-"


def stage_name(name: str, operand: str) -> str:
    """Return the first part of the keys of contribute tasks of an operand."""
    return f"{_STAGE}{operand}-{name}"


def parse_stage_key(key: Any) -> tuple[str, str, tuple[int, int]] | None:
    """Return (name of the multiply, operand, (i, j)) of a contribute task's key, or None for others."""
    if not (isinstance(key, tuple) and len(key) == 3 and isinstance(key[0], str) and key[0].startswith(_STAGE)):
        return None
    operand, name = key[0][len(_STAGE) :].split("-", 1)
    return name, operand, (key[1], key[2])


def output_name(name: str, output: str) -> str:
    """Return the name of D's array (for ``""``) or of an auxiliary output's."""
    return f"{name}-{output}" if output else name


def is_output(name: str, found: Any) -> bool:
    """Whether the first part of a key is that of D or of an auxiliary output of the multiply called `name`."""
    return isinstance(found, str) and (found == name or found.startswith(f"{name}-"))


def barrier_key(name: str) -> str:
    """Return the key of the barrier of the multiply called `name`."""
    return _BARRIER + name


def barrier_name(key: Any) -> str | None:
    """Return the name of the multiply whose barrier has this key, or None for other keys."""
    return key[len(_BARRIER) :] if isinstance(key, str) and key.startswith(_BARRIER) else None


def tile_name(token: str) -> str:
    """Return the name of an array that is laid out by hand."""
    return _TILE + token


def is_tile(key: Any) -> bool:
    """Whether this is the key of a chunk that was laid out by hand."""
    return isinstance(key, tuple) and isinstance(key[0], str) and key[0].startswith(_TILE)
