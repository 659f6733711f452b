"""The names of tasks, from which scheduler and workers know which multiply a task belongs to.

For a result array called ``matmul-3f...`` there are

- ``("distmm-stage-a-matmul-3f...", i, j)``: contribute, one for each chunk of A, and so for B;
- ``"distmm-barrier-matmul-3f..."``: the barrier;
- ``("matmul-3f...", i, j)``: collect, one for each chunk of the result.

``("distmm-tile-7a...", i, j)`` is a chunk that was laid out by hand on a certain worker.

A product of a group that is multiplied by plain tasks is called ``distmm-group-c-00012-3f...``: a letter for how long
a task takes (Dask keeps average times by names without their numbers), and its place in the order.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = [
    "GROUP_PREFIX",
    "barrier_key",
    "barrier_name",
    "group_name",
    "is_output",
    "is_tile",
    "output_name",
    "parse_group_key",
    "parse_stage_key",
    "stage_name",
    "tile_name",
]

GROUP_PREFIX = "distmm-group-"
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


def group_name(token: str, rank: int, seconds: float) -> str:
    """Return the array name of a product of a group: `rank` in the order, a task of it takes so many seconds."""
    size = "abcdefgh"[min(7, max(0, math.ceil(math.log(max(seconds, 1e-9) / 1e-3, 4))))]
    return f"{GROUP_PREFIX}{size}-{rank:05d}-{token}"


def parse_group_key(key: Any) -> int | None:
    """Return the place in the order of a task of a group's product, or None for others."""
    if not (isinstance(key, tuple) and len(key) == 3 and isinstance(key[0], str) and key[0].startswith(GROUP_PREFIX)):
        return None
    return int(key[0].split("-")[3])
