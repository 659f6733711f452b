"""Differences between workers, as text. Pure."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any


def short(addresses: Sequence[str], most: int = 3) -> str:
    """Return some addresses as text, and how many more there are."""
    more = len(addresses) - most
    return ", ".join(addresses[:most]) + (f" and {more} more" if more > 0 else "")


def differing(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the workers that have each value, by value as text; the most common first."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for who, value in values.items():
        found["none" if value is None else str(value)].append(who)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))
